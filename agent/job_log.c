/*
 * Begin: write the line into a new file; an older file of a deleted job with this id is replaced.
 * Tail: 1. read the last 20,000 bytes; 2. go back 10 line ends; 3. make it UTF-8: the cut may lie
 * inside a sequence, and a driver may print anything.
 */
#include "agent/job_log.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/fs.h"
#include "base/str.h"

int mb_job_log_begin(const char *path, const char *id, const char *entrypoint, struct mb_err *err)
{
    struct mb_buf b = {0};
    int fd, rc;

    if (mb_buf_printf(&b, "Running entrypoint for job %s: %s\n", id, entrypoint) != 0) {
        mb_buf_close(&b);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644);
    rc = fd >= 0 ? mb_fs_write_all(fd, b.data, b.len, err) : mb_err_sys(err, errno, "log %s", path);
    if (fd >= 0)
        close(fd);
    mb_buf_close(&b);
    return rc;
}

static size_t last_lines(const uint8_t *p, size_t n)
{
    size_t at = n > 0 && p[n - 1] == '\n' ? n - 1 : n;
    int lines = 0;

    while (at > 0) {
        if (p[at - 1] == '\n' && ++lines == MB_JOB_LOG_TAIL_LINES)
            return at;
        at--;
    }
    return 0;
}

static void make_utf8(uint8_t *p, size_t n)
{
    if (mb_utf8_valid(p, n))
        return;
    for (size_t i = 0; i < n; i++) {
        if (p[i] >= 0x80)
            p[i] = '?';
    }
}

int mb_job_log_tail(const char *path, struct mb_buf *out, struct mb_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    ssize_t n = -1;
    size_t skip;

    if (fd < 0)
        return mb_err_sys(err, errno, "log %s", path);
    mb_buf_reset(out);
    if (mb_buf_reserve(out, MB_JOB_LOG_TAIL_MAX_BYTES) != 0) {
        close(fd);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    if (fstat(fd, &st) == 0) {
        off_t from =
            st.st_size > MB_JOB_LOG_TAIL_MAX_BYTES ? st.st_size - MB_JOB_LOG_TAIL_MAX_BYTES : 0;

        n = pread(fd, out->data, MB_JOB_LOG_TAIL_MAX_BYTES, from);
        if (n > 0 && from > 0) { /* not from inside of a sequence */
            while (n > 0 && (out->data[0] & 0xC0) == 0x80)
                n = pread(fd, out->data, (size_t)n - 1, ++from);
        }
    }
    close(fd);
    if (n < 0)
        return mb_err_sys(err, errno, "log %s", path);
    skip = last_lines(out->data, (size_t)n);
    make_utf8(out->data, (size_t)n);
    out->len = (size_t)n;
    out->data[out->len] = '\0';
    mb_buf_consume(out, skip);
    return 0;
}
