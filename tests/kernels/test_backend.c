/* Opening a backend: every refusal is one line that says what to do; memory and streams are given
 * back. */
#include "fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"

static void expect_open(const char *path, int device, int code, const char *text)
{
    struct mb_device dev = {0};
    struct mb_err err = {0};
    assert_int_equal(mb_backend_open(path, device, &dev, &err), code);
    assert_null(dev.library);
    if (strstr(err.text, text) == NULL)
        fail_msg("'%s' does not say '%s'", err.text, text);
    assert_null(strchr(err.text, '\n'));
}

static void test_refusals(void **state)
{
    (void)state;
    expect_open("libmobula_cpu.so", 0, MB_EINVAL, "the path must be absolute");
    expect_open("/nonexistent/libmobula_cpu.so", 0, MB_ENOENT, "/nonexistent/libmobula_cpu.so");
    expect_open("/dev/null", 0, MB_EUNSUPPORTED, "/dev/null");
    expect_open(MOBULA_CPU_BACKEND, 1, MB_EINVAL, "device 1 does not exist");
}

/* A library that is no backend: the C library itself. */
static void test_no_table(void **state)
{
    (void)state;
    char line[512], path[512] = "";
    FILE *maps = fopen("/proc/self/maps", "r");
    assert_non_null(maps);
    while (fgets(line, sizeof(line), maps) != NULL)
        if (strstr(line, "/libc.so.6") != NULL)
            sscanf(strchr(line, '/'), "%511s", path);
    fclose(maps);
    assert_true(path[0] == '/');
    expect_open(path, 0, MB_EUNSUPPORTED, "exports no mb_backend_table");
}

static void test_environment(void **state)
{
    (void)state;
    const char *isa = getenv("MOBULA_CPU_ISA");
    char *kept = mb_strdup(isa);
    setenv("MOBULA_CPU_THREADS", "many", 1);
    expect_open(MOBULA_CPU_BACKEND, 0, MB_EINVAL, "MOBULA_CPU_THREADS");
    setenv("MOBULA_CPU_THREADS", "0", 1);
    expect_open(MOBULA_CPU_BACKEND, 0, MB_EINVAL, "MOBULA_CPU_THREADS");
    unsetenv("MOBULA_CPU_THREADS");
    setenv("MOBULA_CPU_ISA", "avx9", 1);
    expect_open(MOBULA_CPU_BACKEND, 0, MB_EINVAL, "must be one of baseline, v3, v4");
    unsetenv("MOBULA_CPU_ISA");
    if (kept != NULL)
        setenv("MOBULA_CPU_ISA", kept, 1);
    mb_free(kept);
}

static void test_memory(void **state)
{
    struct fixture *f = *state;
    const struct mb_backend *ops = f->dev.ops;
    void *p[20], *big = NULL;
    struct mb_err err = {0};
    for (int i = 0; i < 20; i++) {
        assert_int_equal(ops->alloc(f->dev.ctx, 100, &p[i], &err), 0);
        assert_int_equal((uintptr_t)p[i] % 64, 0);
    }
    for (int i = 0; i < 20; i += 2) /* the rest is given back by close */
        ops->free(f->dev.ctx, p[i]);
    ops->free(f->dev.ctx, NULL);
    assert_int_equal(ops->alloc(f->dev.ctx, SIZE_MAX - 8, &big, &err), MB_ENOMEM);
    assert_null(big);
}

static void test_describe(void **state)
{
    struct fixture *f = *state;
    assert_string_equal(f->dev.ops->name, "cpu");
    assert_non_null(strstr(f->dev.ops->describe(f->dev.ctx), "OpenBLAS"));
}

static void test_close_twice(void **state)
{
    (void)state;
    struct mb_device dev = {0};
    mb_backend_close(&dev);
    assert_int_equal(mb_backend_open(MOBULA_CPU_BACKEND, 0, &dev, NULL), 0);
    mb_backend_close(&dev);
    mb_backend_close(&dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_no_table),
        cmocka_unit_test(test_environment),
        cmocka_unit_test_setup_teardown(test_memory, fixture_setup, fixture_teardown),
        cmocka_unit_test_setup_teardown(test_describe, fixture_setup, fixture_teardown),
        cmocka_unit_test(test_close_twice),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
