/* cli/log_view.h: what reaches stdout must not depend on how the bytes were cut. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/str.h"
#include "cli/log_view.h"

static struct mb_err err;
static FILE *out;
static int real_stdout;

static int set_up(void **state)
{
    (void)state;
    fflush(stdout);
    out = tmpfile();
    real_stdout = dup(STDOUT_FILENO);
    return out == NULL || real_stdout < 0 || dup2(fileno(out), STDOUT_FILENO) < 0;
}

static int tear_down(void **state)
{
    (void)state;
    fflush(stdout);
    if (dup2(real_stdout, STDOUT_FILENO) < 0)
        return 1;
    close(real_stdout);
    return fclose(out);
}

/* Everything since the last call. */
static const char *printed(void)
{
    static char text[4096];
    ssize_t n = pread(fileno(out), text, sizeof(text) - 1, 0);

    assert_true(n >= 0);
    text[n] = '\0';
    assert_int_equal(ftruncate(fileno(out), 0), 0);
    rewind(out);
    lseek(STDOUT_FILENO, 0, SEEK_SET);
    return text;
}

static void show_cut(const struct mb_log_view *v, int64_t rank, const char *text, size_t step)
{
    struct mb_log_lines l = {.view = v, .rank = rank};
    size_t n = strlen(text);

    for (size_t i = 0; i < n; i += step)
        assert_int_equal(mb_log_lines_add(&l, text + i, n - i < step ? n - i : step, &err), 0);
    assert_int_equal(mb_log_lines_end(&l, &err), 0);
}

static void test_any_cut(void **state)
{
    static const char text[] = "loss 1\nother\n\nloss 2 \xff\nlast loss";
    struct mb_log_view plain, grep, tagged, json;

    (void)state;
    assert_int_equal(mb_log_view_init(&plain, NULL, &err), 0);
    assert_int_equal(mb_log_view_init(&grep, "^loss|last", &err), 0);
    assert_int_equal(mb_log_view_init(&tagged, NULL, &err), 0);
    assert_int_equal(mb_log_view_init(&json, "2", &err), 0);
    tagged.tag_ranks = 1;
    json.json = 1;
    for (size_t step = 1; step <= sizeof(text); step++) {
        show_cut(&plain, -1, text, step);
        assert_string_equal(printed(), text);
        show_cut(&grep, -1, text, step);
        assert_string_equal(printed(), "loss 1\nloss 2 \xff\nlast loss\n");
        show_cut(&tagged, 3, "a\nb", step);
        assert_string_equal(printed(), "[rank 3] a\n[rank 3] b\n");
        show_cut(&json, 7, text, step);
        assert_string_equal(printed(), "{\"rank\":7,\"line\":\"loss 2 \xef\xbf\xbd\"}\n");
        show_cut(&json, -1, "2\n", step);
        assert_string_equal(printed(), "{\"rank\":null,\"line\":\"2\"}\n");
    }
    mb_log_view_close(&grep);
    mb_log_view_close(&json);
}

/* One letter, then 700,000 of two bytes: the bound of a piece lies inside a character. */
static void test_a_line_beyond_the_bound(void **state)
{
    enum { N_CHARS = 700 * 1000, N = 1 + 2 * N_CHARS };
    static const size_t steps[] = {1000, 4096, 65537, N};
    static char text[N + 1], shown[N + 100];
    struct mb_log_view v = {.tag_ranks = 1};

    (void)state;
    text[0] = 'a';
    for (size_t i = 1; i < N; i += 2)
        memcpy(text + i, "\xc3\xa9", 2);
    for (size_t k = 0; k < sizeof(steps) / sizeof(steps[0]); k++) {
        size_t n_pieces = 0, n_bytes = 0, n;

        show_cut(&v, 5, text, steps[k]);
        show_cut(&v, 5, "\n", 1);
        rewind(out);
        n = fread(shown, 1, sizeof(shown), out);
        for (char *p = shown, *end; p < shown + n; p = end + 1, n_pieces++) {
            end = memchr(p, '\n', (size_t)(shown + n - p));
            assert_non_null(end);
            assert_memory_equal(p, "[rank 5] ", 9);
            assert_true(mb_utf8_valid(p, (size_t)(end - p)));
            n_bytes += (size_t)(end - p) - 9;
        }
        assert_int_equal(n_pieces, 3); /* the last is the empty line */
        assert_int_equal(n_bytes, N);
        printed();
    }
}

static void test_bad_pattern(void **state)
{
    struct mb_log_view v;

    (void)state;
    assert_int_equal(mb_log_view_init(&v, "a[", &err), MB_EINVAL);
    assert_non_null(strstr(err.text, "--grep a["));
    mb_log_view_close(&v);
}

static void test_no_memory(void **state)
{
    struct mb_log_view v = {.json = 1};
    int failures = 0;

    (void)state;
    for (unsigned long nth = 1;; nth++) {
        struct mb_log_lines l = {.view = &v, .rank = 0};
        int rc;

        mb_alloc_fail_nth(nth);
        rc = mb_log_lines_add(&l, "half", 4, &err);
        if (rc == 0)
            rc = mb_log_lines_add(&l, " line\n", 6, &err);
        if (!mb_alloc_did_fail()) {
            mb_alloc_fail_nth(0);
            assert_int_equal(rc, 0);
            mb_log_lines_end(&l, &err);
            break;
        }
        mb_alloc_fail_nth(0);
        assert_int_equal(rc, MB_ENOMEM);
        failures++;
        mb_log_lines_end(&l, &err);
    }
    assert_true(failures >= 2);
    assert_non_null(strstr(printed(), "half line"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_any_cut, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_line_beyond_the_bound, set_up, tear_down),
        cmocka_unit_test(test_bad_pattern),
        cmocka_unit_test_setup_teardown(test_no_memory, set_up, tear_down),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
