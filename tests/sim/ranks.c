/*
 * Supervisors of gangs and the ranks below them. They live without an agent: what an agent missed
 * it is told again. A rank's reports wait in its socket until an agent has handled them.
 */
#include <signal.h>
#include <string.h>
#include "tests/sim/sim.h"

static struct supervisor *sup_at(struct world *w, int machine, int run)
{
    return &w->machines[machine].disk.sups[run];
}

static int pack(int machine, int run, int r)
{
    return (machine * MAX_RUNS + run) * MAX_PER_NODE + r;
}

static struct rank *rank_of(struct world *w, int packed)
{
    return &sup_at(w, packed / MAX_PER_NODE / MAX_RUNS, packed / MAX_PER_NODE % MAX_RUNS)
                ->ranks[packed % MAX_PER_NODE];
}

/* ---- what the agent makes of it ---- */

static void take_report(struct world *w, int machine, int run, int r)
{
    struct rank *k = &sup_at(w, machine, run)->ranks[r];
    struct run *a = &w->machines[machine].agent.runs[run];
    const struct rank_report *m = &k->reports[k->n_taken];

    if (m->kind == M_ENDPOINT) {
        a->ranks[r].endpoint = 1;
        w->machines[machine].disk.runs[run].ranks[r].endpoint = 1;
        gang_tell(w, machine, run, M_ENDPOINT, k->rank, 0, 0);
    } else {
        gang_tell(w, machine, run, M_SAVED, k->rank, m->iteration, 0);
        upload_saved(w, machine, run, k->rank, m->iteration);
    }
    sim_crash_point(w); /* handled, and still in the socket */
    k->n_taken++;
}

static void ranks_are_up(struct world *w, int machine, int run)
{
    struct run *a = &w->machines[machine].agent.runs[run];

    for (int i = 0; i < a->per_node; i++)
        if (!a->ranks[i].pid_known && !a->ranks[i].exited)
            return;
    if (a->is_launched)
        return;
    a->is_launched = 1;
    gang_tell(w, machine, run, M_LAUNCHED, 0, 0, 0);
    if (a->fsm.state == MB_GANG_LAUNCHING)
        gang_event(w, machine, run, MB_GANG_EV_WORKERS_UP);
}

static void take_exit(struct world *w, int machine, int run, int r)
{
    struct rank *k = &sup_at(w, machine, run)->ranks[r];
    struct run *a = &w->machines[machine].agent.runs[run];
    int failed = k->code != 0 || k->signal != 0;

    a->ranks[r].exited = 1;
    a->ranks[r].code = k->signal ? 128 + k->signal : k->code;
    a->ranks[r].signal = k->signal;
    a->ranks[r].echo = failed && (a->first_failed >= 0 || a->fsm.state == MB_GANG_STOPPING);
    if (failed && a->first_failed < 0 && a->fsm.state != MB_GANG_STOPPING)
        a->first_failed = k->rank;
    ranks_are_up(w, machine, run);
    gang_tell(w, machine, run, M_RANK_EXIT, k->rank, 0, 0);
    if (failed && mb_gang_has_processes(&a->fsm))
        gang_event(w, machine, run, MB_GANG_EV_RANK_FAILED);
}

/* The agent looks at its supervisor: everything it does not know yet, in order. */
static void sync_agent(struct world *w, int machine, int run)
{
    struct supervisor *s = sup_at(w, machine, run);
    struct run *a = &w->machines[machine].agent.runs[run];

    if (!a->used || !s->exists || !mb_gang_has_processes(&a->fsm))
        return;
    for (int i = 0; i < s->n_ranks; i++) {
        struct rank *k = &s->ranks[i];
        if (k->started && !a->ranks[i].pid_known) {
            a->ranks[i].pid_known = 1;
            ranks_are_up(w, machine, run);
        }
        while (k->n_taken < k->n_reports)
            take_report(w, machine, run, i);
        if (k->exited && !a->ranks[i].exited)
            take_exit(w, machine, run, i);
    }
    if (!s->running && !s->all_told) {
        s->all_told = 1;
        gang_event(w, machine, run, MB_GANG_EV_ALL_EXITED);
    }
}

