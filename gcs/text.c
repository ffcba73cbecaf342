/* One decoder (RFC 3629: no overlong forms, no surrogates, up to U+10FFFF), two users. */
#include "gcs/text.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

static const char replacement[] = "\xef\xbf\xbd";

int mb_text_sequence(const void *bytes, size_t n)
{
    const uint8_t *p = bytes;
    uint8_t lo = 0x80, hi = 0xbf;
    int len;

    if (n == 0)
        return -1;
    if (p[0] < 0x80)
        return 1;
    if (p[0] < 0xc2 || p[0] > 0xf4)
        return 0;
    len = p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
    if (p[0] == 0xe0)
        lo = 0xa0;
    else if (p[0] == 0xed)
        hi = 0x9f;
    else if (p[0] == 0xf0)
        lo = 0x90;
    else if (p[0] == 0xf4)
        hi = 0x8f;
    for (int i = 1; i < len; i++) {
        if ((size_t)i == n)
            return -1;
        if (p[i] < lo || p[i] > hi)
            return 0;
        lo = 0x80;
        hi = 0xbf;
    }
    return len;
}

static size_t escape_ascii(uint8_t c, char *out)
{
    static const char names[] = "btn?fr"; /* \b .. \r, without \v */

    if (c == '"' || c == '\\') {
        out[0] = '\\';
        out[1] = (char)c;
        return 2;
    }
    if (c >= 0x08 && c <= 0x0d && c != 0x0b) {
        out[0] = '\\';
        out[1] = names[c - 0x08];
        return 2;
    }
    if (c < 0x20 || c == 0x7f) {
        static const char digits[] = "0123456789abcdef";
        memcpy(out, "\\u00", 4);
        out[4] = digits[c >> 4];
        out[5] = digits[c & 15];
        return 6;
    }
    out[0] = (char)c;
    return 1;
}

size_t mb_text_json(const void *in, size_t n, int at_end, char *out, size_t *used)
{
    const uint8_t *p = in;
    size_t i = 0, o = 0;

    while (i < n) {
        int len = mb_text_sequence(p + i, n - i);
        if (len == -1 && !at_end)
            break;
        if (len == 1) {
            o += escape_ascii(p[i], out + o);
        } else if (len > 1) {
            memcpy(out + o, p + i, (size_t)len);
            o += (size_t)len;
        } else {
            memcpy(out + o, replacement, 3);
            o += 3;
        }
        i += len > 0 ? (size_t)len : 1;
    }
    *used = i;
    return o;
}

int mb_text_clean(const char *in, size_t n, struct mb_buf *out)
{
    for (size_t i = 0; i < n;) {
        int len = mb_text_sequence(in + i, n - i);
        int rc = len > 0 ? mb_buf_add(out, in + i, (size_t)len) : mb_buf_add(out, replacement, 3);
        if (rc != 0)
            return rc;
        i += len > 0 ? (size_t)len : 1;
    }
    return 0;
}
