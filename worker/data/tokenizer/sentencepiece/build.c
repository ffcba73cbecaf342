/*
 * From the description of a model to the tables of its encoder.
 *
 * 1. Pieces are checked as SentencePiece checks them: a text each, none twice, one unknown piece,
 * all 256 bytes if bytes are fallen back to. 2. The normaliser is set up. 3. BPE: each character of
 * a piece gets a symbol; each way to cut a piece into two symbols is a merge, earlier the higher
 * the piece's score, equal for equal scores; each two neighbouring characters of a piece are noted
 * as joined. 4. Unigram: the pieces go into a trie. What cannot be is MB_ECORRUPT, what is not
 * provided MB_EUNSUPPORTED, both with the piece's number; the caller frees what was made.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/sentencepiece/private.h"

enum { MAX_PIECE_BYTES = 8000, N_PAGES = 0x110000 >> MB_SPM_PAGE_BITS };

static const uint64_t hash_base = 0x9e3779b97f4a7c15u | 1;

struct merge {
    uint64_t pair; /* left << MB_SPM_SYMBOL_BITS | right */
    uint32_t product;
};

struct builder {
    struct mb_spm *m;
    struct mb_buf texts;         /* canonical texts, one after the other */
    struct mb_spm_span *canon;   /* by piece; p NULL: not segmented with */
    struct mb_spm_set canon_set; /* of their numbers, by hash; 21 bits of number below the hash */
    uint64_t powers[MAX_PIECE_BYTES + 1];
    struct merge *merges;
    size_t n_merges, cap_merges;
    uint64_t *joined; /* pairs of characters, with repetitions */
    size_t n_joined, cap_joined;
    uint32_t n_pages, cap_extra;
    struct mb_err *err;
};

static int no_memory(struct builder *b)
{
    return mb_err_set(b->err, MB_ENOMEM, "out of memory");
}

int mb_spm_set_create(struct mb_spm_set *set, size_t n)
{
    unsigned bits = 4;

    while ((size_t)1 << bits < 2 * n + 2)
        bits++;
    set->slots = mb_reallocarray(NULL, (size_t)1 << bits, sizeof(*set->slots));
    if (set->slots == NULL)
        return MB_ENOMEM;
    memset(set->slots, 0xff, sizeof(*set->slots) << bits);
    set->mask = ((size_t)1 << bits) - 1;
    set->shift = 64 - bits;
    return 0;
}

void mb_spm_set_close(struct mb_spm_set *set)
{
    mb_free(set->slots);
    *set = (struct mb_spm_set){0};
}

/* A polynomial, so that the hash of a part follows from those of two prefixes. */
static uint64_t hash_bytes(const uint8_t *p, size_t n)
{
    uint64_t h = 0;

    for (size_t i = 0; i < n; i++)
        h = h * hash_base + p[i] + 1;
    return h;
}

/* The sets of texts hold hash and number: the upper 43 bits of the one above 21 of the other. */
static uint64_t text_slot(uint64_t hash, uint32_t number)
{
    return (hash ^ hash >> 29) << MB_SPM_SYMBOL_BITS | number;
}

static uint32_t find_text(const struct mb_spm_set *set, uint64_t hash, const uint8_t *p, size_t n,
                          const struct mb_spm_span *(*text_of)(const void *owner, uint32_t number),
                          const void *owner)
{
    uint64_t want = text_slot(hash, 0);

    for (size_t i = mb_spm_slot(set, want);; i = (i + 1) & set->mask) {
        uint64_t slot = set->slots[i];
        const struct mb_spm_span *text;

        if (slot == MB_SPM_NO_SLOT)
            return MB_SPM_NO_SYMBOL;
        if ((slot ^ want) >> MB_SPM_SYMBOL_BITS != 0)
            continue;
        text = text_of(owner, (uint32_t)slot & MB_SPM_NO_SYMBOL);
        if (text->n == n && memcmp(text->p, p, n) == 0)
            return (uint32_t)slot & MB_SPM_NO_SYMBOL;
    }
}

