/* What is counted of gradients: the sum of squares, in double, since that of a whole model is one
 * of very unequal terms; and how many are 0. */
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

void MB_CPU(count_zeros)(struct mb_context *ctx, struct mb_stream *stream, const float *x, size_t n,
                         double *n_zeros)
{
    (void)ctx;
    (void)stream;
    size_t count = 0;
#pragma omp simd reduction(+ : count)
    for (size_t i = 0; i < n; i++)
        count += x[i] == 0;
    *n_zeros += (double)count;
}
