/*
 * 1. open: a name that ends in .gz is read through zlib and must be gzip; anything else as it is.
 * 2. next reads 1 MiB at a time behind what was left over, until a newline is there; what follows
 * the last newline is left over for the next chunk. The end of the file ends the last line. A line
 * longer than MAX_LINE_BYTES, a cut or damaged gzip stream and a read error are errors with the
 * path; the line number is added where it is known.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include "base/alloc.h"
#include "base/str.h"
#include "worker/data/preprocess_private.h"

enum { CHUNK_BYTES = 1 << 20, MAX_LINE_BYTES = 1 << 30 };

struct mb_input {
    const char *path; /* borrowed */
    int fd;           /* plain; -1 for gzip */
    gzFile gz;
    uint64_t bytes_total;
    uint64_t bytes_done; /* plain only */
    struct mb_buf rest;  /* the beginning of a line */
    uint64_t next_line;
    int at_end;
};

int mb_input_open(const char *path, struct mb_input **out, struct mb_err *err)
{
    struct stat st;
    struct mb_input *in = mb_calloc(1, sizeof(*in));
    int rc;

    if (in == NULL)
        return mb_err_set(err, MB_ENOMEM, "--input %s: out of memory", path);
    in->path = path;
    in->next_line = 1;
    in->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (in->fd < 0 || fstat(in->fd, &st) != 0) {
        rc = mb_err_sys(err, errno, "--input %s", path);
        goto fail;
    }
    if (S_ISDIR(st.st_mode)) {
        rc = mb_err_set(err, MB_EINVAL, "--input %s: is a directory; give a JSON Lines file", path);
        goto fail;
    }
    in->bytes_total = (uint64_t)st.st_size;
    if (mb_ends_with(path, ".gz")) {
        in->gz = gzdopen(in->fd, "rb");
        if (in->gz == NULL) {
            rc = mb_err_set(err, MB_ENOMEM, "--input %s: out of memory", path);
            goto fail;
        }
        in->fd = -1; /* zlib closes it */
        gzbuffer(in->gz, 1 << 18);
        if (in->bytes_total > 0 && gzdirect(in->gz)) {
            rc = mb_err_set(err, MB_EINVAL,
                            "--input %s: not gzip, although its name ends in .gz; rename it", path);
            goto fail;
        }
    }
    *out = in;
    return 0;
fail:
    mb_input_close(in);
    return rc;
}

void mb_input_close(struct mb_input *in)
{
    if (in == NULL)
        return;
    if (in->gz != NULL)
        gzclose(in->gz);
    if (in->fd >= 0)
        close(in->fd);
    mb_buf_close(&in->rest);
    mb_free(in);
}

static int gz_failed(const struct mb_input *in, struct mb_err *err)
{
    int code;
    const char *text = gzerror(in->gz, &code);

    if (code == Z_ERRNO)
        return mb_err_sys(err, errno, "--input %s", in->path);
    return mb_err_set(err, MB_ECORRUPT, "--input %s: damaged or cut gzip (%s)", in->path,
                      code == Z_BUF_ERROR ? "it ends too early" : text);
}

/* Bytes read into p, 0 at the end, negative MB_E*. */
static ssize_t read_some(struct mb_input *in, void *p, size_t n, struct mb_err *err)
{
    ssize_t got;

    if (in->gz != NULL) {
        int code;
        got = gzread(in->gz, p, (unsigned)n);
        gzerror(in->gz, &code);
        if (got < 0 || (got < (ssize_t)n && code != Z_OK && code != Z_STREAM_END))
            return gz_failed(in, err);
        return got;
    }
    do
        got = read(in->fd, p, n);
    while (got < 0 && errno == EINTR);
    if (got < 0)
        return mb_err_sys(err, errno, "--input %s", in->path);
    in->bytes_done += (uint64_t)got;
    return got;
}

static uint64_t count_lines(const uint8_t *p, size_t n)
{
    uint64_t count = 0;

    for (size_t i = 0; i < n; i++)
        count += p[i] == '\n';
    return count;
}

int mb_input_next(struct mb_input *in, struct mb_buf *text, uint64_t *first_line,
                  struct mb_err *err)
{
    size_t searched = 0;
    uint8_t *newline = NULL;
    size_t whole;

    mb_buf_reset(text);
    if (mb_buf_add(text, in->rest.data, in->rest.len) != 0)
        goto no_memory;
    mb_buf_reset(&in->rest);
    while (newline == NULL && !in->at_end) {
        ssize_t got;

        if (text->len > MAX_LINE_BYTES)
            return mb_err_set(err, MB_EINVAL, "%s:%llu: the line is longer than 1 GiB", in->path,
                              (unsigned long long)in->next_line);
        if (mb_buf_reserve(text, CHUNK_BYTES) != 0)
            goto no_memory;
        searched = text->len;
        got = read_some(in, text->data + text->len, CHUNK_BYTES, err);
        if (got < 0)
            return (int)got;
        in->at_end = got == 0;
        text->len += (size_t)got;
        newline = memrchr(text->data + searched, '\n', text->len - searched);
    }
    whole = newline != NULL ? (size_t)(newline + 1 - text->data) : text->len;
    if (mb_buf_add(&in->rest, text->data + whole, text->len - whole) != 0)
        goto no_memory;
    text->len = whole;
    *first_line = in->next_line;
    in->next_line += count_lines(text->data, text->len);
    return whole > 0;
no_memory:
    return mb_err_set(err, MB_ENOMEM, "--input %s: out of memory", in->path);
}

uint64_t mb_input_bytes_done(const struct mb_input *in)
{
    if (in->gz != NULL) {
        z_off_t at = gzoffset(in->gz);
        return at > 0 ? (uint64_t)at : 0;
    }
    return in->bytes_done;
}

uint64_t mb_input_bytes_total(const struct mb_input *in)
{
    return in->bytes_total;
}
