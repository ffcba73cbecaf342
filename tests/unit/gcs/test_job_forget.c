/* What nodes are told to forget: never a job that is there, though another one had its id. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include "../base/grpc_fixture.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "gcs/jobs_internal.h"
#include "gcs/services.h"
#include "proto/mobula/agent.pb-c.h"

enum { IDS_MAX = 8, LATER_MS = 60000 };

struct node { /* whose agent is a server here */
    struct fixture f;
    struct mb_head head; /* as much of it as is needed */
    struct head_node node, *nodes[1];
    Ray__Rpc__GcsNodeInfo info;
    int n_calls, is_deaf;
    size_t n_told; /* ids, in all calls that were answered */
    size_t n_most; /* in one call */
    size_t n_ids;
    char ids[IDS_MAX][20];
};

static void on_forget(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct node *t = arg;
    const Mobula__V1__ForgetRequest *q = (const void *)request;
    Mobula__V1__ForgetReply reply = MOBULA__V1__FORGET_REPLY__INIT;

    t->n_calls++;
    t->n_told += t->is_deaf ? 0 : q->n_submission_ids;
    t->n_most = q->n_submission_ids > t->n_most ? q->n_submission_ids : t->n_most;
    for (t->n_ids = 0; t->n_ids < q->n_submission_ids && t->n_ids < IDS_MAX; t->n_ids++)
        snprintf(t->ids[t->n_ids], sizeof t->ids[0], "%s", q->submission_ids[t->n_ids]);
    if (t->is_deaf)
        mb_grpc_reply_error(req, MB_GRPC_UNAVAILABLE, "not now");
    else
        mb_grpc_reply(req, &reply.base);
}

static const struct mb_grpc_method methods[] = {
    {"/mobula.v1.NodeAgent/Forget", &mobula__v1__forget_request__descriptor, on_forget, NULL, 0},
};

static int n_forgotten_here;

static void forget_here(void *self, const char *id)
{
    (void)self;
    (void)id;
    n_forgotten_here++;
}

static const char *no_node(void *self)
{
    (void)self;
    return "";
}

static const struct mb_job_runner runner = {.forget = forget_here, .node_id_hex = no_node};

static void begin(struct node *t)
{
    struct mb_err err = {0};

    memset(t, 0, sizeof *t);
    n_forgotten_here = 0;
    fixture_start(&t->f, NULL, methods, 1, t);
    t->info = (Ray__Rpc__GcsNodeInfo)RAY__RPC__GCS_NODE_INFO__INIT;
    t->info.node_manager_address = (char *)(uintptr_t) "127.0.0.1";
    t->info.node_manager_port = t->f.port;
    t->node.info = &t->info;
    t->nodes[0] = &t->node;
    t->head.loop = &t->f.loop;
    t->head.grpc = t->f.client_g;
    t->head.runner = &runner;
    t->head.nodes = t->nodes;
    t->head.n_nodes = 1;
    assert_int_equal(mb_tables_open_memory(&t->f.loop, &t->head.store, &err), 0);
}

static void on_closed(void *arg)
{
    *(int *)arg = 1;
}

static void on_barrier(void *arg, const struct mb_err *err)
{
    (void)err;
    *(int *)arg = 1;
}

static void end(struct node *t)
{
    int closed = 0;

    head_forget_close(&t->head);
    mb_tables_close(t->head.store, on_closed, &closed);
    fixture_wait(&t->f, &closed, 1);
    mb_grpc_channel_destroy(t->node.channel);
    fixture_end(&t->f);
}

/* Until the head has heard that the node forgets what it was told. */
static void tick_until_told(struct node *t)
{
    t->f.guard_fired = 0;
    uv_timer_start(&t->f.guard, fixture_on_guard, 60000, 0);
    do {
        head_forget_tick(&t->head, mb_mono_ms() + LATER_MS);
        if (t->head.n_forgets > 0)
            uv_run(&t->f.loop, UV_RUN_ONCE);
    } while (t->head.n_forgets > 0 && !t->f.guard_fired);
    uv_timer_stop(&t->f.guard);
    assert_false(t->f.guard_fired);
}

