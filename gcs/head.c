/*
 * The embedded head: life cycle and what its services share.
 *
 *  1. start: open the store, find or make the cluster id, load nodes, groups and jobs, seed the KV
 *     keys that Ray's tools read, listen on both ports, ask the runner for the jobs that ran.
 *  2. A tick every 500 ms drives health checks and long polls.
 *     With a shared store: both ports listen and refuse until the lease is won; then the same.
 *     As a guest of Ray's head (guest.c): no ports, only its jobs.
 *  3. stop: waiting calls are answered UNAVAILABLE, HTTP stops, the store commits what it has; from
 *     then on every call is answered UNAVAILABLE until the gRPC runtime itself is stopped.
 * Failure paths:
 *  4. Any step of start fails: what was opened is closed again, the error names the step.
 *  5. A store write fails: its call gets the error; nothing was changed.
 */
#include "gcs/head.h"

#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/guest.h"

enum { PACKAGE_BYTES_MAX = 100 << 20, PACKAGE_KEEP_MS = 3600 * 1000 };

struct mb_blob head_blob(const void *p, size_t n)
{
    return (struct mb_blob){p, n};
}

const char *head_closed(struct mb_head *h)
{
    if (h->stopping)
        return "the head is stopping";
    if (h->standby)
        return h->closed_text;
    if (h->redis && !mb_redis_is_head(h->redis))
        return "the head's lease is in doubt: its store does not answer";
    return h->guest ? head_guest_closed(h->guest) : NULL;
}

static const char *http_closed(void *arg)
{
    return head_closed(arg);
}

int head_admits(struct mb_head *h, struct mb_grpc_req *req)
{
    const char *cluster = mb_grpc_req_metadata(req, "ray_cluster_id");
    const char *closed = head_closed(h);

    if (closed) {
        mb_grpc_reply_error(req, MB_GRPC_UNAVAILABLE, "%s", closed);
        return 0;
    }
    if (cluster && strcmp(cluster, h->cluster_hex) != 0) {
        mb_grpc_reply_error(req, MB_GRPC_UNAUTHENTICATED,
                            "WrongClusterID: Perhaps the client is accessing GCS after it has "
                            "restarted.");
        return 0;
    }
    return 1;
}

void head_reply_err(struct mb_grpc_req *req, const struct mb_err *err)
{
    int status = err->code == MB_ENOMEM || err->code == MB_EFULL ? MB_GRPC_RESOURCE_EXHAUSTED
                 : err->code == MB_EUNAVAIL                      ? MB_GRPC_UNAVAILABLE
                                                                 : MB_GRPC_INTERNAL;

    mb_grpc_reply_error(req, status, "%s", err->text);
}

struct committed {
    struct mb_grpc_req *req;
    ProtobufCMessage *reply;
};

static void on_committed(void *arg, const struct mb_err *err)
{
    struct committed *c = arg;

    if (err->code == 0)
        mb_grpc_reply(c->req, c->reply);
    else
        head_reply_err(c->req, err);
    protobuf_c_message_free_unpacked(c->reply, NULL);
    mb_free(c);
}

void head_reply_committed(struct mb_head *h, struct mb_grpc_req *req, const ProtobufCMessage *reply)
{
    struct committed *c = mb_calloc(1, sizeof *c);
    struct mb_err err = {0};

    mb_err_set(&err, MB_ENOMEM, "out of memory");
    if (c) {
        c->req = req;
        c->reply = mb_wire_copy(reply);
        if (c->reply && mb_tables_barrier(h->store, on_committed, c, &err) == 0)
            return;
        if (c->reply)
            protobuf_c_message_free_unpacked(c->reply, NULL);
        mb_free(c);
    }
    head_reply_err(req, &err);
}

int head_put_message(struct mb_head *h, enum mb_tables_table table, struct mb_blob key,
                     const ProtobufCMessage *m, struct mb_err *err)
{
    size_t n;
    void *bytes = mb_wire_pack(m, &n);

    if (!bytes)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    int rc =
        mb_tables_put(h->store, table, mb_blob_str(""), key, head_blob(bytes, n), NULL, NULL, err);
    mb_free(bytes);
    return rc;
}

/* ---- start ---- */

