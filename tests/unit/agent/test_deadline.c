/* The plan for the last checkpoint: its latest moments, its decisions, its measures. Whole lives
 * under thousands of rates and failures are in tests/sim/test_deadline_sim.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "agent/deadline.h"

enum { T0 = 1000000, MARGIN = 2000, SLACK = 500, KILL = 1500 };

/* A step of 1 s, a save of 4 s, 100 MB at 10 MB/s, a commit of 1 s; the deadline 100 s from T0. */
static struct mb_deadline_facts facts(void)
{
    return (struct mb_deadline_facts){.now_ms = T0,
                                      .deadline = {T0 + 100000, MB_DEADLINE_RUN, 0},
                                      .ranks_run = 1,
                                      .can_save_now = 1,
                                      .measures = 1,
                                      .saves = 1,
                                      .has_store = 1,
                                      .iteration = 10,
                                      .saved = 8,
                                      .step = {1000, 1},
                                      .save = {4000, 1},
                                      .commit = {1000, 1},
                                      .checkpoint_bytes = 100000000,
                                      .rate_bytes_per_s = 10000000,
                                      .stop_grace_ms = 60000};
}

static struct mb_deadline_plan look(struct mb_deadline_state *s, struct mb_deadline_facts *f,
                                    uint64_t at_ms)
{
    struct mb_deadline_plan p;

    f->now_ms = at_ms;
    mb_deadline_step(s, f, &p);
    if (mb_deadline_invariant(f, &p) != NULL)
        fail_msg("%s", mb_deadline_invariant(f, &p));
    return p;
}

static void test_no_deadline(void **state)
{
    struct mb_deadline_facts f = facts();
    struct mb_deadline_state s = {0};
    struct mb_deadline_plan p;

    (void)state;
    f.deadline = (struct mb_deadline){0};
    p = look(&s, &f, T0);
    assert_int_equal(p.action, MB_DEADLINE_GO_ON);
    assert_int_equal(p.save_at_ms, 0);
    assert_int_equal(p.kill_at_ms, 0);
}

static void test_latest_moments(void **state)
{
    const uint64_t safe_save = (2 * 1000 + 4000) * 5 / 4 + SLACK, safe_upload = 11000 * 5 / 4;
    struct mb_deadline_facts f = facts();
    struct mb_deadline_state s = {0};
    struct mb_deadline_plan p = look(&s, &f, T0);

    (void)state;
    assert_int_equal(p.action, MB_DEADLINE_GO_ON);
    assert_int_equal(p.local_at_ms, T0 + 100000 - MARGIN - safe_save);
    assert_int_equal(p.save_at_ms, p.local_at_ms - safe_upload);
    assert_int_equal(p.kill_at_ms, T0 + 100000 - KILL);
    assert_int_equal(look(&s, &f, p.save_at_ms - 1).action, MB_DEADLINE_GO_ON);
    p = look(&s, &f, p.save_at_ms);
    assert_int_equal(p.action, MB_DEADLINE_SAVE_AND_END);
    assert_false(p.is_local_only);
    assert_int_equal(p.done_at_ms, f.now_ms + 1000 + 4000 + 11000);
    /* It comes once, and nothing but the end of the time follows. */
    assert_int_equal(look(&s, &f, f.now_ms + 100).action, MB_DEADLINE_GO_ON);
    assert_int_equal(look(&s, &f, p.kill_at_ms - 1).action, MB_DEADLINE_GO_ON);
    assert_int_equal(look(&s, &f, p.kill_at_ms).action, MB_DEADLINE_END);
    assert_int_equal(look(&s, &f, p.kill_at_ms + 100).action, MB_DEADLINE_GO_ON);
}

/* Sent after it, over the same link; more than the upload itself is not reckoned with. */
static void test_logs_have_their_time(void **state)
{
    struct mb_deadline_facts f = facts();
    struct mb_deadline_state s = {0};
    uint64_t without = look(&s, &f, T0).save_at_ms, local = look(&s, &f, T0).local_at_ms;

    (void)state;
    f.log_bytes = 20000000; /* 2 s */
    assert_int_equal(look(&s, &f, T0).save_at_ms, without - 2500);
    f.log_bytes = 1000000000;
    assert_int_equal(look(&s, &f, T0).save_at_ms, without - 11000 * 5 / 4);
    assert_int_equal(look(&s, &f, T0).local_at_ms, local);
    assert_false(look(&s, &f, without).is_local_only);
    f.rate_bytes_per_s = 0;
    assert_int_equal(look(&s, &f, T0).save_at_ms, local - 100000 / 4);
}

