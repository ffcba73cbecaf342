/*
 * The schedule of learning rate and weight decay: of the arguments, or of a checkpoint.
 *
 *  1. build: iterations become samples; what the arguments leave out is the training's length.
 *  2. settle, when the optimizer is loaded: value by value, in Megatron-LM's order, the
 *     checkpoint's has to be the command line's; with --override-opt_param-scheduler that one
 *     counts, with --use-checkpoint-opt_param-scheduler the checkpoint's, which the arguments have
 *     then, too: a save tells the truth. WSD's own arguments are the command line's in any case.
 * Failures: a value that differs, in Megatron-LM's words; one that the checkpoint does not have, or
 * that can be no run's.
 */
#include "worker/trainer.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>
#include "base/alloc.h"

static int64_t in_samples(int64_t iterations, int64_t samples, int64_t fallback, int64_t batch)
{
    if (iterations != MB_ARGS_NONE) {
        return iterations * batch;
    }
    return samples != MB_ARGS_NONE ? samples : fallback;
}

static int parse_styles(struct mb_trainer *t, struct mb_err *err)
{
    const struct mb_args *a = &t->args;
    struct mb_schedule *s = &t->schedule;
    int rc = mb_lr_style_parse(a->lr_decay_style, &s->lr_style, err);
    if (rc == 0) {
        rc = mb_wsd_style_parse(a->lr_wsd_decay_style, &s->wsd_style, err);
    }
    return rc == 0 ? mb_wd_style_parse(a->weight_decay_incr_style, &s->wd_style, err) : rc;
}

int mb_trainer_build_schedule(struct mb_trainer *t, struct mb_err *err)
{
    const struct mb_args *a = &t->args;
    struct mb_schedule *s = &t->schedule;
    int64_t batch = a->global_batch_size;
    int64_t length = a->train_samples != MB_ARGS_NONE ? a->train_samples : a->train_iters * batch;
    int rc = parse_styles(t, err);
    if (rc != 0) {
        return rc;
    }
    s->init_lr = a->lr_warmup_init;
    s->max_lr = a->lr;
    s->min_lr = a->min_lr;
    s->decay_samples = in_samples(a->lr_decay_iters, a->lr_decay_samples, length, batch);
    s->wsd_decay_samples = in_samples(a->lr_wsd_decay_iters, a->lr_wsd_decay_samples, 0, batch);
    s->warmup_samples = a->lr_warmup_iters * batch + a->lr_warmup_samples;
    if (!isnan(a->lr_warmup_fraction)) {
        s->warmup_samples = (int64_t)(a->lr_warmup_fraction * (double)s->decay_samples);
    }
    s->start_wd = a->start_weight_decay;
    s->end_wd = a->end_weight_decay;
    s->wd_incr_samples = length;
    return a->train_iters == 0 ? 0 : mb_schedule_check(s, err);
}

/* ---- of a checkpoint ---- */

/* Decides of one value, both as texts; *takes: the checkpoint's counts. */
static int decide(const struct mb_trainer *t, const char *what, const char *ours,
                  const char *theirs, int differs, int *takes, struct mb_err *err)
{
    const int overrides = t->args.override_opt_param_scheduler != 0;
    *takes = !overrides;
    if (overrides) {
        mb_trainer_say(t, " > overriding %s value to %s\n", what, ours);
        return 0;
    }
    if (theirs == NULL || (differs && !t->args.use_checkpoint_opt_param_scheduler)) {
        return mb_err_set(err, MB_EINVAL,
                          "OptimizerParamScheduler: class input value %s and checkpoint value %s "
                          "for %s do not match; --override-opt_param-scheduler takes the command "
                          "line's, --use-checkpoint-opt_param-scheduler the checkpoint's",
                          ours, theirs != NULL ? theirs : "None", what);
    }
    mb_trainer_say(t, " > using checkpoint value %s for %s\n", theirs, what);
    return 0;
}

static int settle_number(const struct mb_trainer *t, const char *what, double *ours,
                         const json_t *theirs, struct mb_err *err)
{
    const double value = json_number_value(theirs);
    char our_text[MB_ARG_FLOAT_TEXT_MAX], their_text[MB_ARG_FLOAT_TEXT_MAX];
    int takes = 0;
    mb_arg_float_text(*ours, our_text);
    mb_arg_float_text(value, their_text);
    int rc = decide(t, what, our_text, json_is_number(theirs) ? their_text : NULL, *ours != value,
                    &takes, err);
    if (rc == 0 && takes) {
        *ours = value;
    }
    return rc;
}

