/* mobula checkpoint convert SOURCE TARGET: a Hugging Face directory into a checkpoint, or back; a
 * checkpoint of Megatron-LM into one of ours, back, or into one of another layout; a file of
 * torch.save into a safetensors file, or back. */
#include <stdio.h>
#include <string.h>
#include "cli/checkpoint.h"
#include "cli/checkpoint_model.h"
#include "cli/checkpoint_file.h"

struct convert_args {
    int json, no_load_optim;
    int64_t iteration, vocab, divisible_by, tensor_parallel, pipeline_parallel;
    uint64_t max_file_bytes;
    const char *dtype, *to, *impl;
};

static const char DTYPE[] = "fp32", IMPL[] = "transformer_engine"; /* where none is given */

#define OPTION(name_, arg_, kind_, field_, help_, min_)                                            \
    {                                                                                              \
        name_, 0, arg_, MB_OPTION_##kind_, offsetof(struct convert_args, field_), help_, min_,     \
            (min_) ? INT32_MAX : 0                                                                 \
    }

static const struct mb_option convert_options[] = {
    OPTION("to", "mobula|huggingface|megatron", STRING, to,
           "what is made (a Hugging Face directory of a checkpoint of ours, of others one of ours)",
           0),
    OPTION("tensor-model-parallel-size", "N", INT, tensor_parallel,
           "ranks that each stage of a Megatron-LM checkpoint that is made has (1)", 1),
    OPTION("pipeline-model-parallel-size", "N", INT, pipeline_parallel,
           "stages of a Megatron-LM checkpoint that is made (1)", 1),
    OPTION("transformer-impl", "transformer_engine|local", STRING, impl,
           "whose names a Megatron-LM checkpoint that is made has (transformer_engine)", 0),
    OPTION("dtype", "fp32|bf16|fp16", STRING, dtype,
           "numbers of a Hugging Face directory or Megatron-LM checkpoint that is made (fp32)", 0),
    OPTION("max-shard-size", "SIZE", SIZE, max_file_bytes,
           "largest file of a Hugging Face directory that is made (5000000000)", 0),
    OPTION("vocab-size", "N", INT, vocab,
           "tokens of the tokenizer, where the checkpoint does not say it: rows beyond are dropped",
           1),
    OPTION("make-vocab-size-divisible-by", "N", INT, divisible_by,
           "pads the vocabulary of a checkpoint that is made (128), Megatron-LM's to so many times "
           "the tensor-parallel size",
           1),
    OPTION("no-load-optim", NULL, FLAG, no_load_optim,
           "leave the optimizer out, which else comes along from or to Megatron-LM", 0),
    OPTION("iteration", "N", INT, iteration, "of a checkpoint, instead of the newest", 1),
    OPTION("json", NULL, FLAG, json, "print JSON, errors too", 0),
    {0},
};

static int parse_dtype(const char *name, enum mb_st_dtype *out, struct mb_err *err)
{
    static const struct {
        const char *name;
        enum mb_st_dtype dtype;
    } dtypes[] = {{"fp32", MB_ST_F32}, {"bf16", MB_ST_BF16}, {"fp16", MB_ST_F16}};
    for (size_t i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); i++)
        if (strcmp(name, dtypes[i].name) == 0) {
            *out = dtypes[i].dtype;
            return 0;
        }
    return mb_err_set(err, MB_EINVAL, "--dtype %s: expected fp32, bf16 or fp16", name);
}

static int parse_target(const char *name, int *out, struct mb_err *err)
{
    static const char *const NAMES[] = {[MB_MODEL_OURS] = "mobula",
                                        [MB_MODEL_HUGGING_FACE] = "huggingface",
                                        [MB_MODEL_MEGATRON] = "megatron"};
    *out = -1;
    for (size_t i = 0; name != NULL && i < sizeof(NAMES) / sizeof(NAMES[0]); i++)
        if (strcmp(name, NAMES[i]) == 0)
            *out = (int)i;
    return name == NULL || *out >= 0
               ? 0
               : mb_err_set(err, MB_EINVAL, "--to %s: expected mobula, huggingface or megatron",
                            name);
}

static int parse_impl(const char *name, int *is_local, struct mb_err *err)
{
    *is_local = strcmp(name, "local") == 0;
    return *is_local || strcmp(name, IMPL) == 0
               ? 0
               : mb_err_set(err, MB_EINVAL, "--transformer-impl %s: expected %s or local", name,
                            IMPL);
}

