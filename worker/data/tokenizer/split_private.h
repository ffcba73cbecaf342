/* What the scanners share: the class of a character, runs, contractions. Nobody else includes this.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_SPLIT_PRIVATE_H
#define MOBULA_WORKER_DATA_TOKENIZER_SPLIT_PRIVATE_H

#include "worker/data/tokenizer/split.h"

/* Sets of classes, a bit each. */
enum {
    MB_SET_SPACE = 1 << MB_CHAR_SPACE,
    MB_SET_NUMBER = 1 << MB_CHAR_NUMBER,
    MB_SET_LETTER =
        1 << MB_CHAR_LU | 1 << MB_CHAR_LT | 1 << MB_CHAR_LM | 1 << MB_CHAR_LO | 1 << MB_CHAR_LL,
    MB_SET_OTHER = 1 << MB_CHAR_OTHER | 1 << MB_CHAR_MARK,
    MB_SET_CAPITAL =
        1 << MB_CHAR_LU | 1 << MB_CHAR_LT | 1 << MB_CHAR_LM | 1 << MB_CHAR_LO | 1 << MB_CHAR_MARK,
    MB_SET_SMALL = 1 << MB_CHAR_LL | 1 << MB_CHAR_LM | 1 << MB_CHAR_LO | 1 << MB_CHAR_MARK
};

/* Class and length of the character at p, whose first byte is above 127. */
unsigned mb_split_wide_class(const struct mb_class_table *t, const uint8_t *p, const uint8_t *end,
                             size_t *length);

/* The same, with the usual forms of 2 and 3 bytes seen at once. */
static inline unsigned mb_split_usual_class(const struct mb_class_table *t, const uint8_t *p,
                                            const uint8_t *end, size_t *length)
{
    uint32_t c;

    if (p[0] >= 0xc2 && p[0] < 0xe0 && end - p >= 2 && (p[1] & 0xc0) == 0x80) {
        c = (p[0] & 0x1fu) << 6 | (p[1] & 0x3fu);
        *length = 2;
    } else if (p[0] > 0xe0 && p[0] < 0xed && end - p >= 3 && (p[1] & 0xc0) == 0x80 &&
               (p[2] & 0xc0) == 0x80) {
        c = (p[0] & 0x0fu) << 12 | (p[1] & 0x3fu) << 6 | (p[2] & 0x3fu);
        *length = 3;
    } else {
        return mb_split_wide_class(t, p, end, length);
    }
    return t->packed[c >> 1] >> (4 * (c & 1)) & 15;
}

static inline unsigned mb_split_class(const struct mb_class_table *t, const uint8_t *p,
                                      const uint8_t *end, size_t *length)
{
    unsigned class = t->ascii[*p];

    *length = 1;
    return class != MB_CLASS_TABLE_WIDE ? class : mb_split_wide_class(t, p, end, length);
}

/* End of the run of characters of `set` that goes on at p. */
static inline const uint8_t *mb_split_run(const struct mb_class_table *t, const uint8_t *p,
                                          const uint8_t *end, unsigned set)
{
    while (p < end) {
        size_t length;

        if ((set >> mb_split_class(t, p, end, &length) & 1) == 0)
            break;
        p += length;
    }
    return p;
}

/* Bytes of the contraction 's 't 'm 'd 're 've 'll at p, 0 if there is none; any_case: letters of
 * either case and U+017F, which folds to s. */
size_t mb_split_contraction(const uint8_t *p, const uint8_t *end, int any_case);

const uint8_t *mb_split_next_cased(const struct mb_split *s, const uint8_t *p, const uint8_t *end);

#endif
