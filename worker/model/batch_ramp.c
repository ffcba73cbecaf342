/*
 * Each of (full - start) / increment steps is as long as the others; from the sample after the last
 * the batch is full. Counting iterations walks the ramp, which people make short, and divides the
 * rest.
 */
#include "worker/model/batch_ramp.h"

enum { RAMP_ITERATIONS_MAX = 100000000 }; /* they are counted one by one */

static int64_t steps(const struct mb_batch_ramp *r)
{
    return (r->full - r->start) / r->increment;
}

int mb_batch_ramp_check(const struct mb_batch_ramp *r, int64_t micro_batch, int64_t data_parallel,
                        struct mb_err *err)
{
    const int64_t slice = micro_batch * data_parallel;
    if (r->start == 0 && r->increment == 0 && r->samples == 0)
        return 0;
    if (r->start <= 0 || r->increment <= 0 || r->samples < 0 || r->start > r->full)
        return mb_err_set(
            err, MB_EINVAL,
            "--rampup-batch-size %lld %lld %lld: start and increment must be positive, "
            "start at most the global batch size (%lld)",
            (long long)r->start, (long long)r->increment, (long long)r->samples,
            (long long)r->full);
    if (r->samples / r->start > RAMP_ITERATIONS_MAX)
        return mb_err_set(err, MB_EINVAL,
                          "--rampup-batch-size: %lld samples are more than %d batches of %lld",
                          (long long)r->samples, (int)RAMP_ITERATIONS_MAX, (long long)r->start);
    if ((r->full - r->start) % r->increment != 0)
        return mb_err_set(err, MB_EINVAL,
                          "expected global batch size interval (%lld) to be divisible by global "
                          "batch size increment (%lld)",
                          (long long)(r->full - r->start), (long long)r->increment);
    if (r->start % slice != 0 || r->increment % slice != 0)
        return mb_err_set(err, MB_EINVAL,
                          "current global batch size (%lld) is not divisible by micro-batch-size "
                          "(%lld) times data parallel size (%lld)",
                          (long long)(r->start % slice != 0 ? r->start : r->start + r->increment),
                          (long long)micro_batch, (long long)data_parallel);
    return 0;
}

int64_t mb_batch_ramp_at(const struct mb_batch_ramp *r, int64_t consumed)
{
    if (r->start == 0 || consumed > r->samples || steps(r) == 0)
        return r->full;
    if (r->samples == 0)
        return r->start;
    double per_step = (double)r->samples / (double)steps(r);
    int64_t batch = r->start + (int64_t)((double)consumed / per_step) * r->increment;
    return batch < r->full ? batch : r->full;
}

int64_t mb_batch_ramp_iterations(const struct mb_batch_ramp *r, int64_t train_samples)
{
    int64_t iterations = 0, consumed = 0;
    while (r->start != 0 && consumed <= r->samples &&
           consumed + mb_batch_ramp_at(r, consumed) <= train_samples) {
        consumed += mb_batch_ramp_at(r, consumed);
        iterations++;
    }
    if (r->start != 0 && consumed <= r->samples)
        return iterations; /* the training ends on the ramp */
    return iterations + (train_samples - consumed) / r->full;
}
