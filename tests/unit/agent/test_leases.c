/* Leases that Ray asks of a node without workers. What asks the head, and what answers, is the
 * test's. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>
#include "agent/leases.h"
#include "base/clock.h"
#include "proto/ray/common.pb-c.h"

enum answer { NONE, REFUSED, SENT_ON, SENT_BACK };
enum { REQUESTS_MAX = 1100, NODES_MAX = 100 };

static struct {
    uv_loop_t loop;
    struct mb_leases leases;
    mb_gcs_nodes_cb nodes_cb;
    int n_asked, n_canceled, is_old, fails;
    enum answer answers[REQUESTS_MAX];
    char address[96]; /* of the last one that was sent on */
} t;

void __wrap_mb_grpc_reply(struct mb_grpc_req *req, const ProtobufCMessage *reply);
struct mb_gcs *__wrap_mb_node_gcs(struct mb_node *n);
int __wrap_mb_gcs_is_modern(const struct mb_gcs *c);
void __wrap_mb_gcs_op_cancel(struct mb_gcs_op *op);
int __wrap_mb_gcs_nodes(struct mb_gcs *c, uint64_t timeout_ms, mb_gcs_nodes_cb cb, void *arg,
                        struct mb_gcs_op **op, struct mb_err *err);

/* A request is a pointer to its answer. */
void __wrap_mb_grpc_reply(struct mb_grpc_req *req, const ProtobufCMessage *reply)
{
    const Ray__Rpc__RequestWorkerLeaseReply *r = (const void *)reply;
    enum answer *a = (enum answer *)(void *)req;

    assert_int_equal(*a, NONE); /* exactly once */
    assert_int_equal(r->canceled + r->rejected + (r->retry_at_raylet_address != NULL), 1);
    *a = r->canceled ? REFUSED : r->rejected ? SENT_BACK : SENT_ON;
    if (r->canceled)
        assert_non_null(strstr(r->scheduling_failure_message, "this is a mobula node"));
    if (*a == SENT_ON)
        snprintf(t.address, sizeof(t.address), "%02x %s:%d",
                 r->retry_at_raylet_address->node_id.data[0],
                 r->retry_at_raylet_address->ip_address, r->retry_at_raylet_address->port);
}

struct mb_gcs *__wrap_mb_node_gcs(struct mb_node *n)
{
    return (struct mb_gcs *)n;
}

int __wrap_mb_gcs_is_modern(const struct mb_gcs *c)
{
    (void)c;
    return !t.is_old;
}

void __wrap_mb_gcs_op_cancel(struct mb_gcs_op *op)
{
    (void)op;
    t.n_canceled++;
}

int __wrap_mb_gcs_nodes(struct mb_gcs *c, uint64_t timeout_ms, mb_gcs_nodes_cb cb, void *arg,
                        struct mb_gcs_op **op, struct mb_err *err)
{
    (void)c;
    assert_true(timeout_ms > 0 && arg == &t.leases);
    if (t.fails)
        return mb_err_set(err, MB_ESTATE, "not connected");
    t.n_asked++;
    t.nodes_cb = cb;
    *op = (struct mb_gcs_op *)&t;
    return 0;
}

static int setup(void **state)
{
    (void)state;
    memset(&t, 0, sizeof(t));
    uv_loop_init(&t.loop);
    mb_leases_init(&t.leases, &t.loop);
    t.leases.node = (struct mb_node *)&t;
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    mb_leases_stop(&t.leases);
    mb_leases_close(&t.leases);
    uv_run(&t.loop, UV_RUN_DEFAULT);
    assert_int_equal(t.leases.n_waiting, 0);
    return uv_loop_close(&t.loop);
}

/* As it comes: spec is the bytes of lease_spec, n of them. */
static void ask(int i, const char *spec, size_t n, int is_spilled)
{
    uint8_t wire[128] = {0x0a, (uint8_t)n};
    Ray__Rpc__RequestWorkerLeaseRequest *q;
    size_t len = n + 2;

    assert_true(n < 100);
    memcpy(wire + 2, spec, n);
    if (is_spilled) {
        wire[len++] = 0x18;
        wire[len++] = 1;
    }
    q = ray__rpc__request_worker_lease_request__unpack(NULL, len, wire);
    assert_non_null(q);
    mb_leases_answer(&t.leases, (struct mb_grpc_req *)(void *)&t.answers[i], q);
    ray__rpc__request_worker_lease_request__free_unpacked(q, NULL);
}

#define ASK(i, spec, is_spilled) ask(i, spec, sizeof(spec) - 1, is_spilled)
/* A lease of num_cpus=0: an id, a strategy that is the default, a selector without words. */
#define NOTHING "\x0a\x05lease\x5a\x02\x0a\x00\x62\x00"
#define SPREAD  "\x5a\x02\x1a\x00"
/* The same as Ray 2.40 says it, of an actor; its field 9 is caller_id. */
#define OLD_NOTHING                                                                                \
    "\x08\x01\x12\x04name\x4a\x06"                                                                 \
    "caller\xe2\x01\x02\x0a\x00"
