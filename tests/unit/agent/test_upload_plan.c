/* The plan of uploads: sealing, order, shared files, refusals, states, allocation sweep. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "agent/upload/plan.h"
#include "base/alloc.h"

static const uint32_t two_ranks[] = {4, 5};

static struct mb_plan *make(void)
{
    struct mb_plan *p = NULL;

    assert_int_equal(mb_plan_create(two_ranks, 2, &p, NULL), MB_OK);
    return p;
}

static const struct mb_upload_file rank4[] = {
    {"big", 900 << 20, 1, 1}, {"meta", 100, 2, 1}, {"huge", 2000u << 20, 3, 1}};
static const struct mb_upload_file rank5[] = {
    {"small", 50, 4, 1}, {"meta", 100, 2, 1}, {"mid", 1 << 20, 5, 1}};

static void seal(struct mb_plan *p, int64_t iteration)
{
    struct mb_err err;

    assert_int_equal(mb_plan_saved(p, iteration, 4, "/d", rank4, 3, &err), MB_OK);
    assert_int_equal(mb_plan_find(p, iteration)->state, MB_PLAN_COLLECTING);
    assert_int_equal(mb_plan_saved(p, iteration, 4, "/d", rank4, 3, &err), MB_EEXIST);
    assert_int_equal(mb_plan_saved(p, iteration, 5, "/d", rank5, 3, &err), MB_OK);
}

static void test_order(void **state)
{
    static const char *const want[] = {"small", "meta", "mid", "huge", "big"};
    struct mb_plan *p = make();
    struct mb_plan_iteration *it;
    struct mb_plan_file *f;

    (void)state;
    seal(p, 20);
    seal(p, 10);
    for (int i = 0; i < 5; i++) {
        assert_true(mb_plan_next(p, &it, &f));
        assert_int_equal(it->iteration, 10);
        assert_string_equal(f->path, want[i]);
    }
    assert_true(mb_plan_next(p, &it, &f));
    assert_int_equal(it->iteration, 20);
    mb_plan_destroy(p);
}

static void test_life_of_an_iteration(void **state)
{
    struct mb_plan *p = make();
    struct mb_plan_iteration *it;
    struct mb_plan_file *f;
    struct mb_upload_status status;
    struct mb_err err;

    (void)state;
    seal(p, 10);
    it = mb_plan_find(p, 10);
    assert_int_equal(mb_plan_event(it, MB_PLAN_EV_PART_SENT, NULL, &err), MB_ESTATE);
    assert_int_equal(mb_plan_event(it, MB_PLAN_EV_COMMITTED, NULL, &err), MB_ESTATE);
    assert_string_equal(err.text, "iteration 10: committed is not possible while it is UPLOADING");
    while (mb_plan_next(p, &it, &f)) {
        f->sent_bytes = f->size_bytes / 2;
        if (f->failures == 0)
            mb_plan_file_again(f);
        else
            mb_plan_file_done(f, 77);
    }
    assert_true(mb_plan_files_done(it));
    assert_int_equal(mb_plan_event(it, MB_PLAN_EV_PART_SENT, NULL, &err), MB_OK);
    mb_plan_status(it, &status);
    assert_true(status.shards_durable);
    assert_false(status.committed);
    assert_int_equal(status.done_bytes, status.total_bytes);
    assert_true(mb_plan_is_busy(p));
    assert_int_equal(mb_plan_event(it, MB_PLAN_EV_COMMITTED, NULL, &err), MB_OK);
    assert_false(mb_plan_is_busy(p));
    assert_int_equal(mb_plan_event(it, MB_PLAN_EV_DROPPED, "late", &err), MB_OK);
    assert_int_equal(it->state, MB_PLAN_COMMITTED);
    assert_null(it->error);
    mb_plan_destroy(p);
}

static void test_refusals(void **state)
{
    static const char *const bad[] = {"",       "/etc/passwd", "..",  "../x",
                                      "a/../b", "a/..",        "./a", "a//b"};
    struct mb_plan *p = make();
    struct mb_upload_file f = {"meta", 101, 2, 1};
    struct mb_err err;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct mb_upload_file b = {bad[i], 1, 0, 0};

        assert_int_equal(mb_plan_saved(p, 1, 4, "/d", &b, 1, &err), MB_EINVAL);
    }
    assert_int_equal(mb_plan_count(p), 0);
    assert_int_equal(mb_plan_saved(p, 1, 6, "/d", rank4, 3, &err), MB_EINVAL);
    assert_int_equal(mb_plan_saved(p, 1, 4, "/d", rank4, 3, &err), MB_OK);
    assert_int_equal(mb_plan_saved(p, 1, 5, "/d", &f, 1, &err), MB_EINVAL);
    assert_string_equal(err.text, "two ranks report meta with different contents");
    for (int64_t i = 2; i <= 256; i++)
        assert_int_equal(mb_plan_saved(p, i, 4, "/d", rank4, 3, &err), MB_OK);
    assert_int_equal(mb_plan_saved(p, 300, 4, "/d", rank4, 3, &err), MB_EFULL);
    mb_plan_destroy(p);
}

static void test_allocation_sweep(void **state)
{
    unsigned long n = 0;

    (void)state;
    do {
        struct mb_plan *p = NULL;
        int rc;

        mb_alloc_fail_nth(++n);
        if (mb_plan_create(two_ranks, 2, &p, NULL) == MB_OK) {
            rc = mb_plan_saved(p, 1, 4, "/d", rank4, 3, NULL);
            assert_int_equal(mb_plan_count(p), rc == MB_OK ? 1 : 0);
            if (rc == MB_OK) {
                rc = mb_plan_saved(p, 1, 5, "/d", rank5, 3, NULL);
                assert_int_equal(mb_plan_find(p, 1)->n_files, rc == MB_OK ? 5 : 3);
            }
        }
        mb_plan_destroy(p);
    } while (mb_alloc_did_fail());
    mb_alloc_fail_nth(0);
    assert_true(n > 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order), cmocka_unit_test(test_life_of_an_iteration),
        cmocka_unit_test(test_refusals), cmocka_unit_test(test_allocation_sweep)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
