/*
 * Megatron-LM's command line, from one table (args_table.c).
 *
 * Every argument of the table is one of: implemented; accepted, with one note line saying that it
 * has no effect here; refused by name with the reason (only when it asks for something else than
 * its default). What the table does not know is an error. Syntax as Python's argparse without
 * abbreviations: `--k v`, `--k=v`, the last one wins, lists end at the next option.
 * Texts and their order follow Megatron-LM's arguments.py (core 0.10). Pure: no I/O; any thread.
 */
#ifndef MOBULA_WORKER_ARGS_H
#define MOBULA_WORKER_ARGS_H

#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/err.h"
#include "worker/model/batch_ramp.h"
#include "worker/model/loss_scale.h"

#define MB_ARGS_NONE INT64_MIN /* an int argument that is None; a float is NaN, a text NULL */

struct mb_args_list {
    char **items; /* owned */
    size_t n;     /* 0: None */
};

/* The tokenizer of a checkpoint, as mb_args_adopt() found it; texts are owned. */
struct mb_args_tokenizer {
    char *type, *model; /* NULL: it does not say; model is a path */
    int is_taken;       /* type or model is in the arguments now */
};

/* Implemented arguments by Megatron's names; sizes as counts of what they name. */
struct mb_args {
    /* network size */
    int64_t num_layers, hidden_size, ffn_hidden_size, num_attention_heads, kv_channels;
    int64_t num_query_groups, max_position_embeddings, make_vocab_size_divisible_by, vocab_size;
    int64_t group_query_attention, untie_embeddings_and_output_weights, bias_gelu_fusion;
    double norm_epsilon, init_method_std;
    char *position_embedding_type, *normalization;
    int64_t add_position_embedding, use_rotary_position_embeddings;
    int64_t rotary_base, rotary_seq_len_interpolation_factor, use_rope_scaling;
    double rotary_percent, rope_scaling_factor;
    int64_t apply_layernorm_1p, swiglu, add_bias_linear, add_qkv_bias;
    /* training */
    int64_t seq_length, micro_batch_size, global_batch_size, train_iters, train_samples;
    int64_t seed, calculate_per_token_loss, check_for_nan_in_loss_and_grad;
    double attention_dropout, hidden_dropout, clip_grad;
    double weight_decay, start_weight_decay, end_weight_decay;
    char *weight_decay_incr_style;
    double adam_beta1, adam_beta2, adam_eps, sgd_momentum;
    char *optimizer, *transformer_impl, *ckpt_format;
    int64_t exit_interval, exit_duration_in_mins, exit_signal_handler;
    int64_t bf16, grad_reduce_in_bf16, accumulate_allreduce_grads_in_fp32, deterministic_mode;
    char *recompute_granularity, *recompute_method;
    int64_t recompute_activations, recompute_num_layers, fp16;
    double loss_scale, initial_loss_scale, min_loss_scale, loss_scale_window;
    int64_t hysteresis;
    char *fp8;
    int64_t fp8_margin;
    char *cuda_graph_impl;
    int64_t enable_cuda_graph;
    int64_t profile, profile_step_start, profile_step_end;
    struct mb_args_list profile_ranks, iterations_to_skip;
    /* learning rate */
    struct mb_args_list rampup_batch_size; /* none or three */
    double decoupled_lr, decoupled_min_lr;
    double lr, min_lr, lr_warmup_init, lr_warmup_fraction;
    char *lr_decay_style, *lr_wsd_decay_style;
    int64_t lr_decay_iters, lr_decay_samples, lr_warmup_iters, lr_warmup_samples;
    int64_t lr_wsd_decay_iters, lr_wsd_decay_samples, override_opt_param_scheduler;
    int64_t use_checkpoint_opt_param_scheduler;
    /* distributed */
    char *distributed_backend;
    int64_t distributed_timeout_minutes, use_distributed_optimizer;
    int64_t overlap_grad_reduce, overlap_param_gather, ddp_bucket_size;
    int64_t tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size;
    int64_t num_layers_per_virtual_pipeline_stage, num_virtual_stages_per_pipeline_rank;
    int64_t sequence_parallel;
    /* data */
    struct mb_args_list data_path, train_data_path, valid_data_path, test_data_path;
    char *split, *dataloader_type, *data_args_path, *data_cache_path;
    char *tokenizer_type, *vocab_file, *merge_file, *tokenizer_model, *tiktoken_pattern;
    struct mb_args_list tiktoken_special_tokens;
    int64_t tiktoken_num_special_tokens, tokenizer_hf_include_special_tokens;
    int64_t mock_data, data_sharding, eod_mask_loss, reset_position_ids;
    /* checkpoints */
    char *save, *load, *pretrained_checkpoint;
    int64_t save_interval, save_retain_interval, keep_last_k, async_save, no_save_optim,
        no_load_optim, finetune, exit_on_missing_checkpoint, use_checkpoint_args;
    int64_t use_mp_args_from_checkpoint_args, use_tokenizer_model_from_checkpoint_args;
    /* validation, logging */
    int64_t eval_iters, eval_interval, log_interval, log_throughput, log_params_norm;
    int64_t log_num_zeros_in_grad;
    char *tensorboard_dir;
    int64_t tensorboard_log_interval, tensorboard_queue_size, log_timers_to_tensorboard;
    int64_t log_loss_scale_to_tensorboard, log_memory_to_tensorboard;
    int64_t log_validation_ppl_to_tensorboard, log_world_size_to_tensorboard;
    int64_t timing_log_level;
    char *timing_log_option;
    /* mobula's own */
    int64_t eval_at_start;
    char *model_preset, *blend_sizes; /* NULL: not settled */

