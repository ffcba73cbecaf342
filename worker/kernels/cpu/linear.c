/* Linear layer with bias. Forward writes the bias first and lets the product add to it: one pass
 * less. */
#include <string.h>
#include "worker/kernels/cpu/cpu.h"

void MB_CPU(linear_forward)(struct mb_context *ctx, struct mb_stream *stream,
                            const struct mb_linear_forward *a)
{
    (void)stream;
    if (a->bias != NULL)
        for (size_t r = 0; r < a->n_rows; r++)
            memcpy(a->out + r * a->n_out, a->bias, a->n_out * sizeof(float));
    mb_sgemm(&ctx->blas, MB_N, MB_T, a->n_rows, a->n_out, a->n_in, 1, a->x, a->n_in, a->weight,
             a->n_in, a->bias != NULL ? 1 : 0, a->out, a->n_out);
}

void MB_CPU(linear_backward)(struct mb_context *ctx, struct mb_stream *stream,
                             const struct mb_linear_backward *a)
{
    (void)stream;
    mb_sgemm(&ctx->blas, MB_N, MB_N, a->n_rows, a->n_in, a->n_out, 1, a->d_out, a->n_out, a->weight,
             a->n_in, 0, a->d_x, a->n_in);
    mb_sgemm(&ctx->blas, MB_T, MB_N, a->n_out, a->n_in, a->n_rows, 1, a->d_out, a->n_out, a->x,
             a->n_in, 1, a->d_weight, a->n_in);
    if (a->d_bias == NULL)
        return;
    for (size_t r = 0; r < a->n_rows; r++) {
        const float *restrict d_out = a->d_out + r * a->n_out;
        float *restrict d_bias = a->d_bias;
        for (size_t i = 0; i < a->n_out; i++)
            d_bias[i] += d_out[i];
    }
}
