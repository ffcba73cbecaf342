/*
 * The model. Loss and gradients of every parameter tensor against a model written in double from
 * the same reference operations, by central differences over every element (tolerances: loss 1e-5
 * absolute, gradients 2e-5 of the largest of the tensor); start values, determinism, independence
 * of the spread over ranks, learning, refusals.
 */
#include "fixture.h"
#include "gpt_reference.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/model/gpt.h"
#include "worker/model/optimizer.h"

static struct mb_gpt_config tiny(void)
{
    struct mb_gpt_config c;
    mb_gpt_config_init(&c);
    c.n_layers = LAYERS;
    c.hidden = HIDDEN;
    c.ffn_hidden = 12;
    c.n_heads = 4;
    c.seq = SEQ;
    c.max_positions = SEQ + 1;
    c.vocab = VOCAB;
    c.padded_vocab = PADDED;
    c.init_std = 0.3f; /* large enough that every part of the model matters to the loss */
    c.hidden_dropout = c.attention_dropout = 0;
    return c;
}

static struct mb_gpt *gpt_new(struct fixture *f, const struct mb_gpt_config *c, size_t micro_batch)
{
    struct mb_gpt *m = NULL;
    struct mb_err err = {0};
    if (mb_gpt_create(&f->dev, c, micro_batch, &m, &err) != 0)
        fail_msg("%s", err.text);
    return m;
}

static double scaled_loss(void *arg)
{
    const struct reference *r = arg;
    return r->grad_scale * reference_loss(r);
}

/* --- loss and gradients --- */

/* Norm weights and biases start at 1 and 0: move everything off its start. */
static struct tensor shake_weights(struct fixture *f, struct mb_gpt *m)
{
    struct tensor w = tensor_new(f, mb_gpt_n_elements(m), 0);
    size_t n_params;
    const struct mb_param *p = mb_gpt_params(m, &n_params);
    f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, w.host, mb_gpt_weights(m), w.n * sizeof(float));
    synchronize(f);
    for (size_t k = 0; k < n_params; k++)
        for (size_t i = p[k].offset; i < p[k].offset + p[k].n; i++) {
            w.host[i] += (float)(0.2 * (random_unit(f) - 0.5));
            w.ref[i] = (double)w.host[i];
        }
    f->dev.ops->copy_in(f->dev.ctx, f->dev.stream, mb_gpt_weights(m), w.host, w.n * sizeof(float));
    mb_gpt_weights_changed(m);
    return w;
}

static void check_model(struct fixture *f, const struct mb_gpt_config *c)
{
    const uint32_t all =
        MB_FEATURE_RMSNORM | MB_FEATURE_SWIGLU | MB_FEATURE_ROPE | MB_FEATURE_NO_POSITIONS;
    if (c->positions != MB_GPT_LEARNED && (f->dev.ops->features & all) != all)
        skip();
    struct mb_gpt *m = gpt_new(f, c, SAMPLES);
    struct tensor w = shake_weights(f, m), mask = tensor_new(f, TOKENS, 0),
                  g = tensor_new(f, w.n, 0);
    int32_t *unused;
    const int32_t *tokens = ids_new(f, TOKENS, VOCAB, &unused),
                  *labels = ids_new(f, TOKENS, VOCAB, &unused);
    for (size_t i = 0; i < TOKENS; i++)
        mask.ref[i] = mask.host[i] = i % 5 != 2;
    struct mb_gpt_step step = {.grad_scale = 0.125, .iteration = 17, .first_sample = 6};
    struct mb_gpt_batch batch = {.tokens = tokens, .labels = labels, .loss_mask = mask.host};
    struct reference r = {.m = m,
                          .w = w.ref,
                          .tokens = tokens,
                          .labels = labels,
                          .mask = mask.ref,
                          .grad_scale = 0.125};
    double loss, n;

    assert_int_equal(mb_gpt_forward(m, &batch, NULL), 0);
    assert_int_equal(mb_gpt_take_loss(m, &loss, &n, NULL), 0);
    assert_true(n == 8);
    if (!(fabs(loss - reference_loss(&r)) <= 1e-5 * n))
        fail_msg("loss without dropout is %.9g, expected %.9g", loss, reference_loss(&r));

    r.step = &step;
    assert_int_equal(mb_gpt_forward_backward(m, &batch, &step, NULL), 0);
    assert_int_equal(mb_gpt_take_loss(m, &loss, &n, NULL), 0);
    if (!(fabs(loss - reference_loss(&r)) <= 1e-5 * n))
        fail_msg("loss of the step is %.9g, expected %.9g", loss, reference_loss(&r));

    f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, g.host, mb_gpt_grads(m), g.n * sizeof(float));
    synchronize(f);
    size_t n_params;
    const struct mb_param *p = mb_gpt_params(m, &n_params);
    for (size_t k = 0; k < n_params; k++)
        assert_gradient(p[k].name, g.host + p[k].offset, w.ref + p[k].offset, p[k].n, scaled_loss,
                        &r, 2e-5);
    mb_gpt_destroy(m);
}

