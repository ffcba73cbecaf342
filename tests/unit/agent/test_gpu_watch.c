/* Baseline, patience, quarantine and its end; then the same through the ledger. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "agent/gpu_watch.h"
#include "agent/ledger.h"

#define MIB ((uint64_t)1 << 20)

static enum mb_gpu_verdict sample(struct mb_gpu_watch *w, uint64_t used_mib, uint64_t now_ms)
{
    struct mb_gpu_sample used = {MB_GPU_BY_MEMORY, used_mib * MIB};

    return mb_gpu_watch_sample(w, "3", &used, now_ms);
}

static void idle(struct mb_gpu_watch *w, uint64_t used_mib)
{
    struct mb_gpu_sample used = {MB_GPU_BY_MEMORY, used_mib * MIB};

    mb_gpu_watch_idle(w, &used);
}

static void test_free_wait_quarantine(void **state)
{
    struct mb_gpu_watch w = {0};

    (void)state;
    idle(&w, 900);
    idle(&w, 300); /* the least counts */
    idle(&w, 700);
    mb_gpu_watch_begin(&w, 1000);
    mb_gpu_watch_begin(&w, 9000); /* the first time counts */
    assert_int_equal(sample(&w, 40000, 1000), MB_GPU_WAIT);
    assert_int_equal(sample(&w, 813, 30999), MB_GPU_WAIT);
    assert_string_equal(w.reason, "");
    assert_int_equal(sample(&w, 14000, 31000), MB_GPU_QUARANTINE);
    assert_string_equal(w.reason, "GPU 3: 14000 MiB still in use 30 s after its job's processes "
                                  "ended (baseline 300 MiB)");
    idle(&w, 1); /* in doubt: no baseline */
    assert_int_equal(sample(&w, 813, 99000), MB_GPU_QUARANTINE);
    assert_int_equal(sample(&w, 812, 99500), MB_GPU_FREE);
    assert_string_equal(w.reason, "");
    mb_gpu_watch_begin(&w, 200000); /* a new job gets all the patience again */
    assert_int_equal(sample(&w, 40000, 201000), MB_GPU_WAIT);
    assert_int_equal(sample(&w, 0, 202000), MB_GPU_FREE);
}

static void test_a_silent_driver_is_no_yes(void **state)
{
    struct mb_gpu_watch w = {0};

    (void)state;
    mb_gpu_watch_begin(&w, 0);
    assert_int_equal(mb_gpu_watch_sample(&w, "0", NULL, 29999), MB_GPU_WAIT);
    assert_int_equal(mb_gpu_watch_sample(&w, "0", NULL, 30000), MB_GPU_QUARANTINE);
    assert_string_equal(w.reason, "GPU 0: the driver does not say what is in use");
    assert_int_equal(sample(&w, 512, 30500), MB_GPU_FREE); /* no baseline: the slack alone */
}

static void test_the_first_sample_is_the_baseline(void **state)
{
    struct mb_gpu_watch w = {0};

    (void)state;
    mb_gpu_watch_first(&w, 0);
    assert_int_equal(mb_gpu_watch_sample(&w, "0", NULL, 10), MB_GPU_WAIT);
    assert_int_equal(sample(&w, 3000, 20), MB_GPU_FREE); /* a display, say */
    assert_int_equal(w.has_baseline, 1);
    assert_int_equal(w.baseline.value, 3000 * MIB);
    mb_gpu_watch_begin(&w, 1000); /* a job's: no baseline any more */
    assert_int_equal(sample(&w, 40000, 2000), MB_GPU_WAIT);
    assert_int_equal(w.baseline.value, 3000 * MIB);
    assert_int_equal(sample(&w, 3512, 3000), MB_GPU_FREE);
    assert_int_equal(w.baseline.value, 3000 * MIB);
}

