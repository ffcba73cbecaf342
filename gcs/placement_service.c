/*
 * PlacementGroupInfoGcsService: the shell around placement.h.
 *
 *  1. A call or an outcome becomes an event; pump turns the actions into writes and node calls.
 *  2. A changed group is stored; who waits for it is answered after the commit.
 *  3. Create and Remove are answered when everything they caused to be written is committed.
 * Failure paths:
 *  4. A node call fails: REFUSED when the node said no, FAILED (unknown) otherwise.
 *  5. What aborts a real GCS (unknown job, no bundles, wrong ids) is an error reply here.
 *  6. A restarted head tells every node which bundles are in use (ReleaseUnusedBundles) and that it
 *     was restarted, until the node has answered; before, the node gets nothing new.
 */
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/services.h"
#include "proto/ray/node_manager.pb-c.h"

/* ---- rows ---- */

static Ray__Rpc__PlacementGroupTableData *row_of(struct mb_arena *a, const struct mb_gcs_pg *pg,
                                                 const struct mb_place_info *info)
{
    Ray__Rpc__PlacementGroupTableData *row = mb_arena_calloc(a, 1, sizeof *row);
    Ray__Rpc__PlacementGroupStats *stats = mb_arena_calloc(a, 1, sizeof *stats);
    Ray__Rpc__PlacementGroupSpec *spec = mb_wire_pg_spec(a, pg);

    if (!row || !stats || !spec)
        return NULL;
    ray__rpc__placement_group_table_data__init(row);
    ray__rpc__placement_group_stats__init(stats);
    row->placement_group_id = spec->placement_group_id;
    row->name = spec->name;
    row->strategy = spec->strategy;
    row->state = (Ray__Rpc__PlacementGroupTableData__PlacementGroupState)pg->state;
    row->creator_job_id = spec->creator_job_id;
    row->creator_actor_id = spec->creator_actor_id;
    row->creator_job_dead = spec->creator_job_dead;
    row->creator_actor_dead = spec->creator_actor_dead;
    row->is_detached = spec->is_detached;
    row->n_bundles = pg->n_bundles;
    row->bundles = mb_wire_bundles(a, pg->id, pg->bundles, NULL, pg->n_bundles, 1);
    stats->scheduling_attempt = info->attempts;
    stats->scheduling_state = (Ray__Rpc__PlacementGroupStats__SchedulingState)info->wait;
    row->stats = stats;
    row->placement_group_creation_timestamp_ms = (int64_t)pg->created_unix_ms;
    return row->bundles ? row : NULL;
}

static int store_group(struct mb_head *h, const uint8_t *id, struct mb_err *err)
{
    struct mb_place_info info;
    const struct mb_gcs_pg *pg = mb_placement_get(h->placement, id, &info);
    struct mb_arena a = {0};
    Ray__Rpc__PlacementGroupTableData *row = pg ? row_of(&a, pg, &info) : NULL;
    int rc =
        row ? head_put_message(h, MB_TABLES_GROUPS, head_blob(id, MB_PG_ID_BYTES), &row->base, err)
            : mb_err_set(err, MB_ENOMEM, "out of memory");

    mb_arena_close(&a);
    return rc;
}

/* ---- waiting for CREATED ---- */

static void answer_wait(struct head_wait *w, int found)
{
    Ray__Rpc__WaitPlacementGroupUntilReadyReply reply =
        RAY__RPC__WAIT_PLACEMENT_GROUP_UNTIL_READY_REPLY__INIT;
    Ray__Rpc__GcsStatus status = RAY__RPC__GCS_STATUS__INIT;

    if (!found) {
        status.code = HEAD_STATUS_NOT_FOUND;
        status.message = mb_wire_str("Placement group is removed or unknown.");
    }
    reply.status = &status;
    mb_grpc_reply(w->req, &reply.base);
    mb_free(w);
}

/* Answers whoever waits for a group that is CREATED or gone by now, or who went away. What changed
 * after the last batch that is committed is nobody's business yet. */
static void answer_waits(struct mb_head *h)
{
    for (struct head_wait **at = &h->waits; *at;) {
        struct head_wait *w = *at;
        const struct mb_gcs_pg *pg = mb_placement_get(h->placement, w->pg_id, NULL);
        int removed = !pg || pg->state == MB_PG_REMOVED;

        if (!w->gone && (w->need > h->groups_written || (!removed && pg->state != MB_PG_CREATED))) {
            at = &w->next;
            continue;
        }
        *at = w->next;
        answer_wait(w, !removed);
    }
}

