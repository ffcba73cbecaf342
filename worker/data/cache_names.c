/*
 * Descriptions of cached indices (cache_names.h): a writer of JSON as json.dumps(indent=4) writes
 * it, over it the keys of a tokenizer, of a data set, of a blend. Failure: only memory, and what is
 * not provided.
 */
#include "worker/data/cache_names.h"
#include <inttypes.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"
#include "worker/data/repr.h"

enum { MD5_BYTES = 16 };

static const char TOKENIZER_CLASS[] =
    "megatron.core.tokenizers.text.models.default_tokenizer.DefaultTokenizerText";

/* ---- JSON ---- */

struct json {
    struct mb_buf *out;
    unsigned depth;
    int is_first; /* nothing stands between the last bracket and here */
    int rc;
};

static void put(struct json *j, const char *text)
{
    j->rc = j->rc == 0 ? mb_buf_puts(j->out, text) : j->rc;
}

static void new_line(struct json *j)
{
    put(j, "\n");
    for (unsigned i = 0; i < j->depth; i++) {
        put(j, "    ");
    }
}

/* Before an element of a list; before a key. */
static void next(struct json *j)
{
    if (!j->is_first) {
        put(j, ",");
    }
    j->is_first = 0;
    new_line(j);
}

static void open_bracket(struct json *j, const char *bracket)
{
    put(j, bracket);
    j->depth++;
    j->is_first = 1;
}

static void close_bracket(struct json *j, const char *bracket)
{
    j->depth--;
    new_line(j);
    put(j, bracket);
    j->is_first = 0;
}

static void put_unit(struct json *j, uint32_t unit)
{
    char text[16];
    snprintf(text, sizeof text, "\\u%04" PRIx32, unit);
    put(j, text);
}

static uint32_t code_point(const uint8_t *p, size_t n)
{
    uint32_t c = n == 2 ? p[0] & 0x1f : n == 3 ? p[0] & 0x0f : p[0] & 0x07;
    for (size_t i = 1; i < n; i++) {
        c = c << 6 | (p[i] & 0x3f);
    }
    return c;
}

/* A byte that is no UTF-8 is in Python's arguments a lone surrogate. */
static size_t put_beyond_ascii(struct json *j, const uint8_t *p, size_t n)
{
    size_t length;
    if (mb_utf8_look(p, n, &length) != MB_UTF8_WHOLE) {
        put_unit(j, 0xdc00 + (uint32_t)*p);
        return 1;
    }
    uint32_t c = code_point(p, length);
    if (c >= 0x10000) {
        put_unit(j, 0xd800 + ((c - 0x10000) >> 10));
        c = 0xdc00 + ((c - 0x10000) & 0x3ff);
    }
    put_unit(j, c);
    return length;
}

static void put_text(struct json *j, const char *text)
{
    static const char special[] = "\"\\\n\r\t\f\b";
    static const char letters[] = "\"\\nrtfb";
    const uint8_t *p = (const uint8_t *)text;
    const uint8_t *end = p + strlen(text);
    put(j, "\"");
    while (p < end) {
        const char *escaped = strchr(special, *p);
        char out[3] = {(char)*p, 0, 0};
        if (*p >= 0x80) {
            p += put_beyond_ascii(j, p, (size_t)(end - p));
            continue;
        }
        if (escaped != NULL) {
            out[0] = '\\';
            out[1] = letters[escaped - special];
            put(j, out);
        } else if (*p < ' ' || *p == 0x7f) {
            put_unit(j, *p);
        } else {
            put(j, out);
        }
        p++;
    }
    put(j, "\"");
}

static void put_text_or_null(struct json *j, const char *text)
{
    if (text != NULL) {
        put_text(j, text);
    } else {
        put(j, "null");
    }
}

static void put_key(struct json *j, const char *key)
{
    next(j);
    put_text(j, key);
    put(j, ": ");
}

static void put_u64(struct json *j, uint64_t v)
{
    char text[24];
    snprintf(text, sizeof text, "%" PRIu64, v);
    put(j, text);
}

static void put_double(struct json *j, double v)
{
    char text[MB_REPR_DOUBLE_MAX];
    put(j, mb_repr_double(v, text));
}

/* ---- data sets ---- */

static void put_matrix(struct json *j, const struct mb_split_matrix *m)
{
    if (m == NULL) {
        put(j, "null");
        return;
    }
    open_bracket(j, "[");
    for (int i = 0; i < MB_N_SPLITS; i++) {
        next(j);
        if (!m->present[i]) {
            put(j, "null");
            continue;
        }
        open_bracket(j, "[");
        next(j);
        if (i == 0) { /* the sum of nothing is an int there */
            put(j, "0");
        } else {
            put_double(j, m->begin[i]);
        }
        next(j);
        put_double(j, m->end[i]);
        close_bracket(j, "]");
    }
    close_bracket(j, "]");
}

