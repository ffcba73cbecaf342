/*
 * The Jobs REST API. Error texts and statuses are Ray's, because its clients and KubeRay branch on
 * them: a duplicate id is 500 with a traceback-like text, an unknown job 404, and so on.
 */
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"
#include "gcs/guest.h"
#include "gcs/job_list.h"
#include "gcs/job_request.h"
#include "gcs/services.h"

enum { READ_PATIENCE_MS = 1500 };

/* An answer that waits for the commit of what the request wrote or read. */
struct answer {
    struct mb_http_req *req; /* NULL once it is answered */
    json_t *body;
    uv_timer_t patience; /* of a read */
    int has_patience;
};

static void free_answer(struct answer *a)
{
    json_decref(a->body);
    mb_free(a);
}

static void on_patience_closed(uv_handle_t *handle)
{
    free_answer(handle->data);
}

static void on_committed(void *arg, const struct mb_err *err)
{
    struct answer *a = arg;

    if (a->req && err->code == 0)
        mb_http_reply_json(a->req, 200, json_incref(a->body));
    else if (a->req)
        mb_http_reply_text(a->req, 500, "%s", err->text);
    a->req = NULL;
    if (a->has_patience)
        uv_close((uv_handle_t *)&a->patience, on_patience_closed);
    else
        free_answer(a);
}

/* A read that waits changes nothing when it is given up, and may be asked again. */
static void on_patience_over(uv_timer_t *timer)
{
    struct answer *a = timer->data;

    if (a->req)
        mb_http_reply_text(a->req, 503,
                           "the head's lease is in doubt: its store does not answer; ask again");
    a->req = NULL;
}

static void reply_when_committed(struct mb_head *h, struct mb_http_req *req, json_t *body,
                                 int is_read)
{
    struct answer *a = mb_calloc(1, sizeof *a);
    struct mb_err err = {0};

    mb_err_set(&err, MB_ENOMEM, "out of memory");
    if (a && body) {
        a->req = req;
        a->body = body;
        if (mb_tables_barrier(h->store, on_committed, a, &err) == 0) {
            a->has_patience = is_read && uv_timer_init(h->loop, &a->patience) == 0;
            a->patience.data = a;
            if (a->has_patience)
                uv_timer_start(&a->patience, on_patience_over, READ_PATIENCE_MS, 0);
            return;
        }
    }
    mb_free(a);
    json_decref(body);
    mb_http_reply_text(req, 500, "%s", err.text);
}

/* Takes body. */
static void reply_committed(struct mb_head *h, struct mb_http_req *req, json_t *body)
{
    reply_when_committed(h, req, body, 0);
}

void head_jobs_reply_read(struct mb_head *h, struct mb_http_req *req, json_t *body)
{
    reply_when_committed(h, req, body, 1);
}

static int is_running(struct mb_head *h, struct mb_http_req *req)
{
    if (h->stopping)
        mb_http_reply_text(req, 503, "the head is stopping");
    return !h->stopping;
}

/* The submission of the path, or NULL after the answer was given. `verb` completes Ray's sentence
 * for a driver, which is a job but cannot be told anything. */
static struct head_job *find_job(struct mb_head *h, struct mb_http_req *req, const char *verb)
{
    const char *id = mb_http_req_param(req, "id");
    uint8_t raw[MB_JOB_ID_BYTES];

    if (!is_running(h, req))
        return NULL;
    struct head_job *job = head_job_find(h, id);
    if (job)
        return job;
    if (strlen(id) == 2 * sizeof raw && mb_unhex(id, raw, sizeof raw) == 0 &&
        head_jobinfo_known(h, mb_wire_bytes(raw, sizeof raw)))
        mb_http_reply_text(req, 400, "Can only %s submission type jobs", verb);
    else
        mb_http_reply_text(req, 404, "Job %s does not exist", id);
    return NULL;
}

