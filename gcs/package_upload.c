/*
 * The upload of a package: its body becomes a file, and the loop never waits for the disk.
 *
 *  1. Pieces of the body are collected in one buffer while a pool thread writes another one to a
 *     temporary file. When the first is full the connection is paused until they change places: two
 *     of COLLECT_BYTES are all the memory that an upload takes, however large it is or slow the
 * disk.
 *  2. At its end: fsync on the pool, rename, answer. A package appears whole or not at all. With a
 *     shared store it goes there too (package_store.c).
 * Failure paths:
 *  3. More than the limit: 413, as Ray says it; what says so beforehand is refused before anything
 * is written.
 *  4. A full disk: 500. A client that goes away, also while the disk hangs: nobody is answered. The
 *     temporary file is removed on the pool, when the thread that writes to it is done.
 *  5. The head stops: what is under way is not finished.
 */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"
#include "gcs/services.h"

enum { COLLECT_BYTES = 256 << 10 };

enum step { UPLOAD_WRITE, UPLOAD_SYNC, UPLOAD_DROP };

struct head_upload {
    struct mb_http_req *req;
    struct mb_head *h; /* NULL: it stops */
    struct head_upload *prev, *next;
    uv_loop_t *loop;
    uint64_t size_bytes, max_bytes;
    char *temp; /* NULL: it has its name */
    char *final;
    struct mb_buf in;  /* collected */
    struct mb_buf out; /* being written */
    int is_paused;
    int has_ended; /* the body is here */
    int is_over;   /* it was answered */

    uv_work_t work; /* one step at a time; its thread has fd, out, bytes and failure */
    enum step step;
    int is_working;
    int fd;
    int is_shared;
    struct mb_buf bytes; /* of one that the store may keep */
    struct mb_err failure;
};

/* ---- the pool thread ---- */

