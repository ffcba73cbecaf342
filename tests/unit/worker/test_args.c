/* Megatron's command line: argparse's syntax, Megatron's checks, refusals by name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "worker/args_table.h"

#define MODEL                                                                                      \
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "                     \
    "--max-position-embeddings 32 --distributed-backend gloo --lr 1e-3 "
#define DATA "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 "
#define BASE MODEL DATA "--micro-batch-size 2 --train-iters 10 "

/* Splits at spaces; the words live in `text`. */
static int parse_line(const char *line, struct mb_args *args, struct mb_err *err)
{
    char *text = mb_strdup(line);
    const char *argv[128];
    int argc = 0;
    for (char *w = strtok(text, " "); w != NULL; w = strtok(NULL, " ")) {
        argv[argc++] = w;
    }
    mb_err_clear(err);
    int rc = mb_args_parse(args, argc, argv, err);
    mb_free(text);
    return rc;
}

static int validate_line(const char *line, uint32_t world, struct mb_args *args, struct mb_err *err)
{
    int rc = parse_line(line, args, err);
    return rc == 0 ? mb_args_validate(args, 0, world, err) : rc;
}

static void values_arrive(void **state)
{
    (void)state;
    struct mb_args a;
    struct mb_err err;
    assert_int_equal(parse_line("--num-layers 2 --num-layers=4 --lr 1e-5 --min-lr=-0.5 --seed 7 "
                                "--data-path 1 a -2 b --no-bias-gelu-fusion --split 98,2,0",
                                &a, &err),
                     0);
    assert_int_equal(a.num_layers, 4); /* the last wins */
    assert_true(a.lr == 1e-5 && a.min_lr == -0.5 && isnan(a.lr_warmup_fraction));
    assert_int_equal(a.seed, 7);
    assert_int_equal(a.data_path.n, 4);
    assert_string_equal(a.data_path.items[2], "-2");
    assert_int_equal(a.bias_gelu_fusion, 0);
    assert_int_equal(a.check_for_nan_in_loss_and_grad, 1);
    assert_string_equal(a.split, "98,2,0");
    assert_true(a.hidden_size == MB_ARGS_NONE && a.load == NULL);
    assert_int_equal(a.eval_iters, 100);
    mb_args_close(&a);
}

static void what_argparse_refuses(void **state)
{
    (void)state;
    static const struct {
        const char *line, *text;
    } BAD[] = {
        {"--nosuchthing", "error: unrecognized arguments: --nosuchthing"},
        {"--num-layer 2",
         "error: unrecognized arguments: --num-layer 2 (nearest known: --num-layers)"},
        {"stray", "error: unrecognized arguments: stray"},
        {"--num-layers", "error: argument --num-layers: expected one argument"},
        {"--num-layers --lr 1", "error: argument --num-layers: expected one argument"},
        {"--num-layers 2.5", "error: argument --num-layers: invalid int value: '2.5'"},
        {"--num-layers=", "error: argument --num-layers: invalid int value: ''"},
        {"--lr fast", "error: argument --lr: invalid float value: 'fast'"},
        {"--lr-decay-style sine",
         "error: argument --lr-decay-style: invalid choice: 'sine' (choose "
         "from 'constant', 'linear', 'cosine', 'inverse-square-root', "
         "'WSD')"},
        {"--transformer-impl torch", "error: argument --transformer-impl: invalid choice: 'torch' "
                                     "(choose from 'local', 'transformer_engine')"},
        {"--attention-backend none",
         "error: argument --attention-backend: invalid choice: 'none' (choose from 'flash', "
         "'fused', 'unfused', 'local', 'auto')"},
        {"--timing-log-level 3",
         "error: argument --timing-log-level: invalid choice: 3 (choose from 0, 1, 2)"},
        {"--timing-log-option min", "error: argument --timing-log-option: invalid choice: 'min' "
                                    "(choose from 'max', 'minmax', 'all')"},
        {"--recompute-granularity some", "error: argument --recompute-granularity: invalid choice: "
                                         "'some' (choose from 'full', 'selective')"},
        {"--recompute-method none", "error: argument --recompute-method: invalid choice: 'none' "
                                    "(choose from 'uniform', 'block')"},
        {"--mock-data=1", "error: argument --mock-data: ignored explicit argument '1'"},
        {"--rampup-batch-size 1 2", "error: argument --rampup-batch-size: expected 3 arguments"},
        {"--rank 3", "error: unrecognized arguments: --rank 3"},
    };
    for (size_t i = 0; i < sizeof BAD / sizeof BAD[0]; i++) {
        struct mb_args a;
        struct mb_err err;
        assert_int_equal(parse_line(BAD[i].line, &a, &err), MB_EINVAL);
        assert_string_equal(err.text, BAD[i].text);
        mb_args_close(&a);
    }
}

