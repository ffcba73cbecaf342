/* Placement: the promises, recomputed from scratch. For tests. */
#include <math.h>
#include <string.h>
#include "gcs/placement_internal.h"

static double demand(const struct mb_gcs_bundle *b, const char *name)
{
    for (size_t i = 0; i < b->n_resources; i++)
        if (strcmp(b->resources[i].name, name) == 0)
            return b->resources[i].amount;
    return 0;
}

/* *back: of that, what is on its way back. */
static double sum_on(const struct mb_placement *p, size_t node, const char *name, double *back)
{
    double sum = 0;

    *back = 0;
    for (size_t i = 0; i < p->n_groups; i++) {
        const struct group *g = p->groups[i];
        for (size_t k = 0; k < g->pub.n_bundles; k++) {
            const struct bundle *b = &g->b[k];
            if (b->phase != NONE && b->node == node)
                sum += demand(b->pub, name);
            for (size_t r = 0; r < MB_PLACE_RETURNS; r++)
                if (b->back[r].phase != NO_RETURN && b->back[r].node == node)
                    *(b->back[r].is_late ? &sum : back) += demand(b->pub, name);
        }
    }
    return sum + *back;
}

static int check_group(const struct mb_placement *p, const struct group *g, struct mb_err *err)
{
    size_t committed = 0, placed = 0;

    for (size_t i = 0; i < g->pub.n_bundles; i++) {
        const struct bundle *b = &g->b[i];
        committed += b->phase == COMMITTED;
        placed += b->phase != NONE;
        if (b->phase != NONE && !p->nodes[b->node]->up)
            return mb_err_set(err, MB_ESTATE, "bundle %zu sits on a dead node", i);
        if ((b->phase == COMMITTED) != (b->pub->has_node != 0))
            return mb_err_set(err, MB_ESTATE, "bundle %zu: node shown, phase %d", i, b->phase);
        for (size_t k = 0; g->pub.strategy == MB_PG_STRICT_SPREAD && k < i; k++)
            if (b->phase != NONE && g->b[k].phase != NONE && g->b[k].node == b->node)
                return mb_err_set(err, MB_ESTATE, "bundles %zu and %zu share a node", k, i);
        for (size_t k = 0; g->pub.strategy == MB_PG_STRICT_PACK && k < i; k++)
            if (b->phase != NONE && g->b[k].phase != NONE && g->b[k].node != b->node)
                return mb_err_set(err, MB_ESTATE, "bundles %zu and %zu are apart", k, i);
    }
    if (g->state == CREATED && committed != g->pub.n_bundles)
        return mb_err_set(err, MB_ESTATE, "CREATED with %zu bundles committed", committed);
    if ((g->state == PENDING || g->state == REMOVED) && placed != 0)
        return mb_err_set(err, MB_ESTATE, "state %d holds %zu bundles", g->state, placed);
    if (g->state == PREPARING && committed != 0)
        return mb_err_set(err, MB_ESTATE, "committed before all were prepared");
    if (place_is_attempting(g) && placed != g->pub.n_bundles)
        return mb_err_set(err, MB_ESTATE, "an attempt with %zu places", placed);
    return 0;
}

static size_t n_expected(const struct mb_placement *p)
{
    size_t n = 0;

    for (size_t i = 0; i < p->n_groups; i++)
        for (size_t k = 0; k < p->groups[i]->pub.n_bundles; k++)
            for (size_t r = 0; r < MB_PLACE_RETURNS; r++) {
                const struct returning *back = &p->groups[i]->b[k].back[r];

                n += back->phase != NO_RETURN && !back->is_late;
            }
    return n;
}

int mb_placement_check(const struct mb_placement *p, struct mb_err *err)
{
    if (n_expected(p) != p->n_returning)
        return mb_err_set(err, MB_ESTATE, "%zu bundles expected back, %zu returning",
                          p->n_returning, n_expected(p));
    for (size_t k = 0; k < p->n_nodes; k++) {
        const struct node *node = p->nodes[k];
        for (size_t i = 0; i < node->n; i++) {
            double back, sum = sum_on(p, k, node->total[i].name, &back);
            if (fabs(back - node->back[i].amount) > 1e-6)
                return mb_err_set(err, MB_ESTATE, "node %zu: %g of %s expected back, %g returning",
                                  k, node->back[i].amount, node->total[i].name, back);
            if (fabs(sum - node->booked[i].amount) > 1e-6)
                return mb_err_set(err, MB_ESTATE, "node %zu: %g of %s booked, %g held", k,
                                  node->booked[i].amount, node->total[i].name, sum);
            if (node->up && sum > node->total[i].amount + 1e-6)
                return mb_err_set(err, MB_ESTATE, "node %zu: %g of %g %s booked", k, sum,
                                  node->total[i].amount, node->total[i].name);
        }
    }
    for (size_t i = 0; i < p->n_groups; i++) {
        int rc = check_group(p, p->groups[i], err);
        if (rc != 0)
            return mb_err_wrap(err, "group %zu (state %d)", i, p->groups[i]->state);
    }
    return 0;
}
