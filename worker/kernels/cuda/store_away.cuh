/* Stores that bypass: what they write leaves the second-level cache first. */
#ifndef MOBULA_WORKER_KERNELS_CUDA_STORE_AWAY_CUH
#define MOBULA_WORKER_KERNELS_CUDA_STORE_AWAY_CUH

#include "worker/kernels/cuda/device.cuh"

/* For results that do not fit that cache anyway. Two reads a write: 4.3 TB/s of an H200 instead of
 * 3.1 (SwiGLU's gradient). */
template <class T, int W>
static __device__ __forceinline__ void store_away(T *p, const neighbours<T, W> &x)
{
    if constexpr (sizeof(x) == 16)
        __stcs(reinterpret_cast<int4 *>(p), reinterpret_cast<const int4 &>(x));
    else
        *reinterpret_cast<neighbours<T, W> *>(p) = x;
}

template <class T> static __device__ __forceinline__ void store_away(T *p, const vec<T> &x)
{
    __stcs(reinterpret_cast<int4 *>(p), reinterpret_cast<const int4 &>(x));
}

#endif