#define OLD_SPREAD "\xe2\x01\x02\x1a\x00"
/* This node by its id, which is 28 bytes: the first of them, and 27. */
#define REST             "123456789012345678901234567"
#define NODE(first)      "\x0a\x1c" first REST
#define WANTS(first)     "\x5a\x20\x22\x1e" NODE(first)
#define PREFERS(first)   "\x5a\x22\x22\x20" NODE(first) "\x10\x01"
#define OLD_WANTS(first) "\x08\x01\xe2\x01\x20\x22\x1e" NODE(first)

/* The head's answer: so many nodes of Ray's among ours and dead ones. */
static void nodes_are(int n_rays)
{
    struct mb_gcs_resource cpu = {"CPU", 4}, gpu = {"mobula_gpu", 8};
    struct mb_gcs_node nodes[NODES_MAX + 3] = {0};
    struct mb_err ok = {0};
    size_t n = 0;

    nodes[n++] =
        (struct mb_gcs_node){.ip = "10.0.0.1", .port = 1, .resources = &gpu, .n_resources = 1};
    nodes[n++] = (struct mb_gcs_node){.ip = "10.0.0.2", .port = 2, .is_dead = 1};
    nodes[n++] = (struct mb_gcs_node){.ip = "10.0.0.3"}; /* no port */
    for (int i = 0; i < n_rays; i++)
        nodes[n++] = (struct mb_gcs_node){
            .ip = "10.0.1.1", .port = 1000 + i, .resources = &cpu, .n_resources = (size_t)(i % 2)};
    for (size_t i = 0; i < n; i++) {
        memcpy(nodes[i].node_id + 1, REST, sizeof(REST) - 1);
        nodes[i].node_id[0] = (uint8_t)(i < 3 ? 0xf0 + i : i - 2);
    }
    t.nodes_cb(&t.leases, &ok, nodes, n);
}

static void what_asks_for_something_is_refused(void **state)
{
    static const struct {
        const char *spec;
        size_t n;
        int is_old;
    } specs[] = {
#define S(text) {text, sizeof(text) - 1, 0}
#define OLD(text)                                                                                  \
    {                                                                                              \
        text, sizeof(text) - 1, 1                                                                  \
    }
        S("\x4a\x03\x0a\x01x"),        /* required_resources */
        S("\x52\x03\x0a\x01x"),        /* required_placement_resources */
        S("\x5a\x04\x22\x02\x0a\x00"), /* a node without an id */
        S("\x5a\x02\x12\x00"),         /* placement group */
        S("\x5a\x02\x2a\x00"),         /* labels of nodes */
        S("\x62\x02\x0a\x00"),         /* a label selector */
        S("\x4a\x7f"),                 /* cut short */
        S("\x08\x01\x6a\x02\x0a\x00\x4a\x06"
          "caller"),                                 /* a TaskSpec */
        OLD("\x08\x01\x6a\x03\x0a\x01x"),            /* required_resources */
        OLD("\x08\x01\x72\x03\x0a\x01x"),            /* required_placement_resources */
        OLD("\x08\x01\xe2\x01\x04\x22\x02\x0a\x00"), /* a node without an id */
        OLD("\x08\x01\xe2\x01\x02\x12\x00"),         /* placement group */
        OLD("\x08\x01\xe2\x01\x02\x2a\x00"),         /* labels of nodes */
        OLD("\x08\x01\xda\x02\x02\x0a\x00"),         /* a label selector */
        OLD("\x08\x01\x6a\x7f"),                     /* cut short */
        OLD(NOTHING),                                /* a LeaseSpec */
#undef S
#undef OLD
    };

    (void)state;
    for (int i = 0; i < (int)(sizeof(specs) / sizeof(specs[0])); i++) {
        t.is_old = specs[i].is_old;
        ask(i, specs[i].spec, specs[i].n, i % 2);
        assert_int_equal(t.answers[i], REFUSED); /* at once */
    }
    assert_int_equal(t.n_asked, 0);
}

static void what_asks_for_nothing_is_sent_on(void **state)
{
    (void)state;
    ASK(0, NOTHING, 0);
    ASK(1, SPREAD, 0);
    assert_int_equal(t.answers[0] | t.answers[1], NONE);
    assert_int_equal(t.n_asked, 1); /* for both */
    nodes_are(2);
    assert_int_equal(t.answers[0], SENT_ON);
    assert_int_equal(t.answers[1], SENT_ON);
    ASK(2, NOTHING, 0); /* what was said a moment ago still holds */
    assert_int_equal(t.answers[2], SENT_ON);
    assert_string_equal(t.address, "01 10.0.1.1:1000");
    ASK(3, "", 0); /* nothing at all */
    assert_int_equal(t.answers[3], SENT_ON);
    assert_string_equal(t.address, "02 10.0.1.1:1001");
    assert_int_equal(t.n_asked, 1);
}

