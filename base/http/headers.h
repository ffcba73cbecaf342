/*
 * The header lines of one answer in one buffer: name NUL value NUL, in the order they came. Pure; a
 * zeroed mb_buf is none, mb_buf_reset() forgets all. Names and values hold no NUL.
 */
#ifndef MOBULA_BASE_HTTP_HEADERS_H
#define MOBULA_BASE_HTTP_HEADERS_H

#include <stddef.h>
#include "base/buf.h"

/* Both are copied. 0, or MB_ENOMEM: then headers is no longer to be read. */
int mb_http_headers_add(struct mb_buf *headers, const char *name, size_t n_name, const char *value,
                        size_t n_value);
/* Value of the first header of that name (case-insensitive, RFC 9110 section 5.1) that comes after
 * the one whose value is `after`; NULL: from the start. Borrowed from headers; NULL: no more. */
const char *mb_http_headers_next(const struct mb_buf *headers, const char *name, const char *after);

#endif
