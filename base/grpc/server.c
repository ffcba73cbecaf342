/*
 * The server: accepting, checking, dispatching, answering.
 *
 *  1. listen keeps a fixed number of slots waiting for calls. An arrived call moves out of its slot
 *     and the slot waits again, so running out of memory never makes the server deaf.
 *  2. The token is checked before anything else, in constant time, unless the method is public;
 *     a caller without it does not even learn which methods exist.
 *  3. A stream goes to stream.c. A unary call reads its one message, decodes it, runs its handler.
 *  4. A request counts its operations: close tag, read, answer. It is freed when it has been
 *     answered by its handler and the last operation is back.
 *  5. The handler is late: the client is told DEADLINE_EXCEEDED, on_cancel runs, the handler's own
 *     answer only frees the request. Requests wait in order of arrival, so the oldest is the next.
 *  6. The client is gone: on_cancel runs; again the answer only frees the request.
 *  7. Stopping: what is in flight is cancelled and takes way 6; requests that no handler answered
 *     are freed when the runtime has stopped.
 */
#include <errno.h>
#include <grpc/grpc_security.h>
#include <grpc/support/alloc.h>
#include <netdb.h>
#include <openssl/crypto.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/grpc/internal.h"
#include "base/grpc/tls_internal.h"
#include "base/log.h"
#include "base/ports.h"
#include "base/str.h"

enum {
    MIN_PING_INTERVAL_MS = 10000, /* Ray's clients ping each minute */
    HOST_BYTES = 256
};

/* One call the library may hand over. */
struct mb_grpc_slot {
    struct mb_grpc_tag tag;
    struct mb_grpc_server *srv;
    grpc_call *call;
    grpc_call_details details;
    grpc_metadata_array metadata;
};

struct mb_grpc_req {
    struct mb_grpc_link link;
    struct mb_grpc_server *srv;
    grpc_call *core; /* NULL when the call is over */
    unsigned n_ops;
    struct mb_grpc_tag close_tag;
    struct mb_grpc_tag recv_tag;
    struct mb_grpc_tag send_tag;
    struct mb_grpc_tag notify_tag;
    const struct mb_grpc_server_method *method;
    struct mb_grpc_pair *pairs;
    size_t n_pairs;
    char *peer; /* the library's allocation */
    grpc_byte_buffer *received;
    uint64_t deadline_ms; /* on the loop's clock */
    int core_cancelled;
    int replied;  /* a status was sent */
    int answered; /* the handler did its duty, or never ran */
    int gone;     /* nobody waits for the answer */
    void (*cancel_cb)(void *arg);
    void *cancel_arg;
};

static void arm_slot(struct mb_grpc_slot *slot);

/* ---- requests ---- */

static void req_free(struct mb_grpc_req *req)
{
    mb_grpc_link_remove(&req->link);
    if (req->received != NULL)
        grpc_byte_buffer_destroy(req->received);
    mb_grpc_pairs_free(req->pairs, req->n_pairs);
    gpr_free(req->peer);
    if (req->core != NULL)
        grpc_call_unref(req->core);
    mb_free(req);
}

static void req_op_back(struct mb_grpc_req *req)
{
    if (--req->n_ops > 0)
        return;
    if (req->answered) {
        req_free(req);
    } else if (req->core != NULL) {
        grpc_call_unref(req->core); /* the handler holds the request, the library need not */
        req->core = NULL;
    }
}

static int req_batch(struct mb_grpc_req *req, const grpc_op *ops, size_t n, struct mb_grpc_tag *tag,
                     void (*done)(struct mb_grpc_tag *tag, int ok))
{
    int rc = mb_grpc_batch(req->srv->g, req->core, ops, n, tag, done);

    if (rc == 0)
        req->n_ops++;
    return rc;
}

/* Nobody waits any more: tell the handler, once. */
static void req_give_up(struct mb_grpc_req *req)
{
    void (*cb)(void *arg) = req->cancel_cb;

    if (req->gone)
        return;
    req->gone = 1;
    mb_grpc_link_remove(&req->link);
    /* Still in a list, so that stopping finds it, but not among those that have a deadline. */
    mb_grpc_link_append(&req->srv->abandoned, &req->link);
    req->cancel_cb = NULL;
    if (cb != NULL && !req->answered)
        cb(req->cancel_arg);
}

