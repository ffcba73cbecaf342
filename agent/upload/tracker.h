/*
 * Watches latest_checkpointed_iteration.txt of a checkpoint directory that a foreign trainer writes
 * (Megatron-LM). The file is written with plain open and write, so it may be seen empty or half:
 * only a whole integer counts, when its writer has closed the file (inotify) or when it has not
 * changed between two looks, and only an iteration whose directory is there. With it count those
 * that it named since the last look. Loop-thread only.
 */
#ifndef MOBULA_AGENT_UPLOAD_TRACKER_H
#define MOBULA_AGENT_UPLOAD_TRACKER_H

#include <stdint.h>
#include <uv.h>
#include "agent/upload/walk.h"
#include "base/err.h"

struct mb_tracker;

struct mb_tracker_ops {
    /* A newly sealed iteration, in their order: its directory and all files in it, borrowed. */
    void (*on_sealed)(void *arg, int64_t iteration, const char *dir, struct mb_walk *w);
    /* One that was saved, and cannot be sealed any more; why, in words. */
    void (*on_lost)(void *arg, int64_t iteration, const char *why);
};

/* What the tracker said when the watch was started first is old and not reported; state_path
 * remembers it, and all that was reported, across restarts of the agent. MB_ECORRUPT: it is
 * damaged. */
int mb_tracker_start(uv_loop_t *loop, const char *dir, const char *state_path,
                     const struct mb_tracker_ops *ops, void *arg, struct mb_tracker **out,
                     struct mb_err *err);
/* Now, calls ops: a writer has ended, so what is there is whole. is_last: there is no other one
 * left that could write what the tracker names. NULL is legal. */
void mb_tracker_look(struct mb_tracker *t, int is_last);
void mb_tracker_stop(struct mb_tracker *t); /* NULL is legal */

#endif
