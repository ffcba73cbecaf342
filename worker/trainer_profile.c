/*
 * --profile, on the ranks that it names: recording starts when --profile-step-start iterations are
 * done and stops when --profile-step-end are (Megatron-LM's counting); in between the phases of a
 * step are ranges (worker/kernels/range.h). A run that begins behind the start records nothing, one
 * that ends before the end lets the profiler end with the process. Failures: the device's.
 */
#include "base/str.h"
#include "worker/trainer.h"

static int is_profiled(const struct mb_trainer *t)
{
    const struct mb_args_list *ranks = &t->args.profile_ranks;
    int64_t rank = 0; /* the default */
    for (size_t i = 0; i < ranks->n; i++) {
        mb_parse_i64(ranks->items[i], 0, INT64_MAX, "", &rank, NULL); /* was checked */
        if (rank == t->rank)
            return 1;
    }
    return ranks->n == 0 && t->rank == 0;
}

static int record(struct mb_trainer *t, int on, struct mb_err *err)
{
    t->dev.tells_ranges = on;
    return t->dev.ops->profiler(t->dev.ctx, on, err);
}

int mb_trainer_start_profile(struct mb_trainer *t, struct mb_err *err)
{
    const int starts = t->args.profile && t->iteration == t->args.profile_step_start;
    return starts && is_profiled(t) ? record(t, 1, err) : 0;
}

int mb_trainer_stop_profile(struct mb_trainer *t, struct mb_err *err)
{
    const int stops = t->dev.tells_ranges && t->iteration == t->args.profile_step_end;
    return stops ? record(t, 0, err) : 0;
}
