/*
 * The head: the shell of placement, job states and health, over a store that commits in groups.
 * In the order of gcs/jobs.c, gcs/placement_service.c, gcs/nodes.c and gcs/store_sqlite.c.
 *
 *  1. What is answered waits until what it says is on the disk (store.c).
 *  2. A driver starts when its job's turn has come (line.c).
 *  3. A restart: nodes, then groups, then jobs from the disk; every node hears which bundles are in
 *     use before it gets new ones; the runner is asked for every job that had not ended, and what a
 *     job that had ended leaves behind is ended again.
 */
#include <signal.h>
#include <string.h>
#include "tests/sim/head_internal.h"

static void pump(struct world *w);

static int head_proc(void)
{
    return sim_agent_proc(0);
}

/* ---- what was written ---- */

static void finish_submission(struct world *w, int job);
static void remember_stopping(struct world *w, int job, int on);
static void answer_waits(struct world *w, uint64_t written);

/* Its end is on the disk; before that the mark has to stay. */
static void stop_is_over(struct world *w, int job)
{
    if (w->store.mem[T_STOPPING][job].present)
        remember_stopping(w, job, 0);
}

void head_written(struct world *w, struct write *x)
{
    struct head_job *j = &w->head.jobs[x->job];

    switch (x->done) {
    case DONE_REPLY:
        sim_reply(w, &x->request, &x->reply);
        break;
    case DONE_JOB_FIRST:
        if (j->state == MB_JOB_PENDING)
            line_ready(w, x->job);
        break;
    case DONE_JOB:
        if (mb_job_is_terminal(
                w->plant == PLANT_END_BEFORE_COMMIT ? j->state : (enum mb_job_state)x->r.state)) {
            j->final = 1;
            check_ended(w, x->job);
            stop_is_over(w, x->job);
            finish_submission(w, x->job);
        }
        break;
    case DONE_GROUPS:
        answer_waits(w, x->group_write);
        break;
    case DONE_NOTHING:
        break;
    }
}

/* ---- groups ---- */

static void store_group(struct world *w, int group)
{
    uint8_t id[MB_PG_ID_BYTES];
    struct record r = {.present = 1};

    sim_pg_id(group, id);
    const struct mb_gcs_pg *pg = mb_placement_get(w->head.placement, id, NULL);
    r.state = (int)pg->state;
    for (size_t i = 0; i < pg->n_bundles; i++)
        r.nodes[i] = pg->bundles[i].has_node ? sim_node_number(pg->bundles[i].node_id) : -1;
    store_put(w, T_GROUP, group, &r, DONE_NOTHING, 0);
}

static void answer_waits(struct world *w, uint64_t written)
{
    for (int i = 0; i < MAX_JOBS; i++) {
        uint8_t id[MB_PG_ID_BYTES];
        struct msg reply = {.code = MB_OK};

        if (!w->head.waits[i].used ||
            (w->head.waits[i].need > written && w->plant != PLANT_WAIT_TOO_EARLY))
            continue;
        sim_pg_id(w->head.waits[i].request.group, id);
        const struct mb_gcs_pg *pg = mb_placement_get(w->head.placement, id, NULL);
        if (pg && pg->state != MB_PG_CREATED && pg->state != MB_PG_REMOVED)
            continue;
        if (!pg || pg->state == MB_PG_REMOVED)
            reply.code = MB_ENOENT;
        for (size_t k = 0; reply.code == MB_OK && k < pg->n_bundles; k++)
            reply.list[k] = sim_node_number(pg->bundles[k].node_id);
        w->head.waits[i].used = 0;
        if (reply.code == MB_OK)
            check_told(w, w->head.waits[i].request.group, reply.list);
        sim_reply(w, &w->head.waits[i].request, &reply);
    }
}

static int send_action(struct world *w, const struct mb_place_action *act)
{
    static const enum msg_kind kinds[] = {
        [MB_PLACE_PREPARE] = M_PREPARE, [MB_PLACE_COMMIT] = M_COMMIT, [MB_PLACE_RETURN] = M_RETURN};
    int id = sim_node_number(act->node_id);
    struct msg m = {.kind = kinds[act->kind],
                    .from = head_proc(),
                    .to = sim_agent_proc(w->head.nodes[id].machine),
                    .job = (act->pg_id[0] - 1) / MAX_GROUPS,
                    .group = act->pg_id[0] - 1,
                    .ticket = act->ticket,
                    .n_list = (int)act->n_bundles};

    if (!w->head.nodes[id].alive)
        return MB_EUNAVAIL;
    for (size_t i = 0; i < act->n_bundles; i++)
        m.list[i] = (int)act->bundles[i];
    sim_call(w, &m, RPC_MS);
    return MB_OK;
}

