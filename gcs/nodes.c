/*
 * NodeInfoGcsService and the life of nodes.
 *
 *  1. RegisterNode: into the table and the store; answered after the commit. Placement may use it
 *     when it has said that it holds no bundle which the table does not know: one that registers
 *     again may have been given some by a head that died before the registration was stored. Who is
 *     dead stays dead: a registration may come late, when its process has another id.
 *  2. Sync messages keep it alive (syncer.c). Silence leads to questions (node_checks.c).
 *  3. UnregisterNode, or the verdict: DEAD with a reason; its bundles, its drivers end.
 * MoveNode: a restarted agent that could not have its port again is at another one.
 * Failure paths:
 *  4. An id of wrong length is INVALID_ARGUMENT (a real GCS aborts).
 *  5. A restarted head finds its nodes in the store, alive until the health rule says otherwise,
 * and gives them nothing until their unused bundles are released (placement_service.c).
 */
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/services.h"
#include "proto/mobula/head.pb-c.h"
#include "proto/ray/health.pb-c.h"
#include "proto/ray/node_manager.pb-c.h"

#define STATE_ALIVE RAY__RPC__GCS_NODE_INFO__GCS_NODE_STATE__ALIVE
#define STATE_DEAD  RAY__RPC__GCS_NODE_INFO__GCS_NODE_STATE__DEAD

struct head_node *head_node_find_id(struct mb_head *h, const uint8_t id[MB_NODE_ID_BYTES])
{
    for (size_t i = 0; i < h->n_nodes; i++)
        if (memcmp(h->nodes[i]->id, id, MB_NODE_ID_BYTES) == 0)
            return h->nodes[i];
    return NULL;
}

struct head_node *head_node_find(struct mb_head *h, ProtobufCBinaryData id)
{
    return id.len == MB_NODE_ID_BYTES ? head_node_find_id(h, id.data) : NULL;
}

struct head_node *head_node_find_hex(struct mb_head *h, const char *hex)
{
    uint8_t id[MB_NODE_ID_BYTES];

    return strlen(hex) == 2 * sizeof id && mb_unhex(hex, id, sizeof id) == 0
               ? head_node_find_id(h, id)
               : NULL;
}

int head_node_alive(const struct head_node *n)
{
    return n->info->state == STATE_ALIVE;
}

static void free_node(struct head_node *n)
{
    if (!n)
        return;
    mb_grpc_channel_destroy(n->channel);
    if (n->info)
        ray__rpc__gcs_node_info__free_unpacked(n->info, NULL);
    if (n->view)
        ray__rpc__syncer__resource_view_sync_message__free_unpacked(n->view, NULL);
    json_decref(n->gpus);
    mb_free(n);
}

/* Oldest dead node out, so that nodes that come and go do not fill memory and store. */
static void forget_old_dead(struct mb_head *h)
{
    size_t dead = 0, oldest = 0;

    for (size_t i = 0; i < h->n_nodes; i++) {
        if (head_node_alive(h->nodes[i]))
            continue;
        if (dead++ == 0 || h->nodes[i]->info->end_time_ms < h->nodes[oldest]->info->end_time_ms)
            oldest = i;
    }
    if (dead <= HEAD_DEAD_NODES_MAX)
        return;
    struct mb_err err = {0};
    if (mb_tables_del(h->store, MB_TABLES_NODES, mb_blob_str(""),
                      head_blob(h->nodes[oldest]->id, MB_NODE_ID_BYTES), NULL, NULL, &err) != 0) {
        mb_warn("gcs", "an old dead node stays in the table: %s", err.text);
        return;
    }
    free_node(h->nodes[oldest]);
    memmove(h->nodes + oldest, h->nodes + oldest + 1, (h->n_nodes - oldest - 1) * sizeof *h->nodes);
    h->n_nodes--;
}

/* Takes info. */
static struct head_node *add_node(struct mb_head *h, Ray__Rpc__GcsNodeInfo *info)
{
    struct head_node *n = head_node_find(h, info->node_id);

