/*
 * Reading an indexed dataset.
 *
 * 1. mb_index_open maps PREFIX.idx and PREFIX.bin read-only; a missing one is MB_ENOENT and says
 *    which path was tried, since a wrong prefix is the usual mistake.
 * 2. check_header: magic, version, dtype, and that the file is exactly as long as its counts say.
 * The counts are compared with the size before they are multiplied, so nothing overflows.
 * 3. check_sequences and check_documents walk the arrays once: lengths not negative, offsets inside
 *    .bin, documents ascending from 0 to S. What fails is MB_ECORRUPT with the index and the value.
 * 4. mb_index_read copies tokens and widens them; only the ids themselves can still be wrong there.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "worker/data/index.h"

static const char magic[9] = "MMIDIDX\0";

enum { HEADER_BYTES = 34 };

#define REWRITE "write it again with 'mobula preprocess'"

struct mapping {
    const uint8_t *p; /* NULL when size is 0 or the bytes were not given */
    uint64_t size;
    int is_mapped;
};

struct mb_index {
    char *prefix;
    unsigned n_refs;
    struct mapping idx;
    struct mapping bin;
    enum mb_index_dtype dtype;
    uint64_t n_sequences;
    uint64_t n_entries; /* of the document index: documents + 1 */
    uint64_t n_tokens;
    const uint8_t *lengths;   /* i32, unaligned */
    const uint8_t *offsets;   /* i64, unaligned */
    const uint8_t *documents; /* i64, unaligned */
};

size_t mb_index_dtype_size(enum mb_index_dtype dtype)
{
    switch (dtype) {
    case MB_INDEX_U8:
    case MB_INDEX_I8:
        return 1;
    case MB_INDEX_I16:
    case MB_INDEX_U16:
        return 2;
    case MB_INDEX_I32:
    case MB_INDEX_F32:
        return 4;
    case MB_INDEX_I64:
    case MB_INDEX_F64:
        return 8;
    }
    return 0;
}

enum mb_index_dtype mb_index_dtype_for_vocab(uint64_t vocab_size)
{
    return vocab_size < 65500 ? MB_INDEX_U16 : MB_INDEX_I32;
}

static int32_t load_i32(const uint8_t *array, uint64_t i)
{
    int32_t v;
    memcpy(&v, array + 4 * i, sizeof(v));
    return v;
}

static int64_t load_i64(const uint8_t *array, uint64_t i)
{
    int64_t v;
    memcpy(&v, array + 8 * i, sizeof(v));
    return v;
}

