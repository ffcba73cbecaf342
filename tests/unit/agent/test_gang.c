/* The state machine of an attempt: the paths of its story, leases, and a seeded random walk. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>
#include "agent/gang_rules.h"

static unsigned step(struct mb_gang *g, enum mb_gang_event e)
{
    unsigned actions = 99;
    struct mb_err err;

    if (mb_gang_step(g, e, &actions, &err) != MB_OK)
        fail_msg("%s", err.text);
    assert_null(mb_gang_invariant(g));
    return actions;
}

static void refuse(struct mb_gang *g, enum mb_gang_event e, const char *text)
{
    struct mb_gang before = *g;
    struct mb_err err;
    unsigned actions;

    assert_int_equal(mb_gang_step(g, e, &actions, &err), MB_ESTATE);
    assert_string_equal(err.text, text);
    assert_int_equal(actions, 0);
    assert_memory_equal(g, &before, sizeof(before));
}

static void test_happy_path(void **state)
{
    struct mb_gang g;

    (void)state;
    mb_gang_init(&g);
    refuse(&g, MB_GANG_EV_START, "start is not possible while the gang is CREATED");
    assert_int_equal(step(&g, MB_GANG_EV_LAUNCH), MB_GANG_ACT_LAUNCH);
    refuse(&g, MB_GANG_EV_LAUNCH, "launch is not possible while the gang is LAUNCHING");
    assert_int_equal(step(&g, MB_GANG_EV_WORKERS_UP), 0);
    assert_int_equal(step(&g, MB_GANG_EV_START), MB_GANG_ACT_SEND_START);
    assert_int_equal(step(&g, MB_GANG_EV_START), 0);
    assert_int_equal(step(&g, MB_GANG_EV_UPLOADS_BUSY), 0);
    assert_int_equal(step(&g, MB_GANG_EV_ALL_EXITED), MB_GANG_ACT_FREE_NODE);
    assert_int_equal(step(&g, MB_GANG_EV_END), 0);
    assert_int_equal(g.state, MB_GANG_DRAINING);
    assert_int_equal(step(&g, MB_GANG_EV_UPLOADS_IDLE), MB_GANG_ACT_RELEASE);
    assert_int_equal(g.state, MB_GANG_ENDED);
    assert_string_equal(g.cause, "");
    assert_int_equal(step(&g, MB_GANG_EV_END), 0);
}

static void test_rank_failure(void **state)
{
    struct mb_gang g;

    (void)state;
    mb_gang_init(&g);
    step(&g, MB_GANG_EV_LAUNCH);
    assert_int_equal(step(&g, MB_GANG_EV_COMMANDS_UP), MB_GANG_ACT_SEND_START);
    assert_int_equal(step(&g, MB_GANG_EV_RANK_FAILED), MB_GANG_ACT_STOP_RANKS);
    assert_int_equal(step(&g, MB_GANG_EV_RANK_FAILED), 0);
    assert_int_equal(step(&g, MB_GANG_EV_ALL_EXITED), MB_GANG_ACT_FREE_NODE);
    assert_string_equal(g.cause, "a rank failed");
    assert_int_equal(g.state, MB_GANG_DRAINING); /* until the driver has heard of it */
    assert_int_equal(step(&g, MB_GANG_EV_END), MB_GANG_ACT_RELEASE);
}

static void test_stop_before_processes(void **state)
{
    struct mb_gang g;

    (void)state;
    mb_gang_init(&g);
    assert_int_equal(step(&g, MB_GANG_EV_BUNDLES_REMOVED),
                     MB_GANG_ACT_FREE_NODE | MB_GANG_ACT_RELEASE);
    mb_gang_init(&g);
    step(&g, MB_GANG_EV_LAUNCH);
    assert_int_equal(step(&g, MB_GANG_EV_STOP), MB_GANG_ACT_STOP_RANKS);
    assert_int_equal(step(&g, MB_GANG_EV_COMMANDS_UP), 0);
    assert_int_equal(step(&g, MB_GANG_EV_ALL_EXITED), MB_GANG_ACT_FREE_NODE | MB_GANG_ACT_RELEASE);
    mb_gang_init(&g);
    step(&g, MB_GANG_EV_LAUNCH);
    assert_int_equal(step(&g, MB_GANG_EV_LAUNCH_FAILED), MB_GANG_ACT_FREE_NODE);
    assert_int_equal(step(&g, MB_GANG_EV_END), MB_GANG_ACT_RELEASE);
    assert_string_equal(g.cause, "launch failed");
}

/* The driver waits for the exit of each rank or for Ended; of ranks that were never spawned it
 * hears no exit, so Halt is enough to end them. */
