/*
 * Head and client over loopback, with nodes that answer the bundle protocol: registration, KV,
 * drivers, placement groups, death of a node, restart of the head, another cluster at the address.
 * The head has a gRPC runtime of its own, so that it can be stopped and started on the same port.
 */
#include "loop.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "gcs/client.h"
#include "gcs/head.h"
#include "gcs/wire.h"
#include "proto/ray/health.pb-c.h"
#include "proto/ray/node_manager.pb-c.h"

enum { N_AGENTS = 3 };

struct agent {
    struct mb_grpc_server *server;
    int port;
    uint8_t id[MB_NODE_ID_BYTES];
    int prepared, committed, returned, released, in_use, refuse;
    int prepared_before; /* the last release */
};

struct fixture {
    uv_loop_t loop;
    char dir[64];
    char address[64];
    struct mb_grpc *grpc, *head_grpc;
    struct mb_head *head;
    int port;
    struct mb_gcs *gcs;
    enum mb_gcs_event event;
    int n_events;
    struct agent agents[N_AGENTS];
};

struct result {
    int done;
    int code;
    char text[MB_ERR_TEXT_MAX];
    int64_t count;
    size_t n;
    char value[256];
    uint8_t job_id[MB_JOB_ID_BYTES];
    enum mb_pg_state state;
    int has_node[4];
    uint8_t nodes[4][MB_NODE_ID_BYTES];
    int dead[8];
    int ports[8], http_ports[8];
};

/* ---- callbacks ---- */

static void set_flag(void *arg)
{
    *(int *)arg = 1;
}

static void take(struct result *r, const struct mb_err *err)
{
    assert_int_equal(r->done, 0); /* exactly once */
    r->done = 1;
    r->code = err->code;
    snprintf(r->text, sizeof r->text, "%s", err->text);
}

static void on_done(void *arg, const struct mb_err *err)
{
    take(arg, err);
}

static void on_count(void *arg, const struct mb_err *err, int64_t count)
{
    take(arg, err);
    ((struct result *)arg)->count = count;
}

static void on_value(void *arg, const struct mb_err *err, const void *value, size_t n)
{
    struct result *r = arg;

    take(r, err);
    if (err->code == 0)
        snprintf(r->value, sizeof r->value, "%s", (const char *)value);
    r->n = n;
}

static void on_keys(void *arg, const struct mb_err *err, const char *const *keys, size_t n)
{
    struct result *r = arg;

    take(r, err);
    r->n = n;
    for (size_t i = 0; i < n; i++) {
        strcat(r->value, keys[i]);
        strcat(r->value, " ");
    }
}

static void on_job_id(void *arg, const struct mb_err *err, const uint8_t *id)
{
    take(arg, err);
    memcpy(((struct result *)arg)->job_id, id, MB_JOB_ID_BYTES);
}

static void on_nodes(void *arg, const struct mb_err *err, const struct mb_gcs_node *nodes, size_t n)
{
    struct result *r = arg;

    take(r, err);
    r->n = n;
    for (size_t i = 0; i < n && i < 8; i++) {
        r->dead[i] = nodes[i].is_dead;
        r->ports[i] = nodes[i].port;
        r->http_ports[i] = nodes[i].metrics_port;
    }
}

static void on_groups(void *arg, const struct mb_err *err, const struct mb_gcs_pg *pg, size_t n)
{
    struct result *r = arg;

    take(r, err);
    r->n = n;
    if (n == 0)
        return;
    r->state = pg->state;
    for (size_t i = 0; i < pg->n_bundles && i < 4; i++) {
        r->has_node[i] = pg->bundles[i].has_node;
        memcpy(r->nodes[i], pg->bundles[i].node_id, MB_NODE_ID_BYTES);
    }
}

static void on_jobs(void *arg, const struct mb_err *err, const struct mb_gcs_job *jobs, size_t n)
{
    struct result *r = arg;

    take(r, err);
    r->n = n;
    if (n > 0)
        snprintf(r->value, sizeof r->value, "%s %d", jobs[0].submission_id, jobs[0].is_dead);
}

static void on_actor(void *arg, const struct mb_err *err, const uint8_t *id)
{
    (void)id;
    take(arg, err);
}

static void on_event(void *arg, struct mb_gcs *c, enum mb_gcs_event event, const struct mb_err *err)
{
    struct fixture *f = arg;

    (void)c;
    (void)err;
    f->event = event;
    f->n_events++;
}

