/* The driver's state machine: happy path, every kind of failure in every phase, random walks. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>
#include "base/alloc.h"
#include "gang.h"

static void test_happy(void **state)
{
    (void)state;
    for (int worker = 0; worker < 2; worker++) {
        struct mb_drv *d = make(worker, 1);

        bring_up(d);
        SAY(d, SAVED, .iteration = 10);
        for (uint32_t r = 0; r < RANKS; r++)
            assert_int_equal(SAY(d, RANK_EXIT, .rank = r), r + 1 == RANKS ? MB_DRV_DO_END : 0);
        SAY(d, COMMITTED, .iteration = 10);
        wind_down(d);
        assert_int_equal(mb_drv_exit_status(d), 0);
        assert_string_equal(mb_drv_verdict(d), "");
        mb_drv_destroy(d);
    }
}

static void test_saved_but_not_durable(void **state)
{
    struct mb_drv *d = make(1, 1);

    (void)state;
    bring_up(d);
    SAY(d, SAVED, .iteration = 10);
    SAY(d, COMMITTED, .iteration = 5);
    for (uint32_t r = 0; r < RANKS; r++)
        SAY(d, RANK_EXIT, .rank = r);
    ends_and_asks(d);
    assert_true(SAY(d, STORE_SAID) & MB_DRV_DO_RELEASE);
    assert_int_equal(SAY(d, RELEASED), MB_DRV_DO_FINISH);
    assert_int_equal(mb_drv_exit_status(d), mb_exit_status(MB_EIO));
    assert_non_null(strstr(mb_drv_verdict(d), "iteration 10"));
    mb_drv_destroy(d);
}

/* The store has an iteration as it was before: its commit is heard, and is no success. */
static void test_saved_again(void **state)
{
    struct mb_drv *d = make(1, 1);

    (void)state;
    bring_up(d);
    SAY(d, SAVED, .iteration = 10);
    SAY(d, COMMITTED, .iteration = 10);
    SAY(d, UPLOAD_FAILED, .iteration = 10, .is_outdated = 1, .text = "10 was saved again");
    SAY(d, COMMITTED, .iteration = 10);
    for (uint32_t r = 0; r < RANKS; r++)
        SAY(d, RANK_EXIT, .rank = r);
    SAY(d, NODE_ENDED);
    for (uint32_t n = 1; n < NODES; n++)
        SAY(d, NODE_ENDED, .node = n);
    SAY(d, RELEASED);
    assert_int_equal(mb_drv_exit_status(d), mb_exit_status(MB_EIO));
    assert_string_equal(mb_drv_verdict(d), "10 was saved again");
    mb_drv_destroy(d);
}

/* Ended came, and the word of the commit was lost with the agent that should have said it. */
static void test_durable_unheard(void **state)
{
    struct mb_drv *d = make(1, 1);

    (void)state;
    bring_up(d);
    assert_int_equal(SAY(d, STORE_SAID), MB_ESTATE);
    SAY(d, SAVED, .iteration = 10);
    for (uint32_t r = 0; r < RANKS; r++)
        SAY(d, RANK_EXIT, .rank = r);
    ends_and_asks(d);
    assert_int_equal(SAY(d, COMMITTED, .iteration = 5), 0); /* is asked once */
    assert_true(SAY(d, COMMITTED, .iteration = 10) & MB_DRV_DO_RELEASE);
    assert_int_equal(SAY(d, STORE_SAID), 0);
    assert_int_equal(SAY(d, RELEASED), MB_DRV_DO_FINISH);
    assert_int_equal(mb_drv_exit_status(d), 0);
    assert_int_equal(mb_drv_committed(d), 10);
    mb_drv_destroy(d);

    d = make(1, 1); /* it was heard meanwhile */
    bring_up(d);
    SAY(d, SAVED, .iteration = 10);
    for (uint32_t r = 0; r < RANKS; r++)
        SAY(d, RANK_EXIT, .rank = r);
    ends_and_asks(d);
    assert_true(SAY(d, COMMITTED, .iteration = 10) & MB_DRV_DO_RELEASE);
    assert_int_equal(SAY(d, STORE_SAID), 0);
    assert_int_equal(mb_drv_exit_status(d), 0);
    mb_drv_destroy(d);
}

