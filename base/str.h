/* Small text helpers: hex, numbers with full checking, sizes, nearest word. No locale, no
 * allocation. Pure; any thread. */
#ifndef MOBULA_BASE_STR_H
#define MOBULA_BASE_STR_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

/* Lower-case hex of n bytes and a NUL into out[2n+1]; returns out. */
char *mb_hex(const void *p, size_t n, char *out);
int mb_hex_digit(char c); /* 0 to 15, or -1 */
/* Exactly n bytes from 2n hex digits; 0, or MB_EINVAL (out untouched). */
int mb_unhex(const char *hex, void *out, size_t n);

/* The whole string as a number in [min, max]; MB_EINVAL with a text naming `what` otherwise. */
int mb_parse_i64(const char *s, int64_t min, int64_t max, const char *what, int64_t *out,
                 struct mb_err *err);
int mb_parse_double(const char *s, const char *what, double *out, struct mb_err *err);
/* 1024, 64K, 16MiB, 2GB (K = KiB = KB = 1024): bytes. */
int mb_parse_size(const char *s, const char *what, uint64_t *out, struct mb_err *err);
/* 250ms, 30s, 5m, 2h; a plain number is seconds: milliseconds. */
int mb_parse_duration_ms(const char *s, const char *what, uint64_t *out, struct mb_err *err);

int mb_starts_with(const char *s, const char *prefix);
int mb_ends_with(const char *s, const char *suffix);
/* The character at p, of n > 0 bytes: whole; broken; or cut off by the end but valid so far. *len
 * is its length (WHOLE), that of the maximal broken part (BROKEN; Unicode 15, section 3.9: one
 * U+FFFD stands for it), or n (PARTIAL). */
enum mb_utf8 { MB_UTF8_WHOLE, MB_UTF8_BROKEN, MB_UTF8_PARTIAL };
enum mb_utf8 mb_utf8_look(const void *p, size_t n, size_t *len);
/* 1 if the n bytes are valid UTF-8 (no surrogates, no overlong forms). */
int mb_utf8_valid(const void *p, size_t n);
/* Length <= n of the longest prefix that does not end inside a UTF-8 sequence. */
size_t mb_utf8_floor(const void *p, size_t n);

/* The candidate with the smallest edit distance to word, or NULL if none is near (distance > 3 or
 * more than half of the word). candidates ends with NULL. */
const char *mb_nearest(const char *word, const char *const *candidates);

/* Human size "12.3 MiB" into out[16]; returns out. */
char *mb_human_bytes(uint64_t bytes, char out[16]);

#endif
