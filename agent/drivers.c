/*
 *  1. Once a second while there are drivers here, else every 5 s, the head is told what there is,
 * and asked which drivers it looks for here; a new one is adopted from its supervisor, as after a
 * restart of the agent.
 *  2. What the runner says of it then is queued and sent, until the head has confirmed it.
 *  3. A driver that is not here is said so, with the number of the start that the head named; one
 * that shall end, also because the head has given it up, is stopped. Failure paths:
 *  4. No head answers: the next turn tries again; events stay queued (EVENTS_MAX: beyond it the
 *     oldest RUNNING ones are of no interest any more and the newest event is dropped and said).
 *  5. The head is Ray's, or older: it does not know the call; it is asked once a minute.
 */
#include "agent/drivers.h"

#include <string.h>
#include "base/alloc.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/client.h"

enum {
    REPORT_MS = 1000,
    IDLE_MS = 5000,
    FOREIGN_MS = 60000,
    CALL_MS = 3000,
    EVENTS_MAX = 1024,
    KNOWN_MAX = 1024
};

struct mb_drivers {
    const struct mb_job_runner *runner;
    struct mb_node *node;
    uv_timer_t timer;
    struct mb_gcs_op *op;
    struct mb_job_event events[EVENTS_MAX]; /* strings owned */
    size_t n_events, n_sent;
    struct mb_gcs_driver unknown[KNOWN_MAX]; /* ids owned, as are those of known */
    size_t n_unknown, n_unknown_sent;
    struct mb_gcs_driver known[KNOWN_MAX]; /* drivers that are here */
    size_t n_known;
    struct mb_jobs *jobs;
    int takes_drivers;
    struct mb_job_amount totals[MB_JOB_QUEUE_KINDS_MAX];
    size_t n_totals;
    uint64_t period_ms; /* until the next turn; by what the last one found */
    int stopped;
};

static void on_timer(uv_timer_t *timer);

static void free_event(struct mb_job_event *e)
{
    mb_free((void *)(uintptr_t)e->submission_id);
    mb_free((void *)(uintptr_t)e->text);
    mb_free((void *)(uintptr_t)e->log_tail);
}

static int is_in(const struct mb_gcs_driver *list, size_t n, const char *id)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(list[i].submission_id, id) == 0)
            return 1;
    return 0;
}

/* 0: there is no room. */
static int know(struct mb_drivers *d, const char *id, uint64_t start_no)
{
    char *copy;

    if (is_in(d->known, d->n_known, id))
        return 1;
    if (d->n_known == KNOWN_MAX || !(copy = mb_strdup(id)))
        return 0;
    d->known[d->n_known++] = (struct mb_gcs_driver){copy, start_no};
    return 1;
}

static void forget(struct mb_drivers *d, const char *id)
{
    for (size_t i = 0; i < d->n_known; i++) {
        if (strcmp(d->known[i].submission_id, id) != 0)
            continue;
        mb_free(d->known[i].submission_id);
        d->known[i] = d->known[--d->n_known];
        return;
    }
}

/* Nothing follows about this driver. */
static int is_last(const struct mb_job_event *e)
{
    return e->kind == MB_JOB_EVENT_EXITED || e->kind == MB_JOB_EVENT_START_FAILED;
}

static void on_event(void *arg, const struct mb_job_event *e)
{
    struct mb_drivers *d = arg;
    struct mb_job_event copy = *e;

    if (e->kind == MB_JOB_EVENT_RUNNING)
        know(d, e->submission_id, e->start_no);
    else if (is_last(e))
        forget(d, e->submission_id);
    copy.submission_id = mb_strdup(e->submission_id);
    copy.text = mb_strdup(e->text ? e->text : "");
    copy.log_tail = mb_strdup(e->log_tail ? e->log_tail : "");
    if (d->n_events == EVENTS_MAX || !copy.submission_id || !copy.text || !copy.log_tail) {
        mb_error("agent", "job=%s an event is not reported to the head", e->submission_id);
        free_event(&copy);
        return;
    }
    d->events[d->n_events++] = copy;
    if (!d->op)
        uv_timer_start(&d->timer, on_timer, 0, 0);
}

/* Its last event waits to be sent: what the head looks for it will hear of. */
static int is_told(const struct mb_drivers *d, const char *id)
{
    for (size_t i = 0; i < d->n_events; i++)
        if (is_last(&d->events[i]) && strcmp(d->events[i].submission_id, id) == 0)
            return 1;
    return 0;
}

static void look_for(struct mb_drivers *d, const char *id, uint64_t start_no)
{
    char *copy;

    if (is_in(d->known, d->n_known, id) || is_in(d->unknown, d->n_unknown, id) || is_told(d, id))
        return;
    if (d->runner->adopt(d->runner->self, id) == MB_JOB_ADOPT_UNKNOWN) {
        if (d->n_unknown < KNOWN_MAX && (copy = mb_strdup(id))) /* else at the next turn */
            d->unknown[d->n_unknown++] = (struct mb_gcs_driver){copy, start_no};
        return;
    }
    if (know(d, id, mb_jobs_start_no(d->jobs, id)))
        mb_info("agent", "job=%s its driver is reported to the head, which runs elsewhere", id);
}