/* Runs one request to its end: CALL uses r, &e. */
#define DO(f, r, call)                                                                             \
    do {                                                                                           \
        struct mb_err e = {0};                                                                     \
        memset(&(r), 0, sizeof(r));                                                                \
        int rc_ = call;                                                                            \
        if (rc_ != 0)                                                                              \
            fail_msg("%s", e.text);                                                                \
        assert_int_equal((r).done, 0); /* never from inside the call */                            \
        loop_until(&(f)->loop, &(r).done);                                                         \
    } while (0)

/* ---- nodes ---- */

static void prepare(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *m)
{
    struct agent *a = arg;
    Ray__Rpc__PrepareBundleResourcesReply reply = RAY__RPC__PREPARE_BUNDLE_RESOURCES_REPLY__INIT;

    a->prepared += (int)((const Ray__Rpc__PrepareBundleResourcesRequest *)m)->n_bundle_specs;
    reply.success = a->refuse == 0;
    if (a->refuse > 0)
        a->refuse--;
    mb_grpc_reply(req, &reply.base);
}

static void commit(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *m)
{
    struct agent *a = arg;
    Ray__Rpc__CommitBundleResourcesReply reply = RAY__RPC__COMMIT_BUNDLE_RESOURCES_REPLY__INIT;

    a->committed += (int)((const Ray__Rpc__CommitBundleResourcesRequest *)m)->n_bundle_specs;
    mb_grpc_reply(req, &reply.base);
}

static void give_back(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *m)
{
    struct agent *a = arg;
    Ray__Rpc__RemovePlacementGroupBundlesReply reply =
        RAY__RPC__REMOVE_PLACEMENT_GROUP_BUNDLES_REPLY__INIT;

    a->returned += (int)((const Ray__Rpc__RemovePlacementGroupBundlesRequest *)m)->n_bundle_specs;
    mb_grpc_reply(req, &reply.base);
}

static void release(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *m)
{
    struct agent *a = arg;
    Ray__Rpc__ReleaseUnusedBundlesReply reply = RAY__RPC__RELEASE_UNUSED_BUNDLES_REPLY__INIT;

    a->released++;
    a->prepared_before = a->prepared;
    a->in_use = (int)((const Ray__Rpc__ReleaseUnusedBundlesRequest *)m)->n_bundles_in_use;
    mb_grpc_reply(req, &reply.base);
}

static void start_agent(struct fixture *f, int i)
{
    static const struct mb_grpc_method methods[] = {
        {"/ray.rpc.NodeManagerService/PrepareBundleResources",
         &ray__rpc__prepare_bundle_resources_request__descriptor, prepare, NULL, 0},
        {"/ray.rpc.NodeManagerService/CommitBundleResources",
         &ray__rpc__commit_bundle_resources_request__descriptor, commit, NULL, 0},
        {"/ray.rpc.NodeManagerService/RemovePlacementGroupBundles",
         &ray__rpc__remove_placement_group_bundles_request__descriptor, give_back, NULL, 0},
        {"/ray.rpc.NodeManagerService/ReleaseUnusedBundles",
         &ray__rpc__release_unused_bundles_request__descriptor, release, NULL, 0},
    };
    struct agent *a = &f->agents[i];
    struct mb_grpc_server_opts opts = {0};
    struct mb_err err = {0};

    a->id[0] = (uint8_t)(i + 1);
    assert_int_equal(mb_grpc_server_create(f->grpc, &opts, &a->server, &err), 0);
    assert_int_equal(mb_grpc_server_add(a->server, methods, 4, a, &err), 0);
    assert_int_equal(mb_grpc_server_listen(a->server, "127.0.0.1:0", &a->port, &err), 0);
}

static void register_agent(struct fixture *f, int i)
{
    struct mb_gcs_resource total[] = {{"mobula_gpu", 4}, {"mobula_slot", 4}};
    struct mb_gcs_label label = {"mobula.io/version", "0"};
    struct mb_gcs_node node = {.ip = "127.0.0.1",
                               .port = f->agents[i].port,
                               .node_name = "n",
                               .resources = total,
                               .n_resources = 2,
                               .labels = &label,
                               .n_labels = 1};
    struct result r;

    memcpy(node.node_id, f->agents[i].id, MB_NODE_ID_BYTES);
    DO(f, r, mb_gcs_register_node(f->gcs, &node, 5000, on_done, &r, NULL, &e));
    assert_int_equal(r.code, 0);
}

