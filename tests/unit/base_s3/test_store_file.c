/* The file store: contents, conditions, listings, whole files, and kills in the middle of a write.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/loop.h"
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/fs.h"
#include "store_run.h"

struct world {
    uv_loop_t loop;
    char dir[64];
    struct store_run r;
};

static void world_open(struct world *w)
{
    char url[128];
    snprintf(w->dir, sizeof w->dir, "/tmp/mobula-store-XXXXXX");
    assert_non_null(mkdtemp(w->dir));
    uv_loop_init(&w->loop);
    snprintf(url, sizeof url, "file://%s/bucket/", w->dir);
    char *bucket = mb_path_join(w->dir, "bucket");
    assert_int_equal(mkdir(bucket, 0755), 0);
    mb_free(bucket);
    run_open(&w->r, &w->loop, url);
}

static void world_close(struct world *w)
{
    run_close(&w->r);
    assert_int_equal(uv_loop_close(&w->loop), 0);
    assert_int_equal(mb_fs_remove_tree(w->dir, NULL), 0);
}

static void test_put_get_delete(void **state)
{
    struct world w;
    (void)state;
    world_open(&w);
    assert_int_equal(run_put(&w.r, "iter_0000010/a b+c=d:e@f\xc3\xa9", "hello", 0, NULL), 0);
    assert_int_equal(run_get(&w.r, "iter_0000010/a b+c=d:e@f\xc3\xa9", 100), 0);
    assert_string_equal(mb_buf_str(&w.r.data), "hello");
    assert_int_equal(w.r.size_bytes, 5);
    assert_int_equal(run_get(&w.r, "iter_0000010/a b+c=d:e@f\xc3\xa9", 4), MB_EFULL);
    assert_int_equal(run_head(&w.r, "iter_0000010/a b+c=d:e@f\xc3\xa9"), 0);
    assert_int_equal(w.r.size_bytes, 5);
    assert_int_equal(run_put(&w.r, "empty", "", 0, NULL), 0);
    assert_int_equal(run_get(&w.r, "empty", 0), 0);
    assert_int_equal(run_get(&w.r, "none", 100), MB_ENOENT);
    assert_int_equal(run_head(&w.r, "none/none"), MB_ENOENT);
    assert_int_equal(run_get(&w.r, "iter_0000010", 100), MB_ENOENT); /* a directory is no object */
    assert_int_equal(run_delete(&w.r, "empty"), 0);
    assert_int_equal(run_delete(&w.r, "empty"), 0);
    assert_int_equal(run_head(&w.r, "empty"), MB_ENOENT);
    assert_non_null(strstr(w.r.text, "key \"empty\""));
    world_close(&w);
}

static void test_bad_keys(void **state)
{
    static const char *const bad[] = {"", "/a", "a/", "a//b", "../a", "a/../b", "a/.", "a\nb"};
    struct world w;
    (void)state;
    world_open(&w);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(run_put(&w.r, bad[i], "x", 0, NULL), MB_EINVAL);
    world_close(&w);
}

static void test_conditions(void **state)
{
    struct world w;
    char etag[200];
    (void)state;
    world_open(&w);
    assert_int_equal(run_put(&w.r, "latest", "10", MB_STORE_IF_MATCH, "x"), MB_EEXIST);
    assert_int_equal(run_put(&w.r, "latest", "10", MB_STORE_IF_ABSENT, NULL), 0);
    snprintf(etag, sizeof etag, "%s", w.r.etag);
    assert_int_equal(run_put(&w.r, "latest", "11", MB_STORE_IF_ABSENT, NULL), MB_EEXIST);
    assert_int_equal(run_head(&w.r, "latest"), 0);
    assert_string_equal(w.r.etag, etag);
    assert_int_equal(run_put(&w.r, "latest", "20", MB_STORE_IF_MATCH, etag), 0);
    assert_int_equal(run_put(&w.r, "latest", "30", MB_STORE_IF_MATCH, etag), MB_EEXIST);
    assert_int_equal(run_get(&w.r, "latest", 100), 0);
    assert_string_equal(mb_buf_str(&w.r.data), "20");
    /* Refused writes leave nothing behind. */
    assert_int_equal(run_list(&w.r, ""), 0);
    assert_string_equal(mb_buf_str(&w.r.keys), "latest\n");
    world_close(&w);
}

