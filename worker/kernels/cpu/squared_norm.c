/* Sum of squares, in double: the gradient norm of a whole model is a sum of very unequal terms. */
#include "worker/kernels/cpu/cpu.h"

void MB_CPU(squared_norm)(struct mb_context *ctx, struct mb_stream *stream, const float *x,
                          size_t n, double *sum)
{
    (void)ctx;
    (void)stream;
    double total = 0;
#pragma omp simd reduction(+ : total)
    for (size_t i = 0; i < n; i++)
        total += (double)x[i] * (double)x[i];
    *sum += total;
}
