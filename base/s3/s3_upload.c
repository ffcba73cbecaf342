/*
 * A file becomes an object.
 *
 * 1. The pool opens the file and takes its size. Below 64 MiB: checksum in the pool, one PUT.
 * 2. Above: parts of 16 MiB, or size / 9000 rounded up, so that 10,000 parts are never needed. The
 *    size alone decides, so a resumed upload cuts the same parts.
 * 3. Resume: ListParts is the truth. Unknown upload: perhaps it was completed and only the answer
 *    was lost, so the object itself is compared first; else a new upload begins.
 * 4. Parts in flight: checksum in the pool, then PUT straight from the file. A part the server
 * holds with the same size and checksum is not sent again.
 * 5. Complete with every part's checksum and that of the whole object, combined from the parts.
 * Failures: single requests repeat themselves (s3_call.c). The upload id getting lost in the middle
 * starts over once. What fails for good ends the rest; the upload is aborted unless the caller may
 * resume it (it was told the id, and the fault was reachability, time or cancellation).
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/s3/s3.h"
#include "base/s3/sigv4.h"

enum { HASH_BLOCK_BYTES = 256 * 1024, ABORT_TIMEOUT_MS = 30000, MAX_PARTS = 10000 };

struct part {
    uint64_t crc;
    char etag[72]; /* "" until the server has it */
    char server_crc[16];
    uint64_t server_size_bytes;
};

struct slot {
    uv_work_t work;
    struct upload *up;
    size_t part;
    int busy;
    int rc; /* of the pool's work */
    struct s3_call *call;
};

struct upload {
    struct mb_store_op *op;
    struct s3 *s3;
    int fd;
    struct stat st;
    uint64_t size_bytes;
    uint64_t part_bytes;
    size_t n_parts;
    struct part *parts;
    size_t next_part;
    size_t n_done;
    uint64_t done_bytes;
    size_t in_flight;
    struct slot slots[S3_PARTS_IN_FLIGHT];
    char *upload_id;
    struct mb_buf complete_body;
    struct s3_call *call; /* of a step that is alone */
    uv_work_t work;
    int rc;
    int is_single; /* one PUT, no multipart upload */
    int lost;      /* the upload id is unknown to the server */
    int restarted; /* that happened before */
    uint64_t whole_crc;
};

static void pump(struct upload *up);
static void create(struct upload *up);

/* ---- the end ---- */

static void finish(struct upload *up)
{
    struct mb_store_op *op = up->op;
    if (up->fd >= 0)
        close(up->fd);
    mb_free(up->parts);
    mb_free(up->upload_id);
    mb_buf_close(&up->complete_body);
    mb_free(up);
    op->impl = NULL;
    mb_store_op_finish(op);
}

static void on_aborted(void *arg, const struct s3_answer *a)
{
    struct upload *up = arg;
    up->call = NULL;
    if (a->error != 0 && a->error != MB_ENOENT)
        mb_warn("s3", "an unfinished upload stays behind: %s", a->text);
    finish(up);
}

static int start_call(struct upload *up, const struct s3_request *request, s3_done_cb done)
{
    return s3_call_start(up->op, request, done, up, &up->call, &up->op->err);
}

static int upload_query(struct upload *up, const char *before, struct mb_buf *query)
{
    int rc = mb_buf_printf(query, "%suploadId=", before);
    return rc != 0 ? rc : mb_buf_url(query, up->upload_id, 0);
}

/* The caller may resume: it knows the id, and trying again can help. */
static int is_resumable(const struct upload *up)
{
    int code = up->op->err.code;
    return (up->op->on_upload_id || up->op->resume_upload_id) &&
           (code == MB_EUNAVAIL || code == MB_ETIMEOUT || code == MB_ECANCELED);
}

