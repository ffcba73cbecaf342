/* agent/log_plan.h: what is sent and released when, and a random walk that checks the promises. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "agent/log_plan.h"

enum { MIB = 1 << 20 };

static void test_index_once_a_second(void **state)
{
    struct mb_log_plan p;

    (void)state;
    mb_log_plan_init(&p, 0, 0, 0);
    assert_true(mb_log_plan_next(&p, 10, 0, 5000).index);
    assert_false(mb_log_plan_next(&p, 20, 0, 5999).index);
    assert_true(mb_log_plan_next(&p, 20, 0, 6000).index);
    assert_false(mb_log_plan_next(&p, 20, 0, 9000).index); /* did not grow */
    assert_true(mb_log_plan_next(&p, 21, 1, 9001).index);  /* the last word counts at once */
}

static void test_release_without_store(void **state)
{
    struct mb_log_plan p;
    struct mb_log_step s;

    (void)state;
    mb_log_plan_init(&p, 0, 0, 4 * MIB);
    assert_false(mb_log_plan_next(&p, 4 * MIB, 0, 1).release);
    s = mb_log_plan_next(&p, 5 * MIB, 0, 2);
    assert_true(s.release);
    assert_int_equal(s.release_end, 2 * MIB);
    assert_false(mb_log_plan_next(&p, 9 * MIB, 0, 3).release); /* one at a time */
    mb_log_plan_released(&p, s.release_end);
    assert_int_equal(mb_log_plan_next(&p, 9 * MIB, 0, 4).release_end, 6 * MIB);
    mb_log_plan_init(&p, 0, 0, 0);
    assert_false(mb_log_plan_next(&p, 1ULL << 40, 0, 1).release);
}

static void test_held(void **state)
{
    struct mb_log_plan p;
    struct mb_log_step s;

    (void)state;
    mb_log_plan_init(&p, 0, 0, 0);
    assert_int_equal(mb_log_plan_owes(&p, 10), 0); /* no store */
    p.has_url = 1;
    assert_int_equal(mb_log_plan_owes(&p, 5 * MIB), 5 * MIB);
    p.held = 1;
    assert_false(mb_log_plan_next(&p, 5 * MIB, 1, MB_LOG_PLAN_SHIP_MS).ship);
    assert_false(mb_log_plan_done(&p, 5 * MIB));
    p.held = 0;
    s = mb_log_plan_next(&p, 5 * MIB, 1, MB_LOG_PLAN_SHIP_MS);
    assert_true(s.ship);
    mb_log_plan_shipped(&p, s.ship_end, MB_LOG_PLAN_SHIP_MS);
    assert_int_equal(mb_log_plan_owes(&p, 5 * MIB), MIB);
    mb_log_plan_shipped(&p, 5 * MIB, MB_LOG_PLAN_SHIP_MS);
    assert_int_equal(mb_log_plan_owes(&p, 5 * MIB), 0);
    assert_int_equal(mb_log_plan_owes(&p, 5 * MIB + 1), 1);
}

/* What is left at the end goes from where the store has it, in pieces that a slow link takes. */
static void test_the_rest_of_a_log(void **state)
{
    struct mb_log_plan p;
    struct mb_log_step s;
    uint64_t size = 9 * MIB + 100, at = 4 * MIB;

    (void)state;
    mb_log_plan_init(&p, 0, 0, 0);
    p.has_url = 1;
    s = mb_log_plan_next(&p, size, 1, 0);
    assert_true(s.ship && s.ship_begin == 0 && s.ship_end == at);
    mb_log_plan_shipped(&p, s.ship_end, 0);
    s = mb_log_plan_next(&p, size - 2 * MIB, 0, MB_LOG_PLAN_SHIP_MS);
    assert_true(s.ship && s.ship_begin == at && s.ship_end == size - 2 * MIB);
    mb_log_plan_shipped(&p, s.ship_end, MB_LOG_PLAN_SHIP_MS);
    s = mb_log_plan_next(&p, size, 1, MB_LOG_PLAN_SHIP_MS); /* a full one, from its beginning */
    assert_true(s.ship && s.ship_begin == at && s.ship_end == 2 * at);
    mb_log_plan_shipped(&p, s.ship_end, MB_LOG_PLAN_SHIP_MS);
    for (at = 8 * MIB; at < size; at = s.ship_end) {
        assert_false(mb_log_plan_done(&p, size));
        s = mb_log_plan_next(&p, size, 1, MB_LOG_PLAN_SHIP_MS);
        assert_true(s.ship && s.ship_begin == at && s.ship_end > at && s.ship_end <= at + MIB / 4);
        mb_log_plan_shipped(&p, s.ship_end, MB_LOG_PLAN_SHIP_MS);
    }
    assert_true(mb_log_plan_done(&p, size));
    assert_int_equal(p.n_gaps, 0);
}

