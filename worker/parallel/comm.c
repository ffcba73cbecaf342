/*
 * The calls of comm.h, the same for every carrier, and the world of one.
 *
 *  1. A call makes a struct mb_comm_op of its arguments and gives it to the carrier.
 *  2. A carrier of host memory waits for the device's stream first; a failure found there becomes
 *     the communicator's: synchronize() returns it.
 *  3. In a world of one nothing is left to do, but failures of the device are kept all the same.
 *  4. A group's operation is the world's, with the group's ranks in it. Each group counts its own:
 *     how many others a rank takes part in is no matter of the group's.
 */
#include "worker/parallel/comm_impl.h"

#include <assert.h>
#include <stdio.h>
#include "base/alloc.h"
#include "base/half.h"

const char *mb_comm_kind_name(enum mb_comm_kind kind)
{
    static const char *const NAMES[] = {"?",          "all-reduce", "reduce-scatter",
                                        "all-gather", "broadcast",  "barrier",
                                        "send",       "receive",    "reduce"};
    return (size_t)kind < sizeof NAMES / sizeof NAMES[0] ? NAMES[kind] : "?";
}

int mb_comm_is_collective(enum mb_comm_kind kind)
{
    return kind != MB_COMM_OP_SEND && kind != MB_COMM_OP_RECV;
}

