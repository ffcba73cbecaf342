/*
 * Loading vocab.json and merges.txt.
 *
 * 1. The 256 bytes are symbols 0 to 255. 2. Every vocab.json entry becomes a symbol (its text
 * mapped back from GPT-2's printable alphabet to bytes) with its id; one that has characters
 * outside that alphabet can only be decoded. 3. Line k of merges.txt after the first gives rank k
 * to a pair and makes the symbol of the joined bytes; of equal pairs the later rank counts, as in a
 * Python dict. The first and the last piece of merges.txt split at newlines are dropped, as
 * Megatron-LM does. A missing file is MB_ENOENT, another form MB_ECORRUPT naming file and line or
 * entry; whatever was made is freed.
 */
#include <jansson.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "worker/data/tokenizer/bpe_private.h"

enum { MAX_FILE_BYTES = 256 << 20, MAX_SYMBOL_BYTES = 4096, ALPHABET = 324 };

/* All symbols seen while loading, found by their bytes. */
struct symbols {
    struct mb_buf text;
    struct mb_bpe_text *items;
    uint32_t n;
    uint32_t cap;
    uint32_t *table; /* symbol + 1; 0: empty */
    uint32_t mask;
};

struct loader {
    struct mb_bpe *b;
    struct symbols symbols;
    int16_t byte_of[ALPHABET]; /* code point of the printable alphabet -> byte; -1: none */
    const char *vocab_file;
    const char *merge_file;
    struct mb_err *err;
};

static int no_memory(struct loader *l)
{
    return mb_err_set(l->err, MB_ENOMEM, "loading %s: out of memory", l->vocab_file);
}

/* GPT-2 shows printable Latin-1 bytes as themselves and numbers the others from U+0100 on. */
static void make_alphabet(int16_t byte_of[ALPHABET])
{
    int16_t shifted = 256;

    memset(byte_of, 0xff, ALPHABET * sizeof(*byte_of));
    for (int16_t byte = 0; byte < 256; byte++) {
        int printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
        byte_of[printable ? byte : shifted++] = byte;
    }
}

/* Bytes of a text in the alphabet; the length, or -1 if a character is outside it or it is too
 * long. */
static int to_bytes(const struct loader *l, const char *s, size_t n, uint8_t *out)
{
    int length = 0;

    for (size_t i = 0; i < n;) {
        uint32_t c = (uint8_t)s[i++];
        if (c >= 0xc0 && c < 0xe0 && i < n)
            c = (c & 0x1f) << 6 | ((uint8_t)s[i++] & 0x3f);
        else if (c >= 0x80)
            return -1;
        if (c >= ALPHABET || l->byte_of[c] < 0 || length == MAX_SYMBOL_BYTES)
            return -1;
        out[length++] = (uint8_t)l->byte_of[c];
    }
    return length;
}

static uint32_t hash_bytes(const uint8_t *p, size_t n)
{
    uint64_t h = 0xcbf29ce484222325u;

    for (size_t i = 0; i < n; i++)
        h = (h ^ p[i]) * 0x100000001b3u;
    return (uint32_t)(h ^ h >> 32);
}

static int grow(struct symbols *s)
{
    uint32_t cap = s->cap > 0 ? 2 * s->cap : 65536;
    struct mb_bpe_text *items = mb_reallocarray(s->items, cap, sizeof(*items));
    uint32_t *table = mb_calloc(2 * (size_t)cap, sizeof(*table));

    if (items != NULL)
        s->items = items;
    if (items == NULL || table == NULL) {
        mb_free(table);
        return MB_ENOMEM;
    }
    mb_free(s->table);
    s->table = table;
    s->cap = cap;
    s->mask = 2 * cap - 1;
    for (uint32_t i = 0; i < s->n; i++) {
        const uint8_t *p = s->text.data + s->items[i].start;
        uint32_t at = hash_bytes(p, s->items[i].length) & s->mask;
        while (s->table[at] != 0)
            at = (at + 1) & s->mask;
        s->table[at] = i + 1;
    }
    return 0;
}

/* The symbol of these bytes, made if it is new. */
static int intern(struct loader *l, const uint8_t *p, size_t n, uint32_t *out)
{
    struct symbols *s = &l->symbols;
    uint32_t at;

    if (s->n == s->cap && grow(s) != 0)
        return no_memory(l);
    for (at = hash_bytes(p, n) & s->mask; s->table[at] != 0; at = (at + 1) & s->mask) {
        const struct mb_bpe_text *item = &s->items[s->table[at] - 1];
        if (item->length == n && memcmp(s->text.data + item->start, p, n) == 0) {
            *out = s->table[at] - 1;
            return 0;
        }
    }
    if (s->n >= MB_BPE_MAX_SYMBOLS)
        return mb_err_set(l->err, MB_EUNSUPPORTED, "%s: more than %u symbols", l->vocab_file,
                          MB_BPE_MAX_SYMBOLS);
    s->items[s->n] = (struct mb_bpe_text){(uint32_t)s->text.len, (uint32_t)n};
    if (mb_buf_add(&s->text, p, n) != 0)
        return no_memory(l);
    *out = s->n;
    s->table[at] = ++s->n;
    return 0;
}

