/* base/fs.h in a temporary directory of its own. */
#include "cmocka_all.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
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

static void test_replace(void **state)
{
    struct mb_err err = {0};
    struct mb_buf b = {0};
    struct stat st;

    (void)state;
    assert_int_equal(mb_fs_mkdir_p(path("r/dir"), 0755, &err), 0);
    assert_int_equal(mb_fs_replace(path("r/f"), "first", 5, 0600, &err), 0);
    assert_int_equal(mb_fs_replace(path("r/f"), "new", 3, 0600, &err), 0);
    assert_int_equal(stat(path("r/f"), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_equal(mb_fs_read(path("r/f"), 10, &b, &err), 0);
    assert_string_equal(mb_buf_str(&b), "new");
    assert_true(mb_fs_replace(path("r/dir"), "x", 1, 0644, &err) < 0);
    assert_int_equal(mb_fs_replace(path("r/none/f"), "x", 1, 0644, &err), MB_ENOENT);
    assert_int_equal(count_entries(path("r")), 2);
    mb_buf_close(&b);
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

enum { IS_AS_WANTED = 0, IS_REFUSED = 40, IS_OTHERWISE };

/* From here on the kernel of this process has no openat2. */
static int forget_openat2(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat2, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof(code) / sizeof(code[0]), code};

    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static int write_proc(const char *name, const char *text)
{
    int fd = open(name, O_WRONLY | O_CLOEXEC);
    int done = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);

    if (fd >= 0)
        close(fd);
    return done;
}

/* Mounts of this process's own: as root, or as one in a namespace of users. */
static int enter_namespace(void)
{
    char uids[64], gids[64];

    snprintf(uids, sizeof(uids), "0 %u 1", geteuid());
    snprintf(gids, sizeof(gids), "0 %u 1", getegid());
    if (unshare(CLONE_NEWNS) != 0 &&
        (unshare(CLONE_NEWNS | CLONE_NEWUSER) != 0 || !write_proc("/proc/self/setgroups", "deny") ||
         !write_proc("/proc/self/uid_map", uids) || !write_proc("/proc/self/gid_map", gids)))
        return 0;
    return mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0;
}

/* In a process of its own. from: what is mounted in the tree; NULL: another filesystem. */
static int remove_with_a_mount(const char *from, const char *at, int has_openat2)
{
    struct mb_err err = {0};
    char file[600], tree[512];

    snprintf(tree, sizeof(tree), "%s", path("mounts"));
    snprintf(file, sizeof(file), "%s/foreign", at);
    if (!enter_namespace() || mount(from != NULL ? from : "none", at, from != NULL ? NULL : "tmpfs",
                                    from != NULL ? MS_BIND : 0, NULL) != 0)
        return IS_REFUSED;
    if (mb_fs_write_atomic(file, "x", 1, 0600, &err) != 0)
        return IS_OTHERWISE;
    if (!has_openat2 && !forget_openat2())
        return IS_REFUSED;
    if (mb_fs_remove_tree(tree, &err) == 0 || strstr(err.text, "foreign-dir") == NULL ||
        strstr(err.text, "mount point") == NULL || !mb_fs_exists(file))
        return IS_OTHERWISE;
    return IS_AS_WANTED;
}

static void check_mount(int is_bind, int has_openat2)
{
    struct mb_err err = {0};
    char at[512], source[512];
    int status;
    pid_t pid;

    snprintf(at, sizeof(at), "%s", path("mounts/a/foreign-dir"));
    snprintf(source, sizeof(source), "%s", path("foreign"));
    assert_int_equal(mb_fs_mkdir_p(at, 0755, &err), 0);
    assert_int_equal(mb_fs_mkdir_p(source, 0755, &err), 0);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        _exit(remove_with_a_mount(is_bind ? source : NULL, at, has_openat2));
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == IS_REFUSED) {
        print_message("SKIPPED: no mount namespace for this user on this machine\n");
        skip();
    }
    assert_int_equal(WEXITSTATUS(status), IS_AS_WANTED);
    assert_int_equal(mb_fs_exists(path("foreign/foreign")), is_bind);
    assert_int_equal(mb_fs_remove_tree(path("mounts"), &err), 0); /* nothing is mounted here */
    assert_int_equal(mb_fs_remove_tree(path("foreign"), &err), 0);
}

static void test_remove_spares_a_bind_mount(void **state)
{
    (void)state;
    check_mount(1, 1);
}

static void test_remove_spares_another_filesystem(void **state)
{
    (void)state;
    check_mount(0, 1);
    check_mount(0, 0);
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

static void test_open_files_max(void **state)
{
    struct rlimit old, few, now;

    (void)state;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
    few = (struct rlimit){64, old.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    assert_int_equal(mb_fs_open_files_max(), old.rlim_max);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &now), 0);
    assert_int_equal(now.rlim_cur, old.rlim_max);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
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
        cmocka_unit_test(test_join),
        cmocka_unit_test(test_mkdir),
        cmocka_unit_test(test_read_and_write),
        cmocka_unit_test(test_read_of_a_pipe),
        cmocka_unit_test(test_write_failures),
        cmocka_unit_test(test_replace),
        cmocka_unit_test(test_remove),
        cmocka_unit_test(test_remove_deep),
        cmocka_unit_test(test_remove_spares_a_bind_mount),
        cmocka_unit_test(test_remove_spares_another_filesystem),
        cmocka_unit_test(test_holes),
        cmocka_unit_test(test_open_files_max),
        cmocka_unit_test(test_self_dir),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
