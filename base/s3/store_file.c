/*
 * file://: objects are files below a directory.
 *
 * 1. Every operation is a job on libuv's pool; whole-file copies run in steps of 32 MiB, so that
 *    progress, deadline and cancellation are seen between them.
 * 2. A write goes to a temporary name beside the object, is synced, then renamed into place and the
 *    directory synced: readers see the old object or the new one.
 * 3. Conditions are judged under a lock on the store's directory, which every write takes for the
 *    moment of its rename. The etag is made of the content: CRC64NVME and size.
 * Failures: a failed condition is MB_EEXIST, a source that changes while it is copied MB_ESTATE, a
 * full disk MB_EFULL; the temporary file is removed. A kill leaves at most a temporary file, which
 * listings hide and which nothing takes for an object. Its writer held a lock on it, so whoever can
 * take that lock knows that it is nobody's: it goes when uploads of its directory are aborted, and
 * before the next large file is written there.
 */
#include "base/s3/internal.h"

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
#include "base/checksum.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/str.h"

#define TEMP_PREFIX ".mobula-tmp-"

enum {
    STEP_BYTES = 32 * 1024 * 1024,
    BLOCK_BYTES = 256 * 1024,
    ETAG_BYTES = 48,
    SWEEP_FROM_BYTES = 16 * 1024 * 1024 /* reading a directory costs nothing beside so much */
};

struct file_store {
    char *root; /* without a slash at the end, but "/" itself */
};

struct job {
    uv_work_t work;
    struct mb_store_op *op;
    const char *root;
    char *object; /* path of the object, or of the directory where a listing starts */
    /* a copy in steps */
    int in_fd;
    int out_fd;
    char *temp;
    struct stat source;
    uint64_t copied_bytes;
    int copy_done;
};

/* ---- blocking pieces, run in the pool ---- */

static void format_etag(uint64_t crc, uint64_t size_bytes, char out[ETAG_BYTES])
{
    snprintf(out, ETAG_BYTES, "%016" PRIx64 "-%" PRIu64, crc, size_bytes);
}

/* Opens a regular file for reading; a directory is no object. */
static int open_object(const char *path, int *out_fd, struct stat *st, struct mb_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT || errno == ENOTDIR ? mb_err_set(err, MB_ENOENT, "no such object")
                                                   : mb_err_sys(err, errno, "open %s", path);
    if (fstat(fd, st) != 0 || !S_ISREG(st->st_mode)) {
        close(fd);
        return mb_err_set(err, MB_ENOENT, "no such object");
    }
    *out_fd = fd;
    return 0;
}

static int checksum_fd(int fd, uint64_t *crc, uint64_t *size_bytes, struct mb_err *err)
{
    uint8_t *block = mb_alloc(BLOCK_BYTES);
    int rc = block ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");
    *crc = 0;
    *size_bytes = 0;
    while (rc == 0) {
        ssize_t n = read(fd, block, BLOCK_BYTES);
        if (n == 0)
            break;
        if (n < 0 && errno != EINTR)
            rc = mb_err_sys(err, errno, "read");
        if (n > 0) {
            *crc = mb_crc64nvme(*crc, block, (size_t)n);
            *size_bytes += (uint64_t)n;
        }
    }
    mb_free(block);
    return rc;
}

static int etag_of(const char *path, char out[ETAG_BYTES], uint64_t *size_bytes, struct mb_err *err)
{
    struct stat st;
    uint64_t crc = 0;
    int fd = -1;
    int rc = open_object(path, &fd, &st, err);
    if (rc != 0)
        return rc;
    rc = checksum_fd(fd, &crc, size_bytes, err);
    close(fd);
    if (rc == 0)
        format_etag(crc, *size_bytes, out);
    return rc;
}

static char *dir_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash == path ? mb_strdup("/") : mb_strndup(path, (size_t)(slash - path));
}

