/* What the kernels whose warps have one row each share: attention.cu and attention_part.cu. */
#ifndef MOBULA_WORKER_KERNELS_CUDA_ATTENTION_ROWS_CUH
#define MOBULA_WORKER_KERNELS_CUDA_ATTENTION_ROWS_CUH

#include <float.h>
#include "worker/kernels/cuda/attention.cuh"

enum { WARPS = 4, THREADS = WARPS * WARP, MAX_HEAD_DIM = 256, COLUMNS = MAX_HEAD_DIM / WARP };
enum { MAX_HEADS = 65535 }; /* of all samples: CUDA's limit of a grid's second dimension */

template <class T> static __device__ __forceinline__ float dot(const float *x, const T *y, int n)
{
    float sum = 0;
    for (int i = 0; i < n; i++)
        sum += x[i] * to_float(y[i]);
    return sum;
}

/* A row into the warp's shared memory. */
template <class T>
static __device__ __forceinline__ void keep_row(float *shared, const T *row, int n)
{
    for (int i = threadIdx.x % WARP; i < n; i += WARP)
        shared[i] = to_float(row[i]);
    __syncwarp();
}

/* sum[.] += the weights of 32 rows times these rows; lane owns columns lane, lane + 32, ... */
template <class T>
static __device__ __forceinline__ void add_rows(float sum[COLUMNS], float weight, const T *rows,
                                                size_t ld, int n_rows, int n)
{
    const int lane = threadIdx.x % WARP;
    for (int r = 0; r < n_rows; r++) {
        const float w = __shfl_sync(~0u, weight, r);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            if (c * WARP + lane < n)
                sum[c] += w * to_float(rows[r * ld + c * WARP + lane]);
    }
}

template <class T>
static __device__ __forceinline__ void store_row(T *row, const float sum[COLUMNS], float factor,
                                                 int n)
{
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
        if (c * WARP + lane < n)
            row[c * WARP + lane] = from_float<T>(factor * sum[c]);
}

/* d_out . out of a row, which the other kernels need. */
template <class T>
static __global__ void delta_kernel(const __grid_constant__ struct attention a, const T *out,
                                    const T *d_out, float *delta)
{
    const size_t i = blockIdx.x * (size_t)WARPS + threadIdx.x / WARP;
    const struct attention_head h = head_at(a, blockIdx.y / a.n_heads, blockIdx.y % a.n_heads);
    if (i >= a.seq)
        return;
    float sum = 0;
    for (size_t c = threadIdx.x % WARP; c < a.head_dim; c += WARP)
        sum += to_float(out[h.out + i * a.ld_out + c]) * to_float(d_out[h.out + i * a.ld_out + c]);
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0)
        delta[h.index * a.seq + i] = sum;
}

/* ---- launches ---- */

static inline bool is_too_large(struct mb_stream *s, const struct mb_attention_shape *shape)
{
    const size_t heads = shape->n_samples * shape->n_heads;
    if (shape->head_dim <= MAX_HEAD_DIM && heads <= MAX_HEADS)
        return false;
    if (s->err.code == 0 && heads > MAX_HEADS)
        mb_err_set(&s->err, MB_EUNSUPPORTED,
                   "a micro batch of %zu samples with %zu heads: the GPU's attention has at most "
                   "%d of both multiplied; a smaller --micro-batch-size does it",
                   shape->n_samples, shape->n_heads, MAX_HEADS);
    else if (s->err.code == 0)
        mb_err_set(&s->err, MB_EUNSUPPORTED,
                   "a head of %zu channels: the GPU's attention has at most %d", shape->head_dim,
                   MAX_HEAD_DIM);
    return true;
}

static inline dim3 grid_of(const struct mb_attention_shape *s, size_t n_heads)
{
    return dim3(blocks_for(s->seq, WARPS), (unsigned)(s->n_samples * n_heads));
}

#endif
