/*
 * The store on a real redis-server while memory runs out: whichever allocation fails, the head wins
 * its lease and what it acknowledges is stored, or the failure is said; nothing hangs, nothing is
 * half done, and the next head finds all of it.
 */
#include "tests/unit/gcs/loop.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "gcs/store_redis.h"

enum { EACH_MAX_MS = 30000, TTL_MS = 500, NTH_MIN = 20 };

struct world {
    char dir[64], url[80];
    pid_t pid;
    uv_loop_t loop;
    struct mb_redis *redis;
    struct mb_tables *tables;
    int won, lost, put_done, closed;
    int put_code;
};

/* Held until the test ends, as in ../ports.py: nobody else is given it meanwhile. */
static int free_port(void)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY)};
    socklen_t n = sizeof a;
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one), 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, n), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &n), 0);
    return ntohs(a.sin_port);
}

static int start_server(void **state)
{
    static struct world w;
    char port[16];

    snprintf(w.dir, sizeof w.dir, "/tmp/mb-redismem-XXXXXX");
    assert_non_null(mkdtemp(w.dir));
    snprintf(port, sizeof port, "%d", free_port());
    snprintf(w.url, sizeof w.url, "redis://127.0.0.1:%s/0", port);
    w.pid = fork();
    if (w.pid == 0) {
        execlp("redis-server", "redis-server", "--port", port, "--bind", "127.0.0.1", "--dir",
               w.dir, "--save", "", "--logfile", "redis.log", (char *)NULL);
        _exit(127);
    }
    *state = &w;
    return uv_loop_init(&w.loop);
}

static int stop_server(void **state)
{
    struct world *w = *state;
    struct mb_err err;

    kill(w->pid, SIGKILL);
    waitpid(w->pid, NULL, 0);
    return uv_loop_close(&w->loop) != 0 || mb_fs_remove_tree(w->dir, &err) != 0;
}

static void on_put(void *arg, const struct mb_err *err)
{
    struct world *w = arg;

    w->put_done++;
    w->put_code = err->code;
}

static void on_won(void *arg, struct mb_tables *tables)
{
    struct world *w = arg;

    w->won++;
    w->tables = tables;
}

static void on_other(void *arg, const char *address)
{
    (void)arg;
    (void)address;
}

static void on_lost(void *arg, const struct mb_err *err)
{
    struct world *w = arg;

    assert_int_not_equal(err->code, 0);
    w->lost++;
}

static void on_closed(void *arg)
{
    ((struct world *)arg)->closed = 1;
}

static const struct mb_redis_ops ops = {on_won, on_other, on_lost};

static void run_until(struct world *w, const int *a, const int *b, const char *what)
{
    uint64_t until_ms = mb_mono_ms() + EACH_MAX_MS;

    while (!*a && !*b) {
        if (mb_mono_ms() > until_ms)
            fail_msg("%s: not within %d ms", what, EACH_MAX_MS);
        uv_run(&w->loop, UV_RUN_NOWAIT);
        usleep(200);
    }
}

/* 1: an acknowledged write of `value`. */
static int one_life(struct world *w, const char *value, int *rc)
{
    struct mb_redis_opts opts = {
        .url = w->url, .holder = "ab", .address = "127.0.0.1:1", .ttl_ms = TTL_MS};
    struct mb_err err = {0};
    int acknowledged = 0;

    w->won = w->lost = w->put_done = w->closed = 0;
    w->tables = NULL;
    *rc = mb_redis_open(&w->loop, &opts, &ops, w, &w->redis, &err);
    if (*rc != 0)
        return 0;
    run_until(w, &w->won, &w->lost, "the lease");
    if (w->won) {
        *rc = mb_tables_put(w->tables, MB_TABLES_KV, mb_blob_str("n"), mb_blob_str("k"),
                            mb_blob_str(value), on_put, w, &err);
        if (*rc == 0) {
            run_until(w, &w->put_done, &w->lost, "the write");
            acknowledged = w->put_done && w->put_code == 0;
        }
    }
    if (w->tables) {
        w->closed = 0;
        mb_tables_close(w->tables, on_closed, w);
        run_until(w, &w->closed, &w->closed, "the tables close");
    }
    w->closed = 0;
    mb_redis_close(w->redis, on_closed, w);
    run_until(w, &w->closed, &w->closed, "the store closes");
    return acknowledged;
}

static void every_allocation_fails_once(void **state)
{
    struct world *w = *state;
    char stored[24] = "", value[24];
    unsigned long nth;
    int failed = 1, rc;

    assert_int_equal(one_life(w, "first", &rc), 1);
    snprintf(stored, sizeof stored, "first");
    for (nth = 1; failed; nth++) {
        struct mb_blob found;
        struct mb_redis_opts opts = {
            .url = w->url, .holder = "ab", .address = "127.0.0.1:1", .ttl_ms = TTL_MS};
        struct mb_err err = {0};

        snprintf(value, sizeof value, "%lu", nth);
        mb_alloc_fail_nth(nth);
        int acknowledged = one_life(w, value, &rc);
        failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        assert_true(failed || acknowledged);
        /* The next head finds what was acknowledged; what was not is there whole, or not at all. */
        w->won = w->lost = 0;
        assert_int_equal(mb_redis_open(&w->loop, &opts, &ops, w, &w->redis, &err), 0);
        run_until(w, &w->won, &w->won, "the next head");
        assert_int_equal(
            mb_tables_get(w->tables, MB_TABLES_KV, mb_blob_str("n"), mb_blob_str("k"), &found), 1);
        if (found.n == strlen(value) && memcmp(found.p, value, found.n) == 0)
            snprintf(stored, sizeof stored, "%s", value);
        assert_false(acknowledged && strcmp(stored, value) != 0);
        assert_int_equal(found.n, strlen(stored));
        assert_memory_equal(found.p, stored, found.n);
        w->closed = 0;
        mb_tables_close(w->tables, on_closed, w);
        run_until(w, &w->closed, &w->closed, "the tables close");
        w->closed = 0;
        mb_redis_close(w->redis, on_closed, w);
        run_until(w, &w->closed, &w->closed, "the store closes");
    }
    print_message("%lu allocations\n", nth - 2);
    assert_true(nth > NTH_MIN);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_allocation_fails_once)};

    return cmocka_run_group_tests(tests, start_server, stop_server);
}
