/*
 * An object becomes a file, or only its checksum.
 *
 * 1. HEAD tells size, etag and, where the server keeps it, the object's checksum. A caller that
 *    knows the size saves this: the first range's answer tells the etag.
 * 2. Ranges of 16 MiB take their turns among all transfers (s3_turns.h), each bound to the etag
 *    (If-Match), so that a change in between is an error and never a mixture.
 * 3. The bytes of a range are summed as they come, while they are in the processor's cache, and
 *    fill a buffer of 256 KiB; full, it goes to the pool, which writes it, while the other buffer
 *    fills. No room for another read of the socket: there is none until the pool is through, so
 *    that libcurl need not keep what does not fit. So memory is bounded by the connections, not by
 *    sizes. Where files shall not go through the page cache, buffers have 1 MiB and whole blocks
 *    of them go to a descriptor of their own; what is left of the file's last block, and all where
 *    the file system cannot, goes the usual way. One thread at a time writes a file: several would
 * spin for its lock, and burn more processor time than the writing takes. An attempt that broke off
 * begins its range anew, after what the pool still has of it. A range that is through begins its
 * way onto the disk. Where only the checksum is wanted there are no buffers.
 * 4. All there: the ranges' sums combine to that of the whole; compare with the server's, fsync,
 *    rename, sync the directory.
 * Failures: an object that changed meanwhile is MB_ESTATE, a checksum or a size that differs
 * MB_ECORRUPT, a full disk MB_EFULL (room is taken at the beginning); the temporary file goes.
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

#define RANGE_BYTES (16ull * 1024 * 1024)

enum {
    BUFFER_BYTES = 256 * 1024,
    /* Each direct write waits for the disk; smaller ones cost more. A range's two are a huge page,
     * of which the kernel need not look up each small one. */
    DIRECT_BUFFER_BYTES = 1024 * 1024,
    DIRECT_BLOCK_BYTES = 4096, /* of places, lengths and addresses: a page, and a block at most */
    DIRECT_MIN_BYTES = 4 * 1024 * 1024,
    WRITE_OUT_BYTES = 1024 * 1024, /* less is not worth a command to the disk */
    RANGES_MAX = S3_MAX_CONNECTIONS
};

struct range {
    struct download *down;
    struct range *next; /* in one of the download's lists */
    struct s3_turn turn;
    size_t index;
    int busy;
    struct s3_call *call;
    uint8_t *buffers;           /* both of these; NULL without a file */
    int is_kept;                /* ... for other ranges afterwards */
    uint8_t *filling, *writing; /* buffer_bytes each */
    size_t n_filling, n_writing;
    uint64_t received; /* bytes of this attempt */
    uint64_t written;  /* ... that went through the pool */
    uint64_t crc;      /* of the received ones */
    int begins_anew;   /* the next byte is the first of another attempt */
    int in_pool;       /* in one of the lists */
    int is_paused;
    struct mb_err err; /* of the pool's work */
};

struct download {
    struct mb_store_op *op;
    struct s3 *s3;
    int fd;
    int direct_fd; /* of the same file, O_DIRECT; -1: none */
    size_t buffer_bytes;
    char *temp; /* NULL: nothing is written */
    char server_crc[16];
    uint64_t *crcs; /* one per range */
    uint64_t order;
    size_t n_ranges;
    size_t next_range;
    size_t n_done;
    uint64_t done_bytes;
    size_t in_flight;
    int pumping;
    struct range *ranges;
    size_t n_slots;
    struct s3_call *call;
    uv_work_t work;
    uv_work_t write_work;
    struct range *full;        /* their buffers wait for the pool */
    struct range *in_the_pool; /* ... are being written now */
};

static void pump(struct download *d);

static void finish(struct download *d)
{
    struct mb_store_op *op = d->op;
    if (d->fd >= 0)
        close(d->fd);
    if (d->direct_fd >= 0)
        close(d->direct_fd);
    if (d->temp && op->err.code != 0)
        unlink(d->temp);
    mb_free(d->ranges);
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
    else if (!op->is_lazy && fsync(d->fd) != 0)
        mb_err_sys(&op->err, errno, "fsync %s", d->temp);
    else if (rename(d->temp, op->path) != 0)
        mb_err_sys(&op->err, errno, "rename to %s", op->path);
    else if (!op->is_lazy)
        mb_fs_sync_dir(dir, &op->err);
    mb_free(dir);
}

static void on_closed(uv_work_t *work, int status)
{
    struct download *d = work->data;
    note_cancel(d, status);
    finish(d);
}

