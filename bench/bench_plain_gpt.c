/*
 * bench_plain_gpt LAYERS HIDDEN HEADS SEQUENCE BATCH VOCABULARY STEPS
 *
 * The peer "plain C loops" of bench/train.py: one training step of a GPT-2 (learned positions,
 * pre-norm, GELU by tanh, tied output, AdamW, gradients clipped at norm 1) in fp32, as loops over
 * arrays that a compiler makes vectors of and OpenMP shares out over the cores. No library, no
 * fused operation: attention's probabilities and all logits are in memory. Draws tokens for each
 * step, trains STEPS steps and prints one line of JSON: milliseconds
 * and loss of each step, and the peak of resident memory.
 *
 *  1. forward: embedding, blocks, norm, logits, loss; whatever the backward pass needs is kept.
 *  2. backward in the opposite order; gradients of weights are sums over all rows.
 *  3. The norm of all gradients, then AdamW.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

enum { STEPS_MAX = 64, TILE = 8 };

static const float LR = 3e-3F, BETA1 = 0.9F, BETA2 = 0.95F, EPS = 1e-8F, DECAY = 0.1F;

struct block {
    float *ln1_w, *ln1_b, *qkv_w, *qkv_b, *proj_w, *proj_b, *ln2_w, *ln2_b, *fc1_w, *fc1_b, *fc2_w,
        *fc2_b;
};

/* Weights, and gradients of the same form. */
struct weights {
    float *all, *wte, *wpe, *ln_w, *ln_b;
    struct block *blocks;
};

/* What a block keeps of the forward pass; rows x columns each. */
struct kept {
    float *in, *ln1, *qkv, *probs, *att, *mid, *ln2, *fc1, *gelu;
};

struct model {
    size_t layers, hidden, heads, seq, batch, vocab, rows, n;
    struct weights w, g;
    float *m, *v;
    struct kept *kept;
    float *last, *normed, *logits;    /* the final norm's input and output; logits, then theirs */
    float *dx, *dy, *dwide, *dnormed; /* gradients of rows x hidden, and of rows x 4 hidden */
    uint32_t *tokens;                 /* batch x (seq + 1) */
    uint64_t random;
};

static float *floats(size_t n)
{
    float *p = calloc(n, sizeof *p);
    if (p == NULL) {
        fprintf(stderr, "bench_plain_gpt: no memory for %zu numbers\n", n);
        exit(1);
    }
    return p;
}

static uint32_t draw(struct model *s)
{
    s->random ^= s->random << 13;
    s->random ^= s->random >> 7;
    s->random ^= s->random << 17;
    return (uint32_t)(s->random >> 32);
}

static float *cut(float **at, size_t n)
{
    float *p = *at;
    *at += n;
    return p;
}

static void lay_out(const struct model *s, struct weights *w)
{
    const size_t h = s->hidden;
    float *at = w->all = floats(s->n);
    w->blocks = calloc(s->layers, sizeof *w->blocks);
    if (w->blocks == NULL) {
        exit(1);
    }
    w->wte = cut(&at, s->vocab * h);
    w->wpe = cut(&at, s->seq * h);
    for (size_t l = 0; l < s->layers; l++) {
        w->blocks[l] = (struct block){
            .ln1_w = cut(&at, h),
            .ln1_b = cut(&at, h),
            .qkv_w = cut(&at, 3 * h * h),
            .qkv_b = cut(&at, 3 * h),
            .proj_w = cut(&at, h * h),
            .proj_b = cut(&at, h),
            .ln2_w = cut(&at, h),
            .ln2_b = cut(&at, h),
            .fc1_w = cut(&at, 4 * h * h),
            .fc1_b = cut(&at, 4 * h),
            .fc2_w = cut(&at, 4 * h * h),
            .fc2_b = cut(&at, h),
        };
    }
    w->ln_w = cut(&at, h);
    w->ln_b = cut(&at, h);
}

static void fill(float *p, size_t n, float value)
{
    for (size_t i = 0; i < n; i++) {
        p[i] = value;
    }
}

/* ---- layer norm ---- */

static void norm_of(const float *x, size_t h, float *mean, float *rstd)
{
    float sum = 0, square = 0;
    for (size_t i = 0; i < h; i++) {
        sum += x[i];
    }
    *mean = sum / (float)h;
    for (size_t i = 0; i < h; i++) {
        square += (x[i] - *mean) * (x[i] - *mean);
    }
    *rstd = 1 / sqrtf(square / (float)h + 1e-5F);
}

