/* A GPU in doubt stays in doubt when the agent starts anew, or the agent does not start. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <sys/stat.h>
#include <unistd.h>
#include "agent/gpu_keeper.h"
#include "base/alloc.h"
#include "base/fs.h"

extern int fake_nvml_status;

static const char *const in_doubt =
    "[{\"has_baseline\": true, \"baseline_bytes\": 5, \"unconfirmed\": true},"
    " {\"has_baseline\": true, \"baseline_bytes\": 5, \"unconfirmed\": false}]";

struct fixture {
    uv_loop_t loop;
    struct mb_ledger *ledger;
    struct mb_gpu_keeper *keeper;
    char dir[32], file[64];
};

static void begin(struct fixture *f, const char *text)
{
    struct mb_resource totals[1] = {{MB_RESOURCE_GPU, 2}};
    struct mb_err err = {0};

    memset(f, 0, sizeof *f);
    fake_nvml_status = 0;
    strcpy(f->dir, "/tmp/mb-keeper-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    snprintf(f->file, sizeof f->file, "%s/gpus.json", f->dir);
    assert_int_equal(mb_fs_write_atomic(f->file, text, strlen(text), 0600, &err), 0);
    assert_int_equal(mb_ledger_create(totals, 1, &f->ledger, &err), 0);
    uv_loop_init(&f->loop);
}

static void on_changed(void *arg)
{
    (void)arg;
}

static int create(struct fixture *f, struct mb_err *err)
{
    return mb_gpu_keeper_create(&f->loop, f->ledger, f->dir, on_changed, NULL, &f->keeper, err);
}

static void end(struct fixture *f)
{
    struct mb_err err = {0};

    mb_gpu_keeper_close(f->keeper, NULL, NULL);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&f->loop), 0);
    mb_ledger_destroy(f->ledger);
    assert_int_equal(mb_fs_remove_tree(f->dir, &err), 0);
}

static void what_was_in_doubt_is_in_doubt(void **state)
{
    struct mb_err err = {0};
    struct fixture f;

    (void)state;
    begin(&f, in_doubt);
    assert_int_equal(create(&f, &err), 0);
    assert_non_null(f.keeper);
    assert_int_equal(mb_ledger_gpu_state(f.ledger, 0), MB_LEDGER_GPU_CHECKED);
    assert_int_equal(mb_ledger_gpu_state(f.ledger, 1), MB_LEDGER_GPU_FREE);
    end(&f);
}

static void without_memory_none_is_given_away(void **state)
{
    int failed = 1, n_refused = 0;

    (void)state;
    for (unsigned long nth = 1; failed; nth++) {
        struct mb_err err = {0};
        struct fixture f;
        begin(&f, in_doubt);
        mb_alloc_fail_nth(nth);
        int rc = create(&f, &err);
        failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (rc == 0) { /* the file could not be written, which is said */
            assert_non_null(f.keeper);
            assert_int_equal(mb_ledger_gpu_state(f.ledger, 0), MB_LEDGER_GPU_CHECKED);
        } else {
            assert_int_equal(rc, MB_ENOMEM);
            assert_null(f.keeper);
            assert_true(err.text[0] != '\0');
            n_refused++;
        }
        end(&f);
    }
    assert_true(n_refused >= 6); /* NVML, the keeper's four, the file's */
}

static void a_file_that_cannot_be_read(void **state)
{
    struct mb_err err = {0};
    struct fixture f;

    (void)state;
    begin(&f, in_doubt);
    assert_int_equal(unlink(f.file), 0);
    assert_int_equal(mkdir(f.file, 0700), 0);
    assert_int_not_equal(create(&f, &err), 0);
    assert_non_null(strstr(err.text, "in doubt"));
    assert_null(f.keeper);
    end(&f);
}

static void no_file_and_a_broken_one_are_no_error(void **state)
{
    struct mb_err err = {0};
    struct fixture f;

    (void)state;
    begin(&f, "[{");
    assert_int_equal(create(&f, &err), 0);
    assert_non_null(f.keeper);
    end(&f);
    begin(&f, "[]");
    assert_int_equal(unlink(f.file), 0);
    assert_int_equal(create(&f, &err), 0);
    assert_non_null(f.keeper);
    end(&f);
}

static void a_driver_that_fails_is_an_error(void **state)
{
    struct mb_err err = {0};
    struct fixture f;

    (void)state;
    begin(&f, in_doubt);
    fake_nvml_status = 999;
    assert_int_equal(create(&f, &err), MB_EIO);
    assert_null(f.keeper);
    fake_nvml_status = 9; /* not loaded */
    assert_int_equal(create(&f, &err), 0);
    assert_null(f.keeper);
    end(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_in_doubt_is_in_doubt),
        cmocka_unit_test(without_memory_none_is_given_away),
        cmocka_unit_test(a_file_that_cannot_be_read),
        cmocka_unit_test(no_file_and_a_broken_one_are_no_error),
        cmocka_unit_test(a_driver_that_fails_is_an_error),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
