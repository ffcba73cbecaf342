/* Preloaded into programs of the tests: a disk on which a file whose path ends in $BAD_DISK_FILE
 * cannot be opened for $BAD_DISK_OPEN, or not be read for $BAD_DISK_READ, which are numbers of
 * errno; or is not brought onto the disk before somebody has opened the pipe $BAD_DISK_HOLD for
 * writing and closed it. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

/* What a variable says, of that file. */
static const char *said(const char *path, const char *what)
{
    const char *file = getenv("BAD_DISK_FILE"), *value = getenv(what);
    const size_t n = strlen(path), k = file != NULL ? strlen(file) : 0;

    return file != NULL && k <= n && strcmp(path + n - k, file) == 0 ? value : NULL;
}

static const char *said_of_open(int fd, const char *what)
{
    char link[32], path[4096] = "";

    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    return readlink(link, path, sizeof path - 1) > 0 ? said(path, what) : NULL;
}

static int fails(const char *number)
{
    if (number != NULL)
        errno = atoi(number);
    return number != NULL;
}

static int opened(const char *name, const char *path, int flags, mode_t mode)
{
    int (*real)(const char *, int, ...);

    if (fails(said(path, "BAD_DISK_OPEN")))
        return -1;
    *(void **)&real = dlsym(RTLD_NEXT, name);
    return real(path, flags, mode);
}

static mode_t mode_of(int flags, va_list ap)
{
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(ap, mode_t) : 0;
}

int open(const char *path, int flags, ...)
{
    va_list ap;

    va_start(ap, flags);
    const mode_t mode = mode_of(flags, ap);
    va_end(ap);
    return opened("open", path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
    va_list ap;

    va_start(ap, flags);
    const mode_t mode = mode_of(flags, ap);
    va_end(ap);
    return opened("open64", path, flags, mode);
}

static ssize_t read_at(const char *name, int fd, void *buf, size_t n, off_t at)
{
    ssize_t (*real)(int, void *, size_t, off_t);

    if (fails(said_of_open(fd, "BAD_DISK_READ")))
        return -1;
    *(void **)&real = dlsym(RTLD_NEXT, name);
    return real(fd, buf, n, at);
}

ssize_t pread(int fd, void *buf, size_t n, off_t at)
{
    return read_at("pread", fd, buf, n, at);
}

ssize_t pread64(int fd, void *buf, size_t n, off_t at)
{
    return read_at("pread64", fd, buf, n, at);
}

int fsync(int fd)
{
    const char *pipe = said_of_open(fd, "BAD_DISK_HOLD");
    const int held = pipe != NULL ? open(pipe, O_RDONLY | O_CLOEXEC) : -1;
    int (*real)(int);
    char byte;

    if (held >= 0) {
        while (read(held, &byte, 1) > 0)
            continue;
        close(held);
    }
    *(void **)&real = dlsym(RTLD_NEXT, "fsync");
    return real(fd);
}
