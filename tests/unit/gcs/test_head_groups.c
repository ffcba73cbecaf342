/* The head's placement groups, their nodes and drivers: death of a node, restart of the head, a
 * node at another address. */
#include "head_fixture.h"
#include <stdio.h>

/* A driver of its own, and the id of a group of it. */
static void new_driver(struct fixture *f, struct mb_gcs_pg *pg, const char *submission)
{
    struct mb_gcs_job job = {
        .entrypoint = "x", .submission_id = submission, .driver_ip = "1.2.3.4"};
    struct result r;

    DO(f, r, mb_gcs_next_job_id(f->gcs, 0, fixture_on_job_id, &r, NULL, &e));
    memcpy(job.job_id, r.job_id, MB_JOB_ID_BYTES);
    DO(f, r, mb_gcs_add_job(f->gcs, &job, 0, fixture_on_done, &r, NULL, &e));
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

    DO(f, r, mb_gcs_pg_create(f->gcs, pg, 0, fixture_on_done, &r, NULL, &e));
    if (r.code != 0)
        fail_msg("%s", r.text);
    DO(f, r, mb_gcs_pg_wait(f->gcs, pg->id, 15000, fixture_on_done, &r, NULL, &e));
    if (r.code != 0)
        fail_msg("%s", r.text);
}

static void a_group_lives_with_its_driver(void **state)
{
    struct fixture *f = *state;
    struct mb_gcs_bundle b[2];
    struct mb_gcs_pg pg = two_bundles(b);
    struct result r;

    fixture_register_agent(f, 0);
    fixture_register_agent(f, 1);
    new_driver(f, &pg, "sub-1");
    f->agents[1].refuse = 1; /* the first attempt fails, everything is given back */
    create_and_wait(f, &pg);
    DO(f, r, mb_gcs_pg_get(f->gcs, pg.id, 0, fixture_on_groups, &r, NULL, &e));
    assert_int_equal(r.state, MB_PG_CREATED);
    assert_true(r.has_node[0] && r.has_node[1]);
    assert_memory_not_equal(r.nodes[0], r.nodes[1], MB_NODE_ID_BYTES);
    assert_int_equal(f->agents[0].returned, 1);
    assert_int_equal(f->agents[0].committed + f->agents[1].committed, 2);
    DO(f, r, mb_gcs_jobs(f->gcs, 0, fixture_on_jobs, &r, NULL, &e));
    assert_string_equal(r.value, "sub-1 0");
    DO(f, r, mb_gcs_finish_job(f->gcs, pg.job_id, 0, fixture_on_done, &r, NULL, &e));
    DO(f, r, mb_gcs_pg_get(f->gcs, pg.id, 0, fixture_on_groups, &r, NULL, &e));
    assert_int_equal(r.state, MB_PG_REMOVED);
    for (int i = 0; f->agents[0].returned + f->agents[1].returned < 3 && i < 100000; i++)
        uv_run(&f->loop, UV_RUN_ONCE);
    DO(f, r, mb_gcs_pg_wait(f->gcs, pg.id, 5000, fixture_on_done, &r, NULL, &e));
    assert_int_equal(r.code, MB_ENOENT);
}

static void what_would_abort_a_real_gcs(void **state)
{
    struct fixture *f = *state;
    struct mb_gcs_bundle b[2];
    struct mb_gcs_pg pg = two_bundles(b), other;
    struct result r;

    mb_gcs_pg_new_id(pg.job_id, pg.id);
    DO(f, r, mb_gcs_pg_create(f->gcs, &pg, 0, fixture_on_done, &r, NULL, &e));
    assert_int_equal(r.code, MB_ENOENT);
    new_driver(f, &pg, NULL);
    pg.name = "name";
    DO(f, r, mb_gcs_pg_create(f->gcs, &pg, 0, fixture_on_done, &r, NULL, &e));
    assert_int_equal(r.code, 0);
    DO(f, r, mb_gcs_pg_create(f->gcs, &pg, 0, fixture_on_done, &r, NULL, &e));
    assert_int_equal(r.code, 0);
    other = pg;
    mb_gcs_pg_new_id(other.job_id, other.id);
    DO(f, r, mb_gcs_pg_create(f->gcs, &other, 0, fixture_on_done, &r, NULL, &e));
    assert_int_equal(r.code, MB_EEXIST);
    DO(f, r, mb_gcs_pg_get(f->gcs, other.id, 0, fixture_on_groups, &r, NULL, &e));
    assert_int_equal(r.code, MB_ENOENT);
    DO(f, r, mb_gcs_pg_wait(f->gcs, pg.id, 300, fixture_on_done, &r, NULL, &e));
    assert_int_equal(r.code, MB_ETIMEOUT);
    DO(f, r, mb_gcs_pg_list(f->gcs, 0, fixture_on_groups, &r, NULL, &e));
    assert_int_equal(r.n, 1);
    DO(f, r, mb_gcs_pg_remove(f->gcs, pg.id, 0, fixture_on_done, &r, NULL, &e));
    assert_int_equal(r.code, 0);
}

