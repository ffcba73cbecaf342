/*
 * safetensors files: u64 header length, a JSON header {name: {dtype, shape, data_offsets}}, data.
 * The format is https://github.com/huggingface/safetensors as of its 0.4 series: offsets count from
 * the end of the header, tensors cover the data without gap or overlap, "__metadata__" maps strings
 * to strings. Only little-endian hosts are supported (the bytes are the tensors').
 *
 * The writer knows all shapes before the first byte and streams; the reader checks the whole header
 * against the file's size before it says yes, so that reads cannot leave the data. What is written
 * has checksums of itself in its metadata (sums.h), and what has them is compared with them before
 * a byte of it is handed out. Threads: one at a time per object.
 */
#ifndef MOBULA_WORKER_CHECKPOINT_SAFETENSORS_H
#define MOBULA_WORKER_CHECKPOINT_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum {
    MB_ST_DIMS_MAX = 8,
    MB_ST_HEADER_MAX = 100 * 1000 * 1000 /* bytes, as the format's own implementation has it */
};

enum mb_st_dtype {
    MB_ST_F32,
    MB_ST_F16,
    MB_ST_BF16,
    MB_ST_F64,
    MB_ST_I64,
    MB_ST_I32,
    MB_ST_I16,
    MB_ST_I8,
    MB_ST_U8,
    MB_ST_BOOL
};

size_t mb_st_dtype_size(enum mb_st_dtype dtype);
const char *mb_st_dtype_name(enum mb_st_dtype dtype); /* "BF16": the format's */
/* n numbers of F32, F16 or BF16 as fp32. */
void mb_st_widen(const void *bytes, enum mb_st_dtype dtype, size_t n, float *out);
/* And back, to nearest even. MB_EUNSUPPORTED naming the tensor if a finite number would become an
 * infinite one: the model would be another. */
int mb_st_narrow(const char *tensor, const float *p, size_t n, enum mb_st_dtype dtype, void *out,
                 struct mb_err *err);

struct mb_st_tensor {
    const char *name; /* reader: owned by the reader; writer: borrowed for the call */
    enum mb_st_dtype dtype;
    int n_dims;
    uint64_t shape[MB_ST_DIMS_MAX];
    uint64_t begin, end; /* bytes in the data section; filled in by reader and writer */
};

/* Bytes of a tensor; -1 when the product overflows. */
int mb_st_tensor_bytes(const struct mb_st_tensor *t, uint64_t *out);

struct mb_st_meta {
    const char *key, *value;
};

/* ---- reading ---- */

struct mb_st_reader;

/* MB_ENOENT, or MB_ECORRUPT naming the file and what is wrong with it. */
int mb_st_open(const char *path, struct mb_st_reader **out, struct mb_err *err);
void mb_st_close(struct mb_st_reader *r); /* NULL is legal */

size_t mb_st_n_tensors(const struct mb_st_reader *r);
const struct mb_st_tensor *mb_st_tensor(const struct mb_st_reader *r, size_t i);
const struct mb_st_tensor *mb_st_find(const struct mb_st_reader *r, const char *name);
const char *mb_st_metadata(const struct mb_st_reader *r, const char *key); /* NULL: absent */
/* Bytes [offset, offset + n) of a tensor; the range is the caller's promise. MB_ECORRUPT if the
 * file has become shorter, or, if it has checksums, if these bytes or those around them, to the
 * next full MiB of the data, are not those that were written. */
int mb_st_read(struct mb_st_reader *r, const struct mb_st_tensor *t, uint64_t offset, void *buf,
               size_t n, struct mb_err *err);

int mb_st_has_sums(const struct mb_st_reader *r);
/* Reads everything: as mb_st_read() of all tensors. 0 for a file without checksums. */
int mb_st_verify(struct mb_st_reader *r, struct mb_err *err);

/* The pure part, for fuzzing: a header of n bytes against a data section of data_bytes. */
int mb_st_parse(const char *name, const void *header, size_t n, uint64_t data_bytes,
                struct mb_st_reader **out, struct mb_err *err);

/* ---- writing ---- */

struct mb_st_writer;

/* Creates path (it must not exist) and writes the header; fills in begin and end of the tensors. */
int mb_st_create(const char *path, struct mb_st_tensor *tensors, size_t n_tensors,
                 const struct mb_st_meta *meta, size_t n_meta, struct mb_st_writer **out,
                 struct mb_err *err);
/* Right after create: written(arg, n) hears of every n bytes that went to the file, and of
 * those that reached the disk at the end. What it returns but 0 is the error of the call that is
 * under way. */
void mb_st_watch(struct mb_st_writer *w, int (*written)(void *arg, uint64_t n), void *arg);
/* The next bytes of the data section, in the order of the tensors. */
int mb_st_write(struct mb_st_writer *w, const void *p, size_t n, struct mb_err *err);
/* fsync and close; MB_ESTATE if bytes are missing. Frees the writer whatever it returns. */
int mb_st_finish(struct mb_st_writer *w, uint64_t *size_bytes, uint64_t *crc64nvme,
                 struct mb_err *err);
/* Closes and removes the unfinished file. NULL is legal. */
void mb_st_abandon(struct mb_st_writer *w);

#endif