static uint64_t range_len(const struct download *d, size_t i)
{
    uint64_t left = d->op->size_bytes - i * RANGE_BYTES;
    return left < RANGE_BYTES ? left : RANGE_BYTES;
}

static void conclude(struct download *d)
{
    struct mb_store_op *op = d->op;
    char text[16];
    for (size_t i = 0; i < d->n_ranges; i++)
        op->crc64nvme = mb_crc64nvme_combine(op->crc64nvme, d->crcs[i], range_len(d, i));
    s3_checksum_text(op->crc64nvme, text);
    if (d->server_crc[0] && strcmp(d->server_crc, text) != 0)
        mb_err_set(&op->err, MB_ECORRUPT,
                   "the bytes received have CRC64NVME %s, the object should have %s", text,
                   d->server_crc);
    else if (d->temp && uv_queue_work(d->s3->loop, &d->work, close_file, on_closed) == 0)
        return;
    else if (d->temp)
        mb_err_set(&op->err, MB_ENOMEM, "out of memory");
    finish(d);
}

/* ---- from the buffers to the disk ---- */

/* The disk begins with a whole range while the next ones come, so that little is left for the sync
 * at the end. What it says goes unheeded: a disk that fails tells the sync, too. */
static void begin_writing_out(const struct range *r)
{
    if (r->down->direct_fd >= 0)
        return; /* it is there */
    sync_file_range(r->down->fd, (off_t)(r->index * RANGE_BYTES),
                    (off_t)range_len(r->down, r->index), SYNC_FILE_RANGE_WRITE);
}

/* The descriptor for what stands from done bytes on in the buffer, and how much of that it takes.
 */
static int descriptor(const struct download *d, const struct range *r, size_t done, size_t *n)
{
    size_t blocks = (r->n_writing - done) / DIRECT_BLOCK_BYTES * DIRECT_BLOCK_BYTES;
    int is_direct = d->direct_fd >= 0 && blocks > 0 && done % DIRECT_BLOCK_BYTES == 0;
    *n = is_direct ? blocks : r->n_writing - done;
    return is_direct ? d->direct_fd : d->fd;
}

static void write_buffer(struct range *r)
{
    struct download *d = r->down;
    off_t offset = (off_t)(r->index * RANGE_BYTES + r->written);
    for (size_t done = 0; done < r->n_writing;) {
        size_t some;
        int fd = descriptor(d, r, done, &some);
        ssize_t n = pwrite(fd, r->writing + done, some, offset + (off_t)done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EINVAL || errno == EOPNOTSUPP) && fd == d->direct_fd) {
            /* It wants larger blocks, or could only be opened so. */
            close(d->direct_fd);
            d->direct_fd = -1;
            continue;
        }
        if (n < 0) {
            mb_err_sys(&r->err, errno, "write %s", d->temp);
            return;
        }
        done += (size_t)n;
    }
    if (r->written + r->n_writing == range_len(d, r->index) &&
        r->written + r->n_writing >= WRITE_OUT_BYTES)
        begin_writing_out(r);
}

/* In the pool. */
static void write_buffers(uv_work_t *work)
{
    struct download *d = work->data;
    for (struct range *r = d->in_the_pool; r; r = r->next)
        write_buffer(r);
}

/* A range's two buffers are one piece of memory. What direct writes need is taken over by the next
 * range, of whatever file; there are no more of these than connections. */
static int take_buffers(struct range *r)
{
    struct download *d = r->down;
    int is_direct = d->buffer_bytes == DIRECT_BUFFER_BYTES;
    uint8_t *both = d->s3->spare_buffers;
    r->is_kept = both != NULL || is_direct;
    if (both)
        memcpy(&d->s3->spare_buffers, both, sizeof d->s3->spare_buffers);
    else if (is_direct)
        both = mb_alloc_huge(2 * d->buffer_bytes);
    else
        both = mb_alloc(2 * d->buffer_bytes);
    r->buffers = r->filling = both;
    r->writing = both ? both + d->buffer_bytes : NULL;
    return both ? 0 : MB_ENOMEM;
}

static void give_buffers(struct range *r)
{
    struct s3 *s = r->down->s3;
    if (r->buffers && r->is_kept) {
        memcpy(r->buffers, &s->spare_buffers, sizeof s->spare_buffers);
        s->spare_buffers = r->buffers;
    } else {
        mb_free(r->buffers);
    }
    r->buffers = r->filling = r->writing = NULL;
}

