/*
 *  1. create: the pickle is made as a whole, tensor i saying that its bytes are entry data/i.
 *  2. Entries follow each other, each with a local header padded so that its bytes begin at a
 *     multiple of 64, as torch does for mmap; the checksum is put into the header when the bytes
 *     have gone. So that of the file is joined of the header as it then is, and of the bytes.
 *  3. finish: the directory, with 64-bit sizes where they are needed, and its end records.
 * Failures: what the disk says; bytes missing. The partial file is removed.
 */
#include "worker/checkpoint/megatron/torch_write.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/checksum.h"
#include "base/fs.h"
#include "base/str.h"
#include "worker/checkpoint/megatron/pickle.h"
#include "worker/checkpoint/megatron/torch_file.h"

static const char STEM[] = "model_optim_rng";

enum {
    BUFFER_BYTES = 1 << 20,
    ALIGN_BYTES = 64,
    LOCAL_BYTES = 30,
    CRC_AT = 14, /* in a local header */
    HEAD_BYTES = 256,
    EXTRA64_BYTES = 20,
    EXTRA_HEAD = 4,
    ENTRIES_BEHIND_MAX = 8
};

struct entry {
    uint64_t header_at, n;
    uint32_t crc;
    char name[48];
};

struct mb_torch_writer {
    char *path;
    int fd;
    const struct mb_st_tensor *tensors;
    size_t n_tensors, at_tensor; /* the one whose bytes come next */
    uint64_t left;               /* of them */
    struct entry *entries;
    size_t n_entries;
    uint64_t at; /* bytes of the file so far, those in buf included */
    uint8_t *buf;
    size_t n_buf;
    int is_open;                  /* the last entry gets bytes */
    uint64_t file_crc, entry_crc; /* of all before the last entry's header, of its bytes */
    uint8_t head[HEAD_BYTES];     /* the last entry's, as it was written */
    size_t n_head;
};

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "out of memory writing a file of torch");
}

/* ---- the pickle, protocol 2 ---- */

static int op(struct mb_buf *b, uint8_t code)
{
    return mb_buf_add(b, &code, 1);
}

static int put_text(struct mb_buf *b, const char *s)
{
    return op(b, 'X') | mb_buf_u32le(b, (uint32_t)strlen(s)) | mb_buf_puts(b, s);
}

static int put_int(struct mb_buf *b, int64_t v)
{
    if (v >= INT32_MIN && v <= INT32_MAX) {
        return op(b, 'J') | mb_buf_u32le(b, (uint32_t)v);
    }
    return op(b, 0x8a) | op(b, 8) | mb_buf_u64le(b, (uint64_t)v);
}

static int put_real(struct mb_buf *b, double v)
{
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    return op(b, 'G') | mb_buf_u64le(b, __builtin_bswap64(bits));
}

static int put_name(struct mb_buf *b, const char *module, const char *name)
{
    return op(b, 'c') | mb_buf_printf(b, "%s\n%s\n", module, name);
}

/* "torch.bfloat16" */
static int is_torch_name(const char *text)
{
    char name[64];
    if (!mb_starts_with(text, "torch.") || strlen(text) >= sizeof name) {
        return 0;
    }
    snprintf(name, sizeof name, "torch\n%s", text + 6);
    return mb_pickle_name_is_listed(name, strlen(name));
}

static int put_json(struct mb_buf *b, const json_t *j)
{
    if (json_is_array(j)) {
        int bad = op(b, ']') | op(b, '(');
        for (size_t i = 0; i < json_array_size(j); i++) {
            bad |= put_json(b, json_array_get(j, i));
        }
        return bad | op(b, 'e');
    }
    if (json_is_boolean(j)) {
        return op(b, json_is_true(j) ? 0x88 : 0x89);
    }
    if (json_is_integer(j)) {
        return put_int(b, json_integer_value(j));
    }
    if (json_is_real(j)) {
        return put_real(b, json_real_value(j));
    }
    if (json_is_string(j)) {
        const char *text = json_string_value(j);
        return is_torch_name(text) ? put_name(b, "torch", text + 6) : put_text(b, text);
    }
    return op(b, 'N'); /* null; objects are left out before */
}

