/* Nodes: registration, the table, and the watch that asks every 5 s whether we still count as
 * alive (the GCS tells nobody that it has declared them dead). */
#include <stdio.h>
#include <string.h>
#include "base/buf.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/client_internal.h"
#include "proto/mobula/head.pb-c.h"

int mb_gcs_register_node(struct mb_gcs *c, const struct mb_gcs_node *node, uint64_t timeout_ms,
                         mb_gcs_done_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err)
{
    static const struct gcs_method method = {"/ray.rpc.NodeInfoGcsService/RegisterNode",
                                             &ray__rpc__register_node_reply__descriptor,
                                             gcs_complete_done};
    struct mb_arena a = {0};
    Ray__Rpc__RegisterNodeRequest req = RAY__RPC__REGISTER_NODE_REQUEST__INIT;

    if (!node->ip || !*node->ip || node->port <= 0)
        return mb_err_set(err, MB_EINVAL, "a node needs an address and a port to register");
    req.node_info = mb_wire_node(&a, node);
    int rc = gcs_repeatable(c, &method, req.node_info ? &req.base : NULL, timeout_ms,
                            (gcs_any_cb)cb, arg, op, err);
    mb_arena_close(&a);
    return rc;
}

int mb_gcs_unregister_node(struct mb_gcs *c, const uint8_t node_id[MB_NODE_ID_BYTES],
                           enum mb_gcs_death reason, const char *text, uint64_t timeout_ms,
                           mb_gcs_done_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err)
{
    static const struct gcs_method method = {"/ray.rpc.NodeInfoGcsService/UnregisterNode",
                                             &ray__rpc__unregister_node_reply__descriptor,
                                             gcs_complete_done};
    Ray__Rpc__UnregisterNodeRequest req = RAY__RPC__UNREGISTER_NODE_REQUEST__INIT;
    Ray__Rpc__NodeDeathInfo death = RAY__RPC__NODE_DEATH_INFO__INIT;

    death.reason = (Ray__Rpc__NodeDeathInfo__Reason)reason;
    death.reason_message = mb_wire_str(text);
    req.node_id = mb_wire_bytes(node_id, MB_NODE_ID_BYTES);
    req.node_death_info = &death;
    return gcs_repeatable(c, &method, &req.base, timeout_ms, (gcs_any_cb)cb, arg, op, err);
}

static void complete_alive(struct mb_gcs_op *op, const struct mb_err *err,
                           const ProtobufCMessage *reply)
{
    const Ray__Rpc__CheckAliveReply *m = (const Ray__Rpc__CheckAliveReply *)reply;
    struct mb_err e = *err;

    if (m && m->n_raylet_alive != 1)
        mb_err_set(&e, MB_EPROTO, "CheckAlive answered for %zu nodes", m->n_raylet_alive);
    ((mb_gcs_count_cb)op->cb)(op->cb_arg, &e, e.code == 0 ? m->raylet_alive[0] : 0);
}

int mb_gcs_check_alive(struct mb_gcs *c, const uint8_t node_id[MB_NODE_ID_BYTES],
                       uint64_t timeout_ms, mb_gcs_count_cb cb, void *arg, struct mb_gcs_op **op,
                       struct mb_err *err)
{
    static const struct gcs_method method = {"/ray.rpc.NodeInfoGcsService/CheckAlive",
                                             &ray__rpc__check_alive_reply__descriptor,
                                             complete_alive};
    Ray__Rpc__CheckAliveRequest req = RAY__RPC__CHECK_ALIVE_REQUEST__INIT;
    ProtobufCBinaryData id = mb_wire_bytes(node_id, MB_NODE_ID_BYTES);

    if (c->state == GCS_CONNECTED && !mb_gcs_is_modern(c))
        return mb_err_set(err, MB_EUNSUPPORTED, "Ray %s cannot be asked about one node",
                          c->ray_version);
    req.n_node_ids = 1;
    req.node_ids = &id;
    return gcs_repeatable(c, &method, &req.base, timeout_ms, (gcs_any_cb)cb, arg, op, err);
}

