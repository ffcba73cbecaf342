/* Log bytes in JSON. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include <jansson.h>
#include "base/err.h"
#include "gcs/text.h"

static void expect_json(const char *in, size_t n, int at_end, const char *out, size_t used)
{
    char buf[256];
    size_t got, len = mb_text_json(in, n, at_end, buf, &got);

    assert_int_equal(got, used);
    assert_int_equal(len, strlen(out));
    assert_memory_equal(buf, out, len);
}

static void log_bytes_as_json(void **state)
{
    (void)state;
    expect_json("a\"\\\n\t\r\x01\x0b", 8, 1, "a\\\"\\\\\\n\\t\\r\\u0001\\u000b", 8);
    expect_json("gr\xc3\xbc\xc3\x9f", 6, 0, "gr\xc3\xbc\xc3\x9f", 6);
    expect_json("x\xe2\x82", 3, 0, "x", 1);             /* cut: later */
    expect_json("x\xe2\x82", 3, 1, "x\xef\xbf\xbd", 3); /* cut for good */
    expect_json("\xff\xc0\x80", 3, 1, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd", 3);
    expect_json("\xed\xa0\x80", 3, 1, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd", 3); /* surrogate */
}

static void every_byte_survives_json(void **state)
{
    char in[256], text[MB_TEXT_ESCAPE_MAX * sizeof(in)], quoted[sizeof(text) + 2];
    struct mb_buf back = {0};
    json_t *string;
    size_t n;

    (void)state;
    for (size_t i = 0; i < sizeof(in); i++)
        in[i] = (char)i;
    n = mb_text_json_bytes(in, sizeof(in), text);
    assert_in_range(n, sizeof(in), sizeof(text));
    quoted[0] = quoted[n + 1] = '"';
    memcpy(quoted + 1, text, n);
    string = json_loadb(quoted, n + 2, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
    assert_non_null(string);
    assert_int_equal(mb_text_bytes(json_string_value(string), json_string_length(string), &back),
                     0);
    assert_int_equal(back.len, sizeof(in));
    assert_memory_equal(back.data, in, sizeof(in));
    json_decref(string);
    mb_buf_close(&back);
    assert_int_equal(mb_text_bytes("\xc4\x80", 2, &back), MB_EPROTO); /* U+0100 */
    assert_int_equal(mb_text_bytes("\xc3", 1, &back), MB_EPROTO);
    assert_int_equal(mb_text_bytes("\xc3x", 2, &back), MB_EPROTO);
    assert_int_equal(mb_text_bytes("\x80", 1, &back), MB_EPROTO);
    mb_buf_close(&back);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(log_bytes_as_json),
        cmocka_unit_test(every_byte_survives_json),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
