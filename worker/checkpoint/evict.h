/*
 * Which older checkpoints of a --save directory go when a new one is whole.
 *
 * Kept are the newest keep_last, every one whose iteration retain_interval divides (Megatron-LM's
 * --save-retain-interval), and what is not durable yet where something has to be. What the tracker
 * names is the newest and stays always. Blocking; any thread.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_EVICT_H
#define MOBULA_WORKER_CHECKPOINT_EVICT_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

struct mb_checkpoint_keep {
    int64_t keep_last;       /* 0: nothing goes */
    int64_t retain_interval; /* 0: none is kept for its number */
    /* 1: this one may go as far as the store is concerned; NULL: there is no store. */
    int (*is_durable)(void *arg, int64_t iteration);
    void *arg;
};

/* Pure. iterations[0..n) in any order become those that go, ascending; returns how many. newest is
 * what was saved just now; later ones (of a run that was further) are left alone. */
size_t mb_checkpoint_choose_evicted(const struct mb_checkpoint_keep *k, int64_t newest,
                                    int64_t *iterations, size_t n);

/* Removes them: each first gets a hidden name, so that none is seen in part. One rank of those that
 * share dir calls this. n_evicted counts what went also on failure. */
int mb_checkpoint_evict(const char *dir, const struct mb_checkpoint_keep *k, int64_t newest,
                        size_t *n_evicted, struct mb_err *err);

#endif
