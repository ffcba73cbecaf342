/* Flat ranges: x *= a, y += a x, conversion. */
#include "worker/kernels/cuda/device.cuh"

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

template <class T> __global__ void convert_kernel(T *y, const float *x, size_t n)
{
    for (size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x; i < n;
         i += (size_t)gridDim.x * THREADS)
        y[i] = from_float<T>(x[i]);
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

void mb_cuda_convert(struct mb_context *ctx, struct mb_stream *stream, void *y, const float *x,
                     size_t n, enum mb_dtype dtype)
{
    (void)ctx;
    if (n == 0)
        return;
    if (dtype == MB_DTYPE_BF16)
        convert_kernel<<<grid(n), THREADS, 0, stream->cuda>>>((bf16 *)y, x, n);
    else
        convert_kernel<<<grid(n), THREADS, 0, stream->cuda>>>((float *)y, x, n);
    mb_cuda_launched(stream, "convert");
}

cudaError_t mb_cuda_has_code(void)
{
    struct cudaFuncAttributes a;
    cudaError_t e = cudaFuncGetAttributes(&a, (const void *)scale_kernel);
    cudaGetLastError(); /* it is returned, not left behind */
    return e;
}
