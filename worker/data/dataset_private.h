/* What dataset.c, blend.c and index_cache.c share: the two forms of a data set. Nobody else
 * includes this. */
#ifndef MOBULA_WORKER_DATA_DATASET_PRIVATE_H
#define MOBULA_WORKER_DATA_DATASET_PRIVATE_H

#include "worker/data/dataset.h"

struct mb_dataset {
    struct mb_dataset_options o;
    uint64_t n_samples;

    /* one split of one prefix */
    struct mb_index *index; /* a reference; NULL: mock */
    int32_t *mock_lengths;
    int32_t *document_index;
    uint64_t n_documents;
    struct mb_sample_start *sample_index;
    uint32_t *shuffle_index;
    uint64_t n_epochs;
    int separate_final_epoch;

    /* a blend */
    struct mb_dataset **children; /* owned */
    size_t n_children;
    int16_t *blend_dataset;
    int64_t *blend_sample;

    /* What it is called in the cache that does not have it; base NULL: there is none, or it has. */
    char *cache_base;
    char *cache_description;
};

/* How many of what the indices of a split consist of. */
struct mb_dataset_plan {
    uint64_t epoch_tokens;
    uint64_t n_epochs;
    uint64_t n_samples;
    uint64_t n_first; /* samples shuffled before the separate final epoch; n_samples if none is */
    uint64_t n_sequences;
    uint64_t n_documents; /* n_epochs * n_sequences */
    uint64_t n_together;  /* documents shuffled before the separate final epoch */
};

uint64_t mb_dataset_length(const struct mb_dataset *d, int32_t sequence); /* tokens */
/* helpers.cpp build_sample_idx: from where a sample begins to where the next one does, at its last
 * token. The document index goes so far. */
void mb_dataset_next_start(const struct mb_dataset *d, struct mb_sample_start *at);

#endif
