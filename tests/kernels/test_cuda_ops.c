/*
 * Every operation of the CUDA backend against the CPU's, in fp32, bf16 and fp16, at the shapes that
 * its kernels tell apart: rows that fit registers and others, vectors and odd ends, matrix units
 * and plain arithmetic. Bounds of the relative error: fp32 2e-6 forward, 1e-5 for what sums over
 * many rows; bf16 4e-3 forward (its rounding is 2e-3 of an element) and 1e-2 for gradients, fp16 an
 * eighth of that. The CPU's operations in fp16 are compared with its own in fp32, too.
 */
#include "twin.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"

/* ---- weights in halves ---- */

static void assert_same_bits(struct twin *t, const void *a, const void *b, size_t n)
{
    float *host = mb_calloc(2 * n, sizeof(*host));
    assert_non_null(host);
    t->gpu.ops->copy_out(t->gpu.ctx, t->gpu.stream, host, a, n * sizeof(*host));
    t->gpu.ops->copy_out(t->gpu.ctx, t->gpu.stream, host + n, b, n * sizeof(*host));
    twin_synchronize(t);
    assert_memory_equal(host, host + n, n * sizeof(*host));
    mb_free(host);
}

/* A copy on the same device. */
static float *copy_of(struct twin *t, const float *x, size_t n)
{
    float *host = mb_calloc(n, sizeof(*host)), *copy = twin_memory(&t->gpu, n * sizeof(*host));
    assert_non_null(host);
    t->gpu.ops->copy_out(t->gpu.ctx, t->gpu.stream, host, x, n * sizeof(*host));
    twin_synchronize(t);
    t->gpu.ops->copy_in(t->gpu.ctx, t->gpu.stream, copy, host, n * sizeof(*host));
    twin_synchronize(t);
    mb_free(host);
    return copy;
}

/* x, on the GPU, in halves there. */
static void halve(struct twin *t, const float *x, size_t n, uint16_t **upper, uint16_t **lower)
{
    *upper = twin_memory(&t->gpu, n * sizeof(**upper));
    *lower = twin_memory(&t->gpu, n * sizeof(**lower));
    t->gpu.ops->split(t->gpu.ctx, t->gpu.stream, *upper, *lower, x, n);
}

/* ---- embedding ---- */

static const struct {
    size_t n_tokens, seq, hidden, vocab;
    int alone; /* without positions, as Llama's */
} EMBEDDINGS[] = {{1024, 256, 768, 5000, 0},
                  {77, 11, 33, 7, 0},
                  {300, 300, 64, 100, 0},
                  {200, 100, 64, 50, 1},
                  {200, 100, 33, 50, 1}};

/* Bit for bit what the weights give that are not in halves. */
static void check_embedding_in_halves(struct twin *t, struct mb_embedding_forward a,
                                      size_t n_token_weights, size_t n_position_weights)
{
    const size_t size = a.n_tokens * a.hidden * mb_dtype_size(a.dtype);
    char *host = mb_calloc(2, size);
    uint16_t *upper, *lower;
    assert_non_null(host);
    t->gpu.ops->copy_out(t->gpu.ctx, t->gpu.stream, host, a.out, size);
    t->gpu.ops->zero(t->gpu.ctx, t->gpu.stream, a.out, size);
    halve(t, a.token_weight, n_token_weights, &upper, &lower);
    a.token_upper = upper;
    a.token_lower = lower;
    if (a.position_weight != NULL) {
        halve(t, a.position_weight, n_position_weights, &upper, &lower);
        a.position_upper = upper;
        a.position_lower = lower;
    }
    a.token_weight = a.position_weight = NULL;
    t->gpu.ops->embedding_forward(t->gpu.ctx, t->gpu.stream, &a);
    t->gpu.ops->copy_out(t->gpu.ctx, t->gpu.stream, host + size, a.out, size);
    twin_synchronize(t);
    assert_memory_equal(host, host + size, size);
    mb_free(host);
}

