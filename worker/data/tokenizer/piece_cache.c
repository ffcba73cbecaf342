/*
 * One block holds all tables, so that one allocation makes and one free ends them. It asks for
 * huge pages: lookups are spread over all of it, and with small pages each would cost a walk of the
 * page table. A kernel that has none to give only makes it slower.
 */
#include <sys/mman.h>
#include "base/alloc.h"
#include "base/err.h"
#include "worker/data/tokenizer/piece_cache.h"

enum { HUGE_BYTES = 2 << 20 };

const uint64_t mb_piece_masks[16][2] = {{0, 0},
                                        {0xff, 0},
                                        {0xffff, 0},
                                        {0xffffff, 0},
                                        {0xffffffff, 0},
                                        {0xffffffffff, 0},
                                        {0xffffffffffff, 0},
                                        {0xffffffffffffff, 0},
                                        {UINT64_MAX, 0},
                                        {UINT64_MAX, 0xff},
                                        {UINT64_MAX, 0xffff},
                                        {UINT64_MAX, 0xffffff},
                                        {UINT64_MAX, 0xffffffff},
                                        {UINT64_MAX, 0xffffffffff},
                                        {UINT64_MAX, 0xffffffffffff},
                                        {UINT64_MAX, 0xffffffffffffff}};

static int init(struct mb_piece_cache *c, int is_narrow)
{
    const size_t line = MB_PIECE_LINE_WORDS * sizeof(uint64_t);
    size_t tiny = line << MB_PIECE_TINY_BITS;
    size_t shorts = line << MB_PIECE_SHORT_BITS;
    size_t longs = (size_t)1 << MB_PIECE_LONG_BYTES_BITS;
    size_t all;
    uintptr_t start;

    c->is_narrow = is_narrow;
    all = tiny + shorts + longs + (longs >> MB_PIECE_LONG_SHIFT);
    c->block = mb_calloc(1, all + HUGE_BYTES);
    if (c->block == NULL)
        return MB_ENOMEM;
    start = ((uintptr_t)c->block + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
    (void)madvise((void *)start, all, MADV_HUGEPAGE);
    c->lines[1] = (void *)start;
    c->lines[0] = (void *)(start + tiny);
    c->shifts[1] = 64 - MB_PIECE_TINY_BITS;
    c->shifts[0] = 64 - MB_PIECE_SHORT_BITS;
    c->longs = (void *)(start + tiny + shorts);
    c->tags = c->longs + longs;
    return 0;
}

int mb_piece_cache_init(struct mb_piece_cache *c)
{
    return init(c, 0);
}

int mb_piece_cache_init_narrow(struct mb_piece_cache *c)
{
    return init(c, 1);
}

void mb_piece_cache_close(struct mb_piece_cache *c)
{
    mb_free(c->block);
    *c = (struct mb_piece_cache){0};
}

static void swap_words(uint64_t *a, uint64_t *b, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t word = a[i];

        a[i] = b[i];
        b[i] = word;
    }
}

int mb_piece_find_behind(const struct mb_piece_probe *q)
{
    uint64_t *line = q->line;

    if (!q->is_tiny) {
        if (((line[4] ^ q->key[0]) | ((line[5] ^ q->key[1]) & ~MB_PIECE_COUNT_MASK)) != 0)
            return 0;
        swap_words(line, line + 4, 4);
        return 1;
    }
    for (size_t i = 2; i < MB_PIECE_LINE_WORDS; i += 2) {
        if (((line[i] ^ q->key[0]) & ~MB_PIECE_COUNT_MASK) == 0) {
            swap_words(line, line + i, 2);
            return 1;
        }
    }
    return 0;
}

/* Ids of the long table. */
static void get_ids(const struct mb_piece_cache *c, const uint8_t *ids, int32_t *out, size_t *n)
{
    uint16_t narrow[MB_PIECE_LONG_IDS + 1];
    uint64_t words[MB_PIECE_LONG_WIDE_IDS / 3];

    if (c->is_narrow) {
        memcpy(narrow, ids, sizeof(narrow));
        for (size_t i = 0; i < MB_PIECE_LONG_IDS; i++)
            out[i] = narrow[i];
        *n = narrow[MB_PIECE_LONG_IDS];
        return;
    }
    memcpy(words, ids, sizeof(words));
    *n = 0;
    for (size_t i = 0; i < MB_PIECE_LONG_WIDE_IDS / 3; i++) {
        mb_piece_unpack(words[i], out + 3 * i);
        *n |= (size_t)(words[i] >> 63) << i;
    }
}

