/* base/fs.h in a temporary directory of its own. */
#include "cmocka_all.h"
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"

static char root[] = "/tmp/mobula-test-fs-XXXXXX";

static const char *path(const char *name)
{
    static char out[512];

    snprintf(out, sizeof(out), "%s/%s", root, name);
    return out;
}

static int set_up(void **state)
{
    (void)state;
    return mkdtemp(root) == NULL;
}

static int tear_down(void **state)
{
    (void)state;
    return mb_fs_remove_tree(root, NULL);
}

static int count_entries(const char *dir)
{
    DIR *d = opendir(dir);
    int n = 0;

    assert_non_null(d);
    while (readdir(d) != NULL)
        n++;
    closedir(d);
    return n - 2;
}

static void check_join(const char *a, const char *b, const char *want)
{
    char *got = mb_path_join(a, b);

    assert_string_equal(got, want);
    mb_free(got);
}

static void test_join(void **state)
{
    (void)state;
    check_join("a", "b", "a/b");
    check_join("a//", "b", "a/b");
    check_join("/", "b", "/b");
    check_join("", "b", "b");
    check_join("a", "/b", "/b");
    mb_alloc_fail_nth(1);
    assert_null(mb_path_join("a", "b"));
    mb_alloc_fail_nth(0);
}

static void test_mkdir(void **state)
{
    struct mb_err err = {0};
    int fd;

    (void)state;
    assert_int_equal(mb_fs_mkdir_p(path("a/b//c/"), 0755, &err), 0);
    assert_int_equal(mb_fs_mkdir_p(path("a/b/c"), 0755, &err), 0);
    assert_int_equal(mb_fs_exists(path("a/b/c")), 1);
    fd = open(path("a/file"), O_CREAT | O_WRONLY, 0644);
    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(mb_fs_mkdir_p(path("a/file"), 0755, &err), MB_EEXIST);
    assert_true(mb_fs_mkdir_p(path("a/file/x"), 0755, &err) < 0);
    assert_int_equal(mb_fs_mkdir_p("", 0755, &err), MB_EINVAL);
    mb_alloc_fail_nth(1);
    assert_int_equal(mb_fs_mkdir_p(path("n"), 0755, &err), MB_ENOMEM);
    mb_alloc_fail_nth(0);
}

/* What nobody writes to is not waited for; what somebody wrote is read, as of a shell's <(...). */
static void test_read_of_a_pipe(void **state)
{
    struct mb_err err = {0};
    struct mb_buf b = {0};
    int keeper, writer;

    (void)state;
    assert_int_equal(mkfifo(path("pipe"), 0600), 0);
    assert_int_equal(mb_fs_read(path("pipe"), 9, &b, &err), MB_EINVAL);
    assert_non_null(strstr(err.text, "a pipe that nobody writes to"));
    keeper = open(path("pipe"), O_RDONLY | O_NONBLOCK);
    writer = open(path("pipe"), O_WRONLY);
    assert_true(keeper >= 0 && writer >= 0);
    assert_int_equal(write(writer, "text", 4), 4);
    close(writer);
    assert_int_equal(mb_fs_read(path("pipe"), 9, &b, &err), 0);
    assert_string_equal(mb_buf_str(&b), "text");
    close(keeper);
    mb_buf_close(&b);
}