/* Who waits for what was written until now hears of it when that is on the disk. */
static void tell_after_commit(struct world *w)
{
    struct write *x = store_enqueue(w, N_TABLES, 0, DONE_GROUPS, 0);

    x->group_write = ++w->head.group_writes;
}

static void pump(struct world *w)
{
    struct head *h = &w->head;
    struct mb_place_action act;
    int changed = 0;

    if (h->pumping)
        return;
    h->pumping = 1;
    while (mb_placement_next(h->placement, w->now_ms, &act)) {
        if (act.kind == MB_PLACE_CHANGED) {
            changed = 1;
            sim_trace(w, "head: group %d state %d", act.pg_id[0] - 1,
                      (int)mb_placement_get(h->placement, act.pg_id, NULL)->state);
            h->waits[(act.pg_id[0] - 1) / MAX_GROUPS].need = h->group_writes + 1;
            store_group(w, act.pg_id[0] - 1);
        } else if (send_action(w, &act) != MB_OK) {
            mb_placement_result(h->placement, act.pg_id, act.ticket, MB_PLACE_FAILED, w->now_ms);
        }
    }
    h->pumping = 0;
    if (changed)
        tell_after_commit(w);
}

static void remove_group(struct world *w, int group)
{
    uint8_t id[MB_PG_ID_BYTES];

    sim_pg_id(group, id);
    mb_placement_remove(w->head.placement, id);
    pump(w);
}

static void remove_groups(struct world *w, int job)
{
    for (int i = 0; i < MAX_GROUPS; i++)
        remove_group(w, job * MAX_GROUPS + i);
}

/* The driver is over: its groups go with it. Its record may say so already, and a former head may
 * have died before the group's did. */
static void finish_gcs_job(struct world *w, int job)
{
    struct record r = w->store.mem[T_GCS_JOB][job];

    if (!r.present)
        return;
    if (r.state == 1) {
        remove_groups(w, job);
        return;
    }
    r.state = 1;
    store_put(w, T_GCS_JOB, job, &r, DONE_NOTHING, 0);
    remove_groups(w, job);
}

static void finish_submission(struct world *w, int job)
{
    finish_gcs_job(w, job);
}

/* ---- nodes ---- */

static void node_up(struct world *w, int id)
{
    struct mb_gcs_resource total = {MB_RESOURCE_GPU, w->machines[w->head.nodes[id].machine].n_gpus};
    uint8_t raw[MB_NODE_ID_BYTES];
    struct mb_err err;

    sim_node_id(id, raw);
    if (mb_placement_node_up(w->head.placement, raw, &total, 1, &err) != MB_OK)
        sim_fail(w, "%s", err.text);
    if (!w->head.nodes[id].reconciled)
        mb_placement_node_view(w->head.placement, raw, &total, 1, 1);
}

/* Nobody hears what is answered to calls that went through it. */
static void close_channel(struct head_node *n)
{
    n->channel++;
    n->reconciling = 0;
}

static void node_dead(struct world *w, int id)
{
    struct record r = {.present = 1, .state = 1, .value = w->head.nodes[id].machine};
    uint8_t raw[MB_NODE_ID_BYTES];

    if (!w->head.nodes[id].alive)
        return;
    sim_trace(w, "head: node id %d of machine %d is dead", id, w->head.nodes[id].machine);
    life_dead(w, &w->head.nodes[id]);
    w->head.nodes[id].alive = 0;
    store_put(w, T_NODE, id, &r, DONE_NOTHING, 0);
    close_channel(&w->head.nodes[id]);
    sim_node_id(id, raw);
    mb_placement_node_dead(w->head.placement, raw);
    pump(w);
}