static void norm_forward(float *out, const float *in, const float *w, const float *b, size_t rows,
                         size_t h)
{
#pragma omp parallel for
    for (size_t r = 0; r < rows; r++) {
        const float *x = in + r * h;
        float *y = out + r * h, mean, rstd;
        norm_of(x, h, &mean, &rstd);
        for (size_t i = 0; i < h; i++) {
            y[i] = (x[i] - mean) * rstd * w[i] + b[i];
        }
    }
}

/* dx is added to. */
static void norm_backward(float *dx, float *dw, float *db, const float *dy, const float *in,
                          const float *w, size_t rows, size_t h)
{
    for (size_t r = 0; r < rows; r++) {
        const float *x = in + r * h, *d = dy + r * h;
        float *out = dx + r * h, mean, rstd, a = 0, c = 0;
        norm_of(x, h, &mean, &rstd);
        for (size_t i = 0; i < h; i++) {
            float n = (x[i] - mean) * rstd;
            a += d[i] * w[i];
            c += d[i] * w[i] * n;
            dw[i] += d[i] * n;
            db[i] += d[i];
        }
        a /= (float)h;
        c /= (float)h;
        for (size_t i = 0; i < h; i++) {
            out[i] += (d[i] * w[i] - a - (x[i] - mean) * rstd * c) * rstd;
        }
    }
}

/* ---- products ---- */

/* out[r][o] = b[o] + sum of in[r][i] w[o][i]; a row of w is read once for TILE rows of in. */
static void product(float *out, const float *in, const float *w, const float *b, size_t rows,
                    size_t n_in, size_t n_out)
{
#pragma omp parallel for
    for (size_t r = 0; r < rows; r += TILE) {
        const size_t tile = rows - r < TILE ? rows - r : TILE;
        for (size_t o = 0; o < n_out; o++) {
            for (size_t k = 0; k < tile; k++) {
                const float *x = in + (r + k) * n_in, *y = w + o * n_in;
                float sum = b != NULL ? b[o] : 0;
                for (size_t i = 0; i < n_in; i++) {
                    sum += x[i] * y[i];
                }
                out[(r + k) * n_out + o] = sum;
            }
        }
    }
}

/* din is overwritten, dw and db are added to. */
static void product_backward(float *din, float *dw, float *db, const float *dout, const float *in,
                             const float *w, size_t rows, size_t n_in, size_t n_out)
{
#pragma omp parallel for
    for (size_t r = 0; r < rows; r += TILE) {
        const size_t tile = rows - r < TILE ? rows - r : TILE;
        memset(din + r * n_in, 0, tile * n_in * sizeof *din);
        for (size_t o = 0; o < n_out; o++) {
            for (size_t k = 0; k < tile; k++) {
                const float d = dout[(r + k) * n_out + o], *y = w + o * n_in;
                float *x = din + (r + k) * n_in;
                for (size_t i = 0; i < n_in; i++) {
                    x[i] += d * y[i];
                }
            }
        }
    }
#pragma omp parallel for
    for (size_t o = 0; o < n_out; o += TILE) {
        const size_t tile = n_out - o < TILE ? n_out - o : TILE;
        for (size_t r = 0; r < rows; r++) {
            const float *x = in + r * n_in;
            for (size_t k = 0; k < tile; k++) {
                const float d = dout[r * n_out + o + k];
                float *y = dw + (o + k) * n_in;
                for (size_t i = 0; i < n_in; i++) {
                    y[i] += d * x[i];
                }
                if (db != NULL) {
                    db[o + k] += d;
                }
            }
        }
    }
}

/* ---- attention: a head of a sample at a time ---- */