static void put_identity(struct json *j, const struct mb_cache_identity *x)
{
    open_bracket(j, "{");
    for (size_t i = 0; i < x->n; i++) {
        put_key(j, x->keys[i]);
        put_text_or_null(j, x->values[i]);
    }
    close_bracket(j, "}");
}

const char *mb_cache_class(const struct mb_cache_key *key)
{
    return key->prefix != NULL ? "GPTDataset" : "MockGPTDataset";
}

static void put_dataset(struct json *j, const struct mb_cache_key *k)
{
    open_bracket(j, "{");
    put_key(j, "class");
    put_text(j, mb_cache_class(k));
    put_key(j, "dataset_path");
    put_text_or_null(j, k->prefix);
    put_key(j, "num_samples");
    if (k->n_samples < 0) {
        put(j, "null");
    } else {
        put_u64(j, (uint64_t)k->n_samples);
    }
    put_key(j, "index_split");
    put_text(j, mb_split_name(k->split));
    put_key(j, "random_seed");
    put_u64(j, k->seed);
    put_key(j, "sequence_length");
    put_u64(j, k->seq_length);
    put_key(j, "split");
    put_text_or_null(j, k->split_text);
    put_key(j, "split_matrix");
    put_matrix(j, k->split_text != NULL ? k->matrix : NULL);
    put_key(j, "tokenizer");
    put_identity(j, k->tokenizer);
    close_bracket(j, "}");
}

int mb_cache_describe(const struct mb_cache_key *key, struct mb_buf *out)
{
    struct json j = {.out = out};
    put_dataset(&j, key);
    return j.rc;
}

int mb_cache_describe_blend(const struct mb_cache_key *parts, const double *weights, size_t n,
                            uint64_t size, struct mb_buf *out)
{
    struct json j = {.out = out};
    open_bracket(&j, "{");
    put_key(&j, "class");
    put_text(&j, "BlendedDataset");
    put_key(&j, "datasets");
    open_bracket(&j, "[");
    for (size_t i = 0; i < n; i++) {
        next(&j);
        put_dataset(&j, &parts[i]);
    }
    close_bracket(&j, "]");
    put_key(&j, "split");
    put_text(&j, mb_split_name(parts[0].split));
    put_key(&j, "weights");
    open_bracket(&j, "[");
    for (size_t i = 0; i < n; i++) {
        next(&j);
        put_double(&j, weights[i]);
    }
    close_bracket(&j, "]");
    put_key(&j, "size");
    put_u64(&j, size);
    close_bracket(&j, "}");
    return j.rc;
}

int mb_cache_base(const struct mb_buf *description, const char *class_name, enum mb_split split,
                  char out[MB_CACHE_BASE_MAX], struct mb_err *err)
{
    unsigned char digest[MD5_BYTES];
    char hex[2 * MD5_BYTES + 1];
    if (EVP_Digest(description->data, description->len, digest, NULL, EVP_md5(), NULL) != 1) {
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "OpenSSL gives no MD5 here, which names the files of the cache");
    }
    mb_hex(digest, sizeof digest, hex);
    snprintf(out, MB_CACHE_BASE_MAX, "%s-%s-%s", hex, class_name, mb_split_name(split));
    return 0;
}

/* ---- tokenizers ---- */

static int add(struct mb_cache_identity *x, const char *key, const char *value)
{
    char *own = value != NULL ? mb_strdup(value) : NULL;
    if (value != NULL && own == NULL) {
        return MB_ENOMEM;
    }
    x->keys[x->n] = key;
    x->values[x->n++] = own;
    return 0;
}

/* str() of an argument that may be None. */
static int add_str(struct mb_cache_identity *x, const char *key, const char *value)
{
    return add(x, key, value != NULL ? value : "None");
}

static int add_number(struct mb_cache_identity *x, const char *key, int64_t value)
{
    char text[24];
    snprintf(text, sizeof text, "%" PRId64, value);
    return add(x, key, text);
}

