/*
 * Placement: why a group waits, for people.
 *
 *  1. The nodes that are there could not hold it, were they empty: how many such nodes are missing,
 *     or what the largest has; whoever is before it in the queue.
 *  2. Something is free but kept for a group ahead: who that is and by which rule.
 *  3. They are busy: what is missing on how many nodes, and what the nearest ones have free.
 *  4. Everything is there: bundles are on their way back, or a node refused and is asked again.
 */
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "gcs/placement_internal.h"
#include "gcs/placement_plan.h"

enum { NODES_NAMED = 4 };
static const double EPSILON = 1e-6;

/* What one node lacks for one bundle. */
struct lack {
    size_t node;
    const char *resource; /* of which most is missing; NULL: the bundle fits */
    double missing, free, total;
    int is_possible; /* it would fit on the empty node */
};

struct look {
    const struct mb_placement *p;
    const struct group *g;
    mb_place_name_fn name_of;
    void *arg;
    struct mb_buf *out;
    const struct mb_gcs_bundle *bundle; /* the largest open one */
    size_t n_open;
    struct lack *lacks; /* of the nodes that may be used */
    size_t n, n_fit, n_possible;
};

static const char *plural(size_t n)
{
    return n == 1 ? "" : "s";
}

static const char *node_name(const struct look *l, size_t node)
{
    return l->name_of(l->arg, l->p->nodes[node]->id);
}

static struct lack lack_of(const struct look *l, size_t node)
{
    const struct node *n = l->p->nodes[node];
    const struct mb_gcs_bundle *b = l->bundle;
    struct lack out = {.node = node, .is_possible = mb_plan_fits(b, n->total, n->n)};

    for (size_t r = 0; r < b->n_resources; r++) {
        double total = 0, available = 0;
        for (size_t i = 0; i < n->n; i++) {
            if (strcmp(n->total[i].name, b->resources[r].name) != 0)
                continue;
            total = n->total[i].amount;
            available = place_free(l->p, node, i, NULL);
        }
        /* Of equals the last: a gang's bundles name the GPU behind the slot. */
        double missing = b->resources[r].amount - (out.is_possible ? available : total);
        if (missing > EPSILON && missing >= out.missing)
            out = (struct lack){node,  b->resources[r].name, missing, available,
                                total, out.is_possible};
    }
    return out;
}

/* Nearest to holding the bundle first; those that never could last. */
static int lack_cmp(const void *a, const void *b)
{
    const struct lack *x = a, *y = b;

    if (x->is_possible != y->is_possible)
        return y->is_possible - x->is_possible;
    if (x->missing != y->missing)
        return x->missing < y->missing ? -1 : 1;
    return (x->node > y->node) - (x->node < y->node);
}

static int holds_one(const struct group *g, size_t node)
{
    for (size_t i = 0; i < g->pub.n_bundles; i++)
        if (g->b[i].phase != NONE && g->b[i].node == node)
            return 1;
    return 0;
}

static double size_of(const struct mb_gcs_bundle *b)
{
    double sum = 0;

    for (size_t r = 0; r < b->n_resources; r++)
        sum += b->resources[r].amount;
    return sum;
}

static int look_at_nodes(struct look *l)
{
    l->lacks = mb_calloc(l->p->n_nodes, sizeof *l->lacks);
    if (!l->lacks)
        return MB_ENOMEM;
    for (size_t i = 0; i < l->g->pub.n_bundles; i++) {
        const struct bundle *b = &l->g->b[i];
        if (b->phase != NONE)
            continue;
        l->n_open++;
        if (!l->bundle || size_of(b->pub) > size_of(l->bundle))
            l->bundle = b->pub;
    }
    for (size_t k = 0; l->bundle && k < l->p->n_nodes; k++) {
        if (!l->p->nodes[k]->up || l->p->nodes[k]->draining)
            continue;
        if (l->g->pub.strategy == MB_PG_STRICT_SPREAD && holds_one(l->g, k))
            continue;
        l->lacks[l->n] = lack_of(l, k);
        l->n_fit += l->lacks[l->n].resource == NULL;
        l->n_possible += l->lacks[l->n].is_possible != 0;
        l->n++;
    }
    qsort(l->lacks, l->n, sizeof *l->lacks, lack_cmp);
    return 0;
}

/* "4 mobula_gpu": what the text calls the bundle; the GPU where it asks for one. */
static const struct mb_gcs_resource *key_of(const struct mb_gcs_bundle *b)
{
    return &b->resources[b->n_resources - 1];
}

static int say_nodes(struct look *l, size_t from, int totals)
{
    size_t n = l->n - from, named = n < NODES_NAMED ? n : NODES_NAMED;
    int rc = 0;

    for (size_t i = from; i < from + named; i++) {
        const struct lack *k = &l->lacks[i];
        rc |=
            mb_buf_printf(l->out, "%snode %s has ", i == from ? ": " : ", ", node_name(l, k->node));
        rc |= totals ? mb_buf_printf(l->out, "%g %s", k->total, k->resource)
                     : mb_buf_printf(l->out, "%g free of %g", k->free, k->total);
    }
    if (n > named)
        rc |= mb_buf_printf(l->out, ", and %zu more", n - named);
    return rc;
}

