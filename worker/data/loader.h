/*
 * What the trainer calls: from Megatron-LM's data arguments to micro batches.
 *
 * mb_data_open() opens the data, mb_loaders_build() makes the loaders of train, valid and test; a
 * split for which zero samples are asked has none (out[] NULL). Every rank builds the same indices
 * from the same arguments and data: nothing is exchanged. mb_loader_next() fills one micro batch of
 * this rank. Threads: one thread per loader at a time; loaders of one build may run on different
 * threads, but are built and destroyed by one.
 */
#ifndef MOBULA_WORKER_DATA_LOADER_H
#define MOBULA_WORKER_DATA_LOADER_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"
#include "worker/data/dataset.h"
#include "worker/data/sampler.h"

/* --data-path items: prefixes, or weight prefix weight prefix .... */
struct mb_data_paths {
    const char *const *items;
    size_t n_items;
};

/* How long a weighted blend of N samples, and its parts, are made; the share of a part of weight w
 * is ceil(N * w) (Megatron-LM's _get_size_per_split_per_dataset). */
enum mb_blend_sizes {
    MB_BLEND_SIZES_0_11, /* core 0.11 on: the sum of shares; parts have ceil(share * 1.005) */
    MB_BLEND_SIZES_0_10  /* core up to 0.10: ceil(N * w * 1.005) of each part, and their sum */
};

/* "0.10" or "0.11". */
enum mb_blend_sizes mb_blend_sizes_of(const char *text);

struct mb_data_options {
    struct mb_data_paths data_path; /* --data-path; or per split, then --split does not apply: */
    struct mb_data_paths split_path[MB_N_SPLITS]; /* --train-, --valid-, --test-data-path */
    enum mb_blend_sizes blend_sizes;
    const char *split; /* --split; NULL: "969, 30, 1". Mock forces "1,1,1". */
    int mock;          /* --mock-data, exclusive with paths */
    uint64_t seq_length;
    uint32_t seed;
    uint64_t n_samples[MB_N_SPLITS]; /* asked for, over all ranks; mb_data_sizes() computes them */
    uint64_t consumed_samples[MB_N_SPLITS];
    uint32_t micro_batch_size;
    uint32_t dp_rank;
    uint32_t dp_size;
    enum mb_sampler_type dataloader_type;
    int no_data_sharding;
    int eod_mask_loss;                  /* loss mask 0 where the input token is eod */
    int reset_position_ids;             /* positions start again after an eod */
    const struct mb_index_cache *cache; /* --data-cache-path; NULL: indices stay in memory */
    const struct mb_data_watch *watch;  /* NULL: nobody wants to know */
    uint64_t vocab_size; /* unpadded; every id read is checked against it; 0: unchecked */
    int32_t eod;         /* -1: the tokenizer has none */
};

/* Whether they are weights with prefixes of which more than one, or a part of a split, is drawn. */
int mb_data_paths_are_weighted(const struct mb_data_paths *paths, int of_one_split);

/* Sizes as Megatron-LM asks for them. train_samples > 0 stands for train_iters. */
struct mb_data_schedule {
    uint64_t train_iters;
    uint64_t train_samples;
    uint64_t global_batch_size;
    uint64_t eval_interval;
    uint64_t eval_iters;
};
/* train = iters * gbs (or samples); valid = (iters / eval_interval + 1) * eval_iters * gbs;
 * test = eval_iters * gbs. MB_EINVAL on overflow or eval_interval 0 with eval_iters > 0. */
int mb_data_sizes(const struct mb_data_schedule *s, uint64_t out[MB_N_SPLITS], struct mb_err *err);

/* What the arguments name: prefixes, in their order; of --train-data-path and so on those of the
 * splits that samples are asked of. */
struct mb_data_sources;

int mb_data_open(const struct mb_data_options *o, struct mb_data_sources **out, struct mb_err *err);
size_t mb_data_n_indices(const struct mb_data_sources *s);                 /* 0: mock data */
struct mb_index *mb_data_index(const struct mb_data_sources *s, size_t i); /* borrowed */
void mb_data_close(struct mb_data_sources *s); /* NULL is legal; loaders keep what they need */

struct mb_loader;

/* The options are those that the data was opened with. */
int mb_loaders_build(const struct mb_data_options *o, const struct mb_data_sources *s,
                     struct mb_loader *out[MB_N_SPLITS], struct mb_err *err);
/* Writes indices that the cache did not have. */
int mb_loaders_store(struct mb_loader *const loaders[MB_N_SPLITS],
                     const struct mb_index_cache *cache, struct mb_err *err);
void mb_loader_destroy(struct mb_loader *l); /* NULL is legal */

/* Of all loaders' indices: ranks with the same one read the same samples. */
uint64_t mb_loaders_digest(struct mb_loader *const loaders[MB_N_SPLITS]);

/* One micro batch, row-major [micro_batch_size, seq_length]: tokens and labels (the next token),
 * loss_mask 1 or 0, position_ids. Any pointer may be NULL. */
int mb_loader_next(struct mb_loader *l, int32_t *tokens, int32_t *labels, float *loss_mask,
                   int32_t *position_ids, struct mb_err *err);

/* The next micro batch is again the first one since the loader was built. */
int mb_loader_rewind(struct mb_loader *l, struct mb_err *err);

uint64_t mb_loader_n_samples(const struct mb_loader *l); /* in the dataset */
uint64_t mb_loader_consumed(const struct mb_loader *l);  /* over all ranks, this loader's */
/* The sample numbers of the last micro batch, micro_batch_size of them, borrowed; for tests. */
const uint64_t *mb_loader_last_samples(const struct mb_loader *l);
const struct mb_dataset *mb_loader_dataset(const struct mb_loader *l); /* borrowed */

#endif
