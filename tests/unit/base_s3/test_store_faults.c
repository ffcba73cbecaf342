/*
 * What the S3 backend does when a server misbehaves. The peer is our own HTTP server, which answers
 * each request with the next line of a script: the answers are those S3 documents for these faults.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/loop.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/http/server.h"
#include "base/s3/internal.h"
#include "base/s3/s3.h"
#include "base/str.h"
#include "store_run.h"

struct answer {
    int status; /* 0: the connection breaks after the request was taken */
    const char *body;
    const char *header; /* "Name: value", or NULL */
};

struct world {
    uv_loop_t loop;
    struct mb_http_server *srv;
    struct store_run r;
    const struct answer *script;
    size_t n_script;
    size_t n_requests;
    char seen[1024][160]; /* "METHOD path?uploads" and what the test looks at */
    char sum[64];         /* the value of the checksum header */
    char authorization[300];
    int stopped;
};

/* Breaks the connection: a streaming answer that fails at its first byte. */
static long pull_break(void *arg, void *buf, size_t max)
{
    (void)arg;
    (void)buf;
    (void)max;
    return MB_EIO;
}

static const char *const sum_headers[][2] = {{"x-amz-checksum-crc64nvme", " sum"},
                                             {"x-amz-checksum-crc32c", " crc32c"},
                                             {"content-md5", " md5"}};

static const char *sum_kind(struct mb_http_req *req)
{
    for (size_t i = 0; i < 3; i++) {
        if (mb_http_req_header(req, sum_headers[i][0]))
            return sum_headers[i][1];
    }
    return "";
}

static const char *sum_value(struct mb_http_req *req)
{
    for (size_t i = 0; i < 3; i++) {
        if (mb_http_req_header(req, sum_headers[i][0]))
            return mb_http_req_header(req, sum_headers[i][0]);
    }
    return "";
}

static int take_part(void *arg, struct mb_http_req *req, const void *p, size_t n, int error_code)
{
    struct world *w = arg;
    (void)p;
    if (n > 0)
        return 0;
    (void)error_code;
    assert_true(w->n_requests < w->n_script); /* no request beyond the script */
    const struct answer *a = &w->script[w->n_requests];
    const char *auth = mb_http_req_header(req, "Authorization");
    const char *query = mb_http_req_query(req, "partNumber");
    snprintf(w->authorization, sizeof w->authorization, "%s", auth ? auth : "");
    snprintf(w->seen[w->n_requests++], sizeof *w->seen, "%s %s%s%s%s%s", mb_http_req_method(req),
             mb_http_req_path(req), query ? " part " : "", query ? query : "",
             mb_http_req_query(req, "uploads") ? " uploads" : "", sum_kind(req));
    snprintf(w->sum, sizeof w->sum, "%s", sum_value(req));
    if (a->status == 0) {
        mb_http_reply_stream(req, 200, "text/plain", pull_break, NULL, NULL);
        return 0;
    }
    if (a->header) {
        char name[64];
        const char *colon = strchr(a->header, ':');
        snprintf(name, sizeof name, "%.*s", (int)(colon - a->header), a->header);
        mb_http_reply_header(req, name, colon + 2);
    }
    mb_http_reply(req, a->status, "application/xml", a->body, strlen(a->body));
    return 0;
}

static void on_request(void *arg, struct mb_http_req *req)
{
    mb_http_req_body_cb(req, take_part, arg);
}

static void world_open(struct world *w, const struct answer *script, size_t n)
{
    static const struct mb_http_route routes[] = {
        {"GET", "/{path*}", on_request, MB_HTTP_BODY_STREAM},
        {"PUT", "/{path*}", on_request, MB_HTTP_BODY_STREAM},
        {"POST", "/{path*}", on_request, MB_HTTP_BODY_STREAM},
        {"DELETE", "/{path*}", on_request, MB_HTTP_BODY_STREAM}};
    memset(w, 0, sizeof *w);
    w->script = script;
    w->n_script = n;
    uv_loop_init(&w->loop);
    w->srv = run_serve(&w->loop, routes, 4, w);
    run_open(&w->r, &w->loop, "s3://bucket/p");
}

