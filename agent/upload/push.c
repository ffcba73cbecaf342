/*
 * Pushing a directory.
 *
 * Happy path: pointer (are we allowed to?) -> claim, list, claim again (push_look.c) -> what
 * earlier calls left is aborted -> files, 32 at a time, the biggest first -> part -> manifest in
 * the claim's place -> pointer.
 *
 *  1. The iteration is whole in the store: its manifest is compared with the files. Equal: only the
 *     pointer is left to do. Else MB_EEXIST, and nothing is touched.
 *  2. An object is there under the name of a file: the same bytes are success, other ones (of a
 *     push that was given up) are replaced under its etag.
 *  3. The journal says "done", and the store has that object (the listing tells its etag, or a look
 *     at it does, where there is none): not sent again. An upload id is resumed, if the file is
 *     still the same one; else the upload is aborted.
 *  4. The store fails for good, or we are cancelled: uploads stay open and the journal stays, so
 *     that the next call goes on.
 *  5. The pointer is ahead: it stays, unless force. Between the look at it and its move the
 * manifest is seen once more; it is gone: the iteration was removed meanwhile.
 *  6. Somebody else takes the claim over while we send: the next conditional write fails, and the
 *     look at the claim that follows ends the push.
 *  7. The store takes no conditional writes, and has warned of it: all are plain ones.
 *  8. A file is another one when all are sent than when the push began, of the same size or not: no
 *     manifest is written, since the files may be of two saves.
 */
#include "agent/upload/push_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"

enum { RETRY_FOR_MS = 600000, POINTER_TRIES = 10, FILE_TRIES = 5 };

#define MULTIPART_FROM_BYTES (16ull << 20) /* an intent too many does no harm */

static void send_more(struct mb_push *p);

const char *mb_push_phase_name(enum mb_push_phase phase)
{
    static const char *const names[MB_PUSH_N_PHASES] = {"looking", "comparing", "aborting",
                                                        "sending", "committing"};

    return names[phase];
}

void mb_push_status(const struct mb_push *p, struct mb_push_status *out)
{
    *out = p->status;
}

/* ---- the end ---- */

static void destroy(struct mb_push *p)
{
    mb_push_journal_close(p->journal, !p->is_through);
    mb_push_source_close(&p->source);
    mb_manifest_close(&p->there);
    mb_free(p->order);
    mb_free(p->part_etag);
    mb_free(p->job_id);
    mb_free(p);
}

static void maybe_over(struct mb_push *p)
{
    if (p->busy > 0 || !p->store_closed)
        return;
    p->is_through = p->result.code == 0;
    p->cb(p->arg, &p->result, &p->status);
    destroy(p);
}

static void on_store_closed(void *arg)
{
    struct mb_push *p = arg;

    p->store_closed = 1;
    maybe_over(p);
}

void push_finish(struct mb_push *p, const struct mb_err *err)
{
    if (p->finishing)
        return;
    p->finishing = 1;
    p->result = *err;
    if (p->hash)
        mb_push_hash_cancel(p->hash);
    mb_store_close(p->store, on_store_closed, p);
}

void push_fail(struct mb_push *p, int code, const char *what, const char *text)
{
    struct mb_err err = {0};

    mb_err_set(&err, code, "%s%s%s", what, what[0] ? ": " : "", text);
    push_finish(p, &err);
}

void mb_push_cancel(struct mb_push *p)
{
    push_fail(p, MB_ECANCELED, "", "interrupted; the same command goes on where this one was");
}

int push_came_back(struct mb_push *p)
{
    p->busy--;
    if (!p->finishing)
        return 1;
    maybe_over(p);
    return 0;
}

/* 1: it runs. */
int push_started(struct mb_push *p, int rc, const struct mb_err *err)
{
    if (rc == 0)
        p->busy++;
    else
        push_finish(p, err);
    return rc == 0;
}

struct mb_claim_opts push_claim(const struct mb_push *p, const char *place)
{
    return (struct mb_claim_opts){.iteration = p->source.iteration,
                                  .num_nodes = 1,
                                  .writer.id = {p->job_id, mb_push_journal_writer(p->journal), 1},
                                  .place = place,
                                  .is_unfenced = 1};
}

