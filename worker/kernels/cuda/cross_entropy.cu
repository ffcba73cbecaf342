/*
 * Output layer and cross entropy, for chunks of tokens whose logits fit the scratch: logits by a
 * product, then one kernel, a block a row, finds maximum and sum in one pass, and in a second pass
 * turns the logits into their gradients in place. Between the passes the row stays in shared
 * memory, as far as it goes there: with more blocks than a multiprocessor has room for rows the
 * second-level cache has lost them by then. Two products make d_x and add to d_weight.
 *
 * A row's loss is kept, times its mask, and one block adds all of them in order, in double. A label
 * outside the vocabulary is a fault; its row has no loss and no gradient. Where the vocabulary is
 * spread over ranks, the row's log of the sum is made of all ranks' parts.
 *
 * Scratch: losses [n_tokens], then logits.
 */
#include <float.h>
#include "worker/kernels/cuda/store_away.cuh"

enum { SUM_THREADS = 1024, AT_ONCE = 4, RESERVED_BYTES = 2048 };

static size_t loss_floats(size_t n_tokens)
{
    return (n_tokens + 63) / 64 * 64; /* logits begin on a 256-byte boundary */
}

/* Rows of a chunk: as many as the bound allows, in whole tiles of the products. */
static size_t chunk_rows(size_t n_tokens, size_t vocab, size_t element_bytes)
{
    size_t rows = MB_CUDA_LOGITS_BYTES / element_bytes / vocab;
    rows = rows > 256 ? rows / 256 * 256 : rows;
    rows = rows < n_tokens ? rows : n_tokens;
    return rows > 0 ? rows : 1;
}

size_t mb_cuda_cross_entropy_scratch(size_t n_tokens, size_t hidden, size_t vocab)
{
    (void)hidden;
    const size_t wide = chunk_rows(n_tokens, vocab, 4) * vocab;
    const size_t narrow = (chunk_rows(n_tokens, vocab, 2) * vocab + 1) / 2;
    return loss_floats(n_tokens) + (wide > narrow ? wide : narrow);
}

/* exp(x - m); for bf16 and fp16 in two instructions: what is lost of the sum lies below its digits.
 */
static __device__ __forceinline__ float exponential(float x, float m, float)
{
    return expf(x - m);
}

template <class T> static __device__ __forceinline__ float exponential(float x, float m, T)
{
    constexpr float LOG2E = 1.44269504f;
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaf(x, LOG2E, -m * LOG2E)));
    return y;
}

/* The row's maximum and the sum of exp(x - maximum), known to all threads. The first n_near of its
 * n_vecs vectors are left in near. */
template <class T, int THREADS>
static __device__ void maximum_and_sum(const T *row, size_t vocab, size_t n_vecs, vec<T> *near,
                                       size_t n_near, float *maximum, float *sum)
{
    __shared__ float shared[WARP];
    constexpr int N = vec<T>::N;
    float m = -FLT_MAX, s = 0;
    for (size_t from = threadIdx.x; from < n_vecs; from += AT_ONCE * THREADS) {
        vec<T> v[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            if (from + j * THREADS < n_vecs)
                v[j] = load_vec(row + (from + j * THREADS) * N);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const size_t k = from + j * THREADS;
            float top = m;
            if (k >= n_vecs)
                continue;
            if (k < n_near)
                near[k] = v[j];
            for (int i = 0; i < N; i++)
                top = fmaxf(top, to_float(v[j].v[i]));
            if (top > m) {
                s *= exponential(m, top, T());
                m = top;
            }
            for (int i = 0; i < N; i++)
                s += exponential(to_float(v[j].v[i]), m, T());
        }
    }
    for (size_t i = n_vecs * N + threadIdx.x; i < vocab; i += THREADS) {
        const float x = to_float(row[i]), top = fmaxf(m, x);
        s = s * exponential(m, top, T()) + exponential(x, top, T());
        m = top;
    }
    *maximum = block_max(m, shared);
    *sum = block_sum(s * exponential(m, *maximum, T()), shared);
}

/* A vocabulary that is spread over ranks; of one that is not, parts and part are NULL. */
struct spread {
    float *part;
    const float *parts;
    size_t n_parts, n_tokens, first, all_vocab;
};

