/*
 * RMSNorm. Backward, with xh = x rstd and g = d_out w:
 *   d_x += rstd (g - xh mean(g xh));  d_weight += d_out xh
 */
#include <math.h>
#include "worker/kernels/cpu/cpu.h"

void MB_CPU(rmsnorm_forward)(struct mb_context *ctx, struct mb_stream *stream,
                             const struct mb_rmsnorm_forward *a)
{
    (void)ctx;
    (void)stream;
    const size_t n = a->hidden;
    for (size_t r = 0; r < a->n_rows; r++) {
        const float *x = (const float *)a->x + r * n;
        float *restrict out = (float *)a->out + r * n;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (size_t i = 0; i < n; i++)
            sum += x[i] * x[i];
        float rstd = 1.0f / sqrtf(sum / (float)n + a->eps);
        for (size_t i = 0; i < n; i++)
            out[i] = x[i] * rstd * a->weight[i];
        a->rstd[r] = rstd;
    }
}

void MB_CPU(rmsnorm_backward)(struct mb_context *ctx, struct mb_stream *stream,
                              const struct mb_rmsnorm_backward *a)
{
    (void)ctx;
    (void)stream;
    const size_t n = a->hidden;
    for (size_t r = 0; r < a->n_rows; r++) {
        const float *x = (const float *)a->x + r * n, *d_out = (const float *)a->d_out + r * n;
        float *d_x = (float *)a->d_x + r * n, *d_weight = a->d_weight;
        float rstd = a->rstd[r], sum = 0;
#pragma omp simd reduction(+ : sum)
        for (size_t i = 0; i < n; i++)
            sum += d_out[i] * a->weight[i] * x[i];
        float along_x = sum * rstd * rstd / (float)n; /* mean(g xh) rstd: the factor of x */
#pragma omp simd
        for (size_t i = 0; i < n; i++) {
            d_x[i] += rstd * (d_out[i] * a->weight[i] - x[i] * along_x);
            d_weight[i] += d_out[i] * x[i] * rstd;
        }
    }
}