static void test_file_conditions(void **state)
{
    struct world w;
    char etag[200];
    (void)state;
    world_open(&w);
    char *one = mb_path_join(w.dir, "one"), *two = mb_path_join(w.dir, "two");
    assert_int_equal(mb_fs_write_atomic(one, "11", 2, 0644, NULL), 0);
    assert_int_equal(mb_fs_write_atomic(two, "22", 2, 0644, NULL), 0);
    assert_int_equal(run_put_file_if(&w.r, "k", one, NULL, MB_STORE_IF_MATCH, "x"), MB_EEXIST);
    assert_string_equal(w.r.etag, "");
    assert_int_equal(run_put_file_if(&w.r, "k", one, NULL, MB_STORE_IF_ABSENT, NULL), 0);
    snprintf(etag, sizeof etag, "%s", w.r.etag);
    assert_int_equal(run_put_file_if(&w.r, "k", two, NULL, MB_STORE_IF_ABSENT, NULL), MB_EEXIST);
    assert_string_equal(w.r.etag, etag); /* what is there is told */
    assert_int_equal(run_put_file_if(&w.r, "k", one, NULL, MB_STORE_IF_ABSENT, NULL), 0);
    assert_int_equal(run_put_file_if(&w.r, "k", two, NULL, MB_STORE_IF_MATCH, etag), 0);
    assert_int_equal(run_put_file_if(&w.r, "k", one, NULL, MB_STORE_IF_MATCH, etag), MB_EEXIST);
    assert_int_equal(run_abort_uploads(&w.r, "k", NULL), 0);
    assert_int_equal(run_get(&w.r, "k", 100), 0);
    assert_string_equal(mb_buf_str(&w.r.data), "22");
    assert_int_equal(run_list(&w.r, ""), 0);
    assert_string_equal(mb_buf_str(&w.r.keys), "k\n");
    mb_free(one);
    mb_free(two);
    world_close(&w);
}

/* Many writers on one key: exactly one wins If-None-Match. */
static void test_race(void **state)
{
    struct world w;
    struct store_run runs[16];
    struct mb_err err;
    int won = 0;
    (void)state;
    world_open(&w);
    memset(runs, 0, sizeof runs);
    for (int i = 0; i < 16; i++)
        assert_int_equal(mb_store_put(w.r.store, "manifest", &i, sizeof i, MB_STORE_IF_ABSENT, NULL,
                                      0, run_on_result, &runs[i], &err),
                         0);
    for (int i = 0; i < 16; i++) {
        while (!runs[i].n_calls)
            mb_loop_turn(&w.loop);
        won += runs[i].error == 0;
        assert_true(runs[i].error == 0 || runs[i].error == MB_EEXIST);
        mb_buf_close(&runs[i].data);
        mb_buf_close(&runs[i].keys);
    }
    assert_int_equal(won, 1);
    world_close(&w);
}

static void test_list(void **state)
{
    struct world w;
    (void)state;
    world_open(&w);
    assert_int_equal(run_list(&w.r, ""), 0);
    assert_int_equal(w.r.n_keys, 0);
    run_put(&w.r, "iter_2/b", "x", 0, NULL);
    run_put(&w.r, "iter_1/z", "x", 0, NULL);
    run_put(&w.r, "iter_1/a/deep", "x", 0, NULL);
    run_put(&w.r, "iter_10", "x", 0, NULL);
    assert_int_equal(run_list(&w.r, ""), 0);
    assert_string_equal(mb_buf_str(&w.r.keys), "iter_1/a/deep\niter_1/z\niter_10\niter_2/b\n");
    assert_int_equal(run_list(&w.r, "iter_1"), 0);
    assert_string_equal(mb_buf_str(&w.r.keys), "iter_1/a/deep\niter_1/z\niter_10\n");
    assert_int_equal(run_list(&w.r, "iter_1/"), 0);
    assert_string_equal(mb_buf_str(&w.r.keys), "iter_1/a/deep\niter_1/z\n");
    assert_int_equal(run_list(&w.r, "nope/"), 0);
    assert_int_equal(w.r.n_keys, 0);
    world_close(&w);
}

static void test_files(void **state)
{
    struct world w;
    struct mb_buf data = {0};
    (void)state;
    world_open(&w);
    char *source = mb_path_join(w.dir, "source");
    char *copy = mb_path_join(w.dir, "copy");
    for (int i = 0; i < 6000000; i++)
        mb_buf_printf(&data, "%07d", i);
    assert_int_equal(mb_fs_write_atomic(source, data.data, data.len, 0644, NULL), 0);
    uint64_t crc = mb_crc64nvme(0, data.data, data.len);
    assert_int_equal(run_put_file(&w.r, "shard", source, NULL), 0);
    assert_int_equal(w.r.size_bytes, data.len);
    assert_true(w.r.crc64nvme == crc);
    assert_int_equal(w.r.progress_bytes, data.len);
    assert_int_equal(run_get_file(&w.r, "shard", copy), 0);
    assert_true(w.r.crc64nvme == crc);
    struct mb_buf back = {0};
    assert_int_equal(mb_fs_read(copy, data.len, &back, NULL), 0);
    assert_memory_equal(back.data, data.data, data.len);
    assert_int_equal(run_put_file(&w.r, "shard", "/nope", NULL), MB_ENOENT);
    assert_int_equal(run_get_file(&w.r, "nope", copy), MB_ENOENT);
    /* A store that closes ends what runs. */
    struct mb_err err;
    struct mb_store_put_file req = {.key = "again", .path = source};
    int before = w.r.n_calls;
    assert_int_equal(mb_store_put_file(w.r.store, &req, run_on_result, &w.r, &err), 0);
    mb_buf_close(&back);
    mb_buf_close(&data);
    mb_free(source);
    mb_free(copy);
    world_close(&w);
    assert_int_equal(w.r.n_calls, before + 1);
    assert_int_equal(w.r.error, MB_ECANCELED);
}

