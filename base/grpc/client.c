/*
 * Channels and unary calls.
 *
 *  1. mb_grpc_unary() packs the request, starts one batch with everything a unary call does, and
 *     enters the call into the runtime's list. If anything fails, nothing has started.
 *  2. The batch's tag comes back exactly once, whatever happened: answered, refused, deadline,
 *     cancelled, connection lost. Then the reply is unpacked, cb runs, the call is freed.
 *  3. A reply that does not decode, or an OK without one, is INTERNAL for the caller. One that is
 *     wanted as it came is not decoded.
 *  4. Destroying a channel cancels its calls; they come back through 2. The library's channel goes
 *     when it is not connecting any more: in the middle of that the library loses the connection.
 */
#include <grpc/grpc_security.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>
#include <string.h>
#include "base/alloc.h"
#include "base/grpc/internal.h"
#include "base/grpc/tls_internal.h"

enum {
    KEEPALIVE_MS = 300000, /* Ray's; servers refuse pings more often than each five minutes */
    KEEPALIVE_TIMEOUT_MS = 120000,
    BACKOFF_INITIAL_MS = 200,
    BACKOFF_MAX_MS = 5000,
    CONNECT_TIMEOUT_MS = 5000,
    SETTLE_MS = 1000 /* a handshake takes a few round trips; a peer that is silent costs a stop this
                        long, one that accepts and then is silent costs memory of one connection */
};

struct mb_grpc_call {
    struct mb_grpc_tag tag;
    struct mb_grpc_link link;
    struct mb_grpc *g;
    struct mb_grpc_channel *ch; /* NULL once the channel is gone */
    grpc_call *core;
    grpc_metadata *sent; /* kept until the batch is back */
    size_t n_sent;
    grpc_metadata_array initial;
    grpc_metadata_array trailing;
    grpc_byte_buffer *received;
    grpc_status_code status;
    grpc_slice detail;
    const ProtobufCMessageDescriptor *reply_desc;
    mb_grpc_unary_cb cb; /* exactly one of cb, bytes_cb */
    mb_grpc_bytes_cb bytes_cb;
    void *arg;
};

/* ---- channels ---- */

static grpc_channel *connect_core(const struct mb_grpc *g, const char *target,
                                  size_t max_message_bytes, int unacknowledged_ms)
{
    const int timeout_ms = unacknowledged_ms > 0 ? unacknowledged_ms : KEEPALIVE_TIMEOUT_MS;
    struct mb_grpc_bound bound;

    mb_grpc_bound_open(&bound, max_message_bytes, 1);
    grpc_arg list[] = {
        mb_grpc_int_arg(GRPC_ARG_ENABLE_HTTP_PROXY, 0),
        mb_grpc_int_arg(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1),
        mb_grpc_int_arg(GRPC_ARG_ENABLE_RETRIES, 0),
        bound.args[0],
        bound.args[1],
        bound.args[2],
        bound.args[3],
        mb_grpc_int_arg(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, MB_GRPC_MESSAGE_MAX),
        mb_grpc_int_arg(GRPC_ARG_KEEPALIVE_TIME_MS, KEEPALIVE_MS),
        mb_grpc_int_arg(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, timeout_ms), /* and of the socket */
        mb_grpc_int_arg(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, BACKOFF_INITIAL_MS),
        mb_grpc_int_arg(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, BACKOFF_MAX_MS),
        mb_grpc_int_arg(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, CONNECT_TIMEOUT_MS),
        /* What each call would pay for, and nobody here uses. */
        mb_grpc_int_arg(GRPC_ARG_ENABLE_CHANNELZ, 0),
        mb_grpc_int_arg(GRPC_ARG_ENABLE_PER_MESSAGE_COMPRESSION, 0),
        mb_grpc_int_arg(GRPC_ARG_CLIENT_IDLE_TIMEOUT_MS, INT32_MAX),
    };
    grpc_channel_args args = {sizeof(list) / sizeof(list[0]), list};
    grpc_channel_credentials *creds = mb_grpc_tls_client(g->tls);
    grpc_channel *core = grpc_channel_create(target, creds, &args);

    grpc_channel_credentials_release(creds);
    mb_grpc_bound_close(&bound);
    return core;
}

int mb_grpc_channel_create(struct mb_grpc *g, const char *target,
                           const struct mb_grpc_channel_opts *opts, struct mb_grpc_channel **out,
                           struct mb_err *err)
{
    size_t max_bytes = opts == NULL ? 0 : opts->max_message_bytes;
    const char *token = opts == NULL ? NULL : opts->token;
    struct mb_grpc_channel *ch;

