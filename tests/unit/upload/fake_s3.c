/* See fake_s3.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/http/server.h"
#include "base/s3/s3_facts.h"
#include "base/str.h"
#include "fake_s3.h"

enum { MAX_OBJECTS = 2000, MAX_UPLOADS = 500, MAX_PARTS = 64, MAX_HELD = 200, KEPT = 1 << 20 };

#define PREFIX "/bucket/p/"
#define SUM    "x-amz-checksum-crc64nvme"

struct object {
    char key[200], etag[24], sum[24];
    char *bytes; /* NULL: too many, or deleted */
    size_t n;
    int is_there;
};

struct upload {
    char key[200], id[24];
    size_t parts[MAX_PARTS]; /* bytes + 1; 0: not there */
    char sums[MAX_PARTS][24];
    int is_open;
};

struct fake_s3 {
    struct mb_http_server *srv;
    fake_judge_cb judge;
    void *arg;
    struct object objects[MAX_OBJECTS];
    size_t n_objects;
    struct upload uploads[MAX_UPLOADS];
    size_t n_uploads;
    struct mb_http_req *held[MAX_HELD];
    size_t n_held;
    unsigned last_etag;
    int is_closing, is_stopped;
    uv_loop_t *loop;
};

/* ---- what is there ---- */

static struct object *find(const struct fake_s3 *s, const char *key)
{
    for (size_t i = 0; i < s->n_objects; i++)
        if (s->objects[i].is_there && strcmp(s->objects[i].key, key) == 0)
            return (struct object *)(uintptr_t)&s->objects[i];
    return NULL;
}

static struct upload *find_upload(const struct fake_s3 *s, const char *id)
{
    for (size_t i = 0; i < s->n_uploads; i++)
        if (s->uploads[i].is_open && strcmp(s->uploads[i].id, id) == 0)
            return (struct upload *)(uintptr_t)&s->uploads[i];
    return NULL;
}

int fake_has_object(const struct fake_s3 *s, const char *key)
{
    return find(s, key) != NULL;
}

const char *fake_object(const struct fake_s3 *s, const char *key)
{
    const struct object *o = find(s, key);

    return o != NULL ? o->bytes : NULL;
}

size_t fake_count_uploads(const struct fake_s3 *s, const char *key)
{
    size_t n = 0;

    for (size_t i = 0; i < s->n_uploads; i++)
        n += s->uploads[i].is_open && (key == NULL || strcmp(s->uploads[i].key, key) == 0);
    return n;
}

int fake_has_upload(const struct fake_s3 *s, const char *id)
{
    return find_upload(s, id) != NULL;
}

const char *fake_begin_upload(struct fake_s3 *s, const char *key)
{
    struct upload *up = &s->uploads[s->n_uploads++];

    assert_true(s->n_uploads <= MAX_UPLOADS);
    snprintf(up->key, sizeof(up->key), "%s", key);
    snprintf(up->id, sizeof(up->id), "u%zu", s->n_uploads);
    up->is_open = 1;
    return up->id;
}

/* ---- answers ---- */

static void reply(struct mb_http_req *req, int status, const char *body)
{
    mb_http_reply(req, status, "application/xml", body, strlen(body));
}

static void reply_error(struct mb_http_req *req, int status, const char *code)
{
    char body[200];

    snprintf(body, sizeof(body), "<Error><Code>%s</Code><Message>m</Message></Error>", code);
    reply(req, status, body);
}

/* 1: refused, and answered. */
static int is_refused(const struct fake_s3 *s, const char *key, struct mb_http_req *req)
{
    const char *none = mb_http_req_header(req, "if-none-match");
    const char *match = mb_http_req_header(req, "if-match");
    const struct object *o = find(s, key);

    if (match != NULL && o == NULL)
        reply_error(req, 404, "NoSuchKey");
    else if ((none != NULL && o != NULL) || (match != NULL && strcmp(match, o->etag) != 0))
        reply_error(req, 412, "PreconditionFailed");
    else
        return 0;
    return 1;
}

static struct object *put_object(struct fake_s3 *s, const char *key, const void *p, size_t n,
                                 struct mb_http_req *req)
{
    struct object *o = find(s, key);
    const char *sum = mb_http_req_header(req, SUM);

    if (o == NULL)
        o = &s->objects[s->n_objects++];
    assert_true(s->n_objects <= MAX_OBJECTS);
    free(o->bytes);
    *o = (struct object){.n = n, .is_there = 1};
    snprintf(o->key, sizeof(o->key), "%s", key);
    snprintf(o->etag, sizeof(o->etag), "\"e%u\"", ++s->last_etag);
    snprintf(o->sum, sizeof(o->sum), "%s", sum != NULL ? sum : "");
    if (n <= KEPT && p != NULL) {
        o->bytes = calloc(1, n + 1);
        memcpy(o->bytes, p, n);
    }
    return o;
}

