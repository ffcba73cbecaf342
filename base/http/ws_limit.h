/*
 * What a client's WebSocket frames announce (RFC 6455 section 5.2), judged by their heads alone, so
 * that a frame beyond the limit is refused before a byte of it came. Pure.
 */
#ifndef MOBULA_BASE_HTTP_WS_LIMIT_H
#define MOBULA_BASE_HTTP_WS_LIMIT_H

#include <stddef.h>
#include <stdint.h>

/* Zero-initialise. */
struct mb_ws_limit {
    uint8_t head[10];
    size_t n_head;
    uint64_t left; /* of the mask and the payload */
};

/* The next n bytes of a connection. 0, or the status to close it with: 1009 for a frame of more
 * than max_bytes, 1002 for a control frame that is longer than any may be. */
int mb_ws_limit_feed(struct mb_ws_limit *l, const uint8_t *p, size_t n, uint64_t max_bytes);

#endif
