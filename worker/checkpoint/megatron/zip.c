/*
 *  1. The last 64 KiB have the end record, and before it, where sizes need it, its 64-bit form.
 *  2. The directory is read as a whole and becomes a list, sorted by name beside.
 *  3. An entry's bytes begin behind its local header, whose length is read there.
 * Failures: no end record, a directory or an entry beyond the file, one that is compressed or
 * encrypted, a name twice, a checksum that differs: named.
 */
#include "worker/checkpoint/megatron/zip.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include "base/alloc.h"

enum {
    END_BYTES = 22,
    END_SEARCH = END_BYTES + 0xffff,
    LOCATOR_BYTES = 20,
    END64_BYTES = 56,
    CENTRAL_BYTES = 46,
    LOCAL_BYTES = 30,
    DIRECTORY_MAX = 64 << 20,
    ENTRIES_MAX = 1 << 20,
    PIECE = 1 << 20
};

struct mb_zip {
    char *name;
    int fd; /* -1: it rests, and is this file: */
    dev_t device;
    ino_t inode;
    uint64_t base, size; /* it is these bytes of the file */
    char *texts;         /* the names */
    struct mb_zip_entry *entries;
    const struct mb_zip_entry **by_name;
    size_t n;
};

static uint64_t get(const uint8_t *p, int n)
{
    uint64_t v = 0;
    for (int i = 0; i < n; i++) {
        v |= (uint64_t)p[i] << 8 * i;
    }
    return v;
}

static int corrupt(const struct mb_zip *z, struct mb_err *err, const char *what)
{
    return mb_err_set(err, MB_ECORRUPT, "%s: no whole zip file of torch.save: %s", z->name, what);
}

static int no_memory(const struct mb_zip *z, struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "%s: out of memory", z->name);
}

static int read_open(const struct mb_zip *z, int fd, uint64_t at, void *buf, size_t n,
                     struct mb_err *err)
{
    uint8_t *p = buf;
    while (n > 0) {
        ssize_t k = pread(fd, p, n, (off_t)(z->base + at));
        if (k < 0 && errno == EINTR) {
            continue;
        }
        if (k < 0) {
            return mb_err_sys(err, errno, "%s", z->name);
        }
        if (k == 0) {
            return corrupt(z, err, "it has become shorter");
        }
        p += k;
        at += (uint64_t)k;
        n -= (size_t)k;
    }
    return 0;
}

/* A pipe does not hold it up. */
static int open_file(const char *path)
{
    return open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
}

static int read_at(const struct mb_zip *z, uint64_t at, void *buf, size_t n, struct mb_err *err)
{
    struct stat st;
    if (z->fd >= 0) {
        return read_open(z, z->fd, at, buf, n, err);
    }
    const int fd = open_file(z->name);
    if (fd < 0) {
        return mb_err_sys(err, errno, "%s", z->name);
    }
    int rc = fstat(fd, &st) != 0 ? mb_err_sys(err, errno, "%s", z->name)
             : st.st_dev != z->device || st.st_ino != z->inode
                 ? mb_err_set(err, MB_ECORRUPT, "%s: it is another file than a moment ago", z->name)
                 : read_open(z, fd, at, buf, n, err);
    close(fd);
    return rc;
}

/* ---- the directory ---- */

struct directory {
    uint64_t at, bytes, n;
};

static int take_end64(const struct mb_zip *z, uint64_t end_at, struct directory *d,
                      struct mb_err *err)
{
    uint8_t b[END64_BYTES];
    if (end_at < LOCATOR_BYTES) {
        return corrupt(z, err, "its end names a 64-bit record that is not there");
    }
    int rc = read_at(z, end_at - LOCATOR_BYTES, b, LOCATOR_BYTES, err);
    if (rc != 0) {
        return rc;
    }
    const uint64_t at = get(b + 8, 8);
    if (get(b, 4) != 0x07064b50 || at > z->size || z->size - at < END64_BYTES) {
        return corrupt(z, err, "its end names a 64-bit record that is not there");
    }
    rc = read_at(z, at, b, END64_BYTES, err);
    if (rc == 0 && get(b, 4) != 0x06064b50) {
        rc = corrupt(z, err, "its end names a 64-bit record that is not there");
    }
    *d = (struct directory){.n = get(b + 32, 8), .bytes = get(b + 40, 8), .at = get(b + 48, 8)};
    return rc;
}