/* A newer one that is durable does not excuse an older one of which nothing more was heard. */
static void test_older_save_unheard(void **state)
{
    struct mb_drv *d = make(1, 1);

    (void)state;
    bring_up(d);
    SAY(d, SAVED, .iteration = 10);
    SAY(d, SAVED, .iteration = 20);
    SAY(d, COMMITTED, .iteration = 20);
    assert_int_equal(mb_drv_open(d, -1), 10);
    assert_int_equal(mb_drv_open(d, 10), -1);
    for (uint32_t r = 0; r < RANKS; r++)
        SAY(d, RANK_EXIT, .rank = r);
    ends_and_asks(d);
    assert_true(SAY(d, STORE_SAID) & MB_DRV_DO_RELEASE);
    assert_int_equal(mb_drv_exit_status(d), mb_exit_status(MB_EIO));
    assert_non_null(strstr(mb_drv_verdict(d), "iteration 10 was saved but is not durable"));
    mb_drv_destroy(d);
}

/* Who ended without having saved tells the others what can never be complete. */
static void test_newest_on_all(void **state)
{
    struct mb_drv *d = make(1, 1);

    (void)state;
    bring_up(d);
    SAY(d, SAVED, .node = 0, .iteration = 10);
    SAY(d, SAVED, .node = 1, .iteration = 10);
    SAY(d, SAVED, .node = 0, .iteration = 20);
    assert_true(mb_drv_newest_on_all(d) == INT64_MAX);
    SAY(d, RANK_EXIT, .rank = 3, .exit_code = 137, .signal = 9);
    assert_true(mb_drv_newest_on_all(d) == INT64_MAX); /* its other rank may still report */
    SAY(d, RANK_EXIT, .rank = 2, .exit_code = 1);
    assert_int_equal(mb_drv_newest_on_all(d), 10);
    SAY(d, RANK_EXIT, .rank = 0, .exit_code = 1);
    SAY(d, RANK_EXIT, .rank = 1, .exit_code = 1);
    assert_int_equal(mb_drv_newest_on_all(d), 10);
    SAY(d, COMMITTED, .node = 0, .iteration = 20); /* then it had saved, unheard */
    assert_int_equal(mb_drv_newest_on_all(d), 20);
    assert_int_equal(SAY(d, SAVED, .node = NODES, .iteration = 1), MB_ESTATE);
    mb_drv_destroy(d);

    d = make(1, 1); /* a node that was lost may have saved anything */
    bring_up(d);
    SAY(d, SAVED, .node = 0, .iteration = 10);
    SAY(d, NODE_LOST, .node = 1);
    SAY(d, RANK_EXIT, .rank = 0);
    SAY(d, RANK_EXIT, .rank = 1);
    assert_int_equal(mb_drv_newest_on_all(d), 10);
    mb_drv_destroy(d);

    d = make(0, 1); /* other programs' ranks do not report */
    bring_up(d);
    for (uint32_t r = 0; r < RANKS; r++)
        SAY(d, RANK_EXIT, .rank = r);
    assert_true(mb_drv_newest_on_all(d) == INT64_MAX);
    mb_drv_destroy(d);
}

/* The others hear of a loss at whatever moment, or they would wait for what never comes. */
static void test_a_loss_is_told(void **state)
{
    struct mb_drv *d = make(1, 1);

    (void)state;
    bring_up(d);
    assert_false(mb_drv_node_lost(d, 1));
    assert_int_equal(SAY(d, NODE_LOST, .node = 1), MB_DRV_DO_STOP);
    assert_true(mb_drv_node_lost(d, 1));
    assert_false(mb_drv_node_lost(d, 0));
    SAY(d, RANK_EXIT, .rank = 0);
    assert_int_equal(SAY(d, RANK_EXIT, .rank = 1), MB_DRV_DO_END);
    assert_true(SAY(d, NODE_ENDED, .node = 0) & MB_DRV_DO_RELEASE);
    mb_drv_destroy(d);

    d = make(1, 1);
    bring_up(d);
    for (uint32_t r = 0; r < RANKS; r++)
        SAY(d, RANK_EXIT, .rank = r);
    assert_int_equal(mb_drv_phase(d), MB_DRV_END);
    assert_int_equal(SAY(d, NODE_LOST, .node = 0), MB_DRV_DO_END);
    assert_true(SAY(d, NODE_ENDED, .node = 1) & MB_DRV_DO_RELEASE);
    assert_int_equal(mb_drv_failure(d).kind, MB_FAILURE_NODE);
    mb_drv_destroy(d);
}

