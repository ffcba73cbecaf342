/*
 * Megatron-LM's index cache, --data-cache-path: what data sets read indices from and write them to.
 *
 *   DIR/MD5-GPTDataset-SPLIT-{document,sample,shuffle}_index.npy, -description.txt
 *   DIR/MD5-BlendedDataset-SPLIT-{dataset,dataset_sample}_index.npy, -description.txt
 *
 * What is read counts only if it is an order that the plan of this very data set allows: each
 * sequence as often as there are epochs, samples that follow each other, a permutation of them. All
 * else is named in notes and built anew, in memory: nothing is written before the caller says so,
 * when ranks have compared what they have. One process writes; a file appears whole
 * (cache_files.h), the description, without which Megatron-LM looks at none of them, last. What
 * cannot be written is a note, too. Failures are of memory only. One thread.
 */
#ifndef MOBULA_WORKER_DATA_INDEX_CACHE_H
#define MOBULA_WORKER_DATA_INDEX_CACHE_H

#include "base/buf.h"
#include "worker/data/cache_names.h"
#include "worker/data/dataset.h"

struct mb_index_cache {
    const char *dir;
    const struct mb_cache_identity *tokenizer;
    int reads_nothing;                 /* everything is built */
    struct mb_buf *notes;              /* lines are added */
    const struct mb_data_watch *watch; /* NULL: nobody wants to know */
};

struct mb_dataset_plan; /* dataset_private.h */

/* Into d, whose options have a cache; *is_loaded 0: nothing was taken. */
int mb_index_cache_load(struct mb_dataset *d, const struct mb_dataset_plan *plan, int *is_loaded,
                        struct mb_err *err);
/* Of a blend: keys are its children's, weights normalised. Its arrays are there. */
int mb_index_cache_load_blend(struct mb_dataset *d, const struct mb_index_cache *cache,
                              const struct mb_cache_key *keys, const double *weights,
                              int *is_loaded, struct mb_err *err);
/* Writes what load did not find, of a blend also its children's; before the first file what killed
 * writers left there goes (*is_swept). */
int mb_index_cache_store(const struct mb_dataset *d, const struct mb_index_cache *cache,
                         int *is_swept, struct mb_err *err);

/* The key of a data set with these options. */
struct mb_cache_key mb_index_cache_key(const struct mb_dataset_options *o, struct mb_index *index);

#endif
