/*
 * Reader and writer of safetensors.h.
 *
 *  1. open: read the length, read the header, mb_st_parse() checks it: each entry's dtype, shape
 * and offsets agree, and, sorted by offset, the tensors cover the data exactly.
 *  2. read: pread of a part of a tensor.
 *  3. create: lay the tensors out in order, write the header, padded with spaces to 8 bytes.
 *  4. write: bytes go through one buffer to the file and into the checksum; a large
 *     piece is written from where it lies. The kernel is told to begin with the disk
 *     now and then: else all of a large file waits for the fsync at the end.
 *  5. finish: everything announced must have come; fsync, close.
 * Failures: a header that is too long, no JSON, with a wrong field, an overflowing shape, a gap, an
 * overlap or a wrong size is MB_ECORRUPT naming the file and the tensor. A failed write removes the
 * file: what looks whole is whole.
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
#include "base/buf.h"
#include "base/checksum.h"
#include "base/fs.h"
#include "base/half.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tensor bytes are written as they lie");

enum {
    BUFFER_BYTES = 1 << 20,
    DIRECT_BYTES = 1 << 18, /* pieces from this size on do not go through the buffer */
    KICK_BYTES = 16 << 20,
    ALIGN_BYTES = 8,
    META_MAX = 256
};

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

/* Bytes of a tensor; -1 when the product overflows. */
static int tensor_bytes(const struct mb_st_tensor *t, uint64_t *out)
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
        tensor_bytes(t, &bytes) != 0 || bytes != t->end - t->begin) {
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

int mb_st_read(struct mb_st_reader *r, const struct mb_st_tensor *t, uint64_t offset, void *buf,
               size_t n, struct mb_err *err)
{
    return read_at(r->fd, r->name, r->data_at + t->begin + offset, buf, n, err);
}

/* ---- writing ---- */

struct mb_st_writer {
    char *path;
    int fd;
    uint8_t *buf;
    size_t n_buf;
    uint64_t crc;
    uint64_t n_written; /* bytes of the file so far, those in buf included */
    uint64_t n_expected;
    uint64_t n_flushed, n_kicked; /* bytes in the file; of these, on their way to the disk */
    int (*written)(void *arg, uint64_t n); /* NULL: nobody listens */
    void *arg;
};

void mb_st_watch(struct mb_st_writer *w, int (*written)(void *arg, uint64_t n), void *arg)
{
    w->written = written;
    w->arg = arg;
}

static int put(struct mb_st_writer *w, const uint8_t *p, size_t n, struct mb_err *err)
{
    w->crc = mb_crc64nvme(w->crc, p, n);
    int rc = mb_fs_write_all(w->fd, p, n, err);
    if (rc != 0) {
        return mb_err_wrap(err, "%s", w->path);
    }
    if (w->written != NULL && (rc = w->written(w->arg, n)) != 0) {
        return mb_err_set(err, rc, "%s: cancelled", w->path);
    }
    w->n_flushed += n;
    if (w->n_flushed - w->n_kicked >= KICK_BYTES) {
        /* Not every file system can; what goes wrong with the disk is what fsync says. */
        (void)sync_file_range(w->fd, (off_t)w->n_kicked, (off_t)(w->n_flushed - w->n_kicked),
                              SYNC_FILE_RANGE_WRITE);
        w->n_kicked = w->n_flushed;
    }
    return 0;
}

static int flush_buffer(struct mb_st_writer *w, struct mb_err *err)
{
    size_t n = w->n_buf;
    w->n_buf = 0;
    return put(w, w->buf, n, err);
}

/* In parts that the checksum leaves in the processor's cache for the write. */
static int write_directly(struct mb_st_writer *w, const uint8_t *p, size_t n, struct mb_err *err)
{
    int rc = flush_buffer(w, err);
    while (n > 0 && rc == 0) {
        size_t k = n < BUFFER_BYTES ? n : BUFFER_BYTES;
        rc = put(w, p, k, err);
        p += k;
        n -= k;
    }
    return rc;
}

int mb_st_write(struct mb_st_writer *w, const void *p, size_t n, struct mb_err *err)
{
    const uint8_t *bytes = p;
    if (n > w->n_expected - w->n_written) {
        return mb_err_set(err, MB_ESTATE, "%s: more data than the header announces", w->path);
    }
    w->n_written += n;
    if (n >= DIRECT_BYTES) {
        return write_directly(w, bytes, n, err);
    }
    while (n > 0) {
        size_t k = BUFFER_BYTES - w->n_buf;
        k = k < n ? k : n;
        memcpy(w->buf + w->n_buf, bytes, k);
        w->n_buf += k;
        bytes += k;
        n -= k;
        if (w->n_buf == BUFFER_BYTES) {
            int rc = flush_buffer(w, err);
            if (rc != 0) {
                return rc;
            }
        }
    }
    return 0;
}

static json_t *tensor_json(const struct mb_st_tensor *t)
{
    json_t *shape = json_array();
    for (int i = 0; i < t->n_dims; i++) {
        json_array_append_new(shape, json_integer((json_int_t)t->shape[i]));
    }
    return json_pack("{s:s, s:o, s:[I,I]}", "dtype", DTYPES[t->dtype].name, "shape", shape,
                     "data_offsets", (json_int_t)t->begin, (json_int_t)t->end);
}

static int header_text(struct mb_st_tensor *tensors, size_t n_tensors,
                       const struct mb_st_meta *meta, size_t n_meta, uint64_t *data_bytes,
                       struct mb_buf *out, struct mb_err *err)
{
    json_t *root = json_object();
    uint64_t at = 0;
    int bad = root == NULL;
    if (n_meta > 0) {
        json_t *m = json_object();
        for (size_t i = 0; i < n_meta; i++) {
            bad |= json_object_set_new(m, meta[i].key, json_string(meta[i].value));
        }
        bad |= json_object_set_new(root, "__metadata__", m);
    }
    for (size_t i = 0; i < n_tensors && !bad; i++) {
        uint64_t n = 0;
        bad |= tensor_bytes(&tensors[i], &n);
        tensors[i].begin = at;
        tensors[i].end = at += n;
        bad |= json_object_set_new(root, tensors[i].name, tensor_json(&tensors[i]));
    }
    char *text = bad ? NULL : json_dumps(root, JSON_COMPACT);
    json_decref(root);
    int rc = 0;
    if (text == NULL || mb_buf_puts(out, text) != 0) {
        rc = mb_err_set(err, MB_ENOMEM, "out of memory for a safetensors header");
    }
    while (rc == 0 && out->len % ALIGN_BYTES != 0) {
        rc = mb_buf_puts(out, " ");
    }
    mb_free(text);
    *data_bytes = at;
    return rc;
}

int mb_st_create(const char *path, struct mb_st_tensor *tensors, size_t n_tensors,
                 const struct mb_st_meta *meta, size_t n_meta, struct mb_st_writer **out,
                 struct mb_err *err)
{
    struct mb_buf header = {0};
    uint64_t data_bytes = 0;
    int rc = header_text(tensors, n_tensors, meta, n_meta, &data_bytes, &header, err);
    struct mb_st_writer *w = rc == 0 ? mb_calloc(1, sizeof *w) : NULL;
    if (rc == 0 && w == NULL) {
        rc = out_of_memory(err, path);
    }
    if (rc != 0) {
        mb_buf_close(&header);
        return rc;
    }
    w->fd = -1;
    w->path = mb_strdup(path);
    w->buf = mb_alloc(BUFFER_BYTES);
    w->n_expected = 8 + header.len + data_bytes;
    if (w->path == NULL || w->buf == NULL) {
        rc = out_of_memory(err, path);
    } else if ((w->fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644)) < 0) {
        rc = mb_err_sys(err, errno, "%s", path);
    }
    if (rc == 0) {
        uint64_t n = header.len;
        rc = mb_st_write(w, &n, sizeof n, err);
    }
    if (rc == 0) {
        rc = mb_st_write(w, header.data, header.len, err);
    }
    mb_buf_close(&header);
    if (rc != 0) {
        mb_st_abandon(w);
        return rc;
    }
    *out = w;
    return 0;
}

