/*
 * Fetching a checkpoint.
 *
 * Happy path: pointer -> manifest -> files, four at a time -> local tracker file -> callback.
 *
 *  1. No pointer: there is no checkpoint, iteration -1, no error.
 *  2. The manifest is absent or damaged, a file is absent, or has not the size and CRC64NVME that
 *     the manifest says: the checkpoint is named in a warning, and the newest older one that has a
 *     manifest is tried. None is left: MB_ECORRUPT with the first reason.
 *  3. A file that is there already with the right size is read and checked in the pool instead of
 *     being fetched: a restart on the same node costs no transfer.
 *  4. Files come under a temporary name with our pid, so that two nodes sharing a directory do not
 *     meet; a rename of equal contents over equal contents harms nobody.
 *  5. The store fails otherwise (no access, no route): that is the error, nothing older is tried.
 */
#include "agent/upload/pull.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "agent/upload/manifest.h"
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/s3/store.h"
#include "base/str.h"

enum {
    SLOTS = 4,
    SMALL_TIMEOUT_MS = 60000,
    FILE_TIMEOUT_MS = 24 * 3600 * 1000,
    LATEST_MAX_BYTES = 64,
    READ_CHUNK = 1 << 20
};

struct slot {
    struct mb_pull *p;
    const struct mb_manifest_file *file; /* NULL: free */
    char *path;                          /* where it belongs */
    char *temporary;
    uv_work_t work;
    int matches; /* what the check in the pool found */
};

struct mb_pull {
    uv_loop_t *loop;
    struct mb_store *store;
    char *local_dir;
    mb_pull_cb cb;
    void *arg;
    struct mb_manifest manifest;
    int64_t trying;
    int64_t *older; /* ascending; those not tried yet are the first n_older */
    size_t n_older;
    int has_listed;
    size_t next; /* file to start next */
    unsigned busy;
    struct slot slots[SLOTS];
    struct mb_err first; /* why the newest was not good */
    struct mb_err bad;   /* why the present one is not; code 0: nothing yet */
    struct mb_err result;
    int64_t iteration;
    int finishing;
    int store_closed;
};

static void try_iteration(struct mb_pull *p, int64_t iteration);
static void step(struct mb_pull *p);

/* ---- the end ---- */

