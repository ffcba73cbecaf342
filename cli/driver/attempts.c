/*
 * From one attempt of the gang to the next.
 *  1. conclude: the attempt is over and its nodes have let go; restart.c decides about another.
 *  2. The shell gives back what the next attempt does not take over, then begin: on the next turn
 * of the loop the nodes' slots are emptied and a new state machine starts with its pause.
 *  3. A signal to us between two attempts ends the new one in its pause.
 *  4. While ranks run, the GCS is asked every second which nodes died: a machine that hangs
 *     keeps its connections, so its stream alone says nothing before the lease runs out. One that
 *     is back under another id, at the same address, is followed. adrift.c may wait for it.
 */
#include "cli/driver/internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/str.h"

enum {
    LOOK_TIMEOUT_MS = 5000,
    BACK_WITHIN_MS = 15000 /* an agent that was cut off together with us registers again */
};

static void remember_cause(struct driver *d)
{
    char *cause = mb_asprintf("attempt %u: %s", d->attempt, mb_drv_verdict(d->state));

    if (!cause)
        return;
    if (d->n_causes == DRV_CAUSES_MAX) {
        mb_free(d->causes[0]);
        memmove(d->causes, d->causes + 1, (DRV_CAUSES_MAX - 1) * sizeof(d->causes[0]));
        d->n_causes--;
    }
    d->causes[d->n_causes++] = cause;
}

int drv_attempts_conclude(struct driver *d)
{
    struct mb_failure f = mb_drv_failure(d->state);

    d->next = (struct mb_restart_decision){0};
    if (f.kind == MB_FAILURE_NONE || d->interrupts > 0)
        return 0;
    if (d->opts->deadline_unix_ms != 0 && mb_unix_ms() >= d->opts->deadline_unix_ms) {
        fprintf(stderr, "mobula: no attempt follows: the deadline is over\n");
        return 0;
    }
    f.iteration = d->attempt_iteration;
    f.saved = d->saved_locally;
    f.ran_ms = d->launched_ms ? mb_mono_ms() - d->launched_ms : 0;
    mb_restart_decide(&d->restart, &f, mb_random_u64(), &d->next);
    if (d->next.again) {
        remember_cause(d);
        fprintf(stderr, "mobula: attempt %u ended (%s); attempt %u of at most %u in %.1f s\n",
                d->attempt, mb_restart_class_name(mb_restart_class(&f)), d->attempt + 1,
                d->opts->max_restarts + 1, (double)d->next.delay_ms / 1000.0);
    } else if (d->next.why_not[0]) { /* with the verdict: the last line is what people see */
        fprintf(stderr, "mobula: attempt %u was the last (%s): %s\n", d->attempt, d->next.why_not,
                mb_drv_verdict(d->state));
    }
    return d->next.again;
}

static void on_pause_over(uv_timer_t *t)
{
    drv_happened(t->data, MB_DRV_PAUSED);
}

static void empty_slots(struct driver *d)
{
    for (uint32_t i = 0; i < d->opts->num_nodes; i++)
        if (d->nodes[i].driver)
            drv_node_reset(&d->nodes[i]);
    for (uint32_t r = 0; r < drv_ranks_max(d); r++) {
        mb_free(d->endpoints[r]);
        d->endpoints[r] = NULL;
    }
    memset(d->exits, 0, drv_ranks_max(d) * sizeof(*d->exits));
    memset(d->uploads, 0, d->opts->num_nodes * sizeof(*d->uploads));
    d->report.uploads = (struct mb_drv_uploads){.iteration = -1, .given_up = -1};
    drv_output_flush(d);
    drv_seals_clear(d);
    drv_leaves_clear(d);
    d->attempt_iteration = -1;
    d->launched_ms = 0;
    d->verdict_said = 0;
    d->lines_after_verdict = 0;
    d->deadline = (struct drv_deadline){0}; /* a node that went has none for the next attempt */
    d->deadline_said = 0;
}

static void on_begin(uv_timer_t *t)
{
    struct driver *d = t->data;
    const struct mb_drv_config config = {.n_nodes = d->opts->num_nodes,
                                         .ranks_per_node = d->opts->ranks_per_node,
                                         .is_worker = d->opts->is_worker,
                                         .has_url = d->opts->checkpoint_url != NULL,
                                         .keep_last = d->opts->checkpoint_keep_last,
                                         .is_again = 1,
                                         .committed = d->committed};
    struct mb_drv *state = mb_drv_create(&config);
    uint64_t delay_ms = d->next.delay_ms;

    if (!state) { /* the attempt that is over stays the last one */
        fprintf(stderr, "mobula: out of memory for another attempt\n");
        d->next.again = 0;
        drv_happened(d, MB_DRV_RELEASED);
        return;
    }
    empty_slots(d);
    mb_drv_destroy(d->state);
    d->state = state;
    d->attempt++;
    d->next = (struct mb_restart_decision){0};
    d->record_dirty = 1;
    if (d->interrupts > 0)
        drv_event(d, &(struct mb_drv_event){.kind = MB_DRV_INTERRUPTED, .signal = d->signal});
    else
        uv_timer_start(&d->pause, on_pause_over, delay_ms, 0);
}

void drv_attempts_begin(struct driver *d)
{
    uv_timer_start(&d->pause, on_begin, 0, 0);
}

/* The head took the node for dead, and it came back as another while it kept its gang; if it has
 * not, the next Hello is refused. */
static int follows_node(struct drv_node *n, const struct mb_gcs_node *dead,
                        const struct mb_gcs_node *nodes, size_t n_nodes)
{
    for (size_t i = 0; i < n_nodes; i++) {
        if (nodes[i].is_dead || nodes[i].port != dead->port || strcmp(nodes[i].ip, dead->ip) != 0)
            continue;
        memcpy(n->node_id, nodes[i].node_id, MB_NODE_ID_BYTES);
        drv_adrift_is_back(n);
        return 1;
    }
    return 0;
}

static void on_nodes(void *arg, const struct mb_err *err, const struct mb_gcs_node *nodes, size_t n)
{
    struct driver *d = arg;
    uint64_t now = mb_mono_ms();

    d->looking = 0;
    if (err->code)
        d->blind_ms = now;
    if (err->code || d->closing)
        return;
    for (size_t i = 0; i < n; i++) {
        for (uint32_t k = 0; k < d->n_nodes; k++) {
            if (!d->nodes[k].channel ||
                memcmp(d->nodes[k].node_id, nodes[i].node_id, MB_NODE_ID_BYTES) != 0)
                continue;
            if (nodes[i].is_dead && !follows_node(&d->nodes[k], &nodes[i], nodes, n) &&
                (d->blind_ms == 0 || now - d->blind_ms > BACK_WITHIN_MS) &&
                !drv_adrift_waits(&d->nodes[k]))
                drv_node_declared_dead(&d->nodes[k]);
            else if (!nodes[i].is_dead)
                drv_node_moved(&d->nodes[k], nodes[i].ip, nodes[i].port);
        }
    }
    drv_adrift_look(d);
}

void drv_attempts_tick(struct driver *d)
{
    enum mb_drv_phase phase = mb_drv_phase(d->state);

    if (d->looking || phase < MB_DRV_DIAL || phase > MB_DRV_END)
        return;
    d->looking = mb_gcs_nodes(d->gcs, LOOK_TIMEOUT_MS, on_nodes, d, NULL, NULL) == 0;
}
