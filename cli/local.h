/*
 * The mobula nodes of this machine: directories TEMP_DIR/node_XXXXXXXX, each with the pid file of
 * its front process (mobula-init) and, once the agent is up or failed, node.json.
 */
#ifndef MOBULA_CLI_LOCAL_H
#define MOBULA_CLI_LOCAL_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

struct mb_local_node {
    char *dir; /* owned */
    int64_t init_pid;
    uint64_t init_ticks; /* start time: with the pid it names one process for ever */
};

/* --temp-dir, else MOBULA_TEMP_DIR, else /tmp/mobula; borrowed. */
const char *mb_local_temp_dir(const char *flag);
int mb_local_temp_dir_is_default(const char *flag);
/* The default lies where everybody may make it first. MB_EDENIED: it belongs to another user (root
 * aside), or others may rename what is in it, and with that choose what a node of ours runs. */
int mb_local_check_owner(const char *dir, struct mb_err *err);

/* Nodes below temp_dir whose front process runs; *out is owned, ended by mb_local_nodes_free(). A
 * missing temp_dir has none. */
int mb_local_nodes(const char *temp_dir, struct mb_local_node **out, size_t *n, struct mb_err *err);
void mb_local_nodes_free(struct mb_local_node *nodes, size_t n);

/* The front process of one node directory. MB_ENOENT: there is none, or it ended. */
int mb_local_find(const char *dir, struct mb_local_node *out, struct mb_err *err);
int mb_local_is_running(const struct mb_local_node *node);

/* What the agent of a node says about itself. 1: ALIVE, *node is the content of its node.json and
 * the caller's; 0: not yet; negative: why it failed. */
int mb_local_read_node(const char *dir, json_t **node, struct mb_err *err);

/* SIGTERM, without waiting; it says after how long it will be pushed (0: not said), so that the
 * node uses that time. A process that is gone already is success. */
int mb_local_ask_to_end(const struct mb_local_node *node, uint64_t grace_ms, struct mb_err *err);

/*
 * Waits for a node that was asked; after grace_ms it is asked a second time (mobula-init then kills
 * what is left), and after MB_LOCAL_KILL_MS more it is killed. 0: it ended within the grace;
 * MB_ETIMEOUT: it had to be pushed, and is gone; MB_EIO: it could not be ended.
 */
enum { MB_LOCAL_KILL_MS = 5000 };
int mb_local_wait_end(const struct mb_local_node *node, uint64_t grace_ms, struct mb_err *err);

/* Kills what nobody owns any more below temp_dir; *n_killed counts them. */
int mb_local_end_orphans(const char *temp_dir, size_t *n_killed, struct mb_err *err);

#endif
