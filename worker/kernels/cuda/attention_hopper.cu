/*
 * Causal attention in bf16 or fp16 with heads of 64 channels on Hopper's matrix units: the kernels
 * of attention_mma.cu, with products by warp groups, which read their right operands from shared
 * memory themselves. A warp group has 64 queries (or keys), a warp 16 of them.
 *
 * Left operands of scores lie in shared memory, too: kept in registers over several tiles they came
 * out wrong from the second tile on, whatever guarded them. Those of sums are made anew for each
 * tile.
 *
 * Tiles are 64 rows on both sides and begin at multiples of 64, so that what a warp group skips, it
 * skips as a whole: a tile of keys is before, on, or behind the diagonal.
 */
#include "worker/kernels/cuda/attention_tiles.cuh"
#include "worker/kernels/cuda/hopper.cuh"

enum {
    D = 64,
    ROWS = 64, /* of a tile and of a warp group */
    TILE = ROWS * D,
    GROUP = 128, /* threads */
    FORWARD_GROUPS = 2
};

template <class T> struct forward_shared {
    T q[FORWARD_GROUPS * TILE], k[2][TILE], v[2][TILE];
};

template <class T> struct keys_shared {
    T k[TILE], v[TILE], q[2][TILE], d_out[2][TILE];
    float log2_sum[2][ROWS], delta[2][ROWS];
};

template <class T> struct queries_shared {
    T q[TILE], d_out[TILE], k[2][TILE], v[2][TILE];
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* x [64, 64] = a b^T over all columns; begun only. */
template <class T>
static __device__ __forceinline__ void begin_scores(float (&x)[8][4], uint64_t a, uint64_t b)
{
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        wgmma_transposed<T>(x, a + k * WGMMA_COLUMNS_16, b + k * WGMMA_COLUMNS_16, k > 0);
    wgmma_commit();
}

/* sum [64, 64] += p b over all rows of b; begun only. */
template <class T>
static __device__ __forceinline__ void begin_sum(float (&sum)[8][4], const uint32_t (&p)[4][4],
                                                 uint64_t b)
{
#pragma unroll
    for (int k = 0; k < ROWS / 16; k++)
        wgmma_rows<T>(sum, p[k], b + k * WGMMA_ROWS_16);
    wgmma_commit();
}

/* The tile just asked for is there, and seen by the products. */
static __device__ __forceinline__ void await_tile(bool another_is_loading)
{
    if (another_is_loading)
        wait_loads<1>();
    else
        wait_loads<0>();
    wgmma_publish();
    __syncthreads();
}

#endif

/* ---- forward ---- */

template <class T, bool DROPS>
__global__ void __launch_bounds__(FORWARD_GROUPS *GROUP, 2)
    hopper_forward_kernel(const __grid_constant__ struct attention a, const T *qkv, const T *kv,
                          T *out, float *log_sum, const __grid_constant__ struct dropout given)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const struct dropout d = dropout_now(given);
    extern __shared__ __align__(WGMMA_ALIGN) char memory[];
    auto &shared = *reinterpret_cast<forward_shared<T> *>(memory);
    constexpr int THREADS = FORWARD_GROUPS * GROUP, QUERIES = FORWARD_GROUPS * ROWS;
    const int warp = threadIdx.x / WARP;
    const int i0 = (int)(gridDim.x - 1 - blockIdx.x) * QUERIES; /* the longest walks begin first */
    const int group_first = i0 + (int)threadIdx.x / GROUP * ROWS, mine = i0 + warp * 16;
    const struct attention_head h = head_at(a, blockIdx.y / a.n_heads, blockIdx.y % a.n_heads);
    const float scale2 = a.scale * LOG2_E;
    const int rows = valid_rows(a.n_queries, i0, QUERIES);
    const int n_tiles = (keys_seen(a, i0 + rows) + ROWS - 1) / ROWS;

    load_tile<D, QUERIES, THREADS>(shared.q, qkv + h.q + (size_t)i0 * a.ld_qkv, a.ld_qkv, rows);
    load_tile<D, ROWS, THREADS>(shared.k[0], kv + h.k, a.ld_kv, valid_rows(a.n_keys, 0, ROWS));
    load_tile<D, ROWS, THREADS>(shared.v[0], kv + h.v, a.ld_kv, valid_rows(a.n_keys, 0, ROWS));
    commit_loads();

    const uint64_t q = wgmma_tile(shared.q + threadIdx.x / GROUP * TILE);
    float sum[8][4] = {}, maximum[2] = {-INFINITY, -INFINITY}, total[2] = {};
    for (int tile = 0; tile < n_tiles; tile++) {
        const int j0 = tile * ROWS, now = tile % 2, next = j0 + ROWS;
        if (tile + 1 < n_tiles) {
            const size_t at = (size_t)next * a.ld_kv;
            const int valid = valid_rows(a.n_keys, next, ROWS);
            load_tile<D, ROWS, THREADS>(shared.k[!now], kv + h.k + at, a.ld_kv, valid);
            load_tile<D, ROWS, THREADS>(shared.v[!now], kv + h.v + at, a.ld_kv, valid);
            commit_loads();
        }
        await_tile(tile + 1 < n_tiles);
        if (!a.is_causal || j0 <= group_first) {
            float x[8][4];
            uint32_t p[4][4];
            wgmma_begin();
            begin_scores<T>(x, q, wgmma_tile(shared.k[now]));
            wgmma_wait<0>();
            wgmma_guard(x);
            if (a.is_causal ? j0 == group_first : j0 + ROWS > a.n_keys)
                mask_scores<KEYS>(a, x, mine, j0);
            const float low = softmax_row(x, 0, scale2, &maximum[0], &total[0]);
            const float high = softmax_row(x, 1, scale2, &maximum[1], &total[1]);
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                sum[n][0] *= low;
                sum[n][1] *= low;
                sum[n][2] *= high;
                sum[n][3] *= high;
            }
            if (DROPS)
                drop_scores<KEYS>(a, d, h.drops, x, mine, j0);
            pack_a<T, KEYS>(p, x);
            wgmma_guard(p);
            wgmma_guard(sum);
            wgmma_begin();
            begin_sum<T>(sum, p, wgmma_tile(shared.v[now]));
            wgmma_wait<0>();
            wgmma_guard(sum);
        }
        __syncthreads();
    }
    store_outcome<D>(a, out + h.out + (size_t)mine * a.ld_out, log_sum + h.index * a.seq + mine,
                     sum, maximum, total, valid_rows(a.n_queries, mine, 16));
