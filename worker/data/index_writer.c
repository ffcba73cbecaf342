/*
 * Writing an indexed dataset.
 *
 * 1. create opens PREFIX.bin.tmp-XXXX and two unlinked spool files (lengths, documents) beside it.
 * 2. add / add_raw append tokens to .bin and lengths to the spool; end_document notes how many
 *    sequences there are so far. All go through 1 MiB buffers.
 * 3. prepare flushes, writes PREFIX.idx.tmp-XXXX (header, spooled lengths, running offsets, spooled
 *    documents) and fsyncs both.
 * 4. commit unlinks an old PREFIX.idx, renames .bin, then .idx, then fsyncs the directory.
 * Any failure (full disk, a name that cannot be created) is returned with the path; destroy then
 * closes and removes the temporary names, so nothing that looks whole is left.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/fs.h"
#include "worker/data/index.h"

enum { BUFFER_BYTES = 1 << 20, PLACE_ITEMS = 8192 };

struct stream {
    int fd;
    char *path; /* what messages call it; unlinked already for a spool */
    struct mb_buf buffer;
};

struct mb_index_writer {
    char *directory;
    char *bin_path; /* final names */
    char *idx_path;
    struct stream bin;
    struct stream idx;
    struct stream lengths;
    struct stream documents;
    enum mb_index_dtype dtype;
    uint64_t n_sequences;
    uint64_t n_documents;
    uint64_t n_tokens;
    int is_prepared;
    int is_committed;
};

static int stream_flush(struct stream *s, struct mb_err *err)
{
    int rc = mb_fs_write_all(s->fd, s->buffer.data, s->buffer.len, err);

    if (rc == 0)
        mb_buf_reset(&s->buffer);
    else
        mb_err_wrap(err, "%s", s->path);
    return rc;
}

static int stream_add(struct stream *s, const void *p, size_t n, struct mb_err *err)
{
    if (n == 0)
        return 0;
    if (s->buffer.len + n > BUFFER_BYTES) {
        int rc = stream_flush(s, err);
        if (rc != 0)
            return rc;
    }
    if (n >= BUFFER_BYTES) {
        int rc = mb_fs_write_all(s->fd, p, n, err);
        if (rc != 0)
            mb_err_wrap(err, "%s", s->path);
        return rc;
    }
    if (mb_buf_add(&s->buffer, p, n) != 0)
        return mb_err_set(err, MB_ENOMEM, "%s: out of memory", s->path);
    return 0;
}

