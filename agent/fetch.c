/*
 *  http, https: 1. one request whose body goes into the file piece by piece; 2. the client is
 *  stopped; 3. the callback.
 *  s3, gs: 1. a look at the object, with a short deadline, so that a store that is not there fails
 *  soon; 2. the object into the file; 3. the store is closed; 4. the callback.
 *  gcs: pieces of the head's file, one after the other; a takeover between two changes nothing. A
 *  head that is Ray's has it as one value of its KV, which mb_gcs_kv_fetch() writes.
 *  Failure: the reason is kept, what was written is removed, and the steps from the stop on follow.
 */
#include "agent/fetch.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/http/client.h"
#include "base/s3/store.h"
#include "base/str.h"
#include "gcs/client.h"

enum {
    LOOK_TIMEOUT_MS = 8000,
    STALL_TIMEOUT_MS = 8000,
    FETCH_TIMEOUT_MS = 3600 * 1000,
    PIECE_BYTES = 1 << 20,
    PIECE_TIMEOUT_MS = 30 * 1000,
    VALUE_TIMEOUT_MS = 300 * 1000, /* a package of Ray's head: up to 512 MiB in one answer */
};
static const uint64_t FETCH_MAX_BYTES = (uint64_t)64 << 30;

struct mb_fetch {
    uv_loop_t *loop;
    struct mb_http_client *http;
    struct mb_store *store;
    struct mb_gcs *gcs; /* borrowed */
    struct mb_gcs_op *op;
    char *uri, *path;
    const char *key; /* inside uri, behind its last slash */
    int fd;
    uint64_t size_bytes, total_bytes; /* total: of a package of the head */
    struct mb_err err;
    mb_fetch_cb cb;
    void *arg;
};

static void free_fetch(struct mb_fetch *f)
{
    if (f->fd >= 0)
        close(f->fd);
    mb_free(f->uri);
    mb_free(f->path);
    mb_free(f);
}

static void on_closed(void *arg)
{
    struct mb_fetch *f = arg;

    if (f->http != NULL)
        mb_http_client_destroy(f->http);
    if (f->err.code != 0)
        unlink(f->path);
    f->cb(f->arg, &f->err);
    free_fetch(f);
}

static void finish(struct mb_fetch *f)
{
    if (f->http != NULL)
        mb_http_client_stop(f->http, on_closed, f);
    else if (f->store != NULL)
        mb_store_close(f->store, on_closed, f);
    else
        on_closed(f);
}

/* ---- http ---- */

static int on_piece(void *arg, const void *p, size_t n)
{
    struct mb_fetch *f = arg;

    f->size_bytes += n;
    if (f->size_bytes > FETCH_MAX_BYTES)
        return mb_err_set(&f->err, MB_EFULL, "%.200s: more than %llu bytes", f->uri,
                          (unsigned long long)FETCH_MAX_BYTES);
    return mb_fs_write_all(f->fd, p, n, &f->err);
}

static void on_response(void *arg, const struct mb_http_response *r)
{
    struct mb_fetch *f = arg;

    if (f->err.code == 0 && r->error != 0)
        mb_err_set(&f->err, r->error, "%.300s: %s", f->uri, r->detail);
    else if (f->err.code == 0 && r->status != 200)
        mb_err_set(&f->err, r->status == 404 ? MB_ENOENT : MB_EUNAVAIL, "%.300s: status %ld",
                   f->uri, r->status);
    finish(f);
}