static void test_upload_does_not_fit(void **state)
{
    struct mb_deadline_facts f = facts();
    struct mb_deadline_state s = {0};
    struct mb_deadline_plan p;

    (void)state;
    f.rate_bytes_per_s = 500000; /* 200 s */
    p = look(&s, &f, T0);
    assert_int_equal(p.action, MB_DEADLINE_GO_ON);
    assert_true(p.save_at_ms < T0);
    p = look(&s, &f, p.local_at_ms);
    assert_int_equal(p.action, MB_DEADLINE_SAVE_AND_END);
    assert_true(p.is_local_only);
    assert_string_equal(p.why, "its upload does not fit any more: it stays on the node's disk");
}

/* The estimate with its reserve does not fit, the bare one does: tried. */
static void test_might_just_fit(void **state)
{
    struct mb_deadline_facts f = facts();
    struct mb_deadline_state s = {0};
    struct mb_deadline_plan p = look(&s, &f, T0 + 100000 - KILL - 16000);

    (void)state;
    assert_int_equal(p.action, MB_DEADLINE_SAVE_AND_END);
    assert_false(p.is_local_only);
}

static void test_no_time_for_a_save(void **state)
{
    struct mb_deadline_facts f = facts();
    struct mb_deadline_state s = {0};

    (void)state;
    assert_int_equal(look(&s, &f, T0 + 96000).action, MB_DEADLINE_END);
    assert_int_equal(look(&s, &f, T0 + 96100).action, MB_DEADLINE_GO_ON);
    s = (struct mb_deadline_state){0};
    f.deadline.leaves = 1;
    assert_int_equal(look(&s, &f, T0 + 96000).action, MB_DEADLINE_END);
    /* A save of no time at all fits; one that takes a millisecond does not. */
    s = (struct mb_deadline_state){0};
    f.step = f.save = (struct mb_measured){0, 1};
    assert_int_equal(look(&s, &f, T0 + 100000 - KILL).action, MB_DEADLINE_SAVE_AND_END);
    s = (struct mb_deadline_state){0};
    f.save.ms = 1;
    assert_int_equal(look(&s, &f, T0 + 100000 - KILL).action, MB_DEADLINE_END);
}

static void test_node_goes(void **state)
{
    struct mb_deadline_facts f = facts();
    struct mb_deadline_state s = {0};
    struct mb_deadline_plan p;

    (void)state;
    f.deadline = (struct mb_deadline){0};
    assert_int_equal(mb_deadline_add(&f.deadline, MB_DEADLINE_DRAIN, 0), 1);
    p = look(&s, &f, T0);
    assert_int_equal(p.action, MB_DEADLINE_SAVE_AND_END);
    assert_int_equal(p.kill_at_ms, 0);
    assert_int_equal(mb_deadline_grace_ms(&p, T0, 60000), 60000);
    /* While they end an earlier deadline comes: only the kill moves. */
    assert_int_equal(mb_deadline_add(&f.deadline, MB_DEADLINE_NOTICE, T0 + 30000), 1);
    p = look(&s, &f, T0 + 10000);
    assert_int_equal(p.action, MB_DEADLINE_GO_ON);
    assert_int_equal(mb_deadline_add(&f.deadline, MB_DEADLINE_SIGTERM, T0 + 20000), 1);
    p = look(&s, &f, T0 + 18499);
    assert_int_equal(p.action, MB_DEADLINE_GO_ON);
    assert_int_equal(mb_deadline_grace_ms(&p, T0 + 10000, 60000), 8500);
    assert_int_equal(mb_deadline_grace_ms(&p, T0 + 18499, 60000), 1000);
    assert_int_equal(look(&s, &f, T0 + 18500).action, MB_DEADLINE_END);
}

static void test_the_earliest_counts(void **state)
{
    struct mb_deadline d = {0};

    (void)state;
    assert_int_equal(mb_deadline_add(&d, MB_DEADLINE_RUN, 0), 0);
    assert_int_equal(mb_deadline_add(&d, MB_DEADLINE_RUN, 5000), 1);
    assert_int_equal(mb_deadline_add(&d, MB_DEADLINE_ESTIMATED, 6000), 0);
    assert_int_equal(d.source, MB_DEADLINE_RUN);
    /* The node goes, later than the job has to be done: it goes all the same. */
    assert_int_equal(mb_deadline_add(&d, MB_DEADLINE_NOTICE, 7000), 1);
    assert_int_equal(d.unix_ms, 5000);
    assert_int_equal(d.source, MB_DEADLINE_RUN);
    assert_int_equal(d.leaves, 1);
    assert_int_equal(mb_deadline_add(&d, MB_DEADLINE_DRAIN, 0), 0);
    assert_int_equal(mb_deadline_add(&d, MB_DEADLINE_SIGTERM, 4000), 1);
    assert_string_equal(mb_deadline_source_name(d.source), "SIGTERM");
}

