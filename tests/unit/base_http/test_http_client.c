/* The client against our own server, on one loop. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/loop.h"
#include "base/alloc.h"
#include "base/http/client.h"
#include "base/http/server.h"

struct world {
    uv_loop_t loop;
    uv_timer_t ticker; /* UV_RUN_ONCE must return after progress that only a timer made */
    struct mb_http_server *srv;
    struct mb_http_client *client;
    int port;
    int n_stopped;
    struct mb_http_req *held;
    /* the last answer */
    int n_answers;
    int error;
    long status;
    struct mb_buf body;
    char type[64];
    struct mb_buf sunk;
    int sink_refuses;
    /* WebSocket */
    struct mb_ws *ws;
    size_t to_send;
    size_t sent;
    struct mb_buf text;
    int n_ends;
    int end_status;
    long end_http;
    char end_detail[128];
};

static void on_echo(void *arg, struct mb_http_req *req)
{
    size_t n;
    (void)arg;
    const void *p = mb_http_req_body(req, &n);
    mb_http_reply(req, 200, "application/x-echo", p, n);
}

static void on_hold(void *arg, struct mb_http_req *req)
{
    struct world *w = arg;
    w->held = req;
}

static void on_moved(void *arg, struct mb_http_req *req)
{
    (void)arg;
    mb_http_reply_header(req, "Location", "/echo");
    mb_http_reply_text(req, 302, "moved");
}

/* Three-byte characters, so that frames and reads cut them. */
static void send_more(void *arg, struct mb_ws *ws)
{
    struct world *w = arg;
    struct mb_err err;
    static char block[30000];
    for (size_t i = 0; i < sizeof block; i += 3)
        memcpy(block + i, "\xe2\x82\xac", 3);
    while (w->sent < w->to_send) {
        /* 20000 is no multiple of 3: each send ends inside a character. */
        int rc = mb_ws_send_text(ws, block + w->sent % 3, 20000, &err);
        if (rc == MB_EFULL)
            return;
        assert_int_equal(rc, 0);
        w->sent += 20000;
    }
    mb_ws_close(ws, 1000, "end");
}

static void on_ws_close(void *arg, struct mb_ws *ws)
{
    struct world *w = arg;
    (void)ws;
    w->ws = NULL;
}

static void on_ws(void *arg, struct mb_http_req *req)
{
    static const struct mb_ws_ops ops = {send_more, NULL, on_ws_close};
    struct world *w = arg;
    struct mb_err err;
    assert_int_equal(mb_http_upgrade(req, &ops, w, &w->ws, &err), 0);
    send_more(w, w->ws);
}

/* Whatever cannot be allocated: the connection ends, and nothing else. */
static void on_small_ws(void *arg, struct mb_http_req *req)
{
    static const struct mb_ws_ops ops = {NULL, NULL, on_ws_close};
    struct world *w = arg;
    struct mb_err err;
    if (mb_http_upgrade(req, &ops, w, &w->ws, &err) != 0)
        return;
    if (mb_ws_send_text(w->ws, "one line", 8, &err) != 0)
        mb_ws_close(w->ws, 1011, "out of memory");
    else
        mb_ws_close(w->ws, 1000, "end");
}

static void on_no_ws(void *arg, struct mb_http_req *req)
{
    (void)arg;
    mb_http_reply_text(req, 404, "Job nope does not exist");
}

static const struct mb_http_route routes[] = {
    {"GET", "/echo", on_echo, 0},   {"POST", "/echo", on_echo, 0},
    {"PUT", "/echo", on_echo, 0},   {"GET", "/hold", on_hold, 0},
    {"GET", "/moved", on_moved, 0}, {"GET", "/ws", on_ws, 0},
    {"GET", "/no-ws", on_no_ws, 0}, {"GET", "/small-ws", on_small_ws, 0},
};

static void on_tick(uv_timer_t *t)
{
    (void)t;
}

