/*
 * A driver, from submission to exit.
 *
 *  1. start: check the id, build the environment, make a fresh job directory (a start that a head
 *     numbered is noted first: job_adopt.c);
 *  2. packages that are elsewhere are fetched, one after another; then a pool thread unpacks all;
 *     the working_dir becomes the driver's directory, modules and it the front of its PYTHONPATH;
 *  3. the log gets its first line, "Running entrypoint for job ID: ...", and a supervisor starts
 *     /bin/sh -c ENTRYPOINT that appends to it;
 *  4. started -> RUNNING; everything the driver started is gone: the rest of its log goes to the
 *     job's store, if there is one; then EXITED with the shell's status and, unless it is 0, the
 *     end of the log; the supervisor is released. What was unpacked in 2 goes (job_unpacked.h).
 *
 *  GPUs that were asked for are claimed in 1 and given back with the last event; not as many free
 * is MB_EFULL, and nothing has happened. Package bad, directory or log not writable, shell not
 * executable: START_FAILED with the reason. Stop before 3: nothing is started, EXITED with the
 * negative stop signal; behind 4's end of the driver: its log has the grace of a stop. Agent
 * restarted: adopt() connects to the supervisor, or reads how the driver ended. The supervisor was
 * killed, or cannot be reached any more: EXITED -9, with that as its text.
 */
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "agent/job_gpus.h"
#include "agent/job_log.h"
#include "agent/jobs_internal.h"
#include "agent/log_service.h"
#include "agent/supervise/state.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"

enum { ID_MAX_BYTES = 200, JOBS_MAX = 4096, LEFTOVER_GRACE_MS = 1000 };

/* ---- memory ---- */

void mb_jobs_free(struct job *job)
{
    mb_free(job->id);
    mb_free(job->dir);
    mb_free(job->log_path);
    mb_free(job->entrypoint);
    mb_job_packages_close(&job->packages);
    mb_unpack_child_close(&job->unpacking);
    mb_free(job->reason);
    mb_kept_log_drop(job->log);
    mb_job_env_close(&job->env);
    mb_free(job);
}

static void free_jobs(struct mb_jobs *jobs)
{
    mb_job_unpacked_free(&jobs->unpacked);
    mb_job_forget_close(&jobs->forget);
    mb_free(jobs->node_dir);
    mb_free(jobs->bin_dir);
    mb_free(jobs->unpacker);
    mb_free(jobs->cwd);
    mb_free(jobs->http_address);
    mb_free(jobs->node_id_hex);
    mb_free(jobs);
}

static void on_closer_closed(uv_handle_t *handle)
{
    struct mb_jobs *jobs = handle->data;
    void (*cb)(void *arg) = jobs->on_closed;
    void *arg = jobs->on_closed_arg;

    free_jobs(jobs);
    if (cb != NULL)
        cb(arg);
}

void mb_jobs_finish_close(void *arg)
{
    struct mb_jobs *jobs = arg;

    if (jobs->closing && jobs->list == NULL && !jobs->forget.busy && jobs->unpacked.is_closed &&
        !uv_is_closing((uv_handle_t *)&jobs->closer))
        uv_close((uv_handle_t *)&jobs->closer, on_closer_closed);
}

/* The job is forgotten; its files stay. */
void mb_jobs_drop(void *arg)
{
    struct job *job = arg;
    struct mb_jobs *jobs = job->jobs;

    for (struct job **at = &jobs->list; *at != NULL; at = &(*at)->next) {
        if (*at == job) {
            *at = job->next;
            break;
        }
    }
    jobs->n_jobs--;
    mb_jobs_free(job);
    mb_jobs_finish_close(jobs);
}

struct job *mb_jobs_find(struct mb_jobs *jobs, const char *id)
{
    for (struct job *job = jobs->list; job != NULL; job = job->next) {
        if (job->phase != JOB_OVER && strcmp(job->id, id) == 0)
            return job;
    }
    return NULL;
}

char *mb_jobs_log_path(const struct mb_jobs *jobs, const char *id)
{
    return mb_asprintf("%s/logs/job-driver-%s.log", jobs->node_dir, id);
}

/* The id becomes part of file names. */
int mb_jobs_check_id(const char *id, struct mb_err *err)
{
    size_t n = strlen(id);

    for (const char *p = id; *p != '\0'; p++) {
        if (*p == '/' || iscntrl((unsigned char)*p))
            return mb_err_set(err, MB_EINVAL,
                              "submission id: it holds a '/' or a control character");
    }
    if (n == 0 || n > ID_MAX_BYTES || id[0] == '.')
        return mb_err_set(err, MB_EINVAL, "submission id: 1 to %d bytes, not beginning with '.'",
                          ID_MAX_BYTES);
    return 0;
}