static int load_cluster_id(struct mb_head *h, struct mb_err *err)
{
    struct mb_blob value;
    int rc = 0;

    if (mb_tables_get(h->store, MB_TABLES_META, mb_blob_str(""), mb_blob_str("cluster_id"),
                      &value)) {
        if (value.n != MB_NODE_ID_BYTES)
            return mb_err_set(err, MB_ECORRUPT, "the store's cluster id has %zu bytes", value.n);
        memcpy(h->cluster_id, value.p, MB_NODE_ID_BYTES);
    } else if (h->expect_cluster) {
        return mb_err_set(err, MB_ECORRUPT,
                          "the store is empty, but this node belongs to cluster %.8s: restore "
                          "its data, or begin a new cluster with a new node (mobula stop, start)",
                          h->expect_cluster);
    } else {
        mb_random_bytes(h->cluster_id, MB_NODE_ID_BYTES);
        rc = mb_tables_put(h->store, MB_TABLES_META, mb_blob_str(""), mb_blob_str("cluster_id"),
                           head_blob(h->cluster_id, MB_NODE_ID_BYTES), NULL, NULL, err);
    }
    mb_hex(h->cluster_id, MB_NODE_ID_BYTES, h->cluster_hex);
    if (h->expect_cluster && strcmp(h->expect_cluster, h->cluster_hex) != 0)
        return mb_err_set(err, MB_ECORRUPT,
                          "the store holds cluster %.8s, but this node belongs to cluster %.8s: is "
                          "--store the right one?",
                          h->cluster_hex, h->expect_cluster);
    return rc;
}

int mb_head_expect_cluster(struct mb_head *h, const char *cluster_hex, struct mb_err *err)
{
    char *copy = mb_strdup(cluster_hex);

    if (!copy)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    mb_free(h->expect_cluster);
    h->expect_cluster = copy;
    return 0;
}

static int put_kv(struct mb_head *h, const char *ns, const char *key, struct mb_blob value,
                  struct mb_err *err)
{
    return mb_tables_put(h->store, MB_TABLES_KV, mb_blob_str(ns), mb_blob_str(key), value, NULL,
                         NULL, err);
}

/* What `ray start`, `ray status` and drivers look up before they do anything. */
static int seed_kv(struct mb_head *h, struct mb_err *err)
{
    char text[512];
    int rc;

    snprintf(text, sizeof text, "%s:%d", h->node_ip, h->http_port);
    rc = put_kv(h, "dashboard", "dashboard", mb_blob_str(text), err);
    if (rc == 0)
        rc = put_kv(h, "dashboard", "webui:url", mb_blob_str(text), err);
    if (rc == 0)
        rc = put_kv(h, "session", "session_name", mb_blob_str(h->session_name), err);
    if (rc == 0)
        rc =
            put_kv(h, "cluster", "ray_cluster_id", head_blob(h->cluster_id, MB_NODE_ID_BYTES), err);
    snprintf(text, sizeof text,
             "{\"ray_version\":\"%s\",\"python_version\":\"3.11.7\",\"ray_init_cluster\":false}",
             h->ray_version);
    if (rc == 0)
        rc = put_kv(h, "cluster", "CLUSTER_METADATA", mb_blob_str(text), err);
    /* "1": ask GetClusterStatus instead of a text that a monitor process writes. */
    if (rc == 0)
        rc = put_kv(h, "__autoscaler", "__autoscaler_v2_enabled", mb_blob_str("1"), err);
    return rc;
}

static int copy_opts(struct mb_head *h, const struct mb_head_opts *o)
{
    h->node_ip = mb_strdup(o->node_ip ? o->node_ip : "127.0.0.1");
    h->session_name = mb_strdup(o->session_name ? o->session_name : "session_mobula");
    h->session_dir = mb_strdup(o->session_dir ? o->session_dir : "");
    h->temp_dir = mb_strdup(o->temp_dir ? o->temp_dir : "");
    h->packages_dir = mb_strdup(o->packages_dir ? o->packages_dir : "");
    h->token = mb_strdup(o->token);
    h->expect_cluster = mb_strdup(o->expect_cluster);
    h->parts_token = (uint32_t)mb_random_u64();
    h->ray_version = mb_strdup(o->ray_version ? o->ray_version : "2.60.0");
    h->ray_commit = mb_strdup(o->ray_commit ? o->ray_commit : "mobula");
    if (!h->node_ip || !h->session_name || !h->session_dir || !h->temp_dir || !h->packages_dir ||
        !h->ray_version || !h->ray_commit || (o->token && !h->token))
        return MB_ENOMEM;
    return 0;
}

/* What to do about a port that is taken. */
static int in_use(struct mb_err *err, const char *flag)
{
    return mb_err_set(err, MB_EEXIST, "%.600s (--%s chooses another)", err->text, flag);
}

