/*
 * Where a piece may be cut in two that become their ids apart from one another: between characters
 * of several bytes that no merge ever joins. A run of Chinese without a space is one piece that
 * hardly comes twice; its words do. Internal to the BPE and to bytelevel.c.
 *
 * Why that is right: what stands on both sides of a place stays apart unless a merge takes a symbol
 * that ends there and one that begins there. Such a symbol's last two bytes, and first two, are
 * those of the text, or it has but one. So it is enough to know of each merge the bytes that meet,
 * two and two; where a symbol has but one, each second one is noted.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_BPE_CUTS_H
#define MOBULA_WORKER_DATA_TOKENIZER_BPE_CUTS_H

#include <stddef.h>
#include <stdint.h>

enum { MB_BPE_CUT_BITS = 20 };

/* A bit for each hash of four bytes: set if something may join them in the middle. */
struct mb_bpe_cuts {
    uint64_t joined[(1 << MB_BPE_CUT_BITS) / 64];
};

static inline uint32_t mb_bpe_cut_hash(uint32_t bytes)
{
    return (bytes * 0x9e3779b1u) >> (32 - MB_BPE_CUT_BITS);
}

/* Notes that what ends with the n_left bytes may join what begins with the n_right bytes. */
void mb_bpe_cuts_join(struct mb_bpe_cuts *c, const uint8_t *left, size_t n_left,
                      const uint8_t *right, size_t n_right);

/* Two bytes before p and two from it on may be read. */
static inline int mb_bpe_is_cut(const struct mb_bpe_cuts *c, const uint8_t *p)
{
    uint32_t bytes = p[-2] | (uint32_t)p[-1] << 8 | (uint32_t)p[0] << 16 | (uint32_t)p[1] << 24;
    uint32_t hash = mb_bpe_cut_hash(bytes);

    /* High, continuation, lead, continuation. */
    return (bytes & 0xc0c0c080u) == 0x80c08080u && (c->joined[hash / 64] >> (hash % 64) & 1) == 0;
}

/* The first part of a piece: all of it if it is not to be cut. */
static inline size_t mb_bpe_first_part(const struct mb_bpe_cuts *c, const uint8_t *p, size_t n)
{
    for (size_t i = 2; i + 1 < n; i++) {
        if (p[i] >= 0xc0 && mb_bpe_is_cut(c, p + i))
            return i;
    }
    return n;
}

#endif
