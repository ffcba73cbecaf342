/* When following a log is over, and that a stream that was lost is no success. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "cli/follow_rules.h"

enum { T0 = 1000000, LATE = T0 + MB_FOLLOW_LOST_MS + 1 };

static enum mb_follow_verdict judge(struct mb_follow_end e, uint64_t now_ms)
{
    uint64_t seen_ms = T0;

    return mb_follow_judge(&e, now_ms, &seen_ms);
}

static void test_only_a_clean_end_is_one(void **state)
{
    (void)state;
    assert_int_equal(
        judge((struct mb_follow_end){.status_code = 1000, .answers = 1, .is_terminal = 1}, T0),
        MB_FOLLOW_DONE);
    assert_int_equal(
        judge((struct mb_follow_end){.status_code = 1000, .answers = 1, .once = 1}, T0),
        MB_FOLLOW_DONE);
    /* Stock servers close well while the job still runs. */
    assert_int_equal(judge((struct mb_follow_end){.status_code = 1000, .answers = 1}, T0),
                     MB_FOLLOW_AGAIN);
    /* Whatever else ended the stream of a job that is over: the rest is asked for. */
    for (int code = 1001; code <= 1015; code++)
        if (code != 1011)
            assert_int_equal(
                judge((struct mb_follow_end){.status_code = code, .answers = 1, .is_terminal = 1},
                      T0),
                MB_FOLLOW_AGAIN);
}

static void test_what_asking_again_does_not_mend(void **state)
{
    (void)state;
    assert_int_equal(judge((struct mb_follow_end){.http_status = 404, .answers = 1}, T0),
                     MB_FOLLOW_NOWHERE);
    assert_int_equal(judge((struct mb_follow_end){.status_code = 4404, .answers = 1}, T0),
                     MB_FOLLOW_NOWHERE);
    assert_int_equal(judge((struct mb_follow_end){.http_status = 403, .answers = 1}, T0),
                     MB_FOLLOW_UNREADABLE);
    assert_int_equal(judge((struct mb_follow_end){.http_status = 503, .answers = 1}, T0),
                     MB_FOLLOW_AGAIN);
    assert_int_equal(
        judge((struct mb_follow_end){.status_code = 1011, .answers = 1, .is_terminal = 1}, T0),
        MB_FOLLOW_UNREADABLE);
    assert_int_equal(judge((struct mb_follow_end){.status_code = 1011, .answers = 1}, T0),
                     MB_FOLLOW_AGAIN);
}

static void test_patience_ends_without_success(void **state)
{
    const struct mb_follow_end silent = {.status_code = 1006};
    const struct mb_follow_end broken = {.status_code = 1006, .answers = 1, .is_terminal = 1};

    (void)state;
    assert_int_equal(judge(silent, LATE - 1), MB_FOLLOW_AGAIN);
    assert_int_equal(judge(silent, LATE), MB_FOLLOW_SILENT);
    assert_int_equal(judge(broken, LATE - 1), MB_FOLLOW_AGAIN);
    assert_int_equal(judge(broken, LATE), MB_FOLLOW_BROKEN);
    assert_int_equal(judge((struct mb_follow_end){.status_code = 1011, .answers = 1}, LATE),
                     MB_FOLLOW_BROKEN);
}

static void test_a_job_that_lives_is_waited_for(void **state)
{
    const struct mb_follow_end lives = {.status_code = 1006, .answers = 1};
    const struct mb_follow_end over = {.status_code = 1006, .answers = 1, .is_terminal = 1};
    uint64_t seen_ms = T0;

    (void)state;
    assert_int_equal(mb_follow_judge(&lives, LATE, &seen_ms), MB_FOLLOW_AGAIN);
    assert_int_equal(seen_ms, LATE);
    assert_int_equal(mb_follow_judge(&over, LATE + 1, &seen_ms), MB_FOLLOW_AGAIN);
    assert_int_equal(seen_ms, LATE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_only_a_clean_end_is_one),
        cmocka_unit_test(test_what_asking_again_does_not_mend),
        cmocka_unit_test(test_patience_ends_without_success),
        cmocka_unit_test(test_a_job_that_lives_is_waited_for),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