struct job *mb_jobs_new(struct mb_jobs *jobs, const char *id)
{
    struct job *job = mb_calloc(1, sizeof(*job));

    if (job == NULL)
        return NULL;
    job->jobs = jobs;
    mb_unpack_child_init(&job->unpacking);
    job->id = mb_strdup(id);
    job->dir = mb_asprintf("%s/jobs/%s", jobs->node_dir, id);
    job->log_path = mb_jobs_log_path(jobs, id);
    if (job->id == NULL || job->dir == NULL || job->log_path == NULL) {
        mb_jobs_free(job);
        return NULL;
    }
    return job;
}

void mb_jobs_add(struct mb_jobs *jobs, struct job *job)
{
    job->next = jobs->list;
    jobs->list = job;
    jobs->n_jobs++;
}

static void gpus(void *self, uint32_t *total, uint32_t *n_free)
{
    mb_job_gpus_count(((struct mb_jobs *)self)->gpus.ledger, total, n_free);
}

/* ---- events ---- */

static void tell(const struct job *job, const struct mb_job_event *event)
{
    if (!job->jobs->closing && !job->is_unwanted && job->jobs->listener != NULL)
        job->jobs->listener(job->jobs->listener_arg, event);
}

/* Last event of a job; the supervisor, if there is one, is let go. */
static void end_job(struct job *job, const struct mb_job_event *event)
{
    job->phase = JOB_OVER;
    mb_job_gpus_give_back(&job->jobs->gpus, job->id);
    tell(job, event);
    mb_job_unpacked_ended(&job->jobs->unpacked, job->id, event->exit_code,
                          job->supervisor != NULL ? (int64_t)job->env.stop_grace_ms : -1);
    if (job->supervisor == NULL) {
        mb_jobs_drop(job);
        return;
    }
    mb_supervisor_release(job->supervisor);
    mb_supervisor_close(job->supervisor, mb_jobs_drop, job);
}

static void start_failed(struct job *job, const char *text)
{
    struct mb_job_event event = {.submission_id = job->id,
                                 .kind = MB_JOB_EVENT_START_FAILED,
                                 .start_no = job->start_no,
                                 .text = text,
                                 .log_tail = ""};

    mb_warn("jobs", "job=%s could not be started: %s", job->id, text);
    end_job(job, &event);
}

static void exited(struct job *job, int code, const char *text)
{
    struct mb_job_event event = {.submission_id = job->id,
                                 .kind = MB_JOB_EVENT_EXITED,
                                 .start_no = job->start_no,
                                 .exit_code = code,
                                 .text = text,
                                 .log_tail = ""};
    struct mb_buf tail = {0};
    struct mb_err err;

    if (code != 0) {
        if (mb_job_log_tail(job->log_path, &tail, &err) != 0)
            mb_warn("jobs", "job=%s: %s", job->id, err.text);
        event.log_tail = mb_buf_str(&tail);
    }
    mb_info("jobs", "job=%s driver ended exit_code=%d %s", job->id, code, text);
    end_job(job, &event);
    mb_buf_close(&tail);
}

/* ---- the supervisor speaks ---- */

static void on_error(void *arg, const struct mb_err *err)
{
    struct job *job = arg;

    if (job->started)
        exited(job, -SIGKILL, err->text);
    else
        start_failed(job, err->text);
}

static void on_started(void *arg, unsigned child, int64_t pid, uint64_t start_ticks)
{
    struct job *job = arg;
    struct mb_job_event event = {.submission_id = job->id,
                                 .kind = MB_JOB_EVENT_RUNNING,
                                 .start_no = job->start_no,
                                 .pid = pid,
                                 .text = "",
                                 .log_tail = ""};

    (void)child;
    (void)start_ticks;
    job->started = 1;
    mb_info("jobs", "job=%s driver runs pid=%lld", job->id, (long long)pid);
    tell(job, &event);
}

static void on_start_failed(void *arg, unsigned child, const char *text)
{
    struct job *job = arg;

    (void)child;
    snprintf(job->start_error, sizeof(job->start_error), "%s", text);
}

static void on_exit_cb(void *arg, unsigned child, int code, int sig)
{
    struct job *job = arg;

    (void)child;
    job->exit_code = sig != 0 ? -sig : code;
}

