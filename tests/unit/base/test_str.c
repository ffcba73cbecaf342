/* base/str.h and base/clock.h. */
#include "cmocka_all.h"
#include <string.h>
#include "base/clock.h"
#include "base/str.h"

static void test_hex(void **state)
{
    const uint8_t bytes[] = {0x00, 0x9f, 0xff};
    uint8_t back[3] = {1, 2, 3};
    char out[7];

    (void)state;
    assert_string_equal(mb_hex(bytes, 3, out), "009fff");
    assert_string_equal(mb_hex(bytes, 0, out), "");
    assert_int_equal(mb_unhex("009FfG", back, 3), MB_EINVAL);
    assert_int_equal(mb_unhex("009f", back, 3), MB_EINVAL);
    assert_int_equal(mb_unhex("009fff00", back, 3), MB_EINVAL);
    assert_int_equal(back[0], 1); /* untouched */
    assert_int_equal(mb_unhex("009FfF", back, 3), 0);
    assert_memory_equal(back, bytes, 3);
}

static void test_numbers(void **state)
{
    const char *const bad_ints[] = {"",   " 1", "1 ", "1.5", "x", "0x10", "99999999999999999999",
                                    "11", "-1", "+"};
    const char *const bad_doubles[] = {"", " 1", "1e", "nan", "inf", "0x1p3", "1e999", "1,5"};
    struct mb_err err = {0};
    int64_t i = 77;
    double d = 7.5;

    (void)state;
    for (size_t k = 0; k < sizeof(bad_ints) / sizeof(bad_ints[0]); k++) {
        assert_int_equal(mb_parse_i64(bad_ints[k], 0, 10, "--rank", &i, &err), MB_EINVAL);
        assert_true(mb_starts_with(err.text, "--rank: "));
    }
    assert_int_equal(i, 77);
    assert_int_equal(mb_parse_i64("10", 0, 10, "x", &i, &err), 0);
    assert_int_equal(i, 10);
    assert_int_equal(mb_parse_i64("-9223372036854775808", INT64_MIN, INT64_MAX, "x", &i, &err), 0);
    assert_true(i == INT64_MIN);
    for (size_t k = 0; k < sizeof(bad_doubles) / sizeof(bad_doubles[0]); k++)
        assert_int_equal(mb_parse_double(bad_doubles[k], "--lr", &d, &err), MB_EINVAL);
    assert_true(d == 7.5);
    assert_int_equal(mb_parse_double("-3e-4", "--lr", &d, &err), 0);
    assert_true(d == -3e-4);
}

static void test_units(void **state)
{
    struct mb_err err = {0};
    uint64_t v = 0;

    (void)state;
    assert_int_equal(mb_parse_size("1024", "s", &v, &err), 0);
    assert_int_equal(v, 1024);
    assert_int_equal(mb_parse_size("64K", "s", &v, &err), 0);
    assert_int_equal(v, 65536);
    assert_int_equal(mb_parse_size("16MiB", "s", &v, &err), 0);
    assert_int_equal(v, 16 << 20);
    assert_int_equal(mb_parse_size("2GB", "s", &v, &err), 0);
    assert_true(v == 2ull << 30);
    assert_int_equal(mb_parse_size("3T", "s", &v, &err), 0);
    assert_true(v == 3ull << 40);
    assert_int_equal(mb_parse_size("18446744073709551615K", "s", &v, &err), MB_EINVAL);
    assert_int_equal(mb_parse_size("-1K", "s", &v, &err), MB_EINVAL);
    assert_int_equal(mb_parse_size("1X", "s", &v, &err), MB_EINVAL);
    assert_int_equal(mb_parse_size("K", "s", &v, &err), MB_EINVAL);
    assert_int_equal(mb_parse_duration_ms("250ms", "d", &v, &err), 0);
    assert_int_equal(v, 250);
    assert_int_equal(mb_parse_duration_ms("30", "d", &v, &err), 0);
    assert_int_equal(v, 30000);
    assert_int_equal(mb_parse_duration_ms("5m", "d", &v, &err), 0);
    assert_int_equal(v, 300000);
    assert_int_equal(mb_parse_duration_ms("2h", "d", &v, &err), 0);
    assert_int_equal(v, 7200000);
    assert_int_equal(mb_parse_duration_ms("2 h", "d", &v, &err), MB_EINVAL);
}

