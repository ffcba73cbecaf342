/*
 * The embedded head: Ray's control plane (NodeInfo, InternalKV, JobInfo, placement groups, resource
 * syncer, health checks) on one gRPC port and the Jobs REST API on one HTTP port, with its tables
 * in a store. Loop-thread only; lives in the agent's process.
 */
#ifndef MOBULA_GCS_HEAD_H
#define MOBULA_GCS_HEAD_H

#include <uv.h>
#include "base/err.h"
#include "base/grpc/grpc.h"
#include "gcs/job_queue.h"
#include "gcs/placement.h"
#include "gcs/runner.h"

struct mb_head;
struct mb_http_server;

/* What drivers may use, and how many there may be. */
struct mb_head_job_limits {
    size_t max_running;        /* 0: MB_HEAD_RUNNING_JOBS */
    size_t max_queued;         /* 0: MB_HEAD_QUEUED_JOBS */
    size_t max_ended;          /* records kept of jobs that ended; 0: MB_HEAD_ENDED_JOBS */
    uint64_t start_timeout_ms; /* longest wait for a start; 0: none */
    /* CPUs, memory and custom resources of the head's node; GPUs are the runner's. */
    const struct mb_job_amount *totals;
    size_t n_totals;
};

enum { MB_HEAD_RUNNING_JOBS = 64, MB_HEAD_QUEUED_JOBS = 10000, MB_HEAD_ENDED_JOBS = 10000 };

struct mb_head_opts {
    const char *bind_addr;      /* of both ports; default 127.0.0.1 */
    const char *http_addr;      /* NULL: bind_addr */
    int is_http_local_too;      /* HTTP on 127.0.0.1 besides http_addr */
    const char *node_ip;        /* what other nodes dial */
    int gcs_port;               /* 6379; 0 picks one */
    int http_port;              /* 8265; 0 picks one */
    const char *store_path;     /* SQLite file, created when absent; NULL: memory only */
    const char *store_url;      /* NULL: store_path; "redis://...": shared with other heads */
    const char *store_password; /* of store_url, when it is not in it */
    const char *holder;         /* with store_url: this node, the same after a restart; hex */
    const char *expect_cluster; /* the id that the store must have, hex; NULL: any */
    int store_sync_full;        /* 1: survives power loss, not only SIGKILL */
    enum mb_place_order gang_order;
    uint64_t gang_patience_ms; /* 0: MB_PLACE_PATIENCE_MS */
    const char *session_name;  /* "session_2026-..." */
    const char *session_dir;
    const char *temp_dir;
    const char *packages_dir; /* uploaded packages of runtime_envs */
    /* Larger uploads are refused (0: 100 MiB, as in Ray); how long a package is kept that no job
     * needs which has not ended, from its last upload or look-up (0: an hour). */
    uint64_t max_package_bytes, package_keep_ms;
    const char *token; /* NULL: no authentication */
    /* host:port of a head that is Ray's, whose dashboard hands its jobs to this node; NULL: this is
     * a head itself. With it only the job agent serves (mb_head_serve_job_agent), store_path must
     * be given, and of ops on_active (jobs are taken; again after each new connection) and on_lost
     * are called. */
    const char *guest_of;
    const char *ray_version; /* what /api/version and CheckAlive say; NULL: 2.60.0 */
    const char *ray_commit;  /* NULL: our own */
    struct mb_head_job_limits jobs;
};

/* With store_url or guest_of; never from inside mb_head_start(). */
struct mb_head_ops {
    void (*on_active)(void *arg);                     /* this is the head now */
    void (*on_other)(void *arg, const char *address); /* another one is: host:port of its GCS */
    /* Not the head any more, or the store cannot be trusted: stop it, and end. */
    void (*on_lost)(void *arg, const struct mb_err *err);
};

/* ops and arg: NULL without store_url and guest_of. With it the head begins as a standby: both
 * ports refuse politely (UNAVAILABLE, 503) until on_active. The runner is borrowed and must outlive
 * the head. Re-adopts jobs that the store says are running.
 */
int mb_head_start(uv_loop_t *loop, struct mb_grpc *grpc, const struct mb_head_opts *opts,
                  const struct mb_job_runner *runner, const struct mb_head_ops *ops, void *arg,
                  struct mb_head **out, struct mb_err *err);
int mb_head_is_active(const struct mb_head *h); /* 0: standing by, a guest not let in, stopping */
int mb_head_gcs_port(const struct mb_head *h);
int mb_head_http_port(const struct mb_head *h);
/* The node id of the head's own node: KV head_node_id and the driver's node. Call when its agent
 * has registered; a guest's records say from then on where it is. */
void mb_head_set_node(struct mb_head *h, const char *node_id_hex);
/* Of a standby whose node has registered: the cluster that the store must hold when this head is
 * elected, or on_lost says what it holds instead. hex is copied. */
int mb_head_expect_cluster(struct mb_head *h, const char *cluster_hex, struct mb_err *err);
/* The runner had that id before: drivers there are its own. */
void mb_head_node_renamed(struct mb_head *h, const char *old_hex);
/* Ends HTTP, flushes and closes the store, then cb; jobs are left to the runner. gRPC calls are
 * answered UNAVAILABLE from now on, until the runtime itself is stopped. */
void mb_head_stop(struct mb_head *h, void (*cb)(void *arg), void *arg);
/* After both the callback above and that of mb_grpc_stop(): calls may arrive until then. */
void mb_head_destroy(struct mb_head *h);

/* Ray's /api/job_agent/jobs/ (submit, stop, delete, logs and their tail) on the server of the
 * node's agent; before it listens. It must be stopped before the head is destroyed. */
int mb_head_serve_job_agent(struct mb_head *h, struct mb_http_server *server, struct mb_err *err);

#endif
