/* Streams over loopback: both ends of base/grpc in one process. */
#include "grpc_fixture.h"

typedef Ray__Rpc__InternalKVPutRequest chunk;
#define chunk_desc (&ray__rpc__internal_kvput_request__descriptor)

/* One end of a stream, and what it saw. */
struct end {
    struct mb_grpc_stream *s;
    int n_messages;
    size_t n_bytes;
    int n_in_order;
    int n_peer_done;
    int n_ended;
    int status;
    char detail[256];
    int echo;           /* send every message back */
    int finish_on_done; /* server: status to finish with when the client is done; -1: leave open */
    int n_opened;       /* server */
    char seen[64];      /* server: metadata node_id */
    int cancel_at;      /* cancel on the n-th message; 0: never */
};

static int send_chunk(struct mb_grpc_stream *s, int number, size_t size_bytes, struct mb_err *err)
{
    static uint8_t payload[1 << 20];
    chunk c = RAY__RPC__INTERNAL_KVPUT_REQUEST__INIT;
    char key[16];

    c.key.len = (size_t)snprintf(key, sizeof(key), "%d", number);
    c.key.data = (uint8_t *)key;
    c.value.data = payload;
    c.value.len = size_bytes;
    return mb_grpc_stream_send(s, &c.base, err);
}

static void on_message(void *arg, struct mb_grpc_stream *s, const ProtobufCMessage *msg)
{
    struct end *e = arg;
    const chunk *c = (const void *)msg;
    char key[16];
    int len = snprintf(key, sizeof(key), "%d", e->n_messages);

    assert_ptr_equal(s, e->s);
    assert_int_equal(e->n_ended, 0);
    e->n_in_order += c->key.len == (size_t)len && memcmp(c->key.data, key, (size_t)len) == 0;
    e->n_messages++;
    e->n_bytes += c->value.len;
    if (e->echo)
        assert_int_equal(mb_grpc_stream_send(s, msg, NULL), 0);
    if (e->n_messages == e->cancel_at)
        mb_grpc_stream_cancel(s);
}

static void on_peer_done(void *arg, struct mb_grpc_stream *s)
{
    struct end *e = arg;

    e->n_peer_done++;
    if (e->finish_on_done >= 0)
        mb_grpc_stream_finish(s, e->finish_on_done, "as asked");
}

static void on_end(void *arg, struct mb_grpc_stream *s, int status, const char *detail)
{
    struct end *e = arg;

    assert_ptr_equal(s, e->s);
    e->n_ended++;
    e->status = status;
    snprintf(e->detail, sizeof(e->detail), "%s", detail);
    e->s = NULL;
}

static const struct mb_grpc_stream_ops ops = {on_message, on_peer_done, on_end};

static void serve(void *arg, struct mb_grpc_stream *s)
{
    struct end *e = arg;
    const char *id = mb_grpc_stream_metadata(s, "node_id");

    snprintf(e->seen, sizeof(e->seen), "%s", id == NULL ? "" : id);
    e->n_opened++;
    e->s = s;
    mb_grpc_stream_accept(s, chunk_desc, &ops, e);
}

static void serve_refused(void *arg, struct mb_grpc_stream *s)
{
    ((struct end *)arg)->n_opened++;
    mb_grpc_stream_finish(s, MB_GRPC_PERMISSION_DENIED, "not you");
}

static void serve_forgotten(void *arg, struct mb_grpc_stream *s)
{
    (void)s;
    ((struct end *)arg)->n_opened++;
}

/* Sends 100 messages and the status at once. */
static void serve_burst(void *arg, struct mb_grpc_stream *s)
{
    struct end *e = arg;

    serve(e, s);
    for (int i = 0; i < 100; i++)
        assert_int_equal(send_chunk(s, i, 1000, NULL), 0);
    mb_grpc_stream_finish(s, MB_GRPC_OK, NULL);
    assert_int_equal(send_chunk(s, 100, 1, NULL), MB_ESTATE);
}

/* Reads another type: field 2 is a message there, bytes here. */
static void serve_typed(void *arg, struct mb_grpc_stream *s)
{
    struct end *e = arg;

    e->s = s;
    e->n_opened++;
    mb_grpc_stream_accept(s, &ray__rpc__get_all_node_info_request__descriptor, &ops, e);
}

static const struct mb_grpc_method methods[] = {
    {"/t.T/Stream", NULL, NULL, serve, 0},
    {"/t.T/Refused", NULL, NULL, serve_refused, 0},
    {"/t.T/Forgotten", NULL, NULL, serve_forgotten, 0},
    {"/t.T/Burst", NULL, NULL, serve_burst, 0},
    {"/t.T/Typed", NULL, NULL, serve_typed, 0},
};
enum { N_METHODS = sizeof(methods) / sizeof(methods[0]) };

