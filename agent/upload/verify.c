/*
 * Pointer, manifest, then all files, MB_STORE_FILES_AT_ONCE at a time. The first that does not fit
 * ends it: no other is begun, and the verdict comes when those in flight are back.
 */
#include "agent/upload/verify.h"

#include <inttypes.h>
#include <stdio.h>
#include "agent/upload/manifest.h"
#include "base/alloc.h"

enum { SMALL_TIMEOUT_MS = 60000, LATEST_MAX_BYTES = 64 };

struct slot {
    struct mb_verify *v;
    size_t file;
    int busy;
    uint64_t done_bytes;
};

struct mb_verify {
    struct mb_store *store;
    mb_verify_cb cb;
    void *arg;
    struct mb_manifest manifest;
    struct mb_verify_result result;
    struct mb_err bad;
    size_t bad_file, next;
    unsigned in_flight;
    struct slot slots[MB_STORE_FILES_AT_ONCE];
};

static void finish(struct mb_verify *v, const struct mb_err *err)
{
    v->cb(v->arg, err, &v->result);
    mb_manifest_close(&v->manifest);
    mb_free(v);
}

void mb_verify_status(const struct mb_verify *v, struct mb_verify_result *out)
{
    *out = v->result;
}

static void check_more(struct mb_verify *v);

static void note_bad(struct mb_verify *v, size_t file, const struct mb_err *err)
{
    if (v->bad.code != 0 && v->bad_file < file)
        return;
    v->bad = *err;
    v->bad_file = file;
}

static void on_file(void *arg, const struct mb_store_result *r)
{
    struct slot *s = arg;
    struct mb_verify *v = s->v;
    const struct mb_manifest_file *f = &v->manifest.files[s->file];
    struct mb_err err = {0};

    s->busy = 0;
    v->in_flight--;
    if (r->error == MB_ENOENT)
        mb_err_set(&err, MB_ECORRUPT, "iteration %" PRId64 ": %s is in the manifest but not there",
                   v->manifest.iteration, f->path);
    else if (r->error)
        mb_err_set(&err, r->error, "iteration %" PRId64 ": %s: %s", v->manifest.iteration, f->path,
                   r->text);
    else if (r->size_bytes != f->size_bytes || r->crc64nvme != f->crc64nvme)
        mb_err_set(&err, MB_ECORRUPT,
                   "iteration %" PRId64 ": %s has %" PRIu64 " bytes with CRC64NVME %016" PRIx64
                   "; the manifest says %" PRIu64 " bytes with %016" PRIx64,
                   v->manifest.iteration, f->path, r->size_bytes, r->crc64nvme, f->size_bytes,
                   f->crc64nvme);
    if (err.code) {
        note_bad(v, s->file, &err);
    } else {
        v->result.n_files++;
        v->result.total_bytes += f->size_bytes;
        v->result.done_bytes += f->size_bytes - s->done_bytes;
    }
    check_more(v);
}

static void on_progress(void *arg, uint64_t done_bytes, uint64_t total_bytes)
{
    struct slot *s = arg;

    (void)total_bytes;
    s->v->result.done_bytes += done_bytes - s->done_bytes;
    s->done_bytes = done_bytes;
}

static int check_one(struct mb_verify *v, struct slot *s, size_t file, struct mb_err *err)
{
    const struct mb_manifest_file *f = &v->manifest.files[file];
    char *key = mb_manifest_file_key(v->manifest.iteration, v->manifest.data, f->path);
    struct mb_store_get_file get = {
        .key = key, .has_size = 1, .size_bytes = f->size_bytes, .progress = on_progress};
    int rc;

    *s = (struct slot){.v = v, .file = file, .busy = 1};
    rc = key ? mb_store_get_file_as(v->store, &get, on_file, s, err)
             : mb_err_set(err, MB_ENOMEM, "out of memory");
    mb_free(key);
    if (rc == 0)
        v->in_flight++;
    else
        s->busy = 0;
    return rc;
}

static void check_more(struct mb_verify *v)
{
    for (size_t i = 0; i < MB_STORE_FILES_AT_ONCE; i++) {
        struct mb_err err = {0};

        if (v->bad.code != 0 || v->next == v->manifest.n_files)
            break;
        if (v->slots[i].busy)
            continue;
        if (check_one(v, &v->slots[i], v->next, &err) != 0)
            note_bad(v, v->next, &err);
        v->next++;
    }
    if (v->in_flight == 0)
        finish(v, &v->bad);
}

static void on_manifest(void *arg, const struct mb_store_result *r)
{
    struct mb_verify *v = arg;
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err = {0};

    mb_manifest_key(v->result.iteration, key);
    if (r->error == MB_ENOENT)
        mb_err_set(&err, MB_ECORRUPT, "iteration %" PRId64 " is not whole: %s is not there",
                   v->result.iteration, key);
    else if (r->error)
        mb_err_set(&err, r->error, "%s: %s", key, r->text);
    else
        mb_manifest_decode(r->data, r->data_len, key, &v->manifest, &err);
    if (!err.code && v->manifest.iteration != v->result.iteration)
        mb_err_set(&err, MB_ECORRUPT, "%s is the manifest of iteration %" PRId64, key,
                   v->manifest.iteration);
    if (err.code) {
        finish(v, &err);
        return;
    }
    v->result.all_files = v->manifest.n_files;
    for (size_t i = 0; i < v->manifest.n_files; i++)
        v->result.all_bytes += v->manifest.files[i].size_bytes;
    check_more(v);
}

static int get_manifest(struct mb_verify *v, struct mb_err *err)
{
    char key[MB_CHECKPOINT_KEY_MAX];

    return mb_store_get(v->store, mb_manifest_key(v->result.iteration, key), MB_MANIFEST_MAX_BYTES,
                        SMALL_TIMEOUT_MS, on_manifest, v, err);
}

static void on_latest(void *arg, const struct mb_store_result *r)
{
    struct mb_verify *v = arg;
    struct mb_err err = {0};

    if (r->error == MB_ENOENT)
        mb_err_set(&err, MB_ENOENT, "no checkpoint: there is no " MB_LATEST_KEY);
    else if (r->error)
        mb_err_set(&err, r->error, MB_LATEST_KEY ": %s", r->text);
    else if (mb_latest_parse(r->data, r->data_len, &v->result.iteration, &err) == 0)
        get_manifest(v, &err);
    if (err.code)
        finish(v, &err);
}

int mb_verify_start(struct mb_store *store, int64_t iteration, mb_verify_cb cb, void *arg,
                    struct mb_verify **out, struct mb_err *err)
{
    struct mb_verify *v = mb_calloc(1, sizeof(*v));
    int rc;

    if (!v)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    v->store = store;
    v->cb = cb;
    v->arg = arg;
    v->result.iteration = iteration;
    rc = iteration >= 0 ? get_manifest(v, err)
                        : mb_store_get(store, MB_LATEST_KEY, LATEST_MAX_BYTES, SMALL_TIMEOUT_MS,
                                       on_latest, v, err);
    if (rc < 0)
        mb_free(v);
    else
        *out = v;
    return rc;
}
