/*
 * The node's own HTTP port: health for probes, Prometheus metrics, and the node as JSON.
 * A port that is taken is no failure: another one is used. Loop-thread only.
 */
#ifndef MOBULA_AGENT_HTTP_H
#define MOBULA_AGENT_HTTP_H

#include <uv.h>
#include "agent/access.h"
#include "agent/gangs.h"
#include "agent/ledger.h"
#include "agent/node.h"
#include "base/err.h"
#include "base/grpc/grpc.h"
#include "base/http/server.h"
#include "gcs/head.h"

enum { MB_AGENT_HTTP_PORT = 52365 }; /* where Ray's own agents listen, and Kubernetes probes look */

struct mb_agent_http { /* embedded by its owner, who fills the borrowed pointers first */
    struct mb_node *node;
    struct mb_ledger *ledger;
    struct mb_gangs *gangs;
    const struct mb_gpu_keeper *gpu_keeper; /* NULL: nothing is ever in quarantine */
    const struct mb_gpu_figures *figures;   /* NULL: no NVML */
    struct mb_head *head;                   /* NULL: this node cannot be one */
    const struct mb_grpc *grpc;
    const char *ip;
    const char *node_name;
    struct mb_http_server *server;
    int port;
    struct mb_http_server *metrics_server; /* NULL: none was asked for, or its port is taken */
};

/* A port that was asked for is that one or
 * MB_EEXIST; 0: the former agent's (0: there was none), else any; -1: the same, with the usual one
 * before any. */
int mb_agent_http_start(uv_loop_t *loop, struct mb_agent_http *h, const struct mb_access *access,
                        int port, int former_port, struct mb_err *err);
/* /metrics at a port of its own besides, where monitors of Ray's nodes look; it asks for the same
 * token. Taken: a warning, since all of it is at the node's own port. */
int mb_agent_http_start_metrics(uv_loop_t *loop, struct mb_agent_http *h,
                                const struct mb_access *access, int port, struct mb_err *err);

#endif