static int find_directory(const struct mb_zip *z, struct directory *d, struct mb_err *err)
{
    const size_t n = z->size < END_SEARCH ? (size_t)z->size : END_SEARCH;
    uint8_t *tail = n >= END_BYTES ? mb_alloc(n) : NULL;
    if (tail == NULL) {
        return n < END_BYTES ? corrupt(z, err, "it is too short") : no_memory(z, err);
    }
    int rc = read_at(z, z->size - n, tail, n, err);
    size_t i = n - END_BYTES + 1;
    while (rc == 0 && i > 0 && get(tail + i - 1, 4) != 0x06054b50) {
        i--;
    }
    if (rc == 0 && i == 0) {
        rc = corrupt(z, err, "it has no end record");
    }
    if (rc == 0) {
        const uint8_t *b = tail + i - 1;
        *d = (struct directory){.n = get(b + 10, 2), .bytes = get(b + 12, 4), .at = get(b + 16, 4)};
        if (d->n == 0xffff || d->bytes == 0xffffffff || d->at == 0xffffffff) {
            rc = take_end64(z, z->size - n + i - 1, d, err);
        }
    }
    mb_free(tail);
    if (rc == 0 && (d->bytes > DIRECTORY_MAX || d->n > ENTRIES_MAX || d->at > z->size ||
                    d->bytes > z->size - d->at)) {
        rc = corrupt(z, err, "its directory is not in it");
    }
    return rc;
}

/* Sizes that the 32-bit fields have no room for, in the order in which they are missing. */
static int take_extra64(const uint8_t *extra, size_t n, uint64_t *values[3])
{
    for (size_t at = 0; n - at >= 4;) {
        const size_t k = (size_t)get(extra + at + 2, 2);
        if (k > n - at - 4) {
            return -1;
        }
        if (get(extra + at, 2) == 1) {
            size_t from = at + 4;
            for (int i = 0; i < 3; i++) {
                if (*values[i] == 0xffffffff && from + 8 <= at + 4 + k) {
                    *values[i] = get(extra + from, 8);
                    from += 8;
                }
            }
        }
        at += 4 + k;
    }
    return 0;
}

/* The entry at p, of left bytes; *used of them are its. Names go to texts, one behind another. */
static int take_entry(struct mb_zip *z, const uint8_t *p, size_t left, size_t *used,
                      size_t *n_texts, struct mb_err *err)
{
    if (left < CENTRAL_BYTES || get(p, 4) != 0x02014b50) {
        return corrupt(z, err, "its directory ends in the middle");
    }
    const size_t n_name = (size_t)get(p + 28, 2), n_extra = (size_t)get(p + 30, 2);
    const size_t n_all = CENTRAL_BYTES + n_name + n_extra + (size_t)get(p + 32, 2);
    if (n_all > left || n_name == 0 || memchr(p + CENTRAL_BYTES, 0, n_name) != NULL) {
        return corrupt(z, err, "its directory ends in the middle");
    }
    struct mb_zip_entry *e = &z->entries[z->n];
    char *name = z->texts + *n_texts;
    memcpy(name, p + CENTRAL_BYTES, n_name);
    name[n_name] = '\0';
    *n_texts += n_name + 1;
    uint64_t packed = get(p + 20, 4);
    *e = (struct mb_zip_entry){
        .name = name, .crc32 = (uint32_t)get(p + 16, 4), .n = get(p + 24, 4), .at = get(p + 42, 4)};
    uint64_t *wide[3] = {&e->n, &packed, &e->at};
    if (take_extra64(p + CENTRAL_BYTES + n_name, n_extra, wide) != 0) {
        return corrupt(z, err, "an entry's extra field is broken");
    }
    if (get(p + 10, 2) != 0 || (get(p + 8, 2) & 1) != 0 || packed != e->n) {
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "%s: an entry is compressed or encrypted: torch.save stores them",
                          z->name);
    }
    if (e->at > z->size || z->size - e->at < LOCAL_BYTES || e->n > z->size) {
        return corrupt(z, err, "an entry lies outside of it");
    }
    *used = n_all;
    z->n++;
    return 0;
}

