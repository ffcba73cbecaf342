/*
 * Files of a directory that several runs, on several nodes, write to: an index cache.
 *
 * A file is written as PATH.tmp-HEX and renamed, so that it appears whole or not at all. Its writer
 * holds a lock on it (flock) until it has its name. A writer that was killed leaves it behind and
 * the lock goes with the process: whoever gets the lock of such a file removes it.
 *
 * What is assumed of a shared directory: that a lock holds on all nodes that write there, as on NFS
 * with its lock service, on Lustre with -o flock, on CephFS. Where there are no locks at all
 * nothing is removed. Where they hold on one node only (nolock, local_lock, localflock) a file that
 * another node is writing may go: its rename fails, which that run says, and it trains on with the
 * indices it has in memory. A file that has its name is never removed. Blocking; any thread.
 */
#ifndef MOBULA_WORKER_DATA_CACHE_FILES_H
#define MOBULA_WORKER_DATA_CACHE_FILES_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

/* Both parts, one after the other, fsynced. A failure leaves nothing. */
int mb_cache_file_write(const char *path, const void *head, size_t n_head, const void *body,
                        size_t n_body, struct mb_err *err);

/* Removes what writers that are gone have left unfinished in dir: *n_files of *n_bytes. What cannot
 * be looked at is left. MB_ENOENT: no such directory. */
int mb_cache_files_sweep(const char *dir, size_t *n_files, uint64_t *n_bytes, struct mb_err *err);

#endif
