/*
 * Before the first file of an iteration goes: is it ours to save?
 *
 *  1. The fence (fence.h): a node with an older attempt stands back, and drops what is pending.
 *  2. A manifest of the iteration that another job or an older attempt wrote is deleted, so that a
 *     manifest never lists files that are not its own. One of a newer attempt stays: dropped here.
 *  3. The store does not answer, or cannot delete: asked again after a pause.
 */
#include <stdio.h>
#include "agent/upload/fence.h"
#include "agent/upload/upload_internal.h"
#include "base/clock.h"
#include "base/log.h"

/* ---- a manifest that is not ours ---- */

static void prepared(struct mb_upload *u)
{
    u->prepared = u->preparing;
    u->prepared_ms = mb_mono_ms();
    u->preparing = NULL;
    upload_kick(u);
}

static void on_foreign_deleted(void *arg, const struct mb_store_result *result)
{
    struct mb_upload *u = arg;

    if (u->closing)
        return;
    if (result->error != MB_OK) {
        mb_warn("upload", "an older manifest cannot be deleted: %s", result->text);
        u->preparing = NULL;
        upload_back_off(u, 1);
        return;
    }
    prepared(u);
}

static void on_manifest_found(void *arg, const struct mb_store_result *result)
{
    struct mb_upload *u = arg;
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_manifest_writer writer = upload_writer(u);
    struct mb_manifest m = {0};
    struct mb_err err = {0};
    int ours = 0, newer = 0;

    if (u->closing)
        return;
    if (result->error == MB_ENOENT) {
        prepared(u);
        return;
    }
    if (result->error != MB_OK) {
        mb_warn("upload", "looking for an older manifest: %s", result->text);
        u->preparing = NULL;
        upload_back_off(u, 1);
        return;
    }
    if (mb_manifest_decode(result->data, result->data_len, "manifest", &m, &err) == MB_OK) {
        ours = mb_manifest_is_of(&m, &writer);
        newer = mb_manifest_is_newer(&m, &writer);
    }
    mb_manifest_close(&m);
    if (ours) {
        prepared(u);
        return;
    }
    if (newer) { /* ours is the older attempt: what it saved is of no use to anybody any more */
        struct mb_plan_iteration *it = u->preparing;

        u->preparing = NULL;
        upload_drop(u, it, "a newer attempt has saved it", "");
        return;
    }
    mb_info("upload", "iteration=%lld was saved by another job or attempt before, replacing it",
            (long long)u->preparing->iteration);
    if (mb_store_delete(u->store, mb_manifest_key(u->preparing->iteration, key),
                        UPLOAD_SMALL_TIMEOUT_MS, on_foreign_deleted, u, &err) != MB_OK) {
        u->preparing = NULL;
        upload_back_off(u, 1);
    }
}

static void look_for_manifest(struct mb_upload *u)
{
    const struct mb_plan_iteration *it = u->preparing;
    char key[MB_CHECKPOINT_KEY_MAX];
    struct mb_err err;

    if (mb_store_get(u->store, mb_manifest_key(it->iteration, key), MB_MANIFEST_MAX_BYTES,
                     UPLOAD_SMALL_TIMEOUT_MS, on_manifest_found, u, &err) != MB_OK) {
        u->preparing = NULL;
        upload_back_off(u, 1);
    }
}

/* ---- before that: the fence between attempts ---- */

/* A later attempt of the gang was here: nothing of this one counts any more. */
static void stand_back(struct mb_upload *u, int64_t newest)
{
    char why[80];

    snprintf(why, sizeof(why), "attempt %lld of its gang has taken over", (long long)newest);
    u->preparing = NULL;
    for (size_t i = 0; i < mb_plan_count(u->plan); i++)
        if (mb_plan_at(u->plan, i)->state < MB_PLAN_COMMITTED)
            upload_drop(u, mb_plan_at(u->plan, i), why, "");
}

static void on_fence(void *arg, const struct mb_err *err, int64_t newest)
{
    struct mb_upload *u = arg;

    if (u->closing)
        return;
    if (err->code == MB_ECORRUPT) { /* asking again would not mend it */
        upload_drop(u, u->preparing, "the note of the newest attempt is damaged", err->text);
        u->preparing = NULL;
    } else if (err->code != MB_OK) {
        mb_warn("upload", "%s", err->text);
        u->preparing = NULL;
        upload_back_off(u, 1);
    } else if (newest != (int64_t)u->opts.attempt) {
        stand_back(u, newest);
    } else {
        look_for_manifest(u);
    }
}

void upload_prepare(struct mb_upload *u, struct mb_plan_iteration *it)
{
    struct mb_err err;

    u->preparing = it;
    if (mb_fence_look(u->store, u->placement_group, u->opts.attempt, on_fence, u, &err) != MB_OK) {
        u->preparing = NULL;
        upload_back_off(u, 1);
    }
}
