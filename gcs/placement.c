/*
 * Placement groups as a state machine. No allocation happens once a group is added, except for the
 * scratch of a plan: intentions are marks on bundles, and mb_placement_next() turns marks into
 * actions.
 *
 * Happy path:
 *  1. add: PENDING. next: a plan books nodes, marks every bundle WANT_PREPARE: PREPARING.
 *  2. PREPARE goes to every node; all say yes: PREPARED, marks WANT_COMMIT.
 *  3. COMMIT goes to every node; all are done: CREATED.
 *  4. remove: REMOVED, every place becomes a return; each booking ends with its answer.
 * Failure paths:
 *  5. No plan: the group waits for a change of bookings or nodes, or a second.
 *  6. A refusal or failed Prepare: the attempt's other places become returns; again after a
 * back-off. A place whose Prepare is still unanswered is returned when the answer is there.
 *  7. A failed Commit is repeated: the node agreed, and Commit may be repeated.
 *  8. A node dies: its places and returns are gone; the group starts over (before CREATED), or is
 *     RESCHEDULING for the lost bundles.
 *  9. A failed Return is repeated until it is answered or the node is dead.
 */
#include "gcs/placement.h"

#include <assert.h>
#include <string.h>
#include "base/alloc.h"
#include "gcs/placement_internal.h"

/* ---- states ---- */

static const struct {
    enum mb_pg_state outside;
    enum mb_place_wait wait;
} state_table[N_STATES] = {
    [PENDING] = {MB_PG_PENDING, MB_PLACE_QUEUED},
    [PREPARING] = {MB_PG_PENDING, MB_PLACE_STARTED},
    [PREPARED] = {MB_PG_PREPARED, MB_PLACE_STARTED},
    [CREATED] = {MB_PG_CREATED, MB_PLACE_FINISHED},
    [RESCHEDULING] = {MB_PG_RESCHEDULING, MB_PLACE_QUEUED},
    [REPREPARING] = {MB_PG_RESCHEDULING, MB_PLACE_STARTED},
    [REPREPARED] = {MB_PG_RESCHEDULING, MB_PLACE_STARTED},
    [REMOVED] = {MB_PG_REMOVED, MB_PLACE_GONE},
};

/* Zero: the event changes nothing in this state. States are stored plus one. */
#define TO(s) ((s) + 1)
static const unsigned char next_table[N_STATES][N_EVENTS] = {
    [PENDING] = {[PLACED] = TO(PREPARING), [REMOVE] = TO(REMOVED)},
    [PREPARING] = {[REFUSED] = TO(PENDING),
                   [ALL_PREPARED] = TO(PREPARED),
                   [BUNDLE_LOST] = TO(PENDING),
                   [REMOVE] = TO(REMOVED)},
    [PREPARED] =
        {[ALL_COMMITTED] = TO(CREATED), [BUNDLE_LOST] = TO(PENDING), [REMOVE] = TO(REMOVED)},
    [CREATED] = {[BUNDLE_LOST] = TO(RESCHEDULING), [REMOVE] = TO(REMOVED)},
    [RESCHEDULING] = {[PLACED] = TO(REPREPARING), [REMOVE] = TO(REMOVED)},
    [REPREPARING] = {[REFUSED] = TO(RESCHEDULING),
                     [ALL_PREPARED] = TO(REPREPARED),
                     [BUNDLE_LOST] = TO(RESCHEDULING),
                     [REMOVE] = TO(REMOVED)},
    [REPREPARED] =
        {[ALL_COMMITTED] = TO(CREATED), [BUNDLE_LOST] = TO(RESCHEDULING), [REMOVE] = TO(REMOVED)},
};

enum mb_place_wait place_wait_of(enum state s)
{
    return state_table[s].wait;
}

enum mb_pg_state place_outside_of(enum state s)
{
    return state_table[s].outside;
}

static uint64_t random_u64(struct mb_placement *p)
{
    p->rng ^= p->rng << 13;
    p->rng ^= p->rng >> 7;
    p->rng ^= p->rng << 17;
    return p->rng;
}

void place_transition(struct group *g, enum event e)
{
    unsigned char next = next_table[g->state][e];

    if (next == 0)
        return;
    g->state = (enum state)(next - 1);
    g->wait = state_table[g->state].wait;
    if (g->state == CREATED) {
        g->waiting_since_ms = 0;
        g->overtaken = 0;
    }
    if (g->pub.state != state_table[g->state].outside || e == BUNDLE_LOST)
        g->changed = 1;
    g->pub.state = state_table[g->state].outside;
}

