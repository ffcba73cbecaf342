/* The scanner's cuts, merges by rank, a vocabulary with holes, bad files, the Null tokenizer.
 * Equality with tiktoken on the real vocabulary is in tests/integration/data. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "worker/data/tokenizer/split.h"
#include "worker/data/tokenizer/tokenizer.h"

static char dir[64];
static char vocab[96];
static char merges[96];

static void write_file(const char *path, const char *text)
{
    assert_int_equal(mb_fs_write_atomic(path, text, strlen(text), 0644, NULL), 0);
}

static int setup(void **state)
{
    (void)state;
    snprintf(dir, sizeof(dir), "/tmp/mobula-tokenizer-XXXXXX");
    assert_non_null(mkdtemp(dir));
    snprintf(vocab, sizeof(vocab), "%s/vocab.json", dir);
    snprintf(merges, sizeof(merges), "%s/merges.txt", dir);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    return mb_fs_remove_tree(dir, NULL);
}

/* "abc" can only be reached over "bc": ranks bc, ab, a+bc; "bcd" is merged but not listed. */
static void write_small(void)
{
    write_file(vocab,
               "{\"!\": 0, \"a\": 1, \"b\": 2, \"c\": 3, \"\\u0120\": 4, \"bc\": 5, \"ab\": 6, "
               "\"abc\": 7, \"<|endoftext|>\": 8}");
    write_file(merges, "#version: 0.2\nb c\na b\na bc\nbc d\n");
}

static int create(struct mb_tokenizer **out, struct mb_err *err)
{
    struct mb_tokenizer_options o = {.vocab_file = vocab, .merge_file = merges};
    return mb_tokenizer_create(&o, out, err);
}

static void expect_ids(const char *text, const int32_t *want, size_t n)
{
    struct mb_tokenizer *t;
    struct mb_tokenizer_scratch *s;
    struct mb_ids ids = {0};

    assert_int_equal(create(&t, NULL), 0);
    assert_int_equal(mb_tokenizer_scratch_create(t, &s, NULL), 0);
    for (int round = 0; round < 2; round++) { /* the second time from the cache */
        ids.n = 0;
        assert_int_equal(mb_tokenizer_encode(t, s, text, strlen(text), &ids, NULL), 0);
        assert_int_equal(ids.n, n);
        assert_memory_equal(ids.data, want, n * sizeof(*want));
    }
    mb_ids_close(&ids);
    mb_tokenizer_scratch_destroy(s);
    mb_tokenizer_destroy(t);
}

static void test_merges_by_rank(void **state)
{
    (void)state;
    write_small();
    expect_ids("abc", (int32_t[]){7}, 1);
    expect_ids("ab abcab", (int32_t[]){6, 4, 7, 6}, 4);
    expect_ids("bcd", (int32_t[]){0}, 1); /* merged, but the vocabulary does not list it: 0 */
    expect_ids("z", (int32_t[]){0}, 1);   /* a byte that it does not list */
    expect_ids("<|endoftext|>a", (int32_t[]){0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}, 14);
    expect_ids("", NULL, 0);
}

static void test_long_piece_equals_short_ones(void **state)
{
    enum { N = 4000 };
    char text[3 * N + 1];
    int32_t want[N];

    (void)state;
    write_small();
    for (int i = 0; i < N; i++) {
        memcpy(text + 3 * i, "abc", 3);
        want[i] = 7;
    }
    text[3 * (size_t)N] = '\0';
    expect_ids(text, want, N);
}

enum { MANY = 300, MANY_BYTES = 120 };

/* Words over three letters, so that some are seen again, waiting or in the cache. */
static size_t draw_text(uint8_t *out, uint32_t *seed)
{
    size_t n = (*seed = *seed * 1664525 + 1013904223) >> 16 & 127;

    n = n > MANY_BYTES ? 0 : n;
    for (size_t i = 0; i < n; i++) {
        *seed = *seed * 1664525 + 1013904223;
        out[i] = (uint8_t) "abcabcabc "[(*seed >> 16) % 10];
    }
    return n;
}

/* Texts whose pieces wait for each other, so many that not all can wait to the end. */
static void test_many_equal_one_by_one(void **state)
{
    static uint8_t bytes[MANY][MANY_BYTES];
    struct mb_tokenizer_text texts[MANY];
    struct mb_tokenizer *t;
    struct mb_tokenizer_scratch *s;
    struct mb_ids many = {0}, one = {0};
    size_t ends[MANY], at = 3;
    uint32_t seed = 5;

    (void)state;
    write_small();
    assert_int_equal(create(&t, NULL), 0);
    assert_int_equal(mb_tokenizer_scratch_create(t, &s, NULL), 0);
    assert_int_equal(mb_tokenizer_encode(t, s, "c c", 3, &many, NULL), 0);
    for (size_t i = 0; i < MANY; i++)
        texts[i] = (struct mb_tokenizer_text){bytes[i], draw_text(bytes[i], &seed)};
    assert_int_equal(mb_tokenizer_encode_many(t, s, texts, MANY, ends, &many, NULL), 0);
    assert_int_equal(ends[MANY - 1], many.n);
    mb_tokenizer_scratch_destroy(s);
    assert_int_equal(mb_tokenizer_scratch_create(t, &s, NULL), 0);
    for (size_t i = 0; i < MANY; at = ends[i++]) {
        one.n = 0;
        assert_int_equal(mb_tokenizer_encode(t, s, texts[i].text, texts[i].n, &one, NULL), 0);
        assert_int_equal(ends[i] - at, one.n);
        if (one.n > 0)
            assert_memory_equal(many.data + at, one.data, one.n * sizeof(*one.data));
    }
    mb_ids_close(&many);
    mb_ids_close(&one);
    mb_tokenizer_scratch_destroy(s);
    mb_tokenizer_destroy(t);
}