static void maybe_over(struct mb_pull *p)
{
    if (p->busy > 0 || !p->store_closed)
        return;
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
static void finish(struct mb_pull *p, const struct mb_err *err, int64_t iteration)
{
    if (p->finishing)
        return;
    p->finishing = 1;
    p->result = *err;
    p->iteration = iteration;
    mb_store_close(p->store, on_store_closed, p);
}

/* A request or a check came back; 0: the pull is over, nothing more may be begun. */
static int came_back(struct mb_pull *p)
{
    p->busy--;
    if (!p->finishing)
        return 1;
    maybe_over(p);
    return 0;
}

void mb_pull_cancel(struct mb_pull *p)
{
    struct mb_err err;

    mb_err_set(&err, MB_ECANCELED, "cancelled");
    finish(p, &err, -1);
}

static void started(struct mb_pull *p, int rc, const struct mb_err *err)
{
    if (rc == MB_OK)
        p->busy++;
    else
        finish(p, err, -1);
}

/* ---- older checkpoints ---- */

static void try_next_older(struct mb_pull *p)
{
    if (p->n_older == 0) {
        mb_err_wrap(&p->first, "no whole checkpoint is there; the newest");
        p->first.code = MB_ECORRUPT;
        finish(p, &p->first, -1);
        return;
    }
    try_iteration(p, p->older[--p->n_older]);
}

static int compare_i64(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

    return (x > y) - (x < y);
}

static void on_list(void *arg, const struct mb_store_result *r)
{
    struct mb_pull *p = arg;
    struct mb_err err;

    if (!came_back(p))
        return;
    if (r->error != MB_OK) {
        mb_err_set(&err, r->error, "looking for older checkpoints: %s", r->text);
        finish(p, &err, -1);
        return;
    }
    p->has_listed = 1;
    p->older = mb_calloc(r->n_entries, sizeof(*p->older));
    for (size_t i = 0; p->older != NULL && i < r->n_entries; i++) {
        char *end = NULL;
        long long n;

        if (!mb_starts_with(r->entries[i].key, "iter_"))
            continue;
        n = strtoll(r->entries[i].key + 5, &end, 10);
        if (strcmp(end, "/.mobula/manifest.json") == 0 && n < p->trying)
            p->older[p->n_older++] = n;
    }
    if (p->n_older > 0)
        qsort(p->older, p->n_older, sizeof(*p->older), compare_i64);
    try_next_older(p);
}

/* The present checkpoint is not whole: p->bad says why. */
static void fall_back(struct mb_pull *p)
{
    struct mb_err err;

    mb_warn("pull", "checkpoint of iteration %" PRId64 " is not whole: %s; trying the one before",
            p->trying, p->bad.text);
    if (p->first.code == MB_OK)
        p->first = p->bad;
    mb_err_clear(&p->bad);
    mb_manifest_close(&p->manifest);
    p->manifest = (struct mb_manifest){0};
    if (p->has_listed)
        try_next_older(p);
    else
        started(p, mb_store_list(p->store, "iter_", SMALL_TIMEOUT_MS, on_list, p, &err), &err);
}

/* ---- files ---- */

static void end_slot(struct slot *s)
{
    mb_free(s->path);
    mb_free(s->temporary);
    s->path = s->temporary = NULL;
    s->file = NULL;
}

static void file_is_bad(struct mb_pull *p, const struct slot *s, const char *why)
{
    if (p->bad.code == MB_OK)
        mb_err_set(&p->bad, MB_ECORRUPT, "%s: %s", s->file->path, why);
}

static void on_file(void *arg, const struct mb_store_result *r)
{
    struct slot *s = arg;
    struct mb_pull *p = s->p;

    if (r->error == MB_OK && !p->finishing) {
        if (r->size_bytes != s->file->size_bytes || r->crc64nvme != s->file->crc64nvme) {
            file_is_bad(p, s, "size or checksum differ from the manifest");
            unlink(s->temporary);
        } else if (rename(s->temporary, s->path) != 0) {
            struct mb_err err;

            mb_err_sys(&err, errno, "renaming to %s", s->path);
            finish(p, &err, -1);
        }
    } else if (r->error == MB_ENOENT) {
        file_is_bad(p, s, "it is not there");
    } else if (!p->finishing) {
        struct mb_err err;

        mb_err_set(&err, r->error, "%s: %s", s->file->path, r->text);
        finish(p, &err, -1);
    } else {
        unlink(s->temporary);
    }
    end_slot(s);
    if (came_back(p))
        step(p);
}

static void fetch(struct slot *s)
{
    struct mb_pull *p = s->p;
    char dir[MB_CHECKPOINT_KEY_MAX];
    char *key = mb_asprintf("%s/%s", mb_iteration_dir(p->trying, dir), s->file->path);
    struct mb_err err = {0};
    int rc = MB_ENOMEM;

    if (key != NULL)
        rc =
            mb_store_get_file(p->store, key, s->temporary, NULL, FILE_TIMEOUT_MS, on_file, s, &err);
    else
        mb_err_set(&err, rc, "no memory to fetch a checkpoint");
    mb_free(key);
    if (rc != MB_OK)
        end_slot(s);
    started(p, rc, &err);
}

/* In the pool: is the file there, and is it the right one? */
static void check_local(uv_work_t *work)
{
    struct slot *s = work->data;
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
        while ((got = read(fd, chunk, READ_CHUNK)) > 0)
            crc = mb_crc64nvme(crc, chunk, (size_t)got);
        s->matches = got == 0 && crc == s->file->crc64nvme;
    }
    mb_free(chunk);
    close(fd);
}

static void on_checked(uv_work_t *work, int status)
{
    struct slot *s = work->data;
    struct mb_pull *p = s->p;

    if (!came_back(p)) {
        end_slot(s);
        return;
    }
    if (status == 0 && s->matches)
        end_slot(s);
    else
        fetch(s);
    step(p);
}