void s3_download_free_buffers(struct s3 *s)
{
    while (s->spare_buffers) {
        void *buffers = s->spare_buffers;
        memcpy(&s->spare_buffers, buffers, sizeof s->spare_buffers);
        mb_free(buffers);
    }
}

static void range_done(struct range *r)
{
    struct download *d = r->down;
    give_buffers(r); /* before another range begins and wants some */
    s3_turn_end(d->s3, &r->turn);
    r->busy = 0;
    d->in_flight--;
    if (!d->pumping)
        pump(d);
}

static void on_buffers_written(uv_work_t *work, int status);

/* All that is full goes, if nothing of this file is in the pool already. */
static int write_full(struct download *d)
{
    if (d->in_the_pool || !d->full)
        return 0;
    d->write_work.data = d;
    d->in_the_pool = d->full; /* before the pool may look */
    d->full = NULL;
    if (uv_queue_work(d->s3->loop, &d->write_work, write_buffers, on_buffers_written) == 0)
        return 0;
    d->full = d->in_the_pool;
    d->in_the_pool = NULL;
    return MB_ENOMEM;
}

/* The full buffer waits for the pool, the other one fills. */
static int write_out(struct range *r)
{
    struct download *d = r->down;
    uint8_t *full = r->filling;
    r->filling = r->writing;
    r->writing = full;
    r->n_writing = r->n_filling;
    r->n_filling = 0;
    r->next = d->full;
    d->full = r;
    r->in_pool = 1;
    if (write_full(d) == 0)
        return 0;
    d->full = r->next;
    r->in_pool = 0;
    return MB_ENOMEM;
}

/* The answer is in: what is left in the buffer follows, then the range is through. */
static void end_range(struct range *r)
{
    struct download *d = r->down;
    struct mb_store_op *op = d->op;
    if (op->err.code == 0 && r->n_filling > 0) {
        if (write_out(r) == 0)
            return;
        mb_err_set(&op->err, MB_ENOMEM, "out of memory");
    }
    if (op->err.code == 0 && r->received != range_len(d, r->index))
        mb_err_set(&op->err, MB_ECORRUPT, "asked for %" PRIu64 " bytes, got %" PRIu64,
                   range_len(d, r->index), r->received);
    if (op->err.code == 0) {
        d->crcs[r->index] = r->crc;
        d->n_done++;
        d->done_bytes += r->received;
        if (op->progress)
            op->progress(op->arg, d->done_bytes, op->size_bytes);
    }
    range_done(r);
}

static void buffer_written(struct range *r)
{
    struct download *d = r->down;
    r->in_pool = 0;
    r->written += r->n_writing;
    if (d->op->err.code == 0 && r->err.code != 0)
        d->op->err = r->err;
    if (!r->call) {
        end_range(r);
    } else if (d->op->err.code != 0) {
        s3_call_cancel(r->call);
    } else if (r->is_paused) {
        r->is_paused = 0;
        if (r->n_filling == d->buffer_bytes && write_out(r) != 0) {
            mb_err_set(&d->op->err, MB_ENOMEM, "out of memory");
            s3_call_cancel(r->call);
        } else {
            s3_call_resume(r->call);
        }
    }
}

static void on_buffers_written(uv_work_t *work, int status)
{
    struct download *d = work->data;
    struct range *written = d->in_the_pool, *next;
    d->in_the_pool = NULL;
    note_cancel(d, status);
    if (write_full(d) != 0) {
        if (d->op->err.code == 0)
            mb_err_set(&d->op->err, MB_ENOMEM, "out of memory");
        /* They end with that. */
        for (next = d->full; next; next = d->full) {
            d->full = next->next;
            next->next = written;
            written = next;
        }
    }
    for (struct range *r = written; r; r = next) {
        next = r->next; /* the last one may end the download */
        buffer_written(r);
    }
}

static int refuse(struct range *r, int code, const char *text)
{
    if (r->down->op->err.code == 0)
        mb_err_set(&r->down->op->err, code, "%s", text);
    return MB_ESTATE; /* no other attempt follows */
}