static void on_group_stored(void *arg, const struct mb_err *err)
{
    struct mb_head *h = arg;

    if (err->code != 0)
        mb_error("gcs", "a placement group's state is not stored: %s", err->text);
    h->groups_written++; /* barriers are passed in order */
    answer_waits(h);
}

static void tell_after_commit(struct mb_head *h)
{
    struct mb_err err = {0};

    h->groups_asked++;
    if (mb_tables_barrier(h->store, on_group_stored, h, &err) != 0)
        on_group_stored(h, &err);
}

/* Its state has changed: who waits for it waits for the commit of that too. */
static void wait_for_commit(struct mb_head *h, const uint8_t *pg_id)
{
    for (struct head_wait *w = h->waits; w; w = w->next)
        if (memcmp(w->pg_id, pg_id, MB_PG_ID_BYTES) == 0)
            w->need = h->groups_asked + 1;
}

/* ---- node calls ---- */

struct call {
    struct mb_head *h;
    enum mb_place_kind kind;
    uint8_t pg_id[MB_PG_ID_BYTES];
    uint64_t ticket;
};

static void on_node_answer(void *arg, int status, const char *detail, const ProtobufCMessage *reply)
{
    struct call *c = arg;
    struct mb_head *h = c->h;
    enum mb_place_outcome outcome = status == MB_GRPC_OK ? MB_PLACE_OK : MB_PLACE_FAILED;

    if (c->kind == MB_PLACE_PREPARE && status == MB_GRPC_OK &&
        !((const Ray__Rpc__PrepareBundleResourcesReply *)reply)->success)
        outcome = MB_PLACE_REFUSED;
    /* Who does not know the call holds no bundle. */
    if (status == MB_GRPC_UNIMPLEMENTED && c->kind == MB_PLACE_PREPARE)
        outcome = MB_PLACE_REFUSED;
    if (status == MB_GRPC_UNIMPLEMENTED && c->kind == MB_PLACE_RETURN)
        outcome = MB_PLACE_OK;
    if (!h->stopping) {
        if (outcome == MB_PLACE_FAILED)
            mb_warn("gcs", "placement call %d failed: %s: %s", (int)c->kind,
                    mb_grpc_status_name(status), detail ? detail : "");
        mb_placement_result(h->placement, c->pg_id, c->ticket, outcome, mb_mono_ms());
        head_placement_pump(h);
    }
    mb_free(c);
}

static int send_action(struct mb_head *h, const struct mb_place_action *act, struct mb_err *err)
{
    static const char *const names[] = {
        [MB_PLACE_PREPARE] = "/ray.rpc.NodeManagerService/PrepareBundleResources",
        [MB_PLACE_COMMIT] = "/ray.rpc.NodeManagerService/CommitBundleResources",
        [MB_PLACE_RETURN] = "/ray.rpc.NodeManagerService/RemovePlacementGroupBundles",
    };
    Ray__Rpc__PrepareBundleResourcesRequest prepare =
        RAY__RPC__PREPARE_BUNDLE_RESOURCES_REQUEST__INIT;
    Ray__Rpc__CommitBundleResourcesRequest commit = RAY__RPC__COMMIT_BUNDLE_RESOURCES_REQUEST__INIT;
    Ray__Rpc__RemovePlacementGroupBundlesRequest back =
        RAY__RPC__REMOVE_PLACEMENT_GROUP_BUNDLES_REQUEST__INIT;
    const ProtobufCMessage *request = &prepare.base;
    const ProtobufCMessageDescriptor *desc = &ray__rpc__prepare_bundle_resources_reply__descriptor;
    struct head_node *n = head_node_find_id(h, act->node_id);
    struct mb_grpc_channel *ch = n && head_node_alive(n) ? head_node_channel(h, n, err) : NULL;
    const struct mb_gcs_pg *pg = mb_placement_get(h->placement, act->pg_id, NULL);
    struct mb_arena a = {0};
    struct call *c = mb_alloc(sizeof *c);
    Ray__Rpc__Bundle **bundles =
        mb_wire_bundles(&a, act->pg_id, pg->bundles, act->bundles, act->n_bundles, 0);
    int rc = MB_ENOMEM;

    prepare.bundle_specs = commit.bundle_specs = back.bundle_specs = bundles;
    prepare.n_bundle_specs = commit.n_bundle_specs = back.n_bundle_specs = act->n_bundles;
    back.placement_group_id = mb_wire_bytes(act->pg_id, MB_PG_ID_BYTES);
    if (act->kind == MB_PLACE_COMMIT) {
        request = &commit.base;
        desc = &ray__rpc__commit_bundle_resources_reply__descriptor;
    } else if (act->kind == MB_PLACE_RETURN) {
        request = &back.base;
        desc = &ray__rpc__remove_placement_group_bundles_reply__descriptor;
    }
    if (ch && c && bundles) {
        *c = (struct call){.h = h, .kind = act->kind, .ticket = act->ticket};
        memcpy(c->pg_id, act->pg_id, MB_PG_ID_BYTES);
        rc = mb_grpc_unary(ch, names[act->kind], request, desc, HEAD_NODE_RPC_MS, on_node_answer, c,
                           NULL, err);
    }
    if (rc != 0)
        mb_free(c);
    mb_arena_close(&a);
    return rc;
}

