/* Any bytes as PATH.idx beside a log of 64 bytes: readers end and stay within their buffers, and
 * the next writer leaves times in order. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include "base/logfile.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { LOG_BYTES = 64, TIMES = 8 };

static char dir[] = "/dev/shm/mobula-fuzz-logfile-XXXXXX"; /* on a disk: 40 times slower */
static char log_path[64], index_path[64];

static void remove_files(void)
{
    unlink(log_path);
    unlink(index_path);
    rmdir(dir);
}

static void write_file(const char *path, const void *p, size_t n)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

    if (fd < 0 || write(fd, p, n) != (ssize_t)n)
        abort();
    close(fd);
}

static void set_up(void)
{
    char log[LOG_BYTES];

    if (mkdtemp(dir) == NULL)
        abort();
    snprintf(log_path, sizeof(log_path), "%s/a.log", dir);
    snprintf(index_path, sizeof(index_path), "%s/a.log.idx", dir);
    atexit(remove_files);
    for (int i = 0; i < LOG_BYTES; i++)
        log[i] = i % 8 == 7 ? '\n' : 'x';
    write_file(log_path, log, sizeof(log));
}

static void read_all(void)
{
    struct mb_logfile_time times[TIMES];
    struct mb_logfile f;
    struct mb_err err;
    uint64_t at = 0, last;
    char buf[16];
    long n;

    if (mb_logfile_open(log_path, &f, &err) != 0)
        abort();
    do {
        last = at;
        n = mb_logfile_read(&f, &at, buf, sizeof(buf));
        if (n < 0 || at < last || (n > 0 && at + (uint64_t)n > LOG_BYTES))
            abort();
        at += (uint64_t)n;
    } while (n > 0);
    if (mb_logfile_last_lines(&f, 3) < mb_logfile_first(&f))
        abort();
    for (int shift = 0; shift < 64; shift += 7)
        if (mb_logfile_since(&f, 1000ULL << shift) < mb_logfile_first(&f) ||
            mb_logfile_times(&f, 1ULL << shift, times, TIMES) > TIMES)
            abort();
    mb_logfile_close(&f);
}

static void go_on_writing(void)
{
    struct mb_logfile_time times[TIMES];
    struct mb_logfile_head head;
    struct mb_logfile f;
    struct mb_err err;
    size_t n;
    int fd;

    if (mb_logfile_index_open(log_path, 0, &fd, &err) != 0 || mb_logfile_head_read(fd, &head) != 0)
        abort();
    if (mb_logfile_index_add(fd, LOG_BYTES, 1000, &err) != 0 || mb_logfile_open(log_path, &f, &err))
        abort();
    n = mb_logfile_times(&f, 0, times, TIMES);
    for (size_t i = 1; i < n; i++)
        if (times[i].offset < times[i - 1].offset || times[i].unix_ms < times[i - 1].unix_ms)
            abort();
    mb_logfile_close(&f);
    close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (log_path[0] == '\0')
        set_up();
    write_file(index_path, data, size);
    read_all();
    go_on_writing();
    return 0;
}
