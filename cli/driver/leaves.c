/*
 * How far uploads are, and who tells the other nodes that one of them is of no use any more: an
 * iteration is durable as a whole or not at all.
 *  1. A node gives an iteration up before its part is in the store: every other node is told at
 *     once, so that none sends the rest of it or waits for that part.
 *  2. A node cannot send an iteration before the deadline: the others are told that it is left, so
 *     that all nodes put the same one first, the newest that all can finish. It can after all, by a
 *     better rate: they are told that, too.
 *  3. Both are told again after a re-dial, and forgotten when the iteration is durable.
 *  4. More than DRV_LEAVES_MAX: the oldest is forgotten. A node that was not there to hear of it
 *     waits for the part until all ranks have ended, and its bound (agent/upload/upload.c).
 */
#include "cli/driver/internal.h"

#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/str.h"

enum { NOT_KNOWN = 2 }; /* whether the node believes that others leave it: else 1 or 0 */

static struct drv_leave *find(struct driver *d, int64_t iteration)
{
    for (size_t i = 0; i < d->n_leaves; i++)
        if (d->leaves[i].iteration == iteration)
            return &d->leaves[i];
    return NULL;
}

static void remove_at(struct driver *d, size_t at)
{
    mb_free(d->leaves[at].left_by);
    mb_free(d->leaves[at].told);
    memmove(&d->leaves[at], &d->leaves[at + 1], (d->n_leaves - at - 1) * sizeof(d->leaves[0]));
    d->n_leaves--;
}

static struct drv_leave *find_or_add(struct driver *d, int64_t iteration)
{
    struct drv_leave *l = find(d, iteration);

    if (l)
        return l;
    if (d->n_leaves == DRV_LEAVES_MAX)
        remove_at(d, 0);
    l = &d->leaves[d->n_leaves];
    *l = (struct drv_leave){.iteration = iteration,
                            .left_by = mb_calloc(d->n_nodes, 1),
                            .told = mb_calloc(d->n_nodes, 1)};
    if (!l->left_by || !l->told) {
        mb_free(l->left_by);
        mb_free(l->told);
        fprintf(stderr, "mobula: out of memory: the nodes do not hear who leaves iteration %lld\n",
                (long long)iteration);
        return NULL;
    }
    d->n_leaves++;
    return l;
}

/* Some node but this one leaves it. */
static int others_leave(const struct driver *d, const struct drv_leave *l, uint32_t node)
{
    for (uint32_t i = 0; i < d->n_nodes; i++)
        if (i != node && l->left_by[i])
            return 1;
    return 0;
}

static void tell(struct driver *d, struct drv_leave *l)
{
    for (uint32_t i = 0; i < d->n_nodes; i++) {
        int is_left = others_leave(d, l, i);

        if (l->is_dropped || l->told[i] == is_left || !d->nodes[i].hello)
            continue;
        if (drv_node_leave(&d->nodes[i], l, is_left))
            l->told[i] = (uint8_t)is_left;
    }
}

static void note_left(struct drv_node *n, const Mobula__V1__Upload *u)
{
    struct driver *d = n->driver;
    struct drv_leave *l = find(d, u->iteration);

    if (!l && u->left)
        l = find_or_add(d, u->iteration);
    if (!l || (l->left_by[n->index] != 0) == (u->left != 0))
        return;
    l->left_by[n->index] = u->left ? 1 : 0;
    tell(d, l);
}

static void note_dropped(struct drv_node *n, const Mobula__V1__Upload *u)
{
    struct driver *d = n->driver;
    struct drv_leave *l = find_or_add(d, u->iteration);

    if (!l || l->is_dropped)
        return;
    l->is_dropped = 1;
    l->node = n->index;
    snprintf(l->error, sizeof(l->error), "%.*s",
             (int)mb_utf8_floor(u->error, strnlen(u->error, sizeof(l->error) - 1)), u->error);
    for (uint32_t i = 0; i < d->n_nodes; i++)
        if (i != n->index)
            drv_node_leave(&d->nodes[i], l, 0);
}

void drv_leaves_repeat(struct drv_node *n)
{
    struct driver *d = n->driver;

    for (size_t i = 0; i < d->n_leaves; i++) {
        struct drv_leave *l = &d->leaves[i];

        l->told[n->index] = NOT_KNOWN; /* it may have changed while the node was away */
        if (l->is_dropped && l->node != n->index)
            drv_node_leave(n, l, 0);
        else
            tell(d, l);
    }
}

void drv_leaves_clear(struct driver *d)
{
    while (d->n_leaves)
        remove_at(d, d->n_leaves - 1);
}

/* ---- what a node says of its uploads ---- */

static void on_error(struct drv_node *n, const Mobula__V1__Upload *u)
{
    struct driver *d = n->driver;
    struct mb_drv_event e = {.kind = MB_DRV_UPLOAD_FAILED,
                             .node = n->index,
                             .iteration = u->iteration,
                             .is_outdated = u->committed,
                             .text = u->error};
    const struct drv_leave *known = find(d, u->iteration);
    int is_echo = known && known->is_dropped; /* it gave up what it was told to */

    if (!is_echo && n->lost_said != u->iteration)
        fprintf(stderr, "mobula: %s\n", u->error);
    drv_event(d, &e);
    n->lost_said = u->iteration;
    if (u->never)
        note_dropped(n, u);
}

static void on_committed(struct drv_node *n, const Mobula__V1__Upload *u)
{
    struct driver *d = n->driver;
    struct mb_drv_event e = {.kind = MB_DRV_COMMITTED, .node = n->index, .iteration = u->iteration};
    struct drv_leave *l = find(d, u->iteration);

    if (mb_drv_is_open(d->state, u->iteration)) {
        d->lines_after_verdict += d->verdict_said != 0;
        printf("checkpoint of iteration %lld is durable in %s\n", (long long)u->iteration,
               d->opts->checkpoint_url ? d->opts->checkpoint_url : "");
    }
    fflush(stdout);
    drv_seals_durable(d, u->iteration);
    if (l)
        remove_at(d, (size_t)(l - d->leaves));
    drv_event(d, &e);
}

void drv_on_upload(struct drv_node *n, const Mobula__V1__Upload *u)
{
    struct driver *d = n->driver;
    int has_failed = u->error && u->error[0];

    d->uploads[n->index] = (struct mb_drv_upload){
        .iteration = u->iteration,
        .done_bytes = u->done_bytes,
        .total_bytes = u->total_bytes,
        .parts_done = u->parts_done,
        .parts_total = u->parts_total,
        .rate_bytes_per_s = u->rate_bytes_per_s,
        .eta_ms = u->eta_case == MOBULA__V1__UPLOAD__ETA_ETA_MS ? u->eta_ms : UINT64_MAX,
        .is_committed = u->committed,
        .is_given_up = has_failed,
        .is_left = u->left};
    mb_drv_uploads_sum(d->uploads, d->n_nodes, &d->report.uploads);
    d->record_dirty = 1;
    if (u->committed && u->iteration > d->committed)
        d->committed = u->iteration;
    if (has_failed) {
        on_error(n, u);
    } else if (u->committed) {
        on_committed(n, u);
    } else { /* after a re-dial this is all that is heard of it */
        struct mb_drv_event e = {.kind = MB_DRV_SAVED, .node = n->index, .iteration = u->iteration};

        note_left(n, u);
        drv_event(d, &e);
    }
}