/* is_plain: 400 at once, not wrapped into Ray's 500 of a head that heard it of its agent. */
static void refuse_value(struct mb_http_req *req, const struct mb_err *err, int is_plain)
{
    if (is_plain)
        mb_http_reply_text(req, 400, "Traceback (most recent call last):\nValueError: %s",
                           err->text);
    else
        mb_http_reply_text(req, 500,
                           "Traceback (most recent call last):\nRuntimeError: Request failed with "
                           "status code 400: Traceback (most recent call last):\nValueError: %s\n.",
                           err->text);
}

/* is_agent: asked for as Ray's head asks a node's agent, which says itself what its head wraps. */
static void submit_to(struct mb_head *h, struct mb_http_req *req, int is_agent)
{
    size_t n;
    const char *body = mb_http_req_body(req, &n);
    struct head_job *job;
    struct mb_err err = {0};
    json_t *request;

    if (!is_running(h, req))
        return;
    int rc = mb_job_request_parse(body, n, &request, &err);
    if (rc == MB_EPROTO)
        mb_http_reply_text(req, 500, "500 Internal Server Error\n\nServer got itself in trouble");
    else if (rc != 0) /* the client's fault: sent again it is the same */
        refuse_value(req, &err, 1);
    else if (mb_job_request_check(request, &err) != 0)
        mb_http_reply_text(req, 400, "Traceback (most recent call last):\nTypeError: %s", err.text);
    else if (head_job_submit(h, request, &job, &err) == 0)
        reply_committed(h, req,
                        json_pack("{s:s, s:s}", "job_id", job->id, "submission_id", job->id));
    else if (err.code == MB_EEXIST || err.code == MB_EINVAL) /* Ray's ValueErrors */
        refuse_value(req, &err, is_agent);
    else
        mb_http_reply_text(req, err.code == MB_EFULL ? 503 : 500, "%s", err.text);
    json_decref(request);
}

static void submit(void *arg, struct mb_http_req *req)
{
    submit_to(arg, req, 0);
}

/* ---- reading ---- */

struct asked {
    struct mb_head *h;
    struct mb_http_req *req;
};

static void on_rows(void *arg, json_t *rows)
{
    struct asked a = *(struct asked *)arg;

    mb_free(arg);
    if (rows || is_running(a.h, a.req))
        head_jobs_reply_read(a.h, a.req, rows);
}

/* jobs NULL: all, and drivers. */
static void reply_rows(struct mb_head *h, struct mb_http_req *req, struct head_job *const *jobs,
                       size_t n)
{
    struct asked *a = mb_calloc(1, sizeof *a);

    if (!a) {
        head_jobs_reply_read(h, req, NULL);
        return;
    }
    *a = (struct asked){h, req};
    head_job_rows(h, jobs, n, mb_http_req_is_browser(req), on_rows, a);
}

static json_int_t start_of(const struct head_job *job)
{
    return json_integer_value(json_object_get(job->info, "start_time"));
}

static int by_page(const void *a, const void *b)
{
    struct head_job *const *x = a, *const *y = b;

    return mb_job_list_compare(start_of(*x), (*x)->id, start_of(*y), (*y)->id);
}

/* Ours beyond Ray's API: submissions only, and the next page's token in a header, since the answer
 * is an array. */
static void list_page(struct mb_head *h, struct mb_http_req *req, const struct mb_job_list_query *q)
{
    struct head_job **found = mb_calloc(h->n_jobs + 1, sizeof *found);
    size_t n = 0, shown;

    if (!found) {
        head_jobs_reply_read(h, req, NULL);
        return;
    }
    for (size_t i = 0; i < h->n_jobs; i++)
        if (mb_job_list_has(q, h->jobs[i]->state, start_of(h->jobs[i]), h->jobs[i]->id))
            found[n++] = h->jobs[i];
    if (n > 1)
        qsort(found, n, sizeof *found, by_page);
    shown = q->limit > 0 && q->limit < n ? q->limit : n;
    if (shown < n) {
        char *token = mb_job_list_token(start_of(found[shown - 1]), found[shown - 1]->id);
        if (token)
            mb_http_reply_header(req, "X-Mobula-Next-Page", token);
        mb_free(token);
    }
    reply_rows(h, req, found, shown);
    mb_free(found);
}

