/*
 * An attempt's processes: turns what happens to them into events of gang.c, and carries out its
 * actions.
 *
 * Happy path: Launch -> pull the checkpoint and fetch inputs (if asked) -> supervisor spawns every
 * rank -> Launched
 * -> endpoints -> Start -> ... -> every rank exits -> uploads finish -> Ended.
 *
 *  1. An older attempt of the same group still has processes: the launch waits for their end, which
 *     the newer Hello has asked for already.
 *  2. The pull, the spec or the supervisor fails: Failure to the driver, LAUNCH_FAILED.
 *  3. A rank fails: the supervisor ends its peers at once by itself; the machine goes to STOPPING,
 *     and each RankExit says which rank was the first.
 *  4. A stop while the checkpoint is still being pulled cancels the pull; nothing was spawned.
 *  5. The supervisor is lost: its children are killed by the kernel or by init; Failure,
 * ALL_EXITED.
 *  6. Adopted after a restart: the same callbacks tell what happened meanwhile. An attempt that was
 *     launching without a supervisor yet has failed.
 *  7. Ranks that are stopped without their driver (the node stops, its bundles are removed, the
 *     lease ran out) may end with 0, as if all were done: Failure with MB_ECANCELED tells them
 * apart.
 *  8. ENDED while no driver listens: kept for a minute, so that a driver that dials again hears it.
 */
#include "agent/gang_run.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/alloc.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/str.h"

enum { LOG_DRAIN_MS = 30000, ENDED_KEPT_MS = 60000 };

static const struct mb_supervisor_ops supervisor_ops;

static void after_event(struct mb_gang_run *r, enum mb_gang_state before, const char *event,
                        unsigned actions);

/* Who let go of the attempt will not tell any more which nodes are gone or done: their parts have a
 * bound. A driver that says End stays, and tells it with another End. */
static int nobody_waits(const struct mb_gang_run *r, enum mb_gang_event event)
{
    return event == MB_GANG_EV_LEASE_EXPIRED || event == MB_GANG_EV_BUNDLES_REMOVED ||
           event == MB_GANG_EV_SUPERSEDED || (event == MB_GANG_EV_STOP && r->stream == NULL);
}

int mb_gang_run_event(struct mb_gang_run *r, enum mb_gang_event event, struct mb_err *err)
{
    enum mb_gang_state before = r->fsm.state;
    const char *broken;
    struct mb_err local;
    unsigned actions;
    int rc;

    /* What the ranks sealed last is in the journal before it is noted that none is left: an agent
     * that is started after that does not look again. */
    if (event == MB_GANG_EV_ALL_EXITED && r->upload != NULL)
        mb_upload_last_look(r->upload);
    rc = mb_gang_step(&r->fsm, event, &actions, err != NULL ? err : &local);

    if (rc != MB_OK) {
        mb_warn("gang", "job=%s attempt=%u: %s", r->job_id, r->attempt,
                err != NULL ? err->text : local.text);
        return rc;
    }
    broken = mb_gang_invariant(&r->fsm);
    if (broken != NULL)
        mb_error("gang", "job=%s attempt=%u: broken promise after %s: %s", r->job_id, r->attempt,
                 mb_gang_event_name(event), broken);
    if ((actions & MB_GANG_ACT_STOP_RANKS) &&
        (event == MB_GANG_EV_BUNDLES_REMOVED || event == MB_GANG_EV_LEASE_EXPIRED))
        mb_gang_run_fail(r, MB_ECANCELED, r->fsm.cause);
    if (r->upload != NULL && nobody_waits(r, event))
        mb_upload_release(r->upload);
    after_event(r, before, mb_gang_event_name(event), actions);
    return MB_OK;
}

void mb_gang_run_fail(struct mb_gang_run *r, int code, const char *text)
{
    mb_warn("gang", "job=%s attempt=%u: %s", r->job_id, r->attempt, text);
    if (r->failure != NULL)
        return;
    r->failure = mb_strdup(text);
    r->failure_code = code;
    mb_control_failure(r);
}

void mb_gang_run_launch_failed(struct mb_gang_run *r, int code, const char *text)
{
    mb_gang_run_fail(r, code, text);
    mb_gang_run_event(r, MB_GANG_EV_LAUNCH_FAILED, NULL);
}

/* ---- uploads ---- */

