/*
 * Any tokenizer, for the comparisons in tests/integration/data:
 *   dump_ids TYPE MODEL [PATTERN [NUM_SPECIAL [VOCAB_SIZE [SPECIAL...]]]] < records > records
 * ("-" is an option not given.) Output: u64 size of the vocabulary, i32 eod, i32 bos; then for
 * every record (u32 length, bytes) u32 count and that many i32 ids. Status 1 and the error on
 * stderr when something is refused.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "worker/data/tokenizer/tokenizer.h"

static const char *given(int argc, char **argv, int i)
{
    return argc > i && strcmp(argv[i], "-") != 0 ? argv[i] : NULL;
}

static int64_t number(int argc, char **argv, int i)
{
    const char *text = given(argc, argv, i);

    return text != NULL ? strtoll(text, NULL, 10) : 0;
}

static int answer_all(const struct mb_tokenizer *t, struct mb_tokenizer_scratch *s,
                      struct mb_err *err)
{
    struct mb_ids ids = {0};
    uint32_t n, count;
    int rc = 0;

    while (rc == 0 && fread(&n, sizeof(n), 1, stdin) == 1) {
        uint8_t *text = mb_alloc(n);
        ids.n = 0;
        if (text == NULL || fread(text, 1, n, stdin) != n)
            rc = mb_err_set(err, MB_EIO, "short record");
        else
            rc = mb_tokenizer_encode(t, s, text, n, &ids, err);
        count = (uint32_t)ids.n;
        fwrite(&count, sizeof(count), 1, stdout);
        if (count > 0)
            fwrite(ids.data, sizeof(*ids.data), count, stdout);
        mb_free(text);
    }
    mb_ids_close(&ids);
    return rc;
}

int main(int argc, char **argv)
{
    struct mb_tokenizer_options o = {
        .type = given(argc, argv, 1),
        .tokenizer_model = given(argc, argv, 2),
        .tiktoken_pattern = given(argc, argv, 3),
        .tiktoken_num_special_tokens = number(argc, argv, 4),
        .vocab_size = number(argc, argv, 5),
        .tiktoken_special_tokens = argc > 6 ? (const char *const *)&argv[6] : NULL,
        .n_tiktoken_special_tokens = argc > 6 ? (size_t)argc - 6 : 0,
    };
    struct mb_tokenizer *t = NULL;
    struct mb_tokenizer_scratch *s = NULL;
    struct mb_err err = {0};
    int rc = mb_tokenizer_create(&o, &t, &err);

    if (rc == 0)
        rc = mb_tokenizer_scratch_create(t, &s, &err);
    if (rc == 0) {
        uint64_t size = mb_tokenizer_vocab_size(t);
        int32_t eod = mb_tokenizer_eod(t), bos = mb_tokenizer_bos(t);
        fwrite(&size, sizeof(size), 1, stdout);
        fwrite(&eod, sizeof(eod), 1, stdout);
        fwrite(&bos, sizeof(bos), 1, stdout);
        rc = answer_all(t, s, &err);
    }
    if (rc != 0)
        fprintf(stderr, "%s\n", err.text);
    mb_tokenizer_scratch_destroy(s);
    mb_tokenizer_destroy(t);
    return rc != 0;
}
