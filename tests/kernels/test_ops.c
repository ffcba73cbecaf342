/*
 * Every operation of the backend against the double-precision reference, every backward against
 * central differences of that reference. Tolerances are relative to the largest element of the
 * tensor: embedding 1e-7, backward 5e-7; layernorm 2e-6, backward 1e-5; linear 2e-6, backward 1e-5;
 * gelu 1e-6, backward 5e-6; dropout 2e-7; attention 2e-6, backward 1e-5; cross entropy 2e-6,
 * backward 1e-5; squared norm 1e-12 (double), scale and axpy 2e-7. adamw is tested through the
 * optimizer (test_optimizer.c).
 */
#include "fixture.h"
#include "reference.h"

#include <math.h>
#include "base/half.h"
#include "worker/kernels/philox.h"

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
    int alone;
};

static double embedding_value(void *arg)
{
    struct embedding_case *c = arg;
    ref_embedding(c->token, c->wt.ref, c->alone ? NULL : c->wp.ref, c->out.ref, c->n_tokens, c->seq,
                  c->hidden);
    return tensor_contract(c->out.ref, &c->d_out);
}

/* alone: without positions, as Llama's. */
static void check_embedding(struct fixture *f, size_t n, size_t seq, size_t hidden, size_t vocab,
                            int alone)
{
    int32_t *token;
    struct embedding_case c = {.n_tokens = n, .seq = seq, .hidden = hidden, .alone = alone};
    c.token = ids_new(f, n, vocab, &token);
    c.wt = tensor_new(f, vocab * hidden, 1);
    c.wp = tensor_new(f, seq * hidden, 1);
    c.out = tensor_new(f, n * hidden, 0);
    c.d_out = tensor_new(f, n * hidden, 1);
    struct tensor d_wt = tensor_new(f, c.wt.n, 0), d_wp = tensor_new(f, c.wp.n, 0);
    struct mb_embedding_forward a = {.token = token,
                                     .token_weight = c.wt.dev,
                                     .position_weight = alone ? NULL : c.wp.dev,
                                     .out = c.out.dev,
                                     .n_tokens = n,
                                     .seq = seq,
                                     .hidden = hidden,
                                     .vocab = vocab};
    RUN_OP(f, embedding_forward, a);
    embedding_value(&c);
    assert_tensor(f, "embedding", &c.out, 1e-7);
    struct mb_embedding_backward b = {.token = token,
                                      .d_out = c.d_out.dev,
                                      .d_token_weight = d_wt.dev,
                                      .d_position_weight = alone ? NULL : d_wp.dev,
                                      .n_tokens = n,
                                      .seq = seq,
                                      .hidden = hidden,
                                      .vocab = vocab};
    RUN_OP(f, embedding_backward, b);
    assert_tensor_gradient(f, "token embedding", &d_wt, &c.wt, embedding_value, &c, 5e-7);
    assert_tensor_gradient(f, "position embedding", &d_wp, &c.wp, embedding_value, &c, 5e-7);
}

static void test_embedding(void **state)
{
    static const size_t shapes[][4] = {{1, 1, 1, 1}, {6, 3, 5, 7}, {24, 8, 16, 11}};
    for (size_t k = 0; k < COUNT(shapes); k++)
        check_embedding(*state, shapes[k][0], shapes[k][1], shapes[k][2], shapes[k][3], 0);
}

static void test_embedding_alone(void **state)
{
    fixture_needs(*state, MB_FEATURE_NO_POSITIONS);
    check_embedding(*state, 12, 4, 5, 7, 1);
}

/* A vocabulary in three parts: each token is made by one of them, the others give zeros, and so
 * does its gradient; positions' gradients are of all tokens. */
