/*
 * Causal attention in fp32 arithmetic, for every shape and all dtypes: a warp has one row. Shapes
 * that cuDNN takes go there (dnn.c), others that matrix units take to attention_mma.cu or
 * attention_hopper.cu.
 *
 * Forward: the warp walks over the keys of its query, 32 at a time, a key a lane, with an online
 * softmax; then each lane gathers its columns of the output. Backward computes the probabilities
 * again from log_sum: with P' = P * keep, dP = d_out v^T, dS = P (keep dP - d_out . out) /
 * sqrt(hn), one kernel walks over the keys of a query for d_q, another over the queries of a key,
 * head after head of its group, for d_k and d_v. So nothing is added to from two sides.
 *
 * Scratch: d_out . out [samples, heads, seq].
 */
#include "worker/kernels/cuda/attention_rows.cuh"

size_t mb_cuda_attention_scratch(const struct mb_attention_shape *shape)
{
    return shape->n_samples * shape->n_heads * shape->seq;
}

template <class T, bool DROPS>
__global__ void forward_kernel(const __grid_constant__ struct attention a, const T *qkv, T *out,
                               float *log_sum, const __grid_constant__ struct dropout given)
{
    const struct dropout d = dropout_now(given);
    __shared__ float q[WARPS][MAX_HEAD_DIM];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, hn = (int)a.head_dim;
    const size_t i = blockIdx.x * (size_t)WARPS + warp;
    const struct attention_head h = head_at(a, blockIdx.y / a.n_heads, blockIdx.y % a.n_heads);
    if (i >= a.seq)
        return;
    keep_row(q[warp], qkv + h.q + i * a.ld_qkv, hn);
    float sum[COLUMNS] = {}, maximum = -FLT_MAX, total = 0;
    for (size_t j0 = 0; j0 <= i; j0 += WARP) {
        const size_t j = j0 + lane;
        const float score =
            j <= i ? a.scale * dot(q[warp], qkv + h.k + j * a.ld_qkv, hn) : -FLT_MAX;
        const float top = fmaxf(maximum, warp_max(score)), rescale = expf(maximum - top);
        float p = j <= i ? expf(score - top) : 0;
        total = total * rescale + warp_sum(p);
        maximum = top;
        if (DROPS && j <= i)
            p *= score_factor(a, d, h.index, i, j);
        for (int c = 0; c < COLUMNS; c++)
            sum[c] *= rescale;
        const size_t rows = i + 1 - j0 < WARP ? i + 1 - j0 : WARP;
        add_rows(sum, p, qkv + h.v + j0 * a.ld_qkv, a.ld_qkv, (int)rows, hn);
    }
    store_row(out + h.out + i * a.ld_out, sum, 1 / total, hn);
    if (lane == 0)
        log_sum[h.index * a.seq + i] = maximum + logf(total);
}

/* delta_kernel for heads of D channels at 16-byte boundaries: D / 8 lanes have a row. */
template <class T, int D>
__global__ void delta_vectors_kernel(const __grid_constant__ struct attention a, const T *out,
                                     const T *d_out, float *delta, size_t n_rows)
{
    constexpr int LANES = D / 8;
    const size_t at = blockIdx.x * (size_t)THREADS + threadIdx.x, row = at / LANES;
    float sum = 0;
    if (row < n_rows) {
        const vec<T> x = load_vec(out + at * 8), y = load_vec(d_out + at * 8);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum += to_float(x.v[i]) * to_float(y.v[i]);
    }
#pragma unroll
    for (int i = LANES / 2; i > 0; i /= 2)
        sum += __shfl_xor_sync(~0u, sum, i);
    if (row >= n_rows || at % LANES != 0)
        return;
    const size_t token = row / a.n_heads, head = row % a.n_heads;
    delta[(token / a.seq * a.n_heads + head) * a.seq + token % a.seq] = sum;
}

