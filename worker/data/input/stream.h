/*
 * Bytes from somewhere, one after the other: what a feed cuts into lines. Inside worker/data/input.
 *
 * A stream belongs to one thread; only cancel and the counts may be used by others. Creating one
 * does no I/O that can block: that happens in read. Errors lack the name of the source.
 */
#ifndef MOBULA_WORKER_DATA_INPUT_STREAM_H
#define MOBULA_WORKER_DATA_INPUT_STREAM_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include "base/buf.h"
#include "base/err.h"

struct mb_stream;

struct mb_stream_ops {
    /* Up to n > 0 bytes into p; 0 at the end; or MB_E*. */
    ssize_t (*read)(struct mb_stream *s, void *p, size_t n, struct mb_err *err);
    /* Go on at this byte; NULL: the caller reads and drops. */
    int (*seek)(struct mb_stream *s, uint64_t offset, struct mb_err *err);
    void (*cancel)(struct mb_stream *s); /* any thread; read returns MB_ECANCELED soon */
    void (*close)(struct mb_stream *s);
};

/* The first member of every kind of stream. */
struct mb_stream {
    const struct mb_stream_ops *ops;
    _Atomic uint64_t done_bytes;  /* taken from the source, as stored */
    _Atomic uint64_t total_bytes; /* 0: not known */
};

/* A descriptor that may block (pipe, terminal) or not (file); taken, but 0 is never closed. */
int mb_stream_fd_open(int fd, uint64_t total_bytes, struct mb_stream **out, struct mb_err *err);
/* url: http:// or https://. */
int mb_stream_http_open(const char *url, uint64_t outage_ms, struct mb_stream **out,
                        struct mb_err *err);
/* url: s3://BUCKET/KEY. */
int mb_stream_s3_open(const char *url, uint64_t outage_ms, struct mb_stream **out,
                      struct mb_err *err);

/* Takes raw (closed if this fails) and reads it decompressed if its first bytes say that it is
 * compressed. The first read is MB_EINVAL for a format that is known, but not as JSON Lines (bzip2,
 * Parquet, ...), or if the name (borrowed) promises another one. seek: MB_EUNSUPPORTED without a
 * text if only reading and dropping helps. */
int mb_stream_decode(struct mb_stream *raw, const char *name, struct mb_stream **out,
                     struct mb_err *err);

#endif
