/*
 * The carrier between devices: their own library moves what is on them, the host's carrier does the
 * rest.
 *
 *  1. create: all ranks compare the versions of their libraries, rank 0 makes an id, the host's
 *     carrier tells everybody, and the group is begun and awaited.
 *  2. A call without a device goes to the host's carrier. One with a device is started behind the
 *     device's stream; the caller goes on when the library has taken it, not when it is done.
 *     Parts of different lengths, which the library does not know, become one operation a rank.
 *  3. join: the compute stream waits for what was started, the caller does not.
 *  4. synchronize: look how far operations have come, again and again, until all are done. There is
 *     no thread that watches: the one that uses the library is the only one that ever waits for it.
 * Failures, all with the operation that was the first not to be done:
 *  5. The host's carrier has lost a peer, or was told that one gave up: its text.
 *  6. The library says that the operation failed: its text.
 *  7. The operation takes longer than the timeout; then peers are asked whether they live.
 *  8. The library does not end what runs: the process is told to end without it.
 *  The first failure is kept, told to the peers, ends what runs on the device, and is every later
 *  operation's.
 */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "worker/parallel/comm_impl.h"

enum {
    WORD_BYTES = sizeof(int64_t),
    ID_WORDS = MB_COLLECTIVE_ID_BYTES / WORD_BYTES,
    SPINS = 200,          /* looks before the first sleep */
    SLEEP_NS = 20 * 1000, /* between looks: small against any operation worth a GPU */
    ANSWER_MS = 2000,     /* for a sign of life of a peer, behind the timeout */
    AHEAD_MAX = 24        /* operations under way when the compute stream begins to wait */
};

struct started {
    enum mb_comm_kind kind;
    size_t n;
    uint64_t deadline_ms;
};

struct device_comm {
    struct mb_comm base;
    struct mb_comm *host;
    struct mb_device *dev;
    const struct mb_collectives *lib;
    struct mb_group *group; /* NULL after a failure */
    uint64_t timeout_ms;
    struct started
        started[MB_COLLECTIVE_IN_FLIGHT]; /* operation k at k % MB_COLLECTIVE_IN_FLIGHT */
    uint64_t n_done;                      /* of base.n_started */
    struct mb_err failure;                /* the first one; code 0: none */
};

/* ---- failing ---- */

static atomic_int is_stuck;

int mb_comm_device_is_stuck(void)
{
    return atomic_load(&is_stuck);
}

/* Ends what runs on the device: who waits for that knows why. */
static void drop(struct device_comm *c, const char *reason)
{
    if (c->group == NULL) {
        return;
    }
    mb_warn("comm", "ending what runs on the GPUs: %s", reason);
    if (!c->lib->destroy(c->group, 1)) {
        mb_warn("comm",
                "the GPUs' library has not ended it in %d s: this process ends without waiting for "
                "its GPU",
                MB_COLLECTIVE_END_MS / 1000);
        atomic_store(&is_stuck, 1);
    }
    c->group = NULL;
}

static void end(struct device_comm *c, const char *reason)
{
    mb_comm_abort(c->host, reason); /* tells the peers */
    drop(c, reason);
}

/* Returns the failure's code. */
static int fail(struct device_comm *c, const struct mb_err *why)
{
    const struct started *s = &c->started[c->n_done % MB_COLLECTIVE_IN_FLIGHT];
    if (c->n_done == c->base.n_started) {
        mb_err_set(&c->failure, why->code, "meeting on the GPUs: %s", why->text);
    } else {
        mb_err_set(&c->failure, why->code, "%s %" PRIu64 " between GPUs (%zu elements): %s",
                   mb_comm_kind_name(s->kind), c->n_done + 1, s->n, why->text);
    }
    end(c, c->failure.text);
    return c->failure.code;
}

static int kept_failure(const struct device_comm *c, struct mb_err *err)
{
    return c->failure.code == 0 ? 0 : mb_err_set(err, c->failure.code, "%s", c->failure.text);
}

/* ---- looking ---- */

static int time_is_up(struct device_comm *c)
{
    const unsigned long long after_s = c->timeout_ms / 1000;
    struct mb_err err;
    uint32_t rank = 0;
    mb_err_clear(&err);
    const int found = mb_comm_find_silent(c->host, ANSWER_MS, &rank);
    if (c->host->v->peek(c->host, &err) != 0) {
        return fail(c, &err); /* somebody has said why meanwhile */
    }
    if (found) {
        mb_err_set(&err, MB_ETIMEOUT, "timeout of %llu s: rank %u does not answer", after_s, rank);
    } else {
        mb_err_set(&err, MB_ETIMEOUT, "timeout of %llu s: a rank hangs or calls something else",
                   after_s);
    }
    return fail(c, &err);
}

