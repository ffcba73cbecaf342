/*
 * Files.
 *
 *  Atomic write: 1. create a unique temporary name beside the target; 2. write everything;
 *  3. fsync the file, so that the name never points at missing bytes; 4. rename; 5. fsync the
 *  directory, so that the name survives power loss. A failure in 1-4 removes the temporary file
 *  and leaves the old target as it was; a failure in 5 reports, with the new file in place.
 *
 *  Remove: directories are opened with O_NOFOLLOW relative to their parent, so that nobody can
 *  swap a directory for a link between look and step; links themselves are unlinked. What is
 *  mounted in the tree is somebody else's: it stays, and is named. A directory below
 *  REMOVE_MAX_DEPTH others is moved to the root of the tree first, so that neither descriptors nor
 *  stack grow with a tree that somebody else made.
 */
#include "base/fs.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"

enum { READ_CHUNK_BYTES = 64 * 1024, REMOVE_MAX_DEPTH = 64 };

char *mb_path_join(const char *a, const char *b)
{
    size_t a_len = strlen(a);

    if (b[0] == '/' || a_len == 0)
        return mb_strdup(b);
    while (a_len > 1 && a[a_len - 1] == '/')
        a_len--;
    if (a_len == 1 && a[0] == '/')
        a_len = 0;
    return mb_asprintf("%.*s/%s", (int)a_len, a, b);
}

static int make_one_dir(const char *path, mode_t mode, struct mb_err *err)
{
    struct stat st;

    if (mkdir(path, mode) == 0)
        return 0;
    if (errno != EEXIST)
        return mb_err_sys(err, errno, "mkdir %s", path);
    if (stat(path, &st) != 0)
        return mb_err_sys(err, errno, "stat %s", path);
    if (!S_ISDIR(st.st_mode))
        return mb_err_set(err, MB_EEXIST, "%s exists and is not a directory", path);
    return 0;
}

int mb_fs_mkdir_p(const char *path, mode_t mode, struct mb_err *err)
{
    char *copy = mb_strdup(path);
    int rc = 0;

    if (copy == NULL)
        return mb_err_set(err, MB_ENOMEM, "mkdir %s: out of memory", path);
    for (char *at = copy + 1; copy[0] != '\0' && rc == 0; at++) {
        char c = *at;

        if (c != '/' && c != '\0')
            continue;
        *at = '\0';
        rc = make_one_dir(copy, mode, err);
        *at = c;
        if (c == '\0')
            break;
    }
    if (copy[0] == '\0')
        rc = mb_err_set(err, MB_EINVAL, "mkdir: the path is empty");
    mb_free(copy);
    return rc;
}

static int read_fd(int fd, const char *path, size_t max_bytes, struct mb_buf *out,
                   struct mb_err *err)
{
    size_t total_bytes = 0;

    for (;;) {
        ssize_t n;

        if (mb_buf_reserve(out, READ_CHUNK_BYTES) != 0)
            return mb_err_set(err, MB_ENOMEM, "read %s: out of memory", path);
        n = read(fd, out->data + out->len, READ_CHUNK_BYTES);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return mb_err_sys(err, errno, "read %s", path);
        if (n == 0)
            return 0;
        total_bytes += (size_t)n;
        if (total_bytes > max_bytes)
            return mb_err_set(err, MB_EFULL, "%s is larger than %zu bytes", path, max_bytes);
        out->len += (size_t)n;
        out->data[out->len] = '\0';
    }
}

/* A FIFO is opened without waiting for a writer, and read as far as writers go. */
int mb_fs_read(const char *path, size_t max_bytes, struct mb_buf *out, struct mb_err *err)
{
    size_t old_len = out->len;
    struct stat st;
    int is_fifo = stat(path, &st) == 0 && S_ISFIFO(st.st_mode);
    int fd = open(path, O_RDONLY | O_CLOEXEC | (is_fifo ? O_NONBLOCK : 0));
    int rc;

    if (fd < 0)
        return mb_err_sys(err, errno, "open %s", path);
    if (is_fifo)
        fcntl(fd, F_SETFL, 0);
    rc = read_fd(fd, path, max_bytes, out, err);
    if (rc == 0 && is_fifo && out->len == old_len)
        rc = mb_err_set(err, MB_EINVAL, "%s is a pipe that nobody writes to", path);
    close(fd);
    if (rc != 0 && out->data != NULL) {
        out->len = old_len;
        out->data[old_len] = '\0';
    }
    return rc;
}

