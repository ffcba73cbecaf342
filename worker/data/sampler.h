/*
 * Which samples a data-parallel rank trains on next. Pure: counts in, sample numbers out.
 *
 *   single  samples in dataset order, once; rank r of each micro batch times DP takes its slice
 *   cyclic  every epoch a torch.randperm seeded by the epoch number, for ever; with data sharding
 *           each rank permutes its own contiguous bucket, without it all share one permutation
 *
 * The position is consumed_samples alone, over all ranks: a resumed run goes on exactly. (One quirk
 * is kept from the source: without sharding, ranks may find one more batch in an epoch's dropped
 * rest, so a run resumed exactly at the end of an epoch takes that batch from the next epoch
 * instead.) Source: Megatron-LM megatron/legacy/data/data_samplers.py.
 */
#ifndef MOBULA_WORKER_DATA_SAMPLER_H
#define MOBULA_WORKER_DATA_SAMPLER_H

#include <stdint.h>
#include "base/err.h"

enum mb_sampler_type { MB_SAMPLER_SINGLE, MB_SAMPLER_CYCLIC };

struct mb_sampler_options {
    enum mb_sampler_type type;
    int no_data_sharding;      /* cyclic only */
    uint64_t n_samples;        /* in the dataset */
    uint64_t consumed_samples; /* over all ranks, since the first iteration of training */
    uint32_t micro_batch_size;
    uint32_t dp_rank;
    uint32_t dp_size;
};

struct mb_sampler;

/* "single" or "cyclic"; MB_EINVAL names the choices. */
int mb_sampler_type_parse(const char *s, enum mb_sampler_type *out, struct mb_err *err);

int mb_sampler_create(const struct mb_sampler_options *o, struct mb_sampler **out,
                      struct mb_err *err);
void mb_sampler_destroy(struct mb_sampler *s);

/* The micro_batch_size sample numbers of this rank's next micro batch into out. `single` ends with
 * MB_ESTATE "no samples left to consume" when no whole micro batch times DP is left. */
int mb_sampler_next(struct mb_sampler *s, uint64_t *out, struct mb_err *err);

/* Samples over all ranks that the batches given so far have used up. */
uint64_t mb_sampler_consumed(const struct mb_sampler *s);

#endif