static void free_writer(struct mb_st_writer *w)
{
    if (w->fd >= 0) {
        close(w->fd);
    }
    mb_free(w->buf);
    mb_free(w->path);
    mb_free(w);
}

/* What waits in the page cache goes to the disk piece by piece, so that who listens sees it go;
 * what goes wrong is what fsync says. */
static void sync_in_pieces(struct mb_st_writer *w)
{
    for (uint64_t at = 0; w->written != NULL && at < w->n_flushed; at += KICK_BYTES) {
        if (sync_file_range(w->fd, (off_t)at, KICK_BYTES,
                            SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                                SYNC_FILE_RANGE_WAIT_AFTER) != 0) {
            break;
        }
        (void)w->written(w->arg, w->n_flushed - at < KICK_BYTES ? w->n_flushed - at : KICK_BYTES);
    }
}

int mb_st_finish(struct mb_st_writer *w, uint64_t *size_bytes, uint64_t *crc64nvme,
                 struct mb_err *err)
{
    int rc = 0;
    if (w->n_written != w->n_expected) {
        rc = mb_err_set(err, MB_ESTATE, "%s: %" PRIu64 " bytes are missing", w->path,
                        w->n_expected - w->n_written);
    }
    if (rc == 0) {
        rc = flush_buffer(w, err);
    }
    if (rc == 0) {
        sync_in_pieces(w);
    }
    if (rc == 0 && fsync(w->fd) != 0) {
        rc = mb_err_sys(err, errno, "%s: fsync", w->path);
    }
    if (rc == 0) {
        int fd = w->fd;
        w->fd = -1;
        if (close(fd) != 0) {
            rc = mb_err_sys(err, errno, "%s: close", w->path);
        }
    }
    if (rc != 0) {
        mb_st_abandon(w);
        return rc;
    }
    *size_bytes = w->n_written;
    *crc64nvme = w->crc;
    free_writer(w);
    return 0;
}

void mb_st_abandon(struct mb_st_writer *w)
{
    if (w == NULL) {
        return;
    }
    /* The file is ours only if open() made it: path exists with O_EXCL. */
    if (w->n_written > 0) {
        unlink(w->path);
    }
    free_writer(w);
}