static int take_bytes(void *arg, const void *p, size_t n)
{
    struct range *r = arg;
    const struct download *d = r->down;
    const uint8_t *bytes = p;
    if (r->down->op->err.code != 0)
        return MB_ESTATE;
    if ((r->begins_anew || r->n_filling + n > d->buffer_bytes) && r->in_pool) {
        r->is_paused = 1;
        return MB_HTTP_SINK_PAUSE;
    }
    if (r->begins_anew) {
        r->begins_anew = 0;
        r->received = r->written = r->crc = 0;
        r->n_filling = 0;
    }
    if (n > range_len(r->down, r->index) - r->received)
        return refuse(r, MB_EPROTO, "the server sent more than was asked for");
    r->received += n;
    r->crc = mb_crc64nvme(r->crc, bytes, n);
    while (r->filling && n > 0) {
        size_t room = d->buffer_bytes - r->n_filling, some = n < room ? n : room;
        memcpy(r->filling + r->n_filling, bytes, some);
        r->n_filling += some;
        bytes += some;
        n -= some;
        /* A piece that does not fit is let in only while the pool has nothing, so this is one. */
        if (r->n_filling == d->buffer_bytes && !r->in_pool && write_out(r) != 0)
            return refuse(r, MB_ENOMEM, "out of memory");
    }
    if (r->in_pool && !r->is_paused && r->n_filling + MB_HTTP_READ_BYTES > d->buffer_bytes &&
        r->received < range_len(r->down, r->index)) {
        r->is_paused = 1;
        return MB_HTTP_SINK_FULL;
    }
    return 0;
}

static int take_head(void *arg, const struct mb_http_response *http)
{
    struct range *r = arg;
    struct download *d = r->down;
    const char *all = http->header(http, d->n_ranges > 1 ? "Content-Range" : "Content-Length");
    const char *etag = http->header(http, "ETag");
    r->begins_anew = 1;
    if (d->n_ranges > 1 && http->status != 206)
        return refuse(r, MB_EPROTO, "a part was asked for, the server sent the whole object");
    if (d->n_ranges > 1 && all) { /* "bytes 0-99/1234" */
        all = strchr(all, '/');
        all = all && all[1] >= '0' && all[1] <= '9' ? all + 1 : NULL;
    }
    if (all && strtoull(all, NULL, 10) != d->op->size_bytes)
        return refuse(r, MB_ECORRUPT, "the object has another size than it should have");
    if (!d->op->out_etag[0] && etag)
        snprintf(d->op->out_etag, sizeof d->op->out_etag, "%s", etag);
    return 0;
}

/* ---- ranges ---- */

static void on_range(void *arg, const struct s3_answer *a)
{
    struct range *r = arg;
    struct mb_store_op *op = r->down->op;
    r->call = NULL;
    if (a->error == MB_EEXIST) {
        if (op->err.code == 0)
            mb_err_set(&op->err, MB_ESTATE, "the object changed while it was read");
    } else if (a->error != 0 && strcmp(a->code, "InvalidRange") == 0) {
        refuse(r, MB_ECORRUPT, "the object is shorter than it should be");
    } else if (a->error != 0) {
        s3_op_fail(op, a); /* keeps what a sink has said before */
    } else {
        s3_went_well(r->down->s3);
    }
    if (a->error == 0 && r->begins_anew) { /* an answer without a byte */
        r->begins_anew = 0;
        r->received = r->written = r->crc = 0;
        r->n_filling = 0;
    }
    if (!r->in_pool)
        end_range(r);
}

static void start_range(void *arg)
{
    struct range *r = arg;
    struct download *d = r->down;
    char text[64];
    uint64_t first = r->index * RANGE_BYTES;
    struct s3_request request = {.method = "GET",
                                 .key = d->op->key,
                                 .body_fd = -1,
                                 .sink = take_bytes,
                                 .head = take_head,
                                 .sink_arg = r};
    note_cancel(d, 0);
    if (d->fd >= 0 && take_buffers(r) != 0 && d->op->err.code == 0)
        mb_err_set(&d->op->err, MB_ENOMEM, "out of memory");
    if (d->n_ranges > 1) {
        snprintf(text, sizeof text, "bytes=%" PRIu64 "-%" PRIu64, first,
                 first + range_len(d, r->index) - 1);
        s3_request_header(&request, "range", text);
    }
    if (d->op->out_etag[0])
        s3_request_header(&request, "if-match", d->op->out_etag);
    if (d->op->err.code != 0 ||
        s3_call_start(d->op, &request, on_range, r, &r->call, &d->op->err) != 0)
        range_done(r);
}

static void take_turn(struct download *d)
{
    struct range *r = d->ranges;
    while (r->busy)
        r++;
    *r = (struct range){.down = d, .index = d->next_range++, .busy = 1};
    r->turn.priority = d->op->priority;
    r->turn.order = d->order;
    d->in_flight++;
    s3_turn_send(d->s3, &r->turn, start_range, r);
}

