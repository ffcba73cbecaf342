/*
 * Fetching what ranks read.
 *
 *  One input after the other:
 *  1. Ask the store for size and ETag of each object (of a tokenizer that is no object: the list of
 *     its directory). They and the URL name the local directory.
 *  2. Everything is there with its size: next input. Names appear only when files are whole, so
 *     a name with the right size is the file.
 *  3. Take the directory's lock; while another has it, look again every LOCK_TICK_MS (it may have
 *     brought everything: 2). A fetcher that died has left the lock and temporary files, which go.
 *  4. Fetch what is missing; what comes has to have the size and ETag of 1.
 *  A checkpoint is pulled (upload/pull.h) into a directory named by its URL alone, under its lock.
 * Failures: an object that is not there, or another one now; a store that does not answer; a disk
 * that is full; a file system without locks: the text names URL or file. What was fetched stays.
 */
#include "agent/upload/inputs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include "agent/upload/inputs_plan.h"
#include "agent/upload/pull.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/s3/store.h"
#include "base/str.h"

enum {
    ASK_TIMEOUT_MS = 60000,
    LOCK_TICK_MS = 200,
    TEXT_EVERY_MS = 5000,
    FILES_MAX = 64 /* of one input */
};
#define FETCH_TIMEOUT_MS (24ull * 3600 * 1000)

static const char LOCK_NAME[] = ".lock";

struct file {
    struct mb_inputs *in;
    struct mb_input_file f;
    uint64_t done_bytes;
};

struct mb_inputs {
    uv_loop_t *loop;
    uv_timer_t timer; /* the beginning, the lock */
    char *dir;
    struct mb_input *list;
    char **paths;
    size_t n, at;
    const struct mb_inputs_ops *ops;
    void *arg;

    /* of the input at `at` */
    struct mb_store *store;
    struct mb_pull *pull;
    char *name;
    char *local; /* directory */
    struct file files[FILES_MAX];
    size_t n_files;
    unsigned busy; /* requests in flight */
    int is_directory, said_waiting;
    int lock_fd;
    uint64_t began_ms, said_ms;

    struct mb_err err;
    int finishing, store_closing;
};

static void begin_input(struct mb_inputs *in);
static void on_tick(uv_timer_t *t);

static const char *url_of(const struct mb_inputs *in)
{
    return in->list[in->at].url;
}

static int no_memory(struct mb_err *err)
{
    return mb_err_set(err, MB_ENOMEM, "no memory for an input");
}

/* ---- the end of an input, and of all ---- */

static void forget_files(struct mb_inputs *in)
{
    for (size_t i = 0; i < in->n_files; i++) {
        mb_free(in->files[i].f.key);
        mb_free(in->files[i].f.name);
    }
    in->n_files = 0;
}

static void forget_input(struct mb_inputs *in)
{
    forget_files(in);
    if (in->lock_fd >= 0)
        close(in->lock_fd); /* and the lock with it */
    mb_free(in->name);
    mb_free(in->local);
    in->name = in->local = NULL;
    in->lock_fd = -1;
    in->is_directory = in->said_waiting = 0;
}

static void free_inputs(struct mb_inputs *in)
{
    for (size_t i = 0; i < in->n; i++) {
        mb_free((void *)(uintptr_t)in->list[i].url);
        mb_free(in->paths[i]);
    }
    mb_free(in->list);
    mb_free(in->paths);
    mb_free(in->dir);
    mb_free(in);
}

static void on_timer_closed(uv_handle_t *h)
{
    struct mb_inputs *in = h->data;

    in->ops->on_done(in->arg, &in->err, (const char *const *)in->paths);
    free_inputs(in);
}

/* Nothing is in flight any more. */
static void next_or_end(struct mb_inputs *in)
{
    forget_input(in);
    if (in->err.code == MB_OK && ++in->at < in->n) {
        begin_input(in);
        return;
    }
    in->finishing = 1;
    uv_close((uv_handle_t *)&in->timer, on_timer_closed);
}

static void on_store_closed(void *arg)
{
    struct mb_inputs *in = arg;

    in->store = NULL;
    in->store_closing = 0;
    next_or_end(in);
}

/* The input is there, or in->err says why not. Requests in flight come back before the store is
 * closed. */
