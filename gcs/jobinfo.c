/*
 * JobInfoGcsService: the table of drivers. A driver that is finished, or whose node is dead, takes
 * its placement groups with it (Ray's rule). ActorInfoGcsService knows no actor.
 */
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/guest.h"

static const char *const next_key = "next_job_id";

static void get_next_job_id(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    Ray__Rpc__GetNextJobIDReply reply = RAY__RPC__GET_NEXT_JOB_IDREPLY__INIT;
    Ray__Rpc__GcsStatus ok = RAY__RPC__GCS_STATUS__INIT;
    struct mb_blob value;
    struct mb_err err = {0};
    char text[16];
    int next = 1;

    (void)request;
    if (!head_admits(h, req))
        return;
    if (mb_tables_get(h->store, MB_TABLES_META, mb_blob_str(""), mb_blob_str(next_key), &value))
        next = atoi(value.p); /* the store's values end with a NUL */
    snprintf(text, sizeof text, "%d", next + 1);
    if (mb_tables_put(h->store, MB_TABLES_META, mb_blob_str(""), mb_blob_str(next_key),
                      mb_blob_str(text), NULL, NULL, &err) != 0) {
        head_reply_err(req, &err);
        return;
    }
    reply.status = &ok;
    reply.job_id = next;
    head_reply_committed(h, req, &reply.base);
}

static int submission_is_over(struct mb_head *h, const Ray__Rpc__JobTableData *job);

static void add_job(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Ray__Rpc__AddJobRequest *m = (const Ray__Rpc__AddJobRequest *)request;
    Ray__Rpc__AddJobReply reply = RAY__RPC__ADD_JOB_REPLY__INIT;
    Ray__Rpc__GcsStatus ok = RAY__RPC__GCS_STATUS__INIT;
    struct mb_err err = {0};

    if (!head_admits(h, req))
        return;
    if (!m->data || m->data->job_id.len != MB_JOB_ID_BYTES) {
        mb_grpc_reply_error(req, MB_GRPC_INVALID_ARGUMENT, "a job id has %d bytes",
                            MB_JOB_ID_BYTES);
        return;
    }
    Ray__Rpc__JobTableData job = *m->data; /* shallow: only numbers are changed */
    job.start_time = mb_unix_ms();
    job.timestamp = (int64_t)job.start_time;
    if (head_put_message(h, MB_TABLES_JOBS, head_blob(job.job_id.data, MB_JOB_ID_BYTES), &job.base,
                         &err) != 0) {
        head_reply_err(req, &err);
        return;
    }
    if (submission_is_over(h, &job)) /* a driver that outlives its submission for a moment */
        head_jobinfo_settle(h);
    reply.status = &ok;
    head_reply_committed(h, req, &reply.base);
}

static Ray__Rpc__JobTableData *load_job(struct mb_head *h, ProtobufCBinaryData id)
{
    struct mb_blob value;

    if (id.len != MB_JOB_ID_BYTES || !mb_tables_get(h->store, MB_TABLES_JOBS, mb_blob_str(""),
                                                    head_blob(id.data, id.len), &value))
        return NULL;
    return ray__rpc__job_table_data__unpack(NULL, value.n, value.p);
}

int head_jobinfo_known(struct mb_head *h, ProtobufCBinaryData id)
{
    return id.len == MB_JOB_ID_BYTES && mb_tables_get(h->store, MB_TABLES_JOBS, mb_blob_str(""),
                                                      head_blob(id.data, id.len), NULL);
}

int head_jobinfo_alive(struct mb_head *h, ProtobufCBinaryData id)
{
    Ray__Rpc__JobTableData *job = id.len == MB_JOB_ID_BYTES ? load_job(h, id) : NULL;
    int alive = job && !job->is_dead;

    if (job)
        ray__rpc__job_table_data__free_unpacked(job, NULL);
    return alive;
}

struct oldest {
    uint8_t id[MB_JOB_ID_BYTES];
    uint64_t end_ms; /* 0: none found */
};

