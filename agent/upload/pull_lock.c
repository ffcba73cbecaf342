/*
 * Every puller holds a shared lock on DIR/.mobula-pull.lock; who gets it alone knows that no other
 * is alive. A big file has a lock of its own, PATH.mobula-lock, so that one fetches and the others
 * wait. Lock files are removed by who holds them alone, so whoever locks one looks whether it still
 * has its name. A puller that is killed leaves its temporary files and locks: the next one that
 * comes alone removes them, before another can be there that has some.
 */
#include "agent/upload/pull_lock.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"

#define DIR_LOCK  ".mobula-pull.lock"
#define FILE_LOCK MB_PULL_LOCK

enum { TRIES = 20, DEPTH_MAX = 16, ENTER_LOOK_MS = 50, ENTER_LOOKS = 600 };

int mb_pull_is_temp(const char *name)
{
    for (const char *at = strstr(name, MB_PULL_TEMP); at; at = strstr(at + 1, MB_PULL_TEMP)) {
        const char *rest = at + strlen(MB_PULL_TEMP);
        size_t digits = strspn(rest, "0123456789");

        rest += digits;
        if (digits == 0 || at == name)
            continue;
        if (!*rest)
            return 1;
        if (strncmp(rest, ".mobula-tmp-", 12) == 0 && strspn(rest + 12, "0123456789abcdef") == 16 &&
            !rest[28])
            return 1;
    }
    return 0;
}

/* Another file may have the name by now. */
static int is_named(const char *path, const struct stat *here)
{
    struct stat named;

    return stat(path, &named) == 0 && here->st_ino == named.st_ino && here->st_dev == named.st_dev;
}

/* A lock of a file that nobody holds goes. It is empty: a file of a checkpoint may have such a
 * name, too. It is held until it is gone, since a puller may be there that has no lock of the
 * directory: one that takes it meanwhile finds that it has lost its name (lock() below). */
static int remove_lock(const char *path, const struct stat *st)
{
    struct stat here;
    int fd, gone = 0;

    if (!mb_ends_with(path, FILE_LOCK) || !S_ISREG(st->st_mode) || st->st_size > 0)
        return 0;
    fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0 && fstat(fd, &here) == 0)
        gone = is_named(path, &here) && here.st_size == 0 && unlink(path) == 0;
    if (fd >= 0)
        close(fd);
    return gone;
}

/* keeps() may look through a whole manifest, so it is asked for names only that a puller gives. */
static int may_be_left(const char *name)
{
    return mb_pull_is_temp(name) || mb_ends_with(name, FILE_LOCK);
}

/* top_len: of the directory's own path and its slash. */
static void remove_left(const char *dir, size_t top_len, int depth, mb_pull_keeps keeps, void *arg)
{
    DIR *d = depth < DEPTH_MAX ? opendir(dir) : NULL;
    struct dirent *e;

    while (d && (e = readdir(d))) {
        char *path;
        struct stat st;

        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        path = mb_path_join(dir, e->d_name);
        if (path && lstat(path, &st) == 0) {
            if (S_ISDIR(st.st_mode))
                remove_left(path, top_len, depth + 1, keeps, arg);
            else if (!may_be_left(e->d_name) || (keeps && keeps(arg, path + top_len)))
                ; /* a checkpoint's file may have such a name */
            else if (mb_pull_is_temp(e->d_name) ? unlink(path) == 0 : remove_lock(path, &st))
                mb_info("pull", "removed what a puller that is dead left: %s", path);
        }
        mb_free(path);
    }
    if (d)
        closedir(d);
}

void mb_pull_remove_temp(const char *path)
{
    const char *name = strrchr(path, '/') + 1;
    char *parent = mb_strndup(path, (size_t)(name - path));
    DIR *d = parent ? opendir(parent) : NULL;
    struct dirent *e;

    while (d && (e = readdir(d)))
        if (mb_starts_with(e->d_name, name) && mb_pull_is_temp(e->d_name))
            unlinkat(dirfd(d), e->d_name, 0);
    if (d)
        closedir(d);
    mb_free(parent);
}

/* An open file that still has this name, locked so; -1 with errno, EWOULDBLOCK for somebody else's.
 */
static int lock(const char *path, int how)
{
    for (int i = 0; i < TRIES; i++) {
        struct stat here;
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);

        if (fd < 0)
            return -1;
        if (flock(fd, how | LOCK_NB) != 0) {
            int saved = errno;

            close(fd);
            errno = saved;
            return -1;
        }
        if (fstat(fd, &here) == 0 && is_named(path, &here))
            return fd;
        close(fd);
    }
    errno = EAGAIN;
    return -1;
}

int mb_pull_enter(const char *dir, mb_pull_keeps keeps, void *arg)
{
    char *path = mb_path_join(dir, DIR_LOCK);
    const struct timespec pause = {.tv_nsec = ENTER_LOOK_MS * 1000000L};
    int fd = -1;

    if (!path || mb_fs_mkdir_p(dir, 0777, NULL) != 0) {
        mb_free(path);
        return -1;
    }
    for (int i = 0; fd < 0 && i < ENTER_LOOKS; i++) {
        fd = lock(path, LOCK_EX);
        if (fd >= 0) {
            remove_left(dir, strlen(dir) + 1, 0, keeps, arg);
            flock(fd, LOCK_SH); /* from exclusive to shared nobody is waited for */
            break;
        }
        fd = lock(path, LOCK_SH);
        if (fd < 0 && errno != EWOULDBLOCK)
            break;
        if (fd < 0) /* one that came alone removes what the dead left: ours must not be there yet */
            nanosleep(&pause, NULL);
    }
    mb_free(path);
    return fd;
}

/* A lock that cannot become exclusive is lost, so it is taken anew. */
void mb_pull_tidy(const char *dir, int fd, mb_pull_keeps keeps, void *arg)
{
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0)
        remove_left(dir, strlen(dir) + 1, 0, keeps, arg);
    if (fd >= 0)
        flock(fd, LOCK_SH | LOCK_NB);
}

void mb_pull_leave(const char *dir, int fd)
{
    char *path = fd >= 0 ? mb_path_join(dir, DIR_LOCK) : NULL;

    if (path && flock(fd, LOCK_EX | LOCK_NB) == 0)
        unlink(path);
    if (fd >= 0)
        close(fd);
    mb_free(path);
}

int mb_pull_is_entered(const char *dir)
{
    char *path = mb_path_join(dir, DIR_LOCK);
    int fd = path ? open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW) : -1;
    int entered = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;

    if (fd >= 0)
        close(fd);
    mb_free(path);
    return entered;
}

static char *lock_of(const char *path)
{
    return mb_asprintf("%s" FILE_LOCK, path);
}

enum mb_pull_turn mb_pull_file_turn(const char *path, int *fd)
{
    char *name = lock_of(path);
    int saved;

    *fd = name ? lock(name, LOCK_EX) : -1;
    saved = errno;
    mb_free(name);
    if (*fd >= 0)
        return MB_PULL_OURS;
    return saved == EWOULDBLOCK || saved == EAGAIN ? MB_PULL_WAIT : MB_PULL_NO_LOCK;
}

void mb_pull_file_done(const char *path, int fd)
{
    char *name = fd >= 0 ? lock_of(path) : NULL;

    if (name)
        unlink(name);
    if (fd >= 0)
        close(fd);
    mb_free(name);
}
