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

/* Eight at a time; x and y begin on boundaries of 16 bytes. */
__global__ void convert_vectors_kernel(bf16 *y, const float *x, size_t n_vecs)
{
    constexpr int N = vec<bf16>::N;
    const size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x;
    if (i >= n_vecs)
        return;
    const vec<float> low = load_vec(x + i * N), high = load_vec(x + i * N + N / 2);
    vec<bf16> out;
#pragma unroll
    for (int e = 0; e < N / 2; e++) {
        out.v[e] = from_float<bf16>(low.v[e]);
        out.v[e + N / 2] = from_float<bf16>(high.v[e]);
    }
    store_vec(y + i * N, out);
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
    const size_t whole = is_aligned(x) && is_aligned(y) ? n / vec<bf16>::N : 0;
    if (dtype == MB_DTYPE_BF16 && whole > 0) {
        const size_t done = whole * vec<bf16>::N;
        convert_vectors_kernel<<<blocks_for(whole, THREADS), THREADS, 0, stream->cuda>>>((bf16 *)y,
                                                                                         x, whole);
        if (done < n)
            convert_kernel<<<1, THREADS, 0, stream->cuda>>>((bf16 *)y + done, x + done, n - done);
    } else if (dtype == MB_DTYPE_BF16)
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