static void log_state(struct mb_head *h, const uint8_t *id)
{
    static const char *const names[] = {"PENDING", "PREPARED", "CREATED", "REMOVED",
                                        "RESCHEDULING"};
    struct mb_place_info info;
    const struct mb_gcs_pg *pg = mb_placement_get(h->placement, id, &info);
    char hex[2 * MB_PG_ID_BYTES + 1];

    mb_info("gcs", "placement group pg=%s state=%s bundles=%zu attempt=%u wait=%d",
            mb_hex(id, MB_PG_ID_BYTES, hex), names[pg->state], pg->n_bundles, info.attempts,
            (int)info.wait);
}

static void on_place_timer(uv_timer_t *timer)
{
    head_placement_pump(timer->data);
}

/* Removed groups beyond the bound leave memory and store, those at the head of the queue first. */
static void forget_removed(struct mb_head *h)
{
    size_t removed = 0;

    for (size_t i = mb_placement_count(h->placement); i-- > 0;) {
        const struct mb_gcs_pg *pg = mb_placement_at(h->placement, i, NULL);
        uint8_t id[MB_PG_ID_BYTES];
        struct mb_err err = {0};

        if (pg->state != MB_PG_REMOVED || ++removed <= HEAD_REMOVED_GROUPS_MAX)
            continue;
        memcpy(id, pg->id, sizeof id);
        if (mb_placement_forget(h->placement, id) &&
            mb_tables_del(h->store, MB_TABLES_GROUPS, mb_blob_str(""), head_blob(id, sizeof id),
                          NULL, NULL, &err) != 0)
            mb_warn("gcs", "a removed placement group stays in the store: %s", err.text);
    }
}

void head_placement_pump(struct mb_head *h)
{
    struct mb_place_action act;
    int changed = 0;

    if (h->stopping || h->pumping)
        return;
    h->pumping = 1;
    while (mb_placement_next(h->placement, mb_mono_ms(), &act)) {
        struct mb_err err = {0};
        if (act.kind == MB_PLACE_CHANGED) {
            log_state(h, act.pg_id);
            changed = 1;
            wait_for_commit(h, act.pg_id);
            if (store_group(h, act.pg_id, &err) != 0)
                mb_error("gcs", "a placement group's state is not stored: %s", err.text);
        } else if (send_action(h, &act, &err) != 0) {
            mb_placement_result(h->placement, act.pg_id, act.ticket, MB_PLACE_FAILED, mb_mono_ms());
        }
    }
    if (changed) {
        forget_removed(h);
        tell_after_commit(h);
    }
    h->pumping = 0;
    uint64_t due = mb_placement_due_ms(h->placement), now = mb_mono_ms();
    if (due != UINT64_MAX)
        uv_timer_start(&h->place_timer, on_place_timer, due > now ? due - now : 1, 0);
    else
        uv_timer_stop(&h->place_timer);
}

/* ---- nodes ---- */

void head_placement_node_up(struct mb_head *h, struct head_node *n)
{
    struct mb_arena a = {0};
    struct mb_err err = {0};
    const struct mb_gcs_resource *total =
        mb_wire_get_resources(&a, n->info->resources_total, n->info->n_resources_total);

    if (!total ||
        mb_placement_node_up(h->placement, n->id, total, n->info->n_resources_total, &err) != 0)
        mb_error("gcs", "a node cannot be used for placement groups: out of memory");
    else if (!n->reconciled)
        mb_placement_node_view(h->placement, n->id, total, n->info->n_resources_total, 1);
    mb_arena_close(&a);
}

