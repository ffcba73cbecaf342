/*
 * How neighbouring stages of a pipeline reach each other: a link for what goes one way to one
 * neighbour.
 *
 *  1. In host memory all links are the pipeline's communicator. Its carrier takes what is sent off
 *     the sender's hands, and a receiver waits for all that it has begun.
 *  2. Between GPUs each link is a communicator of the two ranks. What a library's communicator has
 *     begun runs in one order, and a send lasts until it is received: with both directions in one,
 *     two neighbours that send first would wait for each other for ever. With one direction each
 *     the receiver's order is the sender's.
 *  3. There one link at a time is waited for: by what is computed with what came, and by a gradient
 *     that is still being sent before it is overwritten. An output needs no such wait while it
 *     trains: its place is taken again behind its backward pass, whose gradient the next stage made
 *     of what it had received. To wait for all links at once would be a circle again. It is the
 *     caller that waits, not only the device: what it enqueued behind a peer that is dead or hangs
 *     would block it where nobody sees that, once the device's queue is full.
 *  4. With several chunks the stages are a ring, and between two passes a stage sends and receives
 *     at once (worker/parallel/pipeline_interleaved.c): what one stage exchanges under a number the
 *     others do under the same. There all links are one communicator, in which an exchange is one
 *     operation, and each is waited for.
 *  5. Links are made in the order of the stages, so that each is met by both of its ends when those
 *     before it are through; one number goes over each, since the library connects two devices at
 *     their first transfer, which would hold up the first iteration.
 * Failures: the carrier's.
 */
#include "worker/trainer.h"

enum { N_WAYS = 2 }; /* activations, gradients */

int mb_trainer_links_devices(const struct mb_trainer *t)
{
    return t->pp_comm != NULL && t->dev.ops->collectives != NULL;
}

/* A number from one end to the other, whichever link it is. */
static int try_link(struct mb_trainer *t, enum mb_link_kind kind, struct mb_err *err)
{
    const struct mb_link *l = &t->links[kind];
    void *number = NULL;
    int rc = t->dev.ops->alloc(t->dev.ctx, sizeof(float), &number, err);
    if (rc != 0) {
        return rc;
    }
    if (kind == MB_LINK_OUTPUT || kind == MB_LINK_GRADIENT_OUT) {
        t->dev.ops->zero(t->dev.ctx, t->dev.stream, number, sizeof(float));
        mb_comm_send(l->comm, &t->dev, number, 1, MB_COMM_F32, l->peer);
    } else {
        mb_comm_recv(l->comm, &t->dev, number, 1, MB_COMM_F32, l->peer);
    }
    rc = mb_comm_synchronize(l->comm, err);
    t->dev.ops->free(t->dev.ctx, number);
    return rc;
}

static int make_link(struct mb_trainer *t, enum mb_link_kind kind, uint32_t stage,
                     struct mb_err *err)
{
    const uint32_t n = t->tp_size * t->dp_size; /* ranks of a stage */
    struct mb_link *l = &t->links[kind];
    struct mb_comm *host = NULL;
    int rc = mb_comm_create_group(t->comm, stage * n + t->rank % n, n, 2, &host, err);
    if (rc == 0) {
        rc = mb_comm_create_device(host, &t->dev, mb_trainer_timeout_ms(t), &l->comm, err);
    }
    if (rc != 0) {
        return mb_err_wrap(err, "rank %u", t->rank);
    }
    l->peer = t->pp_rank == stage ? 1 : 0;
    return try_link(t, kind, err);
}

static int make_links(struct mb_trainer *t, struct mb_err *err)
{
    static const enum mb_link_kind SENDS[N_WAYS] = {MB_LINK_OUTPUT, MB_LINK_GRADIENT_IN},
                                   RECEIVES[N_WAYS] = {MB_LINK_INPUT, MB_LINK_GRADIENT_OUT};
    int rc = 0;
    for (uint32_t stage = 0; stage + 1 < t->pp_size; stage++) {
        for (int way = 0; way < N_WAYS && rc == 0; way++) {
            if (t->pp_rank == stage) {
                rc = make_link(t, SENDS[way], stage, err);
            } else if (t->pp_rank == stage + 1) {
                rc = make_link(t, RECEIVES[way], stage, err);
            }
        }
    }
    return rc;
}