/* A temporary file that nobody has locked has no writer. */
static void sweep_one(int dir_fd, const char *name)
{
    int fd = openat(dir_fd, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return;
    if (flock(fd, LOCK_EX | LOCK_NB) == 0)
        unlinkat(dir_fd, name, 0);
    close(fd);
}

/* What killed writers left in dir; what cannot be looked at stays. */
static void sweep_temps(const char *dir)
{
    struct dirent *entry;
    DIR *d = opendir(dir);
    while (d && (entry = readdir(d)))
        if (mb_starts_with(entry->d_name, TEMP_PREFIX))
            sweep_one(dirfd(d), entry->d_name);
    if (d)
        closedir(d);
}

static void sweep_beside(const char *path)
{
    char *dir = dir_of(path);
    if (dir)
        sweep_temps(dir);
    mb_free(dir);
}

/* 1: it is ours, and still there: a sweep may have come between its creation and its lock. On a
 * file system without locks nothing is swept. */
static int lock_temp(int fd)
{
    struct stat st;
    int rc;
    while ((rc = flock(fd, LOCK_EX)) != 0 && errno == EINTR)
        ;
    return fstat(fd, &st) != 0 || st.st_nlink > 0;
}

/* A new file beside path, its name in *temp (owned by the caller). Locked until it is closed, which
 * is after its rename. */
static int open_temp(const char *path, int *out_fd, char **temp, struct mb_err *err)
{
    char *dir = dir_of(path);
    int rc = dir ? mb_fs_mkdir_p(dir, 0777, err) : mb_err_set(err, MB_ENOMEM, "out of memory");
    while (rc == 0) {
        mb_free(*temp);
        *temp = mb_asprintf("%s/" TEMP_PREFIX "%016" PRIx64, dir, mb_random_u64());
        int fd = *temp ? open(*temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666) : -1;
        if (!*temp)
            rc = mb_err_set(err, MB_ENOMEM, "out of memory");
        else if (fd < 0)
            rc = mb_err_sys(err, errno, "create %s", *temp);
        *out_fd = fd;
        if (rc != 0 || lock_temp(fd))
            break;
        close(fd);
    }
    mb_free(dir);
    return rc;
}

static int sync_parent(const char *path, struct mb_err *err)
{
    char *dir = dir_of(path);
    int rc = dir ? mb_fs_sync_dir(dir, err) : mb_err_set(err, MB_ENOMEM, "out of memory");
    mb_free(dir);
    return rc;
}

/* The lock is on the directory itself, so that nothing foreign appears in it. */
static int lock_root(const char *root, int *out_fd, struct mb_err *err)
{
    int fd = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return mb_err_sys(err, errno, "open %s", root);
    while (flock(fd, LOCK_EX) != 0) {
        if (errno == EINTR)
            continue;
        int rc = mb_err_sys(err, errno, "lock %s", root);
        close(fd);
        return rc;
    }
    *out_fd = fd;
    return 0;
}

/* have: of what is there, "" for nothing, when the condition fails and is_file. */
static int check_condition(const char *path, enum mb_store_if cond, const char *etag, int is_file,
                           char have[ETAG_BYTES], struct mb_err *err)
{
    uint64_t size_bytes;
    have[0] = '\0';
    if (cond == MB_STORE_ALWAYS || (cond == MB_STORE_IF_ABSENT && !mb_fs_exists(path)))
        return 0;
    int rc = cond == MB_STORE_IF_MATCH || is_file ? etag_of(path, have, &size_bytes, err) : 0;
    if (rc != 0 && rc != MB_ENOENT)
        return rc;
    if (rc == 0 && cond == MB_STORE_IF_MATCH && strcmp(have, etag) == 0)
        return 0;
    return mb_err_set(err, MB_EEXIST, "%s",
                      cond == MB_STORE_IF_MATCH ? "the object is not the expected one"
                                                : "the object exists already");
}

/* Temp becomes the object if the condition holds. The temporary file is gone either way. */
static int commit(struct job *job, const char *temp)
{
    struct mb_store_op *op = job->op;
    char have[ETAG_BYTES], ours[ETAG_BYTES];
    int lock_fd = -1, is_file = op->kind == MB_STORE_PUT_FILE;
    int rc = lock_root(job->root, &lock_fd, &op->err);
    if (rc == 0)
        rc = check_condition(job->object, op->cond, op->etag, is_file, have, &op->err);
    if (rc == MB_EEXIST && is_file) {
        snprintf(op->out_etag, sizeof op->out_etag, "%s", have);
        format_etag(op->crc64nvme, job->copied_bytes, ours);
        if (strcmp(have, ours) == 0) { /* these bytes are there already */
            mb_err_clear(&op->err);
            close(lock_fd);
            unlink(temp);
            return 0;
        }
    }
    if (rc == 0 && rename(temp, job->object) != 0)
        rc = mb_err_sys(&op->err, errno, "rename to %s", job->object);
    if (rc != 0)
        unlink(temp);
    if (lock_fd >= 0)
        close(lock_fd);
    return rc != 0 ? rc : sync_parent(job->object, &op->err);
}

/* ---- small operations ---- */

static void do_put(struct job *job)
{
    struct mb_store_op *op = job->op;
    char *temp = NULL;
    int fd = -1;
    int rc = open_temp(job->object, &fd, &temp, &op->err);
    if (rc == 0) {
        rc = mb_fs_write_all(fd, op->data, op->data_len, &op->err);
        if (rc == 0 && fsync(fd) != 0)
            rc = mb_err_sys(&op->err, errno, "fsync %s", temp);
        if (rc == 0)
            rc = commit(job, temp);
        else
            unlink(temp);
        close(fd); /* and its lock; it was synced */
    }
    if (rc == 0) {
        op->size_bytes = op->data_len;
        format_etag(mb_crc64nvme(0, op->data, op->data_len), op->data_len, op->out_etag);
    }
    mb_free(temp);
}

static int get_range(struct mb_store_op *op, int fd, const struct stat *st)
{
    uint64_t size_bytes = (uint64_t)st->st_size;
    uint64_t left = op->offset < size_bytes ? size_bytes - op->offset : 0;
    size_t want = left < op->max_bytes ? (size_t)left : op->max_bytes;
    if (mb_buf_reserve(&op->body, want) != 0)
        return mb_err_set(&op->err, MB_ENOMEM, "out of memory");
    while (op->body.len < want) {
        ssize_t n = pread(fd, op->body.data + op->body.len, want - op->body.len,
                          (off_t)(op->offset + op->body.len));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? mb_err_sys(&op->err, errno, "read")
                         : mb_err_set(&op->err, MB_ESTATE, "the object changed while it was read");
        op->body.len += (size_t)n;
    }
    op->size_bytes = op->body.len;
    return 0;
}

static void do_get_range(struct job *job)
{
    struct stat st;
    int fd = -1;
    if (open_object(job->object, &fd, &st, &job->op->err) != 0)
        return;
    get_range(job->op, fd, &st);
    close(fd);
}

static void do_get(struct job *job)
{
    struct mb_store_op *op = job->op;
    int rc = mb_fs_read(job->object, op->max_bytes, &op->body, &op->err);
    struct stat st;
    if (rc == MB_ENOENT || (rc != 0 && stat(job->object, &st) == 0 && S_ISDIR(st.st_mode)))
        mb_err_set(&op->err, MB_ENOENT, "no such object");
    if (rc != 0)
        return;
    op->size_bytes = op->body.len;
    format_etag(mb_crc64nvme(0, op->body.data, op->body.len), op->body.len, op->out_etag);
}

static void do_head(struct job *job)
{
    etag_of(job->object, job->op->out_etag, &job->op->size_bytes, &job->op->err);
}

static void do_delete(struct job *job)
{
    if (unlink(job->object) != 0 && errno != ENOENT && errno != ENOTDIR && errno != EISDIR)
        mb_err_sys(&job->op->err, errno, "remove %s", job->object);
}

/* ---- listing ---- */

static int list_dir(struct job *job, const char *dir, const char *key_dir, int depth);

static int list_one(struct job *job, const char *dir, const char *key_dir, const char *name,
                    int depth)
{
    struct mb_store_op *op = job->op;
    struct stat st;
    int rc = 0;
    char *path = mb_path_join(dir, name);
    char *key = mb_asprintf("%s%s", key_dir, name);
    if (!path || !key) {
        rc = mb_err_set(&op->err, MB_ENOMEM, "out of memory");
    } else if (lstat(path, &st) != 0) {
        rc = errno == ENOENT ? 0 : mb_err_sys(&op->err, errno, "stat %s", path);
    } else if (S_ISDIR(st.st_mode)) {
        size_t n = strlen(key) < strlen(op->key) ? strlen(key) : strlen(op->key);
        char *below = mb_asprintf("%s/", key);
        if (!below)
            rc = mb_err_set(&op->err, MB_ENOMEM, "out of memory");
        else if (strncmp(key, op->key, n) == 0)
            rc = list_dir(job, path, below, depth + 1);
        mb_free(below);
    } else if (S_ISREG(st.st_mode) && mb_starts_with(key, op->key)) {
        rc = mb_store_op_add_entry(op, key, (uint64_t)st.st_size, "");
        if (rc != 0)
            mb_err_set(&op->err, rc,
                       rc == MB_EFULL ? "more keys than a listing may hold" : "out of memory");
    }
    mb_free(path);
    mb_free(key);
    return rc;
}

static int list_dir(struct job *job, const char *dir, const char *key_dir, int depth)
{
    struct dirent *entry;
    int rc = 0;
    if (depth > 64)
        return mb_err_set(&job->op->err, MB_EFULL, "directories nest deeper than 64 at %s", dir);
    DIR *d = opendir(dir);
    if (!d)
        return errno == ENOENT || errno == ENOTDIR
                   ? 0
                   : mb_err_sys(&job->op->err, errno, "open %s", dir);
    while (rc == 0) {
        errno = 0; /* NULL is the end, and a failure as well */
        entry = readdir(d);
        if (!entry) {
            if (errno != 0)
                rc = mb_err_sys(&job->op->err, errno, "read %s", dir);
            break;
        }
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 &&
            !mb_starts_with(entry->d_name, TEMP_PREFIX))
            rc = list_one(job, dir, key_dir, entry->d_name, depth);
    }
    closedir(d);
    return rc;
}

