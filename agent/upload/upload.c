/*
 * The uploader: the shell around plan.c and journal.c. What comes before the first file is in
 * upload_prepare.c, what a foreign trainer's tracker file seals in upload_seals.c.
 *
 * Happy path of an iteration: saved -> journal -> files, four at a time -> part file -> commit.c
 * (manifest, pointer) -> committed.
 *
 *  1. Another attempt or job has saved the iteration: upload_prepare.c stands back or makes room.
 *  2. A transfer fails for good in the store's eyes: tried again after 1 s, 2 s, ... up to 5 times,
 *     then the iteration is dropped with an error that names the file.
 *  3. Killed: the journal says what is done; an open multipart upload goes on from its id, finished
 *     files are not sent again.
 *  4. The journal cannot be written (disk full): the step is not counted and is tried again.
 *  5. Released, and other nodes' parts do not come within 30 s: dropped, with an error saying so.
 *     The driver has heard that a node will never have one, or that a node is lost which has not
 * sent its own (upload_lost.c): dropped at once.
 *  6. Abandoned: everything pending is dropped; transfers in flight are ended by close.
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
    TRIES_MAX = 5,
    RETRY_BASE_MS = 1000,
    RELEASED_WAIT_MS = 30000,
    /* How long a look at the fence counts; so no request is repeated for longer. */
    PREPARED_MS = 10000
};

struct mb_manifest_writer upload_writer(const struct mb_upload *u)
{
    return (struct mb_manifest_writer){u->job_id, u->placement_group, u->opts.attempt};
}

/* ---- what is told ---- */

static void tell(struct mb_upload *u, const struct mb_plan_iteration *it)
{
    struct mb_upload_status status;

    mb_plan_status(it, &status);
    u->ops->on_status(u->arg, &status);
}

static void drop(struct mb_upload *u, struct mb_plan_iteration *it, const char *error)
{
    struct mb_err err = {0};

    if (mb_plan_event(it, MB_PLAN_EV_DROPPED, error, &err) != MB_OK || it->state != MB_PLAN_DROPPED)
        return;
    mb_error("upload", "job=%s: %s", u->job_id, error);
    if (mb_journal_dropped(u->journal, it->iteration, error, &err) != MB_OK)
        mb_error("upload", "%s", err.text);
    if (u->commit_it == it) { /* it would hold up the commits of others until it gives up */
        mb_commit_cancel(u->commit);
        u->commit = NULL;
        u->commit_it = NULL;
    }
    tell(u, it);
}

void upload_drop(struct mb_upload *u, struct mb_plan_iteration *it, const char *what,
                 const char *why)
{
    char text[1400];

    snprintf(text, sizeof(text), "iteration %lld is not durable: %s%s%s", (long long)it->iteration,
             what, why[0] != '\0' ? ": " : "", why);
    drop(u, it, text);
}

/* ---- files ---- */

static void free_transfer(struct transfer *t)
{
    mb_free(t->key);
    mb_free(t->path);
    t->key = t->path = NULL;
    t->it = NULL;
}

void upload_back_off(struct mb_upload *u, unsigned failures)
{
    u->not_before_ms = mb_mono_ms() + RETRY_BASE_MS +
                       mb_backoff_ms(failures, RETRY_BASE_MS, 20000, mb_random_u64());
}

