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

enum { DEADLINE_MS = 100000 };

struct world {
    char top[64], dir[100], path[200], state[100];
    uv_loop_t loop;
    uv_timer_t deadline;
    struct mb_tracker *t;
    int64_t sealed; /* the last one */
    int n_sealed;
    size_t n_files;
    int64_t all[16], lost[16]; /* in the order in which they were told */
    int n_lost;
};

static void on_sealed(void *arg, int64_t iteration, const char *dir, struct mb_walk *w)
{
    struct world *world = arg;

    (void)dir;
    assert_true(world->n_sealed < 16);
    world->sealed = world->all[world->n_sealed++] = iteration;
    world->n_files = w->n;
}

static void on_lost(void *arg, int64_t iteration, const char *why)
{
    struct world *world = arg;

    print_message("lost %d: %s\n", (int)iteration, why);
    assert_true(world->n_lost < 16);
    world->lost[world->n_lost++] = iteration;
}

static const struct mb_tracker_ops ops = {on_sealed, on_lost};

static int cannot_list; /* which iterations are there */

int __real_mb_walk_iterations(const char *dir, int64_t from, int64_t to, int64_t **out, size_t *n,
                              struct mb_err *err);
int __wrap_mb_walk_iterations(const char *dir, int64_t from, int64_t to, int64_t **out, size_t *n,
                              struct mb_err *err);

int __wrap_mb_walk_iterations(const char *dir, int64_t from, int64_t to, int64_t **out, size_t *n,
                              struct mb_err *err)
{
    if (!cannot_list)
        return __real_mb_walk_iterations(dir, from, to, out, n, err);
    *out = NULL;
    *n = 0;
    return mb_err_set(err, MB_EIO, "%s: it cannot be listed", dir);
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

    if (mb_tracker_start(&w->loop, w->dir, w->state, &ops, w, &w->t, &err) != 0)
        fail_msg("%s", err.text);
}

static void path_of(const struct world *w, int64_t iteration, char path[400])
{
    char name[MB_CHECKPOINT_KEY_MAX];

    snprintf(path, 400, "%s/%s", w->dir, mb_iteration_dir(iteration, name));
}

static void remove_iteration(const struct world *w, int64_t iteration)
{
    char path[400];

    path_of(w, iteration, path);
    assert_int_equal(mb_fs_remove_tree(path, NULL), 0);
}

static void add_file(const struct world *w, int64_t iteration, const char *file)
{
    char path[400];

    path_of(w, iteration, path);
    assert_int_equal(mb_fs_mkdir_p(path, 0755, NULL), 0);
    strcat(path, "/");
    strcat(path, file);
    assert_int_equal(mb_fs_write_atomic(path, "x", 1, 0644, NULL), 0);
}

static void add_iteration(const struct world *w, int64_t iteration)
{
    add_file(w, iteration, "model.pt");
}

/* As Megatron does: open, truncate, write; the caller closes. */
static int open_tracker(const struct world *w, const char *text)
{
    int fd = open(w->path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);

    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    return fd;
}

static void name(const struct world *w, const char *text)
{
    close(open_tracker(w, text));
}

static void save(const struct world *w, int64_t iteration)
{
    char text[32];

    add_iteration(w, iteration);
    snprintf(text, sizeof(text), "%lld", (long long)iteration);
    name(w, text);
}

static void save_each(const struct world *w, int64_t from, int64_t to)
{
    for (int64_t i = from; i <= to; i += 10)
        save(w, i);
}

static void end(struct world *w)
{
    mb_tracker_stop(w->t);
    w->t = NULL;
    uv_run(&w->loop, UV_RUN_NOWAIT);
}

static void assert_sealed(const struct world *w, int n, const int64_t *wanted)
{
    assert_int_equal(w->n_sealed, n);
    assert_memory_equal(w->all, wanted, (size_t)n * sizeof(*wanted));
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

    cannot_list = 0;
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
    mb_tracker_look(w->t, 0);
    assert_int_equal(w->n_sealed, 1);
    add_iteration(w, 20);
    mb_tracker_look(w->t, 0); /* its writer has ended */
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
    mb_tracker_look(w->t, 0);
    assert_int_equal(w->n_sealed, 0);
    add_iteration(w, 20);
    close(open_tracker(w, "20"));
    mb_tracker_stop(w->t);
    begin(w);
    mb_tracker_look(w->t, 0);
    assert_true(w->n_sealed == 1 && w->sealed == 20);
}

/* With another inode each time: a clock of 4 ms does not tell two quick writes apart. */
static void save_anew(const struct world *w, int64_t iteration)
{
    char text[32];
    int n = snprintf(text, sizeof(text), "%lld", (long long)iteration);

    add_iteration(w, iteration);
    assert_int_equal(mb_fs_write_atomic(w->path, text, (size_t)n, 0644, NULL), 0);
}

