/*
 * Writing and replaying the journal.
 *
 *  1. A kill inside a write leaves a torn tail: a record that is not complete, or the last one with
 *     a wrong CRC. It never counted, so it is cut off.
 *  2. A wrong CRC with more records behind it, or an impossible length, is damage: MB_ECORRUPT with
 *     the offset. Guessing would lose or double a checkpoint.
 *  3. A write that fails (disk full) cuts its own half record off again, so that the file stays
 *     whole, and the caller keeps the step undone.
 *  4. Replayed facts are applied in order; a file that was begun and not done is sent again, from
 *     its upload id.
 */
#include "agent/upload/journal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/fs.h"

#define MAGIC "mobula-journal 1\n"

enum { MAGIC_LEN = sizeof(MAGIC) - 1, HEAD_LEN = 8 };

#define JOURNAL_MAX_BYTES ((size_t)1 << 30)

struct mb_journal {
    int fd;
    uint64_t end; /* where the next record goes */
    char *path;
};

/* ---- records ---- */

static uint32_t get_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

int mb_journal_scan(const void *p, size_t n, mb_journal_record_cb cb, void *arg,
                    size_t *valid_bytes, struct mb_err *err)
{
    const uint8_t *bytes = p;
    size_t at = MAGIC_LEN;

    *valid_bytes = 0;
    if (n < MAGIC_LEN && memcmp(bytes, MAGIC, n) == 0)
        return MB_OK; /* torn in its first line: nothing was ever noted */
    if (n < MAGIC_LEN || memcmp(bytes, MAGIC, MAGIC_LEN) != 0)
        return mb_err_set(err, MB_ECORRUPT, "it does not begin with \"mobula-journal 1\"");
    for (;;) {
        uint32_t len;
        int rc;

        *valid_bytes = at;
        if (n - at < HEAD_LEN)
            return MB_OK;
        len = get_u32(bytes + at);
        if (len == 0 || len > MB_JOURNAL_RECORD_MAX)
            return mb_err_set(err, MB_ECORRUPT, "offset %zu: a record of %u bytes is impossible",
                              at, len);
        if (n - at - HEAD_LEN < len)
            return MB_OK;
        if (mb_crc32c(0, bytes + at + HEAD_LEN, len) != get_u32(bytes + at + 4)) {
            if (n - at - HEAD_LEN == len)
                return MB_OK;
            return mb_err_set(err, MB_ECORRUPT, "offset %zu: the record fails its checksum", at);
        }
        rc = cb(arg, bytes + at + HEAD_LEN, len, err);
        if (rc != MB_OK) {
            mb_err_wrap(err, "offset %zu", at);
            return rc;
        }
        at += HEAD_LEN + len;
    }
}

int mb_journal_frame(struct mb_buf *out, const void *payload, size_t n)
{
    size_t before = out->len;
    int rc = MB_EFULL;

    if (n == 0 || n > MB_JOURNAL_RECORD_MAX)
        return rc;
    rc = mb_buf_u32le(out, (uint32_t)n);
    if (rc == MB_OK)
        rc = mb_buf_u32le(out, mb_crc32c(0, payload, n));
    if (rc == MB_OK)
        rc = mb_buf_add(out, payload, n);
    if (rc != MB_OK)
        out->len = before;
    return rc;
}

/* ---- replay ---- */

static int parse_crc(json_t *o, uint64_t *out)
{
    const char *hex = json_string_value(json_object_get(o, "crc"));
    char *end = NULL;

    if (hex == NULL)
        return MB_ECORRUPT;
    *out = strtoull(hex, &end, 16);
    return *hex != '\0' && *end == '\0' ? MB_OK : MB_ECORRUPT;
}