/* Nothing of it is left. The state says so to an agent that comes after us; the spec, which holds
 * the job's environment, is of no more use. */
static void over(struct job *job, const char *reason)
{
    char *spec = mb_path_join(job->dir, "spec");

    if (spec != NULL && unlink(spec) != 0 && errno != ENOENT)
        mb_warn("jobs", "job=%s its environment stays on disk: %s", job->id, strerror(errno));
    mb_free(spec);
    exited(job, job->exit_code, reason);
}

static void on_log_sent(void *arg)
{
    struct job *job = arg;

    job->log = NULL;
    over(job, job->reason);
}

/* Part of how the job ended: nobody should look for it in the store in vain. */
static void on_log_lost(void *arg, const char *text)
{
    struct job *job = arg;
    const char *reason =
        *job->reason == '\0' && job->stop_asked ? MB_JOB_TEXT_STOPPED : job->reason;
    char *both = mb_asprintf("%s%s%s", reason, *reason != '\0' ? "; " : "", text);

    if (both == NULL)
        return; /* the agent's log has it */
    mb_free(job->reason);
    job->reason = both;
}

static void on_log_late(void *arg, const char *text)
{
    const struct job *job = arg;

    tell(job, &(struct mb_job_event){.submission_id = job->id,
                                     .kind = MB_JOB_EVENT_ENDING,
                                     .start_no = job->start_no,
                                     .text = text,
                                     .log_tail = ""});
}

/* A job is not over before its log is safe. */
static void send_log(struct job *job, const char *reason)
{
    job->reason = mb_strdup(reason);
    if (job->log != NULL) {
        mb_job_hurry_log(job);
        mb_kept_log_tell_late(job->log, on_log_late);
        mb_kept_log_tell_lost(job->log, on_log_lost);
    }
    if (job->log == NULL || job->reason == NULL)
        over(job, reason);
    else if (mb_kept_log_end(job->log, on_log_sent, job))
        on_log_sent(job);
}

static void on_all_exited(void *arg, const char *reason)
{
    struct job *job = arg;

    if (job->start_error[0] != '\0')
        start_failed(job, job->start_error);
    else
        send_log(job, reason);
}

const struct mb_supervisor_ops mb_job_supervisor_ops = {.on_error = on_error,
                                                        .on_started = on_started,
                                                        .on_start_failed = on_start_failed,
                                                        .on_exit = on_exit_cb,
                                                        .on_all_exited = on_all_exited};

/* ---- start ---- */

/* The pool thread: the packages, the log's first line. */
static int prepare(struct job *job, struct mb_err *err)
{
    if (mb_job_packages_unpack(&job->packages, job->jobs->unpacker, &job->unpacking, err) != 0)
        return mb_job_setup_failed(err);
    return mb_job_log_begin(job->log_path, job->id, job->entrypoint, err);
}

static void do_prepare(uv_work_t *work)
{
    struct job *job = work->data;

    if (job->work_err.code == 0)
        prepare(job, &job->work_err);
}

/* Where the driver imports from. */
static int set_python_path(struct job *job)
{
    char *path;
    int rc;

    if (job->packages.n == 0)
        return 0;
    path = mb_job_packages_python_path(&job->packages, mb_job_env_get(&job->env, "PYTHONPATH"));
    rc = path != NULL ? mb_job_env_set(&job->env, "PYTHONPATH", path) : MB_ENOMEM;
    mb_free(path);
    return rc;
}

static int supervise(struct job *job, struct mb_err *err)
{
    const char *plain[] = {"/bin/sh", "-c", job->entrypoint, NULL};
    const char *strict[] = {mb_job_pipefail_shell(), "-eo", "pipefail", "-c",
                            job->entrypoint,         NULL};
    const char **argv = job->pipefail ? strict : plain;
    struct mb_sup_child child = {
        .argv = argv,
        .env = (const char *const *)job->env.vars,
        .cwd = job->packages.working_dir != NULL ? job->packages.working_dir : job->jobs->cwd,
        .log_path = job->log_path};
    struct mb_sup_spec spec = {.dir = job->dir,
                               .stop_signal = job->env.stop_signal,
                               .stop_grace_ms = job->env.stop_grace_ms,
                               .end_peers_after_ms = -1,
                               .leftover_grace_ms = LEFTOVER_GRACE_MS,
                               .n_children = 1,
                               .children = &child};

    mb_job_limits_apply(&job->env.limits, &spec);
    if (argv[0] == NULL)
        return mb_err_set(
            err, MB_EUNSUPPORTED,
            "pipefail was asked for, and this node has no bash, whose pipefail it is");
    return mb_supervisor_start(job->jobs->init, &spec, &mb_job_supervisor_ops, job,
                               &job->supervisor, err);
}

