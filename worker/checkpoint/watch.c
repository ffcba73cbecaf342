/*
 *  1. The thread writes. The caller waits ROUND_MS, or until the thread is through.
 *  2. A round: the sum of all bytes written, the last rank that has not finished, and whether some
 *     rank has seen no growth for too long. All ranks see the same figures, so all decide the same.
 *  3. All have finished: the end. No growth: the end as well, the thread is left alone.
 * Failures: the communicator fails (a rank died): there are no more rounds, and the thread is
 * waited for as long as its own bytes grow.
 */
#include "worker/checkpoint/watch.h"

#include <stdio.h>
#include <time.h>
#include "base/alloc.h"
#include "base/clock.h"

enum { ROUND_MS = 500, MS_PER_S = 1000, NS_PER_MS = 1000000 };

/* Shared with the thread; whoever ends last frees it. */
struct writing {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    int (*write)(void *arg, struct mb_err *err);
    void (*release)(void *arg);
    void *arg;
    int has_ended, is_alone, rc;
    struct mb_err err;
};

void mb_checkpoint_progress_init(struct mb_checkpoint_progress *p)
{
    *p = (struct mb_checkpoint_progress){.n_bytes = 0};
    pthread_mutex_init(&p->lock, NULL);
}

void mb_checkpoint_progress_close(struct mb_checkpoint_progress *p)
{
    pthread_mutex_destroy(&p->lock);
}

void mb_checkpoint_progress_file(struct mb_checkpoint_progress *p, const char *path)
{
    pthread_mutex_lock(&p->lock);
    snprintf(p->file, sizeof p->file, "%s", path);
    pthread_mutex_unlock(&p->lock);
}

int mb_checkpoint_progress_add(void *arg, uint64_t n)
{
    struct mb_checkpoint_progress *p = arg;
    pthread_mutex_lock(&p->lock);
    p->n_bytes += n;
    p->n_moves++;
    int is_left = p->is_left;
    pthread_mutex_unlock(&p->lock);
    return is_left ? MB_ECANCELED : 0;
}

void mb_checkpoint_progress_move(struct mb_checkpoint_progress *p)
{
    (void)mb_checkpoint_progress_add(p, 0);
}

uint64_t mb_checkpoint_progress_moves(struct mb_checkpoint_progress *p, char file[256])
{
    pthread_mutex_lock(&p->lock);
    uint64_t n = p->n_moves;
    snprintf(file, sizeof p->file, "%s", p->file);
    pthread_mutex_unlock(&p->lock);
    return n;
}

static uint64_t bytes_of(struct mb_checkpoint_progress *p)
{
    pthread_mutex_lock(&p->lock);
    uint64_t n = p->n_bytes;
    pthread_mutex_unlock(&p->lock);
    return n;
}

static void free_writing(struct writing *w)
{
    pthread_cond_destroy(&w->ended);
    pthread_mutex_destroy(&w->lock);
    mb_free(w);
}

static void *thread_main(void *arg)
{
    struct writing *w = arg;
    struct mb_err err = {0};
    int rc = w->write(w->arg, &err);
    pthread_mutex_lock(&w->lock);
    w->rc = rc;
    w->err = err;
    w->has_ended = 1;
    pthread_cond_signal(&w->ended);
    int is_alone = w->is_alone;
    pthread_mutex_unlock(&w->lock);
    if (is_alone) {
        w->release(w->arg);
        free_writing(w);
    }
    return NULL;
}

static struct writing *start(int (*write)(void *arg, struct mb_err *err),
                             void (*release)(void *arg), void *arg, struct mb_err *err)
{
    struct writing *w = mb_calloc(1, sizeof *w);
    pthread_attr_t thread_attr;
    pthread_t thread;
    if (w == NULL) {
        mb_err_set(err, MB_ENOMEM, "checkpoint: out of memory");
        return NULL;
    }
    w->write = write;
    w->release = release;
    w->arg = arg;
    pthread_mutex_init(&w->lock, NULL);
    mb_cond_init(&w->ended);
    pthread_attr_init(&thread_attr);
    pthread_attr_setdetachstate(&thread_attr, PTHREAD_CREATE_DETACHED);
    int failed = pthread_create(&thread, &thread_attr, thread_main, w);
    pthread_attr_destroy(&thread_attr);
    if (failed != 0) {
        mb_err_sys(err, failed, "checkpoint: thread");
        free_writing(w);
        return NULL;
    }
    return w;
}