static void put_text(struct mb_spm_set *set, uint64_t hash, uint32_t number)
{
    size_t i = mb_spm_slot(set, text_slot(hash, 0));

    while (set->slots[i] != MB_SPM_NO_SLOT)
        i = (i + 1) & set->mask;
    set->slots[i] = text_slot(hash, number);
}

static const struct mb_spm_span *piece_text(const void *owner, uint32_t number)
{
    return &((const struct mb_spm *)owner)->model.pieces[number].text;
}

static const struct mb_spm_span *canonical_text(const void *owner, uint32_t number)
{
    return &((const struct builder *)owner)->canon[number];
}

int32_t mb_spm_piece_id(const struct mb_spm *m, const void *text, size_t n)
{
    uint32_t found = find_text(&m->by_text, hash_bytes(text, n), text, n, piece_text, m);

    return found == MB_SPM_NO_SYMBOL ? -1 : (int32_t)found;
}

static int is_utf8(struct mb_spm_span s)
{
    const uint8_t *end = s.p + s.n;

    for (const uint8_t *p = s.p; p < end;) {
        size_t n;
        int is_valid;
        mb_spm_utf8_decode(p, end, &n, &is_valid);
        if (!is_valid)
            return 0;
        p += n;
    }
    return 1;
}

/* The number of <0xNN>, -1 for another text. */
static int byte_of(struct mb_spm_span s)
{
    static const char digits[] = "0123456789ABCDEF";
    const char *high, *low;

    if (s.n != 6 || memcmp(s.p, "<0x", 3) != 0 || s.p[5] != '>' || s.p[3] == 0 || s.p[4] == 0)
        return -1;
    high = strchr(digits, s.p[3]);
    low = strchr(digits, s.p[4]);
    return high != NULL && low != NULL ? (int)((high - digits) << 4 | (low - digits)) : -1;
}

static int add_piece(struct builder *b, uint32_t id)
{
    struct mb_spm *m = b->m;
    const struct mb_spm_piece *piece = &m->model.pieces[id];
    int byte = byte_of(piece->text);

    if (piece->text.n == 0 || piece->text.n > MAX_PIECE_BYTES || !is_utf8(piece->text) ||
        memchr(piece->text.p, 0, piece->text.n) != NULL)
        return mb_err_set(b->err, MB_ECORRUPT,
                          "piece %u: expected 1 to %d bytes of UTF-8 without NUL", id,
                          MAX_PIECE_BYTES);
    if (isnan(piece->score))
        return mb_err_set(b->err, MB_ECORRUPT, "piece %u: the score is no number", id);
    if (mb_spm_piece_id(m, piece->text.p, piece->text.n) >= 0)
        return mb_err_set(b->err, MB_ECORRUPT, "piece %u: \"%.*s\" is there twice", id,
                          piece->text.n < 40 ? (int)piece->text.n : 40, piece->text.p);
    put_text(&m->by_text, hash_bytes(piece->text.p, piece->text.n), id);
    if (piece->type == MB_SPM_UNKNOWN) {
        if (m->unk >= 0)
            return mb_err_set(b->err, MB_ECORRUPT, "piece %u: a second unknown piece", id);
        m->unk = (int32_t)id;
    }
    if (piece->type == MB_SPM_BYTE) {
        if (!m->model.byte_fallback || byte < 0)
            return mb_err_set(b->err, MB_ECORRUPT, "piece %u: an unexpected byte piece", id);
        m->byte_ids[byte] = (int32_t)id;
    }
    return 0;
}

static int32_t control_id(const struct mb_spm *m, struct mb_spm_span name)
{
    int32_t id = mb_spm_piece_id(m, name.p, name.n);

    return id >= 0 && m->model.pieces[id].type == MB_SPM_CONTROL ? id : -1;
}