static void on_req_sent(struct mb_grpc_tag *tag, int ok)
{
    (void)ok; /* a client that is gone cannot be told */
    req_op_back(MB_GRPC_ENTRY(tag, struct mb_grpc_req, send_tag));
}

static void send_status(struct mb_grpc_req *req, int status, const char *detail,
                        const ProtobufCMessage *reply)
{
    grpc_slice detail_slice = grpc_slice_from_copied_string(detail);
    grpc_byte_buffer *bytes = NULL;
    grpc_op ops[3];
    size_t n = 0;

    memset(ops, 0, sizeof(ops));
    ops[n++].op = GRPC_OP_SEND_INITIAL_METADATA;
    if (reply != NULL) {
        bytes = mb_grpc_pack(reply);
        ops[n].op = GRPC_OP_SEND_MESSAGE;
        ops[n++].data.send_message.send_message = bytes;
    }
    ops[n].op = GRPC_OP_SEND_STATUS_FROM_SERVER;
    ops[n].data.send_status_from_server.status = (grpc_status_code)status;
    ops[n++].data.send_status_from_server.status_details = &detail_slice;
    req->replied = 1;
    mb_grpc_sending(req->srv->g, req->peer);
    if (req_batch(req, ops, n, &req->send_tag, on_req_sent) != 0)
        grpc_call_cancel(req->core, NULL);
    if (bytes != NULL)
        grpc_byte_buffer_destroy(bytes);
    grpc_slice_unref(detail_slice);
}

/* The handler's answer, or ours when no handler runs. */
static void answer(struct mb_grpc_req *req, int status, const char *detail,
                   const ProtobufCMessage *reply)
{
    struct mb_grpc *g = req->srv->g;

    req->answered = 1;
    req->cancel_cb = NULL;
    if (!req->replied && req->core != NULL && !req->gone)
        send_status(req, status, detail, reply);
    if (req->n_ops == 0) {
        req_free(req);
        return;
    }
    mb_grpc_link_remove(&req->link);
    mb_grpc_arm_timer(g);
}

void mb_grpc_reply(struct mb_grpc_req *req, const ProtobufCMessage *reply)
{
    answer(req, MB_GRPC_OK, "", reply);
}

void mb_grpc_reply_error(struct mb_grpc_req *req, int status, const char *fmt, ...)
{
    char detail[MB_GRPC_DETAIL_MAX];
    va_list ap;

    va_start(ap, fmt);
    if (vsnprintf(detail, sizeof(detail), fmt, ap) < 0)
        detail[0] = '\0';
    va_end(ap);
    detail[mb_utf8_floor(detail, strlen(detail))] = '\0';
    answer(req, status, detail, NULL);
}

static void on_req_notify(struct mb_grpc_tag *tag, int ok)
{
    struct mb_grpc_req *req = MB_GRPC_ENTRY(tag, struct mb_grpc_req, notify_tag);
    void (*cb)(void *arg) = req->cancel_cb;

    (void)ok;
    req->cancel_cb = NULL;
    if (cb != NULL)
        cb(req->cancel_arg);
    req_op_back(req);
}

void mb_grpc_req_on_cancel(struct mb_grpc_req *req, void (*cb)(void *arg), void *arg)
{
    req->cancel_cb = cb;
    req->cancel_arg = arg;
    if (!req->gone || cb == NULL || req->srv->g->draining || req->notify_tag.done != NULL)
        return;
    req->n_ops++;
    mb_grpc_defer(req->srv->g, &req->notify_tag, on_req_notify);
}

const char *mb_grpc_req_metadata(const struct mb_grpc_req *req, const char *key)
{
    return mb_grpc_pairs_find(req->pairs, req->n_pairs, key);
}

const char *mb_grpc_req_peer(const struct mb_grpc_req *req)
{
    return req->peer;
}

static void on_req_closed(struct mb_grpc_tag *tag, int ok)
{
    struct mb_grpc_req *req = MB_GRPC_ENTRY(tag, struct mb_grpc_req, close_tag);

    (void)ok;
    if (req->core_cancelled || !req->replied)
        req_give_up(req);
    req_op_back(req);
}

