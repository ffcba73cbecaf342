/*
 * Our client against a GCS that is given as HOST:PORT: every call that works without an agent, one
 * after the other, each judged. Prints one line per check; the exit status counts failures.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/client.h"

struct app {
    uv_loop_t loop;
    struct mb_grpc *grpc;
    struct mb_gcs *gcs;
    int step;
    int failed;
    uint8_t node_id[MB_NODE_ID_BYTES];
    uint8_t job_id[MB_JOB_ID_BYTES];
    struct mb_gcs_pg pg;
    int stopped;
};

static const struct mb_gcs_resource total[] = {{"mobula_gpu", 4}, {"mobula_slot", 4}};
static void next(struct app *a);

static void say(struct app *a, const char *what, int good, const char *detail)
{
    printf("%s %s%s%s\n", good ? "ok  " : "FAIL", what, good ? "" : ": ", good ? "" : detail);
    fflush(stdout);
    a->failed += !good;
}

static void step_ok(struct app *a, const char *what, const struct mb_err *err)
{
    say(a, what, err->code == 0, err->text);
    next(a);
}

static void on_register(void *arg, const struct mb_err *err)
{
    step_ok(arg, "register", err);
}

static void on_put(void *arg, const struct mb_err *err, int64_t count)
{
    say(arg, "put of a new key", err->code == 0 && count == 1, err->text);
    next(arg);
}

static void on_put_again(void *arg, const struct mb_err *err, int64_t count)
{
    say(arg, "put without overwrite", err->code == 0 && count == 0, err->text);
    next(arg);
}

static void on_get(void *arg, const struct mb_err *err, const void *value, size_t n)
{
    say(arg, "get", err->code == 0 && n == 5 && memcmp(value, "value", 5) == 0, err->text);
    next(arg);
}

static void on_missing(void *arg, const struct mb_err *err, const void *value, size_t n)
{
    (void)value;
    (void)n;
    say(arg, "get of nothing", err->code == MB_ENOENT, err->text);
    next(arg);
}

static void on_keys(void *arg, const struct mb_err *err, const char *const *keys, size_t n)
{
    say(arg, "keys", err->code == 0 && n == 1 && strcmp(keys[0], "mb-key") == 0, err->text);
    next(arg);
}

static void on_del(void *arg, const struct mb_err *err, int64_t count)
{
    say(arg, "del", err->code == 0 && count == 1, err->text);
    next(arg);
}

static void on_nodes(void *arg, const struct mb_err *err, const struct mb_gcs_node *nodes, size_t n)
{
    struct app *a = arg;
    int found = 0;

    for (size_t i = 0; i < n; i++)
        if (memcmp(nodes[i].node_id, a->node_id, MB_NODE_ID_BYTES) == 0)
            found = !nodes[i].is_dead && nodes[i].n_resources == 2 &&
                    strcmp(nodes[i].node_name, "mobula test") == 0;
    say(a, "our node is in the list", found, err->text);
    next(a);
}

static void on_alive(void *arg, const struct mb_err *err, int64_t count)
{
    say(arg, "our node counts as alive", err->code == 0 && count == 1, err->text);
    next(arg);
}

static void on_gone(void *arg, const struct mb_err *err, int64_t count)
{
    say(arg, "our node is gone", err->code == 0 && count == 0, err->text);
    next(arg);
}

static void on_job_id(void *arg, const struct mb_err *err, const uint8_t *id)
{
    struct app *a = arg;

    memcpy(a->job_id, id, MB_JOB_ID_BYTES);
    say(a, "next job id", err->code == 0 && (id[0] | id[1]) != 0, err->text);
    next(a);
}

static void on_add(void *arg, const struct mb_err *err)
{
    step_ok(arg, "add job", err);
}

static void on_jobs(void *arg, const struct mb_err *err, const struct mb_gcs_job *jobs, size_t n)
{
    struct app *a = arg;
    int found = 0;

    for (size_t i = 0; i < n; i++)
        if (memcmp(jobs[i].job_id, a->job_id, MB_JOB_ID_BYTES) == 0)
            found = strcmp(jobs[i].submission_id, "mb-sub") == 0 && !jobs[i].is_dead;
    say(a, "our job is in the table", found, err->text);
    next(a);
}

static void on_unknown_job(void *arg, const struct mb_err *err)
{
    say(arg, "a group of an unknown job is refused before it aborts the GCS",
        err->code == MB_ENOENT, err->text);
    next(arg);
}

static void on_create(void *arg, const struct mb_err *err)
{
    step_ok(arg, "create a group", err);
}

static void on_wait(void *arg, const struct mb_err *err)
{
    /* The port of our node is closed: no Prepare can succeed. */
    say(arg, "waiting ends with its deadline", err->code == MB_ETIMEOUT, err->text);
    next(arg);
}

