/*
 * Models between Hugging Face directories, checkpoints of ours and Megatron-LM's.
 *
 * Which way a conversion goes follows from what the source is, unless a target is named: ours can
 * become Megatron-LM's, and those others with another layout. A checkpoint that is made of Hugging
 * Face's or a release has the weights, and iteration 1: train from it with --pretrained-checkpoint,
 * or with --load and --finetune. One of Megatron-LM's keeps its iteration, counters and optimizer,
 * and so does one of ours on its way to Megatron-LM's: --load goes on from there. The target
 * appears under its name only when it is whole. Memory: two tensors at most. Blocking; any thread.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_HF_CONVERT_H
#define MOBULA_WORKER_CHECKPOINT_HF_CONVERT_H

#include "worker/checkpoint/hf/shape.h"
#include "worker/checkpoint/safetensors.h"

enum mb_model_kind { MB_MODEL_HUGGING_FACE, MB_MODEL_OURS, MB_MODEL_MEGATRON };

const char *mb_model_kind_name(enum mb_model_kind kind); /* "a checkpoint of ours" */

struct mb_model_facts {
    enum mb_model_kind kind, target; /* target: what it was converted into */
    int64_t iteration; /* MB_CHECKPOINT_RELEASE: of none; Hugging Face's have none either */
    int is_dist;       /* Megatron-LM's is of torch_dist, which has no ranks */
    uint64_t tensor_parallel_size, pipeline_parallel_size; /* of Megatron-LM's other files */
    struct mb_hf_shape shape; /* of or for Megatron-LM: its sizes alone */
    uint64_t n_parameters;    /* values of all tensors, rows that pad the vocabulary included */
    size_t n_tensors, n_files;
    uint64_t total_bytes;  /* of the tensors as they lie in the files */
    size_t n_without_sums; /* files whose bytes nothing could be compared with */
    int has_optimizer;     /* and what was made has it too */
    /* Of Megatron-LM's: steps of the optimizer that is there and read, else -1; why it is not read,
     * code 0: there is none. */
    int64_t optimizer_steps;
    struct mb_err optimizer_refused;
};

/* What dir is, with every tensor's name and shape checked, and with checks_bytes all bytes of its
 * weights that have checksums. iteration -1: the newest. */
int mb_model_inspect(const char *dir, int64_t iteration, int checks_bytes,
                     struct mb_model_facts *out, struct mb_err *err);

struct mb_convert_options {
    const char *source, *target; /* directories; target must not exist, or be empty */
    int64_t iteration;           /* of a checkpoint of ours; -1: the newest */
    int to;                      /* enum mb_model_kind; -1: what follows from the source */
    enum mb_st_dtype dtype;      /* F32, BF16 or F16, but of a checkpoint of ours, which has F32 */
    uint64_t max_file_bytes;     /* of a Hugging Face directory's files; 0: 5 GB */
    uint64_t vocab;              /* of a checkpoint of ours that does not say it; 0: what it says */
    uint64_t divisible_by;       /* pads the vocabulary of what is made; 0: 128 */
    /* For Megatron-LM; 0: 1. is_local: names of --transformer-impl local. */
    uint64_t tensor_parallel_size, pipeline_parallel_size;
    int is_local;
    int no_load_optim; /* leaves the optimizer behind: without it, one that is not read is an error
                        */
};

/* source: what was read. */
int mb_model_convert(const struct mb_convert_options *o, struct mb_model_facts *source,
                     struct mb_err *err);

#endif
