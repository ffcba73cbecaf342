/* Whether bytes are UTF-8, many at a time. For jsonl.c and its test only. */
#ifndef MOBULA_WORKER_DATA_JSONL_UTF8_H
#define MOBULA_WORKER_DATA_JSONL_UTF8_H

#include <stddef.h>
#include <stdint.h>

enum mb_jsonl_utf8_kernel { MB_JSONL_UTF8_NONE, MB_JSONL_UTF8_AVX2, MB_JSONL_UTF8_AVX512 };

/* What this processor has. */
enum mb_jsonl_utf8_kernel mb_jsonl_utf8_best(void);

/* 1: they are, and *n_tails of them are not the first of their character. 0: they are not, or the
 * kernel is none, which cannot tell. */
int mb_jsonl_utf8(enum mb_jsonl_utf8_kernel kernel, const uint8_t *p, size_t n, uint64_t *n_tails);

#endif
