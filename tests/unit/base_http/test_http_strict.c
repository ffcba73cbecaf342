/* What two readers could take for two things, and what is too large: refused, and hung up. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/http/server.h"
#include "base/http/ws_limit.h"
#include "raw_client.h"

struct world {
    uv_loop_t loop;
    struct mb_http_server *srv;
    int port;
    int n_handled;
    size_t n_uploaded;
};

static void on_echo(void *arg, struct mb_http_req *req)
{
    struct world *w = arg;
    size_t n;
    w->n_handled++;
    mb_http_req_body(req, &n);
    mb_http_reply_text(req, 200, "%zu bytes", n);
}

#define UPLOAD_LENGTH "2000000" /* beyond the limit of other bodies */

static int on_piece(void *arg, struct mb_http_req *req, const void *p, size_t n, int error_code)
{
    struct world *w = arg;
    (void)p;
    assert_int_equal(error_code, 0);
    w->n_uploaded += n;
    if (n == 0)
        mb_http_reply_text(req, 200, "%zu bytes", w->n_uploaded);
    return 0;
}

/* Knows a limit of its own, and what comes beyond it before anything came. */
static void on_upload(void *arg, struct mb_http_req *req)
{
    (void)arg;
    if (strcmp(mb_http_req_header(req, "Content-Length"), UPLOAD_LENGTH) == 0)
        mb_http_req_body_cb(req, on_piece, arg);
    else
        mb_http_reply_text(req, 413, "no upload");
}

static void ignore_close(void *arg, struct mb_ws *ws)
{
    (void)arg;
    (void)ws;
}

/* Has something to say at once, as a log has. */
static void on_ws(void *arg, struct mb_http_req *req)
{
    static const struct mb_ws_ops ops = {.on_close = ignore_close};
    struct mb_err err;
    struct mb_ws *ws;
    assert_int_equal(mb_http_upgrade(req, &ops, arg, &ws, &err), 0);
    assert_int_equal(mb_ws_send_text(ws, "hello", 5, &err), 0);
}

static int world_open(void **state)
{
    static const struct mb_http_route routes[] = {
        {"GET", "/echo", on_echo, 0},
        {"POST", "/echo", on_echo, 0},
        {"PUT", "/upload", on_upload, MB_HTTP_BODY_STREAM},
        {"GET", "/ws", on_ws, MB_HTTP_WEBSOCKET},
    };
    static struct world w;
    struct mb_err err;
    memset(&w, 0, sizeof w);
    uv_loop_init(&w.loop);
    assert_int_equal(mb_http_server_create(&w.loop, &(struct mb_http_server_opts){0}, &w.srv, &err),
                     0);
    assert_int_equal(mb_http_server_add(w.srv, routes, 4, &w, &err), 0);
    assert_int_equal(mb_http_server_listen(w.srv, &w.port, &err), 0);
    *state = &w;
    return 0;
}

static int world_close(void **state)
{
    struct world *w = *state;
    mb_http_server_stop(w->srv, NULL, NULL);
    uv_run(&w->loop, UV_RUN_DEFAULT);
    mb_http_server_destroy(w->srv);
    assert_int_equal(uv_loop_close(&w->loop), 0);
    return 0;
}

static size_t count(const char *text, const char *piece)
{
    size_t n = 0;
    for (text = strstr(text, piece); text; text = strstr(text + 1, piece))
        n++;
    return n;
}

/* One answer with this status, and then the end of the stream, whatever else was sent. */
static void refuse_bytes(struct world *w, const char *request, size_t n, const char *status)
{
    struct raw_client c;
    raw_client_start(&w->loop, &c, w->port, request, n);
    raw_client_finish(&c);
    const char *text = mb_buf_str(&c.in);
    if (strncmp(text, "HTTP/1.1 ", 9) != 0 || strncmp(text + 9, status, 3) != 0 ||
        count(text, "HTTP/1.1 4") != 1 || count(text, "Content-Length:") != 1 ||
        count(text, "Connection: close\r\n") != 1)
        fail_msg("request:\n%.300s\nanswer:\n%s", request, text);
    assert_int_equal(w->n_handled, 0);
    raw_client_free(&c);
}

