/*
 * Causal attention between the queries of this rank and the keys and values of one.
 *
 * The rows of a rank are in the order of their positions, so what a query sees is a number of first
 * keys, and who sees a key are queries from some first one on. Forward joins the outcome with that
 * of the calls before, by the logs of their denominators. Backward is attention.cu's with the log
 * over all keys; gradients of keys and values are this call's alone, in fp32.
 *
 * With stretches as a ring of ranks has them, the rows that meet are one of three: of its own rank
 * all, causally; of an earlier one all queries with all keys of the first stretch; of a later one
 * the queries of the second stretch with all keys. Where the kernels on matrix units take the shape
 * they are called with just these. Else, in fp32 arithmetic for every shape, stretch and dtype, a
 * warp has one row, as in attention.cu.
 *
 * Scratch: d_out . out [samples, heads, seq].
 */
#include <assert.h>
#include "worker/kernels/cuda/attention_part.h"
#include "worker/kernels/cuda/attention_rows.cuh"

struct part {
    struct attention whole; /* of the rank's rows */
    size_t half, ld_kv;
    struct mb_stretches queries, keys;
    size_t all_heads, all_seq;
};

/* Elements from the start of the keys and values alone to row 0 of the sample. */
struct part_keys {
    size_t k, v;
};

static struct part part_of(const struct mb_attention_part *a)
{
    struct part p;
    assert(a->shape.seq % 2 == 0);
    p.whole = attention_of(&a->shape);
    p.half = a->shape.seq / 2;
    p.ld_kv = 2 * a->shape.n_groups * a->shape.head_dim;
    p.queries = a->queries;
    p.keys = a->keys;
    p.all_heads = a->all_heads;
    p.all_seq = a->all_seq;
    return p;
}

static __device__ __forceinline__ struct part_keys keys_at(const struct part &p, size_t sample,
                                                           size_t group)
{
    const size_t row = sample * p.whole.seq * p.ld_kv + group * 2 * p.whole.head_dim;
    return {row, row + p.whole.head_dim};
}

static __device__ __forceinline__ size_t position(const struct mb_stretches &at, size_t half,
                                                  size_t row)
{
    return place_of({half, at.first, at.second}, row);
}

/* How many of a stretch's rows lie before a position. */
static __device__ __forceinline__ size_t before(size_t first, size_t half, size_t at)
{
    return at <= first ? 0 : at - first < half ? at - first : half;
}

static __device__ __forceinline__ size_t rows_before(const struct mb_stretches &rows, size_t half,
                                                     size_t at)
{
    return before(rows.first, half, at) + before(rows.second, half, at);
}

/* The number of keys that a query sees: those at its own position and before. */
static __device__ __forceinline__ size_t n_seen(const struct part &p, size_t query)
{
    return rows_before(p.keys, p.half, position(p.queries, p.half, query) + 1);
}

/* The dropout factor of score (i, j), counted by the places in the sample. */
static __device__ __forceinline__ float part_factor(const struct part &p, const struct dropout &d,
                                                    size_t sample, size_t head, size_t i, size_t j)
{
    const size_t row = (sample * p.all_heads + head) * p.all_seq + position(p.queries, p.half, i);
    return dropout_at(d, row * p.all_seq + position(p.keys, p.half, j));
}

