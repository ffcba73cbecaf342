/* Unary calls over loopback: both ends of base/grpc in one process. */
#include <unistd.h>
#include "grpc_fixture.h"

struct server_state {
    int n_calls;
    int n_cancelled;
    struct mb_grpc_req *held; /* not answered yet */
    char seen[256];           /* metadata "x-test" of the last call */
    char peer[64];
    char service[64];
};

static void on_cancel(void *arg)
{
    ((struct server_state *)arg)->n_cancelled++;
}

/* Answers at once: SERVING, or an error when asked for "missing". */
static void handle_check(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct server_state *st = arg;
    const check_request *q = (const void *)request;
    check_response r = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    const char *seen = mb_grpc_req_metadata(req, "x-test");

    st->n_calls++;
    snprintf(st->seen, sizeof(st->seen), "%s", seen == NULL ? "" : seen);
    snprintf(st->peer, sizeof(st->peer), "%s", mb_grpc_req_peer(req));
    snprintf(st->service, sizeof(st->service), "%s", q->service);
    if (strcmp(q->service, "missing") == 0) {
        mb_grpc_reply_error(req, MB_GRPC_NOT_FOUND, "no service \"%s\"", q->service);
        return;
    }
    r.status = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING;
    mb_grpc_reply(req, &r.base);
}

/* Keeps the request: the test answers it. */
static void handle_hold(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct server_state *st = arg;

    (void)request;
    st->n_calls++;
    st->held = req;
    mb_grpc_req_on_cancel(req, on_cancel, st);
}

static void answer_held(struct server_state *st)
{
    check_response r = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;

    mb_grpc_reply(st->held, &r.base);
    st->held = NULL;
}

/* A reply that is no HealthCheckResponse: its field 1 is no number. */
static void handle_odd(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    check_request r = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    char text[] = "not a status";

    (void)arg;
    (void)request;
    r.service = text;
    mb_grpc_reply(req, &r.base);
}

static const struct mb_grpc_method methods[] = {
    {CHECK, check_request_desc, handle_check, NULL, 0},
    {"/t.T/Hold", check_request_desc, handle_hold, NULL, 0},
    {"/t.T/Odd", check_request_desc, handle_odd, NULL, 0},
    {"/t.T/Public", check_request_desc, handle_check, NULL, 1},
    /* A request of this type has a message in field 1, where a HealthCheckRequest has text. */
    {"/t.T/Typed", &ray__rpc__register_node_request__descriptor, handle_check, NULL, 0},
};
enum { N_METHODS = sizeof(methods) / sizeof(methods[0]) };

static void test_answers(void **state)
{
    struct server_state st = {0};
    struct result many[200] = {{0}};
    struct mb_grpc_counts ours, theirs;
    struct result r = {0};
    struct fixture f;
    int n_back = 0;

    (void)state;
    fixture_start(&f, NULL, methods, N_METHODS, &st);
    fixture_dial(&f, NULL);
    assert_int_equal(call_check(&f, CHECK, "abc", 10000, &r, NULL), 0);
    assert_int_equal(r.n, 0); /* never inside the call */
    fixture_wait(&f, &r.n, 1);
    assert_int_equal(r.status, MB_GRPC_OK);
    assert_int_equal(r.serving, 1);
    assert_string_equal(st.service, "abc");
    assert_int_equal(strncmp(st.peer, "ipv4:127.0.0.1:", 15), 0);

    for (int i = 0; i < 200; i++)
        assert_int_equal(call_check(&f, CHECK, i % 2 ? "abc" : "missing", 10000, &many[i], NULL),
                         0);
    for (int i = 0; i < 200; i++) {
        fixture_wait(&f, &many[i].n, 1);
        assert_int_equal(many[i].status, i % 2 ? MB_GRPC_OK : MB_GRPC_NOT_FOUND);
        n_back += many[i].n;
    }
    assert_int_equal(n_back, 200);
    assert_string_equal(many[0].detail, "no service \"missing\"");
    mb_grpc_count(f.client_g, &ours);
    mb_grpc_count(f.server_g, &theirs);
    assert_int_equal(ours.calls, 201);
    assert_int_equal(ours.calls_failed, 100);
    assert_int_equal(ours.requests, 0);
    assert_int_equal(theirs.calls, 0);
    assert_int_equal(theirs.requests, 201);
    assert_int_equal(theirs.messages_in + theirs.messages_out + ours.messages_in, 0);
    fixture_end(&f);
}