static void test_segments(void **state)
{
    struct mb_log_plan p;
    struct mb_log_step s;

    (void)state;
    mb_log_plan_init(&p, 0, 0, 0);
    assert_false(mb_log_plan_next(&p, 10, 1, 0).ship); /* no store */
    p.has_url = 1;
    assert_false(mb_log_plan_next(&p, 10, 0, 0).ship);
    s = mb_log_plan_next(&p, 10, 0, MB_LOG_PLAN_SHIP_MS);
    assert_true(s.ship && s.ship_begin == 0 && s.ship_end == 10);
    assert_false(mb_log_plan_next(&p, 99, 1, MB_LOG_PLAN_SHIP_MS).ship);
    assert_false(mb_log_plan_done(&p, 10));
    mb_log_plan_shipped(&p, 10, MB_LOG_PLAN_SHIP_MS);
    assert_true(mb_log_plan_done(&p, 10));
    /* A full one goes at once, from its beginning: the object grows in place. */
    s = mb_log_plan_next(&p, 5 * MIB, 0, MB_LOG_PLAN_SHIP_MS + 1);
    assert_true(s.ship && s.ship_begin == 0 && s.ship_end == 4 * MIB);
    mb_log_plan_ship_failed(&p, 100000);
    assert_false(mb_log_plan_next(&p, 5 * MIB, 1, 100999).ship);
    assert_false(mb_log_plan_done(&p, 5 * MIB)); /* a store that failed has not got it */
    s = mb_log_plan_next(&p, 5 * MIB, 1, 101000);
    assert_true(s.ship && s.ship_end == 4 * MIB);
    mb_log_plan_shipped(&p, s.ship_end, 101000);
    assert_false(mb_log_plan_done(&p, 5 * MIB));
    for (uint64_t at = 4 * MIB; at < 5 * MIB; at += MIB / 4) {
        s = mb_log_plan_next(&p, 5 * MIB, 1, 101001);
        assert_true(s.ship && s.ship_begin == at && s.ship_end == at + MIB / 4);
        mb_log_plan_shipped(&p, s.ship_end, 101002);
    }
    assert_true(mb_log_plan_done(&p, 5 * MIB));
}

static void test_store_that_hangs(void **state)
{
    struct mb_log_plan p;
    struct mb_log_step s;

    (void)state;
    mb_log_plan_init(&p, 0, 0, 4 * MIB);
    p.has_url = 1;
    s = mb_log_plan_next(&p, 5 * MIB, 0, 1);
    assert_true(s.ship && !s.release); /* waited for */
    s = mb_log_plan_next(&p, 9 * MIB, 0, 2);
    assert_true(s.release);
    assert_int_equal(s.release_end, 6 * MIB);
    mb_log_plan_released(&p, s.release_end);
    mb_log_plan_ship_failed(&p, 3);
    s = mb_log_plan_next(&p, 9 * MIB, 0, 100000);
    assert_true(s.ship);
    assert_int_equal(s.ship_begin, 6 * MIB);
    assert_int_equal(p.n_gaps, 0); /* as long as nothing came after it, it is the rest */
    mb_log_plan_shipped(&p, s.ship_end, 100001);
    assert_int_equal(p.n_gaps, 1);
    assert_int_equal(p.gap_begin, 0);
    assert_int_equal(p.gap_end, 6 * MIB);
    assert_int_equal(p.gap_bytes, 6 * MIB);
}

