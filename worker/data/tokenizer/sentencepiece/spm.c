/*
 * The door to a model: loading, and a text through normaliser, cutter, cache and encoder.
 *
 * 1. A model whose normaliser only adds the dummy space is encoded in place; for any other the
 * normal form is written to the thread's buffer first. 2. Unigram models take the text whole, and
 * so do BPE models with unused pieces. 3. Any other text is cut between all two characters that no
 * piece has side by side, up to 64 bytes at a time. 4. The parts are looked up in the thread's
 * cache, a group at a time; one that is not there is merged (bpe.c) and kept. 5. An unknown
 * character that begins a part shares the unknown id of one in front of it. Only memory can run
 * out.
 */
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "worker/data/tokenizer/sentencepiece/private.h"

enum {
    GROUP = 64,      /* parts whose memory is asked for at a time */
    READ_BYTES = 32, /* that a probe reads */
    MAX_FILE_BYTES = 256 << 20
};

/* One text on its way. */
struct run {
    const struct mb_spm *m;
    struct mb_spm_scratch *s;
    struct mb_ids *out;
    size_t first; /* ids before this text */
};

static int parse_and_build(struct mb_spm *m, struct mb_err *err)
{
    int rc = mb_spm_model_parse(m->file.data, m->file.len, &m->model, err);

    return rc == 0 ? mb_spm_build(m, err) : rc;
}

