/*
 * The scanners of GPT-2's and of cl100k's kin, one piece at a time.
 *
 * GPT-2: 1. An apostrophe followed by s, t, m, d, re, ve or ll is a piece. 2. Else an optional
 * space (U+0020 only) and a run of one class: letters, numbers or others. 3. Else white space: a
 * run to the end of the text whole; before something else without its last character, which goes
 * to the next piece, unless it is the only one.
 *
 * cl100k, Llama-3, Qwen2: 1. contractions of any case; 2. letters with one character before them
 * that is neither line end, letter nor number; 3. numbers, up to max_digits; 4. others with a space
 * before and line ends behind; 5. white space up to its last line end; 6. white space as in GPT-2,
 * whose last character may be that of rules 2 and 4.
 *
 * o200k is in split_cased.c. Nothing fails: every byte belongs to exactly one piece.
 */
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/split_private.h"

#define WORDS_END "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define CASED_1                                                                                    \
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
#define CASED_2                                                                                    \
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"
#define CASED_END     "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define CONTRACTION_I "(?i:'s|'t|'re|'ve|'m|'ll|'d)"

/* The first row of a family is its name's own text; the others cut alike. */
static const struct {
    enum mb_split_family family;
    const char *pattern;
} patterns[] = {
    /* OpenAI's encoder.py of GPT-2, and tokenizers' ByteLevel */
    {MB_SPLIT_GPT2,
     "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"},
    /* tiktoken 0.14, r50k */
    {MB_SPLIT_GPT2, "'(?:[sdmt]|ll|ve|re)| ?\\p{L}++| ?\\p{N}++| ?[^\\s\\p{L}\\p{N}]++|\\s++$|"
                    "\\s+(?!\\S)|\\s"},
    {MB_SPLIT_CL100K, "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}++|\\p{N}{1,3}+|"
                      " ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*+|\\s++$|\\s*[\\r\\n]|\\s+(?!\\S)|\\s"},
    {MB_SPLIT_LLAMA3, CONTRACTION_I "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}" WORDS_END},
    {MB_SPLIT_QWEN2, CONTRACTION_I "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}" WORDS_END},
    {MB_SPLIT_O200K, CASED_1 CONTRACTION_I "?|" CASED_2 CONTRACTION_I "?|\\p{N}{1,3}" CASED_END},
    {MB_SPLIT_TIKTOKEN_V1, "[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|"
                           "\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"},
    {MB_SPLIT_TIKTOKEN_V2, CASED_1 "|" CASED_2 "|\\p{N}" CASED_END},
};

const char *mb_split_pattern(enum mb_split_family family)
{
    for (size_t i = 0; i < sizeof(patterns) / sizeof(*patterns); i++) {
        if (patterns[i].family == family)
            return patterns[i].pattern;
    }
    return NULL;
}

const char *mb_split_family_name(enum mb_split_family family)
{
    static const char *const names[] = {"gpt2",        "cl100k",      "llama3", "qwen2", "o200k",
                                        "tiktoken-v1", "tiktoken-v2", "whole",  "regex"};

    return names[family];
}

int mb_split_recognise(const char *pattern, enum mb_split_family *out)
{
    for (size_t i = 0; i < sizeof(patterns) / sizeof(*patterns); i++) {
        if (strcmp(patterns[i].pattern, pattern) == 0) {
            *out = patterns[i].family;
            return 1;
        }
    }
    return 0;
}

static void make_classes(struct mb_class_table *t)
{
    memset(t, 0, sizeof(*t));
    for (size_t i = 0; i < mb_unicode_n_ranges; i++) {
        const struct mb_unicode_range *r = &mb_unicode_ranges[i];

        for (uint32_t c = r->first; c <= r->last; c += r->step)
            t->packed[c >> 1] |= (uint8_t)(r->class << (4 * (c & 1)));
    }
    memset(t->ascii, MB_CLASS_TABLE_WIDE, sizeof(t->ascii));
    for (unsigned c = 0; c < 128; c++)
        t->ascii[c] = t->packed[c >> 1] >> (4 * (c & 1)) & 15;
}

int mb_split_create(enum mb_split_family family, const struct mb_split_custom *custom,
                    struct mb_split **out, struct mb_err *err)
{
    struct mb_split *s = mb_alloc(sizeof(*s));