template <class T, bool DROPS>
__global__ void queries_kernel(const __grid_constant__ struct attention a, const T *qkv,
                               const T *d_out, const float *log_sum, const float *delta, T *d_qkv,
                               const __grid_constant__ struct dropout given)
{
    const struct dropout d = dropout_now(given);
    __shared__ float q[WARPS][MAX_HEAD_DIM], g[WARPS][MAX_HEAD_DIM];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, hn = (int)a.head_dim;
    const size_t i = blockIdx.x * (size_t)WARPS + warp;
    const struct attention_head h = head_at(a, blockIdx.y / a.n_heads, blockIdx.y % a.n_heads);
    if (i >= a.seq)
        return;
    keep_row(q[warp], qkv + h.q + i * a.ld_qkv, hn);
    keep_row(g[warp], d_out + h.out + i * a.ld_out, hn);
    const float log_i = log_sum[h.index * a.seq + i], delta_i = delta[h.index * a.seq + i];
    float sum[COLUMNS] = {};
    for (size_t j0 = 0; j0 <= i; j0 += WARP) {
        const size_t j = j0 + lane;
        float d_score = 0;
        if (j <= i) {
            const float p = expf(a.scale * dot(q[warp], qkv + h.k + j * a.ld_qkv, hn) - log_i);
            float d_p = dot(g[warp], qkv + h.v + j * a.ld_qkv, hn);
            if (DROPS)
                d_p *= score_factor(a, d, h.index, i, j);
            d_score = p * (d_p - delta_i) * a.scale;
        }
        const size_t rows = i + 1 - j0 < WARP ? i + 1 - j0 : WARP;
        add_rows(sum, d_score, qkv + h.k + j0 * a.ld_qkv, a.ld_qkv, (int)rows, hn);
    }
    store_row(d_qkv + h.q + i * a.ld_qkv, sum, 1, hn);
}

template <class T, bool DROPS>
__global__ void keys_kernel(const __grid_constant__ struct attention a, const T *qkv,
                            const T *d_out, const float *log_sum, const float *delta, T *d_qkv,
                            const __grid_constant__ struct dropout given)
{
    const struct dropout d = dropout_now(given);
    __shared__ float k[WARPS][MAX_HEAD_DIM], v[WARPS][MAX_HEAD_DIM];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, hn = (int)a.head_dim;
    const size_t j = blockIdx.x * (size_t)WARPS + warp, per_group = a.n_heads / a.n_groups;
    const size_t sample = blockIdx.y / a.n_groups, first = blockIdx.y % a.n_groups * per_group;
    if (j >= a.seq)
        return;
    const struct attention_head one = head_at(a, sample, first);
    keep_row(k[warp], qkv + one.k + j * a.ld_qkv, hn);
    keep_row(v[warp], qkv + one.v + j * a.ld_qkv, hn);
    float d_k[COLUMNS] = {}, d_v[COLUMNS] = {};
    for (size_t head = first; head < first + per_group; head++) {
        const struct attention_head h = head_at(a, sample, head);
        for (size_t i0 = j; i0 < a.seq; i0 += WARP) {
            const size_t i = i0 + lane;
            float p = 0, d_score = 0;
            if (i < a.seq) {
                p = expf(a.scale * dot(k[warp], qkv + h.q + i * a.ld_qkv, hn) -
                         log_sum[h.index * a.seq + i]);
                float d_p = dot(v[warp], d_out + h.out + i * a.ld_out, hn);
                const float factor = DROPS ? score_factor(a, d, h.index, i, j) : 1;
                d_score = p * (factor * d_p - delta[h.index * a.seq + i]) * a.scale;
                p *= factor;
            }
            const size_t rows = a.seq - i0 < WARP ? a.seq - i0 : WARP;
            add_rows(d_k, d_score, qkv + h.q + i0 * a.ld_qkv, a.ld_qkv, (int)rows, hn);
            add_rows(d_v, p, d_out + h.out + i0 * a.ld_out, a.ld_out, (int)rows, hn);
        }
    }
    store_row(d_qkv + one.k + j * a.ld_qkv, d_k, 1, hn);
    store_row(d_qkv + one.v + j * a.ld_qkv, d_v, 1, hn);
}

/* ---- launches ---- */

template <class T, bool DROPS>
static void forward(struct mb_stream *s, const struct mb_attention_forward *a)
{
    forward_kernel<T, DROPS><<<grid_of(&a->shape, a->shape.n_heads), THREADS, 0, s->cuda>>>(
        attention_of(&a->shape), (const T *)a->qkv, (T *)a->out, a->log_sum,
        dropout_of(&a->dropout));
}

template <class T> static void delta(struct mb_stream *s, const struct mb_attention_backward *a)
{
    delta_kernel<T><<<grid_of(&a->shape, a->shape.n_heads), THREADS, 0, s->cuda>>>(
        attention_of(&a->shape), (const T *)a->out, (const T *)a->d_out, a->scratch);
}

