/*
 * WebSocket frames on a watched socket.
 *
 * 1. create: a timer and a wslay context; text may be queued at once.
 * 2. start: the socket is watched; what the handshake read too much is parsed first.
 * 3. send_text: repaired to UTF-8, cut into frames, queued; written at once when nothing waits,
 *    else when the socket takes more. Below the low-water mark a refused sender is told.
 * 4. A ping every 20 s keeps middle boxes awake; TCP keep-alive finds dead peers. A peer that reads
 *    slowly is never cut off: its queue is bounded.
 * 5. close: queue, close frame, then wait for the peer's close frame or its end of stream.
 * Failures: a socket error, a protocol error (wslay queues the close frame with the right status;
 * a frame that announces too much is refused by its head), memory running out, or a closing peer
 * that makes no progress for 10 s: on_close with the status received, 1006 if none. Behind a close
 * frame that says what was wrong the stream is read to its end and dropped: closed with bytes
 * unread, a socket would take the frame back. A read is bounded per turn of the loop so that no
 * peer can own it, and stops while too much waits to be sent.
 */
#include "base/http/ws_conn.h"

#include <assert.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <wslay/wslay.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/http/ws_limit.h"
#include "base/http/ws_text.h"

enum {
    READ_BYTES_PER_TURN = 256 * 1024,
    /* What the kernel holds beside what is under way to the peer, which its window bounds. Left to
     * itself it takes megabytes for each connection, also for one that never reads. */
    UNSENT_BYTES = 128 * 1024,
    EMPTY_BYTES = 1024, /* less than that waits: there is room for a frame */
    SMALL_FRAME_BYTES = 1024,
    FRAME_COST_BYTES = 128 /* what a queued frame takes beside its payload */
};

enum ws_state { WS_IDLE, WS_OPEN, WS_CLOSING, WS_DEAD };

struct mb_ws_conn {
    uv_timer_t timer;
    uv_poll_t poll;
    int fd; /* -1 before start */
    unsigned n_handles;
    enum ws_state state;
    wslay_event_context_ptr ws;
    struct mb_ws_conn_ops ops;
    void *arg;
    int is_client;
    struct mb_ws_text send_text; /* half characters between sends */
    struct mb_ws_text recv_text; /* and between received pieces */
    int recv_is_text;
    uint8_t *extra; /* owned: bytes read before start */
    size_t n_extra;
    size_t extra_pos;
    size_t turn_bytes;
    size_t tell_below;        /* on_writable when less waits than that; 0: it is not wanted */
    size_t *shared;           /* what waits on all connections of the server; NULL: nobody counts */
    size_t counted;           /* of it ours */
    struct mb_ws_limit limit; /* server */
    int refuse_status;        /* the peer's frame is refused with it */
    int drains;               /* refused, and that was said: the rest is dropped */
    int ping_outstanding;
    int close_pending; /* the close frame waits: wslay would send it before queued text */
    uint16_t close_status;
    char close_reason[121];
    int peer_status;
    char peer_reason[124];
    uint64_t sent_bytes; /* progress marks of a closing connection */
    uint64_t sent_at_tick;
};

static void abort_conn(struct mb_ws_conn *c);

/* What waits for the peer, in memory rather than in payload: a million frames of one byte count. */
static size_t queued_bytes(const struct mb_ws_conn *c)
{
    return wslay_event_get_queued_msg_length(c->ws) +
           FRAME_COST_BYTES * wslay_event_get_queued_msg_count(c->ws);
}

/* A peer that asks for answers (pongs) and reads none of them is not listened to. */
static int listens(const struct mb_ws_conn *c)
{
    return queued_bytes(c) <= MB_WS_HIGH_WATER_BYTES;
}

static void count_queued(struct mb_ws_conn *c)
{
    if (!c->shared)
        return;
    size_t queued = c->state == WS_DEAD ? 0 : queued_bytes(c);
    *c->shared += queued - c->counted;
    c->counted = queued;
}

/* ---- wslay callbacks ---- */

