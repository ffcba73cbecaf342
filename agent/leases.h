/*
 * Leases of workers that Ray asks of this node, which has none.
 *
 * Who asks for something of ours (a resource, this very node, a label) is refused with a text that
 * says why. Who asks for nothing (num_cpus=0), or for a node of Ray's by its id, came here by
 * chance: an actor is sent on to a node of Ray's, a task back to where it came from, which chooses
 * again. Without any such node it is refused as well. Loop-thread only.
 */
#ifndef MOBULA_AGENT_LEASES_H
#define MOBULA_AGENT_LEASES_H

#include <uv.h>
#include "agent/node.h"
#include "base/grpc/grpc.h"
#include "gcs/client.h"
#include "proto/ray/node_manager.pb-c.h"

enum { MB_LEASES_IP_MAX = 64 };

struct mb_leases_other { /* a node of Ray's */
    uint8_t id[MB_NODE_ID_BYTES];
    char ip[MB_LEASES_IP_MAX];
    int port;
};

struct mb_lease;
struct mb_leases { /* embedded by its owner, who sets node when there is one */
    struct mb_node *node;
    uv_timer_t timer;
    struct mb_gcs_op *op;   /* the head is asked for its nodes */
    struct mb_lease *asked; /* wait for that */
    struct mb_lease *later; /* go back when they are due, in that order */
    struct mb_lease **later_end;
    size_t n_waiting;
    struct mb_leases_other *others;
    size_t n_others, turn;
    uint64_t fresh_until_ms; /* others, on mb_mono_ms() */
    int is_stopped;
};

void mb_leases_init(struct mb_leases *l, uv_loop_t *loop);
/* Answers, now or later. */
void mb_leases_answer(struct mb_leases *l, struct mb_grpc_req *req,
                      const Ray__Rpc__RequestWorkerLeaseRequest *q);
void mb_leases_stop(struct mb_leases *l); /* who waits is refused, and who comes */
void mb_leases_close(struct mb_leases *l);

#endif
