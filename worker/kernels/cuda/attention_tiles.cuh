/*
 * What the kernels with matrix units do with a tile of scores, in the registers of a warp: mask,
 * softmax, dropout, gradients. mma.cuh says which elements a lane has.
 */
#ifndef MOBULA_WORKER_KERNELS_CUDA_ATTENTION_TILES_CUH
#define MOBULA_WORKER_KERNELS_CUDA_ATTENTION_TILES_CUH

#include "worker/kernels/cuda/attention.cuh"
#include "worker/kernels/cuda/mma.cuh"

enum { KEYS = 64 }; /* of a tile */

#define LOG2_E 1.44269504088896341f

/* The factors of scores (i, j) and (i, j + 1), which mostly share a Philox block. */
static __device__ __forceinline__ void pair_factors(const struct attention &a,
                                                    const struct dropout &d, size_t drops, size_t i,
                                                    size_t j, float factor[2])
{
    const uint64_t e = d.first_element + score_element(a, drops, i, j);
    const uint32_t at = (uint32_t)e % 4;
    uint32_t word[4];
    dropout_words(d, e / 4, word);
    factor[0] = dropout_factor(d, at == 0   ? word[0]
                                  : at == 1 ? word[1]
                                  : at == 2 ? word[2]
                                            : word[3]);
    if (j + 1 == a.key_places.half) { /* the other one's place is not the next */
        factor[1] = score_factor(a, d, drops, i, j + 1);
        return;
    }
    const uint32_t next = at == 0 ? word[1] : at == 1 ? word[2] : word[3];
    if (at == 3)
        dropout_words(d, e / 4 + 1, word);
    factor[1] = dropout_factor(d, at == 3 ? word[0] : next);
}

static __device__ __forceinline__ int valid_rows(int n, int first, int rows)
{
    const int left = n - first;
    return left < rows ? left : rows;
}

/* rows lane / 4 and lane / 4 + 8 of a warp's sums [16, D], times factor, to memory. */
template <int D, class T>
__device__ __forceinline__ void store_rows(T *to, size_t ld, float sum[D / 8][4], int n_valid,
                                           float factor_low, float factor_high)
{
    const int row = threadIdx.x % WARP / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        T *at = to + (size_t)row * ld + n * 8 + column;
        if (row < n_valid)
            *reinterpret_cast<uint32_t *>(at) =
                pack<T>(factor_low * sum[n][0], factor_low * sum[n][1]);
        if (row + 8 < n_valid)
            *reinterpret_cast<uint32_t *>(at + 8 * ld) =
                pack<T>(factor_high * sum[n][2], factor_high * sum[n][3]);
    }
}

template <int D>
__device__ __forceinline__ void store_rows(float *to, size_t ld, float sum[D / 8][4], int n_valid,
                                           float factor_low, float factor_high)
{
    const int row = threadIdx.x % WARP / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        float *at = to + (size_t)row * ld + n * 8 + column;
        if (row < n_valid)
            *reinterpret_cast<float2 *>(at) = {factor_low * sum[n][0], factor_low * sum[n][1]};
        if (row + 8 < n_valid)
            *reinterpret_cast<float2 *>(at + 8 * ld) = {factor_high * sum[n][2],
                                                        factor_high * sum[n][3]};
    }
}

/* sum = factor sum + rest times what is in memory, rows as above. */
template <int D, class T>
__device__ __forceinline__ void join_rows(const T *old, size_t ld, float sum[D / 8][4], int n_valid,
                                          const float factor[2], const float rest[2])
{
    const int row = threadIdx.x % WARP / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (row + half * 8 >= n_valid)
            continue;
        const T *at = old + (size_t)(row + half * 8) * ld + column;
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                sum[n][2 * half + e] =
                    factor[half] * sum[n][2 * half + e] + rest[half] * to_float(at[n * 8 + e]);
    }
}

/* The end of forward: a warp's sums [16, D] with the maxima and totals of its scores, to out and
 * log_sum, joined with what is there if a.joins. The pointers are to the first of the rows. */
template <int D, class T>
__device__ __forceinline__ void store_outcome(const struct attention &a, T *out, float *log_sum,
                                              float sum[D / 8][4], const float maximum[2],
                                              float total[2], int n_valid)
{
    const int lane = threadIdx.x % WARP;
    float factor[2], rest[2] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = lane / 4 + half * 8;
        total[half] += __shfl_xor_sync(~0u, total[half], 1);
        total[half] += __shfl_xor_sync(~0u, total[half], 2);
        float log_all = a.scale * maximum[half] + logf(total[half]);
        factor[half] = 1 / total[half];
        if (a.joins && row < n_valid) {
            const float here = log_all, before = log_sum[row], most = fmaxf(here, before);
            log_all = most + logf(expf(before - most) + expf(here - most));
            factor[half] *= expf(here - log_all);
            rest[half] = expf(before - log_all);
        }
        __syncwarp(); /* all lanes have read what is there */
        if (lane % 4 == 0 && row < n_valid)
            log_sum[row] = log_all;
    }
    if (a.joins) {
        join_rows<D>(out, a.ld_out, sum, n_valid, factor, rest);
        factor[0] = factor[1] = 1;
    }
    store_rows<D>(out, a.ld_out, sum, n_valid, factor[0], factor[1]);
}

