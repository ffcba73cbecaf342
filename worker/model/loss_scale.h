/*
 * The factor of the loss in fp16 training, so that small gradients do not vanish: constant, or
 * dynamic as Megatron-LM's DynamicGradScaler (megatron/core/optimizer/grad_scaler.py) has it. After
 * an overflow the step is skipped; when `hysteresis` of them have been seen the factor is halved at
 * each further one, down to its minimum, where it stays. `window` steps in a row without one double
 * it and forgive the overflows before. Pure; any thread.
 */
#ifndef MOBULA_WORKER_MODEL_LOSS_SCALE_H
#define MOBULA_WORKER_MODEL_LOSS_SCALE_H

#include <stdint.h>
#include "base/err.h"

struct mb_loss_scale_config {
    int is_dynamic;
    double initial, min; /* is_dynamic 0: initial is the factor, min is not used */
    int64_t window;      /* steps */
    int64_t hysteresis;  /* overflows */
};

/* All of it goes into checkpoints. */
struct mb_loss_scale {
    double scale;
    int64_t n_good;   /* steps in a row without an overflow, below the window */
    int64_t patience; /* overflows that are still forgiven, as a number: at 0 and below none is */
};

/* MB_EINVAL with the argument's name. */
int mb_loss_scale_check(const struct mb_loss_scale_config *c, struct mb_err *err);
void mb_loss_scale_start(struct mb_loss_scale *s, const struct mb_loss_scale_config *c);
/* After a step: whether a gradient of it, on any rank, was not finite. */
void mb_loss_scale_update(struct mb_loss_scale *s, const struct mb_loss_scale_config *c,
                          int has_overflowed);

#endif
