/* Points in time: every form, and what is none. */
#include "tests/unit/base/cmocka_all.h"
#include <string.h>
#include "base/moment.h"

static const uint64_t now = 1000000000000u; /* 2001-09-09T01:46:40Z */

static uint64_t parse(const char *s)
{
    struct mb_err err = {0};
    uint64_t ms = 7;

    if (mb_moment_parse(s, now, "--deadline", &ms, &err) != MB_OK)
        fail_msg("%s: %s", s, err.text);
    return ms;
}

static void test_forms(void **state)
{
    (void)state;
    assert_int_equal(parse("90m"), now + 90 * 60000);
    assert_int_equal(parse("0"), now);
    assert_int_equal(parse("250ms"), now + 250);
    assert_int_equal(parse("@1000000001"), now + 1000);
    assert_int_equal(parse("@1000000001.5"), now + 1500);
    assert_int_equal(parse("2001-09-09T01:46:40Z"), now);
    assert_int_equal(parse("2001-09-09t01:46:40z"), now);
    assert_int_equal(parse("2001-09-09 01:46:40Z"), now);
    assert_int_equal(parse("2001-09-09T03:46:40+02:00"), now);
    assert_int_equal(parse("2001-09-08T20:16:40-05:30"), now);
    assert_int_equal(parse("2001-09-09T01:46:40.123456Z"), now + 123);
    assert_int_equal(parse("2028-02-29T00:00:00Z"), 1835395200000);
}

static void test_refusals(void **state)
{
    static const char *const bad[] = {
        "",
        "soon",
        "-5m",
        "5 m",
        "@",
        "@-1",
        "@0",
        "@nan",
        "@1e99",
        "@1000000001x",
        "2001-09-09T01:46:40",
        "2001-09-09",
        "2001-13-09T01:46:40Z",
        "2001-09-09T25:46:40Z",
        "2001-09-09T01:46:40Zx",
        "2001-09-09T01:46:40+2:00",
        "2001-09-09T01:46:40+24:00",
        "1960-01-01T00:00:00Z",
        "99999999999999999999h",
        "18446744073709551615ms",
    };

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct mb_err err = {0};
        uint64_t ms = 7;

        if (mb_moment_parse(bad[i], now, "--deadline", &ms, &err) == MB_OK)
            fail_msg("\"%s\" was taken as %llu", bad[i], (unsigned long long)ms);
        assert_int_equal(err.code, MB_EINVAL);
        assert_int_equal(ms, 7);
        assert_int_equal(strncmp(err.text, "--deadline: expected a duration", 31), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_forms),
                                       cmocka_unit_test(test_refusals)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