static int apply_saved(struct mb_plan *plan, json_t *o, int64_t iteration, struct mb_err *err)
{
    json_t *list = json_object_get(o, "files"), *item;
    const char *dir = json_string_value(json_object_get(o, "dir"));
    size_t n = json_array_size(list), i;
    struct mb_upload_file *files = mb_calloc(n, sizeof(*files));
    int rc = MB_OK;

    if (files == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory to replay a record");
    if (dir == NULL || !json_is_array(list))
        rc = MB_ECORRUPT;
    json_array_foreach(list, i, item)
    {
        files[i].path = json_string_value(json_object_get(item, "path"));
        files[i].size_bytes = (uint64_t)json_integer_value(json_object_get(item, "size"));
        files[i].has_crc = json_is_true(json_object_get(item, "has_crc"));
        if (files[i].path == NULL || parse_crc(item, &files[i].crc64nvme) != MB_OK)
            rc = MB_ECORRUPT;
    }
    if (rc == MB_OK)
        rc =
            mb_plan_saved(plan, iteration, (uint32_t)json_integer_value(json_object_get(o, "rank")),
                          dir, files, n, err);
    else
        mb_err_set(err, rc, "a \"saved\" record lacks a field");
    mb_free(files);
    return rc == MB_EEXIST ? MB_OK : rc;
}

static int apply_file(struct mb_plan_iteration *it, json_t *o, int is_done, struct mb_err *err)
{
    const char *path = json_string_value(json_object_get(o, "path"));
    const char *upload_id = json_string_value(json_object_get(o, "upload_id"));
    uint64_t crc = 0;

    for (size_t i = 0; path != NULL && i < it->n_files; i++) {
        struct mb_plan_file *f = &it->files[i];

        if (strcmp(f->path, path) != 0)
            continue;
        if (is_done && parse_crc(o, &crc) == MB_OK) {
            mb_plan_file_done(f, crc);
            return MB_OK;
        }
        if (!is_done && upload_id != NULL) {
            mb_free(f->upload_id);
            f->upload_id = mb_strdup(upload_id);
            return f->upload_id != NULL
                       ? MB_OK
                       : mb_err_set(err, MB_ENOMEM, "no memory to replay a record");
        }
    }
    return mb_err_set(err, MB_ECORRUPT,
                      "a record names a file that was never saved, or lacks a "
                      "field");
}

int mb_journal_apply(struct mb_plan *plan, const void *payload, size_t n, struct mb_err *err)
{
    json_t *o = json_loadb(payload, n, 0, NULL);
    const char *kind = json_string_value(json_object_get(o, "r"));
    json_t *number = json_object_get(o, "iteration");
    struct mb_plan_iteration *it;
    int rc;

    if (kind == NULL || !json_is_integer(number)) {
        rc = mb_err_set(err, MB_ECORRUPT, "a record is no object with \"r\" and \"iteration\"");
        goto out;
    }
    if (strcmp(kind, "saved") == 0) {
        rc = apply_saved(plan, o, json_integer_value(number), err);
        goto out;
    }
    /* What is dropped may never have got its report on disk: it was full. */
    it = strcmp(kind, "dropped") == 0 ? mb_plan_note(plan, json_integer_value(number))
                                      : mb_plan_find(plan, json_integer_value(number));
    if (it == NULL && strcmp(kind, "dropped") == 0)
        rc = mb_err_set(err, MB_ENOMEM, "no memory to replay a record");
    else if (it == NULL)
        rc = mb_err_set(err, MB_ECORRUPT,
                        "a record names iteration %" JSON_INTEGER_FORMAT ", which was never saved",
                        json_integer_value(number));
    else if (strcmp(kind, "begin") == 0)
        rc = apply_file(it, o, 0, err);
    else if (strcmp(kind, "done") == 0)
        rc = apply_file(it, o, 1, err);
    else if (strcmp(kind, "part") == 0)
        rc = mb_plan_event(it, MB_PLAN_EV_PART_SENT, NULL, err);
    else if (strcmp(kind, "committed") == 0)
        rc = mb_plan_event(it, MB_PLAN_EV_COMMITTED, NULL, err);
    else if (strcmp(kind, "dropped") == 0)
        rc = mb_plan_event(it, MB_PLAN_EV_DROPPED, json_string_value(json_object_get(o, "error")),
                           err);
    else
        rc = mb_err_set(err, MB_ECORRUPT, "a record of the unknown kind \"%s\"", kind);
    if (rc == MB_ESTATE)
        rc = mb_err_set(err, MB_ECORRUPT, "records out of order: %s", err->text);
out:
    json_decref(o);
    return rc;
}

/* ---- the file ---- */

static int on_record(void *arg, const void *payload, size_t n, struct mb_err *err)
{
    return mb_journal_apply(arg, payload, n, err);
}

static int write_at(struct mb_journal *j, const void *p, size_t n, struct mb_err *err)
{
    const uint8_t *bytes = p;
    size_t done = 0;

    while (done < n) {
        ssize_t got = pwrite(j->fd, bytes + done, n - done, (off_t)(j->end + done));

        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        done += (size_t)got;
    }
    if (done < n || fdatasync(j->fd) != 0) {
        int rc = mb_err_sys(err, errno, "writing %s", j->path);

        if (ftruncate(j->fd, (off_t)j->end) != 0)
            mb_err_wrap(err, "its tail cannot be cut off either");
        return rc;
    }
    j->end += n;
    return MB_OK;
}

int mb_journal_open(const char *path, struct mb_plan *plan, struct mb_journal **out,
                    struct mb_err *err)
{
    struct mb_journal *j = mb_calloc(1, sizeof(*j));
    struct mb_buf bytes = {0};
    size_t valid = 0;
    int rc = MB_OK;

    if (j == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory for the journal");
    j->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    j->path = mb_strdup(path);
    if (j->fd < 0 || j->path == NULL) {
        rc = j->fd < 0 ? mb_err_sys(err, errno, "opening %s", path)
                       : mb_err_set(err, MB_ENOMEM, "no memory for the journal");
        goto out;
    }
    rc = mb_fs_read(path, JOURNAL_MAX_BYTES, &bytes, err);
    if (rc == MB_OK)
        rc = mb_journal_scan(mb_buf_str(&bytes), bytes.len, on_record, plan, &valid, err);
    if (rc != MB_OK) {
        mb_err_wrap(err, "the upload journal %s", path);
        goto out;
    }
    if (valid < bytes.len && ftruncate(j->fd, (off_t)valid) != 0)
        rc = mb_err_sys(err, errno, "cutting the torn end of %s off", path);
    j->end = valid;
    if (rc == MB_OK && valid == 0)
        rc = write_at(j, MAGIC, MAGIC_LEN, err);
out:
    mb_buf_close(&bytes);
    if (rc != MB_OK) {
        mb_journal_close(j);
        return rc;
    }
    *out = j;
    return MB_OK;
}

void mb_journal_close(struct mb_journal *j)
{
    if (j == NULL)
        return;
    if (j->fd >= 0)
        close(j->fd);
    mb_free(j->path);
    mb_free(j);
}

/* Takes the object; NULL: out of memory. */
static int append(struct mb_journal *j, json_t *o, struct mb_err *err)
{
    char *text = o != NULL ? json_dumps(o, JSON_COMPACT) : NULL;
    struct mb_buf frame = {0};
    int rc = MB_ENOMEM;

    if (text != NULL)
        rc = mb_journal_frame(&frame, text, strlen(text));
    if (rc == MB_OK)
        rc = write_at(j, frame.data, frame.len, err);
    else
        mb_err_set(err, rc, "a journal record %s",
                   rc == MB_EFULL ? "is too large" : "has no memory");
    mb_buf_close(&frame);
    mb_free(text);
    json_decref(o);
    return rc;
}

static json_t *crc_json(uint64_t crc)
{
    char hex[17];

    snprintf(hex, sizeof(hex), "%016" PRIx64, crc);
    return json_string(hex);
}

int mb_journal_saved(struct mb_journal *j, int64_t iteration, uint32_t rank, const char *dir,
                     const struct mb_upload_file *files, size_t n, struct mb_err *err)
{
    json_t *list = json_array();

    for (size_t i = 0; i < n; i++)
        if (json_array_append_new(list, json_pack("{s:s, s:I, s:o, s:b}", "path", files[i].path,
                                                  "size", (json_int_t)files[i].size_bytes, "crc",
                                                  crc_json(files[i].crc64nvme), "has_crc",
                                                  files[i].has_crc)) != 0) {
            json_decref(list);
            list = NULL;
            break;
        }
    return append(j,
                  json_pack("{s:s, s:I, s:I, s:s, s:o}", "r", "saved", "iteration",
                            (json_int_t)iteration, "rank", (json_int_t)rank, "dir", dir, "files",
                            list),
                  err);
}

int mb_journal_begin(struct mb_journal *j, int64_t iteration, const char *path,
                     const char *upload_id, struct mb_err *err)
{
    return append(j,
                  json_pack("{s:s, s:I, s:s, s:s}", "r", "begin", "iteration",
                            (json_int_t)iteration, "path", path, "upload_id", upload_id),
                  err);
}

int mb_journal_done(struct mb_journal *j, int64_t iteration, const char *path, uint64_t crc64nvme,
                    struct mb_err *err)
{
    return append(j,
                  json_pack("{s:s, s:I, s:s, s:o}", "r", "done", "iteration", (json_int_t)iteration,
                            "path", path, "crc", crc_json(crc64nvme)),
                  err);
}

static int append_plain(struct mb_journal *j, const char *kind, int64_t iteration,
                        struct mb_err *err)
{
    return append(j, json_pack("{s:s, s:I}", "r", kind, "iteration", (json_int_t)iteration), err);
}

int mb_journal_part(struct mb_journal *j, int64_t iteration, struct mb_err *err)
{
    return append_plain(j, "part", iteration, err);
}

int mb_journal_committed(struct mb_journal *j, int64_t iteration, struct mb_err *err)
{
    return append_plain(j, "committed", iteration, err);
}

int mb_journal_dropped(struct mb_journal *j, int64_t iteration, const char *error,
                       struct mb_err *err)
{
    return append(j,
                  json_pack("{s:s, s:I, s:s}", "r", "dropped", "iteration", (json_int_t)iteration,
                            "error", error),
                  err);
}
