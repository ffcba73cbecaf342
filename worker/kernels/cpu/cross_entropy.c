/*
 * Output layer and cross entropy in one, for a chunk of token rows at a time and, within it, for
 * blocks of vocabulary columns, in the manner of an online softmax: the logits of a block are
 * turned into exponentials while they are in cache, and what a later, larger maximum changes is a
 * factor per row.
 *
 *  1. For each block: L = x W_b^T; m_b = maximum of the row so far; E_b = exp(L - m_b), kept; the
 * row's sum and its d_x = sum E_b W_b are rescaled to m_b and gain this block.
 *  2. loss = log(sum) + m - L[label]. With c = grad_scale * mask, d_x = c (d_x / sum - W[label]).
 *  3. For each block: d_W_b += E_b^T y with y = x * c exp(m_b - m) / sum; then d_W[label] -= c x.
 * Where the vocabulary is spread over ranks, log(sum) + m is the whole vocabulary's, made of all
 * ranks' parts, and 1 / sum becomes exp(m - it).
 *
 * So the softmax itself is never written: its factors are applied to rows of hidden columns instead
 * of vocab.
 *
 * Scratch: E of a chunk [blocks][rows][BLOCK], the block maxima, y, and per row maximum, sum,
 * label's logit.
 */
#include <float.h>
#include <math.h>
#include <string.h>
#include "worker/kernels/cpu/cpu.h"
#include "worker/kernels/cpu/vector.h"

enum {
    BLOCK = 512, /* vocabulary columns; rows * BLOCK floats should stay in the second-level cache */
    MAX_ROWS = 512,             /* of a chunk: enough for products at full speed */
    MAX_KEPT = 32 * 1024 * 1024 /* bound of E in floats, 128 MiB, unless one row alone needs more */
};

struct chunk {
    const struct mb_context *ctx;
    const struct mb_cross_entropy *a;
    size_t first, rows;                           /* tokens [first, first + rows) */
    float *kept;                                  /* E, [n_blocks][rows, columns of the block] */
    float *block_max;                             /* [n_blocks][rows] */
    float *scaled_x;                              /* [rows, hidden] */
    float *max, *sum, *label_logit, *coefficient; /* [rows] */
};

static size_t chunk_rows(size_t n_tokens, size_t vocab)
{
    size_t rows = MAX_KEPT / vocab;
    rows = rows > MAX_ROWS ? MAX_ROWS : rows;
    rows = rows > n_tokens ? n_tokens : rows;
    return rows ? rows : 1;
}

static size_t block_count(size_t vocab)
{
    return (vocab + BLOCK - 1) / BLOCK;
}

size_t MB_CPU(cross_entropy_scratch)(size_t n_tokens, size_t hidden, size_t vocab)
{
    size_t rows = chunk_rows(n_tokens, vocab);
    return rows * (vocab + block_count(vocab) + hidden + 4);
}

static void chunk_init(struct chunk *c, const struct mb_context *ctx,
                       const struct mb_cross_entropy *a, size_t first)
{
    size_t rows = chunk_rows(a->n_tokens, a->vocab);
    c->ctx = ctx;
    c->a = a;
    c->first = first;
    c->rows = a->n_tokens - first < rows ? a->n_tokens - first : rows;
    c->kept = a->scratch;
    c->scaled_x = c->kept + rows * a->vocab;
    c->block_max = c->scaled_x + rows * a->hidden;
    c->max = c->block_max + rows * block_count(a->vocab);
    c->sum = c->max + rows;
    c->label_logit = c->sum + rows;
    c->coefficient = c->label_logit + rows;
    for (size_t r = 0; r < c->rows; r++) {
        c->max[r] = -FLT_MAX;
        c->sum[r] = 0;
        c->label_logit[r] = 0;
    }
}

/* Row of logits to exp(logit - new maximum); returns their sum, *max is the maximum before and
 * after. */
static float exponentials(float *row, size_t n, float *max)
{
    float m = *max, sum = 0;
#pragma omp simd reduction(max : m)
    for (size_t j = 0; j < n; j++)
        m = row[j] > m ? row[j] : m;
#pragma omp simd reduction(+ : sum)
    for (size_t j = 0; j < n; j++) {
        float e = mb_expf(row[j] - m);
        row[j] = e;
        sum += e;
    }
    *max = m;
    return sum;
}

static void block_forward(const struct chunk *c, size_t b)
{
    const struct mb_cross_entropy *a = c->a;
    const size_t v0 = b * BLOCK, n = a->vocab - v0 < BLOCK ? a->vocab - v0 : BLOCK,
                 hidden = a->hidden;
    const float *w = (const float *)a->weight + v0 * hidden, *x = a->x;
    float *d_x = a->d_x;
    /* A loss alone reads each block once: all blocks share the place of the first. */
    float *e = c->kept + (a->d_x ? v0 * c->rows : 0);
    mb_sgemm(&c->ctx->blas, MB_N, MB_T, c->rows, n, hidden, 1, x + c->first * hidden, hidden, w,
             hidden, 0, e, n);
    for (size_t r = 0; r < c->rows; r++) {
        size_t label = (size_t)a->label[c->first + r] - a->first; /* huge below first */
        if (label >= v0 && label < v0 + n)
            c->label_logit[r] = e[r * n + label - v0];
        float before = c->max[r];
        float sum = exponentials(e + r * n, n, &c->max[r]);
        float rescale = expf(before - c->max[r]);
        c->sum[r] = c->sum[r] * rescale + sum;
        c->block_max[b * c->rows + r] = c->max[r];
        if (d_x == NULL || b == 0 || rescale == 1)
            continue;
        for (size_t i = 0; i < hidden; i++)
            d_x[(c->first + r) * hidden + i] *= rescale;
    }
    if (d_x != NULL)
        mb_sgemm(&c->ctx->blas, MB_N, MB_N, c->rows, hidden, n, 1, e, n, w, hidden, b == 0 ? 0 : 1,
                 d_x + c->first * hidden, hidden);
}

