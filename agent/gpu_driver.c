/*
 *  1. ask: the environment is read here, since it may not change while a thread reads it; the
 * thread opens the driver and counts.
 *  2. It returns: on_answer. What it has opened is ended when nobody shares it any more (nvml.h).
 *  3. The timer is first: on_silence; 2 may follow.
 *  4. close: a thread that hangs is left behind; whatever it opens after all, it ends.
 */
#include "agent/gpu_driver.h"

#include "base/alloc.h"
#include "base/errand.h"

/* The thread's until it has returned. */
struct detection {
    struct mb_gpu_lists lists;
    struct mb_gpu_found found;
    struct mb_err err;
};

struct mb_gpu_driver {
    const struct mb_gpu_driver_ops *ops;
    void *arg;
    uv_timer_t timer;
    struct mb_errand *errand; /* NULL: it has answered */
    void (*on_closed)(void *arg);
    void *on_closed_arg;
};

static void detect(void *load)
{
    struct detection *d = load;

    mb_gpus_detect(&d->lists, &d->found.gpus, &d->found.nvml, &d->found.amd, &d->err);
}

static void answered(void *owner, void *load)
{
    struct mb_gpu_driver *d = owner;
    struct detection *done = load;

    d->errand = NULL;
    uv_timer_stop(&d->timer);
    d->ops->on_answer(d->arg, &done->err, &done->found);
}

static void drop(void *load)
{
    struct detection *d = load;

    mb_nvml_close(d->found.nvml);
    mb_free(d);
}

static void on_timer(uv_timer_t *t)
{
    struct mb_gpu_driver *d = t->data;

    d->ops->on_silence(d->arg);
}

static void on_timer_closed(uv_handle_t *h)
{
    struct mb_gpu_driver *d = h->data;
    void (*cb)(void *arg) = d->on_closed;
    void *arg = d->on_closed_arg;

    mb_free(d);
    cb(arg);
}

int mb_gpu_driver_ask(uv_loop_t *loop, uint64_t patience_ms, const struct mb_gpu_driver_ops *ops,
                      void *arg, struct mb_gpu_driver **out, struct mb_err *err)
{
    static const struct mb_errand_plan plan = {detect, answered, drop};
    struct mb_gpu_driver *d = mb_calloc(1, sizeof(*d));
    struct detection *load = mb_calloc(1, sizeof(*load));

    *out = NULL;
    if (d != NULL && load != NULL) {
        load->lists = mb_gpu_lists_read();
        d->errand = mb_errand_start(loop, &plan, d, load);
        load = NULL;
    }
    if (d == NULL || d->errand == NULL) {
        mb_free(load);
        mb_free(d);
        return mb_err_set(err, MB_ENOMEM, "no memory, or no thread, to count the GPUs");
    }
    d->ops = ops;
    d->arg = arg;
    uv_timer_init(loop, &d->timer);
    d->timer.data = d;
    uv_timer_start(&d->timer, on_timer, patience_ms, 0);
    *out = d;
    return MB_OK;
}

void mb_gpu_driver_close(struct mb_gpu_driver *d, void (*cb)(void *arg), void *arg)
{
    if (d == NULL) {
        cb(arg);
        return;
    }
    d->on_closed = cb;
    d->on_closed_arg = arg;
    mb_errand_leave(d->errand);
    uv_close((uv_handle_t *)&d->timer, on_timer_closed);
}
