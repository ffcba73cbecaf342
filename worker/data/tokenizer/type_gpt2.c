/* GPT2BPETokenizer: vocab.json and merges.txt, cut by GPT-2's pattern. */
#include "worker/data/tokenizer/bytelevel.h"
#include "worker/data/tokenizer/type.h"

static int create(const struct mb_tokenizer_options *o, void **self, struct mb_err *err)
{
    struct mb_bpe *bpe = NULL;
    struct mb_bytelevel *b;
    int rc;

    if (o->vocab_file == NULL || o->merge_file == NULL)
        return mb_err_set(err, MB_EINVAL,
                          "GPT2BPETokenizer needs --vocab-file (vocab.json) and --merge-file "
                          "(merges.txt)");
    rc = mb_bpe_load(o->vocab_file, o->merge_file, &bpe, err);
    if (rc != 0)
        return rc;
    rc = mb_bytelevel_create(bpe, MB_SPLIT_GPT2, NULL, &b, err);
    if (rc != 0)
        mb_bpe_destroy(bpe);
    else
        *self = b;
    return rc;
}

static void destroy(void *self)
{
    mb_bytelevel_destroy(self);
}

static uint64_t vocab_size(const void *self)
{
    return mb_bpe_vocab_size(mb_bytelevel_bpe(self));
}

static int32_t eod(const void *self)
{
    return mb_bpe_eod(mb_bytelevel_bpe(self));
}

static const char *family(const void *self)
{
    return mb_split_family_name(mb_bytelevel_family(self));
}

static const char *pattern(const void *self)
{
    return mb_split_pattern(mb_bytelevel_family(self));
}

static int scratch_create(const void *self, void **scratch, struct mb_err *err)
{
    struct mb_bytelevel_scratch *s;
    int rc = mb_bytelevel_scratch_create(self, &s, err);

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
    return mb_bytelevel_encode(self, scratch, text, n, out, err);
}

static struct mb_tokenizer_engine engine(const void *self, void *scratch)
{
    return (struct mb_tokenizer_engine){self, scratch};
}

static int decode(const void *self, const int32_t *ids, size_t n, struct mb_buf *out,
                  struct mb_err *err)
{
    return mb_bytelevel_decode(self, ids, n, out, err);
}

const struct mb_tokenizer_type mb_tokenizer_gpt2 = {
    .name = "GPT2BPETokenizer",
    .create = create,
    .destroy = destroy,
    .vocab_size = vocab_size,
    .eod = eod,
    .family = family,
    .pattern = pattern,
    .scratch_create = scratch_create,
    .scratch_destroy = scratch_destroy,
    .engine = engine,
    .encode = encode,
    .decode = decode,
};