int mb_fs_write_all(int fd, const void *p, size_t n, struct mb_err *err)
{
    const uint8_t *at = p;

    while (n > 0) {
        ssize_t done = write(fd, at, n);

        if (done < 0) {
            if (errno == EINTR)
                continue;
            return mb_err_sys(err, errno, "write");
        }
        at += done;
        n -= (size_t)done;
    }
    return 0;
}

/* Directory part of path ("." if it has none), owned by the caller. */
static char *parent_of(const char *path)
{
    const char *slash = strrchr(path, '/');

    if (slash == NULL)
        return mb_strdup(".");
    if (slash == path)
        return mb_strdup("/");
    return mb_strndup(path, (size_t)(slash - path));
}

static int write_new_file(const char *path, const void *p, size_t n, mode_t mode, int flush,
                          struct mb_err *err)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, mode);
    int rc;

    if (fd < 0)
        return mb_err_sys(err, errno, "create %s", path);
    rc = mb_fs_write_all(fd, p, n, err);
    if (rc != 0)
        mb_err_wrap(err, "%s", path);
    else if (flush && fsync(fd) != 0)
        rc = mb_err_sys(err, errno, "fsync %s", path);
    if (close(fd) != 0 && rc == 0)
        rc = mb_err_sys(err, errno, "close %s", path);
    if (rc != 0)
        unlink(path);
    return rc;
}

static int replace(const char *path, const void *p, size_t n, mode_t mode, int flush,
                   struct mb_err *err)
{
    char *tmp = mb_asprintf("%s.tmp-%016llx", path, (unsigned long long)mb_random_u64());
    int rc;

    if (tmp == NULL)
        return mb_err_set(err, MB_ENOMEM, "write %s: out of memory", path);
    rc = write_new_file(tmp, p, n, mode, flush, err);
    if (rc == 0 && rename(tmp, path) != 0) {
        rc = mb_err_sys(err, errno, "rename %s to %s", tmp, path);
        unlink(tmp);
    }
    mb_free(tmp);
    return rc;
}

int mb_fs_replace(const char *path, const void *p, size_t n, mode_t mode, struct mb_err *err)
{
    return replace(path, p, n, mode, 0, err);
}

int mb_fs_write_atomic(const char *path, const void *p, size_t n, mode_t mode, struct mb_err *err)
{
    char *dir = parent_of(path);
    int rc;

    if (dir == NULL)
        return mb_err_set(err, MB_ENOMEM, "write %s: out of memory", path);
    rc = replace(path, p, n, mode, 1, err);
    if (rc == 0)
        rc = mb_fs_sync_dir(dir, err);
    mb_free(dir);
    return rc;
}

int mb_fs_sync_dir(const char *path, struct mb_err *err)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc = 0;

    if (fd < 0)
        return mb_err_sys(err, errno, "open directory %s", path);
    if (fsync(fd) != 0)
        rc = mb_err_sys(err, errno, "fsync directory %s", path);
    close(fd);
    return rc;
}

/* A directory tree on its way out. */
struct removal {
    int top_fd;     /* of the tree's root; -1 before it is open */
    unsigned depth; /* directories open now */
    unsigned moved; /* up to the root since it was last listed */
};

static int remove_at(struct removal *r, int parent_fd, const char *name, struct mb_err *err);

static int remove_entries(struct removal *r, DIR *dir, const char *name, struct mb_err *err)
{
    for (;;) {
        struct dirent *entry;
        int rc;

        errno = 0;
        entry = readdir(dir);
        if (entry == NULL)
            return errno == 0 ? 0 : mb_err_sys(err, errno, "read directory %s", name);
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        rc = remove_at(r, dirfd(dir), entry->d_name, err);
        if (rc != 0) {
            mb_err_wrap(err, "%s", name);
            return rc;
        }
    }
}

/* Each level holds a descriptor: what lies too deep continues at the root of the tree. */
static int move_up(struct removal *r, int parent_fd, const char *name, struct mb_err *err)
{
    char moved[32];

    snprintf(moved, sizeof(moved), ".removed-%016llx", (unsigned long long)mb_random_u64());
    if (renameat(parent_fd, name, r->top_fd, moved) != 0)
        return errno == ENOENT ? 0 : mb_err_sys(err, errno, "move %s", name);
    r->moved++;
    return 0;
}

/* A kernel without openat2, or a container that refuses it: a bind mount of the same filesystem
 * cannot be told from a directory there. */