static void on_reopened(void *arg)
{
    struct world *w = arg;
    w->r.store = NULL;
}

/* Another store of the same process; the server goes on. */
static void world_reopen(struct world *w)
{
    struct mb_err err;
    mb_store_close(w->r.store, on_reopened, w);
    while (w->r.store)
        mb_loop_turn(&w->loop);
    assert_int_equal(mb_store_open(&w->loop, "s3://bucket/p", &w->r.store, &err), 0);
}

static void on_stopped(void *arg)
{
    struct world *w = arg;
    w->stopped = 1;
}

static void world_close(struct world *w)
{
    assert_int_equal(w->n_requests, w->n_script);
    mb_http_server_stop(w->srv, on_stopped, w);
    run_close(&w->r);
    uv_run(&w->loop, UV_RUN_DEFAULT);
    assert_true(w->stopped);
    mb_http_server_destroy(w->srv);
    assert_int_equal(uv_loop_close(&w->loop), 0);
}

#define SCRIPT(...)                                                                                \
    static const struct answer script[] = {__VA_ARGS__};                                           \
    struct world w;                                                                                \
    (void)state;                                                                                   \
    world_open(&w, script, sizeof script / sizeof *script)

#define ERROR(code) "<Error><Code>" code "</Code><Message>m</Message></Error>"

static void test_retries(void **state)
{
    SCRIPT({503, ERROR("SlowDown"), NULL}, {500, "", NULL}, {0, "", NULL}, {429, "", NULL},
           {400, ERROR("RequestTimeout"), NULL}, {200, "", "ETag: \"e\""});
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_ALWAYS, NULL), 0);
    assert_string_equal(w.r.etag, "\"e\"");
    assert_string_equal(w.seen[0], "PUT /bucket/p/k sum");
    assert_int_equal(mb_store_retries(w.r.store), 5); /* the first one is none */
    world_close(&w);
}

/* A server that says so gets half as many transfers at a time, and one more with each that goes
 * well; other faults change nothing. */
static void test_slow_down(void **state)
{
    SCRIPT({503, ERROR("SlowDown"), NULL}, {500, "", NULL}, {0, "", NULL}, {429, "", NULL},
           {200, "", "ETag: \"e\""}, {503, ERROR("SlowDown"), NULL}, {503, "", NULL},
           {503, "", NULL}, {200, "", "ETag: \"e\""}, {200, "", "ETag: \"e\""});
    const struct s3 *s = w.r.store->impl;
    unsigned first = s->parallel;
    char path[] = "/tmp/mobula-small-XXXXXX";
    int fd = mkstemp(path);
    assert_true(first >= 4 && s->max_parallel >= first);
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_ALWAYS, NULL), 0);
    assert_int_equal(s->parallel, first / 4);
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_ALWAYS, NULL), 0);
    assert_int_equal(s->parallel, first / 32 > 1 ? first / 32 : 1); /* one is always left */
    assert_int_equal(run_put_file(&w.r, "k", path, NULL), 0);
    assert_int_equal(s->parallel, (first / 32 > 1 ? first / 32 : 1) + 1);
    world_close(&w);
    close(fd);
    unlink(path);
}

static void test_final_errors(void **state)
{
    SCRIPT({403, ERROR("AccessDenied"), NULL}, {400, ERROR("MalformedXML"), NULL},
           {404, ERROR("NoSuchKey"), NULL});
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_ALWAYS, NULL), MB_EDENIED);
    assert_non_null(strstr(w.r.text, "AccessDenied: m"));
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_ALWAYS, NULL), MB_EPROTO);
    assert_int_equal(run_get(&w.r, "k", 10), MB_ENOENT);
    world_close(&w);
}

static void test_conflict_is_no_failed_condition(void **state)
{
    SCRIPT({409, ERROR("ConditionalRequestConflict"), NULL}, {200, "", NULL},
           {412, ERROR("PreconditionFailed"), NULL}, {412, ERROR("PreconditionFailed"), NULL});
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_IF_ABSENT, NULL), 0);
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_IF_ABSENT, NULL), MB_EEXIST);
    world_close(&w);
}

