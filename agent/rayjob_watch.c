/*
 * One request at a time: look -> the objects get their owner, one after the other -> look every
 * look_ms -> (the job has ended, its time is over) delete.
 *
 * Owners are set by a strategic merge patch, whose key is the owner's uid: the server merges it
 * into the newest version of the object, so nobody else's change is lost, and once more is the
 * same.
 * The server knows no such patch for custom resources (415): they get a merge patch, which replaces
 * the list of owners. What the chart makes has none before.
 *
 *  1. Any failure: said once, tried again after a back-off (BACKOFF_CAP_MS). What was known stays:
 *     the deadline does not depend on the API server being there.
 *  2. The object is not there (404): said; there is nothing to own.
 *  3. The RayJob is not there: before it was ever seen an error like any other, later its end.
 *  4. It is another one of the same name, or runs on another RayCluster (rayjob.h): we leave it
 *     alone. The delete names the uid, so one that was made meanwhile stays (409).
 *  5. Stopped before the owners were set: LINGER_MS for that, unless something has failed.
 */
#include "agent/rayjob_watch.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "agent/deadline.h"
#include "agent/kube.h"
#include "agent/rayjob.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"

enum {
    OWNS_MAX = 8,
    PATH_BYTES = 640,
    LOOK_S = 15,
    BACKOFF_MS = 500,
    BACKOFF_CAP_MS = 15000,
    LINGER_MS = 3000
};

static const char NAME_CHARS[] = "abcdefghijklmnopqrstuvwxyz0123456789.-";
static const char STRATEGIC_PATCH[] = "application/strategic-merge-patch+json";
static const char MERGE_PATCH[] = "application/merge-patch+json";

struct owned {
    char what[MB_RAYJOB_NAME_MAX]; /* "configmaps/NAME", "GROUP/VERSION/roles/NAME" */
    size_t kind_at;                /* where its plural begins; 0: it is of the core group */
    int is_settled;
};

struct mb_rayjob_watch {
    struct mb_rayjob_watch_opts opts;
    const struct mb_rayjob_watch_ops *ops;
    void *arg;
    struct mb_kube *kube;
    uv_timer_t timer, linger_timer;
    struct owned owned[OWNS_MAX];
    size_t n_owned;
    char uid[MB_RAYJOB_NAME_MAX]; /* "": it was never seen */
    struct mb_rayjob_verdict verdict;
    uint64_t told_deadline_unix_ms;
    uint64_t next_look_ms, not_before_ms; /* monotonic */
    unsigned failures;                    /* in a row */
    char last_failure[MB_ERR_TEXT_MAX];
    size_t patching; /* which object the request is for */
    int is_asking, told_leaves, is_deleted;
    int closing, parts_open;
    void (*close_cb)(void *arg);
    void *close_arg;
};

static void go_on(struct mb_rayjob_watch *w);

/* ---- requests ---- */

static void failed(struct mb_rayjob_watch *w, const char *what, const struct mb_err *err)
{
    w->not_before_ms = mb_mono_ms() + BACKOFF_MS +
                       mb_backoff_ms(w->failures, BACKOFF_MS, BACKOFF_CAP_MS, mb_random_u64());
    w->failures++;
    if (err->code == MB_ECANCELED || strcmp(w->last_failure, err->text) == 0)
        return;
    snprintf(w->last_failure, sizeof(w->last_failure), "%s", err->text);
    mb_warn("rayjob", "%s: %s: %s", w->opts.name, what, err->text);
}

static void succeeded(struct mb_rayjob_watch *w)
{
    if (w->failures > 0)
        mb_info("rayjob", "%s: the API server answers again", w->opts.name);
    w->failures = 0;
    w->not_before_ms = 0;
    w->last_failure[0] = '\0';
}

static void ask(struct mb_rayjob_watch *w, const char *method, const char *path, const char *type,
                char *body, mb_kube_cb cb)
{
    struct mb_err err = {.text = "no memory"};

    if ((type == NULL || body != NULL) &&
        mb_kube_ask(w->kube, method, path, type, body, cb, w, &err) == MB_OK)
        w->is_asking = 1;
    else
        failed(w, method, &err);
    free(body); /* libc's memory */
}

static void rayjob_path(const struct mb_rayjob_watch *w, char path[PATH_BYTES])
{
    snprintf(path, PATH_BYTES, "/apis/ray.io/v1/namespaces/%s/rayjobs/%s",
             mb_kube_namespace(w->kube), w->opts.name);
}

/* ---- the look ---- */

