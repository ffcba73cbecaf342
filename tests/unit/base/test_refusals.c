#include "base/refusals.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>
#include "base/log.h"

static void test_once_a_minute(void **state)
{
    struct mb_refusals r = {0};

    (void)state;
    assert_int_equal(mb_refusals_count(&r, "a", "x", 1000), 1);
    assert_int_equal(mb_refusals_count(&r, "a", "x", 1001), 0);
    assert_int_equal(mb_refusals_count(&r, "a", "y", 1001), 1);
    assert_int_equal(mb_refusals_count(&r, "b", "x", 1001), 1);
    assert_int_equal(mb_refusals_count(&r, "a", "x", 60999), 0);
    assert_int_equal(mb_refusals_count(&r, "a", "x", 61000), 3);
    assert_int_equal(mb_refusals_count(&r, "a", "x", 61001), 0);
    assert_int_equal(mb_refusals_count(&r, "a", "x", 121000), 2);
}

/* As soon as the machine is up, too. */
static void test_time_zero(void **state)
{
    struct mb_refusals r = {0};

    (void)state;
    assert_int_equal(mb_refusals_count(&r, "", "x", 0), 1);
    assert_int_equal(mb_refusals_count(&r, "", "x", 0), 0);
    assert_int_equal(mb_refusals_count(&r, "", "y", 0), 1);
}

/* Many callers cost no more than there is room for, and those that are known are still counted. */
static void test_many_callers(void **state)
{
    struct mb_refusals r = {0};
    unsigned n_said = 0;

    (void)state;
    for (unsigned i = 0; i < 1000; i++) {
        char who[16];

        snprintf(who, sizeof(who), "%u", i);
        n_said += mb_refusals_count(&r, who, "x", 1000 + i) > 0;
    }
    assert_int_equal(n_said, MB_REFUSALS_KEPT);
    assert_int_equal(mb_refusals_count(&r, "0", "x", 2500), 0);
    assert_int_equal(mb_refusals_count(&r, "0", "x", 61000), 2);
    assert_int_equal(mb_refusals_count(&r, "new", "x", 61001), 1);
}

static void test_long_words(void **state)
{
    struct mb_refusals r = {0};
    char who[500], why[500];

    (void)state;
    memset(who, 'a', sizeof(who) - 1);
    memset(why, 'b', sizeof(why) - 1);
    who[sizeof(who) - 1] = why[sizeof(why) - 1] = '\0';
    assert_int_equal(mb_refusals_count(&r, who, why, 1000), 1);
    assert_int_equal(mb_refusals_count(&r, who, why, 1001), 0);
}

static void test_line(void **state)
{
    struct mb_refusals r = {0};
    char text[1000] = "";
    int ends[2];

    (void)state;
    assert_int_equal(pipe(ends), 0);
    mb_log_init(ends[1], MB_LOG_INFO);
    mb_refusals_say(&r, "http", "10.0.0.1", "no token");
    mb_refusals_say(&r, "http", "10.0.0.1", "no token");
    mb_refusals_say(&r, "http", "", "no TLS");
    mb_log_init(2, MB_LOG_INFO);
    assert_true(read(ends[0], text, sizeof(text) - 1) > 0);
    assert_non_null(strstr(text, "WARN http: refused a caller from 10.0.0.1: no token\n"));
    assert_non_null(strstr(text, "refused a caller: no TLS\n"));
    assert_int_equal(strlen(strstr(text, "no TLS\n")), strlen("no TLS\n"));
    close(ends[0]);
    close(ends[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_once_a_minute), cmocka_unit_test(test_time_zero),
        cmocka_unit_test(test_many_callers),  cmocka_unit_test(test_long_words),
        cmocka_unit_test(test_line),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