static void bytes_cb(void *arg, int status, const char *detail, struct mb_grpc_bytes *reply)
{
    struct result *r = arg;
    const uint8_t *p;
    size_t n;

    r->n++;
    r->status = status;
    r->detail[0] = '\0';
    assert_int_equal(reply != NULL, status == MB_GRPC_OK);
    if (reply == NULL)
        snprintf(r->detail, sizeof(r->detail), "%s", detail);
    while (reply != NULL && (n = mb_grpc_bytes_next(reply, &p)) > 0)
        strncat(r->detail, (const char *)p, n);
    mb_grpc_bytes_destroy(reply);
}

/* A reply as it came, also one that its type would not decode. */
static void test_bytes(void **state)
{
    check_request q = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    struct server_state st = {0};
    struct result r = {0};
    struct mb_grpc_call *call;
    struct fixture f;
    char missing[] = "missing";

    (void)state;
    fixture_start(&f, NULL, methods, N_METHODS, &st);
    fixture_dial(&f, NULL);
    assert_int_equal(mb_grpc_unary_bytes(f.ch, CHECK, &q.base, 0, bytes_cb, &r, NULL, NULL),
                     MB_EINVAL);
    assert_int_equal(mb_grpc_unary_bytes(f.ch, CHECK, &q.base, 10000, bytes_cb, &r, NULL, NULL), 0);
    assert_int_equal(r.n, 0);
    fixture_wait(&f, &r.n, 1);
    assert_string_equal(r.detail, "\x08\x01");
    assert_int_equal(
        mb_grpc_unary_bytes(f.ch, "/t.T/Odd", &q.base, 10000, bytes_cb, &r, NULL, NULL), 0);
    fixture_wait(&f, &r.n, 2);
    assert_string_equal(r.detail, "\x0a\x0cnot a status");
    q.service = missing;
    assert_int_equal(mb_grpc_unary_bytes(f.ch, CHECK, &q.base, 10000, bytes_cb, &r, NULL, NULL), 0);
    fixture_wait(&f, &r.n, 3);
    assert_int_equal(r.status, MB_GRPC_NOT_FOUND);
    assert_string_equal(r.detail, "no service \"missing\"");
    assert_int_equal(
        mb_grpc_unary_bytes(f.ch, "/t.T/Hold", &q.base, 10000, bytes_cb, &r, &call, NULL), 0);
    mb_grpc_call_cancel(call);
    fixture_wait(&f, &r.n, 4);
    assert_int_equal(r.status, MB_GRPC_CANCELLED);
    fixture_end(&f);
}

static void test_bad_calls(void **state)
{
    struct server_state st = {0};
    struct result r = {0};
    struct fixture f;

    (void)state;
    fixture_start(&f, NULL, methods, N_METHODS, &st);
    fixture_dial(&f, NULL);
    assert_int_equal(call_check(&f, CHECK, "", 0, &r, NULL), MB_EINVAL); /* no deadline */
    assert_int_equal(call_check(&f, "/t.T/Nothing", "", 10000, &r, NULL), 0);
    fixture_wait(&f, &r.n, 1);
    assert_int_equal(r.status, MB_GRPC_UNIMPLEMENTED);
    assert_int_equal(call_check(&f, "/t.T/Typed", "\x7f", 10000, &r, NULL), 0);
    fixture_wait(&f, &r.n, 2);
    assert_int_equal(r.status, MB_GRPC_INVALID_ARGUMENT);
    assert_int_equal(call_check(&f, "/t.T/Odd", "", 10000, &r, NULL), 0);
    fixture_wait(&f, &r.n, 3);
    assert_int_equal(r.status, MB_GRPC_INTERNAL);
    assert_int_equal(st.n_calls, 0);
    fixture_end(&f);
}

