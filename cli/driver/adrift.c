/*
 * A node that Ray's head calls dead, and that may be cut off: its connection stands, nobody hung
 * up, and its agent (agent/adrift.c) keeps the ranks for as long.
 *
 *  1. Without a place for another attempt nothing is lost by waiting: as long as the head has none
 *     for its bundle, the node may come back, and the gang goes on.
 *  2. The head has given the bundle to another node, or the group is gone: the node is lost, and
 *     restart.c decides. The node's new id may come a look later than the bundle's: one more look.
 *  3. Not where fewer nodes would do (elastic.c), and not at our own head, which asks both of an
 *     agent's ports before it calls it dead.
 *  4. An attempt that ends already waits for nobody.
 */
#include "cli/driver/internal.h"

#include <stdio.h>
#include <string.h>
#include "base/clock.h"

enum {
    PATIENCE_MS = 600000, /* agent/adrift.c has the same */
    LOOK_TIMEOUT_MS = 5000
};

uint64_t drv_adrift_patience_ms(const struct driver *d)
{
    return d->is_rays && d->elastic.min_nodes == d->elastic.max_nodes ? PATIENCE_MS : 0;
}

int drv_adrift_waits(struct drv_node *n)
{
    struct driver *d = n->driver;
    uint64_t now = mb_mono_ms();

    if (n->stop_asked || n->end_asked || !n->launch_heard || n->replaced ||
        drv_adrift_patience_ms(d) == 0)
        return 0;
    if (n->adrift_ms)
        return now - n->adrift_ms < PATIENCE_MS;
    if (!n->stream || !n->hello)
        return 0;
    n->adrift_ms = now;
    fprintf(stderr,
            "mobula: the head calls node %u (%s:%d) dead, and nobody hung up there: perhaps it is "
            "cut off; waiting for it while its place is free, at most %d s\n",
            n->index, n->ip, n->port, PATIENCE_MS / 1000);
    return 1;
}

static void on_group(void *arg, const struct mb_err *err, const struct mb_gcs_pg *groups, size_t n)
{
    struct driver *d = arg;
    const struct mb_gcs_pg *pg = err->code == MB_OK && n == 1 ? &groups[0] : NULL;

    d->looking_adrift = 0;
    if (d->closing || (err->code != MB_OK && err->code != MB_ENOENT) ||
        (pg && memcmp(pg->id, d->pg_id, sizeof(pg->id)) != 0))
        return;
    for (uint32_t i = 0; i < d->n_nodes; i++) {
        struct drv_node *node = &d->nodes[i];

        if (!node->adrift_ms)
            continue;
        node->replaced = !pg || pg->state == MB_PG_REMOVED || i >= pg->n_bundles ||
                         (pg->bundles[i].has_node && memcmp(pg->bundles[i].node_id, node->node_id,
                                                            sizeof(node->node_id)) != 0);
    }
}

void drv_adrift_look(struct driver *d)
{
    int is_any = 0;

    for (uint32_t i = 0; i < d->n_nodes; i++)
        is_any |= d->nodes[i].adrift_ms != 0;
    if (is_any && !d->looking_adrift)
        d->looking_adrift =
            mb_gcs_pg_get(d->gcs, d->pg_id, LOOK_TIMEOUT_MS, on_group, d, NULL, NULL) == 0;
}

void drv_adrift_is_back(struct drv_node *n)
{
    n->adrift_ms = 0;
    n->replaced = 0;
}
