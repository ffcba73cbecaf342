/*
 * What the store has of the iteration, and the right to write it.
 *
 *  1. The manifest's key. A whole manifest: compared with the files, by names and sizes, then by
 *     checksums. Another writer's claim: refused, unless force. Nothing, or our own claim: on.
 *  2. The claim is taken (claim.h), by hand: the list of the store's writers is left alone.
 *  3. The iteration is listed: what lies there may be replaced, under the etag that is seen here.
 *  4. The claim is looked at again: only then does the listing count, since nobody else wrote there
 *     in between.
 *  5. "done" in the journal counts if the object is the one that it is about, by size and etag, and
 *     the claim was ours all the time; else the file is compared by its checksum, or sent again.
 *  6. Uploads that cannot be gone on with are aborted. Those whose id was never noted have to be
 *     looked for: a server that cannot do that, or does not let us, is told about once, and the
 *     push goes on. Only --abandon, which is about nothing else, fails then.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "agent/upload/push_internal.h"
#include "base/alloc.h"
#include "base/log.h"

enum { LIST_TIMEOUT_MS = 600000 }; /* of 100,000 objects some servers take minutes */

static void abort_next(struct mb_push *p);

/* ---- what earlier calls left ---- */

/* The next upload to abort: of a file whose id is stale or was never noted, then of files that are
 * gone. 0: none is left. */
static int find_abort(struct mb_push *p, const char **path, const char **upload_id)
{
    size_t n_orphans;
    const struct mb_push_orphan *orphans = mb_push_journal_orphans(p->journal, &n_orphans);

    for (; p->next_abort < p->source.n_files; p->next_abort++) {
        struct mb_push_file *f = &p->source.files[p->next_abort];

        *path = f->path;
        *upload_id = f->stale_id ? f->stale_id : p->abandon ? f->upload_id : NULL;
        if (*upload_id || f->was_begun)
            return 1;
    }
    if (p->next_abort - p->source.n_files >= n_orphans)
        return 0;
    *path = orphans[p->next_abort - p->source.n_files].path;
    *upload_id = orphans[p->next_abort - p->source.n_files].upload_id;
    return 1;
}

/* The present one stays as it is, in the journal too. */
static void skip_abort(struct mb_push *p)
{
    if (p->next_abort < p->source.n_files)
        p->source.files[p->next_abort].was_begun = 0;
    else
        p->next_abort++;
}

/* Uploads without a known id cannot be looked for: 1. */
static int cannot_look(struct mb_push *p, const struct mb_store_result *r)
{
    if (r->error != MB_EUNSUPPORTED && r->error != MB_EDENIED)
        return 0;
    mb_err_set(&p->no_looks, r->error,
               "unfinished uploads whose id was never noted cannot be looked for: %s", r->text);
    mb_warn("push", "%s; the bucket's own rule for unfinished uploads has to remove them",
            p->no_looks.text);
    return 1;
}

static void on_upload_aborted(void *arg, const struct mb_store_result *r)
{
    struct mb_push *p = arg;
    const char *path = NULL, *upload_id = NULL;
    struct mb_err err = {0};

    if (!push_came_back(p))
        return;
    find_abort(p, &path, &upload_id);
    if (r->error != 0 && !upload_id && cannot_look(p, r)) {
        abort_next(p);
        return;
    }
    if (r->error != 0) {
        push_fail(p, r->error, "aborting an unfinished upload", r->text);
        return;
    }
    p->status.n_aborted++;
    if (p->next_abort < p->source.n_files) {
        struct mb_push_file *f = &p->source.files[p->next_abort];

        mb_free(f->stale_id);
        f->stale_id = NULL;
        f->was_begun = 0;
        if (p->abandon) {
            mb_free(f->upload_id);
            f->upload_id = NULL;
        }
        if (!f->upload_id && mb_push_journal_gone(p->journal, path, &err) != 0)
            push_finish(p, &err);
    } else {
        p->next_abort++;
    }
    if (!p->finishing)
        abort_next(p);
}

static void abort_next(struct mb_push *p)
{
    const char *path = NULL, *upload_id = NULL;
    struct mb_err err = {0};
    char *key;
    int rc;

    int found;

    p->status.phase = MB_PUSH_ABORTING;
    while ((found = find_abort(p, &path, &upload_id)) && !upload_id && p->no_looks.code != 0)
        skip_abort(p);
    if (!found) {
        if (p->abandon)
            push_finish(p, &p->no_looks);
        else
            push_begin_sending(p);
        return;
    }
    key = push_key_of(p, path);
    rc = key ? mb_store_abort_uploads(p->store, key, upload_id, PUSH_SMALL_TIMEOUT_MS,
                                      on_upload_aborted, p, &err)
             : mb_err_set(&err, MB_ENOMEM, "out of memory");
    mb_free(key);
    push_started(p, rc, &err);
}

/* ---- the claim and the listing ---- */

static void list(struct mb_push *p);

static void on_claimed(void *arg, const struct mb_claim_answer *a)
{
    struct mb_push *p = arg;

    if (!push_came_back(p))
        return;
    if (a->err.code != 0) {
        push_finish(p, &a->err);
        return;
    }
    if (a->over || a->place[0]) {
        push_fail(p, MB_ESTATE, "",
                  a->over ? a->over : "another writer has made it whole meanwhile");
        return;
    }
    if (p->is_listed) {
        abort_next(p);
        return;
    }
    list(p);
}