void head_placement_view(struct mb_head *h, struct head_node *n)
{
    struct mb_arena a = {0};
    const struct mb_gcs_resource *avail =
        mb_wire_get_resources(&a, n->view->resources_available, n->view->n_resources_available);

    if (avail)
        mb_placement_node_view(h->placement, n->id, avail, n->view->n_resources_available,
                               n->view->is_draining || !n->reconciled);
    mb_arena_close(&a);
    head_placement_pump(h);
}

/* ---- before a node is used ---- */

struct reconcile {
    struct mb_head *h;
    uint8_t node_id[MB_NODE_ID_BYTES];
};

static void on_reconciled(void *arg, int status, const char *detail, const ProtobufCMessage *reply)
{
    struct reconcile *r = arg;
    struct mb_head *h = r->h;
    struct head_node *n = head_node_find_id(h, r->node_id);

    (void)reply;
    (void)detail;
    if (n && !h->stopping) {
        n->reconciling = 0;
        if (status == MB_GRPC_OK || status == MB_GRPC_UNIMPLEMENTED) {
            n->reconciled = 1;
            if (head_node_alive(n))
                head_placement_node_up(h, n);
            head_placement_pump(h);
        }
    }
    mb_free(r);
}

static void on_notified(void *arg, int status, const char *detail, const ProtobufCMessage *reply)
{
    (void)arg;
    (void)reply;
    if (status != MB_GRPC_OK)
        mb_info("gcs", "a node did not take the news of the restart: %s", detail ? detail : "");
}

/* The bundles that groups have on this node. */
static Ray__Rpc__Bundle **bundles_in_use(struct mb_head *h, struct mb_arena *a, const uint8_t *id,
                                         size_t *n_out)
{
    size_t n = 0, at = 0;

    for (size_t i = 0; i < mb_placement_count(h->placement); i++)
        n += mb_placement_at(h->placement, i, NULL)->n_bundles;
    Ray__Rpc__Bundle **out = mb_arena_calloc(a, n + 1, sizeof *out);
    for (size_t i = 0; out && i < mb_placement_count(h->placement); i++) {
        const struct mb_gcs_pg *pg = mb_placement_at(h->placement, i, NULL);
        Ray__Rpc__Bundle **all = mb_wire_bundles(a, pg->id, pg->bundles, NULL, pg->n_bundles, 1);
        if (!all)
            return NULL;
        for (size_t k = 0; k < pg->n_bundles; k++)
            if (pg->bundles[k].has_node &&
                memcmp(pg->bundles[k].node_id, id, MB_NODE_ID_BYTES) == 0)
                out[at++] = all[k];
    }
    *n_out = at;
    return out;
}

void head_placement_reconcile(struct mb_head *h, struct head_node *n)
{
    Ray__Rpc__ReleaseUnusedBundlesRequest release = RAY__RPC__RELEASE_UNUSED_BUNDLES_REQUEST__INIT;
    Ray__Rpc__NotifyGCSRestartRequest notify = RAY__RPC__NOTIFY_GCSRESTART_REQUEST__INIT;
    struct mb_arena a = {0};
    struct mb_err err = {0};
    struct mb_grpc_channel *ch;
    struct reconcile *r;

    if (n->reconciling || !(ch = head_node_channel(h, n, &err)))
        return;
    r = mb_alloc(sizeof *r);
    release.bundles_in_use = bundles_in_use(h, &a, n->id, &release.n_bundles_in_use);
    if (r && release.bundles_in_use) {
        r->h = h;
        memcpy(r->node_id, n->id, MB_NODE_ID_BYTES);
        n->reconciling = 1;
        if (mb_grpc_unary(ch, "/ray.rpc.NodeManagerService/ReleaseUnusedBundles", &release.base,
                          &ray__rpc__release_unused_bundles_reply__descriptor, HEAD_NODE_RPC_MS,
                          on_reconciled, r, NULL, &err) == 0) {
            r = NULL;
            if (n->is_loaded &&
                mb_grpc_unary(ch, "/ray.rpc.NodeManagerService/NotifyGCSRestart", &notify.base,
                              &ray__rpc__notify_gcsrestart_reply__descriptor, HEAD_NODE_RPC_MS,
                              on_notified, NULL, NULL, &err) != 0)
                mb_warn("gcs", "NotifyGCSRestart not sent: %s", err.text);
        } else {
            n->reconciling = 0;
        }
    }
    mb_free(r);
    mb_arena_close(&a);
}