static void list(void *arg, struct mb_http_req *req)
{
    struct mb_head *h = arg;
    const char *status = mb_http_req_query(req, "status");
    const char *limit = mb_http_req_query(req, "limit");
    const char *token = mb_http_req_query(req, "page_token");
    struct mb_job_list_query q;
    struct mb_err err = {0};

    if (!is_running(h, req))
        return;
    if (!status && !limit && !token)
        reply_rows(h, req, NULL, 0);
    else if (mb_job_list_parse(status, limit, token, &q, &err) != 0)
        mb_http_reply_text(req, 400, "%s", err.text);
    else
        list_page(h, req, &q);
}

static void get(void *arg, struct mb_http_req *req)
{
    struct mb_head *h = arg;
    const char *id = mb_http_req_param(req, "id");

    if (!is_running(h, req))
        return;
    struct head_job *job = head_job_find(h, id);
    if (job) {
        json_t *index = head_job_drivers(h);

        head_jobs_reply_read(h, req, head_job_row(h, job, index, mb_http_req_is_browser(req)));
        json_decref(index);
        return;
    }
    json_t *found = head_job_driver_row(h, id);
    if (found)
        head_jobs_reply_read(h, req, found);
    else
        mb_http_reply_text(req, 404, "Job %s does not exist", id);
}

/* ---- verbs ---- */

static void stop(void *arg, struct mb_http_req *req)
{
    struct mb_head *h = arg;
    struct head_job *job = find_job(h, req, "stop");
    struct mb_err err = {0};
    int stopped;

    if (!job)
        return;
    if (head_job_stop(h, job, &stopped, &err) == 0)
        reply_committed(h, req, json_pack("{s:b}", "stopped", stopped));
    else
        mb_http_reply_text(req, 500, "%s", err.text);
}

static void delete (void *arg, struct mb_http_req *req)
{
    struct mb_head *h = arg;
    struct head_job *job = find_job(h, req, "delete");
    struct mb_err err = {0};

    if (!job)
        return;
    if (head_job_delete(h, job, &err) == 0)
        reply_committed(h, req, json_pack("{s:b}", "deleted", 1));
    else if (err.code == MB_ESTATE)
        mb_http_reply_text(req, 500, "Traceback (most recent call last):\nRuntimeError: %s",
                           err.text);
    else
        mb_http_reply_text(req, err.code == MB_EFULL ? 503 : 500, "%s", err.text);
}

static void logs(void *arg, struct mb_http_req *req)
{
    struct head_job *job = find_job(arg, req, "get logs of");

    if (job)
        head_logs_reply(arg, req, job);
}

static void tail(void *arg, struct mb_http_req *req)
{
    struct head_job *job = find_job(arg, req, "get logs of");

    if (job)
        head_logs_follow(arg, req, job);
}

int head_jobs_routes(struct mb_head *h, struct mb_err *err)
{
    static const struct mb_http_route routes[] = {
        {"POST", "/api/jobs/", submit, 0},
        {"GET", "/api/jobs/", list, 0},
        {"GET", "/api/jobs/{id}", get, 0},
        {"DELETE", "/api/jobs/{id}", delete, 0},
        {"POST", "/api/jobs/{id}/stop", stop, 0},
        {"GET", "/api/jobs/{id}/logs", logs, 0},
        {"GET", "/api/jobs/{id}/logs/tail", tail, MB_HTTP_WEBSOCKET},
    };

    return mb_http_server_add(h->http, routes, sizeof routes / sizeof routes[0], h, err);
}

