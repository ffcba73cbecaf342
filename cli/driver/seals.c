/*
 * Who tells the other nodes that a foreign trainer has finished a checkpoint: its tracker file is
 * on the first node's disk alone, unless the nodes share one.
 *  1. Sealed comes from the first node; it goes to every other node at once.
 *  2. It is kept until the iteration is durable, and told again after a re-dial.
 *  3. More than DRV_SEALS_MAX wait: the oldest is forgotten, with a line; if a node has not heard
 * of it, the end of the run says that it is not durable.
 */
#include "cli/driver/internal.h"

#include <stdio.h>
#include <string.h>
#include "base/alloc.h"

static void remove_seal(struct driver *d, size_t at)
{
    mb_free(d->seals[at].files);
    memmove(&d->seals[at], &d->seals[at + 1], (d->n_seals - at - 1) * sizeof(d->seals[0]));
    d->n_seals--;
}

static struct drv_seal *find(struct driver *d, int64_t iteration)
{
    for (size_t i = 0; i < d->n_seals; i++)
        if (d->seals[i].iteration == iteration)
            return &d->seals[i];
    return NULL;
}

static struct drv_seal *keep(struct driver *d, const Mobula__V1__Seal *seal)
{
    uint64_t *files = mb_calloc(seal->n_files + 1, sizeof(*files));

    if (!files)
        return NULL;
    if (seal->n_files)
        memcpy(files, seal->files, seal->n_files * sizeof(*files));
    if (d->n_seals == DRV_SEALS_MAX) {
        fprintf(stderr,
                "mobula: %d checkpoints wait for their upload; iteration %lld is not told "
                "again to nodes that missed it\n",
                DRV_SEALS_MAX, (long long)d->seals[0].iteration);
        remove_seal(d, 0);
    }
    d->seals[d->n_seals] = (struct drv_seal){seal->iteration, files, seal->n_files};
    return &d->seals[d->n_seals++];
}

void drv_seals_add(struct driver *d, uint32_t from, const Mobula__V1__Seal *seal)
{
    struct drv_seal *s = find(d, seal->iteration);

    if (!s)
        s = keep(d, seal);
    if (!s) {
        fprintf(stderr, "mobula: out of memory: iteration %lld is not told to the other nodes\n",
                (long long)seal->iteration);
        return;
    }
    for (uint32_t i = 0; i < d->n_nodes; i++)
        if (i != from)
            drv_node_seal(&d->nodes[i], s);
}

void drv_seals_repeat(struct drv_node *n)
{
    for (size_t i = 0; n->index != 0 && i < n->driver->n_seals; i++)
        drv_node_seal(n, &n->driver->seals[i]);
}

void drv_seals_durable(struct driver *d, int64_t iteration)
{
    struct drv_seal *s = find(d, iteration);

    if (s)
        remove_seal(d, (size_t)(s - d->seals));
}

void drv_seals_clear(struct driver *d)
{
    while (d->n_seals)
        remove_seal(d, d->n_seals - 1);
}
