/* GPUs of drivers in the node's ledger: whole, exclusive, across a restart and a voided bundle. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "agent/job_gpus.h"
#include "base/alloc.h"

static struct mb_ledger *make(uint32_t gpus)
{
    struct mb_resource totals[] = {{MB_RESOURCE_GPU, gpus}, {MB_RESOURCE_SLOT, 4}};
    struct mb_ledger *l = NULL;

    assert_int_equal(mb_ledger_create(totals, 2, &l, NULL), MB_OK);
    return l;
}

static uint32_t n_free(const struct mb_ledger *l)
{
    uint32_t total, left;

    mb_job_gpus_count(l, &total, &left);
    return left;
}

static void claims(struct mb_ledger *l, const char *id, uint32_t n, const char *expected)
{
    struct mb_err err = {0};
    char *visible = NULL;

    assert_int_equal(mb_job_gpus_claim(&(struct mb_job_gpus){.ledger = l}, id, n, &visible, &err),
                     expected ? MB_OK : MB_EFULL);
    if (expected)
        assert_string_equal(visible, expected);
    mb_free(visible);
    assert_true(l == NULL || mb_ledger_invariant(l) == NULL);
}

static void devices_are_exclusive(void **state)
{
    struct mb_ledger *l = make(4);

    (void)state;
    claims(l, "a", 1, "0");
    claims(l, "b", 2, "1,2");
    claims(l, "c", 2, NULL);
    assert_int_equal(mb_job_gpus_release(l, "a"), 1);
    assert_int_equal(mb_job_gpus_release(l, "a"), 0);
    claims(l, "c", 2, "0,3");
    assert_int_equal(n_free(l), 0);
    mb_ledger_destroy(l);
    claims(NULL, "a", 1, NULL);
    assert_int_equal(mb_job_gpus_release(NULL, "a"), 0);
}

/* The head does not know these bundles and may release them; the devices stay taken all the same.
 */
static void a_voided_bundle_stays_taken(void **state)
{
    struct mb_ledger *l = make(2), *restarted = make(2);
    char *text;

    (void)state;
    claims(l, "a", 2, "0,1");
    assert_int_equal(mb_ledger_release_unused(l, NULL, 0), 1);
    assert_int_equal(n_free(l), 0);
    text = mb_ledger_dump(l);
    assert_int_equal(mb_ledger_load(restarted, text, NULL), MB_OK);
    mb_free(text);
    assert_int_equal(mb_job_gpus_adopt(restarted, "a"), 1);
    assert_int_equal(mb_job_gpus_adopt(restarted, "b"), 0);
    mb_ledger_release_unused(restarted, NULL, 0);
    assert_int_equal(n_free(restarted), 0);
    assert_int_equal(mb_job_gpus_release(restarted, "a"), 1);
    assert_int_equal(n_free(restarted), 2);
    assert_int_equal(mb_job_gpus_release(l, "a"), 1);
    assert_int_equal(n_free(l), 2);
    mb_ledger_destroy(l);
    mb_ledger_destroy(restarted);
}

static void count_change(void *arg)
{
    ++*(int *)arg;
}

static void allocations_fail(void **state)
{
    struct mb_err err = {0};

    (void)state;
    for (unsigned long nth = 1;; nth++) {
        int changes = 0;
        struct mb_job_gpus g = {make(2),      NULL,    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
                                count_change, &changes};
        struct mb_job_env env = {0};
        int rc, failed;

        mb_alloc_fail_nth(nth);
        rc = mb_job_gpus_take(&g, "a", 2, &env, &err);
        failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        assert_int_equal(rc, failed ? MB_ENOMEM : MB_OK);
        assert_int_equal(n_free(g.ledger), failed ? 2 : 0);
        assert_int_equal(changes, failed ? 0 : 1);
        if (!failed) {
            assert_string_equal(mb_job_env_get(&env, "CUDA_VISIBLE_DEVICES"), "0,1");
            assert_string_equal(mb_job_env_get(&env, "CUDA_DEVICE_ORDER"), "PCI_BUS_ID");
            mb_job_gpus_give_back(&g, "a");
            mb_job_gpus_give_back(&g, "a");
            assert_int_equal(changes, 2);
            assert_int_equal(n_free(g.ledger), 2);
        }
        mb_job_env_close(&env);
        mb_ledger_destroy(g.ledger);
        if (!failed)
            return;
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(devices_are_exclusive),
        cmocka_unit_test(a_voided_bundle_stays_taken),
        cmocka_unit_test(allocations_fail),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