static ssize_t receive(struct mb_ws_conn *c, wslay_event_context_ptr ctx, uint8_t *buf, size_t len)
{
    if (c->extra_pos < c->n_extra) {
        size_t n = c->n_extra - c->extra_pos < len ? c->n_extra - c->extra_pos : len;
        memcpy(buf, c->extra + c->extra_pos, n);
        c->extra_pos += n;
        return (ssize_t)n;
    }
    if (c->turn_bytes >= READ_BYTES_PER_TURN || !listens(c)) {
        wslay_event_set_error(ctx, WSLAY_ERR_WOULDBLOCK);
        return -1;
    }
    ssize_t n;
    do {
        n = recv(c->fd, buf, len, 0);
    } while (n < 0 && errno == EINTR);
    if (n > 0) {
        c->turn_bytes += (size_t)n;
        return n;
    }
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        wslay_event_set_error(ctx, WSLAY_ERR_WOULDBLOCK);
    else
        wslay_event_set_error(ctx, WSLAY_ERR_CALLBACK_FAILURE);
    return -1;
}

static ssize_t on_recv(wslay_event_context_ptr ctx, uint8_t *buf, size_t len, int flags, void *arg)
{
    struct mb_ws_conn *c = arg;
    ssize_t n = receive(c, ctx, buf, len);
    (void)flags;
    if (n > 0 && !c->is_client)
        c->refuse_status = mb_ws_limit_feed(&c->limit, buf, (size_t)n, MB_WS_MAX_MESSAGE_BYTES);
    if (c->refuse_status == 0)
        return n;
    wslay_event_set_error(ctx, WSLAY_ERR_WOULDBLOCK); /* see take_input() */
    return -1;
}

static ssize_t on_send(wslay_event_context_ptr ctx, const uint8_t *data, size_t len, int flags,
                       void *arg)
{
    struct mb_ws_conn *c = arg;
    int more = flags & WSLAY_MSG_MORE ? MSG_MORE : 0;
    ssize_t n;
    do {
        n = send(c->fd, data, len, MSG_NOSIGNAL | more);
    } while (n < 0 && errno == EINTR);
    if (n >= 0) {
        c->sent_bytes += (uint64_t)n;
        return n;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK)
        wslay_event_set_error(ctx, WSLAY_ERR_WOULDBLOCK);
    else
        wslay_event_set_error(ctx, WSLAY_ERR_CALLBACK_FAILURE);
    return -1;
}

static int on_genmask(wslay_event_context_ptr ctx, uint8_t *buf, size_t len, void *arg)
{
    (void)ctx;
    (void)arg;
    mb_random_bytes(buf, len);
    return 0;
}

static int deliver_text(void *arg, const uint8_t *p, size_t n)
{
    struct mb_ws_conn *c = arg;
    if (c->ops.on_text && c->state != WS_DEAD)
        c->ops.on_text(c->arg, (const char *)p, n);
    return 0;
}

static void on_frame_start(wslay_event_context_ptr ctx,
                           const struct wslay_event_on_frame_recv_start_arg *frame, void *arg)
{
    struct mb_ws_conn *c = arg;
    (void)ctx;
    if (frame->opcode != WSLAY_CONTINUATION_FRAME && !wslay_is_ctrl_frame(frame->opcode))
        c->recv_is_text = frame->opcode == WSLAY_TEXT_FRAME;
    else if (wslay_is_ctrl_frame(frame->opcode))
        c->recv_is_text |= 2; /* a control frame amid a fragmented message */
}

static void on_frame_chunk(wslay_event_context_ptr ctx,
                           const struct wslay_event_on_frame_recv_chunk_arg *chunk, void *arg)
{
    struct mb_ws_conn *c = arg;
    (void)ctx;
    if (c->is_client && c->recv_is_text == 1)
        mb_ws_text_feed(&c->recv_text, chunk->data, chunk->data_length, deliver_text, c);
    else if (c->is_client && c->recv_is_text == 0 && c->ops.on_binary && c->state != WS_DEAD)
        c->ops.on_binary(c->arg, chunk->data, chunk->data_length);
}

static void on_frame_end(wslay_event_context_ptr ctx, void *arg)
{
    struct mb_ws_conn *c = arg;
    (void)ctx;
    c->recv_is_text &= 1;
}

static void take_close(struct mb_ws_conn *c, const struct wslay_event_on_msg_recv_arg *m)
{
    size_t n = m->msg_length > 2 ? m->msg_length - 2 : 0; /* after the status */
    c->peer_status = m->status_code ? m->status_code : WSLAY_CODE_NO_STATUS_RCVD;
    if (n >= sizeof c->peer_reason)
        n = sizeof c->peer_reason - 1;
    if (n > 0)
        memcpy(c->peer_reason, m->msg + 2, n);
}

