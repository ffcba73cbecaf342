/*
 *  1. Starting a driver is remote code execution: without the cluster's token only callers of this
 *     machine get further.
 *  2. Start: the runner knows whether it is the same start again, one that was given up, or an
 * older one (job_adopt.c). What it says is the answer; what becomes of the driver is reported.
 *  3. Stop: a driver that is here ends; a start that never came is given up, on disk, so that it
 *     cannot begin later.
 */
#include "agent/driver_service.h"

#include "agent/callers.h"
#include "base/log.h"
#include "gcs/runner.h"
#include "proto/mobula/agent.pb-c.h"

/* 1 if the caller may go on; else it was answered. */
static int is_admitted(const struct mb_driver_service *s, struct mb_grpc_req *req)
{
    if (s->callers_are_trusted || mb_caller_is_local(mb_grpc_req_peer(req), s->node_ip))
        return 1;
    mb_warn("jobs", "refused %s: %s", mb_grpc_req_peer(req), MB_CALLER_NEEDS_TOKEN);
    mb_grpc_reply_error(req, MB_GRPC_PERMISSION_DENIED, "%s", MB_CALLER_NEEDS_TOKEN);
    return 0;
}

static void on_start(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    const struct mb_driver_service *s = arg;
    const Mobula__V1__StartDriverRequest *q = (const void *)request;
    Mobula__V1__StartDriverReply reply = MOBULA__V1__START_DRIVER_REPLY__INIT;
    const struct mb_job_runner *runner = mb_jobs_runner(s->jobs);
    struct mb_job_spec spec = {.submission_id = q->submission_id,
                               .entrypoint = q->entrypoint,
                               .runtime_env_json = q->runtime_env_json,
                               .metadata_json = q->metadata_json,
                               .ray_address = q->ray_address,
                               .n_gpus = q->n_gpus,
                               .hides_gpus = q->hides_gpus,
                               .pipefail = q->pipefail,
                               .start_no = q->start_no};
    struct mb_err err = {0};

    if (!is_admitted(s, req))
        return;
    if (q->start_no == 0) {
        mb_grpc_reply_error(req, MB_GRPC_INVALID_ARGUMENT, "a start has a number from 1");
        return;
    }
    if (s->is_stopping) { /* asked again when the node is gone, which decides it */
        mb_grpc_reply_error(req, MB_GRPC_UNAVAILABLE, "the node is stopping");
        return;
    }
    reply.code = runner->start(runner->self, &spec, &err);
    if (reply.code != 0)
        reply.text = err.text;
    mb_info("jobs", "job=%s start %llu asked for by %s: %s", q->submission_id,
            (unsigned long long)q->start_no, mb_grpc_req_peer(req),
            reply.code == 0 ? "it begins" : err.text);
    mb_grpc_reply(req, &reply.base);
}

static void on_stop(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    const struct mb_driver_service *s = arg;
    const Mobula__V1__StopDriverRequest *q = (const void *)request;
    Mobula__V1__StopDriverReply reply = MOBULA__V1__STOP_DRIVER_REPLY__INIT;
    struct mb_err err = {0};
    int rc;

    if (!is_admitted(s, req))
        return;
    rc = mb_jobs_give_up(s->jobs, q->submission_id, q->start_no, &err);
    if (rc != 0 && rc != MB_ENOENT) {
        mb_grpc_reply_error(req, MB_GRPC_INTERNAL, "%s", err.text);
        return;
    }
    reply.known = rc == 0;
    mb_grpc_reply(req, &reply.base);
}

static const struct mb_grpc_method methods[] = {
    {"/mobula.v1.NodeAgent/StartDriver", &mobula__v1__start_driver_request__descriptor, on_start,
     NULL, 0},
    {"/mobula.v1.NodeAgent/StopDriver", &mobula__v1__stop_driver_request__descriptor, on_stop, NULL,
     0},
};

int mb_driver_service_add(struct mb_grpc_server *srv, struct mb_driver_service *s,
                          struct mb_err *err)
{
    return mb_grpc_server_add(srv, methods, sizeof(methods) / sizeof(methods[0]), s, err);
}