    if (n) {
        ray__rpc__gcs_node_info__free_unpacked(n->info, NULL);
        if (n->view)
            ray__rpc__syncer__resource_view_sync_message__free_unpacked(n->view, NULL);
        mb_grpc_channel_destroy(n->channel); /* the address may be another */
        json_decref(n->gpus);
        n->gpus = NULL;
        n->view = NULL;
        n->channel = NULL;
    } else {
        struct head_node **nodes = mb_reallocarray(h->nodes, h->n_nodes + 1, sizeof *nodes);
        if (nodes)
            h->nodes = nodes;
        n = nodes ? mb_calloc(1, sizeof *n) : NULL;
        if (!n)
            return NULL;
        h->nodes[h->n_nodes++] = n;
        memcpy(n->id, info->node_id.data, MB_NODE_ID_BYTES);
    }
    n->info = info;
    n->since_ms = mb_mono_ms();
    mb_health_init(&n->health, head_node_has_second(info), mb_mono_ms());
    return n;
}

static int load_one(void *arg, struct mb_blob key, struct mb_blob value)
{
    struct mb_head *h = arg;
    Ray__Rpc__GcsNodeInfo *info = ray__rpc__gcs_node_info__unpack(NULL, value.n, value.p);

    (void)key;
    if (!info || info->node_id.len != MB_NODE_ID_BYTES) {
        if (info)
            ray__rpc__gcs_node_info__free_unpacked(info, NULL);
        return MB_ECORRUPT;
    }
    struct head_node *n = add_node(h, info);
    if (!n) {
        ray__rpc__gcs_node_info__free_unpacked(info, NULL);
        return MB_ENOMEM;
    }
    n->is_loaded = 1;
    return 0;
}

int head_nodes_load(struct mb_head *h, struct mb_err *err)
{
    int rc =
        mb_tables_each(h->store, MB_TABLES_NODES, mb_blob_str(""), mb_blob_str(""), load_one, h);

    if (rc != 0)
        return mb_err_set(err, rc, "the store's node table cannot be read");
    for (size_t i = 0; i < h->n_nodes; i++)
        if (head_node_alive(h->nodes[i]))
            head_placement_node_up(h, h->nodes[i]);
    return 0;
}

void head_nodes_close(struct mb_head *h)
{
    for (size_t i = 0; i < h->n_nodes; i++) {
        mb_grpc_channel_destroy(h->nodes[i]->channel);
        h->nodes[i]->channel = NULL;
    }
}

void head_nodes_free(struct mb_head *h)
{
    for (size_t i = 0; i < h->n_nodes; i++)
        free_node(h->nodes[i]);
    mb_free(h->nodes);
}

struct mb_grpc_channel *head_node_channel(struct mb_head *h, struct head_node *n,
                                          struct mb_err *err)
{
    struct mb_grpc_channel_opts opts = {.token = h->token};
    char target[300];

    if (n->channel)
        return n->channel;
    snprintf(target, sizeof target, "%s:%d", n->info->node_manager_address,
             n->info->node_manager_port);
    if (mb_grpc_channel_create(h->grpc, target, &opts, &n->channel, err) != 0)
        n->channel = NULL;
    return n->channel;
}

/* ---- death ---- */

static void set_death(struct head_node *n, Ray__Rpc__NodeDeathInfo__Reason reason, const char *text)
{
    Ray__Rpc__NodeDeathInfo tmp = RAY__RPC__NODE_DEATH_INFO__INIT;

    tmp.reason = reason;
    tmp.reason_message = mb_wire_str(text);
    if (n->info->death_info)
        ray__rpc__node_death_info__free_unpacked(n->info->death_info, NULL);
    n->info->death_info = (Ray__Rpc__NodeDeathInfo *)mb_wire_copy(&tmp.base);
    n->info->state = STATE_DEAD;
    n->info->end_time_ms = mb_unix_ms();
}

/* Its agent's address, which it put into the KV; the key is Ray's. */
static void forget_agent(struct mb_head *h, const char *hex)
{
    char key[sizeof "DASHBOARD_AGENT_ADDR_NODE_ID_PREFIX:" + 2 * MB_NODE_ID_BYTES];
    struct mb_err err = {0};

    snprintf(key, sizeof key, "DASHBOARD_AGENT_ADDR_NODE_ID_PREFIX:%s", hex);
    if (mb_tables_get(h->store, MB_TABLES_KV, mb_blob_str("dashboard"), mb_blob_str(key), NULL) &&
        mb_tables_del(h->store, MB_TABLES_KV, mb_blob_str("dashboard"), mb_blob_str(key), NULL,
                      NULL, &err) != 0)
        mb_warn("gcs", "the address of a dead node's agent stays: %s", err.text);
}

