/*
 * mobula.v1.NodeAgent/Drain: the node takes no new work, and what is here saves, uploads and ends
 * (`mobula drain`). The node itself stays. Loop-thread only.
 */
#ifndef MOBULA_AGENT_DRAIN_SERVICE_H
#define MOBULA_AGENT_DRAIN_SERVICE_H

#include "agent/driver_service.h"
#include "agent/gangs.h"
#include "agent/node.h"
#include "base/grpc/grpc.h"

struct mb_drain_service { /* borrowed parts */
    struct mb_gangs *gangs;
    struct mb_node *node;
    struct mb_driver_service *drivers;
    const char *node_dir; /* remembers across restarts of the agent that the node is drained */
};

/* s must outlive the server. */
int mb_drain_service_add(struct mb_grpc_server *srv, struct mb_drain_service *s,
                         struct mb_err *err);
/* A former agent of this node was asked to drain it: so it stays. */
void mb_drain_service_resume(struct mb_drain_service *s);

#endif