static int convert(const struct convert_args *args, char **words, struct mb_model_facts *facts,
                   struct mb_err *err)
{
    struct mb_convert_options o = {
        .source = words[0],
        .target = words[1],
        .iteration = args->iteration,
        .max_file_bytes = args->max_file_bytes,
        .vocab = (uint64_t)args->vocab,
        .divisible_by = (uint64_t)args->divisible_by,
        .tensor_parallel_size = (uint64_t)args->tensor_parallel,
        .pipeline_parallel_size = (uint64_t)args->pipeline_parallel,
        .no_load_optim = args->no_load_optim,
    };
    int rc = parse_dtype(args->dtype, &o.dtype, err);
    if (!rc)
        rc = parse_target(args->to, &o.to, err);
    if (!rc)
        rc = parse_impl(args->impl, &o.is_local, err);
    return rc != 0 ? rc : mb_model_convert(&o, facts, err);
}

/* Options are about models; a file is a file. */
static int convert_file(const struct convert_args *args, char **words, struct mb_err *err)
{
    if (args->iteration >= 0 || args->vocab || args->divisible_by || args->max_file_bytes ||
        args->tensor_parallel || args->pipeline_parallel || args->no_load_optim || args->to ||
        args->impl != IMPL || args->dtype != DTYPE)
        return mb_err_set(err, MB_EINVAL,
                          "%s is a file: of the options, --json alone has an effect there",
                          words[0]);
    return mb_tensors_convert(words[0], words[1], args->json, err);
}

static int convert_run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct convert_args args = {.iteration = -1, .dtype = DTYPE, .impl = IMPL};
    struct mb_model_facts facts;
    struct mb_err err = {0};
    int n_words = 0, rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &err);

    if (rc == 1)
        return 0;
    if (!rc && n_words != 2)
        rc = mb_err_set(&err, MB_EINVAL, "what into what? mobula checkpoint convert SOURCE TARGET");
    if (!rc && args.json)
        rc = mb_checkpoint_json_name(argv[1], &err);
    if (!rc && mb_is_file(argv[1])) {
        rc = convert_file(&args, argv + 1, &err);
        return rc ? mb_checkpoint_fail(cli, args.json, &err) : 0;
    }
    if (!rc)
        rc = convert(&args, argv + 1, &facts, &err);
    if (!rc && args.json)
        rc = mb_model_print_json("converted", argv[1], &facts, &err);
    if (rc)
        return mb_checkpoint_fail(cli, args.json, &err);
    if (args.json)
        return 0;
    mb_model_print(argv[1], &facts);
    printf("%s is a %s of it now\n", argv[2], mb_model_kind(facts.target));
    if (facts.target == MB_MODEL_OURS)
        printf(facts.has_optimizer
                   ? "go on from it: mobula train --load %s --use-checkpoint-args ...\n"
                   : "train from it: mobula train --pretrained-checkpoint %s "
                     "--use-checkpoint-args ...\n",
               argv[2]);
    if (facts.target == MB_MODEL_MEGATRON)
        printf("%s from it: pretrain_gpt.py --ckpt-format torch --load %s%s --no-load-rng ...\n",
               facts.has_optimizer ? "go on" : "train", argv[2],
               facts.has_optimizer ? "" : " --no-load-optim");
    return 0;
}

const struct mb_verb mb_verb_checkpoint_convert = {
    .name = "convert",
    .summary = "a Hugging Face directory (Llama, GPT-2) into a checkpoint of ours, or back; one of "
               "Megatron-LM into one of ours, or back; FILE.pt into FILE.safetensors",
    .synopsis = "[--to megatron] [--dtype fp32|bf16|fp16] [--json] SOURCE TARGET",
    .examples =
        "  mobula checkpoint convert ./Llama-3.1-8B /ckpt/base\n"
        "  mobula checkpoint convert ./megatron-run /ckpt/base\n"
        "  mobula checkpoint convert --dtype bf16 /ckpt/run1 ./my-model\n"
        "  mobula checkpoint convert --to megatron --tensor-model-parallel-size 8 /ckpt/run1 "
        "./megatron-run\n"
        "  mobula checkpoint convert model_optim_rng.pt tensors.safetensors\n"
        "  mobula checkpoint convert tensors.safetensors model_optim_rng.pt\n",
    .options = convert_options,
    .run = convert_run,
};