    /* Not arguments: set by mb_args_validate() and by the trainer, shown in the dump. */
    int64_t rank, world_size, data_parallel_size, padded_vocab_size, true_vocab_size;
    int64_t virtual_pipeline_model_parallel_size; /* chunks of a stage, with 2 or more */
    int64_t consumed_train_samples, consumed_valid_samples;
    int64_t skipped_train_samples; /* of --iterations-to-skip */

    int64_t checkpoint_padded_vocab_size; /* of mb_args_adopt(); 0: none */
    struct mb_args_tokenizer checkpoint_tokenizer;

    struct mb_args_raw *raw; /* what was given, by row; owned */
    int is_usage; /* after a failure: argparse's kind, of MB_ARGS_EXIT_USAGE: what cannot be parsed,
                     or a required argument that is missing */
    struct mb_buf notes; /* lines for rank 0 to print, each ending in a newline */
};

enum mb_args_outcome { MB_ARGS_OK = 0, MB_ARGS_HELP = 1 };

enum { MB_ARGS_EXIT_USAGE = 2 }; /* argparse's status of a command line that it refuses */

/* argv without the program's name; what --model-preset stands for comes before it. MB_ARGS_HELP
 * when --help is there; MB_EINVAL with argparse's text for a line that cannot be parsed. args is to
 * be closed in every case; is_usage is set with MB_EINVAL. */
int mb_args_parse(struct mb_args *args, int argc, const char *const *argv, struct mb_err *err);
void mb_args_close(struct mb_args *args);

/* Chunks of layers that a pipeline's stage has, of validated arguments. */
size_t mb_args_chunks(const struct mb_args *args);

/* --bf16 where the device has it. */
int mb_args_computes_in_bf16(const struct mb_args *args);
/* Whether passes are to be captured as CUDA graphs. */
int mb_args_wants_graphs(const struct mb_args *args);

/* How the loss is scaled: constantly by 1 without --fp16. */
struct mb_loss_scale_config mb_args_loss_scale(const struct mb_args *args);

/* --rampup-batch-size, checked. */
struct mb_batch_ramp mb_args_ramp(const struct mb_args *args);

/* Refusals, then Megatron's checks in Megatron's order; fills in what derives from other arguments
 * (ffn_hidden_size, global_batch_size, train_iters, split, ...). MB_EUNSUPPORTED for a refusal,
 * MB_EINVAL for a check. The exit status is MB_ARGS_EXIT_USAGE where is_usage is set, else
 * mb_exit_status()'s. */
int mb_args_validate(struct mb_args *args, uint32_t rank, uint32_t world_size, struct mb_err *err);

/* Between parsing and validating: the n bytes of --data-args-path's file, behind which text has a
 * 0, are --data-path's words. They are separated as Python's split() does it; nothing quotes. A
 * byte 0 in them, or none but separators, is MB_EINVAL. */
int mb_args_take_data_args(struct mb_args *args, const char *text, size_t n, struct mb_err *err);

/* Between parsing and validating, with --use-checkpoint-args: what the checkpoint says of the
 * model, and what its format is. args_json is untrusted. The tokenizer is only found. */
int mb_args_adopt(struct mb_args *args, const char *args_json, struct mb_err *err);

/* After it: where the checkpoint's tokenizer is, if all ranks are to read it there; else NULL. */
const char *mb_args_tokenizer_path(const struct mb_args *args);
/* Then: takes the tokenizer that mb_args_adopt() found. why_not: why some rank cannot read that
 * path, NULL: all can. Whether the path is there must be the same for all ranks: their tokenizers
 * are. MB_ENOENT when it is not and the command line has no tokenizer. */
int mb_args_adopt_tokenizer(struct mb_args *args, const char *why_not, struct mb_err *err);

/* Whether the checkpoint's model is the validated arguments' one: MB_EINVAL if not. What does not
 * make other tensors may differ when is_new, when another training begins; it is lines of notes. So
 * is a tokenizer of another size, whenever. */
int mb_args_compare(const struct mb_args *args, const char *args_json, int is_new,
                    struct mb_buf *notes, struct mb_err *err);

/* Sizes of weighted blends, where a run goes on from a checkpoint of these arguments: those of the
 * run that wrote it, unless the command line has its own. What may put samples into another order
 * is lines of notes, if a blend is weighted. */
int mb_args_settle_blend(struct mb_args *args, const char *args_json, int is_weighted,
                         struct mb_buf *notes, struct mb_err *err);

/* repr() of a Python float: the shortest digits that read back, exponent from 1e16 and below 1e-4.
 */
enum { MB_ARG_FLOAT_TEXT_MAX = 64 };
void mb_arg_float_text(double v, char out[MB_ARG_FLOAT_TEXT_MAX]);

/* The help text, by groups. */
int mb_args_help(struct mb_buf *out);
/* Lines "  name ...... value" of all arguments, sorted as Megatron sorts them. */
int mb_args_dump(const struct mb_args *args, struct mb_buf *out);
/* The same as a JSON object, for checkpoints. */
char *mb_args_json(const struct mb_args *args);

#endif
