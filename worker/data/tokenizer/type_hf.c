/*
 * HuggingFaceTokenizer: a directory with tokenizer.json (or that file), as AutoTokenizer reads it.
 *
 * Loading: 1. the file is read member by member (hf_vocab.c, hf_parts.c, hf_tokens.c); 2. the files
 * beside it say what is special; 3. the engine (bytelevel.h) gets tokens, merges and the cutter.
 * Encoding: 1. what the post-processor puts in front; 2. added tokens that are looked for in the
 * text as it is; 3. between them the text in normal form, and in that the other added tokens;
 * 4. between those the engine; 5. what the post-processor puts behind. Decoding gives the bytes of
 * every id, special ones too.
 */
#include <string.h>
#include <sys/stat.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "worker/data/tokenizer/bytelevel.h"
#include "worker/data/tokenizer/hf_private.h"
#include "worker/data/tokenizer/nfc.h"
#include "worker/data/tokenizer/type.h"

enum { MAX_FILE_BYTES = 256 << 20 };

struct hf {
    struct mb_hf_parts parts; /* the engine's cutter points here */
    struct mb_hf_added added;
    struct mb_bytelevel *engine;
    struct mb_nfc *nfc;                 /* NULL: no normalizer */
    struct mb_added_tokens *raw;        /* looked for in the text as it is */
    struct mb_added_tokens *normalized; /* and in its normal form; NULL: there are none */
};

struct hf_scratch {
    struct mb_bytelevel_scratch *engine;
    struct mb_nfc_work nfc;
    struct mb_buf normal;
    struct mb_buf prefixed;
    int in_normal; /* the text at work is in there */
};

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
}

static void destroy(void *self)
{
    struct hf *h = self;

    if (h == NULL)
        return;
    mb_bytelevel_destroy(h->engine);
    mb_nfc_destroy(h->nfc);
    mb_added_tokens_destroy(h->raw);
    mb_added_tokens_destroy(h->normalized);
    mb_hf_added_close(&h->added);
    mb_hf_parts_close(&h->parts);
    mb_free(h);
}

/* ---- loading ---- */

/* The members of tokenizer.json that are small, as trees. */
struct members {
    json_t *normalizer, *pre_tokenizer, *post_processor, *decoder, *added_tokens;
};

static json_t **member_of(struct members *m, const char *key)
{
    const struct {
        const char *key;
        json_t **slot;
    } known[] = {{"normalizer", &m->normalizer},
                 {"pre_tokenizer", &m->pre_tokenizer},
                 {"post_processor", &m->post_processor},
                 {"decoder", &m->decoder},
                 {"added_tokens", &m->added_tokens}};

    for (size_t i = 0; i < sizeof(known) / sizeof(*known); i++)
        if (strcmp(known[i].key, key) == 0)
            return known[i].slot;
    return NULL; /* version; truncation and padding, which AutoTokenizer switches off */
}

static void close_members(struct members *m)
{
    json_decref(m->normalizer);
    json_decref(m->pre_tokenizer);
    json_decref(m->post_processor);
    json_decref(m->decoder);
    json_decref(m->added_tokens);
}

static int read_member(struct mb_json_scan *s, const char *key, struct members *m)
{
    json_t **slot = member_of(m, key);
    json_error_t problem;
    const char *start;
    size_t n;
    int rc = mb_json_scan_value(s, &start, &n);

    if (rc != 0 || slot == NULL)
        return rc;
    json_decref(*slot);
    *slot = json_loadb(start, n, JSON_DECODE_ANY, &problem);
    return *slot != NULL
               ? 0
               : mb_err_set(s->err, MB_ECORRUPT, "%s: %s: %s", s->name, key, problem.text);
}

static int read_file(struct mb_json_scan *s, struct mb_hf_vocab *v, struct members *m)
{
    struct mb_buf key = {0};
    size_t n = 0;
    int has_model = 0;
    int rc = mb_json_scan_enter(s, '{');

    while (rc == 0 && (rc = mb_json_scan_member(s, &n, &key)) == 1) {
        if (strcmp(mb_buf_str(&key), "model") != 0)
            rc = read_member(s, mb_buf_str(&key), m);
        else if (has_model++)
            rc = mb_json_scan_fail(s, "one model");
        else
            rc = mb_hf_vocab_read(s, v);
    }
    mb_buf_close(&key);
    if (rc == 0)
        rc = mb_json_scan_end(s);
    if (rc == 0 && !has_model)
        rc = mb_err_set(s->err, MB_ECORRUPT, "%s has no model", s->name);
    return rc;
}

