/*
 * Placement groups. A real GCS aborts on an unknown job id, on a group without bundles and on ids
 * of another length; so those are refused here, and create asks for the job first.
 */
#include <string.h>
#include "base/clock.h"
#include "gcs/client_internal.h"
#include "proto/mobula/queue.pb-c.h"

/* max_cpu_fraction_per_node, a double: gone in 2.60. Before, a group that does not say 1.0 leaves a
 * CPU of each node free, and stays PENDING where nodes have none, as ours. */
enum { MAX_CPU_FRACTION_FIELD = 10 };

static const char *const create_method =
    "/ray.rpc.PlacementGroupInfoGcsService/CreatePlacementGroup";

void mb_gcs_pg_new_id(const uint8_t job_id[MB_JOB_ID_BYTES], uint8_t out[MB_PG_ID_BYTES])
{
    mb_random_bytes(out, MB_PG_ID_BYTES - MB_JOB_ID_BYTES);
    memcpy(out + MB_PG_ID_BYTES - MB_JOB_ID_BYTES, job_id, MB_JOB_ID_BYTES);
}

static int check_group(const struct mb_gcs_pg *pg, struct mb_err *err)
{
    if (pg->n_bundles == 0)
        return mb_err_set(err, MB_EINVAL, "a placement group needs at least one bundle");
    for (size_t i = 0; i < pg->n_bundles; i++)
        if (pg->bundles[i].n_resources == 0)
            return mb_err_set(err, MB_EINVAL, "bundle %zu of the placement group asks for nothing",
                              i);
    if (memcmp(pg->id + MB_PG_ID_BYTES - MB_JOB_ID_BYTES, pg->job_id, MB_JOB_ID_BYTES) != 0)
        return mb_err_set(err, MB_EINVAL, "the placement group's id does not end with its job id");
    return 0;
}

/* The job table answered: send the group, or say that its job is unknown. */
static void complete_job_check(struct mb_gcs_op *op, const struct mb_err *err,
                               const ProtobufCMessage *reply)
{
    const Ray__Rpc__GetAllJobInfoReply *m = (const Ray__Rpc__GetAllJobInfoReply *)reply;
    struct mb_err e = *err;
    int known = 0;

    for (size_t i = 0; m && i < m->n_job_info_list; i++) {
        ProtobufCBinaryData id = m->job_info_list[i]->job_id;
        known |= id.len == MB_JOB_ID_BYTES && memcmp(id.data, op->job_id, MB_JOB_ID_BYTES) == 0;
    }
    if (e.code == 0 && !known)
        mb_err_set(&e, MB_ENOENT, "the GCS does not know the placement group's job");
    if (e.code != 0) {
        gcs_complete_done(op, &e, NULL);
        return;
    }
    ProtobufCMessage *create = op->second;
    op->second = NULL;
    gcs_continue(op, create_method, create, &ray__rpc__create_placement_group_reply__descriptor,
                 gcs_complete_done);
}

int mb_gcs_pg_create(struct mb_gcs *c, const struct mb_gcs_pg *pg, uint64_t timeout_ms,
                     mb_gcs_done_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err)
{
    Ray__Rpc__CreatePlacementGroupRequest req = RAY__RPC__CREATE_PLACEMENT_GROUP_REQUEST__INIT;
    struct mb_arena a = {0};
    uint8_t one[sizeof(double)];
    ProtobufCMessageUnknownField all_cpus = {MAX_CPU_FRACTION_FIELD, PROTOBUF_C_WIRE_TYPE_64BIT,
                                             sizeof one, one};
    ProtobufCMessage *second = NULL;
    struct mb_gcs_op *started = NULL;
    int rc = check_group(pg, err);

    if (rc != 0)
        return rc;
    req.placement_group_spec = mb_wire_pg_spec(&a, pg);
    if (req.placement_group_spec && !mb_gcs_is_modern(c)) {
        memcpy(one, &(double){1.0}, sizeof one);
        req.placement_group_spec->base.n_unknown_fields = 1;
        req.placement_group_spec->base.unknown_fields = &all_cpus;
    }
    if (req.placement_group_spec)
        second = mb_wire_copy(&req.base);
    mb_arena_close(&a);
    if (!second)
        return gcs_no_memory(err);
    rc = gcs_list_jobs(c, complete_job_check, timeout_ms, (gcs_any_cb)cb, arg, &started, err);
    if (rc != 0) {
        protobuf_c_message_free_unpacked(second, NULL);
        return rc;
    }
    started->second = second;
    memcpy(started->job_id, pg->job_id, MB_JOB_ID_BYTES);
    if (op)
        *op = started;
    return 0;
}

int mb_gcs_pg_wait(struct mb_gcs *c, const uint8_t id[MB_PG_ID_BYTES], uint64_t timeout_ms,
                   mb_gcs_done_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err)
{
    static const struct gcs_method method = {
        "/ray.rpc.PlacementGroupInfoGcsService/WaitPlacementGroupUntilReady",
        &ray__rpc__wait_placement_group_until_ready_reply__descriptor, gcs_complete_done};
    Ray__Rpc__WaitPlacementGroupUntilReadyRequest req =
        RAY__RPC__WAIT_PLACEMENT_GROUP_UNTIL_READY_REQUEST__INIT;

    req.placement_group_id = mb_wire_bytes(id, MB_PG_ID_BYTES);
    return gcs_repeatable(c, &method, &req.base, timeout_ms, (gcs_any_cb)cb, arg, op, err);
}