static void look(struct world *w, int machine, int run)
{
    if (w->procs[sim_agent_proc(machine)].up)
        sim_at(w, sim_agent_proc(machine), (uint64_t)sim_below(w, 4), sync_agent, machine, run);
}

void ranks_tell_agent(struct world *w, int machine, int run)
{
    sup_at(w, machine, run)->all_told = 0;
    look(w, machine, run);
}

/* ---- ranks ---- */

static void report(struct world *w, int packed, enum msg_kind kind, int64_t iteration)
{
    struct rank *k = rank_of(w, packed);

    k->reports[k->n_reports++] = (struct rank_report){kind, iteration};
    look(w, packed / MAX_PER_NODE / MAX_RUNS, packed / MAX_PER_NODE % MAX_RUNS);
}

static void rank_exits(struct world *w, int packed, int code, int signal)
{
    int machine = packed / MAX_PER_NODE / MAX_RUNS, run = packed / MAX_PER_NODE % MAX_RUNS;
    struct supervisor *s = sup_at(w, machine, run);
    struct rank *k = rank_of(w, packed);
    int left = 0;

    if (!k->alive)
        return;
    k->alive = 0;
    k->life++;
    k->exited = 1;
    k->code = code;
    k->signal = signal;
    k->log_bytes += 9;
    if (code != 0 || signal != 0)
        mb_sup_plan_child_failed(&s->plan, (unsigned)(packed % MAX_PER_NODE), w->now_ms);
    for (int i = 0; i < s->n_ranks; i++)
        left += s->ranks[i].alive || !s->ranks[i].started;
    if (left == 0) {
        s->running = 0;
        mb_sup_plan_nothing_left(&s->plan);
    }
    look(w, machine, run);
}

static void step(struct world *w, int packed, int life)
{
    struct rank *k = rank_of(w, packed);
    int job = packed / MAX_PER_NODE % MAX_RUNS / MAX_ATTEMPTS;
    const struct job_script *s = &w->scripts[job];
    int64_t iteration = k->from_iteration + k->n_saves + 1;

    if (!k->alive || (int)k->life != life)
        return;
    k->log_bytes += 5 + (uint64_t)sim_below(w, 40);
    if (iteration > s->n_saves) {
        rank_exits(w, packed, 0, 0);
        return;
    }
    k->n_saves++;
    report(w, packed, M_SAVED, iteration);
    sim_at(w, -1, (uint64_t)(s->step_ms / 2 + sim_below(w, s->step_ms)), step, packed, life);
}

static void breaks(struct world *w, int packed, int life)
{
    if (rank_of(w, packed)->alive && (int)rank_of(w, packed)->life == life)
        rank_exits(w, packed, 1, 0);
}

static void says_endpoint(struct world *w, int packed, int life)
{
    if (rank_of(w, packed)->alive && (int)rank_of(w, packed)->life == life)
        report(w, packed, M_ENDPOINT, 0);
}

void ranks_start(struct world *w, int machine, int run)
{
    struct supervisor *s = sup_at(w, machine, run);

    for (int i = 0; i < s->n_ranks; i++) {
        struct rank *k = &s->ranks[i];
        if (!k->alive || k->has_start)
            continue;
        k->has_start = 1;
        sim_at(w, -1, 10 + (uint64_t)sim_below(w, 200), step, pack(machine, run, i), (int)k->life);
    }
}

static void ends_on_term(struct world *w, int packed, int life)
{
    if (rank_of(w, packed)->alive && (int)rank_of(w, packed)->life == life)
        rank_exits(w, packed, 0, SIGTERM);
}

/* ---- supervisors ---- */

static void begin_rank(struct world *w, int packed, int life)
{
    int machine = packed / MAX_PER_NODE / MAX_RUNS, run = packed / MAX_PER_NODE % MAX_RUNS;
    const struct job_script *s = &w->scripts[run / MAX_ATTEMPTS];
    struct rank *k = rank_of(w, packed);

    if (k->started || (int)k->life != life)
        return;
    check_rank_starts(w, machine, run, k->rank);
    k->started = 1;
    k->alive = 1;
    k->log_bytes = 12;
    k->from_iteration = w->bucket.jobs[run / MAX_ATTEMPTS].latest;
    if (k->from_iteration < 0)
        k->from_iteration = 0;
    sim_at(w, -1, 5 + (uint64_t)sim_below(w, 60), says_endpoint, packed, (int)k->life);
    if (run % MAX_ATTEMPTS == 0 && s->fail_rank == k->rank)
        sim_at(w, -1, (uint64_t)s->fail_at_ms, breaks, packed, (int)k->life);
    look(w, machine, run);
}

