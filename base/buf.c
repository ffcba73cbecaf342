/*
 * Growable bytes.
 *
 *  1. mb_buf_reserve() is the only place that allocates: capacity doubles from 64 bytes, so adding
 *     n bytes one by one costs O(n).
 *  2. Every function that adds reserves first and writes afterwards; when memory is out or the
 *     length would overflow, nothing has changed and MB_ENOMEM is returned.
 *  3. After every change the byte behind the last is NUL.
 */
#include "base/buf.h"

#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"
#include "base/err.h"

enum { FIRST_CAP_BYTES = 64 };

void mb_buf_close(struct mb_buf *b)
{
    mb_free(b->data);
    *b = (struct mb_buf){0};
}

void mb_buf_reset(struct mb_buf *b)
{
    b->len = 0;
    if (b->data != NULL)
        b->data[0] = '\0';
}

int mb_buf_reserve(struct mb_buf *b, size_t extra)
{
    size_t need;
    size_t cap = b->cap == 0 ? FIRST_CAP_BYTES : b->cap;
    uint8_t *data;

    if (extra > SIZE_MAX / 2 - 1 || b->len > SIZE_MAX / 2 - 1 - extra)
        return MB_ENOMEM;
    need = b->len + extra + 1;
    if (need <= b->cap)
        return 0;
    while (cap < need)
        cap *= 2;
    data = mb_realloc(b->data, cap);
    if (data == NULL)
        return MB_ENOMEM;
    data[b->len] = '\0';
    b->data = data;
    b->cap = cap;
    return 0;
}

int mb_buf_add(struct mb_buf *b, const void *p, size_t n)
{
    if (n == 0)
        return 0;
    if (mb_buf_reserve(b, n) != 0)
        return MB_ENOMEM;
    memcpy(b->data + b->len, p, n);
    b->len += n;
    b->data[b->len] = '\0';
    return 0;
}

int mb_buf_puts(struct mb_buf *b, const char *s)
{
    return mb_buf_add(b, s, strlen(s));
}

int mb_buf_vprintf(struct mb_buf *b, const char *fmt, va_list ap)
{
    va_list measure;
    int len;

    va_copy(measure, ap);
    len = vsnprintf(NULL, 0, fmt, measure);
    va_end(measure);
    if (len < 0 || mb_buf_reserve(b, (size_t)len) != 0)
        return MB_ENOMEM;
    vsnprintf((char *)b->data + b->len, (size_t)len + 1, fmt, ap);
    b->len += (size_t)len;
    return 0;
}

int mb_buf_printf(struct mb_buf *b, const char *fmt, ...)
{
    va_list ap;
    int rc;

    va_start(ap, fmt);
    rc = mb_buf_vprintf(b, fmt, ap);
    va_end(ap);
    return rc;
}

static int add_le(struct mb_buf *b, uint64_t v, size_t n_bytes)
{
    uint8_t bytes[8];

    for (size_t i = 0; i < n_bytes; i++)
        bytes[i] = (uint8_t)(v >> (8 * i));
    return mb_buf_add(b, bytes, n_bytes);
}

int mb_buf_url(struct mb_buf *b, const char *s, int keep_slash)
{
    static const char plain[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~";
    size_t len = b->len;
    int rc = 0;

    for (; rc == 0 && *s; s++) {
        if (strchr(plain, *s) || (*s == '/' && keep_slash))
            rc = mb_buf_add(b, s, 1);
        else
            rc = mb_buf_printf(b, "%%%02X", (unsigned char)*s);
    }
    if (rc != 0 && b->data) {
        b->len = len;
        b->data[len] = '\0';
    }
    return rc;
}

int mb_buf_shell(struct mb_buf *b, const char *word)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                "@%_-+=:,./";
    size_t len = b->len;
    int rc;

    if (*word && word[strspn(word, plain)] == '\0')
        return mb_buf_puts(b, word);
    rc = mb_buf_add(b, "'", 1);
    for (; *word && rc == 0; word++)
        rc = *word == '\'' ? mb_buf_puts(b, "'\"'\"'") : mb_buf_add(b, word, 1);
    rc = rc ? rc : mb_buf_add(b, "'", 1);
    if (rc != 0 && b->data) {
        b->len = len;
        b->data[len] = '\0';
    }
    return rc;
}

int mb_buf_utf8(struct mb_buf *b, const void *p, size_t n)
{
    const uint8_t *text = p;
    size_t len = b->len, begin = 0;
    int rc = 0;

    for (size_t at = 0; rc == 0 && at < n;) {
        size_t length;
        int is_whole = mb_utf8_look(text + at, n - at, &length) == MB_UTF8_WHOLE;

        at += length;
        if (is_whole && at < n)
            continue;
        rc = mb_buf_add(b, text + begin, (is_whole ? at : at - length) - begin);
        if (rc == 0 && !is_whole)
            rc = mb_buf_add(b, "\xEF\xBF\xBD", 3);
        begin = at;
    }
    if (rc != 0 && b->data) {
        b->len = len;
        b->data[len] = '\0';
    }
    return rc;
}

int mb_buf_u32le(struct mb_buf *b, uint32_t v)
{
    return add_le(b, v, 4);
}

int mb_buf_u64le(struct mb_buf *b, uint64_t v)
{
    return add_le(b, v, 8);
}

void mb_buf_consume(struct mb_buf *b, size_t n)
{
    if (n == 0)
        return;
    memmove(b->data, b->data + n, b->len - n);
    b->len -= n;
    b->data[b->len] = '\0';
}

const char *mb_buf_str(const struct mb_buf *b)
{
    return b->data == NULL ? "" : (const char *)b->data;
}

char *mb_buf_take(struct mb_buf *b)
{
    char *text;

    if (b->data == NULL && mb_buf_reserve(b, 0) != 0)
        return NULL;
    text = (char *)b->data;
    *b = (struct mb_buf){0};
    return text;
}
