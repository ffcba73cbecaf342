/* Where the token is found, in which order, and what is no token. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "gcs/token.h"

static char dir[64], given[96], named[96], own[96];

static void put(const char *path, const char *text)
{
    assert_int_equal(mb_fs_write_atomic(path, text, strlen(text), 0600, NULL), 0);
}

static int set_up(void **state)
{
    char ray[96];

    (void)state;
    strcpy(dir, "/tmp/mobula-token-XXXXXX");
    if (mkdtemp(dir) == NULL)
        return -1;
    snprintf(given, sizeof(given), "%s/given", dir);
    snprintf(named, sizeof(named), "%s/named", dir);
    snprintf(ray, sizeof(ray), "%s/.ray", dir);
    snprintf(own, sizeof(own), "%s/.ray/auth_token", dir);
    assert_int_equal(mb_fs_mkdir_p(ray, 0700, NULL), 0);
    put(given, "from-flag\n");
    put(named, "  from-path \r\n");
    put(own, "from-home");
    setenv("HOME", dir, 1);
    setenv("RAY_AUTH_MODE", "token", 1);
    unsetenv("RAY_AUTH_TOKEN");
    unsetenv("RAY_AUTH_TOKEN_PATH");
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    return mb_fs_remove_tree(dir, NULL);
}

static void expect(const char *token_file, const char *want)
{
    struct mb_err err = {0};
    char *token = NULL;

    assert_int_equal(mb_token_load(token_file, &token, &err), 0);
    if (want != NULL)
        assert_string_equal(token, want);
    else
        assert_null(token);
    mb_free(token);
}

static void test_order(void **state)
{
    (void)state;
    expect(NULL, "from-home");
    setenv("RAY_AUTH_TOKEN_PATH", named, 1);
    expect(NULL, "from-path");
    setenv("RAY_AUTH_TOKEN", "from-env", 1);
    expect(NULL, "from-env");
    expect(given, "from-flag");
    setenv("RAY_AUTH_MODE", "disabled", 1);
    expect(NULL, NULL);
    expect(given, "from-flag");
}

static void refused(int code, const char *place)
{
    struct mb_err err = {0};
    char *token = NULL;

    assert_int_equal(mb_token_load(NULL, &token, &err), code);
    assert_null(token);
    assert_non_null(strstr(err.text, place));
    assert_null(strstr(err.text, "s3cret"));
}

/* Ray's rule: RAY_AUTH_MODE is not set, and a token is there. */
static void test_if_there(void **state)
{
    (void)state;
    unsetenv("RAY_AUTH_MODE");
    expect(NULL, "from-home");
    setenv("RAY_AUTH_TOKEN_PATH", named, 1);
    expect(NULL, "from-path");
    setenv("RAY_AUTH_TOKEN", "from-env", 1);
    expect(NULL, "from-env");
    setenv("RAY_AUTH_TOKEN", "", 1);
    expect(NULL, "from-path");
    unsetenv("RAY_AUTH_TOKEN_PATH");
    unlink(own);
    expect(NULL, NULL);
    setenv("RAY_AUTH_MODE", "TOKEN", 1);
    unsetenv("RAY_AUTH_TOKEN");
    refused(MB_ENOENT, "there is no token");
}

/* A file that others have a hand in is no secret, or not ours. */
static void test_modes(void **state)
{
    (void)state;
    for (unsigned mode = 0; mode < 0100; mode++) {
        assert_int_equal(chmod(own, 0600 | mode), 0);
        if (mode == 0)
            expect(NULL, "from-home");
        else
            refused(MB_EDENIED, "chmod 600");
    }
    assert_int_equal(chmod(own, 0400), 0);
    expect(NULL, "from-home");
    if (geteuid() == 0) {
        assert_int_equal(chown(own, 65534, 65534), 0);
        refused(MB_EDENIED, "it belongs to user 65534");
    } else {
        print_message("not root: whose file it is was not tried\n");
    }
    unlink(own);
    assert_int_equal(mkfifo(own, 0600), 0); /* nobody writes: it is not waited for */
    refused(MB_EINVAL, "not a regular file");
}

static void test_refused(void **state)
{
    (void)state;
    put(own, " \n");
    refused(MB_EINVAL, "auth_token: the token is empty");
    put(own, "s3cret\r\nX-Other: s3cret");
    refused(MB_EINVAL, "auth_token: character 7 ");
    setenv("RAY_AUTH_TOKEN", "s3cret s3cret", 1);
    refused(MB_EINVAL, "RAY_AUTH_TOKEN: character 7 ");
    unsetenv("RAY_AUTH_TOKEN");
    setenv("RAY_AUTH_TOKEN_PATH", "/nonexistent/token", 1);
    refused(MB_ENOENT, "/nonexistent/token");
}

static void test_no_memory(void **state)
{
    (void)state;
    for (unsigned long n = 1;; n++) {
        struct mb_err err = {0};
        char *token = NULL;

        mb_alloc_fail_nth(n);
        int rc = mb_token_load(NULL, &token, &err);
        mb_alloc_fail_nth(0);
        if (rc == 0) {
            assert_true(n > 1);
            assert_string_equal(token, "from-home");
            mb_free(token);
            return;
        }
        assert_int_equal(rc, MB_ENOMEM);
        assert_null(token);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_order, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_if_there, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_modes, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_refused, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_no_memory, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