/* ---- places and returns ---- */

void place_leave(struct mb_placement *p, struct bundle *b)
{
    place_book(p->nodes[b->node], b->pub, -1);
    b->phase = NONE;
    b->node = PLACE_NOWHERE;
    b->pub->has_node = 0;
    p->epoch++;
    p->ledger++;
}

void place_end_return(struct mb_placement *p, struct bundle *b, struct returning *r)
{
    place_book(p->nodes[r->node], b->pub, -1);
    if (!r->is_late)
        place_expect_back(p, r->node, b->pub, -1);
    p->ledger++;
    *r = (struct returning){.node = PLACE_NOWHERE};
    p->epoch++;
}

/* The bundle's place becomes a return; the booking goes with it. */
static void give_back(struct mb_placement *p, struct bundle *b)
{
    if (b->phase == NONE)
        return;
    if (b->phase == WANT_PREPARE) { /* nothing was said to the node yet */
        place_leave(p, b);
        return;
    }
    for (size_t i = 0; i < MB_PLACE_RETURNS; i++) {
        struct returning *r = &b->back[i];
        if (r->phase != NO_RETURN)
            continue;
        r->phase = b->phase == PREPARE_SENT  ? RETURN_AWAITS_PREPARE
                   : b->phase == COMMIT_SENT ? RETURN_AWAITS_COMMIT
                                             : WANT_RETURN;
        r->node = b->node;
        r->ticket = b->ticket;
        r->not_before_ms = 0;
        r->is_late = 0;
        place_expect_back(p, r->node, b->pub, +1);
        p->ledger++;
        b->phase = NONE;
        b->node = PLACE_NOWHERE;
        b->pub->has_node = 0;
        return;
    }
    assert(!"a bundle is planned only while it has room for a return");
}

/* Return what this attempt holds; everything says whether committed bundles go too. */
void place_roll_back(struct mb_placement *p, struct group *g, int everything)
{
    for (size_t i = 0; i < g->pub.n_bundles; i++)
        if (everything || g->b[i].phase != COMMITTED)
            give_back(p, &g->b[i]);
}

static int all_in(const struct group *g, enum phase phase)
{
    for (size_t i = 0; i < g->pub.n_bundles; i++)
        if (g->b[i].phase != phase && g->b[i].phase != COMMITTED)
            return 0;
    return 1;
}

int place_is_attempting(const struct group *g)
{
    return g->state == PREPARING || g->state == PREPARED || g->state == REPREPARING ||
           g->state == REPREPARED;
}

static void refuse(struct mb_placement *p, struct group *g, uint64_t now_ms)
{
    uint64_t wait = (uint64_t)MB_PLACE_RETRY_MIN_MS << (g->attempts < 4 ? g->attempts : 4);

    if (wait > MB_PLACE_RETRY_MAX_MS)
        wait = MB_PLACE_RETRY_MAX_MS;
    place_roll_back(p, g, 0);
    /* Half of the wait is jitter, so that groups that compete do not meet again. */
    g->try_ms = now_ms + wait / 2 + random_u64(p) % (wait / 2 + 1);
    place_transition(g, REFUSED);
}

static void after_progress(struct group *g)
{
    if ((g->state == PREPARING || g->state == REPREPARING) && all_in(g, HELD)) {
        for (size_t i = 0; i < g->pub.n_bundles; i++)
            if (g->b[i].phase == HELD)
                g->b[i].phase = WANT_COMMIT;
        place_transition(g, ALL_PREPARED);
    } else if ((g->state == PREPARED || g->state == REPREPARED) && all_in(g, COMMITTED)) {
        place_transition(g, ALL_COMMITTED);
        g->changed = 1;
    }
}

/* ---- outcomes ---- */

static void return_outcome(struct mb_placement *p, struct bundle *b, struct returning *r,
                           enum mb_place_outcome outcome, uint64_t now_ms)
{
    switch (r->phase) {
    case RETURN_AWAITS_PREPARE:
        if (outcome == MB_PLACE_REFUSED)
            place_end_return(p, b, r);
        else
            r->phase = WANT_RETURN;
        break;
    case RETURN_AWAITS_COMMIT:
        r->phase = WANT_RETURN;
        break;
    case RETURN_SENT:
        if (outcome == MB_PLACE_OK) {
            place_end_return(p, b, r);
        } else {
            r->phase = WANT_RETURN;
            r->not_before_ms = now_ms + MB_PLACE_RETRY_MAX_MS;
            if (!r->is_late)
                place_expect_back(p, r->node, b->pub, -1);
            p->ledger += !r->is_late;
            r->is_late = 1;
        }
        break;
    case NO_RETURN:
    case WANT_RETURN:
        break;
    }
}