static int add_pieces(struct builder *b)
{
    struct mb_spm *m = b->m;

    if (m->model.n_pieces >= MB_SPM_NO_SYMBOL / 2)
        return mb_err_set(b->err, MB_EUNSUPPORTED, "more than %u pieces", MB_SPM_NO_SYMBOL / 2);
    if (mb_spm_set_create(&m->by_text, m->model.n_pieces) != 0)
        return no_memory(b);
    m->unk = -1;
    memset(m->byte_ids, 0xff, sizeof(m->byte_ids));
    for (uint32_t id = 0; id < m->model.n_pieces; id++) {
        int rc = add_piece(b, id);
        if (rc != 0)
            return rc;
    }
    if (m->unk < 0)
        return mb_err_set(b->err, MB_ECORRUPT, "no unknown piece");
    for (unsigned i = 0; m->model.byte_fallback && i < 256; i++) {
        if (m->byte_ids[i] < 0)
            return mb_err_set(b->err, MB_ECORRUPT, "byte_fallback without the piece <0x%02X>", i);
    }
    m->bos = control_id(m, m->model.bos_piece);
    m->eos = control_id(m, m->model.eos_piece);
    m->pad = control_id(m, m->model.pad_piece);
    return 0;
}

static int is_segmented_with(const struct mb_spm_piece *piece)
{
    return piece->type == MB_SPM_NORMAL || piece->type == MB_SPM_USER_DEFINED ||
           piece->type == MB_SPM_UNUSED;
}

static int setup_normalizer(struct builder *b)
{
    struct mb_spm *m = b->m;
    const struct mb_spm_normalizer_spec *spec = &m->model.normalizer;
    struct mb_spm_normalizer *z = &m->normalizer;
    int is_suffix = m->model.treat_whitespace_as_suffix;
    int rc = mb_spm_charsmap_create(spec->charsmap, &z->charsmap, b->err);

    m->folds_space = spec->escape_whitespaces;
    z->folds_space = spec->escape_whitespaces;
    z->adds_prefix = spec->add_dummy_prefix && !is_suffix;
    z->adds_suffix = spec->add_dummy_prefix && is_suffix;
    z->removes_extra = spec->remove_extra_whitespaces;
    z->space = (struct mb_spm_span){(const uint8_t *)" ", 1};
    for (uint32_t id = 0; rc == 0 && id < m->model.n_pieces; id++) {
        const struct mb_spm_piece *piece = &m->model.pieces[id];
        if (piece->type == MB_SPM_USER_DEFINED &&
            mb_spm_trie_add(&z->kept, piece->text.p, piece->text.n, (int32_t)id) != 0)
            rc = no_memory(b);
    }
    m->is_in_place = z->charsmap.units == NULL && !z->removes_extra && !z->adds_suffix;
    return rc;
}

/* Of decoded text; SentencePiece uses it only if it has a map. */
static int setup_denormalizer(struct builder *b)
{
    const struct mb_spm_normalizer_spec *spec = &b->m->model.denormalizer;
    struct mb_spm_normalizer *z = &b->m->denormalizer;
    int is_escaped = spec->escape_whitespaces;

    b->m->denormalizes = spec->charsmap.n > 0;
    z->adds_prefix = spec->add_dummy_prefix;
    z->removes_extra = spec->remove_extra_whitespaces;
    z->space = is_escaped ? (struct mb_spm_span){(const uint8_t *)"\xe2\x96\x81", 3}
                          : (struct mb_spm_span){(const uint8_t *)" ", 1};
    return mb_spm_charsmap_create(spec->charsmap, &z->charsmap, b->err);
}

/* The piece in canonical form; none if it has a space that no normalised text can have. */
static int make_canonical(struct builder *b, uint32_t id, size_t *start)
{
    struct mb_spm *m = b->m;
    struct mb_spm_span s = m->model.pieces[id].text;
    const uint8_t *p = s.p;
    uint8_t bytes[4];

    *start = b->texts.len;
    if (!is_segmented_with(&m->model.pieces[id]) ||
        (m->folds_space && memchr(s.p, ' ', s.n) != NULL))
        return 0;
    while (p < s.p + s.n) {
        uint32_t c = mb_spm_next_char(m, &p, s.p + s.n);
        if (mb_buf_add(&b->texts, bytes, mb_utf8_encode(c, bytes)) != 0)
            return no_memory(b);
    }
    return 0;
}

