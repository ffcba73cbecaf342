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

static void expect_cuts(const char *joined)
{
    static struct mb_class_table table;
    char text[256];
    char cut[512];
    size_t n = 0;
    size_t at = 0;

    mb_class_table_make(&table);
    for (const char *p = joined; *p != '\0'; p++) {
        if (*p != '|')
            text[n++] = *p;
    }
    for (const uint8_t *p = (const uint8_t *)text, *end = p + n, *next; p < end; p = next) {
        next = mb_split_next(&table, p, end);
        if (at > 0)
            cut[at++] = '|';
        memcpy(cut + at, p, (size_t)(next - p));
        at += (size_t)(next - p);
    }
    cut[at] = '\0';
    assert_string_equal(cut, joined);
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
    struct mb_tokenizer_options o = {.type = "SentencePieceTokenizer"};

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
        cmocka_unit_test(test_cuts),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_allocation_failures),
        cmocka_unit_test(test_null),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