static void reconcile(struct world *w, int id)
{
    struct head_node *n = &w->head.nodes[id];
    struct msg m = {.kind = M_RELEASE_UNUSED,
                    .from = head_proc(),
                    .to = sim_agent_proc(n->machine),
                    .node_id = id,
                    .ticket = n->channel};

    if (n->reconciling)
        return;
    for (size_t i = 0; i < mb_placement_count(w->head.placement); i++) {
        const struct mb_gcs_pg *pg = mb_placement_at(w->head.placement, i, NULL);
        for (size_t k = 0; k < pg->n_bundles; k++)
            if (pg->bundles[k].has_node && sim_node_number(pg->bundles[k].node_id) == id)
                m.list[m.n_list++] = (pg->id[0] - 1) * MAX_BUNDLES + (int)k;
    }
    n->reconciling = 1;
    sim_call(w, &m, RPC_MS);
}

static void register_node(struct world *w, const struct msg *q)
{
    struct head_node *n = &w->head.nodes[q->node_id];
    struct record r = {.present = 1, .state = 0, .value = q->from - PROC_AGENT};
    struct msg reply = {.code = MB_OK, .flag = 1};

    if (n->used && !n->alive && w->plant != PLANT_DEAD_COMES_BACK) {
        reply.flag = 0; /* its process may be there under another id by now */
        sim_reply(w, q, &reply);
        return;
    }
    /* It may have a place in the table: asked for, not answered. */
    n->reconciled = (n->used && n->alive && n->reconciled) || w->plant == PLANT_REGISTERED_IS_CLEAN;
    close_channel(n);
    n->used = n->alive = 1;
    n->machine = q->from - PROC_AGENT;
    mb_health_init(&n->health, 1, w->now_ms);
    store_put(w, T_NODE, q->node_id, &r, DONE_NOTHING, 0);
    node_up(w, q->node_id);
    if (!n->reconciled)
        reconcile(w, q->node_id);
    life_joined(w);
    pump(w);
    store_reply(w, q, &reply);
}

static void sync_node(struct world *w, const struct msg *q)
{
    struct head_node *n = &w->head.nodes[q->node_id];
    struct msg reply = {.flag = n->used && n->alive};

    if (reply.flag) {
        struct mb_gcs_resource free_now = {MB_RESOURCE_GPU, (double)q->n};
        uint8_t raw[MB_NODE_ID_BYTES];
        mb_health_heard(&n->health, w->now_ms);
        sim_node_id(q->node_id, raw);
        mb_placement_node_view(w->head.placement, raw, &free_now, 1, !n->reconciled);
        pump(w);
    }
    sim_reply(w, q, &reply);
}

static void tick_node(struct world *w, int id)
{
    struct head_node *n = &w->head.nodes[id];
    struct msg m = {.from = head_proc(), .to = sim_agent_proc(n->machine), .node_id = id};

    for (;;) {
        switch (mb_health_tick(&n->health, w->now_ms)) {
        case MB_HEALTH_CHECK:
            m.kind = M_HEALTH;
            sim_call(w, &m, MB_HEALTH_TIMEOUT_MS);
            break;
        case MB_HEALTH_SECOND:
            m.kind = M_SECOND;
            sim_call(w, &m, MB_HEALTH_TIMEOUT_MS);
            break;
        case MB_HEALTH_DEAD:
            node_dead(w, id);
            return;
        case MB_HEALTH_WAIT:
            return;
        }
    }
}

static void tick_nodes(struct world *w)
{
    for (int id = 0; id < w->next_id; id++) {
        struct head_node *n = &w->head.nodes[id];

        if (!n->used || !n->alive)
            continue;
        if (!n->reconciled)
            reconcile(w, id);
        tick_node(w, id);
    }
}

/* ---- jobs ---- */

static void store_job(struct world *w, int job, enum done_kind done)
{
    struct record r = {
        .present = 1, .state = (int)w->head.jobs[job].state, .value = w->head.jobs[job].since_ms};

    store_put(w, T_JOB, job, &r, done, job);
}

static void remember_stopping(struct world *w, int job, int on)
{
    struct record r = {.present = on};

    store_put(w, T_STOPPING, job, &r, DONE_NOTHING, 0);
}

void head_apply(struct world *w, int job, enum mb_job_input input)
{
    struct head_job *j = &w->head.jobs[job];
    enum mb_job_state from = j->state, to;
    struct mb_err err;

    if (mb_job_next(from, input, &to, &err) != MB_OK)
        return;
    j->state = to;
    if (from == to)
        return;
    sim_trace(w, "head: job %d %s -> %s", job, mb_job_state_name(from), mb_job_state_name(to));
    if (mb_job_is_terminal(to) || w->plant == PLANT_PLACE_LEFT_EARLY)
        line_leave(w, job);
    if (to == MB_JOB_STOPPING) {
        remember_stopping(w, job, 1);
        return;
    }
    store_job(w, job, DONE_JOB);
}