static void test_deadline_and_cancel(void **state)
{
    struct mb_grpc_call *call = NULL;
    struct server_state st = {0};
    struct result r = {0};
    struct fixture f;

    (void)state;
    fixture_start(&f, NULL, methods, N_METHODS, &st);
    fixture_dial(&f, NULL);
    assert_int_equal(call_check(&f, "/t.T/Hold", "", 300, &r, NULL), 0);
    fixture_wait(&f, &st.n_calls, 1);
    fixture_wait(&f, &r.n, 1);
    assert_int_equal(r.status, MB_GRPC_DEADLINE_EXCEEDED);
    fixture_wait(&f, &st.n_cancelled, 1);
    answer_held(&st);

    assert_int_equal(call_check(&f, "/t.T/Hold", "", 30000, &r, &call), 0);
    fixture_wait(&f, &st.n_calls, 2);
    mb_grpc_call_cancel(call);
    assert_int_equal(r.n, 1);
    fixture_wait(&f, &r.n, 2);
    assert_int_equal(r.status, MB_GRPC_CANCELLED);
    fixture_wait(&f, &st.n_cancelled, 2);
    answer_held(&st);
    fixture_end(&f);
}

static void test_late_registration(void **state)
{
    struct mb_grpc_call *call = NULL;
    struct server_state st = {0};
    struct result r = {0};
    struct fixture f;

    (void)state;
    fixture_start(&f, NULL, methods, N_METHODS, &st);
    fixture_dial(&f, NULL);
    assert_int_equal(call_check(&f, "/t.T/Hold", "", 30000, &r, &call), 0);
    fixture_wait(&f, &st.n_calls, 1);
    mb_grpc_call_cancel(call);
    fixture_wait(&f, &st.n_cancelled, 1);
    mb_grpc_req_on_cancel(st.held, on_cancel, &st); /* the client is gone already */
    assert_int_equal(st.n_cancelled, 1);
    fixture_wait(&f, &st.n_cancelled, 2);
    answer_held(&st);
    fixture_end(&f);
}

static void test_own_deadline(void **state)
{
    const struct mb_grpc_server_opts opts = {.unary_deadline_ms = 100};
    struct server_state st = {0};
    struct result r = {0};
    struct fixture f;

    (void)state;
    fixture_start(&f, &opts, methods, N_METHODS, &st);
    fixture_dial(&f, NULL);
    assert_int_equal(call_check(&f, "/t.T/Hold", "", 30000, &r, NULL), 0);
    fixture_wait(&f, &r.n, 1);
    assert_int_equal(r.status, MB_GRPC_DEADLINE_EXCEEDED);
    assert_string_equal(r.detail, "the handler did not answer in time");
    assert_int_equal(st.n_cancelled, 1);
    answer_held(&st); /* goes nowhere, frees the request */

    /* The server goes on, and a handler that answers in time is not disturbed. */
    assert_int_equal(call_check(&f, CHECK, "", 30000, &r, NULL), 0);
    fixture_wait(&f, &r.n, 2);
    assert_int_equal(r.status, MB_GRPC_OK);
    fixture_end(&f);
}

/* A request that nobody waits for any more does not hide the deadlines of those behind it. */
static void test_deadline_behind_an_abandoned_request(void **state)
{
    const struct mb_grpc_server_opts opts = {.unary_deadline_ms = 100};
    struct server_state st = {0};
    struct mb_grpc_req *abandoned;
    struct result r = {0};
    struct fixture f;

    (void)state;
    fixture_start(&f, &opts, methods, N_METHODS, &st);
    fixture_dial(&f, NULL);
    assert_int_equal(call_check(&f, "/t.T/Hold", "", 30000, &r, NULL), 0);
    fixture_wait(&f, &r.n, 1);
    abandoned = st.held;
    assert_int_equal(call_check(&f, "/t.T/Hold", "", 30000, &r, NULL), 0);
    fixture_wait(&f, &r.n, 2);
    assert_int_equal(r.status, MB_GRPC_DEADLINE_EXCEEDED);
    assert_string_equal(r.detail, "the handler did not answer in time");
    assert_int_equal(st.n_cancelled, 2);
    answer_held(&st);
    st.held = abandoned;
    answer_held(&st);
    fixture_end(&f);
}