/* argparse.Namespace(**args) */
static int put_args(struct mb_buf *b, const json_t *args)
{
    const char *key;
    const json_t *value;
    int bad = put_name(b, "argparse", "Namespace");
    bad |= op(b, ')') | op(b, 0x81) | op(b, '}') | op(b, '(');
    json_object_foreach((json_t *)(uintptr_t)args, key, value)
    {
        if (!json_is_object(value)) {
            bad |= put_text(b, key) | put_json(b, value);
        }
    }
    return bad | op(b, 'u') | op(b, 'b');
}

static int put_sizes(struct mb_buf *b, const struct mb_st_tensor *t, int strides)
{
    int bad = op(b, '(');
    for (int i = 0; i < t->n_dims; i++) {
        uint64_t v = strides ? 1 : t->shape[i];
        for (int j = i + 1; strides && j < t->n_dims; j++) {
            v *= t->shape[j];
        }
        bad |= put_int(b, (int64_t)v);
    }
    return bad | op(b, 't');
}

static uint64_t elements(const struct mb_st_tensor *t)
{
    uint64_t n = 1;
    for (int i = 0; i < t->n_dims; i++) {
        n *= t->shape[i];
    }
    return n;
}

static int put_ordered_dict(struct mb_buf *b)
{
    return put_name(b, "collections", "OrderedDict") | op(b, ')') | op(b, 'R');
}

static int put_tensor(struct mb_buf *b, const struct mb_st_tensor *t, size_t i)
{
    char key[24];
    snprintf(key, sizeof key, "%zu", i);
    int bad = put_name(b, "torch._utils", "_rebuild_tensor_v2") | op(b, '(');
    bad |= op(b, '(') | put_text(b, "storage");
    bad |= op(b, 'c') | mb_buf_printf(b, "%s\n", mb_torch_storage(t->dtype));
    bad |= put_text(b, key) | put_text(b, "cpu") | put_int(b, (int64_t)elements(t)) | op(b, 't');
    bad |= op(b, 'Q') | put_int(b, 0) | put_sizes(b, t, 0) | put_sizes(b, t, 1) | op(b, 0x89);
    return bad | put_ordered_dict(b) | op(b, 't') | op(b, 'R');
}

/* The file's key of a chunk, with a dot; names of its tensors begin with that. */
static size_t chunk_prefix(const struct mb_torch_megatron *m, size_t chunk, char out[32])
{
    return (size_t)(m->n_chunks > 1 ? snprintf(out, 32, "model%zu.", chunk)
                                    : snprintf(out, 32, "model."));
}

static size_t count_chunks(const struct mb_torch_megatron *m)
{
    return m->n_chunks > 1 ? m->n_chunks : 1;
}

/* What strict loading asks for, and no more, under the chunk's key. */
static int put_chunk(struct mb_buf *b, const struct mb_st_tensor *tensors, size_t n,
                     const struct mb_torch_megatron *m, size_t chunk)
{
    char prefix[32], key[32];
    const size_t len = chunk_prefix(m, chunk, prefix);
    snprintf(key, sizeof key, "%.*s", (int)len - 1, prefix);
    int bad = put_text(b, key) | put_ordered_dict(b) | op(b, '(');
    for (size_t i = 0; i < n; i++) {
        if (mb_starts_with(tensors[i].name, prefix)) {
            bad |= put_text(b, tensors[i].name + len) | put_tensor(b, &tensors[i], i);
        }
    }
    for (size_t i = 0; i < m->n_nones; i++) {
        if (mb_starts_with(m->nones[i], prefix)) {
            bad |= put_text(b, m->nones[i] + len) | op(b, 'N');
        }
    }
    return bad | op(b, 'u');
}

