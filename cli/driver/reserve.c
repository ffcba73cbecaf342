/*
 * From a placement group to the nodes of its bundles: bundle i is node i of the gang.
 *  1. Create the group, wait until it is CREATED (waiting.c says what for), look its nodes up. Or
 * the group of the attempt before is kept; a bundle whose node died meanwhile is placed anew.
 *  2. While it waits elastic.c may want another size: the wait is cancelled, the group removed, and
 *     one of that size created. A group that waits holds nothing, so nothing is lost but its place
 *     in the queue. Removing fails: the old one is waited for on.
 *  3. So it is when a node died before all had their bundles (waiting.c), and when somebody else
 * has removed the group: an agent does with one that it holds a part of and hears nothing of.
 *  4. All in all it takes no longer than reserve_timeout_ms.
 */
#include "cli/driver/internal.h"

#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"

/* A group that is gone sooner than that is not asked for again: it would go on so. */
enum { REQUEST_TIMEOUT_MS = 20000, REMOVED_MS = 5000 };

static const struct mb_gcs_node *find_node(const struct mb_gcs_node *nodes, size_t n,
                                           const uint8_t id[MB_NODE_ID_BYTES])
{
    for (size_t i = 0; i < n; i++)
        if (memcmp(nodes[i].node_id, id, MB_NODE_ID_BYTES) == 0)
            return &nodes[i];
    return NULL;
}

/* Its own raylet has a resource that no other node has. */
static int has_rays_head(const struct mb_gcs_node *nodes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < nodes[i].n_resources; k++)
            if (strcmp(nodes[i].resources[k].name, "node:__internal_head__") == 0)
                return 1;
    return 0;
}

struct bundle_nodes { /* node ids by bundle, between two requests */
    struct driver *d;
    size_t n;
    uint8_t ids[][MB_NODE_ID_BYTES];
};

static void on_gang_nodes(void *arg, const struct mb_err *err, const struct mb_gcs_node *nodes,
                          size_t n)
{
    struct bundle_nodes *b = arg;
    struct driver *d = b->d;
    struct mb_err e = *err;

    for (size_t i = 0; !e.code && i < b->n; i++) {
        const struct mb_gcs_node *node = find_node(nodes, n, b->ids[i]);

        if (!node)
            mb_err_set(&e, MB_EPROTO, "the GCS placed bundle %zu on a node it does not list", i);
        else
            drv_node_init(d, (uint32_t)i, node, &e);
        if (node && d->opts->as_driver)
            fprintf(stderr, "mobula: the driver runs on node %s (%s)\n", node->node_name, node->ip);
    }
    if (!e.code)
        drv_placed_add(d, &e);
    d->is_rays = has_rays_head(nodes, n);
    mb_free(b);
    if (e.code)
        drv_failed(d, &e);
    else
        drv_event(d, &(struct mb_drv_event){.kind = MB_DRV_RESERVED, .n_nodes = d->n_nodes});
}

static void on_group(void *arg, const struct mb_err *err, const struct mb_gcs_pg *groups, size_t n)
{
    struct driver *d = arg;
    struct mb_err e = *err;
    struct bundle_nodes *b = NULL;

    if (!e.code && (n != 1 || groups[0].n_bundles != d->n_nodes))
        mb_err_set(&e, MB_EPROTO,
                   "the GCS answers with another placement group than was asked for");
    for (uint32_t i = 0; !e.code && i < d->n_nodes; i++)
        if (!groups[0].bundles[i].has_node)
            mb_err_set(&e, MB_EUNAVAIL,
                       "a node of the placement group was lost right after it was "
                       "created");
    if (!e.code) {
        b = mb_alloc(sizeof(*b) + d->n_nodes * sizeof(b->ids[0]));
        if (!b)
            mb_err_set(&e, MB_ENOMEM, "out of memory");
    }
    if (!e.code) {
        b->d = d;
        b->n = d->n_nodes;
        for (size_t i = 0; i < b->n; i++)
            memcpy(b->ids[i], groups[0].bundles[i].node_id, MB_NODE_ID_BYTES);
        mb_gcs_nodes(d->gcs, REQUEST_TIMEOUT_MS, on_gang_nodes, b, NULL, &e);
    }
    if (e.code) {
        mb_free(b);
        drv_failed(d, &e);
    }
}

