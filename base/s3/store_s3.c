/*
 * s3://: the short operations and the life of the backend.
 *
 * 1. Each operation makes one request (a listing one per page) and finishes with its answer.
 * 2. Whole files go through s3_upload.c and s3_download.c.
 * 3. close: no operation is left, so the HTTP client stops, the last timers close, done.
 * 4. Some servers take a condition and do not heed it. So the first write of a process to an
 * endpoint that is to create an object is repeated, which has to fail; one that goes through twice
 * says that there are no conditions. Failures: a failed condition is MB_EEXIST. If an earlier
 * attempt of a conditional write may have been carried out, the object is read back: equal bytes
 * mean that it was, and that is success.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/s3/s3.h"
#include "base/s3/sigv4.h"
#include "base/str.h"

enum {
    MAX_REPEATS = 2,
    MAX_REPEATED_BYTES = 64 * 1024,
    /* Of each connection, in the kernel: the server sends on while the disk is busy, and less often
     * bit by bit out of our reading. Of S3_MAX_CONNECTIONS no more than 128 MiB with the kernel's
     * bookkeeping; docs/performance.md has what half of it and a quarter do. */
    RECEIVE_AHEAD_BYTES = 4 * 1024 * 1024
};

static void start_next(struct mb_store_op *op, const struct s3_request *request, s3_done_cb done)
{
    struct s3_call *call = NULL;
    op->impl = NULL;
    if (op->canceled)
        mb_err_set(&op->err, MB_ECANCELED, "cancelled");
    if (op->err.code != 0 || s3_call_start(op, request, done, op, &call, &op->err) != 0)
        mb_store_op_finish(op);
    else
        op->impl = call;
}

/* ---- put ---- */

static void on_put_compared(void *arg, const struct s3_answer *a)
{
    struct mb_store_op *op = arg;
    op->impl = NULL;
    if (a->error == 0 && a->http->body_len == op->data_len &&
        (op->data_len == 0 || memcmp(a->http->body, op->data, op->data_len) == 0))
        s3_answer_etag(a, op->out_etag, sizeof op->out_etag);
    else
        mb_err_set(&op->err, MB_EEXIST, "the condition failed");
    mb_store_op_finish(op);
}

static int start_put(struct mb_store_op *op, s3_done_cb done, struct mb_err *err);

static void repeat_put(struct mb_store_op *op);

/* The object is there: its creation has to fail now. */
static void on_put_repeated(void *arg, const struct s3_answer *a)
{
    struct mb_store_op *op = arg;
    op->impl = NULL;
    if (a->error == 0 && op->n_repeats < MAX_REPEATS) { /* it may have been deleted between */
        repeat_put(op);
        return;
    }
    if (a->error == 0) {
        s3_has_no_conditions(op->store->impl, "an object was created over another one");
        mb_err_set(&op->err, MB_EUNSUPPORTED,
                   "the server takes If-None-Match and does not heed it: the object was written "
                   "whether it was there or not");
    } /* else the first answer stands */
    mb_store_op_finish(op);
}

static void repeat_put(struct mb_store_op *op)
{
    op->n_repeats++;
    if (op->canceled || start_put(op, on_put_repeated, NULL) != 0)
        mb_store_op_finish(op); /* what was written is written */
}

static int is_doubtful(const struct mb_store_op *op)
{
    const struct s3 *s = op->store->impl;
    return op->cond == MB_STORE_IF_ABSENT && !s->facts.conditions_are_proven &&
           op->data_len <= MAX_REPEATED_BYTES;
}

