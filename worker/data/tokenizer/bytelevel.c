/*
 * 1. The splitter cuts a window of text into pieces; pieces longer than a window are cut one at a
 * time, and so are those of patterns that have no scanner of windows or an engine of their own.
 * Long pieces fall into parts that no merge joins; each goes on like a piece.
 * 2. Pieces gather in groups. Each is prepared for the cache at once, which asks for its memory;
 * when the group is full all are looked up. 3. A piece that is not in the cache, or too long for
 * it, leaves a hole in the output and waits for more of its kind, also of other texts; its likes
 * share it. 4. When many wait, or the caller wants to have them, they go through the merges
 * together, what became of them is kept, and the ids behind the holes make room for theirs. The end
 * of a text is a hole of no ids: so it is known where it comes to lie.
 */
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/bpe_cuts.h"
#include "worker/data/tokenizer/bytelevel.h"
#include "worker/data/tokenizer/piece_cache.h"
#include "worker/data/tokenizer/split_masks.h"

enum { GROUP = 64, MAX_SPANS = 256, LAST_BYTES = 32 };
enum { MAX_WAITING = 511, MAX_HOLES = 2048, MAX_WAITING_BYTES = 4096, TICKETS = 512 };

struct mb_bytelevel {
    struct mb_bpe *bpe;
    struct mb_split *split;
    enum mb_split_kernel kernel;
    const struct mb_bpe_cuts *cuts;
    int tells_parts; /* a part may become other ids than a piece */
};

/* Where the ids of a waiting piece belong, or where a text ends. */
struct hole {
    size_t at;   /* in the output as it is now */
    size_t *end; /* to be told where it comes to lie; NULL: a piece */
    uint32_t piece;
};

struct waiting {
    struct mb_piece_probe probes[MAX_WAITING];
    struct mb_bpe_item items[MAX_WAITING];
    uint8_t in_long[MAX_WAITING]; /* the long table may have it */
    size_t n;
    struct hole holes[MAX_HOLES];
    size_t n_holes;
    uint16_t tickets[TICKETS]; /* by slot: a piece, + 1, that may be the same */
    struct mb_bpe_item merged[MAX_WAITING];
    uint16_t merged_of[MAX_WAITING];
    struct mb_ids ids;
};

struct mb_bytelevel_scratch {
    struct mb_piece_cache cache;
    struct waiting waiting;
    struct mb_bpe_work work;
    void *custom; /* the scratch of a custom cutter */
    void (*custom_destroy)(void *scratch);
};

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
}

int mb_bytelevel_create(struct mb_bpe *bpe, enum mb_split_family family,
                        const struct mb_split_custom *custom, struct mb_bytelevel **out,
                        struct mb_err *err)
{
    struct mb_bytelevel *b = mb_calloc(1, sizeof(*b));
    int rc;

    if (b == NULL)
        return no_memory(err);
    rc = mb_split_create(family, custom, &b->split, err);
    if (rc != 0) {
        mb_free(b);
        return rc;
    }
    b->bpe = bpe;
    b->kernel = mb_split_kernel_best();
    b->cuts = mb_bpe_cuts(bpe);
    b->tells_parts = mb_bpe_ignores_merges(bpe);
    *out = b;
    return 0;
}

void mb_bytelevel_destroy(struct mb_bytelevel *b)
{
    if (b == NULL)
        return;
    mb_bpe_destroy(b->bpe);
    mb_split_destroy(b->split);
    mb_free(b);
}

const struct mb_bpe *mb_bytelevel_bpe(const struct mb_bytelevel *b)
{
    return b->bpe;
}

enum mb_split_family mb_bytelevel_family(const struct mb_bytelevel *b)
{
    return b->split->family;
}

int mb_bytelevel_scratch_create(const struct mb_bytelevel *b, struct mb_bytelevel_scratch **out,
                                struct mb_err *err)
{
    const struct mb_split_custom *custom = &b->split->custom;
    struct mb_bytelevel_scratch *s = mb_calloc(1, sizeof(*s));
    int rc = 0;

