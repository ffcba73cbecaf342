/*
 * A stream from http:// or https://.
 *
 * 1. read runs a loop of its own until there are bytes; between reads nothing runs, so that the
 *    kernel's buffers hold the server back.
 * 2. Answers fill a window of WINDOW_BYTES, then the transfer is paused until it is used up.
 * 3. What happens after an interruption is decided by http_plan.c.
 * TLS is verified and proxies are used as base/http does. cancel wakes the loop.
 */
#include <stdlib.h>
#include <string.h>
#include <uv.h>
#include "base/loop.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/http/client.h"
#include "base/log.h"
#include "worker/data/input/http_plan.h"
#include "worker/data/input/source.h"

enum { WINDOW_BYTES = 1 << 20, IDENTITY_OUTAGE_MS = 30000 };
#define REQUEST_TIMEOUT_MS (7ull * 24 * 3600 * 1000)

struct http_stream {
    struct mb_stream base;
    char *url;
    char *name; /* for people */
    struct mb_http_plan plan;
    uv_loop_t loop;
    uv_async_t wake;
    uv_timer_t timer;
    struct mb_http_client *client;
    struct mb_http_fetch *fetch;
    struct mb_buf window;
    size_t at; /* of the window: taken */
    int is_started;
    int is_paused;
    int has_ended; /* with err, or well */
    struct mb_err err;
    atomic_int is_cancelled;
};

static void start_fetch(struct http_stream *h);

/* ---- callbacks of the transfer ---- */

static struct mb_http_plan_head head_of(const struct mb_http_response *r)
{
    return (struct mb_http_plan_head){.status = r->status,
                                      .etag = r->header(r, "ETag"),
                                      .modified = r->header(r, "Last-Modified"),
                                      .content_range = r->header(r, "Content-Range"),
                                      .content_length = r->header(r, "Content-Length")};
}

static int on_head(void *arg, const struct mb_http_response *r)
{
    struct http_stream *h = arg;
    struct mb_http_plan_head head = head_of(r);
    int rc = mb_http_plan_answer(&h->plan, &head, &h->err);

    if (rc == 0 && h->plan.has_total)
        atomic_store(&h->base.total_bytes, h->plan.total_bytes);
    return rc;
}

static int on_bytes(void *arg, const void *p, size_t n)
{
    struct http_stream *h = arg;
    uint64_t dropped;

    if (h->window.len - h->at >= WINDOW_BYTES) {
        h->is_paused = 1;
        return MB_HTTP_SINK_PAUSE;
    }
    if (h->at > 0) {
        mb_buf_consume(&h->window, h->at);
        h->at = 0;
    }
    if (mb_buf_reserve(&h->window, n) != 0)
        return mb_err_set(&h->err, MB_ENOMEM, "out of memory");
    dropped = mb_http_plan_bytes(&h->plan, n);
    return mb_buf_add(&h->window, (const uint8_t *)p + dropped, n - (size_t)dropped);
}

static void on_timer(uv_timer_t *timer)
{
    start_fetch(timer->data);
}

static void on_done(void *arg, const struct mb_http_response *r)
{
    struct http_stream *h = arg;
    struct mb_http_plan_head head = head_of(r);
    const char *retry_after = r->error == 0 ? r->header(r, "Retry-After") : NULL;
    uint64_t delay_ms;

    h->fetch = NULL;
    h->is_paused = 0;
    if (h->err.code == 0 && r->error == 0 && r->status / 100 == 2 && !h->plan.has_answer)
        (void)on_head(h, r); /* an empty answer never came to the sink */
    h->has_ended = 1;
    if (h->err.code != 0)
        return;
    if (mb_http_plan_done(&h->plan, r->error, r->detail, &head,
                          retry_after != NULL ? strtoul(retry_after, NULL, 10) : 0, mb_mono_ms(),
                          mb_random_u64(), &delay_ms, &h->err) != MB_HTTP_PLAN_RETRY)
        return;
    mb_warn("input", "%s: %s; trying again in %llu ms", h->name, h->err.text,
            (unsigned long long)delay_ms);
    mb_err_clear(&h->err);
    h->has_ended = 0;
    uv_timer_start(&h->timer, on_timer, delay_ms, 0);
}

static void start_fetch(struct http_stream *h)
{
    char range[64];
    const char *headers[2] = {mb_http_plan_range(&h->plan, range), NULL};
    struct mb_http_request request = {.method = "GET",
                                      .url = h->url,
                                      .headers = range[0] != '\0' ? headers : NULL,
                                      .body_fd = -1,
                                      .sink = on_bytes,
                                      .head = on_head,
                                      .sink_arg = h,
                                      .timeout_ms = REQUEST_TIMEOUT_MS,
                                      .follow_redirects = 1};

    if (mb_http_fetch(h->client, &request, on_done, h, &h->fetch, &h->err) != 0)
        h->has_ended = 1;
}

/* ---- the stream ---- */

