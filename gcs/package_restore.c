/*
 * A head that takes over lacks what was uploaded to the one before; what that kept in the shared
 * store goes to the disk here, while the head serves.
 *
 *  1. The names of the kept packages are listed. For one that is not on the disk, the loop copies a
 *     part out of the store and a pool thread appends it to a temporary file, then the next part:
 *     a turn of the loop costs one part, whatever there is.
 *  2. The thread that has the last part syncs the file and gives it its name.
 *  3. A job whose package is not there yet waits (job_start.c), a node that reads one asks again
 *     (packages.c); at the end whoever waits is looked at.
 * Failure paths:
 *  4. Parts that are not all there, a disk that does not take them: said with the package's name,
 *     its temporary file goes, the others go on.
 *  5. The same package is uploaded again meanwhile: that one stays, names are made of contents.
 *  6. The head stops: the thread ends its part, its result is dropped. SIGKILL: package_sweep.c
 *     removes the temporary file.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/services.h"

struct head_restore {
    uv_work_t work;
    struct mb_head *h; /* NULL: the head has gone */
    void (*done)(struct mb_head *h);
    char **names; /* owned */
    size_t n_names, at;
    /* Of the package names[at]. */
    char *temp, *path;
    int fd;
    uint64_t size_bytes, written_bytes;
    size_t part;
    struct mb_buf bytes; /* of that part */
    int is_last;
    struct mb_err failure;
};

static void next_package(struct head_restore *r);

static int collect_name(void *arg, struct mb_blob key, struct mb_blob value)
{
    struct head_restore *r = arg;
    size_t skip = strlen(HEAD_PACKAGE_RECORD);
    char *name = mb_strndup((const char *)key.p + skip, key.n - skip);
    char **names = name ? mb_reallocarray(r->names, r->n_names + 1, sizeof *r->names) : NULL;

    (void)value;
    if (!names) {
        mb_error("jobs", "a package is not restored: out of memory");
        mb_free(name);
        return 0;
    }
    r->names = names;
    r->names[r->n_names++] = name;
    return 0;
}

/* The package at hand, whatever became of it. */
static void end_package(struct head_restore *r)
{
    if (r->fd >= 0)
        close(r->fd);
    if (r->temp)
        unlink(r->temp); /* gone already when it has its name */
    mb_free(r->temp);
    mb_free(r->path);
    r->temp = r->path = NULL;
    r->fd = -1;
}

static void free_restore(struct head_restore *r)
{
    end_package(r);
    for (size_t i = 0; i < r->n_names; i++)
        mb_free(r->names[i]);
    mb_free(r->names);
    mb_buf_close(&r->bytes);
    mb_free(r);
}

static void finish(struct head_restore *r)
{
    struct mb_head *h = r->h;
    void (*done)(struct mb_head * h) = r->done;

    h->restore = NULL;
    free_restore(r);
    done(h);
}

/* ---- the pool thread ---- */

static void write_part(uv_work_t *work)
{
    struct head_restore *r = work->data;

    if (r->fd < 0)
        r->fd = open(r->temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (r->fd < 0)
        mb_err_sys(&r->failure, errno, "%s", r->temp);
    else if (mb_fs_write_all(r->fd, mb_buf_str(&r->bytes), r->bytes.len, &r->failure) == 0 &&
             r->is_last && (fsync(r->fd) != 0 || rename(r->temp, r->path) != 0))
        mb_err_sys(&r->failure, errno, "%s", r->path);
}

/* ---- the loop ---- */

static int take_part(struct head_restore *r)
{
    struct mb_blob part = {"", 0};

    mb_buf_reset(&r->bytes);
    if (r->size_bytes > 0 && !head_package_part(r->h, r->names[r->at], r->part, &part))
        return mb_err_set(&r->failure, MB_ENOENT, "its parts are not all in the store");
    if (mb_buf_add(&r->bytes, part.p, part.n) != 0)
        return mb_err_set(&r->failure, MB_ENOMEM, "out of memory");
    r->written_bytes += part.n;
    r->is_last = r->part + 1 >= head_package_count_parts(r->size_bytes);
    if (r->is_last && r->written_bytes != r->size_bytes)
        return mb_err_set(&r->failure, MB_ECORRUPT, "its parts in the store are not of its size");
    return 0;
}

static void say_what_became_of_it(struct head_restore *r)
{
    if (r->failure.code != 0)
        mb_error("jobs", "the package %s is lost: %s", r->names[r->at], r->failure.text);
    else
        mb_info("jobs", "package restored name=%s bytes=%llu", r->names[r->at],
                (unsigned long long)r->size_bytes);
    end_package(r);
}

static void on_part(uv_work_t *work, int status);

/* 0: a thread has it; else r->failure says why not. */
static int send_part(struct head_restore *r)
{
    int rc = take_part(r);

    if (rc == 0 && (rc = uv_queue_work(r->h->loop, &r->work, write_part, on_part)) != 0)
        rc = mb_err_set(&r->failure, MB_EIO, "%s", uv_strerror(rc));
    return rc;
}

static void on_part(uv_work_t *work, int status)
{
    struct head_restore *r = work->data;

    if (!r->h) {
        free_restore(r);
        return;
    }
    if (status != 0)
        mb_err_set(&r->failure, MB_EIO, "%s", uv_strerror(status));
    r->part++;
    if (r->failure.code == 0 && !r->is_last && send_part(r) == 0)
        return;
    say_what_became_of_it(r);
    r->at++;
    next_package(r);
}

/* It is not one, it is here, or the store has it no more. */
static int is_done(struct head_restore *r)
{
    const char *name = r->names[r->at];
    char *path = NULL;
    int done = !head_package_name_is_fine(name) || !head_package_kept(r->h, name, &r->size_bytes) ||
               ((path = mb_path_join(r->h->packages_dir, name)) && mb_fs_exists(path));

    mb_free(path);
    return done;
}

/* 0: a thread has its first part, and r->failure with it; else r->failure says why not. */
static int begin_package(struct head_restore *r)
{
    r->failure = (struct mb_err){0};
    r->part = r->written_bytes = 0;
    r->path = mb_path_join(r->h->packages_dir, r->names[r->at]);
    if (r->path)
        r->temp = head_package_temp(r->h, r->path);
    if (!r->temp)
        return mb_err_set(&r->failure, MB_ENOMEM, "out of memory");
    return send_part(r);
}

static void next_package(struct head_restore *r)
{
    for (; r->at < r->n_names; r->at++) {
        if (is_done(r))
            continue;
        if (begin_package(r) == 0)
            return;
        say_what_became_of_it(r);
    }
    finish(r);
}

void head_packages_restore(struct mb_head *h, void (*done)(struct mb_head *h))
{
    struct head_restore *r;

    if (!h->redis || !*h->packages_dir)
        return;
    head_packages_drop_orphans(h);
    r = mb_calloc(1, sizeof *r);
    if (!r) {
        mb_error("jobs", "packages of the head before this one are not restored: out of memory");
        return;
    }
    r->h = h;
    r->done = done;
    r->fd = -1;
    r->work.data = r;
    head_packages_each(h, collect_name, r);
    h->restore = r;
    next_package(r);
}

void head_packages_restore_close(struct mb_head *h)
{
    if (h->restore)
        h->restore->h = NULL;
    h->restore = NULL;
}
