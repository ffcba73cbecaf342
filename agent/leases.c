/*
 *  1. Is anything asked for that may be ours? Refused at once, as unschedulable: UNIMPLEMENTED, or
 *  "rejected" for what no other node has, make its owner ask a thousand times a second.
 *  2. The head says which nodes are Ray's, a moment ago or now: those that are ALIVE and have none
 *  of our resources. Who wants one of them by its id gets that one: a head of 2.40 asks any node
 *  for such an actor, and every job's supervisor is one.
 *  3. The first node that is asked may name another (retry_at_raylet_address); Ray's head asks for
 *  an actor so, at a node that it picks at random.
 *  4. A node that another one named may take or reject only (grant_or_reject): its owner, a driver,
 *  aborts on a third address. It asks its own node again then, which for SPREAD has the next one's
 *  turn; after a pause, so that one that always chooses this node does not ask all the time.
 * Failure: the head does not answer, has no node but ours, or not the one that is wanted: as 1.
 * What is asked is a LeaseSpec at a head of 2.60, a TaskSpec at one of 2.40. Heads between them
 * have the one or the other: what is no TaskSpec there is refused.
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
    int is_spilled;          /* another node named this one */
    int wants_node, is_soft; /* that one; soft: or any other */
    uint8_t wanted[MB_NODE_ID_BYTES];
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

static const struct mb_leases_other *find_wanted(const struct mb_leases *l,
                                                 const struct mb_lease *lease)
{
    for (size_t i = 0; lease->wants_node && i < l->n_others; i++)
        if (memcmp(l->others[i].id, lease->wanted, sizeof(lease->wanted)) == 0)
            return &l->others[i];
    return NULL;
}

/* The node of Ray's where this lease may be had; NULL: there is none. */
static const struct mb_leases_other *choose(const struct mb_leases *l, const struct mb_lease *lease)
{
    const struct mb_leases_other *wanted = find_wanted(l, lease);

    if (wanted != NULL || l->n_others == 0 || (lease->wants_node && !lease->is_soft))
        return wanted;
    return &l->others[l->turn % l->n_others];
}

