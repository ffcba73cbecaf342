/*
 * Ray's LogService: `ray logs cluster --node-id ID [file]` lists and reads this node's log files;
 * and ReadLog of proto/mobula/agent.proto, by which the head serves logs of any node.
 * Only names that end in .log below the root, never through "..". Loop-thread only.
 */
#ifndef MOBULA_AGENT_LOG_SERVICE_H
#define MOBULA_AGENT_LOG_SERVICE_H

#include <uv.h>
#include "base/err.h"
#include "base/grpc/grpc.h"

struct mb_log_wait;

struct mb_log_service { /* embedded by its owner, who fills it; lives as long as the server */
    uv_loop_t *loop;
    const char *root;
    struct mb_log_wait *waits; /* ours: calls that wait for more output */
    unsigned n_waits;
    int is_closing;
};

int mb_log_service_add(struct mb_grpc_server *srv, struct mb_log_service *s, struct mb_err *err);
/* Answers the calls that wait; before the gRPC runtime stops. */
void mb_log_service_close(struct mb_log_service *s);

/* For tests: 1 if the name may be served. */
int mb_log_name_is_safe(const char *name);

/* 1 if the name is safe and root has such a file. */
int mb_log_exists(const char *root, const char *name);

#endif
