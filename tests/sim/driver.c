/*
 * The driver of a gang, in the order of cli/driver/driver.c and node.c, around cli/driver/state.
 *
 *  1. Own a job, create the group, wait for it, dial every node, and do what the machine says.
 *  2. A request is repeated until its deadline, so a head that restarts is waited for.
 *  3. A broken stream is dialled again until the lease is over; what was asked is asked again.
 *  4. An attempt that failed: cli/driver/restart decides about another, and whether the group
 * stays; else it is removed and another one created. cli/driver/elastic decides of how many nodes,
 * while it is waited for, too. The older attempt is told nothing more: the fence and the lease end
 * it.
 */
#include <signal.h>
#include <string.h>
#include "cli/driver/offsets.h"
#include "tests/sim/sim.h"

enum {
    REQUEST_MS = 20000,
    RELEASE_MS = 5000,
    REMOVE_MS = 60000,
    RESERVE_MS = 300000,
    ELASTIC_MS = 2000,
    AGAIN_MS = 500,
    RENEW_MS = 2000
};

static void event(struct world *w, int job, struct mb_drv_event e);
static void dial(struct world *w, int job, int node);

static struct drv_node *node_at(struct world *w, int job, int node)
{
    return &w->drivers[job].nodes[node];
}

static void happened(struct world *w, int job, enum mb_drv_event_kind kind)
{
    event(w, job, (struct mb_drv_event){.kind = kind});
}

static void exits(struct world *w, int job, int code)
{
    sim_kill_proc(w, sim_driver_proc(job));
    runner_exited(w, job, code);
}

/* ---- requests ---- */

static void ask(struct world *w, int job, enum msg_kind kind)
{
    struct msg m = {.kind = kind,
                    .from = sim_driver_proc(job),
                    .to = sim_agent_proc(0),
                    .job = job,
                    .group = w->drivers[job].group};

    sim_call(w, &m, kind == M_WAIT ? 3000 : 2000);
}

static void begin_request(struct world *w, int job, enum msg_kind kind, uint64_t within_ms)
{
    w->drivers[job].give_up_ms = w->now_ms + within_ms;
    ask(w, job, kind);
}

static void request_again(struct world *w, int job, int kind)
{
    ask(w, job, (enum msg_kind)kind);
}

static void failed(struct world *w, int job, int code)
{
    event(w, job, (struct mb_drv_event){.kind = MB_DRV_FAILED, .code = code, .text = "request"});
}

static void next_attempt(struct world *w, int job, uint64_t delay_ms);

/* ---- the group ---- */

static void wait_for_group(struct world *w, int job)
{
    uint64_t by_ms = w->drivers[job].reserve_by_ms;

    begin_request(w, job, M_WAIT, by_ms > w->now_ms ? by_ms - w->now_ms : 0);
}

static void create_group(struct world *w, int job)
{
    struct driver *d = &w->drivers[job];

    if (d->n_groups == MAX_GROUPS)
        sim_out_of_room(w, MAX_GROUPS, "groups of one job");
    if (d->n_nodes < w->scripts[job].n_nodes)
        w->stats.shrunk++;
    else if (d->n_groups > 0 && w->group_nodes[d->group] < d->n_nodes)
        w->stats.grown++;
    d->group = job * MAX_GROUPS + d->n_groups++;
    d->group_of[d->attempt - 1] = d->group;
    w->group_nodes[d->group] = d->n_nodes;
    d->reserved = 1;
    begin_request(w, job, M_CREATE, REQUEST_MS);
}

static void reserve(struct world *w, int job)
{
    struct driver *d = &w->drivers[job];
    int keeps = d->keeps_group;

    d->keeps_group = 0;
    d->reserve_by_ms = w->now_ms + RESERVE_MS;
    mb_elastic_begin(&d->elastic, d->attempt == 1, keeps, w->now_ms);
    d->n_nodes = (int)d->elastic.n_nodes;
    d->group_of[d->attempt - 1] = d->group;
    if (keeps)
        wait_for_group(w, job);
    else
        create_group(w, job);
}

