/*
 * Removing older iterations from a directory that a foreign trainer saves into. Blocking: for a
 * worker thread.
 *
 * Whoever reads an iteration there for longer than one file takes holds a shared flock(2) on its
 * directory; besides, files that a process has open are seen as far as /proc tells.
 */
#ifndef MOBULA_AGENT_UPLOAD_EVICT_H
#define MOBULA_AGENT_UPLOAD_EVICT_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include "agent/upload/manifest.h"
#include "base/err.h"

struct mb_evict_list {
    int64_t *iterations; /* owned; descending */
    size_t n;
    int64_t named; /* by the tracker file; -1: none */
};

/* The iterations of dir up to newest. What is left of a removal that was killed is removed, unless
 * somebody still reads it: that is looked at again by the next listing. */
int mb_evict_list(const char *dir, int64_t newest, struct mb_evict_list *out, struct mb_err *err);
void mb_evict_list_close(struct mb_evict_list *l);

/* How it is known that all of an iteration is durable. Without a manifest the state has to be the
 * same; with one the files have to be those that it lists, by their sizes, and by their contents
 * where the state is another one or is not known. */
struct mb_evict_proof {
    const struct mb_manifest *manifest; /* in the store; NULL: deleted there */
    uint64_t state;                     /* mb_walk_state() of what was made durable; 0: not known */
};

/* Removes the iteration: it gets a hidden name first, so that nobody sees it in part. Gone already
 * is MB_OK. MB_ESTATE: somebody reads or writes it, or the tracker file names it; MB_EEXIST:
 * something else is there than was made durable; MB_ECANCELED: stop was set (it may be NULL). All
 * leave it as it was. */
int mb_evict(const char *dir, int64_t iteration, const struct mb_evict_proof *proof,
             const atomic_int *stop, struct mb_err *err);

/* A shared lock on a directory that is about to be read file by file: closing the descriptor ends
 * it. -1: it cannot be opened, or the file system has no locks for directories. */
int mb_evict_hold(const char *dir);

#endif
