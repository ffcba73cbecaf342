/*
 * Saving and loading a trainer, with Megatron-LM's lines.
 *
 *  1. save: counters and arguments become the state, the optimizer's range is what this rank has;
 *     afterwards the agent hears of the files.
 *  2. load: find the newest iteration; compare the model's shape and the schedule with the
 *     checkpoint's; take weights, then counters and optimizer unless told otherwise.
 * Failures: nothing to load is a warning and a random start, or an error with
 * --exit-on-missing-checkpoint; another shape, another schedule without
 * --override-opt_param-scheduler, or a missing optimizer state are errors with Megatron's texts.
 */
#include "worker/trainer.h"

#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"

static struct mb_checkpoint_model model_of(struct mb_trainer *t, int with_optimizer)
{
    struct mb_checkpoint_model m = {.dev = &t->dev,
                                    .comm = t->comm,
                                    .tensors = t->tensors,
                                    .n_tensors = t->n_tensors,
                                    .weights = mb_gpt_weights(t->gpt),
                                    .n_elements = t->n_elements};
    if (with_optimizer) {
        m.exp_avg = mb_optimizer_exp_avg(t->optimizer);
        m.exp_avg_sq = mb_optimizer_exp_avg_sq(t->optimizer);
        m.state_begin = t->args.use_distributed_optimizer ? t->begin : 0;
        m.state_end = t->args.use_distributed_optimizer ? t->end : t->n_elements;
    }
    return m;
}

/* ---- saving ---- */

static void report_saved(struct mb_trainer *t, const struct mb_checkpoint_saved *saved)
{
    struct mb_report_file files[3];
    struct mb_err err;
    if (t->report == NULL) {
        return;
    }
    for (size_t i = 0; i < saved->n_files; i++) {
        files[i] = (struct mb_report_file){saved->files[i].path, saved->files[i].size_bytes,
                                           saved->files[i].crc64nvme};
    }
    char *absolute = realpath(saved->dir, NULL); /* the agent has another working directory */
    struct mb_report r = {.type = MB_REPORT_SAVED,
                          .iteration = t->iteration,
                          .text = absolute != NULL ? absolute : saved->dir,
                          .files = files,
                          .n_files = saved->n_files};
    if (mb_report_client_send(t->report, &r, &err) != 0) {
        mb_error("trainer", "the agent does not know of %s: %s", saved->dir, err.text);
    }
    mb_free(absolute);
}

int mb_trainer_save(struct mb_trainer *t, struct mb_err *err)
{
    struct mb_checkpoint_model m = model_of(t, !t->args.no_save_optim);
    struct mb_checkpoint_saved saved;
    struct mb_checkpoint_state s = {.iteration = t->iteration,
                                    .consumed_train_samples = t->args.consumed_train_samples,
                                    .consumed_valid_samples = t->args.consumed_valid_samples,
                                    .optimizer_steps = mb_optimizer_steps(t->optimizer),
                                    .skipped_iterations = t->skipped_iterations,
                                    .schedule_samples = t->schedule_samples,
                                    .warmup_samples = t->schedule.warmup_samples,
                                    .decay_samples = t->schedule.decay_samples,
                                    .args_json = mb_args_json(&t->args)};
    uint64_t from_us = mb_mono_us();
    mb_trainer_say(t, "saving checkpoint at iteration %7" PRId64 " to %s in safetensors format\n",
                   t->iteration, t->args.save);
    int rc = mb_checkpoint_save(&m, t->args.save, &s, &saved, err);
    mb_free(s.args_json);
    if (rc != 0) {
        return mb_err_wrap(err, "checkpoint of iteration %" PRId64, t->iteration);
    }
    report_saved(t, &saved);
    mb_checkpoint_saved_close(&saved);
    t->last_saved = t->iteration;
    mb_trainer_say(
        t, "  successfully saved checkpoint from iteration %7" PRId64 " to %s [ t 1/1, p 1/1 ]\n",
        t->iteration, t->args.save);
    return mb_trainer_say_timer(t, "save-checkpoint", (double)(mb_mono_us() - from_us) / 1000, err);
}

/* ---- loading ---- */

static int check_shape(const struct mb_trainer *t, const json_t *args, struct mb_err *err)
{
    const struct {
        const char *name;
        int64_t value;
    } shape[] = {
        {"num_layers", t->args.num_layers},
        {"hidden_size", t->args.hidden_size},
        {"num_attention_heads", t->args.num_attention_heads},
        {"num_query_groups", t->args.num_query_groups},
        {"ffn_hidden_size", t->args.ffn_hidden_size},
        {"max_position_embeddings", t->args.max_position_embeddings},
        {"padded_vocab_size", t->args.padded_vocab_size},
    };
    for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++) {
        const json_t *j = json_object_get(args, shape[i].name);
        if (json_is_integer(j) && json_integer_value(j) != shape[i].value) {
            return mb_err_set(err, MB_EINVAL,
                              "%s value from checkpoint (%lld) is not equal to the input argument "
                              "value (%lld).",
                              shape[i].name, (long long)json_integer_value(j),
                              (long long)shape[i].value);
        }
    }
    return 0;
}

