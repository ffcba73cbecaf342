/*
 * The training loop.
 *
 *  1. A step: micro batches forward and backward (trainer_pipeline.c); gradients reduced over ranks
 * (all-reduce, or reduce-scatter with the distributed optimizer: the same bits); one small
 * all-reduce carries the loss, the gradient's norm and what each rank wishes; clip, Adam, and with
 * the distributed optimizer all-gather of the weights.
 *  2. With --eval-at-start an evaluation before the first step, whose samples are given back: the
 *     training is the same bits with and without it. After a step: log line, progress to the agent,
 * evaluation, save, and the decision to go on.
 *  3. After the last: save unless just saved, evaluate on validation and test data. With
 *     --async-save the end waits until what was begun is on disk.
 * A wish (SIGTERM, stop or save_now of the agent, the run's allowed time) is any rank's; the sum of
 * all wishes is known to all after the small all-reduce, so all save and leave at the same
 * iteration. Failures: a collective that fails, data that ends, a save that fails end the run with
 * their text. A loss or norm that is not finite is fatal, said once and of the lowest rank that has
 * such a number itself, or, with --no-check-for-nan-in-loss-and-grad, the step changes nothing and
 * is counted; and so it is with a dynamic loss scale, which is made smaller by that. The norm,
 * which is a sum over all ranks' gradients, is finite where all of those are, so that all ranks
 * decide the same.
 */
#include "worker/trainer.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "worker/kernels/range.h"

volatile sig_atomic_t mb_trainer_signal;

/* What ranks tell each other once an iteration. Doubles, since most of it are sums of doubles. */
struct shared {
    double loss_sum, n_tokens; /* over micro batches; sum of losses for the log */
    double norm2;              /* of this rank's range of the reduced gradient */
    double n_zeros;            /* in the same, with --log-num-zeros-in-grad */
    double stop, save_now, time_is_up;
    double save_failed; /* of an asynchronous save */
};

enum { SHARED_DOUBLES = sizeof(struct shared) / sizeof(double), MINUTE_US = 60 * 1000 * 1000 };

static int share(struct mb_trainer *t, struct shared *s, struct mb_err *err)
{
    mb_comm_allreduce(t->comm, NULL, s, SHARED_DOUBLES, MB_COMM_F64, MB_COMM_SUM);
    return mb_comm_synchronize(t->comm, err);
}

static int wants_stop(struct mb_trainer *t)
{
    char reason[MB_REPORT_REASON_MAX];
    return mb_trainer_signal != 0 ||
           (t->report != NULL && mb_report_client_stopping(t->report, reason));
}

static void add_wishes(struct mb_trainer *t, struct shared *s)
{
    char reason[MB_REPORT_REASON_MAX];
    int64_t minutes = t->args.exit_duration_in_mins;
    s->stop = wants_stop(t);
    if (t->report != NULL) {
        s->save_now = mb_report_client_take_save_now(t->report, reason);
    }
    s->save_failed = t->saver != NULL && mb_saver_has_failed(t->saver);
    s->time_is_up =
        minutes != MB_ARGS_NONE && mb_mono_us() - t->started_us > (uint64_t)minutes * MINUTE_US;
}

/* ---- one step ---- */

/* Of ranks that share a model's layers, which all know its loss, the first tells it; of a
 * pipeline's stages the last knows it; of ranks that share samples each knows its rows'. */
static int take_loss(struct mb_trainer *t, struct shared *s, struct mb_err *err)
{
    int rc = mb_gpt_take_loss(t->gpt, &s->loss_sum, &s->n_tokens, err);
    if (t->tp_rank > 0) {
        s->loss_sum = s->n_tokens = 0;
    }
    return rc;
}

/* Once, on the rank where it is so: it trains on, more slowly. */
static void tell_graph_failure(struct mb_trainer *t)
{
    const char *why = mb_gpt_graphs_failure(t->gpt);
    if (why != NULL && !t->has_told_graphs) {
        mb_warn("train", "no CUDA graphs any more, passes run as they are: %s", why);
        t->has_told_graphs = 1;
    }
}