/* Those that are no chunk's. */
static int put_others(struct mb_buf *b, const struct mb_st_tensor *tensors, size_t n,
                      const struct mb_torch_megatron *m)
{
    int bad = op(b, '(');
    for (size_t i = 0; i < n; i++) {
        int is_other = 1;
        for (size_t chunk = 0; chunk < count_chunks(m); chunk++) {
            char prefix[32];
            chunk_prefix(m, chunk, prefix);
            is_other &= !mb_starts_with(tensors[i].name, prefix);
        }
        bad |= is_other && (put_text(b, tensors[i].name) | put_tensor(b, &tensors[i], i));
    }
    return bad | op(b, 'u');
}

static int put_key(struct mb_buf *b, const char *key)
{
    int64_t number;
    return mb_parse_i64(key, 0, INT64_MAX, key, &number, NULL) == 0 ? put_int(b, number)
                                                                    : put_text(b, key);
}

/* With tensors in it. */
static int put_tree(struct mb_buf *b, const json_t *j, const struct mb_st_tensor *tensors)
{
    const json_t *tensor = json_object_get(j, "$tensor"), *value;
    const char *key;
    int bad = 0;
    if (tensor != NULL) {
        const size_t i = (size_t)json_integer_value(tensor);
        return put_tensor(b, &tensors[i], i);
    }
    if (json_is_array(j)) {
        bad = op(b, ']') | op(b, '(');
        for (size_t i = 0; i < json_array_size(j); i++) {
            bad |= put_tree(b, json_array_get(j, i), tensors);
        }
        return bad | op(b, 'e');
    }
    if (!json_is_object(j)) {
        return put_json(b, j);
    }
    bad = op(b, '}') | op(b, '(');
    json_object_foreach((json_t *)(uintptr_t)j, key, value)
    {
        bad |= put_key(b, key) | put_tree(b, value, tensors);
    }
    return bad | op(b, 'u');
}

/* The entries of m->more. */
static int put_more(struct mb_buf *b, const json_t *more, const struct mb_st_tensor *tensors)
{
    const json_t *value;
    const char *key;
    int bad = op(b, '(');
    json_object_foreach((json_t *)(uintptr_t)more, key, value)
    {
        bad |= put_text(b, key) | put_tree(b, value, tensors);
    }
    return bad | op(b, 'u');
}

static int make_pickle(const struct mb_st_tensor *tensors, size_t n,
                       const struct mb_torch_megatron *m, struct mb_buf *b)
{
    int bad = op(b, 0x80) | op(b, 2) | op(b, '}');
    if (m == NULL) {
        bad |= op(b, '(');
        for (size_t i = 0; i < n; i++) {
            bad |= put_text(b, tensors[i].name) | put_tensor(b, &tensors[i], i);
        }
        return bad | op(b, 'u') | op(b, '.');
    }
    bad |= op(b, '(') | put_text(b, "args") | put_args(b, m->args);
    bad |= put_text(b, "checkpoint_version") | put_real(b, 3.0);
    bad |= put_text(b, "iteration") | put_int(b, m->iteration);
    for (size_t chunk = 0; chunk < count_chunks(m); chunk++) {
        bad |= put_chunk(b, tensors, n, m, chunk);
    }
    bad |= op(b, 'u');
    bad |= m->more != NULL ? put_more(b, m->more, tensors) : put_others(b, tensors, n, m);
    return bad | op(b, '.');
}

/* ---- the zip ---- */

static int flush(struct mb_torch_writer *w, struct mb_err *err)
{
    const size_t n = w->n_buf;
    w->n_buf = 0;
    int rc = mb_fs_write_all(w->fd, w->buf, n, err);
    return rc == 0 ? 0 : mb_err_wrap(err, "%s", w->path);
}

