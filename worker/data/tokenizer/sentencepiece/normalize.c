/*
 * 1. Leading spaces are passed over if extra ones go; a text of nothing else gives nothing. 2. The
 * dummy space is written. 3. From each position the longest user-defined piece is copied, or the
 * longest rule of the map applied, or one character copied (a byte that is no UTF-8 becomes
 * U+FFFD). Spaces that begin what is written are dropped after a space, if extra ones go. 4. Spaces
 * at the end are taken back. Most of a text is ASCII that no rule touches; it is copied in runs.
 * Only memory can run out.
 */
#include <string.h>
#include "worker/data/tokenizer/sentencepiece/normalize.h"
#include "worker/data/tokenizer/sentencepiece/utf8.h"

enum { MAX_KEPT_MATCHES = 64, SPACE_BYTES = 3 };

static const uint8_t space_symbol[SPACE_BYTES] = {0xe2, 0x96, 0x81};
static const struct mb_spm_span replacement = {(const uint8_t *)"\xef\xbf\xbd", 3};

/* Length of the longest user-defined piece at p; like SentencePiece, of the 64 shortest. */
static size_t match_kept(const struct mb_spm_trie *t, const uint8_t *p, const uint8_t *end)
{
    uint32_t node = MB_SPM_TRIE_ROOT;
    size_t longest = 0;
    int n_matches = 0;

    if (!mb_spm_trie_may_start(t, *p))
        return 0;
    for (const uint8_t *q = p; q < end && n_matches < MAX_KEPT_MATCHES; q++) {
        node = mb_spm_trie_step(t, node, *q);
        if (node == MB_SPM_TRIE_NO_NODE)
            break;
        if (t->values[node] >= 0) {
            longest = (size_t)(q + 1 - p);
            n_matches++;
        }
    }
    return longest;
}

/* What the text at p becomes, and how many bytes of it. */
static size_t next_prefix(const struct mb_spm_normalizer *z, const uint8_t *p, const uint8_t *end,
                          struct mb_spm_span *out)
{
    size_t n = match_kept(&z->kept, p, end);
    int is_valid;

    if (n > 0) {
        *out = (struct mb_spm_span){p, n};
        return n;
    }
    n = mb_spm_charsmap_match(&z->charsmap, p, end, out);
    if (n > 0)
        return n;
    mb_spm_utf8_decode(p, end, &n, &is_valid);
    *out = is_valid ? (struct mb_spm_span){p, n} : replacement;
    return n;
}

static int add(const struct mb_spm_normalizer *z, struct mb_spm_span s, struct mb_buf *out)
{
    const uint8_t *end = s.p + s.n;

    for (const uint8_t *p = s.p; p < end;) {
        size_t left = (size_t)(end - p);
        size_t n = 0;

        if (*p == ' ')
            n = 1;
        else if (z->folds_space && left >= SPACE_BYTES && memcmp(p, space_symbol, SPACE_BYTES) == 0)
            n = SPACE_BYTES;
        if (mb_buf_add(out, n > 0 ? z->space.p : p, n > 0 ? z->space.n : 1) != 0)
            return MB_ENOMEM;
        p += n > 0 ? n : 1;
    }
    return 0;
}

static const uint8_t *skip_leading(const struct mb_spm_normalizer *z, const uint8_t *p,
                                   const uint8_t *end)
{
    struct mb_spm_span s;

    while (p < end) {
        size_t n = next_prefix(z, p, end, &s);
        if (s.n != 1 || *s.p != ' ')
            break;
        p += n;
    }
    return p;
}

/* How many bytes from p on are ASCII that stays as it is, no space and no beginning of a kept
 * piece: those that are followed by an ASCII byte or the end. */
static size_t plain_run(const struct mb_spm_normalizer *z, const uint8_t *p, const uint8_t *end)
{
    const uint8_t *q = p;

    while (q < end && *q < 0x80 && *q != ' ' && !mb_spm_trie_may_start(&z->kept, *q) &&
           (z->charsmap.is_plain_pair[*q >> 3] >> (*q & 7) & 1))
        q++;
    if (q > p && q < end && *q >= 0x80)
        q--;
    return (size_t)(q - p);
}

static int add_all(const struct mb_spm_normalizer *z, const uint8_t *p, const uint8_t *end,
                   struct mb_buf *out)
{
    int after_space = z->removes_extra;

    while (p < end) {
        struct mb_spm_span s;
        size_t n = plain_run(z, p, end);

        if (n > 0) {
            if (mb_buf_add(out, p, n) != 0)
                return MB_ENOMEM;
            p += n;
            after_space = 0;
            continue;
        }
        p += next_prefix(z, p, end, &s);
        while (after_space && s.n > 0 && *s.p == ' ') {
            s.p++;
            s.n--;
        }
        if (s.n == 0)
            continue;
        if (add(z, s, out) != 0)
            return MB_ENOMEM;
        after_space = z->removes_extra && s.p[s.n - 1] == ' ';
    }
    return 0;
}

int mb_spm_normalize(const struct mb_spm_normalizer *z, const uint8_t *text, size_t n,
                     struct mb_buf *out)
{
    const uint8_t *end = text + n;
    size_t before = out->len;
    int rc = 0;

    if (z->removes_extra)
        text = skip_leading(z, text, end);
    if (text == end)
        return 0;
    if (z->adds_prefix)
        rc = mb_buf_add(out, z->space.p, z->space.n);
    if (rc == 0)
        rc = add_all(z, text, end, out);
    while (rc == 0 && z->removes_extra && out->len - before >= z->space.n &&
           memcmp(out->data + out->len - z->space.n, z->space.p, z->space.n) == 0)
        out->len -= z->space.n;
    if (rc == 0 && z->adds_suffix)
        rc = mb_buf_add(out, z->space.p, z->space.n);
    if (rc != 0)
        out->len = before;
    if (out->data != NULL)
        out->data[out->len] = 0;
    return rc;
}

void mb_spm_normalizer_close(struct mb_spm_normalizer *z)
{
    mb_spm_charsmap_close(&z->charsmap);
    mb_spm_trie_close(&z->kept);
    *z = (struct mb_spm_normalizer){0};
}
