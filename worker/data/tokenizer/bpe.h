/*
 * Byte-level byte pair encoding: tokens and ranked merges, whatever file they came from.
 * mb_bpe_encode is the bare algorithm on one piece; bytelevel.c puts splitter and cache in front of
 * it. Source: Sennrich et al. 2016; the order of merges is that of GPT-2's encoder.py and of
 * tiktoken. A bpe is immutable; any thread may use it with its own work memory.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_BPE_H
#define MOBULA_WORKER_DATA_TOKENIZER_BPE_H

#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/err.h"
#include "worker/data/tokenizer/tokenizer.h"

struct mb_bpe;

enum { MB_BPE_MAX_IDS = (1 << 20) - 1 };

/* Work memory of one thread; zero-initialise, end with mb_bpe_work_close(). It grows with the
 * longest piece seen and is given back above 4 MiB. */
struct mb_bpe_work {
    void *block;
    size_t size_bytes;
};

struct mb_bpe_token {
    const uint8_t *bytes;
    size_t n; /* > 0 but for a special one */
    int32_t id;
    int is_special; /* it can be decoded, but no text is encoded to it */
};

/* Ids of tokens; the product's text is that of left and right joined. The merge of the lowest rank
 * is done first, the leftmost of equals. Merges of equal rank must have the same product (tiktoken:
 * the rank is the product's). Of merges of an equal pair the last in the array counts. */
struct mb_bpe_merge {
    int32_t left;
    int32_t right;
    int32_t product;
    int32_t rank; /* >= 0 */
};

/* Borrowed, read by mb_bpe_create only. */
struct mb_bpe_model {
    const struct mb_bpe_token *tokens; /* each id once, each text once but for special ones */
    size_t n_tokens;
    const struct mb_bpe_merge *merges; /* any order */
    size_t n_merges;
    /* Ids from here on are symbols on the way that no text is encoded to: `unknown` stands for
     * them, and for a byte that is no token. */
    uint64_t vocab_size;
    int32_t eod;       /* -1: none */
    int32_t unknown;   /* 0 <= unknown < vocab_size */
    int ignore_merges; /* a piece that is a token is that token, whatever the merges say */
};

/* MB_ECORRUPT for tokens or merges that contradict the above, MB_EUNSUPPORTED for an id above
 * MB_BPE_MAX_IDS - 256; the text names the token or merge, the caller adds the file. */
int mb_bpe_create(const struct mb_bpe_model *m, struct mb_bpe **out, struct mb_err *err);
/* GPT-2's vocab.json and merges.txt; eod is <|endoftext|>. */
int mb_bpe_load(const char *vocab_file, const char *merge_file, struct mb_bpe **out,
                struct mb_err *err);
void mb_bpe_destroy(struct mb_bpe *b);

/* The merges of a tiktoken vocabulary, where only tokens are given and the id is the rank: each way
 * to cut a token into two tokens is a merge of its rank. *out is owned by the caller (mb_free). */
int mb_bpe_merges_of_ranks(const struct mb_bpe_token *tokens, size_t n, struct mb_bpe_merge **out,
                           size_t *n_out, struct mb_err *err);

uint64_t mb_bpe_vocab_size(const struct mb_bpe *b);
int32_t mb_bpe_eod(const struct mb_bpe *b);

struct mb_bpe_item {
    const uint8_t *piece; /* n > 0 bytes */
    int32_t *ids;         /* room for n of them */
    uint32_t n;
    uint32_t n_ids; /* written */
    int is_part;    /* of a piece: ignore_merges says nothing about it */
};

/* The ids of n pieces, in any order; many at a time are faster than one. MB_ENOMEM. */
int mb_bpe_encode_many(const struct mb_bpe *b, struct mb_bpe_work *work, struct mb_bpe_item *items,
                       size_t n);
/* Append the ids of one piece of n > 0 bytes, or of a part of one. */
int mb_bpe_encode(const struct mb_bpe *b, struct mb_bpe_work *work, const uint8_t *piece, size_t n,
                  int is_part, struct mb_ids *out);
/* Where pieces may be cut into parts (bpe_cuts.h); borrowed. */
struct mb_bpe_cuts;
const struct mb_bpe_cuts *mb_bpe_cuts(const struct mb_bpe *b);
/* 1 if a part may become other ids than a piece of the same bytes. */
int mb_bpe_ignores_merges(const struct mb_bpe *b);
void mb_bpe_work_close(struct mb_bpe_work *work);

/* The id of these bytes, -1 if they are no token. */
int32_t mb_bpe_find(const struct mb_bpe *b, const uint8_t *bytes, size_t n);

/* Append the bytes of one id; MB_EINVAL if there is none such. */
int mb_bpe_decode(const struct mb_bpe *b, int32_t id, struct mb_buf *out);

#endif
