/*
 * Where a tokenizer's pattern cuts a text into pieces. The families are the patterns of GPT-2,
 * cl100k, Llama-3, Qwen2, o200k and of Megatron-LM's tiktoken tokenizers, scanned by hand without a
 * regular expression engine; a loader recognises them by the exact text of the pattern. Any other
 * pattern brings its own cutter (struct mb_split_custom).
 *
 * A byte that is no UTF-8 is a character of its own of class other. A piece depends on nothing
 * before it, so that scanning may begin at any piece. Classes are those of Unicode 16.0. Pure; a
 * split is immutable once made, any thread may use it.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_SPLIT_H
#define MOBULA_WORKER_DATA_TOKENIZER_SPLIT_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"
#include "worker/data/tokenizer/unicode_table.h"

enum mb_split_family {
    MB_SPLIT_GPT2,
    MB_SPLIT_CL100K,      /* tiktoken's form; white space up to the end of the text is one piece */
    MB_SPLIT_LLAMA3,      /* also cl100k as tokenizer.json files give it */
    MB_SPLIT_QWEN2,       /* as Llama-3, each number alone */
    MB_SPLIT_O200K,       /* words are cut where small letters end */
    MB_SPLIT_TIKTOKEN_V1, /* Megatron-LM's --tiktoken-pattern v1 and v2 */
    MB_SPLIT_TIKTOKEN_V2,
    MB_SPLIT_WHOLE, /* no pattern: the text is one piece */
    MB_SPLIT_REGEX  /* any other pattern: struct mb_split_custom */
};

struct mb_class_table {
    uint8_t ascii[256];           /* class of a byte below 128; MB_CLASS_TABLE_WIDE above */
    uint8_t packed[0x110000 / 2]; /* four bits a code point */
};

enum { MB_CLASS_TABLE_WIDE = 15 };

struct mb_span {
    size_t start; /* bytes from the start of the text */
    size_t end;   /* > start */
};

/* A cutter of another pattern. ctx is immutable and shared by the threads, each has a scratch. */
struct mb_split_custom {
    void *ctx;
    int (*scratch_create)(const void *ctx, void **out, struct mb_err *err);
    void (*scratch_destroy)(void *scratch);
    /* The next pieces of text[from, n), ascending, up to max > 0 of them into out. What lies
     * between them makes no tokens. *next: where to go on, n when done; it moves on by every call.
     */
    int (*cut)(const void *ctx, void *scratch, const uint8_t *text, size_t n, size_t from,
               struct mb_span *out, size_t max, size_t *n_out, size_t *next, struct mb_err *err);
    void (*destroy)(void *ctx);
};

struct mb_split {
    enum mb_split_family family;
    uint8_t max_digits; /* numbers a piece; 0: any */
    uint8_t contractions;
    uint8_t whole_end; /* white space at the end of the text is one piece */
    struct mb_class_table classes;
    struct mb_split_custom custom; /* MB_SPLIT_REGEX only */
};

/* custom is NULL but for MB_SPLIT_REGEX, whose ctx is taken on success. MB_ENOMEM only. */
int mb_split_create(enum mb_split_family family, const struct mb_split_custom *custom,
                    struct mb_split **out, struct mb_err *err);
void mb_split_destroy(struct mb_split *s);

/* The pattern of a family as its first source writes it, NULL for WHOLE and REGEX. */
const char *mb_split_pattern(enum mb_split_family family);
const char *mb_split_family_name(enum mb_split_family family);
/* 1 and *out if a hand-made scanner cuts as this pattern does, else 0. */
int mb_split_recognise(const char *pattern, enum mb_split_family *out);

/* End of the piece that begins at p < end. Not for MB_SPLIT_REGEX. */
const uint8_t *mb_split_next(const struct mb_split *s, const uint8_t *p, const uint8_t *end);

#endif
