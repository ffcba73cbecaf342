/* Who may reach a node's ports: the decision, whole, and what follows from options and files. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "agent/access.h"
#include "base/alloc.h"
#include "base/fs.h"

static char home[64], own[96];

static int set_up(void **state)
{
    (void)state;
    strcpy(home, "/tmp/mobula-access-XXXXXX");
    if (mkdtemp(home) == NULL)
        return -1;
    snprintf(own, sizeof(own), "%s/.ray/auth_token", home);
    setenv("HOME", home, 1);
    unsetenv("RAY_USE_TLS");
    unsetenv("RAY_AUTH_MODE");
    unsetenv("RAY_AUTH_TOKEN");
    unsetenv("RAY_AUTH_TOKEN_PATH");
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    return mb_fs_remove_tree(home, NULL);
}

static void the_decision(void **state)
{
    (void)state;
    for (int i = 0; i < 32; i++) {
        int has_token = i & 1, is_trusted = i >> 1 & 1, is_loopback = i >> 2 & 1,
            is_head = i >> 3 & 1, is_mutual = i >> 4;
        enum mb_access_step step =
            mb_access_decide(has_token, is_trusted, is_loopback, is_head, is_mutual);

        assert_int_equal(step == MB_ACCESS_NONE,
                         is_trusted || (!has_token && (is_loopback || (is_mutual && !is_head))));
        assert_int_equal(step == MB_ACCESS_USE, has_token && !is_trusted);
        assert_int_equal(step == MB_ACCESS_MAKE,
                         !has_token && !is_trusted && !is_loopback && is_head);
        assert_int_equal(step == MB_ACCESS_REFUSE,
                         !has_token && !is_trusted && !is_loopback && !is_head && !is_mutual);
    }
}

static void loopback(void **state)
{
    (void)state;
    assert_true(mb_access_is_loopback("127.0.0.1"));
    assert_true(mb_access_is_loopback("127.1.2.3"));
    assert_false(mb_access_is_loopback("10.0.0.1"));
    assert_false(mb_access_is_loopback("0.0.0.0"));
    assert_false(mb_access_is_loopback("127.evil.example"));
    assert_false(mb_access_is_loopback("localhost"));
    assert_false(mb_access_is_loopback(""));
}

static void choose(const struct mb_agent_options *o, const char *ip, int has_token, int is_open,
                   const char *bind_addr)
{
    struct mb_access a;
    struct mb_err err = {0};

    assert_int_equal(mb_access_choose(o, ip, &a, &err), MB_OK);
    assert_int_equal(a.token.text != NULL, has_token);
    assert_int_equal(a.is_open, is_open);
    assert_string_equal(a.bind_addr, bind_addr);
    mb_token_close(&a.token);
}

static void a_head_makes_its_token_once(void **state)
{
    struct mb_agent_options head = {.is_head = 1}, node = {.address = "h:6379"};
    struct mb_access first, second;
    struct mb_err err = {0};
    struct stat st;

    (void)state;
    choose(&head, "127.0.0.1", 0, 0, "127.0.0.1");
    choose(&head, "127.0.0.2", 0, 0, "127.0.0.2"); /* what others are told is what is bound */
    assert_int_equal(mb_access_choose(&node, "10.0.0.2", &first, &err), MB_EDENIED);
    assert_non_null(strstr(err.text, "--no-token"));
    assert_non_null(strstr(err.text, "h:6379"));
    assert_int_not_equal(stat(own, &st), 0); /* none of that made one */

    assert_int_equal(mb_access_choose(&head, "10.0.0.1", &first, &err), MB_OK);
    assert_true(first.token.is_new);
    assert_string_equal(first.token.path, own);
    assert_int_equal(strlen(first.token.text), 64);
    assert_string_equal(first.bind_addr, "0.0.0.0");
    assert_int_equal(stat(own, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);

    assert_int_equal(mb_access_choose(&node, "10.0.0.2", &second, &err), MB_OK);
    assert_false(second.token.is_new);
    assert_string_equal(first.token.text, second.token.text);
    mb_token_close(&second.token);
    /* Made by somebody else meanwhile: that one holds. */
    assert_int_equal(mb_token_make(&second.token, &err), MB_OK);
    assert_false(second.token.is_new);
    assert_string_equal(first.token.text, second.token.text);
    mb_token_close(&second.token);
    mb_token_close(&first.token);
    choose(&head, "127.0.0.1", 1, 0, "127.0.0.1"); /* Ray's rule: one that is there is used */
}

static void a_trusted_network(void **state)
{
    struct mb_agent_options head = {.is_head = 1, .no_token = 1};
    struct mb_access a;
    struct mb_err err = {0};

    (void)state;
    setenv("RAY_AUTH_TOKEN", "from-env", 1);
    choose(&head, "10.0.0.1", 0, 1, "0.0.0.0");
    choose(&head, "127.0.0.1", 0, 0, "127.0.0.1");
    head.no_token = 0;
    choose(&head, "10.0.0.1", 1, 0, "0.0.0.0");
    setenv("RAY_AUTH_MODE", "Disabled", 1);
    choose(&head, "10.0.0.1", 0, 1, "0.0.0.0");
    head.no_token = 1;
    head.token_file = own;
    assert_int_equal(mb_access_choose(&head, "10.0.0.1", &a, &err), MB_EINVAL);
    setenv("RAY_AUTH_MODE", "of", 1);
    head = (struct mb_agent_options){.is_head = 1};
    assert_int_equal(mb_access_choose(&head, "127.0.0.1", &a, &err), MB_EINVAL);
    assert_non_null(strstr(err.text, "RAY_AUTH_MODE=of"));
}

