/*
 * What Megatron-LM calls a data set in its index cache: the description, JSON text with an indent
 * of 4, whose MD5 begins the names of its files. Pure; any thread.
 *
 * The description tells apart everything that decides the order, and the tokenizer. Sources, of
 * core 0.16.1: megatron/core/datasets/{megatron_dataset,blended_dataset}.py (keys and their order),
 * tokenizers/text/{text_tokenizer,utils/build_tokenizer}.py (the tokenizer's), Python's json.dumps
 * (texts in ASCII, floats as repr() prints them).
 */
#ifndef MOBULA_WORKER_DATA_CACHE_NAMES_H
#define MOBULA_WORKER_DATA_CACHE_NAMES_H

#include "base/buf.h"
#include "worker/data/dataset.h"
#include "worker/data/tokenizer/tokenizer.h"

enum { MB_CACHE_IDENTITY_MAX = 9, MB_CACHE_BASE_MAX = 80 };

/* Of a tokenizer: texts by key, in order. */
struct mb_cache_identity {
    size_t n;
    const char *keys[MB_CACHE_IDENTITY_MAX];
    char *values[MB_CACHE_IDENTITY_MAX]; /* owned; NULL: null */
};

/* Of the tokenizer that Megatron-LM builds from the same arguments; its flags that mobula has not
 * are at their defaults. MB_ENOMEM, or MB_EUNSUPPORTED for a type without one. */
int mb_cache_identity_make(const struct mb_tokenizer_options *o, struct mb_cache_identity *out,
                           struct mb_err *err);
void mb_cache_identity_close(struct mb_cache_identity *x);

/* One split of one prefix; all borrowed. */
struct mb_cache_key {
    const char *prefix; /* as given; NULL: mock data */
    int64_t n_samples;  /* asked for; < 0: None */
    enum mb_split split;
    uint32_t seed;
    uint64_t seq_length;
    const char *split_text;               /* --split; NULL: the prefix is of one split alone */
    const struct mb_split_matrix *matrix; /* of split_text */
    const struct mb_cache_identity *tokenizer;
};

int mb_cache_describe(const struct mb_cache_key *key, struct mb_buf *out);
/* Of a blend: its parts, their normalised weights, its size. */
int mb_cache_describe_blend(const struct mb_cache_key *parts, const double *weights, size_t n,
                            uint64_t size, struct mb_buf *out);

/* What the names of its files begin with: "MD5-GPTDataset-train". MB_EUNSUPPORTED: OpenSSL gives no
 * MD5 here. */
int mb_cache_base(const struct mb_buf *description, const char *class_name, enum mb_split split,
                  char out[MB_CACHE_BASE_MAX], struct mb_err *err);
/* "GPTDataset" or "MockGPTDataset" */
const char *mb_cache_class(const struct mb_cache_key *key);

#endif
