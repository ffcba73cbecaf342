/*
 * Loading vocab.json and merges.txt.
 *
 * 1. vocab.json is read front to back; then every entry becomes a symbol (its text mapped back from
 * GPT-2's printable alphabet to bytes) with its id; one that has characters outside that alphabet
 * can only be decoded.
 * 2. Line k of merges.txt after the first gives rank k to a pair and makes the symbol of the joined
 * bytes; of equal pairs the later rank counts, as in a Python dict. The first and the last piece of
 * merges.txt split at newlines are dropped, as Megatron-LM does. 3. Symbols that vocab.json does
 * not list get ids after its last; they are encoded as 0, as Megatron-LM does.
 * A missing file is MB_ENOENT, another form MB_ECORRUPT naming file and line or entry; whatever was
 * made is freed.
 */
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "worker/data/tokenizer/bpe_private.h"
#include "worker/data/tokenizer/json_scan.h"

enum { MAX_FILE_BYTES = 256 << 20, MAX_SYMBOL_BYTES = 4096, ALPHABET = 324, MAX_MERGES = 1 << 24 };

struct text {
    uint32_t start; /* in symbols.text */
    uint32_t length;
    int32_t id; /* -1: not listed */
};

/* All symbols seen while loading, found by their bytes. */
struct symbols {
    struct mb_buf text;
    struct text *items;
    uint32_t n;
    uint32_t cap;
    uint32_t *table; /* symbol + 1; 0: empty */
    uint32_t mask;
};

/* "TOKEN": ID */
struct entry {
    size_t start; /* in keys, with a NUL behind */
    size_t n;
    int64_t id;
};

struct loader {
    struct symbols symbols;
    struct mb_buf keys;
    struct mb_buf entries;         /* struct entry */
    struct mb_bpe_token *specials; /* entries outside the alphabet, or empty; texts are in keys */
    size_t n_specials;
    struct mb_bpe_merge *merges; /* of symbols, until they all have ids */
    size_t n_merges;
    uint8_t *is_used; /* [n_ids] */
    size_t n_ids;
    int32_t eod;
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

static int grow(struct symbols *s)
{
    uint32_t cap = s->cap > 0 ? 2 * s->cap : 65536;
    struct text *items = mb_reallocarray(s->items, cap, sizeof(*items));
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
        uint32_t at = (uint32_t)mb_bpe_hash(p, s->items[i].length) & s->mask;
        while (s->table[at] != 0)
            at = (at + 1) & s->mask;
        s->table[at] = i + 1;
    }
    return 0;
}

static int is_symbol(const struct symbols *s, uint32_t symbol, const uint8_t *p, size_t n)
{
    return symbol < s->n && s->items[symbol].length == n &&
           memcmp(s->text.data + s->items[symbol].start, p, n) == 0;
}

/* The symbol of these bytes, made if it is new. */
static int intern(struct loader *l, const uint8_t *p, size_t n, uint32_t *out)
{
    struct symbols *s = &l->symbols;
    uint32_t at;

    if (s->n == s->cap && grow(s) != 0)
        return no_memory(l);
    for (at = (uint32_t)mb_bpe_hash(p, n) & s->mask; s->table[at] != 0; at = (at + 1) & s->mask) {
        if (is_symbol(s, s->table[at] - 1, p, n)) {
            *out = s->table[at] - 1;
            return 0;
        }
    }
    if (s->n >= MB_BPE_MAX_IDS)
        return mb_err_set(l->err, MB_EUNSUPPORTED, "%s: more than %d symbols", l->vocab_file,
                          MB_BPE_MAX_IDS);
    s->items[s->n] = (struct text){(uint32_t)s->text.len, (uint32_t)n, -1};
    if (mb_buf_add(&s->text, p, n) != 0)
        return no_memory(l);
    *out = s->n;
    s->table[at] = ++s->n;
    return 0;
}

