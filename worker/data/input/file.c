/*
 * A plain regular file, cut at newlines without reading it.
 *
 * 1. open looks at the first bytes: compressed files, pipes and devices become streams.
 * 2. cut wants MB_INPUT_PIECE_BYTES, looks back from there for the last newline (a few kB are
 * read), else forward for the next one. It tells the kernel what will be wanted soon.
 * 3. load, on the worker's thread, preads the piece. Pieces that are out are counted, so that the
 *    owner knows when the file can be closed.
 * A file that grows is read to its new end, one that shrinks is an error: with read(2), unlike with
 * a mapping, nothing worse can happen.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "worker/data/input/codec.h"
#include "worker/data/input/source.h"

enum { LOOK_BYTES = 16 * 1024, LOOK_FAR_BYTES = 256 * 1024, AHEAD_BYTES = 8 << 20 };

struct mb_file {
    atomic_uint n_out; /* pieces cut and not loaded */
    int fd;
    uint64_t size_bytes;
    uint64_t at;
    uint64_t asked_bytes; /* how far the kernel was told to read */
    uint8_t *look;        /* LOOK_FAR_BYTES */
};

/* Exactly n bytes, or fewer at the end of the file: the count, or MB_E*. */
static ssize_t read_at(int fd, void *p, size_t n, uint64_t offset, struct mb_err *err)
{
    size_t done = 0;

    while (done < n) {
        ssize_t got = pread(fd, (uint8_t *)p + done, n - done, (off_t)(offset + done));

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return mb_err_sys(err, errno, "read");
        if (got == 0)
            break;
        done += (size_t)got;
    }
    return (ssize_t)done;
}

static int became_shorter(uint64_t offset, struct mb_err *err)
{
    return mb_err_set(err, MB_ESTATE,
                      "the file became shorter while it was read (nothing at byte %llu); run again "
                      "when nobody writes to it",
                      (unsigned long long)offset);
}

