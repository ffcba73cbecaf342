/*
 * One seed: a cluster of 3 to 5 machines, 2 to 5 gangs, at least 2 faults; then the faults end,
 * everything has to come to rest, and nothing may be left.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "tests/sim/sim.h"

enum { FAULTS_END_MS = 20000, GIVE_UP_MS = 600000, LONG_MS = 4000 };

/* ---- what is done to the cluster ---- */

static void harm_all(struct world *w)
{
    for (int i = 0; i < w->n_jobs; i++)
        if (!w->drivers[i].exited)
            w->scripts[i].harmed = 1;
}

static void agent_down(struct world *w, int machine, int for_ms)
{
    if (!w->procs[sim_agent_proc(machine)].up)
        return;
    sim_trace(w, "FAULT: the agent of machine %d is killed, for %d ms", machine, for_ms);
    w->stats.crashes++;
    w->machines[machine].down_until_ms = w->now_ms + (uint64_t)for_ms;
    sim_kill_proc(w, sim_agent_proc(machine));
    if (for_ms > LONG_MS)
        harm_all(w);
}

static void power_loss(struct world *w, int machine, int for_ms)
{
    sim_trace(w, "FAULT: machine %d loses its power", machine);
    agent_down(w, machine, for_ms);
    w->machines[machine].down_until_ms = w->now_ms + (uint64_t)for_ms;
    ranks_kill_all(w, machine);
    harm_all(w);
}

static void cut(struct world *w, int a, int b, int for_ms)
{
    uint64_t until = w->now_ms + (uint64_t)for_ms;

    if (w->cut_until_ms[a][b] < until)
        w->cut_until_ms[a][b] = w->cut_until_ms[b][a] = until;
    if (w->calm_ms < until)
        w->calm_ms = until;
    if (for_ms > LONG_MS)
        harm_all(w);
}

static void partition(struct world *w, int machine, int for_ms)
{
    sim_trace(w, "FAULT: machine %d is cut off for %d ms", machine, for_ms);
    int from_store = sim_below(w, 2);
    for (int m = 0; m < w->n_machines; m++)
        if (m != machine)
            cut(w, machine, m, for_ms);
    if (machine == 0 || from_store)
        cut(w, machine, MACHINE_OUTSIDE, for_ms);
}

/* Its process lives and its ranks run; only calls between it and the head wait. Nobody is harmed:
 * a second channel says so, for longer than this lasts (life_dead). */
static void deafen(struct world *w, int machine, int for_ms)
{
    sim_trace(w, "FAULT: the gRPC of machine %d is held up for %d ms", machine, for_ms);
    w->deaf_until_ms[machine] = w->now_ms + (uint64_t)for_ms;
    if (w->calm_ms < w->deaf_until_ms[machine])
        w->calm_ms = w->deaf_until_ms[machine];
}

/* Nobody is harmed by a gRPC that is held up, since the second channel says so in time; unless two
 * of its answers in a row were late, which is a verdict as it should be. */
void life_dead(struct world *w, const struct head_node *n)
{
    int m = n->machine;

    sim_check(w,
              w->unanswered[m] >= MB_HEALTH_SECOND_FAILURES ||
                  w->now_ms >= n->health.heard_ms + MB_HEALTH_DOUBT_MAX_MS,
              "machine %d answers on its second channel, and its node is declared dead", m);
    if (w->now_ms < w->deaf_until_ms[m] + TICK_MS)
        harm_all(w);
}

static void head_down(struct world *w, int for_ms, int unused)
{
    (void)unused;
    agent_down(w, 0, for_ms);
}

/* Every seventh life has heads that die before they have stored who joined; not from the dice of
 * the other faults. */
void life_joined(struct world *w)
{
    if (!w->faults_on || w->seed % 7 != 0 || w->now_ms < 1000)
        return;
    w->stats.faults++;
    w->slow_disk_until_ms = w->now_ms + 500;
    sim_at(w, -1, 10 + (w->seed + w->now_ms) * 7919 % 400, head_down,
           30 + (int)(w->seed * 104729 % 1000), 0);
}

static void kill_rank(struct world *w)
{
    int at = sim_below(w, w->n_machines), first = sim_below(w, MAX_RUNS);

    for (int i = 0; i < MAX_RUNS; i++) {
        int run = (first + i) % MAX_RUNS;
        const struct supervisor *s = &w->machines[at].disk.sups[run];
        if (!s->running || !s->ranks[0].alive)
            continue;
        sim_trace(w, "FAULT: a rank of job %d is killed", run / MAX_ATTEMPTS);
        w->scripts[run / MAX_ATTEMPTS].harmed = 1;
        ranks_kill_one(w, at, run, sim_below(w, s->n_ranks));
        return;
    }
}

