/* When a launch takes too long, in virtual time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>
#include "agent/launch_watch.h"
#include "base/err.h"

enum { NOW = 5000000 };

static void test_default(void **state)
{
    struct mb_launch_watch w;

    (void)state;
    mb_launch_begin(&w, 0, NOW);
    assert_int_equal(mb_launch_wait_ms(&w, NOW), MB_LAUNCH_TIMEOUT_MS);
    assert_int_equal(mb_launch_wait_ms(&w, NOW + MB_LAUNCH_TIMEOUT_MS + 5), 0);
}

/* Nobody answers: asked whenever it wants to be, it is lost after the last look and not before. */
static void test_silence(void **state)
{
    struct mb_launch_watch w;
    uint64_t now = NOW;
    int n_looks = 0;

    (void)state;
    mb_launch_begin(&w, 7000, now);
    for (;;) {
        now += mb_launch_wait_ms(&w, now);
        n_looks++;
        if (mb_launch_is_lost(&w, now))
            break;
    }
    assert_int_equal(now, NOW + 7000 + MB_LAUNCH_LAST_LOOK_MS);
    assert_int_equal(n_looks, 2);
    assert_true(mb_launch_is_lost(&w, now)); /* it stays so */
}

static void test_asked_early(void **state)
{
    struct mb_launch_watch w;

    (void)state;
    mb_launch_begin(&w, 7000, NOW);
    for (uint64_t ms = 0; ms < 7000; ms += 100)
        assert_false(mb_launch_is_lost(&w, NOW + ms));
    assert_false(mb_launch_is_lost(&w, NOW + 7000));
    for (uint64_t ms = 0; ms < MB_LAUNCH_LAST_LOOK_MS; ms += 100)
        assert_false(mb_launch_is_lost(&w, NOW + 7000 + ms));
}

/* The agent stood still for an hour, what it was told meanwhile it has not read yet. */
static void test_agent_stood_still(void **state)
{
    struct mb_launch_watch w;
    uint64_t now = NOW + 3600000;

    (void)state;
    mb_launch_begin(&w, 7000, NOW);
    assert_false(mb_launch_is_lost(&w, now));
    assert_int_equal(mb_launch_wait_ms(&w, now), MB_LAUNCH_LAST_LOOK_MS);
    mb_launch_reached(&w, MB_LAUNCH_DONE);
    assert_int_equal(mb_launch_wait_ms(&w, now), UINT64_MAX);
    assert_false(mb_launch_is_lost(&w, now + 3600000));
}

/* A step is no new deadline, and none is gone back. */
static void test_steps(void **state)
{
    struct mb_launch_watch w;

    (void)state;
    mb_launch_begin(&w, 7000, NOW);
    mb_launch_reached(&w, MB_LAUNCH_LISTENS);
    assert_int_equal(mb_launch_wait_ms(&w, NOW + 6999), 1);
    assert_false(mb_launch_is_lost(&w, NOW + 7000));
    assert_true(mb_launch_is_lost(&w, NOW + 7000 + MB_LAUNCH_LAST_LOOK_MS));
    mb_launch_reached(&w, MB_LAUNCH_DONE);
    mb_launch_reached(&w, MB_LAUNCH_LISTENS);
    assert_int_equal(w.step, MB_LAUNCH_DONE);
    assert_false(mb_launch_is_lost(&w, NOW + 70000));
}

static void test_texts(void **state)
{
    struct mb_launch_watch w;
    char text[MB_ERR_TEXT_MAX], small[16];

    (void)state;
    mb_launch_begin(&w, 1500, NOW);
    mb_launch_lost_text(&w, 12, text, sizeof(text));
    assert_non_null(strstr(text, "mobula-init (pid 12) did not answer the launch within 1.5 s"));
    assert_non_null(strstr(text, "`kill -CONT 12`"));
    mb_launch_reached(&w, MB_LAUNCH_LISTENS);
    mb_launch_lost_text(&w, 34, text, sizeof(text));
    assert_non_null(strstr(text, "supervisor 34 did not start every process within 1.5 s"));
    assert_non_null(strstr(text, "--launch-timeout"));
    mb_launch_lost_text(&w, 34, small, sizeof(small));
    assert_string_equal(small, "supervisor 34 d");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_default),     cmocka_unit_test(test_silence),
        cmocka_unit_test(test_asked_early), cmocka_unit_test(test_agent_stood_still),
        cmocka_unit_test(test_steps),       cmocka_unit_test(test_texts),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
