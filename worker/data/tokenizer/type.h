/*
 * A type of tokenizer: what stands behind tokenizer.h. A new type is a file with one table and a
 * row in tokenizer.c. `self` is what create made; it is immutable afterwards and shared by the
 * threads. The functions keep the promises of tokenizer.h; entries marked so may be NULL.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_TYPE_H
#define MOBULA_WORKER_DATA_TOKENIZER_TYPE_H

#include "worker/data/tokenizer/bytelevel.h"
#include "worker/data/tokenizer/tokenizer.h"

/* Where pieces of an encoded text may wait (bytelevel.h). */
struct mb_tokenizer_engine {
    const struct mb_bytelevel *b;
    struct mb_bytelevel_scratch *s;
};

struct mb_tokenizer_type {
    const char *name; /* as --tokenizer-type has it */
    int (*create)(const struct mb_tokenizer_options *o, void **self, struct mb_err *err);
    void (*destroy)(void *self); /* of what create made; never NULL */
    uint64_t (*vocab_size)(const void *self);
    int32_t (*eod)(const void *self);
    int32_t (*bos)(const void *self);         /* NULL: there is none */
    const char *(*family)(const void *self);  /* NULL: there is none */
    const char *(*pattern)(const void *self); /* NULL: there is none */
    size_t (*n_added)(const void *self);      /* NULL: there are none */
    void (*added)(const void *self, size_t i, struct mb_tokenizer_added *out);
    int (*scratch_create)(const void *self, void **scratch, struct mb_err *err); /* NULL: none */
    void (*scratch_destroy)(void *scratch);
    /* NULL: nothing waits. */
    struct mb_tokenizer_engine (*engine)(const void *self, void *scratch);
    /* What was appended before a failure is dropped by the caller, who also settles. */
    int (*encode)(const void *self, void *scratch, const uint8_t *text, size_t n,
                  struct mb_ids *out, struct mb_err *err);
    int (*decode)(const void *self, const int32_t *ids, size_t n, struct mb_buf *out,
                  struct mb_err *err);
};

extern const struct mb_tokenizer_type mb_tokenizer_gpt2;
extern const struct mb_tokenizer_type mb_tokenizer_hf;
extern const struct mb_tokenizer_type mb_tokenizer_tiktoken;
extern const struct mb_tokenizer_type mb_tokenizer_null;
extern const struct mb_tokenizer_type mb_tokenizer_llama2;
extern const struct mb_tokenizer_type mb_tokenizer_gpt_sentencepiece;
extern const struct mb_tokenizer_type mb_tokenizer_sentencepiece;

#endif
