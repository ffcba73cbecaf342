/*
 * Linear layer with bias. Forward writes the bias first and lets the product add to it: one pass
 * less. The residual and GELU are passes of their own behind it.
 */
#include <string.h>
#include "worker/kernels/cpu/cpu.h"

void MB_CPU(linear_forward)(struct mb_context *ctx, struct mb_stream *stream,
                            const struct mb_linear_forward *a)
{
    const float *residual = a->residual;
    float *out = a->out;
    if (a->bias != NULL)
        for (size_t r = 0; r < a->n_rows; r++)
            memcpy(out + r * a->n_out, a->bias, a->n_out * sizeof(float));
    mb_sgemm(&ctx->blas, MB_N, MB_T, a->n_rows, a->n_out, a->n_in, 1, a->x, a->n_in, a->weight,
             a->n_in, a->bias != NULL ? 1 : 0, out, a->n_out);
    if (residual != NULL) {
#pragma omp simd
        for (size_t i = 0; i < a->n_rows * a->n_out; i++)
            out[i] = residual[i] + out[i];
    }
    if (a->gelu_out != NULL) {
        struct mb_gelu gelu = {
            .x = out, .out = a->gelu_out, .n = a->n_rows * a->n_out, .form = a->form};
        MB_CPU(gelu_forward)(ctx, stream, &gelu);
    }
}

void MB_CPU(linear_backward)(struct mb_context *ctx, struct mb_stream *stream,
                             const struct mb_linear_backward *a)
{
    const float *all_d_out = a->d_out;
    if (a->d_x != NULL)
        mb_sgemm(&ctx->blas, MB_N, MB_N, a->n_rows, a->n_in, a->n_out, 1, a->d_out, a->n_out,
                 a->weight, a->n_in, 0, a->d_x, a->n_in);
    if (a->d_weight != NULL)
        mb_sgemm(&ctx->blas, MB_T, MB_N, a->n_out, a->n_in, a->n_rows, 1, a->d_out, a->n_out, a->x,
                 a->n_in, a->sets_d_weight ? 0 : 1, a->d_weight, a->n_in);
    if (a->d_x != NULL && a->gelu_x != NULL) {
        struct mb_gelu gelu = {.x = a->gelu_x,
                               .d_out = a->d_x,
                               .out = a->d_x,
                               .n = a->n_rows * a->n_in,
                               .form = a->form};
        MB_CPU(gelu_backward)(ctx, stream, &gelu);
    }
    if (a->d_bias == NULL)
        return;
    for (size_t r = 0; r < a->n_rows; r++) {
        const float *restrict d_out = all_d_out + r * a->n_out;
        float *restrict d_bias = a->d_bias;
        for (size_t i = 0; i < a->n_out; i++)
            d_bias[i] += d_out[i];
    }
}
