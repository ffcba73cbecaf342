/*
 *  1. The pointer is read, now. It names the iteration, or it is damaged or absent and this is the
 *     newest whole one: refused, or, with force, moved away under its etag.
 *  2. The manifest is kept in memory and deleted.
 *  3. The pointer is read again: somebody may have moved it here between 1 and 2. Then the manifest
 *     is put back, if absent, and that is an error. Else it is touched: put again under its etag,
 *     with the same number in another form, so that a move which somebody began before 2 fails when
 *     it arrives; and who begins one after 2 sees that the manifest is gone
 *     (docs/adr/0015-what-the-pointer-names-is-there.md). Where there is none, one is put.
 *  4. The files go, many at a time; the parts of the nodes among them.
 * Killed in between: an iteration without a manifest stays, which no reader looks at, and which the
 * same call removes.
 */
#include "agent/upload/remove.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/clock.h"

enum { TIMEOUT_MS = 60000, AT_ONCE = 32, POINTER_TRIES = 10 };

struct removal {
    struct mb_store *store;
    struct mb_remove_opts opts;
    mb_remove_cb cb;
    void *arg;
    char manifest_key[MB_CHECKPOINT_KEY_MAX];
    struct mb_buf manifest;
    int is_second_look;
    int has_pointer, is_named; /* there is one; it names this iteration */
    char etag[200];            /* ... under this etag */
    int64_t to;                /* what it is to name */
    unsigned tries;
    size_t next;
    unsigned in_flight;
    size_t n_removed;
    struct mb_err err;
};

int mb_remove_is_old(const struct mb_inventory *inv, const struct mb_inventory_iteration *it,
                     int64_t keep)
{
    int64_t n_newer = 0;

    if (it->iteration == inv->latest || inv->latest == -2)
        return 0;
    for (size_t i = 0; i < inv->n; i++) {
        const struct mb_inventory_iteration *other = &inv->iterations[i];

        /* A damaged one is no reserve; one ahead of the pointer is not in use yet. */
        n_newer += other->state == MB_INVENTORY_WHOLE && other->iteration > it->iteration &&
                   other->iteration <= inv->latest;
    }
    return n_newer >= keep;
}

static void finish(struct removal *r)
{
    r->cb(r->arg, &r->err, r->n_removed);
    mb_buf_close(&r->manifest);
    mb_free(r);
}

static int fail(struct removal *r, const char *what, const struct mb_store_result *result)
{
    mb_err_set(&r->err, result->error, "%s%s%s", what, what[0] ? ": " : "", result->text);
    return r->err.code;
}

/* ---- the files ---- */

static void delete_more(struct removal *r);

static void on_deleted(void *arg, const struct mb_store_result *result)
{
    struct removal *r = arg;

    r->in_flight--;
    if (result->error == 0)
        r->n_removed++;
    else if (r->err.code == 0)
        fail(r, "", result);
    delete_more(r);
}

static void delete_more(struct removal *r)
{
    const struct mb_inventory_iteration *it = r->opts.it;

    while (r->err.code == 0 && r->in_flight < AT_ONCE && r->next < it->n_keys) {
        const char *key = it->keys[r->next++].key;

        if (strcmp(key, r->manifest_key) == 0)
            continue;
        if (mb_store_delete(r->store, key, TIMEOUT_MS, on_deleted, r, &r->err) == 0)
            r->in_flight++;
    }
    if (r->in_flight == 0)
        finish(r);
}

/* ---- the manifest ---- */

static void look_at_pointer(struct removal *r);

static void on_put_back(void *arg, const struct mb_store_result *result)
{
    struct removal *r = arg;

    if (result->error != 0 && result->error != MB_EEXIST)
        fail(r, "the pointer came to name this iteration, and its manifest cannot be put back",
             result);
    else
        mb_err_set(&r->err, MB_ESTATE,
                   "the pointer came to name iteration %" PRId64 " meanwhile: it stays",
                   r->opts.it->iteration);
    finish(r);
}

static void on_manifest_deleted(void *arg, const struct mb_store_result *result)
{
    struct removal *r = arg;

    if (fail(r, "", result) != 0) {
        finish(r);
        return;
    }
    r->n_removed++;
    r->is_second_look = 1;
    look_at_pointer(r);
}

