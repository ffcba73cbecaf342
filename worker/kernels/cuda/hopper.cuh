/*
 * Products of whole warp groups on Hopper's matrix units (wgmma, sm_90a). Right operands are tiles
 * of 64 columns of bf16 or fp16 in shared memory as mma.cuh lays them out, which is the 128-byte
 * swizzle of the hardware if a tile begins on 1024 bytes. A warp's 16 rows of left operands and
 * sums are laid out in registers as for mma.sync, so that both kinds of kernels share what lies
 * between products.
 *
 * The hardware works on the sums until wgmma_wait(); registers that it reads or writes are named to
 * the compiler on both sides (wgmma_guard), or it would move their uses.
 */
#ifndef MOBULA_WORKER_KERNELS_CUDA_HOPPER_CUH
#define MOBULA_WORKER_KERNELS_CUDA_HOPPER_CUH

#include "worker/kernels/cuda/mma.cuh"

enum { WGMMA_ALIGN = 1024 };

/* The tile from its row 0; rows in groups of eight, 1024 bytes apart. */
template <class T> __device__ __forceinline__ uint64_t wgmma_tile(const T *tile)
{
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(tile);
    return (uint64_t)((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

/* Steps of 16 in a descriptor: along the columns, and along the rows. */
enum { WGMMA_COLUMNS_16 = 32 >> 4, WGMMA_ROWS_16 = 16 * 128 >> 4 };

/* What ordinary stores and cp.async wrote is seen by the products behind the next barrier. */
__device__ __forceinline__ void wgmma_publish()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void wgmma_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING> __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void wgmma_guard(float (&x)[8][4])
{
#pragma unroll
    for (int n = 0; n < 8; n++)
        asm volatile("" : "+f"(x[n][0]), "+f"(x[n][1]), "+f"(x[n][2]), "+f"(x[n][3])::"memory");
}

__device__ __forceinline__ void wgmma_guard(uint32_t (&a)[4][4])
{
#pragma unroll
    for (int k = 0; k < 4; k++)
        asm volatile("" : "+r"(a[k][0]), "+r"(a[k][1]), "+r"(a[k][2]), "+r"(a[k][3])::"memory");
}

#define WGMMA_SUM                                                                                  \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "  \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define WGMMA_ROW(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define WGMMA_ROWS(d)                                                                              \
    WGMMA_ROW(d, 0), WGMMA_ROW(d, 1), WGMMA_ROW(d, 2), WGMMA_ROW(d, 3), WGMMA_ROW(d, 4),           \
        WGMMA_ROW(d, 5), WGMMA_ROW(d, 6), WGMMA_ROW(d, 7)

#define WGMMA_TRANSPOSED(type)                                                                     \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %34, 0;\n"                                \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " WGMMA_SUM         \
                 ", %32, %33, adds, 1, 1, 0, 0;\n}\n"                                              \
                 : WGMMA_ROWS(sum)                                                                 \
                 : "l"(a), "l"(b), "r"(adds))

/* sum [64, 64] (+)= a [64, 16] b^T, both tiles in shared memory, b [64, 16]; adds: 0 or 1. */
template <class T>
__device__ __forceinline__ void wgmma_transposed(float (&sum)[8][4], uint64_t a, uint64_t b,
                                                 int adds)
{
    if constexpr (is_half<T>::value)
        WGMMA_TRANSPOSED("f16");
    else
        WGMMA_TRANSPOSED("bf16");
}

#define WGMMA_OF_ROWS(type)                                                                        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " WGMMA_SUM         \
                 ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"                                      \
                 : WGMMA_ROWS(sum)                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

/* sum [64, 64] += a [64, 16] b, a in registers, b [16, 64] rows of a tile. */
template <class T>
__device__ __forceinline__ void wgmma_rows(float (&sum)[8][4], const uint32_t (&a)[4], uint64_t b)
{
    if constexpr (is_half<T>::value)
        WGMMA_OF_ROWS("f16");
    else
        WGMMA_OF_ROWS("bf16");
}

#endif
