/*
 * The plan for the last checkpoint.
 *
 * Happy path, a deadline by the clock: GO_ON until save_at -> SAVE_AND_END -> the ranks end by
 * themselves, the upload ends before the deadline.
 *
 *  1. Save or upload were never measured: one SAVE_NOW after a third of the time (ten minutes at
 *     most), whose times are then used. Ranks that cannot be asked, or no answer: a quarter of the
 *     time is kept for the upload.
 *  2. The upload fits no more (the link got slower, the deadline came late): work goes on until
 *     local_at, then SAVE_AND_END with is_local_only.
 *  3. Not even the save fits: END, so that what is saved already has the link for itself.
 *  4. The node goes (leaves): 2 and 3 at once, without the waiting.
 *  5. The ranks were asked to save and end, and are not done: nothing more is asked of them until
 *     kill_at, however late it gets for the upload; a save in the making is worth more than the
 *     second it blocks.
 *  6. An earlier deadline comes while they end: kill_at moves, the rest stays.
 *  7. Estimates err on the early side (SAFE_PERCENT), the decision whether something still fits
 *     does not: a save that might just fit is tried.
 */
#include "agent/deadline.h"

enum {
    MARGIN_MS = 2000, /* for the ends of processes, and clocks that differ */
    KILL_MS = 1500,   /* ranks that still run are killed so long before the deadline */
    SAFE_PERCENT = 25,
    SAVE_SLACK_MS = 500,
    COMMIT_GUESS_MS = 2000, /* part file, manifest, pointer */
    STEP_GUESS_MS = 1000,
    PROBE_MAX_MS = 600000,
    GRACE_MIN_MS = 1000,
    LOOK_MS = 500 /* nobody looks less often while something is sent */
};

static const char *const source_names[MB_DEADLINE_N_SOURCES] = {
    "none", "--deadline", "estimated", "drain", "notice", "SIGTERM", "RayJob",
};
static const char *const action_names[MB_DEADLINE_N_ACTIONS] = {
    "go on",
    "save now",
    "save and end",
    "end",
};

const char *mb_deadline_source_name(enum mb_deadline_source s)
{
    return (unsigned)s < MB_DEADLINE_N_SOURCES ? source_names[s] : "?";
}

const char *mb_deadline_action_name(enum mb_deadline_action a)
{
    return (unsigned)a < MB_DEADLINE_N_ACTIONS ? action_names[a] : "?";
}

uint64_t mb_deadline_of_job(uint64_t started_unix_ms, uint64_t active_ms, uint64_t early_ms)
{
    return started_unix_ms + active_ms - (early_ms < active_ms / 2 ? early_ms : active_ms / 2);
}

static void find_earliest(struct mb_deadline *d)
{
    uint64_t least = MB_DEADLINE_NEVER;

    for (unsigned s = 0; s < MB_DEADLINE_N_SOURCES; s++) {
        if (d->said_ms[s] == 0 || d->said_ms[s] >= least ||
            (s == MB_DEADLINE_ESTIMATED && d->said_ms[MB_DEADLINE_RAYJOB] != 0))
            continue;
        least = d->said_ms[s];
        d->source = (enum mb_deadline_source)s;
    }
    d->unix_ms = least == MB_DEADLINE_NEVER ? 0 : least;
    if (d->unix_ms == 0 && !d->leaves)
        d->source = MB_DEADLINE_NONE;
}

int mb_deadline_add(struct mb_deadline *d, enum mb_deadline_source source, uint64_t unix_ms)
{
    int leaves = source >= MB_DEADLINE_DRAIN && source != MB_DEADLINE_RAYJOB;
    int changed = leaves > d->leaves;
    uint64_t *said = &d->said_ms[source], before_ms = d->unix_ms;

    d->leaves |= leaves;
    if (unix_ms != 0 && (*said == 0 || unix_ms < *said || source == MB_DEADLINE_RAYJOB))
        *said = unix_ms;
    find_earliest(d);
    if (changed && d->unix_ms == 0)
        d->source = source;
    return changed || d->unix_ms != before_ms;
}

/* ---- measures ---- */

static void close_window(struct mb_rate *r)
{
    for (size_t i = MB_RATE_WINDOWS - 1; i > 0; i--)
        r->closed[i] = r->closed[i - 1];
    r->closed[0].ms = r->open_ms;
    r->closed[0].bytes = r->open_bytes;
    if (r->n_closed < MB_RATE_WINDOWS)
        r->n_closed++;
    r->open_ms = r->open_bytes = 0;
}

