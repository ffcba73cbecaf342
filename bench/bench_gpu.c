/*
 * bench_gpu BACKEND [--dtype bf16|fp16|fp32] [--micro-batch N] [--micro-batches N] [--steps N]
 *           [--layers N] [--hidden N] [--heads N] [--seq N] [--vocab N] [--style gpt2|llama]
 *           [--groups N] [--ffn N] [--fp8 hybrid|e4m3] [--graphs on|off] [--dropout P]
 *
 * Training steps of a GPT on one device, without data and communication: zero gradients, micro
 * batches forward and backward, gradient norm, clip, AdamW. Defaults: GPT-2 124M, 8 micro batches
 * of 64 x 1024 tokens, bf16. Prints milliseconds of each step, tokens/s, TFLOP/s by two counts, and
 * where the time goes: one more step in which every operation is waited for; not with --graphs on,
 * where a pass is one thing to enqueue.
 *
 * FLOP of a token: "honest" is 6 x the weights that products read (the output layer once, no
 * embedding) + 6 layers x hidden x seq of causal attention; Megatron's is what --log-throughput
 * prints and counts attention twice that.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "worker/kernels/philox.h"
#include "worker/model/gpt.h"
#include "worker/model/optimizer.h"

enum { MAX_ROWS = 64 };

static const double LOSS_SCALE = 65536; /* of fp16 */
static const char *const FP8[] = {"", " and fp8, hybrid", " and fp8, e4m3"};
static const char *const DTYPES[] = {"fp32", "bf16", "fp16"}; /* by enum mb_dtype */

struct options {
    const char *backend;
    enum mb_dtype dtype;
    enum mb_gpt_fp8 fp8;
    int llama; /* its style: RMSNorm, SwiGLU, rotary positions, no biases, an output of its own */
    int graphs;
    double dropout;
    size_t micro_batch, micro_batches, steps, layers, hidden, heads, groups, ffn, seq, vocab;
};

/* ---- the table of operations that waits and counts ---- */

static const struct mb_backend *inner;

static struct row {
    char name[64];
    uint64_t us;
    int calls;
} rows[MAX_ROWS];

static void count(const char *name, uint64_t us)
{
    int i = 0;
    while (i + 1 < MAX_ROWS && rows[i].calls > 0 && strcmp(rows[i].name, name) != 0)
        i++;
    snprintf(rows[i].name, sizeof(rows[i].name), "%s", name);
    rows[i].us += us;
    rows[i].calls++;
}

static uint64_t finished_us(struct mb_context *ctx, struct mb_stream *stream)
{
    struct mb_err err = {0};
    if (inner->synchronize(ctx, stream, &err) != 0) {
        fprintf(stderr, "bench_gpu: %s\n", err.text);
        exit(1);
    }
    return mb_mono_us();
}

