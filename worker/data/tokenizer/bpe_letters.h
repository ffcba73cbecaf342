/*
 * Characters of two and three bytes that are sure to become one symbol, whatever stands around
 * them: encoding then begins with that symbol instead of its bytes. Internal to the BPE.
 *
 * Why that is right: alone, the bytes of such a character join by merges of ranks up to a limit.
 * Until they have, the next of these merges has at most that rank; so a merge of the character's
 * first symbol with what stands before it, or of its last with what stands behind, can only come
 * earlier if its rank is not above the limit. For each lead byte and byte before it, and for each
 * last byte and byte behind it, the lowest rank of such merges is known: above the limit, they come
 * too late. And no merge of the whole character may have a rank up to the limit: having the symbol
 * early would let it come early.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_BPE_LETTERS_H
#define MOBULA_WORKER_DATA_TOKENIZER_BPE_LETTERS_H

#include <stddef.h>
#include <stdint.h>

struct mb_bpe;
struct mb_bpe_model;

struct mb_bpe_letter {
    uint32_t symbol;
    uint32_t above; /* UINT32_MAX less the limit; 0: the bytes do not join */
};

struct mb_bpe_letters {
    struct mb_bpe_letter two[1 << 11];
    struct mb_bpe_letter three[1 << 16];
    /* [lead byte - 0xc0][byte before], [last byte - 0x80][byte behind]: UINT32_MAX less the lowest
     * rank; 0: none. */
    uint32_t before[64][256];
    uint32_t behind[64][256];
};

/* ranks: of the model's merges, as the pair table has them. MB_ENOMEM. */
int mb_bpe_letters_make(struct mb_bpe *b, const struct mb_bpe_model *m, const uint32_t *ranks);

/* The entry of a character whose lead byte, at p, says 2 or 3 bytes; NULL if they are not there. */
static inline const struct mb_bpe_letter *mb_bpe_letter_of(const struct mb_bpe_letters *l,
                                                           const uint8_t *p, const uint8_t *end)
{
    size_t n = p[0] < 0xe0 ? 2 : 3;

    if (p[0] < 0xc0 || p[0] >= 0xf0 || (size_t)(end - p) < n || (p[1] & 0xc0) != 0x80 ||
        (p[n - 1] & 0xc0) != 0x80)
        return NULL;
    return n == 2 ? &l->two[(p[0] & 31) << 6 | (p[1] & 63)]
                  : &l->three[(p[0] & 15) << 12 | (p[1] & 63) << 6 | (p[2] & 63)];
}

/* Asks for the memory that mb_bpe_letter_at needs. */
static inline void mb_bpe_letter_ask(const struct mb_bpe_letters *l, const uint8_t *p,
                                     const uint8_t *end)
{
    const struct mb_bpe_letter *c = mb_bpe_letter_of(l, p, end);

    if (c != NULL)
        __builtin_prefetch(c);
}

/* How many bytes at p, 2 or 3, are sure to become *symbol; 0: none. The piece is begin .. end. */
static inline size_t mb_bpe_letter_at(const struct mb_bpe_letters *l, const uint8_t *p,
                                      const uint8_t *begin, const uint8_t *end, uint32_t *symbol)
{
    const struct mb_bpe_letter *c = mb_bpe_letter_of(l, p, end);
    size_t n = p[0] < 0xe0 ? 2 : 3;

    if (c == NULL)
        return 0;
    if ((p > begin && l->before[p[0] - 0xc0][p[-1]] >= c->above) ||
        (end - p > (ptrdiff_t)n && l->behind[p[n - 1] - 0x80][p[n]] >= c->above) || c->above == 0)
        return 0;
    *symbol = c->symbol;
    return n;
}

#endif