static void refuse(struct world *w, const char *request, const char *status)
{
    refuse_bytes(w, request, strlen(request), status);
}

/* Behind each a second request, which one reader might see and another not. */
#define SECOND "GET /echo HTTP/1.1\r\nHost: x\r\n\r\n"
#define POST   "POST /echo HTTP/1.1\r\nHost: x\r\n"

static void test_lengths(void **state)
{
    static const char *const heads[] = {
        "Content-Length: 2\r\nContent-Length: 5\r\n",
        "Content-Length: 5\r\nContent-Length: 2\r\n",
        "Content-Length: 2\r\nContent-Length: 2\r\n",
        "content-length: 2\r\nCONTENT-LENGTH: 5\r\n",
        "Content-Length: 2\r\nContent-Length: -1\r\n",
        "Content-Length: 2, 2\r\n",
        "Content-Length: -1\r\n",
        "Content-Length: +2\r\n",
        "Content-Length: 0x2\r\n",
        "Content-Length: 2 3\r\n",
        "Content-Length: two\r\n",
        "Content-Length: 99999999999999999999999\r\n",
        "Content-Length : 2\r\n",
        "Content-Length\t: 2\r\n",
    };
    char request[512];
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        snprintf(request, sizeof request, POST "%s\r\n{}" SECOND, heads[i]);
        refuse(*state, request, "400");
        snprintf(request, sizeof request, "GET /echo HTTP/1.1\r\nHost: x\r\n%s\r\n{}" SECOND,
                 heads[i]);
        refuse(*state, request, "400");
    }
}

static void test_codings(void **state)
{
    static const char *const heads[] = {
        "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 2\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: gzip\r\n",
        "Transfer-Encoding: identity\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding : chunked\r\n",
    };
    char request[512];
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        snprintf(request, sizeof request, POST "%s\r\n2\r\n{}\r\n0\r\n\r\n" SECOND, heads[i]);
        refuse(*state, request, "400");
    }
    refuse(*state,
           "POST /echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n" SECOND,
           "400");
}

/* As the first header, amid others and as the last one; with CRLF, and with LF alone. */
static void refuse_line(struct world *w, const char *line, size_t n)
{
    static const struct {
        const char *before, *after;
    } places[] = {{POST, "\r\n\r\n"},
                  {POST, "\r\nX: y\r\n\r\n"},
                  {POST, "\n\n"},
                  {POST, "\nX: y\n\n"},
                  {"POST /echo HTTP/1.1\r\n", "\r\nHost: x\r\n\r\n"}};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        struct mb_buf request = {0};
        mb_buf_puts(&request, places[i].before);
        mb_buf_add(&request, line, n);
        mb_buf_puts(&request, places[i].after);
        mb_buf_puts(&request, "2\r\n{}\r\n0\r\n\r\n" SECOND);
        refuse_bytes(w, (const char *)request.data, request.len, "400");
        mb_buf_close(&request);
    }
}

struct line {
    const char *bytes;
    size_t n;
};
#define LINE(bytes_)                                                                               \
    {                                                                                              \
        bytes_, sizeof bytes_ - 1                                                                  \
    }

/* A proxy may read each of them as another header than libmicrohttpd does. */
static void test_continued_lines(void **state)
{
    static const struct line lines[] = {
        LINE("Transfer-Encoding:\r\n chunked"),
        LINE("Transfer-Encoding:\n\tchunked"),
        LINE("Transfer-Encoding: chunked\r\n , x"),
        LINE("Transfer: chunked\r\n -Encoding"),
        LINE("Content: 38\r\n -Length"),
        LINE("Content-Lengt:  38\r\n h"),
        LINE("Content-Length:\r\n 38"),
        LINE("X: a\r\n b"),
        LINE("X: a\r\n Content-Length: 38"),
        LINE("X: a\r\n\tb\r\n c"),
        LINE("X:\r\n "),
        LINE("X: a\r\n \t "),
    };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        refuse_line(*state, lines[i].bytes, lines[i].n);
}

