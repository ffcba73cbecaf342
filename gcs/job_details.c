/* A submission as its clients see it: Ray's JobDetails out of the job's record and its driver's. */
#include <stdlib.h>
#include <string.h>
#include "base/str.h"
#include "gcs/services.h"

const char *head_job_runtime_env(const struct head_job *job)
{
    const char *text = json_string_value(json_object_get(job->info, "runtime_env_json"));

    return text ? text : "{}";
}

const char *head_job_metadata(const struct head_job *job, const char *key)
{
    const char *text =
        json_string_value(json_object_get(json_object_get(job->info, "metadata"), key));

    return text ? text : "";
}

static void index_driver(void *arg, const Ray__Rpc__JobTableData *job)
{
    json_t *index = arg;
    const char *submission = head_jobinfo_submission(job);
    char hex[2 * MB_JOB_ID_BYTES + 1], pid[24];

    json_t *known = json_object_get(index, submission);
    if (*submission == '\0' || job->job_id.len != MB_JOB_ID_BYTES ||
        (known && json_integer_value(json_array_get(known, 0)) > (json_int_t)job->start_time))
        return;
    mb_hex(job->job_id.data, MB_JOB_ID_BYTES, hex);
    snprintf(pid, sizeof pid, "%lld", (long long)job->driver_pid);
    json_object_set_new(index, submission,
                        json_pack("[I, {s:s, s:s, s:s}]", (json_int_t)job->start_time, "id", hex,
                                  "node_ip_address", job->driver_ip_address, "pid", pid));
}

json_t *head_job_drivers(struct mb_head *h)
{
    json_t *index = json_object();

    if (index)
        head_jobinfo_each(h, index_driver, index);
    return index;
}

static json_t *runtime_env_of(const struct head_job *job, int redact)
{
    const char *text = json_string_value(json_object_get(job->info, "runtime_env_json"));
    json_t *env = text ? json_loads(text, 0, NULL) : json_null(); /* as it was submitted */
    json_t *vars = redact ? json_object_get(env, "env_vars") : NULL;
    const char *key;
    json_t *value;
    void *tmp;

    json_object_foreach_safe(vars, tmp, key, value)
        json_object_set_new(vars, key, json_string("<redacted>"));
    return env ? env : json_object();
}

json_t *head_job_details(struct head_job *job, const json_t *drivers, int redact)
{
    static const char *const copied[] = {
        "status",         "entrypoint",       "message",  "error_type",
        "start_time",     "end_time",         "metadata", "driver_agent_http_address",
        "driver_node_id", "driver_exit_code", NULL};
    json_t *driver = json_array_get(json_object_get(drivers, job->id), 1);
    json_t *out =
        json_pack("{s:s, s:s?, s:s, s:O?, s:o}", "type", "SUBMISSION", "job_id",
                  json_string_value(json_object_get(driver, "id")), "submission_id", job->id,
                  "driver_info", driver, "runtime_env", runtime_env_of(job, redact));

    for (size_t i = 0; out && copied[i]; i++) {
        json_t *v = json_object_get(job->info, copied[i]);
        if (json_object_set_new(out, copied[i], v ? json_incref(v) : json_null()) != 0) {
            json_decref(out);
            return NULL;
        }
    }
    if (out && job->state == MB_JOB_PENDING) {
        struct mb_buf message = {0};
        if (head_admission_message(job, &message) == 0)
            json_object_set_new(out, "message", json_string(mb_buf_str(&message)));
        mb_buf_close(&message);
    }
    return out;
}