static void on_req_received(struct mb_grpc_tag *tag, int ok)
{
    struct mb_grpc_req *req = MB_GRPC_ENTRY(tag, struct mb_grpc_req, recv_tag);
    ProtobufCMessage *msg = NULL;
    int status = MB_GRPC_INVALID_ARGUMENT;

    if (ok && req->received != NULL)
        msg = mb_grpc_unpack(req->method->m.request_desc, req->received, &status);
    if (req->received != NULL)
        grpc_byte_buffer_destroy(req->received);
    req->received = NULL;
    if (req->gone || req->srv->g->stopping)
        answer(req, MB_GRPC_CANCELLED, "", NULL);
    else if (msg == NULL)
        answer(req, status,
               status == MB_GRPC_RESOURCE_EXHAUSTED
                   ? "no memory for the request, or it takes too much"
                   : "the request does not decode",
               NULL);
    else
        req->method->m.unary(req->method->arg, req, msg);
    mb_grpc_message_free(msg);
    req_op_back(req);
}

/* ---- arrival ---- */

static void refuse(struct mb_grpc_req *req, int status, const char *detail)
{
    answer(req, status, detail, NULL);
}

static int start_close(struct mb_grpc_req *req)
{
    grpc_op op;

    memset(&op, 0, sizeof(op));
    op.op = GRPC_OP_RECV_CLOSE_ON_SERVER;
    op.data.recv_close_on_server.cancelled = &req->core_cancelled;
    return req_batch(req, &op, 1, &req->close_tag, on_req_closed);
}

static void start_receive(struct mb_grpc_req *req)
{
    grpc_op op;

    memset(&op, 0, sizeof(op));
    op.op = GRPC_OP_RECV_MESSAGE;
    op.data.recv_message.recv_message = &req->received;
    if (req_batch(req, &op, 1, &req->recv_tag, on_req_received) != 0)
        refuse(req, MB_GRPC_INTERNAL, "the request cannot be read");
}

static int authorized(const struct mb_grpc_server *srv, const struct mb_grpc_pair *pairs, size_t n)
{
    const char *got = mb_grpc_pairs_find(pairs, n, "authorization");
    size_t len;

    if (srv->authorization == NULL)
        return 1;
    if (got == NULL)
        return 0;
    len = strlen(srv->authorization);
    return strlen(got) == len && CRYPTO_memcmp(got, srv->authorization, len) == 0;
}

static void say_refused(struct mb_grpc_req *req)
{
    int has_token = mb_grpc_pairs_find(req->pairs, req->n_pairs, "authorization") != NULL;
    const char *port = req->peer != NULL ? strrchr(req->peer, ':') : NULL;
    char who[MB_GRPC_PEER_MAX] = "";

    if (port != NULL)
        snprintf(who, sizeof(who), "%.*s", (int)(port - req->peer), req->peer);
    mb_refusals_say(&req->srv->refusals, "grpc", who,
                    has_token ? "it gives a wrong token" : "it gives no token");
}

static const struct mb_grpc_server_method *find_method(const struct mb_grpc_server *srv,
                                                       grpc_slice name)
{
    for (size_t i = 0; i < srv->n_methods; i++) {
        if (grpc_slice_str_cmp(name, srv->methods[i].m.name) == 0)
            return &srv->methods[i];
    }
    return NULL;
}

static struct mb_grpc_req *req_new(struct mb_grpc_server *srv, grpc_call *call,
                                   struct mb_grpc_pair *pairs, size_t n_pairs)
{
    struct mb_grpc_req *req = mb_calloc(1, sizeof(*req));

    if (req == NULL)
        return NULL;
    req->srv = srv;
    req->core = call;
    req->pairs = pairs;
    req->n_pairs = n_pairs;
    req->peer = grpc_call_get_peer(call);
    req->deadline_ms = uv_now(srv->g->loop) + srv->unary_deadline_ms;
    mb_grpc_link_append(&srv->reqs, &req->link);
    return req;
}

