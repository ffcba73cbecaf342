/*
 * Unfinished uploads are taken away.
 *
 * 1. AbortMultipartUpload; an id that the server does not know is success. A part that was on its
 *    way can outlive it (S3's own words), so the upload is looked for again, and aborted again.
 * 2. Without an id: the uploads of exactly this key are listed (some servers list nothing for a
 * mere prefix), and all but `keep` that began late enough are aborted, one after the other.
 * 3. Listed only: the ids are the answer.
 * Failures: the first one ends it and is told.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "base/alloc.h"
#include "base/s3/s3.h"
#include "base/s3/s3_sweep.h"
#include "base/str.h"

enum { ABORTS_MAX = 5 };

struct s3_sweep {
    struct mb_store_op *op;
    struct s3 *s3;
    const char *keep; /* borrowed; NULL: none */
    int64_t since_unix_s;
    char **ids;
    size_t n_ids, cap_ids, next;
    unsigned n_aborts; /* of the present one */
    struct mb_buf key_marker, id_marker;
    struct s3_call *call;
    int canceled;
    struct mb_err err;
    void (*done)(void *arg, const struct mb_err *err, size_t n_aborted);
    void *arg;
};

struct upload_fields {
    struct s3_sweep *w;
    char *key; /* of the one being read */
    char *id;
    int64_t began_unix_s;
    int truncated;
};

static void abort_next(struct s3_sweep *w);

static void destroy(struct s3_sweep *w)
{
    for (size_t i = 0; i < w->n_ids; i++)
        mb_free(w->ids[i]);
    mb_free(w->ids);
    mb_buf_close(&w->key_marker);
    mb_buf_close(&w->id_marker);
    mb_free(w);
}

static void finish(struct s3_sweep *w)
{
    w->done(w->arg, &w->err, w->next);
    destroy(w);
}

static int came_back(struct s3_sweep *w, const struct s3_answer *a)
{
    w->call = NULL;
    if (w->canceled)
        mb_err_set(&w->err, MB_ECANCELED, "cancelled");
    else if (a->error != 0)
        mb_err_set(&w->err, a->error, "%s", a->text);
    return w->err.code == 0;
}

/* ---- aborting ---- */

static int id_request(struct s3_sweep *w, const char *method, s3_done_cb done);

static int is_gone(const struct s3_answer *a)
{
    return a->error == MB_ENOENT && strcmp(a->code, "NoSuchBucket") != 0;
}

/* The parts of an upload that was aborted. */
static void on_looked(void *arg, const struct s3_answer *a)
{
    struct s3_sweep *w = arg;

    if (!came_back(w, a) && is_gone(a) && !w->canceled) {
        mb_err_clear(&w->err);
        w->next++;
        w->n_aborts = 0;
    } else if (w->err.code == 0 && ++w->n_aborts == ABORTS_MAX) {
        mb_err_set(&w->err, MB_EPROTO, "the server keeps an upload that was aborted %d times",
                   ABORTS_MAX);
    }
    if (w->err.code != 0)
        finish(w);
    else
        abort_next(w);
}

static void on_aborted(void *arg, const struct s3_answer *a)
{
    struct s3_sweep *w = arg;

    if (!came_back(w, a) && is_gone(a) && !w->canceled)
        mb_err_clear(&w->err); /* or completed meanwhile */
    if (w->err.code != 0 || id_request(w, "GET", on_looked) != 0)
        finish(w);
}

static int id_request(struct s3_sweep *w, const char *method, s3_done_cb done)
{
    struct mb_buf query = {0};
    struct s3_request request = {.method = method, .key = w->op->key, .body_fd = -1};
    int rc = mb_buf_puts(&query, *method == 'G' ? "max-parts=1&uploadId=" : "uploadId=");

    if (rc == 0)
        rc = mb_buf_url(&query, w->ids[w->next], 0);
    request.query = mb_buf_str(&query);
    if (rc == 0)
        rc = s3_call_start(w->op, &request, done, w, &w->call, &w->err);
    else
        mb_err_set(&w->err, rc, "out of memory");
    mb_buf_close(&query);
    return rc;
}

