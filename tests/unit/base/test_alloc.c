/* base/alloc.h: odd sizes, and the armed failure. */
#include "cmocka_all.h"
#include <string.h>
#include "base/alloc.h"

static void test_sizes(void **state)
{
    void *p = mb_alloc(0);

    (void)state;
    assert_non_null(p);
    p = mb_realloc(p, 0);
    assert_non_null(p);
    mb_free(p);
    p = mb_calloc(0, 8);
    assert_non_null(p);
    mb_free(p);
    assert_null(mb_calloc(SIZE_MAX / 2, 4));
    assert_null(mb_reallocarray(NULL, SIZE_MAX / 2, 4));
    mb_free(NULL);
}

static void test_text(void **state)
{
    char *s = mb_strndup("abcdef", 3);

    (void)state;
    assert_string_equal(s, "abc");
    mb_free(s);
    s = mb_strndup("ab", 10);
    assert_string_equal(s, "ab");
    mb_free(s);
    assert_null(mb_strdup(NULL));
    s = mb_asprintf("%s-%d", "rank", 7);
    assert_string_equal(s, "rank-7");
    mb_free(s);
}

static void test_failure(void **state)
{
    void *first;
    char *old;

    (void)state;
    mb_alloc_fail_nth(2);
    first = mb_alloc(1);
    assert_non_null(first);
    assert_int_equal(mb_alloc_did_fail(), 0);
    assert_null(mb_alloc(1));
    assert_int_equal(mb_alloc_did_fail(), 1);
    old = mb_alloc(8); /* once only */
    assert_non_null(old);
    strcpy(old, "kept");
    mb_alloc_fail_nth(1);
    assert_int_equal(mb_alloc_did_fail(), 0);
    assert_null(mb_realloc(old, 1000));
    assert_string_equal(old, "kept");
    mb_alloc_fail_nth(1);
    assert_null(mb_strdup("x"));
    mb_alloc_fail_nth(1);
    assert_null(mb_asprintf("%d", 1));
    mb_alloc_fail_nth(1);
    mb_alloc_fail_nth(0);
    mb_free(mb_realloc(old, 16));
    assert_int_equal(mb_alloc_did_fail(), 0);
    mb_free(first);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_failure),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
