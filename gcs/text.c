/*
 * 1. Characters are told apart by mb_utf8_look(); whole ones are copied, JSON's own escaped.
 * 2. A broken part, and at the end a cut one, becomes one U+FFFD, as Python's errors="replace".
 * 3. Without a loss bytes are ISO 8859-1, whose 256 characters are Unicode's first.
 */
#include "gcs/text.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "base/str.h"

static const char replacement[] = "\xef\xbf\xbd";

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
        size_t len;
        enum mb_utf8 v = mb_utf8_look(p + i, n - i, &len);
        if (v == MB_UTF8_PARTIAL && !at_end)
            break;
        if (v != MB_UTF8_WHOLE) {
            memcpy(out + o, replacement, 3);
            o += 3;
        } else if (len == 1) {
            o += escape_ascii(p[i], out + o);
        } else {
            memcpy(out + o, p + i, len);
            o += len;
        }
        i += len;
    }
    *used = i;
    return o;
}

size_t mb_text_json_bytes(const void *in, size_t n, char *out)
{
    const uint8_t *p = in;
    size_t o = 0;

    for (size_t i = 0; i < n; i++) {
        if (p[i] < 0x80) {
            o += escape_ascii(p[i], out + o);
        } else {
            out[o++] = (char)(0xc0 | p[i] >> 6);
            out[o++] = (char)(0x80 | (p[i] & 0x3f));
        }
    }
    return o;
}

int mb_text_bytes(const char *in, size_t n, struct mb_buf *out)
{
    const uint8_t *p = (const uint8_t *)in;
    int rc = mb_buf_reserve(out, n);

    for (size_t i = 0; rc == 0 && i < n; i++) {
        uint8_t byte = p[i];

        if (byte >= 0x80) {
            if ((byte != 0xc2 && byte != 0xc3) || ++i == n || (p[i] & 0xc0) != 0x80)
                return MB_EPROTO;
            byte = (uint8_t)((byte & 3) << 6 | (p[i] & 0x3f));
        }
        rc = mb_buf_add(out, &byte, 1);
    }
    return rc;
}

int mb_text_clean(const char *in, size_t n, struct mb_buf *out)
{
    for (size_t i = 0; i < n;) {
        size_t len;
        int whole = mb_utf8_look(in + i, n - i, &len) == MB_UTF8_WHOLE;
        int rc = whole ? mb_buf_add(out, in + i, len) : mb_buf_add(out, replacement, 3);
        if (rc != 0)
            return rc;
        i += len;
    }
    return 0;
}
