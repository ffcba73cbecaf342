/* The commit of an iteration in a directory as the store. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>
#include <cmocka.h>
#include "agent/upload/commit.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"

enum { DEADLINE_MS = 30000, ITERATION = 10 };

static const struct mb_manifest_writer writer = {"job", "aa", 1};

struct world {
    char dir[64];
    uv_loop_t loop;
    struct mb_store *store;
    uv_timer_t repair, deadline;
    int done, closed;
    struct mb_err err;
};

static void write_part(const struct world *w, const char *text)
{
    char key[MB_CHECKPOINT_KEY_MAX], path[300], *slash;

    snprintf(path, sizeof(path), "%s/%s", w->dir, mb_part_key(ITERATION, 0, 1, key));
    slash = strrchr(path, '/');
    *slash = '\0';
    assert_int_equal(mb_fs_mkdir_p(path, 0755, NULL), 0);
    *slash = '/';
    assert_int_equal(mb_fs_write_atomic(path, text, strlen(text), 0644, NULL), 0);
}

static void write_good_part(const struct world *w)
{
    struct mb_manifest m = {.iteration = ITERATION, .num_nodes = 1};
    char *text;

    assert_int_equal(mb_manifest_set_writer(&m, &writer, NULL), 0);
    assert_int_equal(mb_manifest_add(&m, "a", 1, 2, NULL), 0);
    assert_int_equal(mb_manifest_encode(&m, &text, NULL), 0);
    write_part(w, text);
    mb_free(text);
    mb_manifest_close(&m);
}

static int setup(void **state)
{
    struct world *w = calloc(1, sizeof(*w));

    strcpy(w->dir, "/tmp/mobula-commit-XXXXXX");
    assert_non_null(mkdtemp(w->dir));
    assert_int_equal(uv_loop_init(&w->loop), 0);
    assert_int_equal(mb_store_open(&w->loop, w->dir, &w->store, NULL), 0);
    uv_timer_init(&w->loop, &w->repair);
    uv_timer_init(&w->loop, &w->deadline);
    w->repair.data = w->deadline.data = w;
    *state = w;
    return 0;
}

static void on_closed(void *arg)
{
    ((struct world *)arg)->closed = 1;
}

static int teardown(void **state)
{
    struct world *w = *state;

    mb_store_close(w->store, on_closed, w);
    uv_close((uv_handle_t *)&w->repair, NULL);
    uv_close((uv_handle_t *)&w->deadline, NULL);
    uv_run(&w->loop, UV_RUN_DEFAULT);
    assert_int_equal(w->closed, 1);
    assert_int_equal(uv_loop_close(&w->loop), 0);
    mb_fs_remove_tree(w->dir, NULL);
    free(w);
    return 0;
}

static void on_committed(void *arg, const struct mb_err *err)
{
    struct world *w = arg;

    w->done++;
    w->err = *err;
    uv_stop(&w->loop);
}

static void on_repair(uv_timer_t *t)
{
    write_good_part(t->data);
}

static void on_deadline(uv_timer_t *t)
{
    (void)t;
    print_error("deadline\n");
    _exit(65);
}

static void commit(struct world *w, uint64_t give_up_at_ms)
{
    struct mb_commit_opts opts = {
        .iteration = ITERATION, .num_nodes = 1, .writer = writer, .give_up_at_ms = give_up_at_ms};
    struct mb_commit *c;

    assert_int_equal(mb_commit_start(&w->loop, w->store, &opts, on_committed, w, &c, NULL), 0);
    uv_timer_start(&w->deadline, on_deadline, DEADLINE_MS, 0);
    while (!w->done)
        uv_run(&w->loop, UV_RUN_DEFAULT);
    uv_timer_stop(&w->deadline);
    assert_int_equal(w->done, 1);
}

static void test_parts_that_do_not_come_are_given_up(void **state)
{
    struct world *w = *state;

    commit(w, mb_mono_ms() + 1);
    assert_int_equal(w->err.code, MB_ETIMEOUT);
    assert_non_null(strstr(w->err.text, "part of node 0"));
}

/* The time to wait for others is over; one answer that cannot be used is no reason to stop. */
static void test_trouble_is_tried_again(void **state)
{
    struct world *w = *state;

    write_part(w, "{");
    uv_timer_start(&w->repair, on_repair, 100, 0);
    commit(w, 1);
    assert_int_equal(w->err.code, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_parts_that_do_not_come_are_given_up, setup, teardown),
        cmocka_unit_test_setup_teardown(test_trouble_is_tried_again, setup, teardown)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
