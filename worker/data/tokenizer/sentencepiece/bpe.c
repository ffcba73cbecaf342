/*
 * BPE on one part of a text.
 *
 * 1. The part becomes symbols: a user-defined piece where one begins (the longest), else one
 * character. 2. The neighbours whose joined text is the piece with the highest score, the leftmost
 * of equals, become that piece, until no neighbours make one. Up to SHORT_PART symbols are searched
 * linearly; more of them go through a heap of (priority, position) over a linked list: n log n.
 * 3. Each symbol gives its id; a character that is no piece gives its bytes, or the unknown id.
 * 4. Models with unused pieces: such a piece is undone at the end into the two that last were found
 * to make it anywhere in the text; so the text is then one part. Only memory can run out.
 */
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/sentencepiece/private.h"

enum {
    SHORT_PART = 64,
    KEEP_BYTES = 4 << 20,
    MAX_UNDONE = 100, /* nested unused pieces that are undone, as in SentencePiece 0.2.3 */
    BYTES_PER_SYMBOL = 36
};

int mb_spm_work_reserve(struct mb_spm_work *work, size_t size_bytes)
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

void mb_spm_work_trim(struct mb_spm_work *work)
{
    if (work->size_bytes <= KEEP_BYTES)
        return;
    mb_free(work->block);
    *work = (struct mb_spm_work){0};
}

int mb_spm_emit_unknown(const struct mb_spm *m, uint32_t c, int after_unknown, struct mb_ids *out)
{
    uint8_t bytes[4];
    size_t n;

    if (mb_ids_reserve(out, sizeof(bytes)) != 0)
        return MB_ENOMEM;
    if (!m->model.byte_fallback) {
        if (!after_unknown)
            out->data[out->n++] = m->unk;
        return 0;
    }
    n = mb_utf8_encode(c == ' ' && m->folds_space ? MB_SPM_SPACE : c, bytes);
    for (size_t i = 0; i < n; i++)
        out->data[out->n++] = m->byte_ids[bytes[i]];
    return 0;
}

/* The longest user-defined piece at p, -1 if none begins there. U+2581 may stand for ' '. */
static int32_t match_user(const struct mb_spm *m, const uint8_t *p, const uint8_t *end,
                          const uint8_t **next)
{
    static const uint8_t space_symbol[3] = {0xe2, 0x96, 0x81};
    const struct mb_spm_trie *t = &m->user;
    uint32_t node = MB_SPM_TRIE_ROOT;
    int32_t found = -1;
    int n_matches = 0;

    if (t->slots == NULL)
        return -1;
    while (p < end && n_matches < 64) { /* SentencePiece looks at 64 */
        uint8_t byte = *p;
        size_t n = 1;
        if (m->folds_space && end - p >= 3 && memcmp(p, space_symbol, 3) == 0) {
            byte = ' ';
            n = 3;
        }
        node = mb_spm_trie_step(t, node, byte);
        if (node == MB_SPM_TRIE_NO_NODE)
            break;
        p += n;
        if (t->values[node] >= 0) {
            found = t->values[node];
            *next = p;
            n_matches++;
        }
    }
    return found;
}

/* Symbols of n bytes, at most n of them; chars has the character, for those that are none. */
static size_t make_symbols(const struct mb_spm *m, const uint8_t *p, size_t n, uint32_t *symbols,
                           uint32_t *chars)
{
    const uint8_t *end = p + n;
    size_t count = 0;

    while (p < end) {
        int32_t user = match_user(m, p, end, &p);
        chars[count] = 0;
        if (user >= 0) {
            symbols[count++] = (uint32_t)user;
            continue;
        }
        chars[count] = mb_spm_next_char(m, &p, end);
        symbols[count] = mb_spm_char_symbol(m, chars[count]);
        count++;
    }
    return count;
}

/* The piece that two symbols make, MB_SPM_NO_SYMBOL if none. */
static inline uint32_t product_of(const struct mb_spm *m, uint32_t left, uint32_t right)
{
    uint64_t pair = (uint64_t)left << MB_SPM_SYMBOL_BITS | right;

    for (size_t i = mb_spm_slot(&m->pairs, pair);; i = (i + 1) & m->pairs.mask) {
        uint64_t slot = m->pairs.slots[i];
        if (slot == MB_SPM_NO_SLOT)
            return MB_SPM_NO_SYMBOL;
        if (slot >> MB_SPM_PRODUCT_BITS == pair)
            return (uint32_t)slot & ((1u << MB_SPM_PRODUCT_BITS) - 1);
    }
}

