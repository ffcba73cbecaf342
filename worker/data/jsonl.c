/*
 * 1. The bytes are checked to be UTF-8. 2. A scanner without recursion walks the object: for the
 * keys asked for at its top level the strings are unescaped into one buffer, all else is checked
 * and passed over (a bit stack remembers whether an object or a list is open).
 * 3. After the object only white space may follow, and every key must have been there.
 * Any deviation stops the scan with MB_EINVAL, the byte (from 1) and what was expected.
 */
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"
#include "worker/data/jsonl.h"
#include "worker/data/jsonl_copy.h"
#include "worker/data/jsonl_utf8.h"
#include "worker/data/tokenizer/utf8.h"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

struct text {
    size_t start; /* in the parser's buffer */
    size_t n;
};

struct key {
    const char *name;
    size_t n;
    int was_found;
    int is_text;  /* a string or a list of strings */
    size_t first; /* its texts are texts[first .. first + n_texts) */
    size_t n_texts;
};

struct mb_jsonl {
    struct key *keys;
    size_t n_keys;
    struct mb_buf text;
    struct mb_buf name;  /* an escaped key, unescaped */
    struct mb_buf texts; /* struct text */
    /* the line being read */
    const uint8_t *line;
    const uint8_t *p;
    const uint8_t *end;
    uint64_t n_tails; /* bytes of the line that are not the first of their character */
    struct mb_err *err;
};

uint64_t mb_utf8_count(const uint8_t *p, size_t n)
{
    uint64_t count = 0;

    for (size_t i = 0; i < n; i++)
        count += (p[i] & 0xc0) != 0x80;
    return count;
}

int mb_jsonl_create(const char *const *keys, size_t n_keys, struct mb_jsonl **out,
                    struct mb_err *err)
{
    struct mb_jsonl *j = mb_calloc(1, sizeof(*j));

    if (j != NULL)
        j->keys = mb_calloc(n_keys, sizeof(*j->keys));
    if (j == NULL || j->keys == NULL) {
        mb_free(j);
        return mb_err_set(err, MB_ENOMEM, "JSON reader: out of memory");
    }
    j->n_keys = n_keys;
    for (size_t k = 0; k < n_keys; k++) {
        j->keys[k].name = keys[k];
        j->keys[k].n = strlen(keys[k]);
    }
    *out = j;
    return 0;
}

void mb_jsonl_destroy(struct mb_jsonl *j)
{
    if (j == NULL)
        return;
    mb_buf_close(&j->text);
    mb_buf_close(&j->name);
    mb_buf_close(&j->texts);
    mb_free(j->keys);
    mb_free(j);
}

static int fail_at(struct mb_jsonl *j, const uint8_t *at, const char *expected)
{
    return mb_err_set(j->err, MB_EINVAL, "not a JSON object on one line: %s at byte %zu", expected,
                      (size_t)(at - j->line) + 1);
}

static int no_memory(struct mb_jsonl *j)
{
    return mb_err_set(j->err, MB_ENOMEM, "JSON reader: out of memory");
}

static const uint64_t high_bits = 0x8080808080808080u;

/* The first byte above 127 from p on; end if there is none. */
static const uint8_t *ascii_end(const uint8_t *p, const uint8_t *end)
{
#if defined(__SSE2__)
    for (; end - p >= 64; p += 64) {
        __m128i a =
            _mm_or_si128(_mm_loadu_si128((const void *)p), _mm_loadu_si128((const void *)(p + 16)));
        __m128i b = _mm_or_si128(_mm_loadu_si128((const void *)(p + 32)),
                                 _mm_loadu_si128((const void *)(p + 48)));

        if (_mm_movemask_epi8(_mm_or_si128(a, b)) != 0)
            break;
    }
#endif
    while (end - p >= 8) {
        uint64_t word;

        memcpy(&word, p, 8);
        if ((word & high_bits) != 0)
            return p + (__builtin_ctzll(word & high_bits) >> 3);
        p += 8;
    }
    while (p < end && *p < 128)
        p++;
    return p;
}

