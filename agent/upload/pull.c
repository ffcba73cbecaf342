/*
 * Fetching a checkpoint.
 *
 * Happy path: pointer -> manifest -> files, 32 at a time -> everything onto the disk -> local
 * tracker file -> callback. Files are not synced one by one: the file system is, once, before the
 * tracker.
 *
 *  1. No pointer: nobody has come to move it yet. The newest whole one that has a manifest is
 * taken, with a warning; there is no manifest at all, only claims of writers: no checkpoint,
 * iteration -1, no error.
 *  2. The manifest is absent, damaged or longer than any, a file is absent, or has not the size and
 * CRC64NVME that the manifest says: the checkpoint is named in a warning, and the newest older one
 * that has a manifest is tried. None is left: MB_ECORRUPT with the first reason.
 *  3. A file that is there already with the right size is read and checked in the pool instead of
 *     being fetched: a restart on the same node costs no transfer.
 *  4. Files come under a temporary name with a random number (containers have equal pids), so that
 *     two nodes sharing a directory do not meet; a rename of equal contents over equal contents
 *     harms nobody. A big file is fetched by one of them, the others wait and then find it there;
 *     leftovers of dead pullers are removed by the next one that comes alone (pull_lock.h).
 *  5. Something of it is not there: perhaps keep-last removes it while it is fetched. The pointer
 *     is read again, a few times at most; if it names a newer one by now, that is fetched instead,
 *     else 2.
 *  6. An iteration that was asked for is fetched or it is an error: nothing older is taken.
 *  7. The store fails otherwise (no access, no route): that is the error, nothing older is tried.
 */
#include "agent/upload/pull_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"

enum {
    FILE_TIMEOUT_MS = 24 * 3600 * 1000,
    READ_CHUNK = 1 << 20,
    TEMP_NAME_MAX = 200,       /* a name may have 255 bytes, what is added takes up to 44 */
    LOCK_FROM_BYTES = 8 << 20, /* smaller files are fetched twice rather than waited for */
    LOCK_LOOK_MS = 200
};

static void step(struct mb_pull *p);

/* ---- the end ---- */

static void maybe_over(struct mb_pull *p);

static void on_timer_closed(uv_handle_t *h)
{
    struct mb_pull *p = h->data;

    p->timer_closed = 1;
    maybe_over(p);
}

static void maybe_over(struct mb_pull *p)
{
    if (p->busy > 0 || !p->store_closed)
        return;
    if (!p->timer_closing) {
        p->timer_closing = 1;
        uv_close((uv_handle_t *)&p->timer, on_timer_closed);
        return;
    }
    if (!p->timer_closed)
        return;
    for (size_t i = 0; i < PULL_SLOTS; i++)
        if (p->slots[i].waits)
            pull_end_slot(&p->slots[i]);
    pull_leave_dir(p);
    p->cb(p->arg, &p->result, p->iteration);
    mb_manifest_close(&p->manifest);
    mb_free(p->older);
    mb_free(p->local_dir);
    mb_free(p);
}

static void on_store_closed(void *arg)
{
    struct mb_pull *p = arg;

    p->store_closed = 1;
    maybe_over(p);
}

/* Requests in flight come back with MB_ECANCELED before the store reports that it is closed. */
void pull_finish(struct mb_pull *p, const struct mb_err *err, int64_t iteration)
{
    if (p->finishing)
        return;
    p->finishing = 1;
    atomic_store(&p->stops, 1);
    p->result = *err;
    p->iteration = iteration;
    mb_store_close(p->store, on_store_closed, p);
}

/* A request or a check came back; 0: the pull is over, nothing more may be begun. */
int pull_came_back(struct mb_pull *p)
{
    p->busy--;
    if (!p->finishing)
        return 1;
    maybe_over(p);
    return 0;
}

void mb_pull_set_filter(struct mb_pull *p, int (*wants)(void *arg, const char *path), void *arg)
{
    p->wants = wants;
    p->wants_arg = arg;
}

void mb_pull_set_iteration(struct mb_pull *p, int64_t iteration)
{
    p->wanted = iteration;
}

void mb_pull_set_direct(struct mb_pull *p)
{
    p->is_direct = 1;
}

