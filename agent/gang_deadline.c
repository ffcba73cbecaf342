/*
 * Deadlines of an attempt: the shell around deadline.c.
 *
 *  1. Five times a second, while there is a deadline: facts -> mb_deadline_step -> action.
 *  2. SAVE_NOW goes to the ranks of this node; a collective tells all others.
 *  3. SAVE_AND_END by the clock: the same way, and the driver hears of it: ranks that then end with
 *     0 have not trained to their end. Ranks that are no workers know a signal only, which the
 *     driver has to send to all nodes; without a driver this node begins.
 *  4. The node goes: Failure to the driver (another attempt may follow elsewhere), and the ranks
 *     are stopped with the grace that is left. An earlier deadline that comes later shortens it.
 *     The attempt is released by the driver's End, or when no driver was heard for three seconds.
 *  5. END: what still runs is stopped with a second of grace.
 *  6. A deadline that passes before all is durable: said once, loudly, with what is missing.
 * Nothing is given up by that: the journal stays for a resume, and who has time left goes on.
 *  7. From the last save on logs are not sent until it is durable, or the deadline is over. Then
 * they have the time that is left, and the job ends without the rest of them; one that is late has
 * its log.
 *  8. The agent is restarted: the deadline and what was asked are in gang.json, and the ranks are
 *     asked again, since it may have died in between; the measures begin anew.
 */
#include "agent/gang_deadline.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "agent/gang_run.h"
#include "base/clock.h"
#include "base/log.h"

enum {
    LOOK_EVERY_MS = 200,
    TOLD_BEFORE_MS = 1000,
    TEXT_MAX = 400,
    MUTE_LOOKS = 15,
    SAVE_GUESS_MS = 600000,
    PENDING_MAX = 32,
    SHORT_MS = 900000,
    LOGS_BEFORE_MS = 3000 /* then the driver ends, and its log is sent */
};

void mb_gang_deadline_init(struct mb_gang_deadline *d)
{
    *d = (struct mb_gang_deadline){.saved = -1, .durable = -1};
}

/* ---- what is measured ---- */

void mb_gang_deadline_progress(struct mb_gang_run *r, int64_t iteration)
{
    struct mb_gang_deadline *d = &r->deadline;
    uint64_t now_ms = mb_mono_ms();

    if (d->n_seen > 0) {
        int64_t before = d->seen[d->n_seen - 1].iteration;
        uint64_t ms = now_ms - d->seen[d->n_seen - 1].ms;

        if (iteration <= before)
            return;             /* another rank said it first */
        if (before != d->saved) /* else a save lay between */
            mb_measured_note(&d->step, ms / (uint64_t)(iteration - before));
    }
    if (d->n_seen == MB_GANG_DEADLINE_SEEN)
        memmove(&d->seen[0], &d->seen[1], --d->n_seen * sizeof(d->seen[0]));
    d->seen[d->n_seen].iteration = iteration;
    d->seen[d->n_seen++].ms = now_ms;
}

/* A save begins right after its iteration was reported. */
static void measure_save(struct mb_gang_deadline *d, int64_t iteration)
{
    size_t at = d->n_seen;

    while (at > 0 && d->seen[at - 1].iteration > iteration)
        at--;
    if (at > 0)
        mb_measured_note(&d->save, mb_mono_ms() - d->seen[at - 1].ms);
}

void mb_gang_deadline_saved(struct mb_gang_rank *rank, int64_t iteration, uint64_t bytes,
                            int64_t stall_ms)
{
    struct mb_gang_run *r = rank->run;
    struct mb_gang_deadline *d = &r->deadline;
    uint64_t sum = 0;

    if (iteration <= rank->saved) /* said again after a restart */
        return;
    rank->saved = iteration;
    rank->saved_bytes = bytes;
    if (rank == &r->ranks[0]) {
        d->n_saves++;
        d->stall_ms += stall_ms > 0 ? (uint64_t)stall_ms : 0;
    }
    for (size_t i = 0; i < r->n_ranks; i++) {
        if (r->ranks[i].saved < iteration)
            return;
        sum += r->ranks[i].saved_bytes;
    }
    d->saved = iteration;
    d->checkpoint_bytes = sum;
    measure_save(d, iteration);
}

