/* Each id goes to the runner, which leaves alone what lives and what is no id of a job. */
#include "agent/forget_service.h"

#include "base/log.h"
#include "proto/mobula/agent.pb-c.h"

static void on_forget(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    const struct mb_job_runner *runner = arg;
    const Mobula__V1__ForgetRequest *q = (const void *)request;
    Mobula__V1__ForgetReply reply = MOBULA__V1__FORGET_REPLY__INIT;

    for (size_t i = 0; i < q->n_submission_ids; i++) {
        mb_debug("jobs", "job=%s is forgotten", q->submission_ids[i]);
        runner->forget(runner->self, q->submission_ids[i]);
    }
    mb_grpc_reply(req, &reply.base);
}

int mb_forget_service_add(struct mb_grpc_server *srv, const struct mb_job_runner *runner,
                          struct mb_err *err)
{
    static const struct mb_grpc_method methods[] = {
        {"/mobula.v1.NodeAgent/Forget", &mobula__v1__forget_request__descriptor, on_forget, NULL,
         0},
    };

    return mb_grpc_server_add(srv, methods, 1, (void *)(uintptr_t)runner, err);
}