    if (g->stopping)
        return mb_err_set(err, MB_ESTATE, "channel to %s: the runtime is stopping", target);
    ch = mb_calloc(1, sizeof(*ch));
    if (ch == NULL)
        return mb_err_set(err, MB_ENOMEM, "channel to %s: out of memory", target);
    mb_grpc_link_init(&ch->link);
    ch->g = g;
    ch->target = mb_strdup(target);
    if (ch->target == NULL) {
        mb_grpc_channel_free(ch);
        return mb_err_set(err, MB_ENOMEM, "channel to %s: out of memory", target);
    }
    if (token != NULL) {
        ch->authorization = mb_grpc_bearer(token);
        if (ch->authorization == NULL) {
            mb_grpc_channel_free(ch);
            return mb_err_set(err, MB_ENOMEM, "channel to %s: out of memory", target);
        }
        if (mb_grpc_metadata_check("authorization", ch->authorization) != 0) {
            mb_grpc_channel_free(ch);
            return mb_err_set(err, MB_EINVAL,
                              "channel to %s: the token has bytes that no header can carry",
                              target);
        }
    }
    ch->core = connect_core(g, target, max_bytes == 0 ? MB_GRPC_MESSAGE_MAX : max_bytes,
                            opts == NULL ? 0 : opts->unacknowledged_ms);
    mb_grpc_link_append(&g->channels, &ch->link);
    *out = ch;
    return 0;
}

void mb_grpc_channel_free(struct mb_grpc_channel *ch)
{
    mb_grpc_link_remove(&ch->link);
    mb_grpc_fault_close(ch);
    mb_free(ch->target);
    mb_grpc_pairs_free(ch->pairs, ch->n_pairs);
    mb_free(ch->authorization);
    mb_free(ch);
}

static void on_settled(struct mb_grpc_tag *tag, int ok)
{
    struct mb_grpc_channel *ch = MB_GRPC_ENTRY(tag, struct mb_grpc_channel, settled);

    (void)ok; /* not ok: it still is connecting, and has had its time */
    grpc_channel_destroy(ch->core);
    ch->core = NULL;
    if (ch->is_destroyed)
        mb_grpc_channel_free(ch);
}

void mb_grpc_channel_settle(struct mb_grpc_channel *ch)
{
    if (ch->is_settling || ch->core == NULL)
        return;
    if (grpc_channel_check_connectivity_state(ch->core, 0) == GRPC_CHANNEL_CONNECTING) {
        ch->is_settling = 1;
        mb_grpc_tag_start(ch->g, &ch->settled, on_settled);
        grpc_channel_watch_connectivity_state(ch->core, GRPC_CHANNEL_CONNECTING,
                                              mb_grpc_deadline(SETTLE_MS), ch->g->cq, &ch->settled);
        return;
    }
    grpc_channel_destroy(ch->core);
    ch->core = NULL;
}

void mb_grpc_channel_destroy(struct mb_grpc_channel *ch)
{
    if (ch == NULL)
        return;
    mb_grpc_calls_cancel(ch->g, ch);
    mb_grpc_streams_cancel(ch->g, ch);
    mb_grpc_fault_close(ch);
    mb_grpc_channel_settle(ch);
    ch->is_destroyed = 1;
    if (ch->core == NULL)
        mb_grpc_channel_free(ch);
}

static void remove_pair(struct mb_grpc_channel *ch, size_t i)
{
    mb_free(ch->pairs[i].key);
    mb_free(ch->pairs[i].value);
    ch->pairs[i] = ch->pairs[--ch->n_pairs];
}

static int add_pair(struct mb_grpc_channel *ch, const char *key, const char *value)
{
    struct mb_grpc_pair *pairs = mb_reallocarray(ch->pairs, ch->n_pairs + 1, sizeof(*ch->pairs));
    struct mb_grpc_pair pair;

    if (pairs == NULL)
        return MB_ENOMEM;
    ch->pairs = pairs;
    pair.key = mb_strdup(key);
    pair.value = mb_strdup(value);
    if (pair.key == NULL || pair.value == NULL) {
        mb_free(pair.key);
        mb_free(pair.value);
        return MB_ENOMEM;
    }
    ch->pairs[ch->n_pairs++] = pair;
    return 0;
}

int mb_grpc_channel_metadata(struct mb_grpc_channel *ch, const char *key, const char *value)
{
    char *copy;

    if (value != NULL && mb_grpc_metadata_check(key, value) != 0)
        return MB_EINVAL;
    for (size_t i = 0; i < ch->n_pairs; i++) {
        if (strcmp(ch->pairs[i].key, key) != 0)
            continue;
        if (value == NULL) {
            remove_pair(ch, i);
            return 0;
        }
        copy = mb_strdup(value);
        if (copy == NULL)
            return MB_ENOMEM;
        mb_free(ch->pairs[i].value);
        ch->pairs[i].value = copy;
        return 0;
    }
    return value == NULL ? 0 : add_pair(ch, key, value);
}