static int open_on_same_device(int parent_fd, const char *name, int flags)
{
    int fd = openat(parent_fd, name, flags), reason = 0;
    struct stat parent, st;

    if (fd < 0)
        return -1;
    if (fstat(parent_fd, &parent) != 0 || fstat(fd, &st) != 0)
        reason = errno;
    else if (parent.st_dev != st.st_dev)
        reason = EXDEV;
    if (reason == 0)
        return fd;
    close(fd);
    errno = reason;
    return -1;
}

/* EXDEV: another filesystem, or a bind mount, begins there. */
static int open_below(int parent_fd, const char *name, int flags)
{
    struct open_how how = {.flags = (unsigned)flags, .resolve = RESOLVE_NO_XDEV};
    long fd = syscall(SYS_openat2, parent_fd, name, &how, sizeof(how));

    if (fd < 0 && (errno == ENOSYS || errno == EPERM))
        return open_on_same_device(parent_fd, name, flags);
    return (int)fd;
}

static int remove_dir_at(struct removal *r, int parent_fd, const char *name, struct mb_err *err)
{
    const int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
    int is_top = r->depth == 0;
    DIR *dir;
    int rc;
    int fd;

    if (r->depth == REMOVE_MAX_DEPTH)
        return move_up(r, parent_fd, name, err);
    fd = is_top ? openat(parent_fd, name, flags) : open_below(parent_fd, name, flags);
    if (fd < 0 && errno == EXDEV)
        return mb_err_sys(err, EXDEV, "%s is a mount point and stays", name);
    if (fd < 0)
        return errno == ENOENT ? 0 : mb_err_sys(err, errno, "open directory %s", name);
    dir = fdopendir(fd);
    if (dir == NULL) {
        rc = mb_err_sys(err, errno, "open directory %s", name);
        close(fd);
        return rc;
    }
    if (is_top)
        r->top_fd = fd;
    r->depth++;
    do {
        r->moved = is_top ? 0 : r->moved;
        rewinddir(dir);
        rc = remove_entries(r, dir, name, err);
    } while (rc == 0 && is_top && r->moved > 0);
    r->depth--;
    closedir(dir);
    if (rc == 0 && unlinkat(parent_fd, name, AT_REMOVEDIR) != 0 && errno != ENOENT)
        rc = mb_err_sys(err, errno, "rmdir %s", name);
    return rc;
}

static int remove_at(struct removal *r, int parent_fd, const char *name, struct mb_err *err)
{
    if (unlinkat(parent_fd, name, 0) == 0 || errno == ENOENT)
        return 0;
    /* Linux says EISDIR for a directory; POSIX also allows EPERM. */
    if (errno == EISDIR || errno == EPERM)
        return remove_dir_at(r, parent_fd, name, err);
    return mb_err_sys(err, errno, "unlink %s", name);
}

int mb_fs_remove_tree(const char *path, struct mb_err *err)
{
    struct removal r = {.top_fd = -1};

    return remove_at(&r, AT_FDCWD, path, err);
}

uint64_t mb_fs_stretch(int fd, uint64_t offset, uint64_t n, int *is_hole)
{
    off_t at = (off_t)offset, data = lseek(fd, at, SEEK_DATA), end = -1;
    struct stat st;

    *is_hole = data > at;
    if (data >= 0) {
        end = *is_hole ? data : lseek(fd, at, SEEK_HOLE);
    } else if (errno == ENXIO && fstat(fd, &st) == 0 && st.st_size > at) { /* up to the end */
        *is_hole = 1;
        end = st.st_size;
    }
    return end > at && (uint64_t)(end - at) < n ? (uint64_t)(end - at) : n;
}

int mb_fs_exists(const char *path)
{
    return access(path, F_OK) == 0;
}

uint64_t mb_fs_open_files_max(void)
{
    struct rlimit files, wanted;

    if (getrlimit(RLIMIT_NOFILE, &files) != 0)
        return 0;
    wanted = (struct rlimit){files.rlim_max, files.rlim_max};
    return setrlimit(RLIMIT_NOFILE, &wanted) == 0 ? wanted.rlim_cur : files.rlim_cur;
}

char *mb_fs_self_dir(struct mb_err *err)
{
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 1);
    char *dir;

    if (n < 0) {
        mb_err_sys(err, errno, "readlink /proc/self/exe");
        return NULL;
    }
    path[n] = '\0';
    dir = parent_of(path);
    if (dir == NULL)
        mb_err_set(err, MB_ENOMEM, "directory of the executable: out of memory");
    return dir;
}
