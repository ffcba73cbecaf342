/*
 * SwiGLU. With s = 1 / (1 + exp(-g)), silu(g) = g s and silu'(g) = s (1 + g (1 - s)).
 */
#include "worker/kernels/cpu/cpu.h"
#include "worker/kernels/cpu/vector.h"

void MB_CPU(swiglu_forward)(struct mb_context *ctx, struct mb_stream *stream,
                            const struct mb_swiglu_forward *a)
{
    (void)ctx;
    (void)stream;
    for (size_t r = 0; r < a->n_rows; r++) {
        const float *gate = (const float *)a->x + 2 * r * a->n, *value = gate + a->n;
        float *out = (float *)a->out + r * a->n;
#pragma omp simd
        for (size_t i = 0; i < a->n; i++)
            out[i] = gate[i] / (1.0f + mb_expf(-gate[i])) * value[i];
    }
}

void MB_CPU(swiglu_backward)(struct mb_context *ctx, struct mb_stream *stream,
                             const struct mb_swiglu_backward *a)
{
    (void)ctx;
    (void)stream;
    for (size_t r = 0; r < a->n_rows; r++) {
        const float *gate = (const float *)a->x + 2 * r * a->n, *value = gate + a->n;
        const float *d_out = (const float *)a->d_out + r * a->n;
        float *d_gate = (float *)a->d_x + 2 * r * a->n, *d_value = d_gate + a->n;
#pragma omp simd
        for (size_t i = 0; i < a->n; i++) {
            float g = gate[i], s = 1.0f / (1.0f + mb_expf(-g));
            d_gate[i] = d_out[i] * value[i] * s * (1.0f + g * (1.0f - s));
            d_value[i] = d_out[i] * g * s;
        }
    }
}