static void on_file_sent(void *arg, const struct mb_store_result *result)
{
    struct transfer *t = arg;
    struct mb_upload *u = t->u;
    struct mb_plan_iteration *it = t->it;
    struct mb_plan_file *f = t->file;
    struct mb_err err = {0};

    if (u->closing) {
        free_transfer(t);
        return;
    }
    if (result->error == MB_OK && f->has_crc && result->crc64nvme != f->crc64nvme) {
        upload_drop(u, it, f->path, "it changed after it was saved (checksum)");
    } else if (result->error == MB_OK) {
        if (mb_journal_done(u->journal, it->iteration, f->path, result->crc64nvme, &err) == MB_OK) {
            mb_plan_file_done(f, result->crc64nvme);
            mb_debug("upload", "sent %s bytes=%llu", t->key, (unsigned long long)f->size_bytes);
        } else {
            mb_error("upload", "%s", err.text);
            mb_plan_file_again(f);
            upload_back_off(u, f->failures);
        }
    } else if (it->state == MB_PLAN_UPLOADING) {
        int is_away = result->error == MB_EUNAVAIL; /* no fault of the file: as often as it takes */

        mb_plan_file_again(f);
        if (is_away && f->failures >= TRIES_MAX)
            f->failures = TRIES_MAX - 1;
        mb_warn("upload", "%s: %s (try %u of %d)", t->key, result->text, f->failures, TRIES_MAX);
        if (f->failures >= TRIES_MAX)
            upload_drop(u, it, f->path, result->text);
        else
            upload_back_off(u, f->failures);
    }
    free_transfer(t);
    upload_kick(u);
}

static void on_upload_id(void *arg, const char *upload_id)
{
    struct transfer *t = arg;
    char *own = mb_strdup(upload_id);
    struct mb_err err;

    /* For the next try of this process, as the journal is for the next process. */
    if (own != NULL) {
        mb_free(t->file->upload_id);
        t->file->upload_id = own;
    }
    if (t->u->closing ||
        mb_journal_begin(t->u->journal, t->it->iteration, t->file->path, upload_id, &err) == MB_OK)
        return;
    mb_warn("upload", "a restart would send %s from its start: %s", t->key, err.text);
}

static void on_progress(void *arg, uint64_t done_bytes, uint64_t total_bytes)
{
    struct transfer *t = arg;

    (void)total_bytes;
    if (done_bytes > t->last_bytes)
        t->u->sent_bytes += done_bytes - t->last_bytes;
    t->last_bytes = done_bytes;
    t->file->sent_bytes = done_bytes;
}

static int send_file(struct mb_upload *u, struct transfer *t, struct mb_plan_iteration *it,
                     struct mb_plan_file *f)
{
    char dir[MB_CHECKPOINT_KEY_MAX];
    struct mb_store_put_file put = {.resume_upload_id = f->upload_id,
                                    .on_upload_id = on_upload_id,
                                    .progress = on_progress,
                                    .outage_ms = PREPARED_MS};
    struct mb_err err;

    *t = (struct transfer){.u = u, .it = it, .file = f};
    t->key = mb_asprintf("%s/%s", mb_iteration_dir(it->iteration, dir), f->path);
    t->path = mb_path_join(it->dir, f->path);
    put.key = t->key;
    put.path = t->path;
    if (t->key != NULL && t->path != NULL &&
        mb_store_put_file(u->store, &put, on_file_sent, t, &err) == MB_OK)
        return MB_OK;
    if (t->key == NULL || t->path == NULL)
        mb_err_set(&err, MB_ENOMEM, "no memory");
    mb_plan_file_again(f);
    if (f->failures >= TRIES_MAX)
        upload_drop(u, it, f->path, err.text);
    else
        upload_back_off(u, f->failures);
    free_transfer(t);
    return MB_EIO;
}

/* ---- the part file ---- */

static void on_part_sent(void *arg, const struct mb_store_result *result)
{
    struct mb_upload *u = arg;
    struct mb_plan_iteration *it = u->part_it;
    struct mb_err err = {0};

    u->part_it = NULL;
    if (u->closing)
        return;
    if (result->error != MB_OK) {
        mb_warn("upload", "part file of iteration %lld: %s", (long long)it->iteration,
                result->text);
        upload_back_off(u, 1);
        return;
    }
    if (it->state == MB_PLAN_UPLOADING) {
        if (mb_journal_part(u->journal, it->iteration, &err) != MB_OK ||
            mb_plan_event(it, MB_PLAN_EV_PART_SENT, NULL, &err) != MB_OK) {
            mb_error("upload", "%s", err.text);
            upload_back_off(u, 1);
            return;
        }
        tell(u, it);
    }
    upload_kick(u);
}

