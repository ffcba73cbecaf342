/*
 * The general category of every code point of Unicode 16.0, and two sets made of it: white space
 * and the word characters of Rust's regex crate. Looked up by bisection: for loading and for rare
 * places; the scanners have tables of their own (unicode_table.h). Pure.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_UNICODE_CATEGORY_H
#define MOBULA_WORKER_DATA_TOKENIZER_UNICODE_CATEGORY_H

#include <stddef.h>
#include <stdint.h>

enum mb_category {
    MB_CAT_CN,
    MB_CAT_LU,
    MB_CAT_LL,
    MB_CAT_LT,
    MB_CAT_LM,
    MB_CAT_LO,
    MB_CAT_MN,
    MB_CAT_MC,
    MB_CAT_ME,
    MB_CAT_ND,
    MB_CAT_NL,
    MB_CAT_NO,
    MB_CAT_PC,
    MB_CAT_PD,
    MB_CAT_PS,
    MB_CAT_PE,
    MB_CAT_PI,
    MB_CAT_PF,
    MB_CAT_PO,
    MB_CAT_SM,
    MB_CAT_SC,
    MB_CAT_SK,
    MB_CAT_SO,
    MB_CAT_ZS,
    MB_CAT_ZL,
    MB_CAT_ZP,
    MB_CAT_CC,
    MB_CAT_CF,
    MB_CAT_CS,
    MB_CAT_CO,
    MB_CAT_COUNT
};

extern const uint32_t mb_category_runs[]; /* first code point of a run << 5 | its category */
extern const size_t mb_category_n_runs;

enum mb_category mb_unicode_category(uint32_t point); /* point <= 0x10ffff */

/* The bits (1 << category) of "L", "Lu", ... as a pattern names them, any case; 0: no such name. */
uint32_t mb_category_mask(const char *name, size_t n);

int mb_unicode_is_space(uint32_t point); /* property White_Space */
int mb_unicode_is_word(uint32_t point);  /* \w of UTS #18, Annex C */

#endif
