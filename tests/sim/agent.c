/*
 * The node daemon: membership, its ledger and the head's calls, in the order of agent/agent.c,
 * agent/node.c and agent/node_manager.c.
 *
 *  1. Start: the ledger and the attempts of a former agent, then the head is asked whether it still
 *     knows this node; if not, everything promised is void and a fresh id registers.
 *  2. What is answered is on the disk before.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "tests/sim/sim.h"

enum {
    SYNC_MS = 1000,
    RETRY_MS = 2000,
    STALE_MS = 30000,
    TORN_ONE_IN = 300,
    WRITEBACK_MS = 5000 /* a kernel writes by itself what is this old */
};

static void ask(struct world *w, int machine, int unused);

/* As mb_fs_write_atomic(): beside the old one, fsynced, then renamed. A kill amid the write leaves
 * a part of it where nobody looks; planted, it leaves the part in the ledger's place, and so does a
 * loss of power after a rename of what is not on the disk yet (agent_power_lost). */
void agent_keep_ledger(struct world *w, int machine)
{
    struct machine *m = &w->machines[machine];
    char *text = mb_ledger_dump(m->agent.ledger);

    if (w->current == sim_agent_proc(machine) && sim_chance(w, TORN_ONE_IN)) {
        text[sim_below(w, (int)strlen(text))] = '\0';
        mb_free(w->plant == PLANT_LEDGER_IN_PLACE ? m->disk.ledger : m->disk.beside);
        *(w->plant == PLANT_LEDGER_IN_PLACE ? &m->disk.ledger : &m->disk.beside) = text;
        sim_trace(w, "agent %d is killed while it writes its ledger", machine);
        w->stats.torn++;
        w->stats.crashes++;
        w->stats.faults++;
        sim_kill_proc(w, w->current);
        longjmp(w->crashed, 1);
    }
    mb_free(m->disk.ledger);
    m->disk.ledger = text;
    m->disk.ledger_ms = w->now_ms;
    m->agent.sync_at_ms = 0;
}

void agent_power_lost(struct world *w, int machine)
{
    struct disk *d = &w->machines[machine].disk;

    if (w->plant == PLANT_LEDGER_NOT_SYNCED && d->ledger && w->now_ms < d->ledger_ms + WRITEBACK_MS)
        d->ledger[sim_below(w, (int)strlen(d->ledger))] = '\0';
}

/* ---- membership ---- */

static void void_everything(struct world *w, int machine)
{
    struct agent *a = &w->machines[machine].agent;

    sim_trace(w, "agent %d: what it had promised is void", machine);
    for (size_t i = mb_ledger_count(a->ledger); i-- > 0;) {
        if (i < mb_ledger_count(a->ledger))
            gang_bundles_removed(w, machine, mb_ledger_at(a->ledger, i)->pg.bytes[0] - 1);
    }
    mb_ledger_release_unused(a->ledger, NULL, 0);
    agent_keep_ledger(w, machine);
}

static void ask_again(struct world *w, int machine)
{
    sim_at(w, sim_agent_proc(machine), RETRY_MS, ask, machine, 0);
}

static void ask(struct world *w, int machine, int unused)
{
    struct agent *a = &w->machines[machine].agent;
    struct disk *d = &w->machines[machine].disk;
    struct msg m = {.from = sim_agent_proc(machine), .to = sim_agent_proc(0)};

    (void)unused;
    if (d->node_id < 0) {
        if (w->next_id == MAX_IDS)
            sim_out_of_room(w, MAX_IDS, "node ids");
        d->node_id = w->next_id++;
        w->id_machine[d->node_id] = machine;
        a->registered = 0;
        m.kind = M_REGISTER;
    } else {
        m.kind = a->registered == 2 ? M_REGISTER : M_SYNC;
    }
    a->node_id = d->node_id;
    if (m.kind == M_REGISTER)
        a->registered = 2; /* asked for, not answered */
    m.node_id = a->node_id;
    m.n = mb_ledger_available(a->ledger, 0);
    a->asking = 1;
    a->sync_at_ms = w->now_ms + SYNC_MS;
    sim_call(w, &m, 10000);
}