template <class T, bool DROPS>
__global__ void part_forward_kernel(const __grid_constant__ struct part p, const T *qkv,
                                    const T *kv, T *out, float *log_sum, bool joins,
                                    const __grid_constant__ struct dropout given)
{
    const struct dropout d = dropout_now(given);
    __shared__ float q[WARPS][MAX_HEAD_DIM];
    const struct attention &a = p.whole;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, hn = (int)a.head_dim;
    const size_t i = blockIdx.x * (size_t)WARPS + warp;
    const size_t sample = blockIdx.y / a.n_heads, head = blockIdx.y % a.n_heads;
    const size_t n = i < a.seq ? n_seen(p, i) : 0;
    if (n == 0) /* of a call that joins: what the calls before gave stays */
        return;
    const struct attention_head h = head_at(a, sample, head);
    const struct part_keys at = keys_at(p, sample, head / (a.n_heads / a.n_groups));
    keep_row(q[warp], qkv + h.q + i * a.ld_qkv, hn);
    float sum[COLUMNS] = {}, maximum = -FLT_MAX, total = 0;
    for (size_t j0 = 0; j0 < n; j0 += WARP) {
        const size_t j = j0 + lane;
        const float score = j < n ? a.scale * dot(q[warp], kv + at.k + j * p.ld_kv, hn) : -FLT_MAX;
        const float top = fmaxf(maximum, warp_max(score)), rescale = expf(maximum - top);
        float weight = j < n ? expf(score - top) : 0;
        total = total * rescale + warp_sum(weight);
        maximum = top;
        if (DROPS && j < n)
            weight *= part_factor(p, d, sample, head, i, j);
        for (int c = 0; c < COLUMNS; c++)
            sum[c] *= rescale;
        const size_t rows = n - j0 < WARP ? n - j0 : WARP;
        add_rows(sum, weight, kv + at.v + j0 * p.ld_kv, p.ld_kv, (int)rows, hn);
    }
    T *const row = out + h.out + i * a.ld_out;
    float *const kept = &log_sum[h.index * a.seq + i];
    float log_all = maximum + logf(total), factor = 1 / total, rest = 0;
    if (joins) {
        const float log_here = log_all, log_before = *kept, most = fmaxf(log_here, log_before);
        log_all = most + logf(expf(log_before - most) + expf(log_here - most));
        factor *= expf(log_here - log_all);
        rest = expf(log_before - log_all);
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
        if (c * WARP + lane < hn)
            sum[c] = factor * sum[c] + (joins ? rest * to_float(row[c * WARP + lane]) : 0);
    store_row(row, sum, 1, hn);
    __syncwarp(); /* all lanes have read what is kept */
    if (lane == 0)
        *kept = log_all;
}

template <class T, bool DROPS>
__global__ void part_queries_kernel(const __grid_constant__ struct part p, const T *qkv,
                                    const T *kv, const T *d_out, const float *log_sum,
                                    const float *delta, T *d_qkv, bool joins,
                                    const __grid_constant__ struct dropout given)
{
    const struct dropout d = dropout_now(given);
    __shared__ float q[WARPS][MAX_HEAD_DIM], g[WARPS][MAX_HEAD_DIM];
    const struct attention &a = p.whole;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, hn = (int)a.head_dim;
    const size_t i = blockIdx.x * (size_t)WARPS + warp;
    const size_t sample = blockIdx.y / a.n_heads, head = blockIdx.y % a.n_heads;
    if (i >= a.seq)
        return;
    const size_t n = n_seen(p, i); /* 0: a gradient of zero */
    const struct attention_head h = head_at(a, sample, head);
    const struct part_keys at = keys_at(p, sample, head / (a.n_heads / a.n_groups));
    keep_row(q[warp], qkv + h.q + i * a.ld_qkv, hn);
    keep_row(g[warp], d_out + h.out + i * a.ld_out, hn);
    const float log_i = log_sum[h.index * a.seq + i], delta_i = delta[h.index * a.seq + i];
    float sum[COLUMNS] = {};
    for (size_t j0 = 0; j0 < n; j0 += WARP) {
        const size_t j = j0 + lane;
        float d_score = 0;
        if (j < n) {
            const float weight = expf(a.scale * dot(q[warp], kv + at.k + j * p.ld_kv, hn) - log_i);
            float d_p = dot(g[warp], kv + at.v + j * p.ld_kv, hn);
            if (DROPS)
                d_p *= part_factor(p, d, sample, head, i, j);
            d_score = weight * (d_p - delta_i) * a.scale;
        }
        const size_t rows = n - j0 < WARP ? n - j0 : WARP;
        add_rows(sum, d_score, kv + at.k + j0 * p.ld_kv, p.ld_kv, (int)rows, hn);
    }
    T *const row = d_qkv + h.q + i * a.ld_qkv;
    if (joins)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            if (c * WARP + lane < hn)
                sum[c] += to_float(row[c * WARP + lane]);
    store_row(row, sum, 1, hn);
}

template <class T, bool DROPS>
__global__ void part_keys_kernel(const __grid_constant__ struct part p, const T *qkv, const T *kv,
                                 const T *d_out, const float *log_sum, const float *delta,
                                 float *d_kv, const __grid_constant__ struct dropout given)
{
    const struct dropout d = dropout_now(given);
    __shared__ float k[WARPS][MAX_HEAD_DIM], v[WARPS][MAX_HEAD_DIM];
    const struct attention &a = p.whole;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, hn = (int)a.head_dim;
    const size_t j = blockIdx.x * (size_t)WARPS + warp, per_group = a.n_heads / a.n_groups;
    const size_t sample = blockIdx.y / a.n_groups, group = blockIdx.y % a.n_groups;
    if (j >= a.seq)
        return;
    const struct part_keys at = keys_at(p, sample, group);
    const size_t first = rows_before(p.queries, p.half, position(p.keys, p.half, j));
    keep_row(k[warp], kv + at.k + j * p.ld_kv, hn);
    keep_row(v[warp], kv + at.v + j * p.ld_kv, hn);
    float d_k[COLUMNS] = {}, d_v[COLUMNS] = {};
    for (size_t head = group * per_group; head < (group + 1) * per_group; head++) {
        const struct attention_head h = head_at(a, sample, head);
        for (size_t i0 = first; i0 < a.seq; i0 += WARP) {
            const size_t i = i0 + lane;
            float weight = 0, d_score = 0;
            if (i < a.seq) {
                weight = expf(a.scale * dot(k[warp], qkv + h.q + i * a.ld_qkv, hn) -
                              log_sum[h.index * a.seq + i]);
                const float d_p = dot(v[warp], d_out + h.out + i * a.ld_out, hn);
                const float factor = DROPS ? part_factor(p, d, sample, head, i, j) : 1;
                d_score = weight * (factor * d_p - delta[h.index * a.seq + i]) * a.scale;
                weight *= factor;
            }
            const size_t rows = a.seq - i0 < WARP ? a.seq - i0 : WARP;
            add_rows(d_k, d_score, qkv + h.q + i0 * a.ld_qkv, a.ld_qkv, (int)rows, hn);
            add_rows(d_v, weight, d_out + h.out + i0 * a.ld_out, a.ld_out, (int)rows, hn);
        }
    }
    store_row(d_kv + at.k + j * p.ld_kv, d_k, 1, hn);
    store_row(d_kv + at.v + j * p.ld_kv, d_v, 1, hn);
}

/* A key and a value of each group lie behind each other in qkv, too, behind the group's queries. */
template <bool TAKES, class T, class U>
__global__ void keys_values_kernel(T *qkv, U *kv, size_t queries, size_t n, size_t total)
{
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= total)
        return;
    T *const in_qkv = qkv + i / n * (queries + n) + queries + i % n;
    if (TAKES)
        kv[i] = from_float<U>(to_float(*in_qkv));
    else
        *in_qkv = from_float<T>(to_float(kv[i]));
}

