/*
 * RMSNorm, a block a row. A thread holds its columns of the row in registers between the passes, up
 * to MAX_VECS times 16 bytes; longer rows, and rows whose length or place is odd, go by a warp each
 * and are read again, from cache.
 *
 * Backward, with xh = x rstd and g = d_out w: d_x += rstd (g - xh mean(g xh)); d_weight += d_out
 * xh. For d_weight a block sums its columns over the rows that it walks, and the blocks' sums are
 * added in order; the warps' way has a kernel of its own that walks down the columns.
 */
#include "worker/kernels/cuda/amax.cuh"
#include "worker/kernels/cuda/norm.cuh"
#include "worker/kernels/cuda/store_away.cuh"

enum { MAX_VECS = 4 };

/* The thread's columns of a vector of fp32, in the order of its vectors of T; 0 beyond the end. */
template <int N, int VECS>
static __device__ __forceinline__ void load_columns(float (&to)[VECS * N], const float *from,
                                                    size_t hidden)
{
#pragma unroll
    for (int k = 0; k < VECS; k++) {
        const size_t at = ((size_t)k * THREADS + threadIdx.x) * N;
#pragma unroll
        for (int i = 0; i < N; i++)
            to[k * N + i] = at < hidden ? from[at + i] : 0;
    }
}

template <class T>
static __device__ __forceinline__ vec<T> load_or_zero(const T *row, size_t at, size_t hidden)
{
    vec<T> zero;
    for (int i = 0; i < vec<T>::N; i++)
        zero.v[i] = from_float<T>(0);
    return at < hidden ? load_vec(row + at) : zero;
}

/* ---- forward ---- */

template <class T, int VECS, bool AMAX>
__global__ void __launch_bounds__(THREADS)
    forward_kernel(const T *x, const float *weight_in, T *out, float *rstd_out, float *amax,
                   size_t n_rows, size_t hidden, float eps)
{
    constexpr int N = vec<T>::N;
    __shared__ float shared[WARP];
    unsigned most = 0;
    float weight[VECS * N];
    load_columns<N, VECS>(weight, weight_in, hidden);
    for (size_t row = blockIdx.x; row < n_rows; row += gridDim.x) {
        vec<T> v[VECS];
        float squares = 0;
#pragma unroll
        for (int k = 0; k < VECS; k++) {
            v[k] = load_or_zero(x + row * hidden, ((size_t)k * THREADS + threadIdx.x) * N, hidden);
            for (int i = 0; i < N; i++)
                squares += to_float(v[k].v[i]) * to_float(v[k].v[i]);
        }
        const float rstd = 1.0f / sqrtf(block_sum(squares, shared) / (float)hidden + eps);
#pragma unroll
        for (int k = 0; k < VECS; k++) {
            const size_t at = ((size_t)k * THREADS + threadIdx.x) * N;
            vec<T> o;
            for (int i = 0; i < N; i++)
                o.v[i] = from_float<T>(to_float(v[k].v[i]) * rstd * weight[k * N + i]);
            if constexpr (AMAX)
                most = larger(most, o); /* beyond the end are zeros, of zeros */
            if (at < hidden)
                store_away(out + row * hidden + at, o);
        }
        if (threadIdx.x == 0)
            rstd_out[row] = rstd;
    }
    if constexpr (AMAX)
        gain_amax(most, amax);
}

/* ---- backward ---- */

template <class T, int VECS, bool AMAX>
__global__ void __launch_bounds__(THREADS)
    backward_kernel(const T *x, const float *weight_in, const float *rstd_in, const T *d_out,
                    T *d_x, float *parts, float *amax, size_t n_rows, size_t hidden)
{
    constexpr int N = vec<T>::N;
    __shared__ float shared[WARP];
    unsigned most = 0;
    float d_weight[VECS * N] = {}, weight[VECS * N];
    load_columns<N, VECS>(weight, weight_in, hidden);
    for (size_t row = blockIdx.x; row < n_rows; row += gridDim.x) {
        const float rstd = rstd_in[row];
        vec<T> vx[VECS], vd[VECS], vo[VECS];
        float sum = 0;
#pragma unroll
        for (int k = 0; k < VECS; k++) {
            const size_t at = ((size_t)k * THREADS + threadIdx.x) * N;
            vx[k] = load_or_zero(x + row * hidden, at, hidden);
            vd[k] = load_or_zero(d_out + row * hidden, at, hidden);
            vo[k] = load_or_zero(d_x + row * hidden, at, hidden);
        }
#pragma unroll
        for (int k = 0; k < VECS; k++) {
            for (int i = 0; i < N; i++) {
                const float xh = to_float(vx[k].v[i]) * rstd, d = to_float(vd[k].v[i]);
                sum += d * weight[k * N + i] * xh;
                d_weight[k * N + i] += d * xh;
            }
        }
        const float mean = block_sum(sum, shared) / (float)hidden;
#pragma unroll
        for (int k = 0; k < VECS; k++) {
            const size_t at = ((size_t)k * THREADS + threadIdx.x) * N;
            if (at >= hidden)
                continue;
            for (int i = 0; i < N; i++) {
                const float xh = to_float(vx[k].v[i]) * rstd;
                const float g = to_float(vd[k].v[i]) * weight[k * N + i];
                vo[k].v[i] = from_float<T>(to_float(vo[k].v[i]) + rstd * (g - xh * mean));
            }
            if constexpr (AMAX)
                most = larger(most, vo[k]);
            store_vec(d_x + row * hidden + at, vo[k]);
        }
    }
    if constexpr (AMAX)
        gain_amax(most, amax);
#pragma unroll
    for (int k = 0; k < VECS; k++) {
        const size_t at = ((size_t)k * THREADS + threadIdx.x) * N;
        for (int i = 0; i < N && at < hidden; i++)
            parts[blockIdx.x * hidden + at + i] = d_weight[k * N + i];
    }
}

