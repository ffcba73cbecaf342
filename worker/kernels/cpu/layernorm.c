/*
 * LayerNorm. Forward takes the variance in a second pass over the row, which is in cache: the
 * one-pass formula loses digits when the mean is large. Backward, with xh = (x - mean) rstd and g =
 * d_out w: d_x += rstd (g - mean(g) - xh mean(g xh)).
 */
#include <math.h>
#include "worker/kernels/cpu/cpu.h"

static float row_mean(const float *x, size_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++)
        sum += x[i];
    return sum / (float)n;
}

static float row_variance(const float *x, size_t n, float mean)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++)
        sum += (x[i] - mean) * (x[i] - mean);
    return sum / (float)n;
}

void MB_CPU(layernorm_forward)(struct mb_context *ctx, struct mb_stream *stream,
                               const struct mb_layernorm_forward *a)
{
    (void)ctx;
    (void)stream;
    for (size_t r = 0; r < a->n_rows; r++) {
        const float *x = (const float *)a->x + r * a->hidden;
        float *restrict out = (float *)a->out + r * a->hidden;
        float mean = row_mean(x, a->hidden);
        float rstd = 1.0f / sqrtf(row_variance(x, a->hidden, mean) + a->eps);
        for (size_t i = 0; i < a->hidden; i++)
            out[i] = (x[i] - mean) * rstd * a->weight[i] + a->bias[i];
        a->mean[r] = mean;
        a->rstd[r] = rstd;
    }
}

void MB_CPU(layernorm_backward)(struct mb_context *ctx, struct mb_stream *stream,
                                const struct mb_layernorm_backward *a)
{
    (void)ctx;
    (void)stream;
    size_t n = a->hidden;
    for (size_t r = 0; r < a->n_rows; r++) {
        const float *x = (const float *)a->x + r * n, *d_out = (const float *)a->d_out + r * n;
        float *d_x = (float *)a->d_x + r * n;
        float mean = a->mean[r], rstd = a->rstd[r], sum_g = 0, sum_gx = 0;
#pragma omp simd reduction(+ : sum_g, sum_gx)
        for (size_t i = 0; i < n; i++) {
            float g = d_out[i] * a->weight[i], xh = (x[i] - mean) * rstd;
            sum_g += g;
            sum_gx += g * xh;
        }
        float mean_g = sum_g / (float)n, mean_gx = sum_gx / (float)n;
        float *d_weight = a->d_weight, *d_bias = a->d_bias;
#pragma omp simd
        for (size_t i = 0; i < n; i++) {
            float xh = (x[i] - mean) * rstd;
            d_x[i] += rstd * (d_out[i] * a->weight[i] - mean_g - xh * mean_gx);
            d_weight[i] += d_out[i] * xh;
            d_bias[i] += d_out[i];
        }
        for (size_t i = 0; a->d_x_sum != NULL && i < n; i++)
            a->d_x_sum[i] += d_x[i];
    }
}
