/*
 * The reader of safetensors.h.
 *
 *  1. open: read the length, read the header, mb_st_parse() checks it: each entry's dtype, shape
 *     and offsets agree, and, sorted by offset, the tensors cover the data exactly. A header with
 *     checksums (sums.h) has to fit its own.
 *  2. read: pread of a part of a tensor. Where there are checksums, the first who wants a byte of a
 *     block has all of it read and compared; the last such block is kept, for whoever goes on in
 * it. Failures: a header that is too long, no JSON, with a wrong field, an overflowing shape, a
 * gap, an overlap or a wrong size, and bytes that are not those that were written, are MB_ECORRUPT
 * naming the file and the tensor.
 */
#include "worker/checkpoint/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/half.h"
#include "worker/checkpoint/sums.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tensor bytes are written as they lie");

enum { META_MAX = 256 };

static const struct {
    const char *name;
    size_t size;
} DTYPES[] = {
    [MB_ST_F32] = {"F32", 4},   [MB_ST_F16] = {"F16", 2}, [MB_ST_BF16] = {"BF16", 2},
    [MB_ST_F64] = {"F64", 8},   [MB_ST_I64] = {"I64", 8}, [MB_ST_I32] = {"I32", 4},
    [MB_ST_I16] = {"I16", 2},   [MB_ST_I8] = {"I8", 1},   [MB_ST_U8] = {"U8", 1},
    [MB_ST_BOOL] = {"BOOL", 1},
};

enum { N_DTYPES = sizeof DTYPES / sizeof DTYPES[0] };

size_t mb_st_dtype_size(enum mb_st_dtype dtype)
{
    return DTYPES[dtype].size;
}

const char *mb_st_dtype_name(enum mb_st_dtype dtype)
{
    return DTYPES[dtype].name;
}

void mb_st_widen(const void *bytes, enum mb_st_dtype dtype, size_t n, float *out)
{
    const uint16_t *halves = bytes;
    if (dtype == MB_ST_F32) {
        memcpy(out, bytes, n * sizeof *out);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        out[i] = dtype == MB_ST_BF16 ? mb_bf16_float(halves[i]) : mb_f16_float(halves[i]);
    }
}

/* Of a finite number that has no room. */
static int no_room(const char *tensor, enum mb_st_dtype dtype, struct mb_err *err)
{
    return dtype == MB_ST_F16
               ? mb_err_set(err, MB_EUNSUPPORTED,
                            "tensor %s has values beyond 65504; use --dtype bf16", tensor)
               : mb_err_set(err, MB_EUNSUPPORTED,
                            "tensor %s has values beyond those of bf16; use --dtype fp32", tensor);
}

int mb_st_narrow(const char *tensor, const float *p, size_t n, enum mb_st_dtype dtype, void *out,
                 struct mb_err *err)
{
    const uint16_t infinite = dtype == MB_ST_BF16 ? 0x7f80 : 0x7c00;
    uint16_t *halves = out;
    int fits = 1;
    if (dtype == MB_ST_F32) {
        memcpy(out, p, n * sizeof *p);
        return 0;
    }
    for (size_t i = 0; i < n; i++) {
        halves[i] = dtype == MB_ST_BF16 ? mb_float_bf16(p[i]) : mb_float_f16(p[i]);
        fits &= (halves[i] & 0x7fff) != infinite || isinf(p[i]);
    }
    return fits ? 0 : no_room(tensor, dtype, err);
}

int mb_st_tensor_bytes(const struct mb_st_tensor *t, uint64_t *out)
{
    uint64_t n = DTYPES[t->dtype].size;
    for (int i = 0; i < t->n_dims; i++) {
        if (__builtin_mul_overflow(n, t->shape[i], &n)) {
            return -1;
        }
    }
    *out = n;
    return 0;
}

/* ---- reading ---- */

