/*
 * Layout of PATH.idx: magic, then the head at fixed places, then (offset, time) pairs.
 *
 *  1. The head is three numbers of 8 bytes, each written by one pwrite: a SIGKILL leaves the old or
 *     the new one. Who releases bytes writes `first` and flushes it before.
 *  2. Reading: bytes first, `first` after. What was released in between reads as zeros, and then
 *     `first` already says so: the bytes are dropped and read again from there.
 *  3. Times are full: every other one is dropped, so the file stays below 1 MiB and old times
 *     become coarse.
 *  4. What bears a log's name and is no file (a job has its log's name) is an error, not waited
 * for.
 *  5. A crash amid 3 leaves pairs that go backwards: the next opening for writing cuts them off.
 *     Readers search by halves and at worst start too early.
 */
#include "base/logfile.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/str.h"

static const char magic[8] = {'m', 'b', 'l', 'o', 'g', 'i', 'x', '1'};

enum { FIRST_AT = 8, SHIPPED_AT = 16, CAP_AT = 24, TIMES_AT = 32, TIME_BYTES = 16 };

/* pread refuses an offset from which its bytes would go beyond INT64_MAX: far from there. */
#define OFFSET_MAX (INT64_MAX / 2)

/* ---- numbers on disk ---- */

static void store_u64(uint8_t *p, uint64_t v)
{
    for (int i = 0; i < 8; i++)
        p[i] = (uint8_t)(v >> (8 * i));
}

static uint64_t load_u64(const uint8_t *p)
{
    uint64_t v = 0;

    for (int i = 7; i >= 0; i--)
        v = v << 8 | p[i];
    return v;
}

static size_t n_times(int index_fd)
{
    struct stat st;
    size_t n;

    if (fstat(index_fd, &st) != 0 || st.st_size < TIMES_AT)
        return 0;
    n = (size_t)(st.st_size - TIMES_AT) / TIME_BYTES;
    return n < MB_LOGFILE_TIMES_MAX ? n : MB_LOGFILE_TIMES_MAX; /* damage is not read for hours */
}

static int get_time(int index_fd, size_t i, struct mb_logfile_time *out)
{
    uint8_t raw[TIME_BYTES];

    if (pread(index_fd, raw, sizeof raw, (off_t)(TIMES_AT + i * TIME_BYTES)) != TIME_BYTES)
        return -1;
    *out = (struct mb_logfile_time){load_u64(raw), load_u64(raw + 8)};
    return 0;
}

static int put_at(int fd, const void *p, size_t n, off_t at, struct mb_err *err)
{
    ssize_t done;

    do
        done = pwrite(fd, p, n, at);
    while (done < 0 && errno == EINTR);
    if (done == (ssize_t)n)
        return 0;
    return mb_err_sys(err, done < 0 ? errno : ENOSPC, "index of a log");
}

int mb_logfile_fd(const char *path, int flags, int *fd, struct mb_err *err)
{
    int opened = open(path, flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644), e = errno;
    struct stat st;

    /* A pipe that nobody reads, a socket; a link. */
    if (opened < 0 && e != ENXIO && e != ELOOP)
        return mb_err_sys(err, e, "log %s", path);
    if (opened >= 0 && fstat(opened, &st) == 0 && S_ISREG(st.st_mode)) {
        *fd = opened;
        return 0;
    }
    if (opened >= 0)
        close(opened);
    return mb_err_set(err, MB_EINVAL, "log %s: it is no regular file any more", path);
}

/* ---- the writer ---- */

/* How many times stand in order. Reads all of them: at most 1 MiB. */
static int cut_off_damage(int fd, struct mb_err *err)
{
    size_t n = n_times(fd), good = 0;
    struct mb_logfile_time last = {0}, t;

    while (good < n && get_time(fd, good, &t) == 0 && t.offset >= last.offset &&
           t.unix_ms >= last.unix_ms) {
        last = t;
        good++;
    }
    if (ftruncate(fd, (off_t)(TIMES_AT + good * TIME_BYTES)) != 0)
        return mb_err_sys(err, errno, "index of a log");
    return 0;
}

