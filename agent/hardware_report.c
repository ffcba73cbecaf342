/*
 *  1. A tick: a thread reads; back on the loop the text goes to the head.
 *  2. The head says that nobody reads it (ours does of a node without GPUs): no more until the next
 *     registration.
 *  3. No answer, another failure: the next tick tries again; it is a page of statistics.
 *  4. Stopping waits for the thread.
 */
#include "agent/hardware_report.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "agent/hardware.h"
#include "base/alloc.h"
#include "base/aside.h"
#include "base/log.h"
#include "gcs/client.h"

enum { EVERY_MS = 5000, CALL_MS = 4000 };

struct mb_hardware_report {
    struct mb_hardware_report_opts opts;
    uv_timer_t timer;
    struct mb_aside reading;
    int has_last;
    struct mb_hardware last, read;
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

static void on_reading_closed(void *arg)
{
    part_closed(arg);
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

static void publish(struct mb_hardware_report *r)
{
    const struct mb_gpu_usage *gpus;

    r->read.n_gpus = mb_gpu_figures_latest(r->opts.figures, &gpus);
    if (r->read.n_gpus > 0)
        memcpy(r->read.gpus, gpus, r->read.n_gpus * sizeof(*gpus));

    json_t *o = mb_hardware_json(&r->read, r->has_last ? &r->last : NULL, r->hostname, r->opts.ip,
                                 r->opts.dir);
    char *text = o != NULL ? json_dumps(o, JSON_COMPACT) : NULL;
    struct mb_err err = {0};

    json_decref(o);
    r->last = r->read;
    r->has_last = 1;
    if (text != NULL && mb_node_is_alive(r->opts.node) && r->op == NULL &&
        mb_gcs_publish_usage(mb_node_gcs(r->opts.node), mb_node_id(r->opts.node), text, CALL_MS,
                             on_published, r, &r->op, &err) != MB_OK)
        mb_debug("hardware", "not told: %s", err.text);
    free(text); /* libc's memory */
}

static void read_hardware(void *arg)
{
    struct mb_hardware_report *r = arg;

    mb_hardware_read("/proc", r->opts.dir, &r->read);
}

static void after_read(void *arg)
{
    publish(arg);
}

static void on_timer(uv_timer_t *t)
{
    struct mb_hardware_report *r = t->data;

    if (mb_node_is_alive(r->opts.node))
        mb_aside_run(&r->reading, read_hardware, after_read, r);
}

int mb_hardware_report_start(uv_loop_t *loop, const struct mb_hardware_report_opts *opts,
                             struct mb_hardware_report **out, struct mb_err *err)
{
    struct mb_hardware_report *r = mb_calloc(1, sizeof(*r));
    int rc;

    *out = r;
    if (r == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory for statistics of the hardware");
    r->opts = *opts;
    gethostname(r->hostname, sizeof(r->hostname) - 1);
    rc = mb_aside_init(&r->reading, loop);
    if (rc != 0) {
        mb_free(r);
        *out = NULL;
        return mb_err_set(err, MB_EIO, "statistics of the hardware: %s", uv_strerror(rc));
    }
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
    r->closing = 2 + (r->op != NULL);
    if (r->op != NULL)
        mb_gcs_op_cancel(r->op);
    uv_close((uv_handle_t *)&r->timer, on_timer_closed);
    mb_aside_close(&r->reading, on_reading_closed, r);
}
