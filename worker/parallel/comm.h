/*
 * Collectives between the ranks of one gang.
 *
 * Every call takes the device whose stream produced the buffer, enqueues and returns: the operation
 * starts after all that was enqueued on that stream before, runs on the communicator's own stream
 * in the order of the calls, and the buffer belongs to it until mb_comm_synchronize(). Failures are
 * kept and returned there; after the first one every later operation fails the same way. Ranks call
 * the same collectives in the same order with the same counts; a difference is found and named.
 *
 * Sums are deterministic: every element is added in one order that depends on the number of ranks
 * and on the element's place only, so all ranks hold the same bits, run after run, whatever the
 * network. all-reduce gives the bits of reduce-scatter followed by all-gather. Between GPUs the
 * order is NCCL's: all ranks hold the same bits; run after run they are the same where NCCL chooses
 * the same algorithm, which NCCL_ALGO settles.
 *
 * A rank that dies, or that says mb_comm_abort(), fails the operation of every other rank at once;
 * one that hangs fails it after timeout_ms, and some seconds more where it is asked in vain for a
 * sign of life. The text names operation and rank: of several that wait for each other the one
 * that does not answer or, in host memory, is in no operation. Operations between GPUs are aborted
 * then. That peers call something else is found by the host's carrier only; between GPUs it is a
 * timeout. Threads: one thread calls; the carrier has threads of its own.
 */
#ifndef MOBULA_WORKER_PARALLEL_COMM_H
#define MOBULA_WORKER_PARALLEL_COMM_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"
#include "worker/kernels/backend.h"
#include "worker/kernels/collective.h"

enum {
    MB_COMM_WORLD_MAX = 256,
    MB_COMM_ENDPOINT_MAX = 256,
    MB_COMM_QUEUE_MAX = 256,
    MB_COMM_EXCHANGE_MAX = 4
};

struct mb_comm_options {
    uint32_t rank;
    uint32_t world_size;  /* 1 .. MB_COMM_WORLD_MAX */
    const char *address;  /* numeric address that peers can reach; NULL: 127.0.0.1 */
    uint64_t timeout_ms;  /* one operation, and the rendezvous, may take this long */
    int no_shared_memory; /* 1: TCP also between ranks of one host */
};

/*
 * Rendezvous: each rank listens and hands its endpoint, a text, to all others by a way of its own;
 * with all endpoints in hand it connects. The endpoint carries a random cookie that a peer must
 * show: who has not been given the endpoint cannot join. Keep endpoints out of logs.
 */
struct mb_comm_listener;

int mb_comm_listen(const struct mb_comm_options *o, struct mb_comm_listener **out,
                   struct mb_err *err);
const char *mb_comm_listener_endpoint(const struct mb_comm_listener *l); /* borrowed */
void mb_comm_listener_destroy(struct mb_comm_listener *l);               /* NULL is legal */

struct mb_comm;

/* endpoints[0 .. world_size), by rank. The listener stays the caller's and may be destroyed after.
 * MB_EUNAVAIL or MB_ETIMEOUT name the rank that could not be met. */
int mb_comm_connect(struct mb_comm_listener *l, const char *const *endpoints, size_t n_endpoints,
                    struct mb_comm **out, struct mb_err *err);
/* A world of one: every collective is the identity. */
int mb_comm_create_single(struct mb_comm **out, struct mb_err *err);

/*
 * Some of the world's ranks: first, first + stride, ... n of them, one of which is this one, as
 * ranks 0 to n - 1 of a communicator of their own. What is enqueued travels with the world's
 * operations, in their order; a failure of the one is one of the other, and names ranks by their
 * number in the world. A rank's operations run in the order of its calls, whatever the group: ranks
 * may be in different groups and call them differently often, but there is an order of all ranks'
 * operations of which every rank's calls are a part; else ranks wait for each other until the
 * timeout. Each group counts its operations for itself. world is borrowed, carries host memory and
 * outlives the group. Groups are made by each rank for itself, once: a second one of the same ranks
 * counts anew. A group of one is a world of one.
 */
int mb_comm_create_group(struct mb_comm *world, uint32_t first, uint32_t stride, uint32_t n,
                         struct mb_comm **out, struct mb_err *err);

/*
 * Between devices. host, which is taken also on failure, meets the same ranks: it tells the peers
 * what the device's library must know, moves what has no device, and notices who dies. dev is
 * borrowed; its backend has collectives. Every rank calls it, and within timeout_ms of each other.
 * MB_EUNSUPPORTED: no such library here, or one that does not fit the others'.
 */