static void end(struct upload *up)
{
    struct mb_store_op *op = up->op;
    struct mb_buf query = {0};
    if (op->err.code == 0 || !up->upload_id || up->lost || is_resumable(up) || op->canceled) {
        finish(up);
        return;
    }
    struct mb_err kept = op->err;
    struct s3_request request = {.method = "DELETE", .key = op->key, .body_fd = -1};
    op->deadline_ms = mb_mono_ms() + ABORT_TIMEOUT_MS;
    int rc = upload_query(up, "", &query);
    request.query = mb_buf_str(&query);
    if (rc == 0)
        rc = start_call(up, &request, on_aborted);
    op->err = kept;
    mb_buf_close(&query);
    if (rc != 0)
        finish(up);
}

static void fail_nomem(struct upload *up)
{
    if (up->op->err.code == 0)
        mb_err_set(&up->op->err, MB_ENOMEM, "out of memory");
}

static int is_no_such_upload(const struct s3_answer *a)
{
    return a->error == MB_ENOENT && strcmp(a->code, "NoSuchUpload") == 0;
}

/* ---- is the object there already? ---- */

/* Reads the whole file in the pool; up->whole_crc. */
static int hash_range(int fd, uint64_t offset, uint64_t n, uint64_t *out)
{
    uint8_t *block = mb_alloc(HASH_BLOCK_BYTES);
    uint64_t crc = 0;
    int rc = block ? 0 : MB_ENOMEM;
    while (rc == 0 && n > 0) {
        size_t want = n < HASH_BLOCK_BYTES ? (size_t)n : HASH_BLOCK_BYTES;
        ssize_t got = pread(fd, block, want, (off_t)offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            rc = got < 0 ? MB_EIO : MB_ESTATE;
            break;
        }
        crc = mb_crc64nvme(crc, block, (size_t)got);
        offset += (uint64_t)got;
        n -= (uint64_t)got;
    }
    mb_free(block);
    *out = crc;
    return rc;
}

static void fail_hash(struct upload *up, int rc)
{
    if (up->op->err.code == 0)
        mb_err_set(&up->op->err, rc, "%s: %s", up->op->path,
                   rc == MB_ESTATE ? "became shorter while it was sent" : "cannot be read");
}

/* op->out_etag is set. */
static void succeed(struct upload *up)
{
    struct stat now;
    if (fstat(up->fd, &now) != 0 || (uint64_t)now.st_size != up->size_bytes) {
        mb_err_set(&up->op->err, MB_ESTATE, "%s: changed while it was sent", up->op->path);
    } else {
        up->op->size_bytes = up->size_bytes;
        up->op->crc64nvme = up->whole_crc;
    }
    finish(up);
}

static void on_object_compared(void *arg, const struct s3_answer *a)
{
    struct upload *up = arg;
    char want[16];
    up->call = NULL;
    s3_checksum_text(up->whole_crc, want);
    const char *length = a->error == 0 ? a->http->header(a->http, "Content-Length") : NULL;
    const char *crc = a->error == 0 ? a->http->header(a->http, S3_CHECKSUM_HEADER) : NULL;
    int same =
        length && strtoull(length, NULL, 10) == up->size_bytes && crc && strcmp(crc, want) == 0;
    if (same) {
        s3_answer_etag(a, up->op->out_etag, sizeof up->op->out_etag);
        succeed(up);
    } else if (a->error != 0 && a->error != MB_ENOENT) {
        s3_op_fail(up->op, a);
        end(up);
    } else if (up->restarted) {
        mb_err_set(&up->op->err, MB_EUNAVAIL, "the server forgot the multipart upload twice");
        end(up);
    } else {
        up->restarted = 1;
        create(up);
    }
}

static void on_whole_hashed(uv_work_t *work, int status)
{
    struct upload *up = work->data;
    struct s3_request request = {.method = "HEAD", .key = up->op->key, .body_fd = -1};
    if (status != 0 || up->op->canceled)
        mb_err_set(&up->op->err, MB_ECANCELED, "cancelled");
    else if (up->rc != 0)
        fail_hash(up, up->rc);
    s3_request_header(&request, "x-amz-checksum-mode", "ENABLED");
    if (up->op->err.code != 0 || start_call(up, &request, on_object_compared) != 0)
        end(up);
}

