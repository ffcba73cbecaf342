/* The pure parts of push, ls and rm: what a directory has to push, what a journal says of it, what
 * a listing and a manifest make of an iteration, which iterations are old. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <uv.h>
#include "agent/upload/inventory.h"
#include "agent/upload/pull_lock.h"
#include "agent/upload/push_journal.h"
#include "agent/upload/push_source.h"
#include "agent/upload/remove.h"
#include "agent/upload/walk.h"
#include "base/alloc.h"
#include "base/fs.h"

static char dir[64];

static int make_dir(void **state)
{
    (void)state;
    snprintf(dir, sizeof(dir), "/tmp/mobula-push-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int remove_dir(void **state)
{
    (void)state;
    return mb_fs_remove_tree(dir, NULL);
}

static void put(const char *name, const char *text)
{
    char *path = mb_path_join(dir, name);
    char *slash = strrchr(path, '/');

    *slash = '\0';
    assert_int_equal(mb_fs_mkdir_p(path, 0755, NULL), 0);
    *slash = '/';
    assert_int_equal(mb_fs_write_atomic(path, text, strlen(text), 0644, NULL), 0);
    mb_free(path);
}

static int read_source(int64_t iteration, int is_plain, struct mb_push_source *s,
                       struct mb_err *err)
{
    mb_err_clear(err);
    return mb_push_source_read(dir, iteration, is_plain, s, err);
}

static void test_source(void **state)
{
    struct mb_push_source s;
    struct mb_err err = {0};

    (void)state;
    assert_int_equal(read_source(-1, 0, &s, &err), MB_ENOENT);
    put("iter_0000005/b", "22");
    put("iter_0000005/a/c", "1");
    put("iter_0000005/.mobula-push-x.journal", "no file of the checkpoint");
    assert_int_equal(read_source(-1, 0, &s, &err), 0); /* no tracker: plain */
    assert_int_equal(s.iteration, -1);
    assert_string_equal(s.files[0].path, "iter_0000005/a/c");
    mb_push_source_close(&s);
    put("latest_checkpointed_iteration.txt", "5\n");
    assert_int_equal(read_source(-1, 0, &s, &err), 0);
    assert_int_equal(s.iteration, 5);
    assert_int_equal(s.n_files, 2);
    assert_int_equal(s.total_bytes, 3);
    assert_non_null(mb_push_source_find(&s, "a/c"));
    assert_null(mb_push_source_find(&s, "a"));
    mb_push_source_close(&s);
    assert_int_equal(read_source(-1, 1, &s, &err), 0);
    assert_int_equal(s.n_files, 3);
    assert_true(mb_push_source_find(&s, "latest_checkpointed_iteration.txt")->is_last);
    mb_push_source_close(&s);
    assert_int_equal(read_source(6, 0, &s, &err), MB_ENOENT);
    put("iter_0000005/state.json", "{\"data_parallel_size\": 1}");
    assert_int_equal(read_source(-1, 0, &s, &err), MB_ENOENT);
    put("iter_0000005/model_tp00_pp00.safetensors", "m");
    put("iter_0000005/optim_dp_000_of_001.safetensors", "o");
    assert_int_equal(read_source(-1, 0, &s, &err), 0);
    mb_push_source_close(&s);
}

/* Each allocation fails once: an error, and nothing leaks. */
static void test_source_without_memory(void **state)
{
    struct mb_push_source s;
    struct mb_err err = {0};

    (void)state;
    put("iter_0000005/b", "22");
    put("latest_checkpointed_iteration.txt", "5");
    for (unsigned long nth = 1;; nth++) {
        mb_alloc_fail_nth(nth);
        int rc = read_source(-1, 0, &s, &err);
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (rc == 0)
            mb_push_source_close(&s);
        if (!failed) {
            assert_int_equal(rc, 0);
            break;
        }
    }
}

static int open_journal(struct mb_push_source *s, struct mb_push_journal **j, struct mb_err *err)
{
    mb_err_clear(err);
    return mb_push_journal_open(dir, "s3://bucket/x", s, j, err);
}

