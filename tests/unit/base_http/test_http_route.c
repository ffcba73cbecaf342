/* Targets and patterns. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "base/alloc.h"
#include "base/http/route.h"

static void parse(const char *uri, struct mb_http_target *t)
{
    memset(t, 0, sizeof *t);
    assert_int_equal(mb_http_target_parse(uri, t), 0);
}

static void test_path_and_query(void **state)
{
    struct mb_http_target t;
    (void)state;
    parse("/a%20b/c?x=1&y=a+b%26&flag&z=%zz&=v", &t);
    assert_string_equal(t.path, "/a b/c");
    assert_string_equal(mb_http_target_query(&t, "x"), "1");
    assert_string_equal(mb_http_target_query(&t, "y"), "a b&");
    assert_string_equal(mb_http_target_query(&t, "flag"), "");
    assert_string_equal(mb_http_target_query(&t, "z"), "%zz");
    assert_string_equal(mb_http_target_query(&t, ""), "v");
    assert_null(mb_http_target_query(&t, "X"));
    mb_http_target_close(&t);
    parse("http://head:8265/api/version?q=http://x", &t);
    assert_string_equal(t.path, "/api/version");
    mb_http_target_close(&t);
    parse("http://head:8265", &t);
    assert_string_equal(t.path, "/");
    mb_http_target_close(&t);
}

static void test_refused_targets(void **state)
{
    struct mb_http_target t = {0};
    (void)state;
    assert_int_equal(mb_http_target_parse("", &t), MB_EINVAL);
    assert_int_equal(mb_http_target_parse("*", &t), MB_EINVAL);
    assert_int_equal(mb_http_target_parse("/a%00b", &t), MB_EINVAL);
    assert_int_equal(mb_http_target_parse("/?a=%00", &t), MB_EINVAL);
    char many[256] = "/?";
    for (int i = 0; i <= MB_HTTP_MAX_QUERY; i++)
        strcat(many, "a&");
    assert_int_equal(mb_http_target_parse(many, &t), MB_EINVAL);
    many[2 + 2 * MB_HTTP_MAX_QUERY] = '\0';
    assert_int_equal(mb_http_target_parse(many, &t), 0);
    mb_http_target_close(&t);
}

static void test_match(void **state)
{
    struct mb_http_target t;
    (void)state;
    parse("/api/jobs/raysubmit%2F1%20x/logs", &t);
    assert_int_equal(mb_http_target_match(&t, "/api/jobs/{id}"), 0);
    assert_int_equal(mb_http_target_match(&t, "/api/jobs/{id}/logs"), 1);
    assert_string_equal(mb_http_target_param(&t, "id"), "raysubmit/1 x");
    assert_null(mb_http_target_param(&t, "i"));
    assert_int_equal(mb_http_target_match(&t, "/api/{a}/{b}/{c}"), 1);
    assert_string_equal(mb_http_target_param(&t, "a"), "jobs");
    assert_string_equal(mb_http_target_param(&t, "c"), "logs");
    assert_int_equal(mb_http_target_match(&t, "/api/{rest*}"), 1);
    assert_string_equal(mb_http_target_param(&t, "rest"), "jobs/raysubmit/1 x/logs");
    mb_http_target_close(&t);
    parse("/api/jobs/", &t);
    assert_int_equal(mb_http_target_match(&t, "/api/jobs"), 0);
    assert_int_equal(mb_http_target_match(&t, "/api/jobs/"), 1);
    assert_int_equal(mb_http_target_match(&t, "/api/jobs/{id}"), 0);
    assert_int_equal(mb_http_target_match(&t, "/api/jobs/{rest*}"), 1);
    mb_http_target_close(&t);
    parse("/", &t);
    assert_int_equal(mb_http_target_match(&t, "/"), 1);
    mb_http_target_close(&t);
    parse("/%61pi", &t);
    assert_int_equal(mb_http_target_match(&t, "/api"), 1);
    mb_http_target_close(&t);
}

static void test_patterns(void **state)
{
    struct mb_err err;
    (void)state;
    assert_int_equal(mb_http_pattern_check("/api/jobs/{id}/logs", &err), 0);
    assert_int_equal(mb_http_pattern_check("/api/packages/{protocol}/{name*}", &err), 0);
    assert_int_equal(mb_http_pattern_check("api", &err), MB_EINVAL);
    assert_int_equal(mb_http_pattern_check("/a{b}", &err), MB_EINVAL);
    assert_int_equal(mb_http_pattern_check("/{}", &err), MB_EINVAL);
    assert_int_equal(mb_http_pattern_check("/{a*}/b", &err), MB_EINVAL);
    assert_int_equal(mb_http_pattern_check("/{a}/{b}/{c}/{d}/{e}/{f}/{g}/{h}/{i}", &err),
                     MB_EINVAL);
}

static void test_allocation_failures(void **state)
{
    (void)state;
    for (unsigned long nth = 1;; nth++) {
        struct mb_http_target t = {0};
        mb_alloc_fail_nth(nth);
        int rc = mb_http_target_parse("/a/b?c=d", &t);
        if (rc == 0)
            rc = mb_http_target_match(&t, "/a/{x}") - 1;
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        mb_http_target_close(&t);
        if (!failed) {
            assert_int_equal(rc, 0);
            return;
        }
        assert_true(rc < 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_path_and_query),
        cmocka_unit_test(test_refused_targets),
        cmocka_unit_test(test_match),
        cmocka_unit_test(test_patterns),
        cmocka_unit_test(test_allocation_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
