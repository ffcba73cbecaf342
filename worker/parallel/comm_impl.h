/* Between comm.c and the carriers: what a carrier implements. Nobody else includes this. */
#ifndef MOBULA_WORKER_PARALLEL_COMM_IMPL_H
#define MOBULA_WORKER_PARALLEL_COMM_IMPL_H

#include "worker/parallel/comm.h"

enum mb_comm_kind {
    MB_COMM_OP_ALLREDUCE = 1,
    MB_COMM_OP_REDUCE_SCATTER,
    MB_COMM_OP_ALLGATHER,
    MB_COMM_OP_BROADCAST,
    MB_COMM_OP_BARRIER,
    MB_COMM_OP_SEND,
    MB_COMM_OP_RECV
};

struct mb_comm_op {
    enum mb_comm_kind kind;
    enum mb_comm_type type;
    enum mb_comm_reduce reduce;
    void *buf; /* borrowed until done; not written by send */
    size_t n;
    uint32_t peer; /* broadcast: root; send, recv: the other rank */
    uint32_t seq;  /* set by the carrier: number of the collective */
};

struct mb_comm_vtable {
    void (*enqueue)(struct mb_comm *c, const struct mb_comm_op *op);
    int (*synchronize)(struct mb_comm *c, struct mb_err *err);
    void (*abort)(struct mb_comm *c, const char *reason);
    void (*fail)(struct mb_comm *c, const struct mb_err *err); /* of the device's stream */
    void (*destroy)(struct mb_comm *c);
};

/* Every carrier's struct begins with this. */
struct mb_comm {
    const struct mb_comm_vtable *v;
    uint32_t rank;
    uint32_t world_size;
    char description[160];
};

const char *mb_comm_kind_name(enum mb_comm_kind kind);
size_t mb_comm_type_size(enum mb_comm_type type);
/* dst = dst op src, n elements. */
void mb_comm_combine(void *dst, const void *src, size_t n, enum mb_comm_type type,
                     enum mb_comm_reduce reduce);

#endif
