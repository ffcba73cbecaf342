/*
 * GELU. The tanh form, with the constants of the fused kernel that Megatron uses, is the default;
 * the erf form goes through libm and is slower.
 */
#include <math.h>
#include "worker/kernels/cpu/cpu.h"
#include "worker/kernels/cpu/vector.h"

static const float ROOT_2_OVER_PI = 0.79788456f, CUBIC = 0.044715f;
static const float ROOT_HALF = 0.70710678f, DENSITY = 0.39894228f; /* sqrt(1/2), 1 / sqrt(2 pi) */

void MB_CPU(gelu_forward)(struct mb_context *ctx, struct mb_stream *stream, const struct mb_gelu *a)
{
    (void)ctx;
    (void)stream;
    const float *x = a->x;
    float *out = a->out;
    if (a->form == MB_GELU_ERF) {
        for (size_t i = 0; i < a->n; i++)
            out[i] = 0.5f * x[i] * (1.0f + erff(x[i] * ROOT_HALF));
        return;
    }
#pragma omp simd
    for (size_t i = 0; i < a->n; i++) {
        float v = x[i];
        out[i] = 0.5f * v * (1.0f + mb_tanhf(ROOT_2_OVER_PI * v * (1.0f + CUBIC * v * v)));
    }
}

void MB_CPU(gelu_backward)(struct mb_context *ctx, struct mb_stream *stream,
                           const struct mb_gelu *a)
{
    (void)ctx;
    (void)stream;
    const float *x = a->x, *d_out = a->d_out;
    float *out = a->out;
    if (a->form == MB_GELU_ERF) {
        for (size_t i = 0; i < a->n; i++) {
            float cdf = 0.5f * (1.0f + erff(x[i] * ROOT_HALF));
            out[i] = d_out[i] * (cdf + x[i] * DENSITY * expf(-0.5f * x[i] * x[i]));
        }
        return;
    }
#pragma omp simd
    for (size_t i = 0; i < a->n; i++) {
        float v = x[i];
        float t = mb_tanhf(ROOT_2_OVER_PI * v * (1.0f + CUBIC * v * v));
        float slope = ROOT_2_OVER_PI * (1.0f + 3.0f * CUBIC * v * v);
        out[i] = d_out[i] * (0.5f * (1.0f + t) + 0.5f * v * (1.0f - t * t) * slope);
    }
}
