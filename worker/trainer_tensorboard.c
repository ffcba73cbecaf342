/*
 * What a run tells TensorBoard, with Megatron-LM's tags; the last rank writes. "vs samples" has the
 * consumed samples as its step. A file that can no longer be written is told once and given up: the
 * log has the numbers, too.
 */
#include "worker/trainer.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/log.h"
#include "worker/tensorboard.h"

static void flush(struct mb_trainer *t)
{
    struct mb_err err;
    if (mb_tensorboard_flush(t->tensorboard, &err) != 0) {
        mb_warn("trainer", "TensorBoard's events end here: %s", err.text);
        mb_tensorboard_close(t->tensorboard);
        t->tensorboard = NULL;
    }
}

/* Every argument as a text: the dump's lines are "  name ..... value". */
static int tell_arguments(struct mb_trainer *t, struct mb_err *err)
{
    struct mb_buf dump = {0};
    if (mb_args_dump(&t->args, &dump) != 0) {
        mb_buf_close(&dump);
        return mb_err_set(err, MB_ENOMEM, "out of memory for the arguments");
    }
    for (char *at = mb_buf_take(&dump), *line = at, *end; line != NULL; line = end) {
        end = strchr(line, '\n');
        if (end == NULL) {
            mb_free(at);
            break;
        }
        *end++ = '\0';
        char *name = line + 2, *dots = strchr(name, ' ');
        char *value = dots != NULL ? dots + 1 + strspn(dots + 1, ".") : NULL;
        if (value != NULL && *value == ' ') {
            *dots = '\0';
            mb_tensorboard_text(t->tensorboard, name, 0, value + 1);
        }
    }
    return mb_tensorboard_flush(t->tensorboard, err);
}

int mb_trainer_open_tensorboard(struct mb_trainer *t, struct mb_err *err)
{
    if (t->args.tensorboard_dir == NULL || !mb_trainer_is_last(t)) {
        return 0;
    }
    printf("> setting tensorboard ...\n");
    fflush(stdout);
    int rc = mb_tensorboard_open(t->args.tensorboard_dir, (size_t)t->args.tensorboard_queue_size,
                                 &t->tensorboard, err);
    return rc == 0 ? tell_arguments(t, err) : rc;
}

/* TAG at the iteration and "TAG vs samples". */
static void both(struct mb_trainer *t, const char *tag, double value)
{
    char versus[96];
    snprintf(versus, sizeof versus, "%s vs samples", tag);
    mb_tensorboard_scalar(t->tensorboard, tag, t->iteration, value);
    mb_tensorboard_scalar(t->tensorboard, versus, t->args.consumed_train_samples, value);
}

/* There is no cache of memory: what is reserved is what is allocated. */
static void tell_memory(struct mb_trainer *t)
{
    size_t now_bytes, most_bytes, n_blocks;
    t->dev.ops->allocated(t->dev.ctx, &now_bytes, &most_bytes, &n_blocks);
    mb_tensorboard_scalar(t->tensorboard, "mem-reserved-bytes", t->iteration, (double)now_bytes);
    mb_tensorboard_scalar(t->tensorboard, "mem-allocated-bytes", t->iteration, (double)now_bytes);
    mb_tensorboard_scalar(t->tensorboard, "mem-allocated-count", t->iteration, (double)n_blocks);
}

void mb_trainer_tell_iteration(struct mb_trainer *t)
{
    const struct mb_args *a = &t->args;
    if (t->tensorboard == NULL || t->iteration % a->tensorboard_log_interval != 0) {
        return;
    }
    both(t, "learning-rate", mb_schedule_lr(&t->schedule, t->schedule_samples));
    if (!isnan(a->decoupled_lr)) {
        mb_tensorboard_scalar(t->tensorboard, "decoupled-learning-rate", t->iteration,
                              mb_trainer_decoupled_lr(t));
    }
    if (a->skipped_train_samples > 0) {
        mb_tensorboard_scalar(t->tensorboard, "skipped-train-samples", t->iteration,
                              (double)a->skipped_train_samples);
    }
    both(t, "batch-size", (double)t->batch);
    if (isfinite(t->last_loss)) {
        both(t, "lm loss", t->last_loss);
    }
    if (a->log_loss_scale_to_tensorboard) {
        both(t, "loss-scale", t->loss_scale.scale);
    }
    if (a->log_world_size_to_tensorboard) {
        both(t, "world-size", (double)t->world_size);
    }
    if (isfinite(t->grad_norm)) {
        both(t, "grad-norm", t->grad_norm);
    }
    if (a->log_num_zeros_in_grad && !isnan(t->num_zeros_in_grad)) {
        both(t, "num-zeros", t->num_zeros_in_grad);
    }
    if (a->log_params_norm) {
        both(t, "params-norm", t->params_norm);
    }
    if (a->log_memory_to_tensorboard) {
        tell_memory(t);
    }
    flush(t);
}

void mb_trainer_tell_timer(struct mb_trainer *t, const char *name, double most_ms)
{
    char tag[96];
    if (t->tensorboard != NULL && t->args.log_timers_to_tensorboard) {
        snprintf(tag, sizeof tag, "%s-time", name);
        mb_tensorboard_scalar(t->tensorboard, tag, t->iteration, most_ms);
        flush(t);
    }
}

void mb_trainer_tell_window(struct mb_trainer *t, double elapsed_ms, double tflops)
{
    if (t->tensorboard == NULL) {
        return;
    }
    if (t->args.log_timers_to_tensorboard) {
        mb_tensorboard_scalar(t->tensorboard, "iteration-time", t->iteration, elapsed_ms / 1000);
        if (t->args.log_throughput) {
            mb_tensorboard_scalar(t->tensorboard, "throughput", t->iteration, tflops);
        }
    }
    flush(t);
}

void mb_trainer_tell_validation(struct mb_trainer *t, double loss)
{
    if (t->tensorboard == NULL) {
        return;
    }
    both(t, "lm loss validation", loss);
    if (t->args.log_validation_ppl_to_tensorboard) {
        both(t, "lm loss validation ppl", exp(loss < 20 ? loss : 20));
    }
    flush(t);
}