static int forward_backward(struct mb_trainer *t, struct shared *s, struct mb_err *err)
{
    const int64_t n_micro = t->batch / (t->args.micro_batch_size * t->args.data_parallel_size);
    mb_gpt_zero_grads(t->gpt);
    int rc = mb_trainer_pass_batch(t, MB_SPLIT_TRAIN, n_micro, 1, err);
    tell_graph_failure(t);
    return rc == 0 ? take_loss(t, s, err) : rc;
}

double mb_trainer_decoupled_lr(const struct mb_trainer *t)
{
    struct mb_schedule s = t->schedule;
    if (!isnan(t->args.decoupled_lr)) {
        s.max_lr = t->args.decoupled_lr;
        s.min_lr = isnan(t->args.decoupled_min_lr) ? s.min_lr : t->args.decoupled_min_lr;
    }
    return mb_schedule_lr(&s, t->schedule_samples);
}

static int update(struct mb_trainer *t, double grad_factor, struct mb_err *err)
{
    double lr = mb_schedule_lr(&t->schedule, t->schedule_samples);
    double wd = mb_schedule_weight_decay(&t->schedule, t->schedule_samples);
    mb_optimizer_step_decoupled(t->optimizer, lr, mb_trainer_decoupled_lr(t), wd,
                                grad_factor * mb_optimizer_clip(t->grad_norm, t->args.clip_grad));
    t->schedule_samples += t->batch;
    if (t->args.use_distributed_optimizer) {
        const struct mb_master *w = mb_gpt_master(t->gpt);
        if (w->whole != NULL) {
            mb_comm_allgather(t->dp_comm, &t->dev, w->whole, t->n_elements, MB_COMM_F32);
        } else { /* bits travel, whatever they are called */
            mb_comm_allgather(t->dp_comm, &t->dev, w->upper, t->n_elements, MB_COMM_BF16);
            mb_comm_allgather(t->dp_comm, &t->dev, w->lower, t->n_elements, MB_COMM_BF16);
        }
        int rc = mb_comm_synchronize(t->dp_comm, err);
        if (rc != 0) {
            return rc;
        }
    }
    mb_gpt_weights_changed(t->gpt);
    return t->dev.ops->synchronize(t->dev.ctx, t->dev.stream, err);
}

/* Which rank is the lowest with such a number of its own. All have found the sum not finite, so
 * that all come here. Where each number is finite and the sum is not, that is no rank: the world's
 * size. */
static int lowest_rank(struct mb_trainer *t, double own, uint32_t *rank, struct mb_err *err)
{
    int64_t most = isfinite(own) ? 0 : (int64_t)t->world_size - t->rank;
    mb_comm_allreduce(t->comm, NULL, &most, 1, MB_COMM_I64, MB_COMM_MAX);
    int rc = mb_comm_synchronize(t->comm, err);
    *rank = t->world_size - (uint32_t)most;
    return rc;
}

/* what is so; own: what this rank has added to the sum that is not finite. Collective, unless the
 * step is left out. */
static int not_finite(struct mb_trainer *t, const char *what, double own, struct mb_err *err)
{
    char whose[32] = "";
    uint32_t rank = 0;
    if (!t->args.check_for_nan_in_loss_and_grad) {
        t->skipped_iterations++;
        return 0;
    }
    int rc = lowest_rank(t, own, &rank, err);
    if (rc != 0) {
        return rc;
    }
    if (rank < t->world_size) {
        snprintf(whose, sizeof whose, "rank %" PRIu32 ": ", rank);
    }
    t->everybody_knows = 1;
    return mb_err_set(err, MB_ECORRUPT,
                      "%siteration %" PRId64 ": the %s; lower --lr%s, or see "
                      "--no-check-for-nan-in-loss-and-grad",
                      whose, t->iteration + 1, what, t->args.fp16 ? " or --loss-scale" : "");
}

