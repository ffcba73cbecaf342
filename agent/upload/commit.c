/*
 * Committing an iteration.
 *
 * Happy path: list -> every part is there -> get them -> merge -> put the manifest if absent -> get
 * the pointer -> move it if it is older.
 *
 *  1. Parts are missing, or still those of another attempt: listed again after 0.2 s, growing to 2
 * s, until give_up_at.
 *  2. The manifest is there: another node was faster (or this one before a restart). If it is of
 *     this job, group and attempt, only the pointer is left to do; a foreign one is about to be
 * deleted by the node that has not begun yet, so this waits as in 1.
 *  3. The pointer changed between get and put: read again, at most POINTER_TRIES times. A pointer
 *     that is newer stays: it never moves backwards.
 *  4. The store fails: tried again like 1, FAILURES_MAX times in a row at most; give_up_at is for
 *     other nodes' parts only.
 *  5. Cancelled: freed when the request in flight has come back; the callback stays away.
 */
#include "agent/upload/commit.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "agent/upload/manifest.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"

enum {
    WAIT_MIN_MS = 200,
    WAIT_MAX_MS = 2000,
    TIMEOUT_MS = 60000,
    FAILURES_MAX = 10,
    POINTER_TRIES = 20,
    LATEST_MAX_BYTES = 64
};

struct mb_commit {
    struct mb_store *store;
    int64_t iteration;
    uint32_t num_nodes;
    struct mb_manifest_writer writer; /* its texts are owned */
    char *job_id, *placement_group;
    uint64_t give_up_at_ms;
    mb_commit_cb cb;
    void *arg;
    uv_timer_t timer;
    struct mb_manifest *parts;
    uint32_t n_parts;
    uint64_t wait_ms;
    unsigned failures;
    unsigned pointer_tries;
    int in_flight;
    int cancelled;
    int timer_closed;
    struct mb_err last; /* why it is not done yet */
};

static void list(struct mb_commit *c);
static void get_part(struct mb_commit *c);
static void get_pointer(struct mb_commit *c);

/* ---- ends and pauses ---- */

static void free_parts(struct mb_commit *c)
{
    for (uint32_t i = 0; i < c->n_parts; i++)
        mb_manifest_close(&c->parts[i]);
    c->n_parts = 0;
}

static void maybe_free(struct mb_commit *c)
{
    if (c->in_flight || !c->timer_closed)
        return;
    free_parts(c);
    mb_free(c->parts);
    mb_free(c->job_id);
    mb_free(c->placement_group);
    mb_free(c);
}

static void on_timer_closed(uv_handle_t *h)
{
    struct mb_commit *c = h->data;

    c->timer_closed = 1;
    maybe_free(c);
}

void mb_commit_cancel(struct mb_commit *c)
{
    if (c == NULL || c->cancelled)
        return;
    c->cancelled = 1;
    uv_close((uv_handle_t *)&c->timer, on_timer_closed);
}

static void finish(struct mb_commit *c, const struct mb_err *err)
{
    if (c->cancelled)
        return;
    mb_commit_cancel(c);
    c->cb(c->arg, err);
}

static void on_timer(uv_timer_t *t)
{
    list(t->data);
}

static void list_later(struct mb_commit *c)
{
    uv_timer_start(&c->timer, on_timer, c->wait_ms, 0);
    c->wait_ms = c->wait_ms * 2 < WAIT_MAX_MS ? c->wait_ms * 2 : WAIT_MAX_MS;
}

static void wait_and_list(struct mb_commit *c)
{
    c->failures = 0;
    if (c->give_up_at_ms > 0 && mb_mono_ms() >= c->give_up_at_ms) {
        if (c->last.code == MB_OK)
            mb_err_set(&c->last, MB_ETIMEOUT, "the parts of other nodes did not appear");
        finish(c, &c->last);
        return;
    }
    list_later(c);
}

static void trouble(struct mb_commit *c, int code, const char *what, const char *text)
{
    mb_err_set(&c->last, code, "%s: %s", what, text);
    mb_warn("upload", "commit of iteration %" PRId64 ": %s", c->iteration, c->last.text);
    if (++c->failures >= FAILURES_MAX)
        finish(c, &c->last);
    else
        list_later(c);
}

/* The request came back: 0 if there is nobody left to care. */
static int came_back(struct mb_commit *c)
{
    c->in_flight = 0;
    if (!c->cancelled)
        return 1;
    maybe_free(c);
    return 0;
}

