/*
 * A transfer that is ended while the server thinks about parts that it has as a whole. An upload
 * whose parts come to life after its abort keeps them for ever, so whoever aborts next must not
 * hear of the end before the server has answered.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/clock.h"
#include "base/http/server.h"
#include "base/loop.h"
#include "store_run.h"

enum {
    PATIENCE_MS = 2000,
    N_PARTS = 4,
    FILE_BYTES = N_PARTS << 24
}; /* as many as are sent at first */

struct world {
    uv_loop_t loop;
    struct mb_http_server *srv;
    struct store_run r;
    struct mb_store_op *op;
    struct mb_http_req *held[N_PARTS]; /* parts that are here, unanswered */
    size_t n_held;
    size_t n_others;
    char path[64];
    int stopped;
};

static int take_body(void *arg, struct mb_http_req *req, const void *p, size_t n, int error_code)
{
    static const char begun[] = "<InitiateMultipartUploadResult><UploadId>u</UploadId>"
                                "</InitiateMultipartUploadResult>";
    struct world *w = arg;
    (void)p;
    assert_int_equal(error_code, 0);
    if (n > 0)
        return 0;
    if (strcmp(mb_http_req_method(req), "PUT") == 0) {
        assert_true(w->n_held < N_PARTS);
        w->held[w->n_held++] = req;
        return 0;
    }
    w->n_others++;
    assert_string_equal(mb_http_req_method(req), "POST"); /* its begin, and no end */
    mb_http_reply(req, 200, "application/xml", begun, strlen(begun));
    return 0;
}

static void on_request(void *arg, struct mb_http_req *req)
{
    mb_http_req_body_cb(req, take_body, arg);
}

static void on_upload_id(void *arg, const char *upload_id)
{
    (void)arg;
    assert_string_equal(upload_id, "u");
}

static void world_open(struct world *w)
{
    static const struct mb_http_route routes[] = {
        {"PUT", "/{path*}", on_request, MB_HTTP_BODY_STREAM},
        {"POST", "/{path*}", on_request, MB_HTTP_BODY_STREAM},
        {"DELETE", "/{path*}", on_request, MB_HTTP_BODY_STREAM}};
    int fd;
    memset(w, 0, sizeof *w);
    snprintf(w->path, sizeof w->path, "/tmp/mb-end-XXXXXX");
    fd = mkstemp(w->path);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, FILE_BYTES), 0);
    close(fd);
    uv_loop_init(&w->loop);
    w->srv = run_serve(&w->loop, routes, 3, w);
    run_open(&w->r, &w->loop, "s3://bucket/p");
}

/* All of the file is with the server, which has answered no part. */
static void send_all(struct world *w)
{
    struct mb_store_put_file req = {
        .key = "k", .path = w->path, .on_upload_id = on_upload_id, .op = &w->op};
    struct mb_err err;
    assert_int_equal(mb_store_put_file(w->r.store, &req, run_on_result, &w->r, &err), 0);
    while (w->n_held < N_PARTS)
        mb_loop_turn(&w->loop);
}

static void answer(struct world *w)
{
    for (size_t i = 0; i < w->n_held; i++) {
        mb_http_reply_header(w->held[i], "ETag", "\"e\"");
        mb_http_reply(w->held[i], 200, "application/xml", "", 0);
    }
    w->n_held = 0;
}

static void turn_for(struct world *w, uint64_t ms)
{
    uint64_t end_ms = mb_mono_ms() + ms;
    while (mb_mono_ms() < end_ms)
        mb_loop_turn(&w->loop);
}

static void on_stopped(void *arg)
{
    struct world *w = arg;
    w->stopped = 1;
}

static void world_close(struct world *w)
{
    assert_int_equal(w->n_others, 1);
    answer(w); /* those that nobody waits for any more, too */
    mb_http_server_stop(w->srv, on_stopped, w);
    run_close(&w->r);
    uv_run(&w->loop, UV_RUN_DEFAULT);
    assert_true(w->stopped);
    mb_http_server_destroy(w->srv);
    assert_int_equal(uv_loop_close(&w->loop), 0);
    unlink(w->path);
}

static void test_parts_are_answered_first(void **state)
{
    struct world w;
    (void)state;
    world_open(&w);
    send_all(&w);
    mb_store_put_cancel(w.op, PATIENCE_MS);
    turn_for(&w, 200);
    assert_int_equal(w.r.n_calls, 0);
    answer(&w);
    run_wait(&w.r, 1);
    assert_int_equal(w.r.error, MB_ECANCELED);
    world_close(&w);
}

/* A server that does not answer is left then. */
static void test_not_for_ever(void **state)
{
    struct world w;
    (void)state;
    world_open(&w);
    send_all(&w);
    uint64_t began_ms = mb_mono_ms();
    mb_store_put_cancel(w.op, PATIENCE_MS);
    run_wait(&w.r, 1);
    assert_int_equal(w.r.error, MB_ECANCELED);
    assert_in_range(mb_mono_ms() - began_ms, PATIENCE_MS - 100, 20000);
    world_close(&w);
}

static void on_closed(void *arg)
{
    struct world *w = arg;
    w->r.store = NULL;
}

/* A store that closes waits for nobody. */
static void test_the_store_closes(void **state)
{
    struct world w;
    struct mb_err err;
    (void)state;
    world_open(&w);
    send_all(&w);
    uint64_t began_ms = mb_mono_ms();
    mb_store_put_cancel(w.op, PATIENCE_MS);
    turn_for(&w, 50);
    assert_int_equal(w.r.n_calls, 0);
    mb_store_close(w.r.store, on_closed, &w);
    while (w.r.store)
        mb_loop_turn(&w.loop);
    assert_int_equal(w.r.n_calls, 1);
    assert_int_equal(w.r.error, MB_ECANCELED);
    assert_true(mb_mono_ms() - began_ms < PATIENCE_MS);
    assert_int_equal(mb_store_open(&w.loop, "s3://bucket/p", &w.r.store, &err), 0);
    world_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parts_are_answered_first),
        cmocka_unit_test(test_not_for_ever),
        cmocka_unit_test(test_the_store_closes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
