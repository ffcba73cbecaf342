/* What dataset.c and blend.c share: the two forms of a data set. Nobody else includes this. */
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
};

#endif
