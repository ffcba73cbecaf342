/*
 *  1. Every 2 s the head is asked for the group of an adrift bundle, in turn.
 *  2. The group is gone, or the bundle has another node: the gang ends. No answer says nothing.
 *  3. The bundle has no node: the head waits for one, perhaps for this. Not for ever.
 *  4. It was prepared or committed here again: the ledger has it back, and it is asked for no more.
 */
#include "agent/adrift.h"

#include <string.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "gcs/client.h"

enum { ASK_EVERY_MS = 2000, CALL_MS = 10000, PATIENCE_MS = 600000 };

enum mb_adrift_verdict mb_adrift_decide(const struct mb_gcs_pg *pg, int32_t index,
                                        const uint8_t own_id[MB_NODE_ID_BYTES], uint64_t since_ms,
                                        const char **why)
{
    const struct mb_gcs_bundle *b;

    if (pg == NULL || pg->state == MB_PG_REMOVED || index < 0 || (size_t)index >= pg->n_bundles) {
        *why = "the head took this node for dead and removed its placement group";
        return MB_ADRIFT_LOST;
    }
    b = &pg->bundles[index];
    if (b->has_node && memcmp(b->node_id, own_id, MB_NODE_ID_BYTES) != 0) {
        *why = "the head took this node for dead and gave its place to another";
        return MB_ADRIFT_LOST;
    }
    if (!b->has_node && since_ms > PATIENCE_MS) {
        *why = "the head took this node for dead and has not placed its bundle again";
        return MB_ADRIFT_LOST;
    }
    return MB_ADRIFT_WAIT;
}

/* The one after that of the last turn; NULL: none is adrift. */
static const struct mb_bundle *next_adrift(struct mb_adrift *d)
{
    size_t n = mb_ledger_count(d->ledger);

    for (size_t i = 0; i < n; i++) {
        const struct mb_bundle *b = mb_ledger_at(d->ledger, ++d->turn % n);

        if (b->is_adrift)
            return b;
    }
    return NULL;
}

static void on_group(void *arg, const struct mb_err *err, const struct mb_gcs_pg *groups, size_t n)
{
    struct mb_adrift *d = arg;
    const struct mb_gcs_pg *pg = err->code == MB_OK && n == 1 ? &groups[0] : NULL;
    int is_lost = 0;

    d->op = NULL;
    if (err->code != MB_OK && err->code != MB_ENOENT)
        return;
    if (!mb_node_is_alive(d->node) ||
        memcmp(d->asked_as, mb_node_id(d->node), MB_NODE_ID_BYTES) != 0)
        return; /* given up again meanwhile: the answer is about another node */
    for (size_t i = mb_ledger_count(d->ledger); i-- > 0;) {
        const struct mb_bundle *b = mb_ledger_at(d->ledger, i);
        const char *why;

        if (!b->is_adrift || memcmp(&b->pg, &d->asked, sizeof(b->pg)) != 0 ||
            mb_adrift_decide(pg, b->index, mb_node_id(d->node), mb_mono_ms() - d->since_ms, &why) ==
                MB_ADRIFT_WAIT)
            continue;
        mb_warn("agent", "bundle %d is lost: %s", b->index, why);
        mb_ledger_remove(d->ledger, &d->asked, b->index);
        is_lost = 1;
    }
    if (is_lost)
        d->on_lost(d->arg, &d->asked);
}

static void on_timer(uv_timer_t *t)
{
    struct mb_adrift *d = t->data;
    const struct mb_bundle *b = next_adrift(d);
    struct mb_err err;

    if (b == NULL) {
        uv_timer_stop(t);
        return;
    }
    if (d->op != NULL || !mb_node_is_alive(d->node))
        return;
    memcpy(d->asked_as, mb_node_id(d->node), MB_NODE_ID_BYTES);
    d->asked = b->pg;
    if (mb_gcs_pg_get(mb_node_gcs(d->node), b->pg.bytes, CALL_MS, on_group, d, &d->op, &err) !=
        MB_OK)
        mb_debug("agent", "what became of an adrift group is not known: %s", err.text);
}

void mb_adrift_init(struct mb_adrift *d, uv_loop_t *loop)
{
    uv_timer_init(loop, &d->timer);
    d->timer.data = d;
}

void mb_adrift_resume(struct mb_adrift *d)
{
    d->since_ms = mb_mono_ms();
    uv_timer_start(&d->timer, on_timer, ASK_EVERY_MS, ASK_EVERY_MS);
}

void mb_adrift_begin(struct mb_adrift *d, const char *why)
{
    size_t n = mb_ledger_count(d->ledger), n_adrift;
    struct mb_pg_id *before = mb_calloc(n + 1, sizeof(*before));

    for (size_t i = 0; before != NULL && i < n; i++)
        before[i] = mb_ledger_at(d->ledger, i)->pg;
    n_adrift = mb_ledger_set_adrift(d->ledger);
    mb_info("agent", "%zu bundles are adrift, %zu void: %s", n_adrift,
            n - mb_ledger_count(d->ledger), why);
    /* Without memory their drivers hear of it at the launch, which is refused. */
    for (size_t i = 0; before != NULL && i < n; i++)
        if (!mb_ledger_is_committed(d->ledger, &before[i]))
            d->on_lost(d->arg, &before[i]);
    mb_free(before);
    if (n_adrift > 0)
        mb_adrift_resume(d);
}

void mb_adrift_stop(struct mb_adrift *d)
{
    uv_timer_stop(&d->timer);
    if (d->op != NULL)
        mb_gcs_op_cancel(d->op);
}

void mb_adrift_close(struct mb_adrift *d)
{
    uv_close((uv_handle_t *)&d->timer, NULL);
}