char *push_key_of(const struct mb_push *p, const char *path)
{
    char dir[MB_CHECKPOINT_KEY_MAX];

    return p->source.iteration < 0
               ? mb_strdup(path)
               : mb_asprintf("%s/%s", mb_iteration_dir(p->source.iteration, dir), path);
}

/* ---- conditions ---- */

static enum mb_store_if condition(const struct mb_push *p, int is_there)
{
    if (!mb_store_has_conditions(p->store))
        return MB_STORE_ALWAYS;
    return is_there ? MB_STORE_IF_MATCH : MB_STORE_IF_ABSENT;
}

/* 1: the store has just learned that its server takes no conditions. Nothing was written. */
static int lost_conditions(const struct mb_push *p, const struct mb_store_result *r)
{
    return r->error == MB_EUNSUPPORTED && !mb_store_has_conditions(p->store);
}

/* ---- the pointer ---- */

static void on_pointer_put(void *arg, const struct mb_store_result *r)
{
    struct mb_push *p = arg;
    struct mb_err ok = {0};

    if (!push_came_back(p))
        return;
    if ((r->error == MB_EEXIST || lost_conditions(p, r)) && ++p->pointer_tries < POINTER_TRIES) {
        push_get_pointer(p); /* somebody else moved it */
    } else if (r->error != 0) {
        push_fail(p, r->error, MB_LATEST_KEY, r->text);
    } else {
        p->status.latest = p->source.iteration;
        push_finish(p, &ok);
    }
}

/* Between the look at the pointer and this the manifest was seen (docs/adr/0015). */
static void on_still_there(void *arg, const struct mb_store_result *r)
{
    struct mb_push *p = arg;
    struct mb_err err = {0};

    if (!push_came_back(p))
        return;
    if (r->error == MB_ENOENT || (r->error == 0 && r->etag[0] && p->manifest_etag[0] &&
                                  !mb_store_same_etag(r->etag, p->manifest_etag)))
        push_fail(p, MB_ESTATE, "", "the iteration was removed, or replaced, meanwhile");
    else if (r->error != 0)
        push_fail(p, r->error, "manifest", r->text);
    else
        push_started(p,
                     mb_store_put(p->store, MB_LATEST_KEY, p->pointer, p->pointer_len,
                                  condition(p, p->has_pointer), p->pointer_etag,
                                  PUSH_SMALL_TIMEOUT_MS, on_pointer_put, p, &err),
                     &err);
}

/* there: the pointer as it is. One that goes back is touched: its like was there before. */
static void move_pointer(struct mb_push *p, const struct mb_store_result *there)
{
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err = {0};

    p->has_pointer = there->error == 0;
    snprintf(p->pointer_etag, sizeof(p->pointer_etag), "%s", there->etag);
    p->pointer_len =
        mb_latest_format(p->source.iteration, there->data, there->data_len,
                         p->status.latest > p->source.iteration, mb_random_u64(), p->pointer);
    push_started(p,
                 mb_store_head(p->store, mb_manifest_key(p->source.iteration, key),
                               PUSH_SMALL_TIMEOUT_MS, on_still_there, p, &err),
                 &err);
}

/* Of a pointer that is too long to be one; unless somebody has put another one meanwhile. */
static void on_pointer_head(void *arg, const struct mb_store_result *r)
{
    struct mb_push *p = arg;

    if (!push_came_back(p))
        return;
    if (r->error != 0 && r->error != MB_ENOENT)
        push_fail(p, r->error, MB_LATEST_KEY, r->text);
    else if (r->error == 0 && r->size_bytes <= PUSH_LATEST_MAX_BYTES &&
             ++p->pointer_tries < POINTER_TRIES)
        push_get_pointer(p);
    else
        move_pointer(p, r);
}

