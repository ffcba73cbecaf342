/*
 * The uploader: the shell around plan.c and journal.c. The gang's place in the list of writers is
 * in upload_enter.c, the claim that comes before the first file is in upload_prepare.c, files and
 * parts in upload_files.c, what a dropped iteration leaves in the store in upload_clean.c, what a
 * foreign trainer's tracker file seals in upload_seals.c.
 *
 * Happy path of an iteration: saved -> journal -> claim -> files, many at a time -> part file ->
 * commit.c (manifest, pointer) -> committed.
 *
 *  1. A newer attempt or job has taken over: dropped (upload_prepare.c, commit.c).
 *  2. A transfer fails for good in the store's eyes: tried again after 1 s, 2 s, ... up to 5 times,
 *     then the iteration is dropped with an error that names the file.
 *  3. Killed: the journal says what is done; an open multipart upload goes on from its id, finished
 *     files are not sent again.
 *  4. The journal cannot be written (disk full): the step is not counted and is tried again.
 *  5. Released, and other nodes' parts do not come within 30 s: dropped, with an error saying so.
 *     The driver has heard that a node will never have one or has given it up, or that a node is
 *     lost which has not sent its own (upload_lost.c): dropped at once.
 *  6. Parts of other nodes do not come, and nobody says why: whatever else waits for its commit has
 *     its turn meanwhile, so a node that has dropped an iteration holds up no newer one. Too many
 *     wait: the oldest is dropped, if a newer one is durable.
 *  7. Abandoned: everything pending is dropped; transfers in flight end, unfinished ones are
 * aborted.
 */
#include "agent/upload/upload.h"

#include <stdio.h>
#include <string.h>
#include "agent/upload/upload_internal.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"

enum {
    TICK_MS = 100,
    STATUS_EVERY_MS = 500,
    RETRY_BASE_MS = 1000,
    RELEASED_WAIT_MS = 30000,
    /* Between looks for the parts of other nodes, when several iterations wait for them. */
    ASIDE_MIN_MS = 200,
    ASIDE_MAX_MS = 2000
};

struct mb_manifest_writer upload_writer(const struct mb_upload *u)
{
    return (struct mb_manifest_writer){u->job_id, u->placement_group, u->opts.attempt};
}

/* ---- what is told ---- */

static uint64_t left_ms(const struct mb_upload *u)
{
    int64_t left = u->deadline_unix_ms - (int64_t)mb_unix_ms();

    return left > 0 ? (uint64_t)left : 0;
}

static void fill_status(const struct mb_upload *u, const struct mb_plan_iteration *it,
                        struct mb_upload_status *out)
{
    mb_plan_status(it, mb_store_part_bytes(u->store), out);
    out->rate_bytes_per_s = u->rate_bytes_per_s;
    out->retries = u->retries + mb_store_retries(u->store);
    if (it->state == MB_PLAN_UPLOADING)
        out->eta_ms = mb_plan_eta_ms(u->plan, it, u->rate_bytes_per_s);
}

void upload_tell(struct mb_upload *u, const struct mb_plan_iteration *it)
{
    struct mb_upload_status status;

    fill_status(u, it, &status);
    u->ops->on_status(u->arg, &status);
}

static void drop(struct mb_upload *u, struct mb_plan_iteration *it, const char *error)
{
    struct mb_err err = {0};

    if (mb_plan_event(it, MB_PLAN_EV_DROPPED, error, &err) != MB_OK || it->state != MB_PLAN_DROPPED)
        return;
    it->never &= it != u->part_it; /* its part is on its way, and may arrive */
    mb_error("upload", "job=%s: %s", u->job_id, error);
    if (mb_journal_dropped(u->journal, it->iteration, error, &err) != MB_OK)
        mb_error("upload", "%s", err.text);
    u->shorten_wanted = 1;
    upload_clean_on(u);
    if (u->commit_it == it) { /* it would hold up the commits of others until it gives up */
        mb_commit_cancel(u->commit);
        u->commit = NULL;
        u->commit_it = NULL;
    }
    upload_tell(u, it);
}

void upload_drop(struct mb_upload *u, struct mb_plan_iteration *it, const char *what,
                 const char *why)
{
    char text[1400];

    snprintf(text, sizeof(text), "iteration %lld is not durable: %s%s%s", (long long)it->iteration,
             what, why[0] != '\0' ? ": " : "", why);
    drop(u, it, text);
}

