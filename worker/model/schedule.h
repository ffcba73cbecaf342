/*
 * Learning rate and weight decay as pure functions of the samples consumed (Megatron's
 * OptimizerParamScheduler). Iterations are turned into samples by the caller: iterations * global
 * batch.
 *
 * n counts samples of *successful* steps. Iteration k (from 1) trains with mb_schedule_lr(n before
 * it), so a run with warmup starts at the initial rate. Megatron logs, with iteration k, the rate
 * that is set for iteration k + 1: log mb_schedule_lr(n after it). Threads: any.
 */
#ifndef MOBULA_WORKER_MODEL_SCHEDULE_H
#define MOBULA_WORKER_MODEL_SCHEDULE_H

#include <stdint.h>
#include "base/err.h"

enum mb_lr_style {
    MB_LR_CONSTANT,
    MB_LR_LINEAR,
    MB_LR_COSINE,
    MB_LR_INVERSE_SQRT,
    MB_LR_WSD /* warmup, stable, decay */
};

enum mb_wsd_style { MB_WSD_LINEAR, MB_WSD_COSINE, MB_WSD_EXPONENTIAL, MB_WSD_MINUS_SQRT };

enum mb_wd_style { MB_WD_CONSTANT, MB_WD_LINEAR, MB_WD_COSINE };

struct mb_schedule {
    enum mb_lr_style lr_style;
    double init_lr; /* at sample 0 of the warmup */
    double max_lr, min_lr;
    int64_t warmup_samples; /* < decay_samples */
    int64_t decay_samples;  /* rate is min_lr beyond */
    enum mb_wsd_style wsd_style;
    int64_t wsd_decay_samples; /* length of the final decay, WSD only */
    enum mb_wd_style wd_style;
    double start_wd, end_wd; /* equal with MB_WD_CONSTANT */
    int64_t wd_incr_samples; /* length of the ramp */
};

/* MB_EINVAL naming the Megatron argument at fault. */
int mb_schedule_check(const struct mb_schedule *s, struct mb_err *err);

double mb_schedule_lr(const struct mb_schedule *s, int64_t n_samples);
double mb_schedule_weight_decay(const struct mb_schedule *s, int64_t n_samples);

/* Names as --lr-decay-style, --lr-wsd-decay-style and --weight-decay-incr-style take them;
 * MB_EINVAL lists them. */
int mb_lr_style_parse(const char *s, enum mb_lr_style *out, struct mb_err *err);
int mb_wsd_style_parse(const char *s, enum mb_wsd_style *out, struct mb_err *err);
int mb_wd_style_parse(const char *s, enum mb_wd_style *out, struct mb_err *err);

#endif
