/*
 * Membership of the cluster.
 *
 * Happy path: connect -> (an old id: unregister it) -> register -> sync and watch -> leave.
 *
 *  1. The head is not reachable within the connect timeout: progress is logged every 5 s, then
 *     on_failed. Later losses of the head are waited out: the client reconnects by itself.
 *  2. An old id of this directory that is ALIVE in the same cluster is resumed: the head is told
 *     where the node is now (MoveNode); no registration, only sync and watch. A real GCS cannot be
 *     told: there it is resumed when its port is the same.
 *     A commit that finds nobody Ray does not send again: it looks for another place, finds none
 *     while this agent is away, and looks no more until a node joins. So one that died with a
 *     promise that was not committed joins as a new node, and keeps its gangs as in 4.
 *  3. Any other old id is unregistered first. A real GCS gives no answer for an id it has removed,
 *     so that call has 2 s and its outcome does not matter.
 *  4. Declared dead (on_given_up), or another cluster at the address (on_reset): a fresh id,
 * register again. Failures then are retried every 2 s for as long as the agent runs.
 *  6. No answer to a registration, or to the question of 2, says nothing: it is asked again, and
 *     registered again under the same id, which may be in the table already, or dead: then as 4.
 *  5. The sync stream stays until the head has answered to the leave: Ray's GCS aborted once in
 * some twenty leaves whose stream was cancelled meanwhile. Leaving while unregistered or
 * unreachable ends after 2 s at the latest.
 */
#include "agent/node.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "agent/group_rows.h"
#include "agent/neighbour.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/client.h"

enum {
    PROGRESS_MS = 5000,
    RETRY_MS = 2000,
    FIRST_REGISTER_MS = 60000, /* for this long the first registration may stay unanswered */
    LEAVE_MS = 2000,
    CALL_MS = 10000,
    CHECK_MS = 2000, /* asked twice before the head's health check gives up on the node */
    IDLE_REFRESH_MS = 5000,
    IDENTITY_MAX = 4096,
    LABELS_MAX = 64
};

#define ACCELERATOR_LABEL "ray.io/accelerator-type"

enum phase {
    PH_NEW,
    PH_CONNECTING,
    PH_MOVING,
    PH_CHECKING,
    PH_UNREGISTERING,
    PH_REGISTERING,
    PH_ALIVE,
    PH_GONE
};

struct mb_node {
    uv_loop_t *loop;
    struct mb_ledger *ledger;
    struct mb_node_opts opts;
    const struct mb_node_ops *ops;
    void *arg;
    struct mb_gcs *gcs;
    struct mb_grpc *grpc;
    enum phase phase;
    uint8_t id[MB_NODE_ID_BYTES];
    char id_hex[2 * MB_NODE_ID_BYTES + 1];
    int has_id; /* id was registered, or is about to be */
    int has_former;
    uint8_t former_id[MB_NODE_ID_BYTES];
    char former_hex[2 * MB_NODE_ID_BYTES + 1];
    char former_cluster[2 * MB_NODE_ID_BYTES + 1];
    int former_port;
    int grpc_port;
    int http_port;
    int was_alive;
    int is_retry; /* the timer ends a pause */
    int is_cut_off;
    uint64_t start_unix_ms;
    uint64_t wait_since_ms;
    uint64_t register_by_ms; /* 0: not begun */
    uint64_t idle_since_ms;  /* 0: busy */
    int is_draining;
    int64_t drain_deadline_unix_ms;
    struct mb_gcs_label labels[LABELS_MAX];
    size_t n_labels;
    uv_timer_t timer; /* progress, retry or idle refresh, by phase */
    void (*leave_cb)(void *arg);
    void *leave_arg;
    void (*close_cb)(void *arg);
    void *close_arg;
    int closing; /* parts that are not closed yet */
};

static void begin_registration(struct mb_node *n);
static void on_timer(uv_timer_t *t);

/* ---- identity on disk ---- */

static char *identity_path(const struct mb_node *n)
{
    return mb_path_join(n->opts.node_dir, "identity.json");
}

