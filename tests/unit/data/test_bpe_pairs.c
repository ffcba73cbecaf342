/* The table of merges: every pair that was put in is found with its last rank, no other is; every
 * failing allocation is told. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "base/alloc.h"
#include "base/err.h"
#include "worker/data/tokenizer/bpe_pairs.h"

enum { N = 40000, SIDES = 300 };

static uint64_t state = 0x2545f4914f6cdd1du;

static uint32_t draw(uint32_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)((state >> 32) * below >> 32);
}

static uint32_t rank_of(const struct mb_bpe_pairs *t, uint32_t left, uint32_t right)
{
    uint64_t pair = mb_bpe_pair(left, right);

    return mb_bpe_pair_rank_at(t, mb_bpe_pair_slot(t, pair), pair);
}

/* Of SIDES x SIDES pairs less than half are there, many of them several times. */
static void test_finds_the_last(void **unused)
{
    static uint32_t want[SIDES][SIDES];
    static uint64_t entries[N];
    struct mb_bpe_pairs t;

    (void)unused;
    for (int i = 0; i < SIDES; i++)
        for (int k = 0; k < SIDES; k++)
            want[i][k] = MB_BPE_NO_RANK;
    for (uint32_t i = 0; i < N; i++) {
        uint32_t left = draw(SIDES), right = draw(SIDES);

        entries[i] = mb_bpe_pair(left, right) << MB_BPE_RANK_BITS | i;
        want[left][right] = i;
    }
    assert_int_equal(mb_bpe_pairs_make(&t, entries, N), 0);
    for (uint32_t i = 0; i < SIDES; i++)
        for (uint32_t k = 0; k < SIDES; k++)
            assert_int_equal(rank_of(&t, i, k), want[i][k]);
    assert_int_equal(rank_of(&t, (1u << MB_BPE_SYMBOL_BITS) - 1, 0), MB_BPE_NO_RANK);
    mb_bpe_pairs_close(&t);
}

static void test_empty(void **unused)
{
    struct mb_bpe_pairs t;

    (void)unused;
    assert_int_equal(mb_bpe_pairs_make(&t, NULL, 0), 0);
    assert_int_equal(rank_of(&t, 0, 0), MB_BPE_NO_RANK);
    mb_bpe_pairs_close(&t);
}

static void test_no_memory(void **unused)
{
    const uint64_t entries[] = {5ull << MB_BPE_RANK_BITS};
    struct mb_bpe_pairs t;
    unsigned long nth = 1;

    (void)unused;
    for (;; nth++) {
        int rc;

        mb_alloc_fail_nth(nth);
        rc = mb_bpe_pairs_make(&t, entries, 1);
        mb_alloc_fail_nth(0);
        if (rc == 0)
            break;
        assert_int_equal(rc, MB_ENOMEM);
    }
    assert_true(nth > 4);
    mb_bpe_pairs_close(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_finds_the_last),
        cmocka_unit_test(test_empty),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