static void test_utf8(void **state)
{
    static const char *const good[] = {"",
                                       "a",
                                       "\xc2\xa2",
                                       "\xe2\x82\xac",
                                       "\xf0\x9f\x98\x80",
                                       "\xed\x9f\xbf",
                                       "\xf4\x8f\xbf\xbf"};
    static const char *const bad[] = {"\x80",
                                      "\xc0\xaf",
                                      "\xc1\x81",
                                      "\xe0\x80\xaf",
                                      "\xed\xa0\x80",
                                      "\xf0\x80\x80\xaf",
                                      "\xf4\x90\x80\x80",
                                      "\xf5\x80\x80\x80",
                                      "\xff",
                                      "\xe2\x82",
                                      "a\xc2"};
    static const struct {
        const char *text;
        enum mb_utf8 want;
        size_t len;
    } looks[] = {
        {"ab", MB_UTF8_WHOLE, 1},
        {"\xf0\x9f\x98\x80z", MB_UTF8_WHOLE, 4},
        {"\xf0\x9f\x98", MB_UTF8_PARTIAL, 3},
        {"\xf0\x9f\x98z", MB_UTF8_BROKEN, 3},
        {"\xed\xa0\x80", MB_UTF8_BROKEN, 1}, /* a surrogate: three broken parts */
        {"\xff\x80", MB_UTF8_BROKEN, 1},
    };
    const char *text = "a\xf0\x9f\x98\x80z";

    (void)state;
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++)
        assert_int_equal(mb_utf8_valid(good[i], strlen(good[i])), 1);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(mb_utf8_valid(bad[i], strlen(bad[i])), 0);
    for (size_t i = 0; i < sizeof(looks) / sizeof(looks[0]); i++) {
        size_t len = 0;

        assert_int_equal(mb_utf8_look(looks[i].text, strlen(looks[i].text), &len), looks[i].want);
        assert_int_equal(len, looks[i].len);
    }
    assert_int_equal(mb_utf8_floor(text, 6), 6);
    assert_int_equal(mb_utf8_floor(text, 5), 5);
    for (size_t n = 2; n <= 4; n++)
        assert_int_equal(mb_utf8_floor(text, n), 1);
    assert_int_equal(mb_utf8_floor(text, 1), 1);
    assert_int_equal(mb_utf8_floor(text, 0), 0);
}

static void test_words(void **state)
{
    static const char *const flags[] = {"--num-layers", "--hidden-size", "--seed", NULL};
    char out[16];

    (void)state;
    assert_string_equal(mb_nearest("--num-layer", flags), "--num-layers");
    assert_string_equal(mb_nearest("--hiden-sise", flags), "--hidden-size");
    assert_string_equal(mb_nearest("--seed", flags), "--seed");
    assert_null(mb_nearest("--entirely-else", flags));
    assert_null(mb_nearest("x", flags));
    assert_null(mb_nearest("", flags));
    assert_int_equal(mb_starts_with("abc", "ab"), 1);
    assert_int_equal(mb_starts_with("a", "ab"), 0);
    assert_int_equal(mb_ends_with("abc", "bc"), 1);
    assert_int_equal(mb_ends_with("c", "bc"), 0);
    assert_string_equal(mb_human_bytes(0, out), "0 B");
    assert_string_equal(mb_human_bytes(1023, out), "1023 B");
    assert_string_equal(mb_human_bytes(1024, out), "1.0 KiB");
    assert_string_equal(mb_human_bytes(12897484, out), "12.3 MiB");
    assert_string_equal(mb_human_bytes((1 << 20) - 1, out), "1.0 MiB");
    assert_string_equal(mb_human_bytes(UINT64_MAX, out), "16.0 EiB");
}

static void test_clock(void **state)
{
    uint64_t a = mb_mono_us();
    uint8_t zeros[32] = {0}, bytes[32] = {0};

    (void)state;
    assert_true(mb_mono_us() >= a);
    assert_true(mb_mono_ms() >= a / 1000);
    assert_true(mb_unix_ms() > 1700000000000ull);
    mb_random_bytes(bytes, sizeof(bytes));
    assert_memory_not_equal(bytes, zeros, sizeof(bytes));
    assert_true(mb_random_u64() != mb_random_u64());
}

static void test_backoff(void **state)
{
    (void)state;
    assert_int_equal(mb_backoff_ms(0, 100, 5000, 100), 100);
    assert_int_equal(mb_backoff_ms(0, 100, 5000, 101), 0);
    assert_int_equal(mb_backoff_ms(3, 100, 5000, 800), 800);
    assert_int_equal(mb_backoff_ms(3, 100, 5000, 801), 0);
    assert_int_equal(mb_backoff_ms(6, 100, 5000, 5000), 5000);
    assert_int_equal(mb_backoff_ms(6, 100, 5000, 5001), 0);
    assert_int_equal(mb_backoff_ms(1000, 100, 5000, 5000), 5000);
    assert_int_equal(mb_backoff_ms(5, 100, 0, 12345), 0);
    assert_true(mb_backoff_ms(70, 1, UINT64_MAX, 9) == 9);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hex),     cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_units),   cmocka_unit_test(test_utf8),
        cmocka_unit_test(test_words),   cmocka_unit_test(test_clock),
        cmocka_unit_test(test_backoff),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