static void on_upload_status(void *arg, const struct mb_upload_status *status)
{
    struct mb_gang_run *r = arg;

    mb_gang_deadline_upload(r, status);
    if (status->committed) {
        struct mb_report durable = {.type = MB_REPORT_DURABLE, .iteration = status->iteration};

        for (size_t i = 0; r->is_worker && i < r->n_ranks; i++)
            mb_gang_report_send(&r->ranks[i], &durable);
    }
    mb_control_upload(r, status);
}

static void on_upload_idle(void *arg)
{
    mb_gang_run_event(arg, MB_GANG_EV_UPLOADS_IDLE, NULL);
}

static void on_upload_sealed(void *arg, int64_t iteration, const uint64_t *prints, size_t n)
{
    struct mb_gang_run *r = arg;

    if (mb_upload_is_busy(r->upload))
        mb_gang_run_event(r, MB_GANG_EV_UPLOADS_BUSY, NULL);
    mb_control_sealed(r, iteration, prints, n);
}

static const struct mb_upload_ops upload_ops = {on_upload_status, on_upload_sealed, on_upload_idle};

static int open_upload(struct mb_gang_run *r, struct mb_err *err)
{
    uint32_t ranks[MB_GANG_RANKS_MAX];
    char gang[2 * MB_PG_ID_BYTES + 1];
    struct mb_upload_opts opts = {.dir = r->dir,
                                  .url = r->url,
                                  .local_dir = r->checkpoint_dir,
                                  .job_id = r->job_id,
                                  .placement_group = gang,
                                  .attempt = r->attempt,
                                  .node_rank = r->node_rank,
                                  .num_nodes = r->num_nodes,
                                  .world_size = r->world_size,
                                  .ranks = ranks,
                                  .n_ranks = r->n_ranks,
                                  .watch_tracker = r->watch_tracker,
                                  .keep_last = r->keep_last,
                                  .local_keep_last = r->watch_tracker ? r->local_keep_last : 0,
                                  .has_ended = r->fsm.state >= MB_GANG_DRAINING};
    int rc;

    if (r->url == NULL || r->url[0] == '\0' || r->upload != NULL)
        return MB_OK;
    mb_hex(r->gang.bytes, sizeof(r->gang.bytes), gang);
    for (size_t i = 0; i < r->n_ranks; i++)
        ranks[i] = r->ranks[i].rank;
    rc = mb_upload_create(r->owner->loop, &opts, &upload_ops, r, &r->upload, err);
    if (rc == MB_OK && mb_upload_is_busy(r->upload))
        mb_gang_run_event(r, MB_GANG_EV_UPLOADS_BUSY, NULL);
    return rc;
}

/* ---- launching ---- */

void mb_gang_run_spawn(struct mb_gang_run *r)
{
    struct mb_err err = {0};
    int rc = open_upload(r, &err);

    if (rc == MB_OK)
        rc = mb_gang_spec_start(r, &supervisor_ops, &err);
    if (r->launch != NULL)
        mobula__v1__launch__free_unpacked(r->launch, NULL);
    r->launch = NULL;
    if (rc != MB_OK)
        mb_gang_run_launch_failed(r, rc, err.text);
}

int mb_gang_run_fetched(struct mb_gang_run *r, const char *what, const struct mb_err *err)
{
    char text[MB_ERR_TEXT_MAX + 32];

    if (r->is_closing) {
        mb_gang_run_part_closed(r);
    } else if (r->fsm.state != MB_GANG_LAUNCHING) { /* stopped meanwhile: nothing was spawned */
        mb_gang_run_event(r, MB_GANG_EV_ALL_EXITED, NULL);
    } else if (err->code != MB_OK) {
        snprintf(text, sizeof(text), "%s: %s", what, err->text);
        mb_gang_run_launch_failed(r, err->code, text);
    } else {
        return 1;
    }
    return 0;
}

/* People should know that it is not the newest, and why. */
static void tell_fall_back(struct mb_gang_run *r, int64_t iteration)
{
    struct mb_pull_status s;
    char text[MB_ERR_TEXT_MAX + 128];

    mb_pull_status(r->pull, &s);
    if (s.n_bad == 0 || iteration < 0)
        return;
    snprintf(text, sizeof(text),
             "the newest checkpoint in the store is not whole (%s): iteration "
             "%lld is loaded instead",
             s.why, (long long)iteration);
    mb_control_note(r, text);
}

