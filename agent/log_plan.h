/*
 * What is to be done with one log file: note its size, send a piece to the job's store, release its
 * front. Pure: sizes and times come in, one step of actions goes out.
 *
 * Pieces begin at multiples of segment_bytes; the newest one is sent again and again as it grows,
 * so that a lost node loses SHIP_MS of output at most, and stores see few objects. The rest of a
 * log that has ended goes in small ones.
 */
#ifndef MOBULA_AGENT_LOG_PLAN_H
#define MOBULA_AGENT_LOG_PLAN_H

#include <stdint.h>
#include "base/joblimit.h"

enum {
    MB_LOG_PLAN_INDEX_MS = 1000,
    MB_LOG_PLAN_SHIP_MS = 30000,
    MB_LOG_PLAN_SEGMENT_MIN = 64 << 10,
    MB_LOG_PLAN_SEGMENT_MAX = 4 << 20,
    MB_LOG_PLAN_CAP_MIN = MB_JOBLIMIT_LOG_MIN_BYTES /* the smallest cap that is possible */
};

struct mb_log_plan {
    uint64_t cap_bytes; /* 0: none */
    uint64_t segment_bytes;
    uint64_t first;   /* bytes before it are released */
    uint64_t shipped; /* bytes before it are durable */
    uint64_t indexed; /* size that was noted last */
    uint64_t index_ms, ship_ms, retry_ms;
    unsigned failures; /* sends in a row that failed */
    int has_url, shipping, releasing;
    int held;            /* nothing is sent now; the owner sets it */
    int is_stale;        /* the store has bytes behind shipped that the writer took back */
    uint64_t ship_begin; /* of the newest send */
    /* What the store will never have, since it was released first: n_gaps ranges of together
     * gap_bytes, in [gap_begin, gap_end). Those that an earlier plan saw may be put here before the
     * first step. */
    uint64_t gap_begin, gap_end, gap_bytes;
    unsigned n_gaps;
};

struct mb_log_step {
    int index;
    int rewound; /* the log shrank: first and shipped went back, to be kept before anything else */
    int ship;    /* [ship_begin, ship_end) as one object named by ship_begin */
    uint64_t ship_begin, ship_end;
    int release; /* everything before release_end */
    uint64_t release_end;
};

void mb_log_plan_init(struct mb_log_plan *p, uint64_t first, uint64_t shipped, uint64_t cap_bytes);
/* ended: nothing more will be written, what is left is sent at once. */
struct mb_log_step mb_log_plan_next(struct mb_log_plan *p, uint64_t size, int ended,
                                    uint64_t now_ms);
void mb_log_plan_shipped(struct mb_log_plan *p, uint64_t end, uint64_t now_ms);
void mb_log_plan_ship_failed(struct mb_log_plan *p, uint64_t now_ms);
/* The log has ended: the next send is not put off by failures of before. */
void mb_log_plan_hurry(struct mb_log_plan *p);
void mb_log_plan_released(struct mb_log_plan *p, uint64_t end);
/* What would be sent if it ended with this size now. */
uint64_t mb_log_plan_owes(const struct mb_log_plan *p, uint64_t size);
/* 1: an ended log of this size needs nothing more. */
int mb_log_plan_done(const struct mb_log_plan *p, uint64_t size);

#endif