static void end_input(struct mb_inputs *in)
{
    if (in->finishing)
        return;
    in->finishing = in->err.code != MB_OK;
    uv_timer_stop(&in->timer);
    if (in->store_closing)
        return; /* cancelled while the end of an input was under way */
    in->store_closing = in->store != NULL;
    if (in->store != NULL)
        mb_store_close(in->store, on_store_closed, in);
    else if (in->pull == NULL)
        next_or_end(in);
}

static void fail(struct mb_inputs *in, const struct mb_err *err)
{
    if (in->err.code == MB_OK)
        in->err = *err;
    end_input(in);
}

static void say(struct mb_inputs *in, const char *text)
{
    in->said_ms = mb_mono_ms();
    if (in->ops->on_text != NULL)
        in->ops->on_text(in->arg, text);
}

static void done(struct mb_inputs *in, uint64_t fetched_bytes)
{
    char text[512], size[16];
    uint64_t took_ms = mb_mono_ms() - in->began_ms;

    in->paths[in->at] = mb_path_join(in->local, in->name);
    if (in->paths[in->at] == NULL) {
        struct mb_err err;

        no_memory(&err);
        fail(in, &err);
        return;
    }
    if (fetched_bytes > 0)
        snprintf(text, sizeof(text), "fetched %.300s: %s in %.1f s", url_of(in),
                 mb_human_bytes(fetched_bytes, size), (double)took_ms / 1000);
    else
        snprintf(text, sizeof(text), "%.300s is here already", url_of(in));
    say(in, text);
    end_input(in);
}

/* ---- the lock ---- */

/* 1: it is ours; 0: another's; else an error. */
static int try_lock(struct mb_inputs *in, struct mb_err *err)
{
    char *path = mb_path_join(in->local, LOCK_NAME);
    int rc = MB_OK;

    if (path == NULL)
        return no_memory(err);
    if (in->lock_fd < 0)
        in->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (in->lock_fd < 0)
        rc = mb_err_sys(err, errno, "%s", path);
    else if (flock(in->lock_fd, LOCK_EX | LOCK_NB) == 0)
        rc = 1;
    else if (errno != EWOULDBLOCK)
        rc = mb_err_sys(err, errno, "%s: MOBULA_INPUT_DIR has to be on a file system with flock",
                        path);
    mb_free(path);
    return rc;
}

static void wait_for_lock(struct mb_inputs *in)
{
    char text[400];

    if (!in->said_waiting) {
        snprintf(text, sizeof(text), "%.300s is being fetched by another: waiting", url_of(in));
        say(in, text);
    }
    in->said_waiting = 1;
    uv_timer_start(&in->timer, on_tick, LOCK_TICK_MS, 0);
}

/* ---- fetching ---- */

static char *path_of(const struct mb_inputs *in, const struct file *f)
{
    return mb_asprintf("%s/%s", in->local, f->f.name);
}

static int is_here(const struct mb_inputs *in, const struct file *f)
{
    char *path = path_of(in, f);
    struct stat st;
    int here = path != NULL && stat(path, &st) == 0 && S_ISREG(st.st_mode) &&
               (uint64_t)st.st_size == f->f.size_bytes;

    mb_free(path);
    return here;
}

/* With the lock: what is no file of the input is what a fetcher left that died. */
static void remove_leftovers(const struct mb_inputs *in, const char *dir, const char *prefix)
{
    DIR *d = opendir(dir);
    struct dirent *e;

    while (d != NULL && (e = readdir(d)) != NULL) {
        char *path = mb_path_join(dir, e->d_name);
        char *name = mb_asprintf("%s%s", prefix, e->d_name);
        int known = strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0 ||
                    strcmp(e->d_name, LOCK_NAME) == 0 || e->d_type == DT_DIR;

        for (size_t i = 0; i < in->n_files && name != NULL; i++)
            known |= strcmp(in->files[i].f.name, name) == 0;
        if (!known && path != NULL && name != NULL)
            unlink(path);
        mb_free(path);
        mb_free(name);
    }
    if (d != NULL)
        closedir(d);
}

static uint64_t sum(const struct mb_inputs *in, int of_done)
{
    uint64_t bytes = 0;

    for (size_t i = 0; i < in->n_files; i++)
        bytes += of_done ? in->files[i].done_bytes : in->files[i].f.size_bytes;
    return bytes;
}

