/*
 * mobula.v1.NodeAgent/StartDriver and StopDriver: the head's drivers on this node (agent/jobs.h
 * runs them, agent/drivers.h reports what becomes of them). Loop-thread only.
 */
#ifndef MOBULA_AGENT_DRIVER_SERVICE_H
#define MOBULA_AGENT_DRIVER_SERVICE_H

#include "agent/jobs.h"
#include "base/grpc/grpc.h"

struct mb_driver_service {
    struct mb_jobs *jobs; /* borrowed */
    const char *node_ip;
    int callers_are_trusted; /* else only those of this machine are heard */
    int is_stopping;         /* the node ends: nothing is started any more */
};

/* s must outlive the server. */
int mb_driver_service_add(struct mb_grpc_server *srv, struct mb_driver_service *s,
                          struct mb_err *err);

#endif
