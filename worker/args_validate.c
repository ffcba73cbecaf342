/*
 * Checks of arguments (args.h), in the order of Megatron-LM's validate_args().
 *
 *  1. Refused rows that ask for something else than their default; notes of noted ones.
 *  2. World size, batch sizes, data sources, what depends on each other.
 *  3. Iterations or samples, never both; schedule; required sizes; shapes.
 *  4. What derives from others is filled in.
 * Failure: the first check that does not hold, with Megatron's text where it has one.
 */
#include "worker/args_table.h"

#include <math.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"

static int invalid(struct mb_err *err, const char *text)
{
    return mb_err_set(err, MB_EINVAL, "%s", text);
}

static int none(int64_t v)
{
    return v == MB_ARGS_NONE;
}

/* ---- refusals and notes ---- */

int mb_arg_is_default(const struct mb_arg_row *row, const struct mb_args_raw *raw)
{
    if (!raw->given || row->type == MB_ARG_FLAG || row->type == MB_ARG_FLAG_OFF ||
        raw->n_values != 1 || row->def == NULL) {
        return !raw->given;
    }
    double a, b;
    if (row->type != MB_ARG_TEXT && mb_parse_double(raw->values[0], "", &a, NULL) == 0 &&
        mb_parse_double(row->def, "", &b, NULL) == 0) {
        return a == b;
    }
    return strcmp(raw->values[0], row->def) == 0;
}

static int refuse(struct mb_args *a, struct mb_err *err)
{
    for (size_t i = 0; i < MB_ARG_N_ROWS; i++) {
        const struct mb_arg_row *row = &MB_ARG_ROWS[i];
        if (row->use == MB_ARG_REFUSED && !mb_arg_is_default(row, &a->raw[i])) {
            const char *value = a->raw[i].n_values > 0 ? a->raw[i].values[0] : "";
            return mb_err_set(err, MB_EUNSUPPORTED, "--%s%s%s: not provided by this version; %s",
                              row->name, value[0] ? " " : "", value, row->text);
        }
        if (row->use == MB_ARG_NOTED && !mb_arg_is_default(row, &a->raw[i]) &&
            mb_buf_printf(&a->notes, "note: --%s has no effect: %s\n", row->name, row->text) != 0) {
            return mb_err_set(err, MB_ENOMEM, "out of memory for notes");
        }
    }
    return 0;
}

static int check_optimizer(const struct mb_args *a, struct mb_err *err)
{
    return strcmp(a->optimizer, "adam") == 0 || strcmp(a->optimizer, "sgd") == 0
               ? 0
               : mb_err_set(err, MB_EUNSUPPORTED,
                            "--optimizer %s: not provided by this version; use adam or sgd",
                            a->optimizer);
}

/* Whoever asks for another format may have a reader for it: how to serve it is told loudly. */
static int warn_of_format(struct mb_args *a, struct mb_err *err)
{
    int bad = 0;
    if (a->save != NULL && strcmp(a->ckpt_format, "torch_dist") == 0) {
        bad = mb_buf_printf(
            &a->notes,
            "WARNING: --ckpt-format torch_dist: checkpoints are saved to %s in safetensors format; "
            "--ckpt-format torch saves what Megatron-LM reads, and `mobula checkpoint convert --to "
            "megatron %s TARGET` makes it of them\n",
            a->save, a->save);
    } else if (a->save != NULL && strcmp(a->ckpt_format, "torch") == 0 &&
               a->use_distributed_optimizer && !a->no_save_optim) {
        bad = mb_buf_printf(
            &a->notes,
            "note: --ckpt-format torch: the optimizer is saved as one without "
            "--use-distributed-optimizer; Megatron-LM goes on from it without that argument, or "
            "with --no-load-optim\n");
    }
    return bad ? mb_err_set(err, MB_ENOMEM, "out of memory for notes") : 0;
}