static void test_a_driver_that_does_not_return(void **state)
{
    static const char hung[] = "GPU 3: the driver has not answered for 30 s";
    struct mb_gpu_watch w = {0};

    (void)state;
    assert_int_equal(mb_gpu_watch_silence(&w, "3", 1000, 30999), MB_GPU_FREE);
    mb_gpu_watch_begin(&w, 1000);
    assert_int_equal(mb_gpu_watch_silence(&w, "3", 2000, 31999), MB_GPU_WAIT);
    assert_string_equal(w.reason, "");
    assert_int_equal(mb_gpu_watch_silence(&w, "3", 2000, 32000), MB_GPU_QUARANTINE);
    assert_string_equal(w.reason, hung);
    assert_int_equal(mb_gpu_watch_silence(&w, "3", 2000, 99000), MB_GPU_QUARANTINE);
    assert_int_equal(sample(&w, 14000, 99100),
                     MB_GPU_QUARANTINE); /* it answers: for what it says */
    assert_non_null(strstr(w.reason, "14000 MiB still in use"));
    assert_int_equal(mb_gpu_watch_silence(&w, "3", 99200, 99300), MB_GPU_QUARANTINE);
    assert_non_null(strstr(w.reason, "14000 MiB still in use"));
    assert_int_equal(mb_gpu_watch_silence(&w, "3", 99200, 129200), MB_GPU_QUARANTINE);
    assert_string_equal(w.reason, hung);
    assert_int_equal(sample(&w, 512, 130000), MB_GPU_FREE);
    assert_string_equal(w.reason, "");
    assert_int_equal(mb_gpu_watch_silence(&w, "3", 130000, 160000), MB_GPU_QUARANTINE); /* no job */
    assert_int_equal(w.is_watched, 1);
    assert_int_equal(sample(&w, 512, 160001), MB_GPU_FREE);
}

/* ---- a driver that does not say what memory is in use ---- */

static enum mb_gpu_verdict count(struct mb_gpu_watch *w, uint64_t processes, uint64_t now_ms)
{
    struct mb_gpu_sample used = {MB_GPU_BY_PROCESSES, processes};

    return mb_gpu_watch_sample(w, "3", &used, now_ms);
}

static void test_processes_instead_of_memory(void **state)
{
    struct mb_gpu_watch w = {0};

    (void)state;
    mb_gpu_watch_first(&w, 0);
    assert_int_equal(count(&w, 1, 10), MB_GPU_FREE);
    assert_int_equal(w.baseline.measure, MB_GPU_BY_PROCESSES);
    mb_gpu_watch_begin(&w, 1000);
    assert_int_equal(count(&w, 2, 30999), MB_GPU_WAIT); /* one more than before is too many */
    assert_int_equal(count(&w, 3, 31000), MB_GPU_QUARANTINE);
    assert_string_equal(
        w.reason,
        "GPU 3: 3 processes still on it 30 s after its job's processes ended (baseline 1)");
    assert_int_equal(count(&w, 1, 31500), MB_GPU_FREE);
    assert_string_equal(w.reason, "");
}

static void test_a_baseline_of_something_else_is_none(void **state)
{
    struct mb_gpu_watch w = {0};

    (void)state;
    idle(&w, 3000);
    mb_gpu_watch_begin(&w, 0);
    assert_int_equal(count(&w, 1, 10), MB_GPU_WAIT); /* not fewer than 3000 Mi processes */
    assert_int_equal(count(&w, 0, 20), MB_GPU_FREE);
    assert_int_equal(mb_gpu_watch_idle(&w, &(struct mb_gpu_sample){MB_GPU_BY_PROCESSES, 5}), 1);
    mb_gpu_watch_begin(&w, 1000);
    assert_int_equal(sample(&w, 513, 1010), MB_GPU_WAIT); /* a driver that says it again */
    assert_int_equal(sample(&w, 512, 1020), MB_GPU_FREE);
}

