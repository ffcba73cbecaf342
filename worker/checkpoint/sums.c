/*
 *  1. A member is found by its quoted name, a colon, and a quote: within strings of JSON quotes are
 *     escaped, so nothing else looks like it.
 *  2. The checksum goes over the text before the digits, zeros in their place, and the rest.
 */
#include "worker/checkpoint/sums.h"

#include <assert.h>
#include <string.h>
#include "base/checksum.h"

char *mb_sums_value(char *text, size_t n, const char *key)
{
    const size_t n_key = strlen(key);
    char *end = text + n;
    for (char *p = text; (p = memmem(p, (size_t)(end - p), key, n_key)) != NULL; p += n_key) {
        char *q = p + n_key;
        if (p == text || p[-1] != '"' || q == end || *q++ != '"') {
            continue;
        }
        while (q < end && (*q == ' ' || *q == ':')) {
            q++;
        }
        if (q < end && *q == '"' && q[-1] != '"') {
            return q + 1;
        }
    }
    return NULL;
}

static uint64_t checksum(const char *text, size_t n, const char *digits)
{
    const char *rest = digits + MB_SUMS_DIGITS;
    uint64_t crc = mb_crc64nvme(0, text, (size_t)(digits - text));
    crc = mb_crc64nvme(crc, MB_SUMS_NONE, MB_SUMS_DIGITS);
    return mb_crc64nvme(crc, rest, n - (size_t)(rest - text));
}

void mb_seal_set(char *text, size_t n, const char *key)
{
    char *digits = mb_sums_value(text, n, key);
    assert(digits != NULL && memcmp(digits, MB_SUMS_NONE, MB_SUMS_DIGITS) == 0);
    mb_sums_put(digits, checksum(text, n, digits));
}

enum mb_seal mb_seal_check(const char *text, size_t n, const char *key)
{
    const char *digits = mb_sums_value((char *)(uintptr_t)text, n, key);
    uint64_t crc;
    if (digits == NULL) {
        return MB_SEAL_ABSENT;
    }
    return (size_t)(text + n - digits) >= MB_SUMS_DIGITS && mb_sums_get(digits, &crc) == 0 &&
                   crc == checksum(text, n, digits)
               ? MB_SEAL_FITS
               : MB_SEAL_BROKEN;
}

void mb_sums_put(char *digits, uint64_t crc)
{
    for (int i = MB_SUMS_DIGITS; i-- > 0; crc >>= 4) {
        digits[i] = "0123456789abcdef"[crc & 15];
    }
}

int mb_sums_get(const char *digits, uint64_t *crc)
{
    *crc = 0;
    for (int i = 0; i < MB_SUMS_DIGITS; i++) {
        const char c = digits[i];
        const int is_digit = c >= '0' && c <= '9';
        if (!is_digit && (c < 'a' || c > 'f')) {
            return -1;
        }
        *crc = *crc << 4 | (uint64_t)(is_digit ? c - '0' : c - 'a' + 10);
    }
    return 0;
}

uint64_t mb_sums_n_blocks(uint64_t data_bytes)
{
    return data_bytes / MB_SUMS_BLOCK_BYTES + (data_bytes % MB_SUMS_BLOCK_BYTES > 0);
}

size_t mb_sums_block_bytes(uint64_t data_bytes, uint64_t block)
{
    const uint64_t left = data_bytes - block * MB_SUMS_BLOCK_BYTES;
    return left < MB_SUMS_BLOCK_BYTES ? (size_t)left : MB_SUMS_BLOCK_BYTES;
}
