/*
 * .npy files (npy.h).
 *
 *  1. Parse: magic, version 1 to 3, header length within what is there; then '{', for each of the
 *     keys 'descr', 'fortran_order', 'shape' once its value, '}', spaces, and a newline at the end.
 *  2. Read: the file is opened without waiting (a pipe would never come), must be a regular file of
 *     the length that its header and the wanted shape give, and is read, not mapped: what another
 *     process does to it later changes nothing here.
 *  3. Write: header and elements as one file (cache_files.h).
 * Failures: MB_ECORRUPT names the file and the part of it; of a write nothing remains.
 */
#include "worker/data/npy.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "worker/data/cache_files.h"

enum { PRELUDE_1 = 10, PRELUDE_2 = 12, ALIGN = 64, AXIS_DIGITS = 21 };

static const char MAGIC[] = "\x93NUMPY";

static const struct {
    const char *descr;
    size_t bytes;
} TYPES[] = {
    [MB_NPY_I16] = {"<i2", 2},
    [MB_NPY_I32] = {"<i4", 4},
    [MB_NPY_U32] = {"<u4", 4},
    [MB_NPY_I64] = {"<i8", 8},
};

size_t mb_npy_element_bytes(enum mb_npy_type type)
{
    return TYPES[type].bytes;
}

/* ---- header ---- */

size_t mb_npy_header_make(const struct mb_npy_shape *shape, char out[MB_NPY_MADE_MAX])
{
    char first[24];
    char text[MB_NPY_MADE_MAX - ALIGN - PRELUDE_1];
    int digits = snprintf(first, sizeof first, "%" PRIu64, shape->dims[0]);
    int n = snprintf(text, sizeof text, "{'descr': '%s', 'fortran_order': False, 'shape': (%s,",
                     TYPES[shape->type].descr, first);
    if (shape->n_dims == 2) {
        n += snprintf(text + n, sizeof text - (size_t)n, " %" PRIu64, shape->dims[1]);
    }
    /* numpy leaves room for the first dimension to grow in place. */
    n += snprintf(text + n, sizeof text - (size_t)n, "), }%*s", AXIS_DIGITS - digits, "");
    size_t length = (size_t)n + 1;
    length += ALIGN - (PRELUDE_1 + length) % ALIGN;
    memcpy(out, MAGIC, 6);
    out[6] = 1;
    out[7] = 0;
    out[8] = (char)(length & 0xff);
    out[9] = (char)(length >> 8);
    memset(out + PRELUDE_1, ' ', length);
    memcpy(out + PRELUDE_1, text, (size_t)n);
    out[PRELUDE_1 + length - 1] = '\n';
    return PRELUDE_1 + length;
}

struct text {
    const char *p, *end;
};

static void skip_spaces(struct text *t)
{
    while (t->p < t->end && *t->p == ' ') {
        t->p++;
    }
}

static int take(struct text *t, const char *word)
{
    size_t n = strlen(word);
    skip_spaces(t);
    if ((size_t)(t->end - t->p) < n || memcmp(t->p, word, n) != 0) {
        return 0;
    }
    t->p += n;
    return 1;
}

static int take_number(struct text *t, uint64_t *out)
{
    const char *from;
    *out = 0;
    skip_spaces(t);
    for (from = t->p; t->p < t->end && *t->p >= '0' && *t->p <= '9'; t->p++) {
        if (__builtin_mul_overflow(*out, 10, out) ||
            __builtin_add_overflow(*out, (uint64_t)(*t->p - '0'), out)) {
            return 0;
        }
    }
    return t->p > from;
}

static int take_type(struct text *t, enum mb_npy_type *out)
{
    for (size_t i = 0; i < sizeof TYPES / sizeof TYPES[0]; i++) {
        char quoted[8];
        snprintf(quoted, sizeof quoted, "'%s'", TYPES[i].descr);
        if (take(t, quoted)) {
            *out = (enum mb_npy_type)i;
            return 1;
        }
    }
    return 0;
}

/* "(12,)", "(12, 2)", "(12, 2,)" */
static int take_dims(struct text *t, struct mb_npy_shape *s)
{
    s->n_dims = 1;
    s->dims[1] = 1;
    if (!take(t, "(") || !take_number(t, &s->dims[0]) || !take(t, ",")) {
        return 0;
    }
    if (take_number(t, &s->dims[1])) {
        s->n_dims = 2;
        (void)take(t, ",");
    } else {
        s->dims[1] = 1;
    }
    return take(t, ")");
}

static int parse_dict(struct text *t, struct mb_npy_shape *s, struct mb_err *err)
{
    int has_type = 0, has_order = 0, has_shape = 0;
    if (!take(t, "{")) {
        return mb_err_set(err, MB_ECORRUPT, "the header is no dict");
    }
    while (!take(t, "}")) {
        if (!has_type && take(t, "'descr':")) {
            has_type = 1;
            if (!take_type(t, &s->type)) {
                return mb_err_set(err, MB_ECORRUPT, "descr is none of <i2, <i4, <u4, <i8");
            }
        } else if (!has_order && take(t, "'fortran_order':")) {
            has_order = 1;
            if (!take(t, "False")) {
                return mb_err_set(err, MB_ECORRUPT, "fortran_order is not False");
            }
        } else if (!has_shape && take(t, "'shape':")) {
            has_shape = 1;
            if (!take_dims(t, s)) {
                return mb_err_set(err, MB_ECORRUPT, "shape is not one or two numbers");
            }
        } else {
            return mb_err_set(err, MB_ECORRUPT,
                              "the header is not descr, fortran_order and shape, each once");
        }
        if (!take(t, ",")) {
            if (!take(t, "}")) {
                return mb_err_set(err, MB_ECORRUPT, "the header's dict does not end");
            }
            break;
        }
    }
    if (!has_type || !has_order || !has_shape) {
        return mb_err_set(err, MB_ECORRUPT, "the header lacks descr, fortran_order or shape");
    }
    return 0;
}