static void an_id_that_came_back(void **state)
{
    struct mb_job_entry back = {.id = "back", .record = &back};
    struct node t;

    (void)state;
    begin(&t);
    head_forget_files(&t.head, "back");
    head_forget_files(&t.head, "gone");
    assert_int_equal(mb_job_index_add(&t.head.job_index, &back), 0);
    tick_until_told(&t);
    assert_int_equal(t.n_calls, 1);
    assert_int_equal(t.n_ids, 1);
    assert_string_equal(t.ids[0], "gone");
    head_forget_files(&t.head, "back");
    tick_until_told(&t);
    assert_int_equal(t.n_calls, 1);
    mb_job_index_remove(&t.head.job_index, &back);
    end(&t);
}

static void an_id_that_came_back_before_it_is_told_again(void **state)
{
    struct mb_job_entry back = {.id = "back", .record = &back};
    struct node t;

    (void)state;
    begin(&t);
    t.is_deaf = 1;
    head_forget_files(&t.head, "back");
    head_forget_files(&t.head, "gone");
    head_forget_tick(&t.head, mb_mono_ms());
    fixture_wait(&t.f, &t.n_calls, 1);
    assert_int_equal(t.n_ids, 2);
    t.is_deaf = 0;
    assert_int_equal(mb_job_index_add(&t.head.job_index, &back), 0);
    tick_until_told(&t);
    assert_int_equal(t.n_calls, 2);
    assert_int_equal(t.n_ids, 1);
    assert_string_equal(t.ids[0], "gone");
    mb_job_index_remove(&t.head.job_index, &back);
    end(&t);
}

static void a_node_that_is_deaf_for_long(void **state)
{
    struct node t;

    (void)state;
    begin(&t);
    t.is_deaf = 1;
    head_forget_files(&t.head, "gone");
    for (uint64_t until = mb_mono_ms() + 60000; t.n_calls < 8 && mb_mono_ms() < until;) {
        head_forget_tick(&t.head, mb_mono_ms() + LATER_MS);
        uv_run(&t.f.loop, UV_RUN_NOWAIT);
        assert_int_equal(t.head.n_forgets, 1);
    }
    assert_int_equal(t.n_calls, 8);
    t.is_deaf = 0;
    tick_until_told(&t);
    assert_int_equal(t.n_told, 1);
    t.is_deaf = 1;
    head_forget_files(&t.head, "gone too");
    head_forget_tick(&t.head, mb_mono_ms());
    fixture_wait(&t.f, &t.n_calls, 10);
    t.info.state = RAY__RPC__GCS_NODE_INFO__GCS_NODE_STATE__DEAD;
    tick_until_told(&t); /* it is not: nobody waits for it any more */
    assert_int_equal(t.n_calls, 10);
    end(&t);
}

static void many_at_once_go_in_several_requests(void **state)
{
    struct node t;
    char id[24];

    (void)state;
    begin(&t);
    for (int i = 0; i < 1000; i++) {
        snprintf(id, sizeof id, "job-%d", i);
        head_forget_files(&t.head, id);
    }
    tick_until_told(&t);
    assert_int_equal(t.n_told, 1000);
    assert_int_equal(t.n_calls, 4);
    assert_int_equal(t.n_most, 256);
    end(&t);
}

static void what_waits_for_a_deaf_node_is_bounded(void **state)
{
    struct node t;
    char id[24];

    (void)state;
    begin(&t);
    t.is_deaf = 1;
    for (int i = 0; i < 10000; i++) {
        snprintf(id, sizeof id, "job-%d", i);
        head_forget_files(&t.head, id);
        if (i % 1000 == 999)
            head_forget_tick(&t.head, 0);
    }
    assert_int_equal(t.head.n_forgotten, 0);
    assert_true(t.head.n_forgets > 0 && t.head.n_forgets <= 16);
    end(&t);
}

