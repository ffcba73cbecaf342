/* base/memory.h: limits of control groups of both versions, and of those above, in made-up roots.
 */
#include "cmocka_all.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/fs.h"
#include "base/memory.h"

static char root[] = "/tmp/mobula-test-memory-XXXXXX";

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

/* Below the root. */
static void write_file(const char *name, const char *text)
{
    char path[512];
    struct mb_err err;
    snprintf(path, sizeof(path), "%s/%s", root, name);
    *strrchr(path, '/') = '\0';
    assert_int_equal(mb_fs_mkdir_p(path, 0755, &err), 0);
    snprintf(path, sizeof(path), "%s/%s", root, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    assert_true(fd >= 0);
    assert_int_equal(mb_fs_write_all(fd, text, strlen(text), &err), 0);
    close(fd);
}

static int clean(void **state)
{
    (void)state;
    struct mb_err err;
    assert_int_equal(mb_fs_remove_tree(root, &err), 0);
    assert_int_equal(mb_fs_mkdir_p(root, 0755, &err), 0);
    write_file("proc/meminfo",
               "MemTotal:  9000 kB\nMemAvailableX: 1 kB\nMemAvailable:    8000 kB\n");
    return 0;
}

static void test_machine(void **state)
{
    (void)state;
    assert_true(mb_memory_available("/nonexistent") == UINT64_MAX);
    assert_int_equal(mb_memory_available(root), 8000 * 1024);
    write_file("proc/self/cgroup", "0::/\n");
    assert_int_equal(mb_memory_available(root), 8000 * 1024);
    write_file("sys/fs/cgroup/memory.max", "max\n");
    assert_int_equal(mb_memory_available(root), 8000 * 1024);
}

/* Page cache is no use that counts; the limit of any group above counts. */
static void test_version_2(void **state)
{
    (void)state;
    write_file("proc/self/cgroup", "0::/pod/worker\n");
    write_file("sys/fs/cgroup/pod/memory.max", "5000000\n");
    write_file("sys/fs/cgroup/pod/memory.stat", "anon 1000000\nfile 3000000\nshmem 500000\n");
    assert_int_equal(mb_memory_available(root), 3500000);
    write_file("sys/fs/cgroup/pod/worker/memory.max", "2000000\n");
    assert_int_equal(mb_memory_available(root), 2000000);
    write_file("sys/fs/cgroup/pod/worker/memory.stat", "anon 3000000\n");
    assert_int_equal(mb_memory_available(root), 0);
}

static void test_version_1(void **state)
{
    (void)state;
    write_file("proc/self/cgroup", "9:name=systemd:/\n5:cpu,memory:/a\n0::/\n");
    write_file("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    assert_int_equal(mb_memory_available(root), 8000 * 1024);
    write_file("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "4096000\n");
    write_file("sys/fs/cgroup/memory/a/memory.stat",
               "cache 4000000\nrss 1\ntotal_cache 4000000\ntotal_rss 96000\n");
    assert_int_equal(mb_memory_available(root), 4000000);
}

/* What swap takes makes room, as far as a group may have some of it. */
static void test_swap(void **state)
{
    (void)state;
    write_file("proc/meminfo",
               "MemAvailable:    8000 kB\nSwapTotal: 9000 kB\nSwapFree:  2000 kB\n");
    assert_int_equal(mb_memory_available(root), 10000 * 1024);
    write_file("proc/self/cgroup", "5:memory:/a\n0::/pod\n");
    write_file("sys/fs/cgroup/pod/memory.max", "1024000\n");
    assert_int_equal(mb_memory_available(root), 3000 * 1024); /* nobody limits its swap */
    write_file("sys/fs/cgroup/pod/memory.swap.max", "512000\n");
    assert_int_equal(mb_memory_available(root), 1500 * 1024);
    write_file("sys/fs/cgroup/pod/memory.swap.current", "102400\n");
    assert_int_equal(mb_memory_available(root), 1400 * 1024);
    write_file("sys/fs/cgroup/pod/memory.swap.max", "0\n");
    assert_int_equal(mb_memory_available(root), 1000 * 1024);

    /* Version 1 limits both together. */
    write_file("proc/self/cgroup", "5:memory:/a\n");
    write_file("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1024000\n");
    assert_int_equal(mb_memory_available(root), 3000 * 1024);
    write_file("sys/fs/cgroup/memory/a/memory.memsw.limit_in_bytes", "1536000\n");
    assert_int_equal(mb_memory_available(root), 1500 * 1024);
    write_file("sys/fs/cgroup/memory/a/memory.stat", "total_rss 102400\ntotal_swap 102400\n");
    assert_int_equal(mb_memory_available(root), 1300 * 1024);
}

/* As a container without a name space of its own sees it: the path is the host's. */
static void test_path_of_the_host(void **state)
{
    (void)state;
    write_file("proc/self/cgroup", "0::/kubepods/pod1/c1\n");
    write_file("sys/fs/cgroup/memory.max", "1000000\n");
    assert_int_equal(mb_memory_available(root), 1000000);
}

static void test_broken_files(void **state)
{
    (void)state;
    write_file("proc/self/cgroup", "\n:\n0:\n0::\n0::x\n7:memory\n:::::\n0::/a\n");
    write_file("sys/fs/cgroup/a/memory.max", "");
    assert_int_equal(mb_memory_available(root), 8000 * 1024);
    write_file("proc/meminfo", "MemAvailable: many kB\n");
    assert_true(mb_memory_available(root) == UINT64_MAX);
}

static void test_resident(void **state)
{
    (void)state;
    const size_t n = (size_t)64 << 20;
    const uint64_t before = mb_memory_resident();
    char *p = malloc(n);
    assert_non_null(p);
    memset(p, 1, n);
    assert_in_range(mb_memory_resident() - before, n - (n >> 4), n + (n >> 2));
    assert_int_equal(p[n / 2], 1);
    free(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_machine, clean),
        cmocka_unit_test_setup(test_version_2, clean),
        cmocka_unit_test_setup(test_version_1, clean),
        cmocka_unit_test_setup(test_swap, clean),
        cmocka_unit_test_setup(test_path_of_the_host, clean),
        cmocka_unit_test_setup(test_broken_files, clean),
        cmocka_unit_test(test_resident),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
