/* Groups that no driver speaks for. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "agent/orphans.h"

static struct mb_bundle_spec spec_of(uint8_t group, uint8_t job)
{
    struct mb_bundle_spec s = {.n_want = 1};

    s.pg.bytes[0] = group;
    s.pg.bytes[sizeof(s.pg.bytes) - 4] = job;
    strcpy(s.want[0].name, "mobula_slot");
    s.want[0].units = 1;
    return s;
}

static int has_gang(void *arg, const struct mb_pg_id *pg)
{
    return pg->bytes[0] == *(uint8_t *)arg;
}

static void test_orphans(void **state)
{
    const struct mb_resource totals[] = {{.name = "mobula_slot", .units = 100}};
    struct mb_bundle_spec driven = spec_of(1, 9), lost = spec_of(2, 9), own = spec_of(3, 0),
                          prepared = spec_of(4, 9), late = spec_of(5, 9);
    struct mb_pg_id out[MB_ORPHANS_MAX];
    struct mb_orphans o = {.n = 0};
    struct mb_ledger *l = NULL;
    uint8_t gang = 1;

    (void)state;
    assert_int_equal(mb_ledger_create(totals, 1, &l, NULL), 0);
    assert_int_equal(mb_ledger_commit(l, &driven, 1, NULL), 0);
    assert_int_equal(mb_ledger_commit(l, &lost, 1, NULL), 0);
    assert_int_equal(mb_ledger_commit(l, &own, 1, NULL), 0);
    assert_int_equal(mb_ledger_prepare(l, &prepared, 1, NULL), 0);
    assert_int_equal(mb_orphans_look(&o, l, has_gang, &gang, 1000, out), 0);
    assert_int_equal(o.n, 1);
    assert_int_equal(mb_ledger_commit(l, &late, 1, NULL), 0);
    assert_int_equal(mb_orphans_look(&o, l, has_gang, &gang, 50000, out), 0);
    assert_int_equal(mb_orphans_look(&o, l, has_gang, &gang, 1000 + MB_ORPHAN_MS, out), 1);
    assert_memory_equal(&out[0], &lost.pg, sizeof(lost.pg));
    assert_int_equal(mb_orphans_look(&o, l, has_gang, &gang, 1001 + MB_ORPHAN_MS, out), 0);
    gang = 5; /* its driver came; that of the first has gone */
    assert_int_equal(mb_orphans_look(&o, l, has_gang, &gang, 50000 + MB_ORPHAN_MS, out), 0);
    assert_int_equal(mb_orphans_look(&o, l, has_gang, &gang, 50000 + 2 * MB_ORPHAN_MS, out), 2);
    mb_ledger_remove(l, &lost.pg, 0);
    mb_ledger_remove(l, &driven.pg, 0);
    assert_int_equal(mb_orphans_look(&o, l, has_gang, &gang, 1000000, out), 0);
    assert_int_equal(o.n, 0);
    mb_ledger_destroy(l);
}

static void test_many(void **state)
{
    const struct mb_resource totals[] = {{.name = "mobula_slot", .units = 200}};
    struct mb_pg_id out[MB_ORPHANS_MAX];
    struct mb_orphans o = {.n = 0};
    struct mb_ledger *l = NULL;
    uint8_t none = 255;

    (void)state;
    assert_int_equal(mb_ledger_create(totals, 1, &l, NULL), 0);
    for (uint8_t i = 0; i < 2 * MB_ORPHANS_MAX; i++) {
        struct mb_bundle_spec s = spec_of(i, 9);

        assert_int_equal(mb_ledger_commit(l, &s, 1, NULL), 0);
    }
    mb_orphans_look(&o, l, has_gang, &none, 0, out);
    assert_int_equal(mb_orphans_look(&o, l, has_gang, &none, MB_ORPHAN_MS, out), MB_ORPHANS_MAX);
    mb_ledger_destroy(l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_orphans), cmocka_unit_test(test_many)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
