/*
 * The parts of HuggingFaceTokenizer, in the order they are used: hf_vocab.c reads the model of a
 * tokenizer.json, hf_parts.c its pipeline, hf_tokens.c the added tokens and what the files beside
 * it say of special ones; type_hf.c puts them together and runs them. Source of the rules: the
 * packages tokenizers 0.22/0.23 and transformers 4.57 (AutoTokenizer). Nobody else includes this
 * but the tests of these files.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_HF_PRIVATE_H
#define MOBULA_WORKER_DATA_TOKENIZER_HF_PRIVATE_H

#include <jansson.h>
#include "worker/data/tokenizer/added_tokens.h"
#include "worker/data/tokenizer/bpe_private.h"
#include "worker/data/tokenizer/json_scan.h"
#include "worker/data/tokenizer/split.h"
#include "worker/data/tokenizer/split_regex.h"

enum { MB_HF_MAX_STAGES = 8, MB_HF_MAX_TEMPLATE = 64, MB_HF_MAX_ADDED = 1 << 14 };

/* ---- the model ---- */

struct mb_hf_vocab {
    struct mb_buf text;          /* of all tokens, as the file writes them */
    struct mb_buf bytes;         /* the same in bytes */
    struct mb_bpe_token *tokens; /* in bytes; special: it has characters that stand for no byte */
    size_t n_tokens;
    struct mb_bpe_map map; /* by the text of the file */
    struct mb_bpe_merge *merges;
    size_t n_merges;
    int32_t max_id;
    int ignore_merges;
};

/* The value of "model". MB_EUNSUPPORTED names what is not provided. Closed by the caller, also
 * after a failure. */
int mb_hf_vocab_read(struct mb_json_scan *s, struct mb_hf_vocab *v);
void mb_hf_vocab_close(struct mb_hf_vocab *v);

/* ---- the pipeline ---- */

enum mb_hf_behavior {
    MB_HF_REMOVED,
    MB_HF_ISOLATED,
    MB_HF_MERGED_WITH_PREVIOUS,
    MB_HF_MERGED_WITH_NEXT,
    MB_HF_CONTIGUOUS
};

struct mb_hf_stage {
    struct mb_split_regex *regex; /* owned; NULL: a family */
    struct mb_split *split;       /* owned; of the family, when it is not alone */
    enum mb_split_family family;
    enum mb_hf_behavior behavior;
    int invert;
};

struct mb_hf_parts {
    int nfc;
    int add_prefix_space;
    int outer_is_bytelevel; /* AutoTokenizer may change add_prefix_space only there */
    struct mb_hf_stage stages[MB_HF_MAX_STAGES];
    size_t n_stages;
    int32_t before[MB_HF_MAX_TEMPLATE]; /* ids the post-processor puts before the text */
    int32_t after[MB_HF_MAX_TEMPLATE];
    size_t n_before;
    size_t n_after;
    int has_template;
};

/* The values of "normalizer", "pre_tokenizer", "post_processor" and "decoder"; NULL is null. The
 * error names the component. */
int mb_hf_parts_read(const json_t *normalizer, const json_t *pre_tokenizer,
                     const json_t *post_processor, const json_t *decoder, struct mb_hf_parts *p,
                     struct mb_err *err);
void mb_hf_parts_close(struct mb_hf_parts *p);

/* The stages as a cutter (split.h); p must outlive it, its ctx is not destroyed with it. */
void mb_hf_parts_cutter(const struct mb_hf_parts *p, struct mb_split_custom *out);

/* ---- added and special tokens ---- */

struct mb_hf_added {
    struct mb_added_token *tokens; /* texts owned */
    size_t n;
    size_t cap;
    int32_t bos; /* -1: none */
    int32_t eos;
    uint64_t vocab_size; /* len() of the AutoTokenizer */
    int adds_bos;        /* the class of tokenizer_config.json sets the template: 0, 1; -1: it does
                            not */
    int adds_eos;
    int add_prefix_space; /* of tokenizer_config.json; -1: it may not change it */
};

/* added: the value of "added_tokens". */
int mb_hf_added_read(const json_t *added, const struct mb_hf_vocab *v, struct mb_hf_added *a,
                     struct mb_err *err);
/* tokenizer_config.json, special_tokens_map.json and config.json of the directory, where they are.
 */
int mb_hf_added_configure(const char *dir, const struct mb_hf_vocab *v, struct mb_hf_added *a,
                          struct mb_err *err);
void mb_hf_added_close(struct mb_hf_added *a);

/* A whole JSON file as a tree; *out NULL if there is none. */
int mb_hf_json_file(const char *dir, const char *name, json_t **out, struct mb_err *err);

#endif