int mb_comm_create_device(struct mb_comm *host, struct mb_device *dev, uint64_t timeout_ms,
                          struct mb_comm **out, struct mb_err *err);

/* Says goodbye to the peers and frees; operations still queued are cancelled. NULL is legal. */
void mb_comm_destroy(struct mb_comm *c);

uint32_t mb_comm_rank(const struct mb_comm *c);
uint32_t mb_comm_world_size(const struct mb_comm *c);
/* One line for the log: carriers to the ring's neighbours. Valid until destroy. */
const char *mb_comm_describe(const struct mb_comm *c);

/* The part [begin, end) of n elements that belongs to a rank: n * rank / world. */
void mb_comm_range(size_t n, uint32_t world_size, uint32_t rank, size_t *begin, size_t *end);

/* dev may be NULL: the buffer is host memory and complete now. */
void mb_comm_allreduce(struct mb_comm *c, struct mb_device *dev, void *buf, size_t n,
                       enum mb_comm_type type, enum mb_comm_reduce reduce);
/* In place: afterwards this rank's mb_comm_range() holds the result, the rest is undefined. */
void mb_comm_reduce_scatter(struct mb_comm *c, struct mb_device *dev, void *buf, size_t n,
                            enum mb_comm_type type, enum mb_comm_reduce reduce);
/* In place: afterwards root holds the result; what the others hold is undefined. On the host it
 * costs what all-reduce costs. */
void mb_comm_reduce(struct mb_comm *c, struct mb_device *dev, void *buf, size_t n,
                    enum mb_comm_type type, enum mb_comm_reduce reduce, uint32_t root);
/* In place: every rank gives its mb_comm_range() and gets the others'. */
void mb_comm_allgather(struct mb_comm *c, struct mb_device *dev, void *buf, size_t n,
                       enum mb_comm_type type);
void mb_comm_broadcast(struct mb_comm *c, struct mb_device *dev, void *buf, size_t n,
                       enum mb_comm_type type, uint32_t root);
void mb_comm_barrier(struct mb_comm *c);
void mb_comm_send(struct mb_comm *c, struct mb_device *dev, const void *buf, size_t n,
                  enum mb_comm_type type, uint32_t to);
void mb_comm_recv(struct mb_comm *c, struct mb_device *dev, void *buf, size_t n,
                  enum mb_comm_type type, uint32_t from);

struct mb_comm_transfer {
    int is_send;
    void *buf; /* not written by a send */
    size_t n;
    uint32_t peer;
};

/* One operation of several sends and receives, n up to MB_COMM_EXCHANGE_MAX; between devices none
 * of them waits for another, in host memory they run in their order. Between two ranks sends and
 * receives of one exchange meet in their order. */
void mb_comm_exchange(struct mb_comm *c, struct mb_device *dev,
                      const struct mb_comm_transfer *transfers, size_t n, enum mb_comm_type type);

/* What is enqueued on the device's stream from now on comes after everything enqueued here. Between
 * devices nobody waits for that but the device, unless many operations are under way; a failure is
 * kept, and what the stream then computes with is undefined. */
void mb_comm_join(struct mb_comm *c, struct mb_device *dev);
/* The same, but comes only after what was enqueued here when mb_comm_mark() said that mark: what
 * was enqueued since may run meanwhile. In host memory it waits for everything. */
uint64_t mb_comm_mark(const struct mb_comm *c);
void mb_comm_join_until(struct mb_comm *c, struct mb_device *dev, uint64_t mark);

/* Wait for everything enqueued. */
int mb_comm_synchronize(struct mb_comm *c, struct mb_err *err);

/* Asks all peers for a sign of life and waits for it: 1 and a rank, as the world numbers them,
 * whose process has given none; 0: all have, or have ended, or the communicator has failed, as when
 * a peer gave up and said why. A process that was stopped gives none; one whose caller hangs does,
 * by the carrier's thread. */
int mb_comm_find_silent(struct mb_comm *c, uint64_t wait_ms, uint32_t *rank);

/* 1: after a failure something runs on a device of this process that its library could not end.
 * Whatever waits for the device may do so for ever: the process is to end by _exit(). */
int mb_comm_device_is_stuck(void);

/* Tell the peers that this rank ends and why; their operations fail with that text. */
void mb_comm_abort(struct mb_comm *c, const char *reason);

#endif