static void pump(struct download *d)
{
    /* Without an etag the first range goes alone: its answer binds the others. */
    size_t at_once = d->op->out_etag[0] ? d->n_slots : 1;
    note_cancel(d, 0);
    d->pumping = 1;
    while (d->op->err.code == 0 && d->in_flight < at_once && d->next_range < d->n_ranges)
        take_turn(d);
    d->pumping = 0;
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
    if (!d->temp)
        return;
    d->fd = open(d->temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (d->fd < 0) {
        mb_err_sys(&d->op->err, errno, "create %s", d->temp);
        mb_free(d->temp); /* nothing to remove */
        d->temp = NULL;
    } else if (d->op->size_bytes > RANGE_BYTES &&
               fallocate(d->fd, 0, 0, (off_t)d->op->size_bytes) != 0 &&
               (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)) {
        mb_err_sys(&d->op->err, errno, "taking %" PRIu64 " bytes for %s", d->op->size_bytes,
                   d->temp);
    }
    if (d->fd >= 0 && d->op->is_direct && d->op->size_bytes >= DIRECT_MIN_BYTES)
        d->direct_fd = open(d->temp, O_WRONLY | O_DIRECT | O_CLOEXEC); /* not every one can */
    if (d->direct_fd >= 0)
        d->buffer_bytes = DIRECT_BUFFER_BYTES;
}

static void on_temp_open(uv_work_t *work, int status)
{
    struct download *d = work->data;
    note_cancel(d, status);
    pump(d);
}

/* The size is known. */
static int prepare(struct download *d, struct mb_err *err)
{
    struct mb_store_op *op = d->op;
    d->n_ranges = (size_t)((op->size_bytes + RANGE_BYTES - 1) / RANGE_BYTES);
    if (d->n_ranges == 0 && op->has_size)
        d->n_ranges = 1; /* of no bytes: is the object there at all? */
    d->n_slots = d->n_ranges < RANGES_MAX ? d->n_ranges : RANGES_MAX;
    d->crcs = mb_calloc(d->n_ranges + 1, sizeof *d->crcs);
    d->ranges = mb_calloc(d->n_slots + 1, sizeof *d->ranges);
    if (d->crcs && d->ranges && uv_queue_work(d->s3->loop, &d->work, open_temp, on_temp_open) == 0)
        return 0;
    return mb_err_set(err, MB_ENOMEM, "s3: out of memory");
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
    if (prepare(d, &op->err) != 0)
        finish(d);
}

int s3_download_start(struct mb_store_op *op, struct mb_err *err)
{
    struct s3_request request = {.method = "HEAD", .key = op->key, .body_fd = -1};
    struct download *d = mb_calloc(1, sizeof *d);
    int rc = 0;
    if (!d)
        return mb_err_set(err, MB_ENOMEM, "s3: out of memory");
    d->op = op;
    d->s3 = op->store->impl;
    d->order = ++d->s3->turns.last_order;
    d->fd = d->direct_fd = -1;
    d->buffer_bytes = BUFFER_BYTES;
    d->work.data = d;
    if (op->path) {
        d->temp = mb_asprintf("%s.mobula-tmp-%016" PRIx64, op->path, mb_random_u64());
        rc = d->temp ? 0 : mb_err_set(err, MB_ENOMEM, "s3: out of memory");
    }
    op->impl = d;
    s3_request_header(&request, "x-amz-checksum-mode", "ENABLED");
    op->size_bytes = op->want_bytes;
    if (rc == 0)
        rc =
            op->has_size ? prepare(d, err) : s3_call_start(op, &request, on_head, d, &d->call, err);
    if (rc != 0) {
        mb_free(d->crcs);
        mb_free(d->ranges);
        mb_free(d->temp);
        mb_free(d);
        op->impl = NULL;
    }
    return rc;
}

void s3_download_cancel(struct mb_store_op *op)
{
    struct download *d = op->impl;
    int n_ended = 0;
    if (d->call)
        s3_call_cancel(d->call);
    d->pumping = 1;
    for (size_t i = 0; d->ranges && i < d->n_slots; i++) {
        struct range *r = &d->ranges[i];
        if (r->call) {
            s3_call_cancel(r->call);
        } else if (r->turn.state == S3_TURN_WAITS_2) {
            range_done(r);
            n_ended++;
        }
    }
    d->pumping = 0;
    if (n_ended > 0)
        pump(d);
}
