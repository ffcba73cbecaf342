/*
 * Happy path, one event a line:
 *  1. CONNECTED: own a job. OWNED: reserve. RESERVED: dial. HELLO from all: launch.
 *  2. LAUNCHED from all: workers go to RENDEZVOUS, other commands straight to RUN.
 *  3. ENDPOINT from all ranks: start. Every RANK_EXIT with 0: end. NODE_ENDED from all: release.
 *  4. RELEASED: finish.
 * Failure paths:
 *  5. A rank exits otherwise, a node fails or is lost, a request fails: the verdict is set once.
 *     Before anything was launched: release. After: stop every node, then go on at 3.
 *  6. INTERRUPTED, or a node that gives the gang up: the same way, but the ranks may save first.
 *     A worker that gave up because a peer went away is an echo: it is the verdict only if no rank
 *     with a reason of its own is heard of while the gang stops.
 *     Of other programs only the verdict is replaced, by a rank that somebody killed.
 *  7. DEADLINE: workers agree among themselves on the iteration that they save and leave with, so
 *     nothing is sent; others are stopped everywhere. What ends by that is no failure. It comes
 * with a code when the time was over before the ranks had saved: that is the verdict.
 *  8. A save that is given up stops nobody: it is the verdict of a gang that ends well otherwise,
 *     and a gang that fails is started again all the same.
 *  9. At the end something saved is not known to be committed: the store is asked, since the word
 *     of it may be lost. It is not there: that is the verdict.
 */
#include "cli/driver/state.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "cli/driver/saves.h"

enum {
    EXIT_RANK_FAILED = 1,
    EXIT_USAGE = 2 /* a worker's, of a command line that argparse would refuse; the gang's, too */
};

struct node {
    int64_t saved; /* of this attempt, -1: nothing */
    unsigned hello : 1;
    unsigned launched : 1;
    unsigned ended : 1;
    unsigned lost : 1;
};

struct rank {
    unsigned endpoint : 1;
    unsigned exited : 1;
};

struct mb_drv {
    struct mb_drv_config config;
    enum mb_drv_phase phase;
    struct node *nodes; /* [n_nodes] */
    struct rank *ranks; /* [n_nodes * ranks_per_node], rank = node * ranks_per_node + local rank */
    int64_t saved;
    int64_t committed;
    struct mb_drv_saves *saves; /* of this attempt */
    int exit_status;
    int store_asked, store_said;
    int in_order;    /* the verdict is no failure of a rank: its peers can finish their step */
    int at_deadline; /* ranks end because of it: a stop is no failure */
    int is_echo;     /* the verdict is that of a rank that lost a peer */
    struct mb_failure failure;
    unsigned verdict_number;
    char verdict[MB_ERR_TEXT_MAX];
    int64_t lost_iteration;
    char upload_lost[MB_ERR_TEXT_MAX]; /* why it was given up, the first that was; "": none */
};

static const char *const phase_names[MB_DRV_N_PHASES] = {
    "connect",    "pause", "own",      "reserve", "dial",    "launch",
    "rendezvous", "run",   "stopping", "end",     "release", "over",
};

static const char *const event_names[MB_DRV_N_EVENTS] = {
    "connected",     "paused",      "owned",     "reserved",   "hello",
    "launched",      "endpoint",    "rank-exit", "saved",      "committed",
    "upload-failed", "node-failed", "node-lost", "node-ended", "failed",
    "interrupted",   "released",    "deadline",  "store-said",
};

#define P(phase) (1u << MB_DRV_##phase)
#define P_GANG   (P(DIAL) | P(LAUNCH) | P(RENDEZVOUS) | P(RUN) | P(STOPPING) | P(END) | P(RELEASE))

/* event -> phases that know it. Reports of a node may come late, after the driver decided to end.
 */
