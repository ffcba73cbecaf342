/* mobula checkpoint inspect DIR|FILE: what model a directory holds, ours, Megatron-LM's or Hugging
 * Face's; what tensors a file. */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include "base/alloc.h"
#include "base/printable.h"
#include "base/str.h"
#include "cli/checkpoint.h"
#include "cli/checkpoint_model.h"
#include "cli/checkpoint_file.h"

struct inspect_args {
    int json, headers_only;
    int64_t iteration;
};

static const struct mb_option inspect_options[] = {
    {"iteration", 0, "N", MB_OPTION_INT, offsetof(struct inspect_args, iteration),
     "of a checkpoint, instead of the newest", 1, INT64_MAX},
    {"headers-only", 0, NULL, MB_OPTION_FLAG, offsetof(struct inspect_args, headers_only),
     "leave the weights unread: a damaged byte among them is not noticed then", 0, 0},
    {"json", 0, NULL, MB_OPTION_FLAG, offsetof(struct inspect_args, json), "print JSON, errors too",
     0, 0},
    {0},
};

const char *mb_model_kind(enum mb_model_kind kind)
{
    return kind == MB_MODEL_OURS       ? "mobula checkpoint"
           : kind == MB_MODEL_MEGATRON ? "Megatron-LM checkpoint"
                                       : "Hugging Face directory";
}

static const char *family(const struct mb_model_facts *f)
{
    return f->kind == MB_MODEL_MEGATRON || f->target == MB_MODEL_MEGATRON ? "GPTModel"
           : f->shape.family == MB_HF_LLAMA                               ? "LlamaForCausalLM"
                                                                          : "GPT2LMHeadModel";
}

int mb_model_print_json(const char *event, const char *dir, const struct mb_model_facts *f,
                        struct mb_err *err)
{
    const struct mb_hf_shape *s = &f->shape;
    struct mb_err why = f->optimizer_refused;
    const char *kind = f->kind == MB_MODEL_OURS       ? "mobula"
                       : f->kind == MB_MODEL_MEGATRON ? "megatron"
                                                      : "huggingface";
    json_t *j = json_pack(
        "{s:s, s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "event",
        event, "directory", dir, "kind", kind, "model", family(f), "parameters",
        (json_int_t)f->n_parameters, "tensors", (json_int_t)f->n_tensors, "files",
        (json_int_t)f->n_files, "bytes", (json_int_t)f->total_bytes, "num_layers",
        (json_int_t)s->n_layers, "hidden_size", (json_int_t)s->hidden, "ffn_hidden_size",
        (json_int_t)s->ffn, "num_attention_heads", (json_int_t)s->n_heads, "num_query_groups",
        (json_int_t)s->n_groups, "kv_channels", (json_int_t)s->head_dim, "vocab_size",
        (json_int_t)s->vocab, "max_position_embeddings", (json_int_t)s->max_positions);
    if (f->iteration > 0)
        json_object_set_new(j, "iteration", json_integer(f->iteration));
    if (f->kind == MB_MODEL_MEGATRON) {
        json_object_set_new(j, "release", json_boolean(f->iteration <= 0));
        json_object_set_new(j, "ckpt_format", json_string(f->is_dist ? "torch_dist" : "torch"));
        if (f->optimizer_steps >= 0)
            json_object_set_new(j, "optimizer_steps", json_integer(f->optimizer_steps));
        if (why.code != 0) {
            mb_err_printable(&why);
            json_object_set_new(j, "optimizer_refused", json_string(why.text));
        }
    }
    if (f->kind == MB_MODEL_MEGATRON && !f->is_dist) {
        json_object_set_new(j, "tensor_model_parallel_size",
                            json_integer((json_int_t)f->tensor_parallel_size));
        json_object_set_new(j, "pipeline_model_parallel_size",
                            json_integer((json_int_t)f->pipeline_parallel_size));
    }
    return mb_checkpoint_print_json(j, JSON_COMPACT, err);
}

