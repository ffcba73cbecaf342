/*
 * The journal of a run of preprocess: how far it came, as a small text that is replaced whole, and
 * what its output depends on, so that another command never goes on with it. Pure: text in, struct
 * out, and back; any thread. docs/formats.md describes it.
 */
#ifndef MOBULA_WORKER_DATA_PREPROCESS_JOURNAL_H
#define MOBULA_WORKER_DATA_PREPROCESS_JOURNAL_H

#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/err.h"
#include "worker/data/index.h"

enum { MB_JOURNAL_MAX_MARKS = 1 << 16, MB_JOURNAL_MAX_BYTES = 8 << 20 };

/* SHA-256 in hex of what decides the bytes of the output. */
struct mb_journal_identity {
    char input[65];     /* names, sizes, times */
    char options[65];   /* keys, eod, lanes, what happens to bad lines */
    char tokenizer[65]; /* type, flags, files */
};

enum mb_journal_phase {
    MB_JOURNAL_RUNNING,   /* the outputs hold what the marks say */
    MB_JOURNAL_COMMITTING /* the outputs are whole; only renames are missing */
};

struct mb_journal {
    struct mb_journal_identity identity;
    enum mb_journal_phase phase;
    /* The next line to read: source from 0, byte of it, its number from 1. */
    uint64_t source, offset, line;
    uint64_t n_lines; /* read so far, of all sources */
    uint64_t n_documents, n_sequences, n_tokens, n_bad_lines, n_repaired_lines;
    uint64_t json_chars, text_bytes, elapsed_us;
    struct mb_index_mark *marks; /* [n_keys][n_lanes], owned */
    size_t n_marks;
};

void mb_journal_close(struct mb_journal *j);
int mb_journal_write(const struct mb_journal *j, struct mb_buf *out); /* appends; 0 or MB_ENOMEM */
/* MB_ECORRUPT: not a journal, or damaged. out is zeroed by the caller; on failure it is empty. */
int mb_journal_read(const void *text, size_t n, struct mb_journal *out, struct mb_err *err);

/* What differs, for people: "the input", "the options", "the tokenizer"; NULL: nothing. */
const char *mb_journal_difference(const struct mb_journal_identity *a,
                                  const struct mb_journal_identity *b);

#endif