static void test_gradients(void **state)
{
    struct mb_gpt_config c = tiny();
    check_model(*state, &c);
}

static void test_gradients_dropout(void **state)
{
    struct mb_gpt_config c = tiny();
    c.hidden_dropout = 0.2f;
    c.attention_dropout = 0.3f;
    check_model(*state, &c);
}

static void test_gradients_untied_groups_erf(void **state)
{
    struct mb_gpt_config c = tiny();
    c.untie_output = 1;
    c.n_groups = 2;
    c.gelu = MB_GELU_ERF;
    check_model(*state, &c);
}

/* Llama's style; a head is wider than hidden / heads. */
static struct mb_gpt_config tiny_llama(void)
{
    struct mb_gpt_config c = tiny();
    c.n_heads = 2;
    c.head_dim = 6;
    c.n_groups = 1;
    c.norm = MB_GPT_RMSNORM;
    c.positions = MB_GPT_ROPE;
    c.rope.base = 3; /* so that all pairs turn visibly over five positions */
    c.swiglu = 1;
    c.linear_bias = c.qkv_bias = 0;
    c.untie_output = 1;
    return c;
}

static void test_gradients_llama(void **state)
{
    struct mb_gpt_config c = tiny_llama();
    check_model(*state, &c);
    c.hidden_dropout = 0.2f;
    c.attention_dropout = 0.3f;
    c.n_groups = 2;
    c.rope.percent = 0.7; /* int(4.2) channels of 6 */
    c.qkv_bias = 1;
    check_model(*state, &c);
}

static void test_gradients_1p(void **state)
{
    struct mb_gpt_config c = tiny();
    c.norm_1p = 1;
    check_model(*state, &c);
    c = tiny_llama();
    c.norm_1p = c.linear_bias = 1;
    c.untie_output = 0;
    c.swiglu = 0;
    c.positions = MB_GPT_NO_POSITIONS;
    check_model(*state, &c);
}

/* What a backend lacks is named; nothing is taken. */
static void test_missing_operations(void **state)
{
    struct fixture *f = *state;
    struct mb_backend less = *f->dev.ops;
    struct mb_device dev = f->dev;
    struct mb_gpt_config c = tiny_llama();
    struct mb_gpt *m = NULL;
    struct mb_err err = {0};
    const struct {
        uint32_t feature;
        const char *text;
    } parts[] = {{MB_FEATURE_RMSNORM, "no RMSNorm in"},
                 {MB_FEATURE_SWIGLU, "no SwiGLU in"},
                 {MB_FEATURE_ROPE, "no rotary positions in"},
                 {MB_FEATURE_NO_POSITIONS, "no embeddings without learned positions in"},
                 {MB_FEATURE_FP8, "no FP8 in"}};
    c.fp8 = MB_GPT_FP8_HYBRID;
    dev.ops = &less;
    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        less.features = ~parts[i].feature;
        assert_int_equal(mb_gpt_create(&dev, &c, 1, &m, &err), MB_EUNSUPPORTED);
        assert_non_null(strstr(err.text, parts[i].text));
    }
    less.features = 0;
    c = tiny();
    assert_int_equal(mb_gpt_create(&dev, &c, 1, &m, &err), 0);
    mb_gpt_destroy(m);
}