static int add_entry(struct loader *l, const char *key, size_t n, int64_t id)
{
    uint8_t bytes[MAX_SYMBOL_BYTES];
    int length = to_bytes(l, key, n, bytes);
    uint32_t symbol;
    int rc;

    if (id < 0 || (uint64_t)id >= l->n_ids || l->is_used[id])
        return mb_err_set(l->err, MB_ECORRUPT,
                          "%s: entry \"%.40s\": the id must be a number below %zu given once; is "
                          "this the vocab.json of GPT-2?",
                          l->vocab_file, key, l->n_ids);
    l->is_used[id] = 1;
    if (strcmp(key, "<|endoftext|>") == 0)
        l->eod = (int32_t)id;
    if (length <= 0) {
        l->specials[l->n_specials++] =
            (struct mb_bpe_token){(const uint8_t *)key, n, (int32_t)id, 1};
        return 0;
    }
    rc = intern(l, bytes, (size_t)length, &symbol);
    if (rc == 0 && l->symbols.items[symbol].id >= 0)
        return mb_err_set(l->err, MB_ECORRUPT, "%s: entry \"%.40s\" is given twice", l->vocab_file,
                          key);
    if (rc == 0)
        l->symbols.items[symbol].id = (int32_t)id;
    return rc;
}

static int read_entries(struct loader *l, struct mb_json_scan *s)
{
    struct mb_buf key = {0};
    size_t n = 0;
    int rc = mb_json_scan_enter(s, '{');

    while (rc == 0 && (rc = mb_json_scan_member(s, &n, &key)) == 1) {
        struct entry entry = {.start = l->keys.len, .n = key.len};

        rc = mb_json_scan_int(s, &entry.id);
        if (rc == 0 && (mb_buf_add(&l->keys, mb_buf_str(&key), key.len + 1) != 0 ||
                        mb_buf_add(&l->entries, &entry, sizeof(entry)) != 0))
            rc = no_memory(l);
    }
    mb_buf_close(&key);
    return rc == 0 ? mb_json_scan_end(s) : rc;
}

static int add_vocabulary(struct loader *l)
{
    const struct entry *entries = (const void *)l->entries.data;

    l->n_ids = l->entries.len / sizeof(*entries);
    l->is_used = mb_calloc(l->n_ids + 1, 1);
    l->specials = mb_calloc(l->n_ids + 1, sizeof(*l->specials));
    if (l->is_used == NULL || l->specials == NULL)
        return no_memory(l);
    for (size_t i = 0; i < l->n_ids; i++) {
        int rc = add_entry(l, (const char *)l->keys.data + entries[i].start, entries[i].n,
                           entries[i].id);
        if (rc != 0)
            return rc;
    }
    if (l->eod < 0)
        return mb_err_set(l->err, MB_ECORRUPT,
                          "%s has no <|endoftext|>; is this GPT-2's vocab.json?", l->vocab_file);
    return 0;
}

static int load_vocabulary(struct loader *l)
{
    struct mb_buf text = {0};
    struct mb_json_scan s = {.name = l->vocab_file, .err = l->err};
    int rc = mb_fs_read(l->vocab_file, MAX_FILE_BYTES, &text, l->err);

    if (rc != 0) {
        mb_err_wrap(l->err, "--vocab-file");
    } else {
        s.text = s.p = mb_buf_str(&text);
        s.end = s.text + text.len;
        if (mb_json_scan_peek(&s) != '{')
            rc = mb_err_set(l->err, MB_ECORRUPT, "%s: not a JSON object of token: id",
                            l->vocab_file);
        else
            rc = read_entries(l, &s);
    }
    mb_buf_close(&text);
    return rc == 0 ? add_vocabulary(l) : rc;
}

/* Line `rank` of the merges: "LEFT RIGHT". */
static int add_merge(struct loader *l, const char *line, size_t n, uint32_t rank)
{
    uint8_t bytes[2 * MAX_SYMBOL_BYTES];
    const char *space = memchr(line, ' ', n);
    int left = -1;
    int right = -1;
    uint32_t symbols[3];
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
    /* Most often the one after the product before. */
    symbols[2] = l->n_merges > 0 ? (uint32_t)l->merges[l->n_merges - 1].product + 1 : 0;
    if (rc == 0 && !is_symbol(&l->symbols, symbols[2], bytes, (size_t)left + (size_t)right))
        rc = intern(l, bytes, (size_t)left + (size_t)right, &symbols[2]);
    if (rc == 0)
        l->merges[l->n_merges++] = (struct mb_bpe_merge){(int32_t)symbols[0], (int32_t)symbols[1],
                                                         (int32_t)symbols[2], (int32_t)rank};
    return rc;
}

