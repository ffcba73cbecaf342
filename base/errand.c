/*
 *  1. start: one block, held by the loop's handle and by the thread;
 *  2. the thread has done its work and wakes the loop, unless it was left: the loop may be gone;
 *  3. on the loop: after(), and the handle is closed; 4. the last holder drops the load.
 *  Left before 2: the handle is closed at once, the thread is the last holder.
 */
#include "base/errand.h"

#include <pthread.h>
#include <stdatomic.h>
#include "base/alloc.h"

struct mb_errand {
    const struct mb_errand_plan *plan;
    void *owner, *load;
    uv_async_t done;
    uv_mutex_t lock; /* of is_left: nobody wakes a loop that is gone */
    int is_left;
    atomic_int n_holders;
};

static void let_go(struct mb_errand *e)
{
    if (atomic_fetch_sub(&e->n_holders, 1) > 1)
        return;
    e->plan->drop(e->load);
    uv_mutex_destroy(&e->lock);
    mb_free(e);
}

static void thread_main(void *arg)
{
    struct mb_errand *e = arg;

    e->plan->work(e->load);
    uv_mutex_lock(&e->lock);
    if (!e->is_left)
        uv_async_send(&e->done);
    uv_mutex_unlock(&e->lock);
    let_go(e);
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
    uv_thread_t thread;

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
    if (uv_thread_create(&thread, thread_main, e) != 0) {
        atomic_store(&e->n_holders, 1);
        mb_errand_leave(e);
        return NULL;
    }
    pthread_detach(thread);
    return e;
}
