/*
 * libmicrohttpd driven from the loop.
 *
 * 1. listen: our own socket (so that a port in use is a clear error), a daemon without threads
 * whose epoll descriptor a uv_poll watches and whose next deadline a uv_timer keeps.
 * 2. A request line arrives (on_uri), then the header block (first call): framing.c, whose
 *    refusals end the connection at once; token, browser guard, route. A refusal of theirs is
 *    decided here; its body is read and dropped first, so that the client gets to read the answer,
 *    unless the client waits for "100 Continue". One that announces more than the limit is answered
 *    first, and never served again: its body is dropped as long as the client sends it.
 * 3. The body comes in pieces: kept up to the limit (413 beyond), or handed on.
 * 4. At its end the handler runs (streaming handlers ran in step 2). An answer given at once is
 *    queued at once; else the connection is suspended until the answer resumes it. It is suspended
 *    as well while the handler of a streamed body cannot take more.
 * 5. on_completed: the connection is done with the request.
 * 6. stop: WebSockets and suspended connections are let go, the daemon ends, handles close, cb
 * runs. Failures: memory gone closes the connection; a refused body is drained only to a bound; a
 * client that goes away ends its request (the handler still owes an answer, which is dropped).
 * libmicrohttpd never runs from inside a reply function: resuming only arms the timer.
 */
#include "base/http/internal.h"

#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/http/guard.h"
#include "base/log.h"

enum {
    /* libmicrohttpd gives half of it to the header block. */
    CONNECTION_MEMORY_BYTES = 128 * 1024,
    DEFAULT_MAX_BODY_BYTES = 1024 * 1024,
    DEFAULT_MAX_CONNECTIONS = 11000, /* 10,000 idle ones, and room */
    DEFAULT_IDLE_TIMEOUT_MS = 60000,
    SOON_MS = 100,
    /* WebSockets that ended, when memory is given back: after the last one, and amid others. */
    FEW_WS = 16,
    MANY_WS = 512,
    /* How much of a refused body is read so that the client sees the answer. */
    MAX_DRAIN_BYTES = 256 * 1024 * 1024
};

static const char *const methods[] = {"DELETE", "GET", "HEAD", "PATCH", "POST", "PUT"};
enum { N_METHODS = sizeof methods / sizeof methods[0] };

/* ---- create ---- */

static void free_routes(struct mb_http_server *srv)
{
    for (size_t i = 0; i < srv->n_routes; i++) {
        mb_free((char *)srv->routes[i].route.method);
        mb_free((char *)srv->routes[i].route.pattern);
    }
    mb_free(srv->routes);
}

static unsigned default_connections(void)
{
    struct rlimit files;

    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur / 4 * 3 < DEFAULT_MAX_CONNECTIONS)
        return (unsigned)(files.rlim_cur / 4 * 3);
    return DEFAULT_MAX_CONNECTIONS;
}

int mb_http_server_create(uv_loop_t *loop, const struct mb_http_server_opts *opts,
                          struct mb_http_server **out, struct mb_err *err)
{
    struct mb_http_server *srv = mb_calloc(1, sizeof *srv);
    if (!srv)
        goto nomem;
    srv->loop = loop;
    srv->bind_addr = mb_strdup(opts->bind_addr ? opts->bind_addr : "127.0.0.1");
    srv->token = mb_strdup(opts->token);
    if (!srv->bind_addr || (opts->token && !srv->token))
        goto nomem;
    srv->port = opts->port;
    srv->is_local_too = opts->is_local_too;
    srv->local_fd = -1;
    srv->max_body_bytes = opts->max_body_bytes ? opts->max_body_bytes : DEFAULT_MAX_BODY_BYTES;
    srv->max_connections = opts->max_connections ? opts->max_connections : default_connections();
    srv->idle_timeout_ms = opts->idle_timeout_ms ? opts->idle_timeout_ms : DEFAULT_IDLE_TIMEOUT_MS;
    srv->browser_guard_status = opts->browser_guard_status;
    srv->closed = opts->closed;
    srv->closed_arg = opts->closed_arg;
    *out = srv;
    return 0;
nomem:
    mb_http_server_destroy(srv);
    return mb_err_set(err, MB_ENOMEM, "http server: out of memory");
}

