/* What is told of bundles that no driver speaks for. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "agent/group_rows.h"
#include "base/alloc.h"

#define PG "0700000000000000000000000000" /* and a job */

static struct mb_bundle_spec spec_of(uint8_t group, int index, uint32_t gpus)
{
    struct mb_bundle_spec s = {.index = index, .n_want = 2};

    s.pg.bytes[0] = group;
    s.pg.bytes[MB_PG_ID_BYTES - 4] = 1;
    strcpy(s.want[0].name, MB_RESOURCE_GPU);
    s.want[0].units = gpus;
    strcpy(s.want[1].name, MB_RESOURCE_SLOT);
    s.want[1].units = 1;
    return s;
}

static struct mb_ledger *ledger(void)
{
    const struct mb_resource totals[] = {{MB_RESOURCE_GPU, 8}, {MB_RESOURCE_SLOT, 100}};
    struct mb_bundle_spec held[] = {spec_of(7, 0, 2), spec_of(7, 3, 1), spec_of(9, 0, 1)},
                          prepared = spec_of(7, 4, 1);
    struct mb_ledger *l = NULL;

    assert_int_equal(mb_ledger_create(totals, 2, &l, NULL), 0);
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(mb_ledger_commit(l, &held[i], 1, NULL), 0);
    assert_int_equal(mb_ledger_prepare(l, &prepared, 1, NULL), 0);
    return l;
}

static int is_group(void *arg, const struct mb_pg_id *pg)
{
    return pg->bytes[0] == *(const uint8_t *)arg;
}

static void test_rows(void **state)
{
    static const struct {
        const char *name;
        double available, total;
    } want[] = {{"mobula_gpu", 4 - 1, 8},
                {"mobula_slot", 96, 100},
                {"bundle_group_" PG "01000000", 2000, 2000},
                {"bundle_group_0_" PG "01000000", 1000, 1000},
                {"mobula_gpu_group_" PG "01000000", 0, 3},
                {"mobula_gpu_group_0_" PG "01000000", 0, 2},
                {"mobula_slot_group_" PG "01000000", 0, 2},
                {"mobula_slot_group_0_" PG "01000000", 0, 1},
                {"bundle_group_3_" PG "01000000", 1000, 1000},
                {"mobula_gpu_group_3_" PG "01000000", 0, 1},
                {"mobula_slot_group_3_" PG "01000000", 0, 1}};
    struct mb_gcs_resource *available, *total;
    struct mb_ledger *l = ledger();
    struct mb_arena a = {0};
    uint8_t group = 7;
    size_t n = 0;

    (void)state;
    assert_int_equal(mb_group_rows(&a, l, is_group, &group, &available, &total, &n), 0);
    assert_int_equal(n, sizeof(want) / sizeof(want[0]));
    for (size_t i = 0; i < n; i++) {
        assert_string_equal(total[i].name, want[i].name);
        assert_string_equal(available[i].name, want[i].name);
        assert_true(total[i].amount == want[i].total);
        assert_true(available[i].amount == want[i].available);
    }
    group = 1; /* all have their driver */
    assert_int_equal(mb_group_rows(&a, l, is_group, &group, &available, &total, &n), 0);
    assert_int_equal(n, 2);
    mb_arena_close(&a);
    mb_ledger_destroy(l);
}

static void test_many(void **state)
{
    const struct mb_resource totals[] = {{MB_RESOURCE_GPU, 1000}, {MB_RESOURCE_SLOT, 1000}};
    struct mb_gcs_resource *available, *total;
    struct mb_ledger *l = NULL;
    struct mb_arena a = {0};
    uint8_t group = 7;
    size_t n = 0;

    (void)state;
    assert_int_equal(mb_ledger_create(totals, 2, &l, NULL), 0);
    for (int i = 0; i < 2 * MB_GROUP_ROWS_BUNDLES_MAX; i++) {
        struct mb_bundle_spec s = spec_of(group, i, 1);

        assert_int_equal(mb_ledger_commit(l, &s, 1, NULL), 0);
    }
    assert_int_equal(mb_group_rows(&a, l, is_group, &group, &available, &total, &n), 0);
    assert_int_equal(n, 2 + 3 + MB_GROUP_ROWS_BUNDLES_MAX * 3);
    mb_arena_close(&a);
    mb_ledger_destroy(l);
}

static void test_memory(void **state)
{
    struct mb_ledger *l = ledger();

    (void)state;
    for (unsigned long nth = 1;; nth++) {
        struct mb_gcs_resource *available, *total;
        struct mb_arena a = {0};
        uint8_t group = 7;
        size_t n = 0;
        int rc, failed;

        mb_alloc_fail_nth(nth);
        rc = mb_group_rows(&a, l, is_group, &group, &available, &total, &n);
        failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        mb_arena_close(&a);
        assert_int_equal(rc, failed ? MB_ENOMEM : 0);
        if (!failed)
            break;
    }
    mb_ledger_destroy(l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_many),
        cmocka_unit_test(test_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
