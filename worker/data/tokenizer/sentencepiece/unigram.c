/*
 * The unigram model: the segmentation with the highest sum of scores.
 *
 * 1. From each character on, every piece that begins there offers its end a better way; a character
 * that no piece covers alone may also be unknown, at a penalty. 2. From the end the best ways lead
 * back. Sums are floats over the whole text and ties keep the first, exactly as SentencePiece 0.2.3
 * computes them (0.2.0 adds in double and chooses otherwise in ties), so that its choices, also
 * where sums round, are ours; therefore the text is never cut. Linear in the text times the longest
 * piece. Only memory can run out.
 */
#include <string.h>
#include "worker/data/tokenizer/sentencepiece/private.h"

/* The best way to the end of a byte. */
struct best {
    int32_t id; /* of its last piece */
    float score;
    uint32_t length; /* of its last piece in bytes; 0: no way yet */
};

static void offer(struct best *to, float score, int32_t id, uint32_t length)
{
    if (to->length == 0 || score > to->score)
        *to = (struct best){id, score, length};
}

/* All pieces that begin at p; from has the way to it. */
static void extend(const struct mb_spm *m, const uint8_t *p, const uint8_t *end, struct best *from)
{
    const struct mb_spm_trie *t = &m->vocabulary;
    float here = from->score;
    uint32_t node = MB_SPM_TRIE_ROOT;
    uint32_t char_length;
    int is_covered = 0;
    size_t n;
    int is_valid;

    mb_spm_utf8_decode(p, end, &n, &is_valid);
    char_length = (uint32_t)n;
    for (const uint8_t *q = p; q < end; q++) {
        uint32_t length = (uint32_t)(q + 1 - p);
        int32_t id;

        node = mb_spm_trie_step(t, node, *q);
        if (node == MB_SPM_TRIE_NO_NODE)
            break;
        id = t->values[node];
        if (id < 0 || m->model.pieces[id].type == MB_SPM_UNUSED)
            continue;
        offer(from + length, m->scores[id] + here, id, length);
        is_covered |= length == char_length;
    }
    if (!is_covered)
        offer(from + char_length, m->unk_score + here, m->unk, char_length);
}

/* Turn the links round, so that each start has the piece that begins there. */
static void turn(struct best *best, size_t n)
{
    struct best piece = best[n];

    for (size_t at = n; at > 0;) {
        struct best before;
        at -= piece.length;
        before = best[at];
        best[at] = piece;
        piece = before;
    }
}

static int emit(const struct mb_spm *m, const uint8_t *p, size_t n, const struct best *best,
                struct mb_ids *out)
{
    int after_unknown = 0;

    for (size_t at = 0; at < n; at += best[at].length) {
        int32_t id = best[at].id;
        const uint8_t *q = p + at;
        int rc;

        if (id == m->unk) {
            rc = mb_spm_emit_unknown(m, mb_spm_next_char(m, &q, p + n), after_unknown, out);
        } else {
            rc = mb_ids_reserve(out, 1);
            if (rc == 0)
                out->data[out->n++] = id;
        }
        if (rc != 0)
            return rc;
        after_unknown = id == m->unk;
    }
    return 0;
}

int mb_spm_unigram_encode(const struct mb_spm *m, struct mb_spm_scratch *s, const uint8_t *p,
                          size_t n, struct mb_ids *out)
{
    struct best *best;
    int rc;

    if (n >= UINT32_MAX || mb_spm_work_reserve(&s->work, (n + 1) * sizeof(*best)) != 0)
        return MB_ENOMEM;
    best = s->work.block;
    memset(best, 0, (n + 1) * sizeof(*best));
    for (size_t at = 0; at < n;) {
        size_t length;
        int is_valid;
        extend(m, p + at, p + n, best + at);
        mb_spm_utf8_decode(p + at, p + n, &length, &is_valid);
        at += length;
    }
    turn(best, n);
    rc = emit(m, p, n, best, out);
    mb_spm_work_trim(&s->work);
    return rc;
}
