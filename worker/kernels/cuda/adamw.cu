/*
 * AdamW over all segments in one launch, or several where there are more segments than fit a
 * kernel's parameters. A thread finds its segment by bisection, and has W elements of it where all
 * segments begin and end at multiples of W. The bias corrections are formed in double, once per
 * call.
 */
#include <math.h>
#include "worker/kernels/cuda/device.cuh"

enum { THREADS = 256, MAX_SEGMENTS = 128 };

struct segments {
    size_t begin[MAX_SEGMENTS];     /* of weight and grad */
    size_t first[MAX_SEGMENTS + 1]; /* elements of the segments before */
    float decay[MAX_SEGMENTS];
    int n;
};

struct update {
    float b1, b2, c1, c2, correct1, correct2, lr, eps, grad_scale;
};

template <int W>
__global__ void adamw_kernel(float *weight, const float *grad, float *exp_avg, float *exp_avg_sq,
                             bf16 *copy, size_t state_begin,
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
    packed ws = *(const packed *)(weight + e);
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
    *(packed *)(weight + e) = ws;
    if (copy != NULL) {
        neighbours<bf16, W> rounded;
#pragma unroll
        for (int k = 0; k < W; k++)
            rounded.v[k] = from_float<bf16>(ws.v[k]);
        *(neighbours<bf16, W> *)(copy + e) = rounded;
    }
}

/* Whether all that segments begin with and end at is a multiple of n elements, and of 16 bytes. */
static bool are_even(const struct mb_adamw *a, const struct segments &s, size_t n)
{
    bool even = a->state_begin % n == 0 && is_aligned(a->weight) && is_aligned(a->grad) &&
                is_aligned(a->exp_avg) && is_aligned(a->exp_avg_sq) && is_aligned(a->copy);
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
        if (are_even(a, s, W))
            adamw_kernel<W><<<blocks_for(s.first[s.n], THREADS * W), THREADS, 0, stream->cuda>>>(
                a->weight, a->grad, a->exp_avg, a->exp_avg_sq, (bf16 *)a->copy, a->state_begin, s,
                u);
        else
            adamw_kernel<1><<<blocks_for(s.first[s.n], THREADS), THREADS, 0, stream->cuda>>>(
                a->weight, a->grad, a->exp_avg, a->exp_avg_sq, (bf16 *)a->copy, a->state_begin, s,
                u);
        mb_cuda_launched(stream, "adamw");
    }
}
