/* The inside of the embedded head, shared by its services (one file each) only. */
#ifndef MOBULA_GCS_SERVICES_H
#define MOBULA_GCS_SERVICES_H

#include <jansson.h>
#include "base/grpc/grpc.h"
#include "base/http/client.h"
#include "base/http/server.h"
#include "gcs/head.h"
#include "gcs/health.h"
#include "gcs/job_index.h"
#include "gcs/job_request.h"
#include "gcs/job_states.h"
#include "gcs/placement.h"
#include "gcs/store.h"
#include "gcs/store_redis.h"
#include "gcs/wire.h"
#include "proto/mobula/head.pb-c.h"
#include "proto/ray/autoscaler.pb-c.h"
#include "proto/ray/ray_syncer.pb-c.h"

enum {
    HEAD_TICK_MS = 500,
    HEAD_NODE_RPC_MS = 5000,
    HEAD_DEAD_NODES_MAX = 100,     /* dead nodes remembered */
    HEAD_REMOVED_GROUPS_MAX = 100, /* removed groups remembered */
    HEAD_DRIVERS_MAX = 1000,       /* drivers remembered; live ones are never forgotten */
    HEAD_POLLS_MAX = 1024,
    HEAD_STATUS_NOT_FOUND = 17, /* Ray's GcsStatus codes */
    HEAD_STATUS_INVALID = 5,
    HEAD_STATUS_EXISTS = 4
};

struct head_node {
    uint8_t id[MB_NODE_ID_BYTES];
    Ray__Rpc__GcsNodeInfo *info;                     /* owned */
    Ray__Rpc__Syncer__ResourceViewSyncMessage *view; /* owned; NULL before the first sync */
    json_t *gpus; /* owned; what its agent last said of them, NULL: nothing */
    struct mb_health health;
    struct mb_grpc_channel *channel; /* opened when first needed */
    int reconciled; /* it holds no bundle but those in the table; before, it gets nothing */
    int is_loaded;  /* of a former head: it has to hear of the restart */
    int reconciling;
    uint64_t since_ms;         /* registered, or found in the store */
    int has_offer;             /* it told what it has for drivers */
    double driver_gpus;        /* of that */
    char http_address[96];     /* of its agent, as that told; "": not yet */
    struct mb_job_node *place; /* in the queue of jobs; NULL: none is started there */
};

struct head_wait { /* somebody waits for a group to be CREATED */
    struct head_wait *next;
    struct mb_grpc_req *req;
    struct mb_head *h;
    uint8_t pg_id[MB_PG_ID_BYTES];
    int gone;      /* the client went away */
    uint64_t need; /* answered when so many batches of groups are committed */
};

struct head_poll { /* a long poll of a subscriber */
    struct head_poll *next;
    struct mb_grpc_req *req;
    uint64_t until_ms;
};

struct head_guest;      /* guest.c */
struct head_job;        /* jobs.c */
struct head_sweep;      /* package_sweep.c */
struct head_restore;    /* package_restore.c */
struct head_follow;     /* log_follow.c */
struct head_forget;     /* job_forget.c */
struct head_log_answer; /* job_logs.c */

struct mb_head {
    uv_loop_t *loop;
    struct mb_grpc *grpc;
    struct mb_grpc_server *server;
    struct mb_http_server *http;
    struct mb_http_client *second_http; /* NULL before a node is in doubt */
    struct mb_tables *store;            /* NULL once stopped */
    const struct mb_job_runner *runner;
    uv_timer_t tick;
    uv_timer_t place_timer;
    uv_idle_t rows_turn; /* active while there are rows */
    struct head_rows *rows;
    int stopping;
    struct mb_redis *redis;   /* NULL: the store is this head's alone */
    struct head_guest *guest; /* NULL: this is a head; else Ray's is, and jobs come from there */
    int standby;              /* another head has the lease: nothing is served */
    int n_lost;               /* on_lost was told */
    char closed_text[400];
    const struct mb_head_ops *ops;
    void *ops_arg;
    char *expect_cluster; /* hex; NULL: any */
    int closing;          /* what still has to close */
    void (*stopped_cb)(void *arg);
    void *stopped_arg;

    char *node_ip, *session_name, *session_dir, *temp_dir, *packages_dir, *token;
    char *ray_version, *ray_commit;
    char head_node_hex[2 * MB_NODE_ID_BYTES + 1];
    uint8_t cluster_id[MB_NODE_ID_BYTES];
    char cluster_hex[2 * MB_NODE_ID_BYTES + 1];
    int gcs_port;
    int http_port;
    int is_open; /* other machines reach it, and there is no token */