static struct mb_gang_upload *upload_of(struct mb_gang_deadline *d, int64_t iteration)
{
    for (size_t i = 0; i < d->n_uploads; i++)
        if (d->uploads[i].iteration == iteration)
            return &d->uploads[i];
    if (d->n_uploads == MB_GANG_DEADLINE_UPLOADS)
        memmove(&d->uploads[0], &d->uploads[1], --d->n_uploads * sizeof(d->uploads[0]));
    d->uploads[d->n_uploads] = (struct mb_gang_upload){.iteration = iteration};
    return &d->uploads[d->n_uploads++];
}

static void forget_upload(struct mb_gang_deadline *d, int64_t iteration)
{
    for (size_t i = 0; i < d->n_uploads; i++) {
        if (d->uploads[i].iteration != iteration)
            continue;
        memmove(&d->uploads[i], &d->uploads[i + 1], (d->n_uploads - i - 1) * sizeof(d->uploads[0]));
        d->n_uploads--;
        return;
    }
}

void mb_gang_deadline_upload(struct mb_gang_run *r, const struct mb_upload_status *status)
{
    struct mb_gang_deadline *d = &r->deadline;
    int is_over = status->committed || (status->error != NULL && status->error[0] != '\0');
    struct mb_gang_upload *u;

    if (status->committed && status->iteration > d->durable)
        d->durable = status->iteration;
    if (status->error != NULL && status->error[0] != '\0')
        mb_gangs_note_lost(r, status->error);
    if (is_over && status->iteration <= d->durable - 1) {
        forget_upload(d, status->iteration);
        return;
    }
    u = upload_of(d, status->iteration);
    if (status->parts_done > u->parts_done)
        d->parts += status->parts_done - u->parts_done;
    u->parts_done = status->parts_done;
    if (status->retries > d->retries)
        d->retries = status->retries;
    if (u->sent_ms == 0 && status->total_bytes > 0 && status->done_bytes >= status->total_bytes)
        u->sent_ms = mb_mono_ms();
    if (!r->is_worker && status->total_bytes > 0) { /* workers say it themselves, earlier */
        d->checkpoint_bytes = status->total_bytes;
        if (status->iteration > d->saved)
            d->saved = status->iteration;
    }
    if (status->committed && u->sent_ms != 0)
        mb_measured_note(&d->commit, mb_mono_ms() - u->sent_ms);
    if (is_over)
        forget_upload(d, status->iteration);
}

/* ---- facts ---- */

size_t mb_gang_deadline_pending(const struct mb_gang_run *r, struct mb_upload_status *out,
                                size_t max)
{
    size_t n = r->upload != NULL ? mb_upload_pending(r->upload, out, max) : 0;

    return n < max ? n : max;
}

static uint64_t pending_bytes(const struct mb_gang_run *r)
{
    struct mb_upload_status list[PENDING_MAX];
    size_t n = mb_gang_deadline_pending(r, list, PENDING_MAX);
    uint64_t sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += list[i].total_bytes - list[i].done_bytes;
    return sum;
}

static int64_t newest_iteration(const struct mb_gang_deadline *d)
{
    return d->n_seen > 0 ? d->seen[d->n_seen - 1].iteration : -1;
}

static struct mb_deadline_facts facts_of(const struct mb_gang_run *r)
{
    const struct mb_gang_deadline *d = &r->deadline;
    int has_store = r->url != NULL && r->url[0] != '\0';

