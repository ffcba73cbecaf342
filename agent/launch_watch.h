/*
 * How long the launch of an attempt's processes may take: from the request to mobula-init until
 * their supervisor has said of each that it runs, or why it cannot. Pure: monotonic milliseconds
 * are given by the caller.
 */
#ifndef MOBULA_AGENT_LAUNCH_WATCH_H
#define MOBULA_AGENT_LAUNCH_WATCH_H

#include <stddef.h>
#include <stdint.h>

enum {
    MB_LAUNCH_TIMEOUT_MS = 60 * 1000,
    /* Added once: an agent that stood still itself first reads what it was told meanwhile. */
    MB_LAUNCH_LAST_LOOK_MS = 1000
};

enum mb_launch_step {
    MB_LAUNCH_ASKED,   /* mobula-init has not answered */
    MB_LAUNCH_LISTENS, /* there is a supervisor */
    MB_LAUNCH_DONE     /* of every process it is known what became of it: never lost */
};

struct mb_launch_watch {
    enum mb_launch_step step;
    uint64_t timeout_ms;
    uint64_t by_ms;
    int is_last_look;
};

/* timeout_ms 0: MB_LAUNCH_TIMEOUT_MS. */
void mb_launch_begin(struct mb_launch_watch *w, uint64_t timeout_ms, uint64_t now_ms);
/* Steps are only gone forward: a supervisor that breaks off has still been there. */
void mb_launch_reached(struct mb_launch_watch *w, enum mb_launch_step step);
/* 1: it takes too long and counts as failed. Asked again after mb_launch_wait_ms(). */
int mb_launch_is_lost(struct mb_launch_watch *w, uint64_t now_ms);
/* Until mb_launch_is_lost() has something to say; UINT64_MAX: never. */
uint64_t mb_launch_wait_ms(const struct mb_launch_watch *w, uint64_t now_ms);
/* For people: what took too long, and what they can do. pid: of mobula-init while ASKED, else of
 * the supervisor. */
void mb_launch_lost_text(const struct mb_launch_watch *w, int64_t pid, char *out, size_t cap);

#endif
