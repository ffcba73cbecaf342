/*
 * The calls of comm.h, the same for every carrier, and the world of one.
 *
 *  1. A call makes a struct mb_comm_op of its arguments and gives it to the carrier.
 *  2. A carrier of host memory waits for the device's stream first; a failure found there becomes
 *     the communicator's: synchronize() returns it.
 *  3. In a world of one nothing is left to do, but failures of the device are kept all the same.
 */
#include "worker/parallel/comm_impl.h"

#include <assert.h>
#include "base/alloc.h"

const char *mb_comm_kind_name(enum mb_comm_kind kind)
{
    static const char *const NAMES[] = {"?",          "all-reduce", "reduce-scatter",
                                        "all-gather", "broadcast",  "barrier",
                                        "send",       "receive",    "reduce"};
    return (size_t)kind < sizeof NAMES / sizeof NAMES[0] ? NAMES[kind] : "?";
}

size_t mb_comm_type_size(enum mb_comm_type type)
{
    return type == MB_COMM_F32 ? 4 : 8;
}

#define COMBINE(T)                                                                                 \
    do {                                                                                           \
        T *d = dst;                                                                                \
        const T *s = src;                                                                          \
        if (reduce == MB_COMM_SUM) {                                                               \
            for (size_t i = 0; i < n; i++) {                                                       \
                d[i] = d[i] + s[i];                                                                \
            }                                                                                      \
        } else {                                                                                   \
            for (size_t i = 0; i < n; i++) {                                                       \
                d[i] = s[i] > d[i] ? s[i] : d[i];                                                  \
            }                                                                                      \
        }                                                                                          \
    } while (0)

void mb_comm_combine(void *dst, const void *src, size_t n, enum mb_comm_type type,
                     enum mb_comm_reduce reduce)
{
    switch (type) {
    case MB_COMM_F32:
        COMBINE(float);
        break;
    case MB_COMM_F64:
        COMBINE(double);
        break;
    case MB_COMM_I64:
        COMBINE(int64_t);
        break;
    }
}

void mb_comm_range(size_t n, uint32_t world_size, uint32_t rank, size_t *begin, size_t *end)
{
    /* n / w and n % w separately: n * rank could overflow. */
    size_t q = n / world_size, r = n % world_size;
    *begin = q * rank + r * rank / world_size;
    *end = q * (rank + 1) + r * (rank + 1) / world_size;
}

uint32_t mb_comm_rank(const struct mb_comm *c)
{
    return c->rank;
}

uint32_t mb_comm_world_size(const struct mb_comm *c)
{
    return c->world_size;
}

const char *mb_comm_describe(const struct mb_comm *c)
{
    return c->description;
}

int mb_comm_wait_device(struct mb_device *dev, struct mb_err *err)
{
    mb_err_clear(err);
    return dev != NULL ? dev->ops->synchronize(dev->ctx, dev->stream, err) : 0;
}

static void enqueue(struct mb_comm *c, struct mb_device *dev, struct mb_comm_op op)
{
    assert(op.peer < c->world_size);
    c->v->enqueue(c, dev, &op);
}

void mb_comm_allreduce(struct mb_comm *c, struct mb_device *dev, void *buf, size_t n,
                       enum mb_comm_type type, enum mb_comm_reduce reduce)
{
    enqueue(c, dev, (struct mb_comm_op){MB_COMM_OP_ALLREDUCE, type, reduce, buf, n, 0, 0});
}

void mb_comm_reduce_scatter(struct mb_comm *c, struct mb_device *dev, void *buf, size_t n,
                            enum mb_comm_type type, enum mb_comm_reduce reduce)
{
    enqueue(c, dev, (struct mb_comm_op){MB_COMM_OP_REDUCE_SCATTER, type, reduce, buf, n, 0, 0});
}

void mb_comm_reduce(struct mb_comm *c, struct mb_device *dev, void *buf, size_t n,
                    enum mb_comm_type type, enum mb_comm_reduce reduce, uint32_t root)
{
    enqueue(c, dev, (struct mb_comm_op){MB_COMM_OP_REDUCE, type, reduce, buf, n, root, 0});
}

void mb_comm_allgather(struct mb_comm *c, struct mb_device *dev, void *buf, size_t n,
                       enum mb_comm_type type)
{
    enqueue(c, dev, (struct mb_comm_op){MB_COMM_OP_ALLGATHER, type, MB_COMM_SUM, buf, n, 0, 0});
}

void mb_comm_broadcast(struct mb_comm *c, struct mb_device *dev, void *buf, size_t n,
                       enum mb_comm_type type, uint32_t root)
{
    enqueue(c, dev, (struct mb_comm_op){MB_COMM_OP_BROADCAST, type, MB_COMM_SUM, buf, n, root, 0});
}

void mb_comm_barrier(struct mb_comm *c)
{
    enqueue(c, NULL,
            (struct mb_comm_op){MB_COMM_OP_BARRIER, MB_COMM_I64, MB_COMM_SUM, NULL, 0, 0, 0});
}

void mb_comm_send(struct mb_comm *c, struct mb_device *dev, const void *buf, size_t n,
                  enum mb_comm_type type, uint32_t to)
{
    assert(to != c->rank);
    enqueue(
        c, dev,
        (struct mb_comm_op){MB_COMM_OP_SEND, type, MB_COMM_SUM, (void *)(uintptr_t)buf, n, to, 0});
}

void mb_comm_recv(struct mb_comm *c, struct mb_device *dev, void *buf, size_t n,
                  enum mb_comm_type type, uint32_t from)
{
    assert(from != c->rank);
    enqueue(c, dev, (struct mb_comm_op){MB_COMM_OP_RECV, type, MB_COMM_SUM, buf, n, from, 0});
}

int mb_comm_synchronize(struct mb_comm *c, struct mb_err *err)
{
    return c->v->synchronize(c, err);
}

void mb_comm_abort(struct mb_comm *c, const char *reason)
{
    c->v->abort(c, reason);
}

void mb_comm_destroy(struct mb_comm *c)
{
    if (c != NULL) {
        c->v->destroy(c);
    }
}

/* ---- the world of one ---- */

struct single {
    struct mb_comm base;
    struct mb_err failure; /* the first one; code 0: none */
};

static void single_enqueue(struct mb_comm *c, struct mb_device *dev, const struct mb_comm_op *op)
{
    struct single *s = (struct single *)c;
    struct mb_err err;
    (void)op;
    if (mb_comm_wait_device(dev, &err) != 0 && s->failure.code == 0) {
        s->failure = err;
    }
}

static int single_failure(struct mb_comm *c, struct mb_err *err)
{
    const struct single *s = (const struct single *)c;
    return s->failure.code == 0 ? 0 : mb_err_set(err, s->failure.code, "%s", s->failure.text);
}

static void single_abort(struct mb_comm *c, const char *reason)
{
    (void)c; /* there is nobody to tell */
    (void)reason;
}

static void single_destroy(struct mb_comm *c)
{
    mb_free(c);
}

int mb_comm_create_single(struct mb_comm **out, struct mb_err *err)
{
    static const struct mb_comm_vtable V = {single_enqueue, single_failure, single_failure,
                                            single_abort, single_destroy};
    struct single *s = mb_calloc(1, sizeof *s);
    if (s == NULL) {
        return mb_err_set(err, MB_ENOMEM, "communicator: out of memory");
    }
    s->base = (struct mb_comm){.v = &V, .rank = 0, .world_size = 1, .description = "one rank"};
    *out = &s->base;
    return 0;
}