static void kill_driver(struct world *w, int job)
{
    if (!w->drivers[job].alive)
        return;
    sim_trace(w, "FAULT: the driver of job %d is killed", job);
    w->scripts[job].harmed = 1;
    sim_kill_proc(w, sim_driver_proc(job));
    runner_exited(w, job, -9);
}

/* Whenever there was a restart, somebody of the time before comes back, again and again. */
static void ghosts(struct world *w, int n, int unused)
{
    for (int job = 0; job < w->n_jobs; job++)
        if (w->drivers[job].alive && w->drivers[job].attempt > 1)
            driver_ghost(w, job, sim_below(w, w->n_machines));
    if (n < 40)
        sim_at(w, -1, 100 + (uint64_t)sim_below(w, 400), ghosts, n + 1, unused);
}

static void fault(struct world *w, int a, int b)
{
    int machine = sim_below(w, w->n_machines);

    (void)a;
    (void)b;
    w->stats.faults++;
    switch (sim_below(w, 15)) {
    case 0:
    case 1:
        agent_down(w, machine, 30 + sim_below(w, sim_below(w, 4) ? 1500 : 9000));
        break;
    case 2:
        agent_down(w, 0, 30 + sim_below(w, 2500));
        break;
    case 3:
    case 4:
        partition(w, machine, 100 + sim_below(w, sim_below(w, 2) ? 3000 : 30000));
        break;
    case 5:
        sim_trace(w, "FAULT: the head's disk is slow");
        w->slow_disk_until_ms = w->now_ms + 500 + (uint64_t)sim_below(w, 5000);
        break;
    case 6:
        sim_trace(w, "FAULT: the object store is down");
        w->bucket.down_until_ms = w->now_ms + 500 + (uint64_t)sim_below(w, 2500);
        break;
    case 7:
        kill_rank(w);
        break;
    case 8:
        kill_driver(w, sim_below(w, w->n_jobs));
        break;
    case 9:
        cut(w, machine, sim_below(w, w->n_machines), 100 + sim_below(w, 9000));
        break;
    case 10:
    case 11:
        ghosts(w, 0, 0);
        break;
    default:
        if (machine > 0)
            power_loss(w, machine, 300 + sim_below(w, sim_below(w, 2) ? 25000 : 90000));
        break;
    }
}

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
    s->harmed = s->fail_rank >= 0 || s->stop_at_ms > 0;
}

static void make_world(struct world *w)
{
    for (int i = 0; i < MAX_MSGS; i++)
        w->free_msgs[w->n_free_msgs++] = MAX_MSGS - 1 - i;
    w->n_machines = 3 + sim_below(w, MAX_MACHINES - 2);
    w->n_jobs = 2 + sim_below(w, MAX_JOBS - 1);
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
    /* Besides the other faults, and not from their dice: those stay as many as they were. */
    if (w->seed % 3 == 0)
        sim_at(w, -1, 1000 + w->seed * 7919 % 15000, deafen,
               1 + (int)(w->seed / 3 % (uint64_t)(w->n_machines - 1)),
               500 + (int)(w->seed * 104729 % 30000));
    for (int n = 2 + sim_below(w, 5); n > 0; n--)
        sim_at(w, -1, 300 + (uint64_t)sim_below(w, FAULTS_END_MS - 1000), fault, 0, 0);
}

static void close_world(struct world *w)
{
    for (int m = 0; m < w->n_machines; m++) {
        if (w->procs[sim_agent_proc(m)].up)
            sim_kill_proc(w, sim_agent_proc(m));
        mb_free(w->machines[m].disk.ledger);
        for (int run = 0; run < MAX_RUNS; run++)
            if (w->machines[m].disk.journals[run] > 0)
                close(w->machines[m].disk.journals[run] - 1);
    }
    for (int job = 0; job < MAX_JOBS; job++) {
        mb_drv_destroy(w->drivers[job].state);
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
        run_until(w, GIVE_UP_MS, 1);
        run_until(w, w->now_ms + 6000, 0);
        check_end(w);
    } else {
        rc = -1;
    }
    l->stats = w->stats;
    memcpy(l->why, w->why, sizeof(l->why));
    close_world(w);
    return rc;
}
