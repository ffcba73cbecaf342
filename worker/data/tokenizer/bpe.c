/*
 * Encoding with a loaded vocabulary.
 *
 * 1. A piece becomes one symbol per byte.
 * 2. The adjacent pair with the lowest merge rank, the leftmost of equals, becomes one symbol,
 * until no pair has a rank. Short pieces do that side by side (bpe_lanes.c); for a long one a heap
 * of (rank, position) over a linked list makes it n log n.
 * 3. Each symbol left gives its id; one that the vocabulary does not list gives `unknown`. Only
 * memory can run out, for a long piece; the ids appended before stay, the caller drops them.
 */
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/bpe_private.h"

enum { KEEP_BYTES = 4 << 20 };

static const uint32_t no_rank = MB_BPE_NO_RANK;

/* The long piece as a linked list; all arrays have one entry per byte. */
struct list {
    uint64_t *heap; /* rank << 32 | position, two entries per byte */
    size_t n_heap;
    uint32_t *symbols;
    uint32_t *ranks; /* of the pair that begins here; no_rank also when merged away */
    uint32_t *next;  /* n at the end */
    uint32_t *prev;  /* n at the start */
    uint32_t n;
};

static void sift_down(uint64_t *heap, size_t n, size_t i)
{
    uint64_t moved = heap[i];

    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= n)
            break;
        if (child + 1 < n && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= moved)
            break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = moved;
}

static void push(struct list *l, uint32_t rank, uint32_t position)
{
    uint64_t entry = (uint64_t)rank << 32 | position;
    size_t i = l->n_heap++;

    while (i > 0 && l->heap[(i - 1) / 2] > entry) {
        l->heap[i] = l->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    l->heap[i] = entry;
}

static uint64_t pop(struct list *l)
{
    uint64_t top = l->heap[0];

    l->heap[0] = l->heap[--l->n_heap];
    if (l->n_heap > 0)
        sift_down(l->heap, l->n_heap, 0);
    return top;
}

static int work_reserve(struct mb_bpe_work *work, size_t size_bytes)
{
    void *block;

    if (work->size_bytes >= size_bytes)
        return 0;
    block = mb_alloc(size_bytes);
    if (block == NULL)
        return MB_ENOMEM;
    mb_free(work->block);
    work->block = block;
    work->size_bytes = size_bytes;
    return 0;
}

void mb_bpe_work_close(struct mb_bpe_work *work)
{
    mb_free(work->block);
    *work = (struct mb_bpe_work){0};
}

static void list_make(struct list *l, const struct mb_bpe *b, void *block, const uint8_t *piece,
                      size_t n)
{
    l->n = (uint32_t)n;
    l->heap = block;
    l->symbols = (uint32_t *)(l->heap + 2 * n);
    l->ranks = l->symbols + n;
    l->next = l->ranks + n;
    l->prev = l->next + n;
    l->n_heap = 0;
    for (uint32_t i = 0; i < l->n; i++) {
        l->symbols[i] = b->byte_symbols[piece[i]];
        l->next[i] = i + 1;
        l->prev[i] = i > 0 ? i - 1 : l->n;
    }
    for (uint32_t i = 0; i < l->n; i++) {
        l->ranks[i] = i + 1 < l->n ? mb_bpe_rank(b, l->symbols[i], l->symbols[i + 1]) : no_rank;
        if (l->ranks[i] != no_rank)
            l->heap[l->n_heap++] = (uint64_t)l->ranks[i] << 32 | i;
    }
    for (size_t i = l->n_heap / 2; i-- > 0;)
        sift_down(l->heap, l->n_heap, i);
}

static void update_pair(struct list *l, const struct mb_bpe *b, uint32_t at)
{
    uint32_t right = l->next[at];

    l->ranks[at] = right < l->n ? mb_bpe_rank(b, l->symbols[at], l->symbols[right]) : no_rank;
    if (l->ranks[at] != no_rank)
        push(l, l->ranks[at], at);
}

int mb_bpe_encode_long(const struct mb_bpe *b, struct mb_bpe_work *work, struct mb_bpe_item *item)
{
    struct list l;
    uint32_t n_ids = 0;

    if (item->n >= UINT32_MAX / 2 || work_reserve(work, (size_t)item->n * 32) != 0)
        return MB_ENOMEM;
    list_make(&l, b, work->block, item->piece, item->n);
    while (l.n_heap > 0) {
        uint64_t top = pop(&l);
        uint32_t rank = (uint32_t)(top >> 32);
        uint32_t at = (uint32_t)top;
        uint32_t right;

        if (l.ranks[at] != rank)
            continue; /* the pair changed since it was pushed */
        right = l.next[at];
        l.symbols[at] = mb_bpe_product(b, rank);
        l.ranks[right] = no_rank;
        l.next[at] = l.next[right];
        if (l.next[at] < l.n)
            l.prev[l.next[at]] = at;
        update_pair(&l, b, at);
        if (l.prev[at] < l.n)
            update_pair(&l, b, l.prev[at]);
    }
    for (uint32_t i = 0; i < l.n; i = l.next[i])
        item->ids[n_ids++] = mb_bpe_id(b, l.symbols[i]);
    item->n_ids = n_ids;
    if (work->size_bytes > KEEP_BYTES)
        mb_bpe_work_close(work);
    return 0;
}

int mb_bpe_encode_many(const struct mb_bpe *b, struct mb_bpe_work *work, struct mb_bpe_item *items,
                       size_t n)
{
    return mb_bpe_has_wide() ? mb_bpe_encode_wide(b, work, items, n)
                             : mb_bpe_encode_lanes(b, work, items, n);
}

int mb_bpe_encode(const struct mb_bpe *b, struct mb_bpe_work *work, const uint8_t *piece, size_t n,
                  int is_part, struct mb_ids *out)
{
    struct mb_bpe_item item = {.piece = piece, .n = (uint32_t)n, .is_part = is_part};

    if (n > UINT32_MAX || mb_ids_reserve(out, n) != 0)
        return MB_ENOMEM;
    item.ids = out->data + out->n;
    if (mb_bpe_encode_many(b, work, &item, 1) != 0)
        return MB_ENOMEM;
    out->n += item.n_ids;
    return 0;
}
