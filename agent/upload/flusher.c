/*
 *  1. A request puts a copy of the descriptor into its place, over one that waits there already:
 *     the same file, or one that has lost its name. 2. The one thread takes what waits, flushes it
 *     and looks again. 3. Left meanwhile: the thread, when nothing waits, frees.
 *  No descriptor or thread is to be had: the flush is done at once, as slow as the disk is.
 *  A file system that has nothing to flush says EINVAL.
 */
#include "agent/upload/flusher.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/errand.h"

enum { FILE_AT, DIR_AT, N_PLACES };

struct mb_flusher {
    struct mb_errand_sent sent;
    pthread_mutex_t lock; /* of all below */
    int waits[N_PLACES];  /* -1: none */
    int runs, is_left, failed;
};

struct mb_flusher *mb_flusher_create(void)
{
    struct mb_flusher *f = mb_calloc(1, sizeof(*f));

    if (f == NULL || pthread_mutex_init(&f->lock, NULL) != 0) {
        mb_free(f);
        return NULL;
    }
    for (int i = 0; i < N_PLACES; i++)
        f->waits[i] = -1;
    return f;
}

static void destroy(struct mb_flusher *f)
{
    pthread_mutex_destroy(&f->lock);
    mb_free(f);
}

/* errno, or 0. */
static int flush(int at, int fd)
{
    int failed = (at == FILE_AT ? fdatasync(fd) : fsync(fd)) == 0 ? 0 : errno;

    return failed == EINVAL ? 0 : failed;
}

static void note(struct mb_flusher *f, int failed)
{
    if (f->failed == 0)
        f->failed = failed;
}

/* What waits, or nothing: then the thread ends. */
static int take(struct mb_flusher *f, int *fd)
{
    for (int at = 0; at < N_PLACES; at++) {
        *fd = f->waits[at];
        f->waits[at] = -1;
        if (*fd >= 0)
            return at;
    }
    return -1;
}

static void thread_main(void *load)
{
    struct mb_flusher *f = load;
    int at, fd, failed, is_left;

    pthread_mutex_lock(&f->lock);
    while ((at = take(f, &fd)) >= 0) {
        pthread_mutex_unlock(&f->lock);
        failed = flush(at, fd);
        close(fd);
        pthread_mutex_lock(&f->lock);
        note(f, failed);
    }
    f->runs = 0;
    is_left = f->is_left;
    pthread_mutex_unlock(&f->lock);
    if (is_left)
        destroy(f);
}

static void ask(struct mb_flusher *f, int at, int fd)
{
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0), former = -1, is_own = 0;

    pthread_mutex_lock(&f->lock);
    if (copy >= 0) {
        former = f->waits[at];
        f->waits[at] = copy;
    }
    if (copy >= 0 && !f->runs) {
        f->sent = (struct mb_errand_sent){.work = thread_main, .load = f};
        f->runs = mb_errand_send(&f->sent);
        is_own = !f->runs;
        if (is_own)
            f->waits[at] = -1;
    }
    if (copy < 0 || is_own)
        note(f, flush(at, fd));
    pthread_mutex_unlock(&f->lock);
    if (former >= 0)
        close(former);
    if (is_own)
        close(copy);
}

void mb_flusher_file(struct mb_flusher *f, int fd)
{
    ask(f, FILE_AT, fd);
}

void mb_flusher_dir(struct mb_flusher *f, int fd)
{
    ask(f, DIR_AT, fd);
}

int mb_flusher_failed(struct mb_flusher *f)
{
    int failed;

    pthread_mutex_lock(&f->lock);
    failed = f->failed;
    f->failed = 0;
    pthread_mutex_unlock(&f->lock);
    return failed;
}

void mb_flusher_leave(struct mb_flusher *f)
{
    int runs;

    if (f == NULL)
        return;
    pthread_mutex_lock(&f->lock);
    f->is_left = 1;
    runs = f->runs;
    pthread_mutex_unlock(&f->lock);
    if (!runs)
        destroy(f);
}