static __device__ void join_parts(const struct spread &s, size_t t, float *log_sum, float *label)
{
    float top = -FLT_MAX, sum = 0;
    *label = 0;
    for (size_t p = 0; p < s.n_parts; p++)
        top = fmaxf(top, s.parts[2 * p * s.n_tokens + t]);
    for (size_t p = 0; p < s.n_parts; p++) {
        sum += expf(s.parts[2 * p * s.n_tokens + t] - top);
        *label += s.parts[(2 * p + 1) * s.n_tokens + t];
    }
    *log_sum = top + logf(sum);
}

template <class T, bool GRADIENT, int THREADS>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    loss_kernel(T *logits, const int32_t *label, const float *mask, float *loss, size_t first,
                size_t vocab, size_t n_vecs, size_t n_near, float grad_scale,
                const struct mb_pass *pass, struct spread spread, unsigned long long *faults)
{
    constexpr int N = vec<T>::N;
    extern __shared__ char memory[];
    vec<T> *near = (vec<T> *)memory;
    const size_t t = first + blockIdx.x;
    T *row = logits + blockIdx.x * vocab;
    const bool good = label[t] >= 0 && (size_t)label[t] < spread.all_vocab;
    /* The label's column, or one that there is not. */
    const size_t column = (size_t)label[t] - spread.first;
    const int32_t id = good && column < vocab ? (int32_t)column : -1;
    float maximum, sum;
    maximum_and_sum<T, THREADS>(row, vocab, n_vecs, near, n_near, &maximum, &sum);
    const float own_logit = id >= 0 ? to_float(row[id]) : 0;
    float log_sum = logf(sum) + maximum, label_logit = own_logit;
    if (threadIdx.x == 0 && !good)
        atomicMin(faults, (unsigned long long)t << 32 | (uint32_t)label[t]);
    if (spread.part != NULL) {
        if (threadIdx.x == 0) {
            spread.part[t] = log_sum;
            spread.part[spread.n_tokens + t] = label_logit;
        }
        return;
    }
    if (spread.parts != NULL)
        join_parts(spread, t, &log_sum, &label_logit);
    if (threadIdx.x == 0)
        loss[t] = good ? mask[t] * (log_sum - label_logit) : 0;
    if (!GRADIENT)
        return;
    __syncthreads(); /* the label's logit was read by all */
    const float by = pass != NULL ? pass->grad_scale : grad_scale;
    const float scale = good ? by * mask[t] : 0;
    const float factor = spread.parts != NULL ? scale * expf(maximum - log_sum) : scale / sum;
    for (size_t k = threadIdx.x; k < n_vecs;
         k += THREADS) { /* near has what this thread put there */
        vec<T> v = k < n_near ? near[k] : load_vec(row + k * N);
        for (int i = 0; i < N; i++)
            v.v[i] = from_float<T>(factor * exponential(to_float(v.v[i]), maximum, T()));
        store_away(row + k * N, v);
    }
    for (size_t i = n_vecs * N + threadIdx.x; i < vocab; i += THREADS)
        row[i] = from_float<T>(factor * exponential(to_float(row[i]), maximum, T()));
    __syncthreads(); /* the label's element was written */
    if (threadIdx.x == 0 && id >= 0)
        row[id] = from_float<T>(factor * exponential(own_logit, maximum, T()) - scale);
}