static void on_progress(void *arg, uint64_t done_bytes, uint64_t total_bytes)
{
    struct file *f = arg;
    struct mb_inputs *in = f->in;
    char text[512], have[16], all[16], rate[16];
    uint64_t took_ms = mb_mono_ms() - in->began_ms;

    (void)total_bytes;
    f->done_bytes = done_bytes;
    if (mb_mono_ms() - in->said_ms < TEXT_EVERY_MS)
        return;
    snprintf(text, sizeof(text), "fetching %.300s: %s of %s, %s/s", url_of(in),
             mb_human_bytes(sum(in, 1), have), mb_human_bytes(sum(in, 0), all),
             mb_human_bytes(took_ms > 0 ? sum(in, 1) * 1000 / took_ms : 0, rate));
    say(in, text);
}

static void on_file(void *arg, const struct mb_store_result *r)
{
    struct file *f = arg;
    struct mb_inputs *in = f->in;
    struct mb_err err = {0};

    in->busy--;
    if (r->error != MB_OK)
        mb_err_set(&err, r->error, "%.300s: %s", url_of(in), r->text);
    else if (r->size_bytes != f->f.size_bytes ||
             (r->etag[0] != '\0' && f->f.etag[0] != '\0' && strcmp(r->etag, f->f.etag) != 0))
        mb_err_set(&err, MB_EUNAVAIL, "%.300s: %s was replaced while it was fetched", url_of(in),
                   f->f.key);
    if (err.code != MB_OK && err.code != MB_ECANCELED) {
        char *path = path_of(in, f);

        if (r->error == MB_OK && path != NULL)
            unlink(path); /* it is not what the directory's name says */
        mb_free(path);
    }
    if (err.code != MB_OK)
        fail(in, &err);
    else
        f->done_bytes = f->f.size_bytes;
    if (in->busy == 0 && in->err.code == MB_OK)
        done(in, sum(in, 1));
}

static int fetch(struct mb_inputs *in, struct file *f, struct mb_err *err)
{
    char *path = path_of(in, f);
    int rc = path != NULL ? mb_store_get_file(in->store, f->f.key, path, on_progress,
                                              FETCH_TIMEOUT_MS, on_file, f, err)
                          : no_memory(err);

    mb_free(path);
    in->busy += rc == MB_OK;
    return rc;
}

static void fetch_missing(struct mb_inputs *in)
{
    char text[400], size[16];
    struct mb_err err;
    char *inner = in->is_directory ? mb_path_join(in->local, in->name) : NULL;
    char *below = mb_asprintf("%s/", in->name);
    int rc = below != NULL && (inner != NULL || !in->is_directory) ? MB_OK : no_memory(&err);

    in->began_ms = mb_mono_ms();
    if (rc == MB_OK)
        remove_leftovers(in, in->local, "");
    if (rc == MB_OK && inner != NULL)
        remove_leftovers(in, inner, below);
    snprintf(text, sizeof(text), "fetching %.300s: %s", url_of(in),
             mb_human_bytes(sum(in, 0), size));
    say(in, text);
    for (size_t i = 0; i < in->n_files && rc == MB_OK; i++)
        if (!is_here(in, &in->files[i]))
            rc = fetch(in, &in->files[i], &err);
    mb_free(inner);
    mb_free(below);
    if (rc != MB_OK)
        fail(in, &err);
}

/* Is everything here; if not, is it ours to fetch? */
static void look(struct mb_inputs *in)
{
    struct mb_err err;
    size_t missing = 0;
    int rc;

    for (size_t i = 0; i < in->n_files; i++)
        missing += !is_here(in, &in->files[i]);
    if (missing == 0) {
        done(in, 0);
        return;
    }
    rc = try_lock(in, &err);
    if (rc == 0)
        wait_for_lock(in);
    else if (rc == 1)
        fetch_missing(in);
    else
        fail(in, &err);
}

/* ---- asking ---- */

static void place(struct mb_inputs *in)
{
    struct mb_input_file list[FILES_MAX];
    struct mb_err err;
    char version[33];
    char *inner = NULL;
    int rc;

    for (size_t i = 0; i < in->n_files; i++)
        list[i] = in->files[i].f;
    rc = mb_input_version(url_of(in), list, in->n_files, version);
    in->local = rc == MB_OK ? mb_path_join(in->dir, version) : NULL;
    if (in->local != NULL)
        inner = in->is_directory ? mb_path_join(in->local, in->name) : mb_strdup(in->local);
    rc = inner != NULL ? mb_fs_mkdir_p(inner, 0755, &err) : no_memory(&err);
    mb_free(inner);
    if (rc != MB_OK)
        fail(in, &err);
    else
        look(in);
}