static int load_one(void *arg, struct mb_blob key, struct mb_blob value)
{
    struct mb_head *h = arg;
    struct mb_arena a = {0};
    struct mb_err err = {0};
    struct mb_gcs_pg pg;
    Ray__Rpc__PlacementGroupTableData *row =
        ray__rpc__placement_group_table_data__unpack(NULL, value.n, value.p);
    int rc = row ? mb_wire_get_pg(&a, row, &pg) : MB_ECORRUPT;

    (void)key;
    if (rc == 0)
        rc = mb_placement_restore(h->placement, &pg, &err);
    if (rc == 0) /* who waited comes back, unless it ended meanwhile */
        mb_placement_attend(h->placement, pg.id, 0, mb_mono_ms());
    if (rc == 0 && pg.created_unix_ms > h->newest_group_unix_ms)
        h->newest_group_unix_ms = pg.created_unix_ms;
    if (row)
        ray__rpc__placement_group_table_data__free_unpacked(row, NULL);
    mb_arena_close(&a);
    return rc;
}

int head_placement_load(struct mb_head *h, struct mb_err *err)
{
    int rc =
        mb_tables_each(h->store, MB_TABLES_GROUPS, mb_blob_str(""), mb_blob_str(""), load_one, h);

    return rc == 0 ? 0 : mb_err_set(err, rc, "the store's placement groups cannot be read");
}

void head_placement_close(struct mb_head *h)
{
    while (h->waits) {
        struct head_wait *w = h->waits;
        h->waits = w->next;
        mb_grpc_reply_error(w->req, MB_GRPC_UNAVAILABLE, "the head is stopping");
        mb_free(w);
    }
}

/* A group without an actor of its own goes with its job. */
void head_placement_job_finished(struct mb_head *h, ProtobufCBinaryData job_id)
{
    for (size_t i = 0; i < mb_placement_count(h->placement); i++) {
        const struct mb_gcs_pg *pg = mb_placement_at(h->placement, i, NULL);
        if (job_id.len == MB_JOB_ID_BYTES && !pg->has_actor && !pg->is_detached &&
            memcmp(pg->job_id, job_id.data, MB_JOB_ID_BYTES) == 0)
            mb_placement_remove(h->placement, pg->id);
    }
    head_placement_pump(h);
}

void head_placement_settle(struct mb_head *h)
{
    for (size_t i = 0; i < mb_placement_count(h->placement); i++) {
        const struct mb_gcs_pg *pg = mb_placement_at(h->placement, i, NULL);
        if (pg->state != MB_PG_REMOVED && !pg->has_actor && !pg->is_detached &&
            !head_jobinfo_alive(h, mb_wire_bytes(pg->job_id, MB_JOB_ID_BYTES)))
            mb_placement_remove(h->placement, pg->id);
    }
    head_placement_pump(h);
}

/* ---- calls ---- */

/* The queue's order outlives a restart by this time, so two groups never have the same. */
static int64_t creation_time(struct mb_head *h)
{
    uint64_t now = mb_unix_ms();

    h->newest_group_unix_ms = now > h->newest_group_unix_ms ? now : h->newest_group_unix_ms + 1;
    return (int64_t)h->newest_group_unix_ms;
}

