/*
 * Attempts on a machine as their agent sees them, in the order of agent/control.c, agent/gang_io.c,
 * agent/gangs.c and agent/gang_store.c.
 */
#include <signal.h>
#include <string.h>
#include "tests/sim/sim.h"

enum { ENDED_KEPT_MS = 60000 };

static struct run *run_at(struct world *w, int machine, int run)
{
    return &w->machines[machine].agent.runs[run];
}

static int slot_of(int job, uint32_t attempt)
{
    return job * MAX_ATTEMPTS + (int)attempt - 1;
}

/* ---- gang.json ---- */

static void save(struct world *w, int machine, int run)
{
    const struct run *r = run_at(w, machine, run);
    struct run_file *f = &w->machines[machine].disk.runs[run];

    *f = (struct run_file){.present = 1,
                           .job = r->job,
                           .group = r->group,
                           .node = r->node,
                           .per_node = r->per_node,
                           .n_nodes = r->n_nodes,
                           .attempt = r->attempt,
                           .state = r->fsm.state,
                           .released = r->fsm.released,
                           .lease_ms = r->fsm.lease_ms,
                           .has_failure = r->has_failure,
                           .failure_code = r->failure_code,
                           .is_launched = r->is_launched};
    memcpy(f->ranks, r->ranks, sizeof(f->ranks));
}

static void forget(struct world *w, int machine, int run)
{
    upload_close(w, machine, run);
    run_at(w, machine, run)->used = 0;
}

/* ---- to the driver ---- */

void gang_tell(struct world *w, int machine, int run, enum msg_kind kind, int rank,
               int64_t iteration, int code)
{
    struct run *r = run_at(w, machine, run);
    struct msg m = {.kind = kind, .rank = rank, .iteration = iteration, .code = code};

    if (r->conn < 0)
        return;
    if (kind == M_RANK_EXIT) {
        m.code = r->ranks[rank % r->per_node].code;
        m.signal = r->ranks[rank % r->per_node].signal;
        m.flag = r->ranks[rank % r->per_node].echo;
    }
    if (kind == M_HELLO_REPLY)
        m.flag = r->fsm.state != MB_GANG_CREATED;
    sim_stream_send(w, r->conn, 0, &m);
}

static void fail(struct world *w, int machine, int run, int code)
{
    struct run *r = run_at(w, machine, run);

    if (r->has_failure)
        return;
    r->has_failure = 1;
    r->failure_code = code;
    gang_tell(w, machine, run, M_FAILURE, 0, 0, code);
}

/* ---- logs of ranks ---- */

static void pump_logs(struct world *w, int machine, int run)
{
    struct run *r = run_at(w, machine, run);
    const struct supervisor *s = &w->machines[machine].disk.sups[run];

    for (int i = 0; r->conn >= 0 && i < s->n_ranks; i++) {
        uint64_t at = r->log_offsets[i], size = s->ranks[i].log_bytes;
        struct msg m = {
            .kind = M_LOG, .rank = s->ranks[i].rank, .offset = at, .n = size - at, .ticket = at};

        if (at >= size)
            continue;
        if (w->plant == PLANT_LOG_OFFSET_RESET && at > 0)
            m.offset = at - 1;
        sim_stream_send(w, r->conn, 0, &m);
        r->log_offsets[i] = size;
    }
}

static int logs_drained(struct world *w, int machine, int run)
{
    const struct supervisor *s = &w->machines[machine].disk.sups[run];

    for (int i = 0; i < s->n_ranks; i++)
        if (run_at(w, machine, run)->log_offsets[i] < s->ranks[i].log_bytes)
            return 0;
    return 1;
}

/* ---- carrying out ---- */

static void begin_launch(struct world *w, int machine, int run);

static void free_node(struct world *w, int machine, int run)
{
    struct run *r = run_at(w, machine, run);
    struct mb_pg_id pg;

    for (int i = 0; i < MAX_RUNS; i++) {
        const struct run *o = run_at(w, machine, i);
        if (i != run && o->used && o->group == r->group &&
            mb_gang_keeps_node(&o->fsm, o->launch_waits))
            return;
    }
    sim_pg(r->group, &pg);
    mb_ledger_unhold(w->machines[machine].agent.ledger, &pg);
    agent_keep_ledger(w, machine);
}

