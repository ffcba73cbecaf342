/*
 * Text helpers without locale and without allocation.
 *
 *  1. Number parsers take the whole string or nothing: leading blanks, trailing bytes, overflow and
 *     values out of range are MB_EINVAL, and the text names what was being read and what it got.
 *  2. Sizes and durations are an unsigned decimal number and a unit from a table; the product is
 *     checked for overflow.
 *  3. UTF-8 is checked by one decoder (mb_utf8_look) that knows the shortest form, surrogates and
 *     the last code point; RFC 3629 section 4.
 */
#include "base/str.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

char *mb_hex(const void *p, size_t n, char *out)
{
    static const char digits[] = "0123456789abcdef";
    const uint8_t *bytes = p;

    for (size_t i = 0; i < n; i++) {
        out[2 * i] = digits[bytes[i] >> 4];
        out[2 * i + 1] = digits[bytes[i] & 15];
    }
    out[2 * n] = '\0';
    return out;
}

int mb_hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

int mb_unhex(const char *hex, void *out, size_t n)
{
    uint8_t *bytes = out;

    for (size_t i = 0; i < 2 * n; i++) {
        if (mb_hex_digit(hex[i]) < 0)
            return MB_EINVAL;
    }
    if (hex[2 * n] != '\0')
        return MB_EINVAL;
    for (size_t i = 0; i < n; i++)
        bytes[i] = (uint8_t)(mb_hex_digit(hex[2 * i]) << 4 | mb_hex_digit(hex[2 * i + 1]));
    return 0;
}

int mb_parse_i64(const char *s, int64_t min, int64_t max, const char *what, int64_t *out,
                 struct mb_err *err)
{
    char *end;
    long long v;

    errno = 0;
    v = strtoll(s, &end, 10);
    if (end == s || *end != '\0' || isspace((unsigned char)s[0]))
        return mb_err_set(err, MB_EINVAL, "%s: expected a whole number, got \"%s\"", what, s);
    if (errno == ERANGE || v < min || v > max)
        return mb_err_set(err, MB_EINVAL, "%s: %s is outside %lld..%lld", what, s, (long long)min,
                          (long long)max);
    *out = v;
    return 0;
}

int mb_parse_double(const char *s, const char *what, double *out, struct mb_err *err)
{
    char *end;
    double v;

    /* strtod also takes blanks, hexadecimal, "inf" and "nan"; none of them is a setting. */
    if (s[strspn(s, "0123456789+-.eE")] != '\0')
        return mb_err_set(err, MB_EINVAL, "%s: expected a number, got \"%s\"", what, s);
    errno = 0;
    v = strtod(s, &end);
    if (end == s || *end != '\0')
        return mb_err_set(err, MB_EINVAL, "%s: expected a number, got \"%s\"", what, s);
    if (!isfinite(v))
        return mb_err_set(err, MB_EINVAL, "%s: %s is too large", what, s);
    *out = v;
    return 0;
}

struct unit {
    const char *name;
    uint64_t factor;
};

/* A decimal number and one of the units; the table ends with name NULL. */
static int parse_with_unit(const char *s, const struct unit *units, const char *expected,
                           const char *what, uint64_t *out, struct mb_err *err)
{
    unsigned long long v;
    uint64_t product;
    char *end;

    if (!isdigit((unsigned char)s[0]))
        return mb_err_set(err, MB_EINVAL, "%s: expected %s, got \"%s\"", what, expected, s);
    errno = 0;
    v = strtoull(s, &end, 10);
    for (; units->name != NULL; units++) {
        if (strcasecmp(end, units->name) != 0)
            continue;
        if (errno == ERANGE || __builtin_mul_overflow((uint64_t)v, units->factor, &product))
            return mb_err_set(err, MB_EINVAL, "%s: %s is too large", what, s);
        *out = product;
        return 0;
    }
    return mb_err_set(err, MB_EINVAL, "%s: expected %s, got \"%s\"", what, expected, s);
}

int mb_parse_size(const char *s, const char *what, uint64_t *out, struct mb_err *err)
{
    static const struct unit units[] = {
        {"", 1},
        {"b", 1},
        {"k", 1u << 10},
        {"kb", 1u << 10},
        {"kib", 1u << 10},
        {"m", 1u << 20},
        {"mb", 1u << 20},
        {"mib", 1u << 20},
        {"g", 1u << 30},
        {"gb", 1u << 30},
        {"gib", 1u << 30},
        {"t", 1ull << 40},
        {"tb", 1ull << 40},
        {"tib", 1ull << 40},
        {NULL, 0},
    };

    return parse_with_unit(s, units, "a size like 64K, 16MiB or 2GB", what, out, err);
}