static void test_metadata(void **state)
{
    struct server_state st = {0};
    struct result r = {0};
    struct fixture f;

    (void)state;
    fixture_start(&f, NULL, methods, N_METHODS, &st);
    fixture_dial(&f, NULL);
    assert_int_equal(mb_grpc_channel_metadata(f.ch, "x-test", "one"), 0);
    assert_int_equal(mb_grpc_channel_metadata(f.ch, "x-other", "two"), 0);
    assert_int_equal(mb_grpc_channel_metadata(f.ch, "X-Bad", "v"), MB_EINVAL);
    assert_int_equal(mb_grpc_channel_metadata(f.ch, "x-test", "line\nbreak"), MB_EINVAL);
    call_check(&f, CHECK, "", 10000, &r, NULL);
    fixture_wait(&f, &r.n, 1);
    assert_string_equal(st.seen, "one");
    assert_int_equal(mb_grpc_channel_metadata(f.ch, "x-test", "changed"), 0);
    call_check(&f, CHECK, "", 10000, &r, NULL);
    fixture_wait(&f, &r.n, 2);
    assert_string_equal(st.seen, "changed");
    assert_int_equal(mb_grpc_channel_metadata(f.ch, "x-test", NULL), 0);
    assert_int_equal(mb_grpc_channel_metadata(f.ch, "x-test", NULL), 0);
    call_check(&f, CHECK, "", 10000, &r, NULL);
    fixture_wait(&f, &r.n, 3);
    assert_string_equal(st.seen, "");
    fixture_end(&f);
}

static void test_token(void **state)
{
    const struct mb_grpc_server_opts opts = {.token = "right"};
    const char *const tokens[] = {NULL, "wrong", "righ", "rightt", "right"};
    struct server_state st = {0};
    struct fixture f;

    (void)state;
    fixture_start(&f, &opts, methods, N_METHODS, &st);
    for (int i = 0; i < 5; i++) {
        const struct mb_grpc_channel_opts co = {.token = tokens[i]};
        struct result r = {0};
        int right = i == 4;

        fixture_dial(&f, &co);
        call_check(&f, CHECK, "", 10000, &r, NULL);
        fixture_wait(&f, &r.n, 1);
        assert_int_equal(r.status, right ? MB_GRPC_OK : MB_GRPC_UNAUTHENTICATED);
        call_check(&f, "/t.T/Nothing", "", 10000, &r, NULL);
        fixture_wait(&f, &r.n, 2);
        assert_int_equal(r.status, right ? MB_GRPC_UNIMPLEMENTED : MB_GRPC_UNAUTHENTICATED);
        call_check(&f, "/t.T/Public", "", 10000, &r, NULL);
        fixture_wait(&f, &r.n, 3);
        assert_int_equal(r.status, MB_GRPC_OK);
        mb_grpc_channel_destroy(f.ch);
    }
    fixture_end(&f);
}

static void test_no_server(void **state)
{
    const struct mb_grpc_server_opts opts = {0};
    const struct mb_grpc_channel_opts bad = {.token = "two\nlines"};
    struct mb_grpc_channel *ch = NULL;
    struct server_state st = {0};
    struct mb_err err = {0};
    struct result r = {0};
    struct fixture f;

    (void)state;
    fixture_start(&f, &opts, methods, N_METHODS, &st);
    fixture_stop_server(&f); /* its port is free now, nobody listens */
    fixture_dial(&f, NULL);
    call_check(&f, CHECK, "", 10000, &r, NULL);
    fixture_wait(&f, &r.n, 1);
    assert_int_equal(r.status, MB_GRPC_UNAVAILABLE);
    assert_int_equal(mb_grpc_channel_create(f.client_g, f.target, &bad, &ch, &err), MB_EINVAL);
    fixture_end(&f);
}

static void on_other_handle(uv_timer_t *t)
{
    ++*(int *)t->data;
}

/* A thousand calls end at once: no turn of the loop takes more of them than its bound, so that
 * other handles get their chance in between. */