static void test_a_rayjob_is_better_than_its_estimate(void **state)
{
    struct mb_deadline d = {0};

    (void)state;
    assert_int_equal(mb_deadline_add(&d, MB_DEADLINE_RUN, 7000), 1);
    assert_int_equal(mb_deadline_add(&d, MB_DEADLINE_ESTIMATED, 5000), 1);
    assert_int_equal(d.source, MB_DEADLINE_ESTIMATED);
    /* Later than the estimate, and --deadline is between them. */
    assert_int_equal(mb_deadline_add(&d, MB_DEADLINE_RAYJOB, 8000), 1);
    assert_int_equal(d.unix_ms, 7000);
    assert_int_equal(d.source, MB_DEADLINE_RUN);
    assert_int_equal(mb_deadline_add(&d, MB_DEADLINE_ESTIMATED, 4000), 0);
    /* Somebody edits it: earlier, later, away. */
    assert_int_equal(mb_deadline_add(&d, MB_DEADLINE_RAYJOB, 6000), 1);
    assert_int_equal(d.unix_ms, 6000);
    assert_int_equal(d.source, MB_DEADLINE_RAYJOB);
    assert_int_equal(d.leaves, 0);
    assert_int_equal(mb_deadline_add(&d, MB_DEADLINE_RAYJOB, 6500), 1);
    assert_int_equal(d.unix_ms, 6500);
    assert_int_equal(mb_deadline_add(&d, MB_DEADLINE_RAYJOB, 6500), 0);
    assert_int_equal(mb_deadline_add(&d, MB_DEADLINE_RAYJOB, MB_DEADLINE_NEVER), 1);
    assert_int_equal(d.unix_ms, 7000);
    assert_string_equal(mb_deadline_source_name(d.source), "--deadline");

    d = (struct mb_deadline){0};
    mb_deadline_add(&d, MB_DEADLINE_ESTIMATED, 5000);
    assert_int_equal(mb_deadline_add(&d, MB_DEADLINE_RAYJOB, MB_DEADLINE_NEVER), 1);
    assert_int_equal(d.unix_ms, 0);
    assert_int_equal(d.source, MB_DEADLINE_NONE);
    assert_int_equal(mb_deadline_add(&d, MB_DEADLINE_SIGTERM, 0), 1);
    assert_int_equal(d.source, MB_DEADLINE_SIGTERM);
    assert_string_equal(mb_deadline_source_name(MB_DEADLINE_RAYJOB), "RayJob");
}

static void test_what_was_never_measured(void **state)
{
    struct mb_deadline_facts f = facts();
    struct mb_deadline_state s = {0};
    struct mb_deadline_plan p;

    (void)state;
    f.save = f.commit = (struct mb_measured){0};
    f.checkpoint_bytes = f.rate_bytes_per_s = 0;
    assert_int_equal(look(&s, &f, T0).action, MB_DEADLINE_GO_ON);
    assert_int_equal(look(&s, &f, T0 + 33332).action, MB_DEADLINE_GO_ON);
    p = look(&s, &f, T0 + 33334);
    assert_int_equal(p.action, MB_DEADLINE_SAVE_NOW);
    assert_int_equal(look(&s, &f, T0 + 33400).action, MB_DEADLINE_GO_ON);
    /* No answer: a quarter of the time is kept for the upload. */
    p = look(&s, &f, T0 + 33500);
    assert_int_equal(p.local_at_ms - p.save_at_ms, 25000);
    assert_int_equal(look(&s, &f, p.save_at_ms).action, MB_DEADLINE_SAVE_AND_END);
    /* A node that goes does not wait for measures. */
    s = (struct mb_deadline_state){0};
    f.deadline.leaves = 1;
    assert_int_equal(look(&s, &f, T0).action, MB_DEADLINE_SAVE_AND_END);
}

/* Other programs only know a stop, and may take all their grace. */
static void test_foreign_programs(void **state)
{
    struct mb_deadline_facts f = facts();
    struct mb_deadline_state s = {0};
    struct mb_deadline_plan p;

    (void)state;
    f.can_save_now = 0;
    f.step = f.save = (struct mb_measured){0};
    f.iteration = -1;
    p = look(&s, &f, T0);
    assert_int_equal(p.local_at_ms, T0 + 100000 - MARGIN - 60000);
    p = look(&s, &f, p.save_at_ms);
    assert_int_equal(p.action, MB_DEADLINE_SAVE_AND_END);
    assert_int_equal(mb_deadline_grace_ms(&p, f.now_ms, f.stop_grace_ms), 60000);
    s = (struct mb_deadline_state){0};
    p = look(&s, &f, T0 + 90000);
    assert_int_equal(p.action, MB_DEADLINE_SAVE_AND_END);
    assert_true(p.is_local_only);
    assert_int_equal(mb_deadline_grace_ms(&p, f.now_ms, f.stop_grace_ms), 8500);
    s = (struct mb_deadline_state){0};
    assert_int_equal(look(&s, &f, T0 + 98000).action, MB_DEADLINE_END);
}