gpr_timespec mb_grpc_deadline(uint64_t timeout_ms)
{
    if (timeout_ms == 0 || timeout_ms > INT32_MAX)
        return gpr_inf_future(GPR_CLOCK_MONOTONIC);
    return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                        gpr_time_from_millis((int64_t)timeout_ms, GPR_TIMESPAN));
}

grpc_call *mb_grpc_core_call(struct mb_grpc_channel *ch, const char *method, uint64_t timeout_ms)
{
    grpc_slice name = grpc_slice_from_copied_string(method);
    grpc_call *core = grpc_channel_create_call(ch->core, NULL, GRPC_PROPAGATE_DEFAULTS, ch->g->cq,
                                               name, NULL, mb_grpc_deadline(timeout_ms), NULL);

    grpc_slice_unref(name);
    return core;
}

grpc_metadata mb_grpc_metadata_make(const char *key, const char *value)
{
    grpc_metadata md;

    memset(&md, 0, sizeof(md));
    md.key = grpc_slice_from_copied_string(key);
    md.value = grpc_slice_from_copied_string(value);
    return md;
}

void mb_grpc_metadata_free(grpc_metadata *list, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        grpc_slice_unref(list[i].key);
        grpc_slice_unref(list[i].value);
    }
    mb_free(list);
}

/* ---- unary calls ---- */

static void call_free(struct mb_grpc_call *call)
{
    mb_grpc_link_remove(&call->link);
    mb_grpc_metadata_free(call->sent, call->n_sent);
    grpc_metadata_array_destroy(&call->initial);
    grpc_metadata_array_destroy(&call->trailing);
    if (call->received != NULL)
        grpc_byte_buffer_destroy(call->received);
    grpc_slice_unref(call->detail);
    if (call->core != NULL)
        grpc_call_unref(call->core);
    mb_free(call);
}

/* Whom the channel talks to is known once somebody answered. */
static void note_peer(struct mb_grpc_channel *ch, grpc_call *core, int status)
{
    char *peer;

    if (status != MB_GRPC_OK || ch->peer[0] != '\0') {
        if (status == MB_GRPC_UNAVAILABLE)
            ch->peer[0] = '\0';
        return;
    }
    peer = grpc_call_get_peer(core);
    if (peer != NULL && strlen(peer) < sizeof(ch->peer))
        strcpy(ch->peer, peer);
    gpr_free(peer);
}

static void on_call_done(struct mb_grpc_tag *tag, int ok)
{
    struct mb_grpc_call *call = MB_GRPC_ENTRY(tag, struct mb_grpc_call, tag);
    ProtobufCMessage *reply = NULL;
    struct mb_grpc_bytes *bytes = NULL;
    char detail[MB_GRPC_DETAIL_MAX];
    int status = (int)call->status;
    int decoded;

    (void)ok; /* a batch with RECV_STATUS_ON_CLIENT always succeeds; the status says the rest */
    mb_grpc_detail(call->detail, detail);
    if (status == MB_GRPC_OK) {
        if (call->received != NULL && call->cb != NULL)
            reply = mb_grpc_unpack(call->reply_desc, call->received, &decoded);
        else if (call->received != NULL)
            bytes = mb_grpc_bytes_take(call->received, &decoded);
        if (reply == NULL && bytes == NULL) {
            status = MB_GRPC_INTERNAL;
            strcpy(detail,
                   call->received == NULL ? "OK without a reply" : "the reply does not decode");
        }
    }
    if (bytes != NULL)
        call->received = NULL;
    call->g->counts.calls++;
    call->g->counts.calls_failed += status != MB_GRPC_OK;
    mb_grpc_link_remove(&call->link);
    if (call->ch != NULL) {
        note_peer(call->ch, call->core, status);
        mb_grpc_channel_heard(call->ch, status);
    }
    if (call->cb != NULL)
        call->cb(call->arg, status, detail, reply);
    else
        call->bytes_cb(call->arg, status, detail, bytes);
    mb_grpc_message_free(reply);
    call_free(call);
}

/* The channel's pairs and the token. */
static int make_metadata(const struct mb_grpc_channel *ch, struct mb_grpc_call *call)
{
    size_t max = ch->n_pairs + 1;

    call->sent = mb_calloc(max, sizeof(*call->sent));
    if (call->sent == NULL)
        return MB_ENOMEM;
    for (size_t i = 0; i < ch->n_pairs; i++)
        call->sent[call->n_sent++] = mb_grpc_metadata_make(ch->pairs[i].key, ch->pairs[i].value);
    if (ch->authorization != NULL)
        call->sent[call->n_sent++] = mb_grpc_metadata_make("authorization", ch->authorization);
    return 0;
}