/* Wherever in libmicrohttpd's buffer the line lies: it grows, and moves what does not fit. */
static void test_continued_lines_anywhere(void **state)
{
    for (int pad = 30000; pad < 44000; pad += pad < 32700 || pad > 32800 ? 97 : 1) {
        struct mb_buf request = {0};
        mb_buf_printf(&request, POST "P: %0*d\r\nContent-Lengt: 2\n h\n\n{}" SECOND, pad, 0);
        refuse(*state, mb_buf_str(&request), "400");
        mb_buf_close(&request);
    }
}

static void test_controls(void **state)
{
    static const struct line lines[] = {
        LINE("X: a\rContent-Length: 38"),
        LINE("X: \ra"),
        LINE("X: a\x01"
             "b"),
        LINE("X: a\x7f"),
        LINE("X: a\vb"),
        LINE("Transfer-Encoding: chunked\0, gzip"),
        LINE("Transfer-Encoding: chunked\0 "),
        LINE("X: a\0b"),
        LINE("X: \0Content-Length: 38"),
        LINE("Content-Length: 2\0"
             "8"),
    };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        refuse_line(*state, lines[i].bytes, lines[i].n);
    refuse(*state, POST "X: a\r\r\n\r\n" SECOND, "400");
    refuse(*state, POST "Transfer-Encoding: chunked\r\r\n\r\n0\r\n\r\n" SECOND, "400");
    refuse_bytes(*state, POST "Transfer-Encoding: chunked\0\r\n\r\n0\r\n\r\n" SECOND,
                 sizeof POST "Transfer-Encoding: chunked\0\r\n\r\n0\r\n\r\n" SECOND - 1, "400");
    refuse_bytes(*state, POST "X: a\0\r\n\r\n" SECOND, sizeof POST "X: a\0\r\n\r\n" SECOND - 1,
                 "400");
}

static void test_names(void **state)
{
    static const struct line lines[] = {
        LINE("Transfer-Encodingchunked: x"),
        LINE("transfer-encoding-x: chunked"),
        LINE("Content-Length38: 38"),
        LINE("content-lengths: 38"),
        LINE(" X: y"),
        LINE("X\r: y"),
        LINE(": y"),
        LINE("X(: y"),
    };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        refuse_line(*state, lines[i].bytes, lines[i].n);
}

/* Legal, and refused: libmicrohttpd would not see the coding, or the number. */
static void test_blanks_behind(void **state)
{
    static const struct line lines[] = {
        LINE("Transfer-Encoding: chunked "),
        LINE("Transfer-Encoding:\tchunked\t"),
        LINE("Content-Length: 2 "),
    };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        refuse_line(*state, lines[i].bytes, lines[i].n);
}

/* Empty values, blanks around them, tabs and bytes beyond ASCII, line ends of both kinds. */
static void test_legal_lines(void **state)
{
    struct world *w = *state;
    struct mb_buf out;
    raw_exchange(&w->loop, w->port,
                 "POST /echo HTTP/1.1\nHost:x\nEmpty:\nBlank: \nContent-Length:2\n\n{}"
                 "POST /echo HTTP/1.1\r\nHost: x\r\nEmpty:\r\nBlanks: \t \r\nX:  a\tb \r\n"
                 "Y: \xc3\xa9\xff\r\nTransfer-Encoding: \t chunked\r\n\r\n3\r\n{ }\r\n0\r\n\r\n"
                 "GET /echo HTTP/1.1\nConnection: close\r\nLast:\n\r\n",
                 &out);
    if (count(mb_buf_str(&out), "HTTP/1.1 200") != 3 || w->n_handled != 3)
        fail_msg("%s", mb_buf_str(&out));
    mb_buf_close(&out);
}

/* What is in order is answered as before, one after the other on one connection. */
static void test_in_order(void **state)
{
    struct world *w = *state;
    struct mb_buf out;
    raw_exchange(&w->loop, w->port,
                 POST "Content-Length: 2\r\n\r\n{}" POST "transfer-encoding: Chunked\r\n\r\n3\r\n"
                      "{ }\r\n0\r\n\r\n"
                      "GET /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
                 &out);
    assert_non_null(strstr(mb_buf_str(&out), "2 bytes"));
    assert_non_null(strstr(mb_buf_str(&out), "3 bytes"));
    assert_non_null(strstr(mb_buf_str(&out), "0 bytes"));
    assert_int_equal(w->n_handled, 3);
    mb_buf_close(&out);
}