/* What the head has confirmed. */
static void forget_sent(struct mb_drivers *d)
{
    for (size_t i = 0; i < d->n_sent; i++)
        free_event(&d->events[i]);
    d->n_events -= d->n_sent;
    memmove(d->events, d->events + d->n_sent, d->n_events * sizeof d->events[0]);
    for (size_t i = 0; i < d->n_unknown_sent; i++)
        mb_free(d->unknown[i].submission_id);
    d->n_unknown -= d->n_unknown_sent;
    memmove(d->unknown, d->unknown + d->n_unknown_sent, d->n_unknown * sizeof d->unknown[0]);
}

static void free_drivers(struct mb_drivers *d)
{
    d->n_sent = d->n_events;
    d->n_unknown_sent = d->n_unknown;
    forget_sent(d);
    for (size_t i = 0; i < d->n_known; i++)
        mb_free(d->known[i].submission_id);
    mb_free(d);
}

static void on_closed(uv_handle_t *handle)
{
    struct mb_drivers *d = handle->data;

    d->stopped = 2;
    if (!d->op)
        free_drivers(d);
}

static void on_reported(void *arg, const struct mb_err *err, char *const *wanted,
                        const uint64_t *wanted_no, size_t n_wanted, char *const *stop,
                        size_t n_stop)
{
    struct mb_drivers *d = arg;

    d->op = NULL;
    if (d->stopped) {
        if (d->stopped == 2)
            free_drivers(d);
        return;
    }
    if (err->code != 0) {
        d->period_ms = err->code == MB_EUNSUPPORTED ? FOREIGN_MS : REPORT_MS;
        return;
    }
    forget_sent(d);
    for (size_t i = 0; i < n_wanted; i++)
        look_for(d, wanted[i], wanted_no ? wanted_no[i] : 0);
    for (size_t i = 0; i < n_stop; i++) {
        struct mb_err e = {0};
        int rc = d->runner->stop(d->runner->self, stop[i], &e);
        if (rc != 0 && rc != MB_ENOENT)
            mb_warn("agent", "job=%s %s", stop[i], e.text);
    }
    d->period_ms = d->n_known > 0 ? REPORT_MS : IDLE_MS;
    if (d->n_events > 0 || d->n_unknown > 0)
        uv_timer_start(&d->timer, on_timer, 0, 0);
}

static void on_timer(uv_timer_t *timer)
{
    struct mb_drivers *d = timer->data;
    struct mb_gcs *gcs = mb_node_gcs(d->node);
    struct mb_err err = {0};
    struct mb_gcs_drivers report = {.events = d->events,
                                    .n_events = d->n_events,
                                    .unknown = d->unknown,
                                    .n_unknown = d->n_unknown,
                                    .running = d->known,
                                    .n_running = d->n_known,
                                    .takes_drivers = d->takes_drivers,
                                    .totals = d->totals,
                                    .n_totals = d->n_totals,
                                    .http_address = d->runner->http_address(d->runner->self)};

    uv_timer_start(&d->timer, on_timer, d->period_ms, 0);
    if (d->op || !mb_node_is_alive(d->node) || gcs == NULL || !mb_gcs_connected(gcs))
        return;
    report.node_id = mb_node_id(d->node);
    d->n_sent = d->n_events;
    d->n_unknown_sent = d->n_unknown;
    if (mb_gcs_report_drivers(gcs, &report, CALL_MS, on_reported, d, &d->op, &err) != 0)
        mb_warn("agent", "drivers are not reported: %s", err.text);
}

int mb_drivers_start(uv_loop_t *loop, const struct mb_drivers_opts *opts, struct mb_drivers **out,
                     struct mb_err *err)
{
    struct mb_drivers *d = mb_calloc(1, sizeof *d);

    if (!d)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    d->runner = mb_jobs_runner(opts->jobs);
    d->jobs = opts->jobs;
    d->node = opts->node;
    d->takes_drivers = opts->takes_drivers;
    d->period_ms = REPORT_MS;
    for (size_t i = 0; i < opts->n_totals && i < MB_JOB_QUEUE_KINDS_MAX; i++)
        d->totals[d->n_totals++] = opts->totals[i];
    uv_timer_init(loop, &d->timer);
    d->timer.data = d;
    d->runner->set_listener(d->runner->self, on_event, d);
    uv_timer_start(&d->timer, on_timer, 0, 0);
    *out = d;
    return 0;
}

void mb_drivers_tell(struct mb_drivers *d)
{
    if (d && !d->stopped && !d->op)
        uv_timer_start(&d->timer, on_timer, 0, 0);
}

void mb_drivers_stop(struct mb_drivers *d)
{
    if (!d)
        return;
    d->stopped = 1;
    d->runner->set_listener(d->runner->self, NULL, NULL);
    if (d->op)
        mb_gcs_op_cancel(d->op);
    uv_close((uv_handle_t *)&d->timer, on_closed);
}