/* Two that mean nothing without another, or with each other. */
static int check_checkpoint(struct mb_args *a, struct mb_err *err)
{
    if (a->override_opt_param_scheduler && a->use_checkpoint_opt_param_scheduler) {
        return invalid(err, "both override and use-checkpoint are set.");
    }
    if (a->use_mp_args_from_checkpoint_args && !a->use_checkpoint_args &&
        mb_buf_puts(&a->notes, "note: --use-mp-args-from-checkpoint-args has no effect without "
                               "--use-checkpoint-args\n") != 0) {
        return mb_err_set(err, MB_ENOMEM, "out of memory for notes");
    }
    if (!a->use_tokenizer_model_from_checkpoint_args && !a->use_checkpoint_args &&
        mb_buf_puts(&a->notes, "note: --no-use-tokenizer-model-from-checkpoint-args has no effect "
                               "without --use-checkpoint-args\n") != 0) {
        return mb_err_set(err, MB_ENOMEM, "out of memory for notes");
    }
    return warn_of_format(a, err);
}

/* Formats that are neither written nor read. */
static int check_format(const struct mb_args *a, struct mb_err *err)
{
    static const char *const OTHERS[] = {"zarr", "torch_dcp", "fsdp_dtensor"};
    for (size_t i = 0; i < sizeof OTHERS / sizeof OTHERS[0]; i++) {
        if (strcmp(a->ckpt_format, OTHERS[i]) == 0) {
            return mb_err_set(err, MB_EUNSUPPORTED,
                              "--ckpt-format %s: not provided by this version; use torch, or "
                              "torch_dist, which is read",
                              OTHERS[i]);
        }
    }
    return 0;
}

/* What Megatron-LM's files are not written of: said before training, and not at the first save. */
static int check_torch(const struct mb_args *a, struct mb_err *err)
{
    const char *what = NULL;
    if (a->save == NULL || strcmp(a->ckpt_format, "torch") != 0) {
        return 0;
    }
    if (!a->no_save_optim && strcmp(a->optimizer, "adam") != 0) {
        what = "--optimizer sgd without --no-save-optim";
    } else if (!a->no_save_optim && !isnan(a->decoupled_lr)) {
        what = "--decoupled-lr without --no-save-optim";
    }
    return what == NULL ? 0
                        : mb_err_set(err, MB_EUNSUPPORTED,
                                     "--ckpt-format torch: not written with %s; with "
                                     "--ckpt-format safetensors checkpoints are safetensors",
                                     what);
}

/* ---- sizes of the world and of batches ---- */

/* Products of two such counts fit 64 bits. */
static int too_large(struct mb_err *err, const char *name, int64_t value)
{
    return mb_err_set(err, MB_EINVAL, "%s is %lld: it must be at most %d", name, (long long)value,
                      INT32_MAX);
}

struct mb_batch_ramp mb_args_ramp(const struct mb_args *a)
{
    struct mb_batch_ramp r = {.full = a->global_batch_size};
    int64_t *const fields[] = {&r.start, &r.increment, &r.samples};
    for (size_t i = 0; i < a->rampup_batch_size.n; i++) {
        mb_parse_i64(a->rampup_batch_size.items[i], INT64_MIN + 1, INT64_MAX, "", fields[i], NULL);
    }
    return r;
}

static int check_ramp(const struct mb_args *a, struct mb_err *err)
{
    const struct mb_batch_ramp r = mb_args_ramp(a);
    if (a->rampup_batch_size.n == 0) {
        return 0;
    }
    if (r.start == 0 || r.increment > INT32_MAX || r.samples > INT64_MAX / 2) {
        return invalid(err, "rampup-batch-size: its numbers must be positive, and sane");
    }
    return mb_batch_ramp_check(&r, a->micro_batch_size, a->data_parallel_size, err);
}

static int check_batches(struct mb_args *a, struct mb_err *err)
{
    if (none(a->micro_batch_size)) {
        a->is_usage = 1;
        return invalid(err, "micro_batch_size argument is None");
    }
    if (a->micro_batch_size <= 0) {
        return invalid(err, "micro-batch-size must be positive");
    }
    if (a->micro_batch_size > INT32_MAX) {
        return too_large(err, "micro-batch-size", a->micro_batch_size);
    }
    int64_t slice = a->micro_batch_size * a->data_parallel_size;
    if (none(a->global_batch_size)) {
        a->global_batch_size = slice;
    }
    if (a->global_batch_size <= 0) {
        return invalid(err, "global-batch-size must be positive");
    }
    if (a->global_batch_size > INT32_MAX) {
        return too_large(err, "global-batch-size", a->global_batch_size);
    }
    if (a->global_batch_size % slice != 0) {
        return mb_err_set(err, MB_EINVAL,
                          "global batch size (%lld) is not divisible by micro batch size (%lld) "
                          "times data parallel size (%lld)",
                          (long long)a->global_batch_size, (long long)a->micro_batch_size,
                          (long long)a->data_parallel_size);
    }
    return check_ramp(a, err);
}