void upload_back_off(struct mb_upload *u, unsigned failures)
{
    u->not_before_ms = mb_mono_ms() + RETRY_BASE_MS +
                       mb_backoff_ms(failures, RETRY_BASE_MS, 20000, mb_random_u64());
}

/* ---- the commit ---- */

static void on_committed(void *arg, const struct mb_err *result, int is_moved)
{
    struct mb_upload *u = arg;
    struct mb_plan_iteration *it = u->commit_it;
    struct mb_err err = {0};

    u->commit = NULL;
    u->commit_it = NULL;
    if (u->closing || it->state != MB_PLAN_PART) {
        upload_kick(u);
        return;
    }
    if (result->code != MB_OK) {
        upload_drop(u, it, "the commit failed", result->text);
    } else if (mb_journal_committed(u->journal, it->iteration, &err) != MB_OK ||
               mb_plan_event(it, MB_PLAN_EV_COMMITTED, NULL, &err) != MB_OK) {
        mb_error("upload", "%s", err.text);
        upload_back_off(u, 1);
    } else {
        mb_info("upload", "job=%s: committed iteration=%lld files=%zu", u->job_id,
                (long long)it->iteration, it->n_files);
        upload_tell(u, it);
        mb_plan_shed(it);
        u->shorten_wanted = 1;
        u->retain_wanted |= u->opts.keep_last > 0 && (is_moved || u->opts.node_rank == 0);
        u->evict_wanted = upload_wants_evict(u);
    }
    upload_kick(u);
}

static void begin_commit(struct mb_upload *u, struct mb_plan_iteration *it)
{
    struct mb_commit_opts opts = {
        .iteration = it->iteration,
        .num_nodes = u->opts.num_nodes,
        .node_rank = u->opts.node_rank,
        .is_beside = it->place != NULL && it->place[0] != '\0',
        .writer = upload_writer(u),
        .give_up_at_ms = u->released_at_ms > 0 ? u->released_at_ms + RELEASED_WAIT_MS : 0};
    struct mb_err err;

    if (mb_commit_start(u->loop, u->store, &opts, on_committed, u, &u->commit, &err) == MB_OK) {
        u->commit_it = it;
    } else {
        mb_warn("upload", "%s", err.text);
        upload_back_off(u, 1);
    }
}

static struct mb_plan_iteration *next_commit(const struct mb_upload *u)
{
    struct mb_plan_iteration *next = NULL;
    uint64_t now_ms = mb_mono_ms();

    for (size_t i = 0; i < mb_plan_count(u->plan); i++) {
        struct mb_plan_iteration *it = mb_plan_at(u->plan, i);

        if (it->state == MB_PLAN_PART && it != u->commit_it && it->commit_at_ms <= now_ms &&
            (next == NULL || it->commit_at_ms < next->commit_at_ms))
            next = it;
    }
    return next;
}

static void put_aside(struct mb_upload *u)
{
    struct mb_plan_iteration *it = u->commit_it;

    mb_commit_cancel(u->commit);
    u->commit = NULL;
    u->commit_it = NULL;
    it->commit_wait_ms = it->commit_wait_ms == 0                 ? ASIDE_MIN_MS
                         : it->commit_wait_ms * 2 < ASIDE_MAX_MS ? it->commit_wait_ms * 2
                                                                 : ASIDE_MAX_MS;
    it->commit_at_ms = mb_mono_ms() + it->commit_wait_ms;
}

/* One at a time. One that only waits for other nodes makes room for the next. */
static void look_after_commits(struct mb_upload *u)
{
    struct mb_plan_iteration *next;

    if ((u->commit_it != NULL && !mb_commit_waits(u->commit)) || (next = next_commit(u)) == NULL)
        return;
    if (u->commit_it != NULL)
        put_aside(u);
    begin_commit(u, next);
}

/* The plan is full: the oldest that only other nodes could complete goes, if a newer one is
 * durable.
 */
static void make_room(struct mb_upload *u)
{
    struct mb_plan_iteration *oldest = NULL;

    for (size_t i = 0; i < mb_plan_count(u->plan); i++) {
        struct mb_plan_iteration *it = mb_plan_at(u->plan, i);

        if (it->state == MB_PLAN_PART && oldest == NULL) {
            oldest = it;
        } else if (it->state == MB_PLAN_COMMITTED && oldest != NULL) {
            upload_drop(u, oldest, "the parts of other nodes did not appear",
                        "a newer one is durable");
            return;
        }
    }
}

