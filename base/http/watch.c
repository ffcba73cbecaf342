/*
 * Patience: what libmicrohttpd does not notice by itself.
 *
 * 1. Every connection is noted when it is accepted and forgotten when it is closed.
 * 2. While there are any, a timer looks at all of them a few times per idle timeout.
 * 3. A connection that has not brought a whole header block within two idle timeouts of its start
 *    or of its last answer is shut down: libmicrohttpd's own timeout starts anew with each byte.
 * 4. A suspended connection is watched by nobody. If its client is gone it is resumed, and ends:
 *    a streaming answer breaks off, a request that a handler owes an answer is detached, also when
 *    its body was paused.
 * 5. The last bytes and the end of a connection that come at once: libmicrohttpd 0.9.75 reads the
 *    bytes, fewer than it asked for, takes the socket for empty until its next event, and there is
 *    none. Whoever is gone before the end of a request, with nothing left to read, is shut down.
 * 6. At its limit of connections or descriptors libmicrohttpd stops listening, and looks again
 *    only when it runs after one was closed: so it is run once more then.
 * 7. Nearly at the limit, each new connection makes the one go that has waited longest for a
 *    request, of the oldest few: idle connections, however many, never keep a client out.
 *
 * Failure: without memory to note a connection it is shut down at once.
 */
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include "base/alloc.h"
#include "base/http/internal.h"

enum {
    MAX_LOOK_MS = 5000,
    LOOKS_PER_IDLE_TIMEOUT = 4,
    SPARE_PART = 16,      /* of the connections are never left idle */
    OLDEST_LOOKED_AT = 64 /* when one has to go */
};

struct mb_http_conn {
    struct mb_http_conn *prev;
    struct mb_http_conn *next;
    struct MHD_Connection *conn;
    int waits;         /* for a header block */
    uint64_t since_ms; /* on the loop's clock */
};

static int socket_of(struct MHD_Connection *conn)
{
    return MHD_get_connection_info(conn, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
}

static struct mb_http_conn *note_of(struct MHD_Connection *conn)
{
    return MHD_get_connection_info(conn, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context;
}

static int client_is_gone(struct MHD_Connection *conn)
{
    struct pollfd p = {.fd = socket_of(conn), .events = POLLRDHUP};
    return poll(&p, 1, 0) == 1 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

static int has_unread(struct MHD_Connection *conn)
{
    int n = 0;
    return ioctl(socket_of(conn), FIONREAD, &n) != 0 || n > 0;
}

static void on_look(uv_timer_t *timer)
{
    struct mb_http_server *srv = timer->data;
    uint64_t now_ms = uv_now(srv->loop);
    for (const struct mb_http_conn *c = srv->conns; c; c = c->next) {
        if (c->waits && (now_ms - c->since_ms > 2 * srv->idle_timeout_ms ||
                         (client_is_gone(c->conn) && !has_unread(c->conn))))
            shutdown(socket_of(c->conn), SHUT_RDWR);
    }
    for (struct mb_http_req *req = srv->reqs; req; req = req->next) {
        if (!req->conn || !client_is_gone(req->conn))
            continue;
        if (req->suspended) {
            req->client_gone = 1;
            mb_http_req_resume_connection(req);
        } else if (!req->is_whole && !has_unread(req->conn)) {
            shutdown(socket_of(req->conn), SHUT_RDWR);
        }
    }
}

/* The list begins with the newest. */
static void make_room(struct mb_http_server *srv)
{
    struct mb_http_conn *longest = NULL;
    int n = 0;

    for (struct mb_http_conn *c = srv->last_conn; c && n < OLDEST_LOOKED_AT; c = c->prev, n++)
        if (c->waits && (!longest || c->since_ms < longest->since_ms))
            longest = c;
    if (longest) {
        longest->waits = 0; /* once is enough */
        shutdown(socket_of(longest->conn), SHUT_RDWR);
    }
}

static void note(struct mb_http_server *srv, struct MHD_Connection *conn, void **context)
{
    struct mb_http_conn *c = mb_calloc(1, sizeof *c);
    if (!c) {
        shutdown(socket_of(conn), SHUT_RDWR);
        return;
    }
    if (srv->n_conns >= srv->max_connections - srv->max_connections / SPARE_PART)
        make_room(srv);
    srv->n_conns++;
    c->conn = conn;
    c->waits = 1;
    c->since_ms = uv_now(srv->loop);
    c->next = srv->conns;
    if (srv->conns)
        srv->conns->prev = c;
    else
        srv->last_conn = c;
    srv->conns = c;
    *context = c;
    if (!uv_is_active((uv_handle_t *)&srv->watch)) {
        uint64_t look_ms = srv->idle_timeout_ms / LOOKS_PER_IDLE_TIMEOUT + 1;
        look_ms = look_ms < MAX_LOOK_MS ? look_ms : MAX_LOOK_MS;
        uv_timer_start(&srv->watch, on_look, look_ms, look_ms);
    }
}

static void forget(struct mb_http_server *srv, struct mb_http_conn *c)
{
    if (c->prev)
        c->prev->next = c->next;
    else
        srv->conns = c->next;
    if (c->next)
        c->next->prev = c->prev;
    else
        srv->last_conn = c->prev;
    srv->n_conns--;
    mb_free(c);
    if (!srv->conns)
        uv_timer_stop(&srv->watch);
    mb_http_server_wake(srv);
}

void mb_http_watch_connection(void *arg, struct MHD_Connection *conn, void **context,
                              enum MHD_ConnectionNotificationCode what)
{
    if (what == MHD_CONNECTION_NOTIFY_STARTED)
        note(arg, conn, context);
    else if (*context)
        forget(arg, *context);
}

void mb_http_watch_waits(struct mb_http_server *srv, struct MHD_Connection *conn, int waits)
{
    struct mb_http_conn *c = note_of(conn);
    if (!c)
        return;
    c->waits = waits;
    c->since_ms = uv_now(srv->loop);
}
