/* 1. A head on a runtime of its own, a client, nodes that count what they are asked. 2. Answers go
 * into a result, once each. 3. Everything is stopped and closed, and the loop is empty. */
#include "head_fixture.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/fs.h"
#include "proto/ray/node_manager.pb-c.h"

/* ---- callbacks ---- */

void fixture_set_flag(void *arg)
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

void fixture_on_done(void *arg, const struct mb_err *err)
{
    take(arg, err);
}

void fixture_on_count(void *arg, const struct mb_err *err, int64_t count)
{
    take(arg, err);
    ((struct result *)arg)->count = count;
}

void fixture_on_value(void *arg, const struct mb_err *err, const void *value, size_t n)
{
    struct result *r = arg;

    take(r, err);
    if (err->code == 0)
        snprintf(r->value, sizeof r->value, "%s", (const char *)value);
    r->n = n;
}

void fixture_on_keys(void *arg, const struct mb_err *err, const char *const *keys, size_t n)
{
    struct result *r = arg;

    take(r, err);
    r->n = n;
    for (size_t i = 0; i < n; i++) {
        strcat(r->value, keys[i]);
        strcat(r->value, " ");
    }
}

void fixture_on_job_id(void *arg, const struct mb_err *err, const uint8_t *id)
{
    take(arg, err);
    memcpy(((struct result *)arg)->job_id, id, MB_JOB_ID_BYTES);
}

void fixture_on_nodes(void *arg, const struct mb_err *err, const struct mb_gcs_node *nodes,
                      size_t n)
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

void fixture_on_groups(void *arg, const struct mb_err *err, const struct mb_gcs_pg *pg, size_t n)
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

void fixture_on_jobs(void *arg, const struct mb_err *err, const struct mb_gcs_job *jobs, size_t n)
{
    struct result *r = arg;

    take(r, err);
    r->n = n;
    if (n > 0)
        snprintf(r->value, sizeof r->value, "%s %d", jobs[0].submission_id, jobs[0].is_dead);
}

void fixture_on_actor(void *arg, const struct mb_err *err, const uint8_t *id)
{
    (void)id;
    take(arg, err);
}

void fixture_on_event(void *arg, struct mb_gcs *c, enum mb_gcs_event event,
                      const struct mb_err *err)
{
    struct fixture *f = arg;

    (void)c;
    (void)err;
    f->event = event;
    f->n_events++;
}

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

void fixture_register_agent(struct fixture *f, int i)
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
    DO(f, r, mb_gcs_register_node(f->gcs, &node, 5000, fixture_on_done, &r, NULL, &e));
    assert_int_equal(r.code, 0);
}

/* ---- a runner without jobs ---- */

static void no_listener(void *self, mb_job_event_cb cb, void *arg)
{
    (void)self;
    (void)cb;
    (void)arg;
}

static void no_drivers(void *self, int (*is_wanted)(void *arg, const char *id), void *arg)
{
    (void)self;
    (void)is_wanted;
    (void)arg;
}

static const char *no_node(void *self)
{
    (void)self;
    return "";
}

const struct mb_job_runner fixture_no_runner = {
    .set_listener = no_listener, .stop_unwanted = no_drivers, .node_id_hex = no_node};

/* ---- the head ---- */

void fixture_start_head(struct fixture *f, const char *store)
{
    char path[128];
    struct mb_err err = {0};
    struct mb_head_opts opts = {.gcs_port = f->port, .store_path = path, .packages_dir = f->dir};

    snprintf(path, sizeof path, "%s/%s", f->dir, store);
    assert_int_equal(mb_grpc_create(&f->loop, &f->head_grpc, &err), 0);
    if (mb_head_start(&f->loop, f->head_grpc, &opts, &fixture_no_runner, NULL, NULL, &f->head,
                      &err) != 0)
        fail_msg("%s", err.text);
    f->port = mb_head_gcs_port(f->head);
    snprintf(f->address, sizeof f->address, "127.0.0.1:%d", f->port);
}

void fixture_stop_head(struct fixture *f)
{
    int stopped = 0, grpc_stopped = 0;

    mb_head_stop(f->head, fixture_set_flag, &stopped);
    loop_until(&f->loop, &stopped);
    mb_grpc_stop(f->head_grpc, fixture_set_flag, &grpc_stopped);
    loop_until(&f->loop, &grpc_stopped);
    mb_head_destroy(f->head);
    mb_grpc_destroy(f->head_grpc);
    f->head = NULL;
}

void fixture_connect_client(struct fixture *f)
{
    struct mb_err err = {0};
    int before = f->n_events;

    assert_int_equal(mb_gcs_connect(f->gcs, &err), 0);
    for (int i = 0; f->n_events == before && i < 100000; i++)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_int_equal(f->event, MB_GCS_CONNECTED);
}

int fixture_setup(void **state)
{
    static struct fixture f;
    struct mb_err err = {0};

    memset(&f, 0, sizeof f);
    strcpy(f.dir, "/tmp/mb-head-XXXXXX");
    assert_non_null(mkdtemp(f.dir));
    uv_loop_init(&f.loop);
    assert_int_equal(mb_grpc_create(&f.loop, &f.grpc, &err), 0);
    fixture_start_head(&f, "a.db");
    struct mb_gcs_opts opts = {.address = f.address};
    assert_int_equal(mb_gcs_create(&f.loop, f.grpc, &opts, fixture_on_event, &f, &f.gcs, &err), 0);
    fixture_connect_client(&f);
    for (int i = 0; i < N_AGENTS; i++)
        start_agent(&f, i);
    *state = &f;
    return 0;
}

int fixture_teardown(void **state)
{
    struct fixture *f = *state;
    int closed = 0, stopped = 0;

    mb_gcs_close(f->gcs, fixture_set_flag, &closed);
    loop_until(&f->loop, &closed);
    if (f->head)
        fixture_stop_head(f);
    mb_grpc_stop(f->grpc, fixture_set_flag, &stopped);
    loop_until(&f->loop, &stopped);
    mb_grpc_destroy(f->grpc);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&f->loop), 0);
    return mb_fs_remove_tree(f->dir, NULL);
}