/* Logits of the output layer: their softmax is what the loss is made of. */
static void test_logits(void **state)
{
    struct fixture *f = *state;
    struct mb_gpt_config c = tiny();
    struct mb_gpt *m = gpt_new(f, &c, SAMPLES);
    struct tensor logits = tensor_new(f, TOKENS * PADDED, 0);
    int32_t *unused;
    const int32_t *tokens = ids_new(f, TOKENS, VOCAB, &unused);
    struct mb_gpt_batch batch = {.tokens = tokens, .labels = tokens};
    double loss, n, want = 0;
    assert_int_equal(mb_gpt_logits(m, &batch, logits.dev, NULL), 0);
    assert_int_equal(mb_gpt_forward(m, &batch, NULL), 0);
    assert_int_equal(mb_gpt_take_loss(m, &loss, &n, NULL), 0);
    assert_true(n == TOKENS);
    const float *got = tensor_download(f, &logits);
    for (size_t t = 0; t < TOKENS; t++) {
        double sum = 0;
        for (size_t v = 0; v < PADDED; v++)
            sum += exp((double)got[t * PADDED + v]);
        want += log(sum) - (double)got[t * PADDED + (size_t)tokens[t]];
    }
    assert_true(fabs(loss - want) < 1e-4);
    mb_gpt_destroy(m);
}

/* --- the parameter table and the start --- */

static void test_params(void **state)
{
    struct fixture *f = *state;
    struct mb_gpt_config c = tiny();
    struct mb_gpt *m = gpt_new(f, &c, 1);
    size_t n, next = 0, total = 0;
    const struct mb_param *p = mb_gpt_params(m, &n);
    assert_int_equal(n, 2 + LAYERS * 12 + 2);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(p[i].offset, next);
        assert_int_equal(p[i].offset % MB_PARAM_ALIGN, 0);
        assert_int_equal(p[i].n, p[i].shape[0] * p[i].shape[1]);
        assert_int_equal(p[i].no_weight_decay, p[i].n_dims == 1);
        next = (p[i].offset + p[i].n + MB_PARAM_ALIGN - 1) / MB_PARAM_ALIGN * MB_PARAM_ALIGN;
        total += p[i].n;
    }
    assert_int_equal(next, mb_gpt_n_elements(m));
    assert_int_equal(total, mb_gpt_n_parameters(m));
    const struct mb_param *qkv =
        param_named(m, "decoder.layers.1.self_attention.linear_qkv.weight");
    assert_int_equal(qkv->shape[0], 3 * HIDDEN);
    assert_int_equal(qkv->shape[1], HIDDEN);
    assert_int_equal(param_named(m, "decoder.layers.0.mlp.linear_fc2.bias")->n, HIDDEN);
    mb_gpt_destroy(m);
}

/* The count of a published model: 7.5B of the GPT-3 size table, without creating it (spec: 7 467
 * 786 240). */
static void test_counts(void **state)
{
    (void)state;
    assert_int_equal(mb_gpt_padded_vocab(50257, 128, 1), 50304);
    assert_int_equal(mb_gpt_padded_vocab(50257, 128, 2), 50432);
    assert_int_equal(mb_gpt_padded_vocab(50257, 128, 8), 51200);
    assert_int_equal(mb_gpt_padded_vocab(128256, 128, 1), 128256);
    struct mb_gpt_config c = tiny(); /* 7.5B: 2.853e16 a step of 288 samples */
    c.n_layers = 36;
    c.hidden = 4096;
    c.ffn_hidden = 0;
    c.n_heads = 32;
    c.seq = 2048;
    c.padded_vocab = 51200;
    assert_true(fabs(mb_gpt_flops_per_sample(&c) * 288 / 2.853e16 - 1) < 1e-3);
}

