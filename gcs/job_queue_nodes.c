/*
 * What the nodes have, and what of it is free.
 *
 *  1. A node tells its totals; names that are new become kinds of the queue.
 *  2. hold: inside kinds are counted here; of an outside kind the units are promised until the
 *     driver is confirmed, because what the node tells meanwhile may not know of it yet.
 *  3. unhold: inside kinds are free again; units of an outside kind when the node tells so.
 * Failure paths:
 *  4. More kinds than there is room for: a need of such a kind is of a resource that nobody has.
 *  5. A node goes: what runs there keeps it until it leaves; who is pinned there is pinned anew.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "gcs/job_queue_internal.h"

int queue_kind_of(const struct mb_job_queue *q, const char *name)
{
    for (size_t k = 0; k < q->n_kinds; k++)
        if (strcmp(q->kinds[k].name, name) == 0)
            return (int)k;
    return -1;
}

struct mb_job_node *mb_job_queue_find_node(const struct mb_job_queue *q, const char *name)
{
    for (size_t i = 0; i < q->n_nodes; i++)
        if (!q->nodes[i]->is_gone && strcmp(q->nodes[i]->name, name) == 0)
            return q->nodes[i];
    return NULL;
}

double queue_free_of(const struct mb_job_queue *q, const struct mb_job_node *n, size_t k)
{
    return q->kinds[k].is_outside ? fmax(0, n->told_free[k] - n->promised[k])
                                  : n->total[k] - n->used[k];
}

int queue_may_use(const struct mb_job_queue *q, const struct mb_job_ticket *t,
                  const struct mb_job_node *n)
{
    if (n->is_gone || (t->wish.is_plain && n != q->nodes[0]))
        return 0;
    return !t->wish.what || !q->may_use || q->may_use(q->arg, t, n->name);
}

int queue_could_hold(const struct mb_job_queue *q, const struct mb_job_ticket *t,
                     const struct mb_job_node *n)
{
    for (size_t k = 0; k < q->n_kinds; k++)
        if (t->need[k] > n->total[k] + QUEUE_EPSILON)
            return 0;
    return queue_may_use(q, t, n);
}

int queue_never_fits(const struct mb_job_queue *q, const struct mb_job_ticket *t)
{
    if (t->unknown[0] != '\0')
        return 1;
    for (size_t i = 0; i < q->n_nodes; i++)
        if (queue_could_hold(q, t, q->nodes[i]))
            return 0;
    return 1;
}

/* ---- nodes come and go ---- */

static struct mb_job_node *new_node(struct mb_job_queue *q, const char *name)
{
    struct mb_job_node **nodes = mb_reallocarray(q->nodes, q->n_nodes + 1, sizeof *nodes);
    struct mb_job_node *n = mb_calloc(1, sizeof *n);

    if (nodes)
        q->nodes = nodes;
    if (!nodes || !n) {
        mb_free(n);
        return NULL;
    }
    snprintf(n->name, sizeof n->name, "%s", name);
    q->nodes[q->n_nodes++] = n;
    return n;
}

/* -1: there is no room for another. */
static int make_kind(struct mb_job_queue *q, const struct mb_job_amount *total, int *is_new)
{
    int k = queue_kind_of(q, total->name);

    if (k >= 0 || q->n_kinds == MB_JOB_QUEUE_KINDS_MAX)
        return k;
    k = (int)q->n_kinds++;
    snprintf(q->kinds[k].name, sizeof q->kinds[k].name, "%s", total->name);
    q->kinds[k].is_outside = total->is_outside;
    *is_new = 1;
    return k;
}

int mb_job_queue_node(struct mb_job_queue *q, const char *node, const struct mb_job_amount *totals,
                      size_t n, int *is_new_kind, struct mb_err *err)
{
    struct mb_job_node *at = mb_job_queue_find_node(q, node);
    int rc = 0;

    *is_new_kind = 0;
    if (!at && !(at = new_node(q, node)))
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    memset(at->total, 0, sizeof at->total);
    for (size_t i = 0; i < n; i++) {
        int k = make_kind(q, &totals[i], is_new_kind);

        if (k >= 0)
            at->total[k] = totals[i].amount;
        else if (rc == 0)
            rc = mb_err_set(err, MB_EFULL, "%.64s: more than %d kinds of resources, it is left out",
                            totals[i].name, MB_JOB_QUEUE_KINDS_MAX);
    }
    return rc;
}