static void check_embedding(struct twin *t, size_t k)
{
    const size_t n = EMBEDDINGS[k].n_tokens, seq = EMBEDDINGS[k].seq, h = EMBEDDINGS[k].hidden,
                 vocab = EMBEDDINGS[k].vocab;
    const int alone = EMBEDDINGS[k].alone;
    int32_t *cpu, *gpu;
    if (twin_is_slow(t, vocab * h))
        return;
    pair_ids(t, n, vocab, &cpu, &gpu);
    struct pair wt = pair_input_f32(t, vocab * h, 1), wp = pair_input_f32(t, seq * h, 1),
                out = pair_output(t, n * h), d_out = pair_input(t, n * h, 1),
                d_wt = pair_input_f32(t, vocab * h, 1), d_wp = pair_input_f32(t, seq * h, 1);
    struct mb_embedding_forward a = {.token = cpu,
                                     .token_weight = wt.cpu,
                                     .position_weight = alone ? NULL : wp.cpu,
                                     .out = out.cpu,
                                     .n_tokens = n,
                                     .seq = seq,
                                     .hidden = h,
                                     .vocab = vocab},
                                b = a;
    b.token = gpu;
    b.token_weight = wt.gpu;
    b.position_weight = alone ? NULL : wp.gpu;
    b.out = out.gpu;
    b.dtype = t->dtype;
    RUN(t, embedding_forward, a, b);
    assert_pair(t, "embedding", &out, twin_bound(t, 1e-7, 4e-3));
    check_embedding_in_halves(t, b, vocab * h, seq * h);
    struct mb_embedding_backward c = {.token = cpu,
                                      .d_out = d_out.cpu,
                                      .d_token_weight = d_wt.cpu,
                                      .d_position_weight = alone ? NULL : d_wp.cpu,
                                      .n_tokens = n,
                                      .seq = seq,
                                      .hidden = h,
                                      .vocab = vocab},
                                 d = c;
    d.token = gpu;
    d.d_out = d_out.gpu;
    d.d_token_weight = d_wt.gpu;
    d.d_position_weight = alone ? NULL : d_wp.gpu;
    d.dtype = t->dtype;
    RUN(t, embedding_backward, c, d);
    assert_pair(t, "token embedding gradient", &d_wt, 2e-6);
    assert_pair(t, "position embedding gradient", &d_wp, 2e-6); /* alone: what was there */
}

static void test_embedding(void **state)
{
    twin_in_all(*state, check_embedding, COUNT(EMBEDDINGS));
}

/* ---- layernorm ---- */

static const size_t NORMS[][2] = {{2000, 768}, {33, 256}, {129, 1024}, {65, 512},
                                  {50, 128},   {7, 33},   {40, 1600},  {17, 4096}};

static void check_layernorm(struct twin *t, size_t k)
{
    const size_t rows = NORMS[k][0], h = NORMS[k][1];
    if (twin_is_slow(t, rows * h))
        return;
    struct pair x = pair_input(t, rows * h, 3), w = pair_input_f32(t, h, 1),
                bias = pair_input_f32(t, h, 1), out = pair_output(t, rows * h),
                mean = pair_output_f32(t, rows), rstd = pair_output_f32(t, rows),
                d_out = pair_input(t, rows * h, 1), d_x = pair_input(t, rows * h, 1),
                d_w = pair_input_f32(t, h, 1), d_b = pair_input_f32(t, h, 1),
                d_x_sum = pair_input_f32(t, h, 1);
    struct mb_layernorm_forward a = {.x = x.cpu,
                                     .weight = w.cpu,
                                     .bias = bias.cpu,
                                     .out = out.cpu,
                                     .mean = mean.cpu,
                                     .rstd = rstd.cpu,
                                     .n_rows = rows,
                                     .hidden = h,
                                     .eps = 1e-5f};
    struct mb_layernorm_forward b = {.x = x.gpu,
                                     .weight = w.gpu,
                                     .bias = bias.gpu,
                                     .out = out.gpu,
                                     .mean = mean.gpu,
                                     .rstd = rstd.gpu,
                                     .n_rows = rows,
                                     .hidden = h,
                                     .eps = 1e-5f,
                                     .dtype = t->dtype};
    RUN(t, layernorm_forward, a, b);
    assert_pair(t, "layernorm", &out, twin_bound(t, 2e-6, 4e-3));
    assert_pair(t, "layernorm mean", &mean, 1e-5);
    assert_pair(t, "layernorm rstd", &rstd, 2e-6);
    struct mb_layernorm_backward c = {.x = x.cpu,
                                      .weight = w.cpu,
                                      .mean = mean.cpu,
                                      .rstd = rstd.cpu,
                                      .d_out = d_out.cpu,
                                      .d_x = d_x.cpu,
                                      .d_weight = d_w.cpu,
                                      .d_bias = d_b.cpu,
                                      .d_x_sum = k % 3 == 2 ? NULL : d_x_sum.cpu,
                                      .n_rows = rows,
                                      .hidden = h};
    struct mb_layernorm_backward d = {.x = x.gpu,
                                      .weight = w.gpu,
                                      .mean = mean.gpu,
                                      .rstd = rstd.gpu,
                                      .d_out = d_out.gpu,
                                      .d_x = d_x.gpu,
                                      .d_weight = d_w.gpu,
                                      .d_bias = d_b.gpu,
                                      .d_x_sum = k % 3 == 2 ? NULL : d_x_sum.gpu,
                                      .n_rows = rows,
                                      .hidden = h,
                                      .dtype = t->dtype};
    RUN(t, layernorm_backward, c, d);
    assert_pair(t, "layernorm d_x", &d_x, twin_bound(t, 1e-5, 4e-3));
    assert_pair(t, "layernorm d_weight", &d_w, 1e-5);
    assert_pair(t, "layernorm d_bias", &d_b, 1e-5);
    assert_pair(t, "layernorm sum of d_x", &d_x_sum, twin_bound(t, 1e-5, 4e-3));
}

