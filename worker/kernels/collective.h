/*
 * Collectives between devices: the part of a backend that moves data from one device to another
 * without the host. worker/parallel/comm_device.c is the one caller; who takes part, deadlines and
 * deaths are its matter.
 *
 * Nothing here blocks for a peer: create() and start() begin, poll() says how far all of it has
 * come. Operations run on a stream of the group's own in the order of start(), each after what was
 * enqueued on the given compute stream before. A group that has failed can only be destroyed.
 * Threads: one, that of the context.
 */
#ifndef MOBULA_WORKER_KERNELS_COLLECTIVE_H
#define MOBULA_WORKER_KERNELS_COLLECTIVE_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum mb_comm_type {
    MB_COMM_F32,
    MB_COMM_F64,
    MB_COMM_I64,
    MB_COMM_BF16, /* sums of this and of the next are rounded at every step */
    MB_COMM_F16
};
enum mb_comm_reduce { MB_COMM_SUM, MB_COMM_MAX };

enum mb_comm_kind {
    MB_COMM_OP_ALLREDUCE = 1,
    MB_COMM_OP_REDUCE_SCATTER,
    MB_COMM_OP_ALLGATHER,
    MB_COMM_OP_BROADCAST,
    MB_COMM_OP_BARRIER,
    MB_COMM_OP_SEND,
    MB_COMM_OP_RECV,
    MB_COMM_OP_REDUCE
};

/* Who takes part: ranks first, first + stride, ... of the world, n of them. n 0: everybody. */
struct mb_comm_ranks {
    uint32_t first, stride, n;
};

struct mb_comm_op {
    enum mb_comm_kind kind;
    enum mb_comm_type type;
    enum mb_comm_reduce reduce;
    void *buf; /* borrowed until done; not written by send */
    size_t n;
    uint32_t peer; /* broadcast, reduce: root; send, recv: the other rank */
    uint32_t seq;  /* number of the collective among those of its ranks; set by the carrier */
    struct mb_comm_ranks ranks; /* for carriers of host memory: a device's group is what it is */
};

enum {
    MB_COLLECTIVE_ID_BYTES = 128,
    MB_COLLECTIVE_END_MS = 30 * 1000, /* an abort takes a second or two */
    MB_COLLECTIVE_IN_FLIGHT = 256     /* operations started and not yet counted as done by poll() */
};

struct mb_context;
struct mb_stream;
struct mb_group; /* one device's place among others, defined by the backend */

struct mb_collectives {
    /* Of the library, as one number and as a text such as "NCCL 2.28.9"; needs no device. */
    int (*version)(int *number, char text[32], struct mb_err *err);
    /* What one rank makes and all ranks of a group give to create(). */
    int (*new_id)(uint8_t id[MB_COLLECTIVE_ID_BYTES], struct mb_err *err);
    int (*create)(struct mb_context *ctx, const uint8_t id[MB_COLLECTIVE_ID_BYTES], uint32_t rank,
                  uint32_t world_size, struct mb_group **out, struct mb_err *err);
    /* Only when poll() has said 0. No barrier; reduce-scatter and all-gather with n a multiple of
     * the world's size. Several (n_ops > 1) are sends and receives that run at once, and count as
     * one operation. */
    int (*start)(struct mb_group *g, struct mb_stream *after, const struct mb_comm_op *ops,
                 size_t n_ops, struct mb_err *err);
    /* 0: the next operation may be started; 1: create() or the last start() is still under way;
     * negative: failed. *n_done: operations that are complete, counted since create(). */
    int (*poll)(struct mb_group *g, uint64_t *n_done, struct mb_err *err);
    /* Only when poll() has said 0: what is enqueued on the compute stream from now on comes after
     * the first n operations that were started, 0 < n. */
    int (*join)(struct mb_group *g, struct mb_stream *stream, uint64_t n, struct mb_err *err);
    /* Peers have agreed to end and every operation is done, or failed: then what still runs is
     * aborted. 1: it has ended; NULL has. 0: the library has not come back in MB_COLLECTIVE_END_MS,
     * and what it has on the device may run for ever: who waits for the device does, too. */
    int (*destroy)(struct mb_group *g, int failed);
};

#endif
