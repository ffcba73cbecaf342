/*
 *  1. open: create or open, lock, look whether the name still is this file (another push may just
 *     have ended and removed it), replay, cut a torn tail off.
 *  2. An upload id is on disk before its first part goes; a "done" of a small file is written but
 *     not flushed: after a power loss that file is compared in the store instead of sent again.
 *  3. A record that cannot be written is cut off again, and the step does not count.
 */
#include "agent/upload/push_journal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include "agent/upload/journal.h"
#include "base/alloc.h"
#include "base/checksum.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/str.h"

#define MAGIC "mobula-journal 1\n"

enum { MAGIC_LEN = sizeof(MAGIC) - 1, FLUSH_BYTES = 1 << 20 };

struct mb_push_journal {
    int fd;
    uint64_t end;
    char *path;
    char *url;
    int64_t iteration;
    char writer[33];
    struct mb_push_orphan *orphans;
    size_t n_orphans;
    struct mb_push_source *source; /* while it is replayed */
};

/* ---- replay ---- */

static uint64_t hex_of(json_t *o, const char *name)
{
    const char *hex = json_string_value(json_object_get(o, name));

    return hex ? strtoull(hex, NULL, 16) : 0;
}

static int set_text(char **to, const char *text, struct mb_err *err)
{
    char *own = mb_strdup(text);

    if (text && !own)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    mb_free(*to);
    *to = own;
    return 0;
}

static struct mb_push_orphan *orphan_of(struct mb_push_journal *j, const char *path)
{
    for (size_t i = 0; i < j->n_orphans; i++)
        if (strcmp(j->orphans[i].path, path) == 0)
            return &j->orphans[i];
    return NULL;
}

/* A file that is gone: what was begun for it has to be aborted. */
static int apply_orphan(struct mb_push_journal *j, const char *kind, const char *path, json_t *o,
                        struct mb_err *err)
{
    const char *id = json_string_value(json_object_get(o, "upload_id"));
    struct mb_push_orphan *orphan = j ? orphan_of(j, path) : NULL;
    struct mb_push_orphan *grown;

    if (!j)
        return 0;
    if (strcmp(kind, "gone") == 0 || strcmp(kind, "done") == 0) {
        if (orphan) {
            mb_free(orphan->path);
            mb_free(orphan->upload_id);
            *orphan = j->orphans[--j->n_orphans];
        }
        return 0;
    }
    if (orphan)
        return set_text(&orphan->upload_id, id, err);
    grown = mb_reallocarray(j->orphans, j->n_orphans + 1, sizeof(*grown));
    if (!grown)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    j->orphans = grown;
    grown[j->n_orphans] = (struct mb_push_orphan){mb_strdup(path), NULL};
    if (!grown[j->n_orphans].path)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    return set_text(&grown[j->n_orphans++].upload_id, id, err);
}

/* The ids of other bytes under its name are kept as stale, to be aborted. */
static int apply_file(struct mb_push_file *f, const char *kind, json_t *o, struct mb_err *err)
{
    const char *id = json_string_value(json_object_get(o, "upload_id"));
    int same = hex_of(o, "print") == f->print;

    if (strcmp(kind, "intent") == 0) {
        f->was_begun = 1;
    } else if (strcmp(kind, "begin") == 0 && id) {
        f->was_begun = 0;
        return set_text(same ? &f->upload_id : &f->stale_id, id, err);
    } else if (strcmp(kind, "done") == 0) {
        f->was_begun = 0;
        f->was_done = (uint8_t)same;
        mb_free(f->upload_id);
        f->upload_id = NULL;
        if (same) {
            f->crc64nvme = hex_of(o, "crc");
            return set_text(&f->done_etag, json_string_value(json_object_get(o, "etag")), err);
        }
    } else if (strcmp(kind, "gone") == 0) {
        f->was_begun = 0;
        mb_free(f->stale_id);
        mb_free(f->upload_id);
        f->stale_id = f->upload_id = NULL;
    } else {
        return mb_err_set(err, MB_ECORRUPT, "a record \"%s\" is not known or lacks a field", kind);
    }
    return 0;
}