/* ---- Ray's internal mirror of it, on the port of the node's agent ---- */

/* The id that a submission asks for, or NULL; owned by the caller. */
static char *id_of_body(const char *body, size_t n)
{
    json_t *request = json_loadb(body ? body : "", n, 0, NULL);
    const char *id = json_string_value(json_object_get(request, "submission_id"));

    if (!id)
        id = json_string_value(json_object_get(request, "job_id"));
    char *copy = mb_strdup(id);
    json_decref(request);
    return copy;
}

/* That port is open while this head stands by, too. */
static int is_open(struct mb_head *h, struct mb_http_req *req)
{
    const char *closed = head_closed(h);

    if (closed)
        mb_http_reply_text(req, 503, "%s", closed);
    return closed == NULL;
}

struct submission {
    struct mb_head *h;
    struct mb_http_req *req;
};

static void on_id_known(void *arg, const struct mb_err *err, int is_taken)
{
    struct submission *s = arg;
    size_t n;
    const char *body = mb_http_req_body(s->req, &n);
    char *id = is_taken ? id_of_body(body, n) : NULL;

    if (err->code != 0)
        mb_http_reply_text(s->req, 503, "%s", err->text);
    else if (id && !head_job_find(s->h, id)) /* else ours, which submit_to() answers */
        mb_http_reply_text(s->req, 400,
                           "Traceback (most recent call last):\nValueError: Job with submission_id "
                           "%s already exists. Please use a different submission_id.",
                           id);
    else
        submit_to(s->h, s->req, 1);
    mb_free(id);
    mb_free(s);
}

/* Another agent of Ray's cluster may have a job of this id. */
static void submit_to_guest(struct mb_head *h, struct mb_http_req *req)
{
    struct submission *s = mb_calloc(1, sizeof *s);
    struct mb_err err = {0};
    size_t n;
    const char *body = mb_http_req_body(req, &n);
    char *id = id_of_body(body, n);

    mb_err_set(&err, MB_ENOMEM, "out of memory");
    if (s)
        *s = (struct submission){h, req};
    if (s && !id)
        submit_to(h, req, 1);
    else if (s && head_guest_ask_id(h->guest, id, on_id_known, s, &err) == 0)
        s = NULL;
    else
        mb_http_reply_text(req, 503, "%s", err.text);
    mb_free(s);
    mb_free(id);
}

static void agent_submit(void *arg, struct mb_http_req *req)
{
    struct mb_head *h = arg;

    if (!is_open(h, req))
        return;
    if (h->guest)
        submit_to_guest(h, req);
    else
        submit_to(h, req, 1);
}

static void agent_stop(void *arg, struct mb_http_req *req)
{
    if (is_open(arg, req))
        stop(arg, req);
}

static void agent_delete(void *arg, struct mb_http_req *req)
{
    if (is_open(arg, req))
        delete (arg, req);
}

static void agent_logs(void *arg, struct mb_http_req *req)
{
    if (is_open(arg, req))
        logs(arg, req);
}

static void agent_tail(void *arg, struct mb_http_req *req)
{
    if (is_open(arg, req))
        tail(arg, req);
}

int mb_head_serve_job_agent(struct mb_head *h, struct mb_http_server *server, struct mb_err *err)
{
    static const struct mb_http_route routes[] = {
        {"POST", "/api/job_agent/jobs/", agent_submit, 0},
        {"DELETE", "/api/job_agent/jobs/{id}", agent_delete, 0},
        {"POST", "/api/job_agent/jobs/{id}/stop", agent_stop, 0},
        {"GET", "/api/job_agent/jobs/{id}/logs", agent_logs, 0},
        {"GET", "/api/job_agent/jobs/{id}/logs/tail", agent_tail, MB_HTTP_WEBSOCKET},
    };

    return mb_http_server_add(server, routes, sizeof routes / sizeof routes[0], h, err);
}
