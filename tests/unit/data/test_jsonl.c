/* JSON lines: what json.loads accepts is read, what it refuses is named with its byte. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"
#include "worker/data/jsonl.h"
#include "worker/data/jsonl_copy.h"
#include "worker/data/jsonl_utf8.h"

static const char *const keys[] = {"text", "title"};

/* Texts of both keys joined as "a|b;c"; the line is copied to its exact size for the sanitizer. */
static int parse(const char *line, size_t n, char *joined, struct mb_err *err)
{
    struct mb_jsonl *j;
    uint8_t *copy = mb_alloc(n);
    int rc = mb_jsonl_create(keys, 2, &j, err);

    assert_int_equal(rc, 0);
    memcpy(copy, line, n);
    rc = mb_jsonl_parse(j, copy, n, err);
    joined[0] = '\0';
    for (size_t k = 0; rc == 0 && k < 2; k++) {
        if (k > 0)
            strcat(joined, ";");
        for (size_t i = 0; i < mb_jsonl_n_texts(j, k); i++) {
            size_t length;
            const uint8_t *text = mb_jsonl_text(j, k, i, &length);
            if (i > 0)
                strcat(joined, "|");
            strncat(joined, (const char *)text, length);
        }
    }
    mb_free(copy);
    mb_jsonl_destroy(j);
    return rc;
}

static void expect(const char *line, const char *want)
{
    char joined[512];
    struct mb_err err = {0};

    if (parse(line, strlen(line), joined, &err) != 0)
        fail_msg("%s: %s", line, err.text);
    assert_string_equal(joined, want);
}

static void refuse(const char *line, const char *text)
{
    char joined[512];
    struct mb_err err = {0};

    assert_int_equal(parse(line, strlen(line), joined, &err), MB_EINVAL);
    if (strstr(err.text, text) == NULL)
        fail_msg("'%s' is not in: %s", text, err.text);
}

static void test_reads(void **state)
{
    (void)state;
    expect("{\"text\": \"a\", \"title\": \"b\"}\n", "a;b");
    expect(" { \"title\" :\t\"b\" , \"text\":\"\" } \r\n", ";b");
    expect("{\"x\": {\"text\": \"no\"}, \"text\": [\"a\", \"\", \"c\"], \"title\": []}", "a||c;");
    expect("{\"text\":\"1\",\"title\":\"2\",\"text\":\"3\"}", "3;2");
    expect("{\"text\":[\"1\",\"2\"],\"title\":\"2\",\"text\":\"3\"}", "3;2");
    expect("{\"te\\u0078t\":\"a\",\"title\":\"\"}", "a;");
    expect("{\"n\": [-0.5e+3, 0, 1E9, NaN, -Infinity, Infinity, true, false, null, {}, [], [[{}]]],"
           "\"text\":\"a\",\"title\":\"\"}",
           "a;");
    expect("{\"text\":\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\\u20ac\\ud83d\\ude42\",\"title\":\"\"}",
           "\"\\/\b\f\n\r\t\xc3\xa9\xe2\x82\xac\xf0\x9f\x99\x82;");
    expect("{\"text\":\"a long text, with \\n an escape after more than eight bytes \xc3\xa9\","
           "\"title\":\"\x7f\"}",
           "a long text, with \n an escape after more than eight bytes \xc3\xa9;\x7f");
}