int mb_http_server_add(struct mb_http_server *srv, const struct mb_http_route *routes, size_t n,
                       void *arg, struct mb_err *err)
{
    for (size_t i = 0; i < n; i++) {
        int rc = mb_http_pattern_check(routes[i].pattern, err);
        if (rc != 0)
            return rc;
    }
    struct mb_http_server_route *grown =
        mb_reallocarray(srv->routes, srv->n_routes + n, sizeof *srv->routes);
    if (!grown)
        return mb_err_set(err, MB_ENOMEM, "http server: out of memory for routes");
    srv->routes = grown;
    size_t before = srv->n_routes;
    for (size_t i = 0; i < n; i++) {
        struct mb_http_server_route *r = &srv->routes[srv->n_routes++];
        r->route = routes[i];
        r->arg = arg;
        r->route.method = mb_strdup(routes[i].method);
        r->route.pattern = mb_strdup(routes[i].pattern);
        if (!r->route.method || !r->route.pattern) {
            while (srv->n_routes > before) {
                r = &srv->routes[--srv->n_routes];
                mb_free((char *)r->route.method);
                mb_free((char *)r->route.pattern);
            }
            return mb_err_set(err, MB_ENOMEM, "http server: out of memory for routes");
        }
    }
    return 0;
}

/* ---- one request ---- */

/* Of a path that has other methods: which, as aiohttp has them, in order and HEAD beside GET. */
static void add_allowed(const char *method, unsigned *allowed)
{
    for (unsigned i = 0; i < N_METHODS; i++)
        if (strcmp(methods[i], method) == 0 ||
            (strcmp(methods[i], "HEAD") == 0 && strcmp(method, "GET") == 0))
            *allowed |= 1U << i;
}

static void list_allowed(unsigned allowed, char *out, size_t size)
{
    size_t used = 0;

    out[0] = '\0';
    for (unsigned i = 0; i < N_METHODS && used < size; i++)
        if (allowed & 1U << i)
            used += (size_t)snprintf(out + used, size - used, "%s%s", used ? "," : "", methods[i]);
}

/* *flags: those of the route, or of the path where it has no such method. */
static const struct mb_http_server_route *find_route(struct mb_http_req *req, char *allow,
                                                     size_t allow_size, unsigned *flags, int *rc)
{
    struct mb_http_server *srv = req->srv;
    const char *method = strcmp(req->method, "HEAD") == 0 ? "GET" : req->method;
    unsigned allowed = 0;
    allow[0] = '\0';
    *flags = 0;
    *rc = 0;
    for (size_t i = 0; i < srv->n_routes; i++) {
        const struct mb_http_server_route *r = &srv->routes[i];
        int match = mb_http_target_match(&req->target, r->route.pattern);
        if (match < 0) {
            *rc = match;
            return NULL;
        }
        if (!match)
            continue;
        if (strcmp(r->route.method, method) == 0 || strcmp(r->route.method, "*") == 0) {
            *flags = r->route.flags;
            return r;
        }
        *flags |= r->route.flags & MB_HTTP_PUBLIC;
        add_allowed(r->route.method, &allowed);
    }
    list_allowed(allowed, allow, allow_size);
    return NULL;
}

static void refuse_text(struct mb_http_req *req, int status, const char *text)
{
    req->discard = 1;
    mb_http_reply_text(req, status, "%s", text);
}

static void say_refused(struct mb_http_req *req, const char *why)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(req->conn, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    char peer[64] = "";

    if (info != NULL)
        getnameinfo(info->client_addr,
                    info->client_addr->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6)
                                                             : sizeof(struct sockaddr_in),
                    peer, sizeof peer, NULL, 0, NI_NUMERICHOST);
    mb_refusals_say(&req->srv->refusals, "http", peer, why);
}

/* Everything that can refuse a request before its body. */
static void check_head(struct mb_http_req *req)
{
    struct mb_http_server *srv = req->srv;
    struct mb_http_verdict verdict = {0};
    char allow[64];
    unsigned flags;
    int rc;
    req->route = find_route(req, allow, sizeof allow, &flags, &rc);
    if (rc != 0) {
        refuse_text(req, 500, "500 Internal Server Error\n\nout of memory");
        return;
    }
    const char *closed = srv->closed ? srv->closed(srv->closed_arg) : NULL;
    if (closed) {
        refuse_text(req, 503, closed);
        return;
    }
    if (!(flags & MB_HTTP_PUBLIC))
        mb_http_guard_token(srv->token, mb_http_req_header_fn, req, &verdict);
    if (verdict.status != 0)
        say_refused(req, verdict.status == 401 ? "it gives no token" : "it gives a wrong token");
    if (verdict.status == 0 && !((flags & MB_HTTP_BROWSER) && srv->browser_guard_status == 405))
        mb_http_guard_browser(srv->browser_guard_status, req->method, mb_http_req_header_fn, req,
                              &verdict);
    if (verdict.status != 0) {
        refuse_text(req, verdict.status, verdict.text);
    } else if (!req->route && allow[0]) {
        mb_http_reply_header(req, MHD_HTTP_HEADER_ALLOW, allow);
        refuse_text(req, 405, "405: Method Not Allowed");
    } else if (!req->route) {
        refuse_text(req, 404, "404: Not Found");
    }
}

