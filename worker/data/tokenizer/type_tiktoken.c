/*
 * TikTokenizer: ranks of byte strings, in one of two files.
 *
 *   [{"rank", "token_bytes", "token_str"}, ...]   Megatron-LM's own (tiktoken_tokenizer.py):
 * special tokens have the first ids (1000 of them, named ones first), then come the ranks, cut so
 * that the whole has --vocab-size ids (131072); eod is </s>; the pattern is v1 or v2 (v2) BASE64
 * RANK in each line                      tiktoken's: the id is the rank, the tokens of
 *       --tiktoken-special-tokens follow the highest one; eod is the first of them; the pattern is
 *       one of split.h by its name, and must be given
 *
 * Special tokens are found in the text, as encode(allowed_special="all") does it. A piece that is a
 * token is that token; else the pair whose union has the lowest rank is joined first.
 */
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "worker/data/tokenizer/added_tokens.h"
#include "worker/data/tokenizer/bytelevel.h"
#include "worker/data/tokenizer/json_scan.h"
#include "worker/data/tokenizer/type.h"

enum { MAX_FILE_BYTES = 256 << 20, DEFAULT_SPECIAL = 1000, DEFAULT_VOCAB = 1 << 17 };

struct tiktoken {
    struct mb_bytelevel *engine;
    struct mb_added_tokens *finder;
    struct mb_added_token *special; /* texts owned by names */
    size_t n_special;
    struct mb_buf names;
    uint64_t vocab_size;
    int32_t eod, bos;
};

struct ranks {
    struct mb_buf bytes;
    struct mb_bpe_token *tokens; /* bytes as offsets until all are there */
    size_t n;
    size_t cap;
    int32_t max;
};

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
}

static void destroy(void *self)
{
    struct tiktoken *t = self;

    if (t == NULL)
        return;
    mb_bytelevel_destroy(t->engine);
    mb_added_tokens_destroy(t->finder);
    mb_free(t->special);
    mb_buf_close(&t->names);
    mb_free(t);
}

/* ---- reading ---- */

static int digit64(char c)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char *at = c != 0 ? strchr(digits, c) : NULL;

    return at != NULL ? (int)(at - digits) : -1;
}

/* Appends the bytes of n characters of base64; 1: they are none. */
static int add_base64(const char *text, size_t n, struct mb_buf *out)
{
    uint32_t bits = 0;
    int have = 0;

    while (n > 0 && text[n - 1] == '=')
        n--;
    if (n == 0 || n % 4 == 1)
        return 1;
    for (size_t i = 0; i < n; i++) {
        int digit = digit64(text[i]);
        if (digit < 0)
            return 1;
        bits = bits << 6 | (uint32_t)digit;
        have += 6;
        if (have >= 8) {
            have -= 8;
            if (mb_buf_add(out, &(uint8_t){(uint8_t)(bits >> have)}, 1) != 0)
                return MB_ENOMEM;
        }
    }
    return 0;
}

/* A token whose bytes stand at the end of r->bytes, from start on. */
static int add_rank(struct ranks *r, size_t start, int64_t rank, const char *file,
                    struct mb_err *err)
{
    if (rank < 0 || rank > MB_BPE_MAX_IDS - 256)
        return mb_err_set(err, MB_EUNSUPPORTED, "%s: rank %lld is not from 0 to %d", file,
                          (long long)rank, MB_BPE_MAX_IDS - 256);
    if (r->n == r->cap) {
        size_t cap = r->cap > 0 ? 2 * r->cap : 65536;
        struct mb_bpe_token *tokens = mb_reallocarray(r->tokens, cap, sizeof(*tokens));
        if (tokens == NULL)
            return no_memory(err);
        r->tokens = tokens;
        r->cap = cap;
    }
    r->tokens[r->n++] = (struct mb_bpe_token){.n = r->bytes.len - start, .id = (int32_t)rank};
    r->max = rank > r->max ? (int32_t)rank : r->max;
    return 0;
}

static int read_lines(struct ranks *r, const char *text, size_t n, const char *file,
                      struct mb_err *err)
{
    const char *end = text + n;
    size_t line = 0;

    while (text < end) {
        const char *stop = memchr(text, '\n', (size_t)(end - text));
        const char *next = stop != NULL ? stop + 1 : end;
        const char *space = memchr(text, ' ', (size_t)(next - text));
        size_t start = r->bytes.len;
        long rank = -1;
        int rc = 1;

        line++;
        if (next - text > 1 || *text != '\n') {
            if (space != NULL && sscanf(space, " %9ld", &rank) == 1)
                rc = add_base64(text, (size_t)(space - text), &r->bytes);
            if (rc == 1)
                return mb_err_set(err, MB_ECORRUPT, "%s:%zu: expected BASE64 RANK", file, line);
            rc = rc == 0 ? add_rank(r, start, rank, file, err) : no_memory(err);
            if (rc != 0)
                return rc;
        }
        text = next;
    }
    return 0;
}