static void attention_forward(const struct model *s, const struct kept *k)
{
    const size_t t_n = s->seq, h = s->hidden, d = h / s->heads;
    const float scale = 1 / sqrtf((float)d);
#pragma omp parallel for collapse(2)
    for (size_t b = 0; b < s->batch; b++) {
        for (size_t head = 0; head < s->heads; head++) {
            const float *qkv = k->qkv + b * t_n * 3 * h + head * d;
            for (size_t t = 0; t < t_n; t++) {
                const float *q = qkv + t * 3 * h;
                float *p = k->probs + ((b * s->heads + head) * t_n + t) * t_n;
                float *out = k->att + (b * t_n + t) * h + head * d, max = -1e30F, sum = 0;
                for (size_t u = 0; u <= t; u++) {
                    const float *key = qkv + u * 3 * h + h;
                    float dot = 0;
                    for (size_t i = 0; i < d; i++) {
                        dot += q[i] * key[i];
                    }
                    p[u] = dot * scale;
                    max = p[u] > max ? p[u] : max;
                }
                for (size_t u = 0; u <= t; u++) {
                    p[u] = expf(p[u] - max);
                    sum += p[u];
                }
                memset(out, 0, d * sizeof *out);
                for (size_t u = 0; u <= t; u++) {
                    const float *value = qkv + u * 3 * h + 2 * h;
                    p[u] /= sum;
                    for (size_t i = 0; i < d; i++) {
                        out[i] += p[u] * value[i];
                    }
                }
            }
        }
    }
}

/* dqkv is overwritten. */
static void attention_backward(const struct model *s, const struct kept *k, float *dqkv_all,
                               const float *datt)
{
    const size_t t_n = s->seq, h = s->hidden, d = h / s->heads;
    const float scale = 1 / sqrtf((float)d);
    memset(dqkv_all, 0, s->rows * 3 * h * sizeof *dqkv_all);
#pragma omp parallel for collapse(2)
    for (size_t b = 0; b < s->batch; b++) {
        for (size_t head = 0; head < s->heads; head++) {
            const float *qkv = k->qkv + b * t_n * 3 * h + head * d;
            float *dqkv = dqkv_all + b * t_n * 3 * h + head * d;
            for (size_t t = 0; t < t_n; t++) {
                const float *p = k->probs + ((b * s->heads + head) * t_n + t) * t_n;
                const float *dout = datt + (b * t_n + t) * h + head * d, *q = qkv + t * 3 * h;
                float *dq = dqkv + t * 3 * h, mean = 0;
                for (size_t u = 0; u <= t; u++) {
                    const float *value = qkv + u * 3 * h + 2 * h;
                    float dp = 0;
                    for (size_t i = 0; i < d; i++) {
                        dp += dout[i] * value[i];
                    }
                    mean += p[u] * dp;
                }
                for (size_t u = 0; u <= t; u++) {
                    const float *key = qkv + u * 3 * h + h, *value = key + h;
                    float *dkey = dqkv + u * 3 * h + h, *dvalue = dkey + h, dp = 0;
                    for (size_t i = 0; i < d; i++) {
                        dp += dout[i] * value[i];
                        dvalue[i] += p[u] * dout[i];
                    }
                    dp = p[u] * (dp - mean) * scale;
                    for (size_t i = 0; i < d; i++) {
                        dq[i] += dp * key[i];
                        dkey[i] += dp * q[i];
                    }
                }
            }
        }
    }
}

/* ---- the rest of a block ---- */

static const float GELU_A = 0.7978845608F, GELU_B = 0.044715F;

static void gelu_forward(float *out, const float *in, size_t n)
{
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) {
        float x = in[i];
        out[i] = 0.5F * x * (1 + tanhf(GELU_A * (x + GELU_B * x * x * x)));
    }
}

static void gelu_backward(float *d, const float *in, size_t n)
{
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) {
        float x = in[i], t = tanhf(GELU_A * (x + GELU_B * x * x * x));
        d[i] *= 0.5F * (1 + t) + 0.5F * x * (1 - t * t) * GELU_A * (1 + 3 * GELU_B * x * x);
    }
}

static void add(float *out, const float *a, const float *b, size_t n)
{
#pragma omp parallel for
    for (size_t i = 0; i < n; i++) {
        out[i] = a[i] + b[i];
    }
}

static void block_forward(const struct model *s, size_t l, float *out)
{
    const struct block *w = &s->w.blocks[l];
    const struct kept *k = &s->kept[l];
    const size_t rows = s->rows, h = s->hidden;
    norm_forward(k->ln1, k->in, w->ln1_w, w->ln1_b, rows, h);
    product(k->qkv, k->ln1, w->qkv_w, w->qkv_b, rows, h, 3 * h);
    attention_forward(s, k);
    product(k->mid, k->att, w->proj_w, w->proj_b, rows, h, h);
    add(k->mid, k->mid, k->in, rows * h);
    norm_forward(k->ln2, k->mid, w->ln2_w, w->ln2_b, rows, h);
    product(k->fc1, k->ln2, w->fc1_w, w->fc1_b, rows, h, 4 * h);
    gelu_forward(k->gelu, k->fc1, rows * 4 * h);
    product(out, k->gelu, w->fc2_w, w->fc2_b, rows, 4 * h, h);
    add(out, out, k->mid, rows * h);
}

