/*
 *  1. Write: a name of its own, the lock, the bytes, fsync, rename; then the lock goes. One who
 *     sweeps may have come between name and lock and taken the file for one that was left: then it
 *     has no name any more, and there is another try.
 *  2. Sweep: of each name that looks like one of 1. the lock without waiting; if it is had and the
 *     name still says that file, the writer is gone, and the name goes before the lock.
 * Failures: what the file system says, naming the file; a directory that has no locks is written to
 * without.
 */
#include "worker/data/cache_files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/str.h"

enum { FILE_MODE = 0666, TRIES = 8, HEX_DIGITS = 16 };

static const char TEMPORARY[] = ".tmp-";

/* ---- write ---- */

/* Takes the lock, if there are any here. *is_gone 1: the file has lost its name by then. */
static int lock_own(int fd, const char *path, int *is_gone, struct mb_err *err)
{
    struct stat st;
    int rc;
    do {
        rc = flock(fd, LOCK_EX);
    } while (rc != 0 && errno == EINTR);
    /* Without locks nobody sweeps. */
    if (fstat(fd, &st) != 0) {
        return mb_err_sys(err, errno, "stat %s", path);
    }
    *is_gone = st.st_nlink == 0;
    return 0;
}

/* *fd has the lock, and temporary is its name. */
static int create(const char *path, char **temporary, int *fd, struct mb_err *err)
{
    for (int i = 0; i < TRIES; i++) {
        int is_gone = 0;
        *temporary = mb_asprintf("%s%s%016" PRIx64, path, TEMPORARY, mb_random_u64());
        if (*temporary == NULL) {
            return mb_err_set(err, MB_ENOMEM, "write %s: out of memory", path);
        }
        *fd = open(*temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, FILE_MODE);
        if (*fd < 0) {
            return mb_err_sys(err, errno, "create %s", *temporary);
        }
        int rc = lock_own(*fd, *temporary, &is_gone, err);
        if (rc != 0 || !is_gone) {
            return rc;
        }
        close(*fd);
        *fd = -1;
        mb_free(*temporary);
        *temporary = NULL;
    }
    return mb_err_set(err, MB_EUNAVAIL, "create %s: others remove what is made to write it", path);
}

static int write_both(int fd, const char *name, const void *head, size_t n_head, const void *body,
                      size_t n_body, struct mb_err *err)
{
    int rc = mb_fs_write_all(fd, head, n_head, err);
    if (rc == 0) {
        rc = mb_fs_write_all(fd, body, n_body, err);
    }
    if (rc != 0) {
        return mb_err_wrap(err, "%s", name);
    }
    return fsync(fd) == 0 ? 0 : mb_err_sys(err, errno, "fsync %s", name);
}

int mb_cache_file_write(const char *path, const void *head, size_t n_head, const void *body,
                        size_t n_body, struct mb_err *err)
{
    char *temporary = NULL;
    int fd = -1;
    int rc = create(path, &temporary, &fd, err);
    if (rc == 0) {
        rc = write_both(fd, temporary, head, n_head, body, n_body, err);
    }
    if (rc == 0 && rename(temporary, path) != 0) {
        rc = mb_err_sys(err, errno, "rename %s to %s", temporary, path);
    }
    if (rc != 0 && fd >= 0) {
        unlink(temporary);
    }
    if (fd >= 0 && close(fd) != 0 && rc == 0) {
        rc = mb_err_sys(err, errno, "close %s", path);
    }
    mb_free(temporary);
    return rc;
}

/* ---- sweep ---- */

/* "...-sample_index.npy.tmp-0123456789abcdef", "...-description.txt.tmp-..." */
static int is_unfinished(const char *name)
{
    static const char *const ENDS[] = {"_index.npy", "-description.txt"};
    const size_t n = strlen(name), n_tail = sizeof TEMPORARY - 1 + HEX_DIGITS;
    if (n <= n_tail || strncmp(name + n - n_tail, TEMPORARY, sizeof TEMPORARY - 1) != 0 ||
        strspn(name + n - HEX_DIGITS, "0123456789abcdef") != HEX_DIGITS) {
        return 0;
    }
    for (size_t i = 0; i < sizeof ENDS / sizeof ENDS[0]; i++) {
        const size_t k = strlen(ENDS[i]);
        if (n - n_tail >= k && strncmp(name + n - n_tail - k, ENDS[i], k) == 0) {
            return 1;
        }
    }
    return 0;
}

/* 1: it is removed, and had *n_bytes. */
static int remove_left(int dir, const char *name, uint64_t *n_bytes)
{
    struct stat st, of_name;
    /* Some file systems lock for writing what is open for it only. */
    const int fd = openat(dir, name, O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) {
        return 0;
    }
    const int is_left =
        fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && flock(fd, LOCK_EX | LOCK_NB) == 0 &&
        fstatat(dir, name, &of_name, AT_SYMLINK_NOFOLLOW) == 0 && of_name.st_dev == st.st_dev &&
        of_name.st_ino == st.st_ino && unlinkat(dir, name, 0) == 0;
    *n_bytes = is_left ? (uint64_t)st.st_size : 0;
    close(fd);
    return is_left;
}

int mb_cache_files_sweep(const char *dir, size_t *n_files, uint64_t *n_bytes, struct mb_err *err)
{
    DIR *d = opendir(dir);
    const struct dirent *e;
    *n_files = 0;
    *n_bytes = 0;
    if (d == NULL) {
        return mb_err_sys(err, errno, "open directory %s", dir);
    }
    while ((e = readdir(d)) != NULL) {
        uint64_t bytes;
        if (is_unfinished(e->d_name) && remove_left(dirfd(d), e->d_name, &bytes)) {
            *n_files += 1;
            *n_bytes += bytes;
        }
    }
    closedir(d);
    return 0;
}