static int wait_round(struct writing *w, uint64_t ms)
{
    uint64_t until_ms = mb_mono_ms() + ms;
    struct timespec ts = {.tv_sec = (time_t)(until_ms / MS_PER_S),
                          .tv_nsec = (long)(until_ms % MS_PER_S) * NS_PER_MS};
    pthread_mutex_lock(&w->lock);
    while (!w->has_ended && mb_mono_ms() < until_ms) {
        pthread_cond_timedwait(&w->ended, &w->lock, &ts);
    }
    int has_ended = w->has_ended;
    pthread_mutex_unlock(&w->lock);
    return has_ended;
}

/* What a round found. */
struct round {
    int64_t unfinished; /* a rank + 1, or 0 */
    int64_t stalls;
    int64_t bytes;
};

/* rc of the communicator; err gets its text, and the figures stay this rank's own. */
static int tell(struct mb_comm *comm, struct round *r, struct mb_err *err)
{
    int64_t most[2] = {r->unfinished, r->stalls};
    int64_t own = r->bytes;
    mb_comm_allreduce(comm, NULL, most, 2, MB_COMM_I64, MB_COMM_MAX);
    mb_comm_allreduce(comm, NULL, &r->bytes, 1, MB_COMM_I64, MB_COMM_SUM);
    int rc = mb_comm_synchronize(comm, err);
    if (rc != 0) {
        r->bytes = own;
        return rc;
    }
    r->unfinished = most[0];
    r->stalls = most[1];
    return 0;
}

/* Takes w. */
static int end(struct writing *w, struct mb_checkpoint_progress *p, uint64_t stall_ms,
               const struct round *r, int *hangs, struct mb_err *err)
{
    char file[256];
    pthread_mutex_lock(&w->lock);
    int has_ended = w->has_ended, rc = w->rc;
    w->is_alone = 1; /* a thread that still runs frees it */
    if (has_ended && rc != 0) {
        *err = w->err;
    }
    pthread_mutex_unlock(&w->lock);
    if (!has_ended) {
        *hangs = 1;
        pthread_mutex_lock(&p->lock);
        p->is_left = 1;
        pthread_mutex_unlock(&p->lock);
        mb_checkpoint_progress_moves(p, file);
        return mb_err_set(err, MB_ETIMEOUT, "%s: nothing was written for %.1f s: the disk hangs",
                          file, (double)stall_ms / MS_PER_S);
    }
    free_writing(w);
    if (rc == 0 && r->unfinished != 0) {
        rc = mb_err_set(err, MB_EUNAVAIL, "saving a checkpoint: the disk of rank %d hangs",
                        (int)(r->unfinished - 1));
    }
    return rc;
}

int mb_checkpoint_watch(struct mb_comm *comm, struct mb_checkpoint_progress *p, uint64_t stall_ms,
                        int (*write)(void *arg, struct mb_err *err), void (*release)(void *arg),
                        void *arg, int *hangs, struct mb_err *err)
{
    uint64_t round_ms = stall_ms / 4 < ROUND_MS ? stall_ms / 4 : ROUND_MS;
    uint64_t grown_ms = mb_mono_ms();
    int64_t most = -1;
    struct mb_err of_comm;
    struct round r;
    struct writing *w = start(write, release, arg, err);
    int is_alone = 0;
    *hangs = 0;
    for (;;) {
        int has_ended = w == NULL || wait_round(w, round_ms);
        r = (struct round){.unfinished = has_ended ? 0 : (int64_t)mb_comm_rank(comm) + 1,
                           .stalls = mb_mono_ms() - grown_ms >= stall_ms,
                           .bytes = (int64_t)bytes_of(p)};
        if (!is_alone && tell(comm, &r, &of_comm) != 0) {
            is_alone = 1; /* the agreement that follows says so */
            most = -1;    /* only our own bytes count from here on */
        }
        if (r.bytes > most) {
            most = r.bytes;
            grown_ms = mb_mono_ms();
            r.stalls = 0;
            mb_checkpoint_progress_move(p);
        }
        if (r.unfinished == 0 || r.stalls) {
            break;
        }
    }
    return w == NULL ? err->code : end(w, p, stall_ms, &r, hangs, err);
}
