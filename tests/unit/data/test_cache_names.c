/* Descriptions of cached indices and their hashes: what megatron-core 0.16.1 and Python 3.11 say.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/data/cache_names.h"

static const struct mb_tokenizer_options null_tokenizer = {.type = "NullTokenizer",
                                                           .vocab_size = 300};

static void expect_base(struct mb_buf *text, const char *class_name, enum mb_split split,
                        const char *want)
{
    char base[MB_CACHE_BASE_MAX];

    assert_int_equal(mb_cache_base(text, class_name, split, base, NULL), 0);
    assert_string_equal(base, want);
    mb_buf_close(text);
}

static void test_a_data_set(void **state)
{
    static const char want[] =
        "{\n    \"class\": \"GPTDataset\",\n    \"dataset_path\": "
        "\"/data/\\u00e9\\ud834\\udd1e\\u0001\\u007f\\\"\\\\\\n\",\n    \"num_samples\": 80,\n"
        "    \"index_split\": \"valid\",\n    \"random_seed\": 1234,\n    \"sequence_length\": "
        "32,\n"
        "    \"split\": \"0,90, 10.5\",\n    \"split_matrix\": [\n        null,\n        [\n"
        "            0.0,\n            0.8955223880597015\n        ],\n        [\n"
        "            0.8955223880597015,\n            1.0\n        ]\n    ],\n"
        "    \"tokenizer\": {\n        \"class\": "
        "\"megatron.core.tokenizers.text.models.default_tokenizer.DefaultTokenizerText\",\n"
        "        \"tokenizer_path\": null,\n        \"vocab_size\": \"300\"\n    }\n}";
    struct mb_cache_identity identity;
    struct mb_split_matrix matrix;
    struct mb_buf text = {0};
    struct mb_cache_key key = {.prefix = "/data/\xc3\xa9\xf0\x9d\x84\x9e\x01\x7f\"\\\n",
                               .n_samples = 80,
                               .split = MB_SPLIT_VALID,
                               .seed = 1234,
                               .seq_length = 32,
                               .split_text = "0,90, 10.5",
                               .matrix = &matrix,
                               .tokenizer = &identity};

    (void)state;
    assert_int_equal(mb_cache_identity_make(&null_tokenizer, &identity, NULL), 0);
    assert_int_equal(mb_split_parse(key.split_text, &matrix, NULL), 0);
    assert_int_equal(mb_cache_describe(&key, &text), 0);
    assert_string_equal(mb_buf_str(&text), want);
    expect_base(&text, mb_cache_class(&key), key.split,
                "0bb8e2db25ac9f6eeecb48174c3e3d69-GPTDataset-valid");

    /* os.fsdecode(b"\xff\xc3(") has a surrogate for each byte that is no UTF-8. */
    key.prefix = "\xff\xc3(";
    assert_int_equal(mb_cache_describe(&key, &text), 0);
    assert_non_null(strstr(mb_buf_str(&text), "\"dataset_path\": \"\\udcff\\udcc3(\""));
    mb_buf_close(&text);

    key.prefix = NULL;
    key.split_text = "1,1,1";
    assert_int_equal(mb_split_parse(key.split_text, &matrix, NULL), 0);
    assert_int_equal(mb_cache_describe(&key, &text), 0);
    assert_non_null(
        strstr(mb_buf_str(&text), "\"class\": \"MockGPTDataset\",\n    \"dataset_path\": null"));
    assert_non_null(strstr(mb_buf_str(&text), "            0,\n            0.3333333333333333\n"));
    mb_buf_close(&text);
    mb_cache_identity_close(&identity);
}

