/*
 * Drivers that were here before this agent, and starts that a head asks for more than once.
 *
 *  1. adopt: connect to the driver's supervisor, or read how it ended; its events follow.
 *  2. adopt all, before anything else needs the ledger: whatever has a spec has not been told as
 *     ended. Only on nodes that are not the head: the head's table says there what to adopt.
 *  3. stop unwanted: the same look, for what the head's table does not have. It is adopted and
 *     stopped at once; it keeps its GPUs and its id until it is gone, and its log stays. A new job
 *     of that id waits for that.
 *  4. A start that a head numbered (gcs/job_start.c) is noted in NODE_DIR/starts/ID before it
 *     begins. The same number again, by the same head or by one that took over, is the same start:
 *     what it became follows as events. A number that was given up, or an older one, never begins:
 *     so a driver is started once, whoever asks, however late a request comes.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "agent/job_gpus.h"
#include "agent/jobs_internal.h"
#include "agent/supervise/state.h"
#include "base/alloc.h"
#include "base/fs.h"
#include "base/log.h"

enum { NOTE_MAX = 64 };

#define GIVEN_UP "given up"

/* How it is to be stopped stands in the spec of its supervisor. */
static void read_stop(struct job *job)
{
    char text[MB_SUP_TEXT_MAX], *path = mb_path_join(job->dir, "spec");
    struct mb_sup_spec spec;

    job->env.stop_signal = SIGTERM;
    job->env.stop_grace_ms = 30 * 1000;
    if (path != NULL && mb_sup_spec_read(path, &spec, text) == 0) {
        job->env.stop_signal = spec.stop_signal;
        job->env.stop_grace_ms = spec.stop_grace_ms;
        mb_sup_spec_close(&spec);
    }
    mb_free(path);
}

static int has_ended(const struct job *job)
{
    static struct mb_sup_state state; /* loop thread only */
    char text[MB_SUP_TEXT_MAX];
    int dir_fd = open(job->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC), rc;

    if (dir_fd < 0)
        return 0;
    rc = mb_sup_state_read(dir_fd, &state, text);
    close(dir_fd);
    return rc == 0 && state.all_exited;
}

enum mb_job_adopt mb_jobs_adopt(void *self, const char *submission_id)
{
    struct mb_jobs *jobs = self;
    struct mb_err err;
    struct job *job;

    if (mb_jobs_check_id(submission_id, &err) != 0)
        return MB_JOB_ADOPT_UNKNOWN;
    if (mb_jobs_find(jobs, submission_id) != NULL)
        return MB_JOB_ADOPT_RUNNING;
    job = mb_jobs_new(jobs, submission_id);
    if (job == NULL)
        return MB_JOB_ADOPT_UNKNOWN;
    read_stop(job);
    job->start_no = mb_jobs_start_no(jobs, submission_id);
    if (mb_supervisor_adopt(jobs->init, job->dir, &mb_job_supervisor_ops, job, &job->supervisor,
                            &err) != 0) {
        mb_info("jobs", "job=%s not adopted: %s", submission_id, err.text);
        /* Killed with its supervisor: ranks elsewhere go on until their lease is over. */
        mb_job_unpacked_ended(&jobs->unpacked, job->id, -SIGKILL, (int64_t)job->env.stop_grace_ms);
        mb_jobs_free(job);
        mb_job_gpus_give_back(&jobs->gpus, submission_id);
        return MB_JOB_ADOPT_UNKNOWN;
    }
    mb_job_gpus_adopt(jobs->gpus.ledger, submission_id);
    job->phase = JOB_SUPERVISED;
    if (mb_jobs_keep_log(job, 0, &err) != 0)
        mb_warn("jobs", "job=%s its log is neither capped nor sent: %s", submission_id, err.text);
    mb_jobs_add(jobs, job);
    return has_ended(job) ? MB_JOB_ADOPT_EXITED : MB_JOB_ADOPT_RUNNING;
}

/* Whatever has left a spec. is_wanted, NULL: none, names what is left alone. */
static void adopt_each(struct mb_jobs *jobs, int (*is_wanted)(void *arg, const char *id), void *arg)
{
    char *root = mb_path_join(jobs->node_dir, "jobs");
    DIR *d = root != NULL ? opendir(root) : NULL;
    const struct dirent *e;

    while (d != NULL && (e = readdir(d)) != NULL) {
        char *spec = e->d_name[0] != '.' ? mb_asprintf("%s/%s/spec", root, e->d_name) : NULL;

        if (spec != NULL && mb_fs_exists(spec) && (is_wanted == NULL || !is_wanted(arg, e->d_name)))
            mb_jobs_adopt(jobs, e->d_name);
        mb_free(spec);
    }
    if (d != NULL)
        closedir(d);
    mb_free(root);
}

void mb_jobs_adopt_all(struct mb_jobs *jobs)
{
    adopt_each(jobs, NULL, NULL);
}