/* ---- what other nodes do about an iteration ---- */

void mb_upload_given_up(struct mb_upload *u, int64_t iteration, const char *why)
{
    upload_refuse(u, iteration, why, "");
    upload_kick(u);
}

void mb_upload_left(struct mb_upload *u, int64_t iteration, int is_left)
{
    struct mb_plan_iteration *it = mb_plan_find(u->plan, iteration);

    if (it == NULL || it->is_left_by_other == is_left)
        return;
    it->is_left_by_other = is_left;
    mb_info("upload", "job=%s: iteration=%lld %s", u->job_id, (long long)iteration,
            is_left ? "is left: another node cannot send its part of it before the deadline"
                    : "is not left any more");
    upload_kick(u);
}

/* ---- the loop of work ---- */

/* Where there was no part before, the condition of its write alone is enough. */
static int may_send_part(struct mb_upload *u, struct mb_plan_iteration *it)
{
    return (it->place != NULL && it->part_etag == NULL && !u->no_conditions) ||
           upload_is_prepared(u, it);
}

void upload_kick(struct mb_upload *u)
{
    if (u->closing || mb_mono_ms() < u->not_before_ms)
        return;
    mb_plan_prefer(u->plan, u->deadline_unix_ms > 0
                                ? mb_plan_choose(u->plan, left_ms(u), u->rate_bytes_per_s)
                                : -1);
    upload_files(u);
    /* A part goes out while an older iteration still waits for the parts of other nodes. */
    for (size_t i = 0; i < mb_plan_count(u->plan); i++) {
        struct mb_plan_iteration *it = mb_plan_at(u->plan, i);

        if (u->part_it == NULL && mb_plan_files_done(it) && may_send_part(u, it))
            upload_part(u, it);
    }
    look_after_commits(u);
    upload_look_for_lost(u);
    upload_enter(u);
    upload_clean(u);
    upload_retain(u);
    upload_evict(u);
}

/* The other nodes have to know which iterations this one cannot send in time. */
static void decide_what_is_left(struct mb_upload *u)
{
    for (size_t i = 0; i < mb_plan_count(u->plan); i++) {
        struct mb_plan_iteration *it = mb_plan_at(u->plan, i);
        int is_left = it->state == MB_PLAN_UPLOADING && u->deadline_unix_ms > 0 &&
                      u->rate_bytes_per_s > 0 &&
                      !mb_plan_has_time(it, left_ms(u), u->rate_bytes_per_s);

        if (is_left == it->is_left || it->state > MB_PLAN_UPLOADING)
            continue;
        it->is_left = is_left;
        upload_tell(u, it);
    }
}

static void shorten(struct mb_upload *u)
{
    struct mb_err err;

    if (u->shorten_wanted && mb_journal_shorten(u->journal, u->plan, &err) != MB_OK)
        mb_warn("upload", "the journal stays as long as it is: %s", err.text);
    u->shorten_wanted = 0;
}

static void on_timer(uv_timer_t *t)
{
    struct mb_upload *u = t->data;
    uint64_t now_ms = mb_mono_ms();
    int busy;

    upload_kick(u);
    upload_clean(u); /* a pause after a failure does not hold that up */
    shorten(u);
    busy = mb_upload_is_busy(u);
    if (busy && now_ms >= u->status_at_ms) {
        u->status_at_ms = now_ms + STATUS_EVERY_MS;
        decide_what_is_left(u);
        for (size_t i = 0; i < mb_plan_count(u->plan); i++)
            if (mb_plan_at(u->plan, i)->state == MB_PLAN_UPLOADING) {
                upload_tell(u, mb_plan_at(u->plan, i));
                break;
            }
    }
    if (u->was_busy && !busy) {
        u->was_busy = 0;
        u->ops->on_idle(u->arg);
    }
}

/* ---- in from outside ---- */

void upload_refuse(struct mb_upload *u, int64_t iteration, const char *what, const char *why)
{
    struct mb_plan_iteration *it = mb_plan_note(u->plan, iteration);
    struct mb_upload_status status = {.iteration = iteration, .error = why, .never = 1};

    if (it != NULL && it->state < MB_PLAN_COMMITTED)
        upload_drop(u, it, what, why);
    else if (it == NULL) /* a driver that comes back will not hear of it */
        u->ops->on_status(u->arg, &status);
}

