/* Bodies over TLS go to the socket several records at a time, whole and in order, also where it
 * takes little, and from a connection that breaks nothing is left. The peer is a thread with
 * OpenSSL; send(2), which libcurl calls, is this program's own. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/err.h"
#include "base/fs.h"
#include "base/http/client.h"
#include "base/loop.h"
#include "tests/unit/base_http/certs.h"

enum { BODY_BYTES = 8 * 1024 * 1024 + 5, TIMEOUT_MS = 20000, HALF = BODY_BYTES / 2 };

static pthread_t client_thread;
static int n_sends, is_narrow; /* of the client's thread; the socket takes little */

ssize_t send(int fd, const void *p, size_t n, int flags)
{
    if (pthread_equal(pthread_self(), client_thread)) {
        n_sends++;
        if (is_narrow && n_sends % 3 == 0) {
            errno = EAGAIN;
            return -1;
        }
        if (is_narrow && n > 5000)
            n = 5000 + (size_t)n_sends % 7;
    }
    return syscall(SYS_sendto, fd, p, n, flags, NULL, 0);
}

static uint8_t byte_at(size_t i)
{
    return (uint8_t)(i * 11 + i / 253);
}

/* ---- the peer ---- */

enum act { TAKE, REFUSE, BREAK, WAIT };

struct peer {
    int listener, port;
    int version; /* of TLS, the only one */
    enum act act;
    atomic_int n_connections, n_whole, n_wrong, has_half;
    int release[2]; /* a byte ends WAIT */
    pthread_t thread;
};

static void say(SSL *ssl, const char *text)
{
    SSL_write(ssl, text, (int)strlen(text));
}

/* The body up to want bytes; 0: the connection ended. */
static int take_body(struct peer *p, SSL *ssl, size_t want)
{
    uint8_t block[16384];
    for (size_t at = 0; at < want;) {
        int k = SSL_read(ssl, block, (int)(want - at < sizeof block ? want - at : sizeof block));
        if (k <= 0)
            return 0;
        for (int i = 0; i < k; i++)
            p->n_wrong += block[i] != byte_at(at + (size_t)i);
        at += (size_t)k;
    }
    return 1;
}

static int take_head(SSL *ssl)
{
    char head[4096];
    for (size_t n = 0; n + 1 < sizeof head; n++) {
        if (SSL_read(ssl, head + n, 1) != 1)
            return 0;
        head[n + 1] = '\0';
        if (n > 3 && strcmp(head + n - 3, "\r\n\r\n") == 0)
            return 1;
    }
    return 0;
}

static void serve(struct peer *p, SSL *ssl)
{
    char byte;
    while (take_head(ssl)) {
        if (!take_body(p, ssl, p->act == TAKE ? BODY_BYTES : HALF))
            return;
        p->has_half = 1;
        if (p->act == WAIT)
            assert_int_equal(read(p->release[0], &byte, 1), 1);
        if (p->act == BREAK || p->act == WAIT)
            return;
        if (p->act == REFUSE) {
            say(ssl, "HTTP/1.1 403 No\r\nConnection: close\r\nContent-Length: 3\r\n\r\nno\n");
            while (SSL_read(ssl, &byte, 1) == 1) /* until it goes */
                ;
            return;
        }
        p->n_whole++;
        say(ssl, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
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
            serve(p, ssl);
        SSL_free(ssl);
        close(fd);
    }
    SSL_CTX_free(ctx);
    return NULL;
}

/* ---- the client ---- */

struct world {
    uv_loop_t loop;
    struct mb_http_client *client;
    struct mb_http_fetch *fetch;
    struct peer peer;
    int fd; /* of the body */
    char ca[128];
    int n_answers, error, n_stopped;
    long status;
};

static void open_world(struct world *w, int version, enum act act)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    struct mb_err err;
    *w = (struct world){.peer = {.version = version, .act = act}};
    snprintf(w->ca, sizeof w->ca, "%s/ca.pem", dir);
    char path[] = "/tmp/mobula-body-XXXXXX";
    uint8_t *bytes = malloc(BODY_BYTES);
    w->fd = mkstemp(path);
    unlink(path);
    for (size_t i = 0; i < BODY_BYTES; i++)
        bytes[i] = byte_at(i);
    assert_int_equal(write(w->fd, bytes, BODY_BYTES), BODY_BYTES);
    free(bytes);
    assert_int_equal(pipe(w->peer.release), 0);
    w->peer.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(w->peer.listener, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(w->peer.listener, 8), 0);
    assert_int_equal(getsockname(w->peer.listener, (struct sockaddr *)&a, &len), 0);
    w->peer.port = ntohs(a.sin_port);
    assert_int_equal(pthread_create(&w->peer.thread, NULL, peer_run, &w->peer), 0);
    uv_loop_init(&w->loop);
    assert_int_equal(mb_http_client_create(&w->loop, 4, &w->client, &err), 0);
    client_thread = pthread_self();
    n_sends = is_narrow = 0;
}

static void on_stopped(void *arg)
{
    ((struct world *)arg)->n_stopped++;
}