static void find_oldest(void *arg, const Ray__Rpc__JobTableData *job)
{
    struct oldest *o = arg;

    if (!job->is_dead || job->job_id.len != MB_JOB_ID_BYTES || job->end_time == 0 ||
        (o->end_ms != 0 && job->end_time >= o->end_ms))
        return;
    o->end_ms = job->end_time;
    memcpy(o->id, job->job_id.data, MB_JOB_ID_BYTES);
}

/* The driver that ended first leaves the table when it is full. */
static void forget_oldest(struct mb_head *h)
{
    struct oldest o = {.end_ms = 0};
    struct mb_err err = {0};

    if (mb_tables_count(h->store, MB_TABLES_JOBS) <= HEAD_DRIVERS_MAX)
        return;
    head_jobinfo_each(h, find_oldest, &o);
    if (o.end_ms != 0 && mb_tables_del(h->store, MB_TABLES_JOBS, mb_blob_str(""),
                                       head_blob(o.id, sizeof o.id), NULL, NULL, &err) != 0)
        mb_warn("gcs", "an old driver stays in the table: %s", err.text);
}

static int finish(struct mb_head *h, Ray__Rpc__JobTableData *job, struct mb_err *err)
{
    if (job->is_dead)
        return 0;
    job->is_dead = 1;
    job->end_time = mb_unix_ms();
    job->timestamp = (int64_t)job->end_time;
    int rc = head_put_message(h, MB_TABLES_JOBS, head_blob(job->job_id.data, job->job_id.len),
                              &job->base, err);
    if (rc == 0) {
        head_placement_job_finished(h, job->job_id);
        forget_oldest(h);
    }
    return rc;
}

static void mark_finished(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Ray__Rpc__MarkJobFinishedRequest *m = (const Ray__Rpc__MarkJobFinishedRequest *)request;
    Ray__Rpc__MarkJobFinishedReply reply = RAY__RPC__MARK_JOB_FINISHED_REPLY__INIT;
    Ray__Rpc__GcsStatus ok = RAY__RPC__GCS_STATUS__INIT;
    struct mb_err err = {0};

    if (!head_admits(h, req))
        return;
    Ray__Rpc__JobTableData *job = load_job(h, m->job_id);
    int rc = job ? finish(h, job, &err) : 0; /* an unknown job is finished, says Ray */
    if (job)
        ray__rpc__job_table_data__free_unpacked(job, NULL);
    reply.status = &ok;
    if (rc == 0)
        head_reply_committed(h, req, &reply.base);
    else
        head_reply_err(req, &err);
}

/* ---- walking the table ---- */

struct walk {
    head_job_visit visit;
    void *arg;
};

static int walk_one(void *arg, struct mb_blob key, struct mb_blob value)
{
    struct walk *w = arg;
    Ray__Rpc__JobTableData *job = ray__rpc__job_table_data__unpack(NULL, value.n, value.p);

    (void)key;
    if (!job)
        return MB_ENOMEM;
    w->visit(w->arg, job);
    ray__rpc__job_table_data__free_unpacked(job, NULL);
    return 0;
}

void head_jobinfo_each(struct mb_head *h, head_job_visit visit, void *arg)
{
    struct walk w = {visit, arg};

    if (mb_tables_each(h->store, MB_TABLES_JOBS, mb_blob_str(""), mb_blob_str(""), walk_one, &w) !=
        0)
        mb_error("gcs", "the job table cannot be read to its end");
}

const char *head_jobinfo_submission(const Ray__Rpc__JobTableData *job)
{
    for (size_t i = 0; job->config && i < job->config->n_metadata; i++)
        if (strcmp(job->config->metadata[i]->key, "job_submission_id") == 0)
            return job->config->metadata[i]->value;
    return "";
}

/* Which live drivers end: by submission id or by node. The store must not be written while it is
 * walked, so their ids are collected first. */
struct doomed {
    struct mb_head *h; /* set: those whose submission is over */
    const char *submission_id;
    const uint8_t *node_id;
    struct mb_arena a;
    const uint8_t **ids;
    size_t n, cap;
};