static int make_all_canonical(struct builder *b)
{
    size_t n = b->m->model.n_pieces;
    size_t *starts = mb_reallocarray(NULL, n + 1, sizeof(*starts));
    int rc = 0;

    b->canon = mb_calloc(n, sizeof(*b->canon));
    if (starts == NULL || b->canon == NULL || mb_spm_set_create(&b->canon_set, n) != 0)
        rc = no_memory(b);
    for (uint32_t id = 0; rc == 0 && id < n; id++)
        rc = make_canonical(b, id, &starts[id]);
    for (uint32_t id = 0; rc == 0 && id < n; id++) {
        size_t end = id + 1 < n ? starts[id + 1] : b->texts.len;
        if (end == starts[id])
            continue;
        b->canon[id] = (struct mb_spm_span){b->texts.data + starts[id], end - starts[id]};
        put_text(&b->canon_set, hash_bytes(b->canon[id].p, b->canon[id].n), id);
    }
    mb_free(starts);
    return rc;
}

/* A symbol for a character that is no piece. */
static int new_symbol(struct builder *b, uint32_t c, uint32_t *out)
{
    struct mb_spm *m = b->m;
    uint32_t n_extra = m->n_symbols - (uint32_t)m->model.n_pieces;

    if (n_extra == b->cap_extra) {
        uint32_t cap = 2 * b->cap_extra + 256;
        int32_t *ids = mb_reallocarray(m->symbol_ids, m->model.n_pieces + cap, sizeof(*ids));
        uint32_t *chars = mb_reallocarray(m->extra_chars, cap, sizeof(*chars));
        if (ids != NULL)
            m->symbol_ids = ids;
        if (chars != NULL)
            m->extra_chars = chars;
        if (ids == NULL || chars == NULL)
            return no_memory(b);
        b->cap_extra = cap;
    }
    if (m->n_symbols + 1 >= MB_SPM_NO_SYMBOL)
        return mb_err_set(b->err, MB_EUNSUPPORTED, "more than %u symbols", MB_SPM_NO_SYMBOL);
    m->extra_chars[n_extra] = c;
    m->symbol_ids[m->n_symbols] = m->unk;
    *out = m->n_symbols++;
    return 0;
}

static int set_char_symbol(struct builder *b, uint32_t c, uint32_t symbol)
{
    struct mb_spm *m = b->m;
    uint16_t *page = &m->char_pages[c >> MB_SPM_PAGE_BITS];
    size_t page_size = (size_t)1 << MB_SPM_PAGE_BITS;

    if (*page == 0) {
        uint32_t *symbols =
            mb_reallocarray(m->char_symbols, (b->n_pages + 1) * page_size, sizeof(*symbols));
        if (symbols == NULL)
            return no_memory(b);
        m->char_symbols = symbols;
        for (size_t i = 0; i < page_size; i++)
            symbols[b->n_pages * page_size + i] = MB_SPM_NO_SYMBOL;
        *page = (uint16_t)b->n_pages++;
    }
    m->char_symbols[*page * page_size + (c & (page_size - 1))] = symbol;
    return 0;
}

/* What the text's own id is if a character stays alone: SentencePiece looks among all pieces. */
static int lone_char_id(struct builder *b, uint32_t c, int32_t *out)
{
    struct mb_spm *m = b->m;
    uint8_t bytes[4];
    size_t n = mb_utf8_encode(c == ' ' && m->folds_space ? MB_SPM_SPACE : c, bytes);
    int32_t id = mb_spm_piece_id(m, bytes, n);

    *out = id >= 0 ? id : m->unk;
    if (id >= 0 && m->model.pieces[id].type == MB_SPM_CONTROL)
        return mb_err_set(b->err, MB_EUNSUPPORTED,
                          "piece %d: a control piece of one character in a BPE model", (int)id);
    return 0;
}

