/*
 * What a stage of a pipeline does next: Megatron-LM's 1F1B schedule, "one forward, one backward".
 * Pure.
 *
 * The layers of a model are spread over stages; the micro batches of a global batch pass through
 * them forward, and their gradients backward. A stage takes so many forward passes as there are
 * stages behind it, then one forward and one backward pass in turns, then what is left of backward
 * passes. So it keeps the activations of mb_pipeline_in_flight() micro batches at most, however
 * many there are, and of all stages' time (p - 1) / (m + p - 1) is spent waiting, with p stages and
 * m micro batches.
 *
 * What stages send each other is part of the list, in an order in which two neighbours meet each of
 * their transfers as the next one on both sides: it also ends where a send lasts until the peer
 * receives.
 */
#ifndef MOBULA_WORKER_PARALLEL_PIPELINE_H
#define MOBULA_WORKER_PARALLEL_PIPELINE_H

#include <stddef.h>
#include <stdint.h>

enum mb_pipeline_act {
    MB_PIPELINE_RECEIVE_INPUT, /* from the stage before */
    MB_PIPELINE_FORWARD,
    MB_PIPELINE_SEND_OUTPUT,      /* to the next stage */
    MB_PIPELINE_RECEIVE_GRADIENT, /* from the next stage */
    MB_PIPELINE_BACKWARD,
    MB_PIPELINE_SEND_GRADIENT /* to the stage before */
};

struct mb_pipeline_step {
    enum mb_pipeline_act act;
    uint64_t micro_batch; /* from 0 on */
};

struct mb_pipeline {
    uint32_t stage, n_stages;
    uint64_t n_micro_batches;
    int only_forward;
    uint64_t pass; /* the one that is under way */
    int part;      /* of it, the next one */
};

/* only_forward: an evaluation. */
void mb_pipeline_start(struct mb_pipeline *p, uint32_t stage, uint32_t n_stages,
                       uint64_t n_micro_batches, int only_forward);
/* 0: there is nothing left to do. */
int mb_pipeline_next(struct mb_pipeline *p, struct mb_pipeline_step *out);

/* Micro batches between the begin of their forward and the end of their backward pass, at most; at
 * least 1. */
uint64_t mb_pipeline_in_flight(uint32_t stage, uint32_t n_stages, uint64_t n_micro_batches);

#endif