    if (s != NULL && mb_bpe_vocab_size(b->bpe) <= 1u << 16)
        rc = mb_piece_cache_init_narrow(&s->cache);
    else if (s != NULL)
        rc = mb_piece_cache_init(&s->cache);
    if (s == NULL || rc != 0) {
        mb_free(s);
        return no_memory(err);
    }
    if (custom->scratch_create != NULL)
        rc = custom->scratch_create(custom->ctx, &s->custom, err);
    if (rc != 0) {
        mb_bytelevel_scratch_destroy(s);
        return rc;
    }
    s->custom_destroy = custom->scratch_destroy;
    *out = s;
    return 0;
}

void mb_bytelevel_scratch_destroy(struct mb_bytelevel_scratch *s)
{
    if (s == NULL)
        return;
    if (s->custom_destroy != NULL)
        s->custom_destroy(s->custom);
    mb_bpe_work_close(&s->work);
    mb_ids_close(&s->waiting.ids);
    mb_piece_cache_close(&s->cache);
    mb_free(s);
}

/* Pieces are looked up in groups: the memory of all is asked for before the first is read. */
struct group {
    struct mb_piece_probe probes[GROUP];
    size_t n;
    const uint8_t *end;              /* of the text */
    uint8_t last[GROUP][LAST_BYTES]; /* padded copies of pieces near the end of the text */
    size_t n_last;
};

void mb_bytelevel_drop(struct mb_bytelevel_scratch *s)
{
    s->waiting.n = 0;
    s->waiting.n_holes = 0;
    memset(s->waiting.tickets, 0, sizeof(s->waiting.tickets));
}

/* Those that the long table has get their ids from there, the others from their merges. */
static int encode_waiting(const struct mb_bytelevel *b, struct mb_bytelevel_scratch *s)
{
    struct waiting *w = &s->waiting;
    size_t n_merged = 0;
    size_t bytes = MB_PIECE_LONG_IDS;

    for (size_t i = 0; i < w->n; i++)
        bytes += w->items[i].n;
    w->ids.n = 0;
    if (mb_ids_reserve(&w->ids, bytes) != 0)
        return MB_ENOMEM;
    for (size_t i = 0, at = 0; i < w->n; at += w->items[i].n, i++) {
        struct mb_bpe_item *item = &w->items[i];

        item->ids = w->ids.data + at;
        item->n_ids =
            w->in_long[i] ? (uint32_t)mb_piece_find_long(&s->cache, &w->probes[i], item->ids) : 0;
        if (item->n_ids > 0)
            continue;
        w->merged_of[n_merged] = (uint16_t)i;
        w->merged[n_merged++] = *item;
    }
    if (mb_bpe_encode_many(b->bpe, &s->work, w->merged, n_merged) != 0)
        return MB_ENOMEM;
    for (size_t k = 0; k < n_merged; k++) {
        const struct mb_bpe_item *item = &w->merged[k];

        w->items[w->merged_of[k]].n_ids = item->n_ids;
        mb_piece_cache_add(&s->cache, &w->probes[w->merged_of[k]], item->ids, item->n_ids);
    }
    return 0;
}

/* From the last hole to the first, so that everything moves once. */
static int fill_holes(struct waiting *w, struct mb_ids *out)
{
    size_t from = out->n; /* what lies before it has not moved */
    size_t to = out->n;

    for (size_t i = 0; i < w->n_holes; i++)
        to += w->holes[i].end == NULL ? w->items[w->holes[i].piece].n_ids : 0;
    /* And room for a group. */
    if (mb_ids_reserve(out, to - from + GROUP * MB_PIECE_LONG_IDS) != 0)
        return MB_ENOMEM;
    out->n = to;
    for (size_t i = w->n_holes; i-- > 0;) {
        const struct hole *hole = &w->holes[i];
        const struct mb_bpe_item *item = &w->items[hole->piece];
        size_t n = from - hole->at;

        to -= n;
        memmove(out->data + to, out->data + hole->at, n * sizeof(*out->data));
        from = hole->at;
        if (hole->end != NULL) {
            *hole->end = to;
            continue;
        }
        to -= item->n_ids;
        memcpy(out->data + to, item->ids, item->n_ids * sizeof(*out->data));
    }
    return 0;
}