static int intern_bytes(struct loader *l)
{
    for (unsigned i = 0; i < 256; i++) {
        uint8_t byte = (uint8_t)i;
        int rc = intern(l, &byte, 1, &l->b->byte_symbols[i]);
        if (rc != 0)
            return rc;
    }
    return 0;
}

static int add_entry(struct loader *l, const char *key, const json_t *value, int32_t *ids)
{
    struct mb_bpe *b = l->b;
    uint8_t bytes[MAX_SYMBOL_BYTES];
    json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
    int length = to_bytes(l, key, strlen(key), bytes);
    uint32_t symbol;
    int rc;

    if (id < 0 || (uint64_t)id >= b->vocab_size || b->id_text[id].start != UINT32_MAX)
        return mb_err_set(l->err, MB_ECORRUPT,
                          "%s: entry \"%.40s\": the id must be a number below %llu given once; is "
                          "this the vocab.json of GPT-2?",
                          l->vocab_file, key, (unsigned long long)b->vocab_size);
    b->id_text[id] = (struct mb_bpe_text){(uint32_t)b->text.len,
                                          (uint32_t)(length >= 0 ? (size_t)length : strlen(key))};
    if (mb_buf_add(&b->text, length >= 0 ? (const void *)bytes : key, b->id_text[id].length) != 0)
        return no_memory(l);
    if (strcmp(key, "<|endoftext|>") == 0)
        b->eod = (int32_t)id;
    if (length <= 0)
        return 0;
    rc = intern(l, bytes, (size_t)length, &symbol);
    if (rc == 0)
        ids[symbol] = (int32_t)id;
    return rc;
}

static int add_vocabulary(struct loader *l, json_t *root, int32_t **ids_out)
{
    struct mb_bpe *b = l->b;
    int32_t *ids;
    const char *key;
    json_t *value;

    if (!json_is_object(root) || json_object_size(root) == 0)
        return mb_err_set(l->err, MB_ECORRUPT, "%s: not a JSON object of token: id", l->vocab_file);
    b->vocab_size = json_object_size(root);
    b->id_text = mb_reallocarray(NULL, (size_t)b->vocab_size, sizeof(*b->id_text));
    ids = mb_calloc(256 + (size_t)b->vocab_size, sizeof(*ids));
    *ids_out = ids;
    if (b->id_text == NULL || ids == NULL)
        return no_memory(l);
    memset(b->id_text, 0xff, (size_t)b->vocab_size * sizeof(*b->id_text));
    json_object_foreach(root, key, value)
    {
        int rc = add_entry(l, key, value, ids);
        if (rc != 0)
            return rc;
    }
    if (b->eod < 0)
        return mb_err_set(l->err, MB_ECORRUPT,
                          "%s has no <|endoftext|>; is this GPT-2's vocab.json?", l->vocab_file);
    return 0;
}

static int load_vocabulary(struct loader *l, int32_t **ids_out)
{
    struct mb_buf text = {0};
    json_error_t problem;
    json_t *root = NULL;
    int rc = mb_fs_read(l->vocab_file, MAX_FILE_BYTES, &text, l->err);

    if (rc != 0) {
        mb_err_wrap(l->err, "--vocab-file");
        goto out;
    }
    root = json_loadb((const char *)text.data, text.len, 0, &problem);
    if (root == NULL) {
        rc =
            mb_err_set(l->err, MB_ECORRUPT, "%s:%d: %s", l->vocab_file, problem.line, problem.text);
        goto out;
    }
    rc = add_vocabulary(l, root, ids_out);
out:
    json_decref(root);
    mb_buf_close(&text);
    return rc;
}

/* Line `rank` of the merges: "LEFT RIGHT". */
static int add_merge(struct loader *l, const char *line, size_t n, uint32_t rank, uint64_t *merges)
{
    uint8_t bytes[2 * MAX_SYMBOL_BYTES];
    const char *space = memchr(line, ' ', n);
    int left = -1;
    int right = -1;
    uint32_t symbols[2];
    int rc;

    if (space != NULL) {
        left = to_bytes(l, line, (size_t)(space - line), bytes);
        if (left > 0)
            right = to_bytes(l, space + 1, n - (size_t)(space - line) - 1, bytes + left);
    }
    if (right <= 0)
        return mb_err_set(
            l->err, MB_ECORRUPT,
            "%s:%u: not two pieces of the GPT-2 alphabet separated by a space; is this "
            "the merges.txt of GPT-2?",
            l->merge_file, rank + 2);
    rc = intern(l, bytes, (size_t)left, &symbols[0]);
    if (rc == 0)
        rc = intern(l, bytes + left, (size_t)right, &symbols[1]);
    if (rc == 0)
        rc = intern(l, bytes, (size_t)left + (size_t)right, &l->b->products[rank]);
    if (rc == 0)
        merges[rank] = mb_bpe_pair(symbols[0], symbols[1]);
    return rc;
}