void head_node_dead(struct mb_head *h, struct head_node *n, Ray__Rpc__NodeDeathInfo__Reason reason,
                    const char *text)
{
    struct mb_err err = {0};
    char hex[2 * MB_NODE_ID_BYTES + 1];

    if (!head_node_alive(n))
        return;
    set_death(n, reason, text);
    mb_info("gcs", "node dead node_id=%s ip=%s: %s", mb_hex(n->id, MB_NODE_ID_BYTES, hex),
            n->info->node_manager_address, text);
    if (head_put_message(h, MB_TABLES_NODES, head_blob(n->id, MB_NODE_ID_BYTES), &n->info->base,
                         &err) != 0)
        mb_error("gcs", "node death not stored: %s", err.text);
    forget_agent(h, hex);
    mb_placement_node_dead(h->placement, n->id);
    head_jobinfo_node_dead(h, n->id);
    head_jobs_node_dead(h, n->id);
    mb_grpc_channel_destroy(n->channel);
    n->channel = NULL;
    head_placement_pump(h);
    forget_old_dead(h);
}

/* ---- calls ---- */

static void get_cluster_id(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    Ray__Rpc__GetClusterIdReply reply = RAY__RPC__GET_CLUSTER_ID_REPLY__INIT;
    Ray__Rpc__GcsStatus ok = RAY__RPC__GCS_STATUS__INIT;

    (void)request;
    if (head_closed(h)) { /* a client of another cluster may ask, too: it learns that it is one */
        mb_grpc_reply_error(req, MB_GRPC_UNAVAILABLE, "%s", head_closed(h));
        return;
    }
    reply.status = &ok;
    reply.cluster_id = mb_wire_bytes(h->cluster_id, MB_NODE_ID_BYTES);
    mb_grpc_reply(req, &reply.base);
}

/* A new head node ends the one before: Ray's rule. */
static void retire_old_heads(struct mb_head *h, const struct head_node *new_head)
{
    for (size_t i = 0; i < h->n_nodes; i++) {
        struct head_node *n = h->nodes[i];
        if (n != new_head && n->info->is_head_node && head_node_alive(n)) {
            head_node_dead(h, n, RAY__RPC__NODE_DEATH_INFO__REASON__UNEXPECTED_TERMINATION,
                           "another head node registered");
            i = (size_t)-1; /* the array may have moved */
        }
    }
}

static void register_node(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Ray__Rpc__RegisterNodeRequest *m = (const Ray__Rpc__RegisterNodeRequest *)request;
    Ray__Rpc__RegisterNodeReply reply = RAY__RPC__REGISTER_NODE_REPLY__INIT;
    Ray__Rpc__GcsStatus ok = RAY__RPC__GCS_STATUS__INIT;
    struct mb_err err = {0};
    char hex[2 * MB_NODE_ID_BYTES + 1];

    if (!head_admits(h, req))
        return;
    if (!m->node_info || m->node_info->node_id.len != MB_NODE_ID_BYTES) {
        mb_grpc_reply_error(req, MB_GRPC_INVALID_ARGUMENT, "a node id has %d bytes",
                            MB_NODE_ID_BYTES);
        return;
    }
    const struct head_node *before = head_node_find(h, m->node_info->node_id);
    if (before && !head_node_alive(before)) { /* its process may be there under another id */
        mb_grpc_reply_error(req, MB_GRPC_ALREADY_EXISTS,
                            "the node of this id is dead: a node comes back under a new one");
        return;
    }
    int reconciled = before && before->reconciled;
    Ray__Rpc__GcsNodeInfo *info = (Ray__Rpc__GcsNodeInfo *)mb_wire_copy(&m->node_info->base);
    struct head_node *n = info ? add_node(h, info) : NULL;
    if (!n) {
        if (info)
            ray__rpc__gcs_node_info__free_unpacked(info, NULL);
        mb_grpc_reply_error(req, MB_GRPC_RESOURCE_EXHAUSTED, "out of memory");
        return;
    }
    info->state = STATE_ALIVE;
    n->reconciled = reconciled;
    if (head_put_message(h, MB_TABLES_NODES, head_blob(n->id, MB_NODE_ID_BYTES), &info->base,
                         &err) != 0) {
        head_reply_err(req, &err);
        return;
    }
    mb_info("gcs", "node registered node_id=%s address=%s:%d", mb_hex(n->id, MB_NODE_ID_BYTES, hex),
            info->node_manager_address, info->node_manager_port);
    head_placement_node_up(h, n);
    if (info->is_head_node && !h->redis) /* standbys are head nodes too */
        retire_old_heads(h, n);
    if (!reconciled)
        head_placement_reconcile(h, n);
    head_placement_pump(h);
    reply.status = &ok;
    head_reply_committed(h, req, &reply.base);
}

