/*
 * An object becomes a file.
 *
 * 1. HEAD tells size, etag and, where the server keeps it, the object's checksum.
 * 2. Ranges of 8 MiB are fetched, a few at a time, each bound to the etag (If-Match), so that a
 *    change in between is an error and never a mixture.
 * 3. The pool writes each range into the temporary file and takes its checksum; the ranges' sums
 *    combine to that of the whole.
 * 4. All there: compare with the server's checksum, fsync, rename, sync the directory.
 * Failures: an object that changed meanwhile is MB_ESTATE, a checksum that differs MB_ECORRUPT, a
 * full disk MB_EFULL; the temporary file is removed.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/s3/s3.h"

#define RANGE_BYTES (8ull * 1024 * 1024)

struct range {
    uv_work_t work;
    struct download *down;
    size_t index;
    int busy;
    struct s3_call *call;
    struct mb_buf bytes; /* moved from the answer to the pool */
    struct mb_err err;   /* of the pool's work */
};

struct download {
    struct mb_store_op *op;
    struct s3 *s3;
    int fd;
    char *temp;
    char server_crc[16];
    uint64_t *crcs; /* one per range */
    size_t n_ranges;
    size_t next_range;
    size_t n_done;
    uint64_t done_bytes;
    size_t in_flight;
    struct range ranges[S3_PARTS_IN_FLIGHT];
    struct s3_call *call;
    uv_work_t work;
};

static void pump(struct download *d);

static void finish(struct download *d)
{
    struct mb_store_op *op = d->op;
    if (d->fd >= 0)
        close(d->fd);
    if (d->temp && op->err.code != 0)
        unlink(d->temp);
    for (size_t i = 0; i < S3_PARTS_IN_FLIGHT; i++)
        mb_buf_close(&d->ranges[i].bytes);
    mb_free(d->temp);
    mb_free(d->crcs);
    mb_free(d);
    op->impl = NULL;
    mb_store_op_finish(op);
}

static void note_cancel(struct download *d, int status)
{
    if (d->op->err.code == 0 && (status != 0 || d->op->canceled))
        mb_err_set(&d->op->err, MB_ECANCELED, "cancelled");
}

/* ---- the last step ---- */

static void close_file(uv_work_t *work)
{
    struct download *d = work->data;
    struct mb_store_op *op = d->op;
    const char *slash = strrchr(op->path, '/');
    char *dir = slash == op->path ? mb_strdup("/")
                : slash           ? mb_strndup(op->path, (size_t)(slash - op->path))
                                  : mb_strdup(".");
    if (!dir)
        mb_err_set(&op->err, MB_ENOMEM, "out of memory");
    else if (fsync(d->fd) != 0)
        mb_err_sys(&op->err, errno, "fsync %s", d->temp);
    else if (rename(d->temp, op->path) != 0)
        mb_err_sys(&op->err, errno, "rename to %s", op->path);
    else
        mb_fs_sync_dir(dir, &op->err);
    mb_free(dir);
}

static void on_closed(uv_work_t *work, int status)
{
    struct download *d = work->data;
    note_cancel(d, status);
    finish(d);
}

static void conclude(struct download *d)
{
    struct mb_store_op *op = d->op;
    char text[16];
    for (size_t i = 0; i < d->n_ranges; i++) {
        uint64_t left = op->size_bytes - i * RANGE_BYTES;
        op->crc64nvme = mb_crc64nvme_combine(op->crc64nvme, d->crcs[i],
                                             left < RANGE_BYTES ? left : RANGE_BYTES);
    }
    s3_checksum_text(op->crc64nvme, text);
    if (d->server_crc[0] && strcmp(d->server_crc, text) != 0)
        mb_err_set(&op->err, MB_ECORRUPT,
                   "the bytes received have CRC64NVME %s, the object should have %s", text,
                   d->server_crc);
    else if (uv_queue_work(d->s3->loop, &d->work, close_file, on_closed) == 0)
        return;
    else
        mb_err_set(&op->err, MB_ENOMEM, "out of memory");
    finish(d);
}

/* ---- ranges ---- */

static uint64_t range_len(const struct download *d, size_t i)
{
    uint64_t left = d->op->size_bytes - i * RANGE_BYTES;
    return left < RANGE_BYTES ? left : RANGE_BYTES;
}

static void write_range(uv_work_t *work)
{
    struct range *r = work->data;
    struct download *d = r->down;
    off_t offset = (off_t)(r->index * RANGE_BYTES);
    d->crcs[r->index] = mb_crc64nvme(0, r->bytes.data, r->bytes.len);
    for (size_t done = 0; done < r->bytes.len;) {
        ssize_t n = pwrite(d->fd, r->bytes.data + done, r->bytes.len - done, offset + (off_t)done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            mb_err_sys(&r->err, errno, "write %s", d->temp);
            return;
        }
        done += (size_t)n;
    }
}

static void range_done(struct range *r)
{
    r->busy = 0;
    r->down->in_flight--;
    mb_buf_close(&r->bytes);
    pump(r->down);
}

static void on_range_written(uv_work_t *work, int status)
{
    struct range *r = work->data;
    struct download *d = r->down;
    note_cancel(d, status);
    if (d->op->err.code == 0 && r->err.code != 0)
        d->op->err = r->err;
    if (d->op->err.code == 0) {
        d->n_done++;
        d->done_bytes += r->bytes.len;
        if (d->op->progress)
            d->op->progress(d->op->arg, d->done_bytes, d->op->size_bytes);
    }
    range_done(r);
}

