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
#include "tests/unit/worker/args_line.h"
#include "worker/args_table.h"

#define MODEL                                                                                      \
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "                     \
    "--max-position-embeddings 32 --distributed-backend gloo --lr 1e-3 "
#define DATA    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 "
#define BASE    MODEL DATA "--micro-batch-size 2 --train-iters 10 "
#define SAMPLES MODEL DATA "--micro-batch-size 2 --train-samples 90 "

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

/* bf16 is the GPU's; nothing falls back to the CPU by itself. The CPU has more digits than bf16
 * asks for, and says so. */
static void devices_are_checked(void **state)
{
    (void)state;
    struct mb_args a;
    struct mb_err err;
    assert_int_equal(validate_line(BASE " --distributed-backend nccl --bf16", 1, &a, &err), 0);
    assert_true(a.bf16 && mb_args_computes_in_bf16(&a));
    mb_args_close(&a);
    assert_int_equal(validate_line(BASE " --distributed-backend nccl --bf16", 2, &a, &err), 0);
    mb_args_close(&a);
    assert_int_equal(validate_line(BASE " --bf16", 1, &a, &err), 0);
    assert_true(a.bf16 && !mb_args_computes_in_bf16(&a));
    assert_string_equal(mb_buf_str(&a.notes),
                        "note: --bf16: the CPU computes in fp32\n"
                        "accumulate and all-reduce gradients in fp32 for bfloat16 data type.\n");
    mb_args_close(&a);
}

static void fp16_scales_the_loss(void **state)
{
    (void)state;
    struct mb_args a;
    struct mb_err err;
    static const char WARNING[] =
        "WARNING: Setting args.check_for_nan_in_loss_and_grad to False since "
        "dynamic loss scaling is being used\n";
    assert_int_equal(validate_line(BASE " --fp16", 1, &a, &err), 0);
    assert_true(a.fp16 && !a.check_for_nan_in_loss_and_grad);
    assert_string_equal(mb_buf_str(&a.notes), WARNING);
    struct mb_loss_scale_config c = mb_args_loss_scale(&a);
    assert_true(c.is_dynamic && c.initial == 4294967296.0 && c.min == 1);
    assert_true(c.window == 1000 && c.hysteresis == 2);
    mb_args_close(&a);
    assert_int_equal(
        validate_line(BASE " --fp16 --loss-scale 128 --min-loss-scale -1", 1, &a, &err), 0);
    c = mb_args_loss_scale(&a);
    assert_true(!c.is_dynamic && c.initial == 128 && a.check_for_nan_in_loss_and_grad);
    assert_string_equal(mb_buf_str(&a.notes), "");
    mb_args_close(&a);
    assert_int_equal(validate_line(BASE " --fp16 --loss-scale 0 --initial-loss-scale 65536 "
                                        "--min-loss-scale 4 --loss-scale-window 7 --hysteresis 3",
                                   1, &a, &err),
                     0);
    c = mb_args_loss_scale(&a);
    assert_true(c.is_dynamic && c.initial == 65536 && c.min == 4);
    assert_true(c.window == 7 && c.hysteresis == 3);
    mb_args_close(&a);
    assert_int_equal(validate_line(BASE " --hysteresis 3 --loss-scale-window 1000.0", 1, &a, &err),
                     0);
    c = mb_args_loss_scale(&a);
    assert_true(!c.is_dynamic && c.initial == 1 && a.check_for_nan_in_loss_and_grad);
    assert_string_equal(mb_buf_str(&a.notes),
                        "note: --hysteresis has no effect: fp32 and bf16 need no loss scale\n");
    mb_args_close(&a);
}

/* A profiler's ranks and iterations; on the CPU there is nothing for it to see, and that is said.
 */
static void profiles_are_for_gpus(void **state)
{
    (void)state;
    struct mb_args a;
    struct mb_err err;
    assert_int_equal(validate_line(BASE
                                   " --distributed-backend nccl --profile --profile-step-end 30 "
                                   "--profile-ranks 3 0",
                                   1, &a, &err),
                     0);
    assert_true(a.profile && a.profile_step_start == 10 && a.profile_step_end == 30);
    assert_int_equal(a.profile_ranks.n, 2);
    assert_int_equal(a.notes.len, 0);
    mb_args_close(&a);
    assert_int_equal(
        validate_line(BASE " --distributed-backend nccl --profile-ranks 1 x", 1, &a, &err),
        MB_EINVAL);
    assert_non_null(strstr(err.text, "--profile-ranks"));
    mb_args_close(&a);
    assert_int_equal(validate_line(BASE " --profile", 1, &a, &err), 0);
    assert_true(!a.profile);
    assert_string_equal(mb_buf_str(&a.notes),
                        "note: --profile is for GPUs; perf record shows a CPU's functions\n");
    mb_args_close(&a);
}