static void load_identity(struct mb_node *n)
{
    char *path = identity_path(n);
    struct mb_buf text = {0};
    const char *id = NULL, *cluster = NULL;
    json_t *o = NULL;
    int port = 0;

    if (path != NULL && mb_fs_exists(path) && mb_fs_read(path, IDENTITY_MAX, &text, NULL) == MB_OK)
        o = json_loads(mb_buf_str(&text), 0, NULL);
    if (json_unpack(o, "{s:s, s:s, s:i}", "node_id", &id, "cluster_id", &cluster, "port", &port) ==
            0 &&
        mb_unhex(id, n->former_id, sizeof(n->former_id)) == MB_OK &&
        strlen(cluster) < sizeof(n->former_cluster)) {
        snprintf(n->former_cluster, sizeof(n->former_cluster), "%s", cluster);
        n->former_port = port;
        mb_hex(n->former_id, sizeof(n->former_id), n->former_hex);
        n->has_former = 1;
    }
    json_decref(o);
    mb_buf_close(&text);
    mb_free(path);
}

static void save_identity(struct mb_node *n)
{
    char *path = identity_path(n);
    char text[512];
    struct mb_err err = {0};
    int len = snprintf(text, sizeof(text),
                       "{\"node_id\": \"%s\", \"cluster_id\": \"%s\", \"port\": %d}\n", n->id_hex,
                       mb_gcs_cluster_id(n->gcs), n->grpc_port);

    if (path == NULL || mb_fs_write_atomic(path, text, (size_t)len, 0644, &err) != MB_OK)
        mb_warn("node", "cannot keep the node id for a restart: %s", err.text);
    mb_free(path);
}

static void set_id(struct mb_node *n, const uint8_t id[MB_NODE_ID_BYTES])
{
    memcpy(n->id, id, sizeof(n->id));
    n->has_id = 1;
    mb_hex(n->id, sizeof(n->id), n->id_hex);
}

/* On disk before the head hears of it: an agent that is killed meanwhile comes back as the same. */
static void set_fresh_id(struct mb_node *n)
{
    uint8_t id[MB_NODE_ID_BYTES];

    mb_random_bytes(id, sizeof(id));
    set_id(n, id);
    save_identity(n);
}

/* ---- what the cluster is told ---- */

static int is_not_told(void *arg, const struct mb_pg_id *pg)
{
    (void)arg;
    (void)pg;
    return 0;
}

static int is_labelled(const struct mb_node *n, const char *key)
{
    for (size_t i = 0; i < n->opts.n_labels; i++)
        if (strcmp(n->opts.labels[i].key, key) == 0)
            return 1;
    return 0;
}

/* What the user says counts more than what was found. */
static void build_labels(struct mb_node *n)
{
    n->n_labels = 0;
    n->labels[n->n_labels++] = (struct mb_gcs_label){"ray.io/node-id", n->id_hex};
    n->labels[n->n_labels++] = (struct mb_gcs_label){MB_NODE_LABEL_VERSION, MOBULA_VERSION};
    if (n->opts.accelerator[0] != '\0' && !is_labelled(n, ACCELERATOR_LABEL))
        n->labels[n->n_labels++] = (struct mb_gcs_label){ACCELERATOR_LABEL, n->opts.accelerator};
    for (size_t i = 0; i < n->opts.n_labels && n->n_labels < LABELS_MAX; i++)
        n->labels[n->n_labels++] = n->opts.labels[i];
}

/* Until the arena is closed. In a registration no group has rows: they come and go. */
static int build_view(struct mb_node *n, int is_registration, struct mb_arena *a,
                      struct mb_gcs_view *v, struct mb_err *err)
{
    struct mb_gcs_resource *available, *total;
    size_t n_rows;
    int rc =
        is_registration
            ? mb_group_rows(a, n->ledger, is_not_told, NULL, &available, &total, &n_rows)
            : mb_group_rows(a, n->ledger, n->ops->is_told, n->arg, &available, &total, &n_rows);

    if (rc != MB_OK)
        return mb_err_set(err, rc, "no memory for what the cluster is told");
    *v = (struct mb_gcs_view){
        .available = available,
        .n_available = n_rows,
        .total = total,
        .n_total = n_rows,
        .labels = n->labels,
        .n_labels = n->n_labels,
        .idle_ms = (int64_t)mb_node_idle_ms(n),
        .is_draining = n->is_draining,
        .draining_deadline_unix_ms = n->drain_deadline_unix_ms,
    };
    return MB_OK;
}

/* tell: mb_gcs_sync_set, or _renew. */
static void tell_view(struct mb_node *n,
                      int (*tell)(struct mb_gcs *c, const struct mb_gcs_view *view,
                                  struct mb_err *err))
{
    struct mb_arena a = {0};
    struct mb_gcs_view view;
    struct mb_err err = {0};

    if (build_view(n, 0, &a, &view, &err) != MB_OK || tell(n->gcs, &view, &err) != MB_OK)
        mb_warn("node", "cannot report resources: %s", err.text);
    mb_arena_close(&a);
}

