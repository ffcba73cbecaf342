/*
 * Many pieces at a time with AVX-512. What bpe_lanes.c does in stages is done here without
 * branches that depend on the piece: the ranks of eight pairs are asked for in one go, and the
 * symbols of a piece always lie side by side, so that the neighbours of a merge are where they are.
 *
 * 1. Where a piece that is a token is that token, the map is asked first, for some pieces at a
 * time. 2. A free lane takes a piece: its characters as symbols, then all ranks. Pieces of up to 16
 * bytes, which fit into one vector, go before the others, and of these the ones of ASCII, whose
 * ranks come from the table of two bytes. (Which longer ones fit is guessed by their characters;
 * those that do not are taken with the long ones.) Of any other piece the symbols are placed, and
 * the memory of the ranks is asked for, some pieces before it goes on. 3. A turn puts the two ranks
 * beside the last merge into their places, finds the lowest, the leftmost of equals, makes one
 * symbol of two and asks for the memory of the next two ranks; the turns of the other lanes give it
 * time to arrive. 4. When no rank is left the symbols are the ids. Pieces of more symbols than a
 * lane has places go through the heap of bpe.c. Only that can fail, without memory.
 */
#include "worker/data/tokenizer/bpe_private.h"
#if defined(__x86_64__)
#include <immintrin.h>

#define WIDE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,bmi,bmi2")))

enum { LANES = 16, PLACES = MB_BPE_PLACES, VECTOR = 16, AT_ONCE = 64, SOME = 512 };
/* How many pieces are placed before they go on, a power of two less one, and how many before that
 * the memory of a piece's characters is asked for. */
enum { AHEAD = 3, LETTERS_AHEAD = 3 };
/* Beside the ends of a piece: no symbol, so that no pair with it has a rank. */
#define NO_SYMBOL ((uint32_t)MB_BPE_MAX_IDS)

/* One piece on its way. The rank of a place is that of the pair that begins there; until a placed
 * piece goes on, the slot of that pair. Behind the last symbol come two vectors of NO_SYMBOL, and
 * of no rank. */
struct lane {
    uint32_t ranks[PLACES + 2 * VECTOR] __attribute__((aligned(64)));
    uint32_t line[1 + PLACES + 2 * VECTOR]; /* NO_SYMBOL, then the symbols */
    size_t n;
    uint64_t pairs[2]; /* of the new symbol and the next, and of the one before and it */
    size_t slots[2];
    uint64_t at; /* a bit for the place of the new symbol; 0: there was no merge yet */
    struct mb_bpe_item *item;
};

struct queue {
    const struct mb_bpe *b;
    struct mb_bpe_work *work;
    struct mb_bpe_item *const *ascii; /* of ASCII, and up to VECTOR bytes */
    struct mb_bpe_item *const *ascii_end;
    struct mb_bpe_item *const *next; /* the others */
    struct mb_bpe_item *const *end;
    struct mb_bpe_item **later; /* those of more symbols than max_symbols go there */
    size_t max_symbols;
    struct lane *placed[AHEAD + 1]; /* a ring */
    size_t first_placed, n_placed;
    int rc;
};

static inline uint32_t *symbols_of(struct lane *l)
{
    return l->line + 1;
}

/* The pairs that begin at s[0] .. s[7]. */
WIDE static inline __m512i pairs_at(const uint32_t *s)
{
    __m512i left = _mm512_cvtepu32_epi64(_mm256_loadu_si256((const void *)s));
    __m512i right = _mm512_cvtepu32_epi64(_mm256_loadu_si256((const void *)(s + 1)));

    return _mm512_or_si512(_mm512_slli_epi64(left, MB_BPE_SYMBOL_BITS), right);
}

WIDE static inline __m256i slots_of(const struct mb_bpe_pairs *t, __m512i pairs)
{
    __m512i hash = _mm512_mullo_epi64(pairs, _mm512_set1_epi64((long long)MB_BPE_PAIR_MUL));
    __m512i bucket = _mm512_srl_epi64(hash, _mm_cvtsi32_si128((int)t->bucket_shift));
    __m256i word = _mm512_i64gather_epi32(bucket, t->moves, 1);
    __m512i move = _mm512_cvtepu32_epi64(_mm256_and_si256(word, _mm256_set1_epi32(UINT8_MAX)));
    __m512i moved;

    move = _mm512_mullo_epi64(move, _mm512_set1_epi64((long long)MB_BPE_PAIR_MOVE));
    moved = _mm512_mullo_epi64(_mm512_xor_si512(hash, move),
                               _mm512_set1_epi64((long long)MB_BPE_PAIR_MIX));
    moved =
        _mm512_mul_epu32(_mm512_srli_epi64(moved, 32), _mm512_set1_epi64((long long)t->n_slots));
    return _mm512_cvtepi64_epi32(_mm512_srli_epi64(moved, 32));
}

