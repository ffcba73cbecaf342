/* Token and position embedding. Backward adds row by row in token order: deterministic. */
#include <string.h>
#include "worker/kernels/split.h"
#include "worker/kernels/cpu/cpu.h"

/* out = the row of halves that begins at `from`, or out += it */
static void take_halves(float *restrict out, const uint16_t *upper, const uint16_t *lower,
                        size_t from, size_t n, int adds)
{
    for (size_t i = 0; i < n; i++)
        out[i] = (adds ? out[i] : -0.0f) + mb_split_join(upper[from + i], lower[from + i]);
}

void MB_CPU(embedding_forward)(struct mb_context *ctx, struct mb_stream *stream,
                               const struct mb_embedding_forward *a)
{
    (void)ctx;
    if (mb_cpu_check_ids(stream, "token", a->token, a->n_tokens,
                         mb_all_vocab(a->all_vocab, a->vocab)) != 0)
        return;
    for (size_t t = 0; t < a->n_tokens; t++) {
        const size_t row = (size_t)a->token[t] - a->first; /* huge below first */
        float *restrict out = (float *)a->out + t * a->hidden;
        if (row >= a->vocab) {
            memset(out, 0, a->hidden * sizeof(float));
            continue;
        }
        const size_t from = t % a->seq * a->hidden;
        if (a->token_weight == NULL) {
            take_halves(out, a->token_upper, a->token_lower, row * a->hidden, a->hidden, 0);
            if (a->position_upper != NULL)
                take_halves(out, a->position_upper, a->position_lower, from, a->hidden, 1);
            continue;
        }
        const float *token = a->token_weight + row * a->hidden;
        if (a->position_weight == NULL) {
            memcpy(out, token, a->hidden * sizeof(float));
            continue;
        }
        const float *position = a->position_weight + from;
        for (size_t i = 0; i < a->hidden; i++)
            out[i] = token[i] + position[i];
    }
}

void MB_CPU(embedding_backward)(struct mb_context *ctx, struct mb_stream *stream,
                                const struct mb_embedding_backward *a)
{
    (void)ctx;
    if (mb_cpu_check_ids(stream, "token", a->token, a->n_tokens,
                         mb_all_vocab(a->all_vocab, a->vocab)) != 0)
        return;
    for (size_t t = 0; t < a->n_tokens; t++) {
        const float *restrict d_out = (const float *)a->d_out + t * a->hidden;
        const size_t row = (size_t)a->token[t] - a->first; /* huge below first */
        float *d_token = row < a->vocab ? a->d_token_weight + row * a->hidden : NULL;
        for (size_t i = 0; d_token != NULL && i < a->hidden; i++)
            d_token[i] += d_out[i];
        if (a->d_position_weight == NULL)
            continue;
        float *d_position = a->d_position_weight + t % a->seq * a->hidden;
        for (size_t i = 0; i < a->hidden; i++)
            d_position[i] += d_out[i];
    }
}
