/* Whole files for programs without the base library. libc only. */
#ifndef MOBULA_AGENT_SUPERVISE_FILE_H
#define MOBULA_AGENT_SUPERVISE_FILE_H

#include <stddef.h>

/* The file appears whole or not at all: a temporary name, with flush fsync, rename. Names are
 * relative to dir_fd (or AT_FDCWD). 0, or -1 with errno. */
int mb_file_replace(int dir_fd, const char *name, const void *p, size_t n, int flush);

/* All bytes and a NUL that is not counted, malloc'ed; NULL with errno (EFBIG beyond max_bytes). */
char *mb_file_read(int dir_fd, const char *name, size_t max_bytes, size_t *n_out);

#endif