    if (s == NULL)
        return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
    s->family = family;
    s->max_digits = 0;
    if (family == MB_SPLIT_QWEN2 || family == MB_SPLIT_TIKTOKEN_V1 ||
        family == MB_SPLIT_TIKTOKEN_V2)
        s->max_digits = 1;
    else if (family != MB_SPLIT_GPT2)
        s->max_digits = 3;
    s->contractions = family != MB_SPLIT_TIKTOKEN_V1 && family != MB_SPLIT_TIKTOKEN_V2;
    s->whole_end = family == MB_SPLIT_CL100K;
    s->custom = (struct mb_split_custom){0};
    if (custom != NULL)
        s->custom = *custom;
    make_classes(&s->classes);
    *out = s;
    return 0;
}

void mb_split_destroy(struct mb_split *s)
{
    if (s == NULL)
        return;
    if (s->custom.destroy != NULL)
        s->custom.destroy(s->custom.ctx);
    mb_free(s);
}

static int is_tail(uint8_t byte)
{
    return (byte & 0xc0) == 0x80;
}

unsigned mb_split_wide_class(const struct mb_class_table *t, const uint8_t *p, const uint8_t *end,
                             size_t *length)
{
    size_t left = (size_t)(end - p);
    uint32_t c = 0;

    *length = 1;
    if (p[0] >= 0xc2 && p[0] < 0xe0 && left >= 2 && is_tail(p[1])) {
        c = (p[0] & 0x1fu) << 6 | (p[1] & 0x3fu);
        *length = 2;
    } else if ((p[0] & 0xf0) == 0xe0 && left >= 3 && is_tail(p[1]) && is_tail(p[2])) {
        c = (p[0] & 0x0fu) << 12 | (p[1] & 0x3fu) << 6 | (p[2] & 0x3fu);
        if (c < 0x800 || (c >= 0xd800 && c < 0xe000))
            return MB_CHAR_OTHER;
        *length = 3;
    } else if ((p[0] & 0xf8) == 0xf0 && left >= 4 && is_tail(p[1]) && is_tail(p[2]) &&
               is_tail(p[3])) {
        c = (p[0] & 0x07u) << 18 | (p[1] & 0x3fu) << 12 | (p[2] & 0x3fu) << 6 | (p[3] & 0x3fu);
        if (c < 0x10000 || c > 0x10ffff)
            return MB_CHAR_OTHER;
        *length = 4;
    } else {
        return MB_CHAR_OTHER;
    }
    return t->packed[c >> 1] >> (4 * (c & 1)) & 15;
}

size_t mb_split_contraction(const uint8_t *p, const uint8_t *end, int any_case)
{
    uint8_t fold = any_case ? 0x20 : 0;
    size_t left = (size_t)(end - p);

    if (left < 2 || *p != '\'')
        return 0;
    if (any_case && left >= 3 && p[1] == 0xc5 && p[2] == 0xbf)
        return 3; /* U+017F */
    switch (p[1] | fold) {
    case 's':
    case 't':
    case 'm':
    case 'd':
        return 2;
    case 'r':
    case 'v':
        return left > 2 && (p[2] | fold) == 'e' ? 3 : 0;
    case 'l':
        return left > 2 && (p[2] | fold) == 'l' ? 3 : 0;
    default:
        return 0;
    }
}

/* White space that begins at p: `\s+(?!\S)|\s+`. */
static const uint8_t *space_end(const struct mb_class_table *t, const uint8_t *p,
                                const uint8_t *end)
{
    const uint8_t *last = p; /* the last character of the run begins here */
    const uint8_t *q = p;

    while (q < end) {
        size_t length;
        if (mb_split_class(t, q, end, &length) != MB_CHAR_SPACE)
            return last > p ? last : q;
        last = q;
        q += length;
    }
    return q;
}

/* The set of classes that runs with this one. */
static unsigned set_of(unsigned class)
{
    if (class >= MB_CHAR_LU)
        return MB_SET_LETTER;
    return class == MB_CHAR_NUMBER ? MB_SET_NUMBER : MB_SET_OTHER;
}