static int put_bytes(struct mb_torch_writer *w, const void *p, size_t n, struct mb_err *err)
{
    const uint8_t *bytes = p;
    w->at += n;
    while (n > 0) {
        size_t k = BUFFER_BYTES - w->n_buf;
        k = k < n ? k : n;
        memcpy(w->buf + w->n_buf, bytes, k);
        w->n_buf += k;
        bytes += k;
        n -= k;
        int rc = w->n_buf == BUFFER_BYTES ? flush(w, err) : 0;
        if (rc != 0) {
            return rc;
        }
    }
    return 0;
}

static int put_buf(struct mb_torch_writer *w, struct mb_buf *b, int bad, struct mb_err *err)
{
    int rc = bad ? no_memory(err) : put_bytes(w, b->data, b->len, err);
    mb_buf_close(b);
    return rc;
}

static int u16(struct mb_buf *b, size_t v)
{
    return op(b, (uint8_t)v) | op(b, (uint8_t)(v >> 8));
}

static uint32_t narrow(uint64_t v)
{
    return v < 0xffffffff ? (uint32_t)v : 0xffffffff;
}

static int begin_entry(struct mb_torch_writer *w, const char *what, uint64_t n, struct mb_err *err)
{
    struct entry *e = &w->entries[w->n_entries++];
    struct mb_buf b = {0};
    *e = (struct entry){.header_at = w->at, .n = n};
    snprintf(e->name, sizeof e->name, "%s/%s", STEM, what);
    const size_t wide = narrow(n) != n ? EXTRA64_BYTES : 0, n_name = strlen(e->name);
    const uint64_t at = w->at + LOCAL_BYTES + n_name + wide + EXTRA_HEAD;
    const size_t pad = (size_t)((ALIGN_BYTES - at % ALIGN_BYTES) % ALIGN_BYTES);
    int bad = mb_buf_u32le(&b, 0x04034b50) | u16(&b, wide > 0 ? 45 : 20) | u16(&b, 0x0800);
    bad |= u16(&b, 0) | mb_buf_u32le(&b, 0) | mb_buf_u32le(&b, 0); /* stored; no date; checksum */
    bad |= mb_buf_u32le(&b, narrow(n)) | mb_buf_u32le(&b, narrow(n)) | u16(&b, n_name);
    bad |= u16(&b, wide + EXTRA_HEAD + pad) | mb_buf_puts(&b, e->name);
    if (wide > 0) {
        bad |= u16(&b, 1) | u16(&b, 16) | mb_buf_u64le(&b, n) | mb_buf_u64le(&b, n);
    }
    bad |= mb_buf_puts(&b, "FB") | u16(&b, pad);
    for (size_t i = 0; i < pad; i++) {
        bad |= op(&b, 'Z');
    }
    w->is_open = 1;
    w->entry_crc = 0;
    assert(b.len <= sizeof w->head);
    w->n_head = bad ? 0 : b.len;
    memcpy(w->head, b.data, w->n_head);
    return put_buf(w, &b, bad, err);
}

static int entry_bytes(struct mb_torch_writer *w, const void *p, size_t n, struct mb_err *err)
{
    struct entry *e = &w->entries[w->n_entries - 1];
    const uint8_t *bytes = p;
    for (size_t at = 0; at < n;) {
        const size_t k = n - at < BUFFER_BYTES ? n - at : BUFFER_BYTES;
        e->crc = (uint32_t)crc32(e->crc, bytes + at, (uInt)k);
        w->entry_crc = mb_crc64nvme(w->entry_crc, bytes + at, k);
        at += k;
    }
    return put_bytes(w, p, n, err);
}

static int end_entry(struct mb_torch_writer *w, struct mb_err *err)
{
    const struct entry *e = &w->entries[w->n_entries - 1];
    int rc = flush(w, err);
    w->is_open = 0;
    if (rc == 0 && pwrite(w->fd, &e->crc, sizeof e->crc, (off_t)(e->header_at + CRC_AT)) !=
                       (ssize_t)sizeof e->crc) {
        rc = mb_err_sys(err, errno, "%s", w->path);
    }
    memcpy(w->head + CRC_AT, &e->crc, sizeof e->crc);
    w->file_crc = mb_crc64nvme(w->file_crc, w->head, w->n_head);
    w->file_crc = mb_crc64nvme_combine(w->file_crc, w->entry_crc, e->n);
    return rc;
}

