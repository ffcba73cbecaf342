/* Answers over TLS that come as many small records in one piece, and nothing after them: the socket
 * says nothing more of those that were read ahead. The peer is a thread with OpenSSL. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <arpa/inet.h>
#include <netinet/in.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/http/client.h"
#include "base/loop.h"
#include "tests/unit/base_http/certs.h"

enum {
    RECORD_BYTES = 1000,
    BODY_BYTES = 45000, /* with the records' heads less than is read ahead */
    BIG_BYTES = 3 * 1024 * 1024 + 7,
    PIECE_BYTES = 1400, /* cuts records in all places */
    TIMEOUT_MS = 20000,
    PAUSE_MS = 30
};

struct peer {
    int listener, port;
    int version; /* of TLS, the only one */
    int n_connections, n_requests, n_piecewise;
    int is_chunked, leads_elsewhere; /* the first answer does */
    size_t body_bytes;
    long status;
    pthread_t thread;
};

struct world {
    uv_loop_t loop;
    uv_timer_t ticker;
    struct mb_http_client *client;
    struct mb_http_fetch *fetch;
    struct peer peer;
    char ca[128];
    int n_answers, error, n_stopped;
    long status;
    char detail[128];
    struct mb_buf sunk, body;
    int pauses; /* each piece that the sink takes */
};

static uint8_t byte_at(size_t i)
{
    return (uint8_t)(i * 7 + i / 251);
}

/* ---- the peer ---- */

static void write_record(SSL *ssl, const void *p, size_t n)
{
    assert_int_equal(SSL_write(ssl, p, (int)n), (int)n);
}

static void send_all(int fd, const char *p, size_t n, size_t piece)
{
    while (n > 0) {
        ssize_t k = send(fd, p, n < piece ? n : piece, MSG_NOSIGNAL);
        if (k <= 0)
            return;
        p += k;
        n -= (size_t)k;
    }
}

/* All records of one answer are made first and sent then. */
static void answer(struct peer *p, SSL *ssl, int fd)
{
    BIO *made = BIO_new(BIO_s_mem()), *socket = SSL_get_wbio(ssl);
    uint8_t record[RECORD_BYTES];
    char head[128], *bytes;
    int n =
        p->is_chunked
            ? snprintf(head, sizeof head, "HTTP/1.1 %ld X\r\n%sTransfer-Encoding: chunked\r\n\r\n",
                       p->leads_elsewhere ? 302 : p->status,
                       p->leads_elsewhere ? "Location: /elsewhere\r\n" : "")
            : snprintf(head, sizeof head, "HTTP/1.1 %ld X\r\nContent-Length: %zu\r\n\r\n",
                       p->status, p->body_bytes);
    p->leads_elsewhere = 0;
    BIO_up_ref(socket);
    SSL_set0_wbio(ssl, made);
    write_record(ssl, head, (size_t)n);
    for (size_t at = 0; at < p->body_bytes;) {
        size_t want = p->body_bytes - at < sizeof record ? p->body_bytes - at : sizeof record;
        for (size_t i = 0; i < want; i++)
            record[i] = byte_at(at + i);
        if (p->is_chunked)
            write_record(ssl, head, (size_t)snprintf(head, sizeof head, "%zx\r\n", want));
        write_record(ssl, record, want);
        if (p->is_chunked)
            write_record(ssl, "\r\n", 2);
        at += want;
    }
    if (p->is_chunked) {
        write_record(ssl, "0\r\n", 3);
        write_record(ssl, "\r\n", 2);
    }
    n = (int)BIO_get_mem_data(made, &bytes);
    send_all(fd, bytes, (size_t)n, p->n_piecewise ? PIECE_BYTES : (size_t)n);
    SSL_set0_wbio(ssl, socket);
}