int mb_gcs_move_node(struct mb_gcs *c, const struct mb_gcs_node *node, uint64_t timeout_ms,
                     mb_gcs_done_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err)
{
    static const struct gcs_method method = {
        "/mobula.v1.Head/MoveNode", &mobula__v1__move_node_reply__descriptor, gcs_complete_done};
    Mobula__V1__MoveNodeRequest req = MOBULA__V1__MOVE_NODE_REQUEST__INIT;

    req.node_id = mb_wire_bytes(node->node_id, MB_NODE_ID_BYTES);
    req.ip = mb_wire_str(node->ip);
    req.port = node->port;
    req.http_port = node->agent_http_port;
    return gcs_repeatable(c, &method, &req.base, timeout_ms, (gcs_any_cb)cb, arg, op, err);
}

void gcs_agent_key(const struct mb_gcs *c, const char *node_hex, char out[GCS_AGENT_KEY_BYTES])
{
    snprintf(out, GCS_AGENT_KEY_BYTES, "%s:%s",
             mb_gcs_is_modern(c) ? "DASHBOARD_AGENT_ADDR_NODE_ID_PREFIX"
                                 : "DASHBOARD_AGENT_PORT_PREFIX",
             node_hex);
}

int mb_gcs_announce_agent(struct mb_gcs *c, const struct mb_gcs_node *node, uint64_t timeout_ms,
                          mb_gcs_count_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err)
{
    char hex[2 * MB_NODE_ID_BYTES + 1], key[GCS_AGENT_KEY_BYTES], value[128];

    gcs_agent_key(c, mb_hex(node->node_id, MB_NODE_ID_BYTES, hex), key);
    if (mb_gcs_is_modern(c))
        snprintf(value, sizeof value, "[\"%.64s\", %d, %d]", node->ip, node->agent_http_port,
                 node->port);
    else
        snprintf(value, sizeof value, "[-1, %d]", node->port);
    return mb_gcs_kv_put(c, "dashboard", key, value, strlen(value), 1, timeout_ms, cb, arg, op,
                         err);
}

/* ---- hardware ---- */

static void complete_publish(struct mb_gcs_op *op, const struct mb_err *err,
                             const ProtobufCMessage *reply)
{
    const Ray__Rpc__GcsPublishReply *m = (const Ray__Rpc__GcsPublishReply *)reply;
    struct mb_err e = *err;

    if (m && m->status && strcmp(m->status->message, MB_GCS_NO_READERS) == 0)
        mb_err_set(&e, MB_EUNSUPPORTED, "%s", MB_GCS_NO_READERS);
    ((mb_gcs_done_cb)op->cb)(op->cb_arg, &e);
}

/* Ray before 2.60 has one service, and other numbers for the channel and the message's field. */
enum { OLD_USAGE_CHANNEL = 10, OLD_USAGE_FIELD = 15 };

int mb_gcs_publish_usage(struct mb_gcs *c, const uint8_t node_id[MB_NODE_ID_BYTES],
                         const char *json, uint64_t timeout_ms, mb_gcs_done_cb cb, void *arg,
                         struct mb_gcs_op **op, struct mb_err *err)
{
    Ray__Rpc__GcsPublishRequest req = RAY__RPC__GCS_PUBLISH_REQUEST__INIT;
    Ray__Rpc__PubMessage msg = RAY__RPC__PUB_MESSAGE__INIT, *list = &msg;
    Ray__Rpc__NodeResourceUsage usage = RAY__RPC__NODE_RESOURCE_USAGE__INIT;
    ProtobufCMessageUnknownField old = {.tag = OLD_USAGE_FIELD,
                                        .wire_type = PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED};
    char hex[2 * MB_NODE_ID_BYTES + 1], key[sizeof hex + 16];
    struct gcs_call call = {.method = "/ray.rpc.ObservabilityPubSubService/GcsPublish",
                            .request = &req.base,
                            .reply_desc = &ray__rpc__gcs_publish_reply__descriptor,
                            .timeout_ms = timeout_ms,
                            .complete = complete_publish,
                            .cb = (gcs_any_cb)cb,
                            .cb_arg = arg};
    struct mb_buf body = {0};
    int rc;

