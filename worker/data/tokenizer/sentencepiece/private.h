/*
 * The tables of a loaded model, made by build.c, read by the encoders and the decoder.
 *
 * A symbol of the BPE encoder is a piece (its number is the id) or a character that only occurs
 * inside pieces (numbers from n_pieces on). With escape_whitespaces, which models have, the
 * encoders read ' ' for SentencePiece's U+2581; "canonical" texts below are in that form.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_SENTENCEPIECE_PRIVATE_H
#define MOBULA_WORKER_DATA_TOKENIZER_SENTENCEPIECE_PRIVATE_H

#include "worker/data/tokenizer/piece_cache.h"
#include "worker/data/tokenizer/sentencepiece/model.h"
#include "worker/data/tokenizer/sentencepiece/normalize.h"
#include "worker/data/tokenizer/sentencepiece/spm.h"
#include "worker/data/tokenizer/sentencepiece/utf8.h"

/* A slot of the pair table is left, right, product in 21 + 21 + 22 bits. */
enum { MB_SPM_SYMBOL_BITS = 21, MB_SPM_PRODUCT_BITS = 22, MB_SPM_PAGE_BITS = 8 };
#define MB_SPM_NO_SYMBOL ((1u << MB_SPM_SYMBOL_BITS) - 1) /* a character in no piece */
#define MB_SPM_NO_SLOT   UINT64_MAX
#define MB_SPM_NO_PRIO   UINT32_MAX
#define MB_SPM_NO_SPLIT  UINT64_MAX

struct mb_spm_set { /* of 64-bit numbers: open addressing, at most half full */
    uint64_t *slots;
    size_t mask;
    unsigned shift;
};

struct mb_spm {
    struct mb_buf file;
    struct mb_spm_model model;
    struct mb_spm_normalizer normalizer;
    struct mb_spm_normalizer denormalizer;
    int denormalizes;
    int32_t unk, bos, eos, pad;
    int32_t byte_ids[256];     /* with byte_fallback */
    struct mb_spm_set by_text; /* of piece numbers, by hash of their text */

    /* BPE and character models */
    int folds_space;      /* U+2581 reads as ' ' */
    int is_in_place;      /* normalising changes nothing but the dummy space in front */
    int has_unused;       /* some piece is only a step of merges */
    uint16_t *char_pages; /* [0x110000 >> MB_SPM_PAGE_BITS] index into char_symbols; 0: none */
    uint32_t *char_symbols;
    int32_t *symbol_ids; /* by symbol; unk for a character that is no piece */
    uint32_t *prios;     /* by symbol that is a product: less is earlier */
    uint32_t n_symbols;
    uint32_t *extra_chars; /* by symbol - n_pieces: the character that is no piece */
    struct mb_spm_set pairs;
    uint64_t joined_ascii[128][2]; /* bit b of row a: some piece has a directly before b */
    struct mb_spm_set joined;      /* the same for other characters: a << 21 | b */
    struct mb_spm_trie user;       /* user-defined pieces, canonical */

    /* unigram models */
    struct mb_spm_trie vocabulary; /* canonical texts to ids */
    float unk_score;
    float *scores; /* by id; a user-defined piece has one that makes it win */
};

/* Work memory of one thread; grows with the longest text. */
struct mb_spm_work {
    void *block;
    size_t size_bytes;
};
int mb_spm_work_reserve(struct mb_spm_work *work, size_t size_bytes);
void mb_spm_work_trim(struct mb_spm_work *work); /* gives back what is above 4 MiB */

struct mb_spm_scratch {
    struct mb_piece_cache cache; /* not of a unigram model */
    struct mb_spm_work work;
    struct mb_buf text; /* the normal form */
    uint64_t *splits;   /* has_unused: left << 32 | right, by product; else NULL */
};

/* build.c: everything but file and model, which stand. */
int mb_spm_build(struct mb_spm *m, struct mb_err *err);

/* bpe.c: append the ids of one part, n > 0 bytes; of the whole text if the model has_unused. */
int mb_spm_bpe_encode(const struct mb_spm *m, struct mb_spm_scratch *s, const uint8_t *p, size_t n,
                      struct mb_ids *out);
/* unigram.c: append the ids of a canonical text. */
int mb_spm_unigram_encode(const struct mb_spm *m, struct mb_spm_scratch *s, const uint8_t *p,
                          size_t n, struct mb_ids *out);

/* Append an unknown character: its bytes, or unk once for a run of them. */
int mb_spm_emit_unknown(const struct mb_spm *m, uint32_t c, int after_unknown, struct mb_ids *out);

/* sets */
int mb_spm_set_create(struct mb_spm_set *set, size_t n);
void mb_spm_set_close(struct mb_spm_set *set);

static inline size_t mb_spm_slot(const struct mb_spm_set *set, uint64_t key)
{
    return (size_t)(key * 0x9e3779b97f4a7c15u >> set->shift);
}

static inline int mb_spm_set_has(const struct mb_spm_set *set, uint64_t key)
{
    for (size_t i = mb_spm_slot(set, key);; i = (i + 1) & set->mask) {
        if (set->slots[i] == key)
            return 1;
        if (set->slots[i] == MB_SPM_NO_SLOT)
            return 0;
    }
}

/* The next character as the encoders see it. */
static inline uint32_t mb_spm_next_char(const struct mb_spm *m, const uint8_t **p,
                                        const uint8_t *end)
{
    size_t n;
    int is_valid;
    uint32_t c = mb_spm_utf8_decode(*p, end, &n, &is_valid);

    *p += n;
    return c == MB_SPM_SPACE && m->folds_space ? ' ' : c;
}

static inline uint32_t mb_spm_char_symbol(const struct mb_spm *m, uint32_t c)
{
    return m->char_symbols[(uint32_t)m->char_pages[c >> MB_SPM_PAGE_BITS] << MB_SPM_PAGE_BITS |
                           (c & ((1u << MB_SPM_PAGE_BITS) - 1))];
}

/* Whether some piece has a directly before b. */
static inline int mb_spm_are_joined(const struct mb_spm *m, uint32_t a, uint32_t b)
{
    if ((a | b) < 128)
        return (int)(m->joined_ascii[a][b >> 6] >> (b & 63) & 1);
    return mb_spm_set_has(&m->joined, (uint64_t)a << 21 | b);
}

#endif
