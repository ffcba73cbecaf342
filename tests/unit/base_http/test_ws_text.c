/* UTF-8 repair: the result must not depend on where the input was cut. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "base/buf.h"
#include "base/http/ws_text.h"
#include "base/str.h"

static int collect(void *arg, const uint8_t *p, size_t n)
{
    assert_true(n > 0 && n <= MB_WS_FRAME_BYTES);
    assert_true(mb_utf8_valid(p, n));
    return mb_buf_add(arg, p, n);
}

static void feed_cut(const char *in, size_t n, size_t step, struct mb_buf *out)
{
    struct mb_ws_text t = {0};
    mb_buf_reset(out);
    for (size_t i = 0; i < n; i += step) {
        size_t m = n - i < step ? n - i : step;
        assert_int_equal(mb_ws_text_feed(&t, in + i, m, collect, out), 0);
    }
    assert_int_equal(mb_ws_text_flush(&t, collect, out), 0);
}

#define FFFD "\xef\xbf\xbd"

static void test_cuts(void **state)
{
    static const struct {
        const char *in;
        const char *want;
    } cases[] = {
        {"plain", "plain"},
        {"h\xc3\xa9 \xe2\x82\xac \xf0\x9f\x90\x9f!", "h\xc3\xa9 \xe2\x82\xac \xf0\x9f\x90\x9f!"},
        {"a\xff"
         "b",
         "a" FFFD "b"},
        {"\xe2\x82x", FFFD "x"},                   /* half a character, then text */
        {"\xe2\x82", FFFD},                        /* half a character at the end */
        {"\xc0\xaf", FFFD FFFD},                   /* overlong */
        {"\xed\xa0\x80", FFFD FFFD FFFD},          /* surrogate */
        {"\xf4\x90\x80\x80", FFFD FFFD FFFD FFFD}, /* above U+10FFFF */
        {"\xf0\x9f\x90\xe2\x82\xac", FFFD "\xe2\x82\xac"},
        {"\x80\xbf", FFFD FFFD},
    };
    struct mb_buf out = {0};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (size_t step = 1; step <= 8; step++) {
            feed_cut(cases[i].in, strlen(cases[i].in), step, &out);
            assert_string_equal(mb_buf_str(&out), cases[i].want);
        }
    }
    mb_buf_close(&out);
}

static void test_frames(void **state)
{
    struct mb_buf in = {0};
    struct mb_buf out = {0};
    (void)state;
    for (int i = 0; i < 20000; i++)
        assert_int_equal(mb_buf_puts(&in, i % 7 ? "\xe2\x82\xac" : "ab"), 0);
    for (size_t step = 4095; step <= 40000; step = step * 2 + 1) {
        feed_cut((const char *)in.data, in.len, step, &out);
        assert_int_equal(out.len, in.len);
        assert_memory_equal(out.data, in.data, in.len);
    }
    mb_buf_close(&in);
    mb_buf_close(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_cuts), cmocka_unit_test(test_frames)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
