/*
 * LayerNorm, a warp a row. Rows of up to 8 * 32 * 16 bytes (backward: 4) whose length fits stay in
 * registers between the passes; other rows are read again, from cache. Variance as a second pass
 * over the row: the one-pass formula loses digits when the mean is large.
 *
 * Backward, with xh = (x - mean) rstd and g = d_out w: d_x += rstd (g - mean(g) - xh mean(g xh)).
 * d_weight, d_bias and, where it is asked for, the sum of d_x: where a row stays in registers each
 * warp sums its columns over the rows that it walks, the block adds up its warps, and the blocks'
 * sums are added in order. Else kernels of their own walk down the columns.
 */
#include "worker/kernels/cuda/norm.cuh"
#include "worker/kernels/cuda/store_away.cuh"

enum { BACKWARD_WARPS = 4 };

/* Blocks of the backward kernel that a multiprocessor holds at a time, and that are started for it:
 * one more would run when the others have ended. */
constexpr int backward_blocks(int vecs)
{
    return vecs == 4 ? 2 : vecs == 3 ? 3 : 4;
}

/* ---- forward ---- */

template <int N>
static __device__ __forceinline__ void columns_of(float (&to)[N], const float *from)
{
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const vec<float> v = load_vec(from + i);
        for (int c = 0; c < 4; c++)
            to[i + c] = v.v[c];
    }
}

template <class T, int VECS>
__global__ void __launch_bounds__(THREADS)
    forward_kernel(const T *x, const float *weight_in, const float *bias_in, T *out,
                   float *mean_out, float *rstd_out, size_t n_rows, float eps)
{
    constexpr int N = vec<T>::N;
    constexpr size_t hidden = (size_t)VECS * N * WARP;
    const int lane = threadIdx.x % WARP;
    __shared__ alignas(16) float weights[hidden], biases[hidden];
    for (int c = threadIdx.x; c < (int)hidden; c += THREADS) {
        weights[c] = weight_in[c];
        biases[c] = bias_in[c];
    }
    __syncthreads();
    for (size_t row = blockIdx.x * (size_t)WARPS + threadIdx.x / WARP; row < n_rows;
         row += (size_t)gridDim.x * WARPS) {
        vec<T> v[VECS];
        float sum = 0, squares = 0;
#pragma unroll
        for (int k = 0; k < VECS; k++)
            v[k] = load_vec(x + row * hidden + (k * WARP + lane) * N);
#pragma unroll
        for (int k = 0; k < VECS; k++)
            for (int i = 0; i < N; i++)
                sum += to_float(v[k].v[i]);
        const float mean = warp_sum(sum) / (float)hidden;
#pragma unroll
        for (int k = 0; k < VECS; k++)
            for (int i = 0; i < N; i++) {
                const float d = to_float(v[k].v[i]) - mean;
                squares += d * d;
            }
        const float rstd = 1.0f / sqrtf(warp_sum(squares) / (float)hidden + eps);
#pragma unroll
        for (int k = 0; k < VECS; k++) {
            vec<T> o;
            float weight[N], bias[N];
            columns_of<N>(weight, weights + (k * WARP + lane) * N);
            columns_of<N>(bias, biases + (k * WARP + lane) * N);
            for (int i = 0; i < N; i++)
                o.v[i] = from_float<T>((to_float(v[k].v[i]) - mean) * rstd * weight[i] + bias[i]);
            store_away(out + row * hidden + (k * WARP + lane) * N, o);
        }
        if (lane == 0) {
            mean_out[row] = mean;
            rstd_out[row] = rstd;
        }
    }
}

/* ---- backward ---- */

