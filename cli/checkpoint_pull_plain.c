/*
 * 1. One listing. 2. MB_STORE_FILES_AT_ONCE objects at a time, in its order. 3. The store is
 * closed, which ends what a failure or a signal has left under way.
 */
#include "cli/checkpoint_pull_plain.h"

#include <fnmatch.h>
#include <string.h>
#include <sys/stat.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/s3/store.h"
#include "base/str.h"
#include "cli/checkpoint.h"

enum { LIST_TIMEOUT_MS = 600 * 1000 };

struct object {
    struct run *run;
    char *key;
    uint64_t size_bytes, done_bytes;
};

struct run {
    struct mb_checkpoint_loop l;
    struct mb_store *store;
    struct mb_err err;
    const char *url, *dir;
    const struct mb_plain_wishes *wishes;
    struct object *objects;
    size_t n, next, busy, n_done;
    uint64_t total_bytes, kept_bytes;
    int is_closing;
};

static void on_closed(void *arg)
{
    mb_checkpoint_loop_stop(&((struct run *)arg)->l);
}

static void finish(struct run *r)
{
    if (r->is_closing)
        return;
    r->is_closing = 1;
    mb_store_close(r->store, on_closed, r);
}

static void fail(struct run *r, const struct mb_err *err)
{
    if (r->err.code == 0)
        r->err = *err;
    finish(r);
}

static void on_progress(void *arg, uint64_t done_bytes, uint64_t total_bytes)
{
    (void)total_bytes;
    ((struct object *)arg)->done_bytes = done_bytes;
}

static void go_on(struct run *r);

static void on_file(void *arg, const struct mb_store_result *res)
{
    struct object *o = arg;
    struct run *r = o->run;
    struct mb_err err;

    r->busy--;
    if (res->error != 0) {
        mb_err_set(&err, res->error, "%s", res->text);
        fail(r, &err);
        return;
    }
    o->done_bytes = o->size_bytes;
    r->n_done++;
    go_on(r);
}

static int is_there(const char *path, uint64_t size_bytes)
{
    struct stat st;

    return stat(path, &st) == 0 && S_ISREG(st.st_mode) && (uint64_t)st.st_size == size_bytes;
}

/* The directories that a key names are made; the file appears when it is whole. */
static int begin(struct run *r, struct object *o, struct mb_err *err)
{
    char *path = mb_path_join(r->dir, o->key), *slash = path != NULL ? strrchr(path, '/') : NULL;
    struct mb_store_get_file req = {.key = o->key,
                                    .path = path,
                                    .has_size = 1,
                                    .size_bytes = o->size_bytes,
                                    .is_direct = !r->wishes->cached,
                                    .progress = on_progress};
    int rc = slash != NULL ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");

    if (rc == 0 && is_there(path, o->size_bytes)) {
        r->kept_bytes += o->size_bytes;
        r->n_done++;
        mb_free(path);
        return 0;
    }
    if (rc == 0) {
        *slash = '\0';
        rc = mb_fs_mkdir_p(path, 0777, err);
        *slash = '/';
    }
    if (rc == 0)
        rc = mb_store_get_file_as(r->store, &req, on_file, o, err);
    r->busy += rc == 0;
    mb_free(path);
    return rc;
}

static void go_on(struct run *r)
{
    struct mb_err err;

    while (!r->is_closing && r->next < r->n && r->busy < MB_STORE_FILES_AT_ONCE)
        if (begin(r, &r->objects[r->next++], &err) != 0)
            fail(r, &err);
    if (r->busy == 0 && r->next == r->n)
        finish(r);
}

/* No key leads out of dir, and none is a "directory" that a browser of buckets has made. */
static int is_file_below(const char *key)
{
    size_t n;

    for (;; key += n + 1) {
        n = strcspn(key, "/");
        if (n == 0 || (n <= 2 && strncmp(key, "..", n) == 0))
            return 0;
        if (key[n] == '\0')
            return 1;
    }
}

static void on_list(void *arg, const struct mb_store_result *res)
{
    struct run *r = arg;
    struct mb_err err;

    if (res->error != 0) {
        mb_err_set(&err, res->error, "%s", res->text);
        fail(r, &err);
        return;
    }
    r->objects = mb_calloc(res->n_entries + 1, sizeof(*r->objects));
    for (size_t i = 0; r->objects != NULL && i < res->n_entries; i++) {
        const struct mb_store_entry *e = &res->entries[i];
        struct object *o = &r->objects[r->n];

        if (!is_file_below(e->key) ||
            (r->wishes->files != NULL && fnmatch(r->wishes->files, e->key, 0) != 0))
            continue;
        *o = (struct object){.run = r, .key = mb_strdup(e->key), .size_bytes = e->size_bytes};
        if (o->key == NULL)
            break;
        r->n++;
        r->total_bytes += e->size_bytes;
    }
    if (r->objects == NULL || (r->objects[r->n].run != NULL && r->objects[r->n].key == NULL))
        mb_err_set(&r->err, MB_ENOMEM, "out of memory");
    else if (r->n == 0)
        mb_err_set(&r->err, MB_ENOENT, "%s: no object%s%s", r->url,
                   r->wishes->files != NULL ? " that matches " : "",
                   r->wishes->files != NULL ? r->wishes->files : "");
    if (r->err.code != 0)
        finish(r);
    else
        go_on(r);
}

static void get_facts(void *arg, struct mb_transfer_facts *out)
{
    struct run *r = arg;
    uint64_t done = r->kept_bytes;

    for (size_t i = 0; i < r->next; i++)
        done += r->objects[i].done_bytes;
    *out = (struct mb_transfer_facts){.verb = "pull",
                                      .phase = "fetching",
                                      .iteration = -1,
                                      .done_bytes = done,
                                      .kept_bytes = r->kept_bytes,
                                      .total_bytes = r->total_bytes,
                                      .n_done = r->n_done,
                                      .n_files = r->n};
}

static void cancel(void *arg)
{
    struct mb_err err;

    mb_err_set(&err, MB_ECANCELED, "interrupted");
    fail(arg, &err);
}

int mb_checkpoint_pull_plain(const char *url, const char *dir, const struct mb_plain_wishes *wishes,
                             struct mb_plain_result *out, struct mb_err *err)
{
    struct run r = {.url = url, .dir = dir, .wishes = wishes};

    if (mb_checkpoint_loop_init(&r.l, wishes->json, &r.err) == 0) {
        int is_open = mb_fs_mkdir_p(dir, 0777, &r.err) == 0 &&
                      mb_store_open(&r.l.loop, url, &r.store, &r.err) == 0;

        if (is_open)
            mb_store_set_outage(r.store, wishes->retry_for_ms);
        if (is_open && mb_store_list(r.store, "", LIST_TIMEOUT_MS, on_list, &r, &r.err) != 0)
            finish(&r);
        mb_checkpoint_loop_run(&r.l, is_open ? get_facts : NULL, cancel, &r);
    }
    for (size_t i = 0; i < r.n; i++)
        mb_free(r.objects[i].key);
    mb_free(r.objects);
    *out = (struct mb_plain_result){r.n, r.total_bytes, r.kept_bytes};
    *err = r.err;
    return r.err.code;
}
