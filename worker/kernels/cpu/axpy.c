/* y += a x */
#include "worker/kernels/cpu/cpu.h"

void MB_CPU(axpy)(struct mb_context *ctx, struct mb_stream *stream, float *y, const float *x,
                  size_t n, float a)
{
    (void)ctx;
    (void)stream;
#pragma omp simd
    for (size_t i = 0; i < n; i++)
        y[i] += a * x[i];
}