void mb_pull_status(const struct mb_pull *p, struct mb_pull_status *out)
{
    *out = p->status;
    out->iteration = p->trying;
    out->why = p->first.code != MB_OK ? p->first.text : "";
}

void mb_pull_clear(struct mb_pull *p)
{
    for (size_t i = 0; i < PULL_SLOTS; i++) {
        if (p->slots[i].temporary != NULL)
            mb_pull_remove_temp(p->slots[i].temporary);
        pull_end_slot(&p->slots[i]);
    }
    pull_leave_dir(p);
}

void mb_pull_cancel(struct mb_pull *p)
{
    struct mb_err err;

    mb_err_set(&err, MB_ECANCELED, "cancelled");
    pull_finish(p, &err, -1);
}

void pull_started(struct mb_pull *p, int rc, const struct mb_err *err)
{
    if (rc == MB_OK)
        p->busy++;
    else
        pull_finish(p, err, -1);
}

void pull_leave_dir(struct mb_pull *p)
{
    if (p->iteration_dir != NULL)
        mb_pull_leave(p->iteration_dir, p->dir_fd);
    if (p->sync_fd >= 0)
        close(p->sync_fd);
    mb_free(p->iteration_dir);
    p->iteration_dir = NULL;
    p->dir_fd = p->sync_fd = -1;
}

/* ---- files ---- */

void pull_end_slot(struct pull_slot *s)
{
    if (s->path != NULL)
        mb_pull_file_done(s->path, s->lock_fd);
    s->lock_fd = -1;
    s->waits = 0;
    mb_free(s->path);
    mb_free(s->temporary);
    s->path = s->temporary = NULL;
    s->file = NULL;
}

static void file_is_bad(struct mb_pull *p, const struct pull_slot *s, const char *why)
{
    if (p->bad.code == MB_OK)
        mb_err_set(&p->bad, MB_ECORRUPT, "%s: %s", s->file->path, why);
}

static void file_is_there(struct mb_pull *p, const struct pull_slot *s)
{
    p->status.done_bytes += s->file->size_bytes - s->done_bytes;
    p->status.n_done++;
}

static void on_progress(void *arg, uint64_t done_bytes, uint64_t total_bytes)
{
    struct pull_slot *s = arg;

    (void)total_bytes;
    s->p->status.done_bytes += done_bytes - s->done_bytes;
    s->done_bytes = done_bytes;
}

static void on_file(void *arg, const struct mb_store_result *r)
{
    struct pull_slot *s = arg;
    struct mb_pull *p = s->p;

    if (r->error == MB_OK && !p->finishing) {
        if (r->size_bytes != s->file->size_bytes || r->crc64nvme != s->file->crc64nvme) {
            file_is_bad(p, s, "size or checksum differ from the manifest");
            unlink(s->temporary);
        } else if (file_is_there(p, s), rename(s->temporary, s->path) != 0) {
            struct mb_err err;

            mb_err_sys(&err, errno, "renaming to %s", s->path);
            pull_finish(p, &err, -1);
        }
    } else if (r->error == MB_ENOENT) {
        p->is_gone = 1;
        file_is_bad(p, s, "it is not there");
    } else if (r->error == MB_ECORRUPT) {
        file_is_bad(p, s, r->text);
    } else if (!p->finishing) {
        struct mb_err err;

        mb_err_set(&err, r->error, "%s: %s", s->file->path, r->text);
        pull_finish(p, &err, -1);
    } else {
        unlink(s->temporary);
    }
    pull_end_slot(s);
    if (pull_came_back(p))
        step(p);
}

static void fetch(struct pull_slot *s)
{
    struct mb_pull *p = s->p;
    char *key = mb_manifest_file_key(p->trying, p->manifest.data, s->file->path);
    struct mb_err err = {0};
    int rc = MB_ENOMEM;

    struct mb_store_get_file get = {.key = key,
                                    .path = s->temporary,
                                    .has_size = 1,
                                    .size_bytes = s->file->size_bytes,
                                    .is_lazy = 1,
                                    .is_direct = p->is_direct,
                                    .progress = on_progress};

    if (key != NULL)
        rc = mb_store_get_file_as(p->store, &get, on_file, s, &err);
    else
        mb_err_set(&err, rc, "no memory to fetch a checkpoint");
    mb_free(key);
    if (rc != MB_OK)
        pull_end_slot(s);
    pull_started(p, rc, &err);
}

