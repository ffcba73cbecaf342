/*
 * Files of jobs that are forgotten: out of the way at once, removed by a pool thread. A job of the
 * same id may begin in the meantime. Loop-thread only.
 */
#ifndef MOBULA_AGENT_JOB_FORGET_H
#define MOBULA_AGENT_JOB_FORGET_H

#include <uv.h>
#include "base/err.h"

struct mb_job_forget {
    uv_loop_t *loop;
    const char *node_dir;       /* borrowed */
    void (*on_idle)(void *arg); /* a pool thread has come back */
    void *arg;
    uv_work_t work;
    int busy, closing;
    unsigned long swept, filling, n_files; /* NODE_DIR/forgotten/FILLING/N_FILES */
    char **ids, **swept_ids;               /* whose ranks' directories go: next, now */
    size_t n_ids, n_swept_ids;
};

/* What an earlier agent left is removed by the pool thread, too. */
int mb_job_forget_init(struct mb_job_forget *f, uv_loop_t *loop, const char *node_dir,
                       void (*on_idle)(void *arg), void *arg, struct mb_err *err);
/* A driver's directory, its log and the log's index, and the directories of the job's ranks that
 * have ended, as far as they are there; what cannot be moved stays and is said. */
void mb_job_forget_all(struct mb_job_forget *f, const char *job_id, const char *dir,
                       const char *log);
/* What was unpacked in a driver's directory, in the same way. */
void mb_job_forget_unpacked(struct mb_job_forget *f, const char *dir);
void mb_job_forget_close(struct mb_job_forget *f); /* no pool thread is busy */

#endif
