/*
 * Removing an iteration.
 *
 *  1. Open its directory and lock it: who reads it with a shared lock keeps it. A file system
 *     without locks for directories (NFS) leaves only 3.
 *  2. Walk it: every file is in the manifest with its size, or the directory stays. So what a later
 *     run has put there instead stays, and what nobody has uploaded. Sizes are alike from one save
 *     to the next: unless no file was touched since the uploader sealed it, each is read, and has
 *     to have the manifest's checksum. Without a manifest only the former will do.
 *  3. Look for processes that have something of it open and at the tracker file, rename it, and
 *     look again: nobody can come in by its name any more. Somebody did in between: it gets its
 *     name back. The lock is held all the while.
 *  4. Remove what has the hidden name.
 * Failures: the text names the directory. A kill leaves a hidden directory, which the next listing
 * removes, once it has the lock of it: another node that shares the directory may be at 3, or a
 * reader may hold it. Processes that /proc does not show us (of other users, machines or
 * namespaces) are not seen; what they have open they can read on, on a local file system.
 */
#include "agent/upload/evict.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include "agent/upload/pull_lock.h"
#include "agent/upload/push_hash.h"
#include "agent/upload/walk.h"
#include "base/alloc.h"
#include "base/buf.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"

#define HIDDEN ".mobula-evicted-"

enum { TRACKER_MAX_BYTES = 64 };

/* ---- what is there ---- */

static int64_t named_in(const char *dir)
{
    char *path = mb_path_join(dir, MB_LATEST_KEY);
    struct mb_buf text = {0};
    int64_t named = -1;

    if (path == NULL || mb_fs_read(path, TRACKER_MAX_BYTES, &text, NULL) != MB_OK ||
        mb_latest_parse(mb_buf_str(&text), text.len, &named, NULL) != MB_OK)
        named = -1;
    mb_buf_close(&text);
    mb_free(path);
    return named;
}

/* ---- who uses it ---- */

int mb_evict_hold(const char *dir)
{
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    if (fd >= 0 && flock(fd, LOCK_SH | LOCK_NB) != 0) {
        close(fd);
        fd = -1;
    }
    return fd;
}

static int is_below(const char *path, const char *dir)
{
    size_t n = strlen(dir);

    return strncmp(path, dir, n) == 0 && (path[n] == '/' || path[n] == '\0');
}

/* 1: the process has something below dir open; not by our own fd. */
static int has_open(const char *pid, const char *dir, int own_fd)
{
    int is_us = atoi(pid) == (int)getpid(), found = 0;
    char at[64];
    struct dirent *e;
    DIR *fds;

    snprintf(at, sizeof(at), "/proc/%.20s/fd", pid);
    fds = opendir(at);
    while (fds != NULL && !found && (e = readdir(fds)) != NULL) {
        char target[4096];
        ssize_t n = readlinkat(dirfd(fds), e->d_name, target, sizeof(target) - 1);

        if (n <= 0 || (is_us && atoi(e->d_name) == own_fd))
            continue;
        target[n] = '\0';
        found = is_below(target, dir);
    }
    if (fds != NULL)
        closedir(fds);
    return found;
}

/* 1, and who: the pid of the first that is found. */
static int is_open(const char *path, int own_fd, int *who)
{
    char *dir = realpath(path, NULL);
    DIR *proc = dir != NULL ? opendir("/proc") : NULL;
    struct dirent *e;
    int found = 0;

    while (proc != NULL && !found && (e = readdir(proc)) != NULL)
        if (e->d_name[0] >= '1' && e->d_name[0] <= '9' && has_open(e->d_name, dir, own_fd)) {
            *who = atoi(e->d_name);
            found = 1;
        }
    if (proc != NULL)
        closedir(proc);
    free(dir); /* realpath's own */
    return found;
}

/* The directory, open, and locked where its file system has locks for directories. On failure *fd
 * is to be closed as well, unless it is -1. */
