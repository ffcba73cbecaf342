/* Token and position embedding. Backward adds row by row in token order: deterministic. */
#include <string.h>
#include "worker/kernels/cpu/cpu.h"

void MB_CPU(embedding_forward)(struct mb_context *ctx, struct mb_stream *stream,
                               const struct mb_embedding_forward *a)
{
    (void)ctx;
    if (mb_cpu_check_ids(stream, "token", a->token, a->n_tokens, a->vocab) != 0)
        return;
    for (size_t t = 0; t < a->n_tokens; t++) {
        const float *token = a->token_weight + (size_t)a->token[t] * a->hidden;
        float *restrict out = (float *)a->out + t * a->hidden;
        if (a->position_weight == NULL) {
            memcpy(out, token, a->hidden * sizeof(float));
            continue;
        }
        const float *position = a->position_weight + t % a->seq * a->hidden;
        for (size_t i = 0; i < a->hidden; i++)
            out[i] = token[i] + position[i];
    }
}

void MB_CPU(embedding_backward)(struct mb_context *ctx, struct mb_stream *stream,
                                const struct mb_embedding_backward *a)
{
    (void)ctx;
    if (mb_cpu_check_ids(stream, "token", a->token, a->n_tokens, a->vocab) != 0)
        return;
    for (size_t t = 0; t < a->n_tokens; t++) {
        const float *restrict d_out = (const float *)a->d_out + t * a->hidden;
        float *d_token = a->d_token_weight + (size_t)a->token[t] * a->hidden;
        for (size_t i = 0; i < a->hidden; i++)
            d_token[i] += d_out[i];
        if (a->d_position_weight == NULL)
            continue;
        float *d_position = a->d_position_weight + t % a->seq * a->hidden;
        for (size_t i = 0; i < a->hidden; i++)
            d_position[i] += d_out[i];
    }
}
