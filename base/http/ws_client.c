/*
 * WebSocket client: plain TCP, own handshake, frames by ws_conn.
 *
 * 1. connect: the URL is taken apart, the name resolved in the pool.
 * 2. Each address is tried in turn; the request goes out as soon as one accepts.
 * 3. The answer is read up to its empty line: 101 with the right proof hands the socket (and what
 *    was read too much) to ws_conn; anything else is the end, with its status and some of its text.
 * 4. Frames flow; the end of ws_conn is the end here.
 * Failures: a bad URL at once; no address, no connection, no answer within 10 s: on_end with 1006.
 * Every end goes through finish(): handles close first, then on_end, once, from the loop.
 */
#include "base/http/client.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/clock.h"
#include "base/http/ws_conn.h"
#include "base/http/ws_handshake.h"

enum { HANDSHAKE_TIMEOUT_MS = 10000, MAX_ANSWER_BYTES = 64 * 1024 };

struct mb_ws_client {
    uv_loop_t *loop;
    uv_getaddrinfo_t resolve;
    uv_timer_t timer;
    uv_poll_t poll;
    int resolving;
    int polling;
    int timer_open;
    int fd;
    struct addrinfo *addrs; /* all, freed at the end */
    struct addrinfo *next_addr;
    struct mb_buf request;
    size_t request_pos;
    struct mb_buf answer;
    char key[MB_WS_KEY_BYTES];
    struct mb_ws_conn *conn;
    struct mb_ws_client_ops ops;
    void *arg;
    int ending;
    int status_code;
    long http_status;
    char detail[512];
};

