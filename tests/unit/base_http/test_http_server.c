/* The server over loopback, client and server on one loop. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>
#include <jansson.h>
#include "base/alloc.h"
#include "base/http/server.h"
#include "raw_client.h"

struct world {
    uv_loop_t loop;
    struct mb_http_server *srv;
    int port;
    int stopped;
    struct mb_http_req *held; /* a request to answer later */
    uv_timer_t timer;
    struct mb_ws *ws;
    int ws_closed;
    int ws_fill; /* queue short texts until they are refused */
    size_t ws_queued;
    struct mb_buf ws_text;
    size_t streamed; /* bytes of the streaming answer */
    unsigned stream_turn;
    int stream_freed;
    int stream_is_silent; /* it never has a byte to give */
    struct mb_buf body;   /* of a streamed upload */
    int body_error;
    int body_refuse_after;
    int body_pauses;  /* after each piece, for a turn of the loop or two */
    int body_is_hung; /* paused for good */
    unsigned n_pauses;
};

#define CLOSE_LINE "Connection: close\r\n"

static void on_hello(void *arg, struct mb_http_req *req)
{
    (void)arg;
    const char *q = mb_http_req_query(req, "q");
    mb_http_reply_header(req, "X-Test", "yes");
    mb_http_reply_text(req, 200, "hello %s q=%s", mb_http_req_param(req, "name"), q ? q : "-");
}

static void on_echo(void *arg, struct mb_http_req *req)
{
    size_t n;
    (void)arg;
    const char *body = mb_http_req_body(req, &n);
    assert_int_equal(strlen(body), n);
    mb_http_reply_json(req, 200, json_pack("{s:s%}", "body", body, n));
}

static void on_hold(void *arg, struct mb_http_req *req)
{
    struct world *w = arg;
    w->held = req;
}

static void on_body_wake(uv_timer_t *t)
{
    struct world *w = t->data;

    mb_http_req_body_resume(w->held);
}

static int on_body_part(void *arg, struct mb_http_req *req, const void *p, size_t n, int error_code)
{
    struct world *w = arg;
    if (n > 0) {
        mb_buf_add(&w->body, p, n);
        if (w->body_pauses) {
            assert_false(
                uv_is_active((uv_handle_t *)&w->timer)); /* else this piece came too early */
            w->n_pauses++;
            w->held = req;
            w->timer.data = w;
            mb_http_req_body_pause(req);
            if (!w->body_is_hung)
                uv_timer_start(&w->timer, on_body_wake, 1, 0);
            return 0;
        }
        if (w->body_refuse_after && w->body.len >= (size_t)w->body_refuse_after) {
            mb_http_reply_text(req, 413, "too much");
            return MB_EFULL;
        }
        return 0;
    }
    w->body_error = error_code;
    mb_http_reply_text(req, error_code ? 400 : 200, "%zu", w->body.len);
    return 0;
}

static void on_upload(void *arg, struct mb_http_req *req)
{
    mb_http_req_body_cb(req, on_body_part, arg);
}

enum { STREAM_BYTES = 3 * 1024 * 1024 };

static void on_wake(uv_timer_t *t)
{
    mb_http_resume(t->data);
}

/* Says "not now" every other time and is woken by a timer. */
static long pull_some(void *arg, void *buf, size_t max)
{
    struct world *w = arg;
    if (w->stream_is_silent) {
        w->stream_turn++;
        return 0;
    }
    if (w->streamed == STREAM_BYTES)
        return MB_HTTP_PULL_END;
    if (w->stream_turn++ % 2 == 1) {
        uv_timer_start(&w->timer, on_wake, 0, 0);
        return 0;
    }
    size_t n = STREAM_BYTES - w->streamed < max ? STREAM_BYTES - w->streamed : max;
    memset(buf, 'x', n);
    w->streamed += n;
    return (long)n;
}

static void pull_freed(void *arg)
{
    struct world *w = arg;
    w->stream_freed++;
}

