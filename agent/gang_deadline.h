/*
 * The deadlines of one attempt on this node: collects what deadline.c wants to know, and carries
 * out what it says. Inside of gang_run.h.
 */
#ifndef MOBULA_AGENT_GANG_DEADLINE_H
#define MOBULA_AGENT_GANG_DEADLINE_H

#include <stdint.h>
#include "agent/deadline.h"
#include "agent/upload/upload.h"

enum { MB_GANG_DEADLINE_SEEN = 64, MB_GANG_DEADLINE_UPLOADS = 8 };

struct mb_gang_run;
struct mb_gang_rank;

/* What was heard of an upload that is not over yet. */
struct mb_gang_upload {
    int64_t iteration;
    uint64_t parts_done;
    uint64_t sent_ms; /* monotonic, when its last byte was; 0: not yet */
};

struct mb_gang_deadline {
    struct mb_deadline until;
    struct mb_deadline_state state;
    struct mb_deadline_plan plan; /* of the newest look */
    struct mb_rate rate;
    struct mb_measured step, save, commit;
    struct { /* when the newest iterations were reported, newest last */
        int64_t iteration;
        uint64_t ms; /* monotonic */
    } seen[MB_GANG_DEADLINE_SEEN];
    size_t n_seen;
    int64_t saved;             /* newest that all ranks here have on disk, -1: none */
    int64_t durable;           /* newest, -1: none of this agent's life */
    uint64_t checkpoint_bytes; /* of this node; 0: unknown */
    struct mb_gang_upload uploads[MB_GANG_DEADLINE_UPLOADS]; /* oldest first */
    size_t n_uploads;
    uint64_t parts, retries; /* of uploads, since this agent knows the gang */
    uint64_t n_saves,
        stall_ms;     /* of the first rank here that tells how long training stood still */
    uint64_t next_ms; /* monotonic, of the next look */
    int n_mute;       /* looks in a row without a driver while the node goes */
    int is_told_late; /* that the deadline passed before all was durable */
};

void mb_gang_deadline_init(struct mb_gang_deadline *d);
/* Another deadline, or the same one again. unix_ms 0: no time, but the node goes. Looks at once. */
void mb_gang_deadline_add(struct mb_gang_run *r, enum mb_deadline_source source, uint64_t unix_ms);
/* 1: its last checkpoint is being saved or sent, and there is time: logs wait. */
int mb_gang_deadline_holds_logs(const struct mb_gang_run *r);
/* Until when (mono) logs of ranks that have ended may be sent; 0: no such bound. */
uint64_t mb_gang_deadline_of_logs(const struct mb_gang_run *r);
void mb_gang_deadline_tick(struct mb_gang_run *r, uint64_t now_ms);

/* ---- what is measured ---- */
void mb_gang_deadline_progress(struct mb_gang_run *r, int64_t iteration);
/* stall_ms: how long training stood still for it, -1: not told. */
void mb_gang_deadline_saved(struct mb_gang_rank *rank, int64_t iteration, uint64_t bytes,
                            int64_t stall_ms);
void mb_gang_deadline_upload(struct mb_gang_run *r, const struct mb_upload_status *status);

/* The rank's socket is ours: it is asked again for what a former agent may have asked it for. */
void mb_gang_deadline_repeat(struct mb_gang_rank *rank);

/* What is not durable yet, oldest first; at most max. */
size_t mb_gang_deadline_pending(const struct mb_gang_run *r, struct mb_upload_status *out,
                                size_t max);

/* The node goes: as add, and the attempt is stopped, with the grace that is left. */
void mb_gang_deadline_leave(struct mb_gang_run *r, enum mb_deadline_source source, uint64_t unix_ms,
                            const char *why);
/* Another node of the gang goes and has so long: a save of all ranks needs the same time here. */
void mb_gang_deadline_peer_leaves(struct mb_gang_run *r, uint64_t grace_ms);

#endif