template <class T, int VECS, bool SUMS_D_X>
__global__ void __launch_bounds__(BACKWARD_WARPS *WARP, backward_blocks(VECS))
    backward_kernel(const T *x, const float *weight_in, const float *mean_in, const float *rstd_in,
                    const T *d_out, T *d_x, float *parts, size_t n_rows)
{
    constexpr int N = vec<T>::N;
    constexpr size_t hidden = (size_t)VECS * N * WARP;
    __shared__ alignas(16) float shared[hidden]; /* weights, then sums */
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    constexpr int SUMS = SUMS_D_X ? 3 : 2;
    float d_weight[VECS * N] = {}, d_bias[VECS * N] = {}, d_x_sum[VECS * N] = {};
    for (int c = threadIdx.x; c < (int)hidden; c += BACKWARD_WARPS * WARP)
        shared[c] = weight_in[c];
    __syncthreads();
    for (size_t row = blockIdx.x * (size_t)BACKWARD_WARPS + warp; row < n_rows;
         row += (size_t)gridDim.x * BACKWARD_WARPS) {
        const float mean = mean_in[row], rstd = rstd_in[row];
        vec<T> vx[VECS], vd[VECS], vo[VECS];
        float sum_g = 0, sum_gx = 0;
#pragma unroll
        for (int k = 0; k < VECS; k++) {
            const size_t at = row * hidden + (k * WARP + lane) * N;
            vx[k] = load_vec(x + at);
            vd[k] = load_vec(d_out + at);
            vo[k] = load_vec(d_x + at);
        }
#pragma unroll
        for (int k = 0; k < VECS; k++) {
            float weight[N];
            columns_of<N>(weight, shared + (k * WARP + lane) * N);
            for (int i = 0; i < N; i++) {
                const float xh = (to_float(vx[k].v[i]) - mean) * rstd, d = to_float(vd[k].v[i]);
                const float g = d * weight[i];
                sum_g += g;
                sum_gx += g * xh;
                d_weight[k * N + i] += d * xh;
                d_bias[k * N + i] += d;
            }
        }
        const float mean_g = warp_sum(sum_g) / (float)hidden;
        const float mean_gx = warp_sum(sum_gx) / (float)hidden;
#pragma unroll
        for (int k = 0; k < VECS; k++) {
            float weight[N];
            columns_of<N>(weight, shared + (k * WARP + lane) * N);
            for (int i = 0; i < N; i++) {
                const float xh = (to_float(vx[k].v[i]) - mean) * rstd;
                const float g = to_float(vd[k].v[i]) * weight[i];
                vo[k].v[i] =
                    from_float<T>(to_float(vo[k].v[i]) + rstd * (g - mean_g - xh * mean_gx));
                if constexpr (SUMS_D_X)
                    d_x_sum[k * N + i] += to_float(vo[k].v[i]);
            }
            store_vec(d_x + row * hidden + (k * WARP + lane) * N, vo[k]);
        }
    }
    __syncthreads(); /* the weights have been read */
    /* Warp after warp adds to the block's sums: of the weight first, of the bias, then of d_x. */
#pragma unroll
    for (int what = 0; what < SUMS; what++) {
        for (int w = 0; w < BACKWARD_WARPS; w++) {
            if (w == warp)
#pragma unroll
                for (int k = 0; k < VECS; k++)
                    for (int i = 0; i < N; i++) {
                        const int column = (k * WARP + lane) * N + i;
                        const float mine = what == 0   ? d_weight[k * N + i]
                                           : what == 1 ? d_bias[k * N + i]
                                                       : d_x_sum[k * N + i];
                        shared[column] = w == 0 ? mine : shared[column] + mine;
                    }
            __syncthreads();
        }
        for (size_t c = threadIdx.x; c < hidden; c += BACKWARD_WARPS * WARP)
            parts[(SUMS * blockIdx.x + what) * hidden + c] = shared[c];
        __syncthreads();
    }
}

/* ---- which kernel ---- */

template <class T, int VECS>
static void forward_in_registers(struct mb_context *ctx, struct mb_stream *s,
                                 const struct mb_layernorm_forward *a)
{
    const unsigned blocks = (unsigned)at_most(blocks_for(a->n_rows, WARPS), (size_t)ctx->n_sm * 8);
    forward_kernel<T, VECS><<<blocks, THREADS, 0, s->cuda>>>(
        (const T *)a->x, a->weight, a->bias, (T *)a->out, a->mean, a->rstd, a->n_rows, a->eps);
}

