/*
 * Many pieces at a time. A merge asks the pair table twice, at places that are rarely in a cache
 * near the processor, and the next merge of a piece depends on the answers; so LANES pieces are on
 * their way at once, each doing one step in its turn, and what a step asks for has the turns of all
 * others to arrive.
 *
 * 1. Where a piece that is a token is that token, the map is asked first: its slot, then the text.
 * 2. What the characters are as symbols is asked for, then they are placed: sure characters as one
 * symbol, other bytes one by one. Ranks of two bytes come from a table of their own, the slots of
 * other pairs are asked for. 3. The ranks are there.
 * 4. The lowest rank, the leftmost of equals, is found over all places; the right symbol leaves,
 * and the slots of the pairs beside the new one are asked for; where products have a table of
 * their own, that is asked first. 5. When no rank is left the ids are
 * written and the lane takes the next piece. Pieces of more symbols than a lane has places go
 * through the heap of bpe.c. Only that can fail, without memory.
 */
#include <string.h>
#include "worker/data/tokenizer/bpe_private.h"

enum { LANES = 16, PLACES = MB_BPE_PLACES, VECTOR = 16 };

enum stage { FREE, FIND_SLOT, FIND_TEXT, PLACE, FILL, STEP, MERGE };

/* One piece on its way. The rank of a place is that of the pair that begins there. */
struct lane {
    uint32_t ranks[PLACES];
    uint32_t symbols[PLACES];
    uint64_t symbol_at; /* a bit for each place that still has a symbol */
    uint64_t asked;     /* FILL: places whose rank is asked for at the slot in ranks[] */
    uint64_t pairs[2];  /* STEP: asked for, of the new symbol and of the one before it */
    size_t slots[2];
    uint64_t at[2];    /* STEP: a bit for the place of each; 0: none. MERGE: at[0] alone */
    uint32_t lowest;   /* MERGE: the rank there */
    uint32_t n_places; /* from there to the next vector the ranks are none */
    enum stage stage;
    struct mb_bpe_map_probe probe;
    struct mb_bpe_item *item;
};

struct queue {
    const struct mb_bpe *b;
    struct mb_bpe_work *work;
    struct mb_bpe_item *next;
    struct mb_bpe_item *end;
    int rc;
};

/* Puts two ranks in their places, given as bits, and finds the lowest of all; *at is the first
 * place that has it. */
static inline uint32_t lowest_of(struct lane *l, uint32_t first, uint32_t second, size_t *at)
{
    uint32_t lowest;

    if (l->at[0] != 0)
        l->ranks[__builtin_ctzll(l->at[0])] = first;
    if (l->at[1] != 0)
        l->ranks[__builtin_ctzll(l->at[1])] = second;
    lowest = l->ranks[0];
    *at = 0;
    for (size_t i = 1; i < l->n_places; i++) {
        *at = l->ranks[i] < lowest ? i : *at;
        lowest = l->ranks[i] < lowest ? l->ranks[i] : lowest;
    }
    return lowest;
}

static inline void ask(const struct mb_bpe *b, uint64_t pair, size_t *slot)
{
    *slot = mb_bpe_pair_slot(&b->pairs, pair);
    __builtin_prefetch(&b->pairs.slots[*slot]);
}

/* How many symbols the piece begins as, 0 if they are more than there are places. Those that are
 * more than a byte have their bit set in *wide. */
static inline size_t place_symbols(const struct mb_bpe *b, const struct mb_bpe_item *item,
                                   uint32_t *symbols, uint8_t *bytes, uint64_t *wide)
{
    const uint8_t *p = item->piece;
    const uint8_t *end = p + item->n;
    size_t n = 0;

    *wide = 0;
    while (p < end) {
        size_t length;

        if (n == PLACES)
            return 0;
        length = *p < 0xc0 ? 0 : mb_bpe_letter_at(b->letters, p, item->piece, end, &symbols[n]);
        bytes[n] = *p;
        if (length > 0) {
            *wide |= (uint64_t)1 << n;
        } else {
            symbols[n] = b->byte_symbols[*p];
            length = 1;
        }
        p += length;
        n++;
    }
    return n;
}

/* 0 if the piece has too many symbols. */
static inline int place(const struct mb_bpe *b, struct lane *l)
{
    uint8_t bytes[PLACES];
    uint64_t wide;
    size_t n = place_symbols(b, l->item, l->symbols, bytes, &wide);

    if (n == 0)
        return 0;
    l->n_places = (uint32_t)n;
    l->symbol_at = UINT64_MAX >> (PLACES - n);
    wide = (wide | wide >> 1) & l->symbol_at >> 1;
    l->asked = wide;
    for (size_t i = 0; i + 1 < n; i++)
        l->ranks[i] = b->first[(size_t)bytes[i] << 8 | bytes[i + 1]];
    for (size_t i = n - 1; i % VECTOR != 0 || i == n - 1; i++)
        l->ranks[i] = MB_BPE_NO_RANK;
    for (; wide != 0; wide &= wide - 1) {
        size_t i = (size_t)__builtin_ctzll(wide);
        size_t slot;

        ask(b, mb_bpe_pair(l->symbols[i], l->symbols[i + 1]), &slot);
        l->ranks[i] = (uint32_t)slot;
    }
    l->pairs[0] = l->pairs[1] = MB_BPE_NO_PAIR;
    l->slots[0] = l->slots[1] = 0;
    l->at[0] = l->at[1] = 0;
    l->stage = l->asked != 0 ? FILL : STEP;
    return 1;
}

static inline void ask_letters(const struct mb_bpe *b, struct lane *l)
{
    const uint8_t *p = l->item->piece;
    const uint8_t *end = p + l->item->n;

    for (; p < end; p += *p < 0xc0 ? 1 : 2) {
        if (*p >= 0xc0)
            mb_bpe_letter_ask(b->letters, p, end);
    }
    l->stage = PLACE;
}