/* The published sizes: counted as the parameter table has them, no memory taken. */
static void test_published_counts(void **state)
{
    (void)state;
    static const struct {
        size_t layers, hidden, heads, count;
    } gpt3[] = {{24, 2304, 24, 1652230656},    {30, 3072, 32, 3562168320},
                {36, 4096, 32, 7467786240},    {40, 6144, 48, 18449756160},
                {48, 8192, 64, 39096041472},   {60, 10240, 80, 76050739200},
                {80, 12288, 96, 145622261760}, {96, 16384, 128, 310130540544}};
    static const struct {
        size_t layers, hidden, ffn, heads, vocab, count;
    } llama[] = {{32, 4096, 14336, 32, 128256, 8030261248},
                 {80, 8192, 28672, 64, 128256, 70553706496},
                 {80, 8192, 28672, 64, 129024, 70566289408}};
    struct mb_err err = {0};
    for (size_t i = 0; i < sizeof(gpt3) / sizeof(gpt3[0]); i++) {
        struct mb_gpt_config c;
        size_t n = 0;
        mb_gpt_config_init(&c);
        c.n_layers = gpt3[i].layers;
        c.hidden = gpt3[i].hidden;
        c.n_heads = gpt3[i].heads;
        c.seq = c.max_positions = 2048;
        c.vocab = c.padded_vocab = 51200;
        assert_int_equal(mb_gpt_count_parameters(&c, &n, &err), 0);
        assert_int_equal(n, gpt3[i].count);
    }
    for (size_t i = 0; i < sizeof(llama) / sizeof(llama[0]); i++) {
        struct mb_gpt_config c = tiny_llama();
        size_t n = 0;
        c.n_layers = llama[i].layers;
        c.hidden = llama[i].hidden;
        c.ffn_hidden = llama[i].ffn;
        c.n_heads = llama[i].heads;
        c.head_dim = 0;
        c.n_groups = 8;
        c.seq = c.max_positions = 2048;
        c.vocab = 128256;
        c.padded_vocab = llama[i].vocab;
        assert_int_equal(mb_gpt_count_parameters(&c, &n, &err), 0);
        assert_int_equal(n, llama[i].count);
    }
}

/* Frequencies of Llama 3.1 8B: transformers 5.23's ROPE_INIT_FUNCTIONS["llama3"], in double. */
static void test_rope_frequencies(void **state)
{
    (void)state;
    const struct mb_rope_config plain = {500000, 1, 1, 0, 8}, scaled = {500000, 1, 1, 1, 8};
    assert_int_equal(mb_rope_dim(&plain, 128), 128);
    for (size_t i = 0; i < 64; i++) {
        double f = pow(500000, -(double)i / 64), turns = 8192 * f / (2 * 3.14159265358979323846);
        double want = turns > 4 ? f : turns < 1 ? f / 8 : f / 8 + (f - f / 8) * (turns - 1) / 3;
        assert_true(fabs(mb_rope_frequency(&plain, 128, i) / f - 1) < 1e-14);
        assert_true(fabs(mb_rope_frequency(&scaled, 128, i) / want - 1) < 1e-12);
    }
    struct mb_rope_config half = plain;
    half.percent = 0.5;
    half.interpolation = 4;
    float cosine[3], sine[3], cosine4[9], sine4[9];
    assert_int_equal(mb_rope_dim(&half, 4), 2);
    mb_rope_tables(&half, 2, 3, cosine, sine);
    half.interpolation = 1;
    mb_rope_tables(&half, 2, 9, cosine4, sine4);
    for (size_t p = 0; p < 3; p++)
        if (p * 4 < 9)
            assert_true(fabs((double)(cosine4[p] - (float)cos((double)p))) < 1e-6 &&
                        fabs((double)(sine[p] - (float)sin((double)p / 4))) < 1e-6);
}

static double deviation(const float *x, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    return sqrt(sum / (double)n);
}

static void test_start(void **state)
{
    struct fixture *f = *state;
    struct mb_gpt_config c = tiny();
    c.hidden = 64;
    c.ffn_hidden = 0;
    c.vocab = c.padded_vocab = 1000;
    c.init_std = 0.02f;
    struct mb_gpt *m = gpt_new(f, &c, SAMPLES);
    struct tensor w = tensor_new(f, mb_gpt_n_elements(m), 0);
    f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, w.host, mb_gpt_weights(m), w.n * sizeof(float));
    synchronize(f);
    size_t n_params;
    const struct mb_param *p = mb_gpt_params(m, &n_params);
    for (size_t k = 0; k < n_params; k++) {
        const char *name = p[k].name;
        double want = 0.02, got = deviation(w.host + p[k].offset, p[k].n);
        if (strstr(name, "linear_proj.weight") || strstr(name, "linear_fc2.weight"))
            want = 0.02 / 2; /* sqrt(2 * 2 layers) */
        if (p[k].n_dims == 1)
            want = strstr(name, "bias") ? 0 : 1;
        double slack = p[k].n_dims == 1 ? 0 : 5 * want / sqrt(2.0 * (double)p[k].n);
        if (fabs(got - want) > slack)
            fail_msg("%s starts with deviation %g, expected %g", name, got, want);
    }
    int32_t *unused;
    struct mb_gpt_batch batch = {.tokens = ids_new(f, TOKENS, c.vocab, &unused),
                                 .labels = ids_new(f, TOKENS, c.vocab, &unused)};
    double loss, n;
    assert_int_equal(mb_gpt_forward(m, &batch, NULL), 0);
    assert_int_equal(mb_gpt_take_loss(m, &loss, &n, NULL), 0);
    assert_true(n == TOKENS);
    assert_true(fabs(loss / n - log(1000)) < 0.1);
    mb_gpt_destroy(m);
}

