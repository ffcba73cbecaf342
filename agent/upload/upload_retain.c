/*
 * Older checkpoints go: all but the newest keep_last of those that the pointer may name.
 *
 *  1. The pointer, then the listing, which may be older than it but never names less.
 *  2. The keep_last newest whole iterations up to the pointer stay, and whatever is newer than the
 *     oldest of them: manifests are read from the newest down, since a claim has the same key and
 * is no checkpoint. Of the others the oldest goes first: its manifest is read, since what this gang
 *     still uploads stays; the pointer is read again; then the manifest is deleted, and when that
 * is gone the rest.
 *  3. The store fails, or nobody waits any more (RELEASED_MS): left for the next commit, which
 * lists again. A kill leaves files without a manifest, which go then.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "agent/upload/upload_internal.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"

enum { TIMEOUT_MS = 10000, RELEASED_MS = 30000, LATEST_MAX_BYTES = 64, IN_FLIGHT = 8 };

struct upload_retain {
    int64_t latest, iteration; /* pointer; that is being deleted */
    char **keys;               /* up to the pointer, in order; from `next` on, what goes */
    size_t n_keys, next;
    size_t look; /* the manifests from here on were read, and n_whole of them name files */
    unsigned n_whole;
    unsigned in_flight;
    int failed;
    unsigned n_deleted; /* iterations */
};

static void next(struct mb_upload *u);

static void end(struct mb_upload *u)
{
    struct upload_retain *r = u->retain;

    if (r->n_deleted > 0)
        mb_info("upload", "job=%s: deleted %u older checkpoints, newest=%" PRId64, u->job_id,
                r->n_deleted, r->latest);
    upload_retain_close(u);
}

void upload_retain_close(struct mb_upload *u)
{
    struct upload_retain *r = u->retain;

    for (size_t i = 0; r != NULL && i < r->n_keys; i++)
        mb_free(r->keys[i]);
    if (r != NULL)
        mb_free(r->keys);
    mb_free(r);
    u->retain = NULL;
}

static void fail(struct mb_upload *u, const char *what, const char *text)
{
    mb_warn("upload", "deleting older checkpoints: %s: %s", what, text);
    u->retain->failed = 1;
}

/* 1: it came back, and goes on. */
static int came_back(struct mb_upload *u)
{
    u->retain->in_flight--;
    if (u->closing)
        return 0;
    if (u->released_at_ms > 0 && mb_mono_ms() > u->released_at_ms + RELEASED_MS)
        u->retain->failed = 1;
    return 1;
}

static void begun(struct mb_upload *u, int rc, const struct mb_err *err)
{
    if (rc == MB_OK)
        u->retain->in_flight++;
    else
        fail(u, "a request", err->text);
}

/* -1: no key of an iteration. */
static int64_t iteration_of(const char *key, const char **rest)
{
    char *end_of;
    long long n;

    if (!mb_starts_with(key, "iter_") || key[5] < '0' || key[5] > '9')
        return -1;
    n = strtoll(key + 5, &end_of, 10);
    *rest = end_of;
    return *end_of == '/' ? n : -1;
}

static int is_manifest(const char *key)
{
    const char *rest;

    return iteration_of(key, &rest) >= 0 && strcmp(rest, "/.mobula/manifest.json") == 0;
}

/* ---- deleting ---- */

static void on_deleted(void *arg, const struct mb_store_result *result)
{
    struct mb_upload *u = arg;

    if (!came_back(u))
        return;
    if (result->error != MB_OK)
        fail(u, "delete", result->text);
    next(u);
}

static void delete_next(struct mb_upload *u)
{
    struct mb_err err = {0};
    struct upload_retain *r = u->retain;

    begun(u, mb_store_delete(u->store, r->keys[r->next], TIMEOUT_MS, on_deleted, u, &err), &err);
    r->next++;
}

static void on_pointer_again(void *arg, const struct mb_store_result *result)
{
    struct mb_upload *u = arg;
    int64_t latest = -1;

    if (!came_back(u))
        return;
    if (result->error != MB_OK ||
        mb_latest_parse(result->data, result->data_len, &latest, NULL) != MB_OK ||
        latest < u->retain->latest)
        fail(u, MB_LATEST_KEY, result->error != MB_OK ? result->text : "it went back");
    if (!u->retain->failed) {
        u->retain->n_deleted++;
        delete_next(u);
    }
    next(u);
}

static void on_manifest(void *arg, const struct mb_store_result *result)
{
    struct mb_upload *u = arg;
    struct upload_retain *r = u->retain;
    struct mb_manifest_writer writer = upload_writer(u);
    struct mb_manifest m = {0};
    struct mb_err err = {0};
    const struct mb_plan_iteration *own;
    int is_pending = 0;

    if (!came_back(u))
        return;
    if (result->error != MB_OK && result->error != MB_ENOENT)
        fail(u, "manifest", result->text);
    else if (result->error == MB_OK &&
             mb_manifest_decode_any(result->data, result->data_len, "manifest", &m, &err) == MB_OK)
        is_pending = m.is_claim && mb_manifest_is_of(&m, &writer);
    mb_manifest_close(&m);
    /* Ours may go beside one that is whole, and takes its place only when it is whole too. */
    own = mb_plan_find(u->plan, r->iteration);
    is_pending |= own != NULL && own->state < MB_PLAN_COMMITTED;
    if (is_pending) { /* some node of ours still uploads it */
        const char *rest;

        while (r->next < r->n_keys && iteration_of(r->keys[r->next], &rest) == r->iteration)
            r->next++;
    } else if (!r->failed) {
        begun(u,
              mb_store_get(u->store, MB_LATEST_KEY, LATEST_MAX_BYTES, TIMEOUT_MS, on_pointer_again,
                           u, &err),
              &err);
    }
    next(u);
}

