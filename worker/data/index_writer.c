/*
 * Writing an indexed dataset.
 *
 * 1. open creates WORK.LANE.bin, .lengths and .documents for each lane, or cuts those of an earlier
 *    run to their marks.
 * 2. add_batch appends whole documents to a lane (index_lane.c); add and end_document do it one by
 *    one.
 * 3. prepare puts the tokens of the other lanes behind lane 0, writes WORK.idx (header, lengths,
 *    running offsets, documents, lane by lane) and fsyncs both.
 * 4. commit unlinks an old PREFIX.idx, renames .bin, then .idx, then fsyncs the directory.
 * Any failure (full disk, a name that cannot be created) is returned with the path; destroy then
 * closes and removes the temporary names, so nothing that looks whole is left.
 */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "worker/data/index_lane.h"

enum { PLACE_ITEMS = 8192, BLOCK_ITEMS = 1024, MAX_LANES = 1024 };

struct mb_index_writer {
    char *prefix;
    char *work;
    enum mb_index_dtype dtype;
    struct mb_lane *lanes;
    unsigned n_lanes;
    struct mb_lane_file idx;
    int is_prepared;
    int is_kept; /* committed, or to be gone on with */
};

static char *lane_path(const struct mb_index_writer *w, unsigned lane, const char *end)
{
    return mb_asprintf("%s.%u.%s", w->work, lane, end);
}

static int lane_open(struct mb_index_writer *w, unsigned i, const struct mb_index_mark *mark,
                     struct mb_err *err)
{
    struct mb_lane *lane = &w->lanes[i];
    int continues = mark != NULL;
    struct mb_index_mark at = continues ? *mark : (struct mb_index_mark){0};
    int rc;

    if (at.n_sequences > UINT64_MAX / 8 || at.n_documents > UINT64_MAX / 8)
        return mb_err_set(err, MB_ECORRUPT, "%s: a mark is out of range", w->work);
    rc = mb_lane_file_open(&lane->bin, lane_path(w, i, "bin"), continues, at.bin_bytes, err);
    if (rc == 0)
        rc = mb_lane_file_open(&lane->lengths, lane_path(w, i, "lengths"), continues,
                               4 * at.n_sequences, err);
    if (rc == 0)
        rc = mb_lane_file_open(&lane->documents, lane_path(w, i, "documents"), continues,
                               8 * at.n_documents, err);
    lane->n_sequences = at.n_sequences;
    lane->n_documents = at.n_documents;
    return rc;
}

static int make(const struct mb_index_writer_options *o, struct mb_index_writer *w,
                struct mb_err *err)
{
    w->n_lanes = o->n_lanes > 0 ? o->n_lanes : 1;
    w->dtype = o->dtype;
    w->idx.fd = -1;
    w->prefix = mb_strdup(o->prefix);
    w->work = o->work != NULL
                  ? mb_strdup(o->work)
                  : mb_asprintf("%s.tmp-%016llx", o->prefix, (unsigned long long)mb_random_u64());
    w->lanes = w->n_lanes <= MAX_LANES ? mb_calloc(w->n_lanes, sizeof(*w->lanes)) : NULL;
    for (unsigned i = 0; w->lanes != NULL && i < w->n_lanes; i++)
        w->lanes[i].bin.fd = w->lanes[i].lengths.fd = w->lanes[i].documents.fd = -1;
    if (w->prefix == NULL || w->work == NULL || w->lanes == NULL)
        return mb_err_set(err, MB_ENOMEM, "%s.bin: out of memory", o->prefix);
    return 0;
}

int mb_index_writer_open(const struct mb_index_writer_options *o, struct mb_index_writer **out,
                         struct mb_err *err)
{
    struct mb_index_writer *w;
    int rc;

    if (mb_index_dtype_size(o->dtype) == 0)
        return mb_err_set(err, MB_EINVAL, "%s: dtype code %d is unknown", o->prefix, (int)o->dtype);
    w = mb_calloc(1, sizeof(*w));
    if (w == NULL)
        return mb_err_set(err, MB_ENOMEM, "%s.bin: out of memory", o->prefix);
    rc = make(o, w, err);
    for (unsigned i = 0; rc == 0 && i < w->n_lanes; i++)
        rc = lane_open(w, i, o->marks != NULL ? &o->marks[i] : NULL, err);
    if (rc != 0) {
        mb_index_writer_destroy(w);
        return rc;
    }
    *out = w;
    return 0;
}

