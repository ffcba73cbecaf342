/*
 * Any bytes as Ray's messages of nodes, placement groups and jobs: refused, or read into structs
 * whose every id, name and list may be used. The first byte chooses the message.
 * What was read is sent again: with ids of exactly their length, at which a real GCS aborts
 * otherwise, and so that it can be read. What is looked for before a message is sent is not there,
 * but for text and numbers, which come from outside, and a group that came without bundles.
 * Or as the answer with a value of the KV, which is read piece by piece: the pieces make no
 * difference, and what protobuf-c reads in it is what comes out. Or as a request itself.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "gcs/kv_value.h"
#include "gcs/wire.h"
#include "gcs/wire_check.h"
#include "proto/ray/ray_syncer.pb-c.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static volatile size_t seen; /* what was read is used, so that it is really read */

static void use_text(const char *s)
{
    seen += s ? strlen(s) : 0;
}

static void want(int ok)
{
    if (!ok)
        abort();
}

/* The bytes that would be sent, read as Ray reads them; freed by the caller. */
static ProtobufCMessage *over_the_wire(const ProtobufCMessage *m)
{
    size_t n = 0;
    struct mb_err err = {0};
    want(mb_wire_check(m, &err) == 0 || strstr(err.text, " is no UTF-8") != NULL ||
         strstr(err.text, " is no number") != NULL ||
         strcmp(err.text, "ray.rpc.PlacementGroupSpec without bundles") == 0);
    void *bytes = mb_wire_pack(m, &n);
    ProtobufCMessage *read = protobuf_c_message_unpack(m->descriptor, NULL, n, bytes);

    want(bytes != NULL && read != NULL);
    mb_free(bytes);
    return read;
}

static void send_node(struct mb_arena *a, const struct mb_gcs_node *node)
{
    Ray__Rpc__GcsNodeInfo *m = mb_wire_node(a, node), *read;

    want(m != NULL);
    read = (Ray__Rpc__GcsNodeInfo *)over_the_wire(&m->base);
    want(read->node_id.len == MB_NODE_ID_BYTES &&
         memcmp(read->node_id.data, node->node_id, MB_NODE_ID_BYTES) == 0);
    want(read->n_labels == node->n_labels && read->n_resources_total == node->n_resources);
    protobuf_c_message_free_unpacked(&read->base, NULL);
}

static void send_group(struct mb_arena *a, const struct mb_gcs_pg *group)
{
    Ray__Rpc__PlacementGroupSpec *m = mb_wire_pg_spec(a, group), *read;

    want(m != NULL && (group->n_bundles > 0 || mb_wire_check(&m->base, NULL) != 0));
    read = (Ray__Rpc__PlacementGroupSpec *)over_the_wire(&m->base);
    want(read->placement_group_id.len == MB_PG_ID_BYTES &&
         read->creator_job_id.len == MB_JOB_ID_BYTES &&
         read->creator_actor_id.len == MB_ACTOR_ID_BYTES);
    want(read->n_bundles == group->n_bundles);
    for (size_t i = 0; i < read->n_bundles; i++)
        want(read->bundles[i]->bundle_id->placement_group_id.len == MB_PG_ID_BYTES &&
             read->bundles[i]->bundle_id->bundle_index == (int32_t)i);
    protobuf_c_message_free_unpacked(&read->base, NULL);
}

static void send_job(struct mb_arena *a, const struct mb_gcs_job *job)
{
    static const uint8_t worker_id[MB_NODE_ID_BYTES] = {1};
    Ray__Rpc__JobTableData *m = mb_wire_job(a, job, worker_id), *read;

    want(m != NULL);
    read = (Ray__Rpc__JobTableData *)over_the_wire(&m->base);
    want(read->job_id.len == MB_JOB_ID_BYTES && read->driver_address != NULL &&
         read->driver_address->node_id.len == MB_NODE_ID_BYTES &&
         read->driver_address->worker_id.len == MB_NODE_ID_BYTES);
    protobuf_c_message_free_unpacked(&read->base, NULL);
}

/* Any bytes as what is sent: that it may be is said of no message with a fault. */
static void check_requests(const uint8_t *p, size_t n)
{
    Ray__Rpc__CreatePlacementGroupRequest *group =
        ray__rpc__create_placement_group_request__unpack(NULL, n, p);
    Ray__Rpc__Syncer__RaySyncMessageBatch *batch =
        ray__rpc__syncer__ray_sync_message_batch__unpack(NULL, n, p);
    struct mb_err err = {0};

    if (group != NULL && mb_wire_check(&group->base, &err) == 0) {
        const Ray__Rpc__PlacementGroupSpec *spec = group->placement_group_spec;

        want(spec->placement_group_id.len == MB_PG_ID_BYTES &&
             spec->creator_job_id.len == MB_JOB_ID_BYTES && spec->n_bundles > 0);
        for (size_t i = 0; i < spec->n_bundles; i++)
            want(spec->bundles[i]->bundle_id->placement_group_id.len == MB_PG_ID_BYTES);
    }
    if (batch != NULL && mb_wire_check(&batch->base, &err) == 0) {
        want(batch->n_messages > 0);
        for (size_t i = 0; i < batch->n_messages; i++)
            want(batch->messages[i]->node_id.len == MB_NODE_ID_BYTES);
    }
    if (group != NULL)
        protobuf_c_message_free_unpacked(&group->base, NULL);
    if (batch != NULL)
        protobuf_c_message_free_unpacked(&batch->base, NULL);
}

