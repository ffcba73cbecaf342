/* Messages of Ray and our structs: there and back, and every allocation failing once. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "base/alloc.h"
#include "base/err.h"
#include "gcs/wire.h"

static const struct mb_gcs_resource resources[] = {{"mobula_gpu", 8}, {"mobula_slot", 0.5}};
static const struct mb_gcs_label labels[] = {{"ray.io/node-id", "ab"}};

/* Packs m, unpacks it again; NULL when memory is out. */
static void *there_and_back(const ProtobufCMessage *m)
{
    return m ? mb_wire_copy(m) : NULL;
}

static int node_round(void)
{
    struct mb_gcs_node in = {.node_id = {1, 2, 3},
                             .ip = "10.0.0.1",
                             .port = 1234,
                             .node_name = "n",
                             .agent_http_port = 52365,
                             .is_dead = 1,
                             .death_reason = MB_GCS_DEATH_PREEMPTED,
                             .death_text = "spot",
                             .start_unix_ms = 7,
                             .resources = resources,
                             .n_resources = 2,
                             .labels = labels,
                             .n_labels = 1},
                       out;
    struct mb_arena a = {0};
    Ray__Rpc__GcsNodeInfo *made = mb_wire_node(&a, &in);
    Ray__Rpc__GcsNodeInfo *m = there_and_back(made ? &made->base : NULL);
    int rc = m ? mb_wire_get_node(&a, m, &out) : MB_ENOMEM;

    if (rc == 0) {
        assert_memory_equal(out.node_id, in.node_id, MB_NODE_ID_BYTES);
        assert_string_equal(out.ip, "10.0.0.1");
        assert_string_equal(out.hostname, "");
        assert_int_equal(out.agent_http_port, 52365);
        assert_int_equal(out.death_reason, MB_GCS_DEATH_PREEMPTED);
        assert_string_equal(out.death_text, "spot");
        assert_int_equal(out.n_resources, 2);
        assert_string_equal(out.resources[1].name, "mobula_slot");
        assert_true(out.resources[1].amount == 0.5);
        assert_string_equal(out.labels[0].value, "ab");
    }
    if (m)
        ray__rpc__gcs_node_info__free_unpacked(m, NULL);
    mb_arena_close(&a);
    return rc;
}

/* A group as its creator sends it, read as the row that the head keeps. */
static int group_round(void)
{
    struct mb_gcs_bundle bundles[2] = {{.resources = resources, .n_resources = 2},
                                       {.resources = resources, .n_resources = 1}};
    struct mb_gcs_pg in = {.id = {9},
                           .name = "g",
                           .bundles = bundles,
                           .n_bundles = 2,
                           .strategy = MB_PG_STRICT_SPREAD,
                           .job_id = {1}},
                     out;
    struct mb_arena a = {0};
    Ray__Rpc__PlacementGroupSpec *made = mb_wire_pg_spec(&a, &in);
    Ray__Rpc__PlacementGroupSpec *m = there_and_back(made ? &made->base : NULL);
    Ray__Rpc__PlacementGroupTableData row = RAY__RPC__PLACEMENT_GROUP_TABLE_DATA__INIT;
    int rc = MB_ENOMEM;

    if (m) {
        /* The layout that a real GCS wants: no actor is 12 times ff and the job, and it is dead. */
        assert_int_equal(m->creator_actor_id.len, MB_ACTOR_ID_BYTES);
        assert_int_equal(m->creator_actor_id.data[0], 0xff);
        assert_int_equal(m->creator_actor_id.data[12], 1);
        assert_true(m->creator_actor_dead && !m->creator_job_dead);
        row.placement_group_id = m->placement_group_id;
        row.name = m->name;
        row.bundles = m->bundles;
        row.n_bundles = m->n_bundles;
        row.strategy = m->strategy;
        row.creator_job_id = m->creator_job_id;
        row.creator_actor_id = m->creator_actor_id;
        row.creator_actor_dead = m->creator_actor_dead;
        rc = mb_wire_get_pg(&a, &row, &out);
    }
    if (rc == 0) {
        assert_int_equal(out.n_bundles, 2);
        assert_int_equal(out.has_actor, 0);
        assert_string_equal(out.bundles[0].resources[0].name, "mobula_gpu");
        assert_int_equal(out.bundles[1].n_resources, 1);
        assert_false(out.bundles[0].has_node);
    }
    if (m)
        ray__rpc__placement_group_spec__free_unpacked(m, NULL);
    mb_arena_close(&a);
    return rc;
}

