/*
 * A growable byte buffer, always followed by a NUL that is not counted, so that text can be read
 * as a C string. Zero-initialise (`struct mb_buf b = {0}`), end with mb_buf_close().
 * Functions that add return 0 or MB_ENOMEM and leave the buffer as it was when they fail.
 * Threads: any, one at a time per buffer.
 */
#ifndef MOBULA_BASE_BUF_H
#define MOBULA_BASE_BUF_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

struct mb_buf {
    uint8_t *data; /* owned; NULL until the first byte */
    size_t len;    /* bytes in use */
    size_t cap;    /* bytes allocated, the NUL included */
};

void mb_buf_close(struct mb_buf *b);
void mb_buf_reset(struct mb_buf *b);                /* length 0, memory kept */
int mb_buf_reserve(struct mb_buf *b, size_t extra); /* room for extra more bytes */
int mb_buf_add(struct mb_buf *b, const void *p, size_t n);
int mb_buf_puts(struct mb_buf *b, const char *s);
int mb_buf_printf(struct mb_buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
int mb_buf_vprintf(struct mb_buf *b, const char *fmt, va_list ap)
    __attribute__((format(printf, 2, 0)));
/* Percent-encoded as RFC 3986's unreserved characters want it; keep_slash: '/' stays. */
int mb_buf_url(struct mb_buf *b, const char *s, int keep_slash);
/* A word as a shell reads it back: in single quotes where anything in it is special. */
int mb_buf_shell(struct mb_buf *b, const char *word);
/* n bytes as UTF-8, with one U+FFFD for each maximal broken part: what CPython's decoder makes of
 * them with errors="replace" (Unicode 15, section 3.9). */
int mb_buf_utf8(struct mb_buf *b, const void *p, size_t n);
int mb_buf_u32le(struct mb_buf *b, uint32_t v);
int mb_buf_u64le(struct mb_buf *b, uint64_t v);
void mb_buf_consume(struct mb_buf *b, size_t n); /* drop the first n bytes, n <= len */
const char *mb_buf_str(const struct mb_buf *b);  /* "" when empty */
char *mb_buf_take(struct mb_buf *b);             /* moves the bytes out; NULL when out of memory */

#endif