static int begin_file(struct slot *s, const struct mb_manifest_file *f, struct mb_err *err)
{
    struct mb_pull *p = s->p;
    char dir[MB_CHECKPOINT_KEY_MAX];
    char *slash;
    int rc;

    s->file = f;
    s->path = mb_asprintf("%s/%s/%s", p->local_dir, mb_iteration_dir(p->trying, dir), f->path);
    s->temporary = s->path != NULL ? mb_asprintf("%s.pull-%d", s->path, (int)getpid()) : NULL;
    if (s->temporary == NULL) {
        end_slot(s);
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
        end_slot(s);
    return rc;
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
    finish(p, &err, rc == MB_OK ? p->trying : -1);
}

static void step(struct mb_pull *p)
{
    struct mb_err err;

    for (size_t i = 0; i < SLOTS && p->bad.code == MB_OK && !p->finishing; i++)
        if (p->slots[i].file == NULL && p->next < p->manifest.n_files)
            started(p, begin_file(&p->slots[i], &p->manifest.files[p->next++], &err), &err);
    if (p->busy > 0 || p->finishing)
        return;
    if (p->bad.code != MB_OK)
        fall_back(p);
    else
        write_tracker(p);
}

/* ---- pointer and manifest ---- */

static void on_manifest(void *arg, const struct mb_store_result *r)
{
    struct mb_pull *p = arg;

    if (!came_back(p))
        return;
    if (r->error == MB_ENOENT) {
        mb_err_set(&p->bad, MB_ECORRUPT, "it has no manifest");
    } else if (r->error != MB_OK) {
        struct mb_err err;

        mb_err_set(&err, r->error, "manifest of iteration %" PRId64 ": %s", p->trying, r->text);
        finish(p, &err, -1);
        return;
    } else {
        mb_manifest_decode(r->data, r->data_len, "manifest", &p->manifest, &p->bad);
    }
    if (p->bad.code == MB_OK && p->manifest.iteration != p->trying)
        mb_err_set(&p->bad, MB_ECORRUPT, "its manifest is of iteration %" PRId64,
                   p->manifest.iteration);
    if (p->bad.code != MB_OK) {
        fall_back(p);
        return;
    }
    mb_info("pull", "fetching iteration=%" PRId64 " files=%zu", p->trying, p->manifest.n_files);
    step(p);
}

static void try_iteration(struct mb_pull *p, int64_t iteration)
{
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err;

    p->trying = iteration;
    p->next = 0;
    started(p,
            mb_store_get(p->store, mb_manifest_key(iteration, key), MB_MANIFEST_MAX_BYTES,
                         SMALL_TIMEOUT_MS, on_manifest, p, &err),
            &err);
}

static void on_latest(void *arg, const struct mb_store_result *r)
{
    struct mb_pull *p = arg;
    int64_t iteration = -1;
    struct mb_err err = {0};

    if (!came_back(p))
        return;
    if (r->error == MB_ENOENT)
        finish(p, &err, -1);
    else if (r->error != MB_OK) {
        mb_err_set(&err, r->error, MB_LATEST_KEY ": %s", r->text);
        finish(p, &err, -1);
    } else if (mb_latest_parse(r->data, r->data_len, &iteration, &err) != MB_OK) {
        p->trying = INT64_MAX;
        p->bad = err;
        fall_back(p);
    } else {
        try_iteration(p, iteration);
    }
}

static void on_unused_closed(void *arg)
{
    (void)arg;
}

int mb_pull_start(uv_loop_t *loop, const char *url, const char *local_dir, mb_pull_cb cb, void *arg,
                  struct mb_pull **out, struct mb_err *err)
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
    p->cb = cb;
    p->arg = arg;
    for (size_t i = 0; i < SLOTS; i++)
        p->slots[i].p = p;
    rc = mb_store_open(loop, url, &p->store, err);
    if (rc == MB_OK) {
        rc = mb_store_get(p->store, MB_LATEST_KEY, LATEST_MAX_BYTES, SMALL_TIMEOUT_MS, on_latest, p,
                          err);
        if (rc != MB_OK)
            mb_store_close(p->store, on_unused_closed, NULL);
    }
    if (rc != MB_OK) {
        mb_free(p->local_dir);
        mb_free(p);
        return rc;
    }
    p->busy = 1;
    *out = p;
    return MB_OK;
}