/* ---- a runner without jobs ---- */

static void no_listener(void *self, mb_job_event_cb cb, void *arg)
{
    (void)self;
    (void)cb;
    (void)arg;
}

static const char *no_node(void *self)
{
    (void)self;
    return "";
}

static const struct mb_job_runner no_runner = {.set_listener = no_listener, .node_id_hex = no_node};

/* ---- the head ---- */

static void start_head(struct fixture *f, const char *store)
{
    char path[128];
    struct mb_err err = {0};
    struct mb_head_opts opts = {.gcs_port = f->port, .store_path = path, .packages_dir = f->dir};

    snprintf(path, sizeof path, "%s/%s", f->dir, store);
    assert_int_equal(mb_grpc_create(&f->loop, &f->head_grpc, &err), 0);
    if (mb_head_start(&f->loop, f->head_grpc, &opts, &no_runner, NULL, NULL, &f->head, &err) != 0)
        fail_msg("%s", err.text);
    f->port = mb_head_gcs_port(f->head);
    snprintf(f->address, sizeof f->address, "127.0.0.1:%d", f->port);
}

static void stop_head(struct fixture *f)
{
    int stopped = 0, grpc_stopped = 0;

    mb_head_stop(f->head, set_flag, &stopped);
    loop_until(&f->loop, &stopped);
    mb_grpc_stop(f->head_grpc, set_flag, &grpc_stopped);
    loop_until(&f->loop, &grpc_stopped);
    mb_head_destroy(f->head);
    mb_grpc_destroy(f->head_grpc);
    f->head = NULL;
}

static void connect_client(struct fixture *f)
{
    struct mb_err err = {0};
    int before = f->n_events;

    assert_int_equal(mb_gcs_connect(f->gcs, &err), 0);
    for (int i = 0; f->n_events == before && i < 100000; i++)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_int_equal(f->event, MB_GCS_CONNECTED);
}

static int setup(void **state)
{
    static struct fixture f;
    struct mb_err err = {0};

    memset(&f, 0, sizeof f);
    strcpy(f.dir, "/tmp/mb-head-XXXXXX");
    assert_non_null(mkdtemp(f.dir));
    uv_loop_init(&f.loop);
    assert_int_equal(mb_grpc_create(&f.loop, &f.grpc, &err), 0);
    start_head(&f, "a.db");
    struct mb_gcs_opts opts = {.address = f.address};
    assert_int_equal(mb_gcs_create(&f.loop, f.grpc, &opts, on_event, &f, &f.gcs, &err), 0);
    connect_client(&f);
    for (int i = 0; i < N_AGENTS; i++)
        start_agent(&f, i);
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    int closed = 0, stopped = 0;

    mb_gcs_close(f->gcs, set_flag, &closed);
    loop_until(&f->loop, &closed);
    if (f->head)
        stop_head(f);
    mb_grpc_stop(f->grpc, set_flag, &stopped);
    loop_until(&f->loop, &stopped);
    mb_grpc_destroy(f->grpc);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&f->loop), 0);
    return mb_fs_remove_tree(f->dir, NULL);
}

/* ---- tests ---- */

static void kv(void **state)
{
    struct fixture *f = *state;
    struct mb_gcs *c = f->gcs;
    struct result r;

    assert_string_equal(mb_gcs_ray_version(c), "2.60.0");
    DO(f, r, mb_gcs_kv_get(c, "ns", "k", 0, on_value, &r, NULL, &e));
    assert_int_equal(r.code, MB_ENOENT);
    DO(f, r, mb_gcs_kv_put(c, "ns", "k", "one", 3, 0, 0, on_count, &r, NULL, &e));
    assert_int_equal(r.count, 1);
    DO(f, r, mb_gcs_kv_put(c, "ns", "k", "two", 3, 0, 0, on_count, &r, NULL, &e));
    assert_int_equal(r.count, 0);
    DO(f, r, mb_gcs_kv_get(c, "ns", "k", 0, on_value, &r, NULL, &e));
    assert_string_equal(r.value, "one");
    DO(f, r, mb_gcs_kv_put(c, "ns", "k", "two", 3, 1, 0, on_count, &r, NULL, &e));
    DO(f, r, mb_gcs_kv_put(c, "ns", "k2", "", 0, 1, 0, on_count, &r, NULL, &e));
    DO(f, r, mb_gcs_kv_get(c, "ns", "k2", 0, on_value, &r, NULL, &e));
    assert_int_equal(r.code, 0);
    assert_int_equal(r.n, 0);
    DO(f, r, mb_gcs_kv_keys(c, "ns", "k", 0, on_keys, &r, NULL, &e));
    assert_string_equal(r.value, "k k2 ");
    DO(f, r, mb_gcs_kv_exists(c, "other", "k", 0, on_count, &r, NULL, &e));
    assert_int_equal(r.count, 0);
    DO(f, r, mb_gcs_kv_del(c, "ns", "k", 1, 0, on_count, &r, NULL, &e));
    assert_int_equal(r.count, 2);
    DO(f, r, mb_gcs_named_actor(c, "a", "b", 0, on_actor, &r, NULL, &e));
    assert_int_equal(r.code, MB_ENOENT);
}

