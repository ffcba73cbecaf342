/*
 * Tokenizes for the comparisons in tests/integration/data:
 *   dump_tokens [--lossy] --FLAG VALUE...       a tokenizer by the flags of options_table.h
 *   dump_tokens [--lossy] ranks FILE FAMILY     the engine alone: a tiktoken vocabulary, cut by
 * FAMILY Input: u32 length and that many bytes of text, repeated; output: u32 count and that many
 * i32 ids. Every record is also decoded again and must give its bytes, but with --lossy (a
 * tokenizer that changes the text first). FILE: u32 id, u32 length and that many bytes a token,
 * repeated.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "worker/data/tokenizer/bytelevel.h"
#include "worker/data/tokenizer/options_table.h"

struct engine {
    struct mb_tokenizer *tokenizer; /* NULL: bytelevel */
    struct mb_tokenizer_scratch *scratch;
    struct mb_bytelevel *bytelevel;
    struct mb_bytelevel_scratch *bytelevel_scratch;
};

static int encode(const struct engine *e, const uint8_t *text, size_t n, struct mb_ids *ids,
                  struct mb_err *err)
{
    int rc;

    if (e->tokenizer != NULL)
        return mb_tokenizer_encode(e->tokenizer, e->scratch, text, n, ids, err);
    rc = mb_bytelevel_encode(e->bytelevel, e->bytelevel_scratch, text, n, ids, err);
    return rc == 0 ? mb_bytelevel_settle(e->bytelevel, e->bytelevel_scratch, ids, err) : rc;
}

static int decode(const struct engine *e, const struct mb_ids *ids, struct mb_buf *out,
                  struct mb_err *err)
{
    return e->tokenizer != NULL ? mb_tokenizer_decode(e->tokenizer, ids->data, ids->n, out, err)
                                : mb_bytelevel_decode(e->bytelevel, ids->data, ids->n, out, err);
}

static int answer(const struct engine *e, int is_lossy, const uint8_t *text, uint32_t n,
                  struct mb_ids *ids, struct mb_buf *back, struct mb_err *err)
{
    uint32_t count;
    int rc;

    ids->n = 0;
    mb_buf_reset(back);
    rc = encode(e, text, n, ids, err);
    if (rc == 0)
        rc = decode(e, ids, back, err);
    if (rc == 0 && !is_lossy && (back->len != n || (n > 0 && memcmp(back->data, text, n) != 0)))
        rc = mb_err_set(err, MB_ECORRUPT, "decoding gives other bytes");
    count = (uint32_t)ids->n;
    fwrite(&count, sizeof(count), 1, stdout);
    if (count > 0)
        fwrite(ids->data, sizeof(*ids->data), count, stdout);
    return rc;
}

/* One flag of options_table.h; 0 if there is none of that name. */
static int set_flag(struct mb_tokenizer_options *o, const char *flag, const char *value)
{
    int n_set = strcmp(flag, "tokenizer-type") == 0;

    if (n_set)
        o->type = value;
/* clang-format off */
#define TEXT(flag_, field_) if (strcmp(flag, flag_) == 0) { o->field_ = value; n_set++; }
#define INT(flag_, field_)                                                                         \
    if (strcmp(flag, flag_) == 0) { o->field_ = strtoll(value, NULL, 10); n_set++; }
#define LIST(flag_, field_)
#define FLAG_OFF(flag_, field_)
#define X(flag_, kind_, field_, default_, argument_, help_) kind_(flag_, field_)
    MB_TOKENIZER_FLAGS(X)
    /* clang-format on */
    return n_set;
}

static int by_flags(char **args, struct engine *e, struct mb_err *err)
{
    struct mb_tokenizer_options o = {0};
    int rc = 0;

    for (; rc == 0 && args[0] != NULL; args += 2) {
        if (args[1] == NULL)
            return mb_err_set(err, MB_EINVAL, "%s: no value", args[0]);
        if (strncmp(args[0], "--", 2) != 0 || !set_flag(&o, args[0] + 2, args[1]))
            rc = mb_err_set(err, MB_EINVAL, "%s: unknown", args[0]);
    }
    if (rc == 0)
        rc = mb_tokenizer_create(&o, &e->tokenizer, err);
    if (rc == 0)
        rc = mb_tokenizer_scratch_create(e->tokenizer, &e->scratch, err);
    return rc;
}

