/*
 *  1. Get the list: we are in it and nobody behind us counts, or somebody does: the answer.
 *  2. We are not in it yet, or with an older attempt, or waited there: put the new list, if nobody
 *     changed it meanwhile; somebody did: look again, TRIES_MAX times.
 *  3. A server without conditional writes: the list is put plainly. Two gangs that enter at the
 * same moment may then both believe to be the last until they look again. One that refuses this too
 * takes no writes at all, which is an error.
 */
#include "agent/upload/fence.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include "base/alloc.h"
#include "base/log.h"

enum { TIMEOUT_MS = 60000, MAX_BYTES = 64 * 1024, TRIES_MAX = 10 };

struct look {
    struct mb_store *store;
    struct mb_fence_writer writer;
    unsigned tries;
    int is_plain; /* it was put without a condition */
    char *text;   /* that is being put */
    mb_fence_cb cb;
    void *arg;
};

/* ---- the decision ---- */

struct entry {
    const char *gang, *job_id;
    json_int_t attempt, launched_unix_ms;
    int waits;
};

/* Of entries of before launches were noted the last two fields are not there. */
static int read_entry(json_t *o, struct entry *e)
{
    e->gang = json_string_value(json_object_get(o, "placement_group_id"));
    e->job_id = json_string_value(json_object_get(o, "job_id"));
    e->attempt = json_integer_value(json_object_get(o, "attempt"));
    e->launched_unix_ms = json_integer_value(json_object_get(o, "launched_unix_ms"));
    e->waits = json_is_true(json_object_get(o, "waits"));
    return e->gang && e->job_id && e->attempt >= 0 && e->attempt <= INT32_MAX;
}

/* What its first node noted of the launch stays. */
static json_t *our_entry(const struct mb_fence_writer *w, const struct entry *old)
{
    json_int_t launched = old->launched_unix_ms > 0 ? old->launched_unix_ms : w->launched_unix_ms;
    json_t *o =
        json_pack("{s:s, s:s, s:i, s:I}", "placement_group_id", w->id.placement_group, "job_id",
                  w->id.job_id, "attempt", (int)w->id.attempt, "launched_unix_ms", launched);

    if (o != NULL && w->waits && json_object_set_new(o, "waits", json_true()) != 0) {
        json_decref(o);
        return NULL;
    }
    return o;
}

struct found {
    size_t ours;             /* where we are in the list; n: nowhere */
    size_t place;            /* ... or belong */
    struct entry own, newer; /* gang NULL: none; newer: the last one that counts */
};

static int find(json_t *list, const struct mb_fence_writer *w, struct found *f, struct mb_err *err)
{
    size_t n = json_array_size(list);
    struct entry e;

    *f = (struct found){.ours = n, .place = n};
    for (size_t i = 0; i < n; i++) {
        if (!read_entry(json_array_get(list, i), &e))
            return mb_err_set(err, MB_ECORRUPT, MB_FENCE_KEY ": entry %zu lacks a field", i);
        if (strcmp(e.gang, w->id.placement_group) == 0) {
            f->ours = f->place = i;
            f->own = e;
        }
    }
    /* Whose ranks have ended comes late: it belongs before those that were launched after it. Who
     * runs is the newest, whatever the clocks of two nodes say. */
    while (f->ours == n && w->has_ended && f->place > 0 &&
           read_entry(json_array_get(list, f->place - 1), &e) &&
           e.launched_unix_ms > w->launched_unix_ms)
        f->place--;
    for (size_t i = f->ours == n ? f->place : f->ours + 1; i < n; i++)
        if (read_entry(json_array_get(list, i), &e) && !e.waits)
            f->newer = e;
    return MB_OK;
}

static enum mb_fence_verdict judge(const struct found *f, size_t n, const struct mb_fence_writer *w)
{
    int is_in = f->ours < n;

    if (f->newer.gang != NULL)
        return MB_FENCE_OVER;
    if (!is_in) {
        /* Forgotten, or the list was deleted: somebody newer may have been there. Whose ranks run
         * begins an empty list. */
        if (w->has_entered && (n > 0 || w->has_ended))
            return MB_FENCE_OVER;
        return n < MB_FENCE_MAX || f->place > 0 ? MB_FENCE_ENTER : MB_FENCE_OVER;
    }
    if (!f->own.waits && f->own.attempt > (json_int_t)w->id.attempt)
        return MB_FENCE_OVER;
    if (w->waits || (!f->own.waits && f->own.attempt == (json_int_t)w->id.attempt))
        return MB_FENCE_OURS;
    return MB_FENCE_ENTER;
}

static char *over_text(const struct found *f, size_t n)
{
    if (f->newer.gang != NULL)
        return mb_asprintf("job %s (gang %.8s) has taken over", f->newer.job_id, f->newer.gang);
    if (f->ours < n)
        return mb_asprintf("attempt %d of its gang has taken over", (int)f->own.attempt);
    return mb_strdup("its place in the list of writers is gone");
}

