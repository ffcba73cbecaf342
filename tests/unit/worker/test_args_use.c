/* What Megatron's rows ask for beyond the model: formats of numbers, CUDA graphs, statuses, the
 * dump's values. */
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
#include "worker/args_table.h"

#define BASE                                                                                       \
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "                     \
    "--max-position-embeddings 32 --distributed-backend gloo --lr 1e-3 --mock-data "               \
    "--tokenizer-type NullTokenizer --vocab-size 100 --micro-batch-size 2 --train-iters 10 "

static int is_in_dump(const struct mb_args *a, const char *line)
{
    struct mb_buf out = {0};
    assert_int_equal(mb_args_dump(a, &out), 0);
    int found = strstr(mb_buf_str(&out), line) != NULL;
    mb_buf_close(&out);
    return found;
}

/* fp32 sums are the rule, which is said, and exclude bf16 ones. */
static void gradients_of_bf16_are_summed_in_fp32_or_bf16(void **state)
{
    (void)state;
    static const char FORCED[] =
        "accumulate and all-reduce gradients in fp32 for bfloat16 data type.\n";
    struct mb_args a;
    struct mb_err err;
    assert_int_equal(validate_line(BASE "--distributed-backend nccl --bf16", 1, &a, &err), 0);
    assert_string_equal(mb_buf_str(&a.notes), FORCED);
    assert_true(a.accumulate_allreduce_grads_in_fp32 && !a.grad_reduce_in_bf16);
    mb_args_close(&a);
    assert_int_equal(
        validate_line(BASE "--distributed-backend nccl --bf16 --grad-reduce-in-bf16", 1, &a, &err),
        0);
    assert_string_equal(mb_buf_str(&a.notes), "");
    assert_true(!a.accumulate_allreduce_grads_in_fp32 && a.grad_reduce_in_bf16);
    mb_args_close(&a);
    assert_int_equal(validate_line(BASE "--bf16 --grad-reduce-in-bf16 "
                                        "--accumulate-allreduce-grads-in-fp32",
                                   1, &a, &err),
                     MB_EINVAL);
    assert_string_equal(err.text, "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 "
                                  "exclude each other");
    assert_false(a.is_usage);
    mb_args_close(&a);
    assert_int_equal(validate_line(BASE "--grad-reduce-in-bf16", 1, &a, &err), 0);
    assert_false(a.grad_reduce_in_bf16);
    assert_string_equal(mb_buf_str(&a.notes),
                        "note: --grad-reduce-in-bf16 has no effect without --bf16\n");
    mb_args_close(&a);
}

/* argparse's own refusals, and what it would not let through, are told apart from Megatron's. */
static void argparse_has_a_status_of_its_own(void **state)
{
    (void)state;
    static const struct {
        const char *line;
        int rc, is_usage;
    } CASES[] = {
        {BASE "--nosuch", MB_EINVAL, 1},
        {BASE "--lr-decay-style sine", MB_EINVAL, 1},
        {BASE "--profile-ranks", MB_EINVAL, 1},
        {BASE "--profile-ranks one", MB_EINVAL, 1},
        {"--distributed-backend gloo --mock-data --micro-batch-size 1 --train-iters 1", MB_EINVAL,
         1},
        {BASE "--num-attention-heads 5", MB_EINVAL, 0},
        {BASE "--fp8-format hybrid", MB_EUNSUPPORTED, 0},
        {BASE "--ckpt-format zarr", MB_EUNSUPPORTED, 0},
        {BASE "--ckpt-format torch_dcp", MB_EUNSUPPORTED, 0},
        {BASE "--ckpt-format torch --ckpt-format fsdp_dtensor", MB_EUNSUPPORTED, 0},
        {BASE "--ckpt-format zarr --ckpt-format torch_dist", 0, 0},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof CASES[0]; i++) {
        struct mb_args a;
        struct mb_err err;
        assert_int_equal(validate_line(CASES[i].line, 1, &a, &err), CASES[i].rc);
        assert_int_equal(a.is_usage, CASES[i].is_usage);
        mb_args_close(&a);
    }
}

