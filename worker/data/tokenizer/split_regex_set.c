/*
 * Sets of code points as members of a character class.
 *
 * 1. The wanted set is a bit map made from the table of categories. 2. PCRE2 is asked for its own:
 * it searches a text that has every code point once. 3. If it lacks some and has none too many, the
 * property and the missing ranges are written, which is fast to match; else all ranges are.
 * Planes 4 to 13 and 15, 16 are not asked, but for the tags: nothing is, or will be, in them that
 * versions of Unicode differ in.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/split_regex_private.h"
#include "worker/data/tokenizer/unicode_category.h"
#include "worker/data/tokenizer/utf8.h"

enum { POINTS = 0x110000, ASKED = 0x40000, TAGS = 0xe0000, TAGS_END = 0xe1000 };

static int bit(const uint64_t *map, uint32_t c)
{
    return (int)(map[c >> 6] >> (c & 63) & 1);
}

static void set_range(uint64_t *map, uint32_t first, uint32_t end)
{
    for (uint32_t c = first; c < end; c++)
        map[c >> 6] |= (uint64_t)1 << (c & 63);
}

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "pattern: out of memory");
}

static void wanted_set(uint32_t mask, int negated, uint64_t *map)
{
    for (size_t i = 0; i < mb_category_n_runs; i++) {
        uint32_t run = mb_category_runs[i];
        uint32_t end = i + 1 < mb_category_n_runs ? mb_category_runs[i + 1] >> 5 : POINTS;
        if ((int)(mask >> (run & 31) & 1) != negated)
            set_range(map, run >> 5, end);
    }
}

/* "\p{Lu}\p{Ll}": whole letters where all of a group are in the mask. */
static int write_properties(uint32_t mask, int negated, struct mb_buf *out)
{
    static const char names[] = "CnLuLlLtLmLoMnMcMeNdNlNoPcPdPsPePiPfPoSmScSkSoZsZlZpCcCfCsCo";
    static const char groups[] = "CLMNPSZ";
    uint32_t left = negated ? ~mask & ((1u << MB_CAT_COUNT) - 1) : mask;

    for (const char *g = groups; *g != 0; g++) {
        uint32_t group = mb_category_mask(g, 1);
        if ((left & group) != group)
            continue;
        if (mb_buf_printf(out, "\\p{%c}", *g) != 0)
            return MB_ENOMEM;
        left &= ~group;
    }
    for (unsigned i = 0; i < MB_CAT_COUNT; i++) {
        if (left >> i & 1 && mb_buf_printf(out, "\\p{%.2s}", &names[2 * i]) != 0)
            return MB_ENOMEM;
    }
    return 0;
}

static int is_asked(uint32_t c)
{
    return c < ASKED || (c >= TAGS && c < TAGS_END);
}

static int every_point(struct mb_buf *text)
{
    for (uint32_t c = 0; c < TAGS_END; c++) {
        uint8_t bytes[4];
        if (!is_asked(c) || (c >= 0xd800 && c < 0xe000))
            continue;
        size_t n = mb_utf8_encode(c, bytes);
        if (mb_buf_add(text, bytes, n) != 0)
            return MB_ENOMEM;
    }
    return 0;
}

static int mark_matches(pcre2_code *code, const struct mb_buf *text, uint64_t *map)
{
    pcre2_match_data *data = pcre2_match_data_create(1, NULL);
    size_t at = 0;
    int rc = data != NULL ? 0 : PCRE2_ERROR_NOMEMORY;

    while (rc >= 0) {
        const PCRE2_SIZE *found;
        rc = pcre2_match(code, text->data, text->len, at, PCRE2_NO_UTF_CHECK, data, NULL);
        if (rc < 0)
            break;
        found = pcre2_get_ovector_pointer(data);
        for (at = found[0]; at < found[1];) {
            uint32_t c = 0;
            at += mb_utf8_decode(text->data + at, text->data + text->len, &c);
            set_range(map, c, c + 1);
        }
    }
    pcre2_match_data_free(data);
    return rc == PCRE2_ERROR_NOMATCH ? 0 : rc;
}

/* What PCRE2 takes the properties for. */
static int known_set(const struct mb_buf *properties, uint64_t *map, struct mb_err *err)
{
    struct mb_buf pattern = {0}, text = {0};
    void *code = NULL;
    int rc = mb_buf_printf(&pattern, "[%s]++", mb_buf_str(properties));

    if (rc == 0)
        rc = every_point(&text);
    if (rc != 0)
        rc = no_memory(err);
    else
        rc = mb_split_regex_compile(mb_buf_str(&pattern), pattern.len, &code, err);
    if (rc == 0) {
        pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
        if (mark_matches(code, &text, map) != 0)
            rc = no_memory(err);
    }
    pcre2_code_free(code);
    mb_buf_close(&pattern);
    mb_buf_close(&text);
    return rc;
}

