/*
 * Older iterations of a foreign trainer's directory go: all but the newest local_keep_last durable
 * ones.
 *
 *  1. An iteration was committed. The directory is listed by a worker thread; from the newest
 *     committed one down the first local_keep_last that are durable stay, and so does what the
 *     tracker file names. What is newer is none of our business.
 *  2. Older ones go one at a time, if the manifest in the store has all that is there (evict.h):
 *     the very contents, for whatever was written there since this uploader sealed it.
 *     One without a manifest was never durable in this store, or was deleted there: with keep_last
 *     it goes if this attempt committed it, and it is as it was sealed. Whatever else lies there
 * may be the only copy. What this attempt has saved of an iteration and has not made durable stays,
 * whatever the store has under its number.
 *  3. Somebody uses one, it holds something else, the store does not answer: it stays, and the next
 *     commit looks again.
 *  4. Nobody waits any more, or the agent was started again after the ranks had ended: the
 *     directory may be another job's, and nothing is removed.
 */
#include <inttypes.h>
#include <string.h>
#include "agent/upload/evict.h"
#include "agent/upload/upload_internal.h"
#include "base/alloc.h"
#include "base/log.h"

enum { TIMEOUT_MS = 10000 };

struct upload_evict {
    uv_work_t work;
    struct mb_upload *u;
    struct mb_evict_list list;
    size_t next;
    uint32_t n_kept;
    unsigned n_gone;
    int is_listed, is_working;
    atomic_int stop;    /* the worker thread is to leave it */
    uint64_t dir_state; /* of list.iterations[next], when this attempt sealed it; 0: not known */
    int has_manifest;
    struct mb_manifest manifest; /* of list.iterations[next] */
    int64_t newest;
    struct mb_err err; /* of the work */
};

static void step(struct mb_upload *u);

static void end(struct mb_upload *u)
{
    struct upload_evict *v = u->evict;

    if (v->n_gone > 0)
        mb_info("upload", "job=%s: removed %u older checkpoints from %s", u->job_id, v->n_gone,
                u->local_dir);
    upload_evict_close(u);
}

void upload_evict_close(struct mb_upload *u)
{
    struct upload_evict *v = u->evict;

    if (v == NULL)
        return;
    mb_manifest_close(&v->manifest);
    mb_evict_list_close(&v->list);
    mb_free(v);
    u->evict = NULL;
}

void upload_evict_stop(struct mb_upload *u)
{
    if (u->evict != NULL)
        atomic_store(&u->evict->stop, 1);
}

int upload_is_evicting(const struct mb_upload *u)
{
    return u->evict != NULL && u->evict->is_working;
}

static int is_committed(struct mb_upload *u, int64_t iteration)
{
    const struct mb_plan_iteration *it = mb_plan_find(u->plan, iteration);

    return it != NULL && it->state == MB_PLAN_COMMITTED;
}

/* Saved again by this attempt, and not durable (yet): what the store has is something else. */
static int is_only_here(struct mb_upload *u, int64_t iteration)
{
    return mb_plan_find(u->plan, iteration) != NULL && !is_committed(u, iteration);
}

/* Not in the store. 1: this attempt has seen it there. */
static int is_retired(struct mb_upload *u, int64_t iteration)
{
    return u->opts.keep_last > 0 && is_committed(u, iteration);
}

/* ---- the worker thread ---- */

static void work(uv_work_t *work)
{
    struct upload_evict *v = work->data;

    if (!v->is_listed)
        mb_evict_list(v->u->local_dir, v->newest, &v->list, &v->err);
    else
        mb_evict(v->u->local_dir, v->list.iterations[v->next],
                 &(struct mb_evict_proof){v->has_manifest ? &v->manifest : NULL, v->dir_state},
                 &v->stop, &v->err);
}

static void after_removal(struct mb_upload *u)
{
    struct upload_evict *v = u->evict;

    if (v->err.code != MB_OK)
        mb_log(v->err.code == MB_ESTATE || v->err.code == MB_ECANCELED ? MB_LOG_INFO : MB_LOG_WARN,
               "upload", "job=%s: an older checkpoint stays: %s", u->job_id, v->err.text);
    v->n_gone += v->err.code == MB_OK;
    mb_manifest_close(&v->manifest);
    v->next++;
}

