/* The insides of JSON strings, many bytes at a time. For jsonl.c and its test only. */
#ifndef MOBULA_WORKER_DATA_JSONL_COPY_H
#define MOBULA_WORKER_DATA_JSONL_COPY_H

#include <stdint.h>

enum { MB_JSONL_COPY_SLACK = 64 };

/* The first quote, backslash or control character from p on; end if there is none. */
const uint8_t *mb_jsonl_plain_end(const uint8_t *p, const uint8_t *end);

/* Appends at *to what a string is from p on, up to something that this does not know, and returns
 * where that is: a quote, a control character or a backslash, or end. Escapes of two bytes may have
 * been undone on the way, or not; p and what is returned are never inside one.
 * MB_JSONL_COPY_SLACK bytes behind what is appended may be overwritten. */
const uint8_t *mb_jsonl_copy(const uint8_t *p, const uint8_t *end, uint8_t **to);

/* The character of the escape \c, 0 if there is no such escape of two bytes. */
uint8_t mb_jsonl_escaped(uint8_t c);

/* mb_jsonl_copy in the form for any processor, and the one that needs mb_jsonl_has_wide. */
const uint8_t *mb_jsonl_copy_plain(const uint8_t *p, const uint8_t *end, uint8_t **to);
const uint8_t *mb_jsonl_copy_wide(const uint8_t *p, const uint8_t *end, uint8_t **to);
int mb_jsonl_has_wide(void);

#endif
