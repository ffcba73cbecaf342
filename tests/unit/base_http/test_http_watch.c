/* What libmicrohttpd does not notice by itself: the last bytes that come and the end of a
 * connection are one event to it, and the request is not whole. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include <sys/socket.h>
#include "base/http/server.h"
#include "raw_client.h"

/* libmicrohttpd ends an idle connection after IDLE_MS; the server looks earlier. */
enum { IDLE_MS = 12000, TOO_LATE_MS = 11000, SETTLE_MS = 100 };

struct world {
    uv_loop_t loop;
    uv_timer_t timer;
    struct mb_http_server *srv;
    int port;
    size_t n_body;
    int body_error;
};

static int on_part(void *arg, struct mb_http_req *req, const void *p, size_t n, int error_code)
{
    struct world *w = arg;
    (void)p;
    w->n_body += n;
    if (n > 0)
        return 0;
    w->body_error = error_code;
    mb_http_reply_text(req, error_code ? 400 : 200, "%zu", w->n_body);
    return 0;
}

static void on_upload(void *arg, struct mb_http_req *req)
{
    mb_http_req_body_cb(req, on_part, arg);
}

static const struct mb_http_route routes[] = {
    {"PUT", "/upload", on_upload, MB_HTTP_BODY_STREAM},
};

static void on_stopped(void *arg)
{
    (void)arg;
}

static void on_too_late(uv_timer_t *t)
{
    (void)t;
    fail_msg("only the idle time-out saw it");
}

static void end_in_the_middle(const char *half, struct world *w)
{
    struct raw_client c;
    struct mb_err err;
    uv_os_fd_t fd;

    memset(w, 0, sizeof *w);
    uv_loop_init(&w->loop);
    uv_timer_init(&w->loop, &w->timer);
    assert_int_equal(
        mb_http_server_create(&w->loop, &(struct mb_http_server_opts){.idle_timeout_ms = IDLE_MS},
                              &w->srv, &err),
        0);
    assert_int_equal(mb_http_server_add(w->srv, routes, 1, w, &err), 0);
    assert_int_equal(mb_http_server_listen(w->srv, &w->port, &err), 0);
    raw_client_start(&w->loop, &c, w->port, half, strlen(half));
    for (uint64_t until = uv_now(&w->loop) + SETTLE_MS; uv_now(&w->loop) < until;)
        uv_run(&w->loop, UV_RUN_NOWAIT);
    raw_client_send(&c, " more", 5);
    assert_int_equal(uv_fileno((uv_handle_t *)&c.tcp, &fd), 0);
    assert_int_equal(shutdown(fd, SHUT_WR), 0);
    uv_timer_start(&w->timer, on_too_late, TOO_LATE_MS, 0);
    raw_client_finish(&c);
    raw_client_free(&c);
    uv_close((uv_handle_t *)&w->timer, NULL);
    mb_http_server_stop(w->srv, on_stopped, w);
    uv_run(&w->loop, UV_RUN_DEFAULT);
    mb_http_server_destroy(w->srv);
    assert_int_equal(uv_loop_close(&w->loop), 0);
}

static void test_in_a_body(void **state)
{
    struct world w;
    (void)state;
    end_in_the_middle("PUT /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf", &w);
    assert_int_equal(w.n_body, 4 + 5);
    assert_int_equal(w.body_error, MB_EUNAVAIL);
}

static void test_in_a_header(void **state)
{
    struct world w;
    (void)state;
    end_in_the_middle("GET /upload HTTP/1.1\r\nX-Half: ", &w);
    assert_int_equal(w.n_body, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_in_a_body),
        cmocka_unit_test(test_in_a_header),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