int mb_push_journal_apply(struct mb_push_journal *j, struct mb_push_source *source,
                          const void *payload, size_t n, struct mb_err *err)
{
    json_t *o = json_loadb(payload, n, 0, NULL);
    const char *kind = json_string_value(json_object_get(o, "r"));
    const char *path = json_string_value(json_object_get(o, "path"));
    const char *writer = json_string_value(json_object_get(o, "writer"));
    struct mb_push_file *f = path ? mb_push_source_find(source, path) : NULL;
    int rc = 0;

    if (!kind || (strcmp(kind, "push") == 0 ? !writer || strlen(writer) != 32 : !path))
        rc = mb_err_set(err, MB_ECORRUPT, "a record lacks a field");
    else if (strcmp(kind, "push") == 0 && j)
        memcpy(j->writer, writer, sizeof(j->writer));
    else if (strcmp(kind, "push") != 0)
        rc = f ? apply_file(f, kind, o, err) : apply_orphan(j, kind, path, o, err);
    json_decref(o);
    return rc;
}

static int on_record(void *arg, const void *payload, size_t n, struct mb_err *err)
{
    struct mb_push_journal *j = arg;

    return mb_push_journal_apply(j, j->source, payload, n, err);
}

/* ---- writing ---- */

static int write_at_end(struct mb_push_journal *j, const void *p, size_t n, int flush,
                        struct mb_err *err)
{
    ssize_t done = pwrite(j->fd, p, n, (off_t)j->end);

    if (done != (ssize_t)n || (flush && fdatasync(j->fd) != 0)) {
        int rc =
            mb_err_sys(err, done < 0 || done == (ssize_t)n ? errno : ENOSPC, "writing %s", j->path);

        if (ftruncate(j->fd, (off_t)j->end) != 0)
            mb_err_wrap(err, "its tail cannot be cut off either");
        return rc;
    }
    j->end += n;
    return 0;
}

/* Takes the object; NULL: out of memory. */
static int append(struct mb_push_journal *j, json_t *o, int flush, struct mb_err *err)
{
    char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;
    struct mb_buf frame = {0};
    int rc = text ? mb_journal_frame(&frame, text, strlen(text)) : MB_ENOMEM;

    rc = rc == 0 ? write_at_end(j, frame.data, frame.len, flush, err)
                 : mb_err_set(err, rc, "a journal record has no memory, or is too large");
    mb_buf_close(&frame);
    mb_free(text);
    json_decref(o);
    return rc;
}

static json_t *hex_json(uint64_t v)
{
    char hex[17];

    snprintf(hex, sizeof(hex), "%016" PRIx64, v);
    return json_string(hex);
}

int mb_push_journal_intent(struct mb_push_journal *j, const struct mb_push_file *f,
                           struct mb_err *err)
{
    return append(
        j,
        json_pack("{s:s, s:s, s:o}", "r", "intent", "path", f->path, "print", hex_json(f->print)),
        1, err);
}

int mb_push_journal_begin(struct mb_push_journal *j, const struct mb_push_file *f,
                          const char *upload_id, struct mb_err *err)
{
    return append(j,
                  json_pack("{s:s, s:s, s:o, s:s}", "r", "begin", "path", f->path, "print",
                            hex_json(f->print), "upload_id", upload_id),
                  1, err);
}

int mb_push_journal_done(struct mb_push_journal *j, const struct mb_push_file *f, const char *etag,
                         struct mb_err *err)
{
    return append(j,
                  json_pack("{s:s, s:s, s:o, s:o, s:s}", "r", "done", "path", f->path, "print",
                            hex_json(f->print), "crc", hex_json(f->crc64nvme), "etag", etag),
                  f->size_bytes >= FLUSH_BYTES, err);
}

int mb_push_journal_gone(struct mb_push_journal *j, const char *path, struct mb_err *err)
{
    return append(j, json_pack("{s:s, s:s}", "r", "gone", "path", path), 0, err);
}

/* ---- the file ---- */