/* As the library's poll(): 0, 1 if it is still busy, or the failure's code. */
static int look(struct device_comm *c, uint64_t deadline_ms)
{
    struct mb_err err;
    mb_err_clear(&err);
    int rc = c->lib->poll(c->group, &c->n_done, &err);
    if (rc < 0) {
        /* The peer's own words are better than what the library makes of its end. */
        struct mb_err of_host;
        return fail(c, c->host->v->peek(c->host, &of_host) != 0 ? &of_host : &err);
    }
    if (rc == 0 && c->n_done == c->base.n_started) {
        return 0;
    }
    if (c->host->v->peek(c->host, &err) != 0) {
        return fail(c, &err);
    }
    if (mb_mono_ms() >= deadline_ms) {
        return time_is_up(c);
    }
    return rc;
}

static void rest(int *n_looks)
{
    const struct timespec t = {.tv_nsec = SLEEP_NS};
    if (++*n_looks > SPINS) {
        nanosleep(&t, NULL);
    }
}

/* Until the library takes another operation and no more than `most` are under way. */
static int wait_until(struct device_comm *c, uint64_t most)
{
    int n_looks = 0;
    for (;;) {
        uint64_t first = c->n_done;
        int rc = look(c, c->started[first % MB_COLLECTIVE_IN_FLIGHT].deadline_ms);
        if (rc < 0) {
            return rc;
        }
        if (rc == 0 && c->base.n_started - c->n_done <= most) {
            return 0;
        }
        rest(&n_looks);
    }
}

/* ---- the calls ---- */

/* ops: one, or several that run at once and go by the first one's name. */
static void start_all(struct device_comm *c, struct mb_device *dev, const struct mb_comm_op *ops,
                      size_t n)
{
    struct mb_err err;
    mb_err_clear(&err);
    if (c->failure.code != 0 || wait_until(c, MB_COLLECTIVE_IN_FLIGHT - 1) != 0) {
        return;
    }
    c->started[c->base.n_started++ % MB_COLLECTIVE_IN_FLIGHT] =
        (struct started){ops[0].kind, ops[0].n, mb_mono_ms() + c->timeout_ms};
    if (c->lib->start(c->group, dev->stream, ops, n, &err) != 0) {
        (void)fail(c, &err);
        return;
    }
    (void)wait_until(c, MB_COLLECTIVE_IN_FLIGHT); /* a failure is kept */
}

static void start(struct device_comm *c, struct mb_device *dev, const struct mb_comm_op *op)
{
    if (op->n > 0) {
        start_all(c, dev, op, 1);
    }
}

/* Of unequal parts: each rank's by itself. */
static void start_parts(struct device_comm *c, struct mb_device *dev, const struct mb_comm_op *op)
{
    for (uint32_t r = 0; r < c->base.world_size; r++) {
        size_t begin, end;
        struct mb_comm_op part = *op;
        mb_comm_range(op->n, c->base.world_size, r, &begin, &end);
        part.kind = op->kind == MB_COMM_OP_ALLGATHER ? MB_COMM_OP_BROADCAST : MB_COMM_OP_REDUCE;
        part.buf = (char *)op->buf + begin * mb_comm_type_size(op->type);
        part.n = end - begin;
        part.peer = r;
        start(c, dev, &part);
    }
}

static void device_enqueue(struct mb_comm *base, struct mb_device *dev, const struct mb_comm_op *op)
{
    struct device_comm *c = (struct device_comm *)base;
    const int has_parts = op->kind == MB_COMM_OP_REDUCE_SCATTER || op->kind == MB_COMM_OP_ALLGATHER;
    if (dev == NULL) {
        c->host->v->enqueue(c->host, NULL, op);
    } else if (has_parts && op->n % c->base.world_size != 0) {
        start_parts(c, dev, op);
    } else {
        start(c, dev, op);
    }
}

static void device_exchange(struct mb_comm *base, struct mb_device *dev,
                            const struct mb_comm_op *ops, size_t n)
{
    struct device_comm *c = (struct device_comm *)base;
    if (dev != NULL) {
        start_all(c, dev, ops, n);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        c->host->v->enqueue(c->host, NULL, &ops[i]);
    }
}

static int device_synchronize(struct mb_comm *base, struct mb_err *err)
{
    struct device_comm *c = (struct device_comm *)base;
    if (c->failure.code == 0 && c->n_done != c->base.n_started) {
        (void)wait_until(c, 0); /* a failure is kept */
    }
    int rc = c->host->v->synchronize(c->host, err);
    return c->failure.code != 0 ? kept_failure(c, err) : rc;
}

static int device_peek(struct mb_comm *base, struct mb_err *err)
{
    struct device_comm *c = (struct device_comm *)base;
    return c->failure.code != 0 ? kept_failure(c, err) : c->host->v->peek(c->host, err);
}