/* A new file "FINAL.tmp-RANDOM"; a spool loses its name at once. */
static int stream_open(struct stream *s, const char *final_path, int is_spool, struct mb_err *err)
{
    s->path = mb_asprintf("%s.tmp-%016llx", final_path, (unsigned long long)mb_random_u64());
    if (s->path == NULL)
        return mb_err_set(err, MB_ENOMEM, "%s: out of memory", final_path);
    s->fd = open(s->path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (s->fd < 0)
        return mb_err_sys(err, errno, "cannot create %s", s->path);
    if (is_spool)
        unlink(s->path);
    return 0;
}

static void stream_close(struct stream *s, int removes)
{
    if (s->fd >= 0)
        close(s->fd);
    if (s->fd >= 0 && removes)
        unlink(s->path);
    s->fd = -1;
    mb_buf_close(&s->buffer);
    mb_free(s->path);
    s->path = NULL;
}

static char *directory_of(const char *path)
{
    const char *slash = strrchr(path, '/');

    if (slash == NULL)
        return mb_strdup(".");
    return mb_strndup(path, slash == path ? 1 : (size_t)(slash - path));
}

int mb_index_writer_create(const char *prefix, enum mb_index_dtype dtype,
                           struct mb_index_writer **out, struct mb_err *err)
{
    struct mb_index_writer *w;
    uint64_t zero = 0;
    int rc;

    if (mb_index_dtype_size(dtype) == 0)
        return mb_err_set(err, MB_EINVAL, "%s: dtype code %d is unknown", prefix, (int)dtype);
    w = mb_calloc(1, sizeof(*w));
    if (w == NULL)
        return mb_err_set(err, MB_ENOMEM, "%s.bin: out of memory", prefix);
    w->dtype = dtype;
    w->bin.fd = w->idx.fd = w->lengths.fd = w->documents.fd = -1;
    w->directory = directory_of(prefix);
    w->bin_path = mb_asprintf("%s.bin", prefix);
    w->idx_path = mb_asprintf("%s.idx", prefix);
    if (w->directory == NULL || w->bin_path == NULL || w->idx_path == NULL) {
        rc = mb_err_set(err, MB_ENOMEM, "%s.bin: out of memory", prefix);
        goto fail;
    }
    rc = stream_open(&w->bin, w->bin_path, 0, err);
    if (rc == 0)
        rc = stream_open(&w->lengths, w->idx_path, 1, err);
    if (rc == 0)
        rc = stream_open(&w->documents, w->idx_path, 1, err);
    if (rc == 0)
        rc = stream_add(&w->documents, &zero, sizeof(zero), err);
    if (rc != 0)
        goto fail;
    *out = w;
    return 0;
fail:
    mb_index_writer_destroy(w);
    return rc;
}

void mb_index_writer_destroy(struct mb_index_writer *w)
{
    if (w == NULL)
        return;
    stream_close(&w->bin, !w->is_committed);
    stream_close(&w->idx, !w->is_committed);
    stream_close(&w->lengths, 0);
    stream_close(&w->documents, 0);
    mb_free(w->directory);
    mb_free(w->bin_path);
    mb_free(w->idx_path);
    mb_free(w);
}

static int id_fits(enum mb_index_dtype dtype, int32_t id)
{
    switch (dtype) {
    case MB_INDEX_U8:
        return id >= 0 && id <= UINT8_MAX;
    case MB_INDEX_I8:
        return id >= INT8_MIN && id <= INT8_MAX;
    case MB_INDEX_I16:
        return id >= INT16_MIN && id <= INT16_MAX;
    case MB_INDEX_U16:
        return id >= 0 && id <= UINT16_MAX;
    case MB_INDEX_I32:
    case MB_INDEX_I64:
        return 1;
    case MB_INDEX_F32:
    case MB_INDEX_F64:
        break;
    }
    return 0;
}

/* n ids in the dtype's form at out; little endian, as every machine we build for. */
static int place_ids(enum mb_index_dtype dtype, const int32_t *ids, size_t n, uint8_t *out,
                     struct mb_err *err)
{
    size_t token_bytes = mb_index_dtype_size(dtype);

    for (size_t i = 0; i < n; i++) {
        int64_t wide = ids[i];
        if (!id_fits(dtype, ids[i]))
            return mb_err_set(err, MB_EINVAL, "token id %d does not fit dtype code %d", (int)ids[i],
                              (int)dtype);
        memcpy(out + i * token_bytes, &wide, token_bytes);
    }
    return 0;
}

static int note_lengths(struct mb_index_writer *w, const int32_t *lengths, size_t n,
                        struct mb_err *err)
{
    int rc = stream_add(&w->lengths, lengths, n * sizeof(*lengths), err);

    if (rc != 0)
        return rc;
    w->n_sequences += n;
    for (size_t i = 0; i < n; i++)
        w->n_tokens += (uint64_t)lengths[i];
    return 0;
}

int mb_index_writer_add(struct mb_index_writer *w, const int32_t *ids, size_t n, struct mb_err *err)
{
    uint8_t placed[PLACE_ITEMS * 8];
    size_t token_bytes = mb_index_dtype_size(w->dtype);
    int32_t length = (int32_t)n;

    if (n > INT32_MAX)
        return mb_err_set(err, MB_EINVAL, "%s: a sequence of %zu tokens is too long (limit %d)",
                          w->bin_path, n, INT32_MAX);
    for (size_t done = 0; done < n;) {
        size_t part = n - done < PLACE_ITEMS ? n - done : PLACE_ITEMS;
        int rc = place_ids(w->dtype, ids + done, part, placed, err);
        if (rc != 0) {
            mb_err_wrap(err, "%s", w->bin_path);
            return rc;
        }
        rc = stream_add(&w->bin, placed, part * token_bytes, err);
        if (rc != 0)
            return rc;
        done += part;
    }
    return note_lengths(w, &length, 1, err);
}

int mb_index_writer_add_raw(struct mb_index_writer *w, const void *tokens, size_t size_bytes,
                            const int32_t *lengths, size_t n_sequences, struct mb_err *err)
{
    int rc = stream_add(&w->bin, tokens, size_bytes, err);

    return rc == 0 ? note_lengths(w, lengths, n_sequences, err) : rc;
}

int mb_index_writer_end_document(struct mb_index_writer *w, struct mb_err *err)
{
    int rc = stream_add(&w->documents, &w->n_sequences, sizeof(w->n_sequences), err);

    if (rc == 0)
        w->n_documents++;
    return rc;
}

static int add_header(struct mb_index_writer *w, struct mb_err *err)
{
    uint8_t header[34] = "MMIDIDX";
    uint64_t version = 1;
    uint64_t n_entries = w->n_documents + 1;

    memcpy(header + 9, &version, 8);
    header[17] = (uint8_t)w->dtype;
    memcpy(header + 18, &w->n_sequences, 8);
    memcpy(header + 26, &n_entries, 8);
    return stream_add(&w->idx, header, sizeof(header), err);
}

/* Copy the first size_bytes of a spool into .idx. */
static int replay(struct mb_index_writer *w, struct stream *spool, uint64_t size_bytes,
                  struct mb_err *err)
{
    uint8_t block[1 << 15];

    for (uint64_t at = 0; at < size_bytes;) {
        size_t want = size_bytes - at < sizeof(block) ? (size_t)(size_bytes - at) : sizeof(block);
        ssize_t got = pread(spool->fd, block, want, (off_t)at);
        int rc;

        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return mb_err_sys(err, got < 0 ? errno : EIO, "read back %s", spool->path);
        rc = stream_add(&w->idx, block, (size_t)got, err);
        if (rc != 0)
            return rc;
        at += (uint64_t)got;
    }
    return 0;
}

static int add_offsets(struct mb_index_writer *w, struct mb_err *err)
{
    int32_t lengths[4096];
    uint64_t token_bytes = mb_index_dtype_size(w->dtype);
    uint64_t offset = 0;

    for (uint64_t at = 0; at < w->n_sequences;) {
        uint64_t left = w->n_sequences - at;
        size_t want = left < 4096 ? (size_t)left : 4096;
        ssize_t got = pread(w->lengths.fd, lengths, want * 4, (off_t)(at * 4));

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 4)
            return mb_err_sys(err, got < 0 ? errno : EIO, "read back %s", w->lengths.path);
        for (size_t i = 0; i < (size_t)got / 4; i++) {
            int rc = stream_add(&w->idx, &offset, sizeof(offset), err);
            if (rc != 0)
                return rc;
            offset += (uint64_t)lengths[i] * token_bytes;
        }
        at += (uint64_t)got / 4;
    }
    return 0;
}

