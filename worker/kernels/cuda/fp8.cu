/*
 * Matrices in fp8: the largest magnitude, and both copies of a matrix from one reading.
 *
 * fp8_quantize goes by tiles of ROWS x COLUMNS: a thread has four rows of eight columns, 16 bytes
 * each. It writes its rows as they are, and puts the four rows of each column into one word of
 * shared memory, from where the tile leaves turned, 128 bytes of a column at a time. Words of a
 * column lie in groups of four, in an order that depends on the column, so that neither way meets a
 * bank twice. Factors are powers of two, so that nothing is rounded but by the format.
 */
#include <cuda_fp8.h>
#include "worker/kernels/cuda/amax.cuh"

enum { THREADS = 256, ROWS = 128, COLUMNS = 64, N = 8, MAX_SHIFT = 126 };
enum { WORDS = ROWS / 4 }; /* of a column of a tile */

/* ---- the largest magnitude ---- */

__global__ void __launch_bounds__(THREADS) amax_kernel(const bf16 *x, float *amax, size_t n)
{
    const size_t step = (size_t)gridDim.x * THREADS, n_vecs = n / N;
    const size_t first = blockIdx.x * (size_t)THREADS + threadIdx.x;
    unsigned most = 0;
    size_t i = first;
    for (; i + 3 * step < n_vecs; i += 4 * step) {
        vec<bf16> v[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            v[k] = load_vec(x + (i + k * step) * N);
#pragma unroll
        for (int k = 0; k < 4; k++)
            most = larger(most, v[k]);
    }
    for (; i < n_vecs; i += step)
        most = larger(most, load_vec(x + i * N));
    if (n_vecs * N + first < n)
        most = max(most, magnitude(x[n_vecs * N + first]));
    gain_amax(most, amax);
}

void mb_cuda_fp8_amax(struct mb_context *ctx, struct mb_stream *stream, const struct mb_fp8_amax *a)
{
    const size_t blocks = blocks_for(a->n, (size_t)THREADS * N * 4);
    amax_kernel<<<(unsigned)at_most(blocks, (size_t)ctx->n_sm * 8), THREADS, 0, stream->cuda>>>(
        (const bf16 *)a->x, a->amax, a->n);
    mb_cuda_launched(stream, "largest magnitude");
}

/* ---- both copies ---- */

/* s of 2^s for a largest magnitude with these bits; the formats' largest numbers are both seven
 * eighths of a power of two. */
static __device__ __forceinline__ int shift_of(unsigned amax, bool is_e5m2, int margin)
{
    const int exponent = (int)(amax >> 23) - 126; /* amax < 2^exponent */
    const int too_large = (amax & 0x7fffff) > 0x600000;
    if (amax == 0)
        return 0;
    const int shift = (is_e5m2 ? 16 : 9) - exponent - too_large - margin;
    return min(max(shift, -MAX_SHIFT), MAX_SHIFT);
}

static __device__ __forceinline__ float power_of_two(int s)
{
    return __uint_as_float((unsigned)(s + 127) << 23);
}

/* Eight numbers as eight bytes. */
template <bool E5M2>
static __device__ __forceinline__ uint2 narrow(const vec<bf16> &x, float factor)
{
    constexpr __nv_fp8_interpretation_t FORMAT = E5M2 ? __NV_E5M2 : __NV_E4M3;
    unsigned word[2];
#pragma unroll
    for (int w = 0; w < 2; w++) {
        unsigned half[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float2 two = {to_float(x.v[4 * w + 2 * h]) * factor,
                                to_float(x.v[4 * w + 2 * h + 1]) * factor};
            half[h] = __nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, FORMAT);
        }
        word[w] = half[0] | half[1] << 16;
    }
    return {word[0], word[1]};
}

