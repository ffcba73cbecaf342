/*
 * Ids back to text, as SentencePiece does it.
 *
 * 1. A run of byte pieces becomes its UTF-8 characters; a byte that belongs to none becomes U+FFFD.
 * 2. A control piece is invisible, the unknown piece shows unk_surface, any other its text with
 * spaces for U+2581. 3. While nothing is shown yet, one U+2581 at a piece's beginning is the dummy
 * space and goes; if extra spaces are removed when encoding, every such piece loses it. 4. The
 * model's denormalizer, if it has one, gets the whole. An id outside the vocabulary is MB_EINVAL
 * before anything is appended.
 */
#include <string.h>
#include "worker/data/tokenizer/sentencepiece/private.h"

static const char space_symbol[] = "\xe2\x96\x81";
enum { SPACE_BYTES = 3 };

static int add_bytes(struct mb_buf *bytes, struct mb_buf *out)
{
    const uint8_t *p = bytes->data;
    const uint8_t *end;
    int rc = 0;

    if (bytes->len == 0)
        return 0;
    end = p + bytes->len;
    while (rc == 0 && p < end) {
        size_t n;
        int is_valid;
        mb_spm_utf8_decode(p, end, &n, &is_valid);
        rc = is_valid ? mb_buf_add(out, p, n) : mb_buf_puts(out, "\xef\xbf\xbd");
        p += n;
    }
    mb_buf_reset(bytes);
    return rc;
}

static int add_text(struct mb_spm_span s, struct mb_buf *out)
{
    int rc = 0;

    while (rc == 0 && s.n > 0) {
        const uint8_t *at = memmem(s.p, s.n, space_symbol, SPACE_BYTES);
        size_t n = at != NULL ? (size_t)(at - s.p) : s.n;
        rc = mb_buf_add(out, s.p, n);
        if (rc == 0 && at != NULL) {
            rc = mb_buf_add(out, " ", 1);
            n += SPACE_BYTES;
        }
        s.p += n;
        s.n -= n;
    }
    return rc;
}

/* One piece that is no byte. *is_start: nothing is shown yet and no dummy space has gone. */
static int add_piece(const struct mb_spm *m, const struct mb_spm_piece *piece, int *is_start,
                     struct mb_buf *out)
{
    const struct mb_spm_normalizer_spec *spec = &m->model.normalizer;
    struct mb_spm_span s = piece->text;
    int had_space = 0;
    int rc;

    if (piece->type == MB_SPM_CONTROL)
        return 0;
    if (piece->type == MB_SPM_UNKNOWN)
        return mb_buf_add(out, m->model.unk_surface.p, m->model.unk_surface.n);
    if (*is_start && (spec->add_dummy_prefix || spec->remove_extra_whitespaces) &&
        s.n >= SPACE_BYTES && memcmp(s.p, space_symbol, SPACE_BYTES) == 0) {
        s.p += SPACE_BYTES;
        s.n -= SPACE_BYTES;
        had_space = !spec->remove_extra_whitespaces;
    }
    rc = add_text(s, out);
    if (had_space)
        *is_start = 0;
    return rc;
}

static int denormalize(const struct mb_spm *m, size_t before, struct mb_buf *out)
{
    struct mb_buf plain = {0};
    int rc = mb_buf_add(&plain, out->data + before, out->len - before);

    if (rc == 0) {
        out->len = before;
        rc = mb_spm_normalize(&m->denormalizer, plain.data, plain.len, out);
    }
    mb_buf_close(&plain);
    return rc;
}

int mb_spm_decode(const struct mb_spm *m, const int32_t *ids, size_t n, struct mb_buf *out)
{
    struct mb_buf bytes = {0};
    size_t before = out->len;
    int is_start = 1;
    int rc = 0;

    for (size_t i = 0; i < n; i++) {
        if (ids[i] < 0 || (size_t)ids[i] >= m->model.n_pieces)
            return MB_EINVAL;
    }
    for (size_t i = 0; rc == 0 && i < n; i++) {
        const struct mb_spm_piece *piece = &m->model.pieces[ids[i]];
        if (piece->type == MB_SPM_BYTE) {
            for (unsigned b = 0; b < 256; b++) {
                uint8_t byte = (uint8_t)b;
                if (m->byte_ids[b] == ids[i])
                    rc = mb_buf_add(&bytes, &byte, 1);
            }
            continue;
        }
        rc = add_bytes(&bytes, out);
        if (out->len > before)
            is_start = 0;
        if (rc == 0)
            rc = add_piece(m, piece, &is_start, out);
    }
    if (rc == 0)
        rc = add_bytes(&bytes, out);
    if (rc == 0 && m->denormalizes && out->len > before)
        rc = denormalize(m, before, out);
    if (rc != 0 && out->data != NULL) {
        out->len = before;
        out->data[before] = 0;
    }
    mb_buf_close(&bytes);
    return rc;
}