/* The cap let go of what was not sent: that is told as it is, whatever was on its way then. */
static void test_gaps(void **state)
{
    struct mb_log_plan p;
    struct mb_log_step s;

    (void)state;
    mb_log_plan_init(&p, 0, 0, MIB); /* pieces of 128 KiB */
    p.has_url = 1;
    s = mb_log_plan_next(&p, 14 * MIB, 0, 1);
    assert_true(s.ship && s.ship_end == MIB / 8 && s.release);
    mb_log_plan_released(&p, s.release_end);
    mb_log_plan_shipped(&p, s.ship_end, 2);
    assert_int_equal(p.n_gaps, 0);
    s = mb_log_plan_next(&p, 14 * MIB, 0, 3);
    assert_int_equal(s.ship_begin, 14 * MIB - MIB / 4 * 3);
    mb_log_plan_ship_failed(&p, 4);
    assert_int_equal(p.n_gaps, 0);
    s = mb_log_plan_next(&p, 14 * MIB, 0, 10000);
    mb_log_plan_shipped(&p, s.ship_end, 10001);
    assert_int_equal(p.n_gaps, 1);
    assert_int_equal(p.gap_begin, MIB / 8);
    assert_int_equal(p.gap_end, 14 * MIB - MIB / 4 * 3);
    assert_int_equal(p.gap_bytes, p.gap_end - p.gap_begin);
    /* Another one. */
    s = mb_log_plan_next(&p, 20 * MIB, 0, 10002);
    mb_log_plan_released(&p, s.release_end);
    mb_log_plan_shipped(&p, s.ship_end, 10003);
    s = mb_log_plan_next(&p, 20 * MIB, 0, 10004);
    mb_log_plan_shipped(&p, s.ship_end, 10005);
    assert_int_equal(p.n_gaps, 2);
    assert_int_equal(p.gap_begin, MIB / 8);
    assert_int_equal(p.gap_end, 20 * MIB - MIB / 4 * 3);
    assert_int_equal(p.gap_bytes, p.gap_end - p.gap_begin - 2 * (MIB / 8));
    /* The program truncates it: what comes after that is sent anew. */
    assert_true(mb_log_plan_next(&p, MIB, 0, 10006).rewound);
    assert_int_equal(p.gap_begin, MIB / 8);
    assert_int_equal(p.gap_end, MIB);
    assert_int_equal(p.gap_bytes, MIB - MIB / 8);
    assert_true(mb_log_plan_next(&p, 10, 0, 10007).rewound);
    assert_int_equal(p.n_gaps, 0);
    assert_int_equal(p.gap_bytes, 0);
}

/* An agent that comes after the one that saw a gap knows it; one that died between the note and
 * the head counts it once. */
static void test_gaps_of_an_earlier_plan(void **state)
{
    (void)state;
    for (int head_was_saved = 0; head_was_saved < 2; head_was_saved++) {
        struct mb_log_plan p;
        struct mb_log_step s;

        mb_log_plan_init(&p, 6 * MIB, head_was_saved ? 6 * MIB + MIB / 8 : MIB, MIB);
        p.has_url = 1;
        p.n_gaps = 1;
        p.gap_begin = MIB;
        p.gap_end = 6 * MIB;
        p.gap_bytes = 5 * MIB;
        s = mb_log_plan_next(&p, 7 * MIB - MIB / 4, 0, 1);
        assert_int_equal(s.ship_begin, 6 * MIB + (head_was_saved ? MIB / 8 : 0));
        mb_log_plan_shipped(&p, s.ship_end, 2);
        assert_int_equal(p.n_gaps, 1);
        assert_int_equal(p.gap_bytes, 5 * MIB);
        s = mb_log_plan_next(&p, 10 * MIB, 0, 3);
        mb_log_plan_released(&p, s.release_end);
        mb_log_plan_shipped(&p, s.ship_end, 4);
        s = mb_log_plan_next(&p, 10 * MIB, 0, 5);
        mb_log_plan_shipped(&p, s.ship_end, 6);
        assert_int_equal(p.n_gaps, 2);
        assert_int_equal(p.gap_begin, MIB);
        assert_int_equal(p.gap_end, 10 * MIB - MIB / 4 * 3);
    }
}