void mb_node_changed(struct mb_node *n)
{
    if (mb_ledger_count(n->ledger) > 0)
        n->idle_since_ms = 0;
    else if (n->idle_since_ms == 0)
        n->idle_since_ms = mb_mono_ms();
    if (n->phase != PH_ALIVE)
        return;
    tell_view(n, mb_gcs_sync_set);
}

void mb_node_drain(struct mb_node *n, int64_t deadline_unix_ms)
{
    n->is_draining = 1;
    n->drain_deadline_unix_ms = deadline_unix_ms;
    mb_node_changed(n);
}

/* ---- becoming ALIVE ---- */

static void try_again(struct mb_node *n, const char *what, const struct mb_err *err)
{
    mb_warn("node", "%s, trying again: %s", what, err->text);
    n->phase = PH_CONNECTING;
    n->is_retry = 1;
    uv_timer_start(&n->timer, on_timer, RETRY_MS, 0);
}

/* The head may have done what it was asked for. */
static int is_unanswered(const struct mb_err *err)
{
    return err->code == MB_ETIMEOUT || err->code == MB_EUNAVAIL;
}

static void failed(struct mb_node *n, const struct mb_err *err)
{
    if (!n->was_alive) {
        n->phase = PH_GONE;
        uv_timer_stop(&n->timer);
        n->ops->on_failed(n->arg, err);
        return;
    }
    try_again(n, "registration failed", err);
}

static void on_announced(void *arg, const struct mb_err *err, int64_t count)
{
    (void)arg;
    (void)count;
    if (err->code != MB_OK && err->code != MB_ECANCELED)
        mb_warn("node", "Ray's tools will not find the logs of this node: %s", err->text);
}

static void announce_agent(struct mb_node *n)
{
    struct mb_gcs_node here = {
        .ip = n->opts.ip, .port = n->grpc_port, .agent_http_port = n->http_port};
    struct mb_err err = {0};

    memcpy(here.node_id, n->id, sizeof(here.node_id));
    if (mb_gcs_announce_agent(n->gcs, &here, CALL_MS, on_announced, n, NULL, &err) != MB_OK)
        on_announced(n, &err, 0);
}

static void now_alive(struct mb_node *n)
{
    int is_first = !n->was_alive, rc;
    struct mb_arena a = {0};
    struct mb_gcs_view view;
    struct mb_err err = {0};

    rc = build_view(n, 0, &a, &view, &err);
    if (rc == MB_OK)
        rc = mb_gcs_sync_start(n->gcs, n->id, &view, &err);
    mb_arena_close(&a);
    if (rc == MB_OK)
        rc = mb_gcs_watch_node(n->gcs, n->id, &err);
    if (rc != MB_OK) {
        failed(n, &err);
        return;
    }
    n->phase = PH_ALIVE;
    n->was_alive = 1;
    uv_timer_start(&n->timer, on_timer, IDLE_REFRESH_MS, IDLE_REFRESH_MS);
    announce_agent(n);
    if (is_first)
        mb_neighbour_look(n->gcs, n->opts.ip);
    n->ops->on_alive(n->arg);
}

static void reset(struct mb_node *n, const char *why, void (*tell)(void *arg, const char *why));

static void on_registered(void *arg, const struct mb_err *err)
{
    struct mb_node *n = arg;

    if (n->phase != PH_REGISTERING)
        return;
    if (err->code == MB_OK)
        now_alive(n);
    else if (is_unanswered(err) && mb_mono_ms() < n->register_by_ms)
        try_again(n, "no answer to the registration", err);
    else if (err->code == MB_EEXIST) /* an earlier try came through */
        reset(n, "the head declared this node dead before it was heard of again",
              n->ops->on_given_up);
    else
        failed(n, err);
}