static void on_stream(void *arg, struct mb_http_req *req)
{
    struct world *w = arg;
    w->timer.data = req;
    mb_http_reply_stream(req, 200, "text/plain", pull_some, pull_freed, w);
}

static void on_ws_text(void *arg, struct mb_ws *ws, const char *text, size_t n)
{
    struct world *w = arg;
    struct mb_err err;
    mb_buf_add(&w->ws_text, text, n);
    assert_int_equal(mb_ws_send_text(ws, text, n, &err), 0);
}

static void on_ws_close(void *arg, struct mb_ws *ws)
{
    struct world *w = arg;
    assert_ptr_equal(w->ws, ws);
    w->ws = NULL;
    w->ws_closed++;
}

static void on_ws(void *arg, struct mb_http_req *req)
{
    static const struct mb_ws_ops ops = {NULL, on_ws_text, on_ws_close};
    struct world *w = arg;
    struct mb_err err;
    int rc = mb_http_upgrade(req, &ops, w, &w->ws, &err);
    assert_true((rc == 0) == (w->ws != NULL));
    if (!w->ws_fill)
        return;
    while ((rc = mb_ws_send_text(w->ws, "x", 1, &err)) == 0)
        w->ws_queued++;
    assert_int_equal(rc, MB_EFULL);
}

static const struct mb_http_route routes[] = {
    {"GET", "/hello/{name}", on_hello, 0},
    {"POST", "/echo", on_echo, 0},
    {"GET", "/hold", on_hold, 0},
    {"PUT", "/upload", on_upload, MB_HTTP_BODY_STREAM},
    {"GET", "/stream", on_stream, 0},
    {"GET", "/ws", on_ws, MB_HTTP_WEBSOCKET},
    {"GET", "/public/{name}", on_hello, MB_HTTP_PUBLIC},
    {"*", "/open/{name}", on_hello, MB_HTTP_PUBLIC},
    {"POST", "/door/{name}", on_hello, MB_HTTP_PUBLIC | MB_HTTP_BROWSER},
};

static int is_second; /* all clients come through the second listener */

static void world_open(struct world *w, const struct mb_http_server_opts *opts)
{
    struct mb_http_server_opts o = *opts;
    struct mb_err err;
    memset(w, 0, sizeof *w);
    uv_loop_init(&w->loop);
    uv_timer_init(&w->loop, &w->timer);
    if (is_second) {
        o.bind_addr = "127.0.0.2";
        o.is_local_too = 1;
    }
    assert_int_equal(mb_http_server_create(&w->loop, &o, &w->srv, &err), 0);
    assert_int_equal(mb_http_server_add(w->srv, routes, sizeof routes / sizeof *routes, w, &err),
                     0);
    assert_int_equal(mb_http_server_listen(w->srv, &w->port, &err), 0);
}

static void on_stopped(void *arg)
{
    struct world *w = arg;
    w->stopped++;
}

static void world_free(struct world *w)
{
    uv_close((uv_handle_t *)&w->timer, NULL);
    uv_run(&w->loop, UV_RUN_DEFAULT);
    assert_int_equal(w->stopped, 1);
    mb_http_server_destroy(w->srv);
    mb_buf_close(&w->ws_text);
    mb_buf_close(&w->body);
    assert_int_equal(uv_loop_close(&w->loop), 0);
}

static void world_close(struct world *w)
{
    mb_http_server_stop(w->srv, on_stopped, w);
    assert_int_equal(w->stopped, 0); /* never from inside */
    world_free(w);
}

/* Sends a request and checks status line and, when given, a piece of the answer. */
static void expect(struct world *w, const char *request, const char *status, const char *piece)
{
    struct mb_buf out;
    raw_exchange(&w->loop, w->port, request, &out);
    char want[64];
    snprintf(want, sizeof want, "HTTP/1.1 %s ", status);
    if (strncmp(mb_buf_str(&out), want, strlen(want)) != 0 ||
        (piece && !strstr(mb_buf_str(&out), piece)))
        fail_msg("request:\n%s\nanswer:\n%s", request, mb_buf_str(&out));
    mb_buf_close(&out);
}

