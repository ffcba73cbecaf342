/* What the sources of the HTTP client share: client.c, client_send.c, client_tls.c. Not for users:
 * see client.h.
 */
#ifndef MOBULA_BASE_HTTP_CLIENT_INTERNAL_H
#define MOBULA_BASE_HTTP_CLIENT_INTERNAL_H

#include <curl/curl.h>
#include "base/http/body.h"
#include "base/http/client.h"

enum { MB_CLIENT_MIN_BYTES_PER_S = 1000 };

/* One socket of libcurl's. */
struct watch {
    uv_poll_t poll;
    struct mb_http_client *client;
    curl_socket_t fd;
    int wants; /* libcurl's events of libuv */
    int port;  /* the local one; 0: not known yet */
    /* Polls for them and for the sender's; non-zero: it cannot. */
    int (*start)(struct watch *w);
    struct mb_http_fetch *sender; /* whose body may go here past libcurl */
    struct watch *prev;
    struct watch *next;
};

struct mb_http_client {
    uv_loop_t *loop;
    CURLM *multi;
    uv_timer_t timer;        /* libcurl's deadline */
    uv_timer_t cancel_timer; /* turns marks of cancellation into callbacks */
    uv_timer_cb on_cancel;
    uv_timer_t stall_timer; /* looks after those that are sent here */
    uv_timer_t more_timer;  /* goes on with what was read ahead */
    void (*reap)(struct mb_http_client *c);
    unsigned n_handles;
    struct watch *watches;
    struct mb_http_fetch *fetches;
    const char *ca_file; /* borrowed from the environment */
    int receive_bytes;   /* of a connection's receive buffer; 0: the kernel's own */
    int stopping;
    void (*stop_cb)(void *arg);
    void *stop_arg;
};

struct mb_http_fetch {
    struct mb_http_client *client;
    struct mb_http_fetch *prev;
    struct mb_http_fetch *next;
    CURL *easy;
    curl_socket_t socket; /* that it has now */
    struct curl_slist *headers;
    int canceled;
    int is_secret;
    int failure; /* MB_E* of our own, decided inside a callback of libcurl */
    struct mb_http_body body;
    int is_sent_here; /* the body, by client_send.c */
    int may_send;     /* ... the headers have gone */
    int is_cut;       /* ... and the connection takes no more */
    int local_port;   /* of the connection that has the request; 0: none yet */
    struct watch *watch;
    int is_read_ahead;    /* by client_tls.c, if it comes over TLS */
    uint64_t taken_bytes; /* that OpenSSL had from its connection when that was looked at */
    uint64_t stall_ms;
    uint64_t mark_ms; /* body.pos was mark_pos; 0: no connection yet */
    size_t mark_pos;
    int (*sink)(void *arg, const void *p, size_t n);
    int (*head)(void *sink_arg, const struct mb_http_response *r);
    void *sink_arg;
    size_t max_body_bytes;
    struct mb_buf answer_headers; /* name NUL value NUL ... of the last header block */
    struct mb_buf answer;
    mb_http_response_cb cb;
    void *arg;
    long n_sent; /* how often libcurl began to send it, redirected ones too */
    char detail[CURL_ERROR_SIZE];
};

/* ---- client.c ---- */
/* It ends with this code, from the loop. */
void mb_client_fail(struct mb_http_fetch *f, int code);

/* ---- client_send.c ---- */
long mb_client_status(struct mb_http_fetch *f); /* of the answer so far; 0: none */
int mb_client_sends_here(const struct mb_http_request *request);
int mb_client_send_headers(struct mb_http_fetch *f); /* MB_ENOMEM */
void mb_client_send_start(struct mb_http_fetch *f);
/* The headers go next, on the connection with this local port: the body begins (anew). */
void mb_client_send_begin(struct mb_http_fetch *f, int local_port);
/* libcurl wants body bytes: what its callback answers. */
size_t mb_client_send_ask(struct mb_http_fetch *f);
/* The transfer of easy has this socket, or one of several that try. */
void mb_client_send_watch(struct watch *w, CURL *easy);
void mb_client_send_unwatch(struct watch *w);
void mb_client_send_resume(struct mb_http_fetch *f); /* after that, from the loop */
int mb_client_send_events(const struct watch *w);    /* of libuv, besides libcurl's */
/* After libcurl has had its turn with events of the socket. */
void mb_client_send_turn(struct watch *w, int events);
void mb_client_send_end(struct mb_http_fetch *f);
int mb_client_port_of(struct watch *w); /* the local one of a connection; 0 or less: none yet */

/* ---- client_tls.c ---- */
void mb_client_tls_start(struct mb_http_fetch *f, const struct mb_http_request *request);
/* After libcurl has had a turn, before its finished transfers are taken. */
void mb_client_tls_turns(struct mb_http_client *c);
struct ssl_st *mb_client_ssl(const struct mb_http_fetch *f); /* of its connection; NULL: none */

/* ---- client_tls_out.c ---- */
void mb_client_tls_out_open(struct ssl_st *ssl); /* the handshake of a connection is through */
/* From libcurl's callbacks: what is written from now on may be kept until more is; or not. */
void mb_client_tls_out_keep(const struct mb_http_fetch *f, int keeps);

#endif