static void on_pointer(void *arg, const struct mb_store_result *r)
{
    struct mb_push *p = arg;
    struct mb_err err = {0}, ok = {0};
    int64_t now_at = -1;

    if (!push_came_back(p))
        return;
    if (r->error == MB_EFULL) {
        mb_warn("push", "the pointer is damaged and will be replaced: %s", r->text);
        p->status.latest = -1;
        push_started(
            p,
            mb_store_head(p->store, MB_LATEST_KEY, PUSH_SMALL_TIMEOUT_MS, on_pointer_head, p, &err),
            &err);
        return;
    }
    if (r->error != 0 && r->error != MB_ENOENT) {
        push_fail(p, r->error, MB_LATEST_KEY, r->text);
        return;
    }
    if (r->error == 0 && mb_latest_parse(r->data, r->data_len, &now_at, &err) != 0)
        mb_warn("push", "the pointer is damaged and will be replaced: %s", err.text);
    p->status.latest = now_at;
    if (now_at == p->source.iteration ||
        (!mb_latest_moves(now_at, p->source.iteration) && !p->force)) {
        push_finish(p, &ok);
        return;
    }
    move_pointer(p, r);
}

void push_get_pointer(struct mb_push *p)
{
    struct mb_err err = {0};

    push_started(p,
                 mb_store_get(p->store, MB_LATEST_KEY, PUSH_LATEST_MAX_BYTES, PUSH_SMALL_TIMEOUT_MS,
                              on_pointer, p, &err),
                 &err);
}

/* ---- part and manifest ---- */

static int build_manifest(const struct mb_push *p, int32_t node_rank, char **out,
                          struct mb_err *err)
{
    struct mb_manifest m = {
        .iteration = p->source.iteration, .node_rank = node_rank, .num_nodes = 1};
    struct mb_claim_opts claim = push_claim(p, NULL);
    int rc = mb_manifest_set_writer(&m, &claim.writer.id, err);

    for (size_t i = 0; i < p->source.n_files && rc == 0; i++)
        rc = mb_manifest_add(&m, p->source.files[i].path, p->source.files[i].size_bytes,
                             p->source.files[i].crc64nvme, err);
    if (rc == 0)
        rc = mb_manifest_encode(&m, out, err);
    mb_manifest_close(&m);
    return rc;
}

static void put_manifest(struct mb_push *p, int32_t node_rank, const char *key,
                         enum mb_store_if cond, const char *etag, mb_store_cb cb)
{
    struct mb_err err = {0};
    char *text = NULL;
    int rc = build_manifest(p, node_rank, &text, &err);

    if (rc == 0)
        rc = mb_store_put(p->store, key, text, strlen(text), cond, etag, PUSH_SMALL_TIMEOUT_MS, cb,
                          p, &err);
    mb_free(text);
    push_started(p, rc, &err);
}

static void on_manifest_put(void *arg, const struct mb_store_result *r)
{
    struct mb_push *p = arg;

    if (!push_came_back(p))
        return;
    if (r->error == MB_EEXIST)
        push_fail(p, MB_ESTATE, "", "another writer has taken this iteration over");
    else if (r->error != 0)
        push_fail(p, r->error, "manifest", r->text);
    else {
        snprintf(p->manifest_etag, sizeof(p->manifest_etag), "%s", r->etag);
        push_get_pointer(p);
    }
}

/* Our claim becomes the manifest. */
static void on_claim_read(void *arg, const struct mb_store_result *r)
{
    struct mb_push *p = arg;
    struct mb_claim_opts claim = push_claim(p, NULL);
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_manifest m = {0};
    struct mb_err err = {0};

    if (!push_came_back(p))
        return;
    if (r->error != 0)
        push_fail(p, r->error, "the claim", r->text);
    else if (mb_manifest_decode_any(r->data, r->data_len, "the claim", &m, &err) != 0)
        push_finish(p, &err);
    else if (!m.is_claim || !mb_manifest_is_of(&m, &claim.writer.id))
        push_fail(p, MB_ESTATE, "", "another writer has taken this iteration over");
    else
        put_manifest(p, -1, mb_manifest_key(p->source.iteration, key), condition(p, 1), r->etag,
                     on_manifest_put);
    mb_manifest_close(&m);
}

static void put_part(struct mb_push *p);

static void on_part_put(void *arg, const struct mb_store_result *r)
{
    struct mb_push *p = arg;
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err = {0};

    if (!push_came_back(p))
        return;
    if (lost_conditions(p, r) && ++p->part_tries == 1)
        put_part(p);
    else if (r->error == MB_EEXIST)
        push_fail(p, MB_ESTATE, "", "another writer has taken this iteration over");
    else if (r->error != 0)
        push_fail(p, r->error, "part file", r->text);
    else
        push_started(p,
                     mb_store_get(p->store, mb_manifest_key(p->source.iteration, key),
                                  MB_MANIFEST_MAX_BYTES, PUSH_SMALL_TIMEOUT_MS, on_claim_read, p,
                                  &err),
                     &err);
}

