/* base/logfile.h: absolute offsets over a released front, times, and every failing allocation. */
#include "cmocka_all.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/logfile.h"

static char root[] = "/tmp/mobula-test-logfile-XXXXXX";
static char path[64];
static struct mb_err err;

static int set_up(void **state)
{
    (void)state;
    if (mkdtemp(root) == NULL)
        return 1;
    snprintf(path, sizeof(path), "%s/a.log", root);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    return mb_fs_remove_tree(root, NULL);
}

static void write_log(const char *text)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);

    assert_true(fd >= 0);
    assert_int_equal(mb_fs_write_all(fd, text, strlen(text), &err), 0);
    close(fd);
}

static int fresh_index(void)
{
    int fd;

    assert_int_equal(mb_logfile_index_open(path, 1, &fd, &err), 0);
    return fd;
}

static void test_without_index(void **state)
{
    struct mb_logfile f;
    uint64_t at = 2;
    char buf[16];

    (void)state;
    assert_int_equal(mb_logfile_open("/nonexistent/a.log", &f, &err), MB_ENOENT);
    write_log("one\ntwo\nthree");
    assert_int_equal(mb_logfile_open(path, &f, &err), 0);
    assert_int_equal(mb_logfile_first(&f), 0);
    assert_int_equal(mb_logfile_size(&f), 13);
    assert_int_equal(mb_logfile_read(&f, &at, buf, 4), 4);
    assert_memory_equal(buf, "e\ntw", 4);
    assert_int_equal(at, 2);
    at = 13;
    assert_int_equal(mb_logfile_read(&f, &at, buf, 4), 0);
    at = 14; /* a new file of that name: from its start */
    assert_int_equal(mb_logfile_read(&f, &at, buf, 4), 4);
    assert_int_equal(at, 0);
    assert_int_equal(mb_logfile_since(&f, 5), 0);
    mb_logfile_close(&f);
    mb_logfile_close(&f);
}

/* A job may put anything where its log was: nobody waits for the other end of a pipe. */
static void test_what_is_no_file(void **state)
{
    char index[80], target[80];
    struct mb_logfile f;
    int fd;

    (void)state;
    snprintf(index, sizeof(index), "%s.idx", path);
    snprintf(target, sizeof(target), "%s/target", root);
    alarm(20);
    unlink(path);
    assert_int_equal(mkfifo(path, 0644), 0);
    assert_int_equal(mb_logfile_open(path, &f, &err), MB_EINVAL);
    assert_int_equal(mb_logfile_fd(path, O_WRONLY | O_TRUNC, &fd, &err), MB_EINVAL);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0755), 0);
    assert_int_equal(mb_logfile_open(path, &f, &err), MB_EINVAL);
    assert_int_equal(rmdir(path), 0);
    write_log("of somebody else\n");
    assert_int_equal(rename(path, target), 0);
    assert_int_equal(symlink(target, path), 0);
    assert_int_equal(mb_logfile_open(path, &f, &err), MB_EINVAL);
    assert_int_equal(mb_logfile_fd(path, O_WRONLY | O_TRUNC, &fd, &err), MB_EINVAL);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rename(target, path), 0);
    assert_int_equal(mkfifo(index, 0644), 0);
    assert_int_equal(mb_logfile_index_open(path, 1, &fd, &err), MB_EINVAL);
    assert_int_equal(mb_logfile_open(path, &f, &err), 0);
    assert_int_equal(f.index_fd, -1);
    assert_int_equal(mb_logfile_size(&f), 17);
    mb_logfile_close(&f);
    assert_int_equal(unlink(index), 0);
    alarm(0);
}

static void test_last_lines(void **state)
{
    static const struct {
        const char *text;
        uint64_t n, want;
    } cases[] = {{"a\nb\nc\n", 1, 4}, {"a\nb\nc\n", 2, 2}, {"a\nb\nc\n", 3, 0}, {"a\nb\nc\n", 9, 0},
                 {"a\nb\nc", 1, 4},   {"a\nb\nc", 0, 5},   {"", 3, 0},          {"\n\n", 1, 1}};

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct mb_logfile f;

        write_log(cases[i].text);
        assert_int_equal(mb_logfile_open(path, &f, &err), 0);
        assert_int_equal(mb_logfile_last_lines(&f, cases[i].n), cases[i].want);
        mb_logfile_close(&f);
    }
}

static void test_released_front(void **state)
{
    struct mb_logfile_head head = {.first = 4, .shipped = 6, .cap_bytes = 99}, got;
    struct mb_logfile f;
    uint64_t at = 0;
    char buf[16];
    int index;

    (void)state;
    write_log("one\ntwo\nthree\n");
    index = fresh_index();
    assert_int_equal(mb_logfile_open(path, &f, &err), 0);
    assert_int_equal(mb_logfile_first(&f), 0);
    assert_int_equal(mb_logfile_head_write(index, &head, &err), 0);
    assert_int_equal(mb_logfile_head_read(index, &got), 0);
    assert_memory_equal(&got, &head, sizeof(head));
    assert_int_equal(mb_logfile_read(&f, &at, buf, 3), 3);
    assert_int_equal(at, 4);
    assert_memory_equal(buf, "two", 3);
    assert_int_equal(mb_logfile_last_lines(&f, 99), 4);
    assert_int_equal(mb_logfile_since(&f, 0), 4);
    mb_logfile_close(&f);
    close(index);
    /* What an earlier process wrote stays, unless the log begins anew. */
    assert_int_equal(mb_logfile_index_open(path, 0, &index, &err), 0);
    assert_int_equal(mb_logfile_head_read(index, &got), 0);
    assert_int_equal(got.first, 4);
    close(index);
    index = fresh_index();
    assert_int_equal(mb_logfile_head_read(index, &got), 0);
    assert_int_equal(got.first, 0);
    close(index);
}