/* str() of a list of texts, "['<s>', '</s>']", or of None. */
static int add_list(struct mb_cache_identity *x, const char *key, const char *const *items,
                    size_t n)
{
    struct mb_buf text = {0};
    int rc = mb_buf_puts(&text, n > 0 ? "[" : "None");
    for (size_t i = 0; i < n && rc == 0; i++) {
        const char *quote =
            strchr(items[i], '\'') != NULL && strchr(items[i], '"') == NULL ? "\"" : "'";
        rc = mb_buf_printf(&text, "%s%s", i > 0 ? ", " : "", quote);
        for (const char *p = items[i]; *p != '\0' && rc == 0; p++) {
            rc = mb_buf_printf(&text, "%s%c", *p == '\\' || *p == *quote ? "\\" : "", *p);
        }
        rc = rc == 0 ? mb_buf_puts(&text, quote) : rc;
    }
    rc = rc == 0 && n > 0 ? mb_buf_puts(&text, "]") : rc;
    rc = rc == 0 ? add(x, key, mb_buf_str(&text)) : rc;
    mb_buf_close(&text);
    return rc;
}

static int add_huggingface(struct mb_cache_identity *x, const struct mb_tokenizer_options *o,
                           int begins_with_files)
{
    int rc = 0;
    if (!begins_with_files) {
        rc = add(x, "additional_special_tokens", "[]");
    }
    rc = rc == 0 ? add_str(x, "vocab_file", o->vocab_file) : rc;
    rc = rc == 0 ? add_str(x, "merges_file", o->merge_file) : rc;
    if (begins_with_files) {
        rc = rc == 0 ? add(x, "additional_special_tokens", "[]") : rc;
    }
    rc = rc == 0 ? add(x, "use_fast", "False") : rc;
    rc = rc == 0 ? add(x, "trust_remote_code", "False") : rc;
    return rc == 0 ? add(x, "include_special_tokens", "False") : rc;
}

static int add_tiktoken(struct mb_cache_identity *x, const struct mb_tokenizer_options *o)
{
    int rc = 0;
    if (o->tiktoken_pattern != NULL) {
        rc = add(x, "pattern", o->tiktoken_pattern);
    }
    if (rc == 0 && o->vocab_size > 0) {
        rc = add_number(x, "vocab_size", o->vocab_size);
    }
    rc = rc == 0 ? add_number(x, "num_special_tokens", o->tiktoken_num_special_tokens) : rc;
    return rc == 0 ? add_list(x, "special_tokens", o->tiktoken_special_tokens,
                              o->n_tiktoken_special_tokens)
                   : rc;
}

static int fill(struct mb_cache_identity *x, const char *type, const struct mb_tokenizer_options *o)
{
    const int is_gpt2 = strcmp(type, "GPT2BPETokenizer") == 0;
    const int is_null = strcmp(type, "NullTokenizer") == 0;
    int rc = add(x, "class", TOKENIZER_CLASS);
    if (rc == 0) {
        rc = add(x, "tokenizer_path", is_null ? NULL : is_gpt2 ? type : o->tokenizer_model);
    }
    if (rc != 0) {
        return rc;
    }
    if (is_null) {
        return add_number(x, "vocab_size", o->vocab_size);
    }
    if (is_gpt2 || strcmp(type, "HuggingFaceTokenizer") == 0) {
        return add_huggingface(x, o, !is_gpt2);
    }
    if (strcmp(type, "TikTokenizer") == 0) {
        return add_tiktoken(x, o);
    }
    rc = add(x, "legacy", "False");
    return rc == 0 ? add(x, "special_tokens", "None") : rc;
}

int mb_cache_identity_make(const struct mb_tokenizer_options *o, struct mb_cache_identity *out,
                           struct mb_err *err)
{
    static const char *const KNOWN[] = {
        "GPT2BPETokenizer",          "HuggingFaceTokenizer",   "NullTokenizer",   "TikTokenizer",
        "GPTSentencePieceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer", NULL};
    const char *type = o->type != NULL ? o->type : KNOWN[0];
    struct mb_cache_identity x = {0};
    size_t i = 0;
    while (KNOWN[i] != NULL && strcmp(KNOWN[i], type) != 0) {
        i++;
    }
    if (KNOWN[i] == NULL) {
        return mb_err_set(err, MB_EUNSUPPORTED, "%s has no identity in Megatron-LM's cache", type);
    }
    int rc = fill(&x, type, o);
    if (rc != 0) {
        mb_cache_identity_close(&x);
        return mb_err_set(err, rc, "out of memory for a tokenizer's identity");
    }
    *out = x;
    return 0;
}

void mb_cache_identity_close(struct mb_cache_identity *x)
{
    for (size_t i = 0; i < x->n; i++) {
        mb_free(x->values[i]);
    }
    *x = (struct mb_cache_identity){0};
}