static const uint8_t *next_gpt2(const struct mb_class_table *t, const uint8_t *p,
                                const uint8_t *end)
{
    size_t length;
    unsigned class = mb_split_class(t, p, end, &length);

    if (class == MB_CHAR_SPACE) {
        const uint8_t *q = p + 1;
        if (*p != ' ' || q == end)
            return space_end(t, p, end);
        class = mb_split_class(t, q, end, &length);
        if (class == MB_CHAR_SPACE)
            return space_end(t, p, end);
        return mb_split_run(t, q + length, end, set_of(class));
    }
    if (*p == '\'') {
        size_t n = mb_split_contraction(p, end, 0);
        if (n > 0)
            return p + n;
    }
    return mb_split_run(t, p + length, end, set_of(class));
}

/* `\s*[\r\n]+|\s+(?!\S)|\s+`, and `\s++$` before them where the family has it. */
static const uint8_t *next_space(const struct mb_split *s, const uint8_t *p, const uint8_t *end)
{
    const uint8_t *stop = mb_split_run(&s->classes, p, end, MB_SET_SPACE);

    if (stop == end && s->whole_end)
        return end;
    for (const uint8_t *q = stop; q > p; q--) {
        if (q[-1] == '\n' || q[-1] == '\r')
            return q;
    }
    return space_end(&s->classes, p, end);
}

static const uint8_t *numbers_end(const struct mb_split *s, const uint8_t *p, const uint8_t *end)
{
    for (unsigned i = 0; i < s->max_digits && p < end; i++) {
        size_t length;

        if (mb_split_class(&s->classes, p, end, &length) != MB_CHAR_NUMBER)
            break;
        p += length;
    }
    return p;
}

/* Others from p on, then line ends (and slashes, in the cased families). */
static const uint8_t *others_end(const struct mb_split *s, const uint8_t *p, const uint8_t *end,
                                 int slashes)
{
    p = mb_split_run(&s->classes, p, end, MB_SET_OTHER);
    while (p < end && (*p == '\r' || *p == '\n' || (slashes && *p == '/')))
        p++;
    return p;
}

static int is_line_end(uint8_t byte)
{
    return byte == '\r' || byte == '\n';
}

/* What the word rules of the families leave: numbers, others, white space. */
static const uint8_t *next_rest(const struct mb_split *s, const uint8_t *p, const uint8_t *end,
                                int slashes)
{
    size_t length;
    unsigned class = mb_split_class(&s->classes, p, end, &length);

    if (class == MB_CHAR_NUMBER)
        return numbers_end(s, p, end);
    if (class != MB_CHAR_SPACE)
        return others_end(s, p, end, slashes);
    if (*p == ' ' && p + 1 < end &&
        (MB_SET_OTHER >> mb_split_class(&s->classes, p + 1, end, &length) & 1) != 0)
        return others_end(s, p + 1, end, slashes);
    return next_space(s, p, end);
}

static const uint8_t *next_words(const struct mb_split *s, const uint8_t *p, const uint8_t *end)
{
    const struct mb_class_table *t = &s->classes;
    size_t length;
    size_t next_length;
    unsigned class = mb_split_class(t, p, end, &length);

    if (class >= MB_CHAR_LU)
        return mb_split_run(t, p + length, end, MB_SET_LETTER);
    if (*p == '\'' && s->contractions) {
        size_t n = mb_split_contraction(p, end, 1);
        if (n > 0)
            return p + n;
    }
    if (class != MB_CHAR_NUMBER && !is_line_end(*p) && p + length < end &&
        mb_split_class(t, p + length, end, &next_length) >= MB_CHAR_LU)
        return mb_split_run(t, p + length, end, MB_SET_LETTER);
    return next_rest(s, p, end, 0);
}

const uint8_t *mb_split_next(const struct mb_split *s, const uint8_t *p, const uint8_t *end)
{
    const uint8_t *next;

    switch (s->family) {
    case MB_SPLIT_GPT2:
        return next_gpt2(&s->classes, p, end);
    case MB_SPLIT_CL100K:
    case MB_SPLIT_LLAMA3:
    case MB_SPLIT_QWEN2:
    case MB_SPLIT_TIKTOKEN_V1:
        return next_words(s, p, end);
    case MB_SPLIT_O200K:
    case MB_SPLIT_TIKTOKEN_V2:
        next = mb_split_next_cased(s, p, end);
        return next != NULL ? next : next_rest(s, p, end, 1);
    case MB_SPLIT_WHOLE:
    case MB_SPLIT_REGEX:
        break;
    }
    return end;
}
