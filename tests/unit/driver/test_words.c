/* What a trainer's words become where its run goes on. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>
#include "cli/driver/words.h"

enum { WORDS_MAX = 8 };

static void check(const char *const *argv, const char *const *expected)
{
    const char *got[WORDS_MAX + 1] = {NULL};
    size_t n = drv_words_going_on(argv, got);

    for (size_t i = 0; i < n; i++) {
        assert_non_null(expected[i]);
        assert_string_equal(got[i], expected[i]);
    }
    assert_null(expected[n]);
}

static void test_a_beginning_is_left_out(void **state)
{
    (void)state;
    check((const char *[]){"w", "--finetune", "--lr", "1", "--no-load-optim", NULL},
          (const char *[]){"w", "--lr", "1", NULL});
    check((const char *[]){"w", "--lr", "1", NULL}, (const char *[]){"w", "--lr", "1", NULL});
    check((const char *[]){NULL}, (const char *[]){NULL});
}

static void test_what_was_not_saved_is_not_asked_for(void **state)
{
    const char *const argv[] = {"w", "--no-load-optim", "--no-save-optim", "--finetune", NULL};
    const char *const bare[] = {"w", "--no-save-optim", NULL};

    (void)state;
    check(argv, (const char *[]){"w", "--no-save-optim", "--no-load-optim", NULL});
    check(bare, (const char *[]){"w", "--no-save-optim", "--no-load-optim", NULL});
    assert_true(drv_words_lack_optimizer(bare));
    assert_false(drv_words_lack_optimizer((const char *[]){"w", "--finetune", NULL}));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_beginning_is_left_out),
        cmocka_unit_test(test_what_was_not_saved_is_not_asked_for),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
