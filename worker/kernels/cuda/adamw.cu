/*
 * AdamW, and SGD with momentum, over all segments in one launch, or several where there are more
 * segments than fit a kernel's parameters. A thread finds its segment by bisection, and has W
 * elements of it where all segments begin and end at multiples of W. The bias corrections are
 * formed in double, once per call.
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

/* One element of each rule; second is a state that SGD does not have. */
struct adamw_update {
    static constexpr bool HAS_SECOND = true;
    float b1, b2, c1, c2, correct1, correct2, lr, eps, grad_scale;

    __device__ __forceinline__ float operator()(float grad, float w, float decay, float &first,
                                                float &second) const
    {
        const float g = grad_scale * grad;
        const float m = b1 * first + c1 * g;
        const float v = b2 * second + c2 * g * g;
        first = m;
        second = v;
        return w - lr * (m * correct1 / (sqrtf(v * correct2) + eps) + decay * w);
    }
};

struct sgd_update {
    static constexpr bool HAS_SECOND = false;
    float lr, momentum, grad_scale;

    __device__ __forceinline__ float operator()(float grad, float w, float decay, float &first,
                                                float &) const
    {
        first = momentum * first + (grad_scale * grad + decay * w);
        return w - lr * first;
    }
};

/* What both calls have. */
struct call {
    struct weights weights;
    const float *grad;
    float *first, *second;
    size_t state_begin;
    const struct mb_segment *segments;
    size_t n_segments;
    double weight_decay;
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

template <class RULE, int W, bool HALVES>
__global__ void update_kernel(const struct weights weights, const float *grad, float *first,
                              float *second, size_t state_begin,
                              const __grid_constant__ struct segments s,
                              const __grid_constant__ RULE rule)
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
    packed ms = *(const packed *)(first + at), vs = {};
    if constexpr (RULE::HAS_SECOND)
        vs = *(const packed *)(second + at);
#pragma unroll
    for (int k = 0; k < W; k++)
        ws.v[k] = rule(gs.v[k], ws.v[k], s.decay[low], ms.v[k], vs.v[k]);
    *(packed *)(first + at) = ms;
    if constexpr (RULE::HAS_SECOND)
        *(packed *)(second + at) = vs;
    store_weights<W, HALVES>(weights, e, ws);
}

/* Whether all that segments begin with and end at is a multiple of n elements, and of 16 bytes. */
static bool are_even(const struct call &c, const struct segments &s, size_t n)
{
    bool even = c.state_begin % n == 0 && is_aligned(c.weights.whole) && is_aligned(c.grad) &&
                is_aligned(c.first) && is_aligned(c.second) && is_aligned(c.weights.upper) &&
                is_aligned(c.weights.lower);
    for (int k = 0; k < s.n; k++)
        even = even && s.begin[k] % n == 0 && s.first[k + 1] % n == 0;
    return even;
}

template <int W, bool HALVES, class RULE>
static void launch(struct mb_stream *stream, const struct call &c, const struct segments &s,
                   const RULE &rule)
{
    update_kernel<RULE, W, HALVES>
        <<<blocks_for(s.first[s.n], THREADS * W), THREADS, 0, stream->cuda>>>(
            c.weights, c.grad, c.first, c.second, c.state_begin, s, rule);
}

template <class RULE>
static void update(struct mb_stream *stream, const struct call &c, const RULE &rule,
                   const char *name)
{
    for (size_t from = 0; from < c.n_segments; from += MAX_SEGMENTS) {
        struct segments s = {};
        while (s.n < MAX_SEGMENTS && from + (size_t)s.n < c.n_segments) {
            const struct mb_segment *segment = &c.segments[from + (size_t)s.n];
            s.begin[s.n] = segment->begin;
            s.decay[s.n] = segment->decay ? (float)c.weight_decay : 0.0f;
            s.first[s.n + 1] = s.first[s.n] + (segment->end - segment->begin);
            s.n++;
        }
        if (s.first[s.n] == 0)
            continue;
        constexpr int W = vec<float>::N;
        const bool even = are_even(c, s, W);
        if (c.weights.whole != NULL && even)
            launch<W, false>(stream, c, s, rule);
        else if (c.weights.whole != NULL)
            launch<1, false>(stream, c, s, rule);
        else if (even)
            launch<W, true>(stream, c, s, rule);
        else
            launch<1, true>(stream, c, s, rule);
        mb_cuda_launched(stream, name);
    }
}

void mb_cuda_adamw(struct mb_context *ctx, struct mb_stream *stream, const struct mb_adamw *a)
{
    (void)ctx;
    const struct call c = {{a->weight, a->upper, a->lower},
                           a->grad,
                           a->exp_avg,
                           a->exp_avg_sq,
                           a->state_begin,
                           a->segments,
                           a->n_segments,
                           a->weight_decay};
    struct adamw_update u;
    u.b1 = (float)a->beta1;
    u.b2 = (float)a->beta2;
    u.c1 = (float)(1 - a->beta1);
    u.c2 = (float)(1 - a->beta2);
    u.correct1 = (float)(1 / (1 - pow(a->beta1, (double)a->step)));
    u.correct2 = (float)(1 / (1 - pow(a->beta2, (double)a->step)));
    u.lr = (float)a->lr;
    u.eps = (float)a->eps;
    u.grad_scale = a->grad_scale;
    update(stream, c, u, "adamw");
}

void mb_cuda_sgd(struct mb_context *ctx, struct mb_stream *stream, const struct mb_sgd *a)
{
    (void)ctx;
    const struct call c = {{a->weight, a->upper, a->lower},
                           a->grad,
                           a->momentum_buffer,
                           NULL,
                           a->state_begin,
                           a->segments,
                           a->n_segments,
                           a->weight_decay};
    struct sgd_update u;
    u.lr = (float)a->lr;
    u.momentum = (float)a->momentum;
    u.grad_scale = a->grad_scale;
    update(stream, c, u, "sgd");
}