static void what_is_not_provided_is_refused_by_name(void **state)
{
    (void)state;
    static const char *const GIVEN[] = {
        "--swiglu",
        "--bf16",
        "--fp16",
        "--normalization RMSNorm",
        "--position-embedding-type rope",
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--context-parallel-size 2",
        "--recompute-activations",
        "--tensorboard-dir /x",
        "--optimizer sgd",
        "--ckpt-format torch",
        "--fp8-format e4m3",
        "--moe-layer-freq 1",
        "--tokenizer-type HuggingFaceTokenizer",
        "--dataloader-type external",
        "--rampup-batch-size 1 2 3",
        "--kv-channels 8",
        "--distributed-backend nccl",
    };
    for (size_t i = 0; i < sizeof GIVEN / sizeof GIVEN[0]; i++) {
        struct mb_args a;
        struct mb_err err;
        char line[1024], name[64];
        snprintf(line, sizeof line, "%s %s", BASE, GIVEN[i]);
        snprintf(name, sizeof name, "%.*s", (int)strcspn(GIVEN[i], " "), GIVEN[i]);
        assert_int_equal(validate_line(line, 1, &a, &err), MB_EUNSUPPORTED);
        assert_int_equal(strncmp(err.text, name, strlen(name)), 0);
        mb_args_close(&a);
    }
    struct mb_args a;
    struct mb_err err;
    assert_int_equal(validate_line(BASE "--tensor-model-parallel-size 1 --rotary-percent 1 "
                                        "--normalization LayerNorm --num-workers 8",
                                   1, &a, &err),
                     0);
    assert_string_equal(
        mb_buf_str(&a.notes),
        "note: --num-workers has no effect: micro batches are made where they are used\n");
    mb_args_close(&a);
    assert_int_equal(validate_line(BASE "--split 98,2,0", 1, &a, &err), 0);
    assert_string_equal(a.split, "1,1,1");
    assert_string_equal(mb_buf_str(&a.notes),
                        "note: --split has no effect: mock data is split 1,1,1\n");
    mb_args_close(&a);
}

static void megatrons_checks(void **state)
{
    (void)state;
    static const struct {
        const char *line, *text;
        uint32_t world;
    } BAD[] = {
        {MODEL DATA "--train-iters 1", "micro_batch_size argument is None", 1},
        {BASE "--global-batch-size 6",
         "global batch size (6) is not divisible by micro batch size (2) times data parallel size "
         "(2)",
         2},
        {BASE "--overlap-param-gather",
         "--overlap-param-gather only supported with distributed optimizer", 1},
        {BASE "--overlap-param-gather --use-distributed-optimizer",
         "Must use --overlap-param-gather with --overlap-grad-reduce", 1},
        {BASE "--data-path x", "A single data source must be provided in training mode, else None",
         1},
        {MODEL "--micro-batch-size 1 --train-iters 1",
         "no data to train on: give --data-path PREFIX, or --mock-data", 1},
        {MODEL DATA "--micro-batch-size 1",
         "either train-iters or train-samples should be provided.", 1},
        {BASE "--train-samples 10",
         "expected iteration-based training: --train-iters and --train-samples exclude each other",
         1},
        {BASE "--lr-decay-samples 10", "expected iteration-based learning rate decay", 1},
        {BASE "--lr-warmup-samples 10", "expected iteration-based learning rate warmup", 1},
        {MODEL DATA "--micro-batch-size 1 --train-samples 9 --lr-decay-iters 3",
         "expected sample-based learning rate decay", 1},
        {BASE "--lr-warmup-iters 1 --lr-warmup-fraction .1",
         "can only specify one of lr-warmup-fraction and lr-warmup-iters", 1},
        {DATA "--distributed-backend gloo --micro-batch-size 1 --train-iters 1",
         "num_layers argument is None", 1},
        {BASE "--hidden-size 66",
         "hidden size (66) is not divisible by the number of attention heads (4)", 1},
        {BASE "--seq-length 33", "max_position_embeddings (32) must not be below seq_length (33)",
         1},
        {BASE "--group-query-attention --num-query-groups 3",
         "The number of attention heads (4) must be divisible by the number of query groups (3)",
         1},
        {BASE "--save x", "--save needs --save-interval", 1},
        {BASE "--min-lr 1", "min-lr and lr-warmup-init must not exceed lr", 1},
        {BASE "--seed 0", "Seed (0) should be a positive integer.", 1},
        {BASE "--log-interval 0", "log-interval is 0: it must be at least 1", 1},
        {BASE "--micro-batch-size 4611686018427387904",
         "micro-batch-size is 4611686018427387904: "
         "it must be at most 2147483647",
         2},
        {BASE "--global-batch-size 4611686018427387904",
         "global-batch-size is 4611686018427387904: it must be at most 2147483647", 1},
        {BASE "--train-iters 4611686018427387904",
         "train-iters is 4611686018427387904: it must be at most 2147483647", 1},
        {BASE "--num-layers 0", "num_layers is 0: it must be from 1 to 2147483647", 1},
    };
    for (size_t i = 0; i < sizeof BAD / sizeof BAD[0]; i++) {
        struct mb_args a;
        struct mb_err err;
        int rc = validate_line(BAD[i].line, BAD[i].world, &a, &err);
        assert_true(rc == MB_EINVAL);
        assert_string_equal(err.text, BAD[i].text);
        mb_args_close(&a);
    }
}

