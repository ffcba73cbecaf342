/*
 * When a supervisor signals and kills: pure decisions, no clock, no process. Times are monotonic
 * milliseconds given by the caller. libc only.
 *
 *   state     event                              next
 *   RUNNING   stop asked, init lost, SIGTERM     STOPPING  (signal the tree, kill_at = now + grace)
 *   RUNNING   a child failed, policy set         RUNNING, STOPPING end_peers_after_ms later
 *   RUNNING   every child exited, orphans left   STOPPING  (leftover grace, no reason)
 *   any       kill asked                         KILLING
 *   STOPPING  stop asked again                   STOPPING  (the earlier deadline counts)
 *   STOPPING  kill_at reached                    KILLING   (kill the tree, again and again)
 *   any       nothing left and all exited        ENDED
 */
#ifndef MOBULA_AGENT_SUPERVISE_PLAN_H
#define MOBULA_AGENT_SUPERVISE_PLAN_H

#include <stdint.h>
#include "agent/supervise/spec.h"

enum mb_sup_plan_state {
    MB_SUP_PLAN_RUNNING,
    MB_SUP_PLAN_STOPPING,
    MB_SUP_PLAN_KILLING,
    MB_SUP_PLAN_ENDED
};

enum mb_sup_action {
    MB_SUP_ACT_NONE,
    MB_SUP_ACT_SIGNAL, /* plan->signal to the whole tree, once; else mb_sup_plan_signal_failed() */
    MB_SUP_ACT_KILL    /* SIGKILL to the whole tree, then ask again at the next deadline */
};

enum { MB_SUP_KILL_AGAIN_MS = 20 };

struct mb_sup_plan {
    enum mb_sup_plan_state state;
    const struct mb_sup_spec *spec; /* borrowed */
    int signal;                     /* of STOPPING */
    int signal_due;                 /* STOPPING has not signalled yet */
    uint64_t signal_at_ms;          /* signal_due: not before */
    uint64_t asked_ms;              /* when STOPPING began */
    uint64_t kill_at_ms;            /* STOPPING: when to kill; KILLING: when to kill again */
    uint64_t peers_at_ms;           /* when a failed child ends its peers; 0: never */
    char reason[MB_SUP_TEXT_MAX];   /* why the tree is being ended; "" none */
};

void mb_sup_plan_init(struct mb_sup_plan *plan, const struct mb_sup_spec *spec);

void mb_sup_plan_child_failed(struct mb_sup_plan *plan, unsigned child, uint64_t now_ms);
/* signal 0: the spec's. */
void mb_sup_plan_stop(struct mb_sup_plan *plan, const char *reason, int signal, uint32_t grace_ms,
                      uint64_t now_ms);
void mb_sup_plan_kill(struct mb_sup_plan *plan, const char *reason, uint64_t now_ms);
/* Every child of the spec has exited, but something they started is left. */
void mb_sup_plan_leftovers(struct mb_sup_plan *plan, uint64_t now_ms);
/* Every child has exited and nothing is left. */
void mb_sup_plan_nothing_left(struct mb_sup_plan *plan);

/* The signal of MB_SUP_ACT_SIGNAL went out at now_ms: the grace counts from then on. */
void mb_sup_plan_signalled(struct mb_sup_plan *plan, uint64_t now_ms);
/* The signal of MB_SUP_ACT_SIGNAL could not be sent: it is due again. */
void mb_sup_plan_signal_failed(struct mb_sup_plan *plan, uint64_t now_ms);

/* What is due now. */
enum mb_sup_action mb_sup_plan_tick(struct mb_sup_plan *plan, uint64_t now_ms);
/* When to tick again at the latest; UINT64_MAX: only after an event. */
uint64_t mb_sup_plan_next_ms(const struct mb_sup_plan *plan);

#endif