static void a_few_at_a_time_for_a_deaf_node(void **state)
{
    struct node t;
    char id[24];

    (void)state;
    begin(&t);
    t.is_deaf = 1;
    for (int i = 0; i < 200; i++) {
        snprintf(id, sizeof id, "job-%d", i);
        head_forget_files(&t.head, id);
        head_forget_tick(&t.head, mb_mono_ms());
        while (t.n_calls == 0)
            uv_run(&t.f.loop, UV_RUN_ONCE);
        uv_run(&t.f.loop, UV_RUN_NOWAIT);
    }
    assert_true(t.head.n_forgets <= 8);
    t.is_deaf = 0;
    tick_until_told(&t);
    assert_int_equal(t.n_told, 200);
    end(&t);
}

/* ---- the order of what is deleted ---- */

static const char *const key_of_gone = "_ray_internal_job_info_gone";

static void store(struct node *t, const char *ns, const char *key, const char *value)
{
    struct mb_err err = {0};

    assert_int_equal(mb_tables_put(t->head.store, MB_TABLES_KV, mb_blob_str(ns), mb_blob_str(key),
                                   mb_blob_str(value), NULL, NULL, &err),
                     0);
}

static int is_stored(struct node *t, const char *ns, const char *key)
{
    return mb_tables_get(t->head.store, MB_TABLES_KV, mb_blob_str(ns), mb_blob_str(key), NULL);
}

static void load_jobs(struct node *t)
{
    struct mb_err err = {0};

    t->head.max_ended_jobs = 10;
    store(t, "job", key_of_gone, "{\"status\": \"SUCCEEDED\", \"end_time\": 1}");
    store(t, "mobula", "gang:gone", "{}");
    assert_int_equal(head_jobs_load(&t->head, &err), 0);
    assert_non_null(head_job_find(&t->head, "gone"));
}

static void free_jobs(struct node *t)
{
    while (t->head.n_jobs > 0) {
        struct head_job *job = t->head.jobs[--t->head.n_jobs];

        mb_job_index_remove(&t->head.job_index, &job->entry);
        json_decref(job->info);
        mb_free(job->id);
        mb_free(job);
    }
    mb_free(t->head.jobs);
}

static void files_go_after_the_commit(void **state)
{
    struct mb_err err = {0};
    struct node t;

    (void)state;
    begin(&t);
    load_jobs(&t);
    assert_int_equal(head_job_delete(&t.head, head_job_find(&t.head, "gone"), &err), 0);
    assert_null(head_job_find(&t.head, "gone"));
    assert_int_equal(n_forgotten_here, 0);
    assert_true(is_stored(&t, "mobula", "gang:gone"));
    assert_true(is_stored(&t, "mobula", "job_forgotten:gone"));
    fixture_wait(&t.f, &n_forgotten_here, 1);
    assert_false(is_stored(&t, "job", key_of_gone));
    assert_false(is_stored(&t, "mobula", "gang:gone"));
    assert_false(is_stored(&t, "mobula", "job_forgotten:gone"));
    assert_int_equal(t.head.n_deleting, 0);
    tick_until_told(&t);
    assert_int_equal(t.n_told, 1);
    free_jobs(&t);
    end(&t);
}

/* However fast jobs end, no more of them are remembered than the limit says. */
static void no_slower_than_jobs_end(void **state)
{
    struct mb_err err = {0};
    struct node t;
    char key[64];

    (void)state;
    begin(&t);
    t.head.max_ended_jobs = 10;
    for (int i = 0; i < 1000; i++) {
        snprintf(key, sizeof key, "_ray_internal_job_info_%d", i);
        store(&t, "job", key, "{\"status\": \"SUCCEEDED\", \"end_time\": 1}");
    }
    assert_int_equal(head_jobs_load(&t.head, &err), 0);
    jobs_forget_ended(&t.head);
    assert_int_equal(t.head.n_jobs, 1000 - 128); /* a former head's, a few at a time */
    fixture_wait(&t.f, &n_forgotten_here, 128);
    head_forget_tick(&t.head, mb_mono_ms());
    t.head.n_ended_lately = 500;
    jobs_forget_ended(&t.head);
    assert_int_equal(t.head.n_jobs, 1000 - 128 - 500 - 128);
    fixture_wait(&t.f, &n_forgotten_here, 128 + 500 + 128);
    free_jobs(&t);
    end(&t);
}

