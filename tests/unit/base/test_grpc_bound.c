/* What unpacking may take: honest messages fit, of any size; those made to be large do not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <grpc/byte_buffer.h>
#include <grpc/slice.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/grpc/internal.h"
#include "proto/ray/gcs_service.pb-c.h"
#include "proto/ray/ray_syncer.pb-c.h"

enum { MIB = 1 << 20, NODES = 20000 };

static int unpack(const ProtobufCMessageDescriptor *desc, const void *data, size_t n)
{
    grpc_slice slice = grpc_slice_from_copied_buffer(data, n);
    grpc_byte_buffer *bytes = grpc_raw_byte_buffer_create(&slice, 1);
    ProtobufCMessage *msg;
    int status;

    grpc_slice_unref(slice);
    msg = mb_grpc_unpack(desc, bytes, &status);
    grpc_byte_buffer_destroy(bytes);
    assert_int_equal(msg != NULL, status == MB_GRPC_OK);
    mb_grpc_message_free(msg);
    return status;
}

/* "PAIR" n times. */
static int unpack_pairs(const ProtobufCMessageDescriptor *desc, const char pair[2], size_t n)
{
    char *data = mb_alloc(2 * n);
    int status;

    assert_non_null(data);
    for (size_t i = 0; i < n; i++)
        memcpy(data + 2 * i, pair, 2);
    status = unpack(desc, data, 2 * n);
    mb_free(data);
    return status;
}

static void test_empty_messages(void **state)
{
    const ProtobufCMessageDescriptor *desc = &ray__rpc__syncer__ray_sync_message_batch__descriptor;

    (void)state;
    assert_int_equal(unpack_pairs(desc, "\x0a\x00", 10000), MB_GRPC_OK);
    assert_int_equal(unpack_pairs(desc, "\x0a\x00", 16 * MIB), MB_GRPC_RESOURCE_EXHAUSTED);
}

/* Fields that the message does not have: 24 bytes and more for each of two. */
static void test_unknown_fields(void **state)
{
    const ProtobufCMessageDescriptor *desc = &ray__rpc__check_alive_reply__descriptor;

    (void)state;
    assert_int_equal(unpack_pairs(desc, "\x78\x01", 10000), MB_GRPC_OK);
    assert_int_equal(unpack_pairs(desc, "\x78\x01", 16 * MIB), MB_GRPC_RESOURCE_EXHAUSTED);
}

/* A value of the KV larger than what unpacking may add. */
static void test_large_value(void **state)
{
    Ray__Rpc__InternalKVGetReply reply = RAY__RPC__INTERNAL_KVGET_REPLY__INIT;
    size_t n;
    uint8_t *data;

    (void)state;
    reply.value.len = 200 * (size_t)MIB;
    reply.value.data = mb_calloc(1, reply.value.len);
    n = protobuf_c_message_get_packed_size(&reply.base);
    data = mb_alloc(n);
    assert_non_null(reply.value.data);
    assert_non_null(data);
    protobuf_c_message_pack(&reply.base, data);
    mb_free(reply.value.data);
    assert_int_equal(unpack(&ray__rpc__internal_kvget_reply__descriptor, data, n), MB_GRPC_OK);
    mb_free(data);
}

/* A table of more nodes than anybody has, each with the maps that a raylet sends. */
static void test_table_of_nodes(void **state)
{
    static const char *const names[] = {"CPU", "GPU", "memory", "object_store_memory",
                                        "accelerator_type:H200"};
    enum { N = sizeof(names) / sizeof(names[0]) };
    Ray__Rpc__GcsNodeInfo__ResourcesTotalEntry totals[N], *totals_at[N];
    Ray__Rpc__GcsNodeInfo__LabelsEntry label = RAY__RPC__GCS_NODE_INFO__LABELS_ENTRY__INIT;
    Ray__Rpc__GcsNodeInfo__LabelsEntry *labels_at[] = {&label};
    Ray__Rpc__GcsNodeInfo node = RAY__RPC__GCS_NODE_INFO__INIT;
    Ray__Rpc__GetAllNodeInfoReply reply = RAY__RPC__GET_ALL_NODE_INFO_REPLY__INIT;
    uint8_t id[28] = {1}, *data;
    size_t n;

    (void)state;
    for (size_t i = 0; i < N; i++) {
        ray__rpc__gcs_node_info__resources_total_entry__init(&totals[i]);
        totals[i].key = (char *)names[i];
        totals[i].value = 8;
        totals_at[i] = &totals[i];
    }
    label.key = (char *)"ray.io/node-id";
    label.value = (char *)"0123456789abcdef";
    node.node_id.data = id;
    node.node_id.len = sizeof(id);
    node.node_manager_address = (char *)"10.0.0.1";
    node.node_manager_hostname = (char *)"node";
    node.n_resources_total = N;
    node.resources_total = totals_at;
    node.n_labels = 1;
    node.labels = labels_at;
    reply.n_node_info_list = NODES;
    reply.node_info_list = mb_calloc(NODES, sizeof(*reply.node_info_list));
    assert_non_null(reply.node_info_list);
    for (size_t i = 0; i < NODES; i++)
        reply.node_info_list[i] = &node;
    n = protobuf_c_message_get_packed_size(&reply.base);
    data = mb_alloc(n);
    assert_non_null(data);
    protobuf_c_message_pack(&reply.base, data);
    mb_free(reply.node_info_list);
    assert_int_equal(unpack(&ray__rpc__get_all_node_info_reply__descriptor, data, n), MB_GRPC_OK);
    mb_free(data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_empty_messages),
        cmocka_unit_test(test_unknown_fields),
        cmocka_unit_test(test_large_value),
        cmocka_unit_test(test_table_of_nodes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
