/* What inputs of a gang are called, and which shards a node needs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>
#include "agent/upload/inputs_plan.h"
#include "base/alloc.h"

static void check_split(const char *url, const char *store, const char *name)
{
    struct mb_err err = {0};
    char *a = NULL, *b = NULL;
    int rc = mb_input_split(url, &a, &b, &err);

    if (store == NULL) {
        assert_int_equal(rc, MB_EINVAL);
        assert_non_null(strstr(err.text, "a name is missing"));
        return;
    }
    assert_int_equal(rc, 0);
    assert_string_equal(a, store);
    assert_string_equal(b, name);
    mb_free(a);
    mb_free(b);
}

static void a_url_is_a_store_and_a_name(void **state)
{
    (void)state;
    check_split("s3://bucket/x", "s3://bucket", "x");
    check_split("s3://bucket/a/b c+d", "s3://bucket/a", "b c+d");
    check_split("s3://bucket/models/llama//", "s3://bucket/models", "llama");
    check_split("s3://bucket", NULL, NULL);
    check_split("s3://bucket/", NULL, NULL);
    check_split("s3://", NULL, NULL);
    check_split("bucket/x", NULL, NULL);
}

static void only_small_texts_belong_to_a_tokenizer(void **state)
{
    static const char *const yes[] = {"tokenizer.json", "merges.txt", "tokenizer.model",
                                      "a.tiktoken", "chat_template.jinja"};
    static const char *const no[] = {"model-00001-of-00002.safetensors",
                                     "pytorch_model.bin",
                                     "",
                                     ".hidden.json",
                                     "sub/tokenizer.json",
                                     "README.md"};

    (void)state;
    for (size_t i = 0; i < sizeof(yes) / sizeof(yes[0]); i++)
        assert_true(mb_input_is_of_tokenizer(yes[i], 1000));
    for (size_t i = 0; i < sizeof(no) / sizeof(no[0]); i++)
        assert_false(mb_input_is_of_tokenizer(no[i], 1000));
    assert_false(mb_input_is_of_tokenizer("tokenizer.json", (64u << 20) + 1));
}

static void another_object_is_another_directory(void **state)
{
    struct mb_input_file a[2] = {{.name = (char *)"x.bin", .size_bytes = 7, .etag = "e1"},
                                 {.name = (char *)"x.idx", .size_bytes = 9, .etag = "e2"}};
    char seen[6][33];

    (void)state;
    assert_int_equal(mb_input_version("s3://b/x", a, 2, seen[0]), 0);
    assert_int_equal(strlen(seen[0]), 32);
    assert_int_equal(mb_input_version("s3://b/x", a, 2, seen[1]), 0);
    assert_string_equal(seen[0], seen[1]);
    assert_int_equal(mb_input_version("s3://c/x", a, 2, seen[1]), 0);
    a[1].size_bytes = 10;
    assert_int_equal(mb_input_version("s3://b/x", a, 2, seen[2]), 0);
    a[1].size_bytes = 9;
    snprintf(a[0].etag, sizeof(a[0].etag), "e3");
    assert_int_equal(mb_input_version("s3://b/x", a, 2, seen[3]), 0);
    assert_int_equal(mb_input_version("s3://b/x", a, 1, seen[4]), 0);
    assert_int_equal(mb_input_version("s3://b/x", a, 0, seen[5]), 0);
    for (int i = 0; i < 6; i++)
        for (int k = 0; k < i; k++)
            assert_string_not_equal(seen[i], seen[k]);
    mb_alloc_fail_nth(1);
    assert_int_equal(mb_input_version("s3://b/x", a, 1, seen[0]), MB_ENOMEM);
    mb_alloc_fail_nth(0);
}

static void check_word(const char *word, const char *expected)
{
    int rc = 1;
    char *out = mb_input_replace(word, "s3://b/x", "/cache/x", &rc);

    assert_int_equal(rc, 0);
    if (expected == NULL)
        assert_null(out);
    else
        assert_string_equal(out, expected);
    mb_free(out);
}

static void only_the_url_itself_is_replaced(void **state)
{
    int rc;

    (void)state;
    check_word("s3://b/x", "/cache/x");
    check_word("--data-path=s3://b/x", "--data-path=/cache/x");
    check_word("s3://b/xy", NULL);
    check_word("--data-path=s3://b/xy", NULL);
    check_word("--data-path", NULL);
    check_word("0.5", NULL);
    mb_alloc_fail_nth(1);
    assert_null(mb_input_replace("s3://b/x", "s3://b/x", "/cache/x", &rc));
    assert_int_equal(rc, MB_ENOMEM);
    mb_alloc_fail_nth(0);
}

/* Elements of rank r, or of file r: as worker/parallel/comm.h says, mb_comm_range(). */
static void range(uint64_t n, uint64_t world, uint64_t r, uint64_t *begin, uint64_t *end)
{
    *begin = n / world * r + n % world * r / world;
    *end = n / world * (r + 1) + n % world * (r + 1) / world;
}

static void every_element_a_rank_needs_is_in_a_file_it_takes(void **state)
{
    char name[64];

    (void)state;
    for (uint32_t saved = 1; saved <= 9; saved++)
        for (uint32_t world = 1; world <= 9; world++)
            for (uint32_t rank = 0; rank < world; rank++)
                for (uint32_t part = 0; part < saved; part++) {
                    int taken, shares = 0;

                    snprintf(name, sizeof(name), "optim_dp_%03u_of_%03u.safetensors", part, saved);
                    taken = mb_input_wants(name, world, &rank, 1);
                    for (uint64_t n = 1; n < 60; n++) {
                        uint64_t a, b, c, d;

                        range(n, saved, part, &a, &b);
                        range(n, world, rank, &c, &d);
                        shares |= a < d && c < b;
                    }
                    assert_int_equal(taken, shares);
                }
}

static void weights_are_for_rank_0(void **state)
{
    const uint32_t first[] = {1, 0}, later[] = {2, 3};

    (void)state;
    assert_true(mb_input_wants("state.json", 4, first, 2));
    assert_true(mb_input_wants("model_tp00_pp00.safetensors", 4, first, 2));
    assert_true(mb_input_wants("mp_rank_01_002/model_optim_rng.pt", 4, first, 2));
    assert_false(mb_input_wants("state.json", 4, later, 2));
    assert_false(mb_input_wants("mp_rank_01_002/model_optim_rng.pt", 4, later, 2));
    assert_false(mb_input_wants("model_tp00_pp00.safetensors", 4, later, 2));
    assert_true(mb_input_wants("anything else", 4, later, 2));
    assert_true(mb_input_wants("optim_dp_007_of_002.safetensors", 4, later, 2)); /* no such part */
    assert_true(mb_input_wants("optim_dp_000_of_004.safetensors.x", 4, later, 2));
    assert_false(mb_input_wants("optim_dp_000_of_004.safetensors", 4, later, 2));
    assert_true(mb_input_wants("optim_dp_003_of_004.safetensors", 4, later, 2));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_url_is_a_store_and_a_name),
        cmocka_unit_test(only_small_texts_belong_to_a_tokenizer),
        cmocka_unit_test(another_object_is_another_directory),
        cmocka_unit_test(only_the_url_itself_is_replaced),
        cmocka_unit_test(every_element_a_rank_needs_is_in_a_file_it_takes),
        cmocka_unit_test(weights_are_for_rank_0),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
