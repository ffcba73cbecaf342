/*
 * Encoding with a loaded vocabulary.
 *
 * 1. A piece becomes one symbol per byte.
 * 2. The adjacent pair with the lowest merge rank, the leftmost of equals, becomes one symbol,
 * until no pair has a rank. Up to SHORT_PIECE symbols the pair is searched linearly in an array
 * that closes up; beyond that a heap of (rank, position) over a linked list makes it n log n.
 * 3. Each symbol left gives its id; one that the vocabulary does not list gives 0, as Megatron-LM
 * does. Only memory can run out, for a long piece; the ids appended before stay, the caller drops
 * them.
 */
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/bpe_private.h"

enum { SHORT_PIECE = 48, KEEP_BYTES = 4 << 20 };

static const uint32_t no_rank = UINT32_MAX;

static uint32_t rank_of(const struct mb_bpe *b, uint32_t left, uint32_t right)
{
    uint64_t pair = mb_bpe_pair(left, right);

    for (size_t i = mb_bpe_slot(b, pair);; i = (i + 1) & b->pair_mask) {
        uint64_t entry = b->pairs[i];
        if (entry >> MB_BPE_RANK_BITS == pair)
            return (uint32_t)(entry & MB_BPE_RANK_MASK);
        if (entry == MB_BPE_NO_ENTRY)
            return no_rank;
    }
}

static int encode_short(const struct mb_bpe *b, const uint8_t *piece, size_t n, struct mb_ids *out)
{
    uint32_t symbols[SHORT_PIECE];
    uint32_t ranks[SHORT_PIECE]; /* of the pair that begins here */

    for (size_t i = 0; i < n; i++)
        symbols[i] = b->byte_symbols[piece[i]];
    for (size_t i = 0; i + 1 < n; i++)
        ranks[i] = rank_of(b, symbols[i], symbols[i + 1]);
    for (;;) {
        uint32_t lowest = no_rank;
        size_t at = 0;

        for (size_t i = 0; i + 1 < n; i++) {
            if (ranks[i] < lowest) {
                lowest = ranks[i];
                at = i;
            }
        }
        if (lowest == no_rank)
            break;
        symbols[at] = b->products[lowest];
        n--;
        memmove(&symbols[at + 1], &symbols[at + 2], (n - at - 1) * sizeof(*symbols));
        memmove(&ranks[at], &ranks[at + 1], (n - at) * sizeof(*ranks));
        if (at + 1 < n)
            ranks[at] = rank_of(b, symbols[at], symbols[at + 1]);
        if (at > 0)
            ranks[at - 1] = rank_of(b, symbols[at - 1], symbols[at]);
    }
    if (mb_ids_reserve(out, n) != 0)
        return MB_ENOMEM;
    for (size_t i = 0; i < n; i++)
        out->data[out->n++] = b->symbol_ids[symbols[i]];
    return 0;
}

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
        l->ranks[i] = i + 1 < l->n ? rank_of(b, l->symbols[i], l->symbols[i + 1]) : no_rank;
        if (l->ranks[i] != no_rank)
            l->heap[l->n_heap++] = (uint64_t)l->ranks[i] << 32 | i;
    }
    for (size_t i = l->n_heap / 2; i-- > 0;)
        sift_down(l->heap, l->n_heap, i);
}

static void update_pair(struct list *l, const struct mb_bpe *b, uint32_t at)
{
    uint32_t right = l->next[at];

    l->ranks[at] = right < l->n ? rank_of(b, l->symbols[at], l->symbols[right]) : no_rank;
    if (l->ranks[at] != no_rank)
        push(l, l->ranks[at], at);
}

static int encode_long(const struct mb_bpe *b, struct mb_bpe_work *work, const uint8_t *piece,
                       size_t n, struct mb_ids *out)
{
    struct list l;

    if (n >= UINT32_MAX / 2 || work_reserve(work, n * 32) != 0)
        return MB_ENOMEM;
    list_make(&l, b, work->block, piece, n);
    while (l.n_heap > 0) {
        uint64_t top = pop(&l);
        uint32_t rank = (uint32_t)(top >> 32);
        uint32_t at = (uint32_t)top;
        uint32_t right;

        if (l.ranks[at] != rank)
            continue; /* the pair changed since it was pushed */
        right = l.next[at];
        l.symbols[at] = b->products[rank];
        l.ranks[right] = no_rank;
        l.next[at] = l.next[right];
        if (l.next[at] < l.n)
            l.prev[l.next[at]] = at;
        update_pair(&l, b, at);
        if (l.prev[at] < l.n)
            update_pair(&l, b, l.prev[at]);
    }
    for (uint32_t i = 0; i < l.n; i = l.next[i]) {
        if (mb_ids_reserve(out, 1) != 0)
            return MB_ENOMEM;
        out->data[out->n++] = b->symbol_ids[l.symbols[i]];
    }
    if (work->size_bytes > KEEP_BYTES)
        mb_bpe_work_close(work);
    return 0;
}

int mb_bpe_encode(const struct mb_bpe *b, struct mb_bpe_work *work, const uint8_t *piece, size_t n,
                  struct mb_ids *out)
{
    if (n <= SHORT_PIECE)
        return encode_short(b, piece, n, out);
    return encode_long(b, work, piece, n, out);
}

uint64_t mb_bpe_vocab_size(const struct mb_bpe *b)
{
    return b->vocab_size;
}

int32_t mb_bpe_eod(const struct mb_bpe *b)
{
    return b->eod;
}

int mb_bpe_decode(const struct mb_bpe *b, int32_t id, struct mb_buf *out)
{
    if (id < 0 || (uint64_t)id >= b->vocab_size)
        return MB_EINVAL;
    return mb_buf_add(out, b->text.data + b->id_text[id].start, b->id_text[id].length);
}