/* Fewer nodes than at most: the others do not exist for this attempt. */
static void test_fewer_nodes(void **state)
{
    struct mb_drv *d = make(1, 1);

    (void)state;
    SAY(d, CONNECTED);
    SAY(d, OWNED);
    assert_int_equal(SAY(d, RESERVED, .n_nodes = NODES + 1), MB_ESTATE);
    assert_int_equal(SAY(d, RESERVED, .n_nodes = 1), MB_DRV_DO_DIAL);
    assert_int_equal(SAY(d, HELLO, .node = 1), MB_ESTATE);
    assert_int_equal(SAY(d, HELLO, .node = 0), MB_DRV_DO_LAUNCH);
    SAY(d, LAUNCHED, .node = 0);
    SAY(d, ENDPOINT, .rank = 0);
    assert_int_equal(SAY(d, ENDPOINT, .rank = 1), MB_DRV_DO_START);
    assert_int_equal(SAY(d, RANK_EXIT, .rank = 2), MB_ESTATE);
    SAY(d, SAVED, .node = 0, .iteration = 10);
    SAY(d, RANK_EXIT, .rank = 0);
    assert_int_equal(SAY(d, RANK_EXIT, .rank = 1), MB_DRV_DO_END);
    assert_int_equal(mb_drv_newest_on_all(d), 10);
    SAY(d, COMMITTED, .iteration = 10);
    assert_int_equal(SAY(d, NODE_ENDED, .node = 0), MB_DRV_DO_RELEASE);
    assert_int_equal(mb_drv_exit_status(d), 0);
    mb_drv_destroy(d);
}

static void test_rank_killed(void **state)
{
    struct mb_drv *d = make(1, 0);

    (void)state;
    bring_up(d);
    assert_int_equal(
        SAY(d, RANK_EXIT, .rank = 3, .exit_code = 137, .signal = 9, .text = "all-reduce"),
        MB_DRV_DO_STOP);
    assert_non_null(strstr(mb_drv_verdict(d), "rank 3"));
    assert_non_null(strstr(mb_drv_verdict(d), "signal 9"));
    assert_non_null(strstr(mb_drv_verdict(d), "all-reduce"));
    /* The first verdict stays. */
    SAY(d, RANK_EXIT, .rank = 0, .exit_code = 1);
    assert_non_null(strstr(mb_drv_verdict(d), "rank 3"));
    SAY(d, RANK_EXIT, .rank = 1, .exit_code = 1);
    assert_int_equal(SAY(d, RANK_EXIT, .rank = 2), MB_DRV_DO_END);
    wind_down(d);
    assert_int_equal(mb_drv_exit_status(d), 1);
    mb_drv_destroy(d);
}

/* A worker that lost its peer is often heard of before the peer itself. */
static void test_the_reason_replaces_its_echo(void **state)
{
    struct mb_drv *d = make(1, 0);
    int echo = mb_exit_status(MB_EUNAVAIL);
    (void)state;
    bring_up(d);
    SAY(d, RANK_EXIT, .rank = 0, .exit_code = echo, .text = "rank 3 went away");
    assert_non_null(strstr(mb_drv_verdict(d), "rank 0"));
    assert_false(mb_drv_verdict_stands(d));
    SAY(d, RANK_EXIT, .rank = 1, .exit_code = 143, .signal = 15, .text = "it was told to stop");
    assert_false(mb_drv_verdict_stands(d));
    SAY(d, RANK_EXIT, .rank = 3, .exit_code = 73, .text = "No space left on device");
    assert_non_null(strstr(mb_drv_verdict(d), "rank 3"));
    assert_true(mb_drv_verdict_stands(d));
    SAY(d, RANK_EXIT, .rank = 2, .exit_code = echo, .text = "rank 3 went away");
    assert_non_null(strstr(mb_drv_verdict(d), "No space left"));
    wind_down(d);
    assert_int_equal(mb_drv_exit_status(d), 1);
    mb_drv_destroy(d);
}

static void test_a_lost_node_replaces_its_echo(void **state)
{
    (void)state;
    for (int is_told = 0; is_told < 2; is_told++) {
        struct mb_drv_event gone = {.kind = is_told ? MB_DRV_NODE_FAILED : MB_DRV_NODE_LOST,
                                    .code = MB_ECANCELED};
        struct mb_drv *d = make(1, 0);
        bring_up(d);
        SAY(d, RANK_EXIT, .rank = 3, .exit_code = mb_exit_status(MB_EUNAVAIL), .text = "rank 0");
        assert_true(mb_drv_step(d, &gone) >= 0);
        assert_non_null(strstr(mb_drv_verdict(d), "node 0"));
        assert_int_equal(mb_drv_failure(d).kind, MB_FAILURE_NODE);
        mb_drv_destroy(d);
    }
}

