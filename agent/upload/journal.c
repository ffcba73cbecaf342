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
 *  5. Written anew: into a file beside, renamed over the old one, both flushed. A kill leaves one
 * or the other, which say the same of what still counts.
 *  6. Journals from before "entered" was noted: who had a place for its files had entered.
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
#include "agent/upload/flusher.h"
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/fs.h"

#define MAGIC "mobula-journal 1\n"

enum { MAGIC_LEN = sizeof(MAGIC) - 1 };

/* A restart reads it as a whole. New reports are refused before there is no room for the others. */
#define JOURNAL_MAX_BYTES ((size_t)1 << 30)
#define REPORTS_MAX_BYTES ((uint64_t)3 << 28)

enum {
    PIECE_BYTES = 1 << 20,   /* of a report, about */
    UNFLUSHED_MAX = 1 << 20, /* bytes of "done" records */
    SHORTEN_FROM_BYTES = 1 << 20,
    FILE_RECORD_BYTES = 300 /* all that is noted of a file, about, besides its path */
};

struct mb_journal {
    int fd;
    uint64_t end; /* where the next record goes */
    uint64_t n_unflushed;
    uint64_t shortened_at;      /* its length when that was tried last */
    struct mb_flusher *flusher; /* NULL: a draft, flushed as a whole, later */
    char *path;
};

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

/* A report, or with is_piece the beginning of one. */
static int apply_saved(struct mb_plan *plan, json_t *o, int64_t iteration, int is_piece,
                       struct mb_err *err)
{
    json_t *list = json_object_get(o, "files"), *item;
    const char *dir = json_string_value(json_object_get(o, "dir"));
    size_t n = json_array_size(list), i;
    struct mb_upload_file *files = mb_calloc(n, sizeof(*files));
    int rc = MB_OK;

    if (files == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory to replay a record");
    json_int_t before = json_integer_value(json_object_get(o, is_piece ? "at" : "before"));
    uint32_t rank = (uint32_t)json_integer_value(json_object_get(o, "rank"));

    if ((dir == NULL && !is_piece) || !json_is_array(list) || before < 0)
        rc = MB_ECORRUPT;
    json_array_foreach(list, i, item)
    {
        files[i].path = json_string_value(json_object_get(item, "path"));
        files[i].size_bytes = (uint64_t)json_integer_value(json_object_get(item, "size"));
        files[i].has_crc = json_is_true(json_object_get(item, "has_crc"));
        files[i].mtime_ns = json_integer_value(json_object_get(item, "mtime_ns"));
        if (files[i].path == NULL || parse_crc(item, &files[i].crc64nvme) != MB_OK)
            rc = MB_ECORRUPT;
    }
    if (rc == MB_OK && is_piece)
        rc = mb_plan_more(plan, iteration, rank, (size_t)before, files, n, err);
    else if (rc == MB_OK)
        rc = mb_plan_saved_after(plan, iteration, rank, (size_t)before, dir, files, n, err);
    else
        mb_err_set(err, rc, "a \"saved\" record lacks a field");
    mb_free(files);
    return rc == MB_EEXIST ? MB_OK : rc;
}

enum file_record { FILE_BEGIN, FILE_ABORTED, FILE_DONE };

static int apply_file(struct mb_plan_iteration *it, json_t *o, enum file_record kind,
                      struct mb_err *err)
{
    const char *path = json_string_value(json_object_get(o, "path"));
    const char *upload_id = json_string_value(json_object_get(o, "upload_id"));
    uint64_t crc = 0;