static void stop_job(struct world *w, int job)
{
    struct mb_job_news news;
    int has_driver = runner_stop(w, job) != MB_ENOENT;

    if (w->plant == PLANT_STOPPED_BEFORE_ITS_DRIVER && w->head.jobs[job].state == MB_JOB_PENDING)
        has_driver = 0;
    mb_job_on_stop(w->head.jobs[job].state, has_driver, &news);
    for (int i = 0; i < news.n_inputs; i++)
        head_apply(w, job, news.inputs[i]);
}

void head_driver_event(struct world *w, int job, const struct mb_job_event *e)
{
    struct mb_job_news news;

    if (!w->head.jobs[job].known)
        return;
    if (e->kind != MB_JOB_EVENT_RUNNING)
        line_leave(w, job);
    mb_job_on_event(w->head.jobs[job].state, e, &news);
    if (news.stop_driver)
        runner_stop(w, job);
    for (int i = 0; i < news.n_inputs; i++)
        head_apply(w, job, news.inputs[i]);
}

static void submit(struct world *w, const struct msg *q)
{
    struct head_job *j = &w->head.jobs[q->job];
    struct msg reply = {.code = j->known ? MB_EEXIST : MB_OK};

    if (!j->known) {
        *j = (struct head_job){.known = 1, .state = MB_JOB_PENDING, .since_ms = (int)w->now_ms};
        line_add(w, q->job, 0);
        store_job(w, q->job, DONE_JOB_FIRST);
    }
    if (w->plant == PLANT_ACK_BEFORE_COMMIT)
        sim_reply(w, q, &reply);
    else
        store_reply(w, q, &reply);
}

static void stop(struct world *w, const struct msg *q)
{
    struct head_job *j = &w->head.jobs[q->job];
    struct msg reply = {.code = j->known ? MB_OK : MB_ENOENT};

    if (j->known && mb_job_is_terminal(j->state) && w->plant == PLANT_TERMINAL_OVERWRITTEN) {
        j->state = MB_JOB_STOPPED;
        store_job(w, q->job, DONE_JOB);
    }
    reply.flag = j->known && !mb_job_is_terminal(j->state);
    if (reply.flag)
        stop_job(w, q->job);
    store_reply(w, q, &reply);
}

static enum mb_job_state outside(enum mb_job_state s)
{
    return s == MB_JOB_STOPPING ? MB_JOB_RUNNING : s;
}

static void status(struct world *w, const struct msg *q)
{
    struct head_job *j = &w->head.jobs[q->job];
    struct msg reply = {.flag = j->known, .code = (int)outside(j->state)};

    if (j->known)
        mb_job_queue_seen(&j->ticket, w->now_ms);
    if (w->plant == PLANT_STATUS_BEFORE_COMMIT)
        sim_reply(w, q, &reply);
    else
        store_reply(w, q, &reply);
}

/* A piece of a follower's stream. */
static void logs(struct world *w, const struct msg *q)
{
    struct head_job *j = &w->head.jobs[q->job];
    struct msg reply = {.offset = q->offset, .flag = 0};
    uint64_t size = w->drivers[q->job].log_bytes;

    if (w->plant == PLANT_FOLLOW_RESTARTS && sim_chance(w, 20))
        reply.offset = 0;
    if (w->plant == PLANT_CLOSED_TOO_EARLY && size > q->offset)
        size--;
    if (size > reply.offset)
        reply.n = size - reply.offset < 64 ? size - reply.offset : 64;
    reply.flag = j->known && j->final && reply.offset + reply.n >= size;
    sim_reply(w, q, &reply);
}

static void put_kv(struct world *w, const struct msg *q)
{
    struct record r = {.present = 1, .value = q->code};
    struct msg reply = {.code = MB_OK};

    store_put(w, T_KV, q->list[0], &r, DONE_NOTHING, 0);
    store_reply(w, q, &reply);
}

/* ---- drivers' calls ---- */

static void add_gcs_job(struct world *w, const struct msg *q)
{
    struct record r = w->store.mem[T_GCS_JOB][q->job];
    struct msg reply = {.code = MB_OK};

    if (!r.present) {
        r = (struct record){.present = 1};
        store_put(w, T_GCS_JOB, q->job, &r, DONE_NOTHING, 0);
        if (mb_job_is_terminal(w->head.jobs[q->job].state))
            finish_gcs_job(w, q->job); /* its submission is over: so is this */
    }
    store_reply(w, q, &reply);
}