/* The first answer was lost; the failed condition of the second attempt is our own success. */
static void test_lost_answer(void **state)
{
    SCRIPT({0, "", NULL}, {412, ERROR("PreconditionFailed"), NULL}, {200, "mine", "ETag: \"e\""},
           {0, "", NULL}, {412, ERROR("PreconditionFailed"), NULL}, {200, "other", NULL});
    assert_int_equal(run_put(&w.r, "k", "mine", MB_STORE_IF_ABSENT, NULL), 0);
    assert_string_equal(w.r.etag, "\"e\"");
    assert_int_equal(run_put(&w.r, "k", "mine", MB_STORE_IF_ABSENT, NULL), MB_EEXIST);
    world_close(&w);
}

static void test_region_and_clock(void **state)
{
    SCRIPT({301, ERROR("PermanentRedirect"), "x-amz-bucket-region: eu-west-1"},
           {403, ERROR("RequestTimeTooSkewed"), "Date: Fri, 24 May 2013 00:00:00 GMT"},
           {200, "", NULL},
           {400,
            "<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-2</Region></Error>",
            NULL},
           {200, "", NULL});
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_ALWAYS, NULL), 0);
    assert_non_null(strstr(w.authorization, "/20130524/eu-west-1/s3/"));
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_ALWAYS, NULL), 0);
    assert_non_null(strstr(w.authorization, "/20130524/eu-west-2/s3/"));
    world_close(&w);
}

/* A region becomes part of a host's name: what is none is not followed. */
static void test_odd_region(void **state)
{
    SCRIPT({301, ERROR("PermanentRedirect"), "x-amz-bucket-region: evil.example.com/"},
           {400, "<Error><Code>AuthorizationHeaderMalformed</Code><Region>a.b</Region></Error>",
            NULL});
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_ALWAYS, NULL), MB_EPROTO);
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_ALWAYS, NULL), MB_EPROTO);
    world_close(&w);
}

/* Weaker checksums are tried; what was taken is remembered, also by the next store. The values are
 * those of "123456789": CRC32C by RFC 3720, MD5 by coreutils. */
static void test_weaker_checksums(void **state)
{
    SCRIPT({501, ERROR("NotImplemented"), NULL}, {200, "", NULL}, {200, "", NULL},
           {501, ERROR("NotImplemented"), NULL});
    assert_int_equal(run_put(&w.r, "k", "123456789", MB_STORE_ALWAYS, NULL), 0);
    assert_string_equal(w.seen[0], "PUT /bucket/p/k sum");
    assert_string_equal(w.seen[1], "PUT /bucket/p/k crc32c");
    assert_string_equal(w.sum, "4waSgw==");
    world_reopen(&w);
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_ALWAYS, NULL), 0);
    assert_string_equal(w.seen[2], "PUT /bucket/p/k crc32c");
    /* CRC32C was taken before: this refusal has another reason. */
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_ALWAYS, NULL), MB_EUNSUPPORTED);
    world_close(&w);
}

static void test_content_md5(void **state)
{
    SCRIPT({400, ERROR("InvalidRequest"), NULL}, {400, ERROR("InvalidArgument"), NULL},
           {200, "", NULL}, {200, "", NULL});
    assert_int_equal(run_put(&w.r, "k", "123456789", MB_STORE_ALWAYS, NULL), 0);
    assert_string_equal(w.seen[2], "PUT /bucket/p/k md5");
    assert_string_equal(w.sum, "JfnnlDI7RTiF9RgfG2JNCw==");
    assert_int_equal(run_put(&w.r, "k", "", MB_STORE_ALWAYS, NULL), 0);
    assert_string_equal(w.sum, "1B2M2Y8AsgTpgAmY7PhCfg==");
    world_close(&w);
}

static void test_no_checksums(void **state)
{
    SCRIPT({501, ERROR("NotImplemented"), NULL}, {501, ERROR("NotImplemented"), NULL},
           {501, ERROR("NotImplemented"), NULL}, {200, "", NULL}, {200, "", NULL});
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_ALWAYS, NULL), 0);
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_ALWAYS, NULL), 0);
    assert_string_equal(w.seen[3], "PUT /bucket/p/k");
    assert_string_equal(w.seen[4], "PUT /bucket/p/k");
    world_close(&w);
}