static void test_layernorm(void **state)
{
    twin_in_all(*state, check_layernorm, COUNT(NORMS));
}

/* ---- linear ---- */

static const struct {
    size_t rows, n_in, n_out;
    int bias, residual, gelu;
    enum mb_gelu_form form;
} LINEARS[] = {{512, 768, 2304, 1, 0, 0, MB_GELU_TANH}, {512, 768, 768, 1, 1, 0, MB_GELU_TANH},
               {512, 768, 3072, 1, 0, 1, MB_GELU_TANH}, {256, 512, 256, 1, 0, 1, MB_GELU_ERF},
               {17, 33, 5, 1, 0, 0, MB_GELU_TANH},      {9, 16, 12, 0, 1, 0, MB_GELU_TANH},
               {65, 40, 24, 0, 0, 1, MB_GELU_TANH},     {31, 7, 9, 1, 0, 1, MB_GELU_TANH}};

static void check_linear(struct twin *t, size_t k)
{
    const size_t rows = LINEARS[k].rows, n_in = LINEARS[k].n_in, n_out = LINEARS[k].n_out;
    const double scale = 1 / sqrt((double)n_in);
    if (twin_is_slow(t, rows * n_out))
        return;
    struct pair x = pair_input(t, rows * n_in, 1), w = pair_input(t, n_out * n_in, 2 * scale),
                bias = pair_input(t, n_out, 1), residual = pair_input(t, rows * n_out, 1),
                out = pair_output(t, rows * n_out), gelu = pair_output(t, rows * n_out);
    struct mb_linear_forward a = {.x = x.cpu,
                                  .weight = w.cpu,
                                  .bias = LINEARS[k].bias ? bias.cpu : NULL,
                                  .residual = LINEARS[k].residual ? residual.cpu : NULL,
                                  .out = out.cpu,
                                  .gelu_out = LINEARS[k].gelu ? gelu.cpu : NULL,
                                  .n_rows = rows,
                                  .n_in = n_in,
                                  .n_out = n_out,
                                  .form = LINEARS[k].form};
    struct mb_linear_forward b = a;
    b.x = x.gpu;
    b.weight = w.gpu;
    b.bias = LINEARS[k].bias ? bias.gpu : NULL;
    b.residual = LINEARS[k].residual ? residual.gpu : NULL;
    b.out = out.gpu;
    b.gelu_out = LINEARS[k].gelu ? gelu.gpu : NULL;
    b.dtype = t->dtype;
    RUN(t, linear_forward, a, b);
    assert_pair(t, "linear", &out, twin_bound(t, 2e-6, 4e-3));
    if (LINEARS[k].gelu)
        assert_pair(t, "linear, gelu", &gelu, twin_bound(t, 2e-6, 5e-3));
}

