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

struct mb_jobs;

struct mb_jobs_opts {
    uv_loop_t *loop;
    struct mb_init *init; /* borrowed, closed after the jobs */
    const char *node_dir; /* jobs/ and logs/ are made in it */
    const char *bin_dir;  /* our programs: first in the drivers' PATH */
    const char *cwd;      /* of drivers without a working_dir: where `mobula start` was typed */
    struct mb_log_keeper *logs; /* borrowed; NULL: logs are neither capped nor sent */
    struct mb_job_gpus gpus;
};

int mb_jobs_create(const struct mb_jobs_opts *opts, struct mb_jobs **out, struct mb_err *err);
/* Valid until mb_jobs_close(). */
const struct mb_job_runner *mb_jobs_runner(struct mb_jobs *jobs);
/* What http_address() and node_id_hex() say; copied; "" until called. */
int mb_jobs_set_address(struct mb_jobs *jobs, const char *http_address, const char *node_id_hex,
                        struct mb_err *err);
/* Drivers go on (init ends them if the node ends); no event follows. Freed after cb. */
void mb_jobs_close(struct mb_jobs *jobs, void (*cb)(void *arg), void *arg);

#endif
