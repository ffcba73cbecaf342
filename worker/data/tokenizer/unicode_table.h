/*
 * The classes of characters that the GPT-2 pattern tells apart, for every code point of
 * Unicode 16.0 (the version of tiktoken 0.14, with which the tokens must agree).
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_UNICODE_TABLE_H
#define MOBULA_WORKER_DATA_TOKENIZER_UNICODE_TABLE_H

#include <stddef.h>
#include <stdint.h>

enum mb_char_class {
    MB_CLASS_OTHER = 0,
    MB_CLASS_LETTER = 1, /* \p{L} */
    MB_CLASS_NUMBER = 2, /* \p{N} */
    MB_CLASS_SPACE = 3   /* \s */
};

struct mb_unicode_range {
    uint32_t first;
    uint32_t last;
    enum mb_char_class class;
};

/* Ascending; what is in no range is MB_CLASS_OTHER. */
extern const struct mb_unicode_range mb_unicode_ranges[];
extern const size_t mb_unicode_n_ranges;

#endif
