/*
 * A submission becomes a job.
 *
 *  1. The request has been checked (job_request.h); an id is made if it brings none.
 *  2. JobInfo is made of it, the job is in the table and in line, its record on its way to the
 *     store; after the commit it may start (jobs.c).
 * Failure paths:
 *  3. The id is taken: by the same request with the same key, which is answered with the job that
 *     is there; else MB_EEXIST in the words that Ray's clients look for.
 *  4. The line is full, memory is out, the store takes no more: there is no job.
 */
#include <stdlib.h>
#include <string.h>
#include "base/clock.h"
#include "base/log.h"
#include "gcs/job_needs.h"
#include "gcs/jobs_internal.h"

/* "raysubmit_" and 16 characters without those that look alike. */
static void new_id(char out[27])
{
    static const char alphabet[] = "ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnpqrstuvwxyz123456789";

    memcpy(out, "raysubmit_", 10);
    for (int i = 10; i < 26; i++) {
        uint8_t byte;
        do
            mb_random_bytes(&byte, 1);
        while (byte >= 256 / (sizeof alphabet - 1) * (sizeof alphabet - 1));
        out[i] = alphabet[byte % (sizeof alphabet - 1)];
    }
    out[26] = '\0';
}

static json_t *number_or_zero(const json_t *request, const char *key)
{
    json_t *v = json_object_get(request, key);

    return json_is_number(v) ? json_incref(v) : json_integer(0);
}

/*
 * start_time is all that a record tells of the order of jobs, and JobInfo must not have a field
 * that Ray does not know. So a job submitted within the millisecond of the one before is dated
 * right behind it. A clock that was set back farther than JOBS_AHEAD_MAX_MS is believed instead: no
 * date lies farther ahead than that.
 */
static json_int_t next_start(const struct mb_head *h)
{
    json_int_t now = (json_int_t)mb_unix_ms(), last;

    if (h->n_jobs == 0)
        return now;
    last = json_integer_value(json_object_get(h->jobs[h->n_jobs - 1]->info, "start_time"));
    return last < now || last - now >= JOBS_AHEAD_MAX_MS ? now : last + 1;
}

static json_t *new_info(const json_t *request, json_int_t start_unix_ms)
{
    json_t *env = json_object_get(request, "runtime_env");
    json_t *metadata = json_object_get(request, "metadata");
    json_t *resources = json_object_get(request, "entrypoint_resources");
    json_t *info = json_pack(
        "{s:s, s:O, s:s, s:n, s:I, s:n, s:o, s:o, s:o, s:o, s:o, s:n, s:n, s:n}", "status",
        "PENDING", "entrypoint", json_object_get(request, "entrypoint"), "message", "",
        "error_type", "start_time", start_unix_ms, "end_time", "metadata",
        json_is_object(metadata) ? json_deep_copy(metadata) : json_null(), "entrypoint_num_cpus",
        number_or_zero(request, "entrypoint_num_cpus"), "entrypoint_num_gpus",
        number_or_zero(request, "entrypoint_num_gpus"), "entrypoint_memory",
        number_or_zero(request, "entrypoint_memory"), "entrypoint_resources",
        json_is_object(resources) ? json_deep_copy(resources) : json_null(),
        "driver_agent_http_address", "driver_node_id", "driver_exit_code");

    if (info && json_is_object(env)) {
        char *text = json_dumps(env, JSON_COMPACT);
        if (!text || jobs_set_text(info, "runtime_env_json", text) != 0) {
            json_decref(info);
            info = NULL;
        }
        free(text);
    }
    return info;
}

/* The client that sent this job sends it again, since it saw no answer. */
static int is_repeated(const struct head_job *job, const json_t *request)
{
    static const char *const fields[] = {"entrypoint",          "metadata",
                                         "entrypoint_num_cpus", "entrypoint_num_gpus",
                                         "entrypoint_memory",   "entrypoint_resources"};
    json_t *info, *was, *is = json_object_get(request, "runtime_env");
    int same;

    if (*head_job_metadata(job, MB_JOB_KEY_KEY) == '\0' || !(info = new_info(request, 0)))
        return 0;
    was = json_loads(head_job_runtime_env(job), 0, NULL);
    same = is ? json_equal(was, is) : json_object_size(was) == 0;
    is = json_object_get(request, "entrypoint_label_selector");
    same = same && (json_object_size(is) > 0 ? json_equal(job->selector, is) : !job->selector);
    for (size_t i = 0; same && i < sizeof fields / sizeof fields[0]; i++)
        same = json_equal(json_object_get(job->info, fields[i]), json_object_get(info, fields[i]));
    json_decref(was);
    json_decref(info);
    return same;
}

int head_job_submit(struct mb_head *h, const json_t *request, struct head_job **out,
                    struct mb_err *err)
{
    const char *id = json_string_value(json_object_get(request, "submission_id"));
    struct mb_job_facts facts = {0};
    char generated[27];
    json_t *info, *selector = json_object_get(request, "entrypoint_label_selector");

    if (mb_job_selector_check(selector, err) != 0)
        return MB_EINVAL;
    if (!id)
        id = json_string_value(json_object_get(request, "job_id"));
    if (!id) {
        new_id(generated);
        id = generated;
    }
    struct head_job *job = head_job_find(h, id);
    if (job && is_repeated(job, request)) {
        mb_info("jobs", "job=%s submitted again with its key: the same job", id);
        *out = job;
        return 0;
    }
    if (job)
        return mb_err_set(err, MB_EEXIST,
                          "Job with submission_id %s already exists. Please use a different "
                          "submission_id.",
                          id);
    info = new_info(request, next_start(h));
    job = info ? jobs_add(h, id, MB_JOB_PENDING, info) : NULL;
    if (!job)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    jobs_describe(h, job, MB_JOB_STARTED, &facts);
    int rc = 0;
    if (json_object_size(selector) > 0)
        rc = head_job_labels_store(h, job, selector, err);
    if (rc == 0)
        rc = head_admission_add(h, job, 0, err);
    if (rc == 0)
        rc = jobs_write(h, job, 1, err);
    if (rc != 0) {
        head_job_labels_forget(h, job);
        jobs_drop(h, job);
        return rc;
    }
    mb_info("jobs", "job=%s submitted", id);
    *out = job;
    return 0;
}
