/* Which words of a trainer's command line the nodes fetch. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "base/alloc.h"
#include "cli/train_inputs.h"

static struct mb_driver_input *list;
static size_t n_list;
static struct mb_err err;

static int parse(const char *const *words)
{
    int n = 0;

    mb_free(list);
    list = NULL;
    while (words[n] != NULL)
        n++;
    return mb_train_inputs((char **)(uintptr_t)words, n, &list, &n_list, &err);
}

static void each_flag_has_its_kind(void **state)
{
    static const char *const words[] = {"mobula-worker",
                                        "--data-path",
                                        "0.3",
                                        "s3://b/one",
                                        "0.7",
                                        "s3://b/two",
                                        "--lr",
                                        "1e-3",
                                        "--vocab-file=s3://b/vocab.json",
                                        "--merge-file",
                                        "s3://b/merges.txt",
                                        "--tokenizer-model",
                                        "s3://b/llama",
                                        "--valid-data-path",
                                        "/local/x",
                                        "s3://b/one",
                                        "--mock-data",
                                        "--pretrained-checkpoint",
                                        "s3://b/base/run",
                                        "--wandb-project",
                                        "s3://b/none",
                                        "--load=s3://b/base/other",
                                        NULL};
    static const struct mb_driver_input expected[] = {
        {"s3://b/one", 0, 0},        {"s3://b/two", 0, 0},   {"s3://b/vocab.json", 1, 0},
        {"s3://b/merges.txt", 1, 0}, {"s3://b/llama", 2, 0}, {"s3://b/base/run", 3, 1},
        {"s3://b/base/other", 3, 1}};

    (void)state;
    assert_int_equal(parse(words), 0);
    assert_int_equal(n_list, sizeof(expected) / sizeof(expected[0]));
    for (size_t i = 0; i < n_list; i++) {
        assert_string_equal(list[i].url, expected[i].url);
        assert_int_equal(list[i].kind, expected[i].kind);
        assert_int_equal(list[i].is_of_rank_0, expected[i].is_of_rank_0);
    }
}

static void local_paths_are_nobodys_matter(void **state)
{
    static const char *const words[] = {"mobula-worker", "--data-path", "corpus/s3://x",
                                        "--save",        "/ckpt",       NULL};

    (void)state;
    assert_int_equal(parse(words), 0);
    assert_int_equal(n_list, 0);
}

static void what_cannot_be_is_refused(void **state)
{
    static const char *const save[] = {"mobula-worker", "--save", "s3://b/x", NULL};
    static const char *const twice[] = {"mobula-worker", "--vocab-file", "s3://b/x",
                                        "--data-path",   "s3://b/x",     NULL};

    (void)state;
    assert_int_equal(parse(save), MB_EINVAL);
    assert_non_null(strstr(err.text, "--checkpoint-url"));
    assert_int_equal(parse(twice), MB_EINVAL);
    assert_non_null(strstr(err.text, "two kinds"));
    mb_alloc_fail_nth(1);
    assert_int_equal(parse(save), MB_ENOMEM);
    mb_alloc_fail_nth(0);
}

static int drop(void **state)
{
    (void)state;
    mb_free(list);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_flag_has_its_kind),
        cmocka_unit_test(local_paths_are_nobodys_matter),
        cmocka_unit_test(what_cannot_be_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, drop);
}
