/*
 * An iteration of Megatron-LM's as one model: of --ckpt-format torch the directory's files
 * mp_rank_TT[_PPP]/model_optim_rng.pt, one for each rank of a tensor group and each stage of a
 * pipeline, of torch_dist its chunks (dist.h), read as whole tensors in fp32. Generators are passed
 * over, the optimizer and its scheduler until they are asked for. All files are opened and every
 * tensor's name, shape and kind of numbers is checked before open says yes; descriptors are held of
 * a few at a time, however many ranks there were. Blocking; one thread per object.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_MEGATRON_SHARDS_H
#define MOBULA_WORKER_CHECKPOINT_MEGATRON_SHARDS_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"
#include "worker/checkpoint/megatron/layout.h"
#include "worker/checkpoint/megatron/torch_file.h"
#include "worker/checkpoint/safetensors.h"

struct mb_shards;

/* 1: dir has an mp_rank_*, or a metadata.json. */
int mb_shards_are_in(const char *dir);

/* MB_ECORRUPT and MB_EUNSUPPORTED name the file, and the rank or tensor. */
int mb_shards_open(const char *dir, struct mb_shards **out, struct mb_err *err);
void mb_shards_close(struct mb_shards *s); /* NULL is legal */

/* One JSON object, see mb_megatron_args; of a taken optimizer's scheduler what it says. */
const char *mb_shards_args(const struct mb_shards *s);
int64_t mb_shards_iteration(const struct mb_shards *s); /* as the files say it; 0: they do not */
int64_t mb_shards_consumed(const struct mb_shards *s, int of_validation); /* samples; 0: not said */
int mb_shards_are_dist(
    const struct mb_shards *s); /* of torch_dist, and the layout is of one rank */
int mb_shards_has_optimizer(const struct mb_shards *s); /* or one of its files has */
const struct mb_megatron_layout *mb_shards_layout(const struct mb_shards *s);
size_t mb_shards_n_files(const struct mb_shards *s);
uint64_t mb_shards_bytes(const struct mb_shards *s); /* of the model's tensors in the files */

/* The whole tensors, in the order of the model's flat buffers, as F32 whatever the files hold;
 * begin and end are bytes of fp32 in that order. */
size_t mb_shards_n_tensors(const struct mb_shards *s);
const struct mb_st_tensor *mb_shards_tensor(const struct mb_shards *s, size_t i);
const struct mb_st_tensor *mb_shards_find(const struct mb_shards *s, const char *name);
/* Elements [from, from + n) of a tensor of this object; the range is the caller's promise. */
int mb_shards_read(struct mb_shards *s, const struct mb_st_tensor *t, uint64_t from, size_t n,
                   float *out, struct mb_err *err);
/*
 * The optimizer: Adam's moments, the fp32 weights of a model in halves, steps, the scheduler. What
 * Megatron-LM's FP32Optimizer, Float16OptimizerWithFloat16Params and DistributedOptimizer save is
 * read; of torch_dist the last one's forms fully_reshardable, fully_sharded_model_space,
 * dp_reshardable and dp_zero_gather_scatter, of torch distrib_optim.pt beside the other file.
 */
enum mb_shards_state {
    MB_SHARDS_EXP_AVG,
    MB_SHARDS_EXP_AVG_SQ,
    MB_SHARDS_MASTER,
    MB_SHARDS_STATES
};

struct mb_shards_optimizer {
    int64_t steps;
    int64_t schedule_samples, warmup_samples, decay_samples;
    int has_grad_scaler; /* a dynamic one */
    double loss_scale;
    int64_t growth_tracker, hysteresis_tracker;
};

/* Finds and checks all of it, and of what lies in buffers whose it is, once, before what follows:
 * MB_EUNSUPPORTED names a form that is not read, MB_ECORRUPT the group, parameter or setting that
 * does not fit, or ranks that contradict each other, MB_ENOENT a file that is missing; MB_EIO and
 * others are what the disk says. After a failure weights are read as before. */
int mb_shards_take_optimizer(struct mb_shards *s, struct mb_err *err);
/* NULL: it was not taken. */
const struct mb_shards_optimizer *mb_shards_optimizer(const struct mb_shards *s);
/* As mb_shards_read(), of the optimizer's; a master of a weight that has none is the weight. */
int mb_shards_read_state(struct mb_shards *s, enum mb_shards_state which,
                         const struct mb_st_tensor *t, uint64_t from, size_t n, float *out,
                         struct mb_err *err);
/* Reads all bytes of the model's tensors, and of its optimizer's if that was taken: MB_ECORRUPT if
 * a checksum is another, or if fp32 weights of the distributed optimizer are not the model's,
 * element by element. watch: as of mb_torch_verify(), or NULL. */
int mb_shards_verify(struct mb_shards *s, const struct mb_torch_watch *watch, struct mb_err *err);

#endif