static int settle(const struct mb_bytelevel *b, struct mb_bytelevel_scratch *s, struct mb_ids *out)
{
    struct waiting *w = &s->waiting;

    if (w->n_holes == 0)
        return 0;
    if (encode_waiting(b, s) != 0 || fill_holes(w, out) != 0)
        return MB_ENOMEM;
    mb_bytelevel_drop(s);
    return 0;
}

int mb_bytelevel_settle(const struct mb_bytelevel *b, struct mb_bytelevel_scratch *s,
                        struct mb_ids *out, struct mb_err *err)
{
    return settle(b, s, out) == 0 ? 0 : no_memory(err);
}

int mb_bytelevel_end_text(const struct mb_bytelevel *b, struct mb_bytelevel_scratch *s,
                          struct mb_ids *out, size_t *end, struct mb_err *err)
{
    struct waiting *w = &s->waiting;

    *end = out->n;
    if (w->n_holes == 0)
        return 0;
    w->holes[w->n_holes++] = (struct hole){.at = out->n, .end = end};
    return w->n_holes == MAX_HOLES ? mb_bytelevel_settle(b, s, out, err) : 0;
}

static int is_same(const struct mb_piece_probe *a, const struct mb_piece_probe *b)
{
    size_t words = a->n <= MB_PIECE_SHORT_BYTES ? 2 : 4;

    return a->n == b->n && memcmp(a->key, b->key, words * sizeof(*a->key)) == 0;
}

/* Where another piece of the same key leaves its number; NULL for one too long for a key. */
static uint16_t *ticket_of(struct waiting *w, const struct mb_piece_probe *q)
{
    if (q->n > MB_PIECE_LONG_BYTES)
        return NULL;
    if (q->n > MB_PIECE_SHORT_BYTES)
        return &w->tickets[q->long_slot % TICKETS];
    return &w->tickets[((uintptr_t)q->line / (MB_PIECE_LINE_WORDS * sizeof(*q->line)) +
                        q->key[0] % 4) %
                       TICKETS];
}

/* The piece is not in the cache, but for the long table if it is short. */
static int wait(const struct mb_bytelevel *b, struct mb_bytelevel_scratch *s,
                const struct mb_piece_probe *q, struct mb_ids *out)
{
    struct waiting *w = &s->waiting;
    uint16_t *ticket = ticket_of(w, q);

    if (q->n > MAX_WAITING_BYTES) {
        if (settle(b, s, out) != 0 ||
            mb_bpe_encode(b->bpe, &s->work, q->piece, q->n, q->is_part, out) != 0)
            return MB_ENOMEM;
        return mb_ids_reserve(out, GROUP * MB_PIECE_LONG_IDS);
    }
    if (ticket != NULL && *ticket != 0 && is_same(&w->probes[*ticket - 1], q)) {
        w->holes[w->n_holes++] = (struct hole){.at = out->n, .piece = *ticket - 1u};
    } else {
        w->probes[w->n] = *q;
        w->in_long[w->n] =
            q->n <= MB_PIECE_SHORT_BYTES && mb_piece_ask_long(&s->cache, &w->probes[w->n]);
        w->items[w->n] = (struct mb_bpe_item){.piece = q->piece, .n = q->n, .is_part = q->is_part};
        w->holes[w->n_holes++] = (struct hole){.at = out->n, .piece = (uint32_t)w->n};
        w->n++;
        if (ticket != NULL)
            *ticket = (uint16_t)w->n;
    }
    return w->n == MAX_WAITING || w->n_holes == MAX_HOLES ? settle(b, s, out) : 0;
}