/* x is given by itself, not as gelu(gelu_x): backward does not care. */
static void check_linear_backward(struct twin *t, size_t k)
{
    const size_t rows = LINEARS[k].rows, n_in = LINEARS[k].n_in, n_out = LINEARS[k].n_out;
    if (twin_is_slow(t, rows * n_out))
        return;
    struct pair x = pair_input(t, rows * n_in, 1), gelu_x = pair_input(t, rows * n_in, 3),
                w = pair_input(t, n_out * n_in, 1 / sqrt((double)n_in)),
                d_out = pair_input(t, rows * n_out, 1), d_x = pair_output(t, rows * n_in),
                d_w = k % 2 ? pair_output_f32(t, n_out * n_in) : pair_input_f32(t, n_out * n_in, 1),
                d_b = pair_input_f32(t, n_out, 1);
    struct mb_linear_backward a = {.x = x.cpu,
                                   .gelu_x = LINEARS[k].gelu ? gelu_x.cpu : NULL,
                                   .weight = w.cpu,
                                   .d_out = d_out.cpu,
                                   .d_x = d_x.cpu,
                                   .d_weight = d_w.cpu,
                                   .sets_d_weight = k % 2,
                                   .d_bias = LINEARS[k].bias ? d_b.cpu : NULL,
                                   .n_rows = rows,
                                   .n_in = n_in,
                                   .n_out = n_out,
                                   .form = LINEARS[k].form};
    struct mb_linear_backward b = a;
    b.x = x.gpu;
    b.gelu_x = LINEARS[k].gelu ? gelu_x.gpu : NULL;
    b.weight = w.gpu;
    b.d_out = d_out.gpu;
    b.d_x = d_x.gpu;
    b.d_weight = d_w.gpu;
    b.d_bias = LINEARS[k].bias ? d_b.gpu : NULL;
    b.dtype = t->dtype;
    RUN(t, linear_backward, a, b);
    assert_pair(t, "linear d_x", &d_x, twin_bound(t, 2e-6, 5e-3));
    assert_pair(t, "linear d_weight", &d_w, 1e-5);
    assert_pair(t, "linear d_bias", &d_b, 1e-5);
}

static void test_linear(void **state)
{
    twin_in_all(*state, check_linear, COUNT(LINEARS));
    twin_in_all(*state, check_linear_backward, COUNT(LINEARS));
}

/* ---- gelu, dropout ---- */

static void check_gelu(struct twin *t, size_t k)
{
    static const size_t sizes[] = {4096, 1003};
    struct pair x = pair_input(t, sizes[k / 2], 5), d_out = pair_input(t, x.n, 1),
                out = pair_output(t, x.n), d_x = pair_output(t, x.n);
    struct mb_gelu a = {.x = x.cpu, .out = out.cpu, .n = x.n}, b = a;
    a.form = k % 2 ? MB_GELU_ERF : MB_GELU_TANH;
    b = (struct mb_gelu){.x = x.gpu, .out = out.gpu, .n = x.n, .form = a.form, .dtype = t->dtype};
    RUN(t, gelu_forward, a, b);
    assert_pair(t, "gelu", &out, twin_bound(t, 1e-6, 4e-3));
    a.d_out = d_out.cpu;
    a.out = d_x.cpu;
    b.d_out = d_out.gpu;
    b.out = d_x.gpu;
    RUN(t, gelu_backward, a, b);
    assert_pair(t, "gelu d_x", &d_x, twin_bound(t, 2e-6, 4e-3));
}

static void test_gelu(void **state)
{
    twin_in_all(*state, check_gelu, 4);
}

static void check_dropout(struct twin *t, size_t k)
{
    static const struct {
        size_t n;
        uint64_t first;
        float probability;
        int residual;
    } cases[] = {
        {50000, 0, 0.1f, 1}, {1027, 4294967291u, 0.5f, 0}, {3, 2, 0.3f, 1}, {777, 5, 0, 1}};
    struct pair x = pair_input(t, cases[k].n, 1), residual = pair_input(t, x.n, 1),
                out = pair_output(t, x.n);
    struct mb_dropout_add a = {.x = x.cpu,
                               .residual = cases[k].residual ? residual.cpu : NULL,
                               .out = out.cpu,
                               .n = x.n,
                               .dropout = {.seed = t->seed,
                                           .iteration = 7,
                                           .site = 5,
                                           .first_element = cases[k].first,
                                           .probability = cases[k].probability}},
                          b = a;
    b.x = x.gpu;
    b.residual = cases[k].residual ? residual.gpu : NULL;
    b.out = out.gpu;
    b.dtype = t->dtype;
    RUN(t, dropout_add, a, b);
    assert_pair(t, "dropout_add", &out, twin_bound(t, 1e-7, 4e-3));
}