/* Before data parallelism, which is what is left of the world. */
static int check_world(struct mb_args *a, struct mb_err *err)
{
    const struct {
        int64_t value;
        const char *name;
    } sizes[] = {{a->tensor_model_parallel_size, "tensor-model-parallel-size"},
                 {a->pipeline_model_parallel_size, "pipeline-model-parallel-size"},
                 {a->context_parallel_size, "context-parallel-size"}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (sizes[i].value <= 0 || sizes[i].value > INT32_MAX) {
            return mb_err_set(err, MB_EINVAL, "%s is %lld: it must be from 1 to %d", sizes[i].name,
                              (long long)sizes[i].value, INT32_MAX);
        }
    }
    int64_t size = a->tensor_model_parallel_size * a->pipeline_model_parallel_size;
    if (__builtin_mul_overflow(size, a->context_parallel_size, &size)) {
        return invalid(err, "total_model_size is larger than any world");
    }
    if (a->world_size % size != 0) {
        return mb_err_set(err, MB_EINVAL,
                          "world size (%lld) is not divisible by total_model_size "
                          "(encoder_model_size=0 + decoder_model_size=%lld)",
                          (long long)a->world_size, (long long)size);
    }
    a->data_parallel_size = a->world_size / size;
    if (a->sequence_parallel && a->tensor_model_parallel_size == 1) {
        a->sequence_parallel = 0;
        if (mb_buf_puts(&a->notes, "note: --sequence-parallel has no effect: it means nothing "
                                   "without tensor parallelism\n") != 0) {
            return mb_err_set(err, MB_ENOMEM, "out of memory for notes");
        }
    }
    return 0;
}

/* Of a number of micro batches that some iteration has. */
static int check_rounds(const struct mb_args *a, int64_t batch, struct mb_err *err)
{
    const int64_t n = batch / (a->micro_batch_size * a->data_parallel_size);
    return n % a->pipeline_model_parallel_size == 0
               ? 0
               : mb_err_set(err, MB_EINVAL,
                            "number of microbatches (%lld) is not divisible by "
                            "pipeline-model-parallel-size (%lld) when using interleaved schedule",
                            (long long)n, (long long)a->pipeline_model_parallel_size);
}

/* The chunks of a stage; texts are Megatron-LM's. */
static int take_chunks(struct mb_args *a, struct mb_err *err)
{
    const int64_t of_stage = a->num_layers / a->pipeline_model_parallel_size;
    const int64_t layers = a->num_layers_per_virtual_pipeline_stage;
    int64_t n = a->num_virtual_stages_per_pipeline_rank;
    if (!none(layers) && !none(n)) {
        return invalid(err, "No more than one of the following arguments can be set at the same "
                            "time: --num-layers-per-virtual-pipeline-stage, "
                            "--num-virtual-stages-per-pipeline-rank");
    }
    if (!none(layers)) {
        if (layers <= 0 || of_stage % layers != 0) {
            return invalid(err, "number of layers per pipeline stage must be divisible number of "
                                "layers per virtual pipeline stage");
        }
        n = of_stage / layers;
    } else if (!none(n) && (n <= 0 || of_stage % n != 0)) {
        return invalid(err, "number of layers per pipeline stage must be divisible by "
                            "num-virtual-stages-per-pipeline-rank");
    }
    a->virtual_pipeline_model_parallel_size = none(n) || n == 1 ? MB_ARGS_NONE : n;
    return 0;
}

static int check_chunks(struct mb_args *a, struct mb_err *err)
{
    int rc = take_chunks(a, err);
    if (rc != 0 || none(a->virtual_pipeline_model_parallel_size)) {
        return rc;
    }
    if (a->pipeline_model_parallel_size == 1) {
        return invalid(err, "When interleaved schedule is used, pipeline-model-parallel size "
                            "should be greater than 1");
    }
    const struct mb_batch_ramp ramp = mb_args_ramp(a);
    rc = check_rounds(a, a->global_batch_size, err);
    if (rc == 0) { /* both are 0 without a ramp */
        rc = check_rounds(a, ramp.start, err);
    }
    return rc == 0 ? check_rounds(a, ramp.increment, err) : rc;
}

