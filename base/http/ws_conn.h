/*
 * One WebSocket connection after the handshake, either side: wslay frames over a non-blocking
 * socket watched by uv_poll. Loop-thread only. Inside base/http; users see mb_ws and mb_ws_client.
 */
#ifndef MOBULA_BASE_HTTP_WS_CONN_H
#define MOBULA_BASE_HTTP_WS_CONN_H

#include <stddef.h>
#include <uv.h>
#include "base/err.h"

enum {
    /* Of what waits for the peer, each frame counted with 128 bytes more than its payload. */
    MB_WS_HIGH_WATER_BYTES = 256 * 1024, /* sends are refused above, the peer is not read */
    MB_WS_LOW_WATER_BYTES = 128 * 1024,  /* on_writable below */
    /* Of what waits on all connections that share a total; mb_ws_conn_room() is small above. */
    MB_WS_SHARED_BYTES = 8 * 1024 * 1024,
    MB_WS_MAX_MESSAGE_BYTES = 64 * 1024, /* received by a server; larger ends with status 1009 */
    MB_WS_PING_INTERVAL_MS = 20000,
    MB_WS_CLOSE_TIMEOUT_MS = 10000 /* of a closing connection without any progress */
};

struct mb_ws_conn;

struct mb_ws_conn_ops {
    void (*on_writable)(void *arg);
    /* Server: one whole message. Client: valid UTF-8 pieces as they come, of any message. */
    void (*on_text)(void *arg, const char *text, size_t n);
    /* Client: pieces of binary messages as they come; NULL: ignored. */
    void (*on_binary)(void *arg, const void *p, size_t n);
    /* Exactly once, last, from the loop: the socket is no longer watched, the caller closes it. The
     * connection is freed after the return. status_code 1006: no close frame came. */
    void (*on_close)(void *arg, int status_code);
};

/* Sends are queued until mb_ws_conn_start(). */
int mb_ws_conn_create(uv_loop_t *loop, int is_client, const struct mb_ws_conn_ops *ops, void *arg,
                      struct mb_ws_conn **out);
/* fd is borrowed until on_close; extra is what was already read from it. */
int mb_ws_conn_start(struct mb_ws_conn *c, int fd, const void *extra, size_t n_extra,
                     struct mb_err *err);
int mb_ws_conn_send_text(struct mb_ws_conn *c, const void *p, size_t n, struct mb_err *err);
int mb_ws_conn_send_binary(struct mb_ws_conn *c, const void *p, size_t n, struct mb_err *err);
/* Before the first send: what waits here is counted in *total, which outlives the connection. */
void mb_ws_conn_share(struct mb_ws_conn *c, size_t *total);
/* How much a sender that can wait sends next, so that no more than a frame is held for the peer:
 * 0: not before on_writable. */
size_t mb_ws_conn_room(struct mb_ws_conn *c);
void mb_ws_conn_close(struct mb_ws_conn *c, int status_code, const char *reason);
/* What the peer said with its close frame; "" if nothing. Until on_close has returned. */
const char *mb_ws_conn_reason(const struct mb_ws_conn *c);
/* Without a handshake; on_close follows. */
void mb_ws_conn_abort(struct mb_ws_conn *c);

#endif
