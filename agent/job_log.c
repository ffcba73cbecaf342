/*
 * Begin: write the line into a new file; an older file of a deleted job with this id is replaced.
 * Tail: 1. read the last 20,000 bytes; 2. go back 10 line ends; 3. make it text: the cut may lie
 * inside a sequence, and a driver may print anything; what is none becomes U+FFFD, as with Ray.
 */
#include "agent/job_log.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/fs.h"
#include "base/logfile.h"
#include "base/str.h"
#include "gcs/text.h"

enum { CONTINUATION_MAX = 3 }; /* bytes of UTF-8 behind a first one */

int mb_job_log_begin(const char *path, const char *id, const char *entrypoint, struct mb_err *err)
{
    struct mb_buf b = {0};
    int fd, rc;

    if (mb_buf_printf(&b, "Running entrypoint for job %s: %s\n", id, entrypoint) != 0) {
        mb_buf_close(&b);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    rc = mb_logfile_fd(path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, &fd, err);
    if (rc == 0) {
        rc = mb_fs_write_all(fd, b.data, b.len, err);
        close(fd);
    }
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

/* Text of ours ends at a NUL: one amid the lines would hide what comes behind it. */
static int add_text(uint8_t *p, size_t n, struct mb_buf *out, struct mb_err *err)
{
    for (size_t i = 0; i < n; i++) {
        if (p[i] == 0)
            p[i] = 0xff;
    }
    return mb_text_clean((const char *)p, n, out) == 0
               ? 0
               : mb_err_set(err, MB_ENOMEM, "out of memory");
}

int mb_job_log_tail(const char *path, struct mb_buf *out, struct mb_err *err)
{
    struct mb_buf end = {0};
    struct stat st;
    off_t from = 0;
    ssize_t n = -1;
    size_t begin;
    int is_cut, fd, rc = mb_logfile_fd(path, O_RDONLY, &fd, err);

    if (rc != 0)
        return rc;
    mb_buf_reset(out);
    if (mb_buf_reserve(&end, MB_JOB_LOG_TAIL_MAX_BYTES) != 0) {
        close(fd);
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    }
    if (fstat(fd, &st) == 0) {
        from = st.st_size > MB_JOB_LOG_TAIL_MAX_BYTES ? st.st_size - MB_JOB_LOG_TAIL_MAX_BYTES : 0;
        n = pread(fd, end.data, MB_JOB_LOG_TAIL_MAX_BYTES, from);
    }
    rc = n < 0 ? mb_err_sys(err, errno, "log %s", path) : 0;
    close(fd);
    if (n > 0) {
        begin = last_lines(end.data, (size_t)n);
        is_cut = from > 0 && begin == 0; /* not from inside of a sequence */
        while (is_cut && begin < CONTINUATION_MAX && (ssize_t)begin < n &&
               (end.data[begin] & 0xC0) == 0x80)
            begin++;
        rc = add_text(end.data + begin, (size_t)n - begin, out, err);
    }
    mb_buf_close(&end);
    return rc;
}
