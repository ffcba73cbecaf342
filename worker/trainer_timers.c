/*
 * Megatron-LM's timers, in its text: (min, max) over ranks, the largest alone, or every rank's. All
 * ranks give their times in one all-reduce, each in a place of its own, and the last one prints.
 * Failures: memory, and the collective's.
 */
#include "worker/trainer.h"

#include <stdio.h>
#include <string.h>
#include "base/alloc.h"

static const char DOTS[] = "................................................";

static void print_extremes(const char *name, double least, double most, int most_alone)
{
    const int n = (int)strlen(name) + 1;
    printf("    %s %.*s: ", name, n < 48 ? 48 - n : 0, DOTS);
    if (most_alone) {
        printf("%.2f\n", most);
    } else {
        printf("(%.2f, %.2f)\n", least, most);
    }
}

static void print_all(const char *name, const double *ms, size_t stride, uint32_t n_ranks)
{
    printf("  %s:\n", name);
    for (uint32_t r = 0; r < n_ranks; r++) {
        if (ms[r * stride] > 0) {
            printf("     rank %2u: %.2f\n", r, ms[r * stride]);
        }
    }
}

/* ms[rank][timer] */
static void print_timers(struct mb_trainer *t, const struct mb_timer *timers, size_t n, int tells,
                         const double *ms)
{
    const char *option = t->args.timing_log_option;
    const int all = strcmp(option, "all") == 0, most_alone = strcmp(option, "max") == 0;
    int n_told = 0;
    for (size_t i = 0; i < n; i++) {
        double least = ms[i], most = ms[i];
        for (uint32_t r = 1; r < t->world_size; r++) {
            const double x = ms[r * n + i];
            least = x < least ? x : least;
            most = x > most ? x : most;
        }
        if (most <= 0) {
            continue;
        }
        if (n_told++ == 0) {
            printf("%s across ranks (ms):\n", all          ? "times"
                                              : most_alone ? "max time"
                                                           : "(min, max) time");
        }
        if (all) {
            print_all(timers[i].name, ms + i, n, t->world_size);
        } else {
            print_extremes(timers[i].name, least, most, most_alone);
        }
        if (tells) {
            mb_trainer_tell_timer(t, timers[i].name, most);
        }
    }
    fflush(stdout);
}

/* tells: TensorBoard, too. */
static int say_timers(struct mb_trainer *t, const struct mb_timer *timers, size_t n, int tells,
                      struct mb_err *err)
{
    double *ms = mb_calloc(t->world_size * n, sizeof *ms); /* [world, n] */
    if (ms == NULL) {
        return mb_err_set(err, MB_ENOMEM, "out of memory for timers");
    }
    for (size_t i = 0; i < n; i++) {
        ms[t->rank * n + i] = timers[i].ms;
    }
    mb_comm_allreduce(t->comm, NULL, ms, t->world_size * n, MB_COMM_F64, MB_COMM_SUM);
    int rc = mb_comm_synchronize(t->comm, err);
    if (rc == 0 && mb_trainer_is_last(t)) {
        print_timers(t, timers, n, tells, ms);
    }
    mb_free(ms);
    return rc;
}

int mb_trainer_say_timers(struct mb_trainer *t, const struct mb_timer *timers, size_t n,
                          struct mb_err *err)
{
    return say_timers(t, timers, n, 0, err);
}

int mb_trainer_say_timer(struct mb_trainer *t, const char *name, double ms, struct mb_err *err)
{
    return mb_trainer_say_timers(t, &(struct mb_timer){name, ms}, 1, err);
}

int mb_trainer_say_step_timers(struct mb_trainer *t, struct mb_err *err)
{
    static const char *const NAMES[] = {"forward-backward", "all-grads-sync", "optimizer"};
    struct mb_timer timers[MB_N_STEP_TIMERS];
    if (t->args.timing_log_level == 0 || t->window.n_ran == 0) {
        return 0;
    }
    for (size_t i = 0; i < MB_N_STEP_TIMERS; i++) { /* of an iteration */
        timers[i] = (struct mb_timer){NAMES[i], (double)t->window.timers_us[i] / 1000 /
                                                    (double)t->window.n_ran};
    }
    return say_timers(t, timers, MB_N_STEP_TIMERS, 1, err);
}
