/*
 * Time, chance, processes and the network.
 *
 *  1. Events are a heap by time, then by order of birth. A timer belongs to a process and one life
 *     of it; when that life is over the timer is passed over.
 *  2. A message takes some milliseconds, sometimes seconds. Messages of different senders overtake
 *     each other freely, calls of one sender by some milliseconds. Across a cut link a message
 * waits, as in a TCP connection, and what waited arrives in order.
 *  3. A message to a process that died since is lost. One of a process that died may still arrive:
 *     its kernel had it. A call that was given up may still arrive, or not.
 *  4. A stream is in order. It breaks when an end dies, or after KEEPALIVE_MS of a cut link.
 *  5. A crash point ends the process in the middle of what it does: the rest of the event is gone.
 */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "tests/sim/sim.h"

enum {
    KEEPALIVE_MS = 8000,
    LATE_ONE_IN = 25,
    LATE_MS = 2500,
    OVERTAKES_MS = 20,
    CRASH_ONE_IN = 250
};

const char *const sim_plant_names[N_PLANTS] = {"NONE",
#define X(name, text) #name,
                                               SIM_PLANTS(X)
#undef X
};

const char *const sim_plant_texts[N_PLANTS] = {"",
#define X(name, text) text,
                                               SIM_PLANTS(X)
#undef X
};

/* ---- chance ---- */