static void abort_next(struct s3_sweep *w)
{
    if (w->op->kind == MB_STORE_LIST_UPLOADS) {
        for (size_t i = 0; i < w->n_ids && w->err.code == 0; i++)
            if (mb_store_op_add_entry(w->op, w->ids[i], 0, "") != 0)
                mb_err_set(&w->err, MB_ENOMEM, "out of memory");
        finish(w);
        return;
    }
    if (w->next == w->n_ids || id_request(w, "DELETE", on_aborted) != 0)
        finish(w);
}

static int add_id(struct s3_sweep *w, const char *id)
{
    if (w->n_ids == w->cap_ids) {
        size_t cap = w->cap_ids ? 2 * w->cap_ids : 4;
        char **grown = mb_reallocarray(w->ids, cap, sizeof *grown);

        if (!grown)
            return MB_ENOMEM;
        w->ids = grown;
        w->cap_ids = cap;
    }
    w->ids[w->n_ids] = mb_strdup(id);
    return w->ids[w->n_ids] ? (int)(w->n_ids++, 0) : MB_ENOMEM;
}

/* ---- listing ---- */

static int64_t unix_s_of(const char *iso)
{
    struct tm tm = {0};

    return strptime(iso, "%Y-%m-%dT%H:%M:%S", &tm) ? (int64_t)timegm(&tm) : INT64_MAX;
}

static int on_upload_field(void *arg, const char *parent, const char *name, const char *text)
{
    struct upload_fields *f = arg;
    struct s3_sweep *w = f->w;
    int rc = 0;

    if (strcmp(parent, "Upload") == 0) {
        char **to = strcmp(name, "Key") == 0        ? &f->key
                    : strcmp(name, "UploadId") == 0 ? &f->id
                                                    : NULL;

        if (strcmp(name, "Initiated") == 0)
            f->began_unix_s = unix_s_of(text);
        if (!to)
            return 0;
        mb_free(*to);
        *to = mb_strdup(text);
        return *to ? 0 : MB_ENOMEM;
    }
    if (strcmp(name, "IsTruncated") == 0)
        f->truncated = strcmp(text, "true") == 0;
    else if (strcmp(name, "NextKeyMarker") == 0)
        return mb_buf_puts(&w->key_marker, text);
    else if (strcmp(name, "NextUploadIdMarker") == 0)
        return mb_buf_puts(&w->id_marker, text);
    if (strcmp(name, "Upload") != 0)
        return 0;
    if (f->key && f->id && mb_starts_with(f->key, w->s3->prefix) &&
        strcmp(f->key + strlen(w->s3->prefix), w->op->key) == 0 &&
        f->began_unix_s >= w->since_unix_s && !(w->keep && strcmp(w->keep, f->id) == 0))
        rc = add_id(w, f->id);
    mb_free(f->key);
    mb_free(f->id);
    f->key = f->id = NULL;
    f->began_unix_s = 0;
    return rc;
}

static int list_uploads(struct s3_sweep *w, struct mb_err *err);

static void on_uploads(void *arg, const struct s3_answer *a)
{
    struct s3_sweep *w = arg;
    struct upload_fields fields = {.w = w};

    if (!came_back(w, a)) {
        finish(w);
        return;
    }
    mb_buf_reset(&w->key_marker);
    mb_buf_reset(&w->id_marker);
    if (mb_s3_xml_parse(a->http->body, a->http->body_len, on_upload_field, &fields, &w->err) != 0)
        mb_err_wrap(&w->err, "listing of unfinished uploads");
    mb_free(fields.key);
    mb_free(fields.id);
    if (w->err.code == 0 && fields.truncated && w->key_marker.len == 0)
        mb_err_set(&w->err, MB_EPROTO, "listing of unfinished uploads: truncated without a marker");
    if (w->err.code != 0)
        finish(w);
    else if (!fields.truncated)
        abort_next(w);
    else if (list_uploads(w, &w->err) != 0)
        finish(w);
}

