/* Readers of outside bytes behind HuggingFaceTokenizer and TikTokenizer; the first byte says which:
 * p a pattern, whose matches must ascend; n the normal form, which must be stable; t a tiktoken
 * file; anything else is a tokenizer.json. All is read or refused, never more, and what is read
 * encodes. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/buf.h"
#include "base/fs.h"
#include "worker/data/tokenizer/nfc.h"
#include "worker/data/tokenizer/split_regex.h"
#include "worker/data/tokenizer/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void fuzz_pattern(const uint8_t *data, size_t size)
{
    static const char text[] = "Ab 12 \u00e9\n\n  don't x";
    struct mb_split_regex *r;
    struct mb_split_regex_work *w;
    struct mb_split_walk walk = {.text = (const uint8_t *)text, .n = sizeof(text) - 1};
    size_t start, end, last = 0;

    if (size > 200 || mb_split_regex_create((const char *)data, size, &r, NULL) != 0)
        return;
    if (mb_split_regex_work_create(&w, NULL) == 0) {
        while (mb_split_regex_next(r, w, &walk, &start, &end, NULL) == 1) {
            if (start < last || end < start || end > walk.n)
                abort();
            last = end;
        }
        mb_split_regex_work_destroy(w);
    }
    mb_split_regex_destroy(r);
}

static void fuzz_normal_form(const uint8_t *data, size_t size)
{
    static struct mb_nfc *nfc;
    struct mb_nfc_work work = {0};
    struct mb_buf once = {0}, twice = {0};

    if (nfc == NULL && mb_nfc_create(&nfc, NULL) != 0)
        return;
    mb_nfc_append(nfc, &work, data, size, &once);
    mb_nfc_append(nfc, &work, (const uint8_t *)mb_buf_str(&once), once.len, &twice);
    if (once.len != twice.len || memcmp(mb_buf_str(&once), mb_buf_str(&twice), once.len) != 0)
        abort();
    mb_buf_close(&once);
    mb_buf_close(&twice);
    mb_nfc_work_close(&work);
}

static void fuzz_file(const char *type, const uint8_t *data, size_t size)
{
    static char path[64];
    struct mb_tokenizer_options o = {.type = type, .tokenizer_model = path, .vocab_size = 300};
    struct mb_tokenizer *t;
    struct mb_tokenizer_scratch *s;
    struct mb_ids ids = {0};
    FILE *file;

    snprintf(path, sizeof(path), "/tmp/mobula-fuzz-hf-%ld", (long)getpid());
    file = fopen(path, "wb");
    if (file == NULL)
        abort();
    fwrite(data, 1, size, file);
    fclose(file);
    if (mb_tokenizer_create(&o, &t, NULL) == 0) {
        if (mb_tokenizer_scratch_create(t, &s, NULL) == 0) {
            mb_tokenizer_encode(t, s, "some text", 9, &ids, NULL);
            mb_tokenizer_scratch_destroy(s);
        }
        mb_tokenizer_destroy(t);
    }
    mb_ids_close(&ids);
    unlink(path);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    switch (data[0]) {
    case 'p':
        fuzz_pattern(data + 1, size - 1);
        break;
    case 'n':
        fuzz_normal_form(data + 1, size - 1);
        break;
    case 't':
        fuzz_file("TikTokenizer", data + 1, size - 1);
        break;
    default:
        fuzz_file("HuggingFaceTokenizer", data, size);
        break;
    }
    return 0;
}