void agent_reply_came(struct world *w, const struct msg *q, const struct msg *reply)
{
    int machine = q->from - PROC_AGENT;
    struct agent *a = &w->machines[machine].agent;

    if (q->kind == M_ABANDONED)
        return;
    if (!reply) {
        ask_again(w, machine); /* still asking: nobody else asks meanwhile */
        return;
    }
    a->asking = 0;
    if (q->kind == M_REGISTER && reply->flag) {
        sim_trace(w, "agent %d: registered as %d", machine, q->node_id);
        a->registered = 1;
    } else if (reply->flag) {
        a->registered = 1;
    } else {
        void_everything(w, machine);
        w->machines[machine].disk.node_id = -1;
        ask(w, machine, 0);
    }
}

/* ---- bundles ---- */

static void spec_of(struct world *w, int group, int bundle, struct mb_bundle_spec *out)
{
    *out = (struct mb_bundle_spec){.index = bundle, .n_want = 1};
    sim_pg(group, &out->pg);
    snprintf(out->want[0].name, sizeof(out->want[0].name), "%s", MB_RESOURCE_GPU);
    out->want[0].units = (uint32_t)w->scripts[group / MAX_GROUPS].per_node;
}

static size_t specs_of(struct world *w, const struct msg *q, struct mb_bundle_spec *out)
{
    for (int i = 0; i < q->n_list; i++)
        spec_of(w, q->group, q->list[i], &out[i]);
    return (size_t)q->n_list;
}

static void answer(struct world *w, int machine, const struct msg *q, struct msg *reply)
{
    if (w->plant == PLANT_REPLY_BEFORE_LEDGER) {
        sim_reply(w, q, reply);
        sim_crash_point(w);
        agent_keep_ledger(w, machine);
    } else {
        agent_keep_ledger(w, machine);
        sim_crash_point(w);
        sim_reply(w, q, reply);
    }
}

/* What a dead head had sent may come after its successor placed the group anew: no help for it. */
static void bundles_lost(struct world *w, const struct msg *q, int group)
{
    if (q->from_inc != w->procs[q->from].inc)
        w->scripts[group / MAX_GROUPS].harmed = 1;
}

static void on_return(struct world *w, int machine, const struct msg *q)
{
    struct agent *a = &w->machines[machine].agent;
    struct msg reply = {.flag = 1};
    struct mb_pg_id pg;

    if (w->plant == PLANT_REPLY_BEFORE_LEDGER) {
        sim_reply(w, q, &reply);
        sim_crash_point(w);
    }
    sim_pg(q->group, &pg);
    if (mb_ledger_is_committed(a->ledger, &pg))
        bundles_lost(w, q, q->group);
    for (int i = 0; i < q->n_list; i++)
        mb_ledger_remove(a->ledger, &pg, q->list[i]);
    agent_keep_ledger(w, machine);
    sim_crash_point(w);
    gang_bundles_removed(w, machine, q->group);
    agent_keep_ledger(w, machine);
    if (w->plant != PLANT_REPLY_BEFORE_LEDGER)
        sim_reply(w, q, &reply);
}

static void on_release_unused(struct world *w, int machine, const struct msg *q)
{
    struct agent *a = &w->machines[machine].agent;
    struct mb_bundle_spec in_use[N_GROUPS * MAX_BUNDLES];
    struct msg reply = {.flag = 1};
    int had[N_GROUPS] = {0};

    for (int i = 0; i < q->n_list; i++)
        spec_of(w, q->list[i] / MAX_BUNDLES, q->list[i] % MAX_BUNDLES, &in_use[i]);
    for (size_t i = 0; i < mb_ledger_count(a->ledger); i++)
        had[mb_ledger_at(a->ledger, i)->pg.bytes[0] - 1] = 1;
    if (mb_ledger_release_unused(a->ledger, in_use, (size_t)q->n_list) > 0) {
        agent_keep_ledger(w, machine);
        sim_crash_point(w);
        for (int group = 0; group < N_GROUPS; group++) {
            struct mb_pg_id pg;
            sim_pg(group, &pg);
            if (!had[group] || mb_ledger_is_committed(a->ledger, &pg))
                continue;
            bundles_lost(w, q, group);
            gang_bundles_removed(w, machine, group);
        }
        agent_keep_ledger(w, machine);
    }
    sim_reply(w, q, &reply);
}

