/*
 * A server process for real clients (test_http_interop.py): prints its port, ends when stdin ends.
 * /version, /sink (PUT, streamed: counts and checksums), /small (POST, buffered, 1000 bytes),
 * /text?bytes=N (WebSocket: N bytes of text in pieces that cut characters), /rss.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/http/server.h"

enum { PIECE_BYTES = 9973 }; /* a prime, so that pieces end everywhere inside characters */

/* 1, 2, 3 and 4 byte characters: 11 bytes. */
static const char unit[] = "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x90\x9f\n";

struct upload {
    uint64_t n;
    uint64_t crc;
};

struct tail {
    uint64_t pos;
    uint64_t end;
};

static void on_version(void *arg, struct mb_http_req *req)
{
    (void)arg;
    mb_http_reply_text(req, 200, "{\"version\": \"4\"}");
}

static void on_small(void *arg, struct mb_http_req *req)
{
    size_t n;
    (void)arg;
    mb_http_req_body(req, &n);
    mb_http_reply_text(req, 200, "%zu", n);
}

static int take_part(void *arg, struct mb_http_req *req, const void *p, size_t n, int error_code)
{
    struct upload *up = arg;
    if (n > 0) {
        up->crc = mb_crc64nvme(up->crc, p, n);
        up->n += n;
        return 0;
    }
    mb_http_reply_text(req, error_code ? 400 : 200, "%" PRIu64 " %016" PRIx64, up->n, up->crc);
    mb_free(up);
    return 0;
}

static void on_sink(void *arg, struct mb_http_req *req)
{
    (void)arg;
    struct upload *up = mb_calloc(1, sizeof *up);
    if (!up)
        abort();
    mb_http_req_body_cb(req, take_part, up);
}

static void send_more(void *arg, struct mb_ws *ws)
{
    struct tail *t = arg;
    char piece[PIECE_BYTES];
    while (t->pos < t->end) {
        size_t n = t->end - t->pos < sizeof piece ? (size_t)(t->end - t->pos) : sizeof piece;
        for (size_t i = 0; i < n; i++)
            piece[i] = unit[(t->pos + i) % (sizeof unit - 1)];
        if (mb_ws_send_text(ws, piece, n, NULL) != 0)
            return; /* full: on_writable comes; closing: on_close comes */
        t->pos += n;
    }
    mb_ws_close(ws, 1000, "");
}

static void on_text_closed(void *arg, struct mb_ws *ws)
{
    (void)ws;
    mb_free(arg);
}

static void on_text(void *arg, struct mb_http_req *req)
{
    static const struct mb_ws_ops ops = {send_more, NULL, on_text_closed};
    const char *bytes = mb_http_req_query(req, "bytes");
    struct tail *t = mb_calloc(1, sizeof *t);
    struct mb_ws *ws;
    (void)arg;
    if (!t)
        abort();
    t->end = bytes ? strtoull(bytes, NULL, 10) : 0;
    if (mb_http_upgrade(req, &ops, t, &ws, NULL) != 0)
        mb_free(t);
    else
        send_more(t, ws);
}

static void on_rss(void *arg, struct mb_http_req *req)
{
    size_t rss = 0;
    (void)arg;
    uv_resident_set_memory(&rss);
    mb_http_reply_text(req, 200, "%zu", rss);
}

static char stdin_byte;

static void on_stdin_alloc(uv_handle_t *h, size_t suggested, uv_buf_t *buf)
{
    (void)h;
    (void)suggested;
    *buf = uv_buf_init(&stdin_byte, 1);
}

static void on_stdin(uv_stream_t *s, ssize_t n, const uv_buf_t *buf)
{
    (void)buf;
    if (n >= 0)
        return;
    uv_close((uv_handle_t *)s, NULL);
    mb_http_server_stop(s->data, NULL, NULL);
}

int main(void)
{
    static const struct mb_http_route routes[] = {
        {"GET", "/version", on_version, 0},
        {"POST", "/small", on_small, 0},
        {"PUT", "/sink", on_sink, MB_HTTP_BODY_STREAM},
        {"GET", "/text", on_text, MB_HTTP_WEBSOCKET},
        {"GET", "/rss", on_rss, 0},
    };
    struct mb_http_server_opts opts = {.max_body_bytes = 1000};
    struct mb_http_server *srv;
    struct mb_err err;
    uv_loop_t loop;
    uv_pipe_t in;
    int port;
    uv_loop_init(&loop);
    if (mb_http_server_create(&loop, &opts, &srv, &err) != 0 ||
        mb_http_server_add(srv, routes, sizeof routes / sizeof *routes, NULL, &err) != 0 ||
        mb_http_server_listen(srv, &port, &err) != 0) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    uv_pipe_init(&loop, &in, 0);
    in.data = srv;
    if (uv_pipe_open(&in, 0) != 0 ||
        uv_read_start((uv_stream_t *)&in, on_stdin_alloc, on_stdin) != 0)
        return 1;
    printf("%d\n", port);
    fflush(stdout);
    uv_run(&loop, UV_RUN_DEFAULT);
    mb_http_server_destroy(srv);
    return uv_loop_close(&loop) == 0 ? 0 : 1;
}