static void cancel_and_misuse(void **state)
{
    struct fixture *f = *state;
    struct mb_gcs_op *op;
    struct mb_err err = {0};
    struct result r = {0};
    uint8_t id[MB_PG_ID_BYTES] = {9};

    assert_int_equal(mb_gcs_pg_wait(f->gcs, id, 60000, on_done, &r, &op, &err), 0);
    mb_gcs_op_cancel(op);
    assert_int_equal(r.done, 0);
    loop_until(&f->loop, &r.done);
    assert_int_equal(r.code, MB_ECANCELED);
    assert_int_equal(mb_gcs_connect(f->gcs, &err), MB_ESTATE);
    struct mb_gcs_pg empty = {0};
    assert_int_equal(mb_gcs_pg_create(f->gcs, &empty, 0, on_done, &r, NULL, &err), MB_EINVAL);
}

static void nodes(void **state)
{
    struct fixture *f = *state;
    struct result r;

    register_agent(f, 0);
    register_agent(f, 1);
    DO(f, r, mb_gcs_nodes(f->gcs, 0, on_nodes, &r, NULL, &e));
    assert_int_equal(r.n, 2);
    assert_int_equal(r.dead[0] + r.dead[1], 0);
    DO(f, r,
       mb_gcs_unregister_node(f->gcs, f->agents[0].id, MB_GCS_DEATH_EXPECTED, "bye", 0, on_done, &r,
                              NULL, &e));
    assert_int_equal(r.code, 0);
    DO(f, r, mb_gcs_check_alive(f->gcs, f->agents[0].id, 0, on_count, &r, NULL, &e));
    assert_int_equal(r.count, 0);
    DO(f, r, mb_gcs_check_alive(f->gcs, f->agents[1].id, 0, on_count, &r, NULL, &e));
    assert_int_equal(r.count, 1);
}

/* A driver of its own, and the id of a group of it. */
static void new_driver(struct fixture *f, struct mb_gcs_pg *pg, const char *submission)
{
    struct mb_gcs_job job = {
        .entrypoint = "x", .submission_id = submission, .driver_ip = "1.2.3.4"};
    struct result r;

    DO(f, r, mb_gcs_next_job_id(f->gcs, 0, on_job_id, &r, NULL, &e));
    memcpy(job.job_id, r.job_id, MB_JOB_ID_BYTES);
    DO(f, r, mb_gcs_add_job(f->gcs, &job, 0, on_done, &r, NULL, &e));
    assert_int_equal(r.code, 0);
    memcpy(pg->job_id, job.job_id, MB_JOB_ID_BYTES);
    mb_gcs_pg_new_id(pg->job_id, pg->id);
}

static const struct mb_gcs_resource one_gpu[] = {{"mobula_gpu", 3}, {"mobula_slot", 3}};

static struct mb_gcs_pg two_bundles(struct mb_gcs_bundle b[2])
{
    for (int i = 0; i < 2; i++)
        b[i] = (struct mb_gcs_bundle){.resources = one_gpu, .n_resources = 2};
    return (struct mb_gcs_pg){.bundles = b, .n_bundles = 2, .strategy = MB_PG_STRICT_SPREAD};
}

static void create_and_wait(struct fixture *f, const struct mb_gcs_pg *pg)
{
    struct result r;

    DO(f, r, mb_gcs_pg_create(f->gcs, pg, 0, on_done, &r, NULL, &e));
    if (r.code != 0)
        fail_msg("%s", r.text);
    DO(f, r, mb_gcs_pg_wait(f->gcs, pg->id, 15000, on_done, &r, NULL, &e));
    if (r.code != 0)
        fail_msg("%s", r.text);
}

