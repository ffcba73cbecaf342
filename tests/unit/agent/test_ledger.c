/* The ledger: all or nothing, holds, fence, dump and load, a seeded random walk, allocation sweep.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <math.h>
#include "agent/adrift.h"
#include "agent/ledger.h"
#include "base/alloc.h"
#include "gcs/client.h"

static struct mb_pg_id pg_of(unsigned n)
{
    struct mb_pg_id pg = {{0}};

    memcpy(pg.bytes, &n, sizeof(n));
    return pg;
}

static struct mb_bundle_spec spec_of(unsigned pg, int32_t index, uint32_t gpus, uint32_t slots)
{
    struct mb_bundle_spec s = {.pg = pg_of(pg), .index = index};

    if (gpus > 0) {
        strcpy(s.want[s.n_want].name, MB_RESOURCE_GPU);
        s.want[s.n_want++].units = gpus;
    }
    strcpy(s.want[s.n_want].name, MB_RESOURCE_SLOT);
    s.want[s.n_want++].units = slots;
    return s;
}

static struct mb_ledger *make(uint32_t gpus, uint32_t slots)
{
    struct mb_resource totals[2] = {{MB_RESOURCE_GPU, gpus}, {MB_RESOURCE_SLOT, slots}};
    struct mb_ledger *l = NULL;

    assert_int_equal(mb_ledger_create(totals, 2, &l, NULL), MB_OK);
    return l;
}

static void test_all_or_nothing(void **state)
{
    struct mb_ledger *l = make(8, 8);
    struct mb_bundle_spec two[2] = {spec_of(1, 0, 4, 4), spec_of(1, 1, 5, 4)};
    struct mb_err err;

    (void)state;
    assert_int_equal(mb_ledger_prepare(l, two, 2, &err), MB_EFULL);
    assert_string_equal(err.text, "9 mobula_gpu wanted, 8 free");
    assert_int_equal(mb_ledger_count(l), 0);
    two[1] = spec_of(1, 1, 4, 4);
    assert_int_equal(mb_ledger_prepare(l, two, 2, &err), MB_OK);
    assert_int_equal(mb_ledger_prepare(l, two, 2, &err), MB_OK);
    assert_int_equal(mb_ledger_available(l, 0), 0);
    assert_int_equal(mb_ledger_commit(l, two, 2, &err), MB_OK);
    assert_int_equal(mb_ledger_commit(l, two, 2, &err), MB_OK);
    assert_int_equal(mb_ledger_find(l, &two[1].pg, 1)->gpus[0], 4);
    assert_null(mb_ledger_invariant(l));
    two[0] = spec_of(2, 0, 0, 1);
    assert_int_equal(mb_ledger_prepare(l, two, 1, &err), MB_EFULL);
    strcpy(two[0].want[0].name, "CPU");
    assert_int_equal(mb_ledger_prepare(l, two, 1, &err), MB_EINVAL);
    two[0] = two[1];
    assert_int_equal(mb_ledger_prepare(l, two, 2, &err), MB_EINVAL);
    two[0] = spec_of(1, 0, 2, 4);
    assert_int_equal(mb_ledger_prepare(l, two, 1, &err), MB_ESTATE);
    mb_ledger_destroy(l);
}

static void test_held_until_gone(void **state)
{
    struct mb_ledger *l = make(2, 2);
    struct mb_bundle_spec one = spec_of(7, 0, 2, 2);
    uint64_t version;

    (void)state;
    assert_int_equal(mb_ledger_commit(l, &one, 1, NULL), MB_OK); /* late: never prepared */
    assert_true(mb_ledger_is_committed(l, &one.pg));
    mb_ledger_hold(l, &one.pg);
    assert_int_equal(mb_ledger_remove(l, &one.pg, 0), 1);
    assert_int_equal(mb_ledger_remove(l, &one.pg, 0), 1);
    assert_false(mb_ledger_is_committed(l, &one.pg));
    assert_int_equal(mb_ledger_available(l, 0), 0);
    assert_int_equal(mb_ledger_prepare(l, &one, 1, NULL), MB_ESTATE);
    assert_int_equal(mb_ledger_commit(l, &one, 1, NULL), MB_ESTATE);
    version = mb_ledger_version(l);
    mb_ledger_unhold(l, &one.pg);
    assert_true(mb_ledger_version(l) > version);
    assert_int_equal(mb_ledger_available(l, 0), 2);
    assert_int_equal(mb_ledger_count(l), 0);
    assert_int_equal(mb_ledger_remove(l, &one.pg, 0), 0);
    mb_ledger_destroy(l);
}