int mb_upload_saved(struct mb_upload *u, int64_t iteration, uint32_t rank, const char *dir,
                    const struct mb_upload_file *files, size_t n, struct mb_err *err)
{
    char name[MB_CHECKPOINT_KEY_MAX];
    char *own = NULL;
    int rc;

    if (dir[0] != '/')
        own = mb_path_join(u->local_dir, dir[0] != '\0' ? dir : mb_iteration_dir(iteration, name));
    if (mb_plan_is_full(u->plan) && mb_plan_find(u->plan, iteration) == NULL)
        make_room(u);
    rc = mb_plan_saved(u->plan, iteration, rank, own != NULL ? own : dir, files, n, err);
    if (rc == MB_EEXIST) {
        mb_err_clear(err);
        rc = MB_OK;
    } else if (rc == MB_OK) {
        u->was_busy = 1;
        rc = mb_journal_saved(u->journal, iteration, rank, own != NULL ? own : dir, files, n, err);
    }
    if (rc != MB_OK)
        upload_refuse(u, iteration, "what a rank saved was not taken", err->text);
    mb_free(own);
    return rc;
}

void mb_upload_no_more(struct mb_upload *u)
{
    mb_upload_last_look(u);
    mb_tracker_stop(u->tracker); /* what it names from now on is somebody else's */
    u->tracker = NULL;
    u->has_ended = 1;
    for (size_t i = 0; i < mb_plan_count(u->plan); i++)
        if (mb_plan_at(u->plan, i)->state == MB_PLAN_COLLECTING)
            upload_drop(u, mb_plan_at(u->plan, i), "a rank ended before it saved its part", "");
}

void mb_upload_release(struct mb_upload *u)
{
    if (u->released_at_ms > 0)
        return;
    u->released_at_ms = mb_mono_ms();
    upload_evict_stop(u);
    mb_commit_give_up_at(u->commit, u->released_at_ms + RELEASED_WAIT_MS);
}

static void drop_newer(struct mb_upload *u, int64_t iteration, const char *why)
{
    for (size_t i = 0; i < mb_plan_count(u->plan); i++) {
        struct mb_plan_iteration *it = mb_plan_at(u->plan, i);

        if (it->state < MB_PLAN_COMMITTED && it->iteration > iteration)
            upload_drop(u, it, why, "");
    }
}

void mb_upload_abandon(struct mb_upload *u, uint64_t within_ms)
{
    drop_newer(u, INT64_MIN, "its upload was abandoned");
    if (within_ms > 0) {
        u->clean_bound_ms = mb_mono_ms() + within_ms;
        if (u->clean_until_ms > u->clean_bound_ms)
            u->clean_until_ms = u->clean_bound_ms;
    }
}

void mb_upload_newest_on_all(struct mb_upload *u, int64_t iteration)
{
    drop_newer(u, iteration, "ranks of another node ended before they saved their part");
}

int mb_upload_is_busy(const struct mb_upload *u)
{
    return mb_plan_is_busy(u->plan) || upload_is_cleaning(u) || u->retain_wanted || u->retain ||
           u->evict_wanted || u->evict;
}

void mb_upload_deadline(struct mb_upload *u, int64_t deadline_unix_ms, uint64_t rate_bytes_per_s)
{
    u->deadline_unix_ms = deadline_unix_ms;
    u->rate_bytes_per_s = rate_bytes_per_s;
}

size_t mb_upload_pending(const struct mb_upload *u, struct mb_upload_status *out, size_t max)
{
    size_t n = 0;

    for (size_t i = 0; i < mb_plan_count(u->plan); i++) {
        const struct mb_plan_iteration *it = mb_plan_at(u->plan, i);

        if (it->state >= MB_PLAN_COMMITTED)
            continue;
        if (n < max)
            fill_status(u, it, &out[n]);
        n++;
    }
    return n;
}

uint64_t mb_upload_sent_bytes(const struct mb_upload *u)
{
    return u->sent_bytes;
}

void mb_upload_repeat(struct mb_upload *u)
{
    upload_repeat_seals(u);
    for (size_t i = 0; i < mb_plan_count(u->plan); i++)
        if (mb_plan_at(u->plan, i)->state != MB_PLAN_COLLECTING)
            upload_tell(u, mb_plan_at(u->plan, i));
}

/* ---- life ---- */