static inline __attribute__((always_inline)) int flush_as(const struct mb_bytelevel *b,
                                                          struct mb_bytelevel_scratch *s,
                                                          struct group *g, struct mb_ids *out,
                                                          int is_narrow)
{
    int32_t *to;

    if (mb_ids_reserve(out, GROUP * MB_PIECE_LONG_IDS) != 0)
        return MB_ENOMEM;
    to = out->data + out->n;
    for (size_t i = 0; i < g->n; i++) {
        const struct mb_piece_probe *q = &g->probes[i];
        size_t n = 0;

        if (q->n <= MB_PIECE_SHORT_BYTES)
            n = mb_piece_find_short_as(q, to, is_narrow);
        else if (q->n <= MB_PIECE_LONG_BYTES)
            n = mb_piece_find_long(&s->cache, q, to);
        to += n;
        if (n > 0)
            continue;
        out->n = (size_t)(to - out->data);
        if (wait(b, s, q, out) != 0)
            return MB_ENOMEM;
        to = out->data + out->n;
    }
    out->n = (size_t)(to - out->data);
    g->n = 0;
    g->n_last = 0;
    return 0;
}

static int flush(const struct mb_bytelevel *b, struct mb_bytelevel_scratch *s, struct group *g,
                 struct mb_ids *out)
{
    return s->cache.is_narrow ? flush_as(b, s, g, out, 1) : flush_as(b, s, g, out, 0);
}

/* A piece, or a part of one. */
static inline int add_part(const struct mb_bytelevel *b, struct mb_bytelevel_scratch *s,
                           struct group *g, const uint8_t *p, size_t n, int is_part,
                           struct mb_ids *out)
{
    struct mb_piece_probe *q = &g->probes[g->n++];

    if (n > MB_PIECE_LONG_BYTES) {
        q->piece = p;
        q->n = (uint32_t)n;
        q->is_part = (uint8_t)is_part;
    } else if (g->end - p >= LAST_BYTES) {
        mb_piece_prepare_as(&s->cache, q, p, n, is_part);
    } else {
        uint8_t *copy = g->last[g->n_last++];

        memcpy(copy, p, n);
        memset(copy + n, 0, LAST_BYTES - n);
        mb_piece_prepare_as(&s->cache, q, copy, n, is_part);
        q->piece = p; /* it may wait for longer than the copy lasts */
    }
    return g->n == GROUP ? flush(b, s, g, out) : 0;
}

/* A piece; a long one in parts, where it may be cut. */
static int add(const struct mb_bytelevel *b, struct mb_bytelevel_scratch *s, struct group *g,
               const uint8_t *p, size_t n, struct mb_ids *out)
{
    size_t part;
    int is_part = 0;

    while (n > MB_PIECE_SHORT_BYTES && (part = mb_bpe_first_part(b->cuts, p, n)) < n) {
        is_part = b->tells_parts;
        if (add_part(b, s, g, p, part, is_part, out) != 0)
            return MB_ENOMEM;
        p += part;
        n -= part;
    }
    return add_part(b, s, g, p, n, is_part, out);
}

static int add_custom(const struct mb_bytelevel *b, struct mb_bytelevel_scratch *s, struct group *g,
                      const uint8_t *text, size_t n, struct mb_ids *out, struct mb_err *err)
{
    const struct mb_split_custom *custom = &b->split->custom;
    struct mb_span spans[MAX_SPANS];
    size_t next = 0;

    while (next < n) {
        size_t count = 0;
        int rc = custom->cut(custom->ctx, s->custom, text, n, next, spans, MAX_SPANS, &count, &next,
                             err);

        if (rc != 0)
            return rc;
        for (size_t i = 0; i < count; i++) {
            if (add(b, s, g, text + spans[i].start, spans[i].end - spans[i].start, out) != 0)
                return no_memory(err);
        }
    }
    return 0;
}

/* One piece at a time. */
static int add_pieces(const struct mb_bytelevel *b, struct mb_bytelevel_scratch *s, struct group *g,
                      const uint8_t *p, struct mb_ids *out)
{
    while (p < g->end) {
        const uint8_t *next = mb_split_next(b->split, p, g->end);

        if (add(b, s, g, p, (size_t)(next - p), out) != 0)
            return MB_ENOMEM;
        p = next;
    }
    return 0;
}