static int make_pair_table(struct loader *l, const uint64_t *merges, uint32_t n)
{
    struct mb_bpe *b = l->b;
    unsigned bits = 4;

    while ((1u << bits) < 2 * n + 2)
        bits++;
    b->pairs = mb_reallocarray(NULL, (size_t)1 << bits, sizeof(*b->pairs));
    if (b->pairs == NULL)
        return no_memory(l);
    memset(b->pairs, 0xff, sizeof(*b->pairs) << bits);
    b->pair_mask = ((size_t)1 << bits) - 1;
    b->pair_shift = 64 - bits;
    for (uint32_t rank = 0; rank < n; rank++) {
        size_t at = mb_bpe_slot(b, merges[rank]);
        while (b->pairs[at] != MB_BPE_NO_ENTRY && b->pairs[at] >> MB_BPE_RANK_BITS != merges[rank])
            at = (at + 1) & b->pair_mask;
        b->pairs[at] = merges[rank] << MB_BPE_RANK_BITS | rank;
    }
    return 0;
}

static int add_merges(struct loader *l, const char *text, size_t size)
{
    const char *end = text + size;
    const char *line = memchr(text, '\n', size);
    const char *stop;
    uint64_t *merges = NULL;
    size_t n_lines = 0;
    uint32_t rank = 0;
    int rc = 0;

    for (const char *p = line; p != NULL; p = memchr(p + 1, '\n', (size_t)(end - p) - 1))
        n_lines++;
    if (n_lines < 2 || n_lines >= MB_BPE_MAX_RANKS)
        return mb_err_set(
            l->err, MB_ECORRUPT,
            "%s: %zu lines; is this the merges.txt of GPT-2 (a version line, then one "
            "merge a line)?",
            l->merge_file, n_lines);
    l->b->products = mb_reallocarray(NULL, n_lines, sizeof(*l->b->products));
    merges = mb_reallocarray(NULL, n_lines, sizeof(*merges));
    if (l->b->products == NULL || merges == NULL)
        rc = no_memory(l);
    for (line++; rc == 0 && rank + 1 < n_lines; line = stop + 1, rank++) {
        stop = memchr(line, '\n', (size_t)(end - line));
        size_t n = (size_t)(stop - line);
        rc = add_merge(l, line, n > 0 && line[n - 1] == '\r' ? n - 1 : n, rank, merges);
    }
    if (rc == 0)
        rc = make_pair_table(l, merges, rank);
    mb_free(merges);
    return rc;
}

static int load_merges(struct loader *l)
{
    struct mb_buf text = {0};
    int rc = mb_fs_read(l->merge_file, MAX_FILE_BYTES, &text, l->err);

    if (rc != 0)
        mb_err_wrap(l->err, "--merge-file");
    else
        rc = add_merges(l, mb_buf_str(&text), text.len);
    mb_buf_close(&text);
    return rc;
}

int mb_bpe_load(const char *vocab_file, const char *merge_file, struct mb_bpe **out,
                struct mb_err *err)
{
    struct loader l = {.vocab_file = vocab_file, .merge_file = merge_file, .err = err};
    int32_t *ids = NULL; /* by symbol, for those that vocab.json lists */
    uint32_t n_listed = 0;
    int rc;

    l.b = mb_calloc(1, sizeof(*l.b));
    if (l.b == NULL)
        return no_memory(&l);
    l.b->eod = -1;
    make_alphabet(l.byte_of);
    rc = intern_bytes(&l);
    if (rc == 0)
        rc = load_vocabulary(&l, &ids);
    n_listed = l.symbols.n;
    if (rc == 0)
        rc = load_merges(&l);
    if (rc == 0) {
        l.b->symbol_ids = mb_calloc(l.symbols.n, sizeof(*l.b->symbol_ids));
        if (l.b->symbol_ids == NULL)
            rc = no_memory(&l);
        else
            memcpy(l.b->symbol_ids, ids, n_listed * sizeof(*ids));
    }
    if (rc == 0)
        *out = l.b;
    else
        mb_bpe_destroy(l.b);
    mb_free(ids);
    mb_buf_close(&l.symbols.text);
    mb_free(l.symbols.items);
    mb_free(l.symbols.table);
    return rc;
}

void mb_bpe_destroy(struct mb_bpe *b)
{
    if (b == NULL)
        return;
    mb_free(b->pairs);
    mb_free(b->products);
    mb_free(b->symbol_ids);
    mb_free(b->id_text);
    mb_buf_close(&b->text);
    mb_free(b);
}
