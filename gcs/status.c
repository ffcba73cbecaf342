/*
 * What asks for the state of the whole cluster over gRPC: AutoscalerStateService (`ray status`,
 * `ray drain-node`), NodeResourceInfoGcsService, and the head's own health.
 */
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "gcs/services.h"
#include "proto/ray/health.pb-c.h"
#include "proto/ray/node_manager.pb-c.h"

static Ray__Rpc__Autoscaler__NodeStatus status_of(const struct head_node *n)
{
    if (!head_node_alive(n))
        return RAY__RPC__AUTOSCALER__NODE_STATUS__DEAD;
    if (n->view && n->view->is_draining)
        return RAY__RPC__AUTOSCALER__NODE_STATUS__DRAINING;
    if (n->view && n->view->idle_duration_ms > 0)
        return RAY__RPC__AUTOSCALER__NODE_STATUS__IDLE;
    return RAY__RPC__AUTOSCALER__NODE_STATUS__RUNNING;
}

/* Totals and free amounts: the node's own words, or its registration before it spoke. */
static const struct mb_gcs_resource *amounts(struct mb_arena *a, const struct head_node *n,
                                             int available, size_t *count)
{
    if (n->view && available) {
        *count = n->view->n_resources_available;
        return mb_wire_get_resources(a, n->view->resources_available, *count);
    }
    if (n->view) {
        *count = n->view->n_resources_total;
        return mb_wire_get_resources(a, n->view->resources_total, *count);
    }
    *count = n->info->n_resources_total;
    return mb_wire_get_resources(a, n->info->resources_total, *count);
}

static Ray__Rpc__Autoscaler__NodeState *node_state(struct mb_arena *a, const struct head_node *n)
{
    Ray__Rpc__Autoscaler__NodeState *s = mb_arena_calloc(a, 1, sizeof *s);

    if (!s)
        return NULL;
    ray__rpc__autoscaler__node_state__init(s);
    s->node_id = n->info->node_id;
    s->ray_node_type_name = n->info->node_type_name;
    s->instance_id = n->info->instance_id;
    s->node_ip_address = n->info->node_manager_address;
    s->node_state_version = 1;
    s->status = status_of(n);
    if (!head_node_alive(n))
        return s;
    s->idle_duration_ms = n->view ? n->view->idle_duration_ms : 0;
    const struct mb_gcs_resource *avail = amounts(a, n, 1, &s->n_available_resources);
    const struct mb_gcs_resource *total = amounts(a, n, 0, &s->n_total_resources);
    const struct mb_gcs_label *labels = mb_wire_get_labels(a, n->info->labels, n->info->n_labels);
    if (!avail || !total || !labels)
        return NULL;
    s->available_resources = mb_wire_resources(
        a, &ray__rpc__autoscaler__node_state__available_resources_entry__descriptor, avail,
        s->n_available_resources);
    s->total_resources =
        mb_wire_resources(a, &ray__rpc__autoscaler__node_state__total_resources_entry__descriptor,
                          total, s->n_total_resources);
    s->n_labels = n->info->n_labels;
    s->labels = mb_wire_labels(a, &ray__rpc__autoscaler__node_state__labels_entry__descriptor,
                               labels, s->n_labels);
    return s->available_resources && s->total_resources && s->labels ? s : NULL;
}

static void get_cluster_status(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    Ray__Rpc__Autoscaler__GetClusterStatusReply reply =
        RAY__RPC__AUTOSCALER__GET_CLUSTER_STATUS_REPLY__INIT;
    Ray__Rpc__Autoscaler__ClusterResourceState state =
        RAY__RPC__AUTOSCALER__CLUSTER_RESOURCE_STATE__INIT;
    struct mb_arena a = {0};
    int failed;

    (void)request;
    if (!head_admits(h, req))
        return;
    state.node_states = mb_arena_calloc(&a, h->n_nodes + 1, sizeof *state.node_states);
    failed = !state.node_states;
    for (size_t i = 0; !failed && i < h->n_nodes; i++) {
        state.node_states[i] = node_state(&a, h->nodes[i]);
        failed = !state.node_states[i];
        state.n_node_states = i + 1;
    }
    state.cluster_resource_state_version = 1;
    state.cluster_session_name = h->session_name;
    reply.cluster_resource_state = &state;
    if (failed)
        mb_grpc_reply_error(req, MB_GRPC_RESOURCE_EXHAUSTED, "out of memory");
    else
        mb_grpc_reply(req, &reply.base);
    mb_arena_close(&a);
}

/* ---- draining: the node decides, its answer is passed on ---- */

static void on_drained(void *arg, int status, const char *detail, const ProtobufCMessage *reply)
{
    struct mb_grpc_req *req = arg;
    Ray__Rpc__Autoscaler__DrainNodeReply out = RAY__RPC__AUTOSCALER__DRAIN_NODE_REPLY__INIT;
    const Ray__Rpc__DrainRayletReply *m = (const Ray__Rpc__DrainRayletReply *)reply;

    if (status != MB_GRPC_OK) {
        mb_grpc_reply_error(req, status, "the node did not answer: %s", detail ? detail : "");
        return;
    }
    out.is_accepted = m->is_accepted;
    out.rejection_reason_message = m->rejection_reason_message;
    mb_grpc_reply(req, &out.base);
}