void mb_rate_note(struct mb_rate *r, uint64_t now_ms, uint64_t total_bytes, int is_busy)
{
    if (r->has_last && now_ms >= r->last_ms && total_bytes >= r->last_total) {
        uint64_t bytes = total_bytes - r->last_total, ms = now_ms - r->last_ms;

        if (r->was_busy)
            r->open_ms += ms;
        else if (is_busy || bytes > 0) /* it began somewhere between the two looks */
            r->open_ms += ms < LOOK_MS ? ms : LOOK_MS;
        r->open_bytes += bytes;
        /* Only with bytes: else a part that is half sent would count for the next window. */
        if (bytes > 0 && r->open_ms >= MB_RATE_WINDOW_MS)
            close_window(r);
    }
    r->has_last = 1;
    r->last_ms = now_ms;
    r->last_total = total_bytes;
    r->was_busy = is_busy;
}

/* Of the n newest windows and, if that makes it less, of the open one. */
static uint64_t rate_of(const struct mb_rate *r, size_t n)
{
    uint64_t ms = 0, bytes = 0, without, with;

    for (size_t i = 0; i < n && i < r->n_closed; i++) {
        ms += r->closed[i].ms;
        bytes += r->closed[i].bytes;
    }
    if (ms == 0)
        return 0;
    without = bytes * 1000 / ms;
    with = (bytes + r->open_bytes) * 1000 / (ms + r->open_ms);
    return with < without ? with : without;
}

uint64_t mb_rate_bytes_per_s(const struct mb_rate *r)
{
    uint64_t newest = rate_of(r, 2), all = rate_of(r, MB_RATE_WINDOWS);

    return newest < all ? newest : all;
}

void mb_measured_note(struct mb_measured *m, uint64_t ms)
{
    if (!m->is_known || ms >= m->ms)
        m->ms = ms;
    else
        m->ms -= (m->ms - ms) / 4;
    m->is_known = 1;
}

/* ---- how long things take ---- */

struct needs {
    uint64_t save, safe_save; /* from the request to the disk */
    uint64_t upload;          /* from the disk to the pointer; 0 without a store */
    uint64_t safe_upload;     /* the same and the logs */
    int is_unknown;           /* a measure is missing */
};

static uint64_t safe(uint64_t ms)
{
    return ms + ms * SAFE_PERCENT / 100;
}

static void need_save(const struct mb_deadline_facts *f, struct needs *n)
{
    uint64_t step = f->step.is_known ? f->step.ms : STEP_GUESS_MS;

    if (!f->saves) {
        n->safe_save = 2 * GRACE_MIN_MS; /* to end by themselves */
        return;
    }
    if (!f->can_save_now) { /* nobody knows what it does with the signal */
        n->save = n->safe_save = f->stop_grace_ms;
        return;
    }
    /* A request that just misses the one step's agreement takes effect at the end of the next. */
    n->save = step + f->save.ms;
    n->safe_save = safe(2 * step + f->save.ms) + SAVE_SLACK_MS;
    n->is_unknown |= !f->save.is_known;
}

static void need_upload(const struct mb_deadline_facts *f, const struct mb_deadline_state *s,
                        struct needs *n)
{
    uint64_t commit = f->commit.is_known ? f->commit.ms : COMMIT_GUESS_MS;
    uint64_t kept, logs;

    if (!f->has_store || !f->saves)
        return;
    if (f->checkpoint_bytes > 0 && f->rate_bytes_per_s > 0) {
        n->upload = f->checkpoint_bytes * 1000 / f->rate_bytes_per_s + commit;
        logs = f->log_bytes * 1000 / f->rate_bytes_per_s;
        n->safe_upload = safe(n->upload + (logs < n->upload ? logs : n->upload));
        return;
    }
    n->is_unknown = 1;
    kept = f->deadline.unix_ms > s->seen_ms ? (f->deadline.unix_ms - s->seen_ms) / 4 : 0;
    n->safe_upload = kept < PROBE_MAX_MS ? kept : PROBE_MAX_MS;
}

static uint64_t before(uint64_t ms, uint64_t by)
{
    return ms > by ? ms - by : 1; /* 0 is none */
}

/* ---- decisions ---- */

static int fits(const struct mb_deadline_facts *f, uint64_t needs_ms)
{
    return f->deadline.unix_ms == 0 || f->now_ms + needs_ms + KILL_MS <= f->deadline.unix_ms;
}

static void act(struct mb_deadline_plan *p, enum mb_deadline_action action, const char *why)
{
    p->action = action;
    p->why = why;
}

static void save_and_end(const struct mb_deadline_facts *f, struct mb_deadline_state *s,
                         const struct needs *n, struct mb_deadline_plan *p, const char *why)
{
    s->asked_end = 1;
    p->is_local_only =
        f->has_store && f->saves && !fits(f, f->can_save_now ? n->save + n->upload : n->upload);
    p->done_at_ms = f->now_ms + n->save + n->upload;
    act(p, MB_DEADLINE_SAVE_AND_END,
        p->is_local_only ? "its upload does not fit any more: it stays on the node's disk" : why);
}