static int start_http(struct mb_fetch *f, struct mb_err *err)
{
    struct mb_http_request request = {.method = "GET",
                                      .url = f->uri,
                                      .body_fd = -1,
                                      .sink = on_piece,
                                      .sink_arg = f,
                                      .timeout_ms = FETCH_TIMEOUT_MS,
                                      .connect_timeout_ms = LOOK_TIMEOUT_MS,
                                      .stall_timeout_ms = STALL_TIMEOUT_MS,
                                      .follow_redirects = 1};

    f->fd = open(f->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (f->fd < 0)
        return mb_err_sys(err, errno, "%s", f->path);
    return mb_http_fetch(f->http, &request, on_response, f, NULL, err);
}

/* ---- object stores ---- */

static void on_got(void *arg, const struct mb_store_result *r)
{
    struct mb_fetch *f = arg;

    if (r->error != 0)
        mb_err_set(&f->err, r->error, "%.300s: %s", f->uri, r->text);
    finish(f);
}

static void on_looked(void *arg, const struct mb_store_result *r)
{
    struct mb_fetch *f = arg;

    if (r->error != 0)
        mb_err_set(&f->err, r->error, "%.300s: %s", f->uri, r->text);
    else if (r->size_bytes > FETCH_MAX_BYTES)
        mb_err_set(&f->err, MB_EFULL, "%.200s: more than %llu bytes", f->uri,
                   (unsigned long long)FETCH_MAX_BYTES);
    else
        mb_store_get_file(f->store, f->key, f->path, NULL, FETCH_TIMEOUT_MS, on_got, f, &f->err);
    if (f->err.code != 0)
        finish(f);
}

static int start_store(struct mb_fetch *f, struct mb_err *err)
{
    char *folder = mb_strndup(f->uri, (size_t)(f->key - f->uri));
    int rc = folder != NULL ? mb_store_open(f->loop, folder, &f->store, err)
                            : mb_err_set(err, MB_ENOMEM, "out of memory");

    mb_free(folder);
    return rc != 0 ? rc : mb_store_head(f->store, f->key, LOOK_TIMEOUT_MS, on_looked, f, err);
}

/* ---- the head ---- */

static int ask_piece(struct mb_fetch *f, struct mb_err *err);

static void on_package_value(void *arg, const struct mb_err *err)
{
    struct mb_fetch *f = arg;

    f->op = NULL;
    if (f->err.code == 0 && err->code == MB_ENOENT)
        mb_err_set(&f->err, MB_ENOENT, "%.300s: the head does not have it (any more)", f->uri);
    else if (f->err.code == 0 && err->code != 0)
        mb_err_set(&f->err, err->code, "%.300s: %.500s", f->uri, err->text);
    finish(f);
}

static void on_package_piece(void *arg, const struct mb_err *err, uint64_t total_bytes,
                             const void *p, size_t n)
{
    struct mb_fetch *f = arg;

    f->op = NULL;
    if (f->err.code != 0) { /* given up meanwhile */
        finish(f);
        return;
    }
    if (err->code == MB_EUNSUPPORTED && f->size_bytes == 0) { /* Ray's own head: it is in its KV */
        if (mb_gcs_kv_fetch(f->gcs, "", f->uri, f->fd, VALUE_TIMEOUT_MS, on_package_value, f,
                            &f->op, &f->err) != 0)
            finish(f);
        return;
    }
    if (err->code != 0)
        mb_err_set(&f->err, err->code, "%.300s: %.500s", f->uri, err->text);
    else if (total_bytes > FETCH_MAX_BYTES ||
             (f->size_bytes > 0 && total_bytes != f->total_bytes) ||
             f->size_bytes + n > total_bytes || (n == 0 && f->size_bytes < total_bytes))
        mb_err_set(&f->err, MB_ECORRUPT, "%.300s: another package came under this name", f->uri);
    else
        mb_fs_write_all(f->fd, p, n, &f->err);
    f->total_bytes = total_bytes;
    f->size_bytes += n;
    if (f->err.code != 0 || f->size_bytes == total_bytes || ask_piece(f, &f->err) != 0)
        finish(f);
}

static int ask_piece(struct mb_fetch *f, struct mb_err *err)
{
    return mb_gcs_read_package(f->gcs, f->key, f->size_bytes, PIECE_BYTES, PIECE_TIMEOUT_MS,
                               on_package_piece, f, &f->op, err);
}

static int start_gcs(struct mb_fetch *f, struct mb_err *err)
{
    f->fd = open(f->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    return f->fd < 0 ? mb_err_sys(err, errno, "%s", f->path) : ask_piece(f, err);
}

/* ---- begin ---- */

/* A part that was made before the beginning failed ends by itself, without a callback of ours. */
static void on_abandoned(void *arg)
{
    struct mb_fetch *f = arg;

    if (f->http != NULL)
        mb_http_client_destroy(f->http);
    unlink(f->path);
    free_fetch(f);
}

static int start_from(struct mb_fetch *f, int is_http, struct mb_err *err)
{
    int rc;

    if (f->gcs != NULL)
        return start_gcs(f, err);
    if (!is_http)
        return start_store(f, err);
    rc = mb_http_client_create(f->loop, 1, &f->http, err);
    return rc == 0 ? start_http(f, err) : rc;
}

int mb_fetch_start(uv_loop_t *loop, struct mb_gcs *gcs, const char *uri, const char *path,
                   mb_fetch_cb cb, void *arg, struct mb_fetch **out, struct mb_err *err)
{
    int is_http = mb_starts_with(uri, "http://") || mb_starts_with(uri, "https://");
    int is_head = gcs != NULL && mb_starts_with(uri, "gcs://");
    struct mb_fetch *f;
    int rc;

    if (!is_head && !is_http && !mb_starts_with(uri, "s3://") && !mb_starts_with(uri, "gs://"))
        return mb_err_set(err, MB_EUNSUPPORTED,
                          "%.300s: packages are fetched from http, https, s3 and gs", uri);
    f = mb_calloc(1, sizeof(*f));
    if (f == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    f->loop = loop;
    f->gcs = is_head ? gcs : NULL;
    f->fd = -1;
    f->cb = cb;
    f->arg = arg;
    f->uri = mb_strdup(uri);
    f->path = mb_strdup(path);
    if (f->uri == NULL || f->path == NULL) {
        free_fetch(f);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    f->key = strrchr(f->uri, '/') + 1;
    if (*f->key == '\0') {
        free_fetch(f);
        return mb_err_set(err, MB_EINVAL, "%.300s does not name a package", uri);
    }
    rc = start_from(f, is_http, err);
    if (rc == 0)
        *out = f;
    else if (f->http != NULL)
        mb_http_client_stop(f->http, on_abandoned, f);
    else if (f->store != NULL)
        mb_store_close(f->store, on_abandoned, f);
    else {
        if (f->fd >= 0)
            unlink(f->path);
        free_fetch(f);
    }
    return rc;
}

/* The pending request ends with MB_ECANCELED, which is its callback's reason to finish. */
void mb_fetch_cancel(struct mb_fetch *f)
{
    if (f->err.code != 0)
        return;
    mb_err_set(&f->err, MB_ECANCELED, "%.300s: given up", f->uri);
    if (f->http != NULL)
        mb_http_client_stop(f->http, on_closed, f);
    else if (f->store != NULL)
        mb_store_close(f->store, on_closed, f);
    else if (f->op != NULL)
        mb_gcs_op_cancel(f->op);
}