static void refuse_size(struct mb_http_req *req)
{
    req->discard = 1;
    mb_http_reply_text(req, 413, "Maximum request body size %zu exceeded.",
                       req->srv->max_body_bytes);
}

static void dispatch(struct mb_http_req *req)
{
    req->dispatched = 1;
    req->owed = 1;
    req->route->route.handler(req->route->arg, req);
}

static enum MHD_Result queue_answer(struct mb_http_req *req)
{
    struct MHD_Response *response = req->response;
    if (!response)
        return MHD_NO;
    req->response = NULL;
    enum MHD_Result rc = MHD_queue_response(req->conn, (unsigned)req->status, response);
    MHD_destroy_response(response);
    return rc;
}

static enum MHD_Result first_call(struct mb_http_req *req, struct MHD_Connection *conn,
                                  const char *method, const char *version)
{
    const char *text;
    req->started = 1;
    mb_http_watch_waits(req->srv, conn, 0);
    int rc = mb_http_req_load(req, conn, method);
    if (rc == MB_ENOMEM)
        return MHD_NO;
    int refused = mb_http_framing_check(req, method, version, &text);
    if (refused != 0) {
        mb_http_reply_header(req, MHD_HTTP_HEADER_CONNECTION, "close");
        refuse_text(req, refused, text);
        return queue_answer(req);
    }
    const char *length = mb_http_req_header_fn(req, MHD_HTTP_HEADER_CONTENT_LENGTH);
    const char *expect = mb_http_req_header_fn(req, MHD_HTTP_HEADER_EXPECT);
    int is_too_much = length && strtoull(length, NULL, 10) > req->srv->max_body_bytes;
    int is_asked = expect && strcasecmp(expect, "100-continue") == 0;
    req->at_once = is_too_much && !is_asked;
    if (rc != 0)
        refuse_text(req, 400, "400: Bad Request");
    else
        check_head(req);
    int streams = req->route && (req->route->route.flags & MB_HTTP_BODY_STREAM);
    if (req->status == 0 && streams)
        dispatch(req);
    else if (req->status == 0 && is_too_much)
        refuse_size(req);
    req->at_once = 0; /* a route with a limit of its own answers later, as usual */
    if (req->status != 0 && is_asked)
        return queue_answer(req);
    return MHD_YES;
}

static void suspend(struct mb_http_req *req)
{
    req->suspended = 1;
    MHD_suspend_connection(req->conn);
}

static enum MHD_Result take_body(struct mb_http_req *req, const char *p, size_t n)
{
    if (req->client_gone)
        return MHD_NO; /* while it was paused: what it left behind is of no use */
    req->body_bytes += n;
    if (req->discard || req->status != 0)
        return req->body_bytes > MAX_DRAIN_BYTES ? MHD_NO : MHD_YES;
    if (req->dispatched) {
        if (req->body_cb && req->body_cb(req->body_arg, req, p, n, 0) < 0) {
            req->body_ended = 1;
            req->discard = 1;
            req->body_bytes = 0;
        }
        if (req->body_paused && req->status == 0)
            suspend(req);
        return MHD_YES;
    }
    if (n > req->srv->max_body_bytes - req->body.len)
        refuse_size(req);
    else if (mb_buf_add(&req->body, p, n) != 0)
        refuse_text(req, 500, "500 Internal Server Error\n\nout of memory");
    return MHD_YES;
}

static enum MHD_Result last_call(struct mb_http_req *req)
{
    req->is_whole = 1;
    if (req->status == 0 && !req->dispatched)
        dispatch(req);
    if (req->status == 0 && req->body_cb && !req->body_ended) {
        req->body_ended = 1;
        req->body_cb(req->body_arg, req, NULL, 0, 0);
    }
    if (req->status != 0)
        return queue_answer(req);
    if (req->client_gone)
        return MHD_NO;
    suspend(req);
    return MHD_YES;
}

