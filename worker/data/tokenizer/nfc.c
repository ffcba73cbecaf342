/*
 * 1. A character that neither composes with what stands before it, nor moves, nor is itself
 *    replaced is a boundary: what stands on its two sides can be normalised apart. Nearly all
 *    characters are boundaries, and a text of nothing else is in normal form (the bit map says so).
 * 2. Elsewhere the run from the boundary before to the boundary after is decomposed, its combining
 *    characters are ordered by class (counted, so that a long run stays linear), and what composes
 *    is composed.
 * Bytes that are no UTF-8 are boundaries and stay. Only memory can run out; the caller drops what
 * was appended.
 */
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/nfc.h"
#include "worker/data/tokenizer/nfc_private.h"
#include "worker/data/tokenizer/utf8.h"

enum {
    POINTS = 0x110000,
    /* Hangul, Unicode 3.12: syllables are counted from leading, vowel and trailing parts. */
    S_BASE = 0xac00,
    L_BASE = 0x1100,
    V_BASE = 0x1161,
    T_BASE = 0x11a7,
    L_COUNT = 19,
    V_COUNT = 21,
    T_COUNT = 28,
    S_COUNT = L_COUNT * V_COUNT * T_COUNT,
    BAD_BYTE = 0x80000000 >> 1 /* a byte that is no UTF-8, in a run */
};

struct mb_nfc {
    uint64_t inside[POINTS / 64];  /* 1: no boundary */
    uint8_t class_at[POINTS >> 8]; /* row of classes + 1 of 256 characters; 0: all are 0 */
    uint8_t (*classes)[256];
    struct mb_nfc_pair *by_parts; /* mb_nfc_pairs, ascending by (first, second) */
};

static void set_inside(struct mb_nfc *nfc, uint32_t c)
{
    nfc->inside[c >> 6] |= (uint64_t)1 << (c & 63);
}

static inline int is_inside(const struct mb_nfc *nfc, uint32_t c)
{
    return (int)(nfc->inside[c >> 6] >> (c & 63) & 1);
}

static int order_by_parts(const void *a, const void *b)
{
    const struct mb_nfc_pair *x = a, *y = b;

    if (x->first != y->first)
        return x->first < y->first ? -1 : 1;
    return x->second < y->second ? -1 : x->second > y->second;
}

static int order_by_whole(const void *a, const void *b)
{
    const struct mb_nfc_pair *x = a, *y = b;

    return x->whole < y->whole ? -1 : x->whole > y->whole;
}

static int make_classes(struct mb_nfc *nfc)
{
    unsigned n = 0;

    for (size_t i = 0; i < mb_nfc_n_classes; i++) {
        const struct mb_nfc_class *k = &mb_nfc_classes[i];
        for (uint32_t c = k->first; c <= k->last; c++)
            if (nfc->class_at[c >> 8] == 0)
                nfc->class_at[c >> 8] = (uint8_t)++n;
    }
    nfc->classes = mb_calloc(n, sizeof(*nfc->classes));
    if (nfc->classes == NULL)
        return MB_ENOMEM;
    for (size_t i = 0; i < mb_nfc_n_classes; i++) {
        const struct mb_nfc_class *k = &mb_nfc_classes[i];
        for (uint32_t c = k->first; c <= k->last; c++) {
            nfc->classes[nfc->class_at[c >> 8] - 1][c & 255] = k->combining;
            set_inside(nfc, c);
        }
    }
    return 0;
}

int mb_nfc_create(struct mb_nfc **out, struct mb_err *err)
{
    struct mb_nfc *nfc = mb_calloc(1, sizeof(*nfc));

    if (nfc != NULL)
        nfc->by_parts = mb_reallocarray(NULL, mb_nfc_n_pairs, sizeof(*nfc->by_parts));
    if (nfc == NULL || nfc->by_parts == NULL || make_classes(nfc) != 0) {
        mb_nfc_destroy(nfc);
        return mb_err_set(err, MB_ENOMEM, "normalizer NFC: out of memory");
    }
    memcpy(nfc->by_parts, mb_nfc_pairs, mb_nfc_n_pairs * sizeof(*mb_nfc_pairs));
    qsort(nfc->by_parts, mb_nfc_n_pairs, sizeof(*nfc->by_parts), order_by_parts);
    for (size_t i = 0; i < mb_nfc_n_pairs; i++)
        set_inside(nfc, mb_nfc_pairs[i].second);
    for (size_t i = 0; i < mb_nfc_n_splits; i++)
        set_inside(nfc, mb_nfc_splits[i].whole);
    for (uint32_t i = 0; i < V_COUNT; i++)
        set_inside(nfc, V_BASE + i);
    for (uint32_t i = 1; i < T_COUNT; i++)
        set_inside(nfc, T_BASE + i);
    *out = nfc;
    return 0;
}

