/*
 * Streams, client and server end in one machine.
 *
 *  1. Client: one batch opens the call and stays until its status is known; reading starts at once.
 *     Server: the close tag starts when the call arrives; accept sends the initial metadata and
 *     starts reading.
 *  2. Reading: one message at a time; on_message returns, the next read starts. A read without a
 *     message ends reading: the peer is done, or the call is over.
 *  3. Sending: messages are encoded into a queue; one is in flight, its end starts the next.
 *     When the queue is empty, what was asked for follows: half-close (client), status (server).
 *  4. The end: the client's opening batch, or the server's close tag, comes back. Nothing new is
 *     started. When the last operation is back, on_end runs and the stream is freed.
 *  5. A message that does not decode ends the stream: INTERNAL at a client, INVALID_ARGUMENT at a
 *     server. A stream that this end cancelled or finished delivers no more messages.
 *  6. A server stream that its handler neither accepts nor finishes is refused as UNIMPLEMENTED.
 */
#include <grpc/support/alloc.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/grpc/internal.h"
#include "base/log.h"

struct outgoing {
    struct outgoing *next;
    grpc_byte_buffer *bytes;
    size_t size_bytes;
};

struct mb_grpc_stream {
    struct mb_grpc_link link;
    struct mb_grpc *g;
    struct mb_grpc_channel *ch; /* client: NULL once the channel is gone */
    grpc_call *core;
    int is_server;
    unsigned n_ops; /* of this stream, in flight */

    const ProtobufCMessageDescriptor *recv_desc;
    struct mb_grpc_stream_ops ops;
    void *arg;
    char *peer;                 /* server: the library's allocation */
    struct mb_grpc_pair *pairs; /* server: what the client sent */
    size_t n_pairs;

    struct mb_grpc_tag end_tag;  /* client: status; server: close */
    struct mb_grpc_tag open_tag; /* server: initial metadata */
    struct mb_grpc_tag recv_tag;
    struct mb_grpc_tag send_tag;
    struct mb_grpc_tag last_tag; /* half-close or status */

    grpc_metadata *sent; /* client: kept until the opening batch is back */
    size_t n_sent;
    grpc_metadata_array initial;
    grpc_metadata_array trailing;
    grpc_status_code core_status;
    grpc_slice core_detail;
    int core_cancelled;

    grpc_byte_buffer *received;
    struct outgoing *queue_head;
    struct outgoing *queue_tail;
    size_t queued_bytes;

    int accepted;     /* client: from the start */
    int sending;      /* the head of the queue is in flight */
    int closing;      /* half-close or finish was asked for */
    int last_started; /* and is in flight or done */
    int cancelled;    /* by this end */
    int ended;        /* the end tag is back */
    int status;       /* what on_end will say */
    char detail[MB_GRPC_DETAIL_MAX];
};

static void start_read(struct mb_grpc_stream *s);
static void pump(struct mb_grpc_stream *s);

static int stream_batch(struct mb_grpc_stream *s, const grpc_op *ops, size_t n,
                        struct mb_grpc_tag *tag, void (*done)(struct mb_grpc_tag *tag, int ok))
{
    int rc = mb_grpc_batch(s->g, s->core, ops, n, tag, done);

    if (rc == 0)
        s->n_ops++;
    return rc;
}

static void set_status(struct mb_grpc_stream *s, int status, const char *detail)
{
    s->status = status;
    snprintf(s->detail, sizeof(s->detail), "%s", detail == NULL ? "" : detail);
}

static void drop_queue(struct mb_grpc_stream *s)
{
    while (s->queue_head != NULL) {
        struct outgoing *o = s->queue_head;

        s->queue_head = o->next;
        grpc_byte_buffer_destroy(o->bytes);
        mb_free(o);
    }
    s->queue_tail = NULL;
    s->queued_bytes = 0;
}

static void stream_free(struct mb_grpc_stream *s)
{
    mb_grpc_link_remove(&s->link);
    drop_queue(s);
    if (s->received != NULL)
        grpc_byte_buffer_destroy(s->received);
    mb_grpc_metadata_free(s->sent, s->n_sent);
    gpr_free(s->peer);
    mb_grpc_pairs_free(s->pairs, s->n_pairs);
    grpc_metadata_array_destroy(&s->initial);
    grpc_metadata_array_destroy(&s->trailing);
    grpc_slice_unref(s->core_detail);
    if (s->core != NULL)
        grpc_call_unref(s->core);
    mb_free(s);
}

/* One operation is back. Returns 1 if it was the last: the stream is gone. */
static int op_back(struct mb_grpc_stream *s)
{
    if (--s->n_ops > 0 || !s->ended)
        return 0;
    mb_grpc_link_remove(&s->link);
    if (s->ops.on_end != NULL)
        s->ops.on_end(s->arg, s, s->status, s->detail);
    stream_free(s);
    return 1;
}