/* From its local header to its bytes. */
static int find_bytes(const struct mb_zip *z, struct mb_zip_entry *e, struct mb_err *err)
{
    uint8_t b[LOCAL_BYTES];
    int rc = read_at(z, e->at, b, sizeof b, err);
    if (rc != 0) {
        return rc;
    }
    const uint64_t skip = LOCAL_BYTES + get(b + 26, 2) + get(b + 28, 2);
    if (get(b, 4) != 0x04034b50 || z->size - e->at < skip || z->size - e->at - skip < e->n) {
        return corrupt(z, err, "an entry lies outside of it");
    }
    e->at += skip;
    return 0;
}

static int by_name(const void *x, const void *y)
{
    const struct mb_zip_entry *const *a = x, *const *b = y;
    return strcmp((*a)->name, (*b)->name);
}

static int sort(struct mb_zip *z, struct mb_err *err)
{
    z->by_name = mb_calloc(z->n, sizeof *z->by_name);
    if (z->by_name == NULL) {
        return no_memory(z, err);
    }
    for (size_t i = 0; i < z->n; i++) {
        z->by_name[i] = &z->entries[i];
    }
    qsort(z->by_name, z->n, sizeof *z->by_name, by_name);
    for (size_t i = 1; i < z->n; i++) {
        if (strcmp(z->by_name[i - 1]->name, z->by_name[i]->name) == 0) {
            return corrupt(z, err, "two entries have one name");
        }
    }
    return 0;
}

static int take_directory(struct mb_zip *z, struct mb_err *err)
{
    struct directory d = {0};
    size_t at = 0, n_texts = 0, used = 0;
    int rc = find_directory(z, &d, err);
    if (rc != 0) {
        return rc;
    }
    if (d.n == 0 || d.n > d.bytes / CENTRAL_BYTES) {
        return corrupt(z, err, "its directory ends in the middle");
    }
    uint8_t *bytes = mb_alloc((size_t)d.bytes);
    z->entries = mb_calloc((size_t)d.n, sizeof *z->entries);
    z->texts = mb_alloc((size_t)d.bytes);
    rc = bytes != NULL && z->entries != NULL && z->texts != NULL
             ? read_at(z, d.at, bytes, (size_t)d.bytes, err)
             : no_memory(z, err);
    for (uint64_t i = 0; i < d.n && rc == 0; i++) {
        rc = take_entry(z, bytes + at, (size_t)d.bytes - at, &used, &n_texts, err);
        at += used;
        if (rc == 0) {
            rc = find_bytes(z, &z->entries[i], err);
        }
    }
    mb_free(bytes);
    return rc == 0 ? sort(z, err) : rc;
}

/* n: what there is to the end of the file. */
static int take_size(struct mb_zip *z, uint64_t at, uint64_t n, struct mb_err *err)
{
    struct stat st;
    if (fstat(z->fd, &st) != 0) {
        return mb_err_sys(err, errno, "%s", z->name);
    }
    if (!S_ISREG(st.st_mode)) {
        return corrupt(z, err, "it is no file");
    }
    const uint64_t there = (uint64_t)st.st_size;
    if (at > there || (n != MB_ZIP_TO_END && n > there - at)) {
        return corrupt(z, err, "it lies outside of the file");
    }
    z->base = at;
    z->size = n == MB_ZIP_TO_END ? there - at : n;
    return 0;
}