static enum MHD_Result on_request(void *arg, struct MHD_Connection *conn, const char *url,
                                  const char *method, const char *version, const char *upload,
                                  size_t *upload_size, void **con_cls)
{
    struct mb_http_server *srv = arg;
    struct mb_http_req *req = *con_cls;
    (void)url;
    if (!req || srv->stopping)
        return MHD_NO;
    if (!req->started)
        return first_call(req, conn, method, version);
    if (req->suspended)
        return MHD_YES; /* the next piece of the same bytes: it stays, and comes again */
    if (*upload_size > 0) {
        size_t n = *upload_size;
        *upload_size = 0;
        return take_body(req, upload, n);
    }
    return last_call(req);
}

static void *on_uri(void *arg, const char *uri, struct MHD_Connection *conn)
{
    struct mb_http_req *req = mb_http_req_create(arg, uri);
    if (req)
        req->conn = conn;
    return req; /* NULL closes the connection at the first call */
}

static void on_completed(void *arg, struct MHD_Connection *conn, void **con_cls,
                         enum MHD_RequestTerminationCode how)
{
    struct mb_http_req *req = *con_cls;
    (void)how;
    mb_http_watch_waits(arg, conn, 1);
    *con_cls = NULL;
    if (req)
        mb_http_req_detach(req);
}

/* Targets are decoded in route.c, after they are split. */
static size_t keep_escapes(void *arg, struct MHD_Connection *conn, char *s)
{
    (void)arg;
    (void)conn;
    return strlen(s);
}

static void on_daemon_log(void *arg, const char *fmt, va_list ap)
{
    char line[256];
    if (strstr(fmt, MHD_HTTP_HEADER_CONTENT_LENGTH))
        mb_http_framing_refused(arg);
    int n = vsnprintf(line, sizeof line, fmt, ap);
    if (n > 0 && (size_t)n < sizeof line && line[n - 1] == '\n')
        line[n - 1] = '\0';
    mb_debug("http", "libmicrohttpd: %s", line);
}

/* ---- the loop ---- */

static void on_deadline(uv_timer_t *timer);

static void run_daemon(struct mb_http_server *srv)
{
    MHD_UNSIGNED_LONG_LONG timeout_ms;
    if (srv->stopping)
        return;
    srv->resumed = 0;
    MHD_run(srv->daemon);
    mb_http_listen_again(srv);
    if (srv->stopping)
        return; /* a handler asked for the stop: the timer is its own now */
    if (srv->resumed)
        uv_timer_start(&srv->timer, on_deadline, 0, 0);
    else if (MHD_get_timeout(srv->daemon, &timeout_ms) == MHD_YES)
        uv_timer_start(&srv->timer, on_deadline, timeout_ms, 0);
    else
        uv_timer_stop(&srv->timer);
}

static void on_deadline(uv_timer_t *timer)
{
    run_daemon(timer->data);
}

static void on_ready(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    run_daemon(poll->data);
}

void mb_http_req_resume_connection(struct mb_http_req *req)
{
    if (!req->suspended)
        return;
    req->suspended = 0;
    MHD_resume_connection(req->conn);
    /* Driven from outside, libmicrohttpd has nothing to wake itself with. */
    mb_http_server_wake(req->srv);
}

void mb_http_server_wake_soon(struct mb_http_server *srv)
{
    uint64_t due_ms =
        uv_is_active((uv_handle_t *)&srv->timer) ? uv_timer_get_due_in(&srv->timer) : UINT64_MAX;

    if (!srv->stopping && due_ms > SOON_MS)
        uv_timer_start(&srv->timer, on_deadline, SOON_MS, 0);
}

void mb_http_server_wake(struct mb_http_server *srv)
{
    srv->resumed = 1;
    if (!srv->stopping)
        uv_timer_start(&srv->timer, on_deadline, 0, 0);
}

/* ---- listen ---- */

