/*
 * 1. Every function first passes white space. 2. A string without escapes is copied at once, one
 * with them piece by piece; a surrogate pair becomes one character, a lone surrogate is an error.
 * 3. A value that is passed is checked for balanced brackets and well-formed strings; whoever wants
 * more of it reads its bytes with jansson. The first error stops everything: p stays at it.
 */
#include <stdlib.h>
#include <string.h>
#include "worker/data/tokenizer/json_scan.h"
#include "worker/data/tokenizer/utf8.h"

enum { MAX_DEPTH = 64 };

int mb_json_scan_fail(struct mb_json_scan *s, const char *expected)
{
    size_t line = 1;

    for (const char *p = s->text; p < s->p && p < s->end; p++)
        line += *p == '\n';
    return mb_err_set(s->err, MB_ECORRUPT, "%s:%zu: expected %s at byte %zu", s->name, line,
                      expected, (size_t)(s->p - s->text));
}

static void pass_space(struct mb_json_scan *s)
{
    while (s->p < s->end && (*s->p == ' ' || *s->p == '\n' || *s->p == '\r' || *s->p == '\t'))
        s->p++;
}

char mb_json_scan_peek(struct mb_json_scan *s)
{
    pass_space(s);
    return s->p < s->end ? *s->p : 0;
}

static int pass(struct mb_json_scan *s, char c)
{
    if (mb_json_scan_peek(s) != c)
        return 0;
    s->p++;
    return 1;
}

int mb_json_scan_enter(struct mb_json_scan *s, char open)
{
    if (pass(s, open))
        return 0;
    return mb_json_scan_fail(s, open == '{' ? "an object" : "an array");
}

static int next_of(struct mb_json_scan *s, size_t *n, char close)
{
    if (*n == 0 && pass(s, close))
        return 0;
    if (*n > 0 && pass(s, close))
        return 0;
    if (*n > 0 && !pass(s, ','))
        return mb_json_scan_fail(s, close == '}' ? "\",\" or \"}\"" : "\",\" or \"]\"");
    ++*n;
    return 1;
}

int mb_json_scan_item(struct mb_json_scan *s, size_t *n)
{
    return next_of(s, n, ']');
}

int mb_json_scan_member(struct mb_json_scan *s, size_t *n, struct mb_buf *key)
{
    int rc = next_of(s, n, '}');

    if (rc <= 0)
        return rc;
    mb_buf_reset(key);
    rc = mb_json_scan_string(s, key);
    if (rc == 0 && !pass(s, ':'))
        rc = mb_json_scan_fail(s, "\":\"");
    return rc == 0 ? 1 : rc;
}

static int hex4(struct mb_json_scan *s, uint32_t *out)
{
    *out = 0;
    for (int i = 0; i < 4; i++, s->p++) {
        char c = s->p < s->end ? *s->p : 0;
        uint32_t digit =
            c >= '0' && c <= '9' ? (uint32_t)(c - '0') : (uint32_t)((c | 32) - 'a') + 10;
        if (!(c >= '0' && c <= '9') && !((c | 32) >= 'a' && (c | 32) <= 'f'))
            return mb_json_scan_fail(s, "four hexadecimal digits");
        *out = *out << 4 | digit;
    }
    return 0;
}

/* What follows \u, p behind it. */
static int unicode_escape(struct mb_json_scan *s, struct mb_buf *out)
{
    uint32_t c, low;
    uint8_t bytes[4];
    int rc = hex4(s, &c);

    if (rc == 0 && c >= 0xd800 && c < 0xe000) {
        if (c >= 0xdc00 || s->end - s->p < 2 || s->p[0] != '\\' || s->p[1] != 'u')
            return mb_json_scan_fail(s, "a surrogate pair");
        s->p += 2;
        rc = hex4(s, &low);
        if (rc == 0 && (low < 0xdc00 || low >= 0xe000))
            return mb_json_scan_fail(s, "a surrogate pair");
        c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
    }
    if (rc != 0)
        return rc;
    size_t n = mb_utf8_encode(c, bytes);
    return out != NULL && mb_buf_add(out, bytes, n) != 0
               ? mb_err_set(s->err, MB_ENOMEM, "%s: out of memory", s->name)
               : 0;
}

static int escape(struct mb_json_scan *s, struct mb_buf *out)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char *found;

    s->p++;
    if (s->p == s->end)
        return mb_json_scan_fail(s, "an escape");
    if (*s->p == 'u') {
        s->p++;
        return unicode_escape(s, out);
    }
    found = memchr(from, *s->p, sizeof(from) - 1);
    if (found == NULL)
        return mb_json_scan_fail(s, "an escape");
    s->p++;
    return out != NULL && mb_buf_add(out, &to[found - from], 1) != 0
               ? mb_err_set(s->err, MB_ENOMEM, "%s: out of memory", s->name)
               : 0;
}

