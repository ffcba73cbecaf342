/*
 * Client of a Ray GCS, a real one or our embedded head: handshake, nodes, resource sync, internal
 * KV, placement groups, jobs.
 *
 * Loop-thread only. Requests are asynchronous: a function returns 0 and its callback runs exactly
 * once later, never from inside the call (also after cancel and close, then with MB_ECANCELED); or
 * it returns a negative code, fills err, and the callback does not run. Everything passed in is
 * copied or encoded before the call returns; everything given to a callback is borrowed for its
 * duration. `err` in callbacks is never NULL; err->code MB_OK is success.
 *
 * timeout_ms is the whole time a request may take (0: 30 s). While the GCS is unreachable, requests
 * that may be repeated are repeated inside that time, with jittered back-off. Typical codes:
 * MB_EUNAVAIL, MB_ETIMEOUT, MB_EDENIED (token), MB_ESTATE (not connected), MB_EINVAL (refused
 * before sending because a real GCS would abort on it), MB_ENOENT, MB_EEXIST, MB_ECANCELED.
 */
#ifndef MOBULA_GCS_CLIENT_H
#define MOBULA_GCS_CLIENT_H

#include <uv.h>
#include "base/err.h"
#include "base/grpc/grpc.h"
#include "gcs/types.h"

struct mb_gcs;    /* a connection */
struct mb_gcs_op; /* one request in flight; the handle is valid until its callback has run */

/* ---- connection ---- */
enum mb_gcs_event {
    MB_GCS_CONNECTED,       /* handshake done: requests are accepted */
    MB_GCS_CONNECT_FAILED,  /* no handshake within connect_timeout_ms, or the token was refused:
                               mb_gcs_connect() may be called again */
    MB_GCS_CLUSTER_CHANGED, /* another cluster answers at this address (WrongClusterID): state is as
                               before connect; call mb_gcs_connect(), register under a new node id
                             */
    MB_GCS_NODE_DEAD,       /* the watched node is declared DEAD: register under a new node id */
    MB_GCS_UNREACHABLE,     /* the watch found no GCS for 5 s; it goes on trying */
    MB_GCS_REACHABLE        /* ... and found it again, same cluster */
};
typedef void (*mb_gcs_event_cb)(void *arg, struct mb_gcs *c, enum mb_gcs_event event,
                                const struct mb_err *err);

/* As much as a node takes of the head in one message: the largest, a table of nodes, takes a
 * kilobyte a node. */
#define MB_GCS_NODE_MESSAGE_MAX_BYTES ((size_t)32 << 20)

struct mb_gcs_opts {
    const char *address;         /* "host:port"; several, with commas: heads of one cluster */
    const char *token;           /* NULL: none; copied */
    uint64_t connect_timeout_ms; /* 0: 30 s */
    size_t
        max_message_bytes; /* that the head may send; 0: 512 MiB, as large as a value of its KV */
};

int mb_gcs_create(uv_loop_t *loop, struct mb_grpc *grpc, const struct mb_gcs_opts *opts,
                  mb_gcs_event_cb cb, void *arg, struct mb_gcs **out, struct mb_err *err);
/* Starts the handshake; CONNECTED or CONNECT_FAILED follows. MB_ESTATE when under way or done. */
int mb_gcs_connect(struct mb_gcs *c, struct mb_err *err);
/* Cancels everything (callbacks run first), frees c, then calls cb (may be NULL). No event after
 * this call. c NULL: cb is not called. */
void mb_gcs_close(struct mb_gcs *c, void (*cb)(void *arg), void *arg);
void mb_gcs_op_cancel(struct mb_gcs_op *op);

/* Another place where the head may be, now or after a takeover: "host:port". */
int mb_gcs_add_address(struct mb_gcs *c, const char *address, struct mb_err *err);
/* Tell the cluster that a standby head serves at this address; known to clients that connect. */
int mb_gcs_announce_head(struct mb_gcs *c, const char *address, struct mb_err *err);
int mb_gcs_connected(const struct mb_gcs *c); /* 1 or 0 */
const char *mb_gcs_address(const struct mb_gcs *c);
/* 1 if the head speaks Ray 2.60's messages (batched sync, CheckAlive by node id). */
int mb_gcs_is_modern(const struct mb_gcs *c);
const char *mb_gcs_ray_version(const struct mb_gcs *c); /* "2.60.0"; "" before the handshake */
/* What people should know of a head of this version; NULL: it is one that was tried. */
const char *mb_gcs_version_note(const char *version);
const char *mb_gcs_cluster_id(const struct mb_gcs *c); /* 56 hex digits; "" before */

