/* Placement: the ledger of nodes and what is booked on them. A dead node has nothing on it, so its
 * entry serves the next node. */
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "gcs/placement_internal.h"

size_t place_find_node(const struct mb_placement *p, const uint8_t *id)
{
    for (size_t i = 0; i < p->n_nodes; i++)
        if (memcmp(p->nodes[i]->id, id, MB_NODE_ID_BYTES) == 0)
            return i;
    return PLACE_NOWHERE;
}

static double *amount_at(struct mb_gcs_resource *r, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(r[i].name, name) == 0)
            return &r[i].amount;
    return NULL;
}

static void add_to(struct mb_gcs_resource *sums, size_t n, const struct mb_gcs_bundle *b,
                   double sign)
{
    for (size_t i = 0; i < b->n_resources; i++) {
        double *amount = amount_at(sums, n, b->resources[i].name);
        if (amount)
            *amount += sign * b->resources[i].amount;
    }
}

void place_book(struct node *node, const struct mb_gcs_bundle *b, double sign)
{
    add_to(node->booked, node->n, b, sign);
}

void place_expect_back(struct mb_placement *p, size_t node, const struct mb_gcs_bundle *b, int sign)
{
    add_to(p->nodes[node]->back, p->nodes[node]->n, b, sign);
    p->n_returning += (size_t)sign;
}

static char *copy_names(const struct mb_gcs_resource *in, size_t n, size_t extra, char **end)
{
    size_t bytes = extra + 1;

    for (size_t i = 0; i < n; i++)
        bytes += strlen(in[i].name) + 1;
    char *text = mb_calloc(1, bytes);
    *end = text;
    return text;
}

char *place_put_name(char **end, const char *name)
{
    char *at = *end;
    size_t n = strlen(name) + 1;

    memcpy(at, name, n);
    *end += n;
    return at;
}

void place_free_node(struct node *node)
{
    if (!node)
        return;
    mb_free(node->text);
    mb_free(node->total);
    mb_free(node);
}

/* One block holds the five arrays. */
static struct node *new_node(const uint8_t *id, const struct mb_gcs_resource *total, size_t n)
{
    struct node *node = mb_calloc(1, sizeof *node);
    char *end;

    if (!node)
        return NULL;
    node->text = copy_names(total, n, 0, &end);
    node->total = mb_calloc(5 * n, sizeof *node->total);
    if (!node->text || !node->total) {
        place_free_node(node);
        return NULL;
    }
    node->booked = node->total + n;
    node->back = node->booked + n;
    node->said = node->back + n;
    node->free = node->said + n;
    node->n = n;
    memcpy(node->id, id, MB_NODE_ID_BYTES);
    for (size_t i = 0; i < n; i++) {
        char *name = place_put_name(&end, total[i].name);
        node->total[i] = (struct mb_gcs_resource){name, total[i].amount};
        node->booked[i] = node->back[i] = (struct mb_gcs_resource){name, 0};
        node->said[i] = node->free[i] = node->total[i];
    }
    return node;
}

/* What groups hold on node i, booked onto its (new) entry. */
static void rebook(struct mb_placement *p, size_t node)
{
    for (size_t i = 0; i < p->n_groups; i++) {
        struct group *g = p->groups[i];
        for (size_t k = 0; k < g->pub.n_bundles; k++) {
            struct bundle *b = &g->b[k];
            if (b->phase != NONE && b->node == node)
                place_book(p->nodes[node], b->pub, +1);
            for (size_t r = 0; r < MB_PLACE_RETURNS; r++)
                if (b->back[r].phase != NO_RETURN && b->back[r].node == node) {
                    place_book(p->nodes[node], b->pub, +1);
                    add_to(p->nodes[node]->back, p->nodes[node]->n, b->pub,
                           b->back[r].is_late ? 0 : +1);
                }
        }
    }
}

int mb_placement_node_up(struct mb_placement *p, const uint8_t node_id[MB_NODE_ID_BYTES],
                         const struct mb_gcs_resource *total, size_t n, struct mb_err *err)
{
    struct node *node = new_node(node_id, total, n);
    size_t at = place_find_node(p, node_id);

    if (!node)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    node->up = 1;
    p->epoch++;
    p->fleet++;
    if (at != PLACE_NOWHERE) {
        place_free_node(p->nodes[at]);
        p->nodes[at] = node;
        rebook(p, at);
        return 0;
    }
    for (size_t i = 0; i < p->n_nodes; i++) {
        if (!p->nodes[i]->up) {
            place_free_node(p->nodes[i]);
            p->nodes[i] = node;
            return 0;
        }
    }
    struct node **nodes = mb_reallocarray(p->nodes, p->n_nodes + 1, sizeof *nodes);
    if (!nodes) {
        place_free_node(node);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    p->nodes = nodes;
    p->nodes[p->n_nodes++] = node;
    return 0;
}

void mb_placement_node_view(struct mb_placement *p, const uint8_t node_id[MB_NODE_ID_BYTES],
                            const struct mb_gcs_resource *available, size_t n, int is_draining)
{
    size_t at = place_find_node(p, node_id);

    if (at == PLACE_NOWHERE || !p->nodes[at]->up)
        return;
    struct node *node = p->nodes[at];
    for (size_t i = 0; i < node->n; i++) {
        double amount = 0;
        for (size_t k = 0; k < n; k++)
            if (strcmp(available[k].name, node->said[i].name) == 0)
                amount = available[k].amount;
        if (amount > node->said[i].amount)
            p->epoch++;
        node->said[i].amount = amount;
    }
    if (node->draining && !is_draining)
        p->epoch++;
    p->fleet += node->draining != is_draining;
    node->draining = is_draining;
}

void mb_placement_node_dead(struct mb_placement *p, const uint8_t node_id[MB_NODE_ID_BYTES])
{
    size_t at = place_find_node(p, node_id);

    if (at == PLACE_NOWHERE || !p->nodes[at]->up)
        return;
    p->nodes[at]->up = 0;
    p->fleet++;
    for (size_t i = 0; i < p->n_groups; i++) {
        struct group *g = p->groups[i];
        int lost = 0;

        for (size_t k = 0; k < g->pub.n_bundles; k++) {
            struct bundle *b = &g->b[k];
            for (size_t r = 0; r < MB_PLACE_RETURNS; r++)
                if (b->back[r].phase != NO_RETURN && b->back[r].node == at)
                    place_end_return(p, b, &b->back[r]);
            if (b->phase != NONE && b->node == at) {
                place_leave(p, b);
                lost = 1;
            }
        }
        if (!lost)
            continue;
        if (place_is_attempting(g))
            place_roll_back(p, g, g->state == PREPARED); /* before CREATED it is all or nothing */
        place_transition(g, BUNDLE_LOST);
        g->changed = 1; /* the places, also where the state stays */
        g->try_ms = 0;
        g->seen_epoch = 0;
    }
}
