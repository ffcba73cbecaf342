/*
 * Saving and loading a trainer, with Megatron-LM's lines.
 *
 *  1. save: counters and arguments become the state, the optimizer's range is what this rank has;
 *     afterwards the agent hears of the files. With --async-save the saver's thread does it, and
 *     says so; only what is on disk is called saved.
 *  2. load: find the newest iteration; compare the model's shape and the schedule with the
 *     checkpoint's; take weights, then counters and optimizer unless told otherwise.
 * Failures: nothing to load is a warning and a random start, or an error with
 * --exit-on-missing-checkpoint; another shape, another schedule (trainer_schedule.c), or a missing
 * optimizer state are errors with Megatron's texts.
 */
#include "worker/trainer.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "worker/checkpoint/evict.h"
#include "worker/checkpoint/torch_save.h"

enum { US_PER_MS = 1000, US_PER_S = 1000 * 1000, MINUTE_MS = 60 * 1000 };

static int is_torch(const struct mb_trainer *t)
{
    return strcmp(t->args.ckpt_format, "torch") == 0;
}

static struct mb_checkpoint_model model_of(struct mb_trainer *t, int with_optimizer)
{
    struct mb_checkpoint_model m = {.dev = &t->dev,
                                    .comm = t->comm,
                                    .tensors = t->tensors,
                                    .n_tensors = t->n_tensors,
                                    .weights = *mb_gpt_master(t->gpt),
                                    .n_elements = t->n_whole_elements,
                                    .layout = t->parts != NULL ? &t->layout : NULL,
                                    .torch = is_torch(t) ? &t->torch : NULL};
    if (with_optimizer) {
        m.exp_avg = mb_optimizer_exp_avg(t->optimizer);
        m.exp_avg_sq = mb_optimizer_exp_avg_sq(t->optimizer);
        m.state_begin = t->args.use_distributed_optimizer ? t->begin : 0;
        m.state_end = t->args.use_distributed_optimizer ? t->end : t->n_elements;
    }
    return m;
}

/* ---- saving ---- */

static void report_saved(struct mb_trainer *t, int64_t iteration,
                         const struct mb_checkpoint_saved *saved,
                         const struct mb_checkpoint_times *times)
{
    struct mb_err err;
    if (t->report == NULL) {
        return;
    }
    struct mb_report_file *files = mb_calloc(saved->n_files + 1, sizeof *files);
    if (files == NULL) {
        mb_error("trainer", "the agent does not know of %s: out of memory", saved->dir);
        return;
    }
    for (size_t i = 0; i < saved->n_files; i++) {
        files[i] = (struct mb_report_file){saved->files[i].path, saved->files[i].size_bytes,
                                           saved->files[i].crc64nvme};
    }
    char *absolute = realpath(saved->dir, NULL); /* the agent has another working directory */
    struct mb_report r = {.type = MB_REPORT_SAVED,
                          .iteration = iteration,
                          .text = absolute != NULL ? absolute : saved->dir,
                          .files = files,
                          .n_files = saved->n_files,
                          .has_times = 1,
                          .stall_ms = (int64_t)(times->own_stall_us / US_PER_MS),
                          .write_ms = (int64_t)(times->write_us / US_PER_MS)};
    if (mb_report_client_send(t->report, &r, &err) != 0) {
        mb_error("trainer", "the agent does not know of %s: %s", saved->dir, err.text);
    }
    mb_free(absolute);
    mb_free(files);
}

/* What the agent called durable, and what came before the checkpoint that it loaded, if that is in
 * the store that this run saves to: nobody goes back behind it. In another store it may be deleted
 * while here nothing is durable yet. */
static int is_durable(void *arg, int64_t iteration)
{
    const struct mb_trainer *t = arg;
    const char *loaded = getenv("MOBULA_DURABLE_ITERATION");
    int64_t n = -1;
    if (loaded != NULL && mb_parse_i64(loaded, 0, INT64_MAX, "iteration", &n, NULL) == 0 &&
        iteration <= n) {
        return 1;
    }
    return t->report != NULL && mb_report_client_is_durable(t->report, iteration);
}

