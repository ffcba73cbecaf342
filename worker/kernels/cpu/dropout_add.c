/*
 * Dropout, and the residual sum behind it. Element e takes word e % 4 of Philox block e / 4 with
 * the counter (block, iteration, site): kept if the word is not below probability * 2^32.
 */
#include <string.h>
#include "worker/kernels/cpu/cpu.h"
#include "worker/kernels/philox.h"

enum { PIECE = 256 }; /* factors at a time; a multiple of 4 */

void MB_CPU(dropout_factors)(const struct mb_dropout *d, uint64_t first, size_t n, float *factor)
{
    const struct mb_dropout now = mb_dropout_now(d);
    uint32_t limit = (uint32_t)((double)d->probability * 4294967296.0);
    float keep = 1.0f / (1.0f - d->probability);
    first += now.first_element - d->first_element;
    uint64_t block = first / 4;
    size_t skip = first % 4;
    while (n > 0) {
        uint32_t word[PIECE];
        size_t n_blocks = (skip + n + 3) / 4 < PIECE / 4 ? (skip + n + 3) / 4 : PIECE / 4;
        for (size_t b = 0; b < n_blocks; b++) {
            struct mb_philox r = mb_philox(d->seed, block + b, now.iteration, d->site);
            memcpy(word + 4 * b, r.word, sizeof(r.word));
        }
        size_t n_now = 4 * n_blocks - skip < n ? 4 * n_blocks - skip : n;
        for (size_t i = 0; i < n_now; i++)
            factor[i] = word[skip + i] >= limit ? keep : 0.0f;
        factor += n_now;
        n -= n_now;
        block += n_blocks;
        skip = 0;
    }
}

void MB_CPU(dropout_add)(struct mb_context *ctx, struct mb_stream *stream,
                         const struct mb_dropout_add *a)
{
    (void)ctx;
    (void)stream;
    float factor[PIECE];
    for (size_t i = 0; i < PIECE; i++)
        factor[i] = 1;
    for (size_t begin = 0; begin < a->n; begin += PIECE) {
        size_t n = a->n - begin < PIECE ? a->n - begin : PIECE;
        const float *x = (const float *)a->x + begin;
        float *out = (float *)a->out + begin;
        if (a->dropout.probability > 0)
            MB_CPU(dropout_factors)(&a->dropout, a->dropout.first_element + begin, n, factor);
        if (a->residual == NULL) {
#pragma omp simd
            for (size_t i = 0; i < n; i++)
                out[i] = x[i] * factor[i];
        } else {
            const float *residual = (const float *)a->residual + begin;
#pragma omp simd
            for (size_t i = 0; i < n; i++)
                out[i] = residual[i] + x[i] * factor[i];
        }
    }
}
