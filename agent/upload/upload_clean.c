/*
 * What a dropped iteration leaves in the store: multipart uploads that are not finished, whose
 * parts would be paid for until somebody looks. They are aborted one by one, also after a restart,
 * and noted. Those whose ids nobody knows may be a newer writer's: upload_sweep.c. A store that
 * takes none away for UPLOAD_CLEAN_MS keeps the rest, which is said; so does one that is slower
 * than whoever abandoned them has time.
 */
#include "agent/upload/upload_internal.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"

enum { TIMEOUT_MS = 10000, AGAIN_MS = 1000, PATIENCE_MS = 5000 };

void upload_replayed(struct mb_plan_iteration *it)
{
    it->was_replayed = 1;
    for (size_t i = 0; i < it->n_files; i++) {
        struct mb_plan_file *f = &it->files[i];

        f->may_have_uploads = f->state != MB_PLAN_FILE_DONE && !f->was_aborted &&
                              f->size_bytes >= UPLOAD_MAY_BE_CUT_BYTES && it->place != NULL;
    }
    mb_plan_shed(it);
}

void upload_clean_on(struct mb_upload *u)
{
    u->clean_until_ms = mb_mono_ms() + UPLOAD_CLEAN_MS;
    if (u->clean_bound_ms > 0 && u->clean_until_ms > u->clean_bound_ms)
        u->clean_until_ms = u->clean_bound_ms;
}

int upload_is_cleaning(const struct mb_upload *u)
{
    if (mb_mono_ms() >= u->clean_until_ms)
        return 0;
    for (size_t i = 0; i < mb_plan_count(u->plan); i++) {
        const struct mb_plan_iteration *it = mb_plan_at(u->plan, i);

        for (size_t k = 0; it->state == MB_PLAN_DROPPED && k < it->n_files; k++)
            if (mb_plan_file_is_open(&it->files[k]))
                return 1;
    }
    return 0;
}

static void forget(struct mb_plan_file *f)
{
    mb_free(f->upload_id);
    f->upload_id = NULL;
    f->may_have_uploads = 0;
}

/* The upload whose id was known, and then those whose ids were not. */
static void went(struct mb_upload *u, int code, const char *text)
{
    struct mb_plan_file *f = u->clean_file;
    int was_known = f->upload_id != NULL;
    struct mb_err err;

    u->clean_file = NULL;
    if (!was_known && !f->may_have_uploads) { /* the time was over meanwhile */
        upload_clean(u);
        return;
    }
    if (code == MB_OK || code == MB_EUNSUPPORTED || code == MB_EEXIST) {
        mb_free(f->upload_id);
        f->upload_id = NULL;
        f->may_have_uploads &= was_known;
        f->was_aborted = !f->may_have_uploads;
        upload_clean_on(u);
        if (f->was_aborted &&
            mb_journal_aborted(u->journal, u->clean_it->iteration, f->path, &err) != MB_OK)
            mb_warn("upload", "%s", err.text);
    } else {
        mb_warn("upload", "an unfinished upload of %s: %s", f->path, text);
        u->clean_at_ms = mb_mono_ms() + AGAIN_MS;
    }
    upload_clean(u);
}

static void on_aborted(void *arg, const struct mb_store_result *r)
{
    struct mb_upload *u = arg;

    if (!u->closing)
        went(u, r->error, r->text);
}

static void on_swept(void *arg, int code, const char *text)
{
    struct mb_upload *u = arg;

    if (!u->closing)
        went(u, code, text);
}

static int begin(struct mb_upload *u, struct mb_plan_iteration *it, struct mb_plan_file *f)
{
    char *key = mb_manifest_file_key(it->iteration, it->place, f->path);
    struct mb_err err;
    int rc = MB_ENOMEM;

    if (key != NULL && f->upload_id != NULL)
        rc = mb_store_abort_uploads(u->store, key, f->upload_id, TIMEOUT_MS, on_aborted, u, &err);
    else if (key != NULL)
        rc = upload_sweep(u, it, key, on_swept, u, &err);
    mb_free(key);
    if (rc != MB_OK)
        return rc;
    u->clean_it = it;
    u->clean_file = f;
    return MB_OK;
}

/* A request that the store does not answer may take longer than there is time. A part that the
 * store has as a whole may come to life after its upload was aborted, so its answer is waited for,
 * as long as there is time for an abort afterwards. */
static void end_transfers(struct mb_upload *u)
{
    uint64_t now_ms = mb_mono_ms();
    uint64_t left_ms = u->clean_until_ms > now_ms ? u->clean_until_ms - now_ms : 0;
    uint64_t patience_ms = left_ms / 2 < PATIENCE_MS ? left_ms / 2 : PATIENCE_MS;

    for (size_t i = 0; i < UPLOAD_TRANSFERS_MAX; i++) {
        struct transfer *t = &u->transfers[i];
        struct mb_store_op *op = t->op;

        if (t->it == NULL || t->it->state != MB_PLAN_DROPPED || op == NULL)
            continue;
        t->op = NULL;
        mb_store_put_cancel(op, patience_ms); /* its callback may run, and fill the slot anew */
    }
}

/* The time is over. */
static void give_up(struct mb_upload *u)
{
    for (size_t i = 0; i < mb_plan_count(u->plan); i++) {
        struct mb_plan_iteration *it = mb_plan_at(u->plan, i);

        for (size_t k = 0; it->state == MB_PLAN_DROPPED && k < it->n_files; k++) {
            struct mb_plan_file *f = &it->files[k];

            if (f->state != MB_PLAN_FILE_WAITING || !mb_plan_file_is_open(f))
                continue;
            mb_warn("upload", "an unfinished upload of %s stays behind: %s", f->path,
                    u->clean_until_ms == u->clean_bound_ms
                        ? "it was not taken away in the time that the job had left"
                        : "the store has taken none away for 20 s");
            forget(f);
        }
    }
}

void upload_clean(struct mb_upload *u)
{
    end_transfers(u);
    if (mb_mono_ms() >= u->clean_until_ms)
        give_up(u);
    if (u->clean_file != NULL || mb_mono_ms() < u->clean_at_ms)
        return;
    for (size_t i = 0; i < mb_plan_count(u->plan); i++) {
        struct mb_plan_iteration *it = mb_plan_at(u->plan, i);

        for (size_t k = 0; it->state == MB_PLAN_DROPPED && k < it->n_files; k++) {
            struct mb_plan_file *f = &it->files[k];

            if (f->state != MB_PLAN_FILE_WAITING || !mb_plan_file_is_open(f))
                continue;
            if (begin(u, it, f) != MB_OK)
                u->clean_at_ms = mb_mono_ms() + AGAIN_MS;
            return;
        }
    }
}
