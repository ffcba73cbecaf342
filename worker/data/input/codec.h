/*
 * Decompressors behind one interface, and the table of magic numbers that picks one. Pure: bytes
 * in, bytes out. Inside worker/data/input. Sources: RFC 1952 (gzip), the .xz file format 1.1.0,
 * RFC 8878 (zstd).
 */
#ifndef MOBULA_WORKER_DATA_INPUT_CODEC_H
#define MOBULA_WORKER_DATA_INPUT_CODEC_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

struct mb_codec;

struct mb_codec_io {
    const uint8_t *in; /* moved forward by what was taken */
    size_t in_bytes;
    uint8_t *out; /* moved forward by what was made */
    size_t out_bytes;
    int at_end; /* nothing follows `in` */
};

struct mb_codec_ops {
    const char *name; /* "gzip" */
    const char *end;  /* ".gz" */
    int (*create)(struct mb_codec **out, struct mb_err *err);
    /* Takes some input or makes some output. 1: the archive may end here; 0: it may not; or MB_E*.
     * Members one after the other are read as one. */
    int (*step)(struct mb_codec *c, struct mb_codec_io *io, struct mb_err *err);
    void (*destroy)(struct mb_codec *c);
};

extern const struct mb_codec_ops mb_codec_gzip;
extern const struct mb_codec_ops mb_codec_xz;
extern const struct mb_codec_ops mb_codec_zstd;

enum { MB_CODEC_MAGIC_BYTES = 8 }; /* so many first bytes decide */

/* *out NULL: plain. MB_EINVAL: what this is, and what to do with it. */
int mb_codec_find(const uint8_t *first, size_t n, const struct mb_codec_ops **out,
                  struct mb_err *err);
/* MB_EINVAL if the name promises another format than the first bytes (n 0: an empty file) show. */
int mb_codec_check_name(const char *name, size_t n, const struct mb_codec_ops *found,
                        struct mb_err *err);

#endif
