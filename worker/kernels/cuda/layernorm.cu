/*
 * LayerNorm, a warp a row. Rows of up to 8 * 32 * 16 bytes (backward: 4) whose length fits stay in
 * registers between the passes; other rows are read again, from cache. Variance as a second pass
 * over the row: the one-pass formula loses digits when the mean is large.
 *
 * Backward, with xh = (x - mean) rstd and g = d_out w: d_x += rstd (g - mean(g) - xh mean(g xh)).
 * d_weight and d_bias: where a row stays in registers each warp sums its columns over the rows that
 * it walks, the block adds up its warps, and the blocks' sums are added in order. Else a kernel of
 * its own walks down the columns.
 */
#include "worker/kernels/cuda/norm.cuh"

enum { BACKWARD_WARPS = 4 };

/* ---- forward ---- */

/* The lane's columns of a vector of fp32, in the order of its vectors of T. */
template <int N, int VECS>
static __device__ __forceinline__ void load_columns(float (&to)[VECS * N], const float *from)
{
#pragma unroll
    for (int k = 0; k < VECS; k++)
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const vec<float> v = load_vec(from + (k * WARP + threadIdx.x % WARP) * N + i);
            for (int c = 0; c < 4; c++)
                to[k * N + i + c] = v.v[c];
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
    float weight[VECS * N], bias[VECS * N];
    load_columns<N, VECS>(weight, weight_in);
    load_columns<N, VECS>(bias, bias_in);
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
            for (int i = 0; i < N; i++)
                o.v[i] = from_float<T>((to_float(v[k].v[i]) - mean) * rstd * weight[k * N + i] +
                                       bias[k * N + i]);
            store_vec(out + row * hidden + (k * WARP + lane) * N, o);
        }
        if (lane == 0) {
            mean_out[row] = mean;
            rstd_out[row] = rstd;
        }
    }
}

/* ---- backward ---- */

template <class T, int VECS>
__global__ void __launch_bounds__(BACKWARD_WARPS *WARP)
    backward_kernel(const T *x, const float *weight_in, const float *mean_in, const float *rstd_in,
                    const T *d_out, T *d_x, float *parts, size_t n_rows)
{
    constexpr int N = vec<T>::N;
    constexpr size_t hidden = (size_t)VECS * N * WARP;
    __shared__ float shared[hidden];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    float d_weight[VECS * N] = {}, d_bias[VECS * N] = {}, weight[VECS * N];
    load_columns<N, VECS>(weight, weight_in);
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
        for (int k = 0; k < VECS; k++)
            for (int i = 0; i < N; i++) {
                const float xh = (to_float(vx[k].v[i]) - mean) * rstd, d = to_float(vd[k].v[i]);
                const float g = d * weight[k * N + i];
                sum_g += g;
                sum_gx += g * xh;
                d_weight[k * N + i] += d * xh;
                d_bias[k * N + i] += d;
            }
        const float mean_g = warp_sum(sum_g) / (float)hidden;
        const float mean_gx = warp_sum(sum_gx) / (float)hidden;
#pragma unroll
        for (int k = 0; k < VECS; k++) {
            for (int i = 0; i < N; i++) {
                const float xh = (to_float(vx[k].v[i]) - mean) * rstd;
                const float g = to_float(vd[k].v[i]) * weight[k * N + i];
                vo[k].v[i] =
                    from_float<T>(to_float(vo[k].v[i]) + rstd * (g - mean_g - xh * mean_gx));
            }
            store_vec(d_x + row * hidden + (k * WARP + lane) * N, vo[k]);
        }
    }
    /* Warp after warp adds to the block's sums: of the weight first, then of the bias. */
    for (int what = 0; what < 2; what++) {
        for (int w = 0; w < BACKWARD_WARPS; w++) {
            if (w == warp)
#pragma unroll
                for (int k = 0; k < VECS; k++)
                    for (int i = 0; i < N; i++) {
                        const int column = (k * WARP + lane) * N + i;
                        const float mine = what == 0 ? d_weight[k * N + i] : d_bias[k * N + i];
                        shared[column] = w == 0 ? mine : shared[column] + mine;
                    }
            __syncthreads();
        }
        for (size_t c = threadIdx.x; c < hidden; c += BACKWARD_WARPS * WARP)
            parts[(2 * blockIdx.x + what) * hidden + c] = shared[c];
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
    float *parts = (float *)s->workspace; /* [blocks][2][hidden] */
    const unsigned blocks =
        (unsigned)at_most(blocks_for(a->n_rows, BACKWARD_WARPS), (size_t)ctx->n_sm * 4);
    backward_kernel<T, VECS><<<blocks, BACKWARD_WARPS * WARP, 0, s->cuda>>>(
        (const T *)a->x, a->weight, a->mean, a->rstd, (const T *)a->d_out, (T *)a->d_x, parts,
        a->n_rows);
    mb_cuda_add_parts(s, parts, blocks, 2 * a->hidden, a->hidden, a->d_weight);
    mb_cuda_add_parts(s, parts + a->hidden, blocks, 2 * a->hidden, a->hidden, a->d_bias);
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
    }
}

void mb_cuda_layernorm_forward(struct mb_context *ctx, struct mb_stream *stream,
                               const struct mb_layernorm_forward *a)
{
    if (a->dtype == MB_DTYPE_BF16)
        forward<bf16>(ctx, stream, a);
    else
        forward<float>(ctx, stream, a);
    mb_cuda_launched(stream, "layernorm");
}

void mb_cuda_layernorm_backward(struct mb_context *ctx, struct mb_stream *stream,
                                const struct mb_layernorm_backward *a)
{
    if (a->dtype == MB_DTYPE_BF16)
        backward<bf16>(ctx, stream, a);
    else
        backward<float>(ctx, stream, a);
    mb_cuda_launched(stream, "layernorm gradient");
}