struct mb_st_reader {
    char *name; /* path, for texts */
    int fd;     /* -1: parsed from memory only */
    uint64_t data_at;
    struct mb_st_tensor *tensors; /* by offset */
    size_t n_tensors;
    struct mb_st_meta *meta;
    size_t n_meta;
    uint64_t data_bytes;
    uint64_t *sums;      /* of its blocks; NULL: it has none */
    uint8_t *is_checked; /* [blocks] */
    uint8_t *block;      /* MB_SUMS_BLOCK_BYTES, when the first is read */
    uint64_t in_block;   /* which that is */
};

static int corrupt(struct mb_err *err, const char *name, const char *tensor, const char *what)
{
    return mb_err_set(err, MB_ECORRUPT, "%s: not a valid safetensors file: %s%s%s", name,
                      tensor != NULL ? tensor : "", tensor != NULL ? ": " : "", what);
}

static int out_of_memory(struct mb_err *err, const char *name)
{
    return mb_err_set(err, MB_ENOMEM, "%s: out of memory", name);
}

static int take_dtype(const json_t *o, struct mb_st_tensor *t)
{
    const char *s = json_string_value(json_object_get(o, "dtype"));
    for (size_t i = 0; s != NULL && i < N_DTYPES; i++) {
        if (strcmp(s, DTYPES[i].name) == 0) {
            t->dtype = (enum mb_st_dtype)i;
            return 0;
        }
    }
    return -1;
}

static int take_u64(const json_t *j, uint64_t *out)
{
    if (!json_is_integer(j) || json_integer_value(j) < 0) {
        return -1;
    }
    *out = (uint64_t)json_integer_value(j);
    return 0;
}

static int take_tensor(struct mb_st_reader *r, const char *key, const json_t *o, struct mb_err *err)
{
    struct mb_st_tensor *t = &r->tensors[r->n_tensors];
    const json_t *shape = json_object_get(o, "shape");
    const json_t *offsets = json_object_get(o, "data_offsets");
    if (take_dtype(o, t) != 0) {
        return corrupt(err, r->name, key, "unknown dtype");
    }
    if (!json_is_array(shape) || json_array_size(shape) > MB_ST_DIMS_MAX) {
        return corrupt(err, r->name, key, "shape is no list of at most 8 numbers");
    }
    t->n_dims = (int)json_array_size(shape);
    for (int i = 0; i < t->n_dims; i++) {
        if (take_u64(json_array_get(shape, (size_t)i), &t->shape[i]) != 0) {
            return corrupt(err, r->name, key, "a dimension is no number");
        }
    }
    uint64_t bytes = 0;
    if (json_array_size(offsets) != 2 || take_u64(json_array_get(offsets, 0), &t->begin) != 0 ||
        take_u64(json_array_get(offsets, 1), &t->end) != 0 || t->begin > t->end ||
        mb_st_tensor_bytes(t, &bytes) != 0 || bytes != t->end - t->begin) {
        return corrupt(err, r->name, key, "data_offsets do not fit shape and dtype");
    }
    char *name = mb_strdup(key);
    if (name == NULL) {
        return out_of_memory(err, r->name);
    }
    t->name = name;
    r->n_tensors++;
    return 0;
}

static int take_metadata(struct mb_st_reader *r, json_t *o, struct mb_err *err)
{
    const char *key;
    json_t *value;
    if (!json_is_object(o) || json_object_size(o) > META_MAX) {
        return corrupt(err, r->name, "__metadata__", "is no object of at most 256 strings");
    }
    r->meta = mb_calloc(json_object_size(o) + 1, sizeof *r->meta);
    if (r->meta == NULL) {
        return out_of_memory(err, r->name);
    }
    json_object_foreach(o, key, value)
    {
        if (!json_is_string(value)) {
            return corrupt(err, r->name, "__metadata__", "holds something that is no string");
        }
        struct mb_st_meta *m = &r->meta[r->n_meta++];
        m->key = mb_strdup(key);
        m->value = mb_strdup(json_string_value(value));
        if (m->key == NULL || m->value == NULL) {
            return out_of_memory(err, r->name);
        }
    }
    return 0;
}

