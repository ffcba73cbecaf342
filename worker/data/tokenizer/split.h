/*
 * Where GPT-2's pattern cuts a text:
 *     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 * by hand, without a regular expression engine. A byte that is no UTF-8 is a character of its own
 * of class other. Pure; a table is immutable once made, any thread may use it.
 */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_SPLIT_H
#define MOBULA_WORKER_DATA_TOKENIZER_SPLIT_H

#include <stddef.h>
#include <stdint.h>
#include "worker/data/tokenizer/unicode_table.h"

struct mb_class_table {
    uint8_t ascii[256];           /* class of a byte below 128; MB_CLASS_TABLE_WIDE above */
    uint8_t packed[0x110000 / 4]; /* two bits a code point */
};

enum { MB_CLASS_TABLE_WIDE = 4 };

void mb_class_table_make(struct mb_class_table *t);

/* End of the piece that begins at p < end. */
const uint8_t *mb_split_next(const struct mb_class_table *t, const uint8_t *p, const uint8_t *end);

#endif
