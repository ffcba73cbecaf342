/* Where the server listens, and where it does not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "base/http/server.h"
#include "base/ports.h"

static uv_loop_t loop;

static void on_stopped(void *arg)
{
    *(int *)arg = 1;
}

static struct mb_http_server *listen_at(struct mb_http_server_opts opts, int *port)
{
    struct mb_http_server *srv;
    struct mb_err err;

    assert_int_equal(mb_http_server_create(&loop, &opts, &srv, &err), 0);
    assert_int_equal(mb_http_server_listen(srv, port, &err), 0);
    return srv;
}

static void stop(struct mb_http_server *srv)
{
    int is_stopped = 0;

    mb_http_server_stop(srv, on_stopped, &is_stopped);
    while (!is_stopped)
        uv_run(&loop, UV_RUN_ONCE);
    mb_http_server_destroy(srv);
}

static void refused(struct mb_http_server_opts opts, int code, const char *text)
{
    struct mb_http_server *srv;
    struct mb_err err;

    assert_int_equal(mb_http_server_create(&loop, &opts, &srv, &err), 0);
    assert_int_equal(mb_http_server_listen(srv, NULL, &err), code);
    assert_non_null(strstr(err.text, text));
    mb_http_server_destroy(srv);
}

static void test_refused(void **state)
{
    int port;
    struct mb_http_server *srv = listen_at((struct mb_http_server_opts){0}, &port);

    (void)state;
    refused((struct mb_http_server_opts){.port = port}, MB_EEXIST, "on 127.0.0.1 is in use");
    refused((struct mb_http_server_opts){.bind_addr = "127.0.0.4", .is_local_too = 1, .port = port},
            MB_EEXIST, "on 127.0.0.1 is in use");
    assert_true(mb_port_is_free("127.0.0.4", port)); /* both or none */
    refused((struct mb_http_server_opts){.bind_addr = "no such host"}, MB_EINVAL, "no such host");
    stop(srv);
}

static void test_one_address(void **state)
{
    int port;
    struct mb_http_server *srv = listen_at((struct mb_http_server_opts){0}, &port);

    (void)state;
    assert_false(mb_port_is_free("127.0.0.1", port));
    assert_true(mb_port_is_free("127.0.0.2", port));
    stop(srv);
    assert_true(mb_port_is_free("127.0.0.1", port));
}

static void test_two_addresses(void **state)
{
    int port;
    struct mb_http_server *srv =
        listen_at((struct mb_http_server_opts){.bind_addr = "127.0.0.2", .is_local_too = 1}, &port);

    (void)state;
    assert_false(mb_port_is_free("127.0.0.1", port));
    assert_false(mb_port_is_free("127.0.0.2", port));
    assert_true(mb_port_is_free("127.0.0.3", port));
    stop(srv);
    assert_true(mb_port_is_free("127.0.0.1", port));
    assert_true(mb_port_is_free("127.0.0.2", port));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_one_address),
        cmocka_unit_test(test_two_addresses),
    };

    uv_loop_init(&loop);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
