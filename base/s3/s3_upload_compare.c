/*
 * Is the object there already, with the bytes of the file?
 *
 * 1. The pool reads the file for its checksum, once for an upload.
 * 2. HEAD: the same size and checksum are success, whoever wrote it.
 * 3. An upload that the server does not know any more (NoSuchUpload) and no object: a server may be
 *    completing it. versitygw 1.8.0 gives the upload another name while it joins the parts, so it
 *    knows neither until the object is there, or the old name again when that failed. Both are
 *    looked for until it must have come to its end; then it is begun anew, once.
 */
#include <stdlib.h>
#include <string.h>
#include "base/checksum.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/s3/s3.h"
#include "base/s3/s3_upload.h"

enum {
    HASH_PIECE_BYTES = 8 * 1024 * 1024,
    LOOK_FIRST_MS = 100,
    LOOK_MAX_MS = 1000,
    /* A completion is given 5 s, and the time to copy the file at 100 MB/s, up to a minute. */
    COMPLETE_MIN_MS = 5000,
    COMPLETE_BYTES_PER_MS = 100000,
    COMPLETE_MAX_MS = 60000
};

/* 1: what was lost may be at its completion, by an attempt whose answer was not heard, or of a
 * process that was killed: look again after look_delay_ms. */
static int may_appear(struct upload *up)
{
    uint64_t now = mb_mono_ms();
    if (up->look_until_ms == 0) {
        uint64_t wait_ms = COMPLETE_MIN_MS + up->size_bytes / COMPLETE_BYTES_PER_MS;
        uint64_t left_ms = up->op->deadline_ms > now ? up->op->deadline_ms - now : 0;
        wait_ms = wait_ms < COMPLETE_MAX_MS ? wait_ms : COMPLETE_MAX_MS;
        up->look_until_ms = now + (wait_ms < left_ms / 2 ? wait_ms : left_ms / 2);
        up->n_looks = 0;
        mb_info("s3", "the server does not know the upload any more; may be completing key=%s",
                up->op->key);
    }
    if (now >= up->look_until_ms)
        return 0;
    up->look_delay_ms = mb_backoff_ms(up->n_looks++, LOOK_FIRST_MS, LOOK_MAX_MS, mb_random_u64());
    if (up->look_delay_ms > up->look_until_ms - now)
        up->look_delay_ms = up->look_until_ms - now;
    return 1;
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
    s3_answer_etag(a, up->op->out_etag, sizeof up->op->out_etag);
    if (same) {
        s3_upload_succeed(up);
    } else if (a->error != 0 && a->error != MB_ENOENT) {
        s3_op_fail(up->op, a);
        s3_upload_end(up);
    } else if (up->refused) {
        mb_err_set(&up->op->err, MB_EEXIST, "another object is there");
        s3_upload_end(up);
    } else if (up->looks) {
        s3_upload_begin_sending(up);
    } else if (s3_upload_is_given_up(up)) {
        s3_upload_end(up);
    } else if (may_appear(up)) {
        s3_upload_look_again(up);
    } else if (up->restarted) {
        mb_err_set(&up->op->err, MB_EUNAVAIL, "the server forgot the multipart upload twice");
        s3_upload_end(up);
    } else {
        mb_warn("s3", "the server has neither the upload nor its object, all is sent again key=%s",
                up->op->key);
        up->restarted = 1;
        up->look_until_ms = 0;
        s3_upload_create(up);
    }
}

static void ask_for_object(struct upload *up)
{
    struct s3_request request = {.method = "HEAD", .key = up->op->key, .body_fd = -1};
    s3_request_header(&request, "x-amz-checksum-mode", "ENABLED");
    if (up->op->err.code != 0 || s3_upload_call(up, &request, on_object_compared) != 0)
        s3_upload_end(up);
}

static void on_whole_hashed(uv_work_t *work, int status)
{
    struct upload *up = work->data;
    if (status != 0 || up->op->canceled)
        mb_err_set(&up->op->err, MB_ECANCELED, "cancelled");
    else if (up->rc != 0)
        s3_upload_fail_hash(up, up->rc);
    up->has_read_crc = up->op->err.code == 0;
    ask_for_object(up);
}

/* Reads the whole file in the pool, in pieces: a cancel does not wait for all of it. */
static void hash_whole(uv_work_t *work)
{
    struct upload *up = work->data;
    up->rc = 0;
    up->whole_crc = 0;
    for (uint64_t at = 0, n; up->rc == 0 && at < up->size_bytes; at += n) {
        uint64_t crc;
        n = up->size_bytes - at < HASH_PIECE_BYTES ? up->size_bytes - at : HASH_PIECE_BYTES;
        up->rc = atomic_load(&up->stops) ? MB_ECANCELED : s3_hash_range(up->fd, at, n, &crc);
        if (up->rc == 0)
            up->whole_crc = mb_crc64nvme_combine(up->whole_crc, crc, n);
    }
}

void s3_upload_compare(struct upload *up)
{
    up->work.data = up;
    if (up->has_read_crc) {
        ask_for_object(up);
    } else if (uv_queue_work(up->s3->loop, &up->work, hash_whole, on_whole_hashed) != 0) {
        s3_upload_fail_nomem(up);
        s3_upload_end(up);
    }
}