struct emitter {
    const struct mb_spm *m;
    const uint64_t *splits;
    struct mb_ids *out;
    int after_unknown;
};

static int emit_one(struct emitter *e, uint32_t symbol, uint32_t c)
{
    int32_t id = symbol == MB_SPM_NO_SYMBOL ? e->m->unk : e->m->symbol_ids[symbol];

    if (id == e->m->unk) {
        int rc = mb_spm_emit_unknown(e->m, c, e->after_unknown, e->out);
        e->after_unknown = 1;
        return rc;
    }
    e->after_unknown = 0;
    if (mb_ids_reserve(e->out, 1) != 0)
        return MB_ENOMEM;
    e->out->data[e->out->n++] = id;
    return 0;
}

/* An unused piece that no merge made is unknown. */
static int emit_unmade(struct emitter *e, const struct mb_spm_piece *piece)
{
    const uint8_t *p = piece->text.p;
    const uint8_t *end = p + piece->text.n;
    int rc = 0;

    while (rc == 0 && p < end) {
        rc = mb_spm_emit_unknown(e->m, mb_spm_next_char(e->m, &p, end), e->after_unknown, e->out);
        e->after_unknown = 1;
    }
    return rc;
}

/* An unused piece as what made it; recursion is bounded by MAX_UNDONE, where SentencePiece lets the
 * piece stand. */
static int emit(struct emitter *e, uint32_t symbol, uint32_t c, int depth)
{
    uint32_t n_pieces = (uint32_t)e->m->model.n_pieces;
    uint64_t split;
    int rc;

    if (symbol >= n_pieces && symbol != MB_SPM_NO_SYMBOL)
        return emit_one(e, symbol, e->m->extra_chars[symbol - n_pieces]);
    if (e->splits == NULL || symbol == MB_SPM_NO_SYMBOL || depth > MAX_UNDONE ||
        e->m->model.pieces[symbol].type != MB_SPM_UNUSED)
        return emit_one(e, symbol, c);
    split = e->splits[symbol];
    if (split == MB_SPM_NO_SPLIT)
        return emit_unmade(e, &e->m->model.pieces[symbol]);
    rc = emit(e, (uint32_t)(split >> 32), 0, depth + 1);
    return rc == 0 ? emit(e, (uint32_t)split, 0, depth + 1) : rc;
}

/* A short part: which symbols are still there is a bit each, so that nothing moves. */
struct short_part {
    const struct mb_spm *m;
    uint32_t symbols[SHORT_PART], chars[SHORT_PART];
    uint32_t products[SHORT_PART], prios[SHORT_PART]; /* of the pair that begins here */
    uint64_t alive;
};

static inline void look_up(struct short_part *s, unsigned left, unsigned right)
{
    s->products[left] = product_of(s->m, s->symbols[left], s->symbols[right]);
    s->prios[left] =
        s->products[left] != MB_SPM_NO_SYMBOL ? s->m->prios[s->products[left]] : MB_SPM_NO_PRIO;
}

/* Merge the pair at `at`. */
static inline void merge(struct short_part *s, unsigned at)
{
    uint64_t behind = s->alive & ~(((uint64_t)2 << at) - 1);
    uint64_t ahead = s->alive & (((uint64_t)1 << at) - 1);
    unsigned right = (unsigned)__builtin_ctzll(behind);

    s->symbols[at] = s->products[at];
    s->prios[right] = MB_SPM_NO_PRIO;
    s->alive &= ~((uint64_t)1 << right);
    behind &= behind - 1;
    s->prios[at] = MB_SPM_NO_PRIO;
    if (behind != 0)
        look_up(s, at, (unsigned)__builtin_ctzll(behind));
    if (ahead != 0)
        look_up(s, 63 - (unsigned)__builtin_clzll(ahead), at);
}

static int encode_short(const struct mb_spm *m, const uint8_t *p, size_t n_bytes,
                        struct mb_ids *out)
{
    struct short_part s;
    struct emitter e = {.m = m, .out = out};
    size_t n;
    int rc = 0;