static void test_a_turn_is_bounded(void **state)
{
    enum { CALLS = 1000, TURN_MAX = 64 /* base/grpc/internal.h */ };
    const struct mb_grpc_server_opts opts = {0};
    static struct mb_grpc_call *calls[CALLS];
    struct server_state st = {0};
    struct result r = {0};
    struct fixture f;
    uv_timer_t other;
    int n_other = 0, other_at_first = -1, most = 0;

    (void)state;
    fixture_start(&f, &opts, methods, N_METHODS, &st);
    fixture_stop_server(&f);
    fixture_dial(&f, NULL);
    uv_timer_init(&f.loop, &other);
    other.data = &n_other;
    uv_timer_start(&other, on_other_handle, 0, 1);
    for (int i = 0; i < CALLS; i++)
        assert_int_equal(call_check(&f, CHECK, "", 60000, &r, &calls[i]), 0);
    for (int i = 0; i < CALLS; i++)
        mb_grpc_call_cancel(calls[i]);
    assert_int_equal(r.n, 0);
    f.guard_fired = 0;
    uv_timer_start(&f.guard, fixture_on_guard, 60000, 0);
    while (r.n < CALLS && !f.guard_fired) {
        int before = r.n;

        uv_run(&f.loop, UV_RUN_NOWAIT);
        most = r.n - before > most ? r.n - before : most;
        if (r.n > 0 && other_at_first < 0)
            other_at_first = n_other;
        if (r.n > 0) /* a millisecond of other work in every turn */
            for (uint64_t t = uv_hrtime() + 1000000; uv_hrtime() < t;)
                ;
    }
    assert_false(f.guard_fired);
    uv_timer_stop(&f.guard);
    assert_true(most > TURN_MAX / 2);  /* there was a backlog */
    assert_true(most <= TURN_MAX + 1); /* and the one that woke the loop */
    assert_true(n_other - other_at_first >= CALLS / TURN_MAX / 2);
    uv_close((uv_handle_t *)&other, NULL);
    fixture_end(&f);
}

static void test_port_in_use(void **state)
{
    struct mb_grpc_server *second = NULL;
    struct server_state st = {0};
    struct mb_err err = {0};
    struct fixture f;
    int port = 0;

    (void)state;
    fixture_start(&f, NULL, methods, N_METHODS, &st);
    assert_int_equal(mb_grpc_server_create(f.server_g, NULL, &second, &err), 0);
    assert_int_equal(mb_grpc_server_listen(second, f.target, &port, &err), MB_EEXIST);
    assert_non_null(strstr(err.text, "the port is in use"));
    assert_int_equal(mb_grpc_server_listen(second, "nonsense", &port, &err), MB_EINVAL);
    assert_int_equal(mb_grpc_server_listen(second, "127.0.0.1:x", &port, &err), MB_EINVAL);
    assert_int_equal(mb_grpc_server_listen(second, "192.0.2.77:0", &port, &err), MB_EIO);
    assert_int_equal(mb_grpc_server_listen(second, "127.0.0.1:0", &port, &err), 0);
    assert_int_equal(mb_grpc_server_listen(second, "127.0.0.1:0", &port, &err), MB_ESTATE);
    assert_int_equal(mb_grpc_server_add(second, methods, 1, NULL, &err), MB_ESTATE);
    fixture_end(&f);
}

/* The server goes away and another takes its port: the channel finds it by itself. */
static void test_reconnect(void **state)
{
    struct server_state st = {0};
    struct mb_err err = {0};
    struct result r = {0};
    struct fixture f;

    (void)state;
    fixture_start(&f, NULL, methods, N_METHODS, &st);
    fixture_dial(&f, NULL);
    call_check(&f, CHECK, "", 10000, &r, NULL);
    fixture_wait(&f, &r.n, 1);
    assert_int_equal(r.status, MB_GRPC_OK);
    fixture_stop_server(&f);
    call_check(&f, CHECK, "", 10000, &r, NULL);
    fixture_wait(&f, &r.n, 2);
    assert_int_equal(r.status, MB_GRPC_UNAVAILABLE);

    assert_int_equal(mb_grpc_create(&f.loop, &f.server_g, &err), 0);
    assert_int_equal(mb_grpc_server_create(f.server_g, NULL, &f.srv, &err), 0);
    assert_int_equal(mb_grpc_server_add(f.srv, methods, N_METHODS, &st, &err), 0);
    assert_int_equal(mb_grpc_server_listen(f.srv, f.target, NULL, &err), 0);
    do {
        call_check(&f, CHECK, "", 10000, &r, NULL);
        fixture_wait(&f, &r.n, r.n + 1);
    } while (r.status == MB_GRPC_UNAVAILABLE && r.n < 1000000);
    assert_int_equal(r.status, MB_GRPC_OK);
    f.server_stopped = 0;
    fixture_end(&f);
}