static void open_stream(struct fixture *f, const char *method, uint64_t timeout_ms, struct end *e)
{
    const struct mb_grpc_metadata md[] = {{"node_id", "abc"}};
    struct mb_err err = {0};

    assert_int_equal(
        mb_grpc_stream_open(f->ch, method, chunk_desc, md, 1, timeout_ms, &ops, e, &e->s, &err), 0);
}

static void begin(struct fixture *f, struct end *server, struct end *client)
{
    memset(server, 0, sizeof(*server));
    memset(client, 0, sizeof(*client));
    server->finish_on_done = -1;
    fixture_start(f, NULL, methods, N_METHODS, server);
    fixture_dial(f, NULL);
}

static void test_ten_thousand(void **state)
{
    enum { N = 10000 };
    struct mb_grpc_counts ours, theirs;
    struct end server, client;
    struct fixture f;

    (void)state;
    begin(&f, &server, &client);
    server.echo = 1;
    server.finish_on_done = MB_GRPC_OK;
    open_stream(&f, "/t.T/Stream", 0, &client);
    for (int i = 0; i < N; i++)
        assert_int_equal(send_chunk(client.s, i, 100, NULL), 0);
    mb_grpc_stream_close_send(client.s);
    assert_int_equal(send_chunk(client.s, N, 100, NULL), MB_ESTATE);
    fixture_wait(&f, &client.n_ended, 1);
    fixture_wait(&f, &server.n_ended, 1);
    assert_string_equal(server.seen, "abc");
    assert_int_equal(server.n_in_order, N);
    assert_int_equal(client.n_in_order, N);
    assert_int_equal(client.n_messages, N);
    assert_int_equal(server.n_peer_done, 1);
    assert_int_equal(client.n_peer_done, 0);
    assert_int_equal(client.status, MB_GRPC_OK);
    assert_int_equal(server.status, MB_GRPC_OK);
    mb_grpc_count(f.client_g, &ours);
    mb_grpc_count(f.server_g, &theirs);
    assert_true(ours.messages_in == N && ours.messages_out == N);
    assert_true(theirs.messages_in == N && theirs.messages_out == N);
    assert_int_equal(ours.calls + theirs.requests, 0);
    fixture_end(&f);
}

static void test_back_pressure(void **state)
{
    struct end server, client;
    struct mb_err err = {0};
    struct fixture f;
    int n_sent = 0;

    (void)state;
    begin(&f, &server, &client);
    server.finish_on_done = MB_GRPC_OK;
    open_stream(&f, "/t.T/Stream", 0, &client);
    while (n_sent < 1000 && send_chunk(client.s, n_sent, 1 << 20, &err) == 0)
        n_sent++;
    assert_int_equal(err.code, MB_EFULL);
    assert_int_equal(n_sent, 63); /* 64 MiB less what the messages add */
    assert_true(mb_grpc_stream_queued_bytes(client.s) <= 64u << 20);
    fixture_wait(&f, &server.n_messages, 30);
    assert_int_equal(send_chunk(client.s, n_sent, 1 << 20, &err), 0); /* room again */
    n_sent++;
    mb_grpc_stream_close_send(client.s);
    fixture_wait(&f, &client.n_ended, 1);
    fixture_wait(&f, &server.n_ended, 1);
    assert_int_equal(server.n_in_order, n_sent);
    assert_int_equal(server.n_bytes, (size_t)n_sent << 20);
    fixture_end(&f);
}

/* The bound is on memory: messages without a byte fill the queue as well. */
static void test_back_pressure_of_empty_messages(void **state)
{
    enum { LIMIT = 1000000 };
    chunk empty = RAY__RPC__INTERNAL_KVPUT_REQUEST__INIT;
    struct end server, client;
    struct mb_err err = {0};
    struct fixture f;
    int n = 0;

    (void)state;
    begin(&f, &server, &client);
    server.finish_on_done = MB_GRPC_OK;
    open_stream(&f, "/t.T/Stream", 0, &client);
    while (n < LIMIT && mb_grpc_stream_send(client.s, &empty.base, &err) == 0)
        n++;
    assert_int_equal(err.code, MB_EFULL);
    mb_grpc_stream_close_send(client.s);
    fixture_wait(&f, &client.n_ended, 1);
    assert_int_equal(client.status, MB_GRPC_OK);
    assert_int_equal(server.n_messages, n);
    fixture_end(&f);
}