/* s->dx is the gradient of the block's output, then of its input. */
static void block_backward(const struct model *s, size_t l)
{
    const struct block *w = &s->w.blocks[l], *g = &s->g.blocks[l];
    const struct kept *k = &s->kept[l];
    const size_t rows = s->rows, h = s->hidden;
    product_backward(s->dwide, g->fc2_w, g->fc2_b, s->dx, k->gelu, w->fc2_w, rows, 4 * h, h);
    gelu_backward(s->dwide, k->fc1, rows * 4 * h);
    product_backward(s->dy, g->fc1_w, g->fc1_b, s->dwide, k->ln2, w->fc1_w, rows, h, 4 * h);
    norm_backward(s->dx, g->ln2_w, g->ln2_b, s->dy, k->mid, w->ln2_w, rows, h);
    product_backward(s->dy, g->proj_w, g->proj_b, s->dx, k->att, w->proj_w, rows, h, h);
    attention_backward(s, k, s->dwide, s->dy);
    product_backward(s->dy, g->qkv_w, g->qkv_b, s->dwide, k->ln1, w->qkv_w, rows, h, 3 * h);
    norm_backward(s->dx, g->ln1_w, g->ln1_b, s->dy, k->in, w->ln1_w, rows, h);
}

/* ---- a step ---- */

static const uint32_t *token(const struct model *s, size_t row)
{
    return s->tokens + row / s->seq * (s->seq + 1) + row % s->seq;
}

/* The mean loss; logits become its gradient. */
static float loss_of(const struct model *s)
{
    float loss = 0;
#pragma omp parallel for reduction(+ : loss)
    for (size_t r = 0; r < s->rows; r++) {
        const uint32_t label = token(s, r)[1];
        float *x = s->logits + r * s->vocab, max = -1e30F, sum = 0;
        for (size_t i = 0; i < s->vocab; i++) {
            max = x[i] > max ? x[i] : max;
        }
        loss += max - x[label];
        for (size_t i = 0; i < s->vocab; i++) {
            x[i] = expf(x[i] - max);
            sum += x[i];
        }
        loss += logf(sum);
        for (size_t i = 0; i < s->vocab; i++) {
            x[i] /= sum * (float)s->rows;
        }
        x[label] -= 1 / (float)s->rows;
    }
    return loss / (float)s->rows;
}

static float forward(const struct model *s)
{
    const size_t h = s->hidden;
    float *x = s->layers > 0 ? s->kept[0].in : s->last;
    for (size_t r = 0; r < s->rows; r++) {
        const float *word = s->w.wte + *token(s, r) * h, *place = s->w.wpe + r % s->seq * h;
        for (size_t i = 0; i < h; i++) {
            x[r * h + i] = word[i] + place[i];
        }
    }
    for (size_t l = 0; l < s->layers; l++) {
        block_forward(s, l, l + 1 < s->layers ? s->kept[l + 1].in : s->last);
    }
    norm_forward(s->normed, s->last, s->w.ln_w, s->w.ln_b, s->rows, h);
    product(s->logits, s->normed, s->w.wte, NULL, s->rows, h, s->vocab);
    return loss_of(s);
}

static void backward(const struct model *s)
{
    const size_t h = s->hidden;
    memset(s->g.all, 0, s->n * sizeof *s->g.all);
    memset(s->dx, 0, s->rows * h * sizeof *s->dx);
    product_backward(s->dnormed, s->g.wte, NULL, s->logits, s->normed, s->w.wte, s->rows, h,
                     s->vocab);
    norm_backward(s->dx, s->g.ln_w, s->g.ln_b, s->dnormed, s->last, s->w.ln_w, s->rows, h);
    for (size_t l = s->layers; l-- > 0;) {
        block_backward(s, l);
    }
    for (size_t r = 0; r < s->rows; r++) {
        for (size_t i = 0; i < h; i++) {
            s->g.wte[*token(s, r) * h + i] += s->dx[r * h + i];
            s->g.wpe[r % s->seq * h + i] += s->dx[r * h + i];
        }
    }
}