static int build_part(struct mb_upload *u, const struct mb_plan_iteration *it, char **out,
                      struct mb_err *err)
{
    struct mb_manifest m = {.iteration = it->iteration,
                            .node_rank = (int32_t)u->opts.node_rank,
                            .num_nodes = u->opts.num_nodes};
    struct mb_manifest_writer writer = upload_writer(u);
    int rc = mb_manifest_set_writer(&m, &writer, err);

    for (size_t i = 0; i < it->n_files && rc == MB_OK; i++)
        rc = mb_manifest_add(&m, it->files[i].path, it->files[i].size_bytes, it->files[i].crc64nvme,
                             err);
    if (rc == MB_OK)
        rc = mb_manifest_encode(&m, out, err);
    mb_manifest_close(&m);
    return rc;
}

static void send_part(struct mb_upload *u, struct mb_plan_iteration *it)
{
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err = {0};
    char *text = NULL;
    int rc = build_part(u, it, &text, &err);

    if (rc == MB_OK)
        rc = mb_store_put(
            u->store, mb_part_key(it->iteration, u->opts.node_rank, u->opts.num_nodes, key), text,
            strlen(text), MB_STORE_ALWAYS, NULL, UPLOAD_SMALL_TIMEOUT_MS, on_part_sent, u, &err);
    if (rc == MB_OK) {
        u->part_it = it;
    } else {
        mb_warn("upload", "%s", err.text);
        upload_back_off(u, 1);
    }
    mb_free(text);
}

/* ---- the commit ---- */

static void on_committed(void *arg, const struct mb_err *result)
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
        tell(u, it);
        mb_plan_shed(it);
    }
    upload_kick(u);
}

