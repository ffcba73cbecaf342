/*
 * One seed: a cluster of 3 to 5 machines, 2 to 5 jobs, at least 2 faults; then the faults end. If
 * they left fewer than 2 gangs, others are submitted. Everything has to come to rest, and nothing
 * may be left.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "tests/sim/sim.h"

enum { GIVE_UP_MS = 600000 };

/* ---- clocks ---- */

/* Supervisors' own timers, and the front process that starts an agent again. */
static void clocks(struct world *w, int a, int b)
{
    for (int job = 0; job < w->n_jobs; job++)
        runner_tick(w, job);
    for (int m = 0; m < w->n_machines; m++) {
        for (int run = 0; run < MAX_RUNS; run++)
            if (w->machines[m].disk.sups[run].running)
                ranks_tick(w, m, run);
    }
    sim_at(w, -1, 50, clocks, a, b);
}

static void restarter(struct world *w, int machine, int unused)
{
    sim_at(w, -1, 40 + (uint64_t)sim_below(w, 60), restarter, machine, unused);
    if (!w->procs[sim_agent_proc(machine)].up && w->now_ms >= w->machines[machine].down_until_ms)
        agent_start(w, machine);
}

/* ---- the cluster ---- */

/*
 * In half of the seeds a job waits for those before it. In the others all drivers run at once:
 * only there enough of them meet each other to make the rarest accidents happen.
 */
static int jobs_stand_in_line(const struct world *w)
{
    return w->seed % 2 != 0;
}

static void make_job(struct world *w, int job)
{
    struct job_script *s = &w->scripts[job];

    s->n_nodes = 1 + sim_below(w, MAX_BUNDLES);
    s->per_node = 1 + sim_below(w, MAX_PER_NODE);
    s->min_nodes = sim_below(w, 3) ? 1 + sim_below(w, s->n_nodes) : s->n_nodes;
    s->global_batch = s->n_nodes * s->per_node * (1 + sim_below(w, 2));
    s->n_saves = sim_below(w, MAX_SAVES + 1);
    s->step_ms = sim_below(w, 6) ? 100 + sim_below(w, 1500) : 9000;
    s->max_restarts = sim_below(w, MAX_ATTEMPTS);
    s->fail_rank = sim_below(w, 4) == 0 ? sim_below(w, s->n_nodes * s->per_node) : -1;
    s->fail_at_ms = 10 + sim_below(w, 3000);
    s->deaf = sim_below(w, 4) == 0;
    s->submit_at_ms = (uint64_t)sim_below(w, 8000);
    s->stop_at_ms =
        sim_below(w, 5) == 0 ? 1 + (uint64_t)sim_below(w, sim_below(w, 2) ? 6000 : 60) : 0;
    s->log_every_ms = 100 + sim_below(w, 900);
    s->cpus = sim_below(w, 20) ? sim_below(w, w->head_cpus + 1) : w->head_cpus + 1;
    s->start_timeout_ms = sim_below(w, 10) ? 0 : 1 + sim_below(w, 20000);
    if (!jobs_stand_in_line(w)) {
        s->cpus = 0;
        s->start_timeout_ms = 0;
    }
    s->harmed =
        s->cpus > w->head_cpus || s->start_timeout_ms > 0 || s->fail_rank >= 0 || s->stop_at_ms > 0;
}

static void make_world(struct world *w)
{
    for (int i = 0; i < MAX_MSGS; i++)
        w->free_msgs[w->n_free_msgs++] = MAX_MSGS - 1 - i;
    w->n_machines = 3 + sim_below(w, MAX_MACHINES - 2);
    w->n_jobs = 2 + sim_below(w, DRAWN_JOBS - 1);
    w->head_cpus = 2 + sim_below(w, 3);
    w->max_running = 1 + sim_below(w, w->n_jobs);
    if (!jobs_stand_in_line(w))
        w->max_running = MAX_JOBS;
    for (int p = 0; p < N_PROCS; p++)
        w->procs[p].machine = p < PROC_DRIVER ? p : p < PROC_CLIENT ? 0 : MACHINE_OUTSIDE;
    for (int m = 0; m < w->n_machines; m++) {
        w->machines[m].n_gpus = 2 + sim_below(w, 3);
        w->machines[m].disk.node_id = -1;
    }
    for (int job = 0; job < MAX_JOBS; job++) {
        w->bucket.jobs[job].latest = -1;
        if (job < w->n_jobs)
            make_job(w, job);
    }
    for (int m = 0; m < w->n_machines; m++) {
        agent_start(w, m);
        sim_at(w, -1, 50, restarter, m, 0);
    }
    w->current = -1;
    client_start(w);
    clocks(w, 0, 0);
    faults_plan(w);
}

