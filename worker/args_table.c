/*
 * The table of Megatron-LM's arguments. Names, types and defaults are Megatron-LM's (core 0.10);
 * what differs is said in the text. Group by group, each row: what it is here, then why.
 */
#include "worker/args_preset.h"
#include "worker/args_table.h"
#include "worker/data/tokenizer/options_table.h"

#define FIELD(f) offsetof(struct mb_args, f)
#define I(n, t, d, f, h)                                                                           \
    {                                                                                              \
        n, NULL, MB_ARG_##t, MB_ARG_IMPLEMENTED, d, NULL, GROUP, h, FIELD(f)                       \
    }
#define I_DEST(n, dest, t, d, f, h)                                                                \
    {                                                                                              \
        n, dest, MB_ARG_##t, MB_ARG_IMPLEMENTED, d, NULL, GROUP, h, FIELD(f)                       \
    }
#define I_CHOICE(n, d, c, f, h)                                                                    \
    {                                                                                              \
        n, NULL, MB_ARG_TEXT, MB_ARG_IMPLEMENTED, d, c, GROUP, h, FIELD(f)                         \
    }
#define I_INT_CHOICE(n, d, c, f, h)                                                                \
    {                                                                                              \
        n, NULL, MB_ARG_INT, MB_ARG_IMPLEMENTED, d, c, GROUP, h, FIELD(f)                          \
    }
#define I_DEST_CHOICE(n, dest, d, c, f, h)                                                         \
    {                                                                                              \
        n, dest, MB_ARG_TEXT, MB_ARG_IMPLEMENTED, d, c, GROUP, h, FIELD(f)                         \
    }
#define NOTED(n, t, d, h)                                                                          \
    {                                                                                              \
        n, NULL, MB_ARG_##t, MB_ARG_NOTED, d, NULL, GROUP, h, SIZE_MAX                             \
    }
#define NOTED_CHOICE(n, t, d, c, h)                                                                \
    {                                                                                              \
        n, NULL, MB_ARG_##t, MB_ARG_NOTED, d, c, GROUP, h, SIZE_MAX                                \
    }
#define NOTED_DEST(n, dest, t, d, h)                                                               \
    {                                                                                              \
        n, dest, MB_ARG_##t, MB_ARG_NOTED, d, NULL, GROUP, h, SIZE_MAX                             \
    }
#define REFUSED(n, t, d, h)                                                                        \
    {                                                                                              \
        n, NULL, MB_ARG_##t, MB_ARG_REFUSED, d, NULL, GROUP, h, SIZE_MAX                           \
    }
#define COMPUTED(n, f)                                                                             \
    {                                                                                              \
        n, NULL, MB_ARG_COMPUTED, MB_ARG_IMPLEMENTED, NULL, NULL, NULL, NULL, FIELD(f)             \
    }

