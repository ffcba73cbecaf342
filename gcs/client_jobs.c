/* The GCS's job table (drivers, not submissions) and named actors. */
#include <string.h>
#include "base/clock.h"
#include "gcs/client_internal.h"

static void complete_next_id(struct mb_gcs_op *op, const struct mb_err *err,
                             const ProtobufCMessage *reply)
{
    const Ray__Rpc__GetNextJobIDReply *m = (const Ray__Rpc__GetNextJobIDReply *)reply;
    uint8_t id[MB_JOB_ID_BYTES] = {0};
    uint32_t number = m ? (uint32_t)m->job_id : 0;

    for (int i = 0; i < MB_JOB_ID_BYTES; i++)
        id[i] = (uint8_t)(number >> (8 * i));
    ((mb_gcs_job_id_cb)op->cb)(op->cb_arg, err, id);
}

int mb_gcs_next_job_id(struct mb_gcs *c, uint64_t timeout_ms, mb_gcs_job_id_cb cb, void *arg,
                       struct mb_gcs_op **op, struct mb_err *err)
{
    static const struct gcs_method method = {"/ray.rpc.JobInfoGcsService/GetNextJobID",
                                             &ray__rpc__get_next_job_idreply__descriptor,
                                             complete_next_id};
    Ray__Rpc__GetNextJobIDRequest req = RAY__RPC__GET_NEXT_JOB_IDREQUEST__INIT;

    return gcs_repeatable(c, &method, &req.base, timeout_ms, (gcs_any_cb)cb, arg, op, err);
}

int mb_gcs_add_job(struct mb_gcs *c, const struct mb_gcs_job *job, uint64_t timeout_ms,
                   mb_gcs_done_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err)
{
    static const struct gcs_method method = {"/ray.rpc.JobInfoGcsService/AddJob",
                                             &ray__rpc__add_job_reply__descriptor,
                                             gcs_complete_done};
    struct mb_arena a = {0};
    Ray__Rpc__AddJobRequest req = RAY__RPC__ADD_JOB_REQUEST__INIT;
    uint8_t worker_id[MB_NODE_ID_BYTES];

    mb_random_bytes(worker_id, sizeof worker_id);
    req.data = mb_wire_job(&a, job, worker_id);
    int rc = gcs_repeatable(c, &method, req.data ? &req.base : NULL, timeout_ms, (gcs_any_cb)cb,
                            arg, op, err);
    mb_arena_close(&a);
    return rc;
}

int mb_gcs_finish_job(struct mb_gcs *c, const uint8_t job_id[MB_JOB_ID_BYTES], uint64_t timeout_ms,
                      mb_gcs_done_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err)
{
    static const struct gcs_method method = {"/ray.rpc.JobInfoGcsService/MarkJobFinished",
                                             &ray__rpc__mark_job_finished_reply__descriptor,
                                             gcs_complete_done};
    Ray__Rpc__MarkJobFinishedRequest req = RAY__RPC__MARK_JOB_FINISHED_REQUEST__INIT;

    req.job_id = mb_wire_bytes(job_id, MB_JOB_ID_BYTES);
    return gcs_repeatable(c, &method, &req.base, timeout_ms, (gcs_any_cb)cb, arg, op, err);
}

static void complete_jobs(struct mb_gcs_op *op, const struct mb_err *err,
                          const ProtobufCMessage *reply)
{
    mb_gcs_jobs_cb cb = (mb_gcs_jobs_cb)op->cb;
    const Ray__Rpc__GetAllJobInfoReply *m = (const Ray__Rpc__GetAllJobInfoReply *)reply;
    struct mb_arena a = {0};
    struct mb_err e = *err;
    struct mb_gcs_job *jobs = NULL;
    size_t n = m ? m->n_job_info_list : 0;

    if (m && !(jobs = mb_arena_calloc(&a, n + 1, sizeof *jobs)))
        gcs_no_memory(&e);
    for (size_t i = 0; e.code == 0 && i < n; i++)
        if (mb_wire_get_job(m->job_info_list[i], &jobs[i]) != 0)
            mb_err_set(&e, MB_EPROTO, "job %zu of the reply has no proper id", i);
    cb(op->cb_arg, &e, e.code == 0 ? jobs : NULL, e.code == 0 ? n : 0);
    mb_arena_close(&a);
}

int gcs_list_jobs(struct mb_gcs *c, gcs_complete complete, uint64_t timeout_ms, gcs_any_cb cb,
                  void *cb_arg, struct mb_gcs_op **op, struct mb_err *err)
{
    const struct gcs_method method = {"/ray.rpc.JobInfoGcsService/GetAllJobInfo",
                                      &ray__rpc__get_all_job_info_reply__descriptor, complete};
    Ray__Rpc__GetAllJobInfoRequest req = RAY__RPC__GET_ALL_JOB_INFO_REQUEST__INIT;

    req._skip_submission_job_info_field_case =
        RAY__RPC__GET_ALL_JOB_INFO_REQUEST___SKIP_SUBMISSION_JOB_INFO_FIELD_SKIP_SUBMISSION_JOB_INFO_FIELD;
    req.skip_submission_job_info_field = 1;
    req._skip_is_running_tasks_field_case =
        RAY__RPC__GET_ALL_JOB_INFO_REQUEST___SKIP_IS_RUNNING_TASKS_FIELD_SKIP_IS_RUNNING_TASKS_FIELD;
    req.skip_is_running_tasks_field = 1;
    return gcs_repeatable(c, &method, &req.base, timeout_ms, cb, cb_arg, op, err);
}

int mb_gcs_jobs(struct mb_gcs *c, uint64_t timeout_ms, mb_gcs_jobs_cb cb, void *arg,
                struct mb_gcs_op **op, struct mb_err *err)
{
    return gcs_list_jobs(c, complete_jobs, timeout_ms, (gcs_any_cb)cb, arg, op, err);
}

static void complete_actor(struct mb_gcs_op *op, const struct mb_err *err,
                           const ProtobufCMessage *reply)
{
    const Ray__Rpc__GetNamedActorInfoReply *m = (const Ray__Rpc__GetNamedActorInfoReply *)reply;
    struct mb_err e = *err;
    uint8_t id[MB_ACTOR_ID_BYTES] = {0};

    if (e.code == MB_EUNSUPPORTED)
        e.code = MB_ENOENT; /* a head without actors has none of this name either */
    if (e.code == 0 &&
        (!m->actor_table_data || mb_wire_get_id(m->actor_table_data->actor_id, id, sizeof id) != 0))
        mb_err_set(&e, MB_ENOENT, "no actor of this name");
    ((mb_gcs_actor_cb)op->cb)(op->cb_arg, &e, id);
}

int mb_gcs_named_actor(struct mb_gcs *c, const char *name, const char *ray_namespace,
                       uint64_t timeout_ms, mb_gcs_actor_cb cb, void *arg, struct mb_gcs_op **op,
                       struct mb_err *err)
{
    static const struct gcs_method method = {"/ray.rpc.ActorInfoGcsService/GetNamedActorInfo",
                                             &ray__rpc__get_named_actor_info_reply__descriptor,
                                             complete_actor};
    Ray__Rpc__GetNamedActorInfoRequest req = RAY__RPC__GET_NAMED_ACTOR_INFO_REQUEST__INIT;

    req.name = mb_wire_str(name);
    req.ray_namespace = mb_wire_str(ray_namespace);
    return gcs_repeatable(c, &method, &req.base, timeout_ms, (gcs_any_cb)cb, arg, op, err);
}
