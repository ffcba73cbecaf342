/*
 * The stages of a pre_tokenizer as one cutter.
 *
 * 1. The text is taken run by run of valid UTF-8; a byte that is none is a piece of its own.
 * 2. The first stage cuts a run piece by piece; each piece goes through the stages behind it,
 * whole, and what comes out waits in a list until the caller has room.
 * 3. A stage sees matches and the gaps between them; its behavior says how they become pieces.
 * The state between two calls is in the scratch; it counts for one text, from its start on.
 */
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/hf_private.h"
#include "worker/data/tokenizer/utf8.h"

struct element {
    size_t start;
    size_t end;
    int is_match;
};

/* One stage on one text; all offsets are in that text. */
struct walk {
    const struct mb_hf_stage *stage;
    struct mb_split_regex_work *work;
    struct mb_split_walk matches;
    size_t gap;             /* where what is not matched yet begins */
    struct element waiting; /* a match behind a gap that was given first */
    struct element pending; /* a piece that may still grow */
    int has_waiting;
    int has_pending;
    int last_was_match;
};

struct scratch {
    struct mb_split_regex_work *work;
    struct mb_span *list; /* pieces that are ready, from list_at on */
    size_t n_list;
    size_t list_at;
    size_t cap;
    struct walk first; /* of the run in hand */
    size_t run_start;
    size_t run_end;
    size_t at; /* what is before it has been cut */
    int in_run;
};

static int scratch_create(const void *ctx, void **out, struct mb_err *err)
{
    struct scratch *s = mb_calloc(1, sizeof(*s));
    int rc;

    (void)ctx;
    if (s == NULL)
        return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
    rc = mb_split_regex_work_create(&s->work, err);
    if (rc != 0)
        mb_free(s);
    else
        *out = s;
    return rc;
}

static void scratch_destroy(void *scratch)
{
    struct scratch *s = scratch;

    if (s == NULL)
        return;
    mb_split_regex_work_destroy(s->work);
    mb_free(s->list);
    mb_free(s);
}

static struct walk walk_of(const struct mb_hf_stage *stage, struct mb_split_regex_work *work,
                           const uint8_t *text, size_t n)
{
    return (struct walk){.stage = stage, .work = work, .matches = {.text = text, .n = n}};
}

/* The next match or gap: 1, 0 when there is none, negative for an error. */
static int next_element(struct walk *w, struct element *out, struct mb_err *err)
{
    size_t start, end;
    int rc;

    if (w->has_waiting) {
        *out = w->waiting;
        w->has_waiting = 0;
        return 1;
    }
    if (w->stage->regex == NULL) {
        const uint8_t *text = w->matches.text;
        if (w->gap == w->matches.n)
            return 0;
        end = (size_t)(mb_split_next(w->stage->split, text + w->gap, text + w->matches.n) - text);
        *out = (struct element){w->gap, end, 1};
        w->gap = end;
        return 1;
    }
    rc = mb_split_regex_next(w->stage->regex, w->work, &w->matches, &start, &end, err);
    if (rc < 0)
        return rc;
    if (rc == 0) {
        *out = (struct element){w->gap, w->matches.n, w->stage->invert};
        w->gap = w->matches.n;
        return out->end > out->start;
    }
    *out = (struct element){start, end, !w->stage->invert};
    if (start > w->gap) {
        w->waiting = *out;
        w->has_waiting = 1;
        *out = (struct element){w->gap, start, w->stage->invert};
    }
    w->gap = end;
    return 1;
}

/* Takes an element in: 1 and *piece when that ends one. */
static int take(struct walk *w, const struct element *e, struct element *piece)
{
    int joins = 0, had = w->has_pending;

    switch (w->stage->behavior) {
    case MB_HF_ISOLATED:
        *piece = *e;
        return 1;
    case MB_HF_REMOVED:
        *piece = *e;
        return !e->is_match;
    case MB_HF_CONTIGUOUS:
        joins = had && e->is_match == w->pending.is_match;
        break;
    case MB_HF_MERGED_WITH_PREVIOUS:
        joins = had && e->is_match && !w->last_was_match;
        w->last_was_match = e->is_match;
        break;
    case MB_HF_MERGED_WITH_NEXT:
        joins = had && !e->is_match && w->pending.is_match;
        break;
    }
    if (joins) {
        w->pending.end = e->end;
        if (w->stage->behavior == MB_HF_MERGED_WITH_NEXT)
            w->pending.is_match = 0;
        return 0;
    }
    *piece = w->pending;
    w->pending = *e;
    w->has_pending = 1;
    return had;
}