/* Symbols for the characters of a piece, and which of them stand side by side. */
static int add_chars(struct builder *b, struct mb_spm_span s)
{
    const uint8_t *p = s.p;
    uint32_t before = 0;

    for (int is_first = 1; p < s.p + s.n; is_first = 0) {
        uint32_t c = mb_spm_next_char(b->m, &p, s.p + s.n);
        if (mb_spm_char_symbol(b->m, c) == MB_SPM_NO_SYMBOL) {
            uint32_t symbol = 0;
            int32_t id;
            int rc = lone_char_id(b, c, &id);
            if (rc == 0 && id != b->m->unk)
                symbol = (uint32_t)id;
            else if (rc == 0)
                rc = new_symbol(b, c, &symbol);
            if (rc == 0)
                rc = set_char_symbol(b, c, symbol);
            if (rc != 0)
                return rc;
        }
        if (!is_first)
            b->joined[b->n_joined++] = (uint64_t)before << 21 | c;
        before = c;
    }
    return 0;
}

static int reserve_for(struct builder *b, size_t n_bytes)
{
    if (b->cap_joined - b->n_joined < n_bytes) {
        size_t cap = 2 * b->cap_joined + MAX_PIECE_BYTES + n_bytes;
        uint64_t *joined = mb_reallocarray(b->joined, cap, sizeof(*joined));
        if (joined == NULL)
            return no_memory(b);
        b->joined = joined;
        b->cap_joined = cap;
    }
    if (b->cap_merges - b->n_merges < n_bytes) {
        size_t cap = 2 * b->cap_merges + MAX_PIECE_BYTES + n_bytes;
        struct merge *merges = mb_reallocarray(b->merges, cap, sizeof(*merges));
        if (merges == NULL)
            return no_memory(b);
        b->merges = merges;
        b->cap_merges = cap;
    }
    return 0;
}

/* The symbol of a part of a piece: a character, or a piece that merges. */
static uint32_t symbol_of(const struct builder *b, uint64_t hash, const uint8_t *p, size_t n)
{
    const uint8_t *q = p;
    uint32_t c = mb_spm_next_char(b->m, &q, p + n);
    uint32_t found;

    if (q == p + n)
        found = mb_spm_char_symbol(b->m, c);
    else
        found = find_text(&b->canon_set, hash, p, n, canonical_text, b);
    if (found < b->m->model.n_pieces && b->m->model.pieces[found].type == MB_SPM_USER_DEFINED)
        return MB_SPM_NO_SYMBOL; /* never merged */
    return found;
}

static void add_merges(struct builder *b, uint32_t id)
{
    struct mb_spm_span s = b->canon[id];
    uint64_t prefixes[MAX_PIECE_BYTES + 1];

    prefixes[0] = 0;
    for (size_t i = 0; i < s.n; i++)
        prefixes[i + 1] = prefixes[i] * hash_base + s.p[i] + 1;
    for (size_t cut = 1; cut < s.n; cut++) {
        uint32_t left, right;
        if (mb_utf8_is_tail(s.p[cut]))
            continue;
        left = symbol_of(b, prefixes[cut], s.p, cut);
        if (left == MB_SPM_NO_SYMBOL)
            continue;
        right = symbol_of(b, prefixes[s.n] - prefixes[cut] * b->powers[s.n - cut], s.p + cut,
                          s.n - cut);
        if (right != MB_SPM_NO_SYMBOL)
            b->merges[b->n_merges++] =
                (struct merge){(uint64_t)left << MB_SPM_SYMBOL_BITS | right, id};
    }
}

struct scored {
    uint32_t order; /* the score's bits, mapped so that less is a higher score */
    uint32_t symbol;
};

static int compare_scored(const void *a, const void *b)
{
    uint32_t left = ((const struct scored *)a)->order;
    uint32_t right = ((const struct scored *)b)->order;

    return left < right ? -1 : left > right;
}