int mb_spm_create(const void *bytes, size_t n, struct mb_spm **out, struct mb_err *err)
{
    struct mb_spm *m = mb_calloc(1, sizeof(*m));
    int rc;

    if (m == NULL || mb_buf_add(&m->file, bytes, n) != 0) {
        mb_free(m);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    rc = parse_and_build(m, err);
    if (rc == 0)
        *out = m;
    else
        mb_spm_destroy(m);
    return rc;
}

int mb_spm_load(const char *model_file, struct mb_spm **out, struct mb_err *err)
{
    struct mb_spm *m = mb_calloc(1, sizeof(*m));
    int rc;

    if (m == NULL)
        return mb_err_set(err, MB_ENOMEM, "loading %s: out of memory", model_file);
    rc = mb_fs_read(model_file, MAX_FILE_BYTES, &m->file, err);
    if (rc == 0) {
        rc = parse_and_build(m, err);
        if (rc != 0)
            mb_err_wrap(err, "%s", model_file);
    }
    if (rc == 0)
        *out = m;
    else
        mb_spm_destroy(m);
    return rc;
}

void mb_spm_destroy(struct mb_spm *m)
{
    if (m == NULL)
        return;
    mb_spm_model_close(&m->model);
    mb_spm_normalizer_close(&m->normalizer);
    mb_spm_normalizer_close(&m->denormalizer);
    mb_spm_trie_close(&m->user);
    mb_spm_trie_close(&m->vocabulary);
    mb_spm_set_close(&m->by_text);
    mb_spm_set_close(&m->pairs);
    mb_spm_set_close(&m->joined);
    mb_free(m->char_pages);
    mb_free(m->char_symbols);
    mb_free(m->symbol_ids);
    mb_free(m->extra_chars);
    mb_free(m->prios);
    mb_free(m->scores);
    mb_buf_close(&m->file);
    mb_free(m);
}

size_t mb_spm_n_pieces(const struct mb_spm *m)
{
    return m->model.n_pieces;
}

int32_t mb_spm_bos(const struct mb_spm *m)
{
    return m->bos;
}

int32_t mb_spm_eos(const struct mb_spm *m)
{
    return m->eos;
}

int32_t mb_spm_pad(const struct mb_spm *m)
{
    return m->pad;
}

const uint8_t *mb_spm_piece(const struct mb_spm *m, int32_t id, size_t *n)
{
    if (id < 0 || (size_t)id >= m->model.n_pieces)
        return NULL;
    *n = m->model.pieces[id].text.n;
    return m->model.pieces[id].text.p;
}

int mb_spm_is_special(const struct mb_spm *m, int32_t id)
{
    return id >= 0 && (size_t)id < m->model.n_pieces && m->model.pieces[id].type != MB_SPM_NORMAL &&
           m->model.pieces[id].type != MB_SPM_UNUSED;
}

const char *mb_spm_algorithm_name(const struct mb_spm *m)
{
    return m->model.algorithm == MB_SPM_BPE    ? "BPE"
           : m->model.algorithm == MB_SPM_CHAR ? "character"
                                               : "unigram";
}

int mb_spm_scratch_create(const struct mb_spm *m, struct mb_spm_scratch **out, struct mb_err *err)
{
    struct mb_spm_scratch *s = mb_calloc(1, sizeof(*s));

    if (s == NULL)
        return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
    if (m->has_unused)
        s->splits = mb_reallocarray(NULL, m->model.n_pieces, sizeof(*s->splits));
    if ((m->has_unused && s->splits == NULL) ||
        (m->model.algorithm != MB_SPM_UNIGRAM && mb_piece_cache_init(&s->cache) != 0)) {
        mb_spm_scratch_destroy(s);
        return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
    }
    if (s->splits != NULL)
        memset(s->splits, 0xff, m->model.n_pieces * sizeof(*s->splits));
    *out = s;
    return 0;
}

void mb_spm_scratch_destroy(struct mb_spm_scratch *s)
{
    if (s == NULL)
        return;
    mb_piece_cache_close(&s->cache);
    mb_free(s->splits);
    mb_free(s->work.block);
    mb_buf_close(&s->text);
    mb_free(s);
}

/* The ids from `at` on are of a new part: its first unknown id joins one before it. */
static void join_unknown(const struct run *r, size_t at)
{
    const struct mb_spm *m = r->m;
    int32_t *ids = r->out->data;

    if (at == r->first || at == r->out->n || ids[at] != m->unk || ids[at - 1] != m->unk)
        return;
    r->out->n--;
    memmove(ids + at, ids + at + 1, (r->out->n - at) * sizeof(*ids));
}

/* limit: the end of what may be read. */
static inline void prepare(const struct run *r, struct mb_piece_probe *q, const uint8_t *p,
                           size_t n, const uint8_t *limit)
{
    uint8_t padded[READ_BYTES] = {0};

    if (n > MB_PIECE_LONG_BYTES) {
        q->n = (uint32_t)n;
    } else if (limit - p >= READ_BYTES) {
        mb_piece_prepare(&r->s->cache, q, p, n);
    } else {
        memcpy(padded, p, n);
        mb_piece_prepare(&r->s->cache, q, padded, n);
    }
    q->piece = p;
}

/* Parts as they were prepared: look them up, merge and keep those that are not found. */
static int encode_group(const struct run *r, struct mb_piece_probe *probes, size_t n)
{
    struct mb_ids *out = r->out;

    for (size_t i = 0; i < n; i++) {
        struct mb_piece_probe *q = &probes[i];
        size_t at = out->n;
        int in_long = q->n <= MB_PIECE_LONG_BYTES;

        if (mb_ids_reserve(out, MB_PIECE_LONG_IDS) != 0)
            return MB_ENOMEM;
        if (q->n <= MB_PIECE_SHORT_BYTES)
            out->n += mb_piece_find_short(&r->s->cache, q, out->data + at);
        if (out->n == at && q->n <= MB_PIECE_SHORT_BYTES)
            in_long = mb_piece_ask_long(&r->s->cache, q);
        if (out->n == at && in_long)
            out->n += mb_piece_find_long(&r->s->cache, q, out->data + at);
        if (out->n == at) {
            if (mb_spm_bpe_encode(r->m, r->s, q->piece, q->n, out) != 0)
                return MB_ENOMEM;
            if (q->n <= MB_PIECE_LONG_BYTES)
                mb_piece_cache_add(&r->s->cache, q, out->data + at, out->n - at);
        }
        if (!r->m->model.byte_fallback)
            join_unknown(r, at);
    }
    return 0;
}

static int is_ascii(const uint8_t *p, size_t n)
{
    uint64_t all = 0;
    uint64_t word;

    for (; n >= 8; p += 8, n -= 8) {
        memcpy(&word, p, 8);
        all |= word;
    }
    for (; n > 0; n--)
        all |= *p++;
    return (all & 0x8080808080808080u) == 0;
}

/* The next characters, up to 64 bytes: their number of bytes, and in bit i whether a part may begin
 * at byte i. *before: the character before them, then the last of them. */
static size_t find_cuts(const struct mb_spm *m, const uint8_t *p, const uint8_t *end,
                        uint32_t *before, uint64_t *cuts)
{
    size_t n = end - p < 64 ? (size_t)(end - p) : 64;
    const uint8_t *q = p;

    if (*before < 0x80 && is_ascii(p, n)) {
        uint64_t joined = mb_spm_are_joined(m, *before, *p) ? 1 : 0;
        for (size_t i = 1; i < n; i++)
            joined |= (m->joined_ascii[p[i - 1]][p[i] >> 6] >> (p[i] & 63) & 1) << i;
        *before = p[n - 1];
        *cuts = ~joined & (n < 64 ? ((uint64_t)1 << n) - 1 : UINT64_MAX);
        return n;
    }
    *cuts = 0;
    while (q < end && q - p < 61) { /* a character has up to four bytes */
        size_t at = (size_t)(q - p);
        uint32_t c = mb_spm_next_char(m, &q, end);
        if (!mb_spm_are_joined(m, *before, c))
            *cuts |= (uint64_t)1 << at;
        *before = c;
    }
    return (size_t)(q - p);
}

/* The part that begins with the dummy space, which is not in the text. */
static int encode_first(const struct run *r, const uint8_t **p, const uint8_t *end)
{
    struct mb_buf *text = &r->s->text;
    struct mb_piece_probe q;
    const uint8_t *stop = *p;
    uint32_t before = ' ';

    while (stop < end) {
        const uint8_t *next = stop;
        uint32_t c = mb_spm_next_char(r->m, &next, end);
        if (!mb_spm_are_joined(r->m, before, c))
            break;
        before = c;
        stop = next;
    }
    mb_buf_reset(text);
    if (mb_buf_add(text, " ", 1) != 0 || mb_buf_add(text, *p, (size_t)(stop - *p)) != 0)
        return MB_ENOMEM;
    *p = stop;
    prepare(r, &q, text->data, text->len, text->data + text->len);
    return encode_group(r, &q, 1);
}

static int encode_parts(const struct run *r, const uint8_t *p, const uint8_t *end)
{
    struct mb_piece_probe probes[GROUP];
    const uint8_t *start = p;
    uint32_t before;
    size_t n = 0;

    if (p == end)
        return 0;
    before = mb_spm_next_char(r->m, &p, end);
    while (p < end) {
        uint64_t cuts;
        size_t n_bytes = find_cuts(r->m, p, end, &before, &cuts);

        for (; cuts != 0; cuts &= cuts - 1) {
            const uint8_t *stop = p + __builtin_ctzll(cuts);
            prepare(r, &probes[n++], start, (size_t)(stop - start), end);
            start = stop;
            if (n == GROUP) {
                if (encode_group(r, probes, n) != 0)
                    return MB_ENOMEM;
                n = 0;
            }
        }
        p += n_bytes;
    }
    prepare(r, &probes[n++], start, (size_t)(end - start), end);
    return encode_group(r, probes, n);
}

/* A text's normal form must not stay allocated for ever after one long text. */
static void trim_text(struct mb_buf *text)
{
    if (text->cap > (size_t)4 << 20)
        mb_buf_close(text);
}

int mb_spm_encode(const struct mb_spm *m, struct mb_spm_scratch *s, const void *text, size_t n,
                  struct mb_ids *out)
{
    struct run r = {.m = m, .s = s, .out = out, .first = out->n};
    const uint8_t *p = text;
    int rc = 0;

    if (n == 0)
        return 0;
    if (m->is_in_place) {
        const uint8_t *end = p + n;
        if (m->normalizer.adds_prefix)
            rc = encode_first(&r, &p, end);
        if (rc == 0)
            rc = encode_parts(&r, p, end);
    } else {
        mb_buf_reset(&s->text);
        rc = mb_spm_normalize(&m->normalizer, p, n, &s->text);
        p = s->text.data;
        n = s->text.len;
        if (rc == 0 && n > 0 && m->model.algorithm == MB_SPM_UNIGRAM)
            rc = mb_spm_unigram_encode(m, s, p, n, out);
        else if (rc == 0 && n > 0 && m->has_unused)
            rc = mb_spm_bpe_encode(m, s, p, n, out);
        else if (rc == 0 && n > 0)
            rc = encode_parts(&r, p, p + n);
    }
    trim_text(&s->text);
    return rc;
}
