/*
 * Committing an iteration.
 *
 * Happy path: list -> every part is there -> get what stands at the manifest's key: our claim ->
 * get the parts -> merge -> put the manifest in place of the claim -> get the pointer -> is the
 * manifest still there? -> move the pointer if it is older.
 *
 *  1. Parts are missing, or still those of another attempt: listed again after 0.2 s, growing to 2
 *     s, until give_up_at.
 *  2. The manifest is there: another node was faster (or this one before a restart): only the
 *     pointer is left to do. The manifest of somebody else: ours takes its place if our files lie
 *     beside (claim.h), with one conditional write.
 *  3. The claim of somebody else, or none: a newer writer has taken over. This one is over.
 *  4. What stood there changed between get and put: 1.
 *  5. The pointer changed between get and put: read again, at most POINTER_TRIES times. A pointer
 *     that is newer stays: it never moves backwards.
 *     The manifest is gone by then: the iteration was removed, and this one is over. The move would
 *     fail if it were removed after that look (docs/adr/0015-what-the-pointer-names-is-there.md).
 *  6. The store fails: tried again like 1, FAILURES_MAX times in a row at most; give_up_at is for
 *     other nodes' parts only. A store that is away is asked as often as it takes, until
 * give_up_at.
 *  7. A store without conditional writes: the manifest and the pointer are put plainly, by the
 * first node alone, which has just seen its claim; the others wait for what it writes.
 *  8. Cancelled: freed when the request in flight has come back; the callback stays away.
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
    POINTER_TRIES = 20
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
    uint32_t node_rank;
    int is_moved;      /* the pointer, by us */
    int no_conditions; /* the store takes no conditional writes */
    char etag[200];    /* of what stands at the manifest's key */
    int is_there;      /* the pointer; with this etag, and to be this text */
    char pointer_etag[200], pointer[MB_LATEST_MAX_BYTES];
    size_t pointer_len;
    int is_beside; /* that is the manifest of somebody else, and ours goes in its place */
    int has_all;   /* the listing had all parts */
    int in_flight;
    int waits; /* for what other nodes send */
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
    c->cb(c->arg, err, c->is_moved && err->code == MB_OK);
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

static int is_given_up(const struct mb_commit *c)
{
    return c->give_up_at_ms > 0 && mb_mono_ms() >= c->give_up_at_ms;
}

static void wait_and_list(struct mb_commit *c)
{
    c->failures = 0;
    if (is_given_up(c)) {
        if (c->last.code == MB_OK)
            mb_err_set(&c->last, MB_ETIMEOUT, "the parts of other nodes did not appear");
        finish(c, &c->last);
        return;
    }
    c->waits = 1;
    list_later(c);
}

int mb_commit_waits(const struct mb_commit *c)
{
    return c != NULL && c->waits;
}