/* Scores are compared as SentencePiece compares them: by their bits, -0.0 below 0.0. */
static int make_prios(struct builder *b)
{
    struct mb_spm *m = b->m;
    size_t n = m->model.n_pieces;
    struct scored *all = mb_reallocarray(NULL, n, sizeof(*all));
    uint32_t prio = 0;

    m->prios = mb_calloc(n, sizeof(*m->prios));
    if (all == NULL || m->prios == NULL) {
        mb_free(all);
        return no_memory(b);
    }
    for (uint32_t id = 0; id < n; id++) {
        uint32_t bits;
        memcpy(&bits, &m->model.pieces[id].score, sizeof(bits));
        all[id] = (struct scored){bits >> 31 ? bits : 0x7fffffffu - bits, id};
    }
    qsort(all, n, sizeof(*all), compare_scored);
    for (size_t i = 0; i < n; i++) {
        if (i > 0 && all[i].order != all[i - 1].order)
            prio = (uint32_t)i;
        m->prios[all[i].symbol] = prio;
    }
    mb_free(all);
    return 0;
}

static int make_pair_table(struct builder *b)
{
    struct mb_spm_set *pairs = &b->m->pairs;

    if (mb_spm_set_create(pairs, b->n_merges) != 0)
        return no_memory(b);
    for (size_t i = 0; i < b->n_merges; i++) {
        size_t at = mb_spm_slot(pairs, b->merges[i].pair);
        while (pairs->slots[at] != MB_SPM_NO_SLOT)
            at = (at + 1) & pairs->mask;
        pairs->slots[at] = b->merges[i].pair << MB_SPM_PRODUCT_BITS | b->merges[i].product;
    }
    return 0;
}

static int compare_u64(const void *a, const void *b)
{
    uint64_t left = *(const uint64_t *)a;
    uint64_t right = *(const uint64_t *)b;

    return left < right ? -1 : left > right;
}

static int make_joined(struct builder *b)
{
    struct mb_spm *m = b->m;
    size_t n = 0;

    if (b->n_joined > 0)
        qsort(b->joined, b->n_joined, sizeof(*b->joined), compare_u64);
    for (size_t i = 0; i < b->n_joined; i++) {
        if (n == 0 || b->joined[i] != b->joined[n - 1])
            b->joined[n++] = b->joined[i];
    }
    if (mb_spm_set_create(&m->joined, n) != 0)
        return no_memory(b);
    for (size_t i = 0; i < n; i++) {
        uint32_t left = (uint32_t)(b->joined[i] >> 21);
        uint32_t right = (uint32_t)b->joined[i] & 0x1fffff;
        size_t at = mb_spm_slot(&m->joined, b->joined[i]);
        if ((left | right) < 128) {
            m->joined_ascii[left][right >> 6] |= (uint64_t)1 << (right & 63);
            continue;
        }
        while (m->joined.slots[at] != MB_SPM_NO_SLOT)
            at = (at + 1) & m->joined.mask;
        m->joined.slots[at] = b->joined[i];
    }
    return 0;
}

static int start_symbols(struct builder *b)
{
    struct mb_spm *m = b->m;
    size_t page_size = (size_t)1 << MB_SPM_PAGE_BITS;

    m->char_pages = mb_calloc(N_PAGES, sizeof(*m->char_pages));
    m->char_symbols = mb_reallocarray(NULL, page_size, sizeof(*m->char_symbols));
    m->symbol_ids = mb_reallocarray(NULL, m->model.n_pieces, sizeof(*m->symbol_ids));
    if (m->char_pages == NULL || m->char_symbols == NULL || m->symbol_ids == NULL)
        return no_memory(b);
    for (size_t i = 0; i < page_size; i++)
        m->char_symbols[i] = MB_SPM_NO_SYMBOL;
    b->n_pages = 1; /* page 0 stays empty */
    m->n_symbols = (uint32_t)m->model.n_pieces;
    for (uint32_t id = 0; id < m->n_symbols; id++)
        m->symbol_ids[id] = (int32_t)id;
    b->powers[0] = 1;
    for (size_t i = 1; i <= MAX_PIECE_BYTES; i++)
        b->powers[i] = b->powers[i - 1] * hash_base;
    return 0;
}

