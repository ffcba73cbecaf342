/*
 * Why a job waits, or never will start, in words.
 *
 *  1. It waits: its place in line, and what is missing on the node that is kept for it; which one
 *     that is, if there are several.
 *  2. It never fits: of each resource what it needs and the most that a node has; or that no node
 *     has all of it together; or that no node is of the kind it asks for.
 */
#include <math.h>
#include <string.h>
#include "base/str.h"
#include "gcs/job_queue_internal.h"

static int put_amount(struct mb_buf *out, const char *name, double amount)
{
    char human[16];

    if (strcmp(name, MB_JOB_MEMORY) == 0)
        return mb_buf_printf(out, "%s of memory", mb_human_bytes((uint64_t)amount, human));
    if (strcmp(name, MB_JOB_CPU) == 0 || strcmp(name, MB_JOB_GPU) == 0)
        return mb_buf_printf(out, "%g %s%s", amount, name, amount == 1 ? "" : "s");
    return mb_buf_printf(out, "%g %s", amount, name);
}

static int put_bare(struct mb_buf *out, const char *name, double amount)
{
    char human[16];

    if (strcmp(name, MB_JOB_MEMORY) == 0)
        return mb_buf_puts(out, mb_human_bytes((uint64_t)amount, human));
    return mb_buf_printf(out, "%g", amount);
}

/* ---- never ---- */

/* Of what counts: queue_may_use(), queue_could_hold(). */
static size_t count(const struct mb_job_ticket *t,
                    int (*counts)(const struct mb_job_queue *q, const struct mb_job_ticket *t,
                                  const struct mb_job_node *n))
{
    size_t n = 0;

    for (size_t i = 0; i < t->queue->n_nodes; i++)
        n += counts(t->queue, t, t->queue->nodes[i]) != 0;
    return n;
}

/* Of one node that it may use. */
static double most_of(const struct mb_job_ticket *t, size_t k)
{
    double most = 0;

    for (size_t i = 0; i < t->queue->n_nodes; i++)
        if (queue_may_use(t->queue, t, t->queue->nodes[i]))
            most = fmax(most, t->queue->nodes[i]->total[k]);
    return most;
}

/* "needs 3 GPUs, the cluster has 2" of what is beyond the most that a node has. */
static int put_beyond(const struct mb_job_ticket *t, struct mb_buf *out, int *n_put)
{
    const struct mb_job_queue *q = t->queue;
    int rc = 0;

    for (size_t k = 0; k < q->n_kinds && rc == 0; k++) {
        double most = most_of(t, k);

        if (!(t->need[k] > most + QUEUE_EPSILON))
            continue;
        rc = mb_buf_puts(out, (*n_put)++ == 0 ? "It needs " : "; it needs ");
        rc = rc != 0 ? rc : put_amount(out, q->kinds[k].name, t->need[k]);
        rc = rc != 0 ? rc : mb_buf_puts(out, ", the cluster has ");
        rc = rc != 0 ? rc : put_bare(out, q->kinds[k].name, most);
    }
    if (rc == 0 && t->unknown[0] != '\0')
        rc = mb_buf_printf(out, "%s needs %g %s, the cluster has 0",
                           (*n_put)++ == 0 ? "It" : "; it", t->unknown_amount, t->unknown);
    return rc;
}

static int put_never(const struct mb_job_ticket *t, struct mb_buf *out)
{
    int n = 0, rc;

    if (count(t, queue_may_use) == 0)
        return mb_buf_printf(out, "It needs %s, the cluster has none.", t->wish.what);
    rc = put_beyond(t, out, &n);
    if (rc != 0)
        return rc;
    if (n == 0)
        return mb_buf_puts(out, "No node has all together that it needs.");
    return mb_buf_printf(out, " on one node%s%s.", t->wish.what ? " that is " : "",
                         t->wish.what ? t->wish.what : "");
}

/* ---- later ---- */

