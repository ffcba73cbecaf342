/*
 * Is a node alive? Pure: time comes in, the next thing to do comes out.
 * Rule (Ray's, with shorter times so that a hung node is found in 10 s instead of 63 s): what the
 * node sends by itself counts as alive; after 2 s of silence it is asked every 2 s, each question
 * has 1.5 s; four failures in a row mean DEAD.
 */
#ifndef MOBULA_GCS_HEALTH_H
#define MOBULA_GCS_HEALTH_H

#include <stdint.h>

enum {
    MB_HEALTH_GRACE_MS = 5000, /* after registration */
    MB_HEALTH_PERIOD_MS = 2000,
    MB_HEALTH_TIMEOUT_MS = 1500, /* deadline for one question: before the next is due */
    MB_HEALTH_FAILURES = 4
};

enum mb_health_action {
    MB_HEALTH_WAIT,  /* nothing now */
    MB_HEALTH_CHECK, /* ask it; report the outcome with mb_health_result() */
    MB_HEALTH_DEAD   /* declared dead; said once */
};

struct mb_health {
    uint64_t next_ms; /* not to be asked before */
    unsigned failures;
    int asking;
    int dead;
};

void mb_health_init(struct mb_health *h, uint64_t now_ms);
void mb_health_heard(struct mb_health *h, uint64_t now_ms); /* a sync message arrived */
void mb_health_result(struct mb_health *h, int ok, uint64_t now_ms);
enum mb_health_action mb_health_tick(struct mb_health *h, uint64_t now_ms);

#endif
