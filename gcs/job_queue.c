/*
 *  1. add: the job is last in line, COMING until its record is stored.
 *  2. next: walk the line from the front. Each job that fits into what is left starts; each that
 *     does not sets aside what there is of its need, for those behind it not to take.
 *  3. leave: what the job held is free again, and the next walk gives it to the first who needs it.
 *  Failure paths:
 *  4. The line is full: the newcomer is refused.
 *  5. A need beyond the total, or of a resource that nobody has: the job never fits. It takes part
 *     in nothing, and is given out as NEVER_FITS when it was seen, or has waited long enough.
 *  6. It has waited longer than it wanted to: TIMED_OUT.
 *  7. The line is long and there are many nodes: one walk looks at nodes for the front of the line,
 *     always, and for a stretch of those behind; the next walk for the next stretch, until all had
 *     their turn. For the others it only sets aside what they need where they are pinned.
 *  8. A start that was put back: in its old place, and not tried again before its time. What it
 *     needs is set aside as for any other that waits.
 *
 * A job that is COMING is always behind all that are WAITING, since records are stored in the order
 * in which they came; the walk ends at the first.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "gcs/job_queue_internal.h"

enum {
    FULL_WALK_MS = 250, /* when no place is free, a walk only finds what is overdue */
    /* Looks at nodes in one walk, a few milliseconds: for the front of the line, and behind. */
    LOOKS_FRONT = 100000,
    LOOKS_BEHIND = 100000
};

/* ---- lines ---- */

static void append(struct queue_line *l, struct mb_job_ticket *t)
{
    t->prev = l->last;
    t->next = NULL;
    *(l->last ? &l->last->next : &l->first) = t;
    l->last = t;
    l->n++;
}

/* Before the first that joined later. */
static void insert(struct queue_line *l, struct mb_job_ticket *t)
{
    struct mb_job_ticket *after = l->first;

    while (after && after->number < t->number)
        after = after->next;
    if (!after) {
        append(l, t);
        return;
    }
    t->prev = after->prev;
    t->next = after;
    *(after->prev ? &after->prev->next : &l->first) = t;
    after->prev = t;
    l->n++;
}

static void unlink_ticket(struct queue_line *l, struct mb_job_ticket *t)
{
    *(t->prev ? &t->prev->next : &l->first) = t->next;
    *(t->next ? &t->next->prev : &l->last) = t->prev;
    t->prev = t->next = NULL;
    l->n--;
}

static void take_from_waiting(struct mb_job_queue *q, struct mb_job_ticket *t)
{
    if (q->turn == t)
        q->turn = t->next;
    unlink_ticket(&q->waiting, t);
    q->is_numbered = 0;
}

/* ---- life ---- */

int mb_job_queue_create(const struct mb_job_queue_opts *opts, struct mb_job_queue **out,
                        struct mb_err *err)
{
    struct mb_job_queue *q;
    int is_new;

    if (opts->n_totals > MB_JOB_QUEUE_KINDS_MAX)
        return mb_err_set(err, MB_EINVAL,
                          "%zu kinds of resources for jobs, at most %d are possible",
                          opts->n_totals, MB_JOB_QUEUE_KINDS_MAX);
    q = mb_calloc(1, sizeof *q);
    if (!q)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    if (mb_job_queue_node(q, MB_JOB_HEAD_NODE, opts->totals, opts->n_totals, &is_new, err) != 0) {
        mb_job_queue_destroy(q);
        return MB_ENOMEM;
    }
    q->max_running = opts->max_running;
    q->max_waiting = opts->max_waiting;
    q->may_use = opts->may_use;
    q->arg = opts->arg;
    *out = q;
    return 0;
}

void mb_job_queue_destroy(struct mb_job_queue *q)
{
    if (q)
        queue_free_nodes(q);
    mb_free(q);
}