/* Short pieces of a window at p, from number `first` up to `stop`, that end before the last bytes
 * of the text, so that none needs a padded copy. Returns the number of the first that is not short.
 */
static size_t prepare_short(const struct mb_bytelevel_scratch *s, struct group *g, const uint8_t *p,
                            const uint16_t *ends, size_t first, size_t stop)
{
    size_t at = first > 0 ? ends[first - 1] : 0;
    struct mb_piece_probe *q = g->probes + g->n;
    size_t i;

    for (i = first; i < stop; i++, q++) {
        size_t n = ends[i] - at;

        if (n > MB_PIECE_SHORT_BYTES)
            break;
        mb_piece_prepare(&s->cache, q, p + at, n);
        at = ends[i];
    }
    g->n += i - first;
    return i;
}

static int add_window(const struct mb_bytelevel *b, struct mb_bytelevel_scratch *s, struct group *g,
                      const uint8_t *p, const uint16_t *ends, size_t count, struct mb_ids *out)
{
    size_t far = count; /* as many end before the last bytes of the text */
    size_t i = 0;

    while (far > 0 && g->end - (p + ends[far - 1]) < LAST_BYTES)
        far--;
    while (i < count) {
        size_t room = GROUP - g->n;
        size_t at;

        if (i < far)
            i = prepare_short(s, g, p, ends, i, far - i < room ? far : i + room);
        if (g->n == GROUP) {
            if (flush(b, s, g, out) != 0)
                return MB_ENOMEM;
            continue;
        }
        if (i == count)
            break;
        at = i > 0 ? ends[i - 1] : 0;
        if (add(b, s, g, p + at, ends[i] - at, out) != 0)
            return MB_ENOMEM;
        i++;
    }
    return 0;
}

static int add_windows(const struct mb_bytelevel *b, struct mb_bytelevel_scratch *s,
                       struct group *g, const uint8_t *p, struct mb_ids *out)
{
    uint16_t ends[MB_WINDOW_ENDS];

    while (p < g->end) {
        size_t count = mb_split_block(b->split, b->kernel, p, g->end, ends);

        if (count == 0) {
            const uint8_t *next = mb_split_next(b->split, p, g->end);

            if (add(b, s, g, p, (size_t)(next - p), out) != 0 || flush(b, s, g, out) != 0)
                return MB_ENOMEM;
            p = next;
            continue;
        }
        if (add_window(b, s, g, p, ends, count, out) != 0)
            return MB_ENOMEM;
        p += ends[count - 1];
    }
    return 0;
}

int mb_bytelevel_encode(const struct mb_bytelevel *b, struct mb_bytelevel_scratch *s,
                        const uint8_t *text, size_t n, struct mb_ids *out, struct mb_err *err)
{
    struct group g;
    int rc = 0;

    if (n == 0)
        return 0;
    if (n > INT32_MAX)
        return mb_err_set(err, MB_EINVAL, "a text of %zu bytes is longer than 2 GiB", n);
    g.n = 0;
    g.n_last = 0;
    g.end = text + n;
    if (b->split->family == MB_SPLIT_REGEX) {
        rc = add_custom(b, s, &g, text, n, out, err);
        if (rc != 0)
            return rc;
    } else if (mb_split_has_block(b->split->family)) {
        rc = add_windows(b, s, &g, text, out);
    } else {
        rc = add_pieces(b, s, &g, text, out);
    }
    if (rc == 0)
        rc = flush(b, s, &g, out);
    return rc == 0 ? 0 : no_memory(err);
}

int mb_bytelevel_decode(const struct mb_bytelevel *b, const int32_t *ids, size_t n,
                        struct mb_buf *out, struct mb_err *err)
{
    for (size_t i = 0; i < n; i++) {
        int rc = mb_bpe_decode(b->bpe, ids[i], out);

        if (rc == MB_EINVAL)
            return mb_err_set(err, rc, "token id %d is outside the vocabulary", (int)ids[i]);
        if (rc != 0)
            return no_memory(err);
    }
    return 0;
}
