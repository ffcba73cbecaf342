/*
 * Which older iterations of a foreign trainer's directory go, on this node: uploaders over a
 * directory as the store.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>
#include "agent/upload/evict.h"
#include "agent/upload/manifest.h"
#include "agent/upload/walk.h"
#include "base/fs.h"
#include "nodes.h"

enum { DEADLINE_MS = 60000 };

static int setup(void **state)
{
    struct place *p = calloc(1, sizeof(*p));
    char store[100];

    place_open(p, "evict", DEADLINE_MS);
    snprintf(store, sizeof(store), "%s/store", p->dir);
    snprintf(p->url, sizeof(p->url), "file://%s", store);
    assert_int_equal(mb_fs_mkdir_p(store, 0755, NULL), 0);
    *state = p;
    return 0;
}

static int teardown(void **state)
{
    struct place *p = *state;

    if (!place_can_close(p))
        return 0;
    place_close(p);
    free(p);
    return 0;
}

/* ---- a foreign trainer ---- */

static void write_iteration(struct node *n, int64_t iteration)
{
    char path[400];

    node_iteration_dir(n, iteration, path, sizeof(path) - 16);
    strcat(path, "/model.pt");
    assert_int_equal(mb_fs_write_atomic(path, "xyz", 3, 0644, NULL), 0);
}

/* Saved as Megatron does, and taken by the uploader. */
static void save(struct node *n, int64_t iteration)
{
    char dir[200], path[300], text[32];

    write_iteration(n, iteration);
    node_dir(n, dir, sizeof(dir));
    snprintf(path, sizeof(path), "%s/" MB_LATEST_KEY, dir);
    snprintf(text, sizeof(text), "%d", (int)iteration);
    assert_int_equal(mb_fs_write_atomic(path, text, strlen(text), 0644, NULL), 0);
    mb_upload_look(n->u);
}

static void save_durably(struct node *n, int64_t iteration)
{
    struct node *one[] = {n};

    save(n, iteration);
    run_until_idle(n->at, one, 1);
    assert_true(has(n->committed, n->n_committed, iteration));
}

static void path_in(const struct node *n, int64_t iteration, const char *file, char out[300])
{
    char dir[200], name[MB_CHECKPOINT_KEY_MAX];

    node_dir(n, dir, sizeof(dir));
    snprintf(out, 300, "%s/%.40s/%.40s", dir, mb_iteration_dir(iteration, name), file);
}

static int is_here(const struct node *n, int64_t iteration)
{
    char path[300];

    path_in(n, iteration, "model.pt", path);
    return mb_fs_exists(path);
}

/* "10 20": those of 10, 20, ... 90 that are on this node. */
static const char *here(const struct node *n)
{
    static char text[60];

    text[0] = '\0';
    for (int64_t i = 10; i < 100; i += 10)
        if (is_here(n, i))
            snprintf(text + strlen(text), sizeof(text) - strlen(text), "%s%d", text[0] ? " " : "",
                     (int)i);
    return text;
}

static struct node a_node(struct place *p, uint32_t keep)
{
    return (struct node){
        .at = p, .gang = "aa", .attempt = 1, .num_nodes = 1, .watches = 1, .local_keep_last = keep};
}

/* ---- which go ---- */

static void test_off_unless_asked(void **state)
{
    struct node a = a_node(*state, 0);

    node_launch(&a);
    for (int64_t i = 10; i <= 40; i += 10)
        save_durably(&a, i);
    assert_string_equal(here(&a), "10 20 30 40");
    node_close(&a);
}

static void test_the_last_k_stay(void **state)
{
    struct node a = a_node(*state, 2);
    char path[300];

    node_launch(&a);
    for (int64_t i = 10; i <= 40; i += 10)
        save_durably(&a, i);
    assert_string_equal(here(&a), "30 40");
    path_in(&a, 10, "", path);
    assert_false(mb_fs_exists(path));
    write_iteration(&a, 60); /* being written: later than what is sealed */
    save_durably(&a, 50);
    assert_string_equal(here(&a), "40 50 60");
    node_close(&a);
}

/* The trainer goes on while the store is slow to take its checkpoints: nothing counts that is not
 * there. */