__global__ void sum_kernel(const float *loss, size_t n, double *loss_sum)
{
    __shared__ double shared[SUM_THREADS];
    double total = 0;
    for (size_t i = threadIdx.x; i < n; i += SUM_THREADS)
        total += (double)loss[i];
    shared[threadIdx.x] = total;
    __syncthreads();
    for (int i = SUM_THREADS / 2; i > 0; i /= 2) {
        if ((int)threadIdx.x < i)
            shared[threadIdx.x] += shared[threadIdx.x + i];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        *loss_sum += shared[0];
}

/* Two rows a multiprocessor, one where that would leave most of a row out. */
template <class T, bool GRADIENT>
static void losses(const struct mb_context *ctx, struct mb_stream *s,
                   const struct mb_cross_entropy *a, T *logits, size_t first, size_t rows)
{
    const struct spread spread = {a->part,     a->parts, a->n_parts,
                                  a->n_tokens, a->first, mb_all_vocab(a->all_vocab, a->vocab)};
    const size_t n_vecs =
        is_aligned(logits) && a->vocab % vec<T>::N == 0 ? a->vocab / vec<T>::N : 0;
    size_t row_bytes = 0; /* of a row that is read again */
    if (GRADIENT)
        row_bytes = n_vecs * sizeof(vec<T>);
    const size_t half = ctx->shared_bytes / 2 - RESERVED_BYTES;
    const bool alone = row_bytes > half + half / 4;
    const size_t n_near =
        at_most(row_bytes, alone ? ctx->shared_block_bytes - RESERVED_BYTES : half) /
        sizeof(vec<T>);
    const unsigned near_bytes = (unsigned)(n_near * sizeof(vec<T>)), blocks = (unsigned)rows;
    auto *kernel = alone ? loss_kernel<T, GRADIENT, 1024> : loss_kernel<T, GRADIENT, 512>;
    mb_cuda_note(
        s,
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)near_bytes),
        "shared memory of the loss");
    kernel<<<blocks, alone ? 1024 : 512, near_bytes, s->cuda>>>(
        logits, a->label, a->mask, a->scratch, first, a->vocab, n_vecs, n_near, a->grad_scale,
        a->pass, spread, &s->faults->label);
    mb_cuda_launched(s, "cross entropy");
}

template <class T>
static void losses_of(const struct mb_context *ctx, struct mb_stream *s,
                      const struct mb_cross_entropy *a, T *logits, size_t first, size_t rows)
{
    if (a->d_x != NULL)
        losses<T, true>(ctx, s, a, logits, first, rows);
    else
        losses<T, false>(ctx, s, a, logits, first, rows);
}

/* logits = x W^T; d_x = d W; d_weight += d^T x */
static struct mb_cuda_product product(const struct mb_cross_entropy *a, size_t m, size_t n,
                                      size_t k)
{
    struct mb_cuda_product p = {};
    p.m = m;
    p.n = n;
    p.k = k;
    p.dtype = a->dtype;
    p.d_dtype = a->dtype;
    return p;
}

static void gradients(struct mb_context *ctx, struct mb_stream *s, const struct mb_cross_entropy *a,
                      const void *logits, const void *x, void *d_x, size_t rows, bool sets_d_weight)
{
    struct mb_cuda_product p = product(a, rows, a->hidden, a->vocab);
    p.a = logits;
    p.b = a->weight;
    p.d = d_x;
    mb_cuda_blas_run(ctx->blas, s, &p);
    p = product(a, a->vocab, a->hidden, rows);
    p.transpose_a = 1;
    p.a = logits;
    p.b = x;
    p.c = sets_d_weight ? NULL : a->d_weight;
    p.d = a->d_weight;
    p.d_dtype = MB_DTYPE_F32;
    mb_cuda_blas_run(ctx->blas, s, &p);
}

void mb_cuda_cross_entropy(struct mb_context *ctx, struct mb_stream *stream,
                           const struct mb_cross_entropy *a)
{
    const size_t size = mb_dtype_size(a->dtype);
    const size_t chunk = chunk_rows(a->n_tokens, a->vocab, size);
    void *logits = a->scratch + loss_floats(a->n_tokens);
    stream->label_vocab = mb_all_vocab(a->all_vocab, a->vocab);
    for (size_t first = 0; first < a->n_tokens; first += chunk) {
        const size_t rows = a->n_tokens - first < chunk ? a->n_tokens - first : chunk;
        const size_t offset = first * a->hidden * size;
        const void *x = (const char *)a->x + offset;
        struct mb_cuda_product p = product(a, rows, a->vocab, a->hidden);
        p.transpose_b = 1;
        p.a = x;
        p.b = a->weight;
        p.d = logits;
        mb_cuda_blas_run(ctx->blas, stream, &p);
        with_type(a->dtype,
                  [&](auto t) { losses_of(ctx, stream, a, (decltype(t) *)logits, first, rows); });
        if (a->d_x != NULL)
            gradients(ctx, stream, a, logits, x, (char *)a->d_x + offset, rows,
                      a->sets_d_weight && first == 0);
    }
    if (a->part != NULL)
        return;
    sum_kernel<<<1, SUM_THREADS, 0, stream->cuda>>>(a->scratch, a->n_tokens, a->loss_sum);
    mb_cuda_launched(stream, "sum of losses");
}