static void make_pg(struct world *w, int group, struct mb_gcs_resource *demand,
                    struct mb_gcs_bundle *bundles, struct mb_gcs_pg *pg)
{
    size_t n = (size_t)w->group_nodes[group];

    *demand = (struct mb_gcs_resource){MB_RESOURCE_GPU, w->scripts[group / MAX_GROUPS].per_node};
    *pg = (struct mb_gcs_pg){.bundles = bundles, .n_bundles = n, .strategy = MB_PG_STRICT_SPREAD};
    for (size_t i = 0; i < n; i++)
        bundles[i] = (struct mb_gcs_bundle){.resources = demand, .n_resources = 1};
    sim_pg_id(group, pg->id);
}

static void create_group(struct world *w, const struct msg *q)
{
    struct mb_gcs_resource demand;
    struct mb_gcs_bundle bundles[MAX_BUNDLES];
    struct mb_gcs_pg pg;
    struct mb_err err;
    const struct record *owner = &w->store.mem[T_GCS_JOB][q->job];
    struct msg reply = {.code = MB_OK};

    make_pg(w, q->group, &demand, bundles, &pg);
    if (!owner->present || owner->state == 1)
        reply.code = MB_ENOENT;
    else
        reply.code = mb_placement_add(w->head.placement, &pg, &err);
    pump(w);
    store_reply(w, q, &reply);
}

void head_message(struct world *w, const struct msg *m)
{
    struct msg ok = {.code = MB_OK};

    switch (m->kind) {
    case M_SUBMIT:
        submit(w, m);
        break;
    case M_STATUS:
        status(w, m);
        break;
    case M_STOP:
        stop(w, m);
        break;
    case M_LOGS:
        logs(w, m);
        break;
    case M_PUT:
        put_kv(w, m);
        break;
    case M_REGISTER:
        register_node(w, m);
        break;
    case M_SYNC:
        sync_node(w, m);
        break;
    case M_ADD_JOB:
        add_gcs_job(w, m);
        break;
    case M_CREATE:
        create_group(w, m);
        break;
    case M_WAIT:
        w->head.waits[m->job].used = 1;
        w->head.waits[m->job].request = *m;
        w->head.waits[m->job].need = w->head.group_writes + 1;
        tell_after_commit(w);
        break;
    case M_REMOVE:
        remove_group(w, m->group);
        store_reply(w, m, &ok);
        break;
    case M_ABANDONED:
    case M_FINISH:
        if (m->kind == M_ABANDONED)
            remove_group(w, m->group);
        finish_gcs_job(w, m->job);
        store_reply(w, m, &ok);
        break;
    default:
        sim_fail(w, "the head got a message of kind %d", (int)m->kind);
    }
}

/* ---- answers of nodes ---- */

void head_reply_came(struct world *w, const struct msg *q, const struct msg *reply)
{
    enum mb_place_outcome outcome = reply ? MB_PLACE_OK : MB_PLACE_FAILED;
    uint8_t id[MB_PG_ID_BYTES];
    struct head_node *n = &w->head.nodes[q->node_id];
    int is_it = reply && reply->node_id == q->node_id;

    switch (q->kind) {
    case M_RELEASE_UNUSED:
        if (q->ticket != n->channel)
            return;
        n->reconciling = 0;
        if (!reply)
            return;
        n->reconciled = 1;
        if (n->alive)
            node_up(w, q->node_id);
        break;
    case M_HEALTH:
        mb_health_result(&n->health, is_it || w->plant == PLANT_HUNG_IS_ALIVE, w->now_ms);
        return;
    case M_SECOND:
        w->unanswered[n->machine] = is_it ? 0 : w->unanswered[n->machine] + 1;
        mb_health_second(&n->health, is_it && w->plant != PLANT_SECOND_UNHEARD);
        return;
    default:
        if (q->kind == M_PREPARE && reply && !reply->flag)
            outcome = MB_PLACE_REFUSED;
        if (q->kind == M_RETURN && w->plant == PLANT_RETURN_TAKEN_FOR_DONE)
            outcome = MB_PLACE_OK;
        sim_pg_id(q->group, id);
        mb_placement_result(w->head.placement, id, q->ticket, outcome, w->now_ms);
        break;
    }
    pump(w);
}