/* A run that begins again where another one was saves the number that was named before: its own
 * save, once for each time. The agent that starts again in between knows what it has seen. */
static void test_known_and_saved_again(void **state)
{
    struct world *w = *state;

    assert_int_equal(mb_fs_mkdir_p(w->dir, 0755, NULL), 0);
    save(w, 10);
    begin(w);
    name(w, "10"); /* nothing of it was written */
    mb_tracker_look(w->t, 0);
    assert_int_equal(w->n_sealed, 0);
    save_anew(w, 10);
    run_until(w, 1);
    mb_tracker_look(w->t, 0);
    run_for(w, 50);
    assert_sealed(w, 1, (int64_t[]){10});
    end(w);
    begin(w);
    mb_tracker_look(w->t, 1);
    assert_int_equal(w->n_sealed, 1);
    save_anew(w, 10);
    mb_tracker_look(w->t, 1);
    save_anew(w, 20);
    mb_tracker_look(w->t, 1);
    assert_sealed(w, 3, (int64_t[]){10, 10, 20});
    end(w);
    remove_iteration(w, 20); /* by hand; the tracker file is left */
    assert_int_equal(unlink(w->state), 0);
    begin(w);
    save_anew(w, 20);
    mb_tracker_look(w->t, 1);
    assert_sealed(w, 4, (int64_t[]){10, 10, 20, 20});
    assert_int_equal(w->n_lost, 0);
}

/* Saves of which nobody was told one by one: the oldest first, each once. */
static void test_passed(void **state)
{
    struct world *w = *state;

    assert_int_equal(mb_fs_mkdir_p(w->dir, 0755, NULL), 0);
    save(w, 10);
    begin(w);
    save_each(w, 20, 40);
    add_iteration(w, 50); /* still being written */
    run_until(w, 3);
    run_for(w, 50);
    assert_sealed(w, 3, (int64_t[]){20, 30, 40});
    name(w, "50");
    run_until(w, 4);
    assert_sealed(w, 4, (int64_t[]){20, 30, 40, 50});
    assert_int_equal(w->n_lost, 0);
}

/* The agent is away while the trainer saves; it comes back, goes, and comes back once more. */
static void test_passed_while_away(void **state)
{
    struct world *w = *state;

    begin(w); /* there is no directory yet */
    assert_int_equal(mb_fs_mkdir_p(w->dir, 0755, NULL), 0);
    save(w, 10);
    mb_tracker_look(w->t, 0);
    end(w);
    save_each(w, 20, 40);
    begin(w);
    run_until(w, 4); /* by its own looks */
    end(w);
    begin(w);
    mb_tracker_look(w->t, 0);
    save_each(w, 50, 60);
    end(w);
    begin(w);
    mb_tracker_look(w->t, 1);
    assert_sealed(w, 6, (int64_t[]){10, 20, 30, 40, 50, 60});
    assert_int_equal(w->n_lost, 0);
}

/* Left by an earlier attempt: no save of this one, unless it saves it again. */
static void test_passed_old(void **state)
{
    struct world *w = *state;

    assert_int_equal(mb_fs_mkdir_p(w->dir, 0755, NULL), 0);
    save(w, 10);
    add_iteration(w, 20);
    add_iteration(w, 30);
    begin(w);
    end(w);
    add_iteration(w, 30); /* the same name, the same size */
    save(w, 40);
    begin(w);
    mb_tracker_look(w->t, 0);
    assert_sealed(w, 2, (int64_t[]){30, 40});
    assert_int_equal(w->n_lost, 0);
}

/* Its trainer removes older ones: what was seen and not taken is told, what it gave up is not. */
static void test_passed_and_gone(void **state)
{
    struct world *w = *state;

    assert_int_equal(mb_fs_mkdir_p(w->dir, 0755, NULL), 0);
    add_iteration(w, 5);
    begin(w);
    add_iteration(w, 10);
    run_for(w, 50);
    remove_iteration(w, 10); /* never named */
    add_iteration(w, 20);
    run_for(w, 50);
    end(w);
    name(w, "20");
    save(w, 30);
    remove_iteration(w, 20);
    remove_iteration(w, 5);
    begin(w);
    mb_tracker_look(w->t, 0);
    assert_sealed(w, 1, (int64_t[]){30});
    assert_true(w->n_lost == 1 && w->lost[0] == 20);
    save(w, 40); /* all that follows between two looks */
    save(w, 50);
    remove_iteration(w, 40);
    run_until(w, 2);
    assert_sealed(w, 2, (int64_t[]){30, 50});
    assert_true(w->n_lost == 2 && w->lost[1] == 40);
    end(w);
    begin(w);
    mb_tracker_look(w->t, 1);
    assert_true(w->n_sealed == 2 && w->n_lost == 2);
}

