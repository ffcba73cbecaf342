/*
 * The connection and its requests.
 *
 * Happy path:
 *  1. connect: GetClusterId (without cluster metadata), CheckAlive for the version; CONNECTED.
 *  2. A request is kept packed for another try, sent with the rest of its deadline, its reply's
 *     status looked at, its callback run.
 *  3. close: every request is cancelled; when the last callback, the sync stream and the timers are
 *     gone, the channel and the client are freed.
 * Failure paths:
 *  4. Handshake fails: again after a jittered back-off until connect_timeout_ms; a refused token
 *     fails at once, and so do TLS that cannot work and a peer without gRPC, unless another head is
 *     to be asked.
 *  5. UNAVAILABLE, or a CANCELLED that is not ours, on a request that may be repeated: again after
 * a jittered back-off, inside its deadline. Everything else goes to the callback.
 *  6. WrongClusterID on any request: all state of this cluster is dropped, CLUSTER_CHANGED. Those
 *     that wait for another try end: the next cluster is not who they were meant for.
 *  7. Cancel while no call is in flight: the timer carries the callback out of the caller's stack.
 */
#include "gcs/client.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/client_internal.h"
#include "gcs/wire_check.h"

static void send_op(struct mb_gcs_op *op);
static void handshake_begin(struct mb_gcs *c);

int gcs_no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "out of memory");
}

static int is_before(const char *version, long major, long minor)
{
    char *end;
    long its_major = strtol(version, &end, 10);
    long its_minor = *end == '.' ? strtol(end + 1, NULL, 10) : 0;

    return its_major < major || (its_major == major && its_minor < minor);
}

int mb_gcs_is_modern(const struct mb_gcs *c)
{
    return c->is_modern;
}

const char *mb_gcs_version_note(const char *version)
{
    if (!is_before(version, 2, 61))
        return "newer than 2.60, the last one that was tried: going by the rules of 2.60";
    return NULL;
}

void gcs_emit(struct mb_gcs *c, enum mb_gcs_event event, const struct mb_err *err)
{
    struct mb_err ok = {0};

    if (c->state != GCS_CLOSING)
        c->cb(c->cb_arg, c, event, err ? err : &ok);
}

/* ---- requests ---- */

static void op_closed(uv_handle_t *handle)
{
    struct mb_gcs_op *op = handle->data;
    struct mb_gcs *c = op->c;

    if (op->prev)
        op->prev->next = op->next;
    else
        c->ops = op->next;
    if (op->next)
        op->next->prev = op->prev;
    mb_free(op->request);
    if (op->second)
        protobuf_c_message_free_unpacked(op->second, NULL);
    mb_grpc_channel_destroy(op->own_channel);
    gcs_value_close(op->value);
    mb_free(op);
    gcs_maybe_closed(c);
}

/* Runs complete, and frees the operation unless complete made it go on. */
static void op_finish(struct mb_gcs_op *op, const struct mb_err *err, const ProtobufCMessage *reply)
{
    gcs_complete complete = op->complete;

    op->complete = NULL;
    complete(op, err, reply);
    /* A step that gcs_continue() could not even send has finished, and closed, inside complete. */
    if (!op->complete && !uv_is_closing((uv_handle_t *)&op->timer))
        uv_close((uv_handle_t *)&op->timer, op_closed);
}

void gcs_continue(struct mb_gcs_op *op, const char *method, ProtobufCMessage *request,
                  const ProtobufCMessageDescriptor *reply_desc, gcs_complete complete)
{
    mb_free(op->request);
    op->request = mb_wire_pack(request, &op->n_request);
    op->request_desc = request->descriptor;
    protobuf_c_message_free_unpacked(request, NULL);
    op->method = method;
    op->reply_desc = reply_desc;
    op->complete = complete;
    op->attempt = 0;
    send_op(op);
}

