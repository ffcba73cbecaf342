/*
 * Jobs whose driver runs on another node than the head's: where the queue put it, or, after a
 * takeover, on the node that was the head before (proto/mobula/head.proto).
 *
 *  1. The node reports what its drivers do; the job follows. What it has for drivers is taken too.
 *  2. The answer names the drivers that are looked for there, and those that are to end: their jobs
 *     are stopping, or over, or not known, or began anew elsewhere.
 * Failure paths:
 *  3. The node does not know the driver, or is declared dead: the job is FAILED, and names the
 * node.
 *  4. What a node says of a former start of the same job (its number is another), also that it
 *     does not know it: nobody's.
 */
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/services.h"
#include "proto/mobula/head.pb-c.h"

enum { REMOTE_JOBS_MAX = 10000 };

int head_job_is_elsewhere(struct mb_head *h, const struct head_job *job)
{
    return job->node[0] != '\0' && strcmp(job->node, h->runner->node_id_hex(h->runner->self)) != 0;
}

static void fail_lost(struct mb_head *h, struct head_job *job, const char *why)
{
    char text[200];
    struct mb_job_facts facts = {.text = text};

    snprintf(text, sizeof text, "The driver was lost: node %.56s, where it %s, %s.", job->node,
             job->state == MB_JOB_PENDING ? "was being started" : "ran", why);
    head_job_apply(h, job, MB_JOB_LOST, &facts);
}

void head_job_lost(struct mb_head *h, struct head_job *job)
{
    struct mb_job_facts facts = {0};

    if (head_job_is_elsewhere(h, job))
        fail_lost(h, job, "is dead");
    else
        head_job_apply(h, job, MB_JOB_LOST, &facts);
}

void head_jobs_node_dead(struct mb_head *h, const uint8_t node_id[MB_NODE_ID_BYTES])
{
    char hex[2 * MB_NODE_ID_BYTES + 1];

    mb_hex(node_id, MB_NODE_ID_BYTES, hex);
    if (h->n_jobs == 0 || strcmp(hex, h->runner->node_id_hex(h->runner->self)) == 0)
        return;
    for (size_t i = 0; i < h->n_jobs; i++)
        if (!mb_job_is_terminal(h->jobs[i]->state) && strcmp(h->jobs[i]->node, hex) == 0)
            fail_lost(h, h->jobs[i], "is dead");
}

/* The job that a node speaks of, if its driver is looked for there. */
static struct head_job *job_there(struct mb_head *h, const char *id, uint64_t start_no,
                                  const char *node_hex)
{
    struct head_job *job = head_job_find(h, id);

    if (!job || strcmp(job->node, node_hex) != 0)
        return NULL;
    return start_no == 0 || job->start_no == 0 || start_no == job->start_no ? job : NULL;
}

void head_drivers_take(struct mb_head *h, const Mobula__V1__ReportDriversRequest *m,
                       const char *node_hex)
{
    for (size_t i = 0; i < m->n_events; i++) {
        const Mobula__V1__DriverEvent *in = m->events[i];
        struct mb_job_event e = {.submission_id = in->submission_id,
                                 .kind = (enum mb_job_event_kind)in->kind,
                                 .start_no = in->start_no,
                                 .pid = in->pid,
                                 .exit_code = in->exit_code,
                                 .text = in->text,
                                 .log_tail = in->log_tail};
        if (in->kind >= MB_JOB_EVENT_RUNNING && in->kind <= MB_JOB_EVENT_ENDING &&
            job_there(h, in->submission_id, in->start_no, node_hex))
            head_jobs_event(h, &e);
    }
    for (size_t i = 0; i < m->n_unknown; i++) {
        uint64_t start_no = m->n_unknown_no == m->n_unknown ? m->unknown_no[i] : 0;
        struct head_job *job = job_there(h, m->unknown[i], start_no, node_hex);
        if (job && job->state != MB_JOB_PENDING && !mb_job_is_terminal(job->state))
            fail_lost(h, job, "does not know it");
    }
}

/* Drivers that run there and are to end. */
static size_t list_stops(struct mb_head *h, const Mobula__V1__ReportDriversRequest *m,
                         const char *node_hex, char **out)
{
    size_t n = 0;

    for (size_t i = 0; i < m->n_running; i++) {
        const Mobula__V1__RunningDriver *r = m->running[i];
        const struct head_job *job = job_there(h, r->submission_id, r->start_no, node_hex);
        if (!job || job->state == MB_JOB_STOPPING || mb_job_is_terminal(job->state))
            out[n++] = r->submission_id;
    }
    return n;
}

static size_t list_wanted(struct mb_head *h, const char *node_hex, char **out, uint64_t *numbers,
                          size_t max)
{
    size_t n = 0;

    for (size_t i = 0; i < h->n_jobs && n < max; i++) {
        struct head_job *job = h->jobs[i];
        if (job->state != MB_JOB_PENDING && !mb_job_is_terminal(job->state) &&
            strcmp(job->node, node_hex) == 0) {
            numbers[n] = job->start_no;
            out[n++] = job->id;
        }
    }
    return n;
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
    head_offers_take(h, n, m);
    head_drivers_take(h, m, hex);
    head_admission_pump(h);
    size_t max = h->n_jobs < REMOTE_JOBS_MAX ? h->n_jobs : REMOTE_JOBS_MAX;
    reply.wanted = mb_arena_calloc(&a, max + 1, sizeof *reply.wanted);
    reply.wanted_no = mb_arena_calloc(&a, max + 1, sizeof *reply.wanted_no);
    reply.stop = mb_arena_calloc(&a, m->n_running + 1, sizeof *reply.stop);
    if (reply.wanted && reply.wanted_no && reply.stop) {
        reply.n_wanted = list_wanted(h, hex, reply.wanted, reply.wanted_no, max);
        reply.n_wanted_no = reply.n_wanted;
        reply.n_stop = list_stops(h, m, hex, reply.stop);
        head_reply_committed(h, req, &reply.base);
    } else {
        mb_grpc_reply_error(req, MB_GRPC_RESOURCE_EXHAUSTED, "out of memory");
    }
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