void mb_jobs_stop_unwanted(void *self, int (*is_wanted)(void *arg, const char *submission_id),
                           void *arg)
{
    struct mb_jobs *jobs = self;
    struct mb_err err;

    adopt_each(jobs, is_wanted, arg);
    for (struct job *job = jobs->list; job != NULL; job = job->next) {
        if (job->phase == JOB_OVER || job->is_unwanted || is_wanted(arg, job->id))
            continue;
        if (has_ended(job))
            mb_info("jobs", "job=%s is no running job of the head's, and its driver has ended",
                    job->id);
        else
            mb_warn("jobs",
                    "job=%s is no running job of the head's, whose store does not have it (it is "
                    "in memory, or was set back to an older copy): its driver is stopped; what it "
                    "wrote stays in %s",
                    job->id, job->log_path);
        job->is_unwanted = 1;
        mb_jobs_forget_start(jobs, job->id); /* such a store may give its number again */
        jobs->runner.stop(jobs, job->id, &err);
    }
}

/* ---- numbered starts ---- */

static char *note_path(const struct mb_jobs *jobs, const char *id)
{
    return mb_asprintf("%s/starts/%s", jobs->node_dir, id);
}

/* 0: none was noted. */
static uint64_t read_note(const struct mb_jobs *jobs, const char *id, int *is_given_up)
{
    char *path = note_path(jobs, id), *end;
    struct mb_buf text = {0};
    uint64_t no = 0;

    *is_given_up = 0;
    if (path != NULL && mb_fs_exists(path) && mb_fs_read(path, NOTE_MAX, &text, NULL) == 0) {
        no = strtoull(mb_buf_str(&text), &end, 10);
        *is_given_up = strstr(end, GIVEN_UP) != NULL;
    }
    mb_buf_close(&text);
    mb_free(path);
    return no;
}

int mb_jobs_note_start(const struct mb_jobs *jobs, const char *id, uint64_t start_no,
                       int is_given_up, struct mb_err *err)
{
    char *path = note_path(jobs, id), text[NOTE_MAX];
    int n = snprintf(text, sizeof text, "%llu %s\n", (unsigned long long)start_no,
                     is_given_up ? GIVEN_UP : "begun");
    int rc = path != NULL ? mb_fs_replace(path, text, (size_t)n, 0600, err)
                          : mb_err_set(err, MB_ENOMEM, "out of memory");

    mb_free(path);
    return rc;
}

void mb_jobs_forget_start(const struct mb_jobs *jobs, const char *id)
{
    char *path = note_path(jobs, id);

    if (path != NULL && unlink(path) != 0 && errno != ENOENT)
        mb_warn("jobs", "%s stays: %s", path, strerror(errno));
    mb_free(path);
}

int mb_jobs_former_start(struct mb_jobs *jobs, const struct mb_job_spec *spec, struct mb_err *err)
{
    const struct job *job = mb_jobs_find(jobs, spec->submission_id);
    int is_given_up;
    uint64_t no;

    if (job != NULL && job->is_unwanted)
        return mb_err_set(err, MB_EFULL, "a former driver of job %s is still being stopped",
                          spec->submission_id);
    if (spec->start_no == 0)
        return job == NULL ? 0
                           : mb_err_set(err, MB_EEXIST, "job %s runs already", spec->submission_id);
    no = read_note(jobs, spec->submission_id, &is_given_up);
    if (no > spec->start_no)
        return mb_err_set(err, MB_ESTATE, "job %s: start %llu was asked for, %llu came after it",
                          spec->submission_id, (unsigned long long)spec->start_no,
                          (unsigned long long)no);
    if (no == spec->start_no && is_given_up)
        return mb_err_set(err, MB_ECANCELED, "job %s: start %llu was given up", spec->submission_id,
                          (unsigned long long)no);
    if (no == spec->start_no && mb_jobs_adopt(jobs, spec->submission_id) != MB_JOB_ADOPT_UNKNOWN)
        return 1;
    if (no != spec->start_no && job != NULL)
        return mb_err_set(err, MB_EEXIST, "job %s runs already", spec->submission_id);
    return 0;
}

int mb_jobs_give_up(struct mb_jobs *jobs, const char *submission_id, uint64_t start_no,
                    struct mb_err *err)
{
    int is_given_up;
    uint64_t no;

    if (mb_jobs_check_id(submission_id, err) != 0)
        return MB_EINVAL;
    no = read_note(jobs, submission_id, &is_given_up);
    if (no == start_no && !is_given_up &&
        mb_jobs_adopt(jobs, submission_id) != MB_JOB_ADOPT_UNKNOWN)
        return jobs->runner.stop(jobs, submission_id, err);
    if (start_no > 0 && no <= start_no && !is_given_up) {
        int rc = mb_jobs_note_start(jobs, submission_id, start_no, 1, err);
        if (rc != 0)
            return rc;
    }
    return mb_err_set(err, MB_ENOENT, "no driver of job %s runs on this node", submission_id);
}

uint64_t mb_jobs_start_no(struct mb_jobs *jobs, const char *submission_id)
{
    int is_given_up;

    return mb_jobs_check_id(submission_id, NULL) == 0 ? read_note(jobs, submission_id, &is_given_up)
                                                      : 0;
}