/* ---- whole files, in steps ---- */

static int copy_open(struct job *job)
{
    struct mb_store_op *op = job->op;
    int is_put = op->kind == MB_STORE_PUT_FILE;
    int rc = open_object(is_put ? op->path : job->object, &job->in_fd, &job->source, &op->err);
    if (rc != 0) {
        if (is_put && rc == MB_ENOENT)
            mb_err_set(&op->err, MB_ENOENT, "%s: no such file", op->path);
        return rc;
    }
    if (op->has_size && (uint64_t)job->source.st_size != op->want_bytes)
        return mb_err_set(&op->err, MB_ECORRUPT,
                          "the object has %" PRIu64 " bytes, it should have %" PRIu64,
                          (uint64_t)job->source.st_size, op->want_bytes);
    if (!op->path)
        return 0;
    if (job->source.st_size >= SWEEP_FROM_BYTES)
        sweep_beside(is_put ? job->object : op->path);
    return open_temp(is_put ? job->object : op->path, &job->out_fd, &job->temp, &op->err);
}

static int copy_step(struct job *job)
{
    struct mb_store_op *op = job->op;
    uint8_t *block = mb_alloc(BLOCK_BYTES);
    int rc = block ? 0 : mb_err_set(&op->err, MB_ENOMEM, "out of memory");
    for (size_t done = 0; rc == 0 && !job->copy_done && done < STEP_BYTES;) {
        ssize_t n = read(job->in_fd, block, BLOCK_BYTES);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            rc = mb_err_sys(&op->err, errno, "read");
        else if (n == 0)
            job->copy_done = 1;
        else if (op->path)
            rc = mb_fs_write_all(job->out_fd, block, (size_t)n, &op->err);
        if (rc == 0 && n > 0) {
            op->crc64nvme = mb_crc64nvme(op->crc64nvme, block, (size_t)n);
            job->copied_bytes += (uint64_t)n;
            done += (size_t)n;
        }
    }
    mb_free(block);
    return rc;
}