/* What is saved instead of torch_dist, and how to get what Megatron-LM reads; without --save
 * nothing is. */
static void another_format_is_warned_of(void **state)
{
    (void)state;
    static const char SAVE[] = BASE "--save /ckpt --save-interval 5 ";
    static const char WARNING[] =
        "WARNING: --ckpt-format torch_dist: checkpoints are saved to /ckpt in safetensors format; "
        "--ckpt-format torch saves what Megatron-LM reads, and `mobula checkpoint convert --to "
        "megatron /ckpt TARGET` makes it of them\n";
    static const struct {
        const char *more;
        int saves, warns;
    } CASES[] = {{"--ckpt-format torch_dist", 1, 1},
                 {"--ckpt-format torch --ckpt-format torch_dist", 1, 1},
                 {"--ckpt-format torch_dist", 0, 0},
                 {"--ckpt-format torch", 1, 0},
                 {"--ckpt-format torch_dist --ckpt-format safetensors", 1, 0},
                 {"", 1, 0}};
    for (size_t i = 0; i < sizeof CASES / sizeof CASES[0]; i++) {
        struct mb_args a;
        struct mb_err err;
        char line[512];
        snprintf(line, sizeof line, "%s%s", CASES[i].saves ? SAVE : BASE, CASES[i].more);
        assert_int_equal(validate_line(line, 1, &a, &err), 0);
        assert_int_equal(strstr(mb_buf_str(&a.notes), WARNING) != NULL, CASES[i].warns);
        assert_int_equal(strstr(mb_buf_str(&a.notes), "WARNING: --ckpt-format") != NULL,
                         CASES[i].warns);
        mb_args_close(&a);
    }
}

/* As Python prints them: a default that is an int stays one, ints have no quotes. */
static void the_dump_has_pythons_values(void **state)
{
    (void)state;
    struct mb_args a;
    struct mb_err err;
    assert_int_equal(validate_line(BASE "--bf16", 1, &a, &err), 0);
    static const char *const DEFAULTS[] = {
        "  bf16 ............................................ True\n",
        "  accumulate_allreduce_grads_in_fp32 .............. True\n",
        "  initial_loss_scale .............................. 4294967296\n",
        "  loss_scale_window ............................... 1000\n",
        "  min_loss_scale .................................. 1.0\n",
        "  profile_ranks ................................... [0]\n",
    };
    for (size_t i = 0; i < sizeof DEFAULTS / sizeof DEFAULTS[0]; i++) {
        if (!is_in_dump(&a, DEFAULTS[i])) {
            fail_msg("not in the dump: %s", DEFAULTS[i]);
        }
    }
    mb_args_close(&a);
    assert_int_equal(
        validate_line(BASE "--fp16 --initial-loss-scale 65536 --profile-ranks 3 0", 1, &a, &err),
        0);
    assert_true(is_in_dump(&a, "  initial_loss_scale .............................. 65536.0\n"));
    assert_true(is_in_dump(&a, "  profile_ranks ................................... [3, 0]\n"));
    mb_args_close(&a);
}

/* Only when asked for: how ranks share the model is the checkpoint's. */
static void a_checkpoint_says_how_ranks_share_the_model(void **state)
{
    (void)state;
    static const char THEIRS[] =
        "{\"tensor_model_parallel_size\": 4, \"pipeline_model_parallel_size\": 2, "
        "\"num_layers_per_virtual_pipeline_stage\": null}";
    for (int asked = 0; asked < 2; asked++) {
        const char *const argv[] = {"--tensor-model-parallel-size", "2",
                                    "--num-layers-per-virtual-pipeline-stage", "1",
                                    "--use-mp-args-from-checkpoint-args"};
        struct mb_args a;
        struct mb_err err;
        assert_int_equal(mb_args_parse(&a, asked ? 5 : 4, argv, &err), 0);
        assert_int_equal(mb_args_adopt(&a, THEIRS, &err), 0);
        assert_int_equal(a.tensor_model_parallel_size, asked ? 4 : 2);
        assert_int_equal(a.pipeline_model_parallel_size, asked ? 2 : 1);
        assert_int_equal(a.num_layers_per_virtual_pipeline_stage, asked ? MB_ARGS_NONE : 1);
        mb_args_close(&a);
    }
    struct mb_args a;
    struct mb_err err;
    const char *const argv[] = {"--use-mp-args-from-checkpoint-args"};
    assert_int_equal(mb_args_parse(&a, 1, argv, &err), 0);
    assert_int_equal(mb_args_adopt(&a, "{\"tensor_model_parallel_size\": []}", &err), MB_ECORRUPT);
    mb_args_close(&a);
}

