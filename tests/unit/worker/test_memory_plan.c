/* worker/memory_plan.h: what of a need is certain, and what a guess, on a host and on a GPU (of
 * which the plan asks only whether it has memory of its own). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/str.h"
#include "worker/memory_plan.h"

#define WITHOUT_EVALUATION "--eval-iters 0"

enum { MIB = 1 << 20, IDX_BYTES = 12 * MIB, WORK_BYTES = 8 * MIB, LIBRARY_BYTES = 512 * MIB };

static struct mb_device device;
static struct mb_backend of_gpu;
static char prefix[64];

static void make_file(const char *suffix, off_t size_bytes)
{
    char *path = mb_asprintf("%s%s", prefix, suffix);
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, size_bytes), 0);
    close(fd);
    mb_free(path);
}

static int set_up(void **state)
{
    (void)state;
    struct mb_err err;
    snprintf(prefix, sizeof prefix, "/tmp/mobula-test-plan-%ld", (long)getpid());
    make_file(".idx", IDX_BYTES);
    make_file(".bin", 64 * MIB);
    return mb_backend_open(MOBULA_CPU_BACKEND, 0, &device, &err);
}

static int tear_down(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        char *path = mb_asprintf("%s%s", prefix, i == 0 ? ".idx" : ".bin");
        unlink(path);
        mb_free(path);
    }
    mb_backend_close(&device);
    return 0;
}

static void memory_of_gpu(struct mb_context *ctx, size_t *used_bytes, size_t *total_bytes)
{
    (void)ctx;
    *used_bytes = *total_bytes = 0;
}

static void plan(const struct mb_device *dev, const char *more, struct mb_plan_room *need,
                 struct mb_plan_room *certain)
{
    char *line = mb_asprintf(
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
        "--max-position-embeddings 32 --distributed-backend gloo --lr 1e-3 --tokenizer-type "
        "NullTokenizer --vocab-size 100 --micro-batch-size 2 --train-iters 10 "
        "--data-path %s %s",
        prefix, more);
    const char *argv[64];
    struct mb_args args;
    struct mb_err err;
    struct mb_device asked = *dev;
    int argc = 0;
    for (char *w = strtok(line, " "); w != NULL; w = strtok(NULL, " ")) {
        argv[argc++] = w;
    }
    assert_int_equal(mb_args_parse(&args, argc, argv, &err), 0);
    assert_int_equal(mb_args_validate(&args, 0, 1, &err), 0);
    args.padded_vocab_size = 128;
    const struct mb_plan_gang gang = {&asked, 100, 1, 0, 1};
    assert_int_equal(mb_plan_need(&gang, &args, need, certain, &err), 0);
    mb_args_close(&args);
    mb_free(line);
}

/* A file of so many bytes may have as many documents, or far fewer. */
static void test_host(void **state)
{
    (void)state;
    struct mb_plan_room need, certain;
    plan(&device, WITHOUT_EVALUATION, &need, &certain);
    assert_true(need.device_bytes == 0 && certain.device_bytes == 0);
    const double guessed = need.host_bytes - certain.host_bytes;
    assert_true(guessed >= WORK_BYTES + IDX_BYTES / 3.0);
    assert_true(guessed < WORK_BYTES + IDX_BYTES);
    assert_true(certain.host_bytes > 0);
}

/* Only the loader knows that there will be nothing to evaluate with. */
static void test_splits_without_data(void **state)
{
    (void)state;
    struct mb_plan_room without, with, need;
    plan(&device, WITHOUT_EVALUATION, &need, &without);
    plan(&device, "--eval-iters 1000 --eval-interval 1 --split 100,0,0", &need, &with);
    assert_true(with.host_bytes == without.host_bytes);
    assert_true(need.host_bytes > with.host_bytes);
}

/* Of what its libraries will take nobody knows how much. */
static void test_gpu(void **state)
{
    (void)state;
    struct mb_plan_room need, certain, of_host, host_certain;
    struct mb_device gpu = device;
    of_gpu = *device.ops;
    of_gpu.memory = memory_of_gpu;
    gpu.ops = &of_gpu;
    plan(&device, WITHOUT_EVALUATION, &of_host, &host_certain);
    plan(&gpu, WITHOUT_EVALUATION, &need, &certain);
    assert_true(need.device_bytes - certain.device_bytes == LIBRARY_BYTES);
    assert_true(certain.device_bytes + certain.host_bytes == host_certain.host_bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_host),
        cmocka_unit_test(test_splits_without_data),
        cmocka_unit_test(test_gpu),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
