/* GELU, forward and backward, in both forms; computed in fp32. */
#include "worker/kernels/cuda/device.cuh"

enum { THREADS = 256 };

#define ROOT_2_OVER_PI 0.79788456f
#define CUBIC          0.044715f
#define ROOT_HALF      0.70710678f /* sqrt(1/2) */
#define DENSITY        0.39894228f /* 1 / sqrt(2 pi) */

static __device__ __forceinline__ float gelu(float x, enum mb_gelu_form form)
{
    if (form == MB_GELU_ERF)
        return 0.5f * x * (1.0f + erff(x * ROOT_HALF));
    return 0.5f * x * (1.0f + tanhf(ROOT_2_OVER_PI * x * (1.0f + CUBIC * x * x)));
}

static __device__ __forceinline__ float gelu_slope(float x, enum mb_gelu_form form)
{
    if (form == MB_GELU_ERF)
        return 0.5f * (1.0f + erff(x * ROOT_HALF)) + x * DENSITY * expf(-0.5f * x * x);
    const float t = tanhf(ROOT_2_OVER_PI * x * (1.0f + CUBIC * x * x));
    const float slope = ROOT_2_OVER_PI * (1.0f + 3.0f * CUBIC * x * x);
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * slope;
}

/* d_out NULL: forward. */
template <class T>
__global__ void gelu_kernel(const T *x, const T *d_out, T *out, size_t n, enum mb_gelu_form form)
{
    const size_t first = (blockIdx.x * (size_t)THREADS + threadIdx.x) * vec<T>::N;
    if (first + vec<T>::N <= n) {
        const vec<T> in = load_vec(x + first);
        vec<T> d = {}, o;
        if (d_out != NULL)
            d = load_vec(d_out + first);
        for (int i = 0; i < vec<T>::N; i++) {
            const float v = to_float(in.v[i]);
            o.v[i] = from_float<T>(d_out == NULL ? gelu(v, form)
                                                 : to_float(d.v[i]) * gelu_slope(v, form));
        }
        store_vec(out + first, o);
        return;
    }
    for (size_t i = first; i < n; i++) {
        const float v = to_float(x[i]);
        out[i] =
            from_float<T>(d_out == NULL ? gelu(v, form) : to_float(d_out[i]) * gelu_slope(v, form));
    }
}

template <class T>
static void run(struct mb_stream *stream, const struct mb_gelu *a, const void *d_out)
{
    gelu_kernel<T><<<blocks_for(a->n, THREADS * vec<T>::N), THREADS, 0, stream->cuda>>>(
        (const T *)a->x, (const T *)d_out, (T *)a->out, a->n, a->form);
    mb_cuda_launched(stream, "gelu");
}

void mb_cuda_gelu_forward(struct mb_context *ctx, struct mb_stream *stream, const struct mb_gelu *a)
{
    (void)ctx;
    with_type(a->dtype, [&](auto t) { run<decltype(t)>(stream, a, NULL); });
}

void mb_cuda_gelu_backward(struct mb_context *ctx, struct mb_stream *stream,
                           const struct mb_gelu *a)
{
    (void)ctx;
    with_type(a->dtype, [&](auto t) { run<decltype(t)>(stream, a, a->d_out); });
}