const char *mb_ws_conn_reason(const struct mb_ws_conn *c)
{
    return c->peer_reason;
}

static void on_message(wslay_event_context_ptr ctx, const struct wslay_event_on_msg_recv_arg *m,
                       void *arg)
{
    struct mb_ws_conn *c = arg;
    (void)ctx;
    if (m->opcode == WSLAY_PONG)
        c->ping_outstanding = 0;
    else if (m->opcode == WSLAY_CONNECTION_CLOSE)
        take_close(c, m);
    else if (m->opcode == WSLAY_TEXT_FRAME && !c->is_client)
        deliver_text(c, m->msg, m->msg_length);
}

/* ---- life cycle ---- */

static void on_handle_closed(uv_handle_t *h)
{
    struct mb_ws_conn *c = h->data;
    if (--c->n_handles > 0)
        return;
    c->ops.on_close(c->arg, c->peer_status);
    wslay_event_context_free(c->ws);
    mb_free(c->extra);
    mb_free(c);
}

static void abort_conn(struct mb_ws_conn *c)
{
    if (c->state == WS_DEAD)
        return;
    c->state = WS_DEAD;
    count_queued(c);
    uv_close((uv_handle_t *)&c->timer, on_handle_closed);
    if (c->fd >= 0)
        uv_close((uv_handle_t *)&c->poll, on_handle_closed);
}

void mb_ws_conn_abort(struct mb_ws_conn *c)
{
    abort_conn(c);
}

int mb_ws_conn_create(uv_loop_t *loop, int is_client, const struct mb_ws_conn_ops *ops, void *arg,
                      struct mb_ws_conn **out)
{
    static const struct wslay_event_callbacks callbacks = {
        .recv_callback = on_recv,
        .send_callback = on_send,
        .genmask_callback = on_genmask,
        .on_frame_recv_start_callback = on_frame_start,
        .on_frame_recv_chunk_callback = on_frame_chunk,
        .on_frame_recv_end_callback = on_frame_end,
        .on_msg_recv_callback = on_message,
    };
    struct mb_ws_conn *c = mb_calloc(1, sizeof *c);
    if (!c)
        return MB_ENOMEM;
    int rc = is_client ? wslay_event_context_client_init(&c->ws, &callbacks, c)
                       : wslay_event_context_server_init(&c->ws, &callbacks, c);
    if (rc != 0) {
        mb_free(c);
        return MB_ENOMEM;
    }
    if (is_client)
        wslay_event_config_set_no_buffering(c->ws, 1);
    else
        wslay_event_config_set_max_recv_msg_length(c->ws, MB_WS_MAX_MESSAGE_BYTES);
    c->fd = -1;
    c->is_client = is_client;
    c->ops = *ops;
    c->arg = arg;
    c->peer_status = WSLAY_CODE_ABNORMAL_CLOSURE;
    uv_timer_init(loop, &c->timer);
    c->timer.data = c;
    c->n_handles = 1;
    *out = c;
    return 0;
}

/* ---- input and output ---- */

static void on_poll(uv_poll_t *poll, int status, int events);
static void on_timer(uv_timer_t *timer);

static void take_input(struct mb_ws_conn *c)
{
    if (c->state == WS_DEAD)
        return;
    if (wslay_event_recv(c->ws) != 0) {
        abort_conn(c);
    } else if (c->refuse_status != 0 && wslay_event_get_read_enabled(c->ws)) {
        wslay_event_shutdown_read(c->ws);
        wslay_event_queue_close(c->ws, (uint16_t)c->refuse_status, NULL, 0);
    }
}

/* The peer was refused, and has been told: it is waited for until it has ended the stream. */
static void begin_drain(struct mb_ws_conn *c)
{
    c->drains = 1;
    c->state = WS_CLOSING;
    c->sent_at_tick = c->sent_bytes;
    shutdown(c->fd, SHUT_WR);
    uv_timer_start(&c->timer, on_timer, MB_WS_CLOSE_TIMEOUT_MS, MB_WS_CLOSE_TIMEOUT_MS);
}