/* d_q of the first queries of each sample: those that see no key, [n_samples, n, n_heads]. A thread
 * has eight channels. */
__global__ void clear_queries_kernel(const __grid_constant__ struct attention a, bf16 *d_qkv,
                                     size_t n, size_t total)
{
    const size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x, chunks = a.head_dim / 8;
    if (i >= total)
        return;
    const size_t head = i / chunks % a.n_heads, row = i / chunks / a.n_heads;
    const struct attention_head h = head_at(a, row / n, head);
    *reinterpret_cast<uint4 *>(d_qkv + h.q + row % n * a.ld_qkv + i % chunks * 8) = {};
}

/* ---- launches ---- */

template <class T, bool DROPS>
static void forward(struct mb_stream *s, const struct mb_attention_part_forward *f)
{
    const struct mb_attention_part *a = &f->part;
    part_forward_kernel<T, DROPS><<<grid_of(&a->shape, a->shape.n_heads), THREADS, 0, s->cuda>>>(
        part_of(a), (const T *)a->qkv, (const T *)a->kv, (T *)f->out, f->log_sum, f->joins != 0,
        dropout_of(&a->dropout));
}

template <class T, bool DROPS>
static void backward(struct mb_stream *s, const struct mb_attention_part_backward *b)
{
    const struct mb_attention_part *a = &b->part;
    const struct part p = part_of(a);
    const struct dropout d = dropout_of(&a->dropout);
    const dim3 queries = grid_of(&a->shape, a->shape.n_heads);
    const dim3 keys = grid_of(&a->shape, a->shape.n_groups);
    const T *qkv = (const T *)a->qkv, *kv = (const T *)a->kv, *d_out = (const T *)b->d_out;
    delta_kernel<T>
        <<<queries, THREADS, 0, s->cuda>>>(p.whole, (const T *)b->out, d_out, a->scratch);
    part_queries_kernel<T, DROPS><<<queries, THREADS, 0, s->cuda>>>(
        p, qkv, kv, d_out, b->log_sum, a->scratch, (T *)b->d_qkv, b->joins != 0, d);
    part_keys_kernel<T, DROPS>
        <<<keys, THREADS, 0, s->cuda>>>(p, qkv, kv, d_out, b->log_sum, a->scratch, b->d_kv, d);
}

