/*
 * Text to token ids, equal to Megatron-LM's tokenizers of the same names:
 *
 *   GPT2BPETokenizer  byte-level BPE from vocab.json and merges.txt (Radford et al. 2019); special
 *                     strings in the text are not special; eod is <|endoftext|>
 *   HuggingFaceTokenizer  tokenizer.json: byte-level BPE with what stands around it; what is not
 *                     provided is refused by name (docs/tokenizers.md)
 *   NullTokenizer     decimal ids separated by one space; eod = --vocab-size, one id more in total
 *   Llama2Tokenizer, GPTSentencePieceTokenizer, SentencePieceTokenizer
 *                     a SentencePiece model, --tokenizer-model; type_sentencepiece.c says what each
 *                     adds
 *
 * A tokenizer is immutable: any number of threads encode with it, each with its own scratch. Bytes
 * that are no UTF-8 count, one by one, as characters that are neither letter, number nor space;
 * callers that must refuse them check before (the JSON reader does).
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_TOKENIZER_H
#define MOBULA_WORKER_DATA_TOKENIZER_TOKENIZER_H

#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/err.h"

/* The flags of options_table.h, by their names; all borrowed. */
struct mb_tokenizer_options {
    const char *type;              /* --tokenizer-type; NULL: GPT2BPETokenizer */
    const char *vocab_file;        /* GPT2BPE */
    const char *merge_file;        /* GPT2BPE */
    int64_t vocab_size;            /* Null, TikTokenizer; 0: not given */
    const char *tokenizer_model;   /* HuggingFace: directory or tokenizer.json; SentencePiece */
    int leaves_out_special_tokens; /* HuggingFace: no BOS or EOS around a text */
    const char *tiktoken_pattern;  /* NULL: Megatron-LM's default */
    int64_t tiktoken_num_special_tokens;        /* 0: not given */
    const char *const *tiktoken_special_tokens; /* NULL: not given */
    size_t n_tiktoken_special_tokens;
};

struct mb_tokenizer;
struct mb_tokenizer_scratch; /* one thread's piece cache and work memory, up to 16 MiB */

/* Growable ids; zero-initialise, end with mb_ids_close(). */
struct mb_ids {
    int32_t *data; /* owned */
    size_t n;
    size_t cap;
};
void mb_ids_close(struct mb_ids *ids);
int mb_ids_reserve(struct mb_ids *ids, size_t extra);

/* MB_EINVAL for an unknown type or a missing option, MB_ENOENT or MB_ECORRUPT for the files; the
 * text names flag and file. */
int mb_tokenizer_create(const struct mb_tokenizer_options *o, struct mb_tokenizer **out,
                        struct mb_err *err);
void mb_tokenizer_destroy(struct mb_tokenizer *t);

const char *mb_tokenizer_type(const struct mb_tokenizer *t);
uint64_t mb_tokenizer_vocab_size(const struct mb_tokenizer *t); /* unpadded: GPT-2 50257 */
int32_t mb_tokenizer_eod(const struct mb_tokenizer *t);         /* GPT-2 50256; -1: none */
int32_t mb_tokenizer_bos(const struct mb_tokenizer *t);         /* -1: none */

/* What `mobula tokenizer inspect` shows; texts live as long as the tokenizer. */
const char *mb_tokenizer_family(const struct mb_tokenizer *t);  /* of its pattern; NULL: none */
const char *mb_tokenizer_pattern(const struct mb_tokenizer *t); /* where it cuts; NULL: none */
/* A token that is matched in the text before the pattern cuts it, or one that only the tokenizer
 * itself adds. */
struct mb_tokenizer_added {
    const char *text; /* n bytes */
    size_t n;
    int32_t id;
    int is_special;
};
size_t mb_tokenizer_n_added(const struct mb_tokenizer *t);
void mb_tokenizer_added(const struct mb_tokenizer *t, size_t i, struct mb_tokenizer_added *out);

int mb_tokenizer_scratch_create(const struct mb_tokenizer *t, struct mb_tokenizer_scratch **out,
                                struct mb_err *err);
void mb_tokenizer_scratch_destroy(struct mb_tokenizer_scratch *s);

/* Append the ids of n bytes of text to out. Time is linear in n but for pieces without a boundary,
 * which cost n log n. */
int mb_tokenizer_encode(const struct mb_tokenizer *t, struct mb_tokenizer_scratch *s,
                        const void *text, size_t n, struct mb_ids *out, struct mb_err *err);
/* The same for n texts at a time, which is faster where texts are short: text i ends at ends[i] in
 * out. A failure does not say of which text. */
struct mb_tokenizer_text {
    const uint8_t *text;
    size_t n;
};
int mb_tokenizer_encode_many(const struct mb_tokenizer *t, struct mb_tokenizer_scratch *s,
                             const struct mb_tokenizer_text *texts, size_t n, size_t *ends,
                             struct mb_ids *out, struct mb_err *err);
/* Append the bytes of n ids to out. MB_EINVAL for an id outside the vocabulary. */
int mb_tokenizer_decode(const struct mb_tokenizer *t, const int32_t *ids, size_t n,
                        struct mb_buf *out, struct mb_err *err);

#endif