static void what_an_older_ray_asks_for(void **state)
{
    (void)state;
    t.is_old = 1;
    ASK(0, OLD_NOTHING, 0);
    nodes_are(1);
    ASK(1, OLD_SPREAD, 0);
    ASK(2, "", 0);
    ASK(3, OLD_WANTS("\x01"), 0);
    for (int i = 0; i < 4; i++)
        assert_int_equal(t.answers[i], SENT_ON);
    ASK(4, OLD_NOTHING, 1);
    while (t.answers[4] == NONE)
        uv_run(&t.loop, UV_RUN_ONCE);
    assert_int_equal(t.answers[4], SENT_BACK);
}

/* Ray 2.40's head asks any node, also for an actor that may run on one only. */
static void who_wants_one_node_gets_that_one(void **state)
{
    (void)state;
    ASK(0, WANTS("\x63"), 0);
    nodes_are(NODES_MAX);
    assert_int_equal(t.answers[0], SENT_ON);
    assert_string_equal(t.address, "63 10.0.1.1:1098");
    ASK(1, PREFERS("\x02"), 0);
    assert_string_equal(t.address, "02 10.0.1.1:1001");
    ASK(2, WANTS("\x03"), 1); /* came from another node */
    while (t.answers[2] == NONE)
        uv_run(&t.loop, UV_RUN_ONCE);
    assert_int_equal(t.answers[2], SENT_BACK);
    assert_int_equal(t.n_asked, 1);

    ASK(3, WANTS("\xf0"), 0); /* one of ours: it might be one that has come since */
    ASK(4, WANTS("\xf1"), 1); /* dead */
    ASK(5, PREFERS("\xf0"), 0);
    ASK(6, WANTS("\x01"), 0);
    assert_int_equal(t.n_asked, 2);
    assert_int_equal(t.answers[3] | t.answers[4] | t.answers[5], NONE);
    assert_string_equal(t.address, "01 10.0.1.1:1000");
    nodes_are(1);
    assert_int_equal(t.answers[3], REFUSED);
    assert_int_equal(t.answers[4], REFUSED);
    assert_int_equal(t.answers[5], SENT_ON);
    assert_string_equal(t.address, "01 10.0.1.1:1000");
}

/* RAY_CHECK(!is_spillback) in a driver: it must not be sent on. */
static void what_was_sent_here_goes_back(void **state)
{
    uint64_t since;

    (void)state;
    ASK(0, NOTHING, 1);
    nodes_are(1);
    since = mb_mono_ms();
    assert_int_equal(t.answers[0], NONE); /* not at once: it may come again */
    while (t.answers[0] == NONE)
        uv_run(&t.loop, UV_RUN_ONCE);
    assert_int_equal(t.answers[0], SENT_BACK);
    assert_true(mb_mono_ms() - since >= 90);
    for (int i = 1; i < 20; i++)
        ASK(i, SPREAD, 1);
    while (t.answers[19] == NONE)
        uv_run(&t.loop, UV_RUN_ONCE);
    for (int i = 1; i < 20; i++)
        assert_int_equal(t.answers[i], SENT_BACK);
}

static void without_another_node_it_is_refused(void **state)
{
    struct mb_err err = {0};

    (void)state;
    ASK(0, NOTHING, 0);
    ASK(1, NOTHING, 1);
    nodes_are(0);
    ASK(2, NOTHING, 0);
    for (int i = 0; i < 3; i++)
        assert_int_equal(t.answers[i], REFUSED);
    t.leases.fresh_until_ms = 0;
    ASK(3, NOTHING, 0);
    mb_err_set(&err, MB_EUNAVAIL, "no head");
    t.nodes_cb(&t.leases, &err, NULL, 0);
    assert_int_equal(t.answers[3], REFUSED);
    t.fails = 1;
    ASK(4, NOTHING, 1);
    assert_int_equal(t.answers[4], REFUSED);
}

static void more_than_there_is_room_for(void **state)
{
    (void)state;
    for (int i = 0; i < REQUESTS_MAX; i++)
        ASK(i, NOTHING, 0);
    for (int i = 0; i < REQUESTS_MAX; i++)
        assert_int_equal(t.answers[i], i < 1000 ? NONE : REFUSED);
    nodes_are(NODES_MAX);
    for (int i = 0; i < 1000; i++)
        assert_int_equal(t.answers[i], SENT_ON);
}

static void nobody_waits_after_the_stop(void **state)
{
    (void)state;
    ASK(0, NOTHING, 1);
    nodes_are(1);
    t.leases.fresh_until_ms = 0;
    ASK(1, NOTHING, 0);
    mb_leases_stop(&t.leases);
    ASK(2, NOTHING, 0);
    assert_int_equal(t.n_canceled, 1);
    nodes_are(1); /* too late */
    for (int i = 0; i < 3; i++)
        assert_int_equal(t.answers[i], REFUSED);
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(what_asks_for_something_is_refused), T(what_asks_for_nothing_is_sent_on),
        T(what_an_older_ray_asks_for),         T(who_wants_one_node_gets_that_one),
        T(what_was_sent_here_goes_back),       T(without_another_node_it_is_refused),
        T(more_than_there_is_room_for),        T(nobody_waits_after_the_stop),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