static void test_what_is_not_durable_stays(void **state)
{
    struct node a = a_node(*state, 1);
    struct node *one[] = {&a};

    node_launch(&a);
    save_durably(&a, 10);
    a.num_nodes = 2; /* from now on a part is missing that never comes */
    node_close(&a);
    node_open(&a);
    for (int64_t i = 20; i <= 30; i += 10)
        save(&a, i);
    run_for(a.at, 1500);
    assert_string_equal(here(&a), "10 20 30");
    mb_upload_abandon(a.u, 0);
    run_until_idle(a.at, one, 1);
    node_close(&a);
    a.num_nodes = 1;
    node_open(&a);
    save_durably(&a, 40);
    assert_string_equal(here(&a), "20 30 40"); /* 20 and 30 were given up: only here */
    node_close(&a);
}

/* An attempt looks after what those before it left; a manifest in the store is the proof. */
static void test_of_earlier_attempts(void **state)
{
    struct node a = a_node(*state, 2), b;

    a.local_keep_last = 0;
    node_launch(&a);
    for (int64_t i = 10; i <= 30; i += 10)
        save_durably(&a, i);
    write_iteration(&a, 25); /* never sealed */
    b = a;
    b.local_keep_last = 2;
    node_close(&a);
    b.n_committed = 0;
    node_open(&b);
    save_durably(&b, 40);
    assert_string_equal(here(&b), "30 40");
    assert_true(is_here(&b, 25));
    node_close(&b);
}

/* What the store gave up for --checkpoint-keep-last was durable: it may go here, too, if this
 * attempt committed it. What lies there besides, nobody can tell whether it was ever in this store.
 */
static void test_with_retention_in_the_store(void **state)
{
    struct node a = a_node(*state, 3), b = a_node(*state, 3);

    a.keep_last = b.keep_last = 1;
    node_launch(&a);
    for (int64_t i = 10; i <= 50; i += 10)
        save_durably(&a, i);
    assert_string_equal(here(&a), "30 40 50");
    node_close(&a);
    b.attempt = 2;
    for (int64_t i = 10; i <= 30; i += 10)
        write_iteration(&b, i);
    node_launch(&b);
    for (int64_t i = 60; i <= 90; i += 10)
        save_durably(&b, i);
    assert_string_equal(here(&b), "10 20 30 70 80 90");
    node_close(&b);
}

/* By this attempt, and so it is the only copy. */
static void test_what_was_given_up_stays(void **state)
{
    struct node a = a_node(*state, 1);

    a.keep_last = 1;
    node_launch(&a);
    write_iteration(&a, 20);
    mb_upload_given_up(a.u, 20, "node 1 has given it up");
    for (int64_t i = 30; i <= 50; i += 10)
        save_durably(&a, i);
    assert_string_equal(here(&a), "20 50");
    node_close(&a);
}

/* The tracker file names an older one: whoever set it back loads that. */
static void test_what_the_tracker_names_stays(void **state)
{
    struct node a = a_node(*state, 1);
    struct node *one[] = {&a};
    char dir[200], path[300];

    node_launch(&a);
    save_durably(&a, 10);
    save(&a, 20);
    node_dir(&a, dir, sizeof(dir));
    snprintf(path, sizeof(path), "%s/" MB_LATEST_KEY, dir);
    assert_int_equal(mb_fs_write_atomic(path, "10", 2, 0644, NULL), 0);
    run_until_idle(a.at, one, 1);
    assert_string_equal(here(&a), "10 20");
    node_close(&a);
}

/* ---- what is used ---- */

/* Another process, which has the file open until it is told to end. */
static pid_t reader_of(const char *path)
{
    int pipe_fds[2];
    char c;
    pid_t pid;

    assert_int_equal(pipe(pipe_fds), 0);
    pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (open(path, O_RDONLY) < 0 || write(pipe_fds[1], "x", 1) != 1)
            _exit(1);
        pause();
        _exit(0);
    }
    close(pipe_fds[1]);
    assert_int_equal(read(pipe_fds[0], &c, 1), 1);
    close(pipe_fds[0]);
    return pid;
}