static uint32_t alive(const struct world *w)
{
    uint32_t n = 0;

    for (int i = 0; i < w->next_id; i++)
        n += w->head.nodes[i].used && w->head.nodes[i].alive;
    return n;
}

/* What the head would say, or, while it is away, what is known to live. */
static uint32_t nodes_there(struct world *w, int job, int *is_guess)
{
    uint8_t id[MB_PG_ID_BYTES];

    sim_pg_id(w->drivers[job].group, id);
    *is_guess = w->head.placement == NULL || sim_below(w, 4) == 0; /* a stock head is one, too */
    if (!*is_guess)
        return (uint32_t)mb_placement_nodes_for(w->head.placement, id);
    return alive(w);
}

/* 1: another size is asked for. The last group numbers are left to attempts. */
static int another_size(struct world *w, int job)
{
    struct driver *d = &w->drivers[job];
    int is_guess;
    uint32_t n = nodes_there(w, job, &is_guess);

    if (mb_drv_phase(d->state) != MB_DRV_RESERVE || d->n_groups > MAX_GROUPS - MAX_ATTEMPTS)
        return 0;
    if ((int)mb_elastic_look(&d->elastic, n, is_guess, w->now_ms) == d->n_nodes)
        return 0;
    sim_trace(w, "driver %d: %u nodes are there, asking for %u instead of %d", job, n,
              d->elastic.n_nodes, d->n_nodes);
    d->is_resizing = 1;
    begin_request(w, job, M_REMOVE, REQUEST_MS);
    return 1;
}

static void on_removed(struct world *w, int job, int is_done)
{
    struct driver *d = &w->drivers[job];

    if (d->is_resizing) {
        d->is_resizing = 0;
        if (mb_drv_phase(d->state) != MB_DRV_RESERVE)
            return; /* the end of the attempt removes it once more */
        if (is_done) {
            d->n_nodes = (int)d->elastic.n_nodes;
            create_group(w, job);
        } else {
            d->elastic.n_nodes = (uint32_t)d->n_nodes;
            wait_for_group(w, job);
        }
    } else if (d->again) {
        d->again = 0;
        next_attempt(w, job, d->next_delay_ms);
    } else {
        begin_request(w, job, M_FINISH, RELEASE_MS);
    }
}

void driver_reply_came(struct world *w, const struct msg *q, const struct msg *reply)
{
    struct driver *d = &w->drivers[q->job];
    enum mb_drv_phase phase = mb_drv_phase(d->state);
    int releasing = q->kind == M_REMOVE || q->kind == M_FINISH;

    if (!reply && w->now_ms < d->give_up_ms && (releasing || phase < MB_DRV_DIAL)) {
        if (q->kind == M_WAIT && another_size(w, q->job))
            return;
        sim_at(w, sim_driver_proc(q->job), AGAIN_MS, request_again, q->job, (int)q->kind);
        return;
    }
    if (q->kind == M_REMOVE) {
        on_removed(w, q->job, reply != NULL);
        return;
    }
    if (q->kind == M_FINISH) {
        happened(w, q->job, MB_DRV_RELEASED);
        return;
    }
    if (!reply || reply->code != MB_OK) {
        if (phase < MB_DRV_DIAL)
            failed(w, q->job, reply ? reply->code : MB_ETIMEOUT);
        return;
    }
    switch (q->kind) {
    case M_ADD_JOB:
        happened(w, q->job, MB_DRV_OWNED);
        break;
    case M_CREATE:
        if (phase == MB_DRV_RESERVE)
            wait_for_group(w, q->job);
        break;
    default:
        if (phase != MB_DRV_RESERVE)
            break;
        for (int i = 0; i < d->n_nodes; i++)
            *node_at(w, q->job, i) =
                (struct drv_node){.machine = w->id_machine[reply->list[i]], .conn = -1};
        event(w, q->job,
              (struct mb_drv_event){.kind = MB_DRV_RESERVED, .n_nodes = (uint32_t)d->n_nodes});
        break;
    }
}

