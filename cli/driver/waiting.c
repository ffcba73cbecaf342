/*
 * While the gang waits for its nodes: what is missing, for the driver's output and for the text of
 * a time-out.
 *  1. Once a second the head is asked why the group waits.
 *  2. A real GCS does not know that call: then the nodes that could hold the gang are counted.
 *  3. Either tells how many nodes are there for a gang that may go on with fewer (elastic.h).
 *  4. A node died after it had its bundle and before all had theirs: a real GCS has the others keep
 *     theirs, which may be for ever. After HALF_MS the group is asked for anew, which holds nothing
 *     until there is a node for each.
 *  5. A line when the answer has changed, but not more often than every 5 s; the same again after a
 *     minute.
 */
#include "cli/driver/internal.h"

#include <stdio.h>
#include <string.h>
#include "base/clock.h"

enum {
    FIRST_LINE_MS = 500,
    LINE_MS = 5000,
    SAME_LINE_MS = 60000,
    ASK_TIMEOUT_MS = 5000,
    HALF_MS = 5000
};

void drv_waiting_begin(struct driver *d)
{
    d->waiting = (struct drv_waiting){.began_ms = mb_mono_ms()};
}

static void say(struct driver *d)
{
    struct drv_waiting *w = &d->waiting;
    uint64_t now = mb_mono_ms();
    int is_new = strcmp(w->missing, w->said) != 0;

    if (!w->missing[0] || now - w->began_ms < FIRST_LINE_MS ||
        (w->said_ms && now - w->said_ms < (uint64_t)(is_new ? LINE_MS : SAME_LINE_MS)))
        return;
    w->said_ms = now;
    memcpy(w->said, w->missing, sizeof(w->said));
    fprintf(stderr, "mobula: %s\n", w->missing);
}

static double amount(const struct mb_gcs_node *node, const char *name)
{
    for (size_t i = 0; i < node->n_resources; i++)
        if (strcmp(node->resources[i].name, name) == 0)
            return node->resources[i].amount;
    return 0;
}

static const char *resource_of(const struct driver *d, uint32_t *each)
{
    *each = d->opts->driver_gpus ? d->opts->driver_gpus : d->opts->ranks_per_node;
    return d->opts->use_gpu || d->opts->driver_gpus ? "mobula_gpu"
           : d->opts->as_driver                     ? "mobula_driver"
                                                    : "mobula_slot";
}

uint32_t drv_waiting_count(const struct driver *d, const struct mb_gcs_node *nodes, size_t n)
{
    uint32_t each, fit = 0;
    const char *what = resource_of(d, &each);

    for (size_t i = 0; i < n; i++)
        fit += !nodes[i].is_dead && amount(&nodes[i], what) >= each;
    return fit;
}

/* What is missing by the head's words, or ours, behind what only we know. */
static void missing(struct driver *d, uint32_t n_there, const char *text)
{
    struct drv_waiting *w = &d->waiting;
    size_t n;

    mb_elastic_explain(&d->elastic, n_there, mb_mono_ms(), w->missing, sizeof(w->missing));
    n = strlen(w->missing);
    snprintf(w->missing + n, sizeof(w->missing) - n, "%s", text);
    say(d);
}

static void on_half(void *arg, const struct mb_err *err, const struct mb_gcs_pg *groups, size_t n)
{
    struct driver *d = arg;
    struct drv_waiting *w = &d->waiting;
    uint64_t now = mb_mono_ms();

    w->is_asking = 0;
    if (err->code || n != 1 || memcmp(groups[0].id, d->pg_id, sizeof(d->pg_id)) != 0 ||
        mb_drv_phase(d->state) != MB_DRV_RESERVE)
        return;
    /* One that was kept holds the others' bundles for us, until another node is there. */
    if (groups[0].state != MB_PG_RESCHEDULING || w->keeps)
        w->half_ms = 0;
    else if (w->half_ms == 0)
        w->half_ms = now;
    else if (now - w->half_ms >= HALF_MS) {
        w->half_ms = 0;
        fputs("mobula: a node was lost before the gang had all of its nodes: asking anew\n",
              stderr);
        drv_reserve_anew(d);
    }
}

static void on_nodes(void *arg, const struct mb_err *err, const struct mb_gcs_node *nodes, size_t n)
{
    struct driver *d = arg;
    uint32_t each, fit;
    const char *what = resource_of(d, &each);
    char text[200];

    d->waiting.is_asking = 0;
    if (err->code || mb_drv_phase(d->state) != MB_DRV_RESERVE)
        return;
    fit = drv_waiting_count(d, nodes, n);
    snprintf(text, sizeof(text), "waiting for %u nodes with %u %s each: %u such nodes are alive%s",
             d->n_nodes, each, what, fit, fit >= d->n_nodes ? ", some are busy" : "");
    missing(d, fit, text);
    drv_reserve_look(d, fit, 1);
    d->waiting.is_asking =
        mb_gcs_pg_get(d->gcs, d->pg_id, ASK_TIMEOUT_MS, on_half, d, NULL, NULL) == 0;
}

static void on_reason(void *arg, const struct mb_err *err, const struct mb_gcs_waiting *w)
{
    struct driver *d = arg;
    char text[sizeof(d->waiting.missing)];

    d->waiting.is_asking = 0;
    if (mb_drv_phase(d->state) != MB_DRV_RESERVE)
        return;
    if (err->code == MB_EUNSUPPORTED) {
        d->waiting.is_asking = mb_gcs_nodes(d->gcs, ASK_TIMEOUT_MS, on_nodes, d, NULL, NULL) == 0;
        return;
    }
    if (err->code || !w->waits)
        return; /* the head may be down for a moment; the wait itself has the deadline */
    if (w->ahead)
        snprintf(text, sizeof(text), "%.470s (%u ahead in the queue)", w->reason, w->ahead);
    else
        snprintf(text, sizeof(text), "%s", w->reason);
    missing(d, w->n_nodes, text);
    drv_reserve_look(d, w->n_nodes, 0);
}

void drv_waiting_tick(struct driver *d)
{
    if (mb_drv_phase(d->state) != MB_DRV_RESERVE || !d->reserved || d->waiting.is_asking)
        return;
    d->waiting.is_asking =
        mb_gcs_pg_reason(d->gcs, d->pg_id, ASK_TIMEOUT_MS, on_reason, d, NULL, NULL) == 0;
}