static void on_pulled(void *arg, const struct mb_err *err, int64_t iteration)
{
    struct mb_gang_run *r = arg;

    if (err->code == MB_OK && !r->is_closing)
        tell_fall_back(r, iteration);
    r->pull = NULL;
    if (!mb_gang_run_fetched(r, "loading the checkpoint", err))
        return;
    r->loaded_iteration = iteration;
    mb_info("gang", "job=%s attempt=%u: checkpoint loaded iteration=%lld", r->job_id, r->attempt,
            (long long)iteration);
    mb_gang_inputs_begin(r);
}

void mb_gang_run_begin_launch(struct mb_gang_run *r)
{
    struct mb_err err = {0};
    int rc = MB_OK;

    r->launch_waits = mb_gangs_older_with_processes(r->owner, r) != NULL;
    if (r->launch_waits)
        return;
    mb_ledger_hold(r->owner->ledger, &r->pg);
    if (r->checkpoint_dir != NULL)
        rc = mb_fs_mkdir_p(r->checkpoint_dir, 0755, &err);
    if (rc == MB_OK && r->load_url != NULL && r->load_url[0] != '\0') {
        rc = mb_pull_start(r->owner->loop, r->load_url, r->checkpoint_dir, 0, on_pulled, r,
                           &r->pull, &err);
        if (rc == MB_OK) {
            mb_pull_set_filter(r->pull, mb_gang_wants_shard, r);
            if (r->load_iteration > 0)
                mb_pull_set_iteration(r->pull, r->load_iteration);
            return;
        }
    }
    if (rc == MB_OK)
        mb_gang_inputs_begin(r);
    else
        mb_gang_run_launch_failed(r, rc, err.text);
}

int mb_gang_run_launch(struct mb_gang_run *r, Mobula__V1__Launch *launch, struct mb_err *err)
{
    int rc;

    if (r->fsm.state != MB_GANG_CREATED) {
        mobula__v1__launch__free_unpacked(launch, NULL);
        return mb_err_set(err, MB_ESTATE, "this attempt was launched already");
    }
    rc = mb_gang_spec_ranks(r, launch, err);
    if (rc != MB_OK) {
        mobula__v1__launch__free_unpacked(launch, NULL);
        return rc;
    }
    r->launch = launch;
    mb_gang_deadline_add(r, MB_DEADLINE_RUN, launch->deadline_unix_ms);
    mb_gang_deadline_add(r, MB_DEADLINE_ESTIMATED, launch->estimated_deadline_unix_ms);
    mb_gang_deadline_add(r, r->owner->deadline_source, r->owner->deadline_unix_ms);
    return mb_gang_run_event(r, MB_GANG_EV_LAUNCH, err);
}

/* ---- the supervisor tells ---- */

static void on_sup_error(void *arg, const struct mb_err *err)
{
    struct mb_gang_run *r = arg;
    char text[MB_ERR_TEXT_MAX + 32];

    snprintf(text, sizeof(text), "the supervisor of the ranks: %s", err->text);
    if (r->fsm.state == MB_GANG_LAUNCHING || r->fsm.state == MB_GANG_STOPPING) {
        mb_gang_run_launch_failed(r, err->code, text);
    } else {
        mb_gang_run_fail(r, err->code, text);
        mb_gang_run_event(r, MB_GANG_EV_ALL_EXITED, NULL);
    }
}

static void ranks_are_up(struct mb_gang_run *r)
{
    for (size_t i = 0; i < r->n_ranks; i++)
        if (r->ranks[i].pid == 0 && !r->ranks[i].exited)
            return;
    if (r->is_launched)
        return;
    r->is_launched = 1;
    mb_control_launched(r);
    if (r->fsm.state == MB_GANG_LAUNCHING)
        mb_gang_run_event(r, r->is_worker ? MB_GANG_EV_WORKERS_UP : MB_GANG_EV_COMMANDS_UP, NULL);
}

static void on_sup_started(void *arg, unsigned child, int64_t pid, uint64_t start_ticks)
{
    struct mb_gang_run *r = arg;

    (void)start_ticks;
    if (child >= r->n_ranks)
        return;
    r->ranks[child].pid = pid;
    mb_info("gang", "job=%s rank=%u: started pid=%lld", r->job_id, r->ranks[child].rank,
            (long long)pid);
    ranks_are_up(r);
}

/* A limit or a killed supervisor is the cause of whatever exits now; "child 3 failed" is none. */
static void on_sup_ending(void *arg, const char *reason)
{
    struct mb_gang_run *r = arg;

    if (strncmp(reason, "killed: ", 8) != 0 && strcmp(reason, "supervisor died") != 0)
        return;
    for (size_t i = 0; i < r->n_ranks; i++)
        if (!r->ranks[i].exited && r->ranks[i].cause == NULL)
            r->ranks[i].cause = mb_strdup(reason);
}

