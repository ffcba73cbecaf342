/* Large bodies that go from the file to the socket, against a peer of threads that does what a
 * server should not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/err.h"
#include "base/http/body.h"
#include "base/http/client.h"
#include "base/loop.h"

enum { BODY_BYTES = 9 * 1024 * 1024 + 17, HOLE_AT = 1 << 20, HOLE_BYTES = 2 << 20, OFFSET = 5 };

/* What the peer does with the n-th connection. */
enum act {
    TAKE,
    REFUSE,
    REFUSE_AND_CLOSE,
    ANSWER_EARLY,
    BREAK,
    CLOSE_UNREAD,
    READ_NOTHING,
    READ_SOME
};

struct peer {
    int listener, port;
    int release[2]; /* pipe */
    pthread_t thread;
    const enum act *acts;
    size_t n_acts;
    char head[4096]; /* of the last request */
    uint8_t *got;
    size_t n_got;
};

struct world {
    uv_loop_t loop;
    struct mb_http_client *client;
    struct peer peer;
    int fd;
    uint8_t *data; /* of the file */
    int n_answers, error, n_stopped;
    long status;
    char text[64];
};

static void say(int fd, const char *text)
{
    assert_int_equal(send(fd, text, strlen(text), MSG_NOSIGNAL), (ssize_t)strlen(text));
}

/* Returns how much of the body came with the headers, at the front of got. */
static void read_head(struct peer *p, int fd)
{
    size_t n = 0;
    char *end = NULL;
    while (!end) {
        ssize_t k = recv(fd, p->head + n, sizeof p->head - 1 - n, 0);
        assert_true(k > 0);
        n += (size_t)k;
        p->head[n] = '\0';
        end = strstr(p->head, "\r\n\r\n");
    }
    p->n_got = n - (size_t)(end + 4 - p->head);
    memcpy(p->got, end + 4, p->n_got);
    end[4] = '\0';
}

static void read_body(struct peer *p, int fd, size_t want)
{
    while (p->n_got < want) {
        ssize_t k = recv(fd, p->got + p->n_got, want - p->n_got, 0);
        if (k <= 0)
            return;
        p->n_got += (size_t)k;
    }
}

static void read_to_the_end(int fd)
{
    char block[4096];
    while (recv(fd, block, sizeof block, 0) > 0)
        ;
}