static void test_what_is_open_stays(void **state)
{
    struct node a = a_node(*state, 1);
    char path[300];
    pid_t pid;

    node_launch(&a);
    save_durably(&a, 10);
    path_in(&a, 10, "model.pt", path);
    pid = reader_of(path);
    save_durably(&a, 20);
    assert_string_equal(here(&a), "10 20");
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    save_durably(&a, 30);
    assert_string_equal(here(&a), "30");
    node_close(&a);
}

static void test_what_is_locked_stays(void **state)
{
    struct node a = a_node(*state, 1);
    char path[300];
    int fd;

    node_launch(&a);
    save_durably(&a, 10);
    path_in(&a, 10, "", path);
    fd = mb_evict_hold(path);
    assert_true(fd >= 0);
    save_durably(&a, 20);
    assert_string_equal(here(&a), "10 20");
    close(fd);
    save_durably(&a, 30);
    assert_string_equal(here(&a), "30");
    node_close(&a);
}

/* A file that the store does not have, or of another size. */
static void test_what_is_not_the_same_stays(void **state)
{
    struct node a = a_node(*state, 1);
    char path[300];

    node_launch(&a);
    save_durably(&a, 10);
    path_in(&a, 10, "notes.txt", path);
    assert_int_equal(mb_fs_write_atomic(path, "mine", 4, 0644, NULL), 0);
    save_durably(&a, 20);
    assert_string_equal(here(&a), "10 20");
    unlink(path);
    path_in(&a, 20, "model.pt", path);
    assert_int_equal(mb_fs_write_atomic(path, "longer", 6, 0644, NULL), 0);
    save_durably(&a, 30);
    assert_string_equal(here(&a), "20 30");
    node_close(&a);
}

static void write_others(const struct node *n, int64_t iteration)
{
    char path[300];

    path_in(n, iteration, "model.pt", path);
    assert_int_equal(mb_fs_write_atomic(path, "abc", 3, 0644, NULL), 0); /* of xyz' size */
}

/* Saved again, by this attempt or before it, and the store never got that. */
static void test_other_contents_stay(void **state)
{
    struct node a = a_node(*state, 0);

    node_launch(&a);
    for (int64_t i = 10; i <= 30; i += 10)
        save_durably(&a, i);
    write_others(&a, 10);
    node_close(&a);
    a.local_keep_last = 2;
    node_open(&a);
    save_durably(&a, 40);
    assert_string_equal(here(&a), "10 30 40");
    write_others(&a, 40);
    save_durably(&a, 50);
    save_durably(&a, 60);
    assert_string_equal(here(&a), "10 40 50 60");
    node_close(&a);
}

/* The same, after the store has given it up for --checkpoint-keep-last. */
static void test_other_contents_stay_with_retention(void **state)
{
    struct node a = a_node(*state, 2);

    a.keep_last = 1;
    node_launch(&a);
    save_durably(&a, 10);
    save_durably(&a, 20);
    write_others(&a, 10);
    save_durably(&a, 30);
    save_durably(&a, 40);
    assert_string_equal(here(&a), "10 30 40");
    node_close(&a);
}

/* A reader of the hidden directory, or another node that has not removed it yet: nothing but that
 * one stays. */
static void test_a_hidden_one_that_is_held(void **state)
{
    struct node a = a_node(*state, 1);
    char dir[200], hidden[300];
    int fd;

    node_launch(&a);
    node_dir(&a, dir, sizeof(dir));
    snprintf(hidden, sizeof(hidden), "%s/.mobula-evicted-iter_0000005", dir);
    assert_int_equal(mb_fs_mkdir_p(hidden, 0755, NULL), 0);
    fd = mb_evict_hold(hidden);
    assert_true(fd >= 0);
    save_durably(&a, 10);
    save_durably(&a, 20);
    assert_string_equal(here(&a), "20");
    assert_true(mb_fs_exists(hidden));
    close(fd);
    save_durably(&a, 30);
    assert_false(mb_fs_exists(hidden));
    node_close(&a);
}

/* Killed after the hidden name was given: the next one removes it. */
static void test_a_removal_that_was_killed(void **state)
{
    struct node a = a_node(*state, 1);
    char dir[200], hidden[300];

    node_launch(&a);
    node_dir(&a, dir, sizeof(dir));
    snprintf(hidden, sizeof(hidden), "%s/.mobula-evicted-iter_0000005", dir);
    assert_int_equal(mb_fs_mkdir_p(hidden, 0755, NULL), 0);
    save_durably(&a, 10);
    assert_false(mb_fs_exists(hidden));
    node_close(&a);
}

