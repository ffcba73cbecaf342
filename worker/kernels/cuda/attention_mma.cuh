/*
 * Causal attention in bf16 or fp16 on matrix units, in the manner of FlashAttention-2 (Dao 2023):
 * scores live in registers only, and probabilities are computed again in the backward pass.
 *
 * Forward: a block has the queries of one head, a warp 16 M_TILES of them; it walks over tiles of
 * keys and values, which are loaded while the tile before is computed. Backward is two kernels, so
 * that every sum has one writer and one order:
 *  - keys: a warp has 16 keys and keeps their d_k and d_v while the block walks over tiles of
 *    queries, head after head of the group. It computes scores transposed, S^T = k q^T, so that
 *    P^T and dS^T are at once the left operands of d_v += P^T d_out and d_k += dS^T q.
 *  - queries: a warp has 16 queries and keeps their d_q while the block walks over tiles of keys.
 * attention.cu has the formulas, and d_out . out in scratch before these kernels run.
 *
 * Compiling them takes minutes: attention_mma.cu has those of bf16, attention_mma_fp16.cu fp16's.
 */
#ifndef MOBULA_WORKER_KERNELS_CUDA_ATTENTION_MMA_CUH
#define MOBULA_WORKER_KERNELS_CUDA_ATTENTION_MMA_CUH

#include "worker/kernels/cuda/attention_tiles.cuh"

enum { WARPS = 4, THREADS = WARPS * WARP };

/* ---- forward ---- */

template <class T, int D, int M_TILES> struct forward_shared {
    T q[WARPS * M_TILES * 16 * D];
    T k[2][KEYS * D], v[2][KEYS * D];
};

template <class T, int D, int M_TILES, bool DROPS>
__global__ void __launch_bounds__(THREADS)
    mma_forward_kernel(const __grid_constant__ struct attention a, const T *qkv, const T *kv,
                       T *out, float *log_sum, const __grid_constant__ struct dropout given)
{
    const struct dropout d = dropout_now(given);
    extern __shared__ __align__(128) char memory[];
    auto &shared = *reinterpret_cast<forward_shared<T, D, M_TILES> *>(memory);
    constexpr int ROWS = WARPS * M_TILES * 16;
    const int warp = threadIdx.x / WARP;
    const int i0 = (int)(gridDim.x - 1 - blockIdx.x) * ROWS; /* the longest walks begin first */
    const int mine = i0 + warp * M_TILES * 16;
    const struct attention_head h = head_at(a, blockIdx.y / a.n_heads, blockIdx.y % a.n_heads);
    const float scale2 = a.scale * LOG2_E;
    const int rows = valid_rows(a.n_queries, i0, ROWS);
    const int n_tiles = (keys_seen(a, i0 + rows) + KEYS - 1) / KEYS;

    load_tile<D, ROWS, THREADS>(shared.q, qkv + h.q + (size_t)i0 * a.ld_qkv, a.ld_qkv, rows);
    load_tile<D, KEYS, THREADS>(shared.k[0], kv + h.k, a.ld_kv, valid_rows(a.n_keys, 0, KEYS));
    load_tile<D, KEYS, THREADS>(shared.v[0], kv + h.v, a.ld_kv, valid_rows(a.n_keys, 0, KEYS));
    commit_loads();

    uint32_t q[M_TILES][D / 16][4];
    float sum[M_TILES][D / 8][4] = {}, maximum[M_TILES][2], total[M_TILES][2] = {};
    for (int m = 0; m < M_TILES; m++)
        maximum[m][0] = maximum[m][1] = -INFINITY;

    for (int tile = 0; tile < n_tiles; tile++) {
        const int j0 = tile * KEYS, now = tile % 2, next = j0 + KEYS;
        if (tile + 1 < n_tiles) {
            const size_t at = (size_t)next * a.ld_kv;
            const int valid = valid_rows(a.n_keys, next, KEYS);
            load_tile<D, KEYS, THREADS>(shared.k[!now], kv + h.k + at, a.ld_kv, valid);
            load_tile<D, KEYS, THREADS>(shared.v[!now], kv + h.v + at, a.ld_kv, valid);
            commit_loads();
            wait_loads<1>();
        } else {
            wait_loads<0>();
        }
        __syncthreads();
        if (tile == 0)
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int k = 0; k < D / 16; k++)
                    load_a<D>(q[m][k], shared.q, warp * M_TILES * 16 + m * 16, k * 16);
        if (j0 <
            keys_seen(a, mine + M_TILES *
                                    16)) { /* else all these keys lie behind the warp's queries */
            uint32_t p[M_TILES][KEYS / 16][4];
            float x[M_TILES][KEYS / 8][4] = {};
            multiply_transposed<D, KEYS, M_TILES>(x, q, shared.k[now]);
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                if (j0 + KEYS > keys_seen(a, mine + m * 16))
                    mask_scores<KEYS>(a, x[m], mine + m * 16, j0);
                const float low = softmax_row(x[m], 0, scale2, &maximum[m][0], &total[m][0]);
                const float high = softmax_row(x[m], 1, scale2, &maximum[m][1], &total[m][1]);
#pragma unroll
                for (int n = 0; n < D / 8; n++) {
                    sum[m][n][0] *= low;
                    sum[m][n][1] *= low;
                    sum[m][n][2] *= high;
                    sum[m][n][3] *= high;
                }
                if (DROPS)
                    drop_scores<KEYS>(a, d, h.drops, x[m], mine + m * 16, j0);
                pack_a<T, KEYS>(p[m], x[m]);
            }
            multiply<D, KEYS, M_TILES>(sum, p, shared.v[now]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        const int row = mine + m * 16;
        store_outcome<D>(a, out + h.out + (size_t)row * a.ld_out, log_sum + h.index * a.seq + row,
                         sum[m], maximum[m], total[m], valid_rows(a.n_queries, row, 16));
    }
}