static int add_merges(struct loader *l, const char *text, size_t size)
{
    const char *end = text + size;
    const char *line = memchr(text, '\n', size);
    size_t n_lines = 0;
    int rc = 0;

    for (const char *p = line; p != NULL; p = memchr(p + 1, '\n', (size_t)(end - p) - 1))
        n_lines++;
    if (n_lines < 2 || n_lines >= MAX_MERGES)
        return mb_err_set(
            l->err, MB_ECORRUPT,
            "%s: %zu lines; is this the merges.txt of GPT-2 (a version line, then one "
            "merge a line)?",
            l->merge_file, n_lines);
    l->merges = mb_reallocarray(NULL, n_lines, sizeof(*l->merges));
    if (l->merges == NULL)
        return no_memory(l);
    line++;
    for (uint32_t rank = 0; rc == 0 && rank + 1 < n_lines; rank++) {
        const char *stop = memchr(line, '\n', (size_t)(end - line));
        size_t n = (size_t)(stop - line);

        rc = add_merge(l, line, n > 0 && line[n - 1] == '\r' ? n - 1 : n, rank);
        line = stop + 1;
    }
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

/* Symbols become tokens, those that vocab.json does not list with ids after its last. */
static void make_tokens(struct loader *l, struct mb_bpe_token *tokens)
{
    int32_t next_id = (int32_t)l->n_ids;

    for (uint32_t i = 0; i < l->symbols.n; i++) {
        struct text *item = &l->symbols.items[i];

        if (item->id < 0)
            item->id = next_id++;
        tokens[i] =
            (struct mb_bpe_token){l->symbols.text.data + item->start, item->length, item->id, 0};
    }
    if (l->n_specials > 0)
        memcpy(tokens + l->symbols.n, l->specials, l->n_specials * sizeof(*tokens));
    for (size_t i = 0; i < l->n_merges; i++) {
        struct mb_bpe_merge *m = &l->merges[i];

        m->left = l->symbols.items[m->left].id;
        m->right = l->symbols.items[m->right].id;
        m->product = l->symbols.items[m->product].id;
    }
}

static int make_bpe(struct loader *l, struct mb_bpe **out)
{
    size_t n = l->symbols.n + l->n_specials;
    struct mb_bpe_token *tokens = mb_reallocarray(NULL, n, sizeof(*tokens));
    struct mb_bpe_model model = {.tokens = tokens,
                                 .n_tokens = n,
                                 .merges = l->merges,
                                 .n_merges = l->n_merges,
                                 .vocab_size = l->n_ids,
                                 .eod = l->eod};
    int rc;

    if (tokens == NULL)
        return no_memory(l);
    make_tokens(l, tokens);
    rc = mb_bpe_create(&model, out, l->err);
    if (rc != 0)
        mb_err_wrap(l->err, "%s", l->vocab_file);
    mb_free(tokens);
    return rc;
}

int mb_bpe_load(const char *vocab_file, const char *merge_file, struct mb_bpe **out,
                struct mb_err *err)
{
    struct loader l = {.vocab_file = vocab_file, .merge_file = merge_file, .eod = -1, .err = err};
    int rc;

    make_alphabet(l.byte_of);
    rc = load_vocabulary(&l);
    if (rc == 0)
        rc = load_merges(&l);
    if (rc == 0)
        rc = make_bpe(&l, out);
    mb_buf_close(&l.keys);
    mb_buf_close(&l.entries);
    mb_free(l.specials);
    mb_free(l.is_used);
    mb_free(l.merges);
    mb_buf_close(&l.symbols.text);
    mb_free(l.symbols.items);
    mb_free(l.symbols.table);
    return rc;
}
