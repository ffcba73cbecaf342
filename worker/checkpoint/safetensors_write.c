/*
 * The writer of safetensors.h.
 *
 *  1. create: lay the tensors out in order, make the header, padded with spaces to 8 bytes; where
 *     its checksums will stand (sums.h) are zeros. The file keeps its place free.
 *  2. write: bytes go through one buffer to the file and into the checksum of their block; a large
 *     piece is written from where it lies. The kernel is told to begin with the disk now and then:
 *     else all of a large file waits for the fsync at the end.
 *  3. finish: everything announced must have come; the header is written, with the checksums;
 *     fsync, close. That of the whole file is put together from those of its parts.
 * Failures: a failed write removes the file: what looks whole is whole.
 */
#include "worker/checkpoint/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/checksum.h"
#include "base/fs.h"
#include "worker/checkpoint/sums.h"

enum {
    BUFFER_BYTES = 1 << 20,
    DIRECT_BYTES = 1 << 18, /* pieces from this size on do not go through the buffer */
    KICK_BYTES = 16 << 20,
    ALIGN_BYTES = 8,
    LENGTH_BYTES = 8 /* of the header, before it */
};

static int out_of_memory(struct mb_err *err, const char *name)
{
    return mb_err_set(err, MB_ENOMEM, "%s: out of memory", name);
}

