/*
 * Every operation of the backend against the double-precision reference, every backward against
 * central differences of that reference. Tolerances are relative to the largest element of the
 * tensor: embedding 1e-7   layernorm 2e-6, backward 1e-5   linear 2e-6, backward 1e-5   gelu 1e-6,
 * backward 5e-6 dropout 2e-7     attention 2e-6, backward 1e-5   cross entropy 2e-6, backward 1e-5
 *   squared norm 1e-12 (double), scale and axpy 2e-7
 * adamw is tested through the optimizer (test_optimizer.c).
 */
#include "fixture.h"
#include "reference.h"

#include <math.h>
#include "worker/kernels/philox.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

/* sum(out * d_out): the scalar whose gradients backward computes from d_out. */
static double contract(const double *out, const struct tensor *d_out)
{
    double sum = 0;
    for (size_t i = 0; i < d_out->n; i++)
        sum += out[i] * d_out->ref[i];
    return sum;
}

/* --- the random numbers under dropout and initial weights --- */

/* Known answers of philox4x32-10, as the authors' Random123 library publishes them. */
static void test_philox(void **state)
{
    (void)state;
    static const struct {
        uint64_t key, block;
        uint32_t c2, c3, want[4];
    } known[] = {
        {0, 0, 0, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {UINT64_MAX,
         UINT64_MAX,
         UINT32_MAX,
         UINT32_MAX,
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {0x299f31d0a4093822,
         0x85a308d3243f6a88,
         0x13198a2e,
         0x03707344,
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < COUNT(known); i++) {
        struct mb_philox r = mb_philox(known[i].key, known[i].block, known[i].c2, known[i].c3);
        assert_memory_equal(r.word, known[i].want, sizeof(r.word));
    }
}

/* --- embedding --- */

struct embedding_case {
    const int32_t *token;
    struct tensor wt, wp, out, d_out;
    size_t n_tokens, seq, hidden;
};

static double embedding_value(void *arg)
{
    struct embedding_case *c = arg;
    ref_embedding(c->token, c->wt.ref, c->wp.ref, c->out.ref, c->n_tokens, c->seq, c->hidden);
    return contract(c->out.ref, &c->d_out);
}

static void test_embedding(void **state)
{
    static const size_t shapes[][4] = {{1, 1, 1, 1}, {6, 3, 5, 7}, {24, 8, 16, 11}};
    struct fixture *f = *state;
    for (size_t k = 0; k < COUNT(shapes); k++) {
        const size_t n = shapes[k][0], seq = shapes[k][1], hidden = shapes[k][2],
                     vocab = shapes[k][3];
        int32_t *token;
        struct embedding_case c = {.n_tokens = n, .seq = seq, .hidden = hidden};
        c.token = ids_new(f, n, vocab, &token);
        c.wt = tensor_new(f, vocab * hidden, 1);
        c.wp = tensor_new(f, seq * hidden, 1);
        c.out = tensor_new(f, n * hidden, 0);
        c.d_out = tensor_new(f, n * hidden, 1);
        struct tensor d_wt = tensor_new(f, c.wt.n, 0), d_wp = tensor_new(f, c.wp.n, 0);
        struct mb_embedding_forward a = {.token = token,
                                         .token_weight = c.wt.dev,
                                         .position_weight = c.wp.dev,
                                         .out = c.out.dev,
                                         .n_tokens = n,
                                         .seq = seq,
                                         .hidden = hidden,
                                         .vocab = vocab};
        f->dev.ops->embedding_forward(f->dev.ctx, f->dev.stream, &a);
        embedding_value(&c);
        assert_close("embedding", tensor_download(f, &c.out), c.out.ref, c.out.n, 1e-7);
        struct mb_embedding_backward b = {.token = token,
                                          .d_out = c.d_out.dev,
                                          .d_token_weight = d_wt.dev,
                                          .d_position_weight = d_wp.dev,
                                          .n_tokens = n,
                                          .seq = seq,
                                          .hidden = hidden,
                                          .vocab = vocab};
        f->dev.ops->embedding_backward(f->dev.ctx, f->dev.stream, &b);
        assert_gradient("token embedding", tensor_download(f, &d_wt), c.wt.ref, c.wt.n,
                        embedding_value, &c, 1e-6);
        assert_gradient("position embedding", tensor_download(f, &d_wp), c.wp.ref, c.wp.n,
                        embedding_value, &c, 1e-6);
    }
}

/* An id outside the vocabulary fails the stream, at synchronisation, once, and touches nothing. */
static void test_embedding_outside(void **state)
{
    struct fixture *f = *state;
    int32_t *token, bad = 9;
    struct tensor wt = tensor_new(f, 9 * 4, 1), wp = tensor_new(f, 4, 1), out = tensor_new(f, 4, 0);
    struct mb_err err = {0};
    ids_new(f, 1, 1, &token);
    f->dev.ops->copy_in(f->dev.ctx, f->dev.stream, token, &bad, sizeof(bad));
    struct mb_embedding_forward a = {.token = token,
                                     .token_weight = wt.dev,
                                     .position_weight = wp.dev,
                                     .out = out.dev,
                                     .n_tokens = 1,
                                     .seq = 1,
                                     .hidden = 4,
                                     .vocab = 9};
    f->dev.ops->embedding_forward(f->dev.ctx, f->dev.stream, &a);
    assert_int_equal(f->dev.ops->synchronize(f->dev.ctx, f->dev.stream, &err), MB_EINVAL);
    assert_string_equal(err.text, "token 9 at row 0 is outside the vocabulary of 9");
    assert_int_equal(f->dev.ops->synchronize(f->dev.ctx, f->dev.stream, &err), 0);
    assert_true(tensor_download(f, &out)[0] == 0);
}

/* --- layernorm --- */

struct layernorm_case {
    struct tensor x, w, b, out, d_out;
    size_t n_rows, hidden;
};

static double layernorm_value(void *arg)
{
    struct layernorm_case *c = arg;
    ref_layernorm(c->x.ref, c->w.ref, c->b.ref, c->out.ref, c->n_rows, c->hidden, 1e-5);
    return contract(c->out.ref, &c->d_out);
}

static void test_layernorm(void **state)
{
    /* With two columns a normalised row is +-1 whatever x is, and d_x nothing but rounding. */
    static const size_t shapes[][2] = {{1, 3}, {3, 7}, {5, 32}, {4, 129}};
    struct fixture *f = *state;
    for (size_t k = 0; k < COUNT(shapes); k++) {
        const size_t rows = shapes[k][0], hidden = shapes[k][1];
        struct layernorm_case c = {.n_rows = rows, .hidden = hidden};
        c.x = tensor_new(f, rows * hidden, 3);
        c.w = tensor_new(f, hidden, 1);
        c.b = tensor_new(f, hidden, 1);
        c.out = tensor_new(f, rows * hidden, 0);
        c.d_out = tensor_new(f, rows * hidden, 1);
        struct tensor mean = tensor_new(f, rows, 0), rstd = tensor_new(f, rows, 0);
        struct tensor d_x = tensor_new(f, c.x.n, 0), d_w = tensor_new(f, hidden, 0),
                      d_b = tensor_new(f, hidden, 0);
        struct mb_layernorm_forward a = {.x = c.x.dev,
                                         .weight = c.w.dev,
                                         .bias = c.b.dev,
                                         .out = c.out.dev,
                                         .mean = mean.dev,
                                         .rstd = rstd.dev,
                                         .n_rows = rows,
                                         .hidden = hidden,
                                         .eps = 1e-5f};
        f->dev.ops->layernorm_forward(f->dev.ctx, f->dev.stream, &a);
        layernorm_value(&c);
        assert_close("layernorm", tensor_download(f, &c.out), c.out.ref, c.out.n, 2e-6);
        struct mb_layernorm_backward b = {.x = c.x.dev,
                                          .weight = c.w.dev,
                                          .mean = mean.dev,
                                          .rstd = rstd.dev,
                                          .d_out = c.d_out.dev,
                                          .d_x = d_x.dev,
                                          .d_weight = d_w.dev,
                                          .d_bias = d_b.dev,
                                          .n_rows = rows,
                                          .hidden = hidden};
        f->dev.ops->layernorm_backward(f->dev.ctx, f->dev.stream, &b);
        assert_gradient("layernorm d_x", tensor_download(f, &d_x), c.x.ref, c.x.n, layernorm_value,
                        &c, 1e-5);
        assert_gradient("layernorm d_weight", tensor_download(f, &d_w), c.w.ref, hidden,
                        layernorm_value, &c, 1e-5);
        assert_gradient("layernorm d_bias", tensor_download(f, &d_b), c.b.ref, hidden,
                        layernorm_value, &c, 1e-5);
    }
}

/* --- linear --- */

struct linear_case {
    struct tensor x, w, b, out, d_out;
    size_t rows, n_in, n_out;
    int with_bias;
};

static double linear_value(void *arg)
{
    struct linear_case *c = arg;
    ref_linear(c->x.ref, c->w.ref, c->with_bias ? c->b.ref : NULL, c->out.ref, c->rows, c->n_in,
               c->n_out);
    return contract(c->out.ref, &c->d_out);
}

static void test_linear(void **state)
{
    static const size_t shapes[][4] = {{1, 1, 1, 1}, {3, 5, 7, 0}, {9, 16, 12, 1}, {17, 33, 5, 1}};
    struct fixture *f = *state;
    for (size_t k = 0; k < COUNT(shapes); k++) {
        const size_t rows = shapes[k][0], n_in = shapes[k][1], n_out = shapes[k][2];
        struct linear_case c = {.rows = rows, .n_in = n_in, .n_out = n_out};
        c.with_bias = (int)shapes[k][3];
        c.x = tensor_new(f, rows * n_in, 1);
        c.w = tensor_new(f, n_out * n_in, 1);
        c.b = tensor_new(f, n_out, 1);
        c.out = tensor_new(f, rows * n_out, 0);
        c.d_out = tensor_new(f, rows * n_out, 1);
        struct tensor d_x = tensor_new(f, c.x.n, 0), d_w = tensor_new(f, c.w.n, 0),
                      d_b = tensor_new(f, n_out, 0);
        struct mb_linear_forward a = {.x = c.x.dev,
                                      .weight = c.w.dev,
                                      .bias = c.with_bias ? c.b.dev : NULL,
                                      .out = c.out.dev,
                                      .n_rows = rows,
                                      .n_in = n_in,
                                      .n_out = n_out};
        f->dev.ops->linear_forward(f->dev.ctx, f->dev.stream, &a);
        linear_value(&c);
        assert_close("linear", tensor_download(f, &c.out), c.out.ref, c.out.n, 2e-6);
        struct mb_linear_backward b = {.x = c.x.dev,
                                       .weight = c.w.dev,
                                       .d_out = c.d_out.dev,
                                       .d_x = d_x.dev,
                                       .d_weight = d_w.dev,
                                       .d_bias = c.with_bias ? d_b.dev : NULL,
                                       .n_rows = rows,
                                       .n_in = n_in,
                                       .n_out = n_out};
        f->dev.ops->linear_backward(f->dev.ctx, f->dev.stream, &b);
        assert_gradient("linear d_x", tensor_download(f, &d_x), c.x.ref, c.x.n, linear_value, &c,
                        1e-5);
        assert_gradient("linear d_weight", tensor_download(f, &d_w), c.w.ref, c.w.n, linear_value,
                        &c, 1e-5);
        assert_gradient("linear d_bias", tensor_download(f, &d_b), c.b.ref, n_out, linear_value, &c,
                        1e-5);
    }
}

/* --- gelu --- */

struct gelu_case {
    struct tensor x, out, d_out;
    enum mb_gelu_form form;
};

static double gelu_value(void *arg)
{
    struct gelu_case *c = arg;
    for (size_t i = 0; i < c->x.n; i++)
        c->out.ref[i] = ref_gelu(c->x.ref[i], c->form);
    return contract(c->out.ref, &c->d_out);
}

static void test_gelu(void **state)
{
    static const double ranges[] = {0.01, 1, 6, 40}; /* beyond 9 tanh has saturated */
    struct fixture *f = *state;
    for (size_t k = 0; k < 2 * COUNT(ranges); k++) {
        struct gelu_case c = {.form = k % 2 ? MB_GELU_ERF : MB_GELU_TANH};
        c.x = tensor_new(f, 203, ranges[k / 2]);
        c.out = tensor_new(f, c.x.n, 0);
        c.d_out = tensor_new(f, c.x.n, 1);
        struct tensor d_x = tensor_new(f, c.x.n, 0);
        struct mb_gelu a = {.x = c.x.dev, .out = c.out.dev, .n = c.x.n, .form = c.form};
        f->dev.ops->gelu_forward(f->dev.ctx, f->dev.stream, &a);
        gelu_value(&c);
        assert_close("gelu", tensor_download(f, &c.out), c.out.ref, c.out.n, 1e-6);
        a.d_out = c.d_out.dev;
        a.out = d_x.dev;
        f->dev.ops->gelu_backward(f->dev.ctx, f->dev.stream, &a);
        assert_gradient("gelu d_x", tensor_download(f, &d_x), c.x.ref, c.x.n, gelu_value, &c, 5e-6);
    }
}

/* --- dropout --- */

static void test_dropout_add(void **state)
{
    static const struct {
        size_t n;
        uint64_t first;
        float probability;
        int residual;
    } cases[] = {{5, 0, 0, 1}, {1, 3, 0.5f, 0}, {257, 1, 0.1f, 1}, {1027, 4294967290u, 0.9f, 0}};
    struct fixture *f = *state;
    for (size_t k = 0; k < COUNT(cases); k++) {
        struct tensor x = tensor_new(f, cases[k].n, 1), residual = tensor_new(f, cases[k].n, 1),
                      out = tensor_new(f, cases[k].n, 0);
        struct mb_dropout_add a = {.x = x.dev,
                                   .residual = cases[k].residual ? residual.dev : NULL,
                                   .out = out.dev,
                                   .n = x.n,
                                   .dropout = {.seed = 7,
                                               .iteration = 3,
                                               .site = (uint32_t)k,
                                               .first_element = cases[k].first,
                                               .probability = cases[k].probability}};
        f->dev.ops->dropout_add(f->dev.ctx, f->dev.stream, &a);
        for (size_t i = 0; i < x.n; i++)
            out.ref[i] =
                x.ref[i] * ref_dropout(&a.dropout, i) + (cases[k].residual ? residual.ref[i] : 0);
        assert_close("dropout_add", tensor_download(f, &out), out.ref, out.n, 2e-7);
    }
}

/* The share of dropped elements is the probability, within five standard deviations. */
static void test_dropout_rate(void **state)
{
    struct fixture *f = *state;
    struct tensor x = tensor_new(f, 100000, 1), out = tensor_new(f, 100000, 0);
    struct mb_dropout_add a = {
        .x = x.dev, .out = out.dev, .n = x.n, .dropout = {.seed = 1, .probability = 0.3f}};
    f->dev.ops->dropout_add(f->dev.ctx, f->dev.stream, &a);
    const float *got = tensor_download(f, &out);
    double dropped = 0;
    for (size_t i = 0; i < out.n; i++)
        dropped += got[i] == 0;
    assert_true(fabs(dropped / 1e5 - 0.3) < 5 * sqrt(0.3 * 0.7 / 1e5));
}

/* --- attention --- */

struct attention_case {
    struct mb_attention_shape shape;
    struct mb_dropout dropout;
    struct tensor qkv, out, d_out;
};

static double attention_value(void *arg)
{
    struct attention_case *c = arg;
    ref_attention(&c->shape, c->qkv.ref, c->out.ref, &c->dropout);
    return contract(c->out.ref, &c->d_out);
}

/* Beyond 64 rows a head is computed in several blocks; there the gradient is checked for one head
 * only. */
static void test_attention(void **state)
{
    static const struct mb_attention_shape shapes[] = {
        {1, 1, 1, 1, 1}, {2, 5, 2, 2, 3}, {1, 9, 4, 2, 4}, {2, 7, 3, 1, 5}, {1, 67, 1, 1, 2}};
    struct fixture *f = *state;
    for (size_t k = 0; k < 2 * COUNT(shapes); k++) {
        struct attention_case c = {.shape = shapes[k / 2]};
        const struct mb_attention_shape *s = &c.shape;
        c.dropout = (struct mb_dropout){.seed = 5,
                                        .iteration = 2,
                                        .site = 9,
                                        .first_element = 13,
                                        .probability = k % 2 ? 0.25f : 0};
        c.qkv =
            tensor_new(f, s->n_samples * s->seq * (s->n_heads + 2 * s->n_groups) * s->head_dim, 2);
        c.out = tensor_new(f, s->n_samples * s->seq * s->n_heads * s->head_dim, 0);
        c.d_out = tensor_new(f, c.out.n, 1);
        struct tensor log_sum = tensor_new(f, s->n_samples * s->n_heads * s->seq, 0);
        struct tensor scratch = tensor_new(f, f->dev.ops->attention_scratch(s), 0);
        struct tensor d_qkv = tensor_new(f, c.qkv.n, 1); /* overwritten, not added to */
        struct mb_attention_forward a = {.shape = *s,
                                         .qkv = c.qkv.dev,
                                         .out = c.out.dev,
                                         .log_sum = log_sum.dev,
                                         .scratch = scratch.dev,
                                         .dropout = c.dropout};
        f->dev.ops->attention_forward(f->dev.ctx, f->dev.stream, &a);
        attention_value(&c);
        assert_close("attention", tensor_download(f, &c.out), c.out.ref, c.out.n, 2e-6);
        struct mb_attention_backward b = {.shape = *s,
                                          .qkv = c.qkv.dev,
                                          .out = c.out.dev,
                                          .log_sum = log_sum.dev,
                                          .d_out = c.d_out.dev,
                                          .d_qkv = d_qkv.dev,
                                          .scratch = scratch.dev,
                                          .dropout = c.dropout};
        f->dev.ops->attention_backward(f->dev.ctx, f->dev.stream, &b);
        assert_gradient("attention d_qkv", tensor_download(f, &d_qkv), c.qkv.ref, c.qkv.n,
                        attention_value, &c, 1e-5);
    }
}

/* --- cross entropy --- */

struct cross_entropy_case {
    struct tensor x, w, mask;
    const int32_t *label;
    size_t n_tokens, hidden, vocab;
};

static double cross_entropy_value(void *arg)
{
    struct cross_entropy_case *c = arg;
    return 0.7 * ref_cross_entropy(c->x.ref, c->w.ref, c->label, c->mask.ref, c->n_tokens,
                                   c->hidden, c->vocab);
}

static double run_cross_entropy(struct fixture *f, struct mb_cross_entropy *a)
{
    double sum = 0;
    void *device_sum;
    assert_int_equal(f->dev.ops->alloc(f->dev.ctx, sizeof(sum), &device_sum, NULL), 0);
    f->dev.ops->copy_in(f->dev.ctx, f->dev.stream, device_sum, &sum, sizeof(sum));
    a->loss_sum = device_sum;
    f->dev.ops->cross_entropy(f->dev.ctx, f->dev.stream, a);
    f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, &sum, device_sum, sizeof(sum));
    synchronize(f);
    return sum;
}

/* The vocabulary is computed in blocks of 512 and tokens in chunks: sizes around and across both.
 * Large x give maxima that move from block to block. */
static void test_cross_entropy(void **state)
{
    static const struct {
        size_t n_tokens, hidden, vocab;
        double range;
    } cases[] = {{1, 1, 1, 1}, {3, 4, 5, 1}, {7, 3, 513, 30}, {5, 2, 1100, 200}, {521, 2, 6, 1}};
    struct fixture *f = *state;
    for (size_t k = 0; k < COUNT(cases); k++) {
        const size_t n = cases[k].n_tokens, hidden = cases[k].hidden, vocab = cases[k].vocab;
        struct cross_entropy_case c = {.n_tokens = n, .hidden = hidden, .vocab = vocab};
        int32_t *label;
        c.label = ids_new(f, n, vocab, &label);
        c.x = tensor_new(f, n * hidden, cases[k].range);
        c.w = tensor_new(f, vocab * hidden, 0.5);
        c.mask = tensor_new(f, n, 0);
        for (size_t t = 0; t < n; t++) {
            c.mask.ref[t] = t % 4 != 3;
            c.mask.host[t] = t % 4 != 3;
        }
        f->dev.ops->copy_in(f->dev.ctx, f->dev.stream, c.mask.dev, c.mask.host, n * sizeof(float));
        struct tensor d_x = tensor_new(f, c.x.n, 1), d_w = tensor_new(f, c.w.n, 0);
        struct tensor scratch =
            tensor_new(f, f->dev.ops->cross_entropy_scratch(n, hidden, vocab), 0);
        struct mb_cross_entropy a = {.x = c.x.dev,
                                     .weight = c.w.dev,
                                     .label = label,
                                     .mask = c.mask.dev,
                                     .scratch = scratch.dev,
                                     .n_tokens = n,
                                     .hidden = hidden,
                                     .vocab = vocab,
                                     .grad_scale = 0.7f};
        double want = cross_entropy_value(&c) / 0.7, loss_only = run_cross_entropy(f, &a);
        a.d_x = d_x.dev;
        a.d_weight = d_w.dev;
        double got = run_cross_entropy(f, &a);
        assert_true(got == loss_only);
        if (!(fabs(got - want) <= 2e-6 * fmax(1, fabs(want))))
            fail_msg("cross entropy: case %zu gives %.9g, expected %.9g", k, got, want);
        assert_gradient("cross entropy d_x", tensor_download(f, &d_x), c.x.ref, c.x.n,
                        cross_entropy_value, &c, 1e-5);
        assert_gradient("cross entropy d_weight", tensor_download(f, &d_w), c.w.ref, c.w.n,
                        cross_entropy_value, &c, 1e-5);
    }
}

/* A NaN in the input is a NaN in the loss: it must not be lost on the way. */
static void test_cross_entropy_nan(void **state)
{
    struct fixture *f = *state;
    int32_t *label;
    struct tensor x = tensor_new(f, 8, 1), w = tensor_new(f, 12, 1), mask = tensor_new(f, 2, 1);
    struct tensor scratch = tensor_new(f, f->dev.ops->cross_entropy_scratch(2, 4, 3), 0);
    ids_new(f, 2, 3, &label);
    x.host[5] = NAN;
    f->dev.ops->copy_in(f->dev.ctx, f->dev.stream, x.dev, x.host, 8 * sizeof(float));
    struct mb_cross_entropy a = {.x = x.dev,
                                 .weight = w.dev,
                                 .label = label,
                                 .mask = mask.dev,
                                 .scratch = scratch.dev,
                                 .n_tokens = 2,
                                 .hidden = 4,
                                 .vocab = 3};
    assert_true(isnan(run_cross_entropy(f, &a)));
}

/* --- flat ranges --- */

static void test_flat(void **state)
{
    static const size_t sizes[] = {1, 15, 4099};
    struct fixture *f = *state;
    for (size_t k = 0; k < COUNT(sizes); k++) {
        struct tensor x = tensor_new(f, sizes[k], 2), y = tensor_new(f, sizes[k], 2);
        double want = 0, sum = 1;
        void *device_sum;
        assert_int_equal(f->dev.ops->alloc(f->dev.ctx, sizeof(sum), &device_sum, NULL), 0);
        f->dev.ops->copy_in(f->dev.ctx, f->dev.stream, device_sum, &sum, sizeof(sum));
        f->dev.ops->squared_norm(f->dev.ctx, f->dev.stream, x.dev, x.n, device_sum);
        f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, &sum, device_sum, sizeof(sum));
        synchronize(f);
        for (size_t i = 0; i < x.n; i++)
            want += x.ref[i] * x.ref[i];
        assert_true(fabs(sum - 1 - want) <= 1e-12 * (want + 1));

        f->dev.ops->axpy(f->dev.ctx, f->dev.stream, y.dev, x.dev, x.n, 0.3f);
        f->dev.ops->scale(f->dev.ctx, f->dev.stream, x.dev, x.n, -1.5f);
        for (size_t i = 0; i < x.n; i++) {
            y.ref[i] += (double)0.3f * x.ref[i];
            x.ref[i] *= -1.5;
        }
        assert_close("axpy", tensor_download(f, &y), y.ref, y.n, 2e-7);
        assert_close("scale", tensor_download(f, &x), x.ref, x.n, 2e-7);
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox),
        TEST(test_embedding),
        TEST(test_embedding_outside),
        TEST(test_layernorm),
        TEST(test_linear),
        TEST(test_gelu),
        TEST(test_dropout_add),
        TEST(test_dropout_rate),
        TEST(test_attention),
        TEST(test_cross_entropy),
        TEST(test_cross_entropy_nan),
        TEST(test_flat),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