static void close_world(struct world *w)
{
    for (int m = 0; m < w->n_machines; m++) {
        if (w->procs[sim_agent_proc(m)].up)
            sim_kill_proc(w, sim_agent_proc(m));
        mb_free(w->machines[m].disk.ledger);
        mb_free(w->machines[m].disk.beside);
        for (int run = 0; run < MAX_RUNS; run++)
            if (w->machines[m].disk.journals[run] > 0)
                close(w->machines[m].disk.journals[run] - 1);
    }
    for (int job = 0; job < MAX_JOBS; job++) {
        mb_drv_destroy(w->drivers[job].state);
        mb_free(w->bucket.jobs[job].writers);
        for (int i = 0; i <= MAX_SAVES; i++) {
            mb_free(w->bucket.jobs[job].manifest[i]);
            for (int k = 0; k < (MAX_BUNDLES + 1) * MAX_BUNDLES; k++)
                mb_free(w->bucket.jobs[job].parts[i][k / MAX_BUNDLES][k % MAX_BUNDLES]);
        }
    }
}

static int is_settled(const struct world *w)
{
    if (w->now_ms < w->calm_ms)
        return 0;
    for (int i = 0; i < w->n_jobs; i++)
        if (!w->client.jobs[i].closed || w->client.jobs[i].seen < 0 ||
            !mb_job_is_terminal((enum mb_job_state)w->client.jobs[i].seen) || w->drivers[i].alive)
            return 0;
    for (int m = 0; m < w->n_machines; m++) {
        const struct agent *a = &w->machines[m].agent;
        if (!a->up || a->registered != 1 || mb_ledger_count(a->ledger) > 0 ||
            !w->head.nodes[a->node_id].alive) /* it has not heard yet that it is dead */
            return 0;
        for (int run = 0; run < MAX_RUNS; run++)
            if (w->machines[m].disk.sups[run].running)
                return 0;
    }
    for (size_t i = 0; i < mb_placement_count(w->head.placement); i++)
        if (mb_placement_at(w->head.placement, i, NULL)->state != MB_PG_REMOVED)
            return 0;
    return 1;
}

static void launch_enough(struct world *w)
{
    int n = __builtin_popcount(w->has_launched);

    for (; n < MIN_GANGS; n++) {
        int job = w->n_jobs++;
        struct job_script *s = &w->scripts[job];

        make_job(w, job);
        s->cpus = s->start_timeout_ms = s->harmed = 0;
        s->fail_rank = -1;
        s->stop_at_ms = s->submit_at_ms = 0;
        client_submits(w, job);
    }
}

static void run_until(struct world *w, uint64_t until_ms, int stop_when_settled)
{
    uint64_t look_ms = w->now_ms;

    while (w->heap[0].at_ms <= until_ms && sim_step(w)) {
        check_always(w);
        if (w->now_ms < look_ms)
            continue;
        look_ms = w->now_ms + 500;
        if (stop_when_settled && is_settled(w))
            return;
    }
}

int sim_life(struct life *l)
{
    static struct world world; /* 2 MiB */
    struct world *w = &world;
    volatile int rc = 0;

    memset(w, 0, sizeof(*w));
    w->seed = w->rng = l->seed;
    w->plant = l->plant;
    w->trace = l->trace;
    w->current = -1;
    if (setjmp(w->failed) == 0) {
        make_world(w);
        w->faults_on = 1;
        run_until(w, FAULTS_END_MS, 0);
        sim_trace(w, "the faults are over");
        w->faults_on = 0;
        launch_enough(w);
        run_until(w, GIVE_UP_MS, 1);
        run_until(w, w->now_ms + 6000, 0);
        check_end(w);
    } else {
        rc = -1;
    }
    w->stats.gangs = (uint64_t)__builtin_popcount(w->has_launched);
    l->stats = w->stats;
    l->is_out_of_room = w->is_out_of_room;
    memcpy(l->why, w->why, sizeof(l->why));
    close_world(w);
    return rc;
}