static void free_upload(struct mb_upload *u)
{
    mb_plan_destroy(u->plan);
    mb_journal_close(u->journal);
    mb_free(u->dir);
    mb_free(u->url);
    mb_free(u->local_dir);
    mb_free(u->job_id);
    mb_free(u->placement_group);
    mb_free(u->ranks);
    mb_free(u->lost);
    mb_free(u->part_text);
    upload_retain_close(u);
    upload_evict_close(u);
    mb_free(u);
}

static int copy_opts(struct mb_upload *u, const struct mb_upload_opts *opts)
{
    u->opts = *opts;
    u->dir = mb_strdup(opts->dir);
    u->url = mb_strdup(opts->url);
    u->local_dir = mb_strdup(opts->local_dir);
    u->job_id = mb_strdup(opts->job_id);
    u->placement_group = mb_strdup(opts->placement_group);
    u->ranks = mb_calloc(opts->n_ranks, sizeof(*u->ranks));
    if (!u->dir || !u->url || !u->local_dir || !u->job_id || !u->placement_group || !u->ranks)
        return MB_ENOMEM;
    memcpy(u->ranks, opts->ranks, opts->n_ranks * sizeof(*u->ranks));
    return MB_OK;
}

int mb_upload_create(uv_loop_t *loop, const struct mb_upload_opts *opts,
                     const struct mb_upload_ops *ops, void *arg, struct mb_upload **out,
                     struct mb_err *err)
{
    struct mb_upload *u = mb_calloc(1, sizeof(*u));
    char *path = NULL, *state;
    int rc;

    if (u == NULL || copy_opts(u, opts) != MB_OK) {
        if (u != NULL)
            free_upload(u);
        return mb_err_set(err, MB_ENOMEM, "no memory for the uploader");
    }
    u->loop = loop;
    u->ops = ops;
    u->arg = arg;
    path = mb_path_join(u->dir, "upload.journal");
    rc = path != NULL ? mb_plan_create(u->ranks, opts->n_ranks, &u->plan, err)
                      : mb_err_set(err, MB_ENOMEM, "no memory for the uploader");
    if (rc == MB_OK)
        rc = mb_journal_open(path, u->plan, &u->journal, err);
    state = mb_path_join(u->dir, "tracker.known");
    if (rc == MB_OK && opts->watch_tracker && opts->node_rank == 0 && !opts->has_ended)
        rc = state != NULL ? mb_tracker_start(loop, u->local_dir, state, &upload_tracker_ops, u,
                                              &u->tracker, err)
                           : mb_err_set(err, MB_ENOMEM, "no memory for the uploader");
    if (rc == MB_OK)
        rc = mb_store_open(loop, u->url, &u->store, err);
    mb_free(state);
    mb_free(path);
    if (rc != MB_OK) {
        mb_tracker_stop(u->tracker);
        free_upload(u);
        return rc;
    }
    for (size_t i = 0; i < mb_plan_count(u->plan); i++)
        upload_replayed(mb_plan_at(u->plan, i));
    u->has_ended = opts->has_ended;
    upload_note_launch(u);
    uv_timer_init(loop, &u->timer);
    u->timer.data = u;
    upload_clean_on(u);
    u->evict_wanted = upload_wants_evict(u);
    u->was_busy = mb_upload_is_busy(u);
    uv_timer_start(&u->timer, on_timer, TICK_MS, TICK_MS);
    upload_enter(u);
    *out = u;
    return MB_OK;
}

void upload_part_closed(struct mb_upload *u)
{
    void (*cb)(void *) = u->close_cb;
    void *arg = u->close_arg;

    if (--u->parts_open > 0)
        return;
    free_upload(u);
    if (cb != NULL)
        cb(arg);
}

static void on_store_closed(void *arg)
{
    upload_part_closed(arg);
}

static void on_timer_closed(uv_handle_t *h)
{
    upload_part_closed(h->data);
}

void mb_upload_close(struct mb_upload *u, void (*cb)(void *arg), void *arg)
{
    u->closing = 1;
    u->close_cb = cb;
    u->close_arg = arg;
    u->parts_open = 2 + upload_is_evicting(u);
    upload_evict_stop(u);
    mb_tracker_stop(u->tracker);
    mb_commit_cancel(u->commit);
    mb_store_close(u->store, on_store_closed, u);
    uv_close((uv_handle_t *)&u->timer, on_timer_closed);
}
