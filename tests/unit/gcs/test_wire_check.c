/* What a real GCS dies of is found in a message before it is sent: one fault at a time in messages
 * that are right. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <string.h>
#include <cmocka.h>
#include "base/err.h"
#include "gcs/wire.h"
#include "gcs/wire_check.h"
#include "proto/mobula/head.pb-c.h"
#include "proto/ray/ray_syncer.pb-c.h"

static const uint8_t some[MB_NODE_ID_BYTES + 1];

static ProtobufCBinaryData id(size_t n)
{
    return mb_wire_bytes(some, n);
}

/* says NULL: it may be sent. */
static void check(const void *m, const char *says)
{
    struct mb_err err = {0};
    const int rc = mb_wire_check(m, &err);

    assert_int_equal(rc, says != NULL ? MB_EINVAL : MB_OK);
    if (says != NULL)
        assert_string_equal(err.text, says);
}

static void test_node(void **state)
{
    Ray__Rpc__RegisterNodeRequest req = RAY__RPC__REGISTER_NODE_REQUEST__INIT;
    Ray__Rpc__GcsNodeInfo node = RAY__RPC__GCS_NODE_INFO__INIT;
    Ray__Rpc__GcsNodeInfo__LabelsEntry label = RAY__RPC__GCS_NODE_INFO__LABELS_ENTRY__INIT;
    Ray__Rpc__GcsNodeInfo__LabelsEntry *labels[] = {&label};
    Ray__Rpc__GcsNodeInfo__ResourcesTotalEntry amount =
        RAY__RPC__GCS_NODE_INFO__RESOURCES_TOTAL_ENTRY__INIT;
    Ray__Rpc__GcsNodeInfo__ResourcesTotalEntry *amounts[] = {&amount};
    static const size_t wrong[] = {0, 1, MB_NODE_ID_BYTES - 1, MB_NODE_ID_BYTES + 1};

    (void)state;
    check(&req.base, "ray.rpc.RegisterNodeRequest without node_info");
    req.node_info = &node;
    node.labels = labels;
    node.resources_total = amounts;
    node.n_labels = node.n_resources_total = 1;
    label.key = (char *)"pool";
    label.value = (char *)"\xce\xb1";
    amount.key = (char *)"mobula_gpu";
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        struct mb_err err = {0};

        node.node_id = id(wrong[i]);
        assert_int_equal(mb_wire_check(&req.base, &err), MB_EINVAL);
        assert_non_null(strstr(err.text, "node_id of ray.rpc.GcsNodeInfo has "));
    }
    node.node_id = id(MB_NODE_ID_BYTES);
    check(&req.base, NULL);
    label.value = (char *)"\xff";
    check(&req.base, "value of ray.rpc.GcsNodeInfo.LabelsEntry is no UTF-8");
    label.value = (char *)"b";
    node.node_name = (char *)"a\xc3";
    check(&req.base, "node_name of ray.rpc.GcsNodeInfo is no UTF-8");
    node.node_name = (char *)"a";
    amount.value = (double)NAN;
    check(&req.base, "value of ray.rpc.GcsNodeInfo.ResourcesTotalEntry is no number");
    amount.value = (double)INFINITY;
    check(&req.base, "value of ray.rpc.GcsNodeInfo.ResourcesTotalEntry is no number");
    amount.value = 8;
    check(&req.base, NULL);
}

/* A node's reports to a head of ours name what is in a package: none may hold up the others. */
static void test_our_own_text(void **state)
{
    Mobula__V1__ReportDriversRequest req = MOBULA__V1__REPORT_DRIVERS_REQUEST__INIT;
    Mobula__V1__DriverEvent event = MOBULA__V1__DRIVER_EVENT__INIT, *events[] = {&event};

    (void)state;
    req.events = events;
    req.n_events = 1;
    event.text = (char *)"entry ../\xff leaves the directory";
    req.node_id = id(MB_NODE_ID_BYTES);
    check(&req.base, NULL);
}