static int copy_end(struct job *job)
{
    struct mb_store_op *op = job->op;
    struct stat now;
    if (fstat(job->in_fd, &now) != 0 || now.st_size != job->source.st_size ||
        (uint64_t)now.st_size != job->copied_bytes ||
        now.st_mtim.tv_sec != job->source.st_mtim.tv_sec ||
        now.st_mtim.tv_nsec != job->source.st_mtim.tv_nsec)
        return mb_err_set(&op->err, MB_ESTATE, "the file changed while it was copied");
    if (!op->path)
        return 0;
    if (!op->is_lazy && fsync(job->out_fd) != 0)
        return mb_err_sys(&op->err, errno, "fsync %s", job->temp);
    if (op->kind == MB_STORE_PUT_FILE)
        return commit(job, job->temp);
    if (rename(job->temp, op->path) != 0)
        return mb_err_sys(&op->err, errno, "rename to %s", op->path);
    return op->is_lazy ? 0 : sync_parent(op->path, &op->err);
}

static void do_copy(struct job *job)
{
    struct mb_store_op *op = job->op;
    int rc = job->in_fd < 0 ? copy_open(job) : 0;
    if (rc == 0)
        rc = copy_step(job);
    if (rc == 0 && job->copy_done)
        rc = copy_end(job);
    if (rc == 0 && job->copy_done) {
        mb_free(job->temp); /* it has its final name */
        job->temp = NULL;
        op->size_bytes = job->copied_bytes;
        format_etag(op->crc64nvme, op->size_bytes, op->out_etag);
    }
}