/* Rows that a padded vocabulary adds change no other weight: a seed means one model. */
static void test_start_layout(void **state)
{
    struct fixture *f = *state;
    struct mb_gpt_config c = tiny(), wide = tiny();
    wide.padded_vocab = 2 * PADDED;
    struct mb_gpt *a = gpt_new(f, &c, 1), *b = gpt_new(f, &wide, 2);
    size_t n_params;
    const struct mb_param *p = mb_gpt_params(a, &n_params);
    struct tensor wa = tensor_new(f, mb_gpt_n_elements(a), 0),
                  wb = tensor_new(f, mb_gpt_n_elements(b), 0);
    f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, wa.host, mb_gpt_weights(a),
                         wa.n * sizeof(float));
    f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, wb.host, mb_gpt_weights(b),
                         wb.n * sizeof(float));
    synchronize(f);
    for (size_t k = 0; k < n_params; k++)
        assert_memory_equal(wa.host + p[k].offset, wb.host + param_named(b, p[k].name)->offset,
                            p[k].n * sizeof(float));
    mb_gpt_destroy(a);
    mb_gpt_destroy(b);
}

/* --- training --- */

struct run {
    double losses[40];
    float weights[4096];
    size_t n_weights;
};

static void train(struct fixture *f, int steps, struct run *out)
{
    struct mb_gpt_config c = tiny();
    c.hidden_dropout = 0.1f;
    struct mb_gpt *m = gpt_new(f, &c, SAMPLES);
    struct mb_optimizer_config oc;
    struct mb_optimizer *o = NULL;
    size_t n_params;
    const struct mb_param *p = mb_gpt_params(m, &n_params);
    mb_optimizer_config_init(&oc);
    assert_int_equal(mb_optimizer_create(&f->dev, &oc, p, n_params, mb_gpt_master(m),
                                         mb_gpt_grads(m), 0, mb_gpt_n_elements(m), &o, NULL),
                     0);
    static const int32_t ids[TOKENS + 1] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5};
    struct mb_gpt_batch batch = {.tokens = ids, .labels = ids + 1};
    for (int i = 0; i < steps; i++) {
        struct mb_gpt_step step = {.grad_scale = 1.0 / TOKENS, .iteration = i + 1};
        double sum, n, norm2;
        mb_gpt_zero_grads(m);
        assert_int_equal(mb_gpt_forward_backward(m, &batch, &step, NULL), 0);
        assert_int_equal(mb_gpt_take_loss(m, &sum, &n, NULL), 0);
        assert_int_equal(mb_optimizer_squared_norm(o, &norm2, NULL), 0);
        mb_optimizer_step(o, 0.01, 0.01, mb_optimizer_clip(sqrt(norm2), 1));
        out->losses[i] = sum / n;
    }
    out->n_weights = mb_gpt_n_elements(m);
    assert_true(out->n_weights <= 4096);
    f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, out->weights, mb_gpt_weights(m),
                         out->n_weights * sizeof(float));
    synchronize(f);
    mb_optimizer_destroy(o);
    mb_gpt_destroy(m);
}

/* A fixed batch is learned, and a second run gives the same bits. */
static void test_training(void **state)
{
    static struct run a, b;
    train(*state, 40, &a);
    train(*state, 40, &b);
    if (!(a.losses[39] < 0.5 * a.losses[0]))
        fail_msg("loss went from %g to %g only", a.losses[0], a.losses[39]);
    assert_memory_equal(&a, &b, sizeof(a));
}

/* Two micro batches of one sample give what one of two gives, dropout included; grads_final covers
 * the buffer once, from its end to its start. */
struct ranges {
    size_t n_calls, at;
};

static void note_range(void *arg, size_t begin, size_t end)
{
    struct ranges *r = arg;
    assert_true(begin < end);
    assert_int_equal(end, r->at);
    r->at = begin;
    r->n_calls++;
}

