/*
 * NODE_DIR/node.json: what `mobula start`, `status` and `stop` know of a node without asking it.
 * Blocking, a few hundred bytes; any thread, one writer. Strings are borrowed for the call.
 */
#ifndef MOBULA_AGENT_NODE_FILE_H
#define MOBULA_AGENT_NODE_FILE_H

#include <stdint.h>
#include "base/err.h"

struct mb_node_file {
    const char *state; /* ALIVE | FAILED | ENDED */
    const char *error; /* "" or why it failed */
    int code;          /* MB_E* of it */
    int64_t pid_init;
    uint64_t init_start_ticks;
    int64_t pid_agent;
    const char *node_id;
    const char *node_name;
    const char *node_ip;
    const char *gcs_address;
    int grpc_port;
    int http_port;
    int is_head;
    int is_open;            /* other machines reach the node, and it has no token */
    const char *token_path; /* the file of the cluster's token; "": none */
    int token_is_new;       /* this start made it */
    int head_http_port;     /* 0: not a head */
    int metrics_port;       /* 0: /metrics is at http_port alone */
};

/* Replaces the file as a whole. */
int mb_node_file_write(const char *node_dir, const struct mb_node_file *f, struct mb_err *err);

/* The ports of an agent of this directory that did not end in order; 0 what it had none of. A
 * restarted agent takes them again, so that who knows this node finds it. */
struct mb_node_ports {
    int head_port;
    int head_http_port;
    int grpc_port;
    int http_port;
    int metrics_port;
};
void mb_node_file_former_ports(const char *node_dir, struct mb_node_ports *out);

#endif