static void drain_node(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Ray__Rpc__Autoscaler__DrainNodeRequest *m =
        (const Ray__Rpc__Autoscaler__DrainNodeRequest *)request;
    Ray__Rpc__DrainRayletRequest drain = RAY__RPC__DRAIN_RAYLET_REQUEST__INIT;
    Ray__Rpc__Autoscaler__DrainNodeReply reply = RAY__RPC__AUTOSCALER__DRAIN_NODE_REPLY__INIT;
    struct mb_err err = {0};

    if (!head_admits(h, req))
        return;
    struct head_node *n = head_node_find(h, m->node_id);
    if (!n || !head_node_alive(n)) { /* nothing to drain is drained, says Ray */
        reply.is_accepted = 1;
        mb_grpc_reply(req, &reply.base);
        return;
    }
    drain.reason = m->reason;
    drain.reason_message = m->reason_message;
    drain.deadline_timestamp_ms = m->deadline_timestamp_ms;
    struct mb_grpc_channel *ch = head_node_channel(h, n, &err);
    if (!ch || mb_grpc_unary(ch, "/ray.rpc.NodeManagerService/DrainRaylet", &drain.base,
                             &ray__rpc__drain_raylet_reply__descriptor, HEAD_NODE_RPC_MS,
                             on_drained, req, NULL, &err) != 0)
        head_reply_err(req, &err);
}

/* ---- resources of all nodes ---- */

static void get_available(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    Ray__Rpc__GetAllAvailableResourcesReply reply =
        RAY__RPC__GET_ALL_AVAILABLE_RESOURCES_REPLY__INIT;
    Ray__Rpc__GcsStatus ok = RAY__RPC__GCS_STATUS__INIT;
    struct mb_arena a = {0};

    (void)request;
    if (!head_admits(h, req))
        return;
    Ray__Rpc__AvailableResources *rows = mb_arena_calloc(&a, h->n_nodes + 1, sizeof *rows);
    reply.resources_list = mb_arena_calloc(&a, h->n_nodes + 1, sizeof *reply.resources_list);
    for (size_t i = 0; rows && reply.resources_list && i < h->n_nodes; i++) {
        Ray__Rpc__AvailableResources *row = &rows[reply.n_resources_list];
        size_t n;
        if (!head_node_alive(h->nodes[i]))
            continue;
        const struct mb_gcs_resource *r = amounts(&a, h->nodes[i], 1, &n);
        ray__rpc__available_resources__init(row);
        row->node_id = h->nodes[i]->info->node_id;
        row->resources_available =
            r ? mb_wire_resources(
                    &a, &ray__rpc__available_resources__resources_available_entry__descriptor, r, n)
              : NULL;
        row->n_resources_available = row->resources_available ? n : 0;
        reply.resources_list[reply.n_resources_list++] = row;
    }
    reply.status = &ok;
    mb_grpc_reply(req, &reply.base);
    mb_arena_close(&a);
}

static void get_total(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    Ray__Rpc__GetAllTotalResourcesReply reply = RAY__RPC__GET_ALL_TOTAL_RESOURCES_REPLY__INIT;
    Ray__Rpc__GcsStatus ok = RAY__RPC__GCS_STATUS__INIT;
    struct mb_arena a = {0};

    (void)request;
    if (!head_admits(h, req))
        return;
    Ray__Rpc__TotalResources *rows = mb_arena_calloc(&a, h->n_nodes + 1, sizeof *rows);
    reply.resources_list = mb_arena_calloc(&a, h->n_nodes + 1, sizeof *reply.resources_list);
    for (size_t i = 0; rows && reply.resources_list && i < h->n_nodes; i++) {
        Ray__Rpc__TotalResources *row = &rows[reply.n_resources_list];
        size_t n;
        if (!head_node_alive(h->nodes[i]))
            continue;
        const struct mb_gcs_resource *r = amounts(&a, h->nodes[i], 0, &n);
        ray__rpc__total_resources__init(row);
        row->node_id = h->nodes[i]->info->node_id;
        row->resources_total =
            r ? mb_wire_resources(&a, &ray__rpc__total_resources__resources_total_entry__descriptor,
                                  r, n)
              : NULL;
        row->n_resources_total = row->resources_total ? n : 0;
        reply.resources_list[reply.n_resources_list++] = row;
    }
    reply.status = &ok;
    mb_grpc_reply(req, &reply.base);
    mb_arena_close(&a);
}

static void health_check(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Grpc__Health__V1__HealthCheckRequest *m =
        (const Grpc__Health__V1__HealthCheckRequest *)request;
    Grpc__Health__V1__HealthCheckResponse reply = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;

    if (*m->service != '\0') {
        mb_grpc_reply_error(req, MB_GRPC_NOT_FOUND, "service name unknown");
        return;
    }
    reply.status = head_closed(h)
                       ? GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING
                       : GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING;
    mb_grpc_reply(req, &reply.base);
}

int head_status_methods(struct mb_head *h, struct mb_err *err)
{
    static const struct mb_grpc_method methods[] = {
        {"/ray.rpc.autoscaler.AutoscalerStateService/GetClusterStatus",
         &ray__rpc__autoscaler__get_cluster_status_request__descriptor, get_cluster_status, NULL,
         0},
        {"/ray.rpc.autoscaler.AutoscalerStateService/DrainNode",
         &ray__rpc__autoscaler__drain_node_request__descriptor, drain_node, NULL, 0},
        {"/ray.rpc.NodeResourceInfoGcsService/GetAllAvailableResources",
         &ray__rpc__get_all_available_resources_request__descriptor, get_available, NULL, 0},
        {"/ray.rpc.NodeResourceInfoGcsService/GetAllTotalResources",
         &ray__rpc__get_all_total_resources_request__descriptor, get_total, NULL, 0},
        {"/grpc.health.v1.Health/Check", &grpc__health__v1__health_check_request__descriptor,
         health_check, NULL, 1},
    };

    return mb_grpc_server_add(h->server, methods, sizeof methods / sizeof methods[0], h, err);
}
