/* Sums in double, of squares and of what is 0: partial sums of blocks, then their sum by one block.
 */
#include "worker/kernels/cuda/device.cuh"

enum { THREADS = 256, MAX_BLOCKS = 1024 };

static __device__ double block_total(double x)
{
    __shared__ double shared[THREADS];
    shared[threadIdx.x] = x;
    __syncthreads();
    for (int i = THREADS / 2; i > 0; i /= 2) {
        if ((int)threadIdx.x < i)
            shared[threadIdx.x] += shared[threadIdx.x + i];
        __syncthreads();
    }
    return shared[0];
}

/* LOADS of 16 bytes are under way at a time; x begins on such a boundary. */
__global__ void square_kernel(const float *x, size_t n, double *parts)
{
    constexpr int N = vec<float>::N, LOADS = 4;
    const size_t stride = (size_t)gridDim.x * THREADS, n_vecs = n / N;
    double total = 0;
    for (size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x; i < n_vecs; i += LOADS * stride) {
        vec<float> v[LOADS] = {};
#pragma unroll
        for (int k = 0; k < LOADS; k++)
            if (i + k * stride < n_vecs)
                v[k] = load_vec(x + (i + k * stride) * N);
#pragma unroll
        for (int k = 0; k < LOADS; k++)
            for (int e = 0; e < N; e++)
                total += (double)v[k].v[e] * (double)v[k].v[e];
    }
    for (size_t i = n_vecs * N + blockIdx.x * (size_t)THREADS + threadIdx.x; i < n; i += stride)
        total += (double)x[i] * (double)x[i];
    total = block_total(total);
    if (threadIdx.x == 0)
        parts[blockIdx.x] = total;
}

__global__ void any_square_kernel(const float *x, size_t n, double *parts)
{
    double total = 0;
    for (size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x; i < n;
         i += (size_t)gridDim.x * THREADS)
        total += (double)x[i] * (double)x[i];
    total = block_total(total);
    if (threadIdx.x == 0)
        parts[blockIdx.x] = total;
}

__global__ void zeros_kernel(const float *x, size_t n, double *parts)
{
    double total = 0;
    for (size_t i = blockIdx.x * (size_t)THREADS + threadIdx.x; i < n;
         i += (size_t)gridDim.x * THREADS)
        total += x[i] == 0;
    total = block_total(total);
    if (threadIdx.x == 0)
        parts[blockIdx.x] = total;
}

__global__ void total_kernel(const double *parts, unsigned n, double *sum)
{
    double total = 0;
    for (unsigned i = threadIdx.x; i < n; i += THREADS)
        total += parts[i];
    total = block_total(total);
    if (threadIdx.x == 0)
        *sum += total;
}

void mb_cuda_squared_norm(struct mb_context *ctx, struct mb_stream *stream, const float *x,
                          size_t n, double *sum)
{
    (void)ctx;
    double *parts = (double *)stream->workspace;
    const unsigned blocks = (unsigned)at_most(blocks_for(n, THREADS), MAX_BLOCKS);
    if (n == 0)
        return;
    if (is_aligned(x))
        square_kernel<<<blocks, THREADS, 0, stream->cuda>>>(x, n, parts);
    else
        any_square_kernel<<<blocks, THREADS, 0, stream->cuda>>>(x, n, parts);
    total_kernel<<<1, THREADS, 0, stream->cuda>>>(parts, blocks, sum);
    mb_cuda_launched(stream, "squared_norm");
}

void mb_cuda_count_zeros(struct mb_context *ctx, struct mb_stream *stream, const float *x, size_t n,
                         double *n_zeros)
{
    (void)ctx;
    double *parts = (double *)stream->workspace;
    const unsigned blocks = (unsigned)at_most(blocks_for(n, THREADS), MAX_BLOCKS);
    if (n == 0)
        return;
    zeros_kernel<<<blocks, THREADS, 0, stream->cuda>>>(x, n, parts);
    total_kernel<<<1, THREADS, 0, stream->cuda>>>(parts, blocks, n_zeros);
    mb_cuda_launched(stream, "count_zeros");
}