static int write_idx(struct mb_index_writer *w, struct mb_err *err)
{
    int rc = stream_open(&w->idx, w->idx_path, 0, err);

    if (rc == 0)
        rc = add_header(w, err);
    if (rc == 0)
        rc = replay(w, &w->lengths, 4 * w->n_sequences, err);
    if (rc == 0)
        rc = add_offsets(w, err);
    if (rc == 0)
        rc = replay(w, &w->documents, 8 * (w->n_documents + 1), err);
    if (rc == 0)
        rc = stream_flush(&w->idx, err);
    return rc;
}

int mb_index_writer_prepare(struct mb_index_writer *w, struct mb_err *err)
{
    int rc = stream_flush(&w->bin, err);

    if (rc == 0)
        rc = stream_flush(&w->lengths, err);
    if (rc == 0)
        rc = stream_flush(&w->documents, err);
    if (rc == 0)
        rc = write_idx(w, err);
    if (rc != 0)
        return rc;
    if (fsync(w->bin.fd) != 0)
        return mb_err_sys(err, errno, "fsync %s", w->bin.path);
    if (fsync(w->idx.fd) != 0)
        return mb_err_sys(err, errno, "fsync %s", w->idx.path);
    w->is_prepared = 1;
    return 0;
}

int mb_index_writer_commit(struct mb_index_writer *w, struct mb_err *err)
{
    if (!w->is_prepared) {
        int rc = mb_index_writer_prepare(w, err);
        if (rc != 0)
            return rc;
    }
    if (unlink(w->idx_path) != 0 && errno != ENOENT)
        return mb_err_sys(err, errno, "cannot replace %s", w->idx_path);
    if (rename(w->bin.path, w->bin_path) != 0)
        return mb_err_sys(err, errno, "rename %s to %s", w->bin.path, w->bin_path);
    if (rename(w->idx.path, w->idx_path) != 0)
        return mb_err_sys(err, errno, "rename %s to %s", w->idx.path, w->idx_path);
    w->is_committed = 1;
    return mb_fs_sync_dir(w->directory, err);
}

uint64_t mb_index_writer_n_sequences(const struct mb_index_writer *w)
{
    return w->n_sequences;
}

uint64_t mb_index_writer_n_documents(const struct mb_index_writer *w)
{
    return w->n_documents;
}

uint64_t mb_index_writer_n_tokens(const struct mb_index_writer *w)
{
    return w->n_tokens;
}
