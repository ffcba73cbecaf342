/*
 * Models between Hugging Face directories and checkpoints of ours.
 *
 * Which way a conversion goes follows from what the source is. A checkpoint that is made has the
 * weights, no optimizer, and iteration 1: train from it with --pretrained-checkpoint, or with
 * --load and --finetune. The target appears under its name only when it is whole. Memory: two
 * tensors at most. Blocking; any thread.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_HF_CONVERT_H
#define MOBULA_WORKER_CHECKPOINT_HF_CONVERT_H

#include "worker/checkpoint/hf/shape.h"
#include "worker/checkpoint/safetensors.h"

struct mb_model_facts {
    int is_ours;       /* 1: a checkpoint of ours, 0: a Hugging Face directory */
    int64_t iteration; /* of ours */
    struct mb_hf_shape shape;
    uint64_t n_parameters; /* values of all tensors, rows that pad the vocabulary included */
    size_t n_tensors, n_files;
    uint64_t total_bytes; /* of the tensors as they lie in the files */
};

/* What dir is, with every tensor's name and shape checked. iteration -1: the newest. */
int mb_model_inspect(const char *dir, int64_t iteration, struct mb_model_facts *out,
                     struct mb_err *err);

struct mb_convert_options {
    const char *source, *target; /* directories; target must not exist, or be empty */
    int64_t iteration;           /* of a checkpoint of ours; -1: the newest */
    enum mb_st_dtype dtype;      /* of a Hugging Face directory: F32, BF16 or F16; ours has F32 */
    uint64_t max_file_bytes;     /* of a Hugging Face directory's files; 0: 5 GB */
    uint64_t vocab;              /* of a checkpoint of ours that does not say it; 0: what it says */
    uint64_t divisible_by;       /* pads the vocabulary of a checkpoint of ours; 0: 128 */
};

/* source: what was read. */
int mb_model_convert(const struct mb_convert_options *o, struct mb_model_facts *source,
                     struct mb_err *err);

#endif