    s.m = m;
    n = make_symbols(m, p, n_bytes, s.symbols, s.chars);
    s.alive = n < 64 ? ((uint64_t)1 << n) - 1 : UINT64_MAX;
    for (unsigned i = 0; i + 1 < n; i++)
        look_up(&s, i, i + 1);
    for (;;) {
        uint32_t lowest = MB_SPM_NO_PRIO;
        unsigned at = 0;

        for (unsigned i = 0; i + 1 < n; i++) {
            if (s.prios[i] < lowest) {
                lowest = s.prios[i];
                at = i;
            }
        }
        if (lowest == MB_SPM_NO_PRIO)
            break;
        merge(&s, at);
    }
    for (uint64_t left = s.alive; rc == 0 && left != 0; left &= left - 1) {
        unsigned i = (unsigned)__builtin_ctzll(left);
        rc = emit_one(&e, s.symbols[i], s.chars[i]);
    }
    return rc;
}

/* The part as a linked list; all arrays have one entry per symbol. */
struct list {
    const struct mb_spm *m;
    uint64_t *splits;
    uint64_t *heap; /* priority << 32 | position, two entries per symbol */
    size_t n_heap;
    uint32_t *symbols;
    uint32_t *chars;
    uint32_t *products; /* of the pair that begins here; MB_SPM_NO_SYMBOL also when merged away */
    uint32_t *next;     /* n at the end */
    uint32_t *prev;     /* n at the start */
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

static void push(struct list *l, uint64_t entry)
{
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

/* Look up the pair at `at`; nonzero if it makes a piece. */
static int find_pair(struct list *l, uint32_t at)
{
    uint32_t right = l->next[at];

    l->products[at] =
        right < l->n ? product_of(l->m, l->symbols[at], l->symbols[right]) : MB_SPM_NO_SYMBOL;
    if (l->products[at] == MB_SPM_NO_SYMBOL)
        return 0;
    if (l->splits != NULL)
        l->splits[l->products[at]] = (uint64_t)l->symbols[at] << 32 | l->symbols[right];
    return 1;
}

static uint64_t heap_entry(const struct list *l, uint32_t at)
{
    return (uint64_t)l->m->prios[l->products[at]] << 32 | at;
}

static void merge_all(struct list *l)
{
    while (l->n_heap > 0) {
        uint64_t top = pop(l);
        uint32_t at = (uint32_t)top;
        uint32_t right;

        if (l->products[at] == MB_SPM_NO_SYMBOL || heap_entry(l, at) != top)
            continue; /* the pair changed since it was pushed */
        right = l->next[at];
        l->symbols[at] = l->products[at];
        l->products[right] = MB_SPM_NO_SYMBOL;
        l->next[at] = l->next[right];
        if (l->next[at] < l->n)
            l->prev[l->next[at]] = at;
        /* The left one first: the order in which splits are noted is SentencePiece's. */
        if (l->prev[at] < l->n && find_pair(l, l->prev[at]))
            push(l, heap_entry(l, l->prev[at]));
        if (find_pair(l, at))
            push(l, heap_entry(l, at));
    }
}

static int encode_long(const struct mb_spm *m, struct mb_spm_scratch *s, const uint8_t *p,
                       size_t n_bytes, struct mb_ids *out)
{
    struct list l = {.m = m, .splits = s->splits};
    struct emitter e = {.m = m, .splits = s->splits, .out = out};
    int rc = 0;

    if (n_bytes >= UINT32_MAX / 2 || mb_spm_work_reserve(&s->work, n_bytes * BYTES_PER_SYMBOL) != 0)
        return MB_ENOMEM;
    l.heap = s->work.block;
    l.symbols = (uint32_t *)(l.heap + 2 * n_bytes);
    l.chars = l.symbols + n_bytes;
    l.products = l.chars + n_bytes;
    l.next = l.products + n_bytes;
    l.prev = l.next + n_bytes;
    l.n = (uint32_t)make_symbols(m, p, n_bytes, l.symbols, l.chars);
    for (uint32_t i = 0; i < l.n; i++) {
        l.next[i] = i + 1;
        l.prev[i] = i > 0 ? i - 1 : l.n;
        if (find_pair(&l, i))
            l.heap[l.n_heap++] = heap_entry(&l, i);
    }
    for (size_t i = l.n_heap / 2; i-- > 0;)
        sift_down(l.heap, l.n_heap, i);
    merge_all(&l);
    for (uint32_t i = 0; rc == 0 && i < l.n; i = l.next[i])
        rc = emit(&e, l.symbols[i], l.chars[i], 0);
    mb_spm_work_trim(&s->work);
    return rc;
}

int mb_spm_bpe_encode(const struct mb_spm *m, struct mb_spm_scratch *s, const uint8_t *p, size_t n,
                      struct mb_ids *out)
{
    if (n <= SHORT_PART && !m->has_unused)
        return encode_short(m, p, n, out);
    return encode_long(m, s, p, n, out);
}
