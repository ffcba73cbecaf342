/* What products are tuned to, kept from one start to the next; and every way in which it is not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/buf.h"
#include "base/fs.h"
#include "worker/kernels/tuning.h"

enum { KEY = 12, VALUE = 8 };

static char dir[64];
static char path[128];

static int make_dir(void **state)
{
    (void)state;
    snprintf(dir, sizeof(dir), "/tmp/mobula-tuning-XXXXXX");
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof(path), "%s/products-NVIDIA_H200__x_-130101", dir);
    return setenv("MOBULA_TUNING_CACHE", dir, 1);
}

static int remove_dir(void **state)
{
    (void)state;
    return mb_fs_remove_tree(dir, NULL);
}

static struct mb_tuning *open_for(const char *device, uint64_t version, size_t value_bytes)
{
    struct mb_tuning *t = NULL;
    struct mb_err err = {0};
    if (mb_tuning_open(device, version, KEY, value_bytes, &t, &err) != 0)
        fail_msg("%s", err.text);
    return t;
}

static struct mb_tuning *open_plain(void)
{
    return open_for("NVIDIA H200 (x)", 130101, VALUE);
}

static void add(struct mb_tuning *t, const char key[KEY], const char value[VALUE])
{
    mb_tuning_add(t, key, value);
}

static int has(const struct mb_tuning *t, const char key[KEY], const char value[VALUE])
{
    const void *v = mb_tuning_find(t, key);
    return v != NULL && memcmp(v, value, VALUE) == 0;
}

/* A second start finds what the first one added, and what was replaced only as it was last. */
static void test_second_start(void **state)
{
    (void)state;
    struct mb_tuning *t = open_plain();
    assert_null(mb_tuning_find(t, "first key  "));
    add(t, "first key  ", "value 1");
    add(t, "second key ", "value 2");
    add(t, "first key  ", "value 3");
    mb_tuning_close(t);
    assert_int_equal(access(path, R_OK), 0);
    t = open_plain();
    assert_true(has(t, "first key  ", "value 3"));
    assert_true(has(t, "second key ", "value 2"));
    assert_null(mb_tuning_find(t, "third key  "));
    mb_tuning_close(t);
}

static void test_other_devices_and_versions(void **state)
{
    (void)state;
    struct mb_tuning *t = open_plain();
    add(t, "first key  ", "value 1");
    mb_tuning_close(t);
    t = open_for("NVIDIA H100", 130101, VALUE);
    assert_null(mb_tuning_find(t, "first key  "));
    mb_tuning_close(t);
    t = open_for("NVIDIA H200 (x)", 130200, VALUE);
    assert_null(mb_tuning_find(t, "first key  "));
    mb_tuning_close(t);
    t = open_for("NVIDIA H200 (x)", 130101, VALUE + 4); /* the same name, another layout */
    assert_null(mb_tuning_find(t, "first key  "));
    mb_tuning_close(t);
}

/* Two have the file open; each keeps what the other added before. */
static void test_two_at_a_time(void **state)
{
    (void)state;
    struct mb_tuning *a = open_plain(), *b = open_plain();
    add(a, "first key  ", "value 1");
    add(b, "second key ", "value 2");
    add(a, "third key  ", "value 3");
    mb_tuning_close(a);
    mb_tuning_close(b);
    a = open_plain();
    assert_true(has(a, "first key  ", "value 1"));
    assert_true(has(a, "second key ", "value 2"));
    assert_true(has(a, "third key  ", "value 3"));
    mb_tuning_close(a);
}

/* Cut at every length, and with every byte changed: counts as empty, and is whole again after the
 * next choice. */
