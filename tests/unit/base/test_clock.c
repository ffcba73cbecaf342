/* Clocks do not run backwards, random bytes differ, back-off stays in its bounds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <cmocka.h>
#include "base/clock.h"

static void test_clocks(void **state)
{
    uint64_t us = mb_mono_us(), ms = mb_mono_ms(), unix_ms;
    time_t before;

    (void)state;
    for (int i = 0; i < 1000; i++) {
        uint64_t next_us = mb_mono_us(), next_ms = mb_mono_ms();

        assert_true(next_us >= us && next_ms >= ms);
        assert_true(next_ms + 1 >= next_us / 1000);
        us = next_us;
        ms = next_ms;
    }
    before = time(NULL);
    unix_ms = mb_unix_ms();
    assert_in_range(unix_ms / 1000, (uint64_t)before - 1, (uint64_t)time(NULL) + 1);
}

static void test_random(void **state)
{
    uint8_t a[64] = {0}, b[64] = {0}, zero[64] = {0};

    (void)state;
    mb_random_bytes(a, sizeof(a));
    mb_random_bytes(b, sizeof(b));
    assert_memory_not_equal(a, b, sizeof(a));
    assert_memory_not_equal(a, zero, sizeof(a));
    assert_true(mb_random_u64() != mb_random_u64());
}

static void test_backoff(void **state)
{
    (void)state;
    for (unsigned attempt = 0; attempt < 200; attempt++) {
        uint64_t bound = attempt < 10 ? 100u << attempt : 20000;

        if (bound > 20000)
            bound = 20000;
        for (uint64_t r = 0; r < 50; r++)
            assert_in_range(mb_backoff_ms(attempt, 100, 20000, r * 0x9e3779b97f4a7c15u), 0, bound);
        assert_true(mb_backoff_ms(attempt, 100, 20000, UINT64_MAX) <= bound);
        assert_int_equal(mb_backoff_ms(attempt, 100, 20000, 0), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_clocks),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_backoff),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