static void test_release_unused(void **state)
{
    struct mb_ledger *l = make(4, 4);
    struct mb_bundle_spec s[3] = {spec_of(1, 0, 1, 1), spec_of(2, 0, 1, 1), spec_of(3, 0, 1, 1)};

    (void)state;
    assert_int_equal(mb_ledger_commit(l, s, 3, NULL), MB_OK);
    mb_ledger_hold(l, &s[1].pg);
    assert_int_equal(mb_ledger_release_unused(l, &s[2], 1), 2);
    assert_int_equal(mb_ledger_count(l), 2);
    assert_int_equal(mb_ledger_find(l, &s[1].pg, 0)->state, MB_BUNDLE_RELEASING);
    assert_int_equal(mb_ledger_release_unused(l, &s[2], 1), 0);
    mb_ledger_unhold(l, &s[1].pg);
    assert_int_equal(mb_ledger_count(l), 1);
    mb_ledger_destroy(l);
}

static void test_fence(void **state)
{
    struct mb_ledger *l = make(1, 1);
    struct mb_pg_id first = pg_of(1), many;
    struct mb_err err;

    (void)state;
    assert_int_equal(mb_ledger_fence(l, &first, 2, &err), MB_OK);
    assert_int_equal(mb_ledger_fence(l, &first, 1, &err), MB_ESTATE);
    assert_string_equal(err.text, "attempt 1 is older than attempt 2 seen on this node");
    assert_int_equal(mb_ledger_fence(l, &first, 2, &err), MB_OK);
    mb_ledger_hold(l, &first);
    for (unsigned i = 2; i < 1000; i++) {
        many = pg_of(i);
        assert_int_equal(mb_ledger_fence(l, &many, 1, &err), MB_OK);
    }
    assert_int_equal(mb_ledger_fence(l, &first, 1, &err), MB_ESTATE); /* held: never forgotten */
    mb_ledger_destroy(l);
}

static void test_units(void **state)
{
    uint32_t u = 9;

    (void)state;
    assert_int_equal(mb_ledger_units("x", 3.0, &u, NULL), MB_OK);
    assert_int_equal(u, 3);
    assert_int_equal(mb_ledger_units("x", 0.5, &u, NULL), MB_EINVAL);
    assert_int_equal(mb_ledger_units("x", -1, &u, NULL), MB_EINVAL);
    assert_int_equal(mb_ledger_units("x", 1e9, &u, NULL), MB_EINVAL);
    assert_int_equal(mb_ledger_units("x", (double)NAN, &u, NULL), MB_EINVAL);
}