static void what_is_not_provided_is_refused_by_name(void **state)
{
    (void)state;
    static const char *const GIVEN[] = {
        "--position-embedding-type mrope",
        "--rotary-interleaved",
        "--squared-relu",
        "--microbatch-group-size-per-virtual-pipeline-stage 2",
        "--decoder-first-pipeline-num-layers 1",
        "--decoder-last-pipeline-num-layers 1",
        "--account-for-embedding-in-pipeline-split",
        "--standalone-embedding-stage",
        "--pipeline-model-parallel-split-rank 1",
        "--hierarchical-context-parallel-sizes 2",
        "--optimizer hybridadam",
        "--fp8-format e4m3",
        "--no-fp8-wgrad",
        "--moe-layer-freq 1",
        "--dataloader-type external",
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
                                        "--normalization LayerNorm --num-workers 8 "
                                        "--no-overlap-p2p-communication",
                                   1, &a, &err),
                     0);
    assert_string_equal(
        mb_buf_str(&a.notes),
        "note: --no-overlap-p2p-communication has no effect: what stages send each other is not "
        "overlapped with computing\n"
        "note: --num-workers has no effect: micro batches are made where they are used\n");
    mb_args_close(&a);
    assert_int_equal(validate_line(BASE "--split 98,2,0", 1, &a, &err), 0);
    assert_string_equal(a.split, "1,1,1");
    assert_string_equal(mb_buf_str(&a.notes),
                        "note: --split has no effect: mock data is split 1,1,1\n");
    mb_args_close(&a);
}

/* Llama's style, as its jobs are given; what is left out derives as in Megatron-LM. */
static void the_model_is_described(void **state)
{
    (void)state;
    struct mb_args a;
    struct mb_err err;
    assert_int_equal(validate_line(BASE "--swiglu --normalization RMSNorm --disable-bias-linear "
                                        "--position-embedding-type rope --rotary-base 500000 "
                                        "--rotary-percent 0.5 --use-rope-scaling "
                                        "--group-query-attention --num-query-groups 2 "
                                        "--no-position-embedding --kv-channels 32",
                                   1, &a, &err),
                     0);
    assert_int_equal(a.ffn_hidden_size, 128); /* int(4 * 64 * 2 / 3 / 64) * 64 */
    assert_int_equal(a.kv_channels, 32);
    assert_int_equal(a.num_query_groups, 2);
    assert_true(!a.add_bias_linear && !a.add_position_embedding && a.use_rope_scaling);
    assert_true(a.rotary_percent == 0.5 && a.rotary_base == 500000);
    mb_args_close(&a);
    assert_int_equal(validate_line(BASE "--use-rotary-position-embeddings", 1, &a, &err), 0);
    assert_string_equal(a.position_embedding_type, "rope");
    assert_string_equal(mb_buf_str(&a.notes), "--use-rotary-position-embeddings is deprecated, use "
                                              "--position-embedding-type\n");
    mb_args_close(&a);
    assert_int_equal(validate_line(BASE "--hidden-size 66 --kv-channels 8", 1, &a, &err), 0);
    mb_args_close(&a);
}

