/*
 * Causal self-attention, one head of one sample at a time, in blocks of query rows.
 *
 * Forward, for the rows [i0, i1): scores S = q k[0:i1]^T (columns beyond the block's last row are
 * masked and never computed), softmax row by row over the columns [0, i], dropout, out = P v. The
 * log of each row's denominator is kept. Backward computes P again from q, k and that log, so that
 * memory stays linear in seq. With P' = P * keep: d_v += P'^T d_out;  dP = (d_out v^T) * keep;  dS
 * = P (dP - sum_j P dP) / sqrt(hn);  d_q = dS k;  d_k += dS^T q where sum_j P dP = d_out . out.
 * Heads of one query group add to the same d_k and d_v, in order.
 */
#include <math.h>
#include <string.h>
#include "worker/kernels/cpu/attention.h"
#include "worker/kernels/cpu/cpu.h"

enum { BLOCK = MB_ATTENTION_BLOCK };

/* Where one head of one sample lies. */
struct head {
    size_t index;   /* sample * n_heads + head */
    size_t q, k, v; /* elements from the start of qkv to row 0 of the sample */
    size_t out;     /* elements from the start of out to row 0 of the sample */
    size_t ld_qkv, ld_out;
};

static struct head head_at(const struct mb_attention_shape *s, size_t sample, size_t h)
{
    size_t per_group = s->n_heads / s->n_groups, group = h / per_group;
    struct head a;
    a.index = sample * s->n_heads + h;
    a.ld_qkv = (s->n_heads + 2 * s->n_groups) * s->head_dim;
    a.ld_out = s->n_heads * s->head_dim;
    size_t row = sample * s->seq * a.ld_qkv + group * (per_group + 2) * s->head_dim;
    a.q = row + h % per_group * s->head_dim;
    a.k = row + per_group * s->head_dim;
    a.v = a.k + s->head_dim;
    a.out = sample * s->seq * a.ld_out + h * s->head_dim;
    return a;
}

size_t MB_CPU(attention_scratch)(const struct mb_attention_shape *s)
{
    return (2 * BLOCK + 1) * s->seq; /* P and dP of a block, dropout factors of a row */
}

/* Multiply the first n entries of row i by the dropout factors. */
static void apply_dropout(const struct mb_dropout *d, size_t head_index, size_t seq, size_t i,
                          float *row, size_t n, float *factor)
{
    if (d->probability <= 0)
        return;
    MB_CPU(dropout_factors)(d, d->first_element + (head_index * seq + i) * seq, n, factor);
#pragma omp simd
    for (size_t j = 0; j < n; j++)
        row[j] *= factor[j];
}

void MB_CPU(attention_forward)(struct mb_context *ctx, struct mb_stream *stream,
                               const struct mb_attention_forward *a)
{
    (void)stream;
    const struct mb_attention_shape *s = &a->shape;
    const size_t seq = s->seq, hn = s->head_dim;
    const float scale = 1.0f / sqrtf((float)hn);
    const float *qkv = a->qkv;
    float *out = a->out, *p = a->scratch, *factor = a->scratch + 2 * BLOCK * seq;
    for (size_t n = 0; n < s->n_samples * s->n_heads; n++) {
        const struct head h = head_at(s, n / s->n_heads, n % s->n_heads);
        for (size_t i0 = 0; i0 < seq; i0 += BLOCK) {
            size_t i1 = i0 + BLOCK < seq ? i0 + BLOCK : seq, rows = i1 - i0;
            mb_sgemm(&ctx->blas, MB_N, MB_T, rows, i1, hn, 1, qkv + h.q + i0 * h.ld_qkv, h.ld_qkv,
                     qkv + h.k, h.ld_qkv, 0, p, i1);
            for (size_t i = i0; i < i1; i++) {
                float *row = p + (i - i0) * i1;
                a->log_sum[h.index * seq + i] = mb_softmax_row(row, i + 1, scale);
                memset(row + i + 1, 0, (i1 - i - 1) * sizeof(float));
                apply_dropout(&a->dropout, h.index, seq, i, row, i + 1, factor);
            }
            mb_sgemm(&ctx->blas, MB_N, MB_N, rows, hn, i1, 1, p, i1, qkv + h.v, h.ld_qkv, 0,
                     out + h.out + i0 * h.ld_out, h.ld_out);
        }
    }
}

