/* base/buf.h: contents, the uncounted NUL, nothing changed on failure. */
#include "cmocka_all.h"
#include <string.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/err.h"

static void test_adding(void **state)
{
    struct mb_buf b = {0};
    const uint8_t numbers[] = {4, 3, 2, 1, 8, 7, 6, 5, 4, 3, 2, 1};

    (void)state;
    assert_string_equal(mb_buf_str(&b), "");
    assert_int_equal(mb_buf_add(&b, NULL, 0), 0);
    assert_int_equal(mb_buf_puts(&b, "abc"), 0);
    assert_int_equal(mb_buf_printf(&b, "-%d-%s", 42, "x"), 0);
    assert_string_equal(mb_buf_str(&b), "abc-42-x");
    mb_buf_consume(&b, 4);
    mb_buf_consume(&b, 0);
    assert_string_equal(mb_buf_str(&b), "42-x");
    assert_int_equal(b.len, 4);
    mb_buf_reset(&b);
    assert_int_equal(b.len, 0);
    assert_string_equal(mb_buf_str(&b), "");
    assert_int_equal(mb_buf_u32le(&b, 0x01020304), 0);
    assert_int_equal(mb_buf_u64le(&b, 0x0102030405060708), 0);
    assert_int_equal(b.len, 12);
    assert_memory_equal(b.data, numbers, 12);
    mb_buf_close(&b);
    assert_null(b.data);
    mb_buf_close(&b);
}

static void test_growth(void **state)
{
    struct mb_buf b = {0};

    (void)state;
    for (int i = 0; i < 100000; i++) {
        uint8_t c = (uint8_t)i;

        assert_int_equal(mb_buf_add(&b, &c, 1), 0);
        assert_int_equal(b.data[b.len], 0);
        assert_true(b.cap > b.len);
    }
    for (int i = 0; i < 100000; i++)
        assert_int_equal(b.data[i], (uint8_t)i);
    assert_int_equal(mb_buf_reserve(&b, SIZE_MAX), MB_ENOMEM);
    assert_int_equal(mb_buf_reserve(&b, SIZE_MAX / 2), MB_ENOMEM);
    assert_int_equal(b.len, 100000);
    mb_buf_close(&b);
}

static void test_take(void **state)
{
    struct mb_buf b = {0};
    char *text = mb_buf_take(&b);

    (void)state;
    assert_string_equal(text, "");
    mb_free(text);
    assert_int_equal(mb_buf_puts(&b, "moved"), 0);
    text = mb_buf_take(&b);
    assert_string_equal(text, "moved");
    mb_free(text);
    assert_null(b.data);
    mb_alloc_fail_nth(1);
    assert_null(mb_buf_take(&b));
    mb_alloc_fail_nth(0);
}

static void test_shell_words(void **state)
{
    static const struct {
        const char *word, *quoted;
    } cases[] = {{"/a/b-1.txt", "/a/b-1.txt"}, {"", "''"},        {"a b", "'a b'"}, {"$x", "'$x'"},
                 {"it's", "'it'\"'\"'s'"},     {"a\nb", "'a\nb'"}};

    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct mb_buf b = {0};
        assert_int_equal(mb_buf_puts(&b, "x "), 0);
        assert_int_equal(mb_buf_shell(&b, cases[i].word), 0);
        assert_string_equal(mb_buf_str(&b) + 2, cases[i].quoted);
        mb_buf_close(&b);
    }
}

static void test_failure(void **state)
{
    struct mb_buf b = {0};
    char big[200];

    (void)state;
    memset(big, 'x', sizeof(big));
    assert_int_equal(mb_buf_puts(&b, "kept"), 0);
    mb_alloc_fail_nth(1);
    assert_int_equal(mb_buf_add(&b, big, sizeof(big)), MB_ENOMEM);
    mb_alloc_fail_nth(1);
    assert_int_equal(mb_buf_printf(&b, "%.*s", (int)sizeof(big), big), MB_ENOMEM);
    big[sizeof(big) - 1] = '\0';
    mb_alloc_fail_nth(1);
    assert_int_equal(mb_buf_url(&b, big, 0), MB_ENOMEM);
    mb_alloc_fail_nth(1);
    big[0] = ' ';
    assert_int_equal(mb_buf_shell(&b, big), MB_ENOMEM);
    mb_alloc_fail_nth(0);
    assert_string_equal(mb_buf_str(&b), "kept");
    assert_int_equal(b.len, 4);
    mb_buf_close(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_adding),  cmocka_unit_test(test_growth),
        cmocka_unit_test(test_take),    cmocka_unit_test(test_shell_words),
        cmocka_unit_test(test_failure),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
