/* See store_run.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/s3/s3_facts.h"
#include "store_run.h"

enum { TIMEOUT_MS = 20000 };

static void on_tick(uv_timer_t *t)
{
    (void)t;
}

struct mb_http_server *run_serve(uv_loop_t *loop, const struct mb_http_route *routes, size_t n,
                                 void *arg)
{
    struct mb_http_server_opts opts = {0};
    struct mb_http_server *srv;
    struct mb_err err;
    char url[64];
    int port;
    assert_int_equal(mb_http_server_create(loop, &opts, &srv, &err), 0);
    assert_int_equal(mb_http_server_add(srv, routes, n, arg, &err), 0);
    assert_int_equal(mb_http_server_listen(srv, &port, &err), 0);
    snprintf(url, sizeof url, "http://127.0.0.1:%d", port);
    setenv("BUCKET_STORAGE_HOST", url, 1);
    setenv("BUCKET_STORAGE_ACCESS_KEY", "key", 1);
    setenv("BUCKET_STORAGE_SECRET_KEY", "secret", 1);
    setenv("NO_PROXY", "127.0.0.1", 1);
    s3_facts_forget_all(); /* of an earlier server at this port */
    return srv;
}

void run_open(struct store_run *r, uv_loop_t *loop, const char *url)
{
    struct mb_err err;
    memset(r, 0, sizeof *r);
    r->loop = loop;
    if (mb_store_open(loop, url, &r->store, &err) != 0)
        fail_msg("%s", err.text);
    uv_timer_init(loop, &r->ticker);
    uv_timer_start(&r->ticker, on_tick, 5, 5);
}

static void on_closed(void *arg)
{
    struct store_run *r = arg;
    r->store = NULL;
}

void run_close(struct store_run *r)
{
    mb_store_close(r->store, on_closed, r);
    assert_non_null(r->store);
    while (r->store)
        mb_loop_turn(r->loop);
    uv_close((uv_handle_t *)&r->ticker, NULL);
    uv_run(r->loop, UV_RUN_DEFAULT);
    mb_buf_close(&r->data);
    mb_buf_close(&r->keys);
}

void run_on_result(void *arg, const struct mb_store_result *result)
{
    struct store_run *r = arg;
    r->n_calls++;
    r->error = result->error;
    snprintf(r->text, sizeof r->text, "%s", result->text);
    assert_true((result->error == 0) == (result->text[0] == '\0'));
    mb_buf_reset(&r->data);
    if (result->data)
        mb_buf_add(&r->data, result->data, result->data_len);
    r->size_bytes = result->size_bytes;
    r->crc64nvme = result->crc64nvme;
    snprintf(r->etag, sizeof r->etag, "%s", result->etag);
    mb_buf_reset(&r->keys);
    r->n_keys = result->n_entries;
    for (size_t i = 0; i < result->n_entries; i++)
        mb_buf_printf(&r->keys, "%s\n", result->entries[i].key);
}

void run_wait(struct store_run *r, int n_calls)
{
    while (r->n_calls < n_calls)
        mb_loop_turn(r->loop);
}

/* Waits for the operation that was just started with rc. */
static int end(struct store_run *r, int before, int rc, const struct mb_err *err)
{
    assert_int_equal(r->n_calls, before); /* never from inside */
    if (rc != 0) {
        r->error = rc;
        snprintf(r->text, sizeof r->text, "%s", err->text);
        return rc;
    }
    run_wait(r, before + 1);
    return r->error;
}

int run_put(struct store_run *r, const char *key, const char *text, enum mb_store_if cond,
            const char *etag)
{
    struct mb_err err;
    int before = r->n_calls;
    int rc = mb_store_put(r->store, key, text, strlen(text), cond, etag, TIMEOUT_MS, run_on_result,
                          r, &err);
    return end(r, before, rc, &err);
}

static void on_progress(void *arg, uint64_t done_bytes, uint64_t total_bytes)
{
    struct store_run *r = arg;
    assert_true(done_bytes <= total_bytes);
    r->progress_bytes = done_bytes;
}

static void on_upload_id(void *arg, const char *id)
{
    struct store_run *r = arg;
    snprintf(r->upload_id, sizeof r->upload_id, "%s", id);
}

int run_put_file(struct store_run *r, const char *key, const char *path, const char *resume_id)
{
    return run_put_file_if(r, key, path, resume_id, MB_STORE_ALWAYS, NULL);
}

int run_abort_uploads(struct store_run *r, const char *key, const char *upload_id)
{
    struct mb_err err;
    int before = r->n_calls;
    int rc = mb_store_abort_uploads(r->store, key, upload_id, TIMEOUT_MS, run_on_result, r, &err);
    return end(r, before, rc, &err);
}

int run_put_file_if(struct store_run *r, const char *key, const char *path, const char *resume_id,
                    enum mb_store_if cond, const char *etag)
{
    struct mb_err err;
    int before = r->n_calls;
    struct mb_store_put_file req = {.key = key,
                                    .path = path,
                                    .resume_upload_id = resume_id,
                                    .on_upload_id = on_upload_id,
                                    .progress = on_progress,
                                    .cond = cond,
                                    .etag = etag,
                                    .timeout_ms = 100000};
    int rc = mb_store_put_file(r->store, &req, run_on_result, r, &err);
    return end(r, before, rc, &err);
}

int run_get(struct store_run *r, const char *key, size_t max_bytes)
{
    struct mb_err err;
    int before = r->n_calls;
    int rc = mb_store_get(r->store, key, max_bytes, TIMEOUT_MS, run_on_result, r, &err);
    return end(r, before, rc, &err);
}

int run_get_file(struct store_run *r, const char *key, const char *path)
{
    struct mb_err err;
    int before = r->n_calls;
    int rc = mb_store_get_file(r->store, key, path, on_progress, 100000, run_on_result, r, &err);
    return end(r, before, rc, &err);
}

int run_head(struct store_run *r, const char *key)
{
    struct mb_err err;
    int before = r->n_calls;
    int rc = mb_store_head(r->store, key, TIMEOUT_MS, run_on_result, r, &err);
    return end(r, before, rc, &err);
}

int run_list(struct store_run *r, const char *prefix)
{
    struct mb_err err;
    int before = r->n_calls;
    int rc = mb_store_list(r->store, prefix, TIMEOUT_MS, run_on_result, r, &err);
    return end(r, before, rc, &err);
}

int run_delete(struct store_run *r, const char *key)
{
    struct mb_err err;
    int before = r->n_calls;
    int rc = mb_store_delete(r->store, key, TIMEOUT_MS, run_on_result, r, &err);
    return end(r, before, rc, &err);
}

int run_get_file_as(struct store_run *r, const struct mb_store_get_file *req)
{
    struct mb_err err;
    int before = r->n_calls;
    int rc = mb_store_get_file_as(r->store, req, run_on_result, r, &err);
    return end(r, before, rc, &err);
}