/* Tokens of the model and added ones; the engine encodes to the former only. */
static int create_bpe(const struct mb_hf_vocab *v, const struct mb_hf_added *a, struct mb_bpe **out,
                      struct mb_err *err)
{
    struct mb_bpe_token *tokens = mb_calloc(v->n_tokens + a->n, sizeof(*tokens));
    struct mb_bpe_model model = {.tokens = tokens,
                                 .n_tokens = v->n_tokens,
                                 .merges = v->merges,
                                 .n_merges = v->n_merges,
                                 .vocab_size = (uint64_t)v->max_id + 1,
                                 .eod = a->eos,
                                 .unknown = v->tokens[0].id,
                                 .ignore_merges = v->ignore_merges};
    int rc;

    if (tokens == NULL)
        return no_memory(err);
    memcpy(tokens, v->tokens, v->n_tokens * sizeof(*tokens));
    for (size_t i = 0; i < a->n; i++) {
        const struct mb_added_token *t = &a->tokens[i];
        if (mb_bpe_map_find(&v->map, (const uint8_t *)t->text, t->n) >= 0)
            continue;
        tokens[model.n_tokens++] = (struct mb_bpe_token){(const uint8_t *)t->text, t->n, t->id, 1};
        if (t->id >= (int32_t)model.vocab_size)
            model.vocab_size = (uint64_t)t->id + 1;
    }
    rc = mb_bpe_create(&model, out, err);
    mb_free(tokens);
    return rc;
}

static int create_engine(struct hf *h, const struct mb_hf_vocab *v, struct mb_err *err)
{
    struct mb_hf_parts *p = &h->parts;
    struct mb_split_custom cutter;
    struct mb_bpe *bpe = NULL;
    int rc = create_bpe(v, &h->added, &bpe, err);

    if (rc != 0)
        return rc;
    mb_hf_parts_cutter(p, &cutter);
    if (p->n_stages == 0)
        rc = mb_bytelevel_create(bpe, MB_SPLIT_WHOLE, NULL, &h->engine, err);
    else if (p->n_stages == 1 && p->stages[0].regex == NULL)
        rc = mb_bytelevel_create(bpe, p->stages[0].family, NULL, &h->engine, err);
    else
        rc = mb_bytelevel_create(bpe, MB_SPLIT_REGEX, &cutter, &h->engine, err);
    if (rc != 0)
        mb_bpe_destroy(bpe);
    return rc;
}

/* The finders; a token of the second is looked for in its own normal form. */
static int create_finders(struct hf *h, struct mb_err *err)
{
    size_t n = h->added.n, n_raw = 0, n_normal = 0, at = 0;
    struct mb_added_token *list = mb_calloc(2 * n + 1, sizeof(*list));
    struct mb_nfc_work work = {0};
    struct mb_buf texts = {0};
    int rc = list != NULL ? 0 : no_memory(err);

    for (size_t i = 0; rc == 0 && i < n; i++) {
        const struct mb_added_token *t = &h->added.tokens[i];
        if (!t->normalized) {
            list[n_raw++] = *t;
            continue;
        }
        size_t start = texts.len;
        if (h->nfc != NULL)
            rc = mb_nfc_append(h->nfc, &work, (const uint8_t *)t->text, t->n, &texts);
        else
            rc = mb_buf_add(&texts, t->text, t->n);
        list[n + n_normal] = *t;
        list[n + n_normal++].n = texts.len - start;
        if (rc != 0)
            no_memory(err);
    }
    for (size_t i = 0; i < n_normal; at += list[n + i++].n)
        list[n + i].text = mb_buf_str(&texts) + at;
    if (rc == 0)
        rc = mb_added_tokens_create(list, n_raw, &h->raw, err);
    if (rc == 0 && n_normal > 0)
        rc = mb_added_tokens_create(list + n, n_normal, &h->normalized, err);
    mb_nfc_work_close(&work);
    mb_buf_close(&texts);
    mb_free(list);
    return rc;
}

/* What the class of tokenizer_config.json says goes around the text counts before the file. */
static void set_template(struct mb_hf_parts *p, const struct mb_hf_added *a)
{
    if (a->adds_bos < 0)
        return;
    p->n_before = p->n_after = 0;
    if (a->adds_bos)
        p->before[p->n_before++] = a->bos;
    if (a->adds_eos)
        p->after[p->n_after++] = a->eos;
}

static int build(struct hf *h, const char *dir, struct mb_hf_vocab *v, const struct members *m,
                 struct mb_err *err)
{
    int rc = mb_hf_parts_read(m->normalizer, m->pre_tokenizer, m->post_processor, m->decoder,
                              &h->parts, err);

