/*
 * One door for both tokenizers: the type decides at creation, each call branches once.
 * NullTokenizer is here whole; GPT2BPETokenizer is gpt2.c. A failed encode gives the ids back to
 * the length they had.
 */
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"
#include "worker/data/tokenizer/gpt2.h"
#include "worker/data/tokenizer/tokenizer.h"

struct mb_tokenizer {
    int is_null;
    int64_t null_vocab_size; /* --vocab-size, which is also the eod */
    struct mb_gpt2 gpt2;
};

struct mb_tokenizer_scratch {
    struct mb_gpt2_scratch *gpt2; /* NULL for the Null tokenizer */
};

void mb_ids_close(struct mb_ids *ids)
{
    mb_free(ids->data);
    *ids = (struct mb_ids){0};
}

int mb_ids_reserve(struct mb_ids *ids, size_t extra)
{
    size_t cap = ids->cap > 0 ? ids->cap : 1024;
    int32_t *data;

    if (ids->cap - ids->n >= extra)
        return 0;
    while (cap - ids->n < extra)
        cap *= 2;
    data = mb_reallocarray(ids->data, cap, sizeof(*data));
    if (data == NULL)
        return MB_ENOMEM;
    ids->data = data;
    ids->cap = cap;
    return 0;
}

static int create_gpt2(const struct mb_tokenizer_options *o, struct mb_tokenizer *t,
                       struct mb_err *err)
{
    if (o->vocab_file == NULL || o->merge_file == NULL)
        return mb_err_set(err, MB_EINVAL,
                          "GPT2BPETokenizer needs --vocab-file (vocab.json) and --merge-file "
                          "(merges.txt)");
    mb_class_table_make(&t->gpt2.classes);
    return mb_bpe_load(o->vocab_file, o->merge_file, &t->gpt2.bpe, err);
}

static int create_null(const struct mb_tokenizer_options *o, struct mb_tokenizer *t,
                       struct mb_err *err)
{
    if (o->vocab_size <= 0 || o->vocab_size >= INT32_MAX)
        return mb_err_set(err, MB_EINVAL, "NullTokenizer needs --vocab-size, from 1 to %d",
                          INT32_MAX - 1);
    t->is_null = 1;
    t->null_vocab_size = o->vocab_size;
    return 0;
}

int mb_tokenizer_create(const struct mb_tokenizer_options *o, struct mb_tokenizer **out,
                        struct mb_err *err)
{
    static const char *const types[] = {"GPT2BPETokenizer", "NullTokenizer", NULL};
    const char *type = o->type != NULL ? o->type : types[0];
    struct mb_tokenizer *t = mb_calloc(1, sizeof(*t));
    int rc;

    if (t == NULL)
        return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
    if (strcmp(type, types[0]) == 0)
        rc = create_gpt2(o, t, err);
    else if (strcmp(type, types[1]) == 0)
        rc = create_null(o, t, err);
    else
        rc = mb_err_set(err, MB_EINVAL, "--tokenizer-type %s is not provided (choose from %s, %s)",
                        type, types[0], types[1]);
    if (rc != 0) {
        mb_tokenizer_destroy(t);
        return rc;
    }
    *out = t;
    return 0;
}

void mb_tokenizer_destroy(struct mb_tokenizer *t)
{
    if (t == NULL)
        return;
    mb_bpe_destroy(t->gpt2.bpe);
    mb_free(t);
}

const char *mb_tokenizer_type(const struct mb_tokenizer *t)
{
    return t->is_null ? "NullTokenizer" : "GPT2BPETokenizer";
}

uint64_t mb_tokenizer_vocab_size(const struct mb_tokenizer *t)
{
    return t->is_null ? (uint64_t)t->null_vocab_size + 1 : mb_bpe_vocab_size(t->gpt2.bpe);
}

int32_t mb_tokenizer_eod(const struct mb_tokenizer *t)
{
    return t->is_null ? (int32_t)t->null_vocab_size : mb_bpe_eod(t->gpt2.bpe);
}

int mb_tokenizer_scratch_create(const struct mb_tokenizer *t, struct mb_tokenizer_scratch **out,
                                struct mb_err *err)
{
    struct mb_tokenizer_scratch *s = mb_calloc(1, sizeof(*s));
    int rc = 0;

    if (s == NULL)
        return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
    if (!t->is_null)
        rc = mb_gpt2_scratch_create(&s->gpt2, err);
    if (rc != 0) {
        mb_free(s);
        return rc;
    }
    *out = s;
    return 0;
}

void mb_tokenizer_scratch_destroy(struct mb_tokenizer_scratch *s)
{
    if (s == NULL)
        return;
    mb_gpt2_scratch_destroy(s->gpt2);
    mb_free(s);
}

/* int(word) of Python for plain decimal numbers; other forms are refused. */
static int parse_id(const struct mb_tokenizer *t, const char *word, size_t n, int32_t *out)
{
    int64_t value = 0;

    if (n == 0)
        return MB_EINVAL;
    for (size_t i = 0; i < n; i++) {
        if (word[i] < '0' || word[i] > '9')
            return MB_EINVAL;
        value = value * 10 + (word[i] - '0');
        if (value > t->null_vocab_size)
            return MB_EINVAL;
    }
    *out = (int32_t)value;
    return 0;
}

static int encode_null(const struct mb_tokenizer *t, const char *text, size_t n, struct mb_ids *out,
                       struct mb_err *err)
{
    const char *end = text + n;

    for (const char *p = text;;) {
        const char *space = memchr(p, ' ', (size_t)(end - p));
        size_t length = (size_t)((space != NULL ? space : end) - p);

        if (mb_ids_reserve(out, 1) != 0)
            return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
        if (parse_id(t, p, length, &out->data[out->n]) != 0)
            return mb_err_set(
                err, MB_EINVAL,
                "NullTokenizer: \"%.*s\" is not an id from 0 to %lld; ids are separated "
                "by one space",
                length < 40 ? (int)length : 40, p, (long long)t->null_vocab_size);
        out->n++;
        if (space == NULL)
            return 0;
        p = space + 1;
    }
}

int mb_tokenizer_encode(const struct mb_tokenizer *t, struct mb_tokenizer_scratch *s,
                        const void *text, size_t n, struct mb_ids *out, struct mb_err *err)
{
    size_t before = out->n;
    int rc;

    if (n == 0 && !t->is_null)
        return 0;
    if (t->is_null)
        rc = encode_null(t, text, n, out, err);
    else if (mb_gpt2_encode(&t->gpt2, s->gpt2, text, n, out) == 0)
        rc = 0;
    else
        rc = mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
    if (rc != 0)
        out->n = before;
    return rc;
}

int mb_tokenizer_decode(const struct mb_tokenizer *t, const int32_t *ids, size_t n,
                        struct mb_buf *out, struct mb_err *err)
{
    for (size_t i = 0; i < n; i++) {
        int rc;
        if (t->is_null && (ids[i] < 0 || ids[i] > t->null_vocab_size))
            rc = MB_EINVAL;
        else if (t->is_null)
            rc = mb_buf_printf(out, i > 0 ? " %d" : "%d", (int)ids[i]);
        else
            rc = mb_bpe_decode(t->gpt2.bpe, ids[i], out);
        if (rc == MB_EINVAL)
            return mb_err_set(err, rc, "token id %d is outside the vocabulary", (int)ids[i]);
        if (rc != 0)
            return mb_err_set(err, rc, "tokenizer: out of memory");
    }
    return 0;
}