static void world_open(struct world *w)
{
    struct mb_err err;
    struct mb_http_server_opts opts = {.max_body_bytes = 4 * 1024 * 1024};
    memset(w, 0, sizeof *w);
    uv_loop_init(&w->loop);
    uv_timer_init(&w->loop, &w->ticker);
    uv_timer_start(&w->ticker, on_tick, 5, 5);
    assert_int_equal(mb_http_server_create(&w->loop, &opts, &w->srv, &err), 0);
    assert_int_equal(mb_http_server_add(w->srv, routes, sizeof routes / sizeof *routes, w, &err),
                     0);
    assert_int_equal(mb_http_server_listen(w->srv, &w->port, &err), 0);
    assert_int_equal(mb_http_client_create(&w->loop, 4, &w->client, &err), 0);
}

static void on_stopped(void *arg)
{
    struct world *w = arg;
    w->n_stopped++;
}

static void world_close(struct world *w)
{
    mb_http_client_stop(w->client, on_stopped, w);
    mb_http_server_stop(w->srv, on_stopped, w);
    assert_int_equal(w->n_stopped, 0);
    uv_close((uv_handle_t *)&w->ticker, NULL);
    uv_run(&w->loop, UV_RUN_DEFAULT);
    assert_int_equal(w->n_stopped, 2);
    if (w->held)
        mb_http_reply_text(w->held, 200, "late");
    mb_http_client_destroy(w->client);
    mb_http_server_destroy(w->srv);
    mb_buf_close(&w->body);
    mb_buf_close(&w->sunk);
    mb_buf_close(&w->text);
    assert_int_equal(uv_loop_close(&w->loop), 0);
}

static void on_answer(void *arg, const struct mb_http_response *r)
{
    struct world *w = arg;
    w->n_answers++;
    w->error = r->error;
    w->status = r->status;
    mb_buf_reset(&w->body);
    if (r->error == 0) {
        const char *type = r->header(r, "content-type");
        snprintf(w->type, sizeof w->type, "%s", type ? type : "");
        assert_null(r->header(r, "x-none"));
        mb_buf_add(&w->body, r->body, r->body_len);
    } else {
        assert_true(r->detail[0] != '\0');
    }
}

/* Runs one request to its end. */
static void fetch(struct world *w, const char *path, struct mb_http_request request)
{
    char url[128];
    struct mb_err err;
    snprintf(url, sizeof url, "http://127.0.0.1:%d%s", w->port, path);
    request.url = url;
    int before = w->n_answers;
    assert_int_equal(mb_http_fetch(w->client, &request, on_answer, w, NULL, &err), 0);
    assert_int_equal(w->n_answers, before);
    while (w->n_answers == before)
        mb_loop_turn(&w->loop);
}

static int sink(void *arg, const void *p, size_t n)
{
    struct world *w = arg;
    if (w->sink_refuses)
        return MB_EIO;
    return mb_buf_add(&w->sunk, p, n);
}

static void test_methods(void **state)
{
    struct world w;
    (void)state;
    world_open(&w);
    fetch(
        &w, "/echo",
        (struct mb_http_request){.method = "POST", .body = "hello", .body_len = 5, .body_fd = -1});
    assert_int_equal(w.error, 0);
    assert_int_equal(w.status, 200);
    assert_string_equal(mb_buf_str(&w.body), "hello");
    assert_string_equal(w.type, "application/x-echo");
    fetch(&w, "/echo", (struct mb_http_request){.method = "PUT", .body_fd = -1});
    assert_int_equal(w.status, 200);
    fetch(&w, "/echo", (struct mb_http_request){.method = "HEAD", .body_fd = -1});
    assert_int_equal(w.status, 200);
    fetch(&w, "/hold/../echo", (struct mb_http_request){.method = "GET", .body_fd = -1});
    assert_int_equal(w.status, 404); /* as it stands: no "/echo" is made of it */
    fetch(&w, "/none", (struct mb_http_request){.method = "GET", .body_fd = -1});
    assert_int_equal(w.status, 404);
    fetch(&w, "/moved", (struct mb_http_request){.method = "GET", .body_fd = -1});
    assert_int_equal(w.status, 302);
    fetch(&w, "/moved",
          (struct mb_http_request){.method = "GET", .body_fd = -1, .follow_redirects = 1});
    assert_int_equal(w.status, 200);
    world_close(&w);
}

