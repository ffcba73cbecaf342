/*
 * 1. A pair is added whole. 2. A look-up walks over pairs; where a value ends the next name begins.
 * Failure path: memory ends amid a pair; what is in the buffer then is no list of pairs.
 */
#include "base/http/headers.h"

#include <string.h>
#include <strings.h>
#include "base/err.h"

int mb_http_headers_add(struct mb_buf *headers, const char *name, size_t n_name, const char *value,
                        size_t n_value)
{
    if (mb_buf_add(headers, name, n_name) != 0 || mb_buf_add(headers, "", 1) != 0 ||
        mb_buf_add(headers, value, n_value) != 0 || mb_buf_add(headers, "", 1) != 0)
        return MB_ENOMEM;
    return 0;
}

const char *mb_http_headers_next(const struct mb_buf *headers, const char *name, const char *after)
{
    const char *p = mb_buf_str(headers);
    const char *end = p + headers->len;

    if (after)
        p = after + strlen(after) + 1;
    while (p < end) {
        const char *value = p + strlen(p) + 1;
        if (strcasecmp(p, name) == 0)
            return value;
        p = value + strlen(value) + 1;
    }
    return NULL;
}
