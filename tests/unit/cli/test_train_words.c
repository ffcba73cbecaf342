/* Which words of `mobula train` are the launcher's, and that none of the trainer's is mistaken. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "cli/train_words.h"
#include "worker/args_table.h"

static void test_own_words(void **state)
{
    (void)state;
    assert_int_equal(mb_train_own_words("--num-nodes", 1), 2);
    assert_int_equal(mb_train_own_words("--num-nodes", 0), 1);
    assert_int_equal(mb_train_own_words("--num-nodes=2", 1), 1);
    assert_int_equal(mb_train_own_words("--num-layers", 1), 0);
    assert_int_equal(mb_train_own_words("num-nodes", 1), 0);
    assert_int_equal(mb_train_own_words("--", 1), 0);
}

static void test_misspelt_options_are_refused(void **state)
{
    static const struct {
        const char *word, *text;
    } bad[] = {
        {"--num-node", "train: unknown argument --num-node; did you mean --num-nodes?"},
        {"--num-node=2", "train: unknown argument --num-node; did you mean --num-nodes?"},
        {"--num_nodes", "did you mean --num-nodes?"},
        {"--gpu-per-node", "did you mean --gpus-per-node?"},
        {"--checkpoint-uri", "did you mean --checkpoint-url?"},
        {"--nmae", "did you mean --name?"},
        {"--adress", "did you mean --address?"},
        {"--wait-timout=1h", "did you mean --wait-timeout?"},
    };

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct mb_err err = {0};

        assert_int_equal(mb_train_check_word(bad[i].word, &err), MB_EINVAL);
        if (strstr(err.text, bad[i].text) == NULL)
            fail_msg("%s: %s", bad[i].word, err.text);
    }
}

static void test_the_rest_is_left_to_the_ranks(void **state)
{
    static const char *const words[] = {"--savee", "--sav", "--num-layer", "--hiden-size",
                                        "--x",     "--",    "-1",          "num-node",
                                        "",        "--=x"};
    char longest[200];

    (void)state;
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++)
        if (mb_train_check_word(words[i], &(struct mb_err){0}) != 0)
            fail_msg("%s", words[i]);
    memset(longest, '-', sizeof(longest) - 1);
    longest[sizeof(longest) - 1] = '\0';
    assert_int_equal(mb_train_check_word(longest, &(struct mb_err){0}), 0);
}

static void test_no_argument_of_the_trainer_is_refused(void **state)
{
    char word[80];
    size_t n = 0;

    (void)state;
    for (size_t i = 0; i < MB_ARG_N_ROWS; i++) {
        struct mb_err err = {0};

        if (MB_ARG_ROWS[i].type == MB_ARG_COMPUTED)
            continue;
        snprintf(word, sizeof(word), "--%s", MB_ARG_ROWS[i].name);
        assert_int_equal(mb_train_own_words(word, 1), 0);
        if (mb_train_check_word(word, &err) != 0)
            fail_msg("%s", err.text);
        n++;
    }
    assert_true(n > 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_own_words),
        cmocka_unit_test(test_misspelt_options_are_refused),
        cmocka_unit_test(test_the_rest_is_left_to_the_ranks),
        cmocka_unit_test(test_no_argument_of_the_trainer_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