/* call and pairs are taken. */
static void dispatch(struct mb_grpc_server *srv, const struct mb_grpc_server_method *method,
                     grpc_call *call, struct mb_grpc_pair *pairs, size_t n_pairs)
{
    int may = (method != NULL && method->m.is_public) || authorized(srv, pairs, n_pairs);
    struct mb_grpc_req *req;

    if (may && method != NULL && method->m.stream != NULL) {
        mb_grpc_stream_serve(srv->g, call, pairs, n_pairs, method->m.stream, method->arg);
        return;
    }
    srv->g->counts.requests++;
    req = req_new(srv, call, pairs, n_pairs);
    if (req == NULL) {
        grpc_call_cancel_with_status(call, GRPC_STATUS_RESOURCE_EXHAUSTED, "out of memory", NULL);
        grpc_call_unref(call);
        mb_grpc_pairs_free(pairs, n_pairs);
        return;
    }
    req->method = method;
    if (start_close(req) != 0) {
        req_free(req);
        return;
    }
    if (!may) {
        say_refused(req);
        refuse(req, MB_GRPC_UNAUTHENTICATED, "the authentication token is missing or incorrect");
    } else if (method == NULL) {
        refuse(req, MB_GRPC_UNIMPLEMENTED, "no such method");
    } else {
        start_receive(req);
    }
    mb_grpc_arm_timer(srv->g);
}

static void slot_clear(struct mb_grpc_slot *slot)
{
    grpc_call_details_destroy(&slot->details);
    grpc_metadata_array_destroy(&slot->metadata);
    slot->call = NULL;
}

static void on_arrival(struct mb_grpc_tag *tag, int ok)
{
    struct mb_grpc_slot *slot = MB_GRPC_ENTRY(tag, struct mb_grpc_slot, tag);
    struct mb_grpc_server *srv = slot->srv;
    const struct mb_grpc_server_method *method;
    struct mb_grpc_pair *pairs = NULL;
    grpc_call *call = slot->call;
    size_t n_pairs = 0;
    int rc;

    if (!ok) { /* the server is shutting down */
        slot_clear(slot);
        return;
    }
    method = find_method(srv, slot->details.method);
    rc = mb_grpc_pairs_copy(&slot->metadata, &pairs, &n_pairs);
    slot_clear(slot);
    arm_slot(slot);
    if (rc == 0) {
        dispatch(srv, method, call, pairs, n_pairs);
        return;
    }
    grpc_call_cancel_with_status(call, GRPC_STATUS_RESOURCE_EXHAUSTED, "out of memory", NULL);
    grpc_call_unref(call);
}

static void arm_slot(struct mb_grpc_slot *slot)
{
    struct mb_grpc_server *srv = slot->srv;
    grpc_call_error e;

    if (srv->g->stopping)
        return;
    grpc_call_details_init(&slot->details);
    grpc_metadata_array_init(&slot->metadata);
    mb_grpc_tag_start(srv->g, &slot->tag, on_arrival);
    e = grpc_server_request_call(srv->core, &slot->call, &slot->details, &slot->metadata,
                                 srv->g->cq, srv->g->cq, &slot->tag);
    if (e == GRPC_CALL_OK)
        return;
    mb_grpc_tag_drop(srv->g);
    slot_clear(slot);
    mb_error("grpc", "the server cannot accept calls: %s", grpc_call_error_to_string(e));
}

/* ---- deadlines ---- */

uint64_t mb_grpc_server_next_deadline(const struct mb_grpc_server *srv)
{
    if (srv->reqs.next == &srv->reqs)
        return UINT64_MAX;
    return MB_GRPC_ENTRY(srv->reqs.next, struct mb_grpc_req, link)->deadline_ms;
}

void mb_grpc_server_expire(struct mb_grpc_server *srv, uint64_t now_ms)
{
    while (mb_grpc_server_next_deadline(srv) <= now_ms) {
        struct mb_grpc_req *req = MB_GRPC_ENTRY(srv->reqs.next, struct mb_grpc_req, link);

        mb_warn("grpc", "%s: no answer within %llu ms", req->method->m.name,
                (unsigned long long)srv->unary_deadline_ms);
        send_status(req, MB_GRPC_DEADLINE_EXCEEDED, "the handler did not answer in time", NULL);
        req_give_up(req);
    }
}

/* ---- creation and end ---- */

int mb_grpc_server_create(struct mb_grpc *g, const struct mb_grpc_server_opts *opts,
                          struct mb_grpc_server **out, struct mb_err *err)
{
    static const struct mb_grpc_server_opts defaults;
    struct mb_grpc_server *srv;

