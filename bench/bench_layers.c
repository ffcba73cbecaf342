/*
 * bench_layers BACKEND [--dtype bf16|fp32] [--ranks N] [--sequence-parallel 0|1] [--steps N]
 *              [--layers N] [--hidden N] [--heads N] [--groups N] [--ffn N] [--seq N]
 *              [--micro-batch N] [--strips N]
 *
 * Forward and backward passes of a stretch of Llama's layers that N ranks share (tensor parallel),
 * one GPU each: without embedding, output layer, loss and optimizer, as the middle stage of a
 * pipeline computes them. Defaults: 8 layers of Llama-3-8B's shape, 4 samples of 4096 tokens, one
 * rank, bf16. Prints one line of JSON with the milliseconds of each pass, which is forward and
 * backward with a wait for the device at its end; inputs and gradients are drawn once and put in
 * place between passes.
 *
 *  1. The parent listens for all ranks, so that all endpoints are known, and starts one process a
 *     rank, which sees the GPU of its number only (of those that CUDA_VISIBLE_DEVICES has).
 *  2. Ranks meet, on the GPUs as well, and take their passes together: rank 0 prints.
 * Failures: a rank says why and ends with 1; the others notice through the carrier of the host, and
 * the parent ends with 1 when all have ended.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "worker/kernels/philox.h"
#include "worker/model/gpt.h"
#include "worker/parallel/comm.h"

enum { RANKS_MAX = 16, STEPS_MAX = 256, WARM = 3, TIMEOUT_MS = 120 * 1000 };

struct options {
    const char *backend;
    enum mb_dtype dtype;
    size_t ranks, sequence_parallel, steps, layers, hidden, heads, groups, ffn, seq, micro_batch;
    size_t strips;
};

struct bench {
    const struct options *o;
    uint32_t rank;
    struct mb_device dev;
    struct mb_comm *host, *group; /* the group takes the host's */
    struct mb_gpt *model;
    struct mb_gpt_ports ports;
    void *input, *gradient; /* ports.n elements of the model's dtype */
};

static const struct mb_gpt_step STEP = {.grad_scale = 1, .iteration = 1, .is_last = 1};
static const struct mb_gpt_place PLACE = {0, 0, 0};

/* Numbers between -scale and scale. */
static void *draw(uint64_t seed, size_t n, float scale, enum mb_dtype dtype)
{
    uint16_t *narrow = mb_calloc(n, mb_dtype_size(dtype));
    float *wide = (float *)(void *)narrow;
    for (size_t i = 0; narrow != NULL && i < n; i++) {
        const struct mb_philox word = mb_philox(seed, i / 4, 0, 0);
        const float value = scale * ((float)word.word[i % 4] / 2147483648.0f - 1);
        uint32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        if (dtype == MB_DTYPE_F32)
            wide[i] = value;
        else
            narrow[i] = (uint16_t)(bits >> 16);
    }
    return narrow;
}

