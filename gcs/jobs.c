/*
 * Submitted jobs: the table behind the Jobs REST API. The truth is Ray's JobInfo JSON in the KV
 * (namespace "job"), so that Ray's own readers see our jobs; states follow job_states.h.
 *
 * Happy path:
 *  1. submit (job_submit.c): the record is written as PENDING and the job stands in line
 *     (job_admission.c); after its commit, and when it is its turn, its driver is started here or
 *     elsewhere (job_start.c).
 *  2. The runner reports RUNNING, later EXITED; each change is written; after the commit followers
 *     of the log hear of it, and a terminal job's drivers and placement groups end.
 *  3. stop: a job without a driver becomes STOPPED at once; one whose driver runs, or is being
 *     started, when that driver has ended. That a stop was asked for is remembered in the store.
 * Failure paths:
 *  4. A package that is not there, or a runner that cannot start, makes the job FAILED, with a
 *     text.
 *  5. After a restart: job_load.c.
 *  6. A state that the store refuses is written again at every tick; followers and drivers hear of
 *     it only after the commit.
 *  7. Of jobs that have ended the newest max_ended_jobs are remembered, in the order of their ends;
 *     the records of others go, a few at a time but never slower than jobs end, and after the
 * commit their files. Whatever has not ended stays, and what the store does not delete is there
 * again.
 *  8. A driver that starts although its job was stopped meanwhile is stopped.
 */
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/job_needs.h"
#include "gcs/jobs_internal.h"
#include "gcs/text.h"

/* Two ticks a second: a callback stays short. As many go beside these as have ended. */
enum { FORGET_PER_TICK = 128 };

struct head_job *head_job_find(struct mb_head *h, const char *id)
{
    return mb_job_index_find(&h->job_index, id);
}

static void free_job(struct head_job *job)
{
    if (!job)
        return;
    head_admission_leave(job);
    json_decref(job->info);
    json_decref(job->selector);
    mb_free(job->wish);
    mb_free(job->id);
    mb_free(job);
}

void head_jobs_free(struct mb_head *h)
{
    for (size_t i = 0; i < h->n_jobs; i++) {
        mb_job_index_remove(&h->job_index, &h->jobs[i]->entry);
        free_job(h->jobs[i]);
    }
    mb_free(h->jobs);
    mb_job_queue_destroy(h->queue);
}

struct head_job *jobs_add(struct mb_head *h, const char *id, enum mb_job_state state, json_t *info)
{
    struct head_job **jobs = mb_reallocarray(h->jobs, h->n_jobs + 1, sizeof *jobs);
    struct head_job *job = mb_calloc(1, sizeof *job);

    if (jobs)
        h->jobs = jobs;
    if (job) {
        job->id = mb_strdup(id);
        job->entry = (struct mb_job_entry){.id = job->id, .record = job};
    }
    if (!jobs || !job || !job->id || mb_job_index_add(&h->job_index, &job->entry) != 0) {
        if (job)
            mb_free(job->id);
        mb_free(job);
        json_decref(info);
        return NULL;
    }
    job->state = state;
    job->info = info;
    h->jobs[h->n_jobs++] = job;
    return job;
}

void jobs_drop(struct mb_head *h, struct head_job *job)
{
    mb_job_index_remove(&h->job_index, &job->entry);
    for (size_t i = 0; i < h->n_jobs; i++) {
        if (h->jobs[i] != job)
            continue;
        memmove(h->jobs + i, h->jobs + i + 1, (h->n_jobs - i - 1) * sizeof *h->jobs);
        h->n_jobs--;
        break;
    }
    free_job(job);
}

/* ---- writing ---- */

struct written {
    struct mb_head *h;
    int first;  /* the PENDING record: start the driver now */
    int is_end; /* the state that was written is a terminal one */
    char id[];
};