static void test_journal(void **state)
{
    struct mb_push_source s;
    struct mb_push_journal *j, *other;
    struct mb_push_file *b;
    struct mb_err err = {0};
    char writer[40];
    size_t n;

    (void)state;
    put("iter_0000005/b", "22");
    put("iter_0000005/c", "333");
    put("iter_0000005/d", "4444");
    put("latest_checkpointed_iteration.txt", "5");
    assert_int_equal(read_source(-1, 0, &s, &err), 0);
    assert_int_equal(open_journal(&s, &j, &err), 0);
    assert_int_equal(open_journal(&s, &other, &err), MB_ESTATE); /* locked */
    snprintf(writer, sizeof(writer), "%s", mb_push_journal_writer(j));
    b = mb_push_source_find(&s, "b");
    b->crc64nvme = 7;
    assert_int_equal(mb_push_journal_done(j, b, "\"etag\"", &err), 0);
    assert_int_equal(mb_push_journal_intent(j, &s.files[1], &err), 0);
    assert_int_equal(mb_push_journal_begin(j, &s.files[1], "id-c", &err), 0);
    assert_int_equal(mb_push_journal_begin(j, &s.files[2], "id-d", &err), 0);
    mb_push_journal_close(j, 1);
    mb_push_source_close(&s);

    put("iter_0000005/c", "changed");
    {
        char *path = mb_path_join(dir, "iter_0000005/d");

        assert_int_equal(unlink(path), 0);
        mb_free(path);
    }
    assert_int_equal(read_source(-1, 0, &s, &err), 0);
    assert_int_equal(open_journal(&s, &j, &err), 0);
    assert_string_equal(mb_push_journal_writer(j), writer);
    b = mb_push_source_find(&s, "b");
    assert_true(b->was_done && b->crc64nvme == 7);
    assert_string_equal(b->done_etag, "\"etag\"");
    assert_string_equal(mb_push_source_find(&s, "c")->stale_id, "id-c");
    assert_null(mb_push_source_find(&s, "c")->upload_id);
    assert_string_equal(mb_push_journal_orphans(j, &n)->upload_id, "id-d");
    assert_int_equal(n, 1);
    assert_int_equal(mb_push_journal_gone(j, "d", &err), 0);
    mb_push_journal_close(j, 1);
    mb_push_source_close(&s);

    assert_int_equal(read_source(-1, 0, &s, &err), 0);
    assert_int_equal(open_journal(&s, &j, &err), 0);
    mb_push_journal_orphans(j, &n);
    assert_int_equal(n, 0);
    char *path = mb_strdup(mb_push_journal_path(j));
    mb_push_journal_close(j, 0);
    assert_false(mb_fs_exists(path));
    mb_free(path);
    mb_push_source_close(&s);
}

/* ---- ls and rm ---- */

static void add_keys(struct mb_inventory *inv, const char *const *keys, size_t n)
{
    inv->keys = mb_calloc(n, sizeof(*inv->keys));
    for (size_t i = 0; i < n; i++)
        inv->keys[inv->n_keys++] = (struct mb_inventory_key){mb_strdup(keys[i]), 3};
    assert_int_equal(mb_inventory_group(inv), 0);
}

static void test_inventory(void **state)
{
    static const char *const keys[] = {"iter_0000005/.mobula/manifest.json",
                                       "iter_0000005/a",
                                       "iter_0000005/b",
                                       "iter_0000006/a",
                                       "iter_10000000/x",
                                       "iter_7/x",
                                       "iter_x/y",
                                       "latest_checkpointed_iteration.txt"};
    static const char whole[] =
        "{\"version\":1,\"iteration\":5,\"node_rank\":-1,\"num_nodes\":1,"
        "\"job_id\":\"j\",\"placement_group_id\":\"\",\"attempt\":2,\"files\":["
        "{\"path\":\"a\",\"size\":3,\"crc64nvme\":\"0000000000000001\"},"
        "{\"path\":\"%s\",\"size\":%d,\"crc64nvme\":\"0000000000000001\"}]}";
    struct mb_inventory inv = {0};
    struct mb_inventory_iteration *it;
    char text[600];

    (void)state;
    add_keys(&inv, keys, 8);
    assert_int_equal(inv.n, 3);
    assert_int_equal(inv.iterations[2].iteration, 10000000);
    it = mb_inventory_find(&inv, 5);
    assert_int_equal(it->n_keys, 3);
    assert_int_equal(it->stored_bytes, 9);
    snprintf(text, sizeof(text), whole, "b", 3);
    assert_int_equal(mb_inventory_judge(it, text, strlen(text)), 0);
    assert_int_equal(it->state, MB_INVENTORY_WHOLE);
    assert_int_equal(it->total_bytes, 6);
    mb_inventory_close(&inv);
    for (int i = 0; i < 3; i++) {
        add_keys(&inv, keys, 8);
        it = mb_inventory_find(&inv, 5);
        snprintf(text, sizeof(text), i == 2 ? "rubbish" : whole, i == 0 ? "c" : "b",
                 i == 0 ? 3 : 4);
        assert_int_equal(mb_inventory_judge(it, text, strlen(text)), 0);
        assert_int_equal(it->state, MB_INVENTORY_DAMAGED);
        assert_string_equal(i == 2 ? "" : it->bad, i == 0   ? "c is not there"
                                                   : i == 1 ? "b has another size"
                                                            : "");
        assert_int_equal(mb_inventory_judge(mb_inventory_find(&inv, 6), NULL, 0), 0);
        assert_int_equal(mb_inventory_find(&inv, 6)->state, MB_INVENTORY_UNFINISHED);
        mb_inventory_close(&inv);
    }
    assert_int_equal(mb_iteration_of_key("iter_0000005"), -1);
    assert_int_equal(mb_iteration_of_key("iter_00000005/x"), -1);
    assert_int_equal(mb_iteration_of_key("iter_-000005/x"), -1);
    assert_int_equal(mb_iteration_of_key("iter_99999999999999999999999/x"), -1);
}

