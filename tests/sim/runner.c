/*
 * Drivers and their supervisors on the head's machine, in the order of agent/jobs.c. A supervisor
 * outlives its agent; what it knows of the end stays on the disk.
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include "tests/sim/sim.h"

static int agent_proc(void)
{
    return sim_agent_proc(0);
}

static void write_log(struct world *w, int job, int unused)
{
    const struct job_script *s = &w->scripts[job];

    w->drivers[job].log_bytes += 1 + (uint64_t)sim_below(w, 60);
    sim_at(w, sim_driver_proc(job), (uint64_t)s->log_every_ms, write_log, job, unused);
}

static void tell_started(struct world *w, int job, int unused)
{
    struct mb_job_event e = {.kind = MB_JOB_EVENT_RUNNING};

    (void)unused;
    if (!w->drivers[job].told)
        head_driver_event(w, job, &e);
}

static void tell_exited(struct world *w, int job, int unused)
{
    struct mb_job_event e = {.kind = MB_JOB_EVENT_EXITED, .exit_code = w->drivers[job].code};

    (void)unused;
    if (w->drivers[job].told)
        return;
    w->drivers[job].told = 1;
    sim_crash_point(w);
    head_driver_event(w, job, &e);
}

static void supervise(struct world *w, int job)
{
    struct driver *d = &w->drivers[job];

    sim_check(w, !d->alive, "job %d: a second driver was started beside the first", job);
    sim_check(w, d->starts == 0, "job %d: its driver was started a second time", job);
    d->spec = (struct mb_sup_spec){.stop_signal = SIGTERM,
                                   .stop_grace_ms = 20000,
                                   .end_peers_after_ms = -1,
                                   .leftover_grace_ms = 1000,
                                   .n_children = 1};
    mb_sup_plan_init(&d->plan, &d->spec);
    d->exists = d->alive = 1;
    d->starts++;
    d->log_bytes = 40; /* "Running entrypoint ..." */
    sim_trace(w, "job %d: its driver runs", job);
    sim_start_proc(w, sim_driver_proc(job));
    write_log(w, job, 0);
    driver_begin(w, job);
    sim_at(w, agent_proc(), 1 + (uint64_t)sim_below(w, 5), tell_started, job, 0);
}

static void prepared(struct world *w, int job, int unused)
{
    struct driver *d = &w->drivers[job];

    (void)unused;
    d->preparing = 0;
    if (d->stop_asked) { /* nothing was started */
        d->code = -SIGTERM;
        tell_exited(w, job, 0);
        return;
    }
    sim_crash_point(w);
    supervise(w, job);
    sim_crash_point(w);
}

int runner_start(struct world *w, int job)
{
    struct driver *d = &w->drivers[job];

    if (d->preparing || (d->exists && !d->exited))
        return MB_EEXIST;
    d->told = 0; /* perhaps by an agent that died before its head took it in */
    d->preparing = 1;
    sim_at(w, agent_proc(), 5 + (uint64_t)sim_below(w, 60), prepared, job, 0);
    return MB_OK;
}

int runner_stop(struct world *w, int job)
{
    struct driver *d = &w->drivers[job];

    if (d->preparing) {
        d->stop_asked = 1;
        return MB_OK;
    }
    if (!d->exists || d->told)
        return MB_ENOENT;
    if (!d->exited)
        mb_sup_plan_stop(&d->plan, "stopped", 0, d->spec.stop_grace_ms, w->now_ms);
    return MB_OK;
}

enum mb_job_adopt runner_adopt(struct world *w, int job)
{
    struct driver *d = &w->drivers[job];

    if (!d->exists)
        return MB_JOB_ADOPT_UNKNOWN;
    d->told = 0;
    sim_at(w, agent_proc(), 1 + (uint64_t)sim_below(w, 10), d->exited ? tell_exited : tell_started,
           job, 0);
    return d->exited ? MB_JOB_ADOPT_EXITED : MB_JOB_ADOPT_RUNNING;
}

void runner_exited(struct world *w, int job, int code)
{
    struct driver *d = &w->drivers[job];

    if (d->exited)
        return;
    d->exited = 1;
    d->code = code;
    d->log_bytes += 17; /* its last words */
    mb_sup_plan_nothing_left(&d->plan);
    sim_trace(w, "job %d: its driver ended with %d", job, code);
    if (w->procs[agent_proc()].up)
        sim_at(w, agent_proc(), 1 + (uint64_t)sim_below(w, 4), tell_exited, job, 0);
}

void runner_tick(struct world *w, int job)
{
    struct driver *d = &w->drivers[job];

    if (!d->exists || d->exited)
        return;
    switch (mb_sup_plan_tick(&d->plan, w->now_ms)) {
    case MB_SUP_ACT_SIGNAL:
        w->current = sim_driver_proc(job);
        driver_signal(w, job, d->plan.signal);
        w->current = -1;
        break;
    case MB_SUP_ACT_KILL:
        sim_kill_proc(w, sim_driver_proc(job));
        runner_exited(w, job, -SIGKILL);
        break;
    case MB_SUP_ACT_NONE:
        break;
    }
}

void runner_agent_crashed(struct world *w)
{
    for (int i = 0; i < w->n_jobs; i++)
        w->drivers[i].preparing = w->drivers[i].stop_asked = 0;
}
