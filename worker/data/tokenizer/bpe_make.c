/*
 * From a model to the form that encoding wants.
 *
 * 1. The tokens go into the map. 2. Each of the 256 bytes gets its symbol: its token, or a new
 * symbol. 3. The merges are sorted by rank; equal ranks become one dense rank with one product, or,
 * where products ascend with the ranks, as in most vocabularies, a number that has the product in
 * it. 4. From the merges come the pair table, the ranks of two bytes, the sure characters and the
 * cuts. A merge of an id that is no token, or two products of one rank, are MB_ECORRUPT.
 */
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/bpe_private.h"

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
}

static void make_byte_symbols(struct mb_bpe *b)
{
    for (unsigned i = 0; i < 256; i++) {
        uint8_t byte = (uint8_t)i;
        int32_t id = mb_bpe_map_find(&b->map, &byte, 1);

        b->byte_symbols[i] = id >= 0 ? (uint32_t)id : MB_BPE_MAX_IDS - 256 + i;
    }
}

static int is_token(const struct mb_bpe *b, int32_t id)
{
    return id >= 0 && (uint32_t)id < b->map.n_ids && b->map.starts[id] != UINT32_MAX;
}

static int by_rank(const void *a, const void *b)
{
    const struct mb_bpe_merge *const *x = a;
    const struct mb_bpe_merge *const *y = b;

    return ((*x)->rank > (*y)->rank) - ((*x)->rank < (*y)->rank);
}

/* Bits that number the merges of one product, or -1 if products do not ascend with the ranks. */
static int bits_beside(const uint32_t *products, size_t n)
{
    uint32_t run = 0;
    uint32_t longest = 0;
    int bits = 0;

    for (size_t i = 0; i < n; i++) {
        if (i > 0 && products[i - 1] > products[i])
            return -1;
        run = i > 0 && products[i - 1] == products[i] ? run + 1 : 0;
        longest = run > longest ? run : longest;
    }
    while (longest >> bits != 0)
        bits++;
    return bits;
}

/* Where the products ascend with the ranks, a rank becomes its product and, below that, its number
 * among the ranks of that product. */
static void drop_products(struct mb_bpe *b, const struct mb_bpe_model *m, uint32_t *dense, size_t n)
{
    int bits = bits_beside(b->products, n);
    uint32_t last = UINT32_MAX;
    uint32_t run = 0;

    if (bits < 0 || (n > 0 && (uint64_t)(b->products[n - 1] + 1) << bits > MB_BPE_MAX_RANKS))
        return;
    for (size_t i = 0; i < n; i++) {
        run = b->products[i] == last ? run + 1 : 0;
        last = b->products[i];
        b->products[i] = last << bits | run;
    }
    for (size_t i = 0; i < m->n_merges; i++)
        dense[i] = b->products[dense[i]];
    b->rank_shift = (unsigned)bits;
    mb_free(b->products);
    b->products = NULL;
}

/* dense[i]: the rank of merge i among the different ranks; products by that rank. */
static int make_products(struct mb_bpe *b, const struct mb_bpe_model *m, uint32_t *dense,
                         struct mb_err *err)
{
    const struct mb_bpe_merge **sorted = mb_reallocarray(NULL, m->n_merges + 1, sizeof(*sorted));
    uint32_t n = 0;
    int rc = 0;
    int is_sorted = 1;

    b->products = mb_reallocarray(NULL, m->n_merges + 1, sizeof(*b->products));
    if (sorted == NULL || b->products == NULL) {
        mb_free(sorted);
        return no_memory(err);
    }
    for (size_t i = 0; i < m->n_merges; i++) {
        sorted[i] = &m->merges[i];
        is_sorted &= i == 0 || m->merges[i - 1].rank <= m->merges[i].rank;
    }
    if (!is_sorted)
        qsort(sorted, m->n_merges, sizeof(*sorted), by_rank);
    for (size_t i = 0; rc == 0 && i < m->n_merges; i++) {
        int is_new = i == 0 || sorted[i]->rank != sorted[i - 1]->rank;

        if (is_new)
            b->products[n++] = (uint32_t)sorted[i]->product;
        else if (sorted[i]->product != sorted[i - 1]->product)
            rc = mb_err_set(err, MB_ECORRUPT, "merges of rank %d have different products",
                            sorted[i]->rank);
        dense[sorted[i] - m->merges] = n - 1;
    }
    mb_free(sorted);
    if (rc == 0)
        drop_products(b, m, dense, n);
    return rc;
}

static int make_pair_table(struct mb_bpe *b, const struct mb_bpe_model *m, const uint32_t *ranks,
                           struct mb_err *err)
{
    uint64_t *entries = mb_reallocarray(NULL, m->n_merges + 1, sizeof(*entries));
    int rc;

    if (entries == NULL)
        return no_memory(err);
    for (size_t i = 0; i < m->n_merges; i++)
        entries[i] = mb_bpe_pair((uint32_t)m->merges[i].left, (uint32_t)m->merges[i].right)
                         << MB_BPE_RANK_BITS |
                     ranks[i];
    rc = mb_bpe_pairs_make(&b->pairs, entries, m->n_merges);
    mb_free(entries);
    if (rc == MB_EUNSUPPORTED)
        return mb_err_set(err, rc, "the merges fit into no table");
    return rc == 0 ? 0 : no_memory(err);
}

/* The byte whose symbol this is, -1 if it is none's. */
static int byte_of(const struct mb_bpe *b, int32_t id)
{
    uint8_t byte = 0;

    if (b->map.lengths[id] != 1)
        return -1;
    byte = b->map.text.data[b->map.starts[id]];
    return b->byte_symbols[byte] == (uint32_t)id ? byte : -1;
}

