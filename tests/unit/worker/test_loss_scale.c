/* The dynamic loss scale, step by step; against megatron-core's own it is compared elsewhere
 * (tests/integration/worker/test_megatron_step.py). */
#include "worker/model/loss_scale.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <cmocka.h>

static const struct mb_loss_scale_config DEFAULTS = {
    .is_dynamic = 1, .initial = 4294967296.0, .min = 1, .window = 1000, .hysteresis = 2};

static void update(struct mb_loss_scale *s, const struct mb_loss_scale_config *c, int overflows,
                   int n)
{
    while (n-- > 0)
        mb_loss_scale_update(s, c, overflows);
}

/* The scales of Megatron-LM's own log: the first overflow is forgiven, no further one is. */
static void test_overflows(void **state)
{
    (void)state;
    static const double WANT[] = {4294967296.0, 2147483648.0, 1073741824.0, 536870912.0};
    struct mb_loss_scale s;
    mb_loss_scale_start(&s, &DEFAULTS);
    for (size_t i = 0; i < sizeof(WANT) / sizeof(WANT[0]); i++) {
        update(&s, &DEFAULTS, 1, 1);
        assert_true(s.scale == WANT[i]);
        assert_int_equal(s.n_good, 0);
        assert_int_equal(s.patience, 1 - (int)i);
    }
}

static void test_growth(void **state)
{
    (void)state;
    struct mb_loss_scale_config c = DEFAULTS;
    struct mb_loss_scale s;
    c.initial = 1024;
    c.window = 3;
    mb_loss_scale_start(&s, &c);
    update(&s, &c, 1, 1);
    update(&s, &c, 0, 2);
    assert_true(s.scale == 1024 && s.n_good == 2 && s.patience == 1);
    update(&s, &c, 1, 1); /* the steps before do not count any more, nor is it forgiven */
    assert_true(s.scale == 512 && s.n_good == 0 && s.patience == 0);
    update(&s, &c, 0, 3);
    assert_true(s.scale == 1024 && s.n_good == 0 && s.patience == 2);
    update(&s, &c, 1, 1);
    assert_true(s.scale == 1024 && s.patience == 1);
    update(&s, &c, 0, 6);
    assert_true(s.scale == 4096 && s.patience == 2);
}

static void test_bounds(void **state)
{
    (void)state;
    struct mb_loss_scale_config c = DEFAULTS;
    struct mb_loss_scale s;
    c.min = 0.75;
    c.initial = 4;
    c.hysteresis = 1;
    c.window = 1;
    mb_loss_scale_start(&s, &c);
    update(&s, &c, 1, 3);
    assert_true(s.scale == 0.75);
    update(&s, &c, 1, 100);
    assert_true(s.scale == 0.75);
    update(&s, &c, 0, 1);
    assert_true(s.scale == 1.5 && s.patience == 1);
    update(&s, &c, 0, 10000);
    assert_true(isfinite((float)s.scale));
}

static void test_constant(void **state)
{
    (void)state;
    const struct mb_loss_scale_config c = {.initial = 128};
    struct mb_loss_scale s;
    mb_loss_scale_start(&s, &c);
    update(&s, &c, 1, 10);
    update(&s, &c, 0, 10);
    assert_true(s.scale == 128);
}

static void test_check(void **state)
{
    (void)state;
    static const struct {
        struct mb_loss_scale_config c;
        const char *text; /* NULL: good */
    } CASES[] = {
        {{1, 4294967296.0, 1, 1000, 2}, NULL},
        {{0, 1, 0, 0, 0}, NULL},
        {{0, -1, 0, 0, 0}, "loss-scale is -1"},
        {{1, 0, 1, 1000, 2}, "initial-loss-scale is 0"},
        {{1, 1e39, 1, 1000, 2}, "initial-loss-scale is 1e+39"},
        {{1, 4, 0, 1000, 2}, "min-loss-scale is 0"},
        {{1, 4, 8, 1000, 2}, "min-loss-scale is 8"},
        {{1, 4, 1, 0, 2}, "loss-scale-window is 0"},
        {{1, 4, 1, 10, 0}, "hysteresis is 0"},
    };
    struct mb_err err;
    for (size_t i = 0; i < sizeof(CASES) / sizeof(CASES[0]); i++) {
        mb_err_clear(&err);
        int rc = mb_loss_scale_check(&CASES[i].c, &err);
        assert_int_equal(rc, CASES[i].text != NULL ? MB_EINVAL : 0);
        if (CASES[i].text != NULL)
            assert_non_null(strstr(err.text, CASES[i].text));
    }
    const struct mb_loss_scale_config nan = {.is_dynamic = 1, .initial = NAN, .min = 1};
    assert_int_equal(mb_loss_scale_check(&nan, &err), MB_EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_overflows), cmocka_unit_test(test_growth),
        cmocka_unit_test(test_bounds),    cmocka_unit_test(test_constant),
        cmocka_unit_test(test_check),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
