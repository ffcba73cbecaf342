/*
 * Files and parts on their way.
 *
 *  1. A file is written if there is no object of its name, or in place of the one that was seen
 *     before the last look at the claim. Another one is there: it is noted, the claim is looked at
 *     again, and the file goes in its place. After CONFLICTS_MAX of those it is dropped.
 *  2. Uploads that a killed process began, or a server whose answer was lost, or the one from whom
 *     the claim was taken, and whose ids nobody knows: before a file is begun anew those of its key
 *     are aborted, and once more when it is sent (upload_sweep.c).
 *  3. All files share the store's connections, part by part, by the plan's order: what is preferred
 *     before the rest, then older iterations before newer ones. When the preference changes, what
 *     was begun keeps the parts that are on their way, and its other parts wait.
 *  4. The part likewise; one with the same bytes is ours already.
 *  5. Failures: see upload.c.
 */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "agent/upload/upload_internal.h"
#include "agent/upload/walk.h"
#include "base/alloc.h"
#include "base/fs.h"
#include "base/log.h"

enum { CONFLICTS_MAX = 20 };

static void free_transfer(struct transfer *t)
{
    mb_free(t->key);
    mb_free(t->path);
    t->key = t->path = NULL;
    t->it = NULL;
}

void upload_lose_conditions(struct mb_upload *u)
{
    if (!u->no_conditions)
        mb_warn("upload", "the store takes no conditional writes: two jobs must not save into %s",
                u->url);
    u->no_conditions = 1;
}

/* ---- files ---- */

static void on_failed(struct transfer *t, int code, const char *text)
{
    struct mb_upload *u = t->u;
    struct mb_plan_file *f = t->file;

    mb_plan_file_again(f);
    f->failures = mb_plan_count_failure(f->failures - 1, code);
    mb_warn("upload", "%s: %s (try %u of %d)", t->key, text, f->failures, UPLOAD_TRIES_MAX);
    u->retries++;
    f->may_have_uploads = f->size_bytes >= UPLOAD_MAY_BE_CUT_BYTES;
    if (f->failures >= UPLOAD_TRIES_MAX)
        upload_drop(u, t->it, f->path, text);
    else
        upload_back_off(u, f->failures);
}

/* Another object is there. */
static void on_conflict(struct transfer *t, const struct mb_store_result *result)
{
    struct mb_upload *u = t->u;
    struct mb_plan_file *f = t->file;
    char *etag = result->etag[0] != '\0' ? mb_strdup(result->etag) : NULL;

    mb_plan_file_back(f);
    f->sent_bytes = 0;
    mb_free(f->etag);
    f->etag = etag;
    upload_look_again(u);
    if (++f->conflicts > CONFLICTS_MAX)
        upload_drop(u, t->it, f->path, "something else writes it, again and again");
    else if (etag == NULL || f->conflicts > 2)
        upload_back_off(u, 1);
}

/* It was written again since it was sealed, so what was sent may be of another save than the rest.
 * The inode is no witness: some file systems number their files anew. One that is gone was not
 * replaced, its bytes were read before. */
static int was_replaced(const struct transfer *t)
{
    struct stat st;

    return t->file->mtime_ns != 0 && stat(t->path, &st) == 0 &&
           mb_walk_mtime_ns(&st) != t->file->mtime_ns;
}

/* It is in the store, and no upload of its key is open. */
static void file_done(struct transfer *t)
{
    struct mb_upload *u = t->u;
    struct mb_plan_file *f = t->file;
    struct mb_err err = {0};

    if (t->size_bytes != f->size_bytes) { /* the manifest would be wrong */
        mb_plan_file_done(f, t->crc64nvme);
        upload_drop(u, t->it, f->path, "it changed after it was saved (size)");
    } else if (f->has_crc && t->crc64nvme != f->crc64nvme) {
        mb_plan_file_done(f, t->crc64nvme);
        upload_drop(u, t->it, f->path, "it changed after it was saved (checksum)");
    } else if (was_replaced(t)) {
        mb_plan_file_done(f, t->crc64nvme);
        upload_drop(u, t->it, f->path, "it changed after it was saved (written again)");
    } else if (mb_journal_done(u->journal, t->it->iteration, f->path, t->crc64nvme, &err) ==
               MB_OK) {
        mb_plan_file_done(f, t->crc64nvme);
        mb_debug("upload", "sent %s bytes=%llu", t->key, (unsigned long long)f->size_bytes);
    } else {
        mb_error("upload", "%s", err.text);
        mb_plan_file_again(f);
        f->look_first = 1;
        upload_back_off(u, f->failures);
    }
}

