/* Halves and bfloat16: every one of them there and back, and what lies between two. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include "base/half.h"

/* A half as fp32, that as a half again, and this one as fp32. */
static void comes_back(uint32_t half, float value, uint16_t back, float again)
{
    if (isnan(value))
        assert_true(isnan(again));
    else
        assert_int_equal(back, half);
}

static void all_come_back(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 65536; h++) {
        float f16 = mb_f16_float((uint16_t)h), bf16 = mb_bf16_float((uint16_t)h);
        comes_back(h, f16, mb_float_f16(f16), mb_f16_float(mb_float_f16(f16)));
        comes_back(h, bf16, mb_float_bf16(bf16), mb_bf16_float(mb_float_bf16(bf16)));
    }
}

/* Between two neighbours the middle goes to the even one. */
static void rounds_to_nearest_even(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 65536; h++) {
        if (h % 0x8000 >= 0x7bff) /* there is no next one that is finite */
            continue;
        float f16 = mb_f16_float((uint16_t)h), next = mb_f16_float((uint16_t)(h + 1));
        float middle = (f16 + next) / 2;
        assert_int_equal(mb_float_f16(middle), h + h % 2);
        assert_int_equal(mb_float_f16(nextafterf(middle, f16)), h);
        assert_int_equal(mb_float_f16(nextafterf(middle, next)), h + 1);
    }
    assert_int_equal(mb_float_f16(65519.996f), 0x7bff);
    assert_int_equal(mb_float_f16(65520), 0x7c00);
    assert_int_equal(mb_float_f16(-1e30f), 0xfc00);
    assert_true(mb_f16_float(0x3c00) == 1 && mb_f16_float(1) == 0x1p-24f);
    assert_int_equal(mb_float_bf16(1.00390625f), 0x3f80); /* 1 + 2^-8, a tie */
    assert_int_equal(mb_float_bf16(1.01171875f), 0x3f82);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_come_back),
        cmocka_unit_test(rounds_to_nearest_even),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
