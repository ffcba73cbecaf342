/* The head as its client sees it: KV, registration, views and verdicts, another cluster at the
 * address, a port that is taken. */
#include "head_fixture.h"
#include <stdio.h>
#include "base/clock.h"
#include "gcs/services.h"
#include "proto/ray/gcs_service.pb-c.h"

enum { WAITING = 16 };

static void kv(void **state)
{
    struct fixture *f = *state;
    struct mb_gcs *c = f->gcs;
    struct result r;

    assert_string_equal(mb_gcs_ray_version(c), "2.60.0");
    DO(f, r, mb_gcs_kv_get(c, "ns", "k", 0, fixture_on_value, &r, NULL, &e));
    assert_int_equal(r.code, MB_ENOENT);
    DO(f, r, mb_gcs_kv_put(c, "ns", "k", "one", 3, 0, 0, fixture_on_count, &r, NULL, &e));
    assert_int_equal(r.count, 1);
    DO(f, r, mb_gcs_kv_put(c, "ns", "k", "two", 3, 0, 0, fixture_on_count, &r, NULL, &e));
    assert_int_equal(r.count, 0);
    DO(f, r, mb_gcs_kv_get(c, "ns", "k", 0, fixture_on_value, &r, NULL, &e));
    assert_string_equal(r.value, "one");
    DO(f, r, mb_gcs_kv_put(c, "ns", "k", "two", 3, 1, 0, fixture_on_count, &r, NULL, &e));
    DO(f, r, mb_gcs_kv_put(c, "ns", "k2", "", 0, 1, 0, fixture_on_count, &r, NULL, &e));
    DO(f, r, mb_gcs_kv_get(c, "ns", "k2", 0, fixture_on_value, &r, NULL, &e));
    assert_int_equal(r.code, 0);
    assert_int_equal(r.n, 0);
    DO(f, r, mb_gcs_kv_keys(c, "ns", "k", 0, fixture_on_keys, &r, NULL, &e));
    assert_string_equal(r.value, "k k2 ");
    DO(f, r, mb_gcs_kv_exists(c, "other", "k", 0, fixture_on_count, &r, NULL, &e));
    assert_int_equal(r.count, 0);
    DO(f, r, mb_gcs_kv_del(c, "ns", "k", 1, 0, fixture_on_count, &r, NULL, &e));
    assert_int_equal(r.count, 2);
    DO(f, r, mb_gcs_named_actor(c, "a", "b", 0, fixture_on_actor, &r, NULL, &e));
    assert_int_equal(r.code, MB_ENOENT);
}

static void cancel_and_misuse(void **state)
{
    struct fixture *f = *state;
    struct mb_gcs_op *op;
    struct mb_err err = {0};
    struct result r = {0};
    uint8_t id[MB_PG_ID_BYTES] = {9};

    assert_int_equal(mb_gcs_pg_wait(f->gcs, id, 60000, fixture_on_done, &r, &op, &err), 0);
    mb_gcs_op_cancel(op);
    assert_int_equal(r.done, 0);
    loop_until(&f->loop, &r.done);
    assert_int_equal(r.code, MB_ECANCELED);
    assert_int_equal(mb_gcs_connect(f->gcs, &err), MB_ESTATE);
    struct mb_gcs_pg empty = {0};
    assert_int_equal(mb_gcs_pg_create(f->gcs, &empty, 0, fixture_on_done, &r, NULL, &err),
                     MB_EINVAL);
}

static void nodes(void **state)
{
    struct fixture *f = *state;
    struct result r;

    fixture_register_agent(f, 0);
    fixture_register_agent(f, 1);
    DO(f, r, mb_gcs_nodes(f->gcs, 0, fixture_on_nodes, &r, NULL, &e));
    assert_int_equal(r.n, 2);
    assert_int_equal(r.dead[0] + r.dead[1], 0);
    DO(f, r,
       mb_gcs_unregister_node(f->gcs, f->agents[0].id, MB_GCS_DEATH_EXPECTED, "bye", 0,
                              fixture_on_done, &r, NULL, &e));
    assert_int_equal(r.code, 0);
    DO(f, r, mb_gcs_check_alive(f->gcs, f->agents[0].id, 0, fixture_on_count, &r, NULL, &e));
    assert_int_equal(r.count, 0);
    DO(f, r, mb_gcs_check_alive(f->gcs, f->agents[1].id, 0, fixture_on_count, &r, NULL, &e));
    assert_int_equal(r.count, 1);
}

/* As of a registration that comes late: its process may have another id by now, and bundles that
 * are sent there would be nobody's. */