static void register_now(struct mb_node *n)
{
    char hostname[256] = "";
    struct mb_arena a = {0};
    struct mb_gcs_view view = {0};
    struct mb_gcs_node node;
    struct mb_err err = {0};
    int rc;

    gethostname(hostname, sizeof(hostname) - 1);
    if (!n->has_id)
        set_fresh_id(n);
    build_labels(n);
    rc = build_view(n, 1, &a, &view, &err);
    node = (struct mb_gcs_node){
        .ip = n->opts.ip,
        .port = n->grpc_port,
        .hostname = hostname,
        .node_name = n->opts.node_name,
        .node_type_name = "mobula",
        .temp_dir = n->opts.temp_dir,
        .session_dir = n->opts.session_dir,
        .agent_http_port = n->http_port,
        .metrics_port = n->http_port,
        .is_head = n->opts.is_head,
        .start_unix_ms = n->start_unix_ms,
        .resources = view.total,
        .n_resources = view.n_total,
        .labels = n->labels,
        .n_labels = n->n_labels,
    };
    memcpy(node.node_id, n->id, sizeof(node.node_id));
    n->phase = PH_REGISTERING;
    if (rc == MB_OK)
        rc = mb_gcs_register_node(n->gcs, &node, CALL_MS, on_registered, n, NULL, &err);
    mb_arena_close(&a);
    if (rc != MB_OK)
        failed(n, &err);
}

static void on_former_gone(void *arg, const struct mb_err *err)
{
    struct mb_node *n = arg;

    if (n->phase != PH_UNREGISTERING)
        return;
    if (err->code != MB_OK && err->code != MB_ETIMEOUT)
        mb_info("node", "the former node id could not be unregistered: %s", err->text);
    register_now(n);
}

static void end_former(struct mb_node *n)
{
    struct mb_err err;

    n->has_former = 0;
    n->phase = PH_UNREGISTERING;
    if (mb_gcs_unregister_node(n->gcs, n->former_id, MB_GCS_DEATH_EXPECTED,
                               "the agent was restarted", LEAVE_MS, on_former_gone, n, NULL,
                               &err) != MB_OK)
        on_former_gone(n, &err);
}

static void unregister_former(struct mb_node *n)
{
    n->ops->on_reset(n->arg, "this agent's former node id is not in use any more");
    end_former(n);
}

static void resume_former(struct mb_node *n)
{
    n->has_former = 0;
    set_id(n, n->former_id);
    if (n->former_port != n->grpc_port)
        save_identity(n);
    build_labels(n);
    mb_info("node", "resuming as the node that this agent was before its restart id=%.8s",
            n->id_hex);
    now_alive(n);
}

static void on_former_checked(void *arg, const struct mb_err *err, int64_t count)
{
    struct mb_node *n = arg;

    if (n->phase != PH_CHECKING)
        return;
    if (err->code == MB_OK && count == 1 && mb_ledger_prepared(n->ledger) == 0) {
        resume_former(n);
    } else if (err->code == MB_OK && count == 1) {
        n->ops->on_given_up(n->arg, "the agent was away when a bundle was to be committed");
        end_former(n);
    } else if (is_unanswered(err)) {
        try_again(n, "the head did not say whether it still has this node", err);
    } else {
        unregister_former(n);
    }
}

/* Ray before 2.60 cannot be asked about one node. */
static void on_former_listed(void *arg, const struct mb_err *err, const struct mb_gcs_node *nodes,
                             size_t count)
{
    const struct mb_node *n = arg;
    int64_t is_alive = 0;

    for (size_t i = 0; i < count; i++)
        is_alive |=
            !nodes[i].is_dead && memcmp(nodes[i].node_id, n->former_id, sizeof(n->former_id)) == 0;
    on_former_checked(arg, err, is_alive);
}

/* A head that knows no MoveNode has the node where it registered. */
static void check_former(struct mb_node *n)
{
    struct mb_err err;
    int rc = MB_ESTATE;

    n->phase = PH_CHECKING;
    if (n->former_port == n->grpc_port)
        rc = mb_gcs_check_alive(n->gcs, n->former_id, CHECK_MS, on_former_checked, n, NULL, &err);
    if (rc == MB_EUNSUPPORTED)
        rc = mb_gcs_nodes(n->gcs, CHECK_MS, on_former_listed, n, NULL, &err);
    if (rc != 0)
        unregister_former(n);
}

static void on_former_moved(void *arg, const struct mb_err *err)
{
    struct mb_node *n = arg;

    if (n->phase != PH_MOVING)
        return;
    if (err->code == MB_OK)
        resume_former(n);
    else if (is_unanswered(err))
        try_again(n, "the head did not say whether it still has this node", err);
    else if (err->code == MB_EUNSUPPORTED)
        check_former(n);
    else
        unregister_former(n);
}

static void move_former(struct mb_node *n)
{
    struct mb_gcs_node here = {
        .ip = n->opts.ip, .port = n->grpc_port, .agent_http_port = n->http_port};
    struct mb_err err;

    memcpy(here.node_id, n->former_id, sizeof(here.node_id));
    n->phase = PH_MOVING;
    if (mb_gcs_move_node(n->gcs, &here, CHECK_MS, on_former_moved, n, NULL, &err) != MB_OK)
        unregister_former(n);
}

