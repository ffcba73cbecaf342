/* The inside of the job table: jobs.c (writing, states, ends), job_submit.c (a new one), job_load.c
 * (after a restart). Loop thread only. */
#ifndef MOBULA_GCS_JOBS_INTERNAL_H
#define MOBULA_GCS_JOBS_INTERNAL_H

#include "gcs/services.h"

#define JOBS_KEY_PREFIX      "_ray_internal_job_info_" /* Ray's, in its namespace "job" */
#define JOBS_STOPPING_PREFIX "job_stopping:"           /* in our own namespace */

/* A start_time is never farther ahead of the clock: room for a line full of jobs (next_start()). */
enum { JOBS_AHEAD_MAX_MS = 10000 };

/* ---- jobs.c ---- */
/* Takes info, also when it returns NULL: memory is out. */
struct head_job *jobs_add(struct mb_head *h, const char *id, enum mb_job_state state, json_t *info);
void jobs_drop(struct mb_head *h, struct head_job *job); /* out of the table, and freed */
void jobs_forget_ended(struct mb_head *h); /* those beyond the limit, a share of them */
/* first: the record of a new job, which may start after the commit. 0, or the store's refusal. */
int jobs_write(struct mb_head *h, const struct head_job *job, int first, struct mb_err *err);
/* JobInfo's fields for the state; memory running out leaves the old value and is said. */
void jobs_describe(struct mb_head *h, struct head_job *job, enum mb_job_input input,
                   struct mb_job_facts *facts);
int jobs_set_text(json_t *o, const char *key, const char *text); /* NULL: null. 0 or -1 */
/* Its record is stored: it may start when it is its turn, or it is failed for what nobody gives. */
void jobs_into_line(struct mb_head *h, struct head_job *job);
/* Asks whoever has its driver to end it. */
void jobs_stop_driver(struct mb_head *h, struct head_job *job);
/* The mark of a stop that was asked for goes, if there is one. */
void jobs_stop_is_over(struct mb_head *h, const char *id);

/* ---- job_load.c ---- */
/* One record; arg is the head. 0, also for one that is no JobInfo, or MB_ENOMEM. */
int jobs_load_one(void *arg, struct mb_blob key, struct mb_blob value);

#endif