static void test_embedding_parts(void **state)
{
    enum { TOKENS = 24, SEQ = 8, HIDDEN = 5, VOCAB = 12, PARTS = 3, ROWS = VOCAB / PARTS };
    struct fixture *f = *state;
    int32_t *token;
    struct embedding_case c = {.n_tokens = TOKENS, .seq = SEQ, .hidden = HIDDEN};
    c.token = ids_new(f, TOKENS, VOCAB, &token);
    c.wt = tensor_new(f, VOCAB * HIDDEN, 1);
    c.wp = tensor_new(f, SEQ * HIDDEN, 1);
    c.out = tensor_new(f, TOKENS * HIDDEN, 0);
    c.d_out = tensor_new(f, TOKENS * HIDDEN, 1);
    struct tensor d_wt = tensor_new(f, c.wt.n, 0), sum = tensor_new(f, c.out.n, 0);
    embedding_value(&c);
    for (size_t p = 0; p < PARTS; p++) {
        struct tensor d_wp = tensor_new(f, c.wp.n, 0);
        struct mb_embedding_forward a = {.token = token,
                                         .token_weight = c.wt.dev + p * ROWS * HIDDEN,
                                         .position_weight = c.wp.dev,
                                         .out = c.out.dev,
                                         .n_tokens = TOKENS,
                                         .seq = SEQ,
                                         .hidden = HIDDEN,
                                         .vocab = ROWS,
                                         .first = p * ROWS,
                                         .all_vocab = VOCAB};
        RUN_OP(f, embedding_forward, a);
        f->dev.ops->axpy(f->dev.ctx, f->dev.stream, sum.dev, c.out.dev, c.out.n, 1);
        struct mb_embedding_backward b = {.token = token,
                                          .d_out = c.d_out.dev,
                                          .d_token_weight = d_wt.dev + p * ROWS * HIDDEN,
                                          .d_position_weight = d_wp.dev,
                                          .n_tokens = TOKENS,
                                          .seq = SEQ,
                                          .hidden = HIDDEN,
                                          .vocab = ROWS,
                                          .first = p * ROWS,
                                          .all_vocab = VOCAB};
        RUN_OP(f, embedding_backward, b);
        assert_tensor_gradient(f, "position embedding", &d_wp, &c.wp, embedding_value, &c, 5e-7);
    }
    embedding_value(&c); /* gradients were checked by moving its inputs */
    sum.ref = c.out.ref;
    assert_tensor(f, "embedding of parts", &sum, 1e-7);
    assert_tensor_gradient(f, "token embedding of parts", &d_wt, &c.wt, embedding_value, &c, 5e-7);
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
    RUN_OP(f, embedding_forward, a);
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
    return tensor_contract(c->out.ref, &c->d_out);
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
                      d_b = tensor_new(f, hidden, 0), d_x_sum = tensor_new(f, hidden, 1);
        struct mb_layernorm_forward a = {.x = c.x.dev,
                                         .weight = c.w.dev,
                                         .bias = c.b.dev,
                                         .out = c.out.dev,
                                         .mean = mean.dev,
                                         .rstd = rstd.dev,
                                         .n_rows = rows,
                                         .hidden = hidden,
                                         .eps = 1e-5f};
        RUN_OP(f, layernorm_forward, a);
        layernorm_value(&c);
        assert_tensor(f, "layernorm", &c.out, 2e-6);
        struct mb_layernorm_backward b = {.x = c.x.dev,
                                          .weight = c.w.dev,
                                          .mean = mean.dev,
                                          .rstd = rstd.dev,
                                          .d_out = c.d_out.dev,
                                          .d_x = d_x.dev,
                                          .d_weight = d_w.dev,
                                          .d_bias = d_b.dev,
                                          .d_x_sum = d_x_sum.dev,
                                          .n_rows = rows,
                                          .hidden = hidden};
        RUN_OP(f, layernorm_backward, b);
        const float *rows_of = tensor_download(f, &d_x);
        for (size_t i = 0; i < d_x.n; i++)
            d_x_sum.ref[i % hidden] += (double)rows_of[i];
        assert_tensor(f, "layernorm sum of d_x", &d_x_sum, 1e-5);
        assert_tensor_gradient(f, "layernorm d_x", &d_x, &c.x, layernorm_value, &c, 1e-5);
        assert_tensor_gradient(f, "layernorm d_weight", &d_w, &c.w, layernorm_value, &c, 1e-5);
        assert_tensor_gradient(f, "layernorm d_bias", &d_b, &c.b, layernorm_value, &c, 1e-5);
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
    return tensor_contract(c->out.ref, &c->d_out);
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
                      d_b = tensor_new(f, n_out, 0), set = tensor_new(f, c.w.n, 5);
        struct mb_linear_forward a = {.x = c.x.dev,
                                      .weight = c.w.dev,
                                      .bias = c.with_bias ? c.b.dev : NULL,
                                      .out = c.out.dev,
                                      .n_rows = rows,
                                      .n_in = n_in,
                                      .n_out = n_out};
        RUN_OP(f, linear_forward, a);
        linear_value(&c);
        assert_tensor(f, "linear", &c.out, 2e-6);
        struct mb_linear_backward b = {.x = c.x.dev,
                                       .weight = c.w.dev,
                                       .d_out = c.d_out.dev,
                                       .d_x = d_x.dev,
                                       .d_weight = d_w.dev,
                                       .d_bias = c.with_bias ? d_b.dev : NULL,
                                       .n_rows = rows,
                                       .n_in = n_in,
                                       .n_out = n_out};
        RUN_OP(f, linear_backward, b);
        b.d_weight = set.dev;
        b.sets_d_weight = 1;
        b.d_bias = NULL;
        RUN_OP(f, linear_backward, b);
        assert_tensor_gradient(f, "linear d_weight, set", &set, &c.w, linear_value, &c, 1e-5);
        assert_tensor_gradient(f, "linear d_x", &d_x, &c.x, linear_value, &c, 1e-5);
        assert_tensor_gradient(f, "linear d_weight", &d_w, &c.w, linear_value, &c, 1e-5);
        assert_tensor_gradient(f, "linear d_bias", &d_b, &c.b, linear_value, &c, 1e-5);
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
    return tensor_contract(c->out.ref, &c->d_out);
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
        RUN_OP(f, gelu_forward, a);
        gelu_value(&c);
        assert_tensor(f, "gelu", &c.out, 1e-6);
        a.d_out = c.d_out.dev;
        a.out = d_x.dev;
        RUN_OP(f, gelu_backward, a);
        assert_tensor_gradient(f, "gelu d_x", &d_x, &c.x, gelu_value, &c, 5e-6);
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
        RUN_OP(f, dropout_add, a);
        for (size_t i = 0; i < x.n; i++)
            out.ref[i] =
                x.ref[i] * ref_dropout(&a.dropout, i) + (cases[k].residual ? residual.ref[i] : 0);
        assert_tensor(f, "dropout_add", &out, 2e-7);
    }
}