/* A warp's d_q, without the scale, to the row d_q on. */
template <int D, class T>
__device__ __forceinline__ void store_d_q(const struct attention &a, T *d_q, float sum[D / 8][4],
                                          int n_valid)
{
    float factor[2] = {a.scale, a.scale};
    if (a.joins) {
        const float rest[2] = {1, 1};
        join_rows<D>(d_q, a.ld_qkv, sum, n_valid, factor, rest);
        factor[0] = factor[1] = 1;
    }
    store_rows<D>(d_q, a.ld_qkv, sum, n_valid, factor[0], factor[1]);
}

/* A warp's d_k, without the scale, and d_v, to d_kv or, where that is NULL, d_kv_sum. */
template <int D, class T>
__device__ __forceinline__ void store_d_kv(const struct attention &a, T *d_kv, float *d_kv_sum,
                                           size_t k, size_t v, float d_k[D / 8][4],
                                           float d_v[D / 8][4], int n_valid)
{
    if (d_kv != nullptr) {
        store_rows<D>(d_kv + k, a.ld_kv, d_k, n_valid, a.scale, a.scale);
        store_rows<D>(d_kv + v, a.ld_kv, d_v, n_valid, 1, 1);
    } else {
        store_rows<D>(d_kv_sum + k, a.ld_kv, d_k, n_valid, a.scale, a.scale);
        store_rows<D>(d_kv_sum + v, a.ld_kv, d_v, n_valid, 1, 1);
    }
}

/* One row's share of the online softmax: scores x[.][2 half + {0, 1}] become probabilities of the
 * new maximum; returns what everything before has to be multiplied with. */
static __device__ __forceinline__ float softmax_row(float x[KEYS / 8][4], int half, float scale2,
                                                    float *maximum, float *total)
{
    float top = *maximum;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
        top = fmaxf(top, fmaxf(x[n][2 * half], x[n][2 * half + 1]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float rescale = exp2_fast((*maximum - top) * scale2);
    float sum = 0;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; i++) {
            x[n][i] = exp2_fast(x[n][i] * scale2 - top * scale2);
            sum += x[n][i];
        }
    *maximum = top;
    *total = *total * rescale + sum;
    return rescale;
}

/* How many first keys the queries before the end see. */
static __device__ __forceinline__ int keys_seen(const struct attention &a, int end)
{
    return a.is_causal ? end : a.n_keys;
}

/* Scores of keys that their query does not see become minus infinity; i, j: of the sum's first
 * element. */
template <int N>
__device__ __forceinline__ void mask_scores(const struct attention &a, float x[N / 8][4], int i,
                                            int j)
{
    const int last = a.is_causal ? i + (int)threadIdx.x % WARP / 4 : a.n_keys - 1;
    const int eight_on = a.is_causal ? last + 8 : last;
    j += threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (j + n * 8 + e % 2 > (e / 2 ? eight_on : last))
                x[n][e] = -INFINITY;
}

template <int N>
__device__ void drop_scores(const struct attention &a, const struct dropout &d, size_t drops,
                            float x[N / 8][4], int i, int j)
{
    i += threadIdx.x % WARP / 4;
    j += threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < N / 8; n++)
        for (int half = 0; half < 2; half++) {
            float factor[2];
            pair_factors(a, d, drops, (size_t)(i + half * 8), (size_t)(j + n * 8), factor);
            x[n][2 * half] *= factor[0];
            x[n][2 * half + 1] *= factor[1];
        }
}

/* Scores and d_out v^T of [16 keys, QUERIES] to P^T and dS^T (without the scale). MASKS: some of
 * the queries do not see some of the keys, or lie behind the last. */
template <int QUERIES, bool DROPS, bool MASKS>
__device__ __forceinline__ void probabilities(const struct attention &a, const struct dropout &d,
                                              size_t drops, float x[QUERIES / 8][4],
                                              float d_x[QUERIES / 8][4], int i0, int j0,
                                              const float *log2_sum, const float *delta)
{
    const int key = j0 + threadIdx.x % WARP / 4, first = threadIdx.x % 4 * 2;
    const float scale2 = a.scale * LOG2_E;
#pragma unroll
    for (int n = 0; n < QUERIES / 8; n++) {
        const float2 l = *reinterpret_cast<const float2 *>(log2_sum + n * 8 + first);
        const float2 t = *reinterpret_cast<const float2 *>(delta + n * 8 + first);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int i = i0 + n * 8 + first + e % 2, j = key + e / 2 * 8;
            const bool seen = !MASKS || ((!a.is_causal || j <= i) && i < a.n_queries);
            float p = exp2_fast(x[n][e] * scale2 - (e % 2 ? l.y : l.x));
            if (MASKS)
                p = seen ? p : 0;
            if (DROPS) {
                const float factor = seen ? score_factor(a, d, drops, (size_t)i, (size_t)j) : 0;
                d_x[n][e] *= factor;
                x[n][e] = p * factor;
            } else {
                x[n][e] = p;
            }
            d_x[n][e] = p * (d_x[n][e] - (e % 2 ? t.y : t.x));
        }
    }
}

#endif
