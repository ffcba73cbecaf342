/*
 * 1. An apostrophe followed by s, t, m, d, re, ve or ll is a piece.
 * 2. Else an optional space (U+0020 only) and a run of one class: letters, numbers or others.
 * 3. Else white space: a run to the end of the text whole; before something else without its last
 *    character, which goes to the next piece, unless it is the only one.
 * Nothing fails: every byte belongs to exactly one piece.
 */
#include <string.h>
#include "worker/data/tokenizer/split.h"

void mb_class_table_make(struct mb_class_table *t)
{
    memset(t, 0, sizeof(*t));
    for (size_t i = 0; i < mb_unicode_n_ranges; i++) {
        const struct mb_unicode_range *r = &mb_unicode_ranges[i];
        for (uint32_t c = r->first; c <= r->last; c++)
            t->packed[c >> 2] |= (uint8_t)((unsigned)r->class << (2 * (c & 3)));
    }
    memset(t->ascii, MB_CLASS_TABLE_WIDE, sizeof(t->ascii));
    for (unsigned c = 0; c < 128; c++)
        t->ascii[c] = t->packed[c >> 2] >> (2 * (c & 3)) & 3;
}

static int is_tail(uint8_t byte)
{
    return (byte & 0xc0) == 0x80;
}

/* Class and length of the character at p, whose first byte is above 127. */
static unsigned wide_class(const struct mb_class_table *t, const uint8_t *p, const uint8_t *end,
                           size_t *length)
{
    size_t left = (size_t)(end - p);
    uint32_t c = 0;

    *length = 1;
    if (p[0] >= 0xc2 && p[0] < 0xe0 && left >= 2 && is_tail(p[1])) {
        c = (p[0] & 0x1fu) << 6 | (p[1] & 0x3fu);
        *length = 2;
    } else if ((p[0] & 0xf0) == 0xe0 && left >= 3 && is_tail(p[1]) && is_tail(p[2])) {
        c = (p[0] & 0x0fu) << 12 | (p[1] & 0x3fu) << 6 | (p[2] & 0x3fu);
        if (c < 0x800 || (c >= 0xd800 && c < 0xe000))
            return MB_CLASS_OTHER;
        *length = 3;
    } else if ((p[0] & 0xf8) == 0xf0 && left >= 4 && is_tail(p[1]) && is_tail(p[2]) &&
               is_tail(p[3])) {
        c = (p[0] & 0x07u) << 18 | (p[1] & 0x3fu) << 12 | (p[2] & 0x3fu) << 6 | (p[3] & 0x3fu);
        if (c < 0x10000 || c > 0x10ffff)
            return MB_CLASS_OTHER;
        *length = 4;
    } else {
        return MB_CLASS_OTHER;
    }
    return t->packed[c >> 2] >> (2 * (c & 3)) & 3;
}

static inline unsigned class_at(const struct mb_class_table *t, const uint8_t *p,
                                const uint8_t *end, size_t *length)
{
    unsigned class = t->ascii[*p];

    *length = 1;
    return class != MB_CLASS_TABLE_WIDE ? class : wide_class(t, p, end, length);
}

/* End of the run of `class` that goes on at p. */
static inline const uint8_t *run_end(const struct mb_class_table *t, const uint8_t *p,
                                     const uint8_t *end, unsigned class)
{
    for (;;) {
        size_t length;

        while (p < end && t->ascii[*p] == class)
            p++;
        if (p == end || *p < 128 || wide_class(t, p, end, &length) != class)
            return p;
        p += length;
    }
}

static const uint8_t *space_end(const struct mb_class_table *t, const uint8_t *p,
                                const uint8_t *end)
{
    const uint8_t *last = p; /* the last character of the run begins here */
    const uint8_t *q = p;

    while (q < end) {
        size_t length;
        if (class_at(t, q, end, &length) != MB_CLASS_SPACE)
            return last > p ? last : q;
        last = q;
        q += length;
    }
    return q;
}

static size_t contraction_length(const uint8_t *p, const uint8_t *end)
{
    if (end - p < 2)
        return 0;
    switch (p[1]) {
    case 's':
    case 't':
    case 'm':
    case 'd':
        return 2;
    case 'r':
    case 'v':
        return end - p > 2 && p[2] == 'e' ? 3 : 0;
    case 'l':
        return end - p > 2 && p[2] == 'l' ? 3 : 0;
    default:
        return 0;
    }
}

const uint8_t *mb_split_next(const struct mb_class_table *t, const uint8_t *p, const uint8_t *end)
{
    size_t length;
    unsigned class = class_at(t, p, end, &length);

    if (class == MB_CLASS_SPACE) {
        const uint8_t *q = p + 1;
        if (*p != ' ' || q == end)
            return space_end(t, p, end);
        class = class_at(t, q, end, &length);
        if (class == MB_CLASS_SPACE)
            return space_end(t, p, end);
        return run_end(t, q + length, end, class);
    }
    if (*p == '\'') {
        size_t n = contraction_length(p, end);
        if (n > 0)
            return p + n;
    }
    return run_end(t, p + length, end, class);
}
