/*
 * A file becomes an object.
 *
 * 1. The pool opens the file and takes its size. Below 64 MiB: checksum in the pool, one PUT.
 * 2. Above: parts as large as the store's settings say, or size / 9000 rounded up, so that 10,000
 *    parts are never needed. A resumed upload cuts the same ones, unless the settings were changed:
 *    then all are sent again, over those of the same numbers.
 * 3. Resume: ListParts is the truth. Unknown upload: perhaps it was completed and only the answer
 *    was lost, so the object itself is compared first (s3_upload_compare.c); else a new
 *    upload begins.
 * 4. Each part waits for its turn among those of all files (s3_turns.h): checksum in the pool, then
 *    PUT straight from the file, which leaves the page cache. A part the server holds with the same
 *    size and checksum is not sent again.
 * 5. Complete with every part's checksum and that of the whole object, combined from the parts.
 * With on_sent, even a small file goes as one part, and step 5 waits until the caller lets it go (a
 * file of no bytes has nothing to send before).
 * 6. The condition fails: the object that is there is compared. The same bytes are success, also if
 *    somebody else wrote them; else MB_EEXIST with its etag.
 * A file of up to 1 MiB gets its checksum where it is opened, so it waits for a connection only.
 * Failures: single requests repeat themselves (s3_call.c). The upload id getting lost in the middle
 * starts over once. What fails for good ends the rest; the upload is aborted unless the caller may
 * resume it (it was told the id, and the fault was reachability, time or cancellation, or a
 * condition). When the answer to CreateMultipartUpload was lost and it was asked again, the server
 * may hold two: the one without a known id is looked for at the end and aborted. A file whose size
 * or time changed while it was sent is MB_ESTATE.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/s3/s3.h"
#include "base/s3/s3_sum.h"
#include "base/s3/s3_sweep.h"
#include "base/s3/s3_upload.h"
#include "base/s3/sigv4.h"

enum {
    SMALL_BYTES = 1024 * 1024,
    ABORT_TIMEOUT_MS = 30000,
    SLOTS_MAX = S3_MAX_CONNECTIONS + S3_AHEAD
};

static uint64_t part_len(const struct upload *up, size_t part);

/* ---- the end ---- */

static void finish(struct upload *up);

static void on_strays_gone(void *arg, const struct mb_err *err, size_t n_aborted)
{
    struct upload *up = arg;
    up->sweep = NULL;
    if (err->code != 0)
        mb_warn("s3", "an unfinished upload may stay behind: %s", err->text);
    else if (n_aborted > 0)
        mb_info("s3", "uploads without a known id aborted key=%s n=%zu", up->op->key, n_aborted);
    finish(up);
}

/* 1: finish() comes later. */
static int sweep_strays(struct upload *up)
{
    struct mb_err err = {0};
    int code = up->op->err.code;
    if (!up->may_have_strays || up->op->leaves_strays || up->op->canceled || code == MB_EUNAVAIL ||
        code == MB_ETIMEOUT)
        return 0;
    up->may_have_strays = 0;
    up->op->deadline_ms = mb_mono_ms() + ABORT_TIMEOUT_MS;
    return s3_sweep_start(up->op, code == 0 ? NULL : up->upload_id, up->strays_since_unix_s,
                          on_strays_gone, up, &up->sweep, &err) == 0;
}

