/*
 * AdamW over all segments in one launch, or several where there are more segments than fit a
 * kernel's parameters. A thread finds its segment by bisection, and has W elements of it where all
 * segments begin and end at multiples of W. The bias corrections are formed in double, once per
 * call.
 */
#include <math.h>
#include "worker/kernels/cuda/device.cuh"
#include "worker/kernels/split.h"

enum { THREADS = 256, MAX_SEGMENTS = 128 };

struct segments {
    size_t begin[MAX_SEGMENTS];     /* of weight and grad */
    size_t first[MAX_SEGMENTS + 1]; /* elements of the segments before */
    float decay[MAX_SEGMENTS];
    int n;
};

/* The weights: as they are, or in halves. */
struct weights {
    float *whole;
    uint16_t *upper, *lower;
};

struct update {
    float b1, b2, c1, c2, correct1, correct2, lr, eps, grad_scale;
};

template <int W, bool HALVES>
static __device__ __forceinline__ neighbours<float, W> load_weights(const struct weights &w,
                                                                    size_t e)
{
    if constexpr (HALVES) {
        const auto upper = *(const neighbours<uint16_t, W> *)(w.upper + e);
        const auto lower = *(const neighbours<uint16_t, W> *)(w.lower + e);
        neighbours<float, W> x;
#pragma unroll
        for (int k = 0; k < W; k++)
            x.v[k] = mb_split_join(upper.v[k], lower.v[k]);
        return x;
    } else {
        return *(const neighbours<float, W> *)(w.whole + e);
    }
}

template <int W, bool HALVES>
static __device__ __forceinline__ void store_weights(const struct weights &w, size_t e,
                                                     const neighbours<float, W> &x)
{
    if constexpr (HALVES) {
        neighbours<uint16_t, W> upper, lower;
#pragma unroll
        for (int k = 0; k < W; k++) {
            upper.v[k] = mb_split_upper(x.v[k]);
            lower.v[k] = mb_split_lower(x.v[k]);
        }
        *(neighbours<uint16_t, W> *)(w.upper + e) = upper;
        *(neighbours<uint16_t, W> *)(w.lower + e) = lower;
    } else {
        *(neighbours<float, W> *)(w.whole + e) = x;
    }
}

template <int W, bool HALVES>
__global__ void adamw_kernel(const struct weights weights, const float *grad, float *exp_avg,
                             float *exp_avg_sq, size_t state_begin,
                             const __grid_constant__ struct segments s,
                             const __grid_constant__ struct update u)
{
    typedef neighbours<float, W> packed;
    const size_t i = (blockIdx.x * (size_t)THREADS + threadIdx.x) * W;
    if (i >= s.first[s.n])
        return;
    int low = 0, high = s.n; /* first[low] <= i < first[high] */
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (s.first[middle] <= i)
            low = middle;
        else
            high = middle;
    }
    const size_t e = s.begin[low] + (i - s.first[low]), at = e - state_begin;
    const packed gs = *(const packed *)(grad + e);
    packed ws = load_weights<W, HALVES>(weights, e);
    packed ms = *(const packed *)(exp_avg + at), vs = *(const packed *)(exp_avg_sq + at);
#pragma unroll
    for (int k = 0; k < W; k++) {
        const float g = u.grad_scale * gs.v[k], w = ws.v[k];
        const float m = u.b1 * ms.v[k] + u.c1 * g;
        const float v = u.b2 * vs.v[k] + u.c2 * g * g;
        ms.v[k] = m;
        vs.v[k] = v;
        ws.v[k] = w - u.lr * (m * u.correct1 / (sqrtf(v * u.correct2) + u.eps) + s.decay[low] * w);
    }
    *(packed *)(exp_avg + at) = ms;
    *(packed *)(exp_avg_sq + at) = vs;
    store_weights<W, HALVES>(weights, e, ws);
}

/* Whether all that segments begin with and end at is a multiple of n elements, and of 16 bytes. */
static bool are_even(const struct mb_adamw *a, const struct segments &s, size_t n)
{
    bool even = a->state_begin % n == 0 && is_aligned(a->weight) && is_aligned(a->grad) &&
                is_aligned(a->exp_avg) && is_aligned(a->exp_avg_sq) && is_aligned(a->upper) &&
                is_aligned(a->lower);
    for (int k = 0; k < s.n; k++)
        even = even && s.begin[k] % n == 0 && s.first[k + 1] % n == 0;
    return even;
}

static struct update update_of(const struct mb_adamw *a)
{
    struct update u;
    u.b1 = (float)a->beta1;
    u.b2 = (float)a->beta2;
    u.c1 = (float)(1 - a->beta1);
    u.c2 = (float)(1 - a->beta2);
    u.correct1 = (float)(1 / (1 - pow(a->beta1, (double)a->step)));
    u.correct2 = (float)(1 / (1 - pow(a->beta2, (double)a->step)));
    u.lr = (float)a->lr;
    u.eps = (float)a->eps;
    u.grad_scale = a->grad_scale;
    return u;
}

template <int W, bool HALVES>
static void launch(struct mb_stream *stream, const struct mb_adamw *a, const struct segments &s,
                   const struct update &u)
{
    const struct weights w = {a->weight, a->upper, a->lower};
    adamw_kernel<W, HALVES><<<blocks_for(s.first[s.n], THREADS * W), THREADS, 0, stream->cuda>>>(
        w, a->grad, a->exp_avg, a->exp_avg_sq, a->state_begin, s, u);
}

void mb_cuda_adamw(struct mb_context *ctx, struct mb_stream *stream, const struct mb_adamw *a)
{
    (void)ctx;
    const struct update u = update_of(a);
    for (size_t from = 0; from < a->n_segments; from += MAX_SEGMENTS) {
        struct segments s = {};
        while (s.n < MAX_SEGMENTS && from + (size_t)s.n < a->n_segments) {
            const struct mb_segment *segment = &a->segments[from + (size_t)s.n];
            s.begin[s.n] = segment->begin;
            s.decay[s.n] = segment->decay ? (float)a->weight_decay : 0.0f;
            s.first[s.n + 1] = s.first[s.n] + (segment->end - segment->begin);
            s.n++;
        }
        if (s.first[s.n] == 0)
            continue;
        constexpr int W = vec<float>::N;
        const bool even = are_even(a, s, W);
        if (a->weight != NULL && even)
            launch<W, false>(stream, a, s, u);
        else if (a->weight != NULL)
            launch<1, false>(stream, a, s, u);
        else if (even)
            launch<W, true>(stream, a, s, u);
        else
            launch<1, true>(stream, a, s, u);
        mb_cuda_launched(stream, "adamw");
    }
}