static void test_dropout(void **state)
{
    twin_in_all(*state, check_dropout, 4);
}

/* ---- attention ---- */

static const struct {
    struct mb_attention_shape shape; /* samples, seq, heads, groups, head_dim */
    float dropout;
} ATTENTIONS[] = {{{2, 256, 3, 3, 64}, 0},    {{1, 1000, 2, 2, 64}, 0}, {{2, 65, 4, 2, 64}, 0},
                  {{1, 130, 2, 1, 64}, 0.2f}, {{1, 1, 1, 1, 64}, 0},    {{1, 256, 2, 2, 128}, 0},
                  {{2, 99, 4, 1, 128}, 0.1f}, {{1, 40, 3, 3, 80}, 0},   {{2, 33, 4, 2, 24}, 0.1f},
                  {{1, 70, 2, 2, 256}, 0},    {{1, 515, 1, 1, 128}, 0}, {{3, 64, 2, 2, 64}, 0.5f},
                  {{4095, 2, 16, 16, 64}, 0}, {{4095, 3, 16, 8, 8}, 0}, {{2, 264, 8, 2, 128}, 0},
                  {{3, 136, 6, 3, 64}, 0},    {{2, 192, 4, 4, 96}, 0}};

static void check_attention(struct twin *t, size_t k)
{
    const struct mb_attention_shape *s = &ATTENTIONS[k].shape;
    const size_t rows = s->n_samples * s->seq;
    const size_t n_qkv = rows * (s->n_heads + 2 * s->n_groups) * s->head_dim;
    if (twin_is_slow(t, n_qkv))
        return;
    struct pair qkv = pair_input(t, n_qkv, 2),
                out = pair_output(t, rows * s->n_heads * s->head_dim),
                log_sum = pair_output_f32(t, rows * s->n_heads), d_out = pair_input(t, out.n, 1),
                d_qkv = pair_output(t, n_qkv);
    struct mb_attention_forward a = {
        .shape = *s,
        .qkv = qkv.cpu,
        .out = out.cpu,
        .log_sum = log_sum.cpu,
        .scratch = twin_memory(&t->cpu, sizeof(float) * t->cpu.ops->attention_scratch(s)),
        .dropout = {.seed = t->seed,
                    .iteration = 4,
                    .site = 3,
                    .first_element = k, /* also where blocks of four are cut */
                    .probability = ATTENTIONS[k].dropout}};
    struct mb_attention_forward b = a;
    b.qkv = qkv.gpu;
    b.out = out.gpu;
    b.log_sum = log_sum.gpu;
    b.scratch = twin_memory(&t->gpu, sizeof(float) * t->gpu.ops->attention_scratch(s));
    b.dtype = t->dtype;
    RUN(t, attention_forward, a, b);
    printf(" %zu samples, seq %zu, %zu heads, %zu groups, %zu channels, dropout %g\n", s->n_samples,
           s->seq, s->n_heads, s->n_groups, s->head_dim, (double)ATTENTIONS[k].dropout);
    assert_pair(t, "attention", &out, twin_bound(t, 2e-6, 5e-3));
    assert_pair_from(t, "attention log_sum", &log_sum, twin_bound(t, 2e-6, 1e-4), 1);
    struct mb_attention_backward c = {.shape = *s,
                                      .qkv = qkv.cpu,
                                      .out = out.cpu,
                                      .log_sum = log_sum.cpu,
                                      .d_out = d_out.cpu,
                                      .d_qkv = d_qkv.cpu,
                                      .scratch = a.scratch,
                                      .dropout = a.dropout};
    struct mb_attention_backward d = c;
    d.qkv = qkv.gpu;
    d.out = out.gpu;
    d.log_sum = log_sum.gpu;
    d.d_out = d_out.gpu;
    d.d_qkv = d_qkv.gpu;
    d.scratch = b.scratch;
    d.dtype = t->dtype;
    RUN(t, attention_backward, c, d);
    assert_pair(t, "attention d_qkv", &d_qkv, twin_bound(t, 1e-5, 1e-2));
}

static void test_attention(void **state)
{
    twin_in_all(*state, check_attention, COUNT(ATTENTIONS));
}