static int listen_grpc(struct mb_head *h, const struct mb_head_opts *o, struct mb_err *err)
{
    /* Waits and polls end by their client's deadline, so the bound of the server is far away. */
    struct mb_grpc_server_opts so = {.token = o->token, .unary_deadline_ms = 86400000};
    char addr[300];
    int rc = mb_grpc_server_create(h->grpc, &so, &h->server, err);

    if (rc == 0)
        rc = head_nodes_methods(h, err);
    if (rc == 0)
        rc = head_kv_methods(h, err);
    if (rc == 0)
        rc = head_jobinfo_methods(h, err);
    if (rc == 0)
        rc = head_placement_methods(h, err);
    if (rc == 0)
        rc = head_drivers_methods(h, err);
    if (rc == 0)
        rc = head_packages_methods(h, err);
    if (rc == 0)
        rc = head_placement_report_methods(h, err);
    if (rc == 0)
        rc = head_syncer_methods(h, err);
    if (rc == 0)
        rc = head_pubsub_methods(h, err);
    if (rc == 0)
        rc = head_status_methods(h, err);
    snprintf(addr, sizeof addr, "%s:%d", o->bind_addr ? o->bind_addr : "127.0.0.1", o->gcs_port);
    if (rc == 0)
        rc = mb_grpc_server_listen(h->server, addr, &h->gcs_port, err);
    return rc == 0           ? 0
           : rc == MB_EEXIST ? in_use(err, "port")
                             : mb_err_wrap(err, "GCS port %d", o->gcs_port);
}

static int listen_http(struct mb_head *h, const struct mb_head_opts *o, struct mb_err *err)
{
    struct mb_http_server_opts ho = {.bind_addr = o->http_addr ? o->http_addr : o->bind_addr,
                                     .is_local_too = o->is_http_local_too,
                                     .port = o->http_port,
                                     .token = o->token,
                                     .max_body_bytes = 16 << 20,
                                     .closed = http_closed,
                                     .closed_arg = h,
                                     .browser_guard_status = 405};
    int rc = mb_http_server_create(h->loop, &ho, &h->http, err);

    if (rc == 0)
        rc = head_cluster_routes(h, err);
    if (rc == 0)
        rc = head_jobs_routes(h, err);
    if (rc == 0)
        rc = head_packages_routes(h, err);
    if (rc == 0)
        rc = mb_http_server_listen(h->http, &h->http_port, err);
    return rc == 0           ? 0
           : rc == MB_EEXIST ? in_use(err, "dashboard-port")
                             : mb_err_wrap(err, "dashboard port %d", o->http_port);
}

static void on_tick(uv_timer_t *timer)
{
    struct mb_head *h = timer->data;
    uint64_t now = mb_mono_ms();

    head_nodes_tick(h, now);
    head_pubsub_tick(h, now);
    head_jobs_tick(h);
    head_packages_tick(h, now);
    head_forget_tick(h, now);
}

static void free_head(struct mb_head *h)
{
    head_nodes_free(h);
    head_jobs_free(h);
    head_forget_close(h);
    mb_placement_destroy(h->placement);
    mb_http_server_destroy(h->http);
    mb_http_client_destroy(h->second_http);
    mb_free(h->node_ip);
    mb_free(h->session_name);
    mb_free(h->session_dir);
    mb_free(h->temp_dir);
    mb_free(h->packages_dir);
    mb_free(h->token);
    mb_free(h->expect_cluster);
    mb_free(h->ray_version);
    mb_free(h->ray_commit);
    mb_free(h);
}

/* The store's content becomes the head's. */
static int load(struct mb_head *h, struct mb_err *err)
{
    int rc = h->guest ? 0 : load_cluster_id(h, err);

    if (rc == 0)
        rc = head_nodes_load(h, err);
    if (rc == 0)
        rc = head_placement_load(h, err);
    if (rc == 0)
        rc = head_jobs_load(h, err);
    return rc;
}

/* From here on it serves. */
static void activate(struct mb_head *h)
{
    h->active_ms = mb_mono_ms();
    head_packages_restore(h, head_admission_restored); /* jobs whose package comes wait for it */
    head_forget_resume(h);
    head_jobs_adopt(h);
    head_jobinfo_settle(h);
    head_placement_settle(h);
    uv_timer_start(&h->tick, on_tick, HEAD_TICK_MS, HEAD_TICK_MS);
    head_placement_pump(h);
    if (h->guest)
        mb_info("jobs", "job agent started jobs=%zu", h->n_jobs);
    else
        mb_info("gcs", "head started gcs_port=%d http_port=%d cluster_id=%s nodes=%zu jobs=%zu",
                h->gcs_port, h->http_port, h->cluster_hex, h->n_nodes, h->n_jobs);
}

