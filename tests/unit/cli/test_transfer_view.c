/* What a transfer shows: the bar, the JSON line, the rate, and names that hold anything. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include "base/printable.h"
#include "cli/transfer_view.h"

static const struct mb_transfer_facts facts = {.verb = "push",
                                               .phase = "sending",
                                               .iteration = 20,
                                               .done_bytes = 50 << 20,
                                               .kept_bytes = 10 << 20,
                                               .total_bytes = 100 << 20,
                                               .n_done = 3,
                                               .n_files = 8};

static void test_rate(void **state)
{
    struct mb_transfer_view v = {0};
    uint64_t bytes = 0;

    (void)state;
    mb_transfer_view_rate(&v, 0, 1000);
    assert_true(v.rate == 0);
    for (uint64_t ms = 1200; ms <= 5000; ms += 200)
        mb_transfer_view_rate(&v, bytes += 2000, ms);
    assert_true(v.rate > 9999 && v.rate < 10001); /* 2000 bytes each fifth of a second */
    for (uint64_t ms = 5200; ms <= 20000; ms += 200)
        mb_transfer_view_rate(&v, bytes, ms);
    assert_true(v.rate < 100);                     /* nothing comes: the rate is not kept up */
    mb_transfer_view_rate(&v, bytes - 500, 20200); /* a part began anew */
    assert_true(v.rate >= 0);
}

static void test_line(void **state)
{
    struct mb_transfer_view v = {.rate = 10 << 20, .columns = 200};
    struct mb_transfer_facts none = {.verb = "pull", .phase = "looking", .iteration = -1};
    char line[512];

    (void)state;
    mb_transfer_view_line(&v, &facts, line, sizeof(line));
    assert_string_equal(line,
                        "push iteration 20 sending [============>           ]  50% 50.0 MiB of "
                        "100.0 MiB, 3/8 files, 10.0 MiB/s, 5 s left");
    v.columns = 40;
    mb_transfer_view_line(&v, &facts, line, sizeof(line));
    assert_int_equal(strlen(line), 39);
    v.columns = 200;
    v.rate = 0;
    mb_transfer_view_line(&v, &none, line, sizeof(line));
    assert_string_equal(
        line, "pull looking [>                       ]   0% 0 B of 0 B, 0/0 files, 0 B/s");
}

static void test_json(void **state)
{
    struct mb_transfer_view v = {.rate = 10 << 20};
    struct mb_buf out = {0};
    json_t *j;

    (void)state;
    assert_int_equal(mb_transfer_view_json(&v, &facts, &out), 0);
    j = json_loads(mb_buf_str(&out), 0, NULL);
    assert_int_equal(json_integer_value(json_object_get(j, "done_bytes")), 50 << 20);
    assert_true(json_real_value(json_object_get(j, "left_s")) > 4.9);
    json_decref(j);
    v.rate = 0;
    mb_buf_reset(&out);
    assert_int_equal(mb_transfer_view_json(&v, &facts, &out), 0);
    j = json_loads(mb_buf_str(&out), 0, NULL);
    assert_true(json_is_null(json_object_get(j, "left_s")));
    json_decref(j);
    mb_buf_close(&out);
}

static void test_printable(void **state)
{
    static const char *const cases[][2] = {
        {"plain ünï 码", "plain ünï 码"},
        {"\x1b[2J\r\n\t", "\\x1b[2J\\x0d\\x0a\\x09"},
        {"\x7f", "\\x7f"},
        {"a\xff\xc3", "a\\xff\\xc3"},
        {"\xc2\x9b"
         "31m",
         "\\xc2\\x9b31m"}, /* CSI in one character */
        {"\xe2\x80\xae"
         "abc",
         "\\xe2\\x80\\xae"
         "abc"}, /* writes backwards */
        {"\xe2\x80\xa6\xe2\x81\xa7", "\xe2\x80\xa6\\xe2\\x81\\xa7"},
    };
    struct mb_buf out = {0};

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        mb_buf_reset(&out);
        assert_int_equal(mb_printable(cases[i][0], &out), 0);
        assert_string_equal(mb_buf_str(&out), cases[i][1]);
    }
    mb_buf_close(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rate),
        cmocka_unit_test(test_line),
        cmocka_unit_test(test_json),
        cmocka_unit_test(test_printable),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