static void give_groups(struct mb_gcs_op *op, const struct mb_err *err,
                        Ray__Rpc__PlacementGroupTableData *const *rows, size_t n)
{
    mb_gcs_pgs_cb cb = (mb_gcs_pgs_cb)op->cb;
    struct mb_arena a = {0};
    struct mb_err e = *err;
    struct mb_gcs_pg *groups = mb_arena_calloc(&a, n + 1, sizeof *groups);

    if (!groups)
        gcs_no_memory(&e);
    for (size_t i = 0; e.code == 0 && i < n; i++) {
        int rc = mb_wire_get_pg(&a, rows[i], &groups[i]);
        if (rc != 0)
            mb_err_set(&e, rc, "placement group %zu of the reply cannot be read", i);
    }
    cb(op->cb_arg, &e, e.code == 0 ? groups : NULL, e.code == 0 ? n : 0);
    mb_arena_close(&a);
}

static void complete_get(struct mb_gcs_op *op, const struct mb_err *err,
                         const ProtobufCMessage *reply)
{
    const Ray__Rpc__GetPlacementGroupReply *m = (const Ray__Rpc__GetPlacementGroupReply *)reply;
    struct mb_err e = *err;

    /* A real GCS answers OK without a row for an id it does not know. */
    if (e.code == 0 && (!m->placement_group_table_data ||
                        m->placement_group_table_data->placement_group_id.len == 0))
        mb_err_set(&e, MB_ENOENT, "the GCS does not know this placement group");
    if (e.code != 0)
        give_groups(op, &e, NULL, 0);
    else
        give_groups(op, &e, &m->placement_group_table_data, 1);
}

int mb_gcs_pg_get(struct mb_gcs *c, const uint8_t id[MB_PG_ID_BYTES], uint64_t timeout_ms,
                  mb_gcs_pgs_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err)
{
    static const struct gcs_method method = {
        "/ray.rpc.PlacementGroupInfoGcsService/GetPlacementGroup",
        &ray__rpc__get_placement_group_reply__descriptor, complete_get};
    Ray__Rpc__GetPlacementGroupRequest req = RAY__RPC__GET_PLACEMENT_GROUP_REQUEST__INIT;

    req.placement_group_id = mb_wire_bytes(id, MB_PG_ID_BYTES);
    return gcs_repeatable(c, &method, &req.base, timeout_ms, (gcs_any_cb)cb, arg, op, err);
}

static void complete_list(struct mb_gcs_op *op, const struct mb_err *err,
                          const ProtobufCMessage *reply)
{
    const Ray__Rpc__GetAllPlacementGroupReply *m =
        (const Ray__Rpc__GetAllPlacementGroupReply *)reply;

    give_groups(op, err, m ? m->placement_group_table_data : NULL,
                m ? m->n_placement_group_table_data : 0);
}

int mb_gcs_pg_list(struct mb_gcs *c, uint64_t timeout_ms, mb_gcs_pgs_cb cb, void *arg,
                   struct mb_gcs_op **op, struct mb_err *err)
{
    static const struct gcs_method method = {
        "/ray.rpc.PlacementGroupInfoGcsService/GetAllPlacementGroup",
        &ray__rpc__get_all_placement_group_reply__descriptor, complete_list};
    Ray__Rpc__GetAllPlacementGroupRequest req = RAY__RPC__GET_ALL_PLACEMENT_GROUP_REQUEST__INIT;

    return gcs_repeatable(c, &method, &req.base, timeout_ms, (gcs_any_cb)cb, arg, op, err);
}

static void complete_reason(struct mb_gcs_op *op, const struct mb_err *err,
                            const ProtobufCMessage *reply)
{
    const Mobula__V1__WhyWaitingReply *m = (const Mobula__V1__WhyWaitingReply *)reply;
    const struct mb_gcs_waiting w = {.waits = m ? m->is_waiting : 0,
                                     .ahead = m ? m->ahead : 0,
                                     .n_nodes = m ? m->nodes : 0,
                                     .reason = m ? m->reason : ""};

    ((mb_gcs_reason_cb)op->cb)(op->cb_arg, err, &w);
}

int mb_gcs_pg_reason(struct mb_gcs *c, const uint8_t id[MB_PG_ID_BYTES], uint64_t timeout_ms,
                     mb_gcs_reason_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err)
{
    static const struct gcs_method method = {"/mobula.v1.GangQueue/WhyWaiting",
                                             &mobula__v1__why_waiting_reply__descriptor,
                                             complete_reason};
    Mobula__V1__WhyWaitingRequest req = MOBULA__V1__WHY_WAITING_REQUEST__INIT;

    req.placement_group_id = mb_wire_bytes(id, MB_PG_ID_BYTES);
    return gcs_repeatable(c, &method, &req.base, timeout_ms, (gcs_any_cb)cb, arg, op, err);
}

int mb_gcs_pg_remove(struct mb_gcs *c, const uint8_t id[MB_PG_ID_BYTES], uint64_t timeout_ms,
                     mb_gcs_done_cb cb, void *arg, struct mb_gcs_op **op, struct mb_err *err)
{
    static const struct gcs_method method = {
        "/ray.rpc.PlacementGroupInfoGcsService/RemovePlacementGroup",
        &ray__rpc__remove_placement_group_reply__descriptor, gcs_complete_done};
    Ray__Rpc__RemovePlacementGroupRequest req = RAY__RPC__REMOVE_PLACEMENT_GROUP_REQUEST__INIT;

    req.placement_group_id = mb_wire_bytes(id, MB_PG_ID_BYTES);
    return gcs_repeatable(c, &method, &req.base, timeout_ms, (gcs_any_cb)cb, arg, op, err);
}
