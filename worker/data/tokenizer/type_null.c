/*
 * NullTokenizer: decimal ids separated by one space. A word that is no plain decimal number from 0
 * to --vocab-size is MB_EINVAL with the word.
 */
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/type.h"

struct null {
    int64_t vocab_size; /* --vocab-size, which is also the eod */
};

static int create(const struct mb_tokenizer_options *o, void **self, struct mb_err *err)
{
    struct null *t;

    if (o->vocab_size <= 0 || o->vocab_size >= INT32_MAX)
        return mb_err_set(err, MB_EINVAL, "NullTokenizer needs --vocab-size, from 1 to %d",
                          INT32_MAX - 1);
    t = mb_alloc(sizeof(*t));
    if (t == NULL)
        return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
    t->vocab_size = o->vocab_size;
    *self = t;
    return 0;
}

static uint64_t vocab_size(const void *self)
{
    return (uint64_t)((const struct null *)self)->vocab_size + 1;
}

static int32_t eod(const void *self)
{
    return (int32_t)((const struct null *)self)->vocab_size;
}

/* int(word) of Python for plain decimal numbers; other forms are refused. */
static int parse_id(const struct null *t, const char *word, size_t n, int32_t *out)
{
    int64_t value = 0;

    if (n == 0)
        return MB_EINVAL;
    for (size_t i = 0; i < n; i++) {
        if (word[i] < '0' || word[i] > '9')
            return MB_EINVAL;
        value = value * 10 + (word[i] - '0');
        if (value > t->vocab_size)
            return MB_EINVAL;
    }
    *out = (int32_t)value;
    return 0;
}

static int encode(const void *self, void *scratch, const uint8_t *text, size_t n,
                  struct mb_ids *out, struct mb_err *err)
{
    const struct null *t = self;
    const char *end = (const char *)text + n;

    (void)scratch;
    for (const char *p = (const char *)text;;) {
        const char *space = memchr(p, ' ', (size_t)(end - p));
        size_t length = (size_t)((space != NULL ? space : end) - p);

        if (mb_ids_reserve(out, 1) != 0)
            return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
        if (parse_id(t, p, length, &out->data[out->n]) != 0)
            return mb_err_set(
                err, MB_EINVAL,
                "NullTokenizer: \"%.*s\" is not an id from 0 to %lld; ids are separated "
                "by one space",
                length < 40 ? (int)length : 40, p, (long long)t->vocab_size);
        out->n++;
        if (space == NULL)
            return 0;
        p = space + 1;
    }
}

static int decode(const void *self, const int32_t *ids, size_t n, struct mb_buf *out,
                  struct mb_err *err)
{
    const struct null *t = self;

    for (size_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] > t->vocab_size)
            return mb_err_set(err, MB_EINVAL, "token id %d is outside the vocabulary", (int)ids[i]);
        if (mb_buf_printf(out, i > 0 ? " %d" : "%d", (int)ids[i]) != 0)
            return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
    }
    return 0;
}

const struct mb_tokenizer_type mb_tokenizer_null = {
    .name = "NullTokenizer",
    .create = create,
    .destroy = mb_free,
    .vocab_size = vocab_size,
    .eod = eod,
    .encode = encode,
    .decode = decode,
};
