/* Between split_regex.c and the files of its translator. Nobody else includes this. */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_SPLIT_REGEX_PRIVATE_H
#define MOBULA_WORKER_DATA_TOKENIZER_SPLIT_REGEX_PRIVATE_H

#include "worker/data/tokenizer/split_regex.h"

/* A pcre2_code of a pattern in PCRE2's own syntax, with the options all patterns have. */
int mb_split_regex_compile(const char *pattern, size_t n, void **code, struct mb_err *err);

/*
 * Appends to a character class the code points of the categories in mask (bits 1 << enum
 * mb_category), or all others when negated, as Unicode 16 has them: as properties where the
 * installed PCRE2 agrees, with the ranges it lacks, or as ranges altogether.
 */
int mb_split_regex_add_set(uint32_t mask, int negated, struct mb_buf *out, struct mb_err *err);

/* The same for Oniguruma's \w and for White_Space. */
int mb_split_regex_add_word(int negated, struct mb_buf *out, struct mb_err *err);
int mb_split_regex_add_space(int negated, struct mb_buf *out, struct mb_err *err);

#endif