/* A preset is the words before all others. */
static void a_preset_is_a_shape(void **state)
{
    (void)state;
    static const char OTHERS[] = DATA "--distributed-backend gloo --lr 1e-3 --micro-batch-size 1 "
                                      "--train-iters 1 ";
    char line[512];
    struct mb_args a;
    struct mb_err err;
    snprintf(line, sizeof line, "%s --hidden-size 128 --model-preset gpt3-310.1b", OTHERS);
    assert_int_equal(validate_line(line, 1, &a, &err), 0);
    assert_int_equal(a.num_layers, 96);
    assert_int_equal(a.hidden_size, 128);
    assert_int_equal(a.num_attention_heads, 128);
    assert_int_equal(a.seq_length, 2048);
    assert_string_equal(a.model_preset, "gpt3-310.1b");
    mb_args_close(&a);
    snprintf(line, sizeof line, "%s --seq-length 64 --model-preset=llama3.1-70b", OTHERS);
    assert_int_equal(validate_line(line, 1, &a, &err), 0);
    assert_true(a.num_layers == 80 && a.hidden_size == 8192 && a.ffn_hidden_size == 28672);
    assert_true(a.num_query_groups == 8 && a.swiglu && a.hidden_dropout == 0);
    assert_string_equal(a.normalization, "RMSNorm");
    mb_args_close(&a);
    snprintf(line, sizeof line, "%s --model-preset gpt5", OTHERS);
    assert_int_equal(validate_line(line, 1, &a, &err), MB_EINVAL);
    assert_non_null(strstr(err.text, "argument --model-preset: invalid choice: 'gpt5' (choose "));
    mb_args_close(&a);
    assert_int_equal(parse_line("--model-preset", &a, &err), MB_EINVAL);
    mb_args_close(&a);
}

/* Sizes only where there are none, the rest always; a null is nothing, as Megatron-LM has it. */
static void a_checkpoint_describes_the_model(void **state)
{
    (void)state;
    struct mb_args a;
    struct mb_err err;
    assert_int_equal(
        parse_line("--hidden-size 32 --swiglu --normalization RMSNorm --use-rope-scaling "
                   "--use-rotary-position-embeddings "
                   "--rotary-seq-len-interpolation-factor 4",
                   &a, &err),
        0);
    assert_int_equal(
        mb_args_adopt(&a,
                      "{\"num_layers\": 3, \"hidden_size\": 64, \"swiglu\": false, "
                      "\"normalization\": \"LayerNorm\", \"add_bias_linear\": false, "
                      "\"use_rope_scaling\": false, \"norm_epsilon\": 1e-06, "
                      "\"rotary_seq_len_interpolation_factor\": null, \"padded_vocab_size\": 256, "
                      "\"use_rotary_position_embeddings\": false}",
                      &err),
        0);
    assert_int_equal(a.num_layers, 3);
    assert_int_equal(a.hidden_size, 32);
    assert_true(!a.swiglu && !a.add_bias_linear && !a.use_rope_scaling && a.norm_epsilon == 1e-6);
    assert_string_equal(a.normalization, "LayerNorm");
    assert_true(a.rotary_seq_len_interpolation_factor == 4 && !a.use_rotary_position_embeddings);
    assert_int_equal(a.checkpoint_padded_vocab_size, 256);
    assert_non_null(strstr(mb_buf_str(&a.notes), "Setting padded_vocab_size to 256 from"));
    assert_non_null(strstr(mb_buf_str(&a.notes), "Checkpoint did not provide arguments "
                                                 "rotary_seq_len_interpolation_factor\n"));
    assert_null(strstr(mb_buf_str(&a.notes), " hidden_size")); /* the command line has it */
    assert_non_null(strstr(mb_buf_str(&a.notes), "Setting norm_epsilon to 1e-06 from"));
    assert_non_null(
        strstr(mb_buf_str(&a.notes), "Checkpoint did not provide arguments kv_channels\n"));
    static const struct {
        const char *json, *text;
    } BAD[] = {
        {"[]", "the checkpoint's args are no object"},
        {"{\"num_layers\": \"x\"}", "the checkpoint's argument num_layers has the value x"},
        {"{\"swiglu\": 1}", "the checkpoint's argument swiglu has a wrong type"},
        {"{\"num_layers\": {}}", "the checkpoint's argument num_layers has a wrong type"},
        {"{\"normalization\": \"BatchNorm\"}",
         "the checkpoint's argument normalization has the value BatchNorm"},
    };
    for (size_t i = 0; i < sizeof BAD / sizeof BAD[0]; i++) {
        mb_args_close(&a);
        assert_int_equal(parse_line("", &a, &err), 0);
        assert_int_equal(mb_args_adopt(&a, BAD[i].json, &err), MB_ECORRUPT);
        assert_string_equal(err.text, BAD[i].text);
    }
    mb_args_close(&a);
}