static void finish(struct mb_ws_client *ws, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
static void try_next_address(struct mb_ws_client *ws);

/* ---- the end ---- */

static void end_if_quiet(struct mb_ws_client *ws)
{
    if (!ws->ending || ws->resolving || ws->polling || ws->timer_open || ws->conn)
        return;
    if (ws->fd >= 0)
        close(ws->fd);
    if (ws->ops.on_end)
        ws->ops.on_end(ws->arg, ws->status_code, ws->http_status, ws->detail);
    uv_freeaddrinfo(ws->addrs);
    mb_buf_close(&ws->request);
    mb_buf_close(&ws->answer);
    mb_free(ws);
}

static void on_timer_closed(uv_handle_t *h)
{
    struct mb_ws_client *ws = h->data;
    ws->timer_open = 0;
    end_if_quiet(ws);
}

static void on_poll_closed(uv_handle_t *h)
{
    struct mb_ws_client *ws = h->data;
    ws->polling = 0;
    if (ws->ending)
        end_if_quiet(ws);
    else if (!ws->conn)
        try_next_address(ws);
}

static void poll_close(struct mb_ws_client *ws)
{
    if (ws->polling && !uv_is_closing((uv_handle_t *)&ws->poll))
        uv_close((uv_handle_t *)&ws->poll, on_poll_closed);
}

static void finish(struct mb_ws_client *ws, const char *fmt, ...)
{
    va_list ap;
    if (ws->ending)
        return;
    ws->ending = 1;
    va_start(ap, fmt);
    vsnprintf(ws->detail, sizeof ws->detail, fmt, ap);
    va_end(ap);
    if (ws->resolving)
        uv_cancel((uv_req_t *)&ws->resolve);
    uv_close((uv_handle_t *)&ws->timer, on_timer_closed);
    poll_close(ws);
    if (ws->conn)
        mb_ws_conn_abort(ws->conn);
}

/* ---- frames ---- */

static void on_text(void *arg, const char *text, size_t n)
{
    struct mb_ws_client *ws = arg;
    if (ws->ops.on_text)
        ws->ops.on_text(ws->arg, text, n);
}

static void on_binary(void *arg, const void *p, size_t n)
{
    struct mb_ws_client *ws = arg;
    if (ws->ops.on_binary)
        ws->ops.on_binary(ws->arg, p, n);
}

static void on_close(void *arg, int status_code)
{
    struct mb_ws_client *ws = arg;
    ws->status_code = status_code;
    const char *why = status_code == 1006 ? "the connection broke" : mb_ws_conn_reason(ws->conn);
    char reason[128];
    snprintf(reason, sizeof reason, "%s", why);
    ws->conn = NULL; /* it frees itself after this */
    finish(ws, "%s", reason);
    end_if_quiet(ws);
}

/* ---- the answer ---- */

/* Copies the value of a header of the answer into out, cut at its size; "" if absent. */
static void answer_header(const char *head, const char *name, char *out, size_t size)
{
    size_t name_len = strlen(name);
    out[0] = '\0';
    for (const char *line = strstr(head, "\r\n"); line; line = strstr(line + 2, "\r\n")) {
        const char *p = line + 2;
        if (strncasecmp(p, name, name_len) != 0 || p[name_len] != ':')
            continue;
        p += name_len + 1;
        p += strspn(p, " \t");
        size_t n = strcspn(p, "\r\n");
        while (n > 0 && (p[n - 1] == ' ' || p[n - 1] == '\t'))
            n--;
        snprintf(out, size, "%.*s", (int)n, p);
        return;
    }
}

static void refuse_answer(struct mb_ws_client *ws, const char *head, const char *body)
{
    ws->http_status = strncmp(head, "HTTP/1.", 7) == 0 ? strtol(head + 8, NULL, 10) : 0;
    if (ws->http_status == 101)
        finish(ws, "the server's upgrade answer is no valid WebSocket handshake");
    else
        finish(ws, "%.400s", body);
}

static void take_answer(struct mb_ws_client *ws, int ended)
{
    static const struct mb_ws_conn_ops conn_ops = {
        .on_text = on_text, .on_binary = on_binary, .on_close = on_close};
    char accept[MB_WS_ACCEPT_BYTES];
    char got[64];
    char upgrade[64];
    struct mb_err err;
    const char *head = mb_buf_str(&ws->answer);
    const char *end = strstr(head, "\r\n\r\n");
    if (!end) {
        if (ended || ws->answer.len > MAX_ANSWER_BYTES)
            finish(ws, "the server sent no HTTP answer");
        return;
    }
    size_t head_len = (size_t)(end - head) + 4;
    answer_header(head, "Sec-WebSocket-Accept", got, sizeof got);
    answer_header(head, "Upgrade", upgrade, sizeof upgrade);
    if (strncmp(head, "HTTP/1.1 101", 12) != 0 || strcasecmp(upgrade, "websocket") != 0 ||
        mb_ws_accept_key(ws->key, accept) != 0 || strcmp(got, accept) != 0) {
        char length[32];
        answer_header(head, "Content-Length", length, sizeof length);
        size_t want = strtoul(length, NULL, 10);
        if (want > MAX_ANSWER_BYTES)
            want = MAX_ANSWER_BYTES;
        if (ended || !length[0] || ws->answer.len >= head_len + want)
            refuse_answer(ws, head, end + 4);
        return; /* else the text of the refusal is still coming */
    }
    ws->http_status = 101;
    poll_close(ws); /* stops watching at once */
    uv_timer_stop(&ws->timer);
    if (mb_ws_conn_create(ws->loop, 1, &conn_ops, ws, &ws->conn) != 0) {
        finish(ws, "out of memory");
        return;
    }
    ws->http_status = 0;
    if (mb_ws_conn_start(ws->conn, ws->fd, ws->answer.data + head_len, ws->answer.len - head_len,
                         &err) != 0)
        finish(ws, "%s", err.text);
}

/* ---- the socket until the upgrade ---- */

static void on_ready(uv_poll_t *poll, int status, int events)
{
    struct mb_ws_client *ws = poll->data;
    int e = 0;
    socklen_t len = sizeof e;
    (void)events;
    if (status < 0 || getsockopt(ws->fd, SOL_SOCKET, SO_ERROR, &e, &len) != 0 || e != 0) {
        snprintf(ws->detail, sizeof ws->detail, "%s",
                 e            ? strerror(e)
                 : status < 0 ? uv_strerror(status)
                              : "socket error");
        poll_close(ws); /* the next address follows */
        return;
    }
    if (ws->request_pos < ws->request.len) {
        ssize_t n = send(ws->fd, ws->request.data + ws->request_pos,
                         ws->request.len - ws->request_pos, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN && errno != EINTR) {
            finish(ws, "send: %s", strerror(errno));
            return;
        }
        ws->request_pos += n > 0 ? (size_t)n : 0;
        if (ws->request_pos == ws->request.len)
            uv_poll_start(&ws->poll, UV_READABLE, on_ready);
        return;
    }
    char buf[4096];
    ssize_t n = recv(ws->fd, buf, sizeof buf, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n < 0)
        finish(ws, "recv: %s", strerror(errno));
    else if (n > 0 && mb_buf_add(&ws->answer, buf, (size_t)n) != 0)
        finish(ws, "out of memory");
    else
        take_answer(ws, n == 0);
}

static void try_next_address(struct mb_ws_client *ws)
{
    struct addrinfo *a = ws->next_addr;
    if (ws->fd >= 0)
        close(ws->fd);
    ws->fd = -1;
    if (!a) {
        char last[128];
        snprintf(last, sizeof last, "%.100s", ws->detail);
        finish(ws, "cannot connect: %s", last[0] ? last : "no address");
        return;
    }
    ws->next_addr = a->ai_next;
    ws->fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (ws->fd < 0 || (connect(ws->fd, a->ai_addr, a->ai_addrlen) != 0 && errno != EINPROGRESS)) {
        snprintf(ws->detail, sizeof ws->detail, "%s", strerror(errno));
        try_next_address(ws); /* as deep as there are addresses */
        return;
    }
    if (uv_poll_init(ws->loop, &ws->poll, ws->fd) != 0) {
        finish(ws, "out of resources");
        return;
    }
    ws->poll.data = ws;
    ws->polling = 1;
    uv_poll_start(&ws->poll, UV_WRITABLE, on_ready);
}

static void on_resolved(uv_getaddrinfo_t *req, int status, struct addrinfo *addrs)
{
    struct mb_ws_client *ws = req->data;
    ws->resolving = 0;
    ws->addrs = addrs;
    if (ws->ending)
        end_if_quiet(ws);
    else if (status != 0)
        finish(ws, "the host name cannot be resolved: %s", uv_strerror(status));
    else {
        ws->next_addr = addrs;
        try_next_address(ws);
    }
}

static void on_handshake_timeout(uv_timer_t *timer)
{
    finish(timer->data, "no WebSocket answer within %d s", HANDSHAKE_TIMEOUT_MS / 1000);
}

/* ---- connect ---- */

struct url_parts {
    char host[256];
    char port[8];
    const char *path;
};

static int split_url(const char *url, struct url_parts *out, struct mb_err *err)
{
    const char *p = strstr(url, "://");
    if (!p || (strncasecmp(url, "ws:", 3) != 0 && strncasecmp(url, "http:", 5) != 0))
        return mb_err_set(err, p ? MB_EUNSUPPORTED : MB_EINVAL,
                          "WebSocket address \"%.100s\": ws://HOST:PORT/PATH is expected", url);
    p += 3;
    size_t authority = strcspn(p, "/?#");
    out->path = p + authority;
    const char *host_end = p[0] == '[' ? memchr(p, ']', authority) : NULL;
    const char *host = p[0] == '[' ? p + 1 : p;
    const char *colon = host_end ? host_end + 1 : memchr(p, ':', authority);
    if (!host_end)
        host_end = colon ? colon : p + authority;
    size_t host_len = (size_t)(host_end - host);
    int has_port = colon && colon < p + authority && *colon == ':';
    size_t port_len = has_port ? authority - (size_t)(colon + 1 - p) : 0;
    if (host_len == 0 || host_len >= sizeof out->host || port_len >= sizeof out->port ||
        memchr(p, '@', authority))
        return mb_err_set(err, MB_EINVAL, "WebSocket address \"%.100s\": bad host or port", url);
    snprintf(out->host, sizeof out->host, "%.*s", (int)host_len, host);
    snprintf(out->port, sizeof out->port, "%.*s", (int)port_len, has_port ? colon + 1 : "");
    if (!out->port[0])
        snprintf(out->port, sizeof out->port, "80");
    return 0;
}

static int build_request(struct mb_ws_client *ws, const struct url_parts *url,
                         const char *const *headers)
{
    uint8_t nonce[16];
    int is_v6 = strchr(url->host, ':') != NULL;
    mb_random_bytes(nonce, sizeof nonce);
    mb_base64(nonce, sizeof nonce, ws->key);
    size_t path_len = strcspn(url->path, "#");
    int rc = mb_buf_printf(&ws->request,
                           "GET %s%.*s HTTP/1.1\r\nHost: %s%s%s:%s\r\nUpgrade: websocket\r\n"
                           "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                           "Sec-WebSocket-Key: %s\r\n",
                           url->path[0] == '/' ? "" : "/", (int)path_len, url->path,
                           is_v6 ? "[" : "", url->host, is_v6 ? "]" : "", url->port, ws->key);
    for (const char *const *h = headers; rc == 0 && h && *h; h++)
        rc = mb_buf_printf(&ws->request, "%s\r\n", *h);
    return rc != 0 ? rc : mb_buf_puts(&ws->request, "\r\n");
}

int mb_ws_connect(uv_loop_t *loop, const char *url, const char *const *headers,
                  const struct mb_ws_client_ops *ops, void *arg, struct mb_ws_client **out,
                  struct mb_err *err)
{
    struct url_parts parts;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    int rc = split_url(url, &parts, err);
    if (rc != 0)
        return rc;
    struct mb_ws_client *ws = mb_calloc(1, sizeof *ws);
    if (!ws || build_request(ws, &parts, headers) != 0) {
        rc = mb_err_set(err, MB_ENOMEM, "WebSocket client: out of memory");
        goto fail;
    }
    ws->loop = loop;
    ws->ops = *ops;
    ws->arg = arg;
    ws->fd = -1;
    ws->status_code = 1006;
    ws->resolve.data = ws;
    rc = uv_getaddrinfo(loop, &ws->resolve, on_resolved, parts.host, parts.port, &hints);
    if (rc != 0) {
        rc = mb_err_set(err, MB_EUNAVAIL, "WebSocket client: %s: %s", parts.host, uv_strerror(rc));
        goto fail;
    }
    ws->resolving = 1;
    uv_timer_init(loop, &ws->timer);
    ws->timer.data = ws;
    ws->timer_open = 1;
    uv_timer_start(&ws->timer, on_handshake_timeout, HANDSHAKE_TIMEOUT_MS, 0);
    if (out)
        *out = ws;
    return 0;
fail:
    if (ws)
        mb_buf_close(&ws->request);
    mb_free(ws);
    return rc;
}

void mb_ws_client_close(struct mb_ws_client *ws)
{
    if (ws->conn && !ws->ending)
        mb_ws_conn_close(ws->conn, 1000, "");
    else
        finish(ws, "closed by the caller");
}
