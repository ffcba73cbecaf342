/*
 *  STRICT_SPREAD is a bipartite matching (augmenting paths), so bundles of different size find
 * their nodes whenever an assignment exists. PACK fills the node that takes most of what is left.
 * SPREAD takes the fitting node with fewest bundles of the group, and packs if that leads nowhere.
 *  STRICT_PACK takes the first node that holds all.
 */
#include "gcs/placement_plan.h"

#include <string.h>
#include "base/alloc.h"
#include "base/err.h"

static const size_t NOWHERE = (size_t)-1;
static const size_t TRIED = (size_t)-2;
static const double EPSILON = 1e-6; /* below Ray's resolution of 1e-4 */

static double amount_of(const struct mb_gcs_resource *r, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(r[i].name, name) == 0)
            return r[i].amount;
    return 0;
}

int mb_plan_fits(const struct mb_gcs_bundle *b, const struct mb_gcs_resource *free, size_t n_free)
{
    for (size_t i = 0; i < b->n_resources; i++)
        if (amount_of(free, n_free, b->resources[i].name) + EPSILON < b->resources[i].amount)
            return 0;
    return 1;
}

static void change(struct mb_plan_node *node, const struct mb_gcs_bundle *b, double sign)
{
    for (size_t i = 0; i < b->n_resources; i++)
        for (size_t k = 0; k < node->n_free; k++)
            if (strcmp(node->free[k].name, b->resources[i].name) == 0)
                node->free[k].amount += sign * b->resources[i].amount;
}

struct matching {
    const struct mb_gcs_bundle *const *bundles;
    const struct mb_plan_node *nodes;
    size_t n_nodes;
    size_t *holder;      /* node -> bundle or NOWHERE */
    unsigned char *seen; /* node visited in this search */
};

/* Find a node for bundle b, moving earlier bundles to other nodes where that helps. */
static int augment(struct matching *m, size_t b)
{
    for (size_t k = 0; k < m->n_nodes; k++) {
        const struct mb_plan_node *node = &m->nodes[k];

        if (m->seen[k] || node->n_held > 0 ||
            !mb_plan_fits(m->bundles[b], node->free, node->n_free))
            continue;
        m->seen[k] = 1;
        if (m->holder[k] == NOWHERE || augment(m, m->holder[k])) {
            m->holder[k] = b;
            return 1;
        }
    }
    return 0;
}

static int strict_spread(const struct mb_gcs_bundle *const *bundles, size_t n,
                         const struct mb_plan_node *nodes, size_t n_nodes, size_t *out)
{
    struct matching m = {.bundles = bundles, .nodes = nodes, .n_nodes = n_nodes};
    int found = 1;

    m.holder = mb_reallocarray(NULL, n_nodes ? n_nodes : 1, sizeof *m.holder);
    m.seen = mb_alloc(n_nodes);
    if (!m.holder || !m.seen) {
        found = MB_ENOMEM;
        goto done;
    }
    for (size_t k = 0; k < n_nodes; k++)
        m.holder[k] = NOWHERE;
    for (size_t b = 0; b < n && found == 1; b++) {
        memset(m.seen, 0, n_nodes);
        found = augment(&m, b);
    }
    for (size_t k = 0; k < n_nodes && found == 1; k++)
        if (m.holder[k] != NOWHERE)
            out[m.holder[k]] = k;
done:
    mb_free(m.holder);
    mb_free(m.seen);
    return found;
}

/* Puts as many of the open bundles as fit, in order, on one node; keep 0 only counts them. */
static size_t fill(const struct mb_gcs_bundle *const *bundles, size_t n, struct mb_plan_node *node,
                   size_t k, size_t *out, int keep)
{
    size_t count = 0;

    for (size_t b = 0; b < n; b++) {
        if (out[b] != NOWHERE || !mb_plan_fits(bundles[b], node->free, node->n_free))
            continue;
        change(node, bundles[b], -1);
        out[b] = TRIED; /* apart from what an earlier round put on this node */
        count++;
    }
    for (size_t b = 0; b < n; b++) {
        if (out[b] != TRIED)
            continue;
        out[b] = keep ? k : NOWHERE;
        if (!keep)
            change(node, bundles[b], +1);
    }
    return count;
}

static int pack(const struct mb_gcs_bundle *const *bundles, size_t n, struct mb_plan_node *nodes,
                size_t n_nodes, size_t *out)
{
    size_t left = n;

    while (left > 0) {
        size_t best = NOWHERE, best_count = 0, best_held = 0;

        for (size_t k = 0; k < n_nodes; k++) {
            size_t count = fill(bundles, n, &nodes[k], k, out, 0);
            if (count > best_count ||
                (count == best_count && count > 0 && nodes[k].n_held > best_held)) {
                best = k;
                best_count = count;
                best_held = nodes[k].n_held;
            }
        }
        if (best == NOWHERE)
            return 0;
        left -= fill(bundles, n, &nodes[best], best, out, 1);
    }
    return 1;
}

static int strict_pack(const struct mb_gcs_bundle *const *bundles, size_t n,
                       struct mb_plan_node *nodes, size_t n_nodes, size_t *out)
{
    size_t anchor = NOWHERE;

    for (size_t k = 0; k < n_nodes; k++)
        if (nodes[k].n_held > 0)
            anchor = k;
    for (size_t k = 0; k < n_nodes; k++) {
        if (anchor != NOWHERE && k != anchor)
            continue;
        if (fill(bundles, n, &nodes[k], k, out, 0) == n) {
            fill(bundles, n, &nodes[k], k, out, 1);
            return 1;
        }
    }
    return 0;
}

static void open_all(size_t *out, size_t n)
{
    for (size_t b = 0; b < n; b++)
        out[b] = NOWHERE;
}

static int spread(const struct mb_gcs_bundle *const *bundles, size_t n, struct mb_plan_node *nodes,
                  size_t n_nodes, size_t *out)
{
    for (size_t b = 0; b < n; b++) {
        size_t best = NOWHERE;

        for (size_t k = 0; k < n_nodes; k++)
            if (mb_plan_fits(bundles[b], nodes[k].free, nodes[k].n_free) &&
                (best == NOWHERE || nodes[k].n_held < nodes[best].n_held))
                best = k;
        if (best == NOWHERE) {
            for (size_t done = 0; done < b; done++)
                change(&nodes[out[done]], bundles[done], +1);
            open_all(out, n);
            return pack(bundles, n, nodes, n_nodes, out);
        }
        change(&nodes[best], bundles[b], -1);
        nodes[best].n_held++;
        out[b] = best;
    }
    return 1;
}

int mb_plan_bundles(enum mb_pg_strategy strategy, const struct mb_gcs_bundle *const *bundles,
                    size_t n, struct mb_plan_node *nodes, size_t n_nodes, size_t *out)
{
    open_all(out, n);
    switch (strategy) {
    case MB_PG_STRICT_SPREAD:
        return strict_spread(bundles, n, nodes, n_nodes, out);
    case MB_PG_SPREAD:
        return spread(bundles, n, nodes, n_nodes, out);
    case MB_PG_STRICT_PACK:
        return strict_pack(bundles, n, nodes, n_nodes, out);
    case MB_PG_PACK:
        break;
    }
    return pack(bundles, n, nodes, n_nodes, out);
}