static int by_offset(const void *a, const void *b)
{
    const struct mb_st_tensor *x = a, *y = b;
    if (x->begin != y->begin) {
        return x->begin < y->begin ? -1 : 1;
    }
    return x->end < y->end ? -1 : x->end > y->end;
}

static int check_cover(struct mb_st_reader *r, uint64_t data_bytes, struct mb_err *err)
{
    uint64_t at = 0;
    qsort(r->tensors, r->n_tensors, sizeof *r->tensors, by_offset);
    for (size_t i = 0; i < r->n_tensors; i++) {
        if (r->tensors[i].begin != at) {
            return corrupt(err, r->name, r->tensors[i].name,
                           "overlaps its neighbour or leaves a gap");
        }
        at = r->tensors[i].end;
    }
    if (at != data_bytes) {
        return mb_err_set(err, MB_ECORRUPT,
                          "%s: not a valid safetensors file: the header describes %" PRIu64
                          " bytes of data, the file has %" PRIu64 " (truncated?)",
                          r->name, at, data_bytes);
    }
    return 0;
}

static int take_all(struct mb_st_reader *r, json_t *root, struct mb_err *err)
{
    const char *key;
    json_t *value;
    r->tensors = mb_calloc(json_object_size(root) + 1, sizeof *r->tensors);
    if (r->tensors == NULL) {
        return out_of_memory(err, r->name);
    }
    json_object_foreach(root, key, value)
    {
        int rc = strcmp(key, "__metadata__") == 0 ? take_metadata(r, value, err)
                                                  : take_tensor(r, key, value, err);
        if (rc != 0) {
            return rc;
        }
    }
    return 0;
}

/* ---- checksums ---- */

static const char *metadata(const struct mb_st_reader *r, const char *key, size_t *n)
{
    const char *value = mb_st_metadata(r, key);
    *n = value != NULL ? strlen(value) : 0;
    return value;
}

static int take_sums(struct mb_st_reader *r, const void *header, size_t n, struct mb_err *err)
{
    const uint64_t n_blocks = mb_sums_n_blocks(r->data_bytes);
    size_t n_digits = 0;
    const char *digits = metadata(r, MB_SUMS_BLOCKS, &n_digits);
    const enum mb_seal seal = mb_seal_check(header, n, MB_SUMS_HEADER);
    if (seal == MB_SEAL_ABSENT && digits == NULL) {
        return 0;
    }
    if (seal != MB_SEAL_FITS || digits == NULL || n_digits / MB_SUMS_DIGITS != n_blocks ||
        n_digits % MB_SUMS_DIGITS != 0) {
        return mb_err_set(err, MB_ECORRUPT,
                          "%s: damaged: the header's checksum is not that of its bytes (whoever "
                          "saved it anew with its old metadata leaves mobula.* out of that)",
                          r->name);
    }
    r->sums = mb_calloc((size_t)n_blocks + 1, sizeof *r->sums);
    r->is_checked = mb_calloc((size_t)n_blocks + 1, 1);
    if (r->sums == NULL || r->is_checked == NULL) {
        return out_of_memory(err, r->name);
    }
    for (uint64_t i = 0; i < n_blocks; i++) {
        if (mb_sums_get(digits + i * MB_SUMS_DIGITS, &r->sums[i]) != 0) {
            return corrupt(err, r->name, MB_SUMS_BLOCKS, "is no list of checksums");
        }
    }
    return 0;
}

int mb_st_parse(const char *name, const void *header, size_t n, uint64_t data_bytes,
                struct mb_st_reader **out, struct mb_err *err)
{
    json_error_t je;
    json_t *root = json_loadb(header, n, JSON_REJECT_DUPLICATES, &je);
    struct mb_st_reader *r = mb_calloc(1, sizeof *r);
    int rc = 0;
    if (r != NULL) {
        r->fd = -1;
        r->name = mb_strdup(name);
    }
    if (r == NULL || r->name == NULL) {
        rc = out_of_memory(err, name);
    } else if (!json_is_object(root)) {
        rc = corrupt(err, name, NULL, "the header is no JSON object");
    } else {
        rc = take_all(r, root, err);
    }
    if (rc == 0) {
        rc = check_cover(r, data_bytes, err);
    }
    if (rc == 0) {
        r->data_bytes = data_bytes;
        rc = take_sums(r, header, n, err);
    }
    json_decref(root);
    if (rc != 0) {
        mb_st_close(r);
        return rc;
    }
    *out = r;
    return 0;
}