int mb_logfile_index_open(const char *log_path, int fresh, int *fd, struct mb_err *err)
{
    uint8_t empty[TIMES_AT] = {0};
    struct mb_logfile_head head;
    char *path = mb_asprintf("%s.idx", log_path);
    int rc, out;

    if (path == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    rc = mb_logfile_fd(path, O_RDWR | O_CREAT | (fresh ? O_TRUNC : 0), &out, err);
    mb_free(path);
    if (rc != 0)
        return rc;
    if (mb_logfile_head_read(out, &head) == 0) {
        rc = cut_off_damage(out, err);
    } else {
        memcpy(empty, magic, sizeof magic);
        if (ftruncate(out, 0) != 0)
            rc = mb_err_sys(err, errno, "index of a log");
        if (rc == 0)
            rc = put_at(out, empty, sizeof empty, 0, err);
    }
    if (rc != 0)
        close(out);
    else
        *fd = out;
    return rc;
}

int mb_logfile_head_read(int index_fd, struct mb_logfile_head *out)
{
    uint8_t raw[TIMES_AT];

    if (pread(index_fd, raw, sizeof raw, 0) != (ssize_t)sizeof raw ||
        memcmp(raw, magic, sizeof magic) != 0)
        return MB_ECORRUPT;
    *out = (struct mb_logfile_head){load_u64(raw + FIRST_AT), load_u64(raw + SHIPPED_AT),
                                    load_u64(raw + CAP_AT)};
    /* No file is that long: damage. */
    return out->first > OFFSET_MAX || out->shipped > OFFSET_MAX ? MB_ECORRUPT : 0;
}

int mb_logfile_head_write(int index_fd, const struct mb_logfile_head *head, struct mb_err *err)
{
    uint8_t raw[TIMES_AT - FIRST_AT];

    store_u64(raw, head->first);
    store_u64(raw + SHIPPED_AT - FIRST_AT, head->shipped);
    store_u64(raw + CAP_AT - FIRST_AT, head->cap_bytes);
    return put_at(index_fd, raw, sizeof raw, FIRST_AT, err);
}

/* Drops every other time. */
static int halve(int fd, size_t n, struct mb_err *err)
{
    uint8_t *all = mb_alloc(n * TIME_BYTES);
    size_t kept = 0;
    int rc = 0;

    if (all == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    if (pread(fd, all, n * TIME_BYTES, TIMES_AT) != (ssize_t)(n * TIME_BYTES))
        rc = mb_err_sys(err, errno, "index of a log");
    for (size_t i = 1; rc == 0 && i < n; i += 2, kept++)
        memmove(all + kept * TIME_BYTES, all + i * TIME_BYTES, TIME_BYTES);
    if (rc == 0)
        rc = put_at(fd, all, kept * TIME_BYTES, TIMES_AT, err);
    if (rc == 0 && ftruncate(fd, (off_t)(TIMES_AT + kept * TIME_BYTES)) != 0)
        rc = mb_err_sys(err, errno, "index of a log");
    mb_free(all);
    return rc;
}

int mb_logfile_index_add(int index_fd, uint64_t offset, uint64_t unix_ms, struct mb_err *err)
{
    size_t n = n_times(index_fd);
    struct mb_logfile_time last = {0};
    uint8_t raw[TIME_BYTES];
    int rc = 0;

    if (n > 0 && get_time(index_fd, n - 1, &last) == 0 &&
        (offset <= last.offset || unix_ms < last.unix_ms))
        return 0;
    if (n >= MB_LOGFILE_TIMES_MAX) {
        rc = halve(index_fd, n, err);
        n = n_times(index_fd);
    }
    store_u64(raw, offset);
    store_u64(raw + 8, unix_ms);
    return rc != 0 ? rc
                   : put_at(index_fd, raw, sizeof raw, (off_t)(TIMES_AT + n * TIME_BYTES), err);
}

/* ---- readers ---- */

int mb_logfile_open(const char *path, struct mb_logfile *out, struct mb_err *err)
{
    char *index = mb_asprintf("%s.idx", path);
    int rc;

    if (index == NULL)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    rc = mb_logfile_fd(path, O_RDONLY, &out->fd, err);
    if (rc == 0 && mb_logfile_fd(index, O_RDONLY, &out->index_fd, NULL) != 0)
        out->index_fd = -1;
    mb_free(index);
    return rc;
}

void mb_logfile_close(struct mb_logfile *f)
{
    if (f->fd >= 0)
        close(f->fd);
    if (f->index_fd >= 0)
        close(f->index_fd);
    *f = (struct mb_logfile){-1, -1};
}

uint64_t mb_logfile_first(const struct mb_logfile *f)
{
    struct mb_logfile_head head;

    return f->index_fd >= 0 && mb_logfile_head_read(f->index_fd, &head) == 0 ? head.first : 0;
}

uint64_t mb_logfile_size(const struct mb_logfile *f)
{
    struct stat st;

    return fstat(f->fd, &st) == 0 ? (uint64_t)st.st_size : 0;
}

long mb_logfile_read(const struct mb_logfile *f, uint64_t *offset, void *buf, size_t max)
{
    uint64_t first = mb_logfile_first(f);

    for (;;) {
        uint64_t from = *offset < first ? first : *offset;
        ssize_t n;

        if (mb_logfile_size(f) < *offset)
            from = first;
        do
            n = pread(f->fd, buf, max, (off_t)from);
        while (n < 0 && errno == EINTR);
        if (n < 0)
            return MB_EIO;
        first = mb_logfile_first(f);
        if (n > 0 && first > from)
            continue; /* released while we read */
        *offset = from;
        return (long)n;
    }
}

/* The first byte of a line at or after `from`, if one begins before `end`; else `from`. */
static uint64_t next_line(const struct mb_logfile *f, uint64_t from, uint64_t end)
{
    char buf[4096];
    uint64_t at = from;

    while (at < end) {
        ssize_t n = pread(f->fd, buf, sizeof buf, (off_t)at);
        const char *newline = n > 0 ? memchr(buf, '\n', (size_t)n) : NULL;

        if (n <= 0)
            break;
        if (newline != NULL)
            return at + (uint64_t)(newline - buf) + 1;
        at += (uint64_t)n;
    }
    return from;
}

uint64_t mb_logfile_last_lines(const struct mb_logfile *f, uint64_t n)
{
    uint64_t size = mb_logfile_size(f), first = mb_logfile_first(f), at = size, left = n;
    char buf[16384];

    if (n == 0)
        return size;
    if (size > MB_LOGFILE_TAIL_MAX_BYTES && first < size - MB_LOGFILE_TAIL_MAX_BYTES)
        first = size - MB_LOGFILE_TAIL_MAX_BYTES;
    while (at > first) {
        size_t want = at - first < sizeof buf ? (size_t)(at - first) : sizeof buf;

        if (pread(f->fd, buf, want, (off_t)(at - want)) != (ssize_t)want)
            return first;
        for (size_t i = want; i-- > 0;) {
            uint64_t pos = at - want + i;

            if (buf[i] == '\n' && pos != size - 1 && --left == 0)
                return pos + 1;
        }
        at -= want;
    }
    return first == 0 || first == mb_logfile_first(f) ? first : next_line(f, first, size);
}

/* The index of the first time that is later than unix_ms (by_time) or beyond an offset. */
static size_t search(int index_fd, size_t n, uint64_t value, int by_time)
{
    size_t low = 0, high = n;

    while (low < high) {
        size_t mid = low + (high - low) / 2;
        struct mb_logfile_time t;

        if (get_time(index_fd, mid, &t) != 0)
            return low;
        if ((by_time ? t.unix_ms : t.offset) > value)
            high = mid;
        else
            low = mid + 1;
    }
    return low;
}

uint64_t mb_logfile_since(const struct mb_logfile *f, uint64_t unix_ms)
{
    uint64_t first = mb_logfile_first(f);
    struct mb_logfile_time t = {0};
    size_t at;

    if (f->index_fd < 0)
        return first;
    at = search(f->index_fd, n_times(f->index_fd), unix_ms, 1);
    if (at > 0 && get_time(f->index_fd, at - 1, &t) == 0 && t.offset > first)
        return t.offset;
    return first;
}

size_t mb_logfile_times(const struct mb_logfile *f, uint64_t from, struct mb_logfile_time *out,
                        size_t max)
{
    size_t n = f->index_fd >= 0 ? n_times(f->index_fd) : 0;
    size_t at = n > 0 ? search(f->index_fd, n, from, 0) : 0, got = 0;

    while (got < max && at < n && get_time(f->index_fd, at, &out[got]) == 0) {
        at++;
        got++;
    }
    return got;
}
