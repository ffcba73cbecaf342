/*
 * What a stage of a pipeline does next: Megatron-LM's 1F1B schedule, "one forward, one backward",
 * and with several chunks its interleaved one. Pure, but for init's memory.
 *
 * The layers of a model are spread over stages; the micro batches of a global batch pass through
 * them forward, and their gradients backward. A stage takes so many forward passes as there are
 * stages behind it, then one forward and one backward pass in turns, then what is left of backward
 * passes. So it keeps the activations of mb_pipeline_in_flight() micro batches at most, however
 * many there are, and of all stages' time (p - 1) / (m + p - 1) is spent waiting, with p stages and
 * m micro batches.
 *
 * Interleaved, a stage has v chunks of the layers, and micro batches go round the ring of stages v
 * times, p of them at a time. Passes are a v-th as long, so waiting is, too. A stage is 2 (p - rank
 * - 1) + (v - 1) p forward passes ahead (schedules.py of megatron-core), and keeps one more. There
 * a multiple of p micro batches is needed.
 *
 * What stages send each other is part of the list, in an order in which two neighbours meet each of
 * their transfers as the next one on both sides: it also ends where a send lasts until the peer
 * receives.
 */
#ifndef MOBULA_WORKER_PARALLEL_PIPELINE_H
#define MOBULA_WORKER_PARALLEL_PIPELINE_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum mb_pipeline_act {
    MB_PIPELINE_RECEIVE_INPUT, /* from the stage before; from the last where the first has chunks */
    MB_PIPELINE_FORWARD,
    MB_PIPELINE_SEND_OUTPUT,      /* to the next stage, as above */
    MB_PIPELINE_RECEIVE_GRADIENT, /* from the next stage, as above */
    MB_PIPELINE_BACKWARD,
    MB_PIPELINE_SEND_GRADIENT /* to the stage before, as above */
};

struct mb_pipeline_step {
    enum mb_pipeline_act act;
    uint64_t micro_batch; /* from 0 on */
    uint64_t chunk;       /* of the stage's, from 0 on */
    uint64_t slot;        /* which activations: below in_flight, free when it is taken */
    unsigned gradient;    /* which gradient: 0, with chunks 0 or 1 */
};

struct mb_pipeline_place {
    uint64_t stage, n_stages;
    uint64_t n_chunks; /* of each stage; 1: not interleaved */
};

enum { MB_PIPELINE_STEPS_MAX = 6 };

struct mb_pipeline {
    struct mb_pipeline_place at;
    uint64_t n_micro_batches;
    int only_forward;
    uint64_t pass;                                        /* the next one to be listed */
    struct mb_pipeline_step steps[MB_PIPELINE_STEPS_MAX]; /* of the one that is under way */
    size_t n_steps, part;
    uint64_t *holds; /* [n_slots] with chunks: a forward pass's number + 1; 0: free */
    uint64_t n_slots;
};

/* most: no more micro batches will be in a batch. MB_ENOMEM. */
int mb_pipeline_init(struct mb_pipeline *p, struct mb_pipeline_place at, uint64_t most,
                     struct mb_err *err);
void mb_pipeline_close(struct mb_pipeline *p);

/* only_forward: an evaluation, with two slots where there are chunks, else with one. */
void mb_pipeline_start(struct mb_pipeline *p, uint64_t n_micro_batches, int only_forward);
/* 0: there is nothing left to do. */
int mb_pipeline_next(struct mb_pipeline *p, struct mb_pipeline_step *out);

/* Micro batches, of each chunk, between the begin of their forward and the end of their backward
 * pass, at most; at least 1. */
uint64_t mb_pipeline_in_flight(struct mb_pipeline_place at, uint64_t n_micro_batches);

#endif
