/*
 *  1. begin: one deadline for the whole launch, since a supervisor tells of its processes only when
 *     it has started all of them.
 *  2. Every process is known: the watch is over, whatever hangs later has rules of its own.
 *  3. The deadline is over: one last look, then the launch is lost.
 */
#include "agent/launch_watch.h"

#include <stdio.h>

void mb_launch_begin(struct mb_launch_watch *w, uint64_t timeout_ms, uint64_t now_ms)
{
    if (timeout_ms == 0)
        timeout_ms = MB_LAUNCH_TIMEOUT_MS;
    *w = (struct mb_launch_watch){.timeout_ms = timeout_ms, .by_ms = now_ms + timeout_ms};
}

void mb_launch_reached(struct mb_launch_watch *w, enum mb_launch_step step)
{
    if (step > w->step)
        w->step = step;
}

int mb_launch_is_lost(struct mb_launch_watch *w, uint64_t now_ms)
{
    if (w->step == MB_LAUNCH_DONE || now_ms < w->by_ms)
        return 0;
    if (w->is_last_look)
        return 1;
    w->is_last_look = 1;
    w->by_ms = now_ms + MB_LAUNCH_LAST_LOOK_MS;
    return 0;
}

uint64_t mb_launch_wait_ms(const struct mb_launch_watch *w, uint64_t now_ms)
{
    if (w->step == MB_LAUNCH_DONE)
        return UINT64_MAX;
    return now_ms < w->by_ms ? w->by_ms - now_ms : 0;
}

void mb_launch_lost_text(const struct mb_launch_watch *w, int64_t pid, char *out, size_t cap)
{
    double seconds = (double)w->timeout_ms / 1000;
    long long n = (long long)pid;

    if (w->step == MB_LAUNCH_ASKED)
        snprintf(out, cap,
                 "mobula-init (pid %lld) did not answer the launch within %g s (--launch-timeout): "
                 "while it hangs this node can start nothing; `kill -CONT %lld` if it is stopped, "
                 "else `mobula stop` and `mobula start` there",
                 n, seconds, n);
    else
        snprintf(out, cap,
                 "supervisor %lld did not start every process within %g s (--launch-timeout) and "
                 "was killed: look whether the node can reach the program, its working directory "
                 "and that of the logs, or give `mobula start` a longer --launch-timeout",
                 n, seconds);
}
