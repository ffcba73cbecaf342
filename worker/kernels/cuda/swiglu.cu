/*
 * SwiGLU, 16 bytes of gates and of values a thread where rows allow it, else one of each; a block
 * has columns of one row, so that threads divide nothing long. With s = 1 / (1 + exp(-g)), silu(g)
 * = g s and silu'(g) = s (1 + g (1 - s)); computed in fp32, for bf16 and fp16 with the device's
 * fast functions.
 */
#include <float.h>
#include "worker/kernels/cuda/amax.cuh"
#include "worker/kernels/cuda/store_away.cuh"

enum { THREADS = 256 };

static __device__ __forceinline__ float sigmoid(float g, float)
{
    return 1.0f / (1.0f + expf(-g));
}

template <class T> static __device__ __forceinline__ float sigmoid(float g, T)
{
    return __fdividef(1.0f, 1.0f + fminf(__expf(-g), FLT_MAX));
}

/* W gates g and values u: silu(g) u, or in first and second what d becomes of either. */
template <class T, int W, bool BACKWARD>
static __device__ __forceinline__ void
swiglu(const neighbours<T, W> &gate, const neighbours<T, W> &value, const neighbours<T, W> &d,
       neighbours<T, W> *first, neighbours<T, W> *second)
{
#pragma unroll
    for (int k = 0; k < W; k++) {
        const float g = to_float(gate.v[k]), u = to_float(value.v[k]), s = sigmoid(g, T());
        if constexpr (BACKWARD) {
            first->v[k] = from_float<T>(to_float(d.v[k]) * u * s * (1.0f + g * (1.0f - s)));
            second->v[k] = from_float<T>(to_float(d.v[k]) * g * s);
        } else {
            first->v[k] = from_float<T>(g * s * u);
        }
    }
}

/* Forward into out [n_rows, n], backward into out [n_rows, 2 n]. */
template <class T, int W, bool BACKWARD, bool AMAX>
__global__ void __launch_bounds__(THREADS)
    swiglu_kernel(const T *x, const T *d_out, T *out, float *amax, size_t n, unsigned row_blocks)
{
    typedef neighbours<T, W> packed;
    const size_t row = blockIdx.x / row_blocks;
    const size_t column = (blockIdx.x % row_blocks * (size_t)THREADS + threadIdx.x) * W;
    unsigned most = 0;
    if (column < n) {
        const packed gate = *(const packed *)(x + 2 * row * n + column);
        const packed value = *(const packed *)(x + (2 * row + 1) * n + column);
        packed first, second, d;
        if constexpr (BACKWARD)
            d = *(const packed *)(d_out + row * n + column);
        swiglu<T, W, BACKWARD>(gate, value, d, &first, &second);
        if constexpr (BACKWARD) {
            store_away(out + 2 * row * n + column, first);
            store_away(out + (2 * row + 1) * n + column, second);
        } else {
            store_away(out + row * n + column, first);
        }
        if constexpr (AMAX) {
            most = larger(most, first);
            if constexpr (BACKWARD)
                most = larger(most, second);
        }
    }
    if constexpr (AMAX)
        gain_amax(most, amax);
}

template <class T, int W, bool BACKWARD>
static void launch(struct mb_stream *stream, const T *x, const T *d_out, T *out, float *amax,
                   size_t n_rows, size_t n)
{
    const unsigned row_blocks = blocks_for(n / W, THREADS);
    const unsigned blocks = (unsigned)n_rows * row_blocks;
    if (amax != NULL)
        swiglu_kernel<T, W, BACKWARD, true>
            <<<blocks, THREADS, 0, stream->cuda>>>(x, d_out, out, amax, n, row_blocks);
    else
        swiglu_kernel<T, W, BACKWARD, false>
            <<<blocks, THREADS, 0, stream->cuda>>>(x, d_out, out, NULL, n, row_blocks);
}

template <class T, bool BACKWARD>
static void run(struct mb_stream *stream, const void *x, const void *d_out, void *out, float *amax,
                size_t n_rows, size_t n)
{
    constexpr int N = vec<T>::N;
    const bool vectors =
        n % N == 0 && is_aligned(x) && is_aligned(out) && (d_out == NULL || is_aligned(d_out));
    if (vectors)
        launch<T, N, BACKWARD>(stream, (const T *)x, (const T *)d_out, (T *)out, amax, n_rows, n);
    else
        launch<T, 1, BACKWARD>(stream, (const T *)x, (const T *)d_out, (T *)out, amax, n_rows, n);
    mb_cuda_launched(stream, d_out == NULL ? "swiglu" : "swiglu gradient");
}

void mb_cuda_swiglu_forward(struct mb_context *ctx, struct mb_stream *stream,
                            const struct mb_swiglu_forward *a)
{
    (void)ctx;
    with_type(a->dtype, [&](auto t) {
        run<decltype(t), false>(stream, a->x, NULL, a->out, a->amax, a->n_rows, a->n);
    });
}

void mb_cuda_swiglu_backward(struct mb_context *ctx, struct mb_stream *stream,
                             const struct mb_swiglu_backward *a)
{
    (void)ctx;
    with_type(a->dtype, [&](auto t) {
        run<decltype(t), true>(stream, a->x, a->d_out, a->d_x, a->amax, a->n_rows, a->n);
    });
}
