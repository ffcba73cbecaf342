/*
 * Runs the drivers of submitted jobs on this node: implements gcs/runner.h with one supervisor per
 * job. A job's directory is NODE_DIR/jobs/ID, its log NODE_DIR/logs/job-driver-ID.log. Loop-thread
 * only; no event is given from inside a call.
 */
#ifndef MOBULA_AGENT_JOBS_H
#define MOBULA_AGENT_JOBS_H

#include <uv.h>
#include "agent/job_gpus.h"
#include "agent/log_keeper.h"
#include "agent/supervisor.h"
#include "gcs/runner.h"

struct mb_gcs;
struct mb_jobs;

/* The connection to the head, whose packages are not on this node; NULL: there is none (yet). */
typedef struct mb_gcs *(*mb_jobs_gcs_cb)(void *arg);

struct mb_jobs_opts {
    uv_loop_t *loop;
    struct mb_init *init; /* borrowed, closed after the jobs */
    const char *node_dir; /* jobs/ and logs/ are made in it */
    const char *bin_dir;  /* our programs: first in the drivers' PATH */
    const char *unpacker; /* path of mobula-unpack */
    const char *cwd;      /* of drivers without a working_dir: where `mobula start` was typed */
    struct mb_log_keeper *logs; /* borrowed; NULL: logs are neither capped nor sent */
    struct mb_job_gpus gpus;
    mb_jobs_gcs_cb gcs_of; /* NULL: every package is on this node */
    void *gcs_arg;
};

int mb_jobs_create(const struct mb_jobs_opts *opts, struct mb_jobs **out, struct mb_err *err);
/* Valid until mb_jobs_close(). */
const struct mb_job_runner *mb_jobs_runner(struct mb_jobs *jobs);
/* What http_address() and node_id_hex() say; copied; "" until called. */
int mb_jobs_set_address(struct mb_jobs *jobs, const char *http_address, const char *node_id_hex,
                        struct mb_err *err);
/* Every driver that a former agent left and that nobody was told the end of. Events follow. */
void mb_jobs_adopt_all(struct mb_jobs *jobs);
/* The head that asked for this start wants it no more. 0: its driver ends, EXITED follows;
 * MB_ENOENT: there is none, and a request for this start that comes late is refused. */
int mb_jobs_give_up(struct mb_jobs *jobs, const char *submission_id, uint64_t start_no,
                    struct mb_err *err);
uint64_t mb_jobs_start_no(struct mb_jobs *jobs, const char *submission_id); /* 0: not known */
/* Drivers go on (init ends them if the node ends); no event follows. Freed after cb. */
void mb_jobs_close(struct mb_jobs *jobs, void (*cb)(void *arg), void *arg);

#endif