static void test_file_body_and_sink(void **state)
{
    struct world w;
    char path[] = "/tmp/mobula-http-XXXXXX";
    int fd = mkstemp(path);
    struct mb_buf data = {0};
    (void)state;
    world_open(&w);
    for (int i = 0; i < 400000; i++)
        assert_int_equal(mb_buf_printf(&data, "%06d ", i), 0);
    assert_int_equal(write(fd, data.data, data.len), (ssize_t)data.len);
    struct mb_http_request request = {.method = "PUT",
                                      .body_fd = fd,
                                      .body_offset = 7,
                                      .body_len = data.len - 7,
                                      .sink = sink,
                                      .sink_arg = &w};
    fetch(&w, "/echo", request);
    assert_int_equal(w.status, 200);
    assert_int_equal(w.body.len, 0);
    assert_int_equal(w.sunk.len, data.len - 7);
    assert_memory_equal(w.sunk.data, data.data + 7, data.len - 7);
    w.sink_refuses = 1;
    fetch(&w, "/echo", request);
    assert_int_equal(w.error, MB_EIO);
    request.sink = NULL;
    request.max_body_bytes = 1000;
    fetch(&w, "/echo", request);
    assert_int_equal(w.error, MB_EFULL);
    request.body_len = data.len; /* more than the file has */
    fetch(&w, "/echo", request);
    assert_int_equal(w.error, MB_ESTATE);
    close(fd);
    unlink(path);
    mb_buf_close(&data);
    world_close(&w);
}

struct slow_sink {
    struct world *w;
    int n_heads;
    int n_pauses;
    int is_paused;
    int is_full; /* it takes what comes, and wants no more */
    size_t n_since_full;
    int refuses;
};

static int slow_head(void *arg, const struct mb_http_response *r)
{
    struct slow_sink *s = arg;
    s->n_heads++;
    assert_int_equal(r->status, 200);
    assert_string_equal(r->header(r, "Content-Type"), "application/x-echo");
    return s->refuses ? MB_ESTATE : 0;
}

/* Takes every second time only. */
static int slow_take(void *arg, const void *p, size_t n)
{
    struct slow_sink *s = arg;
    if (s->is_full) {
        s->n_since_full = s->is_paused ? s->n_since_full + n : 0;
        assert_true(s->n_since_full < MB_HTTP_READ_BYTES);
        s->n_pauses++;
        s->is_paused = 1;
        return mb_buf_add(&s->w->sunk, p, n) == 0 ? MB_HTTP_SINK_FULL : MB_ENOMEM;
    }
    s->is_paused = !s->is_paused;
    s->n_pauses += s->is_paused;
    return s->is_paused ? MB_HTTP_SINK_PAUSE : mb_buf_add(&s->w->sunk, p, n);
}

static void head_and_pause(int is_full)
{
    struct world w;
    struct slow_sink s = {.w = &w, .is_full = is_full};
    struct mb_buf data = {0};
    struct mb_http_fetch *f;
    struct mb_err err;
    char url[64];
    world_open(&w);
    for (int i = 0; i < 300000; i++)
        assert_int_equal(mb_buf_printf(&data, "%06d ", i), 0);
    snprintf(url, sizeof url, "http://127.0.0.1:%d/echo", w.port);
    struct mb_http_request request = {.method = "PUT",
                                      .url = url,
                                      .body_fd = -1,
                                      .body = data.data,
                                      .body_len = data.len,
                                      .sink = slow_take,
                                      .head = slow_head,
                                      .sink_arg = &s};
    assert_int_equal(mb_http_fetch(w.client, &request, on_answer, &w, &f, &err), 0);
    while (w.n_answers == 0) {
        mb_loop_turn(&w.loop);
        for (int i = 0; i < 3; i++) /* paused: nothing comes */
            uv_run(&w.loop, s.is_paused ? UV_RUN_NOWAIT : UV_RUN_ONCE);
        if (s.is_paused && w.n_answers == 0) {
            s.is_paused &= !is_full;
            mb_http_fetch_resume(f);
        }
    }
    assert_int_equal(w.error, 0);
    assert_int_equal(s.n_heads, 1);
    assert_true(s.n_pauses > 1);
    assert_int_equal(w.sunk.len, data.len);
    assert_memory_equal(w.sunk.data, data.data, data.len);
    s.refuses = 1;
    fetch(&w, "/echo", request);
    assert_int_equal(w.error, MB_ESTATE);
    mb_buf_close(&data);
    world_close(&w);
}

