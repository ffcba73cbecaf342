/*
 * Runs preprocess for tests/integration/data and bench, with Megatron-LM's argument names:
 *   run_preprocess --input F --output-prefix P --vocab-file V --merge-file M --workers N
 *                  [--json-keys K...] [--append-eod] [--log-interval N] [--tokenizer-type T]
 *                  [--vocab-size N]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "worker/data/preprocess.h"

static void opening(void *ctx, const char *path)
{
    (void)ctx;
    printf("Opening %s\n", path);
}

static void started(void *ctx, double startup_s)
{
    char line[MB_PREPROCESS_LINE_MAX];

    (void)ctx;
    printf("%s\n", mb_preprocess_startup_line(startup_s, line));
}

static void progress(void *ctx, const struct mb_preprocess_progress *p)
{
    char line[MB_PREPROCESS_LINE_MAX];

    (void)ctx;
    fprintf(stderr, "%s\n", mb_preprocess_progress_line(p, line));
}

int main(int argc, char **argv)
{
    struct mb_preprocess_options o = {
        .workers = 1, .opening_cb = opening, .started_cb = started, .progress_cb = progress};
    struct mb_preprocess_progress total;
    struct mb_err err = {0};
    int rc;

    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";

        if (strcmp(argv[i], "--append-eod") == 0) {
            o.append_eod = 1;
            continue;
        }
        if (strcmp(argv[i], "--json-keys") == 0) {
            o.json_keys = (const char *const *)(argv + i + 1);
            while (i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0) {
                o.n_json_keys++;
                i++;
            }
            continue;
        }
        if (strcmp(argv[i], "--input") == 0)
            o.inputs = (const char *const *)(argv + i + 1), o.n_inputs = 1;
        else if (strcmp(argv[i], "--output-prefix") == 0)
            o.output_prefix = value;
        else if (strcmp(argv[i], "--vocab-file") == 0)
            o.tokenizer.vocab_file = value;
        else if (strcmp(argv[i], "--merge-file") == 0)
            o.tokenizer.merge_file = value;
        else if (strcmp(argv[i], "--tokenizer-type") == 0)
            o.tokenizer.type = value;
        else if (strcmp(argv[i], "--vocab-size") == 0)
            o.tokenizer.vocab_size = atoll(value);
        else if (strcmp(argv[i], "--workers") == 0)
            o.workers = (unsigned)atoi(value);
        else if (strcmp(argv[i], "--log-interval") == 0)
            o.log_interval = (uint64_t)atoll(value);
        else {
            fprintf(stderr, "unknown argument %s\n", argv[i]);
            return 2;
        }
        i++;
    }
    rc = mb_preprocess_run(&o, &total, &err);
    if (rc != 0) {
        fprintf(stderr, "%s\n", err.text);
        return mb_exit_status(rc);
    }
    printf("%llu documents, %llu tokens, %.1f text MB/s, %.1f JSON MB/s\n",
           (unsigned long long)total.n_documents, (unsigned long long)total.n_tokens,
           (double)total.text_bytes / 1e6 / total.elapsed_s,
           (double)total.input_bytes_done / 1e6 / total.elapsed_s);
    return 0;
}