/* In the pool: is the file there, and is it the right one? */
static void look_at_file(struct pull_slot *s)
{
    struct stat st;
    uint8_t *chunk;
    uint64_t crc = 0;
    ssize_t got = 0;
    int fd = open(s->path, O_RDONLY | O_CLOEXEC);

    s->matches = 0;
    if (fd < 0)
        return;
    chunk = mb_alloc(READ_CHUNK);
    if (chunk != NULL && fstat(fd, &st) == 0 && (uint64_t)st.st_size == s->file->size_bytes) {
        while (!atomic_load(&s->p->stops) && (got = read(fd, chunk, READ_CHUNK)) > 0)
            crc = mb_crc64nvme(crc, chunk, (size_t)got);
        s->matches = got == 0 && !atomic_load(&s->p->stops) && crc == s->file->crc64nvme;
    }
    mb_free(chunk);
    close(fd);
}

static int is_in_manifest(void *arg, const char *path)
{
    const struct mb_pull *p = arg;

    for (size_t i = 0; i < p->manifest.n_files; i++)
        if (strcmp(p->manifest.files[i].path, path) == 0)
            return 1;
    return 0;
}

/* The name of its lock is free, not that of another file. */
static int has_lock(const struct pull_slot *s)
{
    char *name = mb_asprintf("%s" MB_PULL_LOCK, s->file->path);
    int free_name = name != NULL && !is_in_manifest(s->p, name);

    mb_free(name);
    return free_name;
}

/* In the pool. Who gets the lock looks once more: the one before may have fetched it. */
static void check_local(uv_work_t *work)
{
    struct pull_slot *s = work->data;

    s->turn = MB_PULL_NO_LOCK;
    look_at_file(s);
    if (s->matches || s->file->size_bytes < LOCK_FROM_BYTES || atomic_load(&s->p->stops) ||
        !has_lock(s))
        return;
    s->turn = mb_pull_file_turn(s->path, &s->lock_fd);
    if (s->turn == MB_PULL_OURS)
        look_at_file(s);
}

static void on_lock_timer(uv_timer_t *timer);

static void on_checked(uv_work_t *work, int status)
{
    struct pull_slot *s = work->data;
    struct mb_pull *p = s->p;

    if (!pull_came_back(p)) {
        pull_end_slot(s);
        return;
    }
    s->done_bytes = 0;
    if (status == 0 && s->matches) {
        file_is_there(p, s);
        p->status.kept_bytes += s->file->size_bytes;
        pull_end_slot(s);
    } else if (status == 0 && s->turn == MB_PULL_WAIT) {
        s->waits = 1;
        if (!uv_is_active((uv_handle_t *)&p->timer))
            uv_timer_start(&p->timer, on_lock_timer, LOCK_LOOK_MS, 0);
        return;
    } else {
        fetch(s);
    }
    step(p);
}

/* Those that waited look again. */
static void on_lock_timer(uv_timer_t *timer)
{
    struct mb_pull *p = timer->data;
    struct mb_err err;

    for (size_t i = 0; i < PULL_SLOTS && !p->finishing; i++) {
        struct pull_slot *s = &p->slots[i];

        if (!s->waits)
            continue;
        s->waits = 0;
        if (uv_queue_work(p->loop, &s->work, check_local, on_checked) == 0)
            pull_started(p, MB_OK, NULL);
        else
            pull_started(p, mb_err_set(&err, MB_EIO, "the thread pool takes no work"), &err);
    }
}

static int waits(const struct mb_pull *p)
{
    for (size_t i = 0; i < PULL_SLOTS; i++)
        if (p->slots[i].waits)
            return 1;
    return 0;
}

/* Beside path; of a long name the beginning, so that all of it is a name, too. */
static char *temporary_of(const char *path)
{
    size_t dir_len = (size_t)(strrchr(path, '/') + 1 - path), name_len = strlen(path) - dir_len;

    return mb_asprintf("%.*s" MB_PULL_TEMP "%u",
                       (int)(dir_len + (name_len < TEMP_NAME_MAX ? name_len : TEMP_NAME_MAX)), path,
                       (unsigned)mb_random_u64());
}

