/* preprocess with the Null tokenizer: order over threads, rules for empty texts and eod, and that
 * no failure leaves a file behind or changes an earlier one. Bytes are compared with an independent
 * implementation in tests/integration/data. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <signal.h>
#include <zlib.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "worker/data/preprocess.h"
#include "worker/data/preprocess_private.h"
#include "worker/data/repr.h"

static char dir[64];
static char input[96];
static char gz_input[96];
static const char *inputs[1] = {input};
static char prefix[96];
static char text_prefix[128];

static int setup(void **state)
{
    (void)state;
    snprintf(dir, sizeof(dir), "/tmp/mobula-preprocess-XXXXXX");
    assert_non_null(mkdtemp(dir));
    snprintf(input, sizeof(input), "%s/in.jsonl", dir);
    snprintf(gz_input, sizeof(gz_input), "%s/in.jsonl.gz", dir);
    snprintf(prefix, sizeof(prefix), "%s/out", dir);
    snprintf(text_prefix, sizeof(text_prefix), "%s_text_document", prefix);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    return mb_fs_remove_tree(dir, NULL);
}

static void write_file(const char *path, const void *p, size_t n)
{
    assert_int_equal(mb_fs_write_atomic(path, p, n, 0644, NULL), 0);
}

static int count_outputs(void)
{
    DIR *d = opendir(dir);
    int n = 0;

    for (struct dirent *e; (e = readdir(d)) != NULL;)
        n += strncmp(e->d_name, "out", 3) == 0;
    closedir(d);
    return n;
}

static struct mb_preprocess_options options(void)
{
    return (struct mb_preprocess_options){
        .inputs = inputs,
        .n_inputs = 1,
        .output_prefix = prefix,
        .tokenizer = {.type = "NullTokenizer", .vocab_size = 100000},
        .append_eod = 1,
        .workers = 3,
    };
}

/* Lines {"text": "i i+1"}, enough for several chunks. */
static void make_lines(struct mb_buf *out, int n)
{
    for (int i = 0; i < n; i++) {
        int rc = mb_buf_printf(out, "{\"id\": \"%0200d\", \"text\": \"%d %d\"}\n", i, i, i + 1);
        assert_int_equal(rc, 0);
    }
}

static void expect_sequence(const struct mb_index *x, uint64_t seq, const int32_t *want, int32_t n)
{
    int32_t got[8];

    assert_int_equal(mb_index_length(x, seq), n);
    assert_int_equal(mb_index_read(x, seq, 0, (uint64_t)n, 0, got, NULL), 0);
    assert_memory_equal(got, want, (size_t)n * sizeof(*want));
}

static void test_order_and_memory(void **state)
{
    enum { N = 30000 };
    struct mb_preprocess_options o = options();
    struct mb_preprocess_progress total;
    struct mb_buf lines = {0};
    struct mb_index *x;
    struct mb_err err = {0};

    (void)state;
    make_lines(&lines, N);
    write_file(input, lines.data, lines.len);
    assert_int_equal(mb_preprocess_run(&o, &total, &err), 0);
    assert_int_equal(total.n_documents, N);
    assert_int_equal(total.n_tokens, 3 * N);
    assert_int_equal(total.json_chars, lines.len);
    assert_int_equal(count_outputs(), 2);
    assert_int_equal(mb_index_open(text_prefix, &x, &err), 0);
    assert_int_equal(mb_index_dtype(x), MB_INDEX_I32);
    for (int i = 0; i < N; i++)
        expect_sequence(x, (uint64_t)i, (int32_t[]){i, i + 1, 100000}, 3);
    mb_index_unref(x);
    mb_buf_close(&lines);
}

