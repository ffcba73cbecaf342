/*
 * What pieces became: a cache of fixed size, one thread's own. A piece is found under its exact
 * bytes, so that a hit cannot be false. Three tables by the length of the piece: tiny ones, ASCII
 * of up to 7 bytes, which most pieces of most texts are, lie four to a cache line, so that the
 * frequent ones stay near the processor; short ones of up to 15 bytes two to a line; longer ones,
 * up to 31 bytes, and shorter ones of many ids have a table of their own. What is longer, and what
 * has more ids than fit, is not kept.
 *
 * A piece that is found goes to the first place of its line; a new one takes an empty place, else
 * the last: so pieces seen once never drive out one that is seen often. A probe is prepared before
 * it is asked, so that the memory of many is on its way at a time. 12 MiB a thread.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_PIECE_CACHE_H
#define MOBULA_WORKER_DATA_TOKENIZER_PIECE_CACHE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    MB_PIECE_TINY_BYTES = 7,
    MB_PIECE_SHORT_BYTES = 15,
    MB_PIECE_LONG_BYTES = 31,
    MB_PIECE_TINY_IDS = 3, /* wide */
    MB_PIECE_TINY_NARROW_IDS = 4,
    MB_PIECE_SHORT_IDS = 6, /* wide */
    MB_PIECE_SHORT_NARROW_IDS = 8,
    MB_PIECE_LONG_IDS = 15, /* narrow; wide: 12 */
    MB_PIECE_LONG_WIDE_IDS = 12,
    MB_PIECE_ID_BITS = 21,         /* wide: three to a word, whose last bit tells the count */
    MB_PIECE_TINY_BITS = 15,       /* lines */
    MB_PIECE_SHORT_BITS = 17,      /* lines */
    MB_PIECE_LONG_BYTES_BITS = 21, /* size of the long table */
    MB_PIECE_LONG_SHIFT = 6,       /* log of the bytes of an entry of it */
    MB_PIECE_LINE_WORDS = 8
};

struct mb_piece_cache {
    /* Of short and of tiny pieces. A line is 64 bytes: two entries of two words of key and two of
     * ids, or four of one and one. The last byte of a key is the length, in four bits, whether it
     * is a part, and in three bits how many more ids than one; 0: empty. */
    uint64_t *lines[2];
    unsigned shifts[2]; /* of a hash, to the number of a line */
    uint8_t *longs;     /* four words of key, then the ids */
    uint8_t *tags;      /* of each entry of longs, some of its hash; 0: empty */
    int is_narrow;
    void *block;
};

struct mb_piece_probe {
    const uint8_t *piece;
    uint64_t key[4]; /* two words for a piece of up to 15 bytes, until mb_piece_ask_long */
    uint64_t *line;  /* of such a piece */
    uint32_t n;
    uint32_t long_slot; /* of a long one, or after mb_piece_ask_long */
    uint8_t is_tiny;
    uint8_t is_part;
};

int mb_piece_cache_init(struct mb_piece_cache *c); /* MB_ENOMEM */
/* For ids below 65536. */
int mb_piece_cache_init_narrow(struct mb_piece_cache *c);
void mb_piece_cache_close(struct mb_piece_cache *c);
/* Keep what the piece of a probe that found nothing, in any table, became. */
void mb_piece_cache_add(struct mb_piece_cache *c, const struct mb_piece_probe *q,
                        const int32_t *ids, size_t n);

/* For n < 16: all ones in the lowest n bytes of two words. */
extern const uint64_t mb_piece_masks[16][2];

#define MB_PIECE_COUNT_MASK (7ull << 61)

