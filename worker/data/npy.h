/*
 * numpy's .npy files of the four kinds that Megatron-LM's index cache consists of.
 *
 * The header is parsed from untrusted bytes (pure; fuzzed): magic, version, length, a Python dict
 * of three keys. Only little-endian integers in C order, of one or two dimensions; a pickled object
 * is refused, nothing is ever executed. Source: numpy/lib/format.py. Threads: no state.
 */
#ifndef MOBULA_WORKER_DATA_NPY_H
#define MOBULA_WORKER_DATA_NPY_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum mb_npy_type { MB_NPY_I16, MB_NPY_I32, MB_NPY_U32, MB_NPY_I64 };

struct mb_npy_shape {
    enum mb_npy_type type;
    unsigned n_dims;  /* 1 or 2 */
    uint64_t dims[2]; /* of one dimension the second is 1 */
};

enum { MB_NPY_HEADER_MAX = 10012 /* numpy's own limit of what it parses */, MB_NPY_MADE_MAX = 256 };

size_t mb_npy_element_bytes(enum mb_npy_type type);

/* The header that numpy.save writes, byte for byte; returns its length. */
size_t mb_npy_header_make(const struct mb_npy_shape *shape, char out[MB_NPY_MADE_MAX]);

/* The first n bytes of a file, at most MB_NPY_HEADER_MAX are needed. MB_ECORRUPT says what is
 * wrong. Elements begin at *header_bytes. */
int mb_npy_header_parse(const void *p, size_t n, struct mb_npy_shape *shape, size_t *header_bytes,
                        struct mb_err *err);

/* All elements into out, which has room for want. MB_ENOENT: no such file; MB_ECORRUPT: it is no
 * regular file, not of exactly that type and shape, or not exactly as long as that makes it. */
int mb_npy_read(const char *path, const struct mb_npy_shape *want, void *out, struct mb_err *err);

/* The file appears whole or not at all: cache_files.h. */
int mb_npy_write(const char *path, const struct mb_npy_shape *shape, const void *elements,
                 struct mb_err *err);

#endif