/* In place of the one that was seen before the claim was looked at (claim.h). */
static void put_part(struct mb_push *p)
{
    char key[MB_CHECKPOINT_KEY_MAX];

    put_manifest(p, 0, mb_part_key(p->source.iteration, 0, 1, key),
                 condition(p, p->part_etag != NULL), p->part_etag, on_part_put);
}

static void on_part_claim(void *arg, const struct mb_claim_answer *a)
{
    struct mb_push *p = arg;
    struct mb_err err = a->err;

    if (!push_came_back(p))
        return;
    if (err.code == 0 && a->over)
        mb_err_set(&err, MB_ESTATE, "%s", a->over);
    if (err.code != 0)
        push_finish(p, &err);
    else
        put_part(p);
}

static void on_part_seen(void *arg, const struct mb_store_result *r)
{
    struct mb_push *p = arg;
    struct mb_claim_opts claim = push_claim(p, "");
    struct mb_err err = {0};

    if (!push_came_back(p))
        return;
    if (r->error == 0)
        p->part_etag = mb_strdup(r->etag);
    if (r->error != 0 && r->error != MB_ENOENT)
        push_fail(p, r->error, "part file", r->text);
    else if (r->error == 0 && !p->part_etag)
        push_fail(p, MB_ENOMEM, "", "out of memory");
    else
        push_started(p, mb_claim_take(p->store, &claim, on_part_claim, p, &err), &err);
}

static void all_sent(struct mb_push *p)
{
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err = {0};

    p->status.phase = MB_PUSH_COMMITTING;
    if (p->source.iteration < 0 || mb_push_source_is_same(&p->source, &err) != 0)
        push_finish(p, &err);
    else
        push_started(p,
                     mb_store_head(p->store, mb_part_key(p->source.iteration, 0, 1, key),
                                   PUSH_SMALL_TIMEOUT_MS, on_part_seen, p, &err),
                     &err);
}

/* ---- files ---- */

static void free_slot(struct push_slot *s)
{
    mb_free(s->key);
    mb_free(s->path);
    s->key = s->path = NULL;
    s->file = NULL;
}

static void on_upload_id(void *arg, const char *upload_id)
{
    struct push_slot *s = arg;
    struct mb_err err = {0};
    char *own = mb_strdup(upload_id);

    mb_free(s->file->upload_id);
    s->file->upload_id = own;
    if (!own)
        mb_err_set(&err, MB_ENOMEM, "out of memory");
    else
        mb_push_journal_begin(s->p->journal, s->file, upload_id, &err);
    if (err.code != 0) /* an id that is not on disk would be forgotten by a kill */
        push_finish(s->p, &err);
}

static void on_progress(void *arg, uint64_t done_bytes, uint64_t total_bytes)
{
    struct push_slot *s = arg;

    (void)total_bytes;
    s->p->status.done_bytes += done_bytes - s->done_bytes; /* wraps back after a restart */
    s->done_bytes = done_bytes;
}

static void note_done(struct mb_push *p, struct mb_push_file *f)
{
    f->is_done = 1;
    p->status.n_done++;
}

/* The object differs from what was listed: once more, under what is there now. Or under no
 * condition, since the server takes none. */
static int goes_again(struct push_slot *s, const struct mb_store_result *r)
{
    struct mb_push_file *f = s->file;
    char *etag;

    if ((r->error != MB_EEXIST && !lost_conditions(s->p, r)) || s->p->source.iteration < 0 ||
        ++f->n_failures >= FILE_TRIES)
        return 0;
    if (r->error != MB_EEXIST)
        return 1;
    etag = r->etag[0] ? mb_strdup(r->etag) : NULL;
    if (r->etag[0] && !etag)
        return 0;
    mb_free(f->etag);
    f->etag = etag;
    return 1;
}

static int send_file(struct push_slot *s, struct mb_push_file *f, struct mb_err *err);

