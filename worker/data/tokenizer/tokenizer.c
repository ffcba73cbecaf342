/*
 * One door for all types: the type decides at creation, each call goes through its table. A failed
 * encode gives the ids back to the length they had.
 */
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"
#include "worker/data/tokenizer/type.h"

struct mb_tokenizer {
    const struct mb_tokenizer_type *type;
    void *self;
};

struct mb_tokenizer_scratch {
    const struct mb_tokenizer_type *type;
    void *scratch; /* NULL where the type needs none */
};

/* The first is the default. */
static const struct mb_tokenizer_type *const types[] = {
    &mb_tokenizer_gpt2,
    &mb_tokenizer_hf,
    &mb_tokenizer_llama2,
    &mb_tokenizer_sentencepiece,
    &mb_tokenizer_gpt_sentencepiece,
    &mb_tokenizer_tiktoken,
    &mb_tokenizer_null,
};
enum { N_TYPES = sizeof(types) / sizeof(*types) };

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

static int find_type(const char *name, const struct mb_tokenizer_type **out, struct mb_err *err)
{
    struct mb_buf names = {0};
    int rc = 0;

    *out = types[0];
    for (size_t i = 0; name != NULL && i < N_TYPES; i++) {
        *out = types[i];
        if (strcmp(types[i]->name, name) == 0)
            return 0;
    }
    if (name == NULL)
        return 0;
    for (size_t i = 0; rc == 0 && i < N_TYPES; i++)
        rc = mb_buf_printf(&names, i > 0 ? ", %s" : "%s", types[i]->name);
    if (rc != 0)
        rc = mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
    else
        rc = mb_err_set(err, MB_EINVAL, "--tokenizer-type %s is not provided (choose from %s)",
                        name, mb_buf_str(&names));
    mb_buf_close(&names);
    return rc;
}

int mb_tokenizer_create(const struct mb_tokenizer_options *o, struct mb_tokenizer **out,
                        struct mb_err *err)
{
    struct mb_tokenizer *t;
    const struct mb_tokenizer_type *type;
    int rc = find_type(o->type, &type, err);

    if (rc != 0)
        return rc;
    t = mb_calloc(1, sizeof(*t));
    if (t == NULL)
        return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
    t->type = type;
    rc = type->create(o, &t->self, err);
    if (rc != 0)
        mb_free(t);
    else
        *out = t;
    return rc;
}

void mb_tokenizer_destroy(struct mb_tokenizer *t)
{
    if (t == NULL)
        return;
    t->type->destroy(t->self);
    mb_free(t);
}

const char *mb_tokenizer_type(const struct mb_tokenizer *t)
{
    return t->type->name;
}

uint64_t mb_tokenizer_vocab_size(const struct mb_tokenizer *t)
{
    return t->type->vocab_size(t->self);
}

int32_t mb_tokenizer_eod(const struct mb_tokenizer *t)
{
    return t->type->eod(t->self);
}

int32_t mb_tokenizer_bos(const struct mb_tokenizer *t)
{
    return t->type->bos != NULL ? t->type->bos(t->self) : -1;
}

const char *mb_tokenizer_family(const struct mb_tokenizer *t)
{
    return t->type->family != NULL ? t->type->family(t->self) : NULL;
}

const char *mb_tokenizer_pattern(const struct mb_tokenizer *t)
{
    return t->type->pattern != NULL ? t->type->pattern(t->self) : NULL;
}

size_t mb_tokenizer_n_added(const struct mb_tokenizer *t)
{
    return t->type->n_added != NULL ? t->type->n_added(t->self) : 0;
}

void mb_tokenizer_added(const struct mb_tokenizer *t, size_t i, struct mb_tokenizer_added *out)
{
    *out = (struct mb_tokenizer_added){0};
    if (t->type->added != NULL)
        t->type->added(t->self, i, out);
}

int mb_tokenizer_scratch_create(const struct mb_tokenizer *t, struct mb_tokenizer_scratch **out,
                                struct mb_err *err)
{
    struct mb_tokenizer_scratch *s = mb_calloc(1, sizeof(*s));
    int rc = 0;

    if (s == NULL)
        return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
    s->type = t->type;
    if (t->type->scratch_create != NULL)
        rc = t->type->scratch_create(t->self, &s->scratch, err);
    if (rc != 0)
        mb_free(s);
    else
        *out = s;
    return rc;
}

void mb_tokenizer_scratch_destroy(struct mb_tokenizer_scratch *s)
{
    if (s == NULL)
        return;
    if (s->type->scratch_destroy != NULL)
        s->type->scratch_destroy(s->scratch);
    mb_free(s);
}

int mb_tokenizer_encode_many(const struct mb_tokenizer *t, struct mb_tokenizer_scratch *s,
                             const struct mb_tokenizer_text *texts, size_t n, size_t *ends,
                             struct mb_ids *out, struct mb_err *err)
{
    struct mb_tokenizer_engine waits = {0};
    size_t before = out->n;
    int rc = 0;

    if (t->type->engine != NULL)
        waits = t->type->engine(t->self, s->scratch);
    for (size_t i = 0; rc == 0 && i < n; i++) {
        rc = t->type->encode(t->self, s->scratch, texts[i].text, texts[i].n, out, err);
        if (waits.b == NULL)
            ends[i] = out->n;
        else if (rc == 0)
            rc = mb_bytelevel_end_text(waits.b, waits.s, out, &ends[i], err);
    }
    if (rc == 0 && waits.b != NULL)
        rc = mb_bytelevel_settle(waits.b, waits.s, out, err);
    if (rc != 0 && waits.b != NULL)
        mb_bytelevel_drop(waits.s);
    if (rc != 0)
        out->n = before;
    return rc;
}

int mb_tokenizer_encode(const struct mb_tokenizer *t, struct mb_tokenizer_scratch *s,
                        const void *text, size_t n, struct mb_ids *out, struct mb_err *err)
{
    struct mb_tokenizer_text one = {text, n};
    size_t end;

    return mb_tokenizer_encode_many(t, s, &one, 1, &end, out, err);
}

int mb_tokenizer_decode(const struct mb_tokenizer *t, const int32_t *ids, size_t n,
                        struct mb_buf *out, struct mb_err *err)
{
    return t->type->decode(t->self, ids, n, out, err);
}
