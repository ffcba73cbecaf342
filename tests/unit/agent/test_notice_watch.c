/* A file and a URL that give a notice both, each another time: the earlier is told, once. The URL
 * is that of a thread here. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "agent/notice.h"
#include "base/clock.h"
#include "base/loop.h"

struct world {
    uv_loop_t loop;
    struct mb_notice *notice;
    char file[64], url[64];
    int listener;
    uint64_t url_s; /* what the URL answers, a second of the clock */
    atomic_int n_asked;
    pthread_t thread;
    int n_told, is_closed;
    uint64_t told_ms[16];
};

static void *answer_all(void *arg)
{
    struct world *w = arg;
    char head[4096], text[128];
    int fd;

    while ((fd = accept(w->listener, NULL, NULL)) >= 0) {
        if (read(fd, head, sizeof head) > 0) {
            int n = snprintf(text, sizeof text,
                             "HTTP/1.1 200 OK\r\nContent-Length: 11\r\nConnection: close\r\n\r\n"
                             "@%010llu",
                             (unsigned long long)w->url_s);
            assert_int_equal(write(fd, text, (size_t)n), n);
            w->n_asked++;
        }
        close(fd);
    }
    return NULL;
}

static void on_notice(void *arg, uint64_t unix_ms)
{
    struct world *w = arg;

    assert_in_range(w->n_told, 0, 15);
    w->told_ms[w->n_told++] = unix_ms;
}

static void write_file(const struct world *w, uint64_t second)
{
    FILE *f = fopen(w->file, "w");

    assert_non_null(f);
    fprintf(f, "@%llu\n", (unsigned long long)second);
    assert_int_equal(fclose(f), 0);
}

static void open_world(struct world *w, uint64_t file_s, uint64_t url_s)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    struct mb_notice_opts opts = {.file = w->file, .url = w->url}; /* of w as it is then */
    struct mb_err err;
    int fd;

    *w = (struct world){.file = "/tmp/mobula-notice-XXXXXX", .url_s = url_s};
    fd = mkstemp(w->file);
    assert_true(fd >= 0);
    close(fd);
    write_file(w, file_s);
    w->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(w->listener, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(w->listener, 8), 0);
    assert_int_equal(getsockname(w->listener, (struct sockaddr *)&a, &len), 0);
    snprintf(w->url, sizeof w->url, "http://127.0.0.1:%d/", ntohs(a.sin_port));
    assert_int_equal(pthread_create(&w->thread, NULL, answer_all, w), 0);
    uv_loop_init(&w->loop);
    assert_int_equal(mb_notice_start(&w->loop, &opts, on_notice, w, &w->notice, &err), 0);
}

static void on_closed(void *arg)
{
    ((struct world *)arg)->is_closed = 1;
}

static void close_world(struct world *w)
{
    mb_notice_stop(w->notice, on_closed, w);
    uv_run(&w->loop, UV_RUN_DEFAULT);
    assert_int_equal(w->is_closed, 1);
    assert_int_equal(uv_loop_close(&w->loop), 0);
    shutdown(w->listener, SHUT_RDWR);
    pthread_join(w->thread, NULL);
    close(w->listener);
    unlink(w->file);
}

/* The URL was asked so often, and the file, which is looked at every second, behind that. */
static void until_asked(struct world *w, int n)
{
    while (w->n_asked < n)
        mb_loop_turn(&w->loop);
    for (uint64_t end = mb_mono_ms() + 2500; mb_mono_ms() < end;)
        mb_loop_turn(&w->loop);
}

static void test_the_earlier_is_kept(void **state)
{
    const uint64_t now_s = mb_unix_ms() / 1000, soon_s = now_s + 100, late_s = now_s + 900;
    struct world w;

    (void)state;
    open_world(&w, soon_s, late_s);
    until_asked(&w, 2);
    assert_int_equal(w.n_told, 1);
    assert_int_equal(w.told_ms[0], soon_s * 1000);
    write_file(&w, soon_s - 10); /* it changes its mind: one more line */
    until_asked(&w, 3);
    assert_int_equal(w.n_told, 2);
    assert_int_equal(w.told_ms[1], (soon_s - 10) * 1000);
    close_world(&w);

    open_world(&w, late_s, soon_s);
    until_asked(&w, 2);
    assert_in_range(w.n_told, 1, 2); /* the file may be first, which is later */
    assert_int_equal(w.told_ms[w.n_told - 1], soon_s * 1000);
    close_world(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_earlier_is_kept),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