static void say_ended(struct world *w, int machine, int run)
{
    pump_logs(w, machine, run);
    if (!logs_drained(w, machine, run))
        return;
    int conn = run_at(w, machine, run)->conn;
    gang_tell(w, machine, run, M_ENDED, 0, 0, 0);
    sim_stream_close(w, conn, 0);
    forget(w, machine, run);
}

static void release(struct world *w, int machine, int run)
{
    struct run *r = run_at(w, machine, run);

    if (r->is_abandoned && r->conn < 0) {
        struct msg m = {.kind = M_ABANDONED,
                        .from = sim_agent_proc(machine),
                        .to = sim_agent_proc(0),
                        .job = r->job,
                        .group = r->group};
        sim_call(w, &m, 10000);
    }
    if (r->conn >= 0)
        say_ended(w, machine, run);
    else
        mb_gang_lease(&r->fsm, ENDED_KEPT_MS, w->now_ms);
}

static void stop_ranks(struct world *w, int machine, int run)
{
    struct run *r = run_at(w, machine, run);

    if (w->plant == PLANT_FREED_TOO_EARLY) {
        struct mb_pg_id pg;
        sim_pg(r->group, &pg);
        mb_ledger_unhold(w->machines[machine].agent.ledger, &pg);
        agent_keep_ledger(w, machine);
    }
    if (w->machines[machine].disk.sups[run].exists)
        ranks_stop(w, machine, run, GRACE_MS);
    else if (!r->is_pulling)
        gang_event(w, machine, run, MB_GANG_EV_ALL_EXITED);
}

int gang_event(struct world *w, int machine, int run, enum mb_gang_event e)
{
    struct run *r = run_at(w, machine, run);
    enum mb_gang_state before = r->fsm.state;
    const char *broken;
    struct mb_err err;
    unsigned actions;

    if (!r->used)
        return MB_ENOENT;
    if (mb_gang_step(&r->fsm, e, &actions, &err) != MB_OK) {
        sim_trace(w, "agent %d: job %d attempt %u: %s", machine, r->job, r->attempt, err.text);
        return MB_ESTATE;
    }
    broken = mb_gang_invariant(&r->fsm);
    sim_check(w, !broken, "job %d attempt %u on machine %d: %s", r->job, r->attempt, machine,
              broken);
    if ((actions & MB_GANG_ACT_STOP_RANKS) &&
        (e == MB_GANG_EV_BUNDLES_REMOVED || e == MB_GANG_EV_LEASE_EXPIRED))
        fail(w, machine, run, MB_ECANCELED);
    if (r->fsm.released && r->up.plan && r->up.released_at_ms == 0)
        r->up.released_at_ms = w->now_ms;
    if (before == r->fsm.state && actions == 0)
        return MB_OK;
    sim_trace(w, "agent %d: job %d attempt %u: %s -> %s (%s)", machine, r->job, r->attempt,
              mb_gang_state_name(before), mb_gang_state_name(r->fsm.state), mb_gang_event_name(e));
    save(w, machine, run);
    sim_crash_point(w);
    if ((actions & MB_GANG_ACT_FREE_NODE) && w->plant != PLANT_PART_OF_A_SAVE)
        upload_no_more(w, machine, run);
    if (actions & MB_GANG_ACT_FREE_NODE)
        free_node(w, machine, run);
    if (actions & MB_GANG_ACT_LAUNCH)
        begin_launch(w, machine, run);
    if (actions & MB_GANG_ACT_STOP_RANKS)
        stop_ranks(w, machine, run);
    if (actions & MB_GANG_ACT_RELEASE)
        release(w, machine, run);
    return MB_OK;
}

/* ---- launching ---- */

