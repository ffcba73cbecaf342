/*
 * The wire of the full program: base/http's clients on a loop that turns only while a call blocks.
 */
#include "cli/wire.h"

#include <string.h>
#include "base/loop.h"
#include "base/alloc.h"
#include "base/http/client.h"
#include "base/str.h"

enum { CONNECTIONS_MAX = 2 };

struct mb_wire {
    uv_loop_t loop;
    struct mb_http_client *http;
    struct mb_ws_client *ws; /* while one is followed */
    const struct mb_wire_ops *ops;
    void *arg;
    int ended;
};

int mb_wire_open(struct mb_wire **out, struct mb_err *err)
{
    struct mb_wire *w = mb_calloc(1, sizeof(*w));
    int rc;

    if (w == NULL || uv_loop_init(&w->loop) != 0) {
        mb_free(w);
        return mb_err_set(err, MB_ENOMEM, "no event loop");
    }
    rc = mb_http_client_create(&w->loop, CONNECTIONS_MAX, &w->http, err);
    if (rc != 0) {
        mb_wire_close(w);
        return rc;
    }
    *out = w;
    return 0;
}

static void on_stopped(void *arg)
{
    *(int *)arg = 1;
}

void mb_wire_close(struct mb_wire *w)
{
    int stopped = 0;

    if (w == NULL)
        return;
    if (w->http != NULL) {
        mb_http_client_stop(w->http, on_stopped, &stopped);
        while (!stopped)
            mb_loop_turn(&w->loop);
        mb_http_client_destroy(w->http);
    }
    uv_run(&w->loop, UV_RUN_DEFAULT);
    uv_loop_close(&w->loop);
    mb_free(w);
}

/* ---- calls ---- */

struct pending {
    struct mb_buf *body;
    struct mb_err *err;
    long status;
    int done, rc;
};

static void on_response(void *arg, const struct mb_http_response *r)
{
    struct pending *p = arg;

    p->done = 1;
    p->status = r->status;
    if (r->error != 0)
        p->rc = mb_err_set(p->err, r->error, "%s", r->detail);
    else if (mb_buf_add(p->body, r->body, r->body_len) != 0)
        p->rc = mb_err_set(p->err, MB_ENOMEM, "out of memory");
}

int mb_wire_fetch(struct mb_wire *w, const struct mb_wire_request *r, long *status,
                  struct mb_buf *body, struct mb_err *err)
{
    struct mb_http_request request = {.method = r->method,
                                      .url = r->url,
                                      .headers = r->headers,
                                      .body = r->body,
                                      .body_len = r->body_len,
                                      .body_fd = r->body_fd,
                                      .timeout_ms = r->timeout_ms,
                                      .max_body_bytes = r->max_answer_bytes};
    struct pending p = {.body = body, .err = err};
    int rc = mb_http_fetch(w->http, &request, on_response, &p, NULL, err);

    if (rc != 0)
        return rc;
    while (!p.done)
        mb_loop_turn(&w->loop);
    *status = p.status;
    return p.rc;
}

/* ---- following ---- */

static void on_text(void *arg, const char *text, size_t n)
{
    struct mb_wire *w = arg;

    w->ops->on_text(w->arg, text, n);
}

static void on_binary(void *arg, const void *p, size_t n)
{
    struct mb_wire *w = arg;

    w->ops->on_binary(w->arg, p, n);
}

static void on_end(void *arg, int status_code, long http_status, const char *detail)
{
    struct mb_wire *w = arg;

    w->ended = 1;
    w->ops->on_end(w->arg, status_code, http_status, detail);
}

int mb_wire_follow(struct mb_wire *w, const char *url, const char *const *headers,
                   const struct mb_wire_ops *ops, void *arg, struct mb_err *err)
{
    static const struct mb_ws_client_ops ws_ops = {
        .on_text = on_text, .on_binary = on_binary, .on_end = on_end};
    int rc = 0;

    w->ops = ops;
    w->arg = arg;
    w->ended = 0;
    if (mb_starts_with(url, "https://"))
        return mb_err_set(err, MB_EUNSUPPORTED, "logs can be followed over http only");
    rc = mb_ws_connect(&w->loop, url, headers, &ws_ops, w, &w->ws, err);
    while (rc == 0 && !w->ended)
        mb_loop_turn(&w->loop);
    return rc;
}

void mb_wire_hang_up(struct mb_wire *w)
{
    mb_ws_client_close(w->ws);
}