/* What a rank has of the gradient is its data parallel group's sum: who spoilt it is gone. */
static int norm_not_finite(struct mb_trainer *t, double own, struct mb_err *err)
{
    char what[96] = "norm of the gradient is not finite";
    if (t->dp_size > 1) {
        snprintf(what, sizeof what, "%s (a sum over %" PRIu32 " data parallel ranks)",
                 "norm of the gradient is not finite", t->dp_size);
    }
    return not_finite(t, what, own, err);
}

/* The saver's thread of some rank has said so: then all ranks' fail, each with its own text. */
static int save_failed(struct mb_trainer *t, struct mb_err *err)
{
    int rc = mb_trainer_wait_saved(t, err);
    return rc != 0 ? rc : mb_err_set(err, MB_EUNAVAIL, "another rank could not save");
}

/* The step is left out: weights, the optimizer and its schedule stay as they are. */
static void overflowed(struct mb_trainer *t, double loss)
{
    t->window.n_skipped++;
    t->window.n_nan += !isfinite(loss);
    t->skipped_iterations++;
    t->grad_norm = t->num_zeros_in_grad = NAN;
}

/* Since from_us; now. */
static uint64_t add_time(struct mb_trainer *t, enum mb_step_timer timer, uint64_t from_us)
{
    const uint64_t now_us = mb_mono_us();
    t->window.timers_us[timer] += now_us - from_us;
    return now_us;
}

/* A step whose numbers cannot change the weights; own: what this rank said of it. */
static int bad_step(struct mb_trainer *t, double loss, const struct shared *own, struct mb_err *err)
{
    if (t->loss_scaling.is_dynamic) {
        overflowed(t, loss);
        return 0;
    }
    if (!isfinite(loss)) {
        t->window.n_nan++;
        return not_finite(t, "loss is not finite", own->loss_sum, err);
    }
    t->window.n_skipped++;
    return norm_not_finite(t, own->norm2, err);
}

/* *s holds afterwards what all ranks said; *loss the iteration's loss. */
static int step(struct mb_trainer *t, struct shared *s, double *loss, struct mb_err *err)
{
    struct shared own = {0};
    memset(s, 0, sizeof *s);
    uint64_t from_us = mb_mono_us();
    int rc = forward_backward(t, s, err);
    if (rc == 0) {
        from_us = add_time(t, MB_TIMER_FORWARD_BACKWARD, from_us);
        mb_range_begin(&t->dev, "reduce gradients");
        rc = mb_trainer_reduce_gradients(t, &s->norm2, err);
        mb_range_end(&t->dev);
        add_time(t, MB_TIMER_GRADS_SYNC, from_us);
    }
    if (rc == 0 && t->args.log_num_zeros_in_grad) {
        rc = mb_trainer_count_zeros(t, &s->n_zeros, err);
    }
    if (rc == 0) {
        add_wishes(t, s);
        own = *s;
        rc = share(t, s, err);
    }
    if (rc == 0 && s->save_failed > 0) {
        rc = save_failed(t, err);
    }
    if (rc == 0 && t->saver != NULL) {
        mb_saver_wait_copied(t->saver); /* now weights and optimizer change */
    }
    if (rc != 0) {
        return rc;
    }
    double nominal = (double)(t->batch * t->args.seq_length);
    double factor = t->args.calculate_per_token_loss && s->n_tokens > 0 ? nominal / s->n_tokens : 1;
    factor /= t->loss_scale.scale;
    *loss = s->n_tokens > 0 ? s->loss_sum / s->n_tokens : 0;
    t->grad_norm = sqrt(s->norm2) * factor;
    t->num_zeros_in_grad = s->n_zeros;
    t->window.n_ran++;
    const int is_finite = isfinite(*loss) && isfinite(s->norm2);
    if (t->loss_scaling.is_dynamic) {
        mb_loss_scale_update(&t->loss_scale, &t->loss_scaling, !is_finite);
    }
    if (!is_finite) {
        rc = bad_step(t, *loss, &own, err);
    } else {
        t->window.n_iterations++;
        t->window.loss_sum += *loss;
        mb_range_begin(&t->dev, "optimizer");
        from_us = mb_mono_us();
        rc = update(t, factor, err);
        add_time(t, MB_TIMER_OPTIMIZER, from_us);
        mb_range_end(&t->dev);
    }
    if (rc == 0) {
        t->iteration++;
        t->args.consumed_train_samples += t->batch;
    }
    return rc;
}

