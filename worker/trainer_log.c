/*
 * The lines of a run, as Megatron-LM (core 0.10) prints them; other programs read them. Rank 0
 * tells what happens once, the last rank the numbers. Nothing here fails but the timer's
 * collective.
 */
#include "worker/trainer.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int mb_trainer_is_last(const struct mb_trainer *t)
{
    return t->rank + 1 == t->world_size;
}

void mb_trainer_say(const struct mb_trainer *t, const char *fmt, ...)
{
    if (t->rank != 0) {
        return;
    }
    va_list ap;
    va_start(ap, fmt);
    vprintf(fmt, ap);
    va_end(ap);
    fflush(stdout);
}

void mb_trainer_now(char out[32])
{
    time_t now = time(NULL);
    struct tm tm;
    localtime_r(&now, &tm);
    strftime(out, 32, "%Y-%m-%d %H:%M:%S", &tm);
}

void mb_trainer_say_of_stage(const struct mb_trainer *t, const char *fmt, ...)
{
    va_list ap;
    if (t->tp_rank > 0 || t->dp_rank > 0) {
        return;
    }
    va_start(ap, fmt);
    vprintf(fmt, ap);
    va_end(ap);
    fflush(stdout);
}

void mb_trainer_say_datetime(const struct mb_trainer *t, const char *what)
{
    char now[32];
    mb_trainer_now(now);
    mb_trainer_say(t, "[%s] datetime: %s \n", what, now);
}

/* Share of the host's memory that this process uses: what "mem usages" means without a GPU. */
static double host_memory_share(void)
{
    unsigned long pages = 0, total_kib = 0;
    FILE *f = fopen("/proc/self/statm", "re");
    if (f != NULL) {
        if (fscanf(f, "%*u %lu", &pages) != 1) {
            pages = 0;
        }
        fclose(f);
    }
    f = fopen("/proc/meminfo", "re");
    if (f != NULL) {
        if (fscanf(f, "MemTotal: %lu", &total_kib) != 1) {
            total_kib = 0;
        }
        fclose(f);
    }
    double used = (double)pages * (double)sysconf(_SC_PAGESIZE);
    return total_kib > 0 ? used / ((double)total_kib * 1024) : 0;
}

static double memory_share(const struct mb_device *dev)
{
    size_t used = 0, total = 0;
    if (dev->ops->memory == NULL) {
        return host_memory_share();
    }
    dev->ops->memory(dev->ctx, &used, &total);
    return total > 0 ? (double)used / (double)total : 0;
}

/* Of each rank, as Megatron-LM counts operations. */
static double tflops(const struct mb_trainer *t, double elapsed_ms)
{
    double flops = mb_gpt_flops_per_sample(mb_gpt_config(t->gpt)) * (double)t->batch;
    return flops / (elapsed_ms / 1000 * 1e12 * (double)t->world_size);
}

/* As Python prints it: "nan", whatever its sign. */
static double unsigned_nan(double x)
{
    return isnan(x) ? (double)NAN : x;
}

void mb_trainer_say_iteration(struct mb_trainer *t)
{
    const struct mb_log_window *w = &t->window;
    const int64_t ran = w->n_ran;
    double elapsed_ms = ran > 0 ? (double)w->elapsed_us / 1000 / (double)ran : 0;
    double loss = w->n_iterations > 0 ? w->loss_sum / (double)w->n_iterations : 0;
    char now[32];
    if (!mb_trainer_is_last(t)) {
        return;
    }
    mb_trainer_tell_window(t, elapsed_ms, tflops(t, elapsed_ms));
    mb_trainer_now(now);
    printf(" [%s] iteration %8lld/%8lld | consumed samples: %12lld |", now, (long long)t->iteration,
           (long long)t->args.train_iters, (long long)t->args.consumed_train_samples);
    if (t->args.skipped_train_samples > 0) {
        printf(" skipped samples: %12lld |", (long long)t->args.skipped_train_samples);
    }
    printf(" elapsed time per iteration (ms): %.1f | mem usages: %.4f |", elapsed_ms,
           memory_share(&t->dev));
    if (t->args.log_throughput) {
        printf(" throughput per GPU (TFLOP/s/GPU): %.1f |", tflops(t, elapsed_ms));
    }
    printf(" learning rate: %.6E |", mb_schedule_lr(&t->schedule, t->schedule_samples));
    if (!isnan(t->args.decoupled_lr)) {
        printf(" decoupled learning rate: %.6E |", mb_trainer_decoupled_lr(t));
    }
    printf(" global batch size: %5lld |", (long long)t->batch);
    if (loss > 0) {
        printf(" lm loss: %.6E |", loss);
    }
    printf(" loss scale: %.1f |", t->loss_scale.scale);
    if (!isnan(t->grad_norm) || !t->args.fp16) {
        printf(" grad norm: %.3f |", unsigned_nan(t->grad_norm));
    }
    if (t->args.log_num_zeros_in_grad && !isnan(t->num_zeros_in_grad)) {
        printf(" num zeros: %.1f |", t->num_zeros_in_grad);
    }
    if (t->args.log_params_norm) {
        printf(" params norm: %.3f |", unsigned_nan(t->params_norm));
    }
    printf(" number of skipped iterations: %3lld | number of nan iterations: %3lld |\n",
           (long long)w->n_skipped, (long long)w->n_nan);
    fflush(stdout);
}

void mb_trainer_say_validation(struct mb_trainer *t, const char *prefix, double loss)
{
    char line[256], dashes[257];
    if (!mb_trainer_is_last(t)) {
        return;
    }
    int n = snprintf(line, sizeof line,
                     " validation loss at %s | lm loss value: %.6E | lm loss PPL: %.6E | ", prefix,
                     loss, exp(loss < 20 ? loss : 20));
    size_t len = n > 0 && (size_t)n < sizeof line ? (size_t)n + 1 : sizeof line;
    memset(dashes, '-', len);
    dashes[len] = '\0';
    printf("%s\n%s\n%s\n", dashes, line, dashes);
    fflush(stdout);
}