size_t mb_args_chunks(const struct mb_args *a)
{
    const int64_t n = a->virtual_pipeline_model_parallel_size;
    return none(n) ? 1 : (size_t)n;
}

/* What tensor, pipeline and context parallelism split. */
static int check_parts(const struct mb_args *a, struct mb_err *err)
{
    if (a->num_layers % a->pipeline_model_parallel_size != 0) {
        return invalid(err, "Number of layers should be divisible by the "
                            "pipeline-model-parallel size");
    }
    const long long size = a->tensor_model_parallel_size;
    const struct {
        int64_t value;
        const char *name;
    } heads[] = {{a->num_attention_heads, "num_attention_heads"},
                 {a->num_query_groups, "num_query_groups"}};
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) {
        if (heads[i].value % size != 0) {
            return mb_err_set(err, MB_EINVAL,
                              "%s (%lld) must be a multiple of tensor_model_parallel_size (%lld).",
                              heads[i].name, (long long)heads[i].value, size);
        }
    }
    if (a->ffn_hidden_size % size != 0) {
        return mb_err_set(err, MB_EINVAL, "ffn_hidden_size: %lld is not divisible by %lld",
                          (long long)a->ffn_hidden_size, size);
    }
    const long long contexts = a->context_parallel_size;
    if (contexts > 1 && a->seq_length % (2 * contexts) != 0) {
        return invalid(err, "seq-length should be a multiple of 2 * context-parallel-size if "
                            "context-parallel-size > 1.");
    }
    if (a->sequence_parallel && a->seq_length / contexts % size != 0) {
        return mb_err_set(err, MB_EINVAL,
                          "--sequence-parallel: seq_length: %lld is not divisible by %lld",
                          (long long)(a->seq_length / contexts), size);
    }
    return 0;
}

static int is_remote(const char *path)
{
    return path != NULL && (mb_starts_with(path, "s3://") || mb_starts_with(path, "gs://"));
}

static int list_is_remote(const struct mb_args_list *l)
{
    for (size_t i = 0; i < l->n; i++) {
        if (is_remote(l->items[i])) {
            return 1;
        }
    }
    return 0;
}

/* Agents have put a path in the place of each URL. A base model is read by rank 0 alone. */
static int check_remote(const struct mb_args *a, struct mb_err *err)
{
    if (is_remote(a->tensorboard_dir)) {
        return invalid(err, "--tensorboard-dir must be a directory of the last rank's node");
    }
    if (is_remote(a->data_cache_path)) {
        return invalid(err, "--data-cache-path must be a directory");
    }
    if (list_is_remote(&a->data_path) || list_is_remote(&a->train_data_path) ||
        list_is_remote(&a->valid_data_path) || list_is_remote(&a->test_data_path) ||
        is_remote(a->data_args_path) || is_remote(a->vocab_file) || is_remote(a->merge_file) ||
        is_remote(a->tokenizer_model) || is_remote(a->load) || is_remote(a->save) ||
        (a->rank == 0 && is_remote(a->pretrained_checkpoint))) {
        return invalid(err, "s3:// is fetched by a node's agent: start with `mobula train`");
    }
    return 0;
}

static int check_data(struct mb_args *a, struct mb_err *err)
{
    int per_split = a->train_data_path.n > 0 || a->valid_data_path.n > 0 || a->test_data_path.n > 0;
    int sources = (a->data_path.n > 0) + per_split + (a->mock_data != 0);
    if (sources > 1) {
        return invalid(err, "A single data source must be provided in training mode, else None");
    }
    if (sources == 0) {
        return invalid(err, "no data to train on: give --data-path PREFIX, or --mock-data");
    }
    if (a->dataloader_type == NULL && (a->dataloader_type = mb_strdup("single")) == NULL) {
        return mb_err_set(err, MB_ENOMEM, "out of memory for the arguments");
    }
    if (strcmp(a->dataloader_type, "external") == 0) {
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "--dataloader-type external: not provided by this version; use single "
                          "or cyclic");
    }
    if (a->mock_data && a->split != NULL) {
        /* Mock data is split evenly whatever is asked. */
        if (mb_buf_puts(&a->notes, "note: --split has no effect: mock data is split 1,1,1\n") !=
            0) {
            return mb_err_set(err, MB_ENOMEM, "out of memory for notes");
        }
        mb_free(a->split);
        a->split = NULL;
    }
    if (a->split == NULL && !per_split) {
        a->split = mb_strdup(a->mock_data ? "1,1,1" : "969, 30, 1");
        if (a->split == NULL ||
            (!a->mock_data &&
             mb_buf_puts(&a->notes, "WARNING: Please specify --split when using --data-path. Using "
                                    "legacy default value of \"969, 30, 1\"\n") != 0)) {
            return mb_err_set(err, MB_ENOMEM, "out of memory for the arguments");
        }
    }
    if (a->tokenizer_type == NULL && (a->tokenizer_type = mb_strdup("GPT2BPETokenizer")) == NULL) {
        return mb_err_set(err, MB_ENOMEM, "out of memory for the arguments");
    }
    return 0;
}