/* The embedded status that every reply starts with, or NULL. */
static const Ray__Rpc__GcsStatus *embedded_status(const ProtobufCMessage *reply)
{
    const ProtobufCFieldDescriptor *f =
        protobuf_c_message_descriptor_get_field_by_name(reply->descriptor, "status");

    if (!f || f->type != PROTOBUF_C_TYPE_MESSAGE)
        return NULL;
    const Ray__Rpc__GcsStatus *status;
    memcpy(&status, (const char *)reply + f->offset, sizeof status);
    return status;
}

/* GcsStatus codes are Ray's StatusCode: 17 NotFound; the rest is told apart by its text. */
static int status_code(const Ray__Rpc__GcsStatus *status)
{
    if (status->code == 17)
        return MB_ENOENT;
    if (strstr(status->message, "already exists"))
        return MB_EEXIST;
    return MB_ESTATE;
}

int gcs_status_error(const Ray__Rpc__GcsStatus *status, struct mb_err *err)
{
    if (status == NULL || status->code == 0)
        return 0;
    return mb_err_set(err, status_code(status), "%s (GCS status %d)", status->message,
                      status->code);
}

/* Another cluster answers here: what was agreed with the old one is void. */
static void cluster_changed(struct mb_gcs *c, const char *detail)
{
    struct mb_err err = {0};

    if (c->state != GCS_CONNECTED)
        return;
    mb_err_set(&err, MB_ESTATE, "another cluster answers at %s: %s", c->address, detail);
    c->state = GCS_IDLE;
    c->cluster_id[0] = '\0';
    c->n_clusters++;
    c->ray_version[0] = '\0';
    gcs_heads_set_cluster(c);
    mb_gcs_unwatch(c);
    mb_gcs_sync_stop(c);
    mb_warn("gcs", "%s", err.text);
    gcs_emit(c, MB_GCS_CLUSTER_CHANGED, &err);
}

/* CANCELLED is what a head says that ends or fails over, and a proxy between; of a request that we
 * cancel ourselves nobody looks at the status. */
static int is_gone(int status)
{
    return status == MB_GRPC_UNAVAILABLE || status == MB_GRPC_CANCELLED;
}

static void op_fail(struct mb_gcs_op *op, int status, const char *detail)
{
    struct mb_err err = {0};
    struct mb_gcs *c = op->c;

    if (op->canceled) {
        mb_err_set(&err, MB_ECANCELED, "%s: cancelled", op->method);
    } else {
        int code = is_gone(status) ? MB_EUNAVAIL : mb_grpc_status_code(status);
        mb_err_set(&err, code, "GCS %s: %s: %s", c->address, mb_grpc_status_name(status), detail);
        if (status == MB_GRPC_UNAUTHENTICATED && strstr(detail, "WrongClusterID")) {
            err.code = MB_EUNAVAIL;
            cluster_changed(c, detail);
        }
    }
    op_finish(op, &err, NULL);
}

/* With several heads a try that hangs must leave time for another. */
static uint64_t try_ms(const struct mb_gcs_op *op, uint64_t now)
{
    uint64_t left = op->deadline_ms - now;

    return op->repeatable && op->c->n_heads > 1 && left > GCS_TRY_MS ? GCS_TRY_MS : left;
}

static void on_retry(uv_timer_t *timer)
{
    send_op(timer->data);
}

/* A reply is no use, or there is none: the operation is repeated or has failed. 0: it is one. */
static int op_is_over(struct mb_gcs_op *op, int status, const char *detail)
{
    uint64_t now = mb_mono_ms();

    op->call = NULL;
    if ((is_gone(status) || status == MB_GRPC_DEADLINE_EXCEEDED) && !op->canceled)
        gcs_next_head(op->c, op->channel);
    if ((is_gone(status) || (status == MB_GRPC_DEADLINE_EXCEEDED && op->c->n_heads > 1)) &&
        op->repeatable && !op->canceled && now < op->deadline_ms) {
        uint64_t wait =
            mb_backoff_ms(op->attempt++, GCS_BACKOFF_BASE_MS, GCS_BACKOFF_CAP_MS, mb_random_u64());
        if (wait > op->deadline_ms - now)
            wait = op->deadline_ms - now;
        uv_timer_start(&op->timer, on_retry, wait + 1, 0);
        return 1;
    }
    if (status != MB_GRPC_OK || op->canceled) {
        op_fail(op, status, detail ? detail : "");
        return 1;
    }
    return 0;
}