static void test_attention_too_large(void **state)
{
    struct twin *t = *state;
    struct mb_err err = {0};
    struct mb_attention_forward a = {.shape = {1, 1, 1, 1, 264}};
    if (twin_is_cpu(t))
        skip(); /* it takes all */
    t->gpu.ops->attention_forward(t->gpu.ctx, t->gpu.stream, &a);
    assert_int_equal(t->gpu.ops->synchronize(t->gpu.ctx, t->gpu.stream, &err), MB_EUNSUPPORTED);
    assert_non_null(strstr(err.text, "a head of 264 channels"));
    a.shape = (struct mb_attention_shape){4096, 1, 16, 16, 64};
    t->gpu.ops->attention_forward(t->gpu.ctx, t->gpu.stream, &a);
    assert_int_equal(t->gpu.ops->synchronize(t->gpu.ctx, t->gpu.stream, &err), MB_EUNSUPPORTED);
    assert_non_null(
        strstr(err.text, "4096 samples with 16 heads: the GPU's attention has at most 65535"));
}

/* ---- cross entropy ---- */

static const size_t LOSSES[][3] = {{600, 256, 50304}, {64, 768, 1000},    {33, 31, 1003},
                                   {5, 8, 3},         {12000, 64, 50304}, {70, 16, 128256},
                                   {3, 4, 50304},     {2, 2, 128256}};

static void check_cross_entropy(struct twin *t, size_t k)
{
    const size_t n = LOSSES[k][0], h = LOSSES[k][1], vocab = LOSSES[k][2];
    int32_t *cpu, *gpu;
    if (twin_is_slow(t, vocab * h) || twin_is_slow(t, n * vocab) ||
        (n * vocab > 100000000 && t->dtype == MB_DTYPE_F32))
        return; /* more than one chunk: once is enough for the CPU's patience */
    pair_ids(t, n, vocab, &cpu, &gpu);
    struct pair x = pair_input(t, n * h, 2), w = pair_input(t, vocab * h, 1 / sqrt((double)h)),
                mask = pair_zeros_f32(t, n), d_x = pair_output(t, n * h),
                d_w = k % 2 ? pair_output_f32(t, vocab * h) : pair_input_f32(t, vocab * h, 1e-3);
    for (size_t i = 0; i < n; i++)
        mask.cpu[i] = i % 5 != 4;
    pair_upload_f32(t, &mask);
    double sum_cpu = 1, sum_gpu = 1, *sum = twin_memory(&t->gpu, sizeof(*sum));
    t->gpu.ops->copy_in(t->gpu.ctx, t->gpu.stream, sum, &sum_gpu, sizeof(*sum));
    struct mb_cross_entropy a = {
        .x = x.cpu,
        .weight = w.cpu,
        .label = cpu,
        .mask = mask.cpu,
        .loss_sum = &sum_cpu,
        .d_x = d_x.cpu,
        .d_weight = d_w.cpu,
        .sets_d_weight = k % 2,
        .scratch = twin_memory(&t->cpu, 4 * t->cpu.ops->cross_entropy_scratch(n, h, vocab)),
        .n_tokens = n,
        .hidden = h,
        .vocab = vocab,
        .grad_scale = t->dtype == MB_DTYPE_F16 ? 64 : 0.01f}; /* fp16 has no small numbers */
    struct mb_cross_entropy b = a;
    b.x = x.gpu;
    b.weight = w.gpu;
    b.label = gpu;
    b.mask = mask.gpu;
    b.loss_sum = sum;
    b.d_x = d_x.gpu;
    b.d_weight = d_w.gpu;
    b.scratch = twin_memory(&t->gpu, 4 * t->gpu.ops->cross_entropy_scratch(n, h, vocab));
    b.dtype = t->dtype;
    RUN(t, cross_entropy, a, b);
    assert_pair(t, "cross entropy d_x", &d_x, twin_bound(t, 2e-5, 1e-2));
    assert_pair(t, "cross entropy d_weight", &d_w, twin_bound(t, 2e-5, 1e-2));
    t->gpu.ops->copy_out(t->gpu.ctx, t->gpu.stream, &sum_gpu, sum, sizeof(*sum));
    twin_synchronize(t);
    double error = fabs(sum_gpu - sum_cpu) / fabs(sum_cpu);
    printf("  %-28s relative error %.2e\n", "cross entropy loss", error);
    if (!(error <= twin_bound(t, 2e-6, 1e-3)))
        fail_msg("cross entropy of %zu tokens: %.9g, expected %.9g", n, sum_gpu, sum_cpu);
    t->gpu.ops->free(t->gpu.ctx, b.scratch);
}