int mb_index_writer_create(const char *prefix, enum mb_index_dtype dtype,
                           struct mb_index_writer **out, struct mb_err *err)
{
    return mb_index_writer_open(&(struct mb_index_writer_options){.prefix = prefix, .dtype = dtype},
                                out, err);
}

void mb_index_writer_keep(struct mb_index_writer *w)
{
    w->is_kept = 1;
}

void mb_index_writer_destroy(struct mb_index_writer *w)
{
    if (w == NULL)
        return;
    for (unsigned i = 0; w->lanes != NULL && i < w->n_lanes; i++) {
        mb_lane_file_close(&w->lanes[i].bin, !w->is_kept);
        mb_lane_file_close(&w->lanes[i].lengths, !w->is_kept);
        mb_lane_file_close(&w->lanes[i].documents, !w->is_kept);
    }
    mb_lane_file_close(&w->idx, !w->is_kept);
    mb_free(w->lanes);
    mb_free(w->prefix);
    mb_free(w->work);
    mb_free(w);
}

/* ---- appending ---- */

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

int mb_index_writer_add(struct mb_index_writer *w, const int32_t *ids, size_t n, struct mb_err *err)
{
    uint8_t placed[PLACE_ITEMS * 8];
    size_t token_bytes = mb_index_dtype_size(w->dtype);
    struct mb_lane *lane = &w->lanes[0];
    int32_t length = (int32_t)n;
    int rc;

    if (n > INT32_MAX)
        return mb_err_set(err, MB_EINVAL, "%s.bin: a sequence of %zu tokens is too long (limit %d)",
                          w->prefix, n, INT32_MAX);
    for (size_t done = 0; done < n;) {
        size_t part = n - done < PLACE_ITEMS ? n - done : PLACE_ITEMS;
        rc = place_ids(w->dtype, ids + done, part, placed, err);
        if (rc != 0) {
            mb_err_wrap(err, "%s.bin", w->prefix);
            return rc;
        }
        rc = mb_lane_file_append(&lane->bin, placed, part * token_bytes, err);
        if (rc != 0)
            return rc;
        done += part;
    }
    rc = mb_lane_file_append(&lane->lengths, &length, sizeof(length), err);
    if (rc == 0)
        lane->n_sequences++;
    return rc;
}

int mb_index_writer_end_document(struct mb_index_writer *w, struct mb_err *err)
{
    struct mb_lane *lane = &w->lanes[0];
    int rc =
        mb_lane_file_append(&lane->documents, &lane->n_sequences, sizeof(lane->n_sequences), err);

    if (rc == 0)
        lane->n_documents++;
    return rc;
}

/* Counts of sequences become the running number that stands in the file. */
static int add_documents(struct mb_lane *lane, const uint8_t *counts, size_t n, struct mb_err *err)
{
    uint64_t ends[BLOCK_ITEMS];

    for (size_t done = 0; done < n;) {
        size_t part = n - done < BLOCK_ITEMS ? n - done : BLOCK_ITEMS;
        int rc;

        for (size_t i = 0; i < part; i++) {
            uint32_t count;
            memcpy(&count, counts + (done + i) * sizeof(count), sizeof(count));
            lane->n_sequences += count;
            ends[i] = lane->n_sequences;
        }
        rc = mb_lane_file_append(&lane->documents, ends, part * sizeof(*ends), err);
        if (rc != 0)
            return rc;
        done += part;
    }
    lane->n_documents += n;
    return 0;
}

int mb_index_writer_add_batch(struct mb_index_writer *w, unsigned lane,
                              const struct mb_index_batch *b, struct mb_err *err)
{
    struct mb_lane *to = &w->lanes[lane];
    int rc = 0;

    if (b->tokens_bytes > 0)
        rc = mb_lane_file_append(&to->bin, b->tokens, b->tokens_bytes, err);
    if (rc == 0 && b->n_sequences > 0)
        rc = mb_lane_file_append(&to->lengths, b->lengths, b->n_sequences * sizeof(int32_t), err);
    if (rc == 0)
        rc = add_documents(to, b->document_sequences, b->n_documents, err);
    return rc;
}

/* ---- durable points ---- */

int mb_index_writer_mark(struct mb_index_writer *w, struct mb_index_mark *marks, struct mb_err *err)
{
    for (unsigned i = 0; i < w->n_lanes; i++) {
        struct mb_lane *lane = &w->lanes[i];
        int rc = mb_lane_file_flush(&lane->bin, err);

        if (rc == 0)
            rc = mb_lane_file_flush(&lane->lengths, err);
        if (rc == 0)
            rc = mb_lane_file_flush(&lane->documents, err);
        if (rc != 0)
            return rc;
        marks[i] =
            (struct mb_index_mark){lane->bin.size_bytes, lane->n_sequences, lane->n_documents};
    }
    return 0;
}

