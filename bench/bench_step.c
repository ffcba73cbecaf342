/*
 * bench_step [MICRO_BATCH [STEPS [BACKEND]]]: one training step of the main job's model on one
 * rank, without communication: forward, backward, gradient norm, AdamW. Prints time per step,
 * tokens/s, GFLOP/s and where the time goes. The shares come from a table of operations that times
 * each call and passes it on; on a backend whose operations return early they would be those of the
 * enqueuing.
 *
 * Sizes: 2 layers, hidden 128, 4 heads, sequence 256, GPT-2's vocabulary. MICRO_BATCH 8 is one of
 * two ranks of a global batch of 16.
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

/* X(operation, argument) for the operations with one argument struct. */
#define TIMED_OPS(X)                                                                               \
    X(embedding_forward, mb_embedding_forward)                                                     \
    X(embedding_backward, mb_embedding_backward)                                                   \
    X(layernorm_forward, mb_layernorm_forward)                                                     \
    X(layernorm_backward, mb_layernorm_backward)                                                   \
    X(linear_forward, mb_linear_forward)                                                           \
    X(linear_backward, mb_linear_backward)                                                         \
    X(gelu_forward, mb_gelu)                                                                       \
    X(gelu_backward, mb_gelu)                                                                      \
    X(dropout_add, mb_dropout_add)                                                                 \
    X(attention_forward, mb_attention_forward)                                                     \
    X(attention_backward, mb_attention_backward)                                                   \
    X(cross_entropy, mb_cross_entropy)                                                             \
    X(adamw, mb_adamw)

#define ENUM_(op, arg) OP_##op,
enum op { TIMED_OPS(ENUM_) OP_COUNT };

#define NAME_(op, arg) #op,
static const char *const OP_NAMES[] = {TIMED_OPS(NAME_)};

static const struct mb_backend *inner;
static uint64_t spent_us[OP_COUNT];

#define WRAP_(op, arg)                                                                             \
    static void timed_##op(struct mb_context *ctx, struct mb_stream *stream, const struct arg *a)  \
    {                                                                                              \
        uint64_t start = mb_mono_us();                                                             \
        inner->op(ctx, stream, a);                                                                 \
        spent_us[OP_##op] += mb_mono_us() - start;                                                 \
    }
TIMED_OPS(WRAP_)

#define PATCH_(op, arg) outer.op = timed_##op;

static struct mb_backend timed_table(const struct mb_backend *ops)
{
    struct mb_backend outer = *ops;
    inner = ops;
    TIMED_OPS(PATCH_)
    return outer;
}

struct bench {
    struct mb_device dev;
    struct mb_gpt *model;
    struct mb_optimizer *optimizer;
    struct mb_gpt_batch batch;
    int32_t *ids;
    size_t n_tokens;
};

static int setup(struct bench *b, const char *backend, size_t micro_batch, struct mb_backend *table,
                 struct mb_err *err)
{
    int rc = mb_backend_open(backend, 0, &b->dev, err);
    if (rc != 0)
        return rc;
    *table = timed_table(b->dev.ops);
    b->dev.ops = table;
    struct mb_gpt_config c;
    mb_gpt_config_init(&c);
    c.n_layers = 2;
    c.hidden = 128;
    c.n_heads = 4;
    c.seq = c.max_positions = 256;
    c.vocab = 50257;
    c.padded_vocab = mb_gpt_padded_vocab(c.vocab, 128, 1);
    c.hidden_dropout = c.attention_dropout = 0;
    rc = mb_gpt_create(&b->dev, &c, micro_batch, &b->model, err);
    if (rc != 0)
        return rc;
    b->n_tokens = micro_batch * c.seq;
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
    return mb_optimizer_create(&b->dev, &oc, params, n_params, mb_gpt_weights(b->model),
                               mb_gpt_grads(b->model), 0, mb_gpt_n_elements(b->model),
                               &b->optimizer, err);
}

static int step(struct bench *b, int64_t iteration, double *loss, struct mb_err *err)
{
    double sum, n, norm2;
    struct mb_gpt_step s = {.grad_scale = 1.0 / (double)b->n_tokens, .iteration = iteration};
    mb_gpt_zero_grads(b->model);
    int rc = mb_gpt_forward_backward(b->model, &b->batch, &s, err);
    if (rc == 0)
        rc = mb_gpt_take_loss(b->model, &sum, &n, err);
    if (rc == 0)
        rc = mb_optimizer_squared_norm(b->optimizer, &norm2, err);
    if (rc != 0)
        return rc;
    mb_optimizer_step(b->optimizer, 1e-3, 0.01, mb_optimizer_clip(sqrt(norm2), 1.0));
    *loss = sum / n;
    return 0;
}

static void report(const struct bench *b, int steps, double ms, double loss)
{
    const struct mb_gpt_config *c = mb_gpt_config(b->model);
    double samples = (double)b->n_tokens / (double)c->seq;
    printf("%s\n", b->dev.ops->describe(b->dev.ctx));
    printf("%zu tokens a step, %.1f ms a step, %.0f tokens/s, %.1f GFLOP/s, loss %.3f after %d "
           "steps\n",
           b->n_tokens, ms, (double)b->n_tokens / ms * 1e3,
           mb_gpt_flops_per_sample(c) * samples / ms * 1e-6, loss, steps);
    struct mb_buf plan = {0};
    double rest = ms;
    for (int i = 0; i < OP_COUNT; i++) {
        double op_ms = (double)spent_us[i] / 1e3 / steps;
        rest -= op_ms;
        printf("  %-20s %9.2f ms %6.1f %%\n", OP_NAMES[i], op_ms, 100 * op_ms / ms);
    }
    printf("  %-20s %9.2f ms %6.1f %%\n", "rest", rest, 100 * rest / ms);
    if (mb_gpt_print_plan(b->model, &plan) == 0)
        fputs(mb_buf_str(&plan), stdout);
    mb_buf_close(&plan);
}

int main(int argc, char **argv)
{
    int micro_batch = argc > 1 ? atoi(argv[1]) : 8, steps = argc > 2 ? atoi(argv[2]) : 5;
    const char *backend = argc > 3 ? argv[3] : MOBULA_CPU_BACKEND;
    if (micro_batch <= 0 || steps <= 0) {
        fprintf(stderr, "usage: bench_step [MICRO_BATCH [STEPS [BACKEND]]]\n");
        return 64;
    }
    struct bench b = {0};
    struct mb_backend table;
    struct mb_err err = {0};
    double loss = 0;
    int rc = setup(&b, backend, (size_t)micro_batch, &table, &err);
    if (rc == 0)
        rc = step(&b, 1, &loss, &err); /* touches all memory */
    memset(spent_us, 0, sizeof(spent_us));
    uint64_t start = mb_mono_us();
    for (int i = 0; rc == 0 && i < steps; i++)
        rc = step(&b, i + 2, &loss, &err);
    if (rc == 0)
        report(&b, steps, (double)(mb_mono_us() - start) / 1e3 / steps, loss);
    else
        fprintf(stderr, "bench_step: %s\n", err.text);
    mb_optimizer_destroy(b.optimizer);
    mb_gpt_destroy(b.model);
    mb_free(b.ids);
    if (b.dev.ops != NULL)
        mb_backend_close(&b.dev);
    return rc == 0 ? 0 : 1;
}
