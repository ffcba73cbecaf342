/*
 * GPT dataset: which tokens make up sample i. Pure decisions over an index (or mock documents):
 *
 *   split    sequences of one prefix are divided into train, valid, test by --split
 *   indices  document index, sample index, shuffle index of one split of one prefix
 *   blend    several prefixes are drawn from by weight
 *
 * Sources: Megatron-LM core 0.16.1 megatron/core/datasets/{gpt_dataset,blended_dataset,
 * blended_megatron_dataset_builder,megatron_dataset}.py and helpers.cpp. Sizes of weighted blends:
 * enum mb_blend_sizes (loader.h).
 * Threads: a built dataset is immutable and may be read by any thread.
 */
#ifndef MOBULA_WORKER_DATA_DATASET_H
#define MOBULA_WORKER_DATA_DATASET_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"
#include "worker/data/index.h"

enum mb_split { MB_SPLIT_TRAIN = 0, MB_SPLIT_VALID = 1, MB_SPLIT_TEST = 2, MB_N_SPLITS = 3 };

const char *mb_split_name(enum mb_split split); /* "train", "valid", "test" */

/* Where each split lies: [begin, end) as shares of all sequences; present 0 when its share is 0. */
struct mb_split_matrix {
    double begin[MB_N_SPLITS];
    double end[MB_N_SPLITS];
    int present[MB_N_SPLITS];
};

/* "969, 30, 1": numbers are picked out as [.0-9]+, missing ones are 0, the sum is made 1.
 * MB_EINVAL if there are more than three, none positive, or one that is no number. */
int mb_split_parse(const char *text, struct mb_split_matrix *out, struct mb_err *err);
/* The sequences of a split: int(round(share * n)) with halves to even, as Python rounds. */
void mb_split_range(const struct mb_split_matrix *m, enum mb_split split, uint64_t n_sequences,
                    uint64_t *begin, uint64_t *end);

struct mb_dataset;
struct mb_index_cache; /* index_cache.h */

/* Who wants to know what is going on, since it may take long: begins("reading", path). */
struct mb_data_watch {
    void (*begins)(void *arg, const char *verb, const char *path);
    void *arg;
};

struct mb_dataset_options {
    enum mb_split split;
    uint64_t seq_length; /* tokens a sample trains on; it reads one more */
    uint32_t seed;
    int64_t n_samples; /* asked for; < 0: one epoch */
    uint64_t
        vocab_size; /* ids are checked against it; 0: unchecked. Mock: ids are taken modulo it */
    int32_t eod;    /* mock documents end with it */
    uint64_t begin; /* sequences [begin, end) of the index are this split */
    uint64_t end;
    double share; /* of the split, for messages */
    /* The rest is borrowed until the data set is made. */
    const struct mb_index_cache *cache;   /* NULL: indices are built in memory */
    const char *split_text;               /* --split, for the cache; NULL: an own list of paths */
    const struct mb_split_matrix *matrix; /* of split_text */
};

/* One split of one prefix. index NULL: Megatron-LM's mock documents. An empty split is MB_EINVAL
 * with the flags to change. The dataset holds its own reference to the index. */
int mb_dataset_create(struct mb_index *index, const struct mb_dataset_options *o,
                      struct mb_dataset **out, struct mb_err *err);

/* A blend of n datasets (taken: destroyed with the blend; on failure they stay the caller's) over
 * size samples, drawn by weight. Weights are normalised here. keys: of the datasets, for the cache,
 * which may be NULL. */
struct mb_cache_key; /* cache_names.h */
int mb_dataset_blend(struct mb_dataset *const *datasets, const double *weights, size_t n,
                     uint64_t size, const struct mb_index_cache *cache,
                     const struct mb_cache_key *keys, struct mb_dataset **out, struct mb_err *err);

void mb_dataset_destroy(struct mb_dataset *d); /* NULL is legal */

/* Samples it can give; may exceed what was asked for. */
uint64_t mb_dataset_n_samples(const struct mb_dataset *d);

/* The seq_length + 1 ids of sample i < n_samples into out. */
int mb_dataset_get(const struct mb_dataset *d, uint64_t i, int32_t *out, struct mb_err *err);

enum { MB_MOCK_DOCUMENTS = 100000 };

/* Where a sample begins: a position in the document index and a token offset in that sequence. */
struct mb_sample_start {
    uint32_t position;
    uint32_t offset;
};

/* The indices as Megatron-LM would cache them, borrowed; for tests and for the dump tool. */
struct mb_dataset_indices {
    const int32_t *document_index;
    uint64_t n_documents;
    const struct mb_sample_start *sample_index; /* n_samples + 1 of them */
    uint64_t n_samples;
    const uint32_t *shuffle_index;
    uint64_t n_epochs;
    int separate_final_epoch;
    const int16_t *blend_dataset; /* a blend has only these two, and n_samples */
    const int64_t *blend_sample;
};
void mb_dataset_get_indices(const struct mb_dataset *d, struct mb_dataset_indices *out);

/* A checksum of all indices: two ranks whose data sets have the same one read the same samples. */
uint64_t mb_dataset_digest(const struct mb_dataset *d);

/* numpy.sum of doubles (pairwise), then each divided by it: what normalises weights and shares. */
void mb_normalize(const double *in, size_t n, double *out);

#endif
