/* The SQLite store: what is acknowledged is there after a kill, what fails is undone. */
#include "loop.h"
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "gcs/store.h"

struct fixture {
    uv_loop_t loop;
    char dir[64];
    char path[96];
    struct mb_tables *s;
};

static int setup(void **state)
{
    static struct fixture f;

    memset(&f, 0, sizeof f);
    strcpy(f.dir, "/tmp/mb-store-XXXXXX");
    assert_non_null(mkdtemp(f.dir));
    snprintf(f.path, sizeof f.path, "%s/head.db", f.dir);
    uv_loop_init(&f.loop);
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;

    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&f->loop), 0);
    return mb_fs_remove_tree(f->dir, NULL);
}

static void set_flag(void *arg)
{
    *(int *)arg = 1;
}

static void on_done(void *arg, const struct mb_err *err)
{
    *(int *)arg = err->code == 0 ? 1 : -1;
}

static void open_store(struct fixture *f)
{
    struct mb_err err = {0};

    if (mb_tables_open_sqlite(&f->loop, f->path, 0, &f->s, &err) != 0)
        fail_msg("%s", err.text);
}

static void close_store(struct fixture *f)
{
    int closed = 0;

    mb_tables_close(f->s, set_flag, &closed);
    loop_until(&f->loop, &closed);
}

static struct mb_blob b(const char *s)
{
    return mb_blob_str(s);
}

static void put(struct fixture *f, const char *ns, const char *k, const char *v)
{
    struct mb_err err = {0};
    int done = 0;

    assert_int_equal(mb_tables_put(f->s, MB_TABLES_KV, b(ns), b(k), b(v), on_done, &done, &err), 0);
    loop_until(&f->loop, &done);
    assert_int_equal(done, 1);
}

static const char *get(struct fixture *f, const char *ns, const char *k)
{
    struct mb_blob v;

    return mb_tables_get(f->s, MB_TABLES_KV, b(ns), b(k), &v) ? v.p : NULL;
}

static int count_one(void *arg, struct mb_blob key, struct mb_blob value)
{
    (void)key;
    (void)value;
    ++*(int *)arg;
    return 0;
}

static void values_survive_a_reopen(void **state)
{
    struct fixture *f = *state;
    int n = 0, done = 0;

    open_store(f);
    put(f, "a", "k1", "v1");
    put(f, "a", "k2", "v2");
    put(f, "ab", "k1", "other");
    put(f, "a", "k1", "newer");
    assert_string_equal(get(f, "a", "k1"), "newer");
    assert_int_equal(mb_tables_del(f->s, MB_TABLES_KV, b("a"), b("k2"), on_done, &done, NULL), 0);
    assert_null(get(f, "a", "k2"));
    loop_until(&f->loop, &done);
    close_store(f);
    open_store(f);
    assert_string_equal(get(f, "a", "k1"), "newer");
    assert_null(get(f, "a", "k2"));
    assert_string_equal(get(f, "ab", "k1"), "other");
    mb_tables_each(f->s, MB_TABLES_KV, b("a"), b("k"), count_one, &n);
    assert_int_equal(n, 1);
    close_store(f);
}

static void keys_are_bytes_and_tables_are_apart(void **state)
{
    struct fixture *f = *state;
    int done = 0;
    struct mb_blob key = {"a\0b", 3}, v;

    open_store(f);
    assert_int_equal(mb_tables_put(f->s, MB_TABLES_NODES, b(""), key, b(""), on_done, &done, NULL),
                     0);
    loop_until(&f->loop, &done);
    close_store(f);
    open_store(f);
    assert_true(mb_tables_get(f->s, MB_TABLES_NODES, b(""), key, &v));
    assert_int_equal(v.n, 0);
    assert_false(mb_tables_get(f->s, MB_TABLES_NODES, b(""), b("a"), NULL));
    assert_false(mb_tables_get(f->s, MB_TABLES_JOBS, b(""), key, NULL));
    close_store(f);
}

/* A child writes and tells each acknowledgement; it is killed; all that it told must be there. */
static void write_until_killed(const char *path, int fd)
{
    struct fixture f = {0};

    snprintf(f.path, sizeof f.path, "%s", path);
    uv_loop_init(&f.loop);
    open_store(&f);
    for (int i = 0;; i++) {
        char key[16];
        snprintf(key, sizeof key, "%d", i);
        put(&f, "n", key, "v");
        if (write(fd, &i, sizeof i) != sizeof i)
            _exit(1);
    }
}