WIDE static inline __m256i ranks_at(const struct mb_bpe_pairs *t, __m256i slots, __m512i pairs)
{
    __m512i entry = _mm512_i32gather_epi64(slots, t->slots, 8);
    __m512i rank = _mm512_and_si512(entry, _mm512_set1_epi64((long long)MB_BPE_RANK_MASK));

    rank = _mm512_mask_mov_epi64(
        _mm512_set1_epi64(-1),
        _mm512_cmpeq_epi64_mask(_mm512_srli_epi64(entry, MB_BPE_RANK_BITS), pairs), rank);
    return _mm512_cvtepi64_epi32(rank);
}

/* 0: more symbols than places. */
static inline size_t place_symbols(const struct mb_bpe *b, const struct mb_bpe_item *item,
                                   uint32_t *symbols)
{
    const uint8_t *p = item->piece;
    const uint8_t *end = p + item->n;
    size_t n = 0;

    while (p < end) {
        size_t length = 1;

        if (n == PLACES)
            return 0;
        symbols[n] = b->byte_symbols[*p];
        if (*p >= 0xc0) {
            length = mb_bpe_letter_at(b->letters, p, item->piece, end, &symbols[n]);
            length += length == 0;
        }
        p += length;
        n++;
    }
    return n;
}

static inline void begin(struct lane *l, struct mb_bpe_item *item)
{
    l->item = item;
    l->at = 0;
    l->pairs[0] = l->pairs[1] = MB_BPE_NO_PAIR;
    l->slots[0] = l->slots[1] = 0;
}

WIDE static inline int is_ascii(const struct mb_bpe_item *item)
{
    return _mm_movepi8_mask(_mm_maskz_loadu_epi8((__mmask16)((1u << item->n) - 1), item->piece)) ==
           0;
}

WIDE static inline void take_ascii(struct queue *q, struct lane *l)
{
    const __m512i none = _mm512_set1_epi32(-1);
    const __m512i no_symbol = _mm512_set1_epi32((int)NO_SYMBOL);
    __m128i bytes;
    __m512i left, right, pair;
    __mmask16 all;

    begin(l, *q->ascii++);
    l->n = l->item->n;
    all = (__mmask16)((1u << l->n) - 1);
    bytes = _mm_maskz_loadu_epi8(all, l->item->piece);
    left = _mm512_cvtepu8_epi32(bytes);
    right = _mm512_cvtepu8_epi32(_mm_srli_si128(bytes, 1));
    pair = _mm512_or_si512(_mm512_slli_epi32(left, 8), right);
    _mm512_storeu_si512(symbols_of(l),
                        _mm512_mask_i32gather_epi32(no_symbol, all, left, q->b->byte_symbols, 4));
    _mm512_storeu_si512(symbols_of(l) + VECTOR, no_symbol);
    _mm512_store_si512(l->ranks, _mm512_mask_i32gather_epi32(none, all >> 1, pair, q->b->first, 4));
}

/* Symbols, and the memory of their ranks is asked for, if they are up to max_symbols; 0: more. */
WIDE static inline int place(const struct mb_bpe *b, struct lane *l, size_t max_symbols)
{
    const __m512i no_symbol = _mm512_set1_epi32((int)NO_SYMBOL);
    uint32_t *symbols = symbols_of(l);
    size_t n = place_symbols(b, l->item, symbols);

    if (n == 0 || n > max_symbols)
        return 0;
    _mm512_storeu_si512(symbols + n, no_symbol);
    _mm512_storeu_si512(symbols + n + VECTOR, no_symbol);
    for (size_t i = 0; i + 1 < n; i += VECTOR / 2)
        _mm256_storeu_si256((void *)(l->ranks + i), slots_of(&b->pairs, pairs_at(symbols + i)));
    for (size_t i = 0; i + 1 < n; i++)
        __builtin_prefetch(&b->pairs.slots[l->ranks[i]]);
    l->n = n;
    return 1;
}

