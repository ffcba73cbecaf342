/*
 * Answers to Ray's head.
 *
 * Happy path: PrepareBundleResources reserves, CommitBundleResources makes it firm,
 * RemovePlacementGroupBundles ends the gang and gives back; GetResourceLoad tells what is free.
 *
 *  1. Prepare beyond the ledger, or one that cannot be understood: success=false, the GCS tries
 *     again elsewhere or later. An error instead would look like a dead node.
 *  2. Commit is never failed: a group stuck in RESCHEDULING would be the result. What could not be
 *     committed is logged, and the launch is refused later.
 *  3. RequestWorkerLease is answered by leases.c.
 *  4. Health is SERVING for "" and the node's own id only: answering for a predecessor on this port
 *     would keep it ALIVE for ever.
 *  5. After a restart of the head ReleaseUnusedBundles names what is still in use; the rest is
 * freed.
 *  6. What is answered is in ledger.json before: an agent killed in between has promised nothing,
 * or remembers it.
 */
#include "agent/node_manager.h"

#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/log.h"
#include "base/str.h"
#include "proto/ray/core_worker.pb-c.h"
#include "proto/ray/gcs.pb-c.h"
#include "proto/ray/health.pb-c.h"
#include "proto/ray/node_manager.pb-c.h"

enum { BUNDLES_MAX = 4096 };

/* ---- bundles ---- */

static int read_bundle(const Ray__Rpc__Bundle *b, struct mb_bundle_spec *out, struct mb_err *err)
{
    *out = (struct mb_bundle_spec){0};
    if (b->bundle_id == NULL || b->bundle_id->placement_group_id.len != sizeof(out->pg.bytes))
        return mb_err_set(err, MB_EINVAL, "a bundle without a placement group id of 18 bytes");
    memcpy(out->pg.bytes, b->bundle_id->placement_group_id.data, sizeof(out->pg.bytes));
    out->index = b->bundle_id->bundle_index;
    for (size_t i = 0; i < b->n_unit_resources; i++) {
        const Ray__Rpc__Bundle__UnitResourcesEntry *r = b->unit_resources[i];
        uint32_t units = 0;
        int rc;

        if (out->n_want == MB_LEDGER_KINDS_MAX || strlen(r->key) >= MB_RESOURCE_NAME_MAX)
            return mb_err_set(err, MB_EINVAL, "bundle %d asks for %zu kinds of resources",
                              out->index, b->n_unit_resources);
        rc = mb_ledger_units(r->key, r->value, &units, err);
        if (rc != MB_OK)
            return rc;
        if (units == 0)
            continue;
        snprintf(out->want[out->n_want].name, MB_RESOURCE_NAME_MAX, "%s", r->key);
        out->want[out->n_want++].units = units;
    }
    return MB_OK;
}

/* All bundles of a message, owned by the caller. */
static int read_bundles(Ray__Rpc__Bundle *const *bundles, size_t n, struct mb_bundle_spec **out,
                        struct mb_err *err)
{
    struct mb_bundle_spec *specs;