static void on_put(void *arg, const struct s3_answer *a)
{
    struct mb_store_op *op = arg;
    op->impl = NULL;
    if (a->error == MB_EEXIST && a->ambiguous) {
        struct s3_request request = {.method = "GET",
                                     .key = op->key,
                                     .body_fd = -1,
                                     .max_body_bytes = op->data_len + 64 * 1024};
        start_next(op, &request, on_put_compared);
        return;
    }
    if (a->error == 0) {
        s3_answer_etag(a, op->out_etag, sizeof op->out_etag);
        op->size_bytes = op->data_len;
        if (is_doubtful(op)) {
            repeat_put(op);
            return;
        }
    } else if (op->cond == MB_STORE_IF_MATCH && strcmp(a->code, "NoSuchKey") == 0) {
        mb_err_set(&op->err, MB_EEXIST, "the object is not the expected one: it is gone");
    } else {
        s3_op_fail(op, a);
    }
    mb_store_op_finish(op);
}

static int start_put(struct mb_store_op *op, s3_done_cb done, struct mb_err *err)
{
    struct s3_request request = {
        .method = "PUT", .key = op->key, .body = op->data, .body_len = op->data_len, .body_fd = -1};
    struct s3_call *call = NULL;
    s3_request_checksum(&request, mb_crc64nvme(0, op->data, op->data_len));
    if (op->cond == MB_STORE_IF_ABSENT)
        s3_request_header(&request, "if-none-match", "*");
    else if (op->cond == MB_STORE_IF_MATCH)
        s3_request_header(&request, "if-match", op->etag);
    int rc = s3_call_start(op, &request, done, op, &call, err);
    op->impl = call;
    return rc;
}

/* ---- get, head, delete ---- */

static void on_get(void *arg, const struct s3_answer *a)
{
    struct mb_store_op *op = arg;
    op->impl = NULL;
    if (a->error == MB_EEXIST && op->is_range)
        mb_err_set(&op->err, MB_ESTATE, "the object changed while it was read");
    else if (a->error != 0)
        s3_op_fail(op, a);
    else if (op->is_range && a->http->status != 206)
        mb_err_set(&op->err, MB_EPROTO, "a part was asked for, the server sent HTTP %ld",
                   a->http->status);
    else if (a->http->body_len > op->max_bytes)
        mb_err_set(&op->err, MB_EFULL, "the object has %zu bytes, at most %zu are wanted",
                   a->http->body_len, op->max_bytes);
    else if (mb_buf_add(&op->body, a->http->body, a->http->body_len) != 0)
        mb_err_set(&op->err, MB_ENOMEM, "out of memory");
    if (a->error == 0) {
        op->size_bytes = a->http->body_len;
        s3_answer_etag(a, op->out_etag, sizeof op->out_etag);
    }
    mb_store_op_finish(op);
}

static void on_head(void *arg, const struct s3_answer *a)
{
    struct mb_store_op *op = arg;
    op->impl = NULL;
    if (a->error != 0) {
        s3_op_fail(op, a);
    } else {
        const char *length = a->http->header(a->http, "Content-Length");
        op->size_bytes = length ? strtoull(length, NULL, 10) : 0;
        s3_answer_etag(a, op->out_etag, sizeof op->out_etag);
    }
    mb_store_op_finish(op);
}

static void on_delete(void *arg, const struct s3_answer *a)
{
    struct mb_store_op *op = arg;
    op->impl = NULL;
    if (a->error != 0 && !(a->error == MB_ENOENT && strcmp(a->code, "NoSuchBucket") != 0))
        s3_op_fail(op, a);
    mb_store_op_finish(op);
}

static int start_plain(struct mb_store_op *op, const char *method, s3_done_cb done,
                       struct mb_err *err)
{
    struct s3_request request = {.method = method, .key = op->key, .body_fd = -1};
    struct s3_call *call = NULL;
    if (op->kind == MB_STORE_GET) /* room for the XML of an error as well */
        request.max_body_bytes = op->max_bytes > 64 * 1024 ? op->max_bytes : 64 * 1024;
    if (op->is_range) {
        char text[64];
        snprintf(text, sizeof text, "bytes=%" PRIu64 "-%" PRIu64, op->offset,
                 op->offset + op->max_bytes - 1);
        s3_request_header(&request, "range", text);
        if (op->etag[0])
            s3_request_header(&request, "if-match", op->etag);
    }
    int rc = s3_call_start(op, &request, done, op, &call, err);
    op->impl = call;
    return rc;
}