static void from_head(struct world *w, int machine, const struct msg *q)
{
    struct agent *a = &w->machines[machine].agent;
    struct mb_bundle_spec specs[MAX_BUNDLES];
    struct msg reply = {.flag = 1, .node_id = a->node_id};
    struct mb_err err;

    switch (q->kind) {
    case M_PREPARE:
        reply.flag = mb_ledger_prepare(a->ledger, specs, specs_of(w, q, specs), &err) == MB_OK;
        answer(w, machine, q, &reply);
        break;
    case M_COMMIT:
        specs_of(w, q, specs);
        if (w->plant == PLANT_COMMIT_OF_ANOTHER)
            specs[0].index = (specs[0].index + 1) % w->group_nodes[q->group];
        if (mb_ledger_commit(a->ledger, specs, (size_t)q->n_list, &err) != MB_OK)
            sim_trace(w, "agent %d: commit: %s", machine, err.text);
        answer(w, machine, q, &reply);
        break;
    case M_RETURN:
        on_return(w, machine, q);
        break;
    case M_RELEASE_UNUSED:
        on_release_unused(w, machine, q);
        break;
    case M_HEALTH:
    case M_SECOND:
        sim_reply(w, q, &reply);
        break;
    default:
        sim_fail(w, "an agent got a message of kind %d", (int)q->kind);
    }
}

void agent_message(struct world *w, const struct msg *m)
{
    int machine = m->to - PROC_AGENT;

    if (m->kind <= M_FINISH)
        head_message(w, m);
    else if (m->kind <= M_SECOND)
        from_head(w, machine, m);
    else
        gang_message(w, machine, m);
}

/* ---- life ---- */

static void drop_stale(struct world *w, int machine, int unused)
{
    if (w->plant != PLANT_OLD_PREPARE_KEPT &&
        mb_ledger_drop_stale(w->machines[machine].agent.ledger) > 0)
        agent_keep_ledger(w, machine);
    sim_at(w, sim_agent_proc(machine), STALE_MS, drop_stale, machine, unused);
}

static void tick(struct world *w, int machine, int unused)
{
    struct agent *a = &w->machines[machine].agent;

    gang_tick(w, machine);
    if (a->registered == 1 && !a->asking && w->now_ms >= a->sync_at_ms)
        ask(w, machine, 0);
    sim_at(w, sim_agent_proc(machine), TICK_MS, tick, machine, unused);
}

void agent_start(struct world *w, int machine)
{
    struct machine *m = &w->machines[machine];
    struct mb_resource total = {MB_RESOURCE_GPU, (uint32_t)m->n_gpus};
    struct mb_err err;

    if (w->procs[sim_agent_proc(machine)].up)
        return;
    sim_trace(w, "agent %d starts", machine);
    sim_start_proc(w, sim_agent_proc(machine));
    w->current = sim_agent_proc(machine);
    memset(&m->agent, 0, sizeof(m->agent));
    m->agent.up = 1;
    m->agent.node_id = m->disk.node_id;
    m->boot_ms = w->now_ms;
    if (mb_ledger_create(&total, 1, &m->agent.ledger, &err) != MB_OK ||
        (m->disk.ledger && mb_ledger_load(m->agent.ledger, m->disk.ledger, &err) != MB_OK))
        sim_fail(w, "agent %d: %s", machine, err.text);
    gang_adopt(w, machine);
    if (machine == 0)
        head_start(w);
    ask(w, machine, 0);
    tick(w, machine, 0);
    sim_at(w, sim_agent_proc(machine), STALE_MS, drop_stale, machine, 0);
}

void agent_crashed(struct world *w, int machine)
{
    struct machine *m = &w->machines[machine];

    for (int i = 0; i < MAX_RUNS; i++)
        if (m->agent.runs[i].used)
            upload_close(w, machine, i);
    mb_ledger_destroy(m->agent.ledger);
    memset(&m->agent, 0, sizeof(m->agent));
    if (machine == 0) {
        head_crashed(w);
        runner_agent_crashed(w);
    }
}
