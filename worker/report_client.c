/*
 * The thread behind report_client.h.
 *
 *  1. start: the fd becomes non-blocking, hello is queued, the thread begins.
 *  2. send: encode, put progress into its one place and anything else at the end of the queue, wake
 *     the thread. The thread writes kept messages first, progress after, a partly written frame
 *     always to its end.
 *  3. What arrives is decoded and remembered under the lock: start, stop, save_now, durable.
 *  4. close: the thread goes on until all is written or flush_ms have passed.
 * Failures
 *  5. The socket ends or errs, or a frame is not ours: what was queued is dropped, a stop is
 *     remembered with the reason, and send() says MB_EUNAVAIL from then on.
 *  6. A message that a worker has no use for (another worker's) is passed over.
 */
#include "worker/report_client.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"

struct mb_report_client {
    int fd;
    int wake_fd;
    uint32_t rank;
    pthread_t thread;
    struct mb_buf in; /* the thread's */

    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t changed;
    struct mb_buf kept;     /* whole frames in order; the first may be partly written */
    size_t n_kept;          /* frames added and not yet written, counted when kept drains */
    struct mb_buf progress; /* one whole frame, or empty */
    struct mb_buf writing;  /* what the thread took to write */
    int lost;
    int closing;
    uint64_t close_deadline_ms;
    int have_start;
    struct mb_report start;
    int stop;
    char stop_reason[MB_REPORT_REASON_MAX];
    int save_now;
    char save_reason[MB_REPORT_REASON_MAX];
    int64_t durable[MB_REPORT_DURABLE_MAX]; /* a ring */
    size_t n_durable;                       /* ever heard of */
};

static void wake(struct mb_report_client *c)
{
    uint64_t one = 1;
    (void)!write(c->wake_fd, &one, sizeof one);
}

/* Locked. */
static void remember_stop(struct mb_report_client *c, const char *reason)
{
    if (!c->stop) {
        c->stop = 1;
        snprintf(c->stop_reason, sizeof c->stop_reason, "%.*s", (int)sizeof c->stop_reason - 1,
                 reason);
    }
    pthread_cond_broadcast(&c->changed);
}

static void lose(struct mb_report_client *c, const char *why)
{
    pthread_mutex_lock(&c->lock);
    int news = !c->lost && !c->closing;
    c->lost = 1;
    mb_buf_reset(&c->kept);
    mb_buf_reset(&c->progress);
    mb_buf_reset(&c->writing);
    remember_stop(c, why);
    pthread_mutex_unlock(&c->lock);
    if (news) {
        mb_warn("report", "%s", why);
    }
}