/* ---- backward: keys ---- */

/* Of a tile; registers bound it. */
template <int D> constexpr int QUERIES_OF = D == 64 ? 64 : 32;

template <class T, int D> struct keys_shared {
    T q[2][QUERIES_OF<D> * D], d_out[2][QUERIES_OF<D> * D];
    float log2_sum[2][QUERIES_OF<D>], delta[2][QUERIES_OF<D>];
};

template <class T, int D, bool DROPS>
__global__ void __launch_bounds__(THREADS, D == 64 ? 2 : 1)
    mma_keys_kernel(const __grid_constant__ struct attention a, const T *qkv, const T *kv,
                    const T *d_out, const float *log_sum, const float *delta, T *d_kv,
                    float *d_kv_sum, const __grid_constant__ struct dropout given)
{
    const struct dropout d = dropout_now(given);
    extern __shared__ __align__(128) char memory[];
    auto &shared = *reinterpret_cast<keys_shared<T, D> *>(memory);
    constexpr int QUERIES = QUERIES_OF<D>;
    const int warp = threadIdx.x / WARP, j0 = (int)blockIdx.x * KEYS, mine = j0 + warp * 16;
    const int per_group = (int)(a.n_heads / a.n_groups);
    const size_t sample = blockIdx.y / a.n_groups;
    const size_t first = blockIdx.y % a.n_groups * (size_t)per_group;
    const struct attention_head one = head_at(a, sample, first);
    const int i_first = a.is_causal ? j0 / QUERIES * QUERIES : 0;
    const int tiles_of_head = (a.n_queries - i_first + QUERIES - 1) / QUERIES;
    const int n_tiles = per_group * tiles_of_head;

    /* Keys and values pass through the room of the first queries into registers. */
    uint32_t k[1][D / 16][4], v[1][D / 16][4];
    T *const staging = shared.q[0]; /* both buffers together */
    static_assert(sizeof(shared.q) >= KEYS * D * sizeof(T), "keys pass through q");
    for (int what = 0; what < 2; what++) {
        load_tile<D, KEYS, THREADS>(staging,
                                    kv + (what == 0 ? one.k : one.v) + (size_t)j0 * a.ld_kv,
                                    a.ld_kv, valid_rows(a.n_keys, j0, KEYS));
        commit_loads();
        wait_loads<0>();
        __syncthreads();
#pragma unroll
        for (int c = 0; c < D / 16; c++)
            load_a<D>(what == 0 ? k[0][c] : v[0][c], staging, warp * 16, c * 16);
        __syncthreads();
    }

    auto load = [&](int tile, int where) {
        const struct attention_head h = head_at(a, sample, first + (size_t)(tile / tiles_of_head));
        const int i0 = i_first + tile % tiles_of_head * QUERIES;
        const int valid = valid_rows(a.n_queries, i0, QUERIES);
        load_tile<D, QUERIES, THREADS>(shared.q[where], qkv + h.q + (size_t)i0 * a.ld_qkv, a.ld_qkv,
                                       valid);
        load_tile<D, QUERIES, THREADS>(shared.d_out[where], d_out + h.out + (size_t)i0 * a.ld_out,
                                       a.ld_out, valid);
        commit_loads();
        if ((int)threadIdx.x < QUERIES) {
            const bool is_row = (int)threadIdx.x < valid;
            const size_t at = h.index * a.seq + (size_t)i0 + threadIdx.x;
            shared.log2_sum[where][threadIdx.x] = is_row ? log_sum[at] * LOG2_E : 0;
            shared.delta[where][threadIdx.x] = is_row ? delta[at] : 0;
        }
    };

    float d_k[1][D / 8][4] = {}, d_v[1][D / 8][4] = {};
    load(0, 0);
    for (int tile = 0; tile < n_tiles; tile++) {
        const int now = tile % 2, i0 = i_first + tile % tiles_of_head * QUERIES;
        if (tile + 1 < n_tiles) {
            load(tile + 1, !now);
            wait_loads<1>();
        } else {
            wait_loads<0>();
        }
        __syncthreads();
        if (!a.is_causal ||
            i0 + QUERIES > mine) { /* else all these queries lie before the warp's keys */
            float x[1][QUERIES / 8][4] = {}, d_x[1][QUERIES / 8][4] = {};
            uint32_t p[1][QUERIES / 16][4];
            const size_t drops = sample * a.all_heads + first + (size_t)(tile / tiles_of_head);
            multiply_transposed<D, QUERIES, 1>(x, k, shared.q[now]);
            multiply_transposed<D, QUERIES, 1>(d_x, v, shared.d_out[now]);
            if ((a.is_causal && i0 < mine + 15) || i0 + QUERIES > a.n_queries)
                probabilities<QUERIES, DROPS, true>(a, d, drops, x[0], d_x[0], i0, mine,
                                                    shared.log2_sum[now], shared.delta[now]);
            else
                probabilities<QUERIES, DROPS, false>(a, d, drops, x[0], d_x[0], i0, mine,
                                                     shared.log2_sum[now], shared.delta[now]);
            pack_a<T, QUERIES>(p[0], x[0]);
            multiply<D, QUERIES, 1>(d_v, p, shared.d_out[now]);
            pack_a<T, QUERIES>(p[0], d_x[0]);
            multiply<D, QUERIES, 1>(d_k, p, shared.q[now]);
        }
        __syncthreads();
    }
    const size_t at = (size_t)mine * a.ld_kv;
    store_d_kv<D>(a, d_kv, d_kv_sum, one.k + at, one.v + at, d_k[0], d_v[0],
                  valid_rows(a.n_keys, mine, 16));
}