static void on_unary(void *arg, int status, const char *detail, const ProtobufCMessage *reply)
{
    struct mb_gcs_op *op = arg;
    struct mb_err err = {0};

    if (op_is_over(op, status, detail))
        return;
    if (gcs_status_error(embedded_status(reply), &err) != 0)
        reply = NULL;
    op_finish(op, &err, reply);
}

static void on_bytes(void *arg, int status, const char *detail, struct mb_grpc_bytes *reply)
{
    struct mb_gcs_op *op = arg;
    struct mb_err err = {0};

    if (op_is_over(op, status, detail)) {
        mb_grpc_bytes_destroy(reply);
        return;
    }
    op->is_written = 1;
    if (gcs_value_take(op, reply, &err) != 0)
        op_finish(op, &err, NULL);
}

void gcs_value_done(struct mb_gcs_op *op, const struct mb_err *err)
{
    if (op->canceled)
        op_fail(op, MB_GRPC_CANCELLED, "");
    else
        op_finish(op, err, NULL);
}

/* At op->channel. Nothing that a real GCS would die of is sent. */
static int call_head(struct mb_gcs_op *op, const ProtobufCMessage *request, struct mb_err *err)
{
    const uint64_t ms = try_ms(op, mb_mono_ms());
    const int rc = mb_wire_check(request, err);

    if (rc != 0)
        return rc;
    if (op->value)
        return mb_grpc_unary_bytes(op->channel, op->method, request, ms, on_bytes, op, &op->call,
                                   err);
    return mb_grpc_unary(op->channel, op->method, request, op->reply_desc, ms, on_unary, op,
                         &op->call, err);
}

static void send_op(struct mb_gcs_op *op)
{
    uint64_t now = mb_mono_ms();
    ProtobufCMessage *request;
    struct mb_err err = {0};

    if (op->canceled) {
        op_fail(op, MB_GRPC_CANCELLED, "");
        return;
    }
    if (now >= op->deadline_ms) {
        mb_err_set(&err, MB_EUNAVAIL, "GCS %s cannot be reached", op->c->address);
        op_finish(op, &err, NULL);
        return;
    }
    if (!op->internal && op->cluster != op->c->n_clusters) {
        mb_err_set(&err, MB_EUNAVAIL, "another cluster answers at %s", op->c->address);
        op_finish(op, &err, NULL);
        return;
    }
    request = op->request
                  ? protobuf_c_message_unpack(op->request_desc, NULL, op->n_request, op->request)
                  : NULL;
    op->channel = op->own_channel ? op->own_channel : op->c->channel;
    if ((request ? call_head(op, request, &err) : gcs_no_memory(&err)) != 0) {
        op->call = NULL;
        op_finish(op, &err, NULL);
    }
    protobuf_c_message_free_unpacked(request, NULL);
}

int gcs_start(struct mb_gcs *c, const struct gcs_call *call, struct mb_gcs_op **out,
              struct mb_err *err)
{
    struct mb_gcs_op *op;

    if (c->state == GCS_CLOSING || (c->state != GCS_CONNECTED && !call->internal))
        return mb_err_set(err, MB_ESTATE, "not connected to the GCS at %s", c->address);
    if (!call->request)
        return gcs_no_memory(err);
    op = mb_calloc(1, sizeof *op);
    if (!op || !(op->request = mb_wire_pack(call->request, &op->n_request))) {
        mb_free(op);
        return gcs_no_memory(err);
    }
    op->request_desc = call->request->descriptor;
    op->c = c;
    op->method = call->method;
    op->reply_desc = call->reply_desc;
    op->deadline_ms = mb_mono_ms() + (call->timeout_ms ? call->timeout_ms : GCS_TIMEOUT_MS);
    op->repeatable = call->repeatable;
    op->internal = call->internal;
    op->cluster = c->n_clusters;
    op->complete = call->complete;
    op->cb = call->cb;
    op->cb_arg = call->cb_arg;
    op->own_channel = call->own_channel;
    op->value = call->value;
    op->channel = op->own_channel ? op->own_channel : c->channel;
    int rc = call_head(op, call->request, err);
    if (rc != 0) {
        mb_free(op->request);
        mb_free(op);
        return rc;
    }
    uv_timer_init(c->loop, &op->timer);
    op->timer.data = op;
    op->next = c->ops;
    if (c->ops)
        c->ops->prev = op;
    c->ops = op;
    if (out)
        *out = op;
    return 0;
}