static void on_requested(void *arg, const struct mb_err *err);
static void create_group(struct driver *d);

/* ---- another size ---- */

struct old_group { /* while it is being removed */
    struct driver *d;
    uint8_t pg_id[MB_PG_ID_BYTES];
};

static void on_old_removed(void *arg, const struct mb_err *err)
{
    const struct mb_err ok = {0};
    struct old_group *old = arg;
    struct driver *d = old->d;
    int is_ours = memcmp(old->pg_id, d->pg_id, sizeof(old->pg_id)) == 0;

    mb_free(old);
    if (!is_ours || !d->is_resizing)
        return; /* of an attempt that is over */
    d->is_resizing = 0;
    if (mb_drv_phase(d->state) != MB_DRV_RESERVE || err->code == MB_ECANCELED)
        return;
    if (err->code && err->code != MB_ENOENT) {
        fprintf(stderr, "mobula: still waiting for %u nodes, cannot ask anew: %s\n", d->n_nodes,
                err->text);
        d->elastic.n_nodes = d->n_nodes;
        on_requested(d, &ok);
        return;
    }
    d->reserved = 0;
    d->n_nodes = d->elastic.n_nodes;
    d->record_dirty = 1;
    create_group(d);
}

/* The wait is over without nodes: it was cancelled for another size. */
static void replace_group(struct driver *d)
{
    struct old_group *old = mb_alloc(sizeof(*old));
    struct mb_err e = {0};

    if (!old) {
        mb_err_set(&e, MB_ENOMEM, "out of memory");
    } else {
        old->d = d;
        memcpy(old->pg_id, d->pg_id, sizeof(old->pg_id));
        mb_gcs_pg_remove(d->gcs, d->pg_id, REQUEST_TIMEOUT_MS, on_old_removed, old, NULL, &e);
    }
    if (e.code) {
        mb_free(old);
        d->is_resizing = 0;
        drv_failed(d, &e);
    }
}

void drv_reserve_look(struct driver *d, uint32_t n_there, int is_guess)
{
    uint32_t size;

    if (!d->wait_op || d->is_resizing)
        return;
    size = mb_elastic_look(&d->elastic, n_there, is_guess, mb_mono_ms());
    if (size == d->n_nodes)
        return;
    fprintf(stderr, "mobula: not all of %u nodes are there: asking for %u of %u\n", d->n_nodes,
            size, d->opts->num_nodes);
    drv_reserve_anew(d);
}

void drv_reserve_anew(struct driver *d)
{
    if (!d->wait_op || d->is_resizing)
        return;
    d->is_resizing = 1;
    mb_gcs_op_cancel(d->wait_op);
}

/* ---- the group ---- */

static void on_created(void *arg, const struct mb_err *err)
{
    struct driver *d = arg;
    struct mb_err e = *err;

    d->wait_op = NULL;
    if (mb_drv_phase(d->state) != MB_DRV_RESERVE)
        return;
    if (d->is_resizing && e.code == MB_ECANCELED) {
        replace_group(d);
        return;
    }
    if (d->is_resizing) { /* it had ended when it was cancelled */
        d->is_resizing = 0;
        d->elastic.n_nodes = d->n_nodes;
    }
    if (e.code == MB_ENOENT && mb_mono_ms() - d->asked_ms >= REMOVED_MS) {
        fprintf(stderr, "mobula: somebody removed the placement group: asking anew\n");
        create_group(d);
        return;
    }
    if (e.code == MB_ETIMEOUT)
        mb_err_set(&e, MB_ETIMEOUT, "no %u nodes were free within %llu s%s%s; see: mobula status",
                   d->n_nodes, (unsigned long long)(d->opts->reserve_timeout_ms / 1000),
                   d->waiting.missing[0] ? ": " : "", d->waiting.missing);
    if (!e.code)
        mb_gcs_pg_get(d->gcs, d->pg_id, REQUEST_TIMEOUT_MS, on_group, d, NULL, &e);
    if (e.code)
        drv_failed(d, &e);
}