static void test_an_echo_alone_stands(void **state)
{
    struct mb_drv *d = make(1, 0);
    (void)state;
    bring_up(d);
    for (uint32_t r = 0; r < RANKS; r++)
        SAY(d, RANK_EXIT, .rank = r, .exit_code = mb_exit_status(MB_EUNAVAIL), .text = "no answer");
    assert_non_null(strstr(mb_drv_verdict(d), "rank 0"));
    assert_true(mb_drv_verdict_stands(d));
    wind_down(d);
    mb_drv_destroy(d);
}

static void test_interrupted_in_every_phase(void **state)
{
    const enum mb_drv_event_kind path[] = {MB_DRV_CONNECTED, MB_DRV_OWNED, MB_DRV_RESERVED,
                                           MB_DRV_HELLO,     MB_DRV_HELLO, MB_DRV_LAUNCHED,
                                           MB_DRV_LAUNCHED};
    (void)state;
    for (size_t steps = 0; steps <= sizeof(path) / sizeof(path[0]); steps++) {
        struct mb_drv *d = make(1, 1);
        uint32_t node[MB_DRV_N_EVENTS] = {0};

        for (size_t i = 0; i < steps; i++)
            assert_true(say(d, (struct mb_drv_event){.kind = path[i], .node = node[path[i]]++}) >=
                        0);
        assert_true(SAY(d, INTERRUPTED, .signal = 15) >= 0);
        for (uint32_t n = 0; n < NODES && mb_drv_phase(d) < MB_DRV_RELEASE; n++)
            SAY(d, NODE_ENDED, .node = n);
        if (mb_drv_phase(d) != MB_DRV_OVER) {
            assert_int_equal(mb_drv_phase(d), MB_DRV_RELEASE);
            assert_int_equal(SAY(d, RELEASED), MB_DRV_DO_FINISH);
        }
        assert_int_equal(mb_drv_exit_status(d), 128 + 15);
        mb_drv_destroy(d);
    }
}

static void test_node_lost_and_launch_failure(void **state)
{
    struct mb_drv *d = make(1, 0);
    (void)state;
    bring_up(d);
    assert_int_equal(SAY(d, NODE_LOST, .node = 1, .text = "no answer"), MB_DRV_DO_STOP);
    SAY(d, RANK_EXIT, .rank = 0);
    assert_int_equal(SAY(d, RANK_EXIT, .rank = 1), MB_DRV_DO_END);
    assert_int_equal(SAY(d, NODE_ENDED, .node = 0), MB_DRV_DO_RELEASE);
    assert_int_equal(mb_drv_exit_status(d), mb_exit_status(MB_EUNAVAIL));
    mb_drv_destroy(d);

    d = make(1, 0);
    SAY(d, CONNECTED);
    SAY(d, OWNED);
    SAY(d, RESERVED);
    SAY(d, HELLO, .node = 0);
    SAY(d, HELLO, .node = 1);
    SAY(d, LAUNCHED, .node = 0);
    assert_int_equal(SAY(d, NODE_FAILED, .node = 1, .code = MB_ENOENT, .text = "no such program"),
                     MB_DRV_DO_STOP);
    assert_int_equal(SAY(d, NODE_ENDED, .node = 1), 0);
    assert_int_equal(SAY(d, NODE_ENDED, .node = 0), MB_DRV_DO_END | MB_DRV_DO_RELEASE);
    assert_int_equal(mb_drv_exit_status(d), mb_exit_status(MB_ENOENT));
    mb_drv_destroy(d);
}

/* A node gives the attempt up without a word of its ranks, and there is no other node to wait for:
 * the driver ends, and not well. */