static void create_group(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Ray__Rpc__PlacementGroupSpec *spec =
        ((const Ray__Rpc__CreatePlacementGroupRequest *)request)->placement_group_spec;
    Ray__Rpc__CreatePlacementGroupReply reply = RAY__RPC__CREATE_PLACEMENT_GROUP_REPLY__INIT;
    Ray__Rpc__GcsStatus status = RAY__RPC__GCS_STATUS__INIT;
    Ray__Rpc__PlacementGroupTableData row = RAY__RPC__PLACEMENT_GROUP_TABLE_DATA__INIT;
    struct mb_arena a = {0};
    struct mb_err err = {0};
    struct mb_gcs_pg pg;
    int rc;

    if (!head_admits(h, req))
        return;
    if (!spec || spec->placement_group_id.len != MB_PG_ID_BYTES) {
        mb_grpc_reply_error(req, MB_GRPC_INVALID_ARGUMENT, "a placement group id has %d bytes",
                            MB_PG_ID_BYTES);
        return;
    }
    row.placement_group_id = spec->placement_group_id;
    row.name = spec->name;
    row.n_bundles = spec->n_bundles;
    row.bundles = spec->bundles;
    row.strategy = spec->strategy;
    row.creator_job_id = spec->creator_job_id;
    row.creator_actor_id = spec->creator_actor_id;
    row.creator_actor_dead = spec->creator_actor_dead;
    row.is_detached = spec->is_detached;
    row.placement_group_creation_timestamp_ms = creation_time(h);
    rc = mb_wire_get_pg(&a, &row, &pg);
    if (rc != 0)
        mb_err_set(&err, rc, "the placement group cannot be read");
    else if (!spec->is_detached && !head_jobinfo_alive(h, spec->creator_job_id))
        rc = mb_err_set(&err, MB_ENOENT, "Couldn't find the placement group's job.");
    else
        rc = mb_placement_add(h->placement, &pg, &err);
    mb_arena_close(&a);
    if (rc != 0) {
        status.code = rc == MB_EEXIST   ? HEAD_STATUS_EXISTS
                      : rc == MB_ENOENT ? HEAD_STATUS_NOT_FOUND
                                        : HEAD_STATUS_INVALID;
        status.message = err.text;
    }
    reply.status = &status;
    head_placement_pump(h);
    head_reply_committed(h, req, &reply.base);
}

static void remove_group(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Ray__Rpc__RemovePlacementGroupRequest *m =
        (const Ray__Rpc__RemovePlacementGroupRequest *)request;
    Ray__Rpc__RemovePlacementGroupReply reply = RAY__RPC__REMOVE_PLACEMENT_GROUP_REPLY__INIT;
    Ray__Rpc__GcsStatus ok = RAY__RPC__GCS_STATUS__INIT;

    if (!head_admits(h, req))
        return;
    if (m->placement_group_id.len == MB_PG_ID_BYTES)
        mb_placement_remove(h->placement, m->placement_group_id.data);
    reply.status = &ok;
    head_placement_pump(h);
    head_reply_committed(h, req, &reply.base);
}

static void on_wait_gone(void *arg)
{
    struct head_wait *w = arg;
    struct mb_head *h = w->h;
    int others = 0;

    w->gone = 1;
    for (const struct head_wait *o = h->waits; o; o = o->next)
        others |= !o->gone && memcmp(o->pg_id, w->pg_id, MB_PG_ID_BYTES) == 0;
    if (!others)
        mb_placement_attend(h->placement, w->pg_id, 0, mb_mono_ms());
    answer_waits(h); /* w is gone after this */
    head_placement_pump(h);
}

static void wait_group(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    ProtobufCBinaryData id =
        ((const Ray__Rpc__WaitPlacementGroupUntilReadyRequest *)request)->placement_group_id;

    if (!head_admits(h, req))
        return;
    struct head_wait *w = mb_calloc(1, sizeof *w);
    if (!w) {
        mb_grpc_reply_error(req, MB_GRPC_RESOURCE_EXHAUSTED, "out of memory");
        return;
    }
    w->req = req;
    w->h = h;
    mb_wire_get_id(id, w->pg_id, MB_PG_ID_BYTES);
    w->next = h->waits;
    h->waits = w;
    mb_placement_attend(h->placement, w->pg_id, 1, mb_mono_ms());
    w->need = h->groups_asked + 1;
    mb_grpc_req_on_cancel(req, on_wait_gone, w);
    tell_after_commit(h);
    head_placement_pump(h); /* an orphan may have its driver back; w may be gone by now */
}

/* The row of one group as a reply, or NotFound. */
static void reply_row(struct mb_head *h, struct mb_grpc_req *req, const struct mb_gcs_pg *pg,
                      const struct mb_place_info *info)
{
    Ray__Rpc__GetPlacementGroupReply reply = RAY__RPC__GET_PLACEMENT_GROUP_REPLY__INIT;
    Ray__Rpc__GcsStatus ok = RAY__RPC__GCS_STATUS__INIT;
    struct mb_arena a = {0};

    (void)h;
    reply.status = &ok;
    reply.placement_group_table_data = pg ? row_of(&a, pg, info) : NULL;
    if (pg && !reply.placement_group_table_data)
        mb_grpc_reply_error(req, MB_GRPC_RESOURCE_EXHAUSTED, "out of memory");
    else
        mb_grpc_reply(req, &reply.base); /* an unknown group has no row: Ray's way to say it */
    mb_arena_close(&a);
}