static void test_nothing_said_is_nothing_to_wait_for(void **state)
{
    struct mb_gpu_sample nothing = {MB_GPU_BY_NOTHING, 0};
    struct mb_gpu_watch w = {0};

    (void)state;
    assert_int_equal(mb_gpu_watch_idle(&w, &nothing), 0);
    mb_gpu_watch_first(&w, 0);
    assert_int_equal(mb_gpu_watch_sample(&w, "3", &nothing, 10), MB_GPU_FREE);
    assert_int_equal(w.has_baseline, 0);
    mb_gpu_watch_begin(&w, 1000);
    assert_int_equal(mb_gpu_watch_silence(&w, "3", 1000, 31000), MB_GPU_QUARANTINE);
    assert_int_equal(mb_gpu_watch_sample(&w, "3", &nothing, 31001), MB_GPU_FREE);
}

static struct mb_bundle_spec bundle(uint8_t pg, uint32_t gpus)
{
    struct mb_bundle_spec s = {.pg = {{pg}}, .n_want = 1};

    strcpy(s.want[0].name, MB_RESOURCE_GPU);
    s.want[0].units = gpus;
    return s;
}

/* ray#42861: the next job must not get a device that the last one still holds memory on. */
static void test_the_ledger_gives_no_device_in_doubt(void **state)
{
    struct mb_resource total = {MB_RESOURCE_GPU, 2};
    struct mb_bundle_spec one = bundle(1, 1), two = bundle(2, 2), other = bundle(3, 1);
    struct mb_ledger *l = NULL;

    (void)state;
    assert_int_equal(mb_ledger_create(&total, 1, &l, NULL), MB_OK);
    mb_ledger_check_gpus(l);
    assert_int_equal(mb_ledger_prepare(l, &one, 1, NULL), MB_OK);
    mb_ledger_remove(l, &one.pg, 0); /* nothing ran: free at once */
    assert_int_equal(mb_ledger_gpu_state(l, 0), MB_LEDGER_GPU_FREE);
    assert_int_equal(mb_ledger_commit(l, &one, 1, NULL), MB_OK);
    mb_ledger_hold(l, &one.pg);
    mb_ledger_remove(l, &one.pg, 0);
    mb_ledger_unhold(l, &one.pg);
    assert_int_equal(mb_ledger_gpu_state(l, 0), MB_LEDGER_GPU_CHECKED);
    assert_int_equal(mb_ledger_available(l, 0), 1);
    assert_null(mb_ledger_invariant(l));
    assert_int_equal(mb_ledger_prepare(l, &two, 1, NULL), MB_EFULL);
    assert_int_equal(mb_ledger_prepare(l, &other, 1, NULL), MB_OK);
    assert_int_equal(mb_ledger_find(l, &other.pg, 0)->gpus[0], 1);
    assert_int_equal(mb_ledger_set_gpu(l, 1, MB_LEDGER_GPU_FREE), 0); /* it is taken */
    assert_int_equal(mb_ledger_set_gpu(l, 0, MB_LEDGER_GPU_QUARANTINED), 1);
    assert_int_equal(mb_ledger_set_gpu(l, 0, MB_LEDGER_GPU_QUARANTINED), 0);
    assert_int_equal(mb_ledger_total(l, 0)->units, 1);
    assert_int_equal(mb_ledger_available(l, 0), 0);
    assert_null(mb_ledger_invariant(l));
    mb_ledger_remove(l, &other.pg, 0);
    assert_int_equal(mb_ledger_set_gpu(l, 0, MB_LEDGER_GPU_FREE), 1);
    assert_int_equal(mb_ledger_total(l, 0)->units, 2);
    assert_int_equal(mb_ledger_prepare(l, &two, 1, NULL), MB_OK);
    assert_null(mb_ledger_invariant(l));
    mb_ledger_destroy(l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_free_wait_quarantine),
        cmocka_unit_test(test_a_silent_driver_is_no_yes),
        cmocka_unit_test(test_the_first_sample_is_the_baseline),
        cmocka_unit_test(test_a_driver_that_does_not_return),
        cmocka_unit_test(test_processes_instead_of_memory),
        cmocka_unit_test(test_a_baseline_of_something_else_is_none),
        cmocka_unit_test(test_nothing_said_is_nothing_to_wait_for),
        cmocka_unit_test(test_the_ledger_gives_no_device_in_doubt),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
