/*
 * SentencePiece's normaliser: character map, dummy space, extra spaces. Source: normalizer.cc of
 * the SentencePiece project, compared with the package in tests/integration/data. Immutable; any
 * thread uses it.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_SENTENCEPIECE_NORMALIZE_H
#define MOBULA_WORKER_DATA_TOKENIZER_SENTENCEPIECE_NORMALIZE_H

#include "base/buf.h"
#include "worker/data/tokenizer/sentencepiece/charsmap.h"
#include "worker/data/tokenizer/sentencepiece/trie.h"

struct mb_spm_normalizer {
    struct mb_spm_charsmap charsmap;
    struct mb_spm_trie kept;  /* user-defined pieces: copied as they are */
    int adds_prefix;          /* a space in front */
    int adds_suffix;          /* a space behind */
    int removes_extra;        /* leading, trailing and repeated spaces go */
    int folds_space;          /* U+2581 in the text becomes ' ', the form that the encoders read */
    struct mb_spm_span space; /* what a space is written as */
};

/* Append the normal form of n bytes. MB_ENOMEM leaves out as it was. */
int mb_spm_normalize(const struct mb_spm_normalizer *z, const uint8_t *text, size_t n,
                     struct mb_buf *out);
void mb_spm_normalizer_close(struct mb_spm_normalizer *z);

#endif
