/* What the driver says of uploads, and what it does when the time is over. */
#include "gang.h"
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include "cli/driver/offsets.h"
#include "cli/driver/uploads.h"

static void test_known_bytes(void **state)
{
    uint64_t next = 0, missing;

    (void)state;
    assert_int_equal(mb_drv_known_bytes(&next, 0, 10, &missing), 0);
    assert_int_equal(next, 10);
    assert_int_equal(mb_drv_known_bytes(&next, 2, 5, &missing), 5); /* all of it was there */
    assert_int_equal(next, 10);
    assert_int_equal(mb_drv_known_bytes(&next, 6, 8, &missing), 4);
    assert_int_equal(next, 14);
    assert_int_equal(missing, 0);
    assert_int_equal(mb_drv_known_bytes(&next, 20, 3, &missing), 0);
    assert_int_equal(missing, 6);
    assert_int_equal(next, 23);
}

static void test_uploads_are_the_gangs_sum(void **state)
{
    struct mb_drv_upload nodes[3] = {{0}};
    struct mb_drv_uploads u;

    (void)state;
    mb_drv_uploads_sum(nodes, 3, &u);
    assert_int_equal(u.done_bytes + u.total_bytes, 0);
    assert_int_equal(u.iteration, -1);
    nodes[0] = (struct mb_drv_upload){5, 10, 100, 1, 4, 50, 2000, 0, 0, 0};
    nodes[2] = (struct mb_drv_upload){5, 30, 300, 2, 6, 70, 9000, 0, 0, 0};
    mb_drv_uploads_sum(nodes, 3, &u);
    assert_int_equal(u.iteration, 5);
    assert_int_equal(u.done_bytes, 40);
    assert_int_equal(u.total_bytes, 400);
    assert_int_equal(u.parts_done, 3);
    assert_int_equal(u.parts_total, 10);
    assert_int_equal(u.rate_bytes_per_s, 120);
    assert_int_equal(u.eta_ms, 9000);
    nodes[2].eta_ms = UINT64_MAX; /* one that does not know makes it unknown for all ... */
    mb_drv_uploads_sum(nodes, 3, &u);
    assert_true(u.eta_ms == UINT64_MAX);
    nodes[2].done_bytes = 300; /* ... unless it is done */
    mb_drv_uploads_sum(nodes, 3, &u);
    assert_int_equal(u.eta_ms, 2000);
    /* The second is at the next iteration already; then the first follows, also with less done. */
    nodes[1] = (struct mb_drv_upload){10, 7, 70, 0, 1, 0, 0, 0, 0, 0};
    mb_drv_uploads_sum(nodes, 3, &u);
    assert_int_equal(u.iteration, 10);
    assert_int_equal(u.done_bytes, 7);
    assert_int_equal(u.total_bytes, 70);
    nodes[0] = (struct mb_drv_upload){10, 1, 50, 0, 1, 0, 0, 0, 0, 0};
    mb_drv_uploads_sum(nodes, 3, &u);
    assert_int_equal(u.done_bytes, 8);
    assert_int_equal(u.total_bytes, 120);
    assert_int_equal(u.given_up, -1);
    nodes[0].is_left = 1;
    mb_drv_uploads_sum(nodes, 3, &u);
    assert_int_equal(u.is_left, 1);
    nodes[1].is_given_up = 1; /* by one node, so by all: what is on its way is the one before */
    mb_drv_uploads_sum(nodes, 3, &u);
    assert_int_equal(u.given_up, 10);
    assert_int_equal(u.iteration, 5);
    assert_int_equal(u.total_bytes, 300);
    assert_int_equal(u.is_left, 0);
}