static void test_head_and_pause(void **state)
{
    (void)state;
    head_and_pause(0);
}

/* What it says after each piece: the last one, too, and the answer comes nevertheless. */
static void test_full(void **state)
{
    (void)state;
    head_and_pause(1);
}

static void test_no_way_round_a_proxy_but_when_asked(void **state)
{
    struct world w;
    (void)state;
    world_open(&w);
    unsetenv("no_proxy");
    unsetenv("NO_PROXY");
    assert_int_equal(setenv("http_proxy", "http://127.0.0.1:1", 1), 0); /* nobody is there */
    fetch(&w, "/echo", (struct mb_http_request){.method = "HEAD", .body_fd = -1});
    assert_int_equal(w.error, MB_EUNAVAIL);
    fetch(&w, "/echo", (struct mb_http_request){.method = "HEAD", .body_fd = -1, .is_direct = 1});
    assert_int_equal(w.error, 0);
    assert_int_equal(w.status, 200);
    unsetenv("http_proxy");
    world_close(&w);
}

/* No socket of client or server reaches a program that this one starts. */
static void test_sockets_close_at_exec(void **state)
{
    struct world w;
    struct mb_err err;
    char url[64];
    int n_inet = 0;
    (void)state;
    world_open(&w);
    snprintf(url, sizeof url, "http://127.0.0.1:%d/hold", w.port);
    struct mb_http_request request = {.method = "GET", .url = url, .body_fd = -1};
    assert_int_equal(mb_http_fetch(w.client, &request, on_answer, &w, NULL, &err), 0);
    while (!w.held)
        mb_loop_turn(&w.loop);
    for (int fd = 0; fd < 1024; fd++) {
        struct sockaddr_storage addr;
        socklen_t len = sizeof addr;
        if (getsockname(fd, (struct sockaddr *)&addr, &len) != 0 || addr.ss_family != AF_INET)
            continue;
        n_inet++;
        assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    }
    assert_true(n_inet >= 3); /* listening, and both ends of the request */
    world_close(&w);
}

static int receive_buffer(int fd)
{
    int size = 0;
    socklen_t len = sizeof size;
    assert_int_equal(getsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, &len), 0);
    return size;
}

/* Of the connection that a request makes in a client that wants so many bytes ahead. */
static int receive_buffer_of_request(int bytes)
{
    struct world w;
    struct mb_err err;
    char url[64];
    int size = 0;
    world_open(&w);
    mb_http_client_receive_ahead(w.client, bytes);
    snprintf(url, sizeof url, "http://127.0.0.1:%d/hold", w.port);
    struct mb_http_request request = {.method = "GET", .url = url, .body_fd = -1};
    assert_int_equal(mb_http_fetch(w.client, &request, on_answer, &w, NULL, &err), 0);
    while (!w.held)
        mb_loop_turn(&w.loop);
    for (int fd = 0; fd < 1024; fd++) {
        struct sockaddr_in peer;
        socklen_t len = sizeof peer;
        if (getpeername(fd, (struct sockaddr *)&peer, &len) == 0 && peer.sin_family == AF_INET &&
            ntohs(peer.sin_port) == w.port) {
            assert_int_equal(size, 0); /* no second one is left */
            assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
            size = receive_buffer(fd);
        }
    }
    world_close(&w);
    return size;
}

/* The size that was asked for, or the kernel's own: never one that was cut. */
static void test_receive_ahead(void **state)
{
    int too_much = 1 << 30, fd = socket(AF_INET, SOCK_STREAM, 0);
    (void)state;
    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &too_much, sizeof too_much), 0);
    int cut = receive_buffer(fd);
    close(fd);
    assert_int_equal(receive_buffer_of_request(50000), 100000);
    assert_int_equal(receive_buffer_of_request(cut / 2), cut);
    int own = receive_buffer_of_request(0);
    assert_int_not_equal(own, cut);
    assert_int_equal(receive_buffer_of_request(cut / 2 + 1), own);
}