    return (struct mb_deadline_facts){.now_ms = mb_unix_ms(),
                                      .deadline = d->until,
                                      .ranks_run =
                                          r->fsm.state == MB_GANG_RUNNING ||
                                          (r->fsm.state == MB_GANG_STOPPING && d->state.asked_end),
                                      .can_save_now = r->is_worker,
                                      .measures = r->node_rank == 0,
                                      .saves = r->checkpoint_dir != NULL,
                                      .has_store = has_store,
                                      .iteration = newest_iteration(d),
                                      .saved = d->saved,
                                      .step = d->step,
                                      .save = d->save,
                                      .commit = d->commit,
                                      .checkpoint_bytes = d->checkpoint_bytes,
                                      .rate_bytes_per_s = mb_rate_bytes_per_s(&d->rate),
                                      .pending_bytes = pending_bytes(r),
                                      .log_bytes = mb_log_keeper_owes(r->owner->opts.logs),
                                      .stop_grace_ms = r->stop_grace_ms};
}

/* ---- carrying out ---- */

static void tell_ranks(struct mb_gang_run *r, enum mb_report_type type, const char *why)
{
    struct mb_report m = {.type = type, .text = (char *)(uintptr_t)why};

    for (size_t i = 0; r->is_worker && i < r->n_ranks; i++)
        mb_gang_report_send(&r->ranks[i], &m);
}

void mb_gang_deadline_repeat(struct mb_gang_rank *rank)
{
    const struct mb_gang_deadline *d = &rank->run->deadline;
    static char why[] = "asked again";
    struct mb_report stop = {.type = MB_REPORT_STOP, .text = why};

    if (rank->run->is_worker && d->state.asked_end && !d->until.leaves)
        mb_gang_report_send(rank, &stop);
}

static void end_ranks(struct mb_gang_run *r, uint64_t grace_ms)
{
    if (grace_ms < r->stop_grace_ms)
        r->stop_grace_ms = (uint32_t)grace_ms;
    if (r->fsm.state == MB_GANG_STOPPING && r->sup != NULL)
        mb_supervisor_stop(r->sup, SIGTERM, r->stop_grace_ms);
    else if (mb_gang_has_processes(&r->fsm))
        mb_gang_run_event(r, MB_GANG_EV_HALT, NULL);
}

static void carry_out(struct mb_gang_run *r, const struct mb_deadline_plan *p)
{
    struct mb_gang_deadline *d = &r->deadline;
    uint64_t now_ms = mb_unix_ms(),
             left = d->until.unix_ms > now_ms ? d->until.unix_ms - now_ms : 0;

    if (p->action == MB_DEADLINE_GO_ON)
        return;
    mb_log(p->is_local_only || p->action == MB_DEADLINE_END ? MB_LOG_WARN : MB_LOG_INFO, "deadline",
           "job=%s attempt=%u: %s: %s source=\"%s\" left_ms=%" PRIu64 " iteration=%" PRId64
           " saved=%" PRId64 " durable=%" PRId64 " save_ms=%" PRIu64 " bytes=%" PRIu64
           " rate=%" PRIu64,
           r->job_id, r->attempt, mb_deadline_action_name(p->action), p->why,
           mb_deadline_source_name(d->until.source), left, newest_iteration(d), d->saved,
           d->durable, d->save.ms, d->checkpoint_bytes, mb_rate_bytes_per_s(&d->rate));
    if (p->action == MB_DEADLINE_SAVE_NOW) {
        tell_ranks(r, MB_REPORT_SAVE_NOW, p->why);
        return;
    }
    mb_control_plan(r);
    mb_gang_store_save(r);
    if (p->action == MB_DEADLINE_END && r->checkpoint_dir != NULL)
        mb_gangs_note_lost(r, "its ranks were ended before they had saved");
    if (p->action == MB_DEADLINE_END)
        end_ranks(r, mb_deadline_grace_ms(p, now_ms, r->stop_grace_ms));
    else if (d->until.leaves)
        return; /* mb_gang_deadline_leave() stops them */
    else if (r->is_worker)
        tell_ranks(r, MB_REPORT_STOP, p->why);
    else if (r->stream == NULL)
        end_ranks(r, mb_deadline_grace_ms(p, now_ms, r->stop_grace_ms));
}