/* A bit in the top of each byte that is no plain ASCII of a string; above the lowest of them there
 * may be others. */
static uint64_t special_bytes(const char *p)
{
    const uint64_t ones = 0x0101010101010101u;
    const uint64_t tops = 0x8080808080808080u;
    uint64_t word, quote, escape;

    memcpy(&word, p, sizeof(word));
    quote = word ^ ones * '"';
    escape = word ^ ones * '\\';
    return (word | (word - ones * 0x20) | (quote - ones) | (escape - ones)) & tops;
}

static void pass_plain(struct mb_json_scan *s)
{
    for (; s->end - s->p >= 8; s->p += 8) {
        uint64_t special = special_bytes(s->p);

        if (special != 0) {
            s->p += __builtin_ctzll(special) / 8;
            return;
        }
    }
}

/* The string at p; without out it is only checked. */
static int string(struct mb_json_scan *s, struct mb_buf *out)
{
    if (!pass(s, '"'))
        return mb_json_scan_fail(s, "a string");
    for (;;) {
        const char *start = s->p;
        uint32_t c;
        size_t length = 1;

        pass_plain(s);
        while (s->p < s->end && *s->p != '"' && *s->p != '\\' && (uint8_t)*s->p >= 0x20) {
            length = mb_utf8_decode((const uint8_t *)s->p, (const uint8_t *)s->end, &c);
            if (length == 0)
                return mb_json_scan_fail(s, "UTF-8");
            s->p += length;
            if (length > 1)
                pass_plain(s);
        }
        if (out != NULL && mb_buf_add(out, start, (size_t)(s->p - start)) != 0)
            return mb_err_set(s->err, MB_ENOMEM, "%s: out of memory", s->name);
        if (s->p == s->end || (uint8_t)*s->p < 0x20)
            return mb_json_scan_fail(s, "the end of a string");
        if (*s->p == '"') {
            s->p++;
            return 0;
        }
        int rc = escape(s, out);
        if (rc != 0)
            return rc;
    }
}

int mb_json_scan_string(struct mb_json_scan *s, struct mb_buf *out)
{
    return string(s, out);
}

int mb_json_scan_int(struct mb_json_scan *s, int64_t *out)
{
    const char *start;
    int64_t value = 0;
    int negative;

    mb_json_scan_peek(s);
    negative = s->p < s->end && *s->p == '-';
    s->p += negative;
    for (start = s->p; s->p < s->end && *s->p >= '0' && *s->p <= '9'; s->p++) {
        if (s->p - start >= 18)
            return mb_json_scan_fail(s, "a whole number below 10^18");
        value = value * 10 + (*s->p - '0');
    }
    if (s->p == start || (s->p < s->end && strchr(".eE", *s->p) != NULL && *s->p != 0) ||
        (*start == '0' && s->p - start > 1))
        return mb_json_scan_fail(s, "a whole number");
    *out = negative ? -value : value;
    return 0;
}

static int word_or_number(struct mb_json_scan *s)
{
    const char *start = s->p;

    while (s->p < s->end &&
           (((*s->p | 32) >= 'a' && (*s->p | 32) <= 'z') || (*s->p >= '0' && *s->p <= '9') ||
            *s->p == '.' || *s->p == '-' || *s->p == '+'))
        s->p++;
    return s->p > start ? 0 : mb_json_scan_fail(s, "a value");
}

int mb_json_scan_value(struct mb_json_scan *s, const char **start, size_t *n)
{
    size_t depth = 0;

    mb_json_scan_peek(s);
    const char *first = s->p;
    do {
        char c = mb_json_scan_peek(s);
        int rc = 0;

        if (c == '"') {
            rc = string(s, NULL);
        } else if (c == '{' || c == '[') {
            if (++depth > MAX_DEPTH)
                return mb_json_scan_fail(s, "less nesting");
            s->p++;
        } else if ((c == '}' || c == ']') && depth > 0) {
            depth--;
            s->p++;
        } else if ((c == ',' || c == ':') && depth > 0) {
            s->p++;
        } else {
            rc = word_or_number(s);
        }
        if (rc != 0)
            return rc;
    } while (depth > 0);
    if (start != NULL) {
        *start = first;
        *n = (size_t)(s->p - first);
    }
    return 0;
}

int mb_json_scan_end(struct mb_json_scan *s)
{
    return mb_json_scan_peek(s) == 0 && s->p == s->end
               ? 0
               : mb_json_scan_fail(s, "the end of the text");
}