static void a_lost_bundle_is_placed_anew(void **state)
{
    struct fixture *f = *state;
    struct mb_gcs_bundle b[2];
    struct mb_gcs_pg pg = two_bundles(b);
    struct result r;

    fixture_register_agent(f, 0);
    fixture_register_agent(f, 1);
    new_driver(f, &pg, NULL);
    create_and_wait(f, &pg);
    fixture_register_agent(f, 1); /* it saw no answer: what it has is in the table */
    DO(f, r,
       mb_gcs_unregister_node(f->gcs, f->agents[1].id, MB_GCS_DEATH_EXPECTED, "", 0,
                              fixture_on_done, &r, NULL, &e));
    DO(f, r, mb_gcs_pg_get(f->gcs, pg.id, 0, fixture_on_groups, &r, NULL, &e));
    assert_int_equal(r.state, MB_PG_RESCHEDULING);
    assert_int_equal(f->agents[1].released, 1);
    f->agents[1].id[0] = 9;       /* a dead id does not come back */
    fixture_register_agent(f, 1); /* what it held goes before it is given anything */
    DO(f, r, mb_gcs_pg_wait(f->gcs, pg.id, 15000, fixture_on_done, &r, NULL, &e));
    assert_int_equal(f->agents[1].released, 2);
    assert_int_equal(f->agents[1].in_use, 0);
    assert_int_equal(f->agents[1].prepared_before, 1);
    DO(f, r,
       mb_gcs_unregister_node(f->gcs, f->agents[1].id, MB_GCS_DEATH_EXPECTED, "", 0,
                              fixture_on_done, &r, NULL, &e));
    fixture_register_agent(f, 2);
    DO(f, r, mb_gcs_pg_wait(f->gcs, pg.id, 15000, fixture_on_done, &r, NULL, &e));
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

    fixture_register_agent(f, 0);
    fixture_register_agent(f, 1);
    new_driver(f, &pg, NULL);
    create_and_wait(f, &pg);
    DO(f, r, mb_gcs_kv_put(f->gcs, "", "key", "value", 5, 1, 0, fixture_on_count, &r, NULL, &e));
    f->agents[0].released = f->agents[1].released = 0;
    fixture_stop_head(f);
    fixture_start_head(f, "a.db");
    /* The client goes on by itself: same cluster. */
    DO(f, r, mb_gcs_kv_get(f->gcs, "", "key", 15000, fixture_on_value, &r, NULL, &e));
    assert_string_equal(r.value, "value");
    DO(f, r, mb_gcs_nodes(f->gcs, 0, fixture_on_nodes, &r, NULL, &e));
    assert_int_equal(r.n, 2);
    DO(f, r, mb_gcs_pg_wait(f->gcs, pg.id, 15000, fixture_on_done, &r, NULL, &e));
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
    DO(f, *r, mb_gcs_move_node(f->gcs, &to, 0, fixture_on_done, r, NULL, &e));
}