static void on_put(struct fake_s3 *s, const char *key, struct mb_http_req *req)
{
    const char *id = mb_http_req_query(req, "uploadId");
    const char *number = mb_http_req_query(req, "partNumber");
    size_t n;
    const void *p = mb_http_req_body(req, &n);

    if (id == NULL) {
        if (is_refused(s, key, req))
            return;
        mb_http_reply_header(req, "ETag", put_object(s, key, p, n, req)->etag);
        reply(req, 200, "");
        return;
    }
    struct upload *up = find_upload(s, id);
    int at = atoi(number) - 1;

    if (up == NULL) {
        reply_error(req, 404, "NoSuchUpload");
        return;
    }
    assert_true(at >= 0 && at < MAX_PARTS);
    up->parts[at] = n + 1;
    snprintf(up->sums[at], sizeof(up->sums[at]), "%s", mb_http_req_header(req, SUM));
    mb_http_reply_header(req, "ETag", "\"part\"");
    reply(req, 200, "");
}

static void on_post(struct fake_s3 *s, const char *key, struct mb_http_req *req)
{
    const char *id = mb_http_req_query(req, "uploadId");
    char body[300];
    size_t n = 0;

    if (id == NULL) {
        snprintf(body, sizeof(body),
                 "<InitiateMultipartUploadResult><UploadId>%s</UploadId>"
                 "</InitiateMultipartUploadResult>",
                 fake_begin_upload(s, key));
        reply(req, 200, body);
        return;
    }
    struct upload *up = find_upload(s, id);

    if (up == NULL) {
        reply_error(req, 404, "NoSuchUpload");
        return;
    }
    if (is_refused(s, key, req))
        return;
    for (int i = 0; i < MAX_PARTS; i++)
        n += up->parts[i] > 0 ? up->parts[i] - 1 : 0;
    up->is_open = 0;
    snprintf(body, sizeof(body),
             "<CompleteMultipartUploadResult><ETag>%s</ETag></CompleteMultipartUploadResult>",
             put_object(s, key, NULL, n, req)->etag);
    reply(req, 200, body);
}

static void on_delete(struct fake_s3 *s, const char *key, struct mb_http_req *req)
{
    const char *id = mb_http_req_query(req, "uploadId");
    struct object *o = find(s, key);
    struct upload *up = id != NULL ? find_upload(s, id) : NULL;

    if (id != NULL && up == NULL) {
        reply_error(req, 404, "NoSuchUpload");
        return;
    }
    if (up != NULL)
        up->is_open = 0;
    else if (o != NULL)
        o->is_there = 0;
    reply(req, 204, "");
}

static void list_objects(struct fake_s3 *s, struct mb_http_req *req)
{
    const char *prefix = mb_http_req_query(req, "prefix");
    struct mb_buf body = {0};

    mb_buf_puts(&body, "<ListBucketResult>");
    for (size_t i = 0; i < s->n_objects; i++)
        if (s->objects[i].is_there && mb_starts_with(s->objects[i].key, prefix + 2))
            mb_buf_printf(&body,
                          "<Contents><Key>p/%s</Key><ETag>&quot;%.*s&quot;</ETag>"
                          "<Size>%zu</Size></Contents>",
                          s->objects[i].key, (int)strlen(s->objects[i].etag) - 2,
                          s->objects[i].etag + 1, s->objects[i].n);
    mb_buf_puts(&body, "</ListBucketResult>");
    reply(req, 200, mb_buf_str(&body));
    mb_buf_close(&body);
}

static void list_uploads(struct fake_s3 *s, struct mb_http_req *req)
{
    const char *prefix = mb_http_req_query(req, "prefix");
    struct mb_buf body = {0};

    mb_buf_puts(&body, "<ListMultipartUploadsResult>");
    for (size_t i = 0; i < s->n_uploads; i++)
        if (s->uploads[i].is_open && mb_starts_with(s->uploads[i].key, prefix + 2))
            mb_buf_printf(&body,
                          "<Upload><Key>p/%s</Key><UploadId>%s</UploadId>"
                          "<Initiated>2026-11-22T10:00:00.000Z</Initiated></Upload>",
                          s->uploads[i].key, s->uploads[i].id);
    mb_buf_puts(&body, "</ListMultipartUploadsResult>");
    reply(req, 200, mb_buf_str(&body));
    mb_buf_close(&body);
}

static void list_parts(struct fake_s3 *s, const char *id, struct mb_http_req *req)
{
    const struct upload *up = find_upload(s, id);
    struct mb_buf body = {0};

    if (up == NULL) {
        reply_error(req, 404, "NoSuchUpload");
        return;
    }
    mb_buf_puts(&body, "<ListPartsResult>");
    for (int i = 0; i < MAX_PARTS; i++)
        if (up->parts[i] > 0)
            mb_buf_printf(&body,
                          "<Part><PartNumber>%d</PartNumber><ETag>&quot;part&quot;</ETag>"
                          "<Size>%zu</Size><ChecksumCRC64NVME>%s</ChecksumCRC64NVME></Part>",
                          i + 1, up->parts[i] - 1, up->sums[i]);
    mb_buf_puts(&body, "</ListPartsResult>");
    reply(req, 200, mb_buf_str(&body));
    mb_buf_close(&body);
}

