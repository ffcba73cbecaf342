/*
 * Placement: one attempt to find nodes for a group, on the ledger as it is, and the places that are
 * pinned for a group that has waited long enough. Allocates scratch only; out of memory reads as
 * "nothing fits now".
 *
 * Why a pinned group starts: pins are chosen once and change only with the nodes. On a pinned node
 * the groups behind get what is left after everything that is booked there and the group's own
 * demand, so bookings that are in its way only ever end.
 */
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "gcs/placement_internal.h"
#include "gcs/placement_plan.h"

/* What a plan may count on. */
enum basis {
    FREE_NOW,  /* what is not booked, nor kept for the group ahead */
    FREE_SOON, /* that, and what is on its way back */
    WERE_EMPTY /* totals: as if nobody else was there */
};

/* A node may be used for the group unless something of it is on its way back from there. */
static int usable(const struct mb_placement *p, const struct group *g, size_t node,
                  enum basis basis)
{
    if (!p->nodes[node]->up || p->nodes[node]->draining)
        return 0;
    if (basis == WERE_EMPTY)
        return 1;
    for (size_t i = 0; i < g->pub.n_bundles; i++)
        for (size_t k = 0; k < MB_PLACE_RETURNS; k++) {
            const struct returning *r = &g->b[i].back[k];

            if (r->phase != NO_RETURN && r->node == node && (basis == FREE_NOW || r->is_late))
                return 0;
        }
    return 1;
}

static size_t held_on(const struct group *g, size_t node)
{
    size_t n = 0;

    for (size_t i = 0; i < g->pub.n_bundles; i++)
        n += g->b[i].phase != NONE && g->b[i].node == node;
    return n;
}

static double demand_of(const struct mb_gcs_bundle *b, const char *name)
{
    for (size_t r = 0; r < b->n_resources; r++)
        if (strcmp(b->resources[r].name, name) == 0)
            return b->resources[r].amount;
    return 0;
}

double place_free(const struct mb_placement *p, size_t node, size_t resource,
                  const struct group *ahead)
{
    const struct node *n = p->nodes[node];
    double amount = n->total[resource].amount - n->booked[resource].amount;

    for (size_t i = 0; ahead && i < ahead->pub.n_bundles; i++)
        if (ahead->b[i].phase == NONE && ahead->pins[i] == node)
            amount -= demand_of(ahead->b[i].pub, n->total[resource].name);
    return amount;
}

/* What the node would have if the others were not there. */
static double empty(const struct mb_placement *p, const struct group *g, size_t node,
                    size_t resource)
{
    const struct node *n = p->nodes[node];
    double amount = n->total[resource].amount;

    for (size_t i = 0; i < g->pub.n_bundles; i++)
        if (g->b[i].phase != NONE && g->b[i].node == node)
            amount -= demand_of(g->b[i].pub, n->total[resource].name);
    return amount;
}

struct choice {
    size_t node;
    int looks_full;
    uint64_t refusals;
};

static int choice_cmp(const void *a, const void *b)
{
    const struct choice *x = a, *y = b;

    if (x->looks_full != y->looks_full)
        return x->looks_full - y->looks_full;
    if (x->refusals != y->refusals)
        return x->refusals < y->refusals ? -1 : 1;
    return (x->node > y->node) - (x->node < y->node);
}

/* Could any bundle ever be held by some node? Else the group is INFEASIBLE, not just waiting. */
static int feasible(const struct mb_placement *p, const struct group *g)
{
    for (size_t i = 0; i < g->pub.n_bundles; i++) {
        int some = g->b[i].phase != NONE;
        for (size_t k = 0; !some && k < p->n_nodes; k++)
            some = p->nodes[k]->up && mb_plan_fits(g->b[i].pub, p->nodes[k]->total, p->nodes[k]->n);
        if (!some)
            return 0;
    }
    return 1;
}