static void test_failures(void **state)
{
    struct world w;
    struct mb_err err;
    struct mb_http_fetch *f;
    char url[64];
    (void)state;
    world_open(&w);
    fetch(&w, "/hold", (struct mb_http_request){.method = "GET", .body_fd = -1, .timeout_ms = 50});
    assert_int_equal(w.error, MB_ETIMEOUT);
    mb_http_reply_text(w.held, 200, "late");
    w.held = NULL;
    snprintf(url, sizeof url, "http://127.0.0.1:%d/hold", w.port);
    struct mb_http_request request = {.method = "GET", .url = url, .body_fd = -1};
    int before = w.n_answers;
    assert_int_equal(mb_http_fetch(w.client, &request, on_answer, &w, &f, &err), 0);
    while (!w.held)
        mb_loop_turn(&w.loop);
    mb_http_fetch_cancel(f);
    assert_int_equal(w.n_answers, before);
    while (w.n_answers == before)
        mb_loop_turn(&w.loop);
    assert_int_equal(w.error, MB_ECANCELED);
    mb_http_reply_text(w.held, 200, "late");
    w.held = NULL;
    request.url = "ftp://127.0.0.1/";
    assert_int_equal(mb_http_fetch(w.client, &request, on_answer, &w, NULL, &err), 0);
    while (w.n_answers == before + 1)
        mb_loop_turn(&w.loop);
    assert_int_equal(w.error, MB_EINVAL);
    /* In flight when the client stops. */
    request.url = url;
    assert_int_equal(mb_http_fetch(w.client, &request, on_answer, &w, NULL, &err), 0);
    while (!w.held)
        mb_loop_turn(&w.loop);
    world_close(&w);
    assert_int_equal(w.error, MB_ECANCELED);
    assert_int_equal(w.n_answers, before + 3);
}

static void on_ws_text(void *arg, const char *text, size_t n)
{
    struct world *w = arg;
    assert_int_equal(mb_buf_add(&w->text, text, n), 0);
}

static void on_ws_end(void *arg, int status_code, long http_status, const char *detail)
{
    struct world *w = arg;
    w->n_ends++;
    w->end_status = status_code;
    w->end_http = http_status;
    snprintf(w->end_detail, sizeof w->end_detail, "%s", detail);
}

static void ws_run(struct world *w, const char *path)
{
    static const struct mb_ws_client_ops ops = {.on_text = on_ws_text, .on_end = on_ws_end};
    char url[64];
    struct mb_err err;
    snprintf(url, sizeof url, "ws://127.0.0.1:%d%s", w->port, path);
    w->n_ends = 0;
    assert_int_equal(mb_ws_connect(&w->loop, url, NULL, &ops, w, NULL, &err), 0);
    while (!w->n_ends)
        mb_loop_turn(&w->loop);
}

static void test_websocket(void **state)
{
    struct world w;
    struct mb_err err;
    (void)state;
    world_open(&w);
    w.to_send = 9000000;
    ws_run(&w, "/ws");
    assert_int_equal(w.end_status, 1000);
    assert_int_equal(w.end_http, 0);
    assert_true(w.text.len >= 9000000);
    for (size_t i = 0; i + 3 <= w.text.len; i += 3)
        assert_memory_equal(w.text.data + i, "\xe2\x82\xac", 3);
    ws_run(&w, "/no-ws");
    assert_int_equal(w.end_status, 1006);
    assert_int_equal(w.end_http, 404);
    assert_string_equal(w.end_detail, "Job nope does not exist");
    assert_int_equal(mb_ws_connect(&w.loop, "wss://x/", NULL, NULL, NULL, NULL, &err),
                     MB_EUNSUPPORTED);
    assert_int_equal(mb_ws_connect(&w.loop, "nonsense", NULL, NULL, NULL, NULL, &err), MB_EINVAL);
    assert_int_equal(mb_ws_connect(&w.loop, "ws://:1/", NULL, NULL, NULL, NULL, &err), MB_EINVAL);
    world_close(&w);
}