/* A refusal that no weaker checksum mends says nothing about checksums. */
static void test_refused_whatever_the_checksum(void **state)
{
    SCRIPT({400, ERROR("InvalidRequest"), NULL}, {400, ERROR("InvalidRequest"), NULL},
           {400, ERROR("InvalidRequest"), NULL}, {400, ERROR("InvalidRequest"), NULL},
           {200, "", NULL});
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_ALWAYS, NULL), MB_EPROTO);
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_ALWAYS, NULL), 0);
    assert_string_equal(w.seen[4], "PUT /bucket/p/k sum");
    world_close(&w);
}

/* One that takes conditions and does not heed them is found out by repeating the first creation. */
static void test_conditions_not_heeded(void **state)
{
    SCRIPT({200, "", "ETag: \"e\""}, {200, "", NULL}, {200, "", NULL}, {200, "", NULL});
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_IF_ABSENT, NULL), MB_EUNSUPPORTED);
    assert_int_equal(mb_store_has_conditions(w.r.store), 0);
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_IF_ABSENT, NULL), MB_EUNSUPPORTED);
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_ALWAYS, NULL), 0);
    world_close(&w);
}

/* One that heeds them is asked once more than needed, in the life of the process; a repetition that
 * finds the object deleted, or no server, says nothing. */
static void test_conditions_heeded(void **state)
{
    SCRIPT({200, "", NULL}, {403, ERROR("AccessDenied"), NULL}, {200, "", "ETag: \"e\""},
           {200, "", NULL}, {412, ERROR("PreconditionFailed"), NULL}, {200, "", NULL},
           {200, "", NULL});
    assert_int_equal(run_put(&w.r, "a", "x", MB_STORE_IF_ABSENT, NULL), 0);
    assert_int_equal(run_put(&w.r, "b", "x", MB_STORE_IF_ABSENT, NULL), 0);
    assert_string_equal(w.r.etag, "\"e\"");
    assert_int_equal(mb_store_has_conditions(w.r.store), 1);
    assert_int_equal(run_put(&w.r, "c", "x", MB_STORE_IF_ABSENT, NULL), 0);
    world_reopen(&w);
    assert_int_equal(run_put(&w.r, "d", "x", MB_STORE_IF_ABSENT, NULL), 0);
    world_close(&w);
}

/* A server without conditional writes is asked once; nothing is written behind the caller's back.
 */
static void test_no_conditions(void **state)
{
    SCRIPT({200, "", NULL}, {501, ERROR("NotImplemented"), NULL}, {200, "", NULL});
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_ALWAYS, NULL), 0);
    assert_int_equal(mb_store_has_conditions(w.r.store), 1);
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_IF_ABSENT, NULL), MB_EUNSUPPORTED);
    assert_non_null(strstr(w.r.text, "conditional"));
    assert_int_equal(mb_store_has_conditions(w.r.store), 0);
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_IF_MATCH, "e"), MB_EUNSUPPORTED);
    assert_int_equal(w.n_requests, 2);
    world_reopen(&w);
    assert_int_equal(mb_store_has_conditions(w.r.store), 0);
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_IF_ABSENT, NULL), MB_EUNSUPPORTED);
    assert_int_equal(run_put(&w.r, "k", "x", MB_STORE_ALWAYS, NULL), 0);
    world_close(&w);
}

static void make_file(char path[32])
{
    snprintf(path, 32, "/tmp/mobula-part-XXXXXX");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, 65 * 1024 * 1024), 0); /* five parts, all zeros */
    close(fd);
}

#define CREATED                                                                                    \
    {                                                                                              \
        200,                                                                                       \
            "<InitiateMultipartUploadResult><UploadId>u1</UploadId></"                             \
            "InitiateMultipartUploadResult>",                                                      \
            NULL                                                                                   \
    }
#define PART_OK                                                                                    \
    {                                                                                              \
        200, "", "ETag: \"p\""                                                                     \
    }