static void test_message_too_large(void **state)
{
    const struct mb_grpc_server_opts opts = {.max_message_bytes = 100};
    struct server_state st = {0};
    struct result r = {0};
    struct fixture f;
    char long_name[201];

    (void)state;
    memset(long_name, 'a', 200);
    long_name[200] = '\0';
    fixture_start(&f, &opts, methods, N_METHODS, &st);
    fixture_dial(&f, NULL);
    call_check(&f, CHECK, long_name, 10000, &r, NULL);
    fixture_wait(&f, &r.n, 1);
    assert_int_equal(r.status, MB_GRPC_RESOURCE_EXHAUSTED);
    assert_int_equal(st.n_calls, 0);
    fixture_end(&f);
}

static void test_server_stops(void **state)
{
    struct server_state st = {0};
    struct result r = {0};
    struct fixture f;

    (void)state;
    fixture_start(&f, NULL, methods, N_METHODS, &st);
    fixture_dial(&f, NULL);
    call_check(&f, "/t.T/Hold", "", 30000, &r, NULL);
    fixture_wait(&f, &st.n_calls, 1);
    fixture_stop_server(&f); /* the request is never answered: stopping frees it */
    assert_int_equal(st.n_cancelled, 1);
    fixture_wait(&f, &r.n, 1);
    assert_true(r.status == MB_GRPC_CANCELLED || r.status == MB_GRPC_UNAVAILABLE);
    fixture_end(&f);
}

static void test_client_stops(void **state)
{
    struct server_state st = {0};
    struct result r[20] = {{0}};
    struct fixture f;

    (void)state;
    fixture_start(&f, NULL, methods, N_METHODS, &st);
    fixture_dial(&f, NULL);
    for (int i = 0; i < 20; i++)
        call_check(&f, i % 2 ? CHECK : "/t.T/Hold", "", 30000, &r[i], NULL);
    fixture_stop_client(&f);
    for (int i = 0; i < 20; i++)
        assert_int_equal(r[i].n, 1);
    assert_int_equal(r[0].status, MB_GRPC_CANCELLED);
    fixture_end(&f);
}

static void test_channel_destroyed(void **state)
{
    struct server_state st = {0};
    struct result r = {0};
    struct fixture f;

    (void)state;
    fixture_start(&f, NULL, methods, N_METHODS, &st);
    fixture_dial(&f, NULL);
    call_check(&f, "/t.T/Hold", "", 30000, &r, NULL);
    fixture_wait(&f, &st.n_calls, 1);
    mb_grpc_channel_destroy(f.ch);
    mb_grpc_channel_destroy(NULL);
    fixture_wait(&f, &r.n, 1);
    assert_int_equal(r.status, MB_GRPC_CANCELLED);
    fixture_wait(&f, &st.n_cancelled, 1);
    answer_held(&st);
    fixture_end(&f);
}

static int count_sockets(void)
{
    char path[64], to[64];
    int n = 0;

    for (int fd = 0; fd < 1024; fd++) {
        ssize_t len;

        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        len = readlink(path, to, sizeof(to) - 1);
        n += len > 7 && memcmp(to, "socket:", 7) == 0;
    }
    return n;
}

/* Destroyed while it connects, at whatever point of that: no connection stays behind. */
static void test_channel_destroyed_while_it_connects(void **state)
{
    enum { CHANNELS = 100, PAUSE_STEP_US = 20 };
    struct result r[CHANNELS] = {{0}};
    struct server_state st = {0};
    struct fixture f;
    int before;

    (void)state;
    fixture_start(&f, NULL, methods, N_METHODS, &st);
    before = count_sockets();
    for (int i = 0; i < CHANNELS; i++) {
        fixture_dial(&f, NULL);
        call_check(&f, CHECK, "", 30000, &r[i], NULL);
        usleep((useconds_t)(i % 50) * PAUSE_STEP_US);
        mb_grpc_channel_destroy(f.ch);
    }
    for (int i = 0; i < CHANNELS; i++) {
        fixture_wait(&f, &r[i].n, 1);
        assert_true(r[i].status == MB_GRPC_CANCELLED || r[i].status == MB_GRPC_OK);
    }
    for (int i = 0; i < 6000 && count_sockets() > before; i++) {
        uv_run(&f.loop, UV_RUN_NOWAIT);
        usleep(10000);
    }
    assert_true(count_sockets() <= before); /* of the test before one may have been closing then */
    fixture_end(&f);
}

