#include "base/aside.h"

#include <stddef.h>

static void thread_main(void *arg)
{
    struct mb_aside *a = arg;

    a->work(a->arg);
    uv_async_send(&a->done);
}

static void on_closed(uv_handle_t *h)
{
    struct mb_aside *a = h->data;

    a->closed(a->closed_arg);
}

static void on_done(uv_async_t *h)
{
    struct mb_aside *a = h->data;

    if (!a->is_running)
        return;
    uv_thread_join(&a->thread); /* it has nothing left to do */
    a->is_running = 0;
    uv_unref((uv_handle_t *)h);
    if (a->is_closing)
        uv_close((uv_handle_t *)h, on_closed);
    else
        a->after(a->arg);
}

int mb_aside_init(struct mb_aside *a, uv_loop_t *loop)
{
    int rc;

    *a = (struct mb_aside){0};
    rc = uv_async_init(loop, &a->done, on_done);
    a->done.data = a;
    if (rc == 0)
        uv_unref((uv_handle_t *)&a->done);
    return rc;
}

int mb_aside_run(struct mb_aside *a, void (*work)(void *arg), void (*after)(void *arg), void *arg)
{
    if (a->is_running || a->is_closing)
        return 0;
    a->work = work;
    a->after = after;
    a->arg = arg;
    if (uv_thread_create(&a->thread, thread_main, a) != 0)
        return 0;
    a->is_running = 1;
    uv_ref((uv_handle_t *)&a->done);
    return 1;
}

void mb_aside_close(struct mb_aside *a, void (*closed)(void *arg), void *arg)
{
    a->closed = closed;
    a->closed_arg = arg;
    a->is_closing = 1;
    if (!a->is_running)
        uv_close((uv_handle_t *)&a->done, on_closed);
}
