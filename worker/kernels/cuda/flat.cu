/* Flat ranges: x *= a, y += a x, fp32 in halves and back, fp32 rounded to fp16, to bf16 and back.
 */
#include "worker/kernels/cuda/device.cuh"
#include "worker/kernels/split.h"

enum { THREADS = 256, MAX_BLOCKS = 4096 };

static unsigned grid(size_t n)
{
    return (unsigned)at_most(blocks_for(n, THREADS), MAX_BLOCKS);
}

__global__ void scale_kernel(float *x, size_t n, float a)
{
    for (size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x; i < n;
         i += (size_t)gridDim.x * THREADS)
        x[i] *= a;
}

__global__ void axpy_kernel(float *y, const float *x, size_t n, float a)
{
    for (size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x; i < n;
         i += (size_t)gridDim.x * THREADS)
        y[i] += a * x[i];
}

__global__ void split_kernel(uint16_t *upper, uint16_t *lower, const float *x, size_t n)
{
    for (size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x; i < n;
         i += (size_t)gridDim.x * THREADS) {
        const float v = x[i];
        upper[i] = mb_split_upper(v);
        lower[i] = mb_split_lower(v);
    }
}

__global__ void join_kernel(float *x, const uint16_t *upper, const uint16_t *lower, size_t n)
{
    for (size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x; i < n;
         i += (size_t)gridDim.x * THREADS)
        x[i] = mb_split_join(upper[i], lower[i]);
}

__global__ void narrow_kernel(__half2 *out, const float2 *x, size_t n_pairs, size_t n_left)
{
    for (size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x; i < n_pairs;
         i += (size_t)gridDim.x * THREADS)
        out[i] = __float22half2_rn(x[i]);
    if (blockIdx.x == 0 && threadIdx.x < n_left)
        reinterpret_cast<fp16 *>(out)[2 * n_pairs] =
            __float2half_rn(reinterpret_cast<const float *>(x)[2 * n_pairs]);
}

__global__ void to_bf16_kernel(bf16 *out, const float *x, size_t n)
{
    for (size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x; i < n;
         i += (size_t)gridDim.x * THREADS)
        out[i] = __float2bfloat16_rn(x[i]);
}

__global__ void from_bf16_kernel(float *out, const bf16 *x, size_t n)
{
    for (size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x; i < n;
         i += (size_t)gridDim.x * THREADS)
        out[i] = __bfloat162float(x[i]);
}

void mb_cuda_scale(struct mb_context *ctx, struct mb_stream *stream, float *x, size_t n, float a)
{
    (void)ctx;
    if (n == 0)
        return;
    scale_kernel<<<grid(n), THREADS, 0, stream->cuda>>>(x, n, a);
    mb_cuda_launched(stream, "scale");
}

void mb_cuda_axpy(struct mb_context *ctx, struct mb_stream *stream, float *y, const float *x,
                  size_t n, float a)
{
    (void)ctx;
    if (n == 0)
        return;
    axpy_kernel<<<grid(n), THREADS, 0, stream->cuda>>>(y, x, n, a);
    mb_cuda_launched(stream, "axpy");
}

void mb_cuda_split(struct mb_context *ctx, struct mb_stream *stream, uint16_t *upper,
                   uint16_t *lower, const float *x, size_t n)
{
    (void)ctx;
    if (n == 0)
        return;
    split_kernel<<<grid(n), THREADS, 0, stream->cuda>>>(upper, lower, x, n);
    mb_cuda_launched(stream, "split");
}

void mb_cuda_join(struct mb_context *ctx, struct mb_stream *stream, float *x, const uint16_t *upper,
                  const uint16_t *lower, size_t n)
{
    if (n == 0)
        return;
    cudaSetDevice(ctx->index); /* a save's thread may come first with this */
    join_kernel<<<grid(n), THREADS, 0, stream->cuda>>>(x, upper, lower, n);
    mb_cuda_launched(stream, "join");
}

void mb_cuda_narrow(struct mb_context *ctx, struct mb_stream *stream, uint16_t *out, const float *x,
                    size_t n)
{
    (void)ctx;
    if (n == 0)
        return;
    narrow_kernel<<<grid(n / 2 + 1), THREADS, 0, stream->cuda>>>((__half2 *)out, (const float2 *)x,
                                                                 n / 2, n % 2);
    mb_cuda_launched(stream, "narrow");
}

void mb_cuda_to_bf16(struct mb_context *ctx, struct mb_stream *stream, uint16_t *out,
                     const float *x, size_t n)
{
    (void)ctx;
    if (n == 0)
        return;
    to_bf16_kernel<<<grid(n), THREADS, 0, stream->cuda>>>((bf16 *)out, x, n);
    mb_cuda_launched(stream, "to_bf16");
}

void mb_cuda_from_bf16(struct mb_context *ctx, struct mb_stream *stream, float *out,
                       const uint16_t *x, size_t n)
{
    (void)ctx;
    if (n == 0)
        return;
    from_bf16_kernel<<<grid(n), THREADS, 0, stream->cuda>>>(out, (const bf16 *)x, n);
    mb_cuda_launched(stream, "from_bf16");
}

cudaError_t mb_cuda_has_code(void)
{
    struct cudaFuncAttributes a;
    cudaError_t e = cudaFuncGetAttributes(&a, (const void *)scale_kernel);
    cudaGetLastError(); /* it is returned, not left behind */
    return e;
}