    struct head_node **nodes;
    size_t n_nodes;

    struct mb_placement *placement;
    enum mb_place_order gang_order;
    uint64_t newest_group_unix_ms; /* creation times of groups never repeat */
    char name_scratch[128];        /* of a node without a name, or with that of another one */
    struct head_wait *waits;
    uint64_t groups_asked,
        groups_written; /* batches of changed groups, and how many are committed */
    int pumping;

    struct head_poll *polls;
    size_t n_polls;

    struct head_job **jobs; /* in the order of their submission */
    size_t n_jobs;
    struct mb_job_index job_index;
    size_t max_ended_jobs;
    size_t n_ended_lately; /* jobs that ended and made no other one go yet (jobs.c, 7) */
    struct mb_job_queue *queue;
    uint64_t start_timeout_ms;
    uint64_t active_ms; /* since when it serves */
    struct head_follow *follows;
    unsigned n_follows;
    char **forgotten; /* ids of jobs that other nodes are to be told to forget */
    size_t n_forgotten;
    size_t n_deleting; /* jobs whose deletion is not committed yet */
    struct head_forget *forgets;
    size_t n_forgets;
    struct head_log_answer *log_answers; /* that wait for their first bytes */
    size_t log_held_bytes; /* of pieces from other nodes that their readers have yet to take */
    unsigned n_log_stores; /* logs that are read from object stores now, not yet to their end */

    uint64_t max_package_bytes, package_keep_ms;
    uint64_t swept_ms;
    struct head_upload *uploads;  /* of packages, under way */
    uint32_t parts_token;         /* in the names of this process's unfinished packages */
    struct head_sweep *sweep;     /* NULL: none is under way */
    struct head_restore *restore; /* NULL: every kept package is here */
};

/* ---- head.c ---- */
/* NULL, or why nothing is served now: stopping, standing by, the lease is in doubt. */
const char *head_closed(struct mb_head *h);
/* 1 if the call may be served: the head runs, the cluster id (if sent) is ours. Else answered. */
int head_admits(struct mb_head *h, struct mb_grpc_req *req);
/* The status of a failed store write. */
void head_reply_err(struct mb_grpc_req *req, const struct mb_err *err);
/* Answers when everything written so far is committed: reply is packed now, sent then. */
void head_reply_committed(struct mb_head *h, struct mb_grpc_req *req,
                          const ProtobufCMessage *reply);
int head_put_message(struct mb_head *h, enum mb_tables_table table, struct mb_blob key,
                     const ProtobufCMessage *m, struct mb_err *err);
struct mb_blob head_blob(const void *p, size_t n);

/* ---- node_checks.c ---- */
void head_nodes_tick(struct mb_head *h, uint64_t now_ms);
/* 1 if its HTTP port can be asked. */
int head_node_has_second(const Ray__Rpc__GcsNodeInfo *info);

/* ---- nodes.c ---- */
int head_nodes_load(struct mb_head *h, struct mb_err *err);
int head_nodes_methods(struct mb_head *h, struct mb_err *err);
void head_nodes_close(struct mb_head *h); /* channels; calls in flight end */
void head_nodes_free(struct mb_head *h);
struct head_node *head_node_find(struct mb_head *h, ProtobufCBinaryData id);
struct head_node *head_node_find_id(struct mb_head *h, const uint8_t id[MB_NODE_ID_BYTES]);
struct head_node *head_node_find_hex(struct mb_head *h, const char *hex); /* NULL: also for no id */
int head_node_alive(const struct head_node *n);
/* NULL and err when it cannot be made. */
struct mb_grpc_channel *head_node_channel(struct mb_head *h, struct head_node *n,
                                          struct mb_err *err);
void head_node_dead(struct mb_head *h, struct head_node *n, Ray__Rpc__NodeDeathInfo__Reason reason,
                    const char *text);