/* clang-format off */
const struct mb_arg_row MB_ARG_ROWS[] = {
#define GROUP "network size"
    I("num-layers", INT, NULL, num_layers, "number of transformer layers"),
    I("hidden-size", INT, NULL, hidden_size, "width of the residual stream"),
    I("ffn-hidden-size", INT, NULL, ffn_hidden_size, "width of the MLP; None: 4 * hidden size, with --swiglu 2/3 of that"),
    I("num-attention-heads", INT, NULL, num_attention_heads, "heads; without --kv-channels they divide the hidden size"),
    I("kv-channels", INT, NULL, kv_channels, "width of a head; None: hidden size / heads"),
    I("group-query-attention", FLAG, NULL, group_query_attention, "share keys and values between heads"),
    I("num-query-groups", INT, "1", num_query_groups, "groups with --group-query-attention"),
    I("max-position-embeddings", INT, NULL, max_position_embeddings, "longest sequence; rows of the table of learned positions"),
    I("make-vocab-size-divisible-by", INT, "128", make_vocab_size_divisible_by, "pads the vocabulary"),
    I("norm-epsilon", FLOAT, "1e-05", norm_epsilon, "epsilon of norms"),
    I("untie-embeddings-and-output-weights", FLAG, NULL, untie_embeddings_and_output_weights, "own weights for the output layer"),
    I_CHOICE("position-embedding-type", "learned_absolute", "learned_absolute|rope|none|mrope|relative|yarn", position_embedding_type, "mrope, relative and yarn are not provided"),
    I_DEST("no-position-embedding", "add_position_embedding", FLAG_OFF, NULL, add_position_embedding, "with --position-embedding-type rope, which has no table anyway"),
    I("use-rotary-position-embeddings", FLAG, NULL, use_rotary_position_embeddings, "the older name of --position-embedding-type rope"),
    I("rotary-base", INT, "10000", rotary_base, "base of the angles of rotary positions"),
    I("rotary-percent", FLOAT, "1.0", rotary_percent, "share of a head's channels that turn"),
    REFUSED("rotary-interleaved", FLAG, NULL, "pairs are a channel and the one half of them further"),
    I("rotary-seq-len-interpolation-factor", INT, NULL, rotary_seq_len_interpolation_factor, "positions are divided by it"),
    I("use-rope-scaling", FLAG, NULL, use_rope_scaling, "rotary positions as in Llama 3.1"),
    I("rope-scaling-factor", FLOAT, "8.0", rope_scaling_factor, "factor of --use-rope-scaling"),
    I_CHOICE("normalization", "LayerNorm", "LayerNorm|RMSNorm", normalization, "all norms of the model"),
    I("apply-layernorm-1p", FLAG, NULL, apply_layernorm_1p, "a norm's weight is kept as its difference from 1"),
    I("swiglu", FLAG, NULL, swiglu, "gated MLP with SiLU; without --ffn-hidden-size 2/3 of the width"),
    REFUSED("squared-relu", FLAG, NULL, "the MLP is GELU, or --swiglu"),
    REFUSED("openai-gelu", FLAG, NULL, "the MLP is GELU, or --swiglu; --no-bias-gelu-fusion chooses the erf form"),
    REFUSED("qk-layernorm", FLAG, NULL, "queries and keys are not normalised"),
#undef GROUP
#define GROUP "regularization"
    I("attention-dropout", FLOAT, "0.1", attention_dropout, "after the softmax"),
    I("hidden-dropout", FLOAT, "0.1", hidden_dropout, "on the residual branches"),
    I("weight-decay", FLOAT, "0.01", weight_decay, "of weights with two dimensions"),
    I("start-weight-decay", FLOAT, NULL, start_weight_decay, "with --weight-decay-incr-style"),
    I("end-weight-decay", FLOAT, NULL, end_weight_decay, "with --weight-decay-incr-style"),
    I_CHOICE("weight-decay-incr-style", "constant", "constant|linear|cosine", weight_decay_incr_style, "how it grows"),
    I("clip-grad", FLOAT, "1.0", clip_grad, "largest norm of the gradient; 0: no limit"),
    I("adam-beta1", FLOAT, "0.9", adam_beta1, "Adam's first moment"),
    I("adam-beta2", FLOAT, "0.999", adam_beta2, "Adam's second moment"),
    I("adam-eps", FLOAT, "1e-08", adam_eps, "Adam's epsilon"),
    I("sgd-momentum", FLOAT, "0.9", sgd_momentum, "with --optimizer sgd"),
#undef GROUP
#define GROUP "training"
    I_DEST("no-bias-gelu-fusion", "bias_gelu_fusion", FLAG_OFF, NULL, bias_gelu_fusion, "GELU by erf instead of tanh"),
    I_DEST("disable-bias-linear", "add_bias_linear", FLAG_OFF, NULL, add_bias_linear, "no biases in linear layers"),
    I("add-qkv-bias", FLAG, NULL, add_qkv_bias, "with --disable-bias-linear: but those of queries, keys and values"),
    I("micro-batch-size", INT, NULL, micro_batch_size, "samples of one forward and backward pass of a rank"),
    I("global-batch-size", INT, NULL, global_batch_size, "samples of an iteration; None: micro batch * data parallel size"),
    I("train-iters", INT, NULL, train_iters, "iterations of the whole training"),
    I("train-samples", INT, NULL, train_samples, "samples of the whole training, instead of --train-iters"),
    I("iterations-to-skip", INTS, "[]", iterations_to_skip, "iterations whose samples are passed over, by the number of iterations done before"),
    I("exit-interval", INT, NULL, exit_interval, "end after an iteration that this divides"),
    I("exit-duration-in-mins", INT, NULL, exit_duration_in_mins, "save and end after so many minutes"),
    I("exit-signal-handler", FLAG, NULL, exit_signal_handler, "save and end on SIGTERM (always done here)"),
    I("calculate-per-token-loss", FLAG, NULL, calculate_per_token_loss, "divide gradients by all tokens of the global batch"),
    I_DEST("no-check-for-nan-in-loss-and-grad", "check_for_nan_in_loss_and_grad", FLAG_OFF, NULL, check_for_nan_in_loss_and_grad, "skip such an iteration instead of ending"),
    I_CHOICE("optimizer", "adam", "adam|sgd|hybridadam", optimizer, "Adam with decoupled weight decay, or SGD with --sgd-momentum; hybridadam is not provided"),
    I("rampup-batch-size", TRIPLE, NULL, rampup_batch_size, "START INCREMENT SAMPLES: the global batch grows from START while SAMPLES are consumed; with --train-samples"),
    I("recompute-activations", FLAG, NULL, recompute_activations, "as --recompute-granularity selective"),
    I_CHOICE("recompute-granularity", NULL, "full|selective", recompute_granularity, "selective: attention always computes its scores anew; full: whole layers are"),
    I_CHOICE("recompute-method", NULL, "uniform|block", recompute_method, "with full: all layers one by one, or the first --recompute-num-layers"),
    I("recompute-num-layers", INT, NULL, recompute_num_layers, "of --recompute-method block; with uniform each layer is by itself"),
    I("deterministic-mode", FLAG, NULL, deterministic_mode, "matrix products on GPUs are not tuned, so that every run gives the same bits; all else is deterministic anyway"),
    NOTED("use-flash-attn", FLAG, NULL, "attention is always fused"),
    NOTED_CHOICE("attention-backend", TEXT, "auto", "flash|fused|unfused|local|auto", "there is one attention"),
    NOTED("use-mcore-models", FLAG, NULL, "there is one model"),
    NOTED_DEST("use-legacy-models", NULL, FLAG, NULL, "there is one model"),
    NOTED_DEST("no-masked-softmax-fusion", "masked_softmax_fusion", FLAG_OFF, NULL, "kernels decide this themselves"),
    NOTED_DEST("no-bias-swiglu-fusion", "bias_swiglu_fusion", FLAG_OFF, NULL, "kernels decide this themselves"),
    NOTED_DEST("no-bias-dropout-fusion", "bias_dropout_fusion", FLAG_OFF, NULL, "kernels decide this themselves"),
    NOTED_DEST("no-rope-fusion", "apply_rope_fusion", FLAG_OFF, NULL, "kernels decide this themselves"),
    NOTED_DEST("no-gradient-accumulation-fusion", "gradient_accumulation_fusion", FLAG_OFF, NULL, "kernels decide this themselves"),
    NOTED_DEST("no-persist-layer-norm", "no_persist_layer_norm", FLAG, NULL, "kernels decide this themselves"),
    NOTED("cross-entropy-loss-fusion", FLAG, NULL, "the loss is always fused"),
    NOTED_DEST("no-async-tensor-model-parallel-allreduce", NULL, FLAG, NULL, "Megatron-LM ignores it, too"),
    NOTED("manual-gc", FLAG, NULL, "there is no garbage collector"),
    NOTED("manual-gc-interval", INT, "0", "there is no garbage collector"),
    I("profile", FLAG, NULL, profile, "on GPUs: NVTX ranges and cudaProfilerStart for nsys or ncu, in the iterations below"),
    I("profile-step-start", INT, "10", profile_step_start, "iterations that are done when recording starts"),
    I("profile-step-end", INT, "12", profile_step_end, "iterations that are done when recording stops"),
    I("profile-ranks", INTS, "[0]", profile_ranks, "ranks that are recorded"),
    NOTED("use-pytorch-profiler", FLAG, NULL, "there is no PyTorch in a worker; --profile is for nsys and ncu"),
    I("sequence-parallel", FLAG, NULL, sequence_parallel, "with tensor parallelism: between the layers' products ranks share the tokens, too; less memory"),
    I_CHOICE("dataloader-type", NULL, "single|cyclic|external", dataloader_type, "None: single"),
#undef GROUP
#define GROUP "initialization"
    I("init-method-std", FLOAT, "0.02", init_method_std, "standard deviation of initial weights"),
    I("seed", INT, "1234", seed, "of weights, data order and dropout"),
    NOTED("data-parallel-random-init", FLAG, NULL, "one seed makes one model on all ranks"),
#undef GROUP
#define GROUP "learning rate"
    I("lr", FLOAT, NULL, lr, "largest learning rate"),
    I("min-lr", FLOAT, "0.0", min_lr, "learning rate after the decay"),
    I_CHOICE("lr-decay-style", "linear", "constant|linear|cosine|inverse-square-root|WSD", lr_decay_style, "shape of the decay"),
    I("lr-decay-iters", INT, NULL, lr_decay_iters, "length of the schedule; None: the training"),
    I("lr-decay-samples", INT, NULL, lr_decay_samples, "the same in samples"),
    I("lr-warmup-fraction", FLOAT, NULL, lr_warmup_fraction, "share of the schedule that warms up"),
    I("lr-warmup-iters", INT, "0", lr_warmup_iters, "iterations that warm up"),
    I("lr-warmup-samples", INT, "0", lr_warmup_samples, "samples that warm up"),
    I("lr-warmup-init", FLOAT, "0.0", lr_warmup_init, "learning rate at the start of the warmup"),
    I_CHOICE("lr-wsd-decay-style", "exponential", "exponential|linear|cosine|minus_sqrt", lr_wsd_decay_style, "shape of WSD's decay"),
    I("lr-wsd-decay-iters", INT, NULL, lr_wsd_decay_iters, "length of WSD's decay"),
    I("lr-wsd-decay-samples", INT, NULL, lr_wsd_decay_samples, "the same in samples"),
    I("override-opt_param-scheduler", FLAG, NULL, override_opt_param_scheduler, "the schedule of the command line, whatever the checkpoint's was"),
    I("use-checkpoint-opt_param-scheduler", FLAG, NULL, use_checkpoint_opt_param_scheduler, "the schedule of the checkpoint, whatever the command line's is"),
    I("decoupled-lr", FLOAT, NULL, decoupled_lr, "largest learning rate of embedding and output layer"),
    I("decoupled-min-lr", FLOAT, NULL, decoupled_min_lr, "their learning rate after the decay; None: --min-lr"),
#undef GROUP
#define GROUP "checkpointing"
    I("save", TEXT, NULL, save, "directory to save into"),
    I("save-interval", INT, NULL, save_interval, "iterations between saves"),
    I("save-retain-interval", INT, NULL, save_retain_interval, "of older checkpoints keep those whose iteration this divides, remove the others (but --keep-last-k)"),
    I("async-save", FLAG, NULL, async_save, "train on while a checkpoint is written, from a copy in host memory; a save that comes meanwhile waits for it, one that fails ends the run"),
    I("load", TEXT, NULL, load, "directory to load from"),
    I("pretrained-checkpoint", TEXT, NULL, pretrained_checkpoint, "as --load with --finetune, when --load has nothing yet"),
    I("no-save-optim", FLAG, NULL, no_save_optim, "weights only"),
    I("no-load-optim", FLAG, NULL, no_load_optim, "weights only"),
    I("finetune", FLAG, NULL, finetune, "take the weights, start at iteration 0"),
    I("exit-on-missing-checkpoint", FLAG, NULL, exit_on_missing_checkpoint, "nothing to load is an error"),
    I_CHOICE("ckpt-format", "safetensors", "safetensors|torch|torch_dist|zarr|torch_dcp|fsdp_dtensor", ckpt_format, "what is saved: safetensors (with --use-checkpoint-args what the checkpoint has), or with torch Megatron-LM's files, of this layout; torch_dist is not written, --load reads all three"),
    I("use-checkpoint-args", FLAG, NULL, use_checkpoint_args, "sizes that are not given, what else makes the model, and the tokenizer, from the checkpoint of --load or --pretrained-checkpoint"),
    I("use-mp-args-from-checkpoint-args", FLAG, NULL, use_mp_args_from_checkpoint_args, "with --use-checkpoint-args: tensor and pipeline parallel sizes, too"),
    I_DEST("no-use-tokenizer-model-from-checkpoint-args", "use_tokenizer_model_from_checkpoint_args", FLAG_OFF, NULL, use_tokenizer_model_from_checkpoint_args, "with --use-checkpoint-args: the command line's tokenizer counts; of the checkpoint's its type where the command line has none"),
    NOTED("no-save-rng", FLAG, NULL, "there is no random state: dropout is a function of seed and iteration"),
    NOTED("no-load-rng", FLAG, NULL, "there is no random state: dropout is a function of seed and iteration"),
    NOTED("auto-detect-ckpt-format", FLAG, NULL, "what --load finds is always looked at"),
    NOTED_DEST("no-ckpt-fully-parallel-save", "ckpt_fully_parallel_save", FLAG_OFF, NULL, "every rank saves its share"),
#undef GROUP
#define GROUP "mixed precision"
    I("bf16", FLAG, NULL, bf16, "activations and products in bf16, with fp32 weights behind them; GPUs only"),
    I("fp16", FLAG, NULL, fp16, "activations and products in fp16, with fp32 weights behind them and a scaled loss"),
    NOTED("fp16-lm-cross-entropy", FLAG, NULL, "the loss is always fp32"),
    I("grad-reduce-in-bf16", FLAG, NULL, grad_reduce_in_bf16, "with --bf16: ranks sum gradients in bf16; else in fp32"),
    I("accumulate-allreduce-grads-in-fp32", FLAG, NULL, accumulate_allreduce_grads_in_fp32, "gradients are fp32 in any case, and summed so but for --grad-reduce-in-bf16"),
    NOTED("attention-softmax-in-fp32", FLAG, NULL, "the softmax is always fp32"),
    I("loss-scale", FLOAT, NULL, loss_scale, "with --fp16, the loss's factor, which does not change; None: it is dynamic"),
    I("initial-loss-scale", FLOAT, "4294967296", initial_loss_scale, "with --fp16, where the dynamic factor begins"),
    I("min-loss-scale", FLOAT, "1.0", min_loss_scale, "with --fp16, what overflows do not halve any more"),
    I("loss-scale-window", FLOAT, "1000", loss_scale_window, "with --fp16, iterations without an overflow until the factor doubles"),
    I("hysteresis", INT, "2", hysteresis, "with --fp16, overflows until the factor is halved"),
#undef GROUP
#define GROUP "distributed"
    NOTED("use-contiguous-parameters-in-local-ddp", FLAG, NULL, "parameters always lie in one buffer"),
    NOTED_CHOICE("empty-unused-memory-level", INT, "0", "0|1|2", "memory is planned at start"),
    I_CHOICE("distributed-backend", "nccl", "nccl|gloo", distributed_backend, "gloo: the CPU backend; nccl: CUDA"),
    I("distributed-timeout-minutes", INT, "10", distributed_timeout_minutes, "a collective may take this long"),
    I("use-distributed-optimizer", FLAG, NULL, use_distributed_optimizer, "each rank keeps and updates its share of the optimizer"),
    I("overlap-grad-reduce", FLAG, NULL, overlap_grad_reduce, "gradients are reduced while the backward pass runs"),
    I("ddp-bucket-size", INT, NULL, ddp_bucket_size, "elements of a bucket with --overlap-grad-reduce; None: 40 M, or 1 M a rank"),
    I("overlap-param-gather", FLAG, NULL, overlap_param_gather, "allowed with the distributed optimizer; weights are gathered after the update"),
    I("tensor-model-parallel-size", INT, "1", tensor_model_parallel_size, "so many neighbouring ranks share a model's layers"),
    I("pipeline-model-parallel-size", INT, "1", pipeline_model_parallel_size, "so many stages have some of a model's layers each"),
    I("context-parallel-size", INT, "1", context_parallel_size, "so many ranks share every sample, two stretches of it each"),
    NOTED_CHOICE("cp-comm-type", TEXT, "p2p", "p2p", "keys and values go round a ring"),
    REFUSED("hierarchical-context-parallel-sizes", INT, NULL, "there is one ring of ranks"),
    I("num-layers-per-virtual-pipeline-stage", INT, NULL, num_layers_per_virtual_pipeline_stage, "a stage has several chunks of so many layers: the interleaved schedule"),
    I("num-virtual-stages-per-pipeline-rank", INT, NULL, num_virtual_stages_per_pipeline_rank, "the same, by the number of chunks"),
    REFUSED("microbatch-group-size-per-virtual-pipeline-stage", INT, NULL, "as many micro batches as stages go through a chunk together"),
    REFUSED("decoder-first-pipeline-num-layers", INT, NULL, "layers are spread evenly over stages"),
    REFUSED("decoder-last-pipeline-num-layers", INT, NULL, "layers are spread evenly over stages"),
    REFUSED("account-for-embedding-in-pipeline-split", FLAG, NULL, "layers are spread evenly over stages"),
    REFUSED("standalone-embedding-stage", FLAG, NULL, "layers are spread evenly over stages"),
    REFUSED("pipeline-model-parallel-split-rank", INT, NULL, "encoder-decoder models are not provided"),
    NOTED_DEST("no-overlap-p2p-communication", "overlap_p2p_comm", FLAG_OFF, NULL, "what stages send each other is not overlapped with computing"),
    NOTED("overlap-p2p-communication-warmup-flush", FLAG, NULL, "what stages send each other is not overlapped with computing"),
    REFUSED("use-torch-fsdp2", FLAG, NULL, "use --use-distributed-optimizer"),
    NOTED("local-rank", INT, NULL, "LOCAL_RANK of the environment counts"),
#undef GROUP
#define GROUP "validation"
    I("eval-iters", INT, "100", eval_iters, "iterations of an evaluation; 0: none"),
    I("eval-interval", INT, "1000", eval_interval, "iterations between evaluations"),
#undef GROUP
#define GROUP "data and dataloader"
    I("seq-length", INT, NULL, seq_length, "tokens of a sample"),
    I("data-path", LIST, NULL, data_path, "PREFIX..., or WEIGHT PREFIX WEIGHT PREFIX..."),
    I("split", TEXT, NULL, split, "shares of train, valid, test; None: 969, 30, 1"),
    I("train-data-path", LIST, NULL, train_data_path, "instead of --data-path and --split"),
    I("valid-data-path", LIST, NULL, valid_data_path, "instead of --data-path and --split"),
    I("test-data-path", LIST, NULL, test_data_path, "instead of --data-path and --split"),
    I("mock-data", FLAG, NULL, mock_data, "made-up documents"),
    I_DEST("no-data-sharding", "data_sharding", FLAG_OFF, NULL, data_sharding, "cyclic: one order for all ranks"),
    I("eod-mask-loss", FLAG, NULL, eod_mask_loss, "no loss at the end of documents"),
    I("data-args-path", TEXT, NULL, data_args_path, "a file with the words of --data-path, for lists that are too long for a command line"),
    I("reset-position-ids", FLAG, NULL, reset_position_ids, "learned positions begin anew behind an end of document"),
    REFUSED("reset-attention-mask", FLAG, NULL, "attention sees the whole sample"),
    I("data-cache-path", TEXT, NULL, data_cache_path, "directory for indices of samples, shared with Megatron-LM; None: they are built in memory"),
    NOTED("num-workers", INT, "2", "micro batches are made where they are used"),
    NOTED_DEST("no-mmap-bin-files", "mmap_bin_files", FLAG_OFF, NULL, "data is always mapped"),
    NOTED_DEST("no-create-attention-mask-in-dataloader", "create_attention_mask_in_dataloader", FLAG_OFF, NULL, "attention needs no mask"),
    NOTED("num-dataset-builder-threads", INT, "1", "one thread is enough"),
#undef GROUP
#define GROUP "tokenizer"
    I_CHOICE("tokenizer-type", NULL, MB_TOKENIZER_CHOICES, tokenizer_type, "None: GPT2BPETokenizer"),
#define TOKENIZER_DEST_TEXT(f) NULL
#define TOKENIZER_DEST_INT(f) NULL
#define TOKENIZER_DEST_LIST(f) NULL
#define TOKENIZER_DEST_FLAG_OFF(f) #f
#define TOKENIZER_ROW(n, t, f, d, arg, h) I_DEST(n, TOKENIZER_DEST_##t(f), t, d, f, h),
    MB_TOKENIZER_FLAGS(TOKENIZER_ROW)
#undef TOKENIZER_ROW
#undef GROUP
#define GROUP "moe"
    REFUSED("num-experts", INT, NULL, "there are no experts"),
    REFUSED("expert-model-parallel-size", INT, "1", "there are no experts"),
#undef GROUP
#define GROUP "logging"
    I("log-interval", INT, "100", log_interval, "iterations between log lines"),
    I("log-throughput", FLAG, NULL, log_throughput, "log TFLOP/s"),
    I("log-params-norm", FLAG, NULL, log_params_norm, "log the norm of the weights"),
    I("log-num-zeros-in-grad", FLAG, NULL, log_num_zeros_in_grad, "log how many elements of the gradient are 0"),
    I("tensorboard-dir", TEXT, NULL, tensorboard_dir, "TensorBoard's events, written by the last rank"),
    I("tensorboard-log-interval", INT, "1", tensorboard_log_interval, "iterations between events"),
    I("tensorboard-queue-size", INT, "1000", tensorboard_queue_size, "so many events may wait before they are written; they wait until the end of an iteration at most"),
    I("log-timers-to-tensorboard", FLAG, NULL, log_timers_to_tensorboard, "iteration-time, and throughput with --log-throughput"),
    I_DEST("no-log-loss-scale-to-tensorboard", "log_loss_scale_to_tensorboard", FLAG_OFF, NULL, log_loss_scale_to_tensorboard, "no event of the loss scale"),
    I("log-validation-ppl-to-tensorboard", FLAG, NULL, log_validation_ppl_to_tensorboard, "perplexities, too"),
    I("log-memory-to-tensorboard", FLAG, NULL, log_memory_to_tensorboard, "bytes and blocks of device memory"),
    I("log-world-size-to-tensorboard", FLAG, NULL, log_world_size_to_tensorboard, "the number of ranks"),
    NOTED("log-progress", FLAG, NULL, "`mobula status` shows progress"),
    I_INT_CHOICE("timing-log-level", "0", "0|1|2", timing_log_level, "1 and 2: also forward-backward, all-grads-sync and optimizer, every --log-interval iterations"),
    I_CHOICE("timing-log-option", "minmax", "max|minmax|all", timing_log_option, "of a timer: the largest time of all ranks, the smallest and largest, or each"),
    NOTED("wandb-project", TEXT, NULL, "nothing is sent to Weights & Biases"),
    NOTED("wandb-exp-name", TEXT, NULL, "nothing is sent to Weights & Biases"),
    NOTED("wandb-save-dir", TEXT, NULL, "nothing is sent to Weights & Biases"),
#undef GROUP
#define GROUP "inference"
    I_CHOICE("cuda-graph-impl", "local", "none|local|transformer_engine|full_iteration", cuda_graph_impl, "on GPUs, local (Megatron-LM's default is none): what a pass of a kind does is captured once and run again, the same bits with less work for the host; the last two are not provided"),
    I("enable-cuda-graph", FLAG, NULL, enable_cuda_graph, "the older name of --cuda-graph-impl local"),
    REFUSED("external-cuda-graph", FLAG, NULL, "it is Transformer Engine's; --cuda-graph-impl local captures whole passes"),
    NOTED("cuda-graph-warmup-steps", INT, "3", "a pass of a kind is captured when it comes the second time"),
    NOTED("cuda-graph-scope", LIST, NULL, "whole passes are captured"),
#undef GROUP
#define GROUP "Transformer-Engine"
    I_DEST_CHOICE("fp8-format", "fp8", NULL, "e4m3|hybrid", fp8, "with --bf16, the layers' products in fp8: e4m3, with hybrid gradients in e5m2; GPUs from compute capability 8.9 on"),
    I("fp8-margin", INT, "0", fp8_margin, "with --fp8-format, scales are so many powers of two smaller"),
    NOTED_CHOICE("fp8-recipe", TEXT, "tensorwise", "delayed|tensorwise", "scales are those of the tensor as it is"),
    NOTED("fp8-interval", INT, "1", "scales are always those of the tensor as it is"),
    NOTED("fp8-amax-history-len", INT, "1", "scales are those of the tensor as it is, there is no history"),
    NOTED_CHOICE("fp8-amax-compute-algo", TEXT, "most_recent", "max|most_recent", "scales are those of the tensor as it is, there is no history"),
    REFUSED("no-fp8-wgrad", FLAG, NULL, "gradients of weights are formed in fp8, too"),
    NOTED("fp8-param-gather", FLAG, NULL, "weights are gathered in bf16"),
    I_CHOICE("transformer-impl", "transformer_engine", "local|transformer_engine", transformer_impl, "whose names --ckpt-format torch writes; there is one implementation"),
    NOTED("te-rng-tracker", FLAG, NULL, "there is no random state: dropout is a function of seed and iteration"),
#undef GROUP
#define GROUP "experimental"
    REFUSED("yaml-cfg", TEXT, NULL, "give the arguments on the command line"),
#undef GROUP
#define GROUP "mobula"
    I_CHOICE("model-preset", NULL, MB_ARG_PRESETS, model_preset, "shape of a published model; other arguments override it (not of Megatron-LM)"),
    I("keep-last-k", INT, NULL, keep_last_k, "remove older checkpoints in --save but the newest K; with --checkpoint-url only durable ones go (not of Megatron-LM)"),
    I_CHOICE("blend-sizes", NULL, "0.10|0.11", blend_sizes, "sizes of weighted blends as Megatron-LM core of that version, or the next ones, has them; None: those of the run that goes on, else 0.11 (not of Megatron-LM)"),
    I("eval-at-start", FLAG, NULL, eval_at_start, "evaluate once before the first iteration, too (not of Megatron-LM)"),
#undef GROUP
    COMPUTED("rank", rank),
    COMPUTED("world-size", world_size),
    COMPUTED("data-parallel-size", data_parallel_size),
    COMPUTED("padded-vocab-size", padded_vocab_size),
    COMPUTED("true-vocab-size", true_vocab_size),
    COMPUTED("consumed-train-samples", consumed_train_samples),
    COMPUTED("consumed-valid-samples", consumed_valid_samples),
    COMPUTED("skipped-train-samples", skipped_train_samples),
    COMPUTED("virtual-pipeline-model-parallel-size", virtual_pipeline_model_parallel_size),
};
/* clang-format on */

const size_t MB_ARG_N_ROWS = sizeof MB_ARG_ROWS / sizeof MB_ARG_ROWS[0];

const struct mb_arg_family MB_ARG_FAMILIES[] = {
    {"fp8-", "no other argument of FP8 is provided"},
    {"moe-", "there are no experts"},
    {"expert-", "there are no experts"},
    {"retro-", "Retro is not provided"},
    {"vision-", "vision models are not provided"},
    {"img-", "vision models are not provided"},
    {"dino-", "vision models are not provided"},
    {"bert-", "BERT is not provided"},
    {"ict-", "biencoders are not provided"},
    {"biencoder-", "biencoders are not provided"},
    {"mamba-", "Mamba is not provided"},
    {"hybrid-", "Mamba is not provided"},
    {"rl-", "reinforcement learning is not provided"},
    {"encoder-", "encoder-decoder models are not provided"},
    {"decoder-", "encoder-decoder models are not provided"},
    {"inference-", "inference is not provided"},
    {"rerun-", "there is no rerun machine"},
    {"tp-comm-", "MOBULA_TENSOR_STRIPS says whether sums over ranks run beside products"},
    {NULL, NULL},
};