struct plan {
    const struct mb_gcs_bundle **bundles; /* the open ones */
    size_t *which;                        /* their indexes in the group */
    size_t *out;
    size_t n;
    struct choice *choices;
    struct mb_plan_node *nodes;
    size_t n_nodes;
};

/* 1: the node looks as if the first open bundle had no room on it; it is tried last. */
static int looks_full(const struct mb_placement *p, const struct plan *pl, size_t node,
                      enum basis basis)
{
    const struct node *n = p->nodes[node];
    int full = 0;

    for (size_t i = 0; pl->n > 0 && i < n->n; i++)
        full |= (basis != WERE_EMPTY ? n->said[i].amount : place_free(p, node, i, NULL)) <
                demand_of(pl->bundles[0], n->total[i].name);
    return full;
}

static int plan_init(struct plan *pl, const struct mb_placement *p, const struct group *g,
                     enum basis basis, const struct group *ahead)
{
    pl->bundles = mb_calloc(g->pub.n_bundles, sizeof *pl->bundles);
    pl->which = mb_calloc(g->pub.n_bundles, sizeof *pl->which);
    pl->out = mb_calloc(g->pub.n_bundles, sizeof *pl->out);
    pl->choices = mb_calloc(p->n_nodes, sizeof *pl->choices);
    pl->nodes = mb_calloc(p->n_nodes, sizeof *pl->nodes);
    if (!pl->bundles || !pl->which || !pl->out || !pl->choices || !pl->nodes)
        return MB_ENOMEM;
    for (size_t i = 0; i < g->pub.n_bundles; i++) {
        if (g->b[i].phase != NONE)
            continue;
        pl->bundles[pl->n] = g->b[i].pub;
        pl->which[pl->n++] = i;
    }
    for (size_t k = 0; k < p->n_nodes; k++) {
        struct node *node = p->nodes[k];
        if (!usable(p, g, k, basis))
            continue;
        for (size_t i = 0; i < node->n; i++)
            node->free[i].amount =
                basis == WERE_EMPTY
                    ? empty(p, g, k, i)
                    : place_free(p, k, i, ahead) + (basis == FREE_SOON ? node->back[i].amount : 0);
        pl->choices[pl->n_nodes++] =
            (struct choice){k, looks_full(p, pl, k, basis), node->refusals};
    }
    qsort(pl->choices, pl->n_nodes, sizeof *pl->choices, choice_cmp);
    for (size_t i = 0; i < pl->n_nodes; i++) {
        struct node *node = p->nodes[pl->choices[i].node];
        pl->nodes[i] = (struct mb_plan_node){node->free, node->n, held_on(g, pl->choices[i].node)};
    }
    return 0;
}

/* 1: pl->out has a node for every open bundle. */
static int make_plan(struct plan *pl, const struct mb_placement *p, const struct group *g,
                     enum basis basis, const struct group *ahead)
{
    int rc = plan_init(pl, p, g, basis, ahead);

    return rc ? rc
              : mb_plan_bundles(g->pub.strategy, pl->bundles, pl->n, pl->nodes, pl->n_nodes,
                                pl->out);
}

static void plan_close(struct plan *pl)
{
    mb_free(pl->bundles);
    mb_free(pl->which);
    mb_free(pl->out);
    mb_free(pl->choices);
    mb_free(pl->nodes);
}

static int has_room_for_returns(const struct group *g)
{
    for (size_t i = 0; i < g->pub.n_bundles; i++) {
        int room = 0;
        for (size_t k = 0; k < MB_PLACE_RETURNS; k++)
            room |= g->b[i].back[k].phase == NO_RETURN;
        if (!room)
            return 0;
    }
    return 1;
}

/* ---- pins ---- */

/* 1: it has places for all open bundles. Below 0, out of memory: it keeps nothing, and the next
 * look tries again. */