static void on_prepared(uv_work_t *work, int status)
{
    struct job *job = work->data;
    struct mb_err err;

    (void)status;
    if (job->jobs->closing) {
        mb_jobs_drop(job);
    } else if (job->stop_asked) {
        exited(job, -job->env.stop_signal, MB_JOB_TEXT_STOPPED ", before it started");
    } else if (job->work_err.code != 0) {
        start_failed(job, job->work_err.text);
    } else if (set_python_path(job) != 0) {
        start_failed(job, "out of memory");
    } else if (supervise(job, &err) != 0) {
        start_failed(job, err.text);
    } else {
        job->phase = JOB_SUPERVISED;
    }
}

static void prepare_next(struct job *job);

static void on_fetched(void *arg, const struct mb_err *err)
{
    struct job *job = arg;
    struct mb_err why = *err;

    job->fetch = NULL;
    if (job->jobs->closing) {
        mb_jobs_drop(job);
    } else if (job->stop_asked) {
        exited(job, -job->env.stop_signal, MB_JOB_TEXT_STOPPED ", before it started");
    } else if (err->code != 0) {
        mb_job_setup_failed(&why);
        start_failed(job, why.text);
    } else {
        mb_job_packages_missing(&job->packages)->is_missing = 0;
        prepare_next(job);
    }
}

/* A turn of its own for a failure: no event comes from inside a call. */
static void prepare_next(struct job *job)
{
    const struct mb_job_package *missing = mb_job_packages_missing(&job->packages);
    struct mb_gcs *gcs = job->jobs->gcs_of != NULL ? job->jobs->gcs_of(job->jobs->gcs_arg) : NULL;

    if (missing != NULL && mb_fetch_start(job->jobs->loop, gcs, missing->uri, missing->file,
                                          on_fetched, job, &job->fetch, &job->work_err) == 0)
        return;
    if (missing != NULL)
        mb_job_setup_failed(&job->work_err);
    uv_queue_work(job->jobs->loop, &job->work, do_prepare, on_prepared);
}

/* A former job of this id may have left its directory; a living one must not be touched. A
 * supervisor whose processes are gone only waits to be let go, and holds the directory itself, not
 * its name. */