static void serve(struct peer *p, int fd, enum act act)
{
    read_head(p, fd);
    switch (act) {
    case TAKE:
        read_body(p, fd, BODY_BYTES - OFFSET);
        say(fd, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        read_to_the_end(fd);
        break;
    case REFUSE:
        say(fd, "HTTP/1.1 403 Forbidden\r\nContent-Length: 6\r\n\r\nnobody");
        read_to_the_end(fd);
        break;
    case REFUSE_AND_CLOSE: /* why comes when the client has heard that, and has stopped */
        say(fd, "HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: 6\r\n\r\n");
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &(struct timeval){.tv_usec = 200000},
                   sizeof(struct timeval));
        read_to_the_end(fd);
        say(fd, "nobody");
        break;
    case ANSWER_EARLY:
        say(fd, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        read_to_the_end(fd);
        break;
    case BREAK:
        read_body(p, fd, 3 << 20);
        break;
    case CLOSE_UNREAD:
        break;
    case READ_SOME:
        read_body(p, fd, 3 << 20);
        /* fallthrough */
    case READ_NOTHING: /* until the client has given up */
        assert_int_equal(read(p->release[0], p->head, 1), 1);
        break;
    }
    close(fd);
}

static void *peer_main(void *arg)
{
    struct peer *p = arg;
    for (; p->n_acts > 0; p->acts++, p->n_acts--) {
        int fd = accept(p->listener, NULL, NULL);
        assert_true(fd >= 0);
        serve(p, fd, *p->acts);
    }
    return NULL;
}

static void peer_start(struct peer *p, const enum act *acts, size_t n_acts)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    p->acts = acts;
    p->n_acts = n_acts;
    p->got = mb_alloc(BODY_BYTES + sizeof p->head);
    p->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(p->listener, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(getsockname(p->listener, (struct sockaddr *)&a, &n), 0);
    assert_int_equal(listen(p->listener, 8), 0);
    assert_int_equal(pipe(p->release), 0);
    p->port = ntohs(a.sin_port);
    assert_int_equal(pthread_create(&p->thread, NULL, peer_main, p), 0);
}

static void peer_end(struct peer *p)
{
    assert_int_equal(pthread_join(p->thread, NULL), 0);
    close(p->listener);
    close(p->release[0]);
    close(p->release[1]);
    mb_free(p->got);
}

/* A file with a hole; its bytes otherwise depend on the place. */
static void make_file(struct world *w)
{
    char path[] = "/tmp/mobula-send-XXXXXX";
    uint32_t x = 1;
    w->fd = mkstemp(path);
    w->data = mb_alloc(BODY_BYTES);
    for (size_t i = 0; i < BODY_BYTES; i++) {
        x = x * 1664525 + 1013904223;
        w->data[i] = (uint8_t)(x >> 24);
    }
    memset(w->data + HOLE_AT, 0, HOLE_BYTES);
    assert_true(w->fd >= 0);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(pwrite(w->fd, w->data, HOLE_AT, 0), HOLE_AT);
    size_t rest = BODY_BYTES - HOLE_AT - HOLE_BYTES;
    assert_int_equal(pwrite(w->fd, w->data + HOLE_AT + HOLE_BYTES, rest, HOLE_AT + HOLE_BYTES),
                     (ssize_t)rest);
}

static void world_open(struct world *w, const enum act *acts, size_t n_acts)
{
    struct mb_err err;
    memset(w, 0, sizeof *w);
    signal(SIGPIPE, SIG_IGN);
    uv_loop_init(&w->loop);
    assert_int_equal(mb_http_client_create(&w->loop, 4, &w->client, &err), 0);
    make_file(w);
    peer_start(&w->peer, acts, n_acts);
}

static void on_stopped(void *arg)
{
    struct world *w = arg;
    w->n_stopped++;
}

static void world_close(struct world *w)
{
    mb_http_client_stop(w->client, on_stopped, w);
    uv_run(&w->loop, UV_RUN_DEFAULT);
    assert_int_equal(w->n_stopped, 1);
    mb_http_client_destroy(w->client);
    assert_int_equal(uv_loop_close(&w->loop), 0);
    peer_end(&w->peer);
    close(w->fd);
    mb_free(w->data);
}

static void on_answer(void *arg, const struct mb_http_response *r)
{
    struct world *w = arg;
    w->n_answers++;
    w->error = r->error;
    w->status = r->status;
    snprintf(w->text, sizeof w->text, "%.*s", r->error ? 0 : (int)r->body_len,
             (const char *)r->body);
}

static void put(struct world *w, uint64_t stall_ms)
{
    char url[64];
    struct mb_err err;
    struct mb_http_request request = {.method = "PUT",
                                      .url = url,
                                      .body_fd = w->fd,
                                      .body_offset = OFFSET,
                                      .body_len = BODY_BYTES - OFFSET,
                                      .stall_timeout_ms = stall_ms,
                                      .is_direct = 1};
    int before = w->n_answers;
    snprintf(url, sizeof url, "http://127.0.0.1:%d/object", w->peer.port);
    assert_int_equal(mb_http_fetch(w->client, &request, on_answer, w, NULL, &err), 0);
    while (w->n_answers == before)
        mb_loop_turn(&w->loop);
}

static void check_taken(const struct world *w)
{
    assert_int_equal(w->error, 0);
    assert_int_equal(w->status, 200);
    assert_int_equal(w->peer.n_got, BODY_BYTES - OFFSET);
    assert_memory_equal(w->peer.got, w->data + OFFSET, BODY_BYTES - OFFSET);
}

/* Its length is told, and nothing is framed. */
static void test_all_of_it(void **state)
{
    static const enum act acts[] = {TAKE};
    struct world w;
    char length[64];
    (void)state;
    world_open(&w, acts, 1);
    put(&w, 0);
    check_taken(&w);
    snprintf(length, sizeof length, "\r\nContent-Length: %d\r\n", BODY_BYTES - OFFSET);
    assert_non_null(strstr(w.peer.head, length));
    assert_null(strstr(w.peer.head, "Transfer-Encoding"));
    world_close(&w);
}

/* An answer ends the request, whatever has been sent. */
static void test_answers_before_the_end(void **state)
{
    static const enum act acts[] = {REFUSE, REFUSE_AND_CLOSE, ANSWER_EARLY, TAKE};
    struct world w;
    (void)state;
    world_open(&w, acts, 4);
    for (int i = 0; i < 2; i++) {
        put(&w, 0);
        assert_int_equal(w.error, 0);
        assert_int_equal(w.status, 403);
        assert_string_equal(w.text, "nobody");
    }
    put(&w, 0);
    assert_int_equal(w.error, MB_EUNAVAIL); /* success is not possible */
    put(&w, 0);                             /* on a connection of its own */
    check_taken(&w);
    world_close(&w);
}

static void test_connections_that_break(void **state)
{
    static const enum act acts[] = {BREAK, CLOSE_UNREAD, TAKE};
    struct world w;
    (void)state;
    world_open(&w, acts, 3);
    put(&w, 0);
    assert_int_equal(w.error, MB_EUNAVAIL);
    put(&w, 0);
    assert_int_equal(w.error, MB_EUNAVAIL);
    put(&w, 0);
    check_taken(&w);
    world_close(&w);
}

static void test_stall(void **state)
{
    static const enum act acts[] = {READ_NOTHING};
    struct world w;
    (void)state;
    world_open(&w, acts, 1);
    put(&w, 1000);
    assert_int_equal(w.error, MB_ETIMEOUT);
    assert_int_equal(write(w.peer.release[1], "x", 1), 1);
    world_close(&w);
}

/* However much went before: the time counts from when nothing moved any more, not from the end of
 * the first period. */
static void test_stall_after_a_good_beginning(void **state)
{
    static const enum act acts[] = {READ_SOME};
    struct world w;
    (void)state;
    world_open(&w, acts, 1);
    uint64_t began = mb_mono_ms();
    put(&w, 4000);
    assert_int_equal(w.error, MB_ETIMEOUT);
    assert_in_range(mb_mono_ms() - began, 4000, 7000); /* two periods are 8000 */
    assert_int_equal(write(w.peer.release[1], "x", 1), 1);
    world_close(&w);
}

static void test_file_becomes_shorter(void **state)
{
    static const enum act acts[] = {TAKE};
    struct world w;
    (void)state;
    world_open(&w, acts, 1);
    assert_int_equal(ftruncate(w.fd, BODY_BYTES - 1), 0);
    put(&w, 0);
    assert_int_equal(w.error, MB_ESTATE);
    world_close(&w);
}

struct drain {
    int fd;
    uint8_t *got;
    size_t n;
};

static void *drain_main(void *arg)
{
    struct drain *d = arg;
    ssize_t k;
    while ((k = recv(d->fd, d->got + d->n, BODY_BYTES - d->n, 0)) > 0)
        d->n += (size_t)k;
    return NULL;
}

/* As on a file system that sendfile(2) cannot read from. */
static void test_copies(void **state)
{
    struct world w = {0};
    int pair[2];
    pthread_t thread;
    (void)state;
    make_file(&w);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    assert_int_equal(fcntl(pair[0], F_SETFL, O_NONBLOCK), 0);
    struct drain d = {.fd = pair[1], .got = mb_alloc(BODY_BYTES)};
    assert_int_equal(pthread_create(&thread, NULL, drain_main, &d), 0);
    struct mb_http_body b = {
        .fd = w.fd, .offset = OFFSET, .len = BODY_BYTES - OFFSET, .is_copied = 1};
    while (b.pos < b.len)
        assert_int_equal(mb_http_body_send(&b, pair[0], 100000), MB_OK);
    close(pair[0]);
    pthread_join(thread, NULL);
    assert_int_equal(d.n, BODY_BYTES - OFFSET);
    assert_memory_equal(d.got, w.data + OFFSET, d.n);
    close(pair[1]);
    mb_free(d.got);
    close(w.fd);
    mb_free(w.data);
}

/* A file that cannot be read is not taken for a socket that failed, nor the reverse. */
static void test_which_end_failed(void **state)
{
    char name[] = "/tmp/mobula-send-XXXXXX";
    int pair[2], readable = mkstemp(name), blind = open(name, O_WRONLY | O_CLOEXEC);
    (void)state;
    assert_true(readable >= 0 && blind >= 0);
    assert_int_equal(unlink(name), 0);
    assert_int_equal(ftruncate(readable, 1), 0);
    assert_int_equal(pwrite(readable, "x", 1, 0), 1);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    signal(SIGPIPE, SIG_IGN);
    struct mb_http_body b = {.fd = blind, .len = 1};
    assert_int_equal(mb_http_body_send(&b, pair[0], 1), MB_EIO);
    close(pair[1]);
    b = (struct mb_http_body){.fd = readable, .len = 1};
    assert_int_equal(mb_http_body_send(&b, pair[0], 1), MB_EUNAVAIL);
    close(pair[0]);
    close(readable);
    close(blind);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_of_it),
        cmocka_unit_test(test_answers_before_the_end),
        cmocka_unit_test(test_connections_that_break),
        cmocka_unit_test(test_stall),
        cmocka_unit_test(test_stall_after_a_good_beginning),
        cmocka_unit_test(test_file_becomes_shorter),
        cmocka_unit_test(test_copies),
        cmocka_unit_test(test_which_end_failed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