/* args_json of `theirs` compared with `ours`. */
static int compare_lines(const char *ours, const char *theirs, int is_new, struct mb_buf *notes,
                         struct mb_err *err)
{
    struct mb_args a, b;
    assert_int_equal(validate_line(ours, 1, &a, err), 0);
    assert_int_equal(validate_line(theirs, 1, &b, err), 0);
    char *json = mb_args_json(&b);
    mb_err_clear(err);
    int rc = mb_args_compare(&a, json, is_new, notes, err);
    mb_free(json);
    mb_args_close(&a);
    mb_args_close(&b);
    return rc;
}

static void another_model_is_seen(void **state)
{
    (void)state;
#define ROPE BASE "--position-embedding-type rope "
    static const struct {
        const char *ours, *theirs;
        const char *text; /* what differs; NULL: nothing */
        int is_structure;
    } CASES[] = {
        {BASE, BASE, NULL, 0},
        {BASE "--seq-length 16 --lr 1 --seed 5", BASE, NULL, 0},
        {BASE "--hidden-size 32", BASE, "hidden_size", 1},
        {BASE "--num-attention-heads 2 --kv-channels 16", BASE, "num_attention_heads", 1},
        {BASE "--kv-channels 8", BASE, "kv_channels", 1},
        {BASE "--group-query-attention --num-query-groups 2", BASE, "num_query_groups", 1},
        {BASE "--max-position-embeddings 64", BASE, "max_position_embeddings", 1},
        {ROPE, BASE, "position_embedding_type", 1},
        {BASE "--normalization RMSNorm", BASE, "normalization", 1},
        {BASE "--swiglu --ffn-hidden-size 256", BASE, "swiglu", 1},
        {BASE "--apply-layernorm-1p", BASE, "apply_layernorm_1p", 1},
        {BASE "--disable-bias-linear", BASE, "add_bias_linear", 1},
        {BASE "--add-qkv-bias --disable-bias-linear", BASE "--disable-bias-linear", "add_qkv_bias",
         1},
        {BASE "--untie-embeddings-and-output-weights", BASE, "untie_embeddings", 1},
        {ROPE "--max-position-embeddings 64", ROPE, "max_position_embeddings", 0},
        {ROPE "--rotary-base 500000", ROPE, "rotary_base", 0},
        {ROPE "--rotary-percent 0.5", ROPE, "rotary_percent", 0},
        {ROPE "--use-rope-scaling", ROPE, "use_rope_scaling", 0},
        {ROPE "--use-rope-scaling --rope-scaling-factor 4", ROPE "--use-rope-scaling",
         "rope_scaling_factor", 0},
        {ROPE "--rope-scaling-factor 4", ROPE, NULL, 0},
        {ROPE "--rotary-seq-len-interpolation-factor 4", ROPE,
         "rotary_seq_len_interpolation_factor is 4 as the command line says; in the checkpoint it "
         "is None",
         0},
        {BASE "--rotary-base 500000", BASE, NULL, 0},
        {BASE "--norm-epsilon 1e-6", BASE, "norm_epsilon", 0},
        {BASE "--no-bias-gelu-fusion", BASE, "bias_gelu_fusion", 0},
        {BASE "--swiglu --no-bias-gelu-fusion", BASE "--swiglu", NULL, 0},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof CASES[0]; i++) {
        struct mb_buf notes = {0};
        struct mb_err err;
        const char *text = CASES[i].text;
        size_t n_dest = text != NULL ? strcspn(text, " ") : 0;
        int rc = compare_lines(CASES[i].ours, CASES[i].theirs, 0, &notes, &err);
        assert_int_equal(rc, text != NULL ? MB_EINVAL : 0);
        if (text != NULL) {
            assert_memory_equal(err.text, text, n_dest);
        }
        assert_int_equal(notes.len, 0);
        rc = compare_lines(CASES[i].ours, CASES[i].theirs, 1, &notes, &err);
        assert_int_equal(rc, CASES[i].is_structure ? MB_EINVAL : 0);
        if (text != NULL && !CASES[i].is_structure) {
            assert_non_null(strstr(mb_buf_str(&notes), text));
        } else {
            assert_int_equal(notes.len, 0);
        }
        mb_buf_close(&notes);
    }
    struct mb_args a;
    struct mb_err err;
    struct mb_buf notes = {0};
    assert_int_equal(validate_line(BASE, 1, &a, &err), 0);
    assert_int_equal(mb_args_compare(&a, "{}", 0, &notes, &err), 0); /* an old one says nothing */
    assert_int_equal(mb_args_compare(&a, "[]", 0, &notes, &err), MB_ECORRUPT);
    assert_int_equal(mb_args_compare(&a, "{\"swiglu\": []}", 1, &notes, &err), MB_EINVAL);
    assert_string_equal(err.text, "swiglu value from checkpoint (of a wrong type) is not equal to "
                                  "the input argument value (False).");
    assert_int_equal(notes.len, 0);
    a.true_vocab_size = 1000; /* the tokenizer's */
    assert_int_equal(mb_args_compare(&a, "{\"true_vocab_size\": 1000}", 0, &notes, &err), 0);
    assert_int_equal(mb_args_compare(&a, "{\"true_vocab_size\": null}", 0, &notes, &err), 0);
    assert_int_equal(notes.len, 0);
    assert_int_equal(mb_args_compare(&a, "{\"true_vocab_size\": 50257}", 0, &notes, &err), 0);
    assert_string_equal(mb_buf_str(&notes),
                        "WARNING: the tokenizer has 1000 tokens, the checkpoint was made with "
                        "50257: if it is another one, its ids mean other text\n");
    mb_buf_close(&notes);
    mb_args_close(&a);
}

