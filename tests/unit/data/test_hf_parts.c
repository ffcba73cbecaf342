/* The pieces of HuggingFaceTokenizer apart: normal form, added tokens, translated patterns, and
 * that every hand-made scanner cuts as PCRE2 does with the family's own pattern. Equality with the
 * peers is in tests/integration/data. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/added_tokens.h"
#include "worker/data/tokenizer/nfc.h"
#include "worker/data/tokenizer/split.h"
#include "worker/data/tokenizer/split_regex.h"
#include "worker/data/tokenizer/utf8.h"

/* ---- normal form; the rows are from NormalizationTest.txt of Unicode and UAX #15 ---- */

static void expect_nfc(const char *text, const char *want)
{
    struct mb_nfc *nfc;
    struct mb_nfc_work work = {0};
    struct mb_buf out = {0};

    assert_int_equal(mb_nfc_create(&nfc, NULL), 0);
    assert_int_equal(mb_nfc_append(nfc, &work, (const uint8_t *)text, strlen(text), &out), 0);
    assert_string_equal(mb_buf_str(&out), want);
    if (strcmp(text, want) != 0)
        assert_true(mb_nfc_first_change(nfc, (const uint8_t *)text, strlen(text)) < strlen(text));
    mb_buf_close(&out);
    mb_nfc_work_close(&work);
    mb_nfc_destroy(nfc);
}

static void test_nfc(void **state)
{
    (void)state;
    expect_nfc("", "");
    expect_nfc("plain", "plain");
    expect_nfc("e\u0301", "\u00e9");
    expect_nfc("xe\u0301\u0301y", "x\u00e9\u0301y");
    expect_nfc("\u1e0a\u0323", "\u1e0c\u0307"); /* reordered, then composed */
    expect_nfc("a\u0315\u0300\u05ae\u0300b", "\u00e0\u05ae\u0300\u0315b");
    expect_nfc("\u212b\u2126", "\u00c5\u03a9");   /* singletons */
    expect_nfc("\u0958", "\u0915\u093c");         /* excluded from composition */
    expect_nfc("\u1100\u1161\u11a8", "\uac01");   /* Hangul */
    expect_nfc("\uac00\u11a7", "\uac00\u11a7");   /* no trailing part */
    expect_nfc("\u0301a", "\u0301a");             /* begins with a mark */
    expect_nfc("a\xff\xcc\x81", "a\xff\xcc\x81"); /* a bad byte is a boundary */
    expect_nfc("\U0001d15e", "\U0001d157\U0001d165");
}

/* A long run of marks is ordered in linear time, equal classes keep their order. */
static void test_nfc_long_run(void **state)
{
    struct mb_nfc *nfc;
    struct mb_nfc_work work = {0};
    struct mb_buf text = {0}, out = {0};

    (void)state;
    assert_int_equal(mb_nfc_create(&nfc, NULL), 0);
    mb_buf_puts(&text, "q");
    for (int i = 0; i < 200000; i++)
        mb_buf_puts(&text, i % 2 ? "\u0316" : "\u0301");
    assert_int_equal(mb_nfc_append(nfc, &work, text.data, text.len, &out), 0);
    assert_int_equal(out.len, text.len);
    assert_memory_equal(out.data, "q\u0316\u0316", 5);
    assert_memory_equal(out.data + out.len - 2, "\u0301", 2);
    mb_buf_close(&text);
    mb_buf_close(&out);
    mb_nfc_work_close(&work);
    mb_nfc_destroy(nfc);
}

/* ---- added tokens ---- */

static void expect_matches(const struct mb_added_tokens *a, const char *text, const char *want)
{
    struct mb_added_search s = {.text = (const uint8_t *)text, .n = strlen(text)};
    struct mb_added_match m;
    struct mb_buf got = {0};

    while (mb_added_tokens_next(a, &s, &m))
        mb_buf_printf(&got, "%d:%zu-%zu ", (int)m.id, m.start, m.end);
    assert_string_equal(mb_buf_str(&got), want);
    mb_buf_close(&got);
}

static void test_added_tokens(void **state)
{
    const struct mb_added_token tokens[] = {
        {.text = "<s>", .n = 3, .id = 1},
        {.text = "<s><s>", .n = 6, .id = 2},
        {.text = "fox", .n = 3, .id = 3, .single_word = 1},
        {.text = "|", .n = 1, .id = 4, .lstrip = 1, .rstrip = 1},
        {.text = "<s", .n = 2, .id = 5},
    };
    struct mb_added_tokens *a;
    struct mb_err err;
    struct mb_added_token bad = {.text = "", .n = 0};

    (void)state;
    assert_int_equal(mb_added_tokens_create(tokens, 5, &a, NULL), 0);
    expect_matches(a, "", "");
    expect_matches(a, "a<s>b<s><s><", "1:1-4 2:5-11 ");
    expect_matches(a, "<s", "5:0-2 ");
    expect_matches(a, "fox foxy xfox fox_ fox.\u00e9fox", "3:0-3 3:19-22 ");
    expect_matches(a, "a \u3000| b|  |", "4:1-7 4:8-11 4:11-12 ");
    mb_added_tokens_destroy(a);
    assert_int_equal(mb_added_tokens_create(&bad, 1, &a, &err), MB_EUNSUPPORTED);
    assert_int_equal(mb_added_tokens_create(tokens, 0, &a, NULL), 0);
    expect_matches(a, "anything <s>", "");
    mb_added_tokens_destroy(a);
    for (unsigned long nth = 1;; nth++) {
        mb_alloc_fail_nth(nth);
        int rc = mb_added_tokens_create(tokens, 5, &a, &err);
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (rc == 0)
            mb_added_tokens_destroy(a);
        assert_int_equal(rc, failed ? MB_ENOMEM : 0);
        if (!failed)
            break;
    }
}