static void test_statuses(void **state)
{
    (void)state;
    assert_string_equal(mb_grpc_status_name(MB_GRPC_UNAVAILABLE), "UNAVAILABLE");
    assert_string_equal(mb_grpc_status_name(99), "UNKNOWN");
    assert_int_equal(mb_grpc_status_code(MB_GRPC_OK), 0);
    assert_int_equal(mb_grpc_status_code(MB_GRPC_UNAVAILABLE), MB_EUNAVAIL);
    assert_int_equal(mb_grpc_status_code(-3), MB_EPROTO);
    for (int s = 1; s <= 16; s++)
        assert_true(mb_grpc_status_code(s) < 0);
}

/* A whole life with one failing allocation: an error where one is due, and nothing lost. */
static int life(unsigned long nth)
{
    const struct mb_grpc_server_opts so = {.token = "t"};
    const struct mb_grpc_channel_opts co = {.token = "t"};
    struct server_state st = {0};
    struct result r = {0};
    struct mb_err err = {0};
    struct fixture f;
    int failed;

    fixture_init(&f);
    mb_alloc_fail_nth(nth);
    if (mb_grpc_create(&f.loop, &f.server_g, &err) != 0 ||
        mb_grpc_create(&f.loop, &f.client_g, &err) != 0 ||
        mb_grpc_server_create(f.server_g, &so, &f.srv, &err) != 0 ||
        mb_grpc_server_add(f.srv, methods, N_METHODS, &st, &err) != 0 ||
        mb_grpc_server_listen(f.srv, "127.0.0.1:0", &f.port, &err) != 0)
        goto out;
    snprintf(f.target, sizeof(f.target), "127.0.0.1:%d", f.port);
    if (mb_grpc_channel_create(f.client_g, f.target, &co, &f.ch, &err) != 0)
        goto out;
    err.code = mb_grpc_channel_metadata(f.ch, "x-test", "v");
    if (err.code == 0)
        err.code = call_check(&f, CHECK, "abc", 30000, &r, NULL);
    if (err.code == 0) {
        fixture_wait(&f, &r.n, 1);
        err.code = mb_grpc_status_code(r.status);
    }
out:
    failed = mb_alloc_did_fail();
    mb_alloc_fail_nth(0);
    if (failed)
        assert_true(err.code == MB_ENOMEM || err.code == MB_EFULL || err.code == MB_EPROTO);
    else
        assert_int_equal(err.code, 0);
    fixture_end(&f);
    return failed;
}

static void test_allocation_failures(void **state)
{
    unsigned long n = 1;

    (void)state;
    while (life(n))
        n++;
    assert_true(n > 15);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_answers),
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_bad_calls),
        cmocka_unit_test(test_deadline_and_cancel),
        cmocka_unit_test(test_late_registration),
        cmocka_unit_test(test_own_deadline),
        cmocka_unit_test(test_deadline_behind_an_abandoned_request),
        cmocka_unit_test(test_metadata),
        cmocka_unit_test(test_token),
        cmocka_unit_test(test_no_server),
        cmocka_unit_test(test_a_turn_is_bounded),
        cmocka_unit_test(test_port_in_use),
        cmocka_unit_test(test_reconnect),
        cmocka_unit_test(test_message_too_large),
        cmocka_unit_test(test_server_stops),
        cmocka_unit_test(test_client_stops),
        cmocka_unit_test(test_channel_destroyed),
        cmocka_unit_test(test_channel_destroyed_while_it_connects),
        cmocka_unit_test(test_statuses),
        cmocka_unit_test(test_allocation_failures),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
