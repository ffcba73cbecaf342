/*
 * Opening the CUDA backend where it cannot run is one line that says why, and leaves nothing. Runs
 * everywhere: without a driver or a GPU it must be refused; with one, a device that does not exist.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "worker/kernels/backend.h"

static void test_open(void **state)
{
    (void)state;
    const int has_gpu = access("/dev/nvidiactl", F_OK) == 0;
    struct mb_device dev = {0};
    struct mb_err err = {0};
    int rc = mb_backend_open(MOBULA_CUDA_BACKEND, has_gpu ? 4096 : 0, &dev, &err);
    assert_int_equal(rc, has_gpu ? MB_EINVAL : MB_EUNSUPPORTED);
    assert_null(dev.library);
    printf("%s\n", err.text);
    assert_null(strchr(err.text, '\n'));
    assert_non_null(strstr(err.text, has_gpu ? "device 4096 does not exist" : "NVIDIA"));
    assert_non_null(strstr(err.text, "backend cuda: "));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_open)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