template <bool TAKES, class T, class U>
static void copy_keys_values(struct mb_stream *s, const struct mb_keys_values *a)
{
    const struct mb_attention_shape *shape = &a->shape;
    const size_t queries = shape->n_heads / shape->n_groups * shape->head_dim;
    const size_t n = 2 * shape->head_dim,
                 total = shape->n_samples * shape->seq * shape->n_groups * n;
    keys_values_kernel<TAKES><<<blocks_for(total, THREADS), THREADS, 0, s->cuda>>>(
        (T *)a->qkv, (U *)a->kv, queries, n, total);
}

/* ---- on matrix units ---- */

struct meeting {
    struct attention_tiles tiles;
    size_t first_query; /* that sees any of these keys */
};

/* Which rows meet; false: none, or not in one of the three ways. */
static bool meets(const struct mb_attention_part *part, struct meeting *m)
{
    const struct mb_stretches q = part->queries, k = part->keys;
    const size_t seq = part->shape.seq, half = seq / 2;
    struct attention *a = &m->tiles.a;
    *a = attention_of(&part->shape);
    a->first_kv = 0;
    a->group_kv = 2 * part->shape.head_dim;
    a->ld_kv = part->shape.n_groups * a->group_kv;
    a->all_heads = part->all_heads;
    a->all_seq = part->all_seq;
    a->query_places = {half, q.first, q.second};
    a->key_places = {half, k.first, k.second};
    m->first_query = 0;
    if (q.first == k.first && q.second == k.second)
        return q.first + half <= q.second;
    a->is_causal = false;
    if (k.first + half <= q.first + 1 && k.second >= q.second + half) {
        a->n_keys = (int)half;
        return q.first <= q.second;
    }
    if (k.first >= q.first + half && k.second + half <= q.second + 1 && k.first <= k.second) {
        a->n_queries = (int)half;
        a->query_places = {0, q.second, q.second};
        m->first_query = half;
        return true;
    }
    return false;
}

/* What is the same in both directions; false: the shape or the stretches are not theirs. */
static bool takes_tiles(const struct mb_attention_part *part, const void *out, bool joins,
                        struct meeting *m)
{
    if (!mb_cuda_attention_mma_fits(&part->shape, part->dtype, part->qkv, out) ||
        !is_aligned(part->kv) || !meets(part, m))
        return false;
    struct attention_tiles *t = &m->tiles;
    t->a.joins = joins;
    t->n_samples = part->shape.n_samples;
    t->dtype = part->dtype;
    t->qkv = (const bf16 *)part->qkv + m->first_query * t->a.ld_qkv; /* or fp16: as wide */
    t->kv = part->kv;
    t->dropout = dropout_of(&part->dropout);
    return true;
}

static bool forward_by_tiles(struct mb_context *ctx, struct mb_stream *s,
                             const struct mb_attention_part_forward *f)
{
    struct meeting m = {};
    if (!takes_tiles(&f->part, f->out, f->joins != 0, &m))
        return false;
    assert(f->joins || m.first_query == 0);
    struct attention_tiles *t = &m.tiles;
    t->out = (bf16 *)f->out + m.first_query * t->a.ld_out;
    t->log_sum = f->log_sum + m.first_query;
    if (mb_cuda_attention_hopper_fits(ctx, &f->part.shape))
        mb_cuda_attention_hopper_forward(s, t);
    else
        mb_cuda_attention_mma_forward(s, t);
    return true;
}