/* ---- list ---- */

struct page {
    struct mb_store_op *op;
    char key[4096]; /* of the entry being read */
    char etag[192];
    uint64_t size_bytes;
    int truncated;
    struct mb_buf token;
};

static int on_list_field(void *arg, const char *parent, const char *name, const char *text)
{
    struct page *page = arg;
    struct s3 *s = page->op->store->impl;
    if (strcmp(parent, "Contents") == 0) {
        if (strcmp(name, "Key") == 0)
            snprintf(page->key, sizeof page->key, "%s", text);
        else if (strcmp(name, "ETag") == 0)
            snprintf(page->etag, sizeof page->etag, "%s", text);
        else if (strcmp(name, "Size") == 0)
            page->size_bytes = strtoull(text, NULL, 10);
        return 0;
    }
    if (strcmp(name, "IsTruncated") == 0)
        page->truncated = strcmp(text, "true") == 0;
    else if (strcmp(name, "NextContinuationToken") == 0)
        return mb_buf_puts(&page->token, text);
    if (strcmp(name, "Contents") != 0)
        return 0;
    int rc = 0;
    size_t n = strlen(page->key);
    /* A key with a slash at its end is some tools' idea of a directory, no object of ours. */
    if (mb_starts_with(page->key, s->prefix) && n > strlen(s->prefix) && page->key[n - 1] != '/')
        rc = mb_store_op_add_entry(page->op, page->key + strlen(s->prefix), page->size_bytes,
                                   page->etag);
    page->key[0] = '\0';
    page->etag[0] = '\0';
    page->size_bytes = 0;
    return rc;
}

static int list_query(struct mb_store_op *op, const char *token, struct mb_buf *query)
{
    struct s3 *s = op->store->impl;
    int rc = 0;
    if (token) {
        rc = mb_buf_puts(query, "continuation-token=");
        if (rc == 0)
            rc = mb_buf_url(query, token, 0);
        if (rc == 0)
            rc = mb_buf_puts(query, "&");
    }
    if (rc == 0)
        rc = mb_buf_puts(query, "list-type=2&prefix=");
    if (rc == 0)
        rc = mb_buf_url(query, s->prefix, 0);
    return rc != 0 ? rc : mb_buf_url(query, op->key, 0);
}

static void on_page(void *arg, const struct s3_answer *a)
{
    struct mb_store_op *op = arg;
    struct page page = {.op = op};
    struct mb_buf query = {0};
    op->impl = NULL;
    if (a->error != 0)
        s3_op_fail(op, a);
    else if (mb_s3_xml_parse(a->http->body, a->http->body_len, on_list_field, &page, &op->err) != 0)
        mb_err_wrap(&op->err, "listing");
    if (op->err.code == 0 && page.truncated && page.token.len == 0)
        mb_err_set(&op->err, MB_EPROTO, "listing: truncated, but no token to go on");
    if (op->err.code == 0 && page.truncated) {
        struct s3_request request = {.method = "GET", .body_fd = -1};
        if (list_query(op, mb_buf_str(&page.token), &query) != 0)
            mb_err_set(&op->err, MB_ENOMEM, "out of memory");
        request.query = mb_buf_str(&query);
        start_next(op, &request, on_page);
    } else {
        mb_store_op_finish(op);
    }
    mb_buf_close(&page.token);
    mb_buf_close(&query);
}

static int start_list(struct mb_store_op *op, struct mb_err *err)
{
    struct mb_buf query = {0};
    struct s3_call *call = NULL;
    struct s3_request request = {.method = "GET", .body_fd = -1};
    int rc =
        list_query(op, NULL, &query) == 0 ? 0 : mb_err_set(err, MB_ENOMEM, "s3: out of memory");
    request.query = mb_buf_str(&query);
    if (rc == 0)
        rc = s3_call_start(op, &request, on_page, op, &call, err);
    op->impl = call;
    mb_buf_close(&query);
    return rc;
}

/* ---- the backend ---- */