static void after_work(uv_work_t *work, int status)
{
    struct upload_evict *v = work->data;
    struct mb_upload *u = v->u;

    (void)status; /* nobody cancels it */
    v->is_working = 0;
    if (u->closing) {
        upload_part_closed(u);
        return;
    }
    if (v->is_listed) {
        after_removal(u);
    } else if (v->err.code != MB_OK) {
        mb_warn("upload", "job=%s: older checkpoints stay: %s", u->job_id, v->err.text);
    }
    v->is_listed = 1;
    step(u);
}

static void begin_work(struct mb_upload *u)
{
    struct upload_evict *v = u->evict;
    const struct mb_plan_iteration *it =
        v->is_listed ? mb_plan_find(u->plan, v->list.iterations[v->next]) : NULL;

    v->dir_state = it != NULL ? it->dir_state : 0;
    mb_err_clear(&v->err);
    v->work.data = v;
    v->is_working = 1;
    uv_queue_work(u->loop, &v->work, work, after_work); /* fails only without a function */
}

/* ---- the store ---- */

static void on_manifest(void *arg, const struct mb_store_result *result)
{
    struct mb_upload *u = arg;
    struct upload_evict *v = u->evict;
    struct mb_err err = {0};
    int64_t iteration;
    int rc = result->error;

    if (u->closing)
        return;
    iteration = v->list.iterations[v->next];
    if (rc == MB_OK)
        rc = mb_manifest_decode(result->data, result->data_len, "manifest", &v->manifest, &err);
    if (rc != MB_OK && rc != MB_ENOENT) {
        mb_warn("upload", "job=%s: older checkpoints stay: %s", u->job_id,
                result->error != MB_OK ? result->text : err.text);
        end(u);
        return;
    }
    v->has_manifest = rc == MB_OK;
    if (u->released_at_ms > 0) { /* meanwhile */
        end(u);
    } else if (v->n_kept < u->opts.local_keep_last) {
        v->n_kept += rc == MB_OK;
        mb_manifest_close(&v->manifest);
        v->next++;
        step(u);
    } else if (!is_only_here(u, iteration) && (rc == MB_OK || is_retired(u, iteration))) {
        begin_work(u);
    } else {
        if (rc != MB_OK)
            mb_info("upload",
                    "job=%s: an older checkpoint stays: iteration %" PRId64 " is not in the store",
                    u->job_id, iteration);
        mb_manifest_close(&v->manifest);
        v->next++;
        step(u);
    }
}

static void ask(struct mb_upload *u)
{
    struct upload_evict *v = u->evict;
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err = {0};

    if (mb_store_get(u->store, mb_manifest_key(v->list.iterations[v->next], key),
                     MB_MANIFEST_MAX_BYTES, TIMEOUT_MS, on_manifest, u, &err) == MB_OK)
        return;
    mb_warn("upload", "job=%s: older checkpoints stay: %s", u->job_id, err.text);
    end(u);
}

/* ---- one after the other ---- */

static void step(struct mb_upload *u)
{
    struct upload_evict *v = u->evict;

    while (v->next < v->list.n && u->released_at_ms == 0) {
        int64_t iteration = v->list.iterations[v->next];

        if (v->n_kept < u->opts.local_keep_last && is_committed(u, iteration)) {
            v->n_kept++;
        } else if (iteration != v->list.named && !is_only_here(u, iteration)) {
            ask(u);
            return;
        }
        v->next++;
    }
    end(u);
}

int64_t upload_newest_committed(const struct mb_upload *u)
{
    for (size_t i = mb_plan_count(u->plan); i-- > 0;)
        if (mb_plan_at(u->plan, i)->state == MB_PLAN_COMMITTED)
            return mb_plan_at(u->plan, i)->iteration;
    return -1;
}

int upload_wants_evict(const struct mb_upload *u)
{
    return u->opts.local_keep_last > 0 && !u->opts.has_ended && upload_newest_committed(u) >= 0;
}

void upload_evict(struct mb_upload *u)
{
    if (!u->evict_wanted || u->evict != NULL)
        return;
    u->evict_wanted = 0;
    if (u->released_at_ms > 0)
        return;
    u->evict = mb_calloc(1, sizeof(*u->evict));
    if (u->evict == NULL) {
        mb_warn("upload", "job=%s: older checkpoints stay: no memory", u->job_id);
        return;
    }
    u->evict->u = u;
    u->evict->newest = upload_newest_committed(u);
    u->evict->list.named = -1;
    begin_work(u);
}