/* Takes r's memory over when it keeps it; the caller closes what is left. */
static void remember(struct mb_report_client *c, struct mb_report *r)
{
    pthread_mutex_lock(&c->lock);
    switch (r->type) {
    case MB_REPORT_START:
        mb_report_close(&c->start);
        c->start = *r;
        memset(r, 0, sizeof *r);
        c->have_start = 1;
        break;
    case MB_REPORT_STOP:
        remember_stop(c, r->text);
        break;
    case MB_REPORT_SAVE_NOW:
        c->save_now = 1;
        snprintf(c->save_reason, sizeof c->save_reason, "%s", r->text);
        break;
    case MB_REPORT_DURABLE:
        c->durable[c->n_durable++ % MB_REPORT_DURABLE_MAX] = r->iteration;
        break;
    default:
        break;
    }
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

static void read_socket(struct mb_report_client *c)
{
    uint8_t bytes[16384];
    ssize_t n = recv(c->fd, bytes, sizeof bytes, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (n <= 0) {
        lose(c, "the agent's side of the report socket is closed");
        return;
    }
    if (mb_buf_add(&c->in, bytes, (size_t)n) != 0) {
        lose(c, "no memory for a message of the agent");
        return;
    }
    for (;;) {
        struct mb_report r;
        struct mb_err err;
        mb_err_clear(&err);
        int rc = mb_report_decode(&c->in, &r, &err);
        if (rc < 0) {
            lose(c, err.text);
            return;
        }
        if (rc == 0) {
            return;
        }
        remember(c, &r);
        mb_report_close(&r);
    }
}

/* Locked. Moves the next bytes to be written into `writing`. */
static int take_next(struct mb_report_client *c)
{
    if (c->writing.len > 0) {
        return 1;
    }
    struct mb_buf *from = c->kept.len > 0 ? &c->kept : &c->progress;
    if (from->len == 0) {
        return 0;
    }
    struct mb_buf swap = c->writing;
    c->writing = *from;
    *from = swap;
    if (from == &c->kept) {
        c->n_kept = 0;
    }
    return 1;
}

static void write_socket(struct mb_report_client *c)
{
    const char *why = NULL;
    pthread_mutex_lock(&c->lock);
    while (!c->lost && take_next(c)) {
        ssize_t n = send(c->fd, c->writing.data, c->writing.len, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            why = errno == EAGAIN ? NULL : "the agent's side of the report socket is closed";
            break;
        }
        mb_buf_consume(&c->writing, (size_t)n);
    }
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    if (why != NULL) {
        lose(c, why);
    }
}

/* Locked. */
static int all_written(const struct mb_report_client *c)
{
    return c->lost || (c->writing.len == 0 && c->kept.len == 0 && c->progress.len == 0);
}

static void *thread_main(void *arg)
{
    struct mb_report_client *c = arg;
    for (;;) {
        pthread_mutex_lock(&c->lock);
        int idle = all_written(c), lost = c->lost, closing = c->closing;
        uint64_t now = mb_mono_ms(), deadline_ms = c->close_deadline_ms;
        pthread_mutex_unlock(&c->lock);
        if (closing && (idle || now >= deadline_ms)) {
            return NULL;
        }
        struct pollfd p[2] = {
            {.fd = c->wake_fd, .events = POLLIN},
            {.fd = lost ? -1 : c->fd, .events = (short)(idle ? POLLIN : POLLIN | POLLOUT)}};
        int wait_ms = closing ? (int)(deadline_ms - now > 1000 ? 1000 : deadline_ms - now) : -1;
        if (poll(p, 2, wait_ms) < 0 && errno != EINTR) {
            lose(c, "poll failed on the report socket");
        }
        if (p[0].revents != 0) {
            uint64_t ignored;
            (void)!read(c->wake_fd, &ignored, sizeof ignored);
        }
        if (p[1].revents & (POLLIN | POLLHUP | POLLERR)) {
            read_socket(c);
        }
        write_socket(c);
    }
}

static void free_client(struct mb_report_client *c)
{
    close(c->fd);
    if (c->wake_fd >= 0) {
        close(c->wake_fd);
    }
    mb_buf_close(&c->in);
    mb_buf_close(&c->kept);
    mb_buf_close(&c->progress);
    mb_buf_close(&c->writing);
    mb_report_close(&c->start);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    mb_free(c);
}

int mb_report_client_start(int fd, uint32_t rank, struct mb_report_client **out, struct mb_err *err)
{
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0 ||
        fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
        return mb_err_sys(err, errno, "report socket %d", fd);
    }
    struct mb_report_client *c = mb_calloc(1, sizeof *c);
    if (c == NULL) {
        return mb_err_set(err, MB_ENOMEM, "report: out of memory");
    }
    c->fd = fd;
    c->rank = rank;
    pthread_mutex_init(&c->lock, NULL);
    mb_cond_init(&c->changed);
    int rc = 0;
    c->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (c->wake_fd < 0) {
        rc = mb_err_sys(err, errno, "report: eventfd");
        goto out;
    }
    struct mb_report hello = {.type = MB_REPORT_HELLO, .abi = MB_REPORT_ABI, .pid = getpid()};
    rc = mb_report_client_send(c, &hello, err);
    if (rc != 0) {
        goto out;
    }
    int failed = pthread_create(&c->thread, NULL, thread_main, c);
    if (failed != 0) {
        rc = mb_err_sys(err, failed, "report: thread");
        goto out;
    }
    *out = c;
    return 0;
out:
    c->fd = -1; /* not taken */
    free_client(c);
    return rc;
}

void mb_report_client_close(struct mb_report_client *c, uint64_t flush_ms)
{
    if (c == NULL) {
        return;
    }
    pthread_mutex_lock(&c->lock);
    c->closing = 1;
    c->close_deadline_ms = mb_mono_ms() + flush_ms;
    pthread_mutex_unlock(&c->lock);
    wake(c);
    pthread_join(c->thread, NULL);
    free_client(c);
}

int mb_report_client_send(struct mb_report_client *c, struct mb_report *r, struct mb_err *err)
{
    r->rank = c->rank;
    pthread_mutex_lock(&c->lock);
    int rc = 0;
    if (c->lost) {
        rc = mb_err_set(err, MB_EUNAVAIL, "report: the socket to the agent has ended");
    } else if (r->type == MB_REPORT_PROGRESS) {
        mb_buf_reset(&c->progress);
        rc = mb_report_encode(r, &c->progress, err);
    } else if (c->n_kept == MB_REPORT_CLIENT_QUEUE_MAX) {
        rc = mb_err_set(err, MB_EFULL, "report: the agent has not read for %d messages",
                        (int)MB_REPORT_CLIENT_QUEUE_MAX);
    } else {
        if (r->type == MB_REPORT_DONE &&
            mb_buf_add(&c->kept, c->progress.data, c->progress.len) == 0) {
            mb_buf_reset(&c->progress); /* the last progress must not come after the end */
        }
        rc = mb_report_encode(r, &c->kept, err);
        c->n_kept += rc == 0;
    }
    pthread_mutex_unlock(&c->lock);
    wake(c);
    return rc;
}

int mb_report_client_wait_start(struct mb_report_client *c, uint64_t timeout_ms,
                                struct mb_report *out, struct mb_err *err)
{
    uint64_t deadline_ms = mb_mono_ms() + timeout_ms;
    struct timespec ts = {.tv_sec = (time_t)(deadline_ms / 1000),
                          .tv_nsec = (long)(deadline_ms % 1000) * 1000000};
    int rc = 0;
    pthread_mutex_lock(&c->lock);
    while (!c->have_start && !c->stop && rc == 0) {
        if (pthread_cond_timedwait(&c->changed, &c->lock, &ts) == ETIMEDOUT) {
            rc = mb_err_set(err, MB_ETIMEOUT, "the gang did not start within %llu s",
                            (unsigned long long)(timeout_ms / 1000));
        }
    }
    if (c->have_start) {
        rc = 0;
        c->have_start = 0;
        *out = c->start;
        memset(&c->start, 0, sizeof c->start);
    } else if (c->stop) {
        rc = mb_err_set(err, MB_ECANCELED, "stopped before the start: %s", c->stop_reason);
    }
    pthread_mutex_unlock(&c->lock);
    return rc;
}

int mb_report_client_stopping(struct mb_report_client *c, char reason[MB_REPORT_REASON_MAX])
{
    pthread_mutex_lock(&c->lock);
    int stop = c->stop;
    memcpy(reason, c->stop_reason, MB_REPORT_REASON_MAX);
    pthread_mutex_unlock(&c->lock);
    return stop;
}

int mb_report_client_take_save_now(struct mb_report_client *c, char reason[MB_REPORT_REASON_MAX])
{
    pthread_mutex_lock(&c->lock);
    int save = c->save_now;
    c->save_now = 0;
    memcpy(reason, c->save_reason, MB_REPORT_REASON_MAX);
    pthread_mutex_unlock(&c->lock);
    return save;
}

int mb_report_client_is_durable(struct mb_report_client *c, int64_t iteration)
{
    int found = 0;
    pthread_mutex_lock(&c->lock);
    for (size_t i = 0; i < c->n_durable && i < MB_REPORT_DURABLE_MAX; i++) {
        found |= c->durable[i] == iteration;
    }
    pthread_mutex_unlock(&c->lock);
    return found;
}