static void begin_commit(struct mb_upload *u, struct mb_plan_iteration *it)
{
    struct mb_commit_opts opts = {
        .iteration = it->iteration,
        .num_nodes = u->opts.num_nodes,
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

/* ---- the loop of work ---- */

static void start_transfers(struct mb_upload *u)
{
    for (size_t i = 0; i < UPLOAD_IN_FLIGHT_MAX; i++) {
        struct mb_plan_iteration *it;
        struct mb_plan_file *f;

        if (u->transfers[i].it != NULL)
            continue;
        if (!mb_plan_next(u->plan, &it, &f))
            return;
        /* Nothing of it may go before the look at fence and manifest; a process that was stopped
         * meanwhile has to look again. */
        if (it != u->prepared || mb_mono_ms() - u->prepared_ms > PREPARED_MS) {
            f->state = MB_PLAN_FILE_WAITING;
            if (u->preparing == NULL)
                upload_prepare(u, it);
            return;
        }
        if (send_file(u, &u->transfers[i], it, f) != MB_OK)
            return;
    }
}

void upload_kick(struct mb_upload *u)
{
    if (u->closing || mb_mono_ms() < u->not_before_ms)
        return;
    start_transfers(u);
    /* A part goes out while an older iteration still waits for the parts of other nodes. */
    for (size_t i = 0; i < mb_plan_count(u->plan); i++) {
        struct mb_plan_iteration *it = mb_plan_at(u->plan, i);

        if (u->part_it == NULL && mb_plan_files_done(it))
            send_part(u, it);
        if (u->commit_it == NULL && it->state == MB_PLAN_PART)
            begin_commit(u, it);
    }
    upload_look_for_lost(u);
}

static void on_timer(uv_timer_t *t)
{
    struct mb_upload *u = t->data;
    uint64_t now_ms = mb_mono_ms();
    int busy;

    upload_kick(u);
    busy = mb_plan_is_busy(u->plan);
    if (busy && now_ms >= u->status_at_ms) {
        u->status_at_ms = now_ms + STATUS_EVERY_MS;
        for (size_t i = 0; i < mb_plan_count(u->plan); i++)
            if (mb_plan_at(u->plan, i)->state == MB_PLAN_UPLOADING) {
                tell(u, mb_plan_at(u->plan, i));
                break;
            }
    }
    if (u->was_busy && !busy) {
        u->was_busy = 0;
        u->ops->on_idle(u->arg);
    }
}

/* ---- in from outside ---- */

int mb_upload_saved(struct mb_upload *u, int64_t iteration, uint32_t rank, const char *dir,
                    const struct mb_upload_file *files, size_t n, struct mb_err *err)
{
    char name[MB_CHECKPOINT_KEY_MAX];
    char *own = NULL;
    int rc;

    if (dir[0] != '/')
        own = mb_path_join(u->local_dir, dir[0] != '\0' ? dir : mb_iteration_dir(iteration, name));
    rc = mb_plan_saved(u->plan, iteration, rank, own != NULL ? own : dir, files, n, err);
    if (rc == MB_EEXIST) {
        mb_err_clear(err);
        rc = MB_OK;
    } else if (rc == MB_OK) {
        u->was_busy = 1;
        rc = mb_journal_saved(u->journal, iteration, rank, own != NULL ? own : dir, files, n, err);
    }
    if (rc != MB_OK) { /* noted, so that a driver that comes back hears of it too */
        struct mb_plan_iteration *it = mb_plan_note(u->plan, iteration);

        if (it != NULL)
            upload_drop(u, it, "what a rank saved was not taken", err->text);
    }
    mb_free(own);
    return rc;
}

void mb_upload_no_more(struct mb_upload *u)
{
    mb_tracker_look(u->tracker);
    for (size_t i = 0; i < mb_plan_count(u->plan); i++)
        if (mb_plan_at(u->plan, i)->state == MB_PLAN_COLLECTING)
            upload_drop(u, mb_plan_at(u->plan, i), "a rank ended before it saved its part", "");
}

void mb_upload_release(struct mb_upload *u)
{
    if (u->released_at_ms > 0)
        return;
    u->released_at_ms = mb_mono_ms();
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

void mb_upload_abandon(struct mb_upload *u)
{
    drop_newer(u, INT64_MIN, "its upload was abandoned");
}

void mb_upload_newest_on_all(struct mb_upload *u, int64_t iteration)
{
    drop_newer(u, iteration, "ranks of another node ended before they saved their part");
}

int mb_upload_is_busy(const struct mb_upload *u)
{
    return mb_plan_is_busy(u->plan);
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
            tell(u, mb_plan_at(u->plan, i));
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
    if (rc == MB_OK && opts->watch_tracker && opts->node_rank == 0)
        rc = state != NULL ? mb_tracker_start(loop, u->local_dir, state, upload_on_sealed, u,
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
        mb_plan_shed(mb_plan_at(u->plan, i));
    uv_timer_init(loop, &u->timer);
    u->timer.data = u;
    u->was_busy = mb_plan_is_busy(u->plan);
    uv_timer_start(&u->timer, on_timer, TICK_MS, TICK_MS);
    *out = u;
    return MB_OK;
}

static void part_closed(struct mb_upload *u)
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
    part_closed(arg);
}

static void on_timer_closed(uv_handle_t *h)
{
    part_closed(h->data);
}

void mb_upload_close(struct mb_upload *u, void (*cb)(void *arg), void *arg)
{
    u->closing = 1;
    u->close_cb = cb;
    u->close_arg = arg;
    u->parts_open = 2;
    mb_tracker_stop(u->tracker);
    mb_commit_cancel(u->commit);
    mb_store_close(u->store, on_store_closed, u);
    uv_close((uv_handle_t *)&u->timer, on_timer_closed);
}
