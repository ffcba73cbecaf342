/*
 * The life of an attempt on a node, in two tables.
 *
 * Happy path: CREATED -launch-> LAUNCHING -workers up-> RENDEZVOUS -start-> RUNNING -all exited->
 * DRAINING -end, uploads idle-> ENDED.
 *
 *  1. A launch that fails before any process exists goes to DRAINING: there is nothing to stop.
 *  2. A failed rank leads to STOPPING at once; the supervisor has begun to end the peers already.
 *  3. Stop, End, an expired lease, removed bundles and a newer attempt all stop what runs, and mark
 *     the attempt as released; uploads of what was saved go on in DRAINING.
 *     Halt stops what runs as well, but releases nothing: a rank elsewhere may still seal what this
 *     node has to send. The driver lives, and says End when it has heard of every rank's exit.
 *     Ranks that were not spawned have no exit and nothing to send: their attempt Halt releases.
 *  4. While LAUNCHING a stop goes to STOPPING too: the shell cancels the pull, or the processes
 *     that are just appearing, and reports ALL_EXITED.
 *  5. A repeated Stop, End and so on is harmless in every later state. Anything else that the table
 *     does not know is refused by name.
 */
#include "agent/gang.h"

#include <string.h>

enum { NO = -1 };
enum {
    LEASE_MIN_MS = 1000,
    LEASE_MAX_MS = 3600000,
    CUT_OFF_MAX_MS = 600000, /* as long as agent/adrift.c waits for the head */
    SILENT_MS = 5000         /* several times as long as a driver is between two messages */
};

static const struct {
    const char *name;
    unsigned on_entry;
} states[MB_GANG_N_STATES] = {
    [MB_GANG_CREATED] = {"CREATED", 0},
    [MB_GANG_LAUNCHING] = {"LAUNCHING", MB_GANG_ACT_LAUNCH},
    [MB_GANG_RENDEZVOUS] = {"RENDEZVOUS", 0},
    [MB_GANG_RUNNING] = {"RUNNING", MB_GANG_ACT_SEND_START},
    [MB_GANG_STOPPING] = {"STOPPING", MB_GANG_ACT_STOP_RANKS},
    [MB_GANG_DRAINING] = {"DRAINING", MB_GANG_ACT_FREE_NODE},
    [MB_GANG_ENDED] = {"ENDED", MB_GANG_ACT_RELEASE},
};

/* releases: the event lets the attempt end; cause: told to people, NULL = none of its own. */
static const struct {
    const char *name;
    int releases;
    const char *cause;
} events[MB_GANG_N_EVENTS] = {
    [MB_GANG_EV_LAUNCH] = {"launch", 0, NULL},
    [MB_GANG_EV_LAUNCH_FAILED] = {"launch failed", 0, "launch failed"},
    [MB_GANG_EV_WORKERS_UP] = {"workers up", 0, NULL},
    [MB_GANG_EV_COMMANDS_UP] = {"commands up", 0, NULL},
    [MB_GANG_EV_START] = {"start", 0, NULL},
    [MB_GANG_EV_RANK_FAILED] = {"rank failed", 0, "a rank failed"},
    [MB_GANG_EV_ALL_EXITED] = {"all exited", 0, NULL},
    [MB_GANG_EV_STOP] = {"stop", 1, "stopped by the driver"},
    [MB_GANG_EV_END] = {"end", 1, "ended by the driver"},
    [MB_GANG_EV_LEASE_EXPIRED] = {"lease expired", 1, "the driver's lease ran out"},
    [MB_GANG_EV_BUNDLES_REMOVED] = {"bundles removed", 1, "the placement group was removed"},
    [MB_GANG_EV_SUPERSEDED] = {"superseded", 1, "a newer attempt took over"},
    [MB_GANG_EV_HALT] = {"halt", 0, "told to end"},
    [MB_GANG_EV_UPLOADS_BUSY] = {"uploads busy", 0, NULL},
    [MB_GANG_EV_UPLOADS_IDLE] = {"uploads idle", 0, NULL},
    [MB_GANG_EV_DRAINED] = {"drained", 0, NULL},
};

#define C MB_GANG_CREATED
#define L MB_GANG_LAUNCHING
#define V MB_GANG_RENDEZVOUS
#define R MB_GANG_RUNNING
#define S MB_GANG_STOPPING
#define D MB_GANG_DRAINING
#define E MB_GANG_ENDED

/* Columns: launch, launch failed, workers up, commands up, start, rank failed, all exited, stop,
 * end, lease expired, bundles removed, superseded, halt, uploads busy, uploads idle, drained. */
static const signed char next_state[MB_GANG_N_STATES][MB_GANG_N_EVENTS] = {
    [C] = {L, NO, NO, NO, NO, NO, NO, D, D, D, D, D, D, NO, C, NO},
    [L] = {NO, D, V, R, NO, S, D, S, S, S, S, S, S, L, L, NO},
    [V] = {NO, NO, NO, NO, R, S, D, S, S, S, S, S, S, V, V, NO},
    [R] = {NO, NO, NO, NO, R, S, D, S, S, S, S, S, S, R, R, NO},
    [S] = {NO, D, S, S, S, S, D, S, S, S, S, S, S, S, S, NO},
    [D] = {NO, D, NO, NO, D, NO, D, D, D, D, D, D, D, D, D, E},
    [E] = {NO, NO, NO, NO, NO, NO, E, E, E, E, E, E, E, NO, E, NO},
};

