/*
 * What Ray's head calls on a node: NodeManagerService, grpc.health.v1, LogService, and the one
 * CoreWorkerService call that a driver living on this node is asked.
 *
 * Every call but that for a lease is answered at once, from the ledger: a Prepare that waits blocks
 * every placement group of the cluster. Calls that only make sense for Ray workers get the answer
 * that stops the caller from asking again. Loop-thread only.
 */
#ifndef MOBULA_AGENT_NODE_MANAGER_H
#define MOBULA_AGENT_NODE_MANAGER_H

#include "agent/leases.h"
#include "agent/ledger.h"
#include "agent/node.h"
#include "base/err.h"
#include "base/grpc/grpc.h"

struct mb_node_manager_ops {
    /* The ledger changed: report it, keep it. */
    void (*on_changed)(void *arg);
    /* The placement group is gone from this node: end its gangs. */
    void (*on_bundles_removed)(void *arg, const struct mb_pg_id *pg);
    /* Asked to drain. 1: accepted; 0: refused, text (of the size given) says why. */
    int (*on_drain)(void *arg, int is_preemption, const char *reason, int64_t deadline_unix_ms,
                    char *text, size_t size);
    void (*on_shutdown)(void *arg); /* end gracefully */
};

struct mb_node_manager { /* embedded by its owner, who fills it before mb_node_manager_add() */
    struct mb_ledger *ledger;
    struct mb_node *node;
    struct mb_leases *leases;
    const char *ip;
    const struct mb_node_manager_ops *ops;
    void *arg;
};

/* The head has removed the group, and need not say so any more: the same as when it does. */
void mb_node_manager_drop(struct mb_node_manager *m, const struct mb_pg_id *pg);
int mb_node_manager_add(struct mb_grpc_server *srv, struct mb_node_manager *m, struct mb_err *err);

#endif
