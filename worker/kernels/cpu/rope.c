/*
 * Rotary positions. A row of qkv is, per query group, its query heads and then one key: those are
 * turned one after the other, the value behind them is passed over.
 */
#include "worker/kernels/cpu/cpu.h"

/* The first 2 n channels of a head; sign is that of the angle. */
static void turn(float *head, const float *cosine, const float *sine, float sign, size_t n)
{
    float *first = head, *second = head + n;
#pragma omp simd
    for (size_t c = 0; c < n; c++) {
        float a = first[c], b = second[c], s = sign * sine[c];
        first[c] = a * cosine[c] - b * s;
        second[c] = b * cosine[c] + a * s;
    }
}

void MB_CPU(rope)(struct mb_context *ctx, struct mb_stream *stream, const struct mb_rope *a)
{
    (void)ctx;
    (void)stream;
    const struct mb_attention_shape *s = &a->shape;
    const size_t turned = s->n_heads / s->n_groups + 1, half = a->rotary_dim / 2;
    const float sign = a->inverse ? -1.0f : 1.0f;
    float *head = a->qkv;
    for (size_t row = 0; row < s->n_samples * s->seq; row++) {
        const size_t at = row % s->seq * half;
        for (size_t g = 0; g < s->n_groups; g++) {
            for (size_t h = 0; h < turned; h++, head += s->head_dim)
                turn(head, a->cosine + at, a->sine + at, sign, half);
            head += s->head_dim;
        }
    }
}