/* ---- reading ---- */

static void deliver(struct mb_grpc_stream *s)
{
    int status;
    ProtobufCMessage *msg = mb_grpc_unpack(s->recv_desc, s->received, &status);

    grpc_byte_buffer_destroy(s->received);
    s->received = NULL;
    if (msg != NULL) {
        s->g->counts.messages_in++;
        s->ops.on_message(s->arg, s, msg);
        mb_grpc_message_free(msg);
        return;
    }
    if (!s->is_server && status == MB_GRPC_INVALID_ARGUMENT)
        status = MB_GRPC_INTERNAL;
    s->cancelled = 1;
    set_status(s, status,
               status == MB_GRPC_RESOURCE_EXHAUSTED
                   ? "no memory for a message, or it takes too much"
                   : "a message of the stream does not decode");
    grpc_call_cancel_with_status(s->core, (grpc_status_code)status, s->detail, NULL);
}

static void on_read(struct mb_grpc_tag *tag, int ok)
{
    struct mb_grpc_stream *s = MB_GRPC_ENTRY(tag, struct mb_grpc_stream, recv_tag);

    if (ok && s->received != NULL) {
        if (!s->cancelled && !s->g->stopping && !(s->is_server && s->closing))
            deliver(s);
        if (s->received != NULL) {
            grpc_byte_buffer_destroy(s->received);
            s->received = NULL;
        }
        start_read(s);
    } else if (s->is_server && !grpc_call_failed_before_recv_message(s->core) && !s->ended &&
               !s->cancelled && s->ops.on_peer_done != NULL) {
        s->ops.on_peer_done(s->arg, s);
    }
    op_back(s);
}

static void start_read(struct mb_grpc_stream *s)
{
    grpc_op op;

    memset(&op, 0, sizeof(op));
    op.op = GRPC_OP_RECV_MESSAGE;
    op.data.recv_message.recv_message = &s->received;
    if (stream_batch(s, &op, 1, &s->recv_tag, on_read) != 0)
        mb_grpc_stream_cancel(s);
}

/* ---- sending ---- */

static void on_sent(struct mb_grpc_tag *tag, int ok)
{
    struct mb_grpc_stream *s = MB_GRPC_ENTRY(tag, struct mb_grpc_stream, send_tag);
    struct outgoing *o = s->queue_head;

    s->sending = 0;
    s->queue_head = o->next;
    if (s->queue_head == NULL)
        s->queue_tail = NULL;
    s->queued_bytes -= o->size_bytes;
    grpc_byte_buffer_destroy(o->bytes);
    mb_free(o);
    s->g->counts.messages_out += ok != 0;
    if (ok)
        pump(s);
    op_back(s);
}

static void on_last_sent(struct mb_grpc_tag *tag, int ok)
{
    (void)ok; /* a peer that is gone shows in the end tag */
    op_back(MB_GRPC_ENTRY(tag, struct mb_grpc_stream, last_tag));
}

static void send_head(struct mb_grpc_stream *s)
{
    grpc_op op;

    memset(&op, 0, sizeof(op));
    op.op = GRPC_OP_SEND_MESSAGE;
    op.data.send_message.send_message = s->queue_head->bytes;
    /* More follows at once, so the library may fill its frames. */
    if (s->queue_head->next != NULL)
        op.flags = GRPC_WRITE_BUFFER_HINT;
    if (stream_batch(s, &op, 1, &s->send_tag, on_sent) == 0)
        s->sending = 1;
    else
        mb_grpc_stream_cancel(s);
}

static void send_last(struct mb_grpc_stream *s)
{
    grpc_slice detail = grpc_slice_from_copied_string(s->detail);
    grpc_op ops[2];
    size_t n = 0;

    memset(ops, 0, sizeof(ops));
    if (!s->is_server) {
        ops[n++].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    } else {
        if (!s->accepted)
            ops[n++].op = GRPC_OP_SEND_INITIAL_METADATA;
        ops[n].op = GRPC_OP_SEND_STATUS_FROM_SERVER;
        ops[n].data.send_status_from_server.status = (grpc_status_code)s->status;
        ops[n++].data.send_status_from_server.status_details = &detail;
    }
    s->last_started = 1;
    if (stream_batch(s, ops, n, &s->last_tag, on_last_sent) != 0)
        mb_grpc_stream_cancel(s);
    grpc_slice_unref(detail);
}

/* Start what may be sent next. */
static void pump(struct mb_grpc_stream *s)
{
    if (s->ended || s->cancelled || s->sending || s->last_started)
        return;
    if (s->queue_head != NULL)
        send_head(s);
    else if (s->closing)
        send_last(s);
}

