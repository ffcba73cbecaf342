/*
 * Files. Blocking: call from start-up code, from a worker thread or from programs without a loop;
 * never from the agent's loop for anything larger than a few kB.
 */
#ifndef MOBULA_BASE_FS_H
#define MOBULA_BASE_FS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include "base/buf.h"
#include "base/err.h"

/* "a/b" with one slash, owned by the caller; NULL when memory is out. An absolute b wins. */
char *mb_path_join(const char *a, const char *b);

/* mkdir -p. Existing directories are fine. */
int mb_fs_mkdir_p(const char *path, mode_t mode, struct mb_err *err);

/* Append the whole file to out, at most max_bytes (MB_EFULL beyond). MB_EINVAL: a silent pipe. */
int mb_fs_read(const char *path, size_t max_bytes, struct mb_buf *out, struct mb_err *err);

/* The file appears whole or not at all: temporary name in the same directory, write, fsync,
 * rename, fsync of the directory. */
int mb_fs_write_atomic(const char *path, const void *p, size_t n, mode_t mode, struct mb_err *err);

/* The same without the flushes, which a busy disk may take seconds for: readers, also after a kill
 * at any time, see the old file or the new one. After a power loss it may be either, empty or not
 * there: for what speaks of processes that are gone then. */
int mb_fs_replace(const char *path, const void *p, size_t n, mode_t mode, struct mb_err *err);

/* fsync of a directory, so that names in it survive power loss. */
int mb_fs_sync_dir(const char *path, struct mb_err *err);

/* write(2) until done. */
int mb_fs_write_all(int fd, const void *p, size_t n, struct mb_err *err);

/* The file from offset on: so many bytes, at most n, are a hole, which reads as zeros, or data.
 * What the file system does not tell is data. 0 only if n is. */
uint64_t mb_fs_stretch(int fd, uint64_t offset, uint64_t n, int *is_hole);

/* rm -rf, never following links, never into what is mounted in it: then the first such directory
 * ends it and is named. A missing path is success. */
int mb_fs_remove_tree(const char *path, struct mb_err *err);

int mb_fs_exists(const char *path); /* 1 or 0 */

/* Lets this process open as many files as the system allows it (the hard limit). Returns how many:
 * where raising is refused, as many as before. Called once, at the start. */
uint64_t mb_fs_open_files_max(void);

/* Directory of the running executable, owned by the caller: sibling programs are found by it. */
char *mb_fs_self_dir(struct mb_err *err);

#endif