/* Nothing is kept: the ranks are ended in time, that is all. */
static void test_without_saves(void **state)
{
    struct mb_deadline_facts f = facts();
    struct mb_deadline_state s = {0};
    struct mb_deadline_plan p;

    (void)state;
    f.saves = 0;
    p = look(&s, &f, T0);
    assert_int_equal(p.save_at_ms, T0 + 100000 - MARGIN - 2000);
    p = look(&s, &f, T0 + 96000);
    assert_int_equal(p.action, MB_DEADLINE_SAVE_AND_END);
    assert_false(p.is_local_only);
    s = (struct mb_deadline_state){0};
    f.ranks_run = 0;
    assert_int_equal(look(&s, &f, T0 + 99999).action, MB_DEADLINE_GO_ON);
}

static void test_measured(void **state)
{
    struct mb_measured m = {0};

    (void)state;
    mb_measured_note(&m, 0);
    assert_int_equal(m.is_known, 1);
    assert_int_equal(m.ms, 0);
    mb_measured_note(&m, 800);
    assert_int_equal(m.ms, 800);
    mb_measured_note(&m, 400);
    assert_int_equal(m.ms, 700);
    mb_measured_note(&m, 900);
    assert_int_equal(m.ms, 900);
}

static void test_rate(void **state)
{
    struct mb_rate r = {0};
    uint64_t now = 0, total = 0;

    (void)state;
    assert_int_equal(mb_rate_bytes_per_s(&r), 0);
    /* Ten minutes in which nothing is sent are no window: half a second of them may count. */
    mb_rate_note(&r, now, total, 0);
    mb_rate_note(&r, now += 600000, total, 1);
    mb_rate_note(&r, now += 400, total += 1000, 1);
    assert_int_equal(mb_rate_bytes_per_s(&r), 0);
    mb_rate_note(&r, now += 100, total += 1000, 1);
    assert_int_equal(mb_rate_bytes_per_s(&r), 2000);
    /* A stall: the answer sinks while no byte comes. */
    for (int i = 0; i < 30; i++)
        mb_rate_note(&r, now += 100, total, 1);
    assert_int_equal(mb_rate_bytes_per_s(&r), 500);
    mb_rate_note(&r, now += 1000, total += 2000, 1);
    assert_int_equal(mb_rate_bytes_per_s(&r), 800); /* (2000 + 2000) bytes in 5 s */
    /* Fast again: it takes two windows to be believed, and the slow ones weigh on. */
    mb_rate_note(&r, now += 1000, total += 10000, 1);
    assert_int_equal(mb_rate_bytes_per_s(&r), 2333);
    /* A counter that begins anew is no rate. */
    mb_rate_note(&r, now += 1000, 5, 1);
    assert_int_equal(mb_rate_bytes_per_s(&r), 2333);
}

/* Parts are acknowledged at once by the dozen: the bunch belongs to all the time before it. */
static void test_rate_of_bunches(void **state)
{
    struct mb_rate r = {0};
    uint64_t total = 0;

    (void)state;
    for (uint64_t now = 0; now <= 200000; now += 100) {
        if (now > 0 && now % 10000 == 0)
            total += 64000000;
        mb_rate_note(&r, now, total, 1);
        assert_true(mb_rate_bytes_per_s(&r) <= 6400000);
        if (now > 30000)
            assert_true(mb_rate_bytes_per_s(&r) >= 4200000);
    }
}

static void test_names(void **state)
{
    (void)state;
    assert_string_equal(mb_deadline_action_name(MB_DEADLINE_SAVE_AND_END), "save and end");
    assert_string_equal(mb_deadline_action_name(MB_DEADLINE_N_ACTIONS), "?");
    assert_string_equal(mb_deadline_source_name(MB_DEADLINE_N_SOURCES), "?");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_deadline),
        cmocka_unit_test(test_latest_moments),
        cmocka_unit_test(test_logs_have_their_time),
        cmocka_unit_test(test_upload_does_not_fit),
        cmocka_unit_test(test_might_just_fit),
        cmocka_unit_test(test_no_time_for_a_save),
        cmocka_unit_test(test_node_goes),
        cmocka_unit_test(test_the_earliest_counts),
        cmocka_unit_test(test_a_rayjob_is_better_than_its_estimate),
        cmocka_unit_test(test_what_was_never_measured),
        cmocka_unit_test(test_foreign_programs),
        cmocka_unit_test(test_without_saves),
        cmocka_unit_test(test_measured),
        cmocka_unit_test(test_rate),
        cmocka_unit_test(test_rate_of_bunches),
        cmocka_unit_test(test_names),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
