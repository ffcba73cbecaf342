/* Schedules against values computed by hand from the formulas of Megatron's
 * OptimizerParamScheduler. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "worker/model/schedule.h"

struct point {
    int64_t n;
    double want;
};

/* max 1, min 0.1, warmup 100 from 0, decay 1100; WSD's final decay 500. */
static struct mb_schedule base(enum mb_lr_style style)
{
    return (struct mb_schedule){.lr_style = style,
                                .max_lr = 1,
                                .min_lr = 0.1,
                                .warmup_samples = 100,
                                .decay_samples = 1100,
                                .wsd_decay_samples = 500};
}

static void expect_lr(const struct mb_schedule *s, const struct point *points, size_t n)
{
    struct mb_err err = {0};
    assert_int_equal(mb_schedule_check(s, &err), 0);
    for (size_t i = 0; i < n; i++) {
        double got = mb_schedule_lr(s, points[i].n);
        if (fabs(got - points[i].want) > 1e-12)
            fail_msg("style %d: lr(%lld) is %.15g, expected %.15g", s->lr_style,
                     (long long)points[i].n, got, points[i].want);
    }
}

#define EXPECT(s, ...)                                                                             \
    do {                                                                                           \
        const struct point points_[] = {__VA_ARGS__};                                              \
        expect_lr(&(s), points_, sizeof(points_) / sizeof(points_[0]));                            \
    } while (0)

static void test_lr_styles(void **state)
{
    (void)state;
    struct mb_schedule s = base(MB_LR_CONSTANT);
    EXPECT(s, {0, 0}, {25, 0.25}, {100, 1}, {600, 1}, {5000, 1});
    s = base(MB_LR_LINEAR);
    EXPECT(s, {0, 0}, {100, 1}, {350, 0.775}, {600, 0.55}, {1100, 0.1}, {1101, 0.1});
    s = base(MB_LR_COSINE);
    EXPECT(s, {50, 0.5}, {350, 0.1 + 0.9 * 0.5 * (1 + sqrt(0.5))}, {600, 0.55}, {1100, 0.1},
           {9999, 0.1});
    s = base(MB_LR_INVERSE_SQRT);
    EXPECT(s, {100, 1}, {400, 0.5}, {625, 0.4}, {1100, sqrt(100.0 / 1100.0)}, {1101, 0.1});
    s.min_lr = 0.45;
    EXPECT(s, {400, 0.5}, {625, 0.45});
}

static void test_lr_wsd(void **state)
{
    (void)state;
    struct mb_schedule s = base(MB_LR_WSD); /* the final decay is (600, 1100] */
    s.wsd_style = MB_WSD_LINEAR;
    EXPECT(s, {50, 0.5}, {100, 1}, {600, 1}, {725, 0.775}, {1100, 0.1}, {1101, 0.1});
    s.wsd_style = MB_WSD_COSINE;
    EXPECT(s, {600, 1}, {850, 0.55}, {1100, 0.1});
    s.wsd_style = MB_WSD_EXPONENTIAL;
    EXPECT(s, {600, 1}, {850, 0.1 + 0.9 * (2 * sqrt(0.5) - 1)}, {1100, 0.1});
    s.wsd_style = MB_WSD_MINUS_SQRT;
    EXPECT(s, {600, 1}, {725, 0.55}, {1100, 0.1});
}

static void test_lr_warmup(void **state)
{
    (void)state;
    struct mb_schedule s = base(MB_LR_COSINE);
    s.init_lr = 0.2;
    EXPECT(s, {0, 0.2}, {50, 0.6}, {100, 1});
    s.warmup_samples = 0; /* starts at the maximum */
    s.decay_samples = 1000;
    EXPECT(s, {0, 1}, {500, 0.55});
    s = base(MB_LR_INVERSE_SQRT);
    s.warmup_samples = 0; /* counts as 1, and so does sample 0 */
    EXPECT(s, {0, 1}, {1, 1}, {4, 0.5});
}