/* Opens and locks; another push that ends meanwhile removes the file under our hands. */
static int open_locked(struct mb_push_journal *j, struct mb_err *err)
{
    for (int tries = 0; tries < 100; tries++) {
        struct stat here, named;

        j->fd = open(j->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (j->fd < 0)
            return mb_err_sys(err, errno,
                              "%s (what a push has done is noted here; --state-dir names another "
                              "place)",
                              j->path);
        if (flock(j->fd, LOCK_EX | LOCK_NB) != 0) {
            if (errno == EWOULDBLOCK)
                return mb_err_set(err, MB_ESTATE, "another push of it runs: %s is locked", j->path);
            return mb_err_set(err, MB_EUNSUPPORTED,
                              "%s cannot be locked (%s): --state-dir names a place on a file "
                              "system that has locks",
                              j->path, strerror(errno));
        }
        if (fstat(j->fd, &here) == 0 && stat(j->path, &named) == 0 && here.st_ino == named.st_ino &&
            here.st_dev == named.st_dev)
            return 0;
        close(j->fd);
        j->fd = -1;
    }
    return mb_err_set(err, MB_ESTATE, "%s comes and goes: other pushes of it run", j->path);
}

static int replay(struct mb_push_journal *j, struct mb_push_source *source, struct mb_err *err)
{
    struct mb_buf bytes = {0};
    size_t valid = 0;
    int rc = mb_fs_read(j->path, (size_t)1 << 30, &bytes, err);

    j->source = source;
    if (rc == 0)
        rc = mb_journal_scan(mb_buf_str(&bytes), bytes.len, on_record, j, &valid, err);
    if (rc == 0 && valid < bytes.len && ftruncate(j->fd, (off_t)valid) != 0)
        rc = mb_err_sys(err, errno, "cutting its torn end off");
    if (rc != 0)
        mb_err_wrap(err, "the journal of an earlier push, %s", j->path);
    j->end = valid;
    j->source = NULL;
    mb_buf_close(&bytes);
    return rc;
}

static int begin_new(struct mb_push_journal *j, const char *dir, struct mb_err *err)
{
    uint8_t random[16];
    int rc = j->end == 0 ? write_at_end(j, MAGIC, MAGIC_LEN, 0, err) : 0;

    mb_random_bytes(random, sizeof(random));
    mb_hex(random, sizeof(random), j->writer);
    if (rc == 0)
        rc = append(j,
                    json_pack("{s:s, s:s, s:I, s:s}", "r", "push", "url", j->url, "iteration",
                              (json_int_t)j->iteration, "writer", j->writer),
                    1, err);
    return rc != 0 ? rc : mb_fs_sync_dir(dir, err);
}

int mb_push_journal_open(const char *dir, const char *url, struct mb_push_source *source,
                         struct mb_push_journal **out, struct mb_err *err)
{
    struct mb_push_journal *j = mb_calloc(1, sizeof(*j));
    char *root = realpath(source->root, NULL);
    char *name =
        mb_asprintf("%s\n%s\n%" PRId64, root ? root : source->root, url, source->iteration);
    int rc;

    free(root);

    if (j) {
        j->fd = -1;
        j->iteration = source->iteration;
        j->url = mb_strdup(url);
        j->path = name ? mb_asprintf("%s/.mobula-push-%016" PRIx64 ".journal", dir,
                                     mb_crc64nvme(0, name, strlen(name)))
                       : NULL;
    }
    rc = j && j->url && j->path ? 0 : mb_err_set(err, MB_ENOMEM, "out of memory");
    if (rc == 0)
        rc = open_locked(j, err);
    if (rc == 0)
        rc = replay(j, source, err);
    if (rc == 0 && !j->writer[0])
        rc = begin_new(j, dir, err);
    mb_free(name);
    if (rc != 0)
        mb_push_journal_close(j, 1);
    else
        *out = j;
    return rc;
}

void mb_push_journal_close(struct mb_push_journal *j, int keep)
{
    if (!j)
        return;
    if (j->fd >= 0 && !keep)
        unlink(j->path);
    if (j->fd >= 0)
        close(j->fd);
    for (size_t i = 0; i < j->n_orphans; i++) {
        mb_free(j->orphans[i].path);
        mb_free(j->orphans[i].upload_id);
    }
    mb_free(j->orphans);
    mb_free(j->path);
    mb_free(j->url);
    mb_free(j);
}

const char *mb_push_journal_path(const struct mb_push_journal *j)
{
    return j->path;
}

const char *mb_push_journal_writer(const struct mb_push_journal *j)
{
    return j->writer;
}

const struct mb_push_orphan *mb_push_journal_orphans(const struct mb_push_journal *j, size_t *n)
{
    *n = j->n_orphans;
    return j->orphans;
}