static void acknowledged_writes_survive_sigkill(void **state)
{
    struct fixture *f = *state;
    int fds[2], last = -1, i, status;

    assert_int_equal(pipe(fds), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        write_until_killed(f->path, fds[1]);
    close(fds[1]);
    while (last < 200 && read(fds[0], &i, sizeof i) == sizeof i)
        last = i;
    kill(pid, SIGKILL);
    while (read(fds[0], &i, sizeof i) == sizeof i)
        last = i;
    close(fds[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    open_store(f);
    for (i = 0; i <= last; i++) {
        char key[16];
        snprintf(key, sizeof key, "%d", i);
        assert_non_null(get(f, "n", key));
    }
    close_store(f);
}

static void a_damaged_file_is_named_and_left_alone(void **state)
{
    struct fixture *f = *state;
    struct mb_err err = {0};
    struct mb_buf after = {0};
    struct mb_tables *s;

    assert_int_equal(
        mb_fs_write_atomic(f->path, "this is no database, it is a text", 33, 0600, &err), 0);
    assert_int_equal(mb_tables_open_sqlite(&f->loop, f->path, 0, &s, &err), MB_ECORRUPT);
    assert_non_null(strstr(err.text, f->path));
    assert_int_equal(mb_fs_read(f->path, 100, &after, NULL), 0);
    assert_string_equal(mb_buf_str(&after), "this is no database, it is a text");
    mb_buf_close(&after);
}

static void torn_pages_are_found(void **state)
{
    struct fixture *f = *state;
    struct mb_err err = {0};
    struct mb_tables *s;
    char big[4096];

    open_store(f);
    memset(big, 'x', sizeof big - 1);
    big[sizeof big - 1] = '\0';
    for (int i = 0; i < 20; i++) {
        char key[16];
        snprintf(key, sizeof key, "%d", i);
        put(f, "n", key, big);
    }
    close_store(f);
    FILE *file = fopen(f->path, "r+b");
    assert_non_null(file);
    memset(big, 0xa5, sizeof big);
    for (long page = 2; page < 6; page++) {
        fseek(file, page * 4096, SEEK_SET);
        fwrite(big, 1, sizeof big, file);
    }
    fclose(file);
    assert_int_equal(mb_tables_open_sqlite(&f->loop, f->path, 0, &s, &err), MB_ECORRUPT);
}

static void a_second_head_is_refused(void **state)
{
    struct fixture *f = *state;
    struct mb_err err = {0};
    struct mb_tables *second;

    open_store(f);
    assert_int_equal(mb_tables_open_sqlite(&f->loop, f->path, 0, &second, &err), MB_EEXIST);
    close_store(f);
}

/* The disk takes no more: what is not committed is undone, newest first, and later it works again.
 */
static void a_full_disk_undoes_what_it_cannot_keep(void **state)
{
    struct fixture *f = *state;
    struct rlimit old, tight;
    static char big[1 << 20];
    int done[4] = {0};

    open_store(f);
    put(f, "n", "k", "old");
    put(f, "n", "gone", "v");
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    tight = old;
    tight.rlim_cur = 65536; /* no file may grow beyond it: the write-ahead log cannot take big */
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &tight), 0);
    memset(big, 'x', sizeof big - 1);
    mb_tables_put(f->s, MB_TABLES_KV, b("n"), b("k"), b(big), on_done, &done[0], NULL);
    mb_tables_put(f->s, MB_TABLES_KV, b("n"), b("k"), b("newer"), on_done, &done[1], NULL);
    mb_tables_put(f->s, MB_TABLES_KV, b("n"), b("new"), b(big), on_done, &done[2], NULL);
    mb_tables_del(f->s, MB_TABLES_KV, b("n"), b("gone"), on_done, &done[3], NULL);
    for (int i = 0; i < 4; i++)
        loop_until(&f->loop, &done[i]);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(done[0], -1);
    /* A write that waited behind the failed batch fails with it, or came after it and succeeded. */
    assert_string_equal(get(f, "n", "k"), done[1] == 1 ? "newer" : "old");
    assert_true(done[2] == -1 && get(f, "n", "new") == NULL);
    assert_int_equal(get(f, "n", "gone") != NULL, done[3] == -1);
    put(f, "n", "k", "later");
    close_store(f);
    open_store(f);
    assert_string_equal(get(f, "n", "k"), "later");
    assert_null(get(f, "n", "new"));
    assert_int_equal(get(f, "n", "gone") != NULL, done[3] == -1);
    close_store(f);
}

static void close_commits_what_waits(void **state)
{
    struct fixture *f = *state;

    open_store(f);
    static int done[500];
    for (int i = 0; i < 500; i++) {
        char key[16];
        snprintf(key, sizeof key, "%d", i);
        assert_int_equal(
            mb_tables_put(f->s, MB_TABLES_KV, b("n"), b(key), b("v"), on_done, &done[i], NULL), 0);
    }
    close_store(f);
    for (int i = 0; i < 500; i++)
        assert_int_equal(done[i], 1);
    open_store(f);
    assert_int_equal(mb_tables_count(f->s, MB_TABLES_KV), 500);
    close_store(f);
}

static void running_out_of_memory_changes_nothing(void **state)
{
    struct fixture *f = *state;
    struct mb_err err = {0};
    int done = 0;

    open_store(f);
    put(f, "n", "k", "old");
    for (unsigned long nth = 1;; nth++) {
        mb_alloc_fail_nth(nth);
        int rc = mb_tables_put(f->s, MB_TABLES_KV, b("n"), b("k"), b("new"), on_done, &done, &err);
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (!failed) {
            assert_int_equal(rc, 0);
            break;
        }
        assert_int_equal(rc, MB_ENOMEM);
        assert_string_equal(get(f, "n", "k"), "old");
    }
    loop_until(&f->loop, &done);
    close_store(f);
    for (unsigned long nth = 1;; nth++) {
        mb_alloc_fail_nth(nth);
        int rc = mb_tables_open_sqlite(&f->loop, f->path, 0, &f->s, &err);
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (!failed) {
            assert_int_equal(rc, 0);
            break;
        }
        assert_int_equal(rc, MB_ENOMEM);
    }
    close_store(f);
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(values_survive_a_reopen),
        T(keys_are_bytes_and_tables_are_apart),
        T(acknowledged_writes_survive_sigkill),
        T(a_damaged_file_is_named_and_left_alone),
        T(torn_pages_are_found),
        T(a_second_head_is_refused),
        T(a_full_disk_undoes_what_it_cannot_keep),
        T(close_commits_what_waits),
        T(running_out_of_memory_changes_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
