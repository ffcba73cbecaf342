/*
 * Is what this attempt saved in the store, although no node said so? The word of a commit may be
 * lost together with the stream that should have brought it.
 *
 *  1. The latest pointer names the iteration or a newer one, and the iteration's manifest was
 *     written by this attempt: it is durable, as for a reader (agent/upload/commit.h).
 *  2. Anything else, a store that does not answer within ASK_MS (less, when --drain-timeout is
 *     over) included: nothing was learned.
 */
#include <stdio.h>
#include "agent/upload/manifest.h"
#include "base/alloc.h"
#include "base/s3/store.h"
#include "base/str.h"
#include "cli/driver/internal.h"

enum { ASK_MS = 10000, ASK_LATE_MS = 500, POINTER_MAX_BYTES = 64 };

static uint64_t ask_ms(const struct driver *d)
{
    return d->drain_is_over ? ASK_LATE_MS : ASK_MS;
}

struct question {
    struct driver *d;
    struct mb_store *store;
    uint32_t attempt;  /* that asks */
    int64_t iteration; /* saved */
    int64_t found;     /* -1: not durable, as far as is known */
};

static void on_closed(void *arg)
{
    struct question *q = arg;
    struct driver *d = q->d;
    struct mb_drv_event e = {.kind = MB_DRV_STORE_SAID, .iteration = q->found};

    if (q->found > d->committed)
        d->committed = q->found;
    if (!d->closing && q->attempt == d->attempt)
        drv_event(d, &e);
    mb_free(q);
}

static void on_manifest(void *arg, const struct mb_store_result *r)
{
    struct question *q = arg;
    char gang[2 * MB_PG_ID_BYTES + 1];
    struct mb_manifest_writer us = {q->d->opts->job_id,
                                    mb_hex(q->d->gang_id, sizeof(q->d->gang_id), gang), q->attempt};
    struct mb_manifest m = {0};
    struct mb_err err;

    if (r->error == MB_OK &&
        mb_manifest_decode(r->data, r->data_len, "manifest", &m, &err) == MB_OK) {
        if (mb_manifest_is_of(&m, &us) && m.iteration == q->iteration) {
            printf("checkpoint of iteration %lld is durable in %s\n", (long long)q->iteration,
                   q->d->opts->checkpoint_url);
            fflush(stdout);
            q->found = q->iteration;
        }
        mb_manifest_close(&m);
    }
    mb_store_close(q->store, on_closed, q);
}

static void on_pointer(void *arg, const struct mb_store_result *r)
{
    struct question *q = arg;
    char key[MB_CHECKPOINT_KEY_MAX];
    int64_t latest = -1;
    struct mb_err err;

    if (r->error != MB_OK || mb_latest_parse(r->data, r->data_len, &latest, &err) != MB_OK ||
        latest < q->iteration ||
        mb_store_get(q->store, mb_manifest_key(q->iteration, key), MB_MANIFEST_MAX_BYTES,
                     ask_ms(q->d), on_manifest, q, &err) != MB_OK)
        mb_store_close(q->store, on_closed, q);
}

static void on_no_question(uv_timer_t *t)
{
    struct driver *d = t->data;

    if (!d->closing)
        drv_event(d, &(struct mb_drv_event){.kind = MB_DRV_STORE_SAID, .iteration = -1});
}

void drv_ask_store(struct driver *d)
{
    struct question *q = mb_calloc(1, sizeof(*q));
    struct mb_err err = {0};

    if (q && mb_store_open(&d->loop, d->opts->checkpoint_url, &q->store, &err) == MB_OK) {
        q->d = d;
        q->attempt = d->attempt;
        q->iteration = mb_drv_saved(d->state);
        q->found = -1;
        if (mb_store_get(q->store, MB_LATEST_KEY, POINTER_MAX_BYTES, ask_ms(d), on_pointer, q,
                         &err) != MB_OK)
            mb_store_close(q->store, on_closed, q);
        return;
    }
    mb_free(q);
    uv_timer_start(&d->pause, on_no_question, 0, 0); /* not from inside this call */
}