static int is_at(const Ray__Rpc__GcsNodeInfo *info, const Mobula__V1__MoveNodeRequest *m)
{
    return strcmp(info->node_manager_address, m->ip) == 0 && info->node_manager_port == m->port &&
           info->dashboard_agent_listen_port == m->http_port &&
           info->metrics_export_port == m->http_port;
}

/* Table and store; in-flight calls to where it was end as on a lost connection. */
static int move_to(struct mb_head *h, struct head_node *n, const Mobula__V1__MoveNodeRequest *m,
                   struct mb_err *err)
{
    Ray__Rpc__GcsNodeInfo moved = *n->info;
    Ray__Rpc__GcsNodeInfo *info;
    int rc;

    moved.node_manager_address = m->ip;
    moved.node_manager_port = m->port;
    moved.dashboard_agent_listen_port = moved.metrics_export_port = m->http_port;
    info = (Ray__Rpc__GcsNodeInfo *)mb_wire_copy(&moved.base);
    if (!info)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    rc = head_put_message(h, MB_TABLES_NODES, head_blob(n->id, MB_NODE_ID_BYTES), &info->base, err);
    if (rc != 0) {
        ray__rpc__gcs_node_info__free_unpacked(info, NULL);
        return rc;
    }
    ray__rpc__gcs_node_info__free_unpacked(n->info, NULL);
    n->info = info;
    mb_grpc_channel_destroy(n->channel);
    n->channel = NULL;
    mb_health_init(&n->health, head_node_has_second(info),
                   mb_mono_ms()); /* failures there say nothing about here */
    return 0;
}

/* A restarted agent, at another address perhaps. Its bundles are what they were, and its view comes
 * with its next sync message. */
static void move_node(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Mobula__V1__MoveNodeRequest *m = (const Mobula__V1__MoveNodeRequest *)request;
    Mobula__V1__MoveNodeReply reply = MOBULA__V1__MOVE_NODE_REPLY__INIT;
    char hex[2 * MB_NODE_ID_BYTES + 1];
    struct mb_err err = {0};

    if (!head_admits(h, req))
        return;
    if (!*m->ip || m->port <= 0 || m->port > UINT16_MAX) {
        mb_grpc_reply_error(req, MB_GRPC_INVALID_ARGUMENT, "a node needs an address and a port");
        return;
    }
    struct head_node *n = head_node_find(h, m->node_id);
    if (!n || !head_node_alive(n)) {
        mb_grpc_reply_error(req, MB_GRPC_NOT_FOUND, "no node of this id is alive");
        return;
    }
    if (!is_at(n->info, m)) {
        if (move_to(h, n, m, &err) != 0) {
            head_reply_err(req, &err);
            return;
        }
        mb_info("gcs", "node moved node_id=%s address=%s:%d", mb_hex(n->id, MB_NODE_ID_BYTES, hex),
                m->ip, m->port);
    }
    head_reply_committed(h, req, &reply.base);
}

static void unregister_node(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Ray__Rpc__UnregisterNodeRequest *m = (const Ray__Rpc__UnregisterNodeRequest *)request;
    Ray__Rpc__UnregisterNodeReply reply = RAY__RPC__UNREGISTER_NODE_REPLY__INIT;
    Ray__Rpc__GcsStatus ok = RAY__RPC__GCS_STATUS__INIT;

    if (!head_admits(h, req))
        return;
    struct head_node *n = head_node_find(h, m->node_id);
    if (n && m->node_death_info)
        head_node_dead(h, n, m->node_death_info->reason, m->node_death_info->reason_message);
    else if (n)
        head_node_dead(h, n, RAY__RPC__NODE_DEATH_INFO__REASON__EXPECTED_TERMINATION, "");
    reply.status = &ok;
    head_reply_committed(h, req, &reply.base);
}