/* A head of n bytes in all, of lines of about line_bytes, whose answer has this status. */
static void check_head(struct world *w, size_t n, size_t line_bytes, const char *status)
{
    static const char end[] = "Connection: close\r\n\r\n";
    struct mb_buf request = {0}, out;
    mb_buf_printf(&request, "GET /echo HTTP/1.1\r\nHost: x\r\n");
    n -= sizeof end - 1;
    while (request.len < n) {
        size_t line = n - request.len < 2 * line_bytes ? n - request.len : line_bytes;
        mb_buf_printf(&request, "X: %0*d\r\n", (int)line - 5, 0);
    }
    assert_int_equal(request.len, n);
    mb_buf_printf(&request, "%s", end);
    raw_exchange(&w->loop, w->port, mb_buf_str(&request), &out);
    if (strncmp(mb_buf_str(&out) + 9, status, 3) != 0)
        fail_msg("%zu bytes: %.300s", request.len, mb_buf_str(&out));
    assert_int_equal(count(mb_buf_str(&out), "HTTP/1.1"), 1);
    mb_buf_close(&request);
    mb_buf_close(&out);
}

enum { HEAD_BYTES = 64 * 1024, HEAD_LINES = 500 };

static void test_head_size(void **state)
{
    struct world *w = *state;
    check_head(w, HEAD_BYTES, HEAD_BYTES, "200");
    check_head(w, HEAD_BYTES + 1, HEAD_BYTES, "431");
    check_head(w, 2 * HEAD_BYTES - 2048, 2 * HEAD_BYTES, "431");
    check_head(w, 200000, 200000, "431");
    check_head(w, HEAD_BYTES, 1000, "200");
    check_head(w, HEAD_BYTES + 1, 1000, "431");
    assert_int_equal(w->n_handled, 2);
}

static void test_head_lines(void **state)
{
    static const char *const lines[] = {"A: b\r\n",
                                        "X-Some-Header-Of-More-Than-A-Hundred-Bytes: "
                                        "0123456789012345678901234567890123456789012345678901234567"
                                        "8901234567890123456789\r\n"};
    for (size_t i = 0; i < 2; i++) {
        for (int more = 0; more < 2; more++) {
            struct mb_buf request = {0}, out;
            mb_buf_printf(&request, "GET /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n");
            for (int n = 2; n < HEAD_LINES + more; n++)
                mb_buf_printf(&request, "%s", lines[i]);
            mb_buf_printf(&request, "\r\n");
            struct world *w = *state;
            raw_exchange(&w->loop, w->port, mb_buf_str(&request), &out);
            assert_int_equal(strncmp(mb_buf_str(&out) + 9, more ? "431" : "200", 3), 0);
            mb_buf_close(&request);
            mb_buf_close(&out);
        }
    }
}

/* ---- more body than is read ---- */

/* Nothing of the body comes, and the client does not hang up: answered, and hung up, all the same.
 */
static void test_announced_too_much(void **state)
{
    static const struct {
        const char *line, *status, *has;
    } requests[] = {
        {"POST /echo", "413", "Maximum request body size 1048576 exceeded."},
        {"GET /echo", "413", "Maximum request body size 1048576 exceeded."},
        {"PUT /upload", "413", "no upload"},
        {"POST /nope", "404", "404: Not Found"},
        {"DELETE /echo", "405", "Allow: GET,HEAD,POST\r\n"},
    };
    static const char *const heads[] = {"", "Connection: keep-alive\r\n",
                                        "Expect: 100-continue\r\n"};
    static const char *const lengths[] = {"1048577", "99999999999", "999999999999999999"};
    char request[512];
    for (size_t i = 0; i < sizeof requests / sizeof *requests * 9; i++) {
        struct world *w = *state;
        struct mb_buf out;
        snprintf(request, sizeof request, "%s HTTP/1.1\r\nHost: x\r\n%sContent-Length: %s\r\n\r\n",
                 requests[i / 9].line, heads[i / 3 % 3], lengths[i % 3]);
        refuse(w, request, requests[i / 9].status);
        raw_exchange(&w->loop, w->port, request, &out);
        if (!strstr(mb_buf_str(&out), requests[i / 9].has))
            fail_msg("request:\n%s\nanswer:\n%s", request, mb_buf_str(&out));
        mb_buf_close(&out);
    }
    struct mb_buf out;
    struct world *w = *state;
    raw_exchange(&w->loop, w->port,
                 "HEAD /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n", &out);
    assert_int_equal(strncmp(mb_buf_str(&out) + 9, "404", 3), 0);
    assert_non_null(strstr(mb_buf_str(&out), "Content-Length: 14\r\n"));
    assert_int_equal(strcmp(mb_buf_str(&out) + out.len - 4, "\r\n\r\n"), 0);
    mb_buf_close(&out);
}