/* Every attempt has a size that the job allows. */
static void check_size(struct world *w, const struct run *r)
{
    const struct job_script *s = &w->scripts[r->job];

    sim_check(w, r->n_nodes >= s->min_nodes && r->n_nodes <= s->n_nodes && r->node < r->n_nodes,
              "job %d attempt %u: node %d of %d, it may have %d to %d", r->job, r->attempt, r->node,
              r->n_nodes, s->min_nodes, s->n_nodes);
    sim_check(w, s->global_batch % (r->n_nodes * r->per_node) == 0,
              "job %d attempt %u: a batch of %d on %d ranks", r->job, r->attempt, s->global_batch,
              r->n_nodes * r->per_node);
}

static void pulled(struct world *w, int machine, int run)
{
    struct run *r = run_at(w, machine, run);
    struct mb_pg_id pg;

    if (!r->used || !r->is_pulling)
        return;
    r->is_pulling = 0;
    if (r->fsm.state != MB_GANG_LAUNCHING) { /* stopped meanwhile: nothing was spawned */
        gang_event(w, machine, run, MB_GANG_EV_ALL_EXITED);
        return;
    }
    sim_pg(r->group, &pg);
    const struct mb_bundle *b = mb_ledger_find(w->machines[machine].agent.ledger, &pg, r->node);
    upload_open(w, machine, run);
    check_size(w, r);
    if (!b || b->state != MB_BUNDLE_COMMITTED) { /* placed elsewhere since the driver looked */
        fail(w, machine, run, MB_ENOENT);
        gang_event(w, machine, run, MB_GANG_EV_LAUNCH_FAILED);
        return;
    }
    ranks_spawn(w, machine, run);
    sim_crash_point(w);
}

static void begin_launch(struct world *w, int machine, int run)
{
    struct run *r = run_at(w, machine, run);
    struct mb_pg_id pg;

    r->launch_waits = 0;
    for (int i = 0; i < MAX_RUNS && w->plant != PLANT_LAUNCH_BESIDE; i++) {
        const struct run *o = run_at(w, machine, i);
        if (o->used && o->job == r->job && o->attempt < r->attempt &&
            mb_gang_has_processes(&o->fsm))
            r->launch_waits = 1;
    }
    if (r->launch_waits)
        return;
    sim_pg(r->group, &pg);
    mb_ledger_hold(w->machines[machine].agent.ledger, &pg);
    r->is_pulling = 1;
    sim_at(w, sim_agent_proc(machine), 1 + (uint64_t)sim_below(w, sim_below(w, 8) ? 80 : 3000),
           pulled, machine, run);
}

/* ---- Hello ---- */

static void unbind(struct world *w, int machine, int run)
{
    (void)machine;
    run_at(w, machine, run)->conn = -1;
}

static void repeat(struct world *w, int machine, int run)
{
    struct run *r = run_at(w, machine, run);
    int first = r->node * r->per_node;

    if (r->is_launched)
        gang_tell(w, machine, run, M_LAUNCHED, 0, 0, 0);
    for (int i = 0; i < r->per_node; i++)
        if (r->ranks[i].endpoint)
            gang_tell(w, machine, run, M_ENDPOINT, first + i, 0, 0);
    upload_repeat(w, machine, run);
    for (int i = 0; i < r->per_node; i++)
        if (r->ranks[i].exited)
            gang_tell(w, machine, run, M_RANK_EXIT, first + i, 0, 0);
    if (r->has_failure)
        gang_tell(w, machine, run, M_FAILURE, 0, 0, r->failure_code);
}

static void refuse(struct world *w, const struct msg *q, int code)
{
    struct msg m = {.kind = M_REFUSED, .code = code};

    sim_stream_send(w, q->conn, 0, &m);
    sim_stream_close(w, q->conn, 0);
}

static int admit(struct world *w, int machine, const struct msg *q, int known)
{
    struct mb_ledger *l = w->machines[machine].agent.ledger;
    uint32_t *newest = &w->newest_attempt[machine][q->job];
    struct mb_pg_id pg, gang;
    struct mb_err err;

    sim_pg(q->group, &pg);
    sim_pg(w->plant == PLANT_FENCE_BY_GROUP ? q->group : q->job * MAX_GROUPS, &gang);
    uint32_t before = mb_ledger_newest(l, &gang);
    int rc = mb_gang_admit(l, &pg, &gang, q->attempt, known, &err);
    if (rc != MB_OK)
        return rc;
    if (mb_ledger_newest(l, &gang) != before && w->plant != PLANT_FENCE_FORGOTTEN)
        agent_keep_ledger(w, machine); /* before Hello is answered */
    sim_crash_point(w);
    sim_check(w, q->attempt >= *newest, "machine %d admitted attempt %u of job %d after attempt %u",
              machine, q->attempt, q->job, *newest);
    *newest = q->attempt;
    return MB_OK;
}