/* All links are one communicator of all stages. */
static void share_links(struct mb_trainer *t, struct mb_comm *c)
{
    const uint32_t next = (t->pp_rank + 1) % t->pp_size;
    const uint32_t before = (t->pp_rank + t->pp_size - 1) % t->pp_size;
    for (int k = 0; k < MB_N_LINKS; k++) {
        const int is_next = k == MB_LINK_OUTPUT || k == MB_LINK_GRADIENT_IN;
        t->links[k] = (struct mb_link){c, is_next ? next : before};
    }
}

/* As between two passes: a number each way on both sides. */
static int try_ring(struct mb_trainer *t, struct mb_err *err)
{
    static const enum mb_link_kind ORDER[MB_N_LINKS] = {MB_LINK_OUTPUT, MB_LINK_INPUT,
                                                        MB_LINK_GRADIENT_OUT, MB_LINK_GRADIENT_IN};
    struct mb_comm_transfer transfers[MB_N_LINKS];
    float *numbers = NULL;
    int rc = t->dev.ops->alloc(t->dev.ctx, MB_N_LINKS * sizeof *numbers, (void **)&numbers, err);
    if (rc != 0) {
        return rc;
    }
    t->dev.ops->zero(t->dev.ctx, t->dev.stream, numbers, MB_N_LINKS * sizeof *numbers);
    for (int i = 0; i < MB_N_LINKS; i++) {
        transfers[i] =
            (struct mb_comm_transfer){i % 2 == 0, numbers + i, 1, t->links[ORDER[i]].peer};
    }
    mb_comm_exchange(t->ring, &t->dev, transfers, MB_N_LINKS, MB_COMM_F32);
    rc = mb_comm_synchronize(t->ring, err);
    t->dev.ops->free(t->dev.ctx, numbers);
    return rc;
}

static int make_ring(struct mb_trainer *t, struct mb_err *err)
{
    const uint32_t n = t->tp_size * t->dp_size; /* ranks of a stage */
    struct mb_comm *host = NULL;
    int rc = mb_comm_create_group(t->comm, t->rank % n, n, t->pp_size, &host, err);
    if (rc == 0) {
        rc = mb_comm_create_device(host, &t->dev, mb_trainer_timeout_ms(t), &t->ring, err);
    }
    if (rc != 0) {
        return mb_err_wrap(err, "rank %u", t->rank);
    }
    share_links(t, t->ring);
    return try_ring(t, err);
}

int mb_trainer_make_links(struct mb_trainer *t, struct mb_err *err)
{
    if (t->pp_size == 1) {
        return 0;
    }
    if (mb_trainer_links_devices(t)) {
        return mb_args_chunks(&t->args) > 1 ? make_ring(t, err) : make_links(t, err);
    }
    share_links(t, t->pp_comm);
    return 0;
}

void mb_trainer_close_links(struct mb_trainer *t)
{
    for (int k = 0; k < MB_N_LINKS; k++) {
        if (t->links[k].comm != t->pp_comm && t->links[k].comm != t->ring) {
            mb_comm_destroy(t->links[k].comm);
        }
        t->links[k].comm = NULL;
    }
    mb_comm_destroy(t->ring);
    t->ring = NULL;
}

int mb_trainer_wait_link(struct mb_trainer *t, enum mb_link_kind kind, struct mb_err *err)
{
    struct mb_comm *c = t->links[kind].comm;
    return c != NULL ? mb_comm_synchronize(c, err) : 0;
}

int mb_trainer_wait_links(struct mb_trainer *t, struct mb_err *err)
{
    int rc = 0;
    for (int k = 0; k < MB_N_LINKS && rc == 0; k++) {
        rc = mb_trainer_wait_link(t, (enum mb_link_kind)k, err);
    }
    return rc;
}