static void trouble(struct mb_commit *c, int code, const char *what, const char *text)
{
    int is_away = code == MB_EUNAVAIL || code == MB_ETIMEOUT; /* no fault of what was sent */

    mb_err_set(&c->last, code, "%s: %s", what, text);
    mb_warn("upload", "commit of iteration %" PRId64 ": %s", c->iteration, c->last.text);
    c->failures += !is_away || is_given_up(c);
    if (c->failures >= FAILURES_MAX)
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

/* 1: said once, and goes on without. */
static int lose_conditions(struct mb_commit *c)
{
    if (c->no_conditions)
        return 0;
    c->no_conditions = 1;
    mb_warn("upload",
            "the store takes no conditional writes: the first node alone commits, and two "
            "jobs must not save into one place");
    return 1;
}

static void is_over(struct mb_commit *c, const char *why)
{
    mb_err_set(&c->last, MB_ESTATE, "%s", why);
    finish(c, &c->last);
}

/* ---- the pointer ---- */

static void on_pointer_put(void *arg, const struct mb_store_result *r)
{
    struct mb_commit *c = arg;
    struct mb_err ok = {0};

    if (!came_back(c))
        return;
    c->is_moved = r->error == MB_OK;
    if (r->error == MB_OK)
        finish(c, &ok);
    else if (r->error == MB_EEXIST && ++c->pointer_tries < POINTER_TRIES)
        get_pointer(c);
    else if (r->error == MB_EUNSUPPORTED && lose_conditions(c))
        get_pointer(c);
    else
        trouble(c, r->error, MB_LATEST_KEY, r->text);
}

static void put_pointer(struct mb_commit *c)
{
    struct mb_err err = {0};
    enum mb_store_if cond = c->no_conditions ? MB_STORE_ALWAYS
                            : c->is_there    ? MB_STORE_IF_MATCH
                                             : MB_STORE_IF_ABSENT;

    started(c,
            mb_store_put(c->store, MB_LATEST_KEY, c->pointer, c->pointer_len, cond, c->pointer_etag,
                         TIMEOUT_MS, on_pointer_put, c, &err),
            MB_LATEST_KEY, &err);
}

static void on_still_there(void *arg, const struct mb_store_result *r)
{
    struct mb_commit *c = arg;

    if (!came_back(c))
        return;
    if (r->error == MB_ENOENT)
        is_over(c, "it was removed from the store");
    else if (r->error != MB_OK)
        trouble(c, r->error, "manifest", r->text);
    else if (c->etag[0] != '\0' && r->etag[0] != '\0' && !mb_store_same_etag(c->etag, r->etag))
        wait_and_list(c); /* who has replaced it? */
    else
        put_pointer(c);
}

/* there: the pointer as it is. */
static void look_and_move(struct mb_commit *c, const struct mb_store_result *there)
{
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err = {0};

    if (c->no_conditions && c->node_rank > 0) { /* the first node moves it */
        wait_and_list(c);
        return;
    }
    c->is_there = there->error == MB_OK;
    snprintf(c->pointer_etag, sizeof(c->pointer_etag), "%s", there->etag);
    c->pointer_len = mb_latest_format(c->iteration, there->data, there->data_len, 0,
                                      mb_random_u64(), c->pointer);
    started(c,
            mb_store_head(c->store, mb_manifest_key(c->iteration, key), TIMEOUT_MS, on_still_there,
                          c, &err),
            "manifest", &err);
}

static void get_pointer(struct mb_commit *c);

/* Of a pointer that is too long to be one; unless somebody has put another one meanwhile. */
static void on_pointer_head(void *arg, const struct mb_store_result *r)
{
    struct mb_commit *c = arg;

    if (!came_back(c))
        return;
    if (r->error != MB_OK && r->error != MB_ENOENT)
        trouble(c, r->error, MB_LATEST_KEY, r->text);
    else if (r->error == MB_OK && r->size_bytes <= MB_LATEST_MAX_BYTES &&
             ++c->pointer_tries < POINTER_TRIES)
        get_pointer(c);
    else
        look_and_move(c, r);
}

static void on_pointer(void *arg, const struct mb_store_result *r)
{
    struct mb_commit *c = arg;
    struct mb_err err = {0};
    int64_t now_at = -1;

    if (!came_back(c))
        return;
    if (r->error == MB_EFULL) {
        mb_warn("upload", "the pointer is damaged and will be replaced: %s", r->text);
        started(c, mb_store_head(c->store, MB_LATEST_KEY, TIMEOUT_MS, on_pointer_head, c, &err),
                MB_LATEST_KEY, &err);
        return;
    }
    if (r->error != MB_OK && r->error != MB_ENOENT) {
        trouble(c, r->error, MB_LATEST_KEY, r->text);
        return;
    }
    if (r->error == MB_OK && mb_latest_parse(r->data, r->data_len, &now_at, &err) != MB_OK) {
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
    look_and_move(c, r);
}

static void get_pointer(struct mb_commit *c)
{
    struct mb_err err;

    started(
        c,
        mb_store_get(c->store, MB_LATEST_KEY, MB_LATEST_MAX_BYTES, TIMEOUT_MS, on_pointer, c, &err),
        MB_LATEST_KEY, &err);
}

/* ---- the manifest ---- */

static void on_manifest_put(void *arg, const struct mb_store_result *r)
{
    struct mb_commit *c = arg;

    if (!came_back(c))
        return;
    snprintf(c->etag, sizeof(c->etag), "%s", r->error == MB_OK ? r->etag : "");
    if (r->error == MB_OK)
        get_pointer(c);
    else if (r->error == MB_EEXIST || (r->error == MB_EUNSUPPORTED && lose_conditions(c)))
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
    if (rc == MB_ECORRUPT || rc == MB_ENOENT) { /* parts of different attempts: wait */
        c->last = err;
        wait_and_list(c);
    } else if (rc == MB_OK && c->no_conditions && c->node_rank > 0) {
        wait_and_list(c);
    } else {
        if (rc == MB_OK)
            rc = mb_store_put(c->store, mb_manifest_key(c->iteration, key), text, strlen(text),
                              c->no_conditions ? MB_STORE_ALWAYS : MB_STORE_IF_MATCH, c->etag,
                              TIMEOUT_MS, on_manifest_put, c, &err);
        started(c, rc, "manifest", &err);
    }
    mb_free(text);
}

static int is_ours(const struct mb_commit *c, const struct mb_manifest *m)
{
    return m->iteration == c->iteration && mb_manifest_is_of(m, &c->writer);
}

/* What stands at the manifest's key. */
static void on_manifest(void *arg, const struct mb_store_result *r)
{
    struct mb_commit *c = arg;
    struct mb_manifest m = {0};
    struct mb_err err = {0};
    int ours, is_claim, rc = MB_OK;

    if (!came_back(c))
        return;
    if (r->error != MB_OK && r->error != MB_ENOENT) {
        trouble(c, r->error, "manifest", r->text);
        return;
    }
    if (r->error == MB_OK)
        rc = mb_manifest_decode_any(r->data, r->data_len, "manifest", &m, &err);
    if (rc == MB_ENOMEM) {
        trouble(c, rc, "manifest", err.text);
        return;
    }
    ours = r->error == MB_OK && rc == MB_OK && is_ours(c, &m);
    is_claim = m.is_claim;
    mb_manifest_close(&m);
    snprintf(c->etag, sizeof(c->etag), "%s", r->etag);
    if (r->error == MB_ENOENT)
        is_over(c, "its claim is gone from the store");
    else if (!ours && (is_claim || rc != MB_OK || !c->is_beside))
        is_over(c, "another writer has taken over");
    else if (ours && !is_claim)
        get_pointer(c);
    else if (c->has_all)
        get_part(c);
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
    c->has_all = 1;
    for (uint32_t i = 0; i < c->num_nodes && c->has_all; i++)
        if (!has_key(r, mb_part_key(c->iteration, i, c->num_nodes, key))) {
            mb_err_set(&c->last, MB_ETIMEOUT, "the part of node %u of %u did not appear", i,
                       c->num_nodes);
            c->has_all = 0;
        }
    mb_manifest_key(c->iteration, key);
    started(c, mb_store_get(c->store, key, MB_MANIFEST_MAX_BYTES, TIMEOUT_MS, on_manifest, c, &err),
            "manifest", &err);
}

static void list(struct mb_commit *c)
{
    char dir[MB_CHECKPOINT_KEY_MAX];
    char prefix[MB_CHECKPOINT_KEY_MAX + 16];
    struct mb_err err;

    free_parts(c);
    c->waits = 0;
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
    c->node_rank = opts->node_rank;
    c->is_beside = opts->is_beside;
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