template <class T>
static void forward(struct mb_context *ctx, struct mb_stream *s,
                    const struct mb_layernorm_forward *a)
{
    const size_t per_vec = (size_t)WARP * vec<T>::N;
    const bool vectors = a->hidden % per_vec == 0 && is_aligned(a->x) && is_aligned(a->out) &&
                         is_aligned(a->weight) && is_aligned(a->bias);
    switch (vectors ? a->hidden / per_vec : 0) {
    case 1:
        forward_in_registers<T, 1>(ctx, s, a);
        return;
    case 2:
        forward_in_registers<T, 2>(ctx, s, a);
        return;
    case 3:
        forward_in_registers<T, 3>(ctx, s, a);
        return;
    case 4:
        forward_in_registers<T, 4>(ctx, s, a);
        return;
    case 6:
        forward_in_registers<T, 6>(ctx, s, a);
        return;
    case 8:
        forward_in_registers<T, 8>(ctx, s, a);
        return;
    default:
        any_forward_kernel<T, true><<<blocks_for(a->n_rows, WARPS), THREADS, 0, s->cuda>>>(
            (const T *)a->x, a->weight, a->bias, (T *)a->out, a->mean, a->rstd, a->n_rows,
            a->hidden, a->eps);
    }
}

template <class T, int VECS>
static void backward_in_registers(struct mb_context *ctx, struct mb_stream *s,
                                  const struct mb_layernorm_backward *a)
{
    constexpr int BLOCK = BACKWARD_WARPS * WARP;
    const struct mb_cuda_sums sums = {{a->d_weight, a->d_bias, a->d_x_sum},
                                      a->d_x_sum != NULL ? 3 : 2};
    float *parts = (float *)s->workspace; /* [blocks][sums][hidden] */
    const unsigned blocks = (unsigned)at_most(blocks_for(a->n_rows, BACKWARD_WARPS),
                                              (size_t)ctx->n_sm * backward_blocks(VECS));
    if (a->d_x_sum != NULL)
        backward_kernel<T, VECS, true>
            <<<blocks, BLOCK, 0, s->cuda>>>((const T *)a->x, a->weight, a->mean, a->rstd,
                                            (const T *)a->d_out, (T *)a->d_x, parts, a->n_rows);
    else
        backward_kernel<T, VECS, false>
            <<<blocks, BLOCK, 0, s->cuda>>>((const T *)a->x, a->weight, a->mean, a->rstd,
                                            (const T *)a->d_out, (T *)a->d_x, parts, a->n_rows);
    mb_cuda_add_parts(s, parts, blocks, a->hidden, &sums);
}

template <class T>
static void backward(struct mb_context *ctx, struct mb_stream *s,
                     const struct mb_layernorm_backward *a)
{
    const size_t per_vec = (size_t)WARP * vec<T>::N;
    const bool vectors = a->hidden % per_vec == 0 && is_aligned(a->x) && is_aligned(a->d_out) &&
                         is_aligned(a->d_x) && is_aligned(a->weight);
    switch (vectors ? a->hidden / per_vec : 0) {
    case 1:
        backward_in_registers<T, 1>(ctx, s, a);
        return;
    case 2:
        backward_in_registers<T, 2>(ctx, s, a);
        return;
    case 3:
        backward_in_registers<T, 3>(ctx, s, a);
        return;
    case 4:
        backward_in_registers<T, 4>(ctx, s, a);
        return;
    default:
        any_backward_kernel<T, true><<<blocks_for(a->n_rows, WARPS), THREADS, 0, s->cuda>>>(
            (const T *)a->x, a->weight, a->mean, a->rstd, (const T *)a->d_out, (T *)a->d_x,
            a->n_rows, a->hidden);
        any_columns_kernel<T, true>
            <<<blocks_for(a->hidden, WARP), dim3(WARP, COLUMN_ROWS), 0, s->cuda>>>(
                (const T *)a->x, a->mean, a->rstd, (const T *)a->d_out, a->d_weight, a->d_bias,
                a->n_rows, a->hidden);
        if (a->d_x_sum != NULL)
            mb_cuda_column_sum(ctx, s, a->d_x, a->n_rows, a->hidden, a->dtype, a->d_x_sum);
    }
}

void mb_cuda_layernorm_forward(struct mb_context *ctx, struct mb_stream *stream,
                               const struct mb_layernorm_forward *a)
{
    with_type(a->dtype, [&](auto t) { forward<decltype(t)>(ctx, stream, a); });
    mb_cuda_launched(stream, "layernorm");
}

void mb_cuda_layernorm_backward(struct mb_context *ctx, struct mb_stream *stream,
                                const struct mb_layernorm_backward *a)
{
    with_type(a->dtype, [&](auto t) { backward<decltype(t)>(ctx, stream, a); });
    mb_cuda_launched(stream, "layernorm gradient");
}
