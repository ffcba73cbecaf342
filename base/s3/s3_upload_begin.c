/*
 * The beginning of a multipart upload: a new one, or what the server holds of an old one.
 *
 * 1. create: the caller hears of the id at once. An answer that was lost before may have begun
 *    another one, which nobody knows: looked for before the caller hears of this one, since who
 *    resumes by the id would not look any more; and once more at the end, for one that came late.
 * 2. list: every page of the parts; an unknown upload is compared with the object.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/s3/s3_sweep.h"
#include "base/s3/s3_upload.h"

enum { MAX_PARTS = 10000 };

static int on_create_field(void *arg, const char *parent, const char *name, const char *text)
{
    struct upload *up = arg;
    if (strcmp(parent, "InitiateMultipartUploadResult") != 0 || strcmp(name, "UploadId") != 0)
        return 0;
    mb_free(up->upload_id);
    up->upload_id = mb_strdup(text);
    return up->upload_id ? 0 : MB_ENOMEM;
}

/* What the server may have begun for an attempt whose answer was lost is not older than that. */
static void note_strays(struct upload *up, const struct s3_answer *a)
{
    up->op->has_strays = 1;
    const char *date = a->http ? a->http->header(a->http, "Date") : NULL;
    struct tm tm = {0};
    if (!date || !strptime(date, "%a, %d %b %Y %H:%M:%S", &tm))
        return;
    up->may_have_strays = 1;
    up->strays_since_unix_s =
        (int64_t)timegm(&tm) - (int64_t)((mb_mono_ms() - up->create_began_ms) / 1000) - 2;
}

static void begun(struct upload *up)
{
    if (up->op->err.code == 0 && up->op->on_upload_id)
        up->op->on_upload_id(up->op->arg, up->upload_id);
    s3_upload_pump(up);
}

static void on_strays_gone(void *arg, const struct mb_err *err, size_t n_aborted)
{
    struct upload *up = arg;
    up->sweep = NULL;
    if (err->code != 0)
        mb_warn("s3", "unfinished uploads are looked for again later: %s", err->text);
    else if (n_aborted > 0)
        mb_info("s3", "uploads without a known id aborted key=%s n=%zu", up->op->key, n_aborted);
    begun(up);
}

static void on_created(void *arg, const struct s3_answer *a)
{
    struct upload *up = arg;
    struct mb_err err;
    up->call = NULL;
    if (a->ambiguous)
        note_strays(up, a);
    if (a->error != 0)
        s3_op_fail(up->op, a);
    else
        mb_s3_xml_parse(a->http->body, a->http->body_len, on_create_field, up, &up->op->err);
    if (up->op->err.code == 0 && (!up->upload_id || !up->upload_id[0]))
        mb_err_set(&up->op->err, MB_EPROTO, "the server gave no upload id");
    if (up->op->err.code != 0 || !up->may_have_strays || up->op->leaves_strays ||
        s3_sweep_start(up->op, up->upload_id, up->strays_since_unix_s, on_strays_gone, up,
                       &up->sweep, &err) != 0)
        begun(up);
}

/* No part is known to be with the server. */
static void forget_parts(struct upload *up)
{
    up->lost = 0;
    up->next_part = 0;
    up->n_done = 0;
    up->done_bytes = 0;
    memset(up->parts, 0, up->n_parts * sizeof *up->parts);
}

void s3_upload_create(struct upload *up)
{
    struct s3_request request = {
        .method = "POST", .key = up->op->key, .query = "uploads=", .body_fd = -1};
    mb_free(up->upload_id);
    up->upload_id = NULL;
    forget_parts(up);
    if (!up->s3->no_checksum) {
        s3_request_header(&request, "x-amz-checksum-algorithm", "CRC64NVME");
        s3_request_header(&request, "x-amz-checksum-type", "FULL_OBJECT");
    }
    up->create_began_ms = mb_mono_ms();
    if (s3_upload_call(up, &request, on_created) != 0)
        s3_upload_end(up);
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

static void list_parts(struct upload *up, size_t marker, uint64_t delay_ms);

static void on_parts(void *arg, const struct s3_answer *a)
{
    struct upload *up = arg;
    struct part_fields fields = {.up = up};
    up->call = NULL;
    if (s3_upload_is_unknown(a)) {
        up->lost = 1;
        s3_upload_compare(up);
        return;
    }
    up->look_until_ms = 0; /* it is there: should it be lost again, it is looked for anew */
    if (a->error != 0)
        s3_op_fail(up->op, a);
    else
        mb_s3_xml_parse(a->http->body, a->http->body_len, on_part_field, &fields, &up->op->err);
    if (up->op->err.code == 0 && fields.truncated && fields.next_marker > 0 &&
        fields.next_marker < MAX_PARTS) {
        list_parts(up, fields.next_marker, 0);
        return;
    }
    s3_upload_pump(up);
}

static void list_parts(struct upload *up, size_t marker, uint64_t delay_ms)
{
    struct mb_buf query = {0};
    char before[64] = "";
    struct s3_request request = {
        .method = "GET", .key = up->op->key, .body_fd = -1, .delay_ms = delay_ms};
    if (marker > 0)
        snprintf(before, sizeof before, "part-number-marker=%zu&", marker);
    if (s3_upload_query(up, before, &query) != 0)
        mb_err_set(&up->op->err, MB_ENOMEM, "out of memory");
    request.query = mb_buf_str(&query);
    if (up->op->err.code != 0 || s3_upload_call(up, &request, on_parts) != 0)
        s3_upload_end(up);
    mb_buf_close(&query);
}

void s3_upload_list_parts(struct upload *up)
{
    list_parts(up, 0, 0);
}

void s3_upload_look_again(struct upload *up)
{
    forget_parts(up);
    list_parts(up, 0, up->look_delay_ms);
}