#else
    __trap(); /* never launched: context.c */
#endif
}

/* ---- backward: keys ---- */

template <class T, bool DROPS>
__global__ void __launch_bounds__(GROUP, 3)
    hopper_keys_kernel(const __grid_constant__ struct attention a, const T *qkv, const T *kv,
                       const T *d_out, const float *log_sum, const float *delta, T *d_kv,
                       float *d_kv_sum, const __grid_constant__ struct dropout given)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const struct dropout d = dropout_now(given);
    extern __shared__ __align__(WGMMA_ALIGN) char memory[];
    auto &shared = *reinterpret_cast<keys_shared<T> *>(memory);
    const int warp = threadIdx.x / WARP, j0 = (int)blockIdx.x * ROWS, mine = j0 + warp * 16;
    const int per_group = (int)(a.n_heads / a.n_groups);
    const size_t sample = blockIdx.y / a.n_groups;
    const size_t first = blockIdx.y % a.n_groups * (size_t)per_group;
    const struct attention_head one = head_at(a, sample, first);
    const int i_first = a.is_causal ? j0 : 0;
    const int tiles_of_head = (a.n_queries - i_first + ROWS - 1) / ROWS;
    const int n_tiles = per_group * tiles_of_head;

    auto load = [&](int tile, int where) {
        const struct attention_head h = head_at(a, sample, first + (size_t)(tile / tiles_of_head));
        const int i0 = i_first + tile % tiles_of_head * ROWS;
        const int valid = valid_rows(a.n_queries, i0, ROWS);
        load_tile<D, ROWS, GROUP>(shared.q[where], qkv + h.q + (size_t)i0 * a.ld_qkv, a.ld_qkv,
                                  valid);
        load_tile<D, ROWS, GROUP>(shared.d_out[where], d_out + h.out + (size_t)i0 * a.ld_out,
                                  a.ld_out, valid);
        commit_loads();
        if ((int)threadIdx.x < ROWS) {
            const bool is_row = (int)threadIdx.x < valid;
            const size_t at = h.index * a.seq + (size_t)i0 + threadIdx.x;
            shared.log2_sum[where][threadIdx.x] = is_row ? log_sum[at] * LOG2_E : 0;
            shared.delta[where][threadIdx.x] = is_row ? delta[at] : 0;
        }
    };

    const int n_keys = valid_rows(a.n_keys, j0, ROWS);
    load_tile<D, ROWS, GROUP>(shared.k, kv + one.k + (size_t)j0 * a.ld_kv, a.ld_kv, n_keys);
    load_tile<D, ROWS, GROUP>(shared.v, kv + one.v + (size_t)j0 * a.ld_kv, a.ld_kv, n_keys);
    load(0, 0);
    float d_k[8][4] = {}, d_v[8][4] = {};
    for (int tile = 0; tile < n_tiles; tile++) {
        const int now = tile % 2, i0 = i_first + tile % tiles_of_head * ROWS;
        if (tile + 1 < n_tiles)
            load(tile + 1, !now);
        await_tile(tile + 1 < n_tiles);
        const size_t drops = sample * a.all_heads + first + (size_t)(tile / tiles_of_head);
        const uint64_t q = wgmma_tile(shared.q[now]), g = wgmma_tile(shared.d_out[now]);
        float x[8][4], d_x[8][4];
        uint32_t p[4][4], d_s[4][4];
        wgmma_begin();
        begin_scores<T>(x, wgmma_tile(shared.k), q);
        begin_scores<T>(d_x, wgmma_tile(shared.v), g);
        wgmma_wait<0>();
        wgmma_guard(x);
        wgmma_guard(d_x);
        if ((a.is_causal && i0 == j0) || i0 + ROWS > a.n_queries)
            probabilities<ROWS, DROPS, true>(a, d, drops, x, d_x, i0, mine, shared.log2_sum[now],
                                             shared.delta[now]);
        else
            probabilities<ROWS, DROPS, false>(a, d, drops, x, d_x, i0, mine, shared.log2_sum[now],
                                              shared.delta[now]);
        pack_a<T, ROWS>(p, x);
        pack_a<T, ROWS>(d_s, d_x);
        wgmma_guard(p);
        wgmma_guard(d_s);
        wgmma_guard(d_v);
        wgmma_guard(d_k);
        wgmma_begin();
        begin_sum<T>(d_v, p, g);
        begin_sum<T>(d_k, d_s, q);
        wgmma_wait<0>();
        wgmma_guard(d_v);
        wgmma_guard(d_k);
        __syncthreads();
    }
    const size_t at = (size_t)mine * a.ld_kv;
    store_d_kv<D>(a, d_kv, d_kv_sum, one.k + at, one.v + at, d_k, d_v,
                  valid_rows(a.n_keys, mine, 16));