static void claim(struct mb_push *p, const char *place)
{
    struct mb_claim_opts opts = push_claim(p, place);
    struct mb_err err = {0};

    push_started(p, mb_claim_take(p->store, &opts, on_claimed, p, &err), &err);
}

static void on_list(void *arg, const struct mb_store_result *r)
{
    struct mb_push *p = arg;
    char dir[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err = {0};
    size_t skip = strlen(mb_iteration_dir(p->source.iteration, dir)) + 1;

    if (!push_came_back(p))
        return;
    if (r->error != 0) {
        push_fail(p, r->error, "listing", r->text);
        return;
    }
    for (size_t i = 0; err.code == 0 && i < r->n_entries; i++) {
        struct mb_push_file *f = mb_push_source_find(&p->source, r->entries[i].key + skip);

        if (!f)
            continue;
        f->etag = mb_strdup(r->entries[i].etag);
        if (!f->etag)
            mb_err_set(&err, MB_ENOMEM, "out of memory");
        f->was_done &= r->entries[i].size_bytes == f->size_bytes && f->done_etag != NULL &&
                       (!f->etag || !f->etag[0] || mb_store_same_etag(f->etag, f->done_etag));
    }
    p->is_listed = 1;
    if (err.code != 0)
        push_finish(p, &err);
    else
        claim(p, "");
}

static void list(struct mb_push *p)
{
    char prefix[MB_CHECKPOINT_KEY_MAX + 1];
    struct mb_err err = {0};

    mb_iteration_dir(p->source.iteration, prefix);
    strcat(prefix, "/");
    push_started(p, mb_store_list(p->store, prefix, LIST_TIMEOUT_MS, on_list, p, &err), &err);
}

/* ---- the manifest ---- */

static void on_hashed(void *arg, const struct mb_err *result)
{
    struct mb_push *p = arg;
    struct mb_err err = *result;

    p->hash = NULL;
    if (!push_came_back(p))
        return;
    for (size_t i = 0; err.code == 0 && i < p->source.n_files; i++)
        if (p->source.files[i].crc64nvme != p->there.files[i].crc64nvme)
            mb_err_set(&err, MB_EEXIST,
                       "iteration %" PRId64 " is there already, and its %s is another one",
                       p->source.iteration, p->source.files[i].path);
    if (err.code != 0) {
        push_finish(p, &err);
        return;
    }
    p->status.was_whole = 1;
    p->status.n_done = p->source.n_files;
    p->status.done_bytes = p->status.kept_bytes = p->source.total_bytes;
    p->status.phase = MB_PUSH_COMMITTING;
    push_get_pointer(p);
}

/* Names and sizes; checksums follow. */
static void compare(struct mb_push *p)
{
    struct mb_err err = {0};
    int differs = p->there.n_files != p->source.n_files;

    for (size_t i = 0; !differs && i < p->source.n_files; i++)
        differs = strcmp(p->there.files[i].path, p->source.files[i].path) != 0 ||
                  p->there.files[i].size_bytes != p->source.files[i].size_bytes;
    if (differs) {
        mb_err_set(&err, MB_EEXIST,
                   "iteration %" PRId64 " is there already, with other files: mobula checkpoint rm "
                   "--iteration %" PRId64 " removes it",
                   p->source.iteration, p->source.iteration);
        push_finish(p, &err);
        return;
    }
    p->status.phase = MB_PUSH_COMPARING;
    push_started(p, mb_push_hash_start(p->loop, &p->source, on_hashed, p, &p->hash, &err), &err);
}

static void on_manifest(void *arg, const struct mb_store_result *r)
{
    struct mb_push *p = arg;
    struct mb_claim_opts ours = push_claim(p, NULL);
    struct mb_err err = {0};

    if (!push_came_back(p))
        return;
    if (r->error != 0 && r->error != MB_ENOENT) {
        push_fail(p, r->error, "manifest", r->text);
        return;
    }
    if (r->error == 0 &&
        mb_manifest_decode_any(r->data, r->data_len, "its manifest", &p->there, &err) != 0) {
        push_finish(p, &err);
    } else if (r->error == 0 && !p->there.is_claim) {
        snprintf(p->manifest_etag, sizeof(p->manifest_etag), "%s", r->etag);
        compare(p);
    } else if (r->error == 0 && !p->force && !mb_manifest_is_of(&p->there, &ours.writer.id)) {
        mb_err_set(&err, MB_ESTATE,
                   "job \"%s\" is writing iteration %" PRId64
                   " there, or was: --force takes it over",
                   p->there.job_id, p->source.iteration);
        push_finish(p, &err);
    } else {
        int stands = r->error == 0 && mb_manifest_is_of(&p->there, &ours.writer.id);

        for (size_t i = 0; !stands && i < p->source.n_files; i++)
            p->source.files[i].was_done = 0;
        claim(p, stands ? "" : NULL); /* "": it must stand still */
    }
}

/* Rights and bucket are tried here, before any work. */
void push_on_first_look(void *arg, const struct mb_store_result *r)
{
    struct mb_push *p = arg;
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err = {0};

    if (!push_came_back(p))
        return;
    if (r->error != 0 && r->error != MB_EFULL &&
        (r->error != MB_ENOENT || strstr(r->text, "NoSuchBucket")))
        push_fail(p, r->error, "", r->text);
    else if (p->source.iteration < 0 || p->abandon)
        abort_next(p);
    else
        push_started(p,
                     mb_store_get(p->store, mb_manifest_key(p->source.iteration, key),
                                  MB_MANIFEST_MAX_BYTES, PUSH_SMALL_TIMEOUT_MS, on_manifest, p,
                                  &err),
                     &err);
}