#define COMPLETED                                                                                  \
    {                                                                                              \
        200,                                                                                       \
            "\n "                                                                                  \
            "\n<CompleteMultipartUploadResult><ETag>\"all\"</ETag></"                              \
            "CompleteMultipartUploadResult>",                                                      \
            NULL                                                                                   \
    }

/* An error inside a 200 is an error; InternalError is worth another attempt. */
static void test_error_in_200(void **state)
{
    SCRIPT(CREATED, PART_OK, PART_OK, PART_OK, PART_OK, PART_OK,
           {200, "\n\n" ERROR("InternalError"), NULL}, COMPLETED);
    char path[32];
    make_file(path);
    assert_int_equal(run_put_file(&w.r, "k", path, NULL), 0);
    assert_string_equal(w.r.etag, "\"all\"");
    assert_string_equal(w.r.upload_id, "u1");
    assert_string_equal(w.seen[0], "POST /bucket/p/k uploads");
    assert_int_equal(strncmp(w.seen[1], "PUT /bucket/p/k part ", 21), 0);
    unlink(path);
    world_close(&w);
}

/* A refusal for good aborts the upload. */
static void test_abort(void **state)
{
    SCRIPT(CREATED, PART_OK, PART_OK, PART_OK, PART_OK, PART_OK, {400, ERROR("InvalidPart"), NULL},
           {204, "", NULL});
    char path[32];
    make_file(path);
    assert_int_equal(run_put_file(&w.r, "k", path, NULL), MB_EPROTO);
    assert_non_null(strstr(w.r.text, "InvalidPart"));
    assert_string_equal(w.seen[7], "DELETE /bucket/p/k");
    unlink(path);
    world_close(&w);
}

#define UPLOAD(key, id, began)                                                                     \
    "<Upload><Key>" key "</Key><UploadId>" id "</UploadId><Initiated>" began "</Initiated></"      \
    "Upload>"

/* The server carried the first create out and its answer was lost: that upload is found and
 * aborted before the first part goes, and neither an old one, nor ours, nor that of another key is;
 * at the end one that came late is looked for. */
static void test_stray_upload(void **state)
{
    SCRIPT({0, "", NULL}, CREATED,
           {200,
            "<ListMultipartUploadsResult><IsTruncated>true</IsTruncated>"
            "<NextKeyMarker>p/k</NextKeyMarker><NextUploadIdMarker>u7</NextUploadIdMarker>" UPLOAD(
                "p/k", "u7", "2001-01-01T00:00:00.000Z")
                UPLOAD("p/k", "u1", "2999-01-01T00:00:00.000Z")
                    UPLOAD("p/k", "u8", "2999-01-01T00:00:00.000Z") "</ListMultipartUploadsResult>",
            NULL},
           {200,
            "<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>" UPLOAD(
                "p/kk", "u9", "2999-01-01T00:00:00.000Z") "</ListMultipartUploadsResult>",
            NULL},
           {204, "", NULL}, {404, ERROR("NoSuchUpload"), NULL}, PART_OK, PART_OK, PART_OK, PART_OK,
           PART_OK, COMPLETED,
           {200,
            "<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>"
            "</ListMultipartUploadsResult>",
            NULL});
    char path[32];
    make_file(path);
    assert_int_equal(run_put_file(&w.r, "k", path, NULL), 0);
    assert_string_equal(w.seen[4], "DELETE /bucket/p/k");
    unlink(path);
    world_close(&w);
}

/* Aborting what is not there is success; what a late part keeps alive is aborted again; what the
 * server refuses is told. */
static void test_abort_alone(void **state)
{
    SCRIPT({204, "", NULL}, {404, ERROR("NoSuchUpload"), NULL}, {404, ERROR("NoSuchUpload"), NULL},
           {404, ERROR("NoSuchUpload"), NULL}, {204, "", NULL}, {200, "<ListPartsResult/>", NULL},
           {204, "", NULL}, {404, ERROR("NoSuchUpload"), NULL}, {404, ERROR("NoSuchBucket"), NULL},
           {403, ERROR("AccessDenied"), NULL}, {403, ERROR("AccessDenied"), NULL});
    for (int i = 0; i < 3; i++)
        assert_int_equal(run_abort_uploads(&w.r, "k", "u1"), 0);
    assert_int_equal(w.n_requests, 8);
    assert_int_equal(run_abort_uploads(&w.r, "k", "u1"), MB_ENOENT);
    assert_int_equal(run_abort_uploads(&w.r, "k", "u1"), MB_EDENIED);
    assert_int_equal(run_abort_uploads(&w.r, "k", NULL), MB_EDENIED);
    assert_string_equal(w.seen[10], "GET /bucket uploads");
    world_close(&w);
}

