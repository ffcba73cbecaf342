/*
 * Two queues, each ordered by priority and then by the order of the files, so that a file that was
 * begun is finished before the next one takes its connections.
 *
 * 1. prepare: into the first queue; started while held + sending < parallel + S3_AHEAD.
 * 2. send: into the second queue; started while sending < parallel.
 * 3. end: its place is free, others start.
 * 4. A priority changes: a turn that waits moves to its new place. What was prepared before may
 * still go first: at most S3_AHEAD parts, since only those wait to be sent. A go() that ends its
 * own turn at once (out of memory) does not recurse: the outermost s3_turns_run() goes on with the
 * next.
 */
#include "base/s3/s3_turns.h"

#include <assert.h>
#include <stddef.h>
#include "base/s3/s3.h"

static int is_before(const struct s3_turn *a, const struct s3_turn *b)
{
    return a->priority != b->priority ? a->priority < b->priority : a->order < b->order;
}

static void put(struct s3_turns *q, int which, struct s3_turn *t)
{
    struct s3_turn *before = q->last[which];

    while (before && is_before(t, before))
        before = before->prev;
    t->prev = before;
    t->next = before ? before->next : q->first[which];
    if (t->next)
        t->next->prev = t;
    else
        q->last[which] = t;
    if (before)
        before->next = t;
    else
        q->first[which] = t;
}

static void take(struct s3_turns *q, int which, struct s3_turn *t)
{
    if (t->prev)
        t->prev->next = t->next;
    else
        q->first[which] = t->next;
    if (t->next)
        t->next->prev = t->prev;
    else
        q->last[which] = t->prev;
    t->prev = t->next = NULL;
}

void s3_turns_run(struct s3 *s)
{
    struct s3_turns *q = &s->turns;

    if (q->running)
        return;
    q->running = 1;
    for (;;) {
        struct s3_turn *t;

        if (q->first[1] && q->n_sending < s->parallel) {
            t = q->first[1];
            take(q, 1, t);
            t->state = S3_TURN_SENDS;
            q->n_held--;
            q->n_sending++;
        } else if (q->first[0] && q->n_held + q->n_sending < s->parallel + S3_AHEAD) {
            t = q->first[0];
            take(q, 0, t);
            t->state = S3_TURN_HOLDS;
            q->n_held++;
        } else {
            break;
        }
        t->go(t->arg);
    }
    q->running = 0;
}

/* Out of its queue, or its place given back. */
static void leave(struct s3_turns *q, struct s3_turn *t)
{
    switch (t->state) {
    case S3_TURN_NONE:
        break;
    case S3_TURN_WAITS:
        take(q, 0, t);
        break;
    case S3_TURN_HOLDS:
        q->n_held--;
        break;
    case S3_TURN_WAITS_2: /* it kept its place of the preparing */
        take(q, 1, t);
        q->n_held--;
        break;
    case S3_TURN_SENDS:
        q->n_sending--;
        break;
    }
    t->state = S3_TURN_NONE;
}

void s3_turn_prepare(struct s3 *s, struct s3_turn *t, void (*go)(void *arg), void *arg)
{
    assert(t->state == S3_TURN_NONE);
    t->go = go;
    t->arg = arg;
    t->state = S3_TURN_WAITS;
    put(&s->turns, 0, t);
    s3_turns_run(s);
}

void s3_turn_send(struct s3 *s, struct s3_turn *t, void (*go)(void *arg), void *arg)
{
    assert(t->state == S3_TURN_NONE || t->state == S3_TURN_HOLDS);
    if (t->state == S3_TURN_NONE)
        s->turns.n_held++;
    t->go = go;
    t->arg = arg;
    t->state = S3_TURN_WAITS_2;
    put(&s->turns, 1, t);
    s3_turns_run(s);
}

void s3_turn_set_priority(struct s3 *s, struct s3_turn *t, int32_t priority)
{
    int which = t->state == S3_TURN_WAITS_2;

    if (t->priority == priority)
        return;
    t->priority = priority;
    if (t->state != S3_TURN_WAITS && t->state != S3_TURN_WAITS_2)
        return;
    take(&s->turns, which, t);
    put(&s->turns, which, t);
}

void s3_turn_end(struct s3 *s, struct s3_turn *t)
{
    leave(&s->turns, t);
    s3_turns_run(s);
}
