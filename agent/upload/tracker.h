/*
 * Watches latest_checkpointed_iteration.txt of a checkpoint directory that a foreign trainer writes
 * (Megatron-LM). The file is written with plain open and write, so it may be seen empty or half:
 * only a whole integer counts, when its writer has closed the file (inotify) or when it has not
 * changed between two looks, and only an iteration whose directory is there. Loop-thread only.
 */
#ifndef MOBULA_AGENT_UPLOAD_TRACKER_H
#define MOBULA_AGENT_UPLOAD_TRACKER_H

#include <stdint.h>
#include <uv.h>
#include "agent/upload/walk.h"
#include "base/err.h"

struct mb_tracker;

/* A newly sealed iteration: its directory and all files in it, borrowed. */
typedef void (*mb_tracker_cb)(void *arg, int64_t iteration, const char *dir, struct mb_walk *w);

/* What the tracker said when the watch was started first is old and not reported; state_path
 * remembers it across restarts of the agent. */
int mb_tracker_start(uv_loop_t *loop, const char *dir, const char *state_path, mb_tracker_cb cb,
                     void *arg, struct mb_tracker **out, struct mb_err *err);
/* Now, calls cb: the writer has ended, so what is there is whole. NULL is legal. */
void mb_tracker_look(struct mb_tracker *t);
void mb_tracker_stop(struct mb_tracker *t); /* NULL is legal */

#endif