static void expect_family_cuts(enum mb_split_family family, const char *joined)
{
    struct mb_split *split;
    char text[256];
    char cut[512];
    size_t n = 0;
    size_t at = 0;

    assert_int_equal(mb_split_create(family, NULL, &split, NULL), 0);
    for (const char *p = joined; *p != '\0'; p++) {
        if (*p != '|')
            text[n++] = *p;
    }
    for (const uint8_t *p = (const uint8_t *)text, *end = p + n, *next; p < end; p = next) {
        next = mb_split_next(split, p, end);
        if (at > 0)
            cut[at++] = '|';
        memcpy(cut + at, p, (size_t)(next - p));
        at += (size_t)(next - p);
    }
    cut[at] = '\0';
    mb_split_destroy(split);
    assert_string_equal(cut, joined);
}

static void expect_cuts(const char *joined)
{
    expect_family_cuts(MB_SPLIT_GPT2, joined);
}

static void test_cuts(void **state)
{
    (void)state;
    expect_cuts("Hello| world|,| it|'s| we|'ll| don|'t|!");
    expect_cuts("'ve|'re|'d|'m|'| x|'|l|'|l|'|S");
    expect_cuts("a|  | b|\n\n|\n|c|   ");
    expect_cuts("x|\t|1|a|2| 3\xc2\xbd");
    expect_cuts(" \xd0\xb4\xd0\xb0|\xe3\x80\x82|\xe3\x80\x80|\xe6\xbc\xa2|\xc2\xa0|x");
    expect_cuts("a|\xff\xfe|b|\xed\xa0\x80|c|\xf0\x9f|d"); /* no UTF-8: others */
    expect_cuts("");
}

static void test_cuts_of_words(void **state)
{
    static const enum mb_split_family words[] = {MB_SPLIT_LLAMA3, MB_SPLIT_CL100K, MB_SPLIT_QWEN2};

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        expect_family_cuts(words[i], "Hello| world|,| it|'S| we|'lL| don|'t|!");
        expect_family_cuts(words[i], "x|'\xc5\xbf|x|'x|'ve|y|''|s|(abc|((|abc|\tq| (|q");
        expect_family_cuts(words[i], "a| | b|.\n\n| | x|.\n| \n| x| \t \n\t\n| | -");
        expect_family_cuts(words[i], "a|  | |1|\xe3\x80\x80|\xe3\x80\x80x|\r\n|x");
        expect_family_cuts(words[i], "\xe0\xa4\x95|\xe0\xa4\xbe\xe0\xa4\x95|  "); /* a mark */
    }
    expect_family_cuts(MB_SPLIT_LLAMA3, "123|456|7\xc2\xbd|ab| \n|  ");
    expect_family_cuts(MB_SPLIT_CL100K, "123|456|7\xc2\xbd|ab| \n  ");
    expect_family_cuts(MB_SPLIT_QWEN2, "1|2|3|\xc2\xbd|ab| |2");
    expect_family_cuts(MB_SPLIT_TIKTOKEN_V1, "1|2|a|'s|\n|x");
}

static void test_cuts_of_cased(void **state)
{
    (void)state;
    expect_family_cuts(MB_SPLIT_O200K, "Hello|World|HELLO|123|4| HELLOworld's| it's|/a|.\n/");
    expect_family_cuts(MB_SPLIT_O200K, "AB\xe4\xb8\xad|DEAB| \xcc\x81|AB|\n|x");
    expect_family_cuts(MB_SPLIT_O200K, "x'\xc5\xbf|y'LL|y|'l|'l");
    expect_family_cuts(MB_SPLIT_TIKTOKEN_V2, "Hello|World|'s|1|2| x");
    expect_family_cuts(MB_SPLIT_WHOLE, "a b c");
}

static void test_patterns(void **state)
{
    (void)state;
    for (int i = MB_SPLIT_GPT2; i < MB_SPLIT_WHOLE; i++) {
        enum mb_split_family family;

        assert_true(mb_split_recognise(mb_split_pattern((enum mb_split_family)i), &family));
        assert_int_equal(family, i);
    }
}

static void expect_failure(int code, const char *text)
{
    struct mb_tokenizer *t;
    struct mb_err err = {0};

    assert_int_equal(create(&t, &err), code);
    if (strstr(err.text, text) == NULL)
        fail_msg("'%s' is not in: %s", text, err.text);
}

