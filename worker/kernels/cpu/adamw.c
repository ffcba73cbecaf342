/* AdamW over segments of flat buffers. The bias corrections are formed in double, once per call. */
#include <math.h>
#include "worker/kernels/split.h"
#include "worker/kernels/cpu/cpu.h"

/* Halves are joined in pieces of this many, updated and split again. */
enum { PIECE = 1024 };

struct update {
    float b1, b2, c1, c2, correct1, correct2, lr, eps, grad_scale, decay;
};

static void update_range(const struct update *u, size_t n, float *restrict weight,
                         const float *restrict grad, float *restrict exp_avg,
                         float *restrict exp_avg_sq)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        float g = u->grad_scale * grad[i];
        float m = u->b1 * exp_avg[i] + u->c1 * g;
        float v = u->b2 * exp_avg_sq[i] + u->c2 * g * g;
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        weight[i] -=
            u->lr * (m * u->correct1 / (sqrtf(v * u->correct2) + u->eps) + u->decay * weight[i]);
    }
}

static void update_halves(const struct update *u, size_t n, uint16_t *upper, uint16_t *lower,
                          const float *grad, float *exp_avg, float *exp_avg_sq)
{
    float weight[PIECE];
    for (size_t at = 0; at < n; at += PIECE) {
        const size_t k = n - at < PIECE ? n - at : PIECE;
        for (size_t i = 0; i < k; i++)
            weight[i] = mb_split_join(upper[at + i], lower[at + i]);
        update_range(u, k, weight, grad + at, exp_avg + at, exp_avg_sq + at);
        for (size_t i = 0; i < k; i++) {
            upper[at + i] = mb_split_upper(weight[i]);
            lower[at + i] = mb_split_lower(weight[i]);
        }
    }
}

void MB_CPU(adamw)(struct mb_context *ctx, struct mb_stream *stream, const struct mb_adamw *a)
{
    (void)ctx;
    (void)stream;
    struct update u = {.b1 = (float)a->beta1,
                       .b2 = (float)a->beta2,
                       .c1 = (float)(1 - a->beta1),
                       .c2 = (float)(1 - a->beta2),
                       .correct1 = (float)(1 / (1 - pow(a->beta1, (double)a->step))),
                       .correct2 = (float)(1 / (1 - pow(a->beta2, (double)a->step))),
                       .lr = (float)a->lr,
                       .eps = (float)a->eps,
                       .grad_scale = a->grad_scale};
    for (size_t s = 0; s < a->n_segments; s++) {
        const struct mb_segment *segment = &a->segments[s];
        const size_t begin = segment->begin, n = segment->end - begin;
        const float *grad = a->grad + begin;
        float *exp_avg = a->exp_avg + (begin - a->state_begin);
        float *exp_avg_sq = a->exp_avg_sq + (begin - a->state_begin);
        u.decay = segment->decay ? (float)a->weight_decay : 0.0f;
        if (a->weight != NULL)
            update_range(&u, n, a->weight + begin, grad, exp_avg, exp_avg_sq);
        else
            update_halves(&u, n, a->upper + begin, a->lower + begin, grad, exp_avg, exp_avg_sq);
    }
}