static void read_node(const uint8_t *p, size_t n)
{
    Ray__Rpc__GcsNodeInfo *m = ray__rpc__gcs_node_info__unpack(NULL, n, p);
    struct mb_arena a = {0};
    struct mb_gcs_node node;

    if (m != NULL && mb_wire_get_node(&a, m, &node) == 0) {
        use_text(node.ip);
        for (size_t i = 0; i < node.n_labels; i++) {
            use_text(node.labels[i].key);
            use_text(node.labels[i].value);
        }
        for (size_t i = 0; i < node.n_resources; i++)
            use_text(node.resources[i].name);
        send_node(&a, &node);
    }
    mb_arena_close(&a);
    if (m != NULL)
        ray__rpc__gcs_node_info__free_unpacked(m, NULL);
}

static void read_group(const uint8_t *p, size_t n)
{
    Ray__Rpc__PlacementGroupTableData *m = ray__rpc__placement_group_table_data__unpack(NULL, n, p);
    struct mb_arena a = {0};
    struct mb_gcs_pg group;

    if (m != NULL && mb_wire_get_pg(&a, m, &group) == 0) {
        for (size_t i = 0; i < group.n_bundles; i++)
            for (size_t k = 0; k < group.bundles[i].n_resources; k++)
                use_text(group.bundles[i].resources[k].name);
        send_group(&a, &group);
    }
    mb_arena_close(&a);
    if (m != NULL)
        ray__rpc__placement_group_table_data__free_unpacked(m, NULL);
}

static void read_job(const uint8_t *p, size_t n)
{
    Ray__Rpc__JobTableData *m = ray__rpc__job_table_data__unpack(NULL, n, p);
    struct mb_gcs_job job;

    if (m != NULL && mb_wire_get_job(m, &job) == 0) {
        struct mb_arena a = {0};

        use_text(job.entrypoint);
        send_job(&a, &job);
        mb_arena_close(&a);
    }
    if (m != NULL)
        ray__rpc__job_table_data__free_unpacked(m, NULL);
}

struct sunk {
    uint8_t *bytes;
    size_t len;
};

static int sink(void *arg, const void *p, size_t n, struct mb_err *err)
{
    struct sunk *s = arg;

    (void)err;
    memcpy(s->bytes + s->len, p, n);
    s->len += n;
    return 0;
}

static int read_pieces(const uint8_t *p, size_t n, size_t piece, struct sunk *s)
{
    struct mb_kv_value v;
    struct mb_err err = {0};
    int rc = 0;

    mb_kv_value_init(&v);
    for (size_t at = 0; at < n && rc == 0; at += piece)
        rc = mb_kv_value_feed(&v, p + at, n - at < piece ? n - at : piece, sink, s, &err);
    return rc == 0 ? mb_kv_value_end(&v, &err) : rc;
}

static void read_value(const uint8_t *p, size_t n)
{
    Ray__Rpc__InternalKVGetReply *m = ray__rpc__internal_kvget_reply__unpack(NULL, n, p);
    struct sunk one = {malloc(n + 1), 0}, many = {malloc(n + 1), 0};
    const int rc = read_pieces(p, n, n + 1, &one);

    want(one.bytes != NULL && many.bytes != NULL);
    want(read_pieces(p, n, 1, &many) == rc && many.len == one.len &&
         memcmp(many.bytes, one.bytes, one.len) == 0);
    if (m != NULL && rc == 0)
        want(m->value.len == one.len &&
             (one.len == 0 || memcmp(m->value.data, one.bytes, one.len) == 0));
    free(one.bytes);
    free(many.bytes);
    if (m != NULL)
        ray__rpc__internal_kvget_reply__free_unpacked(m, NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    switch (data[0] % 5) {
    case 0:
        read_node(data + 1, size - 1);
        break;
    case 1:
        read_group(data + 1, size - 1);
        break;
    case 2:
        read_job(data + 1, size - 1);
        break;
    case 3:
        read_value(data + 1, size - 1);
        break;
    default:
        check_requests(data + 1, size - 1);
    }
    return 0;
}
