/* Files of an index cache that several runs write to: whole or not there, and what a killed writer
 * left goes, what a living one writes stays. */
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/buf.h"
#include "base/fs.h"
#include "worker/data/cache_files.h"

static char dir[] = "/tmp/mobula-cache-files-XXXXXX";

static const char *at(const char *name)
{
    static char path[160];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static void put(const char *name, const char *text)
{
    assert_int_equal(mb_fs_write_atomic(at(name), text, strlen(text), 0644, NULL), 0);
}

static int is_there(const char *name)
{
    struct stat st;
    return lstat(at(name), &st) == 0;
}

static void swept(size_t n_files, uint64_t n_bytes)
{
    size_t n = 99;
    uint64_t bytes = 99;
    struct mb_err err = {0};
    assert_int_equal(mb_cache_files_sweep(dir, &n, &bytes, &err), 0);
    assert_int_equal(n, n_files);
    assert_int_equal(bytes, n_bytes);
}

static void a_file_is_whole(void **state)
{
    struct mb_buf text = {0};
    struct mb_err err = {0};
    (void)state;
    assert_int_equal(mb_cache_file_write(at("a_index.npy"), "head", 4, " body", 5, &err), 0);
    assert_int_equal(mb_cache_file_write(at("a_index.npy"), "HEAD", 4, " body", 5, &err), 0);
    assert_int_equal(mb_fs_read(at("a_index.npy"), 99, &text, &err), 0);
    assert_string_equal(mb_buf_str(&text), "HEAD body");
    mb_buf_close(&text);
    swept(0, 0);
    assert_true(is_there("a_index.npy"));
    mb_alloc_fail_nth(1);
    assert_int_equal(mb_cache_file_write(at("a_index.npy"), "head", 4, NULL, 0, &err), MB_ENOMEM);
    mb_alloc_fail_nth(0);
    assert_int_not_equal(mb_cache_file_write(at("no/a_index.npy"), "head", 4, NULL, 0, &err), 0);
    assert_int_equal(unlink(at("a_index.npy")), 0);
    assert_int_equal(rmdir(dir), 0); /* nothing is beside it */
    assert_int_equal(mkdir(dir, 0700), 0);
}

static void what_is_left_goes_and_nothing_else(void **state)
{
    static const char *const STAYS[] = {"x_index.npy",
                                        "x-description.txt",
                                        "x_index.npy.tmp-0123456789abcde",
                                        "x_index.npy.tmp-0123456789abcdeX",
                                        "x.npy.tmp-",
                                        ".tmp-0123456789abcdef",
                                        "y.bin.tmp-0123456789abcdef"};
    (void)state;
    put("x-sample_index.npy.tmp-0123456789abcdef", "12345");
    put("x-description.txt.tmp-fedcba9876543210", "123");
    for (size_t i = 0; i < sizeof STAYS / sizeof STAYS[0]; i++) {
        put(STAYS[i], "1");
    }
    assert_int_equal(symlink("x_index.npy", at("l_index.npy.tmp-0123456789abcdef")), 0);
    assert_int_equal(mkfifo(at("p_index.npy.tmp-0123456789abcdef"), 0600), 0);
    assert_int_equal(mkdir(at("d_index.npy.tmp-0123456789abcdef"), 0700), 0);
    swept(2, 8);
    swept(0, 0);
    for (size_t i = 0; i < sizeof STAYS / sizeof STAYS[0]; i++) {
        assert_true(is_there(STAYS[i]));
    }
    assert_true(is_there("l_index.npy.tmp-0123456789abcdef"));
    assert_true(is_there("p_index.npy.tmp-0123456789abcdef"));
    assert_true(is_there("d_index.npy.tmp-0123456789abcdef"));
}

/* That stops before the last byte, and dies there. */
static void a_living_writer_is_left_alone(void **state)
{
    static char body[1 << 20];
    char byte;
    int fds[2], status;
    struct mb_err err = {0};
    (void)state;
    assert_int_equal(pipe(fds), 0);
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        close(fds[0]);
        const int fd = open(at("w_index.npy.tmp-0123456789abcdef"), O_CREAT | O_RDWR, 0600);
        if (fd < 0 || flock(fd, LOCK_EX) != 0 || write(fd, body, sizeof body) < 0 ||
            write(fds[1], "x", 1) != 1) {
            _exit(1);
        }
        pause();
        _exit(0);
    }
    close(fds[1]);
    assert_int_equal(read(fds[0], &byte, 1), 1);
    swept(0, 0);
    assert_true(is_there("w_index.npy.tmp-0123456789abcdef"));
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    swept(1, sizeof body);
    assert_false(is_there("w_index.npy.tmp-0123456789abcdef"));
    close(fds[0]);
    assert_int_equal(mb_cache_file_write(at("w_index.npy"), "x", 1, NULL, 0, &err), 0);
}

static int set_up(void **state)
{
    (void)state;
    return mkdtemp(dir) == NULL;
}

static int tear_down(void **state)
{
    (void)state;
    return mb_fs_remove_tree(dir, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_file_is_whole),
        cmocka_unit_test(what_is_left_goes_and_nothing_else),
        cmocka_unit_test(a_living_writer_is_left_alone),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
