/*
 * Causal self-attention between the queries of this rank and the keys and values of one rank.
 *
 * The rows of a rank are in the order of their positions, so what a query sees of the keys is
 * always a number of first ones: of its own rank's as many as in attention.c, of another's none,
 * the first half, or all. Forward: scores, softmax over what is seen, P v; with e the log of the
 * row's denominator here and e' that of the calls before, both outcomes are weighted with
 * exp(e - E) and exp(e' - E), E = log(exp e + exp e'), which is kept. Backward is attention.c's,
 * with the log over all keys; a row's keys elsewhere only matter through it and through d_out .
 * out.
 */
#include <assert.h>
#include <string.h>
#include "worker/kernels/cpu/attention.h"
#include "worker/kernels/cpu/cpu.h"

enum { BLOCK = MB_ATTENTION_BLOCK };

/* Where one head of one sample lies: elements from the start of each matrix to its row 0. */
struct head {
    size_t sample, index; /* index: of the head among those here */
    size_t q, kv, out, log_sum;
    size_t ld_qkv, ld_kv, ld_out;
};

static struct head head_at(const struct mb_attention_shape *s, size_t n)
{
    const size_t per_group = s->n_heads / s->n_groups;
    struct head a = {.sample = n / s->n_heads, .index = n % s->n_heads};
    const size_t group = a.index / per_group, row = a.sample * s->seq;
    a.ld_qkv = (s->n_heads + 2 * s->n_groups) * s->head_dim;
    a.ld_kv = 2 * s->n_groups * s->head_dim;
    a.ld_out = s->n_heads * s->head_dim;
    a.q = row * a.ld_qkv + (group * (per_group + 2) + a.index % per_group) * s->head_dim;
    a.kv = row * a.ld_kv + group * 2 * s->head_dim;
    a.out = row * a.ld_out + a.index * s->head_dim;
    a.log_sum = n * s->seq;
    return a;
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t position_of(const struct mb_attention_part *a, size_t query)
{
    const size_t half = a->shape.seq / 2;
    return query < half ? a->queries.first + query : a->queries.second + query - half;
}

/* The number of keys that a query sees. */
static size_t n_seen(const struct mb_attention_part *a, size_t query)
{
    const size_t half = a->shape.seq / 2, at = position_of(a, query);
    if (at < a->keys.first)
        return 0;
    const size_t n = smaller(half, at - a->keys.first + 1);
    return at < a->keys.second ? n : half + smaller(half, at - a->keys.second + 1);
}

/* The first query of [i0, i1) that sees a key; i1: none. */
static size_t first_that_sees(const struct mb_attention_part *a, size_t i0, size_t i1)
{
    while (i0 < i1 && n_seen(a, i0) == 0)
        i0++;
    return i0;
}

/* Of the first n keys, for one query. */
static void factors_of(const struct mb_attention_part *a, const struct head *h, size_t query,
                       size_t n, float *factor)
{
    const size_t half = a->shape.seq / 2, n1 = smaller(n, half);
    const uint64_t row =
        a->dropout.first_element +
        ((h->sample * a->all_heads + h->index) * a->all_seq + position_of(a, query)) * a->all_seq;
    MB_CPU(dropout_factors)(&a->dropout, row + a->keys.first, n1, factor);
    if (n > n1)
        MB_CPU(dropout_factors)(&a->dropout, row + a->keys.second, n - n1, factor + n1);
}

static void multiply(float *row, const float *factor, size_t n)
{
#pragma omp simd
    for (size_t j = 0; j < n; j++)
        row[j] *= factor[j];
}

static void scale(float *row, size_t n, float a)
{
#pragma omp simd
    for (size_t j = 0; j < n; j++)
        row[j] *= a;
}

/* ---- forward ---- */

/* Row i: scores become weights of the values, out what the calls before leave of it. */
static void forward_row(const struct mb_attention_part_forward *f, const struct head *h, size_t i,
                        float *row, size_t n_columns, float *factor)
{
    const struct mb_attention_part *a = &f->part;
    const size_t n = n_seen(a, i), hn = a->shape.head_dim;
    const float log_sum = mb_softmax_row(row, n, 1.0f / sqrtf((float)hn));
    float *kept = &f->log_sum[h->log_sum + i];
    memset(row + n, 0, (n_columns - n) * sizeof(float));
    if (a->dropout.probability > 0) {
        factors_of(a, h, i, n, factor);
        multiply(row, factor, n);
    }
    if (!f->joins) {
        *kept = log_sum;
        return;
    }
    const float most = *kept > log_sum ? *kept : log_sum;
    const float all = most + logf(expf(*kept - most) + expf(log_sum - most));
    scale(row, n, expf(log_sum - all));
    scale((float *)f->out + h->out + i * h->ld_out, hn, expf(*kept - all));
    *kept = all;
}

void MB_CPU(attention_part_forward)(struct mb_context *ctx, struct mb_stream *stream,
                                    const struct mb_attention_part_forward *f)
{
    (void)stream;
    const struct mb_attention_part *a = &f->part;
    const struct mb_attention_shape *s = &a->shape;
    const size_t seq = s->seq, hn = s->head_dim;
    const float *qkv = a->qkv, *kv = a->kv;
    float *out = f->out, *p = a->scratch, *factor = p + 2 * BLOCK * seq;
    assert(seq % 2 == 0);
    for (size_t n = 0; n < s->n_samples * s->n_heads; n++) {
        const struct head h = head_at(s, n);
        for (size_t begin = 0; begin < seq; begin += BLOCK) {
            const size_t i1 = smaller(begin + BLOCK, seq);
            const size_t i0 = first_that_sees(a, begin, i1);
            assert(f->joins || i0 == begin);
            if (i0 == i1)
                continue;
            const size_t rows = i1 - i0, columns = n_seen(a, i1 - 1);
            mb_sgemm(&ctx->blas, MB_N, MB_T, rows, columns, hn, 1, qkv + h.q + i0 * h.ld_qkv,
                     h.ld_qkv, kv + h.kv, h.ld_kv, 0, p, columns);
            for (size_t i = i0; i < i1; i++)
                forward_row(f, &h, i, p + (i - i0) * columns, columns, factor);
            mb_sgemm(&ctx->blas, MB_N, MB_N, rows, hn, columns, 1, p, columns, kv + h.kv + hn,
                     h.ld_kv, f->joins ? 1 : 0, out + h.out + i0 * h.ld_out, h.ld_out);
        }
    }
}

/* ---- backward ---- */

/* Row i of the two matrices: p from scores to P', dp from d_out v^T to dS. */
static void backward_row(const struct mb_attention_part_backward *b, const struct head *h, size_t i,
                         float *p, float *dp, size_t n_columns, float *factor)
{
    const struct mb_attention_part *a = &b->part;
    const size_t n = n_seen(a, i), hn = a->shape.head_dim, at = h->out + i * h->ld_out;
    const float by = 1.0f / sqrtf((float)hn), log_sum = b->log_sum[h->log_sum + i];
    const float sum = mb_dot((const float *)b->d_out + at, (const float *)b->out + at, hn);
    const int drops = a->dropout.probability > 0;
    if (drops) {
        factors_of(a, h, i, n, factor);
        multiply(dp, factor, n);
    }
#pragma omp simd
    for (size_t j = 0; j < n; j++) {
        float e = mb_expf(by * p[j] - log_sum);
        p[j] = e;
        dp[j] = e * (dp[j] - sum) * by;
    }
    memset(p + n, 0, (n_columns - n) * sizeof(float));
    memset(dp + n, 0, (n_columns - n) * sizeof(float));
    if (drops)
        multiply(p, factor, n);
}

/* Of queries that see nothing here, which have a gradient of their own all the same. */
static void zero_d_queries(const struct mb_attention_part_backward *b, const struct head *h,
                           size_t i0, size_t i1)
{
    for (size_t i = i0; i < i1 && !b->joins; i++)
        memset((float *)b->d_qkv + h->q + i * h->ld_qkv, 0, b->part.shape.head_dim * sizeof(float));
}

void MB_CPU(attention_part_backward)(struct mb_context *ctx, struct mb_stream *stream,
                                     const struct mb_attention_part_backward *b)
{
    (void)stream;
    const struct mb_attention_part *a = &b->part;
    const struct mb_attention_shape *s = &a->shape;
    const size_t seq = s->seq, hn = s->head_dim;
    const float *qkv = a->qkv, *kv = a->kv, *all_d_out = b->d_out;
    float *d_qkv = b->d_qkv;
    float *p = a->scratch, *dp = p + BLOCK * seq, *factor = dp + BLOCK * seq;
    memset(b->d_kv, 0, s->n_samples * seq * 2 * s->n_groups * hn * sizeof(float));
    for (size_t n = 0; n < s->n_samples * s->n_heads; n++) {
        const struct head h = head_at(s, n);
        const float *k = kv + h.kv, *v = k + hn;
        float *d_k = b->d_kv + h.kv, *d_v = d_k + hn;
        for (size_t begin = 0; begin < seq; begin += BLOCK) {
            const size_t i1 = smaller(begin + BLOCK, seq);
            const size_t i0 = first_that_sees(a, begin, i1);
            zero_d_queries(b, &h, begin, i0);
            if (i0 == i1)
                continue;
            const size_t rows = i1 - i0, columns = n_seen(a, i1 - 1);
            const float *q = qkv + h.q + i0 * h.ld_qkv, *d_out = all_d_out + h.out + i0 * h.ld_out;
            mb_sgemm(&ctx->blas, MB_N, MB_T, rows, columns, hn, 1, q, h.ld_qkv, k, h.ld_kv, 0, p,
                     columns);
            mb_sgemm(&ctx->blas, MB_N, MB_T, rows, columns, hn, 1, d_out, h.ld_out, v, h.ld_kv, 0,
                     dp, columns);
            for (size_t i = i0; i < i1; i++)
                backward_row(b, &h, i, p + (i - i0) * columns, dp + (i - i0) * columns, columns,
                             factor);
            mb_sgemm(&ctx->blas, MB_T, MB_N, columns, hn, rows, 1, p, columns, d_out, h.ld_out, 1,
                     d_v, h.ld_kv);
            mb_sgemm(&ctx->blas, MB_T, MB_N, columns, hn, rows, 1, dp, columns, q, h.ld_qkv, 1, d_k,
                     h.ld_kv);
            mb_sgemm(&ctx->blas, MB_N, MB_N, rows, hn, columns, 1, dp, columns, k, h.ld_kv,
                     b->joins ? 1 : 0, d_qkv + h.q + i0 * h.ld_qkv, h.ld_qkv);
        }
    }
}

/* ---- keys and values alone ---- */

/* In qkv they lie behind each other, too, behind the queries of their group. */
static void copy_keys_values(const struct mb_keys_values *a, int takes)
{
    const struct mb_attention_shape *s = &a->shape;
    const size_t queries = s->n_heads / s->n_groups * s->head_dim, n = 2 * s->head_dim;
    float *qkv = a->qkv, *kv = a->kv;
    for (size_t i = 0; i < s->n_samples * s->seq * s->n_groups; i++) {
        float *in_qkv = qkv + i * (queries + n) + queries, *alone = kv + i * n;
        memcpy(takes ? alone : in_qkv, takes ? in_qkv : alone, n * sizeof(float));
    }
}

void MB_CPU(keys_values_take)(struct mb_context *ctx, struct mb_stream *stream,
                              const struct mb_keys_values *a)
{
    (void)ctx;
    (void)stream;
    copy_keys_values(a, 1);
}

void MB_CPU(keys_values_put)(struct mb_context *ctx, struct mb_stream *stream,
                             const struct mb_keys_values *a)
{
    (void)ctx;
    (void)stream;
    copy_keys_values(a, 0);
}