void mb_job_queue_set_needs(struct mb_job_ticket *t, const struct mb_job_amount *needs, size_t n)
{
    const struct mb_job_queue *q = t->queue;

    memset(t->need, 0, sizeof t->need);
    t->unknown[0] = '\0';
    for (size_t i = 0; i < n; i++) {
        int k = queue_kind_of(q, needs[i].name);

        if (!(needs[i].amount > 0))
            continue;
        if (k >= 0) {
            /* A device that others count in whole units is never shared. */
            t->need[k] += q->kinds[k].is_outside ? ceil(needs[i].amount) : needs[i].amount;
        } else if (t->unknown[0] == '\0') {
            snprintf(t->unknown, sizeof t->unknown, "%s", needs[i].name);
            t->unknown_amount = needs[i].amount;
        }
    }
}

int mb_job_queue_add(struct mb_job_queue *q, struct mb_job_ticket *t,
                     const struct mb_job_amount *needs, size_t n, uint64_t timeout_ms,
                     uint64_t now_ms, int forced, struct mb_err *err)
{
    if (q->waiting.n >= q->max_waiting && !forced)
        return mb_err_set(err, MB_EFULL,
                          "%zu jobs wait already, which is the bound of this head "
                          "(--max-queued-jobs); submit again when some have started",
                          q->waiting.n);
    *t = (struct mb_job_ticket){.queue = q};
    mb_job_queue_set_needs(t, needs, n);
    t->number = ++q->n_joined;
    t->since_ms = now_ms;
    t->timeout_ms = timeout_ms;
    t->place = MB_JOB_PLACE_COMING;
    append(&q->waiting, t);
    q->is_numbered = 0;
    return 0;
}

void mb_job_queue_ready(struct mb_job_ticket *t)
{
    if (t->place == MB_JOB_PLACE_COMING)
        t->place = MB_JOB_PLACE_WAITING;
}

void mb_job_queue_wish(struct mb_job_ticket *t, const struct mb_job_wish *wish)
{
    t->wish = *wish;
}

void mb_job_queue_adopt(struct mb_job_queue *q, struct mb_job_ticket *t, const char *node,
                        const struct mb_job_amount *needs, size_t n)
{
    struct mb_job_node *at = mb_job_queue_find_node(q, node);

    *t = (struct mb_job_ticket){.queue = q};
    mb_job_queue_set_needs(t, needs, n);
    t->number = ++q->n_joined;
    queue_hold(t, at ? at : q->nodes[0]);
    append(&q->running, t);
    mb_job_queue_confirm(t);
}

void mb_job_queue_put_back(struct mb_job_ticket *t, uint64_t until_ms, const char *why)
{
    struct mb_job_queue *q = t->queue;

    if (t->place != MB_JOB_PLACE_RUNNING)
        return;
    queue_unhold(t);
    unlink_ticket(&q->running, t);
    t->place = MB_JOB_PLACE_WAITING;
    t->held_until_ms = until_ms;
    t->held_for = why;
    insert(&q->waiting, t);
    q->is_numbered = 0;
}

void mb_job_queue_release(struct mb_job_queue *q)
{
    for (struct mb_job_ticket *t = q->waiting.first; t; t = t->next) {
        t->held_until_ms = 0;
        t->held_for = NULL;
    }
}

void mb_job_queue_leave(struct mb_job_ticket *t)
{
    struct mb_job_queue *q = t->queue;

    if (t->place == MB_JOB_PLACE_RUNNING) {
        queue_unhold(t);
        unlink_ticket(&q->running, t);
    } else if (t->place != MB_JOB_PLACE_NONE) {
        take_from_waiting(q, t);
    }
    *t = (struct mb_job_ticket){.place = MB_JOB_PLACE_NONE};
}

void mb_job_queue_seen(struct mb_job_ticket *t, uint64_t now_ms)
{
    if (t->place == MB_JOB_PLACE_WAITING && t->seen_ms == 0)
        t->seen_ms = now_ms;
}

/* ---- decisions ---- */

static int fits(const struct mb_job_queue *q, const struct mb_job_ticket *t,
                const struct mb_job_node *n)
{
    for (size_t k = 0; k < q->n_kinds; k++)
        if (t->need[k] > 0 && t->need[k] > n->left[k] + QUEUE_EPSILON)
            return 0;
    return 1;
}

