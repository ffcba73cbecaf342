/*
 * Megatron-LM's three tokenizers over a SentencePiece model file, --tokenizer-model
 * (megatron/training/tokenizer/tokenizer.py, the classes that its released versions train with):
 *
 *   Llama2Tokenizer            BOS in front of every text; eod = EOS; size = the pieces
 *   GPTSentencePieceTokenizer  the model's ids as they are; eod = EOS; size = the pieces
 *   SentencePieceTokenizer     <CLS>, <SEP>, <EOD>, <MASK> and the model's padding, BOS and EOS
 *                              pieces (<PAD>, <BOS>, <EOS> where it has none) are matched in the
 *                              text, the earliest first; those that are no piece get ids behind
 *                              the pieces; eod = <EOD>
 *
 * 1. The type decides at creation what stands before a text, what is matched in it and what the eod
 * is. 2. SentencePieceTokenizer keeps the next place of each of its strings while it goes through a
 * text, so that each is searched for once: linear. What stands between two of them is encoded by
 * itself. 3. Decoding puts a space before and behind such a string, as Megatron-LM does.
 */
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/sentencepiece/spm.h"
#include "worker/data/tokenizer/type.h"

enum { MAX_ADDED = 7 };

struct over_model {
    struct mb_spm *model;
    int has_bos_in_front;
    uint64_t vocab_size;
    int32_t eod, bos;
    struct mb_tokenizer_added added[MAX_ADDED];
    size_t n_added;
};

/* A string to match: the piece of that text, else the next id behind the pieces. */
static int32_t add(struct over_model *t, const char *text, size_t n)
{
    int32_t id = mb_spm_piece_id(t->model, text, n);

    for (size_t i = 0; i < t->n_added; i++) {
        if (t->added[i].n == n && memcmp(t->added[i].text, text, n) == 0)
            return t->added[i].id;
    }
    if (id < 0)
        id = (int32_t)t->vocab_size++;
    t->added[t->n_added++] = (struct mb_tokenizer_added){text, n, id, 1};
    return id;
}

/* The model's own piece, or Megatron-LM's name for what it lacks. */
static int32_t add_piece(struct over_model *t, int32_t id, const char *name)
{
    size_t n;
    const uint8_t *text = mb_spm_piece(t->model, id, &n);

    return text != NULL ? add(t, (const char *)text, n) : add(t, name, strlen(name));
}

static void add_all(struct over_model *t)
{
    add(t, "<CLS>", 5);
    add(t, "<SEP>", 5);
    t->eod = add(t, "<EOD>", 5);
    add(t, "<MASK>", 6);
    add_piece(t, mb_spm_pad(t->model), "<PAD>");
    t->bos = add_piece(t, mb_spm_bos(t->model), "<BOS>");
    add_piece(t, mb_spm_eos(t->model), "<EOS>");
}

static void destroy(void *self)
{
    struct over_model *t = self;

    mb_spm_destroy(t->model);
    mb_free(t);
}

/* A model without anything around it. */
static int open_model(const char *type, const struct mb_tokenizer_options *o,
                      struct over_model **out, struct mb_err *err)
{
    struct over_model *t;
    int rc;

    if (o->tokenizer_model == NULL)
        return mb_err_set(err, MB_EINVAL, "%s needs --tokenizer-model (a SentencePiece model file)",
                          type);
    t = mb_calloc(1, sizeof(*t));
    if (t == NULL)
        return mb_err_set(err, MB_ENOMEM, "tokenizer: out of memory");
    rc = mb_spm_load(o->tokenizer_model, &t->model, err);
    if (rc != 0) {
        mb_err_wrap(err, "--tokenizer-model");
        mb_free(t);
        return rc;
    }
    t->vocab_size = mb_spm_n_pieces(t->model);
    t->eod = mb_spm_eos(t->model);
    t->bos = mb_spm_bos(t->model);
    *out = t;
    return 0;
}

static int create_llama2(const struct mb_tokenizer_options *o, void **self, struct mb_err *err)
{
    struct over_model *t = NULL;
    int rc = open_model("Llama2Tokenizer", o, &t, err);

    if (rc != 0)
        return rc;
    t->has_bos_in_front = 1;
    if (t->bos < 0) {
        destroy(t);
        return mb_err_set(err, MB_EINVAL,
                          "--tokenizer-model %s: no beginning-of-sentence piece, which "
                          "Llama2Tokenizer puts before every text; GPTSentencePieceTokenizer does "
                          "not need it",
                          o->tokenizer_model);
    }
    *self = t;
    return 0;
}

static int create_gpt(const struct mb_tokenizer_options *o, void **self, struct mb_err *err)
{
    struct over_model *t = NULL;
    int rc = open_model("GPTSentencePieceTokenizer", o, &t, err);

    if (rc == 0)
        *self = t;
    return rc;
}

static int create_with_added(const struct mb_tokenizer_options *o, void **self, struct mb_err *err)
{
    struct over_model *t = NULL;
    int rc = open_model("SentencePieceTokenizer", o, &t, err);

    if (rc != 0)
        return rc;
    add_all(t);
    *self = t;
    return 0;
}

static uint64_t vocab_size(const void *self)
{
    return ((const struct over_model *)self)->vocab_size;
}

static int32_t eod(const void *self)
{
    return ((const struct over_model *)self)->eod;
}

static int32_t bos(const void *self)
{
    return ((const struct over_model *)self)->bos;
}