static void test_old(void **state)
{
    struct mb_inventory_iteration its[] = {{.iteration = 1, .state = MB_INVENTORY_UNFINISHED},
                                           {.iteration = 2, .state = MB_INVENTORY_WHOLE},
                                           {.iteration = 3, .state = MB_INVENTORY_WHOLE},
                                           {.iteration = 4, .state = MB_INVENTORY_DAMAGED},
                                           {.iteration = 5, .state = MB_INVENTORY_WHOLE},
                                           {.iteration = 6, .state = MB_INVENTORY_WHOLE},
                                           {.iteration = 7, .state = MB_INVENTORY_UNFINISHED}};
    struct mb_inventory inv = {.latest = 5, .iterations = its, .n = 7};
    static const int old_for_2[] = {1, 1, 0, 0, 0, 0, 0}, old_for_1[] = {1, 1, 1, 1, 0, 0, 0};

    (void)state;
    for (size_t i = 0; i < 7; i++) {
        assert_int_equal(mb_remove_is_old(&inv, &its[i], 2), old_for_2[i]);
        assert_int_equal(mb_remove_is_old(&inv, &its[i], 1), old_for_1[i]);
        assert_int_equal(mb_remove_is_old(&inv, &its[i], 9), 0);
    }
    inv.latest = -2;
    assert_int_equal(mb_remove_is_old(&inv, &its[0], 1), 0);
}

/* Only a directory that is not there has no files; one that cannot be read whole is an error. */
static void test_walk(void **state)
{
    struct mb_walk w;
    char path[128];

    (void)state;
    put("iter/sub/x", "1");
    snprintf(path, sizeof(path), "%s/nothing", dir);
    assert_int_equal(mb_walk_dir(path, &w), MB_ENOENT);
    snprintf(path, sizeof(path), "%s/round", dir);
    assert_int_equal(symlink("round", path), 0);
    assert_int_equal(mb_walk_dir(path, &w), MB_EIO);
    snprintf(path, sizeof(path), "%s/iter", dir);
    assert_int_equal(mb_walk_dir(path, &w), MB_OK);
    assert_int_equal(w.n, 1);
    mb_walk_close(&w);
    snprintf(path, sizeof(path), "%s/iter/sub/gone", dir);
    assert_int_equal(symlink("nowhere", path), 0);
    snprintf(path, sizeof(path), "%s/iter", dir);
    assert_int_equal(mb_walk_dir(path, &w), MB_ESTATE);
    assert_int_equal(w.n, 0);
}

struct entrance {
    atomic_int begins, ends;
    int fd;
};

static void enter(void *arg)
{
    struct entrance *e = arg;

    atomic_store(&e->begins, 1);
    e->fd = mb_pull_enter(dir, NULL, NULL);
    atomic_store(&e->ends, 1);
}

/* While one that came alone removes what the dead left, the next one waits, and has the lock then:
 * its temporary files would be removed with the others. */
static void test_pullers_begin_together(void **state)
{
    struct entrance e = {.fd = -1};
    char *path = mb_path_join(dir, ".mobula-pull.lock");
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    uv_thread_t thread;

    (void)state;
    assert_int_equal(flock(fd, LOCK_EX), 0);
    assert_int_equal(uv_thread_create(&thread, enter, &e), 0);
    while (!atomic_load(&e.begins))
        usleep(1000);
    usleep(100000); /* long enough for a failure to show */
    assert_int_equal(atomic_load(&e.ends), 0);
    close(fd);
    uv_thread_join(&thread);
    assert_true(e.fd >= 0);
    mb_pull_leave(dir, e.fd);
    assert_int_equal(access(path, F_OK), -1);
    mb_free(path);
}

static int is_there(const char *name)
{
    char *path = mb_path_join(dir, name);
    int there = access(path, F_OK) == 0;

    mb_free(path);
    return there;
}

