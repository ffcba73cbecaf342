/*
 * 1. The units are copied, so that they are aligned whatever the file's layout. 2. A match walks
 * them byte by byte: the child for byte b of the unit at i with offset o is at i ^ o ^ b and
 * carries the label b; a unit that says so has its value at i ^ o. The deepest value wins.
 * SentencePiece counts at most 32 values on the way; so does this. 3. A position outside the array
 * ends the walk.
 */
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/sentencepiece/charsmap.h"

enum { MAX_MATCHES = 32 };

static uint32_t label_of(uint32_t unit)
{
    return unit & (0x80000000u | 0xff);
}

static size_t offset_of(uint32_t unit)
{
    return (size_t)(unit >> 10) << ((unit & (1u << 9)) >> 6);
}

/* ASCII bytes whose walk cannot go on with another ASCII byte and that are no rule themselves: the
 * common case of the normaliser in one test. */
static void note_plain(struct mb_spm_charsmap *c)
{
    for (unsigned first = 0; first < 0x80; first++) {
        uint8_t pair[2] = {(uint8_t)first, 0};
        struct mb_spm_span out;
        int is_plain = mb_spm_charsmap_match(c, pair, pair + 1, &out) == 0;

        if (c->units != NULL && is_plain) {
            size_t at = offset_of(c->units[0]) ^ first;
            int has_child = at < c->n_units && label_of(c->units[at]) == first;
            for (unsigned b = 0; has_child && is_plain && b < 0x80; b++) {
                size_t child = at ^ offset_of(c->units[at]) ^ b;
                is_plain = child >= c->n_units || label_of(c->units[child]) != b;
            }
        }
        if (is_plain)
            c->is_plain_pair[first >> 3] |= (uint8_t)(1u << (first & 7));
    }
}

int mb_spm_charsmap_create(struct mb_spm_span blob, struct mb_spm_charsmap *c, struct mb_err *err)
{
    uint64_t size;

    *c = (struct mb_spm_charsmap){0};
    if (blob.n == 0) {
        note_plain(c);
        return 0;
    }
    size = blob.n > 4 ? (uint64_t)blob.p[0] | (uint64_t)blob.p[1] << 8 | (uint64_t)blob.p[2] << 16 |
                            (uint64_t)blob.p[3] << 24
                      : 0;
    if (size < 4 || size % 4 != 0 || size >= blob.n - 4 || blob.p[blob.n - 1] != 0)
        return mb_err_set(err, MB_ECORRUPT,
                          "precompiled_charsmap: a table of %llu bytes in a field of %zu",
                          (unsigned long long)size, blob.n);
    c->n_units = (size_t)size / 4;
    c->units = mb_reallocarray(NULL, c->n_units, sizeof(*c->units));
    if (c->units == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    for (size_t i = 0; i < c->n_units; i++) {
        const uint8_t *p = blob.p + 4 + 4 * i;
        c->units[i] =
            (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
    }
    c->texts = (struct mb_spm_span){blob.p + 4 + size, blob.n - 4 - (size_t)size};
    note_plain(c);
    return 0;
}

void mb_spm_charsmap_close(struct mb_spm_charsmap *c)
{
    mb_free(c->units);
    *c = (struct mb_spm_charsmap){0};
}

size_t mb_spm_charsmap_match(const struct mb_spm_charsmap *c, const uint8_t *p, const uint8_t *end,
                             struct mb_spm_span *out)
{
    size_t longest = 0;
    size_t value = 0;
    size_t at;
    int n_matches = 0;

    if (c->units == NULL)
        return 0;
    at = offset_of(c->units[0]);
    for (const uint8_t *q = p; q < end && n_matches < MAX_MATCHES; q++) {
        uint32_t unit;
        at ^= *q;
        if (at >= c->n_units || label_of(c->units[at]) != *q)
            break;
        unit = c->units[at];
        at ^= offset_of(unit);
        if (unit >> 8 & 1 && at < c->n_units) {
            longest = (size_t)(q + 1 - p);
            value = c->units[at] & 0x7fffffff;
            n_matches++;
        }
    }
    if (longest == 0 || value >= c->texts.n)
        return 0;
    *out = (struct mb_spm_span){c->texts.p + value, strlen((const char *)c->texts.p + value)};
    return longest;
}
