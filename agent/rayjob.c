/*
 * What a RayJob says to one of its pods.
 *
 * Happy path: it is the one of the first look and its cluster is ours: startTime and
 * activeDeadlineSeconds are the deadline, less the margin, endTime and the TTL the time to delete
 * it.
 *
 *  1. Another uid: the job was deleted and made again under its name. Another cluster: it is tried
 *     again (backoffLimit). Our pods go, and nothing of the RayJob is ours any more.
 *  2. Deleted or suspended: the pods get SIGTERM within seconds, so the save begins now.
 */
#include "agent/rayjob.h"

#include <jansson.h>
#include <string.h>
#include "agent/deadline.h"
#include "base/moment.h"

static int read_text(const json_t *o, const char *name, char *out, struct mb_err *err)
{
    const json_t *v = json_object_get(o, name);

    if (v == NULL || json_is_null(v))
        return MB_OK;
    if (!json_is_string(v) || json_string_length(v) >= MB_RAYJOB_NAME_MAX)
        return mb_err_set(err, MB_EPROTO, "%s is no short text", name);
    strcpy(out, json_string_value(v));
    return MB_OK;
}

static int read_time(const json_t *o, const char *name, uint64_t *out, struct mb_err *err)
{
    const json_t *v = json_object_get(o, name);

    if (v == NULL || json_is_null(v))
        return MB_OK;
    if (!json_is_string(v))
        return mb_err_set(err, MB_EPROTO, "%s is no time", name);
    return mb_moment_parse(json_string_value(v), 0, name, out, err) == MB_OK ? MB_OK : MB_EPROTO;
}

static int read_seconds(const json_t *o, const char *name, uint64_t *out_ms, struct mb_err *err)
{
    const json_t *v = json_object_get(o, name);

    if (v == NULL || json_is_null(v))
        return MB_OK;
    if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > INT32_MAX)
        return mb_err_set(err, MB_EPROTO, "%s is no number of seconds", name);
    *out_ms = (uint64_t)json_integer_value(v) * 1000;
    return MB_OK;
}

/* endTime is also set by a job that will be tried again: only these two are ends. */
static int has_ended(const char *state)
{
    return strcmp(state, "Complete") == 0 || strcmp(state, "Failed") == 0;
}

int mb_rayjob_read(const char *text, size_t n, struct mb_rayjob *out, struct mb_err *err)
{
    json_t *o = json_loadb(text, n, 0, NULL);
    const json_t *metadata = json_object_get(o, "metadata"), *spec = json_object_get(o, "spec"),
                 *status = json_object_get(o, "status");
    char state[MB_RAYJOB_NAME_MAX] = "";
    struct mb_rayjob job = {0};
    int rc = json_is_object(metadata) && json_is_object(spec)
                 ? MB_OK
                 : mb_err_set(err, MB_EPROTO, "a RayJob without metadata and spec");

    if (rc == MB_OK)
        rc = read_text(metadata, "uid", job.uid, err);
    if (rc == MB_OK && job.uid[0] == '\0')
        rc = mb_err_set(err, MB_EPROTO, "a RayJob without a uid");
    if (rc == MB_OK)
        rc = read_seconds(spec, "activeDeadlineSeconds", &job.active_deadline_ms, err);
    if (rc == MB_OK)
        rc = read_text(status, "rayClusterName", job.cluster, err);
    if (rc == MB_OK)
        rc = read_text(status, "jobDeploymentStatus", state, err);
    if (rc == MB_OK)
        rc = read_time(status, "startTime", &job.start_unix_ms, err);
    if (rc == MB_OK && has_ended(state))
        rc = read_time(status, "endTime", &job.end_unix_ms, err);
    job.is_suspended = json_is_true(json_object_get(spec, "suspend"));
    job.is_deleted = json_is_string(json_object_get(metadata, "deletionTimestamp"));
    if (rc == MB_OK)
        *out = job;
    json_decref(o);
    return rc;
}

void mb_rayjob_judge(const struct mb_rayjob *job, const struct mb_rayjob_self *self,
                     struct mb_rayjob_verdict *out)
{
    *out = (struct mb_rayjob_verdict){.is_ours = 1};
    if (self->uid[0] != '\0' && strcmp(self->uid, job->uid) != 0)
        *out = (struct mb_rayjob_verdict){.leaves = "the RayJob was deleted"};
    else if (self->cluster != NULL && job->cluster[0] != '\0' &&
             strcmp(self->cluster, job->cluster) != 0)
        *out = (struct mb_rayjob_verdict){.leaves = "the RayJob runs on another RayCluster"};
    else if (job->is_deleted)
        out->leaves = "the RayJob is deleted";
    else if (job->is_suspended)
        out->leaves = "the RayJob is suspended";
    if (!out->is_ours)
        return;
    if (job->active_deadline_ms == 0)
        out->deadline_unix_ms = MB_DEADLINE_NEVER;
    else if (job->start_unix_ms != 0)
        out->deadline_unix_ms =
            mb_deadline_of_job(job->start_unix_ms, job->active_deadline_ms, self->margin_ms);
    if (self->delete_after_ms >= 0 && job->end_unix_ms != 0 && !job->is_deleted)
        out->delete_at_unix_ms = job->end_unix_ms + (uint64_t)self->delete_after_ms;
}