/* A puller that was killed between the rename of a big file and the end of its lock. */
static void test_what_a_dead_puller_left(void **state)
{
    char *path = mb_path_join(dir, "held.mobula-lock");
    int held, fd;

    (void)state;
    put("sub/big", "whole");
    put("sub/big.mobula-lock", "");
    put("sub/big.pull-17", "half");
    put("diary.mobula-lock", "a file of the checkpoint");
    put("held.mobula-lock", "");
    held = open(path, O_RDWR | O_CLOEXEC);
    assert_int_equal(flock(held, LOCK_EX), 0);
    fd = mb_pull_enter(dir, NULL, NULL);
    assert_true(fd >= 0);
    assert_false(is_there("sub/big.mobula-lock"));
    assert_false(is_there("sub/big.pull-17"));
    assert_true(is_there("sub/big"));
    assert_true(is_there("diary.mobula-lock"));
    assert_true(is_there("held.mobula-lock"));
    mb_pull_leave(dir, fd);
    close(held);
    mb_free(path);
}

static int keep_those(void *arg, const char *path)
{
    unsigned *n_asked = arg;

    ++*n_asked;
    return strcmp(path, "sub/own.pull-1") == 0;
}

/* The manifest is looked through for what may be a puller's only, not for each file of 100,000. */
static void test_names_of_a_checkpoint(void **state)
{
    unsigned n_asked = 0;
    int fd;

    (void)state;
    for (int i = 0; i < 20; i++) {
        char name[32];
        snprintf(name, sizeof name, "sub/shard%d", i);
        put(name, "whole");
    }
    put("sub/own.pull-1", "a file of the checkpoint");
    put("sub/big.pull-17", "half");
    put("sub/big.mobula-lock", "");
    fd = mb_pull_enter(dir, keep_those, &n_asked);
    assert_true(fd >= 0);
    assert_true(is_there("sub/own.pull-1"));
    assert_true(is_there("sub/shard19"));
    assert_false(is_there("sub/big.pull-17"));
    assert_false(is_there("sub/big.mobula-lock"));
    assert_int_equal(n_asked, 3);
    mb_pull_leave(dir, fd);
}

/* One dies beside another that lives: who is the last one there removes what it left. */
static void test_what_a_neighbour_left(void **state)
{
    int fd = mb_pull_enter(dir, NULL, NULL), other = mb_pull_enter(dir, NULL, NULL);

    (void)state;
    assert_true(fd >= 0 && other >= 0);
    put("sub/big.mobula-lock", "");
    put("sub/big.pull-17", "half");
    put("sub/big", "whole");
    mb_pull_tidy(dir, fd, NULL, NULL);
    assert_true(is_there("sub/big.mobula-lock"));
    assert_true(is_there("sub/big.pull-17"));
    assert_true(mb_pull_is_entered(dir));
    close(other);
    mb_pull_tidy(dir, fd, NULL, NULL);
    assert_false(is_there("sub/big.mobula-lock"));
    assert_false(is_there("sub/big.pull-17"));
    assert_true(is_there("sub/big"));
    assert_true(mb_pull_is_entered(dir));
    mb_pull_leave(dir, fd);
    assert_false(is_there(".mobula-pull.lock"));
}

struct holder {
    char *path;
    atomic_int stops;
    int n_held, n_lost;
};

/* A puller without a lock of the directory: locks of its files keep their names while it has them.
 */
static void hold(void *arg)
{
    struct holder *h = arg;
    char *name = mb_asprintf("%s.mobula-lock", h->path);
    struct stat here, named;
    int fd;

    while (!atomic_load(&h->stops)) {
        if (mb_pull_file_turn(h->path, &fd) != MB_PULL_OURS)
            continue;
        h->n_held++;
        for (int i = 0; i < 20; i++)
            if (fstat(fd, &here) != 0 || stat(name, &named) != 0 || here.st_ino != named.st_ino) {
                h->n_lost++;
                break;
            }
        close(fd); /* killed: the lock's file stays */
    }
    mb_free(name);
}

static void test_no_lock_is_removed_that_is_held(void **state)
{
    struct holder h = {.path = mb_path_join(dir, "big")};
    uv_thread_t thread;

    (void)state;
    assert_int_equal(uv_thread_create(&thread, hold, &h), 0);
    for (int i = 0; i < 5000; i++)
        mb_pull_leave(dir, mb_pull_enter(dir, NULL, NULL));
    atomic_store(&h.stops, 1);
    uv_thread_join(&thread);
    assert_true(h.n_held > 100);
    assert_int_equal(h.n_lost, 0);
    mb_free(h.path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_source, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_source_without_memory, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_journal, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_walk, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_pullers_begin_together, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_what_a_dead_puller_left, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_names_of_a_checkpoint, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_what_a_neighbour_left, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_no_lock_is_removed_that_is_held, make_dir, remove_dir),
        cmocka_unit_test(test_inventory),
        cmocka_unit_test(test_old),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
