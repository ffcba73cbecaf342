/* The tracker file of a foreign trainer: what counts, when, and what does not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>
#include <cmocka.h>
#include "agent/upload/manifest.h"
#include "agent/upload/tracker.h"
#include "base/clock.h"
#include "base/fs.h"

enum { DEADLINE_MS = 30000 };

struct world {
    char top[64], dir[100], path[200], state[100];
    uv_loop_t loop;
    uv_timer_t deadline;
    struct mb_tracker *t;
    int64_t sealed;
    int n_sealed;
    size_t n_files;
};

static void on_sealed(void *arg, int64_t iteration, const char *dir, struct mb_walk *w)
{
    struct world *world = arg;

    (void)dir;
    world->sealed = iteration;
    world->n_sealed++;
    world->n_files = w->n;
}

static void on_deadline(uv_timer_t *t)
{
    (void)t;
    print_error("deadline\n");
    _exit(65);
}

static void begin(struct world *w)
{
    struct mb_err err;

    if (mb_tracker_start(&w->loop, w->dir, w->state, on_sealed, w, &w->t, &err) != 0)
        fail_msg("%s", err.text);
}

static void add_iteration(const struct world *w, int64_t iteration)
{
    char name[MB_CHECKPOINT_KEY_MAX], path[400];

    snprintf(path, sizeof(path), "%s/%s", w->dir, mb_iteration_dir(iteration, name));
    assert_int_equal(mb_fs_mkdir_p(path, 0755, NULL), 0);
    strcat(path, "/model.pt");
    assert_int_equal(mb_fs_write_atomic(path, "x", 1, 0644, NULL), 0);
}

/* As Megatron does: open, truncate, write; the caller closes. */
static int open_tracker(const struct world *w, const char *text)
{
    int fd = open(w->path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);

    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    return fd;
}

static void run_until(struct world *w, int n_sealed)
{
    while (w->n_sealed < n_sealed)
        uv_run(&w->loop, UV_RUN_ONCE);
}

static void on_enough(uv_timer_t *t)
{
    uv_stop(t->loop);
}

static void run_for(struct world *w, uint64_t ms)
{
    uv_timer_t enough;

    uv_timer_init(&w->loop, &enough);
    uv_timer_start(&enough, on_enough, ms, 0);
    uv_run(&w->loop, UV_RUN_DEFAULT);
    uv_close((uv_handle_t *)&enough, NULL);
    uv_run(&w->loop, UV_RUN_NOWAIT);
}

static int setup(void **state)
{
    struct world *w = calloc(1, sizeof(*w));

    strcpy(w->top, "/tmp/mobula-tracker-XXXXXX");
    assert_non_null(mkdtemp(w->top));
    snprintf(w->dir, sizeof(w->dir), "%s/save", w->top);
    snprintf(w->path, sizeof(w->path), "%s/" MB_LATEST_KEY, w->dir);
    snprintf(w->state, sizeof(w->state), "%s/tracker.known", w->top);
    assert_int_equal(uv_loop_init(&w->loop), 0);
    uv_timer_init(&w->loop, &w->deadline);
    uv_timer_start(&w->deadline, on_deadline, DEADLINE_MS, 0);
    *state = w;
    return 0;
}

static int teardown(void **state)
{
    struct world *w = *state;

    mb_tracker_stop(w->t);
    uv_close((uv_handle_t *)&w->deadline, NULL);
    uv_run(&w->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&w->loop), 0);
    mb_fs_remove_tree(w->top, NULL);
    free(w);
    return 0;
}

/* Closed by its writer it counts at once, not after two looks of half a second each. */
static void test_closed(void **state)
{
    struct world *w = *state;
    uint64_t began;

    assert_int_equal(mb_fs_mkdir_p(w->dir, 0755, NULL), 0);
    begin(w);
    add_iteration(w, 10);
    close(open_tracker(w, "10"));
    run_until(w, 1);
    assert_true(w->sealed == 10 && w->n_files == 1);
    add_iteration(w, 20);
    began = mb_mono_ms();
    assert_int_equal(mb_fs_write_atomic(w->path, "20\n", 3, 0644, NULL), 0); /* moved into place */
    run_until(w, 2);
    assert_int_equal(w->sealed, 20);
    print_message("sealed after %d ms\n", (int)(mb_mono_ms() - began));
    close(open_tracker(w, "20")); /* the same once more */
    run_for(w, 50);
    assert_int_equal(w->n_sealed, 2);
}

/* Half a number is a number, too: it does not count while its writer has it open. */
static void test_half_written(void **state)
{
    struct world *w = *state;
    int fd;

    assert_int_equal(mb_fs_mkdir_p(w->dir, 0755, NULL), 0);
    add_iteration(w, 10);
    add_iteration(w, 100);
    begin(w);
    close(open_tracker(w, ""));
    close(open_tracker(w, "release"));
    close(open_tracker(w, "1x"));
    run_for(w, 50);
    assert_int_equal(w->n_sealed, 0);
    fd = open_tracker(w, "10");
    run_for(w, 50); /* time for one look at most */
    assert_int_equal(w->n_sealed, 0);
    assert_int_equal(write(fd, "0", 1), 1);
    close(fd);
    run_until(w, 1);
    assert_int_equal(w->sealed, 100);
}

/* The directory comes later, and the tracker by somebody whom the kernel does not tell of: here one
 * that never closes the file. */
static void test_looked_at(void **state)
{
    struct world *w = *state;
    int fd;

    begin(w);
    assert_int_equal(mb_fs_mkdir_p(w->dir, 0755, NULL), 0);
    add_iteration(w, 10);
    fd = open_tracker(w, "10");
    run_until(w, 1);
    assert_int_equal(w->sealed, 10);
    close(fd);
    fd = open_tracker(w, "20"); /* whose directory is not there yet */
    mb_tracker_look(w->t);
    assert_int_equal(w->n_sealed, 1);
    add_iteration(w, 20);
    mb_tracker_look(w->t); /* its writer has ended */
    assert_int_equal(w->sealed, 20);
    close(fd);
}

/* What was there before the attempt is not its own, also for an agent that starts again. */
static void test_known(void **state)
{
    struct world *w = *state;

    assert_int_equal(mb_fs_mkdir_p(w->dir, 0755, NULL), 0);
    add_iteration(w, 10);
    close(open_tracker(w, "10"));
    begin(w);
    mb_tracker_look(w->t);
    assert_int_equal(w->n_sealed, 0);
    add_iteration(w, 20);
    close(open_tracker(w, "20"));
    mb_tracker_stop(w->t);
    begin(w);
    mb_tracker_look(w->t);
    assert_true(w->n_sealed == 1 && w->sealed == 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_closed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_half_written, setup, teardown),
        cmocka_unit_test_setup_teardown(test_looked_at, setup, teardown),
        cmocka_unit_test_setup_teardown(test_known, setup, teardown)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