static void tell(struct mb_rayjob_watch *w)
{
    const struct mb_rayjob_verdict *v = &w->verdict;

    if (w->closing)
        return;
    if (v->deadline_unix_ms != 0 && v->deadline_unix_ms != w->told_deadline_unix_ms) {
        w->told_deadline_unix_ms = v->deadline_unix_ms;
        w->ops->on_deadline(w->arg, v->deadline_unix_ms);
    }
    if (v->leaves != NULL && !w->told_leaves) {
        w->told_leaves = 1;
        mb_warn("rayjob", "%s: %s", w->opts.name, v->leaves);
        w->ops->on_leaves(w->arg, v->leaves);
    }
}

static void on_looked(void *arg, const struct mb_err *err, const char *body, size_t n)
{
    struct mb_rayjob_watch *w = arg;
    struct mb_rayjob_self self = {w->opts.cluster, w->uid, w->opts.delete_after_ms,
                                  w->opts.margin_ms};
    struct mb_rayjob job;
    struct mb_err why = *err;

    w->is_asking = 0;
    w->next_look_ms = mb_mono_ms() + w->opts.look_ms + mb_random_u64() % (w->opts.look_ms / 5 + 1);
    if (why.code == MB_OK)
        mb_rayjob_read(body, n, &job, &why);
    if (why.code == MB_ENOENT && w->uid[0] != '\0') {
        succeeded(w);
        w->verdict = (struct mb_rayjob_verdict){.leaves = "the RayJob was deleted"};
        tell(w);
    } else if (why.code != MB_OK) {
        failed(w, "cannot be read", &why);
    } else {
        succeeded(w);
        mb_rayjob_judge(&job, &self, &w->verdict);
        if (w->uid[0] == '\0' && w->verdict.is_ours)
            strcpy(w->uid, job.uid);
        tell(w);
    }
    go_on(w);
}

static void look(struct mb_rayjob_watch *w)
{
    char path[PATH_BYTES];

    rayjob_path(w, path);
    ask(w, "GET", path, NULL, NULL, on_looked);
}

/* ---- owners ---- */

static struct owned *unsettled(struct mb_rayjob_watch *w)
{
    for (size_t i = 0; i < w->n_owned; i++)
        if (!w->owned[i].is_settled)
            return &w->owned[i];
    return NULL;
}

static void on_patched(void *arg, const struct mb_err *err, const char *body, size_t n)
{
    struct mb_rayjob_watch *w = arg;
    struct owned *o = &w->owned[w->patching];

    (void)body;
    (void)n;
    w->is_asking = 0;
    if (err->code == MB_OK) {
        succeeded(w);
        o->is_settled = 1;
        mb_info("rayjob", "%s: owns %s", w->opts.name, o->what);
    } else {
        failed(w, o->what, err);
        o->is_settled = err->code == MB_ENOENT;
        if (o->is_settled)
            w->not_before_ms = 0;
    }
    go_on(w);
}

/* By their groups: those of Kubernetes have no dot (batch), or end in .k8s.io. */
static int is_custom(const struct owned *o)
{
    static const char own[] = ".k8s.io";
    size_t group = o->kind_at != 0 ? strcspn(o->what, "/") : 0, n = sizeof(own) - 1;

    return memchr(o->what, '.', group) != NULL &&
           (group < n || strncmp(o->what + group - n, own, n) != 0);
}

static void patch(struct mb_rayjob_watch *w, struct owned *o)
{
    json_t *patch =
        json_pack("{s:{s:[{s:s, s:s, s:s, s:s}]}}", "metadata", "ownerReferences", "apiVersion",
                  "ray.io/v1", "kind", "RayJob", "name", w->opts.name, "uid", w->uid);
    char path[PATH_BYTES];

    if (o->kind_at == 0)
        snprintf(path, sizeof(path), "/api/v1/namespaces/%s/%s", mb_kube_namespace(w->kube),
                 o->what);
    else
        snprintf(path, sizeof(path), "/apis/%.*s/namespaces/%s/%s", (int)o->kind_at - 1, o->what,
                 mb_kube_namespace(w->kube), o->what + o->kind_at);
    w->patching = (size_t)(o - w->owned);
    ask(w, "PATCH", path, is_custom(o) ? MERGE_PATCH : STRATEGIC_PATCH,
        json_dumps(patch, JSON_COMPACT), on_patched);
    json_decref(patch);
}

/* ---- the end ---- */

static void on_deleted(void *arg, const struct mb_err *err, const char *body, size_t n)
{
    struct mb_rayjob_watch *w = arg;

    (void)body;
    (void)n;
    w->is_asking = 0;
    w->is_deleted = err->code == MB_OK || err->code == MB_ENOENT || err->code == MB_ESTATE;
    if (w->is_deleted)
        succeeded(w);
    else
        failed(w, "cannot be deleted", err);
    go_on(w);
}