static void test_lists_of_ids(void **state)
{
    Ray__Rpc__CheckAliveRequest req = RAY__RPC__CHECK_ALIVE_REQUEST__INIT;
    ProtobufCBinaryData two[] = {id(MB_NODE_ID_BYTES), id(MB_NODE_ID_BYTES)};

    (void)state;
    check(&req.base, NULL); /* the handshake */
    req.node_ids = two;
    req.n_node_ids = 2;
    check(&req.base, NULL);
    two[1] = id(3);
    check(&req.base, "node_ids of ray.rpc.CheckAliveRequest has 3 bytes, not 28");
}

static void test_group(void **state)
{
    Ray__Rpc__CreatePlacementGroupRequest req = RAY__RPC__CREATE_PLACEMENT_GROUP_REQUEST__INIT;
    Ray__Rpc__PlacementGroupSpec spec = RAY__RPC__PLACEMENT_GROUP_SPEC__INIT;
    Ray__Rpc__Bundle bundle = RAY__RPC__BUNDLE__INIT, *bundles[] = {&bundle};
    Ray__Rpc__Bundle__BundleIdentifier of = RAY__RPC__BUNDLE__BUNDLE_IDENTIFIER__INIT;

    (void)state;
    check(&req.base, "ray.rpc.CreatePlacementGroupRequest without placement_group_spec");
    req.placement_group_spec = &spec;
    spec.placement_group_id = id(MB_PG_ID_BYTES);
    spec.creator_job_id = id(MB_JOB_ID_BYTES);
    spec.creator_actor_id = id(MB_ACTOR_ID_BYTES);
    spec.bundles = bundles;
    check(&req.base, "ray.rpc.PlacementGroupSpec without bundles");
    spec.n_bundles = 1;
    check(&req.base, "ray.rpc.Bundle without bundle_id");
    bundle.bundle_id = &of;
    check(&req.base, "placement_group_id of ray.rpc.Bundle.BundleIdentifier has 0 bytes, not 18");
    of.placement_group_id = id(MB_PG_ID_BYTES);
    check(&req.base, NULL);
    bundle.node_id = id(MB_NODE_ID_BYTES - 1);
    check(&req.base, "node_id of ray.rpc.Bundle has 27 bytes, not 28");
    bundle.node_id = id(0);
    spec.creator_job_id = id(0);
    check(&req.base, "creator_job_id of ray.rpc.PlacementGroupSpec has 0 bytes, not 4");
    spec.creator_job_id = id(MB_JOB_ID_BYTES);
    spec.placement_group_id = id(14);
    check(&req.base, "placement_group_id of ray.rpc.PlacementGroupSpec has 14 bytes, not 18");
}

static void test_job(void **state)
{
    Ray__Rpc__AddJobRequest req = RAY__RPC__ADD_JOB_REQUEST__INIT;
    Ray__Rpc__JobTableData job = RAY__RPC__JOB_TABLE_DATA__INIT;
    Ray__Rpc__Address address = RAY__RPC__ADDRESS__INIT;

    (void)state;
    check(&req.base, "ray.rpc.AddJobRequest without data");
    req.data = &job;
    job.job_id = id(MB_JOB_ID_BYTES);
    check(&req.base, "ray.rpc.JobTableData without driver_address");
    job.driver_address = &address;
    address.node_id = id(MB_NODE_ID_BYTES);
    check(&req.base, "worker_id of ray.rpc.Address has 0 bytes, not 28");
    address.worker_id = id(MB_NODE_ID_BYTES);
    check(&req.base, NULL);
}

static void test_views(void **state)
{
    Ray__Rpc__Syncer__RaySyncMessageBatch batch = RAY__RPC__SYNCER__RAY_SYNC_MESSAGE_BATCH__INIT;
    Ray__Rpc__Syncer__RaySyncMessage m = RAY__RPC__SYNCER__RAY_SYNC_MESSAGE__INIT, *list[] = {&m};

    (void)state;
    check(&batch.base, "ray.rpc.syncer.RaySyncMessageBatch without messages");
    batch.messages = list;
    batch.n_messages = 1;
    check(&batch.base, "node_id of ray.rpc.syncer.RaySyncMessage has 0 bytes, not 28");
    m.node_id = id(MB_NODE_ID_BYTES);
    check(&batch.base, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_node),  cmocka_unit_test(test_lists_of_ids),
        cmocka_unit_test(test_group), cmocka_unit_test(test_job),
        cmocka_unit_test(test_views), cmocka_unit_test(test_our_own_text),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