static void test_cross_entropy(void **state)
{
    twin_in_all(*state, check_cross_entropy, COUNT(LOSSES));
}

/* A bad label fails the stream, once, with the row that came first. */
static void test_bad_label(void **state)
{
    struct twin *t = *state;
    int32_t *cpu, *gpu;
    struct mb_err err = {0};
    pair_ids(t, 64, 10, &cpu, &gpu);
    cpu[40] = 10;
    cpu[63] = -1;
    t->gpu.ops->copy_in(t->gpu.ctx, t->gpu.stream, gpu, cpu, 64 * sizeof(int32_t));
    t->dtype = MB_DTYPE_F16;
    struct pair x = pair_input(t, 64 * 8, 1), w = pair_input(t, 10 * 8, 1),
                mask = pair_input_f32(t, 64, 1);
    struct mb_cross_entropy a = {
        .x = x.gpu,
        .weight = w.gpu,
        .label = gpu,
        .mask = mask.gpu,
        .loss_sum = twin_memory(&t->gpu, sizeof(double)),
        .scratch = twin_memory(&t->gpu, 4 * t->gpu.ops->cross_entropy_scratch(64, 8, 10)),
        .n_tokens = 64,
        .hidden = 8,
        .vocab = 10,
        .dtype = MB_DTYPE_F16};
    t->gpu.ops->cross_entropy(t->gpu.ctx, t->gpu.stream, &a);
    assert_int_equal(t->gpu.ops->synchronize(t->gpu.ctx, t->gpu.stream, &err), MB_EINVAL);
    assert_string_equal(err.text, "label 10 at row 40 is outside the vocabulary of 10");
    assert_int_equal(t->gpu.ops->synchronize(t->gpu.ctx, t->gpu.stream, &err), 0);
}

/* ---- flat ranges ---- */

/* The same call, on memory of its own, with the weights in halves. */
static struct mb_adamw in_halves(struct twin *t, const struct mb_adamw *a, size_t n)
{
    struct mb_adamw c = *a;
    c.weight = NULL;
    c.exp_avg = copy_of(t, a->exp_avg, n);
    c.exp_avg_sq = copy_of(t, a->exp_avg_sq, n);
    halve(t, a->weight, n, &c.upper, &c.lower);
    return c;
}

static void test_adamw(void **state)
{
    struct twin *t = *state;
    enum { N = 100000, SEGMENTS = 300, BEGIN = 160 };
    struct mb_segment segments[SEGMENTS];
    struct pair w = pair_input_f32(t, N, 1), g = pair_input_f32(t, N, 1),
                m = pair_input_f32(t, N, 0.1), v = pair_input_f32(t, N, 0.1);
    for (size_t i = 0; i < N; i++)
        v.cpu[i] = fabsf(v.cpu[i]);
    pair_upload_f32(t, &v);
    for (size_t i = 0, at = BEGIN; i < SEGMENTS; i++) {
        segments[i] = (struct mb_segment){at, at + 16 * (1 + i % 19), (int)(i % 2)};
        at = segments[i].end + (i % 7 == 0 ? 16 : 0);
        assert_true(at < N);
    }
    struct mb_adamw a = {.weight = w.cpu,
                         .grad = g.cpu,
                         .exp_avg = m.cpu,
                         .exp_avg_sq = v.cpu,
                         .state_begin = BEGIN,
                         .segments = segments,
                         .n_segments = SEGMENTS,
                         .step = 3,
                         .lr = 0.01,
                         .beta1 = 0.9,
                         .beta2 = 0.95,
                         .eps = 1e-8,
                         .weight_decay = 0.1,
                         .grad_scale = 0.7f},
                    b = a;
    b.weight = w.gpu;
    b.grad = g.gpu;
    b.exp_avg = m.gpu;
    b.exp_avg_sq = v.gpu;
    struct mb_adamw c = in_halves(t, &b, N);
    RUN(t, adamw, a, b);
    t->gpu.ops->adamw(t->gpu.ctx, t->gpu.stream, &c);
    assert_same_bits(t, c.exp_avg, b.exp_avg, N);
    assert_same_bits(t, c.exp_avg_sq, b.exp_avg_sq, N);
    float *joined = twin_memory(&t->gpu, N * sizeof(float));
    t->gpu.ops->join(t->gpu.ctx, t->gpu.stream, joined, c.upper, c.lower, N);
    assert_same_bits(t, joined, b.weight, N); /* and between the segments */
    assert_pair(t, "adamw weights", &w, 1e-6);
    assert_pair(t, "adamw exp_avg", &m, 1e-6);
    assert_pair(t, "adamw exp_avg_sq", &v, 1e-6);
}