static void test_dump_and_load(void **state)
{
    struct mb_ledger *l = make(8, 8), *again = make(8, 8), *small = make(1, 8);
    struct mb_bundle_spec s[3] = {spec_of(1, 0, 2, 2), spec_of(2, 1, 3, 3), spec_of(3, 0, 0, 2)};
    struct mb_err err;
    char *text, *text2;

    (void)state;
    assert_int_equal(mb_ledger_prepare(l, s, 3, NULL), MB_OK);
    assert_int_equal(mb_ledger_commit(l, &s[1], 1, NULL), MB_OK);
    mb_ledger_remove(l, &s[0].pg, 0);
    assert_int_equal(mb_ledger_fence(l, &s[1].pg, 3, &err), MB_OK);
    assert_int_equal(mb_ledger_newest(l, &s[1].pg), 3);
    text = mb_ledger_dump(l);
    assert_int_equal(mb_ledger_load(again, text, &err), MB_OK);
    assert_null(mb_ledger_invariant(again));
    text2 = mb_ledger_dump(again);
    assert_string_equal(text, text2);
    assert_int_equal(mb_ledger_find(again, &s[1].pg, 1)->gpus[0], 2);
    assert_int_equal(mb_ledger_fence(again, &s[1].pg, 2, &err), MB_ESTATE); /* survives a restart */
    assert_int_equal(mb_ledger_load(again, text, &err), MB_ECORRUPT);       /* not empty */
    assert_int_equal(mb_ledger_load(small, text, &err), MB_ECORRUPT);
    assert_int_equal(mb_ledger_count(small), 0);
    assert_null(mb_ledger_invariant(small));
    assert_int_equal(mb_ledger_load(small, "[{}]", &err), MB_ECORRUPT);
    assert_int_equal(mb_ledger_load(small, "{\"bundles\":[{}]}", &err), MB_ECORRUPT);
    assert_int_equal(mb_ledger_load(small, "{\"bundles\":[],\"fences\":[{\"gang\":\"00\"}]}", &err),
                     MB_ECORRUPT);
    assert_int_equal(mb_ledger_load(small, "nonsense", &err), MB_ECORRUPT);
    mb_free(text);
    mb_free(text2);
    mb_ledger_destroy(l);
    mb_ledger_destroy(again);
    mb_ledger_destroy(small);
}

/* Every step keeps the invariant; a refused prepare changes nothing. */
static void random_walk(const unsigned first_seed)
{
    unsigned seed = first_seed;
    struct mb_ledger *l = make(8, 16);

    for (int step = 0; step < 300; step++) {
        struct mb_bundle_spec s[3];
        size_t n = 1 + (size_t)rand_r(&seed) % 3;
        uint64_t before = mb_ledger_version(l);
        struct mb_pg_id pg = pg_of((unsigned)rand_r(&seed) % 5);

        for (size_t i = 0; i < n; i++)
            s[i] = spec_of((unsigned)rand_r(&seed) % 5, rand_r(&seed) % 3,
                           (uint32_t)rand_r(&seed) % 5, (uint32_t)rand_r(&seed) % 5);
        switch (rand_r(&seed) % 6) {
        case 0:
            if (mb_ledger_prepare(l, s, n, NULL) != MB_OK)
                assert_int_equal(mb_ledger_version(l), before);
            break;
        case 1:
            mb_ledger_commit(l, s, n, NULL);
            break;
        case 2:
            mb_ledger_remove(l, &s[0].pg, s[0].index);
            break;
        case 3:
            mb_ledger_hold(l, &pg);
            break;
        case 4:
            mb_ledger_unhold(l, &pg);
            break;
        default:
            if (rand_r(&seed) % 8 == 0)
                mb_ledger_release_unused(l, s, n);
        }
        if (mb_ledger_invariant(l) != NULL)
            fail_msg("seed %u step %d: %s", first_seed, step, mb_ledger_invariant(l));
    }
    mb_ledger_destroy(l);
}

static void test_random(void **state)
{
    (void)state;
    for (unsigned seed = 1; seed <= 300; seed++)
        random_walk(seed);
}

static void test_allocation_sweep(void **state)
{
    struct mb_bundle_spec s[2] = {spec_of(1, 0, 2, 1), spec_of(1, 1, 1, 1)};
    struct mb_resource totals[2] = {{MB_RESOURCE_GPU, 4}, {MB_RESOURCE_SLOT, 4}};
    unsigned long n = 0;

    (void)state;
    do {
        struct mb_ledger *l = NULL;

        mb_alloc_fail_nth(++n);
        if (mb_ledger_create(totals, 2, &l, NULL) == MB_OK) {
            int rc = mb_ledger_prepare(l, s, 2, NULL);

            assert_true(rc == MB_OK || mb_alloc_did_fail());
            assert_int_equal(mb_ledger_count(l), rc == MB_OK ? 2 : 0);
            assert_null(mb_ledger_invariant(l));
        }
        mb_ledger_destroy(l);
    } while (mb_alloc_did_fail());
    mb_alloc_fail_nth(0);
    assert_true(n > 4);
}