static void on_hello(struct world *w, int machine, const struct msg *q)
{
    int run = slot_of(q->job, q->attempt);
    struct run *r = run_at(w, machine, run);
    int rc = admit(w, machine, q, r->used);

    if (rc != MB_OK) {
        refuse(w, q, rc);
        return;
    }
    if (!r->used) {
        memset(r, 0, sizeof(*r));
        r->used = 1;
        r->job = q->job;
        r->group = q->group;
        r->attempt = q->attempt;
        r->node = q->node;
        r->per_node = w->scripts[q->job].per_node;
        r->n_nodes = w->group_nodes[q->group];
        r->first_failed = -1;
        mb_gang_init(&r->fsm);
    } else if (r->conn >= 0) {
        sim_stream_close(w, r->conn, 0);
    }
    r->conn = q->conn;
    w->heard_ms[machine][run] = w->now_ms;
    if (r->fsm.state != MB_GANG_ENDED)
        mb_gang_lease(&r->fsm, LEASE_MS, w->now_ms);
    gang_tell(w, machine, run, M_HELLO_REPLY, 0, 0, 0);
    for (int i = 0; i < MAX_RUNS; i++) {
        const struct run *o = run_at(w, machine, i);
        if (o->used && o->job == q->job && o->attempt < q->attempt && o->fsm.state != MB_GANG_ENDED)
            gang_event(w, machine, i, MB_GANG_EV_SUPERSEDED);
    }
    for (int i = 0; i < r->per_node; i++)
        r->log_offsets[i] = (uint64_t)q->list[i];
    repeat(w, machine, run);
}

void gang_message(struct world *w, int machine, const struct msg *m)
{
    int run = slot_of(m->job, m->attempt);
    struct run *r;

    if (m->kind == M_BROKEN) {
        for (int i = 0; i < MAX_RUNS; i++)
            if (run_at(w, machine, i)->used && run_at(w, machine, i)->conn == m->conn)
                unbind(w, machine, i);
        return;
    }
    if (m->kind == M_HELLO) {
        on_hello(w, machine, m);
        return;
    }
    r = run_at(w, machine, run);
    if (!r->used || r->conn != m->conn)
        return;
    mb_gang_renew(&r->fsm, w->now_ms);
    w->heard_ms[machine][run] = w->now_ms;
    switch (m->kind) {
    case M_LAUNCH:
        if (r->fsm.state != MB_GANG_CREATED)
            fail(w, machine, run, MB_ESTATE);
        else
            gang_event(w, machine, run, MB_GANG_EV_LAUNCH);
        break;
    case M_START:
        if (gang_event(w, machine, run, MB_GANG_EV_START) == MB_OK)
            ranks_start(w, machine, run);
        break;
    case M_DRV_HALT:
        r->fsm.is_up |= w->plant == PLANT_HALT_HOLDS;
        gang_event(w, machine, run, MB_GANG_EV_HALT);
        break;
    case M_DRV_STOP:
        gang_event(w, machine, run, MB_GANG_EV_STOP);
        break;
    case M_DRV_END:
        gang_event(w, machine, run, MB_GANG_EV_END);
        break;
    default:
        break;
    }
}

void gang_bundles_removed(struct world *w, int machine, int group)
{
    for (int i = 0; i < MAX_RUNS; i++) {
        struct run *r = run_at(w, machine, i);
        if (r->used && r->group == group && r->fsm.state != MB_GANG_ENDED && !r->fsm.released)
            gang_event(w, machine, i, MB_GANG_EV_BUNDLES_REMOVED);
    }
}

/* ---- time ---- */