static void a_group_lives_with_its_driver(void **state)
{
    struct fixture *f = *state;
    struct mb_gcs_bundle b[2];
    struct mb_gcs_pg pg = two_bundles(b);
    struct result r;

    register_agent(f, 0);
    register_agent(f, 1);
    new_driver(f, &pg, "sub-1");
    f->agents[1].refuse = 1; /* the first attempt fails, everything is given back */
    create_and_wait(f, &pg);
    DO(f, r, mb_gcs_pg_get(f->gcs, pg.id, 0, on_groups, &r, NULL, &e));
    assert_int_equal(r.state, MB_PG_CREATED);
    assert_true(r.has_node[0] && r.has_node[1]);
    assert_memory_not_equal(r.nodes[0], r.nodes[1], MB_NODE_ID_BYTES);
    assert_int_equal(f->agents[0].returned, 1);
    assert_int_equal(f->agents[0].committed + f->agents[1].committed, 2);
    DO(f, r, mb_gcs_jobs(f->gcs, 0, on_jobs, &r, NULL, &e));
    assert_string_equal(r.value, "sub-1 0");
    DO(f, r, mb_gcs_finish_job(f->gcs, pg.job_id, 0, on_done, &r, NULL, &e));
    DO(f, r, mb_gcs_pg_get(f->gcs, pg.id, 0, on_groups, &r, NULL, &e));
    assert_int_equal(r.state, MB_PG_REMOVED);
    for (int i = 0; f->agents[0].returned + f->agents[1].returned < 3 && i < 100000; i++)
        uv_run(&f->loop, UV_RUN_ONCE);
    DO(f, r, mb_gcs_pg_wait(f->gcs, pg.id, 5000, on_done, &r, NULL, &e));
    assert_int_equal(r.code, MB_ENOENT);
}

static void what_would_abort_a_real_gcs(void **state)
{
    struct fixture *f = *state;
    struct mb_gcs_bundle b[2];
    struct mb_gcs_pg pg = two_bundles(b), other;
    struct result r;

    mb_gcs_pg_new_id(pg.job_id, pg.id);
    DO(f, r, mb_gcs_pg_create(f->gcs, &pg, 0, on_done, &r, NULL, &e));
    assert_int_equal(r.code, MB_ENOENT);
    new_driver(f, &pg, NULL);
    pg.name = "name";
    DO(f, r, mb_gcs_pg_create(f->gcs, &pg, 0, on_done, &r, NULL, &e));
    assert_int_equal(r.code, 0);
    DO(f, r, mb_gcs_pg_create(f->gcs, &pg, 0, on_done, &r, NULL, &e));
    assert_int_equal(r.code, 0);
    other = pg;
    mb_gcs_pg_new_id(other.job_id, other.id);
    DO(f, r, mb_gcs_pg_create(f->gcs, &other, 0, on_done, &r, NULL, &e));
    assert_int_equal(r.code, MB_EEXIST);
    DO(f, r, mb_gcs_pg_get(f->gcs, other.id, 0, on_groups, &r, NULL, &e));
    assert_int_equal(r.code, MB_ENOENT);
    DO(f, r, mb_gcs_pg_wait(f->gcs, pg.id, 300, on_done, &r, NULL, &e));
    assert_int_equal(r.code, MB_ETIMEOUT);
    DO(f, r, mb_gcs_pg_list(f->gcs, 0, on_groups, &r, NULL, &e));
    assert_int_equal(r.n, 1);
    DO(f, r, mb_gcs_pg_remove(f->gcs, pg.id, 0, on_done, &r, NULL, &e));
    assert_int_equal(r.code, 0);
}