static int begin_file(struct pull_slot *s, const struct mb_manifest_file *f, struct mb_err *err)
{
    struct mb_pull *p = s->p;
    char dir[MB_CHECKPOINT_KEY_MAX];
    char *slash;
    int rc;

    s->file = f;
    s->path = mb_asprintf("%s/%s/%s", p->local_dir, mb_iteration_dir(p->trying, dir), f->path);
    s->temporary = s->path != NULL ? temporary_of(s->path) : NULL;
    if (s->temporary == NULL) {
        pull_end_slot(s);
        return mb_err_set(err, MB_ENOMEM, "no memory to fetch a checkpoint");
    }
    slash = strrchr(s->path, '/');
    *slash = '\0';
    rc = mb_fs_mkdir_p(s->path, 0755, err);
    *slash = '/';
    if (rc == MB_OK) {
        s->work.data = s;
        rc = uv_queue_work(p->loop, &s->work, check_local, on_checked) == 0
                 ? MB_OK
                 : mb_err_set(err, MB_EIO, "the thread pool takes no work");
    }
    if (rc != MB_OK)
        pull_end_slot(s);
    return rc;
}

static void on_synced(uv_work_t *work, int status);

/* In the pool. */
static void sync_files(uv_work_t *work)
{
    struct mb_pull *p = work->data;

    if (p->sync_errno == 0 && syncfs(p->sync_fd) != 0)
        p->sync_errno = errno;
    mb_pull_tidy(p->iteration_dir, p->dir_fd, is_in_manifest, p);
}

static void begin_sync(struct mb_pull *p)
{
    struct mb_err err = {0};
    int rc;

    p->sync_work.data = p;
    rc = uv_queue_work(p->loop, &p->sync_work, sync_files, on_synced) == 0
             ? MB_OK
             : mb_err_set(&err, MB_EIO, "the thread pool takes no work");
    pull_started(p, rc, &err);
}

static void write_tracker(struct mb_pull *p)
{
    char *path = mb_path_join(p->local_dir, MB_LATEST_KEY);
    char text[32];
    struct mb_err err = {0};
    int n = snprintf(text, sizeof(text), "%" PRId64, p->trying);
    int rc = path != NULL ? mb_fs_write_atomic(path, text, (size_t)n, 0644, &err)
                          : mb_err_set(&err, MB_ENOMEM, "no memory");

    mb_free(path);
    pull_finish(p, &err, rc == MB_OK ? p->trying : -1);
}

static void on_synced(uv_work_t *work, int status)
{
    struct mb_pull *p = work->data;
    struct mb_err err;

    if (!pull_came_back(p))
        return;
    if (status == 0 && p->sync_errno == 0) {
        write_tracker(p);
        return;
    }
    mb_err_sys(&err, p->sync_errno, "bringing %s onto its disk", p->local_dir);
    pull_finish(p, &err, -1);
}

/* The next file that is wanted, or NULL. */
static const struct mb_manifest_file *take_file(struct mb_pull *p)
{
    while (p->next < p->manifest.n_files) {
        const struct mb_manifest_file *f = &p->manifest.files[p->next++];

        if (p->wants == NULL || p->wants(p->wants_arg, f->path))
            return f;
    }
    return NULL;
}

static void step(struct mb_pull *p)
{
    const struct mb_manifest_file *f;
    struct mb_err err;

    for (size_t i = 0; i < PULL_SLOTS && p->bad.code == MB_OK && !p->finishing; i++)
        if (p->slots[i].file == NULL && (f = take_file(p)) != NULL)
            pull_started(p, begin_file(&p->slots[i], f, &err), &err);
    if (p->busy > 0 || p->finishing || (waits(p) && p->bad.code == MB_OK))
        return;
    if (p->bad.code != MB_OK)
        pull_fall_back(p);
    else
        begin_sync(p);
}

/* ---- pointer and manifest ---- */

