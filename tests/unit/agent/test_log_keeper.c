/* agent/log_keeper.h: a log reaches its store whole, a truncated one is read again from its
 * beginning, and every failing allocation is survived. */
#include "tests/unit/gcs/loop.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "agent/log_keeper.h"
#include "base/alloc.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/logfile.h"

static const char story[] = "one\ntwo\nthree\n";

struct world {
    uv_loop_t loop;
    char dir[64], log[96], url[96], object[160];
    struct mb_log_keeper *keeper;
    int ended, closed;
};

static void set_flag(void *arg)
{
    *(int *)arg = 1;
}

static void world_open(struct world *w)
{
    *w = (struct world){.keeper = NULL};
    snprintf(w->dir, sizeof(w->dir), "/tmp/mobula-log-keeper-XXXXXX");
    assert_non_null(mkdtemp(w->dir));
    snprintf(w->log, sizeof(w->log), "%s/a.log", w->dir);
    snprintf(w->url, sizeof(w->url), "file://%s/store", w->dir);
    snprintf(w->object, sizeof(w->object), "%s/store/logs/j/driver/%020d.log", w->dir, 0);
    assert_int_equal(uv_loop_init(&w->loop), 0);
}

static void write_log(const struct world *w, const char *text)
{
    int fd = open(w->log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    close(fd);
}

static void world_close(struct world *w)
{
    if (w->keeper != NULL) {
        mb_log_keeper_close(w->keeper, set_flag, &w->closed);
        loop_until(&w->loop, &w->closed);
    }
    assert_int_equal(uv_run(&w->loop, UV_RUN_DEFAULT), 0);
    assert_int_equal(uv_loop_close(&w->loop), 0);
    assert_int_equal(mb_fs_remove_tree(w->dir, NULL), 0);
}

/* One log kept, ended and sent; without an error unless an allocation failed. */
static int keep_one(struct world *w)
{
    struct mb_kept_log_opts opts = {
        .path = w->log, .is_new = 1, .cap_bytes = -1, .key = "j/driver", .url = w->url};
    struct mb_kept_log *log;
    struct mb_err err;
    int rc = mb_log_keeper_create(&w->loop, w->dir, 0, &w->keeper, &err);

    if (rc == 0)
        rc = mb_log_keeper_add(w->keeper, &opts, &log, &err);
    if (rc == 0 && mb_kept_log_end(log, set_flag, &w->ended) != 0)
        w->ended = 1;
    while (rc == 0 && !w->ended && !mb_alloc_did_fail())
        uv_run(&w->loop, UV_RUN_ONCE);
    return rc;
}

static void check_object(const struct world *w)
{
    struct mb_buf object = {0};

    assert_int_equal(mb_fs_read(w->object, 1 << 20, &object, NULL), 0);
    assert_string_equal(mb_buf_str(&object), story);
    mb_buf_close(&object);
}

static void test_every_allocation_fails_once(void **state)
{
    int failed = 1;

    (void)state;
    for (unsigned long nth = 1; failed; nth++) {
        struct world w;
        int rc;

        world_open(&w);
        write_log(&w, story);
        mb_alloc_fail_nth(nth);
        rc = keep_one(&w);
        failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (!failed) {
            assert_int_equal(rc, 0);
            check_object(&w);
            assert_true(nth > 5);
        }
        world_close(&w);
    }
}

/* The index says that 1 MiB is released and sent, but the program truncated the file. */
static void test_truncated_log(void **state)
{
    struct mb_logfile_head head = {.first = 1 << 20, .shipped = 1 << 20, .cap_bytes = 256 << 10};
    struct mb_kept_log_opts opts = {.cap_bytes = -1, .key = "j/driver"};
    struct mb_kept_log *log;
    struct mb_logfile f;
    struct mb_err err;
    struct world w;
    uint64_t at = 0;
    char buf[64];
    int fd;

    (void)state;
    world_open(&w);
    write_log(&w, story);
    opts.path = w.log;
    assert_int_equal(mb_logfile_index_open(w.log, 1, &fd, &err), 0);
    assert_int_equal(mb_logfile_head_write(fd, &head, &err), 0);
    assert_int_equal(mb_log_keeper_create(&w.loop, w.dir, 0, &w.keeper, &err), 0);
    assert_int_equal(mb_log_keeper_add(w.keeper, &opts, &log, &err), 0);
    assert_int_equal(mb_kept_log_end(log, set_flag, &w.ended), 1);
    assert_int_equal(mb_logfile_head_read(fd, &head), 0);
    assert_int_equal(head.first, 0);
    assert_int_equal(head.shipped, strlen(story));
    assert_int_equal(mb_logfile_open(w.log, &f, &err), 0);
    assert_int_equal(mb_logfile_read(&f, &at, buf, sizeof(buf)), strlen(story));
    assert_memory_equal(buf, story, strlen(story));
    mb_logfile_close(&f);
    close(fd);
    world_close(&w);
}

struct wait {
    int ended, n_late;
    char text[700];
};

static void on_late(void *arg, const char *text)
{
    struct wait *wait = arg;

    wait->n_late++;
    snprintf(wait->text, sizeof(wait->text), "%s", text);
}

static void on_wait_over(void *arg)
{
    ((struct wait *)arg)->ended = 1;
}

/* The end of a log waits as long as it was told, and says for what; a store that comes back before
 * that gets everything. */
static void test_a_store_that_is_not_there(void **state)
{
    (void)state;
    for (int comes_back = 0; comes_back < 2; comes_back++) {
        struct world w;
        struct wait wait = {.ended = 0};
        struct mb_kept_log_opts opts = {
            .is_new = 1, .cap_bytes = -1, .wait_ms = comes_back ? 20000 : 2000, .key = "j/driver"};
        struct mb_kept_log *log;
        struct mb_err err;
        char blocked[96];
        uint64_t began_ms = mb_mono_ms(), took_ms;

        world_open(&w);
        write_log(&w, story);
        opts.path = w.log;
        opts.url = w.url;
        snprintf(blocked, sizeof(blocked), "%s/store", w.dir);
        assert_int_equal(mb_fs_write_atomic(blocked, "", 0, 0600, &err), 0);
        assert_int_equal(mb_log_keeper_create(&w.loop, w.dir, 0, &w.keeper, &err), 0);
        assert_int_equal(mb_log_keeper_add(w.keeper, &opts, &log, &err), 0);
        mb_kept_log_tell_late(log, on_late);
        assert_int_equal(mb_kept_log_end(log, on_wait_over, &wait), 0);
        while (wait.n_late == 0)
            uv_run(&w.loop, UV_RUN_ONCE);
        assert_int_equal(wait.ended, 0);
        assert_non_null(strstr(wait.text, w.url));
        assert_non_null(strstr(wait.text, comes_back ? "for 20 s" : "for 2 s"));
        if (comes_back)
            assert_int_equal(unlink(blocked), 0);
        loop_until(&w.loop, &wait.ended);
        took_ms = mb_mono_ms() - began_ms;
        assert_true(took_ms >= (comes_back ? 1000 : 2000) && took_ms < 15000);
        assert_int_equal(wait.n_late, 1);
        if (comes_back)
            check_object(&w);
        world_close(&w);
    }
}

static void on_lost(void *arg, const char *text)
{
    on_late(arg, text);
}

/* What the store has of the log: no byte is counted twice. */
static uint64_t stored_bytes(const struct world *w, uint64_t first, uint64_t end)
{
    char path[200];
    uint64_t at = first;

    while (at < end) {
        struct mb_buf object = {0};

        snprintf(path, sizeof(path), "%s/store/logs/j/driver/%020llu.log", w->dir,
                 (unsigned long long)at);
        if (mb_fs_read(path, 4 << 20, &object, NULL) != 0)
            break;
        at += object.len;
        mb_buf_close(&object);
    }
    return at - first;
}

static void write_lines(const struct world *w, size_t n)
{
    char *text = malloc(n + 1);

    assert_non_null(text);
    memset(text, '\n', n);
    text[n] = '\0';
    write_log(w, text);
    free(text);
}

static void wait_for_file(struct world *w, const char *path)
{
    uint64_t began_ms = mb_mono_ms();

    while (!mb_fs_exists(path)) {
        assert_true(mb_mono_ms() - began_ms < 60000);
        uv_run(&w->loop, UV_RUN_ONCE);
    }
}

/* A log that is far beyond its cap when it is first looked at: what its end tells is what the store
 * does not have, to the byte; also when another agent saw it go. */
static void test_released_before_it_was_sent(void **state)
{
    enum { BYTES = 3 << 20, CAP = 256 << 10, KEPT = CAP / 4 * 3 };

    (void)state;
    for (int restarts = 0; restarts < 2; restarts++) {
        struct mb_kept_log_opts opts = {.is_new = 1, .cap_bytes = CAP, .key = "j/driver"};
        unsigned long long begin, end;
        struct wait wait = {.ended = 0};
        struct mb_kept_log *log;
        struct mb_err err;
        struct world w;
        char gaps[120];

        world_open(&w);
        write_lines(&w, BYTES);
        opts.path = w.log;
        opts.url = w.url;
        snprintf(gaps, sizeof(gaps), "%s.gaps", w.log);
        assert_int_equal(mb_fs_write_atomic(gaps, "1 0 9 9\n", 8, 0600, &err), 0);
        assert_int_equal(mb_log_keeper_create(&w.loop, w.dir, CAP, &w.keeper, &err), 0);
        assert_int_equal(mb_log_keeper_add(w.keeper, &opts, &log, &err), 0);
        assert_false(mb_fs_exists(gaps)); /* of a file that is replaced */
        if (restarts) {
            wait_for_file(&w, gaps);
            mb_log_keeper_close(w.keeper, set_flag, &w.closed);
            loop_until(&w.loop, &w.closed);
            w.closed = 0;
            opts.is_new = 0;
            assert_int_equal(mb_log_keeper_create(&w.loop, w.dir, 0, &w.keeper, &err), 0);
            assert_int_equal(mb_log_keeper_add(w.keeper, &opts, &log, &err), 0);
        }
        mb_kept_log_tell_lost(log, on_lost);
        assert_int_equal(mb_kept_log_end(log, on_wait_over, &wait), 0);
        loop_until(&w.loop, &wait.ended);
        assert_int_equal(wait.n_late, 1);
        assert_int_equal(
            sscanf(wait.text, "bytes %llu to %llu of its log are not in", &begin, &end), 2);
        assert_non_null(strstr(wait.text, w.url));
        assert_non_null(strstr(wait.text, "its cap of 262144 bytes"));
        assert_non_null(strstr(wait.text, "MOBULA_LOG_MAX_BYTES"));
        assert_int_equal(end, BYTES - KEPT);
        assert_int_equal(stored_bytes(&w, 0, BYTES), begin);
        assert_int_equal(stored_bytes(&w, end, BYTES), BYTES - end);
        world_close(&w);
    }
}

/* Without a store what was released is nowhere; a damaged note of gaps says nothing. */
static void test_released_without_a_store(void **state)
{
    enum { BYTES = 1 << 20, CAP = 256 << 10 };
    struct mb_kept_log_opts opts = {.is_new = 1, .cap_bytes = CAP, .key = "j/driver"};
    struct wait wait = {.ended = 0};
    struct mb_kept_log *log;
    struct mb_err err;
    struct world w;
    char gaps[120], want[120];

    (void)state;
    world_open(&w);
    write_lines(&w, BYTES);
    opts.path = w.log;
    snprintf(gaps, sizeof(gaps), "%s.gaps", w.log);
    assert_int_equal(mb_log_keeper_create(&w.loop, w.dir, 0, &w.keeper, &err), 0);
    for (int i = 0; i < 2; i++) {
        opts.is_new = i == 0;
        assert_int_equal(mb_log_keeper_add(w.keeper, &opts, &log, &err), 0);
        mb_kept_log_tell_lost(log, on_lost);
        assert_int_equal(mb_kept_log_end(log, on_wait_over, &wait), 1);
        assert_int_equal(wait.n_late, i + 1);
        snprintf(want, sizeof(want), "the first %d bytes of its log were released",
                 BYTES - CAP / 4 * 3 + 1); /* to the next line */
        assert_non_null(strstr(wait.text, want));
        assert_non_null(strstr(wait.text, "MOBULA_LOG_MAX_BYTES"));
        assert_int_equal(mb_fs_write_atomic(gaps, "1 9 0 9\n", 8, 0600, &err), 0);
    }
    world_close(&w);
}

/* Two pieces are sent at a time: more logs than that take turns. */
static void test_logs_take_turns(void **state)
{
    enum { LOGS = 4, BYTES = 1 << 20, CAP = 512 << 10 };
    struct wait waits[LOGS] = {{.ended = 0}};
    struct world w, each[LOGS];
    struct mb_err err;
    int n_ended = 0;

    (void)state;
    world_open(&w);
    assert_int_equal(mb_log_keeper_create(&w.loop, w.dir, 0, &w.keeper, &err), 0);
    for (int i = 0; i < LOGS; i++) {
        struct mb_kept_log_opts opts = {.is_new = 1, .cap_bytes = CAP, .url = w.url};
        struct mb_kept_log *log;
        char key[16];

        snprintf(each[i].log, sizeof(each[i].log), "%s/%d.log", w.dir, i);
        snprintf(key, sizeof(key), "j/rank-%d", i);
        write_lines(&each[i], BYTES);
        opts.path = each[i].log;
        opts.key = key;
        assert_int_equal(mb_log_keeper_add(w.keeper, &opts, &log, &err), 0);
        assert_int_equal(mb_kept_log_end(log, on_wait_over, &waits[i]), 0);
    }
    while (n_ended == 0) {
        uv_run(&w.loop, UV_RUN_ONCE);
        for (int i = 0; i < LOGS; i++)
            n_ended += waits[i].ended;
    }
    for (int i = 0; i < LOGS; i++) {
        struct mb_logfile_head head;
        struct mb_logfile f;

        assert_int_equal(mb_logfile_open(each[i].log, &f, &err), 0);
        assert_int_equal(mb_logfile_head_read(f.index_fd, &head), 0);
        assert_true(head.shipped >= BYTES / 2);
        assert_true(head.first <= head.shipped); /* nothing went before it was sent */
        mb_logfile_close(&f);
    }
    for (int i = 0; i < LOGS; i++)
        loop_until(&w.loop, &waits[i].ended);
    world_close(&w);
}

static void test_wait_values(void **state)
{
    struct mb_err err;
    uint64_t ms = 7;

    (void)state;
    assert_int_equal(mb_log_wait_parse(NULL, &ms, &err), 0);
    assert_int_equal(ms, 0);
    assert_int_equal(mb_log_wait_parse("2m", &ms, &err), 0);
    assert_int_equal(ms, 120000);
    assert_int_equal(mb_log_wait_parse("999ms", &ms, &err), MB_EINVAL);
    assert_int_equal(mb_log_wait_parse("2h", &ms, &err), MB_EINVAL);
    assert_int_equal(mb_log_wait_parse("soon", &ms, &err), MB_EINVAL);
}

static void test_cap_values(void **state)
{
    struct mb_err err;
    int64_t cap = 7;

    (void)state;
    assert_int_equal(mb_log_cap_parse(NULL, &cap, &err), 0);
    assert_int_equal(cap, -1);
    assert_int_equal(mb_log_cap_parse("0", &cap, &err), 0);
    assert_int_equal(cap, 0);
    assert_int_equal(mb_log_cap_parse("256KiB", &cap, &err), 0);
    assert_int_equal(cap, 256 << 10);
    assert_int_equal(mb_log_cap_parse("255KiB", &cap, &err), MB_EINVAL);
    assert_int_equal(mb_log_cap_parse("8388608TiB", &cap, &err), MB_EINVAL);
    assert_int_equal(mb_log_cap_parse("", &cap, &err), MB_EINVAL);
}

/* It waits for as long as that lasts, beyond what it waits for a store, and is then there as a
 * whole. */
static void test_held(void **state)
{
    struct mb_kept_log_opts opts = {
        .is_new = 1, .cap_bytes = -1, .wait_ms = 1000, .key = "j/driver"};
    struct mb_kept_log *log;
    struct mb_err err;
    struct world w;
    uint64_t until;

    (void)state;
    for (int hurry = 0; hurry < 2; hurry++) {
        world_open(&w);
        write_log(&w, story);
        opts.path = w.log;
        opts.url = w.url;
        assert_int_equal(mb_log_keeper_create(&w.loop, w.dir, 0, &w.keeper, &err), 0);
        assert_int_equal(mb_log_keeper_add(w.keeper, &opts, &log, &err), 0);
        mb_log_keeper_hold(w.keeper, 1);
        assert_int_equal(mb_kept_log_end(log, set_flag, &w.ended), 0);
        assert_int_equal(mb_log_keeper_owes(w.keeper), strlen(story));
        until = mb_mono_ms() + 1500;
        if (hurry)
            mb_kept_log_hurry(log, until);
        while (mb_mono_ms() < until) {
            assert_false(w.ended);
            uv_run(&w.loop, UV_RUN_ONCE);
        }
        mb_log_keeper_hold(w.keeper, 0);
        loop_until(&w.loop, &w.ended);
        if (!hurry) /* else there is no time left for it */
            check_object(&w);
        world_close(&w);
    }
}

/* A log that has ended, and of which the hold finds the one piece on its way. */
static void hold_while_it_is_sent(struct world *w)
{
    struct mb_kept_log_opts opts = {.is_new = 1, .cap_bytes = -1, .key = "j/driver"};
    struct mb_kept_log *log;
    struct mb_err err;

    world_open(w);
    write_log(w, story);
    opts.path = w->log;
    opts.url = w->url;
    assert_int_equal(mb_log_keeper_create(&w->loop, w->dir, 0, &w->keeper, &err), 0);
    assert_int_equal(mb_log_keeper_add(w->keeper, &opts, &log, &err), 0);
    assert_int_equal(mb_kept_log_end(log, set_flag, &w->ended), 0);
    uv_run(&w->loop, UV_RUN_NOWAIT); /* the turn that begins it */
    mb_log_keeper_hold(w->keeper, 1);
}

/* While it is sent: that is broken off, and the whole of it goes when it may. */
static void test_held_while_it_is_sent(void **state)
{
    struct world w;

    (void)state;
    for (int drop = 0; drop < 2; drop++) {
        hold_while_it_is_sent(&w);
        if (drop) { /* the keeper is closed with it */
            world_close(&w);
            continue;
        }
        uv_run(&w.loop, UV_RUN_NOWAIT);
        mb_log_keeper_hold(w.keeper, 0);
        loop_until(&w.loop, &w.ended);
        check_object(&w);
        world_close(&w);
    }
}

/* 1: what was under way ended by itself, and the log with it; 0: it was cancelled, and waits. */
static int ends_while_it_is_held(void)
{
    uint64_t by_ms = mb_mono_ms() + 1500;
    struct world w;
    int is_there;

    hold_while_it_is_sent(&w);
    while (!w.ended && mb_mono_ms() < by_ms)
        uv_run(&w.loop, UV_RUN_ONCE);
    is_there = mb_fs_exists(w.object);
    assert_int_equal(w.ended, is_there);
    mb_log_keeper_hold(w.keeper, 0);
    loop_until(&w.loop, &w.ended);
    check_object(&w);
    world_close(&w);
    return is_there;
}

/* Its job need not wait for the end of the hold. Whether a put is cancelled is the thread's luck.
 */
static void test_it_ends_while_it_is_held(void **state)
{
    int n = 0;

    (void)state;
    while (!ends_while_it_is_held())
        assert_int_not_equal(++n, 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_allocation_fails_once),
        cmocka_unit_test(test_truncated_log),
        cmocka_unit_test(test_held),
        cmocka_unit_test(test_held_while_it_is_sent),
        cmocka_unit_test(test_it_ends_while_it_is_held),
        cmocka_unit_test(test_cap_values),
        cmocka_unit_test(test_wait_values),
        cmocka_unit_test(test_a_store_that_is_not_there),
        cmocka_unit_test(test_released_before_it_was_sent),
        cmocka_unit_test(test_released_without_a_store),
        cmocka_unit_test(test_logs_take_turns),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