static void evict(struct mb_trainer *t, int64_t newest)
{
    const char *url = getenv("MOBULA_CHECKPOINT_URL");
    int64_t last = t->args.keep_last_k, interval = t->args.save_retain_interval;
    struct mb_checkpoint_keep k = {
        .keep_last = last != MB_ARGS_NONE ? last : (interval != MB_ARGS_NONE ? 1 : 0),
        .retain_interval = interval != MB_ARGS_NONE ? interval : 0,
        .is_durable = url != NULL && url[0] != '\0' ? is_durable : NULL,
        .arg = t};
    struct mb_err err;
    size_t n = 0;
    /* Only room is lost: the checkpoint that was asked for is there. */
    if (mb_checkpoint_evict(t->args.save, &k, newest, &n, &err) != 0) {
        mb_warn("trainer", "an older checkpoint cannot be removed: %s", err.text);
    }
}

/* It is on disk. On the saver's thread, if there is one. */
static void on_saved(void *arg, int64_t iteration, const struct mb_checkpoint_saved *saved,
                     const struct mb_checkpoint_times *times)
{
    struct mb_trainer *t = arg;
    double written_s = (double)times->write_us / US_PER_S;
    report_saved(t, iteration, saved, times);
    mb_trainer_say(t,
                   "  successfully saved checkpoint from iteration %7" PRId64
                   " to %s [ t 1/%u, p 1/%u ]\n"
                   "  saved iteration %" PRId64 ": stalled %.1f ms, written in %.3f s, %.1f MB/s\n",
                   iteration, t->args.save, t->tp_size, t->pp_size, iteration,
                   (double)times->stall_us / US_PER_MS, written_s,
                   written_s > 0 ? (double)times->total_bytes / 1e6 / written_s : 0);
    if (saved->is_owner) {
        evict(t, iteration);
    }
}

/* Its arguments are the caller's. */
static struct mb_checkpoint_state state_of(const struct mb_trainer *t)
{
    return (struct mb_checkpoint_state){.iteration = t->iteration,
                                        .consumed_train_samples = t->args.consumed_train_samples,
                                        .consumed_valid_samples = t->args.consumed_valid_samples,
                                        .optimizer_steps = mb_optimizer_steps(t->optimizer),
                                        .skipped_iterations = t->skipped_iterations,
                                        .schedule_samples = t->schedule_samples,
                                        .warmup_samples = t->schedule.warmup_samples,
                                        .decay_samples = t->schedule.decay_samples,
                                        .has_grad_scaler = t->loss_scaling.is_dynamic,
                                        .loss_scale = t->loss_scale.scale,
                                        .growth_tracker = t->loss_scale.n_good,
                                        .hysteresis_tracker = t->loss_scale.patience,
                                        .args_json = mb_args_json(&t->args)};
}

/* What Megatron-LM's files are not made of ends the run here, not at its first save. */
static int check_torch(struct mb_trainer *t, struct mb_err *err)
{
    const struct mb_checkpoint_model m = model_of(t, !t->args.no_save_optim);
    struct mb_checkpoint_state s = state_of(t);
    int rc = s.args_json != NULL ? mb_torch_save_check("--ckpt-format torch", &m, &s, err)
                                 : mb_err_set(err, MB_ENOMEM, "out of memory for the arguments");
    mb_checkpoint_state_close(&s);
    return rc;
}

int mb_trainer_build_saver(struct mb_trainer *t, struct mb_err *err)
{
    const struct mb_args *a = &t->args;
    t->torch = (struct mb_checkpoint_torch){.tp = t->tp_size,
                                            .pp = t->pp_size,
                                            .n_chunks = mb_args_chunks(a),
                                            .dtype = a->bf16   ? MB_ST_BF16
                                                     : a->fp16 ? MB_ST_F16
                                                               : MB_ST_F32,
                                            .is_local = strcmp(a->transformer_impl, "local") == 0};
    struct mb_saver_options o = {.model = model_of(t, !t->args.no_save_optim),
                                 .comm = t->save_comm,
                                 .stall_ms =
                                     (uint64_t)t->args.distributed_timeout_minutes * MINUTE_MS,
                                 .cb = on_saved,
                                 .arg = t};
    int rc = t->args.save != NULL && is_torch(t) ? check_torch(t, err) : 0;
    if (rc != 0 || (t->save_comm == NULL && (t->args.save == NULL || o.model.layout == NULL))) {
        return rc;
    }
    if (t->save_comm == NULL) {
        return mb_saver_fits(&o.model, t->comm, err);
    }
    return mb_saver_create(&o, &t->saver, err);
}