static void on_manifest(void *arg, const struct mb_store_result *result)
{
    struct removal *r = arg;

    if (result->error == MB_ENOENT) { /* perhaps a call that was killed has deleted it */
        r->is_second_look = 1;
        look_at_pointer(r);
    } else if (fail(r, "", result) != 0 ||
               mb_buf_add(&r->manifest, result->data, result->data_len) != 0 ||
               mb_store_delete(r->store, r->manifest_key, TIMEOUT_MS, on_manifest_deleted, r,
                               &r->err) != 0) {
        finish(r);
    }
}

static void get_manifest(struct removal *r)
{
    if (mb_store_get(r->store, r->manifest_key, MB_MANIFEST_MAX_BYTES, TIMEOUT_MS, on_manifest, r,
                     &r->err) != 0)
        finish(r);
}

/* ---- the pointer, as it is to be ---- */

/* The newest whole one below `below` that stays; -1: there is none. */
static int64_t newest_below(const struct removal *r, int64_t below)
{
    int64_t to = -1;

    for (size_t i = 0; i < r->opts.inv->n; i++) {
        const struct mb_inventory_iteration *it = &r->opts.inv->iterations[i];

        if (it->state == MB_INVENTORY_WHOLE && it->iteration < below &&
            it->iteration != r->opts.it->iteration)
            to = it->iteration;
    }
    return to;
}

static void go_on(struct removal *r)
{
    if (r->is_second_look)
        delete_more(r);
    else
        get_manifest(r);
}

static void on_pointer_put(void *arg, const struct mb_store_result *result)
{
    struct removal *r = arg;

    if (result->error == MB_EEXIST && ++r->tries < POINTER_TRIES)
        look_at_pointer(r);
    else if (result->error == MB_EUNSUPPORTED && r->is_second_look &&
             !mb_store_has_conditions(r->store))
        go_on(r); /* nothing can be kept from coming late there */
    else if (fail(r, MB_LATEST_KEY, result) != 0)
        finish(r);
    else
        go_on(r);
}

/* What it holds differs from all that it held before, so that a move that was begun before fails.
 */
static void put_pointer(struct removal *r)
{
    char text[MB_LATEST_MAX_BYTES];
    size_t n = mb_latest_format(r->to, NULL, 0, 1, mb_random_u64(), text);

    if (mb_store_put(r->store, MB_LATEST_KEY, text, n,
                     r->has_pointer ? MB_STORE_IF_MATCH : MB_STORE_IF_ABSENT, r->etag, TIMEOUT_MS,
                     on_pointer_put, r, &r->err) != 0)
        finish(r);
}

static void move_pointer(struct removal *r);

/* The one that it is to name: somebody may have removed that, too. */
static void on_target(void *arg, const struct mb_store_result *result)
{
    struct removal *r = arg;

    if (result->error == MB_ENOENT) {
        r->to = newest_below(r, r->to);
        move_pointer(r);
    } else if (fail(r, "", result) != 0) {
        finish(r);
    } else {
        put_pointer(r);
    }
}

/* To r->to, after a look whether that is there. */
static void move_pointer(struct removal *r)
{
    char key[MB_CHECKPOINT_KEY_MAX];
    int rc = 0;

    if (r->to >= 0)
        rc =
            mb_store_head(r->store, mb_manifest_key(r->to, key), TIMEOUT_MS, on_target, r, &r->err);
    else if (r->is_named)
        rc = mb_store_delete(r->store, MB_LATEST_KEY, TIMEOUT_MS, on_pointer_put, r, &r->err);
    else
        go_on(r);
    if (rc != 0)
        finish(r);
}

/* ---- the pointer, as it is ---- */

static void refuse(struct removal *r, const char *why)
{
    mb_err_set(&r->err, MB_ESTATE,
               "iteration %" PRId64 " is the one %s: --force removes it, and moves the pointer to "
               "the one before",
               r->opts.it->iteration, why);
    finish(r);
}