static void test_micro_batches(void **state)
{
    struct fixture *f = *state;
    struct mb_gpt_config c = tiny();
    c.hidden_dropout = c.attention_dropout = 0.25f;
    struct mb_gpt *whole = gpt_new(f, &c, 2), *half = gpt_new(f, &c, 1);
    struct tensor g = tensor_new(f, mb_gpt_n_elements(whole), 0), h = tensor_new(f, g.n, 0);
    int32_t *unused;
    const int32_t *tokens = ids_new(f, TOKENS, VOCAB, &unused),
                  *labels = ids_new(f, TOKENS, VOCAB, &unused);
    struct ranges ranges = {.at = g.n};
    double sum[2], n[2];
    for (size_t i = 0; i < 2; i++) {
        struct mb_gpt_batch b = {.tokens = tokens + i * SEQ, .labels = labels + i * SEQ};
        struct mb_gpt_step s = {.grad_scale = 0.1, .iteration = 3, .first_sample = 4 + i};
        assert_int_equal(mb_gpt_forward_backward(half, &b, &s, NULL), 0);
    }
    struct mb_gpt_batch b = {.tokens = tokens, .labels = labels};
    struct mb_gpt_step s = {.grad_scale = 0.1,
                            .iteration = 3,
                            .first_sample = 4,
                            .grads_final = note_range,
                            .arg = &ranges};
    assert_int_equal(mb_gpt_forward_backward(whole, &b, &s, NULL), 0);
    assert_int_equal(ranges.at, 0);
    assert_int_equal(ranges.n_calls, LAYERS + 2);
    assert_int_equal(mb_gpt_take_loss(whole, &sum[0], &n[0], NULL), 0);
    assert_int_equal(mb_gpt_take_loss(half, &sum[1], &n[1], NULL), 0);
    assert_true(n[0] == n[1] && fabs(sum[0] - sum[1]) < 1e-5);
    f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, g.host, mb_gpt_grads(whole),
                         g.n * sizeof(float));
    f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, h.host, mb_gpt_grads(half),
                         g.n * sizeof(float));
    synchronize(f);
    for (size_t i = 0; i < g.n; i++)
        g.ref[i] = (double)g.host[i];
    assert_close("gradients of two micro batches", h.host, g.ref, g.n, 1e-5);
    mb_gpt_destroy(whole);
    mb_gpt_destroy(half);
}

static void expect_refused(struct fixture *f, const struct mb_gpt_config *c, size_t micro_batch,
                           const char *text)
{
    struct mb_gpt *m = NULL;
    struct mb_err err = {0};
    assert_int_equal(mb_gpt_create(&f->dev, c, micro_batch, &m, &err), MB_EINVAL);
    assert_null(m);
    if (strstr(err.text, text) == NULL)
        fail_msg("'%s' does not say '%s'", err.text, text);
}

/* Layers that compute forward again give the same bits, dropout included, with less memory. */
static void test_recompute(void **state)
{
    struct fixture *f = *state;
    struct mb_gpt_config c = tiny_llama();
    if (f->dev.ops->features == 0)
        c = tiny();
    c.n_layers = 4;
    c.hidden_dropout = c.attention_dropout = 0.25f;
    int32_t *unused;
    const int32_t *tokens = ids_new(f, TOKENS, VOCAB, &unused);
    struct mb_gpt_batch batch = {.tokens = tokens, .labels = tokens};
    struct mb_gpt_step step = {.grad_scale = 0.1, .iteration = 3};
    struct tensor want = {0};
    size_t bytes[5];
    for (size_t layers = 0; layers <= 4; layers++) {
        double loss, n;
        c.recompute_layers = layers;
        struct mb_gpt *m = gpt_new(f, &c, SAMPLES);
        struct tensor g = tensor_new(f, mb_gpt_n_elements(m), 0);
        struct mb_gpt_sizes sizes;
        assert_int_equal(mb_gpt_forward_backward(m, &batch, &step, NULL), 0);
        assert_int_equal(mb_gpt_take_loss(m, &loss, &n, NULL), 0);
        f->dev.ops->copy_out(f->dev.ctx, f->dev.stream, g.host, mb_gpt_grads(m),
                             g.n * sizeof(float));
        synchronize(f);
        want = layers == 0 ? g : want;
        assert_memory_equal(g.host, want.host, g.n * sizeof(float));
        assert_int_equal(mb_gpt_measure(&f->dev, &c, SAMPLES, &sizes, NULL), 0);
        bytes[layers] = (size_t)sizes.total_bytes;
        assert_true(layers < 2 ? bytes[layers] == bytes[0] : bytes[layers] < bytes[layers - 1]);
        mb_gpt_destroy(m);
    }
    c.recompute_layers = 5;
    expect_refused(f, &c, 1, "5 layers are recomputed, the model has 4");
}