static void set_ids(const struct mb_piece_cache *c, uint8_t *to, const int32_t *ids, size_t n)
{
    uint64_t words[MB_PIECE_LONG_WIDE_IDS / 3];
    uint16_t narrow[MB_PIECE_LONG_IDS + 1] = {0};

    if (c->is_narrow) {
        for (size_t i = 0; i < n; i++)
            narrow[i] = (uint16_t)ids[i];
        narrow[MB_PIECE_LONG_IDS] = (uint16_t)n;
        memcpy(to, narrow, sizeof(narrow));
        return;
    }
    for (size_t i = 0; i < MB_PIECE_LONG_WIDE_IDS / 3; i++)
        words[i] = (uint64_t)(n >> i & 1) << 63;
    for (size_t i = 0; i < n; i++)
        words[i / 3] |= (uint64_t)ids[i] << (i % 3 * MB_PIECE_ID_BITS);
    memcpy(to, words, sizeof(words));
}

size_t mb_piece_find_long(const struct mb_piece_cache *c, const struct mb_piece_probe *q,
                          int32_t *out)
{
    const uint8_t *e = c->longs + ((size_t)q->long_slot << MB_PIECE_LONG_SHIFT);
    size_t n;

    if (memcmp(e, q->key, sizeof(q->key)) != 0)
        return 0;
    get_ids(c, e + sizeof(q->key), out, &n);
    return n;
}

/* The first empty entry of the line, else the last. */
static uint64_t *place_of(const struct mb_piece_probe *q)
{
    size_t n_words = q->is_tiny ? 2 : 4;
    size_t i = 0;

    while (i + n_words < MB_PIECE_LINE_WORDS && q->line[i + n_words / 2 - 1] != 0)
        i += n_words;
    return q->line + i;
}

static void add_to_line(struct mb_piece_cache *c, const struct mb_piece_probe *q,
                        const int32_t *ids, size_t n)
{
    uint64_t *to = place_of(q);
    uint64_t packed[2] = {0};
    uint16_t narrow[MB_PIECE_SHORT_NARROW_IDS] = {0};
    size_t n_words = q->is_tiny ? 1 : 2; /* of key, and of ids */

    for (size_t i = 0; i < n; i++) {
        if (c->is_narrow)
            narrow[i] = (uint16_t)ids[i];
        else
            packed[i / 3] |= (uint64_t)ids[i] << (i % 3 * MB_PIECE_ID_BITS);
    }
    if (c->is_narrow)
        memcpy(packed, narrow, sizeof(packed));
    memcpy(to, q->key, n_words * sizeof(*to));
    to[n_words - 1] |= (uint64_t)(n - 1) << 61;
    memcpy(to + n_words, packed, n_words * sizeof(*to));
}

void mb_piece_cache_add(struct mb_piece_cache *c, const struct mb_piece_probe *q,
                        const int32_t *ids, size_t n)
{
    size_t max_line = q->n > MB_PIECE_SHORT_BYTES ? 0 : mb_piece_line_ids(c, q->is_tiny);
    size_t max_long = c->is_narrow ? MB_PIECE_LONG_IDS : MB_PIECE_LONG_WIDE_IDS;
    uint8_t *e;

    /* A piece that became more ids than it has bytes was not asked for in the long table. */
    if (n == 0 || n > max_long || q->n > MB_PIECE_LONG_BYTES || (n > max_line && n > q->n))
        return;
    if (n <= max_line) {
        add_to_line(c, q, ids, n);
        return;
    }
    e = c->longs + ((size_t)q->long_slot << MB_PIECE_LONG_SHIFT);
    memcpy(e, q->key, sizeof(q->key));
    set_ids(c, e + sizeof(q->key), ids, n);
    c->tags[q->long_slot] = mb_piece_long_tag(mb_piece_long_hash(q->key));
}