/* " on node 0123456789ab, one of 3 that could take it", as `mobula status` shows ids. */
static int put_where(const struct mb_job_ticket *t, const struct mb_job_node *at,
                     struct mb_buf *out)
{
    size_t n = count(t, queue_could_hold);

    if (n < 2)
        return 0;
    if (at == t->queue->nodes[0])
        return mb_buf_printf(out, " on the head's node, one of %zu that could take it", n);
    return mb_buf_printf(out, " on node %.12s, one of %zu that could take it", at->name, n);
}

/* ": it needs 2 GPUs, 1 of 4 free": of what is not free at this moment. */
static int put_missing(const struct mb_job_ticket *t, const struct mb_job_node *at,
                       struct mb_buf *out)
{
    const struct mb_job_queue *q = t->queue;
    int rc = 0, n = 0;

    for (size_t k = 0; k < q->n_kinds && rc == 0; k++) {
        double there = queue_free_of(q, at, k);

        if (!(t->need[k] > 0) || t->need[k] <= there + QUEUE_EPSILON)
            continue;
        rc = mb_buf_puts(out, n++ == 0 ? ": it needs " : "; ");
        rc = rc != 0 ? rc : put_amount(out, q->kinds[k].name, t->need[k]);
        rc = rc != 0 ? rc : mb_buf_puts(out, ", ");
        rc = rc != 0 ? rc : put_bare(out, q->kinds[k].name, fmax(0, there));
        rc = rc != 0 ? rc : mb_buf_puts(out, " of ");
        rc = rc != 0 ? rc : put_bare(out, q->kinds[k].name, at->total[k]);
        rc = rc != 0 ? rc : mb_buf_puts(out, " free");
    }
    if (rc == 0 && n > 0)
        rc = put_where(t, at, out);
    else if (rc == 0 && q->running.n >= q->max_running)
        rc = mb_buf_printf(out, ": %zu jobs run, which is the bound (--max-running-jobs)",
                           q->running.n);
    else if (rc == 0 && t->held_for)
        rc = mb_buf_printf(out, ": %s", t->held_for);
    else if (rc == 0 && at->is_closed)
        rc = mb_buf_puts(out, ": its node is not registered yet");
    else if (rc == 0 && t->prev)
        rc = mb_buf_puts(out, ": what is free is kept for jobs before it");
    return rc;
}

/* Where it is to run: kept for it, or the first that could hold it. NULL: nowhere yet. */
static const struct mb_job_node *place_of(const struct mb_job_ticket *t)
{
    if (t->node)
        return t->node;
    if (t->unknown[0] != '\0')
        return NULL;
    for (size_t i = 0; i < t->queue->n_nodes; i++)
        if (queue_could_hold(t->queue, t, t->queue->nodes[i]))
            return t->queue->nodes[i];
    return NULL;
}

static void number(struct mb_job_queue *q)
{
    size_t n = 0;

    for (struct mb_job_ticket *t = q->waiting.first; t; t = t->next)
        t->position = ++n;
    q->is_numbered = 1;
}

int mb_job_queue_reason(struct mb_job_ticket *t, struct mb_buf *out)
{
    struct mb_job_queue *q = t->queue;
    const struct mb_job_node *at;
    int rc;

    if (t->place != MB_JOB_PLACE_COMING && t->place != MB_JOB_PLACE_WAITING)
        return 0;
    if (!t->wish.is_patient && !q->is_unsettled && queue_never_fits(q, t))
        return put_never(t, out);
    if (!q->is_numbered)
        number(q);
    at = place_of(t);
    rc = mb_buf_printf(out, "It is number %zu of %zu in the queue", t->position, q->waiting.n);
    if (rc == 0 && at)
        rc = put_missing(t, at, out);
    else if (rc == 0 && t->wish.is_patient)
        rc = mb_buf_printf(out, ": it waits for %s that has what it needs", t->wish.what);
    else if (rc == 0)
        rc = mb_buf_puts(out, ": nodes have not told yet what they have");
    return rc != 0 ? rc : mb_buf_puts(out, ".");
}