/* ---- streams ---- */

static int over(struct world *w, int job, int node)
{
    return !w->procs[sim_driver_proc(job)].up || !w->drivers[job].state ||
           mb_drv_node_ended(w->drivers[job].state, (uint32_t)node);
}

static void redial(struct world *w, int packed, int attempt)
{
    if ((int)w->drivers[packed / MAX_BUNDLES].attempt == attempt)
        dial(w, packed / MAX_BUNDLES, packed % MAX_BUNDLES);
}

static void node_event(struct world *w, int job, int node, enum mb_drv_event_kind kind, int code)
{
    const struct driver *d = &w->drivers[job];

    if (kind == MB_DRV_NODE_LOST)
        w->given_up[node_at(w, job, node)->machine][job * MAX_ATTEMPTS + (int)d->attempt - 1] = 1;
    event(
        w, job,
        (struct mb_drv_event){.kind = kind, .node = (uint32_t)node, .code = code, .text = "node"});
}

static void schedule_redial(struct world *w, int job, int node)
{
    struct drv_node *n = node_at(w, job, node);

    if (n->silent_since_ms == 0)
        n->silent_since_ms = w->now_ms;
    if (w->now_ms - n->silent_since_ms >= LEASE_MS) {
        node_event(w, job, node, MB_DRV_NODE_LOST, MB_EUNAVAIL);
        return;
    }
    n->tries++;
    sim_at(w, sim_driver_proc(job), 100 + (uint64_t)sim_below(w, n->tries < 4 ? 300 : 1500), redial,
           job * MAX_BUNDLES + node, (int)w->drivers[job].attempt);
}

static void say(struct world *w, int job, int node, enum msg_kind kind)
{
    struct msg m = {.kind = kind};

    if (node_at(w, job, node)->conn >= 0)
        sim_stream_send(w, node_at(w, job, node)->conn, 1, &m);
}

/* As cli/driver/node.c: who ends in good order is let go by End alone. */
static enum msg_kind stop_kind(const struct world *w, int job)
{
    return mb_drv_ends_in_order(w->drivers[job].state) ? M_DRV_HALT : M_DRV_STOP;
}

/* Planted: where the head has placed the bundle now. */
static void follow_bundle(struct world *w, int job, struct drv_node *n, int node)
{
    uint8_t id[MB_PG_ID_BYTES];
    const struct mb_gcs_pg *pg = NULL;

    sim_pg_id(w->drivers[job].group, id);
    if (w->head.placement)
        pg = mb_placement_get(w->head.placement, id, NULL);
    if (!pg || pg->state != MB_PG_CREATED)
        return;
    int machine = w->id_machine[sim_node_number(pg->bundles[node].node_id)];
    if (machine != n->machine)
        n->heard = 0; /* the launch is to go there, too */
    n->machine = machine;
}

static void dial(struct world *w, int job, int node)
{
    struct driver *d = &w->drivers[job];
    struct drv_node *n = node_at(w, job, node);
    struct msg m = {.kind = M_HELLO};
    int per_node = w->scripts[job].per_node;

    if (over(w, job, node) || n->conn >= 0)
        return;
    n->hello = 0;
    if (w->plant == PLANT_FOLLOWS_THE_BUNDLE && n->launched)
        follow_bundle(w, job, n, node);
    n->conn = sim_dial(w, job, node, n->machine);
    if (n->conn < 0) {
        schedule_redial(w, job, node);
        return;
    }
    for (int i = 0; i < per_node; i++)
        m.list[i] = (int)d->next_offset[node * per_node + i];
    sim_stream_send(w, n->conn, 1, &m);
}

/* What became durable last may not have been heard of; then the driver has to call it a failure. */
static void last_words_lost(struct world *w, int job)
{
    if (mb_drv_open(w->drivers[job].state, -1) >= 0)
        w->scripts[job].harmed = 1;
}

