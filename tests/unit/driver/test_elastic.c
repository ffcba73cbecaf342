/* With how many nodes a gang goes on. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "cli/driver/elastic.h"

enum { WAIT_MS = 30000, T0 = 1000000 };

static struct mb_elastic make(uint32_t min, uint32_t max)
{
    return (struct mb_elastic){
        .min_nodes = min, .max_nodes = max, .ranks_per_node = 1, .wait_ms = WAIT_MS};
}

static void test_first_attempt_wants_all(void **state)
{
    struct mb_elastic e = make(1, 4);

    (void)state;
    mb_elastic_begin(&e, 1, 0, T0);
    assert_int_equal(e.n_nodes, 4);
    assert_int_equal(mb_elastic_look(&e, 3, 0, T0 + 100 * WAIT_MS), 4);
    assert_int_equal(mb_elastic_look(&e, 3, 1, T0 + 100 * WAIT_MS), 4);
}

static void test_not_elastic(void **state)
{
    struct mb_elastic e = make(3, 3);
    char text[200];

    (void)state;
    mb_elastic_begin(&e, 0, 0, T0);
    assert_int_equal(mb_elastic_look(&e, 2, 0, T0 + 100 * WAIT_MS), 3);
    mb_elastic_explain(&e, 2, T0 + 100 * WAIT_MS, text, sizeof(text));
    assert_string_equal(text, "");
    assert_true(mb_elastic_keeps(&e, 0) && mb_elastic_keeps(&e, 100));
}

static void test_fewer_after_the_wait(void **state)
{
    struct mb_elastic e = make(2, 4);
    char text[200];

    (void)state;
    mb_elastic_begin(&e, 0, 0, T0);
    assert_int_equal(mb_elastic_look(&e, 3, 0, T0), 4);
    assert_int_equal(mb_elastic_look(&e, 3, 0, T0 + WAIT_MS - 1), 4);
    mb_elastic_explain(&e, 1, T0 + WAIT_MS - 1, text, sizeof(text));
    assert_string_equal(text, "");
    /* Too few even then: all are waited for, and it is said. */
    assert_int_equal(mb_elastic_look(&e, 1, 0, T0 + WAIT_MS), 4);
    mb_elastic_explain(&e, 1, T0 + WAIT_MS, text, sizeof(text));
    assert_string_equal(text, "1 of at least 2 nodes (--min-nodes) are there: ");
    assert_int_equal(mb_elastic_look(&e, 3, 0, T0 + WAIT_MS + 1), 3);
    /* The new size has its own time; then it follows what is there, up and down. */
    assert_int_equal(mb_elastic_look(&e, 2, 0, T0 + 2 * WAIT_MS), 3);
    assert_int_equal(mb_elastic_look(&e, 2, 0, T0 + 2 * WAIT_MS + 1), 2);
    assert_int_equal(mb_elastic_look(&e, 9, 0, T0 + 3 * WAIT_MS + 1), 4);
    /* The next attempt wants all again. */
    e.n_nodes = 2;
    mb_elastic_begin(&e, 0, 0, T0);
    assert_int_equal(e.n_nodes, 4);
}

/* A product of 2^64 is none of 0, for which any number of ranks would do. */
static void test_batches_beyond_64_bits(void **state)
{
    struct mb_elastic e = make(1, 4);

    (void)state;
    e.global_batch = 512;
    e.ranks_per_node = 8;
    e.micro_batch = UINT64_C(1) << 60;
    assert_false(mb_elastic_divides(&e, 2) || mb_elastic_divides(&e, 1));
    e.micro_batch = (UINT64_C(1) << 61) + 1; /* 8 in 64 bits */
    assert_false(mb_elastic_divides(&e, 1));
    e.micro_batch = 8;
    assert_true(mb_elastic_divides(&e, 8) && !mb_elastic_divides(&e, UINT32_MAX));
    e.global_batch = UINT64_MAX; /* 3 * 5 * 17 * ... */
    e.ranks_per_node = 5;
    e.micro_batch = UINT64_MAX / 15;
    assert_true(mb_elastic_divides(&e, 3));
}