/* Who asked for node 0 finds it where agent 2 listens, with what it holds. */
static void a_node_moves(void **state)
{
    struct fixture *f = *state;
    const uint8_t nobody[MB_NODE_ID_BYTES] = {77};
    struct mb_gcs_bundle b[2];
    struct mb_gcs_pg pg = two_bundles(b);
    struct result r;

    fixture_register_agent(f, 0);
    fixture_register_agent(f, 1);
    new_driver(f, &pg, NULL);
    create_and_wait(f, &pg);
    move(f, f->agents[0].id, "127.0.0.1", f->agents[2].port, &r);
    assert_int_equal(r.code, 0);
    DO(f, r, mb_gcs_pg_get(f->gcs, pg.id, 0, fixture_on_groups, &r, NULL, &e));
    assert_int_equal(r.state, MB_PG_CREATED);
    f->agents[0].released = f->agents[1].released = 0;
    fixture_stop_head(f);
    fixture_start_head(f, "a.db"); /* it was stored */
    for (int i = 0; (!f->agents[2].released || !f->agents[1].released) && i < 100000; i++)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_int_equal(f->agents[2].in_use, 1);
    assert_int_equal(f->agents[0].released, 0);
    DO(f, r, mb_gcs_nodes(f->gcs, 15000, fixture_on_nodes, &r, NULL, &e));
    assert_int_equal(r.n, 2);
    assert_int_equal(r.dead[0] + r.dead[1], 0);
    int at = r.ports[0] == f->agents[2].port ? 0 : 1;
    assert_int_equal(r.ports[at], f->agents[2].port);
    assert_int_equal(r.http_ports[at], f->agents[2].port + 1);
    DO(f, r, mb_gcs_pg_remove(f->gcs, pg.id, 0, fixture_on_done, &r, NULL, &e));
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
       mb_gcs_unregister_node(f->gcs, f->agents[0].id, MB_GCS_DEATH_EXPECTED, "", 0,
                              fixture_on_done, &r, NULL, &e));
    move(f, f->agents[0].id, "127.0.0.1", 4711, &r);
    assert_int_equal(r.code, MB_ENOENT);
}

static void on_reason(void *arg, const struct mb_err *err, const struct mb_gcs_waiting *w)
{
    struct result *r = arg;

    assert_int_equal(err->code, 0);
    snprintf(r->value, sizeof r->value, "%s", w->reason);
    r->done = 1;
}

static void assert_reason(struct fixture *f, const struct mb_gcs_pg *pg, const char *text)
{
    struct result r;

    DO(f, r, mb_gcs_pg_reason(f->gcs, pg->id, 0, on_reason, &r, NULL, &e));
    assert_string_equal(r.value, text);
}

/* Both are called "n". An id is shown while that says nothing, and no longer. */
static void namesakes_are_told_apart(void **state)
{
    static const struct mb_gcs_resource many[] = {{"mobula_slot", 8}};
    struct fixture *f = *state;
    struct mb_gcs_bundle bundle = {.resources = many, .n_resources = 1};
    struct mb_gcs_pg pg = {.bundles = &bundle, .n_bundles = 1, .strategy = MB_PG_STRICT_SPREAD};
    struct result r;

    fixture_register_agent(f, 0);
    fixture_register_agent(f, 1);
    new_driver(f, &pg, NULL);
    DO(f, r, mb_gcs_pg_create(f->gcs, &pg, 0, fixture_on_done, &r, NULL, &e));
    assert_int_equal(r.code, 0);
    assert_reason(f, &pg,
                  "waiting for 1 node with 8 mobula_slot: node n (010000000000) has 4 mobula_slot, "
                  "node n (020000000000) has 4 mobula_slot");
    DO(f, r,
       mb_gcs_unregister_node(f->gcs, f->agents[0].id, MB_GCS_DEATH_EXPECTED, "", 0,
                              fixture_on_done, &r, NULL, &e));
    assert_reason(f, &pg, "waiting for 1 node with 8 mobula_slot: node n has 4 mobula_slot");
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, fixture_setup, fixture_teardown)
    const struct CMUnitTest tests[] = {
        T(a_group_lives_with_its_driver),
        T(what_would_abort_a_real_gcs),
        T(a_lost_bundle_is_placed_anew),
        T(a_restarted_head_knows_everything),
        T(a_node_moves),
        T(namesakes_are_told_apart),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