int mb_grpc_stream_send(struct mb_grpc_stream *s, const ProtobufCMessage *msg, struct mb_err *err)
{
    size_t size_bytes;
    struct outgoing *o;

    if (s->closing || s->cancelled || s->ended || !s->accepted || s->g->stopping)
        return mb_err_set(err, MB_ESTATE, "the stream is closed for sending");
    size_bytes = protobuf_c_message_get_packed_size(msg) + MB_GRPC_STREAM_MESSAGE_COST;
    if (s->queued_bytes > 0 && s->queued_bytes + size_bytes > MB_GRPC_STREAM_QUEUE_MAX)
        return mb_err_set(err, MB_EFULL, "the stream has %zu bytes waiting to be sent",
                          s->queued_bytes);
    o = mb_calloc(1, sizeof(*o));
    if (o == NULL)
        return mb_err_set(err, MB_ENOMEM, "stream message: out of memory");
    o->bytes = mb_grpc_pack(msg);
    o->size_bytes = size_bytes;
    if (s->queue_tail == NULL)
        s->queue_head = o;
    else
        s->queue_tail->next = o;
    s->queue_tail = o;
    s->queued_bytes += size_bytes;
    pump(s);
    return 0;
}

size_t mb_grpc_stream_queued_bytes(const struct mb_grpc_stream *s)
{
    return s->queued_bytes;
}

void mb_grpc_stream_close_send(struct mb_grpc_stream *s)
{
    if (s->is_server || s->closing)
        return;
    s->closing = 1;
    pump(s);
}

void mb_grpc_stream_finish(struct mb_grpc_stream *s, int status, const char *detail)
{
    if (!s->is_server || s->closing || s->cancelled || s->ended)
        return;
    s->closing = 1;
    set_status(s, status, detail);
    pump(s);
}

void mb_grpc_stream_cancel(struct mb_grpc_stream *s)
{
    if (s->cancelled || s->ended)
        return;
    s->cancelled = 1;
    set_status(s, MB_GRPC_CANCELLED, "cancelled");
    grpc_call_cancel(s->core, NULL);
}

const char *mb_grpc_stream_metadata(const struct mb_grpc_stream *s, const char *key)
{
    return mb_grpc_pairs_find(s->pairs, s->n_pairs, key);
}

const char *mb_grpc_stream_peer(const struct mb_grpc_stream *s)
{
    return s->peer != NULL ? s->peer : "";
}

void mb_grpc_streams_cancel(struct mb_grpc *g, const struct mb_grpc_channel *only)
{
    for (struct mb_grpc_link *l = g->streams.next; l != &g->streams; l = l->next) {
        struct mb_grpc_stream *s = MB_GRPC_ENTRY(l, struct mb_grpc_stream, link);

        if (only != NULL && s->ch != only)
            continue;
        s->ch = NULL;
        mb_grpc_stream_cancel(s);
    }
}

/* ---- client ---- */

static void on_client_end(struct mb_grpc_tag *tag, int ok)
{
    struct mb_grpc_stream *s = MB_GRPC_ENTRY(tag, struct mb_grpc_stream, end_tag);

    (void)ok; /* always succeeds; the status says the rest */
    s->ended = 1;
    if (!s->cancelled) {
        s->status = (int)s->core_status;
        mb_grpc_detail(s->core_detail, s->detail);
        if (s->ch != NULL)
            mb_grpc_channel_heard(s->ch, s->status);
    }
    op_back(s);
}

static int start_client(struct mb_grpc_stream *s)
{
    grpc_op ops[3];

    memset(ops, 0, sizeof(ops));
    ops[0].op = GRPC_OP_SEND_INITIAL_METADATA;
    ops[0].data.send_initial_metadata.count = s->n_sent;
    ops[0].data.send_initial_metadata.metadata = s->sent;
    ops[1].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[1].data.recv_initial_metadata.recv_initial_metadata = &s->initial;
    ops[2].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    ops[2].data.recv_status_on_client.trailing_metadata = &s->trailing;
    ops[2].data.recv_status_on_client.status = &s->core_status;
    ops[2].data.recv_status_on_client.status_details = &s->core_detail;
    return stream_batch(s, ops, 3, &s->end_tag, on_client_end);
}

static struct mb_grpc_stream *stream_new(struct mb_grpc *g)
{
    struct mb_grpc_stream *s = mb_calloc(1, sizeof(*s));

    if (s == NULL)
        return NULL;
    mb_grpc_link_init(&s->link);
    s->g = g;
    s->core_detail = grpc_empty_slice();
    grpc_metadata_array_init(&s->initial);
    grpc_metadata_array_init(&s->trailing);
    return s;
}