/* Slots to ranks. */
WIDE static inline void look(const struct mb_bpe *b, struct lane *l)
{
    const __m512i none = _mm512_set1_epi32(-1);

    for (size_t i = 0; i + 1 < l->n; i += VECTOR / 2) {
        __m256i slots = _mm256_loadu_si256((void *)(l->ranks + i));

        _mm256_storeu_si256((void *)(l->ranks + i),
                            ranks_at(&b->pairs, slots, pairs_at(symbols_of(l) + i)));
    }
    _mm512_storeu_si512(l->ranks + l->n - 1, none);
    _mm512_storeu_si512(l->ranks + l->n - 1 + VECTOR, none);
}

static inline void ask_letters(const struct mb_bpe *b, const struct mb_bpe_item *item)
{
    const uint8_t *p = item->piece;
    const uint8_t *end = p + item->n;

    for (; p < end; p += *p < 0xc0 ? 1 : 2) {
        if (*p >= 0xc0)
            mb_bpe_letter_ask(b->letters, p, end);
    }
}

/* The next piece of the queue is placed in the lane; 0: there is none. */
WIDE static inline int place_next(struct queue *q, struct lane *l)
{
    while (q->next < q->end) {
        if (q->end - q->next > LETTERS_AHEAD)
            ask_letters(q->b, q->next[LETTERS_AHEAD]);
        begin(l, *q->next++);
        if (place(q->b, l, q->max_symbols)) {
            q->placed[(q->first_placed + q->n_placed++) % (AHEAD + 1)] = l;
            return 1;
        }
        if (q->max_symbols < PLACES)
            *q->later++ = l->item;
        else if (mb_bpe_encode_long(q->b, q->work, l->item) != 0)
            q->rc = MB_ENOMEM;
    }
    return 0;
}

/* A lane with a piece that goes on; `l` is free for another. NULL: no piece is left. */
WIDE static inline struct lane *take(struct queue *q, struct lane *l)
{
    if (q->ascii < q->ascii_end) {
        take_ascii(q, l);
        return l;
    }
    place_next(q, l);
    if (q->n_placed == 0)
        return NULL;
    l = q->placed[q->first_placed++ % (AHEAD + 1)];
    q->n_placed--;
    look(q->b, l);
    return l;
}

WIDE static inline void finish(const struct mb_bpe *b, struct lane *l)
{
    const __m512i size = _mm512_set1_epi32((int)b->vocab_size);
    const __m512i unknown = _mm512_set1_epi32(b->unknown);

    for (size_t i = 0; i < l->n; i += VECTOR) {
        __m512i ids = _mm512_loadu_si512(symbols_of(l) + i);
        __mmask16 left = (__mmask16)(l->n - i < VECTOR ? (1u << (l->n - i)) - 1 : UINT16_MAX);

        ids = _mm512_mask_mov_epi32(ids, _mm512_cmpge_epu32_mask(ids, size), unknown);
        _mm512_mask_storeu_epi32(l->item->ids + i, left, ids);
    }
    l->item->n_ids = (uint32_t)l->n;
}

/* The pairs beside place `at`, where the product comes, are asked for. right: the symbol behind. */
static inline void ask(const struct mb_bpe *b, struct lane *l, size_t at, uint32_t product,
                       uint32_t right)
{
    l->pairs[0] = mb_bpe_pair(product, right);
    l->pairs[1] = mb_bpe_pair(l->line[at], product); /* the symbol before */
    for (int i = 0; i < 2; i++) {
        l->slots[i] = mb_bpe_pair_slot(&b->pairs, l->pairs[i]);
        __builtin_prefetch(&b->pairs.slots[l->slots[i]]);
    }
    l->at = (uint64_t)1 << at;
    l->n--;
}

