/*
 * `mobula preprocess`: JSON Lines in, PREFIX_KEY_document.bin and .idx out, byte for byte what
 * Megatron-LM's tools/preprocess_data.py writes for the same lines.
 *
 * One JSON object per line; the value of each key is a text or a list of texts (each becomes a
 * sequence of one document). A text without tokens makes no sequence; a document without tokens is
 * an empty document. eod is added once, to the last sequence of a document that has one. Documents
 * stay in input order whatever the number of workers; with partitions line i goes to partition i %
 * n, and the output has one partition after the other, as Megatron-LM merges them. Memory is
 * bounded by the workers' chunks. A line that Python's json.loads or UTF-8 decoder would refuse is
 * MB_EINVAL "FILE:LINE: ...", or left out and counted on request.
 *
 * Until all is whole, everything is in PREFIX.preprocess/: temporary files, a lock, a journal.
 * After a failure no output file has changed and that directory is gone; after a kill, a
 * cancellation or a lost connection it stays, and the same call goes on from its last durable
 * point. docs/preprocess.md tells the whole story.
 */
#ifndef MOBULA_WORKER_DATA_PREPROCESS_H
#define MOBULA_WORKER_DATA_PREPROCESS_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"
#include "worker/data/tokenizer/tokenizer.h"

/* Counts of a run, with those of the runs that it goes on with. */
struct mb_preprocess_progress {
    uint64_t n_documents;
    uint64_t
        json_chars; /* characters of the lines read, newlines included: Megatron-LM's measure */
    uint64_t text_bytes;       /* UTF-8 of the texts */
    uint64_t n_tokens;         /* eod included */
    uint64_t n_sequences;      /* of all keys; only in the totals */
    uint64_t n_bad_lines;      /* left out */
    uint64_t n_repaired_lines; /* with bytes that were no UTF-8 */
    double elapsed_s;          /* at work, earlier runs included */
    double run_s;              /* of this run */
    /* As stored, so compressed if they are; total 0: not known. */
    uint64_t input_bytes_done, input_bytes_total;
    uint64_t input_bytes_before; /* done when this run began */
    int is_resumed;
};

struct mb_preprocess_options {
    const char *const *inputs; /* worker/data/input/input.h says what a word may be */
    size_t n_inputs;
    uint64_t max_line_bytes;      /* 0: 1 GiB */
    const char *const *json_keys; /* NULL: "text" */
    size_t n_json_keys;
    const char *output_prefix;
    struct mb_tokenizer_options tokenizer;
    int append_eod;
    int skip_bad_lines;
    int repair_utf8;       /* 1: bytes that are no UTF-8 become U+FFFD; 0: the line is bad */
    unsigned workers;      /* threads that tokenize, 1..1024 */
    unsigned partitions;   /* 0: 1 */
    uint64_t log_interval; /* documents between progress reports; 0: 1000 */
    int no_resume;         /* 1: neither goes on with an earlier run nor can be gone on with */
    uint64_t resume_interval_ms; /* between durable points; 0: 5 s */

    /* All on the calling thread; each may be NULL. */
    void (*opening_cb)(void *ctx, const char *name); /* a source, as its first line is due */
    void (*started_cb)(void *ctx, double startup_s); /* tokenizer built, outputs open */
    void (*progress_cb)(void *ctx, const struct mb_preprocess_progress *p);
    void (*tick_cb)(void *ctx,
                    const struct mb_preprocess_progress *p); /* about 10 times a second */
    void (*notice_cb)(void *ctx, const char *text); /* a fact, for instance what is gone on with */
    void (*bad_line_cb)(void *ctx, const char *text); /* the first 100: "FILE:LINE: ..." */
    int (*cancelled_cb)(void *ctx); /* asked often; non-zero ends with MB_ECANCELED */
    void *ctx;
};

enum { MB_PREPROCESS_BAD_LINES_SHOWN = 100 };

/* Blocks until done. `total` (may be NULL) gets the final counts. */
int mb_preprocess_run(const struct mb_preprocess_options *o, struct mb_preprocess_progress *total,
                      struct mb_err *err);

/* Megatron-LM's lines without the newline, into out[MB_PREPROCESS_LINE_MAX]; returns out.
 * "Processed 1000 documents (101.28050670002645 docs/s, 1.258563987556778 MB/s)." goes to stderr,
 * "Opening FILE" and "Time to startup: 0.9956498146057129" to stdout. */
enum { MB_PREPROCESS_LINE_MAX = 256 };
char *mb_preprocess_progress_line(const struct mb_preprocess_progress *p, char *out);
char *mb_preprocess_startup_line(double startup_s, char *out);
/* One line for people: a bar with percent, rates and the time left, at most `columns` wide. */
char *mb_preprocess_bar_line(const struct mb_preprocess_progress *p, unsigned columns, char *out);
/* "Done: ..." with all totals and rates. */
char *mb_preprocess_total_line(const struct mb_preprocess_progress *p, char *out);

#endif
