/*
 * WebSocket frames for a client (RFC 6455 section 5): bytes in, pieces of messages out; pure. For
 * the client that has no wslay.
 */
#ifndef MOBULA_BASE_HTTP_WS_FRAME_H
#define MOBULA_BASE_HTTP_WS_FRAME_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum { MB_WS_OP_TEXT = 1, MB_WS_OP_BINARY = 2, MB_WS_OP_CLOSE = 8, MB_WS_OP_PING, MB_WS_OP_PONG };
enum { MB_WS_CONTROL_MAX = 125, MB_WS_CONTROL_FRAME_MAX = MB_WS_CONTROL_MAX + 6 };

/* Zero-initialise. */
struct mb_ws_frames {
    uint8_t head[10];
    size_t n_head;
    uint64_t left; /* of the payload */
    int in_payload;
    int opcode;  /* of the frame */
    int message; /* opcode of the message that has not ended; 0: none */
    uint8_t control[MB_WS_CONTROL_MAX];
    size_t n_control;
};

struct mb_ws_frame_ops {
    void (*on_data)(void *arg, int opcode, const uint8_t *p,
                    size_t n); /* text or binary, a piece */
    void (*on_control)(void *arg, int opcode, const uint8_t *p, size_t n);
};
/* MB_EPROTO: the server sent what no server may; everything before was handed out. */
int mb_ws_frames_feed(struct mb_ws_frames *f, const void *p, size_t n,
                      const struct mb_ws_frame_ops *ops, void *arg, struct mb_err *err);

/* A control frame as a client sends it, n at most MB_WS_CONTROL_MAX; returns its bytes in out. */
size_t mb_ws_frame_control(int opcode, const void *p, size_t n, const uint8_t mask[4],
                           uint8_t out[MB_WS_CONTROL_FRAME_MAX]);

#endif