int mb_http_server_listen(struct mb_http_server *srv, int *out_port, struct mb_err *err)
{
    int fd = -1, port = 0;
    int rc = mb_http_listen_open(srv, &fd, &port, err);
    if (rc != 0)
        return rc;
    unsigned idle_s = (unsigned)((srv->idle_timeout_ms + 999) / 1000);
    srv->daemon = MHD_start_daemon(
        MHD_USE_EPOLL | MHD_ALLOW_UPGRADE | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG, 0, NULL,
        NULL, on_request, srv, MHD_OPTION_EXTERNAL_LOGGER, on_daemon_log, srv,
        MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_NOTIFY_COMPLETED, on_completed, srv,
        MHD_OPTION_NOTIFY_CONNECTION, mb_http_watch_connection, srv, MHD_OPTION_URI_LOG_CALLBACK,
        on_uri, srv, MHD_OPTION_UNESCAPE_CALLBACK, keep_escapes, NULL,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)CONNECTION_MEMORY_BYTES,
        MHD_OPTION_CONNECTION_LIMIT, srv->max_connections, MHD_OPTION_CONNECTION_TIMEOUT, idle_s,
        MHD_OPTION_END);
    if (!srv->daemon) {
        close(fd);
        mb_http_listen_drop(srv);
        return mb_err_set(err, MB_EIO, "cannot start the HTTP server on %s port %d", srv->bind_addr,
                          port);
    }
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(srv->daemon, MHD_DAEMON_INFO_EPOLL_FD);
    rc = info ? uv_poll_init(srv->loop, &srv->poll, info->epoll_fd) : UV_EINVAL;
    if (rc != 0) {
        MHD_stop_daemon(srv->daemon); /* closes fd too */
        srv->daemon = NULL;
        mb_http_listen_drop(srv);
        return mb_err_set(err, MB_EIO, "http server: uv_poll_init: %s", uv_strerror(rc));
    }
    uv_timer_init(srv->loop, &srv->timer);
    uv_timer_init(srv->loop, &srv->watch);
    srv->poll.data = srv;
    srv->timer.data = srv;
    srv->watch.data = srv;
    srv->n_handles = 3;
    uv_poll_start(&srv->poll, UV_READABLE, on_ready);
    mb_http_listen_local(srv);
    srv->port = port;
    if (out_port)
        *out_port = port;
    return 0;
}

/* ---- stop ---- */

static void finish_stop(struct mb_http_server *srv)
{
    if (srv->n_handles > 0 || srv->n_ws > 0 || srv->stopped)
        return;
    srv->stopped = 1;
    if (srv->stop_cb)
        srv->stop_cb(srv->stop_arg);
}

void mb_http_server_ws_ended(struct mb_http_server *srv)
{
    srv->n_ws--;
    /* The heap keeps what many readers had, unless it is told. */
    if (++srv->n_ws_ended >= (srv->n_ws == 0 ? FEW_WS : MANY_WS)) {
        srv->n_ws_ended = 0;
        mb_give_back();
    }
    if (srv->stopping)
        finish_stop(srv);
}

static void on_handle_closed(uv_handle_t *h)
{
    struct mb_http_server *srv = h->data;
    srv->n_handles--;
    finish_stop(srv);
}

static void on_stop(uv_timer_t *timer)
{
    struct mb_http_server *srv = timer->data;
    if (srv->daemon) {
        for (struct mb_http_req *req = srv->reqs; req; req = req->next) {
            if (req->ws)
                mb_ws_drop(req->ws);
            else
                mb_http_req_resume_connection(req);
        }
        MHD_run(srv->daemon); /* takes note of what was resumed; on_request refuses it all */
        uv_close((uv_handle_t *)&srv->poll, on_handle_closed); /* while its descriptor is there */
        if (srv->is_local_polled)
            uv_close((uv_handle_t *)&srv->local_poll, on_handle_closed);
        mb_http_listen_drop(srv);
        MHD_stop_daemon(srv->daemon);
        srv->daemon = NULL;
        uv_close((uv_handle_t *)&srv->watch, on_handle_closed);
    }
    uv_close((uv_handle_t *)&srv->timer, on_handle_closed);
}

void mb_http_server_stop(struct mb_http_server *srv, void (*cb)(void *arg), void *arg)
{
    if (srv->stopping)
        return;
    srv->stopping = 1;
    srv->stop_cb = cb;
    srv->stop_arg = arg;
    if (!srv->daemon) {
        uv_timer_init(srv->loop, &srv->timer);
        srv->timer.data = srv;
        srv->n_handles = 1;
    }
    uv_timer_start(&srv->timer, on_stop, 0, 0); /* never from inside the caller or the daemon */
}

void mb_http_server_destroy(struct mb_http_server *srv)
{
    if (!srv)
        return;
    free_routes(srv);
    mb_free(srv->bind_addr);
    mb_free(srv->token);
    mb_free(srv);
}