static void test_the_only_node_ends_early(void **state)
{
    const struct mb_drv_config c = {
        .n_nodes = 1, .ranks_per_node = 2, .is_worker = 1, .committed = -1};
    static const struct mb_drv_event path[] = {
        {.kind = MB_DRV_CONNECTED},          {.kind = MB_DRV_OWNED},
        {.kind = MB_DRV_RESERVED},           {.kind = MB_DRV_HELLO},
        {.kind = MB_DRV_LAUNCHED},           {.kind = MB_DRV_ENDPOINT},
        {.kind = MB_DRV_ENDPOINT, .rank = 1}};
    (void)state;
    for (size_t steps = 3; steps <= sizeof(path) / sizeof(path[0]); steps++) {
        struct mb_drv *d = mb_drv_create(&c);

        assert_non_null(d);
        for (size_t i = 0; i < steps; i++)
            assert_true(mb_drv_step(d, &path[i]) >= 0);
        assert_true(mb_drv_phase(d) < MB_DRV_STOPPING);
        assert_true(SAY(d, NODE_ENDED, .node = 0) & MB_DRV_DO_RELEASE);
        assert_string_equal(mb_drv_verdict(d), "node 0 ended the gang before its ranks were done");
        assert_int_equal(mb_drv_failure(d).kind, MB_FAILURE_NODE);
        assert_int_not_equal(mb_drv_exit_status(d), 0);
        mb_drv_destroy(d);
    }
}

/* A gang of one, launched. */
static struct mb_drv *one_rank_runs(int is_worker)
{
    const struct mb_drv_config c = {
        .n_nodes = 1, .ranks_per_node = 1, .is_worker = is_worker, .committed = -1};
    static const struct mb_drv_event path[] = {{.kind = MB_DRV_CONNECTED},
                                               {.kind = MB_DRV_OWNED},
                                               {.kind = MB_DRV_RESERVED},
                                               {.kind = MB_DRV_HELLO},
                                               {.kind = MB_DRV_LAUNCHED}};
    struct mb_drv *d = mb_drv_create(&c);

    assert_non_null(d);
    for (size_t i = 0; i < sizeof(path) / sizeof(path[0]); i++)
        assert_true(mb_drv_step(d, &path[i]) >= 0);
    return d;
}

/* A worker that refuses its command line ends the gang with that status; what another program
 * means by 2 is its own affair. */
static void test_a_refused_command_line(void **state)
{
    (void)state;
    for (int is_worker = 0; is_worker < 2; is_worker++) {
        struct mb_drv *d = one_rank_runs(is_worker);

        assert_true(SAY(d, RANK_EXIT, .rank = 0, .exit_code = 2) >= 0);
        assert_int_equal(mb_drv_exit_status(d), is_worker ? 2 : 1);
        assert_int_equal(mb_drv_failure(d).is_usage, is_worker);
        assert_string_equal(mb_drv_verdict(d), "rank 0 exited with status 2");
        mb_drv_destroy(d);
    }
}

/* A worker says by its status that memory is short, whatever its words: that a plan does not fit,
 * or a snapshot. */
static void test_a_refused_plan(void **state)
{
    (void)state;
    for (int is_worker = 0; is_worker < 2; is_worker++) {
        struct mb_drv *d = one_rank_runs(is_worker);

        assert_true(
            SAY(d, RANK_EXIT, .rank = 0, .exit_code = mb_exit_status(MB_ENOMEM),
                .text = "the memory plan needs 2 GiB of host memory, 1 GiB are available") >= 0);
        assert_int_equal(mb_drv_failure(d).is_out_of_memory, is_worker);
        mb_drv_destroy(d);
    }
}

/* Its ranks save and end with 0; the run is not done all the same. */
static void test_a_node_that_stops(void **state)
{
    struct mb_drv *d = make(1, 0);

    (void)state;
    bring_up(d);
    assert_int_equal(mb_drv_ends_in_order(d), 0);
    assert_int_equal(SAY(d, NODE_FAILED, .node = 1, .code = MB_ECANCELED, .text = "it stops"),
                     MB_DRV_DO_STOP);
    assert_int_equal(mb_drv_ends_in_order(d), 1);
    for (uint32_t r = 0; r < RANKS; r++)
        SAY(d, RANK_EXIT, .rank = r);
    SAY(d, NODE_ENDED, .node = 0);
    assert_int_equal(SAY(d, NODE_ENDED, .node = 1), MB_DRV_DO_RELEASE);
    assert_int_equal(mb_drv_exit_status(d), mb_exit_status(MB_EUNAVAIL));
    assert_string_equal(mb_drv_verdict(d), "node 1: it stops");
    mb_drv_destroy(d);
}

