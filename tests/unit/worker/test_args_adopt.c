/* What a run takes of a checkpoint's tokenizer and format. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "tests/unit/worker/args_line.h"
#include "worker/args.h"

#define GONE "No such file or directory (rank 1)"
#define FLAG "--no-use-tokenizer-model-from-checkpoint-args"

static const char THEIRS[] =
    "{\"tokenizer_type\": \"HuggingFaceTokenizer\", \"tokenizer_model\": \"/theirs\"}";

/* Of the line and the checkpoint's arguments; why_not as mb_args_adopt_tokenizer() has it. */
static int adopt(const char *line, const char *json, const char *why_not, struct mb_args *a,
                 struct mb_err *err)
{
    assert_int_equal(parse_line(line, a, err), 0);
    int rc = mb_args_adopt(a, json, err);
    return rc == 0 ? mb_args_adopt_tokenizer(a, why_not, err) : rc;
}

static int is_text(const char *have, const char *want)
{
    return have == NULL || want == NULL ? have == want : strcmp(have, want) == 0;
}

/* The checkpoint's, unless it is not there or not wanted. */
static void the_tokenizer_is_the_checkpoints(void **state)
{
    (void)state;
    static const char NULLS[] =
        "{\"tokenizer_type\": \"NullTokenizer\", \"tokenizer_model\": null}";
    static const struct {
        const char *line, *json, *why_not;
        const char *type, *model; /* then */
        const char *path;         /* that ranks are asked for */
        int is_taken;
    } CASES[] = {
        {"", THEIRS, NULL, "HuggingFaceTokenizer", "/theirs", "/theirs", 1},
        {"--tokenizer-type Llama2Tokenizer --tokenizer-model /ours", THEIRS, NULL,
         "HuggingFaceTokenizer", "/theirs", "/theirs", 1},
        {"--tokenizer-type Llama2Tokenizer --tokenizer-model /ours", THEIRS, GONE,
         "Llama2Tokenizer", "/ours", "/theirs", 0},
        {"--tokenizer-model /ours", THEIRS, GONE, "HuggingFaceTokenizer", "/ours", "/theirs", 1},
        {"--tokenizer-type GPT2BPETokenizer", THEIRS, GONE, "GPT2BPETokenizer", NULL, "/theirs", 0},
        {"--tokenizer-type Llama2Tokenizer --tokenizer-model /ours " FLAG, THEIRS, NULL,
         "Llama2Tokenizer", "/ours", NULL, 0},
        {"--tokenizer-model /ours " FLAG, THEIRS, NULL, "HuggingFaceTokenizer", "/ours", NULL, 1},
        {"--tokenizer-type Llama2Tokenizer --tokenizer-model /ours", NULLS, NULL, "NullTokenizer",
         "/ours", NULL, 1},
        {"--tokenizer-type Llama2Tokenizer --tokenizer-model /ours", "{}", NULL, "Llama2Tokenizer",
         "/ours", NULL, 0},
        {"", "{}", NULL, NULL, NULL, NULL, 0},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof CASES[0]; i++) {
        struct mb_args a;
        struct mb_err err;
        assert_int_equal(adopt(CASES[i].line, CASES[i].json, CASES[i].why_not, &a, &err), 0);
        assert_true(is_text(mb_args_tokenizer_path(&a), CASES[i].path));
        if (!is_text(a.tokenizer_type, CASES[i].type) ||
            !is_text(a.tokenizer_model, CASES[i].model)) {
            fail_msg("case %zu: %s %s", i, a.tokenizer_type, a.tokenizer_model);
        }
        assert_int_equal(a.checkpoint_tokenizer.is_taken, CASES[i].is_taken);
        mb_args_close(&a);
    }
}

static void a_tokenizer_that_is_not_there_is_told(void **state)
{
    (void)state;
    struct mb_args a;
    struct mb_err err;
    assert_int_equal(adopt("", THEIRS, GONE, &a, &err), MB_ENOENT);
    assert_string_equal(err.text,
                        "the checkpoint's tokenizer, tokenizer_model /theirs, is not readable "
                        "here: " GONE "; give --tokenizer-type and --tokenizer-model");
    mb_args_close(&a);
    assert_int_equal(adopt("--tokenizer-model /ours", THEIRS, GONE, &a, &err), 0);
    assert_non_null(strstr(mb_buf_str(&a.notes),
                           "note: the checkpoint's tokenizer, tokenizer_model /theirs, is not "
                           "readable here: " GONE "; the command line's is used\n"
                           "Setting tokenizer_type to HuggingFaceTokenizer from checkpoint\n"));
    mb_args_close(&a);
    assert_int_equal(adopt("", THEIRS, NULL, &a, &err), 0);
    assert_non_null(strstr(mb_buf_str(&a.notes),
                           "Setting tokenizer_model to /theirs from checkpoint\n"
                           "Setting tokenizer_type to HuggingFaceTokenizer from checkpoint\n"));
    mb_args_close(&a);
    static const char *const LACKS[] = {"tokenizer_model", "tokenizer_type", "tiktoken_pattern",
                                        "padded_vocab_size", "ckpt_format"};
    assert_int_equal(adopt("--tokenizer-model /ours", "{}", NULL, &a, &err), 0);
    for (size_t i = 0; i < sizeof LACKS / sizeof LACKS[0]; i++) {
        char line[96];
        snprintf(line, sizeof line, "Checkpoint did not provide arguments %s\n", LACKS[i]);
        assert_non_null(strstr(mb_buf_str(&a.notes), line));
    }
    mb_args_close(&a);
}