static void on_range(void *arg, const struct s3_answer *a)
{
    struct range *r = arg;
    struct download *d = r->down;
    struct mb_store_op *op = d->op;
    r->call = NULL;
    if (a->error == MB_EEXIST) {
        if (op->err.code == 0)
            mb_err_set(&op->err, MB_ESTATE, "the object changed while it was read");
    } else if (a->error != 0) {
        s3_op_fail(op, a);
    } else if (a->http->body_len != range_len(d, r->index)) {
        mb_err_set(&op->err, MB_EPROTO, "asked for %" PRIu64 " bytes of a range, got %zu",
                   range_len(d, r->index), a->http->body_len);
    } else if (mb_buf_add(&r->bytes, a->http->body, a->http->body_len) != 0) {
        mb_err_set(&op->err, MB_ENOMEM, "out of memory");
    }
    if (op->err.code != 0 ||
        uv_queue_work(d->s3->loop, &r->work, write_range, on_range_written) != 0)
        range_done(r);
}

static int start_range(struct download *d)
{
    struct range *r = d->ranges;
    while (r->busy)
        r++;
    char text[64];
    uint64_t first = d->next_range * RANGE_BYTES;
    struct s3_request request = {
        .method = "GET", .key = d->op->key, .body_fd = -1, .max_body_bytes = RANGE_BYTES};
    r->down = d;
    r->work.data = r;
    r->index = d->next_range;
    mb_err_clear(&r->err);
    snprintf(text, sizeof text, "bytes=%" PRIu64 "-%" PRIu64, first,
             first + range_len(d, r->index) - 1);
    s3_request_header(&request, "range", text);
    if (d->op->out_etag[0])
        s3_request_header(&request, "if-match", d->op->out_etag);
    int rc = s3_call_start(d->op, &request, on_range, r, &r->call, &d->op->err);
    if (rc != 0)
        return rc;
    r->busy = 1;
    d->next_range++;
    d->in_flight++;
    return 0;
}

static void pump(struct download *d)
{
    note_cancel(d, 0);
    while (d->op->err.code == 0 && d->in_flight < S3_PARTS_IN_FLIGHT &&
           d->in_flight < d->s3->parallel && d->next_range < d->n_ranges) {
        if (start_range(d) != 0)
            break;
    }
    if (d->in_flight > 0)
        return;
    if (d->op->err.code != 0)
        finish(d);
    else if (d->n_done == d->n_ranges)
        conclude(d);
}

/* ---- begin ---- */

static void open_temp(uv_work_t *work)
{
    struct download *d = work->data;
    d->fd = open(d->temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (d->fd < 0) {
        mb_err_sys(&d->op->err, errno, "create %s", d->temp);
        mb_free(d->temp); /* nothing to remove */
        d->temp = NULL;
    }
}

static void on_temp_open(uv_work_t *work, int status)
{
    struct download *d = work->data;
    note_cancel(d, status);
    pump(d);
}

static void on_head(void *arg, const struct s3_answer *a)
{
    struct download *d = arg;
    struct mb_store_op *op = d->op;
    d->call = NULL;
    if (a->error != 0) {
        s3_op_fail(op, a);
        finish(d);
        return;
    }
    const char *length = a->http->header(a->http, "Content-Length");
    const char *crc = a->http->header(a->http, S3_CHECKSUM_HEADER);
    op->size_bytes = length ? strtoull(length, NULL, 10) : 0;
    s3_answer_etag(a, op->out_etag, sizeof op->out_etag);
    if (crc && strlen(crc) < sizeof d->server_crc)
        snprintf(d->server_crc, sizeof d->server_crc, "%s", crc);
    d->n_ranges = (size_t)((op->size_bytes + RANGE_BYTES - 1) / RANGE_BYTES);
    d->crcs = mb_calloc(d->n_ranges + 1, sizeof *d->crcs);
    if (!d->crcs || uv_queue_work(d->s3->loop, &d->work, open_temp, on_temp_open) != 0) {
        mb_err_set(&op->err, MB_ENOMEM, "out of memory");
        mb_free(d->temp);
        d->temp = NULL;
        finish(d);
    }
}

int s3_download_start(struct mb_store_op *op, struct mb_err *err)
{
    struct s3_request request = {.method = "HEAD", .key = op->key, .body_fd = -1};
    struct download *d = mb_calloc(1, sizeof *d);
    if (!d)
        return mb_err_set(err, MB_ENOMEM, "s3: out of memory");
    d->op = op;
    d->s3 = op->store->impl;
    d->fd = -1;
    d->work.data = d;
    d->temp = mb_asprintf("%s.mobula-tmp-%016" PRIx64, op->path, mb_random_u64());
    s3_request_header(&request, "x-amz-checksum-mode", "ENABLED");
    int rc = d->temp ? s3_call_start(op, &request, on_head, d, &d->call, err)
                     : mb_err_set(err, MB_ENOMEM, "s3: out of memory");
    if (rc != 0) {
        mb_free(d->temp);
        mb_free(d);
        return rc;
    }
    op->impl = d;
    return 0;
}

void s3_download_cancel(struct mb_store_op *op)
{
    struct download *d = op->impl;
    if (d->call)
        s3_call_cancel(d->call);
    for (size_t i = 0; i < S3_PARTS_IN_FLIGHT; i++) {
        if (d->ranges[i].call)
            s3_call_cancel(d->ranges[i].call);
    }
}