    snprintf(key, sizeof key, "RAY_REPORTER:%s", mb_hex(node_id, MB_NODE_ID_BYTES, hex));
    msg.key_id = mb_wire_bytes(key, strlen(key));
    usage.json = mb_wire_str(json);
    req.n_pub_messages = 1;
    req.pub_messages = &list;
    if (mb_gcs_is_modern(c)) {
        msg.channel_type = RAY__RPC__CHANNEL_TYPE__RAY_NODE_RESOURCE_USAGE_CHANNEL;
        msg.inner_message_case = RAY__RPC__PUB_MESSAGE__INNER_MESSAGE_NODE_RESOURCE_USAGE_MESSAGE;
        msg.node_resource_usage_message = &usage;
        return gcs_start(c, &call, op, err);
    }
    /* An unknown field is kept with its length in front. */
    size_t n = protobuf_c_message_get_packed_size(&usage.base), left = n;
    uint8_t prefix[10];
    size_t n_prefix = 0;
    do {
        prefix[n_prefix++] = (uint8_t)((left & 0x7f) | (left > 0x7f ? 0x80 : 0));
        left >>= 7;
    } while (left > 0);
    rc = mb_buf_add(&body, prefix, n_prefix);
    if (rc == 0 && (rc = mb_buf_reserve(&body, n)) == 0) {
        protobuf_c_message_pack(&usage.base, (uint8_t *)body.data + body.len);
        old.len = n_prefix + n;
        old.data = (uint8_t *)body.data;
        msg.channel_type = (Ray__Rpc__ChannelType)OLD_USAGE_CHANNEL;
        msg.base.n_unknown_fields = 1;
        msg.base.unknown_fields = &old;
        call.method = "/ray.rpc.InternalPubSubGcsService/GcsPublish";
        rc = gcs_start(c, &call, op, err);
    } else {
        rc = gcs_no_memory(err);
    }
    mb_buf_close(&body);
    return rc;
}

static void complete_nodes(struct mb_gcs_op *op, const struct mb_err *err,
                           const ProtobufCMessage *reply)
{
    mb_gcs_nodes_cb cb = (mb_gcs_nodes_cb)op->cb;
    const Ray__Rpc__GetAllNodeInfoReply *m = (const Ray__Rpc__GetAllNodeInfoReply *)reply;
    struct mb_arena a = {0};
    struct mb_err e = *err;
    struct mb_gcs_node *nodes = NULL;
    size_t n = 0;

    if (m && !(nodes = mb_arena_calloc(&a, m->n_node_info_list + 1, sizeof *nodes)))
        gcs_no_memory(&e);
    for (size_t i = 0; nodes && e.code == 0 && i < m->n_node_info_list; i++) {
        int rc = mb_wire_get_node(&a, m->node_info_list[i], &nodes[n]);
        if (rc == MB_EPROTO)
            mb_warn("gcs", "a node with an id of %zu bytes is left out of the node list",
                    m->node_info_list[i]->node_id.len);
        else if (rc != 0)
            gcs_no_memory(&e);
        else
            n++;
    }
    cb(op->cb_arg, &e, e.code == 0 ? nodes : NULL, e.code == 0 ? n : 0);
    mb_arena_close(&a);
}

