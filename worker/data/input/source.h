/*
 * The parts behind input.h: sources (what the words stand for), files that are cut without being
 * read, feeds (a stream read ahead on a thread). Nobody else includes this.
 */
#ifndef MOBULA_WORKER_DATA_INPUT_SOURCE_H
#define MOBULA_WORKER_DATA_INPUT_SOURCE_H

#include <stdatomic.h>
#include <sys/types.h>
#include "worker/data/input/input.h"
#include "worker/data/input/stream.h"

#define MB_LONG_LINE_TEXT "the line is longer than %llu bytes; see --max-line-bytes"

enum mb_source_kind { MB_SOURCE_FILE, MB_SOURCE_STDIN, MB_SOURCE_HTTP, MB_SOURCE_S3 };

struct mb_source {
#define MB_LONG_LINE_TEXT "the line is longer than %llu bytes; see --max-line-bytes"

    enum mb_source_kind kind;
    char *place;         /* path or URL */
    char *name;          /* for people */
    uint64_t size_bytes; /* of a regular file, else 0 */
    int is_regular;
};

struct mb_sources {
    struct mb_source *items;
    size_t n;
    size_t cap;
};

/* Expands one word behind what is there. */
int mb_sources_add(struct mb_sources *s, const char *word, struct mb_err *err);
void mb_sources_close(struct mb_sources *s);
/* One line of mb_input_identity(), newline included. */
int mb_source_identity(const struct mb_source *source, struct mb_buf *out, struct mb_err *err);
/* A URL without user, password, query and fragment; owned by the caller. */
char *mb_source_public_name(const char *url);
/* Asks the server for what identifies the bytes behind a URL, as text. */
int mb_stream_http_identity(const char *url, struct mb_buf *out, struct mb_err *err);
int mb_stream_s3_identity(const char *url, struct mb_buf *out, struct mb_err *err);
/* Adds the keys of a bucket that match the glob s3://BUCKET/PATTERN, sorted; none is MB_ENOENT. */
int mb_stream_s3_glob(const char *url, int (*add)(void *arg, const char *url, struct mb_err *err),
                      void *arg, struct mb_err *err);

/* ---- a plain regular file, cut into pieces; read by whoever works on a piece ---- */

struct mb_file;

/* 1: *out is a plain regular file. 0: it is to be read as a stream, *stream has it. Or MB_E*. */
int mb_file_open(const struct mb_source *source, struct mb_file **out, struct mb_stream **stream,
                 struct mb_err *err);
int mb_file_seek(struct mb_file *f, uint64_t offset, struct mb_err *err);
/* 1: a piece of *size_bytes from *offset on; 0: the end. It is out until it is loaded. */
int mb_file_cut(struct mb_file *f, uint64_t max_line_bytes, uint64_t *offset, uint64_t *size_bytes,
                struct mb_err *err);
/* Any thread, once for each piece. */
int mb_file_load(struct mb_file *f, uint64_t offset, uint64_t size_bytes, struct mb_buf *text,
                 struct mb_err *err);
int mb_file_is_used(const struct mb_file *f); /* pieces are out */
void mb_file_close(struct mb_file *f);

/* ---- a stream, read and cut on a thread of its own ---- */

struct mb_feed;

/* Takes the stream; drops skip_bytes (decompressed) first. */
int mb_feed_start(struct mb_stream *stream, uint64_t skip_bytes, uint64_t max_line_bytes,
                  struct mb_feed **out, struct mb_err *err);
/* 1: text swapped; 0: the end; MB_E*: *inside tells whether bytes were handed out before. */
int mb_feed_next(struct mb_feed *f, struct mb_buf *text, int *inside, struct mb_err *err);
void mb_feed_cancel(struct mb_feed *f);                          /* any thread */
const struct mb_stream *mb_feed_stream(const struct mb_feed *f); /* for its counts */
void mb_feed_stop(struct mb_feed *f);                            /* joins the thread */

#endif