/* A restarted agent: processes that a bundle waited for ended before it was noted. */
static void test_waits_for_nobody(void **state)
{
    struct mb_ledger *l = make(4, 4), *again = make(4, 4);
    struct mb_bundle_spec one = spec_of(1, 0, 2, 2), two = spec_of(2, 0, 1, 1);
    struct mb_pg_id pg = pg_of(1), held = pg_of(2);
    struct mb_err err;

    (void)state;
    assert_int_equal(mb_ledger_commit(l, &one, 1, &err), MB_OK);
    assert_int_equal(mb_ledger_commit(l, &two, 1, &err), MB_OK);
    mb_ledger_hold(l, &pg);
    mb_ledger_hold(l, &held);
    assert_int_equal(mb_ledger_remove(l, &pg, 0), 1);
    assert_int_equal(mb_ledger_remove(l, &held, 0), 1);
    char *text = mb_ledger_dump(l);
    assert_non_null(text);
    assert_int_equal(mb_ledger_load(again, text, &err), MB_OK);
    mb_free(text);
    mb_ledger_hold(again, &held); /* its ranks were found */
    assert_int_equal(mb_ledger_drop_unheld(again), 1);
    assert_null(mb_ledger_find(again, &pg, 0));
    assert_non_null(mb_ledger_find(again, &held, 0));
    assert_null(mb_ledger_invariant(again));
    assert_int_equal(mb_ledger_drop_unheld(again), 0);
    mb_ledger_destroy(again);
    mb_ledger_destroy(l);
}

/* What a head that is gone had sent: PREPARED, or committed without having been prepared. */
static void test_in_doubt(void **state)
{
    struct mb_ledger *l = make(0, 8);
    struct mb_bundle_spec prepared = spec_of(1, 0, 0, 1), late = spec_of(2, 0, 0, 1);
    struct mb_bundle_spec firm = spec_of(3, 0, 0, 1), used = spec_of(4, 0, 0, 1);
    struct mb_err err;

    (void)state;
    assert_int_equal(mb_ledger_prepare(l, &prepared, 1, &err), MB_OK);
    assert_int_equal(mb_ledger_commit(l, &late, 1, &err), MB_OK);
    assert_int_equal(mb_ledger_commit(l, &used, 1, &err), MB_OK);
    assert_int_equal(mb_ledger_prepare(l, &firm, 1, &err), MB_OK);
    mb_ledger_hold(l, &used.pg);
    assert_int_equal(mb_ledger_drop_stale(l), 0);
    assert_int_equal(mb_ledger_commit(l, &firm, 1, &err), MB_OK);
    assert_int_equal(mb_ledger_drop_stale(l), 2);
    assert_null(mb_ledger_find(l, &prepared.pg, 0));
    assert_null(mb_ledger_find(l, &late.pg, 0));
    assert_int_equal(mb_ledger_drop_stale(l), 0);
    assert_int_equal(mb_ledger_count(l), 2);
    assert_null(mb_ledger_invariant(l));
    mb_ledger_destroy(l);
}

