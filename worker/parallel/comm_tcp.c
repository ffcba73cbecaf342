/*
 * The carrier of the CPU backend: rings over shared memory (same host) and TCP (other hosts).
 *
 * Happy path
 *  1. mb_comm_connect: every pair of ranks has met (comm_rendezvous.c); one thread starts.
 *  2. A call puts an operation into the queue (bounded; the caller waits when it is full) and wakes
 *     the thread, which runs operations in order.
 *  3. all-reduce = reduce-scatter + all-gather on the ring rank -> rank + 1. In step s a rank sends
 *     chunk rank - s - 1 and adds what arrives to chunk rank - s - 2, so chunk c is summed in the
 *     order c + 1, c + 2, .., c on every carrier, and ends on rank c. Broadcast is a pipeline from
 * the root, barrier an all-reduce of one number.
 *  4. Each transfer starts with a header (kind, number, bytes) that the receiver compares with what
 *     it is doing itself.
 *  5. A rank that can move nothing sleeps in one poll() over: the queue's eventfd, the control
 *     sockets of all peers, and the data sockets in use. Shared memory rings through the control
 *     socket, so a death is noticed wherever a rank waits, also between operations.
 *  6. destroy: goodbye to all peers, then close. A peer that has said goodbye is no death.
 * Failures (the first one is kept, told to all peers, and ends every later operation)
 *  7. A control socket ends without goodbye: MB_EUNAVAIL "all-reduce 12: rank 1 went away".
 *  8. A peer says abort: its reason, MB_EUNAVAIL.
 *  9. The operation lasts longer than the timeout: MB_ETIMEOUT naming the ranks waited for.
 * 10. Headers differ: MB_EPROTO naming both sides' operations.
 */
#include "worker/parallel/comm_rendezvous.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "worker/parallel/comm_impl.h"

enum { HEADER_BYTES = 16, SCRATCH_BYTES = 256 * 1024 };

struct tcp_comm {
    struct mb_comm base;
    struct mb_peer *peers; /* [world]; the thread's once it runs */
    struct pollfd *polls;  /* [1 + 3 * world] */
    uint64_t timeout_ms;
    pthread_t thread;
    int wake_fd;
    uint8_t *scratch; /* what arrives and is to be combined */

    /* The thread's own: the operation that runs. */
    uint32_t n_collectives;
    struct mb_comm_op op;
    uint64_t deadline_ms; /* UINT64_MAX between operations */

    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t moved; /* an operation was added or ended */
    struct mb_comm_op queue[MB_COMM_QUEUE_MAX];
    size_t n_queued, n_done; /* counted since the start; the queue is the difference */
    struct mb_err failure;   /* the first one; code 0: none */
    char abort_reason[MB_CONTROL_TEXT_MAX]; /* "": nothing to tell */
    int closing;
};

/* One direction of a step. done counts header and payload bytes. */
struct flow {
    struct mb_peer *peer; /* NULL: nothing to do */
    uint32_t rank;
    uint8_t header[HEADER_BYTES];
    uint8_t *p;
    size_t n;
    size_t done;
    int combine; /* receiving: add to p instead of storing */
    size_t held; /* receiving with combine: bytes in scratch that are no whole element yet */
};

/* ---- failing ---- */