int gcs_repeatable(struct mb_gcs *c, const struct gcs_method *method,
                   const ProtobufCMessage *request, uint64_t timeout_ms, gcs_any_cb cb,
                   void *cb_arg, struct mb_gcs_op **op, struct mb_err *err)
{
    struct gcs_call call = {.method = method->name,
                            .request = request,
                            .reply_desc = method->reply_desc,
                            .timeout_ms = timeout_ms,
                            .repeatable = 1,
                            .complete = method->complete,
                            .cb = cb,
                            .cb_arg = cb_arg};

    return gcs_start(c, &call, op, err);
}

void mb_gcs_op_cancel(struct mb_gcs_op *op)
{
    if (op->canceled)
        return;
    op->canceled = 1;
    if (op->is_written)
        return;
    if (op->call)
        mb_grpc_call_cancel(op->call);
    else if (op->complete)
        uv_timer_start(&op->timer, on_retry, 0, 0);
}

void gcs_complete_done(struct mb_gcs_op *op, const struct mb_err *err,
                       const ProtobufCMessage *reply)
{
    (void)reply;
    ((mb_gcs_done_cb)op->cb)(op->cb_arg, err);
}

/* ---- handshake ---- */

static void on_connect_timer(uv_timer_t *timer)
{
    handshake_begin(timer->data);
}

static void handshake_failed(struct mb_gcs *c, const struct mb_err *cause)
{
    uint64_t now = mb_mono_ms();
    const char *fault = mb_grpc_channel_fault(c->channel);

    c->connect_op = NULL;
    if (c->state != GCS_CONNECTING)
        return;
    if (fault != NULL && c->n_heads == 1) {
        struct mb_err err = {0};
        c->state = GCS_IDLE;
        mb_err_set(&err, mb_grpc_channel_fault_code(c->channel), "no connection to the head: %s",
                   fault);
        gcs_emit(c, MB_GCS_CONNECT_FAILED, &err);
        return;
    }
    if (cause->code == MB_EDENIED || cause->code == MB_ENOMEM || now >= c->connect_deadline_ms) {
        /* The last try has what time was left, so the one before may know more. */
        int is_cut_short = cause->code == MB_ETIMEOUT && c->connect_cause.code != MB_OK;
        struct mb_err err = is_cut_short ? c->connect_cause : *cause;
        c->state = GCS_IDLE;
        mb_err_wrap(&err, "no connection to the GCS at %s", c->address);
        /* Not before: a proxy may say so of a head that starts. */
        if (err.code == MB_EUNSUPPORTED)
            mb_err_set(&err, MB_EUNSUPPORTED,
                       "%s answers in gRPC, but there is no GCS: that is the port of a raylet, or "
                       "of another program; the head's GCS port is wanted (6379 unless it was "
                       "given)",
                       c->address);
        if (err.code == MB_EDENIED)
            mb_err_set(&err, MB_EDENIED,
                       c->token
                           ? "the head at %s refuses the token given here: use the head's own, "
                             "a copy of its token file (~/.ray/auth_token there)"
                           : "the head at %s asks for a token and there is none here: copy "
                             "its token file to ~/.ray/auth_token (mode 0600), or set "
                             "RAY_AUTH_TOKEN",
                       c->address);
        gcs_emit(c, MB_GCS_CONNECT_FAILED, &err);
        return;
    }
    c->connect_cause = *cause;
    uint64_t wait = mb_backoff_ms(c->connect_attempt++, GCS_BACKOFF_BASE_MS, GCS_BACKOFF_CAP_MS,
                                  mb_random_u64());
    uv_timer_start(&c->connect_timer, on_connect_timer, wait + 1, 0);
}