/* The part of its scarcest need that is there. */
static double share_of(const struct mb_job_queue *q, const struct mb_job_ticket *t,
                       const struct mb_job_node *n)
{
    double least = 1;

    for (size_t k = 0; k < q->n_kinds; k++)
        if (t->need[k] > 0)
            least = fmin(least, n->left[k] / t->need[k]);
    return least;
}

/* What a look at all nodes finds for one job. */
struct look {
    struct mb_job_node *now;   /* it fits there at this moment */
    struct mb_job_node *later; /* it would, were the node empty, and lacks least of all such */
};

static struct look look_at_nodes(const struct mb_job_queue *q, const struct mb_job_ticket *t,
                                 long *looks_left)
{
    size_t n = t->wish.is_plain ? 1 : q->n_nodes;
    struct look out = {0};
    double best = -1;

    *looks_left -= (long)n;
    for (size_t i = 0; i < n; i++) {
        struct mb_job_node *at = q->nodes[i];
        double share;

        if (!queue_could_hold(q, t, at))
            continue;
        share = share_of(q, t, at);
        if (share > best) {
            out.later = at;
            best = share;
        }
        if (at->is_closed || !fits(q, t, at))
            continue;
        if (i == 0) { /* the head's node comes first */
            out.now = at;
            break;
        }
        if (!out.now || at->n_running < out.now->n_running)
            out.now = at;
    }
    return out;
}

static void set_aside(const struct mb_job_queue *q, const struct mb_job_ticket *t)
{
    for (size_t k = 0; t->node && k < q->n_kinds; k++)
        t->node->left[k] = fmax(0, t->node->left[k] - t->need[k]);
}

/* It keeps its pin while that node could hold it. */
static void pin(const struct mb_job_queue *q, struct mb_job_ticket *t, struct look found)
{
    if (!t->node || !queue_could_hold(q, t, t->node))
        t->node = found.later;
}

static void begin_walk(struct mb_job_queue *q)
{
    for (size_t i = 0; i < q->n_nodes; i++)
        for (size_t k = 0; k < q->n_kinds; k++)
            q->nodes[i]->left[k] = queue_free_of(q, q->nodes[i], k);
}

static void start(struct mb_job_queue *q, struct mb_job_ticket *t, struct mb_job_node *n)
{
    take_from_waiting(q, t);
    queue_hold(t, n);
    append(&q->running, t);
}

static int verdict_is_due(const struct mb_job_ticket *t, uint64_t now_ms)
{
    return (t->seen_ms != 0 && now_ms >= t->seen_ms + MB_JOB_QUEUE_SEEN_MS) ||
           now_ms >= t->since_ms + MB_JOB_QUEUE_UNSEEN_MS;
}

/* One job of the line. NOTHING: it waits on. */
static enum mb_job_queue_action judge(struct mb_job_queue *q, struct mb_job_ticket *t,
                                      uint64_t now_ms, int has_place, long *looks_left)
{
    struct look found = {0};

    if (t->unknown[0] == '\0')
        found = look_at_nodes(q, t, looks_left);
    if (has_place && found.now && now_ms >= t->held_until_ms) {
        start(q, t, found.now);
        return MB_JOB_QUEUE_START;
    }
    if (!found.later)
        t->node = NULL;
    if (!found.later && !t->wish.is_patient)
        return verdict_is_due(t, now_ms) && !q->is_unsettled ? MB_JOB_QUEUE_NEVER_FITS
                                                             : MB_JOB_QUEUE_NOTHING;
    if (t->timeout_ms > 0 && now_ms >= t->since_ms + t->timeout_ms)
        return MB_JOB_QUEUE_TIMED_OUT;
    if (found.later)
        pin(q, t, found);
    set_aside(q, t);
    return MB_JOB_QUEUE_NOTHING;
}