/* The ranges of code points that are in map and not in except (NULL: none is). */
static int write_ranges(const uint64_t *map, const uint64_t *except, struct mb_buf *out)
{
    for (uint32_t c = 0; c < POINTS; c++) {
        uint32_t first = c;

        if ((c & 63) == 0 && map[c >> 6] == 0) {
            c += 63;
            continue;
        }
        while (c < POINTS && bit(map, c) && (except == NULL || !bit(except, c)) &&
               !(c >= 0xd800 && c < 0xe000))
            c++;
        if (c > first && mb_buf_printf(out, "\\x{%x}-\\x{%x}", first, c - 1) != 0)
            return MB_ENOMEM;
    }
    return 0;
}

static int has_more(const uint64_t *known, const uint64_t *wanted)
{
    for (size_t i = 0; i < POINTS / 64; i++)
        if (is_asked((uint32_t)i * 64) && (known[i] & ~wanted[i]) != 0)
            return 1;
    return 0;
}

/* Not asked is the same in both. */
static void assume_known(const uint64_t *wanted, uint64_t *known)
{
    for (size_t i = 0; i < POINTS / 64; i++)
        if (!is_asked((uint32_t)i * 64))
            known[i] = wanted[i];
}

/* wanted, of which the properties of mask are the most. */
static int add_map(const uint64_t *wanted, uint32_t mask, int negated, struct mb_buf *out,
                   struct mb_err *err)
{
    uint64_t *known = mb_calloc(POINTS / 64, sizeof(*known));
    struct mb_buf properties = {0};
    int rc = known != NULL ? write_properties(mask, negated, &properties) : MB_ENOMEM;

    if (rc != 0) {
        rc = no_memory(err);
        goto out;
    }
    rc = known_set(&properties, known, err);
    if (rc != 0)
        goto out;
    assume_known(wanted, known);
    if (has_more(known, wanted))
        rc = write_ranges(wanted, NULL, out);
    else
        rc = mb_buf_puts(out, mb_buf_str(&properties)) != 0 ? MB_ENOMEM
                                                            : write_ranges(wanted, known, out);
    if (rc != 0)
        rc = no_memory(err);
out:
    mb_buf_close(&properties);
    mb_free(known);
    return rc;
}

int mb_split_regex_add_set(uint32_t mask, int negated, struct mb_buf *out, struct mb_err *err)
{
    uint64_t *wanted = mb_calloc(POINTS / 64, sizeof(*wanted));
    int rc;

    if (wanted == NULL)
        return no_memory(err);
    wanted_set(mask, negated, wanted);
    rc = add_map(wanted, mask, negated, out, err);
    mb_free(wanted);
    return rc;
}

/* Asked of the peer code point by code point: alphabetic, marks, decimal digits, connectors, and
 * the numbers of Latin-1. */
int mb_split_regex_add_word(int negated, struct mb_buf *out, struct mb_err *err)
{
    static const uint32_t mask = 1u << MB_CAT_LU | 1u << MB_CAT_LL | 1u << MB_CAT_LT |
                                 1u << MB_CAT_LM | 1u << MB_CAT_LO | 1u << MB_CAT_MN |
                                 1u << MB_CAT_MC | 1u << MB_CAT_ME | 1u << MB_CAT_ND |
                                 1u << MB_CAT_NL | 1u << MB_CAT_PC;
    static const struct {
        uint32_t first, end;
    } more[] = {{0xb2, 0xb4},       {0xb9, 0xba},       {0xbc, 0xbf},      {0x24b6, 0x24ea},
                {0x1f130, 0x1f14a}, {0x1f150, 0x1f16a}, {0x1f170, 0x1f18a}};
    uint64_t *wanted = mb_calloc(POINTS / 64, sizeof(*wanted));
    int rc;

    if (wanted == NULL)
        return no_memory(err);
    wanted_set(mask, 0, wanted);
    for (size_t i = 0; i < sizeof(more) / sizeof(*more); i++)
        set_range(wanted, more[i].first, more[i].end);
    for (size_t i = 0; negated && i < POINTS / 64; i++)
        wanted[i] = ~wanted[i];
    rc = add_map(wanted, mask, negated, out, err);
    mb_free(wanted);
    return rc;
}

int mb_split_regex_add_space(int negated, struct mb_buf *out, struct mb_err *err)
{
    uint64_t *map = mb_calloc(POINTS / 64, sizeof(*map));
    int rc = MB_ENOMEM;

    for (uint32_t c = 0; map != NULL && c < POINTS; c++)
        if (mb_unicode_is_space(c) != negated)
            set_range(map, c, c + 1);
    if (map != NULL)
        rc = write_ranges(map, NULL, out);
    mb_free(map);
    return rc == 0 ? 0 : no_memory(err);
}
