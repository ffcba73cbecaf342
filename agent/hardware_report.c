/*
 *  1. A tick: a thread reads; back on the loop the text goes to the head.
 *  2. The head says that nobody reads it (ours does of a node without GPUs): no more until the next
 *     registration.
 *  3. No answer, another failure: the next tick tries again; it is a page of statistics.
 *  4. A disk that hangs is asked once. Stopping leaves a thread that reads behind, with its memory.
 */
#include "agent/hardware_report.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "agent/hardware.h"
#include "base/alloc.h"
#include "base/errand.h"
#include "base/log.h"
#include "gcs/client.h"

enum { EVERY_MS = 5000, CALL_MS = 4000 };

/* The thread's until it has returned. */
struct reading {
    char *dir;
    struct mb_hardware hardware;
};

struct mb_hardware_report {
    struct mb_hardware_report_opts opts;
    uv_timer_t timer;
    struct mb_errand *errand; /* NULL: nobody reads */
    int has_last;
    struct mb_hardware last;
    struct mb_gcs_op *op;
    char hostname[256];
    int closing; /* parts that are not closed yet */
    void (*close_cb)(void *arg);
    void *close_arg;
};

static void part_closed(struct mb_hardware_report *r)
{
    void (*cb)(void *arg) = r->close_cb;
    void *arg = r->close_arg;

    if (--r->closing > 0)
        return;
    mb_free(r);
    cb(arg);
}

static void on_timer_closed(uv_handle_t *h)
{
    part_closed(h->data);
}

static void on_published(void *arg, const struct mb_err *err)
{
    struct mb_hardware_report *r = arg;

    r->op = NULL;
    if (r->closing > 0) {
        part_closed(r);
        return;
    }
    if (err->code == MB_EUNSUPPORTED && r->opts.figures == NULL) /* GPUs: the first page has none */
        uv_timer_stop(&r->timer);
    else if (err->code != MB_OK)
        mb_debug("hardware", "not told: %s", err->text);
}

/* now: its GPUs are added here. */
static void publish(struct mb_hardware_report *r, struct mb_hardware *now)
{
    const struct mb_gpu_usage *gpus;

    now->n_gpus = mb_gpu_figures_latest(r->opts.figures, &gpus);
    if (now->n_gpus > 0)
        memcpy(now->gpus, gpus, now->n_gpus * sizeof(*gpus));

    json_t *o =
        mb_hardware_json(now, r->has_last ? &r->last : NULL, r->hostname, r->opts.ip, r->opts.dir);
    char *text = o != NULL ? json_dumps(o, JSON_COMPACT) : NULL;
    struct mb_err err = {0};

    json_decref(o);
    r->last = *now;
    r->has_last = 1;
    if (text != NULL && mb_node_is_alive(r->opts.node) && r->op == NULL &&
        mb_gcs_publish_usage(mb_node_gcs(r->opts.node), mb_node_id(r->opts.node), text, CALL_MS,
                             on_published, r, &r->op, &err) != MB_OK)
        mb_debug("hardware", "not told: %s", err.text);
    free(text); /* libc's memory */
}

static void read_hardware(void *load)
{
    struct reading *reading = load;

    mb_hardware_read("/proc", reading->dir, &reading->hardware);
}

static void after_read(void *owner, void *load)
{
    struct mb_hardware_report *r = owner;
    struct reading *reading = load;

    r->errand = NULL;
    publish(r, &reading->hardware);
}

static void drop_reading(void *load)
{
    struct reading *reading = load;

    mb_free(reading->dir);
    mb_free(reading);
}

static void on_timer(uv_timer_t *t)
{
    static const struct mb_errand_plan plan = {read_hardware, after_read, drop_reading};
    struct mb_hardware_report *r = t->data;
    struct reading *reading;

    if (!mb_node_is_alive(r->opts.node) || r->errand != NULL)
        return;
    reading = mb_calloc(1, sizeof(*reading));
    if (reading == NULL)
        return;
    reading->dir = mb_strdup(r->opts.dir);
    if (reading->dir != NULL)
        r->errand = mb_errand_start(t->loop, &plan, r, reading);
    else
        drop_reading(reading);
}

int mb_hardware_report_start(uv_loop_t *loop, const struct mb_hardware_report_opts *opts,
                             struct mb_hardware_report **out, struct mb_err *err)
{
    struct mb_hardware_report *r = mb_calloc(1, sizeof(*r));

    *out = r;
    if (r == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory for statistics of the hardware");
    r->opts = *opts;
    gethostname(r->hostname, sizeof(r->hostname) - 1);
    uv_timer_init(loop, &r->timer);
    r->timer.data = r;
    return MB_OK;
}

void mb_hardware_report_alive(struct mb_hardware_report *r)
{
    if (r != NULL && r->closing == 0)
        uv_timer_start(&r->timer, on_timer, 0, EVERY_MS);
}

void mb_hardware_report_stop(struct mb_hardware_report *r, void (*cb)(void *arg), void *arg)
{
    r->close_cb = cb;
    r->close_arg = arg;
    r->closing = 1 + (r->op != NULL);
    if (r->op != NULL)
        mb_gcs_op_cancel(r->op);
    mb_errand_leave(r->errand);
    uv_close((uv_handle_t *)&r->timer, on_timer_closed);
}