static int settle_count(const struct mb_trainer *t, const char *what, int64_t *ours, int64_t theirs,
                        struct mb_err *err)
{
    char our_text[24], their_text[24];
    int takes = 0;
    snprintf(our_text, sizeof our_text, "%" PRId64, *ours);
    snprintf(their_text, sizeof their_text, "%" PRId64, theirs);
    int rc = decide(t, what, our_text, their_text, *ours != theirs, &takes, err);
    if (rc == 0 && takes) {
        *ours = theirs;
    }
    return rc;
}

/* *ours is owned. */
static int settle_style(const struct mb_trainer *t, const char *what, char **ours,
                        const json_t *theirs, struct mb_err *err)
{
    const char *text = json_string_value(theirs);
    int takes = 0;
    if (text == NULL && !t->args.use_checkpoint_opt_param_scheduler) {
        return 0; /* an old one does not say */
    }
    int rc = decide(t, what, *ours, text, text != NULL && strcmp(*ours, text) != 0, &takes, err);
    if (rc != 0 || !takes) {
        return rc;
    }
    char *copy = mb_strdup(text);
    if (copy == NULL) {
        return mb_err_set(err, MB_ENOMEM, "out of memory for the schedule");
    }
    mb_free(*ours);
    *ours = copy;
    return 0;
}

/* Samples over which the checkpoint's weight decay grows; 0: it does not say. */
static int their_length(const json_t *args, int64_t *samples, struct mb_err *err)
{
    static const char *const FACTORS[] = {"train_iters", "global_batch_size"};
    const json_int_t told = json_integer_value(json_object_get(args, "train_samples"));
    *samples = told;
    for (int i = 0; i < 2 && told <= 0; i++) {
        const json_int_t n = json_integer_value(json_object_get(args, FACTORS[i]));
        if (n < 0 || n > INT32_MAX) {
            return mb_err_set(err, MB_ECORRUPT, "the checkpoint's argument %s has the value %lld",
                              FACTORS[i], (long long)n);
        }
        *samples = i == 0 ? n : *samples * n;
    }
    return 0;
}

int mb_trainer_settle_schedule(struct mb_trainer *t, const struct mb_checkpoint_state *s,
                               const json_t *args, struct mb_err *err)
{
    struct mb_args *a = &t->args;
    struct mb_schedule *own = &t->schedule;
    const int takes = a->use_checkpoint_opt_param_scheduler != 0;
    int64_t length = 0;
    int rc = settle_number(t, "learning rate", &a->lr, json_object_get(args, "lr"), err);
    if (rc == 0) {
        rc = settle_number(t, "minimum learning rate", &a->min_lr, json_object_get(args, "min_lr"),
                           err);
    }
    if (rc == 0) {
        rc = settle_count(t, "warmup iterations", &own->warmup_samples, s->warmup_samples, err);
    }
    if (rc == 0) {
        rc = settle_count(t, "total number of iterations", &own->decay_samples, s->decay_samples,
                          err);
    }
    if (rc == 0) {
        rc = settle_style(t, "learning rate decay style", &a->lr_decay_style,
                          json_object_get(args, "lr_decay_style"), err);
    }
    if (rc == 0) {
        rc = settle_number(t, "start weight decay", &a->start_weight_decay,
                           json_object_get(args, "start_weight_decay"), err);
    }
    if (rc == 0) {
        rc = settle_number(t, "end weight decay", &a->end_weight_decay,
                           json_object_get(args, "end_weight_decay"), err);
    }
    if (rc == 0) {
        rc = settle_style(t, "weight decay incr style", &a->weight_decay_incr_style,
                          json_object_get(args, "weight_decay_incr_style"), err);
    }
    if (rc == 0) {
        rc = parse_styles(t, err);
    }
    own->max_lr = a->lr;
    own->min_lr = a->min_lr;
    own->start_wd = a->start_weight_decay;
    own->end_wd = a->end_weight_decay;
    if (rc == 0 && takes) {
        rc = their_length(args, &length, err);
    }
    if (rc == 0 && length > 0) {
        own->wd_incr_samples = length;
    }
    return rc == 0 && takes ? mb_schedule_check(own, err) : rc;
}