    /* Files end about in the order in which they stand, so the next is near the last one: a journal
     * of 100,000 files is replayed in a second. */
    for (size_t i = 0; path != NULL && i < it->n_files; i++) {
        size_t at = (it->replay_at + i) % it->n_files;
        struct mb_plan_file *f = &it->files[at];

        if (strcmp(f->path, path) != 0)
            continue;
        it->replay_at = at + it->n_files - (at < 64 ? at : 64); /* some in flight end later */
        if (kind == FILE_DONE && parse_crc(o, &crc) == MB_OK) {
            mb_plan_file_done(f, crc);
            return MB_OK;
        }
        if (kind == FILE_ABORTED || (kind == FILE_BEGIN && upload_id != NULL)) {
            mb_free(f->upload_id);
            f->was_aborted = kind == FILE_ABORTED;
            f->upload_id = kind == FILE_BEGIN ? mb_strdup(upload_id) : NULL;
            return f->upload_id != NULL || kind == FILE_ABORTED
                       ? MB_OK
                       : mb_err_set(err, MB_ENOMEM, "no memory to replay a record");
        }
    }
    return mb_err_set(err, MB_ECORRUPT,
                      "a record names a file that was never saved, or lacks a "
                      "field");
}

static int apply_place(struct mb_plan *plan, struct mb_plan_iteration *it, json_t *o,
                       struct mb_err *err)
{
    const char *place = json_string_value(json_object_get(o, "data"));

    mb_plan_gang(plan)->has_entered = 1;
    return place != NULL ? mb_plan_place(it, place, err)
                         : mb_err_set(err, MB_ECORRUPT, "a \"place\" record lacks a field");
}

/* 1: it is of the gang as a whole, and was applied if *rc says so. */
static int apply_to_gang(struct mb_plan *plan, const char *kind, json_t *o, int *rc,
                         struct mb_err *err)
{
    json_t *launched = json_object_get(o, "unix_ms");