static int check_schedule(const struct mb_trainer *t, const struct mb_checkpoint_state *s,
                          const json_t *args, struct mb_err *err)
{
    const struct {
        const char *what;
        double ours, theirs;
    } values[] = {
        {"learning rate", t->args.lr, json_number_value(json_object_get(args, "lr"))},
        {"minimum learning rate", t->args.min_lr,
         json_number_value(json_object_get(args, "min_lr"))},
        {"warmup iterations", (double)t->schedule.warmup_samples, (double)s->warmup_samples},
        {"total number of iterations", (double)t->schedule.decay_samples, (double)s->decay_samples},
        {"start weight decay", t->args.start_weight_decay,
         json_number_value(json_object_get(args, "start_weight_decay"))},
        {"end weight decay", t->args.end_weight_decay,
         json_number_value(json_object_get(args, "end_weight_decay"))},
    };
    const struct {
        const char *what, *ours, *name;
    } styles[] = {
        {"learning rate decay style", t->args.lr_decay_style, "lr_decay_style"},
        {"weight decay incr style", t->args.weight_decay_incr_style, "weight_decay_incr_style"},
    };
    static const char HINT[] = "--override-opt_param-scheduler takes the command line's";
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        if (values[i].ours != values[i].theirs) {
            return mb_err_set(err, MB_EINVAL,
                              "OptimizerParamScheduler: class input value %g and checkpoint value "
                              "%g for %s do not match; %s",
                              values[i].ours, values[i].theirs, values[i].what, HINT);
        }
    }
    for (size_t i = 0; i < sizeof styles / sizeof styles[0]; i++) {
        const char *theirs = json_string_value(json_object_get(args, styles[i].name));
        if (theirs != NULL && strcmp(theirs, styles[i].ours) != 0) {
            return mb_err_set(err, MB_EINVAL,
                              "OptimizerParamScheduler: class input value %s and checkpoint value "
                              "%s for %s do not match; %s",
                              styles[i].ours, theirs, styles[i].what, HINT);
        }
    }
    return 0;
}

static int check_state(const struct mb_trainer *t, const struct mb_checkpoint_state *s,
                       int with_optimizer, struct mb_err *err)
{
    json_error_t je;
    json_t *args = json_loads(s->args_json, 0, &je);
    int rc = args != NULL ? 0 : mb_err_set(err, MB_ECORRUPT, "the checkpoint's args are no JSON");
    if (rc == 0 && !t->args.finetune) {
        rc = check_shape(t, args, err);
    }
    if (rc == 0 && with_optimizer && !s->has_optimizer) {
        rc = mb_err_set(err, MB_ENOENT,
                        "Unable to load optimizer from checkpoint %s. Specify --no-load-optim or "
                        "--finetune to prevent attempting to load the optimizer state, exiting ...",
                        t->args.load);
    }
    if (rc == 0 && with_optimizer && !t->args.override_opt_param_scheduler) {
        rc = check_schedule(t, s, args, err);
    }
    json_decref(args);
    return rc;
}

static int missing(struct mb_trainer *t, struct mb_err *err)
{
    mb_trainer_say(t, "WARNING: could not find the metadata file %s/%s\n", t->args.load,
                   MB_CHECKPOINT_TRACKER);
    mb_trainer_say(t, "    will not load any checkpoints and will start from random\n");
    if (!t->args.exit_on_missing_checkpoint) {
        return 0;
    }
    mb_trainer_say(t, ">> '--exit-on-missing-checkpoint' set ... exiting. <<\n");
    return mb_err_set(err, MB_ENOENT, "--exit-on-missing-checkpoint: no checkpoint in %s",
                      t->args.load);
}

static void take_state(struct mb_trainer *t, const struct mb_checkpoint_state *s,
                       int with_optimizer)
{
    if (t->args.finetune) {
        return; /* counters start anew */
    }
    t->iteration = t->last_saved = s->iteration;
    t->skipped_iterations = s->skipped_iterations;
    t->args.consumed_train_samples = s->consumed_train_samples;
    t->args.consumed_valid_samples = s->consumed_valid_samples;
    if (with_optimizer) {
        t->schedule_samples = s->schedule_samples;
        mb_optimizer_set_steps(t->optimizer, s->optimizer_steps);
    }
}

int mb_trainer_load(struct mb_trainer *t, struct mb_err *err)
{
    int with_optimizer = !t->args.no_load_optim && !t->args.finetune;
    struct mb_checkpoint_state s;
    uint64_t from_us = mb_mono_us();
    int64_t iteration = 0;
    int rc = mb_checkpoint_find(t->comm, t->args.load, &iteration, err);
    if (rc != 0 || iteration == 0) {
        return rc != 0 ? rc : missing(t, err);
    }
    mb_trainer_say(t, " loading checkpoint from %s at iteration %" PRId64 "\n", t->args.load,
                   iteration);
    rc = mb_checkpoint_load_state(t->comm, t->args.load, iteration, &s, err);
    if (rc != 0) {
        return rc;
    }
    rc = check_state(t, &s, with_optimizer, err);
    if (rc == 0) {
        struct mb_checkpoint_model m = model_of(t, with_optimizer);
        rc = mb_checkpoint_load(&m, t->args.load, &s, err);
    }
    if (rc == 0) {
        take_state(t, &s, with_optimizer);
    }
    mb_checkpoint_state_close(&s);
    if (rc != 0) {
        return rc;
    }
    mb_trainer_say(t, " checkpoint version %d\n", (int)MB_CHECKPOINT_VERSION);
    mb_trainer_say(
        t, "  successfully loaded checkpoint from %s [ t 1/1, p 1/1 ] at iteration %" PRId64 "\n",
        t->args.load, t->iteration);
    return mb_trainer_say_timer(t, "load-checkpoint", (double)(mb_mono_us() - from_us) / 1000, err);
}