void jobs_into_line(struct mb_head *h, struct head_job *job)
{
    struct mb_err why = {0}, err = {0};
    struct mb_job_facts facts = {.text = err.text};

    if (mb_job_needs_check(job->info, &why) == 0) {
        mb_job_queue_ready(&job->ticket);
        return;
    }
    mb_err_set(&err, why.code, "Failed to start supervisor actor %s: '%s'", job->id, why.text);
    head_job_apply(h, job, MB_JOB_START_FAILED, &facts);
}

static void remember_stopping(struct mb_head *h, const char *id, int on)
{
    struct mb_err err = {0};
    char *key = mb_asprintf(JOBS_STOPPING_PREFIX "%s", id);
    int rc = MB_ENOMEM;

    if (key && on)
        rc = mb_tables_put(h->store, MB_TABLES_KV, mb_blob_str("mobula"), mb_blob_str(key),
                           mb_blob_str("1"), NULL, NULL, &err);
    else if (key)
        rc = mb_tables_del(h->store, MB_TABLES_KV, mb_blob_str("mobula"), mb_blob_str(key), NULL,
                           NULL, &err);
    if (rc != 0)
        mb_warn("jobs", "job=%s stop request not stored: %s", id, err.text);
    mb_free(key);
}

/* The mark of a stop outlives the job's end in the store: the other way round a head that died in
 * between would not know why the driver ended, and call the job SUCCEEDED. */
void jobs_stop_is_over(struct mb_head *h, const char *id)
{
    char *key = mb_asprintf(JOBS_STOPPING_PREFIX "%s", id);

    if (key && mb_tables_get(h->store, MB_TABLES_KV, mb_blob_str("mobula"), mb_blob_str(key), NULL))
        remember_stopping(h, id, 0);
    mb_free(key);
}

static void on_written(void *arg, const struct mb_err *err)
{
    struct written *w = arg;
    struct mb_head *h = w->h;
    struct head_job *job = head_job_find(h, w->id);

    if (err->code != 0)
        mb_error("jobs", "job=%s record not stored: %s", w->id, err->text);
    if (err->code != 0 && job && !w->first)
        job->unwritten = 1;
    if (err->code != 0 && w->first && job) {
        head_job_labels_forget(h, job);
        jobs_drop(h, job); /* its submitter gets the error: it never existed */
        job = NULL;
    }
    if (job && w->first) {
        jobs_into_line(h, job);
        head_admission_pump(h);
    }
    if (err->code == 0 && w->is_end && !h->stopping && (!job || mb_job_is_terminal(job->state)))
        jobs_stop_is_over(h, w->id);
    /* The job may have ended since: only the commit of that end is news of it. */
    if (err->code == 0 && job && w->is_end && !h->stopping)
        head_jobinfo_finish_submission(h, w->id);
    if (err->code == 0 && (w->is_end || !job))
        head_logs_job_changed(h, w->id);
    mb_free(w);
}