static void end(struct mb_deadline_state *s, struct mb_deadline_plan *p, const char *why)
{
    s->ended = 1;
    act(p, MB_DEADLINE_END, why);
}

/* Ranks that only know a stop are always given one: what they make of it is theirs. */
static int save_fits(const struct mb_deadline_facts *f, const struct needs *n)
{
    return fits(f, f->can_save_now && f->saves ? n->save : GRACE_MIN_MS);
}

static void measure(const struct mb_deadline_facts *f, struct mb_deadline_state *s,
                    const struct needs *n, struct mb_deadline_plan *p)
{
    uint64_t third = (f->deadline.unix_ms - s->seen_ms) / 3;

    if (!n->is_unknown || s->asked_save || !f->measures || !f->can_save_now || !f->saves ||
        f->iteration < 1 || f->pending_bytes > 0)
        return;
    if (f->now_ms < s->seen_ms + (third < PROBE_MAX_MS ? third : PROBE_MAX_MS))
        return;
    s->asked_save = 1;
    act(p, MB_DEADLINE_SAVE_NOW, "to measure how long a save and its upload take");
}

static void at_the_clock(const struct mb_deadline_facts *f, struct mb_deadline_state *s,
                         const struct needs *n, struct mb_deadline_plan *p)
{
    if (f->now_ms < p->save_at_ms) {
        measure(f, s, n, p);
        return;
    }
    if (fits(f, f->can_save_now ? n->save + n->upload : n->upload) || f->now_ms >= p->local_at_ms)
        save_and_end(f, s, n, p, "the latest moment for a last checkpoint");
}

static void look(const struct mb_deadline_facts *f, struct mb_deadline_state *s,
                 const struct needs *n, struct mb_deadline_plan *p)
{
    if (s->asked_end) {
        if (p->kill_at_ms != 0 && f->now_ms >= p->kill_at_ms)
            end(s, p, "the ranks were not done in time");
    } else if (!save_fits(f, n)) {
        end(s, p, "there is no time left for a save");
    } else if (f->deadline.leaves) {
        save_and_end(f, s, n, p, "the node goes");
    } else {
        at_the_clock(f, s, n, p);
    }
}

void mb_deadline_step(struct mb_deadline_state *s, const struct mb_deadline_facts *f,
                      struct mb_deadline_plan *p)
{
    uint64_t deadline = f->deadline.unix_ms;
    struct needs n = {0};

    *p = (struct mb_deadline_plan){.why = ""};
    if (deadline == 0 && !f->deadline.leaves)
        return;
    if (s->seen_ms == 0)
        s->seen_ms = f->now_ms;
    need_save(f, &n);
    need_upload(f, s, &n);
    if (deadline != 0) {
        p->local_at_ms = before(deadline, n.safe_save + MARGIN_MS);
        p->save_at_ms = before(deadline, n.safe_save + n.safe_upload + MARGIN_MS);
        p->kill_at_ms = before(deadline, KILL_MS);
    }
    if (f->ranks_run && !s->ended)
        look(f, s, &n, p);
}

uint64_t mb_deadline_grace_ms(const struct mb_deadline_plan *p, uint64_t now_ms,
                              uint64_t stop_grace_ms)
{
    uint64_t left;

    if (p->action == MB_DEADLINE_END)
        return GRACE_MIN_MS;
    if (p->kill_at_ms == 0)
        return stop_grace_ms;
    left = p->kill_at_ms > now_ms ? p->kill_at_ms - now_ms : 0;
    if (left < GRACE_MIN_MS)
        left = GRACE_MIN_MS;
    return left < stop_grace_ms ? left : stop_grace_ms;
}

const char *mb_deadline_invariant(const struct mb_deadline_facts *f,
                                  const struct mb_deadline_plan *p)
{
    if (p->save_at_ms > p->local_at_ms)
        return "a save for the store begins after one for the disk";
    if (f->deadline.unix_ms != 0 && p->local_at_ms >= f->deadline.unix_ms)
        return "a save begins after the deadline";
    if (p->action == MB_DEADLINE_SAVE_AND_END && f->can_save_now && !p->is_local_only &&
        f->has_store && f->deadline.unix_ms != 0 && p->done_at_ms > f->deadline.unix_ms)
        return "an upload is promised that ends after the deadline";
    if (p->action != MB_DEADLINE_GO_ON && !f->ranks_run)
        return "something is asked of ranks that are gone";
    return NULL;
}
