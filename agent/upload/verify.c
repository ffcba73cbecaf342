/*
 * One request after the other: pointer, manifest, then each file into scratch_dir and away again.
 * The first thing that does not fit ends it.
 */
#include "agent/upload/verify.h"

#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>
#include "agent/upload/manifest.h"
#include "base/alloc.h"
#include "base/fs.h"

enum { SMALL_TIMEOUT_MS = 60000, FILE_TIMEOUT_MS = 24 * 3600 * 1000, LATEST_MAX_BYTES = 64 };

struct verify {
    struct mb_store *store;
    char *scratch; /* path of the one file that is read back */
    mb_verify_cb cb;
    void *arg;
    struct mb_manifest manifest;
    struct mb_verify_result result;
    size_t next;
};

static void finish(struct verify *v, const struct mb_err *err)
{
    v->cb(v->arg, err, &v->result);
    mb_manifest_close(&v->manifest);
    mb_free(v->scratch);
    mb_free(v);
}

static void check_next(struct verify *v);

static void on_file(void *arg, const struct mb_store_result *r)
{
    struct verify *v = arg;
    const struct mb_manifest_file *f = &v->manifest.files[v->next];
    struct mb_err err = {0};

    unlink(v->scratch);
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
        finish(v, &err);
        return;
    }
    v->result.n_files++;
    v->result.total_bytes += f->size_bytes;
    v->next++;
    check_next(v);
}

static void check_next(struct verify *v)
{
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err = {0};
    char *path;

    if (v->next == v->manifest.n_files) {
        finish(v, &err);
        return;
    }
    mb_iteration_dir(v->manifest.iteration, key);
    path = mb_asprintf("%s/%s", key, v->manifest.files[v->next].path);
    if (!path)
        mb_err_set(&err, MB_ENOMEM, "out of memory");
    else
        mb_store_get_file(v->store, path, v->scratch, NULL, FILE_TIMEOUT_MS, on_file, v, &err);
    mb_free(path);
    if (err.code)
        finish(v, &err);
}

static void on_manifest(void *arg, const struct mb_store_result *r)
{
    struct verify *v = arg;
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err = {0};

    mb_manifest_key(v->result.iteration, key);
    if (r->error == MB_ENOENT)
        mb_err_set(&err, MB_ECORRUPT,
                   "the latest pointer names iteration %" PRId64 ", but %s is not "
                   "there",
                   v->result.iteration, key);
    else if (r->error)
        mb_err_set(&err, r->error, "%s: %s", key, r->text);
    else
        mb_manifest_decode(r->data, r->data_len, key, &v->manifest, &err);
    if (!err.code && v->manifest.iteration != v->result.iteration)
        mb_err_set(&err, MB_ECORRUPT, "%s is the manifest of iteration %" PRId64, key,
                   v->manifest.iteration);
    if (err.code)
        finish(v, &err);
    else
        check_next(v);
}

static void on_latest(void *arg, const struct mb_store_result *r)
{
    struct verify *v = arg;
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err = {0};

    if (r->error == MB_ENOENT)
        mb_err_set(&err, MB_ENOENT, "no checkpoint: there is no " MB_LATEST_KEY);
    else if (r->error)
        mb_err_set(&err, r->error, MB_LATEST_KEY ": %s", r->text);
    else if (mb_latest_parse(r->data, r->data_len, &v->result.iteration, &err) == 0)
        mb_store_get(v->store, mb_manifest_key(v->result.iteration, key), MB_MANIFEST_MAX_BYTES,
                     SMALL_TIMEOUT_MS, on_manifest, v, &err);
    if (err.code)
        finish(v, &err);
}

int mb_verify_start(struct mb_store *store, const char *scratch_dir, mb_verify_cb cb, void *arg,
                    struct mb_err *err)
{
    struct verify *v = mb_calloc(1, sizeof(*v));
    int rc;

    if (!v || !(v->scratch = mb_asprintf("%s/verify-%d", scratch_dir, (int)getpid()))) {
        mb_free(v);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    v->store = store;
    v->cb = cb;
    v->arg = arg;
    v->result.iteration = -1;
    rc = mb_store_get(store, MB_LATEST_KEY, LATEST_MAX_BYTES, SMALL_TIMEOUT_MS, on_latest, v, err);
    if (rc < 0) {
        mb_free(v->scratch);
        mb_free(v);
    }
    return rc;
}