static void on_hello_reply(struct world *w, int job, int node, const struct msg *m)
{
    struct drv_node *n = node_at(w, job, node);

    n->hello = 1;
    n->silent_since_ms = 0;
    n->tries = 0;
    enum mb_drv_dialled then =
        mb_drv_dialled(m->flag, n->launched, n->heard, n->stop_asked || n->end_asked);
    if (then == MB_DRV_GANG_LOST)
        w->scripts[job].harmed = 1;
    if ((then == MB_DRV_HAS_ENDED && w->plant == PLANT_ENDED_IS_LOST) ||
        (then == MB_DRV_LAUNCH_AGAIN && w->plant == PLANT_LAUNCH_ONCE))
        then = MB_DRV_GANG_LOST;
    switch (then) {
    case MB_DRV_GANG_LOST:
        node_event(w, job, node, MB_DRV_NODE_LOST, MB_EUNAVAIL);
        return;
    case MB_DRV_HAS_ENDED:
        last_words_lost(w, job);
        say(w, job, node, M_DRV_END);
        node_event(w, job, node, MB_DRV_NODE_ENDED, 0);
        return;
    case MB_DRV_LAUNCH_AGAIN:
        say(w, job, node, M_LAUNCH);
        break;
    case MB_DRV_GOES_ON:
        break;
    }
    if (n->stop_asked)
        say(w, job, node, stop_kind(w, job));
    if (n->end_asked)
        say(w, job, node, M_DRV_END);
    if (n->started)
        say(w, job, node, M_START);
    node_event(w, job, node, MB_DRV_HELLO, 0);
}

static void on_log(struct world *w, int job, const struct msg *m)
{
    uint64_t missing, *next = &w->drivers[job].next_offset[m->rank];

    mb_drv_known_bytes(next, m->offset, (size_t)m->n, &missing);
    sim_check(w, missing == 0, "job %d: %d bytes of the log of rank %d never came", job,
              (int)missing, m->rank);
    const struct supervisor *s = NULL;
    int machine = w->conns[m->conn].machine;
    s = &w->machines[machine].disk.sups[job * MAX_ATTEMPTS + (int)m->attempt - 1];
    uint64_t size = s->ranks[m->rank % w->scripts[job].per_node].log_bytes;
    sim_check(w, m->offset + m->n <= size, "job %d: rank %d sent log bytes it never wrote", job,
              m->rank);
    sim_check(w, m->offset == m->ticket, "job %d: log bytes of rank %d are numbered anew", job,
              m->rank);
}

static void on_broken(struct world *w, int job, int node)
{
    node_at(w, job, node)->conn = -1;
    if (!over(w, job, node))
        schedule_redial(w, job, node);
}

static void on_refused(struct world *w, int job, int node, int code)
{
    struct drv_node *n = node_at(w, job, node);

    n->conn = -1;
    if (over(w, job, node))
        return;
    int launched = n->launched;
    if (mb_drv_dialled(0, launched, n->heard, n->stop_asked || n->end_asked) == MB_DRV_HAS_ENDED &&
        w->plant != PLANT_ENDED_IS_LOST) {
        last_words_lost(w, job);
        node_event(w, job, node, MB_DRV_NODE_ENDED, 0);
        return;
    }
    node_event(w, job, node, launched ? MB_DRV_NODE_LOST : MB_DRV_NODE_FAILED, code);
    if (!over(w, job, node) && !launched)
        node_event(w, job, node, MB_DRV_NODE_ENDED, 0);
}

