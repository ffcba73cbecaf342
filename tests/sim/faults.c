/*
 * What is done to a cluster, and whether it did anything: a fault counts when it acted.
 *
 *  1. A kill acts at once, if its victim lives. One without a victim is replaced by another fault.
 *  2. A cut link, a node that is not heard, a slow disk and a store that is away act when the first
 *     message, commit or request meets them; one that nobody met is not counted.
 *  3. A life that has met fewer than two by ENOUGH_BY_MS has agents killed until it has.
 */
#include "tests/sim/sim.h"

enum { LONG_MS = 4000, ENOUGH = 2, ENOUGH_BY_MS = 12000, TRIES = 40 };

static void count(struct world *w)
{
    w->stats.faults++;
}

/* A number for one that is noticed later. */
static int arm(struct world *w)
{
    if (w->n_armed + 1 == MAX_ARMED)
        sim_out_of_room(w, MAX_ARMED, "faults");
    return ++w->n_armed;
}

void faults_acted(struct world *w, int number)
{
    if (number == 0 || w->armed_acted[number])
        return;
    w->armed_acted[number] = 1;
    count(w);
}

int faults_cut_off(struct world *w, int a, int b)
{
    if (!sim_is_cut(w, a, b))
        return 0;
    faults_acted(w, w->cut_number[a][b]);
    return 1;
}

static void harm_all(struct world *w)
{
    for (int i = 0; i < w->n_jobs; i++)
        if (!w->drivers[i].exited)
            w->scripts[i].harmed = 1;
}

static int take_down(struct world *w, int machine, int for_ms)
{
    if (!w->procs[sim_agent_proc(machine)].up)
        return 0;
    sim_trace(w, "FAULT: the agent of machine %d is killed, for %d ms", machine, for_ms);
    w->stats.crashes++;
    w->machines[machine].down_until_ms = w->now_ms + (uint64_t)for_ms;
    sim_kill_proc(w, sim_agent_proc(machine));
    if (for_ms > LONG_MS)
        harm_all(w);
    return 1;
}

static int kill_agent(struct world *w, int machine, int for_ms)
{
    if (!take_down(w, machine, for_ms))
        return 0;
    count(w);
    return 1;
}

static int has_ranks(const struct world *w, int machine)
{
    for (int run = 0; run < MAX_RUNS; run++)
        if (w->machines[machine].disk.sups[run].running)
            return 1;
    return 0;
}

static int power_loss(struct world *w, int machine, int for_ms)
{
    if (machine == 0 || (!w->procs[sim_agent_proc(machine)].up && !has_ranks(w, machine)))
        return 0;
    sim_trace(w, "FAULT: machine %d loses its power", machine);
    take_down(w, machine, for_ms);
    w->machines[machine].down_until_ms = w->now_ms + (uint64_t)for_ms;
    agent_power_lost(w, machine);
    ranks_kill_all(w, machine);
    harm_all(w);
    count(w);
    return 1;
}

static int cut(struct world *w, int a, int b, int for_ms, int number)
{
    uint64_t until = w->now_ms + (uint64_t)for_ms;

    if (a == b || w->cut_until_ms[a][b] >= until)
        return 0;
    w->cut_until_ms[a][b] = w->cut_until_ms[b][a] = until;
    w->cut_number[a][b] = w->cut_number[b][a] = number;
    if (w->calm_ms < until)
        w->calm_ms = until;
    if (for_ms > LONG_MS)
        harm_all(w);
    return 1;
}

static int partition(struct world *w, int machine, int for_ms)
{
    int from_store = sim_below(w, 2), did = 0, number = arm(w);

    sim_trace(w, "FAULT: machine %d is cut off for %d ms", machine, for_ms);
    for (int m = 0; m < w->n_machines; m++)
        did |= cut(w, machine, m, for_ms, number);
    if (machine == 0 || from_store)
        did |= cut(w, machine, MACHINE_OUTSIDE, for_ms, number);
    return did;
}

/* Its process lives and its ranks run; only calls between it and the head wait. Nobody is harmed:
 * a second channel says so, for longer than this lasts (life_dead). */
static void deafen(struct world *w, int machine, int for_ms)
{
    sim_trace(w, "FAULT: the gRPC of machine %d is held up for %d ms", machine, for_ms);
    w->deaf_until_ms[machine] = w->now_ms + (uint64_t)for_ms;
    w->deaf_number[machine] = arm(w);
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
    kill_agent(w, 0, for_ms);
}

static void slow_disk(struct world *w, int for_ms)
{
    w->slow_disk_until_ms = w->now_ms + (uint64_t)for_ms;
    w->slow_disk_number = arm(w);
}

/* Every seventh life has heads that die before they have stored who joined; not from the dice of
 * the other faults. */
