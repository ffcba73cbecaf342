/* Arguments are copied as they are; what they point to is read when the operation runs. */
#include "recorder.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "base/alloc.h"

enum { ARGS_MAX = 256, OPERATIONS_MAX = 4096 };

typedef void replay_fn(struct mb_context *, struct mb_stream *, const void *args);

struct operation {
    replay_fn *replay;
    _Alignas(16) char args[ARGS_MAX];
};

struct mb_graph {
    size_t n;
    struct operation operations[OPERATIONS_MAX];
};

static const struct mb_backend *inner;
static struct mb_backend outer;
static struct mb_graph *recording; /* NULL: operations run */
static size_t n_runs, n_operations, n_captures, fails_at;

void recorder_fails_at(size_t n)
{
    n_captures = 0;
    fails_at = n;
}

size_t recorder_runs(void)
{
    return n_runs;
}

size_t recorder_operations(void)
{
    return n_operations;
}

static void keep(replay_fn *replay, const void *args, size_t size)
{
    assert_true(recording->n < OPERATIONS_MAX && size <= ARGS_MAX);
    struct operation *o = &recording->operations[recording->n++];
    o->replay = replay;
    memcpy(o->args, args, size);
}

#define OPS(X)                                                                                     \
    X(embedding_forward)                                                                           \
    X(embedding_backward)                                                                          \
    X(layernorm_forward)                                                                           \
    X(layernorm_backward)                                                                          \
    X(rmsnorm_forward)                                                                             \
    X(rmsnorm_backward)                                                                            \
    X(linear_forward)                                                                              \
    X(linear_backward)                                                                             \
    X(swiglu_forward)                                                                              \
    X(swiglu_backward)                                                                             \
    X(rope)                                                                                        \
    X(dropout_add)                                                                                 \
    X(attention_forward)                                                                           \
    X(attention_backward)                                                                          \
    X(cross_entropy)