static void hash_whole(uv_work_t *work)
{
    struct upload *up = work->data;
    up->rc = hash_range(up->fd, 0, up->size_bytes, &up->whole_crc);
}

static void compare_object(struct upload *up)
{
    up->lost = 1;
    up->work.data = up;
    if (uv_queue_work(up->s3->loop, &up->work, hash_whole, on_whole_hashed) != 0) {
        fail_nomem(up);
        end(up);
    }
}

/* ---- complete ---- */

static int on_complete_field(void *arg, const char *parent, const char *name, const char *text)
{
    struct upload *up = arg;
    if (strcmp(parent, "CompleteMultipartUploadResult") == 0 && strcmp(name, "ETag") == 0)
        snprintf(up->op->out_etag, sizeof up->op->out_etag, "%s", text);
    return 0;
}

static void on_completed(void *arg, const struct s3_answer *a)
{
    struct upload *up = arg;
    up->call = NULL;
    if (a->error == 0 && mb_s3_xml_parse(a->http->body, a->http->body_len, on_complete_field, up,
                                         &up->op->err) != 0) {
        mb_err_wrap(&up->op->err, "answer to CompleteMultipartUpload");
        end(up);
    } else if (a->error == 0) {
        succeed(up);
    } else if (is_no_such_upload(a)) {
        compare_object(up); /* completed by an attempt whose answer was lost? */
    } else {
        s3_op_fail(up->op, a);
        end(up);
    }
}

static int add_complete_part(struct upload *up, size_t i)
{
    struct mb_buf *body = &up->complete_body;
    char crc[16];
    int rc = mb_buf_printf(body, "<Part><PartNumber>%zu</PartNumber><ETag>", i + 1);
    for (const char *p = up->parts[i].etag; rc == 0 && *p; p++)
        rc = *p == '"' ? mb_buf_puts(body, "&quot;") : mb_buf_add(body, p, 1);
    if (rc == 0)
        rc = mb_buf_puts(body, "</ETag>");
    s3_checksum_text(up->parts[i].crc, crc);
    if (rc == 0 && !up->s3->no_checksum)
        rc = mb_buf_printf(body, "<ChecksumCRC64NVME>%s</ChecksumCRC64NVME>", crc);
    return rc != 0 ? rc : mb_buf_puts(body, "</Part>");
}

static void complete(struct upload *up)
{
    struct mb_buf query = {0};
    struct s3_request request = {
        .method = "POST", .key = up->op->key, .body_fd = -1, .long_answer = 1};
    mb_buf_reset(&up->complete_body);
    int rc = mb_buf_puts(&up->complete_body, "<CompleteMultipartUpload>");
    up->whole_crc = 0;
    for (size_t i = 0; rc == 0 && i < up->n_parts; i++) {
        uint64_t left = up->size_bytes - i * up->part_bytes;
        up->whole_crc = mb_crc64nvme_combine(up->whole_crc, up->parts[i].crc,
                                             left < up->part_bytes ? left : up->part_bytes);
        rc = add_complete_part(up, i);
    }
    if (rc == 0)
        rc = mb_buf_puts(&up->complete_body, "</CompleteMultipartUpload>");
    if (rc == 0)
        rc = upload_query(up, "", &query);
    s3_request_checksum(up->s3, &request, up->whole_crc);
    if (!up->s3->no_checksum)
        s3_request_header(&request, "x-amz-checksum-type", "FULL_OBJECT");
    request.query = mb_buf_str(&query);
    request.body = up->complete_body.data;
    request.body_len = up->complete_body.len;
    if (rc != 0)
        fail_nomem(up);
    if (up->op->err.code != 0 || start_call(up, &request, on_completed) != 0)
        end(up);
    mb_buf_close(&query);
}

/* ---- parts ---- */

