/*
 * HTTP/1.1 and WebSocket server on a libuv loop (libmicrohttpd driven from the loop, wslay frames).
 *
 * Loop-thread only. A handler gets the request when its body is complete (or part by part with
 * body_cb) and must answer it exactly once, now or later, with one of the mb_http_reply functions.
 * Limits: header block 64 KiB, to be brought within twice idle_timeout_ms, body max_body_bytes
 * (413), idle connections closed after idle_timeout_ms, at most max_connections (further ones wait
 * in the kernel's queue of 511).
 */
#ifndef MOBULA_BASE_HTTP_SERVER_H
#define MOBULA_BASE_HTTP_SERVER_H

#include <stddef.h>
#include <stdint.h>
#include <uv.h>
#include "base/err.h"

struct mb_http_server;
struct mb_http_req;
struct mb_ws; /* one WebSocket connection, server side */

typedef void (*mb_http_handler)(void *arg, struct mb_http_req *req);

enum mb_http_flags {
    MB_HTTP_PUBLIC = 1,      /* no token needed, for whatever method: 405 says nothing secret */
    MB_HTTP_BODY_STREAM = 2, /* the handler runs before the body and calls mb_http_req_body_cb() */
    MB_HTTP_WEBSOCKET = 4,   /* the handler answers with mb_http_upgrade() or an ordinary reply */
    MB_HTTP_BROWSER = 8      /* the browser guard of status 405 lets it pass */
};

struct mb_http_route {
    const char *method;  /* "GET"; HEAD is served by GET routes; "*": every method */
    const char *pattern; /* "/api/jobs/{id}/logs": {x} matches one segment, percent-decoded;
                            {x*} as last element matches the rest */
    mb_http_handler handler;
    unsigned flags;
};

struct mb_http_server_opts {
    const char *bind_addr;    /* "0.0.0.0", "::1"; NULL: 127.0.0.1 */
    int is_local_too;         /* on 127.0.0.1 besides, at the same port */
    int port;                 /* 0 picks one (base/ports.h) */
    const char *token;        /* Authorization or X-Ray-Authorization: Bearer, or the cookie
                                 ray-authentication-token; 401 missing, 403 wrong (texts of Ray);
                                 NULL: open. Copied; constant-time comparison */
    size_t max_body_bytes;    /* for buffered bodies; 0: 1 MiB */
    unsigned max_connections; /* 0: 11000, or 3/4 of the descriptors that may be open */
    uint64_t idle_timeout_ms; /* 0: 60 s */
    /* NULL, or why no request is served now: 503 with that text. Asked for every request. */
    const char *(*closed)(void *arg);
    void *closed_arg;
    int browser_guard_status; /* 405 (head) or 403 (agent): see ray-jobs-api; 0: no guard */
};

int mb_http_server_create(uv_loop_t *loop, const struct mb_http_server_opts *opts,
                          struct mb_http_server **out, struct mb_err *err);
/* Before listen. Unknown path: 404 "404: Not Found"; known path, other method: 405
 * "405: Method Not Allowed". Routes are matched in order. */
int mb_http_server_add(struct mb_http_server *srv, const struct mb_http_route *routes, size_t n,
                       void *arg, struct mb_err *err);
int mb_http_server_listen(struct mb_http_server *srv, int *out_port, struct mb_err *err);
/* Closes the listener and every connection, then calls cb on the loop. Unanswered requests must
 * still be answered (it frees them). */
void mb_http_server_stop(struct mb_http_server *srv, void (*cb)(void *arg), void *arg);
void mb_http_server_destroy(struct mb_http_server *srv); /* after the stop callback */

/* ---- the request; all strings borrowed until it is answered ---- */
const char *mb_http_req_method(const struct mb_http_req *req);
const char *mb_http_req_path(const struct mb_http_req *req);
const char *mb_http_req_param(const struct mb_http_req *req, const char *name); /* {name} or NULL */
const char *mb_http_req_query(const struct mb_http_req *req, const char *name); /* ?name= or NULL */
const char *mb_http_req_query_at(const struct mb_http_req *req, const char *name, size_t nth);
const char *mb_http_req_header(const struct mb_http_req *req, const char *name); /* or NULL */
const void *mb_http_req_body(const struct mb_http_req *req, size_t *len);        /* NUL follows */
int mb_http_req_is_browser(const struct mb_http_req *req); /* by the guard's rule */
/* MB_HTTP_BODY_STREAM: cb gets each piece (n > 0), then once n = 0 at the end; a negative return
 * ends the upload, the request must then be answered with an error. error_code in end call: 0, or
 * MB_EUNAVAIL when the client went away (answer is still owed). */