/* A path may be as long as a file system has them. */
static void long_paths_are_taken_whole(void **state)
{
    (void)state;
    enum { LENGTH = 3000 };
    char path[LENGTH + 1], json[LENGTH + 64];
    memset(path, 'x', LENGTH);
    path[LENGTH] = '\0';
    snprintf(json, sizeof json, "{\"tokenizer_model\": \"%s\"}", path);
    struct mb_args a;
    struct mb_err err;
    assert_int_equal(adopt("", json, NULL, &a, &err), 0);
    assert_string_equal(a.tokenizer_model, path);
    mb_args_close(&a);
    enum { TOO_LONG = 4096 };
    char more[TOO_LONG + 64];
    snprintf(more, sizeof more, "{\"tokenizer_model\": \"%0*d\"}", TOO_LONG, 0);
    assert_int_equal(adopt("--tokenizer-model /ours", more, NULL, &a, &err), MB_ECORRUPT);
    assert_string_equal(err.text,
                        "the checkpoint's argument tokenizer_model is longer than 4095 bytes");
    mb_args_close(&a);
}

static void no_tokenizer_is_made_of_other_things(void **state)
{
    (void)state;
    static const struct {
        const char *json, *text;
    } BAD[] = {
        {"{\"tokenizer_type\": 3}", "the checkpoint's argument tokenizer_type has a wrong type"},
        {"{\"tokenizer_model\": [\"x\"]}",
         "the checkpoint's argument tokenizer_model has a wrong type"},
        {"{\"tokenizer_type\": \"Foo\"}",
         "the checkpoint's argument tokenizer_type has the value Foo"},
        {"{\"tokenizer_model\": \"/a\\nWARNING: \\u001b[31mb\"}",
         "the checkpoint's argument tokenizer_model has control characters: "
         "/a\\x0aWARNING: \\x1b[31mb"},
        {"{\"ckpt_format\": \"a\\rb\"}",
         "the checkpoint's argument ckpt_format has control characters: a\\x0db"},
        {"{\"normalization\": \"a\\u0085b\"}",
         "the checkpoint's argument normalization has control characters: a\\xc2\\x85b"},
    };
    for (size_t i = 0; i < sizeof BAD / sizeof BAD[0]; i++) {
        struct mb_args a;
        struct mb_err err;
        assert_int_equal(adopt("", BAD[i].json, NULL, &a, &err), MB_ECORRUPT);
        assert_string_equal(err.text, BAD[i].text);
        mb_args_close(&a);
    }
}

/* What is saved stays what it was; what is not written is said. */
static void the_format_is_the_checkpoints(void **state)
{
    (void)state;
    static const struct {
        const char *line, *format, *want, *note;
    } CASES[] = {
        {"", "torch", "torch", "Setting ckpt_format to torch from checkpoint\n"},
        {"", "torch_dist", "torch_dist", "Setting ckpt_format to torch_dist from checkpoint\n"},
        {"--ckpt-format safetensors", "torch", "safetensors", ""},
        {"", "zarr", "safetensors",
         "note: the checkpoint's ckpt_format, zarr, is not written: --ckpt-format says what is\n"},
        {"", "of tomorrow", "safetensors", "note: the checkpoint's ckpt_format, of tomorrow, is "},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof CASES[0]; i++) {
        struct mb_args a;
        struct mb_err err;
        char json[96];
        snprintf(json, sizeof json, "{\"ckpt_format\": \"%s\"}", CASES[i].format);
        assert_int_equal(adopt(CASES[i].line, json, NULL, &a, &err), 0);
        assert_string_equal(a.ckpt_format, CASES[i].want);
        assert_non_null(strstr(mb_buf_str(&a.notes), CASES[i].note));
        mb_args_close(&a);
    }
}

static void memory_may_end_anywhere(void **state)
{
    (void)state;
    for (unsigned long nth = 1;; nth++) {
        struct mb_args a;
        struct mb_err err;
        assert_int_equal(parse_line("--tokenizer-model /ours", &a, &err), 0);
        mb_alloc_fail_nth(nth);
        int rc = mb_args_adopt(&a, THEIRS, &err);
        rc = rc == 0 ? mb_args_adopt_tokenizer(&a, nth % 2 ? GONE : NULL, &err) : rc;
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        mb_args_close(&a);
        assert_int_equal(rc, failed ? MB_ENOMEM : 0);
        if (!failed) {
            break;
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_tokenizer_is_the_checkpoints),
        cmocka_unit_test(a_tokenizer_that_is_not_there_is_told),
        cmocka_unit_test(long_paths_are_taken_whole),
        cmocka_unit_test(no_tokenizer_is_made_of_other_things),
        cmocka_unit_test(the_format_is_the_checkpoints),
        cmocka_unit_test(memory_may_end_anywhere),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