/* What Megatron-LM's validate_args() derives, its dump and its checkpoints have. */
static void what_derives_is_megatrons(void **state)
{
    (void)state;
    static const struct {
        const char *more, *dump, *notes;
    } CASES[] = {
        {"", "  add_qkv_bias .................................... True\n", ""},
        {"--disable-bias-linear", "  add_qkv_bias .................................... False\n",
         ""},
        {"", "  recompute_granularity ........................... None\n", ""},
        {"--recompute-activations",
         "  recompute_granularity ........................... selective\n", ""},
        {"--recompute-activations --recompute-granularity full --recompute-method uniform",
         "  recompute_granularity ........................... full\n",
         "note: --recompute-activations has no effect with --recompute-granularity full (in "
         "Megatron-LM that one has none)\n"},
        {"--recompute-method uniform", "  recompute_granularity ........................... None\n",
         "note: --recompute-method has no effect without --recompute-granularity\n"},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof CASES[0]; i++) {
        struct mb_args a;
        struct mb_err err;
        char line[512];
        snprintf(line, sizeof line, "%s%s", BASE, CASES[i].more);
        assert_int_equal(validate_line(line, 1, &a, &err), 0);
        if (!is_in_dump(&a, CASES[i].dump)) {
            fail_msg("not in the dump: %s", CASES[i].dump);
        }
        assert_string_equal(mb_buf_str(&a.notes), CASES[i].notes);
        mb_args_close(&a);
    }
}

/* With all biases it says nothing: Megatron-LM has it set then, and runs of ours of before had not.
 */
static void biases_of_queries_are_compared_where_they_are_apart(void **state)
{
    (void)state;
    static const struct {
        const char *more, *json;
        int rc;
    } CASES[] = {
        {"", "{\"add_bias_linear\": true, \"add_qkv_bias\": true}", 0},
        {"", "{\"add_bias_linear\": true, \"add_qkv_bias\": false}", 0},
        {"--disable-bias-linear", "{\"add_bias_linear\": false, \"add_qkv_bias\": true}",
         MB_EINVAL},
        {"--disable-bias-linear", "{\"add_bias_linear\": false, \"add_qkv_bias\": false}", 0},
        {"--disable-bias-linear --add-qkv-bias",
         "{\"add_bias_linear\": true, \"add_qkv_bias\": true}", MB_EINVAL},
    };
    for (size_t i = 0; i < 2 * (sizeof CASES / sizeof CASES[0]); i++) {
        struct mb_buf notes = {0};
        struct mb_args a;
        struct mb_err err;
        char line[512];
        snprintf(line, sizeof line, "%s%s", BASE, CASES[i / 2].more);
        assert_int_equal(validate_line(line, 1, &a, &err), 0);
        int rc = mb_args_compare(&a, CASES[i / 2].json, i % 2 != 0, &notes, &err);
        if (rc != CASES[i / 2].rc) {
            fail_msg("case %zu: %d", i / 2, rc);
        }
        mb_buf_close(&notes);
        mb_args_close(&a);
    }
}

static int take_data_args(struct mb_args *a, const char *text, struct mb_err *err)
{
    return mb_args_take_data_args(a, text, strlen(text), err);
}

