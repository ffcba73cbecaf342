/*
 * Any bytes as the messages of a driver's stream to an agent: each message is a length and its
 * bytes, sent as they are over a real connection to a server of base/grpc on the same loop. What
 * decodes is delivered in order and can be sent back, the first that does not ends the stream, and
 * its end is told exactly once, to both sides the same.
 */
#include <grpc/byte_buffer.h>
#include <grpc/slice.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "base/grpc/internal.h"
#include "proto/mobula/agent.pb-c.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MESSAGES_MAX = 16, TURNS_MAX = 100000 };

static const char method[] = "/mobula.v1.NodeAgent/Control";

static uv_loop_t loop;
static struct mb_grpc *grpc;
static struct mb_grpc_channel *channel;

/* One run. */
static int n_delivered, n_server_ends, server_status, n_good, has_bad, is_back;

static void on_message(void *arg, struct mb_grpc_stream *s, const ProtobufCMessage *msg)
{
    (void)arg;
    n_delivered++;
    mb_grpc_stream_send(s, msg, NULL); /* what was read can be sent */
}

static void on_peer_done(void *arg, struct mb_grpc_stream *s)
{
    (void)arg;
    mb_grpc_stream_finish(s, MB_GRPC_OK, "");
}

static void on_end(void *arg, struct mb_grpc_stream *s, int status, const char *detail)
{
    (void)arg;
    (void)s;
    (void)detail;
    n_server_ends++;
    server_status = status;
}

static const struct mb_grpc_stream_ops server_ops = {on_message, on_peer_done, on_end};

static void on_stream(void *arg, struct mb_grpc_stream *s)
{
    (void)arg;
    mb_grpc_stream_accept(s, &mobula__v1__driver_message__descriptor, &server_ops, NULL);
}

static void begin(void)
{
    static const struct mb_grpc_method methods[] = {{.name = method, .stream = on_stream}};
    struct mb_grpc_server *server;
    char target[32];
    int port;

    if (uv_loop_init(&loop) != 0 || mb_grpc_create(&loop, &grpc, NULL) != 0 ||
        mb_grpc_server_create(grpc, NULL, &server, NULL) != 0 ||
        mb_grpc_server_add(server, methods, 1, NULL, NULL) != 0 ||
        mb_grpc_server_listen(server, "127.0.0.1:0", &port, NULL) != 0)
        abort();
    snprintf(target, sizeof target, "127.0.0.1:%d", port);
    if (mb_grpc_channel_create(grpc, target, NULL, &channel, NULL) != 0)
        abort();
}

/* ---- a client that is not ours: raw messages, then a half-close ---- */

struct raw {
    grpc_call *call;
    struct mb_grpc_tag open_tag, send_tag, read_tag, end_tag;
    grpc_metadata_array initial, trailing;
    grpc_byte_buffer *received;
    grpc_status_code status;
    grpc_slice detail;
    const uint8_t *at, *end;
    int n_left, n_open, n_echoes;
};

static void read_next(struct raw *r);
static void send_next(struct raw *r);

static void op_back(struct raw *r)
{
    is_back = --r->n_open == 0;
}

static void on_read(struct mb_grpc_tag *tag, int ok)
{
    struct raw *r = MB_GRPC_ENTRY(tag, struct raw, read_tag);

    if (ok && r->received) {
        grpc_byte_buffer_destroy(r->received);
        r->received = NULL;
        r->n_echoes++;
        read_next(r);
    }
    op_back(r);
}

static void on_sent(struct mb_grpc_tag *tag, int ok)
{
    struct raw *r = MB_GRPC_ENTRY(tag, struct raw, send_tag);

    if (ok)
        send_next(r);
    op_back(r);
}

static void on_opened(struct mb_grpc_tag *tag, int ok)
{
    (void)ok;
    op_back(MB_GRPC_ENTRY(tag, struct raw, open_tag));
}

