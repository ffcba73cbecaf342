/*
 * Tokenizes for the comparison in tests/integration/data:
 *   dump_tokens VOCAB MERGES < records > records
 * Input: u32 length and that many bytes of text, repeated; output: u32 count and that many i32 ids.
 * Every record is also decoded again and must give its bytes.
 */
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/tokenizer.h"

static int answer(const struct mb_tokenizer *t, struct mb_tokenizer_scratch *s, const uint8_t *text,
                  uint32_t n, struct mb_ids *ids, struct mb_buf *back, struct mb_err *err)
{
    uint32_t count;
    int rc;

    ids->n = 0;
    mb_buf_reset(back);
    rc = mb_tokenizer_encode(t, s, text, n, ids, err);
    if (rc == 0)
        rc = mb_tokenizer_decode(t, ids->data, ids->n, back, err);
    if (rc == 0 && (back->len != n || (n > 0 && memcmp(back->data, text, n) != 0)))
        rc = mb_err_set(err, MB_ECORRUPT, "decoding gives other bytes");
    count = (uint32_t)ids->n;
    fwrite(&count, sizeof(count), 1, stdout);
    fwrite(ids->data, sizeof(*ids->data), count, stdout);
    return rc;
}

int main(int argc, char **argv)
{
    struct mb_tokenizer_options o = {.vocab_file = argc > 1 ? argv[1] : NULL,
                                     .merge_file = argc > 2 ? argv[2] : NULL};
    struct mb_tokenizer *t = NULL;
    struct mb_tokenizer_scratch *s = NULL;
    struct mb_ids ids = {0};
    struct mb_buf back = {0};
    struct mb_err err = {0};
    uint32_t n;
    int rc = mb_tokenizer_create(&o, &t, &err);

    if (rc == 0)
        rc = mb_tokenizer_scratch_create(t, &s, &err);
    while (rc == 0 && fread(&n, sizeof(n), 1, stdin) == 1) {
        uint8_t *text = mb_alloc(n);
        if (text == NULL || fread(text, 1, n, stdin) != n)
            rc = mb_err_set(&err, MB_EIO, "short record");
        else
            rc = answer(t, s, text, n, &ids, &back, &err);
        mb_free(text);
    }
    if (rc != 0)
        fprintf(stderr, "%s\n", err.text);
    mb_ids_close(&ids);
    mb_buf_close(&back);
    mb_tokenizer_scratch_destroy(s);
    mb_tokenizer_destroy(t);
    return rc != 0;
}