/* A turn of a piece of up to VECTOR symbols; 0: no rank is left. */
WIDE static inline int step_short(const struct mb_bpe *b, struct lane *l)
{
    uint32_t first = mb_bpe_pair_rank_at(&b->pairs, l->slots[0], l->pairs[0]);
    uint32_t second = mb_bpe_pair_rank_at(&b->pairs, l->slots[1], l->pairs[1]);
    __m512i ranks = _mm512_load_si512(l->ranks);
    __m512i symbols = _mm512_loadu_si512(symbols_of(l));
    __mmask16 keep;
    uint32_t lowest, product, right;
    size_t at;

    ranks = _mm512_mask_mov_epi32(ranks, (__mmask16)l->at, _mm512_set1_epi32((int)first));
    ranks = _mm512_mask_mov_epi32(ranks, (__mmask16)(l->at >> 1), _mm512_set1_epi32((int)second));
    lowest = _mm512_reduce_min_epu32(ranks);
    if (lowest == MB_BPE_NO_RANK)
        return 0;
    at = (size_t)__builtin_ctz(_mm512_cmpeq_epi32_mask(ranks, _mm512_set1_epi32((int)lowest)));
    product = mb_bpe_product(b, lowest);
    right = symbols_of(l)[at + 2];
    keep = (__mmask16) ~(2u << at);
    ranks = _mm512_mask_compress_epi32(_mm512_set1_epi32(-1), keep, ranks);
    symbols = _mm512_mask_compress_epi32(_mm512_set1_epi32((int)NO_SYMBOL), keep, symbols);
    symbols =
        _mm512_mask_mov_epi32(symbols, (__mmask16)(1u << at), _mm512_set1_epi32((int)product));
    ask(b, l, at, product, right);
    _mm512_store_si512(l->ranks, ranks);
    _mm512_storeu_si512(symbols_of(l), symbols);
    return 1;
}

/* The lowest rank of all, and its first place. */
WIDE static inline uint32_t lowest_of(struct lane *l, uint32_t first, uint32_t second, size_t *at)
{
    __m512i low = _mm512_set1_epi32(-1);
    size_t i;
    uint32_t lowest;

    for (i = 0; i < l->n; i += VECTOR) {
        __m512i ranks = _mm512_load_si512(l->ranks + i);

        ranks =
            _mm512_mask_mov_epi32(ranks, (__mmask16)(l->at >> i), _mm512_set1_epi32((int)first));
        ranks = _mm512_mask_mov_epi32(ranks, (__mmask16)(l->at >> 1 >> i),
                                      _mm512_set1_epi32((int)second));
        _mm512_store_si512(l->ranks + i, ranks);
        low = _mm512_min_epu32(low, ranks);
    }
    lowest = _mm512_reduce_min_epu32(low);
    low = _mm512_set1_epi32((int)lowest);
    for (i = 0;; i += VECTOR) {
        unsigned equal = _mm512_cmpeq_epi32_mask(_mm512_load_si512(l->ranks + i), low);

        if (equal != 0) {
            *at = i + (size_t)__builtin_ctz(equal);
            return lowest;
        }
    }
}

/* The same of a piece of any number of symbols. */
WIDE static inline int step_long(const struct mb_bpe *b, struct lane *l)
{
    size_t at;
    uint32_t lowest = lowest_of(l, mb_bpe_pair_rank_at(&b->pairs, l->slots[0], l->pairs[0]),
                                mb_bpe_pair_rank_at(&b->pairs, l->slots[1], l->pairs[1]), &at);
    uint32_t *symbols = symbols_of(l);
    uint32_t product;

    if (lowest == MB_BPE_NO_RANK)
        return 0;
    product = mb_bpe_product(b, lowest);
    for (size_t i = at + 1; i < l->n; i += VECTOR) {
        _mm512_storeu_si512(l->ranks + i, _mm512_loadu_si512(l->ranks + i + 1));
        _mm512_storeu_si512(symbols + i, _mm512_loadu_si512(symbols + i + 1));
    }
    symbols[at] = product;
    ask(b, l, at, product, symbols[at + 1]);
    return 1;
}

WIDE static inline __attribute__((always_inline)) void
run(struct queue *q, struct lane *lanes, int (*step)(const struct mb_bpe *b, struct lane *l))
{
    struct lane *busy[LANES];
    size_t n_busy = 0;

    q->first_placed = q->n_placed = 0;
    for (size_t i = 0; i < AHEAD && place_next(q, &lanes[LANES + i]); i++)
        ;
    while (n_busy < LANES && (busy[n_busy] = take(q, &lanes[n_busy])) != NULL)
        n_busy++;
    while (n_busy > 0) {
        for (size_t i = 0; i < n_busy; i++) {
            struct lane *l = busy[i];

            if (step(q->b, l))
                continue;
            finish(q->b, l);
            busy[i] = take(q, l);
            if (busy[i] == NULL)
                busy[i--] = busy[--n_busy];
        }
    }
}

/* The pieces that are tokens get their ids; the others are listed in out. */
static size_t find(const struct mb_bpe *b, struct mb_bpe_item *items, size_t n,
                   struct mb_bpe_item **out)
{
    struct mb_bpe_map_probe probes[AT_ONCE];
    size_t n_out = 0;