static int map_file(const char *path, struct mapping *out, struct mb_err *err)
{
    struct stat st;
    int rc = 0;
    /* A pipe without a writer is opened at once, and refused below. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

    if (fd < 0) {
        if (errno != ENOENT)
            rc = mb_err_sys(err, errno, "cannot open %s", path);
        else
            rc = mb_err_set(err, MB_ENOENT,
                            "cannot open %s: no such file; give --data-path the prefix without "
                            ".bin or .idx, and both files must exist",
                            path);
        return rc;
    }
    if (fstat(fd, &st) != 0) {
        rc = mb_err_sys(err, errno, "cannot open %s", path);
    } else if (!S_ISREG(st.st_mode)) {
        rc = mb_err_set(err, MB_EINVAL, "cannot open %s: not a regular file", path);
    } else {
        out->size = (uint64_t)st.st_size;
        if (out->size > 0) {
            void *p = mmap(NULL, (size_t)out->size, PROT_READ, MAP_SHARED, fd, 0);
            if (p == MAP_FAILED) {
                rc = mb_err_sys(err, errno, "cannot map %s", path);
            } else {
                out->p = p;
                out->is_mapped = 1;
            }
        }
    }
    close(fd);
    return rc;
}

static int check_header(struct mb_index *x, struct mb_err *err)
{
    const uint8_t *p = x->idx.p;
    uint64_t size = x->idx.size;
    uint64_t version;

    if (size < sizeof(magic) || memcmp(p, magic, sizeof(magic)) != 0)
        return mb_err_set(err, MB_ECORRUPT,
                          "bad header, cannot read: %s.idx (no MMIDIDX at its start; is the prefix "
                          "right?)",
                          x->prefix);
    if (size < HEADER_BYTES)
        return mb_err_set(
            err, MB_ECORRUPT,
            "%s.idx is cut off: %llu bytes, the header alone has %d; copy it again or " REWRITE,
            x->prefix, (unsigned long long)size, HEADER_BYTES);
    memcpy(&version, p + 9, sizeof(version));
    if (version != 1)
        return mb_err_set(
            err, MB_ECORRUPT,
            "bad version, cannot read: %s.idx (version %llu, only 1 is known); " REWRITE, x->prefix,
            (unsigned long long)version);
    x->dtype = (enum mb_index_dtype)p[17];
    if (mb_index_dtype_size(x->dtype) == 0)
        return mb_err_set(err, MB_ECORRUPT,
                          "%s.idx: dtype code %d is unknown (1 to 8 are); " REWRITE, x->prefix,
                          (int)p[17]);
    memcpy(&x->n_sequences, p + 18, sizeof(x->n_sequences));
    memcpy(&x->n_entries, p + 26, sizeof(x->n_entries));
    return 0;
}

/* The arrays must fill the file to its end, but for the modes of multimodal data. */
static int check_size(struct mb_index *x, struct mb_err *err)
{
    uint64_t size = x->idx.size;
    uint64_t n = x->n_sequences;
    uint64_t entries = x->n_entries;
    uint64_t want = 0;
    int fits = n <= size / 12 && entries <= size / 8;

    if (fits) {
        want = HEADER_BYTES + 12 * n + 8 * entries;
        fits = size == want || size == want + n;
    }
    if (!fits)
        return mb_err_set(
            err, MB_ECORRUPT,
            "%s.idx has %llu bytes, which its header's counts (%llu sequences, %llu "
            "document entries) contradict: cut off or damaged; copy it again or " REWRITE,
            x->prefix, (unsigned long long)size, (unsigned long long)n,
            (unsigned long long)entries);
    x->lengths = x->idx.p + HEADER_BYTES;
    x->offsets = x->lengths + 4 * n;
    x->documents = x->offsets + 8 * n;
    return 0;
}

static int check_sequences(struct mb_index *x, struct mb_err *err)
{
    uint64_t token_bytes = mb_index_dtype_size(x->dtype);

    for (uint64_t i = 0; i < x->n_sequences; i++) {
        int32_t length = load_i32(x->lengths, i);
        int64_t offset = load_i64(x->offsets, i);

        if (length < 0 || offset < 0)
            return mb_err_set(
                err, MB_ECORRUPT,
                "%s.idx: sequence %llu has length %d at offset %lld: damaged; copy it "
                "again or " REWRITE,
                x->prefix, (unsigned long long)i, (int)length, (long long)offset);
        uint64_t bytes = (uint64_t)length * token_bytes;
        if ((uint64_t)offset > x->bin.size || bytes > x->bin.size - (uint64_t)offset)
            return mb_err_set(
                err, MB_ECORRUPT,
                "%s.bin has %llu bytes, shorter than its index says: sequence %llu of "
                "%llu ends at byte %llu; copy both files again or " REWRITE,
                x->prefix, (unsigned long long)x->bin.size, (unsigned long long)i,
                (unsigned long long)x->n_sequences,
                (unsigned long long)offset + (unsigned long long)bytes);
        x->n_tokens += (uint64_t)length;
    }
    return 0;
}

static int check_documents(struct mb_index *x, struct mb_err *err)
{
    int64_t last = 0;

    if (x->n_entries == 0)
        return mb_err_set(
            err, MB_ECORRUPT,
            "%s.idx: the document index is empty (it has at least one entry); " REWRITE, x->prefix);
    for (uint64_t i = 0; i < x->n_entries; i++) {
        int64_t start = load_i64(x->documents, i);

        if (start < last || (uint64_t)start > x->n_sequences || (i == 0 && start != 0))
            return mb_err_set(
                err, MB_ECORRUPT,
                "%s.idx: document index entry %llu is %lld (the entries ascend from 0 "
                "to %llu): damaged; copy it again or " REWRITE,
                x->prefix, (unsigned long long)i, (long long)start,
                (unsigned long long)x->n_sequences);
        last = start;
    }
    if ((uint64_t)last != x->n_sequences)
        return mb_err_set(
            err, MB_ECORRUPT,
            "%s.idx: the document index ends at sequence %lld of %llu: damaged; copy it "
            "again or " REWRITE,
            x->prefix, (long long)last, (unsigned long long)x->n_sequences);
    return 0;
}

static int check(struct mb_index *x, struct mb_err *err)
{
    int rc = check_header(x, err);

    if (rc == 0)
        rc = check_size(x, err);
    if (rc == 0)
        rc = check_sequences(x, err);
    if (rc == 0)
        rc = check_documents(x, err);
    return rc;
}

static void index_free(struct mb_index *x)
{
    if (x == NULL)
        return;
    if (x->idx.is_mapped)
        munmap((void *)(uintptr_t)x->idx.p, (size_t)x->idx.size);
    if (x->bin.is_mapped)
        munmap((void *)(uintptr_t)x->bin.p, (size_t)x->bin.size);
    mb_free(x->prefix);
    mb_free(x);
}

static struct mb_index *index_new(const char *prefix)
{
    struct mb_index *x = mb_calloc(1, sizeof(*x));

    if (x == NULL)
        return NULL;
    x->n_refs = 1;
    x->prefix = mb_strdup(prefix);
    if (x->prefix == NULL) {
        mb_free(x);
        return NULL;
    }
    return x;
}

int mb_index_open(const char *prefix, struct mb_index **out, struct mb_err *err)
{
    struct mb_index *x = index_new(prefix);
    char *idx_path = mb_asprintf("%s.idx", prefix);
    char *bin_path = mb_asprintf("%s.bin", prefix);
    int rc;

    if (x == NULL || idx_path == NULL || bin_path == NULL) {
        rc = mb_err_set(err, MB_ENOMEM, "open %s.idx: out of memory", prefix);
        goto out;
    }
    rc = map_file(idx_path, &x->idx, err);
    if (rc == 0)
        rc = map_file(bin_path, &x->bin, err);
    if (rc == 0)
        rc = check(x, err);
    if (rc == 0) {
        *out = x;
        x = NULL;
    }
out:
    mb_free(bin_path);
    mb_free(idx_path);
    index_free(x);
    return rc;
}

int mb_index_open_memory(const char *name, const void *idx, size_t idx_size_bytes, const void *bin,
                         size_t bin_size_bytes, struct mb_index **out, struct mb_err *err)
{
    struct mb_index *x = index_new(name);
    int rc;

    if (x == NULL)
        return mb_err_set(err, MB_ENOMEM, "open %s.idx: out of memory", name);
    x->idx = (struct mapping){.p = idx, .size = idx_size_bytes};
    x->bin = (struct mapping){.p = bin, .size = bin_size_bytes};
    rc = check(x, err);
    if (rc != 0) {
        index_free(x);
        return rc;
    }
    *out = x;
    return 0;
}

struct mb_index *mb_index_ref(struct mb_index *index)
{
    index->n_refs++;
    return index;
}

void mb_index_unref(struct mb_index *index)
{
    if (index != NULL && --index->n_refs == 0)
        index_free(index);
}

const char *mb_index_prefix(const struct mb_index *index)
{
    return index->prefix;
}

uint64_t mb_index_idx_bytes(const struct mb_index *index)
{
    return index->idx.size;
}

uint64_t mb_index_bin_bytes(const struct mb_index *index)
{
    return index->bin.size;
}

uint64_t mb_index_checksum(const struct mb_index *index)
{
    return mb_crc64nvme(0, index->idx.p, (size_t)index->idx.size);
}

enum mb_index_dtype mb_index_dtype(const struct mb_index *index)
{
    return index->dtype;
}

uint64_t mb_index_n_sequences(const struct mb_index *index)
{
    return index->n_sequences;
}

uint64_t mb_index_n_documents(const struct mb_index *index)
{
    return index->n_entries - 1;
}

uint64_t mb_index_n_tokens(const struct mb_index *index)
{
    return index->n_tokens;
}

int32_t mb_index_length(const struct mb_index *index, uint64_t seq)
{
    return load_i32(index->lengths, seq);
}

uint64_t mb_index_document_start(const struct mb_index *index, uint64_t document)
{
    return (uint64_t)load_i64(index->documents, document);
}

static int64_t load_token(enum mb_index_dtype dtype, const uint8_t *p)
{
    int16_t i16;
    uint16_t u16;
    int32_t i32;
    int64_t i64;

    switch (dtype) {
    case MB_INDEX_U8:
        return *p;
    case MB_INDEX_I8:
        return (int8_t)*p;
    case MB_INDEX_I16:
        memcpy(&i16, p, sizeof(i16));
        return i16;
    case MB_INDEX_U16:
        memcpy(&u16, p, sizeof(u16));
        return u16;
    case MB_INDEX_I32:
        memcpy(&i32, p, sizeof(i32));
        return i32;
    case MB_INDEX_I64:
        memcpy(&i64, p, sizeof(i64));
        return i64;
    case MB_INDEX_F32:
    case MB_INDEX_F64:
        break;
    }
    return -1;
}

int mb_index_read(const struct mb_index *index, uint64_t seq, uint64_t offset, uint64_t n,
                  uint64_t vocab_size, int32_t *out, struct mb_err *err)
{
    enum mb_index_dtype dtype = index->dtype;
    uint64_t token_bytes = mb_index_dtype_size(dtype);
    uint64_t start = (uint64_t)load_i64(index->offsets, seq) + offset * token_bytes;
    int64_t limit = INT32_MAX;

    if (dtype == MB_INDEX_F32 || dtype == MB_INDEX_F64)
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "%s.idx holds floating point numbers, not token ids; " REWRITE,
                          index->prefix);
    if (vocab_size > 0 && vocab_size <= INT32_MAX)
        limit = (int64_t)vocab_size - 1;
    for (uint64_t i = 0; i < n; i++) {
        int64_t id = load_token(dtype, index->bin.p + start + i * token_bytes);

        if (id < 0 || id > limit)
            return mb_err_set(err, MB_ECORRUPT,
                              "%s.bin: token %lld at position %llu of sequence %llu is outside the "
                              "vocabulary of %lld; use the tokenizer the data was written with",
                              index->prefix, (long long)id, (unsigned long long)(offset + i),
                              (unsigned long long)seq, (long long)limit + 1);
        out[i] = (int32_t)id;
    }
    return 0;
}
