/*
 * Where the time of preprocess goes, one thread:
 *   bench_tokenize [FLAGS] INPUT.jsonl
 *     --type T --vocab FILE --merge FILE --model PATH    the tokenizer, as mobula preprocess has it
 *     --rounds N       default 3; of each stage the best round counts
 *     --stage NAME     only this one (for valgrind --tool=callgrind)
 *
 * Stages, each over all lines, in MB of UTF-8 text per CPU-second:
 *   json    the texts out of the lines
 *   split   texts into pieces, where the tokenizer's pattern has a scanner
 *   encode  texts into ids, a new cache each round: the text is fresh
 *   again   the same, with the cache of the round before: what the cache is worth, no fair figure
 *   both    json and encode, as a worker of preprocess does it
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "base/fs.h"
#include "worker/data/jsonl.h"
#include "worker/data/tokenizer/split_masks.h"
#include "worker/data/tokenizer/tokenizer.h"

enum { GO_TEXTS = 4096, GO_BYTES = 64 << 10 }; /* as preprocess_chunk.c does it */

struct bench {
    struct mb_tokenizer *tokenizer;
    struct mb_tokenizer_scratch *scratch;
    struct mb_split *split; /* NULL: no scanner */
    struct mb_jsonl *json;
    struct mb_buf input;
    struct mb_buf text; /* of all lines, joined */
    struct mb_buf copy; /* of the texts that wait */
    size_t *ends;       /* of each text */
    size_t n_texts;
    struct mb_ids ids;
    struct mb_tokenizer_text go[GO_TEXTS];
    size_t n_go, go_bytes;
    uint64_t n_tokens;
    uint64_t n_pieces;
    struct mb_err err;
};

static double cpu_seconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* The texts collected so far, in one go. */
static int encode_go(struct bench *b)
{
    static size_t ends[GO_TEXTS];
    int rc;

    b->ids.n = 0;
    rc = mb_tokenizer_encode_many(b->tokenizer, b->scratch, b->go, b->n_go, ends, &b->ids, &b->err);
    b->n_tokens += b->ids.n;
    b->n_go = b->go_bytes = 0;
    return rc;
}

static int encode(struct bench *b, const uint8_t *text, size_t n)
{
    b->go[b->n_go++] = (struct mb_tokenizer_text){text, n};
    b->go_bytes += n;
    return b->n_go == GO_TEXTS || b->go_bytes >= GO_BYTES ? encode_go(b) : 0;
}

/* each: called with every text, may be NULL. */
static int run_json(struct bench *b, int (*each)(struct bench *b, const uint8_t *p, size_t n))
{
    const uint8_t *end = b->input.data + b->input.len;
    const uint8_t *next;
    int rc = 0;

    for (const uint8_t *p = b->input.data; rc == 0 && p < end; p = next) {
        next = memchr(p, '\n', (size_t)(end - p));
        next = next != NULL ? next + 1 : end;
        rc = mb_jsonl_parse(b->json, p, (size_t)(next - p), &b->err);
        for (size_t i = 0; rc == 0 && each != NULL && i < mb_jsonl_n_texts(b->json, 0); i++) {
            size_t n;
            const uint8_t *text = mb_jsonl_text(b->json, 0, i, &n);

            rc = each(b, text, n);
        }
    }
    return rc;
}

/* The parser's text is gone with the next line. */
static int encode_copy(struct bench *b, const uint8_t *text, size_t n)
{
    if (b->n_go == 0)
        mb_buf_reset(&b->copy);
    if (b->copy.cap - b->copy.len < n + 1) {
        int rc = encode_go(b);

        mb_buf_reset(&b->copy);
        if (rc != 0 || mb_buf_reserve(&b->copy, n + 4 * (size_t)GO_BYTES) != 0)
            return rc != 0 ? rc : mb_err_set(&b->err, MB_ENOMEM, "out of memory");
    }
    if (n > 0)
        memcpy(b->copy.data + b->copy.len, text, n);
    b->copy.len += n;
    return encode(b, b->copy.data + b->copy.len - n, n);
}

static int keep(struct bench *b, const uint8_t *text, size_t n)
{
    if (mb_buf_add(&b->text, text, n) != 0)
        return mb_err_set(&b->err, MB_ENOMEM, "out of memory");
    if (b->n_texts % 4096 == 0) {
        size_t *ends = realloc(b->ends, (b->n_texts + 4096) * sizeof(*ends));

        if (ends == NULL)
            return mb_err_set(&b->err, MB_ENOMEM, "out of memory");
        b->ends = ends;
    }
    b->ends[b->n_texts++] = b->text.len;
    return 0;
}

static int stage_json(struct bench *b)
{
    return run_json(b, NULL);
}

static int stage_split(struct bench *b)
{
    static uint16_t ends[MB_WINDOW_ENDS];
    const uint8_t *p = b->text.data;

    for (size_t i = 0; i < b->n_texts; i++) {
        const uint8_t *end = b->text.data + b->ends[i];

        while (p < end) {
            size_t n = mb_split_has_block(b->split->family)
                           ? mb_split_block(b->split, MB_KERNEL_BEST, p, end, ends)
                           : 0;

            p = n > 0 ? p + ends[n - 1] : mb_split_next(b->split, p, end);
            b->n_pieces += n > 0 ? n : 1;
        }
    }
    return 0;
}