/* The claim is still ours, so what was seen is a leftover of others. */
static void on_claim_looked(void *arg, const struct mb_claim_answer *a)
{
    struct push_slot *s = arg;
    struct mb_push *p = s->p;
    struct mb_push_file *f = s->file;
    struct mb_err err = a->err;

    p->n_sending--;
    s->file = NULL;
    if (!push_came_back(p))
        return;
    if (err.code == 0 && a->over)
        mb_err_set(&err, MB_ESTATE, "%s", a->over);
    if (err.code != 0 || send_file(s, f, &err) != 0)
        push_finish(p, &err);
}

static void on_file_sent(void *arg, const struct mb_store_result *r)
{
    struct push_slot *s = arg;
    struct mb_push *p = s->p;
    struct mb_push_file *f = s->file;
    struct mb_err err = {0};

    p->n_sending--;
    if (r->error == 0 && r->size_bytes != f->size_bytes) { /* the manifest would be wrong */
        p->status.done_bytes -= s->done_bytes;
        push_fail(p, MB_ESTATE, f->path, "changed since the push began");
    } else if (r->error == 0) {
        p->status.done_bytes += f->size_bytes - s->done_bytes;
        f->crc64nvme = r->crc64nvme;
        if (!p->finishing && mb_push_journal_done(p->journal, f, r->etag, &err) != 0)
            push_finish(p, &err);
        note_done(p, f);
    } else if (!p->finishing) {
        p->status.done_bytes -= s->done_bytes;
        if (goes_again(s, r)) {
            struct mb_claim_opts claim = push_claim(p, "");

            free_slot(s);
            s->file = f;
            if (mb_claim_take(p->store, &claim, on_claim_looked, s, &err) == 0) {
                p->n_sending++;
                return; /* still busy */
            }
            s->file = NULL;
            push_finish(p, &err);
        }
        push_fail(p, r->error, "", r->text);
    }
    free_slot(s);
    if (push_came_back(p))
        send_more(p);
}

static int send_file(struct push_slot *s, struct mb_push_file *f, struct mb_err *err)
{
    struct mb_push *p = s->p;
    struct mb_store_put_file put = {
        .resume_upload_id = f->upload_id, .on_upload_id = on_upload_id, .progress = on_progress};
    int rc = 0;

    s->key = push_key_of(p, f->path);
    s->path = mb_path_join(p->source.root, f->path);
    s->file = f;
    s->done_bytes = 0;
    put.key = s->key;
    put.path = s->path;
    if (p->source.iteration >= 0) {
        put.cond = condition(p, f->etag != NULL);
        put.etag = f->etag;
    }
    put.look_first = f->etag != NULL || f->was_done;
    if (!s->key || !s->path)
        rc = mb_err_set(err, MB_ENOMEM, "out of memory");
    if (rc == 0 && f->size_bytes >= MULTIPART_FROM_BYTES && !f->upload_id)
        rc = mb_push_journal_intent(p->journal, f, err);
    if (rc == 0)
        rc = mb_store_put_file(p->store, &put, on_file_sent, s, err);
    if (rc != 0) {
        free_slot(s);
        return rc;
    }
    p->busy++;
    p->n_sending++;
    return 0;
}

static void keep(struct mb_push *p, struct mb_push_file *f)
{
    p->status.done_bytes += f->size_bytes;
    p->status.kept_bytes += f->size_bytes;
    note_done(p, f);
}

/* Is it the object that the journal's "done" is about? */
static void on_done_seen(void *arg, const struct mb_store_result *r)
{
    struct push_slot *s = arg;
    struct mb_push *p = s->p;
    struct mb_push_file *f = s->file;
    struct mb_err err = {0};

    p->n_sending--;
    free_slot(s);
    if (!push_came_back(p))
        return;
    if (r->error == 0 && r->size_bytes == f->size_bytes &&
        mb_store_same_etag(r->etag, f->done_etag)) {
        keep(p, f);
        send_more(p);
    } else if (r->error != 0 && r->error != MB_ENOENT) {
        push_fail(p, r->error, f->path, r->text);
    } else if (send_file(s, f, &err) != 0) {
        push_finish(p, &err);
    }
}

