/* base/joblimit.h: the bounds of a job's limits, and errors that begin with what was wrong. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "base/joblimit.h"

static void test_memory(void **state)
{
    static const char *const bad[] = {"12", "0", "1048575", "8388608TiB", "much", ""};
    struct mb_err err;
    uint64_t n;

    (void)state;
    assert_int_equal(mb_joblimit_memory("1MiB", "--memory-limit", &n, &err), 0);
    assert_int_equal(n, 1 << 20);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        n = 7;
        assert_int_equal(mb_joblimit_memory(bad[i], "--memory-limit", &n, &err), MB_EINVAL);
        assert_int_equal(n, 0);
        assert_non_null(strstr(err.text, "--memory-limit"));
    }
}

static void test_log(void **state)
{
    static const char *const bad[] = {"1", "262143", "8388608TiB", "-1", "many", ""};
    struct mb_err err;
    uint64_t n = 7;

    (void)state;
    assert_int_equal(mb_joblimit_log("0", "--log-max-bytes", &n, &err), 0);
    assert_int_equal(n, 0);
    assert_int_equal(mb_joblimit_log("256KiB", "--log-max-bytes", &n, &err), 0);
    assert_int_equal(n, MB_JOBLIMIT_LOG_MIN_BYTES);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        n = 7;
        assert_int_equal(mb_joblimit_log(bad[i], "--log-max-bytes", &n, &err), MB_EINVAL);
        assert_int_equal(n, 0);
        assert_non_null(strstr(err.text, "--log-max-bytes"));
    }
}

static void test_nofile(void **state)
{
    static const char *const bad[] = {"15", "0", "1073741825", "2G", "-1", "many"};
    struct mb_err err;
    uint64_t n;

    (void)state;
    assert_int_equal(mb_joblimit_nofile("16", "--nofile", &n, &err), 0);
    assert_int_equal(n, 16);
    assert_int_equal(mb_joblimit_nofile("1G", "--nofile", &n, &err), 0);
    assert_int_equal(n, 1 << 30);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        n = 7;
        assert_int_equal(mb_joblimit_nofile(bad[i], "--nofile", &n, &err), MB_EINVAL);
        assert_int_equal(n, 0);
        assert_non_null(strstr(err.text, "--nofile"));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_log),
        cmocka_unit_test(test_nofile),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