    if (rc == 0)
        rc = mb_hf_added_read(m->added_tokens, v, &h->added, err);
    if (rc == 0)
        rc = mb_hf_added_configure(dir, v, &h->added, err);
    if (rc == 0 && h->parts.nfc)
        rc = mb_nfc_create(&h->nfc, err);
    if (rc == 0 && h->parts.outer_is_bytelevel && h->added.add_prefix_space >= 0)
        h->parts.add_prefix_space = h->added.add_prefix_space;
    if (rc == 0)
        set_template(&h->parts, &h->added);
    if (rc == 0)
        rc = create_finders(h, err);
    return rc == 0 ? create_engine(h, v, err) : rc;
}

/* --tokenizer-model is the directory, or the file in it; both owned by the caller. */
static int find_file(const char *given, char **dir, char **file, struct mb_err *err)
{
    struct stat st;
    const char *slash = strrchr(given, '/');

    if (stat(given, &st) == 0 && S_ISDIR(st.st_mode)) {
        *dir = mb_strdup(given);
        *file = mb_path_join(given, "tokenizer.json");
    } else {
        *dir = slash != NULL ? mb_strndup(given, (size_t)(slash - given) + 1) : mb_strdup(".");
        *file = mb_strdup(given);
    }
    return *dir != NULL && *file != NULL ? 0 : no_memory(err);
}

static int load(struct hf *h, const char *given, struct mb_err *err)
{
    char *dir = NULL, *file = NULL;
    struct mb_buf text = {0};
    struct mb_hf_vocab v = {0};
    struct members m = {0};
    int rc = find_file(given, &dir, &file, err);

    if (rc == 0) {
        rc = mb_fs_read(file, MAX_FILE_BYTES, &text, err);
        if (rc != 0)
            mb_err_wrap(err, "--tokenizer-model");
    }
    if (rc == 0) {
        struct mb_json_scan s = {.text = mb_buf_str(&text), .name = file, .err = err};
        s.p = s.text;
        s.end = s.text + text.len;
        rc = read_file(&s, &v, &m);
    }
    mb_buf_close(&text);
    if (rc == 0) {
        rc = build(h, dir, &v, &m, err);
        if (rc != 0)
            mb_err_wrap(err, "%s", file);
    }
    close_members(&m);
    mb_hf_vocab_close(&v);
    mb_free(dir);
    mb_free(file);
    return rc;
}

static int create(const struct mb_tokenizer_options *o, void **self, struct mb_err *err)
{
    struct hf *h;
    int rc;

    if (o->tokenizer_model == NULL)
        return mb_err_set(err, MB_EINVAL,
                          "HuggingFaceTokenizer needs --tokenizer-model (a directory with "
                          "tokenizer.json)");
    h = mb_calloc(1, sizeof(*h));
    rc = h != NULL ? load(h, o->tokenizer_model, err) : no_memory(err);
    /* tokenize() of the peer, which has no post-processor, instead of a call of it. */
    if (rc == 0 && o->leaves_out_special_tokens)
        h->parts.n_before = h->parts.n_after = 0;
    if (rc != 0)
        destroy(h);
    else
        *self = h;
    return rc;
}

/* ---- what is asked ---- */

static uint64_t vocab_size(const void *self)
{
    return ((const struct hf *)self)->added.vocab_size;
}

static int32_t eod(const void *self)
{
    return ((const struct hf *)self)->added.eos;
}

static int32_t bos(const void *self)
{
    return ((const struct hf *)self)->added.bos;
}

static const char *family(const void *self)
{
    return mb_split_family_name(mb_bytelevel_family(((const struct hf *)self)->engine));
}

static const char *pattern(const void *self)
{
    const struct hf *h = self;

    for (size_t i = 0; i < h->parts.n_stages; i++)
        if (h->parts.stages[i].regex != NULL)
            return mb_split_regex_pattern(h->parts.stages[i].regex);
    return mb_split_pattern(mb_bytelevel_family(h->engine));
}

static size_t n_added(const void *self)
{
    return ((const struct hf *)self)->added.n;
}

static void added(const void *self, size_t i, struct mb_tokenizer_added *out)
{
    const struct mb_added_token *t = &((const struct hf *)self)->added.tokens[i];

    *out = (struct mb_tokenizer_added){t->text, t->n, t->id, t->special};
}

/* ---- encoding ---- */

static void scratch_destroy(void *scratch)
{
    struct hf_scratch *s = scratch;

    if (s == NULL)
        return;
    mb_bytelevel_scratch_destroy(s->engine);
    mb_nfc_work_close(&s->nfc);
    mb_buf_close(&s->normal);
    mb_buf_close(&s->prefixed);
    mb_free(s);
}

