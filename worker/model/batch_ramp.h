/*
 * --rampup-batch-size START INCREMENT SAMPLES: the global batch begins small and grows in equal
 * steps to its full size while SAMPLES samples are consumed (Megatron-LM's microbatch calculator).
 * Pure.
 */
#ifndef MOBULA_WORKER_MODEL_BATCH_RAMP_H
#define MOBULA_WORKER_MODEL_BATCH_RAMP_H

#include <stdint.h>
#include "base/err.h"

struct mb_batch_ramp {
    int64_t start, increment, samples; /* start 0: there is no ramp */
    int64_t full;                      /* the batch at its end */
};

/* slice: samples that all ranks take at once, which every batch size must be a multiple of.
 * MB_EINVAL with Megatron-LM's text. */
int mb_batch_ramp_check(const struct mb_batch_ramp *r, int64_t micro_batch, int64_t data_parallel,
                        struct mb_err *err);
/* The batch of the iteration that begins after so many samples. */
int64_t mb_batch_ramp_at(const struct mb_batch_ramp *r, int64_t consumed);
/* Iterations of a training of so many samples; those that fill no batch are dropped. */
int64_t mb_batch_ramp_iterations(const struct mb_batch_ramp *r, int64_t train_samples);

#endif
