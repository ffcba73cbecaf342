/*
 * Encodes and decodes with a SentencePiece model for the comparison in tests/integration/data:
 *   dump_spm TYPE MODEL < records > records
 * TYPE: a --tokenizer-type, or "model" for the bare model. Input: u32 length and that many bytes of
 * text, repeated. Output: the tokenizer's size and eod as two i32; then for each text u32 count and
 * that many i32 ids, u32 length and that many bytes decoded from them.
 */
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/sentencepiece/spm.h"
#include "worker/data/tokenizer/tokenizer.h"

/* Either of the two. */
struct coder {
    struct mb_spm *model;
    struct mb_spm_scratch *model_scratch;
    struct mb_tokenizer *tokenizer;
    struct mb_tokenizer_scratch *scratch;
};

static int open_coder(struct coder *c, const char *type, const char *file, struct mb_err *err)
{
    struct mb_tokenizer_options o = {.type = type, .tokenizer_model = file};
    int rc;

    if (strcmp(type, "model") == 0) {
        rc = mb_spm_load(file, &c->model, err);
        return rc == 0 ? mb_spm_scratch_create(c->model, &c->model_scratch, err) : rc;
    }
    rc = mb_tokenizer_create(&o, &c->tokenizer, err);
    return rc == 0 ? mb_tokenizer_scratch_create(c->tokenizer, &c->scratch, err) : rc;
}

static void close_coder(struct coder *c)
{
    mb_spm_scratch_destroy(c->model_scratch);
    mb_spm_destroy(c->model);
    mb_tokenizer_scratch_destroy(c->scratch);
    mb_tokenizer_destroy(c->tokenizer);
}

static int answer(const struct coder *c, const uint8_t *text, uint32_t n, struct mb_ids *ids,
                  struct mb_buf *back, struct mb_err *err)
{
    uint32_t count;
    int rc;

    ids->n = 0;
    mb_buf_reset(back);
    if (c->model != NULL) {
        rc = mb_spm_encode(c->model, c->model_scratch, text, n, ids);
        if (rc == 0)
            rc = mb_spm_decode(c->model, ids->data, ids->n, back);
    } else {
        rc = mb_tokenizer_encode(c->tokenizer, c->scratch, text, n, ids, err);
        if (rc == 0)
            rc = mb_tokenizer_decode(c->tokenizer, ids->data, ids->n, back, err);
    }
    count = (uint32_t)ids->n;
    fwrite(&count, sizeof(count), 1, stdout);
    fwrite(ids->data, sizeof(*ids->data), count, stdout);
    count = (uint32_t)back->len;
    fwrite(&count, sizeof(count), 1, stdout);
    fwrite(back->data, 1, count, stdout);
    return rc;
}

static void head(const struct coder *c)
{
    int32_t pair[2];

    pair[0] = c->model != NULL ? (int32_t)mb_spm_n_pieces(c->model)
                               : (int32_t)mb_tokenizer_vocab_size(c->tokenizer);
    pair[1] = c->model != NULL ? mb_spm_eos(c->model) : mb_tokenizer_eod(c->tokenizer);
    fwrite(pair, sizeof(*pair), 2, stdout);
}

int main(int argc, char **argv)
{
    struct coder c = {0};
    struct mb_ids ids = {0};
    struct mb_buf back = {0};
    struct mb_err err = {0};
    uint32_t n;
    int rc;

    if (argc != 3) {
        fputs("usage: dump_spm TYPE MODEL\n", stderr);
        return 64;
    }
    rc = open_coder(&c, argv[1], argv[2], &err);
    if (rc == 0)
        head(&c);
    while (rc == 0 && fread(&n, sizeof(n), 1, stdin) == 1) {
        uint8_t *text = mb_alloc(n);
        if (text == NULL || fread(text, 1, n, stdin) != n)
            rc = mb_err_set(&err, MB_EIO, "short record");
        else
            rc = answer(&c, text, n, &ids, &back, &err);
        mb_free(text);
    }
    if (rc != 0)
        fprintf(stderr, "%s\n", err.text);
    mb_ids_close(&ids);
    mb_buf_close(&back);
    close_coder(&c);
    return rc != 0;
}