static int stream_metadata(struct mb_grpc_stream *s, const struct mb_grpc_channel *ch,
                           const struct mb_grpc_metadata *metadata, size_t n_metadata,
                           struct mb_err *err)
{
    s->sent = mb_calloc(n_metadata + 1, sizeof(*s->sent));
    if (s->sent == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    for (size_t i = 0; i < n_metadata; i++) {
        if (mb_grpc_metadata_check(metadata[i].key, metadata[i].value) != 0)
            return mb_err_set(err, MB_EINVAL, "metadata %s: not allowed in a header",
                              metadata[i].key);
        s->sent[s->n_sent++] = mb_grpc_metadata_make(metadata[i].key, metadata[i].value);
    }
    if (ch->authorization != NULL)
        s->sent[s->n_sent++] = mb_grpc_metadata_make("authorization", ch->authorization);
    return 0;
}

int mb_grpc_stream_open(struct mb_grpc_channel *ch, const char *method,
                        const ProtobufCMessageDescriptor *recv_desc,
                        const struct mb_grpc_metadata *metadata, size_t n_metadata,
                        uint64_t timeout_ms, const struct mb_grpc_stream_ops *ops, void *arg,
                        struct mb_grpc_stream **out, struct mb_err *err)
{
    struct mb_grpc_stream *s;
    int rc;

    if (ch->g->stopping)
        return mb_err_set(err, MB_ESTATE, "%s: the runtime is stopping", method);
    s = stream_new(ch->g);
    if (s == NULL)
        return mb_err_set(err, MB_ENOMEM, "%s: out of memory", method);
    rc = stream_metadata(s, ch, metadata, n_metadata, err);
    if (rc != 0) {
        mb_err_wrap(err, "%s", method);
        stream_free(s);
        return rc;
    }
    s->ch = ch;
    s->recv_desc = recv_desc;
    s->ops = *ops;
    s->arg = arg;
    s->accepted = 1;
    s->core = mb_grpc_core_call(ch, method, timeout_ms);
    if (start_client(s) != 0) {
        stream_free(s);
        return mb_err_set(err, MB_ESTATE, "%s: the library refused the call", method);
    }
    mb_grpc_link_append(&ch->g->streams, &s->link);
    start_read(s);
    *out = s;
    return 0;
}

/* ---- server ---- */

static void on_server_close(struct mb_grpc_tag *tag, int ok)
{
    struct mb_grpc_stream *s = MB_GRPC_ENTRY(tag, struct mb_grpc_stream, end_tag);

    (void)ok;
    s->ended = 1;
    if (s->core_cancelled && !s->cancelled)
        set_status(s, MB_GRPC_CANCELLED, "the client went away");
    op_back(s);
}

static void on_opened(struct mb_grpc_tag *tag, int ok)
{
    (void)ok; /* a client that is gone shows in the end tag */
    op_back(MB_GRPC_ENTRY(tag, struct mb_grpc_stream, open_tag));
}

void mb_grpc_stream_accept(struct mb_grpc_stream *s, const ProtobufCMessageDescriptor *recv_desc,
                           const struct mb_grpc_stream_ops *ops, void *arg)
{
    grpc_op op;

    if (!s->is_server || s->accepted || s->closing || s->ended)
        return;
    s->accepted = 1;
    s->recv_desc = recv_desc;
    s->ops = *ops;
    s->arg = arg;
    memset(&op, 0, sizeof(op));
    op.op = GRPC_OP_SEND_INITIAL_METADATA;
    if (stream_batch(s, &op, 1, &s->open_tag, on_opened) != 0)
        mb_grpc_stream_cancel(s);
    start_read(s);
}

void mb_grpc_stream_serve(struct mb_grpc *g, grpc_call *call, struct mb_grpc_pair *pairs,
                          size_t n_pairs, mb_grpc_stream_handler handler, void *arg)
{
    struct mb_grpc_stream *s = stream_new(g);
    grpc_op op;

    if (s == NULL) {
        grpc_call_cancel_with_status(call, GRPC_STATUS_RESOURCE_EXHAUSTED, "out of memory", NULL);
        grpc_call_unref(call);
        mb_grpc_pairs_free(pairs, n_pairs);
        return;
    }
    s->is_server = 1;
    s->core = call;
    s->peer = grpc_call_get_peer(call);
    s->pairs = pairs;
    s->n_pairs = n_pairs;
    memset(&op, 0, sizeof(op));
    op.op = GRPC_OP_RECV_CLOSE_ON_SERVER;
    op.data.recv_close_on_server.cancelled = &s->core_cancelled;
    if (stream_batch(s, &op, 1, &s->end_tag, on_server_close) != 0) {
        stream_free(s);
        return;
    }
    mb_grpc_link_append(&g->streams, &s->link);
    s->n_ops++; /* the stream outlives the handler */
    handler(arg, s);
    if (!s->accepted && !s->closing)
        mb_grpc_stream_finish(s, MB_GRPC_UNIMPLEMENTED, "the stream was not accepted");
    op_back(s);
}