static void send_control(struct mb_peer *p, const void *bytes, size_t n)
{
    if (p->control < 0) {
        return;
    }
    /* A full socket means a peer that does not read; it will see the end of the stream instead. */
    (void)!send(p->control, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void tell_abort(struct tcp_comm *c, const char *text)
{
    uint8_t frame[3 + MB_CONTROL_TEXT_MAX];
    size_t n = strlen(text);
    n = n < MB_CONTROL_TEXT_MAX ? n : MB_CONTROL_TEXT_MAX;
    frame[0] = 'A';
    frame[1] = (uint8_t)(n & 0xff);
    frame[2] = (uint8_t)(n >> 8);
    memcpy(frame + 3, text, n);
    for (uint32_t r = 0; r < c->base.world_size; r++) {
        send_control(&c->peers[r], frame, 3 + n);
    }
}

/* What this rank is doing, for texts. */
static const char *doing(const struct tcp_comm *c, char out[64])
{
    if (c->deadline_ms == UINT64_MAX) {
        snprintf(out, 64, "between operations");
    } else if (c->op.kind == MB_COMM_OP_SEND || c->op.kind == MB_COMM_OP_RECV) {
        snprintf(out, 64, "%s with rank %u", mb_comm_kind_name(c->op.kind), c->op.peer);
    } else {
        snprintf(out, 64, "%s %u", mb_comm_kind_name(c->op.kind), c->op.seq);
    }
    return out;
}

/* ---- control sockets ---- */

/* Takes whole frames off the inbox. */
static int take_frames(struct tcp_comm *c, uint32_t rank, struct mb_err *err)
{
    struct mb_peer *p = &c->peers[rank];
    size_t at = 0;
    while (at < p->n_inbox) {
        uint8_t kind = p->inbox[at];
        if (kind == 'D') {
            at++;
        } else if (kind == 'B') {
            p->left = 1;
            at++;
        } else if (kind == 'A') {
            if (p->n_inbox - at < 3) {
                break;
            }
            size_t n = (size_t)p->inbox[at + 1] | (size_t)p->inbox[at + 2] << 8;
            if (n > MB_CONTROL_TEXT_MAX) {
                return mb_err_set(err, MB_EPROTO, "rank %u speaks another protocol", rank);
            }
            if (p->n_inbox - at < 3 + n) {
                break;
            }
            return mb_err_set(err, MB_EUNAVAIL, "rank %u gave up: %.*s", rank, (int)n,
                              (const char *)p->inbox + at + 3);
        } else {
            return mb_err_set(err, MB_EPROTO, "rank %u speaks another protocol", rank);
        }
    }
    memmove(p->inbox, p->inbox + at, p->n_inbox - at);
    p->n_inbox -= at;
    return 0;
}

static int read_control(struct tcp_comm *c, uint32_t rank, struct mb_err *err)
{
    struct mb_peer *p = &c->peers[rank];
    for (;;) {
        ssize_t n = recv(p->control, p->inbox + p->n_inbox, sizeof p->inbox - p->n_inbox, 0);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0 && errno == EAGAIN) {
            return 0;
        }
        if (n <= 0) {
            close(p->control);
            p->control = -1;
            char what[64];
            return p->left ? 0
                           : mb_err_set(err, MB_EUNAVAIL, "%s: rank %u went away", doing(c, what),
                                        rank);
        }
        p->n_inbox += (size_t)n;
        int rc = take_frames(c, rank, err);
        if (rc != 0) {
            char what[64];
            return mb_err_wrap(err, "%s", doing(c, what));
        }
    }
}

/* ---- sleeping ---- */

static int time_is_up(const struct tcp_comm *c, const struct flow *out, const struct flow *in,
                      struct mb_err *err)
{
    char what[64], whom[48] = "";
    if (in != NULL && in->peer != NULL && in->done < HEADER_BYTES + in->n) {
        snprintf(whom, sizeof whom, "waiting for data of rank %u", in->rank);
    } else if (out != NULL && out->peer != NULL) {
        snprintf(whom, sizeof whom, "waiting for rank %u to read", out->rank);
    }
    return mb_err_set(err, MB_ETIMEOUT, "%s: timeout of %llu s, %s", doing(c, what),
                      (unsigned long long)(c->timeout_ms / 1000), whom);
}

static int needs(const struct flow *f)
{
    return f != NULL && f->peer != NULL && f->done < HEADER_BYTES + f->n;
}

static int wait_flow(struct pollfd *polls, size_t *n, const struct flow *f, short events)
{
    if (!needs(f)) {
        return 0;
    }
    if (f->peer->shm != NULL) {
        return events == POLLIN ? mb_shm_arm_read(f->peer->shm) : mb_shm_arm_write(f->peer->shm);
    }
    polls[(*n)++] = (struct pollfd){.fd = f->peer->data, .events = events};
    return 0;
}

/* Sleep until a peer, the queue or the clock has something to say. out and in may be NULL; `out`
 * is passed only when it is what we wait for. */
static int wait_any(struct tcp_comm *c, const struct flow *out, const struct flow *in,
                    struct mb_err *err)
{
    size_t n = 0;
    c->polls[n++] = (struct pollfd){.fd = c->wake_fd, .events = POLLIN};
    for (uint32_t r = 0; r < c->base.world_size; r++) {
        c->polls[n++] = (struct pollfd){.fd = c->peers[r].control, .events = POLLIN};
    }
    int ready = wait_flow(c->polls, &n, out, POLLOUT);
    ready |= wait_flow(c->polls, &n, in, POLLIN);
    int wait_ms = -1;
    if (ready) {
        wait_ms = 0;
    } else if (c->deadline_ms != UINT64_MAX) {
        uint64_t now = mb_mono_ms();
        if (now >= c->deadline_ms) {
            return time_is_up(c, out, in, err);
        }
        uint64_t left = c->deadline_ms - now;
        wait_ms = left > 60000 ? 60000 : (int)left;
    }
    if (poll(c->polls, n, wait_ms) < 0 && errno != EINTR) {
        return mb_err_sys(err, errno, "communicator: poll");
    }
    if (c->polls[0].revents != 0) {
        uint64_t ignored;
        (void)!read(c->wake_fd, &ignored, sizeof ignored);
        pthread_mutex_lock(&c->lock);
        int stop = c->closing || c->abort_reason[0] != '\0';
        pthread_mutex_unlock(&c->lock);
        if (stop) {
            return mb_err_set(err, MB_ECANCELED,
                              "communicator: closed while operations were queued");
        }
    }
    for (uint32_t r = 0; r < c->base.world_size; r++) {
        if (c->polls[1 + r].fd >= 0 && c->polls[1 + r].revents != 0) {
            int rc = read_control(c, r, err);
            if (rc != 0) {
                return rc;
            }
        }
    }
    return 0;
}

/* ---- moving bytes ---- */

static int data_failed(struct tcp_comm *c, uint32_t rank, const char *why, struct mb_err *err)
{
    /* The control socket may hold the peer's own words on why it ended. */
    if (c->peers[rank].control >= 0) {
        int rc = read_control(c, rank, err);
        if (rc != 0) {
            return rc;
        }
    }
    char what[64];
    return mb_err_set(err, MB_EUNAVAIL, "%s: rank %u went away (%s)", doing(c, what), rank, why);
}

/* Moves up to n bytes; the number moved, 0 if it would block, negative on failure. */
static ssize_t move_out(struct tcp_comm *c, struct flow *f, const void *p, size_t n,
                        struct mb_err *err)
{
    if (f->peer->shm != NULL) {
        int ring = 0;
        size_t k = mb_shm_try_write(f->peer->shm, p, n, &ring);
        if (ring) {
            send_control(f->peer, "D", 1);
        }
        if (k == 0 && f->peer->left) {
            return data_failed(c, f->rank, "it has ended", err);
        }
        return (ssize_t)k;
    }
    ssize_t k = send(f->peer->data, p, n, MSG_NOSIGNAL);
    if (k < 0) {
        return errno == EAGAIN || errno == EINTR ? 0
                                                 : data_failed(c, f->rank, strerror(errno), err);
    }
    return k;
}

static ssize_t move_in(struct tcp_comm *c, struct flow *f, void *p, size_t n, struct mb_err *err)
{
    if (f->peer->shm != NULL) {
        int ring = 0;
        size_t k = mb_shm_try_read(f->peer->shm, p, n, &ring);
        if (ring) {
            send_control(f->peer, "D", 1);
        }
        if (k == 0 && (f->peer->left || f->peer->control < 0)) {
            k = mb_shm_try_read(f->peer->shm, p, n, &ring); /* written before it left */
            if (k == 0) {
                return data_failed(c, f->rank, "it has ended", err);
            }
        }
        return (ssize_t)k;
    }
    ssize_t k = recv(f->peer->data, p, n, 0);
    if (k < 0) {
        return errno == EAGAIN || errno == EINTR ? 0
                                                 : data_failed(c, f->rank, strerror(errno), err);
    }
    return k > 0 ? k : data_failed(c, f->rank, "it has ended", err);
}

static void header_write(const struct mb_comm_op *op, size_t bytes, uint8_t h[HEADER_BYTES])
{
    /* Both ends of a point-to-point transfer write the same kind. */
    uint32_t kind = op->kind == MB_COMM_OP_RECV ? MB_COMM_OP_SEND : op->kind;
    uint64_t n = bytes;
    memset(h, 0, HEADER_BYTES);
    h[0] = (uint8_t)kind;
    h[1] = (uint8_t)op->type;
    h[2] = (uint8_t)op->reduce;
    for (int i = 0; i < 4; i++) {
        h[4 + i] = (uint8_t)(op->seq >> 8 * i);
    }
    for (int i = 0; i < 8; i++) {
        h[8 + i] = (uint8_t)(n >> 8 * i);
    }
}

static int header_check(struct tcp_comm *c, const struct flow *f, struct mb_err *err)
{
    uint8_t mine[HEADER_BYTES];
    header_write(&c->op, f->n, mine);
    if (memcmp(mine, f->header, HEADER_BYTES) == 0) {
        return 0;
    }
    uint32_t seq = 0;
    uint64_t bytes = 0;
    for (int i = 0; i < 4; i++) {
        seq |= (uint32_t)f->header[4 + i] << 8 * i;
    }
    for (int i = 0; i < 8; i++) {
        bytes |= (uint64_t)f->header[8 + i] << 8 * i;
    }
    char what[64];
    return mb_err_set(err, MB_EPROTO,
                      "%s of %zu bytes: rank %u is in %s %u of %llu bytes: ranks do not call the "
                      "same operations",
                      doing(c, what), f->n, f->rank,
                      mb_comm_kind_name((enum mb_comm_kind)f->header[0]), seq,
                      (unsigned long long)bytes);
}

/* up_to: payload bytes that may be sent by now. 1: something moved. */
static int pump_out(struct tcp_comm *c, struct flow *f, size_t up_to, struct mb_err *err)
{
    int moved = 0;
    while (f->peer != NULL && f->done < HEADER_BYTES + up_to) {
        size_t at = f->done < HEADER_BYTES ? f->done : f->done - HEADER_BYTES;
        const uint8_t *p = f->done < HEADER_BYTES ? f->header + at : f->p + at;
        size_t n = f->done < HEADER_BYTES ? HEADER_BYTES - at : up_to - at;
        ssize_t k = move_out(c, f, p, n, err);
        if (k < 0) {
            return (int)k;
        }
        if (k == 0) {
            break;
        }
        f->done += (size_t)k;
        moved = 1;
    }
    return moved;
}

static ssize_t take_combined(struct tcp_comm *c, struct flow *f, struct mb_err *err)
{
    size_t es = mb_comm_type_size(c->op.type);
    size_t at = f->done - HEADER_BYTES - f->held; /* first element not combined yet, in bytes */
    size_t left = f->n - at - f->held;
    size_t room = SCRATCH_BYTES - f->held;
    ssize_t k = move_in(c, f, c->scratch + f->held, left < room ? left : room, err);
    if (k <= 0) {
        return k;
    }
    size_t have = f->held + (size_t)k;
    size_t whole = have / es;
    mb_comm_combine(f->p + at, c->scratch, whole, c->op.type, c->op.reduce);
    f->held = have - whole * es;
    memmove(c->scratch, c->scratch + whole * es, f->held);
    return k;
}

static int pump_in(struct tcp_comm *c, struct flow *f, struct mb_err *err)
{
    int moved = 0;
    while (needs(f)) {
        ssize_t k;
        if (f->done < HEADER_BYTES) {
            k = move_in(c, f, f->header + f->done, HEADER_BYTES - f->done, err);
        } else if (f->combine) {
            k = take_combined(c, f, err);
        } else {
            size_t at = f->done - HEADER_BYTES;
            k = move_in(c, f, f->p + at, f->n - at, err);
        }
        if (k < 0) {
            return (int)k;
        }
        if (k == 0) {
            break;
        }
        size_t before = f->done;
        f->done += (size_t)k;
        moved = 1;
        if (before < HEADER_BYTES && f->done >= HEADER_BYTES) {
            int rc = header_check(c, f, err);
            if (rc != 0) {
                return rc;
            }
        }
    }
    return moved;
}

/* Both directions at once. follow: `out` may send no more of its payload than `in` has taken. */
static int transfer(struct tcp_comm *c, struct flow *out, struct flow *in, int follow,
                    struct mb_err *err)
{
    if (out->peer != NULL) {
        header_write(&c->op, out->n, out->header);
    }
    while (needs(out) || needs(in)) {
        size_t up_to = out->n;
        int a = pump_in(c, in, err);
        if (a < 0) {
            return a;
        }
        if (follow && in->peer != NULL) {
            up_to = in->done > HEADER_BYTES ? in->done - HEADER_BYTES : 0;
        }
        int b = pump_out(c, out, up_to, err);
        if (b < 0) {
            return b;
        }
        if (a == 0 && b == 0) {
            int out_waits = out->done < HEADER_BYTES + up_to;
            int rc = wait_any(c, out_waits ? out : NULL, in, err);
            if (rc != 0) {
                return rc;
            }
        }
    }
    return 0;
}

/* ---- operations ---- */

static struct flow flow_to(struct tcp_comm *c, uint32_t rank, void *p, size_t n)
{
    return (struct flow){.peer = &c->peers[rank], .rank = rank, .p = p, .n = n};
}

static struct flow chunk(struct tcp_comm *c, uint32_t peer, uint8_t *buf, size_t n, uint32_t index)
{
    size_t begin, end, es = mb_comm_type_size(c->op.type);
    mb_comm_range(n, c->base.world_size, index % c->base.world_size, &begin, &end);
    return flow_to(c, peer, buf + begin * es, (end - begin) * es);
}

static int ring(struct tcp_comm *c, uint8_t *buf, size_t n, int gather, struct mb_err *err)
{
    uint32_t w = c->base.world_size, rank = c->base.rank;
    uint32_t next = (rank + 1) % w, prev = (rank + w - 1) % w;
    for (uint32_t s = 0; s + 1 < w; s++) {
        uint32_t first = rank + 2 * w - s - (gather ? 0 : 1);
        struct flow out = chunk(c, next, buf, n, first);
        struct flow in = chunk(c, prev, buf, n, first - 1);
        in.combine = !gather;
        int rc = transfer(c, &out, &in, 0, err);
        if (rc != 0) {
            return rc;
        }
    }
    return 0;
}

static int broadcast(struct tcp_comm *c, struct mb_err *err)
{
    uint32_t w = c->base.world_size, rank = c->base.rank;
    uint32_t next = (rank + 1) % w, prev = (rank + w - 1) % w;
    size_t bytes = c->op.n * mb_comm_type_size(c->op.type);
    struct flow none = {0};
    struct flow out = next != c->op.peer ? flow_to(c, next, c->op.buf, bytes) : none;
    struct flow in = rank != c->op.peer ? flow_to(c, prev, c->op.buf, bytes) : none;
    return transfer(c, &out, &in, 1, err);
}

static int run_op(struct tcp_comm *c, struct mb_err *err)
{
    struct flow none = {0};
    size_t bytes = c->op.n * mb_comm_type_size(c->op.type);
    int64_t one = 1;
    int rc;
    switch (c->op.kind) {
    case MB_COMM_OP_ALLREDUCE:
        rc = ring(c, c->op.buf, c->op.n, 0, err);
        return rc != 0 ? rc : ring(c, c->op.buf, c->op.n, 1, err);
    case MB_COMM_OP_REDUCE_SCATTER:
        return ring(c, c->op.buf, c->op.n, 0, err);
    case MB_COMM_OP_ALLGATHER:
        return ring(c, c->op.buf, c->op.n, 1, err);
    case MB_COMM_OP_BROADCAST:
        return broadcast(c, err);
    case MB_COMM_OP_BARRIER:
        rc = ring(c, (uint8_t *)&one, 1, 0, err);
        return rc != 0 ? rc : ring(c, (uint8_t *)&one, 1, 1, err);
    case MB_COMM_OP_SEND: {
        struct flow out = flow_to(c, c->op.peer, c->op.buf, bytes);
        return transfer(c, &out, &none, 0, err);
    }
    case MB_COMM_OP_RECV: {
        struct flow in = flow_to(c, c->op.peer, c->op.buf, bytes);
        return transfer(c, &none, &in, 0, err);
    }
    }
    return mb_err_set(err, MB_EINVAL, "communicator: unknown operation %d", (int)c->op.kind);
}

/* ---- the thread ---- */

/* Locked. Keeps the first failure. */
static void keep_failure(struct tcp_comm *c, const struct mb_err *err)
{
    if (c->failure.code == 0) {
        c->failure = *err;
    }
    pthread_cond_broadcast(&c->moved);
}

static void execute(struct tcp_comm *c, struct mb_err *err)
{
    if (c->op.kind != MB_COMM_OP_SEND && c->op.kind != MB_COMM_OP_RECV) {
        c->op.seq = ++c->n_collectives;
    }
    c->deadline_ms = mb_mono_ms() + c->timeout_ms;
    mb_err_clear(err);
    if (run_op(c, err) != 0 && err->code != MB_ECANCELED) {
        tell_abort(c, err->text);
    }
    c->deadline_ms = UINT64_MAX;
}

static void *thread_main(void *arg)
{
    struct tcp_comm *c = arg;
    struct mb_err err;
    pthread_mutex_lock(&c->lock);
    while (!c->closing) {
        if (c->abort_reason[0] != '\0') {
            char reason[MB_CONTROL_TEXT_MAX];
            memcpy(reason, c->abort_reason, sizeof reason);
            c->abort_reason[0] = '\0';
            mb_err_set(&err, MB_ECANCELED, "this rank gave up: %s", reason);
            keep_failure(c, &err);
            pthread_mutex_unlock(&c->lock);
            tell_abort(c, reason);
            pthread_mutex_lock(&c->lock);
            continue;
        }
        if (c->failure.code != 0 || c->n_done == c->n_queued) {
            if (c->failure.code != 0 && c->n_done != c->n_queued) {
                c->n_done = c->n_queued; /* what follows a failure is dropped */
                pthread_cond_broadcast(&c->moved);
            }
            int broken = c->failure.code != 0;
            pthread_mutex_unlock(&c->lock);
            mb_err_clear(&err);
            int rc = wait_any(c, NULL, NULL, &err);
            if (rc != 0 && rc != MB_ECANCELED && !broken) {
                tell_abort(c, err.text);
            }
            pthread_mutex_lock(&c->lock);
            if (rc != 0 && rc != MB_ECANCELED) {
                keep_failure(c, &err);
            }
            continue;
        }
        c->op = c->queue[c->n_done % MB_COMM_QUEUE_MAX];
        pthread_mutex_unlock(&c->lock);
        execute(c, &err);
        pthread_mutex_lock(&c->lock);
        if (err.code != 0 && err.code != MB_ECANCELED) {
            keep_failure(c, &err);
        } else if (err.code == MB_ECANCELED && c->abort_reason[0] == '\0' && !c->closing) {
            keep_failure(c, &err);
        }
        c->n_done++;
        pthread_cond_broadcast(&c->moved);
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

/* ---- the calls ---- */

static void wake(struct tcp_comm *c)
{
    uint64_t one = 1;
    (void)!write(c->wake_fd, &one, sizeof one);
}

static void tcp_enqueue(struct mb_comm *base, const struct mb_comm_op *op)
{
    struct tcp_comm *c = (struct tcp_comm *)base;
    pthread_mutex_lock(&c->lock);
    while (c->n_queued - c->n_done == MB_COMM_QUEUE_MAX && c->failure.code == 0) {
        pthread_cond_wait(&c->moved, &c->lock);
    }
    int dropped = c->failure.code != 0;
    if (!dropped) {
        c->queue[c->n_queued++ % MB_COMM_QUEUE_MAX] = *op;
    }
    pthread_mutex_unlock(&c->lock);
    if (!dropped) {
        wake(c);
    }
}

static int tcp_synchronize(struct mb_comm *base, struct mb_err *err)
{
    struct tcp_comm *c = (struct tcp_comm *)base;
    pthread_mutex_lock(&c->lock);
    while (c->n_done != c->n_queued) {
        pthread_cond_wait(&c->moved, &c->lock);
    }
    int rc = 0;
    if (c->failure.code != 0) {
        rc = mb_err_set(err, c->failure.code, "%s", c->failure.text);
    }
    pthread_mutex_unlock(&c->lock);
    return rc;
}

static void tcp_abort(struct mb_comm *base, const char *reason)
{
    struct tcp_comm *c = (struct tcp_comm *)base;
    pthread_mutex_lock(&c->lock);
    if (c->failure.code == 0) {
        snprintf(c->abort_reason, sizeof c->abort_reason, "%s",
                 reason[0] ? reason : "no reason given");
    }
    pthread_mutex_unlock(&c->lock);
    wake(c);
}

static void tcp_fail(struct mb_comm *base, const struct mb_err *err)
{
    struct tcp_comm *c = (struct tcp_comm *)base;
    tcp_abort(base, err->text);
    pthread_mutex_lock(&c->lock);
    keep_failure(c, err);
    pthread_mutex_unlock(&c->lock);
    wake(c);
}

static void free_comm(struct tcp_comm *c)
{
    for (uint32_t r = 0; c->peers != NULL && r < c->base.world_size; r++) {
        mb_peer_close(&c->peers[r]);
    }
    if (c->wake_fd >= 0) {
        close(c->wake_fd);
    }
    mb_free(c->peers);
    mb_free(c->polls);
    mb_free(c->scratch);
    pthread_cond_destroy(&c->moved);
    pthread_mutex_destroy(&c->lock);
    mb_free(c);
}

static void say_goodbye(struct tcp_comm *c)
{
    char reason[MB_CONTROL_TEXT_MAX];
    memcpy(reason, c->abort_reason, sizeof reason);
    if (reason[0] != '\0') {
        tell_abort(c, reason); /* the thread had no time for it */
    }
    for (uint32_t r = 0; r < c->base.world_size; r++) {
        struct mb_peer *p = &c->peers[r];
        if (p->control >= 0) {
            send_control(p, "B", 1);
            /* Unread bytes at close() would reset the connection and could cost the peer our last
             * words. */
            uint8_t rest[256];
            while (recv(p->control, rest, sizeof rest, MSG_DONTWAIT) > 0) {
            }
        }
    }
}

static void tcp_destroy(struct mb_comm *base)
{
    struct tcp_comm *c = (struct tcp_comm *)base;
    pthread_mutex_lock(&c->lock);
    c->closing = 1;
    pthread_mutex_unlock(&c->lock);
    wake(c);
    pthread_join(c->thread, NULL);
    say_goodbye(c);
    free_comm(c);
}

int mb_comm_connect(struct mb_comm_listener *l, const char *const *endpoints, size_t n_endpoints,
                    struct mb_comm **out, struct mb_err *err)
{
    static const struct mb_comm_vtable V = {tcp_enqueue, tcp_synchronize, tcp_abort, tcp_fail,
                                            tcp_destroy};
    uint32_t w = l->options.world_size, rank = l->options.rank;
    if (n_endpoints != w) {
        return mb_err_set(err, MB_EPROTO, "rendezvous: %zu endpoints for %u ranks", n_endpoints, w);
    }
    if (w == 1) {
        return mb_comm_create_single(out, err);
    }
    struct tcp_comm *c = mb_calloc(1, sizeof *c);
    if (c == NULL) {
        return mb_err_set(err, MB_ENOMEM, "communicator: out of memory");
    }
    c->base = (struct mb_comm){.v = &V, .rank = rank, .world_size = w};
    c->timeout_ms = l->options.timeout_ms;
    c->deadline_ms = UINT64_MAX;
    c->wake_fd = -1;
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->moved, NULL);
    c->peers = mb_calloc(w, sizeof *c->peers);
    c->polls = mb_calloc(1 + 3 * (size_t)w, sizeof *c->polls);
    c->scratch = mb_alloc(SCRATCH_BYTES);
    int rc = 0;
    for (uint32_t r = 0; c->peers != NULL && r < w; r++) {
        mb_peer_init(&c->peers[r]);
    }
    if (c->peers == NULL || c->polls == NULL || c->scratch == NULL) {
        rc = mb_err_set(err, MB_ENOMEM, "communicator: out of memory");
        goto out;
    }
    c->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (c->wake_fd < 0) {
        rc = mb_err_sys(err, errno, "communicator: eventfd");
        goto out;
    }
    rc = mb_rendezvous(l, endpoints, c->peers, err);
    if (rc != 0) {
        goto out;
    }
    snprintf(c->base.description, sizeof c->base.description,
             "rank %u of %u: to rank %u by %s, from rank %u by %s", rank, w, (rank + 1) % w,
             c->peers[(rank + 1) % w].shm ? "shared memory" : "TCP", (rank + w - 1) % w,
             c->peers[(rank + w - 1) % w].shm ? "shared memory" : "TCP");
    int failed = pthread_create(&c->thread, NULL, thread_main, c);
    if (failed != 0) {
        rc = mb_err_sys(err, failed, "communicator: thread");
        goto out;
    }
    *out = &c->base;
    return 0;
out:
    free_comm(c);
    return rc;
}