static void test_a_blend(void **state)
{
    struct mb_cache_identity identity;
    struct mb_cache_key keys[2] = {
        {.prefix = "a", .n_samples = -1, .seed = 1234, .seq_length = 32, .tokenizer = &identity},
        {.prefix = "b", .n_samples = 7, .seed = 1234, .seq_length = 32, .tokenizer = &identity}};
    const double quarters[] = {0.25, 0.75};
    const double tenths[] = {0.1, 0.9};
    struct mb_buf text = {0};

    (void)state;
    assert_int_equal(mb_cache_identity_make(&null_tokenizer, &identity, NULL), 0);
    assert_int_equal(mb_cache_describe_blend(keys, quarters, 2, 12, &text), 0);
    expect_base(&text, "BlendedDataset", MB_SPLIT_TRAIN,
                "4fa95cbe662a32ac030c914f550fbf0f-BlendedDataset-train");
    assert_int_equal(mb_cache_describe_blend(keys, tenths, 2, 12, &text), 0);
    expect_base(&text, "BlendedDataset", MB_SPLIT_TRAIN,
                "bbc0e2c8692e8b3e20a59ecdc2a6d30d-BlendedDataset-train");
    mb_cache_identity_close(&identity);
}

static void expect_identity(const struct mb_tokenizer_options *o, const char *const *pairs)
{
    struct mb_cache_identity x;
    size_t n = 0;

    assert_int_equal(mb_cache_identity_make(o, &x, NULL), 0);
    assert_string_equal(x.keys[0], "class");
    for (n = 1; pairs[2 * n - 2] != NULL; n++) {
        assert_true(n < x.n);
        assert_string_equal(x.keys[n], pairs[2 * n - 2]);
        assert_string_equal(x.values[n], pairs[2 * n - 1]);
    }
    assert_int_equal(x.n, n);
    mb_cache_identity_close(&x);
}

static void test_tokenizers(void **state)
{
    static const char *const special[] = {"<s>", "it's", "\"", "'\""};
    const struct mb_tokenizer_options gpt2 = {.vocab_file = "v", .merge_file = "m"};
    const struct mb_tokenizer_options hf = {.type = "HuggingFaceTokenizer", .tokenizer_model = "d"};
    const struct mb_tokenizer_options spm = {.type = "Llama2Tokenizer", .tokenizer_model = "d"};
    const struct mb_tokenizer_options tik = {.type = "TikTokenizer",
                                             .tokenizer_model = "d",
                                             .tiktoken_pattern = "v2",
                                             .vocab_size = 9,
                                             .tiktoken_num_special_tokens = 1000,
                                             .tiktoken_special_tokens = special,
                                             .n_tiktoken_special_tokens = 4};
    const struct mb_tokenizer_options unknown = {.type = "MistralTokenizer"};
    struct mb_cache_identity x;

    (void)state;
    expect_identity(&gpt2, (const char *const[]){"tokenizer_path", "GPT2BPETokenizer",
                                                 "additional_special_tokens", "[]", "vocab_file",
                                                 "v", "merges_file", "m", "use_fast", "False",
                                                 "trust_remote_code", "False",
                                                 "include_special_tokens", "False", NULL});
    expect_identity(&hf, (const char *const[]){"tokenizer_path", "d", "vocab_file", "None",
                                               "merges_file", "None", "additional_special_tokens",
                                               "[]", "use_fast", "False", "trust_remote_code",
                                               "False", "include_special_tokens", "False", NULL});
    expect_identity(&spm, (const char *const[]){"tokenizer_path", "d", "legacy", "False",
                                                "special_tokens", "None", NULL});
    expect_identity(&tik,
                    (const char *const[]){"tokenizer_path", "d", "pattern", "v2", "vocab_size", "9",
                                          "num_special_tokens", "1000", "special_tokens",
                                          "['<s>', \"it's\", '\"', '\\'\"']", NULL});
    assert_int_equal(mb_cache_identity_make(&unknown, &x, NULL), MB_EUNSUPPORTED);
    for (unsigned long n = 1;; n++) {
        int rc;
        mb_alloc_fail_nth(n);
        rc = mb_cache_identity_make(&tik, &x, NULL);
        if (!mb_alloc_did_fail()) {
            mb_alloc_fail_nth(0);
            assert_int_equal(rc, 0);
            mb_cache_identity_close(&x);
            break;
        }
        assert_int_equal(rc, MB_ENOMEM);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_data_set),
        cmocka_unit_test(test_a_blend),
        cmocka_unit_test(test_tokenizers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
