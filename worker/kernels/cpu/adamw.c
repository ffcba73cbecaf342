/* AdamW over segments of flat buffers. The bias corrections are formed in double, once per call. */
#include <math.h>
#include "worker/kernels/cpu/cpu.h"

void MB_CPU(adamw)(struct mb_context *ctx, struct mb_stream *stream, const struct mb_adamw *a)
{
    (void)ctx;
    (void)stream;
    const float b1 = (float)a->beta1, b2 = (float)a->beta2;
    const float c1 = (float)(1 - a->beta1), c2 = (float)(1 - a->beta2);
    const float correct1 = (float)(1 / (1 - pow(a->beta1, (double)a->step)));
    const float correct2 = (float)(1 / (1 - pow(a->beta2, (double)a->step)));
    const float lr = (float)a->lr, eps = (float)a->eps, grad_scale = a->grad_scale;
    for (size_t s = 0; s < a->n_segments; s++) {
        const struct mb_segment *segment = &a->segments[s];
        const float decay = segment->decay ? (float)a->weight_decay : 0.0f;
        const size_t n = segment->end - segment->begin;
        const float *grad = a->grad + segment->begin;
        float *weight = a->weight + segment->begin;
        float *exp_avg = a->exp_avg + (segment->begin - a->state_begin);
        float *exp_avg_sq = a->exp_avg_sq + (segment->begin - a->state_begin);
#pragma omp simd
        for (size_t i = 0; i < n; i++) {
            float g = grad_scale * grad[i];
            float m = b1 * exp_avg[i] + c1 * g;
            float v = b2 * exp_avg_sq[i] + c2 * g * g;
            exp_avg[i] = m;
            exp_avg_sq[i] = v;
            weight[i] -= lr * (m * correct1 / (sqrtf(v * correct2) + eps) + decay * weight[i]);
        }
    }
}
