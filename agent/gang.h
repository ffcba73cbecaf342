/*
 * One attempt of a gang on one node, as a pure state machine: events in, next state and actions
 * out. No clock, process, file or stream in it; the shell (gang_io.c, control.c) turns what happens
 * into events and carries out the actions.
 *
 * An attempt leaves DRAINING only when somebody released it (End or Stop of the driver, an expired
 * lease, removed bundles, a newer attempt) and nothing is left to upload: what was saved outlives
 * its driver.
 */
#ifndef MOBULA_AGENT_GANG_H
#define MOBULA_AGENT_GANG_H

#include <stddef.h>
#include <stdint.h>
#include "base/err.h"

enum mb_gang_state {
    MB_GANG_CREATED,    /* Hello seen, bundle committed */
    MB_GANG_LAUNCHING,  /* checkpoint is pulled, processes are started */
    MB_GANG_RENDEZVOUS, /* workers run and wait for Start */
    MB_GANG_RUNNING,
    MB_GANG_STOPPING, /* stop signal sent, SIGKILL follows after the grace */
    MB_GANG_DRAINING, /* no process is left; uploads go on, the driver has not let go */
    MB_GANG_ENDED,    /* nothing of the attempt is left on this node */
    MB_GANG_N_STATES
};

enum mb_gang_event {
    MB_GANG_EV_LAUNCH,
    MB_GANG_EV_LAUNCH_FAILED, /* before any process existed */
    MB_GANG_EV_WORKERS_UP,    /* every rank was spawned; they speak report.h */
    MB_GANG_EV_COMMANDS_UP,   /* every rank was spawned; they are ordinary commands */
    MB_GANG_EV_START,         /* the driver has all endpoints */
    MB_GANG_EV_RANK_FAILED,   /* a rank exited with a failure */
    MB_GANG_EV_ALL_EXITED,    /* no process is left */
    MB_GANG_EV_STOP,          /* driver: Stop */
    MB_GANG_EV_END,           /* driver: End */
    MB_GANG_EV_LEASE_EXPIRED, /* nobody renewed */
    MB_GANG_EV_BUNDLES_REMOVED,
    MB_GANG_EV_SUPERSEDED,   /* a newer attempt said Hello */
    MB_GANG_EV_HALT,         /* the ranks are to end; the driver has more to say, End at last */
    MB_GANG_EV_UPLOADS_BUSY, /* something saved is not durable yet */
    MB_GANG_EV_UPLOADS_IDLE,
    MB_GANG_EV_DRAINED, /* made by the machine itself */
    MB_GANG_N_EVENTS
};

/* What the shell has to do after an event, a set. */
enum mb_gang_action {
    MB_GANG_ACT_LAUNCH = 1,     /* pull and spawn */
    MB_GANG_ACT_SEND_START = 2, /* endpoints to the workers */
    MB_GANG_ACT_STOP_RANKS = 4, /* stop signal, grace, SIGKILL */
    MB_GANG_ACT_FREE_NODE = 8,  /* processes are gone: devices may be given back */
    MB_GANG_ACT_RELEASE = 16    /* Ended to the driver, forget the attempt */
};

struct mb_gang {
    enum mb_gang_state state;
    int released; /* somebody let go: DRAINING may end */
    int is_up;    /* every rank was spawned: the driver hears of each one's exit */
    int uploads_busy;
    uint64_t lease_ms;       /* 0: not set yet */
    uint64_t lease_until_ms; /* monotonic */
    uint64_t cut_off_ms;     /* without a word of the driver, while the node is cut off; 0: lease */
    const char *cause;       /* why it is ending: a static text, "" = by itself */
};

void mb_gang_init(struct mb_gang *g);
/* Takes the event; *actions is a set of enum mb_gang_action. MB_ESTATE: not possible in this state,
 * nothing changed, err says so. */
int mb_gang_step(struct mb_gang *g, enum mb_gang_event event, unsigned *actions,
                 struct mb_err *err);

/* The lease: set by Hello (bounded to 1 s .. 1 h), moved by Renew and by any message. */
void mb_gang_lease(struct mb_gang *g, uint64_t lease_ms, uint64_t now_ms);
void mb_gang_renew(struct mb_gang *g, uint64_t now_ms);
/* 1 once when the lease has run out: the shell then steps LEASE_EXPIRED. */
int mb_gang_lease_is_over(struct mb_gang *g, uint64_t now_ms);

/* The node hears nothing of its head: it may be cut off, and its driver be well. cut_off_ms of
 * Hello, bounded to 10 min. 1: what is left of the lease does not count yet. */
void mb_gang_cut_off(struct mb_gang *g, uint64_t cut_off_ms);
int mb_gang_waits_cut_off(const struct mb_gang *g, uint64_t now_ms);
/* The head is heard again: the driver has a lease's time to come back. */
void mb_gang_cut_is_over(struct mb_gang *g, uint64_t now_ms);
/* The driver's stream ended. One that spoke until then hung up; no cut network did that. */
void mb_gang_stream_ended(struct mb_gang *g, uint64_t now_ms);

/* 1 while processes may exist. */
int mb_gang_has_processes(const struct mb_gang *g);
const char *mb_gang_state_name(enum mb_gang_state s);
/* MB_GANG_N_STATES if there is no such name. */
enum mb_gang_state mb_gang_state_parse(const char *name);
const char *mb_gang_event_name(enum mb_gang_event e);
const char *mb_gang_invariant(const struct mb_gang *g); /* NULL, or what is broken */

#endif
