/* The driver's stream to a node, as far as it needs no ranks: who lets go of whom. */
#include "tests/unit/base/grpc_fixture.h"

#include <stdlib.h>
#include <unistd.h>
#include "agent/gangs.h"
#include "base/fs.h"
#include "proto/mobula/agent.pb-c.h"

enum { GANGS = 250 };

#define CONTROL "/mobula.v1.NodeAgent/Control"

struct node {
    struct fixture f;
    struct mb_ledger *ledger;
    struct mb_gangs *gangs;
    int closed;
    char dir[64];
};

/* What a driver hears. */
struct driver {
    struct mb_grpc_stream *stream;
    int n_replies, n_ended, status;
    uint32_t port;
};

static struct mb_pg_id pg_of(int i)
{
    return (struct mb_pg_id){{1, (uint8_t)i}};
}

static void on_nothing(void *arg)
{
    (void)arg;
}

static int on_fenced(void *arg, struct mb_err *err)
{
    (void)arg;
    (void)err;
    return 0;
}

static const struct mb_gangs_ops gangs_ops = {
    .on_changed = on_nothing, .on_fenced = on_fenced, .on_all_ended = on_nothing};

static void start_node(struct node *n)
{
    struct mb_resource totals[] = {{MB_RESOURCE_SLOT, GANGS}};
    struct mb_bundle_spec spec = {.n_want = 1};
    struct mb_gangs_opts opts = {.node_dir = n->dir, .node_ip = "127.0.0.1", .self_dir = "/"};
    struct mb_grpc_server_opts so = {0};

    memset(n, 0, sizeof *n);
    snprintf(n->dir, sizeof n->dir, "/tmp/mb-control-XXXXXX");
    assert_non_null(mkdtemp(n->dir));
    fixture_init(&n->f);
    assert_int_equal(mb_grpc_create(&n->f.loop, &n->f.server_g, NULL), 0);
    assert_int_equal(mb_grpc_create(&n->f.loop, &n->f.client_g, NULL), 0);
    snprintf(spec.want[0].name, sizeof spec.want[0].name, MB_RESOURCE_SLOT);
    spec.want[0].units = 1;
    assert_int_equal(mb_ledger_create(totals, 1, &n->ledger, NULL), 0);
    for (int i = 0; i < GANGS; i++) {
        spec.pg = pg_of(i);
        assert_int_equal(mb_ledger_prepare(n->ledger, &spec, 1, NULL), 0);
        assert_int_equal(mb_ledger_commit(n->ledger, &spec, 1, NULL), 0);
    }
    assert_int_equal(
        mb_gangs_create(&n->f.loop, n->ledger, NULL, &opts, &gangs_ops, n, &n->gangs, NULL), 0);
    assert_int_equal(mb_grpc_server_create(n->f.server_g, &so, &n->f.srv, NULL), 0);
    assert_int_equal(mb_gangs_serve(n->gangs, n->f.srv, NULL, NULL), 0);
    assert_int_equal(mb_grpc_server_listen(n->f.srv, "127.0.0.1:0", &n->f.port, NULL), 0);
    snprintf(n->f.target, sizeof n->f.target, "127.0.0.1:%d", n->f.port);
}

static void on_closed(void *arg)
{
    ((struct node *)arg)->closed++;
}

static void stop_node(struct node *n)
{
    if (!n->closed)
        mb_gangs_close(n->gangs, on_closed, n);
    fixture_wait(&n->f, &n->closed, 1);
    fixture_end(&n->f);
    mb_gangs_destroy(n->gangs);
    mb_ledger_destroy(n->ledger);
    assert_int_equal(mb_fs_remove_tree(n->dir, NULL), 0);
}

static void on_reply(void *arg, struct mb_grpc_stream *s, const ProtobufCMessage *m)
{
    const Mobula__V1__AgentMessage *reply = (const void *)m;
    struct driver *d = arg;

    (void)s;
    if (reply->body_case == MOBULA__V1__AGENT_MESSAGE__BODY_HELLO_REPLY)
        d->port = reply->hello_reply->rendezvous_port;
    d->n_replies++;
}

static void on_end(void *arg, struct mb_grpc_stream *s, int status, const char *detail)
{
    struct driver *d = arg;

    (void)s;
    (void)detail;
    d->status = status;
    d->n_ended++;
}

static const struct mb_grpc_stream_ops driver_ops = {.on_message = on_reply, .on_end = on_end};

static void dial(struct node *n, struct driver *d)
{
    struct mb_grpc_channel_opts co = {0};

    memset(d, 0, sizeof *d);
    if (!n->f.ch)
        fixture_dial(&n->f, &co);
    assert_int_equal(mb_grpc_stream_open(n->f.ch, CONTROL, &mobula__v1__agent_message__descriptor,
                                         NULL, 0, 0, &driver_ops, d, &d->stream, NULL),
                     0);
}