    *rc = MB_OK;
    if (strcmp(kind, "entered") == 0) {
        mb_plan_gang(plan)->has_entered = 1;
    } else if (strcmp(kind, "launched") == 0) {
        if (json_integer_value(launched) > 0)
            mb_plan_gang(plan)->launched_unix_ms = json_integer_value(launched);
        else
            *rc = mb_err_set(err, MB_ECORRUPT, "a \"launched\" record lacks a field");
    } else {
        return 0;
    }
    return 1;
}

int mb_journal_apply(struct mb_plan *plan, const void *payload, size_t n, struct mb_err *err)
{
    json_t *o = json_loadb(payload, n, 0, NULL);
    const char *kind = json_string_value(json_object_get(o, "r"));
    json_t *number = json_object_get(o, "iteration");
    struct mb_plan_iteration *it;
    int rc;

    if (kind != NULL && apply_to_gang(plan, kind, o, &rc, err))
        goto out;
    if (kind == NULL || !json_is_integer(number)) {
        rc = mb_err_set(err, MB_ECORRUPT, "a record is no object with \"r\" and \"iteration\"");
        goto out;
    }
    if (strcmp(kind, "saved") == 0 || strcmp(kind, "files") == 0) {
        rc = apply_saved(plan, o, json_integer_value(number), *kind == 'f', err);
        goto out;
    }
    if (strcmp(kind, "committed") == 0 && mb_plan_find(plan, json_integer_value(number)) == NULL) {
        rc = mb_plan_recall(plan, json_integer_value(number)) != NULL
                 ? MB_OK
                 : mb_err_set(err, MB_ENOMEM, "no memory to replay a record");
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
        rc = apply_file(it, o, FILE_BEGIN, err);
    else if (strcmp(kind, "aborted") == 0)
        rc = apply_file(it, o, FILE_ABORTED, err);
    else if (strcmp(kind, "done") == 0)
        rc = apply_file(it, o, FILE_DONE, err);
    else if (strcmp(kind, "place") == 0)
        rc = apply_place(plan, it, o, err);
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

static int write_at(struct mb_journal *j, const void *p, size_t n, int flush, struct mb_err *err)
{
    const uint8_t *bytes = p;
    size_t done = 0;
    int failed;

    while (done < n) {
        ssize_t got = pwrite(j->fd, bytes + done, n - done, (off_t)(j->end + done));

        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        done += (size_t)got;
    }
    if (done < n)
        failed = errno;
    else
        failed = j->flusher != NULL ? mb_flusher_failed(j->flusher) : 0;
    if (done < n || failed != 0) {
        int rc = mb_err_sys(err, failed, "writing %s", j->path);

        if (ftruncate(j->fd, (off_t)j->end) != 0)
            mb_err_wrap(err, "its tail cannot be cut off either");
        return rc;
    }
    j->end += n;
    flush = j->flusher != NULL && (flush || j->n_unflushed + n >= UNFLUSHED_MAX);
    j->n_unflushed = flush ? 0 : j->n_unflushed + n;
    if (flush)
        mb_flusher_file(j->flusher, j->fd);
    return MB_OK;
}

/* Its name gets onto the disk. */
static int flush_dir(struct mb_journal *j, struct mb_err *err)
{
    const char *path = j->path, *slash = strrchr(path, '/');
    char *dir = slash == NULL || slash == path ? mb_strdup(slash == NULL ? "." : "/")
                                               : mb_strndup(path, (size_t)(slash - path));
    int fd = dir != NULL ? open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    int rc = dir == NULL ? mb_err_set(err, MB_ENOMEM, "no memory for the journal") : MB_OK;

    if (rc == MB_OK && fd < 0)
        rc = mb_err_sys(err, errno, "flushing the directory of %s", path);
    if (fd >= 0) {
        mb_flusher_dir(j->flusher, fd);
        close(fd);
    }
    mb_free(dir);
    return rc;
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
    j->flusher = mb_flusher_create();
    if (j->fd < 0 || j->path == NULL || j->flusher == NULL) {
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
        rc = write_at(j, MAGIC, MAGIC_LEN, 1, err);
    if (rc == MB_OK)
        rc = flush_dir(j, err);
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
    mb_flusher_leave(j->flusher);
    if (j->fd >= 0)
        close(j->fd);
    mb_free(j->path);
    mb_free(j);
}

/* Takes the object; NULL: out of memory. */
static int add_frame(struct mb_buf *out, json_t *o, struct mb_err *err)
{
    char *text = o != NULL ? json_dumps(o, JSON_COMPACT) : NULL;
    int rc = MB_ENOMEM;

    if (text != NULL)
        rc = mb_journal_frame(out, text, strlen(text));
    if (rc != MB_OK)
        mb_err_set(err, rc, "a journal record %s",
                   rc == MB_EFULL ? "is too large" : "has no memory");
    mb_free(text);
    json_decref(o);
    return rc;
}

static int append_lazily(struct mb_journal *j, json_t *o, int flush, struct mb_err *err)
{
    struct mb_buf frame = {0};
    int rc = add_frame(&frame, o, err);

    if (rc == MB_OK)
        rc = write_at(j, frame.data, frame.len, flush, err);
    mb_buf_close(&frame);
    return rc;
}

static int append(struct mb_journal *j, json_t *o, struct mb_err *err)
{
    return append_lazily(j, o, 1, err);
}

static json_t *crc_json(uint64_t crc)
{
    char hex[17];

    snprintf(hex, sizeof(hex), "%016" PRIx64, crc);
    return json_string(hex);
}

int mb_journal_launched(struct mb_journal *j, int64_t unix_ms, struct mb_err *err)
{
    return append(j, json_pack("{s:s, s:I}", "r", "launched", "unix_ms", (json_int_t)unix_ms), err);
}

int mb_journal_entered(struct mb_journal *j, struct mb_err *err)
{
    return append(j, json_pack("{s:s}", "r", "entered"), err);
}

static json_t *files_json(const struct mb_upload_file *files, size_t n)
{
    json_t *list = json_array();

    for (size_t i = 0; i < n; i++)
        if (json_array_append_new(
                list, json_pack("{s:s, s:I, s:o, s:b, s:I}", "path", files[i].path, "size",
                                (json_int_t)files[i].size_bytes, "crc",
                                crc_json(files[i].crc64nvme), "has_crc", files[i].has_crc,
                                "mtime_ns", (json_int_t)files[i].mtime_ns)) != 0) {
            json_decref(list);
            return NULL;
        }
    return list;
}

/* How many of them make a piece: a record has a bound, whatever the paths. */
static size_t piece_of(const struct mb_upload_file *files, size_t n)
{
    size_t bytes = 0, i = 0;

    while (i < n && bytes < PIECE_BYTES)
        bytes += 6 * strlen(files[i++].path) + 100; /* six: a character as \u0000 */
    return i;
}

int mb_journal_saved(struct mb_journal *j, int64_t iteration, uint32_t rank, const char *dir,
                     const struct mb_upload_file *files, size_t n, struct mb_err *err)
{
    struct mb_buf frames = {0};
    size_t at = 0, piece;
    int rc = MB_OK;

    while (rc == MB_OK && at + (piece = piece_of(files + at, n - at)) < n) {
        rc = add_frame(&frames,
                       json_pack("{s:s, s:I, s:I, s:I, s:o}", "r", "files", "iteration",
                                 (json_int_t)iteration, "rank", (json_int_t)rank, "at",
                                 (json_int_t)at, "files", files_json(files + at, piece)),
                       err);
        at += piece;
    }
    if (rc == MB_OK)
        rc = add_frame(&frames,
                       json_pack("{s:s, s:I, s:I, s:s, s:I, s:o}", "r", "saved", "iteration",
                                 (json_int_t)iteration, "rank", (json_int_t)rank, "dir", dir,
                                 "before", (json_int_t)at, "files", files_json(files + at, n - at)),
                       err);
    if (rc == MB_OK && j->end + frames.len > REPORTS_MAX_BYTES)
        rc = mb_err_set(err, MB_EFULL, "the upload journal is full: too much waits for its upload");
    if (rc == MB_OK)
        rc = write_at(j, frames.data, frames.len, 1, err);
    mb_buf_close(&frames);
    return rc;
}

int mb_journal_place(struct mb_journal *j, int64_t iteration, const char *place, struct mb_err *err)
{
    return append(j,
                  json_pack("{s:s, s:I, s:s}", "r", "place", "iteration", (json_int_t)iteration,
                            "data", place),
                  err);
}

int mb_journal_aborted(struct mb_journal *j, int64_t iteration, const char *path,
                       struct mb_err *err)
{
    return append(j,
                  json_pack("{s:s, s:I, s:s}", "r", "aborted", "iteration", (json_int_t)iteration,
                            "path", path),
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
    return append_lazily(j,
                         json_pack("{s:s, s:I, s:s, s:o}", "r", "done", "iteration",
                                   (json_int_t)iteration, "path", path, "crc", crc_json(crc64nvme)),
                         0, err);
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

/* ---- anew ---- */

/* What is dropped counts as long as something of it is left in the store. */
static int has_open_files(const struct mb_plan_iteration *it)
{
    for (size_t i = 0; i < it->n_files; i++)
        if (mb_plan_file_is_open(&it->files[i]))
            return 1;
    return 0;
}

static int is_needed(const struct mb_plan_iteration *it)
{
    return it->state != MB_PLAN_COMMITTED && (it->state != MB_PLAN_DROPPED || has_open_files(it));
}

static int write_reports(struct mb_journal *j, const struct mb_plan *plan,
                         const struct mb_plan_iteration *it, struct mb_err *err)
{
    struct mb_upload_file *files = mb_calloc(it->n_files, sizeof(*files));
    size_t n_ranks, n = it->n_files;
    const uint32_t *ranks = mb_plan_ranks(plan, &n_ranks);
    int rc = files != NULL ? MB_OK : mb_err_set(err, MB_ENOMEM, "no memory for the journal");

    for (size_t i = 0; i < n && rc == MB_OK; i++)
        files[i] = (struct mb_upload_file){it->files[i].path, it->files[i].size_bytes,
                                           it->files[i].crc64nvme, it->files[i].has_crc,
                                           it->files[i].mtime_ns};
    for (size_t i = 0; i < n_ranks && rc == MB_OK; i++) { /* the first one has them all */
        if (!it->reported[i])
            continue;
        rc = mb_journal_saved(j, it->iteration, ranks[i], it->dir, files, n, err);
        n = 0;
    }
    mb_free(files);
    return rc;
}

static int write_file_state(struct mb_journal *j, const struct mb_plan_iteration *it,
                            const struct mb_plan_file *f, struct mb_err *err)
{
    if (f->state == MB_PLAN_FILE_DONE)
        return mb_journal_done(j, it->iteration, f->path, f->crc64nvme, err);
    if (f->upload_id != NULL)
        return mb_journal_begin(j, it->iteration, f->path, f->upload_id, err);
    if (it->state == MB_PLAN_DROPPED && !mb_plan_file_is_open(f))
        return mb_journal_aborted(j, it->iteration, f->path, err);
    return MB_OK;
}

static int write_iteration(struct mb_journal *j, const struct mb_plan *plan,
                           const struct mb_plan_iteration *it, struct mb_err *err)
{
    int rc = MB_OK;

    if (it->state == MB_PLAN_COMMITTED)
        return mb_journal_committed(j, it->iteration, err);
    if (is_needed(it))
        rc = write_reports(j, plan, it, err);
    if (rc == MB_OK && is_needed(it) && it->place != NULL)
        rc = mb_journal_place(j, it->iteration, it->place, err);
    for (size_t i = 0; i < it->n_files && rc == MB_OK && is_needed(it); i++)
        rc = write_file_state(j, it, &it->files[i], err);
    if (rc == MB_OK && it->state == MB_PLAN_PART)
        rc = mb_journal_part(j, it->iteration, err);
    if (rc == MB_OK && it->state == MB_PLAN_DROPPED)
        rc = mb_journal_dropped(j, it->iteration, it->error != NULL ? it->error : "", err);
    return rc;
}

static int write_all(struct mb_journal *j, struct mb_plan *plan, struct mb_err *err)
{
    const struct mb_plan_gang *gang = mb_plan_gang(plan);
    int rc = write_at(j, MAGIC, MAGIC_LEN, 0, err);

    if (rc == MB_OK && gang->launched_unix_ms > 0)
        rc = mb_journal_launched(j, gang->launched_unix_ms, err);
    if (rc == MB_OK && gang->has_entered)
        rc = mb_journal_entered(j, err);
    for (size_t i = 0; i < mb_plan_count(plan) && rc == MB_OK; i++)
        rc = write_iteration(j, plan, mb_plan_at(plan, i), err);
    return rc;
}

/* About. */
static uint64_t needed_bytes(struct mb_plan *plan)
{
    uint64_t bytes = 0;

    for (size_t i = 0; i < mb_plan_count(plan); i++) {
        const struct mb_plan_iteration *it = mb_plan_at(plan, i);

        bytes += 64;
        for (size_t k = 0; k < it->n_files && is_needed(it); k++)
            bytes += 3 * strlen(it->files[k].path) + FILE_RECORD_BYTES;
    }
    return bytes;
}

int mb_journal_shorten(struct mb_journal *j, struct mb_plan *plan, struct mb_err *err)
{
    struct mb_journal draft = {0};
    int rc;

    if (j->end < 2 * j->shortened_at || j->end < SHORTEN_FROM_BYTES ||
        j->end < 2 * needed_bytes(plan))
        return MB_OK;
    j->shortened_at = j->end;
    draft.path = mb_asprintf("%s.new", j->path);
    if (draft.path == NULL)
        return mb_err_set(err, MB_ENOMEM, "no memory for the journal");
    draft.fd = open(draft.path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    rc = draft.fd >= 0 ? write_all(&draft, plan, err)
                       : mb_err_sys(err, errno, "opening %s", draft.path);
    if (rc == MB_OK && fdatasync(draft.fd) != 0) /* all there is would be lost with it */
        rc = mb_err_sys(err, errno, "flushing %s", draft.path);
    if (rc == MB_OK && rename(draft.path, j->path) != 0)
        rc = mb_err_sys(err, errno, "renaming %s", draft.path);
    if (rc == MB_OK) { /* the old one has no name any more */
        close(j->fd);
        j->fd = draft.fd;
        j->end = j->shortened_at = draft.end;
        j->n_unflushed = 0;
        mb_flusher_file(j->flusher, j->fd);
        rc = flush_dir(j, err);
    } else if (draft.fd >= 0) {
        close(draft.fd);
        unlink(draft.path);
    }
    mb_free(draft.path);
    return rc;
}