static void update(const struct model *s, size_t step)
{
    const float fix1 = 1 - powf(BETA1, (float)step), fix2 = 1 - powf(BETA2, (float)step);
    double square = 0;
#pragma omp parallel for reduction(+ : square)
    for (size_t i = 0; i < s->n; i++) {
        square += (double)s->g.all[i] * (double)s->g.all[i];
    }
    const float clip = square > 1 ? 1 / (float)sqrt(square) : 1;
#pragma omp parallel for
    for (size_t i = 0; i < s->n; i++) {
        const float g = s->g.all[i] * clip;
        s->m[i] = BETA1 * s->m[i] + (1 - BETA1) * g;
        s->v[i] = BETA2 * s->v[i] + (1 - BETA2) * g * g;
        s->w.all[i] -= LR * (s->m[i] / fix1 / (sqrtf(s->v[i] / fix2) + EPS) + DECAY * s->w.all[i]);
    }
}

static void prepare(struct model *s)
{
    const size_t h = s->hidden, rows = s->rows = s->batch * s->seq;
    s->n = (s->vocab + s->seq) * h + s->layers * (12 * h * h + 13 * h) + 2 * h;
    lay_out(s, &s->w);
    lay_out(s, &s->g);
    s->m = floats(s->n);
    s->v = floats(s->n);
    s->random = 88172645463325252ULL;
    for (size_t i = 0; i < s->n; i++) { /* uniform, of the deviation 0.02 */
        s->w.all[i] = 0.0346F * ((float)draw(s) / 2147483648.0F - 1);
    }
    s->kept = calloc(s->layers, sizeof *s->kept);
    s->tokens = calloc(s->batch * (s->seq + 1), sizeof *s->tokens);
    if (s->kept == NULL || s->tokens == NULL) {
        exit(1);
    }
    for (size_t l = 0; l < s->layers; l++) {
        struct kept *k = &s->kept[l];
        *k = (struct kept){floats(rows * h),     floats(rows * h),
                           floats(rows * 3 * h), floats(rows * s->heads * s->seq),
                           floats(rows * h),     floats(rows * h),
                           floats(rows * h),     floats(rows * 4 * h),
                           floats(rows * 4 * h)};
        fill(s->w.blocks[l].ln1_w, h, 1);
        fill(s->w.blocks[l].ln2_w, h, 1);
    }
    fill(s->w.ln_w, h, 1);
    s->last = floats(rows * h);
    s->normed = floats(rows * h);
    s->logits = floats(rows * s->vocab);
    s->dx = floats(rows * h);
    s->dy = floats(rows * h);
    s->dnormed = floats(rows * h);
    s->dwide = floats(rows * 4 * h);
}

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

int main(int argc, char **argv)
{
    struct model s = {0};
    size_t *const sizes[] = {&s.layers, &s.hidden, &s.heads, &s.seq, &s.batch, &s.vocab};
    size_t steps = argc == 8 ? strtoul(argv[7], NULL, 10) : 0;
    for (int i = 0; i < 6 && argc == 8; i++) {
        *sizes[i] = strtoul(argv[i + 1], NULL, 10);
    }
    if (steps < 1 || steps > STEPS_MAX || s.heads == 0 || s.hidden % s.heads != 0 || s.seq == 0 ||
        s.batch == 0 || s.vocab == 0) {
        fprintf(stderr,
                "usage: bench_plain_gpt LAYERS HIDDEN HEADS SEQUENCE BATCH VOCABULARY "
                "STEPS (at most %d)\n",
                STEPS_MAX);
        return 2;
    }
    prepare(&s);
    double ms[STEPS_MAX];
    float losses[STEPS_MAX];
    for (size_t i = 0; i < steps; i++) {
        for (size_t t = 0; t < s.batch * (s.seq + 1); t++) {
            s.tokens[t] = draw(&s) % (uint32_t)s.vocab;
        }
        const double began = now_ms();
        losses[i] = forward(&s);
        backward(&s);
        update(&s, i + 1);
        ms[i] = now_ms() - began;
    }
    printf("{\"ms\": [");
    for (size_t i = 0; i < steps; i++) {
        printf("%s%.1f", i > 0 ? ", " : "", ms[i]);
    }
    printf("], \"losses\": [");
    for (size_t i = 0; i < steps; i++) {
        printf("%s%.6f", i > 0 ? ", " : "", (double)losses[i]);
    }
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    printf("], \"rss_mb\": %.1f}\n", (double)used.ru_maxrss / 1024);
    return 0;
}