static int whole_entry(struct mb_torch_writer *w, const char *what, const void *p, size_t n,
                       struct mb_err *err)
{
    int rc = begin_entry(w, what, n, err);
    if (rc == 0) {
        rc = entry_bytes(w, p, n, err);
    }
    return rc == 0 ? end_entry(w, err) : rc;
}

/* Begins the entry of the next tensor that has bytes, if there is one; those of others are whole.
 */
static int next_tensor(struct mb_torch_writer *w, struct mb_err *err)
{
    int rc = 0;
    for (; w->at_tensor < w->n_tensors && rc == 0; w->at_tensor++) {
        const struct mb_st_tensor *t = &w->tensors[w->at_tensor];
        char what[32];
        snprintf(what, sizeof what, "data/%zu", w->at_tensor);
        w->left = elements(t) * mb_st_dtype_size(t->dtype);
        rc = begin_entry(w, what, w->left, err);
        if (rc != 0 || w->left > 0) {
            break;
        }
        rc = end_entry(w, err);
    }
    return rc;
}

int mb_torch_create(const char *path, const struct mb_st_tensor *tensors, size_t n,
                    const struct mb_torch_megatron *m, struct mb_torch_writer **out,
                    struct mb_err *err)
{
    struct mb_buf pickle = {0};
    struct mb_torch_writer *w = mb_calloc(1, sizeof *w);
    if (w == NULL) {
        return no_memory(err);
    }
    w->fd = -1;
    w->tensors = tensors;
    w->n_tensors = n;
    w->path = mb_strdup(path);
    w->buf = mb_alloc(BUFFER_BYTES);
    w->entries = mb_calloc(n + ENTRIES_BEHIND_MAX, sizeof *w->entries);
    int rc = w->path != NULL && w->buf != NULL && w->entries != NULL ? 0 : no_memory(err);
    if (rc == 0) {
        rc = make_pickle(tensors, n, m, &pickle) == 0 ? 0 : no_memory(err);
    }
    if (rc == 0 && (w->fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644)) < 0) {
        rc = mb_err_sys(err, errno, "%s", path);
    }
    if (rc == 0) {
        rc = whole_entry(w, "data.pkl", pickle.data, pickle.len, err);
    }
    if (rc == 0) {
        rc = whole_entry(w, "byteorder", "little", 6, err);
    }
    if (rc == 0) {
        rc = next_tensor(w, err);
    }
    mb_buf_close(&pickle);
    if (rc != 0) {
        mb_torch_abandon(w);
        return rc;
    }
    *out = w;
    return 0;
}

int mb_torch_write(struct mb_torch_writer *w, const void *p, size_t n, struct mb_err *err)
{
    const uint8_t *bytes = p;
    int rc = 0;
    while (n > 0 && rc == 0) {
        const size_t k = n < w->left ? n : (size_t)w->left;
        rc = entry_bytes(w, bytes, k, err);
        bytes += k;
        n -= k;
        w->left -= k;
        if (rc == 0 && w->left == 0) {
            w->at_tensor++;
            rc = end_entry(w, err);
            rc = rc == 0 ? next_tensor(w, err) : rc;
        }
    }
    return rc;
}