static void begin_registration(struct mb_node *n)
{

    uv_timer_stop(&n->timer);
    n->is_retry = 0;
    if (n->register_by_ms == 0)
        n->register_by_ms = mb_mono_ms() + FIRST_REGISTER_MS;
    if (!n->has_former) {
        register_now(n);
        return;
    }
    if (strcmp(n->former_cluster, mb_gcs_cluster_id(n->gcs)) != 0) {
        n->has_former = 0;
        n->ops->on_other_cluster(n->arg);
        n->ops->on_reset(n->arg, "the cluster is another one than before the restart");
        register_now(n);
        return;
    }
    move_former(n);
}

static void reconnect(struct mb_node *n)
{
    struct mb_err err;

    n->phase = PH_CONNECTING;
    if (mb_gcs_connected(n->gcs))
        begin_registration(n);
    else if (mb_gcs_connect(n->gcs, &err) != MB_OK)
        failed(n, &err);
}

static void on_timer(uv_timer_t *t)
{
    struct mb_node *n = t->data;

    if (n->phase == PH_ALIVE) {
        if (n->idle_since_ms !=
            0) /* no message of its own: an idle node wakes as seldom as it can */
            tell_view(n, mb_gcs_sync_renew);
    } else if (n->is_retry) {
        reconnect(n);
    } else if (n->phase == PH_CONNECTING) {
        mb_info("node", "waiting for the head at %s waited_s=%llu", n->opts.gcs_address,
                (unsigned long long)((mb_mono_ms() - n->wait_since_ms) / 1000));
    }
}

static void reset(struct mb_node *n, const char *why, void (*tell)(void *arg, const char *why))
{
    mb_warn("node", "%s: registering under a new id", why);
    mb_gcs_unwatch(n->gcs);
    mb_gcs_sync_stop(n->gcs);
    n->has_id = 0;
    n->phase = PH_CONNECTING;
    tell(n->arg, why);
    reconnect(n);
}

static void set_cut_off(struct mb_node *n, int is_cut_off)
{
    if (n->is_cut_off != is_cut_off)
        n->ops->on_cut_off(n->arg, is_cut_off);
    n->is_cut_off = is_cut_off;
}

static void on_gcs(void *arg, struct mb_gcs *gcs, enum mb_gcs_event event, const struct mb_err *err)
{
    struct mb_node *n = arg;
    const char *note;

    set_cut_off(n, event == MB_GCS_UNREACHABLE);
    switch (event) {
    case MB_GCS_CONNECTED:
        note = mb_gcs_version_note(mb_gcs_ray_version(gcs));
        if (note != NULL)
            mb_warn("node", "the head is Ray %s, %s", mb_gcs_ray_version(gcs), note);
        if (n->phase == PH_CONNECTING)
            begin_registration(n);
        break;
    case MB_GCS_CONNECT_FAILED:
        if (n->phase == PH_CONNECTING)
            failed(n, err);
        break;
    case MB_GCS_CLUSTER_CHANGED:
        n->ops->on_other_cluster(n->arg);
        if (n->phase != PH_GONE)
            reset(n, "another cluster answers at the head's address", n->ops->on_reset);
        break;
    case MB_GCS_NODE_DEAD:
        if (n->phase == PH_ALIVE)
            reset(n, "the head declared this node dead", n->ops->on_given_up);
        break;
    case MB_GCS_UNREACHABLE:
        mb_warn("node", "the head at %s does not answer; gangs go on: %s", n->opts.gcs_address,
                err->text);
        break;
    case MB_GCS_REACHABLE:
        mb_info("node", "the head at %s answers again", n->opts.gcs_address);
        mb_node_changed(n);
        break;
    }
}

/* ---- life ---- */

int mb_node_create(uv_loop_t *loop, struct mb_grpc *grpc, struct mb_ledger *ledger,
                   const struct mb_node_opts *opts, const struct mb_node_ops *ops, void *arg,
                   struct mb_node **out, struct mb_err *err)
{
    struct mb_node *n = mb_calloc(1, sizeof(*n));