static void test_words_about_uploads(void **state)
{
    const uint64_t now = 1000000;
    struct mb_drv_uploads u = {40, 410, 640, 41, 64, 20, 11500, .given_up = -1};
    char text[MB_DRV_UPLOADS_TEXT_MAX];

    (void)state;
    mb_drv_uploads_text(&u, 40, 20, now + 310999, now, text);
    assert_string_equal(text, "uploading iteration 40: 41 of 64 parts, done in 12 s, deadline in "
                              "310 s");
    u.eta_ms = UINT64_MAX;
    mb_drv_uploads_text(&u, 40, 20, 0, now, text);
    assert_string_equal(text, "uploading iteration 40: 41 of 64 parts");
    u.parts_total = 0;
    mb_drv_uploads_text(&u, 40, 20, now - 3000, now, text);
    assert_string_equal(text, "uploading iteration 40: 410 of 640 bytes, 3 s after the deadline");
    u.done_bytes = 640;
    mb_drv_uploads_text(&u, 40, 20, 0, now, text);
    assert_string_equal(text, "uploading iteration 40: 640 of 640 bytes, its manifest is missing");
    mb_drv_uploads_text(&u, 60, 40, 0, now, text);
    assert_string_equal(text, "iteration 60 waits for its upload");
    u.given_up = 60;
    mb_drv_uploads_text(&u, 60, 40, 0, now, text);
    assert_string_equal(text, "iteration 60 was given up");
    mb_drv_uploads_text(&u, 80, 40, 0, now, text);
    assert_string_equal(text, "iteration 60 was given up; iteration 80 waits for its upload");
    u.done_bytes = 410;
    u.parts_total = 64;
    u.eta_ms = 11500;
    u.is_left = 1;
    mb_drv_uploads_text(&u, 60, 20, now + 5000, now, text);
    assert_string_equal(text, "iteration 60 was given up; uploading iteration 40: 41 of 64 parts, "
                              "done in 12 s, not before the deadline, deadline in 5 s");
    u.given_up = -1;
    mb_drv_uploads_text(&u, 40, 40, now + 5000, now, text);
    assert_string_equal(text, "");
}

/* ---- deadlines ---- */

static void test_deadline_of_workers(void **state)
{
    struct mb_drv *d = make(1, 1);

    (void)state;
    bring_up(d);
    assert_int_equal(SAY(d, DEADLINE, .node = 1), 0);
    assert_int_equal(mb_drv_at_deadline(d), 1);
    assert_int_equal(mb_drv_phase(d), MB_DRV_RUN);
    SAY(d, SAVED, .node = 0, .iteration = 7);
    SAY(d, SAVED, .node = 1, .iteration = 7);
    for (uint32_t r = 0; r < RANKS; r++)
        assert_int_equal(SAY(d, RANK_EXIT, .rank = r), r + 1 == RANKS ? MB_DRV_DO_END : 0);
    SAY(d, COMMITTED, .iteration = 7);
    wind_down(d);
    assert_int_equal(mb_drv_exit_status(d), 0);
    mb_drv_destroy(d);
}

/* They are stopped everywhere, and what a stop does to them is no failure; a crash is one. */
static void test_deadline_of_commands(void **state)
{
    (void)state;
    for (int crash = 0; crash <= 1; crash++) {
        struct mb_drv *d = make(0, 1);

        bring_up(d);
        assert_int_equal(SAY(d, DEADLINE, .node = 0), MB_DRV_DO_STOP);
        assert_int_equal(mb_drv_ends_in_order(d), 1);
        assert_int_equal(SAY(d, DEADLINE, .node = 1), 0);
        SAY(d, RANK_EXIT, .rank = 0, .exit_code = 128 + SIGTERM);
        SAY(d, RANK_EXIT, .rank = 1, .exit_code = 128 + SIGTERM, .signal = SIGTERM);
        SAY(d, RANK_EXIT, .rank = 2);
        SAY(d, RANK_EXIT, .rank = 3, .exit_code = 128 + SIGKILL, .signal = SIGKILL,
            .text = crash ? "" : "it was told to stop");
        wind_down(d);
        assert_int_equal(mb_drv_exit_status(d), crash);
        mb_drv_destroy(d);
    }
}

