/* --resume: what is gone on from, what is begun anew, and what is neither. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "cli/driver/resume.h"

static void check(enum mb_resume how, int64_t latest, int64_t newest_whole, int expected,
                  const char *words)
{
    struct mb_err err = {0};

    assert_int_equal(mb_resume_decide(how, "s3://b/run", latest, newest_whole, &err), expected);
    if (words) {
        assert_non_null(strstr(err.text, words));
        assert_non_null(strstr(err.text, "s3://b/run"));
    }
}

static void test_names(void **state)
{
    struct mb_err err = {0};
    enum mb_resume how = MB_RESUME_REQUIRED;

    (void)state;
    assert_int_equal(mb_resume_parse(NULL, &how, &err), MB_OK);
    assert_int_equal(how, MB_RESUME_NEVER);
    assert_int_equal(mb_resume_parse("auto", &how, &err), MB_OK);
    assert_int_equal(how, MB_RESUME_AUTO);
    assert_int_equal(mb_resume_parse("required", &how, &err), MB_OK);
    assert_int_equal(how, MB_RESUME_REQUIRED);
    assert_int_equal(mb_resume_parse("never", &how, &err), MB_OK);
    assert_int_equal(how, MB_RESUME_NEVER);
    assert_int_equal(mb_resume_parse("Auto", &how, &err), MB_EINVAL);
    assert_int_equal(mb_resume_parse("", &how, &err), MB_EINVAL);
}

static void test_nothing_is_there(void **state)
{
    (void)state;
    check(MB_RESUME_AUTO, -1, -1, 0, NULL);
    check(MB_RESUME_REQUIRED, -1, -1, MB_ENOENT, "no checkpoint");
}

static void test_there_is_one(void **state)
{
    (void)state;
    check(MB_RESUME_AUTO, 20, 20, 1, NULL);
    check(MB_RESUME_AUTO, 20, 10, 1, NULL);
    check(MB_RESUME_REQUIRED, 0, 0, 1, NULL);
}

/* A run that began anew beside them would look well, and its saves would never be the latest. */
static void test_damage_is_no_beginning(void **state)
{
    (void)state;
    check(MB_RESUME_AUTO, 20, -1, MB_ECORRUPT, "names iteration 20");
    check(MB_RESUME_REQUIRED, 20, -1, MB_ECORRUPT, "none up to it is whole");
    check(MB_RESUME_AUTO, -2, -1, MB_ECORRUPT, "pointer");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_nothing_is_there),
        cmocka_unit_test(test_there_is_one),
        cmocka_unit_test(test_damage_is_no_beginning),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
