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
#include "agent/amd.h"
#include "agent/gpu_keeper.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/errand.h"
#include "base/fs.h"

extern int fake_nvml_status;
extern atomic_int fake_nvml_hangs[], fake_nvml_asked[], fake_nvml_shutdowns;
extern atomic_int fake_nvml_memory_status, fake_nvml_processes_status, fake_nvml_processes;

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
    struct mb_gpus gpus;
    struct mb_ledger *ledger;
    struct mb_gpu_keeper *keeper;
    char dir[32], file[64];
};

static void begin_with(struct fixture *f, const char *text, unsigned n_gpus)
{
    struct mb_resource totals[1] = {{MB_RESOURCE_GPU, n_gpus}};
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

static void begin(struct fixture *f, const char *text)
{
    begin_with(f, text, 2);
}

static void on_changed(void *arg)
{
    (void)arg;
}

/* nvml NULL: the driver is silent. */
static int create_with(struct fixture *f, struct mb_nvml *nvml, struct mb_err *err)
{
    struct mb_gpu_keeper_opts opts = {.ledger = f->ledger,
                                      .gpus = &f->gpus,
                                      .node_dir = f->dir,
                                      .nvml = nvml,
                                      .asked_ms = mb_mono_ms(),
                                      .on_changed = on_changed};

    return mb_gpu_keeper_create(&f->loop, &opts, &f->keeper, err);
}

/* As an agent does, whose driver answers at once. */
static int create(struct fixture *f, struct mb_err *err)
{
    struct mb_nvml *nvml = NULL;
    struct mb_amd amd;
    int rc = mb_gpus_detect(&(struct mb_gpu_lists){0}, &f->gpus, &nvml, &amd, err);

    if (rc == MB_OK && nvml != NULL)
        rc = create_with(f, nvml, err);
    mb_nvml_close(nvml);
    return rc;
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

    assert_int_equal(mb_errands_ended(WAIT_MS), 1); /* what keepers before left behind */
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

static int has_reason(const struct fixture *f, const char *wanted)
{
    json_t *list = mb_gpu_keeper_json(f->keeper);
    const char *reason = json_string_value(json_object_get(json_array_get(list, 0), "reason"));
    int is_it = reason != NULL && strcmp(reason, wanted) == 0;

    json_decref(list);
    return is_it;
}

/* Of GPU 0, whatever its first one was: time that leaps makes a question that is on its way old. */
static void wait_reason(struct fixture *f, const char *wanted)
{
    uint64_t until = __real_mb_mono_ms() + WAIT_MS;

    while (!has_reason(f, wanted) && __real_mb_mono_ms() < until)
        uv_run(&f->loop, UV_RUN_ONCE);
    assert_true(has_reason(f, wanted));
    assert_int_equal(mb_ledger_gpu_state(f->ledger, 0), MB_LEDGER_GPU_QUARANTINED);
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

/* ---- a driver that was silent when the agent began ---- */

static void open_nvml(struct fixture *f, struct mb_nvml **nvml)
{
    struct mb_amd amd;
    struct mb_err err = {0};

    assert_int_equal(mb_gpus_detect(&(struct mb_gpu_lists){0}, &f->gpus, nvml, &amd, &err), 0);
    assert_non_null(*nvml);
}

static void a_silent_driver_is_a_quarantine_of_all(void **state)
{
    const char *const texts[] = {"[]", free_before, in_doubt};

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        struct mb_nvml *nvml;
        struct mb_err err = {0};
        struct fixture f;
        json_t *list;

        begin(&f, texts[i]);
        assert_int_equal(create_with(&f, NULL, &err), 0);
        for (size_t device = 0; device < 2; device++)
            assert_int_equal(mb_ledger_gpu_state(f.ledger, device), MB_LEDGER_GPU_CHECKED);
        uv_run(&f.loop, UV_RUN_ONCE);
        assert_reason(&f, NULL);
        later_ms += 30000;
        wait_state(&f, 1, MB_LEDGER_GPU_QUARANTINED);
        wait_state(&f, 0, MB_LEDGER_GPU_QUARANTINED);
        list = mb_gpu_keeper_json(f.keeper);
        assert_int_equal(json_array_size(list), 2);
        json_decref(list);
        open_nvml(&f, &nvml);
        mb_gpu_keeper_begin(f.keeper, nvml);
        mb_nvml_close(nvml);
        wait_state(&f, 0, MB_LEDGER_GPU_FREE);
        wait_state(&f, 1, MB_LEDGER_GPU_FREE);
        assert_reason(&f, NULL);
        end(&f);
    }
}

static void take_first(struct fixture *f, struct mb_bundle_spec *bundle)
{
    *bundle = (struct mb_bundle_spec){.pg = {{7}}, .want = {{MB_RESOURCE_GPU, 1}}, .n_want = 1};
    assert_int_equal(mb_ledger_commit(f->ledger, bundle, 1, NULL), 0);
    mb_ledger_hold(f->ledger, &bundle->pg);
}

static void give_back(struct fixture *f, const struct mb_bundle_spec *bundle)
{
    mb_ledger_remove(f->ledger, &bundle->pg, 0);
    mb_ledger_unhold(f->ledger, &bundle->pg);
    mb_gpu_keeper_look(f->keeper);
}

/* What runs keeps its device, which nobody gets after it before the driver has spoken. */
static void what_runs_while_a_driver_is_silent(void **state)
{
    struct mb_nvml *nvml;
    struct mb_err err = {0};
    struct mb_bundle_spec bundle;
    struct fixture f;

    (void)state;
    begin(&f, free_before);
    take_first(&f, &bundle);
    assert_int_equal(create_with(&f, NULL, &err), 0);
    later_ms += 30000;
    wait_state(&f, 1, MB_LEDGER_GPU_QUARANTINED);
    assert_int_equal(mb_ledger_gpu_state(f.ledger, 0), MB_LEDGER_GPU_TAKEN);
    give_back(&f, &bundle);
    wait_state(&f, 0, MB_LEDGER_GPU_QUARANTINED);
    open_nvml(&f, &nvml);
    mb_gpu_keeper_begin(f.keeper, nvml);
    mb_nvml_close(nvml);
    wait_state(&f, 0, MB_LEDGER_GPU_FREE);
    wait_state(&f, 1, MB_LEDGER_GPU_FREE);
    end(&f);
}

/* A restarted agent knows them without a driver: how many, their words, the first one's model. */
static void what_the_devices_were_called(void **state)
{
    struct mb_gpus former;
    struct mb_nvml *nvml;
    struct mb_amd amd;
    struct mb_err err = {0};
    struct fixture f;

    (void)state;
    begin(&f, in_doubt);
    mb_gpu_keeper_former(f.dir, &former); /* of a version that did not keep them */
    assert_int_equal(former.count, 0);
    assert_int_equal(
        mb_gpus_detect(&(struct mb_gpu_lists){.cuda = "1,MIG-fake"}, &f.gpus, &nvml, &amd, &err),
        0);
    assert_int_equal(create_with(&f, nvml, &err), 0);
    mb_nvml_close(nvml);
    mb_gpu_keeper_former(f.dir, &former);
    assert_int_equal(former.vendor, MB_GPU_NVIDIA);
    assert_int_equal(former.count, 2);
    assert_int_equal(former.chosen.n, 2);
    assert_string_equal(former.chosen.at[0].word, "1");
    assert_string_equal(former.chosen.at[1].word, "MIG-fake");
    assert_string_equal(former.model, "Fake H100");
    mb_gpu_keeper_former("/nonexistent", &former);
    assert_int_equal(former.count, 0);
    end(&f);
}

/* ---- a driver that does not say what is in use ---- */

static void processes_are_counted_instead(void **state)
{
    struct mb_err err = {0};
    struct mb_bundle_spec bundle;
    struct mb_buf text = {0};
    struct fixture f;

    (void)state;
    atomic_store(&fake_nvml_memory_status, 3 /* not supported */);
    atomic_store(&fake_nvml_processes, 1);
    begin(&f, "[]");
    assert_int_equal(create(&f, &err), 0);
    wait_state(&f, 0, MB_LEDGER_GPU_FREE);
    wait_state(&f, 1, MB_LEDGER_GPU_FREE);
    take_first(&f, &bundle);
    atomic_store(&fake_nvml_processes, 2);
    give_back(&f, &bundle);
    later_ms += 30000;
    wait_reason(&f, "GPU 0: 2 processes still on it 30 s after its job's processes ended "
                    "(baseline 1)");
    assert_int_equal(mb_ledger_gpu_state(f.ledger, 1), MB_LEDGER_GPU_FREE);
    assert_int_equal(mb_fs_read(f.file, 4096, &text, &err), MB_OK);
    assert_non_null(strstr(mb_buf_str(&text), "\"baseline_processes\": 1"));
    mb_buf_close(&text);
    atomic_store(&fake_nvml_processes, 1);
    wait_state(&f, 0, MB_LEDGER_GPU_FREE);
    end(&f);
    atomic_store(&fake_nvml_memory_status, 0);
    atomic_store(&fake_nvml_processes, 0);
}

/* Of the driver that says neither, and of a device beyond those that it has. */
static void what_cannot_be_proved_is_free_after_its_job(void **state)
{
    (void)state;
    for (unsigned n_gpus = 2; n_gpus <= 3; n_gpus++) {
        struct mb_err err = {0};
        struct fixture f;

        if (n_gpus == 2) {
            atomic_store(&fake_nvml_memory_status, 3);
            atomic_store(&fake_nvml_processes_status, 3);
        }
        begin_with(&f, "[]", n_gpus);
        assert_int_equal(create(&f, &err), 0);
        for (size_t device = 0; device < n_gpus; device++)
            wait_state(&f, device, MB_LEDGER_GPU_FREE);
        assert_int_equal(mb_ledger_set_gpu(f.ledger, n_gpus - 1, MB_LEDGER_GPU_CHECKED), 1);
        mb_gpu_keeper_look(f.keeper);
        wait_state(&f, n_gpus - 1, MB_LEDGER_GPU_FREE);
        assert_reason(&f, NULL);
        end(&f);
        atomic_store(&fake_nvml_memory_status, 0);
        atomic_store(&fake_nvml_processes_status, 0);
    }
}

/* A driver that fails is none that has nothing to say. */
static void a_failure_is_no_proof(void **state)
{
    const int failures[][2] = {{15 /* lost */, 0}, {3, 999}};

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        struct mb_err err = {0};
        struct fixture f;

        atomic_store(&fake_nvml_memory_status, failures[i][0]);
        atomic_store(&fake_nvml_processes_status, failures[i][1]);
        begin(&f, in_doubt);
        assert_int_equal(create(&f, &err), 0);
        later_ms += 30000;
        wait_reason(&f, "GPU 0: the driver does not say what is in use");
        end(&f);
        atomic_store(&fake_nvml_memory_status, 0);
        atomic_store(&fake_nvml_processes_status, 0);
    }
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
        cmocka_unit_test(a_silent_driver_is_a_quarantine_of_all),
        cmocka_unit_test(what_runs_while_a_driver_is_silent),
        cmocka_unit_test(what_the_devices_were_called),
        cmocka_unit_test(processes_are_counted_instead),
        cmocka_unit_test(what_cannot_be_proved_is_free_after_its_job),
        cmocka_unit_test(a_failure_is_no_proof),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