static int family_named(const char *name, enum mb_split_family *out, struct mb_err *err)
{
    for (int family = 0; family < MB_SPLIT_REGEX; family++) {
        if (strcmp(mb_split_family_name((enum mb_split_family)family), name) == 0) {
            *out = (enum mb_split_family)family;
            return 0;
        }
    }
    return mb_err_set(err, MB_EINVAL, "%s: no such family", name);
}

/* The tokens of a file into a borrowed array over its bytes. */
static size_t parse_tokens(const struct mb_buf *file, struct mb_bpe_token *tokens, uint64_t *ids)
{
    size_t n = 0;

    *ids = 0;
    for (size_t at = 0; at + 8 <= file->len; n++) {
        uint32_t head[2];

        memcpy(head, file->data + at, sizeof(head));
        tokens[n] = (struct mb_bpe_token){file->data + at + 8, head[1], (int32_t)head[0], 0};
        *ids = head[0] >= *ids ? head[0] + 1 : *ids;
        at += 8 + head[1];
    }
    return n;
}

static int by_ranks(char **args, struct engine *e, struct mb_err *err)
{
    struct mb_bpe_model model = {.eod = -1, .ignore_merges = 1};
    struct mb_bpe_token *tokens = NULL;
    struct mb_bpe_merge *merges = NULL;
    struct mb_buf file = {0};
    struct mb_bpe *bpe = NULL;
    enum mb_split_family family = MB_SPLIT_WHOLE;
    int rc = args[1] != NULL && args[2] != NULL && args[3] == NULL
                 ? family_named(args[2], &family, err)
                 : mb_err_set(err, MB_EINVAL, "ranks FILE FAMILY");

    if (rc == 0)
        rc = mb_fs_read(args[1], (size_t)64 << 20, &file, err);
    if (rc == 0 && (tokens = mb_alloc((file.len / 8 + 1) * sizeof(*tokens))) == NULL)
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    if (rc != 0)
        goto out;
    model.n_tokens = parse_tokens(&file, tokens, &model.vocab_size);
    rc = mb_bpe_merges_of_ranks(tokens, model.n_tokens, &merges, &model.n_merges, err);
    if (rc != 0)
        goto out;
    model.tokens = tokens;
    model.merges = merges;
    rc = mb_bpe_create(&model, &bpe, err);
    if (rc == 0)
        rc = mb_bytelevel_create(bpe, family, NULL, &e->bytelevel, err);
    if (rc == 0)
        rc = mb_bytelevel_scratch_create(e->bytelevel, &e->bytelevel_scratch, err);
    if (e->bytelevel == NULL)
        mb_bpe_destroy(bpe);
out:
    mb_free(merges);
    mb_free(tokens);
    mb_buf_close(&file);
    return rc;
}

int main(int argc, char **argv)
{
    struct engine e = {0};
    struct mb_ids ids = {0};
    struct mb_buf back = {0};
    struct mb_err err = {0};
    int is_lossy = argc > 1 && strcmp(argv[1], "--lossy") == 0;
    char **args = argv + 1 + is_lossy;
    uint32_t n;
    int rc = args[0] != NULL && strcmp(args[0], "ranks") == 0 ? by_ranks(args, &e, &err)
                                                              : by_flags(args, &e, &err);

    while (rc == 0 && fread(&n, sizeof(n), 1, stdin) == 1) {
        uint8_t *text = mb_alloc(n);

        if (text == NULL || fread(text, 1, n, stdin) != n)
            rc = mb_err_set(&err, MB_EIO, "short record");
        else
            rc = answer(&e, is_lossy, text, n, &ids, &back, &err);
        mb_free(text);
    }
    if (rc != 0)
        fprintf(stderr, "%s\n", err.text);
    mb_ids_close(&ids);
    mb_buf_close(&back);
    mb_tokenizer_scratch_destroy(e.scratch);
    mb_tokenizer_destroy(e.tokenizer);
    mb_bytelevel_scratch_destroy(e.bytelevel_scratch);
    mb_bytelevel_destroy(e.bytelevel);
    return rc != 0;
}