/* ---- the other services ---- */
int head_kv_methods(struct mb_head *h, struct mb_err *err);
int head_jobinfo_methods(struct mb_head *h, struct mb_err *err);
void head_jobinfo_finish_submission(struct mb_head *h, const char *submission_id);
void head_jobinfo_node_dead(struct mb_head *h, const uint8_t node_id[MB_NODE_ID_BYTES]);
/* The submission a driver belongs to, or "". Borrowed. */
const char *head_jobinfo_submission(const Ray__Rpc__JobTableData *job);
typedef void (*head_job_visit)(void *arg, const Ray__Rpc__JobTableData *job);
void head_jobinfo_each(struct mb_head *h, head_job_visit visit, void *arg);
int head_jobinfo_known(struct mb_head *h, ProtobufCBinaryData job_id);
int head_jobinfo_alive(struct mb_head *h, ProtobufCBinaryData job_id); /* known and not finished */
/* Finishes the drivers whose submission is over: a former head may have died before it did. */
void head_jobinfo_settle(struct mb_head *h);
/* Removes the groups whose owner is finished, for the same reason. */
void head_placement_settle(struct mb_head *h);

int head_placement_load(struct mb_head *h, struct mb_err *err);
int head_placement_methods(struct mb_head *h, struct mb_err *err);
void head_placement_pump(struct mb_head *h);
void head_placement_view(struct mb_head *h, struct head_node *n);
void head_placement_node_up(struct mb_head *h, struct head_node *n);
void head_placement_job_finished(struct mb_head *h, ProtobufCBinaryData job_id);
void head_placement_reconcile(struct mb_head *h, struct head_node *n);
void head_placement_close(struct mb_head *h); /* waiters are answered */

/* ---- placement_report.c ---- */
int head_placement_report_methods(struct mb_head *h, struct mb_err *err);
json_t *head_placement_queue_json(struct mb_head *h); /* groups that wait, in order */
const char *head_placement_order_name(const struct mb_head *h);
/* Into the message of a running job's details, what its gang waits for. */
void head_placement_tell(struct mb_head *h, json_t *details);
/* What a running job's gang sends into the store goes into the message of its details. */
void head_gang_tell(struct mb_head *h, json_t *details);

int head_syncer_methods(struct mb_head *h, struct mb_err *err);
int head_pubsub_methods(struct mb_head *h, struct mb_err *err);
void head_pubsub_tick(struct mb_head *h, uint64_t now_ms);
void head_pubsub_close(struct mb_head *h);
int head_status_methods(struct mb_head *h, struct mb_err *err);

/* ---- REST ---- */
int head_cluster_routes(struct mb_head *h, struct mb_err *err);
int head_jobs_routes(struct mb_head *h, struct mb_err *err);
/* 1 if the uploaded package of this name is here. */
int head_package_known(struct mb_head *h, const char *name);
int head_packages_methods(struct mb_head *h, struct mb_err *err);
int head_package_name_is_fine(const char *name); /* as a file's, and in a key */
/* ---- package_store.c: small packages in a store that heads share ---- */
enum {
    HEAD_KEPT_PACKAGE_BYTES = 8 << 20,
    HEAD_KEPT_PACKAGES_BYTES = 64 << 20,
    HEAD_PACKAGE_PART_BYTES = 1 << 20
};
int head_package_can_keep(struct mb_head *h, uint64_t size_bytes);
int head_package_keep(struct mb_head *h, const char *name, struct mb_blob bytes, mb_tables_cb cb,
                      void *arg, struct mb_err *err);
void head_package_drop(struct mb_head *h, const char *name);
/* Records of kept packages: key HEAD_PACKAGE_RECORD NAME. */
#define HEAD_PACKAGE_RECORD "package:"
int head_packages_each(struct mb_head *h, mb_tables_visit visit, void *arg);
int head_package_kept(struct mb_head *h, const char *name, uint64_t *size_bytes); /* 1 or 0 */
size_t head_package_count_parts(uint64_t size_bytes);
/* 1 and its bytes (borrowed until the next write), or 0. */
int head_package_part(struct mb_head *h, const char *name, size_t i, struct mb_blob *out);
void head_packages_drop_orphans(struct mb_head *h); /* parts without a record */
/* ---- package_restore.c ---- */
/* Begins to write kept packages that are not here to the disk, part by part; h->restore is there
 * until the last one is, then done runs, once, from the loop. With none to write nothing happens.
 */
void head_packages_restore(struct mb_head *h, void (*done)(struct mb_head *h));
void head_packages_restore_close(struct mb_head *h); /* done does not run any more */
/* ---- package_upload.c ---- */
/* A PUT whose body is to come; path is taken. */
void head_package_upload(struct mb_head *h, struct mb_http_req *req, char *path);
void head_package_uploads_close(struct mb_head *h);
/* ---- package_sweep.c ---- */
/* The name of an unfinished package beside its path; freed by the caller, NULL: out of memory. */
char *head_package_temp(const struct mb_head *h, const char *path);
void head_packages_tick(struct mb_head *h, uint64_t now_ms);
void head_packages_close(struct mb_head *h);
int head_packages_routes(struct mb_head *h, struct mb_err *err);
json_t *head_node_json(const struct head_node *n);
/* JobDetails: of one submission, of a driver outside of one (hex id; NULL: there is none), and an
 * array of them over several turns of the loop: of these jobs, or with NULL of all and the drivers.
 * cb takes rows; NULL: no memory, or the head stops. It may come before the call returns. */