/* The server tells no checksums of parts, which is what their etags are for. It lists two good
 * parts, one of another size, one of other bytes and one whose etag is no checksum: three are sent.
 */
static void test_resume_sends_what_lacks(void **state)
{
    SCRIPT({200,
            "<ListPartsResult><IsTruncated>true</IsTruncated>"
            "<NextPartNumberMarker>2</NextPartNumberMarker>"
            "<Part><PartNumber>1</PartNumber><ETag>\"2c7ab85a893283e98c931e9511add182\"</ETag>"
            "<Size>16777216</Size></Part>"
            "<Part><PartNumber>2</PartNumber><ETag>\"2\"</ETag><Size>5</Size></Part>"
            "</ListPartsResult>",
            NULL},
           {200,
            "<ListPartsResult><IsTruncated>false</IsTruncated>"
            "<Part><PartNumber>3</PartNumber><ETag>\"2c7ab85a893283e98c931e9511add183\"</ETag>"
            "<Size>16777216</Size></Part>"
            "<Part><PartNumber>4</PartNumber><ETag>\"opaque\"</ETag><Size>16777216</Size></Part>"
            "<Part><PartNumber>5</PartNumber><ETag>B6D81B360A5672D80C27430F39153E2C</ETag>"
            "<Size>1048576</Size></Part></ListPartsResult>",
            NULL},
           PART_OK, PART_OK, PART_OK, COMPLETED);
    char path[32];
    make_file(path);
    assert_int_equal(run_put_file(&w.r, "k", path, "u0"), 0);
    for (int i = 2; i < 5; i++) {
        char n = w.seen[i][strlen("PUT /bucket/p/k part ")];
        assert_true(n >= '2' && n <= '4');
    }
    unlink(path);
    world_close(&w);
}

/* A file that was sent whole has no upload to be looked for. */
static void test_unknown_upload_of_a_small_file(void **state)
{
    char path[] = "/tmp/mobula-small-XXXXXX";
    int fd = mkstemp(path);
    SCRIPT({404, ERROR("NoSuchUpload"), NULL});
    assert_int_equal(write(fd, "x", 1), 1);
    assert_int_equal(run_put_file(&w.r, "k", path, NULL), MB_ENOENT);
    assert_non_null(strstr(w.r.text, "NoSuchUpload"));
    world_close(&w);
    close(fd);
    unlink(path);
}

static void test_deadline(void **state)
{
    static const struct answer down = {503, "", NULL};
    struct answer script[64];
    struct world w;
    struct mb_err err;
    (void)state;
    for (size_t i = 0; i < 64; i++)
        script[i] = down;
    world_open(&w, script, 64);
    assert_int_equal(
        mb_store_put(w.r.store, "k", "x", 1, MB_STORE_ALWAYS, NULL, 300, run_on_result, &w.r, &err),
        0);
    run_wait(&w.r, 1);
    assert_true(w.r.error == MB_EUNAVAIL || w.r.error == MB_ETIMEOUT);
    w.n_script = w.n_requests;
    world_close(&w);
}

/* A file is not repeated for ever onto a store that comes back when the file is not wanted any
 * more. */