/* ---- which kernel ---- */

/* 16-byte vectors that a thread holds of a row; 0: the row is for warps. */
template <class T> static size_t vecs_of(size_t hidden, bool aligned)
{
    const size_t vecs = blocks_for(hidden, (size_t)THREADS * vec<T>::N);
    return aligned && hidden % vec<T>::N == 0 && vecs <= MAX_VECS ? vecs : 0;
}

template <class T, int VECS>
static void forward_in_registers(struct mb_context *ctx, struct mb_stream *s,
                                 const struct mb_rmsnorm_forward *a)
{
    const unsigned blocks = (unsigned)at_most(a->n_rows, (size_t)ctx->n_sm * 8);
    if (a->amax != NULL)
        forward_kernel<T, VECS, true>
            <<<blocks, THREADS, 0, s->cuda>>>((const T *)a->x, a->weight, (T *)a->out, a->rstd,
                                              a->amax, a->n_rows, a->hidden, a->eps);
    else
        forward_kernel<T, VECS, false><<<blocks, THREADS, 0, s->cuda>>>(
            (const T *)a->x, a->weight, (T *)a->out, a->rstd, NULL, a->n_rows, a->hidden, a->eps);
}

/* Of what an operation wrote by a way that does not form it. */
static void amax_apart(struct mb_context *ctx, struct mb_stream *s, const void *x, size_t n,
                       float *amax)
{
    const struct mb_fp8_amax a = {x, amax, n};
    if (amax != NULL)
        mb_cuda_fp8_amax(ctx, s, &a);
}

template <class T>
static void forward(struct mb_context *ctx, struct mb_stream *s, const struct mb_rmsnorm_forward *a)
{
    switch (vecs_of<T>(a->hidden, is_aligned(a->x) && is_aligned(a->out))) {
    case 1:
        forward_in_registers<T, 1>(ctx, s, a);
        return;
    case 2:
        forward_in_registers<T, 2>(ctx, s, a);
        return;
    case 3:
    case 4:
        forward_in_registers<T, 4>(ctx, s, a);
        return;
    default:
        any_forward_kernel<T, false><<<blocks_for(a->n_rows, WARPS), THREADS, 0, s->cuda>>>(
            (const T *)a->x, a->weight, NULL, (T *)a->out, NULL, a->rstd, a->n_rows, a->hidden,
            a->eps);
        amax_apart(ctx, s, a->out, a->n_rows * a->hidden, a->amax);
    }
}

template <class T, int VECS>
static void backward_in_registers(struct mb_context *ctx, struct mb_stream *s,
                                  const struct mb_rmsnorm_backward *a)
{
    float *parts = (float *)s->workspace; /* [blocks][hidden] */
    const size_t room = MB_CUDA_WORKSPACE_BYTES / sizeof(float) / a->hidden;
    const unsigned blocks = (unsigned)at_most(at_most(a->n_rows, (size_t)ctx->n_sm * 4), room);
    if (a->amax != NULL)
        backward_kernel<T, VECS, true><<<blocks, THREADS, 0, s->cuda>>>(
            (const T *)a->x, a->weight, a->rstd, (const T *)a->d_out, (T *)a->d_x, parts, a->amax,
            a->n_rows, a->hidden);
    else
        backward_kernel<T, VECS, false><<<blocks, THREADS, 0, s->cuda>>>(
            (const T *)a->x, a->weight, a->rstd, (const T *)a->d_out, (T *)a->d_x, parts, NULL,
            a->n_rows, a->hidden);
    const struct mb_cuda_sums sums = {{a->d_weight}, 1};
    mb_cuda_add_parts(s, parts, blocks, a->hidden, &sums);
}

template <class T>
static void backward(struct mb_context *ctx, struct mb_stream *s,
                     const struct mb_rmsnorm_backward *a)
{
    const bool aligned = is_aligned(a->x) && is_aligned(a->d_out) && is_aligned(a->d_x);
    switch (vecs_of<T>(a->hidden, aligned)) {
    case 1:
        backward_in_registers<T, 1>(ctx, s, a);
        return;
    case 2:
        backward_in_registers<T, 2>(ctx, s, a);
        return;
    case 3:
    case 4:
        backward_in_registers<T, 4>(ctx, s, a);
        return;
    default:
        any_backward_kernel<T, false><<<blocks_for(a->n_rows, WARPS), THREADS, 0, s->cuda>>>(
            (const T *)a->x, a->weight, NULL, a->rstd, (const T *)a->d_out, (T *)a->d_x, a->n_rows,
            a->hidden);
        any_columns_kernel<T, false>
            <<<blocks_for(a->hidden, WARP), dim3(WARP, COLUMN_ROWS), 0, s->cuda>>>(
                (const T *)a->x, NULL, a->rstd, (const T *)a->d_out, a->d_weight, NULL, a->n_rows,
                a->hidden);
        amax_apart(ctx, s, a->d_x, a->n_rows * a->hidden, a->amax);
    }
}

void mb_cuda_rmsnorm_forward(struct mb_context *ctx, struct mb_stream *stream,
                             const struct mb_rmsnorm_forward *a)
{
    with_type(a->dtype, [&](auto t) { forward<decltype(t)>(ctx, stream, a); });
    mb_cuda_launched(stream, "rmsnorm");
}

void mb_cuda_rmsnorm_backward(struct mb_context *ctx, struct mb_stream *stream,
                              const struct mb_rmsnorm_backward *a)
{
    with_type(a->dtype, [&](auto t) { backward<decltype(t)>(ctx, stream, a); });
    mb_cuda_launched(stream, "rmsnorm gradient");
}