void life_joined(struct world *w)
{
    if (!w->faults_on || w->seed % 7 != 0 || w->now_ms < 1000)
        return;
    slow_disk(w, 500);
    sim_at(w, -1, 10 + (w->seed + w->now_ms) * 7919 % 400, head_down,
           30 + (int)(w->seed * 104729 % 1000), 0);
}

static int kill_rank(struct world *w)
{
    int at = sim_below(w, w->n_machines), first = sim_below(w, MAX_RUNS);

    for (int i = 0; i < MAX_RUNS; i++) {
        int run = (first + i) % MAX_RUNS;
        const struct supervisor *s = &w->machines[at].disk.sups[run];
        int r = s->n_ranks > 0 ? sim_below(w, s->n_ranks) : 0;
        if (!s->running || !s->ranks[r].alive)
            continue;
        sim_trace(w, "FAULT: a rank of job %d is killed", run / MAX_ATTEMPTS);
        w->scripts[run / MAX_ATTEMPTS].harmed = 1;
        ranks_kill_one(w, at, run, r);
        count(w);
        return 1;
    }
    return 0;
}

static int kill_driver(struct world *w, int job)
{
    if (!w->drivers[job].alive)
        return 0;
    sim_trace(w, "FAULT: the driver of job %d is killed", job);
    w->scripts[job].harmed = 1;
    sim_kill_proc(w, sim_driver_proc(job));
    runner_exited(w, job, -9);
    count(w);
    return 1;
}

/* Whenever there was a restart, somebody of the time before comes back, again and again. */
static void ghosts(struct world *w, int n, int number)
{
    for (int job = 0; job < w->n_jobs; job++)
        if (w->drivers[job].alive && w->drivers[job].attempt > 1 &&
            driver_ghost(w, job, sim_below(w, w->n_machines)))
            faults_acted(w, number);
    if (n < 40)
        sim_at(w, -1, 100 + (uint64_t)sim_below(w, 400), ghosts, n + 1, number);
}

static int agent_down_ms(struct world *w)
{
    switch (sim_below(w, 8)) {
    case 0:
        return 30 + sim_below(w, 9000);
    case 1: /* its ranks go on for longer than their driver waits */
        return LEASE_MS + sim_below(w, 9000);
    default:
        return 30 + sim_below(w, 1500);
    }
}

/* 0: there was nothing to do it to. */
static int try_fault(struct world *w)
{
    int machine = sim_below(w, w->n_machines);

    switch (sim_below(w, 15)) {
    case 0:
    case 1:
        return kill_agent(w, machine, agent_down_ms(w));
    case 2:
        return kill_agent(w, 0, 30 + sim_below(w, 2500));
    case 3:
    case 4:
        return partition(w, machine, 100 + sim_below(w, sim_below(w, 2) ? 3000 : 30000));
    case 5:
        sim_trace(w, "FAULT: the head's disk is slow");
        slow_disk(w, 500 + sim_below(w, 5000));
        return 1;
    case 6:
        sim_trace(w, "FAULT: the object store is down");
        w->bucket.down_until_ms = w->now_ms + 500 + (uint64_t)sim_below(w, 2500);
        w->bucket.down_number = arm(w);
        return 1;
    case 7:
        return kill_rank(w);
    case 8:
        return kill_driver(w, sim_below(w, w->n_jobs));
    case 9:
        return cut(w, machine, sim_below(w, w->n_machines), 100 + sim_below(w, 9000), arm(w));
    case 10:
    case 11:
        ghosts(w, 0, arm(w));
        return 1;
    default:
        return power_loss(w, machine, 300 + sim_below(w, sim_below(w, 2) ? 25000 : 90000));
    }
}

static void fault(struct world *w, int a, int b)
{
    (void)a;
    (void)b;
    for (int i = 0; i < TRIES && !try_fault(w); i++)
        ;
}

static void see_to_enough(struct world *w, int a, int b)
{
    (void)a;
    (void)b;
    for (int m = 0; m < w->n_machines && w->stats.faults < ENOUGH; m++)
        kill_agent(w, m, 30 + sim_below(w, 1500));
}

void faults_plan(struct world *w)
{
    /* Besides the other faults, and not from their dice: those stay as many as they were. */
    if (w->seed % 3 == 0)
        sim_at(w, -1, 1000 + w->seed * 7919 % 15000, deafen,
               1 + (int)(w->seed / 3 % (uint64_t)(w->n_machines - 1)),
               500 + (int)(w->seed * 104729 % 30000));
    for (int n = 2 + sim_below(w, 5); n > 0; n--)
        sim_at(w, -1, 300 + (uint64_t)sim_below(w, FAULTS_END_MS - 1000), fault, 0, 0);
    sim_at(w, -1, ENOUGH_BY_MS, see_to_enough, 0, 0);
}
