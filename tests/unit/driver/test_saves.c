/* What a gang saved and what became of it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "cli/driver/saves.h"

static void note(struct mb_drv_saves *s, int64_t iteration, enum mb_drv_save save)
{
    assert_int_equal(mb_drv_saves_note(s, iteration, save), MB_OK);
}

static void what_is_open(void **state)
{
    struct mb_drv_saves *s = mb_drv_saves_create();

    (void)state;
    assert_non_null(s);
    assert_int_equal(mb_drv_saves_open(s, -1, 0), -1);
    note(s, 20, MB_DRV_SAVE_OPEN);
    note(s, 10, MB_DRV_SAVE_OPEN);
    note(s, 10, MB_DRV_SAVE_OPEN);
    note(s, 0, MB_DRV_SAVE_OPEN);
    assert_int_equal(mb_drv_saves_open(s, -1, 0), 0);
    assert_int_equal(mb_drv_saves_open(s, 0, 0), 10);
    note(s, 10, MB_DRV_SAVE_DURABLE);
    note(s, 10, MB_DRV_SAVE_OPEN); /* another node's word of it, late */
    note(s, 10, MB_DRV_SAVE_GIVEN_UP);
    assert_int_equal(mb_drv_saves_open(s, 0, 0), 20);
    assert_int_equal(mb_drv_saves_open(s, 20, 0), -1);
    note(s, 20, MB_DRV_SAVE_GIVEN_UP); /* another node may have made it durable all the same */
    assert_int_equal(mb_drv_saves_open(s, 0, 0), 20);
    note(s, 30, MB_DRV_SAVE_DURABLE);
    assert_int_equal(mb_drv_saves_open(s, 0, 0), -1);
    mb_drv_saves_destroy(s);
    mb_drv_saves_destroy(NULL);
}

/* Durable as it was, saved again: nobody may call it durable any more. */
static void what_was_saved_again(void **state)
{
    struct mb_drv_saves *s = mb_drv_saves_create();

    (void)state;
    note(s, 10, MB_DRV_SAVE_DURABLE);
    note(s, 20, MB_DRV_SAVE_DURABLE);
    assert_int_equal(mb_drv_saves_given_up(s), -1);
    note(s, 10, MB_DRV_SAVE_OUTDATED);
    note(s, 10, MB_DRV_SAVE_DURABLE);
    assert_int_equal(mb_drv_saves_given_up(s), 10);
    assert_int_equal(mb_drv_saves_open(s, -1, 0), -1); /* nothing to wait for */
    assert_false(mb_drv_saves_is_open(s, 10));
    for (int i = 30; i < 30000; i += 10)
        note(s, i, MB_DRV_SAVE_DURABLE);
    assert_int_equal(mb_drv_saves_given_up(s), 10);
    mb_drv_saves_destroy(s);
}

static void what_the_store_no_longer_keeps(void **state)
{
    struct mb_drv_saves *s = mb_drv_saves_create();

    (void)state;
    note(s, 10, MB_DRV_SAVE_OPEN);
    note(s, 20, MB_DRV_SAVE_DURABLE);
    assert_int_equal(mb_drv_saves_open(s, -1, 2), 10);
    assert_int_equal(mb_drv_saves_open(s, -1, 1), -1);
    note(s, 30, MB_DRV_SAVE_DURABLE);
    assert_int_equal(mb_drv_saves_open(s, -1, 2), -1);
    assert_int_equal(mb_drv_saves_open(s, -1, 0), 10);
    mb_drv_saves_destroy(s);
}

/* A run of months: what is settled is forgotten, what is open never. */
static void many(void **state)
{
    struct mb_drv_saves *s = mb_drv_saves_create();

    (void)state;
    note(s, 7, MB_DRV_SAVE_OPEN);
    for (int64_t i = 10; i < 20000; i++) {
        note(s, i, MB_DRV_SAVE_OPEN);
        note(s, i, MB_DRV_SAVE_DURABLE);
    }
    note(s, 19990, MB_DRV_SAVE_OPEN);
    assert_int_equal(mb_drv_saves_open(s, -1, 0), 7);
    assert_int_equal(mb_drv_saves_open(s, 7, 0), -1);
    assert_true(mb_drv_saves_is_open(s, 7));
    assert_false(mb_drv_saves_is_open(s, 11)); /* forgotten */
    assert_false(mb_drv_saves_is_open(s, 19998));
    assert_true(mb_drv_saves_is_open(s, 20000));
    mb_drv_saves_destroy(s);
}

/* One that was given up and is durable after all, long after newer ones: those stay known. */
static void late(void **state)
{
    struct mb_drv_saves *s = mb_drv_saves_create();

    (void)state;
    note(s, 5, MB_DRV_SAVE_GIVEN_UP);
    for (int64_t i = 6; i < 300; i++)
        note(s, i, MB_DRV_SAVE_DURABLE);
    assert_true(mb_drv_saves_is_open(s, 5));
    assert_false(mb_drv_saves_is_open(s, 10));
    note(s, 5, MB_DRV_SAVE_DURABLE);
    assert_false(mb_drv_saves_is_open(s, 5));
    assert_false(mb_drv_saves_is_open(s, 10));
    mb_drv_saves_destroy(s);
}

/* A node that comes back with many saves commits the newest first. */
static void commits_in_any_order(void **state)
{
    struct mb_drv_saves *s = mb_drv_saves_create();

    (void)state;
    assert_true(mb_drv_saves_is_open(s, 0));
    note(s, 20, MB_DRV_SAVE_OPEN);
    note(s, 30, MB_DRV_SAVE_DURABLE);
    assert_false(mb_drv_saves_is_open(s, 30));
    assert_true(mb_drv_saves_is_open(s, 20));
    assert_true(mb_drv_saves_is_open(s, 10)); /* nothing was heard of it before its commit */
    note(s, 10, MB_DRV_SAVE_DURABLE);
    note(s, 20, MB_DRV_SAVE_DURABLE);
    assert_false(mb_drv_saves_is_open(s, 10));
    assert_false(mb_drv_saves_is_open(s, 20));
    mb_drv_saves_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(what_is_open),
                                       cmocka_unit_test(what_was_saved_again),
                                       cmocka_unit_test(what_the_store_no_longer_keeps),
                                       cmocka_unit_test(many),
                                       cmocka_unit_test(late),
                                       cmocka_unit_test(commits_in_any_order)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