static int scratch_create(const void *self, void **scratch, struct mb_err *err)
{
    struct hf_scratch *s = mb_calloc(1, sizeof(*s));
    int rc = s != NULL
                 ? mb_bytelevel_scratch_create(((const struct hf *)self)->engine, &s->engine, err)
                 : no_memory(err);

    if (rc != 0)
        scratch_destroy(s);
    else
        *scratch = s;
    return rc;
}

static int append(struct mb_ids *out, const int32_t *ids, size_t n, struct mb_err *err)
{
    if (mb_ids_reserve(out, n) != 0)
        return no_memory(err);
    if (n > 0)
        memcpy(out->data + out->n, ids, n * sizeof(*ids));
    out->n += n;
    return 0;
}

/* A text without added tokens, in normal form. */
static int encode_plain(const struct hf *h, struct hf_scratch *s, const uint8_t *text, size_t n,
                        struct mb_ids *out, struct mb_err *err)
{
    int rc;

    if (n == 0)
        return 0;
    if (h->parts.add_prefix_space && text[0] != ' ') {
        mb_buf_reset(&s->prefixed);
        if (mb_buf_add(&s->prefixed, " ", 1) != 0 || mb_buf_add(&s->prefixed, text, n) != 0)
            return no_memory(err);
        text = s->prefixed.data;
        n++;
    }
    rc = mb_bytelevel_encode(h->engine, s->engine, text, n, out, err);
    /* Nothing may wait for a text that the next one writes over. */
    if (rc == 0 && (text == s->prefixed.data || s->in_normal))
        rc = mb_bytelevel_settle(h->engine, s->engine, out, err);
    return rc;
}

typedef int encode_fn(const struct hf *h, struct hf_scratch *s, const uint8_t *text, size_t n,
                      struct mb_ids *out, struct mb_err *err);

/* The added tokens of one finder; what is between them goes to `between`. */
static int encode_around(const struct hf *h, struct hf_scratch *s,
                         const struct mb_added_tokens *finder, encode_fn *between,
                         const uint8_t *text, size_t n, struct mb_ids *out, struct mb_err *err)
{
    struct mb_added_search search = {.text = text, .n = n};
    struct mb_added_match match;
    size_t done = 0;
    int rc = 0;

    while (rc == 0 && mb_added_tokens_next(finder, &search, &match)) {
        if (match.start > done)
            rc = between(h, s, text + done, match.start - done, out, err);
        if (rc == 0)
            rc = append(out, &match.id, 1, err);
        done = match.end;
    }
    return rc == 0 && done < n ? between(h, s, text + done, n - done, out, err) : rc;
}

/* A text without the added tokens that are looked for first. */
static int encode_section(const struct hf *h, struct hf_scratch *s, const uint8_t *text, size_t n,
                          struct mb_ids *out, struct mb_err *err)
{
    size_t same = h->nfc != NULL ? mb_nfc_first_change(h->nfc, text, n) : n;

    s->in_normal = same < n;
    if (same < n) {
        mb_buf_reset(&s->normal);
        if (mb_buf_add(&s->normal, text, same) != 0 ||
            mb_nfc_append(h->nfc, &s->nfc, text + same, n - same, &s->normal) != 0)
            return no_memory(err);
        text = s->normal.data;
        n = s->normal.len;
    }
    if (h->normalized != NULL)
        return encode_around(h, s, h->normalized, encode_plain, text, n, out, err);
    return encode_plain(h, s, text, n, out, err);
}

static int encode(const void *self, void *scratch, const uint8_t *text, size_t n,
                  struct mb_ids *out, struct mb_err *err)
{
    const struct hf *h = self;
    int rc = append(out, h->parts.before, h->parts.n_before, err);

    if (rc == 0)
        rc = encode_around(h, scratch, h->raw, encode_section, text, n, out, err);
    return rc == 0 ? append(out, h->parts.after, h->parts.n_after, err) : rc;
}

static struct mb_tokenizer_engine engine(const void *self, void *scratch)
{
    return (struct mb_tokenizer_engine){((const struct hf *)self)->engine,
                                        ((struct hf_scratch *)scratch)->engine};
}

static int decode(const void *self, const int32_t *ids, size_t n, struct mb_buf *out,
                  struct mb_err *err)
{
    return mb_bytelevel_decode(((const struct hf *)self)->engine, ids, n, out, err);
}

const struct mb_tokenizer_type mb_tokenizer_hf = {
    .name = "HuggingFaceTokenizer",
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