static void the_dead_stay_dead(void **state)
{
    struct fixture *f = *state;
    struct mb_gcs_node node = {.ip = "127.0.0.1", .port = 1};
    struct result r;

    fixture_register_agent(f, 0);
    fixture_register_agent(f, 0); /* the answer was lost */
    DO(f, r,
       mb_gcs_unregister_node(f->gcs, f->agents[0].id, MB_GCS_DEATH_EXPECTED, "bye", 0,
                              fixture_on_done, &r, NULL, &e));
    assert_int_equal(r.code, 0);
    memcpy(node.node_id, f->agents[0].id, MB_NODE_ID_BYTES);
    DO(f, r, mb_gcs_register_node(f->gcs, &node, 5000, fixture_on_done, &r, NULL, &e));
    assert_int_equal(r.code, MB_EEXIST);
    DO(f, r, mb_gcs_check_alive(f->gcs, f->agents[0].id, 0, fixture_on_count, &r, NULL, &e));
    assert_int_equal(r.count, 0);
}

/* Whichever of them learns of it, none of the others may be answered by the other cluster. */
static void another_cluster_at_the_address(void **state)
{
    struct fixture *f = *state;
    struct result r, waiting[WAITING] = {0};
    struct mb_err err = {0};

    fixture_stop_head(f);
    for (int i = 0; i < WAITING; i++)
        assert_int_equal(
            mb_gcs_kv_get(f->gcs, "", "key", 15000, fixture_on_value, &waiting[i], NULL, &err), 0);
    fixture_start_head(f, "b.db");
    DO(f, r, mb_gcs_kv_get(f->gcs, "", "key", 15000, fixture_on_value, &r, NULL, &e));
    assert_int_equal(r.code, MB_EUNAVAIL);
    for (int i = 0; i < WAITING; i++) {
        loop_until(&f->loop, &waiting[i].done);
        assert_int_equal(waiting[i].code, MB_EUNAVAIL);
    }
    assert_int_equal(f->event, MB_GCS_CLUSTER_CHANGED);
    assert_false(mb_gcs_connected(f->gcs));
    fixture_connect_client(f);
    DO(f, r, mb_gcs_kv_get(f->gcs, "", "key", 15000, fixture_on_value, &r, NULL, &e));
    assert_int_equal(r.code, MB_ENOENT);
}

static void on_available(void *arg, int status, const char *detail, const ProtobufCMessage *reply)
{
    const Ray__Rpc__GetAllAvailableResourcesReply *m = (const void *)reply;
    struct result *r = arg;

    (void)detail;
    assert_int_equal(status, MB_GRPC_OK);
    r->done = 1;
    r->count = -1;
    if (m->n_resources_list == 1 && m->resources_list[0]->n_resources_available == 1)
        r->count = (int64_t)m->resources_list[0]->resources_available[0]->value;
}

/* What the head believes the one node has left; waits until it is `want`, or asks once. */
static int64_t available(struct fixture *f, struct mb_grpc_channel *ch, int64_t want, int is_wait)
{
    Ray__Rpc__GetAllAvailableResourcesRequest q =
        RAY__RPC__GET_ALL_AVAILABLE_RESOURCES_REQUEST__INIT;
    uint64_t until_ms = mb_mono_ms() + 60000;
    struct result r;

    do {
        DO(f, r,
           mb_grpc_unary(ch, "/ray.rpc.NodeResourceInfoGcsService/GetAllAvailableResources",
                         &q.base, &ray__rpc__get_all_available_resources_reply__descriptor, 10000,
                         on_available, &r, NULL, &e));
    } while (is_wait && r.count != want && mb_mono_ms() < until_ms);
    return r.count;
}

/* A renewed view waits for the regular message. */
static void view_renewed(void **state)
{
    struct fixture *f = *state;
    struct mb_gcs_resource total[] = {{"mobula_gpu", 4}}, left[] = {{"mobula_gpu", 1}};
    struct mb_gcs_view view = {.available = left, .n_available = 1, .total = total, .n_total = 1};
    struct mb_grpc_channel *ch;
    struct mb_err err = {0};

    assert_int_equal(mb_gcs_sync_renew(f->gcs, &view, &err), MB_ESTATE);
    assert_int_equal(mb_grpc_channel_create(f->grpc, f->address, NULL, &ch, &err), 0);
    fixture_register_agent(f, 0);
    uint64_t began_ms = mb_mono_ms();
    assert_int_equal(mb_gcs_sync_start(f->gcs, f->agents[0].id, &view, &err), 0);
    assert_int_equal(available(f, ch, 1, 1), 1);
    left[0].amount = 2;
    assert_int_equal(mb_gcs_sync_set(f->gcs, &view, &err), 0);
    assert_int_equal(available(f, ch, 2, 1), 2);
    left[0].amount = 3;
    assert_int_equal(mb_gcs_sync_renew(f->gcs, &view, &err), 0);
    int64_t at_once = available(f, ch, 3, 0);
    if (mb_mono_ms() - began_ms < 1900) /* else the first regular message may have gone */
        assert_int_equal(at_once, 2);
    assert_int_equal(available(f, ch, 3, 1), 3);
    mb_gcs_sync_stop(f->gcs);
    mb_grpc_channel_destroy(ch);
}