void mb_placement_result(struct mb_placement *p, const uint8_t pg_id[MB_PG_ID_BYTES],
                         uint64_t ticket, enum mb_place_outcome outcome, uint64_t now_ms)
{
    struct group *g = place_find_group(p, pg_id);
    int refused = 0;

    if (!g || ticket == 0)
        return;
    for (size_t i = 0; i < g->pub.n_bundles; i++) {
        struct bundle *b = &g->b[i];

        for (size_t k = 0; k < MB_PLACE_RETURNS; k++)
            if (b->back[k].phase != NO_RETURN && b->back[k].ticket == ticket)
                return_outcome(p, b, &b->back[k], outcome, now_ms);
        if (b->phase == NONE || b->ticket != ticket)
            continue;
        if (b->phase == PREPARE_SENT && outcome == MB_PLACE_OK) {
            b->phase = HELD;
        } else if (b->phase == PREPARE_SENT) {
            p->nodes[b->node]->refusals++;
            if (outcome == MB_PLACE_REFUSED)
                place_leave(p, b);
            else
                b->phase = HELD; /* perhaps: so it is returned */
            refused = 1;
        } else if (b->phase == COMMIT_SENT && outcome == MB_PLACE_OK) {
            b->phase = COMMITTED;
            b->pub->has_node = 1;
            memcpy(b->pub->node_id, p->nodes[b->node]->id, MB_NODE_ID_BYTES);
        } else if (b->phase == COMMIT_SENT) {
            b->phase = WANT_COMMIT;
            b->not_before_ms = now_ms + MB_PLACE_RETRY_MIN_MS;
        }
    }
    if (refused)
        refuse(p, g, now_ms);
    else
        after_progress(g);
}

int place_is_waiting(const struct group *g)
{
    return g->state == PENDING || g->state == RESCHEDULING;
}

int place_is_orphan(const struct group *g)
{
    return g->state == PENDING && g->orphan_ms != 0;
}

/* ---- actions ---- */

static void begin_action(struct mb_placement *p, struct group *g, size_t node,
                         enum mb_place_kind kind, struct mb_place_action *out)
{
    memset(out, 0, sizeof *out);
    out->kind = kind;
    out->ticket = ++p->next_ticket;
    out->bundles = g->scratch;
    memcpy(out->pg_id, g->pub.id, MB_PG_ID_BYTES);
    if (node != PLACE_NOWHERE)
        memcpy(out->node_id, p->nodes[node]->id, MB_NODE_ID_BYTES);
}

/* All bundles of the group that want the same of the same node go in one action. */
static int emit_wanted(struct mb_placement *p, struct group *g, uint64_t now_ms,
                       struct mb_place_action *out)
{
    for (size_t i = 0; i < g->pub.n_bundles; i++) {
        enum phase want = g->b[i].phase;
        size_t node = g->b[i].node;

        if ((want != WANT_PREPARE && want != WANT_COMMIT) || g->b[i].not_before_ms > now_ms)
            continue;
        begin_action(p, g, node, want == WANT_PREPARE ? MB_PLACE_PREPARE : MB_PLACE_COMMIT, out);
        for (size_t k = i; k < g->pub.n_bundles; k++) {
            struct bundle *b = &g->b[k];
            if (b->phase != want || b->node != node)
                continue;
            b->phase = want == WANT_PREPARE ? PREPARE_SENT : COMMIT_SENT;
            b->ticket = out->ticket;
            b->not_before_ms = 0;
            g->scratch[out->n_bundles++] = k;
        }
        return 1;
    }
    return 0;
}

static int emit_return(struct mb_placement *p, struct group *g, uint64_t now_ms,
                       struct mb_place_action *out)
{
    size_t node = PLACE_NOWHERE;

    for (size_t i = 0; i < g->pub.n_bundles; i++) {
        for (size_t k = 0; k < MB_PLACE_RETURNS; k++) {
            struct returning *r = &g->b[i].back[k];
            if (r->phase != WANT_RETURN || r->not_before_ms > now_ms ||
                (node != PLACE_NOWHERE && r->node != node))
                continue;
            if (node == PLACE_NOWHERE) {
                node = r->node;
                begin_action(p, g, node, MB_PLACE_RETURN, out);
            }
            r->phase = RETURN_SENT;
            r->ticket = out->ticket;
            g->scratch[out->n_bundles++] = i;
            break; /* a bundle is on its way back from one node only once */
        }
    }
    return node != PLACE_NOWHERE;
}