static void on_sup_start_failed(void *arg, unsigned child, const char *text)
{
    struct mb_gang_run *r = arg;

    if (child >= r->n_ranks)
        return;
    mb_free(r->ranks[child].cause);
    r->ranks[child].cause = mb_strdup(text);
}

static void on_sup_report(void *arg, unsigned child, int fd)
{
    struct mb_gang_run *r = arg;

    if (child < r->n_ranks) {
        mb_gang_report_open(&r->ranks[child], fd);
        mb_gang_deadline_repeat(&r->ranks[child]);
    } else {
        close(fd);
    }
}

static void on_sup_exit(void *arg, unsigned child, int code, int signal)
{
    struct mb_gang_run *r = arg;
    struct mb_gang_rank *rank;
    int failed = code != 0 || signal != 0;

    if (child >= r->n_ranks || r->ranks[child].exited)
        return;
    rank = &r->ranks[child];
    mb_gang_report_drain(rank);
    rank->exited = 1;
    rank->signal = signal;
    rank->code = signal != 0 ? 128 + signal : code;
    if (failed && rank->cause == NULL && r->first_failed_rank >= 0)
        rank->cause = mb_asprintf("ended because rank %d failed", r->first_failed_rank);
    if (failed && rank->cause == NULL && r->fsm.state == MB_GANG_STOPPING &&
        mb_gang_ended_by_stop(signal, mb_mono_ms() - r->stopped_ms, r->stop_grace_ms))
        rank->cause = mb_strdup("it was told to stop");
    if (failed && r->first_failed_rank < 0 && r->fsm.state != MB_GANG_STOPPING) {
        r->first_failed_rank = (int)rank->rank;
        r->owner->rank_failures++;
    }
    mb_log(failed ? MB_LOG_WARN : MB_LOG_INFO, "gang",
           "job=%s rank=%u: exited pid=%lld code=%d signal=%d%s%s", r->job_id, rank->rank,
           (long long)rank->pid, rank->code, signal, rank->cause != NULL ? ": " : "",
           rank->cause != NULL ? rank->cause : "");
    ranks_are_up(r);
    mb_gang_logs_pump(r, mb_mono_ms());
    if (r->upload != NULL) /* the other nodes hear of the last checkpoint before the end */
        mb_upload_look(r->upload);
    mb_control_rank_exit(r, rank);
    if (failed && mb_gang_has_processes(&r->fsm))
        mb_gang_run_event(r, MB_GANG_EV_RANK_FAILED, NULL);
}

static void on_sup_all_exited(void *arg, const char *reason)
{
    struct mb_gang_run *r = arg;

    mb_info("gang", "job=%s attempt=%u: no process is left%s%s", r->job_id, r->attempt,
            reason[0] != '\0' ? " reason=" : "", reason);
    for (size_t i = 0; i < r->n_ranks; i++)
        mb_gang_report_close(&r->ranks[i]);
    mb_gang_run_event(r, MB_GANG_EV_ALL_EXITED, NULL);
}

static const struct mb_supervisor_ops supervisor_ops = {
    .on_error = on_sup_error,
    .on_started = on_sup_started,
    .on_ending = on_sup_ending,
    .on_start_failed = on_sup_start_failed,
    .on_report = on_sup_report,
    .on_exit = on_sup_exit,
    .on_all_exited = on_sup_all_exited,
};

/* ---- carrying out the actions ---- */

static void stop_ranks(struct mb_gang_run *r)
{
    struct mb_report stop = {.type = MB_REPORT_STOP, .text = (char *)r->fsm.cause};

    r->stopped_ms = mb_mono_ms();
    for (size_t i = 0; r->is_worker && i < r->n_ranks; i++)
        mb_gang_report_send(&r->ranks[i], &stop);
    if (r->sup != NULL)
        mb_supervisor_stop(r->sup, SIGTERM, r->stop_grace_ms);
    else if (r->pull != NULL)
        mb_pull_cancel(r->pull);
    else if (r->inputs != NULL)
        mb_inputs_cancel(r->inputs);
    else
        mb_gang_run_event(r, MB_GANG_EV_ALL_EXITED, NULL);
}

