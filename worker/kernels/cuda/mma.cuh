/*
 * Tiles of bf16 or fp16 in shared memory and products of them on matrix units (mma.sync m16n8k16).
 *
 * A tile has rows of D elements in chunks of 16 bytes; chunk c of row r lies at c ^ (r % 8), so
 * that the eight rows that ldmatrix reads at a time never share a bank. Fragments: of A four
 * registers for 16 x 16, of B two for 16 x 8, of the sum four floats for 16 x 8, where a lane has
 * columns 2 * (lane % 4) + {0, 1} of rows lane / 4 and lane / 4 + 8. Two neighbouring sums, packed,
 * are an A fragment of 16 x 16.
 */
#ifndef MOBULA_WORKER_KERNELS_CUDA_MMA_CUH
#define MOBULA_WORKER_KERNELS_CUDA_MMA_CUH

#include "worker/kernels/cuda/device.cuh"

template <int D, class T>
__device__ __forceinline__ uint32_t tile_address(const T *tile, int row, int chunk)
{
    return (uint32_t)__cvta_generic_to_shared(tile + row * D + (chunk ^ (row & 7)) * 8);
}

/* Begins to copy ROWS rows of D elements; rows at and beyond n_valid become zeros. */
template <int D, int ROWS, int THREADS, class T>
__device__ __forceinline__ void load_tile(T *tile, const T *from, size_t ld, int n_valid)
{
    constexpr int CHUNKS = D / 8;
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS / THREADS; i++) {
        const int at = i * THREADS + (int)threadIdx.x, row = at / CHUNKS, chunk = at % CHUNKS;
        const int size = row < n_valid ? 16 : 0;
        const T *source = from + (size == 0 ? 0 : (size_t)row * ld + (size_t)chunk * 8);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                         tile_address<D>(tile, row, chunk)),
                     "l"(source), "r"(size)
                     : "memory");
    }
}

__device__ __forceinline__ void commit_loads()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until at most PENDING groups of loads are under way. */
template <int PENDING> __device__ __forceinline__ void wait_loads()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#define LDMATRIX(kind, r, address)                                                                 \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" kind ".shared.b16 {%0, %1, %2, %3}, [%4];"        \
                 : "=r"((r)[0]), "=r"((r)[1]), "=r"((r)[2]), "=r"((r)[3])                          \
                 : "r"(address)                                                                    \
                 : "memory")

/* The A fragment of rows [m, m + 16), columns [k, k + 16). */
template <int D, class T>
__device__ __forceinline__ void load_a(uint32_t r[4], const T *tile, int m, int k)
{
    const int lane = threadIdx.x % WARP;
    LDMATRIX("", r, tile_address<D>(tile, m + lane % 16, k / 8 + lane / 16));
}

/* Two B fragments of the tile's transpose: r[0..1] for its rows [n, n + 8), r[2..3] for the next
 * eight, both over columns [k, k + 16). */
template <int D, class T>
__device__ __forceinline__ void load_b(uint32_t r[4], const T *tile, int n, int k)
{
    const int lane = threadIdx.x % WARP;
    LDMATRIX("", r, tile_address<D>(tile, n + lane / 16 * 8 + lane % 8, k / 8 + lane / 8 % 2));
}

/* Two B fragments of the tile itself: r[0..1] for its columns [n, n + 8), r[2..3] for the next
 * eight, both over rows [k, k + 16). */
template <int D, class T>
__device__ __forceinline__ void load_b_rows(uint32_t r[4], const T *tile, int k, int n)
{
    const int lane = threadIdx.x % WARP;
    LDMATRIX(".trans", r, tile_address<D>(tile, k + lane % 16, n / 8 + lane / 16));
}

#define MMA(type)                                                                                  \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, "  \
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                   \
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

template <class T> struct is_half {
    static constexpr bool value = false;
};
template <> struct is_half<fp16> {
    static constexpr bool value = true;
};

template <class T>
__device__ __forceinline__ void multiply_add(float sum[4], const uint32_t a[4], uint32_t b0,
                                             uint32_t b1)
{
    if constexpr (is_half<T>::value)
        MMA("f16");
    else
        MMA("bf16");
}

/* What multiply() and multiply_transposed() are: sum [M][16, 8 N] += a [M][16, 16 K] b. */
template <int D, bool TRANSPOSED, int N, int K, int M, class T>
__device__ __forceinline__ void multiply_tile(float (&sum)[M][N][4], uint32_t (&a)[M][K][4],
                                              const T *tile)
{
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int n = 0; n < N / 2; n++) {
            uint32_t b[4];
            if constexpr (TRANSPOSED)
                load_b<D>(b, tile, n * 16, k * 16);
            else
                load_b_rows<D>(b, tile, k * 16, n * 16);
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply_add<T>(sum[m][2 * n], a[m][k], b[0], b[1]);
                multiply_add<T>(sum[m][2 * n + 1], a[m][k], b[2], b[3]);
            }
        }
}

/* For M tiles of 16 rows: sum [16, N] += a [16, D] tile^T, tile [N, D] */
template <int D, int N, int M, class T>
__device__ __forceinline__ void multiply_transposed(float (&sum)[M][N / 8][4],
                                                    uint32_t (&a)[M][D / 16][4], const T *tile)
{
    multiply_tile<D, true>(sum, a, tile);
}

/* For M tiles of 16 rows: sum [16, D] += a [16, N] tile, tile [N, D] */
template <int D, int N, int M, class T>
__device__ __forceinline__ void multiply(float (&sum)[M][D / 8][4], uint32_t (&a)[M][N / 16][4],
                                         const T *tile)
{
    multiply_tile<D, false>(sum, a, tile);
}

template <class T> __device__ __forceinline__ uint32_t pack(float low, float high)
{
    if constexpr (is_half<T>::value) {
        const __half2 both = __floats2half2_rn(low, high);
        return *reinterpret_cast<const uint32_t *>(&both);
    } else {
        const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<const uint32_t *>(&both);
    }
}

/* Sums [16, N] as A fragments. */
template <class T, int N>
__device__ __forceinline__ void pack_a(uint32_t a[N / 16][4], float x[N / 8][4])
{
#pragma unroll
    for (int k = 0; k < N / 16; k++) {
        a[k][0] = pack<T>(x[2 * k][0], x[2 * k][1]);
        a[k][1] = pack<T>(x[2 * k][2], x[2 * k][3]);
        a[k][2] = pack<T>(x[2 * k + 1][0], x[2 * k + 1][1]);
        a[k][3] = pack<T>(x[2 * k + 1][2], x[2 * k + 1][3]);
    }
}

/* 2^x; flushes denormals. */
__device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif
