/* One character of UTF-8 after the other, as SentencePiece reads it: a byte that begins no valid
 * sequence (no surrogate, nothing over-long, nothing above U+10FFFF) counts as U+FFFD by itself. */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_SENTENCEPIECE_UTF8_H
#define MOBULA_WORKER_DATA_TOKENIZER_SENTENCEPIECE_UTF8_H

#include <stddef.h>
#include <stdint.h>
#include "worker/data/tokenizer/utf8.h"

#define MB_SPM_REPLACEMENT 0xfffdu
#define MB_SPM_SPACE       0x2581u /* LOWER ONE EIGHTH BLOCK, SentencePiece's visible space */

/* The code point of the character at p < end and its bytes; *is_valid 0 for a replaced byte. */
static inline uint32_t mb_spm_utf8_decode(const uint8_t *p, const uint8_t *end, size_t *n,
                                          int *is_valid)
{
    uint32_t c;

    *n = mb_utf8_decode(p, end, &c);
    *is_valid = *n > 0;
    if (*is_valid)
        return c;
    *n = 1;
    return MB_SPM_REPLACEMENT;
}

#endif