/* The share of dropped elements is the probability, within five standard deviations. */
static void test_dropout_rate(void **state)
{
    struct fixture *f = *state;
    struct tensor x = tensor_new(f, 100000, 1), out = tensor_new(f, 100000, 0);
    struct mb_dropout_add a = {
        .x = x.dev, .out = out.dev, .n = x.n, .dropout = {.seed = 1, .probability = 0.3f}};
    RUN_OP(f, dropout_add, a);
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
    return tensor_contract(c->out.ref, &c->d_out);
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
        RUN_OP(f, attention_forward, a);
        attention_value(&c);
        assert_tensor(f, "attention", &c.out, 2e-6);
        struct mb_attention_backward b = {.shape = *s,
                                          .qkv = c.qkv.dev,
                                          .out = c.out.dev,
                                          .log_sum = log_sum.dev,
                                          .d_out = c.d_out.dev,
                                          .d_qkv = d_qkv.dev,
                                          .scratch = scratch.dev,
                                          .dropout = c.dropout};
        RUN_OP(f, attention_backward, b);
        assert_tensor_gradient(f, "attention d_qkv", &d_qkv, &c.qkv, attention_value, &c, 1e-5);
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
        tensor_upload(f, &c.mask);
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
        assert_tensor_gradient(f, "cross entropy d_x", &d_x, &c.x, cross_entropy_value, &c, 1e-5);
        assert_tensor_gradient(f, "cross entropy d_weight", &d_w, &c.w, cross_entropy_value, &c,
                               1e-5);
    }
}

/* One part of a vocabulary; parts NULL: the first of its two calls. Returns what the loss gained.
 */