/* It holds up what is newer for a while only. */
static void test_passed_and_unreadable(void **state)
{
    struct world *w = *state;
    char path[400];
    int n = 0;

    assert_int_equal(mb_fs_mkdir_p(w->dir, 0755, NULL), 0);
    begin(w);
    save(w, 10);
    path_of(w, 20, path);
    strcat(path, "/1/2/3/4/5/6/7/8/9"); /* deeper than a walk goes */
    assert_int_equal(mb_fs_mkdir_p(path, 0755, NULL), 0);
    save(w, 30);
    mb_tracker_look(w->t, 0);
    assert_sealed(w, 1, (int64_t[]){10});
    assert_int_equal(w->n_lost, 0);
    for (; w->n_sealed < 2; n++)
        mb_tracker_look(w->t, 0);
    assert_int_equal(n, 19);
    assert_sealed(w, 2, (int64_t[]){10, 30});
    assert_true(w->n_lost == 1 && w->lost[0] == 20);
}

/* What the tracker names last and nobody finds is lost when nobody is left to write it. */
static void test_named_and_not_there(void **state)
{
    struct world *w = *state;
    char path[400];

    begin(w);
    assert_int_equal(mb_fs_mkdir_p(w->dir, 0755, NULL), 0);
    add_iteration(w, 10);
    path_of(w, 20, path); /* empty */
    assert_int_equal(mb_fs_mkdir_p(path, 0755, NULL), 0);
    name(w, "30");
    mb_tracker_look(w->t, 0);
    assert_true(w->n_sealed == 0 && w->n_lost == 0);
    mb_tracker_look(w->t, 1);
    assert_int_equal(w->n_sealed, 0); /* nothing says that the first one is whole */
    assert_true(w->n_lost == 3 && w->lost[0] == 10 && w->lost[1] == 20 && w->lost[2] == 30);
    mb_tracker_look(w->t, 1);
    assert_true(w->n_sealed == 0 && w->n_lost == 3);
}

/* The trainer was restarted within the attempt, amid a save, and did not come to its number again:
 * nothing is taken but what has all files that the named one has, and no others. */
static void test_passed_and_half_written(void **state)
{
    struct world *w = *state;

    assert_int_equal(mb_fs_mkdir_p(w->dir, 0755, NULL), 0);
    begin(w);
    add_file(w, 100, ".metadata");
    save(w, 100);
    mb_tracker_look(w->t, 0);
    add_iteration(w, 120);
    add_file(w, 130, ".metadata");
    add_iteration(w, 130);
    add_file(w, 140, ".metadata");
    add_file(w, 140, "model.bin"); /* as many, with another name */
    add_file(w, 145, ".metadata");
    add_file(w, 145, "model.pt.tmp");
    add_iteration(w, 145);
    add_file(w, 150, ".metadata");
    save(w, 150);
    mb_tracker_look(w->t, 0);
    assert_sealed(w, 3, (int64_t[]){100, 130, 150});
    assert_int_equal(w->n_lost, 3);
    assert_memory_equal(w->lost, ((int64_t[]){120, 140, 145}), 3 * sizeof(int64_t));
    mb_tracker_look(w->t, 1);
    assert_true(w->n_sealed == 3 && w->n_lost == 3);
}

/* Trainers that put the iteration's number into the names of the files, and ranks that are called
 * as an iteration. */
static void test_passed_with_numbered_files(void **state)
{
    struct world *w = *state;
    char file[64];

    assert_int_equal(mb_fs_mkdir_p(w->dir, 0755, NULL), 0);
    begin(w);
    for (int64_t i = 1; i <= 4; i++) {
        snprintf(file, sizeof(file), "model_%07lld.pt", (long long)i * 100);
        add_file(w, i * 100, file);
        snprintf(file, sizeof(file), "step%lld-rank1.pt", (long long)i * 100);
        add_file(w, i * 100, i == 3 ? "step100-rank1.pt" : file);
    }
    name(w, "400");
    mb_tracker_look(w->t, 0);
    assert_sealed(w, 3, (int64_t[]){100, 200, 400});
    assert_true(w->n_lost == 1 && w->lost[0] == 300); /* another one's file */
    add_file(w, 401, "rank_401.pt");
    add_file(w, 402, "rank_401.pt");
    name(w, "402");
    mb_tracker_look(w->t, 0);
    assert_sealed(w, 5, (int64_t[]){100, 200, 400, 401, 402});
    assert_int_equal(w->n_lost, 1);
}

