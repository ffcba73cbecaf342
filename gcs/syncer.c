/*
 * RaySyncer: nodes send their resource view; each message is also a sign of life. What other nodes
 * have is not sent back: our agents do not schedule.
 *
 *  1. A stream opens with its node id as metadata, or is refused.
 *  2. A RESOURCE_VIEW replaces the node's view; health and placement hear of it. Rows of placement
 *     groups (agent/group_rows.h, a raylet's) are left out: they are there for Ray's tasks, which
 *     this head has none of.
 * Failure paths:
 *  3. Messages of an unknown or dead node, or that cannot be read, are passed over; the node learns
 *     of its death by CheckAlive.
 *  4. The stream ends: nothing; silence is judged by the health rule.
 */
#include <string.h>
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/services.h"

#define GROUP_ROW "_group_"

static void take_view(struct mb_head *h, const Ray__Rpc__Syncer__RaySyncMessage *msg)
{
    struct head_node *n = head_node_find(h, msg->node_id);

    if (msg->message_type != RAY__RPC__SYNCER__MESSAGE_TYPE__RESOURCE_VIEW || !n ||
        !head_node_alive(n))
        return;
    Ray__Rpc__Syncer__ResourceViewSyncMessage *view =
        ray__rpc__syncer__resource_view_sync_message__unpack(NULL, msg->sync_message.len,
                                                             msg->sync_message.data);
    if (!view) {
        mb_warn("gcs", "a resource view of %s cannot be read", n->info->node_manager_address);
        return;
    }
    view->n_resources_total =
        mb_wire_drop_resources(view->resources_total, view->n_resources_total, GROUP_ROW);
    view->n_resources_available =
        mb_wire_drop_resources(view->resources_available, view->n_resources_available, GROUP_ROW);
    if (n->view)
        ray__rpc__syncer__resource_view_sync_message__free_unpacked(n->view, NULL);
    n->view = view;
    mb_health_heard(&n->health, mb_mono_ms());
    head_placement_view(h, n);
}

static void on_message(void *arg, struct mb_grpc_stream *s, const ProtobufCMessage *m)
{
    struct mb_head *h = arg;
    const Ray__Rpc__Syncer__RaySyncMessageBatch *batch =
        (const Ray__Rpc__Syncer__RaySyncMessageBatch *)m;

    if (head_closed(h)) {
        mb_grpc_stream_finish(s, MB_GRPC_UNAVAILABLE, head_closed(h));
        return;
    }
    for (size_t i = 0; i < batch->n_messages; i++)
        take_view(h, batch->messages[i]);
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
    (void)status;
    (void)detail;
}

static void start_sync(void *arg, struct mb_grpc_stream *s)
{
    static const struct mb_grpc_stream_ops ops = {
        .on_message = on_message, .on_peer_done = on_peer_done, .on_end = on_end};
    struct mb_head *h = arg;
    const char *hex = mb_grpc_stream_metadata(s, "node_id");
    uint8_t id[MB_NODE_ID_BYTES];

    if (head_closed(h))
        mb_grpc_stream_finish(s, MB_GRPC_UNAVAILABLE, head_closed(h));
    else if (!hex || strlen(hex) != 2 * MB_NODE_ID_BYTES || mb_unhex(hex, id, sizeof id) != 0)
        mb_grpc_stream_finish(s, MB_GRPC_INVALID_ARGUMENT, "metadata node_id is missing");
    else
        mb_grpc_stream_accept(s, &ray__rpc__syncer__ray_sync_message_batch__descriptor, &ops, h);
}

int head_syncer_methods(struct mb_head *h, struct mb_err *err)
{
    static const struct mb_grpc_method methods[] = {
        {"/ray.rpc.syncer.RaySyncer/StartSync", NULL, NULL, start_sync, 0},
    };

    return mb_grpc_server_add(h->server, methods, 1, h, err);
}