/* ---- between steps ---- */

/* Of all ranks that have a part of this one's model. */
static int sum_over_model(struct mb_trainer *t, double *x, struct mb_err *err)
{
    struct mb_comm *const groups[] = {t->tp_comm, t->pp_comm};
    int rc = 0;
    for (size_t i = 0; i < 2 && rc == 0; i++) {
        if (groups[i] != NULL) {
            mb_comm_allreduce(groups[i], NULL, x, 1, MB_COMM_F64, MB_COMM_SUM);
            rc = mb_comm_synchronize(groups[i], err);
        }
    }
    return rc;
}

/* Where the log or TensorBoard is to have it, which arguments say: all ranks alike. */
static int take_params_norm(struct mb_trainer *t, struct mb_err *err)
{
    const struct mb_args *a = &t->args;
    const int is_told =
        t->iteration % a->log_interval == 0 ||
        (a->tensorboard_dir != NULL && t->iteration % a->tensorboard_log_interval == 0);
    double norm2 = 0;
    if (!a->log_params_norm || !is_told) {
        return 0;
    }
    int rc = mb_trainer_squared_norm(t, mb_gpt_master(t->gpt), 0, t->n_elements, &norm2, err);
    if (rc == 0) {
        rc = sum_over_model(t, &norm2, err);
    }
    t->params_norm = sqrt(norm2);
    return rc;
}

static int log_iteration(struct mb_trainer *t, struct mb_err *err)
{
    if (t->iteration % t->args.log_interval != 0) {
        return 0;
    }
    mb_trainer_say_iteration(t);
    if (!t->has_told_memory && mb_schedule_lr(&t->schedule, t->schedule_samples) > 0) {
        mb_trainer_say_memory(t);
        t->has_told_memory = 1;
    }
    int rc = mb_trainer_say_step_timers(t, err);
    t->window = (struct mb_log_window){0};
    return rc;
}

static void report_progress(struct mb_trainer *t)
{
    struct mb_err err;
    uint64_t elapsed_us = t->last_elapsed_us;
    double tokens = (double)(t->batch * t->args.seq_length);
    struct mb_report r = {.type = MB_REPORT_PROGRESS,
                          .iteration = t->iteration,
                          .train_iters = t->args.train_iters,
                          .consumed_samples = t->args.consumed_train_samples,
                          .loss = t->last_loss,
                          .learning_rate = mb_schedule_lr(&t->schedule, t->schedule_samples),
                          .grad_norm = t->grad_norm,
                          .tokens_per_s = elapsed_us > 0 ? tokens * 1e6 / (double)elapsed_us : 0,
                          .validation_loss = t->validation_loss};
    if (t->report != NULL) {
        /* Progress may be lost: a socket that ended has already become a wish to stop. */
        (void)mb_report_client_send(t->report, &r, &err);
    }
}

/* Forward passes over eval_iters global batches. *stopped: a rank wants to stop, there is no loss.
 */