/* A program may truncate the file that is its stdout: that is no size of 2^64. */
static void test_truncated_by_its_writer(void **state)
{
    struct mb_log_plan p;
    struct mb_log_step s;

    (void)state;
    mb_log_plan_init(&p, 6 * MIB, 6 * MIB, 4 * MIB);
    assert_false(mb_log_plan_next(&p, 9 * MIB, 0, 1).rewound);
    s = mb_log_plan_next(&p, 100, 0, 2);
    assert_true(s.rewound && !s.release && !s.ship);
    assert_int_equal(p.first, 0);
    assert_int_equal(p.shipped, 100);
    assert_false(mb_log_plan_next(&p, 100, 0, 3).rewound);
    /* Only its end was cut off: the front stays released, the last piece is sent again. */
    mb_log_plan_init(&p, 2 * MIB, 7 * MIB, 64 * MIB);
    p.has_url = 1;
    s = mb_log_plan_next(&p, 5 * MIB, 1, 1);
    assert_true(s.rewound && !s.ship && !s.release);
    assert_int_equal(p.first, 2 * MIB);
    assert_true(mb_log_plan_done(&p, 5 * MIB));
    s = mb_log_plan_next(&p, 5 * MIB + 1, 1, 2);
    assert_true(s.ship && s.ship_begin == 4 * MIB && s.ship_end == 5 * MIB + 1);
}

static unsigned n_gaps_seen; /* over all walks */

static uint64_t next_random(uint64_t *x)
{
    *x ^= *x << 13;
    *x ^= *x >> 7;
    *x ^= *x << 17;
    return *x;
}

static void restart(struct mb_log_plan *p)
{
    struct mb_log_plan before = *p;

    mb_log_plan_init(p, before.first, before.shipped, before.cap_bytes);
    p->has_url = 1;
    p->n_gaps = before.n_gaps;
    p->gap_begin = before.gap_begin;
    p->gap_end = before.gap_end;
    p->gap_bytes = before.gap_bytes;
}

/* Nothing overlaps in the store, nothing is released twice or before it is sent (unless said), and
 * what is held stays below twice the cap and a turn's growth. In the end every byte is either sent
 * or in a gap, however often the agent was restarted. */
static void walk(uint64_t seed)
{
    struct mb_log_plan p;
    uint64_t x = seed * 2654435761u + 1, size = 0, now_ms = 1, released = 0;
    struct mb_log_step flying = {0};
    uint64_t last_begin = 0, last_end = 0, sent = 0;

    mb_log_plan_init(&p, 0, 0, MIB);
    p.has_url = 1;
    for (int i = 0; i < 3000; i++) {
        int ended = i >= 2000;
        struct mb_log_step s;

        now_ms += next_random(&x) % 2000;
        if (next_random(&x) % 100 == 0)
            restart(&p);
        if (!ended)
            size += next_random(&x) % 5 == 0 ? next_random(&x) % (256 << 10) : 0;
        s = mb_log_plan_next(&p, size, ended, now_ms);
        if (s.ship) {
            assert_true(s.ship_begin >= p.first && s.ship_begin < s.ship_end);
            assert_true(s.ship_end <= size && s.ship_end > p.shipped);
            assert_true(s.ship_begin == last_begin || s.ship_begin >= last_end);
            flying = s;
        }
        if (s.release) {
            assert_true(s.release_end > released && s.release_end < size);
            assert_true(s.release_end <= p.shipped || size - p.first > 2 * MIB);
            released = s.release_end;
            mb_log_plan_released(&p, s.release_end);
        }
        assert_true(size - p.first <= 2 * MIB + (256 << 10));
        if (p.shipping && (ended || next_random(&x) % 4 == 0)) {
            if (!ended && next_random(&x) % 3 == 0) {
                mb_log_plan_ship_failed(&p, now_ms);
            } else {
                if (flying.ship_begin == last_begin)
                    sent -= last_end - last_begin; /* the same object, longer */
                sent += flying.ship_end - flying.ship_begin;
                last_begin = flying.ship_begin;
                last_end = flying.ship_end;
                mb_log_plan_shipped(&p, flying.ship_end, now_ms);
            }
        }
    }
    assert_true(mb_log_plan_done(&p, size));
    assert_int_equal(sent + p.gap_bytes, size);
    assert_true(p.gap_bytes <= p.gap_end - p.gap_begin && p.gap_end <= size);
    n_gaps_seen += p.n_gaps;
}

static void test_random_walks(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 500; seed++)
        walk(seed);
    assert_true(n_gaps_seen > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_index_once_a_second),
        cmocka_unit_test(test_release_without_store),
        cmocka_unit_test(test_held),
        cmocka_unit_test(test_the_rest_of_a_log),
        cmocka_unit_test(test_segments),
        cmocka_unit_test(test_store_that_hangs),
        cmocka_unit_test(test_gaps),
        cmocka_unit_test(test_gaps_of_an_earlier_plan),
        cmocka_unit_test(test_truncated_by_its_writer),
        cmocka_unit_test(test_random_walks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