static void free_node(struct mb_gang_run *r)
{
    if (r->sup != NULL)
        mb_supervisor_release(r->sup);
    if (r->launch != NULL)
        mobula__v1__launch__free_unpacked(r->launch, NULL);
    r->launch = NULL;
    for (size_t i = 0; i < r->owner->n_runs; i++) {
        const struct mb_gang_run *other = r->owner->runs[i];

        if (other != r && mb_gang_keeps_node(&other->fsm, other->launch_waits) &&
            memcmp(&other->pg, &r->pg, sizeof(r->pg)) == 0)
            return; /* another attempt of the group runs */
    }
    mb_ledger_unhold(r->owner->ledger, &r->pg);
    r->owner->ops->on_changed(r->owner->arg);
}

/* Ended is the last word: it follows the last log line, for a driver that reads, and the logs' way
 * into the store. */
static void say_ended(struct mb_gang_run *r, uint64_t now_ms)
{
    mb_gang_logs_pump(r, UINT64_MAX);
    if (!mb_gang_logs_sent(r)) /* it has a bound of its own */
        return;
    for (size_t i = 0; i < r->n_ranks && now_ms < r->ended_by_ms; i++)
        if (!mb_gang_logs_drained(&r->ranks[i]))
            return;
    mb_control_ended(r);
    mb_gang_run_close(r);
}

static void release(struct mb_gang_run *r)
{
    r->ended_by_ms = r->logs_by_ms > 0 ? r->logs_by_ms : mb_mono_ms() + LOG_DRAIN_MS;
    if (r->is_abandoned && r->stream == NULL)
        r->owner->ops->on_abandoned(r->owner->arg, &r->pg, r->has_own_job ? r->own_job : NULL);
    if (r->stream != NULL)
        say_ended(r, mb_mono_ms());
    else if (r->owner->stopping && mb_gang_logs_sent(r))
        mb_gang_run_close(r);
    else if (!r->owner->stopping)
        mb_gang_lease(&r->fsm, ENDED_KEPT_MS, mb_mono_ms());
}

static void after_event(struct mb_gang_run *r, enum mb_gang_state before, const char *event,
                        unsigned actions)
{
    if (before == r->fsm.state && actions == 0)
        return;
    mb_info("gang", "job=%s attempt=%u: %s -> %s event=\"%s\"%s%s", r->job_id, r->attempt,
            mb_gang_state_name(before), mb_gang_state_name(r->fsm.state), event,
            r->fsm.cause[0] != '\0' ? " cause=" : "", r->fsm.cause);
    mb_gang_store_save(r);
    if (actions & MB_GANG_ACT_FREE_NODE) {
        if (r->upload != NULL) /* also when the supervisor took its ranks along without a word */
            mb_upload_no_more(r->upload);
        mb_gang_logs_end(r); /* nobody writes on, whatever became of the supervisor */
        free_node(r);
    }
    if (actions & MB_GANG_ACT_LAUNCH)
        mb_gang_run_begin_launch(r);
    if (actions & MB_GANG_ACT_STOP_RANKS)
        stop_ranks(r);
    if (actions & MB_GANG_ACT_RELEASE)
        release(r);
}

/* What is said or sent yet goes on, in tick, for as long as it may. */
void mb_gang_run_stop_ended(struct mb_gang_run *r, uint64_t unix_ms)
{
    uint64_t now_ms = mb_unix_ms();

    if (unix_ms != 0)
        mb_gang_logs_hurry(r, mb_mono_ms() + (unix_ms > now_ms ? unix_ms - now_ms : 0));
    if (r->stream == NULL && mb_gang_logs_sent(r))
        mb_gang_run_close(r);
}

/* ---- time ---- */

void mb_gang_run_tick(struct mb_gang_run *r, uint64_t now_ms)
{
    if (r->is_closing)
        return;
    if (r->launch_waits && r->fsm.state == MB_GANG_LAUNCHING)
        mb_gang_run_begin_launch(r);
    for (size_t i = 0; i < r->n_ranks; i++)
        mb_gang_report_tick(&r->ranks[i]);
    if (r->fsm.state == MB_GANG_ENDED && r->stream != NULL) {
        say_ended(r, now_ms);
        return;
    }
    if (r->fsm.state == MB_GANG_ENDED && r->owner->stopping) { /* its driver went before it heard */
        if (mb_gang_logs_sent(r))
            mb_gang_run_close(r);
        return;
    }
    mb_gang_logs_pump(r, now_ms);
    mb_gang_deadline_tick(r, now_ms);
    if (r->owner->is_cut_off && mb_gang_waits_cut_off(&r->fsm, now_ms))
        return;
    if (!mb_gang_lease_is_over(&r->fsm, now_ms))
        return;
    if (r->fsm.state == MB_GANG_ENDED) {
        if (mb_gang_logs_sent(r))
            mb_gang_run_close(r);
    } else {
        r->is_abandoned = 1;
        mb_gang_run_event(r, MB_GANG_EV_LEASE_EXPIRED, NULL);
    }
}