static int read_at(int fd, const char *name, uint64_t at, void *buf, size_t n, struct mb_err *err)
{
    uint8_t *p = buf;
    while (n > 0) {
        ssize_t k = pread(fd, p, n, (off_t)at);
        if (k < 0 && errno == EINTR) {
            continue;
        }
        if (k < 0) {
            return mb_err_sys(err, errno, "%s", name);
        }
        if (k == 0) {
            return mb_err_set(err, MB_ECORRUPT, "%s: the file ends early (truncated?)", name);
        }
        p += k;
        at += (uint64_t)k;
        n -= (size_t)k;
    }
    return 0;
}

int mb_st_open(const char *path, struct mb_st_reader **out, struct mb_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe would wait for a writer */
    if (fd < 0) {
        return mb_err_sys(err, errno, "%s", path);
    }
    char *header = NULL;
    uint64_t n = 0;
    struct stat st;
    int rc = 0;
    if (fstat(fd, &st) != 0) {
        rc = mb_err_sys(err, errno, "%s", path);
        goto out;
    }
    if (!S_ISREG(st.st_mode)) {
        rc = corrupt(err, path, NULL, "it is no regular file");
        goto out;
    }
    rc = read_at(fd, path, 0, &n, sizeof n, err);
    if (rc != 0) {
        goto out;
    }
    if (n > MB_ST_HEADER_MAX || n > (uint64_t)st.st_size - 8) {
        rc = corrupt(err, path, NULL, "the header is longer than the file (truncated?)");
        goto out;
    }
    header = mb_alloc((size_t)n);
    if (header == NULL) {
        rc = out_of_memory(err, path);
        goto out;
    }
    rc = read_at(fd, path, 8, header, (size_t)n, err);
    if (rc == 0) {
        rc = mb_st_parse(path, header, (size_t)n, (uint64_t)st.st_size - 8 - n, out, err);
    }
    if (rc == 0) {
        (*out)->fd = fd;
        (*out)->data_at = 8 + n;
        fd = -1;
    }
out:
    mb_free(header);
    if (fd >= 0) {
        close(fd);
    }
    return rc;
}

void mb_st_close(struct mb_st_reader *r)
{
    if (r == NULL) {
        return;
    }
    for (size_t i = 0; i < r->n_tensors; i++) {
        mb_free((void *)(uintptr_t)r->tensors[i].name);
    }
    for (size_t i = 0; i < r->n_meta; i++) {
        mb_free((void *)(uintptr_t)r->meta[i].key);
        mb_free((void *)(uintptr_t)r->meta[i].value);
    }
    if (r->fd >= 0) {
        close(r->fd);
    }
    mb_free(r->sums);
    mb_free(r->is_checked);
    mb_free(r->block);
    mb_free(r->tensors);
    mb_free(r->meta);
    mb_free(r->name);
    mb_free(r);
}

size_t mb_st_n_tensors(const struct mb_st_reader *r)
{
    return r->n_tensors;
}

const struct mb_st_tensor *mb_st_tensor(const struct mb_st_reader *r, size_t i)
{
    return &r->tensors[i];
}

const struct mb_st_tensor *mb_st_find(const struct mb_st_reader *r, const char *name)
{
    for (size_t i = 0; i < r->n_tensors; i++) {
        if (strcmp(r->tensors[i].name, name) == 0) {
            return &r->tensors[i];
        }
    }
    return NULL;
}

const char *mb_st_metadata(const struct mb_st_reader *r, const char *key)
{
    for (size_t i = 0; i < r->n_meta; i++) {
        if (strcmp(r->meta[i].key, key) == 0) {
            return r->meta[i].value;
        }
    }
    return NULL;
}