static int add_file(struct mb_inputs *in, const char *key, const char *name, uint64_t size_bytes,
                    const char *etag, struct mb_err *err)
{
    struct file *f = &in->files[in->n_files];

    if (in->n_files == FILES_MAX)
        return mb_err_set(err, MB_EFULL, "%.300s: more than %d files", url_of(in), (int)FILES_MAX);
    *f = (struct file){.in = in, .f = {.size_bytes = size_bytes}};
    f->f.key = mb_strdup(key);
    f->f.name = mb_strdup(name);
    snprintf(f->f.etag, sizeof(f->f.etag), "%s", etag);
    in->n_files++; /* forget_input() frees what is there */
    return f->f.key != NULL && f->f.name != NULL ? MB_OK : no_memory(err);
}

static void on_listed(void *arg, const struct mb_store_result *r)
{
    struct mb_inputs *in = arg;
    struct mb_err err = {0};
    size_t skip = strlen(in->name) + 1;
    int rc = r->error;

    in->busy--;
    if (rc != MB_OK)
        mb_err_set(&err, rc, "%.300s: %s", url_of(in), r->text);
    for (size_t i = 0; i < r->n_entries && rc == MB_OK; i++) {
        const struct mb_store_entry *e = &r->entries[i];

        if (strlen(e->key) > skip && mb_input_is_of_tokenizer(e->key + skip, e->size_bytes))
            rc = add_file(in, e->key, e->key, e->size_bytes, e->etag, &err);
    }
    if (rc == MB_OK && in->n_files == 0)
        rc = mb_err_set(&err, MB_ENOENT,
                        "%.300s: no such object, and no files of a tokenizer below", url_of(in));
    in->is_directory = 1;
    if (rc != MB_OK)
        fail(in, &err);
    else
        place(in);
}

static void on_head(void *arg, const struct mb_store_result *r)
{
    struct file *f = arg;
    struct mb_inputs *in = f->in;
    struct mb_err err = {0};
    int rc = r->error;

    in->busy--;
    if (rc == MB_ENOENT && in->list[in->at].kind == MB_INPUT_TOKENIZER && !in->finishing) {
        char *below = mb_asprintf("%s/", in->name);

        forget_files(in);
        rc = below != NULL ? mb_store_list(in->store, below, ASK_TIMEOUT_MS, on_listed, in, &err)
                           : no_memory(&err);
        mb_free(below);
        in->busy += rc == MB_OK;
        if (rc != MB_OK)
            fail(in, &err);
        return;
    }
    if (rc != MB_OK) {
        mb_err_set(&err, rc, "%.300s: %s: %s", url_of(in), f->f.key,
                   rc == MB_ENOENT ? "it is not there" : r->text);
        fail(in, &err);
        return;
    }
    f->f.size_bytes = r->size_bytes;
    snprintf(f->f.etag, sizeof(f->f.etag), "%s", r->etag);
    if (in->busy == 0 && in->err.code == MB_OK)
        place(in);
}

static int ask(struct mb_inputs *in, const char *ending, struct mb_err *err)
{
    char *key = mb_asprintf("%s%s", in->name, ending);
    int rc = key != NULL ? add_file(in, key, key, 0, "", err) : no_memory(err);

    if (rc == MB_OK)
        rc = mb_store_head(in->store, key, ASK_TIMEOUT_MS, on_head, &in->files[in->n_files - 1],
                           err);
    in->busy += rc == MB_OK;
    mb_free(key);
    return rc;
}

/* ---- a base model ---- */

static int wants_weights(void *arg, const char *path)
{
    static const uint32_t rank_0 = 0;

    (void)arg;
    return !mb_starts_with(path, "optim_dp_") && mb_input_wants(path, 1, &rank_0, 1);
}

static void on_pulled(void *arg, const struct mb_err *err, int64_t iteration)
{
    struct mb_inputs *in = arg;
    struct mb_err why = *err;

    in->pull = NULL;
    if (why.code == MB_OK && iteration < 0)
        mb_err_set(&why, MB_ENOENT, "there is no checkpoint");
    if (why.code != MB_OK)
        mb_err_wrap(&why, "%.300s", url_of(in));
    if (in->finishing) /* cancelled: the end waited for this */
        next_or_end(in);
    else if (why.code != MB_OK)
        fail(in, &why);
    else
        done(in, 0);
}