/* ---- backward: queries ---- */

/* How a block of the queries kernel is cut; registers bound it. */
template <int D> struct queries_cut {
    static constexpr int M_TILES = 1, COLUMNS = D == 64 ? 64 : 32;
    static constexpr int BLOCKS = D == 64 ? 3 : 1; /* of a multiprocessor */
    static constexpr int ROWS = WARPS * M_TILES * 16;
};

template <class T, int D> struct queries_shared {
    union {
        struct {
            T q[queries_cut<D>::ROWS * D], d_out[queries_cut<D>::ROWS * D];
        } first; /* on the way to registers */
        struct {
            T k[2][queries_cut<D>::COLUMNS * D], v[2][queries_cut<D>::COLUMNS * D];
        } tiles;
    };
};

template <class T, int D, bool DROPS>
__global__ void __launch_bounds__(THREADS, queries_cut<D>::BLOCKS)
    mma_queries_kernel(const __grid_constant__ struct attention a, const T *qkv, const T *kv,
                       const T *d_out, const float *log_sum, const float *delta, T *d_qkv,
                       const __grid_constant__ struct dropout given)
{
    const struct dropout d = dropout_now(given);
    extern __shared__ __align__(128) char memory[];
    auto &shared = *reinterpret_cast<queries_shared<T, D> *>(memory);
    constexpr int M = queries_cut<D>::M_TILES, N = queries_cut<D>::COLUMNS;
    constexpr int ROWS = queries_cut<D>::ROWS;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int i0 = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, mine = i0 + warp * M * 16;
    const struct attention_head h = head_at(a, blockIdx.y / a.n_heads, blockIdx.y % a.n_heads);
    const int rows = valid_rows(a.n_queries, i0, ROWS);
    const int n_tiles = (keys_seen(a, i0 + rows) + N - 1) / N;
    const float scale2 = a.scale * LOG2_E;

    uint32_t q[M][D / 16][4], g[M][D / 16][4];
    load_tile<D, ROWS, THREADS>(shared.first.q, qkv + h.q + (size_t)i0 * a.ld_qkv, a.ld_qkv, rows);
    load_tile<D, ROWS, THREADS>(shared.first.d_out, d_out + h.out + (size_t)i0 * a.ld_out, a.ld_out,
                                rows);
    commit_loads();
    wait_loads<0>();
    __syncthreads();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
            load_a<D>(q[m][c], shared.first.q, (warp * M + m) * 16, c * 16);
            load_a<D>(g[m][c], shared.first.d_out, (warp * M + m) * 16, c * 16);
        }
    __syncthreads();

    float log2_i[M][2] = {}, delta_i[M][2] = {}, sum[M][D / 8][4] = {};
    for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) {
            const int i = mine + m * 16 + lane / 4 + half * 8;
            if (i < a.n_queries) {
                log2_i[m][half] = log_sum[h.index * a.seq + (size_t)i] * LOG2_E;
                delta_i[m][half] = delta[h.index * a.seq + (size_t)i];
            }
        }
    auto load = [&](int tile, int where) {
        const size_t at = (size_t)tile * N * a.ld_kv;
        const int valid = valid_rows(a.n_keys, tile * N, N);
        load_tile<D, N, THREADS>(shared.tiles.k[where], kv + h.k + at, a.ld_kv, valid);
        load_tile<D, N, THREADS>(shared.tiles.v[where], kv + h.v + at, a.ld_kv, valid);
        commit_loads();
    };
    load(0, 0);
    for (int tile = 0; tile < n_tiles; tile++) {
        const int now = tile % 2, j0 = tile * N;
        if (tile + 1 < n_tiles) {
            load(tile + 1, !now);
            wait_loads<1>();
        } else {
            wait_loads<0>();
        }
        __syncthreads();
        if (j0 < keys_seen(a, mine + M * 16)) {
            float x[M][N / 8][4] = {}, d_x[M][N / 8][4] = {};
            uint32_t d_s[M][N / 16][4];
            multiply_transposed<D, N, M>(x, q, shared.tiles.k[now]);
            multiply_transposed<D, N, M>(d_x, g, shared.tiles.v[now]);
#pragma unroll
            for (int m = 0; m < M; m++) {
                if (DROPS)
                    drop_scores<N>(a, d, h.drops, d_x[m], mine + m * 16, j0);
                if (j0 + N > keys_seen(a, mine + m * 16))
                    mask_scores<N>(a, x[m], mine + m * 16, j0);
#pragma unroll
                for (int n = 0; n < N / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        x[m][n][e] = exp2_fast(x[m][n][e] * scale2 - log2_i[m][e / 2]) *
                                     (d_x[m][n][e] - delta_i[m][e / 2]);
                pack_a<T, N>(d_s[m], x[m]);
            }
            multiply<D, N, M>(sum, d_s, shared.tiles.k[now]);
        }
        __syncthreads();
    }
    for (int m = 0; m < M; m++)
        store_d_q<D>(a, d_qkv + h.q + (size_t)(mine + m * 16) * a.ld_qkv, sum[m],
                     valid_rows(a.n_queries, mine + m * 16, 16));
}