#else
    __trap(); /* never launched: context.c */
#endif
}

/* ---- backward: queries ---- */

template <class T, bool DROPS>
__global__ void __launch_bounds__(GROUP, 3)
    hopper_queries_kernel(const __grid_constant__ struct attention a, const T *qkv, const T *kv,
                          const T *d_out, const float *log_sum, const float *delta, T *d_qkv,
                          const __grid_constant__ struct dropout given)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    const struct dropout d = dropout_now(given);
    extern __shared__ __align__(WGMMA_ALIGN) char memory[];
    auto &shared = *reinterpret_cast<queries_shared<T> *>(memory);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int i0 = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, mine = i0 + warp * 16;
    const struct attention_head h = head_at(a, blockIdx.y / a.n_heads, blockIdx.y % a.n_heads);
    const int rows = valid_rows(a.n_queries, i0, ROWS);
    const int n_tiles = (keys_seen(a, i0 + rows) + ROWS - 1) / ROWS;
    const float scale2 = a.scale * LOG2_E;

    auto load = [&](int tile, int where) {
        const size_t at = (size_t)tile * ROWS * a.ld_kv;
        const int valid = valid_rows(a.n_keys, tile * ROWS, ROWS);
        load_tile<D, ROWS, GROUP>(shared.k[where], kv + h.k + at, a.ld_kv, valid);
        load_tile<D, ROWS, GROUP>(shared.v[where], kv + h.v + at, a.ld_kv, valid);
        commit_loads();
    };
    load_tile<D, ROWS, GROUP>(shared.q, qkv + h.q + (size_t)i0 * a.ld_qkv, a.ld_qkv, rows);
    load_tile<D, ROWS, GROUP>(shared.d_out, d_out + h.out + (size_t)i0 * a.ld_out, a.ld_out, rows);
    load(0, 0);

    float log2_i[2] = {}, delta_i[2] = {}, sum[8][4] = {};
    for (int half = 0; half < 2; half++) {
        const int i = mine + lane / 4 + half * 8;
        if (i < a.n_queries) {
            log2_i[half] = log_sum[h.index * a.seq + (size_t)i] * LOG2_E;
            delta_i[half] = delta[h.index * a.seq + (size_t)i];
        }
    }
    for (int tile = 0; tile < n_tiles; tile++) {
        const int now = tile % 2, j0 = tile * ROWS;
        if (tile + 1 < n_tiles)
            load(tile + 1, !now);
        await_tile(tile + 1 < n_tiles);
        const uint64_t k = wgmma_tile(shared.k[now]), v = wgmma_tile(shared.v[now]);
        float x[8][4], d_x[8][4];
        uint32_t d_s[4][4];
        wgmma_begin();
        begin_scores<T>(x, wgmma_tile(shared.q), k);
        begin_scores<T>(d_x, wgmma_tile(shared.d_out), v);
        wgmma_wait<0>();
        wgmma_guard(x);
        wgmma_guard(d_x);
        if (DROPS)
            drop_scores<KEYS>(a, d, h.drops, d_x, mine, j0);
        if (a.is_causal ? j0 == i0 : j0 + ROWS > a.n_keys)
            mask_scores<KEYS>(a, x, mine, j0);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[n][e] =
                    exp2_fast(x[n][e] * scale2 - log2_i[e / 2]) * (d_x[n][e] - delta_i[e / 2]);
        pack_a<T, KEYS>(d_s, x);
        wgmma_guard(d_s);
        wgmma_guard(sum);
        wgmma_begin();
        begin_sum<T>(sum, d_s, k);
        wgmma_wait<0>();
        wgmma_guard(sum);
        __syncthreads();
    }
    store_d_q<D>(a, d_qkv + h.q + (size_t)mine * a.ld_qkv, sum, valid_rows(a.n_queries, mine, 16));