static void test_finish(void **state)
{
    struct end server, client;
    struct fixture f;

    (void)state;
    begin(&f, &server, &client);
    server.finish_on_done = MB_GRPC_NOT_FOUND;
    open_stream(&f, "/t.T/Stream", 0, &client);
    mb_grpc_stream_close_send(client.s);
    fixture_wait(&f, &client.n_ended, 1);
    assert_int_equal(client.status, MB_GRPC_NOT_FOUND);
    assert_string_equal(client.detail, "as asked");
    fixture_wait(&f, &server.n_ended, 1);
    assert_int_equal(server.status, MB_GRPC_NOT_FOUND);

    /* What was queued before the status arrives before it. */
    memset(&client, 0, sizeof(client));
    open_stream(&f, "/t.T/Burst", 0, &client);
    fixture_wait(&f, &client.n_ended, 1);
    assert_int_equal(client.n_in_order, 100);
    assert_int_equal(client.status, MB_GRPC_OK);
    fixture_wait(&f, &server.n_ended, 2);
    fixture_end(&f);
}

static void test_refused(void **state)
{
    struct end server, client;
    struct fixture f;

    (void)state;
    begin(&f, &server, &client);
    open_stream(&f, "/t.T/Refused", 0, &client);
    fixture_wait(&f, &client.n_ended, 1);
    assert_int_equal(client.status, MB_GRPC_PERMISSION_DENIED);
    assert_string_equal(client.detail, "not you");
    open_stream(&f, "/t.T/Forgotten", 0, &client);
    fixture_wait(&f, &client.n_ended, 2);
    assert_int_equal(client.status, MB_GRPC_UNIMPLEMENTED);
    open_stream(&f, "/t.T/Nothing", 0, &client);
    fixture_wait(&f, &client.n_ended, 3);
    assert_int_equal(client.status, MB_GRPC_UNIMPLEMENTED);
    assert_int_equal(server.n_opened, 2);
    assert_int_equal(server.n_ended, 0); /* it never accepted one */
    fixture_end(&f);
}

static void test_token(void **state)
{
    const struct mb_grpc_server_opts so = {.token = "right"};
    const struct mb_grpc_channel_opts co = {.token = "right"};
    struct end server = {0}, client = {0};
    struct fixture f;

    (void)state;
    fixture_start(&f, &so, methods, N_METHODS, &server);
    fixture_dial(&f, NULL);
    open_stream(&f, "/t.T/Stream", 0, &client);
    fixture_wait(&f, &client.n_ended, 1);
    assert_int_equal(client.status, MB_GRPC_UNAUTHENTICATED);
    assert_int_equal(server.n_opened, 0);
    fixture_dial(&f, &co);
    server.finish_on_done = MB_GRPC_OK;
    open_stream(&f, "/t.T/Stream", 0, &client);
    mb_grpc_stream_close_send(client.s);
    fixture_wait(&f, &client.n_ended, 2);
    assert_int_equal(client.status, MB_GRPC_OK);
    fixture_end(&f);
}

static void test_undecodable(void **state)
{
    struct end server, client;
    struct fixture f;

    (void)state;
    begin(&f, &server, &client);
    open_stream(&f, "/t.T/Typed", 0, &client);
    assert_int_equal(send_chunk(client.s, 0, 1, NULL), 0);
    /* A zero byte where a message is expected: no field has number 0. */
    fixture_wait(&f, &client.n_ended, 1);
    assert_int_equal(client.status, MB_GRPC_INVALID_ARGUMENT);
    fixture_wait(&f, &server.n_ended, 1);
    assert_int_equal(server.status, MB_GRPC_INVALID_ARGUMENT);
    assert_int_equal(server.n_messages, 0);
    fixture_end(&f);
}

static void test_client_cancels(void **state)
{
    struct end server, client;
    struct fixture f;

    (void)state;
    begin(&f, &server, &client);
    server.echo = 1;
    client.cancel_at = 5;
    open_stream(&f, "/t.T/Stream", 0, &client);
    for (int i = 0; i < 50; i++)
        assert_int_equal(send_chunk(client.s, i, 1000, NULL), 0);
    fixture_wait(&f, &client.n_ended, 1);
    assert_int_equal(client.status, MB_GRPC_CANCELLED);
    assert_int_equal(client.n_messages, 5);
    fixture_wait(&f, &server.n_ended, 1);
    assert_int_equal(server.status, MB_GRPC_CANCELLED);
    assert_int_equal(server.n_peer_done, 0);
    fixture_end(&f);
}

static void test_server_cancels(void **state)
{
    struct end server, client;
    struct fixture f;

    (void)state;
    begin(&f, &server, &client);
    server.cancel_at = 5;
    open_stream(&f, "/t.T/Stream", 0, &client);
    for (int i = 0; i < 50; i++)
        assert_int_equal(send_chunk(client.s, i, 1000, NULL), 0);
    fixture_wait(&f, &server.n_ended, 1);
    assert_int_equal(server.n_messages, 5);
    assert_int_equal(server.status, MB_GRPC_CANCELLED);
    assert_int_equal(server.n_peer_done, 0);
    fixture_wait(&f, &client.n_ended, 1);
    assert_int_equal(client.status, MB_GRPC_CANCELLED);
    fixture_end(&f);
}

