/*
 * An iteration of Megatron-LM's as one model: of --ckpt-format torch the directory's files
 * mp_rank_TT[_PPP]/model_optim_rng.pt, one for each rank of a tensor group and each stage of a
 * pipeline, of torch_dist its chunks (dist.h), read as whole tensors in fp32. The optimizer,
 * generators and the scheduler are passed over. All files are opened and every tensor's name, shape
 * and kind of numbers is checked before open says yes. Blocking; one thread per object.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_MEGATRON_SHARDS_H
#define MOBULA_WORKER_CHECKPOINT_MEGATRON_SHARDS_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"
#include "worker/checkpoint/megatron/layout.h"
#include "worker/checkpoint/safetensors.h"

struct mb_shards;

/* 1: dir has an mp_rank_*, or a metadata.json. */
int mb_shards_are_in(const char *dir);

/* MB_ECORRUPT and MB_EUNSUPPORTED name the file, and the rank or tensor. */
int mb_shards_open(const char *dir, struct mb_shards **out, struct mb_err *err);
void mb_shards_close(struct mb_shards *s); /* NULL is legal */

const char *mb_shards_args(const struct mb_shards *s);  /* one JSON object, see mb_megatron_args */
int64_t mb_shards_iteration(const struct mb_shards *s); /* as the files say it; 0: they do not */
int64_t mb_shards_consumed(const struct mb_shards *s, int of_validation); /* samples; 0: not said */
int mb_shards_are_dist(
    const struct mb_shards *s); /* of torch_dist, and the layout is of one rank */
int mb_shards_has_optimizer(const struct mb_shards *s);
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
/* Reads all bytes of all tensors: MB_ECORRUPT if a checksum is another. */
int mb_shards_verify(const struct mb_shards *s, struct mb_err *err);

#endif