static int selected(const struct head_node *n, const Ray__Rpc__GetAllNodeInfoRequest *m)
{
    if (m->_state_filter_case != RAY__RPC__GET_ALL_NODE_INFO_REQUEST___STATE_FILTER__NOT_SET &&
        n->info->state != m->state_filter)
        return 0;
    for (size_t i = 0; i < m->n_node_selectors; i++) {
        const Ray__Rpc__GetAllNodeInfoRequest__NodeSelector *s = m->node_selectors[i];
        switch (s->node_selector_case) {
        case RAY__RPC__GET_ALL_NODE_INFO_REQUEST__NODE_SELECTOR__NODE_SELECTOR_NODE_ID:
            if (s->node_id.len == MB_NODE_ID_BYTES &&
                memcmp(s->node_id.data, n->id, MB_NODE_ID_BYTES) == 0)
                return 1;
            break;
        case RAY__RPC__GET_ALL_NODE_INFO_REQUEST__NODE_SELECTOR__NODE_SELECTOR_NODE_NAME:
            if (strcmp(s->node_name, n->info->node_name) == 0)
                return 1;
            break;
        case RAY__RPC__GET_ALL_NODE_INFO_REQUEST__NODE_SELECTOR__NODE_SELECTOR_NODE_IP_ADDRESS:
            if (strcmp(s->node_ip_address, n->info->node_manager_address) == 0)
                return 1;
            break;
        case RAY__RPC__GET_ALL_NODE_INFO_REQUEST__NODE_SELECTOR__NODE_SELECTOR_IS_HEAD_NODE:
            if (s->is_head_node == n->info->is_head_node)
                return 1;
            break;
        default:
            break;
        }
    }
    return m->n_node_selectors == 0;
}

static void get_all_node_info(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Ray__Rpc__GetAllNodeInfoRequest *m = (const Ray__Rpc__GetAllNodeInfoRequest *)request;
    Ray__Rpc__GetAllNodeInfoReply reply = RAY__RPC__GET_ALL_NODE_INFO_REPLY__INIT;
    Ray__Rpc__GcsStatus ok = RAY__RPC__GCS_STATUS__INIT;
    struct mb_arena a = {0};
    size_t limit = h->n_nodes;

    if (!head_admits(h, req))
        return;
    if (m->_limit_case != RAY__RPC__GET_ALL_NODE_INFO_REQUEST___LIMIT__NOT_SET && m->limit >= 0 &&
        (size_t)m->limit < limit)
        limit = (size_t)m->limit;
    reply.node_info_list = mb_arena_calloc(&a, h->n_nodes + 1, sizeof *reply.node_info_list);
    if (!reply.node_info_list) {
        mb_grpc_reply_error(req, MB_GRPC_RESOURCE_EXHAUSTED, "out of memory");
        return;
    }
    for (size_t i = 0; i < h->n_nodes; i++) {
        if (!selected(h->nodes[i], m))
            reply.num_filtered++;
        else if (reply.n_node_info_list < limit)
            reply.node_info_list[reply.n_node_info_list++] = h->nodes[i]->info;
    }
    reply.status = &ok;
    reply.total = (int64_t)h->n_nodes;
    mb_grpc_reply(req, &reply.base);
    mb_arena_close(&a);
}

static int named(const Ray__Rpc__GetAllNodeAddressAndLivenessRequest *m, const struct head_node *n)
{
    for (size_t i = 0; i < m->n_node_ids; i++)
        if (m->node_ids[i].len == MB_NODE_ID_BYTES &&
            memcmp(m->node_ids[i].data, n->id, MB_NODE_ID_BYTES) == 0)
            return 1;
    return m->n_node_ids == 0;
}