static int read_entry(struct mb_json_scan *s, struct ranks *r, struct mb_buf *key,
                      struct mb_buf *value)
{
    size_t n = 0, start = r->bytes.len;
    int64_t rank = -1;
    int rc = mb_json_scan_enter(s, '{');

    while (rc == 0 && (rc = mb_json_scan_member(s, &n, key)) == 1) {
        mb_buf_reset(value);
        if (strcmp(mb_buf_str(key), "rank") == 0) {
            rc = mb_json_scan_int(s, &rank);
        } else if (strcmp(mb_buf_str(key), "token_bytes") == 0) {
            rc = mb_json_scan_string(s, value);
            if (rc == 0 && add_base64(mb_buf_str(value), value->len, &r->bytes) != 0)
                rc = mb_json_scan_fail(s, "token_bytes in base64");
        } else {
            rc = mb_json_scan_value(s, NULL, NULL);
        }
    }
    if (rc == 0 && (rank != (int64_t)r->n || r->bytes.len == start))
        rc = mb_json_scan_fail(s, "ranks that count from 0, each with token_bytes");
    return rc == 0 ? add_rank(r, start, rank, s->name, s->err) : rc;
}

static int read_array(struct mb_json_scan *s, struct ranks *r)
{
    struct mb_buf key = {0}, value = {0};
    size_t n = 0;
    int rc = mb_json_scan_enter(s, '[');

    while (rc == 0 && (rc = mb_json_scan_item(s, &n)) == 1)
        rc = read_entry(s, r, &key, &value);
    if (rc == 0)
        rc = mb_json_scan_end(s);
    mb_buf_close(&key);
    mb_buf_close(&value);
    return rc;
}

static int read_ranks(const char *file, struct ranks *r, int *is_json, struct mb_err *err)
{
    struct mb_buf text = {0};
    struct mb_json_scan s = {.name = file, .err = err};
    size_t at = 0;
    int rc = mb_fs_read(file, MAX_FILE_BYTES, &text, err);

    r->max = -1;
    if (rc != 0) {
        mb_buf_close(&text);
        return mb_err_wrap(err, "--tokenizer-model");
    }
    s.text = s.p = mb_buf_str(&text);
    s.end = s.text + text.len;
    *is_json = mb_json_scan_peek(&s) == '[';
    rc = *is_json ? read_array(&s, r) : read_lines(r, s.text, text.len, file, err);
    mb_buf_close(&text);
    if (rc == 0 && r->n == 0)
        rc = mb_err_set(err, MB_ECORRUPT, "%s has no tokens", file);
    for (size_t i = 0; rc == 0 && i < r->n; at += r->tokens[i++].n)
        r->tokens[i].bytes = r->bytes.data + at;
    return rc;
}

/* ---- special tokens ---- */

static int add_special(struct tiktoken *t, const char *text, int32_t id, struct mb_err *err)
{
    t->special[t->n_special++] = (struct mb_added_token){.n = strlen(text), .id = id, .special = 1};
    return mb_buf_puts(&t->names, text) == 0 ? 0 : no_memory(err);
}

/* Megatron-LM's: the named ones, then <SPECIAL_k>; n ids in all. */
static int megatron_special(struct tiktoken *t, const struct mb_tokenizer_options *o, size_t n,
                            struct mb_err *err)
{
    static const char *const usual[] = {"<unk>", "<s>",   "</s>", "<mask>",
                                        "<pad>", "<cls>", "<sep>"};
    const char *const *named =
        o->tiktoken_special_tokens != NULL ? o->tiktoken_special_tokens : usual;
    size_t n_named = o->tiktoken_special_tokens != NULL ? o->n_tiktoken_special_tokens
                                                        : sizeof(usual) / sizeof(*usual);
    int rc = 0;

    for (size_t k = 0; k < sizeof(usual) / sizeof(*usual); k++) {
        size_t i = 0;
        while (i < n_named && strcmp(named[i], usual[k]) != 0)
            i++;
        if (i == n_named || n_named > n)
            return mb_err_set(err, MB_EINVAL,
                              "--tiktoken-special-tokens must have %s and be at most %zu", usual[k],
                              n);
        t->bos = k == 1 ? (int32_t)i : t->bos;
        t->eod = k == 2 ? (int32_t)i : t->eod;
    }
    for (size_t i = 0; rc == 0 && i < n; i++) {
        char filler[32];
        snprintf(filler, sizeof(filler), "<SPECIAL_%zu>", i);
        rc = add_special(t, i < n_named ? named[i] : filler, (int32_t)i, err);
    }
    return rc;
}

