/*
 * A SentencePiece normalisation table (precompiled_charsmap): which byte strings become which
 * others. Form: u32 size of a double array in bytes, the double array of Darts-clone, then the
 * replacement texts, each ended by NUL. Source: the format notes of Darts-clone (unit: bit 31 a
 * value, bits 0-7 its label, bit 8 a value below, bit 9 the offset is in units of 256, bits 10-30
 * the offset). Immutable; any thread reads it. Damaged tables give wrong texts, never bad reads.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_SENTENCEPIECE_CHARSMAP_H
#define MOBULA_WORKER_DATA_TOKENIZER_SENTENCEPIECE_CHARSMAP_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"
#include "worker/data/tokenizer/sentencepiece/model.h"

struct mb_spm_charsmap {
    uint32_t *units; /* owned; NULL: no table, every character stays */
    size_t n_units;
    struct mb_spm_span texts;  /* borrowed, ends with NUL */
    uint8_t is_plain_pair[16]; /* bit c: ASCII c before an ASCII byte or the end stays as it is */
};

/* MB_ECORRUPT if sizes are impossible. An absent or empty span gives the empty table. */
int mb_spm_charsmap_create(struct mb_spm_span blob, struct mb_spm_charsmap *c, struct mb_err *err);
void mb_spm_charsmap_close(struct mb_spm_charsmap *c);

/* The longest rule that begins at p (p < end): bytes it covers, 0 if none does; *out what takes
 * their place, maybe empty. */
size_t mb_spm_charsmap_match(const struct mb_spm_charsmap *c, const uint8_t *p, const uint8_t *end,
                             struct mb_spm_span *out);

#endif