#define WRAP(op, arg)                                                                              \
    static void timed_##op(struct mb_context *ctx, struct mb_stream *stream, const struct arg *a)  \
    {                                                                                              \
        uint64_t from_us = finished_us(ctx, stream);                                               \
        inner->op(ctx, stream, a);                                                                 \
        count(#op, finished_us(ctx, stream) - from_us);                                            \
    }
#define WRAP_LINEAR(op, arg)                                                                       \
    static void timed_##op(struct mb_context *ctx, struct mb_stream *stream, const struct arg *a)  \
    {                                                                                              \
        char name[64];                                                                             \
        uint64_t from_us = finished_us(ctx, stream);                                               \
        inner->op(ctx, stream, a);                                                                 \
        snprintf(name, sizeof(name), "%s %zu -> %zu", #op, a->n_in, a->n_out);                     \
        count(name, finished_us(ctx, stream) - from_us);                                           \
    }
#define OPS(X)                                                                                     \
    X(embedding_forward, mb_embedding_forward)                                                     \
    X(embedding_backward, mb_embedding_backward)                                                   \
    X(layernorm_forward, mb_layernorm_forward)                                                     \
    X(layernorm_backward, mb_layernorm_backward)                                                   \
    X(rmsnorm_forward, mb_rmsnorm_forward)                                                         \
    X(rmsnorm_backward, mb_rmsnorm_backward)                                                       \
    X(fp8_amax, mb_fp8_amax)                                                                       \
    X(fp8_quantize, mb_fp8_quantize)                                                               \
    X(swiglu_forward, mb_swiglu_forward)                                                           \
    X(swiglu_backward, mb_swiglu_backward)                                                         \
    X(rope, mb_rope)                                                                               \
    X(dropout_add, mb_dropout_add)                                                                 \
    X(attention_forward, mb_attention_forward)                                                     \
    X(attention_backward, mb_attention_backward)                                                   \
    X(cross_entropy, mb_cross_entropy)                                                             \
    X(adamw, mb_adamw)
#define LINEARS(X)                                                                                 \
    X(linear_forward, mb_linear_forward)                                                           \
    X(linear_backward, mb_linear_backward)                                                         \
    X(fp8_linear_forward, mb_fp8_linear_forward)                                                   \
    X(fp8_linear_backward, mb_fp8_linear_backward)
OPS(WRAP)
LINEARS(WRAP_LINEAR)

static void timed_squared_norm(struct mb_context *ctx, struct mb_stream *stream, const float *x,
                               size_t n, double *sum)
{
    uint64_t from_us = finished_us(ctx, stream);
    inner->squared_norm(ctx, stream, x, n, sum);
    count("squared_norm", finished_us(ctx, stream) - from_us);
}

static void timed_join(struct mb_context *ctx, struct mb_stream *stream, float *x,
                       const uint16_t *upper, const uint16_t *lower, size_t n)
{
    uint64_t from_us = finished_us(ctx, stream);
    inner->join(ctx, stream, x, upper, lower, n);
    count("join", finished_us(ctx, stream) - from_us);
}

static void timed_zero(struct mb_context *ctx, struct mb_stream *stream, void *dst,
                       size_t size_bytes)
{
    uint64_t from_us = finished_us(ctx, stream);
    inner->zero(ctx, stream, dst, size_bytes);
    count("zero", finished_us(ctx, stream) - from_us);
}

static struct mb_backend timed_table(const struct mb_backend *ops)
{
    struct mb_backend outer = *ops;
    inner = ops;
#define PATCH(op, arg) outer.op = timed_##op;
    OPS(PATCH)
    LINEARS(PATCH)
    outer.squared_norm = timed_squared_norm;
    outer.join = timed_join;
    outer.zero = timed_zero;
    return outer;
}

/* ---- the steps ---- */

struct bench {
    struct options o;
    struct mb_device dev;
    struct mb_gpt *model;
    struct mb_optimizer *optimizer;
    struct mb_gpt_batch batch;
    int32_t *ids;
    size_t n_tokens; /* of a micro batch */
};

static int setup(struct bench *b, struct mb_err *err)
{
    const struct options *o = &b->o;
    int rc = mb_backend_open(o->backend, 0, &b->dev, err);
    if (rc != 0)
        return rc;
    struct mb_gpt_config c;
    mb_gpt_config_init(&c);
    c.n_layers = o->layers;
    c.hidden = o->hidden;
    c.n_heads = o->heads;
    c.n_groups = o->groups;
    c.ffn_hidden = o->ffn;
    if (o->llama) {
        c.norm = MB_GPT_RMSNORM;
        c.positions = MB_GPT_ROPE;
        c.rope.base = 500000;
        c.swiglu = c.untie_output = 1;
        c.linear_bias = c.qkv_bias = 0;
    }
    c.seq = c.max_positions = o->seq;
    c.vocab = o->vocab;
    c.padded_vocab = mb_gpt_padded_vocab(c.vocab, 128, 1);
    c.hidden_dropout = c.attention_dropout = (float)o->dropout;
    c.graphs = o->graphs;
    c.dtype = o->dtype;
    c.fp8 = o->fp8;
    rc = mb_gpt_create(&b->dev, &c, o->micro_batch, &b->model, err);
    if (rc != 0)
        return rc;
    b->n_tokens = o->micro_batch * c.seq;
    b->ids = mb_calloc(b->n_tokens + 1, sizeof(*b->ids));
    if (b->ids == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    for (size_t i = 0; i <= b->n_tokens; i++)
        b->ids[i] = (int32_t)(mb_philox(1, i, 0, 0).word[0] % c.vocab);
    b->batch = (struct mb_gpt_batch){.tokens = b->ids, .labels = b->ids + 1};
    size_t n_params;
    const struct mb_param *params = mb_gpt_params(b->model, &n_params);
    struct mb_optimizer_config oc;
    mb_optimizer_config_init(&oc);
    return mb_optimizer_create(&b->dev, &oc, params, n_params, mb_gpt_master(b->model),
                               mb_gpt_grads(b->model), 0, mb_gpt_n_elements(b->model),
                               &b->optimizer, err);
}

static int step(struct bench *b, int64_t iteration, double *loss, struct mb_err *err)
{
    double sum, n, norm2;
    const double scale = b->o.dtype == MB_DTYPE_F16 ? LOSS_SCALE : 1;
    struct mb_gpt_step s = {.grad_scale = scale / (double)(b->n_tokens * b->o.micro_batches),
                            .iteration = iteration};
    uint64_t sample = 0;
    mb_gpt_zero_grads(b->model);
    int rc = 0;
    for (size_t k = 0; k < b->o.micro_batches && rc == 0; k++) {
        s.first_sample = sample;
        sample += b->o.micro_batch;
        rc = mb_gpt_forward_backward(b->model, &b->batch, &s, err);
    }
    if (rc == 0)
        rc = mb_gpt_take_loss(b->model, &sum, &n, err);
    if (rc == 0)
        rc = mb_optimizer_squared_norm(b->optimizer, &norm2, err);
    if (rc != 0)
        return rc;
    mb_optimizer_step(b->optimizer, 1e-4, 0.01,
                      mb_optimizer_clip(sqrt(norm2) / scale, 1.0) / scale);
    mb_gpt_weights_changed(b->model);
    *loss = sum / n;
    return b->dev.ops->synchronize(b->dev.ctx, b->dev.stream, err);
}

static double honest_flop(const struct mb_gpt_config *c)
{
    double h = (double)c->hidden, layers = (double)c->n_layers;
    double attention = (double)(c->n_heads * c->head_dim);
    double keys = (double)(c->n_groups * c->head_dim);
    double layer = h * (2 * attention + 2 * keys + (c->swiglu ? 3 : 2) * (double)c->ffn_hidden);
    return 6 * (layers * layer + (double)c->padded_vocab * h) +
           6 * layers * attention * (double)c->seq;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(const struct bench *b, double *ms, double loss)
{
    const struct options *o = &b->o;
    const double flop = honest_flop(mb_gpt_config(b->model));
    double tokens = (double)(b->n_tokens * o->micro_batches);
    printf("%s\n", b->dev.ops->describe(b->dev.ctx));
    printf(
        "%s, %zu layers, hidden %zu, %zu heads, seq %zu, vocab %zu, %s%s, dropout %g, graphs %s, "
        "%zu x %zu samples a step\n",
        o->llama ? "Llama's style" : "GPT-2's style", o->layers, o->hidden, o->heads, o->seq,
        o->vocab, DTYPES[o->dtype], FP8[o->fp8], o->dropout, o->graphs ? "on" : "off",
        o->micro_batches, o->micro_batch);
    printf("ms of each step:");
    for (size_t i = 0; i < o->steps; i++)
        printf(" %.2f", ms[i]);
    qsort(ms, o->steps, sizeof(*ms), compare);
    double s = ms[o->steps / 2] / 1e3;
    double megatron = mb_gpt_flops_per_sample(mb_gpt_config(b->model)) / (double)o->seq;
    printf("\nmedian %.2f ms, %.0f tokens/s, %.1f TFLOP/s honest (%.0f MFLOP a token), %.1f "
           "TFLOP/s by Megatron's count; loss %.4f\n",
           s * 1e3, tokens / s, flop * tokens / s * 1e-12, flop * 1e-6,
           megatron * tokens / s * 1e-12, loss);
}

static void report_rows(double step_ms)
{
    double sum = 0;
    for (int i = 0; i < MAX_ROWS && rows[i].calls > 0; i++)
        sum += (double)rows[i].us / 1e3;
    printf("one step, every operation waited for (%.1f ms, of them %.1f in these operations):\n",
           step_ms, sum);
    for (int i = 0; i < MAX_ROWS && rows[i].calls > 0; i++)
        printf("  %-36s %5d calls %9.3f ms each %9.2f ms %6.1f %%\n", rows[i].name, rows[i].calls,
               (double)rows[i].us / 1e3 / rows[i].calls, (double)rows[i].us / 1e3,
               (double)rows[i].us / 10 / sum);
}

static int run(struct bench *b, struct mb_err *err)
{
    double ms[256], loss = 0;
    int64_t iteration = 1;
    int rc = setup(b, err);
    for (int i = 0; i < 3 && rc == 0; i++) /* tunes products, warms up */
        rc = step(b, iteration++, &loss, err);
    for (size_t i = 0; i < b->o.steps && rc == 0; i++) {
        uint64_t from_us = mb_mono_us();
        rc = step(b, iteration++, &loss, err);
        ms[i] = (double)(mb_mono_us() - from_us) / 1e3;
    }
    if (rc != 0)
        return rc;
    report(b, ms, loss);
    if (b->o.graphs)
        return 0;
    const struct mb_backend *ops = b->dev.ops;
    struct mb_backend table = timed_table(ops);
    b->dev.ops = &table;
    uint64_t from_us = mb_mono_us();
    rc = step(b, iteration, &loss, err);
    b->dev.ops = ops;
    if (rc == 0)
        report_rows((double)(mb_mono_us() - from_us) / 1e3);
    return rc;
}

static int parse_dtype(const char *text, enum mb_dtype *out)
{
    for (size_t i = 0; i < sizeof(DTYPES) / sizeof(DTYPES[0]); i++)
        if (strcmp(text, DTYPES[i]) == 0) {
            *out = (enum mb_dtype)i;
            return 1;
        }
    return 0;
}

static int is_one_of(const char *text, const char *first, const char *second)
{
    return strcmp(text, first) == 0 || strcmp(text, second) == 0;
}

/* 1: an argument whose value is a word, and a right one. */
static int parse_word(const char *name, const char *value, struct options *o)
{
    if (strcmp(name, "--dtype") == 0)
        return parse_dtype(value, &o->dtype);
    if (strcmp(name, "--fp8") == 0 && is_one_of(value, "hybrid", "e4m3")) {
        o->fp8 = value[0] == 'h' ? MB_GPT_FP8_HYBRID : MB_GPT_FP8_E4M3;
        return 1;
    }
    if (strcmp(name, "--style") == 0 && is_one_of(value, "gpt2", "llama")) {
        o->llama = value[0] == 'l';
        return 1;
    }
    if (strcmp(name, "--graphs") == 0 && is_one_of(value, "on", "off")) {
        o->graphs = strcmp(value, "on") == 0;
        return 1;
    }
    if (strcmp(name, "--dropout") == 0) {
        o->dropout = strtod(value, NULL);
        return o->dropout >= 0 && o->dropout < 1;
    }
    return 0;
}

/* 0, or -1 for a line that is not understood. */
static int parse(int argc, char **argv, struct options *o)
{
    const struct {
        const char *name;
        size_t *to, max;
    } numbers[] = {{"--micro-batch", &o->micro_batch, 1 << 20},
                   {"--micro-batches", &o->micro_batches, 1 << 20},
                   {"--steps", &o->steps, 256},
                   {"--layers", &o->layers, 1 << 16},
                   {"--hidden", &o->hidden, 1 << 20},
                   {"--heads", &o->heads, 1 << 20},
                   {"--groups", &o->groups, 1 << 20},
                   {"--ffn", &o->ffn, 1 << 20},
                   {"--seq", &o->seq, 1 << 20},
                   {"--vocab", &o->vocab, 1 << 24}};
    if (argc < 2 || argc % 2 != 0)
        return -1;
    o->backend = argv[1];
    for (int i = 2; i < argc; i += 2) {
        size_t k = 0, n_numbers = sizeof(numbers) / sizeof(numbers[0]);
        if (parse_word(argv[i], argv[i + 1], o))
            continue;
        while (k < n_numbers && strcmp(argv[i], numbers[k].name) != 0)
            k++;
        if (k == n_numbers)
            return -1;
        *numbers[k].to = strtoul(argv[i + 1], NULL, 10);
        if (*numbers[k].to == 0 || *numbers[k].to > numbers[k].max)
            return -1;
    }
    return 0;
}

int main(int argc, char **argv)
{
    struct bench b = {.o = {.dtype = MB_DTYPE_BF16,
                            .micro_batch = 64,
                            .micro_batches = 8,
                            .steps = 10,
                            .layers = 12,
                            .hidden = 768,
                            .heads = 12,
                            .seq = 1024,
                            .vocab = 50257}};
    struct mb_err err = {0};
    if (parse(argc, argv, &b.o) != 0) {
        fprintf(stderr, "usage: bench_gpu BACKEND [--dtype bf16|fp16|fp32] [--micro-batch N] "
                        "[--micro-batches N] [--steps N] [--layers N] [--hidden N] [--heads N] "
                        "[--seq N] [--vocab N] [--style gpt2|llama] [--groups N] [--ffn N] "
                        "[--fp8 hybrid|e4m3] [--graphs on|off] [--dropout P]\n");
        return 64;
    }
    int rc = run(&b, &err);
    if (rc != 0)
        fprintf(stderr, "bench_gpu: %s\n", err.text);
    mb_optimizer_destroy(b.optimizer);
    mb_gpt_destroy(b.model);
    mb_free(b.ids);
    mb_backend_close(&b.dev);
    return rc == 0 ? 0 : 1;
}