typedef void (*mb_gcs_done_cb)(void *arg, const struct mb_err *err);

/* ---- internal KV; ns "" is the global namespace, keys are text, values bytes ---- */
typedef void (*mb_gcs_value_cb)(void *arg, const struct mb_err *err, const void *value, size_t n);
typedef void (*mb_gcs_count_cb)(void *arg, const struct mb_err *err, int64_t count);
typedef void (*mb_gcs_keys_cb)(void *arg, const struct mb_err *err, const char *const *keys,
                               size_t n);
/* MB_ENOENT when absent. A NUL follows the value. */
int mb_gcs_kv_get(struct mb_gcs *c, const char *ns, const char *key, uint64_t timeout_ms,
                  mb_gcs_value_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err);
/* A value of up to 512 MiB, whatever max_message_bytes says, over a connection of its own: written
 * to fd in the pool of threads, from where fd stands. fd is borrowed until the callback; after a
 * failure part of the value may have been written. */
int mb_gcs_kv_fetch(struct mb_gcs *c, const char *ns, const char *key, int fd, uint64_t timeout_ms,
                    mb_gcs_done_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err);
/* count: 1 if the key is new. With overwrite 0 an existing key stays, count 0, and the request is
 * never repeated by itself. */
int mb_gcs_kv_put(struct mb_gcs *c, const char *ns, const char *key, const void *value, size_t n,
                  int overwrite, uint64_t timeout_ms, mb_gcs_count_cb cb, void *arg,
                  struct mb_gcs_op **op, struct mb_err *err);
/* count: keys deleted. */
int mb_gcs_kv_del(struct mb_gcs *c, const char *ns, const char *key, int by_prefix,
                  uint64_t timeout_ms, mb_gcs_count_cb cb, void *arg, struct mb_gcs_op **op,
                  struct mb_err *err);
/* count: 1 or 0. */
int mb_gcs_kv_exists(struct mb_gcs *c, const char *ns, const char *key, uint64_t timeout_ms,
                     mb_gcs_count_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err);
int mb_gcs_kv_keys(struct mb_gcs *c, const char *ns, const char *prefix, uint64_t timeout_ms,
                   mb_gcs_keys_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err);

/* ---- drivers on a node that is not the head's (proto/mobula/head.proto) ---- */
struct mb_job_event;
struct mb_job_amount;
struct mb_gcs_driver {
    char *submission_id;
    uint64_t start_no;
};
struct mb_gcs_drivers {
    const uint8_t *node_id; /* MB_NODE_ID_BYTES */
    const struct mb_job_event *events;
    size_t n_events;
    const struct mb_gcs_driver *unknown; /* asked for, with the number asked for, and not here */
    size_t n_unknown;
    const struct mb_gcs_driver *running; /* those that are here */
    size_t n_running;
    int takes_drivers; /* the head may start others here */
    const struct mb_job_amount *totals;
    size_t n_totals;
    const char *http_address; /* of the node's agent */
};
/* wanted_no: the numbers of the starts of wanted; NULL: an older head. */
typedef void (*mb_gcs_drivers_cb)(void *arg, const struct mb_err *err, char *const *wanted,
                                  const uint64_t *wanted_no, size_t n_wanted, char *const *stop,
                                  size_t n_stop);
int mb_gcs_report_drivers(struct mb_gcs *c, const struct mb_gcs_drivers *report,
                          uint64_t timeout_ms, mb_gcs_drivers_cb cb, void *arg,
                          struct mb_gcs_op **op, struct mb_err *err);
/* A piece of an uploaded package (gcs://NAME): n bytes of size_bytes altogether. MB_ENOENT: the
 * head has no such package. */
typedef void (*mb_gcs_piece_cb)(void *arg, const struct mb_err *err, uint64_t size_bytes,
                                const void *p, size_t n);
int mb_gcs_read_package(struct mb_gcs *c, const char *name, uint64_t offset, uint32_t max_bytes,
                        uint64_t timeout_ms, mb_gcs_piece_cb cb, void *arg, struct mb_gcs_op **op,
                        struct mb_err *err);

