/*
 * The input of preprocess: words of the command line in, pieces of whole lines out, in order.
 *
 * A word is a file, a glob (* ? [), "-" (standard input), http(s)://... or s3://BUCKET/KEY (with a
 * glob in KEY). Words keep their order; what a glob finds is sorted by its bytes. gzip, xz and zstd
 * are known by their first bytes. A piece never spans two sources, has about 512 KiB, and ends with
 * a newline, but for the last one of a source. Lines are neither parsed nor counted here.
 *
 * A plain local file is only cut here: the thread that works on a piece reads it (mb_input_load),
 * so that reading scales with the workers. Every other source has a thread of its own that reads
 * and decompresses up to about 2.5 MiB ahead; the source after it is opened ahead, too.
 *
 * Errors are one line. Those found before the first byte of a source was handed out are complete
 * ("--input NAME: ..."); later ones (a cut archive, a lost connection, a line that is too long)
 * lack the place: the caller puts "NAME:LINE" in front, because it counts the lines.
 *
 * Threads: open, seek, next and close belong to one thread; load, cancel, name and the byte counts
 * may be called from any, until close.
 */
#ifndef MOBULA_WORKER_DATA_INPUT_INPUT_H
#define MOBULA_WORKER_DATA_INPUT_INPUT_H

#include <stddef.h>
#include <stdint.h>
#include "base/buf.h"
#include "base/err.h"

struct mb_input;

enum {
    MB_INPUT_PIECE_BYTES = 512 << 10,
    MB_INPUT_PAD_BYTES = 64, /* allocated behind the bytes of a piece: wide reads may touch them */
    MB_INPUT_MAX_SOURCES = 1000000
};

struct mb_input_options {
    const char *const *words; /* borrowed until open returns */
    size_t n_words;
    uint64_t max_line_bytes; /* newline not counted; 0: 1 GiB; at least MB_INPUT_PIECE_BYTES */
    uint64_t outage_ms;      /* a remote source without a byte for so long fails; 0: 5 minutes */
};

/* Where a piece begins. */
struct mb_input_place {
    uint32_t source; /* from 0 */
    uint64_t offset; /* bytes of that source, decompressed; at the start of a line */
    uint64_t line;   /* from 1; known for the first piece of a source and after a seek, else 0 */
};

struct mb_input_piece {
    struct mb_input_place at;
    uint64_t size_bytes;
    int is_loaded;     /* 1: next() has put the bytes into text */
    int failed_inside; /* after an error of next(): "NAME:LINE" is missing in front of it */
    void *file;        /* private: what load() reads from */
};

/* Expands the words and looks at local files: one that is missing, a directory or not readable
 * fails here. Remote sources are contacted by next() only (but a glob of s3:// lists the bucket).
 */
int mb_input_open(const struct mb_input_options *options, struct mb_input **out,
                  struct mb_err *err);
/* Before the first next(): go on from a place that an earlier run reached. */
int mb_input_seek(struct mb_input *in, const struct mb_input_place *to, struct mb_err *err);
/* 1: a piece; text was swapped against its bytes if is_loaded. 0: the end. Or MB_E*. Blocks. */
int mb_input_next(struct mb_input *in, struct mb_buf *text, struct mb_input_piece *piece,
                  struct mb_err *err);
/* Fills text with the bytes of a piece: exactly once for each, by any thread. A file that became
 * shorter is MB_ESTATE. Errors lack the place. */
int mb_input_load(struct mb_input *in, struct mb_input_piece *piece, struct mb_buf *text,
                  struct mb_err *err);
/* next() returns MB_ECANCELED soon, even if it waits for a pipe or a server. */
void mb_input_cancel(struct mb_input *in);
void mb_input_close(struct mb_input *in); /* NULL is legal; pieces not loaded are given up */

size_t mb_input_n_sources(const struct mb_input *in);
/* For people: no user, password or query of a URL. Borrowed. */
const char *mb_input_name(const struct mb_input *in, uint32_t source);
/* One line for each source that changes when its bytes do: path, size, time, inode, or ETag. Asks
 * remote servers. MB_EUNSUPPORTED: some source has no such thing (a pipe). */
int mb_input_identity(struct mb_input *in, struct mb_buf *out, struct mb_err *err);
/* As stored, so compressed if they are. total 0: not known (yet). */
uint64_t mb_input_bytes_done(const struct mb_input *in);
uint64_t mb_input_bytes_total(const struct mb_input *in);

#endif