void mb_model_print(const char *dir, const struct mb_model_facts *f)
{
    const struct mb_hf_shape *s = &f->shape;
    char size[16];
    printf("%s: %s", dir, mb_model_kind(f->kind));
    if (f->iteration > 0)
        printf(", iteration %" PRId64, f->iteration);
    else if (f->kind == MB_MODEL_MEGATRON)
        printf(", release");
    if (f->kind == MB_MODEL_MEGATRON && f->is_dist)
        printf(", torch_dist");
    else if (f->kind == MB_MODEL_MEGATRON)
        printf(", tensor-parallel size %" PRIu64 ", pipeline-parallel size %" PRIu64,
               f->tensor_parallel_size, f->pipeline_parallel_size);
    if (f->kind == MB_MODEL_MEGATRON && f->optimizer_steps >= 0)
        printf(", optimizer of %" PRId64 " steps", f->optimizer_steps);
    printf("\n%s, %" PRIu64 " parameters in %zu tensors, %zu file%s, %s\n", family(f),
           f->n_parameters, f->n_tensors, f->n_files, f->n_files == 1 ? "" : "s",
           mb_human_bytes(f->total_bytes, size));
    printf("layers %" PRIu64 ", hidden %" PRIu64 ", MLP %" PRIu64 ", heads %" PRIu64 " in %" PRIu64
           " groups of %" PRIu64 " channels, vocabulary %" PRIu64 ", positions %" PRIu64 ", %s\n",
           s->n_layers, s->hidden, s->ffn, s->n_heads, s->n_groups, s->head_dim, s->vocab,
           s->max_positions, s->untied ? "untied output" : "tied output");
    if (f->optimizer_refused.code != 0) {
        struct mb_err why = f->optimizer_refused;
        mb_err_printable(&why);
        printf("its optimizer is not read: %s\n", why.text);
    }
}

static int inspect_run(struct mb_cli *cli, const struct mb_verb *verb, int argc, char **argv)
{
    struct inspect_args args = {.iteration = -1};
    struct mb_model_facts facts;
    struct mb_err err = {0};
    int n_words = 0, rc = mb_options_parse(cli, verb, argc, argv, 0, &args, &n_words, &err);

    if (rc == 1)
        return 0;
    if (!rc && n_words != 1)
        rc = mb_err_set(&err, MB_EINVAL, "which model? mobula checkpoint inspect DIR|FILE");
    if (!rc && args.json)
        rc = mb_checkpoint_json_name(argv[1], &err);
    if (!rc && mb_is_file(argv[1])) {
        rc = args.iteration < 0
                 ? mb_tensors_inspect(argv[1], args.json, !args.headers_only, &err)
                 : mb_err_set(&err, MB_EINVAL, "--iteration: %s is a file: it has no effect there",
                              argv[1]);
        return rc ? mb_checkpoint_fail(cli, args.json, &err) : 0;
    }
    if (!rc)
        rc = mb_model_inspect(argv[1], args.iteration, !args.headers_only, &facts, &err);
    if (!rc && args.json)
        rc = mb_model_print_json("model", argv[1], &facts, &err);
    if (rc)
        return mb_checkpoint_fail(cli, args.json, &err);
    if (!args.json)
        mb_model_print(argv[1], &facts);
    return 0;
}

const struct mb_verb mb_verb_checkpoint_inspect = {
    .name = "inspect",
    .summary =
        "what model a directory holds (ours, Megatron-LM's, Hugging Face's), what tensors a file",
    .synopsis = "[--iteration N] [--headers-only] [--json] DIR|FILE",
    .examples = "  mobula checkpoint inspect ./Llama-3.1-8B\n"
                "  mobula checkpoint inspect iter_0000020/mp_rank_00/model_optim_rng.pt\n",
    .options = inspect_options,
    .run = inspect_run,
};