void driver_message(struct world *w, const struct msg *m)
{
    struct driver *d = &w->drivers[m->job];
    struct drv_node *n = node_at(w, m->job, m->node);
    struct mb_drv_event e = {
        .node = (uint32_t)m->node, .rank = (uint32_t)m->rank, .iteration = m->iteration};

    if (n->conn != m->conn || !d->state)
        return;
    switch (m->kind) {
    case M_BROKEN:
        on_broken(w, m->job, m->node);
        return;
    case M_REFUSED:
        on_refused(w, m->job, m->node, m->code);
        return;
    case M_HELLO_REPLY:
        on_hello_reply(w, m->job, m->node, m);
        return;
    case M_LOG:
        on_log(w, m->job, m);
        return;
    case M_LAUNCHED:
        n->heard = 1;
        e.kind = MB_DRV_LAUNCHED;
        break;
    case M_ENDPOINT:
        e.kind = MB_DRV_ENDPOINT;
        break;
    case M_RANK_EXIT:
        e.kind = MB_DRV_RANK_EXIT;
        e.exit_code = m->code;
        e.signal = m->signal;
        e.text = m->flag ? "ended because another rank failed" : NULL;
        break;
    case M_SAVED:
        e.kind = MB_DRV_SAVED;
        break;
    case M_UPLOAD:
        e.kind = m->code == MB_OK || w->plant == PLANT_GIVEN_UP_IS_DURABLE ? MB_DRV_COMMITTED
                                                                           : MB_DRV_UPLOAD_FAILED;
        e.text = "upload";
        break;
    case M_FAILURE:
        e.kind = MB_DRV_NODE_FAILED;
        e.code = m->code;
        break;
    case M_ENDED:
        e.kind = MB_DRV_NODE_ENDED;
        n->said_ended = 1;
        break;
    default:
        sim_fail(w, "a driver got a message of kind %d", (int)m->kind);
    }
    event(w, m->job, e);
}

/* ---- actions ---- */

static void on_nodes(struct world *w, int job, int actions)
{
    for (int i = 0; i < w->drivers[job].n_nodes; i++) {
        struct drv_node *n = node_at(w, job, i);

        if (mb_drv_phase(w->drivers[job].state) < MB_DRV_DIAL || over(w, job, i))
            continue;
        if (actions & MB_DRV_DO_DIAL)
            dial(w, job, i);
        if (actions & MB_DRV_DO_LAUNCH) {
            w->has_launched |= 1u << job;
            n->launched = 1;
            if (n->hello)
                say(w, job, i, M_LAUNCH);
        }
        if (actions & MB_DRV_DO_START) {
            n->started = 1;
            say(w, job, i, M_START);
        }
        if (actions & MB_DRV_DO_STOP) {
            n->stop_asked = 1;
            if (n->hello)
                say(w, job, i, stop_kind(w, job));
        }
        if (actions & MB_DRV_DO_END) {
            n->end_asked = 1;
            if (n->hello)
                say(w, job, i, M_DRV_END);
        }
    }
}

static void release(struct world *w, int job)
{
    struct driver *d = &w->drivers[job];
    struct mb_failure f = mb_drv_failure(d->state);
    struct mb_restart_decision next = {0};

    if (f.kind != MB_FAILURE_NONE && !d->interrupted) {
        f.iteration = f.saved = mb_drv_saved(d->state);
        f.ran_ms = 1000;
        mb_restart_decide(&d->restart, &f, sim_rnd(w), &next);
    }
    if (next.again && d->attempt < MAX_ATTEMPTS) {
        d->keeps_group = next.keep_group && d->reserved && mb_elastic_keeps(&d->elastic, alive(w));
        if (d->keeps_group) {
            next_attempt(w, job, next.delay_ms);
            return;
        }
        d->again = 1;
        d->next_delay_ms = next.delay_ms;
        begin_request(w, job, M_REMOVE, REMOVE_MS);
        return;
    }
    d->releasing = 1;
    begin_request(w, job, d->reserved ? M_REMOVE : M_FINISH, RELEASE_MS);
}

static void owned_already(struct world *w, int job, int unused)
{
    (void)unused;
    happened(w, job, MB_DRV_OWNED);
}

static int is_in_store(struct world *w, int job, int64_t iteration)
{
    const struct driver *d = &w->drivers[job];
    const char *text = w->bucket.jobs[job].manifest[iteration];
    struct mb_manifest m = {0};
    struct mb_err err;
    int yes;

    if (!text || w->bucket.jobs[job].latest < iteration ||
        mb_manifest_decode(text, strlen(text), "manifest", &m, &err) != MB_OK)
        return 0;
    yes = m.attempt == d->attempt && sim_below(w, 20) > 0; /* or it does not answer */
    mb_manifest_close(&m);
    return yes;
}