static uint64_t part_len(const struct upload *up, size_t part)
{
    uint64_t left = up->size_bytes - part * up->part_bytes;
    return left < up->part_bytes ? left : up->part_bytes;
}

static void part_done(struct slot *slot)
{
    struct upload *up = slot->up;
    slot->busy = 0;
    up->in_flight--;
    if (up->op->err.code == 0 && !up->lost) {
        up->n_done++;
        up->done_bytes += part_len(up, slot->part);
        if (up->op->progress)
            up->op->progress(up->op->arg, up->done_bytes, up->size_bytes);
    }
    pump(up);
}

static void on_part_sent(void *arg, const struct s3_answer *a)
{
    struct slot *slot = arg;
    struct upload *up = slot->up;
    slot->call = NULL;
    if (a->error == 0) {
        s3_answer_etag(a, up->parts[slot->part].etag, sizeof up->parts[slot->part].etag);
        if (up->is_single) {
            up->whole_crc = up->parts[0].crc;
            s3_answer_etag(a, up->op->out_etag, sizeof up->op->out_etag);
        }
        if (up->s3->parallel < S3_PARTS_IN_FLIGHT)
            up->s3->parallel++;
    } else if (is_no_such_upload(a)) {
        up->lost = 1;
    } else {
        s3_op_fail(up->op, a);
    }
    part_done(slot);
}

static int send_part(struct slot *slot)
{
    struct upload *up = slot->up;
    struct mb_buf query = {0};
    char before[48];
    struct s3_request request = {.method = "PUT",
                                 .key = up->op->key,
                                 .body_fd = up->fd,
                                 .body_offset = slot->part * up->part_bytes,
                                 .body_len = (size_t)part_len(up, slot->part)};
    int rc = 0;
    if (up->upload_id) {
        snprintf(before, sizeof before, "partNumber=%zu&", slot->part + 1);
        rc = upload_query(up, before, &query);
        request.query = mb_buf_str(&query);
    }
    s3_request_checksum(up->s3, &request, up->parts[slot->part].crc);
    if (rc != 0)
        fail_nomem(up);
    else
        rc = s3_call_start(up->op, &request, on_part_sent, slot, &slot->call, &up->op->err);
    mb_buf_close(&query);
    return rc;
}

/* The server has this part: same size, and same checksum where it tells one. */
static int server_has(const struct upload *up, size_t i)
{
    const struct part *p = &up->parts[i];
    char crc[16];
    s3_checksum_text(p->crc, crc);
    return p->etag[0] && p->server_size_bytes == part_len(up, i) &&
           (!p->server_crc[0] || strcmp(p->server_crc, crc) == 0);
}

static void hash_part(uv_work_t *work)
{
    struct slot *slot = work->data;
    struct upload *up = slot->up;
    slot->rc = hash_range(up->fd, slot->part * up->part_bytes, part_len(up, slot->part),
                          &up->parts[slot->part].crc);
}

static void on_part_hashed(uv_work_t *work, int status)
{
    struct slot *slot = work->data;
    struct upload *up = slot->up;
    struct mb_store_op *op = up->op;
    if (op->err.code == 0 && (status != 0 || op->canceled))
        mb_err_set(&op->err, MB_ECANCELED, "cancelled");
    else if (slot->rc != 0)
        fail_hash(up, slot->rc);
    if (op->err.code == 0 && !up->lost && !server_has(up, slot->part) && send_part(slot) == 0)
        return;
    part_done(slot);
}

static int start_part(struct upload *up)
{
    for (size_t i = 0; i < S3_PARTS_IN_FLIGHT; i++) {
        struct slot *slot = &up->slots[i];
        if (slot->busy)
            continue;
        slot->up = up;
        slot->work.data = slot;
        slot->part = up->next_part;
        slot->rc = 0;
        if (uv_queue_work(up->s3->loop, &slot->work, hash_part, on_part_hashed) != 0)
            return MB_ENOMEM;
        slot->busy = 1;
        up->next_part++;
        up->in_flight++;
        return 0;
    }
    return MB_ESTATE;
}

