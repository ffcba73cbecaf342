/*
 * The model of a tokenizer.json: byte-level BPE.
 *
 * 1. The object is walked once; small members are read. So are vocab and merges if they come in
 * this order behind the type, as they are written; otherwise their places are noted, and they are
 * read at the end.
 * 2. vocab: every token with its id; a token whose characters all stand for bytes (GPT-2's
 *    printable alphabet) is one the text can give, another can only be decoded or added.
 * 3. merges, in both of their forms, "left right" and ["left", "right"]: rank is the place. Left,
 *    right and the joined token must be in vocab, as the peer demands.
 * 4. Each byte that UTF-8 has must be a token: then nothing is ever unknown, and unk_token,
 *    fuse_unk and byte_fallback have no effect.
 */
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/hf_private.h"
#include "worker/data/tokenizer/utf8.h"

enum { ALPHABET = 324, MAX_TOKEN_BYTES = 1 << 16, MAX_MERGES = 1 << 23 };

struct place {
    const char *start;
    size_t n;
};

static int no_memory(struct mb_json_scan *s)
{
    return mb_err_set(s->err, MB_ENOMEM, "%s: out of memory", s->name);
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

/* Appends the bytes that the characters stand for; 0 and nothing if one stands for none. */
static int add_bytes(const int16_t byte_of[ALPHABET], const uint8_t *p, size_t n,
                     struct mb_buf *out)
{
    const uint8_t *end = p + n;
    size_t before = out->len;

    while (p < end) {
        uint32_t c;
        size_t length = mb_utf8_decode(p, end, &c);
        if (length == 0 || c >= ALPHABET || byte_of[c] < 0) {
            out->len = before;
            return 0;
        }
        out->data[out->len++] = (uint8_t)byte_of[c]; /* room was made for all */
        p += length;
    }
    return n > 0;
}

static int add_token(struct mb_json_scan *s, struct mb_hf_vocab *v, size_t *cap, size_t start,
                     int64_t id)
{
    if (id < 0 || id > MB_BPE_MAX_IDS - 256)
        return mb_err_set(s->err, MB_EUNSUPPORTED, "%s: token id %lld is not from 0 to %d", s->name,
                          (long long)id, MB_BPE_MAX_IDS - 256);
    if (v->text.len - start > MAX_TOKEN_BYTES)
        return mb_err_set(s->err, MB_EUNSUPPORTED, "%s: the token of id %lld is longer than %d",
                          s->name, (long long)id, MAX_TOKEN_BYTES);
    if (v->n_tokens == *cap) {
        size_t more = *cap > 0 ? 2 * *cap : 65536;
        struct mb_bpe_token *tokens = mb_reallocarray(v->tokens, more, sizeof(*tokens));
        if (tokens == NULL)
            return no_memory(s);
        v->tokens = tokens;
        *cap = more;
    }
    v->tokens[v->n_tokens++] = (struct mb_bpe_token){.n = v->text.len - start, .id = (int32_t)id};
    if (id > v->max_id)
        v->max_id = (int32_t)id;
    return 0;
}

static int read_tokens(struct mb_json_scan *s, struct mb_hf_vocab *v)
{
    struct mb_buf key = {0};
    size_t n = 0, cap = 0;
    int rc = mb_json_scan_enter(s, '{');

    while (rc == 0 && (rc = mb_json_scan_member(s, &n, &key)) == 1) {
        size_t start = v->text.len;
        int64_t id;
        rc = mb_buf_add(&v->text, mb_buf_str(&key), key.len) != 0 ? no_memory(s)
                                                                  : mb_json_scan_int(s, &id);
        if (rc == 0)
            rc = add_token(s, v, &cap, start, id);
    }
    mb_buf_close(&key);
    if (rc == 0 && v->n_tokens == 0)
        rc = mb_err_set(s->err, MB_ECORRUPT, "%s: model.vocab is empty", s->name);
    return rc;
}

/* Finds the tokens by their texts, then turns the texts to bytes. */
static int index_tokens(struct mb_json_scan *s, struct mb_hf_vocab *v)
{
    int16_t byte_of[ALPHABET];
    size_t at = 0;
    int rc;

    make_alphabet(byte_of);
    for (size_t i = 0; i < v->n_tokens; at += v->tokens[i++].n) {
        v->tokens[i].bytes = v->text.data + at;
        v->tokens[i].is_special = v->tokens[i].n == 0;
    }
    rc = mb_bpe_map_make(&v->map, v->tokens, v->n_tokens, s->err);
    if (rc != 0)
        return mb_err_wrap(s->err, "%s: model.vocab", s->name);
    if (mb_buf_reserve(&v->bytes, v->text.len + 1) != 0)
        return no_memory(s);
    for (size_t i = 0; i < v->n_tokens; i++) {
        struct mb_bpe_token *t = &v->tokens[i];
        size_t start = v->bytes.len;
        t->is_special = !add_bytes(byte_of, t->bytes, t->n, &v->bytes);
        if (t->is_special)
            continue;
        t->bytes = v->bytes.data + start;
        t->n = v->bytes.len - start;
    }
    return 0;
}

static int check_bytes(struct mb_json_scan *s, const struct mb_hf_vocab *v)
{
    uint8_t has[256] = {0};

    for (size_t i = 0; i < v->n_tokens; i++)
        if (v->tokens[i].n == 1 && !v->tokens[i].is_special)
            has[v->tokens[i].bytes[0]] = 1;
    for (unsigned byte = 0; byte < 256; byte++) {
        int in_utf8 = byte != 0xc0 && byte != 0xc1 && byte < 0xf5;
        if (in_utf8 && !has[byte])
            return mb_err_set(s->err, MB_EUNSUPPORTED,
                              "%s: model.vocab has no token for byte 0x%02x; BPE that is not "
                              "byte-level, or has unknown bytes (unk_token, byte_fallback), is not "
                              "provided",
                              s->name, byte);
    }
    return 0;
}

/* Merges that were read and not looked up yet: many at a time, so that the memory of all is on its
 * way at once. */
enum { AT_ONCE = 64 };

struct some_merges {
    struct mb_buf text;
    struct {
        size_t start, cut, n; /* in text */
    } pairs[AT_ONCE];
    size_t n;
    size_t cap; /* of v->merges */
};

static int reserve_merges(struct mb_json_scan *s, struct mb_hf_vocab *v, struct some_merges *some)
{
    size_t more = some->cap > 0 ? 2 * some->cap : 65536;
    struct mb_bpe_merge *merges;

    if (some->cap - v->n_merges >= some->n)
        return 0;
    if (more > MAX_MERGES)
        return mb_err_set(s->err, MB_EUNSUPPORTED, "%s: more than %d merges", s->name, MAX_MERGES);
    merges = mb_reallocarray(v->merges, more, sizeof(*merges));
    if (merges == NULL)
        return no_memory(s);
    v->merges = merges;
    some->cap = more;
    return 0;
}

/* After a look; -1: no token. */
static int32_t found(const struct mb_bpe_map *map, struct mb_bpe_map_probe *probe,
                     enum mb_bpe_map_seen seen)
{
    int32_t id = -1;

    while (seen == MB_BPE_MAP_MAYBE && (id = mb_bpe_map_compare(map, probe)) < 0)
        seen = mb_bpe_map_look(map, probe);
    return id;
}

static int is_token(const struct mb_bpe_map *map, int32_t id, const uint8_t *text, size_t n)
{
    return (uint32_t)id < map->n_ids && map->starts[id] != UINT32_MAX && map->lengths[id] == n &&
           memcmp(map->text.data + map->starts[id], text, n) == 0;
}

static int add_merges(struct mb_json_scan *s, struct mb_hf_vocab *v, struct some_merges *some)
{
    struct mb_bpe_map_probe probes[AT_ONCE][2];
    enum mb_bpe_map_seen seen[AT_ONCE][2] = {{MB_BPE_MAP_NONE}};
    const uint8_t *text = some->text.data;
    int rc = reserve_merges(s, v, some);

    for (size_t i = 0; i < some->n; i++) {
        size_t start = some->pairs[i].start, cut = some->pairs[i].cut, n = some->pairs[i].n;

        if (cut > 0)
            mb_bpe_map_ask(&v->map, text + start, cut, &probes[i][0]);
        if (cut < n)
            mb_bpe_map_ask(&v->map, text + start + cut, n - cut, &probes[i][1]);
    }
    for (size_t i = 0; i < some->n; i++) {
        if (some->pairs[i].cut > 0)
            seen[i][0] = mb_bpe_map_look(&v->map, &probes[i][0]);
        if (some->pairs[i].cut < some->pairs[i].n)
            seen[i][1] = mb_bpe_map_look(&v->map, &probes[i][1]);
    }
    for (size_t i = 0; rc == 0 && i < some->n; i++) {
        const uint8_t *pair = text + some->pairs[i].start;
        size_t cut = some->pairs[i].cut, n = some->pairs[i].n;
        struct mb_bpe_merge m = {
            .left = found(&v->map, &probes[i][0], seen[i][0]),
            .right = found(&v->map, &probes[i][1], seen[i][1]),
            /* Most often the one after the product before. */
            .product = v->n_merges > 0 ? v->merges[v->n_merges - 1].product + 1 : 0,
            .rank = (int32_t)v->n_merges,
        };

        if (!is_token(&v->map, m.product, pair, n))
            m.product = mb_bpe_map_find(&v->map, pair, n);
        if (m.left < 0 || m.right < 0 || m.product < 0)
            rc = mb_err_set(s->err, MB_ECORRUPT,
                            "%s: model.merges, entry %zu: \"%.*s\" joins at %zu what is not in "
                            "model.vocab",
                            s->name, v->n_merges, n < 40 ? (int)n : 40, (const char *)pair, cut);
        else
            v->merges[v->n_merges++] = m;
    }
    some->n = 0;
    mb_buf_reset(&some->text);
    return rc;
}

/* "left right", with exactly one space. */
static int joined_merge(struct mb_json_scan *s, struct mb_buf *pair, size_t *cut)
{
    int rc = mb_json_scan_string(s, pair);
    uint8_t *space = rc == 0 ? memchr(pair->data, ' ', pair->len) : NULL;

    if (rc != 0)
        return rc;
    if (space == NULL || memchr(space + 1, ' ', pair->len - (size_t)(space + 1 - pair->data)))
        return mb_json_scan_fail(s, "a merge of two tokens with one space between");
    *cut = (size_t)(space - pair->data);
    memmove(space, space + 1, pair->len - *cut); /* with the NUL behind it */
    pair->len--;
    return 0;
}

static int paired_merge(struct mb_json_scan *s, struct mb_buf *pair, size_t *cut)
{
    size_t n = 0;
    int rc = mb_json_scan_enter(s, '[');

    while (rc == 0 && (rc = mb_json_scan_item(s, &n)) == 1) {
        *cut = n == 2 ? pair->len : 0;
        rc = n <= 2 ? mb_json_scan_string(s, pair) : mb_json_scan_fail(s, "a merge of two tokens");
    }
    return rc == 0 && n != 2 ? mb_json_scan_fail(s, "a merge of two tokens") : rc;
}

static int read_merges(struct mb_json_scan *s, struct mb_hf_vocab *v)
{
    struct some_merges *some = mb_calloc(1, sizeof(*some));
    struct mb_buf pair = {0};
    size_t n = 0, cut = 0;
    int rc = mb_json_scan_enter(s, '[');

    if (some == NULL || mb_buf_reserve(&pair, 1) != 0)
        rc = no_memory(s);
    while (rc == 0 && (rc = mb_json_scan_item(s, &n)) == 1) {
        mb_buf_reset(&pair);
        rc = mb_json_scan_peek(s) == '"' ? joined_merge(s, &pair, &cut)
                                         : paired_merge(s, &pair, &cut);
        if (rc != 0)
            break;
        some->pairs[some->n].start = some->text.len;
        some->pairs[some->n].cut = cut;
        some->pairs[some->n++].n = pair.len;
        if (mb_buf_add(&some->text, pair.data, pair.len) != 0)
            rc = no_memory(s);
        else if (some->n == AT_ONCE)
            rc = add_merges(s, v, some);
    }
    if (rc == 0 && some->n > 0)
        rc = add_merges(s, v, some);
    mb_buf_close(&pair);
    if (some != NULL)
        mb_buf_close(&some->text);
    mb_free(some);
    return rc;
}

static int refuse(struct mb_json_scan *s, const char *what)
{
    return mb_err_set(s->err, MB_EUNSUPPORTED, "%s: model: %s is not provided", s->name, what);
}

/* The members of the model but vocab and merges, as a tree. */
static int check_members(struct mb_json_scan *s, const json_t *m, struct mb_hf_vocab *v)
{
    const json_t *type = json_object_get(m, "type"), *dropout = json_object_get(m, "dropout");
    char text[128];

    if (type != NULL && (!json_is_string(type) || strcmp(json_string_value(type), "BPE") != 0)) {
        snprintf(text, sizeof(text), "type %.60s",
                 json_is_string(type) ? json_string_value(type) : "of another kind");
        return refuse(s, text);
    }
    if (json_is_number(dropout) && json_number_value(dropout) != 0)
        return refuse(s, "dropout");
    if (json_string_length(json_object_get(m, "continuing_subword_prefix")) > 0)
        return refuse(s, "continuing_subword_prefix");
    if (json_string_length(json_object_get(m, "end_of_word_suffix")) > 0)
        return refuse(s, "end_of_word_suffix");
    v->ignore_merges = json_is_true(json_object_get(m, "ignore_merges"));
    return 0;
}

static int add_member(struct mb_json_scan *s, json_t *members, const struct mb_buf *key,
                      const struct place *value)
{
    json_error_t problem;
    json_t *tree = json_loadb(value->start, value->n, JSON_DECODE_ANY, &problem);

    if (tree == NULL)
        return mb_err_set(s->err, MB_ECORRUPT, "%s: %.40s: %s", s->name, mb_buf_str(key),
                          problem.text);
    return json_object_set_new(members, mb_buf_str(key), tree) == 0 ? 0 : no_memory(s);
}

static int read_vocab(struct mb_json_scan *s, struct mb_hf_vocab *v)
{
    int rc = read_tokens(s, v);

    if (rc == 0)
        rc = index_tokens(s, v);
    return rc == 0 ? check_bytes(s, v) : rc;
}

/* The two large members: whether they were read, or else where they are. */
struct large {
    struct place vocab, merges;
    int has_vocab, has_merges;
};

static int is_bpe(const json_t *members)
{
    const char *type = json_string_value(json_object_get(members, "type"));

    return type != NULL && strcmp(type, "BPE") == 0;
}

static int read_member(struct mb_json_scan *s, json_t *members, struct large *large,
                       const struct mb_buf *key, struct mb_hf_vocab *v)
{
    int is_vocab = strcmp(mb_buf_str(key), "vocab") == 0;
    int is_merges = strcmp(mb_buf_str(key), "merges") == 0;
    struct place value;
    int rc;

    if ((is_vocab && large->has_vocab) || (is_merges && large->has_merges))
        return mb_json_scan_fail(s, "one vocab and one list of merges");
    if (is_vocab && is_bpe(members)) {
        large->has_vocab = 1;
        rc = check_members(s, members, v); /* tokens of another kind of model would seem damaged */
        return rc == 0 ? read_vocab(s, v) : rc;
    }
    if (is_merges && large->has_vocab) {
        large->has_merges = 1;
        rc = check_members(s, members, v);
        return rc == 0 ? read_merges(s, v) : rc;
    }
    rc = mb_json_scan_value(s, &value.start, &value.n);
    if (rc == 0 && is_vocab)
        large->vocab = value;
    else if (rc == 0 && is_merges)
        large->merges = value;
    else if (rc == 0)
        rc = add_member(s, members, key, &value);
    return rc;
}

static int read_members(struct mb_json_scan *s, json_t *members, struct large *large,
                        struct mb_hf_vocab *v)
{
    struct mb_buf key = {0};
    size_t n = 0;
    int rc = mb_json_scan_enter(s, '{');

    while (rc == 0 && (rc = mb_json_scan_member(s, &n, &key)) == 1)
        rc = read_member(s, members, large, &key, v);
    mb_buf_close(&key);
    return rc;
}

int mb_hf_vocab_read(struct mb_json_scan *s, struct mb_hf_vocab *v)
{
    struct large large = {0};
    struct mb_json_scan part = *s;
    json_t *members = json_object();
    int rc;

    v->max_id = -1;
    rc = members != NULL ? read_members(s, members, &large, v) : no_memory(s);
    if (rc == 0)
        rc = check_members(s, members, v);
    json_decref(members);
    if (rc == 0 &&
        ((!large.has_vocab && large.vocab.n == 0) || (!large.has_merges && large.merges.n == 0)))
        rc = mb_err_set(s->err, MB_ECORRUPT, "%s: model has no vocab or no merges", s->name);
    if (rc == 0 && !large.has_vocab) {
        part.p = large.vocab.start;
        rc = read_vocab(&part, v);
    }
    if (rc == 0 && !large.has_merges) {
        part.p = large.merges.start;
        rc = read_merges(&part, v);
    }
    return rc;
}

void mb_hf_vocab_close(struct mb_hf_vocab *v)
{
    mb_bpe_map_close(&v->map);
    mb_buf_close(&v->text);
    mb_buf_close(&v->bytes);
    mb_free(v->tokens);
    mb_free(v->merges);
}