static int make_special(struct tiktoken *t, const struct mb_tokenizer_options *o, int is_json,
                        size_t n, int32_t max, struct mb_err *err)
{
    size_t at = 0;
    int rc = 0;

    t->bos = t->eod = -1;
    t->special = mb_calloc(n + 1, sizeof(*t->special));
    if (t->special == NULL)
        return no_memory(err);
    if (is_json)
        rc = megatron_special(t, o, n, err);
    for (size_t i = 0; rc == 0 && !is_json && i < n; i++) {
        rc = add_special(t, o->tiktoken_special_tokens[i], max + 1 + (int32_t)i, err);
        t->eod = max + 1;
    }
    for (size_t i = 0; i < t->n_special; at += t->special[i++].n)
        t->special[i].text = mb_buf_str(&t->names) + at;
    return rc == 0 ? mb_added_tokens_create(t->special, t->n_special, &t->finder, err) : rc;
}

/* ---- the whole ---- */

static int find_pattern(const struct mb_tokenizer_options *o, int is_json,
                        enum mb_split_family *out, struct mb_err *err)
{
    const char *name = o->tiktoken_pattern != NULL ? o->tiktoken_pattern : is_json ? "v2" : "";

    *out = strcmp(name, "v1") == 0 ? MB_SPLIT_TIKTOKEN_V1 : MB_SPLIT_TIKTOKEN_V2;
    if (strcmp(name, "v1") == 0 || strcmp(name, "v2") == 0)
        return 0;
    for (int family = MB_SPLIT_GPT2; !is_json && family < MB_SPLIT_TIKTOKEN_V1; family++) {
        *out = (enum mb_split_family)family;
        if (strcmp(name, mb_split_family_name(*out)) == 0)
            return 0;
    }
    return mb_err_set(err, MB_EINVAL, "--tiktoken-pattern must be v1 or v2%s",
                      is_json ? "" : ", or gpt2, cl100k, llama3, qwen2 or o200k");
}

static int create_engine(struct tiktoken *t, struct ranks *r, size_t n_ranks, int32_t shift,
                         enum mb_split_family family, struct mb_err *err)
{
    struct mb_bpe_model model = {.ignore_merges = 1, .eod = t->eod, .vocab_size = t->vocab_size};
    struct mb_bpe_token *all = mb_calloc(n_ranks + t->n_special, sizeof(*all));
    struct mb_bpe_merge *merges = NULL;
    struct mb_bpe *bpe = NULL;
    int rc = all != NULL ? 0 : no_memory(err);

    for (size_t i = 0; rc == 0 && i < n_ranks; i++) {
        all[i] = r->tokens[i];
        all[i].id += shift;
    }
    if (rc == 0)
        rc = mb_bpe_merges_of_ranks(all, n_ranks, &merges, &model.n_merges, err);
    for (size_t i = 0; rc == 0 && i < t->n_special; i++)
        all[n_ranks + i] = (struct mb_bpe_token){(const uint8_t *)t->special[i].text,
                                                 t->special[i].n, t->special[i].id, 1};
    if (rc == 0) {
        model.tokens = all;
        model.n_tokens = n_ranks + t->n_special;
        model.merges = merges;
        model.unknown = all[0].id;
        rc = mb_bpe_create(&model, &bpe, err);
    }
    if (rc == 0)
        rc = mb_bytelevel_create(bpe, family, NULL, &t->engine, err);
    if (rc != 0)
        mb_bpe_destroy(bpe);
    mb_free(merges);
    mb_free(all);
    return rc;
}

/* Without one of them a text could not be said. */
static int check_bytes(const struct ranks *r, size_t n_ranks, const char *file, struct mb_err *err)
{
    uint8_t has[256] = {0};

    for (size_t i = 0; i < n_ranks; i++) {
        if (r->tokens[i].n == 1)
            has[r->tokens[i].bytes[0]] = 1;
    }
    for (unsigned byte = 0; byte < 256; byte++) {
        if (!has[byte])
            return mb_err_set(err, MB_ECORRUPT, "%s: no token for byte 0x%02x", file, byte);
    }
    return 0;
}