static void test_sgd(void **state)
{
    struct twin *t = *state;
    enum { N = 100000, SEGMENTS = 300, BEGIN = 160 };
    struct mb_segment segments[SEGMENTS];
    struct pair w = pair_input_f32(t, N, 1), g = pair_input_f32(t, N, 1),
                m = pair_input_f32(t, N, 0.1);
    for (size_t i = 0, at = BEGIN; i < SEGMENTS; i++) { /* some begin at odd places */
        segments[i] = (struct mb_segment){at, at + 15 * (1 + i % 19), (int)(i % 2)};
        at = segments[i].end + (i % 7 == 0 ? 16 : 0);
        assert_true(at < N);
    }
    struct mb_sgd a = {.weight = w.cpu,
                       .grad = g.cpu,
                       .momentum_buffer = m.cpu,
                       .state_begin = BEGIN,
                       .segments = segments,
                       .n_segments = SEGMENTS,
                       .lr = 0.01,
                       .momentum = 0.9,
                       .weight_decay = 0.1,
                       .grad_scale = 0.7f},
                  b = a;
    b.weight = w.gpu;
    b.grad = g.gpu;
    b.momentum_buffer = m.gpu;
    struct mb_sgd c = b;
    c.weight = NULL;
    c.momentum_buffer = copy_of(t, b.momentum_buffer, N);
    halve(t, b.weight, N, &c.upper, &c.lower);
    RUN(t, sgd, a, b);
    t->gpu.ops->sgd(t->gpu.ctx, t->gpu.stream, &c);
    assert_same_bits(t, c.momentum_buffer, b.momentum_buffer, N);
    float *joined = twin_memory(&t->gpu, N * sizeof(float));
    t->gpu.ops->join(t->gpu.ctx, t->gpu.stream, joined, c.upper, c.lower, N);
    assert_same_bits(t, joined, b.weight, N);
    assert_pair(t, "sgd weights", &w, 1e-6);
    assert_pair(t, "sgd momentum", &m, 1e-6);
}

/* Bit for bit, whatever the bits are; and nothing behind the last one. */
static void test_narrow(void **state)
{
    struct twin *t = *state;
    enum { N = 100001 };
    struct pair x = pair_zeros_f32(t, N);
    uint16_t *gpu = twin_memory(&t->gpu, (N + 1) * sizeof(*gpu)), got[2][N + 1] = {{0}};
    for (size_t i = 0; i < N; i++) {
        const uint32_t bits = (uint32_t)(twin_unit(t) * 4294967296.0);
        const uint32_t near_one = (bits & 0x8fffffffu) | 0x30000000u;
        memcpy(&x.cpu[i], i % 2 ? &bits : &near_one, sizeof(bits));
        if (x.cpu[i] != x.cpu[i])
            x.cpu[i] = 1; /* which NaN it becomes is nobody's matter */
    }
    pair_upload_f32(t, &x);
    t->gpu.ops->zero(t->gpu.ctx, t->gpu.stream, gpu, sizeof(got[0]));
    t->cpu.ops->narrow(t->cpu.ctx, t->cpu.stream, got[0], x.cpu, N);
    t->gpu.ops->narrow(t->gpu.ctx, t->gpu.stream, gpu, x.gpu, N);
    t->gpu.ops->copy_out(t->gpu.ctx, t->gpu.stream, got[1], gpu, sizeof(got[1]));
    twin_synchronize(t);
    assert_memory_equal(got[0], got[1], sizeof(got[0]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TWIN_TEST(test_embedding),
        TWIN_TEST(test_layernorm),
        TWIN_TEST(test_linear),
        TWIN_TEST(test_gelu),
        TWIN_TEST(test_dropout),
        TWIN_TEST(test_attention),
        TWIN_TEST(test_attention_too_large),
        TWIN_TEST(test_cross_entropy),
        TWIN_TEST(test_bad_label),
        TWIN_TEST(test_adamw),
        TWIN_TEST(test_sgd),
        TWIN_TEST(test_narrow),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