static void look(struct mb_gang_run *r)
{
    struct mb_deadline_facts f = facts_of(r);
    const char *broken;

    mb_deadline_step(&r->deadline.state, &f, &r->deadline.plan);
    broken = mb_deadline_invariant(&f, &r->deadline.plan);
    if (broken != NULL)
        mb_error("deadline", "job=%s attempt=%u: broken promise: %s", r->job_id, r->attempt,
                 broken);
    carry_out(r, &r->deadline.plan);
}

/* Before the node may be gone, so that it is in the log and the driver knows what is lost. */
static void tell_late(struct mb_gang_run *r)
{
    struct mb_gang_deadline *d = &r->deadline;
    struct mb_upload_status list[PENDING_MAX];
    size_t n = mb_gang_deadline_pending(r, list, PENDING_MAX);
    char text[TEXT_MAX];

    if (d->until.unix_ms == 0 || d->is_told_late || n == 0 ||
        mb_unix_ms() + TOLD_BEFORE_MS < d->until.unix_ms)
        return;
    d->is_told_late = 1;
    for (size_t i = 0; i < n; i++) {
        if (list[i].iteration < d->durable) /* a newer one is: nothing is lost */
            continue;
        snprintf(text, sizeof(text),
                 "iteration %" PRId64 " is not durable at the deadline (%s): %" PRIu64
                 " of %" PRIu64 " parts of node %u were sent; its files are in %s",
                 list[i].iteration, mb_deadline_source_name(d->until.source), list[i].parts_done,
                 list[i].parts_total, r->node_rank,
                 r->checkpoint_dir != NULL ? r->checkpoint_dir : "?");
        mb_error("deadline", "job=%s attempt=%u: %s", r->job_id, r->attempt, text);
        mb_gangs_note_lost(r, text);
        list[i].error = text;
        if (d->until.leaves)
            mb_control_upload(r, &list[i]);
    }
}

/* The node goes, and the driver that has to say End is not heard. */
static void release_without_driver(struct mb_gang_run *r)
{
    struct mb_gang_deadline *d = &r->deadline;

    if (!d->until.leaves || r->fsm.released || r->stream != NULL) {
        d->n_mute = 0;
        return;
    }
    if (++d->n_mute >= MUTE_LOOKS)
        mb_gang_run_event(r, MB_GANG_EV_STOP, NULL);
}

static int has_pending(const struct mb_gang_run *r)
{
    struct mb_upload_status one;

    return mb_gang_deadline_pending(r, &one, 1) > 0;
}

int mb_gang_deadline_holds_logs(const struct mb_gang_run *r)
{
    const struct mb_gang_deadline *d = &r->deadline;
    int is_running = r->fsm.state == MB_GANG_RUNNING;

    if (r->is_closing || d->until.unix_ms == 0 || mb_unix_ms() >= d->until.unix_ms ||
        r->upload == NULL)
        return 0;
    if (d->state.asked_end)
        return is_running || has_pending(r);
    /* Another node asked for the save; or it ended long before, and time is not short. */
    return !is_running && has_pending(r) && mb_unix_ms() + SHORT_MS >= d->until.unix_ms;
}

uint64_t mb_gang_deadline_of_logs(const struct mb_gang_run *r)
{
    uint64_t until_ms = r->deadline.until.unix_ms, now_ms = mb_unix_ms();

    if (until_ms == 0 || r->deadline.until.leaves || until_ms < now_ms + LOGS_BEFORE_MS)
        return 0;
    return mb_mono_ms() + until_ms - now_ms - LOGS_BEFORE_MS;
}

/* The checkpoint will be late, and the job with it: then there is time for its log, too. */
static void free_logs(struct mb_gang_run *r)
{
    struct mb_gang_deadline *d = &r->deadline;

    if (d->until.unix_ms == 0 || d->until.leaves || r->logs_by_ms == 0 ||
        mb_unix_ms() + TOLD_BEFORE_MS < d->until.unix_ms || !has_pending(r))
        return;
    mb_gang_logs_stay(r);
}

