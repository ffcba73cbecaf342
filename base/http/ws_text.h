/*
 * Bytes in, valid UTF-8 pieces out: pure. WebSocket text frames must hold whole characters, logs do
 * not: a character may be split over two feeds, and bytes that are no UTF-8 become U+FFFD, one per
 * maximal broken part (Unicode 15, section 3.9).
 */
#ifndef MOBULA_BASE_HTTP_WS_TEXT_H
#define MOBULA_BASE_HTTP_WS_TEXT_H

#include <stddef.h>
#include <stdint.h>

/* KubeRay's Go submitter dies on frames above 32 KiB. */
enum { MB_WS_FRAME_BYTES = 16 * 1024 };

/* Zero-initialise; holds the beginning of a character whose end has not come yet. */
struct mb_ws_text {
    uint8_t carry[4];
    size_t n_carry;
};

/* Gets pieces of at most MB_WS_FRAME_BYTES, never empty; a negative return stops the feed. */
typedef int (*mb_ws_text_emit)(void *arg, const uint8_t *p, size_t n);

/* Returns 0 or what emit returned. */
int mb_ws_text_feed(struct mb_ws_text *t, const void *p, size_t n, mb_ws_text_emit emit, void *arg);
/* At the end: a half character that is left becomes U+FFFD. */
int mb_ws_text_flush(struct mb_ws_text *t, mb_ws_text_emit emit, void *arg);

#endif
