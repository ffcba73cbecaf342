/*
 * Forget of proto/mobula/agent.proto: the head tells this node which jobs nobody can ask for any
 * more. Loop-thread only.
 */
#ifndef MOBULA_AGENT_FORGET_SERVICE_H
#define MOBULA_AGENT_FORGET_SERVICE_H

#include "base/err.h"
#include "base/grpc/grpc.h"
#include "gcs/runner.h"

/* runner is borrowed; it lives as long as the server. */
int mb_forget_service_add(struct mb_grpc_server *srv, const struct mb_job_runner *runner,
                          struct mb_err *err);

#endif
