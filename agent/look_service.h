/*
 * mobula.v1.NodeAgent/Look: which checkpoint a store has, asked with this node's keys, which a
 * job's driver does not have (job_env.h). Loop-thread only.
 */
#ifndef MOBULA_AGENT_LOOK_SERVICE_H
#define MOBULA_AGENT_LOOK_SERVICE_H

#include <uv.h>
#include "base/err.h"
#include "base/grpc/grpc.h"

enum { MB_LOOKS_MAX = 4 /* at a time; a listing is as large as its store */ };

struct mb_look;

struct mb_look_service { /* borrowed parts */
    uv_loop_t *loop;
    const char *node_ip;
    int callers_are_trusted;
    int is_closing;
    struct mb_look *looks[MB_LOOKS_MAX]; /* its own; NULL: free */
};

/* s must outlive the server. */
int mb_look_service_add(struct mb_grpc_server *srv, struct mb_look_service *s, struct mb_err *err);
/* Answers who waits. Before the server ends. */
void mb_look_service_close(struct mb_look_service *s);

#endif
