/* One character of UTF-8, decoded strictly (RFC 3629). Pure. */
#ifndef MOBULA_WORKER_DATA_TOKENIZER_UTF8_H
#define MOBULA_WORKER_DATA_TOKENIZER_UTF8_H

#include <stddef.h>
#include <stdint.h>

static inline int mb_utf8_is_tail(uint8_t byte)
{
    return (byte & 0xc0) == 0x80;
}

/* Length of the character at p < end, its code point in *point; 0 when the bytes are no UTF-8. */
static inline size_t mb_utf8_decode(const uint8_t *p, const uint8_t *end, uint32_t *point)
{
    size_t left = (size_t)(end - p);
    uint32_t c = p[0];

    if (c < 0x80) {
        *point = c;
        return 1;
    }
    if (c >= 0xc2 && c < 0xe0 && left >= 2 && mb_utf8_is_tail(p[1])) {
        *point = (c & 0x1f) << 6 | (p[1] & 0x3fu);
        return 2;
    }
    if ((c & 0xf0) == 0xe0 && left >= 3 && mb_utf8_is_tail(p[1]) && mb_utf8_is_tail(p[2])) {
        c = (c & 0x0f) << 12 | (p[1] & 0x3fu) << 6 | (p[2] & 0x3fu);
        *point = c;
        return c < 0x800 || (c >= 0xd800 && c < 0xe000) ? 0 : 3;
    }
    if ((c & 0xf8) == 0xf0 && left >= 4 && mb_utf8_is_tail(p[1]) && mb_utf8_is_tail(p[2]) &&
        mb_utf8_is_tail(p[3])) {
        c = (c & 0x07) << 18 | (p[1] & 0x3fu) << 12 | (p[2] & 0x3fu) << 6 | (p[3] & 0x3fu);
        *point = c;
        return c < 0x10000 || c > 0x10ffff ? 0 : 4;
    }
    return 0;
}

/* Writes the code point's bytes to out[4]; their number. */
static inline size_t mb_utf8_encode(uint32_t c, uint8_t out[4])
{
    if (c < 0x80) {
        out[0] = (uint8_t)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (uint8_t)(0xc0 | c >> 6);
        out[1] = (uint8_t)(0x80 | (c & 0x3f));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (uint8_t)(0xe0 | c >> 12);
        out[1] = (uint8_t)(0x80 | (c >> 6 & 0x3f));
        out[2] = (uint8_t)(0x80 | (c & 0x3f));
        return 3;
    }
    out[0] = (uint8_t)(0xf0 | c >> 18);
    out[1] = (uint8_t)(0x80 | (c >> 12 & 0x3f));
    out[2] = (uint8_t)(0x80 | (c >> 6 & 0x3f));
    out[3] = (uint8_t)(0x80 | (c & 0x3f));
    return 4;
}

#endif