static double run_part(struct fixture *f, const struct mb_cross_entropy *whole, size_t p,
                       size_t n_parts, float *parts, int is_second, float *d_x, float *d_w)
{
    struct mb_cross_entropy a = *whole;
    a.vocab = whole->vocab / n_parts;
    a.first = p * a.vocab;
    a.all_vocab = whole->vocab;
    a.weight = (const float *)whole->weight + a.first * a.hidden;
    if (is_second) {
        a.parts = parts;
        a.n_parts = n_parts;
        a.d_x = d_x;
        a.d_weight = d_w != NULL ? d_w + a.first * a.hidden : NULL;
    } else {
        a.part = parts + 2 * p * a.n_tokens;
    }
    return run_cross_entropy(f, &a);
}

/* The whole loss on every part, d_x in shares of a sum, d_weight in rows. Large x: maxima that are
 * far apart between parts. */
static void test_cross_entropy_parts(void **state)
{
    static const struct {
        size_t n_tokens, hidden, vocab, n_parts;
        double range;
    } cases[] = {{3, 4, 6, 2, 1}, {7, 3, 1056, 2, 30}, {5, 2, 1100, 4, 200}, {521, 2, 6, 3, 1}};
    struct fixture *f = *state;
    for (size_t k = 0; k < COUNT(cases); k++) {
        const size_t n = cases[k].n_tokens, hidden = cases[k].hidden, vocab = cases[k].vocab;
        const size_t n_parts = cases[k].n_parts;
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
        tensor_upload(f, &c.mask);
        struct tensor d_x = tensor_new(f, c.x.n, 1), sum = tensor_new(f, c.x.n, 0),
                      d_w = tensor_new(f, c.w.n, 0), parts = tensor_new(f, n_parts * 2 * n, 1);
        struct tensor scratch =
            tensor_new(f, f->dev.ops->cross_entropy_scratch(n, hidden, vocab / n_parts), 0);
        struct mb_cross_entropy a = {.x = c.x.dev,
                                     .weight = c.w.dev,
                                     .label = label,
                                     .mask = c.mask.dev,
                                     .scratch = scratch.dev,
                                     .n_tokens = n,
                                     .hidden = hidden,
                                     .vocab = vocab,
                                     .grad_scale = 0.7f};
        const double want = cross_entropy_value(&c) / 0.7;
        for (size_t p = 0; p < n_parts; p++)
            assert_true(run_part(f, &a, p, n_parts, parts.dev, 0, NULL, NULL) == 0);
        double first = 0;
        for (size_t p = 0; p < n_parts; p++) {
            double loss = run_part(f, &a, p, n_parts, parts.dev, 1, NULL, NULL);
            double got = run_part(f, &a, p, n_parts, parts.dev, 1, d_x.dev, d_w.dev);
            first = p == 0 ? got : first;
            assert_true(got == loss && got == first);
            f->dev.ops->axpy(f->dev.ctx, f->dev.stream, sum.dev, d_x.dev, d_x.n, 1);
        }
        if (!(fabs(first - want) <= 2e-6 * fmax(1, fabs(want))))
            fail_msg("cross entropy of parts: case %zu gives %.9g, expected %.9g", k, first, want);
        assert_tensor_gradient(f, "d_x of parts", &sum, &c.x, cross_entropy_value, &c, 1e-5);
        assert_tensor_gradient(f, "d_weight of parts", &d_w, &c.w, cross_entropy_value, &c, 1e-5);
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
    tensor_upload(f, &x);
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
        assert_tensor(f, "axpy", &y, 2e-7);
        assert_tensor(f, "scale", &x, 2e-7);
    }
}

/* Counted beyond what is there already, either sign. */
static void test_count_zeros(void **state)
{
    struct fixture *f = *state;
    enum { N = 70001 };
    struct tensor x = tensor_new(f, N, 2);
    double want = 3, count = 3;
    void *device_count;
    for (size_t i = 0; i < N; i++) {
        x.host[i] = i % 7 == 0 ? 0.0f : i % 11 == 0 ? -0.0f : i % 13 == 0 ? 1e-45f : 1.0f;
        want += i % 7 == 0 || i % 11 == 0;
    }
    f->dev.ops->copy_in(f->dev.ctx, f->dev.stream, x.dev, x.host, N * sizeof(float));
    assert_int_equal(f->dev.ops->alloc(f->dev.ctx, sizeof(count), &device_count, NULL), 0);
    f->dev.ops->copy_in(f->dev.ctx, f->dev.stream, device_count, &count, sizeof(count));
    f->dev.ops->count_zeros(f->dev.ctx, f->dev.stream, x.dev, N, device_count);
    f->dev.ops->count_zeros(f->dev.ctx, f->dev.stream, x.dev, 0, device_count);
    f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, &count, device_count, sizeof(count));
    synchronize(f);
    assert_true(count == want);
}

