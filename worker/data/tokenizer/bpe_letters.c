/*
 * 1. Every token that is one character is joined from its bytes, alone; the highest rank on the way
 * is its limit. One that merges with others at a rank up to its limit is left out; vocabularies
 * that were learned have none such. 2. Every merge whose right side begins a character without
 * ending it, or whose left side ends one without beginning it, lowers what its neighbouring bytes
 * allow.
 */
#include <string.h>
#include "base/alloc.h"
#include "base/err.h"
#include "worker/data/tokenizer/bpe_private.h"

/* The symbol that the n bytes join to, and the highest rank that takes. 0 if they do not. */
static int join(const struct mb_bpe *b, const uint8_t *p, size_t n, uint32_t *symbol,
                uint32_t *limit)
{
    uint32_t s[3];
    uint32_t low = 0;

    *limit = 0;
    for (size_t i = 0; i < n; i++)
        s[i] = b->byte_symbols[p[i]];
    for (; n > 1; n--) {
        size_t at = 0;

        low = mb_bpe_rank(b, s[0], s[1]);
        if (n == 3 && mb_bpe_rank(b, s[1], s[2]) < low) {
            low = mb_bpe_rank(b, s[1], s[2]);
            at = 1;
        }
        if (low == MB_BPE_NO_RANK)
            return 0;
        *limit = low > *limit ? low : *limit;
        s[at] = mb_bpe_product(b, low);
        if (n == 3 && at == 0)
            s[1] = s[2];
    }
    *symbol = s[0];
    return 1;
}

static int is_continuation(uint8_t byte)
{
    return (byte & 0xc0) == 0x80;
}

/* first_use: by symbol, the lowest rank of its merges. */
static void add_token(struct mb_bpe_letters *l, const struct mb_bpe *b, const uint32_t *first_use,
                      const uint8_t *p, size_t n)
{
    struct mb_bpe_letter *to;
    uint32_t symbol;
    uint32_t limit;

    if (n == 2 && p[0] >= 0xc0 && p[0] < 0xe0 && is_continuation(p[1]))
        to = &l->two[(p[0] & 31) << 6 | (p[1] & 63)];
    else if (n == 3 && p[0] >= 0xe0 && p[0] < 0xf0 && is_continuation(p[1]) &&
             is_continuation(p[2]))
        to = &l->three[(p[0] & 15) << 12 | (p[1] & 63) << 6 | (p[2] & 63)];
    else
        return;
    if (join(b, p, n, &symbol, &limit) && first_use[symbol] > limit)
        *to = (struct mb_bpe_letter){symbol, UINT32_MAX - limit};
}

static void lower(uint32_t *to, uint32_t rank)
{
    if (UINT32_MAX - rank > *to)
        *to = UINT32_MAX - rank;
}

static void add_merge(struct mb_bpe_letters *l, const struct mb_bpe *b,
                      const struct mb_bpe_merge *merge, uint32_t rank)
{
    const uint8_t *left = b->map.text.data + b->map.starts[merge->left];
    const uint8_t *right = b->map.text.data + b->map.starts[merge->right];
    size_t n_left = b->map.lengths[merge->left];
    size_t n_right = b->map.lengths[merge->right];

    if (n_left == 0 || n_right == 0)
        return;
    if (right[0] >= 0xc0 && n_right <= (right[0] < 0xe0 ? 1 : 2))
        lower(&l->before[right[0] - 0xc0][left[n_left - 1]], rank);
    if (n_left <= 2 && is_continuation(left[n_left - 1]) && is_continuation(left[0]))
        lower(&l->behind[left[n_left - 1] - 0x80][right[0]], rank);
}

static void lower_use(uint32_t *use, uint32_t rank)
{
    *use = rank < *use ? rank : *use;
}

int mb_bpe_letters_make(struct mb_bpe *b, const struct mb_bpe_model *m, const uint32_t *ranks)
{
    struct mb_bpe_letters *l = mb_calloc(1, sizeof(*l));
    uint32_t *first_use = mb_reallocarray(NULL, b->map.n_ids, sizeof(*first_use));

    if (l == NULL || first_use == NULL) {
        mb_free(l);
        mb_free(first_use);
        return MB_ENOMEM;
    }
    memset(first_use, 0xff, b->map.n_ids * sizeof(*first_use));
    for (size_t i = 0; i < m->n_merges; i++) {
        lower_use(&first_use[m->merges[i].left], ranks[i]);
        lower_use(&first_use[m->merges[i].right], ranks[i]);
        add_merge(l, b, &m->merges[i], ranks[i]);
    }
    for (uint32_t id = 0; id < b->map.n_ids; id++) {
        if (b->map.starts[id] != UINT32_MAX)
            add_token(l, b, first_use, b->map.text.data + b->map.starts[id], b->map.lengths[id]);
    }
    mb_free(first_use);
    b->letters = l;
    return 0;
}