static void get_group(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    ProtobufCBinaryData id =
        ((const Ray__Rpc__GetPlacementGroupRequest *)request)->placement_group_id;
    struct mb_place_info info;

    if (!head_admits(h, req))
        return;
    reply_row(h, req,
              id.len == MB_PG_ID_BYTES ? mb_placement_get(h->placement, id.data, &info) : NULL,
              &info);
}

static void get_named_group(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Ray__Rpc__GetNamedPlacementGroupRequest *m =
        (const Ray__Rpc__GetNamedPlacementGroupRequest *)request;
    const struct mb_gcs_pg *found = NULL;
    struct mb_place_info info, found_info = {0};

    if (!head_admits(h, req))
        return;
    for (size_t i = 0; i < mb_placement_count(h->placement); i++) {
        const struct mb_gcs_pg *pg = mb_placement_at(h->placement, i, &info);
        if (pg->state != MB_PG_REMOVED && *pg->name && strcmp(pg->name, m->name) == 0) {
            found = pg;
            found_info = info;
        }
    }
    reply_row(h, req, found, &found_info); /* both reply types have the same fields */
}

static void get_all_groups(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Ray__Rpc__GetAllPlacementGroupRequest *m =
        (const Ray__Rpc__GetAllPlacementGroupRequest *)request;
    Ray__Rpc__GetAllPlacementGroupReply reply = RAY__RPC__GET_ALL_PLACEMENT_GROUP_REPLY__INIT;
    Ray__Rpc__GcsStatus ok = RAY__RPC__GCS_STATUS__INIT;
    struct mb_arena a = {0};
    size_t n = mb_placement_count(h->placement), limit = n;
    int failed = 0;

    if (!head_admits(h, req))
        return;
    if (m->_limit_case != RAY__RPC__GET_ALL_PLACEMENT_GROUP_REQUEST___LIMIT__NOT_SET &&
        m->limit >= 0 && (size_t)m->limit < limit)
        limit = (size_t)m->limit;
    reply.placement_group_table_data =
        mb_arena_calloc(&a, n + 1, sizeof *reply.placement_group_table_data);
    failed = !reply.placement_group_table_data;
    for (size_t i = 0; !failed && i < limit; i++) {
        struct mb_place_info info;
        const struct mb_gcs_pg *pg = mb_placement_at(h->placement, i, &info);
        Ray__Rpc__PlacementGroupTableData *row = row_of(&a, pg, &info);
        failed = !row;
        reply.placement_group_table_data[reply.n_placement_group_table_data++] = row;
    }
    reply.status = &ok;
    reply.total = (int64_t)n;
    if (failed)
        mb_grpc_reply_error(req, MB_GRPC_RESOURCE_EXHAUSTED, "out of memory");
    else
        mb_grpc_reply(req, &reply.base);
    mb_arena_close(&a);
}

int head_placement_methods(struct mb_head *h, struct mb_err *err)
{
#define SERVICE "/ray.rpc.PlacementGroupInfoGcsService/"
    static const struct mb_grpc_method methods[] = {
        {SERVICE "CreatePlacementGroup", &ray__rpc__create_placement_group_request__descriptor,
         create_group, NULL, 0},
        {SERVICE "RemovePlacementGroup", &ray__rpc__remove_placement_group_request__descriptor,
         remove_group, NULL, 0},
        {SERVICE "WaitPlacementGroupUntilReady",
         &ray__rpc__wait_placement_group_until_ready_request__descriptor, wait_group, NULL, 0},
        {SERVICE "GetPlacementGroup", &ray__rpc__get_placement_group_request__descriptor, get_group,
         NULL, 0},
        {SERVICE "GetNamedPlacementGroup", &ray__rpc__get_named_placement_group_request__descriptor,
         get_named_group, NULL, 0},
        {SERVICE "GetAllPlacementGroup", &ray__rpc__get_all_placement_group_request__descriptor,
         get_all_groups, NULL, 0},
    };
#undef SERVICE
    return mb_grpc_server_add(h->server, methods, sizeof methods / sizeof methods[0], h, err);
}