static void test_refuses(void **state)
{
    (void)state;
    refuse("", "an empty line");
    refuse("  \n", "an empty line");
    refuse("[1]", "'{' was expected at byte 1");
    refuse("{\"text\": \"a\"", "',' or '}' was expected at byte 13");
    refuse("{\"text\": \"a\n\"}", "a control character");
    refuse("{\"text\": \"abcdefghijkl\x1fmnop\"}",
           "a control character in a string must be escaped: "
           "at byte 23");
    refuse("{\"text\": \"a", "the end of a string was expected");
    refuse("{\"text\": \"a\\", "the end of a string was expected");
    refuse("{\"text\": \"\\x\"}", "a known escape was expected at byte 11");
    refuse("{\"text\": \"\\u12g4\"}", "four hex digits");
    refuse("{\"text\": \"\\u12", "four hex digits");
    refuse("{\"text\": \"\\ud83d\"}", "half of a surrogate pair");
    refuse("{\"text\": \"\\ud83d\\u0041\"}", "half of a surrogate pair");
    refuse("{\"text\": \"\\ude42\"}", "half of a surrogate pair");
    refuse("{\"text\" \"a\"}", "':' was expected");
    refuse("{text: 1}", "a string was expected");
    refuse("{\"text\": 'a'}", "a value was expected");
    refuse("{\"a\": 01}", "',' or '}' was expected");
    refuse("{\"a\": 1.}", "digits after its point");
    refuse("{\"a\": 1e}", "digits in its exponent");
    refuse("{\"a\": -}", "a value was expected");
    refuse("{\"a\": [1,]}", "a value was expected");
    refuse("{\"a\": [1}", "',' or ']' was expected");
    refuse("{\"a\": 1,}", "a string was expected");
    refuse("{\"a\": }", "a value was expected");
    refuse("{\"a\":", "a value was expected");
    refuse("{\"text\":\"a\",\"title\":\"b\"} x", "the end of the line was expected at byte 26");
    refuse("{\"title\": \"b\"}", "no key \"text\"");
    refuse("{\"text\": 5, \"title\": \"b\"}", "key \"text\" holds neither");
    refuse("{\"text\": [\"a\", 5], \"title\": \"b\"}", "key \"text\" holds neither");
    refuse("{\"text\": [\"a\", 5, \"title\": \"b\"}", "',' or ']' was expected");
    refuse("{\"text\": \"\xff\"}", "not UTF-8: byte 0xff at byte 11");
    refuse("{\"text\": \"\xed\xa0\x80\"}", "not UTF-8");
    refuse("{\"text\": \"\xc0\xaf\"}", "not UTF-8");
    refuse("{\"text\": \"\xf4\x90\x80\x80\"}", "not UTF-8");
    refuse("\xef\xbb\xbf{}", "'{' was expected");
}

static void test_depth_is_bounded(void **state)
{
    char line[4096];
    size_t n = 0;

    (void)state;
    n += (size_t)sprintf(line, "{\"a\": ");
    memset(line + n, '[', MB_JSONL_MAX_DEPTH);
    memset(line + n + MB_JSONL_MAX_DEPTH, ']', MB_JSONL_MAX_DEPTH);
    n += 2 * MB_JSONL_MAX_DEPTH;
    strcpy(line + n, ", \"text\": \"x\", \"title\": \"\"}");
    /* The innermost list is empty, so it is never on the stack. */
    expect(line, "x;");
    memset(line + 6, '[', MB_JSONL_MAX_DEPTH + 2);
    refuse(line, "too deep nesting");
}

static void test_allocation_failures(void **state)
{
    static const char line[] = "{\"text\": [\"a\\u00e9\", \"b\"], \"title\": \"c\"}";

    (void)state;
    for (unsigned long n = 1;; n++) {
        struct mb_jsonl *j = NULL;
        int rc;

        mb_alloc_fail_nth(n);
        rc = mb_jsonl_create(keys, 2, &j, NULL);
        if (rc == 0)
            rc = mb_jsonl_parse(j, (const uint8_t *)line, strlen(line), NULL);
        mb_jsonl_destroy(j);
        if (!mb_alloc_did_fail()) {
            mb_alloc_fail_nth(0);
            assert_int_equal(rc, 0);
            break;
        }
        assert_int_equal(rc, MB_ENOMEM);
    }
}

static uint32_t draw(uint32_t *seed, uint32_t n)
{
    *seed = *seed * 1664525 + 1013904223;
    return (*seed >> 12) % n;
}

/* Characters at the limits of their forms, some cut or with a byte changed, at all places of a
 * vector. */