static int build_bpe(struct builder *b)
{
    struct mb_spm *m = b->m;
    int rc = start_symbols(b);

    for (uint32_t id = 0; rc == 0 && id < m->model.n_pieces; id++) {
        const struct mb_spm_piece *piece = &m->model.pieces[id];
        struct mb_spm_span s = b->canon[id];
        if (s.p == NULL)
            continue;
        rc = reserve_for(b, s.n);
        if (rc == 0)
            rc = add_chars(b, s);
        if (rc == 0 && piece->type == MB_SPM_USER_DEFINED &&
            mb_spm_trie_add(&m->user, s.p, s.n, (int32_t)id) != 0)
            rc = no_memory(b);
        if (piece->type == MB_SPM_UNUSED)
            m->has_unused = 1;
    }
    for (uint32_t id = 0; rc == 0 && id < m->model.n_pieces; id++) {
        if (m->model.algorithm != MB_SPM_BPE || b->canon[id].p == NULL ||
            m->model.pieces[id].type == MB_SPM_USER_DEFINED)
            continue;
        rc = reserve_for(b, b->canon[id].n);
        if (rc == 0)
            add_merges(b, id);
    }
    if (rc == 0)
        rc = make_prios(b);
    if (rc == 0)
        rc = make_pair_table(b);
    if (rc == 0)
        rc = make_joined(b);
    if (m->has_unused)
        m->is_in_place = 0;
    return rc;
}

static int build_unigram(struct builder *b)
{
    struct mb_spm *m = b->m;
    float lowest = FLT_MAX;

    m->scores = mb_reallocarray(NULL, m->model.n_pieces, sizeof(*m->scores));
    if (m->scores == NULL)
        return no_memory(b);
    for (uint32_t id = 0; id < m->model.n_pieces; id++) {
        const struct mb_spm_piece *piece = &m->model.pieces[id];
        struct mb_spm_span s = b->canon[id];
        if (piece->type == MB_SPM_NORMAL)
            lowest = piece->score < lowest ? piece->score : lowest;
        /* 0.1 a byte after the first: found by experiment with SentencePiece 0.2.3. */
        m->scores[id] =
            piece->type == MB_SPM_USER_DEFINED ? 0.1f * (float)(piece->text.n - 1) : piece->score;
        if (s.p != NULL && mb_spm_trie_add(&m->vocabulary, s.p, s.n, (int32_t)id) != 0)
            return no_memory(b);
    }
    if (m->vocabulary.slots == NULL)
        return mb_err_set(b->err, MB_ECORRUPT, "no piece to segment with");
    m->unk_score = lowest - 10.0f; /* SentencePiece's penalty for an unknown character */
    m->is_in_place = 0;
    return 0;
}

int mb_spm_build(struct mb_spm *m, struct mb_err *err)
{
    struct builder *b = mb_calloc(1, sizeof(*b));
    int rc;

    if (b == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    b->m = m;
    b->err = err;
    rc = add_pieces(b);
    if (rc == 0)
        rc = setup_normalizer(b);
    if (rc == 0)
        rc = setup_denormalizer(b);
    if (rc == 0)
        rc = make_all_canonical(b);
    if (rc == 0 && m->model.algorithm == MB_SPM_WORD)
        rc = mb_err_set(err, MB_EUNSUPPORTED,
                        "a word model (model_type WORD); BPE, unigram and "
                        "character models are provided");
    else if (rc == 0)
        rc = m->model.algorithm == MB_SPM_UNIGRAM ? build_unigram(b) : build_bpe(b);
    mb_buf_close(&b->texts);
    mb_free(b->canon);
    mb_spm_set_close(&b->canon_set);
    mb_free(b->merges);
    mb_free(b->joined);
    mb_free(b);
    return rc;
}