/* ---- nodes ---- */
typedef void (*mb_gcs_nodes_cb)(void *arg, const struct mb_err *err,
                                const struct mb_gcs_node *nodes, size_t n);
int mb_gcs_register_node(struct mb_gcs *c, const struct mb_gcs_node *node, uint64_t timeout_ms,
                         mb_gcs_done_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err);
/* A real GCS never answers for an id that is gone already: MB_ETIMEOUT then means just that, so
 * give it a short timeout_ms. */
int mb_gcs_unregister_node(struct mb_gcs *c, const uint8_t node_id[MB_NODE_ID_BYTES],
                           enum mb_gcs_death reason, const char *text, uint64_t timeout_ms,
                           mb_gcs_done_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err);
/* count: 1 if the GCS has the node as ALIVE. Not on Ray before 2.60 (MB_EUNSUPPORTED). */
int mb_gcs_check_alive(struct mb_gcs *c, const uint8_t node_id[MB_NODE_ID_BYTES],
                       uint64_t timeout_ms, mb_gcs_count_cb cb, void *arg, struct mb_gcs_op **op,
                       struct mb_err *err);
/* The ALIVE node of this id is at node's ip, port and agent_http_port now. MB_ENOENT: no such node
 * is ALIVE; MB_EUNSUPPORTED: the head is Ray's, or older, and its nodes stay where they registered.
 */
int mb_gcs_move_node(struct mb_gcs *c, const struct mb_gcs_node *node, uint64_t timeout_ms,
                     mb_gcs_done_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err);
/* Every node, the dead ones too. */
int mb_gcs_nodes(struct mb_gcs *c, uint64_t timeout_ms, mb_gcs_nodes_cb cb, void *arg,
                 struct mb_gcs_op **op, struct mb_err *err);
/* Where Ray's tools find the node's logs (`ray logs cluster`): a key of the KV. With Ray
 * before 2.60 without http_port, by which its dashboard would take the node for one that jobs can
 * be given to.
 */
int mb_gcs_announce_agent(struct mb_gcs *c, const struct mb_gcs_node *node, uint64_t timeout_ms,
                          mb_gcs_count_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err);
/* What the machine of a node is doing, a JSON text, for the dashboard. MB_EUNSUPPORTED: nobody
 * there reads it. */
int mb_gcs_publish_usage(struct mb_gcs *c, const uint8_t node_id[MB_NODE_ID_BYTES],
                         const char *json, uint64_t timeout_ms, mb_gcs_done_cb cb, void *arg,
                         struct mb_gcs_op **op, struct mb_err *err);
/* Poll the verdict on this node every 5 s; NODE_DEAD, CLUSTER_CHANGED, UNREACHABLE and REACHABLE
 * come as events. The watch ends by itself after NODE_DEAD and CLUSTER_CHANGED. */
int mb_gcs_watch_node(struct mb_gcs *c, const uint8_t node_id[MB_NODE_ID_BYTES],
                      struct mb_err *err);
void mb_gcs_unwatch(struct mb_gcs *c);

/* ---- resource sync: at once on change and every 2 s; keeps the node alive ---- */
struct mb_gcs_view {
    const struct mb_gcs_resource *available;
    size_t n_available;
    const struct mb_gcs_resource *total;
    size_t n_total;
    const struct mb_gcs_label *labels;
    size_t n_labels;
    int64_t idle_ms; /* 0: active */
    int is_draining;
    int64_t draining_deadline_unix_ms; /* 0: none */
};
/* One stream per client; reconnects after 2 s by itself until stop or CLUSTER_CHANGED. */
int mb_gcs_sync_start(struct mb_gcs *c, const uint8_t node_id[MB_NODE_ID_BYTES],
                      const struct mb_gcs_view *view, struct mb_err *err);
int mb_gcs_sync_set(struct mb_gcs *c, const struct mb_gcs_view *view, struct mb_err *err);
/* The same for what is not urgent (how long the node has been idle): goes with the next 2 s. */
int mb_gcs_sync_renew(struct mb_gcs *c, const struct mb_gcs_view *view, struct mb_err *err);
void mb_gcs_sync_stop(struct mb_gcs *c);

