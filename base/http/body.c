/*
 * sendfile(2) copies nothing: pages of the page cache go to the socket. Where it fails (a file
 * system that cannot do that, or either end: it does not say which) the file is read into a buffer,
 * of which the socket takes what it can; the rest is read again. Then each end has its own error.
 */
#include "base/http/body.h"

#include <errno.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/err.h"
#include "base/fs.h"

enum { COPY_BYTES = 64 * 1024 };

void mb_http_body_seek(struct mb_http_body *b, size_t pos)
{
    b->pos = pos;
    b->stretch = 0;
}

static uint64_t at(const struct mb_http_body *b)
{
    return b->offset + b->pos;
}

/* How many of want come next that are of one kind, data or hole. */
static size_t look(struct mb_http_body *b, size_t want)
{
    if (b->stretch == 0)
        b->stretch = mb_fs_stretch(b->fd, at(b), b->len - b->pos, &b->is_hole);
    return want < b->stretch ? want : (size_t)b->stretch;
}

static void advance(struct mb_http_body *b, size_t n)
{
    b->pos += n;
    b->stretch -= n;
}

/* Does not advance. 0: the file ends here. */
static ssize_t copy_file(const struct mb_http_body *b, void *out, size_t want)
{
    ssize_t got;
    if (b->is_hole) {
        memset(out, 0, want);
        return (ssize_t)want;
    }
    do {
        got = pread(b->fd, out, want, (off_t)at(b));
    } while (got < 0 && errno == EINTR);
    return got;
}

ssize_t mb_http_body_read(struct mb_http_body *b, void *out, size_t want)
{
    size_t left = b->len - b->pos;
    want = want < left ? want : left;
    if (want == 0)
        return 0;
    if (b->fd < 0) {
        memcpy(out, b->bytes + b->pos, want);
        b->pos += want;
        return (ssize_t)want;
    }
    ssize_t got = copy_file(b, out, look(b, want));
    if (got <= 0)
        return got < 0 ? MB_EIO : MB_ESTATE;
    advance(b, (size_t)got);
    return got;
}

static ssize_t send_copied(const struct mb_http_body *b, int socket, size_t want)
{
    uint8_t copy[COPY_BYTES];
    ssize_t got = copy_file(b, copy, want < sizeof copy ? want : sizeof copy);
    if (got < 0)
        errno = EIO;
    return got <= 0 ? got : send(socket, copy, (size_t)got, MSG_NOSIGNAL);
}

static ssize_t send_some(struct mb_http_body *b, int socket, size_t want)
{
    off_t from = (off_t)at(b);
    ssize_t n = -1;
    if (!b->is_hole && !b->is_copied) {
        n = sendfile(socket, b->fd, &from, want);
        b->is_copied = n < 0 && errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK;
    }
    return b->is_hole || b->is_copied ? send_copied(b, socket, want) : n;
}

int mb_http_body_send(struct mb_http_body *b, int socket, size_t max_bytes)
{
    size_t end = b->len - b->pos < max_bytes ? b->len : b->pos + max_bytes;
    while (b->pos < end) {
        ssize_t n = send_some(b, socket, look(b, end - b->pos));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return MB_OK;
        if (n < 0)
            return errno == EIO ? MB_EIO : MB_EUNAVAIL;
        if (n == 0)
            return MB_ESTATE;
        advance(b, (size_t)n);
    }
    return MB_OK;
}