static const unsigned legal[MB_DRV_N_EVENTS] = {
    [MB_DRV_CONNECTED] = P(CONNECT),
    [MB_DRV_PAUSED] = P(PAUSE) | P(RELEASE),
    [MB_DRV_OWNED] = P(OWN) | P(RELEASE),
    [MB_DRV_RESERVED] = P(RESERVE) | P(RELEASE),
    [MB_DRV_HELLO] = P_GANG,
    [MB_DRV_LAUNCHED] = P_GANG,
    [MB_DRV_ENDPOINT] = P_GANG,
    [MB_DRV_RANK_EXIT] = P_GANG,
    [MB_DRV_SAVED] = P_GANG,
    [MB_DRV_COMMITTED] = P_GANG,
    [MB_DRV_UPLOAD_FAILED] = P_GANG,
    [MB_DRV_NODE_FAILED] = P_GANG,
    [MB_DRV_NODE_LOST] = P_GANG,
    [MB_DRV_NODE_ENDED] = P_GANG,
    [MB_DRV_FAILED] = ~0u,
    [MB_DRV_INTERRUPTED] = ~0u,
    [MB_DRV_RELEASED] = P(RELEASE),
    [MB_DRV_DEADLINE] = P_GANG,
    [MB_DRV_STORE_SAID] = P(END) | P(RELEASE), /* a node may have said it meanwhile */
};

enum mb_drv_dialled mb_drv_dialled(int runs, int asked, int heard, int let_go)
{
    if (runs || !asked)
        return MB_DRV_GOES_ON;
    if (let_go) /* an attempt that was never launched there still says Ended by itself */
        return heard ? MB_DRV_HAS_ENDED : MB_DRV_GOES_ON;
    return heard ? MB_DRV_GANG_LOST : MB_DRV_LAUNCH_AGAIN;
}

struct mb_drv *mb_drv_create(const struct mb_drv_config *config)
{
    struct mb_drv *d = mb_calloc(1, sizeof(*d));

    if (!d)
        return NULL;
    d->config = *config;
    d->phase = config->is_again ? MB_DRV_PAUSE : MB_DRV_CONNECT;
    d->saved = d->committed = config->is_again ? config->committed : -1;
    d->nodes = mb_calloc(config->n_nodes, sizeof(*d->nodes));
    d->ranks = mb_calloc((size_t)config->n_nodes * config->ranks_per_node, sizeof(*d->ranks));
    d->saves = mb_drv_saves_create();
    if (!d->nodes || !d->ranks || !d->saves) {
        mb_drv_destroy(d);
        return NULL;
    }
    for (uint32_t i = 0; i < config->n_nodes; i++)
        d->nodes[i].saved = -1;
    return d;
}

void mb_drv_destroy(struct mb_drv *d)
{
    if (!d)
        return;
    mb_drv_saves_destroy(d->saves);
    mb_free(d->nodes);
    mb_free(d->ranks);
    mb_free(d);
}

static uint32_t n_ranks(const struct mb_drv *d)
{
    return d->config.n_nodes * d->config.ranks_per_node;
}