/* ---- iterations or samples ---- */

static int check_iterations(struct mb_args *a, struct mb_err *err)
{
    if (a->rampup_batch_size.n > 0) {
        return invalid(err, "expected no batch-size rampup for iteration-based training");
    }
    if (!none(a->train_samples)) {
        return mb_err_set(err, MB_EINVAL,
                          "expected iteration-based training: --train-iters and --train-samples "
                          "exclude each other");
    }
    if (a->train_iters < 0) {
        return invalid(err, "train-iters must not be negative");
    }
    if (!none(a->lr_decay_samples)) {
        return invalid(err, "expected iteration-based learning rate decay");
    }
    if (a->lr_warmup_samples != 0) {
        return invalid(err, "expected iteration-based learning rate warmup");
    }
    if (!none(a->lr_wsd_decay_samples)) {
        return invalid(err, "expected iteration-based learning rate WSD decay");
    }
    if (!isnan(a->lr_warmup_fraction) && a->lr_warmup_iters != 0) {
        return invalid(err, "can only specify one of lr-warmup-fraction and lr-warmup-iters");
    }
    return 0;
}

static int check_samples(struct mb_args *a, struct mb_err *err)
{
    if (a->train_samples <= 0) {
        return invalid(err, "train-samples must be positive");
    }
    if (!none(a->lr_decay_iters)) {
        return invalid(err, "expected sample-based learning rate decay");
    }
    if (a->lr_warmup_iters != 0) {
        return invalid(err, "expected sample-based learning rate warmup");
    }
    if (!none(a->lr_wsd_decay_iters)) {
        return invalid(err, "expected sample-based learning rate WSD decay");
    }
    if (!isnan(a->lr_warmup_fraction) && a->lr_warmup_samples != 0) {
        return invalid(err, "can only specify one of lr-warmup-fraction and lr-warmup-samples");
    }
    return 0;
}

/* Where GPUs share samples, matrix units take heads of 64 and 128 channels in bf16 and fp16. */
static int note_plain_attention(struct mb_args *a, struct mb_err *err)
{
    const int is_half = a->bf16 || a->fp16,
              is_known = a->kv_channels == 64 || a->kv_channels == 128;
    if (a->context_parallel_size == 1 || strcmp(a->distributed_backend, "nccl") != 0 ||
        (is_half && is_known)) {
        return 0;
    }
    return mb_buf_puts(&a->notes,
                       "note: --context-parallel-size on GPUs saves memory, not time, but for "
                       "heads of 64 or 128 channels in bf16 or fp16: attention is by plain kernels "
                       "(docs/training.md)\n") == 0
               ? 0
               : mb_err_set(err, MB_ENOMEM, "out of memory for notes");
}

/* ---- numbers ---- */