/* The next piece, not empty: 1, 0 when there is none, negative for an error. */
static int next_piece(struct walk *w, struct element *piece, struct mb_err *err)
{
    struct element e;
    int rc;

    while ((rc = next_element(w, &e, err)) == 1)
        if (take(w, &e, piece) && piece->end > piece->start)
            return 1;
    if (rc < 0 || !w->has_pending)
        return rc;
    *piece = w->pending;
    w->has_pending = 0;
    return piece->end > piece->start;
}

static int add_span(struct scratch *s, size_t start, size_t end, struct mb_err *err)
{
    if (s->n_list == s->cap) {
        size_t cap = s->cap > 0 ? 2 * s->cap : 256;
        struct mb_span *list = mb_reallocarray(s->list, cap, sizeof(*list));
        if (list == NULL)
            return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
        s->list = list;
        s->cap = cap;
    }
    s->list[s->n_list++] = (struct mb_span){start, end};
    return 0;
}

/* text[start, end) through the stages from k on. */
static int cut_further(const struct mb_hf_parts *p, struct scratch *s, size_t k,
                       const uint8_t *text, size_t start, size_t end, struct mb_err *err)
{
    struct walk w;
    struct element piece;
    int rc;

    if (k == p->n_stages)
        return add_span(s, start, end, err);
    w = walk_of(&p->stages[k], s->work, text + start, end - start);
    while ((rc = next_piece(&w, &piece, err)) == 1) {
        rc = cut_further(p, s, k + 1, text, start + piece.start, start + piece.end, err);
        if (rc != 0)
            return rc;
    }
    return rc;
}

/* End of the valid UTF-8 that begins at `at`. */
static size_t valid_end(const uint8_t *text, size_t at, size_t n)
{
    while (at < n) {
        uint32_t c;
        uint64_t word;
        size_t length;

        while (n - at >= 8 && (memcpy(&word, text + at, 8), (word & 0x8080808080808080u) == 0))
            at += 8;
        if (at == n)
            break;
        length = mb_utf8_decode(text + at, text + n, &c);
        if (length == 0)
            break;
        at += length;
    }
    return at;
}

/* Fills the list again, with nothing at the end of a run. */
static int fill(const struct mb_hf_parts *p, struct scratch *s, const uint8_t *text, size_t n,
                struct mb_err *err)
{
    struct element piece;
    int rc;

    s->n_list = s->list_at = 0;
    if (!s->in_run) {
        s->run_start = s->at;
        s->run_end = valid_end(text, s->at, n);
        if (s->run_end == s->run_start) {
            s->at++;
            return add_span(s, s->run_start, s->at, err);
        }
        s->first = walk_of(&p->stages[0], s->work, text + s->run_start, s->run_end - s->run_start);
        s->in_run = 1;
    }
    rc = next_piece(&s->first, &piece, err);
    if (rc == 0) {
        s->in_run = 0;
        s->at = s->run_end;
    }
    if (rc != 1)
        return rc;
    s->at = s->run_start + piece.end;
    return cut_further(p, s, 1, text, s->run_start + piece.start, s->run_start + piece.end, err);
}

static int cut(const void *ctx, void *scratch, const uint8_t *text, size_t n, size_t from,
               struct mb_span *out, size_t max, size_t *n_out, size_t *next, struct mb_err *err)
{
    const struct mb_hf_parts *p = ctx;
    struct scratch *s = scratch;
    size_t count = 0;

    if (from == 0) {
        s->n_list = s->list_at = s->at = 0;
        s->in_run = 0;
    }
    while (count < max) {
        if (s->list_at < s->n_list) {
            out[count++] = s->list[s->list_at++];
            continue;
        }
        if (s->at == n && !s->in_run)
            break;
        int rc = fill(p, s, text, n, err);
        if (rc != 0)
            return rc;
    }
    *n_out = count;
    *next = n; /* else behind what was given, which is not the end yet */
    if (s->list_at < s->n_list || s->in_run || s->at < n)
        *next = out[count - 1].end < n ? out[count - 1].end : n - 1;
    return 0;
}

static void keep(void *ctx)
{
    (void)ctx;
}

void mb_hf_parts_cutter(const struct mb_hf_parts *p, struct mb_split_custom *out)
{
    *out = (struct mb_split_custom){
        .ctx = (void *)(uintptr_t)p,
        .scratch_create = scratch_create,
        .scratch_destroy = scratch_destroy,
        .cut = cut,
        .destroy = keep,
    };
}
