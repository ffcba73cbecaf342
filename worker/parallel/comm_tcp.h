/*
 * The two halves of the CPU backend's carrier: comm_tcp.c owns the queue and the thread,
 * comm_ring.c runs one operation at a time on that thread. Nobody else includes this.
 */
#ifndef MOBULA_WORKER_PARALLEL_COMM_TCP_H
#define MOBULA_WORKER_PARALLEL_COMM_TCP_H

#include <poll.h>
#include <pthread.h>
#include "worker/parallel/comm_impl.h"
#include "worker/parallel/comm_rendezvous.h"

enum { MB_TCP_SCRATCH_BYTES = 256 * 1024 };

struct mb_tcp_comm {
    struct mb_comm base;
    struct mb_peer *peers; /* [world]; the thread's once it runs, but for is_silent */
    struct pollfd *polls;  /* [1 + 3 * world] */
    uint64_t timeout_ms;
    pthread_t thread;
    int wake_fd;
    uint8_t *scratch; /* what arrives and is to be combined */

    /* The thread's own: the operation that runs. */
    uint32_t n_collectives;
    struct mb_comm_op op;
    uint64_t deadline_ms; /* UINT64_MAX between operations */
    uint64_t answers_ms;  /* it took too long: peers are asked why, until then; 0: not yet */

    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t moved; /* an operation was added or ended */
    struct mb_comm_op queue[MB_COMM_QUEUE_MAX];
    size_t n_queued, n_done; /* counted since the start; the queue is the difference */
    struct mb_err failure;   /* the first one; code 0: none */
    char abort_reason[MB_CONTROL_TEXT_MAX]; /* "": nothing to tell */
    int closing;
    int asks; /* 1: all peers are to be asked for a sign of life; n_silent are asked and silent */
    uint32_t n_silent;
};

/* All of these on the communicator's thread. */

/* Runs c->op until c->deadline_ms, and then for some seconds in which peers say where they are. */
int mb_tcp_run_op(struct mb_tcp_comm *c, struct mb_err *err);
/* Sleeps until a peer or the queue has something to say; a peer's death or reason is the error,
 * MB_ECANCELED a wish of this rank to close or to give up. */
int mb_tcp_wait_idle(struct mb_tcp_comm *c, struct mb_err *err);
/* To every peer: this rank gives up, and why. */
void mb_tcp_tell_abort(struct mb_tcp_comm *c, const char *text);
/* A few bytes that may be lost when the peer does not read. */
void mb_tcp_send_control(struct mb_peer *p, const void *bytes, size_t n);

#endif
