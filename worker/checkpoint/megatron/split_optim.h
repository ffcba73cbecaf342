/*
 * What Megatron-LM's own optimizer loads: "optimizer" and "opt_param_scheduler" of a rank's file.
 * Pure.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_MEGATRON_SPLIT_OPTIM_H
#define MOBULA_WORKER_CHECKPOINT_MEGATRON_SPLIT_OPTIM_H

#include <jansson.h>
#include "worker/checkpoint/common.h"
#include "worker/checkpoint/safetensors.h"

struct mb_split_optim {
    const json_t *args; /* of the run */
    const struct mb_checkpoint_state *state;
    enum mb_st_dtype dtype; /* of the weights */
    int is_local; /* each parameter says its steps: torch's Adam, and not Transformer Engine's */
    const struct mb_st_tensor *params; /* of the rank, in the order of its model */
    size_t n_params;
};

/* Tensors that a parameter has in the file: exp_avg, exp_avg_sq and, of halves, the fp32 weight.
 * They follow all parameters, those of one behind those of another; the loss scale's is the last.
 */
size_t mb_split_optim_per_param(enum mb_st_dtype dtype);
int mb_split_optim_has_scale(const struct mb_split_optim *o);

/* Whether the run's settings can be said: MB_EUNSUPPORTED and MB_ECORRUPT name the argument, of
 * name. */
int mb_split_optim_check(const char *name, const json_t *args, struct mb_err *err);
/* As mb_torch_megatron's more; to be released by the caller. NULL: out of memory. */
json_t *mb_split_optim_make(const struct mb_split_optim *o);

#endif