/* This program again, as a child: rewrites one object over and over; a byte on stdout after each.
 */
static int write_forever(const char *url)
{
    uv_loop_t loop;
    struct store_run r;
    static char block[300001];
    uv_loop_init(&loop);
    run_open(&r, &loop, url);
    for (int i = 0;; i++) {
        memset(block, 'a' + i % 26, sizeof block - 1);
        if (run_put(&r, "object", block, 0, NULL) != 0 || write(1, "w", 1) != 1)
            return 1;
    }
}

/* Sends one file, and says so when it is half through; the rest waits for a byte that never comes.
 */
static void stop_amid(void *arg, uint64_t done_bytes, uint64_t total_bytes)
{
    char byte;
    (void)arg;
    (void)total_bytes;
    if (done_bytes > 0 && (write(1, "w", 1) != 1 || read(0, &byte, 1) != 1))
        _exit(1);
}

static int send_half(const char *url, const char *path)
{
    uv_loop_t loop;
    struct store_run r;
    struct mb_store_put_file req = {.key = "iter/shard", .path = path, .progress = stop_amid};
    struct mb_err err;
    uv_loop_init(&loop);
    run_open(&r, &loop, url);
    if (mb_store_put_file(r.store, &req, run_on_result, &r, &err) != 0)
        return 1;
    run_wait(&r, 1);
    int failed = r.error != 0;
    run_close(&r);
    return failed || uv_loop_close(&loop) != 0;
}

static pid_t start_sender(const char *url, const char *path, int *in_fd, int *out_fd)
{
    int in[2], out[2];
    assert_int_equal(pipe2(in, O_CLOEXEC), 0);
    assert_int_equal(pipe2(out, O_CLOEXEC), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(in[0], 0);
        dup2(out[1], 1);
        execl("/proc/self/exe", "test_store_file", "--send-half", url, path, (char *)NULL);
        _exit(127);
    }
    close(in[0]);
    close(out[1]);
    *in_fd = in[1];
    *out_fd = out[0];
    return pid;
}

static int n_temporary(const struct world *w)
{
    char *path = mb_path_join(w->dir, "bucket/iter");
    DIR *d = opendir(path);
    struct dirent *e;
    int n = 0;
    while (d && (e = readdir(d)))
        n += strncmp(e->d_name, ".mobula-tmp-", 12) == 0;
    if (d)
        closedir(d);
    mb_free(path);
    return n;
}

/* What a killed writer left goes with an abort, and before the next file; what a living one writes
 * stays. */
static void test_leftovers(void **state)
{
    struct world w;
    char url[128], byte;
    int in[2], out[2];
    pid_t pids[2];
    (void)state;
    world_open(&w);
    snprintf(url, sizeof url, "file://%s/bucket", w.dir);
    char *shard = mb_path_join(w.dir, "shard");
    assert_int_equal(mb_fs_write_atomic(shard, "", 0, 0644, NULL), 0);
    assert_int_equal(truncate(shard, 80 << 20), 0);
    for (int by_abort = 0; by_abort < 2; by_abort++) {
        for (int i = 0; i < 2; i++) {
            pids[i] = start_sender(url, shard, &in[i], &out[i]);
            assert_int_equal(read(out[i], &byte, 1), 1);
        }
        assert_int_equal(n_temporary(&w), 2);
        kill(pids[0], SIGKILL);
        waitpid(pids[0], NULL, 0);
        if (by_abort)
            assert_int_equal(run_abort_uploads(&w.r, "iter/shard", NULL), 0);
        else
            assert_int_equal(run_put_file(&w.r, "iter/other", shard, NULL), 0);
        assert_int_equal(n_temporary(&w), 1);
        close(in[0]);
        close(out[0]);
        assert_int_equal(write(in[1], "goes on, to its end", 19), 19);
        int status = -1;
        assert_int_equal(waitpid(pids[1], &status, 0), pids[1]);
        assert_int_equal(status, 0);
        close(in[1]);
        close(out[1]);
        assert_int_equal(n_temporary(&w), 0);
        assert_int_equal(run_head(&w.r, "iter/shard"), 0);
    }
    /* Where there is nothing. */
    assert_int_equal(run_abort_uploads(&w.r, "nowhere/shard", NULL), 0);
    mb_free(shard);
    world_close(&w);
}