/* The head took the node for dead: what runs stays, is offered again, and to nobody else. */
static void test_adrift(void **state)
{
    struct mb_ledger *l = make(8, 9), *restarted = make(8, 9);
    struct mb_bundle_spec runs = spec_of(1, 0, 8, 8), idle = spec_of(2, 0, 0, 1);
    struct mb_bundle_spec other = spec_of(3, 0, 2, 2), index = spec_of(1, 1, 8, 8);
    struct mb_err err;
    uint64_t version;
    char *text;

    (void)state;
    assert_int_equal(mb_ledger_commit(l, &runs, 1, &err), MB_OK);
    mb_ledger_hold(l, &runs.pg);
    assert_int_equal(mb_ledger_prepare(l, &idle, 1, &err), MB_OK);
    assert_int_equal(mb_ledger_offered(l, 0), 0);
    assert_int_equal(mb_ledger_set_adrift(l), 1);
    assert_int_equal(mb_ledger_count(l), 1);
    assert_int_equal(mb_ledger_available(l, 0), 0);
    assert_int_equal(mb_ledger_offered(l, 0), 8);
    assert_int_equal(mb_ledger_offered(l, 1), 9);
    assert_int_equal(mb_ledger_prepare(l, &other, 1, &err), MB_EFULL);
    assert_int_equal(mb_ledger_prepare(l, &index, 1, &err), MB_EFULL);
    text = mb_ledger_dump(l);
    assert_int_equal(mb_ledger_load(restarted, text, &err), MB_OK);
    assert_int_equal(mb_ledger_offered(restarted, 0), 8);
    free(text);
    version = mb_ledger_version(l);
    assert_int_equal(mb_ledger_prepare(l, &runs, 1, &err), MB_OK);
    assert_true(mb_ledger_version(l) != version);
    assert_int_equal(mb_ledger_offered(l, 0), 0);
    assert_int_equal(mb_ledger_commit(l, &runs, 1, &err), MB_OK);
    assert_int_equal(mb_ledger_find(l, &runs.pg, 0)->n_gpus, 8);
    assert_int_equal(mb_ledger_set_adrift(l), 1);
    assert_int_equal(mb_ledger_remove(l, &runs.pg, 0), 1); /* its processes end first */
    assert_int_equal(mb_ledger_offered(l, 0), 0);
    assert_null(mb_ledger_invariant(l));
    mb_ledger_unhold(l, &runs.pg);
    assert_int_equal(mb_ledger_offered(l, 0), 8);
    mb_ledger_destroy(l);
    mb_ledger_destroy(restarted);
}

static void test_what_became_of_an_adrift_one(void **state)
{
    const uint8_t own[MB_NODE_ID_BYTES] = {1}, other[MB_NODE_ID_BYTES] = {2};
    struct mb_gcs_bundle bundles[2] = {{.has_node = 0}, {.has_node = 1}};
    struct mb_gcs_pg pg = {.bundles = bundles, .n_bundles = 2, .state = MB_PG_RESCHEDULING};
    const char *why = NULL;

    (void)state;
    assert_int_equal(mb_adrift_decide(NULL, 0, own, 0, &why), MB_ADRIFT_LOST);
    assert_non_null(strstr(why, "removed"));
    assert_int_equal(mb_adrift_decide(&pg, 0, own, 5000, &why), MB_ADRIFT_WAIT);
    assert_int_equal(mb_adrift_decide(&pg, 0, own, 600001, &why), MB_ADRIFT_LOST);
    memcpy(bundles[1].node_id, other, sizeof(other));
    assert_int_equal(mb_adrift_decide(&pg, 1, own, 0, &why), MB_ADRIFT_LOST);
    assert_non_null(strstr(why, "another"));
    memcpy(bundles[1].node_id, own, sizeof(own));
    assert_int_equal(mb_adrift_decide(&pg, 1, own, 700000, &why), MB_ADRIFT_WAIT);
    assert_int_equal(mb_adrift_decide(&pg, 2, own, 0, &why), MB_ADRIFT_LOST);
    pg.state = MB_PG_REMOVED;
    assert_int_equal(mb_adrift_decide(&pg, 1, own, 0, &why), MB_ADRIFT_LOST);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_or_nothing),
        cmocka_unit_test(test_held_until_gone),
        cmocka_unit_test(test_release_unused),
        cmocka_unit_test(test_fence),
        cmocka_unit_test(test_units),
        cmocka_unit_test(test_dump_and_load),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_allocation_sweep),
        cmocka_unit_test(test_waits_for_nobody),
        cmocka_unit_test(test_in_doubt),
        cmocka_unit_test(test_adrift),
        cmocka_unit_test(test_what_became_of_an_adrift_one),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
