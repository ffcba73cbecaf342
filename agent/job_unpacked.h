/*
 * What was unpacked for a job (working_dir, py_modules) goes when the job has ended and nobody uses
 * it any more; its log and record stay. One that a gang saves into, or has its store in, stays
 * until the job is forgotten: NODE_DIR/jobs/ID/kept says so, as the records of its gangs go before
 * it. Loop-thread only; looking and removing are other threads'.
 */
#ifndef MOBULA_AGENT_JOB_UNPACKED_H
#define MOBULA_AGENT_JOB_UNPACKED_H

#include <stdint.h>
#include <uv.h>
#include "agent/job_forget.h"
#include "base/errand.h"

struct mb_job_ended;

struct mb_job_unpacked_opts { /* all borrowed */
    uv_loop_t *loop;
    const char *node_dir;
    struct mb_job_forget *forget;                  /* removes what was moved away */
    int (*is_live)(void *arg, const char *job_id); /* another driver of this id is there */
    void (*on_closed)(void *arg);
    void *arg;
};

struct mb_job_unpacked {
    struct mb_job_unpacked_opts opts;
    struct mb_job_ended *list; /* jobs that have ended and of which something is left */
    uv_timer_t timer;
    struct mb_errand *look; /* that is under way */
    int has_searched;       /* for what an earlier agent left */
    int closing, is_closed;
};

/* What jobs that ended before this agent began have left is found and goes as well. */
void mb_job_unpacked_init(struct mb_job_unpacked *u, const struct mb_job_unpacked_opts *opts);
/* No process of its driver is left. code: how it ended, as in mb_job_event. grace_ms: what the
 * job's processes have to end in; -1: it never ran. */
void mb_job_unpacked_ended(struct mb_job_unpacked *u, const char *job_id, int code,
                           int64_t grace_ms);
/* job_dir: NODE_DIR/jobs/ID. 1: a gang saves into it, and its file says so. Any thread. */
int mb_job_unpacked_is_kept(const char *job_dir);
void mb_job_unpacked_close(struct mb_job_unpacked *u); /* on_closed follows, is_closed is set */
void mb_job_unpacked_free(struct mb_job_unpacked *u);  /* after that */

#endif
