/*
 * A WebSocket of the static client, for following logs:
 *  1. connect and ask for the upgrade, within 10 s; 2. 101 with the right proof, else the end with
 * the answer's status and some of its text; 3. frames; a ping every 20 s keeps middle boxes awake,
 * TCP keep-alive finds dead peers (link.c); 4. a close frame is answered, and is the end. Whatever
 * ends it, on_end is called once, last.
 */
#include <event2/buffer.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include "base/checksum.h"
#include "base/clock.h"
#include "base/http/answer.h"
#include "base/http/ws_frame.h"
#include "base/http/ws_handshake.h"
#include "base/http/ws_text.h"
#include "cli/client/link.h"

enum { HANDSHAKE_TIMEOUT_MS = 10000, PING_EVERY_MS = 20000, REFUSAL_MAX_BYTES = 64 * 1024 };
enum { ABNORMAL = 1006, NO_STATUS = 1005, PROTOCOL_ERROR = 1002, BYE_TIMEOUT_MS = 1000 };

struct mb_follow_state {
    struct bufferevent *be;
    char key[MB_WS_KEY_BYTES];
    struct mb_http_answer answer;
    struct mb_buf refusal; /* body of an answer that is no upgrade */
    int is_open, done, flushed;
    struct mb_ws_frames frames;
    struct mb_ws_text text; /* the beginning of a character that has not ended */
    const struct mb_wire_ops *ops;
    void *arg;
    int status_code;
    long http_status;
    char detail[512];
};

static void finish(struct mb_follow_state *f, const char *detail)
{
    if (f->done)
        return;
    f->done = 1;
    snprintf(f->detail, sizeof(f->detail), "%.400s", detail);
}

void mb_wire_hang_up(struct mb_wire *w)
{
    if (w->following != NULL)
        finish(w->following, "closed by the caller");
}

/* ---- frames ---- */

static void send_control(struct mb_follow_state *f, int opcode, const void *p, size_t n)
{
    uint8_t frame[MB_WS_CONTROL_FRAME_MAX], mask[4];

    mb_random_bytes(mask, sizeof(mask));
    bufferevent_write(f->be, frame, mb_ws_frame_control(opcode, p, n, mask, frame));
}

static int emit_text(void *arg, const uint8_t *p, size_t n)
{
    struct mb_follow_state *f = arg;

    if (!f->done)
        f->ops->on_text(f->arg, (const char *)p, n);
    return 0;
}

static void on_data(void *arg, int opcode, const uint8_t *p, size_t n)
{
    struct mb_follow_state *f = arg;

    if (f->done)
        return;
    if (opcode == MB_WS_OP_TEXT)
        mb_ws_text_feed(&f->text, p, n, emit_text, f);
    else
        f->ops->on_binary(f->arg, p, n);
}

static void on_control(void *arg, int opcode, const uint8_t *p, size_t n)
{
    struct mb_follow_state *f = arg;
    char reason[MB_WS_CONTROL_MAX + 1];

    if (f->done)
        return;
    if (opcode == MB_WS_OP_PING) {
        send_control(f, MB_WS_OP_PONG, p, n);
    } else if (opcode == MB_WS_OP_CLOSE) {
        f->status_code = n >= 2 ? p[0] << 8 | p[1] : NO_STATUS;
        snprintf(reason, sizeof(reason), "%.*s", n > 2 ? (int)(n - 2) : 0, (const char *)p + 2);
        send_control(f, MB_WS_OP_CLOSE, p, n < 2 ? n : 2);
        finish(f, reason);
    }
}

static void take_frames(struct mb_follow_state *f, const void *p, size_t n)
{
    static const struct mb_ws_frame_ops ops = {.on_data = on_data, .on_control = on_control};
    static const uint8_t status[2] = {PROTOCOL_ERROR >> 8, PROTOCOL_ERROR & 0xff};
    struct mb_err err;

    if (mb_ws_frames_feed(&f->frames, p, n, &ops, f, &err) == 0)
        return;
    send_control(f, MB_WS_OP_CLOSE, status, sizeof(status));
    finish(f, err.text);
}

/* ---- the upgrade ---- */

static const char *header(const struct mb_follow_state *f, const char *name)
{
    const char *value = mb_http_answer_header(&f->answer, name);

    return value != NULL ? value : "";
}

/* The head has come, or the whole answer when it is no 101. */
static void judge_answer(struct mb_follow_state *f)
{
    char accept[MB_WS_ACCEPT_BYTES];

    f->http_status = f->answer.status;
    if (f->answer.status != 101) {
        finish(f, mb_buf_str(&f->refusal));
    } else if (strcasecmp(header(f, "Upgrade"), "websocket") != 0 ||
               mb_ws_accept_key(f->key, accept) != 0 ||
               strcmp(header(f, "Sec-WebSocket-Accept"), accept) != 0) {
        finish(f, "the server's upgrade answer is no valid WebSocket handshake");
    } else {
        f->http_status = 0;
        f->is_open = 1;
    }
}

static size_t take_answer(struct mb_follow_state *f, const void *p, size_t n)
{
    const uint8_t *body;
    size_t used, len;
    struct mb_err err;

    if (mb_http_answer_feed(&f->answer, p, n, &used, &body, &len, &err) != 0 ||
        mb_buf_add(&f->refusal, body, len) != 0) {
        f->http_status = f->answer.status;
        finish(f, f->refusal.len > 0 ? mb_buf_str(&f->refusal) : "the server sent no HTTP answer");
        return n;
    }
    if (f->answer.state == MB_HTTP_ANSWER_DONE)
        judge_answer(f);
    return used;
}