static void started(struct mb_commit *c, int rc, const char *what, const struct mb_err *err)
{
    if (rc == MB_OK)
        c->in_flight = 1;
    else
        trouble(c, rc, what, err->text);
}

/* ---- the pointer ---- */

static void on_pointer_put(void *arg, const struct mb_store_result *r)
{
    struct mb_commit *c = arg;
    struct mb_err ok = {0};

    if (!came_back(c))
        return;
    if (r->error == MB_OK)
        finish(c, &ok);
    else if (r->error == MB_EEXIST && ++c->pointer_tries < POINTER_TRIES)
        get_pointer(c);
    else
        trouble(c, r->error, MB_LATEST_KEY, r->text);
}

static void on_pointer(void *arg, const struct mb_store_result *r)
{
    struct mb_commit *c = arg;
    enum mb_store_if cond = MB_STORE_IF_MATCH;
    struct mb_err err = {0};
    int64_t now_at = -1;
    char text[32];
    int n = snprintf(text, sizeof(text), "%" PRId64, c->iteration);

    if (!came_back(c))
        return;
    if (r->error == MB_ENOENT) {
        cond = MB_STORE_IF_ABSENT;
    } else if (r->error != MB_OK) {
        trouble(c, r->error, MB_LATEST_KEY, r->text);
        return;
    } else if (mb_latest_parse(r->data, r->data_len, &now_at, &err) != MB_OK) {
        mb_warn("upload", "the pointer is damaged and will be replaced: %s", err.text);
        now_at = -1;
    }
    if (!mb_latest_moves(now_at, c->iteration)) {
        if (now_at > c->iteration)
            mb_warn("upload", "the pointer says %" PRId64 " already and stays", now_at);
        mb_err_clear(&err);
        finish(c, &err);
        return;
    }
    started(c,
            mb_store_put(c->store, MB_LATEST_KEY, text, (size_t)n, cond, r->etag, TIMEOUT_MS,
                         on_pointer_put, c, &err),
            MB_LATEST_KEY, &err);
}

static void get_pointer(struct mb_commit *c)
{
    struct mb_err err;

    started(
        c, mb_store_get(c->store, MB_LATEST_KEY, LATEST_MAX_BYTES, TIMEOUT_MS, on_pointer, c, &err),
        MB_LATEST_KEY, &err);
}

/* ---- the manifest ---- */

static void on_manifest_put(void *arg, const struct mb_store_result *r)
{
    struct mb_commit *c = arg;

    if (!came_back(c))
        return;
    if (r->error == MB_OK)
        get_pointer(c);
    else if (r->error == MB_EEXIST)
        wait_and_list(c);
    else
        trouble(c, r->error, "manifest", r->text);
}

static void put_manifest(struct mb_commit *c)
{
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_manifest whole = {0};
    struct mb_err err = {0};
    char *text = NULL;
    int rc = mb_manifest_merge(c->parts, c->n_parts, &whole, &err);

    if (rc == MB_OK)
        rc = mb_manifest_encode(&whole, &text, &err);
    mb_manifest_close(&whole);
    if (rc == MB_ECORRUPT || rc == MB_ENOENT) { /* parts of different attempts: wait for ours */
        c->last = err;
        wait_and_list(c);
        return;
    }
    if (rc == MB_OK)
        rc = mb_store_put(c->store, mb_manifest_key(c->iteration, key), text, strlen(text),
                          MB_STORE_IF_ABSENT, NULL, TIMEOUT_MS, on_manifest_put, c, &err);
    started(c, rc, "manifest", &err);
    mb_free(text);
}

static int is_ours(const struct mb_commit *c, const struct mb_manifest *m)
{
    return m->iteration == c->iteration && mb_manifest_is_of(m, &c->writer);
}

static void on_manifest(void *arg, const struct mb_store_result *r)
{
    struct mb_commit *c = arg;
    struct mb_manifest m = {0};
    struct mb_err err = {0};
    int ours;

    if (!came_back(c))
        return;
    if (r->error != MB_OK && r->error != MB_ENOENT) {
        trouble(c, r->error, "manifest", r->text);
        return;
    }
    ours = r->error == MB_OK &&
           mb_manifest_decode(r->data, r->data_len, "manifest", &m, &err) == MB_OK &&
           is_ours(c, &m);
    mb_manifest_close(&m);
    if (ours)
        get_pointer(c);
    else
        wait_and_list(c);
}

/* ---- the parts ---- */