static void test_illegal_events_change_nothing(void **state)
{
    struct mb_drv *d = make(1, 0);

    (void)state;
    assert_int_equal(SAY(d, OWNED), MB_ESTATE);
    assert_int_equal(SAY(d, RANK_EXIT, .rank = 0), MB_ESTATE);
    assert_int_equal(SAY(d, RELEASED), MB_ESTATE);
    assert_int_equal(mb_drv_phase(d), MB_DRV_CONNECT);
    bring_up(d);
    assert_int_equal(SAY(d, RANK_EXIT, .rank = RANKS), MB_ESTATE);
    assert_int_equal(SAY(d, HELLO, .node = NODES), MB_ESTATE);
    mb_drv_destroy(d);
}

/* Of ordinary commands: peers of a killed rank just fail, and may be heard of first. */
static void test_a_killed_rank_is_the_reason(void **state)
{
    struct mb_drv *d = make(0, 0);

    (void)state;
    bring_up(d);
    assert_int_equal(mb_drv_failure(d).kind, MB_FAILURE_NONE);
    SAY(d, RANK_EXIT, .rank = 0, .exit_code = 1);
    assert_true(mb_drv_verdict_stands(d));
    assert_int_equal(mb_drv_verdict_number(d), 1);
    SAY(d, RANK_EXIT, .rank = 1, .exit_code = 137, .signal = 9, .text = "ended because ...");
    assert_int_equal(mb_drv_verdict_number(d), 1);
    SAY(d, RANK_EXIT, .rank = 3, .exit_code = 137, .signal = 9);
    assert_int_equal(mb_drv_verdict_number(d), 2);
    assert_non_null(strstr(mb_drv_verdict(d), "rank 3"));
    assert_int_equal(mb_drv_failure(d).rank, 3);
    assert_int_equal(mb_drv_failure(d).signal, 9);
    SAY(d, RANK_EXIT, .rank = 2, .exit_code = 137, .signal = 9);
    assert_int_equal(mb_drv_failure(d).rank, 3);
    mb_drv_destroy(d);
}

static void test_another_attempt(void **state)
{
    const struct mb_drv_config c = {
        .n_nodes = NODES, .ranks_per_node = PER_NODE, .has_url = 1, .is_again = 1, .committed = 40};
    struct mb_drv *d = mb_drv_create(&c);

    (void)state;
    assert_non_null(d);
    assert_int_equal(mb_drv_phase(d), MB_DRV_PAUSE);
    assert_int_equal(SAY(d, CONNECTED), MB_ESTATE);
    assert_int_equal(SAY(d, PAUSED), MB_DRV_DO_OWN);
    assert_int_equal(SAY(d, OWNED), MB_DRV_DO_RESERVE);
    SAY(d, RESERVED);
    for (uint32_t n = 0; n < NODES; n++)
        SAY(d, HELLO, .node = n);
    for (uint32_t n = 0; n < NODES; n++)
        SAY(d, LAUNCHED, .node = n);
    for (uint32_t r = 0; r < RANKS; r++)
        SAY(d, RANK_EXIT, .rank = r);
    wind_down(d);
    assert_int_equal(mb_drv_committed(d), 40); /* nothing new was saved: all is durable */
    assert_int_equal(mb_drv_exit_status(d), 0);
    mb_drv_destroy(d);

    d = mb_drv_create(&c);
    assert_int_equal(SAY(d, INTERRUPTED, .signal = 15), MB_DRV_DO_RELEASE);
    assert_int_equal(mb_drv_failure(d).kind, MB_FAILURE_NONE);
    assert_int_equal(SAY(d, RELEASED), MB_DRV_DO_FINISH);
    assert_int_equal(mb_drv_exit_status(d), 128 + 15);
    mb_drv_destroy(d);
}

static void test_kinds_of_failure(void **state)
{
    static const struct {
        struct mb_drv_event event;
        enum mb_failure_kind kind;
    } rows[] = {
        {{.kind = MB_DRV_NODE_LOST}, MB_FAILURE_NODE},
        {{.kind = MB_DRV_NODE_FAILED, .code = MB_ECANCELED}, MB_FAILURE_NODE},
        {{.kind = MB_DRV_NODE_FAILED, .code = MB_ENOENT}, MB_FAILURE_REQUEST},
        {{.kind = MB_DRV_NODE_ENDED}, MB_FAILURE_NODE},
        {{.kind = MB_DRV_FAILED, .code = MB_EUNAVAIL}, MB_FAILURE_REQUEST},
        {{.kind = MB_DRV_FAILED, .code = MB_ETIMEOUT}, MB_FAILURE_NONE},
        {{.kind = MB_DRV_UPLOAD_FAILED}, MB_FAILURE_NONE},
        {{.kind = MB_DRV_RANK_EXIT, .exit_code = 1, .text = "CUDA out of memory"}, MB_FAILURE_RANK},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct mb_drv *d = make(0, 0);

        bring_up(d);
        assert_true(mb_drv_step(d, &rows[i].event) >= 0);
        assert_int_equal(mb_drv_failure(d).kind, rows[i].kind);
        assert_int_equal(mb_drv_failure(d).is_out_of_memory, rows[i].kind == MB_FAILURE_RANK);
        mb_drv_destroy(d);
    }
}