static inline int is_tail(uint8_t byte)
{
    return (byte & 0xc0) == 0x80;
}

/* Bytes of the character at p, which is above 127; 0 if it is none. The usual forms are seen here,
 * the rest by the one decoder that knows all. */
static inline size_t wide_length(const uint8_t *p, size_t left)
{
    size_t n;

    if (p[0] >= 0xc2 && p[0] <= 0xdf && left >= 2 && is_tail(p[1]))
        return 2;
    if (p[0] > 0xe0 && p[0] < 0xed && left >= 3 && is_tail(p[1]) && is_tail(p[2]))
        return 3;
    return mb_utf8_look(p, left, &n) == MB_UTF8_WHOLE ? n : 0;
}

static int check_utf8(struct mb_jsonl *j)
{
    const uint8_t *p;

    if (mb_jsonl_utf8(mb_jsonl_utf8_best(), j->p, (size_t)(j->end - j->p), &j->n_tails))
        return 0;
    j->n_tails = 0;
    p = ascii_end(j->p, j->end);
    while (p < j->end) {
        while (p < j->end && *p >= 128) {
            size_t n = wide_length(p, (size_t)(j->end - p));

            if (n == 0)
                return mb_err_set(j->err, MB_EINVAL, "not UTF-8: byte 0x%02x at byte %zu", *p,
                                  (size_t)(p - j->line) + 1);
            j->n_tails += n - 1;
            p += n;
        }
        p = ascii_end(p, j->end);
    }
    return 0;
}

static void skip_space(struct mb_jsonl *j)
{
    while (j->p < j->end && (*j->p == ' ' || *j->p == '\t' || *j->p == '\n' || *j->p == '\r'))
        j->p++;
}

static int hex4(const uint8_t *p, const uint8_t *end, uint32_t *out)
{
    uint32_t v = 0;

    if (end - p < 4)
        return MB_EINVAL;
    for (int i = 0; i < 4; i++) {
        int digit = mb_hex_digit((char)p[i]);

        if (digit < 0)
            return MB_EINVAL;
        v = v << 4 | (uint32_t)digit;
    }
    *out = v;
    return 0;
}

/* The escape \uXXXX at j->p, or two of them that are one character. */
static int read_unicode(struct mb_jsonl *j, uint32_t *c)
{
    const uint8_t *start = j->p;
    uint32_t low;

    if (hex4(j->p + 2, j->end, c) != 0)
        return fail_at(j, start, "an escape \\uXXXX of four hex digits was expected");
    j->p += 6;
    if (*c < 0xd800 || *c >= 0xe000)
        return 0;
    if (*c >= 0xdc00 || j->end - j->p < 6 || j->p[0] != '\\' || j->p[1] != 'u' ||
        hex4(j->p + 2, j->end, &low) != 0 || low < 0xdc00 || low >= 0xe000)
        return fail_at(j, start, "half of a surrogate pair, which is no character,");
    *c = 0x10000 + ((*c - 0xd800) << 10) + (low - 0xdc00);
    j->p += 6;
    return 0;
}

/* The escape at j->p; *c is its character. */
static int read_escape(struct mb_jsonl *j, uint32_t *c)
{
    if (j->end - j->p < 2)
        return fail_at(j, j->p, "the end of a string was expected");
    if (j->p[1] == 'u')
        return read_unicode(j, c);
    *c = mb_jsonl_escaped(j->p[1]);
    if (*c == 0)
        return fail_at(j, j->p, "a known escape was expected");
    j->p += 2;
    return 0;
}

/* What stops plain text, at j->p: 1 at the closing quote, which is passed, else negative. */
static int end_string(struct mb_jsonl *j)
{
    if (j->p == j->end)
        return fail_at(j, j->p, "the end of a string was expected");
    if (*j->p != '"')
        return fail_at(j, j->p, "a control character in a string must be escaped:");
    j->p++;
    return 1;
}

static int open_string(struct mb_jsonl *j)
{
    if (j->p == j->end || *j->p != '"')
        return fail_at(j, j->p, "a string was expected");
    j->p++;
    return 0;
}