static void pull(struct mb_inputs *in)
{
    struct mb_err err;
    int rc = try_lock(in, &err);

    if (rc == 0) {
        wait_for_lock(in);
        return;
    }
    if (rc == 1)
        rc = mb_pull_start(in->loop, url_of(in), in->local, 0, on_pulled, in, &in->pull, &err);
    if (rc == MB_OK)
        mb_pull_set_filter(in->pull, wants_weights, NULL);
    else
        fail(in, &err);
}

static void on_tick(uv_timer_t *t)
{
    struct mb_inputs *in = t->data;

    if (in->list[in->at].kind == MB_INPUT_CHECKPOINT)
        pull(in);
    else
        look(in);
}

static int begin_pull(struct mb_inputs *in, struct mb_err *err)
{
    char version[33];
    int rc = mb_input_version(url_of(in), NULL, 0, version);

    mb_free(in->name);
    in->name = mb_strdup("");
    in->local = rc == MB_OK ? mb_path_join(in->dir, version) : NULL;
    rc = in->local != NULL && in->name != NULL ? mb_fs_mkdir_p(in->local, 0755, err)
                                               : no_memory(err);
    if (rc == MB_OK)
        pull(in);
    return rc;
}

/* ---- the beginning ---- */

static void begin_input(struct mb_inputs *in)
{
    enum mb_input_kind kind = in->list[in->at].kind;
    struct mb_err err;
    char *url = NULL;
    int rc = mb_input_split(url_of(in), &url, &in->name, &err);

    in->began_ms = mb_mono_ms();
    if (rc == MB_OK && kind == MB_INPUT_CHECKPOINT) {
        rc = begin_pull(in, &err);
    } else if (rc == MB_OK) {
        rc = mb_store_open(in->loop, url, &in->store, &err);
        if (rc == MB_OK)
            rc = ask(in, kind == MB_INPUT_DATASET ? ".bin" : "", &err);
        if (rc == MB_OK && kind == MB_INPUT_DATASET)
            rc = ask(in, ".idx", &err);
    }
    mb_free(url);
    if (rc != MB_OK)
        fail(in, &err);
}

static void on_begin(uv_timer_t *t)
{
    begin_input(t->data);
}

static int copy_list(struct mb_inputs *in, const char *dir, const struct mb_input *list, size_t n)
{
    in->dir = mb_strdup(dir);
    in->list = mb_calloc(n, sizeof(*in->list));
    in->paths = mb_calloc(n, sizeof(*in->paths));
    if (in->dir == NULL || in->list == NULL || in->paths == NULL)
        return MB_ENOMEM;
    in->n = n;
    for (size_t i = 0; i < n; i++) {
        in->list[i] = (struct mb_input){mb_strdup(list[i].url), list[i].kind};
        if (in->list[i].url == NULL)
            return MB_ENOMEM;
    }
    return MB_OK;
}

int mb_inputs_start(uv_loop_t *loop, const char *dir, const struct mb_input *list, size_t n,
                    const struct mb_inputs_ops *ops, void *arg, struct mb_inputs **out,
                    struct mb_err *err)
{
    struct mb_inputs *in = mb_calloc(1, sizeof(*in));

    if (in == NULL)
        return no_memory(err);
    in->loop = loop;
    in->ops = ops;
    in->arg = arg;
    in->lock_fd = -1;
    if (copy_list(in, dir, list, n) != MB_OK) {
        free_inputs(in);
        return no_memory(err);
    }
    uv_timer_init(loop, &in->timer);
    in->timer.data = in;
    uv_timer_start(&in->timer, on_begin, 0, 0); /* no callback from inside this call */
    *out = in;
    return MB_OK;
}

void mb_inputs_cancel(struct mb_inputs *in)
{
    struct mb_err err;

    mb_err_set(&err, MB_ECANCELED, "cancelled");
    if (in->finishing)
        return;
    if (in->pull != NULL) {
        in->err = err;
        in->finishing = 1;
        mb_pull_cancel(in->pull);
        return;
    }
    fail(in, &err);
}