static void drain(struct mb_ws_conn *c)
{
    static char rest[16 * 1024]; /* looked at by nobody */
    ssize_t n = 1;

    for (size_t got = 0; n > 0 && got < READ_BYTES_PER_TURN; got += (size_t)n)
        n = recv(c->fd, rest, sizeof rest, 0);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR))
        abort_conn(c);
}

/* After any work: end the connection if both sides are done, else watch for what is wanted. */
static void settle(struct mb_ws_conn *c)
{
    count_queued(c);
    if (c->state == WS_DEAD || c->fd < 0)
        return;
    int events = 0;
    if (!c->drains && !wslay_event_want_read(c->ws) && !wslay_event_want_write(c->ws) &&
        wslay_event_get_close_sent(c->ws) && !wslay_event_get_close_received(c->ws))
        begin_drain(c);
    if (c->drains)
        events = UV_READABLE;
    /* Who is not listened to has something to read, so one of the two is always wanted. */
    if (wslay_event_want_read(c->ws) && listens(c))
        events |= UV_READABLE;
    if (wslay_event_want_write(c->ws))
        events |= UV_WRITABLE;
    if (events == 0 || uv_poll_start(&c->poll, events, on_poll) != 0)
        abort_conn(c);
}

static void write_some(struct mb_ws_conn *c)
{
    if (c->state == WS_DEAD || c->fd < 0)
        return;
    int rc = wslay_event_send(c->ws);
    if (rc == 0 && c->close_pending && !wslay_event_want_write(c->ws)) {
        c->close_pending = 0;
        /* Refused when the peer was faster: its close frame is answered already. */
        if (wslay_event_queue_close(c->ws, c->close_status, (const uint8_t *)c->close_reason,
                                    strlen(c->close_reason)) == 0)
            rc = wslay_event_send(c->ws);
    }
    if (rc != 0)
        abort_conn(c);
}

static void on_poll(uv_poll_t *poll, int status, int events)
{
    struct mb_ws_conn *c = poll->data;
    c->turn_bytes = 0;
    if (status < 0) {
        abort_conn(c);
        return;
    }
    if (c->drains)
        drain(c);
    else if (events & UV_READABLE)
        take_input(c);
    write_some(c);
    if (c->tell_below > 0 && c->state == WS_OPEN && queued_bytes(c) < c->tell_below) {
        count_queued(c);
        c->tell_below = 0;
        if (c->ops.on_writable)
            c->ops.on_writable(c->arg);
    }
    settle(c);
}

static void on_timer(uv_timer_t *timer)
{
    struct mb_ws_conn *c = timer->data;
    if (c->state == WS_CLOSING) {
        if (c->sent_bytes == c->sent_at_tick)
            abort_conn(c);
        c->sent_at_tick = c->sent_bytes;
        return;
    }
    struct wslay_event_msg ping = {.opcode = WSLAY_PING};
    if (c->ping_outstanding || wslay_event_queue_msg(c->ws, &ping) != 0)
        return;
    c->ping_outstanding = 1;
    write_some(c);
    settle(c);
}

int mb_ws_conn_start(struct mb_ws_conn *c, int fd, const void *extra, size_t n_extra,
                     struct mb_err *err)
{
    int one = 1;
    int idle_s = 60, unsent_bytes = UNSENT_BYTES;
    assert(c->fd < 0);
    if (c->state == WS_DEAD)
        return mb_err_set(err, MB_ESTATE, "websocket: closed before it was opened");
    if (n_extra > 0) {
        c->extra = mb_alloc(n_extra);
        if (!c->extra)
            return mb_err_set(err, MB_ENOMEM, "websocket: out of memory");
        memcpy(c->extra, extra, n_extra);
        c->n_extra = n_extra;
    }
    int rc = uv_poll_init(c->timer.loop, &c->poll, fd);
    if (rc != 0)
        return mb_err_set(err, MB_EIO, "websocket: uv_poll_init: %s", uv_strerror(rc));
    c->fd = fd;
    c->poll.data = c;
    c->n_handles++;
    /* Best effort: a Unix socket has neither option. */
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unsent_bytes, sizeof unsent_bytes);
    if (c->state == WS_IDLE) {
        c->state = WS_OPEN;
        uv_timer_start(&c->timer, on_timer, MB_WS_PING_INTERVAL_MS, MB_WS_PING_INTERVAL_MS);
    }
    /* The first turn parses what is here already and sends what was queued. */
    if (uv_poll_start(&c->poll, UV_READABLE | UV_WRITABLE, on_poll) != 0) {
        abort_conn(c);
        return 0;
    }
    if (n_extra > 0)
        take_input(c);
    return 0;
}