static void drop_node(struct mb_job_queue *q, struct mb_job_node *n)
{
    for (size_t i = 1; i < q->n_nodes; i++) {
        if (q->nodes[i] != n)
            continue;
        q->nodes[i] = q->nodes[--q->n_nodes];
        mb_free(n);
        return;
    }
}

void mb_job_queue_node_gone(struct mb_job_queue *q, const char *node)
{
    struct mb_job_node *n = mb_job_queue_find_node(q, node);

    if (!n || n == q->nodes[0])
        return;
    n->is_gone = 1;
    for (struct mb_job_ticket *t = q->waiting.first; t; t = t->next)
        if (t->node == n)
            t->node = NULL;
    if (n->n_running == 0)
        drop_node(q, n);
}

void mb_job_queue_node_free(struct mb_job_queue *q, struct mb_job_node *node, const char *name,
                            double amount)
{
    int k = queue_kind_of(q, name);

    if (node && k >= 0 && q->kinds[k].is_outside)
        node->told_free[k] = amount;
}

void mb_job_queue_set_free(struct mb_job_queue *q, const char *node, const char *name,
                           double amount)
{
    mb_job_queue_node_free(q, mb_job_queue_find_node(q, node), name, amount);
}

int mb_job_queue_look(const struct mb_job_queue *q, const char *node, size_t k,
                      struct mb_job_amount *total, double *taken)
{
    const struct mb_job_node *n = mb_job_queue_find_node(q, node);

    if (!n || k >= q->n_kinds)
        return 0;
    *total = (struct mb_job_amount){.amount = n->total[k], .is_outside = q->kinds[k].is_outside};
    memcpy(total->name, q->kinds[k].name, sizeof total->name);
    *taken = n->total[k] - queue_free_of(q, n, k);
    return 1;
}

void mb_job_queue_close_node(struct mb_job_queue *q, const char *node, int is_closed)
{
    struct mb_job_node *n = mb_job_queue_find_node(q, node);

    if (n)
        n->is_closed = is_closed;
}

void mb_job_queue_settled(struct mb_job_queue *q, int is_settled)
{
    q->is_unsettled = !is_settled;
}

const char *mb_job_queue_node_of(const struct mb_job_ticket *t)
{
    return t->place == MB_JOB_PLACE_RUNNING ? t->node->name : NULL;
}

void queue_free_nodes(struct mb_job_queue *q)
{
    for (size_t i = 0; i < q->n_nodes; i++)
        mb_free(q->nodes[i]);
    mb_free(q->nodes);
}

/* ---- what is held ---- */

void queue_hold(struct mb_job_ticket *t, struct mb_job_node *n)
{
    const struct mb_job_queue *q = t->queue;

    for (size_t k = 0; k < q->n_kinds; k++)
        *(q->kinds[k].is_outside ? &n->promised[k] : &n->used[k]) += t->need[k];
    n->n_running++;
    t->node = n;
    t->is_confirmed = 0;
    t->place = MB_JOB_PLACE_RUNNING;
}

void mb_job_queue_confirm(struct mb_job_ticket *t)
{
    const struct mb_job_queue *q = t->queue;

    if (t->place != MB_JOB_PLACE_RUNNING || t->is_confirmed)
        return;
    t->is_confirmed = 1;
    for (size_t k = 0; k < q->n_kinds; k++) {
        if (!q->kinds[k].is_outside)
            continue;
        t->node->promised[k] = fmax(0, t->node->promised[k] - t->need[k]);
        t->node->told_free[k] = fmax(0, t->node->told_free[k] - t->need[k]);
    }
}

void queue_unhold(struct mb_job_ticket *t)
{
    struct mb_job_queue *q = t->queue;
    struct mb_job_node *n = t->node;

    for (size_t k = 0; k < q->n_kinds; k++) {
        if (!q->kinds[k].is_outside)
            n->used[k] = fmax(0, n->used[k] - t->need[k]);
        else if (!t->is_confirmed)
            n->promised[k] = fmax(0, n->promised[k] - t->need[k]);
    }
    t->node = NULL;
    if (--n->n_running > 0)
        return;
    memset(n->used, 0, sizeof n->used); /* what rounding left */
    memset(n->promised, 0, sizeof n->promised);
    if (n->is_gone)
        drop_node(q, n);
}
