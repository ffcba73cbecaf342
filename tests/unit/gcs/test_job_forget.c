/* What nodes are told to forget: never a job that is there, though another one had its id. */
#include <string.h>
#include "../base/grpc_fixture.h"
#include "base/clock.h"
#include "gcs/services.h"
#include "proto/mobula/agent.pb-c.h"

enum { IDS_MAX = 8, LATER_MS = 60000 };

struct node { /* whose agent is a server here */
    struct fixture f;
    struct mb_head head; /* as much of it as is needed */
    struct head_node node, *nodes[1];
    Ray__Rpc__GcsNodeInfo info;
    int n_calls, is_deaf;
    size_t n_ids;
    char ids[IDS_MAX][20];
};

static void on_forget(void *arg, struct mb_grpc_req *req, const ProtobufCMessage *request)
{
    struct node *t = arg;
    const Mobula__V1__ForgetRequest *q = (const void *)request;
    Mobula__V1__ForgetReply reply = MOBULA__V1__FORGET_REPLY__INIT;

    t->n_calls++;
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

static void forget_here(void *self, const char *id)
{
    (void)self;
    (void)id;
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_id_that_came_back),
        cmocka_unit_test(an_id_that_came_back_before_it_is_told_again),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
