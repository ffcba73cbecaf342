/*
 * Asking nodes whether they are alive, by the rule of health.h.
 *
 *  1. Silence: Health/Check over gRPC, and GetResourceLoad with it, so that the view of a node is
 * not older than the check.
 *  2. It does not answer: also GET /api/healthz of its HTTP port. Any answer that bears the node's
 *     id proves that its process serves, whatever it says of itself; another program that took the
 *     port, or the same agent under a new id, proves nothing.
 *  3. The verdict: nodes.c declares it dead.
 */
#include <arpa/inet.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/http/client.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/services.h"
#include "proto/ray/health.pb-c.h"
#include "proto/ray/node_manager.pb-c.h"

enum { SECOND_CONNECTIONS = 256, SECOND_BODY_BYTES = 4096, VERDICTS_MAX = 32 /* in a tick */ };

struct check {
    struct mb_head *h;
    uint8_t id[MB_NODE_ID_BYTES]; /* the node may be gone when the answer comes */
};

static void on_checked(void *arg, int status, const char *detail, const ProtobufCMessage *reply)
{
    struct check *c = arg;
    struct head_node *n = head_node_find_id(c->h, c->id);
    const Grpc__Health__V1__HealthCheckResponse *m =
        (const Grpc__Health__V1__HealthCheckResponse *)reply;
    int ok = status == MB_GRPC_OK &&
             m->status == GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING;

    if (n && !c->h->stopping) {
        mb_health_result(&n->health, ok, mb_mono_ms());
        if (!ok)
            mb_info("gcs", "health check of %s failed, %u in a row: %s",
                    n->info->node_manager_address, n->health.failures, detail ? detail : "");
    }
    mb_free(c);
}

static struct check *new_check(struct mb_head *h, const struct head_node *n)
{
    struct check *c = mb_alloc(sizeof *c);

    if (c) {
        c->h = h;
        memcpy(c->id, n->id, MB_NODE_ID_BYTES);
    }
    return c;
}

/* ---- gRPC ---- */

/* The answer to GetResourceLoad as a view. NULL: out of memory. */
static Ray__Rpc__Syncer__ResourceViewSyncMessage *view_of(const Ray__Rpc__ResourcesData *r)
{
    struct mb_arena a = {0};
    Ray__Rpc__Syncer__ResourceViewSyncMessage view =
        RAY__RPC__SYNCER__RESOURCE_VIEW_SYNC_MESSAGE__INIT;
    ProtobufCMessage *copy = NULL;
    const struct mb_gcs_resource *avail =
        mb_wire_get_resources(&a, r->resources_available, r->n_resources_available);
    const struct mb_gcs_resource *total =
        mb_wire_get_resources(&a, r->resources_total, r->n_resources_total);

    if (avail && total) {
        view.n_resources_available = r->n_resources_available;
        view.resources_available = mb_wire_resources(
            &a,
            &ray__rpc__syncer__resource_view_sync_message__resources_available_entry__descriptor,
            avail, r->n_resources_available);
        view.n_resources_total = r->n_resources_total;
        view.resources_total = mb_wire_resources(
            &a, &ray__rpc__syncer__resource_view_sync_message__resources_total_entry__descriptor,
            total, r->n_resources_total);
        view.idle_duration_ms = r->idle_duration_ms;
        view.is_draining = r->is_draining;
        if (view.resources_available && view.resources_total)
            copy = mb_wire_copy(&view.base);
    }
    mb_arena_close(&a);
    return (Ray__Rpc__Syncer__ResourceViewSyncMessage *)copy;
}

static void on_load(void *arg, int status, const char *detail, const ProtobufCMessage *reply)
{
    struct check *c = arg;
    struct head_node *n = head_node_find_id(c->h, c->id);
    const Ray__Rpc__ResourcesData *r =
        reply ? ((const Ray__Rpc__GetResourceLoadReply *)reply)->resources : NULL;
    Ray__Rpc__Syncer__ResourceViewSyncMessage *view = NULL;

    (void)status; /* the health check beside this call judges the node */
    (void)detail;
    if (n && r && !c->h->stopping && head_node_alive(n))
        view = view_of(r);
    if (view) {
        if (n->view)
            ray__rpc__syncer__resource_view_sync_message__free_unpacked(n->view, NULL);
        n->view = view;
        head_placement_view(c->h, n);
    }
    mb_free(c);
}

static void ask_load(struct mb_head *h, struct head_node *n)
{
    Ray__Rpc__GetResourceLoadRequest req = RAY__RPC__GET_RESOURCE_LOAD_REQUEST__INIT;
    struct mb_err err = {0};
    struct mb_grpc_channel *ch = head_node_channel(h, n, &err);
    struct check *c = ch ? new_check(h, n) : NULL;

    if (c && mb_grpc_unary(ch, "/ray.rpc.NodeManagerService/GetResourceLoad", &req.base,
                           &ray__rpc__get_resource_load_reply__descriptor, MB_HEALTH_TIMEOUT_MS,
                           on_load, c, NULL, &err) != 0)
        mb_free(c);
}