static void test_the_global_batch_divides(void **state)
{
    struct mb_elastic e = make(1, 4);
    char text[300];

    (void)state;
    e.global_batch = 16;
    e.micro_batch = 2;
    e.ranks_per_node = 2;
    assert_true(mb_elastic_divides(&e, 4) && mb_elastic_divides(&e, 2) &&
                mb_elastic_divides(&e, 1));
    assert_false(mb_elastic_divides(&e, 3));
    mb_elastic_begin(&e, 0, 0, T0);
    assert_int_equal(mb_elastic_look(&e, 3, 0, T0 + WAIT_MS), 2); /* 3 does not divide */
    e.min_nodes = 3;
    mb_elastic_begin(&e, 0, 0, T0);
    assert_int_equal(mb_elastic_look(&e, 3, 0, T0 + WAIT_MS), 4);
    mb_elastic_explain(&e, 3, T0 + WAIT_MS, text, sizeof(text));
    assert_string_equal(text,
                        "3 nodes are there, but neither 6 ranks nor fewer on at least 3 nodes "
                        "divide --global-batch-size 16 by --micro-batch-size 2: ");
}

/* 2 ranks a node: of 2 to a model each node is one, of 4 two nodes are. */
static void test_ranks_that_share_a_model(void **state)
{
    struct mb_elastic e = make(1, 4);
    char text[300];

    (void)state;
    e.global_batch = 12;
    e.micro_batch = 2;
    e.ranks_per_node = 2;
    e.ranks_per_model = 2;
    assert_true(mb_elastic_divides(&e, 3) && mb_elastic_divides(&e, 2) &&
                mb_elastic_divides(&e, 1));
    assert_false(mb_elastic_divides(&e, 4));
    e.ranks_per_model = 4;
    assert_true(mb_elastic_divides(&e, 4) && mb_elastic_divides(&e, 2));
    assert_false(mb_elastic_divides(&e, 3) || mb_elastic_divides(&e, 1));
    mb_elastic_begin(&e, 0, 0, T0);
    assert_int_equal(mb_elastic_look(&e, 3, 0, T0 + WAIT_MS), 2);
    e.min_nodes = 3;
    mb_elastic_begin(&e, 0, 0, T0);
    assert_int_equal(mb_elastic_look(&e, 3, 0, T0 + WAIT_MS), 4);
    mb_elastic_explain(&e, 3, T0 + WAIT_MS, text, sizeof(text));
    assert_string_equal(text, "3 nodes are there, but neither 6 ranks nor fewer on at least 3 "
                              "nodes, 4 to a model, divide --global-batch-size 12 by "
                              "--micro-batch-size 2: ");
}

/* A real GCS says who is alive, not who is free: each size is waited for in turn. */
static void test_guesses(void **state)
{
    struct mb_elastic e = make(1, 4);
    uint64_t now = T0;

    (void)state;
    mb_elastic_begin(&e, 0, 0, now);
    for (uint32_t want = 3; want > 0; want--) {
        assert_int_equal(mb_elastic_look(&e, 4, 1, now + WAIT_MS - 1), want + 1);
        now += WAIT_MS;
        assert_int_equal(mb_elastic_look(&e, 4, 1, now), want);
    }
    now += WAIT_MS;
    assert_int_equal(mb_elastic_look(&e, 4, 1, now), 4); /* none in vain for ever */
    now += WAIT_MS;
    assert_int_equal(mb_elastic_look(&e, 2, 1, now), 2); /* what is not alive is not waited for */
    e.n_nodes = 1;
    assert_int_equal(mb_elastic_look(&e, 0, 1, now + WAIT_MS), 4);
}

static void test_keeps_its_nodes(void **state)
{
    struct mb_elastic e = make(2, 4);

    (void)state;
    mb_elastic_begin(&e, 0, 0, T0);
    assert_int_equal(mb_elastic_look(&e, 2, 0, T0 + WAIT_MS), 2);
    assert_true(mb_elastic_keeps(&e, 0)); /* not looked yet */
    assert_true(mb_elastic_keeps(&e, 2));
    assert_false(mb_elastic_keeps(&e, 3));
    e.global_batch = 4;
    e.micro_batch = 1;
    assert_true(mb_elastic_keeps(&e, 3)); /* three would not divide */
    assert_false(mb_elastic_keeps(&e, 4));
    mb_elastic_begin(&e, 0, 1, T0);
    assert_int_equal(e.n_nodes, 2);
    assert_int_equal(mb_elastic_look(&e, 4, 0, T0 + WAIT_MS), 4); /* one of them died meanwhile */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_first_attempt_wants_all),
        cmocka_unit_test(test_not_elastic),
        cmocka_unit_test(test_fewer_after_the_wait),
        cmocka_unit_test(test_batches_beyond_64_bits),
        cmocka_unit_test(test_the_global_batch_divides),
        cmocka_unit_test(test_ranks_that_share_a_model),
        cmocka_unit_test(test_guesses),
        cmocka_unit_test(test_keeps_its_nodes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