struct mb_st_writer {
    char *path;
    int fd;
    uint8_t *buf;
    size_t n_buf;
    struct mb_buf header;
    char *sums;              /* in header: where the digits of the blocks are */
    uint64_t crc, block_crc; /* of the blocks before this one; of this one so far */
    uint64_t n_summed;       /* bytes of data in both */
    uint64_t n_written;      /* bytes of the file so far, those in buf included */
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

static void end_block(struct mb_st_writer *w)
{
    const uint64_t block = (w->n_summed - 1) / MB_SUMS_BLOCK_BYTES;
    mb_sums_put(w->sums + block * MB_SUMS_DIGITS, w->block_crc);
    w->crc = mb_crc64nvme_combine(w->crc, w->block_crc, w->n_summed - block * MB_SUMS_BLOCK_BYTES);
    w->block_crc = 0;
}

static void sum(struct mb_st_writer *w, const uint8_t *p, size_t n)
{
    while (n > 0) {
        const size_t left = MB_SUMS_BLOCK_BYTES - (size_t)(w->n_summed % MB_SUMS_BLOCK_BYTES);
        const size_t k = n < left ? n : left;
        w->block_crc = mb_crc64nvme(w->block_crc, p, k);
        w->n_summed += k;
        p += k;
        n -= k;
        if (k == left) {
            end_block(w);
        }
    }
}

static int put(struct mb_st_writer *w, const uint8_t *p, size_t n, struct mb_err *err)
{
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
    sum(w, w->buf, n);
    return n > 0 ? put(w, w->buf, n, err) : 0;
}

/* In parts that the checksum leaves in the processor's cache for the write. */
static int write_directly(struct mb_st_writer *w, const uint8_t *p, size_t n, struct mb_err *err)
{
    int rc = flush_buffer(w, err);
    while (n > 0 && rc == 0) {
        size_t k = n < BUFFER_BYTES ? n : BUFFER_BYTES;
        sum(w, p, k);
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
    return json_pack("{s:s, s:o, s:[I,I]}", "dtype", mb_st_dtype_name(t->dtype), "shape", shape,
                     "data_offsets", (json_int_t)t->begin, (json_int_t)t->end);
}

/* Checksums first, then the caller's. */
static json_t *metadata_json(const struct mb_st_meta *meta, size_t n_meta, uint64_t data_bytes)
{
    const size_t n_sums = (size_t)mb_sums_n_blocks(data_bytes) * MB_SUMS_DIGITS;
    json_t *m = json_object();
    char *zeros = mb_alloc(n_sums + 1);
    int bad = m == NULL || zeros == NULL;
    if (!bad) {
        memset(zeros, '0', n_sums);
        bad |= json_object_set_new(m, MB_SUMS_HEADER, json_string(MB_SUMS_NONE));
        bad |= json_object_set_new(m, MB_SUMS_BLOCKS, json_stringn(zeros, n_sums));
    }
    for (size_t i = 0; i < n_meta && !bad; i++) {
        bad |= json_object_set_new(m, meta[i].key, json_string(meta[i].value));
    }
    mb_free(zeros);
    if (bad) {
        json_decref(m);
        m = NULL;
    }
    return m;
}

/* One behind the other; -1 when the sum overflows. */
static int lay_out(struct mb_st_tensor *tensors, size_t n_tensors, uint64_t *data_bytes)
{
    uint64_t at = 0;
    for (size_t i = 0; i < n_tensors; i++) {
        uint64_t n = 0;
        tensors[i].begin = at;
        if (mb_st_tensor_bytes(&tensors[i], &n) != 0 || __builtin_add_overflow(at, n, &at)) {
            return -1;
        }
        tensors[i].end = at;
    }
    *data_bytes = at;
    return 0;
}

/* The length of the header, and the header. */
static int header_text(const struct mb_st_tensor *tensors, size_t n_tensors,
                       const struct mb_st_meta *meta, size_t n_meta, uint64_t data_bytes,
                       struct mb_buf *out, struct mb_err *err)
{
    json_t *root = json_object();
    int bad = json_object_set_new(root, "__metadata__", metadata_json(meta, n_meta, data_bytes));
    for (size_t i = 0; i < n_tensors && !bad; i++) {
        bad |= json_object_set_new(root, tensors[i].name, tensor_json(&tensors[i]));
    }
    char *text = bad ? NULL : json_dumps(root, JSON_COMPACT);
    json_decref(root);
    uint64_t n = 0;
    int rc = text != NULL && mb_buf_add(out, &n, sizeof n) == 0 ? mb_buf_puts(out, text) : -1;
    while (rc == 0 && out->len % ALIGN_BYTES != 0) {
        rc = mb_buf_puts(out, " ");
    }
    if (rc == 0) {
        n = out->len - sizeof n;
        memcpy(out->data, &n, sizeof n);
    } else {
        rc = mb_err_set(err, MB_ENOMEM, "out of memory for a safetensors header");
    }
    mb_free(text);
    return rc;
}

int mb_st_create(const char *path, struct mb_st_tensor *tensors, size_t n_tensors,
                 const struct mb_st_meta *meta, size_t n_meta, struct mb_st_writer **out,
                 struct mb_err *err)
{
    uint64_t data_bytes = 0;
    struct mb_st_writer *w = mb_calloc(1, sizeof *w);
    if (w == NULL) {
        return out_of_memory(err, path);
    }
    w->fd = -1;
    w->path = mb_strdup(path);
    w->buf = mb_alloc(BUFFER_BYTES);
    int rc = w->path != NULL && w->buf != NULL ? 0 : out_of_memory(err, path);
    if (rc == 0 && lay_out(tensors, n_tensors, &data_bytes) != 0) {
        rc = mb_err_set(err, MB_EINVAL, "%s: more bytes than a file has", path);
    }
    if (rc == 0) {
        rc = header_text(tensors, n_tensors, meta, n_meta, data_bytes, &w->header, err);
    }
    if (rc == 0 && (w->fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644)) < 0) {
        rc = mb_err_sys(err, errno, "%s", path);
    }
    if (rc == 0) {
        w->sums = mb_sums_value((char *)w->header.data, w->header.len, MB_SUMS_BLOCKS);
        w->n_written = w->header.len;
        w->n_expected = w->n_written + data_bytes;
        if (lseek(w->fd, (off_t)w->header.len, SEEK_SET) < 0) {
            rc = mb_err_sys(err, errno, "%s", path);
        }
    }
    if (rc != 0) {
        mb_st_abandon(w);
        return rc;
    }
    *out = w;
    return 0;
}

/* The header, with the checksums; that of the whole file is w->crc then. */
static int write_header(struct mb_st_writer *w, struct mb_err *err)
{
    if (w->n_summed % MB_SUMS_BLOCK_BYTES != 0) {
        end_block(w);
    }
    mb_seal_set((char *)w->header.data + LENGTH_BYTES, w->header.len - LENGTH_BYTES,
                MB_SUMS_HEADER);
    w->crc =
        mb_crc64nvme_combine(mb_crc64nvme(0, w->header.data, w->header.len), w->crc, w->n_summed);
    if (lseek(w->fd, 0, SEEK_SET) != 0) {
        return mb_err_sys(err, errno, "%s", w->path);
    }
    return put(w, w->header.data, w->header.len, err);
}

static void free_writer(struct mb_st_writer *w)
{
    if (w->fd >= 0) {
        close(w->fd);
    }
    mb_buf_close(&w->header);
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
        rc = write_header(w, err);
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