static void on_get(struct fake_s3 *s, const char *key, struct mb_http_req *req)
{
    const struct object *o = find(s, key);
    char *zeros;

    if (mb_http_req_query(req, "list-type") != NULL) {
        list_objects(s, req);
    } else if (mb_http_req_query(req, "uploads") != NULL) {
        list_uploads(s, req);
    } else if (mb_http_req_query(req, "uploadId") != NULL) {
        list_parts(s, mb_http_req_query(req, "uploadId"), req);
    } else if (o == NULL) {
        reply_error(req, 404, "NoSuchKey");
    } else {
        zeros = o->bytes == NULL ? calloc(1, o->n + 1) : NULL; /* its length counts */
        mb_http_reply_header(req, "ETag", o->etag);
        mb_http_reply_header(req, SUM, o->sum);
        mb_http_reply(req, 200, "application/octet-stream", zeros != NULL ? zeros : o->bytes, o->n);
        free(zeros);
    }
}

/* ---- requests ---- */

static void on_request(void *arg, struct mb_http_req *req)
{
    struct fake_s3 *s = arg;
    const char *method = mb_http_req_method(req), *path = mb_http_req_path(req);
    const char *number = mb_http_req_query(req, "partNumber");
    char key[200] = "";
    enum fake_verdict verdict;

    if (mb_starts_with(path, PREFIX))
        snprintf(key, sizeof(key), "%s", path + strlen(PREFIX));
    verdict = s->is_closing   ? FAKE_FAIL
              : s->judge != 0 ? s->judge(s->arg, method, key, number != NULL ? atoi(number) : 0)
                              : FAKE_ANSWER;
    if (verdict == FAKE_HOLD) {
        assert_true(s->n_held < MAX_HELD);
        s->held[s->n_held++] = req;
    } else if (verdict == FAKE_FAIL) {
        reply_error(req, 503, "SlowDown");
    } else if (strcmp(method, "PUT") == 0) {
        on_put(s, key, req);
    } else if (strcmp(method, "POST") == 0) {
        on_post(s, key, req);
    } else if (strcmp(method, "DELETE") == 0) {
        on_delete(s, key, req);
    } else {
        on_get(s, key, req);
    }
}

struct fake_s3 *fake_open(uv_loop_t *loop, fake_judge_cb judge, void *arg)
{
    static const struct mb_http_route routes[] = {{"GET", "/{path*}", on_request, 0},
                                                  {"PUT", "/{path*}", on_request, 0},
                                                  {"POST", "/{path*}", on_request, 0},
                                                  {"DELETE", "/{path*}", on_request, 0}};
    struct mb_http_server_opts opts = {.max_body_bytes = 64 << 20};
    struct fake_s3 *s = calloc(1, sizeof(*s));
    struct mb_err err;
    char url[64];
    int port;

    s->loop = loop;
    s->judge = judge;
    s->arg = arg;
    assert_int_equal(mb_http_server_create(loop, &opts, &s->srv, &err), 0);
    assert_int_equal(mb_http_server_add(s->srv, routes, 4, s, &err), 0);
    assert_int_equal(mb_http_server_listen(s->srv, &port, &err), 0);
    snprintf(url, sizeof(url), "http://127.0.0.1:%d", port);
    setenv("BUCKET_STORAGE_HOST", url, 1);
    setenv("BUCKET_STORAGE_ACCESS_KEY", "key", 1);
    setenv("BUCKET_STORAGE_SECRET_KEY", "secret", 1);
    setenv("NO_PROXY", "127.0.0.1", 1);
    s3_facts_forget_all(); /* of an earlier server at this port */
    return s;
}

void fake_release(struct fake_s3 *s)
{
    struct mb_http_req *held[MAX_HELD];
    size_t n = s->n_held;

    memcpy(held, s->held, sizeof(held));
    s->n_held = 0;
    for (size_t i = 0; i < n; i++)
        on_request(s, held[i]);
}

static void on_stopped(void *arg)
{
    ((struct fake_s3 *)arg)->is_stopped = 1;
}

void fake_close(struct fake_s3 *s)
{
    s->is_closing = 1;
    fake_release(s);
    mb_http_server_stop(s->srv, on_stopped, s);
    while (!s->is_stopped)
        uv_run(s->loop, UV_RUN_ONCE);
    mb_http_server_destroy(s->srv);
    for (size_t i = 0; i < s->n_objects; i++)
        free(s->objects[i].bytes);
    free(s);
}