static void test_websocket_closed_early(void **state)
{
    static const struct mb_ws_client_ops ops = {.on_text = on_ws_text, .on_end = on_ws_end};
    struct world w;
    struct mb_err err;
    struct mb_ws_client *ws;
    char url[64];
    (void)state;
    world_open(&w);
    w.to_send = 1000000000;
    snprintf(url, sizeof url, "http://127.0.0.1:%d/ws", w.port);
    assert_int_equal(mb_ws_connect(&w.loop, url, NULL, &ops, &w, &ws, &err), 0);
    mb_ws_client_close(ws);
    assert_int_equal(w.n_ends, 0);
    while (!w.n_ends)
        mb_loop_turn(&w.loop);
    assert_int_equal(mb_ws_connect(&w.loop, url, NULL, &ops, &w, &ws, &err), 0);
    while (w.text.len < 1000)
        mb_loop_turn(&w.loop);
    mb_ws_client_close(ws);
    while (w.n_ends < 2)
        mb_loop_turn(&w.loop);
    while (w.ws)
        mb_loop_turn(&w.loop);
    world_close(&w);
}

/* A failing allocation is an error of that request only. */
static void test_allocation_failures(void **state)
{
    struct world w;
    struct mb_err err;
    char url[64];
    (void)state;
    world_open(&w);
    mb_buf_reserve(&w.body, 4096);
    snprintf(url, sizeof url, "http://127.0.0.1:%d/echo", w.port);
    struct mb_http_request request = {.method = "POST",
                                      .url = url,
                                      .body = "x",
                                      .body_len = 1,
                                      .body_fd = -1,
                                      .timeout_ms = 5000};
    for (unsigned long nth = 1;; nth++) {
        int before = w.n_answers;
        mb_alloc_fail_nth(nth);
        int rc = mb_http_fetch(w.client, &request, on_answer, &w, NULL, &err);
        while (rc == 0 && w.n_answers == before)
            mb_loop_turn(&w.loop);
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (!failed) {
            assert_int_equal(w.status, 200);
            break;
        }
    }
    world_close(&w);
}

/* The same for a WebSocket, on both sides: every connection ends once, as a whole or not. */
static void test_websocket_allocation_failures(void **state)
{
    static const struct mb_ws_client_ops ops = {.on_text = on_ws_text, .on_end = on_ws_end};
    struct world w;
    struct mb_err err;
    char url[64];
    (void)state;
    world_open(&w);
    mb_buf_reserve(&w.text, 4096);
    snprintf(url, sizeof url, "ws://127.0.0.1:%d/small-ws", w.port);
    for (unsigned long nth = 1;; nth++) {
        w.n_ends = 0;
        mb_buf_reset(&w.text);
        mb_alloc_fail_nth(nth);
        int rc = mb_ws_connect(&w.loop, url, NULL, &ops, &w, NULL, &err);
        while (rc == 0 && (!w.n_ends || w.ws))
            mb_loop_turn(&w.loop);
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (rc == 0)
            assert_int_equal(w.n_ends, 1);
        if (!failed) {
            assert_int_equal(w.end_status, 1000);
            assert_string_equal(mb_buf_str(&w.text), "one line");
            assert_true(nth > 5);
            break;
        }
    }
    world_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_methods),
        cmocka_unit_test(test_file_body_and_sink),
        cmocka_unit_test(test_head_and_pause),
        cmocka_unit_test(test_full),
        cmocka_unit_test(test_no_way_round_a_proxy_but_when_asked),
        cmocka_unit_test(test_sockets_close_at_exec),
        cmocka_unit_test(test_receive_ahead),
        cmocka_unit_test(test_failures),
        cmocka_unit_test(test_websocket),
        cmocka_unit_test(test_websocket_closed_early),
        cmocka_unit_test(test_allocation_failures),
        cmocka_unit_test(test_websocket_allocation_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