/* Whoever sends all of it before it reads gets the answer, too. What follows is not looked at. */
static void test_too_much_comes(void **state)
{
    enum { BODY_BYTES = 20 * 1024 * 1024 };
    struct world *w = *state;
    struct mb_buf request = {0};
    struct raw_client c;
    mb_buf_printf(&request, POST "Content-Length: %d\r\n\r\n", BODY_BYTES);
    assert_int_equal(mb_buf_reserve(&request, BODY_BYTES), 0);
    memset(request.data + request.len, 'x', BODY_BYTES);
    request.len += BODY_BYTES;
    mb_buf_puts(&request, SECOND);
    raw_client_start(&w->loop, &c, w->port, request.data, request.len);
    do {
        uv_run(&w->loop, UV_RUN_ONCE);
        uv_read_stop((uv_stream_t *)&c.tcp);
    } while (!uv_is_writable((uv_stream_t *)&c.tcp) || c.tcp.write_queue_size > 0);
    raw_client_read_on(&c);
    raw_client_finish(&c);
    assert_int_equal(count(mb_buf_str(&c.in), "HTTP/1.1"), 1);
    assert_non_null(strstr(mb_buf_str(&c.in), "HTTP/1.1 413"));
    assert_int_equal(w->n_handled, 0);
    raw_client_free(&c);
    mb_buf_close(&request);
}