typedef int (*mb_http_body_cb)(void *arg, struct mb_http_req *req, const void *p, size_t n,
                               int error_code);
void mb_http_req_body_cb(struct mb_http_req *req, mb_http_body_cb cb, void *arg);
/* Back-pressure, from inside of cb with a piece, which is taken: the connection is not read, and
 * neither a piece nor the end comes, before mb_http_req_body_resume(); but that the client went
 * away is still told (its end call, within a few seconds). An answer resumes it too. */
void mb_http_req_body_pause(struct mb_http_req *req);
void mb_http_req_body_resume(struct mb_http_req *req);

/* ---- answers ---- */
void mb_http_reply(struct mb_http_req *req, int status, const char *content_type, const void *body,
                   size_t n); /* body is copied */
void mb_http_reply_text(struct mb_http_req *req, int status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4))); /* text/plain; charset=utf-8 */
/* Takes the jansson value (json_t *) and serialises it; NULL answers 500. */
void mb_http_reply_json(struct mb_http_req *req, int status, void *json);
/* Before the reply; content types go into the reply's own argument. */
void mb_http_reply_header(struct mb_http_req *req, const char *name, const char *value);
/* Stream a body of unknown length with constant memory: pull is called from the loop whenever the
 * connection can take more; it fills buf and returns the count, 0 for "not now" (then call
 * mb_http_resume()), MB_HTTP_PULL_END, or a negative MB_E* to break the connection. free_cb runs
 * once when the connection is done with arg (a few seconds after the client went away, too); req
 * is dead then. */
enum { MB_HTTP_PULL_END = -1000 };
typedef long (*mb_http_pull_cb)(void *arg, void *buf, size_t max);
void mb_http_reply_stream(struct mb_http_req *req, int status, const char *content_type,
                          mb_http_pull_cb pull, void (*free_cb)(void *arg), void *arg);
void mb_http_resume(struct mb_http_req *req); /* only for a streaming reply that said "not now" */

/* ---- WebSocket (RFC 6455, version 13) ---- */
struct mb_ws_ops {
    void (*on_writable)(void *arg, struct mb_ws *ws); /* queue fell below the low-water mark */
    void (*on_text)(void *arg, struct mb_ws *ws, const char *text, size_t n); /* NULL: ignored */
    void (*on_close)(void *arg, struct mb_ws *ws); /* exactly once, last; the handle dies with it */
};
/* Answers req with 101, or 400/426 if it is no valid upgrade (then *out is NULL, MB_EPROTO). */
int mb_http_upgrade(struct mb_http_req *req, const struct mb_ws_ops *ops, void *arg,
                    struct mb_ws **out, struct mb_err *err);
/* How many bytes a sender of much, which can wait, sends next; 0: not before on_writable. So at
 * most a frame is held for a slow reader: 16 KiB, or 1 KiB when the slow readers of the server hold
 * 8 MiB together, which is said once (WARN). The kernel holds 128 KiB more, and what is under way.
 */
size_t mb_ws_room(struct mb_ws *ws);
/* Queue text as frames of at most 16 KiB, split at UTF-8 borders; invalid UTF-8 is replaced by
 * U+FFFD. MB_EFULL above the high-water mark of 256 KiB: nothing was queued, wait for on_writable.
 */
int mb_ws_send_text(struct mb_ws *ws, const void *p, size_t n, struct mb_err *err);
/* The same for bytes as they are, as one binary message. n at most MB_WS_SEND_MAX_BYTES. */
enum { MB_WS_SEND_MAX_BYTES = 16 * 1024 };
int mb_ws_send_binary(struct mb_ws *ws, const void *p, size_t n, struct mb_err *err);
/* Sends what is queued, then the close frame; on_close follows. Pings every 20 s until then. */
void mb_ws_close(struct mb_ws *ws, int status_code, const char *reason);

#endif