static int fresh_dir(struct job *job, struct mb_err *err)
{
    char text[MB_SUP_TEXT_MAX];
    static struct mb_sup_state state; /* loop thread only */
    int dir_fd = open(job->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc = dir_fd >= 0 ? mb_sup_state_read(dir_fd, &state, text) : -1;

    if (dir_fd >= 0)
        close(dir_fd);
    if (rc == 0 && !state.all_exited &&
        mb_sup_is_running(state.supervisor_pid, state.supervisor_ticks))
        return mb_err_set(err, MB_EEXIST, "a driver of job %s still runs on this node", job->id);
    mb_job_forget_unpacked(&job->jobs->forget, job->dir); /* it may be huge */
    rc = mb_fs_remove_tree(job->dir, err);
    return rc != 0 ? rc : mb_fs_mkdir_p(job->dir, 0700, err);
}

/* Its directory, environment and devices: all that can be refused before anything runs. */
static int set_up(struct job *job, const struct mb_job_spec *spec, struct mb_err *err)
{
    struct mb_jobs *jobs = job->jobs;
    int rc = mb_job_env_build(spec, environ, jobs->bin_dir, &job->env, err);

    job->start_no = spec->start_no;
    job->pipefail = spec->pipefail;
    if (rc == 0) {
        job->entrypoint = mb_strdup(spec->entrypoint);
        if (job->entrypoint == NULL)
            rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    if (rc == 0)
        rc = mb_job_packages_init(&job->packages, spec->runtime_env_json, spec->packages_dir,
                                  job->dir, err);
    if (rc == 0)
        rc = fresh_dir(job, err);
    if (rc == 0 && spec->start_no > 0) /* after the former one's files are gone, before its own */
        rc = mb_jobs_note_start(jobs, job->id, spec->start_no, 0, err);
    if (rc == 0)
        rc = mb_jobs_keep_log(job, 1, err);
    if (rc == 0)
        rc = mb_job_tell_url_file(job, err);
    if (rc == 0)
        rc = mb_job_gpus_take(&jobs->gpus, job->id, spec->n_gpus, &job->env, err);
    if (rc == 0 && spec->n_gpus == 0 && spec->hides_gpus && jobs->gpus.visible_env != NULL &&
        mb_job_env_set(&job->env, jobs->gpus.visible_env, "") != 0)
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    return rc;
}

/* Whoever asked will go on elsewhere: a request of the same start that comes late finds this. */
static void refuse_start(const struct mb_jobs *jobs, const struct mb_job_spec *spec)
{
    struct mb_err err = {0};

    if (spec->start_no > 0 &&
        mb_jobs_note_start(jobs, spec->submission_id, spec->start_no, 1, &err) != 0)
        mb_warn("jobs", "job=%s: %s", spec->submission_id, err.text);
}

static int start(void *self, const struct mb_job_spec *spec, struct mb_err *err)
{
    struct mb_jobs *jobs = self;
    struct job *job;
    int rc = mb_jobs_check_id(spec->submission_id, err);

    if (rc == 0)
        rc = mb_jobs_former_start(jobs, spec, err);
    if (rc == MB_EFULL)
        refuse_start(jobs, spec);
    if (rc != 0)
        return rc > 0 ? 0 : rc;
    job = jobs->n_jobs < JOBS_MAX ? mb_jobs_new(jobs, spec->submission_id) : NULL;
    if (jobs->n_jobs >= JOBS_MAX)
        rc = mb_err_set(err, MB_EFULL, "%d drivers run on this node already", JOBS_MAX);
    else
        rc = job != NULL ? set_up(job, spec, err) : mb_err_set(err, MB_ENOMEM, "out of memory");
    if (rc != 0) {
        if (job != NULL)
            mb_jobs_free(job);
        refuse_start(jobs, spec);
        return rc;
    }
    job->work.data = job;
    mb_jobs_add(jobs, job);
    prepare_next(job);
    return 0;
}

/* ---- the rest of the runner ---- */

static int stop(void *self, const char *submission_id, struct mb_err *err)
{
    struct job *job = mb_jobs_find(self, submission_id);

    if (job == NULL)
        return mb_err_set(err, MB_ENOENT, "no driver of job %s runs on this node", submission_id);
    /* Its driver has ended, and its log is waited for: it has a grace, once. */
    if (job->reason != NULL && job->log != NULL && !job->stop_asked)
        mb_kept_log_stop(job->log, mb_mono_ms() + job->env.stop_grace_ms);
    job->stop_asked = 1;
    mb_unpack_cancel(&job->unpacking);
    if (job->fetch != NULL)
        mb_fetch_cancel(job->fetch);
    if (job->supervisor != NULL)
        mb_supervisor_stop(job->supervisor, job->env.stop_signal, job->env.stop_grace_ms);
    return 0;
}

static int log_path(void *self, const char *submission_id, char **out, struct mb_err *err)
{
    char *path;

    if (mb_jobs_check_id(submission_id, err) != 0)
        return MB_EINVAL;
    path = mb_jobs_log_path(self, submission_id);
    if (path == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    if (!mb_fs_exists(path)) {
        mb_err_set(err, MB_ENOENT, "job %s has no log yet", submission_id);
        mb_free(path);
        return MB_ENOENT;
    }
    *out = path;
    return 0;
}

static int has_log(void *self, const char *name)
{
    return mb_log_exists(((const struct mb_jobs *)self)->node_dir, name);
}

static void forget(void *self, const char *submission_id)
{
    struct mb_jobs *jobs = self;
    struct mb_err err;
    int is_over =
        mb_jobs_check_id(submission_id, &err) == 0 && mb_jobs_find(jobs, submission_id) == NULL;
    struct job *job = is_over ? mb_jobs_new(jobs, submission_id) : NULL;

    if (job != NULL) { /* else out of memory: they stay */
        mb_job_forget_all(&jobs->forget, job->id, job->dir, job->log_path);
        mb_jobs_forget_start(jobs, submission_id);
        mb_jobs_free(job);
    }
}

static void set_listener(void *self, mb_job_event_cb cb, void *arg)
{
    struct mb_jobs *jobs = self;

    jobs->listener = cb;
    jobs->listener_arg = arg;
}

static const char *http_address(void *self)
{
    return ((struct mb_jobs *)self)->http_address;
}

static const char *node_id_hex(void *self)
{
    return ((struct mb_jobs *)self)->node_id_hex;
}

int mb_jobs_set_address(struct mb_jobs *jobs, const char *address, const char *node_id,
                        struct mb_err *err)
{
    char *new_address = mb_strdup(address), *new_id = mb_strdup(node_id);

    if (new_address == NULL || new_id == NULL) {
        mb_free(new_address);
        mb_free(new_id);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    mb_free(jobs->http_address);
    mb_free(jobs->node_id_hex);
    jobs->http_address = new_address;
    jobs->node_id_hex = new_id;
    return 0;
}

const struct mb_job_runner *mb_jobs_runner(struct mb_jobs *jobs)
{
    return &jobs->runner;
}

static int make_dirs(const struct mb_jobs *jobs, struct mb_err *err)
{
    static const char *const names[] = {"jobs", "logs", "starts"};
    int rc = 0;

    for (int i = 0; i < 3 && rc == 0; i++) {
        char *path = mb_path_join(jobs->node_dir, names[i]);

        rc = path != NULL ? mb_fs_mkdir_p(path, 0755, err)
                          : mb_err_set(err, MB_ENOMEM, "out of memory");
        mb_free(path);
    }
    return rc;
}

static int is_live(void *arg, const char *id)
{
    return mb_jobs_find(arg, id) != NULL;
}

int mb_jobs_create(const struct mb_jobs_opts *opts, struct mb_jobs **out, struct mb_err *err)
{
    struct mb_jobs *jobs = mb_calloc(1, sizeof(*jobs));
    int rc;

    if (jobs == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    jobs->loop = opts->loop;
    jobs->init = opts->init;
    jobs->logs = opts->logs;
    jobs->node_dir = mb_strdup(opts->node_dir);
    jobs->bin_dir = mb_strdup(opts->bin_dir);
    jobs->unpacker = mb_strdup(opts->unpacker);
    jobs->cwd = mb_strdup(opts->cwd);
    jobs->http_address = mb_strdup("");
    jobs->node_id_hex = mb_strdup("");
    jobs->runner = (struct mb_job_runner){.self = jobs,
                                          .set_listener = set_listener,
                                          .start = start,
                                          .stop = stop,
                                          .adopt = mb_jobs_adopt,
                                          .stop_unwanted = mb_jobs_stop_unwanted,
                                          .forget = forget,
                                          .log_path = log_path,
                                          .has_log = has_log,
                                          .http_address = http_address,
                                          .node_id_hex = node_id_hex,
                                          .gpus = gpus};
    jobs->gpus = opts->gpus;
    jobs->gcs_of = opts->gcs_of;
    jobs->gcs_arg = opts->gcs_arg;
    if (jobs->node_dir == NULL || jobs->bin_dir == NULL || jobs->unpacker == NULL ||
        jobs->http_address == NULL || jobs->node_id_hex == NULL ||
        (opts->cwd != NULL && jobs->cwd == NULL))
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    else
        rc = make_dirs(jobs, err);
    if (rc == 0)
        rc = mb_job_forget_init(&jobs->forget, jobs->loop, jobs->node_dir, mb_jobs_finish_close,
                                jobs, err);
    if (rc != 0) {
        free_jobs(jobs);
        return rc;
    }
    mb_job_unpacked_init(&jobs->unpacked,
                         &(struct mb_job_unpacked_opts){.loop = jobs->loop,
                                                        .node_dir = jobs->node_dir,
                                                        .forget = &jobs->forget,
                                                        .is_live = is_live,
                                                        .on_closed = mb_jobs_finish_close,
                                                        .arg = jobs});
    uv_timer_init(jobs->loop, &jobs->closer);
    jobs->closer.data = jobs;
    *out = jobs;
    return 0;
}

void mb_jobs_close(struct mb_jobs *jobs, void (*cb)(void *arg), void *arg)
{
    jobs->closing = jobs->forget.closing = 1;
    jobs->on_closed = cb;
    jobs->on_closed_arg = arg;
    mb_job_unpacked_close(&jobs->unpacked);
    for (struct job *job = jobs->list; job != NULL; job = job->next) {
        mb_unpack_cancel(&job->unpacking);
        if (job->fetch != NULL) {
            mb_fetch_cancel(job->fetch);
        } else if (job->phase == JOB_SUPERVISED) {
            job->phase = JOB_OVER;
            mb_supervisor_close(job->supervisor, mb_jobs_drop, job);
        }
    }
    mb_jobs_finish_close(jobs);
}