/* Word k of the result has byte k of each of the four. */
static __device__ __forceinline__ void turn(const unsigned (&row)[4], unsigned (&column)[4])
{
    const unsigned low01 = __byte_perm(row[0], row[1], 0x5140);
    const unsigned low23 = __byte_perm(row[2], row[3], 0x5140);
    const unsigned high01 = __byte_perm(row[0], row[1], 0x7362);
    const unsigned high23 = __byte_perm(row[2], row[3], 0x7362);
    column[0] = __byte_perm(low01, low23, 0x5410);
    column[1] = __byte_perm(low01, low23, 0x7632);
    column[2] = __byte_perm(high01, high23, 0x5410);
    column[3] = __byte_perm(high01, high23, 0x7632);
}

/* Where the tile has a word of a column: both counted in groups of four words, the latter of the
 * column's eight. */
static __device__ __forceinline__ int place(int column, int word)
{
    return column * WORDS + (((word / 4) ^ (column / N)) * 4 | word % 4);
}

template <bool E5M2>
__global__ void __launch_bounds__(THREADS)
    quantize_kernel(const bf16 *x, uint8_t *rows, uint8_t *columns, struct mb_fp8_scale *scale,
                    size_t n_rows, size_t n_columns, int margin)
{
    __shared__ alignas(16) unsigned tile[COLUMNS * WORDS];
    const size_t first_row = (size_t)blockIdx.y * ROWS, first_column = (size_t)blockIdx.x * COLUMNS;
    const int own_vec = threadIdx.x % (COLUMNS / N), own_word = threadIdx.x / (COLUMNS / N);
    const size_t row = first_row + 4 * (size_t)own_word, column = first_column + own_vec * N;
    vec<bf16> v[4];
    const bool is_in = row < n_rows && column < n_columns;
    if (is_in)
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = load_vec(x + (row + i) * n_columns + column);
    const unsigned amax = __float_as_uint(scale->amax);
    const int shift = shift_of(amax, E5M2, margin);
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0)
        scale->inverse = amax < 0x7f800000 ? power_of_two(-shift) : __uint_as_float(0x7fffffff);
    uint2 narrowed[4];
    if (is_in)
#pragma unroll
        for (int i = 0; i < 4; i++)
            narrowed[i] = narrow<E5M2>(v[i], power_of_two(shift));
    if (is_in && rows != NULL)
#pragma unroll
        for (int i = 0; i < 4; i++)
            __stcs(reinterpret_cast<uint2 *>(rows + (row + i) * n_columns + column), narrowed[i]);
    if (columns == NULL)
        return;
#pragma unroll
    for (int half = 0; half < 2 && is_in; half++) {
        unsigned words[4], turned[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] = half == 0 ? narrowed[i].x : narrowed[i].y;
        turn(words, turned);
#pragma unroll
        for (int k = 0; k < 4; k++)
            tile[place(own_vec * N + 4 * half + k, own_word)] = turned[k];
    }
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < COLUMNS * WORDS / 4; i += THREADS) {
        const int from = i / (WORDS / 4), word = i % (WORDS / 4) * 4;
        if (first_column + from < n_columns && first_row + 4 * word < n_rows)
            __stcs(reinterpret_cast<uint4 *>(columns + (first_column + from) * n_rows + first_row +
                                             4 * word),
                   *reinterpret_cast<const uint4 *>(tile + place(from, word)));
    }
}

void mb_cuda_fp8_quantize(struct mb_context *ctx, struct mb_stream *stream,
                          const struct mb_fp8_quantize *a)
{
    (void)ctx;
    const dim3 blocks(blocks_for(a->n_columns, COLUMNS), blocks_for(a->n_rows, ROWS));
    const auto kernel =
        a->out.format == MB_FP8_E5M2 ? quantize_kernel<true> : quantize_kernel<false>;
    kernel<<<blocks, THREADS, 0, stream->cuda>>>((const bf16 *)a->x, a->out.rows, a->out.columns,
                                                 a->out.scale, a->n_rows, a->n_columns, a->margin);
    mb_cuda_launched(stream, "conversion to fp8");
}