    if (opts == NULL)
        opts = &defaults;
    if (g->stopping)
        return mb_err_set(err, MB_ESTATE, "gRPC server: the runtime is stopping");
    srv = mb_calloc(1, sizeof(*srv));
    if (srv == NULL)
        return mb_err_set(err, MB_ENOMEM, "gRPC server: out of memory");
    srv->g = g;
    srv->max_message_bytes =
        opts->max_message_bytes == 0 ? MB_GRPC_MESSAGE_MAX : opts->max_message_bytes;
    srv->unary_deadline_ms =
        opts->unary_deadline_ms == 0 ? MB_GRPC_UNARY_DEADLINE_MS : opts->unary_deadline_ms;
    mb_grpc_link_init(&srv->reqs);
    mb_grpc_link_init(&srv->abandoned);
    if (opts->token != NULL) {
        srv->authorization = mb_grpc_bearer(opts->token);
        if (srv->authorization == NULL) {
            mb_free(srv);
            return mb_err_set(err, MB_ENOMEM, "gRPC server: out of memory");
        }
    }
    mb_grpc_link_append(&g->servers, &srv->link);
    *out = srv;
    return 0;
}

int mb_grpc_server_add(struct mb_grpc_server *srv, const struct mb_grpc_method *methods, size_t n,
                       void *arg, struct mb_err *err)
{
    struct mb_grpc_server_method *all;

    if (srv->core != NULL)
        return mb_err_set(err, MB_ESTATE, "gRPC server: methods are added before listening");
    all = mb_reallocarray(srv->methods, srv->n_methods + n, sizeof(*all));
    if (all == NULL)
        return mb_err_set(err, MB_ENOMEM, "gRPC server: out of memory");
    srv->methods = all;
    for (size_t i = 0; i < n; i++)
        all[srv->n_methods++] = (struct mb_grpc_server_method){methods[i], arg};
    return 0;
}

/* The host of "host:port" or "[host]:port"; returns the port's text, NULL if there is none. */
static const char *split_addr(const char *addr, char host[HOST_BYTES])
{
    const char *colon = strrchr(addr, ':');

    if (colon == NULL || colon - addr >= HOST_BYTES)
        return NULL;
    snprintf(host, HOST_BYTES, "%.*s", (int)(colon - addr), addr);
    if (host[0] == '[' && mb_ends_with(host, "]")) { /* an IPv6 address */
        memmove(host, host + 1, strlen(host));
        host[strlen(host) - 1] = '\0';
    }
    return colon + 1;
}

/* The library does not say why it could not listen: ask the kernel. */
static int explain_listen(const char *addr, struct mb_err *err)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE};
    struct addrinfo *info = NULL;
    char host[HOST_BYTES];
    const char *port = split_addr(addr, host);
    int one = 1;
    int e = 0;
    int fd;

    if (port == NULL)
        return mb_err_set(err, MB_EINVAL, "cannot listen on \"%s\": expected host:port", addr);
    if (getaddrinfo(host, port, &hints, &info) != 0)
        return mb_err_set(err, MB_EINVAL, "cannot listen on %s: no such address", addr);
    fd = socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one)) != 0 ||
        bind(fd, info->ai_addr, info->ai_addrlen) != 0 || listen(fd, 1) != 0)
        e = errno;
    if (fd >= 0)
        close(fd);
    freeaddrinfo(info);
    if (e == EADDRINUSE)
        return mb_err_set(err, MB_EEXIST, "cannot listen on %s: the port is in use", addr);
    if (e != 0)
        return mb_err_sys(err, e, "cannot listen on %s", addr);
    return mb_err_set(err, MB_EIO, "cannot listen on %s", addr);
}