/* NULL: no memory. */
static char *with_ours(json_t *list, const struct found *f, const struct mb_fence_writer *w)
{
    json_t *o = our_entry(w, &f->own), *root;
    size_t at = f->place;
    char *text;
    int rc;

    if (f->ours < json_array_size(list)) {
        rc = json_array_set_new(list, at, o);
    } else {
        for (; json_array_size(list) >= MB_FENCE_MAX; at--)
            json_array_remove(list, 0);
        rc = json_array_insert_new(list, at, o);
    }
    root = rc == 0 ? json_pack("{s:i, s:O}", "version", 1, "writers", list) : NULL;
    text = root != NULL ? json_dumps(root, JSON_COMPACT | JSON_SORT_KEYS) : NULL;
    json_decref(root);
    return text;
}

static int decide(json_t *list, const struct mb_fence_writer *w, enum mb_fence_verdict *verdict,
                  char **out, struct mb_err *err)
{
    size_t n = json_array_size(list);
    struct found f;
    int rc = find(list, w, &f, err);

    if (rc != MB_OK)
        return rc;
    *verdict = judge(&f, n, w);
    if (*verdict == MB_FENCE_OURS)
        return MB_OK;
    *out = *verdict == MB_FENCE_OVER ? over_text(&f, n) : with_ours(list, &f, w);
    return *out != NULL ? MB_OK : mb_err_set(err, MB_ENOMEM, "out of memory");
}

int mb_fence_decide(const void *text, size_t n, const struct mb_fence_writer *writer,
                    enum mb_fence_verdict *verdict, char **out, struct mb_err *err)
{
    json_error_t je;
    json_t *root = n > 0 ? json_loadb(text, n, JSON_REJECT_DUPLICATES, &je) : NULL;
    json_t *list = n > 0 ? json_incref(json_object_get(root, "writers")) : json_array();
    int rc;

    *out = NULL;
    if (n > 0 &&
        (!json_is_array(list) || json_integer_value(json_object_get(root, "version")) != 1))
        rc = mb_err_set(err, MB_ECORRUPT, MB_FENCE_KEY " is no list of writers of version 1");
    else
        rc = decide(list, writer, verdict, out, err);
    json_decref(list);
    json_decref(root);
    return rc;
}

/* ---- the shell ---- */

static void finish(struct look *l, const struct mb_err *err, const char *over)
{
    mb_fence_cb cb = l->cb;
    void *arg = l->arg;

    mb_free(l->text);
    mb_free(l);
    cb(arg, err, over);
}

static int get(struct look *l, struct mb_err *err);

static void on_put(void *arg, const struct mb_store_result *r)
{
    struct look *l = arg;
    struct mb_err err = {0};

    if (r->error == MB_EEXIST && ++l->tries < TRIES_MAX && get(l, &err) == MB_OK)
        return;
    if (r->error == MB_EUNSUPPORTED && !l->is_plain) {
        l->is_plain = 1;
        mb_warn("upload", "the store takes no conditional writes: %s is put without", MB_FENCE_KEY);
        if (mb_store_put(l->store, MB_FENCE_KEY, l->text, strlen(l->text), MB_STORE_ALWAYS, NULL,
                         TIMEOUT_MS, on_put, l, &err) == MB_OK)
            return;
    }
    if (err.code == MB_OK && r->error != MB_OK)
        mb_err_set(&err, r->error, "entering %s: %s", MB_FENCE_KEY, r->text);
    finish(l, &err, NULL);
}

static void on_get(void *arg, const struct mb_store_result *r)
{
    struct look *l = arg;
    struct mb_err err = {0};
    enum mb_fence_verdict verdict = MB_FENCE_OURS;
    char *text = NULL;

    if (r->error != MB_OK && r->error != MB_ENOENT)
        mb_err_set(&err, r->error, "looking who may write here: %s", r->text);
    else
        mb_fence_decide(r->data, r->error == MB_OK ? r->data_len : 0, &l->writer, &verdict, &text,
                        &err);
    if (err.code == MB_OK && verdict == MB_FENCE_ENTER) {
        mb_free(l->text);
        l->text = text;
        if (mb_store_put(l->store, MB_FENCE_KEY, text, strlen(text),
                         r->error == MB_ENOENT ? MB_STORE_IF_ABSENT : MB_STORE_IF_MATCH, r->etag,
                         TIMEOUT_MS, on_put, l, &err) == MB_OK)
            return;
        text = NULL;
    }
    finish(l, &err, text);
    mb_free(text);
}

static int get(struct look *l, struct mb_err *err)
{
    return mb_store_get(l->store, MB_FENCE_KEY, MAX_BYTES, TIMEOUT_MS, on_get, l, err);
}

int mb_fence_look(struct mb_store *store, const struct mb_fence_writer *writer, mb_fence_cb cb,
                  void *arg, struct mb_err *err)
{
    struct look *l = mb_calloc(1, sizeof(*l));
    int rc;

    if (l == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory to look who may write here");
    *l = (struct look){.store = store, .writer = *writer, .cb = cb, .arg = arg};
    rc = get(l, err);
    if (rc != MB_OK)
        mb_free(l);
    return rc;
}