static void say_hello(struct driver *d, int gang)
{
    struct mb_pg_id pg = pg_of(gang);
    Mobula__V1__DriverMessage m = MOBULA__V1__DRIVER_MESSAGE__INIT;
    Mobula__V1__Hello hello = MOBULA__V1__HELLO__INIT;

    hello.protocol_version = 1;
    hello.placement_group_id.data = pg.bytes;
    hello.placement_group_id.len = sizeof pg.bytes;
    hello.attempt = 1;
    hello.lease_ms = 20000;
    hello.job_id = (char *)(uintptr_t) "job";
    m.body_case = MOBULA__V1__DRIVER_MESSAGE__BODY_HELLO;
    m.hello = &hello;
    assert_int_equal(mb_grpc_stream_send(d->stream, &m.base, NULL), 0);
}

static void renew(struct driver *d)
{
    Mobula__V1__DriverMessage m = MOBULA__V1__DRIVER_MESSAGE__INIT;
    Mobula__V1__Renew r = MOBULA__V1__RENEW__INIT;

    m.body_case = MOBULA__V1__DRIVER_MESSAGE__BODY_RENEW;
    m.renew = &r;
    assert_int_equal(mb_grpc_stream_send(d->stream, &m.base, NULL), 0);
}

/* An agent that ends lets go of its attempts while their streams are still open. What the driver
 * says then is no reason to refuse it: a refusal would end the gang everywhere. */
static void what_is_said_after_the_attempt_let_go_is_not_refused(void **state)
{
    struct node n;
    struct driver d;

    (void)state;
    start_node(&n);
    dial(&n, &d);
    say_hello(&d, 0);
    fixture_wait(&n.f, &d.n_replies, 1);
    mb_gangs_close(n.gangs, on_closed, &n);
    fixture_wait(&n.f, &n.closed, 1);
    renew(&d);
    mb_grpc_stream_close_send(d.stream); /* heard behind the message, in their order */
    fixture_wait(&n.f, &d.n_ended, 1);
    assert_int_equal(d.status, MB_GRPC_OK);
    stop_node(&n);
}

static void a_stream_begins_with_hello(void **state)
{
    struct node n;
    struct driver d;

    (void)state;
    start_node(&n);
    dial(&n, &d);
    renew(&d);
    fixture_wait(&n.f, &d.n_ended, 1);
    assert_int_equal(d.status, MB_GRPC_FAILED_PRECONDITION);
    stop_node(&n);
}

/* Hello, and its stream is closed; the gang waits for another one. Returns its port. */
static uint32_t port_for(struct node *n, int gang)
{
    struct driver d;

    dial(n, &d);
    say_hello(&d, gang);
    fixture_wait(&n->f, &d.n_replies, 1);
    mb_grpc_stream_close_send(d.stream);
    fixture_wait(&n->f, &d.n_ended, 1);
    assert_int_equal(d.status, MB_GRPC_OK);
    return d.port;
}

/* So many that two of them would draw the same one, if nobody looked, in 98 of 100 runs. */
static void gangs_meet_at_different_ports(void **state)
{
    uint32_t ports[GANGS];
    struct node n;

    (void)state;
    start_node(&n);
    for (int i = 0; i < GANGS; i++) {
        ports[i] = port_for(&n, i);
        assert_true(ports[i] > 0 && ports[i] <= UINT16_MAX);
        for (int k = 0; k < i; k++)
            assert_int_not_equal(ports[k], ports[i]);
    }
    assert_int_equal(port_for(&n, 0), ports[0]);
    stop_node(&n);
}

/* Its bundle was committed before the drain; the run that comes after it would never be told. */
static void a_drained_node_takes_no_gang(void **state)
{
    struct node n;
    struct driver d;

    (void)state;
    start_node(&n);
    mb_gangs_drain(n.gangs, MB_DEADLINE_DRAIN, 0, "the node is drained");
    dial(&n, &d);
    say_hello(&d, 0);
    fixture_wait(&n.f, &d.n_ended, 1);
    assert_int_equal(d.status, MB_GRPC_RESOURCE_EXHAUSTED);
    assert_int_equal(mb_gangs_count(n.gangs), 0);
    stop_node(&n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_said_after_the_attempt_let_go_is_not_refused),
        cmocka_unit_test(a_stream_begins_with_hello),
        cmocka_unit_test(a_drained_node_takes_no_gang),
        cmocka_unit_test(gangs_meet_at_different_ports),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