static void get_liveness(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Ray__Rpc__GetAllNodeAddressAndLivenessRequest *m =
        (const Ray__Rpc__GetAllNodeAddressAndLivenessRequest *)request;
    Ray__Rpc__GetAllNodeAddressAndLivenessReply reply =
        RAY__RPC__GET_ALL_NODE_ADDRESS_AND_LIVENESS_REPLY__INIT;
    Ray__Rpc__GcsStatus ok = RAY__RPC__GCS_STATUS__INIT;
    struct mb_arena a = {0};

    if (!head_admits(h, req))
        return;
    Ray__Rpc__GcsNodeAddressAndLiveness *rows = mb_arena_calloc(&a, h->n_nodes + 1, sizeof *rows);
    reply.node_info_list = mb_arena_calloc(&a, h->n_nodes + 1, sizeof *reply.node_info_list);
    for (size_t i = 0; rows && reply.node_info_list && i < h->n_nodes; i++) {
        const Ray__Rpc__GcsNodeInfo *info = h->nodes[i]->info;
        Ray__Rpc__GcsNodeAddressAndLiveness *row = &rows[reply.n_node_info_list];
        if (!named(m, h->nodes[i]) ||
            (m->_state_filter_case !=
                 RAY__RPC__GET_ALL_NODE_ADDRESS_AND_LIVENESS_REQUEST___STATE_FILTER__NOT_SET &&
             info->state != m->state_filter))
            continue;
        ray__rpc__gcs_node_address_and_liveness__init(row);
        row->node_id = info->node_id;
        row->node_manager_address = info->node_manager_address;
        row->node_manager_port = info->node_manager_port;
        row->object_manager_port = info->object_manager_port;
        row->state = info->state;
        row->death_info = info->death_info;
        reply.node_info_list[reply.n_node_info_list++] = row;
    }
    reply.status = &ok;
    if (rows && reply.node_info_list)
        mb_grpc_reply(req, &reply.base);
    else
        mb_grpc_reply_error(req, MB_GRPC_RESOURCE_EXHAUSTED, "out of memory");
    mb_arena_close(&a);
}

static void check_alive(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct mb_head *h = arg;
    const Ray__Rpc__CheckAliveRequest *m = (const Ray__Rpc__CheckAliveRequest *)request;
    Ray__Rpc__CheckAliveReply reply = RAY__RPC__CHECK_ALIVE_REPLY__INIT;
    Ray__Rpc__GcsStatus ok = RAY__RPC__GCS_STATUS__INIT;
    struct mb_arena a = {0};

    if (!head_admits(h, req))
        return;
    reply.raylet_alive = mb_arena_calloc(&a, m->n_node_ids + 1, sizeof *reply.raylet_alive);
    if (!reply.raylet_alive) {
        mb_grpc_reply_error(req, MB_GRPC_RESOURCE_EXHAUSTED, "out of memory");
        return;
    }
    for (size_t i = 0; i < m->n_node_ids; i++) {
        struct head_node *n = head_node_find(h, m->node_ids[i]);
        reply.raylet_alive[i] = n && head_node_alive(n);
    }
    reply.status = &ok;
    reply.n_raylet_alive = m->n_node_ids;
    reply.ray_version = h->ray_version;
    reply._is_leader_case = RAY__RPC__CHECK_ALIVE_REPLY___IS_LEADER_IS_LEADER;
    reply.is_leader = 1;
    mb_grpc_reply(req, &reply.base);
    mb_arena_close(&a);
}

int head_nodes_methods(struct mb_head *h, struct mb_err *err)
{
#define SERVICE "/ray.rpc.NodeInfoGcsService/"
    static const struct mb_grpc_method methods[] = {
        {SERVICE "GetClusterId", &ray__rpc__get_cluster_id_request__descriptor, get_cluster_id,
         NULL, 0},
        {SERVICE "RegisterNode", &ray__rpc__register_node_request__descriptor, register_node, NULL,
         0},
        {SERVICE "UnregisterNode", &ray__rpc__unregister_node_request__descriptor, unregister_node,
         NULL, 0},
        {SERVICE "GetAllNodeInfo", &ray__rpc__get_all_node_info_request__descriptor,
         get_all_node_info, NULL, 0},
        {SERVICE "GetAllNodeAddressAndLiveness",
         &ray__rpc__get_all_node_address_and_liveness_request__descriptor, get_liveness, NULL, 0},
        {SERVICE "CheckAlive", &ray__rpc__check_alive_request__descriptor, check_alive, NULL, 0},
        {"/mobula.v1.Head/MoveNode", &mobula__v1__move_node_request__descriptor, move_node, NULL,
         0},
    };
#undef SERVICE
    return mb_grpc_server_add(h->server, methods, sizeof methods / sizeof methods[0], h, err);
}
