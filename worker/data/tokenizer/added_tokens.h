/*
 * The added tokens of a tokenizer: strings that are found in the text before anything else is done
 * with it. The rules are those of Hugging Face's tokenizers (added_vocabulary.rs): of the tokens
 * that begin at a place the longest counts, the leftmost place first; then
 *
 *   single_word  a match beside a word character is none (the search goes on behind it)
 *   lstrip       the match takes the white space before it, rstrip that behind it
 *
 * tiktoken's special tokens follow the same rules with none of the three set (where two special
 * tokens begin at one place tiktoken takes the one named first in its alternation; see tiktoken.c).
 * A finder is immutable once made, any thread may use it.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_ADDED_TOKENS_H
#define MOBULA_WORKER_DATA_TOKENIZER_ADDED_TOKENS_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

/* The time of a search is linear in the text times this. */
enum { MB_ADDED_TOKEN_MAX_BYTES = 512 };

struct mb_added_token {
    const char *text; /* UTF-8, not empty; borrowed for the call that gets it */
    size_t n;
    int32_t id;
    uint8_t single_word, lstrip, rstrip;
    uint8_t normalized; /* looked for in the normalised text; the finder does not use it */
    uint8_t special;    /* nor this */
};

struct mb_added_tokens;

/* MB_EUNSUPPORTED for a token beyond the bound. No tokens: a finder that finds nothing. */
int mb_added_tokens_create(const struct mb_added_token *tokens, size_t n,
                           struct mb_added_tokens **out, struct mb_err *err);
void mb_added_tokens_destroy(struct mb_added_tokens *a);

/* A search through one text. Set text, n and zero the rest. */
struct mb_added_search {
    const uint8_t *text;
    size_t n;
    size_t at;   /* where the search goes on */
    size_t done; /* end of the last match with what it stripped */
};

struct mb_added_match {
    size_t start; /* what is before it and after the last match's end is plain text */
    size_t end;
    int32_t id;
};

/* 1 and the next match, or 0: none is left. */
int mb_added_tokens_next(const struct mb_added_tokens *a, struct mb_added_search *s,
                         struct mb_added_match *match);

#endif