static void finish(struct upload *up)
{
    struct mb_store_op *op = up->op;
    if (sweep_strays(up))
        return;
    if (up->fd >= 0)
        close(up->fd);
    mb_free(up->slots);
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

int s3_upload_call(struct upload *up, const struct s3_request *request, s3_done_cb done)
{
    return s3_call_start(up->op, request, done, up, &up->call, &up->op->err);
}

int s3_upload_query(struct upload *up, const char *before, struct mb_buf *query)
{
    int rc = mb_buf_printf(query, "%suploadId=", before);
    return rc != 0 ? rc : mb_buf_url(query, up->upload_id, 0);
}

/* The caller may resume: it knows the id, and trying again can help. */
static int is_resumable(const struct upload *up)
{
    int code = up->op->err.code;
    return (up->op->on_upload_id || up->op->resume_upload_id) &&
           (code == MB_EUNAVAIL || code == MB_ETIMEOUT || code == MB_ECANCELED ||
            (code == MB_EEXIST && up->refused));
}

void s3_upload_end(struct upload *up)
{
    struct mb_store_op *op = up->op;
    struct mb_buf query = {0};
    if ((op->err.code == 0 && !up->refused) || !up->upload_id || up->lost || is_resumable(up) ||
        op->canceled) {
        finish(up);
        return;
    }
    struct mb_err kept = op->err;
    struct s3_request request = {.method = "DELETE", .key = op->key, .body_fd = -1};
    op->deadline_ms = mb_mono_ms() + ABORT_TIMEOUT_MS;
    int rc = s3_upload_query(up, "", &query);
    request.query = mb_buf_str(&query);
    if (rc == 0)
        rc = s3_upload_call(up, &request, on_aborted);
    op->err = kept;
    mb_buf_close(&query);
    if (rc != 0)
        finish(up);
}

void s3_upload_fail_nomem(struct upload *up)
{
    if (up->op->err.code == 0)
        mb_err_set(&up->op->err, MB_ENOMEM, "out of memory");
}

int s3_upload_is_unknown(const struct s3_answer *a)
{
    return a->error == MB_ENOENT && strcmp(a->code, "NoSuchUpload") == 0;
}

/* The condition failed; also when the object that should be replaced is gone. */
static int is_refused(const struct upload *up, const struct s3_answer *a)
{
    return (up->op->cond != MB_STORE_ALWAYS && a->error == MB_EEXIST) ||
           (up->op->cond == MB_STORE_IF_MATCH && strcmp(a->code, "NoSuchKey") == 0);
}

/* ---- what every step may say ---- */

void s3_upload_fail_hash(struct upload *up, int rc)
{
    if (up->op->err.code == 0)
        mb_err_set(&up->op->err, rc, "%s: %s", up->op->path,
                   rc == MB_ESTATE ? "became shorter while it was sent" : "cannot be read");
}

/* 1: what is sent may be a mixture. */
static int has_changed(const struct upload *up)
{
    struct stat now;
    return fstat(up->fd, &now) != 0 || now.st_size != up->st.st_size ||
           now.st_mtim.tv_sec != up->st.st_mtim.tv_sec ||
           now.st_mtim.tv_nsec != up->st.st_mtim.tv_nsec;
}

static void fail_changed(struct upload *up)
{
    if (up->op->err.code == 0)
        mb_err_set(&up->op->err, MB_ESTATE, "%s: changed while it was sent", up->op->path);
}

/* op->out_etag is set. */
void s3_upload_succeed(struct upload *up)
{
    if (has_changed(up)) {
        fail_changed(up);
    } else {
        up->op->size_bytes = up->size_bytes;
        up->op->crc64nvme = up->whole_crc;
    }
    s3_upload_end(up); /* parts that are not needed any more go */
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
        s3_upload_end(up);
    } else if (a->error == 0 && !a->ambiguous) {
        s3_upload_succeed(up);
    } else if (a->error == 0 || s3_upload_is_unknown(a)) {
        /* A server that was killed inside the first attempt may call the second one a success, with
         * no object there (seen with versitygw 1.8.0). */
        up->lost = 1;
        s3_upload_compare(up); /* completed by an attempt whose answer was lost? */
    } else if (is_refused(up, a)) {
        up->refused = 1;
        s3_upload_compare(up);
    } else {
        s3_op_fail(up->op, a);
        s3_upload_end(up);
    }
}

static void add_condition(const struct upload *up, struct s3_request *request)
{
    if (up->op->cond == MB_STORE_IF_ABSENT)
        s3_request_header(request, "if-none-match", "*");
    else if (up->op->cond == MB_STORE_IF_MATCH)
        s3_request_header(request, "if-match", up->op->etag);
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
        rc = s3_upload_query(up, "", &query);
    s3_request_checksum(&request, up->whole_crc);
    if (!up->s3->no_checksum)
        s3_request_header(&request, "x-amz-checksum-type", "FULL_OBJECT");
    add_condition(up, &request);
    request.query = mb_buf_str(&query);
    request.body = up->complete_body.data;
    request.body_len = up->complete_body.len;
    if (rc != 0)
        s3_upload_fail_nomem(up);
    if (up->op->err.code != 0 || s3_upload_call(up, &request, on_completed) != 0)
        s3_upload_end(up);
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
    s3_turn_end(up->s3, &slot->turn);
    slot->busy = 0;
    up->in_flight--;
    if (up->op->err.code == 0 && !up->lost && !up->refused) {
        up->n_done++;
        up->done_bytes += part_len(up, slot->part);
        if (up->op->progress)
            up->op->progress(up->op->arg, up->done_bytes, up->size_bytes);
    }
    if (!up->pumping)
        s3_upload_pump(up);
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
        if (!up->is_single) /* it is with the server, and nobody else reads it soon */
            posix_fadvise(up->fd, (off_t)(slot->part * up->part_bytes),
                          (off_t)part_len(up, slot->part), POSIX_FADV_DONTNEED);
        s3_went_well(up->s3);
    } else if (!up->is_single && s3_upload_is_unknown(a)) {
        up->lost = 1;
    } else if (up->is_single && is_refused(up, a)) {
        up->refused = 1;
    } else if (a->error == MB_ECORRUPT && has_changed(up)) {
        fail_changed(up);
    } else {
        s3_op_fail(up->op, a);
    }
    part_done(slot);
}