static int s3_start(struct mb_store_op *op, struct mb_err *err)
{
    switch (op->kind) {
    case MB_STORE_PUT:
        return start_put(op, on_put, err);
    case MB_STORE_GET:
        return start_plain(op, "GET", on_get, err);
    case MB_STORE_HEAD:
        return start_plain(op, "HEAD", on_head, err);
    case MB_STORE_DELETE:
        return start_plain(op, "DELETE", on_delete, err);
    case MB_STORE_LIST:
        return start_list(op, err);
    case MB_STORE_PUT_FILE:
        return s3_upload_start(op, err);
    case MB_STORE_GET_FILE:
        return s3_download_start(op, err);
    case MB_STORE_ABORT_UPLOADS:
    case MB_STORE_LIST_UPLOADS:
        return s3_abort_start(op, err);
    }
    return mb_err_set(err, MB_EUNSUPPORTED, "s3: unknown operation");
}

static void s3_cancel(struct mb_store_op *op)
{
    if (op->kind == MB_STORE_PUT_FILE)
        s3_upload_cancel(op);
    else if (op->kind == MB_STORE_GET_FILE)
        s3_download_cancel(op);
    else if (op->kind == MB_STORE_ABORT_UPLOADS || op->kind == MB_STORE_LIST_UPLOADS)
        s3_abort_cancel(op);
    else if (op->impl)
        s3_call_cancel(op->impl);
}

void s3_went_well(struct s3 *s)
{
    if (s->parallel < s->max_parallel) {
        s->parallel++;
        s3_turns_run(s);
    }
}

static void close_if_quiet(struct s3 *s)
{
    if (!s->closed_cb || !s->http_stopped || s->n_calls > 0)
        return;
    void (*cb)(void *arg) = s->closed_cb;
    void *arg = s->closed_arg;
    mb_http_client_destroy(s->http);
    s3_download_free_buffers(s);
    s3_settings_free(s);
    mb_free(s);
    cb(arg);
}

void s3_call_ended(struct s3 *s)
{
    s->n_calls--;
    close_if_quiet(s);
}

static void on_http_stopped(void *arg)
{
    struct s3 *s = arg;
    s->http_stopped = 1;
    close_if_quiet(s);
}

static void s3_close(struct mb_store *store, void (*done)(void *arg), void *arg)
{
    struct s3 *s = store->impl;
    s->closed_cb = done;
    s->closed_arg = arg;
    mb_http_client_stop(s->http, on_http_stopped, s);
}

static int s3_has_conditions(const struct mb_store *store)
{
    const struct s3 *s = store->impl;
    return !s->facts.no_conditions;
}

static uint64_t s3_part_bytes(const struct mb_store *store)
{
    const struct s3 *s = store->impl;
    return s->part_bytes;
}

static uint64_t s3_retries(const struct mb_store *store)
{
    const struct s3 *s = store->impl;
    return s->n_retries;
}

int mb_store_s3_open(struct mb_store *store, const char *rest, struct mb_err *err)
{
    static const struct mb_store_backend backend = {.start = s3_start,
                                                    .cancel = s3_cancel,
                                                    .go = s3_upload_go,
                                                    .set_priority = s3_upload_set_priority,
                                                    .close = s3_close,
                                                    .has_conditions = s3_has_conditions,
                                                    .part_bytes = s3_part_bytes,
                                                    .retries = s3_retries};
    struct s3 *s = mb_calloc(1, sizeof *s);
    if (!s)
        return mb_err_set(err, MB_ENOMEM, "s3: out of memory");
    s->loop = store->loop;
    int rc = s3_settings(s, rest, err);
    if (rc == 0)
        rc = mb_http_client_create(store->loop, S3_MAX_CONNECTIONS, &s->http, err);
    if (rc != 0) {
        s3_settings_free(s);
        mb_free(s);
        return rc;
    }
    mb_http_client_receive_ahead(s->http, RECEIVE_AHEAD_BYTES);
    store->backend = &backend;
    store->impl = s;
    return 0;
}
