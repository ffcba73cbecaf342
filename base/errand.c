/*
 *  1. start: one block, held by the loop's handle and by the thread;
 *  2. the thread has done its work and wakes the loop, unless it was left: the loop may be gone;
 *  3. on the loop: after(), and the handle is closed; 4. the last holder drops the load.
 *  Left before 2: the handle is closed at once, the thread is the last holder.
 *  Threads are counted, for the end of the process (mb_errands_ended).
 */
#include "base/errand.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#include "base/alloc.h"

struct mb_errand {
    const struct mb_errand_plan *plan;
    void *owner, *load;
    uv_async_t done;
    uv_mutex_t lock; /* of is_left: nobody wakes a loop that is gone */
    int is_left;
    atomic_int n_holders;
};

/* ---- the threads of this process ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ended = PTHREAD_COND_INITIALIZER;
static unsigned n_threads;

static void count_end(void)
{
    pthread_mutex_lock(&lock);
    n_threads--;
    pthread_cond_broadcast(&ended);
    pthread_mutex_unlock(&lock);
}

/* main ends with count_end(). */
static int begin_thread(void *(*main)(void *arg), void *arg)
{
    pthread_t thread;
    int rc;

    pthread_mutex_lock(&lock);
    n_threads++;
    pthread_mutex_unlock(&lock);
    rc = pthread_create(&thread, NULL, main, arg);
    if (rc == 0)
        pthread_detach(thread);
    else
        count_end();
    return rc == 0;
}

int mb_errands_ended(uint64_t ms)
{
    struct timespec until;
    int rc = 0, is_end;

    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)(ms / 1000);
    until.tv_nsec += (long)(ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&lock);
    while (n_threads > 0 && rc == 0)
        rc = pthread_cond_timedwait(&ended, &lock, &until);
    is_end = n_threads == 0;
    pthread_mutex_unlock(&lock);
    return is_end;
}

static void *sent_main(void *arg)
{
    struct mb_errand_sent s = *(struct mb_errand_sent *)arg;

    s.work(s.load);
    count_end();
    return NULL;
}

int mb_errand_send(struct mb_errand_sent *s)
{
    return begin_thread(sent_main, s);
}

/* ---- one that is heard of ---- */

static void let_go(struct mb_errand *e)
{
    if (atomic_fetch_sub(&e->n_holders, 1) > 1)
        return;
    e->plan->drop(e->load);
    uv_mutex_destroy(&e->lock);
    mb_free(e);
}

static void *thread_main(void *arg)
{
    struct mb_errand *e = arg;

    e->plan->work(e->load);
    uv_mutex_lock(&e->lock);
    if (!e->is_left)
        uv_async_send(&e->done);
    uv_mutex_unlock(&e->lock);
    let_go(e);
    count_end();
    return NULL;
}

static void on_closed(uv_handle_t *h)
{
    let_go(h->data);
}

void mb_errand_leave(struct mb_errand *e)
{
    if (e == NULL)
        return;
    uv_mutex_lock(&e->lock);
    e->is_left = 1;
    uv_mutex_unlock(&e->lock);
    uv_close((uv_handle_t *)&e->done, on_closed);
}

static void on_done(uv_async_t *h)
{
    struct mb_errand *e = h->data;

    uv_mutex_lock(&e->lock); /* the thread has let go of the load */
    uv_mutex_unlock(&e->lock);
    e->plan->after(e->owner, e->load);
    uv_close((uv_handle_t *)h, on_closed);
}

struct mb_errand *mb_errand_start(uv_loop_t *loop, const struct mb_errand_plan *plan, void *owner,
                                  void *load)
{
    struct mb_errand *e = mb_calloc(1, sizeof(*e));

    if (e == NULL || uv_mutex_init(&e->lock) != 0) {
        mb_free(e);
        plan->drop(load);
        return NULL;
    }
    e->plan = plan;
    e->owner = owner;
    e->load = load;
    atomic_init(&e->n_holders, 1); /* let_go() cleans up when there is no handle */
    if (uv_async_init(loop, &e->done, on_done) != 0) {
        let_go(e);
        return NULL;
    }
    e->done.data = e;
    atomic_store(&e->n_holders, 2);
    if (!begin_thread(thread_main, e)) {
        atomic_store(&e->n_holders, 1);
        mb_errand_leave(e);
        return NULL;
    }
    return e;
}