/* ---- placement groups ---- */
typedef void (*mb_gcs_pgs_cb)(void *arg, const struct mb_err *err, const struct mb_gcs_pg *groups,
                              size_t n);
/* A fresh id: random bytes, then the job's. */
void mb_gcs_pg_new_id(const uint8_t job_id[MB_JOB_ID_BYTES], uint8_t out[MB_PG_ID_BYTES]);
/* Checks first that the GCS knows the job (MB_ENOENT). Repeating with the same id is harmless;
 * a name that is taken is MB_EEXIST. */
int mb_gcs_pg_create(struct mb_gcs *c, const struct mb_gcs_pg *pg, uint64_t timeout_ms,
                     mb_gcs_done_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err);
/* Done when every bundle is committed; MB_ETIMEOUT while it is not, MB_ENOENT when the group is
 * unknown or was removed. Long waits are fine. */
int mb_gcs_pg_wait(struct mb_gcs *c, const uint8_t id[MB_PG_ID_BYTES], uint64_t timeout_ms,
                   mb_gcs_done_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err);
/* One group, or MB_ENOENT. */
int mb_gcs_pg_get(struct mb_gcs *c, const uint8_t id[MB_PG_ID_BYTES], uint64_t timeout_ms,
                  mb_gcs_pgs_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err);
/* Every group, the removed ones too. */
int mb_gcs_pg_list(struct mb_gcs *c, uint64_t timeout_ms, mb_gcs_pgs_cb cb, void *arg,
                   struct mb_gcs_op **op, struct mb_err *err);
/* What a group waits for. MB_EUNSUPPORTED from a real GCS. */
struct mb_gcs_waiting {
    int waits;        /* 0: it has its nodes */
    uint32_t ahead;   /* groups before it in the queue */
    uint32_t n_nodes; /* that have room for one of its bundles now, or hold one */
    const char *reason;
};
typedef void (*mb_gcs_reason_cb)(void *arg, const struct mb_err *err,
                                 const struct mb_gcs_waiting *w);
int mb_gcs_pg_reason(struct mb_gcs *c, const uint8_t id[MB_PG_ID_BYTES], uint64_t timeout_ms,
                     mb_gcs_reason_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err);
int mb_gcs_pg_remove(struct mb_gcs *c, const uint8_t id[MB_PG_ID_BYTES], uint64_t timeout_ms,
                     mb_gcs_done_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err);

/* ---- jobs ---- */
typedef void (*mb_gcs_job_id_cb)(void *arg, const struct mb_err *err,
                                 const uint8_t job_id[MB_JOB_ID_BYTES]);
typedef void (*mb_gcs_jobs_cb)(void *arg, const struct mb_err *err, const struct mb_gcs_job *jobs,
                               size_t n);
typedef void (*mb_gcs_actor_cb)(void *arg, const struct mb_err *err,
                                const uint8_t actor_id[MB_ACTOR_ID_BYTES]);
int mb_gcs_next_job_id(struct mb_gcs *c, uint64_t timeout_ms, mb_gcs_job_id_cb cb, void *arg,
                       struct mb_gcs_op **op, struct mb_err *err);
/* The worker id that a real GCS insists on is made here. */
int mb_gcs_add_job(struct mb_gcs *c, const struct mb_gcs_job *job, uint64_t timeout_ms,
                   mb_gcs_done_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err);
int mb_gcs_finish_job(struct mb_gcs *c, const uint8_t job_id[MB_JOB_ID_BYTES], uint64_t timeout_ms,
                      mb_gcs_done_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err);
int mb_gcs_jobs(struct mb_gcs *c, uint64_t timeout_ms, mb_gcs_jobs_cb cb, void *arg,
                struct mb_gcs_op **op, struct mb_err *err);
/* Id of a named actor, e.g. Ray's supervisor of a submission: name
 * "_ray_internal_job_actor_<submission id>", namespace "SUPERVISOR_ACTOR_RAY_NAMESPACE". MB_ENOENT
 * when there is none (also on the embedded head, which has no actors). */
int mb_gcs_named_actor(struct mb_gcs *c, const char *name, const char *ray_namespace,
                       uint64_t timeout_ms, mb_gcs_actor_cb cb, void *arg, struct mb_gcs_op **op,
                       struct mb_err *err);

#endif
