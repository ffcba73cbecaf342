/* One loop with a server runtime and a client runtime on it, and ways to wait with a bound. */
#ifndef MOBULA_TESTS_GRPC_FIXTURE_H
#define MOBULA_TESTS_GRPC_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>
#include <uv.h>
#include "base/alloc.h"
#include "base/grpc/grpc.h"
#include "proto/ray/gcs_service.pb-c.h"
#include "proto/ray/health.pb-c.h"

#define CHECK "/grpc.health.v1.Health/Check"
#define WATCH "/grpc.health.v1.Health/Watch"

typedef Grpc__Health__V1__HealthCheckRequest check_request;
typedef Grpc__Health__V1__HealthCheckResponse check_response;

#define check_request_desc  (&grpc__health__v1__health_check_request__descriptor)
#define check_response_desc (&grpc__health__v1__health_check_response__descriptor)

struct fixture {
    uv_loop_t loop;
    uv_timer_t guard;
    int guard_fired;
    struct mb_grpc *server_g;
    struct mb_grpc *client_g;
    struct mb_grpc_server *srv;
    struct mb_grpc_channel *ch;
    int server_stopped;
    int client_stopped;
    int port;
    char target[64];
};

static inline void fixture_on_guard(uv_timer_t *t)
{
    ((struct fixture *)t->data)->guard_fired = 1;
}

static inline void fixture_init(struct fixture *f)
{
    memset(f, 0, sizeof(*f));
    assert_int_equal(uv_loop_init(&f->loop), 0);
    uv_timer_init(&f->loop, &f->guard);
    f->guard.data = f;
}

/* Run the loop until *n reaches want; a test that hangs fails after 60 s. */
static inline void fixture_wait(struct fixture *f, const int *n, int want)
{
    f->guard_fired = 0;
    uv_timer_start(&f->guard, fixture_on_guard, 60000, 0);
    while (*n < want && !f->guard_fired)
        uv_run(&f->loop, UV_RUN_ONCE);
    uv_timer_stop(&f->guard);
    assert_false(f->guard_fired);
}

static inline void fixture_on_stopped(void *arg)
{
    ++*(int *)arg;
}

static inline void fixture_start(struct fixture *f, const struct mb_grpc_server_opts *opts,
                                 const struct mb_grpc_method *methods, size_t n, void *arg)
{
    struct mb_err err = {0};

    fixture_init(f);
    assert_int_equal(mb_grpc_create(&f->loop, &f->server_g, &err), 0);
    assert_int_equal(mb_grpc_create(&f->loop, &f->client_g, &err), 0);
    assert_int_equal(mb_grpc_server_create(f->server_g, opts, &f->srv, &err), 0);
    assert_int_equal(mb_grpc_server_add(f->srv, methods, n, arg, &err), 0);
    assert_int_equal(mb_grpc_server_listen(f->srv, "127.0.0.1:0", &f->port, &err), 0);
    assert_true(f->port > 0);
    snprintf(f->target, sizeof(f->target), "127.0.0.1:%d", f->port);
}

static inline void fixture_dial(struct fixture *f, const struct mb_grpc_channel_opts *opts)
{
    struct mb_err err = {0};

    assert_int_equal(mb_grpc_channel_create(f->client_g, f->target, opts, &f->ch, &err), 0);
}

static inline void fixture_stop_server(struct fixture *f)
{
    if (f->server_g == NULL)
        return;
    mb_grpc_stop(f->server_g, fixture_on_stopped, &f->server_stopped);
    fixture_wait(f, &f->server_stopped, 1);
    mb_grpc_destroy(f->server_g);
    f->server_g = NULL;
}

static inline void fixture_stop_client(struct fixture *f)
{
    if (f->client_g == NULL)
        return;
    mb_grpc_stop(f->client_g, fixture_on_stopped, &f->client_stopped);
    fixture_wait(f, &f->client_stopped, 1);
    mb_grpc_destroy(f->client_g);
    f->client_g = NULL;
}

static inline void fixture_end(struct fixture *f)
{
    fixture_stop_client(f);
    fixture_stop_server(f);
    uv_close((uv_handle_t *)&f->guard, NULL);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&f->loop), 0);
}

/* What came back from a unary call. */
struct result {
    int n;
    int status;
    int serving;
    char detail[256];
};

static inline void result_cb(void *arg, int status, const char *detail,
                             const ProtobufCMessage *reply)
{
    struct result *r = arg;

    r->n++;
    r->status = status;
    snprintf(r->detail, sizeof(r->detail), "%s", detail);
    r->serving = -1;
    if (status == MB_GRPC_OK)
        r->serving = (int)((const check_response *)(const void *)reply)->status;
    else
        assert_null(reply);
}

static inline int call_check(struct fixture *f, const char *method, const char *service,
                             uint64_t timeout_ms, struct result *r, struct mb_grpc_call **out)
{
    check_request q = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    char text[256];

    snprintf(text, sizeof(text), "%s", service);
    q.service = text;
    return mb_grpc_unary(f->ch, method, &q.base, check_response_desc, timeout_ms, result_cb, r, out,
                         NULL);
}

#endif