static void delete (struct mb_rayjob_watch *w)
{
    json_t *options =
        json_pack("{s:s, s:s, s:s, s:{s:s}}", "kind", "DeleteOptions", "apiVersion", "v1",
                  "propagationPolicy", "Background", "preconditions", "uid", w->uid);
    char path[PATH_BYTES];

    mb_info("rayjob", "%s: ended, and its time is over: it is deleted", w->opts.name);
    rayjob_path(w, path);
    ask(w, "DELETE", path, "application/json", json_dumps(options, JSON_COMPACT), on_deleted);
    json_decref(options);
}

/* ---- what comes next ---- */

static uint64_t until_ms(uint64_t at_ms, uint64_t now_ms)
{
    return at_ms > now_ms ? at_ms - now_ms : 0;
}

static int is_to_delete(const struct mb_rayjob_watch *w)
{
    return w->verdict.delete_at_unix_ms != 0 && !w->is_deleted;
}

static int is_to_own(struct mb_rayjob_watch *w)
{
    return w->uid[0] != '\0' && w->verdict.is_ours && unsettled(w) != NULL;
}

static void on_timer(uv_timer_t *t)
{
    struct mb_rayjob_watch *w = t->data;

    if (w->is_asking)
        return;
    if (is_to_own(w))
        patch(w, unsettled(w));
    else if (is_to_delete(w) && mb_unix_ms() >= w->verdict.delete_at_unix_ms)
        delete (w);
    else
        look(w);
    if (!w->is_asking)
        go_on(w);
}

static void part_closed(struct mb_rayjob_watch *w)
{
    void (*cb)(void *) = w->close_cb;
    void *arg = w->close_arg;

    if (--w->parts_open > 0)
        return;
    mb_free(w);
    cb(arg);
}

static void on_timer_closed(uv_handle_t *h)
{
    part_closed(h->data);
}

static void on_kube_stopped(void *arg)
{
    part_closed(arg);
}

static void close_parts(struct mb_rayjob_watch *w)
{
    if (w->parts_open > 0)
        return;
    w->parts_open = 3;
    uv_close((uv_handle_t *)&w->timer, on_timer_closed);
    uv_close((uv_handle_t *)&w->linger_timer, on_timer_closed);
    mb_kube_stop(w->kube, on_kube_stopped, w);
}

static void on_linger_timer(uv_timer_t *t)
{
    close_parts(t->data);
}

static void go_on(struct mb_rayjob_watch *w)
{
    uint64_t now_ms = mb_mono_ms(), ms = until_ms(w->next_look_ms, now_ms), wait_ms;

    if (w->parts_open > 0)
        return;
    if (w->closing && (w->failures > 0 || w->told_leaves || (w->uid[0] != '\0' && !is_to_own(w)))) {
        close_parts(w);
        return;
    }
    if (is_to_own(w))
        ms = 0;
    if (is_to_delete(w) && until_ms(w->verdict.delete_at_unix_ms, mb_unix_ms()) < ms)
        ms = until_ms(w->verdict.delete_at_unix_ms, mb_unix_ms());
    wait_ms = until_ms(w->not_before_ms, now_ms);
    uv_timer_start(&w->timer, on_timer, ms > wait_ms ? ms : wait_ms, 0);
}

/* ---- life ---- */

/* Names between slashes. ".." is one of no object. */
static int is_path(const char *s)
{
    for (;;) {
        size_t n = strspn(s, NAME_CHARS);

        if (n == 0 || s[0] == '.' || (s[n] != '/' && s[n] != '\0'))
            return 0;
        if (s[n] == '\0')
            return 1;
        s += n + 1;
    }
}

static int is_object_name(const char *s)
{
    return is_path(s) && strchr(s, '/') == NULL;
}

static int read_owns(struct mb_rayjob_watch *w, struct mb_err *err)
{
    const char *at = w->opts.owns != NULL ? w->opts.owns : "";

    while (*(at += strspn(at, " ")) != '\0') {
        size_t n = strcspn(at, " ");
        struct owned *o = &w->owned[w->n_owned];
        size_t slashes[3], n_slashes = 0;

        if (w->n_owned == OWNS_MAX || n >= sizeof(o->what))
            return mb_err_set(err, MB_EINVAL,
                              "MOBULA_RAYJOB_OWNS: more than %d objects, or a name "
                              "that is too long",
                              OWNS_MAX);
        memcpy(o->what, at, n);
        for (size_t i = 0; i < n; i++)
            if (o->what[i] == '/' && n_slashes++ < 3)
                slashes[n_slashes - 1] = i;
        if ((n_slashes != 1 && n_slashes != 3) || !is_path(o->what))
            return mb_err_set(err, MB_EINVAL,
                              "MOBULA_RAYJOB_OWNS: %s: expected KIND/NAME, as configmaps/NAME, or "
                              "GROUP/VERSION/KIND/NAME",
                              o->what);
        o->kind_at = n_slashes == 3 ? slashes[1] + 1 : 0;
        w->n_owned++;
        at += n;
    }
    return MB_OK;
}