int mb_npy_header_parse(const void *p, size_t n, struct mb_npy_shape *shape, size_t *header_bytes,
                        struct mb_err *err)
{
    const uint8_t *b = p;
    struct mb_npy_shape s = {0};
    if (n < PRELUDE_2 || memcmp(b, MAGIC, 6) != 0) {
        return mb_err_set(err, MB_ECORRUPT, "it does not begin as a .npy file");
    }
    if (b[6] < 1 || b[6] > 3 || b[7] != 0) {
        return mb_err_set(err, MB_ECORRUPT, "version %d.%d is not known", b[6], b[7]);
    }
    const size_t prelude = b[6] == 1 ? PRELUDE_1 : PRELUDE_2;
    size_t length = (size_t)b[8] | (size_t)b[9] << 8;
    if (b[6] != 1) {
        length |= (size_t)b[10] << 16 | (size_t)b[11] << 24;
    }
    if (length > n - prelude || length > MB_NPY_HEADER_MAX - PRELUDE_2) {
        return mb_err_set(err, MB_ECORRUPT, "a header of %zu bytes does not fit", length);
    }
    struct text t = {(const char *)b + prelude, (const char *)b + prelude + length};
    int rc = parse_dict(&t, &s, err);
    if (rc != 0) {
        return rc;
    }
    skip_spaces(&t);
    if (t.end - t.p != 1 || *t.p != '\n') {
        return mb_err_set(err, MB_ECORRUPT, "the header does not end with a newline");
    }
    *shape = s;
    *header_bytes = prelude + length;
    return 0;
}

/* ---- files ---- */

static int read_all(int fd, void *out, size_t n, uint64_t offset, struct mb_err *err)
{
    for (size_t at = 0; at < n;) {
        ssize_t got = pread(fd, (char *)out + at, n - at, (off_t)(offset + at));
        if (got == 0) {
            return mb_err_set(err, MB_ECORRUPT, "it became shorter while it was read");
        }
        if (got < 0 && errno != EINTR) {
            return mb_err_sys(err, errno, "read");
        }
        at += got > 0 ? (size_t)got : 0;
    }
    return 0;
}

static int read_open(int fd, const struct mb_npy_shape *want, void *out, struct mb_err *err)
{
    char head[MB_NPY_HEADER_MAX];
    struct mb_npy_shape s;
    struct stat st;
    size_t at = 0;
    if (fstat(fd, &st) != 0) {
        return mb_err_sys(err, errno, "stat");
    }
    if (!S_ISREG(st.st_mode)) {
        return mb_err_set(err, MB_ECORRUPT, "it is no regular file");
    }
    const uint64_t size = (uint64_t)st.st_size;
    const size_t n_head = size < sizeof head ? (size_t)size : sizeof head;
    int rc = read_all(fd, head, n_head, 0, err);
    if (rc == 0) {
        rc = mb_npy_header_parse(head, n_head, &s, &at, err);
    }
    if (rc != 0) {
        return rc;
    }
    if (s.type != want->type || s.n_dims != want->n_dims || s.dims[0] != want->dims[0] ||
        s.dims[1] != want->dims[1]) {
        return mb_err_set(err, MB_ECORRUPT,
                          "it has %s of %" PRIu64 " x %" PRIu64 ", not %s of %" PRIu64
                          " x %" PRIu64,
                          TYPES[s.type].descr, s.dims[0], s.dims[1], TYPES[want->type].descr,
                          want->dims[0], want->dims[1]);
    }
    const uint64_t bytes = want->dims[0] * want->dims[1] * TYPES[want->type].bytes;
    if (size - at != bytes) {
        return mb_err_set(err, MB_ECORRUPT, "it has %" PRIu64 " bytes of elements, not %" PRIu64,
                          size - at, bytes);
    }
    return read_all(fd, out, (size_t)bytes, at, err);
}

int mb_npy_read(const char *path, const struct mb_npy_shape *want, void *out, struct mb_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return mb_err_sys(err, errno, "%s", path);
    }
    int rc = read_open(fd, want, out, err);
    close(fd);
    return rc != 0 ? mb_err_wrap(err, "%s", path) : 0;
}

int mb_npy_write(const char *path, const struct mb_npy_shape *shape, const void *elements,
                 struct mb_err *err)
{
    char head[MB_NPY_MADE_MAX];
    const size_t n_head = mb_npy_header_make(shape, head);
    const uint64_t bytes = shape->dims[0] * shape->dims[1] * TYPES[shape->type].bytes;
    return mb_cache_file_write(path, head, n_head, elements, (size_t)bytes, err);
}