/* The tracker file is set back after the list was made, and the attempt ends meanwhile. */
static void test_the_last_look(void **state)
{
    struct node a = a_node(*state, 0);
    struct mb_evict_proof proof = {0};
    atomic_int stop = 1;
    char dir[200], path[300];
    struct mb_walk w;
    struct mb_err err;

    write_iteration(&a, 10);
    node_dir(&a, dir, sizeof(dir));
    snprintf(path, sizeof(path), "%s/" MB_LATEST_KEY, dir);
    assert_int_equal(mb_fs_write_atomic(path, "10", 2, 0644, NULL), 0);
    assert_int_equal(mb_evict(dir, 10, &proof, NULL, &err), MB_EEXIST); /* nothing is known of it */
    path_in(&a, 10, "", path);
    assert_int_equal(mb_walk_dir(path, &w), MB_OK);
    proof.state = mb_walk_state(&w);
    mb_walk_close(&w);
    assert_int_equal(mb_evict(dir, 10, &proof, NULL, &err), MB_ESTATE);
    assert_non_null(strstr(err.text, "the tracker file names it"));
    snprintf(path, sizeof(path), "%s/" MB_LATEST_KEY, dir);
    assert_int_equal(mb_fs_write_atomic(path, "20", 2, 0644, NULL), 0);
    assert_int_equal(mb_evict(dir, 10, &proof, &stop, &err), MB_ECANCELED);
    assert_true(is_here(&a, 10));
    atomic_store(&stop, 0);
    assert_int_equal(mb_evict(dir, 10, &proof, &stop, &err), MB_OK);
    assert_false(is_here(&a, 10));
}

/* Nobody waits for this attempt any more. */
static void test_not_after_the_end(void **state)
{
    struct node a = a_node(*state, 1);
    struct node *one[] = {&a};

    node_launch(&a);
    save_durably(&a, 10);
    save(&a, 20);
    mb_upload_no_more(a.u);
    mb_upload_release(a.u);
    run_until_idle(a.at, one, 1);
    assert_string_equal(here(&a), "10 20");
    node_close(&a);
}

/* The agent was started again after the ranks had ended: the directory may be another job's. */
static void test_not_by_who_adopts_the_ended(void **state)
{
    struct node a = a_node(*state, 0);
    struct node *one[] = {&a};

    node_launch(&a);
    save_durably(&a, 10);
    save_durably(&a, 20);
    a.local_keep_last = 1;
    node_adopt_ended(&a);
    run_until_idle(a.at, one, 1);
    assert_string_equal(here(&a), "10 20");
    node_close(&a);
}

/* Closed while a worker thread is at it. */
static void test_closed_meanwhile(void **state)
{
    struct node a = a_node(*state, 1);

    node_launch(&a);
    save_durably(&a, 10);
    save(&a, 20);
    RUN_UNTIL(a.at, has(a.committed, a.n_committed, 20));
    node_close(&a);
    assert_true(is_here(&a, 20));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_off_unless_asked, setup, teardown),
        cmocka_unit_test_setup_teardown(test_the_last_k_stay, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_is_not_durable_stays, setup, teardown),
        cmocka_unit_test_setup_teardown(test_of_earlier_attempts, setup, teardown),
        cmocka_unit_test_setup_teardown(test_with_retention_in_the_store, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_was_given_up_stays, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_the_tracker_names_stays, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_is_open_stays, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_is_locked_stays, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_is_not_the_same_stays, setup, teardown),
        cmocka_unit_test_setup_teardown(test_other_contents_stay, setup, teardown),
        cmocka_unit_test_setup_teardown(test_other_contents_stay_with_retention, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_hidden_one_that_is_held, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_removal_that_was_killed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_the_last_look, setup, teardown),
        cmocka_unit_test_setup_teardown(test_not_after_the_end, setup, teardown),
        cmocka_unit_test_setup_teardown(test_not_by_who_adopts_the_ended, setup, teardown),
        cmocka_unit_test_setup_teardown(test_closed_meanwhile, setup, teardown)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