static void test_weight_decay(void **state)
{
    (void)state;
    struct mb_schedule s = base(MB_LR_CONSTANT);
    s.start_wd = s.end_wd = 0.01;
    assert_true(mb_schedule_weight_decay(&s, 12345) == 0.01);
    s.end_wd = 0.09;
    s.wd_incr_samples = 400;
    s.wd_style = MB_WD_LINEAR;
    assert_true(fabs(mb_schedule_weight_decay(&s, 0) - 0.01) < 1e-15);
    assert_true(fabs(mb_schedule_weight_decay(&s, 100) - 0.03) < 1e-15);
    assert_true(fabs(mb_schedule_weight_decay(&s, 401) - 0.09) < 1e-15);
    s.wd_style = MB_WD_COSINE;
    assert_true(fabs(mb_schedule_weight_decay(&s, 200) - 0.05) < 1e-15);
    assert_true(fabs(mb_schedule_weight_decay(&s, 100) - (0.01 + 0.08 * 0.5 * (1 - sqrt(0.5)))) <
                1e-15);
    assert_true(fabs(mb_schedule_weight_decay(&s, 400) - 0.09) < 1e-15);
}

static void expect_refused(const struct mb_schedule *s, const char *text)
{
    struct mb_err err = {0};
    assert_int_equal(mb_schedule_check(s, &err), MB_EINVAL);
    if (strstr(err.text, text) == NULL)
        fail_msg("'%s' does not say '%s'", err.text, text);
}

static void test_refusals(void **state)
{
    (void)state;
    struct mb_schedule s = base(MB_LR_COSINE);
    s.min_lr = 2;
    expect_refused(&s, "--lr (1) must be at least --min-lr (2)");
    s.min_lr = -1;
    expect_refused(&s, "--min-lr is -1");
    s = base(MB_LR_COSINE);
    s.max_lr = NAN;
    expect_refused(&s, "--lr (nan)");
    s = base(MB_LR_COSINE);
    s.init_lr = 3;
    expect_refused(&s, "--lr-warmup-init (3)");
    s = base(MB_LR_COSINE);
    s.warmup_samples = 1100;
    expect_refused(&s, "warmup (1100 samples) must be shorter than its decay (1100 samples)");
    s.decay_samples = 0;
    expect_refused(&s, "decays over 0 samples");
    s = base(MB_LR_WSD);
    s.wsd_decay_samples = 0;
    expect_refused(&s, "--lr-wsd-decay-iters");
    s = base(MB_LR_COSINE);
    s.end_wd = 0.1;
    expect_refused(&s, "--weight-decay-incr-style constant");
    s.start_wd = 0.2;
    expect_refused(&s, "--end-weight-decay (0.1)");
    s.start_wd = 0;
    s.wd_style = MB_WD_COSINE;
    expect_refused(&s, "weight decay grows over 0 samples");
}

static void test_names(void **state)
{
    (void)state;
    enum mb_lr_style lr;
    enum mb_wsd_style wsd;
    enum mb_wd_style wd;
    struct mb_err err = {0};
    assert_int_equal(mb_lr_style_parse("inverse-square-root", &lr, &err), 0);
    assert_int_equal(lr, MB_LR_INVERSE_SQRT);
    assert_int_equal(mb_lr_style_parse("WSD", &lr, &err), 0);
    assert_int_equal(lr, MB_LR_WSD);
    assert_int_equal(mb_wsd_style_parse("minus_sqrt", &wsd, &err), 0);
    assert_int_equal(wsd, MB_WSD_MINUS_SQRT);
    assert_int_equal(mb_wd_style_parse("cosine", &wd, &err), 0);
    assert_int_equal(wd, MB_WD_COSINE);
    assert_int_equal(mb_lr_style_parse("cos", &lr, &err), MB_EINVAL);
    assert_string_equal(err.text,
                        "argument --lr-decay-style: invalid choice: 'cos' (choose from constant, "
                        "linear, cosine, inverse-square-root, WSD)");
    assert_int_equal(mb_wsd_style_parse("", &wsd, &err), MB_EINVAL);
    assert_int_equal(mb_wd_style_parse("sqrt", &wd, &err), MB_EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lr_styles), cmocka_unit_test(test_lr_wsd),
        cmocka_unit_test(test_lr_warmup), cmocka_unit_test(test_weight_decay),
        cmocka_unit_test(test_refusals),  cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