static float number(const void *x, size_t i, enum mb_dtype dtype)
{
    float value;
    if (dtype == MB_DTYPE_F32)
        return ((const float *)x)[i];
    const uint32_t bits = (uint32_t)((const uint16_t *)x)[i] << 16;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static int meet(struct bench *b, struct mb_comm_listener *l, const char *const *endpoints,
                struct mb_err *err)
{
    if (b->o->ranks == 1)
        return 0;
    int rc = mb_comm_connect(l, endpoints, b->o->ranks, &b->host, err);
    if (rc != 0 || b->dev.ops->collectives == NULL) {
        b->group = b->host;
        return rc;
    }
    return mb_comm_create_device(b->host, &b->dev, TIMEOUT_MS, &b->group, err);
}

static int build(struct bench *b, struct mb_err *err)
{
    const struct options *o = b->o;
    struct mb_gpt_config c;
    mb_gpt_config_init(&c);
    c.n_layers = 3 * o->layers;
    c.n_stages = 3;
    c.own_stage = 1; /* neither embedding nor output */
    c.n_in_flight = 1;
    c.hidden = o->hidden;
    c.n_heads = o->heads;
    c.n_groups = o->groups;
    c.ffn_hidden = o->ffn;
    c.norm = MB_GPT_RMSNORM;
    c.positions = MB_GPT_ROPE;
    c.rope.base = 500000;
    c.swiglu = c.untie_output = 1;
    c.linear_bias = c.qkv_bias = 0;
    c.seq = c.max_positions = o->seq;
    c.vocab = 1024;
    c.padded_vocab = mb_gpt_padded_vocab(c.vocab, 128, o->ranks);
    c.hidden_dropout = c.attention_dropout = 0;
    c.dtype = o->dtype;
    c.tensor_group = b->group;
    c.sequence_parallel = o->ranks > 1 && o->sequence_parallel;
    c.n_strips = o->strips;
    int rc = mb_gpt_create(&b->dev, &c, o->micro_batch, &b->model, err);
    if (rc != 0)
        return rc;
    b->ports = mb_gpt_ports(b->model, PLACE);
    /* Without sequence parallelism all ranks have the same rows. */
    const uint64_t part = c.sequence_parallel ? b->rank : 0;
    b->input = draw(1 + part, b->ports.n, 1.0f, c.dtype);
    b->gradient = draw(101 + part, b->ports.n, 1e-3f, c.dtype);
    if (b->input == NULL || b->gradient == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    return 0;
}

static int wait_for_all(struct bench *b, struct mb_err *err)
{
    double sum, n;
    return mb_gpt_take_loss(b->model, &sum, &n, err);
}

static int pass(struct bench *b, double *ms, struct mb_err *err)
{
    const struct mb_backend *ops = b->dev.ops;
    const size_t size_bytes = b->ports.n * mb_dtype_size(b->o->dtype);
    ops->copy_in(b->dev.ctx, b->dev.stream, b->ports.in, b->input, size_bytes);
    ops->copy_in(b->dev.ctx, b->dev.stream, b->ports.gradient, b->gradient, size_bytes);
    mb_gpt_zero_grads(b->model);
    int rc = wait_for_all(b, err);
    if (rc != 0)
        return rc;
    if (b->host != NULL) { /* all begin together */
        mb_comm_barrier(b->group);
        rc = mb_comm_synchronize(b->group, err);
    }
    if (rc != 0)
        return rc;
    const uint64_t from_us = mb_mono_us();
    rc = mb_gpt_stage_forward(b->model, PLACE, NULL, &STEP, err);
    if (rc != 0)
        return rc;
    mb_gpt_stage_backward(b->model, PLACE, &STEP);
    rc = wait_for_all(b, err);
    *ms = (double)(mb_mono_us() - from_us) / 1e3;
    return rc;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The gradient that goes to the stage before must be numbers. */
static int check(struct bench *b, struct mb_err *err)
{
    const struct mb_backend *ops = b->dev.ops;
    const enum mb_dtype dtype = b->o->dtype;
    size_t n_zero = 0;
    ops->copy_out(b->dev.ctx, b->dev.stream, b->gradient, b->ports.gradient,
                  b->ports.n * mb_dtype_size(dtype));
    int rc = ops->synchronize(b->dev.ctx, b->dev.stream, err);
    for (size_t i = 0; rc == 0 && i < b->ports.n; i++) {
        const float x = number(b->gradient, i, dtype);
        n_zero += x == 0;
        if (!isfinite(x))
            rc = mb_err_set(err, MB_EIO, "element %zu of the gradient is %g", i, x);
    }
    if (rc == 0 && n_zero > b->ports.n / 2)
        rc = mb_err_set(err, MB_EIO, "%zu of %zu elements of the gradient are zero", n_zero,
                        b->ports.n);
    return rc;
}

static void report(const struct bench *b, double *ms)
{
    const struct options *o = b->o;
    printf("{\"backend\": \"%s\", \"group\": \"%s\", \"dtype\": \"%s\", \"ranks\": %zu, "
           "\"sequence_parallel\": %zu, \"strips\": %zu, "
           "\"layers\": %zu, \"micro_batch\": %zu, \"seq\": %zu, \"ms\": [",
           b->dev.ops->describe(b->dev.ctx), b->host != NULL ? mb_comm_describe(b->group) : "",
           o->dtype == MB_DTYPE_BF16 ? "bf16" : "fp32", o->ranks, o->sequence_parallel, o->strips,
           o->layers, o->micro_batch, o->seq);
    for (size_t i = 0; i < o->steps; i++)
        printf("%s%.2f", i > 0 ? ", " : "", ms[i]);
    qsort(ms, o->steps, sizeof(*ms), compare);
    printf("], \"median_ms\": %.2f}\n", ms[o->steps / 2]);
}

static int run(struct bench *b, struct mb_comm_listener *l, const char *const *endpoints,
               struct mb_err *err)
{
    double ms[STEPS_MAX], warm;
    int rc = mb_backend_open(b->o->backend, 0, &b->dev, err);
    if (rc == 0)
        rc = meet(b, l, endpoints, err);
    if (rc == 0)
        rc = build(b, err);
    for (int i = 0; i < WARM && rc == 0; i++) /* tunes products */
        rc = pass(b, &warm, err);
    for (size_t i = 0; i < b->o->steps && rc == 0; i++)
        rc = pass(b, &ms[i], err);
    if (rc == 0)
        rc = check(b, err);
    if (rc == 0 && b->rank == 0)
        report(b, ms);
    return rc;
}

/* Of those that the parent sees. */
static int see_own_gpu(uint32_t rank)
{
    char number[16], *list = NULL, *at = NULL, *rest = NULL;
    const char *given = getenv("CUDA_VISIBLE_DEVICES");
    snprintf(number, sizeof(number), "%u", rank);
    if (given == NULL || *given == '\0')
        return setenv("CUDA_VISIBLE_DEVICES", number, 1);
    list = mb_strdup(given);
    at = list != NULL ? strtok_r(list, ",", &rest) : NULL;
    for (uint32_t i = 0; at != NULL && i < rank; i++)
        at = strtok_r(NULL, ",", &rest);
    int rc = at != NULL ? setenv("CUDA_VISIBLE_DEVICES", at, 1) : -1;
    mb_free(list);
    return rc;
}

static int rank_main(const struct options *o, uint32_t rank, struct mb_comm_listener *l,
                     const char *const *endpoints)
{
    struct bench b = {.o = o, .rank = rank};
    struct mb_err err = {0};
    if (see_own_gpu(rank) != 0) {
        fprintf(stderr, "bench_layers: CUDA_VISIBLE_DEVICES has no GPU for rank %u\n", rank);
        return 1;
    }
    int rc = run(&b, l, endpoints, &err);
    if (rc != 0)
        fprintf(stderr, "bench_layers: rank %u: %s\n", rank, err.text);
    mb_gpt_destroy(b.model);
    mb_comm_destroy(b.group);
    mb_backend_close(&b.dev);
    mb_free(b.input);
    mb_free(b.gradient);
    return rc == 0 ? 0 : 1;
}

static int start(const struct options *o)
{
    struct mb_comm_listener *listeners[RANKS_MAX] = {NULL};
    const char *endpoints[RANKS_MAX];
    struct mb_err err = {0};
    int status = 0, failed = 0, n_started = 0;
    for (uint32_t r = 0; r < o->ranks; r++) {
        const struct mb_comm_options c = {
            .rank = r, .world_size = (uint32_t)o->ranks, .timeout_ms = TIMEOUT_MS};
        if (mb_comm_listen(&c, &listeners[r], &err) != 0) {
            fprintf(stderr, "bench_layers: %s\n", err.text);
            failed = 1;
            goto out;
        }
        endpoints[r] = mb_comm_listener_endpoint(listeners[r]);
    }
    for (uint32_t r = 0; r < o->ranks; r++) {
        fflush(NULL);
        pid_t pid = fork();
        if (pid == 0) {
            const int code = rank_main(o, r, listeners[r], endpoints);
            fflush(NULL);
            _exit(code);
        }
        n_started += pid > 0;
        failed |= pid < 0;
    }
    for (; n_started > 0 && wait(&status) > 0; n_started--)
        failed |= status != 0;
out:
    for (uint32_t r = 0; r < o->ranks; r++)
        mb_comm_listener_destroy(listeners[r]);
    return failed;
}

/* 0, or -1 for a line that is not understood. */
static int parse(int argc, char **argv, struct options *o)
{
    const struct {
        const char *name;
        size_t *to, min, max;
    } numbers[] = {{"--ranks", &o->ranks, 1, RANKS_MAX},
                   {"--sequence-parallel", &o->sequence_parallel, 0, 1},
                   {"--steps", &o->steps, 1, STEPS_MAX},
                   {"--layers", &o->layers, 1, 1 << 16},
                   {"--hidden", &o->hidden, 1, 1 << 20},
                   {"--heads", &o->heads, 1, 1 << 20},
                   {"--groups", &o->groups, 1, 1 << 20},
                   {"--ffn", &o->ffn, 1, 1 << 20},
                   {"--seq", &o->seq, 1, 1 << 20},
                   {"--micro-batch", &o->micro_batch, 1, 1 << 20},
                   {"--strips", &o->strips, 0, MB_GPT_STRIPS_MAX}};
    if (argc < 2 || argc % 2 != 0)
        return -1;
    o->backend = argv[1];
    for (int i = 2; i < argc; i += 2) {
        size_t k = 0, n_numbers = sizeof(numbers) / sizeof(numbers[0]);
        char *end = NULL;
        if (strcmp(argv[i], "--dtype") == 0 &&
            (strcmp(argv[i + 1], "bf16") == 0 || strcmp(argv[i + 1], "fp32") == 0)) {
            o->dtype = argv[i + 1][0] == 'b' ? MB_DTYPE_BF16 : MB_DTYPE_F32;
            continue;
        }
        while (k < n_numbers && strcmp(argv[i], numbers[k].name) != 0)
            k++;
        if (k == n_numbers)
            return -1;
        *numbers[k].to = strtoul(argv[i + 1], &end, 10);
        if (*end != '\0' || *numbers[k].to < numbers[k].min || *numbers[k].to > numbers[k].max)
            return -1;
    }
    return 0;
}

int main(int argc, char **argv)
{
    struct options o = {.dtype = MB_DTYPE_BF16,
                        .ranks = 1,
                        .steps = 20,
                        .layers = 8,
                        .hidden = 4096,
                        .heads = 32,
                        .groups = 8,
                        .ffn = 14336,
                        .seq = 4096,
                        .micro_batch = 4};
    if (parse(argc, argv, &o) != 0) {
        fprintf(
            stderr,
            "usage: bench_layers BACKEND [--dtype bf16|fp32] [--ranks N] [--sequence-parallel 0|1] "
            "[--steps N] [--layers N] [--hidden N] [--heads N] [--groups N] [--ffn N] "
            "[--seq N] [--micro-batch N] [--strips N]\n");
        return 64;
    }
    return start(&o);
}
