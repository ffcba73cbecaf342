/* See raw_client.h. Errors of the test's own plumbing stop the test. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>
#include "raw_client.h"

static void on_closed(uv_handle_t *h)
{
    struct raw_client *c = h->data;
    c->done = 1;
}

static void on_alloc(uv_handle_t *h, size_t suggested, uv_buf_t *buf)
{
    struct raw_client *c = h->data;
    (void)suggested;
    *buf = uv_buf_init(c->chunk, sizeof c->chunk);
}

static void on_read(uv_stream_t *s, ssize_t n, const uv_buf_t *buf)
{
    struct raw_client *c = s->data;
    if (n > 0)
        assert_int_equal(mb_buf_add(&c->in, buf->base, (size_t)n), 0);
    else if (n < 0)
        uv_close((uv_handle_t *)s, on_closed);
}

static void on_connect(uv_connect_t *req, int status)
{
    struct raw_client *c = req->data;
    assert_int_equal(status, 0);
    uv_buf_t buf = uv_buf_init((char *)c->out.data, (unsigned)c->out.len);
    assert_int_equal(uv_write(&c->write, (uv_stream_t *)&c->tcp, &buf, 1, NULL), 0);
    uv_read_start((uv_stream_t *)&c->tcp, on_alloc, on_read);
}

void raw_client_start(uv_loop_t *loop, struct raw_client *c, int port, const void *p, size_t n)
{
    struct sockaddr_in addr;
    memset(c, 0, sizeof *c);
    assert_int_equal(mb_buf_add(&c->out, p, n), 0);
    uv_tcp_init(loop, &c->tcp);
    c->tcp.data = c;
    c->connect.data = c;
    uv_ip4_addr("127.0.0.1", port, &addr);
    assert_int_equal(uv_tcp_connect(&c->connect, &c->tcp, (struct sockaddr *)&addr, on_connect), 0);
}

void raw_client_send(struct raw_client *c, const void *p, size_t n)
{
    uv_buf_t buf = uv_buf_init((char *)p, (unsigned)n);
    assert_int_equal(uv_try_write((uv_stream_t *)&c->tcp, &buf, 1), (int)n);
}

void raw_client_read_on(struct raw_client *c)
{
    uv_read_start((uv_stream_t *)&c->tcp, on_alloc, on_read);
}

void raw_client_finish(struct raw_client *c)
{
    while (!c->done)
        uv_run(c->tcp.loop, UV_RUN_ONCE);
}

void raw_client_free(struct raw_client *c)
{
    if (!c->done && !uv_is_closing((uv_handle_t *)&c->tcp))
        uv_close((uv_handle_t *)&c->tcp, on_closed);
    raw_client_finish(c);
    mb_buf_close(&c->in);
    mb_buf_close(&c->out);
}

void raw_exchange(uv_loop_t *loop, int port, const char *request, struct mb_buf *out)
{
    struct raw_client c;
    raw_client_start(loop, &c, port, request, strlen(request));
    raw_client_finish(&c);
    *out = c.in;
    c.in = (struct mb_buf){0};
    raw_client_free(&c);
}
