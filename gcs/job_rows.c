/*
 * Jobs as answers show them. A list of all is made over several turns of the loop: of ten thousand
 * rows nobody else is to wait for more than a few.
 *
 *  1. The ids are noted; what is deleted before its turn is left out, what comes later is not
 * there.
 *  2. A turn of the loop makes rows for SLICE_MS, of the list that was asked for first.
 *  3. Its callback. The head stops before: the callback with NULL.
 */
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/str.h"
#include "gcs/services.h"

enum { SLICE_MS = 5 };

struct head_rows {
    struct head_rows *next;
    struct mb_head *h;
    int redact, with_drivers;
    char **ids;
    size_t n, at;
    json_t *list, *index;
    head_rows_cb cb;
    void *arg;
};

/* ---- one ---- */

static json_t *driver_details(const Ray__Rpc__JobTableData *job)
{
    char hex[2 * MB_JOB_ID_BYTES + 1], pid[24];

    mb_hex(job->job_id.data, MB_JOB_ID_BYTES, hex);
    snprintf(pid, sizeof pid, "%lld", (long long)job->driver_pid);
    return json_pack(
        "{s:s, s:s, s:n, s:{s:s, s:s, s:s}, s:s, s:s, s:s, s:n, s:I, s:o, s:{}, "
        "s:{}, s:n, s:n, s:n}",
        "type", "DRIVER", "job_id", hex, "submission_id", "driver_info", "id", hex,
        "node_ip_address", job->driver_ip_address, "pid", pid, "status",
        job->is_dead ? "SUCCEEDED" : "RUNNING", "entrypoint", job->entrypoint, "message", "",
        "error_type", "start_time", (json_int_t)job->start_time, "end_time",
        job->end_time ? json_integer((json_int_t)job->end_time) : json_null(), "metadata",
        "runtime_env", "driver_agent_http_address", "driver_node_id", "driver_exit_code");
}

struct drivers {
    json_t *list;
    const char *wanted; /* hex id or NULL */
};

/* Drivers of submissions are shown inside those. */
static void add_driver(void *arg, const Ray__Rpc__JobTableData *job)
{
    struct drivers *d = arg;
    char hex[2 * MB_JOB_ID_BYTES + 1];

    if (job->job_id.len != MB_JOB_ID_BYTES ||
        (job->config && mb_starts_with(job->config->ray_namespace, "_ray_internal_")))
        return;
    mb_hex(job->job_id.data, MB_JOB_ID_BYTES, hex);
    if (d->wanted ? strcmp(hex, d->wanted) == 0 : *head_jobinfo_submission(job) == '\0')
        json_array_append_new(d->list, driver_details(job));
}

json_t *head_job_row(struct mb_head *h, struct head_job *job, const json_t *index, int redact)
{
    json_t *details = head_job_details(job, index, redact);

    head_placement_tell(h, details);
    head_gang_tell(h, details);
    return details;
}

json_t *head_job_driver_row(struct mb_head *h, const char *id)
{
    struct drivers d = {.list = json_array(), .wanted = id};
    json_t *found;

    head_jobinfo_each(h, add_driver, &d);
    found = json_incref(json_array_get(d.list, 0));
    json_decref(d.list);
    return found;
}

/* ---- many ---- */

static void free_rows(struct head_rows *r)
{
    for (size_t i = 0; i < r->n; i++)
        mb_free(r->ids[i]);
    mb_free(r->ids);
    json_decref(r->index);
    json_decref(r->list);
    mb_free(r);
}

static void finish(struct head_rows *r)
{
    struct drivers d = {.list = r->list};

    if (r->with_drivers)
        head_jobinfo_each(r->h, add_driver, &d);
    r->list = NULL;
    r->cb(r->arg, d.list);
    free_rows(r);
}

static void on_turn(uv_idle_t *idle)
{
    struct mb_head *h = idle->data;
    struct head_rows *r = h->rows;
    uint64_t end_ms = mb_mono_ms() + SLICE_MS;

    while (r->at < r->n && mb_mono_ms() < end_ms) {
        struct head_job *job = head_job_find(h, r->ids[r->at++]);

        if (job)
            json_array_append_new(r->list, head_job_row(h, job, r->index, r->redact));
    }
    if (r->at < r->n)
        return;
    h->rows = r->next;
    if (!h->rows)
        uv_idle_stop(idle);
    finish(r);
}

static int note_ids(struct head_rows *r, struct head_job *const *jobs, size_t n)
{
    r->ids = mb_calloc(n + 1, sizeof *r->ids);
    r->list = json_array();
    r->index = head_job_drivers(r->h);
    if (!r->ids || !r->list || !r->index)
        return MB_ENOMEM;
    for (; r->n < n; r->n++)
        if (!(r->ids[r->n] = mb_strdup(jobs[r->n]->id)))
            return MB_ENOMEM;
    return 0;
}

void head_job_rows(struct mb_head *h, struct head_job *const *jobs, size_t n, int redact,
                   head_rows_cb cb, void *arg)
{
    struct head_rows *r = h->stopping ? NULL : mb_calloc(1, sizeof *r), **at = &h->rows;

    if (r) {
        *r = (struct head_rows){
            .h = h, .redact = redact, .with_drivers = !jobs, .cb = cb, .arg = arg};
        if (note_ids(r, jobs ? jobs : h->jobs, jobs ? n : h->n_jobs) != 0) {
            free_rows(r);
            r = NULL;
        }
    }
    if (!r) {
        cb(arg, NULL);
        return;
    }
    while (*at)
        at = &(*at)->next;
    *at = r;
    uv_idle_start(&h->rows_turn, on_turn);
}

void head_job_rows_close(struct mb_head *h)
{
    while (h->rows) {
        struct head_rows *r = h->rows;

        h->rows = r->next;
        r->cb(r->arg, NULL);
        free_rows(r);
    }
}