/* What ends a rank while it saves is a failure, although the supervisor names a cause. */
static void test_deadline_with_another_cause(void **state)
{
    static const char *const causes[] = {"supervisor died", "killed: memory limit of 1 bytes", ""};

    (void)state;
    for (size_t i = 0; i < sizeof(causes) / sizeof(causes[0]); i++)
        for (int is_worker = 0; is_worker <= 1; is_worker++) {
            struct mb_drv *d = make(is_worker, 1);

            bring_up(d);
            SAY(d, SAVED, .node = 0, .iteration = 3);
            SAY(d, COMMITTED, .iteration = 3);
            SAY(d, DEADLINE, .node = 0);
            for (uint32_t r = 0; r < RANKS; r++)
                SAY(d, RANK_EXIT, .rank = r, .exit_code = 128 + SIGKILL, .signal = SIGKILL,
                    .text = causes[i]);
            wind_down(d);
            assert_int_equal(mb_drv_exit_status(d), 1);
            assert_int_equal(mb_drv_failure(d).kind, MB_FAILURE_RANK);
            mb_drv_destroy(d);
        }
}

/* The time was over before the ranks had saved. */
static void test_deadline_that_is_missed(void **state)
{
    struct mb_drv *d = make(1, 1);

    (void)state;
    bring_up(d);
    SAY(d, DEADLINE, .node = 1);
    assert_int_equal(SAY(d, DEADLINE, .code = MB_EIO, .text = "node 0: too late"), MB_DRV_DO_STOP);
    assert_int_equal(mb_drv_ends_in_order(d), 0);
    assert_string_equal(mb_drv_verdict(d), "node 0: too late");
    for (uint32_t r = 0; r < RANKS; r++)
        SAY(d, RANK_EXIT, .rank = r, .exit_code = 128 + SIGKILL, .signal = SIGKILL,
            .text = "it was told to stop");
    wind_down(d);
    assert_int_equal(mb_drv_exit_status(d), mb_exit_status(MB_EIO));
    assert_int_equal(mb_drv_failure(d).kind, MB_FAILURE_NONE);
    mb_drv_destroy(d);
}

/* A node that is done has nothing more to send: the other hears of it, once it ends too nobody
 * does. */
static void test_done_nodes_are_told(void **state)
{
    struct mb_drv *d = make(1, 1);

    (void)state;
    bring_up(d);
    for (uint32_t r = 0; r < RANKS; r++)
        SAY(d, RANK_EXIT, .rank = r);
    assert_int_equal(mb_drv_phase(d), MB_DRV_END);
    assert_int_equal(SAY(d, NODE_ENDED, .node = 1), MB_DRV_DO_END);
    assert_int_equal(SAY(d, NODE_ENDED, .node = 0), MB_DRV_DO_RELEASE);
    mb_drv_destroy(d);
}

/* A failure comes first: its verdict stays, and so does its restart. */
static void test_deadline_after_a_failure(void **state)
{
    struct mb_drv *d = make(1, 1);

    (void)state;
    bring_up(d);
    SAY(d, RANK_EXIT, .rank = 2, .exit_code = 3);
    assert_int_equal(SAY(d, DEADLINE, .node = 0), 0);
    assert_int_equal(mb_drv_at_deadline(d), 0);
    assert_int_equal(mb_drv_failure(d).kind, MB_FAILURE_RANK);
    mb_drv_destroy(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known_bytes),
        cmocka_unit_test(test_uploads_are_the_gangs_sum),
        cmocka_unit_test(test_words_about_uploads),
        cmocka_unit_test(test_deadline_of_workers),
        cmocka_unit_test(test_deadline_of_commands),
        cmocka_unit_test(test_deadline_with_another_cause),
        cmocka_unit_test(test_deadline_that_is_missed),
        cmocka_unit_test(test_done_nodes_are_told),
        cmocka_unit_test(test_deadline_after_a_failure),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