static void close_world(struct world *w)
{
    is_narrow = 0;
    mb_http_client_stop(w->client, on_stopped, w);
    uv_run(&w->loop, UV_RUN_DEFAULT);
    assert_int_equal(w->n_stopped, 1);
    mb_http_client_destroy(w->client);
    assert_int_equal(uv_loop_close(&w->loop), 0);
    shutdown(w->peer.listener, SHUT_RDWR);
    pthread_join(w->peer.thread, NULL);
    close(w->peer.listener);
    close(w->peer.release[0]);
    close(w->peer.release[1]);
    close(w->fd);
    assert_int_equal(w->peer.n_wrong, 0);
}

static void on_answer(void *arg, const struct mb_http_response *r)
{
    struct world *w = arg;
    w->n_answers++;
    w->fetch = NULL;
    w->error = r->error;
    w->status = r->status;
}

static void begin(struct world *w)
{
    char url[64];
    struct mb_err err;
    struct mb_http_request request = {.method = "PUT",
                                      .url = url,
                                      .body_fd = w->fd,
                                      .body_len = BODY_BYTES,
                                      .timeout_ms = TIMEOUT_MS,
                                      .is_direct = 1,
                                      .ca_file = w->ca};
    snprintf(url, sizeof url, "https://127.0.0.1:%d/x", w->peer.port);
    assert_int_equal(mb_http_fetch(w->client, &request, on_answer, w, &w->fetch, &err), 0);
}

static void put(struct world *w)
{
    int before = w->n_answers;
    begin(w);
    while (w->n_answers == before)
        mb_loop_turn(&w->loop);
}

/* ---- tests ---- */

static void test_several_at_a_time(void **state)
{
    static const int versions[] = {TLS1_3_VERSION, TLS1_2_VERSION};
    struct world w;
    (void)state;
    for (size_t i = 0; i < 2; i++) {
        open_world(&w, versions[i], TAKE);
        for (int n = 1; n <= 3; n++) {
            put(&w);
            assert_int_equal(w.error, 0);
            assert_int_equal(w.status, 200);
            assert_int_equal(w.peer.n_whole, n);
        }
        assert_int_equal(w.peer.n_connections, 1);
        assert_in_range(n_sends, 1, 3 * BODY_BYTES / (64 * 1024)); /* of one record each 3 * 513 */
        close_world(&w);
    }
}

/* A part of a record, or nothing at all, at each place. */
static void test_a_narrow_socket(void **state)
{
    struct world w;
    (void)state;
    open_world(&w, TLS1_3_VERSION, TAKE);
    is_narrow = 1;
    for (int n = 1; n <= 2; n++) {
        put(&w);
        assert_int_equal(w.status, 200);
        assert_int_equal(w.peer.n_whole, n);
    }
    assert_true(n_sends > 2 * BODY_BYTES / 5007);
    assert_int_equal(w.peer.n_connections, 1);
    close_world(&w);
}

/* The buffer cannot be had: each record by itself then. */
static void test_out_of_memory(void **state)
{
    struct world w;
    int n_failed = 0, is_done = 0;
    (void)state;
    for (unsigned long nth = 1; !is_done; nth++) {
        open_world(&w, TLS1_3_VERSION, TAKE);
        w.error = 0;
        begin(&w);
        mb_alloc_fail_nth(nth); /* of what is allocated while it goes */
        while (w.n_answers == 0)
            mb_loop_turn(&w.loop);
        is_done = !mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        n_failed += !is_done;
        if (w.error == 0)
            assert_int_equal(w.peer.n_whole, 1);
        else
            assert_int_equal(w.error, MB_ENOMEM);
        close_world(&w);
    }
    assert_true(n_failed >= 3); /* a watch, the filter, its buffer */
}

static void test_a_refusal(void **state)
{
    struct world w;
    (void)state;
    open_world(&w, TLS1_3_VERSION, REFUSE);
    put(&w);
    assert_int_equal(w.error, 0);
    assert_int_equal(w.status, 403);
    close_world(&w);
}

static void test_a_connection_that_breaks(void **state)
{
    struct world w;
    (void)state;
    open_world(&w, TLS1_3_VERSION, BREAK);
    put(&w);
    assert_int_equal(w.error, MB_EUNAVAIL);
    w.peer.act = TAKE;
    put(&w);
    assert_int_equal(w.status, 200);
    assert_int_equal(w.peer.n_connections, 2);
    close_world(&w);
}

static void test_cancelled(void **state)
{
    struct world w;
    (void)state;
    open_world(&w, TLS1_3_VERSION, WAIT);
    begin(&w);
    while (!w.peer.has_half)
        uv_run(&w.loop, UV_RUN_NOWAIT);
    mb_http_fetch_cancel(w.fetch);
    while (w.n_answers == 0)
        mb_loop_turn(&w.loop);
    assert_int_equal(w.error, MB_ECANCELED);
    assert_int_equal(write(w.peer.release[1], "x", 1), 1);
    close_world(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_several_at_a_time),
        cmocka_unit_test(test_a_narrow_socket),
        cmocka_unit_test(test_out_of_memory),
        cmocka_unit_test(test_a_refusal),
        cmocka_unit_test(test_a_connection_that_breaks),
        cmocka_unit_test(test_cancelled),
    };
    return cmocka_run_group_tests(tests, make_certs, remove_certs);
}
