/* The largest magnitude of what a kernel writes, formed on its way. */
#ifndef MOBULA_WORKER_KERNELS_CUDA_AMAX_CUH
#define MOBULA_WORKER_KERNELS_CUDA_AMAX_CUH

#include "worker/kernels/cuda/device.cuh"

/* The bits of |x| are ordered as the magnitudes are, a NaN above all. */
template <class T> static __device__ __forceinline__ unsigned magnitude(T x)
{
    return __float_as_uint(fabsf(to_float(x)));
}

template <class P> static __device__ __forceinline__ unsigned larger(unsigned most, const P &x)
{
    constexpr int N = sizeof(x.v) / sizeof(x.v[0]);
#pragma unroll
    for (int i = 0; i < N; i++)
        most = max(most, magnitude(x.v[i]));
    return most;
}

/* *amax becomes the largest of itself and most of all threads of the block; all of them call, once
 * in a kernel. Most blocks find that it has nothing to gain, and spare the memory an atomic. */
static __device__ __forceinline__ void gain_amax(unsigned most, float *amax)
{
    __shared__ unsigned of_block;
    if (threadIdx.x == 0)
        of_block = 0;
    __syncthreads();
    most = __reduce_max_sync(~0u, most);
    if (threadIdx.x % WARP == 0)
        atomicMax(&of_block, most);
    __syncthreads();
    unsigned *to = reinterpret_cast<unsigned *>(amax);
    if (threadIdx.x == 0 && of_block > *reinterpret_cast<volatile unsigned *>(to))
        atomicMax(to, of_block);
}

#endif