/* --- refusals --- */

#define REFUSED(field, value, text)                                                                \
    do {                                                                                           \
        struct mb_gpt_config c_ = tiny();                                                          \
        c_.field = value;                                                                          \
        expect_refused(*state, &c_, 1, text);                                                      \
    } while (0)

static void test_refusals(void **state)
{
    REFUSED(n_heads, 5, "number of attention heads (5) must divide hidden size (8)");
    REFUSED(n_groups, 3, "number of query groups (3) must divide number of attention heads (4)");
    REFUSED(n_layers, 0, "number of layers is 0");
    REFUSED(hidden, 0, "hidden size is 0");
    REFUSED(n_heads, 0, "number of attention heads is 0");
    REFUSED(vocab, 0, "vocabulary size is 0");
    REFUSED(seq, (size_t)1 << 40, "sequence length is 1099511627776");
    REFUSED(seq, 7, "max position embeddings (6) must be at least the sequence length (7)");
    REFUSED(n_layers, 100000, "number of layers is 100000 and must lie in [1, 65536]");
    REFUSED(hidden, (size_t)1 << 28, "parameters: at most");
    REFUSED(padded_vocab, 10, "padded vocabulary (10) must be at least the vocabulary (11)");
    REFUSED(hidden_dropout, 1, "hidden dropout is 1");
    REFUSED(attention_dropout, -0.1f, "attention dropout is -0.1");
    REFUSED(norm_eps, 0, "norm epsilon is 0");
    REFUSED(init_std, NAN, "init method std is nan");
    struct mb_gpt_config rope = tiny_llama();
    rope.rope.percent = 0.5;
    expect_refused(*state, &rope, 1, "rotary percent 0.5 of 6 channels of a head is 3 channels");
    rope.rope = (struct mb_rope_config){-1, 1, 1, 0, 8};
    expect_refused(*state, &rope, 1, "rotary base is -1");
    rope.rope = (struct mb_rope_config){1e4, 1.5, 1, 0, 8};
    expect_refused(*state, &rope, 1, "rotary percent is 1.5");
    struct mb_gpt_config c = tiny();
    expect_refused(*state, &c, 0, "micro batch size is 0");
}

static void test_bad_batch(void **state)
{
    struct fixture *f = *state;
    struct mb_gpt_config c = tiny();
    struct mb_gpt *m = gpt_new(f, &c, SAMPLES);
    int32_t ids[TOKENS] = {0}, bad[TOKENS] = {0};
    struct mb_err err = {0};
    double loss, n;
    bad[7] = VOCAB; /* a row of the padding: no token of the tokenizer */
    struct mb_gpt_batch b = {.tokens = ids, .labels = bad};
    assert_int_equal(mb_gpt_forward(m, &b, &err), MB_EINVAL);
    assert_string_equal(err.text,
                        "label 11 at sample 1, position 2 is outside the vocabulary of 11");
    b = (struct mb_gpt_batch){.tokens = bad, .labels = ids};
    bad[7] = -1;
    assert_int_equal(mb_gpt_forward(m, &b, &err), MB_EINVAL);
    assert_int_equal(mb_gpt_take_loss(m, &loss, &n, &err), 0);
    assert_true(loss == 0 && n == 0);
    mb_gpt_destroy(m);
}

/* What cannot fit is refused with its size before anything is taken. */
static void test_too_large(void **state)
{
    struct fixture *f = *state;
    struct mb_gpt *m = NULL;
    struct mb_err err = {0};
    struct mb_gpt_config c = tiny();
    c.hidden = 1 << 20;
    assert_int_equal(mb_gpt_create(&f->dev, &c, 1, &m, &err), MB_ENOMEM);
    assert_non_null(strstr(err.text, "the model needs "));
    assert_non_null(strstr(err.text, "are asked for, "));
    c = tiny();
    c.hidden = c.n_heads = 1;
    c.n_layers = 1 << 16;
    c.ffn_hidden = 1 << 30;
    assert_int_equal(mb_gpt_create(&f->dev, &c, ((size_t)1 << 30) / SEQ, &m, &err), MB_ENOMEM);
    assert_non_null(
        strstr(err.text, "bytes of device memory with micro batches of 214748364 samples"));
    assert_null(m);
}