static grpc_server *core_new(const struct mb_grpc_server *srv)
{
    struct mb_grpc_bound bound;

    mb_grpc_bound_open(&bound, srv->max_message_bytes,
                       srv->max_message_bytes < MB_GRPC_MESSAGE_MAX);
    grpc_arg list[] = {
        bound.args[0],
        bound.args[1],
        bound.args[2],
        bound.args[3],
        mb_grpc_int_arg(GRPC_ARG_ALLOW_REUSEPORT, 0),
        mb_grpc_int_arg(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, MB_GRPC_MESSAGE_MAX),
        mb_grpc_int_arg(GRPC_ARG_MAX_CONCURRENT_STREAMS, MB_GRPC_SERVER_CONCURRENT_MAX),
        mb_grpc_int_arg(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                        MIN_PING_INTERVAL_MS),
        mb_grpc_int_arg(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
        /* What each call would pay for, and nobody here uses. */
        mb_grpc_int_arg(GRPC_ARG_ENABLE_CHANNELZ, 0),
        mb_grpc_int_arg(GRPC_ARG_ENABLE_PER_MESSAGE_COMPRESSION, 0),
    };
    grpc_channel_args args = {sizeof(list) / sizeof(list[0]), list};
    grpc_server *core = grpc_server_create(&args, NULL);

    mb_grpc_bound_close(&bound);
    grpc_server_register_completion_queue(core, srv->g->cq, NULL);
    return core;
}

/* The bound port, 0: it cannot be had. Port 0 is chosen by base/ports.h. */
static int add_port(grpc_server *core, struct mb_grpc_tls *tls, const char *addr)
{
    grpc_server_credentials *creds = mb_grpc_tls_server(tls);
    char host[HOST_BYTES], at[HOST_BYTES + 16];
    const char *wanted = split_addr(addr, host);
    int is_any = wanted != NULL && strcmp(wanted, "0") == 0, port = 0;

    for (int i = 0; is_any && port <= 0 && i < MB_PORT_RACES; i++) {
        snprintf(at, sizeof(at), "%.*s:%d", (int)(wanted - 1 - addr), addr, mb_port_pick(host));
        port = grpc_server_add_http2_port(core, at, creds);
    }
    if (!is_any)
        port = grpc_server_add_http2_port(core, addr, creds);
    grpc_server_credentials_release(creds);
    return port > 0 ? port : 0;
}

int mb_grpc_server_listen(struct mb_grpc_server *srv, const char *addr, int *out_port,
                          struct mb_err *err)
{
    grpc_server *core;
    int port;

    if (srv->core != NULL || srv->g->stopping)
        return mb_err_set(err, MB_ESTATE, "gRPC server: listening already, or stopping");
    srv->slots = mb_calloc(MB_GRPC_SERVER_SLOTS, sizeof(*srv->slots));
    if (srv->slots == NULL)
        return mb_err_set(err, MB_ENOMEM, "gRPC server: out of memory");
    core = core_new(srv);
    port = add_port(core, srv->g->tls, addr);
    if (port == 0) {
        grpc_server_destroy(core);
        mb_free(srv->slots);
        srv->slots = NULL;
        return explain_listen(addr, err);
    }
    srv->core = core;
    grpc_server_start(core);
    for (int i = 0; i < MB_GRPC_SERVER_SLOTS; i++) {
        srv->slots[i].srv = srv;
        arm_slot(&srv->slots[i]);
    }
    if (out_port != NULL)
        *out_port = port;
    return 0;
}

static void on_shutdown(struct mb_grpc_tag *tag, int ok)
{
    struct mb_grpc_server *srv = MB_GRPC_ENTRY(tag, struct mb_grpc_server, shutdown_tag);

    (void)ok;
    grpc_server_destroy(srv->core);
    srv->core = NULL;
}

void mb_grpc_server_shutdown(struct mb_grpc_server *srv)
{
    if (srv->core == NULL)
        return;
    mb_grpc_tag_start(srv->g, &srv->shutdown_tag, on_shutdown);
    grpc_server_shutdown_and_notify(srv->core, srv->g->cq, &srv->shutdown_tag);
    grpc_server_cancel_all_calls(srv->core);
}

void mb_grpc_server_free(struct mb_grpc_server *srv)
{
    while (srv->reqs.next != &srv->reqs)
        req_free(MB_GRPC_ENTRY(srv->reqs.next, struct mb_grpc_req, link));
    while (srv->abandoned.next != &srv->abandoned)
        req_free(MB_GRPC_ENTRY(srv->abandoned.next, struct mb_grpc_req, link));
    mb_grpc_link_remove(&srv->link);
    mb_free(srv->slots);
    mb_free(srv->methods);
    mb_free(srv->authorization);
    mb_free(srv);
}