static void ask_health(struct mb_head *h, struct head_node *n)
{
    Grpc__Health__V1__HealthCheckRequest req = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    char hex[2 * MB_NODE_ID_BYTES + 1];
    struct mb_err err = {0};
    struct mb_grpc_channel *ch = head_node_channel(h, n, &err);
    struct check *c = ch ? new_check(h, n) : NULL;

    req.service = mb_hex(n->id, MB_NODE_ID_BYTES, hex);
    if (!c || mb_grpc_unary(ch, "/grpc.health.v1.Health/Check", &req.base,
                            &grpc__health__v1__health_check_response__descriptor,
                            MB_HEALTH_TIMEOUT_MS, on_checked, c, NULL, &err) != 0) {
        /* Our own shortage says nothing about the node. */
        mb_warn("gcs", "health check not sent: %s", err.text);
        mb_health_result(&n->health, 1, mb_mono_ms());
        mb_free(c);
        return;
    }
    ask_load(h, n);
}

/* ---- the second channel ---- */

/* A name or an address, so that nothing of it can become another part of the URL. */
static int is_host(const char *s)
{
    struct in6_addr v6;

    return *s &&
           (inet_pton(AF_INET6, s, &v6) == 1 ||
            s[strspn(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-")] ==
                '\0');
}

int head_node_has_second(const Ray__Rpc__GcsNodeInfo *info)
{
    return info->dashboard_agent_listen_port > 0 && info->dashboard_agent_listen_port <= 65535 &&
           is_host(info->node_manager_address);
}

static void on_second(void *arg, const struct mb_http_response *r)
{
    struct check *c = arg;
    struct head_node *n = head_node_find_id(c->h, c->id);
    const char *id = r->error ? NULL : r->header(r, "X-Mobula-Node-Id");
    char hex[2 * MB_NODE_ID_BYTES + 1];
    int ok = id && strcmp(id, mb_hex(c->id, MB_NODE_ID_BYTES, hex)) == 0;

    if (n && !c->h->stopping) {
        if (mb_health_second(&n->health, ok))
            mb_warn("gcs",
                    "node %.12s at %s does not answer gRPC, but its HTTP port does: it is not "
                    "declared dead before %d s are over",
                    hex, n->info->node_manager_address, MB_HEALTH_DOUBT_MAX_MS / 1000);
        else if (!ok)
            mb_info("gcs", "the HTTP port of %s does not answer, either: %s",
                    n->info->node_manager_address, r->error ? r->detail : "not that node");
    }
    mb_free(c);
}

static void ask_second(struct mb_head *h, struct head_node *n)
{
    const char *host = n->info->node_manager_address;
    int is_v6 = strchr(host, ':') != NULL;
    struct mb_err err = {.text = "out of memory"};
    struct mb_http_request req = {.method = "GET",
                                  .body_fd = -1,
                                  .max_body_bytes = SECOND_BODY_BYTES,
                                  .timeout_ms = MB_HEALTH_TIMEOUT_MS,
                                  .connect_timeout_ms = MB_HEALTH_TIMEOUT_MS,
                                  .is_direct = 1}; /* as gRPC, which it is to bear out */
    struct check *c = new_check(h, n);
    char *url = mb_asprintf("http://%s%s%s:%d/api/healthz", is_v6 ? "[" : "", host,
                            is_v6 ? "]" : "", n->info->dashboard_agent_listen_port);

    req.url = url;
    if (!c || !url ||
        (!h->second_http &&
         mb_http_client_create(h->loop, SECOND_CONNECTIONS, &h->second_http, &err) != 0) ||
        mb_http_fetch(h->second_http, &req, on_second, c, NULL, &err) != 0) {
        /* Our own shortage says nothing about the node. */
        mb_warn("gcs", "HTTP health check not sent: %s", err.text);
        mb_health_second(&n->health, 1);
        mb_free(c);
    }
    mb_free(url);
}

/* ---- the rule ---- */

/* 1: it was declared dead. */
static int tick_node(struct mb_head *h, struct head_node *n, uint64_t now_ms)
{
    for (;;) {
        switch (mb_health_tick(&n->health, now_ms)) {
        case MB_HEALTH_CHECK:
            ask_health(h, n);
            break;
        case MB_HEALTH_SECOND:
            ask_second(h, n);
            break;
        case MB_HEALTH_DEAD:
            head_node_dead(h, n, RAY__RPC__NODE_DEATH_INFO__REASON__UNEXPECTED_TERMINATION,
                           mb_health_reason(&n->health));
            return 1;
        case MB_HEALTH_WAIT:
            return 0;
        }
    }
}

/* A verdict may move the array: then a node is passed over, and has its turn at the next tick. So
 * do those beyond the bound, which keeps a tick short when a rack dies. */
void head_nodes_tick(struct mb_head *h, uint64_t now_ms)
{
    int n_dead = 0;

    for (size_t i = 0; i < h->n_nodes && n_dead < VERDICTS_MAX; i++) {
        struct head_node *n = h->nodes[i];

        if (!head_node_alive(n))
            continue;
        if (!n->reconciled)
            head_placement_reconcile(h, n);
        n_dead += tick_node(h, n, now_ms);
    }
}
