/* The ramp of the global batch: Megatron-LM's formulas, written out as its calculator has them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "worker/model/batch_ramp.h"

/* megatron/core/num_microbatches_calculator.py, RampupBatchsizeNumMicroBatchesCalculator.update()
 */
static int64_t megatron(const struct mb_batch_ramp *r, int64_t consumed)
{
    double per_increment = (double)r->samples / (double)((r->full - r->start) / r->increment);
    if (consumed > r->samples)
        return r->full;
    return r->start + (int64_t)((double)consumed / per_increment) * r->increment;
}

static void test_batches(void **state)
{
    (void)state;
    static const struct mb_batch_ramp ramps[] = {
        {16, 8, 5000, 64}, {4, 4, 96, 16}, {32, 32, 97656, 1536}, {8, 8, 100, 16}};
    for (size_t i = 0; i < sizeof(ramps) / sizeof(ramps[0]); i++) {
        const struct mb_batch_ramp *r = &ramps[i];
        const int64_t train = 3 * r->samples + 7;
        int64_t consumed = 0, iterations = 0;
        assert_int_equal(mb_batch_ramp_check(r, 2, 2, NULL), 0);
        while (consumed + mb_batch_ramp_at(r, consumed) <= train) {
            assert_int_equal(mb_batch_ramp_at(r, consumed), megatron(r, consumed));
            consumed += mb_batch_ramp_at(r, consumed);
            iterations++;
        }
        assert_int_equal(mb_batch_ramp_iterations(r, train), iterations);
        assert_int_equal(mb_batch_ramp_at(r, r->samples + 1), r->full);
        assert_true(mb_batch_ramp_iterations(r, r->samples / 2) < iterations);
        assert_int_equal(mb_batch_ramp_iterations(r, r->start - 1), 0);
    }
    const struct mb_batch_ramp none = {.full = 24}, flat = {24, 8, 100, 24},
                               at_once = {8, 8, 0, 24};
    assert_int_equal(mb_batch_ramp_at(&none, 0), 24);
    assert_int_equal(mb_batch_ramp_iterations(&none, 100), 4);
    assert_int_equal(mb_batch_ramp_at(&flat, 0), 24);
    assert_int_equal(mb_batch_ramp_at(&at_once, 0), 8);
    assert_int_equal(mb_batch_ramp_at(&at_once, 8), 24);
    assert_int_equal(mb_batch_ramp_iterations(&at_once, 56), 3);
}

static void refused(struct mb_batch_ramp r, const char *text)
{
    struct mb_err err = {0};
    assert_int_equal(mb_batch_ramp_check(&r, 2, 2, &err), MB_EINVAL);
    if (strstr(err.text, text) == NULL)
        fail_msg("'%s' does not say '%s'", err.text, text);
}

static void test_refusals(void **state)
{
    (void)state;
    refused((struct mb_batch_ramp){8, 12, 100, 24},
            "interval (16) to be divisible by global batch size increment (12)");
    refused((struct mb_batch_ramp){6, 6, 100, 24},
            "current global batch size (6) is not divisible by micro-batch-size (2) times data "
            "parallel size (2)");
    refused((struct mb_batch_ramp){4, 2, 100, 24},
            "current global batch size (6) is not divisible");
    refused((struct mb_batch_ramp){28, 4, 100, 24}, "start at most the global batch size (24)");
    refused((struct mb_batch_ramp){4, 0, 100, 24}, "must be positive");
    refused((struct mb_batch_ramp){4, 4, -1, 24}, "must be positive");
    refused((struct mb_batch_ramp){4, 4, INT64_MAX / 2, 24},
            "are more than 100000000 batches of 4");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_batches),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