/* ---- launches ---- */

/* More than 48 KiB of shared memory have to be asked for. */
template <class KERNEL, class... ARGS>
static void launch(struct mb_stream *s, KERNEL kernel, dim3 grid, size_t shared_bytes, ARGS... args)
{
    mb_cuda_note(s,
                 cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      (int)shared_bytes),
                 "attention's shared memory");
    kernel<<<grid, THREADS, shared_bytes, s->cuda>>>(args...);
}

template <class T, int D, int M_TILES, bool DROPS>
static void forward(struct mb_stream *s, const struct attention_tiles *t)
{
    const struct attention &a = t->a;
    const dim3 grid(blocks_for((size_t)a.n_queries, WARPS * M_TILES * 16),
                    (unsigned)(t->n_samples * a.n_heads));
    launch(s, mma_forward_kernel<T, D, M_TILES, DROPS>, grid, sizeof(forward_shared<T, D, M_TILES>),
           a, (const T *)t->qkv, (const T *)t->kv, (T *)t->out, t->log_sum, t->dropout);
}

template <class T, int D, bool DROPS>
static void backward(struct mb_stream *s, const struct attention_tiles *t)
{
    const struct attention &a = t->a;
    const T *qkv = (const T *)t->qkv, *kv = (const T *)t->kv, *d_out = (const T *)t->d_out;
    const dim3 keys(blocks_for((size_t)a.n_keys, KEYS), (unsigned)(t->n_samples * a.n_groups));
    const dim3 queries(blocks_for((size_t)a.n_queries, queries_cut<D>::ROWS),
                       (unsigned)(t->n_samples * a.n_heads));
    launch(s, mma_keys_kernel<T, D, DROPS>, keys, sizeof(keys_shared<T, D>), a, qkv, kv, d_out,
           t->log_all, t->delta, (T *)t->d_kv, t->d_kv_sum, t->dropout);
    launch(s, mma_queries_kernel<T, D, DROPS>, queries, sizeof(queries_shared<T, D>), a, qkv, kv,
           d_out, t->log_all, t->delta, (T *)t->d_qkv, t->dropout);
}

template <class T>
static void mma_forward(struct mb_stream *stream, const struct attention_tiles *t)
{
    const bool drops = t->dropout.limit > 0;
    if (t->a.head_dim == 64)
        drops ? forward<T, 64, 2, true>(stream, t) : forward<T, 64, 2, false>(stream, t);
    else
        drops ? forward<T, 128, 1, true>(stream, t) : forward<T, 128, 1, false>(stream, t);
}

template <class T>
static void mma_backward(struct mb_stream *stream, const struct attention_tiles *t)
{
    const bool drops = t->dropout.limit > 0;
    if (t->a.head_dim == 64)
        drops ? backward<T, 64, true>(stream, t) : backward<T, 64, false>(stream, t);
    else
        drops ? backward<T, 128, true>(stream, t) : backward<T, 128, false>(stream, t);
}

#endif
