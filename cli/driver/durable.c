/*
 * Is what this attempt saved in the store, although no node said so? The word of a commit may be
 * lost together with the stream that should have brought it.
 *
 *  1. The latest pointer names the iteration or a newer one, and the iteration's manifest was
 *     written by this attempt: it is durable, as for a reader (agent/upload/commit.h).
 *  2. Every iteration is asked for, the oldest first: that a newer one is there says nothing of it.
 *  3. Anything else, a store that does not answer within ASK_MS (less, when --drain-timeout is
 *     over) included: nothing was learned. After such a silence no more is asked.
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
    uint32_t attempt; /* that asks */
    int64_t latest;   /* what the pointer says */
    size_t n, at;
    size_t n_found;       /* the first so many of iterations turned out to be durable */
    int64_t iterations[]; /* [n], ascending; those before `at` are overwritten by what was found */
};

/* What is told may end the attempt. */
static void tell(const struct question *q, struct mb_drv_event e)
{
    if (!q->d->closing && q->attempt == q->d->attempt)
        drv_event(q->d, &e);
}

static void on_closed(void *arg)
{
    struct question *q = arg;
    struct driver *d = q->d;

    for (size_t i = 0; i < q->n_found; i++) {
        if (q->iterations[i] > d->committed)
            d->committed = q->iterations[i];
        /* A node may have said so meanwhile. */
        if (q->attempt != d->attempt || mb_drv_is_open(d->state, q->iterations[i])) {
            printf("checkpoint of iteration %lld is durable in %s\n", (long long)q->iterations[i],
                   d->opts->checkpoint_url);
            fflush(stdout);
        }
        tell(q, (struct mb_drv_event){.kind = MB_DRV_COMMITTED, .iteration = q->iterations[i]});
    }
    tell(q, (struct mb_drv_event){.kind = MB_DRV_STORE_SAID});
    mb_free(q);
}

static void ask_next(struct question *q);

static void on_manifest(void *arg, const struct mb_store_result *r)
{
    struct question *q = arg;
    int64_t iteration = q->iterations[q->at++];
    char gang[2 * MB_PG_ID_BYTES + 1];
    struct mb_manifest_writer us = {q->d->opts->job_id,
                                    mb_hex(q->d->gang_id, sizeof(q->d->gang_id), gang), q->attempt};
    struct mb_manifest m = {0};
    struct mb_err err;

    if (r->error == MB_OK &&
        mb_manifest_decode(r->data, r->data_len, "manifest", &m, &err) == MB_OK) {
        if (mb_manifest_is_of(&m, &us) && m.iteration == iteration)
            q->iterations[q->n_found++] = iteration;
        mb_manifest_close(&m);
    }
    if (r->error != MB_OK && r->error != MB_ENOENT)
        q->at = q->n;
    ask_next(q);
}

static void ask_next(struct question *q)
{
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err;

    if (q->at == q->n || q->iterations[q->at] > q->latest ||
        mb_store_get(q->store, mb_manifest_key(q->iterations[q->at], key), MB_MANIFEST_MAX_BYTES,
                     ask_ms(q->d), on_manifest, q, &err) != MB_OK)
        mb_store_close(q->store, on_closed, q);
}

static void on_pointer(void *arg, const struct mb_store_result *r)
{
    struct question *q = arg;
    struct mb_err err;

    if (r->error != MB_OK || mb_latest_parse(r->data, r->data_len, &q->latest, &err) != MB_OK)
        q->at = q->n;
    ask_next(q);
}

static void on_no_question(uv_timer_t *t)
{
    struct driver *d = t->data;

    if (!d->closing)
        drv_event(d, &(struct mb_drv_event){.kind = MB_DRV_STORE_SAID});
}

static struct question *new_question(struct driver *d)
{
    struct question *q;
    size_t n = 0;

    for (int64_t it = mb_drv_open(d->state, -1); it >= 0; it = mb_drv_open(d->state, it))
        n++;
    q = mb_calloc(1, sizeof(*q) + n * sizeof(q->iterations[0]));
    if (!q)
        return NULL;
    q->d = d;
    q->attempt = d->attempt;
    q->latest = -1;
    for (int64_t it = mb_drv_open(d->state, -1); it >= 0; it = mb_drv_open(d->state, it))
        q->iterations[q->n++] = it;
    return q;
}

void drv_ask_store(struct driver *d)
{
    struct question *q = new_question(d);
    struct mb_err err = {0};

    if (q && mb_store_open(&d->loop, d->opts->checkpoint_url, &q->store, &err) == MB_OK) {
        if (mb_store_get(q->store, MB_LATEST_KEY, POINTER_MAX_BYTES, ask_ms(d), on_pointer, q,
                         &err) != MB_OK)
            mb_store_close(q->store, on_closed, q);
        return;
    }
    mb_free(q);
    uv_timer_start(&d->pause, on_no_question, 0, 0); /* not from inside this call */
}