/* A string whose opening quote is at j->p, appended to out. What it becomes is never longer than
 * its escaped form, so that there is room for all of the line from the start. */
static int read_string(struct mb_jsonl *j, struct mb_buf *out)
{
    uint8_t *to;
    int rc = open_string(j);

    if (rc != 0)
        return rc;
    if (mb_buf_reserve(out, (size_t)(j->end - j->p) + MB_JSONL_COPY_SLACK) != 0)
        return no_memory(j);
    to = out->data + out->len;
    for (;;) {
        uint32_t c = 0;

        j->p = mb_jsonl_copy(j->p, j->end, &to);
        if (j->p == j->end || *j->p != '\\')
            break;
        rc = read_escape(j, &c);
        if (rc != 0)
            return rc;
        if (c < 128)
            *to++ = (uint8_t)c;
        else
            to += mb_utf8_encode(c, to);
    }
    rc = end_string(j);
    if (rc < 0)
        return rc;
    out->len = (size_t)(to - out->data);
    out->data[out->len] = '\0';
    return 0;
}

static int skip_string(struct mb_jsonl *j)
{
    int rc = open_string(j);

    while (rc == 0) {
        uint32_t c = 0;

        j->p = mb_jsonl_plain_end(j->p, j->end);
        rc = j->p < j->end && *j->p == '\\' ? read_escape(j, &c) : end_string(j);
    }
    return rc < 0 ? rc : 0;
}

static size_t digits(struct mb_jsonl *j)
{
    const uint8_t *start = j->p;

    while (j->p < j->end && *j->p >= '0' && *j->p <= '9')
        j->p++;
    return (size_t)(j->p - start);
}

static int take_word(struct mb_jsonl *j, const char *word)
{
    size_t n = strlen(word);

    if ((size_t)(j->end - j->p) < n || memcmp(j->p, word, n) != 0)
        return 0;
    j->p += n;
    return 1;
}

static int skip_number(struct mb_jsonl *j)
{
    const uint8_t *start = j->p;

    if (take_word(j, "-Infinity"))
        return 0;
    if (*j->p == '-')
        j->p++;
    if (j->p < j->end && *j->p == '0')
        j->p++;
    else if (digits(j) == 0)
        return fail_at(j, start, "a value was expected");
    if (j->p < j->end && *j->p == '.') {
        j->p++;
        if (digits(j) == 0)
            return fail_at(j, start, "a number with digits after its point was expected");
    }
    if (j->p < j->end && (*j->p | 32) == 'e') {
        j->p++;
        if (j->p < j->end && (*j->p == '+' || *j->p == '-'))
            j->p++;
        if (digits(j) == 0)
            return fail_at(j, start, "a number with digits in its exponent was expected");
    }
    return 0;
}

static int skip_scalar(struct mb_jsonl *j)
{
    if (j->p == j->end)
        return fail_at(j, j->p, "a value was expected");
    if (*j->p == '"')
        return skip_string(j);
    if (take_word(j, "true") || take_word(j, "false") || take_word(j, "null") ||
        take_word(j, "NaN") || take_word(j, "Infinity"))
        return 0;
    return skip_number(j);
}

/* A string as read_string reads it, but with room for this string only. */
static int read_name(struct mb_jsonl *j, struct mb_buf *out)
{
    const uint8_t *start = j->p;
    const uint8_t *end = j->end;
    int rc = skip_string(j);

    if (rc != 0)
        return rc;
    j->end = j->p;
    j->p = start;
    rc = read_string(j, out);
    j->end = end;
    return rc;
}

/* "key" : of an object; the value follows. name may be NULL. */
static int read_key(struct mb_jsonl *j, struct mb_buf *name)
{
    int rc = name != NULL ? read_name(j, name) : skip_string(j);

    if (rc != 0)
        return rc;
    skip_space(j);
    if (j->p == j->end || *j->p != ':')
        return fail_at(j, j->p, "':' was expected");
    j->p++;
    skip_space(j);
    return 0;
}