static int save_synchronously(struct mb_trainer *t, const struct mb_checkpoint_state *s,
                              uint64_t from_us, struct mb_err *err)
{
    struct mb_checkpoint_model m = model_of(t, !t->args.no_save_optim);
    struct mb_checkpoint_saved saved;
    struct mb_checkpoint_times times = {0};
    int rc = mb_checkpoint_save(&m, t->args.save, s, &saved, err);
    if (rc != 0) {
        return mb_err_wrap(err, "checkpoint of iteration %" PRId64, t->iteration);
    }
    times.own_stall_us = times.write_us = mb_mono_us() - from_us;
    rc = mb_checkpoint_share_times(t->comm, &saved, &times, err);
    on_saved(t, t->iteration, &saved, &times);
    mb_checkpoint_saved_close(&saved);
    return rc;
}

int mb_trainer_save(struct mb_trainer *t, struct mb_err *err)
{
    struct mb_checkpoint_state s = state_of(t);
    uint64_t from_us = mb_mono_us();
    int rc;
    mb_trainer_say(t, "saving checkpoint at iteration %7" PRId64 " to %s in %s format\n",
                   t->iteration, t->args.save, is_torch(t) ? "torch" : "safetensors");
    if (t->saver != NULL) {
        rc = mb_saver_start(t->saver, t->args.save, &s, err);
    } else {
        rc = save_synchronously(t, &s, from_us, err);
    }
    mb_free(s.args_json);
    if (rc != 0) {
        return rc;
    }
    t->last_saved = t->iteration;
    if (t->saver != NULL) {
        mb_trainer_say(t, "  scheduled an async checkpoint save at iteration %7" PRId64 " to %s\n",
                       t->iteration, t->args.save);
    }
    return mb_trainer_say_timer(t, "save-checkpoint", (double)(mb_mono_us() - from_us) / US_PER_MS,
                                err);
}

int mb_trainer_wait_saved(struct mb_trainer *t, struct mb_err *err)
{
    return t->saver != NULL ? mb_saver_wait(t->saver, err) : 0;
}

/* ---- loading ---- */

static int check_model(struct mb_trainer *t, const struct mb_checkpoint_state *s,
                       struct mb_err *err)
{
    struct mb_buf notes = {0};
    int rc = mb_args_compare(&t->args, s->args_json, t->args.finetune != 0, &notes, err);
    if (rc == 0) {
        mb_trainer_say(t, "%s", mb_buf_str(&notes));
    }
    mb_buf_close(&notes);
    return rc;
}

/* One rule's state is nothing to the other. Of Megatron-LM's files only Adam's is read. */
static int check_optimizer(const struct mb_trainer *t, const struct mb_checkpoint_state *s,
                           const json_t *args, struct mb_err *err)
{
    const char *theirs = json_string_value(json_object_get(args, "optimizer"));
    theirs = theirs != NULL && !s->is_megatrons ? theirs : "adam";
    return strcmp(theirs, t->args.optimizer) == 0
               ? 0
               : mb_err_set(err, MB_EINVAL,
                            "Unable to load optimizer from checkpoint %s: it is of --optimizer %s, "
                            "this run has %s. Specify --no-load-optim or --finetune to prevent "
                            "attempting to load the optimizer state, exiting ...",
                            t->args.load, theirs, t->args.optimizer);
}

