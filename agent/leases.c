/*
 *  1. Is anything asked for that may be ours? Refused at once, as unschedulable: UNIMPLEMENTED, or
 *  "rejected" for what no other node has, make its owner ask a thousand times a second.
 *  2. The head says which nodes are Ray's, a moment ago or now: those that are ALIVE and have none
 *  of our resources.
 *  3. The first node that is asked may name another (retry_at_raylet_address); Ray's head asks for
 *  an actor so, at a node that it picks at random.
 *  4. A node that another one named may take or reject only (grant_or_reject): its owner, a driver,
 *  aborts on a third address. It asks its own node again then, which for SPREAD has the next one's
 *  turn; after a pause, so that one that always chooses this node does not ask all the time.
 * Failure: the head does not answer, or has no node but ours: as 1.
 * Ray before 2.60 has another message for what is asked, and is always refused.
 */
#include "agent/leases.h"

#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/str.h"
#include "proto/ray/common.pb-c.h"

enum {
    FRESH_MS = 2000,
    ASK_MS = 3000,
    PAUSE_MS = 100,
    WAITING_MAX = 1000, /* beyond, they are refused */
};

struct mb_lease {
    struct mb_lease *next;
    struct mb_grpc_req *req;
    int is_spilled; /* another node named this one */
    uint64_t due_ms;
};

/* ---- answers ---- */

static void refuse(struct mb_grpc_req *req)
{
    Ray__Rpc__RequestWorkerLeaseReply reply = RAY__RPC__REQUEST_WORKER_LEASE_REPLY__INIT;

    reply.canceled = 1;
    reply.failure_type =
        RAY__RPC__REQUEST_WORKER_LEASE_REPLY__SCHEDULING_FAILURE_TYPE__SCHEDULING_CANCELLED_UNSCHEDULABLE;
    reply.scheduling_failure_message =
        (char *)"this is a mobula node: it runs gangs (mobula train, mobula run), not Ray tasks "
                "or actors";
    mb_grpc_reply(req, &reply.base);
}

static void send_on(struct mb_grpc_req *req, const struct mb_leases_other *other)
{
    Ray__Rpc__RequestWorkerLeaseReply reply = RAY__RPC__REQUEST_WORKER_LEASE_REPLY__INIT;
    Ray__Rpc__Address address = RAY__RPC__ADDRESS__INIT;

    address.node_id.data = (uint8_t *)other->id;
    address.node_id.len = sizeof(other->id);
    address.ip_address = (char *)other->ip;
    address.port = other->port;
    reply.retry_at_raylet_address = &address;
    mb_grpc_reply(req, &reply.base);
}

static void send_back(struct mb_grpc_req *req)
{
    Ray__Rpc__RequestWorkerLeaseReply reply = RAY__RPC__REQUEST_WORKER_LEASE_REPLY__INIT;

    reply.rejected = 1;
    mb_grpc_reply(req, &reply.base);
}

static void drop(struct mb_leases *l, struct mb_lease *lease)
{
    l->n_waiting--;
    mb_free(lease);
}

static void on_due(uv_timer_t *timer)
{
    struct mb_leases *l = timer->data;
    const uint64_t now = mb_mono_ms();

    while (l->later != NULL && l->later->due_ms <= now) {
        struct mb_lease *lease = l->later;

        l->later = lease->next;
        if (l->later == NULL)
            l->later_end = &l->later;
        send_back(lease->req);
        drop(l, lease);
    }
    if (l->later != NULL)
        uv_timer_start(&l->timer, on_due, l->later->due_ms - now, 0);
}

/* The nodes are known. */
static void settle(struct mb_leases *l, struct mb_lease *lease)
{
    if (l->n_others > 0 && lease->is_spilled) {
        lease->due_ms = mb_mono_ms() + PAUSE_MS;
        lease->next = NULL;
        if (l->later == NULL)
            uv_timer_start(&l->timer, on_due, PAUSE_MS, 0);
        *l->later_end = lease;
        l->later_end = &lease->next;
        return;
    }
    if (l->n_others > 0)
        send_on(lease->req, &l->others[l->turn++ % l->n_others]);
    else
        refuse(lease->req);
    drop(l, lease);
}

static void settle_asked(struct mb_leases *l)
{
    struct mb_lease *lease = l->asked, *next;

    for (l->asked = NULL; lease != NULL; lease = next) {
        next = lease->next;
        settle(l, lease);
    }
}

/* ---- which nodes are Ray's ---- */

static int is_rays(const struct mb_gcs_node *node)
{
    for (size_t i = 0; i < node->n_resources; i++)
        if (mb_starts_with(node->resources[i].name, "mobula_"))
            return 0;
    return !node->is_dead && node->port > 0 && strlen(node->ip) < MB_LEASES_IP_MAX;
}