void mb_nfc_destroy(struct mb_nfc *nfc)
{
    if (nfc == NULL)
        return;
    mb_free(nfc->by_parts);
    mb_free(nfc->classes);
    mb_free(nfc);
}

void mb_nfc_work_close(struct mb_nfc_work *work)
{
    mb_free(work->points);
    mb_free(work->classes);
    *work = (struct mb_nfc_work){0};
}

static inline uint8_t class_of(const struct mb_nfc *nfc, uint32_t c)
{
    unsigned row = c < POINTS ? nfc->class_at[c >> 8] : 0;

    return row > 0 ? nfc->classes[row - 1][c & 255] : 0;
}

/* Offset of the first character from `at` on that is no boundary, and in *boundary that of the
 * boundary before it (`at` if there is none). */
static size_t find_inside(const struct mb_nfc *nfc, const uint8_t *text, size_t at, size_t n,
                          size_t *boundary)
{
    const uint8_t *end = text + n;
    size_t last = at;

    while (at < n) {
        uint64_t word;
        uint32_t c;
        size_t length;

        if (text[at] < 0x80) {
            while (n - at >= 8 && (memcpy(&word, text + at, 8), (word & 0x8080808080808080u) == 0))
                at += 8;
            while (at < n && text[at] < 0x80)
                at++;
            last = at - 1;
            continue;
        }
        length = mb_utf8_decode(text + at, end, &c);
        if (length > 0 && is_inside(nfc, c))
            break;
        last = at;
        at += length > 0 ? length : 1;
    }
    *boundary = last;
    return at;
}

size_t mb_nfc_first_change(const struct mb_nfc *nfc, const uint8_t *text, size_t n)
{
    size_t boundary;
    size_t at = find_inside(nfc, text, 0, n, &boundary);

    return at < n ? boundary : n;
}

static int push(struct mb_nfc_work *w, uint32_t c, uint8_t combining)
{
    if (w->n == w->cap) {
        size_t cap = w->cap > 0 ? 2 * w->cap : 64;
        uint32_t *points = mb_reallocarray(w->points, 2 * cap, sizeof(*points));
        uint8_t *classes;

        if (points == NULL)
            return MB_ENOMEM;
        w->points = points;
        classes = mb_reallocarray(w->classes, 2 * cap, sizeof(*classes));
        if (classes == NULL)
            return MB_ENOMEM;
        w->classes = classes;
        w->cap = cap;
    }
    w->points[w->n] = c;
    w->classes[w->n++] = combining;
    return 0;
}

static const struct mb_nfc_pair *split_of(uint32_t c)
{
    struct mb_nfc_pair key = {.whole = c};
    const struct mb_nfc_pair *found =
        bsearch(&key, mb_nfc_pairs, mb_nfc_n_pairs, sizeof(key), order_by_whole);

    return found != NULL
               ? found
               : bsearch(&key, mb_nfc_splits, mb_nfc_n_splits, sizeof(key), order_by_whole);
}

/* The full decomposition: what a first part gives is at most a few steps deep. */
static int decompose(const struct mb_nfc *nfc, struct mb_nfc_work *w, uint32_t c)
{
    const struct mb_nfc_pair *pair;

    if (c - S_BASE < S_COUNT) {
        uint32_t i = c - S_BASE;
        uint32_t trailing = i % T_COUNT;
        int rc = push(w, L_BASE + i / (V_COUNT * T_COUNT), 0);
        if (rc == 0)
            rc = push(w, V_BASE + i % (V_COUNT * T_COUNT) / T_COUNT, 0);
        return rc == 0 && trailing > 0 ? push(w, T_BASE + trailing, 0) : rc;
    }
    pair = c >= 0xc0 && c < POINTS ? split_of(c) : NULL;
    if (pair == NULL)
        return push(w, c, class_of(nfc, c));
    int rc = decompose(nfc, w, pair->first);
    return rc == 0 && pair->second != 0 ? decompose(nfc, w, pair->second) : rc;
}