static void on_first_look(struct removal *r, int64_t now_at)
{
    int64_t iteration = r->opts.it->iteration;

    /* One that is damaged, or not there, leaves readers the newest whole one. */
    if (now_at != iteration && (now_at >= 0 || r->opts.it->state != MB_INVENTORY_WHOLE ||
                                newest_below(r, INT64_MAX) > iteration))
        get_manifest(r);
    else if (!r->opts.force)
        refuse(r,
               r->is_named ? "the pointer names" : "a reader takes, as no pointer names another");
    else if (now_at != iteration)
        get_manifest(r);
    else {
        r->to = newest_below(r, iteration);
        move_pointer(r);
    }
}

static void on_second_look(struct removal *r, int64_t now_at)
{
    if (now_at >= 0 && now_at != r->opts.it->iteration) {
        r->to = now_at;
        put_pointer(r);
    } else if (now_at < 0) { /* none, or a damaged one */
        r->to = newest_below(r, INT64_MAX);
        move_pointer(r);
    } else if (r->manifest.len == 0) {
        mb_err_set(&r->err, MB_ESTATE, "the pointer came to name iteration %" PRId64 " meanwhile",
                   now_at);
        finish(r);
    } else if (mb_store_put(r->store, r->manifest_key, r->manifest.data, r->manifest.len,
                            MB_STORE_IF_ABSENT, NULL, TIMEOUT_MS, on_put_back, r, &r->err) != 0) {
        finish(r);
    }
}

static void pointer_is(struct removal *r, const struct mb_store_result *result, int64_t now_at)
{
    r->has_pointer = result->error == 0;
    r->is_named = now_at == r->opts.it->iteration;
    snprintf(r->etag, sizeof(r->etag), "%s", result->etag);
    if (r->is_second_look)
        on_second_look(r, now_at);
    else
        on_first_look(r, now_at);
}

/* Of a pointer that is too long to be one: its etag. */
static void on_pointer_head(void *arg, const struct mb_store_result *result)
{
    struct removal *r = arg;

    if (result->error == 0 && result->size_bytes > MB_LATEST_MAX_BYTES)
        pointer_is(r, result, -1);
    else if (result->error == 0 && ++r->tries < POINTER_TRIES)
        look_at_pointer(r); /* somebody has put another one */
    else if (result->error == MB_ENOENT)
        pointer_is(r, result, -1);
    else {
        if (fail(r, MB_LATEST_KEY, result) == 0)
            mb_err_set(&r->err, MB_ESTATE, MB_LATEST_KEY " changes all the time");
        finish(r);
    }
}

static void on_pointer(void *arg, const struct mb_store_result *result)
{
    struct removal *r = arg;
    struct mb_err ignored;
    int64_t now_at = -1;

    if (result->error == MB_EFULL) {
        if (mb_store_head(r->store, MB_LATEST_KEY, TIMEOUT_MS, on_pointer_head, r, &r->err) != 0)
            finish(r);
        return;
    }
    if (result->error != 0 && result->error != MB_ENOENT) {
        fail(r, MB_LATEST_KEY, result);
        finish(r);
        return;
    }
    if (result->error == 0)
        mb_latest_parse(result->data, result->data_len, &now_at, &ignored);
    pointer_is(r, result, now_at);
}

static void look_at_pointer(struct removal *r)
{
    if (mb_store_get(r->store, MB_LATEST_KEY, MB_LATEST_MAX_BYTES, TIMEOUT_MS, on_pointer, r,
                     &r->err) != 0)
        finish(r);
}

int mb_remove_start(struct mb_store *store, const struct mb_remove_opts *opts, mb_remove_cb cb,
                    void *arg, struct mb_err *err)
{
    struct removal *r;
    int rc;

    if (opts->it->is_claimed && !opts->force)
        return mb_err_set(err, MB_ESTATE,
                          "job \"%s\" is writing iteration %" PRId64 ", or was: --force removes it",
                          opts->it->job_id, opts->it->iteration);
    r = mb_calloc(1, sizeof(*r));
    if (!r)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    r->store = store;
    r->opts = *opts;
    r->cb = cb;
    r->arg = arg;
    mb_manifest_key(opts->it->iteration, r->manifest_key);
    rc = mb_store_get(store, MB_LATEST_KEY, MB_LATEST_MAX_BYTES, TIMEOUT_MS, on_pointer, r, err);
    if (rc != 0)
        mb_free(r);
    return rc;
}