static void on_nodes(void *arg, const struct mb_err *err, const struct mb_gcs_node *nodes, size_t n)
{
    struct mb_leases *l = arg;

    l->op = NULL;
    l->n_others = 0;
    for (size_t i = 0; err->code == 0 && i < n && l->n_others < MB_LEASES_OTHERS_MAX; i++) {
        struct mb_leases_other *other = &l->others[l->n_others];

        if (!is_rays(&nodes[i]))
            continue;
        memcpy(other->id, nodes[i].node_id, sizeof(other->id));
        snprintf(other->ip, sizeof(other->ip), "%s", nodes[i].ip);
        other->port = nodes[i].port;
        l->n_others++;
    }
    if (err->code == 0)
        l->fresh_until_ms = mb_mono_ms() + FRESH_MS;
    settle_asked(l);
}

static void ask_nodes(struct mb_leases *l)
{
    struct mb_gcs *gcs = mb_node_gcs(l->node);
    struct mb_err err = {0};

    if (l->op != NULL)
        return;
    if (gcs != NULL && mb_gcs_nodes(gcs, ASK_MS, on_nodes, l, &l->op, &err) == 0)
        return;
    l->n_others = 0;
    settle_asked(l);
}

/* ---- what is asked for ---- */

/* The bytes of lease_spec, which proto/ray/ leaves out: its type is not the same in all versions.
 */
static Ray__Rpc__LeaseSpec *read_spec(const ProtobufCMessage *m)
{
    const ProtobufCMessageUnknownField *f = NULL;
    size_t at = 0;

    for (size_t i = 0; i < m->n_unknown_fields; i++)
        if (m->unknown_fields[i].tag == 1 &&
            m->unknown_fields[i].wire_type == PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED)
            f = &m->unknown_fields[i];
    if (f == NULL)
        return NULL;
    while (at < f->len && (f->data[at] & 0x80) != 0) /* its length stands before it */
        at++;
    return at < f->len ? ray__rpc__lease_spec__unpack(NULL, f->len - at - 1, f->data + at + 1)
                       : NULL;
}

/* 1 if any node will do: no resource, no label, no strategy that names nodes. */
static int asks_for_nothing(const ProtobufCMessage *m)
{
    Ray__Rpc__LeaseSpec *s = read_spec(m);
    int is_nothing =
        s != NULL && s->n_required_resources == 0 && s->n_required_placement_resources == 0 &&
        (s->scheduling_strategy == NULL || s->scheduling_strategy->base.n_unknown_fields == 0) &&
        (s->label_selector == NULL || s->label_selector->base.n_unknown_fields == 0);

    if (s != NULL)
        ray__rpc__lease_spec__free_unpacked(s, NULL);
    return is_nothing;
}

static int is_for_another(const struct mb_leases *l, const Ray__Rpc__RequestWorkerLeaseRequest *q)
{
    const struct mb_gcs *gcs = l->is_stopped || l->node == NULL ? NULL : mb_node_gcs(l->node);

    return gcs != NULL && mb_gcs_is_modern(gcs) && asks_for_nothing(&q->base);
}

void mb_leases_answer(struct mb_leases *l, struct mb_grpc_req *req,
                      const Ray__Rpc__RequestWorkerLeaseRequest *q)
{
    struct mb_lease *lease = NULL;

    if (is_for_another(l, q) && l->n_waiting < WAITING_MAX)
        lease = mb_calloc(1, sizeof(*lease));
    if (lease == NULL) {
        refuse(req);
        return;
    }
    lease->req = req;
    lease->is_spilled = q->grant_or_reject;
    l->n_waiting++;
    if (mb_mono_ms() < l->fresh_until_ms) {
        settle(l, lease);
        return;
    }
    lease->next = l->asked;
    l->asked = lease;
    ask_nodes(l);
}

/* ---- life ---- */

void mb_leases_init(struct mb_leases *l, uv_loop_t *loop)
{
    *l = (struct mb_leases){.later_end = &l->later};
    uv_timer_init(loop, &l->timer);
    l->timer.data = l;
}

void mb_leases_stop(struct mb_leases *l)
{
    struct mb_lease *lease, *next;

    l->is_stopped = 1;
    l->n_others = 0;
    uv_timer_stop(&l->timer);
    if (l->op != NULL)
        mb_gcs_op_cancel(l->op); /* its callback finds nobody */
    settle_asked(l);
    for (lease = l->later; lease != NULL; lease = next) {
        next = lease->next;
        refuse(lease->req);
        drop(l, lease);
    }
    l->later = NULL;
    l->later_end = &l->later;
}

void mb_leases_close(struct mb_leases *l)
{
    uv_close((uv_handle_t *)&l->timer, NULL);
}
