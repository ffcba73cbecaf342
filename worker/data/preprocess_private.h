/*
 * The parts of preprocess: input (lines in, chunks out), chunk (lines to tokens, pure work for any
 * thread), format (Megatron-LM's lines), preprocess.c (threads, order, files). Nobody else includes
 * this.
 */
#ifndef MOBULA_WORKER_DATA_PREPROCESS_PRIVATE_H
#define MOBULA_WORKER_DATA_PREPROCESS_PRIVATE_H

#include "base/buf.h"
#include "worker/data/index.h"
#include "worker/data/jsonl.h"
#include "worker/data/preprocess.h"

/* What became of one document. */
struct mb_chunk_document {
    uint64_t json_chars;
    uint64_t text_bytes;
};

/* Tokens of one key in the file's form. */
struct mb_chunk_key {
    struct mb_buf tokens;
    struct mb_buf lengths;     /* int32_t of each sequence */
    struct mb_buf n_sequences; /* uint32_t of each document */
};

struct mb_chunk {
    struct mb_buf text;  /* whole lines; the last of the file may lack its newline */
    uint64_t first_line; /* from 1 */
    struct mb_chunk_key *keys;
    size_t n_keys;
    struct mb_buf documents; /* struct mb_chunk_document */
    int rc;
    struct mb_err err; /* of the first bad line, with FILE:LINE */
};

int mb_chunk_init(struct mb_chunk *c, size_t n_keys);
void mb_chunk_close(struct mb_chunk *c);

/* One thread's tools for turning chunks into tokens. */
struct mb_chunk_worker {
    const char *path; /* borrowed, for messages */
    const struct mb_tokenizer *tokenizer;
    enum mb_index_dtype dtype;
    int append_eod;
    struct mb_tokenizer_scratch *scratch;
    struct mb_jsonl *json;
    struct mb_ids ids;
};

int mb_chunk_worker_init(struct mb_chunk_worker *w, const char *const *keys, size_t n_keys,
                         struct mb_err *err);
void mb_chunk_worker_close(struct mb_chunk_worker *w);
/* Fills keys and documents of c from its text; the outcome is in c->rc and c->err. */
void mb_chunk_run(struct mb_chunk_worker *w, struct mb_chunk *c);

/* The input file, plain or gzip, cut into chunks of whole lines. */
struct mb_input;
int mb_input_open(const char *path, struct mb_input **out, struct mb_err *err);
void mb_input_close(struct mb_input *in);
/* 1: text holds whole lines of about 1 MiB and *first_line is set; 0: the end. */
int mb_input_next(struct mb_input *in, struct mb_buf *text, uint64_t *first_line,
                  struct mb_err *err);
uint64_t mb_input_bytes_done(const struct mb_input *in);
uint64_t mb_input_bytes_total(const struct mb_input *in);

/* repr() of a Python float into out[32]; returns out. */
char *mb_repr_double(double v, char *out);

#endif