static pid_t start_writer(const char *url, int *out_fd)
{
    int fds[2];
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        dup2(fds[1], 1);
        execl("/proc/self/exe", "test_store_file", "--write-forever", url, (char *)NULL);
        _exit(127);
    }
    close(fds[1]);
    *out_fd = fds[0];
    return pid;
}

/* The writer is killed at random moments: the object is always whole. */
static void test_kill(void **state)
{
    struct world w;
    char url[128];
    char byte;
    (void)state;
    world_open(&w);
    snprintf(url, sizeof url, "file://%s/bucket", w.dir);
    srand(7);
    for (int round = 0; round < 15; round++) {
        int fd;
        pid_t pid = start_writer(url, &fd);
        assert_int_equal(read(fd, &byte, 1), 1);
        usleep((useconds_t)(rand() % 10000)); /* only moves the moment of the kill */
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        close(fd);
        assert_int_equal(run_get(&w.r, "object", 1000000), 0);
        assert_int_equal(w.r.data.len, 300000);
        for (size_t i = 1; i < w.r.data.len; i++)
            assert_int_equal(w.r.data.data[i], w.r.data.data[0]);
        assert_int_equal(run_list(&w.r, ""), 0);
        assert_string_equal(mb_buf_str(&w.r.keys), "object\n");
    }
    world_close(&w);
}

static void test_open_errors(void **state)
{
    uv_loop_t loop;
    struct mb_store *s;
    struct mb_err err;
    (void)state;
    uv_loop_init(&loop);
    assert_int_equal(mb_store_open(&loop, "ftp://x/y", &s, &err), MB_EUNSUPPORTED);
    assert_int_equal(mb_store_open(&loop, "relative/path", &s, &err), MB_EINVAL);
    unsetenv("BUCKET_STORAGE_ACCESS_KEY");
    unsetenv("BUCKET_STORAGE_SECRET_KEY");
    unsetenv("AWS_ACCESS_KEY_ID");
    unsetenv("AWS_SECRET_ACCESS_KEY");
    setenv("BUCKET_STORAGE_HOST", "http://minio:9000", 1);
    setenv("HOME", "/nonexistent", 1); /* no files either */
    assert_int_equal(mb_store_open(&loop, "s3://bucket/x", &s, &err), MB_EDENIED);
    assert_non_null(strstr(err.text, "BUCKET_STORAGE_ACCESS_KEY"));
    setenv("AWS_SECRET_ACCESS_KEY", "s", 1); /* half a pair */
    assert_int_equal(mb_store_open(&loop, "s3://bucket/x", &s, &err), MB_EDENIED);
    assert_non_null(strstr(err.text, "AWS_ACCESS_KEY_ID is not"));
    assert_int_equal(mb_store_open(&loop, "s3://", &s, &err), MB_EINVAL);
    setenv("AWS_ACCESS_KEY_ID", "k", 1);
    setenv("AWS_SECRET_ACCESS_KEY", "s", 1);
    setenv("BUCKET_STORAGE_HOST", "minio:9000", 1);
    assert_int_equal(mb_store_open(&loop, "s3://bucket/x", &s, &err), MB_EINVAL);
    assert_non_null(strstr(err.text, "BUCKET_STORAGE_HOST"));
    unsetenv("BUCKET_STORAGE_HOST");
    assert_int_equal(uv_loop_close(&loop), 0);
}

static void test_allocation_failures(void **state)
{
    struct world w;
    (void)state;
    world_open(&w);
    mb_buf_reserve(&w.r.data, 100);
    for (unsigned long nth = 1;; nth++) {
        mb_alloc_fail_nth(nth);
        int rc = run_put(&w.r, "a/b", "x", MB_STORE_ALWAYS, NULL);
        if (rc == 0)
            rc = run_get(&w.r, "a/b", 10);
        int failed = mb_alloc_did_fail();
        mb_alloc_fail_nth(0);
        if (!failed) {
            assert_int_equal(rc, 0);
            break;
        }
    }
    world_close(&w);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--write-forever") == 0)
        return write_forever(argv[2]);
    if (argc == 4 && strcmp(argv[1], "--send-half") == 0)
        return send_half(argv[2], argv[3]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_put_get_delete),
        cmocka_unit_test(test_bad_keys),
        cmocka_unit_test(test_conditions),
        cmocka_unit_test(test_file_conditions),
        cmocka_unit_test(test_race),
        cmocka_unit_test(test_list),
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_kill),
        cmocka_unit_test(test_leftovers),
        cmocka_unit_test(test_open_errors),
        cmocka_unit_test(test_allocation_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
