/* Which older checkpoints go, and that nothing else does. */
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
#include "worker/checkpoint/evict.h"

static char dir[] = "/tmp/mobula-evict-XXXXXX";

static int below(void *arg, int64_t iteration)
{
    return iteration < *(int64_t *)arg;
}

/* iterations end with -1; expected as text "10 20". */
static void check(struct mb_checkpoint_keep k, int64_t newest, const int64_t *iterations,
                  const char *expected)
{
    int64_t list[32];
    size_t n = 0;
    char text[256] = "";
    while (iterations[n] >= 0) {
        list[n] = iterations[n];
        n++;
    }
    size_t out = mb_checkpoint_choose_evicted(&k, newest, list, n);
    for (size_t i = 0; i < out; i++) {
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%lld", i ? " " : "",
                 (long long)list[i]);
    }
    assert_string_equal(text, expected);
}

static void the_newest_are_kept(void **state)
{
    (void)state;
    static const int64_t all[] = {50, 10, 40, 20, 30, -1};
    static const int64_t none[] = {-1};
    int64_t durable = 30;
    check((struct mb_checkpoint_keep){0}, 50, all, "");
    check((struct mb_checkpoint_keep){.keep_last = 1}, 50, all, "10 20 30 40");
    check((struct mb_checkpoint_keep){.keep_last = 3}, 50, all, "10 20");
    check((struct mb_checkpoint_keep){.keep_last = 5}, 50, all, "");
    check((struct mb_checkpoint_keep){.keep_last = INT64_MAX}, 50, all, "");
    check((struct mb_checkpoint_keep){.keep_last = 1}, 50, none, "");
    /* Saved anew from an older one: what a longer run left is not ours to judge. */
    check((struct mb_checkpoint_keep){.keep_last = 1}, 30, all, "10 20");
    check((struct mb_checkpoint_keep){.keep_last = 2}, 30, all, "10");
    check((struct mb_checkpoint_keep){.keep_last = 1}, 10, all, "");
    /* Marked ones, and those that are not durable. */
    check((struct mb_checkpoint_keep){.keep_last = 1, .retain_interval = 20}, 50, all, "10 30");
    check((struct mb_checkpoint_keep){.keep_last = 1, .is_durable = below, .arg = &durable}, 50,
          all, "10 20");
    durable = 0;
    check((struct mb_checkpoint_keep){.keep_last = 1, .is_durable = below, .arg = &durable}, 50,
          all, "");
}

static void make(const char *name)
{
    char path[256];
    struct mb_err err;
    snprintf(path, sizeof path, "%s/%s/file", dir, name);
    assert_int_equal(mb_fs_mkdir_p(path, 0755, &err), 0);
}

static int has(const char *name)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return mb_fs_exists(path);
}

static void only_checkpoints_are_removed(void **state)
{
    (void)state;
    static const char *const others[] = {
        "iter_10", "iter_0000010x", "iteration", "iter_-000010", "iter_0000040", "logs", "iter_"};
    struct mb_checkpoint_keep k = {.keep_last = 1};
    struct mb_err err = {0};
    size_t n = 7;
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        make(others[i]);
    }
    make("iter_0000010");
    make(".iter_0000010.of-evicted"); /* a killed one's */
    make("iter_0000020");
    make("iter_12345678");
    for (unsigned long nth = 1;; nth++) { /* what fails is told, and goes on at the next save */
        mb_alloc_fail_nth(nth);
        int rc = mb_checkpoint_evict(dir, &k, 40, &n, &err);
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (!failed) {
            assert_int_equal(rc, 0);
            break;
        }
        assert_true(rc == MB_ENOMEM);
    }
    assert_false(has("iter_0000010") || has("iter_0000020") || has(".iter_0000010.of-evicted"));
    assert_true(has("iter_12345678"));
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        assert_true(has(others[i]));
    }
    assert_int_equal(mb_checkpoint_evict("/nonexistent/x", &k, 40, &n, &err), MB_ENOENT);
    assert_int_equal(n, 0);
}

static int make_dir(void **state)
{
    (void)state;
    return mkdtemp(dir) != NULL ? 0 : -1;
}

static int remove_dir(void **state)
{
    (void)state;
    return mb_fs_remove_tree(dir, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_newest_are_kept),
        cmocka_unit_test(only_checkpoints_are_removed),
    };
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