static int lock(const char *path, int *fd, struct mb_err *err)
{
    struct stat ours, named;

    *fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (*fd < 0)
        return mb_err_sys(err, errno, "%s", path);
    if (flock(*fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        return mb_err_set(err, MB_ESTATE, "%s: somebody holds a lock on it", path);
    if (stat(path, &named) != 0 || fstat(*fd, &ours) != 0)
        return mb_err_sys(err, errno, "%s", path);
    if (ours.st_ino != named.st_ino || ours.st_dev != named.st_dev) /* renamed until we had it */
        return mb_err_set(err, MB_ESTATE, "%s: it changes while it is looked at", path);
    return MB_OK;
}

/* ---- the list ---- */

/* What a removal that was killed left, or what another node removes just now. */
static void remove_left(const char *dir, const char *name)
{
    char *path = mb_path_join(dir, name);
    struct mb_err err = {0};
    int fd = -1, who = 0;
    int rc = path != NULL ? lock(path, &fd, &err)
                          : mb_err_set(&err, MB_ENOMEM, "no memory to look into %s", dir);

    if (rc == MB_OK && is_open(path, fd, &who))
        rc = mb_err_set(&err, MB_ESTATE, "%s: process %d has it open", path, who);
    if (rc == MB_OK)
        rc = mb_fs_remove_tree(path, &err);
    if (rc != MB_OK && rc != MB_ENOENT)
        mb_warn("upload", "what is left of an older checkpoint stays: %s", err.text);
    if (fd >= 0)
        close(fd);
    mb_free(path);
}

/* The hidden ones are removed while it is read. */
static int remove_all_left(const char *dir, struct mb_err *err)
{
    DIR *d = opendir(dir);
    struct dirent *e;

    if (d == NULL)
        return mb_err_sys(err, errno, "%s", dir);
    while ((e = readdir(d)) != NULL)
        if (mb_starts_with(e->d_name, HIDDEN))
            remove_left(dir, e->d_name);
    closedir(d);
    return MB_OK;
}

int mb_evict_list(const char *dir, int64_t newest, struct mb_evict_list *out, struct mb_err *err)
{
    int rc = remove_all_left(dir, err);

    *out = (struct mb_evict_list){.named = -1};
    if (rc == MB_OK)
        rc = mb_walk_iterations(dir, 0, newest, &out->iterations, &out->n, err);
    if (rc != MB_OK)
        return rc;
    for (size_t i = 0; i < out->n / 2; i++) { /* ascending */
        int64_t x = out->iterations[i];

        out->iterations[i] = out->iterations[out->n - 1 - i];
        out->iterations[out->n - 1 - i] = x;
    }
    out->named = named_in(dir);
    return MB_OK;
}

void mb_evict_list_close(struct mb_evict_list *l)
{
    mb_free(l->iterations);
    *l = (struct mb_evict_list){.named = -1};
}

/* ---- removing ---- */

static int by_path(const void *a, const void *b)
{
    return strcmp(((const struct mb_manifest_file *)a)->path,
                  ((const struct mb_manifest_file *)b)->path);
}

/* MB_EEXIST: the file is not the one that the manifest lists. */
static int check_file(const char *path, const struct mb_upload_file *here,
                      const struct mb_manifest_file *f, int is_as_sealed, const atomic_int *stop,
                      struct mb_err *err)
{
    uint64_t crc = 0;
    char *full;
    int rc;

    if (f == NULL || f->size_bytes != here->size_bytes)
        return mb_err_set(err, MB_EEXIST, "%s/%s is %s", path, here->path,
                          f == NULL ? "not in the store" : "of another size in the store");
    if (is_as_sealed)
        return MB_OK;
    full = mb_path_join(path, here->path);
    rc = full != NULL ? mb_file_crc64nvme(full, f->size_bytes, stop, &crc, err)
                      : mb_err_set(err, MB_ENOMEM, "no memory for a path");
    mb_free(full);
    if (rc == MB_OK && crc != f->crc64nvme)
        rc = mb_err_set(err, MB_EEXIST, "%s/%s has other contents than in the store", path,
                        here->path);
    return rc;
}

static int check_walk(const char *path, const struct mb_walk *w, const struct mb_evict_proof *proof,
                      const atomic_int *stop, struct mb_err *err)
{
    int is_as_sealed = proof->state != 0 && mb_walk_state(w) == proof->state, rc = MB_OK;
    const struct mb_manifest *m = proof->manifest;

    if (m == NULL && !is_as_sealed)
        return mb_err_set(
            err, MB_EEXIST,
            "%s is not in the store any more, and nobody knows whether it is as it was", path);
    for (size_t i = 0; m != NULL && i < w->n && rc == MB_OK; i++) {
        const struct mb_manifest_file key = {.path = (char *)(uintptr_t)w->files[i].path};
        const struct mb_manifest_file *f = NULL;

        if (m->n_files > 0)
            f = bsearch(&key, m->files, m->n_files, sizeof(*m->files), by_path);
        rc = check_file(path, &w->files[i], f, is_as_sealed, stop, err);
    }
    return rc;
}

/* state: of the directory that was checked. */
static int check_contents(const char *path, const struct mb_evict_proof *proof,
                          const atomic_int *stop, uint64_t *state, struct mb_err *err)
{
    struct mb_walk w;
    int rc = mb_walk_dir(path, &w);

    if (rc == MB_ESTATE)
        return mb_err_set(err, rc, "%s: it changes while it is looked at", path);
    if (rc != MB_OK)
        return mb_err_set(err, rc, "%s: it cannot be read whole", path);
    *state = mb_walk_state(&w);
    rc = check_walk(path, &w, proof, stop, err);
    mb_walk_close(&w);
    return rc;
}

/* Nobody has anything of it open, nothing was written since it was checked, and nobody loads it
 * next. */
static int check_unused(const char *dir, int64_t iteration, const char *path, int fd,
                        uint64_t state, const atomic_int *stop, struct mb_err *err)
{
    struct mb_walk w;
    int who = 0, rc;

    if (stop != NULL && atomic_load(stop))
        return mb_err_set(err, MB_ECANCELED, "%s: nobody waits any more", path);
    if (is_open(path, fd, &who))
        return mb_err_set(err, MB_ESTATE, "%s: process %d has it open", path, who);
    if (named_in(dir) == iteration)
        return mb_err_set(err, MB_ESTATE, "%s: the tracker file names it", path);
    rc = mb_walk_dir(path, &w);
    if (rc == MB_OK && mb_walk_state(&w) != state)
        rc = MB_ESTATE;
    mb_walk_close(&w);
    return rc == MB_OK ? MB_OK : mb_err_set(err, rc, "%s: it changes while it is looked at", path);
}

/* The directory is open as fd, and ours. */
static int remove_locked(const char *dir, int64_t iteration, const char *path, const char *hidden,
                         int fd, uint64_t state, const atomic_int *stop, struct mb_err *err)
{
    int rc = check_unused(dir, iteration, path, fd, state, stop, err);

    if (rc != MB_OK)
        return rc;
    if (rename(path, hidden) != 0)
        return mb_err_sys(err, errno, "%s: renaming it to %s", path, hidden);
    rc = check_unused(dir, iteration, hidden, fd, state, stop, err);
    if (rc != MB_OK)
        return rename(hidden, path) == 0
                   ? rc
                   : mb_err_sys(err, errno, "%s: renaming it to %s", hidden, path);
    return mb_fs_remove_tree(hidden, err);
}

int mb_evict(const char *dir, int64_t iteration, const struct mb_evict_proof *proof,
             const atomic_int *stop, struct mb_err *err)
{
    char name[MB_CHECKPOINT_KEY_MAX];
    char *path = mb_path_join(dir, mb_iteration_dir(iteration, name));
    char *hidden = mb_asprintf("%s/" HIDDEN "%s", dir, name);
    uint64_t state = 0;
    int fd = -1;
    int rc = path != NULL && hidden != NULL ? lock(path, &fd, err)
                                            : mb_err_set(err, MB_ENOMEM, "no memory for a path");

    if (rc == MB_OK && mb_pull_is_entered(path))
        rc = mb_err_set(err, MB_ESTATE, "%s: somebody pulls into it", path);
    if (rc == MB_OK)
        rc = check_contents(path, proof, stop, &state, err);
    if (rc == MB_OK)
        rc = remove_locked(dir, iteration, path, hidden, fd, state, stop, err);
    if (rc == MB_ENOENT) { /* another node that shares the directory was faster */
        mb_err_clear(err);
        rc = MB_OK;
    }
    if (fd >= 0)
        close(fd);
    mb_free(path);
    mb_free(hidden);
    return rc;
}