/* The two score matrices of rows [i0, i1): p from scores to P', dp from d_out v^T to dS. */
static void backward_rows(const struct mb_attention_backward *a, const struct head *h, size_t i0,
                          size_t i1, float *p, float *dp, float *factor)
{
    const size_t seq = a->shape.seq, hn = a->shape.head_dim;
    const float scale = 1.0f / sqrtf((float)hn);
    const float *out = a->out, *d_out = a->d_out;
    for (size_t i = i0; i < i1; i++) {
        float *p_row = p + (i - i0) * i1, *dp_row = dp + (i - i0) * i1;
        size_t out_row = h->out + i * h->ld_out;
        float sum = mb_dot(d_out + out_row, out + out_row, hn);
        float log_sum = a->log_sum[h->index * seq + i];
        apply_dropout(&a->dropout, h->index, seq, i, dp_row, i + 1, factor);
#pragma omp simd
        for (size_t j = 0; j <= i; j++) {
            float e = mb_expf(scale * p_row[j] - log_sum);
            p_row[j] = e;
            dp_row[j] = e * (dp_row[j] - sum) * scale;
        }
        memset(p_row + i + 1, 0, (i1 - i - 1) * sizeof(float));
        memset(dp_row + i + 1, 0, (i1 - i - 1) * sizeof(float));
        if (a->dropout.probability > 0) {
#pragma omp simd
            for (size_t j = 0; j <= i; j++)
                p_row[j] *= factor[j];
        }
    }
}

/* d_k and d_v are sums over query rows and heads: they start at zero. */
static void zero_keys_and_values(const struct mb_attention_backward *a)
{
    const struct mb_attention_shape *s = &a->shape;
    float *d_qkv = a->d_qkv;
    for (size_t sample = 0; sample < s->n_samples; sample++)
        for (size_t g = 0; g < s->n_groups; g++) {
            const struct head h = head_at(s, sample, g * (s->n_heads / s->n_groups));
            for (size_t i = 0; i < s->seq; i++) /* v lies behind k */
                memset(d_qkv + h.k + i * h.ld_qkv, 0, 2 * s->head_dim * sizeof(float));
        }
}

void MB_CPU(attention_backward)(struct mb_context *ctx, struct mb_stream *stream,
                                const struct mb_attention_backward *a)
{
    (void)stream;
    const struct mb_attention_shape *s = &a->shape;
    const size_t seq = s->seq, hn = s->head_dim;
    const float *qkv = a->qkv, *all_d_out = a->d_out;
    float *d_qkv = a->d_qkv;
    float *p = a->scratch, *dp = p + BLOCK * seq, *factor = dp + BLOCK * seq;
    zero_keys_and_values(a);
    for (size_t n = 0; n < s->n_samples * s->n_heads; n++) {
        const struct head h = head_at(s, n / s->n_heads, n % s->n_heads);
        const float *k = qkv + h.k, *v = qkv + h.v;
        float *d_k = d_qkv + h.k, *d_v = d_qkv + h.v;
        for (size_t i0 = 0; i0 < seq; i0 += BLOCK) {
            size_t i1 = i0 + BLOCK < seq ? i0 + BLOCK : seq, rows = i1 - i0;
            const float *q = qkv + h.q + i0 * h.ld_qkv;
            const float *d_out = all_d_out + h.out + i0 * h.ld_out;
            mb_sgemm(&ctx->blas, MB_N, MB_T, rows, i1, hn, 1, q, h.ld_qkv, k, h.ld_qkv, 0, p, i1);
            mb_sgemm(&ctx->blas, MB_N, MB_T, rows, i1, hn, 1, d_out, h.ld_out, v, h.ld_qkv, 0, dp,
                     i1);
            backward_rows(a, &h, i0, i1, p, dp, factor);
            mb_sgemm(&ctx->blas, MB_T, MB_N, i1, hn, rows, 1, p, i1, d_out, h.ld_out, 1, d_v,
                     h.ld_qkv);
            mb_sgemm(&ctx->blas, MB_T, MB_N, i1, hn, rows, 1, dp, i1, q, h.ld_qkv, 1, d_k,
                     h.ld_qkv);
            mb_sgemm(&ctx->blas, MB_N, MB_N, rows, hn, i1, 1, dp, i1, k, h.ld_qkv, 0,
                     d_qkv + h.q + i0 * h.ld_qkv, h.ld_qkv);
        }
    }
}