static int check_ranges(const struct mb_args *a, struct mb_err *err)
{
    const struct {
        double value, low, high; /* [low, high) */
        const char *name;
    } ranges[] = {
        {a->attention_dropout, 0, 1, "attention-dropout"},
        {a->hidden_dropout, 0, 1, "hidden-dropout"},
        {a->adam_beta1, 0, 1, "adam-beta1"},
        {a->adam_beta2, 0, 1, "adam-beta2"},
        {a->adam_eps, 1e-300, INFINITY, "adam-eps"},
        {a->sgd_momentum, 0, INFINITY, "sgd-momentum"},
        {a->norm_epsilon, 1e-300, INFINITY, "norm-epsilon"},
        {a->init_method_std, 0, INFINITY, "init-method-std"},
        {a->clip_grad, 0, INFINITY, "clip-grad"},
        {a->weight_decay, 0, INFINITY, "weight-decay"},
        {a->lr, 0, INFINITY, "lr"},
        {a->min_lr, 0, INFINITY, "min-lr"},
        {a->lr_warmup_init, 0, INFINITY, "lr-warmup-init"},
    };
    for (size_t i = 0; i < sizeof ranges / sizeof ranges[0]; i++) {
        if (!(ranges[i].value >= ranges[i].low && ranges[i].value < ranges[i].high)) {
            return mb_err_set(err, MB_EINVAL, "%s is %g: it must be at least %g and below %g",
                              ranges[i].name, ranges[i].value, ranges[i].low, ranges[i].high);
        }
    }
    if (a->min_lr > a->lr || a->lr_warmup_init > a->lr) {
        return invalid(err, "min-lr and lr-warmup-init must not exceed lr");
    }
    if (!isnan(a->decoupled_lr) && !(a->decoupled_lr >= 0 && a->decoupled_lr < INFINITY)) {
        return mb_err_set(err, MB_EINVAL, "decoupled-lr is %g: it must be at least 0",
                          a->decoupled_lr);
    }
    if (!isnan(a->decoupled_min_lr) &&
        !(a->decoupled_min_lr >= 0 && a->decoupled_min_lr <= a->decoupled_lr)) {
        return invalid(err, "decoupled-min-lr needs --decoupled-lr and must not exceed it");
    }
    if (a->seed <= 0 || a->seed > UINT32_MAX) {
        return mb_err_set(err, MB_EINVAL, "Seed (%lld) should be a positive integer.",
                          (long long)a->seed);
    }
    return 0;
}

static int check_positive(const struct mb_args *a, struct mb_err *err)
{
    const struct {
        int64_t value;
        const char *name;
        int optional;
        int64_t low;
    } counts[] = {
        {a->train_iters, "train-iters", 1, 0},
        {a->distributed_timeout_minutes, "distributed-timeout-minutes", 0, 1},
        {a->ddp_bucket_size, "ddp-bucket-size", 1, 1},
        {a->log_interval, "log-interval", 0, 1},
        {a->tensorboard_log_interval, "tensorboard-log-interval", 0, 1},
        {a->tensorboard_queue_size, "tensorboard-queue-size", 0, 1},
        {a->eval_iters, "eval-iters", 0, 0},
        {a->eval_interval, "eval-interval", 0, 1},
        {a->save_interval, "save-interval", 1, 1},
        {a->save_retain_interval, "save-retain-interval", 1, 1},
        {a->keep_last_k, "keep-last-k", 1, 1},
        {a->exit_interval, "exit-interval", 1, 1},
        {a->exit_duration_in_mins, "exit-duration-in-mins", 1, 0},
        {a->lr_warmup_iters, "lr-warmup-iters", 0, 0},
        {a->lr_warmup_samples, "lr-warmup-samples", 0, 0},
        {a->lr_decay_iters, "lr-decay-iters", 1, 1},
        {a->lr_decay_samples, "lr-decay-samples", 1, 1},
        {a->lr_wsd_decay_iters, "lr-wsd-decay-iters", 1, 0},
        {a->lr_wsd_decay_samples, "lr-wsd-decay-samples", 1, 0},
        {a->vocab_size, "vocab-size", 1, 1},
    };
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        if (counts[i].optional && none(counts[i].value)) {
            continue;
        }
        if (counts[i].value > INT32_MAX) {
            return too_large(err, counts[i].name, counts[i].value);
        }
        if (counts[i].value < counts[i].low) {
            return mb_err_set(err, MB_EINVAL, "%s is %lld: it must be at least %lld",
                              counts[i].name, (long long)counts[i].value, (long long)counts[i].low);
        }
    }
    return 0;
}

static int check_weight_decay(struct mb_args *a, struct mb_err *err)
{
    if (strcmp(a->weight_decay_incr_style, "constant") == 0) {
        if (!isnan(a->start_weight_decay) || !isnan(a->end_weight_decay)) {
            return invalid(err, "start-weight-decay and end-weight-decay need "
                                "--weight-decay-incr-style linear or cosine");
        }
        a->start_weight_decay = a->end_weight_decay = a->weight_decay;
        return 0;
    }
    if (isnan(a->start_weight_decay) || isnan(a->end_weight_decay)) {
        return invalid(err, "--weight-decay-incr-style needs --start-weight-decay and "
                            "--end-weight-decay");
    }
    return 0;
}

