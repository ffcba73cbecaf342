/*
 * What the watch of a tracker file remembers, also over a restart of the agent: the iteration that
 * was named last, and the directories of newer ones. No loop, no clock.
 */
#ifndef MOBULA_AGENT_UPLOAD_TRACKER_MEMORY_H
#define MOBULA_AGENT_UPLOAD_TRACKER_MEMORY_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

struct mb_tracker_dir {
    int64_t iteration;
    int is_old;     /* it was there before the attempt; that one is no save of it */
    uint64_t state; /* is_old: mb_walk_state() as it was then; 0: not known */
};

struct mb_tracker_memory {
    int64_t known;               /* -1: none was named */
    uint64_t known_state;        /* mb_walk_state() of its directory then; 0: not known */
    struct mb_tracker_dir *dirs; /* of newer iterations, ascending */
    size_t n, cap;
};

/* MB_ENOENT: nothing was written yet. MB_ECORRUPT. is_whole: 0 when an older version wrote it,
 * which noted no directories. */
int mb_tracker_memory_read(struct mb_tracker_memory *m, const char *path, int *is_whole,
                           struct mb_err *err);
int mb_tracker_memory_write(const struct mb_tracker_memory *m, const char *path,
                            struct mb_err *err);
void mb_tracker_memory_close(struct mb_tracker_memory *m);

const struct mb_tracker_dir *mb_tracker_memory_find(const struct mb_tracker_memory *m,
                                                    int64_t iteration); /* NULL: not there */
int mb_tracker_memory_put(struct mb_tracker_memory *m, struct mb_tracker_dir dir); /* MB_ENOMEM */
void mb_tracker_memory_drop(struct mb_tracker_memory *m, int64_t iteration);
/* It is known from now on; directories up to it are forgotten. */
void mb_tracker_memory_advance(struct mb_tracker_memory *m, int64_t known);

#endif