static void a_lost_bundle_is_placed_anew(void **state)
{
    struct fixture *f = *state;
    struct mb_gcs_bundle b[2];
    struct mb_gcs_pg pg = two_bundles(b);
    struct result r;

    register_agent(f, 0);
    register_agent(f, 1);
    new_driver(f, &pg, NULL);
    create_and_wait(f, &pg);
    register_agent(f, 1); /* it saw no answer: what it has is in the table */
    DO(f, r,
       mb_gcs_unregister_node(f->gcs, f->agents[1].id, MB_GCS_DEATH_EXPECTED, "", 0, on_done, &r,
                              NULL, &e));
    DO(f, r, mb_gcs_pg_get(f->gcs, pg.id, 0, on_groups, &r, NULL, &e));
    assert_int_equal(r.state, MB_PG_RESCHEDULING);
    assert_int_equal(f->agents[1].released, 1);
    register_agent(f, 1); /* what it held goes before it is given anything */
    DO(f, r, mb_gcs_pg_wait(f->gcs, pg.id, 15000, on_done, &r, NULL, &e));
    assert_int_equal(f->agents[1].released, 2);
    assert_int_equal(f->agents[1].in_use, 0);
    assert_int_equal(f->agents[1].prepared_before, 1);
    DO(f, r,
       mb_gcs_unregister_node(f->gcs, f->agents[1].id, MB_GCS_DEATH_EXPECTED, "", 0, on_done, &r,
                              NULL, &e));
    register_agent(f, 2);
    DO(f, r, mb_gcs_pg_wait(f->gcs, pg.id, 15000, on_done, &r, NULL, &e));
    assert_int_equal(r.code, 0);
    assert_int_equal(f->agents[0].committed, 1); /* the survivor was left in peace */
    assert_int_equal(f->agents[0].returned, 0);
    assert_int_equal(f->agents[2].committed, 1);
}

static void a_restarted_head_knows_everything(void **state)
{
    struct fixture *f = *state;
    struct mb_gcs_bundle b[2];
    struct mb_gcs_pg pg = two_bundles(b);
    struct result r;

    register_agent(f, 0);
    register_agent(f, 1);
    new_driver(f, &pg, NULL);
    create_and_wait(f, &pg);
    DO(f, r, mb_gcs_kv_put(f->gcs, "", "key", "value", 5, 1, 0, on_count, &r, NULL, &e));
    f->agents[0].released = f->agents[1].released = 0;
    stop_head(f);
    start_head(f, "a.db");
    /* The client goes on by itself: same cluster. */
    DO(f, r, mb_gcs_kv_get(f->gcs, "", "key", 15000, on_value, &r, NULL, &e));
    assert_string_equal(r.value, "value");
    DO(f, r, mb_gcs_nodes(f->gcs, 0, on_nodes, &r, NULL, &e));
    assert_int_equal(r.n, 2);
    DO(f, r, mb_gcs_pg_wait(f->gcs, pg.id, 15000, on_done, &r, NULL, &e));
    assert_int_equal(r.code, 0);
    for (int i = 0; (!f->agents[0].released || !f->agents[1].released) && i < 100000; i++)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_int_equal(f->agents[0].in_use, 1);
    assert_int_equal(f->agents[1].in_use, 1);
    assert_int_equal(f->agents[0].prepared + f->agents[1].prepared, 2);
    struct mb_gcs_pg next = two_bundles(b); /* job numbers are not given out twice */
    new_driver(f, &next, NULL);
    assert_memory_not_equal(next.job_id, pg.job_id, MB_JOB_ID_BYTES);
}

static void move(struct fixture *f, const uint8_t *id, const char *ip, int port, struct result *r)
{
    struct mb_gcs_node to = {.ip = ip, .port = port, .agent_http_port = port + 1};

    memcpy(to.node_id, id, MB_NODE_ID_BYTES);
    DO(f, *r, mb_gcs_move_node(f->gcs, &to, 0, on_done, r, NULL, &e));
}