static int job_round(void)
{
    struct mb_gcs_job in = {.job_id = {3},
                            .entrypoint = "true",
                            .submission_id = "sub",
                            .driver_ip = "1.1.1.1",
                            .driver_pid = 77,
                            .node_id = {5},
                            .node_port = 99},
                      out;
    uint8_t worker[MB_NODE_ID_BYTES] = {8};
    struct mb_arena a = {0};
    Ray__Rpc__JobTableData *made = mb_wire_job(&a, &in, worker);
    Ray__Rpc__JobTableData *m = there_and_back(made ? &made->base : NULL);
    int rc = m ? mb_wire_get_job(m, &out) : MB_ENOMEM;

    if (rc == 0) {
        assert_string_equal(out.submission_id, "sub");
        assert_int_equal(out.driver_pid, 77);
        assert_int_equal(out.node_port, 99);
        assert_int_equal(m->driver_address->worker_id.len, MB_NODE_ID_BYTES);
    }
    if (m)
        ray__rpc__job_table_data__free_unpacked(m, NULL);
    mb_arena_close(&a);
    return rc;
}

static void sweep(int (*round)(void))
{
    for (unsigned long nth = 1;; nth++) {
        mb_alloc_fail_nth(nth);
        int rc = round();
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        assert_int_equal(rc, failed ? MB_ENOMEM : 0);
        if (!failed)
            return;
    }
}

static void there_and_back_again(void **state)
{
    (void)state;
    sweep(node_round);
    sweep(group_round);
    sweep(job_round);
}

static void ids_of_wrong_length_are_refused(void **state)
{
    Ray__Rpc__GcsNodeInfo node = RAY__RPC__GCS_NODE_INFO__INIT;
    Ray__Rpc__JobTableData job = RAY__RPC__JOB_TABLE_DATA__INIT;
    Ray__Rpc__PlacementGroupTableData pg = RAY__RPC__PLACEMENT_GROUP_TABLE_DATA__INIT;
    struct mb_arena a = {0};
    struct mb_gcs_node n;
    struct mb_gcs_job j;
    struct mb_gcs_pg g;

    (void)state;
    node.node_id = mb_wire_bytes("short", 5);
    assert_int_equal(mb_wire_get_node(&a, &node, &n), MB_EPROTO);
    assert_int_equal(mb_wire_get_job(&job, &j), MB_EPROTO);
    assert_int_equal(mb_wire_get_pg(&a, &pg, &g), MB_EPROTO);
    mb_arena_close(&a);
}

static void rows_of_groups_are_left_out(void **state)
{
    static const struct mb_gcs_resource rows[] = {{"mobula_gpu", 8},
                                                  {"bundle_group_1", 1000},
                                                  {"mobula_gpu_group_0_1", 2},
                                                  {"mobula_slot", 1}};
    Ray__Rpc__GcsNodeInfo node = RAY__RPC__GCS_NODE_INFO__INIT, *read;
    struct mb_arena a = {0};

    (void)state;
    node.resources_total =
        mb_wire_resources(&a, &ray__rpc__gcs_node_info__resources_total_entry__descriptor, rows, 4);
    node.n_resources_total = 4;
    read = (Ray__Rpc__GcsNodeInfo *)mb_wire_copy(&node.base);
    mb_arena_close(&a);
    assert_non_null(read);
    read->n_resources_total =
        mb_wire_drop_resources(read->resources_total, read->n_resources_total, "_group_");
    assert_int_equal(read->n_resources_total, 2);
    assert_string_equal(read->resources_total[0]->key, "mobula_gpu");
    assert_string_equal(read->resources_total[1]->key, "mobula_slot");
    ray__rpc__gcs_node_info__free_unpacked(read, NULL);
    assert_int_equal(mb_wire_drop_resources(NULL, 0, "_group_"), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(there_and_back_again),
        cmocka_unit_test(ids_of_wrong_length_are_refused),
        cmocka_unit_test(rows_of_groups_are_left_out),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