static int new_scratch(struct bench *b)
{
    mb_tokenizer_scratch_destroy(b->scratch);
    b->scratch = NULL;
    return mb_tokenizer_scratch_create(b->tokenizer, &b->scratch, &b->err);
}

static int stage_again(struct bench *b)
{
    size_t start = 0;
    int rc = b->scratch == NULL ? new_scratch(b) : 0;

    for (size_t i = 0; rc == 0 && i < b->n_texts; i++) {
        rc = encode(b, b->text.data + start, b->ends[i] - start);
        start = b->ends[i];
    }
    return rc == 0 ? encode_go(b) : rc;
}

static int stage_encode(struct bench *b)
{
    int rc = new_scratch(b);

    return rc == 0 ? stage_again(b) : rc;
}

static int stage_both(struct bench *b)
{
    int rc = new_scratch(b);

    if (rc == 0)
        rc = run_json(b, encode_copy);
    return rc == 0 ? encode_go(b) : rc;
}

static const struct {
    const char *name;
    int (*run)(struct bench *b);
} stages[] = {{"json", stage_json},
              {"split", stage_split},
              {"encode", stage_encode},
              {"again", stage_again},
              {"both", stage_both}};

static int run_stages(struct bench *b, const char *only, int rounds)
{
    double best[5] = {0};
    int rc = 0;

    for (int round = 0; rc == 0 && round < rounds; round++) {
        for (size_t i = 0; rc == 0 && i < 5; i++) {
            double started = cpu_seconds();
            double spent;

            if ((only != NULL && strcmp(only, stages[i].name) != 0) || (b->split == NULL && i == 1))
                continue;
            b->n_tokens = b->n_pieces = 0;
            rc = stages[i].run(b);
            spent = cpu_seconds() - started;
            if (best[i] == 0 || spent < best[i])
                best[i] = spent;
        }
    }
    for (size_t i = 0; rc == 0 && i < 5; i++) {
        if (best[i] > 0)
            printf("%-6s %8.1f MB/s  %6.3f CPU-s\n", stages[i].name,
                   (double)b->text.len / 1e6 / best[i], best[i]);
    }
    return rc;
}

static int parse_flags(int argc, char **argv, struct mb_tokenizer_options *o, int *rounds,
                       const char **stage)
{
    int i = 1;

    for (; i + 2 < argc; i += 2) {
        const char *value = argv[i + 1];

        if (strcmp(argv[i], "--type") == 0)
            o->type = value;
        else if (strcmp(argv[i], "--vocab") == 0)
            o->vocab_file = value;
        else if (strcmp(argv[i], "--merge") == 0)
            o->merge_file = value;
        else if (strcmp(argv[i], "--model") == 0)
            o->tokenizer_model = value;
        else if (strcmp(argv[i], "--rounds") == 0)
            *rounds = atoi(value);
        else if (strcmp(argv[i], "--stage") == 0)
            *stage = value;
        else
            return -1;
    }
    return i + 1 == argc && *rounds > 0 ? i : -1;
}

int main(int argc, char **argv)
{
    static const char *const keys[] = {"text"};
    struct mb_tokenizer_options o = {0};
    static struct bench b;
    enum mb_split_family family;
    const char *stage = NULL;
    int rounds = 3;
    int at = parse_flags(argc, argv, &o, &rounds, &stage);
    double started = cpu_seconds();
    int rc;

    if (at < 0) {
        fprintf(stderr, "usage: bench_tokenize [--type T] [--vocab FILE] [--merge FILE] "
                        "[--model PATH] [--rounds N] [--stage NAME] INPUT.jsonl\n");
        return 2;
    }
    rc = mb_tokenizer_create(&o, &b.tokenizer, &b.err);
    if (rc == 0)
        printf("start-up %.1f ms\n", (cpu_seconds() - started) * 1e3);
    if (rc == 0 && mb_tokenizer_pattern(b.tokenizer) != NULL &&
        mb_split_recognise(mb_tokenizer_pattern(b.tokenizer), &family))
        rc = mb_split_create(family, NULL, &b.split, &b.err);
    if (rc == 0)
        rc = mb_jsonl_create(keys, 1, &b.json, &b.err);
    if (rc == 0)
        rc = mb_fs_read(argv[at], (size_t)4 << 30, &b.input, &b.err);
    if (rc == 0)
        rc = run_json(&b, keep);
    if (rc == 0)
        rc = run_stages(&b, stage, rounds);
    if (rc == 0)
        printf("%zu texts, %.1f MB of UTF-8, %.1f MB of JSON, %llu tokens\n", b.n_texts,
               (double)b.text.len / 1e6, (double)b.input.len / 1e6, (unsigned long long)b.n_tokens);
    else
        fprintf(stderr, "%s\n", b.err.text);
    mb_ids_close(&b.ids);
    mb_buf_close(&b.text);
    mb_buf_close(&b.copy);
    mb_buf_close(&b.input);
    free(b.ends);
    mb_jsonl_destroy(b.json);
    mb_split_destroy(b.split);
    mb_tokenizer_scratch_destroy(b.scratch);
    mb_tokenizer_destroy(b.tokenizer);
    return rc != 0;
}
