/*
 * This node's membership of a Ray cluster: connect, register, sync resources, stay, leave.
 * Loop-thread only; callbacks never run inside a call of this module, and none after
 * mb_node_close().
 *
 * Identity: a fresh random id for every registration. The id in use is kept in
 * NODE_DIR/identity.json; a restarted agent that finds it still ALIVE in the same cluster goes on
 * under it, so that its gangs keep their placement group; below a real Ray head only if it could
 * bind the same port. Else the old id is unregistered first: the GCS would go on sending it bundles
 * that would land here.
 */
#ifndef MOBULA_AGENT_NODE_H
#define MOBULA_AGENT_NODE_H

#include <stdint.h>
#include <uv.h>
#include "agent/ledger.h"
#include "base/err.h"
#include "base/grpc/grpc.h"
#include "gcs/types.h"

struct mb_node;

struct mb_node_opts { /* all borrowed for the life of the node */
    const char *node_dir;
    const char *gcs_address;
    const char *token; /* NULL: none */
    const char *ip;    /* what others dial */
    const char *node_name;
    const char *temp_dir;
    const char *session_dir;
    const char *accelerator;           /* label ray.io/accelerator-type; "" = none */
    const struct mb_gcs_label *labels; /* of the user */
    size_t n_labels;
    int is_head;                 /* node of the embedded head */
    uint64_t connect_timeout_ms; /* for the first handshake; 0: 30 s */
    size_t max_message_bytes;    /* that the head may send; 0: as gcs/client.h */
};

struct mb_node_ops {
    void (*on_alive)(void *arg);                            /* also after each re-registration */
    void (*on_failed)(void *arg, const struct mb_err *err); /* the first registration failed */
    /* The cluster forgot this node (the agent was restarted, or the cluster is a new one): every
     * bundle is void. A new registration is under way. */
    void (*on_reset)(void *arg, const char *why);
    /* Before on_reset, of a new cluster: it counts its jobs from 1 as the former one did. */
    void (*on_other_cluster)(void *arg);
    /* The head took this node for dead, and places its bundles again. The same. */
    void (*on_given_up)(void *arg, const char *why);
    /* Nothing is heard of the head for some seconds; 0: it is again. */
    void (*on_cut_off)(void *arg, int is_cut_off);
    /* 1: this group's bundles have rows of their own in what Ray is told (group_rows.h). */
    int (*is_told)(void *arg, const struct mb_pg_id *pg);
};

int mb_node_create(uv_loop_t *loop, struct mb_grpc *grpc, struct mb_ledger *ledger,
                   const struct mb_node_opts *opts, const struct mb_node_ops *ops, void *arg,
                   struct mb_node **out, struct mb_err *err);
/* The port a former agent of this node directory listened on, 0 if there was none. */
const char *mb_node_former_hex(const struct mb_node *n); /* its id before a restart; "": none */
int mb_node_former_port(const struct mb_node *n);
/* Connect and register; on_alive or on_failed follows. */
int mb_node_start(struct mb_node *n, int grpc_port, int http_port, struct mb_err *err);
/* The ledger changed: tell the cluster at once. */
void mb_node_changed(struct mb_node *n);
/* Draining in the eyes of the cluster; deadline 0: none. */
void mb_node_drain(struct mb_node *n, int64_t deadline_unix_ms);
/* Unregister (bounded to 2 s), then cb. Not registered: cb at once, from
 * inside this call. */
void mb_node_leave(struct mb_node *n, enum mb_gcs_death reason, const char *text,
                   void (*cb)(void *arg), void *arg);
/* After cb no callback runs; questions are still answered until mb_node_destroy(). */
void mb_node_close(struct mb_node *n, void (*cb)(void *arg), void *arg);
void mb_node_destroy(struct mb_node *n); /* NULL is legal */

int mb_node_is_alive(const struct mb_node *n);
int mb_node_is_draining(const struct mb_node *n);
int64_t mb_node_drain_deadline_ms(const struct mb_node *n);
const uint8_t *mb_node_id(const struct mb_node *n);
const char *mb_node_id_hex(const struct mb_node *n);
const struct mb_gcs_label *mb_node_labels(const struct mb_node *n, size_t *count);
uint64_t mb_node_idle_ms(const struct mb_node *n); /* 0 while a bundle is held */
struct mb_gcs *mb_node_gcs(struct mb_node *n);     /* borrowed; NULL before start */

#endif
