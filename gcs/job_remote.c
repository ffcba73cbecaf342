/*
 * Jobs whose driver runs on another node than the head's: after a takeover, on the node that was
 * the head before (proto/mobula/head.proto).
 *
 *  1. Adoption finds no driver here, but the job's record names another node that is alive: the job
 *     stays as it is until that node reports.
 *  2. The node reports what its drivers do; the job follows. Stop requests go back in the answer.
 * Failure paths:
 *  3. The node does not know the driver, or is declared dead: the job is FAILED, and names the
 * node.
 */
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/services.h"
#include "proto/mobula/head.pb-c.h"

enum { REMOTE_JOBS_MAX = 10000 };

static const char *driver_node(const struct head_job *job)
{
    const char *hex = json_string_value(json_object_get(job->info, "driver_node_id"));

    return hex ? hex : "";
}

int head_job_is_remote(struct mb_head *h, const struct head_job *job)
{
    const char *hex = driver_node(job);
    uint8_t id[MB_NODE_ID_BYTES];

    if (!h->redis || job->state == MB_JOB_PENDING || mb_job_is_terminal(job->state) ||
        strlen(hex) != 2 * MB_NODE_ID_BYTES || mb_unhex(hex, id, sizeof id) != 0 ||
        strcmp(hex, h->runner->node_id_hex(h->runner->self)) == 0)
        return 0;
    struct head_node *n = head_node_find_id(h, id);
    return n && head_node_alive(n);
}

static void fail_lost(struct mb_head *h, struct head_job *job, const char *why)
{
    char text[200];
    struct mb_job_facts facts = {.text = text};

    snprintf(text, sizeof text, "The driver was lost: node %.56s, where it ran, %s.",
             driver_node(job), why);
    head_job_apply(h, job, MB_JOB_LOST, &facts);
}

void head_job_lost(struct mb_head *h, struct head_job *job)
{
    struct mb_job_facts facts = {0};
    uint8_t id[MB_NODE_ID_BYTES];
    const char *hex = driver_node(job);
    struct head_node *n = NULL;

    if (strlen(hex) == 2 * MB_NODE_ID_BYTES && mb_unhex(hex, id, sizeof id) == 0 &&
        strcmp(hex, h->runner->node_id_hex(h->runner->self)) != 0)
        n = head_node_find_id(h, id);
    if (h->redis && n && !head_node_alive(n))
        fail_lost(h, job, "is dead");
    else
        head_job_apply(h, job, MB_JOB_LOST, &facts);
}

void head_jobs_node_dead(struct mb_head *h, const uint8_t node_id[MB_NODE_ID_BYTES])
{
    char hex[2 * MB_NODE_ID_BYTES + 1];

    mb_hex(node_id, MB_NODE_ID_BYTES, hex);
    if (!h->redis || strcmp(hex, h->runner->node_id_hex(h->runner->self)) == 0)
        return;
    for (size_t i = 0; i < h->n_jobs; i++)
        if (!mb_job_is_terminal(h->jobs[i]->state) && strcmp(driver_node(h->jobs[i]), hex) == 0)
            fail_lost(h, h->jobs[i], "is dead");
}

static void take_report(struct mb_head *h, const Mobula__V1__ReportDriversRequest *m,
                        const char *node_hex)
{
    for (size_t i = 0; i < m->n_events; i++) {
        const Mobula__V1__DriverEvent *in = m->events[i];
        struct mb_job_event e = {.submission_id = in->submission_id,
                                 .kind = (enum mb_job_event_kind)in->kind,
                                 .pid = in->pid,
                                 .exit_code = in->exit_code,
                                 .text = in->text,
                                 .log_tail = in->log_tail};
        struct head_job *job = head_job_find(h, in->submission_id);
        if (job && in->kind >= MB_JOB_EVENT_RUNNING && in->kind <= MB_JOB_EVENT_ENDING &&
            strcmp(driver_node(job), node_hex) == 0)
            head_jobs_event(h, &e);
    }
    for (size_t i = 0; i < m->n_unknown; i++) {
        struct head_job *job = head_job_find(h, m->unknown[i]);
        if (job && head_job_is_remote(h, job) && strcmp(driver_node(job), node_hex) == 0)
            fail_lost(h, job, "does not know it");
    }
}

static void report_drivers(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Mobula__V1__ReportDriversRequest *m = (const Mobula__V1__ReportDriversRequest *)request;
    Mobula__V1__ReportDriversReply reply = MOBULA__V1__REPORT_DRIVERS_REPLY__INIT;
    char hex[2 * MB_NODE_ID_BYTES + 1];
    struct mb_arena a = {0};

    if (!head_admits(h, req))
        return;
    struct head_node *n = head_node_find(h, m->node_id);
    if (!n || !head_node_alive(n)) {
        mb_grpc_reply_error(req, MB_GRPC_NOT_FOUND, "no node of this id is alive");
        return;
    }
    mb_hex(n->id, MB_NODE_ID_BYTES, hex);
    take_report(h, m, hex);
    size_t max = h->n_jobs < REMOTE_JOBS_MAX ? h->n_jobs : REMOTE_JOBS_MAX;
    reply.wanted = mb_arena_calloc(&a, max + 1, sizeof *reply.wanted);
    reply.stop = mb_arena_calloc(&a, max + 1, sizeof *reply.stop);
    for (size_t i = 0; reply.wanted && reply.stop && i < h->n_jobs; i++) {
        struct head_job *job = h->jobs[i];
        if (reply.n_wanted == max || !head_job_is_remote(h, job) ||
            strcmp(driver_node(job), hex) != 0)
            continue;
        reply.wanted[reply.n_wanted++] = job->id;
        if (job->state == MB_JOB_STOPPING)
            reply.stop[reply.n_stop++] = job->id;
    }
    if (reply.wanted && reply.stop)
        head_reply_committed(h, req, &reply.base);
    else
        mb_grpc_reply_error(req, MB_GRPC_RESOURCE_EXHAUSTED, "out of memory");
    mb_arena_close(&a);
}

int head_drivers_methods(struct mb_head *h, struct mb_err *err)
{
    static const struct mb_grpc_method methods[] = {
        {"/mobula.v1.Head/ReportDrivers", &mobula__v1__report_drivers_request__descriptor,
         report_drivers, NULL, 0},
    };

    return mb_grpc_server_add(h->server, methods, 1, h, err);
}