/* Orders the n > 1 combining characters from `at` on by class; equal ones keep their order. */
static void order_marks(struct mb_nfc_work *w, size_t at, size_t n)
{
    size_t starts[256] = {0};
    size_t sum = 0;
    uint32_t *points = w->points + w->cap; /* the second half is for this */
    uint8_t *classes = w->classes + w->cap;

    for (size_t i = at; i < at + n; i++)
        starts[w->classes[i]]++;
    for (size_t k = 0; k < 256; k++) {
        size_t count = starts[k];
        starts[k] = sum;
        sum += count;
    }
    for (size_t i = at; i < at + n; i++) {
        size_t to = starts[w->classes[i]]++;
        points[to] = w->points[i];
        classes[to] = w->classes[i];
    }
    memcpy(w->points + at, points, n * sizeof(*points));
    memcpy(w->classes + at, classes, n);
}

static void order_run(struct mb_nfc_work *w)
{
    for (size_t i = 0; i < w->n;) {
        size_t first = i;
        int ordered = 1;

        while (i < w->n && w->classes[i] != 0) {
            if (i > first && w->classes[i] < w->classes[i - 1])
                ordered = 0;
            i++;
        }
        if (!ordered)
            order_marks(w, first, i - first);
        if (i == first)
            i++;
    }
}

/* The character that two make, 0 if none. */
static uint32_t compose_two(const struct mb_nfc *nfc, uint32_t first, uint32_t second)
{
    struct mb_nfc_pair key = {.first = first, .second = second};
    const struct mb_nfc_pair *found;

    if (first - L_BASE < L_COUNT && second - V_BASE < V_COUNT)
        return S_BASE + ((first - L_BASE) * V_COUNT + (second - V_BASE)) * T_COUNT;
    if (first - S_BASE < S_COUNT && (first - S_BASE) % T_COUNT == 0 && second > T_BASE &&
        second < T_BASE + T_COUNT)
        return first + (second - T_BASE);
    found = bsearch(&key, nfc->by_parts, mb_nfc_n_pairs, sizeof(key), order_by_parts);
    return found != NULL ? found->whole : 0;
}

/* UAX #15 D117: a character composes with the last starter unless one between them blocks it. */
static void compose_run(const struct mb_nfc *nfc, struct mb_nfc_work *w)
{
    size_t n = 0, starter = SIZE_MAX;
    uint8_t last = 0; /* class of the character kept last, after the starter */

    for (size_t i = 0; i < w->n; i++) {
        uint32_t c = w->points[i];
        uint8_t combining = w->classes[i];

        if (starter != SIZE_MAX && (starter + 1 == n || (last < combining && last != 0))) {
            uint32_t whole = compose_two(nfc, w->points[starter], c);
            if (whole != 0) {
                w->points[starter] = whole;
                continue;
            }
        }
        if (combining == 0)
            starter = n;
        last = combining;
        w->points[n] = c;
        w->classes[n++] = combining;
    }
    w->n = n;
}

static int write_run(const struct mb_nfc_work *w, struct mb_buf *out)
{
    if (mb_buf_reserve(out, 4 * w->n) != 0)
        return MB_ENOMEM;
    for (size_t i = 0; i < w->n; i++) {
        uint8_t bytes[4];
        size_t length = 1;

        if (w->points[i] >= BAD_BYTE)
            bytes[0] = (uint8_t)w->points[i];
        else
            length = mb_utf8_encode(w->points[i], bytes);
        if (mb_buf_add(out, bytes, length) != 0)
            return MB_ENOMEM;
    }
    return 0;
}

/* The run from the boundary at `at` on; *next: where the next boundary begins. */
static int append_run(const struct mb_nfc *nfc, struct mb_nfc_work *w, const uint8_t *text,
                      size_t at, size_t n, struct mb_buf *out, size_t *next)
{
    int first = 1;

    w->n = 0;
    while (at < n) {
        uint32_t c;
        size_t length = mb_utf8_decode(text + at, text + n, &c);
        int rc;

        if (!first && (length == 0 || !is_inside(nfc, c)))
            break;
        rc = length > 0 ? decompose(nfc, w, c) : push(w, BAD_BYTE | text[at], 0);
        if (rc != 0)
            return rc;
        at += length > 0 ? length : 1;
        first = 0;
    }
    *next = at;
    order_run(w);
    compose_run(nfc, w);
    return write_run(w, out);
}

int mb_nfc_append(const struct mb_nfc *nfc, struct mb_nfc_work *work, const uint8_t *text, size_t n,
                  struct mb_buf *out)
{
    size_t at = 0;

    while (at < n) {
        size_t boundary;
        size_t inside = find_inside(nfc, text, at, n, &boundary);
        int rc;

        if (inside == n)
            return mb_buf_add(out, text + at, n - at);
        rc = mb_buf_add(out, text + at, boundary - at);
        if (rc == 0)
            rc = append_run(nfc, work, text, boundary, n, out, &at);
        if (rc != 0)
            return rc;
    }
    return 0;
}