static void next(struct mb_upload *u)
{
    struct upload_retain *r = u->retain;
    struct mb_err err = {0};

    /* The manifest alone first, then the rest of its iteration. */
    while (!r->failed && r->next < r->n_keys && r->in_flight < IN_FLIGHT) {
        const char *key = r->keys[r->next], *rest;
        int before = r->next > 0 && is_manifest(r->keys[r->next - 1]);

        if (r->in_flight > 0 && (before || iteration_of(key, &rest) != r->iteration))
            return;
        if (is_manifest(key) && r->in_flight == 0) {
            r->iteration = iteration_of(key, &rest);
            begun(u,
                  mb_store_get(u->store, key, MB_MANIFEST_MAX_BYTES, TIMEOUT_MS, on_manifest, u,
                               &err),
                  &err);
            return;
        }
        if (is_manifest(key))
            return;
        r->iteration = iteration_of(key, &rest);
        delete_next(u);
    }
    if (r->in_flight == 0)
        end(u);
}

/* ---- what goes ---- */

static int by_iteration(const void *a, const void *b)
{
    const char *x = *(char *const *)a, *y = *(char *const *)b, *rest;
    int64_t i = iteration_of(x, &rest), k = iteration_of(y, &rest);

    if (i != k)
        return i < k ? -1 : 1;
    return is_manifest(y) - is_manifest(x); /* first */
}

static void look_at_next(struct mb_upload *u);

/* 1: it names files. */
static int is_whole(const struct mb_store_result *result)
{
    struct mb_manifest m = {0};
    struct mb_err err = {0};
    int rc = mb_manifest_decode(result->data, result->data_len, "manifest", &m, &err);

    mb_manifest_close(&m);
    return rc == MB_OK;
}

static void on_looked_at(void *arg, const struct mb_store_result *result)
{
    struct mb_upload *u = arg;
    struct upload_retain *r = u->retain;

    if (!came_back(u))
        return;
    if (result->error != MB_OK && result->error != MB_ENOENT)
        fail(u, "manifest", result->text);
    r->n_whole += result->error == MB_OK && is_whole(result);
    look_at_next(u);
}

/* From the newest down, until keep_last whole ones are found: what is older goes. */
static void look_at_next(struct mb_upload *u)
{
    struct upload_retain *r = u->retain;
    struct mb_err err = {0};

    if (!r->failed && r->n_whole == u->opts.keep_last) {
        while (r->n_keys > r->look) /* a manifest is the first key of its iteration */
            mb_free(r->keys[--r->n_keys]);
        next(u);
        return;
    }
    while (!r->failed && r->look > 0)
        if (is_manifest(r->keys[--r->look])) {
            begun(u,
                  mb_store_get(u->store, r->keys[r->look], MB_MANIFEST_MAX_BYTES, TIMEOUT_MS,
                               on_looked_at, u, &err),
                  &err);
            break;
        }
    if (r->in_flight == 0)
        end(u);
}

static void on_list(void *arg, const struct mb_store_result *result)
{
    struct mb_upload *u = arg;
    struct upload_retain *r = u->retain;

    if (!came_back(u))
        return;
    if (result->error != MB_OK)
        fail(u, "list", result->text);
    r->keys = result->error == MB_OK ? mb_calloc(result->n_entries + 1, sizeof(*r->keys)) : NULL;
    for (size_t i = 0; r->keys != NULL && i < result->n_entries; i++) {
        const char *rest;
        int64_t it = iteration_of(result->entries[i].key, &rest);

        if (it < 0 || it > r->latest)
            continue;
        if ((r->keys[r->n_keys] = mb_strdup(result->entries[i].key)) == NULL)
            fail(u, "list", "no memory");
        else
            r->n_keys++;
    }
    if (r->n_keys > 0)
        qsort(r->keys, r->n_keys, sizeof(*r->keys), by_iteration);
    r->look = r->n_keys;
    look_at_next(u);
}

static void on_pointer(void *arg, const struct mb_store_result *result)
{
    struct mb_upload *u = arg;
    struct mb_err err = {0};

    if (!came_back(u))
        return;
    if (result->error != MB_OK ||
        mb_latest_parse(result->data, result->data_len, &u->retain->latest, &err) != MB_OK)
        fail(u, MB_LATEST_KEY, result->error != MB_OK ? result->text : err.text);
    else
        begun(u, mb_store_list(u->store, "iter_", UPLOAD_SMALL_TIMEOUT_MS, on_list, u, &err), &err);
    if (u->retain->in_flight == 0)
        end(u);
}

void upload_retain(struct mb_upload *u)
{
    struct mb_err err = {0};

    if (!u->retain_wanted || u->retain != NULL)
        return;
    u->retain_wanted = 0;
    u->retain = mb_calloc(1, sizeof(*u->retain));
    if (u->retain == NULL)
        return;
    u->retain->iteration = -1;
    begun(u,
          mb_store_get(u->store, MB_LATEST_KEY, LATEST_MAX_BYTES, TIMEOUT_MS, on_pointer, u, &err),
          &err);
    if (u->retain->in_flight == 0)
        end(u);
}