static void test_deadline(void **state)
{
    struct end server, client;
    struct fixture f;

    (void)state;
    begin(&f, &server, &client);
    open_stream(&f, "/t.T/Stream", 200, &client);
    fixture_wait(&f, &client.n_ended, 1);
    assert_int_equal(client.status, MB_GRPC_DEADLINE_EXCEEDED);
    fixture_wait(&f, &server.n_ended, 1);
    assert_int_equal(server.status, MB_GRPC_CANCELLED);
    assert_int_equal(server.n_peer_done, 0);
    fixture_end(&f);
}

static void test_client_gone(void **state)
{
    struct end server, client;
    struct fixture f;

    (void)state;
    begin(&f, &server, &client);
    open_stream(&f, "/t.T/Stream", 0, &client);
    fixture_wait(&f, &server.n_opened, 1);
    mb_grpc_channel_destroy(f.ch);
    fixture_wait(&f, &server.n_ended, 1);
    assert_int_equal(server.status, MB_GRPC_CANCELLED);
    assert_int_equal(server.n_peer_done, 0);
    fixture_wait(&f, &client.n_ended, 1);
    assert_int_equal(client.status, MB_GRPC_CANCELLED);
    fixture_end(&f);
}

/* Either side stops in the middle of traffic: every stream ends once. */
static void test_stops(void **state)
{
    (void)state;
    for (int server_first = 0; server_first < 2; server_first++) {
        struct end server, client;
        struct fixture f;

        begin(&f, &server, &client);
        server.echo = 1;
        open_stream(&f, "/t.T/Stream", 0, &client);
        for (int i = 0; i < 200; i++)
            assert_int_equal(send_chunk(client.s, i, 100000, NULL), 0);
        fixture_wait(&f, &client.n_messages, 10);
        if (server_first)
            fixture_stop_server(&f);
        else
            fixture_stop_client(&f);
        fixture_wait(&f, &client.n_ended, 1);
        fixture_wait(&f, &server.n_ended, 1);
        assert_true(client.status == MB_GRPC_CANCELLED || client.status == MB_GRPC_UNAVAILABLE);
        fixture_end(&f);
        assert_int_equal(client.n_ended, 1);
        assert_int_equal(server.n_ended, 1);
        assert_int_equal(server.n_peer_done, 0);
    }
}

static void test_bad_metadata(void **state)
{
    const struct mb_grpc_metadata bad[] = {{"node_id", "a"}, {"Upper", "b"}};
    struct end server, client;
    struct mb_grpc_stream *s = NULL;
    struct mb_err err = {0};
    struct fixture f;

    (void)state;
    begin(&f, &server, &client);
    assert_int_equal(
        mb_grpc_stream_open(f.ch, "/t.T/Stream", chunk_desc, bad, 2, 0, &ops, &client, &s, &err),
        MB_EINVAL);
    assert_non_null(strstr(err.text, "Upper"));
    fixture_end(&f);
}

/* Open, three messages each way, half-close, status; with one failing allocation. */
static int life(unsigned long nth)
{
    struct end server, client;
    struct mb_err err = {0};
    struct fixture f;
    int n_sent = 0;
    int failed;

    begin(&f, &server, &client);
    server.finish_on_done = MB_GRPC_OK;
    mb_alloc_fail_nth(nth);
    if (mb_grpc_stream_open(f.ch, "/t.T/Stream", chunk_desc, NULL, 0, 30000, &ops, &client,
                            &client.s, &err) == 0) {
        while (n_sent < 3 && send_chunk(client.s, n_sent, 10, &err) == 0)
            n_sent++;
        mb_grpc_stream_close_send(client.s);
        fixture_wait(&f, &client.n_ended, 1);
        fixture_wait(&f, &server.n_ended, server.n_opened);
    }
    failed = mb_alloc_did_fail();
    mb_alloc_fail_nth(0);
    assert_true(failed || server.n_messages == 3);
    assert_true(err.code == MB_ENOMEM || client.status != MB_GRPC_OK || server.n_messages == 3);
    fixture_end(&f);
    return failed;
}

static void test_allocation_failures(void **state)
{
    unsigned long n = 1;

    (void)state;
    while (life(n))
        n++;
    assert_true(n > 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ten_thousand),
        cmocka_unit_test(test_back_pressure),
        cmocka_unit_test(test_back_pressure_of_empty_messages),
        cmocka_unit_test(test_finish),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_token),
        cmocka_unit_test(test_undecodable),
        cmocka_unit_test(test_client_cancels),
        cmocka_unit_test(test_server_cancels),
        cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_client_gone),
        cmocka_unit_test(test_stops),
        cmocka_unit_test(test_bad_metadata),
        cmocka_unit_test(test_allocation_failures),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