/* ---- across a restart ---- */

void mb_gang_run_adopt(struct mb_gang_run *r)
{
    enum mb_gang_adoption adoption = mb_gang_adoption(r->fsm.state);
    struct mb_err err = {0};
    int rc;

    mb_info("gang", "job=%s attempt=%u: adopted in state %s", r->job_id, r->attempt,
            mb_gang_state_name(r->fsm.state));
    if (adoption == MB_GANG_ADOPT_NOTHING)
        return;
    rc = open_upload(r, &err);
    if (rc != MB_OK)
        mb_gang_run_fail(r, rc, err.text);
    if (adoption == MB_GANG_ADOPT_UPLOADS) {
        mb_gang_logs_adopt(r);
        mb_gang_logs_end(r);
        if (r->upload != NULL)
            mb_upload_no_more(r->upload);
        if (r->upload == NULL || !mb_upload_is_busy(r->upload))
            mb_gang_run_event(r, MB_GANG_EV_UPLOADS_IDLE, NULL);
        return;
    }
    r->is_launched = 0;
    for (size_t i = 0; i < r->n_ranks; i++) { /* its supervisor tells all of it again */
        r->ranks[i].pid = 0;
        r->ranks[i].exited = 0;
    }
    mb_ledger_hold(r->owner->ledger, &r->pg);
    mb_gang_logs_adopt(r);
    rc = mb_supervisor_adopt(r->owner->init, r->dir, &supervisor_ops, r, &r->sup, &err);
    if (rc == MB_OK) {
        if (r->fsm.state == MB_GANG_STOPPING)
            mb_supervisor_stop(r->sup, SIGTERM, r->stop_grace_ms);
        return;
    }
    r->sup = NULL;
    mb_gang_run_fail(r, MB_EUNAVAIL, "the agent was restarted while it launched the ranks");
    mb_gang_run_event(r, mb_gang_adoption_lost(r->fsm.state), NULL);
}

/* ---- closing ---- */

void mb_gang_run_part_closed(void *arg)
{
    struct mb_gang_run *r = arg;

    if (--r->close_pending == 0)
        mb_gangs_run_closed(r);
}

static void on_poll_closed(uv_handle_t *h)
{
    struct mb_gang_run *r = h->data;

    mb_free(h);
    mb_gang_run_part_closed(r);
}

void mb_gang_run_close(struct mb_gang_run *r)
{
    uv_handle_t *done;

    if (r->is_closing)
        return;
    r->is_closing = 1;
    r->close_pending = 1;
    mb_control_unbind(r); /* its stream may outlive it */
    mb_gang_logs_drop(r);
    if (r->fsm.state == MB_GANG_ENDED && r->owner->close_cb == NULL)
        mb_gang_store_save(r); /* until now the logs may have been left to do */
    for (size_t i = 0; i < r->n_ranks; i++) {
        mb_gang_report_close(&r->ranks[i]);
        mb_logfile_close(&r->ranks[i].log);
    }
    if (r->pull != NULL) { /* its callback still comes */
        r->close_pending++;
        mb_pull_cancel(r->pull);
    }
    if (r->inputs != NULL) { /* as well */
        r->close_pending++;
        mb_inputs_cancel(r->inputs);
    }
    if (r->sup != NULL) {
        r->close_pending++;
        mb_supervisor_close(r->sup, mb_gang_run_part_closed, r);
        r->sup = NULL;
    }
    if (r->upload != NULL) {
        r->owner->sent_bytes_before += mb_upload_sent_bytes(r->upload);
        r->close_pending++;
        mb_upload_close(r->upload, mb_gang_run_part_closed, r);
        r->upload = NULL;
    }
    /* Never freed from inside the call that ends it: one turn of the loop lies between. */
    done = mb_calloc(1, sizeof(uv_timer_t));
    if (done == NULL)
        return; /* out of memory: the attempt stays listed as ended, nothing else is lost */
    uv_timer_init(r->owner->loop, (uv_timer_t *)done);
    done->data = r;
    uv_close(done, on_poll_closed);
}