    if (n == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory for the node");
    n->loop = loop;
    n->grpc = grpc;
    n->ledger = ledger;
    n->opts = *opts;
    n->ops = ops;
    n->arg = arg;
    n->start_unix_ms = mb_unix_ms();
    n->idle_since_ms = mb_mono_ms();
    uv_timer_init(loop, &n->timer);
    n->timer.data = n;
    load_identity(n);
    *out = n;
    return MB_OK;
}

const char *mb_node_former_hex(const struct mb_node *n)
{
    return n->former_hex;
}

int mb_node_former_port(const struct mb_node *n)
{
    return n->has_former ? n->former_port : 0;
}

int mb_node_start(struct mb_node *n, int grpc_port, int http_port, struct mb_err *err)
{
    struct mb_gcs_opts opts = {.address = n->opts.gcs_address,
                               .token = n->opts.token,
                               .connect_timeout_ms = n->opts.connect_timeout_ms,
                               .max_message_bytes = n->opts.max_message_bytes};
    int rc;

    n->grpc_port = grpc_port;
    n->http_port = http_port;
    rc = mb_gcs_create(n->loop, n->grpc, &opts, on_gcs, n, &n->gcs, err);
    if (rc == MB_OK)
        rc = mb_gcs_connect(n->gcs, err);
    if (rc != MB_OK)
        return rc;
    n->phase = PH_CONNECTING;
    n->wait_since_ms = mb_mono_ms();
    uv_timer_start(&n->timer, on_timer, PROGRESS_MS, PROGRESS_MS);
    return MB_OK;
}

static void on_left(void *arg, const struct mb_err *err)
{
    struct mb_node *n = arg;
    void (*cb)(void *) = n->leave_cb;

    if (err->code != MB_OK)
        mb_warn("node", "could not unregister: %s", err->text);
    else
        mb_info("node", "unregistered id=%.8s", n->id_hex);
    n->leave_cb = NULL;
    if (cb != NULL)
        cb(n->leave_arg);
}

void mb_node_leave(struct mb_node *n, enum mb_gcs_death reason, const char *text,
                   void (*cb)(void *arg), void *arg)
{
    int registered = n->phase == PH_ALIVE || /* or perhaps */
                     ((n->phase == PH_REGISTERING || n->phase == PH_CONNECTING) && n->has_id);
    struct mb_err err;

    n->phase = PH_GONE;
    uv_timer_stop(&n->timer);
    n->leave_cb = cb;
    n->leave_arg = arg;
    if (registered) {
        mb_gcs_unwatch(n->gcs);
        if (mb_gcs_unregister_node(n->gcs, n->id, reason, text, LEAVE_MS, on_left, n, NULL, &err) ==
            MB_OK)
            return;
        mb_warn("node", "could not unregister: %s", err.text);
    }
    n->leave_cb = NULL;
    if (cb != NULL)
        cb(arg);
}

static void part_closed(struct mb_node *n)
{
    if (--n->closing > 0)
        return;
    void (*cb)(void *) = n->close_cb;
    void *arg = n->close_arg;

    if (cb != NULL)
        cb(arg);
}

static void on_gcs_closed(void *arg)
{
    part_closed(arg);
}

static void on_timer_closed(uv_handle_t *h)
{
    part_closed(h->data);
}

void mb_node_close(struct mb_node *n, void (*cb)(void *arg), void *arg)
{
    n->phase = PH_GONE;
    n->leave_cb = NULL;
    n->close_cb = cb;
    n->close_arg = arg;
    n->closing = n->gcs != NULL ? 2 : 1;
    if (n->gcs != NULL)
        mb_gcs_close(n->gcs, on_gcs_closed, n);
    uv_close((uv_handle_t *)&n->timer, on_timer_closed);
}

void mb_node_destroy(struct mb_node *n)
{
    mb_free(n);
}

int mb_node_is_alive(const struct mb_node *n)
{
    return n->phase == PH_ALIVE;
}

int mb_node_is_draining(const struct mb_node *n)
{
    return n->is_draining;
}

int64_t mb_node_drain_deadline_ms(const struct mb_node *n)
{
    return n->drain_deadline_unix_ms;
}

const uint8_t *mb_node_id(const struct mb_node *n)
{
    return n->id;
}

const char *mb_node_id_hex(const struct mb_node *n)
{
    return n->id_hex;
}

const struct mb_gcs_label *mb_node_labels(const struct mb_node *n, size_t *count)
{
    *count = n->n_labels;
    return n->labels;
}

uint64_t mb_node_idle_ms(const struct mb_node *n)
{
    return n->idle_since_ms == 0 ? 0 : mb_mono_ms() - n->idle_since_ms + 1;
}

struct mb_gcs *mb_node_gcs(struct mb_node *n)
{
    return n->gcs;
}
