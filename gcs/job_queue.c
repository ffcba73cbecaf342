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
 *
 * A job that is COMING is always behind all that are WAITING, since records are stored in the order
 * in which they came; the walk ends at the first.
 */
#include "gcs/job_queue.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"

enum { FULL_WALK_MS = 250 };        /* when no place is free, a walk only finds what is overdue */
static const double EPSILON = 1e-9; /* sums of fractions such as 0.1 */

struct line {
    struct mb_job_ticket *first, *last;
    size_t n;
};

struct mb_job_queue {
    struct mb_job_amount kinds[MB_JOB_QUEUE_KINDS_MAX]; /* amount: the total */
    double used[MB_JOB_QUEUE_KINDS_MAX];                /* by RUNNING; of inside kinds */
    double outside_free[MB_JOB_QUEUE_KINDS_MAX];
    size_t n_kinds;
    size_t max_running, max_waiting;
    struct line waiting, running;
    int is_numbered;    /* positions are right */
    uint64_t walked_ms; /* when the line was last looked through to its end */
};

/* ---- lines ---- */

static void append(struct line *l, struct mb_job_ticket *t)
{
    t->prev = l->last;
    t->next = NULL;
    *(l->last ? &l->last->next : &l->first) = t;
    l->last = t;
    l->n++;
}

static void prepend(struct line *l, struct mb_job_ticket *t)
{
    t->prev = NULL;
    t->next = l->first;
    *(l->first ? &l->first->prev : &l->last) = t;
    l->first = t;
    l->n++;
}

static void unlink_ticket(struct line *l, struct mb_job_ticket *t)
{
    *(t->prev ? &t->prev->next : &l->first) = t->next;
    *(t->next ? &t->next->prev : &l->last) = t->prev;
    t->prev = t->next = NULL;
    l->n--;
}

/* ---- life ---- */

int mb_job_queue_create(const struct mb_job_queue_opts *opts, struct mb_job_queue **out,
                        struct mb_err *err)
{
    struct mb_job_queue *q;

    if (opts->n_totals > MB_JOB_QUEUE_KINDS_MAX)
        return mb_err_set(err, MB_EINVAL,
                          "%zu kinds of resources for jobs, at most %d are possible",
                          opts->n_totals, MB_JOB_QUEUE_KINDS_MAX);
    q = mb_calloc(1, sizeof *q);
    if (!q)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    for (size_t i = 0; i < opts->n_totals; i++)
        q->kinds[i] = opts->totals[i];
    q->n_kinds = opts->n_totals;
    q->max_running = opts->max_running;
    q->max_waiting = opts->max_waiting;
    *out = q;
    return 0;
}

void mb_job_queue_destroy(struct mb_job_queue *q)
{
    mb_free(q);
}

static int kind_of(const struct mb_job_queue *q, const char *name)
{
    for (size_t k = 0; k < q->n_kinds; k++)
        if (strcmp(q->kinds[k].name, name) == 0)
            return (int)k;
    return -1;
}

