/*
 * From Oniguruma's syntax to PCRE2's.
 *
 * 1. The pattern is read once, atom by atom; what both read alike is copied.
 * 2. Rewritten: \s \d \w \h and \p{...} become sets of Unicode 16 (split_regex_set.c); \b becomes
 *    two pairs of lookarounds; (?m: is (?s:; an interval followed by + or ? is repeated, not
 *    possessive or lazy with a fixed count; {,n} counts from 0.
 * 3. Refused by name, with the byte: what means something else or nothing in the other syntax, and
 *    letters that Oniguruma folds to two characters under (?i).
 * Nothing is kept when it fails but what was appended to out; the caller drops it.
 */
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/split_regex_private.h"
#include "worker/data/tokenizer/unicode_category.h"
#include "worker/data/tokenizer/utf8.h"

enum { MAX_DEPTH = 100, MAX_REPEAT = 65535 };

struct translation {
    const char *pattern;
    const char *p;
    const char *end;
    struct mb_buf *out;
    struct mb_err *err;
    unsigned depth;
    int caseless;
    char last_letter; /* the ASCII letter just written under (?i), in lower case; 0: none */
};

static int refuse(struct translation *t, int code, const char *what)
{
    return mb_err_set(t->err, code, "pattern, byte %zu: %s", (size_t)(t->p - t->pattern), what);
}

static int no_memory(struct translation *t)
{
    return mb_err_set(t->err, MB_ENOMEM, "pattern: out of memory");
}

static int put(struct translation *t, const char *text)
{
    return mb_buf_puts(t->out, text) == 0 ? 0 : no_memory(t);
}

static char look(const struct translation *t, size_t ahead)
{
    return (size_t)(t->end - t->p) > ahead ? t->p[ahead] : 0;
}

/* Oniguruma folds these pairs of letters to one character (sharp s, ligatures). */
static int folds_together(char a, char b)
{
    static const char pairs[] = "ssfffiflst";

    for (const char *p = pairs; *p != 0; p += 2)
        if (p[0] == a && p[1] == b)
            return 1;
    return 0;
}

/* One character that stands for itself; *in_class: it is a member of a class. */
static int literal(struct translation *t, uint32_t c, int in_class)
{
    char lower = (char)(c | 0x20);
    int is_letter = c < 128 && lower >= 'a' && lower <= 'z';

    if (t->caseless && c >= 128)
        return refuse(t, MB_EUNSUPPORTED, "a character beyond ASCII under (?i) is not provided");
    if (t->caseless && is_letter && !in_class && folds_together(t->last_letter, lower))
        return refuse(t, MB_EUNSUPPORTED, "ss, st, ff, fi, fl under (?i) are not provided");
    t->last_letter = t->caseless && is_letter ? lower : 0;
    if (mb_buf_printf(t->out, is_letter ? "%c" : "\\x{%x}", (unsigned)c) != 0)
        return no_memory(t);
    return 0;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    return (c | 0x20) >= 'a' && (c | 0x20) <= 'f' ? (c | 0x20) - 'a' + 10 : -1;
}

static int read_hex(struct translation *t, size_t max, uint32_t *out)
{
    size_t n = 0;

    for (*out = 0; n < max && hex_digit(look(t, 0)) >= 0 && *out < 0x1000000; n++, t->p++)
        *out = *out << 4 | (uint32_t)hex_digit(*t->p);
    if (n == 0 || *out > 0x10ffff || (*out >= 0xd800 && *out < 0xe000))
        return refuse(t, MB_EINVAL, "a code point was expected");
    return 0;
}

/* "{NAME}" behind \p or \P. */
static int property(struct translation *t, int negated, int in_class)
{
    const char *close = memchr(t->p, '}', (size_t)(t->end - t->p));
    const char *name = t->p + 1;
    size_t n;
    uint32_t mask;
    int rc;

    if (look(t, 0) != '{' || close == NULL)
        return refuse(t, MB_EUNSUPPORTED, "\\p without {NAME} is not provided");
    if (t->caseless)
        return refuse(t, MB_EUNSUPPORTED, "\\p under (?i) is not provided");
    if (name < close && *name == '^') {
        negated = !negated;
        name++;
    }
    n = (size_t)(close - name);
    mask = mb_category_mask(name, n);
    if (mask == 0) {
        static const char *const scripts[] = {"Han",    "Hiragana", "Katakana",  "Hangul",
                                              "Latin",  "Greek",    "Cyrillic",  "Arabic",
                                              "Hebrew", "Thai",     "Devanagari"};
        for (size_t i = 0; i < sizeof(scripts) / sizeof(*scripts); i++) {
            if (strlen(scripts[i]) != n || strncmp(scripts[i], name, n) != 0)
                continue;
            t->p = close + 1;
            return mb_buf_printf(t->out, "\\%c{%s}", negated ? 'P' : 'p', scripts[i]) == 0
                       ? 0
                       : no_memory(t);
        }
        return refuse(t, MB_EUNSUPPORTED,
                      "this \\p{...} is not provided (general categories and common scripts are)");
    }
    t->p = close + 1;
    rc = in_class ? 0 : put(t, "[");
    if (rc == 0)
        rc = mb_split_regex_add_set(mask, negated, t->out, t->err);
    return rc == 0 && !in_class ? put(t, "]") : rc;
}

