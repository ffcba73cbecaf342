/*
 * A zip whose entries are stored, as torch.save writes it: looked up by name and read in parts.
 * The directory at its end is what counts; 64-bit sizes are read. Nothing is ever inflated.
 * Blocking; one thread per object.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_MEGATRON_ZIP_H
#define MOBULA_WORKER_CHECKPOINT_MEGATRON_ZIP_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

struct mb_zip_entry {
    const char *name; /* owned by the zip */
    uint64_t at, n;   /* bytes of the zip */
    uint32_t crc32;   /* 0: torch did not compute it */
};

struct mb_zip;

#define MB_ZIP_TO_END UINT64_MAX /* as n */

/* MB_ENOENT, or MB_ECORRUPT and MB_EUNSUPPORTED naming the file and the entry. */
int mb_zip_open(const char *path, struct mb_zip **out, struct mb_err *err);
/* fd is taken, whatever is returned; name is for texts. */
int mb_zip_open_fd(const char *name, int fd, struct mb_zip **out, struct mb_err *err);
/* Of a file that is several, bytes [at, at + n). */
int mb_zip_open_part(const char *name, int fd, uint64_t at, uint64_t n, struct mb_zip **out,
                     struct mb_err *err);
/* Gives its descriptor back, so that thousands may be open: name has to be its path, by which each
 * read opens it anew, and MB_ECORRUPT if that is another file by then. */
int mb_zip_rest(struct mb_zip *z, struct mb_err *err);
void mb_zip_close(struct mb_zip *z); /* NULL is legal */

size_t mb_zip_n_entries(const struct mb_zip *z);
const struct mb_zip_entry *mb_zip_entry(const struct mb_zip *z, size_t i); /* as in the file */
const struct mb_zip_entry *mb_zip_find(const struct mb_zip *z, const char *name);
/* Bytes [offset, offset + n) of an entry; the range is the caller's promise. MB_ECORRUPT if the
 * file has become shorter. */
int mb_zip_read(const struct mb_zip *z, const struct mb_zip_entry *e, uint64_t offset, void *buf,
                size_t n, struct mb_err *err);
/* Reads all of e, or of all entries: MB_ECORRUPT if a checksum is another. */
int mb_zip_verify(const struct mb_zip *z, const struct mb_zip_entry *e, struct mb_err *err);
int mb_zip_verify_all(const struct mb_zip *z, struct mb_err *err);

#endif