static int put_directory(struct mb_torch_writer *w, struct mb_err *err)
{
    const uint64_t at = w->at;
    struct mb_buf b = {0};
    int bad = 0;
    for (size_t i = 0; i < w->n_entries; i++) {
        const struct entry *e = &w->entries[i];
        const int wide_n = narrow(e->n) != e->n, wide_at = narrow(e->header_at) != e->header_at;
        const size_t n_extra = (wide_n ? 16u : 0u) + (wide_at ? 8u : 0u);
        const size_t version = n_extra > 0 ? 45 : 20;
        bad |= mb_buf_u32le(&b, 0x02014b50) | u16(&b, version) | u16(&b, version) | u16(&b, 0x0800);
        bad |= u16(&b, 0) | mb_buf_u32le(&b, 0) | mb_buf_u32le(&b, e->crc);
        bad |= mb_buf_u32le(&b, narrow(e->n)) | mb_buf_u32le(&b, narrow(e->n));
        bad |= u16(&b, strlen(e->name)) | u16(&b, n_extra > 0 ? n_extra + EXTRA_HEAD : 0);
        bad |= u16(&b, 0) | u16(&b, 0) | u16(&b, 0) | mb_buf_u32le(&b, 0);
        bad |= mb_buf_u32le(&b, narrow(e->header_at)) | mb_buf_puts(&b, e->name);
        if (n_extra > 0) {
            bad |= u16(&b, 1) | u16(&b, n_extra);
        }
        if (wide_n) {
            bad |= mb_buf_u64le(&b, e->n) | mb_buf_u64le(&b, e->n);
        }
        if (wide_at) {
            bad |= mb_buf_u64le(&b, e->header_at);
        }
    }
    /* The 64-bit records always: readers take them where the 32-bit ones are full. */
    const uint64_t n = b.len, end64_at = at + n;
    const size_t n_few = w->n_entries < 0xffff ? w->n_entries : 0xffff;
    bad |= mb_buf_u32le(&b, 0x06064b50) | mb_buf_u64le(&b, 44) | u16(&b, 45) | u16(&b, 45);
    bad |= mb_buf_u32le(&b, 0) | mb_buf_u32le(&b, 0) | mb_buf_u64le(&b, w->n_entries);
    bad |= mb_buf_u64le(&b, w->n_entries) | mb_buf_u64le(&b, n) | mb_buf_u64le(&b, at);
    bad |= mb_buf_u32le(&b, 0x07064b50) | mb_buf_u32le(&b, 0) | mb_buf_u64le(&b, end64_at);
    bad |= mb_buf_u32le(&b, 1);
    bad |= mb_buf_u32le(&b, 0x06054b50) | u16(&b, 0) | u16(&b, 0) | u16(&b, n_few) | u16(&b, n_few);
    bad |= mb_buf_u32le(&b, narrow(n)) | mb_buf_u32le(&b, narrow(at)) | u16(&b, 0);
    w->file_crc = bad ? 0 : mb_crc64nvme(w->file_crc, b.data, b.len);
    return put_buf(w, &b, bad, err);
}

static void free_writer(struct mb_torch_writer *w)
{
    if (w->fd >= 0) {
        close(w->fd);
    }
    mb_free(w->entries);
    mb_free(w->buf);
    mb_free(w->path);
    mb_free(w);
}

int mb_torch_finish(struct mb_torch_writer *w, uint64_t *size_bytes, uint64_t *crc64nvme,
                    struct mb_err *err)
{
    int rc = w->at_tensor == w->n_tensors && !w->is_open
                 ? 0
                 : mb_err_set(err, MB_ESTATE, "%s: %" PRIu64 " bytes of tensor %zu are missing",
                              w->path, w->left, w->at_tensor);
    if (rc == 0) {
        rc = whole_entry(w, "version", "3\n", 2, err);
    }
    if (rc == 0) {
        rc = put_directory(w, err);
    }
    if (rc == 0) {
        rc = flush(w, err);
    }
    if (rc == 0 && fsync(w->fd) != 0) {
        rc = mb_err_sys(err, errno, "%s: fsync", w->path);
    }
    if (rc != 0) {
        mb_torch_abandon(w);
        return rc;
    }
    *size_bytes = w->at;
    *crc64nvme = w->file_crc;
    free_writer(w);
    return 0;
}

void mb_torch_abandon(struct mb_torch_writer *w)
{
    if (w == NULL) {
        return;
    }
    if (w->fd >= 0) { /* it was made here: O_EXCL */
        unlink(w->path);
    }
    free_writer(w);
}