int mb_parse_duration_ms(const char *s, const char *what, uint64_t *out, struct mb_err *err)
{
    static const struct unit units[] = {
        {"", 1000}, {"ms", 1}, {"s", 1000}, {"m", 60000}, {"h", 3600000}, {NULL, 0},
    };

    return parse_with_unit(s, units, "a duration like 250ms, 30s, 5m or 2h", what, out, err);
}

int mb_starts_with(const char *s, const char *prefix)
{
    return strncmp(s, prefix, strlen(prefix)) == 0;
}

int mb_ends_with(const char *s, const char *suffix)
{
    size_t len = strlen(s);
    size_t suffix_len = strlen(suffix);

    return len >= suffix_len && strcmp(s + len - suffix_len, suffix) == 0;
}

/* Bytes a sequence starting with this byte has; 0 if no sequence starts with it. */
static size_t utf8_length(uint8_t first)
{
    if (first < 0x80)
        return 1;
    if (first >= 0xc2 && first <= 0xdf)
        return 2;
    if (first >= 0xe0 && first <= 0xef)
        return 3;
    if (first >= 0xf0 && first <= 0xf4)
        return 4;
    return 0;
}

enum mb_utf8 mb_utf8_look(const void *bytes, size_t n, size_t *len)
{
    const uint8_t *p = bytes;
    size_t need = utf8_length(p[0]);
    uint8_t low = 0x80, high = 0xbf; /* of the second byte */

    if (p[0] == 0xe0)
        low = 0xa0; /* overlong below */
    else if (p[0] == 0xed)
        high = 0x9f; /* surrogates above */
    else if (p[0] == 0xf0)
        low = 0x90;
    else if (p[0] == 0xf4)
        high = 0x8f; /* beyond U+10FFFF above */
    *len = 1;
    if (need == 0)
        return MB_UTF8_BROKEN;
    for (; *len < need; ++*len) {
        if (*len == n)
            return MB_UTF8_PARTIAL;
        if (p[*len] < low || p[*len] > high)
            return MB_UTF8_BROKEN;
        low = 0x80;
        high = 0xbf;
    }
    return MB_UTF8_WHOLE;
}

int mb_utf8_valid(const void *p, size_t n)
{
    const uint8_t *at = p;

    while (n > 0) {
        size_t len;

        if (mb_utf8_look(at, n, &len) != MB_UTF8_WHOLE)
            return 0;
        at += len;
        n -= len;
    }
    return 1;
}

size_t mb_utf8_floor(const void *p, size_t n)
{
    const uint8_t *bytes = p;

    /* Only the last three bytes can begin a sequence that n cuts. */
    for (size_t back = 1; back <= 3 && back <= n; back++) {
        uint8_t c = bytes[n - back];

        if ((c & 0xc0) == 0x80)
            continue;
        return utf8_length(c) > back ? n - back : n;
    }
    return n;
}

enum { NEAREST_MAX_BYTES = 64, NEAREST_MAX_DISTANCE = 3 };

/* Levenshtein distance of two words of at most NEAREST_MAX_BYTES, one row at a time. */
static size_t edit_distance(const char *a, size_t a_len, const char *b, size_t b_len)
{
    size_t row[NEAREST_MAX_BYTES + 1];

    for (size_t j = 0; j <= b_len; j++)
        row[j] = j;
    for (size_t i = 1; i <= a_len; i++) {
        size_t diagonal = row[0];

        row[0] = i;
        for (size_t j = 1; j <= b_len; j++) {
            size_t best = diagonal + (a[i - 1] != b[j - 1]);

            if (row[j] + 1 < best)
                best = row[j] + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[b_len];
}

const char *mb_nearest(const char *word, const char *const *candidates)
{
    size_t word_len = strlen(word);
    size_t limit = word_len / 2 < NEAREST_MAX_DISTANCE ? word_len / 2 : NEAREST_MAX_DISTANCE;
    const char *nearest = NULL;

    if (word_len > NEAREST_MAX_BYTES)
        return NULL;
    for (; *candidates != NULL; candidates++) {
        size_t len = strlen(*candidates);
        size_t distance;

        if (len > NEAREST_MAX_BYTES)
            continue;
        distance = edit_distance(word, word_len, *candidates, len);
        if (distance > limit || (nearest != NULL && distance == limit))
            continue;
        nearest = *candidates;
        limit = distance;
    }
    return nearest;
}

char *mb_human_bytes(uint64_t bytes, char out[16])
{
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double v = (double)bytes;
    int unit = -1;

    /* 1023.95 would be printed as 1024.0 of the smaller unit. */
    while (unit < 5 && v >= (unit < 0 ? 1024.0 : 1023.95)) {
        v /= 1024.0;
        unit++;
    }
    if (unit < 0)
        snprintf(out, 16, "%u B", (unsigned)bytes);
    else
        snprintf(out, 16, "%.1f %s", v, units[unit]);
    return out;
}