/* What is open around the scanner: a bit per level, 1 for an object. */
struct nest {
    uint64_t is_object[MB_JSONL_MAX_DEPTH / 64 + 1];
    unsigned depth;
};

static int top_is_object(const struct nest *s)
{
    return (int)(s->is_object[(s->depth - 1) / 64] >> ((s->depth - 1) % 64) & 1);
}

/* Opens the object or list at j->p. *is_empty: it closes at once and is not on the stack. */
static int open_nest(struct mb_jsonl *j, struct nest *s, int *is_empty)
{
    uint64_t bit = (uint64_t)1 << (s->depth % 64);
    int is_object = *j->p == '{';

    if (s->depth == MB_JSONL_MAX_DEPTH)
        return fail_at(j, j->p, "too deep nesting");
    j->p++;
    skip_space(j);
    *is_empty = j->p < j->end && *j->p == (is_object ? '}' : ']');
    if (*is_empty) {
        j->p++;
        return 0;
    }
    if (is_object)
        s->is_object[s->depth / 64] |= bit;
    else
        s->is_object[s->depth / 64] &= ~bit;
    s->depth++;
    return is_object ? read_key(j, NULL) : 0;
}

/* After a value: closes what ends here. Goes on to the next value if there is one (*more). */
static int close_nests(struct mb_jsonl *j, struct nest *s, int *more)
{
    *more = 0;
    while (s->depth > 0) {
        int is_object = top_is_object(s);

        skip_space(j);
        if (j->p < j->end && *j->p == ',') {
            j->p++;
            skip_space(j);
            *more = 1;
            return is_object ? read_key(j, NULL) : 0;
        }
        if (j->p == j->end || *j->p != (is_object ? '}' : ']'))
            return fail_at(j, j->p,
                           is_object ? "',' or '}' was expected" : "',' or ']' was expected");
        j->p++;
        s->depth--;
    }
    return 0;
}

static int skip_value(struct mb_jsonl *j)
{
    struct nest s;
    int more = 1;

    s.depth = 0;
    while (more) {
        int rc;

        if (j->p < j->end && (*j->p == '{' || *j->p == '[')) {
            int is_empty = 0;
            rc = open_nest(j, &s, &is_empty);
            if (rc != 0)
                return rc;
            if (!is_empty)
                continue;
        } else {
            rc = skip_scalar(j);
            if (rc != 0)
                return rc;
        }
        rc = close_nests(j, &s, &more);
        if (rc != 0)
            return rc;
    }
    return 0;
}

static int read_text(struct mb_jsonl *j, struct key *key)
{
    struct text t = {.start = j->text.len};
    int rc = read_string(j, &j->text);

    if (rc != 0)
        return rc;
    t.n = j->text.len - t.start;
    if (mb_buf_add(&j->texts, &t, sizeof(t)) != 0)
        return no_memory(j);
    key->n_texts++;
    return 0;
}

/* A list; its texts count only if all of it is strings, else the key is no text. */
static int read_list(struct mb_jsonl *j, struct key *key)
{
    const uint8_t *start = j->p;
    int rc = 0;

    j->p++;
    skip_space(j);
    if (j->p < j->end && *j->p == ']') {
        j->p++;
        return 0;
    }
    while (j->p < j->end && *j->p == '"') {
        rc = read_text(j, key);
        if (rc != 0)
            return rc;
        skip_space(j);
        if (j->p < j->end && *j->p == ']') {
            j->p++;
            return 0;
        }
        if (j->p == j->end || *j->p != ',')
            return fail_at(j, j->p, "',' or ']' was expected");
        j->p++;
        skip_space(j);
    }
    key->is_text = 0;
    j->p = start;
    return skip_value(j);
}

static int read_value(struct mb_jsonl *j, struct key *key)
{
    key->was_found = 1;
    key->is_text = 1;
    key->n_texts = 0;
    key->first = j->texts.len / sizeof(struct text);
    if (j->p < j->end && *j->p == '"')
        return read_text(j, key);
    if (j->p < j->end && *j->p == '[')
        return read_list(j, key);
    key->is_text = 0;
    return skip_value(j);
}