static void test_times(void **state)
{
    struct mb_logfile_time times[8];
    struct mb_logfile f;
    int index;

    (void)state;
    write_log("0123456789");
    index = fresh_index();
    assert_int_equal(mb_logfile_index_add(index, 3, 1000, &err), 0);
    assert_int_equal(mb_logfile_index_add(index, 3, 1500, &err), 0); /* did not grow */
    assert_int_equal(mb_logfile_index_add(index, 6, 2000, &err), 0);
    assert_int_equal(mb_logfile_index_add(index, 7, 1900, &err), 0); /* the clock went back */
    assert_int_equal(mb_logfile_index_add(index, 9, 3000, &err), 0);
    assert_int_equal(mb_logfile_open(path, &f, &err), 0);
    assert_int_equal(mb_logfile_times(&f, 0, times, 8), 3);
    assert_int_equal(times[1].offset, 6);
    assert_int_equal(times[1].unix_ms, 2000);
    assert_int_equal(mb_logfile_times(&f, 3, times, 8), 2);
    assert_int_equal(mb_logfile_times(&f, 0, times, 2), 2);
    assert_int_equal(mb_logfile_since(&f, 999), 0);
    assert_int_equal(mb_logfile_since(&f, 1000), 3);
    assert_int_equal(mb_logfile_since(&f, 2500), 6);
    assert_int_equal(mb_logfile_since(&f, 9999), 9);
    mb_logfile_close(&f);
    close(index);
}

static void test_times_are_bounded_and_repaired(void **state)
{
    struct mb_logfile f;
    struct mb_logfile_time t[2];
    uint8_t backwards[16] = {1};
    off_t end;
    int index;

    (void)state;
    write_log("x");
    index = fresh_index();
    for (uint64_t i = 1; i <= MB_LOGFILE_TIMES_MAX + 10; i++)
        assert_int_equal(mb_logfile_index_add(index, i, 1000 * i, &err), 0);
    end = lseek(index, 0, SEEK_END);
    assert_int_equal(end, 32 + 16 * (MB_LOGFILE_TIMES_MAX / 2 + 10));
    assert_int_equal(mb_logfile_open(path, &f, &err), 0);
    assert_int_equal(mb_logfile_times(&f, 0, t, 2), 2);
    assert_int_equal(t[1].offset - t[0].offset, 2);
    assert_int_equal(mb_logfile_since(&f, 1000 * 5001), 5000);
    mb_logfile_close(&f);
    assert_int_equal(pwrite(index, backwards, sizeof(backwards), end), sizeof(backwards));
    close(index);
    assert_int_equal(mb_logfile_index_open(path, 0, &index, &err), 0);
    assert_int_equal(lseek(index, 0, SEEK_END), end);
    close(index);
}

/* An index of another program is begun anew rather than believed. */
static void test_foreign_index(void **state)
{
    char name[80];
    struct mb_logfile_head head;
    int index, fd;

    (void)state;
    snprintf(name, sizeof(name), "%s.idx", path);
    fd = open(name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    assert_int_equal(write(fd, "something else that is longer than a head", 41), 41);
    close(fd);
    assert_int_equal(mb_logfile_index_open(path, 0, &index, &err), 0);
    assert_int_equal(mb_logfile_head_read(index, &head), 0);
    assert_int_equal(head.first, 0);
    close(index);
}

/* Numbers that no file can have. From the greatest offset not even pread reads. */
static void damaged_first(uint64_t first)
{
    struct mb_logfile_head head = {.first = first}, got;
    struct mb_logfile f;
    uint64_t at = 0;
    char buf[4];
    int index;

    write_log("one\n");
    index = fresh_index();
    assert_int_equal(mb_logfile_head_write(index, &head, &err), 0);
    assert_int_equal(mb_logfile_head_read(index, &got), MB_ECORRUPT);
    assert_int_equal(mb_logfile_open(path, &f, &err), 0);
    assert_int_equal(mb_logfile_read(&f, &at, buf, 4), 4);
    mb_logfile_close(&f);
    close(index);
    assert_int_equal(mb_logfile_index_open(path, 0, &index, &err), 0);
    assert_int_equal(mb_logfile_head_read(index, &got), 0);
    assert_int_equal(got.first, 0);
    close(index);
}

/* Such numbers, and a list of times that no writer of ours leaves. */
static void test_damaged_index(void **state)
{
    int index;

    (void)state;
    damaged_first(1ULL << 63);
    damaged_first(INT64_MAX);
    write_log("one\n");
    index = fresh_index();
    assert_int_equal(ftruncate(index, (off_t)1 << 40), 0);
    close(index);
    assert_int_equal(mb_logfile_index_open(path, 0, &index, &err), 0);
    assert_int_equal(lseek(index, 0, SEEK_END), 32 + 16 * MB_LOGFILE_TIMES_MAX);
    close(index);
}

static void test_no_memory(void **state)
{
    struct mb_logfile f;
    int index;

    (void)state;
    write_log("x");
    mb_alloc_fail_nth(1);
    assert_int_equal(mb_logfile_open(path, &f, &err), MB_ENOMEM);
    mb_alloc_fail_nth(1);
    assert_int_equal(mb_logfile_index_open(path, 0, &index, &err), MB_ENOMEM);
    mb_alloc_fail_nth(0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_without_index), cmocka_unit_test(test_what_is_no_file),
        cmocka_unit_test(test_last_lines),    cmocka_unit_test(test_released_front),
        cmocka_unit_test(test_times),         cmocka_unit_test(test_times_are_bounded_and_repaired),
        cmocka_unit_test(test_foreign_index), cmocka_unit_test(test_damaged_index),
        cmocka_unit_test(test_no_memory),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