static void what_drivers_find(void **state)
{
    struct mb_access a = {.is_open = 0};
    struct mb_err err = {0};

    (void)state;
    assert_int_equal(mb_access_hand_down(&a, &err), MB_OK);
    assert_null(getenv("RAY_AUTH_MODE"));
    setenv("RAY_AUTH_TOKEN", "old", 1);
    a.token = (struct mb_token){.text = (char *)(uintptr_t) "t", .path = own};
    assert_int_equal(mb_access_hand_down(&a, &err), MB_OK);
    assert_string_equal(getenv("RAY_AUTH_MODE"), "token");
    assert_string_equal(getenv("RAY_AUTH_TOKEN_PATH"), own);
    assert_null(getenv("RAY_AUTH_TOKEN"));
    a = (struct mb_access){.is_open = 1};
    assert_int_equal(mb_access_hand_down(&a, &err), MB_OK);
    assert_string_equal(getenv("RAY_AUTH_MODE"), "disabled");
}

/* The names that a renewed certificate has, too, whatever they lead to now. */
static void what_drivers_find_of_tls(void **state)
{
    static const char *const names[] = {"RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY",
                                        "RAY_TLS_CA_CERT"};
    struct mb_access a = {.is_open = 1};
    struct mb_err err = {0};
    char dir[] = "/tmp/mb-access-XXXXXX", old[PATH_MAX], here[PATH_MAX];

    (void)state;
    assert_non_null(mkdtemp(dir));
    assert_non_null(getcwd(old, sizeof old));
    assert_int_equal(chdir(dir), 0);
    assert_non_null(getcwd(here, sizeof here));
    assert_int_equal(symlink("/etc/hostname", "link.pem"), 0);
    setenv("RAY_USE_TLS", "1", 1);
    for (int i = 0; i < 3; i++)
        setenv(names[i], "link.pem", 1);
    assert_int_equal(mb_access_hand_down(&a, &err), MB_OK);
    strcat(here, "/link.pem");
    for (int i = 0; i < 3; i++) {
        assert_string_equal(getenv(names[i]), here);
        unsetenv(names[i]);
    }
    unsetenv("RAY_USE_TLS");
    assert_int_equal(unlink("link.pem"), 0);
    assert_int_equal(chdir(old), 0);
    assert_int_equal(rmdir(dir), 0);
}

static void no_memory(void **state)
{
    struct mb_agent_options head = {.is_head = 1};

    (void)state;
    for (unsigned long n = 1;; n++) {
        struct mb_access a;
        struct mb_err err = {0};

        mb_alloc_fail_nth(n);
        int rc = mb_access_choose(&head, "10.0.0.1", &a, &err);
        mb_alloc_fail_nth(0);
        if (rc == MB_OK) {
            assert_true(n > 3);
            mb_token_close(&a.token);
            return;
        }
        assert_int_equal(rc, MB_ENOMEM);
        assert_null(a.token.text);
    }
}

static void certificates_stand_for_a_token(void **state)
{
    struct mb_agent_options node = {.address = "h:6379"}, head = {.is_head = 1};
    struct mb_access a;
    struct mb_err err = {0};

    (void)state;
    setenv("RAY_USE_TLS", "TRUE", 1);
    choose(&node, "10.0.0.1", 0, 0, "0.0.0.0");
    choose(&head, "10.0.0.1", 1, 0, "0.0.0.0"); /* its HTTP port asks for no certificate */
    assert_int_equal(unlink(own), 0);
    node.is_job_agent = 1;
    assert_int_equal(mb_access_choose(&node, "10.0.0.1", &a, &err), MB_EDENIED);
    node.no_token = 1;
    choose(&node, "10.0.0.1", 0, 1, "0.0.0.0");
    setenv("RAY_USE_TLS", "yes", 1);
    assert_int_equal(mb_access_choose(&node, "10.0.0.1", &a, &err), MB_EINVAL);
    assert_non_null(strstr(err.text, "RAY_USE_TLS=yes"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_decision),
        cmocka_unit_test(loopback),
        cmocka_unit_test_setup_teardown(a_head_makes_its_token_once, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_trusted_network, set_up, tear_down),
        cmocka_unit_test_setup_teardown(what_drivers_find, set_up, tear_down),
        cmocka_unit_test_setup_teardown(what_drivers_find_of_tls, set_up, tear_down),
        cmocka_unit_test_setup_teardown(certificates_stand_for_a_token, set_up, tear_down),
        cmocka_unit_test_setup_teardown(no_memory, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