/* ---- the four cases ---- */

static int say_kept(struct look *l)
{
    const struct group *g = l->g, *ahead = NULL;

    for (size_t i = 0; i < l->p->n_groups; i++)
        if (l->p->groups[i]->seq == g->behind)
            ahead = l->p->groups[i];
    if (!ahead)
        return mb_buf_puts(l->out, "waiting for its turn");
    const char *name = ahead->pub.name;
    int n = (int)mb_placement_name_bytes(name);
    if (l->p->order == MB_PLACE_BACKFILL)
        return mb_buf_printf(l->out, "waiting: what is free is kept for %.*s, which waits longer",
                             n, name);
    return mb_buf_printf(l->out, "waiting behind %.*s, which %s", n, name,
                         ahead->priority > g->priority ? "has a higher priority"
                                                       : "came earlier (strict order)");
}

static int say_too_small(struct look *l)
{
    const struct mb_gcs_resource *key = key_of(l->bundle);
    int rc;

    if (l->g->pub.strategy == MB_PG_STRICT_SPREAD && l->n_possible > 0 &&
        l->n_possible < l->n_open) {
        size_t more = l->n_open - l->n_possible;
        return mb_buf_printf(l->out,
                             "waiting for %zu more node%s with %g %s: %zu of %zu such nodes are "
                             "alive",
                             more, plural(more), key->amount, key->name, l->n_possible, l->n_open);
    }
    if (l->n_possible > 0)
        return mb_buf_printf(l->out,
                             "waiting for more nodes: those that are alive cannot hold %zu times "
                             "%g %s together",
                             l->n_open, key->amount, key->name);
    rc = mb_buf_printf(l->out, "waiting for %zu node%s with %g %s", l->n_open, plural(l->n_open),
                       key->amount, key->name);
    return rc | (l->n > 0 ? say_nodes(l, 0, 1) : mb_buf_puts(l->out, ": no node is alive"));
}

static int say_busy(struct look *l)
{
    size_t n = l->g->pub.strategy == MB_PG_STRICT_SPREAD || l->n_open == 1
                   ? l->n_open - l->n_fit
                   : 1; /* of bundles that may share nodes: the next that has no room */
    const struct lack *first = &l->lacks[l->n_fit];
    double missing = 0;
    int rc;

    for (size_t i = 0; i < n; i++)
        if (strcmp(first[i].resource, first->resource) == 0)
            missing += first[i].missing;
    rc = mb_buf_printf(l->out, "waiting for %g more %s on %zu node%s", missing, first->resource, n,
                       plural(n));
    return rc | say_nodes(l, l->n_fit, 0);
}

static int say(struct look *l)
{
    size_t needed = l->g->pub.strategy == MB_PG_STRICT_SPREAD ? l->n_open : 1;

    if (place_is_orphan(l->g))
        return mb_buf_puts(l->out, "its driver is away; it leaves the queue soon");
    /* What no turn in the queue could mend comes first. */
    if (l->bundle && l->bundle->n_resources > 0 && l->n_possible < needed)
        return say_too_small(l);
    if (l->g->behind)
        return say_kept(l);
    if (!l->bundle || l->bundle->n_resources == 0)
        return mb_buf_puts(l->out, "waiting for its turn");
    if (l->n_fit < needed)
        return say_busy(l);
    if (needed < l->n_open && l->g->wait == MB_PLACE_NO_RESOURCES) {
        const struct mb_gcs_resource *key = key_of(l->bundle);
        return mb_buf_printf(l->out,
                             "waiting for room for %zu bundles of up to %g %s: not all of them "
                             "fit on what is free",
                             l->n_open, key->amount, key->name);
    }
    return mb_buf_puts(l->out, "waiting for nodes to confirm: one refused or is giving back what "
                               "it held; trying again");
}

int mb_placement_reason(const struct mb_placement *p, const uint8_t pg_id[MB_PG_ID_BYTES],
                        mb_place_name_fn name_of, void *arg, struct mb_buf *out)
{
    struct look l = {.p = p, .name_of = name_of, .arg = arg, .out = out};
    size_t len = out->len;
    int rc;

    l.g = place_find_group(p, pg_id);
    if (!l.g || !place_is_waiting(l.g))
        return 0;
    rc = look_at_nodes(&l);
    if (rc == 0)
        rc = say(&l);
    mb_free(l.lacks);
    if (rc != 0 && out->data) {
        out->len = len;
        out->data[len] = '\0';
    }
    return rc != 0 ? MB_ENOMEM : 0;
}

size_t mb_placement_nodes_for(const struct mb_placement *p, const uint8_t pg_id[MB_PG_ID_BYTES])
{
    struct look l = {.p = p};
    size_t n = 0;

    l.g = place_find_group(p, pg_id);
    if (!l.g || !place_is_waiting(l.g))
        return 0;
    if (look_at_nodes(&l) == 0)
        n = l.n_fit;
    for (size_t k = 0; k < p->n_nodes; k++)
        n += l.g->pub.strategy == MB_PG_STRICT_SPREAD && holds_one(l.g, k);
    mb_free(l.lacks);
    return n;
}
