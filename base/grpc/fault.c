/*
 * Why a channel cannot connect.
 *
 *  1. A call is UNAVAILABLE: the pool looks (tls_probe.c), at one peer at a time, since a look at a
 *     machine that is away takes seconds, and every 10 s at most for a channel. The runtime does
 *     not stop before it is back.
 *  2. It is TLS, or no gRPC at all: the text is kept and, if it is another than before, logged.
 * Otherwise nothing is said: a peer that is away is its callers' matter.
 *  3. A call that is answered ends the fault.
 *  4. The channel ends first: the look is called off.
 */
#include <string.h>
#include "base/alloc.h"
#include "base/grpc/internal.h"
#include "base/log.h"

enum { PROBE_PAUSE_MS = 10000, PATIENCE_MS = 4000 };

struct mb_grpc_probe {
    uv_work_t work;
    struct mb_grpc_tag tag; /* counts as an operation of the runtime */
    struct mb_grpc *g;
    struct mb_grpc_channel *ch; /* NULL once the channel is gone */
    char *target;
    int cancelled; /* read by the pool's thread */
    struct mb_err found;
};

static void run_probe(uv_work_t *work)
{
    struct mb_grpc_probe *p = work->data;

    mb_grpc_tls_probe(p->g->tls, p->target,
                      p->g->probe_patience_ms ? p->g->probe_patience_ms : PATIENCE_MS,
                      &p->cancelled, &p->found);
}

static void keep_fault(struct mb_grpc_channel *ch, const struct mb_err *found)
{
    ch->fault_code = found->code;
    if (ch->fault != NULL && strcmp(ch->fault, found->text) == 0)
        return;
    if (!ch->g->quiet_faults)
        mb_warn("grpc", "%s", found->text);
    mb_free(ch->fault);
    ch->fault = mb_strdup(found->text);
}

static void on_probed(struct mb_grpc_tag *tag, int ok)
{
    struct mb_grpc_probe *p = MB_GRPC_ENTRY(tag, struct mb_grpc_probe, tag);

    (void)ok;
    p->g->is_probing = 0;
    if (p->ch != NULL) {
        p->ch->probe = NULL;
        p->ch->probe_after_ms = uv_now(p->g->loop) + PROBE_PAUSE_MS;
        if (p->found.code != MB_OK && !p->g->stopping)
            keep_fault(p->ch, &p->found);
    }
    mb_free(p->target);
    mb_free(p);
}

static void after_probe(uv_work_t *work, int status)
{
    struct mb_grpc_probe *p = work->data;
    struct mb_grpc *g = p->g;

    (void)status;
    mb_grpc_tag_drop(g); /* the tag goes back as any other, so that a stop sees it */
    mb_grpc_defer(g, &p->tag, on_probed);
}

void mb_grpc_channel_heard(struct mb_grpc_channel *ch, int status)
{
    struct mb_grpc *g = ch->g;
    struct mb_grpc_probe *p;

    if (status == MB_GRPC_OK) {
        mb_free(ch->fault);
        ch->fault = NULL;
    }
    if (status != MB_GRPC_UNAVAILABLE || g->is_probing || g->stopping ||
        uv_now(g->loop) < ch->probe_after_ms)
        return;
    p = mb_calloc(1, sizeof(*p));
    if (p == NULL || (p->target = mb_strdup(ch->target)) == NULL) {
        mb_free(p);
        return;
    }
    p->g = g;
    p->ch = ch;
    p->work.data = p;
    if (uv_queue_work(g->loop, &p->work, run_probe, after_probe) != 0) {
        mb_free(p->target);
        mb_free(p);
        return;
    }
    ch->probe = p;
    g->is_probing = 1;
    mb_grpc_tag_start(g, &p->tag, on_probed);
}

void mb_grpc_fault_close(struct mb_grpc_channel *ch)
{
    if (ch->probe != NULL) {
        __atomic_store_n(&ch->probe->cancelled, 1, __ATOMIC_RELAXED);
        ch->probe->ch = NULL;
        ch->probe = NULL;
    }
    mb_free(ch->fault);
    ch->fault = NULL;
}

const char *mb_grpc_channel_fault(const struct mb_grpc_channel *ch)
{
    return ch->fault;
}

int mb_grpc_channel_fault_code(const struct mb_grpc_channel *ch)
{
    return ch->fault_code;
}
