#include "reference.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include "worker/kernels/philox.h"

enum { MAX_SEQ = 512, MAX_VOCAB = 4096 };

void ref_embedding(const int32_t *token, const double *token_weight, const double *position_weight,
                   double *out, size_t n_tokens, size_t seq, size_t hidden)
{
    for (size_t t = 0; t < n_tokens; t++)
        for (size_t i = 0; i < hidden; i++)
            out[t * hidden + i] = token_weight[(size_t)token[t] * hidden + i] +
                                  (position_weight ? position_weight[t % seq * hidden + i] : 0);
}

void ref_layernorm(const double *x, const double *weight, const double *bias, double *out,
                   size_t n_rows, size_t hidden, double eps)
{
    for (size_t r = 0; r < n_rows; r++) {
        const double *row = x + r * hidden;
        double mean = 0, variance = 0;
        for (size_t i = 0; i < hidden; i++)
            mean += row[i] / (double)hidden;
        for (size_t i = 0; i < hidden; i++)
            variance += (row[i] - mean) * (row[i] - mean) / (double)hidden;
        for (size_t i = 0; i < hidden; i++)
            out[r * hidden + i] = (row[i] - mean) / sqrt(variance + eps) * weight[i] + bias[i];
    }
}

void ref_linear(const double *x, const double *weight, const double *bias, double *out,
                size_t n_rows, size_t n_in, size_t n_out)
{
    for (size_t r = 0; r < n_rows; r++)
        for (size_t o = 0; o < n_out; o++) {
            double sum = bias ? bias[o] : 0;
            for (size_t i = 0; i < n_in; i++)
                sum += x[r * n_in + i] * weight[o * n_in + i];
            out[r * n_out + o] = sum;
        }
}

void ref_rmsnorm(const double *x, const double *weight, double *out, size_t n_rows, size_t hidden,
                 double eps)
{
    for (size_t r = 0; r < n_rows; r++) {
        const double *row = x + r * hidden;
        double mean = 0;
        for (size_t i = 0; i < hidden; i++)
            mean += row[i] * row[i] / (double)hidden;
        for (size_t i = 0; i < hidden; i++)
            out[r * hidden + i] = row[i] / sqrt(mean + eps) * weight[i];
    }
}

void ref_swiglu(const double *x, double *out, size_t n_rows, size_t n)
{
    for (size_t r = 0; r < n_rows; r++)
        for (size_t i = 0; i < n; i++) {
            double gate = x[2 * r * n + i], value = x[2 * r * n + n + i];
            out[r * n + i] = gate / (1 + exp(-gate)) * value;
        }
}

void ref_rope(const struct mb_attention_shape *s, double *qkv, const double *angle,
              size_t rotary_dim)
{
    const size_t per_group = s->n_heads / s->n_groups, half = rotary_dim / 2;
    for (size_t row = 0; row < s->n_samples * s->seq; row++)
        for (size_t h = 0; h < s->n_heads + 2 * s->n_groups; h++) {
            double *head = qkv + (row * (s->n_heads + 2 * s->n_groups) + h) * s->head_dim;
            if (h % (per_group + 2) == per_group + 1) /* a value */
                continue;
            for (size_t c = 0; c < half; c++) {
                double t = angle[row % s->seq * half + c], a = head[c], b = head[c + half];
                head[c] = a * cos(t) - b * sin(t);
                head[c + half] = b * cos(t) + a * sin(t);
            }
        }
}

double ref_gelu(double x, enum mb_gelu_form form)
{
    if (form == MB_GELU_ERF)
        return 0.5 * x * (1 + erf(x / sqrt(2.0)));
    return 0.5 * x * (1 + tanh(0.79788456 * x * (1 + 0.044715 * x * x)));
}

double ref_dropout(const struct mb_dropout *d, uint64_t e)
{
    if (d->probability <= 0)
        return 1;
    uint64_t element = d->first_element + e;
    struct mb_philox r = mb_philox(d->seed, element / 4, d->iteration, d->site);
    double uniform = (double)r.word[element % 4] / 4294967296.0;
    return uniform < (double)d->probability ? 0 : 1 / (1 - (double)d->probability);
}

void ref_attention(const struct mb_attention_shape *s, const double *qkv, double *out,
                   const struct mb_dropout *d)
{
    const size_t per_group = s->n_heads / s->n_groups, hn = s->head_dim;
    const size_t width = (s->n_heads + 2 * s->n_groups) * hn;
    double p[MAX_SEQ];
    assert(s->seq <= MAX_SEQ);
    for (size_t b = 0; b < s->n_samples; b++)
        for (size_t h = 0; h < s->n_heads; h++)
            for (size_t i = 0; i < s->seq; i++) {
                const double *sample = qkv + b * s->seq * width;
                size_t group = h / per_group * (per_group + 2) * hn;
                const double *q = sample + i * width + group + h % per_group * hn;
                double max = -DBL_MAX, sum = 0;
                for (size_t j = 0; j <= i; j++) {
                    const double *k = sample + j * width + group + per_group * hn;
                    p[j] = 0;
                    for (size_t c = 0; c < hn; c++)
                        p[j] += q[c] * k[c] / sqrt((double)hn);
                    max = fmax(max, p[j]);
                }
                for (size_t j = 0; j <= i; j++)
                    sum += exp(p[j] - max);
                double *o = out + ((b * s->seq + i) * s->n_heads + h) * hn;
                for (size_t c = 0; c < hn; c++)
                    o[c] = 0;
                for (size_t j = 0; j <= i; j++) {
                    const double *v = sample + j * width + group + (per_group + 1) * hn;
                    uint64_t e = ((b * s->n_heads + h) * s->seq + i) * s->seq + j;
                    double weight = exp(p[j] - max) / sum * ref_dropout(d, e);
                    for (size_t c = 0; c < hn; c++)
                        o[c] += weight * v[c];
                }
            }
}

double ref_cross_entropy(const double *x, const double *weight, const int32_t *label,
                         const double *mask, size_t n_tokens, size_t hidden, size_t vocab)
{
    double logit[MAX_VOCAB], total = 0;
    assert(vocab <= MAX_VOCAB);
    for (size_t t = 0; t < n_tokens; t++) {
        double max = -DBL_MAX, sum = 0;
        ref_linear(x + t * hidden, weight, NULL, logit, 1, hidden, vocab);
        for (size_t v = 0; v < vocab; v++)
            max = fmax(max, logit[v]);
        for (size_t v = 0; v < vocab; v++)
            sum += exp(logit[v] - max);
        total += (mask ? mask[t] : 1) * (log(sum) + max - logit[label[t]]);
    }
    return total;
}