static void derived_values_and_the_dump(void **state)
{
    (void)state;
    struct mb_args a;
    struct mb_err err;
    struct mb_buf out = {0};
    assert_int_equal(
        validate_line(BASE "--clip-grad 0.00001 --adam-eps 1e-08 --lr 1.5e-5", 4, &a, &err), 0);
    assert_int_equal(a.global_batch_size, 8);
    assert_int_equal(a.ffn_hidden_size, 256);
    assert_int_equal(a.num_query_groups, 4);
    assert_int_equal(a.data_parallel_size, 4);
    assert_int_equal(mb_args_dump(&a, &out), 0);
    static const char *const LINES[] = {
        "  adam_eps ........................................ 1e-08\n",
        "  clip_grad ....................................... 1e-05\n",
        "  lr .............................................. 1.5e-05\n",
        "  adam_beta2 ...................................... 0.999\n",
        "  hidden_size ..................................... 64\n",
        "  mock_data ....................................... True\n",
        "  bf16 ............................................ False\n",
        "  masked_softmax_fusion ........................... True\n",
        "  load ............................................ None\n",
        "  min_lr .......................................... 0.0\n",
        "  world_size ...................................... 4\n",
        "  split ........................................... 1,1,1\n",
    };
    for (size_t i = 0; i < sizeof LINES / sizeof LINES[0]; i++) {
        if (strstr(mb_buf_str(&out), LINES[i]) == NULL) {
            fail_msg("not in the dump: %s", LINES[i]);
        }
    }
    char *json = mb_args_json(&a);
    assert_non_null(strstr(json, "\"hidden_size\":64"));
    assert_non_null(strstr(json, "\"load\":null"));
    mb_free(json);
    mb_buf_reset(&out);
    assert_int_equal(mb_args_help(&out), 0);
    assert_non_null(strstr(mb_buf_str(&out), "--num-layers N"));
    mb_buf_close(&out);
    mb_args_close(&a);
    assert_int_equal(parse_line("--lr 1 --help", &a, &err), MB_ARGS_HELP);
    mb_args_close(&a);
}

static void the_table_is_consistent(void **state)
{
    (void)state;
    for (size_t i = 0; i < MB_ARG_N_ROWS; i++) {
        const struct mb_arg_row *r = &MB_ARG_ROWS[i];
        assert_int_equal(r->offset != SIZE_MAX, r->use == MB_ARG_IMPLEMENTED);
        for (size_t k = 0; k < i; k++) {
            assert_string_not_equal(r->name, MB_ARG_ROWS[k].name);
            if (r->offset != SIZE_MAX) {
                assert_int_not_equal(r->offset, MB_ARG_ROWS[k].offset);
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_arrive),
        cmocka_unit_test(what_argparse_refuses),
        cmocka_unit_test(what_is_not_provided_is_refused_by_name),
        cmocka_unit_test(megatrons_checks),
        cmocka_unit_test(derived_values_and_the_dump),
        cmocka_unit_test(the_table_is_consistent),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