int mb_gcs_nodes(struct mb_gcs *c, uint64_t timeout_ms, mb_gcs_nodes_cb cb, void *arg,
                 struct mb_gcs_op **op, struct mb_err *err)
{
    static const struct gcs_method method = {"/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
                                             &ray__rpc__get_all_node_info_reply__descriptor,
                                             complete_nodes};
    Ray__Rpc__GetAllNodeInfoRequest req = RAY__RPC__GET_ALL_NODE_INFO_REQUEST__INIT;

    return gcs_repeatable(c, &method, &req.base, timeout_ms, (gcs_any_cb)cb, arg, op, err);
}

/* ---- watch ---- */

static void watch_verdict(struct mb_gcs *c, const struct mb_err *err, int alive)
{
    struct gcs_watch *w = &c->watch;
    struct mb_err dead = {0};

    w->op = NULL;
    if (!w->on)
        return;
    if (err->code != 0) {
        if (!w->unreachable && err->code != MB_ECANCELED) {
            w->unreachable = 1;
            gcs_emit(c, MB_GCS_UNREACHABLE, err);
        }
        return;
    }
    if (w->unreachable) {
        w->unreachable = 0;
        gcs_emit(c, MB_GCS_REACHABLE, NULL);
    }
    if (!alive && w->on) {
        mb_gcs_unwatch(c);
        mb_err_set(&dead, MB_ESTATE, "the GCS at %s has declared this node dead", c->address);
        gcs_emit(c, MB_GCS_NODE_DEAD, &dead);
    } else if (w->on) {
        gcs_sync_resume(c);
    }
}

static void on_watch_alive(void *arg, const struct mb_err *err, int64_t count)
{
    watch_verdict(arg, err, count == 1);
}

static void on_watch_nodes(void *arg, const struct mb_err *err, const struct mb_gcs_node *nodes,
                           size_t n)
{
    struct mb_gcs *c = arg;
    int alive = 0;

    for (size_t i = 0; i < n; i++)
        if (memcmp(nodes[i].node_id, c->watch.node_id, MB_NODE_ID_BYTES) == 0)
            alive = !nodes[i].is_dead;
    watch_verdict(c, err, alive);
}

void gcs_watch_look(struct mb_gcs *c)
{
    struct mb_err err = {0};
    uint64_t timeout_ms = GCS_WATCH_MS - 500;
    int rc;

    if (c->watch.op || c->state != GCS_CONNECTED)
        return;
    gcs_ask_heads(c);
    if (mb_gcs_is_modern(c))
        rc = mb_gcs_check_alive(c, c->watch.node_id, timeout_ms, on_watch_alive, c, &c->watch.op,
                                &err);
    else
        rc = mb_gcs_nodes(c, timeout_ms, on_watch_nodes, c, &c->watch.op, &err);
    if (rc != 0)
        mb_warn("gcs", "cannot ask for this node's state: %s", err.text);
}

static void on_watch_timer(uv_timer_t *timer)
{
    gcs_watch_look(timer->data);
}

void gcs_watch_init(struct mb_gcs *c)
{
    uv_timer_init(c->loop, &c->watch.timer);
    c->watch.timer.data = c;
    c->timers_open++;
}

int mb_gcs_watch_node(struct mb_gcs *c, const uint8_t node_id[MB_NODE_ID_BYTES], struct mb_err *err)
{
    if (c->state != GCS_CONNECTED)
        return mb_err_set(err, MB_ESTATE, "not connected to the GCS at %s", c->address);
    mb_gcs_unwatch(c);
    memcpy(c->watch.node_id, node_id, MB_NODE_ID_BYTES);
    c->watch.on = 1;
    c->watch.unreachable = 0;
    uv_timer_start(&c->watch.timer, on_watch_timer, GCS_WATCH_MS, GCS_WATCH_MS);
    return 0;
}

void mb_gcs_unwatch(struct mb_gcs *c)
{
    c->watch.on = 0;
    if (c->watch.op)
        mb_gcs_op_cancel(c->watch.op);
    uv_timer_stop(&c->watch.timer);
}