static struct key *find_key(struct mb_jsonl *j)
{
    for (size_t k = 0; k < j->n_keys; k++) {
        if (j->keys[k].n == j->name.len &&
            (j->name.len == 0 || memcmp(j->keys[k].name, j->name.data, j->name.len) == 0))
            return &j->keys[k];
    }
    return NULL;
}

static int read_object(struct mb_jsonl *j)
{
    skip_space(j);
    if (j->p == j->end)
        return mb_err_set(j->err, MB_EINVAL, "an empty line; every line must hold a JSON object");
    if (*j->p != '{')
        return fail_at(j, j->p, "'{' was expected");
    j->p++;
    skip_space(j);
    if (j->p < j->end && *j->p == '}') {
        j->p++;
        return 0;
    }
    for (;;) {
        struct key *key;
        int rc;

        mb_buf_reset(&j->name);
        rc = read_key(j, &j->name);
        if (rc != 0)
            return rc;
        key = find_key(j);
        rc = key != NULL ? read_value(j, key) : skip_value(j);
        if (rc != 0)
            return rc;
        skip_space(j);
        if (j->p < j->end && *j->p == '}') {
            j->p++;
            return 0;
        }
        if (j->p == j->end || *j->p != ',')
            return fail_at(j, j->p, "',' or '}' was expected");
        j->p++;
        skip_space(j);
    }
}

int mb_jsonl_parse(struct mb_jsonl *j, const uint8_t *line, size_t n, struct mb_err *err)
{
    mb_buf_reset(&j->text);
    return mb_jsonl_parse_more(j, line, n, err);
}

int mb_jsonl_parse_more(struct mb_jsonl *j, const uint8_t *line, size_t n, struct mb_err *err)
{
    int rc;

    j->line = j->p = line;
    j->end = line + n;
    j->err = err;
    mb_buf_reset(&j->texts);
    for (size_t k = 0; k < j->n_keys; k++)
        j->keys[k].was_found = 0;
    rc = check_utf8(j);
    if (rc == 0)
        rc = read_object(j);
    if (rc != 0)
        return rc;
    skip_space(j);
    if (j->p < j->end)
        return fail_at(j, j->p, "the end of the line was expected");
    for (size_t k = 0; k < j->n_keys; k++) {
        if (!j->keys[k].was_found)
            return mb_err_set(err, MB_EINVAL,
                              "no key \"%s\"; name the key of the text with --json-keys",
                              j->keys[k].name);
        if (!j->keys[k].is_text)
            return mb_err_set(err, MB_EINVAL,
                              "key \"%s\" holds neither a string nor a list of strings",
                              j->keys[k].name);
    }
    return 0;
}

static struct text text_at(const struct mb_jsonl *j, size_t i)
{
    struct text t;

    memcpy(&t, j->texts.data + i * sizeof(t), sizeof(t));
    return t;
}

size_t mb_jsonl_n_texts(const struct mb_jsonl *j, size_t k)
{
    return j->keys[k].n_texts;
}

const uint8_t *mb_jsonl_text(const struct mb_jsonl *j, size_t k, size_t i, size_t *n)
{
    struct text t = text_at(j, j->keys[k].first + i);

    *n = t.n;
    return t.n > 0 ? j->text.data + t.start : (const uint8_t *)"";
}

size_t mb_jsonl_place(const struct mb_jsonl *j, size_t k, size_t i, size_t *n)
{
    struct text t = text_at(j, j->keys[k].first + i);

    *n = t.n;
    return t.start;
}

const uint8_t *mb_jsonl_at(const struct mb_jsonl *j, size_t place)
{
    return j->text.len > 0 ? j->text.data + place : (const uint8_t *)"";
}

uint64_t mb_jsonl_n_chars(const struct mb_jsonl *j)
{
    return (uint64_t)(j->end - j->line) - j->n_tails;
}