static int set_escape(struct translation *t, char letter, int in_class)
{
    int negated = letter >= 'A' && letter <= 'Z';
    int rc = in_class ? 0 : put(t, "[");

    if (rc != 0)
        return rc;
    switch (letter | 0x20) {
    case 's':
        rc = mb_split_regex_add_space(negated, t->out, t->err);
        break;
    case 'd':
        rc = mb_split_regex_add_set(1u << MB_CAT_ND, negated, t->out, t->err);
        break;
    case 'w':
        rc = mb_split_regex_add_word(negated, t->out, t->err);
        break;
    default: /* h */
        rc = put(t, negated ? "\\x{0}-/:-@G-`g-\\x{10ffff}" : "0-9A-Fa-f");
        break;
    }
    return rc == 0 && !in_class ? put(t, "]") : rc;
}

static int word_boundary(struct translation *t, int negated)
{
    struct mb_buf set = {0};
    int rc = mb_split_regex_add_word(0, &set, t->err);
    const char *s = mb_buf_str(&set);

    if (rc == 0 && mb_buf_printf(t->out,
                                 negated ? "(?:(?<=[%s])(?=[%s])|(?<![%s])(?![%s]))"
                                         : "(?:(?<=[%s])(?![%s])|(?<![%s])(?=[%s]))",
                                 s, s, s, s) != 0)
        rc = no_memory(t);
    mb_buf_close(&set);
    return rc;
}

/* The code point of an escape that is one character, p behind it; -1: it is no such escape. */
static int64_t one_char_escape(struct translation *t)
{
    static const char letters[] = "tnrfvae", values[] = "\t\n\r\f\v\a\x1b";
    char c = look(t, 1);
    const char *found = c != 0 ? strchr(letters, c) : NULL;
    uint32_t point;
    int rc = 0;

    if (found != NULL) {
        t->p += 2;
        return values[found - letters];
    }
    if (c == 'x' && look(t, 2) == '{') {
        t->p += 3;
        rc = read_hex(t, 8, &point);
        if (rc == 0 && look(t, 0) != '}')
            rc = refuse(t, MB_EINVAL, "\"}\" was expected");
        t->p++;
        return rc == 0 ? (int64_t)point : rc;
    }
    if (c == 'x' || c == 'u') {
        t->p += 2;
        if (c == 'u' && (hex_digit(look(t, 0)) < 0 || hex_digit(look(t, 1)) < 0 ||
                         hex_digit(look(t, 2)) < 0 || hex_digit(look(t, 3)) < 0))
            return refuse(t, MB_EINVAL, "four hexadecimal digits were expected");
        rc = read_hex(t, c == 'x' ? 2 : 4, &point);
        return rc == 0 ? (int64_t)point : rc;
    }
    if (c > 0x20 && c < 0x7f && !((c | 0x20) >= 'a' && (c | 0x20) <= 'z') &&
        !(c >= '0' && c <= '9')) {
        t->p += 2;
        return (uint8_t)c;
    }
    return INT64_MIN;
}

static int escape(struct translation *t, int in_class)
{
    char c = look(t, 1);
    int64_t point;

    if (c != 0 && strchr("sSdDwWhH", c) != NULL) {
        if (t->caseless && (c | 0x20) == 'h')
            return refuse(t, MB_EUNSUPPORTED, "\\h under (?i) is not provided");
        t->p += 2;
        t->last_letter = 0;
        return set_escape(t, c, in_class);
    }
    if (c == 'p' || c == 'P') {
        t->p += 2;
        t->last_letter = 0;
        return property(t, c == 'P', in_class);
    }
    if (!in_class && c != 0 && strchr("bBAzZ", c) != NULL) {
        t->p += 2;
        if (c == 'b' || c == 'B')
            return word_boundary(t, c == 'B');
        return put(t, (char[]){'\\', c, 0});
    }
    point = one_char_escape(t);
    if (point == INT64_MIN)
        return refuse(t, MB_EUNSUPPORTED, "this escape is not provided");
    return point < 0 ? (int)point : literal(t, (uint32_t)point, in_class);
}

