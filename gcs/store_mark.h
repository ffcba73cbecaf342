/*
 * The line beside a store file: the number of the last acknowledged batch and the boot that it was
 * written in, with a checksum, since a damaged boot id would be taken for another boot, whose power
 * loss may have taken the last batches. Any thread.
 */
#ifndef MOBULA_GCS_STORE_MARK_H
#define MOBULA_GCS_STORE_MARK_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum { STORE_MARK_BYTES = 62, STORE_BOOT_ID_SIZE = 37 };

/* The machine's, "" where it has none. */
void store_boot_id(char out[STORE_BOOT_ID_SIZE]);
void store_mark_format(int64_t batch, const char *boot_id, char out[STORE_MARK_BYTES + 1]);
/* Also of a line from before there were checksums. 0 or MB_ECORRUPT. */
int store_mark_parse(const char *text, size_t n, int64_t *batch, char boot_id[STORE_BOOT_ID_SIZE]);
/* *batch -1: the file is missing or empty. MB_ECORRUPT: it is no such line. */
int store_mark_read(const char *path, int64_t *batch, char boot_id[STORE_BOOT_ID_SIZE],
                    struct mb_err *err);

#endif
