/* fp32 in halves, and back; fp32 rounded to bf16, and back. */
#include "base/half.h"
#include "worker/kernels/split.h"
#include "worker/kernels/cpu/cpu.h"

void MB_CPU(split)(struct mb_context *ctx, struct mb_stream *stream, uint16_t *upper,
                   uint16_t *lower, const float *x, size_t n)
{
    (void)ctx;
    (void)stream;
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        upper[i] = mb_split_upper(x[i]);
        lower[i] = mb_split_lower(x[i]);
    }
}

void MB_CPU(join)(struct mb_context *ctx, struct mb_stream *stream, float *x, const uint16_t *upper,
                  const uint16_t *lower, size_t n)
{
    (void)ctx;
    (void)stream;
#pragma omp simd
    for (size_t i = 0; i < n; i++)
        x[i] = mb_split_join(upper[i], lower[i]);
}

void MB_CPU(to_bf16)(struct mb_context *ctx, struct mb_stream *stream, uint16_t *restrict out,
                     const float *restrict x, size_t n)
{
    (void)ctx;
    (void)stream;
#pragma omp simd
    for (size_t i = 0; i < n; i++)
        out[i] = mb_float_bf16(x[i]);
}

void MB_CPU(from_bf16)(struct mb_context *ctx, struct mb_stream *stream, float *restrict out,
                       const uint16_t *restrict x, size_t n)
{
    (void)ctx;
    (void)stream;
#pragma omp simd
    for (size_t i = 0; i < n; i++)
        out[i] = mb_bf16_float(x[i]);
}