/* What is left of the world after models are data parallel ranks. */
static void ranks_that_share_a_model(void **state)
{
    (void)state;
    struct mb_args a;
    struct mb_err err;
    assert_int_equal(
        validate_line(BASE "--tensor-model-parallel-size 2 --sequence-parallel", 6, &a, &err), 0);
    assert_int_equal(a.data_parallel_size, 3);
    assert_int_equal(a.global_batch_size, 6);
    assert_true(a.sequence_parallel);
    assert_string_equal(mb_buf_str(&a.notes), "");
    mb_args_close(&a);
    assert_int_equal(validate_line(BASE "--sequence-parallel", 2, &a, &err), 0);
    assert_int_equal(a.data_parallel_size, 2);
    assert_false(a.sequence_parallel);
    assert_string_equal(mb_buf_str(&a.notes), "note: --sequence-parallel has no effect: it means "
                                              "nothing without tensor parallelism\n");
    mb_args_close(&a);
}

/* Stages and tensor groups multiply. */
static void ranks_of_a_pipeline(void **state)
{
    (void)state;
    struct mb_args a;
    struct mb_err err;
    assert_int_equal(validate_line(BASE "--pipeline-model-parallel-size 2 --sequence-parallel "
                                        "--tensor-model-parallel-size 2 --num-layers 6",
                                   12, &a, &err),
                     0);
    assert_int_equal(a.data_parallel_size, 3);
    assert_true(a.sequence_parallel);
    mb_args_close(&a);
    assert_int_equal(
        validate_line(BASE "--pipeline-model-parallel-size 2 --sequence-parallel", 2, &a, &err), 0);
    assert_int_equal(a.data_parallel_size, 1);
    assert_false(a.sequence_parallel); /* stages do not share tokens */
    mb_args_close(&a);
    assert_int_equal(validate_line(BASE "--context-parallel-size 2 --tensor-model-parallel-size 2",
                                   12, &a, &err),
                     0);
    assert_int_equal(a.data_parallel_size, 3);
    assert_null(strstr(mb_buf_str(&a.notes), "--context-parallel-size on GPUs"));
    mb_args_close(&a);
    assert_int_equal(
        validate_line(BASE "--context-parallel-size 2 --distributed-backend nccl", 12, &a, &err),
        0);
    assert_int_equal(a.data_parallel_size, 6);
    assert_non_null(strstr(mb_buf_str(&a.notes), "--context-parallel-size on GPUs"));
    mb_args_close(&a);
    assert_int_equal(validate_line(BASE "--context-parallel-size 2 --distributed-backend nccl "
                                        "--bf16 --kv-channels 128",
                                   12, &a, &err),
                     0);
    assert_null(strstr(mb_buf_str(&a.notes), "--context-parallel-size on GPUs"));
    mb_args_close(&a);
    assert_int_equal(validate_line(BASE "--context-parallel-size 2 --distributed-backend nccl "
                                        "--bf16 --kv-channels 80",
                                   12, &a, &err),
                     0);
    assert_non_null(strstr(mb_buf_str(&a.notes), "--context-parallel-size on GPUs"));
    mb_args_close(&a);
    assert_int_equal(validate_line(BASE "--context-parallel-size 2147483647 "
                                        "--pipeline-model-parallel-size 2147483647 "
                                        "--tensor-model-parallel-size 2147483647",
                                   4, &a, &err),
                     MB_EINVAL);
    mb_args_close(&a);
}

