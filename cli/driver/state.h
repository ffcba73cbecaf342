/*
 * The life of a gang as its driver sees it: a pure state machine. Events in, a set of actions out;
 * no clock, socket or file. The shell is driver.c.
 *
 *   connect -> own -> reserve -> dial -> launch -> rendezvous -> run -> end -> release -> over
 *
 * One machine is one attempt; whether another follows is decided by restart.h. A later one begins
 * with `pause` instead of `connect`.
 *
 * The first failure is kept as the verdict; whatever happens later, every node is told to end, what
 * was saved is given time to become durable, and the placement group is released.
 */
#ifndef MOBULA_CLI_DRIVER_STATE_H
#define MOBULA_CLI_DRIVER_STATE_H

#include <stdint.h>
#include "base/err.h"
#include "cli/driver/restart.h"

enum mb_drv_phase {
    MB_DRV_CONNECT,    /* handshake with the GCS */
    MB_DRV_PAUSE,      /* a later attempt only: until it may begin */
    MB_DRV_OWN,        /* a job (or Ray's supervisor actor) that owns the group */
    MB_DRV_RESERVE,    /* the placement group becomes CREATED, its nodes are looked up */
    MB_DRV_DIAL,       /* a control stream to every node */
    MB_DRV_LAUNCH,     /* every node starts its ranks */
    MB_DRV_RENDEZVOUS, /* workers only: every rank reports its endpoint */
    MB_DRV_RUN,        /* ranks work */
    MB_DRV_STOPPING,   /* ranks were asked to stop: a failure, or a signal to us */
    MB_DRV_END,        /* no rank is left; agents make durable what was saved */
    MB_DRV_RELEASE,    /* the placement group is removed, our job marked finished */
    MB_DRV_OVER,
    MB_DRV_N_PHASES
};

enum mb_drv_event_kind {
    MB_DRV_CONNECTED,
    MB_DRV_PAUSED, /* the pause is over */
    MB_DRV_OWNED,
    MB_DRV_RESERVED,      /* n_nodes */
    MB_DRV_HELLO,         /* node */
    MB_DRV_LAUNCHED,      /* node */
    MB_DRV_ENDPOINT,      /* rank */
    MB_DRV_RANK_EXIT,     /* rank, exit_code, signal, text = cause */
    MB_DRV_SAVED,         /* node, iteration */
    MB_DRV_COMMITTED,     /* iteration */
    MB_DRV_UPLOAD_FAILED, /* iteration: is given up; text */
    MB_DRV_NODE_FAILED,   /* node, code, text: the attempt cannot go on there */
    MB_DRV_NODE_LOST,     /* node, text: no stream for the length of the lease */
    MB_DRV_NODE_ENDED,    /* node: nothing of the attempt is left there */
    MB_DRV_FAILED,        /* code, text: a request of the driver itself failed */
    MB_DRV_INTERRUPTED,   /* signal: somebody wants us to stop */
    MB_DRV_RELEASED,
    MB_DRV_DEADLINE, /* node, code, text: the ranks save and end; with a code they did not get to it
                      */
    MB_DRV_STORE_SAID, /* it was asked; what is durable was told as COMMITTED */
    MB_DRV_N_EVENTS
};

struct mb_drv_event {
    enum mb_drv_event_kind kind;
    uint32_t node;
    uint32_t rank;
    int code; /* MB_E* */
    int exit_code;
    int signal;
    uint32_t n_nodes; /* those that the attempt got; 0: all of the configuration */
    int64_t iteration;
    int is_outdated;  /* UPLOAD_FAILED: of what is durable as it was before */
    const char *text; /* borrowed; NULL: none */
};

/* Bits of the result of mb_drv_step(). */
enum mb_drv_action {
    MB_DRV_DO_OWN = 1,
    MB_DRV_DO_RESERVE = 2,
    MB_DRV_DO_DIAL = 4,
    MB_DRV_DO_LAUNCH = 8,
    MB_DRV_DO_START = 16, /* broadcast the endpoints */
    MB_DRV_DO_STOP = 32,  /* every node: stop your ranks */
    MB_DRV_DO_END = 64, /* every node: drain, release, say Ended; again when one is done or lost */
    MB_DRV_DO_RELEASE = 128,
    MB_DRV_DO_FINISH = 256,   /* the loop may end: see mb_drv_exit_status() */
    MB_DRV_DO_ASK_STORE = 512 /* which of mb_drv_open() are durable? */
};