/* A route that takes more than the others do is not disturbed, and the connection goes on. */
static void test_upload_within_its_limit(void **state)
{
    struct world *w = *state;
    struct mb_buf request = {0}, out;
    mb_buf_printf(&request, "PUT /upload HTTP/1.1\r\nHost: x\r\nContent-Length: %s\r\n\r\n%0*d",
                  UPLOAD_LENGTH, atoi(UPLOAD_LENGTH), 0);
    mb_buf_puts(&request, "GET /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    raw_exchange(&w->loop, w->port, mb_buf_str(&request), &out);
    assert_int_equal(count(mb_buf_str(&out), "HTTP/1.1 200"), 2);
    assert_non_null(strstr(mb_buf_str(&out), UPLOAD_LENGTH " bytes"));
    mb_buf_close(&request);
    mb_buf_close(&out);
}

/* ---- WebSocket frames ---- */

#define WS_REQUEST                                                                                 \
    "GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"                 \
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"

struct bad_frame {
    const char *bytes;
    size_t n;
    const char *close; /* the close frame that answers */
};
#define BAD(bytes_, close_)                                                                        \
    {                                                                                              \
        bytes_, sizeof bytes_ - 1, close_                                                          \
    }
#define TOO_BIG "\x88\x02\x03\xf1"
#define WRONG   "\x88\x02\x03\xea"

static const struct bad_frame bad_frames[] = {
    BAD("\x81\xff\x40\0\0\0\0\0\0\0", TOO_BIG),       /* 2^62, and nothing of it came */
    BAD("\x82\xff\x40\0\0\0\0\0\0\0abcdxx", TOO_BIG), /* binary */
    BAD("\x81\xff\x80\0\0\0\0\0\0\0abcd", TOO_BIG),
    BAD("\x81\xff\xff\xff\xff\xff\xff\xff\xff\xff", TOO_BIG),
    BAD("\x81\xff\0\0\0\0\0\x01\0\x01", TOO_BIG), /* 64 KiB and a byte */
    BAD("\x01\x82"
        "abcdxx\x80\xff\x40\0\0\0\0\0\0\0",
        TOO_BIG), /* the rest of a message */
    BAD("\x89\xfe\x01\0abcd", WRONG),
    BAD("\xf1\x80"
        "abcd",
        WRONG),
};

static int find(const struct mb_buf *b, const char *piece, size_t n)
{
    return b->len > 0 && memmem(b->data, b->len, piece, n) != NULL;
}

/* The frame with the request, in one piece, and when the connection is open; and much behind it. */
static void check_frame(struct world *w, const struct bad_frame *f, int at_once)
{
    static char much[300 * 1024];
    struct mb_buf bytes = {0};
    struct raw_client c;

    mb_buf_printf(&bytes, WS_REQUEST);
    if (at_once)
        mb_buf_add(&bytes, f->bytes, f->n);
    raw_client_start(&w->loop, &c, w->port, mb_buf_str(&bytes), bytes.len);
    if (!at_once) {
        while (!find(&c.in, "hello", 5))
            uv_run(&w->loop, UV_RUN_ONCE);
        raw_client_send(&c, f->bytes, f->n);
    }
    while (!c.done && !find(&c.in, f->close, 4)) {
        uv_buf_t buf = uv_buf_init(much, sizeof much);
        if (at_once && uv_is_writable((uv_stream_t *)&c.tcp))
            uv_try_write((uv_stream_t *)&c.tcp, &buf, 1);
        uv_run(&w->loop, UV_RUN_ONCE);
    }
    assert_true(find(&c.in, f->close, 4));
    raw_client_finish(&c); /* the stream ends, whatever the client does */
    raw_client_free(&c);
    mb_buf_close(&bytes);
}

static void test_frames_beyond_the_limit(void **state)
{
    for (size_t i = 0; i < sizeof bad_frames / sizeof *bad_frames; i++) {
        check_frame(*state, &bad_frames[i], 0);
        check_frame(*state, &bad_frames[i], 1);
    }
}

/* Byte by byte: judged with the last byte of the head, not before; frames within it pass. */
static void test_limit_alone(void **state)
{
    static const uint8_t small[] = "\x81\x85mask01234\x89\x80mask\x82\xfe\0\x7fmask";
    static const uint8_t large[] = "\x81\xff\0\0\0\0\0\x01\0\x01";
    struct mb_ws_limit l = {0};
    uint8_t rest[0x7f] = {0};
    (void)state;
    for (size_t i = 0; i < sizeof small - 1; i++)
        assert_int_equal(mb_ws_limit_feed(&l, small + i, 1, 65536), 0);
    assert_int_equal(mb_ws_limit_feed(&l, rest, sizeof rest, 65536), 0);
    for (size_t i = 0; i < sizeof large - 2; i++)
        assert_int_equal(mb_ws_limit_feed(&l, large + i, 1, 65536), 0);
    assert_int_equal(mb_ws_limit_feed(&l, large + sizeof large - 2, 1, 65536), 1009);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_lengths, world_open, world_close),
        cmocka_unit_test_setup_teardown(test_codings, world_open, world_close),
        cmocka_unit_test_setup_teardown(test_continued_lines, world_open, world_close),
        cmocka_unit_test_setup_teardown(test_continued_lines_anywhere, world_open, world_close),
        cmocka_unit_test_setup_teardown(test_controls, world_open, world_close),
        cmocka_unit_test_setup_teardown(test_names, world_open, world_close),
        cmocka_unit_test_setup_teardown(test_blanks_behind, world_open, world_close),
        cmocka_unit_test_setup_teardown(test_legal_lines, world_open, world_close),
        cmocka_unit_test_setup_teardown(test_in_order, world_open, world_close),
        cmocka_unit_test_setup_teardown(test_head_size, world_open, world_close),
        cmocka_unit_test_setup_teardown(test_head_lines, world_open, world_close),
        cmocka_unit_test_setup_teardown(test_announced_too_much, world_open, world_close),
        cmocka_unit_test_setup_teardown(test_too_much_comes, world_open, world_close),
        cmocka_unit_test_setup_teardown(test_upload_within_its_limit, world_open, world_close),
        cmocka_unit_test_setup_teardown(test_frames_beyond_the_limit, world_open, world_close),
        cmocka_unit_test(test_limit_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
