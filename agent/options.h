/* The agent's command line: what `mobula start` passes on, plus the node directory. Start-up only.
 */
#ifndef MOBULA_AGENT_OPTIONS_H
#define MOBULA_AGENT_OPTIONS_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"
#include "gcs/job_queue.h"
#include "gcs/types.h"

enum { MB_AGENT_LABELS_MAX = 32, MB_AGENT_RESOURCES_MAX = MB_JOB_QUEUE_KINDS_MAX - 3 };

struct mb_agent_options {
    const char *node_dir;
    const char *address; /* host:port of the head; NULL with is_head */
    int is_head;
    int is_job_agent; /* below a head that is Ray's: its dashboard hands jobs to this node */
    int64_t num_gpus; /* -1: count them */
    /* For drivers of submitted jobs, on a head. */
    int64_t num_cpus, memory_bytes; /* -1: what there is */
    const char *resources_json;
    int64_t max_running_jobs; /* 0: 4 for each CPU, at least 64 */
    int64_t max_queued_jobs, max_ended_jobs;
    const char *node_ip;
    int64_t port;           /* of the embedded head */
    int64_t dashboard_port; /* its HTTP */
    int64_t agent_port;     /* gRPC of the node; 0: any */
    int64_t http_port;      /* HTTP of the node; -1: the usual one or any */
    int64_t metrics_port;   /* where /metrics is served besides; 0: nowhere */
    const char *temp_dir;
    const char *node_name;
    const char *labels_json;
    const char *store;               /* "sqlite", "memory" or "redis://..." without a password */
    const char *store_password_file; /* NULL: none */
    const char *store_sync;          /* "normal" or "full" */
    int64_t log_max_bytes;           /* -1: the default, where the filesystem can */
    int64_t max_package_bytes;       /* 0: as in Ray */
    int64_t package_keep_s;          /* 0: an hour */
    const char *gang_order;          /* "backfill" or "strict" */
    const char *gang_patience;       /* a duration */
    uint64_t gang_patience_ms;
    int64_t launch_timeout_s; /* 0: MB_LAUNCH_TIMEOUT_MS */
    const char *token_file;
    int no_token;                         /* the network is trusted */
    const char *notice_file, *notice_url; /* of notice.h; NULL: none */
    /* What the head says that it is, for clients that compare; NULL: its own. */
    const char *ray_version, *ray_commit;
    const char *log_level;
    struct mb_gcs_label labels[MB_AGENT_LABELS_MAX]; /* of labels_json; owned */
    size_t n_labels;
    struct mb_job_amount resources[MB_AGENT_RESOURCES_MAX]; /* of resources_json */
    size_t n_resources;
};

/* Strings are borrowed from argv. MB_EINVAL: a line that names the flag. 1: --help was printed. */
int mb_agent_options_parse(int argc, char **argv, struct mb_agent_options *out, struct mb_err *err);
void mb_agent_options_close(struct mb_agent_options *o);

#endif