json_t *head_job_row(struct mb_head *h, struct head_job *job, const json_t *index, int redact);
json_t *head_job_driver_row(struct mb_head *h, const char *id);
typedef void (*head_rows_cb)(void *arg, json_t *rows);
void head_job_rows(struct mb_head *h, struct head_job *const *jobs, size_t n, int redact,
                   head_rows_cb cb, void *arg);
void head_job_rows_close(struct mb_head *h);
/* Takes body. What is shown of jobs is committed: a state never comes back from a later one after a
 * crash. 503 when the store does not answer in time. */
void head_jobs_reply_read(struct mb_head *h, struct mb_http_req *req, json_t *body);

/* ---- jobs.c, job_submit.c, job_load.c: submissions ---- */
struct head_job {
    char *id;
    struct mb_job_entry entry;
    enum mb_job_state state;
    json_t *info;     /* Ray's JobInfo; what the KV holds */
    json_t *selector; /* entrypoint_label_selector; NULL: none */
    struct mb_job_ticket ticket;
    int unwritten; /* the store refused the newest state: again at the next tick */
    char *wish;    /* which nodes it would take, for the ticket; NULL: any */
    /* Of its numbered start (job_start.c); start_no 0: it has none, and its driver is here. */
    char node[2 * MB_NODE_ID_BYTES + 1]; /* hex; "": none yet, or here */
    uint64_t start_no;
    uint64_t ask_at_ms; /* not before */
    int asking;         /* it is not known whether the node has begun */
    int start_in_flight, stop_in_flight;
    int stop_told; /* the node knows that it is to end */
};
int head_jobs_load(struct mb_head *h, struct mb_err *err);
void head_jobs_free(struct mb_head *h);
/* Listen to the runner and ask it for every job that had not ended. */
void head_jobs_adopt(struct mb_head *h);
void head_jobs_tick(struct mb_head *h);
/* A record that turns up while the head runs: a job of the table, as after a restart. */
int head_jobs_take_record(struct mb_head *h, struct mb_blob key, struct mb_blob value,
                          struct mb_err *err);
struct head_job *head_job_find(struct mb_head *h, const char *id);
/* request: a checked JobSubmitRequest (borrowed). The job is in the store's queue and has its place
 * in line when this returns 0. MB_EEXIST: duplicate id; but the same request again, with the same
 * submission key in its metadata, is answered with the job that is there. MB_EFULL: too many wait.
 * MB_EINVAL: a malformed label selector, in Ray's words. */
int head_job_submit(struct mb_head *h, const json_t *request, struct head_job **out,
                    struct mb_err *err);
int head_job_stop(struct mb_head *h, struct head_job *job, int *stopped, struct mb_err *err);
int head_job_delete(struct mb_head *h, struct head_job *job, struct mb_err *err);
/* Submission id -> [start_time, driver_info] of its newest driver, for head_job_details(). */
json_t *head_job_drivers(struct mb_head *h);
json_t *head_job_details(struct head_job *job, const json_t *drivers, int redact);
/* An input of the state machine, with everything that follows from it. */
void head_job_apply(struct mb_head *h, struct head_job *job, enum mb_job_input input,
                    struct mb_job_facts *facts);
/* ---- job_details.c ---- */
/* "{}" if none. */
const char *head_job_runtime_env(const struct head_job *job);
/* A text of its submission's metadata; "" if there is none. Borrowed. */
const char *head_job_metadata(const struct head_job *job, const char *key);

/* ---- job_start.c ---- */
/* Where the queue has put it. MB_EFULL: not now; MB_EUNAVAIL: not before the packages are restored;
 * any other failure: not at all. */
int head_job_start_driver(struct mb_head *h, struct head_job *job, struct mb_err *err);
void head_job_start_load(struct mb_head *h, struct head_job *job);
void head_job_start_forget(struct mb_head *h, struct head_job *job);
void head_job_start_tick(struct mb_head *h, struct head_job *job, uint64_t now_ms);
/* Its driver on another node is to end, or never to begin; told again until the node knows. */
void head_job_stop_elsewhere(struct mb_head *h, struct head_job *job);