static void test_routes_and_errors(void **state)
{
    struct world w;
    (void)state;
    world_open(&w, &(struct mb_http_server_opts){0});
    expect(&w, "GET /hello/a%2Fb?q=1+2 HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "\r\n", "200",
           "hello a/b q=1 2");
    expect(&w, "GET /hello/x HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "\r\n", "200", "X-Test: yes");
    expect(&w, "GET /nope HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "\r\n", "404",
           "\r\n\r\n404: Not Found");
    expect(&w, "DELETE /echo HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "\r\n", "405",
           "\r\n\r\n405: Method Not Allowed");
    expect(&w, "DELETE /echo HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "\r\n", "405", "Allow: POST");
    expect(&w, "GET /a%00b HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "\r\n", "400", "400: Bad Request");
    expect(&w, "POST /echo HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "Content-Length: 5\r\n\r\nhallo",
           "200", "{\"body\": \"hallo\"}");
    expect(&w,
           "POST /echo HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE
           "Transfer-Encoding: chunked\r\n\r\n3\r\nhal\r\n2\r\nlo\r\n0\r\n\r\n",
           "200", "{\"body\": \"hallo\"}");
    struct mb_buf out;
    raw_exchange(&w.loop, w.port, "HEAD /hello/x HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "\r\n", &out);
    assert_non_null(strstr(mb_buf_str(&out), "Content-Length: 11\r\n"));
    assert_null(strstr(mb_buf_str(&out), "hello"));
    mb_buf_close(&out);
    world_close(&w);
}

static void test_limits(void **state)
{
    struct world w;
    struct mb_buf request = {0};
    struct mb_buf out;
    (void)state;
    world_open(&w, &(struct mb_http_server_opts){.max_body_bytes = 10});
    expect(&w,
           "POST /echo HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "Content-Length: 11\r\n\r\n"
           "12345678901",
           "413", "Maximum request body size 10 exceeded.");
    expect(&w,
           "POST /echo HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE
           "Transfer-Encoding: chunked\r\n\r\n8\r\n12345678\r\n8\r\n12345678\r\n0\r\n\r\n",
           "413", "exceeded");
    expect(&w,
           "POST /echo HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
           "Content-Length: 999999999999\r\n\r\n",
           "413", "exceeded");
    /* A header block beyond 64 KiB. */
    mb_buf_puts(&request, "GET /hello/x HTTP/1.1\r\nHost: x\r\nX-Long: ");
    for (int i = 0; i < 20000; i++)
        mb_buf_puts(&request, "0123456789");
    mb_buf_puts(&request, "\r\n\r\n");
    raw_exchange(&w.loop, w.port, mb_buf_str(&request), &out);
    assert_true(out.len == 0 || strncmp(mb_buf_str(&out), "HTTP/1.1 4", 10) == 0);
    mb_buf_close(&out);
    mb_buf_close(&request);
    world_close(&w);
}

static void test_guards(void **state)
{
    struct world w;
    (void)state;
    world_open(&w, &(struct mb_http_server_opts){.token = "t0k", .browser_guard_status = 405});
    expect(&w, "GET /hello/x HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "\r\n", "401",
           "Unauthorized: Missing authentication token");
    expect(&w, "GET /nope HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "\r\n", "401", NULL);
    expect(&w, "GET /public/x HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "\r\n", "200", "hello x");
    /* Public is the path: another method of it needs no token to be told that there is none. */
    expect(&w, "PUT /public/x HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "\r\n", "405",
           "405: Method Not Allowed");
    expect(&w, "PUT /hello/x HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "\r\n", "401", NULL);
    expect(&w, "PUT /open/x HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "\r\n", "200", "hello x");
    expect(&w, "PUT /open/x HTTP/1.1\r\nHost: x\r\nOrigin: http://e\r\n" CLOSE_LINE "\r\n", "405",
           "'PUT' method not allowed for browser traffic.");
    expect(&w, "POST /door/x HTTP/1.1\r\nHost: x\r\nOrigin: http://e\r\n" CLOSE_LINE "\r\n", "200",
           "hello x");
    expect(&w,
           "GET /hello/x HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer nope\r\n" CLOSE_LINE "\r\n",
           "403", "Forbidden: Invalid authentication token");
    expect(&w,
           "GET /hello/x HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t0k\r\n" CLOSE_LINE "\r\n",
           "200", "hello x");
    expect(&w,
           "POST /echo HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t0k\r\nOrigin: http://e\r\n"
           "Content-Length: 2\r\n" CLOSE_LINE "\r\nab",
           "405", "'POST' method not allowed for browser traffic.");
    world_close(&w);
}

static void test_answer_later(void **state)
{
    struct world w;
    struct raw_client c;
    static const char request[] = "GET /hold HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "\r\n";
    (void)state;
    world_open(&w, &(struct mb_http_server_opts){0});
    raw_client_start(&w.loop, &c, w.port, request, sizeof request - 1);
    while (!w.held)
        uv_run(&w.loop, UV_RUN_ONCE);
    mb_http_reply_text(w.held, 200, "late");
    raw_client_finish(&c);
    assert_non_null(strstr(mb_buf_str(&c.in), "late"));
    raw_client_free(&c);
    world_close(&w);
}

static void test_stop_with_unanswered(void **state)
{
    struct world w;
    struct raw_client c;
    static const char request[] = "GET /hold HTTP/1.1\r\nHost: held\r\n\r\n";
    (void)state;
    world_open(&w, &(struct mb_http_server_opts){0});
    raw_client_start(&w.loop, &c, w.port, request, sizeof request - 1);
    while (!w.held)
        uv_run(&w.loop, UV_RUN_ONCE);
    world_close(&w);
    assert_string_equal(mb_http_req_header(w.held, "host"), "held"); /* still readable */
    mb_http_reply_text(w.held, 200, "too late");                     /* frees it */
    assert_int_equal(c.in.len, 0);
    mb_buf_close(&c.in);
    mb_buf_close(&c.out);
}

static void test_streamed_upload(void **state)
{
    struct world w;
    struct mb_buf request = {0};
    struct mb_buf out;
    (void)state;
    world_open(&w, &(struct mb_http_server_opts){.max_body_bytes = 10});
    mb_buf_puts(&request,
                "PUT /upload HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "Content-Length: 1000000\r\n\r\n");
    for (int i = 0; i < 100000; i++)
        mb_buf_puts(&request, "0123456789");
    raw_exchange(&w.loop, w.port, mb_buf_str(&request), &out);
    assert_non_null(strstr(mb_buf_str(&out), "\r\n\r\n1000000"));
    mb_buf_close(&out);
    /* Refused in the middle: the rest is dropped, the answer arrives. */
    mb_buf_reset(&w.body);
    w.body_refuse_after = 5000;
    raw_exchange(&w.loop, w.port, mb_buf_str(&request), &out);
    assert_non_null(strstr(mb_buf_str(&out), "413"));
    assert_non_null(strstr(mb_buf_str(&out), "too much"));
    mb_buf_close(&out);
    mb_buf_close(&request);
    /* The client goes away in the middle. */
    static const char half[] = "PUT /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf";
    struct raw_client c;
    mb_buf_reset(&w.body);
    w.body_refuse_after = 0;
    raw_client_start(&w.loop, &c, w.port, half, sizeof half - 1);
    while (w.body.len < 4)
        uv_run(&w.loop, UV_RUN_ONCE);
    raw_client_free(&c);
    while (w.body_error == 0)
        uv_run(&w.loop, UV_RUN_ONCE);
    assert_int_equal(w.body_error, MB_EUNAVAIL);
    world_close(&w);
}

/* Whoever takes slowly is not given more than he takes; the bytes are all there in the end. */
static void test_paused_upload(void **state)
{
    static const char *const heads[] = {"Content-Length: 1000000", "Transfer-Encoding: chunked"};
    struct world w;
    (void)state;
    world_open(&w, &(struct mb_http_server_opts){.max_body_bytes = 10});
    w.body_pauses = 1;
    for (int chunked = 0; chunked < 2; chunked++) {
        struct mb_buf request = {0}, out;
        mb_buf_printf(&request, "PUT /upload HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "%s\r\n\r\n",
                      heads[chunked]);
        for (int i = 0; i < 1000; i++) {
            mb_buf_puts(&request, chunked ? "3e8\r\n" : "");
            for (int k = 0; k < 100; k++)
                mb_buf_printf(&request, "%010d", i * 100 + k);
            mb_buf_puts(&request, chunked ? "\r\n" : "");
        }
        mb_buf_puts(&request, chunked ? "0\r\n\r\n" : "");
        mb_buf_reset(&w.body);
        w.n_pauses = 0;
        raw_exchange(&w.loop, w.port, mb_buf_str(&request), &out);
        assert_non_null(strstr(mb_buf_str(&out), "\r\n\r\n1000000"));
        assert_true(w.n_pauses >= 1000000 / 65536);
        for (int i = 0; i < 100000; i++) {
            char expected[16];
            snprintf(expected, sizeof expected, "%010d", i);
            assert_memory_equal(w.body.data + 10 * (size_t)i, expected, 10);
        }
        mb_buf_close(&out);
        mb_buf_close(&request);
    }
    world_close(&w);
}

/* The client goes away, or the server stops, while nothing is taken. */
static void test_paused_for_good(void **state)
{
    static const char half[] = "PUT /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf";
    struct raw_client c;
    struct world w;
    (void)state;
    for (int stops = 0; stops < 2; stops++) {
        world_open(&w, &(struct mb_http_server_opts){.idle_timeout_ms = 2000});
        w.body_pauses = w.body_is_hung = 1;
        raw_client_start(&w.loop, &c, w.port, half, sizeof half - 1);
        while (w.body.len < 4)
            uv_run(&w.loop, UV_RUN_ONCE);
        raw_client_send(&c, " and more", 9);
        for (int i = 0; i < 20; i++)
            uv_run(&w.loop, UV_RUN_NOWAIT);
        assert_int_equal(w.body.len, 4);
        if (!stops) {
            raw_client_free(&c);
            while (w.body_error == 0)
                uv_run(&w.loop, UV_RUN_ONCE);
            assert_int_equal(w.body.len, 4);
        }
        world_close(&w);
        assert_int_equal(w.body_error, MB_EUNAVAIL);
        if (stops)
            raw_client_free(&c);
    }
}

static void test_streamed_answer(void **state)
{
    struct world w;
    struct mb_buf out;
    (void)state;
    world_open(&w, &(struct mb_http_server_opts){0});
    raw_exchange(&w.loop, w.port, "GET /stream HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "\r\n", &out);
    size_t n = 0;
    for (size_t i = 0; i < out.len; i++)
        n += out.data[i] == 'x';
    assert_int_equal(n, STREAM_BYTES + 1); /* one in "text/plain" */
    assert_non_null(strstr(mb_buf_str(&out) + out.len - 6, "0\r\n\r\n"));
    assert_int_equal(w.stream_freed, 1);
    mb_buf_close(&out);
    world_close(&w);
}

/* A client that sends half a request and then nothing is cut off. */
static void test_idle_connection(void **state)
{
    struct world w;
    struct raw_client c;
    static const char half[] = "GET /hello/x HTTP/1.1\r\nHost";
    (void)state;
    world_open(&w, &(struct mb_http_server_opts){.idle_timeout_ms = 1000});
    raw_client_start(&w.loop, &c, w.port, half, sizeof half - 1);
    raw_client_finish(&c);
    raw_client_free(&c);
    world_close(&w);
}

/* Nothing is sent, so that only looking at the socket tells that its client is gone. */
static void test_client_goes_away(void **state)
{
    static const char stream[] = "GET /stream HTTP/1.1\r\nHost: x\r\n\r\n";
    static const char hold[] = "GET /hold HTTP/1.1\r\nHost: x\r\n\r\n";
    struct world w;
    struct raw_client c;
    (void)state;
    world_open(&w, &(struct mb_http_server_opts){.idle_timeout_ms = 2000});
    w.stream_is_silent = 1;
    raw_client_start(&w.loop, &c, w.port, stream, sizeof stream - 1);
    while (!w.stream_turn)
        uv_run(&w.loop, UV_RUN_ONCE);
    raw_client_free(&c);
    while (!w.stream_freed)
        uv_run(&w.loop, UV_RUN_ONCE);
    raw_client_start(&w.loop, &c, w.port, hold, sizeof hold - 1);
    while (!w.held)
        uv_run(&w.loop, UV_RUN_ONCE);
    raw_client_free(&c);
    world_close(&w);
    mb_http_reply_text(w.held, 200, "too late"); /* the answer is owed all the same */
    assert_int_equal(w.stream_freed, 1);
}

static void on_drip(uv_timer_t *t)
{
    struct raw_client *c = t->data;
    uv_buf_t buf = uv_buf_init("a", 1);
    if (!uv_is_closing((uv_handle_t *)&c->tcp))
        (void)uv_try_write((uv_stream_t *)&c->tcp, &buf, 1);
}

/* A byte now and then is no request: the connection ends. */
static void test_slow_header(void **state)
{
    static const char begin[] = "GET /hello/x HTTP/1.1\r\nX-Slow: ";
    struct world w;
    struct raw_client c;
    (void)state;
    world_open(&w, &(struct mb_http_server_opts){.idle_timeout_ms = 200});
    raw_client_start(&w.loop, &c, w.port, begin, sizeof begin - 1);
    w.timer.data = &c;
    uv_timer_start(&w.timer, on_drip, 20, 20);
    raw_client_finish(&c);
    uv_timer_stop(&w.timer);
    raw_client_free(&c);
    world_close(&w);
}

static void on_too_late(uv_timer_t *t)
{
    (void)t;
    fail_msg("the waiting client was not served");
}

/* Who waited for a place gets it when another leaves, without anything else happening. */
static void test_connection_limit(void **state)
{
    static const char request[] = "GET /hello/x HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "\r\n";
    struct world w;
    struct raw_client quiet[2];
    struct raw_client waiting;
    (void)state;
    world_open(&w, &(struct mb_http_server_opts){.max_connections = 2});
    for (int i = 0; i < 2; i++) {
        static const char first[] = "GET /hello/x HTTP/1.1\r\nHost: x\r\n\r\n";
        raw_client_start(&w.loop, &quiet[i], w.port, first, sizeof first - 1);
        while (!strstr(mb_buf_str(&quiet[i].in), "hello x"))
            uv_run(&w.loop, UV_RUN_ONCE);
    }
    raw_client_start(&w.loop, &waiting, w.port, request, sizeof request - 1);
    for (int i = 0; i < 20; i++)
        uv_run(&w.loop, UV_RUN_NOWAIT);
    assert_int_equal(waiting.in.len, 0);
    raw_client_free(&quiet[0]);
    uv_timer_start(&w.timer, on_too_late, 60000, 0);
    raw_client_finish(&waiting);
    uv_timer_stop(&w.timer);
    assert_non_null(strstr(mb_buf_str(&waiting.in), "hello x"));
    raw_client_free(&waiting);
    raw_client_free(&quiet[1]);
    world_close(&w);
}

/* Nobody is kept out by connections that only wait: the one that waited longest has to go. */
static void test_idle_connections_make_room(void **state)
{
    static const char request[] = "GET /hello/x HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "\r\n";
    enum { N = 48 };
    static struct raw_client idle[N];
    struct world w;
    struct raw_client c;
    int n_ended = 0;
    (void)state;
    world_open(&w, &(struct mb_http_server_opts){.max_connections = 32});
    for (int i = 0; i < N; i++) {
        raw_client_start(&w.loop, &idle[i], w.port, "GET", 3);
        for (int k = 0; k < 10; k++)
            uv_run(&w.loop, UV_RUN_NOWAIT);
    }
    uv_timer_start(&w.timer, on_too_late, 60000, 0);
    raw_client_start(&w.loop, &c, w.port, request, sizeof request - 1);
    raw_client_finish(&c);
    uv_timer_stop(&w.timer);
    assert_non_null(strstr(mb_buf_str(&c.in), "hello x"));
    raw_client_free(&c);
    for (int i = 0; i < N; i++) {
        n_ended += idle[i].done;
        assert_true(i == 0 || idle[i].done <= idle[i - 1].done); /* the oldest first */
    }
    assert_in_range(n_ended, N - 31, N - 29);
    for (int i = 0; i < N; i++)
        raw_client_free(&idle[i]);
    world_close(&w);
}

#define WS_HEAD                                                                                    \
    "GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"

static void test_websocket(void **state)
{
    struct world w;
    struct raw_client c;
    /* The key and its answer are the example of RFC 6455 section 1.3; the frame that follows the
     * request at once is "Hi" under the mask 01 02 03 04. */
    static const char request[] = WS_HEAD "Sec-WebSocket-Version: 13\r\n"
                                          "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
                                          "\x81\x82\x01\x02\x03\x04\x49\x6b";
    static const char bye[] = "\x88\x82\x00\x00\x00\x00\x03\xe8";
    (void)state;
    world_open(&w, &(struct mb_http_server_opts){0});
    raw_client_start(&w.loop, &c, w.port, request, sizeof request - 1);
    while (!w.ws_text.len)
        uv_run(&w.loop, UV_RUN_ONCE);
    assert_string_equal(mb_buf_str(&w.ws_text), "Hi");
    while (!strstr(mb_buf_str(&c.in), "\x81\x02Hi"))
        uv_run(&w.loop, UV_RUN_ONCE);
    assert_non_null(strstr(mb_buf_str(&c.in), "HTTP/1.1 101 Switching Protocols\r\n"));
    assert_non_null(
        strstr(mb_buf_str(&c.in), "Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n"));
    mb_ws_close(w.ws, 1000, "done");
    raw_client_send(&c, bye, sizeof bye - 1);
    raw_client_finish(&c);
    assert_non_null(memmem(c.in.data, c.in.len,
                           "\x88\x06\x03\xe8"
                           "done",
                           8));
    assert_int_equal(w.ws_closed, 1);
    raw_client_free(&c);
    /* One more stays open: the stop says 1001 and closes it. */
    raw_client_start(&w.loop, &c, w.port, request, sizeof request - 1);
    while (!strstr(mb_buf_str(&c.in), "\x81\x02Hi"))
        uv_run(&w.loop, UV_RUN_ONCE);
    mb_http_server_stop(w.srv, on_stopped, &w);
    raw_client_finish(&c);
    assert_non_null(memmem(c.in.data, c.in.len, "\x88\x0e\x03\xe9", 4));
    while (!w.stopped)
        uv_run(&w.loop, UV_RUN_ONCE);
    assert_int_equal(w.ws_closed, 2);
    raw_client_free(&c);
    world_free(&w);
}

#define WS_REQUEST                                                                                 \
    WS_HEAD "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"

/* What waits is bounded in memory, however short the texts are. */
static void test_websocket_short_texts(void **state)
{
    struct world w;
    struct raw_client c;
    (void)state;
    world_open(&w, &(struct mb_http_server_opts){0});
    w.ws_fill = 1;
    raw_client_start(&w.loop, &c, w.port, WS_REQUEST, sizeof WS_REQUEST - 1);
    while (w.ws_queued == 0)
        uv_run(&w.loop, UV_RUN_ONCE);
    assert_in_range(w.ws_queued, 1000, 16384);
    raw_client_free(&c);
    world_close(&w);
}

/* A peer that asks for pongs and reads none of them is not read any more. */
static void test_websocket_pings_unread(void **state)
{
    enum { PING_BYTES = 131, N_PINGS = 500, LIMIT_BYTES = 64 * 1024 * 1024, QUIET_TURNS = 200 };
    static char pings[N_PINGS * PING_BYTES]; /* masked with zeroes, 125 bytes each */
    struct world w;
    struct raw_client c;
    size_t sent = 0;
    int quiet = 0;
    (void)state;
    for (size_t i = 0; i < N_PINGS; i++)
        memcpy(pings + i * PING_BYTES, "\x89\xfd", 2);
    world_open(&w, &(struct mb_http_server_opts){0});
    raw_client_start(&w.loop, &c, w.port, WS_REQUEST, sizeof WS_REQUEST - 1);
    while (c.in.len == 0)
        uv_run(&w.loop, UV_RUN_ONCE);
    uv_read_stop((uv_stream_t *)&c.tcp);
    while (sent < LIMIT_BYTES && quiet < QUIET_TURNS) {
        size_t at = sent % sizeof pings;
        uv_buf_t buf = uv_buf_init(pings + at, (unsigned)(sizeof pings - at));
        int n = uv_try_write((uv_stream_t *)&c.tcp, &buf, 1);
        quiet = n > 0 ? 0 : quiet + 1;
        sent += n > 0 ? (size_t)n : 0;
        uv_run(&w.loop, UV_RUN_NOWAIT);
    }
    assert_true(sent < LIMIT_BYTES);
    /* It reads again, and is answered again. */
    size_t before = c.in.len;
    raw_client_read_on(&c);
    while (c.in.len < before + sent / PING_BYTES * 127)
        uv_run(&w.loop, UV_RUN_ONCE);
    raw_client_free(&c);
    world_close(&w);
}

static void test_websocket_refusals(void **state)
{
    struct world w;
    (void)state;
    world_open(&w, &(struct mb_http_server_opts){0});
    expect(&w, "GET /ws HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "\r\n", "400",
           "this path is a WebSocket");
    expect(&w,
           "GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade, close\r\n"
           "Sec-WebSocket-Version: 8\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
           "426", "Sec-WebSocket-Version: 13");
    expect(&w,
           "GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade, close\r\n"
           "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: short\r\n\r\n",
           "400", "Sec-WebSocket-Key");
    world_close(&w);
}

/* Any single allocation may fail: the client gets an answer or a closed connection, nothing leaks.
 */
static void test_allocation_failures(void **state)
{
    struct world w;
    (void)state;
    world_open(&w, &(struct mb_http_server_opts){0});
    for (unsigned long nth = 1;; nth++) {
        struct raw_client c;
        static const char request[] =
            "POST /echo?a=b HTTP/1.1\r\nHost: x\r\n" CLOSE_LINE "Content-Length: 5\r\n\r\nhallo";
        raw_client_start(&w.loop, &c, w.port, request, sizeof request - 1);
        mb_buf_reserve(&c.in, 4096); /* the client itself must not fail */
        mb_alloc_fail_nth(nth);
        raw_client_finish(&c);
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        int ok = strstr(mb_buf_str(&c.in), "hallo") != NULL;
        raw_client_free(&c);
        if (!failed) {
            assert_true(ok);
            break;
        }
    }
    world_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_routes_and_errors),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_guards),
        cmocka_unit_test(test_answer_later),
        cmocka_unit_test(test_stop_with_unanswered),
        cmocka_unit_test(test_streamed_upload),
        cmocka_unit_test(test_paused_upload),
        cmocka_unit_test(test_paused_for_good),
        cmocka_unit_test(test_streamed_answer),
        cmocka_unit_test(test_idle_connection),
        cmocka_unit_test(test_client_goes_away),
        cmocka_unit_test(test_slow_header),
        cmocka_unit_test(test_connection_limit),
        cmocka_unit_test(test_idle_connections_make_room),
        cmocka_unit_test(test_websocket),
        cmocka_unit_test(test_websocket_short_texts),
        cmocka_unit_test(test_websocket_pings_unread),
        cmocka_unit_test(test_websocket_refusals),
        cmocka_unit_test(test_allocation_failures),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);

    is_second = 1;
    return failed + cmocka_run_group_tests_name("at the second address", tests, NULL, NULL);
}