static void tick_run(struct world *w, int machine, int run)
{
    struct run *r = run_at(w, machine, run);

    if (r->launch_waits && r->fsm.state == MB_GANG_LAUNCHING)
        begin_launch(w, machine, run);
    if (r->fsm.state == MB_GANG_ENDED && r->conn >= 0) {
        say_ended(w, machine, run);
        return;
    }
    pump_logs(w, machine, run);
    upload_tick(w, machine, run);
    if (!r->used || !mb_gang_lease_is_over(&r->fsm, w->now_ms))
        return;
    if (r->fsm.state == MB_GANG_ENDED) {
        forget(w, machine, run);
        return;
    }
    if (w->plant == PLANT_LEASE_ASKS_THE_HEAD && w->drivers[r->job].alive) {
        mb_gang_renew(&r->fsm, w->now_ms);
        return;
    }
    r->is_abandoned = 1;
    gang_event(w, machine, run, MB_GANG_EV_LEASE_EXPIRED);
}

void gang_tick(struct world *w, int machine)
{
    for (int i = 0; i < MAX_RUNS; i++)
        if (run_at(w, machine, i)->used)
            tick_run(w, machine, i);
}

/* ---- after a restart ---- */

static void adopt_one(struct world *w, int machine, int run)
{
    struct run *r = run_at(w, machine, run);
    const struct supervisor *s = &w->machines[machine].disk.sups[run];
    enum mb_gang_adoption adoption = mb_gang_adoption(r->fsm.state);
    struct mb_pg_id pg;

    sim_trace(w, "agent %d: job %d attempt %u adopted as %s", machine, r->job, r->attempt,
              mb_gang_state_name(r->fsm.state));
    if (adoption == MB_GANG_ADOPT_NOTHING)
        return;
    upload_open(w, machine, run);
    if (adoption == MB_GANG_ADOPT_UPLOADS) {
        upload_no_more(w, machine, run);
        if (!mb_plan_is_busy(r->up.plan))
            gang_event(w, machine, run, MB_GANG_EV_UPLOADS_IDLE);
        return;
    }
    r->is_launched = 0;
    for (int i = 0; i < r->per_node; i++) /* its supervisor tells all of it again */
        r->ranks[i].pid_known = r->ranks[i].exited = 0;
    sim_pg(r->group, &pg);
    mb_ledger_hold(w->machines[machine].agent.ledger, &pg);
    if (s->exists && w->plant != PLANT_NOT_ADOPTED) {
        if (r->fsm.state == MB_GANG_STOPPING)
            ranks_stop(w, machine, run, GRACE_MS);
        ranks_tell_agent(w, machine, run);
        return;
    }
    if (!s->exists) /* killed between Launch and spawn: this attempt is lost */
        w->scripts[r->job].harmed = 1;
    fail(w, machine, run, MB_EUNAVAIL);
    gang_event(w, machine, run, mb_gang_adoption_lost(r->fsm.state));
}

void gang_adopt(struct world *w, int machine)
{
    struct machine *m = &w->machines[machine];

    for (int i = 0; i < MAX_RUNS; i++) {
        const struct run_file *f = &m->disk.runs[i];
        struct run *r = run_at(w, machine, i);

        if (!f->present)
            continue;
        if (f->state == MB_GANG_ENDED)
            continue;
        *r = (struct run){.used = 1,
                          .job = f->job,
                          .group = f->group,
                          .attempt = f->attempt,
                          .node = f->node,
                          .per_node = f->per_node,
                          .n_nodes = f->n_nodes,
                          .has_failure = f->has_failure,
                          .failure_code = f->failure_code,
                          .first_failed = -1,
                          .is_launched = f->is_launched,
                          .conn = -1};
        memcpy(r->ranks, f->ranks, sizeof(f->ranks));
        mb_gang_init(&r->fsm);
        r->fsm.state = f->state;
        r->fsm.released = f->released;
        r->fsm.is_up = f->is_launched;
        mb_gang_lease(&r->fsm, f->lease_ms, w->now_ms);
    }
    for (int i = 0; i < MAX_RUNS; i++)
        if (run_at(w, machine, i)->used)
            adopt_one(w, machine, i);
    if (mb_ledger_drop_unheld(m->agent.ledger) > 0)
        agent_keep_ledger(w, machine);
}
