/*
 * A checkpoint as one of Megatron-LM's --ckpt-format torch: its weights, arguments and counters,
 * and its optimizer, if that was taken, split over the ranks of a tensor group and the stages of a
 * pipeline. Blocking; any thread.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_MEGATRON_SPLIT_H
#define MOBULA_WORKER_CHECKPOINT_MEGATRON_SPLIT_H

#include "worker/checkpoint/weights.h"

struct mb_splitter_options {
    uint64_t tp, pp;        /* ranks of a tensor group, stages */
    uint64_t n_chunks;      /* of the model that a stage has: interleaved stages; 0: one */
    uint64_t vocab;         /* tokens of the tokenizer, where arguments do not say it; 0: they do */
    uint64_t divisible_by;  /* pads the vocabulary, times tp; 0: what the arguments say, or 128 */
    enum mb_st_dtype dtype; /* F32, BF16 or F16 */
    int is_local;           /* names of --transformer-impl local, not of Transformer Engine */
    int is_the_runs; /* a run writes it: what its arguments say of ranks, and how its vocabulary is
                        padded, stays */
    /* All may be NULL. n bytes more were written: what fails ends the writing. */
    int (*wrote)(void *arg, uint64_t n_bytes, struct mb_err *err);
    /* A file is on disk. path: below the iteration's directory. */
    int (*finished)(void *arg, const char *path, uint64_t size_bytes, uint64_t crc64nvme,
                    struct mb_err *err);
    void *arg;
};

struct mb_splitter;

/*
 * What there will be. name is for texts; w and the state (its arguments say the model) are borrowed
 * until close. Every tensor's name and shape is checked: MB_ECORRUPT names one, MB_EINVAL what
 * cannot be split.
 */
int mb_splitter_create(const char *name, struct mb_weights *w, const struct mb_checkpoint_state *s,
                       const struct mb_splitter_options *o, struct mb_splitter **out,
                       struct mb_err *err);
void mb_splitter_close(struct mb_splitter *s); /* NULL is legal */

/* What writing would refuse of it, but for numbers that the dtype has no room for. */
int mb_splitter_check(struct mb_splitter *s, struct mb_err *err);

/* Of the target; the vocabulary may be padded otherwise than the source's. */
const struct mb_megatron_layout *mb_splitter_layout(const struct mb_splitter *s);
/* Into dir, which is there and has none: DIR/iter_0000020 (DIR/release of a release), the tracker
 * last. */
int mb_splitter_write(struct mb_splitter *s, const char *dir, struct mb_err *err);
/* The files of all ranks into iter_dir, whatever its name; no tracker. */
int mb_splitter_write_files(struct mb_splitter *s, const char *iter_dir, struct mb_err *err);

#endif
