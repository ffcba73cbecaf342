/*
 * One operation on rings of ranks, over shared memory (same host) and TCP (other hosts).
 *
 *  1. all-reduce = reduce-scatter + all-gather on the ring rank -> rank + 1 of those that take
 * part. In step s a rank sends chunk rank - s - 1 and adds what arrives to chunk rank - s - 2, so
 * chunk c is summed in the order c + 1, c + 2, .., c on every carrier, and ends on rank c.
 * Broadcast is a pipeline from the root, barrier an all-reduce of one number, reduce an all-reduce.
 *  2. Each transfer starts with a header (kind, number, bytes) that the receiver compares with what
 *     it is doing itself.
 *  3. A rank that can move nothing sleeps in one poll() over: the queue's eventfd, the control
 *     sockets of all peers, and the data sockets in use. Shared memory rings through the control
 *     socket, so a death is noticed wherever a rank waits, also between operations.
 * Failures
 *  4. A control socket ends without goodbye: MB_EUNAVAIL "all-reduce 12: rank 1 went away".
 *  5. A peer says abort: its reason, MB_EUNAVAIL.
 *  6. The operation lasts longer than the timeout: all peers are asked, and each one's thread
 *     answers whether it is in an operation itself. What they have said before is heard first, and
 *     the operation goes on meanwhile. MB_ETIMEOUT names who does not answer, or else who has not
 *     come to the operation; who only waits, too, is not blamed. A rank that could name nobody
 *     leaves the word to others for a while: one of them may wait for the culprit itself.
 *  7. A caller who waits asks who is silent, in the same way. Where a failure is known nobody is
 *     named: a peer that has given up has said why.
 *  8. Headers differ: MB_EPROTO naming both sides' operations.
 */
#include "worker/parallel/comm_tcp.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/clock.h"