/* The former head was killed after the commit, or before it. */
static void the_next_head_takes_the_files(void **state)
{
    struct node t;

    (void)state;
    begin(&t);
    load_jobs(&t);
    store(&t, "mobula", "job_forgotten:gone", "1");
    store(&t, "mobula", "job_forgotten:half gone", "1");
    head_forget_resume(&t.head);
    assert_int_equal(n_forgotten_here, 1);
    assert_false(is_stored(&t, "mobula", "job_forgotten:gone"));
    assert_false(is_stored(&t, "mobula", "job_forgotten:half gone"));
    assert_true(is_stored(&t, "mobula", "gang:gone"));
    tick_until_told(&t);
    assert_int_equal(t.n_told, 1);
    assert_string_equal(t.ids[0], "half gone");
    free_jobs(&t);
    end(&t);
}

static void deletions_are_bounded(void **state)
{
    struct mb_err err = {0};
    struct node t;

    (void)state;
    begin(&t);
    load_jobs(&t);
    t.head.n_deleting = 1024;
    assert_int_equal(head_job_delete(&t.head, head_job_find(&t.head, "gone"), &err), MB_EFULL);
    assert_non_null(head_job_find(&t.head, "gone"));
    assert_true(is_stored(&t, "job", key_of_gone));
    free_jobs(&t);
    end(&t);
}

/* The disk takes no more. */
static void what_is_not_deleted_is_there_again(void **state)
{
    char dir[] = "/tmp/mb-forget-XXXXXX", path[64];
    struct rlimit old, tight = {0};
    struct mb_err err = {0};
    struct node t;
    int closed = 0;

    (void)state;
    begin(&t);
    mb_tables_close(t.head.store, on_closed, &closed);
    fixture_wait(&t.f, &closed, 1);
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/s", dir);
    assert_int_equal(mb_tables_open_sqlite(&t.f.loop, path, 0, &t.head.store, &err), 0);
    load_jobs(&t);
    closed = 0;
    assert_int_equal(mb_tables_barrier(t.head.store, on_barrier, &closed, &err), 0);
    fixture_wait(&t.f, &closed, 1);
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    tight.rlim_max = old.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
    closed = 0;
    assert_int_equal(head_job_delete(&t.head, head_job_find(&t.head, "gone"), &err), 0);
    assert_int_equal(mb_tables_barrier(t.head.store, on_barrier, &closed, &err), 0);
    fixture_wait(&t.f, &closed, 1);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(n_forgotten_here, 0);
    assert_non_null(head_job_find(&t.head, "gone"));
    assert_true(is_stored(&t, "mobula", "gang:gone"));
    assert_int_equal(head_job_delete(&t.head, head_job_find(&t.head, "gone"), &err), 0);
    fixture_wait(&t.f, &n_forgotten_here, 1);
    free_jobs(&t);
    end(&t);
    assert_int_equal(mb_fs_remove_tree(dir, &err), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_id_that_came_back),
        cmocka_unit_test(an_id_that_came_back_before_it_is_told_again),
        cmocka_unit_test(a_node_that_is_deaf_for_long),
        cmocka_unit_test(many_at_once_go_in_several_requests),
        cmocka_unit_test(what_waits_for_a_deaf_node_is_bounded),
        cmocka_unit_test(a_few_at_a_time_for_a_deaf_node),
        cmocka_unit_test(files_go_after_the_commit),
        cmocka_unit_test(no_slower_than_jobs_end),
        cmocka_unit_test(the_next_head_takes_the_files),
        cmocka_unit_test(deletions_are_bounded),
        cmocka_unit_test(what_is_not_deleted_is_there_again),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