/* Every bf16 and what lies halfway to the next one and beside that, to nearest even; and back. */
static void test_bf16(void **state)
{
    struct fixture *f = *state;
    enum { BESIDE = 5, ALL = 1 << 16, N = BESIDE * ALL };
    struct tensor x = tensor_new(f, N, 0), back = tensor_new(f, N, 0);
    static uint16_t out[N];
    void *device_out;
    for (uint32_t i = 0; i < ALL; i++) {
        static const uint32_t LOW[BESIDE] = {0, 1, 0x7fff, 0x8000, 0x8001};
        for (size_t k = 0; k < BESIDE; k++)
            x.host[BESIDE * i + k] = mb_bits_float(i << 16 | LOW[k]);
    }
    f->dev.ops->copy_in(f->dev.ctx, f->dev.stream, x.dev, x.host, N * sizeof(float));
    assert_int_equal(f->dev.ops->alloc(f->dev.ctx, sizeof(out), &device_out, NULL), 0);
    f->dev.ops->to_bf16(f->dev.ctx, f->dev.stream, device_out, x.dev, N);
    f->dev.ops->from_bf16(f->dev.ctx, f->dev.stream, back.dev, device_out, N);
    f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, out, device_out, sizeof(out));
    synchronize(f);
    tensor_download(f, &back);
    for (size_t i = 0; i < N; i++) {
        if (isnan(x.host[i]))
            assert_true(isnan(mb_bf16_float(out[i])) && isnan(back.host[i]));
        else if (out[i] != mb_float_bf16(x.host[i]) || back.host[i] != mb_bf16_float(out[i]))
            fail_msg("%a becomes %04x, expected %04x", (double)x.host[i], out[i],
                     mb_float_bf16(x.host[i]));
    }
}

/* What is allocated now, and the most that it was. */
static void test_allocated(void **state)
{
    struct fixture *f = *state;
    size_t now[3], most[3], n[3];
    void *p;
    f->dev.ops->allocated(f->dev.ctx, &now[0], &most[0], &n[0]);
    assert_int_equal(f->dev.ops->alloc(f->dev.ctx, 1 << 24, &p, NULL), 0);
    f->dev.ops->allocated(f->dev.ctx, &now[1], &most[1], &n[1]);
    f->dev.ops->free(f->dev.ctx, p);
    f->dev.ops->allocated(f->dev.ctx, &now[2], &most[2], &n[2]);
    assert_int_equal(now[1] - now[0], 1 << 24);
    assert_int_equal(n[1] - n[0], 1);
    assert_true(most[1] >= now[1] && most[2] == most[1]);
    assert_true(now[2] == now[0] && n[2] == n[0]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox),
        FIXTURE_TEST(test_embedding),
        FIXTURE_TEST(test_embedding_alone),
        FIXTURE_TEST(test_embedding_parts),
        FIXTURE_TEST(test_embedding_outside),
        FIXTURE_TEST(test_layernorm),
        FIXTURE_TEST(test_linear),
        FIXTURE_TEST(test_gelu),
        FIXTURE_TEST(test_dropout_add),
        FIXTURE_TEST(test_dropout_rate),
        FIXTURE_TEST(test_attention),
        FIXTURE_TEST(test_cross_entropy),
        FIXTURE_TEST(test_cross_entropy_parts),
        FIXTURE_TEST(test_cross_entropy_nan),
        FIXTURE_TEST(test_flat),
        FIXTURE_TEST(test_count_zeros),
        FIXTURE_TEST(test_bf16),
        FIXTURE_TEST(test_allocated),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