static const char *family(const void *self)
{
    return mb_spm_algorithm_name(((const struct over_model *)self)->model);
}

static size_t n_added(const void *self)
{
    return ((const struct over_model *)self)->n_added;
}

static void added(const void *self, size_t i, struct mb_tokenizer_added *out)
{
    *out = ((const struct over_model *)self)->added[i];
}

static int scratch_create(const void *self, void **scratch, struct mb_err *err)
{
    struct mb_spm_scratch *s;
    int rc = mb_spm_scratch_create(((const struct over_model *)self)->model, &s, err);

    if (rc == 0)
        *scratch = s;
    return rc;
}

static void scratch_destroy(void *scratch)
{
    mb_spm_scratch_destroy(scratch);
}

static const char *find(const struct mb_tokenizer_added *a, const char *p, const char *end)
{
    const char *at = memmem(p, (size_t)(end - p), a->text, a->n);

    return at != NULL ? at : end;
}

static int add_id(struct mb_ids *out, int32_t id)
{
    if (mb_ids_reserve(out, 1) != 0)
        return MB_ENOMEM;
    out->data[out->n++] = id;
    return 0;
}

static int encode_with_added(const struct over_model *t, struct mb_spm_scratch *s, const char *p,
                             const char *end, struct mb_ids *out)
{
    const char *next[MAX_ADDED];
    int rc = 0;

    for (size_t i = 0; i < t->n_added; i++)
        next[i] = find(&t->added[i], p, end);
    while (rc == 0 && p < end) {
        size_t first = 0;

        for (size_t i = 1; i < t->n_added; i++)
            first = next[i] < next[first] ? i : first;
        rc = mb_spm_encode(t->model, s, p, (size_t)(next[first] - p), out);
        if (rc != 0 || next[first] == end)
            break;
        rc = add_id(out, t->added[first].id);
        p = next[first] + t->added[first].n;
        for (size_t i = 0; i < t->n_added; i++) {
            if (next[i] < p)
                next[i] = find(&t->added[i], p, end);
        }
    }
    return rc;
}

static int encode(const void *self, void *scratch, const uint8_t *text, size_t n,
                  struct mb_ids *out, struct mb_err *err)
{
    const struct over_model *t = self;
    int rc;

    if (t->n_added > 0)
        rc = encode_with_added(t, scratch, (const char *)text, (const char *)text + n, out);
    else if (t->has_bos_in_front && add_id(out, t->bos) != 0)
        rc = MB_ENOMEM;
    else
        rc = mb_spm_encode(t->model, scratch, text, n, out);
    return rc == 0 ? 0 : mb_err_set(err, rc, "tokenizer: out of memory");
}

static const struct mb_tokenizer_added *added_of(const struct over_model *t, int32_t id)
{
    for (size_t i = 0; i < t->n_added; i++) {
        if (t->added[i].id == id)
            return &t->added[i];
    }
    return NULL;
}

static int decode(const void *self, const int32_t *ids, size_t n, struct mb_buf *out,
                  struct mb_err *err)
{
    const struct over_model *t = self;
    size_t before = out->len;
    size_t start = 0;
    int rc = 0;

    for (size_t i = 0; rc == 0 && i < n; i++) {
        const struct mb_tokenizer_added *a = added_of(t, ids[i]);
        if (a == NULL)
            continue;
        rc = mb_spm_decode(t->model, ids + start, i - start, out);
        if (rc == 0)
            rc = mb_buf_printf(out, " %.*s ", (int)a->n, a->text);
        start = i + 1;
    }
    if (rc == 0)
        rc = mb_spm_decode(t->model, ids + start, n - start, out);
    if (rc != 0 && out->data != NULL) {
        out->len = before;
        out->data[before] = 0;
    }
    if (rc == MB_EINVAL)
        return mb_err_set(err, rc, "an id is outside the vocabulary of %llu",
                          (unsigned long long)t->vocab_size);
    return rc == 0 ? 0 : mb_err_set(err, rc, "tokenizer: out of memory");
}

const struct mb_tokenizer_type mb_tokenizer_llama2 = {
    .name = "Llama2Tokenizer",
    .create = create_llama2,
    .destroy = destroy,
    .vocab_size = vocab_size,
    .eod = eod,
    .bos = bos,
    .family = family,
    .n_added = n_added,
    .added = added,
    .scratch_create = scratch_create,
    .scratch_destroy = scratch_destroy,
    .encode = encode,
    .decode = decode,
};
const struct mb_tokenizer_type mb_tokenizer_gpt_sentencepiece = {
    .name = "GPTSentencePieceTokenizer",
    .create = create_gpt,
    .destroy = destroy,
    .vocab_size = vocab_size,
    .eod = eod,
    .bos = bos,
    .family = family,
    .n_added = n_added,
    .added = added,
    .scratch_create = scratch_create,
    .scratch_destroy = scratch_destroy,
    .encode = encode,
    .decode = decode,
};
const struct mb_tokenizer_type mb_tokenizer_sentencepiece = {
    .name = "SentencePieceTokenizer",
    .create = create_with_added,
    .destroy = destroy,
    .vocab_size = vocab_size,
    .eod = eod,
    .bos = bos,
    .family = family,
    .n_added = n_added,
    .added = added,
    .scratch_create = scratch_create,
    .scratch_destroy = scratch_destroy,
    .encode = encode,
    .decode = decode,
};