static int start_unary(struct mb_grpc_call *call, const ProtobufCMessage *request)
{
    grpc_byte_buffer *bytes = mb_grpc_pack(request);
    grpc_op ops[6];
    int rc;

    memset(ops, 0, sizeof(ops));
    ops[0].op = GRPC_OP_SEND_INITIAL_METADATA;
    ops[0].data.send_initial_metadata.count = call->n_sent;
    ops[0].data.send_initial_metadata.metadata = call->sent;
    ops[1].op = GRPC_OP_SEND_MESSAGE;
    ops[1].data.send_message.send_message = bytes;
    ops[2].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    ops[3].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[3].data.recv_initial_metadata.recv_initial_metadata = &call->initial;
    ops[4].op = GRPC_OP_RECV_MESSAGE;
    ops[4].data.recv_message.recv_message = &call->received;
    ops[5].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    ops[5].data.recv_status_on_client.trailing_metadata = &call->trailing;
    ops[5].data.recv_status_on_client.status = &call->status;
    ops[5].data.recv_status_on_client.status_details = &call->detail;
    rc = mb_grpc_batch(call->g, call->core, ops, 6, &call->tag, on_call_done);
    grpc_byte_buffer_destroy(bytes);
    return rc;
}

/* template: what becomes of the reply. */
static int begin_unary(struct mb_grpc_channel *ch, const char *method,
                       const ProtobufCMessage *request, const struct mb_grpc_call *template,
                       uint64_t timeout_ms, struct mb_grpc_call **out_call, struct mb_err *err)
{
    struct mb_grpc_call *call;

    if (timeout_ms == 0)
        return mb_err_set(err, MB_EINVAL, "%s: a unary call needs a deadline", method);
    if (ch->g->stopping)
        return mb_err_set(err, MB_ESTATE, "%s: the runtime is stopping", method);
    call = mb_calloc(1, sizeof(*call));
    if (call == NULL)
        return mb_err_set(err, MB_ENOMEM, "%s: out of memory", method);
    *call = *template;
    mb_grpc_link_init(&call->link);
    call->g = ch->g;
    call->ch = ch;
    call->detail = grpc_empty_slice();
    grpc_metadata_array_init(&call->initial);
    grpc_metadata_array_init(&call->trailing);
    if (make_metadata(ch, call) != 0) {
        call_free(call);
        return mb_err_set(err, MB_ENOMEM, "%s: out of memory", method);
    }
    call->core = mb_grpc_core_call(ch, method, timeout_ms);
    mb_grpc_sending(ch->g, ch->peer);
    if (start_unary(call, request) != 0) {
        call_free(call);
        return mb_err_set(err, MB_ESTATE, "%s: the library refused the call", method);
    }
    mb_grpc_link_append(&ch->g->calls, &call->link);
    if (out_call != NULL)
        *out_call = call;
    return 0;
}

int mb_grpc_unary(struct mb_grpc_channel *ch, const char *method, const ProtobufCMessage *request,
                  const ProtobufCMessageDescriptor *reply_desc, uint64_t timeout_ms,
                  mb_grpc_unary_cb cb, void *arg, struct mb_grpc_call **out_call,
                  struct mb_err *err)
{
    const struct mb_grpc_call template = {.reply_desc = reply_desc, .cb = cb, .arg = arg};

    return begin_unary(ch, method, request, &template, timeout_ms, out_call, err);
}

int mb_grpc_unary_bytes(struct mb_grpc_channel *ch, const char *method,
                        const ProtobufCMessage *request, uint64_t timeout_ms, mb_grpc_bytes_cb cb,
                        void *arg, struct mb_grpc_call **out_call, struct mb_err *err)
{
    const struct mb_grpc_call template = {.bytes_cb = cb, .arg = arg};

    return begin_unary(ch, method, request, &template, timeout_ms, out_call, err);
}

void mb_grpc_call_cancel(struct mb_grpc_call *call)
{
    grpc_call_cancel(call->core, NULL);
}

void mb_grpc_calls_cancel(struct mb_grpc *g, const struct mb_grpc_channel *only)
{
    for (struct mb_grpc_link *l = g->calls.next; l != &g->calls; l = l->next) {
        struct mb_grpc_call *call = MB_GRPC_ENTRY(l, struct mb_grpc_call, link);

        if (only != NULL && call->ch != only)
            continue;
        call->ch = NULL;
        grpc_call_cancel(call->core, NULL);
    }
}
