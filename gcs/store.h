/*
 * The head's tables behind one interface: every record is (table, namespace, key) -> bytes.
 *
 * Reads come from a mirror in memory that is loaded at open; writes change the mirror at once and
 * reach the disk in batches on a writer thread. The callback of a write runs on the loop after the
 * commit: what was acknowledged survives SIGKILL, and power loss too when the store was opened with
 * sync_full. When a batch cannot be committed, every write that was not acknowledged yet is undone
 * in the mirror and its callback gets the error.
 * Loop-thread only. Bounds: MB_TABLES_QUEUE_MAX writes and MB_TABLES_QUEUE_BYTES_MAX bytes may wait
 * (MB_EFULL beyond).
 */
#ifndef MOBULA_GCS_STORE_H
#define MOBULA_GCS_STORE_H

#include <stddef.h>
#include <stdint.h>
#include <uv.h>
#include "base/err.h"

enum mb_tables_table {
    MB_TABLES_META,   /* cluster id, next job number */
    MB_TABLES_KV,     /* internal KV, by namespace */
    MB_TABLES_NODES,  /* node id -> GcsNodeInfo */
    MB_TABLES_JOBS,   /* job id -> JobTableData */
    MB_TABLES_GROUPS, /* placement group id -> PlacementGroupTableData */
    MB_TABLES_TABLES
};

enum { MB_TABLES_QUEUE_MAX = 100000, MB_TABLES_QUEUE_BYTES_MAX = 512 << 20 };

struct mb_tables;

/* Borrowed bytes. */
struct mb_blob {
    const void *p;
    size_t n;
};
struct mb_blob mb_blob_str(const char *s); /* the text without its NUL */

/* Opens or creates the file and loads it; blocks. MB_ECORRUPT: the file is no store of ours, is
 * damaged or has lost writes that were acknowledged (it is left as it is); MB_EEXIST: another head
 * has it open; MB_EUNSUPPORTED: written by a newer version; MB_EDENIED: it cannot be written.
 * Beside PATH lie SQLite's PATH-wal and PATH-batch, the number of the last acknowledged batch. */
int mb_tables_open_sqlite(uv_loop_t *loop, const char *path, int sync_full, struct mb_tables **out,
                          struct mb_err *err);

/* Kept in memory only: a write is acknowledged at the next turn of the loop, and gone with the
 * process. */
int mb_tables_open_memory(uv_loop_t *loop, struct mb_tables **out, struct mb_err *err);

/* Commits what waits, runs its callbacks, then cb; s is freed. */
void mb_tables_close(struct mb_tables *s, void (*cb)(void *arg), void *arg);

/* err->code MB_OK: committed. Never NULL. */
typedef void (*mb_tables_cb)(void *arg, const struct mb_err *err);

/* Insert or replace. On a negative return nothing changed and cb does not run; cb may be NULL. */
int mb_tables_put(struct mb_tables *s, enum mb_tables_table table, struct mb_blob ns,
                  struct mb_blob key, struct mb_blob value, mb_tables_cb cb, void *arg,
                  struct mb_err *err);
/* Deleting what is not there is a success. */
int mb_tables_del(struct mb_tables *s, enum mb_tables_table table, struct mb_blob ns,
                  struct mb_blob key, mb_tables_cb cb, void *arg, struct mb_err *err);
/* cb runs when everything written so far is committed. */
int mb_tables_barrier(struct mb_tables *s, mb_tables_cb cb, void *arg, struct mb_err *err);

/* 1 and the value (borrowed until the next write), or 0. value may be NULL. */
int mb_tables_get(const struct mb_tables *s, enum mb_tables_table table, struct mb_blob ns,
                  struct mb_blob key, struct mb_blob *value);

/* Every record of a namespace whose key starts with prefix, in key order, until visit returns
 * non-zero. visit must not write. Returns the last value of visit. */
typedef int (*mb_tables_visit)(void *arg, struct mb_blob key, struct mb_blob value);
int mb_tables_each(const struct mb_tables *s, enum mb_tables_table table, struct mb_blob ns,
                   struct mb_blob prefix, mb_tables_visit visit, void *arg);
size_t mb_tables_count(const struct mb_tables *s, enum mb_tables_table table);

#endif