static int check_state(struct mb_trainer *t, const struct mb_checkpoint_state *s,
                       int with_optimizer, struct mb_err *err)
{
    json_error_t je;
    json_t *args = json_loads(s->args_json, 0, &je);
    int rc = args != NULL ? 0 : mb_err_set(err, MB_ECORRUPT, "the checkpoint's args are no JSON");
    if (rc == 0) {
        rc = check_model(t, s, err);
    }
    if (rc == 0 && with_optimizer && !s->has_optimizer) {
        const struct mb_err *why = &s->optimizer_refused;
        rc = mb_err_set(err, why->code != 0 ? why->code : MB_ENOENT,
                        "Unable to load optimizer from checkpoint %s. Specify --no-load-optim or "
                        "--finetune to prevent attempting to load the optimizer state, exiting "
                        "...%s%s",
                        t->args.load, why->code != 0 ? " " : "", why->text);
    }
    if (rc == 0 && with_optimizer) {
        rc = check_optimizer(t, s, args, err);
    }
    if (rc == 0 && with_optimizer) {
        rc = mb_trainer_settle_schedule(t, s, args, err);
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

/* Without one in the checkpoint it begins anew, as in Megatron-LM. */
static void take_loss_scale(struct mb_trainer *t, const struct mb_checkpoint_state *s)
{
    if (!t->loss_scaling.is_dynamic) {
        return;
    }
    if (!s->has_grad_scaler) {
        mb_trainer_say(t, "***WARNING*** found an old checkpoint, will not load grad scaler ...\n");
        return;
    }
    t->loss_scale = (struct mb_loss_scale){
        .scale = s->loss_scale, .n_good = s->growth_tracker, .patience = s->hysteresis_tracker};
}

/* 0 where the checkpoint's arguments do not say, or say what cannot be. */
static int64_t skipped_samples(const struct mb_checkpoint_state *s)
{
    json_error_t je;
    json_t *args = json_loads(s->args_json, 0, &je); /* was read before */
    const json_int_t n = json_integer_value(json_object_get(args, "skipped_train_samples"));
    json_decref(args);
    return n > 0 && n <= s->consumed_train_samples ? n : 0;
}

static void take_state(struct mb_trainer *t, const struct mb_checkpoint_state *s,
                       int with_optimizer)
{
    if (t->args.finetune) {
        return; /* counters start anew */
    }
    if (s->iteration == MB_CHECKPOINT_RELEASE) { /* of no iteration, but samples may be counted */
        t->args.consumed_train_samples = s->consumed_train_samples;
        t->args.consumed_valid_samples = s->consumed_valid_samples;
        return;
    }
    t->iteration = t->last_saved = s->iteration;
    t->args.skipped_train_samples = skipped_samples(s);
    t->skipped_iterations = s->skipped_iterations;
    t->args.consumed_train_samples = s->consumed_train_samples;
    t->args.consumed_valid_samples = s->consumed_valid_samples;
    if (with_optimizer) {
        t->schedule_samples = s->schedule_samples;
        mb_optimizer_set_steps(t->optimizer, s->optimizer_steps);
        take_loss_scale(t, s);
    }
}

/* Whether all ranks can read the checkpoint's tokenizer: one without it decides for all. why is
 * empty if so. Collective. */
static int ask_for_tokenizer(struct mb_trainer *t, char why[256], struct mb_err *err)
{
    enum { ERRNO_BITS = 16 };
    const char *path = mb_args_tokenizer_path(&t->args);
    why[0] = '\0';
    if (path == NULL) { /* then no rank has one: all read the same arguments */
        return 0;
    }
    /* Most says the lowest rank that cannot, and why. */
    int64_t most = 0;
    if (access(path, R_OK) != 0) {
        most = ((int64_t)(t->world_size - t->rank) << ERRNO_BITS) | errno;
    }
    mb_comm_allreduce(t->comm, NULL, &most, 1, MB_COMM_I64, MB_COMM_MAX);
    int rc = mb_comm_synchronize(t->comm, err);
    if (rc == 0 && most != 0) {
        snprintf(why, 256, "%s (rank %" PRId64 ")", strerror((int)(most & ((1 << ERRNO_BITS) - 1))),
                 (int64_t)t->world_size - (most >> ERRNO_BITS));
    }
    return rc;
}

/* What is wrong with the checkpoint's arguments all ranks find alike. */
static int adopt(struct mb_trainer *t, const char *args_json, struct mb_err *err)
{
    char why[256];
    int rc = mb_args_adopt(&t->args, args_json, err);
    t->everybody_knows = rc != 0 && rc != MB_ENOMEM;
    if (rc == 0) {
        rc = ask_for_tokenizer(t, why, err);
    }
    if (rc == 0) {
        rc = mb_args_adopt_tokenizer(&t->args, why[0] != '\0' ? why : NULL, err);
        t->everybody_knows = rc != 0 && rc != MB_ENOMEM;
    }
    return rc;
}

int mb_trainer_adopt(struct mb_trainer *t, struct mb_err *err)
{
    struct mb_args *a = &t->args;
    const char *places[] = {a->load, a->pretrained_checkpoint};
    struct mb_checkpoint_state s;
    int64_t iteration = 0;
    size_t i = 0;
    if (a->load == NULL && a->pretrained_checkpoint == NULL) {
        mb_trainer_say(t, "No load directory specified, using provided arguments.\n");
        return 0;
    }
    if (a->distributed_timeout_minutes < 1) {
        return mb_err_set(err, MB_EINVAL,
                          "distributed-timeout-minutes is %" PRId64 ": it must be at least 1",
                          a->distributed_timeout_minutes);
    }
    int rc = mb_trainer_meet(t, err);
    for (; i < 2 && rc == 0 && iteration == 0; i++) {
        rc = places[i] != NULL ? mb_checkpoint_find(t->comm, places[i], &iteration, err) : 0;
    }
    if (rc == 0 && iteration == 0) {
        /* At once: what arguments lack without it would be the error otherwise. */
        mb_trainer_say(t, "Checkpoint not found to provide arguments, using provided arguments.\n");
        return a->load != NULL && a->exit_on_missing_checkpoint ? missing(t, err) : 0;
    }
    if (rc == 0) {
        rc = mb_checkpoint_load_state(t->comm, places[i - 1], iteration, &s, err);
    }
    if (rc == 0) {
        rc = adopt(t, s.args_json, err);
        mb_checkpoint_state_close(&s);
    }
    return rc != 0 ? mb_err_wrap(err, "--use-checkpoint-args") : 0;
}

/* The iteration to load and where from; 0: there is none. A base model counts only while --load has
 * nothing: a run that goes on must not begin anew. */
static int find_source(struct mb_trainer *t, int64_t *iteration, struct mb_err *err)
{
    struct mb_args *a = &t->args;
    int rc = a->load != NULL ? mb_checkpoint_find(t->comm, a->load, iteration, err) : 0;
    if (rc != 0 || *iteration != 0) {
        return rc;
    }
    if (a->pretrained_checkpoint == NULL) {
        return missing(t, err);
    }
    rc = mb_checkpoint_find(t->comm, a->pretrained_checkpoint, iteration, err);
    if (rc == 0 && *iteration == 0) {
        rc = mb_err_set(err, MB_ENOENT, "--pretrained-checkpoint: no checkpoint in %s",
                        a->pretrained_checkpoint);
    }
    char *from = rc == 0 ? mb_strdup(a->pretrained_checkpoint) : NULL;
    if (rc == 0 && from == NULL) {
        rc = mb_err_set(err, MB_ENOMEM, "out of memory for the arguments");
    }
    if (rc == 0) {
        mb_free(a->load);
        a->load = from;
        a->finetune = 1;
        mb_trainer_say(t, " --pretrained-checkpoint %s is the start\n", a->load);
    }
    return rc;
}

int mb_trainer_load(struct mb_trainer *t, struct mb_err *err)
{
    struct mb_checkpoint_state s;
    uint64_t from_us = mb_mono_us();
    int64_t iteration = 0;
    int rc = find_source(t, &iteration, err);
    if (rc != 0 || iteration == 0) {
        return rc;
    }
    const int is_release = iteration == MB_CHECKPOINT_RELEASE;
    const int with_optimizer = !t->args.no_load_optim && !t->args.finetune && !is_release;
    if (is_release) {
        mb_trainer_say(t, " loading release checkpoint from %s\n", t->args.load);
    } else {
        mb_trainer_say(t, " loading checkpoint from %s at iteration %" PRId64 "\n", t->args.load,
                       iteration);
    }
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
        rc = t->args.consumed_train_samples > 0 ? mb_trainer_settle_blend(t, &s, err) : 0;
    }
    mb_checkpoint_state_close(&s);
    if (rc != 0) {
        return rc;
    }
    mb_gpt_weights_changed(t->gpt);
    mb_trainer_say(t, " checkpoint version %d\n", (int)MB_CHECKPOINT_VERSION);
    mb_trainer_say(t,
                   "  successfully loaded checkpoint from %s [ t 1/%u, p 1/%u ] at iteration "
                   "%" PRId64 "\n",
                   t->args.load, t->tp_size, t->pp_size, t->iteration);
    return mb_trainer_say_timer(t, "load-checkpoint", (double)(mb_mono_us() - from_us) / 1000, err);
}