/* A stage's layers in chunks; one chunk is none. */
static void chunks_of_a_stage(void **state)
{
    (void)state;
    static const struct {
        const char *line, *text;
        size_t n_chunks;
    } CASES[] = {
        {"", NULL, 1},
        {"--num-layers-per-virtual-pipeline-stage 1", NULL, 4},
        {"--num-layers-per-virtual-pipeline-stage 2", NULL, 2},
        {"--num-layers-per-virtual-pipeline-stage 4", NULL, 1},
        {"--num-virtual-stages-per-pipeline-rank 2", NULL, 2},
        {"--num-virtual-stages-per-pipeline-rank 2 --rampup-batch-size 8 4 20 "
         "--global-batch-size 16",
         NULL, 2},
        {"--num-layers-per-virtual-pipeline-stage 3",
         "number of layers per pipeline stage must be divisible number of layers per virtual "
         "pipeline stage",
         0},
        {"--num-layers-per-virtual-pipeline-stage 0",
         "number of layers per pipeline stage must be divisible number of layers per virtual "
         "pipeline stage",
         0},
        {"--num-virtual-stages-per-pipeline-rank 3",
         "number of layers per pipeline stage must be divisible by "
         "num-virtual-stages-per-pipeline-rank",
         0},
        {"--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 2",
         "No more than one of the following arguments can be set at the same time: "
         "--num-layers-per-virtual-pipeline-stage, --num-virtual-stages-per-pipeline-rank",
         0},
        {"--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 6",
         "number of microbatches (3) is not divisible by pipeline-model-parallel-size (2) when "
         "using interleaved schedule",
         0},
        {"--num-virtual-stages-per-pipeline-rank 2 --rampup-batch-size 6 2 20 --global-batch-size "
         "16",
         "number of microbatches (3) is not divisible by pipeline-model-parallel-size (2) when "
         "using interleaved schedule",
         0},
        {"--num-virtual-stages-per-pipeline-rank 2 --rampup-batch-size 8 2 20 --global-batch-size "
         "16",
         "number of microbatches (1) is not divisible by pipeline-model-parallel-size (2) when "
         "using interleaved schedule",
         0},
        {"--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 1",
         "When interleaved schedule is used, pipeline-model-parallel size should be greater than 1",
         0},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof CASES[0]; i++) {
        struct mb_args a;
        struct mb_err err;
        char line[1024];
        const int in_samples = strstr(CASES[i].line, "rampup") != NULL;
        snprintf(line, sizeof line, "%s--pipeline-model-parallel-size 2 --num-layers 8 %s%s",
                 in_samples ? SAMPLES : BASE,
                 strstr(CASES[i].line, "global-batch") == NULL ? "--global-batch-size 8 " : "",
                 CASES[i].line);
        assert_int_equal(validate_line(line, 2, &a, &err), CASES[i].text == NULL ? 0 : MB_EINVAL);
        if (CASES[i].text == NULL) {
            assert_int_equal(mb_args_chunks(&a), CASES[i].n_chunks);
        } else {
            assert_string_equal(err.text, CASES[i].text);
        }
        mb_args_close(&a);
    }
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
        {BASE "--tensor-model-parallel-size 2",
         "world size (3) is not divisible by total_model_size (encoder_model_size=0 + "
         "decoder_model_size=2)",
         3},
        {BASE "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
         "world size (6) is not divisible by total_model_size (encoder_model_size=0 + "
         "decoder_model_size=4)",
         6},
        {BASE "--pipeline-model-parallel-size 0",
         "pipeline-model-parallel-size is 0: it must be from 1 to 2147483647", 1},
        {BASE "--pipeline-model-parallel-size 2 --num-layers 5",
         "Number of layers should be divisible by the pipeline-model-parallel size", 2},
        {BASE "--pipeline-model-parallel-size 2 --global-batch-size 6",
         "global batch size (6) is not divisible by micro batch size (2) times data parallel size "
         "(2)",
         4},
        {BASE "--tensor-model-parallel-size 0",
         "tensor-model-parallel-size is 0: it must be from 1 to 2147483647", 1},
        {BASE "--tensor-model-parallel-size 8 --hidden-size 128",
         "num_attention_heads (4) must be a multiple of tensor_model_parallel_size (8).", 8},
        {BASE "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2",
         "num_query_groups (2) must be a multiple of tensor_model_parallel_size (4).", 4},
        {BASE "--tensor-model-parallel-size 4 --ffn-hidden-size 90",
         "ffn_hidden_size: 90 is not divisible by 4", 4},
        {BASE "--tensor-model-parallel-size 4 --sequence-parallel --seq-length 30",
         "--sequence-parallel: seq_length: 30 is not divisible by 4", 4},
        {BASE "--tensor-model-parallel-size 2 --global-batch-size 6",
         "global batch size (6) is not divisible by micro batch size (2) times data parallel size "
         "(2)",
         4},
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
        {BASE "--no-position-embedding",
         "--no-position-embedding is deprecated, use --position-embedding-type none", 1},
        {BASE "--use-rope-scaling",
         "--use-rope-scaling and --rotary-seq-len-interpolation-factor need "
         "--position-embedding-type rope",
         1},
        {BASE "--position-embedding-type rope --rotary-percent 1.5",
         "rotary-base and rope-scaling-factor must be positive, rotary-percent must be above 0 and "
         "at most 1",
         1},
        {BASE "--recompute-granularity full",
         "with --recompute-granularity full, recompute-method must be one of \"block\" or "
         "\"uniform\"",
         1},
        {BASE "--recompute-granularity selective --recompute-method uniform",
         "recompute method is not yet supported for selective recomputing granularity", 1},
        {BASE "--recompute-activations --recompute-method uniform",
         "recompute method is not yet supported for selective recomputing granularity", 1},
        {BASE "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
         "--recompute-method block needs --recompute-num-layers from 1 to 2", 1},
        {BASE "--decoupled-min-lr 1",
         "decoupled-min-lr needs --decoupled-lr and must not exceed it", 1},
        {BASE "--rampup-batch-size 2 2 10",
         "expected no batch-size rampup for iteration-based training", 1},
        {MODEL DATA "--micro-batch-size 2 --train-samples 90 --global-batch-size 8 "
                    "--rampup-batch-size 2 4 10",
         "expected global batch size interval (6) to be divisible by global batch size increment "
         "(4)",
         1},
        {BASE "--fp16 --bf16", "fp16 and bf16 exclude each other", 1},
        {BASE "--fp16-lm-cross-entropy", "lm cross entropy in fp16 only support in fp16 mode.", 1},
        {BASE "--fp16 --loss-scale -2", "loss-scale is -2: it must be positive and finite in fp32",
         1},
        {BASE "--fp16 --min-loss-scale 1e10",
         "min-loss-scale is 1e+10: it must be positive and at most initial-loss-scale, which is "
         "4.29497e+09",
         1},
        {BASE "--fp16 --loss-scale-window 1.5",
         "loss-scale-window is 1.5: it must be a whole number", 1},
        {BASE "--fp16 --loss-scale-window -3", "loss-scale-window is -3: it must be positive", 1},
        {BASE "--fp16 --hysteresis 0", "hysteresis is 0: it must be positive", 1},
        {BASE "--kv-channels 0", "kv-channels must be positive", 1},
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
        cmocka_unit_test(devices_are_checked),
        cmocka_unit_test(fp16_scales_the_loss),
        cmocka_unit_test(profiles_are_for_gpus),
        cmocka_unit_test(what_is_not_provided_is_refused_by_name),
        cmocka_unit_test(the_model_is_described),
        cmocka_unit_test(a_preset_is_a_shape),
        cmocka_unit_test(a_checkpoint_describes_the_model),
        cmocka_unit_test(another_model_is_seen),
        cmocka_unit_test(ranks_that_share_a_model),
        cmocka_unit_test(ranks_of_a_pipeline),
        cmocka_unit_test(chunks_of_a_stage),
        cmocka_unit_test(megatrons_checks),
        cmocka_unit_test(derived_values_and_the_dump),
        cmocka_unit_test(the_table_is_consistent),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
