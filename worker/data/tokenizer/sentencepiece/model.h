/*
 * A SentencePiece model file as it stands in the bytes: the pieces and what the training and
 * normalizer specifications say of encoding. Source: sentencepiece_model.proto of the SentencePiece
 * project (message and field numbers), proto2 wire format. Nothing is judged here but the form;
 * build.c says which models can be used. No thread shares a description.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_SENTENCEPIECE_MODEL_H
#define MOBULA_WORKER_DATA_TOKENIZER_SENTENCEPIECE_MODEL_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum mb_spm_piece_type { /* the proto's numbers */
                         MB_SPM_NORMAL = 1,
                         MB_SPM_UNKNOWN = 2,
                         MB_SPM_CONTROL = 3,
                         MB_SPM_USER_DEFINED = 4,
                         MB_SPM_UNUSED = 5,
                         MB_SPM_BYTE = 6
};

enum mb_spm_algorithm { MB_SPM_UNIGRAM = 1, MB_SPM_BPE = 2, MB_SPM_WORD = 3, MB_SPM_CHAR = 4 };

struct mb_spm_span {
    const uint8_t *p; /* borrowed from the file's bytes; NULL: the field is absent */
    size_t n;
};

struct mb_spm_piece {
    struct mb_spm_span text;
    float score;
    enum mb_spm_piece_type type;
};

struct mb_spm_normalizer_spec {
    struct mb_spm_span charsmap; /* precompiled_charsmap */
    int add_dummy_prefix;
    int remove_extra_whitespaces;
    int escape_whitespaces;
};

struct mb_spm_model {
    struct mb_spm_piece *pieces; /* owned; the index is the id */
    size_t n_pieces;
    enum mb_spm_algorithm algorithm;
    int byte_fallback;
    int treat_whitespace_as_suffix;
    struct mb_spm_span unk_surface, bos_piece, eos_piece, pad_piece;
    struct mb_spm_normalizer_spec normalizer;
    struct mb_spm_normalizer_spec denormalizer;
};

/* Describe n bytes, which must outlive the description. MB_ECORRUPT with the byte's position for
 * what is no such file, MB_EUNSUPPORTED for a piece type or algorithm that the proto does not know;
 * then *m needs no close. */
int mb_spm_model_parse(const uint8_t *bytes, size_t n, struct mb_spm_model *m, struct mb_err *err);
void mb_spm_model_close(struct mb_spm_model *m);

#endif