static void on_version(struct mb_gcs_op *op, const struct mb_err *err,
                       const ProtobufCMessage *reply)
{
    struct mb_gcs *c = op->c;

    if (err->code != 0) {
        handshake_failed(c, err);
        return;
    }
    c->connect_op = NULL;
    if (c->state != GCS_CONNECTING)
        return;
    const Ray__Rpc__CheckAliveReply *m = (const Ray__Rpc__CheckAliveReply *)reply;
    size_t n = strlen(m->ray_version);
    if (n >= sizeof c->ray_version)
        n = sizeof c->ray_version - 1;
    memcpy(c->ray_version, m->ray_version, n);
    c->ray_version[n] = '\0';
    /* Our own head may say any version; it has a word that Ray has since 2.60 only. */
    c->is_modern = !is_before(c->ray_version, 2, 60) ||
                   m->_is_leader_case == RAY__RPC__CHECK_ALIVE_REPLY___IS_LEADER_IS_LEADER;
    if (n > 0 && is_before(c->ray_version, 2, 40) && !c->is_modern) {
        struct mb_err e = {0};

        mb_err_set(&e, MB_EUNSUPPORTED,
                   "the head at %s is Ray %s, which never gives a gang its nodes: use a head of "
                   "Ray 2.40 or newer",
                   c->address, c->ray_version);
        c->state = GCS_IDLE;
        gcs_emit(c, MB_GCS_CONNECT_FAILED, &e);
        return;
    }
    if (gcs_heads_set_cluster(c) != 0) {
        struct mb_err e = {0};
        gcs_no_memory(&e);
        handshake_failed(c, &e);
        return;
    }
    c->state = GCS_CONNECTED;
    gcs_emit(c, MB_GCS_CONNECTED, NULL);
    gcs_ask_heads(c);
}

static uint64_t try_timeout(const struct mb_gcs *c)
{
    uint64_t now = mb_mono_ms();
    uint64_t left = now < c->connect_deadline_ms ? c->connect_deadline_ms - now : 1;

    return left < GCS_HANDSHAKE_TRY_MS ? left : GCS_HANDSHAKE_TRY_MS;
}

static void on_cluster_id(struct mb_gcs_op *op, const struct mb_err *err,
                          const ProtobufCMessage *reply)
{
    struct mb_gcs *c = op->c;
    struct mb_err e = *err;

    if (e.code == 0) {
        const Ray__Rpc__GetClusterIdReply *m = (const Ray__Rpc__GetClusterIdReply *)reply;
        if (m->cluster_id.len != MB_NODE_ID_BYTES)
            mb_err_set(&e, MB_EPROTO, "cluster id of %zu bytes", m->cluster_id.len);
        else
            mb_hex(m->cluster_id.data, MB_NODE_ID_BYTES, c->cluster_id);
    }
    if (e.code == 0 && c->state == GCS_CONNECTING) {
        Ray__Rpc__CheckAliveRequest req = RAY__RPC__CHECK_ALIVE_REQUEST__INIT;
        struct gcs_call call = {.method = "/ray.rpc.NodeInfoGcsService/CheckAlive",
                                .request = &req.base,
                                .reply_desc = &ray__rpc__check_alive_reply__descriptor,
                                .timeout_ms = try_timeout(c),
                                .internal = 1,
                                .complete = on_version};
        if (gcs_start(c, &call, &c->connect_op, &e) == 0)
            return;
    }
    handshake_failed(c, &e);
}