int mb_zip_open_part(const char *name, int fd, uint64_t at, uint64_t n, struct mb_zip **out,
                     struct mb_err *err)
{
    struct mb_zip *z = mb_calloc(1, sizeof *z);
    if (z == NULL) {
        close(fd);
        return mb_err_set(err, MB_ENOMEM, "%s: out of memory", name);
    }
    z->fd = fd;
    z->name = mb_strdup(name);
    int rc = z->name != NULL ? 0 : mb_err_set(err, MB_ENOMEM, "%s: out of memory", name);
    if (rc == 0) {
        rc = take_size(z, at, n, err);
    }
    if (rc == 0) {
        rc = take_directory(z, err);
    }
    if (rc != 0) {
        mb_zip_close(z);
        return rc;
    }
    *out = z;
    return 0;
}

int mb_zip_open_fd(const char *name, int fd, struct mb_zip **out, struct mb_err *err)
{
    return mb_zip_open_part(name, fd, 0, MB_ZIP_TO_END, out, err);
}

int mb_zip_open(const char *path, struct mb_zip **out, struct mb_err *err)
{
    const int fd = open_file(path);
    return fd >= 0 ? mb_zip_open_fd(path, fd, out, err) : mb_err_sys(err, errno, "%s", path);
}

int mb_zip_rest(struct mb_zip *z, struct mb_err *err)
{
    struct stat st;
    if (fstat(z->fd, &st) != 0) {
        return mb_err_sys(err, errno, "%s", z->name);
    }
    z->device = st.st_dev;
    z->inode = st.st_ino;
    close(z->fd);
    z->fd = -1;
    return 0;
}

void mb_zip_close(struct mb_zip *z)
{
    if (z == NULL) {
        return;
    }
    if (z->fd >= 0) {
        close(z->fd);
    }
    mb_free(z->entries);
    mb_free(z->by_name);
    mb_free(z->texts);
    mb_free(z->name);
    mb_free(z);
}

size_t mb_zip_n_entries(const struct mb_zip *z)
{
    return z->n;
}

const struct mb_zip_entry *mb_zip_entry(const struct mb_zip *z, size_t i)
{
    return &z->entries[i];
}

const struct mb_zip_entry *mb_zip_find(const struct mb_zip *z, const char *name)
{
    const struct mb_zip_entry wanted = {.name = name}, *p = &wanted;
    const struct mb_zip_entry *const *found =
        z->n > 0 ? bsearch(&p, z->by_name, z->n, sizeof *z->by_name, by_name) : NULL;
    return found != NULL ? *found : NULL;
}

int mb_zip_read(const struct mb_zip *z, const struct mb_zip_entry *e, uint64_t offset, void *buf,
                size_t n, struct mb_err *err)
{
    return read_at(z, e->at + offset, buf, n, err);
}

int mb_zip_verify(const struct mb_zip *z, const struct mb_zip_entry *e, struct mb_err *err)
{
    uint8_t *piece = mb_alloc(PIECE);
    uLong crc = crc32(0, NULL, 0);
    int rc = piece != NULL ? 0 : no_memory(z, err);
    for (uint64_t at = 0; at < e->n && rc == 0 && e->crc32 != 0;) {
        const size_t k = e->n - at < PIECE ? (size_t)(e->n - at) : PIECE;
        rc = mb_zip_read(z, e, at, piece, k, err);
        crc = rc == 0 ? crc32(crc, piece, (uInt)k) : crc;
        at += k;
    }
    if (rc == 0 && e->crc32 != 0 && crc != e->crc32) {
        rc = mb_err_set(err, MB_ECORRUPT, "%s: %s: its checksum is not that of its bytes", z->name,
                        e->name);
    }
    mb_free(piece);
    return rc;
}

int mb_zip_verify_all(const struct mb_zip *z, struct mb_err *err)
{
    int rc = 0;
    for (size_t i = 0; i < z->n && rc == 0; i++) {
        rc = mb_zip_verify(z, &z->entries[i], err);
    }
    return rc;
}