static void test_halt_before_processes(void **state)
{
    struct mb_gang g;

    (void)state;
    mb_gang_init(&g);
    assert_int_equal(step(&g, MB_GANG_EV_HALT), MB_GANG_ACT_FREE_NODE | MB_GANG_ACT_RELEASE);
    mb_gang_init(&g); /* while the checkpoint is pulled */
    step(&g, MB_GANG_EV_LAUNCH);
    assert_int_equal(step(&g, MB_GANG_EV_HALT), MB_GANG_ACT_STOP_RANKS);
    assert_int_equal(step(&g, MB_GANG_EV_ALL_EXITED), MB_GANG_ACT_FREE_NODE | MB_GANG_ACT_RELEASE);
    mb_gang_init(&g);
    step(&g, MB_GANG_EV_LAUNCH);
    step(&g, MB_GANG_EV_LAUNCH_FAILED);
    assert_int_equal(step(&g, MB_GANG_EV_HALT), MB_GANG_ACT_RELEASE);
    mb_gang_init(&g); /* all were spawned: a rank elsewhere may still seal what is here */
    step(&g, MB_GANG_EV_LAUNCH);
    step(&g, MB_GANG_EV_WORKERS_UP);
    step(&g, MB_GANG_EV_HALT);
    assert_int_equal(step(&g, MB_GANG_EV_ALL_EXITED), MB_GANG_ACT_FREE_NODE);
    assert_int_equal(step(&g, MB_GANG_EV_HALT), 0);
    assert_int_equal(step(&g, MB_GANG_EV_END), MB_GANG_ACT_RELEASE);
}

static void test_lease(void **state)
{
    struct mb_gang g;

    (void)state;
    mb_gang_init(&g);
    assert_false(mb_gang_lease_is_over(&g, UINT64_MAX));
    mb_gang_lease(&g, 5, 100);
    assert_false(mb_gang_lease_is_over(&g, 1099));
    mb_gang_renew(&g, 1000);
    assert_false(mb_gang_lease_is_over(&g, 1999));
    assert_true(mb_gang_lease_is_over(&g, 2000));
    assert_false(mb_gang_lease_is_over(&g, 3000));
    mb_gang_lease(&g, UINT64_MAX, 0);
    assert_true(mb_gang_lease_is_over(&g, 3600000));
}

/* A node that is cut off waits longer for its driver, unless that hung up. */
static void test_cut_off(void **state)
{
    struct mb_gang g;

    (void)state;
    mb_gang_init(&g);
    mb_gang_cut_off(&g, 100000);
    assert_false(mb_gang_waits_cut_off(&g, 0)); /* no lease yet */
    mb_gang_lease(&g, 60000, 1000);
    assert_true(mb_gang_waits_cut_off(&g, 100999));
    assert_false(mb_gang_waits_cut_off(&g, 101000));
    mb_gang_cut_is_over(&g, 90000);
    assert_false(mb_gang_lease_is_over(&g, 149999));
    assert_true(mb_gang_lease_is_over(&g, 150000));

    mb_gang_lease(&g, 60000, 0);
    mb_gang_cut_off(&g, UINT64_MAX);
    assert_true(mb_gang_waits_cut_off(&g, 599999));
    assert_false(mb_gang_waits_cut_off(&g, 600000));
    mb_gang_cut_is_over(&g, 600000);
    assert_true(mb_gang_lease_is_over(&g, 600000));

    mb_gang_lease(&g, 60000, 0);
    mb_gang_stream_ended(&g, 20000); /* after it was silent */
    assert_true(mb_gang_waits_cut_off(&g, 60000));
    mb_gang_renew(&g, 30000);
    mb_gang_stream_ended(&g, 31000);
    assert_false(mb_gang_waits_cut_off(&g, 31000));
}

static void test_names(void **state)
{
    (void)state;
    for (int s = 0; s < MB_GANG_N_STATES; s++)
        assert_int_equal(mb_gang_state_parse(mb_gang_state_name((enum mb_gang_state)s)), s);
    assert_int_equal(mb_gang_state_parse("NONE"), MB_GANG_N_STATES);
    assert_string_equal(mb_gang_event_name(MB_GANG_EV_DRAINED), "drained");
    assert_string_equal(mb_gang_event_name(MB_GANG_N_EVENTS), "?");
}

/* Any order of events keeps the invariant; after a release and the end of processes and uploads
 * every attempt ends, whatever happened before. */
static void test_random(void **state)
{
    (void)state;
    for (unsigned first = 1; first <= 2000; first++) {
        unsigned seed = first, actions;
        struct mb_gang g;

        mb_gang_init(&g);
        for (int i = 0; i < 40; i++) {
            mb_gang_step(&g, (enum mb_gang_event)(rand_r(&seed) % MB_GANG_N_EVENTS), &actions,
                         NULL);
            if (mb_gang_invariant(&g) != NULL)
                fail_msg("seed %u: %s", first, mb_gang_invariant(&g));
        }
        mb_gang_step(&g, MB_GANG_EV_END, &actions, NULL);
        mb_gang_step(&g, MB_GANG_EV_ALL_EXITED, &actions, NULL);
        mb_gang_step(&g, MB_GANG_EV_UPLOADS_IDLE, &actions, NULL);
        if (g.state != MB_GANG_ENDED)
            fail_msg("seed %u: left in %s", first, mb_gang_state_name(g.state));
    }
}

