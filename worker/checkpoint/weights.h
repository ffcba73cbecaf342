/*
 * The weights of one iteration, whole tensors in fp32, whoever wrote them: a checkpoint of ours, or
 * one of Megatron-LM's (megatron/shards.h), or nobody yet. Blocking; one thread per object.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_WEIGHTS_H
#define MOBULA_WORKER_CHECKPOINT_WEIGHTS_H

#include "worker/checkpoint/common.h"
#include "worker/checkpoint/megatron/shards.h"
#include "worker/checkpoint/safetensors.h"

/* Of a run of ours, among the arguments that Megatron-LM's files have of it. */
#define MB_WEIGHTS_SKIPPED "mobula_skipped_iterations"

/* What a tensor has. */
enum mb_weights_kind { MB_WEIGHTS_EXP_AVG, MB_WEIGHTS_EXP_AVG_SQ, MB_WEIGHTS_WEIGHT };

/* A checkpoint that is not on disk yet. Borrowed. */
struct mb_weights_source {
    const struct mb_st_tensor *tensors; /* F32, one behind the other */
    size_t n;
    /* Elements [from, from + n) of a tensor, by its number. */
    int (*read)(void *arg, enum mb_weights_kind what, size_t tensor, uint64_t from, size_t n,
                float *out, struct mb_err *err);
    void *arg;
};

/* One of the three. */
struct mb_weights {
    struct mb_st_reader *ours;
    struct mb_shards *megatron;
    const struct mb_weights_source *source;
    int has_optimizer;          /* it was taken */
    struct mb_moments *moments; /* then, of ours */
};

/* DIR/iter_0000010, or DIR/release, owned by the caller; NULL: out of memory. */
char *mb_weights_dir(const char *dir, int64_t iteration);
/* 1: the directory of an iteration is Megatron-LM's, and not ours. */
int mb_weights_are_megatrons(const char *iter_dir);
/* *out is to be closed in either case. */
int mb_weights_open(const char *iter_dir, struct mb_weights *out, struct mb_err *err);
void mb_weights_close(struct mb_weights *w);

size_t mb_weights_n(const struct mb_weights *w);
const struct mb_st_tensor *mb_weights_tensor(const struct mb_weights *w, size_t i);
const struct mb_st_tensor *mb_weights_find(const struct mb_weights *w, const char *name);
/*
 * The optimizer too, from now on: errors as of mb_shards_take_optimizer(); MB_ENOENT: files of ours
 * are missing. Weights are the optimizer's fp32 ones then, where the model
 * has halves.
 */
int mb_weights_take_optimizer(struct mb_weights *w, const char *iter_dir,
                              const struct mb_checkpoint_state *s, struct mb_err *err);
/* Elements [from, from + n) of exp_avg (0) or exp_avg_sq (1) of a tensor of this object. */
int mb_weights_read_moment(struct mb_weights *w, int which, const struct mb_st_tensor *t,
                           uint64_t from, size_t n, float *out, struct mb_err *err);
/* Elements [from, from + n) of an F32 tensor of this object. */
int mb_weights_read(struct mb_weights *w, const struct mb_st_tensor *t, uint64_t from, size_t n,
                    float *out, struct mb_err *err);

/*
 * A checkpoint of weights alone below dir, which is there: write makes the file of tensors (F32, in
 * the order of the model's flat buffers), then state.json and the tracker follow.
 */
int mb_weights_write(const char *dir, struct mb_st_tensor *tensors, size_t n,
                     const struct mb_checkpoint_state *state,
                     int (*write)(void *arg, const char *path, struct mb_st_tensor *tensors,
                                  size_t n, struct mb_err *err),
                     void *arg, struct mb_err *err);

/* What state.json would say, of Megatron-LM's: counters and arguments; and what its optimizer says,
 * or why that is not read. iteration: the directory's, MB_CHECKPOINT_RELEASE included, which has
 * none. */
int mb_weights_state(struct mb_shards *s, const char *iter_dir, int64_t iteration,
                     struct mb_checkpoint_state *out, struct mb_err *err);

#endif