int jobs_write(struct mb_head *h, const struct head_job *job, int first, struct mb_err *err)
{
    char *key = mb_asprintf(JOBS_KEY_PREFIX "%s", job->id);
    char *text = json_dumps(job->info, JSON_COMPACT);
    struct written *w = mb_alloc(sizeof *w + strlen(job->id) + 1);
    int rc = MB_ENOMEM;

    if (key && text && w) {
        w->h = h;
        w->first = first;
        w->is_end = mb_job_is_terminal(job->state);
        memcpy(w->id, job->id, strlen(job->id) + 1);
        rc = mb_tables_put(h->store, MB_TABLES_KV, mb_blob_str("job"), mb_blob_str(key),
                           mb_blob_str(text), on_written, w, err);
    } else {
        mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    if (rc != 0)
        mb_free(w);
    mb_free(key);
    free(text); /* jansson's allocation */
    return rc;
}

/* ---- states ---- */

int jobs_set_text(json_t *o, const char *key, const char *text)
{
    return json_object_set_new(o, key, text ? json_string(text) : json_null());
}

static int asks_resources(const struct head_job *job)
{
    json_t *resources = json_object_get(job->info, "entrypoint_resources");

    return json_number_value(json_object_get(job->info, "entrypoint_num_cpus")) > 0 ||
           json_number_value(json_object_get(job->info, "entrypoint_num_gpus")) > 0 ||
           json_number_value(json_object_get(job->info, "entrypoint_memory")) > 0 ||
           json_object_size(resources) > 0;
}

/* Where its driver runs, and who has its log. */
static int describe_node(struct mb_head *h, struct head_job *job)
{
    const struct head_node *n = head_node_find_hex(h, job->node);
    char address[300];

    if (!head_job_is_elsewhere(h, job))
        return jobs_set_text(job->info, "driver_agent_http_address",
                             h->runner->http_address(h->runner->self)) |
               jobs_set_text(job->info, "driver_node_id", h->runner->node_id_hex(h->runner->self));
    if (n && n->http_address[0])
        snprintf(address, sizeof address, "%s", n->http_address);
    else if (n)
        snprintf(address, sizeof address, "http://%.200s:%d", n->info->node_manager_address,
                 n->info->dashboard_agent_listen_port);
    return jobs_set_text(job->info, "driver_agent_http_address", n ? address : NULL) |
           jobs_set_text(job->info, "driver_node_id", job->node);
}

/* Not before its start, which may be dated a little ahead (job_submit.c). */
static json_int_t end_of(const struct head_job *job)
{
    json_int_t start = json_integer_value(json_object_get(job->info, "start_time"));
    json_int_t now = (json_int_t)mb_unix_ms();

    return now < start && start - now <= JOBS_AHEAD_MAX_MS ? start : now;
}

void jobs_describe(struct mb_head *h, struct head_job *job, enum mb_job_input input,
                   struct mb_job_facts *facts)
{
    struct mb_buf raw = {0}, message = {0};
    int rc = 0;

    facts->asks_resources = asks_resources(job);
    facts->has_runtime_env = strcmp(head_job_runtime_env(job), "{}") != 0;
    rc |= mb_job_message(job->state, input, facts, &raw);
    rc |= mb_text_clean(mb_buf_str(&raw), raw.len, &message); /* it may quote log bytes */
    rc |= jobs_set_text(job->info, "status", mb_job_state_name(job->state));
    rc |=
        json_object_set_new(job->info, "message", json_stringn(mb_buf_str(&message), message.len));
    rc |= jobs_set_text(job->info, "error_type", mb_job_error_type(job->state, input, facts->text));
    if (job->state == MB_JOB_RUNNING)
        rc |= describe_node(h, job);
    if (mb_job_is_terminal(job->state)) {
        rc |= json_object_set_new(job->info, "end_time", json_integer(end_of(job)));
        if (job->state != MB_JOB_STOPPED &&
            (input == MB_JOB_EXIT_ZERO || input == MB_JOB_EXIT_NONZERO))
            rc |=
                json_object_set_new(job->info, "driver_exit_code", json_integer(facts->exit_code));
    }
    if (rc != 0)
        mb_error("jobs", "job=%s description incomplete: out of memory", job->id);
    mb_buf_close(&raw);
    mb_buf_close(&message);
}

void head_job_apply(struct mb_head *h, struct head_job *job, enum mb_job_input input,
                    struct mb_job_facts *facts)
{
    struct mb_err err = {0};
    enum mb_job_state from = job->state, to;

    if (mb_job_next(from, input, &to, &err) != 0) {
        mb_info("jobs", "job=%s %s", job->id, err.text);
        return;
    }
    job->state = to;
    if (from == to)
        return;
    if (mb_job_is_terminal(to)) {
        mb_job_index_ended(&h->job_index, &job->entry);
        h->n_ended_lately++;
    }
    mb_info("jobs", "job=%s %s -> %s%s", job->id, mb_job_state_name(from), mb_job_state_name(to),
            to == MB_JOB_STOPPING ? " (stopping)" : "");
    if (to == MB_JOB_STOPPING) {
        remember_stopping(h, job->id, 1);
        return;
    }
    if (mb_job_is_terminal(to))
        head_admission_leave(job);
    jobs_describe(h, job, input, facts);
    if (jobs_write(h, job, 0, &err) != 0) {
        mb_error("jobs", "job=%s state not stored yet: %s", job->id, err.text);
        job->unwritten = 1;
    }
}

/* ---- forgetting ---- */

struct deleted {
    struct mb_head *h;
    char id[];
};

/* Its record is back: it can be asked for, and deleted, again. The store has said why. */
static void not_deleted(struct mb_head *h, const char *id)
{
    char *key = head_job_find(h, id) ? NULL : mb_asprintf(JOBS_KEY_PREFIX "%s", id);
    struct head_job *job = NULL;
    struct mb_blob value;

    if (key &&
        mb_tables_get(h->store, MB_TABLES_KV, mb_blob_str("job"), mb_blob_str(key), &value) &&
        jobs_load_one(h, mb_blob_str(key), value) == 0)
        job = head_job_find(h, id);
    if (job && mb_job_is_terminal(job->state))
        mb_job_index_ended(&h->job_index, &job->entry);
    mb_free(key);
}

static void on_deleted(void *arg, const struct mb_err *err)
{
    struct deleted *d = arg;

    d->h->n_deleting--;
    if (err->code == 0 && !d->h->stopping) /* else the next head finds the mark */
        head_forget_files(d->h, d->id);
    else if (err->code != 0 && !d->h->stopping)
        not_deleted(d->h, d->id);
    mb_free(d);
}

/* Drops it from the table; its files go after the commit. */
static int forget_job(struct mb_head *h, struct head_job *job, struct mb_err *err)
{
    char *key = mb_asprintf(JOBS_KEY_PREFIX "%s", job->id);
    struct deleted *d = mb_alloc(sizeof *d + strlen(job->id) + 1);
    int rc =
        key && d ? head_forget_mark(h, job->id, err) : mb_err_set(err, MB_ENOMEM, "out of memory");

    if (rc == 0) {
        d->h = h;
        memcpy(d->id, job->id, strlen(job->id) + 1);
        rc = mb_tables_del(h->store, MB_TABLES_KV, mb_blob_str("job"), mb_blob_str(key), on_deleted,
                           d, err);
        if (rc != 0)
            head_forget_unmark(h, job->id);
    }
    mb_free(key);
    if (rc != 0) {
        mb_free(d);
        return rc;
    }
    h->n_deleting++;
    head_job_labels_forget(h, job);
    head_job_start_forget(h, job);
    jobs_drop(h, job);
    return 0;
}

/* Rule 7. One whose end is not stored yet, or whose driver may still be there, waits for a later
 * tick, and the others with it. */
void jobs_forget_ended(struct mb_head *h)
{
    size_t most = FORGET_PER_TICK + h->n_ended_lately;

    for (size_t i = 0; i < most; i++) {
        struct head_job *job = mb_job_index_surplus(&h->job_index, h->max_ended_jobs);
        struct mb_err err = {0};

        if (!job)
            h->n_ended_lately = 0;
        if (!job || job->unwritten || job->ticket.place != MB_JOB_PLACE_NONE ||
            head_forget_is_full(h))
            return;
        if (forget_job(h, job, &err) != 0) {
            mb_warn("jobs", "job=%s not forgotten: %s", job->id, err.text);
            return;
        }
        h->n_ended_lately -= h->n_ended_lately > 0;
    }
}

void head_jobs_tick(struct mb_head *h)
{
    uint64_t now = mb_mono_ms();

    for (size_t i = 0; i < h->n_jobs; i++) {
        struct mb_err err = {0};
        if (h->jobs[i]->unwritten)
            h->jobs[i]->unwritten = jobs_write(h, h->jobs[i], 0, &err) != 0;
        head_job_start_tick(h, h->jobs[i], now);
    }
    jobs_forget_ended(h);
    head_admission_pump(h);
}

/* ---- the runner ---- */

void jobs_stop_driver(struct mb_head *h, struct head_job *job)
{
    int is_elsewhere = head_job_is_elsewhere(h, job);
    struct mb_err err = {0};
    struct mb_job_facts facts = {0};
    struct mb_job_news news;
    int rc = is_elsewhere ? 0 : h->runner->stop(h->runner->self, job->id, &err);

    if (rc != 0 && rc != MB_ENOENT)
        mb_error("jobs", "job=%s could not be told to stop: %s", job->id, err.text);
    mb_job_on_stop(job->state, rc != MB_ENOENT, &news);
    for (int i = 0; i < news.n_inputs; i++)
        head_job_apply(h, job, news.inputs[i], &facts);
    if (is_elsewhere)
        head_job_stop_elsewhere(h, job);
}

/* The driver has ended, the job not yet: its message says why. */
static void say_ending(struct mb_head *h, struct head_job *job, const char *why)
{
    struct mb_err err = {0};
    json_t *text = json_sprintf("Job is currently running: its driver has ended, %s.", why);

    if (job->state == MB_JOB_PENDING || mb_job_is_terminal(job->state)) {
        json_decref(text);
        return;
    }
    mb_info("jobs", "job=%s its driver has ended, %s", job->id, why);
    if (json_object_set_new(job->info, "message", text) != 0 || jobs_write(h, job, 0, &err) != 0)
        mb_warn("jobs", "job=%s what it waits for is not in its message: %s", job->id, err.text);
}

void head_jobs_event(struct mb_head *h, const struct mb_job_event *e)
{
    struct head_job *job = h->stopping ? NULL : head_job_find(h, e->submission_id);
    struct mb_job_facts facts = {
        .exit_code = e->exit_code, .log_tail = e->log_tail, .text = e->text};
    struct mb_job_news news;

    if (!job)
        return;
    if (e->kind == MB_JOB_EVENT_ENDING) {
        say_ending(h, job, e->text);
        return;
    }
    if (e->kind != MB_JOB_EVENT_RUNNING)
        head_admission_leave(job);
    job->asking = 0;
    mb_job_queue_confirm(&job->ticket);
    mb_job_on_event(job->state, e, &news);
    if (news.stop_driver && !head_job_is_elsewhere(h, job)) { /* else its node's report is told */
        struct mb_err err = {0};
        mb_info("jobs", "job=%s started after it had ended: stopping its driver", job->id);
        if (h->runner->stop(h->runner->self, job->id, &err) != 0)
            mb_warn("jobs", "job=%s %s", job->id, err.text);
    }
    for (int i = 0; i < news.n_inputs; i++)
        head_job_apply(h, job, news.inputs[i], &facts);
    head_admission_pump(h);
}

/* ---- the verbs ---- */

int head_job_stop(struct mb_head *h, struct head_job *job, int *stopped, struct mb_err *err)
{
    (void)err;
    *stopped = !mb_job_is_terminal(job->state);
    if (*stopped)
        jobs_stop_driver(h, job);
    return 0;
}

int head_job_delete(struct mb_head *h, struct head_job *job, struct mb_err *err)
{
    if (!mb_job_is_terminal(job->state))
        return mb_err_set(err, MB_ESTATE,
                          "Attempted to delete job '%s', but it is in a non-terminal state %s.",
                          job->id, mb_job_state_name(job->state));
    if (head_forget_is_full(h))
        return mb_err_set(err, MB_EFULL, "Too many jobs are being deleted: try again in a second.");
    return forget_job(h, job, err);
}
