/*
 * The classes of characters that the split patterns tell apart, for every code point of
 * Unicode 16.0: the version of tiktoken 0.14 and of tokenizers 0.22, with which the tokens must
 * agree.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_UNICODE_TABLE_H
#define MOBULA_WORKER_DATA_TOKENIZER_UNICODE_TABLE_H

#include <stddef.h>
#include <stdint.h>

enum mb_char_class {
    MB_CHAR_OTHER = 0,
    MB_CHAR_SPACE = 1,  /* \s, the property White_Space */
    MB_CHAR_NUMBER = 2, /* \p{N} */
    MB_CHAR_MARK = 3,   /* \p{M} */
    MB_CHAR_LU = 4,     /* this and all below are \p{L} */
    MB_CHAR_LT = 5,
    MB_CHAR_LM = 6,
    MB_CHAR_LO = 7,
    MB_CHAR_LL = 8
};

/* first, first + step .. last */
struct mb_unicode_range {
    uint32_t first;
    uint32_t last;
    uint8_t step;
    uint8_t class; /* enum mb_char_class */
};

/* What is in no range is MB_CHAR_OTHER; no code point is in two. */
extern const struct mb_unicode_range mb_unicode_ranges[];
extern const size_t mb_unicode_n_ranges;

#endif