static int look_or_send(struct push_slot *s, struct mb_push_file *f, struct mb_err *err)
{
    struct mb_push *p = s->p;
    int rc;

    if (!f->was_done || !f->done_etag)
        return send_file(s, f, err);
    s->key = push_key_of(p, f->path);
    s->file = f;
    rc = s->key ? mb_store_head(p->store, s->key, PUSH_SMALL_TIMEOUT_MS, on_done_seen, s, err)
                : mb_err_set(err, MB_ENOMEM, "out of memory");
    if (rc != 0) {
        free_slot(s);
        return rc;
    }
    p->busy++;
    p->n_sending++;
    return 0;
}

static void send_more(struct mb_push *p)
{
    struct mb_err err = {0};

    for (size_t i = 0; i < MB_STORE_FILES_AT_ONCE && p->next < p->n_order && !p->finishing; i++) {
        struct mb_push_file *f = p->order[p->next];

        if (p->slots[i].file)
            continue;
        if (f->is_last && p->n_sending > 0)
            return;
        p->next++;
        if (look_or_send(&p->slots[i], f, &err) != 0) {
            push_finish(p, &err);
            return;
        }
    }
    if (p->n_sending == 0 && p->next == p->n_order && !p->finishing)
        all_sent(p);
}

static int compare_order(const void *a, const void *b)
{
    const struct mb_push_file *x = *(struct mb_push_file *const *)a;
    const struct mb_push_file *y = *(struct mb_push_file *const *)b;

    if (x->is_last != y->is_last)
        return x->is_last - y->is_last;
    return (x->size_bytes < y->size_bytes) - (x->size_bytes > y->size_bytes);
}

/* Those that the journal and the listing agree on are through. */
void push_begin_sending(struct mb_push *p)
{
    struct mb_err err = {0};

    p->status.phase = MB_PUSH_SENDING;
    p->order = mb_calloc(p->source.n_files, sizeof(struct mb_push_file *));
    if (!p->order) {
        mb_err_set(&err, MB_ENOMEM, "out of memory");
        push_finish(p, &err);
        return;
    }
    for (size_t i = 0; i < p->source.n_files; i++) {
        struct mb_push_file *f = &p->source.files[i];

        if (f->was_done && f->etag && f->etag[0])
            keep(p, f);
        else
            p->order[p->n_order++] = f;
    }
    qsort(p->order, p->n_order, sizeof(struct mb_push_file *), compare_order);
    send_more(p);
}

/* ---- life ---- */

static int prepare(struct mb_push *p, const struct mb_push_opts *opts, struct mb_err *err)
{
    int rc = mb_push_source_read(opts->dir, opts->iteration, opts->is_plain, &p->source, err);

    if (rc != 0)
        return rc;
    p->job_id = mb_strdup(opts->job_id ? opts->job_id : "push");
    if (!p->job_id)
        return mb_err_set(err, MB_ENOMEM, "out of memory");
    return mb_push_journal_open(opts->state_dir ? opts->state_dir : opts->dir, opts->url,
                                &p->source, &p->journal, err);
}

int mb_push_start(uv_loop_t *loop, const struct mb_push_opts *opts, mb_push_cb cb, void *arg,
                  struct mb_push **out, struct mb_err *err)
{
    struct mb_push *p = mb_calloc(1, sizeof(*p));
    int rc = p ? prepare(p, opts, err) : mb_err_set(err, MB_ENOMEM, "out of memory");

    if (rc == 0)
        rc = mb_store_open(loop, opts->url, &p->store, err);
    if (rc == 0) {
        mb_store_set_outage(p->store, opts->retry_for_ms ? opts->retry_for_ms : RETRY_FOR_MS);
        rc = mb_store_get(p->store, MB_LATEST_KEY, PUSH_LATEST_MAX_BYTES, PUSH_SMALL_TIMEOUT_MS,
                          push_on_first_look, p, err);
        if (rc != 0)
            mb_store_close(p->store, NULL, NULL);
    }
    if (rc != 0) {
        if (p)
            destroy(p);
        return rc;
    }
    p->busy = 1;
    p->loop = loop;
    p->force = opts->force;
    p->abandon = opts->abandon;
    p->cb = cb;
    p->arg = arg;
    for (size_t i = 0; i < MB_STORE_FILES_AT_ONCE; i++)
        p->slots[i].p = p;
    p->status.iteration = p->source.iteration;
    p->status.latest = -1;
    p->status.total_bytes = p->source.total_bytes;
    p->status.n_files = p->source.n_files;
    *out = p;
    return 0;
}