/* The store's answer, as cli/driver/durable.c reads it. */
static void store_says(struct world *w, int job, int unused)
{
    const struct driver *d = &w->drivers[job];
    uint32_t attempt = d->attempt;

    (void)unused;
    if (!d->state || mb_drv_phase(d->state) != MB_DRV_END)
        return;
    for (int64_t it = -1; d->state && d->attempt == attempt;) { /* what is told may end it */
        it = mb_drv_open(d->state, it);
        if (it < 0)
            break;
        if (is_in_store(w, job, it))
            event(w, job, (struct mb_drv_event){.kind = MB_DRV_COMMITTED, .iteration = it});
    }
    if (d->state && d->attempt == attempt)
        event(w, job, (struct mb_drv_event){.kind = MB_DRV_STORE_SAID});
}

/* Planted: every node has ended, though none said so. Each of them once: to every node that ends
 * the machine answers END for those that have not, which comes back here. */
static void take_for_ended(struct world *w, int job, enum mb_drv_phase phase)
{
    const struct driver *d = &w->drivers[job];

    for (int i = 0; i < d->n_nodes && mb_drv_phase(d->state) == phase; i++)
        if (!mb_drv_node_ended(d->state, (uint32_t)i))
            node_event(w, job, i, MB_DRV_NODE_ENDED, 0);
}

static void event(struct world *w, int job, struct mb_drv_event e)
{
    struct driver *d = &w->drivers[job];
    enum mb_drv_phase before;
    int actions;

    if (!d->state)
        return;
    before = mb_drv_phase(d->state);
    actions = mb_drv_step(d->state, &e);
    if (w->trace > 1)
        sim_trace(w, "  driver %d: %s in %s", job, mb_drv_event_name(e.kind),
                  mb_drv_phase_name(before));
    sim_check(w, actions >= 0, "job %d: event %s does not belong into phase %s", job,
              mb_drv_event_name(e.kind), mb_drv_phase_name(before));
    if (mb_drv_phase(d->state) != before)
        sim_trace(w, "driver %d attempt %u: %s -> %s (%s) %s", job, d->attempt,
                  mb_drv_phase_name(before), mb_drv_phase_name(mb_drv_phase(d->state)),
                  mb_drv_event_name(e.kind), mb_drv_verdict(d->state));
    if ((actions & MB_DRV_DO_OWN) && d->attempt == 1)
        begin_request(w, job, M_ADD_JOB, REQUEST_MS);
    else if (actions & MB_DRV_DO_OWN)
        sim_at(w, sim_driver_proc(job), 0, owned_already, job, 0);
    if (actions & MB_DRV_DO_RESERVE)
        reserve(w, job);
    on_nodes(w, job, actions);
    if ((actions & MB_DRV_DO_END) && w->plant == PLANT_SUCCESS_TOO_EARLY)
        take_for_ended(w, job, MB_DRV_END);
    if ((actions & MB_DRV_DO_STOP) && w->plant == PLANT_ENDED_WHEN_ASKED)
        take_for_ended(w, job, MB_DRV_STOPPING);
    if (actions & MB_DRV_DO_ASK_STORE)
        sim_at(w, sim_driver_proc(job), 1 + (uint64_t)sim_below(w, 2000), store_says, job, 0);
    if (actions & MB_DRV_DO_RELEASE)
        release(w, job);
    if (actions & MB_DRV_DO_FINISH) {
        if (mb_drv_exit_status(d->state) == 0)
            check_success(w, job);
        exits(w, job, mb_drv_exit_status(d->state));
    }
}

/* ---- life ---- */