/* ---- the loop's side ---- */

static void on_work(uv_work_t *work)
{
    struct job *job = work->data;
    switch (job->op->kind) {
    case MB_STORE_PUT:
        do_put(job);
        break;
    case MB_STORE_GET:
        if (job->op->is_range)
            do_get_range(job);
        else
            do_get(job);
        break;
    case MB_STORE_HEAD:
        do_head(job);
        break;
    case MB_STORE_DELETE:
        do_delete(job);
        break;
    case MB_STORE_LIST:
        list_dir(job, job->root, "", 0);
        break;
    case MB_STORE_PUT_FILE:
    case MB_STORE_GET_FILE:
        do_copy(job);
        break;
    case MB_STORE_ABORT_UPLOADS:
        sweep_beside(job->object);
        break;
    case MB_STORE_LIST_UPLOADS:
        mb_err_set(&job->op->err, MB_EUNSUPPORTED, "a directory has no multipart uploads");
        break;
    }
}

static void job_free(struct job *job)
{
    if (job->in_fd >= 0)
        close(job->in_fd);
    if (job->out_fd >= 0)
        close(job->out_fd);
    if (job->temp)
        unlink(job->temp);
    mb_free(job->temp);
    mb_free(job->object);
    mb_free(job);
}

static void on_worked(uv_work_t *work, int status)
{
    struct job *job = work->data;
    struct mb_store_op *op = job->op;
    int is_copy = op->kind == MB_STORE_PUT_FILE || op->kind == MB_STORE_GET_FILE;
    if (status != 0 && op->err.code == 0)
        mb_err_set(&op->err, MB_ECANCELED, "cancelled");
    if (is_copy && op->err.code == 0 && op->progress)
        op->progress(op->arg, job->copied_bytes, (uint64_t)job->source.st_size);
    if (is_copy && op->err.code == 0 && !job->copy_done) {
        if (op->canceled || (op->gives_up && *op->gives_up))
            mb_err_set(&op->err, MB_ECANCELED, "cancelled");
        else if (mb_mono_ms() > op->deadline_ms)
            mb_err_set(&op->err, MB_ETIMEOUT, "deadline passed after %" PRIu64 " bytes",
                       job->copied_bytes);
        else if (uv_queue_work(op->store->loop, work, on_work, on_worked) == 0)
            return;
        else
            mb_err_set(&op->err, MB_ENOMEM, "out of memory");
    }
    job_free(job);
    mb_store_op_finish(op);
}

static int file_start(struct mb_store_op *op, struct mb_err *err)
{
    struct file_store *fs = op->store->impl;
    struct job *job = mb_calloc(1, sizeof *job);
    if (!job)
        return mb_err_set(err, MB_ENOMEM, "object store: out of memory");
    job->op = op;
    job->root = fs->root;
    job->in_fd = -1;
    job->out_fd = -1;
    job->work.data = job;
    job->object = mb_path_join(fs->root, op->key);
    if (!job->object || uv_queue_work(op->store->loop, &job->work, on_work, on_worked) != 0) {
        job_free(job);
        return mb_err_set(err, MB_ENOMEM, "object store: out of memory");
    }
    op->impl = job;
    return 0;
}

static void file_cancel(struct mb_store_op *op)
{
    struct job *job = op->impl;
    uv_cancel((uv_req_t *)&job->work); /* a running step ends by itself */
}

static void file_close(struct mb_store *s, void (*done)(void *arg), void *arg)
{
    struct file_store *fs = s->impl;
    mb_free(fs->root);
    mb_free(fs);
    done(arg);
}

int mb_store_file_open(struct mb_store *s, const char *rest, struct mb_err *err)
{
    static const struct mb_store_backend backend = {
        .start = file_start, .cancel = file_cancel, .close = file_close};
    size_t n = strlen(rest);
    while (n > 1 && rest[n - 1] == '/')
        n--;
    struct file_store *fs = mb_calloc(1, sizeof *fs);
    if (!fs || !(fs->root = mb_strndup(rest, n))) {
        mb_free(fs);
        return mb_err_set(err, MB_ENOMEM, "object store: out of memory");
    }
    s->backend = &backend;
    s->impl = fs;
    return 0;
}