static void send_part(void *arg)
{
    struct slot *slot = arg;
    struct upload *up = slot->up;
    struct mb_buf query = {0};
    char before[48];
    struct s3_request request = {.method = "PUT",
                                 .key = up->op->key,
                                 .body_fd = up->fd,
                                 .body_offset = slot->part * up->part_bytes,
                                 .body_len = (size_t)part_len(up, slot->part)};
    int rc = up->op->canceled ? mb_err_set(&up->op->err, MB_ECANCELED, "cancelled") : 0;
    if (rc == 0 && up->upload_id) {
        snprintf(before, sizeof before, "partNumber=%zu&", slot->part + 1);
        rc = s3_upload_query(up, before, &query);
        request.query = mb_buf_str(&query);
    } else {
        add_condition(up, &request);
    }
    s3_request_checksum(&request, up->parts[slot->part].crc);
    if (rc != 0)
        s3_upload_fail_nomem(up);
    else if (up->op->err.code == 0 && !up->lost)
        rc = s3_call_start(up->op, &request, on_part_sent, slot, &slot->call, &up->op->err);
    mb_buf_close(&query);
    if (rc != 0 || !slot->call)
        part_done(slot);
}

/* The server has this part: same size, and same checksum; where it tells none the etag has to be
 * one, since a file may have been written anew with its old size. */
static int server_has(const struct upload *up, size_t i)
{
    const struct part *p = &up->parts[i];
    char crc[16];
    s3_checksum_text(p->crc, crc);
    return p->etag[0] && p->server_size_bytes == part_len(up, i) &&
           (p->server_crc[0] ? strcmp(p->server_crc, crc) == 0 : p->is_same);
}

static void hash_part(uv_work_t *work)
{
    struct slot *slot = work->data;
    struct upload *up = slot->up;
    struct part *p = &up->parts[slot->part];
    uint64_t offset = slot->part * up->part_bytes, n = part_len(up, slot->part);
    slot->rc = s3_hash_range(up->fd, offset, n, &p->crc);
    if (slot->rc == 0 && p->etag[0] && p->server_size_bytes == n && !p->server_crc[0])
        slot->rc = s3_sum_is_etag(up->fd, offset, n, p->etag, &p->is_same);
}

static void on_part_hashed(uv_work_t *work, int status)
{
    struct slot *slot = work->data;
    struct upload *up = slot->up;
    struct mb_store_op *op = up->op;
    if (op->err.code == 0 && (status != 0 || op->canceled))
        mb_err_set(&op->err, MB_ECANCELED, "cancelled");
    else if (slot->rc != 0)
        s3_upload_fail_hash(up, slot->rc);
    if (op->err.code == 0 && !up->lost && !server_has(up, slot->part))
        s3_turn_send(up->s3, &slot->turn, send_part, slot);
    else
        part_done(slot);
}

static void prepare_part(void *arg)
{
    struct slot *slot = arg;
    struct upload *up = slot->up;
    if (up->op->err.code == 0 && !up->lost && !up->op->canceled) {
        if (uv_queue_work(up->s3->loop, &slot->work, hash_part, on_part_hashed) == 0)
            return;
        s3_upload_fail_nomem(up);
    }
    part_done(slot);
}

static void start_part(struct upload *up)
{
    struct slot *slot = up->slots;
    while (slot->busy)
        slot++;
    slot->up = up;
    slot->work.data = slot;
    slot->part = up->next_part++;
    slot->rc = 0;
    slot->busy = 1;
    slot->turn.priority = up->op->priority;
    slot->turn.order = up->order;
    up->in_flight++;
    if (up->is_hashed)
        s3_turn_send(up->s3, &slot->turn, send_part, slot);
    else
        s3_turn_prepare(up->s3, &slot->turn, prepare_part, slot);
}

static void wait_for_go(struct upload *up)
{
    up->waits = 1;
    up->op->on_sent(up->op->arg, up->op);
}

int s3_upload_is_given_up(struct upload *up)
{
    struct mb_store_op *op = up->op;
    if (!op->canceled && !(op->gives_up && *op->gives_up))
        return 0;
    if (op->err.code == 0)
        mb_err_set(&op->err, MB_ECANCELED, "cancelled");
    return 1;
}