/* Every part of the plan by name; a shape that is refused has none, a shape for no machine has one.
 */
static void test_plan(void **state)
{
    struct fixture *f = *state;
    struct mb_gpt_config c = tiny();
    struct mb_gpt_sizes s;
    struct mb_err err = {0};
    double sum = 0;
    int n_found = 0;
    assert_int_equal(mb_gpt_measure(&f->dev, &c, 1, &s, &err), 0);
    for (size_t i = 0; i < s.n_parts; i++) {
        sum += (double)s.parts[i].size_bytes;
        n_found += strcmp(s.parts[i].name, "weights") == 0 ||
                   strcmp(s.parts[i].name, "gradients") == 0 ||
                   strcmp(s.parts[i].name, "scratch: output and loss") == 0;
    }
    assert_int_equal(n_found, 3);
    assert_true(sum == s.total_bytes);
    struct mb_gpt *m = gpt_new(f, &c, 1);
    assert_int_equal(s.n_elements, mb_gpt_n_elements(m));
    mb_gpt_destroy(m);
    c.hidden = 1 << 20;
    assert_int_equal(mb_gpt_measure(&f->dev, &c, 1, &s, &err), 0);
    assert_true(s.total_bytes > 1e13);
    c.hidden = 7;
    assert_int_equal(mb_gpt_measure(&f->dev, &c, 1, &s, &err), MB_EINVAL);
}

/* Of a rank that shares the model: parts of it, and never less than a rank needs. */
static void test_plan_of_shares(void **state)
{
    struct fixture *f = *state;
    struct mb_gpt_config c = tiny();
    struct mb_gpt_sizes whole, part;
    assert_int_equal(mb_gpt_measure(&f->dev, &c, 2, &whole, NULL), 0);
    c.n_tensor_parts = 2;
    assert_int_equal(mb_gpt_measure(&f->dev, &c, 2, &part, NULL), 0);
    assert_in_range(part.n_elements, whole.n_elements / 2, whole.n_elements * 3 / 4);
    assert_true(part.total_bytes < whole.total_bytes);
    c.n_tensor_parts = 1;
    c.n_stages = 2;
    c.n_in_flight = 2;
    assert_int_equal(mb_gpt_measure(&f->dev, &c, 2, &part, NULL), 0);
    assert_true(part.n_elements < whole.n_elements);
    c.n_tensor_parts = 5;
    assert_int_equal(mb_gpt_measure(&f->dev, &c, 2, &part, NULL), MB_EINVAL);
}

static void test_allocation_failures(void **state)
{
    struct fixture *f = *state;
    struct mb_gpt_config c = tiny();
    for (unsigned long nth = 1;; nth++) {
        struct mb_gpt *m = NULL;
        struct mb_err err = {0};
        mb_alloc_fail_nth(nth);
        int rc = mb_gpt_create(&f->dev, &c, 1, &m, &err);
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (!failed) {
            assert_int_equal(rc, 0);
            mb_gpt_destroy(m);
            assert_true(nth > 4);
            break;
        }
        assert_int_equal(rc, MB_ENOMEM);
        assert_null(m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        FIXTURE_TEST(test_gradients),
        FIXTURE_TEST(test_gradients_dropout),
        FIXTURE_TEST(test_gradients_untied_groups_erf),
        FIXTURE_TEST(test_gradients_llama),
        FIXTURE_TEST(test_gradients_1p),
        FIXTURE_TEST(test_missing_operations),
        FIXTURE_TEST(test_logits),
        cmocka_unit_test(test_published_counts),
        cmocka_unit_test(test_rope_frequencies),
        FIXTURE_TEST(test_params),
        cmocka_unit_test(test_counts),
        FIXTURE_TEST(test_start),
        FIXTURE_TEST(test_start_layout),
        FIXTURE_TEST(test_training),
        FIXTURE_TEST(test_micro_batches),
        FIXTURE_TEST(test_recompute),
        FIXTURE_TEST(test_refusals),
        FIXTURE_TEST(test_bad_batch),
        FIXTURE_TEST(test_too_large),
        FIXTURE_TEST(test_plan),
        FIXTURE_TEST(test_plan_of_shares),
        FIXTURE_TEST(test_allocation_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
