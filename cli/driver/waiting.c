/*
 * While the gang waits for its nodes: what is missing, for the driver's output and for the text of
 * a time-out.
 *  1. Once a second the head is asked why the group waits.
 *  2. A real GCS does not know that call: then the nodes that could hold the gang are counted.
 *  3. A line when the answer has changed, but not more often than every 5 s; the same again after a
 *     minute.
 */
#include "cli/driver/internal.h"

#include <stdio.h>
#include <string.h>
#include "base/clock.h"

enum { FIRST_LINE_MS = 500, LINE_MS = 5000, SAME_LINE_MS = 60000, ASK_TIMEOUT_MS = 5000 };

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

static void on_nodes(void *arg, const struct mb_err *err, const struct mb_gcs_node *nodes, size_t n)
{
    struct driver *d = arg;
    const char *what = d->opts->use_gpu || d->opts->driver_gpus ? "mobula_gpu"
                       : d->opts->as_driver                     ? "mobula_driver"
                                                                : "mobula_slot";
    const uint32_t each = d->opts->driver_gpus ? d->opts->driver_gpus : d->opts->ranks_per_node;
    uint32_t fit = 0;

    d->waiting.is_asking = 0;
    if (err->code || mb_drv_phase(d->state) != MB_DRV_RESERVE)
        return;
    for (size_t i = 0; i < n; i++)
        if (!nodes[i].is_dead && amount(&nodes[i], what) >= each)
            fit++;
    snprintf(d->waiting.missing, sizeof(d->waiting.missing),
             "waiting for %u nodes with %u %s each: %u such nodes are alive%s", d->opts->num_nodes,
             each, what, fit, fit >= d->opts->num_nodes ? ", some are busy" : "");
    say(d);
}

static void on_reason(void *arg, const struct mb_err *err, int waits, uint32_t ahead,
                      const char *reason)
{
    struct driver *d = arg;

    d->waiting.is_asking = 0;
    if (mb_drv_phase(d->state) != MB_DRV_RESERVE)
        return;
    if (err->code == MB_EUNSUPPORTED) {
        d->waiting.is_asking = mb_gcs_nodes(d->gcs, ASK_TIMEOUT_MS, on_nodes, d, NULL, NULL) == 0;
        return;
    }
    if (err->code || !waits)
        return; /* the head may be down for a moment; the wait itself has the deadline */
    if (ahead)
        snprintf(d->waiting.missing, sizeof(d->waiting.missing), "%s (%u ahead in the queue)",
                 reason, ahead);
    else
        snprintf(d->waiting.missing, sizeof(d->waiting.missing), "%s", reason);
    say(d);
}

void drv_waiting_tick(struct driver *d)
{
    if (mb_drv_phase(d->state) != MB_DRV_RESERVE || !d->reserved || d->waiting.is_asking)
        return;
    d->waiting.is_asking =
        mb_gcs_pg_reason(d->gcs, d->pg_id, ASK_TIMEOUT_MS, on_reason, d, NULL, NULL) == 0;
}