/* ---- data ---- */

/* All of a block into buf, compared; t: who wants it. */
static int read_block(struct mb_st_reader *r, const struct mb_st_tensor *t, uint64_t block,
                      void *buf, struct mb_err *err)
{
    const size_t n = mb_sums_block_bytes(r->data_bytes, block);
    const uint64_t at = block * MB_SUMS_BLOCK_BYTES;
    int rc = read_at(r->fd, r->name, r->data_at + at, buf, n, err);
    if (rc != 0) {
        return rc;
    }
    const uint64_t crc = mb_crc64nvme(0, buf, n);
    if (crc != r->sums[block]) {
        return mb_err_set(err, MB_ECORRUPT,
                          "%s: damaged: bytes %" PRIu64 " to %" PRIu64
                          " of the file, where tensor %s is, have CRC64NVME %016" PRIx64
                          "; those that were written had %016" PRIx64,
                          r->name, r->data_at + at, r->data_at + at + n - 1, t->name, crc,
                          r->sums[block]);
    }
    r->is_checked[block] = 1;
    return 0;
}

/* The block that is kept becomes this one. */
static int turn_to(struct mb_st_reader *r, const struct mb_st_tensor *t, uint64_t block,
                   struct mb_err *err)
{
    if (r->block == NULL) {
        r->block = mb_alloc(MB_SUMS_BLOCK_BYTES);
        r->in_block = UINT64_MAX;
    }
    if (r->block == NULL) {
        return out_of_memory(err, r->name);
    }
    if (r->in_block == block) {
        return 0;
    }
    r->in_block = UINT64_MAX;
    int rc = read_block(r, t, block, r->block, err);
    r->in_block = rc == 0 ? block : UINT64_MAX;
    return rc;
}

/* n bytes of one block, from offset on. */
static int read_in_block(struct mb_st_reader *r, const struct mb_st_tensor *t, uint64_t block,
                         size_t offset, void *buf, size_t n, struct mb_err *err)
{
    const int is_kept = r->block != NULL && r->in_block == block;
    if (!is_kept && n == mb_sums_block_bytes(r->data_bytes, block)) {
        return read_block(r, t, block, buf, err);
    }
    if (!is_kept && r->is_checked[block]) {
        return read_at(r->fd, r->name, r->data_at + block * MB_SUMS_BLOCK_BYTES + offset, buf, n,
                       err);
    }
    int rc = turn_to(r, t, block, err);
    if (rc == 0) {
        memcpy(buf, r->block + offset, n);
    }
    return rc;
}

int mb_st_read(struct mb_st_reader *r, const struct mb_st_tensor *t, uint64_t offset, void *buf,
               size_t n, struct mb_err *err)
{
    uint8_t *p = buf;
    uint64_t at = t->begin + offset;
    int rc = 0;
    if (r->sums == NULL) {
        return read_at(r->fd, r->name, r->data_at + at, buf, n, err);
    }
    while (n > 0 && rc == 0) {
        const uint64_t block = at / MB_SUMS_BLOCK_BYTES;
        const size_t from = (size_t)(at % MB_SUMS_BLOCK_BYTES);
        const size_t left = mb_sums_block_bytes(r->data_bytes, block) - from;
        const size_t k = n < left ? n : left;
        rc = read_in_block(r, t, block, from, p, k, err);
        at += k;
        p += k;
        n -= k;
    }
    return rc;
}

int mb_st_has_sums(const struct mb_st_reader *r)
{
    return r->sums != NULL;
}

int mb_st_verify(struct mb_st_reader *r, struct mb_err *err)
{
    size_t i = 0;
    int rc = 0;
    for (uint64_t block = 0; r->sums != NULL && block < mb_sums_n_blocks(r->data_bytes) && rc == 0;
         block++) {
        while (r->tensors[i].end <= block * MB_SUMS_BLOCK_BYTES) { /* they cover all */
            i++;
        }
        rc = turn_to(r, &r->tensors[i], block, err);
    }
    return rc;
}