static int submission_is_over(struct mb_head *h, const Ray__Rpc__JobTableData *job)
{
    const struct head_job *submitted = head_job_find(h, head_jobinfo_submission(job));

    return submitted && mb_job_is_terminal(submitted->state);
}

static void find_doomed(void *arg, const Ray__Rpc__JobTableData *job)
{
    struct doomed *d = arg;
    const Ray__Rpc__Address *at = job->driver_address;

    if (job->is_dead || job->job_id.len != MB_JOB_ID_BYTES)
        return;
    if (d->h && !submission_is_over(d->h, job))
        return;
    if (d->submission_id && strcmp(head_jobinfo_submission(job), d->submission_id) != 0)
        return;
    if (d->node_id && !(at && at->node_id.len == MB_NODE_ID_BYTES &&
                        memcmp(at->node_id.data, d->node_id, MB_NODE_ID_BYTES) == 0))
        return;
    if (d->n == d->cap) {
        const uint8_t **bigger = mb_arena_calloc(&d->a, d->cap * 2 + 16, sizeof *bigger);
        if (!bigger)
            return;
        if (d->n > 0)
            memcpy(bigger, d->ids, d->n * sizeof *bigger);
        d->ids = bigger;
        d->cap = d->cap * 2 + 16;
    }
    const uint8_t *copy = mb_arena_dup(&d->a, job->job_id.data, MB_JOB_ID_BYTES);
    if (copy)
        d->ids[d->n++] = copy;
}

static void finish_doomed(struct mb_head *h, struct doomed *d)
{
    head_jobinfo_each(h, find_doomed, d);
    for (size_t i = 0; i < d->n; i++) {
        struct mb_err err = {0};
        Ray__Rpc__JobTableData *job = load_job(h, mb_wire_bytes(d->ids[i], MB_JOB_ID_BYTES));
        if (job && finish(h, job, &err) != 0)
            mb_error("gcs", "end of a driver not stored: %s", err.text);
        if (job)
            ray__rpc__job_table_data__free_unpacked(job, NULL);
    }
    mb_arena_close(&d->a);
}

void head_jobinfo_finish_submission(struct mb_head *h, const char *submission_id)
{
    struct doomed d = {.submission_id = submission_id};

    finish_doomed(h, &d);
    if (h->guest)
        head_guest_settle(h->guest);
}

void head_jobinfo_settle(struct mb_head *h)
{
    struct doomed d = {.h = h};

    finish_doomed(h, &d);
}

/* 1: the dead node was one of several that can be head, and another of them lives. */
static int has_other_head(struct mb_head *h, const uint8_t node_id[MB_NODE_ID_BYTES])
{
    const struct head_node *dead = head_node_find_id(h, node_id);

    if (!h->redis || !dead || !dead->info->is_head_node)
        return 0;
    for (size_t i = 0; i < h->n_nodes; i++)
        if (h->nodes[i] != dead && h->nodes[i]->info->is_head_node && head_node_alive(h->nodes[i]))
            return 1;
    return 0;
}

/* A driver outside is bound to the node of the head that it found, not to its own machine: it
 * outlives that node when another head takes over. A submission's driver ends with its job. */
void head_jobinfo_node_dead(struct mb_head *h, const uint8_t node_id[MB_NODE_ID_BYTES])
{
    struct doomed d = {.node_id = node_id};

    if (!has_other_head(h, node_id))
        finish_doomed(h, &d);
}

struct listing {
    struct mb_arena a;
    Ray__Rpc__JobTableData **rows; /* owned copies */
    size_t n, cap;
    const char *wanted; /* job or submission id, or NULL */
    int failed;
};