static void test_failure_changes_nothing(void **state)
{
    struct mb_preprocess_options o = options();
    struct mb_buf lines = {0};
    struct mb_index *x;
    struct mb_err err = {0};
    char want[160];

    (void)state;
    make_lines(&lines, 20000);
    assert_int_equal(mb_buf_puts(&lines, "{\"text\": \"5\"} {\n"), 0);
    make_lines(&lines, 20000);
    assert_int_equal(mb_buf_puts(&lines, "broken\n"), 0);
    write_file(input, lines.data, lines.len);
    assert_int_equal(mb_preprocess_run(&o, NULL, &err), MB_EINVAL);
    snprintf(want, sizeof(want), "%s:20001: ", input);
    assert_non_null(strstr(err.text, want));
    assert_int_equal(count_outputs(), 2);
    assert_int_equal(mb_index_open(text_prefix, &x, &err), 0);
    assert_int_equal(mb_index_n_documents(x), 30000); /* of the run before */
    mb_index_unref(x);
    mb_buf_close(&lines);
}

static void test_keys_lists_and_empty_texts(void **state)
{
    static const char lines[] = "{\"text\": [\"1 2\", \"3\"], \"title\": \"7\"}\n"
                                "{\"text\": [], \"title\": \"8\"}\n"
                                "{\"text\": \"4\", \"title\": []}";
    const char *const keys[] = {"text", "title"};
    struct mb_preprocess_options o = options();
    struct mb_index *x;
    char title[128];

    (void)state;
    o.json_keys = keys;
    o.n_json_keys = 2;
    o.tokenizer.vocab_size = 1000;
    write_file(input, lines, strlen(lines));
    assert_int_equal(mb_preprocess_run(&o, NULL, NULL), 0);
    assert_int_equal(count_outputs(), 4);
    assert_int_equal(mb_index_open(text_prefix, &x, NULL), 0);
    assert_int_equal(mb_index_dtype(x), MB_INDEX_U16);
    assert_int_equal(mb_index_n_documents(x), 3);
    assert_int_equal(mb_index_n_sequences(x), 3);
    assert_int_equal(mb_index_document_start(x, 1), 2);
    assert_int_equal(mb_index_document_start(x, 2), 2);
    expect_sequence(x, 0, (int32_t[]){1, 2}, 2);
    expect_sequence(x, 1, (int32_t[]){3, 1000}, 2);
    expect_sequence(x, 2, (int32_t[]){4, 1000}, 2);
    mb_index_unref(x);
    snprintf(title, sizeof(title), "%s_title_document", prefix);
    assert_int_equal(mb_index_open(title, &x, NULL), 0);
    assert_int_equal(mb_index_n_documents(x), 3);
    assert_int_equal(mb_index_n_sequences(x), 2);
    mb_index_unref(x);
}

static void write_gz(const struct mb_buf *lines)
{
    gzFile f = gzopen(gz_input, "wb");

    assert_int_equal(gzwrite(f, lines->data, (unsigned)lines->len), (int)lines->len);
    assert_int_equal(gzclose(f), Z_OK);
}

static void test_gzip(void **state)
{
    struct mb_preprocess_options o = options();
    struct mb_preprocess_progress total;
    struct mb_buf lines = {0};
    struct mb_buf packed = {0};
    struct mb_err err = {0};

    (void)state;
    o.inputs = (const char *const[]){gz_input};
    make_lines(&lines, 12000);
    write_gz(&lines);
    assert_int_equal(mb_preprocess_run(&o, &total, &err), 0);
    assert_int_equal(total.n_documents, 12000);
    assert_int_equal(mb_fs_read(gz_input, 1 << 30, &packed, NULL), 0);
    write_file(gz_input, packed.data, packed.len - 100);
    assert_int_equal(mb_preprocess_run(&o, &total, &err), MB_ECORRUPT);
    assert_non_null(strstr(err.text, "in.jsonl.gz:"));
    assert_non_null(strstr(err.text, "damaged or cut gzip"));
    write_file(gz_input, lines.data, lines.len);
    assert_int_equal(mb_preprocess_run(&o, &total, &err), MB_EINVAL);
    assert_non_null(strstr(err.text, "not gzip"));
    mb_buf_close(&lines);
    mb_buf_close(&packed);
}

static void expect_failure(const struct mb_preprocess_options *o, int code, const char *text)
{
    struct mb_err err = {0};
    int before = count_outputs();

    assert_int_equal(mb_preprocess_run(o, NULL, &err), code);
    if (strstr(err.text, text) == NULL)
        fail_msg("'%s' is not in: %s", text, err.text);
    assert_int_equal(count_outputs(), before);
}