static inline void take(struct queue *q, struct lane *l)
{
    const struct mb_bpe *b = q->b;

    l->stage = FREE;
    if (q->next == q->end)
        return;
    l->item = q->next++;
    l->item->n_ids = 0;
    if (b->ignore_merges && !l->item->is_part && l->item->n <= b->map.longest) {
        mb_bpe_map_ask(&b->map, l->item->piece, l->item->n, &l->probe);
        l->stage = FIND_SLOT;
    } else {
        ask_letters(b, l);
    }
}

static inline void place_or_take(struct queue *q, struct lane *l)
{
    if (place(q->b, l))
        return;
    if (mb_bpe_encode_long(q->b, q->work, l->item) != 0)
        q->rc = MB_ENOMEM;
    take(q, l);
}

static inline void find(struct queue *q, struct lane *l)
{
    const struct mb_bpe *b = q->b;
    int32_t id = -1;

    if (l->stage == FIND_SLOT) {
        switch (mb_bpe_map_look(&b->map, &l->probe)) {
        case MB_BPE_MAP_NONE:
            ask_letters(b, l);
            return;
        case MB_BPE_MAP_MAYBE:
            l->stage = FIND_TEXT;
            return;
        }
    }
    id = mb_bpe_map_compare(&b->map, &l->probe);
    if (id < 0 || (uint64_t)id >= b->vocab_size) {
        l->stage = FIND_SLOT; /* the next slot */
        if (id >= 0)
            ask_letters(b, l);
        return;
    }
    l->item->ids[0] = id;
    l->item->n_ids = 1;
    take(q, l);
}

static inline void fill(const struct mb_bpe *b, struct lane *l)
{
    for (uint64_t left = l->asked; left != 0; left &= left - 1) {
        size_t i = (size_t)__builtin_ctzll(left);

        l->ranks[i] = mb_bpe_pair_rank_at(&b->pairs, l->ranks[i],
                                          mb_bpe_pair(l->symbols[i], l->symbols[i + 1]));
    }
    l->stage = STEP;
}

static inline void finish(struct queue *q, struct lane *l)
{
    int32_t *out = l->item->ids;

    for (uint64_t left = l->symbol_at; left != 0; left &= left - 1)
        *out++ = mb_bpe_id(q->b, l->symbols[__builtin_ctzll(left)]);
    l->item->n_ids = (uint32_t)(out - l->item->ids);
    take(q, l);
}

static inline void merge(const struct mb_bpe *b, struct lane *l, uint32_t rank, size_t at)
{
    uint64_t after = l->symbol_at & (UINT64_MAX << at) << 1;
    uint64_t before = l->symbol_at & (((uint64_t)1 << at) - 1);
    size_t gone = (size_t)__builtin_ctzll(after);
    uint32_t product = mb_bpe_product(b, rank);

    after &= after - 1;
    l->symbol_at ^= (uint64_t)1 << gone;
    l->ranks[gone] = MB_BPE_NO_RANK;
    l->symbols[at] = product;
    l->at[0] = (uint64_t)1 << at;
    l->pairs[0] = MB_BPE_NO_PAIR;
    if (after != 0) {
        l->pairs[0] = mb_bpe_pair(product, l->symbols[__builtin_ctzll(after)]);
        ask(b, l->pairs[0], &l->slots[0]);
    }
    l->at[1] = 0;
    l->pairs[1] = MB_BPE_NO_PAIR;
    if (before != 0) {
        size_t left = 63 - (size_t)__builtin_clzll(before);

        l->at[1] = (uint64_t)1 << left;
        l->pairs[1] = mb_bpe_pair(l->symbols[left], product);
        ask(b, l->pairs[1], &l->slots[1]);
    }
}

/* The ranks beside the last merge are there: on to the next one. */
static inline void step(struct queue *q, struct lane *l)
{
    const struct mb_bpe *b = q->b;
    size_t at;
    uint32_t rank = lowest_of(l, mb_bpe_pair_rank_at(&b->pairs, l->slots[0], l->pairs[0]),
                              mb_bpe_pair_rank_at(&b->pairs, l->slots[1], l->pairs[1]), &at);

    if (rank == MB_BPE_NO_RANK) {
        finish(q, l);
    } else if (b->products == NULL) {
        merge(b, l, rank, at);
    } else {
        __builtin_prefetch(&b->products[rank]);
        l->lowest = rank;
        l->at[0] = (uint64_t)1 << at;
        l->stage = MERGE;
    }
}

static void run(struct queue *q, struct lane *lanes)
{
    size_t n_busy;

    for (size_t i = 0; i < LANES; i++)
        take(q, &lanes[i]);
    do {
        n_busy = 0;
        for (size_t i = 0; i < LANES; i++) {
            struct lane *l = &lanes[i];

            n_busy += l->stage != FREE;
            if (l->stage == MERGE) {
                l->stage = STEP;
                merge(q->b, l, l->lowest, (size_t)__builtin_ctzll(l->at[0]));
            } else if (l->stage >= FILL) {
                if (l->stage == FILL)
                    fill(q->b, l);
                step(q, l);
            } else if (l->stage == PLACE) {
                place_or_take(q, l);
            } else if (l->stage != FREE) {
                find(q, l);
            }
        }
    } while (n_busy > 0);
}

int mb_bpe_encode_lanes(const struct mb_bpe *b, struct mb_bpe_work *work, struct mb_bpe_item *items,
                        size_t n)
{
    struct queue q = {.b = b, .work = work, .next = items, .end = items + n};
    struct lane lanes[LANES];

    run(&q, lanes);
    return q.rc;
}