/* Whose looks t is looked at with. NULL: with none in this walk. */
static long *looks_for(long *front, long *behind, int has_turn)
{
    if (*front > 0)
        return front;
    return has_turn && *behind > 0 ? behind : NULL;
}

enum mb_job_queue_action mb_job_queue_next(struct mb_job_queue *q, uint64_t now_ms,
                                           struct mb_job_ticket **out)
{
    size_t places = q->max_running > q->running.n ? q->max_running - q->running.n : 0;
    long front = LOOKS_FRONT, behind = LOOKS_BEHIND;
    int place_is_set_aside = 0, has_turn = q->turn == NULL;
    struct mb_job_ticket *t;

    *out = NULL;
    if (places == 0 && now_ms < q->walked_ms + FULL_WALK_MS)
        return MB_JOB_QUEUE_NOTHING;
    begin_walk(q);
    for (t = q->waiting.first; t && t->place == MB_JOB_PLACE_WAITING; t = t->next) {
        enum mb_job_queue_action action = MB_JOB_QUEUE_NOTHING;
        long *looks;

        has_turn |= t == q->turn;
        looks = looks_for(&front, &behind, has_turn);
        if (looks)
            action = judge(q, t, now_ms, places > 0, looks);
        else if (has_turn)
            break;
        else
            set_aside(q, t);
        if (action != MB_JOB_QUEUE_NOTHING) {
            *out = t;
            return action;
        }
        if (places > 0 && !place_is_set_aside && t->node) {
            places--;
            place_is_set_aside = 1;
        }
    }
    q->turn = t && t->place == MB_JOB_PLACE_WAITING ? t : NULL;
    q->walked_ms = now_ms;
    return MB_JOB_QUEUE_NOTHING;
}

size_t mb_job_queue_waiting(const struct mb_job_queue *q)
{
    return q->waiting.n;
}

size_t mb_job_queue_running(const struct mb_job_queue *q)
{
    return q->running.n;
}

static int node_adds_up(const struct mb_job_queue *q, const struct mb_job_node *node)
{
    double sum[MB_JOB_QUEUE_KINDS_MAX] = {0};
    size_t n = 0;

    for (const struct mb_job_ticket *t = q->running.first; t; t = t->next) {
        if (t->node != node)
            continue;
        n++;
        for (size_t k = 0; k < q->n_kinds; k++)
            if (!q->kinds[k].is_outside || !t->is_confirmed)
                sum[k] += t->need[k];
    }
    for (size_t k = 0; k < q->n_kinds; k++)
        if (fabs(sum[k] - (q->kinds[k].is_outside ? node->promised[k] : node->used[k])) > 1e-6)
            return 0;
    return n == node->n_running && (n > 0 || !node->is_gone);
}

const char *mb_job_queue_invariant(const struct mb_job_queue *q)
{
    size_t n = 0;
    uint64_t number = 0;
    int coming = 0, has_turn = q->turn == NULL;

    for (struct mb_job_ticket *t = q->running.first; t; t = t->next, n++) {
        if (t->place != MB_JOB_PLACE_RUNNING || t->queue != q || !t->node)
            return "a ticket among the running is not";
    }
    if (n != q->running.n)
        return "the running are miscounted";
    for (size_t i = 0; i < q->n_nodes; i++)
        if (!node_adds_up(q, q->nodes[i]))
            return "what is used of a node is not what the running hold";
    n = 0;
    for (struct mb_job_ticket *t = q->waiting.first; t; t = t->next, n++) {
        if (t->place != MB_JOB_PLACE_COMING && t->place != MB_JOB_PLACE_WAITING)
            return "a ticket among the waiting is not";
        if (coming && t->place == MB_JOB_PLACE_WAITING)
            return "a stored job waits behind one that is not";
        if (t->number <= number)
            return "a job waits behind one that came after it";
        number = t->number;
        has_turn |= q->turn == t;
        coming |= t->place == MB_JOB_PLACE_COMING;
    }
    if (!has_turn)
        return "the one whose turn it is does not wait";
    return n == q->waiting.n ? NULL : "the waiting are miscounted";
}