int mb_rayjob_watch_start(uv_loop_t *loop, const struct mb_rayjob_watch_opts *opts,
                          const struct mb_rayjob_watch_ops *ops, void *arg,
                          struct mb_rayjob_watch **out, struct mb_err *err)
{
    struct mb_kube_opts kube = {opts->host, opts->port, opts->dir};
    struct mb_rayjob_watch *w;
    int rc;

    if (opts->host == NULL || opts->port == NULL)
        return mb_err_set(err, MB_EINVAL,
                          "MOBULA_RAYJOB is set, and KUBERNETES_SERVICE_HOST and _PORT are not");
    w = mb_calloc(1, sizeof(*w));
    if (w == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory to watch the RayJob");
    w->opts = *opts;
    w->ops = ops;
    w->arg = arg;
    rc = read_owns(w, err);
    if (rc == MB_OK)
        rc = mb_kube_create(loop, &kube, &w->kube, err);
    if (rc != MB_OK) {
        mb_free(w);
        return rc;
    }
    uv_timer_init(loop, &w->timer);
    uv_timer_init(loop, &w->linger_timer);
    w->timer.data = w->linger_timer.data = w;
    uv_timer_start(&w->timer, on_timer, 0, 0);
    *out = w;
    return MB_OK;
}

void mb_rayjob_watch_stop(struct mb_rayjob_watch *w, void (*cb)(void *arg), void *arg)
{
    w->closing = 1;
    w->close_cb = cb;
    w->close_arg = arg;
    if (unsettled(w) == NULL || w->failures > 0 || w->told_leaves) {
        close_parts(w);
        return;
    }
    uv_timer_start(&w->linger_timer, on_linger_timer, LINGER_MS, 0);
}

static int number_of(const char *(*get)(const char *name), const char *name, int64_t least,
                     int64_t otherwise, int64_t *out, struct mb_err *err)
{
    const char *text = get(name);

    *out = otherwise;
    return text == NULL || text[0] == '\0' ? MB_OK
                                           : mb_parse_i64(text, least, INT32_MAX, name, out, err);
}

int mb_rayjob_watch_environment(const char *(*get)(const char *name),
                                struct mb_rayjob_watch_opts *out, struct mb_err *err)
{
    int64_t look_s = LOOK_S, delete_s = -1, margin_s = 0;
    int rc;

    *out = (struct mb_rayjob_watch_opts){.name = get("MOBULA_RAYJOB"),
                                         .cluster = get("RAY_CLUSTER_NAME"),
                                         .owns = get("MOBULA_RAYJOB_OWNS"),
                                         .host = get("KUBERNETES_SERVICE_HOST"),
                                         .port = get("KUBERNETES_SERVICE_PORT"),
                                         .dir = get("MOBULA_SERVICE_ACCOUNT_DIR")};
    if (out->name == NULL || out->name[0] == '\0') {
        out->name = NULL;
        return 0;
    }
    if (!is_object_name(out->name))
        return mb_err_set(err, MB_EINVAL, "MOBULA_RAYJOB: %s is no name of a RayJob", out->name);
    if (out->dir == NULL || out->dir[0] == '\0')
        out->dir = MB_KUBE_DIR;
    rc = number_of(get, "MOBULA_RAYJOB_LOOK_SECONDS", 1, LOOK_S, &look_s, err);
    if (rc == MB_OK)
        rc = number_of(get, "MOBULA_RAYJOB_DELETE_AFTER_SECONDS", 0, -1, &delete_s, err);
    if (rc == MB_OK)
        rc = number_of(get, "MOBULA_DEADLINE_MARGIN_SECONDS", 0, 0, &margin_s, err);
    if (rc != MB_OK)
        return rc;
    out->margin_ms = (uint64_t)margin_s * 1000;
    out->look_ms = (uint64_t)look_s * 1000;
    out->delete_after_ms = delete_s < 0 ? -1 : delete_s * 1000;
    return 1;
}
