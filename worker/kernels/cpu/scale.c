/* x *= a */
#include "worker/kernels/cpu/cpu.h"

void MB_CPU(scale)(struct mb_context *ctx, struct mb_stream *stream, float *x, size_t n, float a)
{
    (void)ctx;
    (void)stream;
    for (size_t i = 0; i < n; i++)
        x[i] *= a;
}