/* Until its client goes. */
static void serve(struct peer *p, SSL *ssl, int fd)
{
    char head[4096];
    size_t n = 0;
    for (;;) {
        int k = SSL_read(ssl, head + n, (int)(sizeof head - 1 - n));
        if (k <= 0)
            return;
        n += (size_t)k;
        head[n] = '\0';
        if (strstr(head, "\r\n\r\n")) {
            p->n_requests++;
            answer(p, ssl, fd);
            n = 0;
        }
    }
}

static void *peer_run(void *arg)
{
    struct peer *p = arg;
    char cert[128], key[128];
    int fd;
    SSL_CTX *ctx = SSL_CTX_new(TLS_server_method());
    snprintf(cert, sizeof cert, "%s/good.pem", dir);
    snprintf(key, sizeof key, "%s/good.key", dir);
    assert_int_equal(SSL_CTX_use_certificate_file(ctx, cert, SSL_FILETYPE_PEM), 1);
    assert_int_equal(SSL_CTX_use_PrivateKey_file(ctx, key, SSL_FILETYPE_PEM), 1);
    SSL_CTX_set_min_proto_version(ctx, p->version);
    SSL_CTX_set_max_proto_version(ctx, p->version);
    while ((fd = accept(p->listener, NULL, NULL)) >= 0) {
        SSL *ssl = SSL_new(ctx);
        p->n_connections++;
        SSL_set_fd(ssl, fd);
        if (SSL_accept(ssl) == 1)
            serve(p, ssl, fd);
        SSL_free(ssl);
        close(fd);
    }
    SSL_CTX_free(ctx);
    return NULL;
}

static void peer_start(struct peer *p)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    p->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(p->listener, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(p->listener, 8), 0);
    assert_int_equal(getsockname(p->listener, (struct sockaddr *)&a, &len), 0);
    p->port = ntohs(a.sin_port);
    assert_int_equal(pthread_create(&p->thread, NULL, peer_run, p), 0);
}

/* ---- the client ---- */

static void on_tick(uv_timer_t *t)
{
    struct world *w = t->data;
    if (w->pauses && w->fetch)
        mb_http_fetch_resume(w->fetch);
}

static void open_world(struct world *w, int version, size_t body_bytes, long status)
{
    struct mb_err err;
    *w = (struct world){.peer = {.version = version, .body_bytes = body_bytes, .status = status}};
    snprintf(w->ca, sizeof w->ca, "%s/ca.pem", dir);
    peer_start(&w->peer);
    uv_loop_init(&w->loop);
    uv_timer_init(&w->loop, &w->ticker);
    w->ticker.data = w;
    uv_timer_start(&w->ticker, on_tick, PAUSE_MS, PAUSE_MS);
    assert_int_equal(mb_http_client_create(&w->loop, 4, &w->client, &err), 0);
}

static void on_stopped(void *arg)
{
    ((struct world *)arg)->n_stopped++;
}

static void close_world(struct world *w)
{
    mb_http_client_stop(w->client, on_stopped, w);
    uv_close((uv_handle_t *)&w->ticker, NULL);
    uv_run(&w->loop, UV_RUN_DEFAULT);
    assert_int_equal(w->n_stopped, 1);
    mb_http_client_destroy(w->client);
    assert_int_equal(uv_loop_close(&w->loop), 0);
    shutdown(w->peer.listener, SHUT_RDWR);
    pthread_join(w->peer.thread, NULL);
    close(w->peer.listener);
    mb_buf_close(&w->sunk);
    mb_buf_close(&w->body);
}

static int sink(void *arg, const void *p, size_t n)
{
    struct world *w = arg;
    if (mb_buf_add(&w->sunk, p, n) != 0)
        return MB_ENOMEM;
    return w->pauses ? MB_HTTP_SINK_FULL : 0;
}

static void on_answer(void *arg, const struct mb_http_response *r)
{
    struct world *w = arg;
    w->n_answers++;
    w->fetch = NULL;
    w->error = r->error;
    w->status = r->status;
    snprintf(w->detail, sizeof w->detail, "%s", r->detail);
    if (r->error == 0)
        assert_int_equal(mb_buf_add(&w->body, r->body, r->body_len), 0);
}