static void on_pg(void *arg, const struct mb_err *err, const struct mb_gcs_pg *pg, size_t n)
{
    struct app *a = arg;

    say(a, "get the group",
        err->code == 0 && n == 1 && pg->n_bundles == 1 && pg->state == MB_PG_PENDING &&
            memcmp(pg->id, a->pg.id, MB_PG_ID_BYTES) == 0,
        err->text);
    next(a);
}

static void on_pgs(void *arg, const struct mb_err *err, const struct mb_gcs_pg *pg, size_t n)
{
    (void)pg;
    say(arg, "list groups", err->code == 0 && n >= 1, err->text);
    next(arg);
}

static void on_remove(void *arg, const struct mb_err *err)
{
    step_ok(arg, "remove the group", err);
}

static void on_no_pg(void *arg, const struct mb_err *err, const struct mb_gcs_pg *pg, size_t n)
{
    (void)pg;
    (void)n;
    say(arg, "an unknown group", err->code == MB_ENOENT, err->text);
    next(arg);
}

static void on_actor(void *arg, const struct mb_err *err, const uint8_t *id)
{
    (void)id;
    say(arg, "no actor of that name", err->code == MB_ENOENT, err->text);
    next(arg);
}

static void on_finish(void *arg, const struct mb_err *err)
{
    step_ok(arg, "finish job", err);
}

static void on_unregister(void *arg, const struct mb_err *err)
{
    step_ok(arg, "unregister", err);
}

static void on_grpc_stopped(void *arg)
{
    ((struct app *)arg)->stopped = 1;
}

static void on_closed(void *arg)
{
    mb_grpc_stop(((struct app *)arg)->grpc, on_grpc_stopped, arg);
}

/* What a real GCS aborts at. */
static void refused_unsent(struct app *a)
{
    static struct mb_gcs_bundle nothing;
    struct mb_gcs_pg none = a->pg, empty = a->pg, foreign = a->pg;
    struct mb_err err = {0};

    none.n_bundles = 0;
    empty.bundles = &nothing;
    foreign.id[MB_PG_ID_BYTES - 1] ^= 1;
    say(a, "a group without bundles is not sent",
        mb_gcs_pg_create(a->gcs, &none, 0, on_create, a, NULL, &err) == MB_EINVAL, err.text);
    say(a, "nor one with a bundle of nothing",
        mb_gcs_pg_create(a->gcs, &empty, 0, on_create, a, NULL, &err) == MB_EINVAL, err.text);
    say(a, "nor one with the id of another job's",
        mb_gcs_pg_create(a->gcs, &foreign, 0, on_create, a, NULL, &err) == MB_EINVAL, err.text);
}

