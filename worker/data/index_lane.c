/*
 * 1. append collects up to BUFFER_BYTES; a piece of DIRECT_BYTES or more is written at once, behind
 *    what was collected, in one call and without a copy.
 * 2. Each WRITEBACK_BYTES the kernel is told to begin with what is there, so that the fsync at the
 *    end, or at a durable point, finds little left to do.
 * Failure: a write that the kernel refuses (full disk) is returned with the path; what is behind
 * the last whole append is then not defined, and nobody reads it.
 */
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "worker/data/index_lane.h"

enum { BUFFER_BYTES = 256 << 10, DIRECT_BYTES = 32 << 10, WRITEBACK_BYTES = 32 << 20 };

int mb_lane_file_open(struct mb_lane_file *f, char *path, int continues, uint64_t cut_bytes,
                      struct mb_err *err)
{
    struct stat st;

    f->path = path;
    if (path == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    f->fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | (continues ? 0 : O_CREAT | O_EXCL), 0666);
    if (f->fd < 0)
        return mb_err_sys(err, errno, "cannot %s %s", continues ? "open" : "create", path);
    if (!continues)
        return 0;
    if (fstat(f->fd, &st) != 0)
        return mb_err_sys(err, errno, "%s", path);
    if ((uint64_t)st.st_size < cut_bytes)
        return mb_err_set(err, MB_ECORRUPT, "%s has %llu bytes, %llu were noted", path,
                          (unsigned long long)st.st_size, (unsigned long long)cut_bytes);
    if (ftruncate(f->fd, (off_t)cut_bytes) != 0 || lseek(f->fd, 0, SEEK_END) < 0)
        return mb_err_sys(err, errno, "cut %s", path);
    f->size_bytes = f->started_bytes = cut_bytes;
    return 0;
}

static void start_writeback(struct mb_lane_file *f)
{
    uint64_t written_bytes = f->size_bytes - f->buffer.len;

    if (written_bytes - f->started_bytes < WRITEBACK_BYTES)
        return;
    /* A hint: a file system without it writes all at the fsync. */
    (void)sync_file_range(f->fd, (off_t)f->started_bytes, (off_t)(written_bytes - f->started_bytes),
                          SYNC_FILE_RANGE_WRITE);
    f->started_bytes = written_bytes;
}

/* The buffer and n bytes behind it. */
static int write_out(struct mb_lane_file *f, const void *p, size_t n, struct mb_err *err)
{
    struct iovec parts[2] = {{f->buffer.data, f->buffer.len}, {(void *)(uintptr_t)p, n}};
    int first = f->buffer.len == 0;

    while (first < 2 && !(first == 1 && parts[1].iov_len == 0)) {
        ssize_t done = writev(f->fd, parts + first, 2 - first);

        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return mb_err_sys(err, errno, "write %s", f->path);
        while (first < 2 && (size_t)done >= parts[first].iov_len)
            done -= (ssize_t)parts[first++].iov_len;
        if (first < 2) {
            parts[first].iov_base = (char *)parts[first].iov_base + done;
            parts[first].iov_len -= (size_t)done;
        }
    }
    mb_buf_reset(&f->buffer);
    return 0;
}

int mb_lane_file_append(struct mb_lane_file *f, const void *p, size_t n, struct mb_err *err)
{
    int rc = 0;

    if (n >= DIRECT_BYTES)
        rc = write_out(f, p, n, err);
    else if (f->buffer.len + n > BUFFER_BYTES)
        rc = write_out(f, NULL, 0, err);
    if (rc != 0)
        return rc;
    if (n < DIRECT_BYTES && mb_buf_add(&f->buffer, p, n) != 0)
        return mb_err_set(err, MB_ENOMEM, "%s: out of memory", f->path);
    f->size_bytes += n;
    start_writeback(f);
    return 0;
}

int mb_lane_file_flush(struct mb_lane_file *f, struct mb_err *err)
{
    return write_out(f, NULL, 0, err);
}

void mb_lane_file_close(struct mb_lane_file *f, int removes)
{
    if (f->fd >= 0)
        close(f->fd);
    if (f->fd >= 0 && removes)
        unlink(f->path);
    f->fd = -1;
    mb_buf_close(&f->buffer);
    mb_free(f->path);
    f->path = NULL;
}

int mb_lane_file_read(const struct mb_lane_file *f, void *p, size_t n, uint64_t offset,
                      struct mb_err *err)
{
    for (size_t done = 0; done < n;) {
        ssize_t got = pread(f->fd, (char *)p + done, n - done, (off_t)(offset + done));

        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return mb_err_sys(err, got < 0 ? errno : EIO, "read back %s", f->path);
        done += (size_t)got;
    }
    return 0;
}

/* In the kernel where it can, else through a block. */
int mb_lane_file_copy(struct mb_lane_file *to, const struct mb_lane_file *from, uint64_t size_bytes,
                      struct mb_err *err)
{
    uint8_t block[1 << 16];
    loff_t at = 0;
    int rc = mb_lane_file_flush(to, err);

    while (rc == 0 && (uint64_t)at < size_bytes) {
        ssize_t done =
            copy_file_range(from->fd, &at, to->fd, NULL, (size_t)(size_bytes - (uint64_t)at), 0);

        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            break;
        to->size_bytes += (uint64_t)done;
    }
    while (rc == 0 && (uint64_t)at < size_bytes) {
        uint64_t left = size_bytes - (uint64_t)at;
        size_t n = left < sizeof(block) ? (size_t)left : sizeof(block);

        rc = mb_lane_file_read(from, block, n, (uint64_t)at, err);
        if (rc == 0)
            rc = mb_lane_file_append(to, block, n, err);
        at += (loff_t)n;
    }
    return rc;
}