static void fetch(struct world *w)
{
    char url[64];
    struct mb_err err;
    struct mb_http_request request = {.method = "GET",
                                      .url = url,
                                      .body_fd = -1,
                                      .sink = sink,
                                      .sink_arg = w,
                                      .timeout_ms = TIMEOUT_MS,
                                      .is_direct = 1,
                                      .follow_redirects = 1,
                                      .ca_file = w->ca};
    int before = w->n_answers;
    mb_buf_reset(&w->sunk);
    mb_buf_reset(&w->body);
    snprintf(url, sizeof url, "https://127.0.0.1:%d/x", w->peer.port);
    assert_int_equal(mb_http_fetch(w->client, &request, on_answer, w, &w->fetch, &err), 0);
    while (w->n_answers == before)
        mb_loop_turn(&w->loop);
    if (w->error != 0)
        fail_msg("%d after %zu bytes: %s", w->error, w->sunk.len, w->detail);
    assert_int_equal(w->status, w->peer.status);
}

static void assert_body(const struct mb_buf *b, size_t n)
{
    assert_int_equal(b->len, n);
    for (size_t i = 0; i < n; i++)
        if (((const uint8_t *)b->data)[i] != byte_at(i))
            fail_msg("byte %zu differs", i);
}

/* ---- tests ---- */

static void test_all_in_one_piece(void **state)
{
    static const int versions[] = {TLS1_3_VERSION, TLS1_2_VERSION};
    struct world w;
    (void)state;
    for (size_t i = 0; i < 2; i++) {
        open_world(&w, versions[i], BODY_BYTES, 200);
        for (int n = 0; n < 3; n++) {
            fetch(&w);
            assert_body(&w.sunk, BODY_BYTES);
        }
        assert_int_equal(w.peer.n_requests, 3);
        assert_int_equal(w.peer.n_connections, 1);
        close_world(&w);
    }
}

static void test_many_pieces(void **state)
{
    struct world w;
    (void)state;
    open_world(&w, TLS1_3_VERSION, BIG_BYTES, 200);
    fetch(&w);
    assert_body(&w.sunk, BIG_BYTES);
    w.peer.n_piecewise = 1;
    fetch(&w);
    assert_body(&w.sunk, BIG_BYTES);
    assert_int_equal(w.peer.n_connections, 1);
    close_world(&w);
}

/* The frame of each chunk has records of its own, of which nobody is told. */
static void test_chunks(void **state)
{
    struct world w;
    (void)state;
    open_world(&w, TLS1_3_VERSION, BODY_BYTES, 200);
    w.peer.is_chunked = 1;
    fetch(&w);
    assert_body(&w.sunk, BODY_BYTES);
    w.peer.leads_elsewhere = 1; /* nor of the body of that */
    fetch(&w);
    assert_body(&w.sunk, BODY_BYTES);
    assert_int_equal(w.peer.n_requests, 3);
    close_world(&w);
}

/* The answer of an error is kept whole, not given to the sink. */
static void test_an_error(void **state)
{
    struct world w;
    (void)state;
    open_world(&w, TLS1_3_VERSION, BODY_BYTES, 503);
    fetch(&w);
    assert_body(&w.body, BODY_BYTES);
    assert_int_equal(w.sunk.len, 0);
    close_world(&w);
}

/* The receiver is full after each piece, and goes on a while later. */
static void test_pauses(void **state)
{
    struct world w;
    (void)state;
    open_world(&w, TLS1_3_VERSION, BODY_BYTES, 200);
    w.pauses = 1;
    fetch(&w);
    assert_body(&w.sunk, BODY_BYTES);
    close_world(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_in_one_piece), cmocka_unit_test(test_many_pieces),
        cmocka_unit_test(test_chunks),           cmocka_unit_test(test_an_error),
        cmocka_unit_test(test_pauses),
    };
    return cmocka_run_group_tests(tests, make_certs, remove_certs);
}