void ranks_spawn(struct world *w, int machine, int run)
{
    struct run *a = &w->machines[machine].agent.runs[run];
    struct supervisor *s = sup_at(w, machine, run);
    struct mb_pg_id pg;

    memset(s, 0, sizeof(*s));
    s->exists = s->running = 1;
    s->n_ranks = a->per_node;
    s->spec = (struct mb_sup_spec){.stop_signal = SIGTERM,
                                   .stop_grace_ms = GRACE_MS,
                                   .end_peers_after_ms = 0,
                                   .end_peers_grace_ms = 2000,
                                   .leftover_grace_ms = 1000,
                                   .n_children = (size_t)a->per_node};
    mb_sup_plan_init(&s->plan, &s->spec);
    sim_pg(a->group, &pg);
    const struct mb_bundle *b = mb_ledger_find(w->machines[machine].agent.ledger, &pg, a->node);
    for (int i = 0; i < s->n_ranks; i++) {
        struct rank *k = &s->ranks[i];
        *k = (struct rank){.rank = a->node * a->per_node + i,
                           .device = b && (size_t)i < b->n_gpus ? (int)b->gpus[i] : -1};
        sim_at(w, -1, 3 + (uint64_t)sim_below(w, 30), begin_rank, pack(machine, run, i), 0);
    }
}

void ranks_stop(struct world *w, int machine, int run, int grace_ms)
{
    struct supervisor *s = sup_at(w, machine, run);

    if (s->exists && s->running)
        mb_sup_plan_stop(&s->plan, "stop", 0, (uint32_t)grace_ms, w->now_ms);
    look(w, machine, run);
}

/* The supervisor's own clock. */
void ranks_tick(struct world *w, int machine, int run)
{
    struct supervisor *s = sup_at(w, machine, run);
    const struct job_script *script = &w->scripts[run / MAX_ATTEMPTS];

    if (!s->exists || !s->running)
        return;
    enum mb_sup_action act = mb_sup_plan_tick(&s->plan, w->now_ms);
    if (act == MB_SUP_ACT_NONE)
        return;
    for (int i = 0; i < s->n_ranks; i++) {
        struct rank *k = &s->ranks[i];
        int packed = pack(machine, run, i);
        if (!k->started) { /* its process is just appearing */
            k->started = k->alive = 1;
            rank_exits(w, packed, 0, act == MB_SUP_ACT_KILL ? SIGKILL : SIGTERM);
        } else if (act == MB_SUP_ACT_KILL) {
            rank_exits(w, packed, 0, SIGKILL);
        } else if (!script->deaf) {
            sim_at(w, -1, 1 + (uint64_t)sim_below(w, 500), ends_on_term, packed, (int)k->life);
        }
    }
}

void ranks_kill_one(struct world *w, int machine, int run, int r)
{
    if (sup_at(w, machine, run)->exists && sup_at(w, machine, run)->ranks[r].alive)
        rank_exits(w, pack(machine, run, r), 0, SIGKILL);
}

void ranks_kill_all(struct world *w, int machine)
{
    for (int run = 0; run < MAX_RUNS; run++) {
        struct supervisor *s = sup_at(w, machine, run);
        for (int i = 0; i < s->n_ranks; i++) {
            s->ranks[i].alive = 0;
            s->ranks[i].life++;
        }
        s->exists = s->running = 0;
    }
}

int64_t ranks_newest(const struct world *w, int job)
{
    int64_t newest = -1;

    for (int m = 0; m < w->n_machines; m++)
        for (int run = job * MAX_ATTEMPTS; run < (job + 1) * MAX_ATTEMPTS; run++)
            for (int i = 0; i < w->machines[m].disk.sups[run].n_ranks; i++) {
                const struct rank *k = &w->machines[m].disk.sups[run].ranks[i];
                if (k->n_saves > 0 && k->from_iteration + k->n_saves > newest)
                    newest = k->from_iteration + k->n_saves;
            }
    return newest;
}
