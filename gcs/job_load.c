/*
 * What a head that begins finds of jobs: records in the store, drivers at its runner.
 *
 *  1. load: every record that is a JobInfo becomes a job of the table; one whose stop was asked for
 *     is stopping again. Those that have ended are remembered in the order of their ends.
 *  2. adopt: the runner is asked for every job that had not ended. RUNNING and EXITED are adopted,
 *     a PENDING one that it does not know stands in line again, a RUNNING one is FAILED.
 *  3. A driver here whose job the records do not have, as in a store that was set back to an older
 *     copy, is stopped: nobody could list it, read its log or stop it. Not as a guest of Ray's
 * head, whose KV may have the record that the file here lacks (guest.c).
 *  4. A driver on another node is its node's to tell (job_remote.c); a dead node's job has failed.
 * Failure paths: a record that is no JobInfo is left alone and said; memory is out: the head does
 * not begin.
 */
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/job_list.h"
#include "gcs/jobs_internal.h"

int jobs_load_one(void *arg, struct mb_blob key, struct mb_blob value)
{
    struct mb_head *h = arg;
    json_t *info = json_loadb(value.p, value.n, 0, NULL);
    const char *status = json_string_value(json_object_get(info, "status"));
    enum mb_job_state state;
    char *id =
        mb_strndup((const char *)key.p + strlen(JOBS_KEY_PREFIX), key.n - strlen(JOBS_KEY_PREFIX));
    int rc = 0;

    if (!id) {
        rc = MB_ENOMEM;
    } else if (!status || mb_job_state_parse(status, &state) != 0) {
        mb_error("jobs", "job=%s its record in the store is no JobInfo; it is left alone", id);
    } else {
        char *mark = mb_asprintf(JOBS_STOPPING_PREFIX "%s", id);
        if (mark && state == MB_JOB_RUNNING &&
            mb_tables_get(h->store, MB_TABLES_KV, mb_blob_str("mobula"), mb_blob_str(mark), NULL))
            state = MB_JOB_STOPPING;
        mb_free(mark);
        struct head_job *job = jobs_add(h, id, state, json_incref(info));
        if (job) {
            head_job_labels_load(h, job);
            head_job_start_load(h, job);
        } else {
            rc = MB_ENOMEM;
        }
    }
    mb_free(id);
    json_decref(info);
    return rc;
}

static void on_event(void *arg, const struct mb_job_event *e)
{
    head_jobs_event(arg, e);
}

/* In line again, as it was let in before. */
static void queue_again(struct mb_head *h, struct head_job *job)
{
    struct mb_err err = {0};
    struct mb_job_facts facts = {.text = err.text};

    head_job_start_forget(h, job); /* this node knows that it did not begin */
    if (head_admission_add(h, job, 1, &err) == 0)
        jobs_into_line(h, job);
    else
        head_job_apply(h, job, MB_JOB_START_FAILED, &facts);
}

/* Its node reports what became of it, or is asked again to begin it. */
static void adopt_elsewhere(struct mb_head *h, struct head_job *job)
{
    const struct head_node *n = head_node_find_hex(h, job->node);

    if (!n || !head_node_alive(n)) {
        head_job_lost(h, job);
        return;
    }
    mb_info("jobs", "job=%s adopted, its driver is on node %.8s%s", job->id, job->node,
            job->state == MB_JOB_PENDING ? ", or is about to start there" : "");
    head_admission_adopt(h, job, job->node);
    job->asking = job->state == MB_JOB_PENDING;
}

static void adopt(struct mb_head *h, struct head_job *job)
{
    static const char *const words[] = {[MB_JOB_ADOPT_RUNNING] = "runs",
                                        [MB_JOB_ADOPT_EXITED] = "has ended",
                                        [MB_JOB_ADOPT_UNKNOWN] = "is not known"};
    enum mb_job_adopt found = h->runner->adopt(h->runner->self, job->id);

    if (found == MB_JOB_ADOPT_UNKNOWN && head_job_is_elsewhere(h, job)) {
        adopt_elsewhere(h, job);
        return;
    }
    mb_info("jobs", "job=%s adopted, its driver %s", job->id, words[found]);
    if (found == MB_JOB_ADOPT_RUNNING)
        head_admission_adopt(h, job, MB_JOB_HEAD_NODE);
    switch (mb_job_recover(job->state, found)) {
    case MB_JOB_RECOVER_STOP:
        jobs_stop_driver(h, job);
        break;
    case MB_JOB_RECOVER_START:
        queue_again(h, job);
        break;
    case MB_JOB_RECOVER_LOST:
        head_job_lost(h, job);
        break;
    case MB_JOB_RECOVER_WAIT:
        break;
    }
}

