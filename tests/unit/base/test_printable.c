/* What a terminal is shown of text from outside. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include "base/printable.h"

static void expect(int (*add)(const char *, struct mb_buf *), const char *text, const char *shown)
{
    struct mb_buf out = {0};

    assert_int_equal(add(text, &out), 0);
    assert_string_equal(mb_buf_str(&out), shown);
    mb_buf_close(&out);
}

static void in_one_line(void **state)
{
    (void)state;
    expect(mb_printable, "", "");
    expect(mb_printable, "gr\xc3\xbc\xc3\x9f\xe2\x82\xac", "gr\xc3\xbc\xc3\x9f\xe2\x82\xac");
    expect(mb_printable, "\x1b[2J\x1b]0;pwn\x07", "\\x1b[2J\\x1b]0;pwn\\x07");
    expect(mb_printable, "a\nb\tc\r\n", "a\\x0ab\\x09c\\x0d\\x0a");
    expect(mb_printable, "\xc2\x9b[2J\xe2\x80\xae", "\\xc2\\x9b[2J\\xe2\\x80\\xae");
    expect(mb_printable, "\xff\xe2\x82", "\\xff\\xe2\\x82");
}

static void in_several_lines(void **state)
{
    (void)state;
    expect(mb_printable_lines, "a\nb\tc\r\nd", "a\nb\tc\r\nd");
    expect(mb_printable_lines, "shown\rhidden\r", "shown\\x0dhidden\\x0d");
    expect(mb_printable_lines, "\x1b[2J\x1b]0;pwn\x07\n", "\\x1b[2J\\x1b]0;pwn\\x07\n");
    expect(mb_printable_lines, "\xe2\x80\xa8\x7f", "\\xe2\\x80\\xa8\\x7f");
}

static void of_an_error(void **state)
{
    struct mb_err err;

    (void)state;
    mb_err_set(&err, MB_ESTATE, "it said \xc2\x9b[31m"); /* others are taken out when it is set */
    mb_err_printable(&err);
    assert_string_equal(err.text, "it said \\xc2\\x9b[31m");
}

static void as_json(void **state)
{
    static const struct {
        const char *text, *shown;
    } rows[] = {
        {"gr\xc3\xbc\xc3\x9f\xe2\x82\xac \xf0\x9f\x98\x80",
         "gr\xc3\xbc\xc3\x9f\xe2\x82\xac \xf0\x9f\x98\x80"},
        {"\x1b[2J", "\\u001B[2J"}, /* jansson's own */
        {"a\xc2\x9b[2J\xc2\x80\xc2\x9f\xc2\xa0", "a\\u009B[2J\\u0080\\u009F\xc2\xa0"},
        {"\x7f\xe2\x80\xa8\xe2\x80\xae\xe2\x81\xa6z", "\\u007F\\u2028\\u202E\\u2066z"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        json_t *j = json_pack("{s:s}", rows[i].text, rows[i].text), *back;
        char *told = NULL, whole[200];
        size_t n = 0;
        FILE *out = open_memstream(&told, &n);

        assert_int_equal(mb_printable_json(j, JSON_COMPACT, out), 0);
        fclose(out);
        snprintf(whole, sizeof whole, "{\"%s\":\"%s\"}", rows[i].shown, rows[i].shown);
        assert_string_equal(told, whole);
        back = json_loads(told, 0, NULL);
        assert_true(json_equal(j, back)); /* it means the same */
        json_decref(back);
        json_decref(j);
        free(told);
    }
}

static void a_reader_that_is_gone_is_noticed(void **state)
{
    json_t *j = json_pack("{s:s}", "key", "value");
    FILE *full = fopen("/dev/full", "w");

    (void)state;
    assert_non_null(full);
    setvbuf(full, NULL, _IONBF, 0);
    assert_int_not_equal(mb_printable_json(j, 0, full), 0);
    fclose(full);
    json_decref(j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(in_one_line),
        cmocka_unit_test(in_several_lines),
        cmocka_unit_test(of_an_error),
        cmocka_unit_test(as_json),
        cmocka_unit_test(a_reader_that_is_gone_is_noticed),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
