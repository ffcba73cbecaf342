/*
 * Is a node alive? Pure: time comes in, the next thing to do comes out.
 * What the node sends by itself counts as alive; after 2 s of silence it is asked, each question
 * has 1.5 s. From the first failure on it is asked again every 1.5 s, and so is its second channel,
 * its HTTP port. DEAD needs both: three failures in a row, two of the second channel in a row, and
 * 7 s of silence; so a hung node is found within 8 s (Ray: 63 s), and one whose gRPC is held up is
 * not taken for dead. But not for ever: what cannot be asked for a minute cannot be used either.
 */
#ifndef MOBULA_GCS_HEALTH_H
#define MOBULA_GCS_HEALTH_H

#include <stdint.h>

enum {
    MB_HEALTH_PERIOD_MS = 2000,  /* silence that leads to a question */
    MB_HEALTH_TIMEOUT_MS = 1500, /* of a question, and until the next after it failed */
    MB_HEALTH_FAILURES = 3,
    MB_HEALTH_FAILURES_ALONE = 4, /* of a node that has no second channel */
    MB_HEALTH_SECOND_FAILURES = 2,
    MB_HEALTH_SILENCE_MS = 7000,    /* a restart of the agent takes up to 5 s */
    MB_HEALTH_DOUBT_MAX_MS = 60000, /* of silence, whatever the second channel says */
    MB_HEALTH_BOUND_MS = 9000       /* of silence on both channels; callers tick every 500 ms */
};

enum mb_health_action {
    MB_HEALTH_WAIT,   /* nothing now */
    MB_HEALTH_CHECK,  /* ask it; report the outcome with mb_health_result() */
    MB_HEALTH_SECOND, /* ask its second channel; report it with mb_health_second() */
    MB_HEALTH_DEAD    /* declared dead; said once */
};

struct mb_health {
    uint64_t heard_ms;
    uint64_t next_ms, second_next_ms; /* not to be asked before */
    unsigned failures, second_failures;
    int asking, asking_second;
    int has_second;
    int dead;
    int in_doubt; /* said so, and nothing was heard since */
};

void mb_health_init(struct mb_health *h, int has_second, uint64_t now_ms);
void mb_health_heard(struct mb_health *h, uint64_t now_ms); /* a sync message arrived */
void mb_health_result(struct mb_health *h, int ok, uint64_t now_ms);
/* 1: a doubt begins that is to be told to people. */
int mb_health_second(struct mb_health *h, int ok);
/* To be repeated until it says WAIT or DEAD. */
enum mb_health_action mb_health_tick(struct mb_health *h, uint64_t now_ms);
/* Of a node that is dead: Ray's words, or what the second channel had said. */
const char *mb_health_reason(const struct mb_health *h);

#endif