size_t mb_comm_type_size(enum mb_comm_type type)
{
    return type == MB_COMM_F32 ? 4 : type == MB_COMM_BF16 || type == MB_COMM_F16 ? 2 : 8;
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

static void combine_f16(uint16_t *d, const uint16_t *s, size_t n, enum mb_comm_reduce reduce)
{
    for (size_t i = 0; i < n; i++) {
        const float a = mb_f16_float(d[i]), b = mb_f16_float(s[i]);
        d[i] = mb_float_f16(reduce == MB_COMM_SUM ? a + b : b > a ? b : a);
    }
}

static void combine_bf16(uint16_t *d, const uint16_t *s, size_t n, enum mb_comm_reduce reduce)
{
    for (size_t i = 0; i < n; i++) {
        const float a = mb_bf16_float(d[i]), b = mb_bf16_float(s[i]);
        d[i] = mb_float_bf16(reduce == MB_COMM_SUM ? a + b : b > a ? b : a);
    }
}

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
    case MB_COMM_F16:
        combine_f16(dst, src, n, reduce);
        break;
    case MB_COMM_BF16:
        combine_bf16(dst, src, n, reduce);
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

void mb_comm_join_host(struct mb_comm *c, struct mb_device *dev, uint64_t n_ops)
{
    struct mb_err kept;
    (void)dev;
    (void)n_ops;
    (void)c->v->synchronize(c, &kept);
}

void mb_comm_allreduce(struct mb_comm *c, struct mb_device *dev, void *buf, size_t n,
                       enum mb_comm_type type, enum mb_comm_reduce reduce)
{
    enqueue(c, dev,
            (struct mb_comm_op){
                .kind = MB_COMM_OP_ALLREDUCE, .type = type, .reduce = reduce, .buf = buf, .n = n});
}

void mb_comm_reduce_scatter(struct mb_comm *c, struct mb_device *dev, void *buf, size_t n,
                            enum mb_comm_type type, enum mb_comm_reduce reduce)
{
    enqueue(
        c, dev,
        (struct mb_comm_op){
            .kind = MB_COMM_OP_REDUCE_SCATTER, .type = type, .reduce = reduce, .buf = buf, .n = n});
}

void mb_comm_reduce(struct mb_comm *c, struct mb_device *dev, void *buf, size_t n,
                    enum mb_comm_type type, enum mb_comm_reduce reduce, uint32_t root)
{
    enqueue(c, dev,
            (struct mb_comm_op){.kind = MB_COMM_OP_REDUCE,
                                .type = type,
                                .reduce = reduce,
                                .buf = buf,
                                .n = n,
                                .peer = root});
}

void mb_comm_allgather(struct mb_comm *c, struct mb_device *dev, void *buf, size_t n,
                       enum mb_comm_type type)
{
    enqueue(
        c, dev,
        (struct mb_comm_op){
            .kind = MB_COMM_OP_ALLGATHER, .type = type, .reduce = MB_COMM_SUM, .buf = buf, .n = n});
}

void mb_comm_broadcast(struct mb_comm *c, struct mb_device *dev, void *buf, size_t n,
                       enum mb_comm_type type, uint32_t root)
{
    enqueue(c, dev,
            (struct mb_comm_op){.kind = MB_COMM_OP_BROADCAST,
                                .type = type,
                                .reduce = MB_COMM_SUM,
                                .buf = buf,
                                .n = n,
                                .peer = root});
}

void mb_comm_barrier(struct mb_comm *c)
{
    enqueue(c, NULL,
            (struct mb_comm_op){
                .kind = MB_COMM_OP_BARRIER, .type = MB_COMM_I64, .reduce = MB_COMM_SUM});
}

void mb_comm_send(struct mb_comm *c, struct mb_device *dev, const void *buf, size_t n,
                  enum mb_comm_type type, uint32_t to)
{
    assert(to != c->rank);
    enqueue(c, dev,
            (struct mb_comm_op){.kind = MB_COMM_OP_SEND,
                                .type = type,
                                .reduce = MB_COMM_SUM,
                                .buf = (void *)(uintptr_t)buf,
                                .n = n,
                                .peer = to});
}

void mb_comm_recv(struct mb_comm *c, struct mb_device *dev, void *buf, size_t n,
                  enum mb_comm_type type, uint32_t from)
{
    assert(from != c->rank);
    enqueue(c, dev,
            (struct mb_comm_op){.kind = MB_COMM_OP_RECV,
                                .type = type,
                                .reduce = MB_COMM_SUM,
                                .buf = buf,
                                .n = n,
                                .peer = from});
}

void mb_comm_exchange(struct mb_comm *c, struct mb_device *dev,
                      const struct mb_comm_transfer *transfers, size_t n, enum mb_comm_type type)
{
    struct mb_comm_op ops[MB_COMM_EXCHANGE_MAX];
    assert(n <= MB_COMM_EXCHANGE_MAX);
    for (size_t i = 0; i < n; i++) {
        assert(transfers[i].peer < c->world_size && transfers[i].peer != c->rank);
        ops[i] =
            (struct mb_comm_op){.kind = transfers[i].is_send ? MB_COMM_OP_SEND : MB_COMM_OP_RECV,
                                .type = type,
                                .reduce = MB_COMM_SUM,
                                .buf = transfers[i].buf,
                                .n = transfers[i].n,
                                .peer = transfers[i].peer};
        if (c->v->exchange == NULL) {
            enqueue(c, dev, ops[i]);
        }
    }
    if (n > 0 && c->v->exchange != NULL) {
        c->v->exchange(c, dev, ops, n);
    }
}

void mb_comm_join(struct mb_comm *c, struct mb_device *dev)
{
    c->v->join(c, dev, c->n_started);
}

uint64_t mb_comm_mark(const struct mb_comm *c)
{
    return c->n_started;
}

void mb_comm_join_until(struct mb_comm *c, struct mb_device *dev, uint64_t mark)
{
    c->v->join(c, dev, mark);
}

int mb_comm_synchronize(struct mb_comm *c, struct mb_err *err)
{
    return c->v->synchronize(c, err);
}

int mb_comm_find_silent(struct mb_comm *c, uint64_t wait_ms, uint32_t *rank)
{
    return c->v->find_silent != NULL ? c->v->find_silent(c, wait_ms, rank) : 0;
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
    static const struct mb_comm_vtable V = {
        single_enqueue, single_failure, single_failure, mb_comm_join_host,
        single_abort,   single_destroy, NULL,           NULL};
    struct single *s = mb_calloc(1, sizeof *s);
    if (s == NULL) {
        return mb_err_set(err, MB_ENOMEM, "communicator: out of memory");
    }
    s->base = (struct mb_comm){.v = &V, .rank = 0, .world_size = 1, .description = "one rank"};
    *out = &s->base;
    return 0;
}

/* ---- some ranks of a world ---- */

struct group {
    struct mb_comm base;
    struct mb_comm *world;
    struct mb_comm_ranks ranks;
    uint32_t n_collectives;
};

static void group_enqueue(struct mb_comm *c, struct mb_device *dev, const struct mb_comm_op *op)
{
    struct group *g = (struct group *)c;
    struct mb_comm_op of_group = *op;
    of_group.ranks = g->ranks;
    if (mb_comm_is_collective(op->kind)) {
        of_group.seq = ++g->n_collectives;
    }
    g->world->v->enqueue(g->world, dev, &of_group);
}

static int group_synchronize(struct mb_comm *c, struct mb_err *err)
{
    struct group *g = (struct group *)c;
    return g->world->v->synchronize(g->world, err);
}

static int group_peek(struct mb_comm *c, struct mb_err *err)
{
    struct group *g = (struct group *)c;
    return g->world->v->peek(g->world, err);
}

static void group_abort(struct mb_comm *c, const char *reason)
{
    struct group *g = (struct group *)c;
    g->world->v->abort(g->world, reason);
}

static int group_find_silent(struct mb_comm *c, uint64_t wait_ms, uint32_t *rank)
{
    struct group *g = (struct group *)c;
    return mb_comm_find_silent(g->world, wait_ms, rank);
}

int mb_comm_create_group(struct mb_comm *world, uint32_t first, uint32_t stride, uint32_t n,
                         struct mb_comm **out, struct mb_err *err)
{
    static const struct mb_comm_vtable V = {
        group_enqueue, group_synchronize, group_peek, mb_comm_join_host,
        group_abort,   single_destroy,    NULL,       group_find_silent};
    const uint32_t place = stride > 0 ? (world->rank - first) / stride : n;
    assert(n > 0 && stride > 0 && first + (n - 1) * stride < world->world_size);
    assert(world->rank >= first && place < n && first + place * stride == world->rank);
    if (n == 1) {
        return mb_comm_create_single(out, err);
    }
    struct group *g = mb_calloc(1, sizeof *g);
    if (g == NULL) {
        return mb_err_set(err, MB_ENOMEM, "communicator: out of memory");
    }
    g->base = (struct mb_comm){.v = &V, .rank = place, .world_size = n};
    snprintf(g->base.description, sizeof g->base.description, "rank %u of %u among ranks %u to %u",
             place, n, first, first + (n - 1) * stride);
    g->world = world;
    g->ranks = (struct mb_comm_ranks){first, stride, n};
    *out = &g->base;
    return 0;
}