static void test_who_may_say_hello(void **state)
{
    struct mb_resource slots = {MB_RESOURCE_SLOT, 2};
    struct mb_bundle_spec spec = {.pg = {{7}}, .want = {{MB_RESOURCE_SLOT, 1}}, .n_want = 1};
    struct mb_ledger *l;
    struct mb_err err;

    (void)state;
    assert_int_equal(mb_ledger_create(&slots, 1, &l, &err), MB_OK);
    assert_int_equal(mb_gang_admit(l, &spec.pg, &spec.pg, 1, 0, &err), MB_ENOENT);
    assert_int_equal(mb_ledger_prepare(l, &spec, 1, &err), MB_OK);
    assert_int_equal(mb_gang_admit(l, &spec.pg, &spec.pg, 1, 0, &err),
                     MB_ENOENT); /* prepared is not ours */
    assert_int_equal(mb_ledger_commit(l, &spec, 1, &err), MB_OK);
    assert_int_equal(mb_gang_admit(l, &spec.pg, &spec.pg, 2, 0, &err), MB_OK);
    assert_int_equal(mb_gang_admit(l, &spec.pg, &spec.pg, 1, 1, &err), MB_ESTATE);
    assert_int_equal(mb_ledger_remove(l, &spec.pg, 0), 0);
    assert_int_equal(mb_gang_admit(l, &spec.pg, &spec.pg, 2, 1, &err),
                     MB_OK); /* known: it may see its end */
    assert_int_equal(mb_gang_admit(l, &spec.pg, &spec.pg, 3, 0, &err), MB_ENOENT);
    mb_ledger_destroy(l);
}

static void test_ended_by_stop(void **state)
{
    (void)state;
    assert_true(mb_gang_ended_by_stop(0, 0, 30000));
    assert_true(mb_gang_ended_by_stop(SIGTERM, 5, 30000));
    assert_false(mb_gang_ended_by_stop(SIGKILL, 29999, 30000));
    assert_true(mb_gang_ended_by_stop(SIGKILL, 30000, 30000));
    assert_true(mb_gang_ended_by_stop(SIGKILL, 0, 0));
}

static void test_adoption(void **state)
{
    struct mb_gang g;

    (void)state;
    assert_int_equal(mb_gang_adoption(MB_GANG_CREATED), MB_GANG_ADOPT_NOTHING);
    assert_int_equal(mb_gang_adoption(MB_GANG_DRAINING), MB_GANG_ADOPT_UPLOADS);
    for (int s = MB_GANG_LAUNCHING; s <= MB_GANG_STOPPING; s++) {
        unsigned actions;
        struct mb_err err;

        assert_int_equal(mb_gang_adoption((enum mb_gang_state)s), MB_GANG_ADOPT_PROCESSES);
        mb_gang_init(&g);
        g.state = (enum mb_gang_state)s;
        assert_true(mb_gang_keeps_node(&g, 0));
        assert_false(mb_gang_keeps_node(&g, 1));
        assert_int_equal(mb_gang_step(&g, mb_gang_adoption_lost(g.state), &actions, &err), MB_OK);
        assert_int_equal(g.state, MB_GANG_DRAINING);
    }
}

/* Ports one after the other, each found twice. */
static int next_port(void *arg)
{
    return 20000 + (*(int *)arg)++ / 2;
}

static int same_port(void *arg)
{
    (void)arg;
    return 20000;
}

static void test_ports_of_others(void **state)
{
    static const uint32_t given[] = {20001, 20000, 20003};
    int at = 0;

    (void)state;
    assert_int_equal(mb_gang_port(next_port, &at, given, 0), 20000);
    assert_int_equal(mb_gang_port(next_port, &at, given, 3), 20002);
    assert_int_equal(mb_gang_port(same_port, NULL, given, 1), 20000);
    assert_int_equal(mb_gang_port(same_port, NULL, given, 2), 0); /* and it ends */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_happy_path),
        cmocka_unit_test(test_rank_failure),
        cmocka_unit_test(test_stop_before_processes),
        cmocka_unit_test(test_halt_before_processes),
        cmocka_unit_test(test_lease),
        cmocka_unit_test(test_cut_off),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_who_may_say_hello),
        cmocka_unit_test(test_adoption),
        cmocka_unit_test(test_ended_by_stop),
        cmocka_unit_test(test_ports_of_others),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