/* The keys that nobody sees have gradients of zero. */
static void clear_unseen(struct mb_stream *s, const struct mb_attention_shape *shape,
                         const struct attention *a, float *d_kv)
{
    const size_t seen = (size_t)a->n_keys, bytes = (shape->seq - seen) * a->ld_kv * sizeof(float);
    for (size_t i = 0; bytes > 0 && i < shape->n_samples; i++)
        mb_cuda_note(s,
                     cudaMemsetAsync(d_kv + (i * shape->seq + seen) * a->ld_kv, 0, bytes, s->cuda),
                     "keys that nobody sees");
}

/* As are those of queries that see no key, in the first call. */
static void clear_unseeing(struct mb_stream *s, const struct meeting *m, void *d_qkv)
{
    const struct attention *a = &m->tiles.a;
    const size_t total = m->tiles.n_samples * m->first_query * a->n_heads * (a->head_dim / 8);
    if (total > 0)
        clear_queries_kernel<<<blocks_for(total, THREADS), THREADS, 0, s->cuda>>>(
            *a, (bf16 *)d_qkv, m->first_query, total);
}

static bool backward_by_tiles(struct mb_context *ctx, struct mb_stream *s,
                              const struct mb_attention_part_backward *b)
{
    const struct mb_attention_part *part = &b->part;
    struct meeting m = {};
    if (!is_aligned(b->out) || !is_aligned(b->d_qkv) || !is_aligned(b->d_kv) ||
        !takes_tiles(part, b->d_out, b->joins != 0, &m))
        return false;
    struct attention_tiles *t = &m.tiles;
    mb_cuda_attention_delta(s, &part->shape, part->dtype, b->out, b->d_out, part->scratch);
    clear_unseen(s, &part->shape, &t->a, b->d_kv);
    if (!b->joins)
        clear_unseeing(s, &m, b->d_qkv);
    t->log_all = b->log_sum + m.first_query;
    t->delta = part->scratch + m.first_query;
    t->d_out = (const bf16 *)b->d_out + m.first_query * t->a.ld_out;
    t->d_qkv = (bf16 *)b->d_qkv + m.first_query * t->a.ld_qkv;
    t->d_kv_sum = b->d_kv;
    if (mb_cuda_attention_hopper_fits(ctx, &part->shape))
        mb_cuda_attention_hopper_backward(s, t);
    else
        mb_cuda_attention_mma_backward(s, t);
    return true;
}

void mb_cuda_attention_part_forward(struct mb_context *ctx, struct mb_stream *stream,
                                    const struct mb_attention_part_forward *a)
{
    if (is_too_large(stream, &a->part.shape))
        return;
    if (!forward_by_tiles(ctx, stream, a))
        with_type(a->part.dtype, [&](auto t) {
            typedef decltype(t) T;
            a->part.dropout.probability > 0 ? forward<T, true>(stream, a)
                                            : forward<T, false>(stream, a);
        });
    mb_cuda_launched(stream, "attention over a part of the keys");
}

void mb_cuda_attention_part_backward(struct mb_context *ctx, struct mb_stream *stream,
                                     const struct mb_attention_part_backward *a)
{
    if (is_too_large(stream, &a->part.shape))
        return;
    if (!backward_by_tiles(ctx, stream, a))
        with_type(a->part.dtype, [&](auto t) {
            typedef decltype(t) T;
            a->part.dropout.probability > 0 ? backward<T, true>(stream, a)
                                            : backward<T, false>(stream, a);
        });
    mb_cuda_launched(stream, "attention gradient over a part of the keys");
}

void mb_cuda_keys_values_take(struct mb_context *ctx, struct mb_stream *stream,
                              const struct mb_keys_values *a)
{
    (void)ctx;
    with_type(a->dtype, [&](auto t) {
        typedef decltype(t) T;
        copy_keys_values<true, T, T>(stream, a);
    });
    mb_cuda_launched(stream, "keys and values taken");
}

void mb_cuda_keys_values_put(struct mb_context *ctx, struct mb_stream *stream,
                             const struct mb_keys_values *a)
{
    (void)ctx;
    with_type(a->dtype, [&](auto t) {
        typedef decltype(t) T;
        copy_keys_values<false, T, float>(stream, a);
    });
    mb_cuda_launched(stream, "keys and values put");
}
