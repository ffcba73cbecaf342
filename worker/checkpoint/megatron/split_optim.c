/*
 *  1. Parameters are numbered group by group: those with weight decay, then those without, as
 *     megatron-core does; within a group in the order of the model.
 *  2. A parameter's state are three tensors at most. Steps are said by each group, as Transformer
 *     Engine's Adam has it, which takes nothing but tensors of a parameter; where it is torch's
 * that will load it, by each parameter.
 *  3. The scheduler's numbers are samples.
 * Failures: two learning rates, which releases put into groups of different names; an argument of
 * the schedule that the checkpoint does not have.
 */
#include "worker/checkpoint/megatron/split_optim.h"

#include <stdio.h>

enum { GROUPS = 2 /* with weight decay, without */ };

static int is_in_group(const struct mb_st_tensor *t, int g)
{
    return (t->n_dims == 1) == g;
}

size_t mb_split_optim_per_param(enum mb_st_dtype dtype)
{
    return dtype == MB_ST_F32 ? 2 : 3;
}

int mb_split_optim_has_scale(const struct mb_split_optim *o)
{
    return o->dtype == MB_ST_F16 && o->state->has_grad_scaler;
}

int mb_split_optim_check(const char *name, const json_t *args, struct mb_err *err)
{
    static const char *const NUMBERS[] = {"lr", "min_lr", "start_weight_decay", "end_weight_decay"};
    static const char *const TEXTS[] = {"lr_decay_style", "weight_decay_incr_style"};
    const char *missing = NULL;
    if (json_is_number(json_object_get(args, "decoupled_lr"))) {
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "%s: an optimizer with decoupled_lr is not written for Megatron-LM; "
                          "--no-load-optim converts it without",
                          name);
    }
    for (size_t i = 0; i < sizeof NUMBERS / sizeof NUMBERS[0]; i++) {
        missing = json_is_number(json_object_get(args, NUMBERS[i])) ? missing : NUMBERS[i];
    }
    for (size_t i = 0; i < sizeof TEXTS / sizeof TEXTS[0]; i++) {
        missing = json_is_string(json_object_get(args, TEXTS[i])) ? missing : TEXTS[i];
    }
    return missing == NULL ? 0
                           : mb_err_set(err, MB_ECORRUPT,
                                        "%s: there is no argument %s, which the optimizer's "
                                        "schedule needs; --no-load-optim converts it without",
                                        name, missing);
}

/* ---- Adam ---- */

static json_t *tensor(size_t i)
{
    return json_pack("{s:I}", "$tensor", (json_int_t)i);
}

/* Where a parameter's tensors begin in the file. */
static size_t first_of(const struct mb_split_optim *o, size_t param)
{
    return o->n_params + param * mb_split_optim_per_param(o->dtype);
}

static json_t *state_of(const struct mb_split_optim *o, size_t param)
{
    const size_t at = first_of(o, param);
    json_t *state = json_pack("{s:o, s:o}", "exp_avg", tensor(at), "exp_avg_sq", tensor(at + 1));
    if (o->is_local && state != NULL &&
        json_object_set_new(state, "step", json_integer(o->state->optimizer_steps)) != 0) {
        json_decref(state);
        return NULL;
    }
    return state;
}

static double number_of(const json_t *args, const char *name, double def)
{
    const json_t *j = json_object_get(args, name);
    return json_is_number(j) ? json_number_value(j) : def;
}

static json_t *group_of(const struct mb_split_optim *o, int g)
{
    const json_t *a = o->args;
    const double wd_mult = g == 0 ? 1 : 0, lr = number_of(a, "lr", 0);
    /* Rates and decay are what the scheduler makes of them before the next step. The last ones are
     * of torch's Adam, which takes the group as it is. */
    json_t *group = json_pack(
        "{s:[], s:f, s:f, s:b, s:b, s:b, s:f, s:f, s:f, s:f, s:[f,f], s:f, s:b, s:b, s:b, s:b, s:b,"
        " s:b, s:n, s:n}",
        "params", "wd_mult", wd_mult, "lr_mult", 1.0, "is_expert_parallel", 0, "is_decoupled_lr", 0,
        "default_config", 1, "max_lr", lr, "min_lr", number_of(a, "min_lr", 0), "lr", lr,
        "weight_decay", wd_mult * number_of(a, "start_weight_decay", 0), "betas",
        number_of(a, "adam_beta1", 0.9), number_of(a, "adam_beta2", 0.999), "eps",
        number_of(a, "adam_eps", 1e-8), "bias_correction", 1, "amsgrad", 0, "maximize", 0,
        "capturable", 0, "differentiable", 0, "decoupled_weight_decay", 1, "foreach", "fused");
    if (!o->is_local && group != NULL &&
        json_object_set_new(group, "step", json_integer(o->state->optimizer_steps)) != 0) {
        json_decref(group);
        return NULL;
    }
    return group;
}