static void test_utf8_in_vectors(void **state)
{
    static const char *const bits[] = {"a",
                                       "plain text of some words ",
                                       "\xc2\x80",
                                       "\xdf\xbf",
                                       "\xe0\xa0\x80",
                                       "\xed\x9f\xbf",
                                       "\xee\x80\x80",
                                       "\xef\xbf\xbf",
                                       "\xf0\x90\x80\x80",
                                       "\xf4\x8f\xbf\xbf",
                                       "\xc1\xbf",
                                       "\xe0\x9f\xbf",
                                       "\xed\xa0\x80",
                                       "\xf0\x8f\xbf\xbf",
                                       "\xf4\x90\x80\x80",
                                       "\xf5",
                                       "\x80",
                                       "\xe2\x82",
                                       "\xf0\x9f\x99",
                                       "\xff"};
    enum { N_BITS = sizeof(bits) / sizeof(*bits), N_GOOD = 10, ROUNDS = 200000 };
    uint32_t seed = 3;
    unsigned n_good = 0;

    (void)state;
    if (mb_jsonl_utf8_best() == MB_JSONL_UTF8_NONE) {
        print_message("this processor has no AVX2\n");
        skip();
    }
    for (int round = 0; round < ROUNDS; round++) {
        uint8_t *text = mb_alloc(320); /* of the exact size below, for the sanitizer */
        uint8_t *exact;
        size_t n = 0;
        int is_good;

        for (uint32_t want = draw(&seed, draw(&seed, 8) == 0 ? 280 : 100); n < want;) {
            const char *bit = bits[draw(&seed, draw(&seed, 40) == 0 ? N_BITS : N_GOOD)];
            memcpy(text + n, bit, strlen(bit));
            n += strlen(bit);
        }
        n -= n > 0 && draw(&seed, 16) == 0;
        if (n > 0 && draw(&seed, 16) == 0)
            text[draw(&seed, (uint32_t)n)] ^= (uint8_t)(1 << draw(&seed, 8));
        exact = mb_alloc(n + 1) + 1;
        memcpy(exact, text, n);
        is_good = mb_utf8_valid(exact, n);
        for (int kernel = MB_JSONL_UTF8_AVX2; kernel <= (int)mb_jsonl_utf8_best(); kernel++) {
            uint64_t n_tails = 0;

            assert_int_equal(mb_jsonl_utf8((enum mb_jsonl_utf8_kernel)kernel, exact, n, &n_tails),
                             is_good);
            if (is_good)
                assert_int_equal(n - n_tails, mb_utf8_count(exact, n));
        }
        n_good += (unsigned)is_good;
        mb_free(exact - 1);
        mb_free(text);
    }
    assert_in_range(n_good, ROUNDS / 4, ROUNDS / 10 * 9);
}

typedef const uint8_t *copy_fn(const uint8_t *p, const uint8_t *end, uint8_t **to);

/* What a copy makes of n bytes with escapes of two bytes in them, and where it must stop. */
static size_t unescape(copy_fn *copy, const uint8_t *p, size_t n, uint8_t *out, size_t *n_out)
{
    const uint8_t *end = p + n;
    const uint8_t *at = p;
    uint8_t *to = out;

    for (;;) {
        at = copy(at, end, &to);
        if (end - at < 2 || *at != '\\' || mb_jsonl_escaped(at[1]) == 0)
            break;
        *to++ = mb_jsonl_escaped(at[1]);
        at += 2;
    }
    *n_out = (size_t)(to - out);
    return (size_t)(at - p);
}

/* Runs of backslashes, escapes, quotes and control characters at all places of a vector. */
static void test_copies_alike(void **state)
{
    static const char *const bits[] = {"\\\\",     "\\n",      "\\\"", "plain text of some words ",
                                       "a",        "\xc3\xa9", "\\/",  "\\t",
                                       "\\\\\\\\", "\\",       "\"",   "\x1f",
                                       "\\u0041",  "\\x"};
    enum { N_BITS = sizeof(bits) / sizeof(*bits), N_GOOD = 9, ROUNDS = 100000 };
    uint32_t seed = 5;
    size_t n_whole = 0;

    (void)state;
    if (!mb_jsonl_has_wide()) {
        print_message("this processor has no AVX-512 VBMI2\n");
        skip();
    }
    for (int round = 0; round < ROUNDS; round++) {
        uint8_t *text = mb_alloc(320);
        uint8_t out[2][320 + MB_JSONL_COPY_SLACK];
        uint8_t *exact;
        size_t n = 0, n_out[2], stop;

        for (uint32_t want = draw(&seed, 280); n < want;) {
            const char *bit = bits[draw(&seed, draw(&seed, 100) == 0 ? N_BITS : N_GOOD)];
            memcpy(text + n, bit, strlen(bit));
            n += strlen(bit);
        }
        exact = mb_alloc(n + 1) + 1;
        memcpy(exact, text, n);
        stop = unescape(mb_jsonl_copy_plain, exact, n, out[0], &n_out[0]);
        assert_int_equal(unescape(mb_jsonl_copy_wide, exact, n, out[1], &n_out[1]), stop);
        assert_int_equal(n_out[0], n_out[1]);
        assert_memory_equal(out[0], out[1], n_out[0]);
        n_whole += stop == n;
        mb_free(exact - 1);
        mb_free(text);
    }
    assert_in_range(n_whole, ROUNDS / 4, ROUNDS / 20 * 19);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_utf8_in_vectors),
        cmocka_unit_test(test_copies_alike),
        cmocka_unit_test(test_reads),
        cmocka_unit_test(test_refuses),
        cmocka_unit_test(test_depth_is_bounded),
        cmocka_unit_test(test_allocation_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