static int evaluate(struct mb_trainer *t, enum mb_split split, int verbose, double *loss,
                    int *stopped, struct mb_err *err)
{
    double loss_sum = 0, n_tokens = 0;
    uint64_t from_us = mb_mono_us();
    const int64_t n_micro =
        t->args.global_batch_size / (t->args.micro_batch_size * t->args.data_parallel_size);
    if (verbose) {
        mb_trainer_say(t, "Evaluating on %" PRId64 " samples\n",
                       t->args.eval_iters * t->args.global_batch_size);
    }
    *stopped = 0;
    for (int64_t i = 1; i <= t->args.eval_iters && !*stopped; i++) {
        struct shared s = {0};
        if (verbose) {
            mb_trainer_say(t, "Evaluating iter %" PRId64 "/%" PRId64 "\n", i, t->args.eval_iters);
        }
        int rc = mb_trainer_pass_batch(t, split, n_micro, 0, err);
        if (rc == 0) {
            rc = take_loss(t, &s, err);
        }
        if (rc == 0) {
            s.stop = wants_stop(t);
            rc = share(t, &s, err);
        }
        if (rc != 0) {
            return rc;
        }
        loss_sum += s.loss_sum;
        n_tokens += s.n_tokens;
        *stopped = s.stop > 0;
        if (split == MB_SPLIT_VALID) {
            t->args.consumed_valid_samples += t->args.global_batch_size;
        }
    }
    *loss = n_tokens > 0 ? loss_sum / n_tokens : 0;
    return mb_trainer_say_timer(t, "evaluate", (double)(mb_mono_us() - from_us) / 1000, err);
}

static int evaluate_and_say(struct mb_trainer *t, enum mb_split split, const char *prefix,
                            int verbose, struct mb_err *err)
{
    double loss = 0;
    int stopped = 0;
    if (t->args.eval_iters == 0 || t->loaders[split] == NULL) {
        return 0;
    }
    int rc = evaluate(t, split, verbose, &loss, &stopped, err);
    if (rc != 0 || stopped) {
        return rc;
    }
    if (split == MB_SPLIT_VALID) {
        t->validation_loss = loss;
        mb_trainer_tell_validation(t, loss);
    }
    mb_trainer_say_validation(t, prefix, loss);
    return 0;
}

/* The loss the run starts from. Its samples count as not consumed. */
static int evaluate_at_start(struct mb_trainer *t, struct mb_err *err)
{
    int64_t consumed = t->args.consumed_valid_samples;
    struct mb_loader *valid = t->loaders[MB_SPLIT_VALID];
    char prefix[64];
    if (!t->args.eval_at_start || t->iteration >= t->args.train_iters || valid == NULL) {
        return 0;
    }
    snprintf(prefix, sizeof prefix, "iteration %" PRId64, t->iteration);
    int rc = evaluate_and_say(t, MB_SPLIT_VALID, prefix, 0, err);
    t->args.consumed_valid_samples = consumed;
    return rc == 0 ? mb_loader_rewind(valid, err) : rc;
}

static int save_if_needed(struct mb_trainer *t, struct mb_err *err)
{
    return t->args.save != NULL && t->last_saved != t->iteration ? mb_trainer_save(t, err) : 0;
}

/* Megatron's order: signal, interval, duration, exit interval. *exiting: the loop ends here. */
static int save_and_decide(struct mb_trainer *t, const struct shared *s, int *exiting,
                           struct mb_err *err)
{
    const struct mb_args *a = &t->args;
    char line[96] = "";
    int save = s->save_now > 0 ||
               (a->save_interval != MB_ARGS_NONE && t->iteration % a->save_interval == 0);
    if (s->stop > 0) {
        snprintf(line, sizeof line, "exiting program after receiving SIGTERM.");
    } else if (s->time_is_up > 0) {
        snprintf(line, sizeof line, "exiting program after %" PRId64 " minutes",
                 (int64_t)((mb_mono_us() - t->started_us) / MINUTE_US));
    } else if (a->exit_interval != MB_ARGS_NONE && t->iteration % a->exit_interval == 0) {
        snprintf(line, sizeof line, "exiting program at iteration %" PRId64, t->iteration);
    }
    *exiting = line[0] != '\0';
    int rc = save || *exiting ? save_if_needed(t, err) : 0;
    if (rc == 0 && *exiting) {
        rc = mb_trainer_wait_saved(t, err);
    }
    if (rc == 0 && *exiting) {
        mb_trainer_say_datetime(t, line);
    }
    return rc;
}

/* ---- the run ---- */

static int is_skipped(const struct mb_trainer *t)
{
    const struct mb_args_list *skipped = &t->args.iterations_to_skip;
    int64_t number = 0;
    for (size_t i = 0; i < skipped->n; i++) {
        mb_parse_i64(skipped->items[i], INT64_MIN + 1, INT64_MAX, "", &number, NULL);
        if (number == t->iteration) {
            return 1;
        }
    }
    return 0;
}

