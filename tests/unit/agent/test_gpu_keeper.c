/* A GPU in doubt stays in doubt when the agent starts anew, or the agent does not start. A driver
 * that hangs costs its own device, and nobody's time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
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
extern atomic_int fake_nvml_hangs[], fake_nvml_asked[], fake_nvml_shutdowns, fake_nvml_users;

enum { WAIT_MS = 60000, GPU_0 = 1 /* in those lists */ };

/* Patience without waiting. */
static uint64_t later_ms;
uint64_t __real_mb_mono_ms(void);
uint64_t __wrap_mb_mono_ms(void);

uint64_t __wrap_mb_mono_ms(void)
{
    return __real_mb_mono_ms() + later_ms;
}

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

/* ---- a driver that hangs ---- */

static const char *const free_before =
    "[{\"has_baseline\": true, \"baseline_bytes\": 5, \"unconfirmed\": false},"
    " {\"has_baseline\": true, \"baseline_bytes\": 5, \"unconfirmed\": false}]";

static void begin_hung(struct fixture *f, const char *text)
{
    struct mb_err err = {0};

    for (int i = 0; i < WAIT_MS && atomic_load(&fake_nvml_users) > 0; i++)
        usleep(1000); /* questions that keepers before left behind */
    assert_int_equal(atomic_load(&fake_nvml_users), 0);
    begin(f, text);
    atomic_store(&fake_nvml_asked[GPU_0], 0);
    atomic_store(&fake_nvml_hangs[GPU_0], 1);
    assert_int_equal(create(f, &err), 0);
    assert_non_null(f->keeper);
}

static void wait_state(struct fixture *f, size_t device, enum mb_gpu_state wanted)
{
    uint64_t until = __real_mb_mono_ms() + WAIT_MS;

    while (mb_ledger_gpu_state(f->ledger, device) != wanted && __real_mb_mono_ms() < until)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_int_equal(mb_ledger_gpu_state(f->ledger, device), wanted);
    assert_null(mb_ledger_invariant(f->ledger));
}

static void wait_count(const atomic_int *count, int wanted)
{
    for (int i = 0; i < WAIT_MS && atomic_load(count) < wanted; i++)
        usleep(1000);
    assert_int_equal(atomic_load(count), wanted);
}

/* GPU 0 is being asked, and GPU 1 has answered: nothing is in use, which the file has. */
static int is_half_answered(const struct fixture *f)
{
    struct mb_buf text = {0};
    struct mb_err err = {0};
    json_t *list, *baseline;
    int is_none;

    assert_int_equal(mb_fs_read(f->file, 4096, &text, &err), MB_OK);
    list = json_loads(mb_buf_str(&text), 0, NULL);
    baseline = json_object_get(json_array_get(list, 1), "baseline_bytes");
    is_none = json_is_integer(baseline) && json_integer_value(baseline) == 0;
    json_decref(list);
    mb_buf_close(&text);
    return is_none && atomic_load(&fake_nvml_asked[GPU_0]) == 1;
}

static void wait_half_answered(struct fixture *f)
{
    uint64_t until = __real_mb_mono_ms() + WAIT_MS;

    while (!is_half_answered(f) && __real_mb_mono_ms() < until)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_true(is_half_answered(f));
}

static void assert_reason(const struct fixture *f, const char *wanted)
{
    json_t *list = mb_gpu_keeper_json(f->keeper);

    assert_int_equal(json_array_size(list), wanted != NULL);
    if (wanted != NULL)
        assert_string_equal(json_string_value(json_object_get(json_array_get(list, 0), "reason")),
                            wanted);
    json_decref(list);
}

static void a_hang_is_a_quarantine_of_its_device(void **state)
{
    const char *const texts[] = {"[]", free_before, in_doubt};

    (void)state;
    for (size_t i = 0; i < 3; i++) { /* without a baseline, free with one, given back by a job */
        struct fixture f;

        begin_hung(&f, texts[i]);
        assert_int_equal(mb_ledger_gpu_state(f.ledger, 0),
                         i == 1 ? MB_LEDGER_GPU_FREE : MB_LEDGER_GPU_CHECKED);
        wait_state(&f, 1, MB_LEDGER_GPU_FREE);
        wait_half_answered(&f);
        assert_reason(&f, NULL);
        later_ms += 30000;
        wait_state(&f, 0, MB_LEDGER_GPU_QUARANTINED);
        assert_reason(&f, "GPU 0: the driver has not answered for 30 s");
        assert_int_equal(mb_ledger_gpu_state(f.ledger, 1), MB_LEDGER_GPU_FREE);
        assert_int_equal(atomic_load(&fake_nvml_asked[GPU_0]), 1);
        atomic_store(&fake_nvml_hangs[GPU_0], 0);
        wait_state(&f, 0, MB_LEDGER_GPU_FREE);
        assert_reason(&f, NULL);
        end(&f);
    }
}

/* What was seen before a job had the device says nothing of the time after it. */
static void an_answer_of_before_is_no_answer(void **state)
{
    struct fixture f;

    (void)state;
    begin_hung(&f, free_before);
    wait_half_answered(&f);
    later_ms += 1000;
    assert_int_equal(mb_ledger_set_gpu(f.ledger, 0, MB_LEDGER_GPU_CHECKED), 1); /* given back */
    mb_gpu_keeper_look(f.keeper);
    atomic_store(&fake_nvml_hangs[GPU_0], 0);
    wait_state(&f, 0, MB_LEDGER_GPU_FREE);
    assert_int_equal(atomic_load(&fake_nvml_asked[GPU_0]), 2);
    end(&f);
}

static void a_hang_does_not_hold_up_the_end(void **state)
{
    struct fixture f;
    int n_shutdowns;

    (void)state;
    begin_hung(&f, "[]");
    wait_count(&fake_nvml_asked[GPU_0], 1);
    n_shutdowns = atomic_load(&fake_nvml_shutdowns);
    end(&f); /* loop, ledger and keeper are gone, the call is not */
    assert_int_equal(atomic_load(&fake_nvml_shutdowns), n_shutdowns);
    atomic_store(&fake_nvml_hangs[GPU_0], 0);
    wait_count(&fake_nvml_shutdowns, n_shutdowns + 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_in_doubt_is_in_doubt),
        cmocka_unit_test(without_memory_none_is_given_away),
        cmocka_unit_test(a_file_that_cannot_be_read),
        cmocka_unit_test(no_file_and_a_broken_one_are_no_error),
        cmocka_unit_test(a_driver_that_fails_is_an_error),
        cmocka_unit_test(a_hang_is_a_quarantine_of_its_device),
        cmocka_unit_test(an_answer_of_before_is_no_answer),
        cmocka_unit_test(a_hang_does_not_hold_up_the_end),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
