/* Zips of stored entries, made in memory: what torch.save's look like, for tests of the reader. */
#ifndef MOBULA_TESTS_UNIT_WORKER_STORED_ZIP_H
#define MOBULA_TESTS_UNIT_WORKER_STORED_ZIP_H

#include "base/buf.h"

struct stored_zip {
    struct mb_buf bytes, directory;
    size_t n;
};

/* An entry without a checksum. is_wide: its sizes and place stand in 64-bit fields. */
void stored_zip_put(struct stored_zip *z, const char *name, const void *p, size_t n, int is_wide);
/* The directory; the file is bytes. is_wide: it is found by 64-bit records. */
void stored_zip_end(struct stored_zip *z, int is_wide);
void stored_zip_close(struct stored_zip *z);
/* A file without a name that holds n bytes. */
int stored_zip_fd(const void *p, size_t n);

#endif