static void test_outage(void **state)
{
    static const struct answer down = {503, "", NULL};
    struct mb_store_put_file put = {.key = "k", .outage_ms = 300};
    char path[] = "/tmp/mobula-outage-XXXXXX";
    struct answer script[64];
    uint64_t began_ms;
    struct world w;
    struct mb_err err;
    int fd = mkstemp(path);

    (void)state;
    assert_int_equal(write(fd, "x", 1), 1);
    for (size_t i = 0; i < 64; i++)
        script[i] = down;
    world_open(&w, script, 64);
    put.path = path;
    began_ms = mb_mono_ms();
    assert_int_equal(mb_store_put_file(w.r.store, &put, run_on_result, &w.r, &err), 0);
    run_wait(&w.r, 1);
    assert_int_equal(w.r.error, MB_EUNAVAIL);
    assert_true(w.n_requests > 1);
    assert_true(mb_mono_ms() - began_ms < 5000);
    w.n_script = w.n_requests;
    world_close(&w);
    close(fd);
    unlink(path);
}

/* Said for the whole store, also of what has a longer time-out, and a shorter one. */
static void test_outage_of_all(void **state)
{
    static const struct answer down = {503, "", NULL};
    static const uint64_t timeouts_ms[] = {60000, 100};
    struct answer script[64];
    uint64_t began_ms, took_ms;
    struct world w;
    struct mb_err err;

    (void)state;
    for (size_t i = 0; i < 64; i++)
        script[i] = down;
    for (size_t i = 0; i < 2; i++) {
        world_open(&w, script, 64);
        mb_store_set_outage(w.r.store, 600);
        began_ms = mb_mono_ms();
        assert_int_equal(mb_store_head(w.r.store, "k", timeouts_ms[i], run_on_result, &w.r, &err),
                         0);
        run_wait(&w.r, 1);
        took_ms = mb_mono_ms() - began_ms;
        assert_int_equal(w.r.error, MB_EUNAVAIL);
        assert_true(w.n_requests > 1);
        assert_true(took_ms >= 600 && took_ms < 5000);
        w.n_script = w.n_requests;
        world_close(&w);
    }
}

/* Any allocation of the client or of the peer fails once: the operation ends, and nothing leaks. */
static void test_allocation_failures(void **state)
{
    static const struct answer page = {
        200,
        "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>p/k</Key><Size>1</Size>"
        "</Contents></ListBucketResult>",
        NULL};
    static struct answer script[1024];
    struct world w;
    (void)state;
    for (size_t i = 0; i < 1024; i++)
        script[i] = page;
    world_open(&w, script, 1024);
    mb_buf_reserve(&w.r.keys, 4096);
    mb_buf_reserve(&w.r.data, 4096);
    for (unsigned long nth = 1;; nth++) {
        mb_alloc_fail_nth(nth);
        int rc = run_list(&w.r, "");
        if (rc == 0 && w.r.n_keys == 1)
            rc = run_put(&w.r, "k", "x", MB_STORE_IF_MATCH, "e");
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (!failed) {
            assert_int_equal(rc, 0);
            break;
        }
        assert_true(rc == 0 || rc == MB_ENOMEM || rc == MB_EPROTO);
    }
    w.n_script = w.n_requests;
    world_close(&w);
}

/* The same for credentials that are fetched: of a token in a file, of STS, of a request that waits
 * for them. The peer is both STS and the store. */
static void test_allocation_failures_of_credentials(void **state)
{
    static const struct answer both = {
        200,
        "<R><Credentials><AccessKeyId>A</AccessKeyId><SecretAccessKey>S</SecretAccessKey>"
        "<SessionToken>T</SessionToken></Credentials></R>",
        NULL};
    static struct answer script[1024];
    struct world w;
    char path[] = "/tmp/mobula-token-XXXXXX";
    int fd = mkstemp(path);
    (void)state;
    assert_int_equal(write(fd, "token\n", 6), 6);
    close(fd);
    for (size_t i = 0; i < 1024; i++)
        script[i] = both;
    world_open(&w, script, 1024);
    setenv("AWS_ENDPOINT_URL_STS", getenv("BUCKET_STORAGE_HOST"), 1);
    setenv("AWS_ROLE_ARN", "role", 1);
    setenv("AWS_WEB_IDENTITY_TOKEN_FILE", path, 1);
    unsetenv("BUCKET_STORAGE_ACCESS_KEY");
    unsetenv("BUCKET_STORAGE_SECRET_KEY");
    for (unsigned long nth = 1;; nth++) {
        world_reopen(&w); /* without keys */
        size_t before = w.n_requests;
        mb_alloc_fail_nth(nth);
        int rc = run_put(&w.r, "k", "x", MB_STORE_ALWAYS, NULL);
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (!failed) {
            assert_int_equal(rc, 0);
            assert_int_equal(w.n_requests - before, 2);
            assert_string_equal(w.seen[before], "POST /");
            break;
        }
        assert_true(rc == 0 || rc == MB_ENOMEM || rc == MB_EPROTO || rc == MB_EDENIED);
    }
    unsetenv("AWS_ENDPOINT_URL_STS");
    unsetenv("AWS_ROLE_ARN");
    unsetenv("AWS_WEB_IDENTITY_TOKEN_FILE");
    unlink(path);
    w.n_script = w.n_requests;
    world_close(&w);
}

