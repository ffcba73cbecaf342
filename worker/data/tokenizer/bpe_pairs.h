/*
 * The table of merges: a pair of symbols to the rank of its merge. No two pairs share a slot, so
 * that one load answers, also with no. Internal to the BPE: bpe_make.c fills it, the encoders ask.
 *
 * Source: hash and displace (Belazzougui, Botelho, Dietzfelbinger 2009): pairs fall into small
 * buckets, and each bucket has a number that sends its pairs to slots nobody else has.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_BPE_PAIRS_H
#define MOBULA_WORKER_DATA_TOKENIZER_BPE_PAIRS_H

#include <stddef.h>
#include <stdint.h>

/* A slot is left symbol, right symbol, rank in 20 + 20 + 24 bits. */
enum { MB_BPE_SYMBOL_BITS = 20, MB_BPE_RANK_BITS = 24 };
#define MB_BPE_MAX_RANKS ((1u << MB_BPE_RANK_BITS) - 1)
#define MB_BPE_RANK_MASK ((uint64_t)MB_BPE_MAX_RANKS)
#define MB_BPE_NO_RANK   UINT32_MAX
#define MB_BPE_NO_PAIR   UINT64_MAX /* equal to none that is asked for */

struct mb_bpe_pairs {
    uint64_t *slots; /* [n_slots] */
    uint8_t *moves;  /* [1 << (64 - bucket_shift)], a number for each bucket; 3 more may be read */
    uint64_t n_slots;
    unsigned bucket_shift;
};

static inline uint64_t mb_bpe_pair(uint32_t left, uint32_t right)
{
    return (uint64_t)left << MB_BPE_SYMBOL_BITS | right;
}

#define MB_BPE_PAIR_MUL  0x9e3779b97f4a7c15u
#define MB_BPE_PAIR_MOVE 0xd6e8feb86659fd93u
#define MB_BPE_PAIR_MIX  0xc2b2ae3d27d4eb4fu

static inline uint64_t mb_bpe_pair_hash(uint64_t pair)
{
    return pair * MB_BPE_PAIR_MUL;
}

static inline size_t mb_bpe_pair_moved(uint64_t hash, uint8_t move, uint64_t n_slots)
{
    uint64_t moved = (hash ^ move * MB_BPE_PAIR_MOVE) * MB_BPE_PAIR_MIX;

    return (size_t)((moved >> 32) * n_slots >> 32);
}

/* Where a pair is if it is there at all. */
static inline size_t mb_bpe_pair_slot(const struct mb_bpe_pairs *t, uint64_t pair)
{
    uint64_t hash = mb_bpe_pair_hash(pair);

    return mb_bpe_pair_moved(hash, t->moves[hash >> t->bucket_shift], t->n_slots);
}

/* The rank of a pair, asked at its slot; MB_BPE_NO_RANK if it does not merge. */
static inline uint32_t mb_bpe_pair_rank_at(const struct mb_bpe_pairs *t, size_t slot, uint64_t pair)
{
    uint64_t entry = t->slots[slot];

    return entry >> MB_BPE_RANK_BITS == pair ? (uint32_t)(entry & MB_BPE_RANK_MASK)
                                             : MB_BPE_NO_RANK;
}

/* entries: as slots have them, in any order; of equal pairs the last counts.
 * MB_ENOMEM, MB_EUNSUPPORTED for pairs that find no slots: none such are known. */
int mb_bpe_pairs_make(struct mb_bpe_pairs *t, const uint64_t *entries, size_t n);
void mb_bpe_pairs_close(struct mb_bpe_pairs *t);

#endif