static void pump(struct upload *up)
{
    struct mb_store_op *op = up->op;
    if (op->canceled && op->err.code == 0)
        mb_err_set(&op->err, MB_ECANCELED, "cancelled");
    while (op->err.code == 0 && !up->lost && up->in_flight < up->s3->parallel &&
           up->next_part < up->n_parts) {
        if (start_part(up) != 0)
            fail_nomem(up);
    }
    if (up->in_flight > 0)
        return;
    if (op->err.code != 0)
        end(up);
    else if (up->lost)
        compare_object(up);
    else if (up->n_done == up->n_parts && up->is_single)
        succeed(up);
    else if (up->n_done == up->n_parts)
        complete(up);
}

/* ---- begin, anew or again ---- */

static int on_create_field(void *arg, const char *parent, const char *name, const char *text)
{
    struct upload *up = arg;
    if (strcmp(parent, "InitiateMultipartUploadResult") != 0 || strcmp(name, "UploadId") != 0)
        return 0;
    mb_free(up->upload_id);
    up->upload_id = mb_strdup(text);
    return up->upload_id ? 0 : MB_ENOMEM;
}

static void on_created(void *arg, const struct s3_answer *a)
{
    struct upload *up = arg;
    up->call = NULL;
    if (a->error != 0)
        s3_op_fail(up->op, a);
    else
        mb_s3_xml_parse(a->http->body, a->http->body_len, on_create_field, up, &up->op->err);
    if (up->op->err.code == 0 && (!up->upload_id || !up->upload_id[0]))
        mb_err_set(&up->op->err, MB_EPROTO, "the server gave no upload id");
    if (up->op->err.code == 0 && up->op->on_upload_id)
        up->op->on_upload_id(up->op->arg, up->upload_id);
    pump(up);
}

static void create(struct upload *up)
{
    struct s3_request request = {
        .method = "POST", .key = up->op->key, .query = "uploads=", .body_fd = -1};
    mb_free(up->upload_id);
    up->upload_id = NULL;
    up->lost = 0;
    up->next_part = 0;
    up->n_done = 0;
    up->done_bytes = 0;
    memset(up->parts, 0, up->n_parts * sizeof *up->parts);
    if (!up->s3->no_checksum) {
        s3_request_header(&request, "x-amz-checksum-algorithm", "CRC64NVME");
        s3_request_header(&request, "x-amz-checksum-type", "FULL_OBJECT");
    }
    if (start_call(up, &request, on_created) != 0)
        end(up);
}

struct part_fields {
    struct upload *up;
    struct part part;
    size_t number;
    int truncated;
    size_t next_marker;
};

static int on_part_field(void *arg, const char *parent, const char *name, const char *text)
{
    struct part_fields *f = arg;
    if (strcmp(parent, "Part") == 0) {
        if (strcmp(name, "PartNumber") == 0)
            f->number = strtoul(text, NULL, 10);
        else if (strcmp(name, "ETag") == 0)
            snprintf(f->part.etag, sizeof f->part.etag, "%s", text);
        else if (strcmp(name, "Size") == 0)
            f->part.server_size_bytes = strtoull(text, NULL, 10);
        else if (strcmp(name, "ChecksumCRC64NVME") == 0)
            snprintf(f->part.server_crc, sizeof f->part.server_crc, "%s", text);
    } else if (strcmp(name, "Part") == 0) {
        if (f->number >= 1 && f->number <= f->up->n_parts)
            f->up->parts[f->number - 1] = f->part;
        memset(&f->part, 0, sizeof f->part);
        f->number = 0;
    } else if (strcmp(name, "IsTruncated") == 0) {
        f->truncated = strcmp(text, "true") == 0;
    } else if (strcmp(name, "NextPartNumberMarker") == 0) {
        f->next_marker = strtoul(text, NULL, 10);
    }
    return 0;
}

static void list_parts(struct upload *up, size_t marker);