/* Words of a file, whatever separates them. */
static void data_path_comes_from_a_file(void **state)
{
    (void)state;
    struct mb_args a;
    struct mb_err err;
    assert_int_equal(mb_args_parse(&a, 0, NULL, &err), 0);
    assert_int_equal(take_data_args(&a, " 0.3 /data/a\n\t0.7  /data/b\r\n", &err), 0);
    assert_int_equal(a.data_path.n, 4);
    assert_string_equal(a.data_path.items[0], "0.3");
    assert_string_equal(a.data_path.items[3], "/data/b");
    assert_int_equal(take_data_args(&a, "x", &err), MB_EINVAL);
    assert_string_equal(err.text, "--data-path and --data-args-path exclude each other");
    mb_args_close(&a);
    for (unsigned long nth = 1;; nth++) { /* every allocation fails once */
        assert_int_equal(mb_args_parse(&a, 0, NULL, &err), 0);
        mb_alloc_fail_nth(nth);
        int rc = take_data_args(&a, "a b", &err);
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        mb_args_close(&a);
        assert_int_equal(rc, failed ? MB_ENOMEM : 0);
        if (!failed) {
            break;
        }
    }
}

/* Quotes and backslashes are bytes of a word, as of Python's split(); a file that ends early, or
 * has nothing, is no shorter list. */
static void a_file_of_data_has_words_and_nothing_else(void **state)
{
    (void)state;
    static const char ODD[] = "\"/data/a b\\\n'c\x1c--lr d\\", NUL[] = "0.3 /data/a\0 0.7 /data/b";
    static const char *const WANT[] = {"\"/data/a", "b\\", "'c", "--lr", "d\\"};
    struct mb_args a;
    struct mb_err err;
    assert_int_equal(mb_args_parse(&a, 0, NULL, &err), 0);
    assert_int_equal(mb_args_take_data_args(&a, NUL, sizeof NUL - 1, &err), MB_EINVAL);
    assert_string_equal(err.text, "byte 11 is 0: the file is no text");
    assert_int_equal(take_data_args(&a, " \n\t", &err), MB_EINVAL);
    assert_string_equal(err.text, "the file has no words");
    assert_int_equal(mb_args_take_data_args(&a, ODD, sizeof ODD - 1, &err), 0);
    assert_int_equal(a.data_path.n, 5);
    for (size_t i = 0; i < 5; i++) {
        assert_string_equal(a.data_path.items[i], WANT[i]);
    }
    mb_args_close(&a);
}

/* Megatron-LM's own groups, in its order, and what stands in which. */
static void the_help_has_megatrons_groups(void **state)
{
    (void)state;
    static const char *const TITLES[] = {
        "network size",  "regularization",      "training",           "initialization",
        "learning rate", "checkpointing",       "mixed precision",    "distributed",
        "validation",    "data and dataloader", "tokenizer",          "moe",
        "logging",       "inference",           "Transformer-Engine", "experimental",
    };
    static const struct {
        const char *title, *flag;
    } MEMBERS[] = {
        {"training", "use-flash-attn"},           {"inference", "cuda-graph-impl"},
        {"inference", "enable-cuda-graph"},       {"inference", "cuda-graph-scope"},
        {"Transformer-Engine", "fp8-format"},     {"Transformer-Engine", "transformer-impl"},
        {"Transformer-Engine", "te-rng-tracker"}, {"experimental", "yaml-cfg"},
    };
    struct mb_buf out = {0};
    assert_int_equal(mb_args_help(&out), 0);
    const char *at = mb_buf_str(&out);
    for (size_t i = 0; i < sizeof TITLES / sizeof TITLES[0]; i++) {
        char line[64];
        snprintf(line, sizeof line, "\n%s:\n", TITLES[i]);
        at = strstr(at, line);
        if (at == NULL) {
            fail_msg("no group, or not in its place: %s", TITLES[i]);
        }
        assert_null(strstr(at + 1, line));
    }
    for (size_t i = 0; i < sizeof MEMBERS / sizeof MEMBERS[0]; i++) {
        char title[64], flag[64];
        snprintf(title, sizeof title, "\n%s:\n", MEMBERS[i].title);
        snprintf(flag, sizeof flag, "\n  --%s", MEMBERS[i].flag);
        const char *const from = strstr(mb_buf_str(&out), title);
        assert_non_null(from);
        const char *const found = strstr(from, flag);
        if (found == NULL || found > strstr(from, "\n\n")) {
            fail_msg("--%s is not in %s", MEMBERS[i].flag, MEMBERS[i].title);
        }
    }
    mb_buf_close(&out);
}

