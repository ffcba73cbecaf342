/* base/joblimit.h: the bounds of a job's limits, and errors that begin with what was wrong. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "base/joblimit.h"

static void refuses(int (*limit)(const char *s, const char *what, uint64_t *out,
                                 struct mb_err *err),
                    const char *what, const char *const *bad, size_t n_bad)
{
    for (size_t i = 0; i < n_bad; i++) {
        struct mb_err err;
        uint64_t n = 7;

        assert_int_equal(limit(bad[i], what, &n, &err), MB_EINVAL);
        assert_int_equal(n, 0);
        assert_non_null(strstr(err.text, what));
    }
}

static void test_memory(void **state)
{
    static const char *const bad[] = {"12", "0", "1048575", "8388608TiB", "much", ""};
    struct mb_err err;
    uint64_t n;

    (void)state;
    assert_int_equal(mb_joblimit_memory("1MiB", "--memory-limit", &n, &err), 0);
    assert_int_equal(n, 1 << 20);
    refuses(mb_joblimit_memory, "--memory-limit", bad, sizeof(bad) / sizeof(bad[0]));
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
    refuses(mb_joblimit_log, "--log-max-bytes", bad, sizeof(bad) / sizeof(bad[0]));
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
    refuses(mb_joblimit_nofile, "--nofile", bad, sizeof(bad) / sizeof(bad[0]));
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