#undef C
#undef L
#undef V
#undef R
#undef S
#undef D
#undef E

const char *mb_gang_state_name(enum mb_gang_state s)
{
    return (unsigned)s < MB_GANG_N_STATES ? states[s].name : "?";
}

enum mb_gang_state mb_gang_state_parse(const char *name)
{
    int s = 0;

    while (s < MB_GANG_N_STATES && strcmp(states[s].name, name) != 0)
        s++;
    return (enum mb_gang_state)s;
}

const char *mb_gang_event_name(enum mb_gang_event e)
{
    return (unsigned)e < MB_GANG_N_EVENTS ? events[e].name : "?";
}

void mb_gang_init(struct mb_gang *g)
{
    *g = (struct mb_gang){.state = MB_GANG_CREATED, .cause = ""};
}

int mb_gang_has_processes(const struct mb_gang *g)
{
    return g->state >= MB_GANG_LAUNCHING && g->state <= MB_GANG_STOPPING;
}

static int move(struct mb_gang *g, enum mb_gang_event event, unsigned *actions, struct mb_err *err)
{
    int next = next_state[g->state][event];

    if (next == NO)
        return mb_err_set(err, MB_ESTATE, "%s is not possible while the gang is %s",
                          events[event].name, states[g->state].name);
    if (event == MB_GANG_EV_UPLOADS_BUSY || event == MB_GANG_EV_UPLOADS_IDLE)
        g->uploads_busy = event == MB_GANG_EV_UPLOADS_BUSY;
    if (event == MB_GANG_EV_WORKERS_UP || event == MB_GANG_EV_COMMANDS_UP)
        g->is_up = 1;
    if (events[event].releases || (event == MB_GANG_EV_HALT && !g->is_up))
        g->released = 1;
    if (events[event].cause != NULL && g->cause[0] == '\0' && g->state != MB_GANG_DRAINING)
        g->cause = events[event].cause;
    if (next != (int)g->state)
        *actions |= states[next].on_entry;
    g->state = (enum mb_gang_state)next;
    return MB_OK;
}

int mb_gang_step(struct mb_gang *g, enum mb_gang_event event, unsigned *actions, struct mb_err *err)
{
    int rc;

    *actions = 0;
    if (event == MB_GANG_EV_DRAINED)
        return mb_err_set(err, MB_ESTATE, "drained is no event from outside");
    rc = move(g, event, actions, err);
    if (rc == MB_OK && g->state == MB_GANG_DRAINING && g->released && !g->uploads_busy)
        rc = move(g, MB_GANG_EV_DRAINED, actions, err);
    return rc;
}

void mb_gang_lease(struct mb_gang *g, uint64_t lease_ms, uint64_t now_ms)
{
    if (lease_ms < LEASE_MIN_MS)
        lease_ms = LEASE_MIN_MS;
    if (lease_ms > LEASE_MAX_MS)
        lease_ms = LEASE_MAX_MS;
    g->lease_ms = lease_ms;
    g->lease_until_ms = now_ms + lease_ms;
}

void mb_gang_renew(struct mb_gang *g, uint64_t now_ms)
{
    if (g->lease_ms > 0)
        g->lease_until_ms = now_ms + g->lease_ms;
}

int mb_gang_lease_is_over(struct mb_gang *g, uint64_t now_ms)
{
    if (g->lease_ms == 0 || now_ms < g->lease_until_ms)
        return 0;
    g->lease_ms = 0;
    return 1;
}

void mb_gang_cut_off(struct mb_gang *g, uint64_t cut_off_ms)
{
    g->cut_off_ms = cut_off_ms > CUT_OFF_MAX_MS ? CUT_OFF_MAX_MS : cut_off_ms;
}

static uint64_t heard_ms(const struct mb_gang *g)
{
    return g->lease_until_ms - g->lease_ms;
}

int mb_gang_waits_cut_off(const struct mb_gang *g, uint64_t now_ms)
{
    return g->lease_ms > 0 && g->state != MB_GANG_ENDED && now_ms < heard_ms(g) + g->cut_off_ms;
}

void mb_gang_cut_is_over(struct mb_gang *g, uint64_t now_ms)
{
    if (mb_gang_waits_cut_off(g, now_ms))
        mb_gang_renew(g, now_ms);
}

void mb_gang_stream_ended(struct mb_gang *g, uint64_t now_ms)
{
    if (g->lease_ms > 0 && now_ms < heard_ms(g) + SILENT_MS)
        g->cut_off_ms = 0;
}

const char *mb_gang_invariant(const struct mb_gang *g)
{
    if ((unsigned)g->state >= MB_GANG_N_STATES)
        return "no such state";
    if (g->state == MB_GANG_ENDED && !g->released)
        return "ended without being released";
    if (g->state == MB_GANG_ENDED && g->uploads_busy)
        return "ended while something saved is not durable";
    if (g->state == MB_GANG_DRAINING && g->released && !g->uploads_busy)
        return "drained, released and not ended";
    return NULL;
}
