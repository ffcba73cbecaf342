/*
 *  1. Nothing to repeat, or no restart left: no.
 *  2. A permanent failure, memory that ran out twice, a crash that came again at the same place
 *     (on the same rank once, on any a second time): no, whatever is left of max_restarts.
 *  3. Otherwise yes, after a pause that has up to a quarter of jitter added, so that gangs that
 *     failed together do not come back together.
 */
#include "cli/driver/restart.h"

#include <signal.h>
#include <stdio.h>
#include "base/err.h"

static const char *const class_names[MB_EXIT_N_CLASSES] = {
    "lost", "transient", "crash", "out of memory", "permanent",
};

const char *mb_restart_class_name(enum mb_exit_class c)
{
    return (unsigned)c < MB_EXIT_N_CLASSES ? class_names[c] : "?";
}

static int is_permanent_status(int status)
{
    return status == mb_exit_status(MB_EINVAL) || status == mb_exit_status(MB_ECORRUPT) ||
           status == mb_exit_status(MB_ENOENT) || status == mb_exit_status(MB_EEXIST) ||
           status == mb_exit_status(MB_EDENIED) || status == mb_exit_status(MB_EUNSUPPORTED) ||
           status == 126 || status == 127; /* the shell's: cannot be executed, not found */
}

static enum mb_exit_class class_of_status(int status)
{
    if (is_permanent_status(status))
        return MB_EXIT_PERMANENT;
    if (status == mb_exit_status(MB_EUNAVAIL) || status == mb_exit_status(MB_EIO) ||
        status == mb_exit_status(MB_ETIMEOUT) || status == mb_exit_status(MB_EPROTO))
        return MB_EXIT_TRANSIENT;
    return MB_EXIT_CRASH;
}

enum mb_exit_class mb_restart_class(const struct mb_failure *f)
{
    /* A shell between us and the program says a signal as 128 + its number. */
    int sig = f->signal != 0 ? f->signal : f->exit_code > 128 ? f->exit_code - 128 : 0;

    if (f->is_out_of_memory)
        return MB_EXIT_MEMORY;
    switch (f->kind) {
    case MB_FAILURE_NODE:
        return MB_EXIT_LOST;
    case MB_FAILURE_REQUEST:
        if (f->code == MB_ENOMEM)
            return MB_EXIT_MEMORY;
        return is_permanent_status(mb_exit_status(f->code)) ? MB_EXIT_PERMANENT : MB_EXIT_TRANSIENT;
    case MB_FAILURE_RANK:
        if (f->is_usage)
            return MB_EXIT_PERMANENT;
        if (sig == SIGKILL || sig == SIGTERM || sig == SIGINT)
            return MB_EXIT_LOST;
        return sig != 0 ? MB_EXIT_CRASH : class_of_status(f->exit_code);
    case MB_FAILURE_NONE:
    default:
        return MB_EXIT_PERMANENT;
    }
}

/* Which rank is first to say it is chance where all of them fail. */
static int is_same_crash(const struct mb_failure *a, const struct mb_failure *b)
{
    if (a->kind != b->kind || a->exit_code != b->exit_code || a->signal != b->signal ||
        a->code != b->code || a->iteration != b->iteration)
        return 0;
    /* Ranks that report no iteration: the same checkpoint, and soon after the launch. */
    return a->iteration >= 0 || (a->saved == b->saved && a->ran_ms < MB_RESTART_SOON_MS &&
                                 b->ran_ms < MB_RESTART_SOON_MS);
}

static uint64_t pause_ms(const struct mb_restart *r, uint64_t random)
{
    uint64_t ms = r->delay_ms;

    for (uint32_t i = 0; i < r->in_vain && ms < MB_RESTART_DELAY_MAX_MS; i++)
        ms *= 2;
    if (ms > MB_RESTART_DELAY_MAX_MS)
        ms = MB_RESTART_DELAY_MAX_MS;
    return ms + random % (ms / 4 + 1);
}

void mb_restart_decide(struct mb_restart *r, const struct mb_failure *f, uint64_t random,
                       struct mb_restart_decision *out)
{
    enum mb_exit_class class = mb_restart_class(f);
    struct mb_failure last = r->last;
    int has_last = r->has_last, is_same;

    *out = (struct mb_restart_decision){0};
    if (f->kind == MB_FAILURE_NONE || r->max_restarts == 0)
        return;
    r->last = *f;
    r->has_last = 1;
    is_same = class == MB_EXIT_CRASH && has_last && is_same_crash(&last, f);
    r->n_same = is_same ? r->n_same + 1 : 1;
    if (has_last)
        r->in_vain = f->iteration > last.iteration || f->saved > last.saved ? 0 : r->in_vain + 1;
    if (class == MB_EXIT_PERMANENT)
        snprintf(out->why_not, sizeof(out->why_not), "this failure would only come again");
    else if (class == MB_EXIT_MEMORY && has_last && mb_restart_class(&last) == MB_EXIT_MEMORY)
        snprintf(out->why_not, sizeof(out->why_not), "memory ran out twice at the same size");
    else if (is_same && last.rank == f->rank)
        snprintf(out->why_not, sizeof(out->why_not),
                 "rank %u failed twice in the same way at the same place", f->rank);
    else if (r->n_same >= MB_RESTART_SAME_MAX)
        snprintf(out->why_not, sizeof(out->why_not),
                 "%u attempts failed in the same way at the same place, on different ranks",
                 r->n_same);
    else if (r->restarts >= r->max_restarts)
        snprintf(out->why_not, sizeof(out->why_not), "--max-restarts %u is used up",
                 r->max_restarts);
    else
        out->again = 1;
    if (!out->again)
        return;
    r->restarts++;
    out->delay_ms = pause_ms(r, random);
    /* Agents give back what no driver speaks for, and a long pause is for others to use. */
    out->keep_group = f->kind == MB_FAILURE_RANK && out->delay_ms <= MB_RESTART_KEEP_MS;
}
