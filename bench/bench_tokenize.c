/*
 * Tokenizer speed on fresh text, one thread:
 *   bench_tokenize VOCAB MERGES TEXT_FILE
 * The file is cut into 16 kB documents at newlines and encoded once; UTF-8 MB per CPU-second is
 * printed.
 */
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "base/fs.h"
#include "worker/data/tokenizer/tokenizer.h"

static double cpu_seconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

int main(int argc, char **argv)
{
    struct mb_tokenizer_options o = {.vocab_file = argc > 1 ? argv[1] : NULL,
                                     .merge_file = argc > 2 ? argv[2] : NULL};
    struct mb_tokenizer *t = NULL;
    struct mb_tokenizer_scratch *s = NULL;
    struct mb_ids ids = {0};
    struct mb_buf text = {0};
    struct mb_err err = {0};
    double started = cpu_seconds();
    double built;
    size_t n_tokens = 0;
    int rc = argc == 4
                 ? mb_tokenizer_create(&o, &t, &err)
                 : mb_err_set(&err, MB_EINVAL, "usage: bench_tokenize VOCAB MERGES TEXT_FILE");

    if (rc == 0)
        rc = mb_tokenizer_scratch_create(t, &s, &err);
    built = cpu_seconds() - started;
    if (rc == 0)
        rc = mb_fs_read(argv[3], (size_t)4 << 30, &text, &err);
    started = cpu_seconds();
    for (size_t at = 0; rc == 0 && at < text.len;) {
        size_t n = text.len - at < 16384 ? text.len - at : 16384;
        const uint8_t *line = memrchr(text.data + at, '\n', n);

        if (line != NULL)
            n = (size_t)(line - (text.data + at)) + 1;
        ids.n = 0;
        rc = mb_tokenizer_encode(t, s, text.data + at, n, &ids, &err);
        n_tokens += ids.n;
        at += n;
    }
    if (rc == 0) {
        double spent = cpu_seconds() - started;
        printf("start-up %.1f ms; %.1f MB, %zu tokens in %.3f CPU-s: %.1f MB/s, %.1f Mtokens/s\n",
               built * 1e3, (double)text.len / 1e6, n_tokens, spent, (double)text.len / 1e6 / spent,
               (double)n_tokens / 1e6 / spent);
    } else {
        fprintf(stderr, "%s\n", err.text);
    }
    mb_ids_close(&ids);
    mb_buf_close(&text);
    mb_tokenizer_scratch_destroy(s);
    mb_tokenizer_destroy(t);
    return rc != 0;
}
