/* SGD with momentum over segments of flat buffers. */
#include "worker/kernels/split.h"
#include "worker/kernels/cpu/cpu.h"

/* Halves are joined in pieces of this many, updated and split again. */
enum { PIECE = 1024 };

struct update {
    float lr, momentum, grad_scale, decay;
};

static void update_range(const struct update *u, size_t n, float *restrict weight,
                         const float *restrict grad, float *restrict momentum_buffer)
{
#pragma omp simd
    for (size_t i = 0; i < n; i++) {
        const float g = u->grad_scale * grad[i] + u->decay * weight[i];
        const float b = u->momentum * momentum_buffer[i] + g;
        momentum_buffer[i] = b;
        weight[i] -= u->lr * b;
    }
}

static void update_halves(const struct update *u, size_t n, uint16_t *upper, uint16_t *lower,
                          const float *grad, float *momentum_buffer)
{
    float weight[PIECE];
    for (size_t at = 0; at < n; at += PIECE) {
        const size_t k = n - at < PIECE ? n - at : PIECE;
        for (size_t i = 0; i < k; i++)
            weight[i] = mb_split_join(upper[at + i], lower[at + i]);
        update_range(u, k, weight, grad + at, momentum_buffer + at);
        for (size_t i = 0; i < k; i++) {
            upper[at + i] = mb_split_upper(weight[i]);
            lower[at + i] = mb_split_lower(weight[i]);
        }
    }
}

void MB_CPU(sgd)(struct mb_context *ctx, struct mb_stream *stream, const struct mb_sgd *a)
{
    (void)ctx;
    (void)stream;
    struct update u = {
        .lr = (float)a->lr, .momentum = (float)a->momentum, .grad_scale = a->grad_scale};
    for (size_t s = 0; s < a->n_segments; s++) {
        const struct mb_segment *segment = &a->segments[s];
        const size_t begin = segment->begin, n = segment->end - begin;
        float *momentum_buffer = a->momentum_buffer + (begin - a->state_begin);
        u.decay = segment->decay ? (float)a->weight_decay : 0.0f;
        if (a->weight != NULL)
            update_range(&u, n, a->weight + begin, a->grad + begin, momentum_buffer);
        else
            update_halves(&u, n, a->upper + begin, a->lower + begin, a->grad + begin,
                          momentum_buffer);
    }
}