/* The caller is held up only by operations that are far behind: so it can see a peer's death before
 * what it enqueues fills the device's queue. */
static void device_join(struct mb_comm *base, struct mb_device *dev, uint64_t n_ops)
{
    struct device_comm *c = (struct device_comm *)base;
    struct mb_err err;
    mb_err_clear(&err);
    if (c->failure.code == 0 && n_ops > 0 && wait_until(c, AHEAD_MAX) == 0 &&
        c->lib->join(c->group, dev->stream, n_ops, &err) != 0) {
        (void)fail(c, &err);
    }
}

static void device_abort(struct mb_comm *base, const char *reason)
{
    struct device_comm *c = (struct device_comm *)base;
    if (c->failure.code == 0) {
        mb_err_set(&c->failure, MB_ECANCELED, "this rank gave up: %s", reason);
        end(c, reason);
    }
}

static void device_destroy(struct mb_comm *base)
{
    struct device_comm *c = (struct device_comm *)base;
    struct mb_err of_host;
    if (c->host->v->peek(c->host, &of_host) != 0) {
        drop(c, of_host.text);
    } else if (c->n_done != c->base.n_started) {
        drop(c, "nobody waits for it any more");
    } else {
        (void)c->lib->destroy(c->group, 0); /* it can be stuck only after a failure */
    }
    mb_comm_destroy(c->host);
    mb_free(c);
}

static int device_find_silent(struct mb_comm *base, uint64_t wait_ms, uint32_t *rank)
{
    return mb_comm_find_silent(((struct device_comm *)base)->host, wait_ms, rank);
}

/* ---- meeting ---- */

/* From rank 0 to all. */
static int tell_all(struct device_comm *c, int64_t *words, size_t n, struct mb_err *err)
{
    mb_comm_broadcast(c->host, NULL, words, n, MB_COMM_I64, 0);
    return mb_comm_synchronize(c->host, err);
}

static int check_version(int own, const char *text, int64_t of_rank0, struct mb_err *err)
{
    return of_rank0 == own ? 0
                           : mb_err_set(err, MB_EUNSUPPORTED,
                                        "%s here, version number %" PRId64
                                        " on rank 0, %d here: install the same on all nodes",
                                        text, of_rank0, own);
}

static int meet(struct device_comm *c, struct mb_err *err)
{
    char text[32];
    int own = 0, n_looks = 0;
    int64_t words[1 + ID_WORDS];
    uint8_t id[MB_COLLECTIVE_ID_BYTES] = {0};
    int rc = c->lib->version(&own, text, err);
    if (rc == 0 && c->base.rank == 0) {
        rc = c->lib->new_id(id, err);
    }
    if (rc != 0) {
        return rc;
    }
    words[0] = own;
    memcpy(words + 1, id, sizeof id);
    rc = tell_all(c, words, 1 + ID_WORDS, err);
    if (rc == 0) {
        rc = check_version(own, text, words[0], err);
    }
    if (rc != 0) {
        return rc;
    }
    memcpy(id, words + 1, sizeof id);
    rc = c->lib->create(c->dev->ctx, id, c->base.rank, c->base.world_size, &c->group, err);
    if (rc != 0) {
        return rc;
    }
    for (uint64_t deadline_ms = mb_mono_ms() + c->timeout_ms;;) {
        rc = look(c, deadline_ms);
        if (rc <= 0) {
            break;
        }
        rest(&n_looks);
    }
    snprintf(c->base.description, sizeof c->base.description, "%s between GPUs; %.100s", text,
             mb_comm_describe(c->host));
    return rc == 0 ? 0 : kept_failure(c, err);
}

int mb_comm_create_device(struct mb_comm *host, struct mb_device *dev, uint64_t timeout_ms,
                          struct mb_comm **out, struct mb_err *err)
{
    static const struct mb_comm_vtable V = {device_enqueue,  device_synchronize, device_peek,
                                            device_join,     device_abort,       device_destroy,
                                            device_exchange, device_find_silent};
    struct device_comm *c = mb_calloc(1, sizeof *c);
    int rc = c == NULL ? mb_err_set(err, MB_ENOMEM, "communicator: out of memory") : 0;
    if (rc == 0) {
        c->base = (struct mb_comm){
            .v = &V, .rank = mb_comm_rank(host), .world_size = mb_comm_world_size(host)};
        c->host = host;
        c->dev = dev;
        c->lib = dev->ops->collectives;
        c->timeout_ms = timeout_ms;
        rc = meet(c, err);
    }
    if (rc != 0) {
        mb_comm_abort(host, err->text);
        if (c != NULL) {
            drop(c, err->text);
        }
        mb_comm_destroy(host);
        mb_free(c);
        return rc;
    }
    *out = &c->base;
    return 0;
}