static void on_readable(struct bufferevent *be, void *arg)
{
    struct mb_follow_state *f = arg;
    struct evbuffer *in = bufferevent_get_input(be);

    while (!f->done && evbuffer_get_length(in) > 0) {
        struct evbuffer_iovec v;

        evbuffer_peek(in, -1, NULL, &v, 1);
        if (f->is_open)
            take_frames(f, v.iov_base, v.iov_len);
        else
            v.iov_len = take_answer(f, v.iov_base, v.iov_len);
        evbuffer_drain(in, v.iov_len);
    }
}

static void on_event(struct bufferevent *be, short what, void *arg)
{
    struct mb_follow_state *f = arg;
    struct mb_err err;
    char why[256];

    if (f->done)
        return;
    mb_link_why(be, what, why, sizeof(why));
    if (!f->is_open && (what & BEV_EVENT_EOF) && mb_http_answer_end(&f->answer, &err) == 0)
        judge_answer(f);
    else
        finish(f, f->is_open ? "the connection broke" : why);
}

static int send_upgrade(struct mb_follow_state *f, const struct mb_link_target *t,
                        const char *const *headers)
{
    struct mb_buf head = {0};
    uint8_t nonce[16];
    int rc;

    mb_random_bytes(nonce, sizeof(nonce));
    mb_base64(nonce, sizeof(nonce), f->key);
    rc = mb_buf_printf(&head, "GET %s%.*s HTTP/1.1\r\nHost: ", *t->path == '/' ? "" : "/",
                       (int)strcspn(t->path, "#"), t->path);
    rc |= mb_link_host(t, &head);
    rc |= mb_buf_printf(&head,
                        "\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %s\r\n",
                        f->key);
    for (const char *const *h = headers; h != NULL && *h != NULL; h++)
        rc |= mb_buf_printf(&head, "%s\r\n", *h);
    rc |= mb_buf_puts(&head, "\r\n");
    bufferevent_setcb(f->be, on_readable, NULL, on_event, f);
    if (rc == 0)
        rc = bufferevent_write(f->be, head.data, head.len);
    mb_buf_close(&head);
    return rc != 0 ? rc : bufferevent_enable(f->be, EV_READ | EV_WRITE);
}

/* ---- from connect to the end ---- */

static void on_flushed(struct bufferevent *be, void *arg)
{
    struct mb_follow_state *f = arg;

    (void)be;
    f->flushed = 1;
}

static void on_late_event(struct bufferevent *be, short what, void *arg)
{
    (void)what;
    on_flushed(be, arg);
}

/* Our last word goes out if the peer takes it. */
static void say_goodbye(struct mb_wire *w, struct mb_follow_state *f)
{
    bufferevent_disable(f->be, EV_READ);
    bufferevent_setcb(f->be, NULL, on_flushed, on_late_event, f);
    f->flushed = evbuffer_get_length(bufferevent_get_output(f->be)) == 0;
    mb_link_wait(w, &f->flushed, mb_mono_ms() + BYE_TIMEOUT_MS);
}

static void converse(struct mb_wire *w, struct mb_follow_state *f, uint64_t handshake_mono_ms)
{
    uint64_t ping_mono_ms = mb_mono_ms() + PING_EVERY_MS;

    while (mb_link_wait(w, &f->done, f->is_open ? ping_mono_ms : handshake_mono_ms)) {
        if (!f->is_open && mb_mono_ms() >= handshake_mono_ms) {
            finish(f, "no WebSocket answer within 10 s");
        } else if (f->is_open && mb_mono_ms() >= ping_mono_ms) {
            send_control(f, MB_WS_OP_PING, "", 0);
            ping_mono_ms = mb_mono_ms() + PING_EVERY_MS;
        }
    }
}

int mb_wire_follow(struct mb_wire *w, const char *url, const char *const *headers,
                   const struct mb_wire_ops *ops, void *arg, struct mb_err *err)
{
    struct mb_follow_state f = {.answer = {.max_body_bytes = REFUSAL_MAX_BYTES},
                                .ops = ops,
                                .arg = arg,
                                .status_code = ABNORMAL};
    uint64_t deadline = mb_mono_ms() + HANDSHAKE_TIMEOUT_MS;
    struct mb_link_target t;
    struct mb_err why = {0};
    int rc = mb_link_target(url, &t, err);

    if (rc != 0)
        return rc;
    rc = mb_link_open(w, &t, deadline, &f.be, &why);
    if (rc == MB_EDENIED) { /* a certificate does not become better */
        *err = why;
        return rc;
    }
    w->following = &f;
    if (rc != 0) {
        finish(&f, why.text);
    } else if (send_upgrade(&f, &t, headers) != 0) {
        finish(&f, "out of memory");
    } else {
        converse(w, &f, deadline);
        say_goodbye(w, &f);
    }
    w->following = NULL;
    if (f.be != NULL)
        bufferevent_free(f.be);
    ops->on_end(arg, f.status_code, f.http_status, f.detail);
    mb_http_answer_close(&f.answer);
    mb_buf_close(&f.refusal);
    return 0;
}
