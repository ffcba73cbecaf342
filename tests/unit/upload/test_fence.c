/* The fence between attempts, in a directory as the store. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>
#include <cmocka.h>
#include "agent/upload/fence.h"
#include "base/alloc.h"
#include "base/fs.h"

struct answer {
    int done;
    int code;
    int64_t newest;
};

static void on_answer(void *arg, const struct mb_err *err, int64_t newest)
{
    struct answer *a = arg;

    *a = (struct answer){1, err->code, newest};
}

static void on_closed(void *arg)
{
    *(int *)arg = 1;
}

static struct answer look(const char *dir, uint32_t attempt)
{
    struct answer a = {0};
    struct mb_store *store = NULL;
    struct mb_err err = {0};
    char url[200];
    uv_loop_t loop;
    int closed = 0;

    snprintf(url, sizeof(url), "file://%s", dir);
    assert_int_equal(uv_loop_init(&loop), 0);
    assert_int_equal(mb_store_open(&loop, url, &store, &err), 0);
    assert_int_equal(mb_fence_look(store, "abcd", attempt, on_answer, &a, &err), 0);
    while (!a.done)
        uv_run(&loop, UV_RUN_ONCE);
    mb_store_close(store, on_closed, &closed);
    while (!closed)
        uv_run(&loop, UV_RUN_ONCE);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&loop), 0);
    return a;
}

static void test_rule(void **state)
{
    (void)state;
    assert_int_equal(mb_fence_newest(0, 1), 0); /* the first writes nothing */
    assert_int_equal(mb_fence_newest(0, 2), 2);
    assert_int_equal(mb_fence_newest(2, 2), 2);
    assert_int_equal(mb_fence_newest(3, 2), 3);
    assert_int_equal(mb_fence_newest(2, 5), 5);
}

static void test_attempts(void **state)
{
    char dir[] = "/tmp/mobula-fence-XXXXXX", path[200];
    struct answer a;

    (void)state;
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof(path), "%s/.mobula/attempt-abcd", dir);
    a = look(dir, 1);
    assert_true(a.code == 0 && a.newest == 1);
    assert_false(mb_fs_exists(path));
    a = look(dir, 2);
    assert_true(a.code == 0 && a.newest == 2);
    assert_true(mb_fs_exists(path));
    a = look(dir, 2); /* the other node of the attempt */
    assert_true(a.code == 0 && a.newest == 2);
    a = look(dir, 4);
    assert_true(a.code == 0 && a.newest == 4);
    for (uint32_t older = 1; older < 4; older++) {
        a = look(dir, older);
        assert_true(a.code == 0 && a.newest == 4);
    }
    assert_int_equal(mb_fs_write_atomic(path, "x", 1, 0644, NULL), 0); /* damaged: not known */
    assert_int_equal(look(dir, 5).code, MB_ECORRUPT);
    assert_int_equal(mb_fs_remove_tree(dir, NULL), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rule),
                                       cmocka_unit_test(test_attempts)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
