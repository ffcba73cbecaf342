/*
 * The parts of preprocess: chunk (lines to tokens, pure work for any thread), ring (chunks in order
 * over threads), output (files, lock, durable points), journal and identity (what a later run may
 * go on with), format (Megatron-LM's lines), preprocess.c (what follows what). Lines come from
 * worker/data/input. Nobody else includes this.
 */
#ifndef MOBULA_WORKER_DATA_PREPROCESS_PRIVATE_H
#define MOBULA_WORKER_DATA_PREPROCESS_PRIVATE_H

#include "base/buf.h"
#include "worker/data/index.h"
#include "worker/data/input/input.h"
#include "worker/data/jsonl.h"
#include "worker/data/preprocess.h"
#include "worker/data/preprocess_journal.h"

/* ---- chunk ---- */

enum { MB_CHUNK_MAX_BAD = 100, MB_CHUNK_BAD_TEXT_MAX = 256 };

/* What became of one document. */
struct mb_chunk_document {
    uint64_t json_chars;
    uint64_t text_bytes;
};

/* Tokens of one key and lane in the file's form. */
struct mb_chunk_part {
    struct mb_buf tokens;
    struct mb_buf lengths;                            /* int32_t of each sequence */
    struct mb_buf n_sequences;                        /* uint32_t of each document */
    size_t mark_tokens, mark_lengths, mark_sequences; /* lengths before the line at work */
};

/* A line that was left out. */
struct mb_chunk_bad {
    uint64_t line; /* from 0, within the chunk */
    char text[MB_CHUNK_BAD_TEXT_MAX];
};

/* Line i of a chunk goes to part [key][i % n_lanes]; whoever writes the chunk turns the lanes by
 * the number of lines before it. */
struct mb_chunk {
    struct mb_input_piece piece;
    struct mb_buf text; /* whole lines; the last of a source may lack its newline */
    struct mb_chunk_part *parts;
    size_t n_keys, n_lanes;
    struct mb_buf documents; /* struct mb_chunk_document */
    uint64_t n_lines;        /* all, or up to the one that failed */
    uint64_t n_bad, n_repaired;
    struct mb_buf bad; /* struct mb_chunk_bad, the first MB_CHUNK_MAX_BAD */
    int rc;            /* 0; or what ends the run here, at line n_lines */
    int lacks_place;   /* err is to get FILE:LINE in front */
    struct mb_err err;
};

int mb_chunk_init(struct mb_chunk *c, size_t n_keys, size_t n_lanes);
void mb_chunk_close(struct mb_chunk *c);
/* Gives back what an unusually long line took. */
void mb_chunk_trim(struct mb_chunk *c);

/* One thread's tools for turning chunks into tokens. */
struct mb_chunk_worker {
    const struct mb_tokenizer *tokenizer;
    enum mb_index_dtype dtype;
    int append_eod;
    int skips_bad_lines; /* a line that cannot be read is left out, noted and counted */
    int repairs_utf8;    /* bytes that are no UTF-8 become U+FFFD, as CPython's "replace" does */
    struct mb_tokenizer_scratch *scratch;
    struct mb_jsonl *json;
    struct mb_ids ids;
    struct mb_buf repaired;
    /* Of the lines that are tokenized in one go. */
    struct mb_buf texts;     /* place and length of each text, then struct mb_tokenizer_text */
    struct mb_buf ends;      /* size_t of each text: where its ids end */
    struct mb_buf counts;    /* uint32_t: texts of each line and key */
    struct mb_buf documents; /* struct mb_chunk_document of each line */
};

int mb_chunk_worker_init(struct mb_chunk_worker *w, const char *const *keys, size_t n_keys,
                         struct mb_err *err);
void mb_chunk_worker_close(struct mb_chunk_worker *w);
/* Fills parts and documents of c from its text; the outcome is in c->rc and c->err. */
void mb_chunk_run(struct mb_chunk_worker *w, struct mb_chunk *c);

/* ---- ring ---- */

/* Chunks on their way: one thread reads, others work, the caller takes them back in order. Memory
 * is bounded by the number of slots and by the bytes of text in them. */
struct mb_ring;

struct mb_ring_options {
    struct mb_input *input; /* borrowed; only the ring reads it while it runs */
    unsigned workers;
    size_t n_keys, n_lanes;
    const struct mb_chunk_worker *tools; /* copied for each thread, then initialised with keys */
    const char *const *keys;
};

int mb_ring_start(const struct mb_ring_options *o, struct mb_ring **out, struct mb_err *err);
/* The oldest chunk, done: 1; 0: all were taken and the input has ended; MB_ETIMEOUT: none is done
 * after timeout_ms. A chunk stays the caller's until the next call. */
int mb_ring_take(struct mb_ring *r, unsigned timeout_ms, struct mb_chunk **out);
void mb_ring_stop(struct mb_ring *r); /* joins the threads; NULL is legal */

/* ---- output ---- */

struct mb_output;

struct mb_output_options {
    const char *prefix;
    const char *const *keys;
    size_t n_keys;
    unsigned n_lanes;
    enum mb_index_dtype dtype;
    const struct mb_journal_identity *identity; /* NULL: a later run cannot go on with this one */
    int starts_over;                            /* whatever an earlier run left */
    void (*notice_cb)(void *ctx, const char *text);
    void *ctx;
};

/* Locks PREFIX.preprocess/ and looks at what a killed run left there. 1: *journal says from where
 * to go on; 2: that run was whole, its renames are now done; 0: a new output, *journal is zero. */
int mb_output_open(const struct mb_output_options *o, struct mb_output **out,
                   struct mb_journal *journal, struct mb_err *err);
int mb_output_add(struct mb_output *o, size_t key, unsigned lane, const struct mb_index_batch *b,
                  struct mb_err *err);
uint64_t mb_output_n_tokens(const struct mb_output *o);
uint64_t mb_output_n_sequences(const struct mb_output *o);
/* A durable point: another thread makes it so. If the last one is not done yet, this one is left
 * out. A failure of an earlier one is returned. Counts of *at are used, marks are filled in. */
int mb_output_save(struct mb_output *o, const struct mb_journal *at, struct mb_err *err);
int mb_output_save_now(struct mb_output *o, const struct mb_journal *at, struct mb_err *err);
/* Makes the files whole and durable; until then nothing under the final names has changed. */
int mb_output_prepare(struct mb_output *o, const struct mb_journal *at, struct mb_err *err);
int mb_output_commit(struct mb_output *o, struct mb_err *err); /* the renames */
/* Without commit everything is removed, unless `keeps` and there is a durable point. Returns
 * whether something was kept. NULL is legal. */
int mb_output_close(struct mb_output *o, int keeps);

/* ---- identity, format ---- */

/* 1: *out is filled; 0: the input has no identity (a pipe). */
int mb_preprocess_identity(const struct mb_preprocess_options *o, const char *const *keys,
                           size_t n_keys, struct mb_input *input, struct mb_journal_identity *out,
                           struct mb_err *err);

#endif
