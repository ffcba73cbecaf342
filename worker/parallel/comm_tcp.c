/*
 * The carrier of the CPU backend: its queue, its thread, its life.
 *
 * Happy path
 *  1. mb_comm_connect: every pair of ranks has met (comm_rendezvous.c); one thread starts.
 *  2. A call puts an operation into the queue (bounded; the caller waits when it is full) and wakes
 *     the thread, which runs operations in order (comm_ring.c).
 *  3. destroy: goodbye to all peers, then close. A peer that has said goodbye is no death.
 * Failures
 *  4. The first failure is kept, told to all peers, and ends every later operation.
 *  5. An abort of the caller ends the operation that runs and becomes that failure.
 */
#include "worker/parallel/comm_tcp.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"

/* ---- the thread ---- */

/* Locked. Keeps the first failure. */
static void keep_failure(struct mb_tcp_comm *c, const struct mb_err *err)
{
    if (c->failure.code == 0) {
        c->failure = *err;
    }
    pthread_cond_broadcast(&c->moved);
}

static void execute(struct mb_tcp_comm *c, struct mb_err *err)
{
    if (c->op.ranks.n == 0 && mb_comm_is_collective(c->op.kind)) {
        c->op.seq = ++c->n_collectives;
    }
    c->deadline_ms = mb_mono_ms() + c->timeout_ms;
    c->answers_ms = 0;
    mb_err_clear(err);
    if (mb_tcp_run_op(c, err) != 0 && err->code != MB_ECANCELED) {
        mb_tcp_tell_abort(c, err->text);
    }
    c->deadline_ms = UINT64_MAX;
}

static void *thread_main(void *arg)
{
    struct mb_tcp_comm *c = arg;
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
            mb_tcp_tell_abort(c, reason);
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
            int rc = mb_tcp_wait_idle(c, &err);
            if (rc != 0 && rc != MB_ECANCELED && !broken) {
                mb_tcp_tell_abort(c, err.text);
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

static void wake(struct mb_tcp_comm *c)
{
    uint64_t one = 1;
    (void)!write(c->wake_fd, &one, sizeof one);
}

static void tcp_abort(struct mb_comm *base, const char *reason)
{
    struct mb_tcp_comm *c = (struct mb_tcp_comm *)base;
    pthread_mutex_lock(&c->lock);
    if (c->failure.code == 0) {
        snprintf(c->abort_reason, sizeof c->abort_reason, "%.*s", (int)sizeof c->abort_reason - 1,
                 reason[0] ? reason : "no reason given");
    }
    pthread_mutex_unlock(&c->lock);
    wake(c);
}

/* Of the device's stream. */
static void fail(struct mb_tcp_comm *c, const struct mb_err *err)
{
    tcp_abort(&c->base, err->text);
    pthread_mutex_lock(&c->lock);
    keep_failure(c, err);
    pthread_mutex_unlock(&c->lock);
    wake(c);
}

static void tcp_enqueue(struct mb_comm *base, struct mb_device *dev, const struct mb_comm_op *op)
{
    struct mb_tcp_comm *c = (struct mb_tcp_comm *)base;
    struct mb_err err;
    if (mb_comm_wait_device(dev, &err) != 0) {
        fail(c, &err);
        return;
    }
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

/* Locked. */
static int failure_of(const struct mb_tcp_comm *c, struct mb_err *err)
{
    return c->failure.code == 0 ? 0 : mb_err_set(err, c->failure.code, "%s", c->failure.text);
}

static int tcp_synchronize(struct mb_comm *base, struct mb_err *err)
{
    struct mb_tcp_comm *c = (struct mb_tcp_comm *)base;
    pthread_mutex_lock(&c->lock);
    while (c->n_done != c->n_queued) {
        pthread_cond_wait(&c->moved, &c->lock);
    }
    int rc = failure_of(c, err);
    pthread_mutex_unlock(&c->lock);
    return rc;
}

static int tcp_peek(struct mb_comm *base, struct mb_err *err)
{
    struct mb_tcp_comm *c = (struct mb_tcp_comm *)base;
    pthread_mutex_lock(&c->lock);
    int rc = failure_of(c, err);
    pthread_mutex_unlock(&c->lock);
    return rc;
}

static int tcp_find_silent(struct mb_comm *base, uint64_t wait_ms, uint32_t *rank)
{
    struct mb_tcp_comm *c = (struct mb_tcp_comm *)base;
    const uint64_t deadline_ms = mb_mono_ms() + wait_ms;
    const struct timespec until = {.tv_sec = (time_t)(deadline_ms / 1000),
                                   .tv_nsec = (long)(deadline_ms % 1000 * 1000 * 1000)};
    int found = 0, over = 0;
    pthread_mutex_lock(&c->lock);
    c->asks = 1;
    wake(c);
    while (c->failure.code == 0 && (c->asks || c->n_silent > 0) && !over) {
        over = pthread_cond_timedwait(&c->moved, &c->lock, &until) == ETIMEDOUT;
    }
    for (uint32_t r = 0; r < base->world_size && !found && c->failure.code == 0; r++) {
        found = c->peers[r].is_silent;
        *rank = r;
    }
    pthread_mutex_unlock(&c->lock);
    return found;
}

static void free_comm(struct mb_tcp_comm *c)
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

static void say_goodbye(struct mb_tcp_comm *c)
{
    char reason[MB_CONTROL_TEXT_MAX];
    memcpy(reason, c->abort_reason, sizeof reason);
    if (reason[0] != '\0') {
        mb_tcp_tell_abort(c, reason); /* the thread had no time for it */
    }
    for (uint32_t r = 0; r < c->base.world_size; r++) {
        struct mb_peer *p = &c->peers[r];
        if (p->control >= 0) {
            mb_tcp_send_control(p, "B", 1);
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
    struct mb_tcp_comm *c = (struct mb_tcp_comm *)base;
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
    static const struct mb_comm_vtable V = {
        tcp_enqueue, tcp_synchronize, tcp_peek, mb_comm_join_host,
        tcp_abort,   tcp_destroy,     NULL,     tcp_find_silent};
    uint32_t w = l->options.world_size, rank = l->options.rank;
    if (n_endpoints != w) {
        return mb_err_set(err, MB_EPROTO, "rendezvous: %zu endpoints for %u ranks", n_endpoints, w);
    }
    if (w == 1) {
        return mb_comm_create_single(out, err);
    }
    struct mb_tcp_comm *c = mb_calloc(1, sizeof *c);
    if (c == NULL) {
        return mb_err_set(err, MB_ENOMEM, "communicator: out of memory");
    }
    c->base = (struct mb_comm){.v = &V, .rank = rank, .world_size = w};
    c->timeout_ms = l->options.timeout_ms;
    c->deadline_ms = UINT64_MAX;
    c->wake_fd = -1;
    pthread_mutex_init(&c->lock, NULL);
    mb_cond_init(&c->moved);
    c->peers = mb_calloc(w, sizeof *c->peers);
    c->polls = mb_calloc(1 + 3 * (size_t)w, sizeof *c->polls);
    c->scratch = mb_alloc(MB_TCP_SCRATCH_BYTES);
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