/* Its neighbours, tokenized together with it, are not touched. */
static void test_one_text_that_is_no_ids(void **state)
{
    static const char lines[] = "{\"text\": \"1\"}\n{\"text\": \"2\"}\n{\"text\": [\"3\", \"x\"]}\n"
                                "{\"text\": \"4 5\"}\n{\"text\": 6}\n{\"text\": \"7\"}\n";
    struct mb_preprocess_options o = options();
    struct mb_index *x;

    (void)state;
    write_file(input, lines, strlen(lines));
    expect_failure(&o, MB_EINVAL, "in.jsonl:3: NullTokenizer: \"x\"");
    o.skip_bad_lines = 1;
    assert_int_equal(mb_preprocess_run(&o, NULL, NULL), 0);
    assert_int_equal(mb_index_open(text_prefix, &x, NULL), 0);
    assert_int_equal(mb_index_n_documents(x), 4);
    expect_sequence(x, 0, (int32_t[]){1, 100000}, 2);
    expect_sequence(x, 1, (int32_t[]){2, 100000}, 2);
    expect_sequence(x, 2, (int32_t[]){4, 5, 100000}, 3);
    expect_sequence(x, 3, (int32_t[]){7, 100000}, 2);
    mb_index_unref(x);
}

static int cancel_now(void *ctx)
{
    (void)ctx;
    return 1;
}

static void test_bad_input(void **state)
{
    static const char *const twice[] = {"text", "text"};
    struct mb_preprocess_options o = options();

    (void)state;
    write_file(input, "{\"text\": \"1 x\"}\n", 16);
    expect_failure(&o, MB_EINVAL, "in.jsonl:1: NullTokenizer: \"x\"");
    o.json_keys = twice;
    o.n_json_keys = 2;
    expect_failure(&o, MB_EINVAL, "text is given twice");
    o = options();
    o.workers = 0;
    expect_failure(&o, MB_EINVAL, "--workers 0");
    o = options();
    o.inputs = (const char *const[]){"/nonexistent.jsonl"};
    expect_failure(&o, MB_ENOENT, "--input /nonexistent.jsonl");
    o.inputs = (const char *const[]){dir};
    expect_failure(&o, MB_EINVAL, "is a directory");
    o = options();
    o.output_prefix = "/nonexistent/out";
    expect_failure(&o, MB_ENOENT, "--output-prefix /nonexistent/out");
    o = options();
    o.tokenizer = (struct mb_tokenizer_options){.vocab_file = "/nonexistent.json",
                                                .merge_file = "/nonexistent.txt"};
    expect_failure(&o, MB_ENOENT, "/nonexistent.json");
    o = options();
    o.cancelled_cb = cancel_now;
    expect_failure(&o, MB_ECANCELED, "cancelled");
}

/* A limit on file sizes makes writes fail as a full disk does, in the middle of the run. */
static void test_write_failure_leaves_nothing(void **state)
{
    struct mb_preprocess_options o = options();
    struct rlimit saved;
    struct rlimit small;
    struct mb_buf lines = {0};
    char other[128];

    (void)state;
    snprintf(other, sizeof(other), "%s/outfull", dir);
    o.output_prefix = other;
    make_lines(&lines, 30000);
    write_file(input, lines.data, lines.len);
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &saved), 0);
    small = saved;
    small.rlim_cur = 100000;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    expect_failure(&o, MB_EFULL, "outfull.preprocess/0.0.bin");
    expect_failure(&o, MB_EFULL, "no output file was changed");
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &saved), 0);
    mb_buf_close(&lines);
}

/* Whichever allocation fails, on whichever thread: MB_ENOMEM and nothing left; but when only
 * renames were missing, the whole files stay and the same call ends the work. */