/* It stops nobody, so it does not stand for what ends the gang later either. */
static void test_given_up_then(void **state)
{
    static const char text[] = "iteration 10 is not durable: shard: it changed after it was saved";
    struct mb_drv *d = make(1, 1);

    (void)state;
    bring_up(d);
    SAY(d, SAVED, .iteration = 10);
    SAY(d, UPLOAD_FAILED, .iteration = 10, .text = text);
    assert_int_equal(mb_drv_exit_status(d), 0);
    assert_string_equal(mb_drv_verdict(d), "");
    SAY(d, RANK_EXIT, .rank = 1, .signal = SIGKILL);
    assert_int_equal(mb_drv_failure(d).kind, MB_FAILURE_RANK);
    assert_non_null(strstr(mb_drv_verdict(d), "rank 1 was killed by signal 9"));
    mb_drv_destroy(d);

    d = make(1, 1); /* all ends well but for it */
    bring_up(d);
    SAY(d, SAVED, .iteration = 10);
    SAY(d, UPLOAD_FAILED, .iteration = 10, .text = text);
    SAY(d, SAVED, .iteration = 20);
    SAY(d, COMMITTED, .iteration = 20);
    for (uint32_t r = 0; r < RANKS; r++)
        SAY(d, RANK_EXIT, .rank = r);
    assert_int_equal(SAY(d, NODE_ENDED, .node = 0), MB_DRV_DO_END);
    assert_true(SAY(d, NODE_ENDED, .node = 1) & MB_DRV_DO_RELEASE);
    assert_int_equal(mb_drv_exit_status(d), mb_exit_status(MB_EIO));
    assert_string_equal(mb_drv_verdict(d), text);
    assert_int_equal(mb_drv_failure(d).kind, MB_FAILURE_NONE);
    mb_drv_destroy(d);
}

/* Another node had the part in the store, and it became durable all the same. */
static void test_given_up_and_durable(void **state)
{
    struct mb_drv *d = make(1, 1);

    (void)state;
    bring_up(d);
    SAY(d, SAVED, .iteration = 10);
    SAY(d, UPLOAD_FAILED, .iteration = 10, .text = "iteration 10 is not durable: late");
    for (uint32_t r = 0; r < RANKS; r++)
        SAY(d, RANK_EXIT, .rank = r);
    ends_and_asks(d);
    assert_true(SAY(d, COMMITTED, .iteration = 10) & MB_DRV_DO_RELEASE);
    assert_int_equal(mb_drv_exit_status(d), 0);
    mb_drv_destroy(d);

    d = make(1, 1); /* two were given up, and a third is missing */
    bring_up(d);
    SAY(d, UPLOAD_FAILED, .iteration = 10, .text = "iteration 10 is not durable: late");
    SAY(d, COMMITTED, .iteration = 10);
    SAY(d, UPLOAD_FAILED, .iteration = 20, .text = "iteration 20 is not durable: its disk");
    SAY(d, SAVED, .iteration = 30);
    for (uint32_t r = 0; r < RANKS; r++)
        SAY(d, RANK_EXIT, .rank = r);
    ends_and_asks(d);
    assert_true(SAY(d, STORE_SAID) & MB_DRV_DO_RELEASE);
    assert_int_equal(mb_drv_exit_status(d), mb_exit_status(MB_EIO));
    assert_non_null(
        strstr(mb_drv_verdict(d), "iteration 20 is not durable: its disk; iteration 30"));
    mb_drv_destroy(d);
}

