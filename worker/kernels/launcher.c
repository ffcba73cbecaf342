#include "worker/kernels/launcher.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include "base/alloc.h"
#include "base/clock.h"

enum {
    AWAKE_NS = 200 * 1000, /* longer than what lies between two operations of a small step */
    WAIT_NS = 100 * 1000,  /* between the owner's looks */
    NS_PER_S = 1000 * 1000 * 1000
};

struct mb_launcher {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t posted;
    atomic_int is_busy; /* 1: run() is to be called, or has not returned; written under the lock */
    atomic_int ends;
    int is_left; /* by its owner: the thread frees everything when its call has returned */
    void (*run)(void *arg);
    void *arg;
};

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * NS_PER_S + t.tv_nsec;
}

static int is_wanted(struct mb_launcher *l)
{
    return atomic_load(&l->is_busy) || atomic_load(&l->ends);
}

static void await(struct mb_launcher *l)
{
    int64_t until = now_ns() + AWAKE_NS;
    while (!is_wanted(l) && now_ns() < until)
        sched_yield(); /* the owner may share its core with us */
    pthread_mutex_lock(&l->lock);
    while (!is_wanted(l))
        pthread_cond_wait(&l->posted, &l->lock);
    pthread_mutex_unlock(&l->lock);
}

static void free_all(struct mb_launcher *l)
{
    pthread_cond_destroy(&l->posted);
    pthread_mutex_destroy(&l->lock);
    mb_free(l);
}

static void *serve(void *arg)
{
    struct mb_launcher *l = arg;
    for (int is_left = 0; !is_left;) {
        await(l);
        if (!atomic_load(&l->is_busy))
            return NULL;
        l->run(l->arg);
        pthread_mutex_lock(&l->lock);
        atomic_store(&l->is_busy, 0);
        is_left = l->is_left;
        pthread_mutex_unlock(&l->lock);
    }
    free_all(l);
    return NULL;
}

int mb_launcher_create(struct mb_launcher **out, struct mb_err *err)
{
    struct mb_launcher *l = mb_calloc(1, sizeof(*l));
    if (l == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory creating a thread");
    pthread_mutex_init(&l->lock, NULL);
    pthread_cond_init(&l->posted, NULL);
    int e = pthread_create(&l->thread, NULL, serve, l);
    if (e != 0) {
        free_all(l);
        return mb_err_set(err, MB_EUNAVAIL, "creating a thread: %s", strerror(e));
    }
    *out = l;
    return 0;
}

/* Under the lock, so that the thread does not go to sleep between its look and the signal. */
static void wake(struct mb_launcher *l, atomic_int *what)
{
    pthread_mutex_lock(&l->lock);
    atomic_store(what, 1);
    pthread_cond_signal(&l->posted);
    pthread_mutex_unlock(&l->lock);
}

void mb_launcher_post(struct mb_launcher *l, void (*run)(void *arg), void *arg)
{
    l->run = run;
    l->arg = arg;
    wake(l, &l->is_busy);
}

int mb_launcher_is_idle(const struct mb_launcher *l)
{
    return !atomic_load(&l->is_busy);
}

int mb_launcher_wait(const struct mb_launcher *l, uint64_t ms)
{
    const struct timespec t = {.tv_nsec = WAIT_NS};
    uint64_t deadline_ms = mb_mono_ms() + ms;
    while (!mb_launcher_is_idle(l)) {
        if (mb_mono_ms() >= deadline_ms)
            return mb_launcher_is_idle(l);
        nanosleep(&t, NULL);
    }
    return 1;
}

int mb_launcher_destroy(struct mb_launcher *l)
{
    if (l == NULL)
        return 1;
    pthread_mutex_lock(&l->lock);
    l->is_left = !mb_launcher_is_idle(l);
    int is_left = l->is_left;
    if (is_left)
        pthread_detach(l->thread);
    pthread_mutex_unlock(&l->lock); /* if it is left, the thread frees it from here on */
    if (is_left)
        return 0;
    wake(l, &l->ends);
    pthread_join(l->thread, NULL);
    free_all(l);
    return 1;
}

int mb_launcher_call(void (*run)(void *arg), void *arg, uint64_t ms)
{
    struct mb_launcher *l = NULL;
    struct mb_err ignored;
    if (mb_launcher_create(&l, &ignored) != 0)
        return 0;
    mb_launcher_post(l, run, arg);
    (void)mb_launcher_wait(l, ms);
    return mb_launcher_destroy(l);
}
