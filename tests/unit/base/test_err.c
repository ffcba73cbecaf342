/* base/err.h and base/log.h: what a person reads. */
#include "cmocka_all.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/err.h"
#include "base/log.h"
#include "base/str.h"

static void test_set_and_wrap(void **state)
{
    struct mb_err err = {0};

    (void)state;
    assert_int_equal(mb_err_set(&err, MB_EINVAL, "field %s", "rank"), MB_EINVAL);
    assert_int_equal(err.code, MB_EINVAL);
    assert_string_equal(err.text, "field rank");
    assert_int_equal(mb_err_wrap(&err, "%s line %d", "a.json", 3), MB_EINVAL);
    assert_string_equal(err.text, "a.json line 3: field rank");
    mb_err_set(&err, err.code, "again %s", err.text); /* its own text as an argument */
    assert_string_equal(err.text, "again a.json line 3: field rank");
    mb_err_set(&err, MB_EIO, "two\nlines\tand\x7f");
    assert_string_equal(err.text, "two lines and ");
    mb_err_clear(&err);
    assert_int_equal(err.code, 0);
    assert_string_equal(err.text, "");
    mb_err_clear(NULL);
    assert_int_equal(mb_err_set(NULL, MB_EFULL, "nobody reads %d", 1), MB_EFULL);
    assert_int_equal(mb_err_sys(NULL, ENOSPC, "x"), MB_EFULL);
    assert_int_equal(mb_err_wrap(NULL, "x"), MB_EIO);
}

static void test_bound(void **state)
{
    struct mb_err err = {0};
    char text[3 * MB_ERR_TEXT_MAX + 1];

    (void)state;
    for (int i = 0; i < MB_ERR_TEXT_MAX; i++)
        memcpy(text + 3 * i, "\xe2\x82\xac", 3);
    text[sizeof(text) - 1] = '\0';
    for (int shift = 0; shift < 3; shift++) {
        mb_err_set(&err, MB_EIO, "%.*s%s", shift, "ab", text);
        assert_true(strlen(err.text) >= MB_ERR_TEXT_MAX - 4);
        assert_true(mb_utf8_valid(err.text, strlen(err.text)));
    }
}

static void test_errno(void **state)
{
    static const struct {
        int e, code;
    } cases[] = {{ENOENT, MB_ENOENT},     {EEXIST, MB_EEXIST},         {EACCES, MB_EDENIED},
                 {ENOSPC, MB_EFULL},      {ECONNREFUSED, MB_EUNAVAIL}, {ETIMEDOUT, MB_ETIMEOUT},
                 {ENOMEM, MB_ENOMEM},     {EINVAL, MB_EINVAL},         {EIO, MB_EIO},
                 {EADDRINUSE, MB_EEXIST}, {ENOSYS, MB_EUNSUPPORTED},   {ECANCELED, MB_ECANCELED}};
    struct mb_err err = {0};

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        assert_int_equal(mb_err_sys(&err, cases[i].e, "open"), cases[i].code);
    mb_err_sys(&err, ENOENT, "open %s", "/x");
    assert_string_equal(err.text, "open /x: No such file or directory");
}

static void test_names(void **state)
{
    int seen[256] = {0};

    (void)state;
    assert_string_equal(mb_code_name(MB_EINVAL), "EINVAL");
    assert_string_equal(mb_code_name(MB_EUNSUPPORTED), "EUNSUPPORTED");
    assert_string_equal(mb_code_name(1), "?");
    assert_string_equal(mb_code_name(-99), "?");
    assert_int_equal(mb_exit_status(0), 0);
    assert_int_equal(mb_exit_status(MB_EINVAL), 64);
    assert_int_equal(mb_exit_status(MB_ECANCELED), 130);
    assert_int_equal(mb_exit_status(-99), 70);
    for (int code = MB_EINVAL; code >= MB_EUNSUPPORTED; code--) {
        assert_true(strcmp(mb_code_name(code), "?") != 0);
        assert_int_equal(seen[mb_exit_status(code)]++, 0); /* each its own */
    }
}

/* The next line in the pipe, without its newline. */
static char *log_line(int fd, char *line, size_t size)
{
    ssize_t n = read(fd, line, size - 1);

    assert_true(n > 0);
    assert_int_equal(line[n - 1], '\n');
    line[n - 1] = '\0';
    assert_null(strchr(line, '\n'));
    return line;
}

static void test_log(void **state)
{
    enum mb_log_level level;
    char line[8192], big[6000];
    int fds[2];

    (void)state;
    assert_int_equal(pipe(fds), 0);
    mb_log_init(fds[1], MB_LOG_INFO);
    assert_int_equal(mb_log_level(), MB_LOG_INFO);
    mb_debug("m", "dropped");
    mb_info("gang", "rank=%d up", 3);
    log_line(fds[0], line, sizeof(line));
    assert_string_equal(line + 24, " INFO gang: rank=3 up");
    assert_int_equal(line[10], 'T');
    assert_int_equal(line[23], 'Z');
    mb_log_context("node=ab12 rank=1");
    mb_error("m", "forged\n2026 line");
    log_line(fds[0], line, sizeof(line));
    assert_string_equal(line + 24, " ERROR node=ab12 rank=1 m: forged 2026 line");
    memset(big, 'x', sizeof(big) - 1);
    big[sizeof(big) - 1] = '\0';
    mb_warn("m", "%s", big);
    log_line(fds[0], line, sizeof(line));
    assert_true(strlen(line) < 4096);
    assert_true(mb_ends_with(line, "xxx..."));
    mb_log_context(big);
    mb_info("m", "t");
    log_line(fds[0], line, sizeof(line));
    assert_int_equal(strlen(line), 24 + strlen(" INFO ") + 95 + strlen(" m: t"));
    mb_log_context("");
    mb_log_init(2, MB_LOG_INFO);
    close(fds[0]);
    close(fds[1]);
    assert_int_equal(mb_log_level_parse("warn", &level), 0);
    assert_int_equal(level, MB_LOG_WARN);
    assert_int_equal(mb_log_level_parse("loud", &level), MB_EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_set_and_wrap), cmocka_unit_test(test_bound),
        cmocka_unit_test(test_errno),        cmocka_unit_test(test_names),
        cmocka_unit_test(test_log),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
