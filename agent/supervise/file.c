/*
 * Replace: 1. open NAME.tmp; 2. write all; 3. fsync, if asked for; 4. rename over NAME. A failure
 * removes the temporary file and leaves NAME as it was. One writer per name is assumed: a
 * supervisor owns its directory, and an agent writes a spec before there is a supervisor.
 */
#include "agent/supervise/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static int write_all(int fd, const char *p, size_t n)
{
    while (n > 0) {
        ssize_t done = write(fd, p, n);

        if (done < 0) {
            if (errno == EINTR)
                continue;
            return -1;
        }
        p += done;
        n -= (size_t)done;
    }
    return 0;
}

int mb_file_replace(int dir_fd, const char *name, const void *p, size_t n, int flush)
{
    char tmp[4096 + 8];
    int saved, fd;

    if (snprintf(tmp, sizeof(tmp), "%s.tmp", name) >= (int)sizeof(tmp)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    fd = openat(dir_fd, tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0)
        return -1;
    if (write_all(fd, p, n) != 0 || (flush && fsync(fd) != 0)) {
        saved = errno;
        close(fd);
        unlinkat(dir_fd, tmp, 0);
        errno = saved;
        return -1;
    }
    close(fd);
    if (renameat(dir_fd, tmp, dir_fd, name) != 0) {
        saved = errno;
        unlinkat(dir_fd, tmp, 0);
        errno = saved;
        return -1;
    }
    return 0;
}

char *mb_file_read(int dir_fd, const char *name, size_t max_bytes, size_t *n_out)
{
    char *data = NULL;
    size_t n = 0;
    struct stat st;
    int saved, fd;

    fd = openat(dir_fd, name, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    if (fstat(fd, &st) != 0)
        goto fail;
    if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size > max_bytes) {
        errno = EFBIG;
        goto fail;
    }
    data = malloc((size_t)st.st_size + 1);
    if (data == NULL)
        goto fail;
    while (n < (size_t)st.st_size) {
        ssize_t got = read(fd, data + n, (size_t)st.st_size - n);

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            goto fail;
        if (got == 0)
            break;
        n += (size_t)got;
    }
    close(fd);
    data[n] = '\0';
    *n_out = n;
    return data;
fail:
    saved = errno;
    free(data);
    close(fd);
    errno = saved;
    return NULL;
}
