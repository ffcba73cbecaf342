/* Where the distributed optimizer's buffers have parameters. Those of the real megatron-core are in
 * tests/integration/worker/test_megatron_optim_dist.py. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>
#include "worker/checkpoint/megatron/param_buffer.h"

enum { N = 4 };

static void each_begins_at_a_multiple(void **state)
{
    (void)state;
    struct mb_buffered_param p[N] = {{.n = 10}, {.n = 64}, {.n = 65}, {.n = 1}};
    uint64_t sizes[N];
    assert_int_equal(mb_param_buffer_cut(p, N, 0, sizes), 1);
    assert_int_equal(sizes[0], 64 + 64 + 128 + 1);
    assert_int_equal(mb_param_buffer_fill(p, N, sizes, 1), 0);
    static const uint64_t begins[N] = {0, 64, 128, 256};
    for (int i = 0; i < N; i++) {
        assert_int_equal(p[i].bucket, 0);
        assert_int_equal(p[i].begin, begins[i]);
    }
}

/* Nothing is padded behind the one that fills a bucket. */
static void a_bucket_ends_where_it_has_enough(void **state)
{
    (void)state;
    struct mb_buffered_param p[N] = {{.n = 10}, {.n = 30}, {.n = 10}, {.n = 10}};
    uint64_t sizes[N];
    assert_int_equal(mb_param_buffer_cut(p, N, 90, sizes), 2);
    assert_int_equal(sizes[0], 64 + 30);
    assert_int_equal(sizes[1], 64 + 10);
    assert_int_equal(mb_param_buffer_fill(p, N, sizes, 2), 0);
    assert_true(p[1].bucket == 0 && p[1].begin == 64);
    assert_true(p[2].bucket == 1 && p[2].begin == 0);
    assert_true(p[3].bucket == 1 && p[3].begin == 64);
}

/* What is before it is padded, too. */
static void a_shared_table_has_its_own_bucket(void **state)
{
    (void)state;
    struct mb_buffered_param p[N] = {
        {.n = 10}, {.n = 70, .is_shared = 1}, {.n = 10}, {.n = 64, .is_shared = 1}};
    uint64_t sizes[N];
    assert_int_equal(mb_param_buffer_cut(p, N, 0, sizes), N);
    static const uint64_t want[N] = {64, 70, 64, 64};
    for (int i = 0; i < N; i++) {
        assert_int_equal(sizes[i], want[i]);
    }
    assert_int_equal(mb_param_buffer_fill(p, N, sizes, N), 0);
    for (size_t i = 0; i < N; i++) {
        assert_true(p[i].bucket == i && p[i].begin == 0);
    }
}

static void sizes_that_do_not_fit_are_refused(void **state)
{
    (void)state;
    static const struct {
        uint64_t sizes[N];
        size_t n;
    } cases[] = {{{0}, 0},           {{73}, 1},
                 {{75}, 1},          {{138, 1}, 2},
                 {{10}, 1},          {{10, 9}, 2},
                 {{10, 10, 10}, 3},  {{UINT64_MAX}, 1},
                 {{64, 10}, 2},      {{10, UINT64_MAX}, 2},
                 {{74, 64, 1, 1}, 4}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct mb_buffered_param p[2] = {{.n = 10}, {.n = 10}};
        assert_int_equal(mb_param_buffer_fill(p, 2, cases[i].sizes, cases[i].n), -1);
    }
    struct mb_buffered_param p[2] = {{.n = 10}, {.n = 10}};
    assert_int_equal(mb_param_buffer_fill(p, 2, (const uint64_t[]){74}, 1), 0);
    assert_int_equal(mb_param_buffer_fill(p, 2, (const uint64_t[]){10, 10}, 2), 0);
    p[1].is_shared = 1;
    assert_int_equal(mb_param_buffer_fill(p, 2, (const uint64_t[]){74}, 1), -1);
    assert_int_equal(mb_param_buffer_fill(p, 2, (const uint64_t[]){64, 10}, 2), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_begins_at_a_multiple),
        cmocka_unit_test(a_bucket_ends_where_it_has_enough),
        cmocka_unit_test(a_shared_table_has_its_own_bucket),
        cmocka_unit_test(sizes_that_do_not_fit_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