/* ---- life ---- */

static void tick(struct world *w, int a, int b)
{
    tick_nodes(w);
    pump(w);
    line_pump(w);
    sim_at(w, head_proc(), TICK_MS, tick, a, b);
}

static void load_nodes(struct world *w)
{
    for (int id = 0; id < w->next_id; id++) {
        const struct record *r = &w->store.mem[T_NODE][id];
        struct head_node *n = &w->head.nodes[id];

        if (!r->present)
            continue;
        *n = (struct head_node){.used = 1,
                                .alive = r->state == 0,
                                .machine = r->value,
                                .reconciled = w->plant == PLANT_RECONCILE_SKIPPED};
        mb_health_init(&n->health, 1, w->now_ms);
        if (n->alive)
            node_up(w, id);
    }
}

static void load_groups(struct world *w)
{
    for (int group = 0; group < N_GROUPS; group++) {
        const struct record *r = &w->store.mem[T_GROUP][group];
        struct mb_gcs_resource demand;
        struct mb_gcs_bundle bundles[MAX_BUNDLES];
        struct mb_gcs_pg pg;
        struct mb_err err;

        if (!r->present)
            continue;
        make_pg(w, group, &demand, bundles, &pg);
        pg.state = (enum mb_pg_state)r->state;
        for (size_t i = 0; i < pg.n_bundles; i++) {
            bundles[i].has_node = r->nodes[i] >= 0;
            if (r->nodes[i] >= 0)
                sim_node_id(r->nodes[i], bundles[i].node_id);
        }
        if (mb_placement_restore(w->head.placement, &pg, &err) != MB_OK)
            sim_fail(w, "%s", err.text);
    }
}

static void adopt(struct world *w, int job)
{
    struct head_job *j = &w->head.jobs[job];
    enum mb_job_adopt found = runner_adopt(w, job);
    enum mb_job_recovery due = mb_job_recover(j->state, found);

    if (found == MB_JOB_ADOPT_RUNNING && w->plant != PLANT_RUNNING_NOT_COUNTED)
        line_adopt(w, job);
    if (w->plant == PLANT_RERUN_AFTER_RESTART)
        due = MB_JOB_RECOVER_START;
    switch (due) {
    case MB_JOB_RECOVER_STOP:
        stop_job(w, job);
        break;
    case MB_JOB_RECOVER_START:
        line_leave(w, job);
        line_add(w, job, 1);
        if (w->plant != PLANT_LINE_LOST)
            line_ready(w, job);
        break;
    case MB_JOB_RECOVER_LOST:
        head_apply(w, job, MB_JOB_LOST);
        break;
    case MB_JOB_RECOVER_WAIT:
        break;
    }
}

/* In the order in which they were submitted. */
static void load_jobs(struct world *w)
{
    int order[MAX_JOBS];

    line_order(w, order);
    for (int i = 0; i < w->n_jobs; i++) {
        int job = order[i];
        const struct record *r = &w->store.mem[T_JOB][job];
        struct head_job *j = &w->head.jobs[job];

        if (!r->present)
            continue;
        *j = (struct head_job){
            .known = 1, .state = (enum mb_job_state)r->state, .since_ms = r->value};
        if (j->state == MB_JOB_RUNNING && w->store.mem[T_STOPPING][job].present &&
            w->plant != PLANT_STOP_FORGOTTEN)
            j->state = MB_JOB_STOPPING;
        j->final = mb_job_is_terminal(j->state);
        if (!j->final)
            adopt(w, job);
        else
            finish_submission(w, job); /* the former head may have died before it did */
        if (j->final)
            stop_is_over(w, job);
    }
}

void head_start(struct world *w)
{
    memset(&w->head, 0, sizeof(w->head));
    memset(w->unanswered, 0, sizeof(w->unanswered));
    w->head.placement = mb_placement_create(sim_rnd(w));
    line_create(w);
    store_open(w);
    load_nodes(w);
    load_groups(w);
    load_jobs(w);
    pump(w);
    tick(w, 0, 0);
}

void head_crashed(struct world *w)
{
    if (!w->head.placement)
        return;
    store_crashed(w);
    mb_job_queue_destroy(w->head.queue);
    mb_placement_destroy(w->head.placement);
    w->head.placement = NULL;
}
