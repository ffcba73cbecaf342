/*
 * Cutting a text with any pattern, by PCRE2 with its JIT compiler: for the patterns that have no
 * scanner of their own (split.h).
 *
 * A pattern means what it means to Hugging Face's tokenizers: the syntax of Oniguruma (Ruby's) and
 * the classes of Unicode 16. It is therefore translated (split_regex_pattern.c): what PCRE2 reads
 * otherwise is rewritten, sets are corrected where the installed PCRE2 has an older Unicode, and
 * what cannot be rewritten is refused by name, with its place. Scripts (\p{Han}) are those of the
 * installed PCRE2.
 *
 * A compiled pattern is immutable; each thread has its own work memory.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_SPLIT_REGEX_H
#define MOBULA_WORKER_DATA_TOKENIZER_SPLIT_REGEX_H

#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/err.h"

struct mb_split_regex;
struct mb_split_regex_work;

/* Appends the pattern as PCRE2 must read it. MB_EUNSUPPORTED or MB_EINVAL with the byte. */
int mb_split_regex_translate(const char *pattern, size_t n, struct mb_buf *out, struct mb_err *err);

/* MB_EINVAL for a pattern that is none. */
int mb_split_regex_create(const char *pattern, size_t n, struct mb_split_regex **out,
                          struct mb_err *err);
void mb_split_regex_destroy(struct mb_split_regex *r);
const char *mb_split_regex_pattern(const struct mb_split_regex *r); /* as it was given */

int mb_split_regex_work_create(struct mb_split_regex_work **out, struct mb_err *err);
void mb_split_regex_work_destroy(struct mb_split_regex_work *w);

/* A walk over the matches in one text. Set text and n, zero the rest. */
struct mb_split_walk {
    const uint8_t *text; /* valid UTF-8 */
    size_t n;
    size_t at;
    size_t last_end; /* of the last match, when any */
    int any;
};

/*
 * 1 and the next match, 0 when none is left; an empty match right behind a match is none. Negative:
 * MB_EFULL, the pattern needs more steps or stack on this text than the limits allow.
 */
int mb_split_regex_next(const struct mb_split_regex *r, struct mb_split_regex_work *w,
                        struct mb_split_walk *walk, size_t *start, size_t *end, struct mb_err *err);

#endif
