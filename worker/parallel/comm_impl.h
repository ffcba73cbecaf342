/* Between comm.c and the carriers: what a carrier implements. Nobody else includes this but tests
 * that stand in for one. */
#ifndef MOBULA_WORKER_PARALLEL_COMM_IMPL_H
#define MOBULA_WORKER_PARALLEL_COMM_IMPL_H

#include "worker/parallel/comm.h"

struct mb_comm_vtable {
    /* dev may be NULL; what was enqueued on its stream before comes first. */
    void (*enqueue)(struct mb_comm *c, struct mb_device *dev, const struct mb_comm_op *op);
    int (*synchronize)(struct mb_comm *c, struct mb_err *err);
    int (*peek)(struct mb_comm *c, struct mb_err *err); /* the failure so far; never waits */
    /* The first n_ops, as the base counts them. */
    void (*join)(struct mb_comm *c, struct mb_device *dev, uint64_t n_ops);
    void (*abort)(struct mb_comm *c, const char *reason);
    void (*destroy)(struct mb_comm *c);
    /* Sends and receives that run at once. NULL: one after the other will do. */
    void (*exchange)(struct mb_comm *c, struct mb_device *dev, const struct mb_comm_op *ops,
                     size_t n);
    /* NULL: there is nobody to ask. */
    int (*find_silent)(struct mb_comm *c, uint64_t wait_ms, uint32_t *rank);
};

/* Every carrier's struct begins with this. */
struct mb_comm {
    const struct mb_comm_vtable *v;
    uint32_t rank;
    uint32_t world_size;
    uint64_t n_started; /* operations; counted by carriers that join() some of them */
    char description[160];
};

/* join() of a carrier of host memory: it waits. */
void mb_comm_join_host(struct mb_comm *c, struct mb_device *dev, uint64_t n_ops);
/* Waits for the device's stream: for carriers that move host memory. */
int mb_comm_wait_device(struct mb_device *dev, struct mb_err *err);
const char *mb_comm_kind_name(enum mb_comm_kind kind);
int mb_comm_is_collective(enum mb_comm_kind kind);
size_t mb_comm_type_size(enum mb_comm_type type);
/* dst = dst op src, n elements. */
void mb_comm_combine(void *dst, const void *src, size_t n, enum mb_comm_type type,
                     enum mb_comm_reduce reduce);

#endif