static void on_requested(void *arg, const struct mb_err *err)
{
    struct driver *d = arg;
    struct mb_err e = *err;
    uint64_t now = mb_mono_ms();

    if (!e.code && mb_drv_phase(d->state) == MB_DRV_RESERVE)
        mb_gcs_pg_wait(d->gcs, d->pg_id, d->reserve_by_ms > now ? d->reserve_by_ms - now : 1,
                       on_created, d, &d->wait_op, &e);
    if (e.code)
        drv_failed(d, &e);
}

static void create_group(struct driver *d)
{
    const int as_driver = d->opts->as_driver;
    const struct mb_gcs_resource resources[] = {
        {as_driver ? "mobula_driver" : "mobula_slot", d->opts->ranks_per_node},
        {"mobula_gpu", as_driver ? d->opts->driver_gpus : d->opts->ranks_per_node},
    };
    struct mb_gcs_bundle *bundles = mb_calloc(d->n_nodes, sizeof(*bundles));
    struct mb_gcs_pg pg = {0};
    struct mb_err e = {0};
    char name[260];
    int named;

    if (!bundles) {
        mb_err_set(&e, MB_ENOMEM, "out of memory");
        drv_failed(d, &e);
        return;
    }
    for (uint32_t i = 0; i < d->n_nodes; i++) {
        bundles[i].resources = resources;
        bundles[i].n_resources = d->opts->use_gpu || d->opts->driver_gpus ? 2 : 1;
    }
    mb_gcs_pg_new_id(d->job_id, d->pg_id);
    if (!d->has_gang_id)
        memcpy(d->gang_id, d->pg_id, sizeof(d->gang_id));
    d->has_gang_id = 1;
    memcpy(pg.id, d->pg_id, sizeof(pg.id));
    memcpy(pg.job_id, d->job_id, sizeof(pg.job_id));
    memcpy(pg.actor_id, d->actor_id, sizeof(pg.actor_id));
    named = snprintf(name, sizeof(name), "mobula-%s", d->opts->job_id);
    if (d->opts->priority)
        snprintf(name + named, sizeof(name) - (size_t)named, "@priority=%d", d->opts->priority);
    pg.name = name;
    pg.has_actor = d->has_actor;
    pg.bundles = bundles;
    pg.n_bundles = d->n_nodes;
    pg.strategy = d->n_nodes > 1 ? MB_PG_STRICT_SPREAD : MB_PG_PACK;
    d->reserved = 1;
    d->asked_ms = mb_mono_ms();
    if (mb_gcs_pg_create(d->gcs, &pg, REQUEST_TIMEOUT_MS, on_requested, d, NULL, &e) < 0) {
        d->reserved = 0;
        drv_failed(d, &e);
    }
    mb_free(bundles);
}

void drv_reserve(struct driver *d)
{
    const struct mb_err ok = {0};
    int keeps = d->keeps_group;

    drv_waiting_begin(d);
    d->waiting.keeps = keeps;
    d->reserve_by_ms = mb_mono_ms() + d->opts->reserve_timeout_ms;
    mb_elastic_begin(&d->elastic, d->attempt == 1, keeps, mb_mono_ms());
    d->n_nodes = d->elastic.n_nodes;
    d->keeps_group = 0;
    d->is_resizing = 0;
    if (keeps)
        on_requested(d, &ok);
    else
        create_group(d);
}
