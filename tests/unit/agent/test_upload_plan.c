/* The plan of uploads: sealing, order, shared files, refusals, states, allocation sweep. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
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
    {"big", 900 << 20, 1, 1, 0}, {"meta", 100, 2, 1, 0}, {"huge", 2000u << 20, 3, 1, 0}};
static const struct mb_upload_file rank5[] = {
    {"small", 50, 4, 1, 0}, {"meta", 100, 2, 1, 0}, {"mid", 1 << 20, 5, 1, 0}};

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

/* A store that drops packets for minutes is away like one that refuses connections. */
static void test_failures(void **state)
{
    static const int away[] = {MB_EUNAVAIL, MB_ETIMEOUT}, other[] = {MB_EDENIED, MB_EIO, MB_ESTATE};
    unsigned n;

    (void)state;
    for (size_t i = 0; i < 2; i++) {
        n = 0;
        for (int k = 0; k < 100; k++) {
            n = mb_plan_count_failure(n, away[i]);
            assert_true(n > 0 && n < MB_PLAN_TRIES_MAX);
        }
        assert_int_equal(mb_plan_count_failure(n, MB_EDENIED), MB_PLAN_TRIES_MAX);
    }
    for (size_t i = 0; i < 3; i++) {
        n = 0;
        for (int k = 0; k < MB_PLAN_TRIES_MAX; k++)
            n = mb_plan_count_failure(n, other[i]);
        assert_int_equal(n, MB_PLAN_TRIES_MAX);
    }
}

/* With a deadline the newest that can be sent goes first, and everything is told of what is left.
 */
static void test_deadline(void **state)
{
    static const struct mb_upload_file big = {"big", 1000, 0, 0, 0},
                                       small = {"small", 100, 0, 0, 0}, none = {"none", 0, 0, 0, 0};
    const struct mb_upload_file *const sizes[] = {&big, &small, &big};
    const uint32_t rank = 4;
    struct mb_plan *p;
    struct mb_plan_iteration *it;
    struct mb_plan_file *f;
    struct mb_upload_status status;

    (void)state;
    assert_int_equal(mb_plan_create(&rank, 1, &p, NULL), MB_OK);
    for (int i = 0; i < 3; i++)
        assert_int_equal(mb_plan_saved(p, 10 * (i + 1), 4, "/d", sizes[i], 1, NULL), MB_OK);
    assert_int_equal(mb_plan_choose(p, 100000, 0), -1); /* the rate is not known */
    assert_int_equal(mb_plan_choose(p, 1000, 1000), 30);
    assert_int_equal(mb_plan_choose(p, 999, 1000), 20);
    assert_int_equal(mb_plan_choose(p, 99, 1000), -1);
    assert_true(mb_plan_eta_ms(p, mb_plan_find(p, 30), 0) == UINT64_MAX);
    assert_int_equal(mb_plan_eta_ms(p, mb_plan_find(p, 10), 1000), 1000);
    assert_int_equal(mb_plan_eta_ms(p, mb_plan_find(p, 30), 1000), 2100);
    mb_plan_prefer(p, 20);
    assert_int_equal(mb_plan_eta_ms(p, mb_plan_find(p, 20), 1000), 100);
    assert_int_equal(mb_plan_eta_ms(p, mb_plan_find(p, 10), 1000), 1100);
    assert_int_equal(mb_plan_eta_ms(p, mb_plan_find(p, 30), 1000), 2100);
    assert_true(mb_plan_next(p, &it, &f));
    assert_int_equal(it->iteration, 20);
    assert_true(mb_plan_next(p, &it, &f));
    assert_int_equal(it->iteration, 10);
    f->sent_bytes = 400;
    assert_int_equal(mb_plan_choose(p, 999, 1000), 20);
    assert_int_equal(mb_plan_eta_ms(p, it, 1000), 700);
    mb_plan_prefer(p, 77); /* it is not there */
    assert_true(mb_plan_next(p, &it, &f));
    assert_int_equal(it->iteration, 30);
    f->size_bytes = (uint64_t)100 << 20;
    f->sent_bytes = (uint64_t)33 << 20;
    mb_plan_status(it, 16u << 20, &status);
    assert_true(status.parts_total == 7 && status.parts_done == 2);
    mb_plan_status(it, 5u << 20, &status);
    assert_true(status.parts_total == 20 && status.parts_done == 6);
    mb_plan_file_done(f, 1);
    mb_plan_status(it, 16u << 20, &status);
    assert_true(status.parts_total == 7 && status.parts_done == 7);
    assert_int_equal(mb_plan_saved(p, 40, 4, "/d", &none, 1, NULL), MB_OK);
    assert_int_equal(mb_plan_choose(p, 0, 1), 40);
    mb_plan_destroy(p);
}

/* Each file is looked at a few times, however many there are. */
static void test_many_files(void **state)
{
    enum { N = 200000, SECONDS = 10 };
    struct mb_upload_file *files = calloc(N, sizeof(*files));
    char(*names)[16] = calloc(N, sizeof(*names));
    const uint32_t ranks[] = {0, 1};
    struct mb_plan *p;
    struct mb_plan_iteration *it;
    struct mb_plan_file *f, *first = NULL;
    clock_t began = clock();
    size_t n = 0;

    (void)state;
    for (int i = 0; i < N; i++) {
        snprintf(names[i], sizeof(names[i]), "f%06d", i);
        files[i] = (struct mb_upload_file){.path = names[i], .size_bytes = 100};
    }
    assert_int_equal(mb_plan_create(ranks, 2, &p, NULL), MB_OK);
    assert_int_equal(mb_plan_saved(p, 10, 0, "/d", files, N, NULL), MB_OK);
    assert_int_equal(mb_plan_saved(p, 10, 1, "/d", files, N, NULL), MB_OK);
    while (mb_plan_next(p, &it, &f)) {
        first = first != NULL ? first : f;
        assert_false(mb_plan_files_done(it));
        if (++n % 3 == 0)
            mb_plan_file_back(f); /* it comes again, at once */
        else
            mb_plan_file_done(f, 1);
    }
    assert_int_equal(n, N + N / 2 - 1);
    assert_int_equal(it->n_files, N);
    assert_true(mb_plan_files_done(it));
    mb_plan_file_back(first); /* what was done may have to go again */
    assert_false(mb_plan_files_done(it));
    assert_true(mb_plan_next(p, &it, &f) && f == first);
    assert_true((clock() - began) / CLOCKS_PER_SEC < SECONDS);
    mb_plan_destroy(p);
    free(names);
    free(files);
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
    mb_plan_status(it, 16u << 20, &status);
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
    struct mb_upload_file f = {"meta", 101, 2, 1, 0};
    struct mb_err err;

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct mb_upload_file b = {bad[i], 1, 0, 0, 0};

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
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_order),
                                       cmocka_unit_test(test_failures),
                                       cmocka_unit_test(test_deadline),
                                       cmocka_unit_test(test_many_files),
                                       cmocka_unit_test(test_life_of_an_iteration),
                                       cmocka_unit_test(test_refusals),
                                       cmocka_unit_test(test_allocation_sweep)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