static int open_temp(struct head_upload *u)
{
    if (u->fd < 0)
        u->fd = open(u->temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    return u->fd >= 0 ? 0 : mb_err_sys(&u->failure, errno, "%s", u->temp);
}

static void sync_file(struct head_upload *u)
{
    if (fsync(u->fd) != 0)
        mb_err_sys(&u->failure, errno, "fsync");
    else if (u->is_shared && u->size_bytes <= HEAD_KEPT_PACKAGE_BYTES)
        mb_fs_read(u->temp, HEAD_KEPT_PACKAGE_BYTES, &u->bytes, &u->failure);
}

static void do_step(uv_work_t *work)
{
    struct head_upload *u = work->data;

    if (u->step == UPLOAD_DROP) {
        if (u->fd >= 0)
            unlink(u->temp);
    } else if (open_temp(u) == 0) {
        if (u->step == UPLOAD_WRITE)
            mb_fs_write_all(u->fd, u->out.data, u->out.len, &u->failure);
        else
            sync_file(u);
    }
}

/* ---- its end ---- */

static void forget(struct head_upload *u)
{
    if (!u->h)
        return;
    *(u->prev ? &u->prev->next : &u->h->uploads) = u->next;
    if (u->next)
        u->next->prev = u->prev;
    u->h = NULL;
}

static void free_upload(struct head_upload *u)
{
    forget(u);
    if (u->fd >= 0)
        close(u->fd);
    mb_buf_close(&u->in);
    mb_buf_close(&u->out);
    mb_buf_close(&u->bytes);
    mb_free(u->temp);
    mb_free(u->final);
    mb_free(u);
}

static void on_step(uv_work_t *work, int status);

static void take_step(struct head_upload *u, enum step step)
{
    int rc;

    u->step = step;
    u->work.data = u;
    u->is_working = 1;
    rc = uv_queue_work(u->loop, &u->work, do_step, on_step);
    assert(rc == 0); /* it fails without a callback only */
    (void)rc;
}

/* It was answered, or nobody waits for the answer. */
static void drop(struct head_upload *u)
{
    u->is_over = 1;
    if (u->is_working)
        return; /* on_step() comes back to it */
    if (u->temp && u->fd >= 0)
        take_step(u, UPLOAD_DROP);
    else
        free_upload(u);
}

static void fail_upload(struct head_upload *u, int status, const char *text)
{
    mb_http_reply_text(u->req, status, "%s", text);
    drop(u);
}

static void refuse_size(struct head_upload *u)
{
    mb_http_reply_text(u->req, 413, "Maximum request body size %llu exceeded.",
                       (unsigned long long)u->max_bytes);
    drop(u);
}

static void succeed(struct head_upload *u)
{
    mb_http_reply(u->req, 200, NULL, "", 0);
    drop(u);
}

static void on_kept(void *arg, const struct mb_err *err)
{
    struct head_upload *u = arg;

    if (err->code != 0)
        fail_upload(u, 500, err->text);
    else
        succeed(u);
}

/* It is here. With a shared store it goes there too, or the client is told that it does not. */
static void finish_upload(struct head_upload *u)
{
    struct mb_err err = {0};

    if (rename(u->temp, u->final) != 0) {
        fail_upload(u, 500, strerror(errno));
        return;
    }
    mb_free(u->temp);
    u->temp = NULL;
    mb_info("jobs", "package stored path=%s bytes=%llu", u->final,
            (unsigned long long)u->size_bytes);
    if (u->h->store && head_package_can_keep(u->h, u->size_bytes)) {
        if (head_package_keep(u->h, strrchr(u->final, '/') + 1,
                              head_blob(mb_buf_str(&u->bytes), u->bytes.len), on_kept, u,
                              &err) != 0)
            fail_upload(u, 500, err.text);
        return;
    }
    if (u->h->redis)
        mb_http_reply_header(u->req, "X-Mobula-Package", "on-this-head-only");
    succeed(u);
}

/* ---- the body ---- */

/* The disk is done with what it had: it gets what came meanwhile. */
static void go_on(struct head_upload *u)
{
    struct mb_buf written = u->out;

    if (u->in.len == 0) {
        if (u->has_ended)
            take_step(u, UPLOAD_SYNC);
        return;
    }
    u->out = u->in;
    u->in = written;
    mb_buf_reset(&u->in);
    take_step(u, UPLOAD_WRITE);
    if (u->is_paused) {
        u->is_paused = 0;
        mb_http_req_body_resume(u->req);
    }
}

static void on_step(uv_work_t *work, int status)
{
    struct head_upload *u = work->data;

    (void)status; /* nobody cancels it */
    u->is_working = 0;
    if (u->step == UPLOAD_DROP)
        free_upload(u);
    else if (u->is_over)
        drop(u);
    else if (!u->h)
        fail_upload(u, 503, "the head stops");
    else if (u->failure.code != 0)
        fail_upload(u, 500, u->failure.text);
    else if (u->step == UPLOAD_SYNC)
        finish_upload(u);
    else
        go_on(u);
}

static int take_piece(struct head_upload *u, const void *p, size_t n)
{
    u->size_bytes += n;
    if (u->size_bytes > u->max_bytes) {
        refuse_size(u);
        return MB_EFULL;
    }
    if (mb_buf_add(&u->in, p, n) != 0) {
        fail_upload(u, 500, "out of memory");
        return MB_ENOMEM;
    }
    if (!u->is_working)
        go_on(u);
    if (u->in.len >= COLLECT_BYTES) {
        u->is_paused = 1;
        mb_http_req_body_pause(u->req);
    }
    return 0;
}

static int on_piece(void *arg, struct mb_http_req *req, const void *p, size_t n, int error_code)
{
    struct head_upload *u = arg;

    (void)req;
    if (n > 0)
        return take_piece(u, p, n);
    if (error_code != 0) {
        fail_upload(u, 500, "the upload was broken off");
        return 0;
    }
    u->has_ended = 1;
    if (!u->is_working)
        go_on(u);
    return 0;
}

/* ---- its begin ---- */

static int is_too_large(struct mb_head *h, struct mb_http_req *req)
{
    const char *length = mb_http_req_header(req, "Content-Length");

    if (!length || strtoull(length, NULL, 10) <= h->max_package_bytes)
        return 0;
    mb_http_reply_text(req, 413, "Maximum request body size %llu exceeded.",
                       (unsigned long long)h->max_package_bytes);
    return 1;
}

void head_package_upload(struct mb_head *h, struct mb_http_req *req, char *path)
{
    struct head_upload *u;

    if (is_too_large(h, req)) {
        mb_free(path);
        return;
    }
    u = mb_calloc(1, sizeof *u);
    if (u)
        u->temp = head_package_temp(h, path);
    if (!u || !u->temp) {
        mb_free(u);
        mb_free(path);
        mb_http_reply_text(req, 500, "out of memory");
        return;
    }
    u->req = req;
    u->h = h;
    u->loop = h->loop;
    u->max_bytes = h->max_package_bytes;
    u->is_shared = h->redis != NULL;
    u->final = path;
    u->fd = -1;
    u->next = h->uploads;
    if (u->next)
        u->next->prev = u;
    h->uploads = u;
    mb_http_req_body_cb(req, on_piece, u);
}

void head_package_uploads_close(struct mb_head *h)
{
    while (h->uploads)
        forget(h->uploads);
}
