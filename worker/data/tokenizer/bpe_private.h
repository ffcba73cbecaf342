/* The vocabulary in the form that encoding wants; bpe_make.c makes it, bpe.c uses it. Nobody else
 * includes this but the loaders, for map and hash. */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_BPE_PRIVATE_H
#define MOBULA_WORKER_DATA_TOKENIZER_BPE_PRIVATE_H

#include <string.h>
#include "worker/data/tokenizer/bpe.h"
#include "worker/data/tokenizer/bpe_cuts.h"
#include "worker/data/tokenizer/bpe_letters.h"
#include "worker/data/tokenizer/bpe_pairs.h"

static inline uint64_t mb_bpe_load_word(const uint8_t *p, size_t n)
{
    uint64_t word = 0;

    memcpy(&word, p, n);
    return word;
}

/* Of n > 0 bytes. The last word overlaps the one before, so that no byte goes alone. */
static inline uint64_t mb_bpe_hash(const uint8_t *p, size_t n)
{
    uint64_t h = 0xcbf29ce484222325u ^ n;

    for (; n > 8; n -= 8, p += 8) {
        h = (h ^ mb_bpe_load_word(p, 8)) * 0x9e3779b97f4a7c15u;
        h ^= h >> 29;
        if (n < 16) {
            p -= 16 - n;
            n = 16;
        }
    }
    if (n == 8)
        h ^= mb_bpe_load_word(p, 8);
    else if (n >= 4)
        h ^= mb_bpe_load_word(p, 4) << 32 | mb_bpe_load_word(p + n - 4, 4);
    else
        h ^= (uint64_t)p[0] << 16 | (uint64_t)p[n / 2] << 8 | p[n - 1];
    h *= 0x9e3779b97f4a7c15u;
    h ^= h >> 32;
    h *= 0xd6e8feb86659fd93u;
    return h ^ h >> 32;
}

/* A token's text in the map. */
struct mb_bpe_map_slot {
    uint32_t id;  /* + 1; 0: empty */
    uint32_t tag; /* of the hash: what differs here needs no look at the text */
    uint32_t start;
    uint32_t n;
};

/* Token texts and a table that finds them by their bytes. */
struct mb_bpe_map {
    struct mb_buf text;
    uint32_t *starts;              /* [n_ids], UINT32_MAX: no such token */
    uint32_t *lengths;             /* [n_ids] */
    struct mb_bpe_map_slot *slots; /* open addressing, at most half full */
    uint32_t mask;
    uint64_t *hashes; /* a bit for some of the hash; what has none is no token */
    unsigned hash_shift;
    uint32_t n_ids;   /* one above the highest */
    uint32_t longest; /* text of a token that is not special */
};

/* Each id and each text may be there once, else MB_ECORRUPT. */
int mb_bpe_map_make(struct mb_bpe_map *map, const struct mb_bpe_token *tokens, size_t n,
                    struct mb_err *err);
void mb_bpe_map_close(struct mb_bpe_map *map);
/* The id of these bytes, -1 if they are no token. */
int32_t mb_bpe_map_find(const struct mb_bpe_map *map, const uint8_t *bytes, size_t n);

/* The same in steps, each of which asks for the memory of the next one: ask, then look and compare
 * until look says NONE or compare gives an id. */
struct mb_bpe_map_probe {
    const uint8_t *bytes;
    uint32_t n;
    uint32_t at;
    uint32_t tag;
    uint32_t may_be; /* 0: no token has such a hash */
};
enum mb_bpe_map_seen { MB_BPE_MAP_NONE, MB_BPE_MAP_MAYBE };
void mb_bpe_map_ask(const struct mb_bpe_map *map, const uint8_t *bytes, size_t n,
                    struct mb_bpe_map_probe *out);
enum mb_bpe_map_seen mb_bpe_map_look(const struct mb_bpe_map *map, struct mb_bpe_map_probe *probe);
/* After MAYBE. -1: another token; look on. */
int32_t mb_bpe_map_compare(const struct mb_bpe_map *map, struct mb_bpe_map_probe *probe);

/* Symbols are token ids; bytes that are no tokens have symbols after the highest id. */
struct mb_bpe {
    uint32_t byte_symbols[256];
    uint32_t *first; /* [left byte * 256 + right byte], rank of two bytes; MB_BPE_NO_RANK: none */
    struct mb_bpe_pairs pairs;
    struct mb_bpe_letters *letters;
    struct mb_bpe_cuts *cuts;
    /* Symbol made by the merge of a rank, ranks being dense; NULL where the product is the rank
     * shifted. */
    uint32_t *products;
    unsigned rank_shift;
    struct mb_bpe_map map;
    uint64_t vocab_size;
    int32_t eod;
    int32_t unknown;
    int ignore_merges;
};

/* The rank of a pair, MB_BPE_NO_RANK if it does not merge. */
static inline uint32_t mb_bpe_rank(const struct mb_bpe *b, uint32_t left, uint32_t right)
{
    uint64_t pair = mb_bpe_pair(left, right);

    return mb_bpe_pair_rank_at(&b->pairs, mb_bpe_pair_slot(&b->pairs, pair), pair);
}

static inline uint32_t mb_bpe_product(const struct mb_bpe *b, uint32_t rank)
{
    return b->products != NULL ? b->products[rank] : rank >> b->rank_shift;
}

static inline int32_t mb_bpe_id(const struct mb_bpe *b, uint32_t symbol)
{
    return symbol < b->vocab_size ? (int32_t)symbol : b->unknown;
}

/* Symbols of a piece that goes through the lanes. */
enum { MB_BPE_PLACES = 64 };
/* mb_bpe_encode_many in its two forms: with any processor, and with one that mb_bpe_has_wide. */
int mb_bpe_encode_lanes(const struct mb_bpe *b, struct mb_bpe_work *work, struct mb_bpe_item *items,
                        size_t n);
int mb_bpe_has_wide(void);
int mb_bpe_encode_wide(const struct mb_bpe *b, struct mb_bpe_work *work, struct mb_bpe_item *items,
                       size_t n);
/* A piece of any length, n log n. Merges only, whatever ignore_merges says. */
int mb_bpe_encode_long(const struct mb_bpe *b, struct mb_bpe_work *work, struct mb_bpe_item *item);

#endif