/* Random events for many seeds: the machine always ends, releases once and finishes once. */
static void test_random_walks(void **state)
{
    (void)state;
    for (uint32_t seed = 1; seed <= 20000; seed++) {
        struct mb_drv *d = make((int)seed & 1, (int)(seed >> 1) & 1);
        uint32_t x = seed * 2654435761u;
        int releases = 0, finishes = 0, steps = 0;

        while (mb_drv_phase(d) != MB_DRV_OVER && steps++ < 100000) {
            struct mb_drv_event e = {.text = "x"};
            int actions;

            x ^= x << 13;
            x ^= x >> 17;
            x ^= x << 5;
            e.kind = (enum mb_drv_event_kind)((x >> 8) % MB_DRV_N_EVENTS);
            e.node = (x >> 16) % NODES;
            e.rank = (x >> 18) % RANKS;
            e.iteration = (x >> 20) % 8;
            e.exit_code = (x >> 24) % 16 == 0;
            e.code = MB_EIO;
            e.signal = 15;
            if ((e.kind == MB_DRV_FAILED || e.kind == MB_DRV_INTERRUPTED ||
                 e.kind == MB_DRV_NODE_FAILED || e.kind == MB_DRV_NODE_LOST) &&
                (x >> 27) != 0)
                continue;
            actions = mb_drv_step(d, &e);
            if (actions < 0)
                continue;
            releases += !!(actions & MB_DRV_DO_RELEASE);
            finishes += !!(actions & MB_DRV_DO_FINISH);
        }
        if (mb_drv_phase(d) != MB_DRV_OVER || finishes != 1 || releases > 1) {
            print_error("seed %u: phase %s, %d releases, %d finishes\n", seed,
                        mb_drv_phase_name(mb_drv_phase(d)), releases, finishes);
            fail();
        }
        mb_drv_destroy(d);
    }
}

static void test_memory_out(void **state)
{
    (void)state;
    for (unsigned long nth = 1;; nth++) {
        const struct mb_drv_config c = {.n_nodes = 1, .ranks_per_node = 1};
        struct mb_drv *d;

        mb_alloc_fail_nth(nth);
        d = mb_drv_create(&c);
        if (!mb_alloc_did_fail()) {
            mb_alloc_fail_nth(0);
            mb_drv_destroy(d);
            break;
        }
        assert_null(d);
    }
}

static void test_dialled_again(void **state)
{
    (void)state;
    assert_int_equal(mb_drv_dialled(1, 1, 1, 1), MB_DRV_GOES_ON);
    assert_int_equal(mb_drv_dialled(0, 0, 0, 0), MB_DRV_GOES_ON);
    assert_int_equal(mb_drv_dialled(0, 1, 0, 0), MB_DRV_LAUNCH_AGAIN);
    assert_int_equal(mb_drv_dialled(0, 1, 1, 0), MB_DRV_GANG_LOST);
    assert_int_equal(mb_drv_dialled(0, 1, 1, 1), MB_DRV_HAS_ENDED);
    assert_int_equal(mb_drv_dialled(0, 1, 0, 1), MB_DRV_GOES_ON);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_happy),
        cmocka_unit_test(test_saved_but_not_durable),
        cmocka_unit_test(test_saved_again),
        cmocka_unit_test(test_durable_unheard),
        cmocka_unit_test(test_older_save_unheard),
        cmocka_unit_test(test_given_up_then),
        cmocka_unit_test(test_given_up_and_durable),
        cmocka_unit_test(test_newest_on_all),
        cmocka_unit_test(test_a_loss_is_told),
        cmocka_unit_test(test_fewer_nodes),
        cmocka_unit_test(test_rank_killed),
        cmocka_unit_test(test_a_refused_command_line),
        cmocka_unit_test(test_a_refused_plan),
        cmocka_unit_test(test_a_node_that_stops),
        cmocka_unit_test(test_the_only_node_ends_early),
        cmocka_unit_test(test_the_reason_replaces_its_echo),
        cmocka_unit_test(test_a_lost_node_replaces_its_echo),
        cmocka_unit_test(test_an_echo_alone_stands),
        cmocka_unit_test(test_interrupted_in_every_phase),
        cmocka_unit_test(test_node_lost_and_launch_failure),
        cmocka_unit_test(test_illegal_events_change_nothing),
        cmocka_unit_test(test_a_killed_rank_is_the_reason),
        cmocka_unit_test(test_another_attempt),
        cmocka_unit_test(test_kinds_of_failure),
        cmocka_unit_test(test_random_walks),
        cmocka_unit_test(test_memory_out),
        cmocka_unit_test(test_dialled_again),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