#define RECORD(op)                                                                                 \
    static void replay_##op(struct mb_context *ctx, struct mb_stream *s, const void *args)         \
    {                                                                                              \
        inner->op(ctx, s, args);                                                                   \
    }                                                                                              \
    static void record_##op(struct mb_context *ctx, struct mb_stream *s, const struct mb_##op *a)  \
    {                                                                                              \
        if (recording == NULL)                                                                     \
            inner->op(ctx, s, a);                                                                  \
        else                                                                                       \
            keep(replay_##op, a, sizeof(*a));                                                      \
    }
OPS(RECORD)

struct plain { /* of operations without a struct of their own */
    void *a;
    const void *b, *c;
    size_t n;
    float factor;
};

static void replay_zero(struct mb_context *ctx, struct mb_stream *s, const void *args)
{
    const struct plain *p = args;
    inner->zero(ctx, s, p->a, p->n);
}

static void record_zero(struct mb_context *ctx, struct mb_stream *s, void *dst, size_t n)
{
    if (recording == NULL)
        inner->zero(ctx, s, dst, n);
    else
        keep(replay_zero, &(struct plain){.a = dst, .n = n}, sizeof(struct plain));
}

static void replay_axpy(struct mb_context *ctx, struct mb_stream *s, const void *args)
{
    const struct plain *p = args;
    inner->axpy(ctx, s, p->a, p->b, p->n, p->factor);
}

static void record_axpy(struct mb_context *ctx, struct mb_stream *s, float *y, const float *x,
                        size_t n, float a)
{
    if (recording == NULL)
        inner->axpy(ctx, s, y, x, n, a);
    else
        keep(replay_axpy, &(struct plain){.a = y, .b = x, .n = n, .factor = a},
             sizeof(struct plain));
}

static void replay_narrow(struct mb_context *ctx, struct mb_stream *s, const void *args)
{
    const struct plain *p = args;
    inner->narrow(ctx, s, p->a, p->b, p->n);
}

static void record_narrow(struct mb_context *ctx, struct mb_stream *s, uint16_t *out,
                          const float *x, size_t n)
{
    if (recording == NULL)
        inner->narrow(ctx, s, out, x, n);
    else
        keep(replay_narrow, &(struct plain){.a = out, .b = x, .n = n}, sizeof(struct plain));
}

static void record_copy_in(struct mb_context *ctx, struct mb_stream *s, void *dst, const void *host,
                           size_t size_bytes)
{
    assert_null(recording);
    inner->copy_in(ctx, s, dst, host, size_bytes);
}

static void record_copy_out(struct mb_context *ctx, struct mb_stream *s, void *host,
                            const void *src, size_t size_bytes)
{
    assert_null(recording);
    inner->copy_out(ctx, s, host, src, size_bytes);
}

static int record_synchronize(struct mb_context *ctx, struct mb_stream *s, struct mb_err *err)
{
    assert_null(recording);
    return inner->synchronize(ctx, s, err);
}

static int graph_begin(struct mb_context *ctx, struct mb_stream *s, struct mb_err *err)
{
    (void)ctx;
    (void)s;
    (void)err;
    assert_null(recording);
    recording = mb_calloc(1, sizeof(*recording));
    assert_non_null(recording);
    return 0;
}

static struct mb_graph *graph_end(struct mb_context *ctx, struct mb_stream *s, struct mb_err *err)
{
    struct mb_graph *g = recording;
    (void)ctx;
    (void)s;
    assert_non_null(g);
    n_operations = g->n;
    recording = NULL;
    if (fails_at > 0 && ++n_captures >= fails_at) {
        mb_free(g);
        mb_err_set(err, MB_EIO, "the recorder is full");
        return NULL;
    }
    return g;
}

static void graph_run(struct mb_context *ctx, struct mb_stream *s, struct mb_graph *g)
{
    n_runs++;
    for (size_t i = 0; i < g->n; i++)
        g->operations[i].replay(ctx, s, g->operations[i].args);
}

static void graph_destroy(struct mb_context *ctx, struct mb_graph *g)
{
    (void)ctx;
    mb_free(g);
}

static void counted_run(struct mb_context *ctx, struct mb_stream *s, struct mb_graph *g)
{
    n_runs++;
    inner->graph_run(ctx, s, g);
}

static int is_capturing;

static int broken_begin(struct mb_context *ctx, struct mb_stream *s, struct mb_err *err)
{
    is_capturing = 1;
    return inner->graph_begin(ctx, s, err);
}

static struct mb_graph *broken_end(struct mb_context *ctx, struct mb_stream *s, struct mb_err *err)
{
    is_capturing = 0;
    return inner->graph_end(ctx, s, err);
}

static void waits_and_zeros(struct mb_context *ctx, struct mb_stream *s, void *dst, size_t n)
{
    struct mb_err ignored;
    if (is_capturing)
        (void)inner->synchronize(ctx, s, &ignored);
    inner->zero(ctx, s, dst, n);
}

static void begin(const struct mb_backend *ops)
{
    inner = ops;
    outer = *ops;
    n_runs = n_operations = 0;
}

const struct mb_backend *recorder_over(const struct mb_backend *ops)
{
    begin(ops);
#define PATCH(op) outer.op = record_##op;
    OPS(PATCH)
    PATCH(zero)
    PATCH(axpy)
    PATCH(narrow)
    PATCH(copy_in)
    PATCH(copy_out)
    PATCH(synchronize)
    outer.graph_begin = graph_begin;
    outer.graph_end = graph_end;
    outer.graph_run = graph_run;
    outer.graph_destroy = graph_destroy;
    return &outer;
}

const struct mb_backend *recorder_counts(const struct mb_backend *ops)
{
    begin(ops);
    outer.graph_run = counted_run;
    return &outer;
}

const struct mb_backend *recorder_breaks(const struct mb_backend *ops)
{
    begin(ops);
    outer.graph_begin = broken_begin;
    outer.graph_end = broken_end;
    outer.zero = waits_and_zeros;
    return &outer;
}