static int list_query(struct s3_sweep *w, struct mb_buf *query)
{
    int rc = 0;

    if (w->key_marker.len > 0) {
        rc = mb_buf_puts(query, "key-marker=");
        if (rc == 0)
            rc = mb_buf_url(query, mb_buf_str(&w->key_marker), 0);
        if (rc == 0)
            rc = mb_buf_puts(query, "&");
    }
    if (rc == 0)
        rc = mb_buf_puts(query, "prefix=");
    if (rc == 0)
        rc = mb_buf_url(query, w->s3->prefix, 0);
    if (rc == 0)
        rc = mb_buf_url(query, w->op->key, 0);
    if (rc == 0 && w->id_marker.len > 0) {
        rc = mb_buf_puts(query, "&upload-id-marker=");
        if (rc == 0)
            rc = mb_buf_url(query, mb_buf_str(&w->id_marker), 0);
    }
    return rc != 0 ? rc : mb_buf_puts(query, "&uploads=");
}

static int list_uploads(struct s3_sweep *w, struct mb_err *err)
{
    struct mb_buf query = {0};
    struct s3_request request = {.method = "GET", .body_fd = -1};
    int rc = list_query(w, &query) == 0 ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");

    request.query = mb_buf_str(&query);
    if (rc == 0)
        rc = s3_call_start(w->op, &request, on_uploads, w, &w->call, err);
    mb_buf_close(&query);
    return rc;
}

/* ---- start ---- */

static struct s3_sweep *create(struct mb_store_op *op,
                               void (*done)(void *arg, const struct mb_err *err, size_t n),
                               void *arg, struct mb_err *err)
{
    struct s3_sweep *w = mb_calloc(1, sizeof *w);

    if (!w) {
        mb_err_set(err, MB_ENOMEM, "out of memory");
        return NULL;
    }
    w->op = op;
    w->s3 = op->store->impl;
    w->done = done;
    w->arg = arg;
    return w;
}

int s3_sweep_start(struct mb_store_op *op, const char *keep, int64_t since_unix_s,
                   void (*done)(void *arg, const struct mb_err *err, size_t n_aborted), void *arg,
                   struct s3_sweep **out, struct mb_err *err)
{
    struct s3_sweep *w = create(op, done, arg, err);

    if (!w)
        return MB_ENOMEM;
    w->keep = keep;
    w->since_unix_s = since_unix_s;
    int rc = list_uploads(w, err);
    if (rc != 0)
        mb_free(w);
    else
        *out = w;
    return rc;
}

void s3_sweep_cancel(struct s3_sweep *w)
{
    w->canceled = 1;
    if (w->call)
        s3_call_cancel(w->call);
}

/* ---- as an operation of the store ---- */

static void on_op_done(void *arg, const struct mb_err *err, size_t n_aborted)
{
    struct mb_store_op *op = arg;

    (void)n_aborted;
    op->impl = NULL;
    if (op->err.code == 0)
        op->err = *err;
    mb_store_op_finish(op);
}

int s3_abort_start(struct mb_store_op *op, struct mb_err *err)
{
    struct s3_sweep *w = create(op, on_op_done, op, err);
    int rc = w ? 0 : MB_ENOMEM;

    if (rc == 0 && op->resume_upload_id)
        rc = add_id(w, op->resume_upload_id) == 0 ? id_request(w, "DELETE", on_aborted)
                                                  : mb_err_set(&w->err, MB_ENOMEM, "out of memory");
    else if (rc == 0)
        rc = list_uploads(w, &w->err);
    if (rc != 0 && w) {
        if (err)
            *err = w->err;
        destroy(w);
        return rc;
    }
    op->impl = w;
    return rc;
}

void s3_abort_cancel(struct mb_store_op *op)
{
    if (op->impl)
        s3_sweep_cancel(op->impl);
}