/* ---- the election, with a shared store ---- */

static void lost(struct mb_head *h, const struct mb_err *err)
{
    if (!h->stopping && h->n_lost++ == 0)
        h->ops->on_lost(h->ops_arg, err);
}

static void on_store_lost(void *arg, const struct mb_err *err)
{
    lost(arg, err);
}

static void on_store_won(void *arg, struct mb_tables *tables)
{
    struct mb_head *h = arg;
    struct mb_err err = {0};

    h->store = tables;
    if (h->stopping)
        return; /* mb_head_stop() was just before: it closes what is here */
    int rc = load(h, &err);
    if (rc == 0)
        rc = seed_kv(h, &err);
    if (rc == 0 && h->head_node_hex[0])
        rc = put_kv(h, "job", "head_node_id", mb_blob_str(h->head_node_hex), &err);
    if (rc != 0) {
        lost(h, &err);
        return;
    }
    h->standby = 0;
    h->ops->on_active(h->ops_arg); /* before the head listens to the runner */
    activate(h);
}

static void on_store_other(void *arg, const char *address)
{
    struct mb_head *h = arg;

    snprintf(h->closed_text, sizeof h->closed_text, "this head is a standby; the head is at %.300s",
             address);
    if (!h->stopping)
        h->ops->on_other(h->ops_arg, address);
}

static int stand_by(struct mb_head *h, const struct mb_head_opts *opts, struct mb_err *err)
{
    static const struct mb_redis_ops ops = {on_store_won, on_store_other, on_store_lost};
    char address[300];
    struct mb_redis_opts ro = {.url = opts->store_url,
                               .password = opts->store_password,
                               .holder = opts->holder,
                               .address = address};

    h->standby = 1;
    snprintf(h->closed_text, sizeof h->closed_text, "this head is a standby");
    int rc = listen_http(h, opts, err);
    if (rc == 0)
        rc = listen_grpc(h, opts, err);
    snprintf(address, sizeof address, "%s:%d", h->node_ip, h->gcs_port);
    return rc == 0 ? mb_redis_open(h->loop, &ro, &ops, h, &h->redis, err) : rc;
}

static int serve_alone(struct mb_head *h, const struct mb_head_opts *opts, struct mb_err *err)
{
    int rc = opts->store_path ? mb_tables_open_sqlite(h->loop, opts->store_path,
                                                      opts->store_sync_full, &h->store, err)
                              : mb_tables_open_memory(h->loop, &h->store, err);

    if (rc == 0)
        rc = load(h, err);
    /* HTTP first: the port of the REST API goes into the KV that gRPC serves. */
    if (rc == 0)
        rc = listen_http(h, opts, err);
    if (rc == 0)
        rc = seed_kv(h, err);
    if (rc == 0)
        rc = listen_grpc(h, opts, err);
    if (rc == 0)
        activate(h);
    return rc;
}

static int be_a_guest(struct mb_head *h, const struct mb_head_opts *opts, struct mb_err *err)
{
    int rc = head_guest_open(h, opts, err);

    if (rc == 0)
        rc = load(h, err);
    if (rc == 0)
        activate(h);
    return rc;
}

int mb_head_start(uv_loop_t *loop, struct mb_grpc *grpc, const struct mb_head_opts *opts,
                  const struct mb_job_runner *runner, const struct mb_head_ops *ops, void *arg,
                  struct mb_head **out, struct mb_err *err)
{
    struct mb_head *h = mb_calloc(1, sizeof *h);
    int rc;