static void handshake_begin(struct mb_gcs *c)
{
    struct mb_err err = {0};
    Ray__Rpc__GetClusterIdRequest req = RAY__RPC__GET_CLUSTER_ID_REQUEST__INIT;
    struct gcs_call call = {.method = "/ray.rpc.NodeInfoGcsService/GetClusterId",
                            .request = &req.base,
                            .reply_desc = &ray__rpc__get_cluster_id_reply__descriptor,
                            .timeout_ms = try_timeout(c),
                            .internal = 1,
                            .complete = on_cluster_id};

    if (gcs_start(c, &call, &c->connect_op, &err) != 0)
        handshake_failed(c, &err);
}

int mb_gcs_connect(struct mb_gcs *c, struct mb_err *err)
{
    if (c->state != GCS_IDLE || c->connect_op)
        return mb_err_set(err, MB_ESTATE, "connecting to %s already", c->address);
    c->state = GCS_CONNECTING;
    c->connect_deadline_ms = mb_mono_ms() + c->connect_timeout_ms;
    c->connect_attempt = 0;
    c->connect_cause.code = MB_OK;
    /* Through the timer: an immediate failure must not call back from inside this call. */
    uv_timer_start(&c->connect_timer, on_connect_timer, 0, 0);
    return 0;
}

/* ---- life cycle ---- */

int mb_gcs_create(uv_loop_t *loop, struct mb_grpc *grpc, const struct mb_gcs_opts *opts,
                  mb_gcs_event_cb cb, void *arg, struct mb_gcs **out, struct mb_err *err)
{
    struct mb_gcs *c = mb_calloc(1, sizeof *c);
    int rc;

    *out = NULL;
    if (!c || (opts->token && !(c->token = mb_strdup(opts->token)))) {
        mb_free(c);
        return gcs_no_memory(err);
    }
    c->loop = loop;
    c->grpc = grpc;
    c->max_message_bytes = opts->max_message_bytes;
    rc = gcs_add_heads(c, opts->address, err);
    if (rc != 0) {
        gcs_heads_close(c);
        mb_free(c);
        return rc;
    }
    c->cb = cb;
    c->cb_arg = arg;
    c->connect_timeout_ms = opts->connect_timeout_ms ? opts->connect_timeout_ms : GCS_TIMEOUT_MS;
    uv_timer_init(loop, &c->connect_timer);
    c->connect_timer.data = c;
    c->timers_open = 1;
    gcs_sync_init(c);
    gcs_watch_init(c);
    *out = c;
    return 0;
}

void gcs_maybe_closed(struct mb_gcs *c)
{
    if (c->state != GCS_CLOSING || c->ops || c->sync.stream || c->timers_open > 0)
        return;
    void (*cb)(void *) = c->closed_cb;
    void *arg = c->closed_arg;

    gcs_heads_close(c);
    mb_buf_close(&c->sync.view);
    mb_free(c);
    if (cb)
        cb(arg);
}

void gcs_timer_closed(uv_handle_t *handle)
{
    struct mb_gcs *c = handle->data;

    c->timers_open--;
    gcs_maybe_closed(c);
}

void mb_gcs_close(struct mb_gcs *c, void (*cb)(void *arg), void *arg)
{
    if (!c)
        return;
    assert(c->state != GCS_CLOSING);
    c->state = GCS_CLOSING;
    c->closed_cb = cb;
    c->closed_arg = arg;
    mb_gcs_unwatch(c);
    gcs_sync_close(c);
    for (struct mb_gcs_op *op = c->ops; op; op = op->next)
        mb_gcs_op_cancel(op);
    uv_close((uv_handle_t *)&c->watch.timer, gcs_timer_closed);
    uv_close((uv_handle_t *)&c->connect_timer, gcs_timer_closed);
}

int mb_gcs_connected(const struct mb_gcs *c)
{
    return c->state == GCS_CONNECTED;
}

const char *mb_gcs_address(const struct mb_gcs *c)
{
    return c->address;
}

const char *mb_gcs_ray_version(const struct mb_gcs *c)
{
    return c->ray_version;
}

const char *mb_gcs_cluster_id(const struct mb_gcs *c)
{
    return c->cluster_id;
}
