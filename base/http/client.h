/*
 * HTTP client on a libuv loop (libcurl multi). Loop-thread only; exactly one callback per request,
 * never from inside mb_http_fetch(). HTTPS is always verified; HTTPS_PROXY, NO_PROXY, AWS_CA_BUNDLE
 * and SSL_CERT_FILE are honoured. Redirects are not followed unless asked. The program ignores
 * SIGPIPE.
 */
#ifndef MOBULA_BASE_HTTP_CLIENT_H
#define MOBULA_BASE_HTTP_CLIENT_H

#include <stddef.h>
#include <stdint.h>
#include <uv.h>
#include "base/buf.h"
#include "base/err.h"

struct mb_http_client;
struct mb_http_fetch;

int mb_http_client_create(uv_loop_t *loop, unsigned max_connections, struct mb_http_client **out,
                          struct mb_err *err);
/* For bulk: the kernel may keep this many bytes of each connection that is opened from now on ahead
 * of its reader, twice that with its own bookkeeping. Where it allows less (net.core.rmem_max), the
 * size stays its own affair. */
void mb_http_client_receive_ahead(struct mb_http_client *c, int bytes);
/* Cancels what is in flight (callbacks run with MB_ECANCELED), then cb. */
void mb_http_client_stop(struct mb_http_client *c, void (*cb)(void *arg), void *arg);
void mb_http_client_destroy(struct mb_http_client *c);

struct mb_http_response {
    int error;           /* 0, or MB_E* when no complete response came: see detail */
    const char *detail;  /* "" or a text for people */
    long status;         /* HTTP status; 0 on error */
    const uint8_t *body; /* borrowed; empty when a sink took it; at most max_body_bytes */
    size_t body_len;
    int was_sent; /* at least its beginning: there was a connection */
    /* It was sent more than once: a connection that had been used before ended without a byte of an
     * answer, and libcurl sent it again by itself. The first may have been carried out. */
    int was_repeated;
    /* Value of a response header (case-insensitive), NULL if absent; valid in the callback. */
    const char *(*header)(const struct mb_http_response *r, const char *name);
    void *impl;
};
typedef void (*mb_http_response_cb)(void *arg, const struct mb_http_response *r);

enum { MB_HTTP_SINK_PAUSE = 1, MB_HTTP_SINK_FULL = 2 };
enum { MB_HTTP_READ_BYTES = 128 * 1024 }; /* at most, of one read of a connection */

struct mb_http_request {
    const char *method; /* "GET", "PUT", ... */
    const char *url;
    const char *const *headers; /* "Name: value" lines, NULL-terminated; NULL: none */
    const void *body;           /* copied; or, with body_fd >= 0, body_len bytes of that file */
    size_t body_len;
    int body_fd; /* -1: none. Borrowed until the callback; read with pread */
    uint64_t body_offset;
    /* A sink for the response body of 2xx answers; negative return aborts. NULL: buffered.
     * MB_HTTP_SINK_PAUSE: nothing was taken; the same bytes come again after mb_http_fetch_resume()
     * (perhaps from inside it), and the server is not read meanwhile. libcurl keeps a copy of them.
     * MB_HTTP_SINK_FULL costs no copy: they were taken, and after what was read already, less than
     * MB_HTTP_READ_BYTES, nothing more comes before mb_http_fetch_resume(). */
    int (*sink)(void *arg, const void *p, size_t n);
    /* Before the first byte goes to the sink: status and headers are known. Negative aborts. */
    int (*head)(void *sink_arg, const struct mb_http_response *r);
    void *sink_arg;
    size_t max_body_bytes;       /* of a buffered body; 0: 16 MiB; more is MB_EFULL */
    uint64_t timeout_ms;         /* whole request; 0: 60 s */
    uint64_t connect_timeout_ms; /* 0: 10 s */
    uint64_t stall_timeout_ms;   /* less than 1 kB/s for this long is MB_ETIMEOUT; 0: 30 s */
    int follow_redirects;        /* at most 5, never from https to http */
    int is_direct;               /* through no proxy, whatever the environment names */
    int takes_http_proxy; /* HTTP_PROXY counts too, which libcurl leaves to http_proxy alone */
    const char *ca_file;  /* of the server's certificate, instead of the usual ones; NULL: these */
    int is_secret;        /* bodies are overwritten before their memory is given back */
    int is_fresh;         /* on a new connection, to an address that is looked up anew */
};
/* Everything in request is copied but body_fd and sink_arg. out may be NULL. */
int mb_http_fetch(struct mb_http_client *c, const struct mb_http_request *request,
                  mb_http_response_cb cb, void *arg, struct mb_http_fetch **out,
                  struct mb_err *err);
void mb_http_fetch_cancel(struct mb_http_fetch *f);
/* All of the body is on its way: the server may act on it, whatever becomes of the connection. */
int mb_http_fetch_is_sent(const struct mb_http_fetch *f);
/* After a sink said MB_HTTP_SINK_PAUSE or _FULL; not from inside a callback of f. */
void mb_http_fetch_resume(struct mb_http_fetch *f);

/* ---- WebSocket client (for following logs); messages in, nothing out ---- */
struct mb_ws_client;
struct mb_ws_client_ops {
    void (*on_text)(void *arg, const char *text, size_t n);
    void (*on_binary)(void *arg, const void *p, size_t n); /* NULL: ignored */
    /* status_code: 1000 and so on from the close frame, 1006 without one; http_status when the
     * upgrade was refused, else 0. Exactly once, last. */
    void (*on_end)(void *arg, int status_code, long http_status, const char *detail);
};
/* url ws://host:port/path (or http://). */
int mb_ws_connect(uv_loop_t *loop, const char *url, const char *const *headers,
                  const struct mb_ws_client_ops *ops, void *arg, struct mb_ws_client **out,
                  struct mb_err *err);
void mb_ws_client_close(struct mb_ws_client *ws); /* on_end follows */

#endif