/* A record that cannot be read is left alone, and its driver, too. */
static int is_wanted(void *arg, const char *submission_id)
{
    struct mb_head *h = arg;
    const struct head_job *job = head_job_find(h, submission_id);

    if (job)
        return !mb_job_is_terminal(job->state);
    char *key = mb_asprintf(JOBS_KEY_PREFIX "%s", submission_id);
    int has_record =
        !key || mb_tables_get(h->store, MB_TABLES_KV, mb_blob_str("job"), mb_blob_str(key), NULL);
    mb_free(key);
    return has_record;
}

void head_jobs_adopt(struct mb_head *h)
{
    h->runner->set_listener(h->runner->self, on_event, h);
    if (!h->guest) /* before a job is over because its driver was not found */
        h->runner->stop_unwanted(h->runner->self, is_wanted, h);
    for (size_t i = 0; i < h->n_jobs; i++)
        if (!mb_job_is_terminal(h->jobs[i]->state))
            adopt(h, h->jobs[i]);
        else
            jobs_stop_is_over(h, h->jobs[i]->id);
    head_admission_pump(h);
}

/* As they were submitted: a head gives no start_time twice (job_submit.c). Records of one that did
 * are in the order of their pages, the same after each start. */
static int by_start(const void *a, const void *b)
{
    struct head_job *const *x = a, *const *y = b;
    json_int_t tx = json_integer_value(json_object_get((*x)->info, "start_time"));
    json_int_t ty = json_integer_value(json_object_get((*y)->info, "start_time"));

    return mb_job_list_compare(tx, (*x)->id, ty, (*y)->id);
}

static int by_end(const void *a, const void *b)
{
    struct head_job *const *x = a, *const *y = b;
    json_int_t tx = json_integer_value(json_object_get((*x)->info, "end_time"));
    json_int_t ty = json_integer_value(json_object_get((*y)->info, "end_time"));

    return mb_job_list_compare(tx, (*x)->id, ty, (*y)->id);
}

static int index_ended(struct mb_head *h)
{
    struct head_job **ended = mb_calloc(h->n_jobs + 1, sizeof *ended);
    size_t n = 0;

    if (!ended)
        return MB_ENOMEM;
    for (size_t i = 0; i < h->n_jobs; i++)
        if (mb_job_is_terminal(h->jobs[i]->state))
            ended[n++] = h->jobs[i];
    qsort(ended, n, sizeof *ended, by_end);
    for (size_t i = 0; i < n; i++)
        mb_job_index_ended(&h->job_index, &ended[i]->entry);
    mb_free(ended);
    return 0;
}

int head_jobs_take_record(struct mb_head *h, struct mb_blob key, struct mb_blob value,
                          struct mb_err *err)
{
    size_t n = h->n_jobs;
    int rc = mb_tables_put(h->store, MB_TABLES_KV, mb_blob_str("job"), key, value, NULL, NULL, err);

    if (rc == 0 && jobs_load_one(h, key, value) != 0)
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    if (rc != 0 || h->n_jobs == n)
        return rc;
    struct head_job *job = h->jobs[n];
    if (mb_job_is_terminal(job->state))
        mb_job_index_ended(&h->job_index, &job->entry);
    else
        adopt(h, job);
    qsort(h->jobs, h->n_jobs, sizeof *h->jobs, by_start);
    return 0;
}

int head_jobs_load(struct mb_head *h, struct mb_err *err)
{
    int rc = mb_tables_each(h->store, MB_TABLES_KV, mb_blob_str("job"),
                            mb_blob_str(JOBS_KEY_PREFIX), jobs_load_one, h);

    if (h->n_jobs > 1)
        qsort(h->jobs, h->n_jobs, sizeof *h->jobs, by_start);
    if (rc == 0)
        rc = index_ended(h);
    return rc == 0 ? 0 : mb_err_set(err, rc, "the store's jobs cannot be read: out of memory");
}