/* Who asked for node 0 finds it where agent 2 listens, with what it holds. */
static void a_node_moves(void **state)
{
    struct fixture *f = *state;
    const uint8_t nobody[MB_NODE_ID_BYTES] = {77};
    struct mb_gcs_bundle b[2];
    struct mb_gcs_pg pg = two_bundles(b);
    struct result r;

    register_agent(f, 0);
    register_agent(f, 1);
    new_driver(f, &pg, NULL);
    create_and_wait(f, &pg);
    move(f, f->agents[0].id, "127.0.0.1", f->agents[2].port, &r);
    assert_int_equal(r.code, 0);
    DO(f, r, mb_gcs_pg_get(f->gcs, pg.id, 0, on_groups, &r, NULL, &e));
    assert_int_equal(r.state, MB_PG_CREATED);
    f->agents[0].released = f->agents[1].released = 0;
    stop_head(f);
    start_head(f, "a.db"); /* it was stored */
    for (int i = 0; (!f->agents[2].released || !f->agents[1].released) && i < 100000; i++)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_int_equal(f->agents[2].in_use, 1);
    assert_int_equal(f->agents[0].released, 0);
    DO(f, r, mb_gcs_nodes(f->gcs, 15000, on_nodes, &r, NULL, &e));
    assert_int_equal(r.n, 2);
    assert_int_equal(r.dead[0] + r.dead[1], 0);
    int at = r.ports[0] == f->agents[2].port ? 0 : 1;
    assert_int_equal(r.ports[at], f->agents[2].port);
    assert_int_equal(r.http_ports[at], f->agents[2].port + 1);
    DO(f, r, mb_gcs_pg_remove(f->gcs, pg.id, 0, on_done, &r, NULL, &e));
    for (int i = 0; !f->agents[2].returned && i < 100000; i++)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_int_equal(f->agents[2].returned, 1);
    assert_int_equal(f->agents[0].returned, 0);
    move(f, nobody, "127.0.0.1", 4711, &r);
    assert_int_equal(r.code, MB_ENOENT);
    move(f, f->agents[0].id, "", 4711, &r);
    assert_int_equal(r.code, MB_EINVAL);
    move(f, f->agents[0].id, "127.0.0.1", 0, &r);
    assert_int_equal(r.code, MB_EINVAL);
    DO(f, r,
       mb_gcs_unregister_node(f->gcs, f->agents[0].id, MB_GCS_DEATH_EXPECTED, "", 0, on_done, &r,
                              NULL, &e));
    move(f, f->agents[0].id, "127.0.0.1", 4711, &r);
    assert_int_equal(r.code, MB_ENOENT);
}

static void another_cluster_at_the_address(void **state)
{
    struct fixture *f = *state;
    struct result r;

    stop_head(f);
    start_head(f, "b.db");
    DO(f, r, mb_gcs_kv_get(f->gcs, "", "key", 15000, on_value, &r, NULL, &e));
    assert_int_equal(r.code, MB_EUNAVAIL);
    assert_int_equal(f->event, MB_GCS_CLUSTER_CHANGED);
    assert_false(mb_gcs_connected(f->gcs));
    connect_client(f);
    DO(f, r, mb_gcs_kv_get(f->gcs, "", "key", 15000, on_value, &r, NULL, &e));
    assert_int_equal(r.code, MB_ENOENT);
}

static void on_available(void *arg, int status, const char *detail, const ProtobufCMessage *reply)
{
    const Ray__Rpc__GetAllAvailableResourcesReply *m = (const void *)reply;
    struct result *r = arg;

    (void)detail;
    assert_int_equal(status, MB_GRPC_OK);
    r->done = 1;
    r->count = -1;
    if (m->n_resources_list == 1 && m->resources_list[0]->n_resources_available == 1)
        r->count = (int64_t)m->resources_list[0]->resources_available[0]->value;
}

/* What the head believes the one node has left; waits until it is `want`, or asks once. */
static int64_t available(struct fixture *f, struct mb_grpc_channel *ch, int64_t want, int is_wait)
{
    Ray__Rpc__GetAllAvailableResourcesRequest q =
        RAY__RPC__GET_ALL_AVAILABLE_RESOURCES_REQUEST__INIT;
    uint64_t until_ms = mb_mono_ms() + 20000;
    struct result r;

    do {
        DO(f, r,
           mb_grpc_unary(ch, "/ray.rpc.NodeResourceInfoGcsService/GetAllAvailableResources",
                         &q.base, &ray__rpc__get_all_available_resources_reply__descriptor, 10000,
                         on_available, &r, NULL, &e));
    } while (is_wait && r.count != want && mb_mono_ms() < until_ms);
    return r.count;
}