/* The group's parameters get the next numbers; masters: their fp32 weights. */
static int fill_group(const struct mb_split_optim *o, int g, json_int_t *number, json_t *group,
                      json_t *states, json_t *masters)
{
    json_t *params = json_object_get(group, "params");
    char key[24];
    int bad = 0;
    for (size_t i = 0; i < o->n_params; i++) {
        if (!is_in_group(&o->params[i], g)) {
            continue;
        }
        snprintf(key, sizeof key, "%lld", (long long)*number);
        bad |= json_array_append_new(params, json_integer((*number)++));
        bad |= json_object_set_new(states, key, state_of(o, i));
        bad |= json_array_append_new(masters, tensor(first_of(o, i) + 2));
    }
    return bad;
}

/* {state, param_groups}, and the lists of masters. */
static int make_adam(const struct mb_split_optim *o, json_t *adam, json_t *masters)
{
    json_t *states = json_object(), *groups = json_array();
    json_int_t number = 0;
    int bad = json_object_set_new(adam, "state", states);
    bad |= json_object_set_new(adam, "param_groups", groups);
    for (int g = 0; g < GROUPS && !bad; g++) {
        json_t *group = group_of(o, g), *list = json_array();
        bad |= json_array_append_new(groups, group);
        bad |= json_array_append_new(masters, list);
        bad = bad || fill_group(o, g, &number, group, states, list);
    }
    return bad;
}

/* FP32Optimizer's is Adam's; that of halves has it one level deeper. */
static json_t *make_optimizer(const struct mb_split_optim *o)
{
    json_t *adam = json_object(), *masters = json_array();
    const size_t scale = first_of(o, o->n_params);
    if (adam == NULL || masters == NULL || make_adam(o, adam, masters) != 0) {
        json_decref(adam);
        json_decref(masters);
        return NULL;
    }
    if (o->dtype == MB_ST_F32) {
        json_decref(masters);
        return adam;
    }
    if (mb_split_optim_has_scale(o)) {
        return json_pack("{s:o, s:{s:o, s:I, s:I}, s:o}", "optimizer", adam, "grad_scaler", "scale",
                         tensor(scale), "growth_tracker", (json_int_t)o->state->growth_tracker,
                         "hysteresis_tracker", (json_int_t)o->state->hysteresis_tracker,
                         "fp32_from_fp16_params", masters);
    }
    return json_pack("{s:o, s:o}", "optimizer", adam, "fp32_from_fp16_params", masters);
}

/* ---- the schedule ---- */

static json_int_t integer_of(const json_t *args, const char *name)
{
    return json_integer_value(json_object_get(args, name));
}

static json_t *make_scheduler(const struct mb_split_optim *o)
{
    const json_t *a = o->args;
    const json_int_t samples = integer_of(a, "train_samples");
    json_int_t length = samples;
    if (samples <= 0 && __builtin_mul_overflow(integer_of(a, "train_iters"),
                                               integer_of(a, "global_batch_size"), &length)) {
        length = INT64_MAX;
    }
    return json_pack("{s:f, s:I, s:I, s:O, s:I, s:f, s:f, s:f, s:O, s:I}", "max_lr",
                     number_of(a, "lr", 0), "lr_warmup_steps", (json_int_t)o->state->warmup_samples,
                     "num_steps", (json_int_t)o->state->schedule_samples, "lr_decay_style",
                     json_object_get(a, "lr_decay_style"), "lr_decay_steps",
                     (json_int_t)o->state->decay_samples, "min_lr", number_of(a, "min_lr", 0),
                     "start_wd", number_of(a, "start_weight_decay", 0), "end_wd",
                     number_of(a, "end_weight_decay", 0), "wd_incr_style",
                     json_object_get(a, "weight_decay_incr_style"), "wd_incr_steps", length);
}

json_t *mb_split_optim_make(const struct mb_split_optim *o)
{
    json_t *optimizer = make_optimizer(o), *scheduler = make_scheduler(o);
    if (optimizer == NULL || scheduler == NULL) {
        json_decref(optimizer);
        json_decref(scheduler);
        return NULL;
    }
    return json_pack("{s:o, s:o}", "optimizer", optimizer, "opt_param_scheduler", scheduler);
}
