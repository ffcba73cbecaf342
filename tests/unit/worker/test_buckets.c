/* Buckets of gradients: they cover the buffer once, from its end, in pieces worth an operation. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "worker/parallel/buckets.h"
#include "worker/parallel/comm.h"

struct bucket {
    size_t from, to;
};

/* Ranges of `step` elements become final one after the other. */
static size_t gather(size_t n, size_t step, size_t target, struct bucket *out)
{
    struct mb_buckets b;
    size_t count = 0;
    mb_buckets_start(&b, n, target);
    for (size_t end = n; end > 0;) {
        size_t begin = end > step ? end - step : 0;
        count += (size_t)mb_buckets_add(&b, begin, end, &out[count].from, &out[count].to);
        end = begin;
    }
    return count;
}

static void buckets_cover_the_buffer_once(void **state)
{
    (void)state;
    for (size_t n = 1; n < 60; n++) {
        for (size_t step = 1; step < 12; step++) {
            for (size_t target = 1; target < 70; target += 3) {
                struct bucket b[64];
                size_t count = gather(n, step, target, b), end = n;
                assert_true(count > 0);
                for (size_t i = 0; i < count; i++) {
                    assert_int_equal(b[i].to, end);
                    assert_true(b[i].from < b[i].to);
                    assert_true(i + 1 == count || b[i].to - b[i].from >= target);
                    assert_true(b[i].to - b[i].from < target + step);
                    end = b[i].from;
                }
                assert_int_equal(end, 0);
            }
        }
    }
}

static void an_empty_range_is_no_bucket(void **state)
{
    (void)state;
    struct mb_buckets b;
    size_t from, to;
    mb_buckets_start(&b, 10, 4);
    assert_int_equal(mb_buckets_add(&b, 10, 10, &from, &to), 0);
    assert_int_equal(mb_buckets_add(&b, 5, 10, &from, &to), 1);
    assert_int_equal(mb_buckets_add(&b, 0, 5, &from, &to), 1);
    assert_int_equal(mb_buckets_add(&b, 0, 0, &from, &to), 0);
}

static void parts_are_the_owners(void **state)
{
    (void)state;
    for (uint32_t world = 1; world < 6; world++) {
        for (size_t from = 0; from < 23; from++) {
            for (size_t to = from + 1; to <= 23; to++) {
                size_t covered = from;
                for (uint32_t r = 0; r < world; r++) {
                    size_t begin = from, end = to, first, last;
                    mb_comm_range(23, world, r, &first, &last);
                    if (!mb_buckets_part(23, world, r, &begin, &end)) {
                        continue;
                    }
                    assert_int_equal(begin, covered);
                    assert_true(begin >= first && end <= last && begin < end);
                    covered = end;
                }
                assert_int_equal(covered, to);
            }
        }
    }
}

static void the_default_is_megatrons(void **state)
{
    (void)state;
    assert_int_equal(mb_buckets_default(2), 40000000);
    assert_int_equal(mb_buckets_default(40), 40000000);
    assert_int_equal(mb_buckets_default(64), 64000000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(buckets_cover_the_buffer_once),
        cmocka_unit_test(an_empty_range_is_no_bucket),
        cmocka_unit_test(parts_are_the_owners),
        cmocka_unit_test(the_default_is_megatrons),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