void mb_gang_deadline_tick(struct mb_gang_run *r, uint64_t now_ms)
{
    struct mb_gang_deadline *d = &r->deadline;

    if (now_ms < d->next_ms)
        return;
    d->next_ms = now_ms + LOOK_EVERY_MS;
    if (r->upload != NULL)
        mb_rate_note(&d->rate, now_ms, mb_upload_sent_bytes(r->upload), pending_bytes(r) > 0);
    if (r->upload != NULL)
        mb_upload_deadline(r->upload, (int64_t)d->until.unix_ms, mb_rate_bytes_per_s(&d->rate));
    if (r->fsm.state == MB_GANG_ENDED)
        return;
    release_without_driver(r);
    free_logs(r);
    if (d->until.unix_ms == 0 || r->fsm.state == MB_GANG_ENDED)
        return;
    look(r);
    tell_late(r);
}

void mb_gang_deadline_add(struct mb_gang_run *r, enum mb_deadline_source source, uint64_t unix_ms)
{
    struct mb_gang_deadline *d = &r->deadline;

    if (!mb_deadline_add(&d->until, source, unix_ms) || r->fsm.state == MB_GANG_ENDED)
        return;
    d->is_told_late = 0;
    mb_info("deadline", "job=%s attempt=%u: deadline source=\"%s\" in_ms=%" PRId64 "%s", r->job_id,
            r->attempt, mb_deadline_source_name(d->until.source),
            d->until.unix_ms == 0 ? (int64_t)-1 : (int64_t)(d->until.unix_ms - mb_unix_ms()),
            d->until.leaves ? ", the node goes" : "");
    if (d->until.unix_ms == 0 && !d->until.leaves) /* the RayJob's own is no more */
        d->plan = (struct mb_deadline_plan){0};
    else
        look(r);
    mb_control_plan(r);
    mb_gang_store_save(r);
}

/* What a last save may take. One that never was measured has all the time that there is: it is the
 * only one the attempt may ever have. */
static uint64_t save_may_take_ms(const struct mb_gang_run *r)
{
    const struct mb_gang_deadline *d = &r->deadline;

    if (!r->is_worker || r->checkpoint_dir == NULL)
        return 0;
    if (d->save.is_known)
        return 2 * (d->step.ms + d->save.ms);
    return d->plan.kill_at_ms != 0 ? UINT32_MAX : SAVE_GUESS_MS;
}

/* A save that the deadline leaves time for is not cut off by a shorter --stop-grace. */
static uint64_t grace_of(const struct mb_gang_run *r)
{
    uint64_t ms = r->stop_grace_ms, save_ms = save_may_take_ms(r);

    return mb_deadline_grace_ms(&r->deadline.plan, mb_unix_ms(), ms < save_ms ? save_ms : ms);
}

void mb_gang_deadline_peer_leaves(struct mb_gang_run *r, uint64_t grace_ms)
{
    uint64_t ms = save_may_take_ms(r);

    if (ms > grace_ms)
        ms = grace_ms;
    if (ms > r->stop_grace_ms)
        r->stop_grace_ms = (uint32_t)(ms < UINT32_MAX ? ms : UINT32_MAX);
}

void mb_gang_deadline_leave(struct mb_gang_run *r, enum mb_deadline_source source, uint64_t unix_ms,
                            const char *why)
{
    int had_processes = mb_gang_has_processes(&r->fsm), was_leaving = r->deadline.until.leaves;

    mb_gang_deadline_add(r, source, unix_ms);
    r->stop_grace_ms = (uint32_t)grace_of(r);
    if (r->fsm.state == MB_GANG_STOPPING && r->sup != NULL)
        mb_supervisor_stop(r->sup, SIGTERM, r->stop_grace_ms);
    if (r->fsm.state == MB_GANG_ENDED)
        return;
    if (was_leaving && r->stream != NULL) /* the driver knows, and says End after the last seal */
        return;
    if (had_processes && !r->fsm.released)
        mb_gang_run_fail(r, MB_ECANCELED, why);
    /* Without a stream, as right after a restart: the driver has three seconds to come back. */
    if (!r->fsm.released)
        mb_gang_run_event(r, had_processes || was_leaving ? MB_GANG_EV_HALT : MB_GANG_EV_STOP,
                          NULL);
}
