/*
 * A server that ends a connection which it has served before, without a byte of an answer, after it
 * took a request: it died then, or its patience ended just when we sent. libcurl sends the request
 * again by itself; what the first one did must not be taken for somebody else's.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "base/s3/s3_facts.h"
#include "store_run.h"

#define HANGS_UP NULL
#define FAILED   "412 Precondition Failed\r\nContent-Length: 0"

/* What is done with the n-th request: HANGS_UP, or a status line and headers, perhaps a body. */
struct peer {
    int listener;
    pthread_t thread;
    const char *const *answers;
    size_t n_answers, n_served;
    char requests[16][16]; /* methods */
};

struct world {
    uv_loop_t loop;
    struct store_run r;
    struct peer peer;
};

/* One request, headers and body. 0: there is none. */
static int take(struct peer *p, int fd)
{
    char text[8192];
    size_t n = 0, want = SIZE_MAX;

    while (n < want) {
        ssize_t k = recv(fd, text + n, sizeof(text) - 1 - n, 0);
        const char *end, *length;

        if (k <= 0)
            return 0;
        n += (size_t)k;
        text[n] = '\0';
        end = strstr(text, "\r\n\r\n");
        if (end == NULL)
            continue;
        length = strstr(text, "Content-Length: ");
        want = (size_t)(end + 4 - text) + (length ? strtoul(length + 16, NULL, 10) : 0);
    }
    snprintf(p->requests[p->n_served], sizeof(*p->requests), "%.*s", (int)strcspn(text, " "), text);
    return 1;
}

static void *peer_main(void *arg)
{
    struct peer *p = arg;

    while (p->n_served < p->n_answers) {
        int fd = accept(p->listener, NULL, NULL);
        const char *answer = "";

        while (answer != HANGS_UP && p->n_served < p->n_answers && take(p, fd)) {
            answer = p->answers[p->n_served++];
            if (answer != HANGS_UP)
                dprintf(fd, "HTTP/1.1 %s%s", answer, strstr(answer, "\r\n\r\n") ? "" : "\r\n\r\n");
        }
        close(fd);
    }
    return NULL;
}

static void world_open(struct world *w, const char *const *answers, size_t n)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(a);
    char url[64];

    memset(w, 0, sizeof(*w));
    w->peer = (struct peer){.answers = answers, .n_answers = n};
    w->peer.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(w->peer.listener, (struct sockaddr *)&a, len), 0);
    assert_int_equal(listen(w->peer.listener, 8), 0);
    assert_int_equal(getsockname(w->peer.listener, (struct sockaddr *)&a, &len), 0);
    assert_int_equal(pthread_create(&w->peer.thread, NULL, peer_main, &w->peer), 0);
    snprintf(url, sizeof(url), "http://127.0.0.1:%d", ntohs(a.sin_port));
    setenv("BUCKET_STORAGE_HOST", url, 1);
    setenv("BUCKET_STORAGE_ACCESS_KEY", "key", 1);
    setenv("BUCKET_STORAGE_SECRET_KEY", "secret", 1);
    setenv("NO_PROXY", "127.0.0.1", 1);
    s3_facts_forget_all();
    uv_loop_init(&w->loop);
    run_open(&w->r, &w->loop, "s3://bucket/p");
    /* The connection is one that was used before. */
    assert_int_equal(run_put(&w->r, "k0", "x", MB_STORE_ALWAYS, NULL), 0);
}

/* methods: one letter a request. */
static void world_close(struct world *w, const char *methods)
{
    run_close(&w->r);
    assert_int_equal(pthread_join(w->peer.thread, NULL), 0);
    assert_int_equal(w->peer.n_served, strlen(methods));
    for (size_t i = 0; i < w->peer.n_served; i++)
        assert_int_equal(w->peer.requests[i][0], methods[i]);
    close(w->peer.listener);
    assert_int_equal(uv_loop_close(&w->loop), 0);
}

#define PEER(...)                                                                                  \
    static const char *const answers[] = {"200 OK\r\nContent-Length: 0", __VA_ARGS__};             \
    struct world w;                                                                                \
    (void)state;                                                                                   \
    world_open(&w, answers, sizeof(answers) / sizeof(*answers))

static void test_our_own_object(void **state)
{
    PEER(HANGS_UP, FAILED, "200 OK\r\nETag: \"e\"\r\nContent-Length: 4\r\n\r\nmine");
    assert_int_equal(run_put(&w.r, "k", "mine", MB_STORE_IF_ABSENT, NULL), 0);
    assert_string_equal(w.r.etag, "\"e\"");
    world_close(&w, "PPPG");
}

static void test_another_object(void **state)
{
    PEER(HANGS_UP, FAILED, "200 OK\r\nETag: \"e\"\r\nContent-Length: 5\r\n\r\nother");
    assert_int_equal(run_put(&w.r, "k", "mine", MB_STORE_IF_ABSENT, NULL), MB_EEXIST);
    world_close(&w, "PPPG");
}

static void test_our_own_replacement(void **state)
{
    PEER(HANGS_UP, FAILED, "200 OK\r\nETag: \"e\"\r\nContent-Length: 4\r\n\r\nmine");
    assert_int_equal(run_put(&w.r, "k", "mine", MB_STORE_IF_MATCH, "\"old\""), 0);
    world_close(&w, "PPPG");
}

/* Nothing was repeated: a failed condition is one. */
static void test_no_repetition(void **state)
{
    PEER(FAILED);
    assert_int_equal(run_put(&w.r, "k", "mine", MB_STORE_IF_ABSENT, NULL), MB_EEXIST);
    world_close(&w, "PP");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_our_own_object),
        cmocka_unit_test(test_another_object),
        cmocka_unit_test(test_our_own_replacement),
        cmocka_unit_test(test_no_repetition),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
