/*
 * Before the first file of an iteration goes: is it ours to save?
 *
 *  1. Claim and fence (claim.h). Somebody newer counts: what is pending is dropped, all of it when
 *     the fence says so, this iteration when only its claim is gone.
 *  2. Something of the iteration may be in the store already, from another writer or from before a
 *     kill: listed once, after the claim. What is there with our size is looked at before it is
 * sent, anything is replaced only as it was seen. Then the claim is looked at again. Unfinished
 * uploads are looked for file by file.
 *  3. The store does not answer: asked again after a pause, for ever. It refuses: UPLOAD_TRIES_MAX
 *     times, then the iteration is dropped.
 */
#include <stdio.h>
#include <string.h>
#include "agent/upload/claim.h"
#include "agent/upload/upload_internal.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"

static void take(struct mb_upload *u);

/* A store that is away is asked as often as it takes, anything else a few times. */
static void later(struct mb_upload *u, int code, const char *text)
{
    struct mb_plan_iteration *it = u->preparing;

    u->preparing = NULL;
    it->failures = mb_plan_count_failure(it->failures, code);
    mb_warn("upload", "%s (try %u of %d)", text, it->failures, UPLOAD_TRIES_MAX);
    if (it->failures >= UPLOAD_TRIES_MAX && it->state < MB_PLAN_COMMITTED)
        upload_drop(u, it, text, "");
    else
        upload_back_off(u, it->failures);
}

static void prepared(struct mb_upload *u)
{
    u->prepared = u->preparing;
    u->prepared->failures = 0;
    if (!mb_store_has_conditions(u->store)) /* known before big files are sent and refused */
        upload_lose_conditions(u);
    u->prepared_ms = mb_mono_ms();
    u->preparing = NULL;
    upload_kick(u);
}

void upload_look_again(struct mb_upload *u)
{
    u->prepared = NULL;
}

/* ---- what is there already ---- */

static int by_key(const struct mb_store_entry *entries, size_t n, const char *key)
{
    size_t low = 0, high = n;

    while (low < high) {
        size_t mid = low + (high - low) / 2;
        int c = strcmp(entries[mid].key, key);

        if (c == 0)
            return (int)mid;
        if (c < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return -1;
}

static int note_seen(struct mb_plan_iteration *it, const struct mb_store_result *r)
{
    for (size_t i = 0; i < it->n_files; i++) {
        struct mb_plan_file *f = &it->files[i];
        char *key = mb_manifest_file_key(it->iteration, it->place, f->path), *etag = NULL;
        int at = key != NULL ? by_key(r->entries, r->n_entries, key) : -1;

        if (at >= 0 && r->entries[at].etag[0] != '\0')
            etag = mb_strdup(r->entries[at].etag);
        if (key == NULL || (etag == NULL && at >= 0 && r->entries[at].etag[0] != '\0')) {
            mb_free(key);
            return MB_ENOMEM;
        }
        mb_free(key);
        mb_free(f->etag);
        f->etag = etag;
        f->may_have_uploads |=
            f->state == MB_PLAN_FILE_WAITING && f->size_bytes >= UPLOAD_WAS_CUT_BYTES;
        f->look_first = at >= 0 && r->entries[at].size_bytes == f->size_bytes;
    }
    return MB_OK;
}

static void on_list(void *arg, const struct mb_store_result *r)
{
    struct mb_upload *u = arg;
    struct mb_plan_iteration *it = u->preparing;

    if (u->closing)
        return;
    if (r->error != MB_OK && r->error != MB_ENOENT) {
        later(u, r->error, r->text);
    } else if (note_seen(it, r) != MB_OK) {
        later(u, MB_ENOMEM, "no memory to note what is there already");
    } else {
        it->was_listed = 1;
        take(u); /* what was seen counts only if the claim stood afterwards */
    }
}

static void list(struct mb_upload *u)
{
    char dir[MB_CHECKPOINT_KEY_MAX], prefix[MB_CHECKPOINT_KEY_MAX + 1];
    struct mb_err err;

    snprintf(prefix, sizeof(prefix), "%s/", mb_iteration_dir(u->preparing->iteration, dir));
    if (mb_store_list(u->store, prefix, UPLOAD_SMALL_TIMEOUT_MS, on_list, u, &err) != MB_OK)
        later(u, err.code, err.text);
}

/* ---- the claim ---- */

/* A newer writer was here: nothing of this one counts any more. */
static void stand_back(struct mb_upload *u, const char *over)
{
    for (size_t i = 0; i < mb_plan_count(u->plan); i++)
        if (mb_plan_at(u->plan, i)->state < MB_PLAN_COMMITTED)
            upload_drop(u, mb_plan_at(u->plan, i), over, "");
}

static int note_place(struct mb_upload *u, struct mb_plan_iteration *it, const char *place,
                      struct mb_err *err)
{
    int rc = MB_OK;

    if (it->place == NULL)
        rc = mb_journal_place(u->journal, it->iteration, place, err);
    return rc == MB_OK ? mb_plan_place(it, place, err) : rc;
}

static void on_claim(void *arg, const struct mb_claim_answer *answer)
{
    struct mb_upload *u = arg;
    struct mb_plan_iteration *it = u->preparing;
    struct mb_err err = {0};

    if (u->closing)
        return;
    if (answer->err.code == MB_OK && !answer->is_fenced)
        upload_has_entered(u);
    if (it->state != MB_PLAN_UPLOADING) { /* dropped meanwhile */
        u->preparing = NULL;
    } else if (answer->err.code == MB_ECORRUPT) { /* asking again would not mend it */
        u->preparing = NULL;
        upload_drop(u, it, "the list of writers is damaged", answer->err.text);
    } else if (answer->err.code != MB_OK) {
        later(u, answer->err.code, answer->err.text);
    } else if (answer->is_fenced) {
        u->preparing = NULL;
        stand_back(u, answer->over);
    } else if (answer->over != NULL) {
        u->preparing = NULL;
        upload_drop(u, it, answer->over, "");
    } else if (note_place(u, it, answer->place, &err) != MB_OK) {
        later(u, err.code, err.text);
    } else if (!it->was_listed && (answer->was_there || it->was_replayed)) {
        list(u);
    } else {
        it->was_listed = 1;
        prepared(u);
    }
}

static void take(struct mb_upload *u)
{
    struct mb_claim_opts opts = {.iteration = u->preparing->iteration,
                                 .num_nodes = u->opts.num_nodes,
                                 .writer = upload_fence_writer(u, 0),
                                 .place = u->preparing->place};
    struct mb_err err;

    if (mb_claim_take(u->store, &opts, on_claim, u, &err) != MB_OK)
        later(u, err.code, err.text);
}

int upload_is_prepared(struct mb_upload *u, struct mb_plan_iteration *it)
{
    if (it == u->prepared && mb_mono_ms() - u->prepared_ms <= UPLOAD_PREPARED_MS)
        return 1;
    if (u->preparing == NULL) {
        u->preparing = it;
        take(u);
    }
    return 0;
}