static void on_part(void *arg, const struct mb_store_result *r)
{
    struct mb_commit *c = arg;
    struct mb_err err = {0};

    if (!came_back(c))
        return;
    if (r->error == MB_ENOENT) {
        wait_and_list(c);
        return;
    }
    if (r->error != MB_OK) {
        trouble(c, r->error, "part file", r->text);
        return;
    }
    if (mb_manifest_decode(r->data, r->data_len, "part file", &c->parts[c->n_parts], &err) !=
        MB_OK) {
        trouble(c, err.code, "part file", err.text);
        return;
    }
    c->n_parts++;
    if (!is_ours(c, &c->parts[c->n_parts - 1])) { /* not overwritten by this attempt yet */
        wait_and_list(c);
        return;
    }
    get_part(c);
}

static void get_part(struct mb_commit *c)
{
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err;

    if (c->n_parts == c->num_nodes) {
        put_manifest(c);
        return;
    }
    started(c,
            mb_store_get(c->store, mb_part_key(c->iteration, c->n_parts, c->num_nodes, key),
                         MB_MANIFEST_MAX_BYTES, TIMEOUT_MS, on_part, c, &err),
            "part file", &err);
}

static int has_key(const struct mb_store_result *r, const char *key)
{
    for (size_t i = 0; i < r->n_entries; i++)
        if (strcmp(r->entries[i].key, key) == 0)
            return 1;
    return 0;
}

static void on_list(void *arg, const struct mb_store_result *r)
{
    struct mb_commit *c = arg;
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err;

    if (!came_back(c))
        return;
    if (r->error != MB_OK && r->error != MB_ENOENT) {
        trouble(c, r->error, "list", r->text);
        return;
    }
    if (has_key(r, mb_manifest_key(c->iteration, key))) {
        started(
            c, mb_store_get(c->store, key, MB_MANIFEST_MAX_BYTES, TIMEOUT_MS, on_manifest, c, &err),
            "manifest", &err);
        return;
    }
    for (uint32_t i = 0; i < c->num_nodes; i++)
        if (!has_key(r, mb_part_key(c->iteration, i, c->num_nodes, key))) {
            mb_err_set(&c->last, MB_ETIMEOUT, "the part of node %u of %u did not appear", i,
                       c->num_nodes);
            wait_and_list(c);
            return;
        }
    get_part(c);
}

static void list(struct mb_commit *c)
{
    char dir[MB_CHECKPOINT_KEY_MAX];
    char prefix[MB_CHECKPOINT_KEY_MAX + 16];
    struct mb_err err;

    free_parts(c);
    snprintf(prefix, sizeof(prefix), "%s/.mobula/", mb_iteration_dir(c->iteration, dir));
    started(c, mb_store_list(c->store, prefix, TIMEOUT_MS, on_list, c, &err), "list", &err);
}

/* ---- life ---- */

int mb_commit_start(uv_loop_t *loop, struct mb_store *store, const struct mb_commit_opts *opts,
                    mb_commit_cb cb, void *arg, struct mb_commit **out, struct mb_err *err)
{
    struct mb_commit *c = mb_calloc(1, sizeof(*c));

    if (c != NULL) {
        c->job_id = mb_strdup(opts->writer.job_id);
        c->placement_group = mb_strdup(opts->writer.placement_group);
        c->parts = mb_calloc(opts->num_nodes, sizeof(*c->parts));
    }
    if (c == NULL || c->job_id == NULL || c->placement_group == NULL || c->parts == NULL) {
        if (c != NULL) {
            mb_free(c->job_id);
            mb_free(c->placement_group);
            mb_free(c->parts);
        }
        mb_free(c);
        return mb_err_set(err, MB_ENOMEM, "no memory to commit iteration %" PRId64,
                          opts->iteration);
    }
    c->store = store;
    c->iteration = opts->iteration;
    c->num_nodes = opts->num_nodes;
    c->writer = (struct mb_manifest_writer){c->job_id, c->placement_group, opts->writer.attempt};
    c->give_up_at_ms = opts->give_up_at_ms;
    c->cb = cb;
    c->arg = arg;
    c->wait_ms = WAIT_MIN_MS;
    uv_timer_init(loop, &c->timer);
    c->timer.data = c;
    uv_timer_start(&c->timer, on_timer, 0, 0);
    *out = c;
    return MB_OK;
}

void mb_commit_give_up_at(struct mb_commit *c, uint64_t give_up_at_ms)
{
    if (c != NULL)
        c->give_up_at_ms = give_up_at_ms;
}