    for (size_t i = 0; i < n; i++)
        mb_bpe_map_ask(&b->map, items[i].piece, items[i].n, &probes[i]);
    for (size_t i = 0; i < n; i++) {
        int32_t id = -1;

        while (id < 0 && !items[i].is_part && items[i].n <= b->map.longest &&
               mb_bpe_map_look(&b->map, &probes[i]) == MB_BPE_MAP_MAYBE)
            id = mb_bpe_map_compare(&b->map, &probes[i]);
        if (id < 0 || (uint64_t)id >= b->vocab_size) {
            out[n_out++] = &items[i];
            continue;
        }
        items[i].ids[0] = id;
        items[i].n_ids = 1;
    }
    return n_out;
}

int mb_bpe_has_wide(void)
{
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2");
}

/* Whether a piece of more than VECTOR bytes has so few characters that it may have no more than
 * VECTOR symbols. */
WIDE static inline int has_few_letters(const struct mb_bpe_item *item)
{
    __mmask64 all = item->n < 64 ? ((__mmask64)1 << item->n) - 1 : UINT64_MAX;
    __m512i bytes = _mm512_maskz_loadu_epi8(all, item->piece);
    uint64_t first = _mm512_mask_cmpge_epi8_mask(all, bytes, _mm512_set1_epi8((char)0xc0));

    return item->n <= 64 && __builtin_popcountll(first) <= VECTOR;
}

/* Sorted by how they are taken: of ASCII and short, other short ones, long ones; how many of
 * each. */
WIDE static void sort(struct mb_bpe_item *const *items, size_t n, struct mb_bpe_item **out,
                      size_t n_of[3])
{
    uint8_t kinds[SOME];
    size_t at[3] = {0};

    n_of[0] = n_of[1] = n_of[2] = 0;
    for (size_t i = 0; i < n; i++) {
        if (items[i]->n > VECTOR)
            kinds[i] = has_few_letters(items[i]) ? 1 : 2;
        else
            kinds[i] = !is_ascii(items[i]);
        n_of[kinds[i]]++;
    }
    at[1] = n_of[0];
    at[2] = n_of[0] + n_of[1];
    for (size_t i = 0; i < n; i++)
        out[at[kinds[i]]++] = items[i];
}

WIDE int mb_bpe_encode_wide(const struct mb_bpe *b, struct mb_bpe_work *work,
                            struct mb_bpe_item *items, size_t n)
{
    struct lane lanes[LANES + AHEAD];
    struct mb_bpe_item *left[SOME];
    struct mb_bpe_item *sorted[SOME];
    struct queue q = {.b = b, .work = work};

    for (size_t i = 0; i < LANES + AHEAD; i++)
        lanes[i].line[0] = NO_SYMBOL;
    while (n > 0) {
        size_t some = n < SOME ? n : SOME;
        size_t n_left = 0;
        size_t n_later;
        size_t n_of[3];

        for (size_t i = 0; i < some; i += AT_ONCE) {
            size_t once = some - i < AT_ONCE ? some - i : AT_ONCE;

            if (b->ignore_merges) {
                n_left += find(b, items + i, once, left + n_left);
                continue;
            }
            for (size_t k = 0; k < once; k++)
                left[n_left++] = &items[i + k];
        }
        sort(left, n_left, sorted, n_of);
        q.ascii = sorted;
        q.ascii_end = q.next = sorted + n_of[0];
        q.end = q.next + n_of[1];
        q.later = sorted + n_of[0];
        q.max_symbols = VECTOR;
        run(&q, lanes, step_short);
        /* The ones that were left for now come before the long ones. */
        n_later = (size_t)(q.later - (sorted + n_of[0]));
        q.next -= n_later;
        memmove(sorted + (q.next - sorted), sorted + n_of[0], n_later * sizeof(*sorted));
        q.end += n_of[2];
        q.max_symbols = PLACES;
        run(&q, lanes, step_long);
        items += some;
        n -= some;
    }
    return q.rc;
}
#else
int mb_bpe_has_wide(void)
{
    return 0;
}

int mb_bpe_encode_wide(const struct mb_bpe *b, struct mb_bpe_work *work, struct mb_bpe_item *items,
                       size_t n)
{
    return mb_bpe_encode_lanes(b, work, items, n);
}
#endif
