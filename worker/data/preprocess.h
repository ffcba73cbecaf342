/*
 * `mobula preprocess`: JSON Lines in, PREFIX_KEY_document.bin and .idx out, byte for byte what
 * Megatron-LM's tools/preprocess_data.py writes for the same lines.
 *
 * One JSON object per line; the value of each key is a text or a list of texts (each becomes a
 * sequence of one document). A text without tokens makes no sequence; a document without tokens is
 * an empty document. eod is added once, to the last sequence of a document that has one. Documents
 * stay in input order whatever the number of workers. Memory is bounded by the workers' chunks. A
 * line that Python's json.loads or UTF-8 decoder would refuse is MB_EINVAL "FILE:LINE: ..."; after
 * any failure no output file has changed and the temporary ones are gone.
 */
#ifndef MOBULA_WORKER_DATA_PREPROCESS_H
#define MOBULA_WORKER_DATA_PREPROCESS_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"
#include "worker/data/tokenizer/tokenizer.h"

struct mb_preprocess_progress {
    uint64_t n_documents;
    uint64_t
        json_chars; /* characters of the lines read, newlines included: Megatron-LM's measure */
    uint64_t text_bytes;       /* UTF-8 of the texts */
    uint64_t n_tokens;         /* eod included */
    double elapsed_s;          /* since the first line was read */
    uint64_t input_bytes_done; /* of the file, compressed if it is */
    uint64_t input_bytes_total;
};

struct mb_preprocess_options {
    const char *input;            /* JSON Lines; gzip if the name ends in .gz */
    const char *const *json_keys; /* NULL: "text" */
    size_t n_json_keys;
    const char *output_prefix;
    struct mb_tokenizer_options tokenizer;
    int append_eod;
    unsigned workers;      /* threads that tokenize, 1..1024 */
    uint64_t log_interval; /* documents between progress reports; 0: 1000 */

    /* All on the calling thread; each may be NULL. */
    void (*opening_cb)(void *ctx, const char *path); /* before the input is opened */
    void (*started_cb)(void *ctx, double startup_s); /* tokenizer built, outputs open */
    void (*progress_cb)(void *ctx, const struct mb_preprocess_progress *p);
    int (*cancelled_cb)(void *ctx); /* asked often; non-zero ends with MB_ECANCELED */
    void *ctx;
};

/* Blocks until done. `total` (may be NULL) gets the final counts. */
int mb_preprocess_run(const struct mb_preprocess_options *o, struct mb_preprocess_progress *total,
                      struct mb_err *err);

/* Megatron-LM's lines without the newline, into out[MB_PREPROCESS_LINE_MAX]; returns out.
 * "Processed 1000 documents (101.28050670002645 docs/s, 1.258563987556778 MB/s)." goes to stderr,
 * "Opening FILE" and "Time to startup: 0.9956498146057129" to stdout. */
enum { MB_PREPROCESS_LINE_MAX = 256 };
char *mb_preprocess_progress_line(const struct mb_preprocess_progress *p, char *out);
char *mb_preprocess_startup_line(double startup_s, char *out);

#endif