static void on_status(struct mb_grpc_tag *tag, int ok)
{
    (void)ok;
    op_back(MB_GRPC_ENTRY(tag, struct raw, end_tag));
}

static void start(struct raw *r, const grpc_op *ops, size_t n, struct mb_grpc_tag *tag,
                  void (*done)(struct mb_grpc_tag *tag, int ok))
{
    if (mb_grpc_batch(grpc, r->call, ops, n, tag, done) != 0)
        abort();
    r->n_open++;
}

static void read_next(struct raw *r)
{
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};

    op.data.recv_message.recv_message = &r->received;
    start(r, &op, 1, &r->read_tag, on_read);
}

/* A message in one slice or two. */
static grpc_byte_buffer *next_message(struct raw *r)
{
    size_t n = *r->at++, left = (size_t)(r->end - r->at);

    n = n < left ? n : left;
    grpc_slice parts[2] = {grpc_slice_from_copied_buffer((const char *)r->at, n / 2),
                           grpc_slice_from_copied_buffer((const char *)r->at + n / 2, n - n / 2)};
    grpc_byte_buffer *out = grpc_raw_byte_buffer_create(parts, 2);
    grpc_slice_unref(parts[0]);
    grpc_slice_unref(parts[1]);

    int status;
    ProtobufCMessage *m =
        has_bad ? NULL : mb_grpc_unpack(&mobula__v1__driver_message__descriptor, out, &status);
    has_bad |= m == NULL;
    n_good += m != NULL;
    mb_grpc_message_free(m);
    r->at += n;
    return out;
}

static void send_next(struct raw *r)
{
    grpc_op op = {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT};
    grpc_byte_buffer *bytes = NULL;

    if (r->n_left < 0) /* closed */
        return;
    if (r->n_left-- > 0 && r->at < r->end) {
        bytes = next_message(r);
        op.op = GRPC_OP_SEND_MESSAGE;
        op.data.send_message.send_message = bytes;
    } else {
        r->n_left = -1;
    }
    start(r, &op, 1, &r->send_tag, on_sent);
    if (bytes)
        grpc_byte_buffer_destroy(bytes);
}

static void open_call(struct raw *r)
{
    grpc_op ops[3];

    memset(ops, 0, sizeof ops);
    r->call = mb_grpc_core_call(channel, method, 10000);
    grpc_metadata_array_init(&r->initial);
    grpc_metadata_array_init(&r->trailing);
    ops[0].op = GRPC_OP_SEND_INITIAL_METADATA;
    ops[1].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[1].data.recv_initial_metadata.recv_initial_metadata = &r->initial;
    start(r, ops, 2, &r->open_tag, on_opened);
    ops[2].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    ops[2].data.recv_status_on_client.trailing_metadata = &r->trailing;
    ops[2].data.recv_status_on_client.status = &r->status;
    ops[2].data.recv_status_on_client.status_details = &r->detail;
    start(r, &ops[2], 1, &r->end_tag, on_status);
    read_next(r);
    send_next(r);
}

static void run_until_over(void)
{
    for (int i = 0; !(is_back && n_server_ends > 0); i++) {
        if (i == TURNS_MAX)
            abort(); /* it never ends */
        uv_run(&loop, UV_RUN_ONCE);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct raw r = {.at = data, .end = data + size, .n_left = MESSAGES_MAX};

    if (!grpc)
        begin();
    n_delivered = n_server_ends = n_good = has_bad = is_back = 0;
    open_call(&r);
    run_until_over();
    if (n_server_ends != 1 || n_delivered != n_good)
        abort();
    if (server_status != (has_bad ? MB_GRPC_INVALID_ARGUMENT : MB_GRPC_OK) ||
        (int)r.status != server_status || (!has_bad && r.n_echoes != n_good))
        abort();
    grpc_metadata_array_destroy(&r.initial);
    grpc_metadata_array_destroy(&r.trailing);
    grpc_slice_unref(r.detail);
    grpc_call_unref(r.call);
    return 0;
}