/* A renewed view waits for the regular message. */
static void view_renewed(void **state)
{
    struct fixture *f = *state;
    struct mb_gcs_resource total[] = {{"mobula_gpu", 4}}, left[] = {{"mobula_gpu", 1}};
    struct mb_gcs_view view = {.available = left, .n_available = 1, .total = total, .n_total = 1};
    struct mb_grpc_channel *ch;
    struct mb_err err = {0};

    assert_int_equal(mb_gcs_sync_renew(f->gcs, &view, &err), MB_ESTATE);
    assert_int_equal(mb_grpc_channel_create(f->grpc, f->address, NULL, &ch, &err), 0);
    register_agent(f, 0);
    uint64_t began_ms = mb_mono_ms();
    assert_int_equal(mb_gcs_sync_start(f->gcs, f->agents[0].id, &view, &err), 0);
    assert_int_equal(available(f, ch, 1, 1), 1);
    left[0].amount = 2;
    assert_int_equal(mb_gcs_sync_set(f->gcs, &view, &err), 0);
    assert_int_equal(available(f, ch, 2, 1), 2);
    left[0].amount = 3;
    assert_int_equal(mb_gcs_sync_renew(f->gcs, &view, &err), 0);
    int64_t at_once = available(f, ch, 3, 0);
    if (mb_mono_ms() - began_ms < 1900) /* else the first regular message may have gone */
        assert_int_equal(at_once, 2);
    assert_int_equal(available(f, ch, 3, 1), 3);
    mb_gcs_sync_stop(f->gcs);
    mb_grpc_channel_destroy(ch);
}

static void sync_and_verdict(void **state)
{
    struct fixture *f = *state;
    struct mb_gcs_resource total[] = {{"mobula_gpu", 4}}, left[] = {{"mobula_gpu", 1}};
    struct mb_gcs_view view = {.available = total, .n_available = 1, .total = total, .n_total = 1};
    struct mb_err err = {0};
    struct result r;

    register_agent(f, 0);
    assert_int_equal(mb_gcs_sync_start(f->gcs, f->agents[0].id, &view, &err), 0);
    view.available = left;
    assert_int_equal(mb_gcs_sync_set(f->gcs, &view, &err), 0);
    assert_int_equal(mb_gcs_watch_node(f->gcs, f->agents[0].id, &err), 0);
    int before = f->n_events;
    DO(f, r,
       mb_gcs_unregister_node(f->gcs, f->agents[0].id, MB_GCS_DEATH_EXPECTED, "", 0, on_done, &r,
                              NULL, &e));
    for (int i = 0; f->n_events == before && i < 100000; i++)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_int_equal(f->event, MB_GCS_NODE_DEAD);
    /* close with requests and the stream in flight is the teardown's part */
    assert_int_equal(mb_gcs_nodes(f->gcs, 0, on_nodes, &r, NULL, &err), 0);
    memset(&r, 0, sizeof r);
    int closed = 0;
    mb_gcs_close(f->gcs, set_flag, &closed);
    loop_until(&f->loop, &closed);
    assert_int_equal(r.done, 1);
    struct mb_gcs_opts opts = {.address = f->address};
    assert_int_equal(mb_gcs_create(&f->loop, f->grpc, &opts, on_event, f, &f->gcs, &err), 0);
}

static void nobody_answers(void **state)
{
    struct fixture *f = *state;
    struct mb_gcs_opts opts = {.address = "127.0.0.1:1", .connect_timeout_ms = 500};
    struct mb_err err = {0};
    struct mb_gcs *c;
    int before = f->n_events, closed = 0;

    assert_int_equal(mb_gcs_create(&f->loop, f->grpc, &opts, on_event, f, &c, &err), 0);
    assert_int_equal(mb_gcs_connect(c, &err), 0);
    for (int i = 0; f->n_events == before && i < 100000; i++)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_int_equal(f->event, MB_GCS_CONNECT_FAILED);
    mb_gcs_close(c, set_flag, &closed);
    loop_until(&f->loop, &closed);
}

static void a_port_in_use(void **state)
{
    struct fixture *f = *state;
    char path[128];
    struct mb_head_opts opts = {.gcs_port = f->port, .store_path = path};
    struct mb_head *second;
    struct mb_err err = {0};

    snprintf(path, sizeof path, "%s/second.db", f->dir);
    assert_int_equal(
        mb_head_start(&f->loop, f->head_grpc, &opts, &no_runner, NULL, NULL, &second, &err),
        MB_EEXIST);
    assert_null(second);
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(kv),
        T(cancel_and_misuse),
        T(nodes),
        T(a_group_lives_with_its_driver),
        T(what_would_abort_a_real_gcs),
        T(a_lost_bundle_is_placed_anew),
        T(a_restarted_head_knows_everything),
        T(a_node_moves),
        T(another_cluster_at_the_address),
        T(view_renewed),
        T(sync_and_verdict),
        T(nobody_answers),
        T(a_port_in_use),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
