/* A signalfd, since it is the one way to learn who sent a signal without a handler. */
#include "base/signals.h"

#include <errno.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <unistd.h>

static void both(sigset_t *set)
{
    sigemptyset(set);
    sigaddset(set, SIGTERM);
    sigaddset(set, SIGINT);
}

void mb_signals_block(void)
{
    sigset_t set;

    both(&set);
    sigprocmask(SIG_BLOCK, &set, NULL);
}

static void on_readable(uv_poll_t *poll, int status, int events)
{
    struct mb_signals *s = poll->data;
    struct signalfd_siginfo info;

    (void)status;
    (void)events;
    while (s->fd >= 0 && read(s->fd, &info, sizeof(info)) == (ssize_t)sizeof(info))
        s->cb(s->arg, &info);
}

int mb_signals_start(struct mb_signals *s, uv_loop_t *loop, mb_signals_cb cb, void *arg,
                     struct mb_err *err)
{
    sigset_t set;
    int rc;

    both(&set);
    s->cb = cb;
    s->arg = arg;
    s->on_closed = NULL;
    s->fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (s->fd < 0)
        return mb_err_sys(err, errno, "signalfd");
    rc = uv_poll_init(loop, &s->poll, s->fd);
    if (rc != 0) {
        close(s->fd);
        return mb_err_set(err, MB_EIO, "signals cannot be watched: %s", uv_strerror(rc));
    }
    s->poll.data = s;
    uv_poll_start(&s->poll, UV_READABLE, on_readable);
    return 0;
}

static void on_poll_closed(uv_handle_t *handle)
{
    struct mb_signals *s = handle->data;

    if (s->on_closed != NULL)
        s->on_closed(s->arg);
}

void mb_signals_close(struct mb_signals *s, void (*on_closed)(void *arg))
{
    s->on_closed = on_closed;
    uv_poll_stop(&s->poll);
    close(s->fd);
    s->fd = -1;
    uv_close((uv_handle_t *)&s->poll, on_poll_closed);
}
