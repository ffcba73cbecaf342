/*
 * Deadlines as the driver hears of them: every agent plans for its own node, the first that has to
 * act speaks for all.
 *
 *  1. A plan: the earliest deadline goes into the record. "Save and end", "end": an event of the
 *     state machine, and a line for people.
 *  2. The node goes: the plan is only shown; its Failure says the rest.
 *  3. The gang still waits for its nodes, or for what its ranks load, when its own deadline is
 *     over: it would have nothing to save. That ends it.
 *  4. All ranks have ended, and uploads take longer than --drain-timeout: they are given up.
 *  5. It ends for its deadline: its own log is sent until then, too.
 */
#include "cli/driver/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "base/clock.h"
#include "base/fs.h"

enum {
    KILL_MS = 1500, /* as the agent of a node that goes; the next, too */
    LEAVE_GUESS_MS = 600000,
    RESERVE_MIN_MS = 2000,
    RESERVE_MAX_MS = 10000,
    LEFT_MIN_MS = 1000,
    LOG_MARGIN_MS = 500, /* the job's state is written down, too */
    URL_FILE_MAX_BYTES = 4096
};

static void note(struct drv_node *n, const Mobula__V1__Plan *p)
{
    struct driver *d = n->driver;
    int is_its = d->deadline.unix_ms != 0 && d->deadline.node == n->index;

    if (!is_its && (p->deadline_unix_ms == 0 ||
                    (d->deadline.unix_ms != 0 && d->deadline.unix_ms < p->deadline_unix_ms)))
        return;
    d->deadline.node = n->index;
    d->deadline.unix_ms = p->deadline_unix_ms;
    d->deadline.save_at_unix_ms = p->save_at_unix_ms;
    d->deadline.is_local_only = p->is_local_only;
    snprintf(d->deadline.source, sizeof(d->deadline.source), "%s", p->source);
    d->record_dirty = 1;
}

static void say(struct driver *d, const Mobula__V1__Plan *p)
{
    uint64_t now = mb_unix_ms();
    uint64_t left = p->deadline_unix_ms > now ? p->deadline_unix_ms - now : 0;

    if (d->deadline_said)
        return;
    d->deadline_said = 1;
    fprintf(stderr, "mobula: deadline (%s) in %.1f s: the ranks save and end%s\n", p->source,
            (double)left / 1000,
            p->is_local_only ? "; the upload of that save will not be done by then" : "");
}

void drv_on_plan(struct drv_node *n, const Mobula__V1__Plan *p)
{
    struct driver *d = n->driver;
    struct mb_drv_event e = {.kind = MB_DRV_DEADLINE, .node = n->index, .text = p->why};
    char text[300];

    note(n, p);
    if (p->leaves || (!p->save_and_end && !p->end))
        return;
    if (p->end && n->local_dir) {
        snprintf(
            text, sizeof(text),
            "node %u: the ranks were ended at the deadline (%s): %s; what came after iteration "
            "%lld is lost",
            n->index, p->source, p->why, (long long)p->saved_iteration);
        e.code = MB_EIO;
        e.text = text;
    } else if (p->save_and_end) {
        say(d, p);
    }
    drv_event(d, &e);
}

/* The last save is one of all ranks: those of the other nodes may not end before it. */
uint64_t drv_leaving_grace_ms(const struct driver *d)
{
    struct mb_failure f = mb_drv_failure(d->state);
    uint64_t until_ms = d->deadline.unix_ms, now_ms = mb_unix_ms(), ms = LEAVE_GUESS_MS;

    if (f.kind != MB_FAILURE_NODE || f.code != MB_ECANCELED)
        return 0;
    if (until_ms != 0)
        ms = until_ms > now_ms + KILL_MS ? until_ms - now_ms - KILL_MS : 0;
    return ms > d->opts->stop_grace_ms ? ms : 0;
}

/* The agent that runs us as a job's driver waits for our log as long as this, and no longer. */
static void bound_log(uint64_t by_unix_ms)
{
    const char *path = getenv("MOBULA_LOG_URL_FILE");
    struct mb_buf text = {0};
    struct mb_err err = {0};

    if (!path || !mb_fs_exists(path))
        return;
    if (mb_fs_read(path, URL_FILE_MAX_BYTES, &text, &err) == 0) {
        text.len = strcspn(mb_buf_str(&text), "\n");
        if (mb_buf_printf(&text, "\n%llu", (unsigned long long)by_unix_ms) != 0)
            mb_err_set(&err, MB_ENOMEM, "out of memory");
        else
            mb_fs_write_atomic(path, text.data, text.len, 0600, &err);
    }
    if (err.code)
        fprintf(stderr, "mobula: this log may be waited for longer than --drain-timeout: %s\n",
                err.text);
    mb_buf_close(&text);
}

/* --drain-timeout is for all that follows the last rank: a part of it is for what is left when
 * uploads are given up, half of that for the agents and half for our own log. */
static uint64_t reserve_ms(uint64_t timeout_ms)
{
    uint64_t ms = timeout_ms / 4;

    if (ms < RESERVE_MIN_MS)
        ms = RESERVE_MIN_MS < timeout_ms / 2 ? RESERVE_MIN_MS : timeout_ms / 2;
    return ms < RESERVE_MAX_MS ? ms : RESERVE_MAX_MS;
}

/* What is on its way is dropped by the agents, which keep the files; release() says what is lost.
 */
static void drain_tick(struct driver *d)
{
    uint64_t now_ms = mb_mono_ms(), left_ms, by_ms;

    if (mb_drv_phase(d->state) != MB_DRV_END) {
        d->drain_from_ms = 0;
        d->drain_is_over = 0;
        return;
    }
    if (d->drain_from_ms == 0)
        d->drain_from_ms = now_ms;
    by_ms = d->drain_from_ms + d->opts->drain_timeout_ms;
    if (d->opts->drain_timeout_ms == 0 || d->drain_is_over ||
        now_ms + reserve_ms(d->opts->drain_timeout_ms) < by_ms)
        return;
    d->drain_is_over = 1;
    left_ms = by_ms > now_ms + LEFT_MIN_MS ? by_ms - now_ms : LEFT_MIN_MS;
    d->drain_within_ms = left_ms / 2;
    bound_log(mb_unix_ms() + left_ms);
    fprintf(stderr,
            "mobula: uploads did not end within --drain-timeout (%.0f s) after the last rank: what "
            "is not in the store is given up, its files stay on the nodes\n",
            (double)d->opts->drain_timeout_ms / 1000);
    for (uint32_t i = 0; i < d->n_nodes; i++)
        if (d->nodes[i].driver && !mb_drv_node_ended(d->state, i))
            drv_node_end(&d->nodes[i], 1);
}

/* Over in time, and with what of its log there is time for. One that is late has all the time. */
void drv_deadline_bound_log(const struct driver *d)
{
    if (d->deadline.unix_ms > mb_unix_ms())
        bound_log(d->deadline.unix_ms - LOG_MARGIN_MS);
}

void drv_deadline_tick(struct driver *d)
{
    enum mb_drv_phase phase = mb_drv_phase(d->state);
    struct mb_err err = {0};

    drain_tick(d);
    if (d->opts->deadline_unix_ms == 0 || phase == MB_DRV_CONNECT || phase >= MB_DRV_RUN ||
        mb_unix_ms() < d->opts->deadline_unix_ms)
        return;
    mb_err_set(&err, MB_ETIMEOUT, "the deadline is over before the gang %s",
               phase < MB_DRV_DIAL ? "had its nodes" : "had begun its work");
    drv_failed(d, &err);
}