/* ---- patterns ---- */

static void expect_cuts(const char *pattern, const char *text, const char *want)
{
    struct mb_split_regex *r;
    struct mb_split_regex_work *w;
    struct mb_split_walk walk = {.text = (const uint8_t *)text, .n = strlen(text)};
    struct mb_buf got = {0};
    size_t start, end;
    int rc;

    assert_int_equal(mb_split_regex_create(pattern, strlen(pattern), &r, NULL), 0);
    assert_string_equal(mb_split_regex_pattern(r), pattern);
    assert_int_equal(mb_split_regex_work_create(&w, NULL), 0);
    while ((rc = mb_split_regex_next(r, w, &walk, &start, &end, NULL)) == 1)
        mb_buf_printf(&got, "%zu-%zu ", start, end);
    assert_int_equal(rc, 0);
    assert_string_equal(mb_buf_str(&got), want);
    mb_buf_close(&got);
    mb_split_regex_work_destroy(w);
    mb_split_regex_destroy(r);
}

static void test_patterns(void **state)
{
    (void)state;
    expect_cuts("a+", "aabaca", "0-2 3-4 5-6 ");
    expect_cuts("a*", "aab", "0-2 3-3 ");
    expect_cuts("\\h+", "12fg", "0-3 ");           /* hexadecimal digits */
    expect_cuts("\\s", "\u180ea\xc2\x85", "4-6 "); /* no longer a space since Unicode 6.3 */
    expect_cuts("x{2}+", "xxxxx", "0-4 ");         /* repeated, not possessive */
    expect_cuts("a{,2}b", "aaab", "1-4 ");
    expect_cuts("a$", "a\na\n", "0-1 2-3 ");
    expect_cuts("\\s+$", "bar\n", "3-4 ");
    expect_cuts("a{1, 2}", "aaa{1, 2}", "2-9 "); /* no interval */
    expect_cuts("(?m:a.b)|a.c", "a\nba\nc", "0-3 ");
    expect_cuts("\\bd", "d ed d", "0-1 5-6 ");
    expect_cuts("(?i:k)", "kK\u212a", "0-1 1-2 2-5 ");
    expect_cuts("\\p{Lo}", "\U00016d40", ""); /* Lm in Unicode 16 */
    expect_cuts("\\p{Lm}", "\U00016d40", "0-4 ");
}

static void test_refused_patterns(void **state)
{
    static const char *const patterns[] = {
        "(",       ")",     "[",         "[a",    "a{3,1}",      "*",           "\\",
        "\\p",     "\\p{",  "\\p{Nope}", "(?i)a", "\\1",         "(?<n>a)",     "[[:alpha:]]",
        "[a&&b]",  "\\X",   "\\R",       "\\K",   "a**",         "(?i:\u00df)", "(?i:SS)",
        "a{2}{3}", "a+{2}", "a{123456}", "[b-a]", "\\x{110000}", "\\u12",       "(?#x)",
        "(?x: a)", "\xff",  "[\\w-z]"};
    struct mb_split_regex *r;
    struct mb_err err;

    (void)state;
    for (size_t i = 0; i < sizeof(patterns) / sizeof(*patterns); i++) {
        int rc = mb_split_regex_create(patterns[i], strlen(patterns[i]), &r, &err);
        if (rc != MB_EINVAL && rc != MB_EUNSUPPORTED)
            fail_msg("%s: %d", patterns[i], rc);
        assert_non_null(strstr(err.text, "pattern"));
    }
}

/* A pattern that explodes is an error of the text, in bounded time. */
static void test_limits(void **state)
{
    struct mb_split_regex *r;
    struct mb_split_regex_work *w;
    struct mb_err err;
    size_t start, end;
    char text[64];

    (void)state;
    memset(text, 'a', sizeof(text));
    assert_int_equal(mb_split_regex_create("(a|a)*(?!a)[^a]", 15, &r, NULL), 0);
    assert_int_equal(mb_split_regex_work_create(&w, NULL), 0);
    struct mb_split_walk walk = {.text = (const uint8_t *)text, .n = sizeof(text)};
    assert_int_equal(mb_split_regex_next(r, w, &walk, &start, &end, &err), MB_EINVAL);
    assert_non_null(strstr(err.text, "limit"));
    mb_split_regex_work_destroy(w);
    mb_split_regex_destroy(r);
}

