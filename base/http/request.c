/*
 * The request as a handler sees it.
 *
 * 1. create: when the request line is read, with the target as it came over the wire.
 * 2. load: method and headers are copied, since a handler may look at them after the connection
 *    died; the target is parsed.
 * 3. detach: the connection is done. A handler that still owes the answer keeps the request alive.
 * Failures: memory or a malformed target; the server then answers 500 or 400.
 */
#include <string.h>
#include <strings.h>
#include "base/alloc.h"
#include "base/http/guard.h"
#include "base/http/internal.h"

struct mb_http_req *mb_http_req_create(struct mb_http_server *srv, const char *uri)
{
    struct mb_http_req *req = mb_calloc(1, sizeof *req);
    if (!req)
        return NULL;
    req->uri = mb_strdup(uri);
    if (!req->uri) {
        mb_free(req);
        return NULL;
    }
    req->srv = srv;
    req->next = srv->reqs;
    if (srv->reqs)
        srv->reqs->prev = req;
    srv->reqs = req;
    return req;
}

struct header_sizes {
    size_t n;
    size_t bytes;
};

static enum MHD_Result count_header(void *arg, enum MHD_ValueKind kind, const char *name,
                                    const char *value)
{
    struct header_sizes *sizes = arg;
    (void)kind;
    sizes->n++;
    sizes->bytes += strlen(name) + 1 + (value ? strlen(value) : 0) + 1;
    return MHD_YES;
}

struct header_copy {
    struct mb_http_req *req;
    char *text;
};

static char *put_text(char **memory, const char *s)
{
    char *start = *memory;
    size_t n = s ? strlen(s) : 0;
    if (n > 0)
        memcpy(start, s, n);
    start[n] = '\0';
    *memory += n + 1;
    return start;
}

static enum MHD_Result copy_header(void *arg, enum MHD_ValueKind kind, const char *name,
                                   const char *value)
{
    struct header_copy *copy = arg;
    struct mb_http_pair *pair = &copy->req->headers[copy->req->n_headers++];
    (void)kind;
    pair->name = put_text(&copy->text, name);
    pair->value = put_text(&copy->text, value);
    return MHD_YES;
}

int mb_http_req_load(struct mb_http_req *req, struct MHD_Connection *conn, const char *method)
{
    struct header_sizes sizes = {0};
    struct header_copy copy = {.req = req};
    req->conn = conn;
    req->method = mb_strdup(method);
    MHD_get_connection_values(conn, MHD_HEADER_KIND, count_header, &sizes);
    req->headers = mb_alloc(sizes.n * sizeof *req->headers + sizes.bytes);
    if (!req->method || !req->headers)
        return MB_ENOMEM;
    copy.text = (char *)(req->headers + sizes.n);
    MHD_get_connection_values(conn, MHD_HEADER_KIND, copy_header, &copy);
    return mb_http_target_parse(req->uri, &req->target);
}

static void req_free(struct mb_http_req *req)
{
    if (req->response)
        MHD_destroy_response(req->response);
    for (size_t i = 0; i < req->n_reply_headers; i++) {
        mb_free((char *)req->reply_headers[i].name);
        mb_free((char *)req->reply_headers[i].value);
    }
    mb_free(req->reply_headers);
    mb_buf_close(&req->body);
    mb_http_target_close(&req->target);
    mb_free(req->headers);
    mb_free(req->method);
    mb_free(req->uri);
    mb_free(req);
}

void mb_http_req_free_if_done(struct mb_http_req *req)
{
    if (!req->srv && !req->owed && !req->pinned)
        req_free(req);
}

void mb_http_req_detach(struct mb_http_req *req)
{
    struct mb_http_server *srv = req->srv;
    if (req->prev)
        req->prev->next = req->next;
    else
        srv->reqs = req->next;
    if (req->next)
        req->next->prev = req->prev;
    req->srv = NULL;
    req->conn = NULL;
    req->suspended = 0;
    req->pinned = 1; /* the callbacks below may answer */
    if (req->pull) {
        req->pull = NULL;
        if (req->pull_free)
            req->pull_free(req->pull_arg);
    }
    if (req->ws) {
        mb_ws_connection_gone(req->ws);
        req->ws = NULL;
    }
    if (req->body_cb && !req->body_ended && req->owed) {
        req->body_ended = 1;
        req->body_cb(req->body_arg, req, NULL, 0, MB_EUNAVAIL);
    }
    req->pinned = 0;
    mb_http_req_free_if_done(req);
}

const char *mb_http_req_header_fn(const void *req, const char *name)
{
    const struct mb_http_req *r = req;
    for (size_t i = 0; i < r->n_headers; i++) {
        if (strcasecmp(r->headers[i].name, name) == 0)
            return r->headers[i].value;
    }
    return NULL;
}

/* ---- what handlers call ---- */

const char *mb_http_req_method(const struct mb_http_req *req)
{
    return req->method;
}

const char *mb_http_req_path(const struct mb_http_req *req)
{
    return req->target.path;
}

const char *mb_http_req_param(const struct mb_http_req *req, const char *name)
{
    return mb_http_target_param(&req->target, name);
}

const char *mb_http_req_query(const struct mb_http_req *req, const char *name)
{
    return mb_http_target_query(&req->target, name);
}

const char *mb_http_req_query_at(const struct mb_http_req *req, const char *name, size_t nth)
{
    return mb_http_target_query_at(&req->target, name, nth);
}

const char *mb_http_req_header(const struct mb_http_req *req, const char *name)
{
    return mb_http_req_header_fn(req, name);
}

const void *mb_http_req_body(const struct mb_http_req *req, size_t *len)
{
    if (len)
        *len = req->body.len;
    return mb_buf_str(&req->body);
}

int mb_http_req_is_browser(const struct mb_http_req *req)
{
    return mb_http_guard_is_browser(mb_http_req_header_fn, req);
}

void mb_http_req_body_cb(struct mb_http_req *req, mb_http_body_cb cb, void *arg)
{
    req->body_cb = cb;
    req->body_arg = arg;
}

void mb_http_req_body_pause(struct mb_http_req *req)
{
    req->body_paused = 1;
}

void mb_http_req_body_resume(struct mb_http_req *req)
{
    req->body_paused = 0;
    if (req->srv)
        mb_http_req_resume_connection(req);
}