    *out = NULL;
    if (!h || copy_opts(h, opts) != 0) {
        if (h)
            free_head(h);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    h->is_open = opts->bind_addr && !opts->token && strcmp(opts->bind_addr, "127.0.0.1") != 0;
    h->loop = loop;
    h->grpc = grpc;
    h->runner = runner;
    h->ops = ops;
    h->ops_arg = arg;
    h->max_package_bytes = opts->max_package_bytes ? opts->max_package_bytes : PACKAGE_BYTES_MAX;
    h->package_keep_ms = opts->package_keep_ms ? opts->package_keep_ms : PACKAGE_KEEP_MS;
    uv_timer_init(loop, &h->tick);
    uv_timer_init(loop, &h->place_timer);
    uv_idle_init(loop, &h->rows_turn);
    h->tick.data = h->place_timer.data = h->rows_turn.data = h;
    h->placement = mb_placement_create(mb_random_u64());
    rc = h->placement ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");
    h->gang_order = opts->gang_order;
    if (rc == 0)
        mb_placement_set_order(h->placement, opts->gang_order,
                               opts->gang_patience_ms ? opts->gang_patience_ms
                                                      : MB_PLACE_PATIENCE_MS);
    if (rc == 0)
        rc = head_admission_create(h, &opts->jobs, err);
    if (rc == 0 && *h->packages_dir)
        rc = mb_fs_mkdir_p(h->packages_dir, 0700, err);
    if (rc == 0)
        rc = opts->guest_of    ? be_a_guest(h, opts, err)
             : opts->store_url ? stand_by(h, opts, err)
                               : serve_alone(h, opts, err);
    if (rc != 0) {
        mb_head_stop(h, (void (*)(void *))mb_head_destroy, h);
        return rc;
    }
    if (h->is_open && !h->guest)
        mb_warn("gcs",
                "listening on %s WITHOUT authentication: whoever reaches it can run commands here",
                opts->bind_addr);
    *out = h;
    return 0;
}

int mb_head_is_active(const struct mb_head *h)
{
    return !h->standby && !h->stopping && (!h->guest || !head_guest_closed(h->guest));
}

int mb_head_gcs_port(const struct mb_head *h)
{
    return h->gcs_port;
}

int mb_head_http_port(const struct mb_head *h)
{
    return h->http_port;
}

void mb_head_set_node(struct mb_head *h, const char *node_id_hex)
{
    struct mb_err err = {0};

    snprintf(h->head_node_hex, sizeof h->head_node_hex, "%s", node_id_hex);
    if (h->guest)
        head_guest_moved(h->guest);
    else if (h->store && !h->standby &&
             put_kv(h, "job", "head_node_id", mb_blob_str(node_id_hex), &err) != 0)
        mb_error("gcs", "head_node_id not stored: %s", err.text);
}

void mb_head_node_renamed(struct mb_head *h, const char *old_hex)
{
    for (size_t i = 0; i < h->n_jobs; i++) {
        struct head_job *job = h->jobs[i];
        if (strcmp(job->node, old_hex) == 0)
            snprintf(job->node, sizeof job->node, "%s", h->runner->node_id_hex(h->runner->self));
    }
}

/* ---- stop ---- */

static void part_closed(struct mb_head *h)
{
    if (--h->closing > 0)
        return;
    if (h->stopped_cb)
        h->stopped_cb(h->stopped_arg);
}

static void on_outside_closed(void *arg)
{
    part_closed(arg);
}

/* After the last write: the lease is given back, a guest leaves. */
static void close_outside(struct mb_head *h)
{
    struct mb_redis *r = h->redis;
    struct head_guest *guest = h->guest;

    h->redis = NULL;
    h->guest = NULL;
    if (r)
        mb_redis_close(r, on_outside_closed, h);
    else if (guest)
        head_guest_close(guest, on_outside_closed, h);
    else
        part_closed(h);
}

static void on_store_closed(void *arg)
{
    close_outside(arg);
}

static void on_http_stopped(void *arg)
{
    struct mb_head *h = arg;

    /* Handlers may still write until here; from now on nobody does. */
    struct mb_tables *s = h->store;
    h->store = NULL;
    if (s)
        mb_tables_close(s, on_store_closed, h);
    else
        close_outside(h);
}

static void on_second_stopped(void *arg)
{
    part_closed(arg);
}

static void on_timer_closed(uv_handle_t *handle)
{
    part_closed(handle->data);
}

void mb_head_stop(struct mb_head *h, void (*cb)(void *arg), void *arg)
{
    h->stopping = 1;
    h->stopped_cb = cb;
    h->stopped_arg = arg;
    h->closing = h->second_http ? 5 : 4;
    if (h->second_http)
        mb_http_client_stop(h->second_http, on_second_stopped, h);
    uv_close((uv_handle_t *)&h->tick, on_timer_closed);
    uv_close((uv_handle_t *)&h->place_timer, on_timer_closed);
    uv_close((uv_handle_t *)&h->rows_turn, on_timer_closed);
    head_job_rows_close(h);
    head_placement_close(h);
    head_pubsub_close(h);
    head_logs_close(h);
    head_packages_close(h);
    head_package_uploads_close(h);
    head_packages_restore_close(h);
    head_nodes_close(h);
    if (h->http)
        mb_http_server_stop(h->http, on_http_stopped, h);
    else
        on_http_stopped(h);
}

void mb_head_destroy(struct mb_head *h)
{
    if (h)
        free_head(h);
}