/* One character of a class, its code point in *point; 1: it was a set and is written. */
static int class_member(struct translation *t, uint32_t *point)
{
    int64_t one;
    size_t n;

    if (*t->p == '\\') {
        char c = look(t, 1);
        if (c != 0 && strchr("sSdDwWhHpP", c) != NULL) {
            int rc = escape(t, 1);
            return rc == 0 ? 1 : rc;
        }
        one = c == 'b' ? 8 : one_char_escape(t);
        if (c == 'b')
            t->p += 2;
        if (one == INT64_MIN)
            return refuse(t, MB_EUNSUPPORTED, "this escape in a class is not provided");
        *point = (uint32_t)one;
        return one < 0 ? (int)one : 0;
    }
    if (*t->p == '[')
        return refuse(t, MB_EUNSUPPORTED, "a class in a class is not provided");
    if (*t->p == '&' && look(t, 1) == '&')
        return refuse(t, MB_EUNSUPPORTED, "&& in a class is not provided");
    n = mb_utf8_decode((const uint8_t *)t->p, (const uint8_t *)t->end, point);
    if (n == 0)
        return refuse(t, MB_EINVAL, "UTF-8 was expected");
    t->p += n;
    return 0;
}

static int class(struct translation *t)
{
    const char *first;
    int rc;

    t->p++;
    rc = put(t, "[");
    if (rc == 0 && look(t, 0) == '^') {
        t->p++;
        rc = put(t, "^");
    }
    for (first = t->p; rc == 0;) {
        uint32_t low, high;

        if (t->p == t->end)
            return refuse(t, MB_EINVAL, "\"]\" was expected");
        if (*t->p == ']' && t->p > first)
            break;
        rc = class_member(t, &low);
        if (rc == 1) {
            rc = look(t, 0) == '-' && look(t, 1) != ']'
                     ? refuse(t, MB_EUNSUPPORTED, "a range from a set is not provided")
                     : 0;
            continue;
        }
        if (rc == 0)
            rc = literal(t, low, 1);
        if (rc != 0 || look(t, 0) != '-' || look(t, 1) == ']' || look(t, 1) == 0)
            continue;
        t->p++;
        rc = class_member(t, &high);
        if (rc == 1 || (rc == 0 && high < low))
            rc = refuse(t, MB_EINVAL, "a range in a class is in the wrong order");
        if (rc == 0)
            rc = put(t, "-");
        if (rc == 0)
            rc = literal(t, high, 1);
    }
    t->p += rc == 0;
    t->last_letter = 0;
    return rc == 0 ? put(t, "]") : rc;
}

static int alternation(struct translation *t);

/* Behind "(?": what kind of group it is. */
static int group_head(struct translation *t, int *caseless)
{
    static const char *const plain[] = {":", "=", "!", "<=", "<!", ">"};
    int is_off = 0, is_dotall = 0;

    for (size_t i = 0; i < sizeof(plain) / sizeof(*plain); i++) {
        size_t n = strlen(plain[i]);
        if ((size_t)(t->end - t->p) >= n && memcmp(t->p, plain[i], n) == 0) {
            t->p += n;
            return mb_buf_printf(t->out, "(?%s", plain[i]) == 0 ? 0 : no_memory(t);
        }
    }
    for (; look(t, 0) != ':' && look(t, 0) != ')'; t->p++) {
        if (look(t, 0) == '-')
            is_off = 1;
        else if (look(t, 0) == 'i')
            *caseless = !is_off;
        else if (look(t, 0) == 'm' && !is_off)
            is_dotall = 1;
        else
            return refuse(t, MB_EUNSUPPORTED, "this kind of group is not provided");
    }
    if (*t->p == ')')
        return refuse(t, MB_EUNSUPPORTED, "an option without a group, (?i), is not provided");
    t->p++;
    return put(t, is_dotall ? (*caseless ? "(?si:" : "(?s-i:") : (*caseless ? "(?i:" : "(?-i:"));
}

static int group(struct translation *t)
{
    int outer = t->caseless, caseless = t->caseless, rc;

    if (++t->depth > MAX_DEPTH)
        return refuse(t, MB_EUNSUPPORTED, "groups are nested too deep");
    t->p++;
    if (look(t, 0) == '?') {
        t->p++;
        rc = group_head(t, &caseless);
    } else {
        rc = put(t, "(?:"); /* nothing refers to a group */
    }
    t->caseless = caseless;
    t->last_letter = 0;
    if (rc == 0)
        rc = alternation(t);
    if (rc == 0 && look(t, 0) != ')')
        rc = refuse(t, MB_EINVAL, "\")\" was expected");
    t->p++;
    t->depth--;
    t->caseless = outer;
    t->last_letter = 0;
    return rc == 0 ? put(t, ")") : rc;
}

