/*
 * The gang's place in the store's list of writers (fence.h), taken as soon as it is launched: what
 * follows it there stands behind it, whoever of them saves first.
 *
 *  1. A fresh journal: looked at once, and noted. The store does not answer: again after a pause,
 * as long as ranks run. The first save enters too, also that of a gang which ended before it could:
 *     then before those that were launched after it.
 *  2. Somebody newer counts already: said, and not asked again; every save hears it anyhow.
 *  3. The list is damaged: said; trying again would not help.
 */
#include "agent/upload/upload_internal.h"
#include "base/clock.h"
#include "base/log.h"

enum { PAUSE_BASE_MS = 1000, PAUSE_MAX_MS = 20000 };

struct mb_fence_writer upload_fence_writer(const struct mb_upload *u, int waits)
{
    const struct mb_plan_gang *gang = mb_plan_gang(u->plan);

    return (struct mb_fence_writer){.id = upload_writer(u),
                                    .launched_unix_ms = gang->launched_unix_ms,
                                    .waits = waits,
                                    .has_entered = gang->has_entered,
                                    .has_ended = u->has_ended};
}

void upload_note_launch(struct mb_upload *u)
{
    struct mb_plan_gang *gang = mb_plan_gang(u->plan);
    struct mb_err err;

    if (gang->launched_unix_ms > 0 || gang->has_entered || mb_plan_count(u->plan) > 0)
        return;
    gang->launched_unix_ms = (int64_t)mb_unix_ms();
    if (mb_journal_launched(u->journal, gang->launched_unix_ms, &err) != MB_OK)
        mb_warn("upload", "%s", err.text);
}

void upload_has_entered(struct mb_upload *u)
{
    struct mb_plan_gang *gang = mb_plan_gang(u->plan);
    struct mb_err err;

    if (gang->has_entered)
        return;
    if (mb_journal_entered(u->journal, &err) != MB_OK) /* noted with the next look */
        mb_warn("upload", "%s", err.text);
    else
        gang->has_entered = 1;
}

static void later(struct mb_upload *u, const char *text)
{
    mb_warn("upload", "job=%s: taking its place among the writers: %s", u->job_id, text);
    u->enter_failures++;
    u->enter_at_ms = mb_mono_ms() + PAUSE_BASE_MS +
                     mb_backoff_ms(u->enter_failures, PAUSE_BASE_MS, PAUSE_MAX_MS, mb_random_u64());
}

static void on_answer(void *arg, const struct mb_err *err, const char *over)
{
    struct mb_upload *u = arg;

    u->is_entering = 0;
    if (u->closing)
        return;
    if (err->code == MB_ECORRUPT || over != NULL) {
        u->is_fenced = 1;
        mb_error("upload", "job=%s: what it saves will not be durable in %s: %s", u->job_id, u->url,
                 over != NULL ? over : err->text);
    } else if (err->code != MB_OK) {
        later(u, err->text);
    } else {
        upload_has_entered(u);
        upload_kick(u);
    }
}

void upload_enter(struct mb_upload *u)
{
    struct mb_fence_writer writer = upload_fence_writer(u, 1);
    struct mb_err err;

    if (writer.has_entered || u->is_entering || u->is_fenced || u->has_ended ||
        mb_mono_ms() < u->enter_at_ms)
        return;
    if (mb_fence_look(u->store, &writer, on_answer, u, &err) == MB_OK)
        u->is_entering = 1;
    else
        later(u, err.text);
}