static int choose_pins(struct mb_placement *p, struct group *g, enum basis basis)
{
    struct plan pl = {0};
    int found = make_plan(&pl, p, g, basis, NULL);

    for (size_t i = 0; i < g->pub.n_bundles; i++)
        g->pins[i] = PLACE_NOWHERE;
    for (size_t i = 0; found == 1 && i < pl.n; i++)
        g->pins[pl.which[i]] = pl.choices[pl.out[i]].node;
    g->fits_fleet = basis == WERE_EMPTY && found == 1;
    g->pins_epoch = basis == WERE_EMPTY && found >= 0 ? p->fleet : 0;
    plan_close(&pl);
    return found;
}

/* What several nodes had comes back from one after the other. It is not taken apart by those behind
 * a group that starts as soon as all of it is there. */
static int starts_soon(struct mb_placement *p, struct group *g)
{
    if (p->n_returning == 0)
        return 0;
    if (g->soon_seen != p->ledger + p->fleet) {
        int found = choose_pins(p, g, FREE_SOON);

        g->fits_soon = found == 1;
        g->soon_seen = found < 0 ? 0 : p->ledger + p->fleet;
    }
    return g->fits_soon;
}

/* Drivers find a new head at different times. In strict order none loses its turn by that. */
static int keeps_turn_for_driver(const struct mb_placement *p, const struct group *g)
{
    return g->is_expected && p->order == MB_PLACE_STRICT;
}

int place_keeps(struct mb_placement *p, struct group *g, uint64_t now_ms)
{
    if (!place_is_waiting(g))
        return 0;
    if (place_is_orphan(g) ? !keeps_turn_for_driver(p, g) : g->waiting_since_ms == 0)
        return 0;
    if (p->order == MB_PLACE_BACKFILL && g->overtaken < MB_PLACE_OVERTAKES &&
        now_ms < g->waiting_since_ms + p->patience_ms)
        return starts_soon(p, g);
    if (g->pins_epoch != p->fleet)
        choose_pins(p, g, WERE_EMPTY);
    return g->fits_fleet;
}

/* ---- an attempt ---- */

/* Those before it in the queue that still wait. */
static void count_overtaken(struct mb_placement *p, const struct group *g)
{
    for (size_t i = 0; i < p->n_groups && p->groups[i] != g; i++)
        p->groups[i]->overtaken += place_is_waiting(p->groups[i]) != 0;
}

static void take_places(struct mb_placement *p, struct group *g, const struct plan *pl)
{
    for (size_t i = 0; i < pl->n; i++) {
        struct bundle *b = &g->b[pl->which[i]];
        b->phase = WANT_PREPARE;
        b->node = pl->choices[pl->out[i]].node;
        place_book(p->nodes[b->node], b->pub, +1);
    }
    p->ledger++;
    g->attempts++;
    g->behind = 0;
    place_transition(g, PLACED);
    count_overtaken(p, g);
}

int place_try(struct mb_placement *p, struct group *g, const struct group *ahead, uint64_t now_ms)
{
    struct plan pl = {0}, without = {0};
    int room = has_room_for_returns(g);
    int found = room ? make_plan(&pl, p, g, FREE_NOW, ahead) : 0;

    if (found == 1) {
        take_places(p, g, &pl);
    } else {
        int kept = room && ahead && make_plan(&without, p, g, FREE_NOW, NULL) == 1;
        enum mb_place_wait wait = kept             ? MB_PLACE_QUEUED
                                  : feasible(p, g) ? MB_PLACE_NO_RESOURCES
                                                   : MB_PLACE_INFEASIBLE;
        g->behind = kept ? ahead->seq : 0;
        g->changed |= wait != g->wait;
        g->wait = wait;
        g->seen_epoch = p->epoch;
        g->seen_ahead = ahead ? ahead->seq : 0;
        g->recheck_ms = now_ms + MB_PLACE_RETRY_MAX_MS;
    }
    plan_close(&pl);
    plan_close(&without);
    return found == 1;
}