static int build(struct tiktoken *t, const struct mb_tokenizer_options *o, struct ranks *r,
                 int is_json, struct mb_err *err)
{
    int64_t size = o->vocab_size > 0 ? o->vocab_size : DEFAULT_VOCAB;
    int64_t n = is_json ? o->tiktoken_num_special_tokens > 0 ? o->tiktoken_num_special_tokens
                                                             : DEFAULT_SPECIAL
                        : (int64_t)o->n_tiktoken_special_tokens;
    int64_t n_ranks = is_json ? size - n : (int64_t)r->n;
    enum mb_split_family family;
    int rc = find_pattern(o, is_json, &family, err);

    if (rc == 0 && (n_ranks < 256 || n_ranks > (int64_t)r->n || n > 1 << 20))
        rc =
            mb_err_set(err, MB_EINVAL,
                       "%s has %zu tokens; --vocab-size %lld with %lld special tokens needs %lld",
                       o->tokenizer_model, r->n, (long long)size, (long long)n, (long long)n_ranks);
    if (rc == 0)
        rc = check_bytes(r, (size_t)n_ranks, o->tokenizer_model, err);
    if (rc == 0)
        rc = make_special(t, o, is_json, (size_t)n, r->max, err);
    t->vocab_size = is_json ? (uint64_t)size : (uint64_t)r->max + 1 + (uint64_t)n;
    return rc == 0 ? create_engine(t, r, (size_t)n_ranks, is_json ? (int32_t)n : 0, family, err)
                   : rc;
}

static int create(const struct mb_tokenizer_options *o, void **self, struct mb_err *err)
{
    struct tiktoken *t;
    struct ranks r = {0};
    int is_json = 0, rc;

    if (o->tokenizer_model == NULL)
        return mb_err_set(err, MB_EINVAL, "TikTokenizer needs --tokenizer-model (a file)");
    t = mb_calloc(1, sizeof(*t));
    rc = t != NULL ? read_ranks(o->tokenizer_model, &r, &is_json, err) : no_memory(err);
    if (rc == 0)
        rc = build(t, o, &r, is_json, err);
    mb_buf_close(&r.bytes);
    mb_free(r.tokens);
    if (rc != 0)
        destroy(t);
    else
        *self = t;
    return rc;
}

static uint64_t vocab_size(const void *self)
{
    return ((const struct tiktoken *)self)->vocab_size;
}

static int32_t eod(const void *self)
{
    return ((const struct tiktoken *)self)->eod;
}

static int32_t bos(const void *self)
{
    return ((const struct tiktoken *)self)->bos;
}

static const char *family(const void *self)
{
    return mb_split_family_name(mb_bytelevel_family(((const struct tiktoken *)self)->engine));
}

static const char *pattern(const void *self)
{
    return mb_split_pattern(mb_bytelevel_family(((const struct tiktoken *)self)->engine));
}

static size_t n_added(const void *self)
{
    return ((const struct tiktoken *)self)->n_special;
}

static void added(const void *self, size_t i, struct mb_tokenizer_added *out)
{
    const struct mb_added_token *a = &((const struct tiktoken *)self)->special[i];

    *out = (struct mb_tokenizer_added){a->text, a->n, a->id, 1};
}

static int scratch_create(const void *self, void **scratch, struct mb_err *err)
{
    struct mb_bytelevel_scratch *s;
    int rc = mb_bytelevel_scratch_create(((const struct tiktoken *)self)->engine, &s, err);

    if (rc == 0)
        *scratch = s;
    return rc;
}

static void scratch_destroy(void *scratch)
{
    mb_bytelevel_scratch_destroy(scratch);
}

static int encode(const void *self, void *scratch, const uint8_t *text, size_t n,
                  struct mb_ids *out, struct mb_err *err)
{
    const struct tiktoken *t = self;
    struct mb_added_search search = {.text = text, .n = n};
    struct mb_added_match match;
    size_t done = 0;
    int rc = 0;

    while (rc == 0 && mb_added_tokens_next(t->finder, &search, &match)) {
        if (match.start > done)
            rc = mb_bytelevel_encode(t->engine, scratch, text + done, match.start - done, out, err);
        if (rc == 0 && mb_ids_reserve(out, 1) != 0)
            rc = no_memory(err);
        if (rc == 0)
            out->data[out->n++] = match.id;
        done = match.end;
    }
    if (rc == 0 && done < n)
        rc = mb_bytelevel_encode(t->engine, scratch, text + done, n - done, out, err);
    return rc;
}

static struct mb_tokenizer_engine engine(const void *self, void *scratch)
{
    return (struct mb_tokenizer_engine){((const struct tiktoken *)self)->engine, scratch};
}

static int decode(const void *self, const int32_t *ids, size_t n, struct mb_buf *out,
                  struct mb_err *err)
{
    return mb_bytelevel_decode(((const struct tiktoken *)self)->engine, ids, n, out, err);
}

const struct mb_tokenizer_type mb_tokenizer_tiktoken = {
    .name = "TikTokenizer",
    .create = create,
    .destroy = destroy,
    .vocab_size = vocab_size,
    .eod = eod,
    .bos = bos,
    .family = family,
    .pattern = pattern,
    .n_added = n_added,
    .added = added,
    .scratch_create = scratch_create,
    .scratch_destroy = scratch_destroy,
    .engine = engine,
    .encode = encode,
    .decode = decode,
};