static void set_verdict(struct mb_drv *d, int exit_status, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

static void set_verdict(struct mb_drv *d, int exit_status, const char *fmt, ...)
{
    va_list ap;

    if (d->exit_status)
        return;
    d->exit_status = exit_status;
    d->verdict_number++;
    va_start(ap, fmt);
    vsnprintf(d->verdict, sizeof(d->verdict), fmt, ap);
    va_end(ap);
}

static int all_nodes(const struct mb_drv *d, int (*test)(const struct node *))
{
    for (uint32_t i = 0; i < d->config.n_nodes; i++)
        if (!test(&d->nodes[i]))
            return 0;
    return 1;
}

static int node_hello(const struct node *n)
{
    return n->hello;
}

static int node_launched(const struct node *n)
{
    return n->launched;
}

static int node_ended(const struct node *n)
{
    return n->ended;
}

static int all_ranks_exited(const struct mb_drv *d)
{
    for (uint32_t i = 0; i < n_ranks(d); i++)
        if (!d->ranks[i].exited && !d->nodes[i / d->config.ranks_per_node].ended)
            return 0;
    return 1;
}

static int node_said_all(const struct mb_drv *d, uint32_t node)
{
    for (uint32_t i = 0; i < d->config.ranks_per_node; i++)
        if (!d->ranks[node * d->config.ranks_per_node + i].exited)
            return 0;
    return 1;
}

static int all_endpoints(const struct mb_drv *d)
{
    for (uint32_t i = 0; i < n_ranks(d); i++)
        if (!d->ranks[i].endpoint)
            return 0;
    return 1;
}

/* The newest of what has to be durable and is not known to be; -1: none. */
static int64_t newest_open(const struct mb_drv *d)
{
    int64_t newest = -1;

    for (int64_t it = mb_drv_open(d, -1); it >= 0; it = mb_drv_open(d, it))
        newest = it;
    return newest;
}

/* To a verdict that says something else. */
static void add_lost(struct mb_drv *d, int64_t open)
{
    size_t n = strlen(d->verdict);
    char name[48];

    snprintf(name, sizeof(name), "iteration %lld is not durable", (long long)open);
    if (strstr(d->verdict, name)) /* it says so */
        return;
    snprintf(d->verdict + n, sizeof(d->verdict) - n,
             "; iteration %lld was saved but is not durable (newest durable: %lld)",
             (long long)open, (long long)d->committed);
    d->verdict_number++;
}

static int release(struct mb_drv *d)
{
    int64_t open = newest_open(d), lost = mb_drv_saves_given_up(d->saves);

    if (lost >= 0 && lost == d->lost_iteration)
        set_verdict(d, mb_exit_status(MB_EIO), "%s", d->upload_lost);
    else if (lost >= 0)
        set_verdict(d, mb_exit_status(MB_EIO), "iteration %lld is not durable: it was given up",
                    (long long)lost);
    if (open >= 0 && d->exit_status)
        add_lost(d, open);
    else if (open >= 0)
        set_verdict(d, mb_exit_status(MB_EIO),
                    "iteration %lld was saved but is not durable in the checkpoint store (newest "
                    "durable: %lld); its files are still on the nodes",
                    (long long)open, (long long)d->committed);
    d->phase = MB_DRV_RELEASE;
    return MB_DRV_DO_RELEASE;
}

/* Wherever the gang stands: bring it to its end. */
static int wind_down(struct mb_drv *d)
{
    switch (d->phase) {
    case MB_DRV_CONNECT:
        d->phase = MB_DRV_OVER;
        return MB_DRV_DO_FINISH;
    case MB_DRV_PAUSE:
    case MB_DRV_OWN:
    case MB_DRV_RESERVE:
        return release(d);
    case MB_DRV_DIAL:
        d->phase = MB_DRV_END;
        return all_nodes(d, node_ended) ? release(d) : MB_DRV_DO_END;
    case MB_DRV_LAUNCH:
    case MB_DRV_RENDEZVOUS:
    case MB_DRV_RUN:
        d->phase = MB_DRV_STOPPING;
        return MB_DRV_DO_STOP;
    default:
        return 0;
    }
}

/* What follows from the new facts in this phase; runs until nothing follows. */
static int advance(struct mb_drv *d)
{
    int actions = 0;

    if (d->phase == MB_DRV_DIAL && all_nodes(d, node_hello)) {
        d->phase = MB_DRV_LAUNCH;
        actions |= MB_DRV_DO_LAUNCH;
    }
    if (d->phase == MB_DRV_LAUNCH && all_nodes(d, node_launched))
        d->phase = d->config.is_worker ? MB_DRV_RENDEZVOUS : MB_DRV_RUN;
    if (d->phase == MB_DRV_RENDEZVOUS && all_endpoints(d)) {
        d->phase = MB_DRV_RUN;
        actions |= MB_DRV_DO_START;
    }
    if ((d->phase == MB_DRV_RUN || d->phase == MB_DRV_STOPPING) && all_ranks_exited(d)) {
        d->phase = MB_DRV_END;
        actions |= MB_DRV_DO_END;
    }
    if (d->phase == MB_DRV_END && all_nodes(d, node_ended)) {
        if (mb_drv_open(d, -1) < 0 || d->store_said) {
            actions |= release(d);
        } else if (!d->store_asked) {
            d->store_asked = 1;
            actions |= MB_DRV_DO_ASK_STORE;
        }
    }
    return actions;
}

/* By a worker's status whatever its words: that a plan or a snapshot does not fit. */
static int is_out_of_memory(const struct mb_drv *d, const struct mb_drv_event *e, const char *cause)
{
    return (d->config.is_worker && !e->signal && e->exit_code == mb_exit_status(MB_ENOMEM)) ||
           strcasestr(cause, "out of memory") != NULL || strcasestr(cause, "memory limit") != NULL;
}

/* The attempt failed by something else than a rank; noted once, like the verdict. */
static void set_failure(struct mb_drv *d, enum mb_failure_kind kind, int code)
{
    if (!d->exit_status)
        d->failure = (struct mb_failure){.kind = kind, .code = code};
}

/* The agent's own stop, or a program that takes SIGTERM for what it is. Other causes, as a memory
 * limit or a dead supervisor, are no part of the deadline: what the rank would have saved is lost.
 * A worker that is told to end ends with 0, so for it only the agent's word counts. */
static int is_stopped(const struct mb_drv *d, const struct mb_drv_event *e)
{
    const char *cause = e->text ? e->text : "";

    if ((e->signal || e->exit_code == 128 + SIGTERM) &&
        (strcmp(cause, "it was told to stop") == 0 ||
         strncmp(cause, "ended because rank ", 19) == 0))
        return 1;
    return !d->config.is_worker && (e->signal == SIGTERM || e->exit_code == 128 + SIGTERM);
}

static int on_rank_exit(struct mb_drv *d, const struct mb_drv_event *e)
{
    const char *cause = e->text ? e->text : "";
    const char *sep = cause[0] ? ": " : "";
    /* A worker says that it gave up because a peer went away. Another program just fails; but one
     * that somebody killed did not follow anybody. */
    int is_echo =
        d->config.is_worker ? e->exit_code == mb_exit_status(MB_EUNAVAIL) : e->signal != SIGKILL;
    /* A signal with a cause is our own doing. */
    int is_reason = !is_echo && (!e->signal || !cause[0]);
    int is_usage = d->config.is_worker && !e->signal && e->exit_code == EXIT_USAGE;

    if (e->rank >= n_ranks(d))
        return MB_ESTATE;
    d->ranks[e->rank].exited = 1;
    if ((e->exit_code == 0 && e->signal == 0) || (d->at_deadline && is_stopped(d, e)))
        return 0;
    if (d->is_echo && is_reason && d->phase == MB_DRV_STOPPING)
        d->exit_status = 0;
    if (!d->exit_status) {
        d->is_echo = is_echo;
        d->failure = (struct mb_failure){.kind = MB_FAILURE_RANK,
                                         .rank = e->rank,
                                         .exit_code = e->exit_code,
                                         .signal = e->signal,
                                         .is_usage = is_usage,
                                         .is_out_of_memory = is_out_of_memory(d, e, cause)};
    }
    if (e->signal)
        set_verdict(d, EXIT_RANK_FAILED, "rank %u was killed by signal %d (%s)%s%s", e->rank,
                    e->signal, strsignal(e->signal), sep, cause);
    else
        set_verdict(d, is_usage ? EXIT_USAGE : EXIT_RANK_FAILED,
                    "rank %u exited with status %d%s%s", e->rank, e->exit_code, sep, cause);
    return wind_down(d);
}

/* The peer that a worker lost was on a node of which we hear only now: that is the reason. */
static void drop_echo(struct mb_drv *d)
{
    if (!d->is_echo || !d->config.is_worker || d->phase != MB_DRV_STOPPING)
        return;
    d->exit_status = 0;
    d->is_echo = 0;
}

static int on_node(struct mb_drv *d, const struct mb_drv_event *e)
{
    struct node *n;

    if (e->node >= d->config.n_nodes)
        return MB_ESTATE;
    n = &d->nodes[e->node];
    switch (e->kind) {
    case MB_DRV_HELLO:
        n->hello = 1;
        return 0;
    case MB_DRV_LAUNCHED:
        n->launched = 1;
        return 0;
    case MB_DRV_NODE_ENDED:
        n->ended = 1;
        if (d->phase < MB_DRV_STOPPING &&
            !d->at_deadline) { /* nobody asked it to: RUN is left with the last exit */
            set_failure(d, MB_FAILURE_NODE, 0);
            set_verdict(d, EXIT_RANK_FAILED, "node %u ended the gang before its ranks were done",
                        e->node);
            return wind_down(d);
        }
        /* The others wait for its part as long as we are here: it is in the store by now, or never
         * will be. */
        return d->phase == MB_DRV_END && !all_nodes(d, node_ended) ? MB_DRV_DO_END : 0;
    case MB_DRV_NODE_LOST:
        n->ended = n->lost = 1;
        drop_echo(d);
        set_failure(d, MB_FAILURE_NODE, MB_EUNAVAIL);
        set_verdict(d, mb_exit_status(MB_EUNAVAIL), "node %u was lost: %s", e->node,
                    e->text ? e->text : "no answer");
        if (d->phase == MB_DRV_END) /* the others wait for its part: they have to hear of it */
            return MB_DRV_DO_END;
        return wind_down(d);
    default:
        if (e->code == MB_ECANCELED) { /* it gives the gang up, and leaves it the time to save */
            d->in_order |= !d->exit_status;
            drop_echo(d);
            set_failure(d, MB_FAILURE_NODE, e->code);
            set_verdict(d, mb_exit_status(MB_EUNAVAIL), "node %u: %s", e->node,
                        e->text ? e->text : "it stopped the gang");
            return wind_down(d);
        }
        set_failure(d, MB_FAILURE_REQUEST, e->code);
        set_verdict(d, e->code ? mb_exit_status(e->code) : EXIT_RANK_FAILED, "node %u: %s", e->node,
                    e->text ? e->text : "failed");
        return wind_down(d);
    }
}

static int on_reserved(struct mb_drv *d, uint32_t n_nodes)
{
    if (n_nodes > d->config.n_nodes)
        return MB_ESTATE;
    if (d->phase != MB_DRV_RESERVE)
        return 0;
    if (n_nodes > 0)
        d->config.n_nodes = n_nodes;
    d->phase = MB_DRV_DIAL;
    return MB_DRV_DO_DIAL;
}

static void note_saved(struct node *n, int64_t iteration)
{
    if (iteration > n->saved)
        n->saved = iteration;
}

static int note(struct mb_drv *d, int64_t iteration, enum mb_drv_save save)
{
    if (mb_drv_saves_note(d->saves, iteration, save) == MB_OK)
        return 0;
    set_verdict(d, mb_exit_status(MB_ENOMEM), "no memory to keep what was saved in mind");
    return wind_down(d);
}

static int on_saved(struct mb_drv *d, const struct mb_drv_event *e)
{
    if (e->node >= d->config.n_nodes)
        return MB_ESTATE;
    note_saved(&d->nodes[e->node], e->iteration);
    if (e->iteration > d->saved)
        d->saved = e->iteration;
    return note(d, e->iteration, MB_DRV_SAVE_OPEN);
}

static int on_deadline(struct mb_drv *d, const struct mb_drv_event *e)
{
    if (e->node >= d->config.n_nodes)
        return MB_ESTATE;
    if (d->exit_status) /* it ends already, for another reason */
        return 0;
    d->at_deadline = 1;
    if (e->code)
        set_verdict(d, mb_exit_status(e->code), "%s", e->text ? e->text : "the deadline came");
    else if (d->config.is_worker)
        return 0;
    d->in_order |= !e->code;
    return wind_down(d);
}

static int on_event(struct mb_drv *d, const struct mb_drv_event *e)
{
    switch (e->kind) {
    case MB_DRV_PAUSED:
        if (d->phase != MB_DRV_PAUSE)
            return 0;
        d->phase = MB_DRV_OWN;
        return MB_DRV_DO_OWN;
    case MB_DRV_CONNECTED:
        d->phase = MB_DRV_OWN;
        return MB_DRV_DO_OWN;
    case MB_DRV_OWNED:
        if (d->phase != MB_DRV_OWN)
            return 0;
        d->phase = MB_DRV_RESERVE;
        return MB_DRV_DO_RESERVE;
    case MB_DRV_RESERVED:
        return on_reserved(d, e->n_nodes);
    case MB_DRV_ENDPOINT:
        if (e->rank >= n_ranks(d))
            return MB_ESTATE;
        d->ranks[e->rank].endpoint = 1;
        return 0;
    case MB_DRV_RANK_EXIT:
        return on_rank_exit(d, e);
    case MB_DRV_SAVED:
        return on_saved(d, e);
    case MB_DRV_COMMITTED:
        for (uint32_t i = 0; i < d->config.n_nodes; i++)
            note_saved(&d->nodes[i], e->iteration);
        if (e->iteration > d->committed)
            d->committed = e->iteration;
        return note(d, e->iteration, MB_DRV_SAVE_DURABLE);
    case MB_DRV_STORE_SAID:
        d->store_said = 1;
        return 0;
    case MB_DRV_DEADLINE:
        return on_deadline(d, e);
    case MB_DRV_UPLOAD_FAILED:
        if (!d->upload_lost[0] || mb_drv_saves_given_up(d->saves) < 0) {
            d->lost_iteration = e->iteration;
            snprintf(d->upload_lost, sizeof(d->upload_lost), "%s",
                     e->text ? e->text : "an upload failed");
        }
        return note(d, e->iteration, e->is_outdated ? MB_DRV_SAVE_OUTDATED : MB_DRV_SAVE_GIVEN_UP);
    case MB_DRV_FAILED:
        if (d->phase >= MB_DRV_RESERVE && e->code == MB_EUNAVAIL)
            set_failure(d, MB_FAILURE_REQUEST, e->code);
        set_verdict(d, mb_exit_status(e->code), "%s", e->text ? e->text : "failed");
        return wind_down(d);
    case MB_DRV_INTERRUPTED:
        d->in_order |= !d->exit_status;
        set_verdict(d, 128 + e->signal, "stopped by signal %d (%s)", e->signal,
                    strsignal(e->signal));
        return wind_down(d);
    case MB_DRV_RELEASED:
        d->phase = MB_DRV_OVER;
        return MB_DRV_DO_FINISH;
    default:
        return on_node(d, e);
    }
}

int mb_drv_step(struct mb_drv *d, const struct mb_drv_event *e)
{
    int actions;

    if ((unsigned)e->kind >= MB_DRV_N_EVENTS || !(legal[e->kind] & (1u << d->phase)))
        return MB_ESTATE;
    actions = on_event(d, e);
    if (actions < 0)
        return actions;
    return actions | advance(d);
}

enum mb_drv_phase mb_drv_phase(const struct mb_drv *d)
{
    return d->phase;
}

const char *mb_drv_phase_name(enum mb_drv_phase phase)
{
    return (unsigned)phase < MB_DRV_N_PHASES ? phase_names[phase] : "?";
}

const char *mb_drv_event_name(enum mb_drv_event_kind kind)
{
    return (unsigned)kind < MB_DRV_N_EVENTS ? event_names[kind] : "?";
}

int64_t mb_drv_saved(const struct mb_drv *d)
{
    return d->saved;
}

int mb_drv_is_open(const struct mb_drv *d, int64_t iteration)
{
    return iteration > (d->config.is_again ? d->config.committed : -1) &&
           mb_drv_saves_is_open(d->saves, iteration);
}

int64_t mb_drv_committed(const struct mb_drv *d)
{
    return d->committed;
}

int64_t mb_drv_open(const struct mb_drv *d, int64_t after)
{
    return d->config.has_url ? mb_drv_saves_open(d->saves, after, d->config.keep_last) : -1;
}

int mb_drv_node_ended(const struct mb_drv *d, uint32_t node)
{
    return node < d->config.n_nodes && d->nodes[node].ended;
}

int mb_drv_node_lost(const struct mb_drv *d, uint32_t node)
{
    return node < d->config.n_nodes && d->nodes[node].lost;
}

int64_t mb_drv_newest_on_all(const struct mb_drv *d)
{
    int64_t newest = INT64_MAX;

    for (uint32_t i = 0; d->config.is_worker && i < d->config.n_nodes; i++)
        if (node_said_all(d, i) && d->nodes[i].saved < newest)
            newest = d->nodes[i].saved;
    return newest;
}

const char *mb_drv_verdict(const struct mb_drv *d)
{
    return d->verdict;
}

unsigned mb_drv_verdict_number(const struct mb_drv *d)
{
    return d->verdict_number;
}

struct mb_failure mb_drv_failure(const struct mb_drv *d)
{
    return d->failure;
}

int mb_drv_at_deadline(const struct mb_drv *d)
{
    return d->at_deadline;
}

int mb_drv_verdict_stands(const struct mb_drv *d)
{
    return d->verdict[0] && (!d->is_echo || !d->config.is_worker || d->phase != MB_DRV_STOPPING);
}

int mb_drv_ends_in_order(const struct mb_drv *d)
{
    return d->in_order;
}

int mb_drv_exit_status(const struct mb_drv *d)
{
    return d->exit_status;
}