static void test_read_and_write(void **state)
{
    struct mb_err err = {0};
    struct mb_buf b = {0};
    struct stat st;
    char *big;

    (void)state;
    assert_int_equal(mb_fs_write_atomic(path("f"), "one", 3, 0600, &err), 0);
    assert_int_equal(mb_fs_write_atomic(path("f"), "second", 6, 0600, &err), 0);
    assert_int_equal(stat(path("f"), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(mb_buf_puts(&b, "> "), 0);
    assert_int_equal(mb_fs_read(path("f"), 6, &b, &err), 0);
    assert_string_equal(mb_buf_str(&b), "> second");
    assert_int_equal(mb_fs_read(path("f"), 5, &b, &err), MB_EFULL);
    assert_string_equal(mb_buf_str(&b), "> second"); /* unchanged */
    assert_int_equal(mb_fs_read(path("missing"), 5, &b, &err), MB_ENOENT);
    assert_non_null(strstr(err.text, "missing"));
    assert_true(mb_fs_read(root, 5, &b, &err) < 0); /* a directory */

    big = mb_calloc(1, 1 << 20);
    big[1 << 19] = 'x';
    assert_int_equal(mb_fs_write_atomic(path("big"), big, 1 << 20, 0644, &err), 0);
    mb_buf_reset(&b);
    assert_int_equal(mb_fs_read(path("big"), 1 << 20, &b, &err), 0);
    assert_int_equal(b.len, 1 << 20);
    assert_memory_equal(b.data, big, 1 << 20);
    mb_free(big);
    mb_buf_close(&b);
}

static void test_write_failures(void **state)
{
    struct mb_err err = {0};
    struct mb_buf b = {0};
    unsigned long n;

    (void)state;
    assert_int_equal(mb_fs_mkdir_p(path("w/dir"), 0755, &err), 0);
    assert_int_equal(mb_fs_write_atomic(path("w/none/f"), "x", 1, 0644, &err), MB_ENOENT);
    assert_true(mb_fs_write_atomic(path("w/dir"), "x", 1, 0644, &err) < 0); /* rename onto a dir */
    assert_int_equal(count_entries(path("w")), 1); /* no temporary file is left */
    assert_int_equal(mb_fs_write_atomic(path("w/f"), "old", 3, 0644, &err), 0);
    for (n = 1;; n++) {
        int rc;

        mb_alloc_fail_nth(n);
        rc = mb_fs_write_atomic(path("w/f"), "new", 3, 0644, &err);
        if (!mb_alloc_did_fail())
            break;
        assert_int_equal(rc, MB_ENOMEM);
        assert_int_equal(count_entries(path("w")), 2);
    }
    mb_alloc_fail_nth(1);
    assert_int_equal(mb_fs_read(path("w/f"), 10, &b, &err), MB_ENOMEM);
    mb_alloc_fail_nth(0);
    assert_int_equal(mb_fs_read(path("w/f"), 10, &b, &err), 0);
    assert_string_equal(mb_buf_str(&b), "new");
    mb_buf_close(&b);
    assert_true(mb_fs_write_all(-1, "x", 1, &err) < 0);
}

static void test_remove(void **state)
{
    struct mb_err err = {0};
    char target[512];

    (void)state;
    snprintf(target, sizeof(target), "%s", path("keep"));
    assert_int_equal(mb_fs_mkdir_p(path("keep"), 0755, &err), 0);
    assert_int_equal(mb_fs_write_atomic(path("keep/f"), "x", 1, 0644, &err), 0);
    assert_int_equal(mb_fs_mkdir_p(path("tree/a/b"), 0755, &err), 0);
    assert_int_equal(mb_fs_write_atomic(path("tree/a/f"), "x", 1, 0644, &err), 0);
    assert_int_equal(symlink(target, path("tree/a/link")), 0);
    assert_int_equal(symlink(target, path("link")), 0);
    assert_int_equal(mb_fs_remove_tree(path("tree"), &err), 0);
    assert_int_equal(mb_fs_exists(path("tree")), 0);
    assert_int_equal(mb_fs_remove_tree(path("link"), &err), 0);
    assert_int_equal(mb_fs_exists(path("keep/f")), 1); /* links are never followed */
    assert_int_equal(mb_fs_remove_tree(path("missing"), &err), 0);
    assert_int_equal(mb_fs_remove_tree(path("missing/below"), &err), 0);
    assert_int_equal(mb_fs_remove_tree(path("keep/f"), &err), 0);
    assert_int_equal(mb_fs_exists(path("keep/f")), 0);
}

/* Deeper than a process may have descriptors. */
static void test_remove_deep(void **state)
{
    enum { LEVELS = 300, MAX_FDS = 128 };
    struct rlimit old, few;
    struct mb_err err = {0};
    int fd, rc;

    (void)state;
    assert_int_equal(mkdir(path("deep"), 0700), 0);
    fd = open(path("deep"), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (int i = 0; i < LEVELS; i++) {
        int next;

        assert_int_equal(mkdirat(fd, "beside", 0700), 0);
        assert_int_equal(mkdirat(fd, "below", 0700), 0);
        next = openat(fd, "below", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        assert_true(next >= 0);
        close(fd);
        fd = next;
    }
    close(fd);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
    few = old;
    few.rlim_cur = MAX_FDS;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    rc = mb_fs_remove_tree(path("deep"), &err);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
    assert_int_equal(rc, 0);
    assert_false(mb_fs_exists(path("deep")));
}

static void check_stretch(int fd, uint64_t offset, uint64_t n, int hole, uint64_t want)
{
    int is_hole = -1;

    assert_int_equal(mb_fs_stretch(fd, offset, n, &is_hole), want);
    assert_int_equal(is_hole, hole);
}

/* A hole, data, a hole up to the end. */
static void test_holes(void **state)
{
    enum { UNIT = 1 << 20 };
    static char block[UNIT];
    int fd = open(path("sparse"), O_RDWR | O_CREAT, 0600), is_hole = -1;

    (void)state;
    assert_true(fd >= 0);
    memset(block, 'x', sizeof(block));
    assert_int_equal(pwrite(fd, block, UNIT, UNIT), UNIT);
    assert_int_equal(ftruncate(fd, 4 * UNIT), 0);
    mb_fs_stretch(fd, 0, UNIT, &is_hole);
    if (is_hole == 0) { /* this file system tells of no holes */
        check_stretch(fd, 3 * UNIT, UNIT, 0, UNIT);
        close(fd);
        return;
    }
    check_stretch(fd, 0, 4 * UNIT, 1, UNIT);
    check_stretch(fd, 5, 10, 1, 10);
    check_stretch(fd, UNIT, 4 * UNIT, 0, UNIT);
    check_stretch(fd, UNIT + 7, 8, 0, 8);
    check_stretch(fd, 2 * UNIT, 9 * UNIT, 1, 2 * UNIT);
    check_stretch(fd, 4 * UNIT, 5, 0, 5); /* behind the end: reading says so */
    close(fd);
    check_stretch(fd, 0, 5, 0, 5); /* no file: reading says so */
}

static void test_self_dir(void **state)
{
    struct mb_err err = {0};
    char *dir = mb_fs_self_dir(&err);
    char *self;

    (void)state;
    assert_non_null(dir);
    self = mb_path_join(dir, "test_fs");
    assert_int_equal(mb_fs_exists(self), 1);
    mb_free(self);
    mb_free(dir);
    mb_alloc_fail_nth(1);
    assert_null(mb_fs_self_dir(&err));
    assert_int_equal(err.code, MB_ENOMEM);
    mb_alloc_fail_nth(0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_join),           cmocka_unit_test(test_mkdir),
        cmocka_unit_test(test_read_and_write), cmocka_unit_test(test_read_of_a_pipe),
        cmocka_unit_test(test_write_failures), cmocka_unit_test(test_remove),
        cmocka_unit_test(test_remove_deep),    cmocka_unit_test(test_holes),
        cmocka_unit_test(test_self_dir),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
