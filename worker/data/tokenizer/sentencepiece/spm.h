/*
 * A SentencePiece model in use: text to ids and back, equal to the SentencePiece package's
 * encode() and decode() without sampling or extra options. BPE, character and unigram models; a
 * word model is refused. mb_spm is immutable: any thread encodes with it, with its own scratch.
 *
 * BPE text is cut where no piece of the vocabulary has the two neighbouring characters side by
 * side; no merge can cross such a place, so that the parts are encoded one by one and remembered.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_SENTENCEPIECE_SPM_H
#define MOBULA_WORKER_DATA_TOKENIZER_SENTENCEPIECE_SPM_H

#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/err.h"
#include "worker/data/tokenizer/tokenizer.h"

struct mb_spm;
struct mb_spm_scratch; /* one thread's cache and work memory: 12 MiB, more while a text is long */

/* MB_ENOENT, MB_ECORRUPT or MB_EUNSUPPORTED; the text names the file. */
int mb_spm_load(const char *model_file, struct mb_spm **out, struct mb_err *err);
/* The same from bytes that the caller keeps or frees; the text names no file. */
int mb_spm_create(const void *bytes, size_t n, struct mb_spm **out, struct mb_err *err);
void mb_spm_destroy(struct mb_spm *m);

size_t mb_spm_n_pieces(const struct mb_spm *m);
int32_t mb_spm_bos(const struct mb_spm *m); /* -1: the model has none */
int32_t mb_spm_eos(const struct mb_spm *m);
int32_t mb_spm_pad(const struct mb_spm *m);
int32_t mb_spm_piece_id(const struct mb_spm *m, const void *text, size_t n); /* -1: none */
/* The piece's text, borrowed; NULL for an id outside the vocabulary. */
const uint8_t *mb_spm_piece(const struct mb_spm *m, int32_t id, size_t *n);
/* Not an ordinary piece: control, user-defined, unknown or byte. */
int mb_spm_is_special(const struct mb_spm *m, int32_t id);
const char *mb_spm_algorithm_name(const struct mb_spm *m); /* "BPE", "unigram", "character" */

int mb_spm_scratch_create(const struct mb_spm *m, struct mb_spm_scratch **out, struct mb_err *err);
void mb_spm_scratch_destroy(struct mb_spm_scratch *s);

/* Append the ids of n bytes; MB_ENOMEM is the only failure, ids appended before it may stay. Linear
 * in n, but for BPE parts that cannot be cut: n log n. */
int mb_spm_encode(const struct mb_spm *m, struct mb_spm_scratch *s, const void *text, size_t n,
                  struct mb_ids *out);

/* Append the text of n ids, as SentencePiece shows them: the dummy space goes, control pieces are
 * invisible, runs of byte pieces that are no UTF-8 become U+FFFD. MB_EINVAL for an id outside the
 * vocabulary; out is then as it was. */
int mb_spm_decode(const struct mb_spm *m, const int32_t *ids, size_t n, struct mb_buf *out);

#endif