/* "{n}", "{n,}", "{,m}" or "{n,m}" at p: 1 and p behind it, 0: it is no interval. */
static int interval(struct translation *t, unsigned *low, unsigned *high)
{
    char text[32] = "";
    int used = 0;
    size_t n =
        (size_t)(t->end - t->p) < sizeof(text) - 1 ? (size_t)(t->end - t->p) : sizeof(text) - 1;

    memcpy(text, t->p, n);
    *high = MAX_REPEAT + 1; /* none */
    /* Digits and a comma only: sscanf would take spaces and signs as well. */
    n = 1 + strspn(text + 1, "0123456789,");
    if (n == 1 || text[n] != '}')
        return 0;
    if (sscanf(text, "{%5u,%5u}%n", low, high, &used) == 2 && used > 0)
        ;
    else if (sscanf(text, "{%5u,}%n", low, &used) == 1 && used > 0)
        *high = MAX_REPEAT + 1;
    else if (sscanf(text, "{%5u}%n", low, &used) == 1 && used > 0)
        *high = *low;
    else if (sscanf(text, "{,%5u}%n", high, &used) == 1 && used > 0)
        *low = 0;
    else if (n > 6) { /* more digits than any count that is allowed */
        *low = MAX_REPEAT + 1;
        used = (int)n + 1;
    } else {
        return 0;
    }
    t->p += used;
    return 1;
}

static int repeat(struct translation *t, size_t atom)
{
    unsigned low, high;
    char mark = look(t, 0), behind;
    int rc;

    if (mark == '*' || mark == '+' || mark == '?') {
        t->p++;
        rc = put(t, (char[]){mark, 0});
        behind = look(t, 0);
        if (rc == 0 && (behind == '?' || behind == '+')) {
            t->p++;
            rc = put(t, (char[]){behind, 0});
        }
    } else if (mark == '{' && interval(t, &low, &high)) {
        if (low > MAX_REPEAT || (high <= MAX_REPEAT && high < low))
            return refuse(t, MB_EINVAL, "an interval in the wrong order or too large");
        rc = high > MAX_REPEAT ? mb_buf_printf(t->out, "{%u,}", low)
                               : mb_buf_printf(t->out, "{%u,%u}", low, high);
        if (rc != 0)
            return no_memory(t);
        behind = look(t, 0);
        if (behind == '?' && low != high) {
            t->p++;
            rc = put(t, "?");
        } else if (behind == '+' || behind == '?') {
            /* The interval as a whole is repeated: X{n}+ is (?:X{n})+. */
            char *copy = mb_strndup((const char *)t->out->data + atom, t->out->len - atom);
            t->p++;
            t->out->len = atom;
            if (copy == NULL || mb_buf_printf(t->out, "(?:%s)%c", copy, behind) != 0)
                rc = no_memory(t);
            mb_free(copy);
        }
    } else {
        return 0;
    }
    t->last_letter = 0;
    if (rc == 0 && look(t, 0) == '{') {
        const char *p = t->p;
        int is_interval = interval(t, &low, &high);

        t->p = p;
        if (is_interval)
            rc = refuse(t, MB_EUNSUPPORTED, "a repetition of a repetition is not provided");
    }
    if (rc == 0 && look(t, 0) != 0 && strchr("*+?", look(t, 0)) != NULL)
        rc = refuse(t, MB_EUNSUPPORTED, "a repetition of a repetition is not provided");
    return rc;
}

static int atom(struct translation *t)
{
    uint32_t c;
    size_t n;

    switch (*t->p) {
    case '(':
        return group(t);
    case '[':
        return class(t);
    case '\\':
        return escape(t, 0);
    case '.':
    case '^':
        t->last_letter = 0;
        return put(t, *t->p++ == '.' ? "." : "^");
    case '$':
        t->p++;
        return put(t, "$");
    case '*':
    case '+':
    case '?':
        return refuse(t, MB_EINVAL, "there is nothing to repeat");
    default:
        n = mb_utf8_decode((const uint8_t *)t->p, (const uint8_t *)t->end, &c);
        if (n == 0 || c == 0)
            return refuse(t, MB_EINVAL, "UTF-8 was expected");
        t->p += n;
        return literal(t, c, 0);
    }
}

static int alternation(struct translation *t)
{
    while (t->p < t->end && *t->p != ')') {
        size_t start = t->out->len;
        int rc;

        if (*t->p == '|') {
            t->p++;
            t->last_letter = 0;
            rc = put(t, "|");
        } else {
            rc = atom(t);
            if (rc == 0)
                rc = repeat(t, start);
        }
        if (rc != 0)
            return rc;
    }
    return 0;
}

int mb_split_regex_translate(const char *pattern, size_t n, struct mb_buf *out, struct mb_err *err)
{
    struct translation t = {
        .pattern = pattern, .p = pattern, .end = pattern + n, .out = out, .err = err};
    int rc = alternation(&t);

    if (rc == 0 && t.p < t.end)
        rc = refuse(&t, MB_EINVAL, "\")\" without \"(\"");
    return rc;
}
