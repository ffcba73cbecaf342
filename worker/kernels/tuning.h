/*
 * Choices that took time to find, kept in a file from one start to the next: a value of bytes for a
 * key of bytes, for one kind of device and one version of a library. The file is named after both
 * and lies in MOBULA_TUNING_CACHE, else in XDG_CACHE_HOME/mobula, else in ~/.cache/mobula; where
 * MOBULA_TUNING_CACHE is empty, or none of them is set, nothing is kept.
 *
 * Failure paths: a file that is damaged, or of another layout, counts as empty, and one that cannot
 * be read or written is left alone: each is one warning, never an error. Several processes may have
 * the same file: it is replaced as a whole, with what was in it by then, so that it is whole at any
 * time; of two that write at once the later one may lose what the other added, which is then found
 * again. Threads: one at a time.
 */
#ifndef MOBULA_WORKER_KERNELS_TUNING_H
#define MOBULA_WORKER_KERNELS_TUNING_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

struct mb_tuning;

/* device and version are what the values were found for. */
int mb_tuning_open(const char *device, uint64_t version, size_t key_bytes, size_t value_bytes,
                   struct mb_tuning **out, struct mb_err *err);
void mb_tuning_close(struct mb_tuning *t); /* NULL is legal */

/* The value, borrowed until the next call; NULL: there is none. */
const void *mb_tuning_find(const struct mb_tuning *t, const void *key);
/* Adds or replaces, and writes the file. */
void mb_tuning_add(struct mb_tuning *t, const void *key, const void *value);

#endif