static void do_enter(uv_work_t *work)
{
    struct mb_pull *p = work->data;

    p->dir_fd = mb_pull_enter(p->iteration_dir, is_in_manifest, p);
    p->sync_fd = open(p->iteration_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    p->sync_errno = p->sync_fd < 0 ? errno : 0;
}

static void on_entered(uv_work_t *work, int status)
{
    struct mb_pull *p = work->data;

    (void)status; /* without the lock it goes as well */
    if (pull_came_back(p))
        step(p);
}

static void enter_dir(struct mb_pull *p)
{
    char name[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err = {0};
    int rc = MB_OK;

    p->iteration_dir = mb_path_join(p->local_dir, mb_iteration_dir(p->trying, name));
    p->sync_work.data = p;
    if (p->iteration_dir == NULL)
        rc = mb_err_set(&err, MB_ENOMEM, "no memory to fetch a checkpoint");
    else if (uv_queue_work(p->loop, &p->sync_work, do_enter, on_entered) != 0)
        rc = mb_err_set(&err, MB_EIO, "the thread pool takes no work");
    pull_started(p, rc, &err);
}

static int compare_key(const void *key, const void *entry)
{
    return strcmp(key, ((const struct mb_store_entry *)entry)->key);
}

/* All files, also those that are not fetched here. */
static void check_sizes(struct mb_pull *p, const struct mb_store_entry *entries, size_t n)
{
    for (size_t i = 0; i < p->manifest.n_files && p->bad.code == MB_OK; i++) {
        const struct mb_manifest_file *f = &p->manifest.files[i];
        char *key = mb_manifest_file_key(p->trying, p->manifest.data, f->path);
        const struct mb_store_entry *e =
            key != NULL && n > 0 ? bsearch(key, entries, n, sizeof(*entries), compare_key) : NULL;

        if (key == NULL)
            mb_err_set(&p->bad, MB_ENOMEM, "no memory to check a checkpoint");
        else if (e == NULL && (p->is_gone = 1))
            mb_err_set(&p->bad, MB_ECORRUPT, "%s: it is not there", f->path);
        else if (e->size_bytes != f->size_bytes)
            mb_err_set(&p->bad, MB_ECORRUPT, "%s: size or checksum differ from the manifest",
                       f->path);
        mb_free(key);
    }
}

static void on_sizes(void *arg, const struct mb_store_result *r)
{
    struct mb_pull *p = arg;

    if (!pull_came_back(p))
        return;
    if (r->error != MB_OK) {
        struct mb_err err;

        mb_err_set(&err, r->error, "files of iteration %" PRId64 ": %s", p->trying, r->text);
        pull_finish(p, &err, -1);
        return;
    }
    check_sizes(p, r->entries, r->n_entries);
    if (p->bad.code == MB_ENOMEM)
        pull_finish(p, &p->bad, -1);
    else if (p->bad.code != MB_OK)
        pull_fall_back(p);
    else
        enter_dir(p);
}

static void ask_for_sizes(struct mb_pull *p)
{
    char dir[MB_CHECKPOINT_KEY_MAX];
    char *below = mb_asprintf("%s/", mb_iteration_dir(p->trying, dir));
    struct mb_err err;
    int rc = below != NULL
                 ? mb_store_list(p->store, below, PULL_SMALL_TIMEOUT_MS, on_sizes, p, &err)
                 : mb_err_set(&err, MB_ENOMEM, "no memory to check a checkpoint");

    mb_free(below);
    pull_started(p, rc, &err);
}

static void on_manifest(void *arg, const struct mb_store_result *r)
{
    struct mb_pull *p = arg;

    if (!pull_came_back(p))
        return;
    if (r->error == MB_ENOENT) {
        p->is_gone = 1;
        mb_err_set(&p->bad, MB_ECORRUPT, "it has no manifest");
    } else if (r->error == MB_EFULL) {
        mb_err_set(&p->bad, MB_ECORRUPT, "its manifest is larger than any can be");
    } else if (r->error != MB_OK) {
        struct mb_err err;

        mb_err_set(&err, r->error, "manifest of iteration %" PRId64 ": %s", p->trying, r->text);
        pull_finish(p, &err, -1);
        return;
    } else {
        mb_manifest_decode(r->data, r->data_len, "manifest", &p->manifest, &p->bad);
    }
    if (p->bad.code == MB_OK && p->manifest.iteration != p->trying)
        mb_err_set(&p->bad, MB_ECORRUPT, "its manifest is of iteration %" PRId64,
                   p->manifest.iteration);
    if (p->bad.code != MB_OK) {
        pull_fall_back(p);
        return;
    }
    p->status = (struct mb_pull_status){.n_bad = p->status.n_bad};
    for (size_t i = 0; i < p->manifest.n_files; i++)
        if (p->wants == NULL || p->wants(p->wants_arg, p->manifest.files[i].path)) {
            p->status.n_files++;
            p->status.total_bytes += p->manifest.files[i].size_bytes;
        }
    mb_info("pull", "fetching iteration=%" PRId64 " files=%zu", p->trying, p->manifest.n_files);
    if (p->wants == NULL)
        enter_dir(p);
    else
        ask_for_sizes(p);
}

void pull_try(struct mb_pull *p, int64_t iteration)
{
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err;

    p->trying = iteration;
    p->next = 0;
    pull_started(p,
                 mb_store_get(p->store, mb_manifest_key(iteration, key), MB_MANIFEST_MAX_BYTES,
                              PULL_SMALL_TIMEOUT_MS, on_manifest, p, &err),
                 &err);
}

static void on_latest(void *arg, const struct mb_store_result *r)
{
    struct mb_pull *p = arg;
    int64_t iteration = -1;
    struct mb_err err = {0};

    if (!pull_came_back(p))
        return;
    if (r->error == MB_EFULL) /* too long for a number */
        mb_err_set(&err, MB_ECORRUPT, MB_LATEST_KEY ": %s", r->text);
    else if (r->error == MB_OK)
        mb_latest_parse(r->data, r->data_len, &iteration, &err);
    if (p->wanted >= 0 && (r->error == MB_OK || r->error == MB_ENOENT || r->error == MB_EFULL))
        pull_try(p, p->wanted);
    else if (r->error == MB_ENOENT)
        pull_without_pointer(p);
    else if (r->error != MB_OK && r->error != MB_EFULL) {
        mb_err_set(&err, r->error, MB_LATEST_KEY ": %s", r->text);
        pull_finish(p, &err, -1);
    } else if (err.code != MB_OK) {
        p->trying = INT64_MAX;
        p->bad = err;
        pull_fall_back(p);
    } else {
        p->newest = iteration;
        pull_try(p, iteration);
    }
}

static void on_unused_closed(void *arg)
{
    (void)arg;
}

int mb_pull_start(uv_loop_t *loop, const char *url, const char *local_dir, uint64_t outage_ms,
                  mb_pull_cb cb, void *arg, struct mb_pull **out, struct mb_err *err)
{
    struct mb_pull *p = mb_calloc(1, sizeof(*p));
    int rc;

    if (p != NULL)
        p->local_dir = mb_strdup(local_dir);
    if (p == NULL || p->local_dir == NULL) {
        mb_free(p);
        return mb_err_set(err, MB_ENOMEM, "no memory to fetch a checkpoint");
    }
    p->loop = loop;
    p->wanted = p->trying = p->newest = -1;
    p->cb = cb;
    p->arg = arg;
    p->dir_fd = p->sync_fd = -1;
    for (size_t i = 0; i < PULL_SLOTS; i++) {
        p->slots[i].p = p;
        p->slots[i].lock_fd = -1;
    }
    rc = mb_store_open(loop, url, &p->store, err);
    if (rc == MB_OK) {
        mb_store_set_outage(p->store, outage_ms);
        rc = mb_store_get(p->store, MB_LATEST_KEY, PULL_LATEST_MAX_BYTES, PULL_SMALL_TIMEOUT_MS,
                          on_latest, p, err);
        if (rc != MB_OK)
            mb_store_close(p->store, on_unused_closed, NULL);
    }
    if (rc != MB_OK) {
        mb_free(p->local_dir);
        mb_free(p);
        return rc;
    }
    uv_timer_init(loop, &p->timer);
    p->timer.data = p;
    p->busy = 1;
    *out = p;
    return MB_OK;
}
