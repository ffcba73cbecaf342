/*
 * WebSockets of the server: from an HTTP request to frames on its socket.
 *
 * 1. mb_http_upgrade checks the handshake and answers 101; text may be queued from then on.
 * 2. When the 101 is out, libmicrohttpd hands the socket over (on_upgraded) and frames flow.
 * 3. The frame layer ends (either side closed, or an error): the user's on_close, then the socket
 *    goes back to libmicrohttpd, which closes it.
 * Failures: no valid upgrade is answered 400 or 426; a connection that dies before the switch, and
 * a server that stops, end the WebSocket with on_close like any other.
 */
#include <string.h>
#include "base/alloc.h"
#include "base/http/internal.h"
#include "base/http/ws_conn.h"
#include "base/http/ws_handshake.h"
#include "base/log.h"

struct mb_ws {
    struct mb_http_server *srv;
    struct mb_http_req *req;               /* NULL once its connection is gone */
    struct MHD_UpgradeResponseHandle *urh; /* NULL before the switch and after giving back */
    struct mb_ws_conn *conn;
    struct mb_ws_ops ops;
    void *arg;
};

static void give_socket_back(struct mb_ws *ws)
{
    if (ws->req)
        ws->req->ws = NULL;
    ws->req = NULL;
    if (ws->urh) {
        MHD_upgrade_action(ws->urh, MHD_UPGRADE_ACTION_CLOSE);
        mb_http_server_wake(ws->srv);
    }
    ws->urh = NULL;
}

static void on_writable(void *arg)
{
    struct mb_ws *ws = arg;
    if (ws->ops.on_writable)
        ws->ops.on_writable(ws->arg, ws);
}

static void on_text(void *arg, const char *text, size_t n)
{
    struct mb_ws *ws = arg;
    if (ws->ops.on_text)
        ws->ops.on_text(ws->arg, ws, text, n);
}

static void on_close(void *arg, int status_code)
{
    struct mb_ws *ws = arg;
    struct mb_http_server *srv = ws->srv;
    mb_debug("http", "websocket ended status=%d", status_code);
    if (ws->ops.on_close)
        ws->ops.on_close(ws->arg, ws);
    give_socket_back(ws);
    mb_free(ws);
    mb_http_server_ws_ended(srv);
}

static void on_upgraded(void *arg, struct MHD_Connection *conn, void *con_cls, const char *extra,
                        size_t n_extra, MHD_socket fd, struct MHD_UpgradeResponseHandle *urh)
{
    struct mb_http_req *req = con_cls;
    struct mb_ws *ws = req->ws;
    struct mb_err err;
    (void)arg;
    (void)conn;
    if (!ws) { /* it ended while the 101 was on its way */
        MHD_upgrade_action(urh, MHD_UPGRADE_ACTION_CLOSE);
        mb_http_server_wake(req->srv);
        return;
    }
    ws->urh = urh;
    if (mb_ws_conn_start(ws->conn, fd, extra, n_extra, &err) != 0) {
        mb_debug("http", "%s", err.text);
        mb_ws_conn_abort(ws->conn);
        give_socket_back(ws);
    }
}

void mb_ws_connection_gone(struct mb_ws *ws)
{
    ws->req = NULL;
    mb_ws_conn_abort(ws->conn);
}

void mb_ws_drop(struct mb_ws *ws)
{
    mb_ws_conn_close(ws->conn, 1001, "server stops");
    mb_ws_conn_abort(ws->conn);
    if (ws->urh)
        give_socket_back(ws);
}

static struct mb_ws *ws_create(struct mb_http_req *req, const struct mb_ws_ops *ops, void *arg)
{
    static const struct mb_ws_conn_ops conn_ops = {
        .on_writable = on_writable, .on_text = on_text, .on_close = on_close};
    struct mb_ws *ws = mb_calloc(1, sizeof *ws);
    if (!ws || mb_ws_conn_create(req->srv->loop, 0, &conn_ops, ws, &ws->conn) != 0) {
        mb_free(ws);
        return NULL;
    }
    ws->srv = req->srv;
    ws->req = req;
    ws->ops = *ops;
    ws->arg = arg;
    mb_ws_conn_share(ws->conn, &ws->srv->ws_queued_bytes);
    ws->srv->n_ws++;
    return ws;
}

static struct MHD_Response *accept_response(const char *key)
{
    char accept[MB_WS_ACCEPT_BYTES];
    struct MHD_Response *response = MHD_create_response_for_upgrade(on_upgraded, NULL);
    if (response && mb_ws_accept_key(key, accept) == 0 &&
        MHD_add_response_header(response, MHD_HTTP_HEADER_UPGRADE, "websocket") == MHD_YES &&
        MHD_add_response_header(response, "Sec-WebSocket-Accept", accept) == MHD_YES)
        return response;
    if (response)
        MHD_destroy_response(response);
    return NULL;
}

int mb_http_upgrade(struct mb_http_req *req, const struct mb_ws_ops *ops, void *arg,
                    struct mb_ws **out, struct mb_err *err)
{
    const char *text = "";
    const char *key = mb_http_req_header(req, "Sec-WebSocket-Key");
    *out = NULL;
    if (!req->srv) {
        mb_http_req_answer(req, 400, NULL);
        return mb_err_set(err, MB_EPROTO, "websocket: the client went away before the upgrade");
    }
    int status = mb_ws_check_request(mb_http_req_header(req, "Connection"),
                                     mb_http_req_header(req, "Upgrade"),
                                     mb_http_req_header(req, "Sec-WebSocket-Version"), key, &text);
    if (status != 0) {
        mb_err_set(err, MB_EPROTO, "websocket: %s", text);
        if (status == 426)
            mb_http_reply_header(req, "Sec-WebSocket-Version", "13");
        mb_http_reply_text(req, status, "%s", text);
        return MB_EPROTO;
    }
    struct mb_ws *ws = ws_create(req, ops, arg);
    struct MHD_Response *response = ws ? accept_response(key) : NULL;
    if (!ws) {
        mb_http_reply_text(req, 500, "500 Internal Server Error\n\nout of memory");
        return mb_err_set(err, MB_ENOMEM, "websocket: out of memory");
    }
    req->ws = ws;
    *out = ws;
    /* Without a response the connection closes, which ends ws through on_close. */
    mb_http_req_answer(req, MHD_HTTP_SWITCHING_PROTOCOLS, response);
    return 0;
}

size_t mb_ws_room(struct mb_ws *ws)
{
    struct mb_http_server *srv = ws->srv;
    size_t room = mb_ws_conn_room(ws->conn), held = srv->ws_queued_bytes;

    if (held >= MB_WS_SHARED_BYTES && !srv->ws_full_said)
        mb_warn("http",
                "clients that read slowly hold %zu KiB of this server's memory: of %u WebSockets "
                "each is sent small frames until they have read",
                held / 1024, srv->n_ws);
    if (held >= MB_WS_SHARED_BYTES || held < MB_WS_SHARED_BYTES / 2)
        srv->ws_full_said = held >= MB_WS_SHARED_BYTES;
    return room;
}

int mb_ws_send_text(struct mb_ws *ws, const void *p, size_t n, struct mb_err *err)
{
    return mb_ws_conn_send_text(ws->conn, p, n, err);
}

int mb_ws_send_binary(struct mb_ws *ws, const void *p, size_t n, struct mb_err *err)
{
    return mb_ws_conn_send_binary(ws->conn, p, n, err);
}

void mb_ws_close(struct mb_ws *ws, int status_code, const char *reason)
{
    mb_ws_conn_close(ws->conn, status_code, reason);
}