void s3_upload_pump(struct upload *up)
{
    struct mb_store_op *op = up->op;
    (void)s3_upload_is_given_up(up);
    up->pumping = 1;
    while (op->err.code == 0 && !up->lost && up->in_flight < up->n_slots &&
           up->next_part < up->n_parts)
        start_part(up);
    up->pumping = 0;
    if (up->in_flight > 0)
        return;
    if (op->err.code != 0)
        s3_upload_end(up);
    else if (up->lost || up->refused)
        s3_upload_compare(up);
    else if (up->n_done == up->n_parts && up->is_single)
        s3_upload_succeed(up);
    else if (up->n_done == up->n_parts && op->on_sent && !up->may_go)
        wait_for_go(up);
    else if (up->n_done == up->n_parts)
        complete(up);
}

void s3_upload_go(struct mb_store_op *op, int gives_up)
{
    struct upload *up = op->impl;
    up->waits = 0;
    up->may_go = 1;
    if (gives_up)
        mb_err_set(&op->err, MB_ECANCELED, "given up");
    if (op->err.code != 0)
        s3_upload_end(up);
    else if (up->is_single)
        s3_upload_pump(up);
    else
        complete(up);
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
    if (up->rc != 0 || up->st.st_size > SMALL_BYTES || up->op->on_sent)
        return;
    up->is_hashed = s3_hash_range(up->fd, 0, (uint64_t)up->st.st_size, &up->whole_crc) == 0;
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
    up->is_single =
        up->size_bytes < (op->on_sent ? 1 : S3_SINGLE_PUT_BYTES); /* see on_sent above */
    up->part_bytes = up->s3->part_bytes;
    if (up->is_single) {
        up->part_bytes = up->size_bytes ? up->size_bytes : 1;
    } else if (up->size_bytes / 9000 + 1 > up->part_bytes) {
        uint64_t mib = 1024 * 1024;
        up->part_bytes = (up->size_bytes / 9000 + mib) / mib * mib;
    }
    up->n_parts =
        up->is_single ? 1 : (size_t)((up->size_bytes + up->part_bytes - 1) / up->part_bytes);
    up->n_slots = up->n_parts < SLOTS_MAX ? up->n_parts : SLOTS_MAX;
    up->parts = mb_calloc(up->n_parts, sizeof *up->parts);
    up->slots = mb_calloc(up->n_slots, sizeof *up->slots);
    if (!up->parts || !up->slots)
        s3_upload_fail_nomem(up);
    else
        up->parts[0].crc = up->whole_crc; /* of a small file */
    up->looks = op->look_first && !(op->resume_upload_id && !up->is_single);
    if (op->err.code != 0)
        finish(up);
    else if (up->looks)
        s3_upload_compare(up);
    else
        s3_upload_begin_sending(up);
}

void s3_upload_begin_sending(struct upload *up)
{
    struct mb_store_op *op = up->op;
    up->looks = 0;
    if (up->is_single && op->on_sent)
        wait_for_go(up);
    else if (up->is_single)
        s3_upload_pump(up);
    else if (op->resume_upload_id && (up->upload_id = mb_strdup(op->resume_upload_id)))
        s3_upload_list_parts(up);
    else
        s3_upload_create(up);
}

void s3_upload_set_priority(struct mb_store_op *op)
{
    struct upload *up = op->impl;
    for (size_t i = 0; up->slots && i < up->n_slots; i++) {
        if (up->slots[i].busy)
            s3_turn_set_priority(up->s3, &up->slots[i].turn, op->priority);
    }
}

int s3_upload_start(struct mb_store_op *op, struct mb_err *err)
{
    struct upload *up = mb_calloc(1, sizeof *up);
    if (!up)
        return mb_err_set(err, MB_ENOMEM, "s3: out of memory");
    up->op = op;
    up->s3 = op->store->impl;
    up->order = ++up->s3->turns.last_order;
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
    atomic_store(&up->stops, 1);
    if (up->waits) {
        s3_upload_go(op, 1);
        return;
    }
    if (up->sweep)
        s3_sweep_cancel(up->sweep);
    if (up->call)
        s3_call_cancel(up->call);
    int n_ended = 0;
    up->pumping = 1;
    for (size_t i = 0; up->slots && i < up->n_slots; i++) {
        struct slot *slot = &up->slots[i];
        if (slot->call) {
            s3_call_end(slot->call, op->patience_ms);
        } else if (slot->turn.state == S3_TURN_WAITS || slot->turn.state == S3_TURN_WAITS_2) {
            part_done(slot);
            n_ended++;
        }
    }
    up->pumping = 0;
    if (n_ended > 0)
        s3_upload_pump(up);
}
