/* Placement: one attempt to find nodes for a group, on the ledger as it is. Allocates scratch only;
 * out of memory reads as "nothing fits now". */
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "gcs/placement_internal.h"
#include "gcs/placement_plan.h"

/* A node may be used for the group unless something of it is on its way back from there. */
static int usable(const struct mb_placement *p, const struct group *g, size_t node)
{
    if (!p->nodes[node]->up || p->nodes[node]->draining)
        return 0;
    for (size_t i = 0; i < g->pub.n_bundles; i++)
        for (size_t k = 0; k < MB_PLACE_RETURNS; k++)
            if (g->b[i].back[k].phase != NO_RETURN && g->b[i].back[k].node == node)
                return 0;
    return 1;
}

static size_t held_on(const struct group *g, size_t node)
{
    size_t n = 0;

    for (size_t i = 0; i < g->pub.n_bundles; i++)
        n += g->b[i].phase != NONE && g->b[i].node == node;
    return n;
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

static int plan_init(struct plan *pl, const struct mb_placement *p, const struct group *g)
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
        if (!usable(p, g, k))
            continue;
        int full = 0;
        for (size_t i = 0; i < node->n; i++) {
            node->free[i].amount = node->total[i].amount - node->booked[i].amount;
            double demand = 0;
            for (size_t r = 0; pl->n > 0 && r < pl->bundles[0]->n_resources; r++)
                if (strcmp(pl->bundles[0]->resources[r].name, node->total[i].name) == 0)
                    demand = pl->bundles[0]->resources[r].amount;
            full |= node->said[i].amount < demand;
        }
        pl->choices[pl->n_nodes++] = (struct choice){k, full, node->refusals};
    }
    qsort(pl->choices, pl->n_nodes, sizeof *pl->choices, choice_cmp);
    for (size_t i = 0; i < pl->n_nodes; i++) {
        struct node *node = p->nodes[pl->choices[i].node];
        pl->nodes[i] = (struct mb_plan_node){node->free, node->n, held_on(g, pl->choices[i].node)};
    }
    return 0;
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

/* 1 if the group got places. */
int place_try(struct mb_placement *p, struct group *g, uint64_t now_ms)
{
    struct plan pl = {0};
    int found = 0;

    if (has_room_for_returns(g) && plan_init(&pl, p, g) == 0)
        found = mb_plan_bundles(g->pub.strategy, pl.bundles, pl.n, pl.nodes, pl.n_nodes, pl.out);
    if (found == 1) {
        for (size_t i = 0; i < pl.n; i++) {
            struct bundle *b = &g->b[pl.which[i]];
            b->phase = WANT_PREPARE;
            b->node = pl.choices[pl.out[i]].node;
            place_book(p->nodes[b->node], b->pub, +1);
        }
        g->attempts++;
        place_transition(g, PLACED);
    } else {
        enum mb_place_wait wait = feasible(p, g) ? MB_PLACE_NO_RESOURCES : MB_PLACE_INFEASIBLE;
        g->changed |= wait != g->wait;
        g->wait = wait;
        g->seen_epoch = p->epoch;
        g->recheck_ms = now_ms + MB_PLACE_RETRY_MAX_MS;
    }
    plan_close(&pl);
    return found == 1;
}