template <class T>
static void delta_vectors(struct mb_stream *s, const struct mb_attention_shape *shape,
                          const void *out, const void *d_out, float *delta)
{
    const size_t rows = shape->n_samples * shape->seq * shape->n_heads;
    const unsigned blocks = blocks_for(rows * shape->head_dim / 8, THREADS);
    const auto kernel =
        shape->head_dim == 64 ? delta_vectors_kernel<T, 64> : delta_vectors_kernel<T, 128>;
    kernel<<<blocks, THREADS, 0, s->cuda>>>(attention_of(shape), (const T *)out, (const T *)d_out,
                                            delta, rows);
}

void mb_cuda_attention_delta(struct mb_stream *s, const struct mb_attention_shape *shape,
                             enum mb_dtype dtype, const void *out, const void *d_out, float *delta)
{
    if (dtype == MB_DTYPE_F16)
        delta_vectors<fp16>(s, shape, out, d_out, delta);
    else
        delta_vectors<bf16>(s, shape, out, d_out, delta);
}

template <class T, bool DROPS>
static void backward(struct mb_stream *s, const struct mb_attention_backward *a)
{
    const struct attention shape = attention_of(&a->shape);
    const struct dropout d = dropout_of(&a->dropout);
    const T *qkv = (const T *)a->qkv, *d_out = (const T *)a->d_out;
    T *d_qkv = (T *)a->d_qkv;
    queries_kernel<T, DROPS><<<grid_of(&a->shape, a->shape.n_heads), THREADS, 0, s->cuda>>>(
        shape, qkv, d_out, a->log_sum, a->scratch, d_qkv, d);
    keys_kernel<T, DROPS><<<grid_of(&a->shape, a->shape.n_groups), THREADS, 0, s->cuda>>>(
        shape, qkv, d_out, a->log_sum, a->scratch, d_qkv, d);
}

static struct attention_tiles whole_tiles(const struct mb_attention_shape *shape,
                                          enum mb_dtype dtype, const void *qkv,
                                          const struct mb_dropout *dropout)
{
    struct attention_tiles t = {};
    t.a = attention_of(shape);
    t.n_samples = shape->n_samples;
    t.dtype = dtype;
    t.qkv = t.kv = qkv;
    t.dropout = dropout_of(dropout);
    return t;
}

void mb_cuda_attention_forward(struct mb_context *ctx, struct mb_stream *stream,
                               const struct mb_attention_forward *a)
{
    const bool drops = a->dropout.probability > 0;
    if (is_too_large(stream, &a->shape) || mb_cuda_dnn_attention_forward(ctx->dnn, stream, a))
        return;
    if (mb_cuda_attention_mma_fits(&a->shape, a->dtype, a->qkv, a->out)) {
        struct attention_tiles t = whole_tiles(&a->shape, a->dtype, a->qkv, &a->dropout);
        t.log_sum = a->log_sum;
        t.out = a->out;
        if (mb_cuda_attention_hopper_fits(ctx, &a->shape))
            mb_cuda_attention_hopper_forward(stream, &t);
        else
            mb_cuda_attention_mma_forward(stream, &t);
    } else {
        with_type(a->dtype, [&](auto t) {
            typedef decltype(t) T;
            drops ? forward<T, true>(stream, a) : forward<T, false>(stream, a);
        });
    }
    mb_cuda_launched(stream, "attention");
}

void mb_cuda_attention_backward(struct mb_context *ctx, struct mb_stream *stream,
                                const struct mb_attention_backward *a)
{
    const bool drops = a->dropout.probability > 0;
    if (is_too_large(stream, &a->shape) || mb_cuda_dnn_attention_backward(ctx->dnn, stream, a))
        return;
    if (mb_cuda_attention_mma_fits(&a->shape, a->dtype, a->qkv, a->out)) {
        struct attention_tiles t = whole_tiles(&a->shape, a->dtype, a->qkv, &a->dropout);
        mb_cuda_attention_delta(stream, &a->shape, a->dtype, a->out, a->d_out, a->scratch);
        t.log_all = a->log_sum;
        t.d_out = a->d_out;
        t.delta = a->scratch;
        t.d_qkv = t.d_kv = a->d_qkv;
        if (mb_cuda_attention_hopper_fits(ctx, &a->shape))
            mb_cuda_attention_hopper_backward(stream, &t);
        else
            mb_cuda_attention_mma_backward(stream, &t);
    } else {
        with_type(a->dtype, [&](auto t) {
            typedef decltype(t) T;
            delta<T>(stream, a);
            drops ? backward<T, true>(stream, a) : backward<T, false>(stream, a);
        });
    }
    mb_cuda_launched(stream, "attention gradient");
}
