/* The loaded vocabulary, shared by bpe.c (uses it) and bpe_load.c (makes it). Nobody else includes
 * this. */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_BPE_PRIVATE_H
#define MOBULA_WORKER_DATA_TOKENIZER_BPE_PRIVATE_H

#include "worker/data/tokenizer/bpe.h"

/* A slot of the pair table is left symbol, right symbol, rank in 20 + 20 + 24 bits. */
enum { MB_BPE_SYMBOL_BITS = 20, MB_BPE_RANK_BITS = 24 };
#define MB_BPE_MAX_SYMBOLS ((1u << MB_BPE_SYMBOL_BITS) - 1) /* the last value marks no entry */
#define MB_BPE_MAX_RANKS   (1u << MB_BPE_RANK_BITS)
#define MB_BPE_RANK_MASK   ((uint64_t)MB_BPE_MAX_RANKS - 1)
#define MB_BPE_NO_ENTRY    UINT64_MAX

struct mb_bpe_text {
    uint32_t start; /* in text */
    uint32_t length;
};

struct mb_bpe {
    uint32_t byte_symbols[256];
    uint64_t *pairs; /* open addressing, at most half full */
    size_t pair_mask;
    unsigned pair_shift;
    uint32_t *products;  /* symbol made by the merge of a rank */
    int32_t *symbol_ids; /* id of a symbol; 0 for one the vocabulary does not list */
    struct mb_bpe_text *id_text;
    struct mb_buf text; /* the bytes of all ids */
    uint64_t vocab_size;
    int32_t eod;
};

static inline uint64_t mb_bpe_pair(uint32_t left, uint32_t right)
{
    return (uint64_t)left << MB_BPE_SYMBOL_BITS | right;
}

static inline size_t mb_bpe_slot(const struct mb_bpe *b, uint64_t pair)
{
    return (size_t)(pair * 0x9e3779b97f4a7c15u >> b->pair_shift);
}

#endif