static void test_allocation_failures(void **state)
{
    static const char lines[] = "{\"text\": \"1 2\"}\n{\"text\": [\"3\"]}\n";
    struct mb_preprocess_options o = options();
    char other[128], work[160];
    int n_kept = 0;

    (void)state;
    snprintf(other, sizeof(other), "%s/outsweep", dir);
    snprintf(work, sizeof(work), "%s.preprocess/journal", other);
    o.output_prefix = other;
    o.workers = 1;
    write_file(input, lines, strlen(lines));
    for (unsigned long n = 1;; n++) {
        int before = count_outputs();
        int rc;

        mb_alloc_fail_nth(n);
        rc = mb_preprocess_run(&o, NULL, NULL);
        if (!mb_alloc_did_fail()) {
            mb_alloc_fail_nth(0);
            assert_int_equal(rc, 0);
            break;
        }
        assert_int_equal(rc, MB_ENOMEM);
        if (count_outputs() == before)
            continue;
        mb_alloc_fail_nth(0);
        assert_int_equal(access(work, F_OK), 0);
        assert_int_equal(mb_preprocess_run(&o, NULL, NULL), 0);
        assert_int_not_equal(access(work, F_OK), 0);
        n_kept++;
    }
    assert_in_range(n_kept, 1, 50); /* the renames are the last few allocations */
}

static void test_repr(void **state)
{
    static const struct {
        double v;
        const char *text;
    } cases[] = {{101.28050670002645, "101.28050670002645"},
                 {1.258563987556778, "1.258563987556778"},
                 {0.1, "0.1"},
                 {1.0, "1.0"},
                 {100.0, "100.0"},
                 {0.0001, "0.0001"},
                 {0.00001234, "1.234e-05"},
                 {1e-7, "1e-07"},
                 {1e16, "1e+16"},
                 {1234567890123456.0, "1234567890123456.0"},
                 {-2.5, "-2.5"},
                 {0.0, "0.0"},
                 {1.7976931348623157e308, "1.7976931348623157e+308"}};
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        char out[32];
        assert_string_equal(mb_repr_double(cases[i].v, out), cases[i].text);
    }
}

static void test_lines_for_people(void **state)
{
    struct mb_preprocess_progress p = {.n_documents = 1234567,
                                       .n_tokens = 2000000000,
                                       .text_bytes = 8000000000,
                                       .elapsed_s = 40,
                                       .run_s = 20,
                                       .input_bytes_before = 1000,
                                       .input_bytes_done = 3000,
                                       .input_bytes_total = 10000};
    char out[MB_PREPROCESS_LINE_MAX];

    (void)state;
    assert_string_equal(mb_preprocess_bar_line(&p, 80, out),
                        " 30 % 1.23M docs, 30.9k docs/s, 200.0 MB/s, 50.0M tokens/s, ETA 1:10");
    mb_preprocess_bar_line(&p, 120, out);
    assert_non_null(strstr(out, "[###########............................] "));
    assert_true(strlen(out) < 120);
    assert_int_equal(strlen(mb_preprocess_bar_line(&p, 30, out)), 29);
    p.input_bytes_total = 0;
    assert_string_equal(mb_preprocess_bar_line(&p, 200, out),
                        "1.23M docs, 30.9k docs/s, 200.0 MB/s, 50.0M tokens/s, ETA ?");
    p.n_bad_lines = 2;
    p.n_repaired_lines = 3;
    assert_string_equal(mb_preprocess_total_line(&p, out),
                        "Done: 1234567 documents, 2000000000 tokens, 8000.0 MB of text in 40.00 s "
                        "(30864.2 docs/s, 200.0 MB/s, 50000000 tokens/s), 2 bad lines skipped, 3 "
                        "lines were no UTF-8");
    p = (struct mb_preprocess_progress){0};
    mb_preprocess_bar_line(&p, 200, out);
    mb_preprocess_total_line(&p, out);
    assert_null(strstr(out, "nan"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order_and_memory),
        cmocka_unit_test(test_failure_changes_nothing),
        cmocka_unit_test(test_keys_lists_and_empty_texts),
        cmocka_unit_test(test_gzip),
        cmocka_unit_test(test_bad_input),
        cmocka_unit_test(test_one_text_that_is_no_ids),
        cmocka_unit_test(test_write_failure_leaves_nothing),
        cmocka_unit_test(test_allocation_failures),
        cmocka_unit_test(test_repr),
        cmocka_unit_test(test_lines_for_people),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