/* ---- job_offers.c: where drivers may run ---- */
int head_job_wants_gpu_node(const struct head_job *job);
/* The text in out is the job's. 0 or MB_ENOMEM. */
int head_job_wish(struct head_job *job, int asks_resources, struct mb_job_wish *out);
int head_offers_may_use(void *head, const struct mb_job_ticket *t, const char *node);
void head_offers_take(struct mb_head *h, struct head_node *n,
                      const Mobula__V1__ReportDriversRequest *report);
void head_offers_refresh(struct mb_head *h);
/* What the node has for drivers and what of it is used, {"CPU": {"used": 1, "total": 4}}; {}: it
 * takes none. */
json_t *head_offers_json(struct mb_head *h, const struct head_node *n);

/* ---- job_admission.c: who may start ---- */
int head_admission_create(struct mb_head *h, const struct mb_head_job_limits *limits,
                          struct mb_err *err);
/* In line. forced: whatever the bound says. */
int head_admission_add(struct mb_head *h, struct head_job *job, int forced, struct mb_err *err);
/* It runs already, or is being started, on that node. */
void head_admission_adopt(struct mb_head *h, struct head_job *job, const char *node);
void head_admission_needs_anew(struct mb_head *h); /* there are new kinds of resources */
void head_admission_leave(struct head_job *job);
/* Starts whoever may start, fails whoever may not. Not from inside a call of the runner. */
void head_admission_pump(struct mb_head *h);
/* The packages are restored: those that waited for them may start. */
void head_admission_restored(struct mb_head *h);
/* Ray's sentence for a PENDING job, with its place and what is missing; added to out. */
int head_admission_message(struct head_job *job, struct mb_buf *out);

/* ---- job_forget.c: what a forgotten job leaves on any node ---- */
/* A node is asked to forget as long as it is ALIVE; which nodes are still to be asked is in memory
 * only: after a restart of the head they keep what they have. */
/* Before its record is deleted, in the same order of commits: whoever finds the mark without the
 * record removes the files. */
int head_forget_mark(struct mb_head *h, const char *id, struct mb_err *err);
void head_forget_unmark(struct mb_head *h, const char *id);
/* Its deletion is committed; the mark goes too. */
void head_forget_files(struct mb_head *h, const char *id);
/* What a head that died had not come to. */
void head_forget_resume(struct mb_head *h);
int head_forget_is_full(const struct mb_head *h); /* no more before the next tick */
void head_forget_tick(struct mb_head *h, uint64_t now_ms);
void head_forget_close(struct mb_head *h);

/* ---- job_labels.c: the label selector ---- */
int head_job_labels_store(struct mb_head *h, struct head_job *job, json_t *selector,
                          struct mb_err *err);
void head_job_labels_load(struct mb_head *h, struct head_job *job);
void head_job_labels_forget(struct mb_head *h, const struct head_job *job);

/* ---- job_remote.c: drivers on other nodes ---- */
int head_drivers_methods(struct mb_head *h, struct mb_err *err);
/* What a node says of drivers. */
void head_drivers_take(struct mb_head *h, const Mobula__V1__ReportDriversRequest *m,
                       const char *node_hex);
/* 1: its driver runs, or is being started, on a node that is not the head's. */
int head_job_is_elsewhere(struct mb_head *h, const struct head_job *job);
/* A new head finds no driver of it: a node that died with the old head is named. */
void head_job_lost(struct mb_head *h, struct head_job *job);
void head_jobs_node_dead(struct mb_head *h, const uint8_t node_id[MB_NODE_ID_BYTES]);
/* jobs.c: what a runner, here or there, says of a driver. */
void head_jobs_event(struct mb_head *h, const struct mb_job_event *e);

/* ---- job_logs.c, log_follow.c ---- */
struct log_start;
/* ?offset= &since_ms= &tail= &rank= &attempt= of a request. 0, or MB_EINVAL after it was answered.
 */
int head_logs_query(struct mb_http_req *req, struct log_start *start, int64_t *rank);
void head_logs_reply(struct mb_head *h, struct mb_http_req *req, struct head_job *job);
void head_logs_follow(struct mb_head *h, struct mb_http_req *req, struct head_job *job);
void head_logs_close(struct mb_head *h);
void head_log_answers_close(struct mb_head *h);
/* The job's state changed, and the change is committed. */
void head_logs_job_changed(struct mb_head *h, const char *id);

#endif