enum {
    HEADER_BYTES = 16,
    ASKS = '?',
    LIVES = '!', /* and 5 bytes: 1 between operations, and how many collectives were begun */
    LIVES_BYTES = 6,
    ANSWERS_MS = 5000
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

/* How many ranks take part, which of them this one is, and the number in the world of one of them.
 */
static uint32_t taking_part(const struct mb_tcp_comm *c)
{
    return c->op.ranks.n > 0 ? c->op.ranks.n : c->base.world_size;
}

static uint32_t own_place(const struct mb_tcp_comm *c)
{
    const struct mb_comm_ranks *r = &c->op.ranks;
    return r->n > 0 ? (c->base.rank - r->first) / r->stride : c->base.rank;
}

static uint32_t rank_at(const struct mb_tcp_comm *c, uint32_t place)
{
    const struct mb_comm_ranks *r = &c->op.ranks;
    place %= taking_part(c);
    return r->n > 0 ? r->first + place * r->stride : place;
}

/* ---- failing ---- */

void mb_tcp_send_control(struct mb_peer *p, const void *bytes, size_t n)
{
    if (p->control < 0) {
        return;
    }
    /* A full socket means a peer that does not read; it will see the end of the stream instead. */
    (void)!send(p->control, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void mb_tcp_tell_abort(struct mb_tcp_comm *c, const char *text)
{
    uint8_t frame[3 + MB_CONTROL_TEXT_MAX];
    size_t n = strlen(text);
    n = n < MB_CONTROL_TEXT_MAX ? n : MB_CONTROL_TEXT_MAX;
    frame[0] = 'A';
    frame[1] = (uint8_t)(n & 0xff);
    frame[2] = (uint8_t)(n >> 8);
    memcpy(frame + 3, text, n);
    for (uint32_t r = 0; r < c->base.world_size; r++) {
        mb_tcp_send_control(&c->peers[r], frame, 3 + n);
    }
}

/* What this rank is doing, for texts. */
static const char *doing(const struct mb_tcp_comm *c, char out[64])
{
    if (c->deadline_ms == UINT64_MAX) {
        snprintf(out, 64, "between operations");
    } else if (c->op.kind == MB_COMM_OP_SEND || c->op.kind == MB_COMM_OP_RECV) {
        snprintf(out, 64, "%s with rank %u", mb_comm_kind_name(c->op.kind), rank_at(c, c->op.peer));
    } else {
        snprintf(out, 64, "%s %u", mb_comm_kind_name(c->op.kind), c->op.seq);
    }
    return out;
}

/* ---- control sockets ---- */

static void mark_silent(struct mb_tcp_comm *c, struct mb_peer *p, int is_silent)
{
    pthread_mutex_lock(&c->lock);
    c->n_silent += (uint32_t)is_silent - (uint32_t)p->is_silent;
    p->is_silent = is_silent;
    pthread_cond_broadcast(&c->moved);
    pthread_mutex_unlock(&c->lock);
}

static void ask_all(struct mb_tcp_comm *c)
{
    const uint8_t asks = ASKS;
    for (uint32_t r = 0; r < c->base.world_size; r++) {
        if (c->peers[r].control >= 0 && !c->peers[r].left) {
            mark_silent(c, &c->peers[r], 1);
            mb_tcp_send_control(&c->peers[r], &asks, 1);
        }
    }
    pthread_mutex_lock(&c->lock);
    c->asks = 0;
    pthread_cond_broadcast(&c->moved);
    pthread_mutex_unlock(&c->lock);
}

static void say_lives(const struct mb_tcp_comm *c, struct mb_peer *p)
{
    uint8_t frame[LIVES_BYTES] = {LIVES, c->deadline_ms == UINT64_MAX};
    for (int i = 0; i < 4; i++) {
        frame[2 + i] = (uint8_t)(c->n_collectives >> 8 * i);
    }
    mb_tcp_send_control(p, frame, sizeof frame);
}

static void take_lives(struct mb_tcp_comm *c, struct mb_peer *p, const uint8_t *frame)
{
    p->is_idle = frame[1];
    p->n_collectives = 0;
    for (int i = 0; i < 4; i++) {
        p->n_collectives |= (uint32_t)frame[2 + i] << 8 * i;
    }
    mark_silent(c, p, 0);
}

/* Takes whole frames off the inbox. */
static int take_frames(struct mb_tcp_comm *c, uint32_t rank, struct mb_err *err)
{
    struct mb_peer *p = &c->peers[rank];
    size_t at = 0;
    int rc = 0;
    while (at < p->n_inbox && rc == 0) {
        uint8_t kind = p->inbox[at];
        if (kind == 'D') {
            at++;
        } else if (kind == ASKS) {
            say_lives(c, p);
            at++;
        } else if (kind == LIVES) {
            if (p->n_inbox - at < LIVES_BYTES) {
                break;
            }
            take_lives(c, p, p->inbox + at);
            at += LIVES_BYTES;
        } else if (kind == 'B') {
            p->left = 1;
            mark_silent(c, p, 0);
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
            rc = mb_err_set(err, MB_EUNAVAIL, "rank %u gave up: %.*s", rank, (int)n,
                            (const char *)p->inbox + at + 3);
            at += 3 + n; /* what it says behind that is heard, too */
        } else {
            return mb_err_set(err, MB_EPROTO, "rank %u speaks another protocol", rank);
        }
    }
    memmove(p->inbox, p->inbox + at, p->n_inbox - at);
    p->n_inbox -= at;
    return rc;
}

static int read_control(struct mb_tcp_comm *c, uint32_t rank, struct mb_err *err)
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
            mark_silent(c, p, 0);
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

static int needs(const struct flow *f)
{
    return f != NULL && f->peer != NULL && f->done < HEADER_BYTES + f->n;
}

enum { NOBODY = -1 };

static int64_t silent_rank(const struct mb_tcp_comm *c)
{
    for (uint32_t r = 0; r < c->base.world_size; r++) {
        if (c->peers[r].is_silent) {
            return r;
        }
    }
    return NOBODY;
}

/* A peer that was in no operation when it answered, and has yet to come to this one. Of a
 * collective of the world it has begun fewer; elsewhere only who waits for its data, or for it to
 * read, knows that it is not through. */
static int64_t late_rank(const struct mb_tcp_comm *c, const struct flow *out, const struct flow *in)
{
    const int of_world = c->op.ranks.n == 0 && mb_comm_is_collective(c->op.kind);
    for (uint32_t r = 0; r < c->base.world_size; r++) {
        const struct mb_peer *p = &c->peers[r];
        if (p->control < 0 || p->left || !p->is_idle) {
            continue;
        }
        if ((needs(in) && in->rank == r) || (needs(out) && out->rank == r) ||
            (of_world && (int32_t)(p->n_collectives - c->op.seq) < 0)) {
            return r;
        }
    }
    return NOBODY;
}

/* The peers were asked and have answered, or had the time to. */
static int time_is_up(const struct mb_tcp_comm *c, const struct flow *out, const struct flow *in,
                      struct mb_err *err)
{
    char what[64], why[64] = "a rank hangs or calls something else";
    const int64_t silent = silent_rank(c), late = late_rank(c, out, in);
    if (silent != NOBODY) {
        snprintf(why, sizeof why, "rank %u does not answer", (uint32_t)silent);
    } else if (late != NOBODY) {
        snprintf(why, sizeof why, "rank %u has not come to it", (uint32_t)late);
    }
    return mb_err_set(err, MB_ETIMEOUT, "%s: timeout of %llu s: %s", doing(c, what),
                      (unsigned long long)(c->timeout_ms / 1000), why);
}

/* How long to sleep; 0: the operation has taken too long, and the peers have been asked why. */
static int time_left_ms(struct mb_tcp_comm *c, const struct flow *out, const struct flow *in)
{
    uint64_t now = mb_mono_ms(), until = c->deadline_ms;
    if (until == UINT64_MAX) {
        return -1;
    }
    if (now >= until) {
        if (c->answers_ms == 0) {
            c->answers_ms = now + ANSWERS_MS;
            ask_all(c);
        }
        const int is_known = silent_rank(c) == NOBODY && late_rank(c, out, in) != NOBODY;
        until = is_known ? now : c->answers_ms;
    }
    uint64_t left = now < until ? until - now : 0;
    return left > 60000 ? 60000 : (int)left;
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

/* The queue. MB_ECANCELED: this rank closes or gives up. */
static int hear_queue(struct mb_tcp_comm *c, struct mb_err *err)
{
    uint64_t ignored;
    (void)!read(c->wake_fd, &ignored, sizeof ignored);
    pthread_mutex_lock(&c->lock);
    int stop = c->closing || c->abort_reason[0] != '\0', asks = c->asks;
    pthread_mutex_unlock(&c->lock);
    if (asks) {
        ask_all(c);
    }
    return stop ? mb_err_set(err, MB_ECANCELED, "communicator: closed while operations were queued")
                : 0;
}

/* Sleep until a peer, the queue or the clock has something to say. out and in may be NULL; `out`
 * is passed only when it is what we wait for. */
static int wait_any(struct mb_tcp_comm *c, const struct flow *out, const struct flow *in,
                    struct mb_err *err)
{
    const uint32_t world = c->base.world_size;
    size_t n = 0;
    c->polls[n++] = (struct pollfd){.fd = c->wake_fd, .events = POLLIN};
    for (uint32_t r = 0; r < world; r++) {
        c->polls[n++] = (struct pollfd){.fd = c->peers[r].control, .events = POLLIN};
    }
    int ready = wait_flow(c->polls, &n, out, POLLOUT);
    ready |= wait_flow(c->polls, &n, in, POLLIN);
    const int wait_ms = ready ? 0 : time_left_ms(c, out, in);
    if (poll(c->polls, n, wait_ms) < 0 && errno != EINTR) {
        return mb_err_sys(err, errno, "communicator: poll");
    }
    int rc = c->polls[0].revents != 0 ? hear_queue(c, err) : 0;
    for (uint32_t r = 0; r < world && rc == 0; r++) {
        if (c->polls[1 + r].fd >= 0 && c->polls[1 + r].revents != 0) {
            rc = read_control(c, r, err);
        }
    }
    for (size_t i = 1 + world; i < n; i++) {
        ready |= c->polls[i].revents != 0;
    }
    return rc == 0 && wait_ms == 0 && !ready ? time_is_up(c, out, in, err) : rc;
}

int mb_tcp_wait_idle(struct mb_tcp_comm *c, struct mb_err *err)
{
    return wait_any(c, NULL, NULL, err);
}

/* ---- moving bytes ---- */

static int data_failed(struct mb_tcp_comm *c, uint32_t rank, const char *why, struct mb_err *err)
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
static ssize_t move_out(struct mb_tcp_comm *c, struct flow *f, const void *p, size_t n,
                        struct mb_err *err)
{
    if (f->peer->shm != NULL) {
        int ring = 0;
        size_t k = mb_shm_try_write(f->peer->shm, p, n, &ring);
        if (ring) {
            mb_tcp_send_control(f->peer, "D", 1);
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

static ssize_t move_in(struct mb_tcp_comm *c, struct flow *f, void *p, size_t n, struct mb_err *err)
{
    if (f->peer->shm != NULL) {
        int ring = 0;
        size_t k = mb_shm_try_read(f->peer->shm, p, n, &ring);
        if (ring) {
            mb_tcp_send_control(f->peer, "D", 1);
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
    h[3] = (uint8_t)op->ranks.n; /* of two groups that both sides are in: which */
    for (int i = 0; i < 4; i++) {
        h[4 + i] = (uint8_t)(op->seq >> 8 * i);
    }
    for (int i = 0; i < 8; i++) {
        h[8 + i] = (uint8_t)(n >> 8 * i);
    }
}

static int header_check(struct mb_tcp_comm *c, const struct flow *f, struct mb_err *err)
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
static int pump_out(struct mb_tcp_comm *c, struct flow *f, size_t up_to, struct mb_err *err)
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

static ssize_t take_combined(struct mb_tcp_comm *c, struct flow *f, struct mb_err *err)
{
    size_t es = mb_comm_type_size(c->op.type);
    size_t at = f->done - HEADER_BYTES - f->held; /* first element not combined yet, in bytes */
    size_t left = f->n - at - f->held;
    size_t room = MB_TCP_SCRATCH_BYTES - f->held;
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

static int pump_in(struct mb_tcp_comm *c, struct flow *f, struct mb_err *err)
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
static int transfer(struct mb_tcp_comm *c, struct flow *out, struct flow *in, int follow,
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

static struct flow flow_to(struct mb_tcp_comm *c, uint32_t rank, void *p, size_t n)
{
    return (struct flow){.peer = &c->peers[rank], .rank = rank, .p = p, .n = n};
}

static struct flow chunk(struct mb_tcp_comm *c, uint32_t peer, uint8_t *buf, size_t n,
                         uint32_t index)
{
    size_t begin, end, es = mb_comm_type_size(c->op.type);
    mb_comm_range(n, taking_part(c), index % taking_part(c), &begin, &end);
    return flow_to(c, peer, buf + begin * es, (end - begin) * es);
}

static int ring(struct mb_tcp_comm *c, uint8_t *buf, size_t n, int gather, struct mb_err *err)
{
    uint32_t w = taking_part(c), rank = own_place(c);
    uint32_t next = rank_at(c, rank + 1), prev = rank_at(c, rank + w - 1);
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

static int broadcast(struct mb_tcp_comm *c, struct mb_err *err)
{
    uint32_t w = taking_part(c), rank = own_place(c);
    uint32_t next = (rank + 1) % w;
    size_t bytes = c->op.n * mb_comm_type_size(c->op.type);
    struct flow none = {0};
    struct flow out = next != c->op.peer ? flow_to(c, rank_at(c, next), c->op.buf, bytes) : none;
    struct flow in =
        rank != c->op.peer ? flow_to(c, rank_at(c, rank + w - 1), c->op.buf, bytes) : none;
    return transfer(c, &out, &in, 1, err);
}

int mb_tcp_run_op(struct mb_tcp_comm *c, struct mb_err *err)
{
    struct flow none = {0};
    size_t bytes = c->op.n * mb_comm_type_size(c->op.type);
    int64_t one = 1;
    int rc;
    switch (c->op.kind) {
    case MB_COMM_OP_ALLREDUCE:
    case MB_COMM_OP_REDUCE:
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
        struct flow out = flow_to(c, rank_at(c, c->op.peer), c->op.buf, bytes);
        return transfer(c, &out, &none, 0, err);
    }
    case MB_COMM_OP_RECV: {
        struct flow in = flow_to(c, rank_at(c, c->op.peer), c->op.buf, bytes);
        return transfer(c, &none, &in, 0, err);
    }
    }
    return mb_err_set(err, MB_EINVAL, "communicator: unknown operation %d", (int)c->op.kind);
}
