/*
 * A stream from a descriptor: a regular file, a pipe, a terminal.
 *
 * A pipe may stay silent for ever: read waits in poll for it and for an eventfd that cancel writes
 * to.
 */
#include <errno.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include "base/alloc.h"
#include "worker/data/input/stream.h"

struct fd_stream {
    struct mb_stream base;
    int fd;
    int cancel_fd;
};

static int wait_readable(struct fd_stream *f, struct mb_err *err)
{
    struct pollfd fds[2] = {{.fd = f->cancel_fd, .events = POLLIN},
                            {.fd = f->fd, .events = POLLIN}};

    for (;;) {
        int n = poll(fds, 2, -1);

        if (n < 0 && errno != EINTR)
            return mb_err_sys(err, errno, "poll");
        if (n > 0 && fds[0].revents != 0)
            return mb_err_set(err, MB_ECANCELED, "cancelled");
        if (n > 0)
            return 0;
    }
}

static ssize_t fd_read(struct mb_stream *s, void *p, size_t n, struct mb_err *err)
{
    struct fd_stream *f = (struct fd_stream *)s;

    for (;;) {
        int rc = wait_readable(f, err);
        ssize_t got;

        if (rc != 0)
            return rc;
        got = read(f->fd, p, n);
        if (got >= 0) {
            atomic_fetch_add(&s->done_bytes, (uint64_t)got);
            return got;
        }
        if (errno != EINTR && errno != EAGAIN)
            return mb_err_sys(err, errno, "read");
    }
}

static void fd_cancel(struct mb_stream *s)
{
    struct fd_stream *f = (struct fd_stream *)s;
    uint64_t one = 1;
    ssize_t n;

    do
        n = write(f->cancel_fd, &one, sizeof(one));
    while (n < 0 && errno == EINTR);
}

static void fd_close(struct mb_stream *s)
{
    struct fd_stream *f = (struct fd_stream *)s;

    if (f->fd != STDIN_FILENO)
        close(f->fd);
    close(f->cancel_fd);
    mb_free(f);
}

int mb_stream_fd_open(int fd, uint64_t total_bytes, struct mb_stream **out, struct mb_err *err)
{
    static const struct mb_stream_ops ops = {fd_read, NULL, fd_cancel, fd_close};
    struct fd_stream *f = mb_calloc(1, sizeof(*f));
    int cancel_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);

    if (f == NULL || cancel_fd < 0) {
        int rc = f == NULL ? mb_err_set(err, MB_ENOMEM, "out of memory")
                           : mb_err_sys(err, errno, "eventfd");
        if (cancel_fd >= 0)
            close(cancel_fd);
        if (fd != STDIN_FILENO)
            close(fd);
        mb_free(f);
        return rc;
    }
    f->base.ops = &ops;
    f->base.total_bytes = total_bytes;
    f->fd = fd;
    f->cancel_fd = cancel_fd;
    *out = &f->base;
    return 0;
}
