/*
 * Jobs in line: the shell of gcs/job_queue, in the order of gcs/job_admission.c and job_load.c.
 *
 *  1. A submitted job has its place at once, and its turn when its record is on the disk.
 *  2. After every commit, every end of a driver and every tick, whoever may start does.
 *  3. A head that begins counts the drivers that run; jobs that had not begun stand in line again
 *     in the order in which they were submitted.
 */
#include <stdio.h>
#include "tests/sim/head_internal.h"

void line_create(struct world *w)
{
    struct mb_job_amount cpus = {.name = MB_JOB_CPU, .amount = w->head_cpus};
    struct mb_job_queue_opts opts = {.max_running = (size_t)w->max_running,
                                     .max_waiting = MAX_JOBS,
                                     .totals = &cpus,
                                     .n_totals = 1};
    struct mb_err err;

    if (mb_job_queue_create(&opts, &w->head.queue, &err) != MB_OK)
        sim_fail(w, "%s", err.text);
}

static int is_later(const struct world *w, int a, int b)
{
    return w->store.mem[T_JOB][a].value > w->store.mem[T_JOB][b].value;
}

void line_order(struct world *w, int order[MAX_JOBS])
{
    for (int i = 0; i < w->n_jobs; i++) {
        int k = i;
        for (; k > 0 && is_later(w, order[k - 1], i) == (w->plant != PLANT_LINE_ANEW); k--)
            order[k] = order[k - 1];
        order[k] = i;
    }
}

static size_t needs_of(const struct world *w, int job, struct mb_job_amount *out)
{
    *out = (struct mb_job_amount){.name = MB_JOB_CPU, .amount = w->scripts[job].cpus};
    return w->scripts[job].cpus > 0;
}

void line_add(struct world *w, int job, int forced)
{
    struct mb_job_ticket *t = &w->head.jobs[job].ticket;
    struct mb_job_amount need;
    size_t n = needs_of(w, job, &need);
    struct mb_err err;

    if (mb_job_queue_add(w->head.queue, t, &need, n, (uint64_t)w->scripts[job].start_timeout_ms,
                         w->now_ms, forced, &err) != MB_OK)
        sim_fail(w, "job %d: %s", job, err.text);
    mb_job_queue_wish(t, &(struct mb_job_wish){.is_plain = n == 0});
    if (w->plant == PLANT_START_BEFORE_COMMIT)
        line_ready(w, job);
}

void line_ready(struct world *w, int job)
{
    if (w->head.jobs[job].ticket.place == MB_JOB_PLACE_COMING)
        mb_job_queue_ready(&w->head.jobs[job].ticket);
}

void line_adopt(struct world *w, int job)
{
    struct mb_job_amount need;
    size_t n = needs_of(w, job, &need);

    mb_job_queue_adopt(w->head.queue, &w->head.jobs[job].ticket, MB_JOB_HEAD_NODE, &need, n);
}

void line_leave(struct world *w, int job)
{
    mb_job_queue_leave(&w->head.jobs[job].ticket);
}

static int job_of(const struct world *w, const struct mb_job_ticket *t)
{
    int job = 0;

    while (&w->head.jobs[job].ticket != t)
        job++;
    return job;
}

void line_pump(struct world *w)
{
    enum mb_job_queue_action action;
    struct mb_job_ticket *t;

    if (!w->head.queue)
        return;
    while ((action = mb_job_queue_next(w->head.queue, w->now_ms, &t)) != MB_JOB_QUEUE_NOTHING) {
        int job = job_of(w, t);

        if (action == MB_JOB_QUEUE_NEVER_FITS) {
            head_apply(w, job, MB_JOB_NEVER_FITS);
        } else if (action == MB_JOB_QUEUE_TIMED_OUT) {
            head_apply(w, job, MB_JOB_START_TIMEOUT);
        } else {
            check_turn(w, job);
            if (runner_start(w, job) != MB_OK)
                head_apply(w, job, MB_JOB_START_FAILED);
        }
    }
    const char *broken = mb_job_queue_invariant(w->head.queue);
    sim_check(w, !broken, "the line: %s", broken);
}
