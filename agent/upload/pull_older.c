/*
 * A checkpoint that is not whole, and what is taken in its place: points 1, 2, 5 and 6 of pull.c.
 */
#include "agent/upload/pull_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/log.h"
#include "base/str.h"

enum { RESTARTS_MAX = 5, LIST_TIMEOUT_MS = 600000 /* some servers take minutes */ };

static void try_next_older(struct mb_pull *p)
{
    if (p->n_older == 0 && p->first.code == MB_OK) { /* no pointer, and nothing was whole ever */
        pull_finish(p, &p->first, -1);
        return;
    }
    if (p->n_older == 0) {
        mb_err_wrap(&p->first, "no whole checkpoint is there; the newest");
        p->first.code = MB_ECORRUPT;
        pull_finish(p, &p->first, -1);
        return;
    }
    pull_try(p, p->older[--p->n_older]);
}

static int compare_i64(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

    return (x > y) - (x < y);
}

static void on_list(void *arg, const struct mb_store_result *r)
{
    struct mb_pull *p = arg;
    struct mb_err err;

    if (!pull_came_back(p))
        return;
    if (r->error != MB_OK && !(r->error == MB_ENOENT && p->has_no_pointer)) {
        mb_err_set(&err, r->error, "looking for %s: %s",
                   p->has_no_pointer ? "checkpoints" : "older checkpoints", r->text);
        pull_finish(p, &err, -1);
        return;
    }
    p->has_listed = 1;
    p->older = mb_calloc(r->n_entries, sizeof(*p->older));
    if (p->older == NULL) {
        mb_err_set(&err, MB_ENOMEM, "no memory to look for checkpoints");
        pull_finish(p, &err, -1);
        return;
    }
    for (size_t i = 0; i < r->n_entries; i++) {
        char *end = NULL;
        long long n;

        if (!mb_starts_with(r->entries[i].key, "iter_"))
            continue;
        n = strtoll(r->entries[i].key + 5, &end, 10);
        if (strcmp(end, "/.mobula/manifest.json") == 0 && n < p->trying)
            p->older[p->n_older++] = n;
    }
    if (p->n_older > 0)
        qsort(p->older, p->n_older, sizeof(*p->older), compare_i64);
    if (p->has_no_pointer && p->n_older > 0)
        mb_warn("pull", "there is no pointer " MB_LATEST_KEY ": taking the newest whole iteration");
    try_next_older(p);
}

/* The present one is left for another. */
static void leave_iteration(struct mb_pull *p)
{
    for (size_t i = 0; i < PULL_SLOTS; i++)
        if (p->slots[i].waits)
            pull_end_slot(&p->slots[i]);
    pull_leave_dir(p);
    mb_manifest_close(&p->manifest);
    p->manifest = (struct mb_manifest){0};
    p->is_gone = 0;
}

static void list(struct mb_pull *p)
{
    struct mb_err err;

    pull_started(p, mb_store_list(p->store, "iter_", LIST_TIMEOUT_MS, on_list, p, &err), &err);
}

static void take_older(struct mb_pull *p)
{
    leave_iteration(p);
    /* A claim is no checkpoint; only a pointer promises that there is one. */
    if (!p->has_no_pointer || p->bad.code != MB_ENOENT) {
        p->status.n_bad++;
        mb_warn("pull",
                "checkpoint of iteration %" PRId64 " is not whole: %s; trying the one before",
                p->trying, p->bad.text);
        if (p->first.code == MB_OK)
            p->first = p->bad;
    }
    mb_err_clear(&p->bad);
    if (p->has_listed)
        try_next_older(p);
    else
        list(p);
}

void pull_without_pointer(struct mb_pull *p)
{
    p->has_no_pointer = 1;
    p->trying = INT64_MAX;
    list(p);
}

/* The pointer, after something was not there. */
static void on_latest_again(void *arg, const struct mb_store_result *r)
{
    struct mb_pull *p = arg;
    int64_t iteration = -1;
    struct mb_err ignored; /* what the pointer itself has is no news here: 2. goes on */

    if (!pull_came_back(p))
        return;
    if (r->error != MB_OK || mb_latest_parse(r->data, r->data_len, &iteration, &ignored) != 0 ||
        iteration <= p->newest) {
        take_older(p);
        return;
    }
    mb_warn("pull",
            "checkpoint of iteration %" PRId64 " was removed while it was fetched (%s); starting "
            "over with iteration %" PRId64 ", which is the newest now",
            p->trying, p->bad.text, iteration);
    leave_iteration(p);
    mb_err_clear(&p->bad);
    mb_err_clear(&p->first);
    mb_free(p->older);
    p->older = NULL;
    p->n_older = 0;
    p->has_listed = p->has_no_pointer = 0;
    p->status.n_bad = 0;
    p->newest = iteration;
    pull_try(p, iteration);
}

/* The present checkpoint is not whole: p->bad says why. */
void pull_fall_back(struct mb_pull *p)
{
    struct mb_err err;

    if (p->wanted >= 0) {
        mb_err_wrap(&p->bad, "iteration %" PRId64 " is not whole", p->wanted);
        p->bad.code = MB_ECORRUPT;
        pull_finish(p, &p->bad, -1);
    } else if (p->is_gone && p->n_again < RESTARTS_MAX) {
        p->n_again++;
        pull_started(p,
                     mb_store_get(p->store, MB_LATEST_KEY, PULL_LATEST_MAX_BYTES,
                                  PULL_SMALL_TIMEOUT_MS, on_latest_again, p, &err),
                     &err);
    } else {
        take_older(p);
    }
}