/* This rank's share of the vocabulary, for the others. */
static void write_part(const struct chunk *c)
{
    float *log_sum = c->a->part + c->first, *label_logit = log_sum + c->a->n_tokens;
    for (size_t r = 0; r < c->rows; r++) {
        log_sum[r] = (float)(log((double)c->sum[r]) + (double)c->max[r]);
        label_logit[r] = c->label_logit[r];
    }
}

/* Of row t over all ranks' parts: log of the sum of exponentials, and the label's logit. */
static void join_parts(const struct mb_cross_entropy *a, size_t t, double *log_sum, double *label)
{
    double max = -INFINITY, sum = 0;
    *label = 0;
    for (size_t p = 0; p < a->n_parts; p++)
        max = fmax(max, (double)a->parts[2 * p * a->n_tokens + t]);
    for (size_t p = 0; p < a->n_parts; p++) {
        sum += exp((double)a->parts[2 * p * a->n_tokens + t] - max);
        *label += (double)a->parts[(2 * p + 1) * a->n_tokens + t];
    }
    *log_sum = max + log(sum);
}

static double chunk_loss(const struct chunk *c)
{
    const struct mb_cross_entropy *a = c->a;
    double total = 0;
    for (size_t r = 0; r < c->rows; r++) {
        double log_sum = log((double)c->sum[r]) + (double)c->max[r];
        double label = (double)c->label_logit[r];
        if (a->parts != NULL)
            join_parts(a, c->first + r, &log_sum, &label);
        total += (double)a->mask[c->first + r] * (log_sum - label);
    }
    return total;
}

/* What turns the row's exponentials into gradients of logits, but for the label's. */
static float row_factor(const struct chunk *c, size_t r, float scale)
{
    double log_sum, label;
    if (c->a->parts == NULL)
        return scale / c->sum[r];
    join_parts(c->a, c->first + r, &log_sum, &label);
    return scale * (float)exp((double)c->max[r] - log_sum);
}

/* The label's share of the gradient, and the factors of step 2. */
static void finish_rows(const struct chunk *c)
{
    const struct mb_cross_entropy *a = c->a;
    for (size_t r = 0; r < c->rows; r++) {
        size_t t = c->first + r, label = (size_t)a->label[t] - a->first;
        float by = a->pass != NULL ? a->pass->grad_scale : a->grad_scale;
        float scale = by * a->mask[t], k = row_factor(c, r, scale);
        float *restrict d_x = (float *)a->d_x + t * a->hidden;
        c->coefficient[r] = k;
        if (label >= a->vocab) { /* another rank's */
            for (size_t i = 0; i < a->hidden; i++)
                d_x[i] *= k;
            continue;
        }
        const float *w = (const float *)a->weight + label * a->hidden;
        const float *x = (const float *)a->x + t * a->hidden;
        float *restrict d_w = a->d_weight + label * a->hidden;
        for (size_t i = 0; i < a->hidden; i++) {
            d_x[i] = k * d_x[i] - scale * w[i];
            d_w[i] -= scale * x[i];
        }
    }
}

static void block_weight_gradient(const struct chunk *c, size_t b)
{
    const struct mb_cross_entropy *a = c->a;
    const size_t v0 = b * BLOCK, n = a->vocab - v0 < BLOCK ? a->vocab - v0 : BLOCK,
                 hidden = a->hidden;
    for (size_t r = 0; r < c->rows; r++) {
        float k = c->coefficient[r] * expf(c->block_max[b * c->rows + r] - c->max[r]);
        const float *x = (const float *)a->x + (c->first + r) * hidden;
        float *restrict y = c->scaled_x + r * hidden;
        for (size_t i = 0; i < hidden; i++)
            y[i] = k * x[i];
    }
    mb_sgemm(&c->ctx->blas, MB_T, MB_N, n, hidden, c->rows, 1, c->kept + v0 * c->rows, n,
             c->scaled_x, hidden, 1, a->d_weight + v0 * hidden, hidden);
}

void MB_CPU(cross_entropy)(struct mb_context *ctx, struct mb_stream *stream,
                           const struct mb_cross_entropy *a)
{
    if (mb_cpu_check_ids(stream, "label", a->label, a->n_tokens,
                         mb_all_vocab(a->all_vocab, a->vocab)) != 0)
        return;
    struct chunk c;
    if (a->d_x != NULL && a->sets_d_weight)
        memset(a->d_weight, 0, a->vocab * a->hidden * sizeof(float));
    for (size_t first = 0; first < a->n_tokens; first += c.rows) {
        chunk_init(&c, ctx, a, first);
        for (size_t b = 0; b < block_count(a->vocab); b++)
            block_forward(&c, b);
        if (a->part != NULL) {
            write_part(&c);
            continue;
        }
        *a->loss_sum += chunk_loss(&c);
        if (a->d_x == NULL)
            continue;
        finish_rows(&c);
        for (size_t b = 0; b < block_count(a->vocab); b++)
            block_weight_gradient(&c, b);
    }
}