static void test_bad_files(void **state)
{
    struct mb_tokenizer *t;
    struct mb_err err = {0};
    struct mb_tokenizer_options o = {.type = "BertWordPieceCase"};

    (void)state;
    assert_int_equal(mb_tokenizer_create(&o, &t, &err), MB_EINVAL);
    assert_non_null(strstr(err.text, "choose from"));
    o.type = NULL;
    assert_int_equal(mb_tokenizer_create(&o, &t, &err), MB_EINVAL);
    assert_non_null(strstr(err.text, "--vocab-file"));
    write_small();
    remove(merges);
    expect_failure(MB_ENOENT, "merges.txt");
    write_file(merges, "#version\nb c d\nx y\n");
    expect_failure(MB_ECORRUPT, "merges.txt:2");
    write_file(merges, "");
    expect_failure(MB_ECORRUPT, "merges.txt");
    write_file(vocab, "{\"a\": 0, \"b\": 0, \"<|endoftext|>\": 2}");
    expect_failure(MB_ECORRUPT, "entry \"b\"");
    write_file(vocab, "{\"a\": 0, \"b\": 7}");
    expect_failure(MB_ECORRUPT, "entry \"b\"");
    write_file(vocab, "{\"a\": 0, \"a\": 1, \"<|endoftext|>\": 2}");
    expect_failure(MB_ECORRUPT, "\"a\" is given twice");
    write_file(vocab, "{\"a\": 0, \"<|endoftext|>\": 1} x");
    expect_failure(MB_ECORRUPT, "the end of the text");
    write_file(vocab, "{\"a\": 0}");
    expect_failure(MB_ECORRUPT, "no <|endoftext|>");
    write_file(vocab, "[1, 2]");
    expect_failure(MB_ECORRUPT, "not a JSON object");
    write_file(vocab, "{\"a\": 0,\n");
    expect_failure(MB_ECORRUPT, "vocab.json:");
    remove(vocab);
    expect_failure(MB_ENOENT, "--vocab-file");
}

static void test_allocation_failures(void **state)
{
    (void)state;
    write_small();
    for (unsigned long n = 1;; n++) {
        struct mb_tokenizer *t = NULL;
        struct mb_tokenizer_scratch *s = NULL;
        struct mb_ids ids = {0};
        int rc;

        mb_alloc_fail_nth(n);
        rc = create(&t, NULL);
        if (rc == 0)
            rc = mb_tokenizer_scratch_create(t, &s, NULL);
        if (rc == 0)
            rc = mb_tokenizer_encode(t, s, "abcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabc",
                                     54, &ids, NULL);
        mb_ids_close(&ids);
        mb_tokenizer_scratch_destroy(s);
        mb_tokenizer_destroy(t);
        if (!mb_alloc_did_fail()) {
            mb_alloc_fail_nth(0);
            assert_int_equal(rc, 0);
            break;
        }
        assert_int_equal(rc, MB_ENOMEM);
    }
}

static void test_null(void **state)
{
    struct mb_tokenizer_options o = {.type = "NullTokenizer", .vocab_size = 100};
    struct mb_tokenizer *t;
    struct mb_tokenizer_scratch *s;
    struct mb_ids ids = {0};
    struct mb_buf text = {0};
    struct mb_err err = {0};

    (void)state;
    assert_int_equal(mb_tokenizer_create(&o, &t, NULL), 0);
    assert_int_equal(mb_tokenizer_scratch_create(t, &s, NULL), 0);
    assert_int_equal(mb_tokenizer_vocab_size(t), 101);
    assert_int_equal(mb_tokenizer_eod(t), 100);
    assert_int_equal(mb_tokenizer_encode(t, s, "7 0 100", 7, &ids, &err), 0);
    assert_int_equal(ids.n, 3);
    assert_int_equal(mb_tokenizer_decode(t, ids.data, ids.n, &text, &err), 0);
    assert_string_equal(mb_buf_str(&text), "7 0 100");
    assert_int_equal(mb_tokenizer_encode(t, s, "7  8", 4, &ids, &err), MB_EINVAL);
    assert_int_equal(mb_tokenizer_encode(t, s, "101", 3, &ids, &err), MB_EINVAL);
    assert_non_null(strstr(err.text, "\"101\""));
    assert_int_equal(ids.n, 3);
    mb_buf_close(&text);
    mb_ids_close(&ids);
    mb_tokenizer_scratch_destroy(s);
    mb_tokenizer_destroy(t);
    o.vocab_size = 0;
    assert_int_equal(mb_tokenizer_create(&o, &t, &err), MB_EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_merges_by_rank),
        cmocka_unit_test(test_long_piece_equals_short_ones),
        cmocka_unit_test(test_many_equal_one_by_one),
        cmocka_unit_test(test_cuts),
        cmocka_unit_test(test_cuts_of_words),
        cmocka_unit_test(test_cuts_of_cased),
        cmocka_unit_test(test_patterns),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_allocation_failures),
        cmocka_unit_test(test_null),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