/* Those that the new owner of the claim has begun are its own. */
static void on_swept(void *arg, int code, const char *text)
{
    struct transfer *t = arg;
    struct mb_upload *u = t->u;

    if (!u->closing && (code == MB_OK || code == MB_EUNSUPPORTED || code == MB_EEXIST)) {
        t->file->may_have_uploads = 0;
        file_done(t);
    } else if (!u->closing) {
        t->file->look_first = 1;
        on_failed(t, code, text);
    }
    free_transfer(t);
    if (!u->closing)
        upload_kick(u);
}

static void on_file_sent(void *arg, const struct mb_store_result *result)
{
    struct transfer *t = arg;
    struct mb_upload *u = t->u;
    struct mb_plan_iteration *it = t->it;
    struct mb_plan_file *f = t->file;
    struct mb_err err;

    t->op = NULL;
    if (u->closing) {
        free_transfer(t);
        return;
    }
    t->crc64nvme = result->crc64nvme;
    t->size_bytes = result->size_bytes;
    f->may_have_uploads |= result->has_strays;
    if (result->error == MB_OK && f->may_have_uploads &&
        upload_sweep(u, it, t->key, on_swept, t, &err) == MB_OK)
        return;
    if (result->error == MB_OK) {
        file_done(t);
    } else if (it->state != MB_PLAN_UPLOADING) {
        mb_plan_file_back(f); /* upload_clean.c looks for what is left of it */
        f->may_have_uploads |= f->size_bytes >= UPLOAD_MAY_BE_CUT_BYTES;
    } else if (result->error == MB_EEXIST) {
        on_conflict(t, result);
    } else if (result->error == MB_EUNSUPPORTED && !u->no_conditions) {
        upload_lose_conditions(u);
        mb_plan_file_back(f);
    } else {
        on_failed(t, result->error, result->text);
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

static enum mb_store_if condition(const struct mb_upload *u, const char *etag)
{
    if (u->no_conditions)
        return MB_STORE_ALWAYS;
    return etag != NULL ? MB_STORE_IF_MATCH : MB_STORE_IF_ABSENT;
}

/* Lower goes first. */
static int32_t priority(const struct mb_upload *u, const struct mb_plan_iteration *it)
{
    if (mb_plan_is_preferred(u->plan, it))
        return -1;
    return it->iteration < INT32_MAX ? (int32_t)it->iteration : INT32_MAX;
}

static int send_it(struct transfer *t, struct mb_err *err)
{
    struct mb_plan_file *f = t->file;
    struct mb_store_put_file put = {.key = t->key,
                                    .path = t->path,
                                    .resume_upload_id = f->upload_id,
                                    .on_upload_id = on_upload_id,
                                    .progress = on_progress,
                                    .outage_ms = UPLOAD_PREPARED_MS,
                                    .cond = condition(t->u, f->etag),
                                    .etag = f->etag,
                                    .gives_up = &t->it->gives_up,
                                    .leaves_strays = 1,
                                    .priority = priority(t->u, t->it),
                                    .op = &t->op,
                                    .look_first = f->look_first};

    return mb_store_put_file(t->u->store, &put, on_file_sent, t, err);
}

static void on_not_begun(struct transfer *t, int code, const char *text)
{
    on_failed(t, code, text);
    free_transfer(t);
}

static void on_strangers_aborted(void *arg, int code, const char *text)
{
    struct transfer *t = arg;
    struct mb_upload *u = t->u;
    struct mb_err err = {0};

    if (u->closing) {
        free_transfer(t);
        return;
    }
    if (code == MB_EEXIST) /* the look at the claim says who has it now */
        upload_look_again(u);
    else if (code != MB_OK && code != MB_EUNSUPPORTED)
        mb_err_set(&err, code, "%s", text);
    /* may_have_uploads stays: what a killed process had asked for may be carried out only now. */
    if (t->it->state == MB_PLAN_UPLOADING && code != MB_EEXIST) {
        if (err.code == MB_OK && send_it(t, &err) == MB_OK)
            return;
        on_not_begun(t, err.code, err.text);
    } else {
        mb_plan_file_back(t->file);
        free_transfer(t);
    }
    upload_kick(u);
}

static int begin_file(struct mb_upload *u, struct transfer *t, struct mb_plan_iteration *it,
                      struct mb_plan_file *f)
{
    struct mb_err err = {0};
    int rc = MB_ENOMEM;

    *t = (struct transfer){.u = u, .it = it, .file = f};
    t->key = mb_manifest_file_key(it->iteration, it->place, f->path);
    t->path = mb_path_join(it->dir, f->path);
    if (t->key == NULL || t->path == NULL)
        mb_err_set(&err, rc, "no memory");
    else if (f->may_have_uploads && f->upload_id == NULL)
        rc = upload_sweep(u, it, t->key, on_strangers_aborted, t, &err);
    else
        rc = send_it(t, &err);
    if (rc == MB_OK)
        return MB_OK;
    on_not_begun(t, rc, err.text);
    return MB_EIO;
}

static struct transfer *free_slot(struct mb_upload *u)
{
    for (size_t i = 0; i < UPLOAD_TRANSFERS_MAX; i++)
        if (u->transfers[i].it == NULL)
            return &u->transfers[i];
    return NULL;
}

/* What is preferred does not wait until a file of another iteration is through. */
static int may_begin(const struct mb_upload *u, const struct mb_plan_iteration *it)
{
    size_t n_all = 0, n_own = 0;

    for (size_t i = 0; i < UPLOAD_TRANSFERS_MAX; i++) {
        n_all += u->transfers[i].it != NULL;
        n_own += u->transfers[i].it == it;
    }
    return n_all < UPLOAD_IN_FLIGHT_MAX ||
           (mb_plan_is_preferred(u->plan, it) && n_own < UPLOAD_IN_FLIGHT_MAX);
}

static void begin_files(struct mb_upload *u)
{
    struct transfer *t;

    while ((t = free_slot(u)) != NULL) {
        struct mb_plan_iteration *it;
        struct mb_plan_file *f;

        if (!mb_plan_next(u->plan, &it, &f))
            return;
        /* Nothing of it may go before the look at fence and claim; a process that was stopped
         * meanwhile has to look again. */
        if (!may_begin(u, it) || !upload_is_prepared(u, it)) {
            mb_plan_file_back(f);
            return;
        }
        if (begin_file(u, t, it, f) != MB_OK)
            return;
    }
}

void upload_files(struct mb_upload *u)
{
    for (size_t i = 0; i < UPLOAD_TRANSFERS_MAX; i++)
        if (u->transfers[i].it != NULL && u->transfers[i].op != NULL)
            mb_store_put_set_priority(u->transfers[i].op, priority(u, u->transfers[i].it));
    begin_files(u);
}

/* ---- the part file ---- */

static void part_sent(struct mb_upload *u, struct mb_plan_iteration *it)
{
    struct mb_err err = {0};

    if (mb_journal_part(u->journal, it->iteration, &err) == MB_OK &&
        mb_plan_event(it, MB_PLAN_EV_PART_SENT, NULL, &err) == MB_OK) {
        upload_tell(u, it);
        return;
    }
    mb_error("upload", "%s", err.text);
    upload_back_off(u, 1);
}

/* As with what comes before the files: a store that is away is asked as often as it takes. */
static void part_failed(struct mb_upload *u, struct mb_plan_iteration *it, int code,
                        const char *text)
{
    it->part_failures = mb_plan_count_failure(it->part_failures, code);
    mb_warn("upload", "%s (try %u of %d)", text, it->part_failures, UPLOAD_TRIES_MAX);
    if (it->part_failures >= UPLOAD_TRIES_MAX)
        upload_drop(u, it, "its part file", text);
    else
        upload_back_off(u, it->part_failures);
}

/* Whose part is it? The same bytes: ours, from before a kill. */
static void on_part_there(void *arg, const struct mb_store_result *result)
{
    struct mb_upload *u = arg;
    struct mb_plan_iteration *it = u->part_it;
    int same = result->error == MB_OK && u->part_text != NULL &&
               result->data_len == strlen(u->part_text) &&
               memcmp(result->data, u->part_text, result->data_len) == 0;

    u->part_it = NULL;
    if (u->closing || it->state != MB_PLAN_UPLOADING)
        return;
    if (same) {
        part_sent(u, it);
    } else if (result->error == MB_OK || result->error == MB_ENOENT) {
        mb_free(it->part_etag);
        it->part_etag = result->error == MB_OK ? mb_strdup(result->etag) : NULL;
        upload_look_again(u);
    } else {
        part_failed(u, it, result->error, result->text);
    }
    upload_kick(u);
}

static void on_part_sent(void *arg, const struct mb_store_result *result)
{
    struct mb_upload *u = arg;
    struct mb_plan_iteration *it = u->part_it;
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err = {0};

    if (!u->closing && it->state == MB_PLAN_UPLOADING && result->error == MB_EEXIST &&
        mb_store_get(
            u->store, mb_part_key(it->iteration, u->opts.node_rank, u->opts.num_nodes, key),
            MB_MANIFEST_MAX_BYTES, UPLOAD_SMALL_TIMEOUT_MS, on_part_there, u, &err) == MB_OK)
        return;
    u->part_it = NULL;
    if (u->closing || it->state != MB_PLAN_UPLOADING)
        return;
    if (result->error == MB_OK) {
        part_sent(u, it);
    } else if (result->error == MB_EUNSUPPORTED && !u->no_conditions) {
        upload_lose_conditions(u);
    } else if (err.code != MB_OK) {
        part_failed(u, it, err.code, err.text);
    } else {
        part_failed(u, it, result->error, result->text);
    }
    upload_kick(u);
}

static int build_part(const struct mb_upload *u, const struct mb_plan_iteration *it, char **out,
                      struct mb_err *err)
{
    struct mb_manifest m = {.iteration = it->iteration,
                            .node_rank = (int32_t)u->opts.node_rank,
                            .num_nodes = u->opts.num_nodes};
    struct mb_manifest_writer writer = upload_writer(u);
    struct mb_manifest_file *files;
    int rc = mb_manifest_set_writer(&m, &writer, err);

    if (rc == MB_OK)
        rc = mb_manifest_set_data(&m, it->place, err);
    files = mb_reallocarray(NULL, it->n_files, sizeof(*files));
    if (rc == MB_OK && !files)
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    for (size_t i = 0; i < it->n_files && rc == MB_OK; i++)
        files[i] = (struct mb_manifest_file){it->files[i].path, it->files[i].size_bytes,
                                             it->files[i].crc64nvme};
    if (rc == MB_OK)
        rc = mb_manifest_add_all(&m, files, it->n_files, err);
    if (rc == MB_OK)
        rc = mb_manifest_encode(&m, out, err);
    mb_free(files);
    mb_manifest_close(&m);
    return rc;
}

void upload_part(struct mb_upload *u, struct mb_plan_iteration *it)
{
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err = {0};
    int rc;

    mb_free(u->part_text);
    u->part_text = NULL;
    rc = build_part(u, it, &u->part_text, &err);
    if (rc == MB_OK)
        rc = mb_store_put(u->store,
                          mb_part_key(it->iteration, u->opts.node_rank, u->opts.num_nodes, key),
                          u->part_text, strlen(u->part_text), condition(u, it->part_etag),
                          it->part_etag, UPLOAD_SMALL_TIMEOUT_MS, on_part_sent, u, &err);
    if (rc == MB_OK) {
        u->part_it = it;
    } else {
        part_failed(u, it, rc, err.text);
    }
}