/* Those that are remembered have their turn: none is passed over in silence. */
static void test_last_look_without_a_list(void **state)
{
    struct world *w = *state;

    assert_int_equal(mb_fs_mkdir_p(w->dir, 0755, NULL), 0);
    add_iteration(w, 10); /* of an earlier attempt, gone meanwhile */
    add_iteration(w, 20); /* the same, and as it was */
    begin(w);
    for (int64_t i = 30; i <= 60; i += 10)
        add_iteration(w, i);
    run_for(w, 50); /* inotify has told of them */
    remove_iteration(w, 10);
    remove_iteration(w, 40);
    add_file(w, 50, "model.pt.tmp");
    end(w);
    name(w, "60");
    begin(w);
    cannot_list = 1;
    mb_tracker_look(w->t, 0);
    assert_true(w->n_sealed == 0 && w->n_lost == 0); /* there will be another look */
    mb_tracker_look(w->t, 1);
    assert_sealed(w, 2, (int64_t[]){30, 60});
    assert_true(w->n_lost == 2 && w->lost[0] == 40 && w->lost[1] == 50);
    cannot_list = 0;
    mb_tracker_look(w->t, 1);
    assert_true(w->n_sealed == 2 && w->n_lost == 2);
}

/* Back to an older iteration: what is beyond it was there before, until it is saved again. */
static void test_back(void **state)
{
    struct world *w = *state;

    assert_int_equal(mb_fs_mkdir_p(w->dir, 0755, NULL), 0);
    begin(w);
    save_each(w, 10, 40);
    mb_tracker_look(w->t, 0);
    save(w, 15);
    mb_tracker_look(w->t, 0);
    end(w);
    add_iteration(w, 30);
    save(w, 45);
    begin(w);
    mb_tracker_look(w->t, 0);
    assert_sealed(w, 7, (int64_t[]){10, 20, 30, 40, 15, 30, 45});
    assert_int_equal(w->n_lost, 0);
}

/* As a version before wrote it: what is there now was there before. Anything else is damage. */
static void test_state_file(void **state)
{
    static const char *const damaged[] = {"",
                                          "10",
                                          "x\n",
                                          "10 \ndirs 0\n",
                                          "10 ff x\ndirs 0\n",
                                          "10\ndirs 1\n",
                                          "10\ndirs 1\nold 20\n",
                                          "10\ndirs 0\nnew 20\n",
                                          "none\ndirs x\n"};
    struct world *w = *state;
    struct mb_err err;

    assert_int_equal(mb_fs_mkdir_p(w->dir, 0755, NULL), 0);
    add_iteration(w, 20);
    assert_int_equal(mb_fs_write_atomic(w->state, "10\n", 3, 0644, NULL), 0);
    begin(w);
    add_iteration(w, 30);
    save(w, 40);
    mb_tracker_look(w->t, 0);
    assert_sealed(w, 2, (int64_t[]){30, 40});
    end(w);
    for (size_t i = 0; i < sizeof(damaged) / sizeof(*damaged); i++) {
        assert_int_equal(mb_fs_write_atomic(w->state, damaged[i], strlen(damaged[i]), 0644, NULL),
                         0);
        assert_int_equal(mb_tracker_start(&w->loop, w->dir, w->state, &ops, w, &w->t, &err),
                         MB_ECORRUPT);
        assert_non_null(strstr(err.text, w->state));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_closed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_half_written, setup, teardown),
        cmocka_unit_test_setup_teardown(test_looked_at, setup, teardown),
        cmocka_unit_test_setup_teardown(test_known, setup, teardown),
        cmocka_unit_test_setup_teardown(test_known_and_saved_again, setup, teardown),
        cmocka_unit_test_setup_teardown(test_passed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_passed_while_away, setup, teardown),
        cmocka_unit_test_setup_teardown(test_passed_old, setup, teardown),
        cmocka_unit_test_setup_teardown(test_passed_and_gone, setup, teardown),
        cmocka_unit_test_setup_teardown(test_passed_and_unreadable, setup, teardown),
        cmocka_unit_test_setup_teardown(test_named_and_not_there, setup, teardown),
        cmocka_unit_test_setup_teardown(test_passed_and_half_written, setup, teardown),
        cmocka_unit_test_setup_teardown(test_passed_with_numbered_files, setup, teardown),
        cmocka_unit_test_setup_teardown(test_last_look_without_a_list, setup, teardown),
        cmocka_unit_test_setup_teardown(test_back, setup, teardown),
        cmocka_unit_test_setup_teardown(test_state_file, setup, teardown)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