/* ---- scanners against PCRE2 ---- */

struct pair {
    struct mb_split *split;
    struct mb_split_regex *regex;
    struct mb_split_regex_work *work;
    const char *name;
};

/* tiktoken's engine takes $ for the end of the text and {1,3}+ for a possessive interval; in the
 * syntax of tokenizer.json they are the end of a line and a repeated interval. */
static void make_pair(enum mb_split_family family, struct pair *p)
{
    const char *pattern = mb_split_pattern(family);
    char copy[1024];
    char *dollar, *interval;

    snprintf(copy, sizeof(copy), "%s", pattern);
    dollar = strchr(copy, '$');
    if (dollar != NULL)
        snprintf(dollar, sizeof(copy) - (size_t)(dollar - copy), "\\z%s", strchr(pattern, '$') + 1);
    interval = strstr(copy, "{1,3}+");
    if (interval != NULL)
        memmove(interval + 5, interval + 6, strlen(interval + 6) + 1);
    p->name = mb_split_family_name(family);
    assert_int_equal(mb_split_create(family, NULL, &p->split, NULL), 0);
    assert_int_equal(mb_split_regex_create(copy, strlen(copy), &p->regex, NULL), 0);
    assert_int_equal(mb_split_regex_work_create(&p->work, NULL), 0);
}

static void compare(struct pair *p, const uint8_t *text, size_t n)
{
    struct mb_split_walk walk = {.text = text, .n = n};
    struct mb_err err;
    const uint8_t *at = text;

    while (at < text + n) {
        const uint8_t *next = mb_split_next(p->split, at, text + n);
        size_t start, end;
        int rc = mb_split_regex_next(p->regex, p->work, &walk, &start, &end, &err);

        if (rc != 1 || start != (size_t)(at - text) || end != (size_t)(next - text))
            fail_msg("%s: at byte %zu of \"%.*s\": scanner %zu-%zu, PCRE2 %zu-%zu", p->name,
                     (size_t)(at - text), (int)n, (const char *)text, (size_t)(at - text),
                     (size_t)(next - text), start, end);
        at = next;
    }
}

static void every_code_point(struct pair *p)
{
    static const char *const contexts[] = {"a%sb",  " %s",  "1%s2",     "'%ss",
                                           "\n %s", "A%sa", "\u0301%s'"};

    for (uint32_t c = 0; c < 0x110000; c++) {
        uint8_t bytes[5] = {0};
        char text[32];

        if (c == 0 || (c >= 0xd800 && c < 0xe000) || (c >= 0x40000 && c % 0x101 != 0))
            continue;
        mb_utf8_encode(c, bytes);
        for (size_t i = 0; i < sizeof(contexts) / sizeof(*contexts); i++) {
            int n = snprintf(text, sizeof(text), contexts[i], (const char *)bytes);
            compare(p, (const uint8_t *)text, (size_t)n);
        }
    }
}

static uint32_t random_point(uint64_t *seed)
{
    static const char often[] = "aAzZ09 '\t\n\r.,/!stmdrevlSTMDREVL  ";
    static const uint16_t wide[] = {0xe9,  0x17f,  0x212a, 0x301,  0x3000, 0x85,
                                    0xa0,  0x2028, 0x4e00, 0x1c5,  0x2b0,  0xaa,
                                    0x660, 0xb2,   0x2160, 0x180e, 0x200d};

    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    uint32_t r = (uint32_t)(*seed >> 33);
    if (r % 4 != 0)
        return (uint8_t)often[r / 4 % (sizeof(often) - 1)];
    if (r % 8 != 0)
        return wide[r / 8 % (sizeof(wide) / sizeof(*wide))];
    r = r / 8 % 0x30000;
    return r >= 0xd800 && r < 0xe000 ? 'x' : r;
}

static void random_strings(struct pair *p)
{
    uint64_t seed = 11;

    for (int i = 0; i < 60000; i++) {
        uint8_t text[200];
        size_t n = 0;
        for (int k = 0; k < 1 + i % 48; k++)
            n += mb_utf8_encode(random_point(&seed), text + n);
        compare(p, text, n);
    }
}

static void test_scanners(void **state)
{
    (void)state;
    for (int family = MB_SPLIT_GPT2; family < MB_SPLIT_WHOLE; family++) {
        struct pair p;
        make_pair((enum mb_split_family)family, &p);
        random_strings(&p);
        every_code_point(&p);
        mb_split_regex_work_destroy(p.work);
        mb_split_regex_destroy(p.regex);
        mb_split_destroy(p.split);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nfc),
        cmocka_unit_test(test_nfc_long_run),
        cmocka_unit_test(test_added_tokens),
        cmocka_unit_test(test_patterns),
        cmocka_unit_test(test_refused_patterns),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_scanners),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