#else
    __trap(); /* never launched: context.c */
#endif
}

/* ---- launches ---- */

int mb_cuda_attention_hopper_fits(const struct mb_context *ctx,
                                  const struct mb_attention_shape *shape)
{
    return ctx->is_hopper && shape->head_dim == D;
}

/* More than 48 KiB of shared memory have to be asked for. */
template <class KERNEL, class... ARGS>
static void launch(struct mb_stream *s, KERNEL kernel, dim3 grid, unsigned threads,
                   size_t shared_bytes, ARGS... args)
{
    mb_cuda_note(s,
                 cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      (int)shared_bytes),
                 "attention's shared memory");
    kernel<<<grid, threads, shared_bytes, s->cuda>>>(args...);
}

template <class T> static void forward(struct mb_stream *s, const struct attention_tiles *t)
{
    const struct attention &a = t->a;
    const dim3 grid(blocks_for((size_t)a.n_queries, FORWARD_GROUPS * ROWS),
                    (unsigned)(t->n_samples * a.n_heads));
    const auto kernel =
        t->dropout.limit > 0 ? hopper_forward_kernel<T, true> : hopper_forward_kernel<T, false>;
    launch(s, kernel, grid, FORWARD_GROUPS * GROUP, sizeof(forward_shared<T>), a, (const T *)t->qkv,
           (const T *)t->kv, (T *)t->out, t->log_sum, t->dropout);
}

template <class T> static void backward(struct mb_stream *s, const struct attention_tiles *t)
{
    const struct attention &a = t->a;
    const bool drops = t->dropout.limit > 0;
    const T *qkv = (const T *)t->qkv, *kv = (const T *)t->kv, *d_out = (const T *)t->d_out;
    launch(s, drops ? hopper_keys_kernel<T, true> : hopper_keys_kernel<T, false>,
           dim3(blocks_for((size_t)a.n_keys, ROWS), (unsigned)(t->n_samples * a.n_groups)), GROUP,
           sizeof(keys_shared<T>), a, qkv, kv, d_out, t->log_all, t->delta, (T *)t->d_kv,
           t->d_kv_sum, t->dropout);
    launch(s, drops ? hopper_queries_kernel<T, true> : hopper_queries_kernel<T, false>,
           dim3(blocks_for((size_t)a.n_queries, ROWS), (unsigned)(t->n_samples * a.n_heads)), GROUP,
           sizeof(queries_shared<T>), a, qkv, kv, d_out, t->log_all, t->delta, (T *)t->d_qkv,
           t->dropout);
}

void mb_cuda_attention_hopper_forward(struct mb_stream *s, const struct attention_tiles *t)
{
    if (t->dtype == MB_DTYPE_F16)
        forward<fp16>(s, t);
    else
        forward<bf16>(s, t);
}

void mb_cuda_attention_hopper_backward(struct mb_stream *s, const struct attention_tiles *t)
{
    if (t->dtype == MB_DTYPE_F16)
        backward<fp16>(s, t);
    else
        backward<bf16>(s, t);
}