static void on_wake(uv_async_t *wake)
{
    (void)wake; /* the loop returns, read looks at is_cancelled */
}

static ssize_t http_read(struct mb_stream *s, void *p, size_t n, struct mb_err *err)
{
    struct http_stream *h = (struct http_stream *)s;
    size_t have;

    if (!h->is_started) {
        h->is_started = 1;
        start_fetch(h);
    }
    while (h->window.len == h->at && !h->has_ended && !atomic_load(&h->is_cancelled)) {
        if (h->is_paused) {
            h->is_paused = 0;
            mb_http_fetch_resume(h->fetch);
        } else {
            mb_loop_turn(&h->loop);
        }
    }
    if (atomic_load(&h->is_cancelled))
        return mb_err_set(err, MB_ECANCELED, "cancelled");
    have = h->window.len - h->at;
    if (have == 0) {
        if (h->err.code != 0 && err != NULL)
            *err = h->err;
        return h->err.code;
    }
    if (have > n)
        have = n;
    memcpy(p, h->window.data + h->at, have);
    h->at += have;
    atomic_fetch_add(&s->done_bytes, have);
    return (ssize_t)have;
}

static void on_stopped(void *arg)
{
    int *is_stopped = arg;

    *is_stopped = 1;
}

static void stop_client(struct http_stream *h)
{
    int is_stopped = 0;

    if (h->client == NULL)
        return;
    mb_http_client_stop(h->client, on_stopped, &is_stopped);
    while (!is_stopped)
        mb_loop_turn(&h->loop);
    mb_http_client_destroy(h->client);
    h->client = NULL;
}

/* What was asked for is given up; the next read asks for `offset` on. */
static int http_seek(struct mb_stream *s, uint64_t offset, struct mb_err *err)
{
    struct http_stream *h = (struct http_stream *)s;
    int rc;

    uv_timer_stop(&h->timer);
    stop_client(h);
    rc = mb_http_client_create(&h->loop, 1, &h->client, err);
    mb_buf_reset(&h->window);
    h->at = 0;
    h->is_started = h->is_paused = h->has_ended = 0;
    mb_err_clear(&h->err);
    h->plan.offset = offset;
    atomic_store(&s->done_bytes, offset);
    return rc;
}

static void http_cancel(struct mb_stream *s)
{
    struct http_stream *h = (struct http_stream *)s;

    atomic_store(&h->is_cancelled, 1);
    uv_async_send(&h->wake);
}

static void http_close(struct mb_stream *s)
{
    struct http_stream *h = (struct http_stream *)s;

    stop_client(h);
    uv_close((uv_handle_t *)&h->timer, NULL);
    uv_close((uv_handle_t *)&h->wake, NULL);
    uv_run(&h->loop, UV_RUN_DEFAULT);
    uv_loop_close(&h->loop);
    mb_buf_close(&h->window);
    mb_free(h->name);
    mb_free(h->url);
    mb_free(h);
}

int mb_stream_http_open(const char *url, uint64_t outage_ms, struct mb_stream **out,
                        struct mb_err *err)
{
    static const struct mb_stream_ops ops = {http_read, http_seek, http_cancel, http_close};
    struct http_stream *h = mb_calloc(1, sizeof(*h));
    int rc;

    if (h == NULL || (h->url = mb_strdup(url)) == NULL ||
        (h->name = mb_source_public_name(url)) == NULL || uv_loop_init(&h->loop) != 0) {
        if (h != NULL) {
            mb_free(h->name);
            mb_free(h->url);
        }
        mb_free(h);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    h->base.ops = &ops;
    mb_http_plan_init(&h->plan, 0, outage_ms);
    uv_async_init(&h->loop, &h->wake, on_wake);
    uv_timer_init(&h->loop, &h->timer);
    h->timer.data = h;
    rc = mb_http_client_create(&h->loop, 1, &h->client, err);
    if (rc != 0) {
        http_close(&h->base);
        return rc;
    }
    *out = &h->base;
    return 0;
}

/* ---- identity ---- */

/* Without reading the body: the first answer of a stream that is closed at once. */
int mb_stream_http_identity(const char *url, struct mb_buf *out, struct mb_err *err)
{
    struct mb_stream *s;
    struct http_stream *h;
    char byte;
    ssize_t got;
    int rc = mb_stream_http_open(url, IDENTITY_OUTAGE_MS, &s, err);

    if (rc != 0)
        return rc;
    h = (struct http_stream *)s;
    got = http_read(s, &byte, 1, err);
    if (got < 0)
        rc = (int)got;
    else if (h->plan.etag[0] == '\0' && (h->plan.modified[0] == '\0' || !h->plan.has_total))
        rc = mb_err_set(err, MB_EUNSUPPORTED, "the server names neither ETag nor date");
    else if (mb_buf_printf(out, "size=%llu etag=%s modified=%s",
                           (unsigned long long)h->plan.total_bytes, h->plan.etag,
                           h->plan.modified) != 0)
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    http_close(s);
    return rc;
}
