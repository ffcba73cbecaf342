/* What kernels share: numbers of all dtypes, 16 bytes at a time, sums over a warp or a block. */
#ifndef MOBULA_WORKER_KERNELS_CUDA_DEVICE_CUH
#define MOBULA_WORKER_KERNELS_CUDA_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include "worker/kernels/cuda/cuda.h"

typedef __nv_bfloat16 bf16;
typedef __half fp16;

enum { WARP = 32 };

static __device__ __forceinline__ float to_float(float x)
{
    return x;
}

static __device__ __forceinline__ float to_float(bf16 x)
{
    return __bfloat162float(x);
}

static __device__ __forceinline__ float to_float(fp16 x)
{
    return __half2float(x);
}

template <class T> __device__ __forceinline__ T from_float(float x);

template <> __device__ __forceinline__ float from_float<float>(float x)
{
    return x;
}

template <> __device__ __forceinline__ bf16 from_float<bf16>(float x)
{
    return __float2bfloat16_rn(x);
}

template <> __device__ __forceinline__ fp16 from_float<fp16>(float x)
{
    return __float2half_rn(x);
}

/* f(T()) with the T of a dtype. */
template <class F> static inline void with_type(enum mb_dtype dtype, const F &f)
{
    switch (dtype) {
    case MB_DTYPE_F32:
        f(float());
        break;
    case MB_DTYPE_BF16:
        f(bf16());
        break;
    case MB_DTYPE_F16:
        f(fp16());
        break;
    }
}

/* W of T, one behind the other: one load or store. */
template <class T, int W> struct alignas(W * sizeof(T)) neighbours {
    T v[W];
};

/* 16 bytes of T: one load or store. */
template <class T> struct alignas(16) vec {
    static constexpr int N = 16 / sizeof(T);
    T v[N];
};

template <class T> __device__ __forceinline__ vec<T> load_vec(const T *p)
{
    return *reinterpret_cast<const vec<T> *>(p);
}

template <class T> __device__ __forceinline__ void store_vec(T *p, const vec<T> &x)
{
    *reinterpret_cast<vec<T> *>(p) = x;
}

static inline bool is_aligned(const void *p)
{
    return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

static __device__ __forceinline__ float warp_sum(float x)
{
    for (int i = WARP / 2; i > 0; i /= 2)
        x += __shfl_xor_sync(~0u, x, i);
    return x;
}

static __device__ __forceinline__ float warp_max(float x)
{
    for (int i = WARP / 2; i > 0; i /= 2)
        x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
    return x;
}

/* Sum over a block of at most 1024 threads, known to all of them. shared: [WARP]; may be used again
 * at once. */
static __device__ __forceinline__ float block_sum(float x, float *shared)
{
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    x = warp_sum(x);
    __syncthreads();
    if (lane == 0)
        shared[warp] = x;
    __syncthreads();
    return warp_sum(lane < (int)(blockDim.x + WARP - 1) / WARP ? shared[lane] : 0);
}

static __device__ __forceinline__ float block_max(float x, float *shared)
{
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0)
        shared[warp] = x;
    __syncthreads();
    return warp_max(lane < (int)(blockDim.x + WARP - 1) / WARP ? shared[lane] : shared[0]);
}

static inline size_t at_most(size_t n, size_t bound)
{
    return n < bound ? n : bound;
}

/* Blocks for n elements of work at `per_block` each. */
static inline unsigned blocks_for(size_t n, size_t per_block)
{
    return (unsigned)((n + per_block - 1) / per_block);
}

#endif