static void list_one(void *arg, const Ray__Rpc__JobTableData *job)
{
    struct listing *l = arg;
    char hex[2 * MB_JOB_ID_BYTES + 1] = "";

    if (job->job_id.len == MB_JOB_ID_BYTES)
        mb_hex(job->job_id.data, MB_JOB_ID_BYTES, hex);
    if (l->wanted && strcmp(l->wanted, hex) != 0 &&
        strcmp(l->wanted, head_jobinfo_submission(job)) != 0)
        return;
    if (l->n == l->cap) {
        Ray__Rpc__JobTableData **bigger = mb_arena_calloc(&l->a, l->cap * 2 + 16, sizeof *bigger);
        if (!bigger) {
            l->failed = 1;
            return;
        }
        if (l->n > 0)
            memcpy(bigger, l->rows, l->n * sizeof *bigger);
        l->rows = bigger;
        l->cap = l->cap * 2 + 16;
    }
    l->rows[l->n] = (Ray__Rpc__JobTableData *)mb_wire_copy(&job->base);
    if (l->rows[l->n])
        l->n++;
    else
        l->failed = 1;
}

static void get_all_job_info(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Ray__Rpc__GetAllJobInfoRequest *m = (const Ray__Rpc__GetAllJobInfoRequest *)request;
    Ray__Rpc__GetAllJobInfoReply reply = RAY__RPC__GET_ALL_JOB_INFO_REPLY__INIT;
    Ray__Rpc__GcsStatus ok = RAY__RPC__GCS_STATUS__INIT;
    struct listing l = {0};

    if (!head_admits(h, req))
        return;
    if (m->_job_or_submission_id_case !=
        RAY__RPC__GET_ALL_JOB_INFO_REQUEST___JOB_OR_SUBMISSION_ID__NOT_SET)
        l.wanted = m->job_or_submission_id;
    head_jobinfo_each(h, list_one, &l);
    reply.status = &ok;
    reply.n_job_info_list = l.n;
    if (m->_limit_case != RAY__RPC__GET_ALL_JOB_INFO_REQUEST___LIMIT__NOT_SET && m->limit >= 0 &&
        (size_t)m->limit < l.n)
        reply.n_job_info_list = (size_t)m->limit;
    reply.job_info_list = l.rows;
    if (l.failed)
        mb_grpc_reply_error(req, MB_GRPC_RESOURCE_EXHAUSTED, "out of memory");
    else
        mb_grpc_reply(req, &reply.base);
    for (size_t i = 0; i < l.n; i++)
        ray__rpc__job_table_data__free_unpacked(l.rows[i], NULL);
    mb_arena_close(&l.a);
}

static void get_named_actor(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    const Ray__Rpc__GetNamedActorInfoRequest *m =
        (const Ray__Rpc__GetNamedActorInfoRequest *)request;
    Ray__Rpc__GetNamedActorInfoReply reply = RAY__RPC__GET_NAMED_ACTOR_INFO_REPLY__INIT;
    Ray__Rpc__GcsStatus status = RAY__RPC__GCS_STATUS__INIT;
    char text[256];

    if (!head_admits(arg, req))
        return;
    snprintf(text, sizeof text, "Actor with name '%.150s' was not found.", m->name);
    status.code = HEAD_STATUS_NOT_FOUND;
    status.message = text;
    reply.status = &status;
    mb_grpc_reply(req, &reply.base);
}

int head_jobinfo_methods(struct mb_head *h, struct mb_err *err)
{
#define SERVICE "/ray.rpc.JobInfoGcsService/"
    static const struct mb_grpc_method methods[] = {
        {SERVICE "GetNextJobID", &ray__rpc__get_next_job_idrequest__descriptor, get_next_job_id,
         NULL, 0},
        {SERVICE "AddJob", &ray__rpc__add_job_request__descriptor, add_job, NULL, 0},
        {SERVICE "MarkJobFinished", &ray__rpc__mark_job_finished_request__descriptor, mark_finished,
         NULL, 0},
        {SERVICE "GetAllJobInfo", &ray__rpc__get_all_job_info_request__descriptor, get_all_job_info,
         NULL, 0},
        {"/ray.rpc.ActorInfoGcsService/GetNamedActorInfo",
         &ray__rpc__get_named_actor_info_request__descriptor, get_named_actor, NULL, 0},
    };
#undef SERVICE
    return mb_grpc_server_add(h->server, methods, sizeof methods / sizeof methods[0], h, err);
}