int mb_index_writer_sync(struct mb_index_writer *w, struct mb_err *err)
{
    for (unsigned i = 0; i < w->n_lanes; i++) {
        struct mb_lane *lane = &w->lanes[i];

        if (fdatasync(lane->bin.fd) != 0)
            return mb_err_sys(err, errno, "fsync %s", lane->bin.path);
        if (fdatasync(lane->lengths.fd) != 0)
            return mb_err_sys(err, errno, "fsync %s", lane->lengths.path);
        if (fdatasync(lane->documents.fd) != 0)
            return mb_err_sys(err, errno, "fsync %s", lane->documents.path);
    }
    return 0;
}

/* ---- the end ---- */

static int add_header(struct mb_index_writer *w, struct mb_err *err)
{
    uint8_t header[34] = "MMIDIDX";
    uint64_t version = 1;
    uint64_t n_sequences = mb_index_writer_n_sequences(w);
    uint64_t n_entries = mb_index_writer_n_documents(w) + 1;

    memcpy(header + 9, &version, 8);
    header[17] = (uint8_t)w->dtype;
    memcpy(header + 18, &n_sequences, 8);
    memcpy(header + 26, &n_entries, 8);
    return mb_lane_file_append(&w->idx, header, sizeof(header), err);
}

static int add_offsets(struct mb_index_writer *w, const struct mb_lane *lane, uint64_t *offset,
                       struct mb_err *err)
{
    int32_t lengths[BLOCK_ITEMS];
    uint64_t offsets[BLOCK_ITEMS];
    uint64_t token_bytes = mb_index_dtype_size(w->dtype);

    for (uint64_t at = 0; at < lane->n_sequences;) {
        uint64_t left = lane->n_sequences - at;
        size_t n = left < BLOCK_ITEMS ? (size_t)left : BLOCK_ITEMS;
        int rc = mb_lane_file_read(&lane->lengths, lengths, 4 * n, 4 * at, err);

        for (size_t i = 0; rc == 0 && i < n; i++) {
            offsets[i] = *offset;
            *offset += (uint64_t)lengths[i] * token_bytes;
        }
        if (rc == 0)
            rc = mb_lane_file_append(&w->idx, offsets, 8 * n, err);
        if (rc != 0)
            return rc;
        at += n;
    }
    return 0;
}

/* A lane counts its own sequences; base is how many stand before it. */
static int add_document_index(struct mb_index_writer *w, const struct mb_lane *lane, uint64_t base,
                              struct mb_err *err)
{
    uint64_t ends[BLOCK_ITEMS];

    for (uint64_t at = 0; at < lane->n_documents;) {
        uint64_t left = lane->n_documents - at;
        size_t n = left < BLOCK_ITEMS ? (size_t)left : BLOCK_ITEMS;
        int rc = mb_lane_file_read(&lane->documents, ends, 8 * n, 8 * at, err);

        for (size_t i = 0; rc == 0 && i < n; i++)
            ends[i] += base;
        if (rc == 0)
            rc = mb_lane_file_append(&w->idx, ends, 8 * n, err);
        if (rc != 0)
            return rc;
        at += n;
    }
    return 0;
}

static int write_idx(struct mb_index_writer *w, struct mb_err *err)
{
    char *path = mb_asprintf("%s.idx", w->work);
    uint64_t offset = 0, base = 0;
    int rc;

    if (path != NULL)
        unlink(path); /* of a run that was killed here */
    rc = mb_lane_file_open(&w->idx, path, 0, 0, err);
    if (rc == 0)
        rc = add_header(w, err);
    for (unsigned i = 0; rc == 0 && i < w->n_lanes; i++)
        rc = mb_lane_file_copy(&w->idx, &w->lanes[i].lengths, 4 * w->lanes[i].n_sequences, err);
    for (unsigned i = 0; rc == 0 && i < w->n_lanes; i++)
        rc = add_offsets(w, &w->lanes[i], &offset, err);
    if (rc == 0)
        rc = mb_lane_file_append(&w->idx, &base, sizeof(base), err);
    for (unsigned i = 0; rc == 0 && i < w->n_lanes; i++) {
        rc = add_document_index(w, &w->lanes[i], base, err);
        base += w->lanes[i].n_sequences;
    }
    if (rc == 0)
        rc = mb_lane_file_flush(&w->idx, err);
    return rc;
}