struct mb_drv_config {
    uint32_t n_nodes; /* at most; RESERVED may say fewer */
    uint32_t ranks_per_node;
    int is_worker;      /* ranks report endpoints and want a start message */
    int has_url;        /* what is saved must be committed */
    uint32_t keep_last; /* so many durable iterations stay in the store; 0: all */
    int is_again;       /* not the first attempt: begins with PAUSE */
    int64_t committed;  /* is_again: what earlier attempts made durable, -1: nothing */
};

/* A node said hello again after its stream broke. */
enum mb_drv_dialled {
    MB_DRV_GOES_ON,      /* ask again for what was asked */
    MB_DRV_LAUNCH_AGAIN, /* the launch never arrived */
    MB_DRV_HAS_ENDED,    /* it did what it was asked for; its last words were lost */
    MB_DRV_GANG_LOST     /* its agent came back without the gang */
};
/* runs: the agent has the gang. asked: Launch was sent; heard: Launched came; let_go: Stop or End
 * was sent. */
enum mb_drv_dialled mb_drv_dialled(int runs, int asked, int heard, int let_go);

struct mb_drv; /* opaque */

struct mb_drv *mb_drv_create(const struct mb_drv_config *config); /* NULL: memory is out */
void mb_drv_destroy(struct mb_drv *d);

/* One event. Returns actions (bits), or MB_ESTATE for an event that this phase does not know: a
 * broken promise from inside, nothing was changed. */
int mb_drv_step(struct mb_drv *d, const struct mb_drv_event *e);

enum mb_drv_phase mb_drv_phase(const struct mb_drv *d);
const char *mb_drv_phase_name(enum mb_drv_phase phase);
const char *mb_drv_event_name(enum mb_drv_event_kind kind);
int64_t mb_drv_saved(const struct mb_drv *d);     /* newest iteration on local disk, -1: none */
int64_t mb_drv_committed(const struct mb_drv *d); /* newest durable iteration, -1: none */
/* 1: not known to be durable so far, by this attempt or (all up to config's committed) earlier
 * ones: commits come in any order. */
int mb_drv_is_open(const struct mb_drv *d, int64_t iteration);
/* The oldest iteration above `after` that this attempt saved, that has to be durable and is not
 * known to be; -1: there is none. */
int64_t mb_drv_open(const struct mb_drv *d, int64_t after);
int mb_drv_node_ended(const struct mb_drv *d, uint32_t node);
/* 1: it is gone; what it has not sent by now never comes. */
int mb_drv_node_lost(const struct mb_drv *d, uint32_t node);
/* The newest iteration that every node has saved, of the nodes whose ranks' ends were all heard:
 * they say no more. What is newer can never be complete. INT64_MAX: nothing is known. */
int64_t mb_drv_newest_on_all(const struct mb_drv *d);
/* "" while all is well; else the first thing that went wrong, one line. */
const char *mb_drv_verdict(const struct mb_drv *d);
/* 1: the gang ends in good order (a signal, a node that leaves): ranks have their grace to save. */
int mb_drv_ends_in_order(const struct mb_drv *d);
/* Changes with every verdict: one that is replaced has to be told again. */
unsigned mb_drv_verdict_number(const struct mb_drv *d);
/* What failed, for the decision about another attempt: MB_FAILURE_NONE while all is well, after a
 * signal to us, and for what another attempt cannot mend. */
struct mb_failure mb_drv_failure(const struct mb_drv *d);
/* 1: the ranks end because of a deadline, in good order so far. */
int mb_drv_at_deadline(const struct mb_drv *d);
/* 1: there is one that may be told. */
int mb_drv_verdict_stands(const struct mb_drv *d);
/* 0 only if every rank exited 0 and all that had to be durable is. */
int mb_drv_exit_status(const struct mb_drv *d);

#endif