static void set_needs(struct mb_job_queue *q, struct mb_job_ticket *t,
                      const struct mb_job_amount *needs, size_t n)
{
    *t = (struct mb_job_ticket){.queue = q};
    for (size_t i = 0; i < n; i++) {
        int k = kind_of(q, needs[i].name);

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
    set_needs(q, t, needs, n);
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

static void hold(struct mb_job_queue *q, struct mb_job_ticket *t)
{
    for (size_t k = 0; k < q->n_kinds; k++) {
        if (q->kinds[k].is_outside)
            q->outside_free[k] = fmax(0, q->outside_free[k] - t->need[k]);
        else
            q->used[k] += t->need[k];
    }
    t->place = MB_JOB_PLACE_RUNNING;
    append(&q->running, t);
}

/* Units of an outside kind come back by mb_job_queue_set_free(). */
static void unhold(struct mb_job_queue *q, struct mb_job_ticket *t)
{
    for (size_t k = 0; k < q->n_kinds; k++)
        if (!q->kinds[k].is_outside)
            q->used[k] = fmax(0, q->used[k] - t->need[k]);
    unlink_ticket(&q->running, t);
    if (q->running.n == 0)
        memset(q->used, 0, sizeof q->used); /* what rounding left */
}

void mb_job_queue_adopt(struct mb_job_queue *q, struct mb_job_ticket *t,
                        const struct mb_job_amount *needs, size_t n)
{
    set_needs(q, t, needs, n);
    hold(q, t);
}

void mb_job_queue_put_back(struct mb_job_ticket *t)
{
    struct mb_job_queue *q = t->queue;

    if (t->place != MB_JOB_PLACE_RUNNING)
        return;
    unhold(q, t);
    t->place = MB_JOB_PLACE_WAITING;
    prepend(&q->waiting, t);
    q->is_numbered = 0;
}

void mb_job_queue_leave(struct mb_job_ticket *t)
{
    struct mb_job_queue *q = t->queue;

    if (t->place == MB_JOB_PLACE_RUNNING)
        unhold(q, t);
    else if (t->place != MB_JOB_PLACE_NONE)
        unlink_ticket(&q->waiting, t);
    if (q)
        q->is_numbered = 0;
    *t = (struct mb_job_ticket){.place = MB_JOB_PLACE_NONE};
}

void mb_job_queue_seen(struct mb_job_ticket *t, uint64_t now_ms)
{
    if (t->place == MB_JOB_PLACE_WAITING && t->seen_ms == 0)
        t->seen_ms = now_ms;
}

void mb_job_queue_set_free(struct mb_job_queue *q, const char *name, double amount)
{
    int k = kind_of(q, name);

    if (k >= 0 && q->kinds[k].is_outside)
        q->outside_free[k] = amount;
}

/* ---- decisions ---- */

static double free_of(const struct mb_job_queue *q, size_t k)
{
    return q->kinds[k].is_outside ? q->outside_free[k] : q->kinds[k].amount - q->used[k];
}

static int fits(const struct mb_job_queue *q, const struct mb_job_ticket *t, const double *left)
{
    for (size_t k = 0; k < q->n_kinds; k++)
        if (t->need[k] > 0 && t->need[k] > left[k] + EPSILON)
            return 0;
    return 1;
}

static int never_fits(const struct mb_job_queue *q, const struct mb_job_ticket *t)
{
    if (t->unknown[0] != '\0')
        return 1;
    for (size_t k = 0; k < q->n_kinds; k++)
        if (t->need[k] > q->kinds[k].amount + EPSILON)
            return 1;
    return 0;
}

static int verdict_is_due(const struct mb_job_ticket *t, uint64_t now_ms)
{
    return (t->seen_ms != 0 && now_ms >= t->seen_ms + MB_JOB_QUEUE_SEEN_MS) ||
           now_ms >= t->since_ms + MB_JOB_QUEUE_UNSEEN_MS;
}

enum mb_job_queue_action mb_job_queue_next(struct mb_job_queue *q, uint64_t now_ms,
                                           struct mb_job_ticket **out)
{
    size_t places = q->max_running > q->running.n ? q->max_running - q->running.n : 0;
    double left[MB_JOB_QUEUE_KINDS_MAX];
    int place_is_set_aside = 0;

    *out = NULL;
    if (places == 0 && now_ms < q->walked_ms + FULL_WALK_MS)
        return MB_JOB_QUEUE_NOTHING;
    for (size_t k = 0; k < q->n_kinds; k++)
        left[k] = free_of(q, k);
    for (struct mb_job_ticket *t = q->waiting.first; t; t = t->next) {
        *out = t;
        if (t->place == MB_JOB_PLACE_COMING)
            break;
        if (never_fits(q, t)) {
            if (verdict_is_due(t, now_ms))
                return MB_JOB_QUEUE_NEVER_FITS;
            continue;
        }
        if (places > 0 && fits(q, t, left)) {
            unlink_ticket(&q->waiting, t);
            hold(q, t);
            q->is_numbered = 0;
            return MB_JOB_QUEUE_START;
        }
        if (t->timeout_ms > 0 && now_ms >= t->since_ms + t->timeout_ms)
            return MB_JOB_QUEUE_TIMED_OUT;
        for (size_t k = 0; k < q->n_kinds; k++)
            left[k] = fmax(0, left[k] - t->need[k]);
        if (places > 0 && !place_is_set_aside) {
            places--;
            place_is_set_aside = 1;
        }
    }
    *out = NULL;
    q->walked_ms = now_ms;
    return MB_JOB_QUEUE_NOTHING;
}

/* ---- words ---- */

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

/* "needs 3 GPUs, the cluster has 1": of what is beyond every total. */
static int put_never(const struct mb_job_ticket *t, struct mb_buf *out)
{
    const struct mb_job_queue *q = t->queue;
    const char *sep = "It ";
    int rc = 0;

    for (size_t k = 0; k < q->n_kinds && rc == 0; k++) {
        if (!(t->need[k] > q->kinds[k].amount + EPSILON))
            continue;
        rc = mb_buf_printf(out, "%sneeds ", sep);
        rc = rc != 0 ? rc : put_amount(out, q->kinds[k].name, t->need[k]);
        rc = rc != 0 ? rc : mb_buf_puts(out, ", the cluster has ");
        rc = rc != 0 ? rc : put_bare(out, q->kinds[k].name, q->kinds[k].amount);
        sep = "; it ";
    }
    if (rc == 0 && t->unknown[0] != '\0')
        rc = mb_buf_printf(out, "%sneeds %g %s, the cluster has 0", sep, t->unknown_amount,
                           t->unknown);
    return rc != 0 ? rc : mb_buf_puts(out, " for drivers, which run on the node of the head.");
}

/* ": it needs 2 GPUs, 1 of 4 is free": of what is not free at this moment. */
static int put_missing(const struct mb_job_ticket *t, struct mb_buf *out)
{
    const struct mb_job_queue *q = t->queue;
    int rc = 0, n = 0;

    for (size_t k = 0; k < q->n_kinds && rc == 0; k++) {
        if (!(t->need[k] > 0) || t->need[k] <= free_of(q, k) + EPSILON)
            continue;
        rc = mb_buf_puts(out, n++ == 0 ? ": it needs " : "; ");
        rc = rc != 0 ? rc : put_amount(out, q->kinds[k].name, t->need[k]);
        rc = rc != 0 ? rc : mb_buf_puts(out, ", ");
        rc = rc != 0 ? rc : put_bare(out, q->kinds[k].name, fmax(0, free_of(q, k)));
        rc = rc != 0 ? rc : mb_buf_puts(out, " of ");
        rc = rc != 0 ? rc : put_bare(out, q->kinds[k].name, q->kinds[k].amount);
        rc = rc != 0 ? rc : mb_buf_puts(out, " free");
    }
    if (rc == 0 && n == 0 && q->running.n >= q->max_running)
        rc = mb_buf_printf(out, ": %zu jobs run, which is the bound (--max-running-jobs)",
                           q->running.n);
    else if (rc == 0 && n == 0 && t->prev)
        rc = mb_buf_puts(out, ": what is free is kept for jobs before it");
    return rc;
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
    int rc;

    if (t->place != MB_JOB_PLACE_COMING && t->place != MB_JOB_PLACE_WAITING)
        return 0;
    if (never_fits(q, t))
        return put_never(t, out);
    if (!q->is_numbered)
        number(q);
    rc = mb_buf_printf(out, "It is number %zu of %zu in the queue", t->position, q->waiting.n);
    rc = rc != 0 ? rc : put_missing(t, out);
    return rc != 0 ? rc : mb_buf_puts(out, ".");
}

size_t mb_job_queue_waiting(const struct mb_job_queue *q)
{
    return q->waiting.n;
}

size_t mb_job_queue_running(const struct mb_job_queue *q)
{
    return q->running.n;
}

const char *mb_job_queue_invariant(const struct mb_job_queue *q)
{
    double sum[MB_JOB_QUEUE_KINDS_MAX] = {0};
    size_t n = 0;
    int coming = 0;

    for (struct mb_job_ticket *t = q->running.first; t; t = t->next, n++) {
        if (t->place != MB_JOB_PLACE_RUNNING || t->queue != q)
            return "a ticket among the running is not";
        for (size_t k = 0; k < q->n_kinds; k++)
            sum[k] += t->need[k];
    }
    if (n != q->running.n)
        return "the running are miscounted";
    for (size_t k = 0; k < q->n_kinds; k++)
        if (!q->kinds[k].is_outside && fabs(sum[k] - q->used[k]) > 1e-6)
            return "what is used is not what the running hold";
    n = 0;
    for (struct mb_job_ticket *t = q->waiting.first; t; t = t->next, n++) {
        if (t->place != MB_JOB_PLACE_COMING && t->place != MB_JOB_PLACE_WAITING)
            return "a ticket among the waiting is not";
        if (coming && t->place == MB_JOB_PLACE_WAITING)
            return "a stored job waits behind one that is not";
        coming |= t->place == MB_JOB_PLACE_COMING;
    }
    return n == q->waiting.n ? NULL : "the waiting are miscounted";
}