    if (n > BUNDLES_MAX)
        return mb_err_set(err, MB_EFULL, "%zu bundles in one request", n);
    specs = mb_calloc(n, sizeof(*specs));
    if (specs == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory for %zu bundles", n);
    for (size_t i = 0; i < n; i++) {
        int rc = read_bundle(bundles[i], &specs[i], err);

        if (rc != MB_OK) {
            mb_free(specs);
            return rc;
        }
    }
    *out = specs;
    return MB_OK;
}

static void log_bundles(const char *what, const struct mb_bundle_spec *specs, size_t n)
{
    char pg[2 * MB_PG_ID_BYTES + 1];

    for (size_t i = 0; i < n; i++)
        mb_info("ledger", "%s placement_group=%.8s bundle=%d", what,
                mb_hex(specs[i].pg.bytes, MB_PG_ID_BYTES, pg), specs[i].index);
}

static void on_prepare(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_node_manager *m = arg;
    const Ray__Rpc__PrepareBundleResourcesRequest *q = (const void *)request;
    Ray__Rpc__PrepareBundleResourcesReply reply = RAY__RPC__PREPARE_BUNDLE_RESOURCES_REPLY__INIT;
    struct mb_bundle_spec *specs = NULL;
    struct mb_err err = {0};
    int rc = read_bundles(q->bundle_specs, q->n_bundle_specs, &specs, &err);

    if (rc == MB_OK && mb_node_is_draining(m->node))
        rc = mb_err_set(&err, MB_ESTATE, "the node is draining");
    if (rc == MB_OK)
        rc = mb_ledger_prepare(m->ledger, specs, q->n_bundle_specs, &err);
    reply.success = rc == MB_OK;
    if (rc == MB_OK) {
        log_bundles("prepared", specs, q->n_bundle_specs);
        m->ops->on_changed(m->arg);
    } else {
        mb_info("ledger", "prepare refused: %s", err.text);
    }
    mb_grpc_reply(req, &reply.base);
    mb_free(specs);
}

static void on_commit(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_node_manager *m = arg;
    const Ray__Rpc__CommitBundleResourcesRequest *q = (const void *)request;
    Ray__Rpc__CommitBundleResourcesReply reply = RAY__RPC__COMMIT_BUNDLE_RESOURCES_REPLY__INIT;
    struct mb_bundle_spec *specs = NULL;
    struct mb_err err = {0};
    int rc = read_bundles(q->bundle_specs, q->n_bundle_specs, &specs, &err);

    if (rc == MB_OK)
        rc = mb_ledger_commit(m->ledger, specs, q->n_bundle_specs, &err);
    if (rc == MB_OK)
        log_bundles("committed", specs, q->n_bundle_specs);
    else
        mb_warn("ledger", "commit of a bundle is not possible, its launch will be refused: %s",
                err.text);
    m->ops->on_changed(m->arg);
    mb_grpc_reply(req, &reply.base);
    mb_free(specs);
}

static void on_remove(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_node_manager *m = arg;
    const Ray__Rpc__RemovePlacementGroupBundlesRequest *q = (const void *)request;
    Ray__Rpc__RemovePlacementGroupBundlesReply reply =
        RAY__RPC__REMOVE_PLACEMENT_GROUP_BUNDLES_REPLY__INIT;
    struct mb_pg_id pg;
    char hex[2 * MB_PG_ID_BYTES + 1];
    int held = 0;

    if (q->placement_group_id.len != sizeof(pg.bytes)) {
        mb_warn("ledger", "remove of a placement group whose id has %zu bytes is ignored",
                q->placement_group_id.len);
        mb_grpc_reply(req, &reply.base);
        return;
    }
    memcpy(pg.bytes, q->placement_group_id.data, sizeof(pg.bytes));
    for (size_t i = 0; i < q->n_bundle_specs; i++)
        if (q->bundle_specs[i]->bundle_id != NULL)
            held |= mb_ledger_remove(m->ledger, &pg, q->bundle_specs[i]->bundle_id->bundle_index);
    mb_info("ledger", "removed placement_group=%.8s bundles=%zu%s",
            mb_hex(pg.bytes, sizeof(pg.bytes), hex), q->n_bundle_specs,
            held ? ", held until its processes are gone" : "");
    m->ops->on_bundles_removed(m->arg, &pg);
    m->ops->on_changed(m->arg);
    mb_grpc_reply(req, &reply.base);
}

void mb_node_manager_drop(struct mb_node_manager *m, const struct mb_pg_id *pg)
{
    size_t n = 0;

    for (size_t i = mb_ledger_count(m->ledger); i-- > 0;) {
        const struct mb_bundle *b = mb_ledger_at(m->ledger, i);

        if (memcmp(&b->pg, pg, sizeof(*pg)) != 0)
            continue;
        mb_ledger_remove(m->ledger, pg, b->index);
        n++;
    }
    if (n == 0)
        return;
    m->ops->on_bundles_removed(m->arg, pg);
    m->ops->on_changed(m->arg);
}

/* The same from Ray before 2.60, a call for each bundle. Its request has one Bundle as field 1, the
 * reply nothing. */
static void on_cancel_reserve(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    const Ray__Rpc__PrepareBundleResourcesRequest *q = (const void *)request;
    Ray__Rpc__RemovePlacementGroupBundlesRequest remove =
        RAY__RPC__REMOVE_PLACEMENT_GROUP_BUNDLES_REQUEST__INIT;

    remove.n_bundle_specs = q->n_bundle_specs;
    remove.bundle_specs = q->bundle_specs;
    if (q->n_bundle_specs > 0 && q->bundle_specs[0]->bundle_id != NULL)
        remove.placement_group_id = q->bundle_specs[0]->bundle_id->placement_group_id;
    on_remove(arg, req, &remove.base);
}

static void on_release_unused(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_node_manager *m = arg;
    const Ray__Rpc__ReleaseUnusedBundlesRequest *q = (const void *)request;
    Ray__Rpc__ReleaseUnusedBundlesReply reply = RAY__RPC__RELEASE_UNUSED_BUNDLES_REPLY__INIT;
    struct mb_bundle_spec *specs = NULL;
    struct mb_pg_id *before = NULL;
    size_t n_before = mb_ledger_count(m->ledger), n_released;
    struct mb_err err = {0};
    int rc = read_bundles(q->bundles_in_use, q->n_bundles_in_use, &specs, &err);

    before = mb_calloc(n_before, sizeof(*before));
    if (rc != MB_OK || before == NULL) {
        mb_warn("ledger", "the head's list of bundles in use is ignored: %s",
                rc != MB_OK ? err.text : "no memory");
        goto out;
    }
    for (size_t i = 0; i < n_before; i++)
        before[i] = mb_ledger_at(m->ledger, i)->pg;
    n_released = mb_ledger_release_unused(m->ledger, specs, q->n_bundles_in_use);
    if (n_released > 0) {
        mb_info("ledger", "released what the head has no use for bundles=%zu", n_released);
        for (size_t i = 0; i < n_before; i++)
            if (!mb_ledger_is_committed(m->ledger, &before[i]))
                m->ops->on_bundles_removed(m->arg, &before[i]);
        m->ops->on_changed(m->arg);
    }
out:
    mb_grpc_reply(req, &reply.base);
    mb_free(before);
    mb_free(specs);
}

/* ---- what is free ---- */

static void on_resource_load(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_node_manager *m = arg;
    Ray__Rpc__GetResourceLoadReply reply = RAY__RPC__GET_RESOURCE_LOAD_REPLY__INIT;
    Ray__Rpc__ResourcesData data = RAY__RPC__RESOURCES_DATA__INIT;
    Ray__Rpc__ResourcesData__ResourcesAvailableEntry available[MB_LEDGER_KINDS_MAX];
    Ray__Rpc__ResourcesData__ResourcesAvailableEntry *available_at[MB_LEDGER_KINDS_MAX];
    Ray__Rpc__ResourcesData__ResourcesTotalEntry total[MB_LEDGER_KINDS_MAX];
    Ray__Rpc__ResourcesData__ResourcesTotalEntry *total_at[MB_LEDGER_KINDS_MAX];
    size_t kinds = mb_ledger_kinds(m->ledger);

    (void)request;
    for (size_t k = 0; k < kinds; k++) {
        const struct mb_resource *r = mb_ledger_total(m->ledger, k);

        ray__rpc__resources_data__resources_available_entry__init(&available[k]);
        ray__rpc__resources_data__resources_total_entry__init(&total[k]);
        available[k].key = total[k].key = (char *)r->name;
        total[k].value = r->units;
        available[k].value = mb_ledger_offered(m->ledger, k);
        available_at[k] = &available[k];
        total_at[k] = &total[k];
    }
    data.node_id.data = (uint8_t *)mb_node_id(m->node);
    data.node_id.len = MB_NODE_ID_BYTES;
    data.node_manager_address = (char *)m->ip;
    data.n_resources_available = data.n_resources_total = kinds;
    data.resources_available = available_at;
    data.resources_total = total_at;
    data.idle_duration_ms = (int64_t)mb_node_idle_ms(m->node);
    data.is_draining = mb_node_is_draining(m->node);
    data.draining_deadline_timestamp_ms =
        mb_node_drain_deadline_ms(m->node) > 0 ? mb_node_drain_deadline_ms(m->node) : -1;
    reply.resources = &data;
    mb_grpc_reply(req, &reply.base);
}

/* ---- leaving ---- */

static void on_drain(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_node_manager *m = arg;
    const Ray__Rpc__DrainRayletRequest *q = (const void *)request;
    Ray__Rpc__DrainRayletReply reply = RAY__RPC__DRAIN_RAYLET_REPLY__INIT;
    char text[256] = "";
    int is_preemption =
        q->reason == RAY__RPC__AUTOSCALER__DRAIN_NODE_REASON__DRAIN_NODE_REASON_PREEMPTION;

    reply.is_accepted = m->ops->on_drain(m->arg, is_preemption, q->reason_message,
                                         q->deadline_timestamp_ms, text, sizeof(text));
    if (!reply.is_accepted)
        reply.rejection_reason_message = text;
    mb_info("node", "drain %s reason=%s", reply.is_accepted ? "accepted" : "refused",
            q->reason_message);
    mb_grpc_reply(req, &reply.base);
}

static void on_shutdown(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_node_manager *m = arg;
    Ray__Rpc__ShutdownRayletReply reply = RAY__RPC__SHUTDOWN_RAYLET_REPLY__INIT;

    (void)request;
    mb_grpc_reply(req, &reply.base);
    m->ops->on_shutdown(m->arg);
}

static void on_gcs_restart(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_node_manager *m = arg;
    Ray__Rpc__NotifyGCSRestartReply reply = RAY__RPC__NOTIFY_GCSRESTART_REPLY__INIT;

    (void)request;
    mb_info("node", "the head was restarted");
    mb_grpc_reply(req, &reply.base);
    mb_node_changed(m->node);
}

/* ---- calls meant for Ray workers ---- */

static void on_lease(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    const struct mb_node_manager *m = arg;

    mb_leases_answer(m->leases, req, (const void *)request);
}

static void on_worker_dead(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    Ray__Rpc__IsLocalWorkerDeadReply reply = RAY__RPC__IS_LOCAL_WORKER_DEAD_REPLY__INIT;

    (void)arg;
    (void)request;
    reply.is_dead = 1;
    mb_grpc_reply(req, &reply.base);
}

/* Replies whose fields are all zero are the same empty bytes, whatever their type. */
static void on_nothing(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    Ray__Rpc__ReturnWorkerLeaseReply reply = RAY__RPC__RETURN_WORKER_LEASE_REPLY__INIT;

    (void)arg;
    (void)request;
    mb_grpc_reply(req, &reply.base);
}

static void on_health(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_node_manager *m = arg;
    const Grpc__Health__V1__HealthCheckRequest *q = (const void *)request;
    Grpc__Health__V1__HealthCheckResponse reply = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;

    if (q->service[0] != '\0' && strcmp(q->service, mb_node_id_hex(m->node)) != 0) {
        mb_grpc_reply_error(req, MB_GRPC_NOT_FOUND, "service name unknown");
        return;
    }
    reply.status = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING;
    mb_grpc_reply(req, &reply.base);
}

#define NM(method) "/ray.rpc.NodeManagerService/" method

static const struct mb_grpc_method methods[] = {
    {NM("PrepareBundleResources"), &ray__rpc__prepare_bundle_resources_request__descriptor,
     on_prepare, NULL, 0},
    {NM("CommitBundleResources"), &ray__rpc__commit_bundle_resources_request__descriptor, on_commit,
     NULL, 0},
    {NM("RemovePlacementGroupBundles"),
     &ray__rpc__remove_placement_group_bundles_request__descriptor, on_remove, NULL, 0},
    {NM("CancelResourceReserve"), &ray__rpc__prepare_bundle_resources_request__descriptor,
     on_cancel_reserve, NULL, 0},
    {NM("ReleaseUnusedBundles"), &ray__rpc__release_unused_bundles_request__descriptor,
     on_release_unused, NULL, 0},
    {NM("GetResourceLoad"), &ray__rpc__get_resource_load_request__descriptor, on_resource_load,
     NULL, 0},
    {NM("NotifyGCSRestart"), &ray__rpc__notify_gcsrestart_request__descriptor, on_gcs_restart, NULL,
     0},
    {NM("DrainRaylet"), &ray__rpc__drain_raylet_request__descriptor, on_drain, NULL, 0},
    {NM("ShutdownRaylet"), &ray__rpc__shutdown_raylet_request__descriptor, on_shutdown, NULL, 0},
    {NM("RequestWorkerLease"), &ray__rpc__request_worker_lease_request__descriptor, on_lease, NULL,
     0},
    {NM("IsLocalWorkerDead"), &ray__rpc__is_local_worker_dead_request__descriptor, on_worker_dead,
     NULL, 0},
    {NM("CancelWorkerLease"), &ray__rpc__cancel_worker_lease_request__descriptor, on_nothing, NULL,
     0},
    {NM("ReturnWorkerLease"), &ray__rpc__return_worker_lease_request__descriptor, on_nothing, NULL,
     0},
    {NM("PrestartWorkers"), &ray__rpc__prestart_workers_request__descriptor, on_nothing, NULL, 0},
    {NM("ReportWorkerBacklog"), &ray__rpc__report_worker_backlog_request__descriptor, on_nothing,
     NULL, 0},
    {NM("ReleaseUnusedActorWorkers"), &ray__rpc__release_unused_actor_workers_request__descriptor,
     on_nothing, NULL, 0},
    {NM("ReleaseUnusedWorkers"), /* Ray 2.9 */
     &ray__rpc__release_unused_actor_workers_request__descriptor, on_nothing, NULL, 0},
    {NM("ReturnWorker"), /* Ray before 2.60 */
     &ray__rpc__return_worker_lease_request__descriptor, on_nothing, NULL, 0},
    {NM("GetNodeStats"), &ray__rpc__get_node_stats_request__descriptor, on_nothing, NULL, 0},
    {NM("GlobalGC"), &ray__rpc__global_gcrequest__descriptor, on_nothing, NULL, 0},
    {NM("GetSystemConfig"), &ray__rpc__get_system_config_request__descriptor, on_nothing, NULL, 0},
    {NM("GetObjectsInfo"), &ray__rpc__get_objects_info_request__descriptor, on_nothing, NULL, 0},
    {NM("CancelLeasesWithResourceShapes"),
     &ray__rpc__cancel_leases_with_resource_shapes_request__descriptor, on_nothing, NULL, 0},
    {"/ray.rpc.CoreWorkerService/NumPendingTasks", &ray__rpc__num_pending_tasks_request__descriptor,
     on_nothing, NULL, 0},
    {"/grpc.health.v1.Health/Check", &grpc__health__v1__health_check_request__descriptor, on_health,
     NULL, 1},
};

int mb_node_manager_add(struct mb_grpc_server *srv, struct mb_node_manager *m, struct mb_err *err)
{
    return mb_grpc_server_add(srv, methods, sizeof(methods) / sizeof(methods[0]), m, err);
}