static int check_length(struct mb_args *a, struct mb_err *err)
{
    int rc = 0;
    if (!none(a->train_iters)) {
        rc = check_iterations(a, err);
    } else if (!none(a->train_samples)) {
        rc = check_samples(a, err);
    } else {
        return invalid(err, "either train-iters or train-samples should be provided.");
    }
    if (rc == 0 && !isnan(a->lr_warmup_fraction) &&
        !(a->lr_warmup_fraction >= 0 && a->lr_warmup_fraction <= 1)) {
        rc = invalid(err, "lr-warmup-fraction must be from 0 to 1");
    }
    return rc;
}

int mb_args_validate(struct mb_args *a, uint32_t rank, uint32_t world_size, struct mb_err *err)
{
    a->rank = rank;
    a->world_size = a->data_parallel_size = world_size;
    a->padded_vocab_size = a->true_vocab_size = MB_ARGS_NONE; /* until there is a tokenizer */
    int rc = check_format(a, err);
    if (rc == 0) {
        rc = check_optimizer(a, err);
    }
    if (rc == 0) {
        rc = check_torch(a, err);
    }
    if (rc == 0) {
        rc = refuse(a, err);
    }
    if (rc == 0) {
        rc = check_checkpoint(a, err);
    }
    if (rc == 0) {
        rc = mb_args_check_precision(a, err);
    }
    if (rc == 0) {
        rc = check_world(a, err);
    }
    if (rc == 0) {
        rc = check_batches(a, err);
    }
    if (rc == 0 && a->overlap_param_gather && !a->use_distributed_optimizer) {
        rc = invalid(err, "--overlap-param-gather only supported with distributed optimizer");
    }
    if (rc == 0 && a->overlap_param_gather && !a->overlap_grad_reduce) {
        rc = invalid(err, "Must use --overlap-param-gather with --overlap-grad-reduce");
    }
    if (rc == 0 && a->overlap_param_gather &&
        mb_buf_puts(&a->notes, "note: --overlap-param-gather has no effect: weights are gathered "
                               "after the update, before the next forward pass\n") != 0) {
        rc = mb_err_set(err, MB_ENOMEM, "out of memory for notes");
    }
    if (rc == 0) {
        rc = check_remote(a, err);
    }
    if (rc == 0) {
        rc = check_data(a, err);
    }
    if (rc == 0) {
        rc = check_length(a, err);
    }
    if (rc == 0) {
        rc = mb_args_check_required(a, err);
    }
    if (rc == 0) {
        rc = mb_args_check_shape(a, err);
    }
    if (rc == 0) {
        rc = note_plain_attention(a, err);
    }
    if (rc == 0) {
        rc = check_parts(a, err);
    }
    if (rc == 0) {
        rc = check_chunks(a, err);
    }
    if (rc == 0) {
        rc = mb_args_check_use(a, err);
    }
    if (rc == 0 && isnan(a->lr)) {
        a->is_usage = 1;
        rc = invalid(err, "lr argument is None");
    }
    if (rc == 0 && a->save != NULL && none(a->save_interval)) {
        rc = invalid(err, "--save needs --save-interval");
    }
    if (rc == 0 && a->async_save && a->save == NULL &&
        mb_buf_puts(&a->notes, "note: --async-save has no effect: there is no --save\n") != 0) {
        rc = mb_err_set(err, MB_ENOMEM, "out of memory for notes");
    }
    if (rc == 0) {
        rc = check_ranges(a, err);
    }
    if (rc == 0) {
        rc = check_positive(a, err);
    }
    if (rc == 0) {
        rc = check_weight_decay(a, err);
    }
    if (rc == 0 && none(a->train_iters)) {
        /* Megatron drops the samples that do not fill a batch. */
        const struct mb_batch_ramp ramp = mb_args_ramp(a);
        a->train_iters = mb_batch_ramp_iterations(&ramp, a->train_samples);
        if (a->train_iters == 0) {
            rc = invalid(err, "train-samples is less than one global batch");
        }
    }
    return rc;
}