int mb_index_writer_prepare(struct mb_index_writer *w, struct mb_err *err)
{
    int rc = 0;

    for (unsigned i = 0; rc == 0 && i < w->n_lanes; i++) {
        rc = mb_lane_file_flush(&w->lanes[i].bin, err);
        if (rc == 0)
            rc = mb_lane_file_flush(&w->lanes[i].lengths, err);
        if (rc == 0)
            rc = mb_lane_file_flush(&w->lanes[i].documents, err);
    }
    if (rc == 0)
        rc = write_idx(w, err);
    for (unsigned i = 1; rc == 0 && i < w->n_lanes; i++)
        rc = mb_lane_file_copy(&w->lanes[0].bin, &w->lanes[i].bin, w->lanes[i].bin.size_bytes, err);
    if (rc == 0)
        rc = mb_lane_file_flush(&w->lanes[0].bin, err);
    if (rc != 0)
        return rc;
    if (fsync(w->lanes[0].bin.fd) != 0)
        return mb_err_sys(err, errno, "fsync %s", w->lanes[0].bin.path);
    if (fsync(w->idx.fd) != 0)
        return mb_err_sys(err, errno, "fsync %s", w->idx.path);
    w->is_prepared = 1;
    return 0;
}

static char *directory_of(const char *path)
{
    const char *slash = strrchr(path, '/');

    if (slash == NULL)
        return mb_strdup(".");
    return mb_strndup(path, slash == path ? 1 : (size_t)(slash - path));
}

/* Renames if the source is still there. 1: it was. */
static int move(const char *from, const char *to, struct mb_err *err)
{
    if (rename(from, to) == 0)
        return 1;
    return errno == ENOENT && !mb_fs_exists(from)
               ? 0
               : mb_err_sys(err, errno, "rename %s to %s", from, to);
}

int mb_index_finish(const char *prefix, const char *work, struct mb_err *err)
{
    char *bin = mb_asprintf("%s.0.bin", work), *idx = mb_asprintf("%s.idx", work);
    char *bin_to = mb_asprintf("%s.bin", prefix), *idx_to = mb_asprintf("%s.idx", prefix);
    char *directory = directory_of(prefix);
    struct stat st;
    int rc = 0;

    if (bin == NULL || idx == NULL || bin_to == NULL || idx_to == NULL || directory == NULL)
        rc = mb_err_set(err, MB_ENOMEM, "%s.bin: out of memory", prefix);
    if (rc == 0 && mb_fs_exists(bin)) {
        if (stat(bin_to, &st) == 0 && S_ISDIR(st.st_mode)) /* else the .idx would go for nothing */
            rc = mb_err_set(err, MB_EINVAL, "%s is a directory", bin_to);
        else if (unlink(idx_to) != 0 && errno != ENOENT)
            rc = mb_err_sys(err, errno, "cannot replace %s", idx_to);
        else
            rc = move(bin, bin_to, err);
    }
    if (rc >= 0)
        rc = move(idx, idx_to, err);
    if (rc == 0 && (!mb_fs_exists(bin_to) || !mb_fs_exists(idx_to)))
        rc = mb_err_set(err, MB_ENOENT, "%s.bin and .idx were there and are gone", prefix);
    if (rc >= 0)
        rc = mb_fs_sync_dir(directory, err);
    mb_free(bin);
    mb_free(idx);
    mb_free(bin_to);
    mb_free(idx_to);
    mb_free(directory);
    return rc;
}

int mb_index_writer_commit(struct mb_index_writer *w, struct mb_err *err)
{
    int rc = w->is_prepared ? 0 : mb_index_writer_prepare(w, err);

    if (rc == 0)
        rc = mb_index_finish(w->prefix, w->work, err);
    return rc;
}

/* ---- counts ---- */

uint64_t mb_index_writer_n_sequences(const struct mb_index_writer *w)
{
    uint64_t n = 0;

    for (unsigned i = 0; i < w->n_lanes; i++)
        n += w->lanes[i].n_sequences;
    return n;
}

uint64_t mb_index_writer_n_documents(const struct mb_index_writer *w)
{
    uint64_t n = 0;

    for (unsigned i = 0; i < w->n_lanes; i++)
        n += w->lanes[i].n_documents;
    return n;
}

uint64_t mb_index_writer_n_tokens(const struct mb_index_writer *w)
{
    uint64_t n = 0;

    for (unsigned i = 0; i < w->n_lanes; i++)
        n += w->lanes[i].bin.size_bytes / mb_index_dtype_size(w->dtype);
    return n;
}
