/*
 * Output layer and cross entropy, for chunks of tokens whose logits fit the scratch: logits by a
 * product, then one kernel, a block a row, finds maximum and sum in one pass, and in a second pass,
 * which finds the row in the second-level cache, turns the logits into their gradients in place.
 * Two products make d_x and add to d_weight.
 *
 * A row's loss is kept, times its mask, and one block adds all of them in order, in double. A label
 * outside the vocabulary is a fault; its row has no loss and no gradient.
 *
 * Scratch: losses [n_tokens], then logits.
 */
#include <float.h>
#include "worker/kernels/cuda/device.cuh"

enum { THREADS = 512, SUM_THREADS = 1024 };

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

static __device__ __forceinline__ float exponential(float x, float)
{
    return expf(x);
}

static __device__ __forceinline__ float exponential(float x, bf16)
{
    return __expf(x);
}

/* The row's maximum and the sum of exp(x - maximum), known to all threads. */
template <class T>
static __device__ void maximum_and_sum(const T *row, size_t vocab, bool vectors, float *maximum,
                                       float *sum)
{
    __shared__ float shared[WARP];
    constexpr int N = vec<T>::N;
    float m = -FLT_MAX, s = 0;
    const size_t whole = vectors ? vocab / N : 0;
    for (size_t k = threadIdx.x; k < whole; k += THREADS) {
        const vec<T> v = load_vec(row + k * N);
        float top = m;
        for (int i = 0; i < N; i++)
            top = fmaxf(top, to_float(v.v[i]));
        if (top > m) {
            s *= exponential(m - top, T());
            m = top;
        }
        for (int i = 0; i < N; i++)
            s += exponential(to_float(v.v[i]) - m, T());
    }
    for (size_t i = whole * N + threadIdx.x; i < vocab; i += THREADS) {
        const float x = to_float(row[i]), top = fmaxf(m, x);
        s = s * exponential(m - top, T()) + exponential(x - top, T());
        m = top;
    }
    *maximum = block_max(m, shared);
    *sum = block_sum(s * exponential(m - *maximum, T()), shared);
}

template <class T, bool GRADIENT>
__global__ void __launch_bounds__(THREADS)
    loss_kernel(T *logits, const int32_t *label, const float *mask, float *loss, size_t first,
                size_t vocab, bool vectors, float grad_scale, unsigned long long *faults)
{
    constexpr int N = vec<T>::N;
    const size_t t = first + blockIdx.x;
    T *row = logits + blockIdx.x * vocab;
    const int32_t id = label[t];
    const bool good = id >= 0 && (size_t)id < vocab;
    float maximum, sum;
    maximum_and_sum(row, vocab, vectors, &maximum, &sum);
    if (threadIdx.x == 0) {
        if (!good)
            atomicMin(faults, (unsigned long long)t << 32 | (uint32_t)id);
        loss[t] = good ? mask[t] * (logf(sum) + maximum - to_float(row[id])) : 0;
    }
    if (!GRADIENT)
        return;
    __syncthreads(); /* the label's logit was read */
    const float scale = good ? grad_scale * mask[t] : 0, factor = scale / sum;
    const size_t whole = vectors ? vocab / N : 0;
    for (size_t k = threadIdx.x; k < whole; k += THREADS) {
        vec<T> v = load_vec(row + k * N);
        for (int i = 0; i < N; i++) {
            const float p = factor * exponential(to_float(v.v[i]) - maximum, T());
            v.v[i] = from_float<T>((int32_t)(k * N) + i == id ? p - scale : p);
        }
        store_vec(row + k * N, v);
    }
    for (size_t i = whole * N + threadIdx.x; i < vocab; i += THREADS) {
        const float p = factor * exponential(to_float(row[i]) - maximum, T());
        row[i] = from_float<T>((int32_t)i == id ? p - scale : p);
    }
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

template <class T>
static void losses(struct mb_stream *s, const struct mb_cross_entropy *a, T *logits, size_t first,
                   size_t rows)
{
    const bool vectors = is_aligned(logits) && a->vocab % vec<T>::N == 0;
    const unsigned blocks = (unsigned)rows;
    if (a->d_x != NULL)
        loss_kernel<T, true><<<blocks, THREADS, 0, s->cuda>>>(logits, a->label, a->mask, a->scratch,
                                                              first, a->vocab, vectors,
                                                              a->grad_scale, &s->faults->label);
    else
        loss_kernel<T, false><<<blocks, THREADS, 0, s->cuda>>>(logits, a->label, a->mask,
                                                               a->scratch, first, a->vocab, vectors,
                                                               a->grad_scale, &s->faults->label);
    mb_cuda_launched(s, "cross entropy");
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
                      const void *logits, const void *x, void *d_x, size_t rows)
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
    p.c = a->d_weight;
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
    stream->label_vocab = a->vocab;
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
        if (a->dtype == MB_DTYPE_BF16)
            losses(stream, a, (bf16 *)logits, first, rows);
        else
            losses(stream, a, (float *)logits, first, rows);
        if (a->d_x != NULL)
            gradients(ctx, stream, a, logits, x, (char *)a->d_x + offset, rows);
    }
    sum_kernel<<<1, SUM_THREADS, 0, stream->cuda>>>(a->scratch, a->n_tokens, a->loss_sum);
    mb_cuda_launched(stream, "sum of losses");
}