static inline uint64_t mb_piece_hash(uint64_t a, uint64_t b)
{
    unsigned __int128 product =
        (unsigned __int128)(a ^ 0x9e3779b97f4a7c15u) * (b ^ 0xd6e8feb86659fd93u);

    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t mb_piece_long_hash(const uint64_t key[4])
{
    return mb_piece_hash(key[0] ^ key[2] * 0x9e3779b97f4a7c15u,
                         key[1] ^ key[3] * 0xc2b2ae3d27d4eb4fu);
}

static inline uint32_t mb_piece_long_slot(uint64_t hash)
{
    return (uint32_t)(hash >> (64 - MB_PIECE_LONG_BYTES_BITS + MB_PIECE_LONG_SHIFT));
}

static inline uint8_t mb_piece_long_tag(uint64_t hash)
{
    return (uint8_t)(hash | 1);
}

/* n is up to MB_PIECE_LONG_BYTES; 32 bytes may be read at p. A part is never found as a piece of
 * the same bytes, nor the other way round. */
static inline void mb_piece_prepare_as(const struct mb_piece_cache *c, struct mb_piece_probe *q,
                                       const uint8_t *p, size_t n, int is_part)
{
    uint64_t words[4];

    q->piece = p;
    q->n = (uint32_t)n;
    q->is_part = (uint8_t)is_part;
    if (n <= MB_PIECE_SHORT_BYTES) {
        uint64_t length = (uint64_t)n << 56 | (uint64_t)is_part << 60;
        uint64_t is_tiny;

        memcpy(words, p, 16);
        words[0] &= mb_piece_masks[n][0];
        is_tiny = (n <= MB_PIECE_TINY_BYTES) & ((words[0] & 0x8080808080808080u) == 0);
        /* Without branches: which kind comes next is hard to foresee. */
        q->key[0] = words[0] | (length & (0 - is_tiny));
        q->key[1] = ((words[1] & mb_piece_masks[n][1]) | length) & (is_tiny - 1);
        q->is_tiny = (uint8_t)is_tiny;
        q->line = c->lines[is_tiny] +
                  (mb_piece_hash(q->key[0], q->key[1]) >> c->shifts[is_tiny]) * MB_PIECE_LINE_WORDS;
        __builtin_prefetch(q->line);
        return;
    }
    memcpy(words, p, 32);
    q->key[0] = words[0];
    q->key[1] = words[1];
    q->key[2] = words[2] & mb_piece_masks[n - 16][0];
    q->key[3] =
        (words[3] & mb_piece_masks[n - 16][1]) | (uint64_t)n << 56 | (uint64_t)is_part << 63;
    q->is_tiny = 0;
    q->long_slot = mb_piece_long_slot(mb_piece_long_hash(q->key));
    __builtin_prefetch(c->longs + ((size_t)q->long_slot << MB_PIECE_LONG_SHIFT));
}

static inline void mb_piece_prepare(const struct mb_piece_cache *c, struct mb_piece_probe *q,
                                    const uint8_t *p, size_t n)
{
    mb_piece_prepare_as(c, q, p, n, 0);
}

/* How many ids a piece may have to be kept in a line. */
static inline uint32_t mb_piece_line_ids(const struct mb_piece_cache *c, uint32_t is_tiny)
{
    if (c->is_narrow)
        return is_tiny ? MB_PIECE_TINY_NARROW_IDS : MB_PIECE_SHORT_NARROW_IDS;
    return is_tiny ? MB_PIECE_TINY_IDS : MB_PIECE_SHORT_IDS;
}

/* For a piece that mb_piece_find_short does not find: 1 if the long table may have it, whose memory
 * is then asked for. Wide, it hardly ever has it, and the tag says so. */
static inline int mb_piece_ask_long(const struct mb_piece_cache *c, struct mb_piece_probe *q)
{
    uint64_t hash;

    /* A piece has no more ids than bytes. */
    if (q->n <= mb_piece_line_ids(c, q->is_tiny))
        return 0;
    q->key[2] = 0;
    q->key[3] = 0;
    hash = mb_piece_long_hash(q->key);
    q->long_slot = mb_piece_long_slot(hash);
    if (!c->is_narrow && c->tags[q->long_slot] != mb_piece_long_tag(hash))
        return 0;
    __builtin_prefetch(c->longs + ((size_t)q->long_slot << MB_PIECE_LONG_SHIFT));
    return 1;
}

/* Whether the first entry of the line is the piece's. */
static inline int mb_piece_is_first(const struct mb_piece_probe *q)
{
    uint64_t tiny = 0 - (uint64_t)q->is_tiny;

    return (((q->line[0] ^ q->key[0]) & ~(tiny & MB_PIECE_COUNT_MASK)) |
            ((q->line[1] ^ q->key[1]) & ~(tiny | MB_PIECE_COUNT_MASK))) == 0;
}

/* Makes the entry of the piece the first of its line; 0 if there is none. */
int mb_piece_find_behind(const struct mb_piece_probe *q);

/* Three ids to out, and what is behind them. */
static inline void mb_piece_unpack(uint64_t ids, int32_t *out)
{
    const uint64_t mask = (1u << MB_PIECE_ID_BITS) - 1;

    out[0] = (int32_t)(ids & mask);
    out[1] = (int32_t)(ids >> MB_PIECE_ID_BITS & mask);
    out[2] = (int32_t)(ids >> 2 * MB_PIECE_ID_BITS & mask);
}

/* As mb_piece_find_short, where is_narrow is known to be what the cache's is. */
static inline __attribute__((always_inline)) size_t
mb_piece_find_short_as(const struct mb_piece_probe *q, int32_t *out, int is_narrow)
{
    typedef uint16_t narrow_ids __attribute__((vector_size(16)));
    typedef int32_t wide_ids __attribute__((vector_size(32)));
    size_t behind_key = 2 - (size_t)q->is_tiny;
    size_t count;

    if (__builtin_expect(!mb_piece_is_first(q), 0) && !mb_piece_find_behind(q))
        return 0;
    count = (q->line[behind_key - 1] >> 61) + 1;
    if (is_narrow) {
        narrow_ids ids;
        wide_ids wide;

        memcpy(&ids, q->line + behind_key, sizeof(ids));
        wide = __builtin_convertvector(ids, wide_ids);
        memcpy(out, &wide, sizeof(wide));
    } else {
        mb_piece_unpack(q->line[behind_key], out);
        if (__builtin_expect(count > 3, 0))
            mb_piece_unpack(q->line[behind_key + 1], out + 3);
    }
    return count;
}

/* Writes the ids to out, where there is room for MB_PIECE_LONG_IDS, and returns how many they are;
 * 0: not found. For a piece of up to MB_PIECE_SHORT_BYTES. */
static inline size_t mb_piece_find_short(const struct mb_piece_cache *c,
                                         const struct mb_piece_probe *q, int32_t *out)
{
    return mb_piece_find_short_as(q, out, c->is_narrow);
}

/* The same in the long table, for a long piece or after mb_piece_ask_long. */
size_t mb_piece_find_long(const struct mb_piece_cache *c, const struct mb_piece_probe *q,
                          int32_t *out);

#endif