/* As in Megatron-LM nothing is said, saved or decided behind it: the samples are consumed. */
static int skip_iteration(struct mb_trainer *t, struct mb_err *err)
{
    const int64_t n_micro = t->batch / (t->args.micro_batch_size * t->args.data_parallel_size);
    const int reads = t->pp_rank == 0 || t->pp_rank + 1 == t->pp_size;
    int rc = 0;
    for (int64_t i = 0; i < n_micro && reads && rc == 0; i++) {
        rc = mb_loader_next(t->loaders[MB_SPLIT_TRAIN], NULL, NULL, NULL, NULL, err);
    }
    t->iteration++;
    t->args.consumed_train_samples += t->batch;
    t->args.skipped_train_samples += t->batch;
    return rc;
}

static int run_iteration(struct mb_trainer *t, int *exiting, struct mb_err *err)
{
    struct shared s;
    uint64_t from_us = mb_mono_us();
    t->batch = mb_batch_ramp_at(&t->ramp, t->args.consumed_train_samples);
    if (is_skipped(t)) {
        return skip_iteration(t, err);
    }
    int rc = mb_trainer_start_profile(t, err);
    if (rc == 0) {
        mb_range_begin(&t->dev, "iteration %" PRId64, t->iteration + 1);
        rc = step(t, &s, &t->last_loss, err);
        mb_range_end(&t->dev);
    }
    if (rc != 0) {
        return rc;
    }
    t->last_elapsed_us = mb_mono_us() - from_us;
    t->window.elapsed_us += t->last_elapsed_us;
    rc = take_params_norm(t, err);
    if (rc == 0) {
        mb_trainer_tell_iteration(t);
        rc = log_iteration(t, err);
    }
    if (rc == 0 && t->iteration % t->args.eval_interval == 0) {
        char prefix[64];
        snprintf(prefix, sizeof prefix, "iteration %" PRId64, t->iteration);
        rc = evaluate_and_say(t, MB_SPLIT_VALID, prefix, 0, err);
    }
    if (rc == 0) {
        rc = mb_trainer_stop_profile(t, err);
    }
    if (rc == 0) {
        report_progress(t);
        rc = save_and_decide(t, &s, exiting, err);
    }
    return rc;
}

static int finish(struct mb_trainer *t, struct mb_err *err)
{
    char prefix[64];
    mb_trainer_say_datetime(t, "after training is done");
    int rc = t->iteration != 0 ? save_if_needed(t, err) : 0;
    snprintf(prefix, sizeof prefix, "iteration %" PRId64 " on validation set", t->iteration);
    if (rc == 0) {
        rc = evaluate_and_say(t, MB_SPLIT_VALID, prefix, 1, err);
    }
    if (rc == 0 && t->last_elapsed_us != 0) {
        report_progress(t);
    }
    snprintf(prefix, sizeof prefix, "iteration %" PRId64 " on test set", t->iteration);
    return rc == 0 ? evaluate_and_say(t, MB_SPLIT_TEST, prefix, 1, err) : rc;
}

int mb_trainer_run(struct mb_trainer *t, struct mb_err *err)
{
    int rc = 0, exiting = 0;
    t->started_us = mb_mono_us();
    mb_trainer_say(t, "training ...\n");
    mb_trainer_say_datetime(t, "before the start of training step");
    rc = evaluate_at_start(t, err);
    while (rc == 0 && !exiting && t->iteration < t->args.train_iters) {
        rc = run_iteration(t, &exiting, err);
    }
    if (rc == 0 && !exiting) {
        rc = finish(t, err);
    }
    if (rc == 0) {
        rc = mb_trainer_wait_saved(t, err);
    }
    if (rc == 0) {
        /* Nobody leaves before all have come this far: a goodbye is then never taken for a death.
         */
        mb_comm_barrier(t->comm);
        rc = mb_comm_synchronize(t->comm, err);
    }
    return rc;
}