static void test_damage(void **state)
{
    (void)state;
    struct mb_buf whole = {0};
    struct mb_tuning *t = open_plain();
    add(t, "first key  ", "value 1");
    mb_tuning_close(t);
    assert_int_equal(mb_fs_read(path, 4096, &whole, NULL), 0);
    for (size_t i = 0; i < 2 * whole.len; i++) {
        const size_t at = i / 2, n = i % 2 ? whole.len : at;
        whole.data[at] ^= (uint8_t)(i % 2);
        assert_int_equal(mb_fs_write_atomic(path, whole.data, n, 0644, NULL), 0);
        whole.data[at] ^= (uint8_t)(i % 2);
        t = open_plain();
        assert_null(mb_tuning_find(t, "first key  "));
        mb_tuning_close(t);
    }
    mb_buf_close(&whole);
    t = open_plain();
    add(t, "second key ", "value 2");
    mb_tuning_close(t);
    t = open_plain();
    assert_true(has(t, "second key ", "value 2"));
    mb_tuning_close(t);
}

/* Many processes at once: the file is whole whenever it is looked at. */
static void test_many_processes(void **state)
{
    (void)state;
    enum { PROCESSES = 4, KEYS = 20 };
    for (int p = 0; p < PROCESSES; p++) {
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            struct mb_tuning *t = open_plain();
            for (int k = 0; k < KEYS; k++) {
                char key[32];
                snprintf(key, sizeof(key), "p %2d key %3d", p, k);
                add(t, key, "value 1");
            }
            mb_tuning_close(t);
            _exit(0);
        }
    }
    for (int p = 0; p < PROCESSES; p++) {
        int status = -1;
        assert_true(wait(&status) > 0);
        assert_int_equal(status, 0);
    }
    struct mb_tuning *t = open_plain();
    int complete = 0; /* who wrote last has all of its own in it */
    for (int p = 0; p < PROCESSES; p++) {
        int n = 0;
        for (int k = 0; k < KEYS; k++) {
            char key[32];
            snprintf(key, sizeof(key), "p %2d key %3d", p, k);
            n += has(t, key, "value 1");
        }
        complete += n == KEYS;
    }
    assert_true(complete >= 1);
    mb_tuning_close(t);
}

static void expect_place(const char *want)
{
    struct mb_tuning *t = open_plain();
    struct mb_buf name = {0};
    add(t, "first key  ", "value 1");
    assert_true(has(t, "first key  ", "value 1")); /* of this start, in any case */
    mb_tuning_close(t);
    assert_int_equal(mb_buf_printf(&name, "%s/%s/products-NVIDIA_H200__x_-130101", dir, want), 0);
    assert_int_equal(access(mb_buf_str(&name), R_OK), 0);
    assert_int_equal(unlink(mb_buf_str(&name)), 0);
    mb_buf_close(&name);
}

static void test_places(void **state)
{
    (void)state;
    char where[128];
    snprintf(where, sizeof(where), "%s/xdg", dir);
    setenv("XDG_CACHE_HOME", where, 1);
    setenv("HOME", dir, 1);
    expect_place("."); /* MOBULA_TUNING_CACHE */
    unsetenv("MOBULA_TUNING_CACHE");
    expect_place("xdg/mobula");
    unsetenv("XDG_CACHE_HOME");
    expect_place(".cache/mobula");
    setenv("MOBULA_TUNING_CACHE", "", 1);
    struct mb_tuning *t = open_plain();
    add(t, "first key  ", "value 1");
    assert_true(has(t, "first key  ", "value 1"));
    mb_tuning_close(t);
    t = open_plain();
    assert_null(mb_tuning_find(t, "first key  "));
    mb_tuning_close(t);
    snprintf(where, sizeof(where), "%s/file", dir); /* no directory can be made of it */
    assert_int_equal(mb_fs_write_atomic(where, "x", 1, 0644, NULL), 0);
    setenv("MOBULA_TUNING_CACHE", where, 1);
    t = open_plain();
    add(t, "first key  ", "value 1");
    assert_true(has(t, "first key  ", "value 1"));
    mb_tuning_close(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_second_start, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_other_devices_and_versions, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_two_at_a_time, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_damage, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_many_processes, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_places, make_dir, remove_dir),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