uint64_t sim_rnd(struct world *w) /* splitmix64 */
{
    w->rng += 0x9e3779b97f4a7c15u;
    uint64_t z = w->rng;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

int sim_below(struct world *w, int n)
{
    return (int)(sim_rnd(w) % (uint64_t)n);
}

int sim_chance(struct world *w, int one_in)
{
    return w->faults_on && sim_below(w, one_in) == 0;
}

/* ---- words ---- */

void sim_trace(struct world *w, const char *fmt, ...)
{
    va_list ap;

    if (!w->trace)
        return;
    va_start(ap, fmt);
    printf("%7llu ms  ", (unsigned long long)w->now_ms);
    vprintf(fmt, ap);
    putchar('\n');
    va_end(ap);
}

void sim_fail(struct world *w, const char *fmt, ...)
{
    va_list ap;
    int n = snprintf(w->why, sizeof(w->why), "at %llu ms: ", (unsigned long long)w->now_ms);

    va_start(ap, fmt);
    vsnprintf(w->why + n, sizeof(w->why) - (size_t)n, fmt, ap);
    va_end(ap);
    sim_trace(w, "BROKEN: %s", w->why);
    longjmp(w->failed, 1);
}

void sim_out_of_room(struct world *w, int max, const char *what)
{
    w->is_out_of_room = 1;
    sim_fail(w, "more than %d %s", max, what);
}

/* ---- ids ---- */

void sim_pg_id(int group, uint8_t out[MB_PG_ID_BYTES])
{
    memset(out, 0, MB_PG_ID_BYTES);
    out[0] = (uint8_t)(group + 1);
}

void sim_pg(int group, struct mb_pg_id *out)
{
    sim_pg_id(group, out->bytes);
}

void sim_node_id(int id, uint8_t out[MB_NODE_ID_BYTES])
{
    memset(out, 0, MB_NODE_ID_BYTES);
    out[0] = (uint8_t)(id + 1);
}

int sim_node_number(const uint8_t id[MB_NODE_ID_BYTES])
{
    return id[0] - 1;
}

uint64_t sim_crc(int job, int64_t iteration, int rank, uint32_t attempt)
{
    return 1 + (uint64_t)job * 1000000 + (uint64_t)iteration * 1000 + (uint64_t)rank * 10 + attempt;
}

/* ---- events ---- */

static int earlier(const struct event *a, const struct event *b)
{
    return a->at_ms != b->at_ms ? a->at_ms < b->at_ms : a->order < b->order;
}

static void push(struct world *w, const struct event *e)
{
    size_t i = w->n_heap++;

    if (w->n_heap > MAX_EVENTS)
        sim_out_of_room(w, MAX_EVENTS, "events wait");
    while (i > 0 && earlier(e, &w->heap[(i - 1) / 2])) {
        w->heap[i] = w->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    w->heap[i] = *e;
}

static struct event pop(struct world *w)
{
    struct event top = w->heap[0], last = w->heap[--w->n_heap];
    size_t i = 0;

    for (;;) {
        size_t k = 2 * i + 1;
        if (k >= w->n_heap)
            break;
        if (k + 1 < w->n_heap && earlier(&w->heap[k + 1], &w->heap[k]))
            k++;
        if (!earlier(&w->heap[k], &last))
            break;
        w->heap[i] = w->heap[k];
        i = k;
    }
    w->heap[i] = last;
    return top;
}

void sim_at(struct world *w, int proc, uint64_t delay_ms, sim_fn fn, int a, int b)
{
    struct event e = {.at_ms = w->now_ms + delay_ms,
                      .order = ++w->order,
                      .fn = fn,
                      .a = a,
                      .b = b,
                      .proc = proc,
                      .inc = proc >= 0 ? w->procs[proc].inc : 0,
                      .msg = -1};
    push(w, &e);
}

/* ---- processes ---- */

int sim_agent_proc(int machine)
{
    return PROC_AGENT + machine;
}

int sim_driver_proc(int job)
{
    return PROC_DRIVER + job;
}

void sim_start_proc(struct world *w, int proc)
{
    w->procs[proc].up = 1;
    w->procs[proc].inc++;
    memset(w->link_last_ms[proc], 0, sizeof(w->link_last_ms[proc]));
}

void sim_kill_proc(struct world *w, int proc)
{
    if (!w->procs[proc].up)
        return;
    w->procs[proc].up = 0;
    w->procs[proc].inc++;
    for (int i = 0; i < MAX_CALLS; i++)
        if (w->calls[i].request.from == proc)
            w->calls[i].id = 0;
    if (proc < PROC_DRIVER)
        agent_crashed(w, proc);
    else if (proc < PROC_CLIENT)
        driver_ended(w, proc - PROC_DRIVER);
}

void sim_crash_point(struct world *w)
{
    if (w->current < 0 || w->current >= PROC_DRIVER || !w->procs[w->current].up ||
        !sim_chance(w, CRASH_ONE_IN))
        return;
    sim_trace(w, "agent %d is killed in the middle of its work", w->current);
    w->stats.crashes++;
    w->stats.faults++;
    sim_kill_proc(w, w->current);
    longjmp(w->crashed, 1);
}

/* ---- the network ---- */

int sim_is_cut(const struct world *w, int a, int b)
{
    return a != b && w->now_ms < w->cut_until_ms[a][b];
}

static int machine_of(const struct world *w, int proc)
{
    return w->procs[proc].machine;
}

static int new_msg(struct world *w, const struct msg *m)
{
    if (w->n_free_msgs == 0)
        sim_out_of_room(w, MAX_MSGS, "messages are under way");
    int slot = w->free_msgs[--w->n_free_msgs];
    w->msgs[slot] = *m;
    return slot;
}

/* A call between the head and an agent whose gRPC is held up. */
static int is_unheard(const struct world *w, const struct msg *m)
{
    int machine = m->from > m->to ? m->from : m->to; /* the head's is 0, and never deaf */

    return m->conn < 0 && machine < PROC_DRIVER && (m->from == 0 || m->to == 0) &&
           m->kind != M_SECOND && w->now_ms < w->deaf_until_ms[machine];
}

static void deliver(struct world *w, int slot, int unused);

static void push_msg(struct world *w, int slot, uint64_t at_ms)
{
    struct event e = {
        .at_ms = at_ms, .order = ++w->order, .fn = deliver, .a = slot, .proc = -1, .msg = slot};
    push(w, &e);
}

static uint64_t latency(struct world *w, int from, int to)
{
    if (machine_of(w, from) == machine_of(w, to))
        return (uint64_t)sim_below(w, 2);
    return 1 + (uint64_t)sim_below(w, sim_chance(w, LATE_ONE_IN) ? LATE_MS : 12);
}

static void post(struct world *w, struct msg *m)
{
    uint64_t at_ms = w->now_ms + latency(w, m->from, m->to);

    w->stats.messages++;
    if (m->conn >= 0) {
        uint64_t *last = &w->conns[m->conn].last_ms[m->from >= PROC_DRIVER];
        if (at_ms < *last)
            at_ms = *last;
        *last = at_ms;
        m->seq = w->conns[m->conn].sent[m->from >= PROC_DRIVER]++;
    } else if (m->kind != M_SECOND) { /* which is a connection of its own for every question */
        /* One connection: calls overtake each other only while they are handled. */
        uint64_t *last = &w->link_last_ms[m->from][m->to];
        if (at_ms + OVERTAKES_MS < *last)
            at_ms = *last - OVERTAKES_MS;
        if (*last < at_ms)
            *last = at_ms;
    }
    push_msg(w, new_msg(w, m), at_ms);
}

static void to_process(struct world *w, const struct msg *m)
{
    if (m->to < PROC_DRIVER)
        agent_message(w, m);
    else if (m->to < PROC_CLIENT)
        driver_message(w, m);
}

static void outcome(struct world *w, struct call *c, const struct msg *reply)
{
    struct msg request = c->request;

    c->id = 0;
    if (!w->procs[request.from].up)
        return;
    w->current = request.from;
    if (request.from >= PROC_CLIENT)
        client_reply_came(w, &request, reply);
    else if (request.from >= PROC_DRIVER)
        driver_reply_came(w, &request, reply);
    else if (request.to >= PROC_DRIVER)
        sim_fail(w, "an agent called a driver");
    else if (request.kind >= M_PREPARE)
        head_reply_came(w, &request, reply);
    else
        agent_reply_came(w, &request, reply);
}

static int conn_is_dead(const struct world *w, const struct msg *m)
{
    const struct conn *c = &w->conns[m->conn];

    return !c->used || c->no != m->conn_no;
}

static void deliver(struct world *w, int slot, int unused)
{
    struct msg m = w->msgs[slot];
    int a = machine_of(w, m.from), b = machine_of(w, m.to);

    (void)unused;
    if (faults_cut_off(w, a, b) && (m.conn < 0 || !conn_is_dead(w, &m))) {
        push_msg(w, slot, w->cut_until_ms[a][b]); /* in the order in which it would have arrived */
        return;
    }
    if (is_unheard(w, &m)) {
        faults_acted(w, w->deaf_number[a > b ? a : b]);
        push_msg(w, slot, w->deaf_until_ms[a > b ? a : b]);
        return;
    }
    if (m.conn >= 0 && !conn_is_dead(w, &m) && !w->conns[m.conn].is_torn &&
        m.seq != w->conns[m.conn].taken[m.from >= PROC_DRIVER]) {
        push_msg(w, slot, w->now_ms + 1); /* one before it was held up longer */
        return;
    }
    w->free_msgs[w->n_free_msgs++] = slot;
    if (m.conn >= 0 && conn_is_dead(w, &m))
        return;
    if (m.conn >= 0)
        w->conns[m.conn].taken[m.from >= PROC_DRIVER]++;
    if (!w->procs[m.to].up || w->procs[m.to].inc != m.to_inc ||
        (m.conn >= 0 && w->conns[m.conn].is_torn) ||
        (w->procs[m.from].inc != m.from_inc && sim_below(w, 2))) {
        if (m.conn >= 0)
            w->conns[m.conn].is_torn = 1;
        w->stats.lost++;
        return;
    }
    w->current = m.to;
    if (m.to == 0 && m.from < PROC_DRIVER)
        w->silent_since_ms[m.from] = 0; /* the dead are heard, too, when the network was slow */
    if (m.call && m.is_reply) {
        struct call *c = &w->calls[m.call % MAX_CALLS];
        if (c->id == m.call)
            outcome(w, c, &m);
        return;
    }
    /* The caller gave up: perhaps the request was still taken back. */
    if (m.call && w->calls[m.call % MAX_CALLS].id != m.call && sim_below(w, 2))
        return;
    if (w->trace > 1)
        sim_trace(w, "  message %d of %d to %d job %d conn %d.%u at %d+%d", (int)m.kind, m.from,
                  m.to, m.job, m.conn, m.conn_no, (int)m.offset, (int)m.n);
    to_process(w, &m);
}

/* ---- calls ---- */

static void deadline(struct world *w, int slot, int low_id)
{
    struct call *c = &w->calls[slot];

    if (c->id != 0 && (int)(c->id & 0x7fffffff) == low_id)
        outcome(w, c, NULL);
}

void sim_call(struct world *w, struct msg *m, uint64_t deadline_ms)
{
    struct call *c = NULL;

    for (int i = 0; i < MAX_CALLS && !c; i++) {
        w->next_call++;
        if (w->next_call != 0 && w->calls[w->next_call % MAX_CALLS].id == 0)
            c = &w->calls[w->next_call % MAX_CALLS];
    }
    if (!c)
        sim_out_of_room(w, MAX_CALLS, "calls are open");
    m->call = w->next_call;
    m->conn = -1;
    m->from_inc = w->procs[m->from].inc;
    m->to_inc = w->procs[m->to].inc;
    c->id = m->call;
    c->request = *m;
    sim_at(w, -1, deadline_ms, deadline, (int)(m->call % MAX_CALLS), (int)(m->call & 0x7fffffff));
    if (w->procs[m->to].up) /* else: connection refused, and the client waits for the server */
        post(w, m);
}

void sim_reply(struct world *w, const struct msg *q, struct msg *reply)
{
    reply->kind = q->kind;
    reply->from = q->to;
    reply->to = q->from;
    reply->from_inc = w->procs[q->to].inc;
    reply->to_inc = q->from_inc;
    reply->call = q->call;
    reply->is_reply = 1;
    reply->conn = -1;
    post(w, reply);
}

/* ---- streams ---- */

/* Both ends that still live hear of it; data under way is lost. */
static void break_conn(struct world *w, int conn, int tell_driver, int tell_agent)
{
    struct conn *c = &w->conns[conn];
    struct msg m = {
        .kind = M_BROKEN, .conn = conn, .conn_no = c->no, .node = c->node, .job = c->driver};
    int driver = sim_driver_proc(c->driver), agent = sim_agent_proc(c->machine);
    int saved = w->current;

    if (!c->used)
        return;
    sim_trace(w, "the stream of driver %d to machine %d breaks", c->driver, c->machine);
    c->used = 0;
    if (tell_agent && w->procs[agent].up && w->procs[agent].inc == c->agent_inc) {
        m.to = agent;
        w->current = agent;
        agent_message(w, &m);
    }
    if (tell_driver && w->procs[driver].up && w->procs[driver].inc == c->driver_inc) {
        m.to = driver;
        w->current = driver;
        driver_message(w, &m);
    }
    w->current = saved;
}

static void watch_conn(struct world *w, int conn, int no)
{
    struct conn *c = &w->conns[conn];
    int driver = sim_driver_proc(c->driver), agent = sim_agent_proc(c->machine);
    int a = machine_of(w, driver), b = c->machine;

    if (!c->used || (int)c->no != no)
        return;
    int ends_live = w->procs[driver].inc == c->driver_inc && w->procs[agent].inc == c->agent_inc;
    if (faults_cut_off(w, a, b)) {
        if (w->cut_until_ms[a][b] > w->now_ms + KEEPALIVE_MS)
            break_conn(w, conn, 1, 1);
        else
            sim_at(w, -1, w->cut_until_ms[a][b] - w->now_ms, watch_conn, conn, no);
        return;
    }
    if (!ends_live || sim_chance(w, 600)) {
        break_conn(w, conn, 1, 1);
        return;
    }
    sim_at(w, -1, 300, watch_conn, conn, no);
}

int sim_dial(struct world *w, int job, int node, int machine)
{
    int conn = -1;

    for (int i = 0; i < MAX_CONNS && conn < 0; i++)
        if (!w->conns[i].used)
            conn = i;
    if (conn < 0)
        sim_out_of_room(w, MAX_CONNS, "streams are open");
    int driver = sim_driver_proc(job), agent = sim_agent_proc(machine);
    if (!w->procs[agent].up || faults_cut_off(w, machine_of(w, driver), machine))
        return -1;
    w->conns[conn] = (struct conn){.used = 1,
                                   .no = ++w->next_conn,
                                   .driver = job,
                                   .machine = machine,
                                   .driver_inc = w->procs[driver].inc,
                                   .agent_inc = w->procs[agent].inc,
                                   .node = node,
                                   .group = w->drivers[job].group,
                                   .attempt = w->drivers[job].attempt};
    sim_at(w, -1, 300, watch_conn, conn, (int)w->next_conn);
    return conn;
}

void sim_stream_send(struct world *w, int conn, int from_driver, struct msg *m)
{
    struct conn *c = &w->conns[conn];
    int driver = sim_driver_proc(c->driver), agent = sim_agent_proc(c->machine);

    if (!c->used)
        return;
    m->conn = conn;
    m->conn_no = c->no;
    m->job = c->driver;
    m->node = c->node;
    m->attempt = c->attempt;
    m->group = c->group;
    m->from = from_driver ? driver : agent;
    m->to = from_driver ? agent : driver;
    m->from_inc = from_driver ? c->driver_inc : c->agent_inc;
    m->to_inc = from_driver ? c->agent_inc : c->driver_inc;
    m->call = 0;
    m->is_reply = 0;
    post(w, m);
}

static void close_now(struct world *w, int conn, int no)
{
    if (w->conns[conn].used && (int)w->conns[conn].no == no)
        break_conn(w, conn, 1, 1);
}

void sim_stream_close(struct world *w, int conn, int by_driver)
{
    struct conn *c = &w->conns[conn];
    uint64_t last = c->last_ms[by_driver ? 1 : 0];

    if (c->used) /* after what was sent before */
        sim_at(w, -1, (last > w->now_ms ? last - w->now_ms : 0) + 1, close_now, conn, (int)c->no);
}

/* ---- one step ---- */

int sim_step(struct world *w)
{
    if (w->n_heap == 0)
        return 0;
    struct event e = pop(w);
    if (e.at_ms > w->now_ms)
        w->now_ms = e.at_ms;
    if (e.proc >= 0 && (!w->procs[e.proc].up || w->procs[e.proc].inc != e.inc))
        return 1;
    w->current = e.proc;
    w->stats.events++;
    if (setjmp(w->crashed) == 0)
        e.fn(w, e.a, e.b);
    w->current = -1;
    return 1;
}
