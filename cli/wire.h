/*
 * HTTP and WebSocket for a verb: every call blocks until its end or its deadline. One struct, one
 * thread. Two programs, two implementations: wire_loop.c (mobula: base/http, libcurl) and
 * client/wire.c (the static client: libevent, OpenSSL).
 */
#ifndef MOBULA_CLI_WIRE_H
#define MOBULA_CLI_WIRE_H

#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/err.h"

struct mb_wire;

int mb_wire_open(struct mb_wire **out, struct mb_err *err);
void mb_wire_close(struct mb_wire *w); /* NULL is legal */

struct mb_wire_request {
    const char *method;
    const char *url;            /* http:// or https://, its certificate is always verified */
    const char *const *headers; /* "Name: value", NULL-terminated; NULL: none */
    const void *body;           /* or, with body_fd >= 0, the first body_len bytes of that file */
    size_t body_len;
    int body_fd;         /* -1: none */
    uint64_t timeout_ms; /* of the whole request; 10 s to connect, 30 s without a byte */
    size_t max_answer_bytes;
};
/* 0: an answer came, whatever its status; its body is appended to *body. Redirects are not
 * followed. Else MB_E*, with a text that does not repeat the URL. */
int mb_wire_fetch(struct mb_wire *w, const struct mb_wire_request *r, long *status,
                  struct mb_buf *body, struct mb_err *err);

struct mb_wire_ops {
    void (*on_text)(void *arg, const char *text, size_t n); /* valid UTF-8, in pieces */
    void (*on_binary)(void *arg, const void *p, size_t n);
    /* 1000 and so on from the close frame, 1006 without one; http_status when the upgrade was
     * refused, else 0. Exactly once, last. */
    void (*on_end)(void *arg, int status_code, long http_status, const char *detail);
};
/* A WebSocket, to its end: 0, and on_end was called. Negative: it could not even be tried. */
int mb_wire_follow(struct mb_wire *w, const char *url, const char *const *headers,
                   const struct mb_wire_ops *ops, void *arg, struct mb_err *err);
/* From a callback of mb_wire_follow(): the end comes soon. */
void mb_wire_hang_up(struct mb_wire *w);

#endif