/* Weights are gathered after the update, whatever is asked for. */
static void what_is_not_overlapped_is_said(void **state)
{
    (void)state;
    struct mb_args a;
    struct mb_err err;
    assert_int_equal(validate_line(BASE "--use-distributed-optimizer --overlap-grad-reduce "
                                        "--overlap-param-gather",
                                   2, &a, &err),
                     0);
    assert_non_null(strstr(mb_buf_str(&a.notes),
                           "note: --overlap-param-gather has no effect: weights are gathered "
                           "after the update, before the next forward pass\n"));
    mb_args_close(&a);
}

static void graphs_are_for_gpus(void **state)
{
    (void)state;
    static const struct {
        const char *given, *notes;
        int wants;
    } GOOD[] = {{"", "", 0},
                {"--cuda-graph-impl none", "", 0},
                {"--distributed-backend nccl --cuda-graph-impl none", "", 0},
                {"--distributed-backend nccl", "", 1},
                {"--distributed-backend nccl --profile", "", 0},
                {"--distributed-backend nccl --profile --cuda-graph-impl local",
                 "note: with --profile there are no CUDA graphs, so that ranges name layers\n", 0},
                {"--distributed-backend nccl --cuda-graph-impl local", "", 1},
                {"--distributed-backend nccl --enable-cuda-graph", "", 1},
                {"--cuda-graph-impl local",
                 "note: CUDA graphs are for GPUs; on the CPU they have no effect\n", 0},
                {"--enable-cuda-graph",
                 "note: CUDA graphs are for GPUs; on the CPU they have no effect\n", 0}};
    static const char *const BAD[] = {"--cuda-graph-impl transformer_engine",
                                      "--cuda-graph-impl full_iteration", "--external-cuda-graph",
                                      "--enable-cuda-graph --cuda-graph-impl local"};
    struct mb_args a;
    struct mb_err err;
    char line[1024];
    for (size_t i = 0; i < sizeof GOOD / sizeof GOOD[0]; i++) {
        snprintf(line, sizeof line, "%s %s", BASE, GOOD[i].given);
        assert_int_equal(validate_line(line, 1, &a, &err), 0);
        assert_string_equal(mb_buf_str(&a.notes), GOOD[i].notes);
        assert_int_equal(mb_args_wants_graphs(&a), GOOD[i].wants);
        mb_args_close(&a);
    }
    for (size_t i = 0; i < sizeof BAD / sizeof BAD[0]; i++) {
        snprintf(line, sizeof line, "%s --distributed-backend nccl %s", BASE, BAD[i]);
        assert_int_not_equal(validate_line(line, 1, &a, &err), 0);
        assert_non_null(strstr(err.text, "cuda-graph"));
        mb_args_close(&a);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(graphs_are_for_gpus),
        cmocka_unit_test(what_is_not_overlapped_is_said),
        cmocka_unit_test(gradients_of_bf16_are_summed_in_fp32_or_bf16),
        cmocka_unit_test(argparse_has_a_status_of_its_own),
        cmocka_unit_test(another_format_is_warned_of),
        cmocka_unit_test(the_dump_has_pythons_values),
        cmocka_unit_test(a_checkpoint_says_how_ranks_share_the_model),
        cmocka_unit_test(what_derives_is_megatrons),
        cmocka_unit_test(biases_of_queries_are_compared_where_they_are_apart),
        cmocka_unit_test(data_path_comes_from_a_file),
        cmocka_unit_test(a_file_of_data_has_words_and_nothing_else),
        cmocka_unit_test(the_help_has_megatrons_groups),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
