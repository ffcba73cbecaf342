/* What the sources of the HTTP server share. Not for users: see server.h. */
#ifndef MOBULA_BASE_HTTP_INTERNAL_H
#define MOBULA_BASE_HTTP_INTERNAL_H

#include <stddef.h>
#include <microhttpd.h>
#include "base/buf.h"
#include "base/http/route.h"
#include "base/http/server.h"
#include "base/refusals.h"

struct mb_http_server_route {
    struct mb_http_route route; /* strings owned by the server */
    void *arg;
};

struct mb_http_server {
    uv_loop_t *loop;
    struct MHD_Daemon *daemon; /* NULL before listen and after stop */
    uv_poll_t poll;            /* on the daemon's epoll descriptor */
    uv_timer_t timer;          /* the daemon's next deadline; one-shot for the stop */
    uv_timer_t watch;          /* see watch.c; runs while there are connections */
    unsigned n_handles;
    int resumed; /* a connection was resumed since the daemon last ran */
    int stopping;
    int stopped;
    char *bind_addr;
    int is_local_too;
    int local_fd;         /* -1: there is no second listener */
    int is_local_polled;  /* local_poll is one of n_handles */
    uv_poll_t local_poll; /* on local_fd, while there is room for connections */
    char *token;
    int port;
    size_t max_body_bytes;
    unsigned max_connections;
    uint64_t idle_timeout_ms;
    int browser_guard_status;
    const char *(*closed)(void *arg);
    void *closed_arg;
    struct mb_refusals refusals; /* for want of the token */
    struct mb_http_server_route *routes;
    size_t n_routes;
    struct mb_http_req *reqs;   /* every request whose connection lives */
    struct mb_http_conn *conns; /* every connection, the newest first; see watch.c */
    struct mb_http_conn *last_conn;
    unsigned n_conns;
    unsigned n_ws;          /* WebSockets whose on_close is still to come */
    unsigned n_ws_ended;    /* since memory was given back */
    size_t ws_queued_bytes; /* what waits for their readers */
    int ws_full_said;
    void (*stop_cb)(void *arg);
    void *stop_arg;
};

/* Who answers: a request is freed when its connection is done with it and no handler owes it. */
struct mb_http_req {
    struct mb_http_server *srv;  /* NULL once the server stopped */
    struct MHD_Connection *conn; /* NULL once the connection ended */
    struct mb_http_req *prev;
    struct mb_http_req *next;
    char *uri; /* as received; parsed into target at the first call */
    struct mb_http_target target;
    char *method;
    struct mb_http_pair *headers; /* one block: the pairs, then their text */
    size_t n_headers;
    const struct mb_http_server_route *route;
    struct mb_buf body;
    uint64_t body_bytes; /* received so far, kept or not */

    int started;  /* the header block was seen */
    int is_whole; /* so was the end of its body */
    int dispatched;
    int owed;        /* a handler ran and has not answered */
    int suspended;   /* inside libmicrohttpd, waiting for resume */
    int client_gone; /* resumed only to end */
    int pinned;      /* being detached: not freed yet */
    int discard;     /* the rest of the body is read and dropped */
    int at_once;     /* too much body is announced: an answer given now goes out before it */
    int body_ended;
    int body_paused; /* its handler takes nothing now */
    mb_http_body_cb body_cb;
    void *body_arg;

    int status; /* of the answer */
    struct MHD_Response *response;
    struct mb_http_pair *reply_headers; /* owned strings */
    size_t n_reply_headers;

    mb_http_pull_cb pull; /* a streaming answer */
    void (*pull_free)(void *arg);
    void *pull_arg;
    int in_pull;
    int resume_in_pull;

    struct mb_ws *ws; /* an upgraded connection */
};

/* request.c */
struct mb_http_req *mb_http_req_create(struct mb_http_server *srv, const char *uri);
/* Copies method and headers out of the connection and parses the target. 0, MB_EINVAL, MB_ENOMEM.
 */
int mb_http_req_load(struct mb_http_req *req, struct MHD_Connection *conn, const char *method);
/* Header lookup in the shape that guard.h wants. */
const char *mb_http_req_header_fn(const void *req, const char *name);
/* The connection is done with req: it lives on only while a handler owes the answer. */
void mb_http_req_detach(struct mb_http_req *req);
void mb_http_req_free_if_done(struct mb_http_req *req);

/* reply.c: hands a finished response (or NULL: out of memory) to the connection or drops it. */
void mb_http_req_answer(struct mb_http_req *req, int status, struct MHD_Response *response);
/* Writes an answer past libmicrohttpd, which has to have none on its way, and ends this direction
 * of the connection. The other one is read on. */
void mb_http_reply_past(const struct mb_http_req *req, int status, const char *content_type,
                        const void *body, size_t n);

/* listen.c. open: the socket for the daemon, and srv->local_fd where there is to be one; drop:
 * closes that one, after its handle if it has one. */
int mb_http_listen_open(struct mb_http_server *srv, int *out_fd, int *out_port, struct mb_err *err);
void mb_http_listen_local(struct mb_http_server *srv); /* once the daemon runs */
void mb_http_listen_again(struct mb_http_server *srv); /* perhaps there is room again */
void mb_http_listen_drop(struct mb_http_server *srv);

/* server.c */
void mb_http_req_resume_connection(struct mb_http_req *req);
void mb_http_server_wake(struct mb_http_server *srv);      /* run the daemon in the next turn */
void mb_http_server_wake_soon(struct mb_http_server *srv); /* ... in a tenth of a second */
void mb_http_server_ws_ended(struct mb_http_server *srv);  /* after on_close of one of n_ws */

/* framing.c: why a request whose head has come is refused and its connection closed: 400 or 431
 * with *text, or 0. method, version: libmicrohttpd's own, as the client wrote them. */
int mb_http_framing_check(const struct mb_http_req *req, const char *method, const char *version,
                          const char **text);
/* libmicrohttpd says that it refuses a Content-Length: the answer is ours. */
void mb_http_framing_refused(struct mb_http_server *srv);

/* watch.c: libmicrohttpd's MHD_OPTION_NOTIFY_CONNECTION. */
void mb_http_watch_connection(void *arg, struct MHD_Connection *conn, void **context,
                              enum MHD_ConnectionNotificationCode what);
/* The connection waits for a header block (1) or has brought one (0). */
void mb_http_watch_waits(struct mb_http_server *srv, struct MHD_Connection *conn, int waits);

/* ws_server.c: the connection of an upgrade ended before or after the switch. */
void mb_ws_connection_gone(struct mb_ws *ws);
/* The server stops: say goodbye if the socket takes it, give the socket back at once. */
void mb_ws_drop(struct mb_ws *ws);

#endif
