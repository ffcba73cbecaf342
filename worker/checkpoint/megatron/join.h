/*
 * A checkpoint of Megatron-LM's as one of ours: its weights, arguments and counters, and its
 * optimizer, if that was taken. Blocking; any thread.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_MEGATRON_JOIN_H
#define MOBULA_WORKER_CHECKPOINT_MEGATRON_JOIN_H

#include "worker/checkpoint/weights.h"

/* w: of Megatron-LM's. Into dir, which is there and has none: iteration s->iteration, or 1 of a
 * state without one. */
int mb_megatron_join(struct mb_weights *w, const struct mb_checkpoint_state *s, const char *dir,
                     struct mb_err *err);

#endif