/* Takes fd. */
static int make_file(int fd, uint64_t size_bytes, struct mb_file **out, struct mb_err *err)
{
    struct mb_file *f = mb_calloc(1, sizeof(*f));

    if (f == NULL || (f->look = mb_alloc(LOOK_FAR_BYTES)) == NULL) {
        mb_free(f);
        close(fd);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    f->fd = fd;
    f->size_bytes = size_bytes;
    *out = f;
    return 1;
}

int mb_file_open(const struct mb_source *source, struct mb_file **out, struct mb_stream **stream,
                 struct mb_err *err)
{
    const struct mb_codec_ops *codec = NULL;
    uint8_t first[MB_CODEC_MAGIC_BYTES];
    struct mb_stream *raw;
    struct stat st;
    ssize_t n = 0;
    int rc = 0;
    /* O_NONBLOCK: a pipe that nobody writes yet is waited for by read, which can be cancelled. */
    int fd = open(source->place, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

    if (fd < 0)
        return mb_err_sys(err, errno, "open");
    if (fstat(fd, &st) != 0)
        rc = mb_err_sys(err, errno, "stat");
    else if (S_ISREG(st.st_mode))
        n = read_at(fd, first, sizeof(first), 0, err);
    if (n < 0)
        rc = (int)n;
    if (rc == 0 && S_ISREG(st.st_mode))
        rc = mb_codec_find(first, (size_t)n, &codec, err);
    if (rc == 0 && S_ISREG(st.st_mode))
        rc = mb_codec_check_name(source->name, (size_t)n, codec, err);
    if (rc != 0) {
        close(fd);
        return rc;
    }
    /* /proc and the like: a regular file with bytes and no size is read to its end. */
    if (S_ISREG(st.st_mode) && codec == NULL && (st.st_size > 0 || n == 0))
        return make_file(fd, (uint64_t)st.st_size, out, err);
    rc = mb_stream_fd_open(fd, S_ISREG(st.st_mode) ? (uint64_t)st.st_size : 0, &raw, err);
    return rc != 0 ? rc : mb_stream_decode(raw, source->name, stream, err);
}

int mb_file_seek(struct mb_file *f, uint64_t offset, struct mb_err *err)
{
    if (offset > f->size_bytes)
        return mb_err_set(err, MB_ESTATE, "shorter than when it was left: %llu bytes, not %llu",
                          (unsigned long long)f->size_bytes, (unsigned long long)offset);
    f->at = offset;
    f->asked_bytes = offset;
    return 0;
}

/* Bytes from f->at through the last newline before `to`: 0 if there is none, or MB_E*. */
static int64_t look_back(struct mb_file *f, uint64_t to, struct mb_err *err)
{
    for (uint64_t step = LOOK_BYTES; to > f->at; step = LOOK_FAR_BYTES) {
        uint64_t from = to - f->at > step ? to - step : f->at;
        ssize_t n = read_at(f->fd, f->look, (size_t)(to - from), from, err);
        const uint8_t *newline;

        if (n < 0)
            return n;
        if ((uint64_t)n < to - from)
            return became_shorter(from + (uint64_t)n, err);
        newline = memrchr(f->look, '\n', (size_t)n);
        if (newline != NULL)
            return (int64_t)(from + (uint64_t)(newline + 1 - f->look) - f->at);
        to = from;
    }
    return 0;
}

/* Bytes from f->at through the first newline behind `from`, or to the end of the file. */
static int64_t look_ahead(struct mb_file *f, uint64_t from, uint64_t max_line_bytes,
                          struct mb_err *err)
{
    for (;;) {
        ssize_t n = read_at(f->fd, f->look, LOOK_FAR_BYTES, from, err);
        const uint8_t *newline;

        if (n < 0)
            return n;
        newline = memchr(f->look, '\n', (size_t)n);
        from += newline != NULL ? (uint64_t)(newline - f->look) : (uint64_t)n;
        if (from - f->at > max_line_bytes)
            return mb_err_set(err, MB_EINVAL, MB_LONG_LINE_TEXT,
                              (unsigned long long)max_line_bytes);
        if (newline != NULL)
            return (int64_t)(from + 1 - f->at);
        if (n < LOOK_FAR_BYTES)
            return (int64_t)(from - f->at);
    }
}

/* Asks again for the size at what was the end, so that a file that grew is read to its new end. */
static int left_bytes(struct mb_file *f, uint64_t *left, struct mb_err *err)
{
    struct stat st;

    if (f->size_bytes - f->at <= MB_INPUT_PIECE_BYTES) {
        if (fstat(f->fd, &st) != 0)
            return mb_err_sys(err, errno, "stat");
        if ((uint64_t)st.st_size < f->size_bytes)
            return became_shorter((uint64_t)st.st_size, err);
        f->size_bytes = (uint64_t)st.st_size;
    }
    *left = f->size_bytes - f->at;
    return 0;
}

static void ask_ahead(struct mb_file *f)
{
    uint64_t want = f->at + AHEAD_BYTES;

    if (want > f->size_bytes)
        want = f->size_bytes;
    if (want < f->asked_bytes + MB_INPUT_PIECE_BYTES && want < f->size_bytes)
        return;
    if (want > f->asked_bytes) /* a hint; where it is refused nothing is lost */
        (void)posix_fadvise(f->fd, (off_t)f->asked_bytes, (off_t)(want - f->asked_bytes),
                            POSIX_FADV_WILLNEED);
    f->asked_bytes = want;
}

int mb_file_cut(struct mb_file *f, uint64_t max_line_bytes, uint64_t *offset, uint64_t *size_bytes,
                struct mb_err *err)
{
    uint64_t left = 0;
    int64_t size;
    int rc = left_bytes(f, &left, err);

    if (rc != 0 || left == 0)
        return rc;
    ask_ahead(f);
    if (left <= MB_INPUT_PIECE_BYTES)
        size = (int64_t)left;
    else
        size = look_back(f, f->at + MB_INPUT_PIECE_BYTES, err);
    if (size == 0)
        size = look_ahead(f, f->at + MB_INPUT_PIECE_BYTES, max_line_bytes, err);
    if (size < 0)
        return (int)size;
    *offset = f->at;
    *size_bytes = (uint64_t)size;
    f->at += (uint64_t)size;
    if (f->size_bytes < f->at)
        f->size_bytes = f->at;
    atomic_fetch_add(&f->n_out, 1);
    return 1;
}

int mb_file_load(struct mb_file *f, uint64_t offset, uint64_t size_bytes, struct mb_buf *text,
                 struct mb_err *err)
{
    ssize_t n;
    int rc = 0;

    mb_buf_reset(text);
    if (mb_buf_reserve(text, (size_t)size_bytes + MB_INPUT_PAD_BYTES) != 0) {
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    } else {
        n = read_at(f->fd, text->data, (size_t)size_bytes, offset, err);
        if (n < 0)
            rc = (int)n;
        else if ((uint64_t)n < size_bytes)
            rc = became_shorter(offset + (uint64_t)n, err);
        else
            text->len = (size_t)n;
    }
    atomic_fetch_sub(&f->n_out, 1); /* the last use of f */
    return rc;
}

int mb_file_is_used(const struct mb_file *f)
{
    return atomic_load(&f->n_out) > 0;
}

void mb_file_close(struct mb_file *f)
{
    if (f == NULL)
        return;
    close(f->fd);
    mb_free(f->look);
    mb_free(f);
}