static int start_step(struct app *a, struct mb_err *err)
{
    struct mb_gcs *c = a->gcs;
    struct mb_gcs_view view = {
        .available = total, .n_available = 2, .total = total, .n_total = 2, .idle_ms = 1};
    static struct mb_gcs_bundle bundle = {.resources = total, .n_resources = 2};
    struct mb_gcs_node node = {.ip = "127.0.0.1",
                               .port = 1,
                               .hostname = "h",
                               .node_name = "mobula test",
                               .start_unix_ms = mb_unix_ms(),
                               .resources = total,
                               .n_resources = 2};
    struct mb_gcs_job job = {
        .entrypoint = "test", .submission_id = "mb-sub", .driver_ip = "127.0.0.1", .node_port = 1};
    uint8_t no_pg[MB_PG_ID_BYTES] = {7};

    memcpy(node.node_id, a->node_id, MB_NODE_ID_BYTES);
    memcpy(job.node_id, a->node_id, MB_NODE_ID_BYTES);
    memcpy(job.job_id, a->job_id, MB_JOB_ID_BYTES);
    a->pg.bundles = &bundle;
    a->pg.n_bundles = 1;
    switch (a->step++) {
    case 0:
        return mb_gcs_register_node(c, &node, 0, on_register, a, NULL, err);
    case 1:
        if (mb_gcs_sync_start(c, a->node_id, &view, err) != 0)
            return err->code;
        return mb_gcs_kv_put(c, "mb", "mb-key", "value", 5, 0, 0, on_put, a, NULL, err);
    case 2:
        return mb_gcs_kv_put(c, "mb", "mb-key", "other", 5, 0, 0, on_put_again, a, NULL, err);
    case 3:
        return mb_gcs_kv_get(c, "mb", "mb-key", 0, on_get, a, NULL, err);
    case 4:
        return mb_gcs_kv_get(c, "mb", "nothing", 0, on_missing, a, NULL, err);
    case 5:
        return mb_gcs_kv_keys(c, "mb", "mb-", 0, on_keys, a, NULL, err);
    case 6:
        return mb_gcs_kv_del(c, "mb", "mb-key", 0, 0, on_del, a, NULL, err);
    case 7:
        return mb_gcs_nodes(c, 0, on_nodes, a, NULL, err);
    case 8:
        return mb_gcs_check_alive(c, a->node_id, 0, on_alive, a, NULL, err);
    case 9:
        return mb_gcs_next_job_id(c, 0, on_job_id, a, NULL, err);
    case 10:
        memset(a->pg.job_id, 0x77, MB_JOB_ID_BYTES);
        mb_gcs_pg_new_id(a->pg.job_id, a->pg.id);
        return mb_gcs_pg_create(c, &a->pg, 0, on_unknown_job, a, NULL, err);
    case 11:
        return mb_gcs_add_job(c, &job, 0, on_add, a, NULL, err);
    case 12:
        return mb_gcs_jobs(c, 0, on_jobs, a, NULL, err);
    case 13:
        memcpy(a->pg.job_id, a->job_id, MB_JOB_ID_BYTES);
        mb_gcs_pg_new_id(a->pg.job_id, a->pg.id);
        refused_unsent(a);
        return mb_gcs_pg_create(c, &a->pg, 0, on_create, a, NULL, err);
    case 14:
        return mb_gcs_pg_wait(c, a->pg.id, 500, on_wait, a, NULL, err);
    case 15:
        return mb_gcs_pg_get(c, a->pg.id, 0, on_pg, a, NULL, err);
    case 16:
        return mb_gcs_pg_list(c, 0, on_pgs, a, NULL, err);
    case 17:
        return mb_gcs_pg_remove(c, a->pg.id, 0, on_remove, a, NULL, err);
    case 18:
        return mb_gcs_pg_get(c, no_pg, 0, on_no_pg, a, NULL, err);
    case 19:
        return mb_gcs_named_actor(c, "nobody", "nowhere", 0, on_actor, a, NULL, err);
    case 20:
        return mb_gcs_finish_job(c, a->job_id, 0, on_finish, a, NULL, err);
    case 21:
        mb_gcs_sync_stop(c);
        return mb_gcs_unregister_node(c, a->node_id, MB_GCS_DEATH_EXPECTED, "test over", 5000,
                                      on_unregister, a, NULL, err);
    case 22:
        return mb_gcs_check_alive(c, a->node_id, 0, on_gone, a, NULL, err);
    default:
        mb_gcs_close(c, on_closed, a);
        return 0;
    }
}

static void next(struct app *a)
{
    struct mb_err err = {0};

    if (start_step(a, &err) != 0) {
        say(a, "a request could not be sent", 0, err.text);
        mb_gcs_close(a->gcs, on_closed, a);
    }
}

static void on_event(void *arg, struct mb_gcs *c, enum mb_gcs_event event, const struct mb_err *err)
{
    struct app *a = arg;

    say(a, "handshake", event == MB_GCS_CONNECTED, err->text);
    printf("     Ray %s, cluster %s\n", mb_gcs_ray_version(c), mb_gcs_cluster_id(c));
    if (event == MB_GCS_CONNECTED)
        next(a);
    else
        mb_gcs_close(c, on_closed, a);
}

int main(int argc, char **argv)
{
    static struct app a;
    struct mb_err err = {0};
    struct mb_gcs_opts opts = {.address = argc > 1 ? argv[1] : ""};

    uv_loop_init(&a.loop);
    mb_random_bytes(a.node_id, sizeof a.node_id);
    if (mb_grpc_create(&a.loop, &a.grpc, &err) != 0 ||
        mb_gcs_create(&a.loop, a.grpc, &opts, on_event, &a, &a.gcs, &err) != 0 ||
        mb_gcs_connect(a.gcs, &err) != 0) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    uv_run(&a.loop, UV_RUN_DEFAULT);
    mb_grpc_destroy(a.grpc);
    return uv_loop_close(&a.loop) != 0 || a.failed || !a.stopped;
}