/* MB_ESTATE: behind a close frame that says what the peer did wrong. */
static int queue_msg(struct mb_ws_conn *c, uint8_t opcode, const uint8_t *p, size_t n)
{
    struct wslay_event_msg msg = {.opcode = opcode, .msg = p, .msg_length = n};
    int rc = wslay_event_queue_msg(c->ws, &msg);
    return rc == 0 ? 0 : rc == WSLAY_ERR_NO_MORE_MSG ? MB_ESTATE : MB_ENOMEM;
}

static int queue_frame(void *arg, const uint8_t *p, size_t n)
{
    return queue_msg(arg, WSLAY_TEXT_FRAME, p, n);
}

static int queue_text(struct mb_ws_conn *c, const void *p, size_t n)
{
    return mb_ws_text_feed(&c->send_text, p, n, queue_frame, c);
}

static int queue_binary(struct mb_ws_conn *c, const void *p, size_t n)
{
    return queue_msg(c, WSLAY_BINARY_FRAME, p, n);
}

static int send_with(struct mb_ws_conn *c, int (*queue)(struct mb_ws_conn *, const void *, size_t),
                     const void *p, size_t n, struct mb_err *err)
{
    if ((c->state != WS_OPEN && c->state != WS_IDLE) || wslay_event_get_close_received(c->ws))
        return mb_err_set(err, MB_ESTATE, "websocket: the connection is closing");
    size_t queued = queued_bytes(c);
    if (queued > 0 && queued + n > MB_WS_HIGH_WATER_BYTES) {
        c->tell_below = MB_WS_LOW_WATER_BYTES;
        return mb_err_set(err, MB_EFULL, "websocket: %zu bytes wait for the peer", queued);
    }
    int idle = !wslay_event_want_write(c->ws);
    int rc = queue(c, p, n);
    if (rc == MB_ESTATE)
        return mb_err_set(err, MB_ESTATE, "websocket: the connection is closing");
    if (rc != 0) {
        /* Part of it is queued: the stream can only be broken off. */
        abort_conn(c);
        return mb_err_set(err, MB_ENOMEM, "websocket: out of memory, connection dropped");
    }
    if (c->state == WS_OPEN && idle) {
        write_some(c);
        settle(c);
    }
    if (c->state != WS_DEAD && queued_bytes(c) >= MB_WS_LOW_WATER_BYTES)
        c->tell_below = MB_WS_LOW_WATER_BYTES;
    count_queued(c);
    return 0;
}

void mb_ws_conn_share(struct mb_ws_conn *c, size_t *total)
{
    c->shared = total;
}

size_t mb_ws_conn_room(struct mb_ws_conn *c)
{
    if (c->state != WS_DEAD && queued_bytes(c) >= EMPTY_BYTES) {
        c->tell_below = EMPTY_BYTES;
        return 0;
    }
    return c->shared && *c->shared >= MB_WS_SHARED_BYTES ? SMALL_FRAME_BYTES
                                                         : (size_t)MB_WS_FRAME_BYTES;
}

int mb_ws_conn_send_text(struct mb_ws_conn *c, const void *p, size_t n, struct mb_err *err)
{
    return send_with(c, queue_text, p, n, err);
}

int mb_ws_conn_send_binary(struct mb_ws_conn *c, const void *p, size_t n, struct mb_err *err)
{
    return send_with(c, queue_binary, p, n, err);
}

void mb_ws_conn_close(struct mb_ws_conn *c, int status_code, const char *reason)
{
    if (c->state == WS_DEAD || c->state == WS_CLOSING)
        return;
    if (mb_ws_text_flush(&c->send_text, queue_frame, c) != 0) {
        abort_conn(c);
        return;
    }
    c->close_pending = 1;
    c->close_status = (uint16_t)status_code;
    snprintf(c->close_reason, sizeof c->close_reason, "%s", reason ? reason : "");
    c->state = WS_CLOSING;
    c->sent_at_tick = c->sent_bytes;
    uv_timer_start(&c->timer, on_timer, MB_WS_CLOSE_TIMEOUT_MS, MB_WS_CLOSE_TIMEOUT_MS);
    write_some(c);
    settle(c);
}