/* Of two bytes, as the last merge of them has it. */
static int make_first(struct mb_bpe *b, const struct mb_bpe_model *m, const uint32_t *ranks,
                      struct mb_err *err)
{
    b->first = mb_reallocarray(NULL, 65536, sizeof(*b->first));
    if (b->first == NULL)
        return no_memory(err);
    memset(b->first, 0xff, 65536 * sizeof(*b->first));
    for (size_t i = 0; i < m->n_merges; i++) {
        int left = byte_of(b, m->merges[i].left);
        int right = byte_of(b, m->merges[i].right);

        if (left >= 0 && right >= 0)
            b->first[left << 8 | right] = ranks[i];
    }
    return 0;
}

static int make_cuts(struct mb_bpe *b, const struct mb_bpe_model *m)
{
    const uint8_t *text = b->map.text.data;

    b->cuts = mb_calloc(1, sizeof(*b->cuts));
    if (b->cuts == NULL)
        return MB_ENOMEM;
    for (size_t i = 0; i < m->n_merges; i++) {
        const struct mb_bpe_merge *merge = &m->merges[i];
        size_t n_left = b->map.lengths[merge->left];
        size_t n_right = b->map.lengths[merge->right];

        if (n_left > 0 && n_right > 0)
            mb_bpe_cuts_join(b->cuts, text + b->map.starts[merge->left], n_left,
                             text + b->map.starts[merge->right], n_right);
    }
    /* A piece that is a token stays whole. */
    for (size_t i = 0; m->ignore_merges && i < m->n_tokens; i++) {
        for (size_t at = 1; at < m->tokens[i].n; at++)
            mb_bpe_cuts_join(b->cuts, m->tokens[i].bytes, at, m->tokens[i].bytes + at,
                             m->tokens[i].n - at);
    }
    return 0;
}

static int add_merges(struct mb_bpe *b, const struct mb_bpe_model *m, struct mb_err *err)
{
    uint32_t *dense;
    int rc;

    if (m->n_merges >= MB_BPE_MAX_RANKS)
        return mb_err_set(err, MB_EUNSUPPORTED, "more than %u merges", MB_BPE_MAX_RANKS);
    for (size_t i = 0; i < m->n_merges; i++) {
        const struct mb_bpe_merge *merge = &m->merges[i];

        if (!is_token(b, merge->left) || !is_token(b, merge->right) ||
            !is_token(b, merge->product) || merge->rank < 0)
            return mb_err_set(err, MB_ECORRUPT,
                              "merge %zu joins %d and %d to %d: not all of them are tokens", i,
                              merge->left, merge->right, merge->product);
    }
    dense = mb_reallocarray(NULL, m->n_merges + 1, sizeof(*dense));
    if (dense == NULL)
        return no_memory(err);
    rc = make_products(b, m, dense, err);
    if (rc == 0)
        rc = make_pair_table(b, m, dense, err);
    if (rc == 0)
        rc = make_first(b, m, dense, err);
    if (rc == 0 && (mb_bpe_letters_make(b, m, dense) != 0 || make_cuts(b, m) != 0))
        rc = no_memory(err);
    mb_free(dense);
    return rc;
}

int mb_bpe_create(const struct mb_bpe_model *m, struct mb_bpe **out, struct mb_err *err)
{
    struct mb_bpe *b;
    int rc;

    if (m->vocab_size == 0 || m->vocab_size > MB_BPE_MAX_IDS - 256 || m->unknown < 0 ||
        (uint64_t)m->unknown >= m->vocab_size)
        return mb_err_set(err, MB_EUNSUPPORTED, "a vocabulary of %llu tokens",
                          (unsigned long long)m->vocab_size);
    b = mb_calloc(1, sizeof(*b));
    if (b == NULL)
        return no_memory(err);
    b->vocab_size = m->vocab_size;
    b->eod = m->eod;
    b->unknown = m->unknown;
    b->ignore_merges = m->ignore_merges;
    rc = mb_bpe_map_make(&b->map, m->tokens, m->n_tokens, err);
    if (rc == 0) {
        make_byte_symbols(b);
        rc = add_merges(b, m, err);
    }
    if (rc == 0)
        *out = b;
    else
        mb_bpe_destroy(b);
    return rc;
}

void mb_bpe_destroy(struct mb_bpe *b)
{
    if (b == NULL)
        return;
    mb_bpe_pairs_close(&b->pairs);
    mb_free(b->letters);
    mb_free(b->cuts);
    mb_free(b->products);
    mb_free(b->first);
    mb_bpe_map_close(&b->map);
    mb_free(b);
}

uint64_t mb_bpe_vocab_size(const struct mb_bpe *b)
{
    return b->vocab_size;
}

int32_t mb_bpe_eod(const struct mb_bpe *b)
{
    return b->eod;
}

const struct mb_bpe_cuts *mb_bpe_cuts(const struct mb_bpe *b)
{
    return b->cuts;
}

int mb_bpe_ignores_merges(const struct mb_bpe *b)
{
    return b->ignore_merges;
}

int32_t mb_bpe_find(const struct mb_bpe *b, const uint8_t *bytes, size_t n)
{
    int32_t id = mb_bpe_map_find(&b->map, bytes, n);

    return (uint64_t)id < b->vocab_size ? id : -1;
}

int mb_bpe_decode(const struct mb_bpe *b, int32_t id, struct mb_buf *out)
{
    if (!is_token(b, id) || (uint64_t)id >= b->vocab_size)
        return MB_EINVAL;
    return mb_buf_add(out, b->map.text.data + b->map.starts[id], b->map.lengths[id]);
}