static void sync_and_verdict(void **state)
{
    struct fixture *f = *state;
    struct mb_gcs_resource total[] = {{"mobula_gpu", 4}}, left[] = {{"mobula_gpu", 1}};
    struct mb_gcs_view view = {.available = total, .n_available = 1, .total = total, .n_total = 1};
    struct mb_err err = {0};
    struct result r;

    fixture_register_agent(f, 0);
    assert_int_equal(mb_gcs_sync_start(f->gcs, f->agents[0].id, &view, &err), 0);
    view.available = left;
    assert_int_equal(mb_gcs_sync_set(f->gcs, &view, &err), 0);
    assert_int_equal(mb_gcs_watch_node(f->gcs, f->agents[0].id, &err), 0);
    int before = f->n_events;
    DO(f, r,
       mb_gcs_unregister_node(f->gcs, f->agents[0].id, MB_GCS_DEATH_EXPECTED, "", 0,
                              fixture_on_done, &r, NULL, &e));
    for (int i = 0; f->n_events == before && i < 100000; i++)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_int_equal(f->event, MB_GCS_NODE_DEAD);
    /* close with requests and the stream in flight is the fixture_teardown's part */
    assert_int_equal(mb_gcs_nodes(f->gcs, 0, fixture_on_nodes, &r, NULL, &err), 0);
    memset(&r, 0, sizeof r);
    int closed = 0;
    mb_gcs_close(f->gcs, fixture_set_flag, &closed);
    loop_until(&f->loop, &closed);
    assert_int_equal(r.done, 1);
    struct mb_gcs_opts opts = {.address = f->address};
    assert_int_equal(mb_gcs_create(&f->loop, f->grpc, &opts, fixture_on_event, f, &f->gcs, &err),
                     0);
}

static void nobody_answers(void **state)
{
    struct fixture *f = *state;
    struct mb_gcs_opts opts = {.address = "127.0.0.1:1", .connect_timeout_ms = 500};
    struct mb_err err = {0};
    struct mb_gcs *c;
    int before = f->n_events, closed = 0;

    assert_int_equal(mb_gcs_create(&f->loop, f->grpc, &opts, fixture_on_event, f, &c, &err), 0);
    assert_int_equal(mb_gcs_connect(c, &err), 0);
    for (int i = 0; f->n_events == before && i < 100000; i++)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_int_equal(f->event, MB_GCS_CONNECT_FAILED);
    mb_gcs_close(c, fixture_set_flag, &closed);
    loop_until(&f->loop, &closed);
}

static void a_port_in_use(void **state)
{
    struct fixture *f = *state;
    char path[128];
    struct mb_head_opts opts = {.gcs_port = f->port, .store_path = path};
    struct mb_head *second;
    struct mb_err err = {0};

    snprintf(path, sizeof path, "%s/second.db", f->dir);
    assert_int_equal(
        mb_head_start(&f->loop, f->head_grpc, &opts, &fixture_no_runner, NULL, NULL, &second, &err),
        MB_EEXIST);
    assert_null(second);
}

static void versions(void **state)
{
    (void)state;
    assert_null(mb_gcs_version_note("2.40.0"));
    assert_null(mb_gcs_version_note("2.60.3"));
    assert_non_null(strstr(mb_gcs_version_note("2.61.0"), "newer than 2.60"));
    assert_non_null(strstr(mb_gcs_version_note("3.0.0.dev0"), "newer than 2.60"));
}

/* Many die at once, with a rack: one look of the head is enough for them all, up to its bound. */
static void many_die_at_once(void **state)
{
    enum { MANY = 40, AT_ONCE = 32 /* gcs/node_checks.c */ };
    struct fixture *f = *state;
    struct mb_head *h = f->head;
    struct result r;
    size_t n_dead = 0;

    for (int i = 0; i < MANY; i++) {
        struct mb_gcs_node node = {.ip = "127.0.0.1", .port = 1};

        node.node_id[0] = (uint8_t)(i + 1);
        DO(f, r, mb_gcs_register_node(f->gcs, &node, 5000, fixture_on_done, &r, NULL, &e));
        assert_int_equal(r.code, 0);
    }
    assert_int_equal(h->n_nodes, MANY);
    for (int looks = 1; looks <= 2; looks++) {
        for (size_t i = 0; i < h->n_nodes; i++) {
            h->nodes[i]->health.failures = MB_HEALTH_FAILURES_ALONE;
            h->nodes[i]->health.heard_ms = 0;
        }
        head_nodes_tick(h, mb_mono_ms() + MB_HEALTH_SILENCE_MS);
        n_dead = 0;
        for (size_t i = 0; i < h->n_nodes; i++)
            n_dead += !head_node_alive(h->nodes[i]);
        assert_int_equal(n_dead, looks == 1 ? AT_ONCE : MANY);
    }
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)
    const struct CMUnitTest tests[] = {
        T(kv),
        T(versions),
        T(cancel_and_misuse),
        T(nodes),
        T(the_dead_stay_dead),
        T(another_cluster_at_the_address),
        T(many_die_at_once),
        T(view_renewed),
        T(sync_and_verdict),
        T(nobody_answers),
        T(a_port_in_use),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
