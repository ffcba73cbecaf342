/*
 * When the last checkpoint has to begin so that it is in the store before the node or the job is
 * gone. Pure: no clock, process or store; facts and the time come in, one action goes out. The
 * shell is gang_deadline.c; the order of uploads is agent/upload/plan.c.
 *
 * The latest moments are worked backwards from the deadline:
 *
 *     save_at            local_at                      deadline
 *        |<- step, save ->|<------- upload, commit ------->|<- margin ->|
 *                         |<- step, save ->| (upload or not)
 *
 * What logs owe the store goes over the same link: they wait while the last checkpoint is sent, and
 * the job is over when they are there. So their time is taken off save_at, too, up to that of the
 * upload; a log that owes more than that has a store that does not keep up with it.
 *
 * A deadline by the clock (--deadline, activeDeadlineSeconds) lets the ranks work until save_at. A
 * node that goes (SIGTERM, a notice, a drain) saves and ends at once. A save that fits is done even
 * if its upload does not: a shared volume, or a node that comes back, still has it; the plan says
 * so. What never was measured is measured by a save of its own, early enough.
 */
#ifndef MOBULA_AGENT_DEADLINE_H
#define MOBULA_AGENT_DEADLINE_H

#include <stddef.h>
#include <stdint.h>

enum mb_deadline_source {
    MB_DEADLINE_NONE,
    MB_DEADLINE_RUN,       /* --deadline, MOBULA_DEADLINE */
    MB_DEADLINE_ESTIMATED, /* MOBULA_ACTIVE_DEADLINE_SECONDS, from the node's own start */
    MB_DEADLINE_DRAIN,     /* somebody asked: the node goes, from here on */
    MB_DEADLINE_NOTICE,    /* a spot notice */
    MB_DEADLINE_SIGTERM,   /* with its grace period */
    MB_DEADLINE_RAYJOB,    /* as the RayJob has it; last, for the numbers are on disk */
    MB_DEADLINE_N_SOURCES
};

struct mb_deadline {
    uint64_t unix_ms; /* 0: none */
    enum mb_deadline_source source;
    int leaves; /* the node goes: there is no reason to work until the last moment */
    uint64_t said_ms[MB_DEADLINE_N_SOURCES]; /* what each source said; 0: nothing */
};

#define MB_DEADLINE_NEVER UINT64_MAX /* of a RayJob: it has none, whatever was estimated */

/* When a job that may run for active_ms is to be done: early_ms before its end, but half of its
 * time is left to work in. */
uint64_t mb_deadline_of_job(uint64_t started_unix_ms, uint64_t active_ms, uint64_t early_ms);

/* The earliest one wins; unix_ms 0 is none and only tells that the node goes. What one source says
 * later counts if it is earlier, but a RayJob's always: somebody edited it, and it takes the place
 * of what was estimated for it. 1: something changed. */
int mb_deadline_add(struct mb_deadline *d, enum mb_deadline_source source, uint64_t unix_ms);
const char *mb_deadline_source_name(enum mb_deadline_source s);

/*
 * How fast bytes get into the store, from bytes that were acknowledged. Never more than what was
 * seen: a window is at least a second of sending and ends with bytes, so a stall stretches it; the
 * answer is the lower one of the newest windows and of all that are kept.
 */
enum { MB_RATE_WINDOWS = 8, MB_RATE_WINDOW_MS = 1000 };
struct mb_rate {
    struct {
        uint64_t ms, bytes;
    } closed[MB_RATE_WINDOWS]; /* newest first */
    size_t n_closed;
    uint64_t open_ms, open_bytes;
    uint64_t last_ms, last_total;
    int was_busy, has_last;
};
/* total_bytes only grows; is_busy: there was something to send until now. */
void mb_rate_note(struct mb_rate *r, uint64_t now_ms, uint64_t total_bytes, int is_busy);
uint64_t mb_rate_bytes_per_s(const struct mb_rate *r); /* 0: not known */

/* A duration of which zero is a value; ask is_known first. */
struct mb_measured {
    uint64_t ms;
    int is_known;
};
/* The newest counts, but a shorter one only takes a quarter of the way down. */
void mb_measured_note(struct mb_measured *m, uint64_t ms);

struct mb_deadline_facts {
    uint64_t now_ms; /* unix, as all times here */
    struct mb_deadline deadline;
    int ranks_run;
    int can_save_now; /* they can be asked for a save and go on; else only a stop makes them save */
    int measures;     /* this node asks for a save that is to be measured: one of a gang does */
    int saves;        /* a save is to be expected of them at all */
    int has_store;    /* ... and has to get into a store */
    int64_t iteration;             /* newest that is finished, -1: unknown */
    int64_t saved;                 /* newest on disk, -1: none */
    struct mb_measured step, save; /* one iteration; from the request's step to the disk */
    struct mb_measured commit;     /* from the last byte to the pointer */
    uint64_t checkpoint_bytes;     /* what a save leaves for this node to send; 0: unknown */
    uint64_t rate_bytes_per_s;     /* 0: unknown */
    uint64_t pending_bytes;        /* of older iterations, not sent yet */
    uint64_t log_bytes;            /* of logs, which go when the checkpoint is durable */
    uint64_t stop_grace_ms;        /* what ranks get at most between the stop and the kill */
};

enum mb_deadline_action {
    MB_DEADLINE_GO_ON,
    MB_DEADLINE_SAVE_NOW,     /* and go on */
    MB_DEADLINE_SAVE_AND_END, /* the ranks save, then end */
    MB_DEADLINE_END,          /* no time for a save, or for the one that was asked for: end them */
    MB_DEADLINE_N_ACTIONS
};
const char *mb_deadline_action_name(enum mb_deadline_action a);

/* What was decided so far; begins as zeroes. */
struct mb_deadline_state {
    int asked_save; /* the early one, for the measures */
    int asked_end;  /* SAVE_AND_END: from then on only END follows, and only at kill_at_ms */
    int ended;
    uint64_t seen_ms; /* when the deadline was seen first */
};

struct mb_deadline_plan {
    enum mb_deadline_action action;
    uint64_t save_at_ms;  /* latest request of a save that gets into the store; 0: no such moment */
    uint64_t local_at_ms; /* latest request of one that gets to the disk; 0: no such moment */
    uint64_t kill_at_ms;  /* ranks that still run by then are ended */
    uint64_t done_at_ms;  /* when the save that the action asks for is expected to be durable */
    int is_local_only;    /* ... it is not: its upload does not fit */
    const char *why;      /* static; "" with GO_ON */
};

/* One look: writes the plan, and what it asks for into the state. Each action comes once. */
void mb_deadline_step(struct mb_deadline_state *s, const struct mb_deadline_facts *f,
                      struct mb_deadline_plan *plan);

/* How long ranks may take from the stop to the kill: what the deadline leaves, at most the grace
 * they were given, never less than a second. */
uint64_t mb_deadline_grace_ms(const struct mb_deadline_plan *plan, uint64_t now_ms,
                              uint64_t stop_grace_ms);

/* What is told to people: NULL, or what is broken. */
const char *mb_deadline_invariant(const struct mb_deadline_facts *f,
                                  const struct mb_deadline_plan *plan);

#endif