static void stand_behind(struct group *g, const struct group *ahead)
{
    g->changed |= g->wait != MB_PLACE_QUEUED;
    g->wait = MB_PLACE_QUEUED;
    g->behind = ahead->seq;
    g->seen_epoch = 0; /* when it may be tried, it is */
}

/* What this group has to say or to do; a waiting group looks for places first. */
static int group_next(struct mb_placement *p, struct group *g, const struct group *ahead,
                      uint64_t now_ms, struct mb_place_action *out)
{
    if (place_is_orphan(g) && now_ms >= g->orphan_ms + MB_PLACE_ORPHAN_MS)
        place_transition(g, REMOVE); /* PENDING: it holds nothing */
    if (!g->changed && place_is_waiting(g) && !place_is_orphan(g)) {
        if (g->waiting_since_ms == 0)
            g->waiting_since_ms = now_ms ? now_ms : 1;
        g->blocked = ahead && p->order == MB_PLACE_STRICT;
        if (g->blocked)
            stand_behind(g, ahead);
        else if (now_ms >= g->try_ms &&
                 (g->seen_epoch != p->epoch || g->seen_ahead != (ahead ? ahead->seq : 0) ||
                  now_ms >= g->recheck_ms))
            (void)place_try(p, g, ahead, now_ms);
    }
    if (g->changed) {
        g->changed = 0;
        begin_action(p, g, PLACE_NOWHERE, MB_PLACE_CHANGED, out);
        return 1;
    }
    return emit_return(p, g, now_ms, out) || emit_wanted(p, g, now_ms, out);
}

int mb_placement_next(struct mb_placement *p, uint64_t now_ms, struct mb_place_action *out)
{
    const struct group *ahead = NULL; /* the first that keeps what it needs */

    for (size_t i = 0; i < p->n_groups; i++) {
        if (group_next(p, p->groups[i], ahead, now_ms, out))
            return 1;
        if (!ahead && place_keeps(p, p->groups[i], now_ms))
            ahead = p->groups[i];
    }
    return 0;
}

static void sooner(uint64_t *due, uint64_t t)
{
    if (t < *due)
        *due = t;
}

uint64_t mb_placement_due_ms(const struct mb_placement *p)
{
    uint64_t due = UINT64_MAX;

    for (size_t i = 0; i < p->n_groups; i++) {
        const struct group *g = p->groups[i];

        if (place_is_orphan(g))
            sooner(&due, g->orphan_ms + MB_PLACE_ORPHAN_MS);
        else if (place_is_waiting(g) && !g->blocked) /* what lifts a block is an event */
            sooner(&due, g->try_ms > g->recheck_ms || g->seen_epoch != p->epoch ? g->try_ms
                                                                                : g->recheck_ms);
        for (size_t k = 0; k < g->pub.n_bundles; k++) {
            if (g->b[k].phase == WANT_PREPARE || g->b[k].phase == WANT_COMMIT)
                sooner(&due, g->b[k].not_before_ms);
            for (size_t r = 0; r < MB_PLACE_RETURNS; r++)
                if (g->b[k].back[r].phase == WANT_RETURN)
                    sooner(&due, g->b[k].back[r].not_before_ms);
        }
    }
    return due;
}

struct mb_placement *mb_placement_create(uint64_t seed)
{
    struct mb_placement *p = mb_calloc(1, sizeof *p);

    if (p) {
        p->rng = seed ? seed : 1;
        p->epoch = p->fleet = 1;
        p->patience_ms = MB_PLACE_PATIENCE_MS;
    }
    return p;
}

void mb_placement_set_order(struct mb_placement *p, enum mb_place_order order, uint64_t patience_ms)
{
    p->order = order;
    p->patience_ms = patience_ms;
}

void mb_placement_destroy(struct mb_placement *p)
{
    if (!p)
        return;
    for (size_t i = 0; i < p->n_nodes; i++)
        place_free_node(p->nodes[i]);
    for (size_t i = 0; i < p->n_groups; i++)
        place_free_group(p->groups[i]);
    mb_free(p->nodes);
    mb_free(p->groups);
    mb_free(p);
}