static void on_parts(void *arg, const struct s3_answer *a)
{
    struct upload *up = arg;
    struct part_fields fields = {.up = up};
    up->call = NULL;
    if (is_no_such_upload(a)) {
        compare_object(up);
        return;
    }
    if (a->error != 0)
        s3_op_fail(up->op, a);
    else
        mb_s3_xml_parse(a->http->body, a->http->body_len, on_part_field, &fields, &up->op->err);
    if (up->op->err.code == 0 && fields.truncated && fields.next_marker > 0 &&
        fields.next_marker < MAX_PARTS) {
        list_parts(up, fields.next_marker);
        return;
    }
    pump(up);
}

static void list_parts(struct upload *up, size_t marker)
{
    struct mb_buf query = {0};
    char before[64] = "";
    struct s3_request request = {.method = "GET", .key = up->op->key, .body_fd = -1};
    if (marker > 0)
        snprintf(before, sizeof before, "part-number-marker=%zu&", marker);
    if (upload_query(up, before, &query) != 0)
        fail_nomem(up);
    request.query = mb_buf_str(&query);
    if (up->op->err.code != 0 || start_call(up, &request, on_parts) != 0)
        end(up);
    mb_buf_close(&query);
}

static void open_file(uv_work_t *work)
{
    struct upload *up = work->data;
    up->fd = open(up->op->path, O_RDONLY | O_CLOEXEC);
    up->rc = 0;
    if (up->fd < 0 || fstat(up->fd, &up->st) != 0)
        up->rc = errno;
    else if (!S_ISREG(up->st.st_mode))
        up->rc = EINVAL;
}

static void on_opened(uv_work_t *work, int status)
{
    struct upload *up = work->data;
    struct mb_store_op *op = up->op;
    if (status != 0 || op->canceled)
        mb_err_set(&op->err, MB_ECANCELED, "cancelled");
    else if (up->rc != 0)
        mb_err_sys(&op->err, up->rc, "open %s", op->path);
    up->size_bytes = (uint64_t)up->st.st_size;
    up->is_single = up->size_bytes < S3_SINGLE_PUT_BYTES;
    up->part_bytes = S3_MIN_PART_BYTES;
    if (up->is_single) {
        up->part_bytes = up->size_bytes ? up->size_bytes : 1;
    } else if (up->size_bytes / 9000 + 1 > up->part_bytes) {
        uint64_t mib = 1024 * 1024;
        up->part_bytes = (up->size_bytes / 9000 + mib) / mib * mib;
    }
    up->n_parts =
        up->is_single ? 1 : (size_t)((up->size_bytes + up->part_bytes - 1) / up->part_bytes);
    up->parts = mb_calloc(up->n_parts, sizeof *up->parts);
    if (!up->parts)
        fail_nomem(up);
    if (op->err.code != 0)
        finish(up);
    else if (up->is_single)
        pump(up);
    else if (op->resume_upload_id && (up->upload_id = mb_strdup(op->resume_upload_id)))
        list_parts(up, 0);
    else
        create(up);
}

int s3_upload_start(struct mb_store_op *op, struct mb_err *err)
{
    struct upload *up = mb_calloc(1, sizeof *up);
    if (!up)
        return mb_err_set(err, MB_ENOMEM, "s3: out of memory");
    up->op = op;
    up->s3 = op->store->impl;
    up->fd = -1;
    up->work.data = up;
    if (uv_queue_work(up->s3->loop, &up->work, open_file, on_opened) != 0) {
        mb_free(up);
        return mb_err_set(err, MB_ENOMEM, "s3: out of memory");
    }
    op->impl = up;
    return 0;
}

void s3_upload_cancel(struct mb_store_op *op)
{
    struct upload *up = op->impl;
    if (up->call)
        s3_call_cancel(up->call);
    for (size_t i = 0; i < S3_PARTS_IN_FLIGHT; i++) {
        if (up->slots[i].call)
            s3_call_cancel(up->slots[i].call);
    }
}