static void new_machine(struct world *w, int job, int is_again)
{
    struct driver *d = &w->drivers[job];
    const struct job_script *s = &w->scripts[job];
    struct mb_drv_config config = {.n_nodes = (uint32_t)s->n_nodes,
                                   .ranks_per_node = (uint32_t)s->per_node,
                                   .is_worker = 1,
                                   .has_url = w->plant != PLANT_SUCCESS_TOO_EARLY,
                                   .is_again = is_again,
                                   .committed = is_again ? mb_drv_committed(d->state) : -1};

    mb_drv_destroy(d->state);
    d->state = mb_drv_create(&config);
    d->attempt++;
    memset(d->next_offset, 0, sizeof(d->next_offset));
    for (int i = 0; i < MAX_BUNDLES; i++)
        d->nodes[i].conn = -1;
}

static void pause_is_over(struct world *w, int job, int unused)
{
    (void)unused;
    happened(w, job, MB_DRV_PAUSED);
}

/* What the last attempt had open is let go. */
static void next_attempt(struct world *w, int job, uint64_t delay_ms)
{
    struct driver *d = &w->drivers[job];

    for (int i = 0; i < MAX_BUNDLES; i++)
        if (d->nodes[i].conn >= 0)
            sim_stream_close(w, d->nodes[i].conn, 1);
    w->stats.restarts++;
    new_machine(w, job, 1);
    sim_trace(w, "driver %d: attempt %u", job, d->attempt);
    sim_at(w, sim_driver_proc(job), delay_ms, pause_is_over, job, 0);
}

static void tick(struct world *w, int job, int unused)
{
    struct driver *d = &w->drivers[job];

    for (int i = 0; i < d->n_nodes; i++)
        if (d->nodes[i].conn >= 0 && d->nodes[i].hello && !over(w, job, i))
            say(w, job, i, M_RENEW);
    sim_at(w, sim_driver_proc(job), RENEW_MS, tick, job, unused);
}

static void connected(struct world *w, int job, int unused)
{
    (void)unused;
    happened(w, job, MB_DRV_CONNECTED);
}

void driver_begin(struct world *w, int job)
{
    const struct job_script *s = &w->scripts[job];
    struct driver *d = &w->drivers[job];

    d->attempt = 0;
    d->group = job * MAX_GROUPS;
    d->n_groups = 0;
    d->restart = (struct mb_restart){.max_restarts = (uint32_t)s->max_restarts, .delay_ms = 500};
    d->elastic = (struct mb_elastic){
        .min_nodes = (uint32_t)s->min_nodes,
        .max_nodes = (uint32_t)s->n_nodes,
        .ranks_per_node = (uint32_t)s->per_node,
        .micro_batch = 1,
        .wait_ms = ELASTIC_MS,
        .global_batch = w->plant == PLANT_BATCH_DOES_NOT_DIVIDE ? 0 : (uint64_t)s->global_batch};
    d->n_nodes = s->n_nodes;
    new_machine(w, job, 0);
    sim_at(w, sim_driver_proc(job), 5 + (uint64_t)sim_below(w, 30), connected, job, 0);
    sim_at(w, sim_driver_proc(job), RENEW_MS, tick, job, 0);
}

void driver_ended(struct world *w, int job)
{
    struct driver *d = &w->drivers[job];

    d->alive = 0;
    d->dead_at_ms = w->now_ms;
    if (w->trace)
        sim_trace(w, "driver %d is gone", job);
}

int driver_ghost(struct world *w, int job, int machine)
{
    int conn = sim_dial(w, job, 0, machine);
    struct msg m = {.kind = M_HELLO};

    if (conn < 0)
        return 0;
    w->conns[conn].attempt--;
    w->conns[conn].group = w->drivers[job].group_of[w->conns[conn].attempt - 1];
    sim_stream_send(w, conn, 1, &m);
    sim_stream_close(w, conn, 1);
    return 1;
}

void driver_signal(struct world *w, int job, int sig)
{
    struct driver *d = &w->drivers[job];

    if (!d->alive || d->interrupted)
        return;
    d->interrupted = 1;
    if (mb_drv_phase(d->state) < MB_DRV_RELEASE)
        event(w, job, (struct mb_drv_event){.kind = MB_DRV_INTERRUPTED, .signal = sig});
}