/* The nodes are known. */
static void settle(struct mb_leases *l, struct mb_lease *lease)
{
    const struct mb_leases_other *other = choose(l, lease);

    if (other != NULL && lease->is_spilled) {
        lease->due_ms = mb_mono_ms() + PAUSE_MS;
        lease->next = NULL;
        if (l->later == NULL)
            uv_timer_start(&l->timer, on_due, PAUSE_MS, 0);
        *l->later_end = lease;
        l->later_end = &lease->next;
        return;
    }
    if (other != NULL) {
        send_on(lease->req, other);
        l->turn++;
    } else {
        refuse(lease->req);
    }
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

static void forget_others(struct mb_leases *l)
{
    mb_free(l->others);
    l->others = NULL;
    l->n_others = 0;
}

static void on_nodes(void *arg, const struct mb_err *err, const struct mb_gcs_node *nodes, size_t n)
{
    struct mb_leases *l = arg;

    l->op = NULL;
    forget_others(l);
    if (err->code == 0 && n > 0 && !l->is_stopped)
        l->others = mb_calloc(n, sizeof(*l->others));
    for (size_t i = 0; l->others != NULL && i < n; i++) {
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
    forget_others(l);
    settle_asked(l);
}

/* ---- what is asked for ---- */

/* Of a LeaseSpec or a TaskSpec. */
struct spec {
    size_t n_resources;
    const Ray__Rpc__SchedulingStrategy *strategy;
    const Ray__Rpc__LabelSelector *labels;
};

/* Takes it over into the lease. 1 if a node of Ray's will do: no resource, no label, no strategy
 * that names anything but a node by its id. */
static int is_for_rays(const struct spec *s, struct mb_lease *lease)
{
    const Ray__Rpc__NodeAffinitySchedulingStrategy *one;

    if (s->n_resources > 0 || (s->labels != NULL && s->labels->base.n_unknown_fields > 0))
        return 0;
    if (s->strategy == NULL)
        return 1;
    if (s->strategy->base.n_unknown_fields > 0)
        return 0;
    if (s->strategy->scheduling_strategy_case !=
        RAY__RPC__SCHEDULING_STRATEGY__SCHEDULING_STRATEGY_NODE_AFFINITY_SCHEDULING_STRATEGY)
        return 1;
    one = s->strategy->node_affinity_scheduling_strategy;
    if (one->node_id.len != sizeof(lease->wanted))
        return 0;
    memcpy(lease->wanted, one->node_id.data, sizeof(lease->wanted));
    lease->wants_node = 1;
    lease->is_soft = one->soft;
    return 1;
}

static int lease_is_for_rays(const uint8_t *data, size_t n, struct mb_lease *lease)
{
    Ray__Rpc__LeaseSpec *s = ray__rpc__lease_spec__unpack(NULL, n, data);
    int is_rays =
        s != NULL &&
        is_for_rays(&(struct spec){s->n_required_resources + s->n_required_placement_resources,
                                   s->scheduling_strategy, s->label_selector},
                    lease);

    if (s != NULL)
        ray__rpc__lease_spec__free_unpacked(s, NULL);
    return is_rays;
}

/* A LeaseSpec is none: its field 1 is no number. */
static int task_is_for_rays(const uint8_t *data, size_t n, struct mb_lease *lease)
{
    Ray__Rpc__TaskSpec *s = ray__rpc__task_spec__unpack(NULL, n, data);
    int is_rays =
        s != NULL &&
        is_for_rays(&(struct spec){s->n_required_resources + s->n_required_placement_resources,
                                   s->scheduling_strategy, s->label_selector},
                    lease);

    if (s != NULL)
        ray__rpc__task_spec__free_unpacked(s, NULL);
    return is_rays;
}

/* Reads lease_spec, which proto/ray/ leaves out: its type is not the same in all versions. */
static int read_spec(const ProtobufCMessage *m, int is_modern, struct mb_lease *lease)
{
    const ProtobufCMessageUnknownField *f = NULL;
    size_t at = 0;

    for (size_t i = 0; i < m->n_unknown_fields; i++)
        if (m->unknown_fields[i].tag == 1 &&
            m->unknown_fields[i].wire_type == PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED)
            f = &m->unknown_fields[i];
    if (f == NULL)
        return 0;
    while (at < f->len && (f->data[at] & 0x80) != 0) /* its length stands before it */
        at++;
    if (at++ >= f->len)
        return 0;
    return is_modern ? lease_is_for_rays(f->data + at, f->len - at, lease)
                     : task_is_for_rays(f->data + at, f->len - at, lease);
}

/* What waits for an answer; NULL if none of Ray's nodes will do. */
static struct mb_lease *new_lease(const struct mb_leases *l,
                                  const Ray__Rpc__RequestWorkerLeaseRequest *q)
{
    const struct mb_gcs *gcs = l->is_stopped || l->node == NULL ? NULL : mb_node_gcs(l->node);
    struct mb_lease lease = {.is_spilled = q->grant_or_reject}, *out;

    if (gcs == NULL || l->n_waiting >= WAITING_MAX ||
        !read_spec(&q->base, mb_gcs_is_modern(gcs), &lease))
        return NULL;
    out = mb_calloc(1, sizeof(*out));
    if (out != NULL)
        *out = lease;
    return out;
}

void mb_leases_answer(struct mb_leases *l, struct mb_grpc_req *req,
                      const Ray__Rpc__RequestWorkerLeaseRequest *q)
{
    struct mb_lease *lease = new_lease(l, q);

    if (lease == NULL) {
        refuse(req);
        return;
    }
    lease->req = req;
    l->n_waiting++;
    if (mb_mono_ms() < l->fresh_until_ms &&
        (!lease->wants_node || find_wanted(l, lease) != NULL)) { /* it may have come since */
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
    forget_others(l);
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