/* A store closes while its credentials are fetched: from a file, or from an STS that says nothing.
 */
static void test_close_while_fetching(void **state)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t len = sizeof address;
    char url[64];
    char path[] = "/tmp/mobula-token-XXXXXX";
    int file = mkstemp(path);
    int mute = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    (void)state;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    assert_int_equal(write(file, "token", 5), 5);
    assert_int_equal(bind(mute, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(listen(mute, 64), 0);
    assert_int_equal(getsockname(mute, (struct sockaddr *)&address, &len), 0);
    snprintf(url, sizeof url, "http://127.0.0.1:%d", ntohs(address.sin_port));
    setenv("BUCKET_STORAGE_HOST", url, 1);
    setenv("AWS_ENDPOINT_URL_STS", url, 1);
    setenv("AWS_ROLE_ARN", "role", 1);
    setenv("AWS_WEB_IDENTITY_TOKEN_FILE", path, 1);
    unsetenv("BUCKET_STORAGE_ACCESS_KEY");
    unsetenv("BUCKET_STORAGE_SECRET_KEY");
    for (int turns = 0; turns < 12; turns++) {
        uv_loop_t loop;
        struct store_run r;
        struct mb_err err;
        uv_loop_init(&loop);
        run_open(&r, &loop, "s3://bucket/p");
        assert_int_equal(mb_store_put(r.store, "k", "x", 1, MB_STORE_ALWAYS, NULL, 60000,
                                      run_on_result, &r, &err),
                         0);
        for (int i = 0; i < turns; i++)
            mb_loop_turn(&loop); /* the ticker ends each */
        run_close(&r);
        assert_int_equal(r.n_calls, 1);
        assert_int_equal(r.error, MB_ECANCELED);
        assert_int_equal(uv_loop_close(&loop), 0);
    }
    unsetenv("AWS_ENDPOINT_URL_STS");
    unsetenv("AWS_ROLE_ARN");
    unsetenv("AWS_WEB_IDENTITY_TOKEN_FILE");
    unlink(path);
    close(file);
    close(mute);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_retries),
        cmocka_unit_test(test_slow_down),
        cmocka_unit_test(test_final_errors),
        cmocka_unit_test(test_conflict_is_no_failed_condition),
        cmocka_unit_test(test_lost_answer),
        cmocka_unit_test(test_region_and_clock),
        cmocka_unit_test(test_odd_region),
        cmocka_unit_test(test_weaker_checksums),
        cmocka_unit_test(test_content_md5),
        cmocka_unit_test(test_no_checksums),
        cmocka_unit_test(test_refused_whatever_the_checksum),
        cmocka_unit_test(test_no_conditions),
        cmocka_unit_test(test_conditions_not_heeded),
        cmocka_unit_test(test_conditions_heeded),
        cmocka_unit_test(test_error_in_200),
        cmocka_unit_test(test_abort),
        cmocka_unit_test(test_stray_upload),
        cmocka_unit_test(test_abort_alone),
        cmocka_unit_test(test_resume_sends_what_lacks),
        cmocka_unit_test(test_unknown_upload_of_a_small_file),
        cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_outage),
        cmocka_unit_test(test_outage_of_all),
        cmocka_unit_test(test_allocation_failures),
        cmocka_unit_test(test_allocation_failures_of_credentials),
        cmocka_unit_test(test_close_while_fetching),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
